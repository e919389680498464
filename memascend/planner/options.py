"""Options of a model that reduce its GPU memory: values and defaults that `plan` and `train` share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memascend.suggestions import did_you_mean

# Keys of `memascend train`, flags of `memascend plan`, and keys of the section "memascend" in a DeepSpeed JSON.
MODEL_OPTIONS = {
    "attention": ("auto", "eager", "sdpa", "flash"),
    "loss": ("plain", "chunked", "liger"),
    "checkpointing": ("none", "plain", "offloaded", "unsloth", "ssd"),
}
DEFAULT_CONTEXT = 4096
# Maximum gradient norm.
DEFAULT_CLIP = 1.0
# Bytes per parameter of master weights and both moments, by the dtype of the states.
KEPT_STATE_BYTES = {"fp32": 3 * 4, "bf16": 3 * 2, "int8": 2 + 2 + 2 / 32}
# Choices for the order of the micro-batches of a step.
ACCUMULATION_ORDERS = ("auto", "vertical", "horizontal")
# Choices for the number of versions of system lohan's states on the SSD.
STATE_VERSIONS = ("auto", "one", "two", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The options that a model uses to reduce its GPU memory. Raises ValueError for values not in `MODEL_OPTIONS`.

    `fused`: norms and gates as single kernels, as in Liger; neither our options nor a DeepSpeed JSON enable them.
    `megatron_gpus`: number of GPUs that share each block with Megatron's tensor parallelism; 0: a Hugging Face block.
    """

    attention: str = "auto"
    loss: str = "chunked"
    checkpointing: str = "offloaded"
    fused: bool = False
    megatron_gpus: int = 0

    def __post_init__(self) -> None:
        for name, words in MODEL_OPTIONS.items():
            given = getattr(self, name)
            if given not in words:
                hint = did_you_mean(given, words)
                raise ValueError(f"unknown {name} '{given}'{hint}: use one of {', '.join(words)}")

    @property
    def checkpoints(self) -> bool:
        """Whether blocks are recomputed in backward; with `ssd` they are not, as their activations are on the SSD."""
        return self.checkpointing not in ("none", "ssd")

    @property
    def offloads(self) -> bool:
        """Whether the activation checkpoints are stored in host memory."""
        return self.checkpointing in ("offloaded", "unsloth")

    @property
    def flash(self) -> bool:
        """Whether attention saves no scores; this includes SDPA, which `auto` selects."""
        return self.attention != "eager"

    def __str__(self) -> str:
        return f"attention {self.attention}, loss {self.loss}, checkpointing {self.checkpointing}"


DEFAULT_STACK = Stack()


def longest_context(model_config: Mapping[str, object]) -> int | None:
    """Return the maximum number of tokens per sequence of the model; None if its configuration does not say."""
    most = model_config.get("max_position_embeddings")
    return most if isinstance(most, int) and most > 0 else None


def default_context(model_config: Mapping[str, object]) -> int:
    """Return the default number of tokens per sequence: 4096, or the model's maximum if that is less."""
    return min(DEFAULT_CONTEXT, longest_context(model_config) or DEFAULT_CONTEXT)
