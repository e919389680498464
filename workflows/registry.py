"""Read the papers' folders: exhibits with their status, figure specifications, captions and claims.

An exhibit is built if `figures.yaml` of its paper specifies its picture. This module needs only the standard library
and yaml.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAPERS = {  # folder -> name
    "memascend": "MemAscend",
    "lohan": "LoHan",
    "mlpoffload": "MLP-Offload",
    "cxl": "CXL-aware allocation",
    "ssdtrain": "SSDTrain",
}


@cache
def read(path: Path) -> Any:
    """Return the parsed YAML file, which is read once, or None if the file does not exist.

    Raises ValueError that names the file if it cannot be read.
    """
    if not path.exists():
        return None
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None


def file_of(paper: str, name: str, root: Path = ROOT) -> Path:
    """Return the path of a file in a paper's folder."""
    return root / "workflows/papers" / paper / name


def figures(paper: str, root: Path = ROOT) -> dict[str, Any]:
    """Return the specification of every exhibit of a paper, merged with the paper's defaults."""
    found = dict(read(file_of(paper, "figures.yaml", root)) or {})
    defaults = found.pop("defaults", {})
    return {exhibit: {**defaults, **spec} for exhibit, spec in found.items() if not exhibit.startswith("_")}


def exhibits(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return every exhibit of the five papers, with `paper`, `status` and `waits_for`."""
    out = []
    for paper in PAPERS:
        drawn = figures(paper, root)
        for entry in (read(file_of(paper, "exhibits.yaml", root)) or {"exhibits": []})["exhibits"]:
            status = "built" if entry["id"] in drawn else "planned"
            out.append({"waits_for": None, **entry, "paper": paper, "status": status})
    return out


def claims(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return every claim, whether its exhibit is built or not: claims are committed before the first run."""
    return [claim for paper in PAPERS for claim in (read(file_of(paper, "claims.yaml", root)) or {}).get("claims", [])]


def tolerances(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Return for each kind of quantity its description, its tolerances by lane and their reason.

    See docs/tolerances.md.
    """
    return (read(root / "workflows/papers/tolerances.yaml") or {"kinds": {}})["kinds"]


def caption(exhibit: str, root: Path = ROOT) -> str:
    """Return the prose under an exhibit; raise ValueError if it has no caption."""
    paper = exhibit.rpartition("-")[0]
    found = (read(file_of(paper, "captions.yaml", root)) or {}).get(exhibit)
    if not found:
        raise ValueError(f"{exhibit}: no caption in {file_of(paper, 'captions.yaml', root)}")
    return found


def validations(root: Path = ROOT) -> list[str]:
    """Return one line per committed validation record: how far the simulator's phases were from measured ones."""
    lines = []
    for path in sorted((root / "results/reference").glob("*/validation.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        spread, runs = record["phases"], {(row["system"], row["arm"]) for row in record["rows"]}
        lines.append(
            f"seconds of the simulator against {spread['count']} phases of {len(runs)} systems measured on "
            f"{path.parent.name}: "
            f"{spread['lowest_percent']:+.0f} to {spread['highest_percent']:+.0f} %, half of them within "
            f"{spread['half_within_percent']:.0f} %, nine of ten within {spread['nine_of_ten_within_percent']:.0f} %"
        )
    return lines


def has_table(entry: dict[str, Any]) -> bool:
    """Return whether an exhibit contains numbers; a drawing of structure has no table."""
    return bool(entry["lanes"])


def picture_digest(entry: dict[str, Any], root: Path = ROOT) -> str:
    """Return a digest of everything outside the code that determines one picture."""
    said = [entry, figures(entry["paper"], root)[entry["id"]], caption(entry["id"], root), validations(root)]
    said.append(tolerances(root))
    said.append((root / "workflows/panels/look.mplstyle").read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


DECIDED = ("reproduced", "deviates", "no result")


def scored(verdicts: Iterable[str]) -> str:
    """Return held-out verdicts in words: "70 of 80 held-out claims reproduced, 10 deviate"."""
    count = Counter(verdicts)
    decided = sum(count[each] for each in DECIDED)
    text = f"{count['reproduced']} of {decided} held-out {'claim' if decided == 1 else 'claims'} reproduced, "
    text += f"{count['deviates']} {'deviates' if count['deviates'] == 1 else 'deviate'}"
    return text + (f", {count['no result']} without a result" if count["no result"] else "")
