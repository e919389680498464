# The configuration, read and checked; all that the rules know of it comes from workflows.configuration.
import json
import os
import sys

from workflows.configuration import Configuration
from workflows.console import Console, leave_servers, start_servers

# Rules call `python`: the one that runs Snakemake, whether or not its environment is activated.
shell.prefix(f"export PATH={os.path.dirname(sys.executable)}:$PATH; ")
KNOWN = Configuration(config, sys.argv[1:])
RAW, DERIVED, FIGURES = KNOWN.raw, KNOWN.derived, KNOWN.figures
CONSOLE = Console(KNOWN, sys.argv[1:])
if workflow.remote_exec:  # one job of a call that runs on another machine
    leave_servers(KNOWN)


def cores():
    """Of a node that runs are handed to, else those that this call of Snakemake has."""
    return KNOWN.node["cores"] if KNOWN.node else workflow.cores


wildcard_constraints:
    exhibit="|".join(KNOWN.built),
    paper="|".join(KNOWN.papers),
    run_id="[a-z0-9._-]+",
