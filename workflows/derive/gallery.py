"""Draw the gallery: ten exhibits from what is committed alone, without a run.

usage: python -m workflows.derive.gallery [--out figures/gallery]     (from the top of the checkout)

Published and modelled rows, and those of the committed records of named machines (`make diagrams` calls it).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from workflows import registry, tidy
from workflows.configuration import Configuration
from workflows.derive import table

SHOWN = (
    *("memascend-fig08", "memascend-fig09", "memascend-fig15", "lohan-fig01c", "lohan-fig06a", "mlpoffload-fig07"),
    *("mlpoffload-fig15", "cxl-fig13", "cxl-fig15", "ssdtrain-fig06"),
)


def draw(exhibits: tuple[str, ...], out: Path) -> None:
    """Write <exhibit>.png of each exhibit into a folder."""
    known = Configuration(registry.read(registry.ROOT / "workflows/config/config.yaml"), [])
    with tempfile.TemporaryDirectory(prefix="memascend-gallery-") as temporary:
        work = Path(temporary)
        for paper in dict.fromkeys(map(table.paper_of, exhibits)):
            tidy.write_table(table.rows_of(paper).modelled(), work / f"{paper}.csv")
        for exhibit in exhibits:
            table.make(
                exhibit,
                work / f"{exhibit}.table.csv",
                published=Path(known.published),
                modelled=work / f"{table.paper_of(exhibit)}.csv",
                records=[],
                reference=[Path(path) for path in known.reference_of(exhibit)],
                runs_out=work / f"{exhibit}.runs.csv",
                draw_in=work,
            )
            drawn = (work / f"{exhibit}.png").read_bytes()
            tidy.atomically(out / f"{exhibit}.png", lambda path, drawn=drawn: path.write_bytes(drawn))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("figures/gallery"), help="(default figures/gallery)")
    args = parser.parse_args()
    try:
        draw(SHOWN, args.out)
    except (tidy.TableError, ValueError, OSError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()
