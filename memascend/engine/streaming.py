"""A plain PyTorch loop over a model that lives on a tier: three lines around it (LoHan, Fig. 4).

    with streaming("/mnt/nvme/run") as session:                                   # LoHan_init
        model = session.hook(Model(config))                                       # LoHan_hook
        optimizer = session.optimizer(torch.optim.AdamW, lr=1e-4)                 # LoHan_Optimizer
        for data, target in loader:
            loss(model(data), target).backward()
            optimizer.step()

The optimizer is a `torch.optim.Optimizer`: parameter groups, schedulers, closures and state dicts are torch's.
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

log = logging.getLogger("memascend")


def _shortly(thing: object) -> str:
    """Of whatever a user hands over, in one line."""
    return textwrap.shorten(repr(thing), 100, placeholder=" ...")


class streaming:
    """A folder on the SSD in which one model is trained; a context, since it owns threads, memory and files.

    The folder is new or empty, or with `resume` one that holds the states of the same model: training goes on after
    the last completed step (`steps`, `note`). At the end the states stay there; `session.remove()` deletes them.
    `allocator`: of all host memory (default: exact pinned memory). Not thread-safe.

    **Between `backward()` and `step()`**, evaluation and `generate` (forward passes without a graph), the model's
    `state_dict` and `save_pretrained`, `engine.read_weights` and the optimizer's `state_dict` see the weights and
    states of the last completed step where the gradients of this one wait: with `clip`, `wait`, one version of the
    states that can be redone, and between the passes of `accumulate`, before the last. Where gradients are used as they
    come (the default), the weights are then half updated, and all of these raise RuntimeError: call `optimizer.step()`
    first, or `optimizer.zero_grad()`, which forgets the step. So does a forward pass with a graph, unless
    `implicit_step`, and a backward pass beyond the announced number always. Loading states is refused while any
    gradient waits. `parameter.grad` there raises RuntimeError where gradients are used as they come; where they wait
    it is a `WaitingGradient`: its 2-norm and its product with a number, and so torch's clip_grad_norm_, get_total_norm
    and clip_grads_with_norm_ under any name; all else raises NotStreamable. After an error in a backward pass or an
    update, each of these gives the step up first, and sees the last completed one.

    **The model's parameters** hold one NaN while they are not at work, and what looks at it (`p.norm()`, `p.data` in a
    sum) raises NotStreamable: their values are in `state_dict()`, the model's or any part's, and in
    `engine.read_weights()`. `to`, `half`, `cuda` and the like raise NotStreamable where they
    would change something, and so do `load_state_dict`, copies and pickles: convert and load before the optimizer is
    made. After `close` the model stays empty, and calling or saving it raises RuntimeError.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, resume: bool = False, allocator: Allocator | None = None
    ) -> None:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder) or "\0" in str(folder):
            raise ValueError(f"streaming(folder): the path of a folder, got {folder!r}")
        if allocator is not None and not callable(getattr(allocator, "allocate", None)):
            raise ValueError(f"streaming(allocator=...): an allocator of memascend.memory.pinned, got {allocator!r}")
        # Absolute: the loop may change its directory, and its states stay where they are.
        self.folder, self._allocator = Path(folder).absolute(), allocator
        try:
            os.stat(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise ValueError(f"streaming(folder): {str(folder)[:200]}: {error.strerror}") from None
        if not self.folder.is_dir() and os.path.lexists(self.folder):
            kind = "a link to nowhere" if self.folder.is_symlink() and not self.folder.exists() else "a file"
            raise ValueError(f"{self.folder} is {kind}: name a folder, or one that can be created")
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
        self._made: weakref.ref[StreamedAdamW] | None = None  # the optimizer, which holds the session
        # The user's, as JSON of less than 1 MiB: kept with each step, and here again after a resume. Keys of dicts may
        # be numbers, too; a dict's subclass comes back as a dict.
        self.note: dict[str, Any] = {}

    def hook(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> nn.Module:
        """Name the model that will be trained. Nothing moves before the optimizer is made.

        Args:
            model: any module with lists of layers (see `find_blocks`), its parameters of one dtype: float32, bfloat16
                or float16. It may wait in files (`memascend.integrations.lazy_loading`).
            blocks: modules that are in memory one at a time, each with a forward pass (default: all layers).
            device: what computes, such as "cuda" for a model in host memory; batches belong there, too (default: where
                the model is).

        Returns:
            The same model.

        Raises:
            RuntimeError: there is an optimizer already, whose model is another one; another session has the model's
                weights.

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
            EngineOptions(device=device)  # or it raises
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
        """Move the model to the folder, or take it from there; its optimizer.

        Args:
            kind: torch.optim.AdamW or Adam (without decay).
            params: what torch takes (default: all that train).
            accumulate: backward passes in a step; one more is refused.
            clip: the largest norm of all gradients. It may differ in the last digit from the one that torch's
                clip_grad_norm_ finds in memory.
            wait: torch.nn.utils.clip_grad_norm_ is called in the loop, or norms of gradients are looked at. With any of
                these three, gradients wait on the SSD for one more pass; without, `parameter.grad` raises.
            implicit_step: the loop has no `optimizer.step()` (LoHan, Fig. 4b); each forward pass completes the step
                before it.
            unfreezes: what is frozen now and in `params` (default: all of the model) may be trained later
                (`requires_grad_(True)` between two steps): it gets states, zeros until then. Also for a resume.
            options: all the rest, and of these five what is not named here.
            settings: the optimizer's own (lr, betas, eps, weight_decay).

        Raises:
            ValueError: for what cannot be done, before anything has moved.
            StorageError: where the disk has no space.
            MemoryError: for host buffers.
            RuntimeError: no model was named, or there is an optimizer already.

        Returns:
            A torch.optim.Optimizer; the model's parameters are empty from here on but for the moments in which they are
            at work (see the class).

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
        """The engine, in a new store or in that of an earlier run."""
        start: Callable[..., Any] = StreamingEngine.resume if self._resume else StreamingEngine.start
        found = start(
            self._model,
            self.folder,
            lambda: made.param_groups,  # of now: load_state_dict puts others in their place
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

        As `[function(each) for each in micro_batches]`, and to the bit; but weights are read twice a step, and not
        twice a micro-batch, and gradients are summed in memory, and not on the SSD (GreedySnake, arXiv 2512.17570).
        `micro_batches` are at most as many as `optimizer(accumulate=...)` has announced.

        Each runs in a thread of its own, one at a time, and the threads take turns at the model's blocks. So the
        function may share nothing between micro-batches that it changes, but for the model; it calls `backward()` once,
        and it holds no lock around the model. The first call with a function, and with other modules in training mode,
        runs one micro-batch after the other and looks whether they are independent. They are not where the forward pass
        draws random numbers (dropout), or hooks or changes the model (other than the running averages of torch's batch
        norms); these go one after the other always, with a line in the log that says why, and so do those with swapped
        activations, on a device other than the CPU, through the blocks in varying order, or after other backward passes
        of the step.

        Args:
            function: the body of a loop over micro-batches: forward pass, loss, `backward()`.
            micro_batches: what it is called with, one at a time.
            order: "horizontal" for one after the other.

        Raises:
            ValueError: for another order.
            RuntimeError: more micro-batches than the step has backward passes left, before any has begun; or called
                inside of itself.
            NotStreamable: micro-batches that were independent in the first step are not any more.
            BaseException: what `function` raises. The current step is then given up, and all is as after the last
                completed one; no thread runs any more. Ctrl-C is answered at the next block.

        Returns:
            What `function` returned, in the order of the micro-batches.

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
        """Save the model as it is after the last completed step, and go on training while it is written.

        The folder is new or empty, and appears whole, when all is on the disk: `model.safetensors` with parameters (a
        tied one once) and persistent buffers by their names, as `safetensors.torch.load_model` and `from_pretrained`
        take them; and for `load` `states.safetensors` and `states.json`. Host memory: one buffer of 4 MiB.

        Args:
            folder: where it is written; in the end the save's value.
            states: also masters, moments, counts of steps, settings of the groups, and `note` as it is now.
            background: training goes on at once; an update waits where it would overwrite what is not copied yet.
                False: the save is there on return.

        Returns:
            The save: `done()`, and `wait()`, which returns the folder, or raises what went wrong. One runs at a time: a
            second one waits for the first. `close` waits for it, too, and raises its error where nobody has asked.

        Raises:
            ValueError: the folder is there and not empty, or the disk is full.
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
        """Put back what `save` wrote with its states: the weights that train, masters and moments, counts of steps,
        settings of the groups, buffers and `note`. It is a completed step at once.

        Args:
            folder: of a save of the same model, with the same groups, weights and states of the same dtypes.

        Raises:
            ValueError: it is no such folder; nothing has changed then.
            RuntimeError: a gradient has come since the last step.

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
        """Completed in this folder, the earlier runs' among them (the most of any parameter). After an interrupt an
        update that it has cut off is completed first."""
        return max(self._engine().completed_steps().values(), default=0)

    def _engine(self) -> StreamingEngine:
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
        """End, and delete the states."""
        if self.engine is not None:
            self.engine.close(destroy=True)
        else:
            state_files.remove(self.folder)

    def close(self) -> None:
        """End: threads, memory and descriptors go, the states of the last completed step stay. Idempotent. A save is
        waited for; its error is raised, when all is closed, where nobody has asked for it."""
        if self.engine is not None:
            self.engine.close()
            self.engine.raise_unseen_failure_of_save()

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        elif self.engine is not None:  # whose error is the one to be seen
            self.engine.close()


def _chosen(options: EngineOptions | None, **named: Any) -> EngineOptions:
    """The options, with what the call itself names (None: it does not) in their place."""
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
    """While the engine looks at what is trained."""
    frozen = [p for group in groups for p in group["params"] if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
