"""Writing a checkpoint by all ranks of a run together, while training waits."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memascend.memory.resident import written_bytes
from memascend.storage.scratch import require_space
from memascend.storage.tensor_file import TensorFileWriter, TensorLayout
from memascend.training import checkpoint, random_state
from memascend.training.config import TrainConfig
from memascend.training.folder import RunFolder
from memascend.training.progress import byte_count
from memascend.training.ranks import barrier, gather


@dataclass(frozen=True)
class Written:
    """A checkpoint that was written. Byte counts are summed over all ranks."""

    path: Path
    seconds: float
    written_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class CheckpointWriter:
    """One rank's part in writing the checkpoints of a run."""

    config: TrainConfig
    folder: RunFolder
    backend: Any
    rank: int
    ranks: int

    def write(self, step: int) -> Written | None:
        """Write a checkpoint of `step`.

        All ranks return when it is complete; rank 0 returns what was written, the others None. Raises OSError.
        """
        begin, before = time.monotonic(), written_bytes()
        folder = self.folder.checkpoints
        partial = folder / f".partial-step-{step:08d}"
        full = self.config.checkpoints == "full"
        if self.rank == 0:
            checkpoint.begin(folder, step, full=full)
        barrier(self.ranks)
        name, checksums, facts, shared = f"state/rank{self.rank}.safetensors", {}, {}, 0
        if full:
            states, facts = self._save_states(partial / name), self.backend.state_facts() | random_state.facts()
            shared = states.shared_bytes
            if states.checksum is not None:
                checksums[name] = states.checksum
        checksums |= self._save_weights(partial / "model")
        mine = {"shared": shared, "written": written_bytes() - before}
        everything = gather(self.ranks, {"checksums": checksums, "facts": facts, **mine})
        done = None
        if self.rank == 0:
            self._commit(partial, step, everything)
            shared, written = (sum(entry[name] for entry in everything) for name in ("shared", "written"))
            done = Written(folder / f"step-{step:08d}", time.monotonic() - begin, written, shared)
        barrier(self.ranks)
        return done

    def _save_states(self, path: Path) -> TensorFileWriter:
        """Write this rank's optimizer states and the states of its random generators; return the closed writer.

        Blocks are shared with the swap files if the file system supports it, unless `copy_checkpoints` is set.
        """
        generators = random_state.tensors()
        layouts = self.backend.state_layouts()
        layouts += [TensorLayout(name, value.dtype, tuple(value.shape)) for name, value in generators.items()]
        with TensorFileWriter(path, layouts, aligned=True) as writer:
            share = None if self.config.copy_checkpoints else writer.share
            for name, tensor in itertools.chain(self.backend.states(share), generators.items()):
                writer.write(name, tensor)
        # The next step overwrites the shared blocks and then needs that many new ones.
        require_space(str(path.parent), writer.shared_bytes)
        return writer

    def _commit(self, partial: Path, step: int, everything: list[dict[str, Any]]) -> None:
        """Complete the checkpoint on rank 0. `everything`: the facts and checksums of all ranks, in rank order."""
        from memascend.integrations.pretrained import save_configuration

        save_configuration(self.backend.model, partial / "model", self.folder.tokenizer)
        if self.config.checkpoints == "full":
            facts = {str(rank): entry["facts"] for rank, entry in enumerate(everything)}
            (partial / "state" / "trainer.json").write_text(json.dumps(facts))
        checksums = {name: crc for entry in everything for name, crc in entry["checksums"].items()}
        final = checkpoint.commit(partial, step, checksums, {"ranks": self.ranks, "holds": self.config.checkpoints})
        checkpoint.point(self.folder.model, final / "model")
        checkpoint.prune(self.folder.checkpoints, self.config.keep)

    def _save_weights(self, folder: Path) -> dict[str, int]:
        """Write the weights into one safetensors file: all ranks gather tensor by tensor, and rank 0 writes."""
        if self.rank:
            for _ in self.backend.weights():
                pass
            return {}
        return {f"model/{checkpoint.WEIGHTS}": checkpoint.write_weights(folder, self.backend)}

    def disk_full_message(self, error: OSError, step: int) -> str:
        """Return the message for a full disk: the bytes needed and free, and how to continue. Removes partial
        checkpoints."""
        folder = self.folder.checkpoints
        checkpoint.clean(folder)  # a partial checkpoint is useless and takes up space
        layouts = self.backend.weight_layouts()
        if self.config.checkpoints == "full":
            layouts = layouts + self.ranks * self.backend.state_layouts()
        needed, free = sum(layout.nbytes for layout in layouts), shutil.disk_usage(folder).free
        kept = [self.backend.kept_step() or 0, *(each.step for each in checkpoint.listed(folder)[0] if each.is_full)]
        go_on = f"continues after step {max(kept)}" if any(kept) else "starts over, since no step was saved"
        return (
            f"cannot save the checkpoint of step {step} in {folder} ({error.strerror}): it takes "
            f"{byte_count(needed)}, and {byte_count(free)} are free; make room, then: memascend train --output "
            f"{self.folder.root} --resume ({go_on})"
        )
