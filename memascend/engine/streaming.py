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
import hashlib
import logging
import math
import os
import textwrap
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from memascend.engine import loaded_states, state_store
from memascend.engine.adam_settings import REFUSED, AdamSettings
from memascend.engine.blocks import NotStreamable
from memascend.engine.gradient_views import no_scaler
from memascend.engine.layout import numel_of_state
from memascend.engine.mmap_tensors import TensorFile
from memascend.engine.model_guards import require_not_streamed
from memascend.engine.options import EngineOptions
from memascend.engine.runtime import StreamingEngine
from memascend.engine.saved import begin_save, put_back, saved_facts
from memascend.engine.saving import BackgroundSave
from memascend.memory.pinned import Allocator
from memascend.storage.interrupts import uninterrupted

log = logging.getLogger("memascend")

_SUPPORTED = {"lr", "betas", "eps", "weight_decay"}


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
        if state_store.holds_states(self.folder) and not resume:
            raise ValueError(
                f"{self.folder} holds the states of an earlier training: continue it (resume=True), or remove it"
            )
        if resume and not state_store.holds_states(self.folder):
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
                or float16. It may wait in files (`memascend.integrations.waiting_model`).
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
            StorageError: where the disk has no room.
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
        options = EngineOptions() if options is None else options
        if not isinstance(options, EngineOptions):
            raise ValueError(f"options=: an EngineOptions, got {options!r}: write options=EngineOptions(...)")
        named = {
            "accumulate": accumulate,
            "clip": clip,
            "wait": wait,
            "implicit_step": implicit_step,
            "unfreezes": unfreezes,
            "device": self._device,
        }
        chosen = dataclasses.replace(options, **{name: value for name, value in named.items() if value is not None})
        if chosen.unfreezes and params is None:
            params = self._model.parameters()
        made = StreamedAdamW(kind, self._model, params, settings)
        start: Callable[..., Any] = StreamingEngine.resume if self._resume else StreamingEngine.start
        with _all_trained(made.param_groups) if chosen.unfreezes else contextlib.nullcontext():
            found = start(
                self._model,
                self.folder,
                lambda: made.param_groups,  # of now: load_state_dict puts others in their place
                chosen,
                blocks=self._blocks,
                allocator=self._allocator,
            )
        if self._resume:
            engine, facts = found
            try:
                made.take_over(facts, engine.units.names)
            except BaseException:
                engine.close()
                raise
            self.engine, self.note = engine, _from_json(facts.get("note", {}))
        else:
            self.engine = found
        made.attach(self)
        self._made = weakref.ref(made)
        if chosen.waits or chosen.accumulate > 1:
            norm = "their norm" if chosen.clip > 0 or chosen.wait else "the end of backward"
            why = "those of the step's other passes" if chosen.accumulate > 1 else norm
            log.info("memascend: gradients wait on the SSD for %s: one more write and read of them per step", why)
        return made

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
        save = begin_save(self._engine(), folder, made._facts() if states else None)
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
        self.note = _from_json(facts.get("note", {}))
        engine.keep(made._facts())

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
            state_store.remove(self.folder)

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


class StreamedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW (or Adam without decay) whose states and parameters are on a tier; made by `streaming`.

    Updates run while backward does, with each group's settings as they are then; `step` waits for them and completes
    the step. A parameter that got no gradient is left as it is. `norm` is the 2-norm of all gradients of the last step,
    None where the step was left out. `state` is empty: `state_dict` reads the states into a file that its tensors are
    views of, so that no memory is proportional to the model; they have the shapes of the parameters and the dtype of
    `EngineOptions.states`; 8-bit moments are `memascend.ops.adamw8.AdamW8bit`'s. All methods are the training thread's.
    What may be looked at between `backward()` and `step()`, and what becomes of the model's own methods, stands at
    `streaming`.
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        model: nn.Module,
        params: Iterable[Any] | None,
        settings: dict[str, Any],
    ) -> None:
        if isinstance(kind, torch.optim.Optimizer):
            name = type(kind).__name__
            raise NotStreamable(
                f"optimizer(kind): the class and its settings, got an instance of {name}: write "
                f"session.optimizer(torch.optim.{name}, lr=...)"
            )
        if not isinstance(kind, type):
            raise ValueError(f"optimizer(kind): torch.optim.AdamW or Adam, got {kind!r}")
        if kind not in (torch.optim.AdamW, torch.optim.Adam):
            raise NotStreamable(f"{kind.__name__} cannot be streamed: use torch.optim.AdamW or Adam")
        if unknown := sorted(set(settings) - set(kind([torch.zeros(1)]).defaults)):
            raise ValueError(f"{kind.__name__} has no setting {unknown[0]!r}")
        defaults = _accepted(kind, settings)
        decoupled = kind is torch.optim.AdamW or defaults.get("decoupled_weight_decay")
        given = [p for p in model.parameters() if p.requires_grad] if params is None else params
        self._session: streaming | None = None
        super().__init__(given, {key: defaults[key] for key in sorted(_SUPPORTED)})
        for group in [defaults, *self.param_groups]:
            if asked := [name for name in REFUSED if group.get(name)]:
                raise NotStreamable(f"{kind.__name__} with {asked[0]} cannot be streamed: remove it")
            if not decoupled and group["weight_decay"]:
                raise NotStreamable("Adam with weight decay in the gradient cannot be streamed: use torch.optim.AdamW")
            _accepted(kind, {key: group[key] for key in _SUPPORTED})
            _require_finite(group)
        of_model = set(model.parameters())
        for number, group in enumerate(self.param_groups):
            if foreign := [p for p in group["params"] if p not in of_model]:
                raise ValueError(
                    f"a parameter of shape {tuple(foreign[0].shape)} in group {number} of params= does not belong to "
                    "the model"
                )

    def attach(self, session: streaming) -> None:
        self._session = session

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state" and vars(self).get("_session") is not None:
            raise NotStreamable(
                "the states of a streamed model are on the SSD, and `state` is empty: load_state_dict replaces "
                'them there, and resets those that its "state" lacks'
            )
        super().__setattr__(name, value)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks for it in its `step`."""
        raise no_scaler()

    def take_over(self, facts: dict[str, Any], names: Mapping[torch.Tensor, str]) -> None:
        """Settings of the groups as they were kept with the last step. ValueError where the groups are others."""
        kept = facts.get("groups", [])
        if len(kept) not in (0, len(self.param_groups)):
            raise ValueError(
                f"{len(self.param_groups)} groups in params=, but the run had {len(kept)}: pass the same groups"
            )
        for number, (group, before) in enumerate(zip(self.param_groups, kept, strict=False)):
            settings = {key: tuple(value) if isinstance(value, list) else value for key, value in before.items()}
            if settings.pop("members", None) not in (None, _members(group, names)):
                raise ValueError(
                    f"group {number} of params= has other parameters than before in this run: pass the same groups in "
                    "the same order"
                )
            for key in sorted(_SUPPORTED & set(settings)):
                if settings[key] != group[key]:
                    log.info(
                        "memascend: group %d continues with %s=%s of the last step (%s was requested; change it in "
                        "optimizer.param_groups)",
                        number,
                        key,
                        settings[key],
                        group[key],
                    )
            group.update(settings)

    @property
    def engine(self) -> StreamingEngine:
        if self._session is None:
            raise RuntimeError("this optimizer has no model yet: create it with streaming(folder).optimizer(...)")
        return self._session._engine()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Until all updates of this step are done, written and completed; what `closure` returns.

        With a gradient that is infinite or NaN the step changes nothing.

        Raises:
            StorageError: and whatever else failed since the last step; the states are those of the step before it.
                With one version of the states, once its update has begun, the step can only be completed: the error
                says so, and so does every use until the session is closed and resumed. After KeyboardInterrupt the next
                use completes it, such as a look at `session.steps`.
            ValueError: `session.note` is no JSON or too large; nothing has changed, and `step` can be called again.
            InterruptedUpdate: with `redo=False`, where what was written cannot be taken back.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with uninterrupted:  # Ctrl-C finds the step done, or not done, in all that is kept of it
            facts = self._facts()
            arrived = frozenset(self.engine.updates.arrived)
            self.norm = self.engine.finish_step(facts=facts)
            self.engine.gradients.spent = arrived
        if self.norm is None:
            log.warning("memascend: a gradient was infinite or NaN: the step was skipped")
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that came since the last step, and what was updated with them.

        With `set_to_none=False` parameters that have had a gradient are updated in the next step whether they get one
        or not, with zeros, as by torch.optim.
        """
        if self._session is not None:
            self.engine.forget_gradients(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._session is not None:
            raise NotStreamable(
                "the param groups of a streamed model are fixed: pass all of them at the start (params=)"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, with "master" beside the moments of 16-bit parameters; with 8-bit moments as
        `AdamW8bit`'s, codes and "scales" of uint8. Views of a file that goes with the last of them."""
        engine, names = self.engine, self._names()
        engine.require_completed_step()
        keys, element = engine.layout.state_names, engine.layout.stored_states.itemsize
        trained = [p for p, name in names.items() if engine.steps.get(name)]
        file = TensorFile(
            engine.state_store.folder, [numel_of_state(key, p.numel()) * element for p in trained for key in keys]
        )
        state: dict[int, dict[str, torch.Tensor]] = {}
        for number, (parameter, name) in enumerate(names.items()):
            if engine.steps.get(name):  # none of a frozen one
                found = engine.read_states(name)
                state[number] = {"step": torch.tensor(float(engine.steps[name]))}
                state[number] |= {
                    key: file.put(found[key]).view(loaded_states.shape_of(key, parameter.shape)) for key in keys
                }
        groups, first = [], 0
        for group in self.param_groups:
            numbers = list(range(first, first + len(group["params"])))
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": numbers})
            first += len(numbers)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Settings and states, torch.optim.AdamW's too; weights of 16 bits follow their masters where these are given.
        8-bit moments are taken as codes with their scales, to the bit, or made of numbers, rounded to nearest; codes
        are refused where moments are numbers. Completed at once. Raises ValueError for groups, settings or states that
        do not fit, and nothing has changed then."""
        groups, own = state_dict["param_groups"], self.param_groups
        for group in groups:
            if asked := [name for name in REFUSED if group.get(name)]:
                raise ValueError(f"the state was saved with {asked[0]}, which is not supported here: train without it")
            AdamSettings.of({**self.defaults, **group}, step=1)
        self.engine.require_no_gradients()
        engine = self.engine
        numbers = [number for group in groups for number in group["params"]]
        given: dict[str, dict[str, torch.Tensor]] = {}
        steps: dict[str, int] = {}
        sizes = {name: parameter.numel() for parameter, name in self._names().items()}
        fits = [len(group["params"]) for group in groups] == [len(group["params"]) for group in own]
        for number, (parameter, name) in zip(numbers, self._names().items(), strict=True) if fits else ():
            saved = state_dict["state"].get(number)
            if name not in engine.steps:
                if saved is not None:
                    log.warning("memascend: %s is frozen: its states are not loaded", name)
            elif saved is not None:
                states = loaded_states.checked(engine.layout, name, parameter.shape, saved)
                given[name], steps[name] = states, _checked_step(name, saved)
            elif engine.steps[name]:
                given[name], steps[name] = {}, 0
        session, self._session = self._session, None
        try:
            super().load_state_dict({**state_dict, "state": {}})  # or it says what does not fit of the groups
        finally:
            self._session = session

        def states_of(name: str) -> dict[str, torch.Tensor]:
            if not given[name]:
                return loaded_states.none(engine.layout, sizes[name])
            return loaded_states.as_kept(engine.layout, given[name])

        engine.write_states(states_of, steps)
        engine.keep(self._facts())

    def _facts(self) -> dict[str, Any]:
        """Kept with each step."""
        if not isinstance(self._session.note, dict):
            raise ValueError(f"session.note: a dict, got {self._session.note!r}")
        names = self.engine.units.names
        groups = [{**_plain(group), "members": _members(group, names)} for group in self.param_groups]
        return {"note": _as_json(self._session.note), "groups": groups}

    def _names(self) -> dict[torch.Tensor, str]:
        names = self.engine.units.names
        return {p: names[p] for group in self.param_groups for p in group["params"]}


def _accepted(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> dict[str, Any]:
    """Defaults of torch's optimizer with these settings. Raises ValueError for values that it refuses."""
    try:
        return kind([torch.zeros(1)], **settings).defaults
    except (TypeError, IndexError) as error:
        said = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise ValueError(f"{kind.__name__} does not take {said}: {error}") from error


def _require_finite(group: Mapping[str, Any]) -> None:
    for name in sorted(_SUPPORTED):
        values = group[name] if name == "betas" else [group[name]]
        if not all(math.isfinite(value) for value in values):
            raise ValueError(f"{name}: a finite number, got {group[name]!r}")


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


def _checked_step(name: str, saved: dict[str, Any]) -> int:
    step = saved.get("step")
    if not isinstance(step, int | float | torch.Tensor) or not 0 <= float(step) < math.inf:
        raise ValueError(f"{name}: its step is {step!r} in the loaded state, but must be a count of completed steps")
    return int(step)


def _members(group: dict[str, Any], names: Mapping[torch.Tensor, str]) -> str:
    """Short for the names of a group's parameters."""
    return hashlib.sha256("\n".join(sorted(names[p] for p in group["params"])).encode()).hexdigest()[:16]


_PAIRS, _TUPLE = "memascend: pairs", "memascend: tuple"


def _as_json(value: Any) -> Any:
    """Return what `_from_json` turns into an equal value again. JSON alone makes strings of a dict's keys, such as the
    epochs of a scheduler, and lists of tuples."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _as_json(each) for key, each in value.items()}
        return {_PAIRS: [[_as_json(key), _as_json(each)] for key, each in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [_as_json(each) for each in value]}
    return [_as_json(each) for each in value] if isinstance(value, list) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {_PAIRS}:
            return {_from_json(key): _from_json(each) for key, each in value[_PAIRS]}
        if set(value) == {_TUPLE}:
            return tuple(map(_from_json, value[_TUPLE]))
        return {key: _from_json(each) for key, each in value.items()}
    return list(map(_from_json, value)) if isinstance(value, list) else value


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings as JSON; a scheduler's (initial_lr) among them."""
    kept = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor):
            value = value.item()
        if isinstance(value, (int, float, str, bool)) or key == "betas":
            kept[key] = value
    return kept
