"""The bundle as an RO-Crate: figures from tables, tables from records, records from commands; verdicts as assessments.

Writes ro-crate-metadata.json by the profile Provenance Run Crate 0.5 (https://w3id.org/ro/wfrun/provenance/0.5). The
Snakefile is the workflow; each run and each exhibit is an action of one of its steps, with inputs, results, begin, end
and status. Lanes, bases and verdicts are properties of assessments, one per claim and lane.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from rocrate.model.contextentity import ContextEntity
from rocrate.rocrate import ROCrate

from workflows import registry
from workflows.artifact.layout import FIGURES, RECORDS, SOURCE, TABLES, TRACE
from workflows.derive.citation import AUTHORS, papers

PROFILES = [
    "https://w3id.org/ro/wfrun/process/0.5",
    "https://w3id.org/ro/wfrun/workflow/0.5",
    "https://w3id.org/ro/wfrun/provenance/0.5",
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0",
]
STEPS = {  # rule -> program
    "record": "workflows/run",
    "modelled": "workflows/derive/table.py",
    "figure": "workflows/derive/table.py",
    "drawing": "workflows/derive/figure.py",
    "claims_table": "workflows/derive/claims.py",
}
WORKFLOW = f"{SOURCE}/Snakefile"
COMPLETED, FAILED = "http://schema.org/CompletedActionStatus", "http://schema.org/FailedActionStatus"
KINDS = {".svg": "image/svg+xml", ".csv": "text/csv", ".json": "application/json", ".py": "text/x-python"}


def as_list(value: Any) -> list[Any]:
    """Return a list unchanged, and any other value as a list of one."""
    return value if isinstance(value, list) else [value]


class Writer:
    """Adds the entities of one crate; ids are paths in the bundle, or begin with # if an entity has no file."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest, self.crate = folder, manifest, ROCrate(gen_preview=False, version="1.1")
        self.crate.name = f"memascend {manifest['version']}, profile {manifest['profile']}"
        self.crate.description = (
            "Runs, tables, figures and verdicts of a reproduction of five papers on offloaded training of large "
            "language models."
        )
        self.crate.license = "https://spdx.org/licenses/Apache-2.0"
        self.add("https://spdx.org/licenses/Apache-2.0", "CreativeWork", name="Apache License 2.0")
        self.agent = self.add("#authors", "Organization", name=AUTHORS)
        self.crate.root_dataset["author"] = self.agent
        versions = [address.rpartition("/")[2] for address in PROFILES]
        names = ("Process Run Crate", "Workflow Run Crate", "Provenance Run Crate", "Workflow RO-Crate")
        self.crate.root_dataset["conformsTo"] = [
            self.add(address, "CreativeWork", name=name, version=version)
            for address, name, version in zip(PROFILES, names, versions, strict=True)
        ]
        self.actions: list[tuple[str, ContextEntity]] = []  # rule, action

    def add(self, identifier: str, kind: str | list[str], **properties: Any) -> ContextEntity:
        """Add an entity and return it."""
        return self.crate.add(ContextEntity(self.crate, identifier, properties={"@type": kind, **properties}))

    def file(self, place: str, **properties: Any) -> Any:
        """Return the entity of a file in the bundle, added on first use."""
        found = self.crate.get(place)
        if found is None:
            path, kind = self.folder / place, KINDS.get(Path(place).suffix)
            facts = {"contentSize": str(path.stat().st_size)} | ({"encodingFormat": kind} if kind else {})
            found = self.crate.add_file(None, place, properties={**facts, **properties})
        return found

    def workflow(self) -> None:
        """Add the Snakefile with its steps, and Snakemake, which ran it."""
        language = self.add(
            "#snakemake-language", "ComputerLanguage", name="Snakemake", url={"@id": "https://snakemake.readthedocs.io"}
        )
        version = self.manifest["packages"].get("snakemake", "")
        self.engine = self.add("#snakemake", "SoftwareApplication", name="Snakemake", softwareVersion=version)
        self.engine["url"] = {"@id": "https://snakemake.readthedocs.io"}
        tools = {program: self.tool(program) for program in dict.fromkeys(STEPS.values())}
        self.tools = {rule: tools[program] for rule, program in STEPS.items()}
        steps = [
            self.add(f"#step-{rule}", "HowToStep", name=rule, position=str(place), workExample=self.tools[rule])
            for place, rule in enumerate(STEPS, 1)
        ]
        self.steps = dict(zip(STEPS, steps, strict=True))
        kinds = {"@type": ["File", "SoftwareSourceCode", "ComputationalWorkflow", "HowTo"]}
        parts = {"programmingLanguage": language, "step": steps, "hasPart": [*tools.values()]}
        self.main = self.file(WORKFLOW, name="memascend", **kinds, **parts)
        self.crate.root_dataset["mainEntity"] = self.main

    def tool(self, program: str) -> Any:
        """Return the entity of a program: its file in the sources, or an application by name."""
        if (self.folder / SOURCE / program).is_file():
            kind = {"@type": ["File", "SoftwareSourceCode"], "softwareVersion": self.manifest["version"]}
            return self.file(f"{SOURCE}/{program}", name=program, **kind)
        version = self.manifest["version"]
        return self.add(
            f"#tool-{program.replace('/', '-')}", "SoftwareApplication", name=program, softwareVersion=version
        )

    def action(self, rule: str, name: str, inputs: list[Any], results: list[Any], **properties: Any) -> None:
        """Add the action by which a rule made `results` from `inputs`."""
        facts = {"name": f"{rule}: {name}", "instrument": self.tools[rule], "agent": self.agent}
        facts |= {"result": results[0] if len(results) == 1 else results}
        facts |= {"object": inputs[0] if len(inputs) == 1 else inputs} if inputs else {}
        self.actions.append((rule, self.add(f"#{rule}-{name}", "CreateAction", **facts, **properties)))

    def run(self, name: str) -> Any:
        """Add the record of a run and the action that made it; return the record's entity."""
        record = json.loads((self.folder / RECORDS / name).read_text(encoding="utf-8"))
        entity = self.file(f"{RECORDS}/{name}", name=f"record of {record['run_id']}", lane="measured")
        begun = datetime.fromisoformat(record["started_at"])
        times = {"startTime": begun.isoformat()}
        if record.get("wall_s"):
            times["endTime"] = (begun + timedelta(seconds=record["wall_s"])).isoformat()
        status = COMPLETED if record["status"] == "ok" else FAILED
        more = {} if record["status"] == "ok" else {"error": record["status"]}
        host = f"{record['host']['cpu']}, {record['host']['cores']} cores"
        results = [entity]
        if (self.folder / RECORDS / name).with_suffix(TRACE).is_file():
            results.append(
                self.file(str(Path(RECORDS, name).with_suffix(TRACE)), name=f"samples of {record['run_id']}")
            )
        self.action("record", record["run_id"], [], results, **times, actionStatus=status, location=host, **more)
        return entity

    def exhibit(self, name: str, wanted: dict[str, Any], records: dict[str, Any]) -> list[Any]:
        """Add the picture and table of an exhibit and the action that made them; return their entities."""
        title = f"{registry.PAPERS[wanted['paper']]}, {name}: {wanted['title']}"
        results = [self.file(f"{FIGURES}/{name}.svg", name=title)]
        inputs = [records[each] for each in wanted["records"]]
        if wanted["table"]:
            results.append(self.file(f"{TABLES}/exhibits/{name}.csv", name=f"table of {name}"))
            inputs.append(self.file(f"{TABLES}/modelled/{wanted['paper']}.csv"))
            inputs += [self.file(f"{SOURCE}/{path}") for path in wanted["reference"]]
        self.action("figure" if wanted["table"] else "drawing", name, inputs, results, actionStatus=COMPLETED)
        return results

    def verdicts(self, tables: dict[str, Any]) -> None:
        """Add an assessment for each claim that is decided."""
        table = self.file(f"{TABLES}/claims.csv", name="every claim with its verdict")
        self.action("claims_table", "claims", [*tables.values()], [table], actionStatus=COMPLETED)
        for claim in json.loads((self.folder / "claims.json").read_text(encoding="utf-8")):
            if claim["verdict"] not in registry.DECIDED:
                continue
            facts = {name: claim[name] for name in ("lane", "basis", "verdict", "expected", "unit")}
            self.add(
                f"#claim-{claim['claim_id']}-{claim['lane']}",
                "AssessAction",
                name=claim["sentence"],
                object=tables[claim["exhibit_id"]],
                agent=self.agent,
                actionStatus=COMPLETED,
                **{name: value for name, value in facts.items() if value},
                **({"value": claim["value"]} if claim["value"] is not None else {}),
            )

    def whole(self) -> None:
        """Add the call of Snakemake that ran everything, which links actions to steps."""
        results = [each for _, action in self.actions for each in as_list(action["result"])]
        begins = [action["startTime"] for _, action in self.actions if action.get("startTime")]
        times = {"startTime": min(begins)} if begins else {}
        run = self.add(
            "#workflow-run",
            "CreateAction",
            name=f"snakemake --cores all figures --config profile={self.manifest['profile']}",
            instrument=self.main,
            agent=self.agent,
            result=results,
            actionStatus=COMPLETED,
            **times,
        )
        controls = [
            self.add(f"#control-{action.id[1:]}", "ControlAction", name=action["name"], instrument=self.steps[rule])
            for rule, action in self.actions
        ]
        for control, (_, action) in zip(controls, self.actions, strict=True):
            control["object"] = action
        engine = {"instrument": self.engine, "agent": self.agent, "object": controls, "result": run}
        self.add("#engine-run", "OrganizeAction", name="run of Snakemake", **engine, **times)
        self.crate.root_dataset["mentions"] = [run, *(action for _, action in self.actions)]

    def citations(self) -> None:
        """Add the papers and their authors, which the crate cites."""
        found = []
        for number, paper in enumerate(papers(), 1):
            identifier = f"https://doi.org/{paper['doi']}" if paper["doi"] else f"#paper-{number}"
            authors = [{"@id": f"#author-{name.replace(' ', '-')}"} for name in paper["authors"]]
            for name in paper["authors"]:
                if self.crate.get(f"#author-{name.replace(' ', '-')}") is None:
                    self.add(f"#author-{name.replace(' ', '-')}", "Person", name=name)
            found.append(self.add(identifier, "ScholarlyArticle", name=paper["title"], author=authors))
        self.crate.root_dataset["citation"] = found


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """Write ro-crate-metadata.json into a filled bundle; its date is that of the commit."""
    made = Writer(folder, manifest)
    made.workflow()
    records = {
        name: made.run(name) for name in sorted({r for e in manifest["exhibits"].values() for r in e["records"]})
    }
    for paper in registry.PAPERS:
        made.action(
            "modelled", paper, [], [made.file(f"{TABLES}/modelled/{paper}.csv", name=f"modelled lane of {paper}")]
        )
    tables = {}
    for name, wanted in manifest["exhibits"].items():
        results = made.exhibit(name, wanted, records)
        tables |= {name: results[1]} if wanted["table"] else {}
    made.verdicts(tables)
    made.whole()
    made.citations()
    made.crate.root_dataset["datePublished"] = manifest["committed"]
    made.crate.metadata.extra_terms.update(
        {term: f"https://w3id.org/memascend/terms#{term}" for term in ("lane", "basis", "verdict", "expected", "unit")}
    )
    made.crate.metadata.write(folder)
