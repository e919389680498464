"""A loss that never holds all logits, replacing the head and the loss function of a transformers causal LM.

The model's own forward runs. In a training pass with labels its head returns the summed loss instead of logits, and the
model's loss function divides that sum. Inside the head's forward the weight is whole: ZeRO-3 gathers it for the module,
once, and again for its backward pass, and reduces its gradient as usual.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memascend.ops.cross_entropy import IGNORE_INDEX, LogitTransform
from memascend.ops.rows import rows_of, sliced_cross_entropy, sliced_head

# (hidden (..., H), weight (V, H), labels (...), bias (V) or None, ignore_index, transform) -> fp32 sum of the losses
SummedLoss = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, int, LogitTransform], torch.Tensor
]


def replace_head_loss(model: Any, summed_loss: SummedLoss) -> Callable[[], None]:
    """Compute the training loss of `model` by `summed_loss`; return a function that undoes the change.

    The outputs of training passes then have no logits. Evaluation, generation and calls without labels are unchanged.
    In a model of peft it is the loss of the model inside. Raises ValueError for a model whose head is not a linear
    layer or whose loss is not transformers' causal LM loss, and RuntimeError if the loss is already replaced.
    """
    inside = getattr(model, "get_base_model", None)
    return _HeadLoss(inside() if callable(inside) else model, summed_loss).install()


@dataclass
class _Pending:
    """A forward pass with labels. `total` is the head's output: the summed loss."""

    labels: torch.Tensor  # already shifted
    shift_labels: torch.Tensor | None  # as given by the caller
    ignore_index: int
    total: torch.Tensor | None = None


class _HeadLoss:
    """The replacement of one model's forward, head and loss function, and the pass that each thread is in."""

    def __init__(self, model: Any, summed_loss: SummedLoss) -> None:
        self.model, self.summed_loss = model, summed_loss
        self.head = _linear_head(model)
        self.stock_forward, self.stock_head, self.stock_loss = model.forward, self.head.forward, _causal_lm_loss(model)
        self.signature = inspect.signature(model.forward)
        self.transform = _logit_transform(model.config)
        self._passes = threading.local()  # concurrent micro-batches have one thread each
        self.checked = False

    @property
    def pending(self) -> _Pending | None:
        """The forward pass that this thread is in, or None if it is not a training pass with labels."""
        return getattr(self._passes, "pending", None)

    @pending.setter
    def pending(self, pending: _Pending | None) -> None:
        self._passes.pending = pending

    def install(self) -> Callable[[], None]:
        """Replace the three functions of the model; return a function that restores them."""
        model, head = self.model, self.head
        had_forward, had_loss = vars(model).get("forward"), vars(model).get("_loss_function")

        @functools.wraps(self.stock_forward)  # the Trainer reads the signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.forward(*args, **kwargs)

        model.forward, head.forward, model.loss_function = forward, self.head_forward, self.loss

        def undo() -> None:
            del model.forward, head.forward, model._loss_function
            if had_forward is not None:
                model.forward = had_forward
            if had_loss is not None:
                model._loss_function = had_loss

        return undo

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; in a training pass with labels its output has no logits."""
        self.pending = self._pending(args, kwargs) if self.model.training else None
        if self.pending is None:
            return self.stock_forward(*args, **kwargs)
        # Registered anew for each pass, so that it runs last and sees the output as changed by other hooks (ZeRO-3's).
        handle = self.head.register_forward_hook(self._note_output)
        try:
            return _without_logits(self.stock_forward(*args, **kwargs))
        finally:
            handle.remove()
            self.pending = None

    def _pending(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Pending | None:
        """Return the pass of a call with labels, shifted by one position as transformers does; None without labels."""
        given = self.signature.bind(*args, **kwargs).arguments
        for parameter in self.signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        if given.get("labels") is None:
            return None
        ignore_index = given.get("ignore_index", IGNORE_INDEX)
        shift_labels = given.get("shift_labels")
        labels = shift_labels
        if labels is None:
            labels = torch.nn.functional.pad(given["labels"], (0, 1), value=ignore_index)[..., 1:]
        return _Pending(labels, shift_labels, ignore_index)

    def head_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the summed loss (fp32 scalar) in a training pass with labels, else the logits of ``hidden``
        (..., H)."""
        pending, head = self.pending, self.head
        sliced = rows_of(head) is not None
        if pending is None:
            return sliced_head(head, hidden) if sliced else self.stock_head(hidden)
        labels = pending.labels.reshape(hidden.shape[:-1]).to(hidden.device)
        if sliced:
            settings = {"ignore_index": pending.ignore_index, "transform": self.transform}
            return sliced_cross_entropy(head, hidden, labels, **settings)
        return self.summed_loss(hidden, head.weight, labels, head.bias, pending.ignore_index, self.transform)

    head_forward.takes_rows = True

    def _note_output(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        """Note the head's output as other hooks leave it, by which `loss` recognises it."""
        if self.pending is not None:
            self.pending.total = output

    _note_output.is_of_any_pass = True  # each call sees the pass of its own thread

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute transformers' ForCausalLMLoss from the head's summed loss instead of logits."""
        pending = self.pending
        if pending is None:
            return self.stock_loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
        if not self.checked:
            self._check(logits, ignore_index, shift_labels)
            self.checked = True
        if num_items_in_batch is None:
            num_items_in_batch = (pending.labels != ignore_index).sum()
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(pending.total.device)
        return pending.total / num_items_in_batch

    def _check(self, logits: torch.Tensor, ignore_index: int, shift_labels: torch.Tensor | None) -> None:
        """Check, on the first step, that the model changes its logits between head and loss only as `transform` does.

        Raises RuntimeError otherwise.
        """
        pending = self.pending
        known = pending.total is not None and ignore_index == pending.ignore_index
        known = known and shift_labels is pending.shift_labels
        if known and logits is not pending.total:
            expected = self.transform(pending.total.detach())
            known = logits.shape == expected.shape and torch.allclose(logits.detach().float(), expected, equal_nan=True)
        if not known:
            raise RuntimeError(
                f"{type(self.model).__name__} changes its logits or labels between head and loss in a way that a loss "
                "without logits does not support: use loss 'plain'"
            )


def _linear_head(model: Any) -> torch.nn.Linear:
    """Return the model's head. Raises ValueError if it is not linear, RuntimeError if it is already replaced."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, torch.nn.Linear):
        raise ValueError(
            f"{type(model).__name__} has no linear language-model head, which a loss without logits "
            "needs: use loss 'plain'"
        )
    if "forward" in vars(head):
        raise RuntimeError(f"the loss of this {type(model).__name__} is already replaced: undo that first")
    return head


def _causal_lm_loss(model: Any) -> Callable[..., torch.Tensor]:
    """Return the model's loss function. Raises ValueError if it is not transformers' ForCausalLMLoss."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    found = getattr(model, "loss_function", None)
    if found is not ForCausalLMLoss:
        raise ValueError(
            f"{type(model).__name__} computes its loss with {getattr(found, '__name__', found)}, not with "
            "transformers' causal LM loss: use loss 'plain'"
        )
    return found


def _logit_transform(config: Any) -> LogitTransform:
    """Return the model's transform of its logits, by the names that transformers uses in configurations."""
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    return LogitTransform(scale, getattr(config, "final_logit_softcapping", None))  # Gemma


def _without_logits(output: Any) -> Any:
    """Return the model's output without the logits: None in a tuple, left out of a mapping."""
    if isinstance(output, tuple):
        return (output[0], None, *output[2:])
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})
