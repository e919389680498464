"""What a model can do to need less GPU memory: words and defaults that `plan` and `train` share."""

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
# The largest norm of the gradients.
DEFAULT_CLIP = 1.0
# Of system lohan's states on the SSD.
STATE_VERSIONS = ("auto", "one", "two", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What the model does to need less GPU memory, by the words of `MODEL_OPTIONS`; ValueError for any other.

    `fused`: norms and gates as single kernels, which Liger has and neither our options nor a DeepSpeed JSON switch on.
    `megatron_gpus`: GPUs that share each block as Megatron's tensor parallelism does; 0: a block of Hugging Face's.
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
        """Whether blocks are computed again in backward; `ssd` keeps what they saved, on the SSD."""
        return self.checkpointing not in ("none", "ssd")

    @property
    def offloads(self) -> bool:
        """Whether the checkpoints wait in host memory."""
        return self.checkpointing in ("offloaded", "unsloth")

    @property
    def flash(self) -> bool:
        """Whether no scores are kept; SDPA, which `auto` takes, has such kernels too."""
        return self.attention != "eager"

    def __str__(self) -> str:
        return f"attention {self.attention}, loss {self.loss}, checkpointing {self.checkpointing}"


DEFAULT_STACK = Stack()


def longest_context(model_config: Mapping[str, object]) -> int | None:
    """Tokens that the model's positions reach to; None where its configuration does not say."""
    most = model_config.get("max_position_embeddings")
    return most if isinstance(most, int) and most > 0 else None


def default_context(model_config: Mapping[str, object]) -> int:
    """Tokens per sequence if unspecified: 4096, or as many as the model takes where that is less."""
    return min(DEFAULT_CONTEXT, longest_context(model_config) or DEFAULT_CONTEXT)
