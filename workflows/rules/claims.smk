# The papers' claims, each with a verdict for each lane.


rule claims_table:
    input:
        claims=config["claims"],
        registry=config["exhibits"],
        tables=expand(f"{DERIVED}/exhibits/{{exhibit}}.csv", exhibit=BUILT),
        errata=sorted(
            str(path) for path in Path("workflows/papers").glob("*/errata.yaml")
        ),
        code=[
            "workflows/scripts/claims.py",
            "workflows/scripts/errata_page.py",
            "workflows/scripts/tidy.py",
            "memascend/planner/machine.py",
            "memascend/simulator/calibration.py",
        ],
    output:
        table=f"{DERIVED}/claims.csv",
        page=f"{FIGURES}/claims.html",
    log:
        f"{DERIVED}/logs/claims.log",
    conda:
        "../envs/memascend.yaml"
    params:
        tables=lambda w, input: Path(input.tables[0]).parent,
    shell:
        "python -m workflows.scripts.claims --claims {input.claims} --registry {input.registry} --tables {params.tables}"
        " --out {output.table} --page {output.page} > {log} 2>&1"
