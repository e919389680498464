# Measurements: each is one process that writes one record. Timed runs have the machine to themselves: `threads` keeps
# two apart within one call of Snakemake, the flock between two calls. Memory runs measure allocation events, so they
# may run concurrently. On a cluster, timed runs have a node to themselves (resources).


# Memory runs on one machine. Their processes are forked from a server, so a benchmark of this job would not see them.
rule forked_record:
    input:
        interpreters=lambda w: workflow_config.interpreters(w.run_id),
    output:
        record=f"{RAW}/{{run_id}}.json",
    log:
        f"{RAW}/logs/{{run_id}}.log",
    wildcard_constraints:
        run_id=workflow_config.not_sampled,
    conda:
        "../envs/memascend.yaml"
    threads: lambda w: workflow_config.threads(w.run_id, cores())
    resources:
        **workflow_config.resources,
    params:
        command=lambda w: workflow_config.command(w.run_id),
        code=lambda w: workflow_config.measures(w.run_id),
    shell:
        "({params.command}) > {log} 2>&1"


# All other runs, with Snakemake's samples of their processes: seconds, memory, I/O (docs/reference/files.md).
use rule forked_record as record with:
    benchmark:
        f"{RAW}/benchmarks/{{run_id}}.tsv"
    wildcard_constraints:
        run_id="[a-z0-9._-]+",


# Part of no profile: the 8B model takes an hour and more, root for a control group, and 65 GB of the drive.
rule flagship:
    output:
        record=f"{RAW}/flagship-llama3.1-8b.json",
    log:
        f"{RAW}/logs/flagship-llama3.1-8b.log",
    benchmark:
        f"{RAW}/benchmarks/flagship-llama3.1-8b.tsv"
    conda:
        "../envs/memascend.yaml"
    threads: lambda w: cores()
    params:
        lock=workflow_config.lock,
    shell:
        "flock {params.lock} python -m workflows.run.flagship --states int8 --out {output.record} > {log} 2>&1"


ruleorder: flagship > forked_record > record
