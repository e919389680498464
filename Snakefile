# The way in: snakemake --cores all figures
# Also: tables, claims, report, exhibits, artifact, artifact-verify, flagship; one exhibit by its id (memascend-fig11); one paper by its name (lohan).
from snakemake.utils import min_version

min_version("9.0")


configfile: "workflows/config/config.yaml"


report: "workflows/report/workflow.rst"


include: "workflows/rules/common.smk"
include: "workflows/rules/runs.smk"
include: "workflows/rules/claims.smk"
include: "workflows/rules/figures.smk"
include: "workflows/rules/artifact.smk"


# Seconds each, and forked from a process of this machine: an executor hands nodes the runs alone.
localrules:
    exhibits,
    modelled,
    figure,
    drawing,
    claims_table,
    report_pages,
    artifact,


rule figures:
    default_target: True
    input:
        KNOWN.drawn(KNOWN.built),
        f"{FIGURES}/index.html",


rule tables:
    input:
        expand(f"{DERIVED}/exhibits/{{exhibit}}.csv", exhibit=KNOWN.with_table),


rule claims:
    input:
        f"{FIGURES}/claims.html",


rule report:
    input:
        f"{FIGURES}/index.html",
        f"{FIGURES}/claims.html",


rule exhibits:
    log:
        f"{DERIVED}/logs/exhibits.log",
    conda:
        "workflows/envs/memascend.yaml"
    params:
        lines=lambda w: KNOWN.listing,
    shell:
        "printf '%s\\n' {params.lines:q} > {log} && {{ cat {log} || true; }}"


for exhibit in KNOWN.entries:

    rule:
        name:
            exhibit
        input:
            KNOWN.drawn([exhibit]) if exhibit in KNOWN.built else KNOWN.planned(exhibit),


for paper in KNOWN.papers:

    rule:
        name:
            KNOWN.target_of(paper)
        input:
            KNOWN.of_paper(paper),


if not workflow.remote_exec:
    KNOWN.refuse_mistyped_targets([made.name for made in workflow.rules])
    CONSOLE.attach()


onstart:
    start_servers(KNOWN)


onsuccess:
    CONSOLE.end(workflow.dag_settings.targets)


onerror:
    CONSOLE.failed(log if isinstance(log, list) else [log])
