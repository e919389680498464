"""Write the report: one folder of plain HTML that a browser opens from disk, beside the pictures that it shows.

index.html (papers and exhibits), exhibits/<id>.html, claims.html, errata.html, style sheet, scripts, records/ with a
copy of every record that an exhibit was drawn from, and traces/ with the time lines that exhibits show.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from workflows import tidy
from workflows.derive.site import pages
from workflows.derive.site.content import Site, gather
from workflows.derive.site.templates import HERE

ASSETS = ("site.css", "site.js", "compare.js", "timeline.js", "values.js")


def write(site: Site, figures: Path, records: Path) -> None:
    """Write every page, and copy the records of `site` from the folder `records`.

    Pages and records of an earlier report that are no longer shown are deleted.
    """
    written = {Path(name): text for name, text in pages.every(site)}
    for name, text in written.items():
        tidy.atomically(figures / name, lambda path, text=text: path.write_text(text, encoding="utf-8"))
    for name in ASSETS:
        tidy.atomically(figures / name, lambda path, name=name: shutil.copyfile(HERE / "assets" / name, path))
    kept = {f"{run['run_id']}.json" for exhibit in site.exhibits for run in exhibit.runs}
    for name in sorted(kept):
        if not (records / name).is_file():
            raise tidy.TableError(
                f"{records / name}: the record of a run that an exhibit shows is missing; run it again"
            )
        tidy.atomically(figures / "records" / name, lambda path, name=name: shutil.copyfile(records / name, path))
    delete_others(figures / "exhibits", {path.name for path in written})
    delete_others(figures / "records", kept)
    traces = {f"{one.id}-{each.lane}.json": (one.id, each) for one in site.exhibits for each in one.timelines}
    for name, (exhibit, each) in traces.items():
        tidy.atomically(figures / "traces" / name, lambda path, exhibit=exhibit, each=each: each.write(path, exhibit))
    delete_others(figures / "traces", set(traces))


def delete_others(folder: Path, kept: set[str]) -> None:
    """Delete the files in a folder of the report whose names are not in `kept`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--claims", type=Path, required=True, help="claims.csv")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the exhibits' lists of runs")
    parser.add_argument("--records", type=Path, required=True, help="folder of the runs' records")
    parser.add_argument("--profile", required=True, help="name of the list of runs that was measured")
    parser.add_argument("--figures", type=Path, required=True, help="folder of the drawn exhibits, and of the report")
    parser.add_argument("--against", type=Path, help="another claims.csv, which the claims page compares with")
    args = parser.parse_args()
    try:
        site = gather(args.claims, args.figures, args.runs, args.profile, args.against)
        write(site, args.figures, args.records)
    except (tidy.TableError, ValueError, OSError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()
