"""The parameter swapper over a buffer pool of ours (MemAscend IV-B, Fig. 6).

Hook: module global ``partition_parameters.AsyncPartitionedParameterSwapper``. The swapper is built before any parameter
exists, so the pool is made in two stages: while ``zero.Init`` partitions parameters one by one, a single staging buffer
suffices; when the ZeRO-3 optimizer is built, the module is known and :meth:`adopt_module` makes the pool.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import (
    AsyncPartitionedParameterSwapper,
    PartitionedParamStatus,
)
from deepspeed.runtime.swap_tensor.utils import swap_in_tensors

from memascend.memory.pools import (
    DEFAULT_ALIGNMENT_BYTES,
    AdaptiveBufferPool,
    BufferPool,
    MonolithicBufferPool,
    adaptive_pool_classes,
)

from .accelerator import PinnedAllocator
from .derived import DerivedSettings

log = logging.getLogger("memascend")


def pooled_swapper_class(
    pool_kind: str,
    allocator: PinnedAllocator,
    blocks_in_flight: int,
    minimum_swap_bytes: int | None,
    derived: DerivedSettings,
) -> type:
    """A swapper class bound to this process's choices (DeepSpeed constructs it itself)."""

    class PooledParameterSwapper(_PooledParameterSwapper):
        _pool_kind, _allocator = pool_kind, allocator
        _blocks_in_flight, _minimum_swap_bytes, _derived = blocks_in_flight, minimum_swap_bytes, derived

    return PooledParameterSwapper


class _PooledParameterSwapper(AsyncPartitionedParameterSwapper):
    _pool_kind: str
    _allocator: PinnedAllocator
    _blocks_in_flight: int
    _minimum_swap_bytes: int | None
    _derived: DerivedSettings

    def _configure_aio(self, ds_config: Any) -> None:
        """Everything of the stock method but the one big tensor at its end."""
        real_count = ds_config.zero_config.offload_param.buffer_count
        config = ds_config.zero_config.offload_param
        object.__setattr__(config, "buffer_count", 0)
        try:
            super()._configure_aio(ds_config)
        finally:
            object.__setattr__(config, "buffer_count", real_count)
        self.param_buffer_count = real_count
        self.buffers = None
        # Our engine takes any length; 512-aligned slots keep direct I/O free of copies.
        self.aligned_bytes = DEFAULT_ALIGNMENT_BYTES
        self.numel_alignment = self.aligned_bytes // self.swap_element_size
        self.aligned_elements_per_buffer = self._io_aligned_numel(self.elements_per_buffer)
        if self._minimum_swap_bytes is not None:
            self.min_aio_bytes = self._minimum_swap_bytes
        # DeepSpeed keeps smaller parameters gathered for good: on NVMe they would hold their buffers for good, too.
        self._kept_gathered_numel = ds_config.zero_config.param_persistence_threshold
        self.pool: BufferPool | None = None
        self._staging: torch.Tensor | None = None
        self._swapped_in: dict[int, Any] = {}
        self._reserved: list[str] = []
        self._beside_pool: set[int] = set()  # parameters whose buffers are not the pool's
        self.denied_prefetches = 0
        self.evicted_prefetches = 0
        self.released_gathered = 0
        self.buffers_beside_pool = 0
        if self._pool_kind != "adaptive" and self._derived.pool_is_sized_by_user:
            self._make_monolithic_pool(self.aligned_elements_per_buffer, real_count)

    def _make_monolithic_pool(self, numel: int, count: int) -> None:
        separate = self._pool_kind == "monolithic_separate"
        self.pool = MonolithicBufferPool(numel, count, self.dtype, self._allocator, separate=separate)

    def adopt_module(self, module: torch.nn.Module) -> None:
        """Size the pool from the partitioned parameters of ``module``; frees the staging buffer."""
        if self.pool is not None:
            return
        blocks, outside = swapped_numels_by_block(module, self)
        if not any(blocks) and not outside:  # all parameters are under the swap limit
            return
        if self._pool_kind != "adaptive":
            largest = max(numel for part in (*blocks, outside) for numel in part)
            count = len(outside) + max(map(len, blocks), default=0) * self._blocks_in_flight
            self._staging = None
            self._make_monolithic_pool(self._io_aligned_numel(largest), self._derived.pool_count_of_user or count)
            return
        classes = adaptive_pool_classes(blocks, outside, self._blocks_in_flight)
        self.pool = AdaptiveBufferPool(classes, self.dtype, self._allocator)
        self._staging = None
        log.info(
            "memascend: adaptive pool of %d bytes: %s",
            self.pool.total_bytes,
            ", ".join(f"{c.count} x {c.numel}" for c in classes),
        )

    # -- what DeepSpeed asks of a swapper ---------------------------------------------------------------------------

    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:
        partition = param.ds_tensor.ds_numel if numel is None else numel
        kept_gathered = partition * dist.get_world_size() <= self._kept_gathered_numel
        return super().swappable_tensor(param, numel) and not kept_gathered

    def available_swap_in_buffers(self) -> int:
        return 1 if self.pool is None else self.pool.free_count()

    def get_buffer(self, param: Any, numel: int) -> torch.Tensor:
        """Buffer for the first partition of ``param`` (1-D, ``numel`` elements); written out and released at once."""
        self.param_id_to_numel[param.ds_id] = numel
        slot = self._lease(param.ds_id, numel)
        if slot is None:
            slot = self._lease_or_evict(param.ds_id, numel, keep=())
        self.param_id_to_buffer_id[param.ds_id] = param.ds_id
        self.param_id_to_swap_buffer[param.ds_id] = slot
        return slot.narrow(0, 0, numel)

    def _allocate_and_return_buffers_for_swap_in(
        self, params: list[Any]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        compute, swap = [], []
        for param in params:
            numel = self.param_id_to_numel[param.ds_id]
            slot = self._lease_or_evict(param.ds_id, numel, keep={p.ds_id for p in params})
            self.param_id_to_buffer_id[param.ds_id] = param.ds_id
            self.param_id_to_swap_buffer[param.ds_id] = slot
            compute.append(slot.narrow(0, 0, numel))
            swap.append(slot)
        return compute, swap

    def swap_in(
        self, params: list[Any], async_op: bool = True, swap_in_buffers: list[torch.Tensor] | None = None
    ) -> None:
        """Read ``params``. A prefetch (``async_op``) takes those for which there is room and leaves the rest."""
        unique = list({p.ds_id: p for p in params}.values())
        if async_op and swap_in_buffers is None:
            held = self.param_id_to_swap_buffer
            unique = [p for p in unique if p.ds_id not in held and p.ds_status.name == "NOT_AVAILABLE"]
            self._prefetch(unique)
            return
        super_params = [p for p in unique if p.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE]
        if swap_in_buffers is None:
            self.synchronize_reads_if_needed(unique)
            compute, swap_in_buffers = self._allocate_and_return_buffers_for_swap_in(super_params)
            numel = sum(t.numel() for t in compute)
        else:
            numel = sum(t.numel() for t in swap_in_buffers)
        swap_in_tensors(self.aio_read_handle, swap_in_buffers, self._get_swap_paths(super_params))
        self._update_inflight_swap_in(super_params, swap_in_buffers, numel)
        if not async_op:
            self.synchronize_reads()

    def synchronize_reads_if_needed(self, params: list[Any]) -> None:
        if any(p.ds_tensor.status == PartitionedParamStatus.INFLIGHT for p in params):
            self.synchronize_reads()

    def _prefetch(self, params: list[Any]) -> None:
        chosen, buffers = [], []
        used_up: set[int] = set()  # sizes
        for param in params:
            numel = self.param_id_to_numel[param.ds_id]
            slot = None if numel in used_up else self._lease_of_gathered(param.ds_id, numel)
            if slot is None:
                used_up.add(numel)
                self.denied_prefetches += 1
                continue
            self.param_id_to_buffer_id[param.ds_id] = param.ds_id
            self.param_id_to_swap_buffer[param.ds_id] = slot
            chosen.append(param)
            buffers.append(slot)
        if chosen:
            swap_in_tensors(self.aio_read_handle, buffers, self._get_swap_paths(chosen))
            self._update_inflight_swap_in(chosen, buffers, sum(self.param_id_to_numel[p.ds_id] for p in chosen))

    def _update_inflight_swap_in(
        self, params: list[Any], swap_in_buffers: list[torch.Tensor], inflight_numel: int
    ) -> None:
        super()._update_inflight_swap_in(params, swap_in_buffers, inflight_numel)
        self._swapped_in.update({p.ds_id: p for p in params})

    def swap_into_buffer(self, param: Any, dest_buffer: torch.Tensor) -> None:
        """Read ``param`` into a buffer of the caller's; our engine takes any address and length, so no copy."""
        assert param.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE, (
            f"param {param.ds_id} is already available"
        )
        self.synchronize_reads()
        numel = self.param_id_to_numel[param.ds_id]
        self.aio_read_handle.async_pread(dest_buffer.narrow(0, 0, numel), self.get_path(param, must_exist=True), 0)
        assert self.aio_read_handle.wait() == 1

    def remove_partition_and_release_buffers(self, params: list[Any]) -> None:
        self.synchronize_reads_if_needed(params)  # a buffer that is still being read into is nobody else's yet
        for param in params:
            self._release_slot(param)
        self.available_buffer_ids = []
        super().remove_partition_and_release_buffers(params)
        self.available_buffer_ids = []

    def _release_slot(self, param: Any) -> None:
        if param.ds_id in self._beside_pool:
            self._beside_pool.discard(param.ds_id)
        elif param.ds_id in self.param_id_to_buffer_id and self.pool is not None:
            self.pool.release(param.ds_id)
        self._swapped_in.pop(param.ds_id, None)

    def release_read_ahead(self) -> None:
        """Give back the partitions in memory whose parameters are not gathered."""
        self.synchronize_reads()
        self.remove_partition_and_release_buffers(
            [p for p in self._swapped_in.values() if p.ds_status.name == "NOT_AVAILABLE"]
        )

    def reserve_available_buffers(self) -> list[torch.Tensor]:
        """All free buffers (``fast_init`` only; refused with the adaptive pool, see parts.py)."""
        if not isinstance(self.pool, MonolithicBufferPool):
            raise ValueError(
                "fast_init is not possible with the adaptive pool; set offload_optimizer.fast_init to false"
            )
        self._reserved = [f"reserved-{i}" for i in range(self.pool.free_count())]
        leases = [self.pool.lease(key, self.aligned_elements_per_buffer) for key in self._reserved]
        return [lease.slot_tensor for lease in leases if lease is not None]

    def release_reserved_buffers(self) -> None:
        for key in self._reserved:
            self.pool.release(key)
        self._reserved = []

    # -- the pool ---------------------------------------------------------------------------------------------------

    def _lease(self, key: int, numel: int) -> torch.Tensor | None:
        slot_numel = self._io_aligned_numel(numel)
        if self.pool is None:
            return self._staging_buffer(key, slot_numel)
        lease = self.pool.lease(key, numel, slot_numel)
        return None if lease is None else lease.slot_tensor

    def _staging_buffer(self, key: int, slot_numel: int) -> torch.Tensor:
        if self.param_id_to_buffer_id:
            raise RuntimeError(
                f"memascend: parameter {next(iter(self.param_id_to_buffer_id))} still holds the staging buffer "
                f"while parameter {key} is partitioned; construct the model under deepspeed.zero.Init"
            )
        if self._staging is None or self._staging.numel() < slot_numel:
            self._staging = None
            self._staging = self._allocator.allocate(
                slot_numel, self.dtype, name="staging buffer", owner="parameter_pool"
            )
        return self._staging.narrow(0, 0, slot_numel)

    def _lease_of_gathered(self, key: int, numel: int) -> torch.Tensor | None:
        """A slot for a prefetch: a free one, or that of a gathered parameter of the same size (MemAscend IV-A).

        The device has its copy as soon as a gather has been waited for, so the next block can be read while this one
        computes, with the memory of one. DeepSpeed goes on to see a partition in memory, until it releases it: by that
        its prefetcher tells what is still gathered when it is used again.
        """
        slot = self._lease(key, numel)
        device = get_accelerator()
        may_be_copying = device.resolves_data_dependency() and not device.is_synchronized_device()
        if slot is not None or may_be_copying:
            return slot
        for param in self._swapped_in.values():
            if param.ds_status.name == "AVAILABLE" and self._share_slots(param.ds_id, numel):
                self._give_up_slot(param)
                return self._lease(key, numel)
        return None

    def _share_slots(self, key: int, numel: int) -> bool:
        return self.pool is None or self.pool.share_a_class(self.param_id_to_numel[key], numel)

    def _give_up_slot(self, param: Any) -> None:
        self._release_slot(param)
        if param.ds_id in self.available_params:
            self.available_params.remove(param.ds_id)
            self.available_numel -= self.param_id_to_numel[param.ds_id]
        del self.param_id_to_buffer_id[param.ds_id], self.param_id_to_swap_buffer[param.ds_id]
        param.ds_tensor.data = self.invalid_buffer.data
        self.released_gathered += 1

    def _lease_or_evict(self, key: int, numel: int, keep: Any) -> torch.Tensor:
        """A slot for a read that must not fail.

        Where the class is used up, parameters give up theirs: first those that are gathered (the device has its copy,
        so the host's is done with: MemAscend IV-A), then prefetched ones that nobody uses yet. Where all are being
        gathered (DeepSpeed gathers ahead by an order of modules that an evaluation has changed), the read gets a buffer
        of its own until its release.
        """
        slot = self._lease(key, numel)
        if slot is not None:
            return slot
        self.synchronize_reads()
        for status in ("AVAILABLE", "NOT_AVAILABLE"):
            for param in reversed(list(self._swapped_in.values())):
                in_memory = param.ds_tensor.status == PartitionedParamStatus.AVAILABLE
                if param.ds_id in keep or not in_memory or param.ds_status.name != status:
                    continue
                if not self._share_slots(param.ds_id, numel):
                    continue
                if not get_accelerator().is_synchronized_device():
                    get_accelerator().synchronize()  # its copy to the device may still be reading the buffer
                if status == "AVAILABLE":
                    self._give_up_slot(param)
                else:
                    self.remove_partition_and_release_buffers([param])
                    self.evicted_prefetches += 1
                slot = self._lease(key, numel)
                if slot is not None:
                    return slot
        if not self.buffers_beside_pool:
            log.warning(
                "memascend: no buffer of the pool fits parameter %s (%d elements): all are held by parameters that are "
                "being gathered; it gets one of its own for a while, and so will others (more memory than planned; "
                "memascend.blocks_in_flight makes the pool larger)",
                key,
                numel,
            )
        slot_numel = self._io_aligned_numel(numel)
        slot = self._allocator.allocate(slot_numel, self.dtype, name="beside the pool", owner="parameter_pool")
        self._beside_pool.add(key)
        self.buffers_beside_pool += 1
        return slot


def swapped_numels_by_block(module: torch.nn.Module, swapper: Any) -> tuple[list[list[int]], list[int]]:
    """Partition sizes (elements) of the parameters on NVMe: per repeated block, and those outside of any block.

    Blocks are the members of the module's ``ModuleList`` with the most swapped elements (an HF decoder's layers).
    """
    numels = {
        id(p): p.ds_tensor.ds_numel
        for p in module.parameters()
        if getattr(p, "nvme_swapper", None) is swapper
        and p.ds_tensor.final_location is not None
        and str(getattr(p.ds_tensor.final_location, "value", p.ds_tensor.final_location)) == "nvme"
    }

    def inside(part: torch.nn.Module) -> list[int]:
        return [numels[id(p)] for p in part.parameters() if id(p) in numels]

    lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList)]
    best = max(lists, key=lambda m: sum(inside(m)), default=None)
    if best is None:
        return [], list(numels.values())
    in_blocks = {id(p) for p in best.parameters()}
    outside = [n for key, n in numels.items() if key not in in_blocks]
    return [inside(block) for block in best], outside
