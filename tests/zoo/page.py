"""The outcomes of the zoo's architectures as records and a page in docs: `make zoo` runs the tests and then this.

python -m tests.zoo.page FOLDER     the outcomes that the tests wrote there become results/zoo/ and docs/
python -m tests.zoo.page            the page alone, from the records

The drop-in on DeepSpeed has a separate record (`make zoo-drop-in`).
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "results/zoo/architectures.json"
DROP_IN_RECORD = ROOT / "results/zoo/drop_in.json"
PAGE = ROOT / "docs/architectures.md"
COLUMNS = {
    "activations": "activations on the SSD",
    "engine 1": "streaming engine",
    "engine 2": "streaming engine, accumulated and clipped",
}
DROP_IN = "drop-in on DeepSpeed"
ORDER = ("equal", "close", "refused", "fails")
OUTSIDE = ("stock fails", "not run")  # outcomes that say nothing about this library
KINDS = {"causal": "Causal language models", "seq2seq": "Encoder-decoders", "encoder": "Encoders"}


def record(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of the tests of activation cache and engine."""
    rows: dict[str, dict[str, Any]] = {}
    for entry in entries:
        rows.setdefault(entry["architecture"], {})[entry["column"]] = {k: entry[k] for k in ("outcome", "why")}
    return _record(rows, "torch", "transformers")


def drop_in_record(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of the tests of the drop-in."""
    rows = {entry["architecture"]: {k: entry[k] for k in ("outcome", "why", "dtype")} for entry in entries}
    return _record(rows, "torch", "transformers", "deepspeed")


def _record(rows: dict[str, Any], *packages: str) -> dict[str, Any]:
    versions = {package: importlib.metadata.version(package) for package in packages}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {**versions, "python": platform.python_version()},
        "architectures": dict(sorted(rows.items())),
    }


def page(found: dict[str, Any], drop_in: dict[str, Any]) -> str:
    rows = found["architectures"]
    built = {name: row for name, row in rows.items() if not _reason(row)}
    text = [
        "# Architectures of transformers",
        "",
        "<!-- made by `make zoo` and `make zoo-drop-in` from results/zoo/ -->",
        "",
        f"Every causal language model, encoder-decoder and encoder of transformers {found['versions']['transformers']} "
        f"({len(rows)} of them), with random weights, small sizes, float32 and its default options, on the CPU "
        f"(torch {found['versions']['torch']}, {found['date']}). {len(built)} build from a handful of sizes and train "
        "on token numbers alone; [the others](#not-built) do not, and say why. Each is trained against plain PyTorch "
        "with the same AdamW:",
        "",
        "- **activations on the SSD**: every saved tensor from 512 bytes; two passes, all gradients;",
        "- **streaming engine**: three steps, an evaluation after each, the third by another process's model that goes "
        "on from the folder; losses and weights;",
        "- **accumulated and clipped**: the same with two backward passes a step, and gradients clipped by a power of "
        "two.",
        "",
        f"The **{DROP_IN}** {drop_in['versions']['deepspeed']} ({drop_in['date']}) trains with ZeRO-3 and NVMe offload "
        "of parameters and optimizer, and is held to DeepSpeed's own CPU offload: losses of three clipped steps of two "
        "micro batches, an evaluation after each, and the final master weights. In bfloat16, or in float32 where "
        "DeepSpeed's CPU offload does not train an architecture otherwise; *stock fails* where it does not at all.",
        "",
        "*equal*: to the last bit. *refused*: in one line. *close*: the largest relative difference of a loss is "
        "given, and why there is one.",
        "",
        "| | " + " | ".join((*ORDER, *OUTSIDE)) + " |",
        "|---|" + "---|" * len((*ORDER, *OUTSIDE)),
    ]
    not_run = {"outcome": "not run", "why": ""}
    run = {name: entry for name, entry in drop_in["architectures"].items() if entry["outcome"] != "not built"}
    of_drop_in = {name: run.get(name, not_run) for name in built}
    counts = {title: Counter(row[column]["outcome"] for row in built.values()) for column, title in COLUMNS.items()}
    counts[DROP_IN] = Counter(entry["outcome"] for entry in of_drop_in.values())
    for title, count in counts.items():
        text.append(f"| {title} | " + " | ".join(str(count[outcome]) for outcome in (*ORDER, *OUTSIDE)) + " |")
    for kind, title in KINDS.items():
        chosen = {name: row for name, row in built.items() if name.startswith(f"{kind}-")}
        text += ["", f"## {title}", "", "| architecture | " + " | ".join(counts) + " |"]
        text.append("|---|" + "---|" * len(counts))
        for name, row in chosen.items():
            cells = [*(_cell(row[column]) for column in COLUMNS), _cell(of_drop_in[name])]
            text.append(f"| {name.removeprefix(f'{kind}-')} | " + " | ".join(cells) + " |")
    text += ["", "## Not built", "", "| architecture | reason |", "|---|---|"]
    text += [f"| {name} | {_reason(row).replace('|', '/')} |" for name, row in rows.items() if _reason(row)]
    return "\n".join(text) + "\n"


def _reason(row: dict[str, Any]) -> str:
    return next((entry["why"] or "?" for entry in row.values() if entry["outcome"] == "not built"), "")


def _cell(entry: dict[str, Any]) -> str:
    outcome = entry["outcome"] + (", in float32" if entry.get("dtype") == "fp32" else "")
    return outcome + (f": {entry['why']}".replace("|", "/") if entry["why"] else "")


def main() -> None:
    if len(sys.argv) > 1:
        entries = [json.loads(path.read_text()) for path in sorted(Path(sys.argv[1]).glob("*.json"))]
        of_drop_in = [entry for entry in entries if entry["column"] == "drop-in"]
        others = [entry for entry in entries if entry["column"] != "drop-in"]
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        for path, make, found in ((RECORD, record, others), (DROP_IN_RECORD, drop_in_record, of_drop_in)):
            if found:
                path.write_text(json.dumps(make(found), indent=1) + "\n")
    PAGE.write_text(page(*(json.loads(path.read_text()) for path in (RECORD, DROP_IN_RECORD))))


if __name__ == "__main__":
    main()
