# The configuration, read and checked; all that the rules know of it comes from workflows.configuration.
import json
import os
import sys

from workflows.configuration import Configuration
from workflows.console import Console, leave_servers, require_executor, start_servers

# Rules call `python`: the one that runs Snakemake, whether or not its environment is activated.
# Snakemake's own prefix, which this one replaces, makes a pipe fail with any of its commands.
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
if workflow.remote_exec:  # one job of a call that runs on another machine
    leave_servers(workflow_config)


def cores():
    """Of a node that runs are handed to, else those that this call of Snakemake has."""
    return workflow_config.node["cores"] if workflow_config.node else workflow.cores


wildcard_constraints:
    exhibit="|".join(workflow_config.built),
    paper="|".join(workflow_config.papers),
    run_id="[a-z0-9._-]+",
