# Pictures, and the page that shows them.


rule figure:
    input:
        unpack(lambda w: KNOWN.table_of(w.exhibit)),
    output:
        svg=f"{FIGURES}/{{exhibit}}.svg",
        others=multiext(f"{FIGURES}/{{exhibit}}", ".pdf", ".png", ".csv", ".md"),
    log:
        f"{DERIVED}/logs/{{exhibit}}.figure.log",
    conda:
        "../envs/memascend.yaml"
    params:
        figures=lambda w, output: os.path.dirname(output.svg),
        numbers=lambda w, input: (
            f"--table {input.table} --runs {input.runs}" if len(input) else ""
        ),
        code=lambda w: KNOWN.draws(w.exhibit),
    shell:
        "python -IS workflows/derive/ask.py figure --exhibit {wildcards.exhibit} {params.numbers}"
        " --out-dir {params.figures} > {log} 2>&1"


rule report_page:
    input:
        captions=expand(f"{FIGURES}/{{exhibit}}.md", exhibit=KNOWN.built),
        claims=f"{DERIVED}/claims.csv",
        said=KNOWN.said("exhibits.yaml"),
    output:
        page=f"{FIGURES}/index.html",
    log:
        f"{DERIVED}/logs/report.log",
    conda:
        "../envs/memascend.yaml"
    params:
        figures=lambda w, output: os.path.dirname(output.page),
        code=KNOWN.code("workflows.derive.report"),
    shell:
        "python -IS workflows/derive/ask.py report --claims {input.claims} --figures {params.figures}"
        " --out {output.page} > {log} 2>&1"
