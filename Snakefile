# Usage: snakemake --cores all figures
# Also: tables, claims, report, exhibits, artifact, artifact-verify, flagship; one exhibit by its id (memascend-fig11);
# one paper by its name (lohan).
from snakemake.utils import min_version

min_version("9.0")


configfile: "workflows/config/config.yaml"


report: "workflows/report/workflow.rst"


include: "workflows/rules/common.smk"
include: "workflows/rules/runs.smk"
include: "workflows/rules/claims.smk"
include: "workflows/rules/figures.smk"
include: "workflows/rules/artifact.smk"


# These jobs take seconds each and are forked from a process on this machine; an executor submits only the runs to
# nodes.
localrules:
    exhibits,
    modelled,
    figure,
    simulator,
    drawing,
    claims_table,
    report_pages,
    artifact,


rule figures:
    default_target: True
    input:
        workflow_config.drawn(workflow_config.built),
        f"{FIGURES}/index.html",
        f"{FIGURES}/simulator.svg" if workflow_config.simulator else [],


rule tables:
    input:
        expand(
            f"{DERIVED}/exhibits/{{exhibit}}.csv", exhibit=workflow_config.with_table
        ),


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
        lines=lambda w: workflow_config.listing,
    shell:
        "printf '%s\\n' {params.lines:q} > {log} && {{ cat {log} || true; }}"


for exhibit in workflow_config.entries:

    rule:
        name:
            exhibit
        input:
            workflow_config.drawn([exhibit])
            if exhibit in workflow_config.built
            else workflow_config.planned(exhibit),


for paper in workflow_config.papers:

    rule:
        name:
            workflow_config.target_of(paper)
        input:
            workflow_config.of_paper(paper),


if not workflow.remote_exec:
    workflow_config.refuse_missing_profile()
    workflow_config.refuse_mistyped_targets([made.name for made in workflow.rules])
    CONSOLE.attach()


onstart:
    require_executor(workflow.executor_plugin.name)
    start_servers(workflow_config)


onsuccess:
    CONSOLE.end(workflow.dag_settings.targets)


onerror:
    CONSOLE.failed(log if isinstance(log, list) else [log])
