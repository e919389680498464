"""Training a model that is kept on a tier, with three lines around a plain PyTorch loop (LoHan, Fig. 4).

    with streaming("/mnt/nvme/run") as session:                                   # LoHan_init
        model = session.hook(Model(config))                                       # LoHan_hook
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-4)                 # LoHan_Optimizer
        for data, target in loader:
            loss(model(data), target).backward()
            optimizer.step()

The optimizer is a `torch.optim.Optimizer`: parameter groups, schedulers, closures and state dicts work as in torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import textwrap
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from memascend.engine import state_files
from memascend.engine.json_notes import from_json
from memascend.engine.model_guards import require_not_streamed
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.engine.saved import begin_save, put_back, saved_facts
from memascend.engine.saving import BackgroundSave
from memascend.engine.streamed_optimizer import StreamedAdamW
from memascend.memory.pinned import Allocator
from memascend.storage.folders import check_swap_folder

log = logging.getLogger("memascend")


def _shortly(thing: object) -> str:
    """Return an object's repr in one line of at most 100 characters."""
    return textwrap.shorten(repr(thing), 100, placeholder=" ...")


class streaming:
    """A training session of one model in a folder on the SSD; a context manager, since it owns threads, memory and
    files. Not thread-safe.

    The folder is new or empty, or with `resume` contains the states of the same model: training continues after the
    last completed step (`steps`, `note`). The parent of a new one must exist, since a typo would fill the system disk.
    The states stay there at the end; `session.remove()` deletes them.
    `allocator` allocates all host memory (default: pinned memory of exact size).

    **Between `backward()` and `step()`** gradients either wait or are used as they arrive. They wait with `clip`,
    `wait`, one version of the states that can be redone, and in all but the last pass of `accumulate`: evaluation and
    `generate` (forward passes without a graph), the model's `state_dict` and `save_pretrained`, `engine.read_weights`
    and the optimizer's `state_dict` then see the weights and states of the last completed step. Where gradients are
    used as they arrive (the default), the weights are half updated, and all of these raise RuntimeError: call
    `optimizer.step()` first, or `optimizer.zero_grad()`, which discards the step. A forward pass with a graph raises
    it too, unless `implicit_step` is set, and so does any backward pass beyond the announced number. Loading states is
    refused while any gradient waits. `parameter.grad` raises RuntimeError where gradients are used as they arrive;
    where they wait it is a `WaitingGradient`, which supports its 2-norm and the product with a number, and thus torch's
    clip_grad_norm_, get_total_norm and clip_grads_with_norm_ under any name; all else raises NotStreamable. After an
    error in a backward pass or an update, each of these first gives the step up, and sees the last completed one.

    **The model's parameters** contain a single NaN while they are not in use, and operations that read it (`p.norm()`,
    `p.data` in a sum) raise NotStreamable: their values are in `state_dict()`, of the model or of any submodule, and in
    `engine.read_weights()`. `to`, `half`, `cuda` and the like raise NotStreamable where they would change something,
    and so do `load_state_dict`, copies and pickles: convert and load before the optimizer is created. After `close` the
    model stays empty, and calling or saving it raises RuntimeError.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, resume: bool = False, allocator: Allocator | None = None
    ) -> None:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder) or "\0" in str(folder):
            raise ValueError(f"streaming(folder): the path of a folder, got {folder!r}")
        if allocator is not None and not callable(getattr(allocator, "allocate", None)):
            raise ValueError(f"streaming(allocator=...): an allocator of memascend.memory.pinned, got {allocator!r}")
        # An absolute path, since the loop may change its working directory.
        self.folder, self._allocator = Path(folder).absolute(), allocator
        try:
            os.stat(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise ValueError(f"streaming(folder): {str(folder)[:200]}: {error.strerror}") from None
        if not resume or os.path.lexists(self.folder):
            check_swap_folder(self.folder, "streaming(folder)")
        if state_files.holds_states(self.folder) and not resume:
            raise ValueError(
                f"{self.folder} holds the states of an earlier training: continue it (resume=True), or remove it"
            )
        if resume and not state_files.holds_states(self.folder):
            raise ValueError(f"{self.folder} holds no states to continue from: omit resume, or name another folder")
        self._resume = resume
        self._model: nn.Module | None = None
        self._blocks: Sequence[nn.Module] | None = None
        self._device: torch.device | str | None = None
        self.engine: StreamingEngine | None = None
        self._made: weakref.ref[StreamedAdamW] | None = None  # weak, since the optimizer refers to the session
        # The user's data, as JSON of less than 1 MiB: kept with each step and restored by a resume. Keys of dicts may
        # also be numbers; a subclass of dict comes back as a dict.
        self.note: dict[str, Any] = {}

    def hook(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> nn.Module:
        """Set the model to be trained. Its weights stay in memory until the optimizer is created.

        Args:
            model: any module with lists of layers (see `find_blocks`), all its parameters of one dtype: float32,
                bfloat16 or float16. Its weights may still be in files (`memascend.integrations.lazy_loading`).
            blocks: modules that are in memory one at a time, each with a forward pass (default: all layers).
            device: the device that computes, such as "cuda" for a model in host memory; batches must be on it, too
                (default: the model's device).

        Returns:
            The same model.

        Raises:
            ValueError: an argument of the wrong type, or a device that torch cannot compute on.
            RuntimeError: the session has an optimizer already, or another session has the model's weights.

        Example:

            model = session.hook(Model(config), device="cuda")
        """
        self._require_no_optimizer()
        if not isinstance(model, nn.Module):
            raise ValueError(f"hook(model): a torch.nn.Module, got {_shortly(model)}")
        if blocks is not None:
            blocks = list(blocks) if isinstance(blocks, Iterable) else [blocks]
            if other := [each for each in blocks if not isinstance(each, nn.Module)]:
                raise ValueError(f"hook(model, blocks=...): modules of the model in a list, got {_shortly(other[0])}")
        if device is not None:
            EngineOptions(device=device)  # raises ValueError for a device that cannot compute
        require_not_streamed(model)
        self._model, self._blocks, self._device = model, blocks, device
        return model

    def optimizer(
        self,
        kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
        params: Iterable[Any] | None = None,
        *,
        accumulate: int | None = None,
        clip: float | None = None,
        wait: bool | None = None,
        implicit_step: bool | None = None,
        unfreezes: bool | None = None,
        options: EngineOptions | None = None,
        **settings: Any,
    ) -> StreamedAdamW:
        """Move the model to the folder, or with `resume` read its states from it, and create its optimizer.

        Args:
            kind: torch.optim.AdamW or Adam (without decay).
            params: parameters or groups, as torch.optim takes them (default: all parameters that are trained).
            accumulate: number of backward passes per step; one more raises RuntimeError.
            clip: the largest 2-norm of all gradients. The norm may differ in the last digit from the one that torch's
                clip_grad_norm_ computes in memory.
            wait: the loop calls torch.nn.utils.clip_grad_norm_ or reads norms of gradients. With any of these three,
                gradients wait on the SSD, at the cost of one more write and read of them; without, `parameter.grad`
                raises.
            implicit_step: the loop has no `optimizer.step()` (LoHan, Fig. 4b); each forward pass completes the previous
                step.
            unfreezes: parameters that are frozen now and in `params` (default: all of the model's) may be trained later
                (`requires_grad_(True)` between two steps): they get states, zeros until then. Also for a resume.
            options: all other options, and those of the five above that are not passed here.
            settings: settings of the optimizer itself (lr, betas, eps, weight_decay).

        Raises:
            ValueError: unsupported arguments or models; nothing has moved then.
            StorageError: the disk has not enough space.
            MemoryError: host buffers cannot be allocated.
            RuntimeError: `hook` was not called, or there is an optimizer already.

        Returns:
            A torch.optim.Optimizer. From here on the model's parameters are empty except while they are in use (see the
            class).

        Example:

            optimizer = session.optimizer(torch.optim.AdamW, model.named_parameters(), lr=1e-5, clip=1.0)
        """
        if self._model is None:
            raise RuntimeError("call hook(model) first: the optimizer belongs to that model")
        self._require_no_optimizer()
        chosen = _chosen(
            options,
            accumulate=accumulate,
            clip=clip,
            wait=wait,
            implicit_step=implicit_step,
            unfreezes=unfreezes,
            device=self._device,
        )
        if chosen.unfreezes and params is None:
            params = self._model.parameters()
        made = StreamedAdamW(kind, self._model, params, settings)
        with _all_trained(made.param_groups) if chosen.unfreezes else contextlib.nullcontext():
            self._start(made, chosen)
        made.attach(self)
        self._made = weakref.ref(made)
        _say_why_gradients_wait(chosen)
        return made

    def _start(self, made: StreamedAdamW, options: EngineOptions) -> None:
        """Start the engine on a new store, or resume it on that of an earlier run."""
        start: Callable[..., Any] = StreamingEngine.resume if self._resume else StreamingEngine.start
        found = start(
            self._model,
            self.folder,
            lambda: made.param_groups,  # read at each use, since load_state_dict replaces the groups
            options,
            blocks=self._blocks,
            allocator=self._allocator,
        )
        if not self._resume:
            self.engine = found
            return
        engine, facts = found
        try:
            made.take_over(facts, engine.units.names)
        except BaseException:
            engine.close()
            raise
        self.engine, self.note = engine, from_json(facts.get("note", {}))

    def accumulate(
        self, function: Callable[[Any], Any], micro_batches: Iterable[Any], *, order: str = "vertical"
    ) -> list[Any]:
        """Run `function` on each micro-batch of a step, all of them through a block before any enters the next.

        The results equal those of `[function(each) for each in micro_batches]` to the bit; but weights are read twice
        per step instead of twice per micro-batch, and gradients are summed in memory instead of on the SSD
        (GreedySnake, arXiv 2512.17570). There are at most as many `micro_batches` as `optimizer(accumulate=...)` has
        announced.

        Each micro-batch runs in its own thread, one at a time, and the threads take turns at the model's blocks. So the
        function must not change anything that micro-batches share, except the model; it calls `backward()` once, and
        it takes no lock around the model. The first call with a function, or with other modules in training mode, runs
        one micro-batch after the other and checks whether they are independent. They are not if the forward pass draws
        random numbers (dropout), registers hooks or changes the model (except the running averages of torch's batch
        norms). Such micro-batches always run one after the other, with a line in the log that says why; so do those
        with swapped activations, on a device other than the CPU, through the blocks in varying order, or after other
        backward passes of the step.

        Args:
            function: the body of a loop over micro-batches: forward pass, loss, `backward()`.
            micro_batches: the arguments of `function`, one per call.
            order: "vertical", or "horizontal" to run one micro-batch after the other.

        Raises:
            ValueError: for another order.
            RuntimeError: more micro-batches than the step has backward passes left (before any has begun), or a call
                from inside of `function`.
            NotStreamable: micro-batches that were independent in the first step no longer are.
            BaseException: any error that `function` raises. The current step is then given up, the model is as after
                the last completed step, and no thread is running. Ctrl-C takes effect at the next block.

        Returns:
            The results of `function`, in the order of the micro-batches.

        Example:

            def train(batch):
                loss = model(**batch).loss / 8
                loss.backward()
                return loss.item()

            losses = session.accumulate(train, batches)
            optimizer.step()
        """
        return self._engine().accumulate(function, micro_batches, order=order)

    def save(self, folder: str | os.PathLike[str], *, states: bool = True, background: bool = True) -> BackgroundSave:
        """Save the model as it is after the last completed step, while training continues.

        Buffers are saved as they are now, so a forward pass since that step may have changed them (the averages of
        batch norm in training mode): call it right after `optimizer.step()`.

        The folder is new or empty, and appears only when all of the save is on the disk: `model.safetensors` with the
        parameters (a tied one once) and persistent buffers by their names, as `safetensors.torch.load_model` and
        `from_pretrained` read them; and for `load`, `states.safetensors` and `states.json`. It takes one buffer of
        4 MiB in host memory.

        Args:
            folder: the folder to write; `wait` returns its path.
            states: also save masters, moments, counts of steps, settings of the groups, and `note` as it is now.
            background: return at once; an update that would overwrite data not copied yet waits for it. False: return
                when the save is complete.

        Returns:
            The save, with `done()` and `wait()`, which returns the folder or raises the save's error. One save runs at
            a time: a second one waits for the first. `close` waits for it, too, and raises its error if `wait` has not
            raised it.

        Raises:
            ValueError: the folder exists and is not empty, cannot be created, or is inside the session's own folder;
                the disk is full; or a buffer has a dtype that safetensors files cannot hold (complex128), which the
                log says when the optimizer is created.
            RuntimeError: there is no optimizer yet, or a step is in progress: call `optimizer.step()` first.

        Example:

            save = session.save(f"saves/{session.steps}")
            ...  # go on training
            print("saved", save.wait())
        """
        made = self._made() if self._made is not None else None
        if made is None:
            raise RuntimeError("create the optimizer first: session.optimizer(torch.optim.AdamW, lr=...)")
        save = begin_save(self._engine(), folder, made.facts() if states else None)
        if not background:
            save.wait()
        return save

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Restore what `save` wrote with `states`: the trained weights, masters and moments, counts of steps, settings
        of the groups, buffers and `note`. The result is committed as a completed step on return.

        Args:
            folder: a save of the same model, with the same groups, and weights and states of the same dtypes.

        Raises:
            ValueError: the folder is not such a save; nothing has changed then.
            RuntimeError: there is no optimizer yet, or a gradient has come since the last step.

        Example:

            session.load("saves/1000")
        """
        made = self._made() if self._made is not None else None
        if made is None:
            raise RuntimeError("create the optimizer first: session.optimizer(torch.optim.AdamW, lr=...)")
        engine = self._engine()
        engine.require_no_gradients()
        facts = saved_facts(engine, folder)
        made.take_over(facts, engine.units.names)
        put_back(engine, folder, facts["steps"])
        self.note = from_json(facts.get("note", {}))
        engine.keep(made.facts())

    @property
    def steps(self) -> int:
        """Number of steps completed in this folder, including earlier runs (the maximum over all parameters). After an
        interrupt, an update that was cut off is completed first."""
        return max(self._engine().completed_steps().values(), default=0)

    def _engine(self) -> StreamingEngine:
        """Return the engine. Raises RuntimeError if there is no optimizer yet."""
        if self.engine is None:
            raise RuntimeError("create the optimizer first: session.optimizer(torch.optim.AdamW, lr=...)")
        return self.engine

    def _require_open(self) -> None:
        if self.engine is not None:
            self.engine.require_open()

    def _require_no_optimizer(self) -> None:
        self._require_open()
        if self.engine is not None:
            raise RuntimeError("there is already an optimizer: one training per folder")

    def remove(self) -> None:
        """End the session and delete the states."""
        if self.engine is not None:
            self.engine.close(destroy=True)
        else:
            state_files.remove(self.folder)

    def close(self) -> None:
        """End the session: release threads, memory and descriptors; the states of the last completed step stay on the
        SSD. Idempotent. It waits for a save in progress, and at the end raises its error if nothing else has."""
        if self.engine is not None:
            self.engine.close()
            self.engine.raise_unseen_failure_of_save()

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        elif self.engine is not None:  # the error in the block is the one to raise, not one of a save
            self.engine.close()


def _chosen(options: EngineOptions | None, **named: Any) -> EngineOptions:
    """Return the options with the arguments that are not None in place of theirs. Raises ValueError."""
    options = EngineOptions() if options is None else options
    if not isinstance(options, EngineOptions):
        raise ValueError(f"options=: an EngineOptions, got {options!r}: write options=EngineOptions(...)")
    return dataclasses.replace(options, **{name: value for name, value in named.items() if value is not None})


def _say_why_gradients_wait(options: EngineOptions) -> None:
    if options.waits or options.accumulate > 1:
        norm = "their norm" if options.clip > 0 or options.wait else "the end of backward"
        why = "those of the step's other passes" if options.accumulate > 1 else norm
        log.info("memascend: gradients wait on the SSD for %s: one more write and read of them per step", why)


@contextlib.contextmanager
def _all_trained(groups: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Make all parameters of the groups trainable while the engine determines which ones are trained."""
    frozen = [p for group in groups for p in group["params"] if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
