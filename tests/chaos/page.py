"""The page of the chaos runs, made from their records: `python -m tests.chaos.page`.

The records are in results/chaos/, one file per host; names of records of stock DeepSpeed end in `-stock.json`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos.draws import FAULTS, STEPS
from tests.chaos.verdicts import EQUAL, FAILURES, NAMED, VERDICTS

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "results/chaos"
PAGE = ROOT / "docs/chaos.md"
TARGETS = {
    "engine": f"the streaming engine on a shape of the zoo: {STEPS} steps, two versions of the states, one that is "
    "redone, or one that tears; three arms; one or two passes per step, clipped or not; activations in memory or "
    "swapped",
    "activations": "a shape of the zoo in memory with all its activations on the SSD; the loop saves after each step",
    "drop-in": "DeepSpeed ZeRO-3 with weights and states on the SSD through `memascend.enable`, one path or two; "
    "the engine's own checkpoint after every second step",
    "train": "`memascend train` as a process with its ranks: memascend on one path and two, lohan with two versions "
    "of the states and one, mlp_offload on two paths, ssdtrain, cxl, zero_infinity, zero_offload, in_memory; a "
    "checkpoint after every second step",
    "stock": "the script of drop-in on DeepSpeed as it is, with NVMe offload",
}
_SAID = {
    EQUAL: "losses and states of every step are those of the undisturbed run, to the bit",
    NAMED: "so they are after an error of one line that says what to do, and was done: space freed, the path back, "
    "states removed that hold no step, or gone on from the last checkpoint",
    "wrong bits": "some loss or state is another one",
    "silent continuation": "it went on from an older step than had been completed, and said nothing",
    "lost steps": "it said so, and completed steps were lost all the same",
    "leak": "descriptors, threads, processes, shared memory or files that nobody has a use for stay",
    "hang": "a process had to be ended, or did not hear Ctrl-C",
    "crash without a line": "a signal that nobody sent, or an error without a fix or of several lines",
}


def records() -> list[tuple[str, dict[str, Any]]]:
    return [(path.stem, json.loads(path.read_text())) for path in sorted(RECORDS.glob("*.json"))]


def page(found: list[tuple[str, dict[str, Any]]]) -> str:
    text = [
        "# Chaos runs",
        "",
        "<!-- made by `python -m tests.chaos.page` from results/chaos/ -->",
        "",
        "A seed draws what trains, what befalls it, and when. The training is run undisturbed, disturbed, and then "
        "gone "
        "on with as its user would: begun again in the same folder, or in the same process after an error. A third of "
        "the engine's and the activation cache's disturbed processes go on from what an earlier one has left.",
        "",
        "| what trains | |",
        "|---|---|",
        *(f"| {name} | {what} |" for name, what in TARGETS.items()),
        "",
        "| what befalls it | |",
        "|---|---|",
        *(f"| {name} | {what} |" for name, what in FAULTS.items()),
        "",
        "| verdict | |",
        "|---|---|",
        *(f"| {name} | {what} |" for name, what in _SAID.items()),
        "",
        "Repeat it: `make chaos` (an hour; goes on where a record ends), or one seed: `python -m tests.chaos --seeds "
        "12:13 --out FILE.json --verbose`; `--stock` is the schedule against DeepSpeed as it is, for the faults that "
        "need "
        "no layer of ours below it (an injected ENOSPC becomes a full file system). With root all of it runs in a "
        "mount "
        "and a process namespace of its own; without, faults that need a small file system or a control group are not "
        "run. Instants that are moments of the clock differ from run to run; those that are calls, lines or places in "
        "a "
        "log of writes do not. Not looked at on DeepSpeed: descriptors and threads (gloo's stay), and its own buffers "
        "in "
        "shared memory.",
    ]
    for name, record in found:
        text += _of_record(name, record)
    return "\n".join(text) + "\n"


def _of_record(name: str, record: dict[str, Any]) -> list[str]:
    rows = record["seeds"]
    host, versions = record["host"], record["versions"]
    failed = {seed: row for seed, row in rows.items() if row["verdict"] in FAILURES}
    whole = sum(row["seconds"] for row in rows.values())
    software = ", ".join(f"{key} {value}" for key, value in versions.items() if isinstance(value, str))
    text = [
        "",
        f"## {name}",
        "",
        f"{len(rows)} seeds on {host['cpu']}, {host['cores']} cores, Linux {host['kernel']}, begun "
        f"{record['started_at'][:10]}, {whole / 60:.0f} minutes ({software}). The fault struck in "
        f"{sum(row['struck'] for row in rows.values())}; else the training had ended before, or only took longer.",
        "",
    ]
    if "control" in record:
        text += [
            f"Control: stopped after two steps and resumed from DeepSpeed's own checkpoint, with no fault at all: "
            f"*{record['control']}*. Wrong bits below are where it went on from a checkpoint.",
            "",
        ]
    if left := [row["left_bytes"] for row in rows.values() if row.get("left_bytes")]:
        text += [f"Swap files that stayed after the end: {sum(left) / 2**20:.0f} MiB, of {len(left)} seeds.", ""]
    text += _table("fault", list(FAULTS), rows, "fault")
    text += ["", *_table("what trains", list(TARGETS), rows, "target"), ""]
    if failed:
        text += [
            f"{len(failed)} failed:",
            "",
            "| seed | what trains | fault | verdict | why |",
            "|---|---|---|---|---|",
        ]
        text += [
            f"| {seed} | {row['target']} | {row['fault']} | {row['verdict']} | {_short(row.get('why', ''))} |"
            for seed, row in failed.items()
        ]
    else:
        text += ["None failed."]
    return text


def _table(title: str, names: list[str], rows: dict[str, Any], key: str) -> list[str]:
    shown = [verdict for verdict in VERDICTS if verdict in {row["verdict"] for row in rows.values()} | {*FAILURES}]
    text = [f"| {title} | seeds | " + " | ".join(shown) + " |", "|---|" + "---|" * (len(shown) + 1)]
    for name in [*names, None]:
        count = Counter(row["verdict"] for row in rows.values() if name in (None, row[key]))
        if count.total():
            cells = [str(count[verdict]) for verdict in shown]
            text.append(f"| {name or 'all'} | {count.total()} | " + " | ".join(cells) + " |")
    return text


def _short(why: str) -> str:
    return " ".join(why.replace("|", "/").split())[:160]


def main() -> None:
    PAGE.write_text(page(records()))


if __name__ == "__main__":
    main()
