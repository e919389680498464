# The configuration, read and checked; all that the rules know of it comes from workflows.configuration.
import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from workflows.configuration import Configuration
from workflows.console import Console

# Rules call `python`: the one that runs Snakemake, whether or not its environment is activated.
shell.prefix(f"export PATH={os.path.dirname(sys.executable)}:$PATH; ")
KNOWN = Configuration(config, sys.argv[1:])
RAW, DERIVED, FIGURES = KNOWN.raw, KNOWN.derived, KNOWN.figures
CONSOLE = Console(KNOWN, sys.argv[1:])


def start_servers():
    """The processes that runs and pictures are forked from: a third of a short run, and most of a picture, is imports.

    They end with this one; the folder of their sockets does too, or is collected like those of killed runs.
    """
    folder = tempfile.mkdtemp(prefix="memascend-run-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    servers = {
        "MEMASCEND_FORK_SERVER": "workflows.run.fork_server",
        "MEMASCEND_DRAW_SERVER": "workflows.derive.server",
    }
    for variable, module in servers.items():
        place = Path(folder, module)
        place.mkdir()
        log = Path(RAW, "logs", f"{module}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            subprocess.Popen(
                [sys.executable, "-m", module, str(place / "socket")],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        os.environ[variable] = str(place / "socket")
    os.environ["MEMASCEND_EXHIBITS"] = KNOWN.exhibits_of_runs


wildcard_constraints:
    exhibit="|".join(KNOWN.built),
    paper="|".join(KNOWN.papers),
    run_id="[a-z0-9._-]+",
