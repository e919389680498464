# The way in: snakemake --cores all figures
# Also: tables, claims, report, exhibits, artifact; one exhibit by its id (memascend-fig11); one paper by its name (lohan).
from snakemake.utils import min_version

min_version("9.0")


configfile: "workflows/config/config.yaml"


include: "workflows/rules/common.smk"
include: "workflows/rules/runs.smk"
include: "workflows/rules/model.smk"
include: "workflows/rules/tables.smk"
include: "workflows/rules/claims.smk"
include: "workflows/rules/figures.smk"


rule figures:
    default_target: True
    input:
        expand(f"{FIGURES}/{{exhibit}}.svg", exhibit=BUILT),
        f"{FIGURES}/index.html",
        records=all_records(BUILT),


rule tables:
    input:
        expand(f"{DERIVED}/exhibits/{{exhibit}}.csv", exhibit=BUILT),


rule claims:
    input:
        f"{FIGURES}/claims.html",


rule report:
    input:
        f"{FIGURES}/index.html",
        f"{FIGURES}/claims.html",


rule artifact:
    input:
        rules.figures.input,
        rules.tables.input,
        rules.report.input,


rule exhibits:
    input:
        registry=config["exhibits"],
    log:
        f"{DERIVED}/logs/exhibits.log",
    conda:
        "workflows/envs/memascend.yaml"
    params:
        figures=FIGURES,
    shell:
        "python -m workflows.scripts.list_exhibits --registry {input.registry} --figures {params.figures} | tee {log}"


for entry in EXHIBITS:

    rule:
        name:
            entry["id"]
        input:
            [f"{FIGURES}/{entry['id']}.svg", *all_records([entry["id"]])]
            if entry["status"] == "built"
            else planned(entry),


for paper in PAPERS:

    rule:
        name:
            PAPER_TARGETS.get(paper, paper)
        input:
            paper_figures(paper),


refuse_mistyped_targets(sys.argv[1:], [made.name for made in workflow.rules])


onstart:
    start_fork_server()


onsuccess:
    list_planned(workflow.dag_settings.targets)
