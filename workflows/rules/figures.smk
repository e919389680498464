# Pictures, and the page that shows them.


rule figure:
    input:
        table=rules.exhibit_table.output.table,
        runs=rules.measured.output.runs,
        registry=config["exhibits"],
        caption="workflows/report/{exhibit}.md",
        code=plot_code(),
    output:
        svg=f"{FIGURES}/{{exhibit}}.svg",
        others=multiext(f"{FIGURES}/{{exhibit}}", ".pdf", ".png", ".csv", ".md"),
    log:
        f"{DERIVED}/logs/{{exhibit}}.figure.log",
    conda:
        "../envs/memascend.yaml"
    params:
        figures=lambda w, output: Path(output.svg).parent,
    shell:
        "python -m workflows.scripts.plot_exhibit --exhibit {wildcards.exhibit} --table {input.table}"
        " --runs {input.runs} --registry {input.registry} --caption {input.caption}"
        " --out-dir {params.figures} > {log} 2>&1"


rule report_page:
    input:
        captions=expand(f"{FIGURES}/{{exhibit}}.md", exhibit=BUILT),
        claims=f"{DERIVED}/claims.csv",
        registry=config["exhibits"],
        code=["workflows/scripts/report.py", "workflows/scripts/tidy.py"],
    output:
        page=f"{FIGURES}/index.html",
    log:
        f"{DERIVED}/logs/report.log",
    conda:
        "../envs/memascend.yaml"
    params:
        figures=lambda w, output: Path(output.page).parent,
    shell:
        "python -m workflows.scripts.report --registry {input.registry} --claims {input.claims}"
        " --figures {params.figures} --out {output.page} > {log} 2>&1"
