"""Make every table, picture, verdict, page and description of a bundle again, from its records and by its sources.

usage: python -m workflows.artifact.redraw BUNDLE OUT     (in BUNDLE/source; workflows.artifact.verify does it)

BUNDLE is an unpacked bundle; OUT gets what `layout.MADE` names, and EXPECTED. Exhibits are shared out over the cores.
With --experiments FILE their records are those of that list of runs, not of the sources'.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

from workflows import registry, tidy
from workflows.artifact.bundle import describe, exhibits_of, write_json
from workflows.artifact.layout import ANY, EXPECTED, FIGURES, MANIFEST, RECORDS, SOURCE, TABLES
from workflows.configuration import Configuration
from workflows.derive import claims, figure, report, table
from workflows.derive.site.content import gather
from workflows.run.no_result import KIND as NO_RESULT
from workflows.run.provenance import record_key

PACKAGES = ("hardware", "memascend", "workflows")
# Program of a run -> kind of its record
KINDS = {"training": "training", "bench": "bench", "interleaved": "step-times", "path_twin": "step-times"}
KINDS |= {"probe": "testbed"}


def lane(paper: str, out: Path) -> None:
    """Write the table of a paper's modelled lane."""
    tidy.write_table(table.rows_of(paper).modelled(), out / TABLES / "modelled" / f"{paper}.csv")


def exhibit(name: str, wanted: dict[str, Any], bundle: Path, out: Path) -> None:
    """Write the table, list of runs and picture of one exhibit."""
    if not wanted["table"]:
        figure.make(name, out / FIGURES)
        return
    tables = out / TABLES
    table.make(
        name,
        tables / "exhibits" / f"{name}.csv",
        published=Path(wanted["published"]),
        modelled=tables / "modelled" / f"{wanted['paper']}.csv",
        records=[bundle / RECORDS / record for record in wanted["records"]],
        reference=[Path(path) for path in wanted["reference"]],
        runs_out=tables / "runs" / f"{name}.csv",
        draw_in=out / FIGURES,
    )


def everything(bundle: Path, out: Path, experiments: Path | None) -> None:
    """Redraw a whole bundle; the working directory must be its sources."""
    manifest = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    wanted = expected(manifest["profile"], bundle / RECORDS, experiments)
    write_json(out / EXPECTED, wanted)
    manifest["exhibits"] = wanted["exhibits"]  # the manifest's own may name any file, and are compared later
    for folder in ("modelled", "exhibits", "runs"):
        (out / TABLES / folder).mkdir(parents=True, exist_ok=True)
    (out / FIGURES).mkdir(exist_ok=True)
    at_once = {"max_workers": len(os.sched_getaffinity(0)), "mp_context": multiprocessing.get_context("fork")}
    with concurrent.futures.ProcessPoolExecutor(**at_once) as pool:
        list(pool.map(lane, registry.PAPERS, [out] * len(registry.PAPERS)))
        made = [pool.submit(exhibit, *each, bundle, out) for each in manifest["exhibits"].items()]
        for each in made:
            each.result()
    decided = claims.decide_all(claims.of_built(registry.claims(), registry.exhibits()), out / TABLES / "exhibits")
    claims.write(decided, out / TABLES / "claims.csv")
    site = gather(out / TABLES / "claims.csv", out / FIGURES, out / TABLES / "runs", manifest["profile"])
    report.write(site, out / FIGURES, bundle / RECORDS)
    for given in (SOURCE, RECORDS):  # further inputs of the descriptions
        (out / given).symlink_to(bundle / given)
    describe(out, manifest)
    for given in (SOURCE, RECORDS):
        (out / given).unlink()


def expected(profile: str, records: Path, experiments: Path | None = None) -> dict[str, Any]:
    """Return what a profile's exhibits are drawn from and what each record must be, according to the sources.

    The bundle's own configuration does not count. `experiments` is another list of runs, given by the person who
    checks.
    """
    config = yaml.safe_load(Path("workflows/config/config.yaml").read_text(encoding="utf-8"))
    named = {} if experiments is None else {"experiments": str(experiments)}
    known = Configuration(config | {"profile": profile} | named, [])
    exhibits = exhibits_of(known)
    names = sorted({name for each in exhibits.values() for name in each["records"]})
    return {"exhibits": exhibits, "records": {name: record_expected(known, records / name) for name in names}}


@functools.cache
def programs() -> dict[str, Any]:
    """Return the programs that make records, by the names that runs have for them."""
    from workflows.run import bench, interleaved, path_twin, training  # slow imports, not needed to refuse

    return {"training": training, "bench": bench, "interleaved": interleaved, "path_twin": path_twin}


def record_expected(known: Configuration, path: Path) -> dict[str, Any]:
    """Return the fields that a record must have by its run's command line, its code digest, and the key of its own
    fields."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        key = {"key": record_key(record)}
    except (OSError, ValueError, TypeError, RecursionError):  # the check has reported this already
        record, key = {}, {"key": ""}
    run_id, run = path.stem, known.run(path.stem)
    fields: dict[str, Any] = {"lane": "measured"}
    if record.get("kind") == NO_RESULT:
        code = {"code_digest": known.measured_by(run_id, NO_RESULT), "has_own_packages": False}
        return {"kind": NO_RESULT, "fields": fields, **code, **key}
    if run["module"] != "probe":
        module = programs()[run["module"]]
        args = module.parse(["--run-id", run_id, "--out", path.name, *shlex.split(run["words"])])
        fields |= module.requested(args)
    fields.pop("time_limit_s", None)  # it does not influence a measurement
    if run["module"] == "bench":  # the drive may differ on a node
        options = fields["points_requested"]["options"]
        before = ["", *options]
        options[:] = [ANY if last in ("--folder", "--tiers") else each for last, each in zip(before, options)]
    code = {
        "code_digest": known.measured_by(run_id),
        "has_own_packages": run["module"] == "training" and any(run["environments"]),
    }
    return {"kind": KINDS[run["module"]], "fields": fields, **code, **key}


def refuse_foreign(source: Path) -> None:
    """Raise ValueError if a module of ours was imported from an installation other than `source`."""
    ours = [(name, module) for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES]
    places = {name: getattr(module, "__file__", None) for name, module in ours}
    found = [name for name, place in places.items() if place and not Path(place).resolve().is_relative_to(source)]
    if found:
        raise ValueError(f"{found[0]} is not the bundle's own ({len(found)} such): run it in the bundle's sources")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experiments", type=Path, metavar="FILE", help="list of runs, in place of the sources'")
    args = parser.parse_args()
    try:
        refuse_foreign((args.bundle / SOURCE).resolve())
        everything(args.bundle.absolute(), args.out.absolute(), args.experiments)
        refuse_foreign((args.bundle / SOURCE).resolve())
    except (tidy.TableError, ValueError, OSError, KeyError) as error:
        tidy.fail(error)


if __name__ == "__main__":
    main()
