"""The interface between a rank of `memascend train` and its backend: build, step, evaluate, save, restore, weights.

It does not prescribe where tensors are stored or what moves them. Data, learning rate, checkpoint folders, the state of
the random generators and all output belong to the rank itself (`memascend.training.worker`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from memascend.memory.ledger import Ledger
from memascend.simulator.recorder import Recorder
from memascend.storage.tensor_file import Share, TensorFileReader, TensorLayout
from memascend.training.config import TrainConfig


class KeptStepIsPartial(ValueError):
    """Raised when a backend's kept states are from the middle of a step; training resumes from a checkpoint then."""


class Backend(Protocol):
    """Model, optimizer and states of one rank. All ranks make the same calls in the same order. Not thread-safe.

    Methods raise a one-line ValueError, OSError or MemoryError for what the user can change. A backend that also has
    `save_meanwhile` (see `StreamingBackend`) writes checkpoints while training continues.
    """

    ledger: Ledger  # records every host buffer of the training
    device: torch.device  # where batches are expected; set by `build`
    model: torch.nn.Module  # the transformers model, whose parameters may be elsewhere; set by `build`

    def __init__(self, config: TrainConfig, settings: dict[str, Any], ledger: Ledger) -> None:
        """Create a backend. `settings`: the result of `systems.setup` for this backend, after a JSON round trip."""

    @staticmethod
    def notes() -> list[str]:
        """Return lines to show before a start that takes long."""

    @staticmethod
    def start(threads: int) -> None:
        """Import what is needed, use `threads` CPU threads, and join the other ranks as the environment specifies
        (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Called once per process."""

    def build(self, source: Path | dict[str, Any]) -> None:
        """Build the model: load the weights of a folder, or initialise them for a configuration.

        Initialisation uses torch's generator in its current state, so that the weights are bit-identical in every
        backend. Called once.
        """

    def trace(self, recorder: Recorder) -> None:
        """Record the phases, blocks, transfers and updates of all further steps in `recorder`.

        Called once, after `build`.
        """

    def step(self, batches: Sequence[torch.Tensor], learning_rate: float) -> tuple[torch.Tensor, float | None]:
        """Make one optimizer step over batches of token ids (int64, sequences x tokens, on `device`).

        Returns the mean loss of the batches (fp32, 0-d, before any scaling) and the norm of all gradients before
        clipping. The norm is None if the step was skipped because gradients were infinite or NaN.
        """

    def evaluate(self, batch: torch.Tensor) -> float:
        """Return the loss of a batch, computed without gradients and without dropout."""

    def loss_scale(self) -> float | None:
        """Return the fp16 loss scale that the next step will use, or None without loss scaling."""

    def weight_layouts(self) -> list[TensorLayout]:
        """Return the layouts of parameters (tied ones once) and persistent buffers, in the model's order."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of every layout, on the CPU. A tensor is valid until the next one is requested."""

    def state_layouts(self) -> list[TensorLayout]:
        """Return the layouts of this rank's states.

        These are `<group>.master` and, from the first step on, `<group>.exp_avg` and `<group>.exp_avg_sq`.
        """

    def states(self, share: Share | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for `state_layouts`, as `weights` does.

        Tensors that `share` accepts are left out: they are already on the checkpoint's file system, and their blocks
        are shared without reading them into memory. `share` is offered the tensors in the same order.
        """

    def state_facts(self) -> dict[str, Any]:
        """Return the part of the states that is stored as JSON: counters, loss scale, and `groups`.

        `groups` lists for each group the (parameter, elements) pairs in the order of their values in its tensors.
        """

    def restore(self, reader: TensorFileReader, facts: dict[str, Any]) -> None:
        """Restore everything, including the weights, from the results of `states` and `state_facts`, bit by bit."""

    def kept_step(self) -> int | None:
        """Return the step after which the backend can resume from its own states on a tier (`keep`); None if it cannot.

        Called before `build`. Raises KeptStepIsPartial.
        """

    def go_on(self, source: Path | dict[str, Any]) -> dict[str, Any]:
        """Restore everything that was kept, instead of `build` and `restore`; return the facts given to `keep`.

        `source` is as for `build`, but is used only for the architecture. Called once. If a kill may have interrupted
        the step before it had a row in the metrics, the facts include `row`: loss, learning_rate and loss_scale.
        """

    def keep(self, facts: dict[str, Any]) -> None:
        """Make the finished step permanent, now that it has its row in the metrics.

        If the run is killed from here on, it resumes after this step, with the evaluation and the checkpoint that are
        due after it. `facts` (JSON, including `step`) are what `go_on` returns. A backend without states of its own
        does nothing.
        """

    def remark(self) -> str | None:
        """Return a short remark on the last step, shown after its progress line, or None."""

    def statistics(self) -> dict[str, int]:
        """Return `read_bytes` and `written_bytes` of the swap device in the last step."""

    def facts(self) -> dict[str, Any]:
        """Return what the report should include about this backend: its configuration and any substitutions."""

    def close(self) -> None:
        """Release what would outlive the process. No other method may be called afterwards."""
