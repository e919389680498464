"""Saving and loading of swapped optimizer states in checkpoints, through the swapper's own I/O handle.

Each swapped tensor is read into one swap buffer and written to a separate file, named like the swap file of stock
DeepSpeed; loading does the reverse. So no I/O engine has to expose files, and no additional memory is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

from memascend.storage.byte_views import byte_view
from memascend.storage.scratch import require_space

MANIFEST = "manifest.json"
_SWAP_SUFFIX = ".tensor.swp"  # suffix of DeepSpeed's swap files, named <ids of a sub-group> or <moment>-<ids>


def require_transfers(ended: int, started: int, path: str) -> None:
    """Raise RuntimeError unless as many transfers of an I/O handle have ended as were started."""
    if ended != started:
        raise RuntimeError(
            f"memascend: {path}: {started} transfers were started, but {ended} completed: something else uses this "
            "I/O handle"
        )


def _transfer(handle: Any, call: str, buffer: torch.Tensor, path: str) -> None:
    """Read or write one swapped tensor and wait for it. Raises StorageError, or RuntimeError from DeepNVMe."""
    if getattr(handle, call)(buffer, path, 0) != 0:
        raise RuntimeError(
            f"memascend: {call} of {path}, {buffer.nbytes} bytes, was refused by {type(handle).__name__}"
        )
    require_transfers(handle.wait(), 1, path)


@dataclass
class Exported:
    """Bytes of swapped states in a checkpoint: those copied, and those referenced, by kind of reference."""

    copied_bytes: int = 0
    referenced_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, how: str | None, nbytes: int) -> None:
        """Count ``nbytes`` as referenced by the kind ``how``, or as copied if that is None."""
        if how is None:
            self.copied_bytes += nbytes
        else:
            self.referenced_bytes[how] = self.referenced_bytes.get(how, 0) + nbytes

    def require_space(self, folder: Path) -> None:
        """Raise now, not within a step, if the disk lacks space for the referenced bytes, which the next step writes
        anew."""
        require_space(os.fspath(folder), sum(self.referenced_bytes.values()))

    def __str__(self) -> str:
        parts = [f"{nbytes / 2**20:.1f} MiB by {how}" for how, nbytes in self.referenced_bytes.items()]
        return ", ".join([*parts, f"{self.copied_bytes / 2**20:.1f} MiB copied"])


class ExactCheckpoints:
    """Mixin for ``DeepSpeedZeroOptimizer_Stage3`` with checkpoints that restore an uninterrupted run's state exactly.

    Requires :class:`.unused_parameters.UnusedParameters`. With an optimizer on NVMe, stock DeepSpeed forgets the
    moments and step counts of swapped sub-groups, the sub-groups in memory, and the loss scaler. It also cannot load
    parameters that are on NVMe if the optimizer is not.
    """

    swapped_checkpoint: Path | None = None  # folder of this rank's swapped tensors while a checkpoint is loaded

    def export_swapped_states(self, folder: Path, *, copies: bool = False) -> Exported:
        """Save every swapped tensor of this rank as a file in ``folder``, with a manifest of sizes and checksums.

        A tensor on the file system of ``folder`` is referenced if possible, unless ``copies`` (MLP-Offload 3.3,
        checkpoint pre-staging), and read once for its checksum. The caller syncs the folder. Only valid between
        optimizer steps. Raises StorageError or OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        swapper = self.optimizer_swapper
        swapper.flush_gradients()
        manifest, done = {}, Exported()
        for index, parameter in enumerate(self.fp32_partitioned_groups_flat):
            if not self._swappable_optimizer_subgroup(index):
                continue
            info = swapper.swap_params_info[swapper.parameter_id(parameter)]
            for context in info.tensors:
                target = folder / os.path.basename(context.swap_path)
                stage = None if copies else getattr(swapper.aio_handle, "stage", None)  # DeepNVMe's handle has none
                how = None if stage is None else stage(context.swap_path, target)
                if how is None:
                    with _swap_buffer(swapper, info) as buffer:
                        _transfer(swapper.aio_handle, "async_pread", buffer, context.swap_path)
                        entry = _write_file(target, buffer)
                else:
                    with _swap_buffer(swapper, info) as buffer, target.open("rb") as file:
                        data = byte_view(buffer)[: file.readinto(byte_view(buffer))]  # the bytes that a load will read
                        entry = {"bytes": target.stat().st_size, "referenced": how, "crc32": zlib.crc32(data)}
                done.add(how, entry["bytes"])
                manifest[target.name] = {"numel": info.numel(), "dtype": str(swapper.dtype), **entry}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
        done.require_space(folder)
        return done

    def settle_states(self) -> None:
        """Wait until all swapped states are stored where :meth:`share_swapped` finds them."""
        if self.optimizer_swapper is not None:
            self.optimizer_swapper.flush_gradients()

    def swapped_paths(self, index: int) -> dict[str, str]:
        """Return the swap files of a sub-group on NVMe: those of its ``master`` and its moments, by name."""
        swapper = self.optimizer_swapper
        info = swapper.swap_params_info[swapper.parameter_id(self.fp32_partitioned_groups_flat[index])]
        master, *moments = info.get_swap_paths()
        return {"master": master} | {os.path.basename(path).partition("-")[0]: path for path in moments}

    def share_swapped(self, path: str, nbytes: int, handle: int, at: int) -> bool:
        """Have an open file share ``nbytes`` of a swap file (:meth:`memascend.storage.tier.Tier.share`); return whether
        it does."""
        own = getattr(getattr(self.optimizer_swapper, "aio_handle", None), "share", None)  # DeepNVMe's handle has none
        return own is not None and self.settings.prestage_checkpoints and own(path, nbytes, handle, at)

    def _rigid_state_dict(self) -> dict[str, Any]:
        for index, parameter in enumerate(self.fp32_partitioned_groups_flat):
            if self._swappable_optimizer_subgroup(index):  # pipelined ones still point into buffers now used by others
                self.optimizer_swapper.swap_params_info[self.optimizer_swapper.parameter_id(parameter)].release_memory()
        return super()._rigid_state_dict()

    def _rigid_load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        """Load masters, moments, step counts and the loss scaler, swapped sub-groups from `swapped_checkpoint`."""
        if state_dict.get("ds_zero_partition_groups") is not None:  # expert placement is DeepSpeed's own, not swapped
            super()._rigid_load_state_dict(state_dict, load_optimizer_states)
            return
        self.loss_scaler = state_dict["loss_scaler"]
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        if load_optimizer_states:
            self._set_fp32_optimizer_param_groups()
            self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
            self._clear_fp32_optimizer_param_groups()
        self._partition_all_parameters()
        self._release_swapped_in_parameters()
        manifest = self._manifest()
        saved_ids = iter([name.removesuffix(_SWAP_SUFFIX) for name in manifest if "-" not in name])
        for index, parameter in enumerate(self.fp32_partitioned_groups_flat):
            if self._swappable_optimizer_subgroup(index):
                self._import_sub_group(index, manifest, next(saved_ids, parameter.ds_id))
            else:
                parameter.data.copy_(state_dict["fp32_flat_groups"][index].data)
                self._reassign_or_swap_out_partitioned_parameters(index)
        replay_bias_corrections(self)

    def _release_swapped_in_parameters(self) -> None:
        """Release parameters in buffers of the pool, so that they are read again: the buffers have the old weights."""
        for group in self.fp16_groups:
            for param in group:
                if _is_on_nvme(param) and param.ds_tensor.status != PartitionedParamStatus.NOT_AVAILABLE:
                    param.nvme_swapper.synchronize_reads()
                    param.nvme_swapper.remove_partition_and_release_buffers([param])

    def _manifest(self) -> dict[str, Any]:
        """Return the sizes and checksums of the swapped files by name; empty for a checkpoint of stock DeepSpeed."""
        path = self.swapped_checkpoint and self.swapped_checkpoint / MANIFEST
        return json.loads(path.read_text()) if path and path.exists() else {}  # stock DeepSpeed writes none

    def _import_sub_group(self, index: int, manifest: dict[str, Any], saved_id: str) -> None:
        """Load master weights and moments from their files into the engine, and derive the 16-bit weights.

        ``saved_id`` is the sub-group's id in the names of the files. DeepSpeed numbers parameters across all models of
        a process, so a model that is not the first one has other ids than the saved one.
        """
        swapper, parameter = self.optimizer_swapper, self.fp32_partitioned_groups_flat[index]
        info = swapper.swap_params_info[swapper.parameter_id(parameter)]
        info.tensors, info.has_state_tensors = info.tensors[:1], False
        self.forget_gradients(index)
        moments = []
        for name, value in self.optimizer.state.get(parameter, {}).items():
            key = f"{name}-{parameter.ds_id}"
            if torch.is_tensor(value) and (self.swapped_checkpoint / f"{name}-{saved_id}{_SWAP_SUFFIX}").exists():
                value.data, value.ds_id = torch.empty(0, dtype=value.dtype), key
                moments.append(value)
        if moments:
            info.add_state_tensors(moments)
        with _swap_buffer(swapper, info) as buffer:
            for context in info.tensors:
                name = os.path.basename(context.swap_path).replace(parameter.ds_id, saved_id)
                _read_file(self.swapped_checkpoint / name, buffer, info.numel(), manifest.get(name))
                if context.compute_tensor is parameter:
                    parameter.data = buffer.narrow(0, 0, info.numel())
                    self._reassign_or_swap_out_partitioned_parameters(index)
                    parameter.data = torch.empty(0, dtype=buffer.dtype)
                _transfer(swapper.aio_handle, "async_pwrite", buffer, context.swap_path)


def replay_bias_corrections(stage3: Any) -> None:
    """Bring DeepSpeedCPUAdam's bias corrections to the values of an uninterrupted run.

    The C++ object keeps beta^t as a running float product, and uses pow() if the step jumps or the betas change; the
    two differ in the last bit. Therefore the calls are repeated on one element.
    """
    adam = stage3.optimizer
    native = getattr(adam, "ds_opt_adam", None)
    if native is None:
        return
    calls = []
    for index, parameter in enumerate(stage3.fp32_partitioned_groups_flat):
        group = adam.param_groups[stage3.sub_group_to_group_id[index]]
        step = adam.state.get(parameter, {}).get("step", 0)
        if step:
            calls.append((int(step), *group["betas"], group["eps"], group["bias_correction"]))
    if not calls:
        return
    if len(set(calls)) == 1:
        last, *options = calls[0]
        calls = [(step, *options) for step in range(1, last + 1)]
    else:  # every call of a step then uses pow(), so the last two steps determine the result
        calls = [(step - 1, *options) for step, *options in calls if step > 1] + calls
    one = [torch.zeros(1) for _ in range(4)]
    for step, beta1, beta2, eps, bias_correction in calls:
        native.adam_update(adam.opt_id, step, 0.0, beta1, beta2, eps, 0.0, bias_correction, *one)


def read_frozen(param: Any) -> torch.Tensor:
    """Return a copy in memory of this rank's partition of a frozen parameter (1-D, 16-bit), from memory or NVMe."""
    if not _is_on_nvme(param) or param.ds_tensor.status == PartitionedParamStatus.AVAILABLE:
        return param.ds_tensor.detach().cpu().clone()
    param.nvme_swapper.swap_in([param], async_op=False)
    value = param.ds_tensor.detach().narrow(0, 0, param.ds_tensor.ds_numel).clone()
    param.nvme_swapper.remove_partition_and_release_buffers([param])
    return value


def write_frozen(param: Any, value: torch.Tensor) -> None:
    """Write this rank's partition of a frozen parameter, in memory or on NVMe; ``value`` has ``ds_numel`` elements."""
    if not _is_on_nvme(param):
        param.ds_tensor.data.copy_(value)
        return
    swapper = param.nvme_swapper
    if param.ds_tensor.status != PartitionedParamStatus.NOT_AVAILABLE:
        swapper.synchronize_reads()
        swapper.remove_partition_and_release_buffers([param])
    buffer = swapper.get_buffer(param, param.ds_tensor.ds_numel)
    buffer.copy_(value)
    param.ds_tensor.data = buffer.data
    param.ds_tensor.status = PartitionedParamStatus.AVAILABLE
    swapper.swap_out_and_release([param])


def _is_on_nvme(param: Any) -> bool:
    place = getattr(param.ds_tensor, "final_location", None)
    return str(getattr(place, "value", place)) == "nvme"


@contextlib.contextmanager
def _swap_buffer(swapper: Any, info: Any) -> Iterator[torch.Tensor]:
    """Yield one swap buffer for a tensor of ``info`` and free it at the end, also after an error.

    Raises RuntimeError if all swap buffers are in use.
    """
    numel = swapper._io_aligned_numel(info.numel())
    buffers = swapper.swap_buffer_manager.allocate(num_elems=numel, count=1, dtype=swapper.dtype)
    if buffers is None:
        raise RuntimeError("memascend: all swap buffers are in use; save and load checkpoints between optimizer steps")
    try:
        yield buffers[0]
    finally:
        swapper.swap_buffer_manager.free(buffers)


def _write_file(path: Path, tensor: torch.Tensor) -> dict[str, int]:
    """Write the tensor's bytes durably to a new file of mode 600; return their number and CRC-32."""
    data = byte_view(tensor)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


def _read_file(path: Path, buffer: torch.Tensor, numel: int, expected: dict[str, Any] | None) -> None:
    """Fill ``buffer`` from ``path`` with at least ``numel`` elements. Raises ValueError if the file does not match."""
    same = "load it with the model, ranks, sub_group_size and optimizer_states that saved it"
    if expected is not None and (expected["numel"], expected["dtype"]) != (numel, str(buffer.dtype)):
        raise ValueError(
            f"checkpoint {path}: holds {expected['numel']} elements of {expected['dtype']}, but this training needs "
            f"{numel} of {buffer.dtype}; {same}"
        )
    needed = numel * buffer.element_size()
    try:
        with path.open("rb") as file:
            got = file.readinto(byte_view(buffer))
    except FileNotFoundError:
        raise ValueError(f"checkpoint {path}: is missing; {same}") from None
    if got < needed:
        raise ValueError(f"checkpoint {path}: damaged, {got} bytes of {needed}; load an older checkpoint")
    if expected is not None and "referenced" in expected and path.stat().st_size != expected["bytes"]:
        raise ValueError(
            f"checkpoint {path}: damaged, {path.stat().st_size} bytes of {expected['bytes']}; load an older checkpoint"
        )
    if expected is not None and "crc32" in expected and zlib.crc32(byte_view(buffer)[:got]) != expected["crc32"]:
        raise ValueError(f"checkpoint {path}: damaged, its checksum does not match; load an older checkpoint")
