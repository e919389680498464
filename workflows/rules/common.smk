# Read and check the configuration; the rules access it only through workflows.configuration.
import json
import os
import sys

from workflows.configuration import Configuration
from workflows.console import Console, leave_servers, require_executor, start_servers

# Rules call `python`, which is the interpreter that runs Snakemake, even if its environment is not activated. This
# prefix replaces Snakemake's own, which makes a pipe fail if any of its commands fails.
shell.prefix(
    f"set -euo pipefail; export PATH={os.path.dirname(sys.executable)}:$PATH; "
)
workflow_config = Configuration(config, sys.argv[1:])
RAW, DERIVED, FIGURES = (
    workflow_config.raw,
    workflow_config.derived,
    workflow_config.figures,
)
CONSOLE = Console(workflow_config, sys.argv[1:])
if workflow.remote_exec:  # this process is one job of a call, on another machine
    leave_servers(workflow_config)


def cores():
    """Return the cores of the node that runs are submitted to, else those of this call of Snakemake."""
    return workflow_config.node["cores"] if workflow_config.node else workflow.cores


wildcard_constraints:
    exhibit="|".join(workflow_config.built),
    paper="|".join(workflow_config.papers),
    run_id="[a-z0-9._-]+",
