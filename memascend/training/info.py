"""`memascend info`: the contents of a run's folder, its progress, and the next command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from memascend.training import checkpoint, launch
from memascend.training.folder import InUse, Lock, RunFolder
from memascend.training.kept import kept_backend, require_run
from memascend.training.preparation import read_prepared
from memascend.training.progress import byte_count, duration, read_metrics


def info(run: Path) -> dict[str, Any]:
    """Return facts about the run in the folder `run`. Read-only, also while it trains.

    `step`: completed steps, by the newest of metrics rows, checkpoints and states. `steps`: planned steps, None if
    --epochs determines them and the text is not prepared. `kept_step`: the step of the states on the SSD, None if there
    are none, and while the run trains, since its process has them open. Raises ValueError if the folder is not a run.
    """
    folder = RunFolder(run)
    require_run(folder)
    config, prepared = launch.saved_config(folder), read_prepared(folder)
    rows = read_metrics(folder.metrics)
    steps = [row for row in rows if row["kind"] == "step"]
    evaluations = [row for row in rows if row["kind"] == "eval"]
    found, refused = checkpoint.listed(folder.checkpoints)
    trains = _trains(folder)
    kept, partial = _kept(folder) if trains is None else (None, False)
    seconds = [row["seconds"] for row in steps if row["seconds"] is not None]
    planned = config.steps or (launch.planned_steps(config, prepared) if prepared else None)
    return {
        "run": str(folder.root),
        "model": config.model if config.twin == 1 else f"{config.model} divided by {config.twin}",
        "parameters": prepared["parameters"] if prepared else None,
        "system": config.system,
        "dtype": config.dtype,
        "prepared": prepared is not None,
        "trains": trains,
        "step": max((kept or 0, *(row["step"] for row in steps), *(each.step for each in found))),
        "steps": planned,
        "resumes_from": max(kept or 0, *(each.step for each in found), 0),
        "lacks_evaluation": bool(
            prepared and planned and launch.lacks_evaluation(config, folder, prepared, planned) and steps
        ),
        "loss": steps[-1]["loss"] if steps else None,
        "evaluation": evaluations[-1]["loss"] if evaluations else None,
        "seconds": sum(seconds),
        "kept_step": kept,
        "states_are_partial": partial,
        "states_are_torn": partial,  # the name in version 1.0, until 2.0
        "checkpoints": [{"path": str(each.path), "step": each.step, "full": each.is_full} for each in found],
        "incomplete": refused,
        "bytes_on_disk": _bytes_below(folder.root),
    }


def _kept(folder: RunFolder) -> tuple[int | None, bool]:
    """Return the step of the states on the SSD, and whether they were left in the middle of an update."""
    from memascend.training.backends.protocol import KeptStepIsPartial

    backend = kept_backend(folder)
    try:
        return (backend.kept_step() if backend is not None else None), False
    except KeptStepIsPartial:
        return None, True


def _trains(folder: RunFolder) -> str | None:
    """Return what the lock file says about the process that uses the folder, or None if it is not in use."""
    if not (folder.root / "run.lock").exists() or not os.access(folder.root / "run.lock", os.W_OK):
        return None
    try:
        Lock(folder.root, alone=False).close()
    except InUse as user:
        return str(user)
    return None


def _bytes_below(folder: Path) -> int:
    """Return the disk usage of all files below `folder` in bytes. Links are not followed; vanished files count as 0."""
    size = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(root, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return size


def as_text(found: dict[str, Any]) -> str:
    """Return the facts as lines for a terminal, the last of which names the next command."""
    of = f" of {found['steps']:,}" if found["steps"] else ""
    size = f", {found['parameters'] / 1e6:,.1f} M parameters" if found["parameters"] else ""
    lines = [
        f"run          {found['run']}, {byte_count(found['bytes_on_disk'])} on disk",
        f"model        {found['model']}{size}, {found['dtype']}",
        f"system       {found['system']}",
        f"step         {found['step']:,}{of}, {duration(found['seconds'])} of training",
    ]
    if found["loss"] is not None:
        evaluation = f"; {found['evaluation']:.4f} on the evaluation text" if found["evaluation"] is not None else ""
        lines.append(f"loss         {found['loss']:.4f}{evaluation}")
    if found["kept_step"]:
        lines.append(f"states       of step {found['kept_step']}, on the SSD")
    if found["states_are_partial"]:
        lines.append(
            "states       incomplete: a step was interrupted; --resume continues from the last full checkpoint"
        )
    if found["lacks_evaluation"] and found["resumes_from"] == found["steps"]:
        lines.append("evaluation   of the last step is missing: --resume makes it")
    if not found["prepared"]:
        lines.append("text         not prepared (prepared.json is missing): --resume prepares it")
    elif (
        found["step"]
        and not (found["kept_step"] or found["trains"])
        and not any(each["full"] for each in found["checkpoints"])
    ):
        lines.append("checkpoint   none to continue from: --resume starts from the beginning")
    for each in found["checkpoints"]:
        lines.append(f"checkpoint   {each['path']}{'' if each['full'] else ' (weights only)'}")
    lines += [f"note         {line}" for line in found["incomplete"]]
    lines.append(f"next         {_next(found)}")
    return "\n".join(lines)


def _next(found: dict[str, Any]) -> str:
    """Return the next command, or what the run is doing."""
    if found["trains"]:
        return f"wait: it trains ({found['trains']})"
    if not found["steps"] or found["resumes_from"] < found["steps"] or found["lacks_evaluation"]:
        return f"memascend train --output {found['run']} --resume"
    if found["checkpoints"]:
        return f"it is done: the weights are in {Path(found['run'], 'model')}, for from_pretrained"
    return f"memascend export {found['run']} NEW_FOLDER"
