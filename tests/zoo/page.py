"""The outcomes of the zoo's architectures as a record and a page in docs: `make zoo` runs the tests and then this.

python -m tests.zoo.page FOLDER     the outcomes that the tests wrote there become results/zoo/ and docs/
python -m tests.zoo.page            the page alone, from the record
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "results/zoo/architectures.json"
PAGE = ROOT / "docs/architectures.md"
COLUMNS = {
    "activations": "activations on the SSD",
    "engine 1": "streaming engine",
    "engine 2": "streaming engine, accumulated and clipped",
}
ORDER = ("equal", "close", "refused", "fails")
KINDS = {"causal": "Causal language models", "seq2seq": "Encoder-decoders", "encoder": "Encoders"}


def record(outcomes: Path) -> dict[str, Any]:
    """What the tests wrote into a folder, a file each."""
    import platform

    import torch
    import transformers

    rows: dict[str, dict[str, Any]] = {}
    for path in sorted(outcomes.glob("*.json")):
        entry = json.loads(path.read_text())
        rows.setdefault(entry["architecture"], {})[entry["column"]] = {k: entry[k] for k in ("outcome", "why")}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "architectures": dict(sorted(rows.items())),
    }


def page(found: dict[str, Any]) -> str:
    rows = found["architectures"]
    built = {name: row for name, row in rows.items() if not _reason(row)}
    text = [
        "# Architectures of transformers",
        "",
        "<!-- made by `make zoo` from results/zoo/architectures.json -->",
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
        "*equal*: to the last bit. *refused*: in one line. *close*: the largest relative difference of a loss is "
        "given, and why there is one.",
        "",
        "| | " + " | ".join(ORDER) + " |",
        "|---|" + "---|" * len(ORDER),
    ]
    for column, title in COLUMNS.items():
        count = Counter(row[column]["outcome"] for row in built.values())
        text.append(f"| {title} | " + " | ".join(str(count[outcome]) for outcome in ORDER) + " |")
    for kind, title in KINDS.items():
        chosen = {name: row for name, row in built.items() if name.startswith(f"{kind}-")}
        text += ["", f"## {title}", "", "| architecture | " + " | ".join(COLUMNS.values()) + " |"]
        text.append("|---|" + "---|" * len(COLUMNS))
        for name, row in chosen.items():
            cells = [_cell(row[column]) for column in COLUMNS]
            text.append(f"| {name.removeprefix(f'{kind}-')} | " + " | ".join(cells) + " |")
    text += ["", "## Not built", "", "| architecture | reason |", "|---|---|"]
    text += [f"| {name} | {_reason(row).replace('|', '/')} |" for name, row in rows.items() if _reason(row)]
    return "\n".join(text) + "\n"


def _reason(row: dict[str, Any]) -> str:
    return next((entry["why"] or "?" for entry in row.values() if entry["outcome"] == "not built"), "")


def _cell(entry: dict[str, Any]) -> str:
    return entry["outcome"] + (f": {entry['why']}".replace("|", "/") if entry["why"] else "")


def main() -> None:
    if len(sys.argv) > 1:
        found = record(Path(sys.argv[1]))
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main()
