# Measurements: one process, one record, one at a time.
# `threads: workflow.cores` keeps two of them apart within one call of Snakemake, the flock between two calls.


rule training_run:
    input:
        environment=lambda w: environment_of(run_named(RUNS, w.train_id)),
    output:
        record=f"{RAW}/{{train_id}}.json",
    log:
        f"{RAW}/logs/{{train_id}}.log",
    conda:
        "../envs/memascend.yaml"
    threads: workflow.cores
    params:
        python=lambda w: python_of(run_named(RUNS, w.train_id)),
        arguments=lambda w: training_arguments(run_named(RUNS, w.train_id)),
        lock=f"{RAW}/.machine.lock",
        code=lambda w: code_of("run_training", run_named(RUNS, w.train_id)),
        versions=versions(),
    shell:
        "flock {params.lock} {params.python} -m workflows.scripts.run_training --run-id {wildcards.train_id}"
        " {params.arguments} --out {output.record} > {log} 2>&1"


rule step_times:
    input:
        environments=lambda w: environments_of(run_named(TIMES, w.times_id)),
    output:
        record=f"{RAW}/{{times_id}}.json",
    log:
        f"{RAW}/logs/{{times_id}}.log",
    conda:
        "../envs/memascend.yaml"
    threads: workflow.cores
    params:
        arguments=lambda w: times_arguments(run_named(TIMES, w.times_id)),
        lock=f"{RAW}/.machine.lock",
        code=lambda w: code_of("time_arms", run_named(TIMES, w.times_id)),
        versions=versions(),
    shell:
        "flock {params.lock} python -m workflows.scripts.time_arms --run-id {wildcards.times_id}"
        " {params.arguments} --out {output.record} > {log} 2>&1"


rule overflow_bench:
    output:
        record=f"{RAW}/{{bench_id}}.json",
    log:
        f"{RAW}/logs/{{bench_id}}.log",
    conda:
        "../envs/memascend.yaml"
    threads: workflow.cores
    params:
        arguments=lambda w: overflow_arguments(run_named(BENCHES, w.bench_id)),
        time_limit_s=lambda w: run_named(BENCHES, w.bench_id)["time_limit_s"],
        lock=f"{RAW}/.machine.lock",
        code=lambda w: code_of("bench_overflow"),
        versions=versions(),
    shell:
        "flock {params.lock} timeout {params.time_limit_s} python -m workflows.scripts.bench_overflow"
        " --out {output.record} {params.arguments} > {log} 2>&1"


rule kernel_bench:
    output:
        record=f"{RAW}/{{kernel_id}}.json",
    log:
        f"{RAW}/logs/{{kernel_id}}.log",
    conda:
        "../envs/memascend.yaml"
    threads: workflow.cores
    params:
        arguments=lambda w: bench_arguments(run_named(KERNELS, w.kernel_id)),
        time_limit_s=lambda w: run_named(KERNELS, w.kernel_id)["time_limit_s"],
        lock=f"{RAW}/.machine.lock",
        code=lambda w: code_of("bench_record"),
        versions=versions(),
    shell:
        "flock {params.lock} timeout {params.time_limit_s} python -m workflows.scripts.bench_record"
        " --out {output.record} {params.arguments} > {log} 2>&1"


rule machine:
    output:
        record=f"{RAW}/testbed-local.json",
    log:
        f"{RAW}/logs/testbed-local.log",
    conda:
        "../envs/memascend.yaml"
    shell:
        "python -m workflows.scripts.probe_record --run-id testbed-local --out {output.record} > {log} 2>&1"
