"""Names of the arms of Figs. 14 and 15 in both lanes, and which of them are compared.

The bars of a figure add one part after another. A bar whose name ends with "alone" has only that part; so does "Enable
Caching", the first part that is added.
"""

ZERO, OURS = "DeepSpeed ZeRO-3", "MLP-Offload"
# Figure -> its bars: name -> arm.
BARS = {
    "mlpoffload-fig14": {
        ZERO: "zero3",
        "Enable Caching": "caching",
        "Skip Gradients": "skip_gradients",
        "Process Atomic R/W": "exclusive",
        "Skip Gradients alone": "gradients_only",
        "Process Atomic R/W alone": "exclusive_only",
    },
    "mlpoffload-fig15": {
        ZERO: "zero3",
        "Multi-Path alone": "multi_path_only",
        "Multi-Path, Caching": "caching_only_all_paths",
        OURS: "mlp_offload",
    },
}
# Exhibit, series and metric -> the slower bar and the faster one.
RATIOS = {
    ("mlpoffload-fig14", "all opts, NVMe only / ZeRO-3", "speedup_max"): (ZERO, "Process Atomic R/W"),
    ("mlpoffload-fig15", "multi-path / Fig 14", "speedup"): ("Process Atomic R/W", OURS),
    ("mlpoffload-fig15", "MLP-Offload / ZeRO-3", "speedup"): (ZERO, OURS),
}
MOVED = 14  # bytes per parameter of Fig. 9: half of 16 read and 12 written
