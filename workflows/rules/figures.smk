# Rules that turn records and models into the tables and pictures of exhibits, and the pages that show them. An
# exhibit's table and picture are one job, because starting a job takes longer than computing a table.


rule modelled:
    output:
        table=f"{DERIVED}/modelled/{{paper}}.csv",
    log:
        f"{DERIVED}/logs/{{paper}}.modelled.log",
    conda:
        "../envs/memascend.yaml"
    params:
        code=lambda w: workflow_config.models(w.paper),
    shell:
        "python -IS workflows/derive/draw_client.py table --modelled-lane-of {wildcards.paper} --out {output.table} > {log} 2>&1"


rule figure:
    input:
        records=lambda w: workflow_config.records_of(w.exhibit),
        modelled=lambda w: workflow_config.modelled_of(w.exhibit),
        published=lambda w: workflow_config.published_of(w.exhibit),
        reference=lambda w: workflow_config.reference_of(w.exhibit),
    output:
        table=f"{DERIVED}/exhibits/{{exhibit}}.csv",
        runs=f"{DERIVED}/runs/{{exhibit}}.csv",
        svg=report(
            f"{FIGURES}/{{exhibit}}.svg",
            caption="../report/exhibit.rst",
            category=lambda w: workflow_config.paper_of(w.exhibit),
            labels=lambda w: workflow_config.report_labels(w.exhibit),
        ),
        others=multiext(f"{FIGURES}/{{exhibit}}", ".pdf", ".png", ".csv", ".md"),
    log:
        f"{DERIVED}/logs/{{exhibit}}.log",
    wildcard_constraints:
        exhibit="|".join(workflow_config.with_table),
    conda:
        "../envs/memascend.yaml"
    params:
        published=workflow_config.published,
        figures=lambda w, output: os.path.dirname(output.svg),
        modelled=lambda w, input: (
            f"--modelled {input.modelled}" if input.modelled else ""
        ),
        reference=lambda w, input: (
            f"--reference {input.reference}" if input.reference else ""
        ),
        code=lambda w: workflow_config.derives(w.exhibit),
        title=lambda w: workflow_config.entries[w.exhibit]["title"],
        caption=lambda w: workflow_config.caption(w.exhibit),
    shell:
        "python -IS workflows/derive/draw_client.py table --exhibit {wildcards.exhibit} --published {params.published}"
        " {params.modelled} {params.reference} --records {input.records} --out {output.table}"
        " --runs-out {output.runs} --draw-in {params.figures} > {log} 2>&1"


# Belongs to no exhibit: how far simulated seconds are from measured ones on this machine, if the profile measures that.
rule simulator:
    input:
        record=lambda w: workflow_config.simulator or workflow_config.no_simulator(),
    output:
        multiext(f"{FIGURES}/simulator", ".svg", ".pdf", ".png"),
    log:
        f"{DERIVED}/logs/simulator.log",
    conda:
        "../envs/memascend.yaml"
    params:
        figures=lambda w, output: os.path.dirname(output[0]),
        code=workflow_config.code("workflows.derive.simulator"),
    shell:
        "python -m workflows.derive.simulator {input.record} --draw-in {params.figures} > {log} 2>&1"


# Drawings of structure, which have no numbers.
rule drawing:
    output:
        svg=report(
            f"{FIGURES}/{{exhibit}}.svg",
            caption="../report/exhibit.rst",
            category=lambda w: workflow_config.paper_of(w.exhibit),
            labels=lambda w: workflow_config.report_labels(w.exhibit),
        ),
        others=multiext(f"{FIGURES}/{{exhibit}}", ".pdf", ".png", ".csv", ".md"),
    log:
        f"{DERIVED}/logs/{{exhibit}}.log",
    wildcard_constraints:
        exhibit="|".join(
            sorted({*workflow_config.built} - {*workflow_config.with_table})
        ),
    conda:
        "../envs/memascend.yaml"
    params:
        figures=lambda w, output: os.path.dirname(output.svg),
        code=lambda w: workflow_config.draws(w.exhibit),
        title=lambda w: workflow_config.entries[w.exhibit]["title"],
        caption=lambda w: workflow_config.caption(w.exhibit),
    shell:
        "python -IS workflows/derive/draw_client.py figure --exhibit {wildcards.exhibit} --draw-in {params.figures} > {log} 2>&1"


# One job writes all pages, since each page shows its neighbours and the verdicts of claims.
rule report_pages:
    input:
        captions=expand(f"{FIGURES}/{{exhibit}}.md", exhibit=workflow_config.built),
        runs=expand(
            f"{DERIVED}/runs/{{exhibit}}.csv", exhibit=workflow_config.with_table
        ),
        records=workflow_config.all_records(workflow_config.built),
        claims=f"{DERIVED}/claims.csv",
        against=workflow_config.against,
        said=workflow_config.said(
            "exhibits.yaml", "claims.yaml", "errata.yaml", "paper.yaml"
        ),
        site=workflow_config.site_sources,
    output:
        pages=expand(f"{FIGURES}/{{page}}.html", page=("index", "claims", "errata")),
        assets=expand(
            f"{FIGURES}/{{asset}}",
            asset=("site.css", "site.js", "compare.js", "timeline.js"),
        ),
        exhibits=directory(f"{FIGURES}/exhibits"),
        records=directory(f"{FIGURES}/records"),
        traces=directory(f"{FIGURES}/traces"),
    log:
        f"{DERIVED}/logs/report.log",
    conda:
        "../envs/memascend.yaml"
    params:
        figures=lambda w, output: os.path.dirname(output.pages[0]),
        runs=lambda w, input: os.path.dirname(input.runs[0]),
        raw=lambda w, input: os.path.dirname(input.records[0]),
        profile=workflow_config.config["profile"],
        against=lambda w, input: (f"--against {input.against}" if input.against else ""),
        code=workflow_config.code("workflows.derive.report"),
    shell:
        "python -IS workflows/derive/draw_client.py report --claims {input.claims} --runs {params.runs} --records {params.raw}"
        " --profile {params.profile} --figures {params.figures} {params.against} > {log} 2>&1"
