# From records and models to one tidy table for each exhibit.


rule measured:
    input:
        records=lambda w: records_of(w.exhibit),
        labels=lambda w: labels_of(w.exhibit),
        code=[
            "workflows/scripts/derive_measured.py",
            "workflows/scripts/check_latency.py",
            "workflows/scripts/nvme_latency.py",
            "workflows/scripts/derive_sweeps.py",
            "workflows/scripts/derive_times.py",
            "workflows/scripts/records.py",
            "workflows/scripts/tidy.py",
            "workflows/schemas/record.schema.json",
            "workflows/schemas/ledger.schema.json",
            *files_of("memascend/planner/spec.py", "memascend/planner/models/*"),
        ],
    output:
        table=f"{DERIVED}/measured/{{exhibit}}.csv",
        runs=f"{DERIVED}/runs/{{exhibit}}.csv",
    log:
        f"{DERIVED}/logs/{{exhibit}}.measured.log",
    conda:
        "../envs/memascend.yaml"
    shell:
        "python -m workflows.scripts.derive_measured --records {input.records} --out {output.table}"
        " --runs-out {output.runs} > {log} 2>&1"


rule exhibit_table:
    input:
        published=sorted(str(path) for path in Path(PUBLISHED).glob("*.csv")),
        modelled=rules.modelled.output.table,
        measured=rules.measured.output.table,
        code=["workflows/scripts/exhibit_table.py", "workflows/scripts/tidy.py"],
    output:
        table=f"{DERIVED}/exhibits/{{exhibit}}.csv",
    log:
        f"{DERIVED}/logs/{{exhibit}}.table.log",
    conda:
        "../envs/memascend.yaml"
    params:
        published=lambda w: PUBLISHED,
    shell:
        "python -m workflows.scripts.exhibit_table --exhibit {wildcards.exhibit} --published {params.published}"
        " --modelled {input.modelled} --measured {input.measured} --out {output.table} > {log} 2>&1"
