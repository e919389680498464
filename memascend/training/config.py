"""The configuration of a run: one flat set of keys, the same in the YAML file and as command-line flags.

Every key except `model` and `data` has a default.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memascend.activation_policy import EXAMPLE, ActivationPolicy
from memascend.memory.budget import parse_bytes
from memascend.memory.placement_policy import PlacementPolicy
from memascend.planner.options import ACCUMULATION_ORDERS, DEFAULT_CLIP, MODEL_OPTIONS, STATE_VERSIONS
from memascend.storage.write_budget import WriteBudget
from memascend.suggestions import did_you_mean

SAVED_AS = "config.yaml"
CHECKPOINTS = ("full", "weights", "none")
# Keys of fine-tuning methods that are not supported: refused by name, since a silent full fine-tuning would surprise.
OUT_OF_SCOPE = dict.fromkeys(
    ("lora", "lora_r", "lora_alpha", "lora_rank", "qlora", "peft", "adapter", "load_in_4bit", "load_in_8bit"),
    "LoRA and other adapters are out of scope: memascend trains all weights; leave it out",
)
# Keys that may differ when a run is resumed; all others must stay. None changes the loss of a step, except that another
# number of steps changes the learning rates of the steps to come, which a resumed run says.
MAY_CHANGE_ON_RESUME = (
    "steps", "epochs", "nvme", "devices", "tiers", "write_budget", "host_memory", "save_every", "eval_every",
    "log_every", "keep", "checkpoints", "eval_sequences", "trace", "accumulation", "save_in_foreground",
)  # fmt: skip


def _option(
    default: Any,
    text: str,
    metavar: str = "",
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    below: float | None = None,
) -> Any:
    """Return a field with its help text, the placeholder of its value, and its limits (`least` is allowed, `below` is
    not)."""
    return dataclasses.field(default=default, metadata=_limits(text, metavar, choices, least, below))


def _limits(
    text: str,
    metavar: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    below: float | None = None,
) -> Any:
    return {"help": text, "metavar": metavar, "choices": choices, "least": least, "below": below}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The configuration of a run, with every key checked. The unit of each count is in its help text."""

    # What is trained.
    model: str = _option(
        "", "local folder, Hugging Face name (Qwen/Qwen2.5-0.5B), or a built-in name with --random-weights", "MODEL"
    )
    random_weights: bool = _option(False, "initialise the weights randomly instead of loading them, for trials")
    twin: int = _option(1, "divide the model's widths by K, a power of two (implies --random-weights)", "K", least=1)
    tokenizer: str | None = _option(
        None, "local folder or Hugging Face name; default: the model's, else one trained on the text", "NAME"
    )
    dtype: str = _option(
        "bf16",
        "dtype of weights and activations; fp32 only with --system in_memory or lohan",
        choices=("bf16", "fp16", "fp32"),
    )
    # What it is trained on.
    data: list[str] = dataclasses.field(
        default_factory=list,
        metadata=_limits("text files, folders, .jsonl files, or the name of one Hugging Face dataset", "PATH"),
    )
    files: str = _option("*", "pattern of the files to take from a folder, such as '*.py'", "PATTERN")
    text_field: str = _option("text", "field of a .jsonl file or dataset that holds the text", "FIELD")
    subset: str | None = _option(None, "configuration of a Hugging Face dataset", "NAME")
    split: str = _option("train", "split of a Hugging Face dataset", "NAME")
    eval_data: list[str] = dataclasses.field(
        default_factory=list,
        metadata=_limits("text for evaluation; default: a share of the documents of --data", "PATH"),
    )
    eval_share: float = _option(0.02, "share of the documents held out for evaluation", "SHARE", least=0, below=1)
    context: int | None = _option(
        None,
        "tokens per sequence, into which documents are packed; default 4096, or the model's maximum if less",
        "TOKENS",
        least=2,
    )
    # How it is trained.
    steps: int | None = _option(None, "optimizer steps; default: derived from --epochs", "N", least=1)
    epochs: float = _option(1.0, "passes over the data, unless --steps is given", "N", least=0.0001)
    batch: int = _option(1, "sequences per rank and micro-batch", "N", least=1)
    accumulate: int = _option(1, "micro-batches per optimizer step (gradient accumulation)", "N", least=1)
    accumulation: str = _option(
        "horizontal",
        "order of micro-batches (system lohan): vertical runs all micro-batches of a step through a block before the "
        "next block, so that weights are read only twice per step; horizontal runs one micro-batch after the other; "
        "auto: vertical if the micro-batches are independent (no dropout) and the CPU computes; all give the same bits",
        choices=ACCUMULATION_ORDERS,
    )
    learning_rate: float | None = _option(
        None, "peak learning rate; default 1e-5, or 5e-4 for random weights", "RATE", least=0
    )
    warmup: int | None = _option(None, "warm-up steps; default: 3 %% of all", "STEPS", least=0)
    schedule: str = _option(
        "cosine", "learning-rate schedule after the warm-up", choices=("cosine", "linear", "constant")
    )
    weight_decay: float = _option(0.01, "weight decay of AdamW", "X", least=0)
    beta1: float = _option(0.9, "beta1 of AdamW", "X", least=0, below=1)
    beta2: float = _option(0.999, "beta2 of AdamW", "X", least=0, below=1)
    eps: float = _option(1e-8, "epsilon of AdamW", "X", least=0)
    clip: float = _option(DEFAULT_CLIP, "maximum gradient norm; 0: no clipping", "NORM", least=0)
    seed: int = _option(0, "seed of the initial weights, the evaluation split and the order of the data", "N", least=0)
    # Which system trains it, and how memory is used.
    system: str = _option(
        "memascend", "memascend, lohan, zero_infinity, zero_offload, mlp_offload, ssdtrain, cxl, in_memory", "SYSTEM"
    )
    arm: str | None = _option(None, "variant of the system; default: its first", "VARIANT")
    ranks: int = _option(1, "processes, one per GPU", "N", least=1)
    matmul: str = _option(
        "auto",
        "bf16 matrix products on a CPU: native uses PyTorch's; fp32 computes in fp32 and rounds once; auto: fp32 if "
        "this CPU has no bf16 arithmetic (no AVX-512), where native products in backward are far slower",
        choices=("auto", "native", "fp32"),
    )
    threads: int | None = _option(
        None, "CPU threads per rank; default: all cores, divided among the ranks", "N", least=1
    )
    nvme: str | None = _option(None, "folder on the SSD for swap files; default: inside the output folder", "DIR")
    devices: list[str] = dataclasses.field(
        default_factory=list,
        metadata=_limits("raw devices to swap to instead of files, prepared by 'memascend storage format'", "DEVICE"),
    )
    tiers: list[str] = dataclasses.field(
        default_factory=list,
        metadata=_limits(
            "several folders or raw devices to swap to in parallel, each on its own drive, without RAID", "PATH"
        ),
    )
    write_budget: str | None = _option(
        None, "stop the run when a tier has been written this much: 300TB in total, or 0.5TB/day", "SIZE"
    )
    host_memory: str | None = _option(
        None,
        "limit on this training's host memory, all ranks together, such as 24GiB: checked by the plan and enforced "
        "while running",
        "SIZE",
    )
    placement: str | None = _option(
        None,
        "NUMA nodes of host buffers: latency_first, interleave, process_interleave, or {class: node, ...}",
        "POLICY",
    )
    copy_checkpoints: bool = _option(
        False, "write checkpoints in full, even what could share blocks with the swap files (XFS, Btrfs)"
    )
    state_versions: str = _option(
        "auto",
        "copies of the optimizer states on the SSD (system lohan): two; one, 18 instead of 28 bytes per parameter, "
        "with saved gradients from which an interrupted step is redone; auto: two if they fit; checkpoint: one, 14 "
        "bytes (18 with clipping), where a kill in the middle of a step resumes from the last checkpoint",
        choices=STATE_VERSIONS,
    )
    states: str = _option(
        "fp32",
        "dtype of master weights and optimizer states; bf16 halves the I/O; int8 (system lohan): bf16 weights are the "
        "only master and moments are 8-bit codes, 4.1 bytes per parameter",
        choices=("fp32", "bf16", "int8"),
    )
    gradients: str = _option("fp32", "dtype of the gradient accumulation buffer", choices=("fp32", "bf16"))
    attention: str = _option("auto", "attention implementation; flash needs a GPU", choices=MODEL_OPTIONS["attention"])
    loss: str = _option("chunked", "loss implementation; chunked never holds all logits", choices=MODEL_OPTIONS["loss"])
    checkpointing: str = _option(
        "offloaded",
        "gradient checkpointing; offloaded keeps the checkpoints in host memory, ssd offloads all activations to the "
        "SSD",
        choices=MODEL_OPTIONS["checkpointing"],
    )
    activations: str = _option(
        "auto",
        "with --checkpointing ssd: auto (what the SSD absorbs in time), all, bytes per forward pass such as 2GiB, or "
        f"a policy per block, first to last, as plan prints it: {EXAMPLE}",
        "POLICY",
    )
    activation_writes: str | None = _option(
        None,
        "with --checkpointing ssd: limit on the total bytes written for activations, such as 40TiB; default: no limit",
        "SIZE",
    )
    # What the run writes.
    output: str | None = _option(None, "output folder of the run; default: runs/<model>", "DIR")
    log_every: int = _option(1, "steps between log lines", "STEPS", least=1)
    eval_every: int = _option(0, "steps between evaluations; 0: only at the end", "STEPS", least=0)
    eval_sequences: int = _option(64, "maximum number of sequences per evaluation; 0: no evaluation", "N", least=0)
    save_every: int = _option(500, "steps between checkpoints; 0: only at the end", "STEPS", least=0)
    checkpoints: str = _option(
        "full",
        "contents of a checkpoint: full; or weights only, or none is written, if the states on the SSD outlive the "
        "run (system lohan): --resume continues from them, and memascend export turns them into a model folder",
        choices=CHECKPOINTS,
    )
    save_in_foreground: bool = _option(
        False,
        "training waits while a checkpoint is written; by default system lohan writes all but the last one while it "
        "trains on",
    )
    keep: int = _option(2, "number of newest checkpoints to keep", "N", least=1)
    trace: str | None = _option(
        None,
        "write the events of this call's second step to FILE, for Perfetto; with {step} in its name one file per step "
        "from the second on",
        "FILE",
    )

    @property
    def initialised(self) -> bool:
        """Whether the weights are initialised randomly rather than loaded."""
        return self.random_weights or self.twin > 1

    @property
    def saves_meanwhile(self) -> bool:
        """Whether checkpoints may be written while training continues.

        This requires a system that supports it, and never applies to the last checkpoint.
        """
        more = self.steps is None or 0 < self.save_every < self.steps
        return self.checkpoints != "none" and self.save_every > 0 and more and not self.save_in_foreground

    @property
    def output_folder(self) -> Path:
        """Absolute path of the run's folder, by default runs/<model>, with -k<K> for a twin."""
        label = self.model.rstrip("/").rsplit("/", 1)[-1]
        return Path(self.output or f"runs/{label if self.twin == 1 else f'{label}-k{self.twin}'}").absolute()

    def with_absolute_places(self) -> TrainConfig:
        """Return the configuration with absolute paths of its swap files and devices.

        A run may be resumed from another folder.
        """
        lists: dict[str, Any] = {
            name: [str(Path(path).absolute()) for path in getattr(self, name)] for name in ("devices", "tiers")
        }
        return dataclasses.replace(self, nvme=str(Path(self.nvme).absolute()) if self.nvme else None, **lists)

    @property
    def peak_learning_rate(self) -> float:
        """Learning rate after the warm-up; its default depends on whether the weights are initialised."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 5e-4 if self.initialised else 1e-5

    def activation_section(self) -> dict[str, Any] | None:
        """Return the section `activations` as a DeepSpeed JSON takes it; None unless checkpointing is `ssd`.

        Raises ValueError for sizes that cannot be parsed, or that are set although no activations go to the SSD.
        """
        amount: str | int = self.activations
        policy = self.activation_policy()
        if policy is None and amount not in ("auto", "all"):
            amount = parse_bytes(amount, "'activations' (auto, all, bytes, or a policy per block)")
        written = parse_bytes(self.activation_writes, "'activation_writes'") if self.activation_writes else None
        if self.checkpointing == "ssd":
            return ({"amount": amount} if policy is None else {"mix": str(policy)}) | {"write_budget_bytes": written}
        for name in ("activations", "activation_writes"):
            if getattr(self, name) != _FIELDS[name].default:
                raise ValueError(
                    f"'{name}' only applies with checkpointing ssd, but checkpointing is '{self.checkpointing}': set "
                    "it "
                    f"to ssd, or leave {name} out"
                )
        return None

    def activation_policy(self) -> ActivationPolicy | None:
        """Return the policy for each block's activations if `activations` is one, else None.

        Raises ValueError if the policy cannot be parsed.
        """
        meant = ActivationPolicy.looks_like_policy(self.activations)
        return ActivationPolicy.parse(self.activations, "'activations'") if meant else None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_TYPES: dict[str, Any] = typing.get_type_hints(TrainConfig)
_FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
OPTIONS = tuple(_FIELDS)


def help_of(name: str) -> str:
    """Return one line for `--help`: the description and the default."""
    field = _FIELDS[name]
    default = "" if field.default in (None, "", dataclasses.MISSING, False) else f" (default {field.default})"
    return f"{field.metadata['help']}{default}"


def metavar_of(name: str) -> str:
    """Return the placeholder for the value in `--help`: the choices, or the metavar."""
    metadata = _FIELDS[name].metadata
    return "{" + ",".join(metadata["choices"]) + "}" if metadata["choices"] else metadata["metavar"]


def is_flag(name: str) -> bool:
    """Return whether a key is set by its flag alone, without a value."""
    return _TYPES[name] is bool


def takes_many(name: str) -> bool:
    """Return whether a key's flag takes a list of values."""
    return bool(_TYPES[name] == list[str])


def read_config(path: Path) -> dict[str, Any]:
    """Return the keys of a YAML file, checked by name and type. Raises a one-line ValueError."""
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"the configuration {path} is not YAML: {error}") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"the configuration {path} holds no keys; it needs at least 'model: ...' and 'data: ...'")
    return {name: checked(name, value, f"{path}") for name, value in loaded.items()}


def choices() -> dict[str, tuple[str, ...]]:
    """Return the allowed values of each key that has a fixed set of them."""
    return {name: field.metadata["choices"] for name, field in _FIELDS.items() if field.metadata["choices"]}


def checked(name: Any, value: Any, where: str) -> Any:
    """Return `value` converted to the type of key `name`.

    Raises a ValueError that names `where` the value comes from, the key, what was expected and what was given.
    """
    if name in OUT_OF_SCOPE:
        raise ValueError(f"{where}: {OUT_OF_SCOPE[name]} ({name})")
    if name not in _FIELDS:
        hint = did_you_mean(name, OPTIONS) or f"; known keys: {', '.join(OPTIONS)}"
        raise ValueError(f"{where}: unknown key '{name}'{hint}")
    kind = _TYPES[name]
    if value is None and type(None) in typing.get_args(kind):
        return None
    if name == "placement":
        return PlacementPolicy.parse(value, f"{where}: 'placement'").as_text()
    plain = (
        next((part for part in typing.get_args(kind) if part in (int, float, str)), kind) if kind != list[str] else kind
    )
    return _in_range(name, _as_type(name, value, plain, where), where)


def _as_type(name: str, value: Any, kind: Any, where: str) -> Any:
    """Return `value` as `kind`: a whole number becomes a float, a text a list of one. Raises ValueError otherwise."""
    if kind == list[str]:
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list) and all(isinstance(item, str) and item for item in values):
            return list(values)
        raise ValueError(f"{where}: '{name}' must be a text or a list of texts, got {value!r}")
    wanted = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[kind]
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 1e-5, without a dot, as a string
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{where}: '{name}' must be {wanted}, got {value!r}") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where}: '{name}' must be {wanted}, got {value!r}")
    return value


def _in_range(name: str, value: Any, where: str) -> Any:
    """Return `value` if it is within the limits of its field. Raises ValueError otherwise."""
    limits = _FIELDS[name].metadata
    if limits["choices"] and value not in limits["choices"]:
        hint = did_you_mean(value, limits["choices"])
        if name == "accumulation" and str(value).isdecimal():
            hint = f" (did you mean the number of micro-batches, --accumulate {value}?)"
        raise ValueError(f"{where}: '{name}' must be one of {', '.join(limits['choices'])}, got {value!r}{hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: '{name}' must be a finite number, got {value!r}")
    if limits["least"] is not None and value < limits["least"]:
        raise ValueError(f"{where}: '{name}' must be at least {limits['least']}, got {value!r}")
    if limits["below"] is not None and value >= limits["below"]:
        raise ValueError(f"{where}: '{name}' must be below {limits['below']}, got {value!r}")
    return value


def from_text(name: str, text: str) -> Any:
    """Return the value of a command-line flag from its text. Raises a one-line ValueError."""
    kind = _TYPES[name]
    parts = {part for part in typing.get_args(kind) if part is not type(None)} or {kind}
    where = f"--{name.replace('_', '-')}"
    for number in (int, float):
        if number in parts:
            try:
                return checked(name, number(text), where)
            except ValueError as error:
                if "must be" in str(error):
                    raise
                what = "a whole number" if number is int else "a number"
                raise ValueError(f"{where}: '{text}' is not {what}") from None
    return checked(name, text, where)


def complete(values: dict[str, Any]) -> TrainConfig:
    """Return the configuration of checked keys.

    Raises ValueError if `model` or `data` is missing or if keys exclude one another.
    """
    config = TrainConfig(**values)
    if not config.model:
        if config.output and Path(config.output, SAVED_AS).is_file():
            raise ValueError(
                f"{config.output} holds a run: --resume continues it; for a new one name a --model and a folder"
            )
        raise ValueError("no model: name one with --model, or with 'model:' in the configuration")
    if not config.data:
        raise ValueError("no data: name text files, folders or a dataset with --data, or with 'data:'")
    if config.twin & (config.twin - 1):
        raise ValueError(f"--twin {config.twin} is not a power of two: use 2, 4, 8, 16 ...")
    if config.host_memory is not None:
        parse_bytes(config.host_memory)
    config.activation_section()
    if config.write_budget is not None:
        WriteBudget.parse(config.write_budget)
        if not config.tiers:
            raise ValueError("write_budget applies to tiers only: name the folders with --tiers")
    if config.tiers and config.devices:
        raise ValueError("tiers and devices are mutually exclusive: list the devices in --tiers")
    return config


def resumed(saved: dict[str, Any], wanted: dict[str, Any], otherwise: str = "") -> TrainConfig:
    """Return the configuration of a resumed run: the saved one, with the changes that are allowed.

    Other epochs without steps replace saved steps. Raises a ValueError that names the first key of `wanted` that
    differs and must not. `otherwise`: what its message advises if the key is not left out.
    """
    current = complete(saved)
    for name, value in wanted.items():
        if name in ("output", *MAY_CHANGE_ON_RESUME) or value == getattr(current, name):
            continue
        before = current.peak_learning_rate if name == "learning_rate" else getattr(current, name)
        was = "was not given" if before is None else f"was {before!r}"
        raise ValueError(
            f"--resume continues with the run's own configuration: '{name}' {was}, not {value!r}; leave it "
            f"out{otherwise}"
        )
    changes = {name: value for name, value in wanted.items() if name in MAY_CHANGE_ON_RESUME}
    if "steps" not in wanted and wanted.get("epochs", current.epochs) != current.epochs:
        changes["steps"] = None
    return dataclasses.replace(current, **changes)
