# The modelled lane: the planner on the testbeds of the papers.


rule modelled:
    input:
        code=model_code(),
    output:
        table=f"{DERIVED}/modelled.csv",
    log:
        f"{DERIVED}/logs/modelled.log",
    conda:
        "../envs/memascend.yaml"
    shell:
        "python -m workflows.scripts.model_lane --out {output.table} > {log} 2>&1"
