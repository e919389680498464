# The papers' claims, each with a verdict per lane.


rule claims_table:
    input:
        said=workflow_config.said("claims.yaml"),
        tolerances=[
            "workflows/papers/tolerances.yaml",
            "workflows/papers/tolerance-history.csv",
        ],
        tables=expand(
            f"{DERIVED}/exhibits/{{exhibit}}.csv", exhibit=workflow_config.claimed
        ),
    output:
        table=f"{DERIVED}/claims.csv",
    log:
        f"{DERIVED}/logs/claims.log",
    conda:
        "../envs/memascend.yaml"
    params:
        tables=lambda w, input: os.path.dirname(input.tables[0]),
        code=workflow_config.code("workflows.derive.claims"),
    shell:
        "python -IS workflows/derive/draw_client.py claims --tables {params.tables} --out {output.table} > {log} 2>&1"
