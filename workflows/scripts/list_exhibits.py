"""Every exhibit of the five papers with its status: drawn, built, or planned and what it waits for."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from workflows.scripts import tidy


def status(entry: dict, figures: Path) -> str:
    """One word or phrase for the person who asks."""
    if entry["status"] == "planned":
        return f"waits for {entry['waits_for']}"
    return (
        "drawn"
        if (figures / f"{entry['id']}.svg").exists()
        else "built; draw it with: snakemake --cores all " + entry["id"]
    )


def lines(entries: list[dict], figures: Path) -> list[str]:
    """A line an exhibit, then the count."""
    width = max(len(entry["id"]) for entry in entries)
    out = [f"{entry['id']:<{width}}  {entry['status']:<7}  {status(entry, figures)}" for entry in entries]
    built = sum(entry["status"] == "built" for entry in entries)
    return [*out, f"{built} of {len(entries)} exhibits are built, {len(entries) - built} are planned."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registry", type=Path, required=True, help="workflows/config/exhibits.yaml")
    parser.add_argument("--figures", type=Path, required=True, help="folder of the drawn exhibits")
    args = parser.parse_args()
    try:
        registry = yaml.safe_load(args.registry.read_text())
        tidy.check(registry, "exhibits.schema.json", str(args.registry))
        print("\n".join(lines(registry["exhibits"], args.figures)))
    except (tidy.TableError, OSError, yaml.YAMLError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()
