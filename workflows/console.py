"""Terminal output while Snakemake works: which job starts, how many are left, about how long, and how it ended.

Snakemake's own log file (.snakemake/log) keeps everything.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from workflows.configuration import score
from workflows.refusals import fail
from workflows.run import no_result
from workflows.run.children import scratch_folder
from workflows.run.provenance import EXHIBITS, HOST

if TYPE_CHECKING:
    from workflows.configuration import Configuration

HIDDEN = (
    "JOB_INFO",
    "JOB_STARTED",
    "JOB_FINISHED",
    "PROGRESS",
    "SHELLCMD",
    "RUN_INFO",
    "RESOURCES_INFO",
    "WORKFLOW_STARTED",
)
RECORDS = ("record", "forked_record")
DERIVED = {"forked_record": "record", "figure": "picture of", "drawing": "picture of", "modelled": "modelled lane of"}
PLAIN_S = 0.5  # estimated seconds per picture or page
# A word of a call that runs nothing. Short options without a value may be joined, as in -np.
_RUNS_NOTHING = re.compile(r"--dry-?run|--lint|-[npfFkt]*n[npfFkt]*")


class Console(logging.Filter):
    """Filter on Snakemake's terminal handler that prints short lines in place of job text; warnings and errors pass."""

    def __init__(self, known: Configuration, words: list[str]) -> None:
        super().__init__()
        self.known, self.began = known, time.monotonic()
        self.runs_nothing = any(map(_RUNS_NOTHING.fullmatch, words))
        self.quiet = not self.runs_nothing and "--verbose" not in words
        self.total, self.done = 0, 0
        self.left: dict[str, float | None] = {}  # expected seconds of runs that have not ended; None: unknown
        self.not_asked = 0  # how many of them this call does not run; Snakemake does not say which in advance
        self.running: dict[int, tuple[str, float]] = {}
        self.took: list[float] = []
        self.without: list[str] = []  # one line per run that ended without a result

    def attach(self) -> None:
        """Install the filter on Snakemake's terminal handler; do nothing if another log handler is in use.

        With `--config retry=1`, earlier failures are forgotten first so that those runs are tried again.
        """
        if not self.runs_nothing and self.known.config.get("retry", 0):
            no_result.forget_failures(Path(self.known.raw))
        for handler in logging.getLogger("snakemake.logging").handlers if self.quiet else ():
            if handler.name == "DefaultStreamHandler":
                handler.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether Snakemake's own record is shown.

        Snakemake calls this from its threads, which an exception would end; so a closed pipe (`| head`) only silences
        it.
        """
        try:
            return self._is_shown(record)
        except BrokenPipeError:
            return False

    def _is_shown(self, record: logging.LogRecord) -> bool:
        """Count and announce what a record says about jobs; return whether Snakemake's own line is shown."""
        event = getattr(getattr(record, "event", None), "name", None)
        if event == "RUN_INFO":
            self._plan(record.stats)
        elif event == "JOB_INFO":
            self._start(record)
        elif event == "JOB_FINISHED":
            self.done += 1
            name, began = self.running.pop(record.job_id, ("", 0.0))
            if self.left.pop(name, self) is not self:
                self.took.append(time.monotonic() - began)
                if reason := no_result.reason(Path(self.known.raw, f"{name}.json")):
                    self.without.append(f"  {name}: no result, {reason}")
                    print(self.without[-1], file=sys.stderr, flush=True)
        elif event is None and record.levelno < logging.WARNING:
            return self.done == 0 and "Nothing to be done" in str(record.msg)
        return event not in HIDDEN

    def _plan(self, stats: dict[str, int]) -> None:
        """Note the numbers of jobs and the expected seconds of the runs."""
        self.total = stats.get("total", sum(stats.values()))
        asked = sum(stats.get(rule, 0) for rule in RECORDS)
        self.left = {run: self.known.seconds(run) for run in self.known.runs} if asked else {}
        self.not_asked = len(self.left) - asked if asked else 0

    def _start(self, job: logging.LogRecord) -> None:
        """Print the line of a job that starts; targets have none."""
        name = job.wildcards.get("run_id") or job.wildcards.get("exhibit") or job.wildcards.get("paper")
        self.running[job.jobid] = name or job.rule_name, time.monotonic()
        if name is None and job.rule_name not in ("claims_table", "report_pages"):
            return  # a target, which runs nothing
        seconds = self.known.seconds(name) if job.rule_name in RECORDS else None
        about = f", about {length(seconds)}" if seconds else ""
        words = f"{DERIVED.get(job.rule_name, job.rule_name.replace('_', ' '))} {name or ''}".rstrip()
        print(f"[{self.done + 1:>3}/{self.total}] {words}{about}{self._rest()}", file=sys.stderr, flush=True)

    def _rest(self) -> str:
        """Return the estimated remaining time in words, or "" if nothing is known.

        Runs are expected to take as long as the last time; runs never timed take the mean of those that ended in this
        call.
        """
        unknown = sum(seconds is None for seconds in self.left.values())
        if unknown and not self.took:
            return ""
        seconds = sum(filter(None, self.left.values()))
        seconds += unknown * sum(self.took) / len(self.took) if unknown else 0.0
        runs = max(0, len(self.left) - self.not_asked)
        seconds = seconds * runs / max(1, len(self.left)) + PLAIN_S * max(0, self.total - self.done - runs)
        return f"; {length(seconds)} left"

    def end(self, targets: Collection[str]) -> None:
        """Print where to look, the score and what is not built; for single exhibits only their files."""
        papers = {self.known.target_of(paper): paper for paper in self.known.papers}
        if targets and set(targets) <= papers.keys() | set(self.known.built):
            # Their pictures alone have been made: the pages and the score would be those of an earlier call.
            for paper in (papers[target] for target in targets if target in papers):
                drawn = [exhibit for exhibit in self.known.built if self.known.entries[exhibit]["paper"] == paper]
                noun = "exhibit" if len(drawn) == 1 else "exhibits"
                print(f"Drawn: {Path(self.known.figures, f'{paper}-*.svg')}, {len(drawn)} {noun}")
            for exhibit in (target for target in targets if target not in papers):
                numbers = Path(self.known.derived, "exhibits", f"{exhibit}.csv")
                more = f", its numbers: {numbers}" if exhibit in self.known.with_table else ""
                print(f"Drawn: {Path(self.known.figures, f'{exhibit}.svg')}{more}")
                for record in map(Path, self.known.records_of(exhibit)):
                    if reason := no_result.reason(record):
                        print(f"  without {record.stem}: {reason}; to run it again: rm {record}, and the same command")
            if papers.keys() & set(targets):
                print("\n".join([*self.without, "The pages and the score: snakemake --cores all figures"]))
            return
        if targets and not {"figures", "artifact", "report"} & set(targets):
            return
        built, entries = self.known.built, self.known.entries
        lines = [f"Done in {length(time.monotonic() - self.began)}. Look at {Path(self.known.figures, 'index.html')}"]
        lines[0] += f" (all claims: {Path(self.known.figures, 'claims.html')})."
        lines += [f"  {where}: {text}" for where, text in score(Path(self.known.derived, "claims.csv")).items()]
        lines += self.without
        if failed := no_result.failures(Path(self.known.raw)):
            lines.append(f"{len(failed)} runs have failed, and are not tried again unless asked: --config retry=1")
        waiting = len(entries) - len(built)
        if waiting:
            lines.append(f"{len(built)} of {len(entries)} are built; what {waiting} wait for: snakemake exhibits")
        print("\n".join(lines))

    def failed(self, log: list[str]) -> None:
        """Print what is kept and how to continue; print nothing for a check of an artifact, which keeps nothing."""
        if "artifact-verify" in self.known.words:
            return
        words = "Stopped; what was finished is kept, and the same command goes on from there. Everything:"
        print(words, *log)


def length(seconds: float) -> str:
    """Return a duration as text: seconds, or minutes from a minute and a half on."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


RUNS, PICTURES = "MEMASCEND_FORK_SERVER", "MEMASCEND_DRAW_SERVER"
SERVERS = {RUNS: "workflows.run.fork_server", PICTURES: "workflows.derive.server"}


def require_executor(plugin: str) -> None:
    """End with one line if this machine lacks the program that submits runs, since every run would fail by itself."""
    if plugin == "slurm" and shutil.which("sbatch") is None:
        fail(
            "runs are jobs of Slurm, and this machine has no sbatch: call it on a login node, or leave the profile out"
        )


def start_servers(known: Configuration) -> None:
    """Start the processes that runs and pictures are forked from, because imports take a third of a short run and most
    of a picture.

    They end with this process, which also owns the folder of their sockets. Runs that are jobs of a cluster get no
    server: a forked process would belong to no job, and might not even run on the job's node.
    """
    name_host(known)
    stack = ExitStack()
    folder = stack.enter_context(scratch_folder())
    atexit.register(stack.close)
    logs = Path(known.raw, "logs")
    logs.mkdir(parents=True, exist_ok=True)
    for variable, module in SERVERS.items():
        if known.node and variable == RUNS:
            continue
        place = Path(folder, module)
        place.mkdir()
        command = [sys.executable, "-m", module, str(place / "socket")]
        with (logs / f"{module}.log").open("w") as output:
            subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        os.environ[variable] = str(place / "socket")
    os.environ[EXHIBITS] = known.exhibits_of_runs


def leave_servers(known: Configuration) -> None:
    """Drop the servers from the environment of a job on a node: they belong to the machine that submitted the job."""
    name_host(known)
    for variable in SERVERS:
        os.environ.pop(variable, None)
    os.environ[EXHIBITS] = known.exhibits_of_runs


def name_host(known: Configuration) -> None:
    """Set the configured host name for all records of this call; without one, the caller's setting stays."""
    if known.host:
        os.environ[HOST] = known.host
