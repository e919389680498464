"""The optimizer of a streamed model: torch.optim's interface to states that are on a tier."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from memascend.engine import loaded_states
from memascend.engine.adam_settings import REFUSED, AdamSettings
from memascend.engine.errors import NotStreamable
from memascend.engine.gradient_views import no_scaler
from memascend.engine.json_notes import to_json
from memascend.engine.layout import numel_of_state
from memascend.engine.mmap_tensors import TensorFile
from memascend.engine.runtime import StreamingEngine
from memascend.storage.interrupts import uninterrupted

log = logging.getLogger("memascend")


class Session(Protocol):
    """The session that an optimizer belongs to: a `memascend.engine.streaming.streaming` with an engine."""

    engine: StreamingEngine | None
    note: dict[str, Any]


_SUPPORTED = {"lr", "betas", "eps", "weight_decay"}


class StreamedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW (or Adam without decay) whose states and parameters are on a tier; created by `streaming`.

    Updates run during backward, with the settings that each group has then; `step` waits for them and completes the
    step. A parameter that got no gradient stays unchanged. `norm` is the 2-norm of all gradients of the last step, or
    None if the step was skipped. `state` is empty: `state_dict` reads the states into a file and returns tensors that
    are views of it, so that no host memory is proportional to the model; they have the shapes of the parameters and the
    dtype of `EngineOptions.states`; 8-bit moments are those of `memascend.ops.adamw8.AdamW8bit`. Call all methods from
    the training thread. `streaming` documents what may be read between `backward()` and `step()`, and how the model's
    own methods behave.
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
        self._session: Session | None = None
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

    def attach(self, session: Session) -> None:
        """Set the session that this optimizer belongs to; from then on its groups are fixed."""
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
        """Raise NotStreamable: torch.amp.GradScaler reads this attribute in its `step`."""
        raise no_scaler()

    def take_over(self, facts: dict[str, Any], names: Mapping[Any, str]) -> None:
        """Set the groups' settings to those kept with the last step. Raises ValueError for other groups."""
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
        """The session's engine. Raises RuntimeError before `attach`."""
        if self._session is None:
            raise RuntimeError("this optimizer has no model yet: create it with streaming(folder).optimizer(...)")
        engine = self._session.engine
        assert engine is not None  # the session's, before it had this optimizer
        return engine

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait until all updates of this step are done and written, complete the step, and return the result of
        `closure`.

        If a gradient is infinite or NaN, the step changes nothing.

        Raises:
            StorageError: or any other error since the last step; the states are those of the step before it. With one
                version of the states, a step whose update has begun can only be completed: the error says so, and so
                does every use until the session is closed and resumed. After KeyboardInterrupt the next use completes
                it, such as reading `session.steps`.
            ValueError: `session.note` is not JSON or too large; nothing has changed, and `step` can be called again.
            InterruptedUpdate: with `redo=False`, if the writes of the step cannot be rolled back.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with uninterrupted:  # so that Ctrl-C comes before or after all these changes, and never between them
            facts = self.facts()
            arrived = frozenset(self.engine.updates.arrived)
            self.norm = self.engine.finish_step(facts=facts)
            self.engine.gradients.spent = arrived
        if self.norm is None:
            log.warning("memascend: a gradient was infinite or NaN: the step was skipped")
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients since the last step, and all updates made with them.

        With `set_to_none=False`, parameters that have had a gradient are updated with zeros in the next step if they
        get no gradient, as in torch.optim.
        """
        if self._session is not None:
            self.engine.forget_gradients(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, before `attach` only. Raises NotStreamable afterwards."""
        if self._session is not None:
            raise NotStreamable(
                "the param groups of a streamed model are fixed: pass all of them at the start (params=)"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict as torch.optim.AdamW's, with "master" next to the moments of 16-bit parameters; with
        8-bit moments as `AdamW8bit`'s, with codes and "scales" of uint8. Tensors are views of a file that is removed
        with the last of them. Raises RuntimeError as `StreamingEngine.require_completed_step`."""
        engine, names = self.engine, self._names()
        engine.require_completed_step()
        keys, element = engine.layout.state_names, engine.layout.stored_states.itemsize
        trained = [p for p, name in names.items() if engine.steps.get(name)]
        file = TensorFile(
            engine.state_store.folder, [numel_of_state(key, p.numel()) * element for p in trained for key in keys]
        )
        state: dict[int, dict[str, torch.Tensor]] = {}
        for number, (parameter, name) in enumerate(names.items()):
            if engine.steps.get(name):  # frozen parameters have no steps
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
        """Load settings and states, also those of torch.optim.AdamW, and commit them as a completed step. 16-bit
        weights are set from their masters if these are given. 8-bit moments are loaded as codes with their scales, to
        the bit, or quantized from floating-point moments, rounded to nearest; codes are refused where moments are
        floating-point. Raises ValueError for groups, settings or states that do not fit, and RuntimeError if a gradient
        has come since the last step; nothing has changed then."""
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
            super().load_state_dict({**state_dict, "state": {}})  # raises ValueError for groups that do not fit
        finally:
            self._session = session

        def states_of(name: str) -> dict[str, torch.Tensor]:
            if not given[name]:
                return loaded_states.none(engine.layout, sizes[name])
            return loaded_states.as_kept(engine.layout, given[name])

        engine.write_states(states_of, steps)
        engine.keep(self.facts())

    def facts(self) -> dict[str, Any]:
        """Return the note and the groups' settings as JSON, which is kept with each step. Raises ValueError."""
        session = self._session
        assert session is not None
        if not isinstance(session.note, dict):
            raise ValueError(f"session.note: a dict, got {session.note!r}")
        names = self.engine.units.names
        groups = [{**_plain(group), "members": _members(group, names)} for group in self.param_groups]
        return {"note": to_json(session.note), "groups": groups}

    def _names(self) -> dict[torch.Tensor, str]:
        """Return the names of all parameters in the groups."""
        names = self.engine.units.names
        return {p: names[p] for group in self.param_groups for p in group["params"]}


def _accepted(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults of torch's optimizer with these settings. Raises ValueError for values that it refuses."""
    try:
        return kind([torch.zeros(1)], **settings).defaults
    except (TypeError, IndexError) as error:
        said = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise ValueError(f"{kind.__name__} does not take {said}: {error}") from error


def _require_finite(group: Mapping[str, Any]) -> None:
    """Raise ValueError if a setting of the group is infinite or NaN."""
    for name in sorted(_SUPPORTED):
        values = group[name] if name == "betas" else [group[name]]
        if not all(math.isfinite(value) for value in values):
            raise ValueError(f"{name}: a finite number, got {group[name]!r}")


def _checked_step(name: str, saved: dict[str, Any]) -> int:
    """Return the count of steps in a loaded state. Raises ValueError unless it is a finite number of at least 0."""
    step = saved.get("step")
    if not isinstance(step, int | float | torch.Tensor) or not 0 <= float(step) < math.inf:
        raise ValueError(f"{name}: its step is {step!r} in the loaded state, but must be a count of completed steps")
    return int(step)


def _members(group: dict[str, Any], names: Mapping[Any, str]) -> str:
    """Return a short digest of the names of a group's parameters."""
    return hashlib.sha256("\n".join(sorted(names[p] for p in group["params"])).encode()).hexdigest()[:16]


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings as JSON, including a scheduler's (initial_lr)."""
    kept = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor):
            value = value.item()
        if isinstance(value, (int, float, str, bool)) or key == "betas":
            kept[key] = value
    return kept
