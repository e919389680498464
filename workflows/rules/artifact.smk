# A profile's artifact is one zip with sources, records, tables, pictures and verdicts; artifact-verify checks one from
# the zip alone.


rule artifact:
    input:
        workflow_config.drawn(workflow_config.built),
        expand(f"{DERIVED}/modelled/{{paper}}.csv", paper=workflow_config.papers),
        expand(
            f"{DERIVED}/exhibits/{{exhibit}}.csv", exhibit=workflow_config.with_table
        ),
        f"{DERIVED}/claims.csv",
        f"{FIGURES}/index.html",
    output:
        workflow_config.artifact,
    log:
        f"{DERIVED}/logs/artifact.log",
    conda:
        "../envs/memascend.yaml"
    params:
        config=json.dumps(workflow_config.config),
        commit=lambda w: workflow_config.commit,
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
        bundle=lambda w: workflow_config.bundle,
        experiments=workflow_config.own_experiments,
    shell:
        "python -m workflows.artifact.verify {params.bundle:q} {params.experiments:q} 2>&1 | tee {log}"
