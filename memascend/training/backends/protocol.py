"""What a rank of `memascend train` asks of whatever trains: build, step, evaluate, save, restore, statistics, weights.

Nothing here says where tensors lie or who moves them. Data, learning rate, checkpoint folders, the state of the random
generators and everything that is said belong to the rank itself (`memascend.training.worker`).
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
    """What a backend kept is the middle of a step: training goes on from a checkpoint."""


class Backend(Protocol):
    """Model, optimizer and states of one rank. All ranks make the same calls in the same order. Not thread-safe.

    Raises ValueError, OSError and MemoryError in one line for what the user can change.
    """

    ledger: Ledger  # every host buffer of the training
    device: torch.device  # where batches are expected; set by `build`
    model: torch.nn.Module  # the transformers model; its parameters may be elsewhere. Set by `build`

    def __init__(self, config: TrainConfig, settings: dict[str, Any], ledger: Ledger) -> None:
        """`settings`: what `systems.setup` has found out for this backend, as it went through JSON."""

    @staticmethod
    def notes() -> list[str]:
        """Lines to show before a start that takes long."""

    @staticmethod
    def start(threads: int) -> None:
        """Import what is needed, take `threads` CPU threads, and join the other ranks as the environment says
        (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Once a process."""

    def build(self, source: Path | dict[str, Any]) -> None:
        """The model with the weights of a folder, or initialised from a configuration by torch's generator as it
        stands: equal bits for every backend. Once."""

    def trace(self, recorder: Recorder) -> None:
        """From now on `recorder` is told of every step's phases, blocks, transfers and updates. Once, after `build`."""

    def step(self, batches: Sequence[torch.Tensor], learning_rate: float) -> tuple[torch.Tensor, float | None]:
        """One optimizer step over batches of token ids (int64, sequences x tokens, on `device`).

        Returns the mean loss of the batches (fp32, 0-d, before any scaling) and the norm of all gradients before
        clipping; the norm is None where the step was skipped because gradients were infinite or NaN.
        """

    def evaluate(self, batch: torch.Tensor) -> float:
        """The loss of a batch, without gradients and without dropout."""

    def loss_scale(self) -> float | None:
        """The fp16 loss scale that the next step will use; None where there is none."""

    def weight_layouts(self) -> list[TensorLayout]:
        """Parameters (a tied one once) and persistent buffers of the model, in its order."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of every layout, on the CPU. A tensor is valid until the next one is asked for."""

    def state_layouts(self) -> list[TensorLayout]:
        """This rank's states: `<group>.master`, and from the first step on `<group>.exp_avg`, `<group>.exp_avg_sq`."""

    def states(self, share: Share | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """As `weights`, for `state_layouts`. What `share` takes, in the same order, is left out: a tensor that lies on
        the file system of the checkpoint already, and need not come to memory."""

    def state_facts(self) -> dict[str, Any]:
        """What belongs to the states and goes into JSON: counters, loss scale, and `groups`: for each group the
        (parameter, elements) whose values follow one another in its tensors."""

    def restore(self, reader: TensorFileReader, facts: dict[str, Any]) -> None:
        """Bring everything, the weights too, to what `states` and `state_facts` said, to the bit."""

    def kept_step(self) -> int | None:
        """The step after which it can go on by itself, from what it kept on a tier (`keep`); None: it cannot. Asked
        before `build`. Raises KeptStepIsPartial."""

    def go_on(self, source: Path | dict[str, Any]) -> dict[str, Any]:
        """In place of `build` and `restore`: everything as it was kept, and the facts. `source` as for `build`, for the
        architecture alone. Once. A step that a kill may have cut off before it had a row in the metrics has `row` among
        its facts: loss, learning_rate and loss_scale."""

    def keep(self, facts: dict[str, Any]) -> None:
        """The step that was made has its row in the metrics: from here on a run that is killed may go on after it, and
        makes the evaluation and the checkpoint that are due then. `facts` (JSON, with `step`) are for `go_on`. A
        backend that keeps nothing does nothing."""

    def remark(self) -> str | None:
        """What else is worth saying of the last step, in a few words beside its line; None: nothing."""

    def statistics(self) -> dict[str, int]:
        """`read_bytes` and `written_bytes` of the swap device in the last step."""

    def facts(self) -> dict[str, Any]:
        """What the report should say of this backend: its configuration, what stood in whose place."""

    def close(self) -> None:
        """Release what would outlive the process. Afterwards nothing else may be called."""
