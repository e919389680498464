"""One exhibit's tidy table: the rows of every lane, each with its origin."""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from workflows.scripts import tidy


def published_rows(folder: Path, exhibit: str) -> pd.DataFrame:
    """Rows quoted from the paper. The testbed is the paper's configuration where the text names one."""
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise tidy.TableError(f"{folder}: no published numbers (*.csv) here; check published_dir in the configuration")
    tables = [pd.read_csv(path, dtype=str, keep_default_na=False) for path in paths]
    rows = pd.concat([table[table["exhibit_id"] == exhibit] for table in tables], ignore_index=True)
    named = rows["x_name"].eq("config")
    rows["testbed"] = ("paper-" + rows["x_value"]).where(named, "paper")
    rows["source"] = rows["quote"]
    return rows.reindex(columns=tidy.COLUMNS, fill_value="")


def lane_rows(path: Path, exhibit: str) -> pd.DataFrame:
    table = tidy.read_table(path)
    return table[table["exhibit_id"] == exhibit]


def assemble(exhibit: str, published: Path, *lanes: Path) -> pd.DataFrame:
    """The published rows, then those of each lane's table."""
    parts = [published_rows(published, exhibit), *(lane_rows(path, exhibit) for path in lanes)]
    table = pd.concat(parts, ignore_index=True)
    if table.empty:
        raise tidy.TableError(f"{exhibit}: no lane has a row; check the id against workflows/config/exhibits.yaml")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exhibit", required=True, help="id, such as memascend-fig11")
    parser.add_argument("--published", type=Path, required=True, help="folder of the facts quoted from the papers")
    parser.add_argument("--modelled", type=Path, required=True, help="tidy table of the modelled lane")
    parser.add_argument("--measured", type=Path, required=True, help="tidy table of the measured lane")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        tidy.write_table(assemble(args.exhibit, args.published, args.modelled, args.measured), args.out)
    except (tidy.TableError, OSError, KeyError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()
