"""What a run can be told: one flat set of keys, the same in the YAML file and as flags. Every key but `model` and
`data` has a default."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memascend.fates import EXAMPLE, BlockFates
from memascend.memory.budget import parse_bytes
from memascend.memory.placement_policy import PlacementPolicy
from memascend.planner.options import DEFAULT_CLIP, MODEL_OPTIONS, STATE_VERSIONS
from memascend.storage.write_budget import WriteBudget

SAVED_AS = "config.yaml"
CHECKPOINTS = ("full", "weights", "none")
# Keys of runs that this command does not do: refused by name, since a silent full fine-tuning would be a surprise.
OUT_OF_SCOPE = dict.fromkeys(
    ("lora", "lora_r", "lora_alpha", "lora_rank", "qlora", "peft", "adapter", "load_in_4bit", "load_in_8bit"),
    "LoRA and other adapters are out of scope: memascend trains all weights; leave it out",
)
# What may differ when a run goes on: none of it changes a loss before the new end. All else must stay as it was.
MAY_CHANGE_ON_RESUME = (
    "steps", "epochs", "nvme", "devices", "tiers", "write_budget", "host_memory", "save_every", "eval_every",
    "log_every", "keep", "checkpoints", "eval_sequences", "trace", "accumulation",
)  # fmt: skip


def _option(
    default: Any, text: str, *, choices: tuple[str, ...] = (), least: float | None = None, below: float | None = None
) -> Any:
    return dataclasses.field(default=default, metadata=_limits(text, choices, least, below))


def _limits(text: str, choices: tuple[str, ...] = (), least: float | None = None, below: float | None = None) -> Any:
    return {"help": text, "choices": choices, "least": least, "below": below}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run, checked key by key. Counts are steps, sequences or tokens as their help says."""

    # What is trained.
    model: str = _option("", "local folder, hub name (Qwen/Qwen2.5-0.5B), or a committed name with --random-weights")
    random_weights: bool = _option(False, "initialise the weights instead of loading them: to try things out")
    twin: int = _option(1, "divide the model's widths by k, a power of two (implies random weights)", least=1)
    tokenizer: str | None = _option(
        None, "local folder or hub name; default: the model's, else one trained on the text"
    )
    dtype: str = _option(
        "bf16", "weights and activations; fp32: in_memory and lohan alone", choices=("bf16", "fp16", "fp32")
    )
    # What it is trained on.
    data: list[str] = dataclasses.field(
        default_factory=list, metadata=_limits("text files, folders, .jsonl files, or one datasets name")
    )
    files: str = _option("*", "which files of a folder: a pattern such as '*.py'")
    text_field: str = _option("text", "field of a .jsonl file or dataset that holds the text")
    subset: str | None = _option(None, "configuration of a hub dataset")
    split: str = _option("train", "split of a hub dataset")
    eval_data: list[str] = dataclasses.field(
        default_factory=list, metadata=_limits("text to evaluate on; default: a share of the documents of --data")
    )
    eval_share: float = _option(0.02, "share of the documents kept for evaluation", least=0, below=1)
    context: int | None = _option(
        None, "tokens a sequence, that documents are packed to; default 4096, or the model's longest if less", least=2
    )
    # How.
    steps: int | None = _option(None, "optimizer steps; default: as --epochs says", least=1)
    epochs: float = _option(1.0, "passes over the data, where --steps is not given", least=0.0001)
    batch: int = _option(1, "sequences a rank at a time", least=1)
    accumulate: int = _option(1, "batches whose gradients are added up before a step", least=1)
    accumulation: str = _option(
        "horizontal",
        "of system lohan: vertical, all batches of a step through a block before the next block, so that weights are "
        "read twice a step; horizontal, one batch after the other; auto: vertical where the batches are independent "
        "(no dropout) and the CPU computes; equal bits",
        choices=("auto", "vertical", "horizontal"),
    )
    learning_rate: float | None = _option(None, "at its highest; default 1e-5, and 5e-4 for random weights", least=0)
    warmup: int | None = _option(None, "steps over which it rises; default: 3 %% of all", least=0)
    schedule: str = _option("cosine", "how it falls afterwards", choices=("cosine", "linear", "constant"))
    weight_decay: float = _option(0.01, "AdamW's", least=0)
    beta1: float = _option(0.9, "AdamW's", least=0, below=1)
    beta2: float = _option(0.999, "AdamW's", least=0, below=1)
    eps: float = _option(1e-8, "AdamW's", least=0)
    clip: float = _option(DEFAULT_CLIP, "largest norm of the gradients; 0 leaves them as they are", least=0)
    seed: int = _option(0, "of the initial weights, the split and the order of the data", least=0)
    # Where memory goes.
    system: str = _option(
        "memascend", "memascend, lohan, zero_infinity, zero_offload, mlp_offload, ssdtrain, cxl, in_memory"
    )
    arm: str | None = _option(None, "a variant of the system; default: its first")
    ranks: int = _option(1, "processes, one a GPU", least=1)
    matmul: str = _option(
        "auto",
        "on a CPU, products of bf16 matrices: native, PyTorch's; fp32, and rounded once; auto: fp32 where this CPU has "
        "no bf16 arithmetic (no AVX-512), and native products of backward take far longer",
        choices=("auto", "native", "fp32"),
    )
    threads: int | None = _option(None, "CPU threads a rank; default: all cores, shared out", least=1)
    nvme: str | None = _option(None, "folder on the SSD for swap files; default: in the output folder")
    devices: list[str] = dataclasses.field(
        default_factory=list,
        metadata=_limits("raw devices to swap to in place of files, made ready by 'memascend storage format'"),
    )
    tiers: list[str] = dataclasses.field(
        default_factory=list,
        metadata=_limits(
            "several folders or raw devices to swap to together, each on a drive of its own, without RAID"
        ),
    )
    write_budget: str | None = _option(
        None, "what each of the tiers may be written before the run stops: 300TB in all, or 0.5TB/day"
    )
    host_memory: str | None = _option(
        None, "host memory that this training may take, all ranks, as 24GiB: planned first, and a limit while it runs"
    )
    placement: str | None = _option(
        None, "NUMA nodes of host buffers: latency_first, interleave, process_interleave, or {class: node, ...}"
    )
    copy_checkpoints: bool = _option(
        False, "write all of a checkpoint, also what could share its blocks with the swap files (XFS, Btrfs)"
    )
    state_versions: str = _option(
        "auto",
        "of system lohan's states on the SSD: two, or one, 18 bytes a parameter for 28, with gradients that a step is "
        "done again from; auto: two where they fit; checkpoint: one alone, 14 bytes (18 with clipping), and after a "
        "kill in the middle of a step on from the last checkpoint",
        choices=STATE_VERSIONS,
    )
    states: str = _option(
        "fp32",
        "master weights and optimizer states; bf16 halves the I/O; int8 (system lohan): bf16 weights are the only "
        "master and moments are 8-bit codes, 4.1 bytes a parameter",
        choices=("fp32", "bf16", "int8"),
    )
    gradients: str = _option("fp32", "the buffer that gradients are added up in", choices=("fp32", "bf16"))
    attention: str = _option("auto", "flash needs a GPU", choices=MODEL_OPTIONS["attention"])
    loss: str = _option("chunked", "chunked never holds all logits", choices=MODEL_OPTIONS["loss"])
    checkpointing: str = _option(
        "offloaded",
        "gradient checkpointing; offloaded keeps the checkpoints in host memory, ssd sends all activations to the SSD",
        choices=MODEL_OPTIONS["checkpointing"],
    )
    activations: str = _option(
        "auto",
        "with checkpointing ssd: auto (what the SSD takes in time), all, bytes a forward pass such as 2GiB, or what "
        f"becomes of the blocks, first to last, as plan prints it: {EXAMPLE}",
    )
    activation_writes: str | None = _option(
        None, "with checkpointing ssd: what may be written for activations in all, as 40TiB; default: no limit"
    )
    # What it leaves behind.
    output: str | None = _option(None, "folder of the run; default: runs/<model>")
    log_every: int = _option(1, "steps between two lines", least=1)
    eval_every: int = _option(0, "steps between two evaluations; 0: at the end alone", least=0)
    eval_sequences: int = _option(64, "at most so many sequences an evaluation; 0: none", least=0)
    save_every: int = _option(500, "steps between two checkpoints; 0: at the end alone", least=0)
    checkpoints: str = _option(
        "full",
        "what a checkpoint holds: all; or the weights alone, or none is written, where the states on the SSD outlive "
        "the run (system lohan): --resume goes on from them, and memascend export makes a model folder of them",
        choices=CHECKPOINTS,
    )
    keep: int = _option(2, "checkpoints that are kept, the newest", least=1)
    trace: str | None = _option(
        None,
        "file for the events of this call's second step, which Perfetto opens; with {step} in its name a file for each "
        "step from the second on",
    )

    @property
    def initialised(self) -> bool:
        """Whether the weights are initialised rather than loaded."""
        return self.random_weights or self.twin > 1

    @property
    def output_folder(self) -> Path:
        label = self.model.rstrip("/").rsplit("/", 1)[-1]
        return Path(self.output or f"runs/{label if self.twin == 1 else f'{label}-k{self.twin}'}").absolute()

    @property
    def peak_learning_rate(self) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        return 5e-4 if self.initialised else 1e-5

    def activation_section(self) -> dict[str, Any] | None:
        """As the section `activations` of a DeepSpeed JSON takes it; None without checkpointing `ssd`.

        Raises ValueError for sizes that cannot be read, and where they are set and nothing goes to the SSD.
        """
        amount: str | int = self.activations
        fates = self.block_fates()
        if fates is None and amount not in ("auto", "all"):
            amount = parse_bytes(amount, "'activations' (auto, all, bytes, or fates of blocks)")
        written = parse_bytes(self.activation_writes, "'activation_writes'") if self.activation_writes else None
        if self.checkpointing == "ssd":
            return ({"amount": amount} if fates is None else {"mix": str(fates)}) | {"write_budget_bytes": written}
        for name in ("activations", "activation_writes"):
            if getattr(self, name) != _FIELDS[name].default:
                raise ValueError(
                    f"'{name}' says how activations go to the SSD, and checkpointing is '{self.checkpointing}': set it "
                    f"to ssd, or leave {name} out"
                )
        return None

    def block_fates(self) -> BlockFates | None:
        """What becomes of each block's activations, where `activations` says so; ValueError where it cannot be read."""
        meant = BlockFates.is_meant(self.activations)
        return BlockFates.parse(self.activations, "'activations'") if meant else None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_TYPES: dict[str, Any] = typing.get_type_hints(TrainConfig)
_FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
OPTIONS = tuple(_FIELDS)


def help_of(name: str) -> str:
    """One line for `--help`: text, choices, default."""
    field = _FIELDS[name]
    default = "" if field.default in (None, "", dataclasses.MISSING, False) else f" (default {field.default})"
    choices = f": {', '.join(field.metadata['choices'])}" if field.metadata["choices"] else ""
    return f"{field.metadata['help']}{choices}{default}"


def is_flag(name: str) -> bool:
    return _TYPES[name] is bool


def takes_many(name: str) -> bool:
    return _TYPES[name] == list[str]


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a YAML file, checked by name and type; ValueError in one line."""
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"the configuration {path} is not YAML: {error}") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"the configuration {path} holds no keys; the least is 'model: ...' and 'data: ...'")
    return {name: checked(name, value, f"{path}") for name, value in loaded.items()}


def checked(name: Any, value: Any, where: str) -> Any:
    """`value` as the type of key `name`; ValueError that names place, key, expected and got."""
    if name in OUT_OF_SCOPE:
        raise ValueError(f"{where}: {OUT_OF_SCOPE[name]} ({name})")
    if name not in _FIELDS:
        near = difflib.get_close_matches(str(name), OPTIONS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else f"; known keys: {', '.join(OPTIONS)}"
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
    if kind == list[str]:
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list) and all(isinstance(item, str) and item for item in values):
            return list(values)
        raise ValueError(f"{where}: '{name}' must be a text or a list of texts, got {value!r}")
    wanted = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[kind]
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 1e-5, without a dot, as a text
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
    limits = _FIELDS[name].metadata
    if limits["choices"] and value not in limits["choices"]:
        raise ValueError(f"{where}: '{name}' must be one of {', '.join(limits['choices'])}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: '{name}' must be a finite number, got {value!r}")
    if limits["least"] is not None and value < limits["least"]:
        raise ValueError(f"{where}: '{name}' must be at least {limits['least']}, got {value!r}")
    if limits["below"] is not None and value >= limits["below"]:
        raise ValueError(f"{where}: '{name}' must be below {limits['below']}, got {value!r}")
    return value


def from_text(name: str, text: str) -> Any:
    """The value of a flag; ValueError in one line."""
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
    """A configuration of checked keys; ValueError where `model` or `data` is missing or keys exclude one another."""
    config = TrainConfig(**values)
    if not config.model:
        raise ValueError("no model: name one with --model, or with 'model:' in the configuration")
    if not config.data:
        raise ValueError("no data: name text files, folders or a dataset with --data, or with 'data:'")
    if config.twin & (config.twin - 1):
        raise ValueError(f"--twin {config.twin} is not a power of two: take 2, 4, 8, 16 ...")
    if config.host_memory is not None:
        parse_bytes(config.host_memory)
    config.activation_section()
    if config.write_budget is not None:
        WriteBudget.parse(config.write_budget)
        if not config.tiers:
            raise ValueError("write_budget counts what tiers are written: name the folders with --tiers")
    if config.tiers and config.devices:
        raise ValueError("tiers and devices exclude one another: name the devices among the --tiers")
    return config


def resumed(saved: dict[str, Any], wanted: dict[str, Any]) -> TrainConfig:
    """The configuration of a run that goes on: as saved, but for what may change.

    Raises ValueError that names the first key of `wanted` that differs and may not.
    """
    current = complete(saved)
    for name, value in wanted.items():
        if name in ("output", *MAY_CHANGE_ON_RESUME) or value == getattr(current, name):
            continue
        before = current.peak_learning_rate if name == "learning_rate" else getattr(current, name)
        was = "was not given" if before is None else f"was {before!r}"
        raise ValueError(
            f"--resume goes on as the run began, and '{name}' {was}, not {value!r}; leave it "
            "out, or start a new run from this one's weights: --model OUTPUT/model --output another"
        )
    changes = {name: value for name, value in wanted.items() if name in MAY_CHANGE_ON_RESUME}
    return dataclasses.replace(current, **changes)
