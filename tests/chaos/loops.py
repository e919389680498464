"""Trainings as users write them. Each may be cut off anywhere and started again in the same folder.

A loop reports what it does through `say`: `begun`, `resumed` (the step that it resumes from, and a digest of the
states), `step` (completed, with its loss), `error` (its message), `done` (the digest that it reached). It resumes from
what it finds: the states on the tier, or its own checkpoint.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import hashlib
import importlib
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memascend.activation.offload import offload_activations
from memascend.engine import state_store, swap
from memascend.engine.errors import InterruptedUpdate, NotThisModel
from memascend.engine.options import EngineOptions
from memascend.engine.streaming import streaming
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import AdamW
from tests.chaos.draws import STEPS
from tests.chaos.sandbox import forked
from tests.zoo.shapes import SHAPES, batch

PLAIN_STATE = ("calls", "steps", "seen", "history", "by_name")  # state of the zoo's modules that is not a buffer
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
# These shapes of the zoo and no others: one more would change what every seed draws (`draws.DRAWN_AS`).
SHAPES_DRAWN = [
    "ADataclassInAndOut",
    "AGradientInForward",
    "AModuleThatReturnsItsParameter",
    "ANormHandedIn",
    "ANormHandedInThatComesLast",
    "APlainObjectInAndOut",
    "AnObjectWithSlotsIsChanged",
    "AnotherArgumentIsChangedLater",
    "AnotherOrderEachStep",
    "Autocast",
    "AuxiliaryLossByHooks",
    "AuxiliaryLossOfAnAttribute",
    "BatchNormInBlocks",
    "BlocksCalledTwice",
    "CheckpointsAroundGroups",
    "CheckpointsInBlocks",
    "ChunkedLoss",
    "CodeBookInBlocks",
    "ConvolutionsOfSeveralSizes",
    "CountersInBlocks",
    "CustomFunctionsInBlocks",
    "DictsInAndOut",
    "DiffusionTransformer",
    "EmptyParameters",
    "FrozenBlocks",
    "FrozenBlocksOnAnObject",
    "FrozenEmbedding",
    "IdleExperts",
    "InPlaceChanges",
    "ListsAndDictsOfParameters",
    "LowRankAdapters",
    "LstmInBlocks",
    "MicroBatches",
    "ParallelBranches",
    "Parametrizations",
    "Plain",
    "RandomNumbers",
    "RecurrenceOverSlices",
    "ReentrantCheckpointsAroundGroups",
    "ResidualOfTheFirstBlock",
    "RootParameter",
    "SkipConnections",
    "SpectralMixing",
    "StochasticDepth",
    "TensorsAndListsInAttributes",
    "TiedEmbedding",
    "UnsavedBuffers",
    "VisionTransformer",
    "Wrapped",
    "WrapperWithAChildCalledModel",
    "ZeroDimensionalParameters",
]
Say = Callable[..., None]
_GONE_S = 5.0


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return SHAPES[name]()


class OtherState:
    """Buffers and plain attributes of a model: they are small, and the loop saves them itself."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def taken(self) -> str:
        buffers = [buffer.clone() for buffer in self._model.buffers()]
        plain = [{k: v for k, v in vars(m).items() if k in PLAIN_STATE} for m in self._model.modules()]
        return base64.b64encode(pickle.dumps((buffers, plain))).decode()

    @torch.no_grad()
    def put_back(self, taken: str) -> None:
        buffers, plain = pickle.loads(base64.b64decode(taken))
        for now, then in zip(self._model.buffers(), buffers, strict=True):
            now.copy_(then)
        for module, attributes in zip(self._model.modules(), plain, strict=True):
            for name in PLAIN_STATE:  # an attribute that was the class's then must not stay an attribute of the module
                vars(module).pop(name, None)
            vars(module).update(attributes)


def write_durably(path: Path, values: Any) -> None:
    """Save as a careful user does: completely or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            torch.save(values, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, (OSError, RuntimeError)):  # torch.save reports a failed write by either
            raise OSError(f"{path}: the loop's own checkpoint could not be written: free space ({error})") from error
        raise


class Loop:
    """The part that all loops have in common."""

    def __init__(
        self,
        training: dict[str, Any],
        folder: Path,
        say: Say,
        on_error: Callable[[], bool],
        *,
        until: int = STEPS,
        calls: Callable[[], dict[str, int]] | None = None,
    ) -> None:
        """Prepare the loop; `run` trains.

        Args:
            on_error: called after an error in a step; returns whether the user repeats the step in this process.
            until: the step to stop after.
            calls: returns the system calls so far. If given, the states are read after each step, and the calls and the
                time that this takes are left out of the counts.
        """
        self.training, self.folder, self.say, self.on_error = training, folder, say, on_error
        self.until, self._calls, self._looking = until, calls, {"seconds": 0.0}
        self.saved = folder / "saved.pt"

    def look(self, step: int, digest: Callable[[], str]) -> None:
        if self._calls is None:
            return
        before, begun = self._calls(), time.monotonic()
        self.say("digest", step=step, digest=digest())
        self._looking["seconds"] += time.monotonic() - begun
        for op, count in self._calls().items():
            self._looking[op] = self._looking.get(op, 0) + count - before[op]

    def run(self) -> None:
        descriptors = open_descriptors()
        running = len(os.listdir("/proc/self/task"))
        self.say("begun")
        try:
            self.train()
        except BaseException as error:
            name = f"{type(error).__name__}: {error}"
            error.__traceback__ = None  # its frames would keep alive what the check looks for
            del error
            self._look_for_leaks(descriptors, running, name)
            raise
        self._look_for_leaks(descriptors, running, None)
        if self._calls is not None:
            counted = {op: count - self._looking.get(op, 0) for op, count in self._calls().items()}
            self.say("counted", calls=counted, looking_s=self._looking["seconds"])
        if self.until == STEPS:
            self.end()

    def train(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Clean up after the last step, when everything is closed."""

    def data(self, step: int) -> list[torch.Tensor]:
        passes = self.training["accumulate"]
        return [batch(step * passes + number) for number in range(passes)]

    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file())

    def _look_for_leaks(self, descriptors: set[str], running: int, error: str | None) -> None:
        gc.collect()
        deadline = time.monotonic() + _GONE_S  # the kernel takes rings down after `close` has returned
        while (
            (more := sorted(open_descriptors() - descriptors)) or (len(os.listdir("/proc/self/task")) > running)
        ) and time.monotonic() < deadline:
            time.sleep(0.01)
        threads = len(os.listdir("/proc/self/task")) - running
        left = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())
        names = [thread.name for thread in threading.enumerate()]
        self.say("closed", descriptors=more, threads=max(0, threads), names=names, files=left, error=error)


def open_descriptors() -> set[str]:
    """Return each descriptor's number with its target, since numbers are reused."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except OSError:
            continue
    return found


class EngineLoop(Loop):
    """The streaming engine on one of the zoo's shapes, for `STEPS` steps."""

    def train(self) -> None:
        swap._LEAST_BYTES = 256  # the shapes are small
        self.tears = self.training["states"] == "one version, torn"
        session_folder = self.folder / "session"
        model, saved = made(self.training["shape"]), None
        try:
            session, optimizer = self._begin(model, session_folder, resume=state_store.holds_states(session_folder))
        except (NotThisModel, InterruptedUpdate) as error:  # both tell the fix
            self.say("told", error=f"{type(error).__name__}: {error}")
            state_store.remove(session_folder)
            shutil.rmtree(session_folder, ignore_errors=True)
            model = made(self.training["shape"])
            if self.saved.exists():
                saved = torch.load(self.saved, weights_only=False)
                model.load_state_dict(saved["model"])
            session, optimizer = self._begin(model, session_folder, resume=False)
        try:
            if saved is not None:
                optimizer.load_state_dict(saved["optimizer"])
                session.note = saved["note"]
            self._steps(model, session, optimizer)
        finally:
            session.close()

    def _begin(self, model: nn.Module, folder: Path, *, resume: bool) -> tuple[streaming, Any]:
        session = streaming(folder, resume=resume, allocator=PageAlignedPinnedAllocator(Ledger(), lock=False))
        session.hook(model)
        chosen = self.training
        options = EngineOptions(
            arm=chosen["arm"],
            accumulate=chosen["accumulate"],
            clip=chosen["clip"],
            checkpoints=chosen["checkpoints"],
            swap=chosen["swap"],
            versions=2 if chosen["states"] == "two versions" else 1,
            redo=not self.tears,
        )
        return session, session.optimizer(torch.optim.AdamW, options=options, **SETTINGS)

    def _steps(self, model: nn.Module, session: streaming, optimizer: Any) -> None:
        other = OtherState(model)
        if session.note:
            other.put_back(session.note["other"])
        first = session.note.get("step", 0)
        self.say("resumed", step=first, digest=digest_of(session, other))
        self.look(first, lambda: digest_of(session, other))
        for step in range(first, self.until):
            before = other.taken()
            while True:
                try:
                    loss = self._step(model, session, optimizer, other, step)
                    break
                except (Exception, KeyboardInterrupt) as error:
                    self.say("error", step=step, error=f"{type(error).__name__}: {error}")
                    if not self.on_error():
                        raise
                    other.put_back(before)
                    optimizer.zero_grad()
            if self.tears and step % 2 == 1:
                self._save(model, session, optimizer, step)
            self.say("step", step=step + 1, loss=loss)
            self.look(step + 1, lambda: digest_of(session, other))
        if self.until == STEPS:
            self.say("done", digest=digest_of(session, other), bytes_on_disk=self.bytes_on_disk())

    def _save(self, model: nn.Module, session: streaming, optimizer: Any, step: int) -> None:
        while True:  # an error here is no reason to repeat the step
            try:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "note": session.note}
                write_durably(self.saved, state)
                return
            except (Exception, KeyboardInterrupt) as error:
                self.say("error", step=step, error=f"{type(error).__name__}: {error}")
                if not self.on_error():
                    raise

    def _step(self, model: nn.Module, session: streaming, optimizer: Any, other: OtherState, step: int) -> list[str]:
        torch.manual_seed(step)
        losses = []
        for ids in self.data(step):
            loss = model(ids) / self.training["accumulate"]
            losses.append(float(loss.detach()).hex())
            loss.backward()
        session.note = {"step": step + 1, "other": other.taken()}
        optimizer.step()
        return losses

    def end(self) -> None:
        state_store.remove(self.folder / "session")
        self.saved.unlink(missing_ok=True)
        self.say("removed", files=sorted(path.name for path in self.folder.iterdir()))


def digest_of(session: streaming, other: OtherState) -> str:
    engine = session.engine
    digest = hashlib.sha256(str(sorted(engine.steps.items())).encode())
    for name, values in engine.read_weights():
        digest.update(name.encode() + values.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    for name in engine.layout.order:
        for key, values in sorted(engine.read_states(name).items()):
            digest.update(key.encode() + values.numpy().tobytes())
    for buffer in other._model.buffers():
        digest.update(buffer.contiguous().numpy().tobytes())
    return digest.hexdigest()


class ActivationsLoop(Loop):
    """A model in memory whose activations are kept on the SSD; the loop saves everything after each step."""

    def train(self) -> None:
        model = made(self.training["shape"])
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer, other, first = AdamW(trained, **SETTINGS), OtherState(model), 0
        if self.saved.exists():
            saved = torch.load(self.saved, weights_only=False)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            other.put_back(saved["other"])
            first = saved["step"]
        self.say("resumed", step=first, digest=self._digest(model, optimizer))
        self.look(first, lambda: self._digest(model, optimizer))
        where = self.folder / "activations"
        where.mkdir(exist_ok=True)
        options = {"amount": "all", "minimum_bytes": 512, "reserve_bytes": 0, "device": "cpu"}
        for step in range(first, self.until):
            before = other.taken()
            while True:
                try:
                    torch.manual_seed(step)
                    losses = []
                    with offload_activations(where, **options):
                        for ids in self.data(step):
                            loss = model(ids) / self.training["accumulate"]
                            losses.append(float(loss.detach()).hex())
                            loss.backward()
                    optimizer.step()
                    break
                except (Exception, KeyboardInterrupt) as error:
                    self.say("error", step=step, error=f"{type(error).__name__}: {error}")
                    # An interrupt in the optimizer's own step leaves it half done, in
                    # memory, so this process cannot continue.
                    if isinstance(error, KeyboardInterrupt) or not self.on_error():
                        raise
                    other.put_back(before)
                    optimizer.zero_grad()
            optimizer.zero_grad()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            write_durably(self.saved, {**state, "other": other.taken(), "step": step + 1})
            self.say("step", step=step + 1, loss=losses)
            self.look(step + 1, lambda: self._digest(model, optimizer))
        if self.until == STEPS:
            self.say("done", digest=self._digest(model, optimizer), bytes_on_disk=self.bytes_on_disk())

    def end(self) -> None:
        self.saved.unlink(missing_ok=True)
        left = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())
        self.say("removed", files=left)

    @staticmethod
    def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
        digest = hashlib.sha256()
        for values in (*model.parameters(), *model.buffers()):
            digest.update(values.detach().contiguous().numpy().tobytes())
        for parameter in model.parameters():
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                digest.update(
                    f"{key} {hashlib.sha256(pickle.dumps(torch.as_tensor(value).tolist())).hexdigest()}".encode()
                )
        return digest.hexdigest()


def import_what_trainings_import() -> None:
    """Import in this process what trainings import, so that its forks need not.

    A fork runs a training of each kind to find out which modules these are.
    """

    def program(say: Say) -> None:
        before = set(sys.modules)
        with tempfile.TemporaryDirectory() as folder:
            for name in ("CheckpointsInBlocks", "Autocast", "Parametrizations"):
                training = {"shape": name, "states": "two versions", "arm": "optimized", "accumulate": 1, "clip": 0.5}
                training |= {"checkpoints": "tier", "swap": "all"}
                for kind, loop in LOOPS.items():
                    own = Path(folder) / kind / name
                    own.mkdir(parents=True)
                    loop(training, own, lambda *_, **__: None, lambda: False).run()
        say("imported", names=sorted(set(sys.modules) - before))

    phase = forked(program, Path(os.devnull), limit_s=600)
    for name in (phase.last("imported") or {"names": ()})["names"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a garbage collection in a fork then does not copy the shared pages


LOOPS = {"engine": EngineLoop, "activations": ActivationsLoop}
