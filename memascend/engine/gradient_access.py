"""Gradients of the current step, for code that reads `parameter.grad` (`gradient_views`)."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from memascend.engine.operators import take_off_left_over
from memascend.engine.steps import StepRuntime
from memascend.storage.interrupts import whole


class GradientAccess(StepRuntime):
    """Access of a training loop to gradients that wait on the tier: whether they do, their norms, scaling, discarding.

    Gradients that were used as they arrived no longer exist, so that access to them is refused.
    """

    def gradient_waits(self, name: str) -> bool:
        """Return whether a parameter's complete gradient is on the tier; False if none has arrived. Raises RuntimeError
        for one that is incomplete or was used already, and says how to make gradients wait."""
        if name in self.gradients.spent:
            raise RuntimeError(
                f"the gradient of {name} was released by the last step(): read gradients before it (wait=True when the "
                "optimizer is created, and p.grad.norm() between backward() and step())"
            )
        if name not in self._arrived:
            return False
        if not self._waits or self.updates.touched:
            raise RuntimeError(
                f"the gradient of {name} is not in memory: gradients of a streamed model are consumed as they arrive. "
                "To clip them, or to read their norms, delay updates (clip=... or wait=True when the optimizer is "
                "created)"
            )
        if self.at_work.backward_begun or self._passes < self.options.accumulate:
            raise RuntimeError(
                f"the gradient of {name} is incomplete before the last of {self.options.accumulate} backward passes: "
                "read or clip it after that. A Trainer's last step of an epoch has fewer passes unless its rows are a "
                "multiple of per_device_train_batch_size * gradient_accumulation_steps"
            )
        return True

    @property
    def _arrived(self) -> Collection[str]:
        """Names of the parameters that got a gradient in the current step."""
        if self.at_work.backward_begun:
            return self.updates.arrived
        return self.gradients.whole if self.updates.pending else ()

    def give_values(self, parameter: nn.Parameter) -> bool:
        """Give a parameter its values outside of its own module's forward pass (`OutsideUse.hold`)."""
        return self._hooks.outside.hold(parameter)

    @whole
    def gradient_norm(self, name: str) -> float:
        """Return the 2-norm of a waiting gradient, without the loss scale and with the loop's factors."""
        self.updates.raise_failure()
        self.updates.sum_waiting()
        return self.gradients.norm(name, self.updates.sums.of(name), self.scale)

    @whole
    def scale_gradient(self, name: str, factor: float) -> None:
        """Multiply a waiting gradient by `factor`; `EngineOptions.clip` is then ignored in this step. Raises
        RuntimeError as `gradient_waits` does."""
        self.gradient_waits(name)  # raises where access is refused
        self._clip = 0.0  # the loop clips by itself in this step
        self.gradients.multiply(name, factor)

    def forget_gradient(self, name: str) -> None:
        """Note that a parameter's `.grad` was set to None. Raises RuntimeError if a gradient arrived in this step."""
        if name in self._arrived:
            raise RuntimeError(
                f"the gradient of {name} cannot be discarded alone: optimizer.zero_grad() discards all of them"
            )
        self.gradients.spent -= {name}

    @whole
    def forget_gradients_of(self, names: set[str], *, set_to_none: bool) -> None:
        """Discard the gradients of `names`, as `zero_grad` of their modules does. Raises RuntimeError if these are only
        some of the gradients that have arrived, and inside the function of a micro-batch."""
        self._require_no_function("zero_grad()")
        arrived = set(self._arrived)
        if arrived & names and arrived - names:
            raise RuntimeError(
                f"the gradient of {min(arrived & names)} cannot be discarded without that of {min(arrived - names)}: "
                "optimizer.zero_grad() discards all of them"
            )
        self.gradients.forget(arrived, set_to_none=set_to_none, of=names)
        if arrived & names:
            self.give_up()

    @whole
    def forget_gradients(self, *, set_to_none: bool = True) -> None:
        """Discard all gradients, as `zero_grad` of all parameters does."""
        self._require_no_function("optimizer.zero_grad()")
        take_off_left_over()
        self.gradients.forget(self._arrived, set_to_none=set_to_none)
        if self.updates.pending or self._passes:
            self.give_up()
