"""A checkpoint that is written while training continues, for backends that support it (`save_meanwhile`)."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

from memascend.storage.tensor_file import TensorLayout
from memascend.storage.tensor_parts import TensorPartsWriter
from memascend.training import checkpoint, random_state

if TYPE_CHECKING:
    from memascend.engine.saving import BackgroundSave
    from memascend.training.backends.streaming import StreamingBackend
    from memascend.training.config import TrainConfig
    from memascend.training.folder import RunFolder

_STATES = "state/rank0.safetensors"


class BackgroundCheckpoint:
    """The checkpoint of one step, from the start of writing on.

    Its files are bit-identical to those of a checkpoint that training waits for.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder, backend: StreamingBackend, step: int) -> None:
        """Write what is in memory, and start saving the rest. Raises OSError, and then leaves nothing behind."""
        begin = time.monotonic()
        self.step, self._folder, self._config = step, folder, config
        self.path = folder.checkpoints / f"step-{step:08d}"
        self._partial = checkpoint.begin(folder.checkpoints, step, full=config.checkpoints == "full")
        self._files: dict[str, TensorPartsWriter] = {}
        try:
            self._save = self._begin(backend)
        except BaseException as error:
            self._give_up(error)
            raise
        self._begin_s = time.monotonic() - begin

    def _begin(self, backend: StreamingBackend) -> BackgroundSave:
        """Write configuration, generators and facts, and start the save of the tensors."""
        from memascend.integrations.pretrained import save_configuration

        save_configuration(backend.model, self._partial / "model", self._folder.tokenizer)
        weights = self._file(f"model/{checkpoint.WEIGHTS}", backend.weight_layouts(), metadata={"format": "pt"})
        states = None
        if self._config.checkpoints == "full":
            generators = random_state.tensors()
            layouts = [TensorLayout(name, value.dtype, tuple(value.shape)) for name, value in generators.items()]
            states = self._file(_STATES, [*backend.state_layouts(), *layouts], aligned=True)
            for name, value in generators.items():
                states.write(name, value)
            facts = {"0": backend.state_facts() | random_state.facts()}
            (self._partial / "state" / "trainer.json").write_text(json.dumps(facts))
        return backend.save_meanwhile(weights, states, self._end, self._give_up)

    def _file(self, name: str, layouts: list[TensorLayout], **more: Any) -> TensorPartsWriter:
        """Create a tensor file in the partial folder, to be filled in any order."""
        self._files[name] = TensorPartsWriter(self._partial / name, layouts, **more)
        return self._files[name]

    # -- in the save's thread ------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Complete the files, commit the checkpoint and remove older ones."""
        for file in self._files.values():
            file.close()
        checksums = {name: file.checksum for name, file in self._files.items()}
        final = checkpoint.commit(self._partial, self.step, checksums, {"ranks": 1, "holds": self._config.checkpoints})
        checkpoint.point(self._folder.model, final / "model")
        checkpoint.prune(self._folder.checkpoints, self._config.keep)

    def _give_up(self, error: BaseException) -> BaseException:
        """Remove the partial checkpoint; return `error`, which `wait` raises."""
        for file in self._files.values():
            file.abandon()
        shutil.rmtree(self._partial, ignore_errors=True)
        return error

    # ------------------------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return self._save.done()

    def wait(self) -> None:
        """Wait until the checkpoint is complete and older ones are removed. Raises the error of the save, if any."""
        self._save.wait()

    @property
    def seconds(self) -> float:
        """Duration of the save, from its start to its end."""
        return self._begin_s + self._save.took_s

    @property
    def stood_still_s(self) -> float:
        """Seconds for which training waited: during the start, and until data that it overwrites had been copied."""
        return self._begin_s + self._save.waited_s

    @property
    def nbytes(self) -> int:
        """Size of its tensor files in bytes."""
        return sum(file.size for file in self._files.values())
