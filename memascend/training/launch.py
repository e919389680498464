"""The parent process of a run: prepares it, starts the ranks, forwards signals and cleans up.

It imports neither torch nor DeepSpeed, so that it adds almost nothing to the memory that training uses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memascend.storage.atomic_write import write_atomically
from memascend.storage.folders import check_swap_folder, swap_folder
from memascend.storage.shared_memory import collect_shared_memory
from memascend.training import backends, checkpoint, left_states, preflight, processes, systems
from memascend.training import config as configs
from memascend.training.children import Stopping, Stuck, ends_of, kill, last_line, say, start_rank, stuck, wait
from memascend.training.config import TrainConfig
from memascend.training.folder import (
    Lock,
    RunFolder,
    SwapFolder,
    collect_dead,
    missing_folders,
    remove_empty,
)
from memascend.training.preparation import prepare, read_prepared
from memascend.training.processes import (
    NOTHING_TO_DO,
    free_port,
    remove_shared_buffers,
)
from memascend.training.progress import byte_count, nothing_to_do, read_metrics

_PREPARATION = datetime.timedelta(days=7)  # the limit of the default process group is minutes
SetupOf = Callable[[TrainConfig, dict[str, Any], str, str], backends.Setup]


def saved_config(folder: RunFolder) -> TrainConfig:
    """Return the run's saved configuration. Its output is `folder`, even if the folder was moved."""
    config = configs.complete(configs.read_config(folder.config))
    return dataclasses.replace(config, output=str(folder.root.absolute()))


def save_config(folder: RunFolder, config: TrainConfig) -> None:
    """Write the configuration to the run's folder, atomically. Raises OSError."""
    import yaml

    write_atomically(folder.config, yaml.safe_dump(config.as_dict(), sort_keys=False))


class NothingToDo(Exception):
    """Raised when the run is already as far as the call asks for, after a message was printed."""


def launch(
    config: TrainConfig,
    *,
    resume: bool,
    wanted: dict[str, Any],
    dry_run: bool = False,
    setup_of: SetupOf = systems.setup,
    temporary: bool = False,
    stopping: Stopping | None = None,
) -> int:
    """Train in child processes. Return the exit status: 0, or 130 (Ctrl-C) or 143 if the run was stopped.

    `wanted`: the keys that the caller set. `dry_run`: do everything that precedes the first step, and remove it again.
    `setup_of`: the function that makes the backend's setup. `temporary`: the caller removes the folder, so no printed
    message refers to it. `stopping`: records the signals that arrive meanwhile; their previous handlers are restored at
    the end. Raises a one-line ValueError for whatever the user can change.
    """
    folder = RunFolder(config.output_folder)
    stopping = stopping or Stopping()
    with (
        contextlib.suppress(NothingToDo),
        contextlib.ExitStack() as ends,
        _opened(folder, config, resume, wanted) as (config, before, lock),
    ):
        stopping.saves = config.checkpoints != "none"
        ends.callback(stopping.restore)
        stopping.install()
        if dry_run and resume and read_prepared(folder) is None:
            raise ValueError(
                f"--dry-run with --resume: the text of {folder.root} has to be prepared again, which writes there: "
                "leave --dry-run out"
            )
        stopping.trains = False
        prepared = prepare(folder, stopping)
        stopping.trains = True
        if stopping.asked:
            go_on = "" if dry_run or temporary else f"; to continue: memascend train --output {folder.root} --resume"
            say(f"stopped before training began{go_on}")
            if dry_run and not resume:
                _discard(folder, None)
            return stopping.status
        with _composed(config, folder, prepared, setup_of, before) as job:
            job["temporary"] = temporary
            if dry_run:
                say("dry run: nothing was trained, and no files were left")
                raise NothingToDo
            return _run_ranks(job, folder, stopping, lock)
    return 0


def join(config: TrainConfig, *, resume: bool, wanted: dict[str, Any]) -> int:
    """Train as one of the processes that torchrun or the deepspeed launcher started. Return the exit status.

    The first rank does what the parent does in `launch` and broadcasts the job to the others. All ranks must be on one
    machine, because swap files are local. Raises ValueError otherwise.
    """
    import torch.distributed as group

    from memascend.training import worker as workers

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    if int(local) != ranks:
        raise ValueError(f"memascend train runs on one machine, but the {ranks} ranks are on several")
    if config.ranks not in (1, ranks):
        raise ValueError(f"--ranks {config.ranks}, but the launcher started {ranks}; leave --ranks out")
    config = dataclasses.replace(config, ranks=ranks)
    backends.load(backends.DEEPSPEED).start(config.threads or max(1, len(os.sched_getaffinity(0)) // ranks))
    # gloo, because its waits have no watchdog and end at once if the first rank ends
    waiting = group.new_group(backend="gloo", timeout=_PREPARATION)
    with contextlib.suppress(NothingToDo), contextlib.ExitStack() as stack:
        job: dict[str, Any] | None = None
        if rank == 0:
            try:
                job = stack.enter_context(_first_rank(config, resume, wanted | {"ranks": ranks}))
            except NothingToDo:
                job = None
            except (ValueError, OSError) as error:
                job = {"error": str(error)}
        job = _shared(job, waiting)
        if job is None:
            return 0
        if "error" in job:
            if rank == 0:
                raise ValueError(job["error"])
            return 2
        worker = workers.Worker(job, sys.stdout)
        outcome = worker.run()
        group.barrier()
        if outcome == NOTHING_TO_DO:
            raise NothingToDo
        return worker.stop.status if outcome == processes.STOPPED else 0
    return 0


def _shared(job: dict[str, Any] | None, waiting: Any) -> dict[str, Any] | None:
    """Return the first rank's job on every rank of the group `waiting`. Raises ValueError if the first rank has
    ended."""
    import torch.distributed as group

    shared = [job]
    try:
        group.broadcast_object_list(shared, group=waiting)
    except RuntimeError as error:  # the connection was closed
        if group.get_rank() == 0:
            raise
        raise ValueError("the first rank ended while it prepared the run: its own output says why") from error
    return shared[0]


@contextlib.contextmanager
def _first_rank(config: TrainConfig, resume: bool, wanted: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Do the parent's part on rank 0 of a launcher: lock the folder, prepare, and yield the job."""
    folder = RunFolder(config.output_folder)
    with (
        _opened(folder, config, resume, wanted) as (config, before, _),
        _composed(config, folder, prepare(folder, Stopping()), before=before) as job,
    ):
        yield job


@contextlib.contextmanager
def _opened(
    folder: RunFolder, config: TrainConfig, resume: bool, wanted: dict[str, Any]
) -> Iterator[tuple[TrainConfig, TrainConfig | None, Lock]]:
    """Lock the run's folder, save the configuration in it, and yield it, the one before (if resumed), and the lock.

    A new run that fails before the first step leaves nothing but logs that say why, unless its processes could not be
    ended. If a --resume makes no step, the previous configuration is restored.
    """
    with folder.held(resume=resume) as lock:
        before, made = folder.config.read_text(encoding="utf-8") if resume else "", _steps_made(folder)
        earlier: TrainConfig | None = None
        states: Path | None = None  # folder for the states of a new run, once it is known to be empty
        try:
            _take_over(lock)
            saved = configs.read_config(folder.config) if resume else {}
            if resume:
                earlier = configs.complete(saved)
                config = configs.resumed(saved, wanted, _instead(earlier, folder))
                if config.output_folder != folder.root:  # the run's folder was moved or copied
                    config = dataclasses.replace(config, output=str(folder.root))
            config = config.with_absolute_places()
            systems.check(config)
            if config.nvme:
                check_swap_folder(config.nvme, "--nvme")
            if resume:
                left_states.require_found(config, saved.get("nvme"), folder)
            else:
                states = left_states.place_of_new(config)
            save_config(folder, config)
            yield config, earlier, lock
        except BaseException as error:
            if not resume and not _has_trained(folder) and not isinstance(error, Stuck):
                _discard(folder, states)
            elif resume and _steps_made(folder) == made:
                write_atomically(folder.config, before)
            raise


def _instead(config: TrainConfig, folder: RunFolder) -> str:
    """Return the part of a message that says how to train with other options than those of the run in `folder`."""
    if folder.model.exists():
        return f", or start a new run from this one's weights: --model {folder.model} --output another"
    states = systems.states_folder(dataclasses.replace(config, output=str(folder.root)))
    if _steps_made(folder) and states is not None and states.exists():
        return (
            f", or start a new run from this one's weights: memascend export {folder.root} FOLDER, then --model FOLDER "
            "--output another"
        )
    return f", or begin again (no step of this run is kept): name another --output, or remove {folder.root}"


def _steps_made(folder: RunFolder) -> int:
    """Return the number of steps in the run's metrics."""
    return sum(row["kind"] == "step" for row in read_metrics(folder.metrics))


def _has_trained(folder: RunFolder) -> bool:
    """Return whether the run has a checkpoint to resume from, or metrics of at least one step."""
    trained = folder.metrics.exists() and folder.metrics.stat().st_size
    return bool(trained or checkpoint.listed(folder.checkpoints)[0])


def _discard(folder: RunFolder, states: Path | None) -> None:
    """Remove what a failed call wrote, so that it does not block the corrected command. `states`: the folder in which
    it kept states, if any."""
    for path in (folder.data, folder.tokenizer, folder.partial_text, *([states] if states is not None else [])):
        shutil.rmtree(path, ignore_errors=True)
    for path in (folder.config, folder.prepared, folder.text, folder.metrics):
        path.unlink(missing_ok=True)
    remove_empty([folder.logs, folder.checkpoints])


def planned_steps(config: TrainConfig, prepared: dict[str, Any]) -> int:
    """Return the number of steps of the whole run, derived from the epochs unless it is given."""
    return config.steps or max(1, round(config.epochs * prepared["steps_an_epoch"]))


@contextlib.contextmanager
def _composed(
    config: TrainConfig,
    folder: RunFolder,
    prepared: dict[str, Any],
    setup_of: SetupOf = systems.setup,
    before: TrainConfig | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the job description for the ranks; remove its swap folder at the end. `before`: see `_opened`.

    Raises NothingToDo, after saying so, if the newest checkpoint is already at the last step and evaluated.
    """
    checkpoint.clean(folder.checkpoints)
    found, refused = checkpoint.listed(folder.checkpoints)
    for line in refused:
        say(f"note: {line}")
    steps = planned_steps(config, prepared)
    done = found and found[-1].step >= steps
    if done and (found[-1].step > steps or not lacks_evaluation(config, folder, prepared, steps)):
        say(nothing_to_do(f"{found[-1].path} is", found[-1].step, steps))
        raise NothingToDo
    if found and found[-1].manifest["ranks"] != config.ranks:
        raise ValueError(f"{found[-1].path} was written by {found[-1].manifest['ranks']} ranks, not {config.ranks}")
    made = missing_folders(Path(config.nvme)) if config.nvme else []
    nvme = swap_folder(config.nvme, "--nvme") if config.nvme else folder.root / "swap"
    for line in collect_dead(nvme, folder.root):
        say(line)
    if left := collect_shared_memory():
        size = sum(each.bytes for each in left) / (1 << 20)
        files = "1 file" if len(left) == 1 else f"{len(left)} files"
        say(f"removed {size:,.0f} MiB ({files}) that earlier runs that were killed had left in shared memory")
    swap = None
    unused = [] if config.nvme else [nvme]  # a folder that the user named is kept
    try:
        setup = setup_of(config, prepared, folder.root.name, "SWAP")
        if setup.swaps:
            swap = _make_swap(nvme, folder)
            setup = setup_of(config, prepared, folder.root.name, str(swap.path))
        if setup.backend == backends.DEEPSPEED:
            preflight.check_shared_memory(config.ranks)
        preflight.check(config, prepared, folder.root, swap.path if swap else _states_to_come(setup))
        job = _job(config, folder, prepared, setup, steps)
        full = [each for each in found if each.is_full]
        job["checkpoint"] = str(full[-1].path) if full else None
        job["swap"] = str(swap.path) if swap else None
        job["steps_before"] = planned_steps(before, prepared) if before else None
        _announce(config, prepared, job, full)
        yield job
    except Stuck:  # its processes may still use the files, so a later call removes them
        swap, unused = None, []
        raise
    except BaseException:
        unused += [*made, *(swap.made if swap is not None else [])]
        raise
    finally:
        if swap is not None:
            swap.remove()
        remove_empty(unused)
        collect_shared_memory()  # including that of ranks that were still exiting when this run began


def lacks_evaluation(config: TrainConfig, folder: RunFolder, prepared: dict[str, Any], step: int) -> bool:
    """Return whether the evaluation of `step` is missing: it was interrupted, or its row in the metrics is lost."""
    if min(prepared["eval_sequences"], config.eval_sequences) < config.ranks * config.batch:
        return False
    return not any(row["kind"] == "eval" and row["step"] == step for row in read_metrics(folder.metrics))


def _states_to_come(setup: backends.Setup) -> Path | None:
    """Return the nearest existing parent of the states folder that a backend with its own storage will create.

    None if that folder exists already, or if the backend needs none.
    """
    states = Path(setup.settings.get("folder", ""))
    if "folder" not in setup.settings or states.exists():
        return None
    return next(parent for parent in states.absolute().parents if parent.exists())


def _make_swap(nvme: Path, folder: RunFolder) -> SwapFolder:
    """Create the run's swap folder in `nvme`. Raises ValueError, with advice, if that is not possible."""
    try:
        return SwapFolder.make(nvme, folder.root)
    except OSError as error:
        raise ValueError(
            f"cannot make a swap folder in {nvme}: {error.strerror}; name a writable one with --nvme"
        ) from None


def _job(
    config: TrainConfig,
    folder: RunFolder,
    prepared: dict[str, Any],
    setup: backends.Setup,
    steps: int,
) -> dict[str, Any]:
    """Return the description of the run that the ranks read, as JSON types."""
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // config.ranks)
    return {
        "config": config.as_dict() | {"steps": steps},
        "output": str(folder.root),
        "prepared": {name: value for name, value in prepared.items() if name != "notes"},
        "backend": setup.backend,
        "settings": setup.settings,
        "threads": threads,
        "terminal": sys.stdout.isatty(),
    }


def _announce(config: TrainConfig, prepared: dict[str, Any], job: dict[str, Any], found: list[Any]) -> None:
    """Print model, data, steps, system and output. `found`: the complete checkpoints of the run."""
    name = config.model if config.twin == 1 else f"{config.model} divided by {config.twin}"
    weights = ", initialised weights" if config.initialised and not found else ""
    say(f"model   {name}, {prepared['parameters'] / 1e6:,.1f} M parameters, {config.dtype}{weights}")
    say(
        f"data    {prepared['train_tokens']:,} tokens in {prepared['train_sequences']:,} sequences to train on, "
        f"{prepared['eval_sequences']:,} to evaluate on"
    )
    tokens = config.batch * config.accumulate * config.ranks * prepared["context"]
    say(
        f"steps   {job['config']['steps']:,} of {tokens:,} tokens (batch {config.batch} x accumulate "
        f"{config.accumulate} x ranks {config.ranks} x context {prepared['context']}), "
        f"learning rate {config.peak_learning_rate:g}"
    )
    planned = prepared["planned_host_bytes"]
    memory = f", {byte_count(planned)} of host memory planned" if planned else ""
    say(f"system  {config.system}{f' ({config.arm})' if config.arm else ''}{memory}")
    say(f"output  {config.output_folder}")
    if config.warmup and config.warmup > job["config"]["steps"]:
        say(f"note: --warmup {config.warmup} is longer than the run: the learning rate never reaches its peak")
    if found:
        say(f"resume  from step {found[-1].step}")


def _take_over(lock: Lock) -> None:
    """Clean up after a process that was killed in this folder, by its lock file, and write our own pid into it."""
    port = re.search(r"port (\d+)", lock.line())
    if port:
        remove_shared_buffers(int(port.group(1)))
    lock.say(f"pid {os.getpid()}")


def _run_ranks(job: dict[str, Any], folder: RunFolder, stopping: Stopping, lock: Lock) -> int:
    """Start the ranks, wait for them and clean up after them; return the exit status. Raises Stuck."""
    ranks, port = job["config"]["ranks"], free_port()
    lock.say(f"pid {os.getpid()}, port {port}")
    folder.logs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="memascend-train-") as work:
        path = Path(work) / "job.json"
        path.write_text(json.dumps(job | {"results": work}))
        try:
            stopping.children = [start_rank(rank, ranks, port, job["threads"], path, folder) for rank in range(ranks)]
            at_once = stopping.asked > 0  # a signal came while the ranks were being started
            if not at_once:
                wait(stopping)
        finally:
            remaining = kill({f"rank {rank}": child for rank, child in enumerate(stopping.children)})
            remove_shared_buffers(port)
            lock.say(f"pid {os.getpid()}")
        if remaining:
            raise Stuck(stuck(remaining))
        if at_once:
            return stopping.status
        after = "completed step, which the SSD has kept" if job["settings"].get("redo") else "checkpoint"
        return _outcome(Path(work), folder, stopping, "" if job.get("temporary") else after)


def _goes_on(folder: RunFolder, after: str) -> str:
    """Return the end of a line that says what --resume will do.

    `after` names what it continues from: a checkpoint, or a completed step whose states are on the SSD. Empty: the
    run's folder will be removed, and nothing is said.
    """
    if not after:
        return ""
    if not _has_trained(folder):
        return "; --resume starts over"
    if after == "checkpoint" and not any(each.is_full for each in checkpoint.listed(folder.checkpoints)[0]):
        return "; there is no checkpoint yet: --resume starts over"
    return f"; --resume continues from the last {after}"


def _outcome(work: Path, folder: RunFolder, stopping: Stopping, after: str) -> int:
    """Return the exit status from the results of the ranks. Raises ValueError for the first error or failed rank."""
    results = [json.loads(path.read_text()) for path in sorted(work.glob("result*.json"))]
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        raise ValueError(errors[0])
    if any(result["outcome"] == NOTHING_TO_DO for result in results):
        raise NothingToDo
    if stopping.asked > 1:
        say(f"interrupted{_goes_on(folder, after)}" if _has_trained(folder) else "interrupted")
        return stopping.status
    codes = {rank: child.returncode for rank, child in enumerate(stopping.children)}
    bad = {rank: code for rank, code in codes.items() if code not in ends_of(stopping)}
    if not bad:
        stopped = any(codes.values())
        if stopped and not results:
            say(f"stopped before the first step was finished{_goes_on(folder, after)}")
        return stopping.status if stopped else 0
    # When one rank fails, the others are killed: report a rank that ended by itself.
    rank, code = next(((r, c) for r, c in bad.items() if c != -signal.SIGKILL), next(iter(bad.items())))
    log = folder.logs / f"rank{rank}.log"
    if code == -signal.SIGKILL:
        raise ValueError(
            f"rank {rank} was killed (signal 9), probably by the out-of-memory killer: see dmesg, plan a smaller run "
            f"(memascend plan){', and continue with --resume' if after and _has_trained(folder) else ''}"
        )
    said = last_line(log).removeprefix(f"[rank{rank}]: ")
    raise ValueError(f"rank {rank} failed (exit {code}): {said}; see {log}")
