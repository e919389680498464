# A profile's artifact: one zip with sources, records, tables, pictures and verdicts; and a check of one, from the zip alone.


rule artifact:
    input:
        KNOWN.drawn(KNOWN.built),
        expand(f"{DERIVED}/modelled/{{paper}}.csv", paper=KNOWN.papers),
        expand(f"{DERIVED}/exhibits/{{exhibit}}.csv", exhibit=KNOWN.with_table),
        f"{DERIVED}/claims.csv",
        f"{FIGURES}/index.html",
    output:
        KNOWN.artifact,
    log:
        f"{DERIVED}/logs/artifact.log",
    conda:
        "../envs/memascend.yaml"
    params:
        config=json.dumps(KNOWN.config),
        commit=lambda w: KNOWN.commit,
    shell:
        "python -m workflows.artifact.bundle --config {params.config:q} --out {output} 2>&1 | tee {log}"


rule:
    name:
        "artifact-verify"
    log:
        f"{DERIVED}/logs/artifact-verify.log",
    conda:
        "../envs/memascend.yaml"
    params:
        bundle=lambda w: KNOWN.bundle,
    shell:
        "python -m workflows.artifact.verify {params.bundle:q} 2>&1 | tee {log}"
