# From records and models to one tidy table for each exhibit.


rule modelled:
    output:
        table=f"{DERIVED}/modelled/{{paper}}.csv",
    log:
        f"{DERIVED}/logs/{{paper}}.modelled.log",
    conda:
        "../envs/memascend.yaml"
    params:
        code=lambda w: KNOWN.models(w.paper),
    shell:
        "python -IS workflows/derive/ask.py table --modelled-lane-of {wildcards.paper} --out {output.table} > {log} 2>&1"


rule table:
    input:
        records=lambda w: KNOWN.records_of(w.exhibit),
        modelled=lambda w: KNOWN.modelled_of(w.exhibit),
        published=lambda w: KNOWN.published_of(w.exhibit),
        reference=lambda w: KNOWN.reference_of(w.exhibit),
    output:
        table=f"{DERIVED}/exhibits/{{exhibit}}.csv",
        runs=f"{DERIVED}/runs/{{exhibit}}.csv",
    log:
        f"{DERIVED}/logs/{{exhibit}}.table.log",
    conda:
        "../envs/memascend.yaml"
    params:
        published=KNOWN.published,
        modelled=lambda w, input: (
            f"--modelled {input.modelled}" if input.modelled else ""
        ),
        reference=lambda w, input: (
            f"--reference {input.reference}" if input.reference else ""
        ),
        code=lambda w: KNOWN.derives(w.exhibit),
    shell:
        "python -IS workflows/derive/ask.py table --exhibit {wildcards.exhibit} --published {params.published}"
        " {params.modelled} {params.reference} --records {input.records} --out {output.table}"
        " --runs-out {output.runs} > {log} 2>&1"
