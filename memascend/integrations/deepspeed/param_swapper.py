"""The parameter swapper on top of our buffer pools (MemAscend IV-B, Fig. 6).

Hook: module global ``partition_parameters.AsyncPartitionedParameterSwapper``. Leases, read-ahead and eviction are those
of :class:`memascend.engine.WeightStream`. This module translates DeepSpeed's calls to the stream's, and the states of
its parameters to the decision which of them may lose their buffers.

The swapper is constructed before any parameter exists. Until the ZeRO-3 optimizer has the module and
:meth:`adopt_module` makes the pool, partitions pass through staging buffers: one while ``zero.Init`` partitions
parameters one by one, and as many as requested if a model's initialisation gathers several.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import (
    AsyncPartitionedParameterSwapper,
    PartitionedParamStatus,
)

from memascend.engine import StreamOptions, Use, WeightStream
from memascend.integrations.conventions import is_logging_rank
from memascend.memory.pools import (
    DEFAULT_ALIGNMENT_BYTES,
    AdaptiveBufferPool,
    BufferPool,
    MonolithicBufferPool,
    OnDemandBuffers,
    adaptive_pool_classes,
)

from .accelerator import PinnedAllocator
from .aio import AioHandle
from .handle_storage import HandleStorage
from .lasting import changes

log = logging.getLogger("memascend")

# DeepSpeed's count of the user's GatheredParameters contexts that contain a parameter (0.19 and later).
_CONTEXTS = "_ds_z3_gathered_param_context_depth"


def pooled_swapper_class(
    pool_kind: str, allocator: PinnedAllocator, blocks_in_flight: int, minimum_swap_bytes: int | None
) -> type:
    """Return a swapper class bound to this process's options, because DeepSpeed constructs the swapper itself."""

    class PooledParameterSwapper(_PooledParameterSwapper):
        _pool_kind, _allocator = pool_kind, allocator
        _blocks_in_flight, _minimum_swap_bytes = blocks_in_flight, minimum_swap_bytes

    return PooledParameterSwapper


class _PooledParameterSwapper(AsyncPartitionedParameterSwapper):
    """The swapper; `pooled_swapper_class` sets the options below on a subclass."""

    _pool_kind: str
    _allocator: PinnedAllocator
    _blocks_in_flight: int
    _minimum_swap_bytes: int | None
    _pool_count_of_user: int | None = None

    def _configure_aio(self, ds_config: Any) -> None:
        """Do as the stock method, except for the large buffer that it allocates at its end."""
        config = ds_config.zero_config.offload_param
        real_count, set_by_user = config.buffer_count, config.model_fields_set
        object.__setattr__(config, "buffer_count", 0)
        try:
            super()._configure_aio(ds_config)
        finally:
            object.__setattr__(config, "buffer_count", real_count)
        self.param_buffer_count = real_count
        self._pool_count_of_user = real_count if "buffer_count" in set_by_user else None
        self.buffers = None
        # Our engine takes any length; slots with the alignment that the device requires are transferred without a copy.
        ours = isinstance(self.aio_read_handle, AioHandle)  # false if "aio.use_gds" selects another module
        self.aligned_bytes = self.aio_read_handle.memory_alignment_bytes if ours else DEFAULT_ALIGNMENT_BYTES
        self.numel_alignment = self.aligned_bytes // self.swap_element_size
        self.aligned_elements_per_buffer = self._io_aligned_numel(self.elements_per_buffer)
        if self._minimum_swap_bytes is not None:
            self.min_aio_bytes = self._minimum_swap_bytes
        # DeepSpeed keeps smaller parameters gathered permanently; on NVMe they would also occupy buffers permanently.
        self._kept_gathered_numel = ds_config.zero_config.param_persistence_threshold
        self._start_stream()
        changes.add_user(self)
        if self._pool_kind != "adaptive" and "buffer_size" in set_by_user:
            self._make_monolithic_pool(self.aligned_elements_per_buffer, real_count)

    def _start_stream(self) -> None:
        self.gathering: Collection[int] = frozenset()  # set by .gathers
        self._read_in: dict[int, Any] = {}  # parameters that were read, by id
        self._arriving: dict[int, Any] = {}
        self._copies_noted: set[int] = set()
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._reserved: list[str] = []
        self._storage = HandleStorage(self.aio_read_handle, self.aio_write_handle, lambda key: self.id_to_path[key])
        self.stream = WeightStream(
            self._storage,
            staging=OnDemandBuffers(self.dtype, self._allocator, name="staging buffer", keep=True),
            extra=OnDemandBuffers(self.dtype, self._allocator, name="beside the pool"),
            options=StreamOptions(
                owner=self,
                slot_multiple=self.numel_alignment,
                describe=lambda key: f"parameter {key} of shape {self._shapes.get(key)}",
                warn=log.warning if is_logging_rank() else lambda line: None,
                # What was read ahead decides what DeepSpeed gathers together, which must be equal on all ranks.
                in_program_order=dist.is_initialized() and dist.get_world_size() > 1,
            ),
        )

    @property
    def pool(self) -> BufferPool | None:
        return self.stream.pool

    def _make_monolithic_pool(self, numel: int, count: int) -> None:
        separate = self._pool_kind == "monolithic_separate"
        pool = MonolithicBufferPool(numel, count, self.dtype, self._allocator, separate, self.aligned_bytes)
        self._use_pool(pool)

    def _use_pool(self, pool: BufferPool) -> None:
        self.stream.use_pool(pool)
        if isinstance(self.aio_read_handle, AioHandle):
            for arena in pool.arenas:
                self.aio_read_handle.register(arena)

    def adopt_module(self, module: torch.nn.Module) -> None:
        """Size the pool from the partitioned parameters of ``module``, and free the staging buffer."""
        if self.pool is not None:
            return
        blocks, outside = swapped_numels_by_block(module, self)
        if not any(blocks) and not outside:  # all parameters are below the swap limit
            return
        if self._pool_kind != "adaptive":
            largest = max(numel for part in (*blocks, outside) for numel in part)
            count = len(outside) + max(map(len, blocks), default=0) * self._blocks_in_flight
            self._make_monolithic_pool(self._io_aligned_numel(largest), self._pool_count_of_user or count)
            return
        classes = adaptive_pool_classes(blocks, outside, self._blocks_in_flight)
        self._use_pool(AdaptiveBufferPool(classes, self.dtype, self._allocator, self.aligned_bytes))
        log.info(
            "memascend: adaptive pool of %d bytes: %s",
            self.pool.total_bytes,
            ", ".join(f"{c.count} x {c.numel}" for c in classes),
        )

    # -- interface to the stream ------------------------------------------------------------------------------------

    def use_of(self, key: int) -> Use:
        """Return how the buffer of a parameter is used.

        A partition that was read but is not gathered is idle. A gathered parameter has a copy on the device. It still
        counts as read for DeepSpeed's prefetcher, which uses this to recognise parameters that are still gathered at
        their next use.
        """
        param = self._read_in.get(key)
        if param is None or key in self.gathering:
            return Use.NEEDED
        status = param.ds_status.name
        if status == "NOT_AVAILABLE":
            return Use.IDLE
        in_context = getattr(param, _CONTEXTS, 0) > 0  # updates in a context are written through the partition's buffer
        covered = key in self._copies_noted or get_accelerator().is_synchronized_device()
        return Use.COPIED if status == "AVAILABLE" and covered and not in_context else Use.NEEDED

    def dropped(self, key: int, use: Use) -> None:
        """Set DeepSpeed's state of a partition whose buffer the stream has taken; a gathered one stays available."""
        param = self._forget(key)
        param.ds_tensor.data = self.invalid_buffer.data
        if use is Use.IDLE:
            param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE

    def _forget(self, key: int) -> Any:
        self._arriving.pop(key, None)
        self._copies_noted.discard(key)
        return self._read_in.pop(key, None)

    def gathered(self, param: Any, event: Any) -> None:
        """Note that ``event`` follows the copy of ``param`` to the device (called by :mod:`.gathers`)."""
        if param.ds_id in self._read_in:
            self.stream.copied(param.ds_id, event)
            self._copies_noted.add(param.ds_id)

    # -- DeepSpeed's interface of a swapper -------------------------------------------------------------------------

    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:
        """Return whether a partition goes to NVMe: large enough, and not of a parameter that stays gathered."""
        partition = param.ds_tensor.ds_numel if numel is None else numel
        kept_gathered = partition * dist.get_world_size() <= self._kept_gathered_numel
        return super().swappable_tensor(param, numel) and not kept_gathered

    def available_swap_in_buffers(self) -> int:
        return self.stream.free_count()

    def get_buffer(self, param: Any, numel: int) -> torch.Tensor:
        """Return a buffer (1-D, ``numel`` elements) for a new partition, to be written out and released at once."""
        key = param.ds_id
        self.param_id_to_numel[key], self._shapes[key] = numel, tuple(getattr(param, "ds_shape", (numel,)))
        self.stream.register(key, numel)
        self.get_path(param)
        return self.stream.put(key)

    def swap_in(
        self, params: list[Any], async_op: bool = True, swap_in_buffers: list[torch.Tensor] | None = None
    ) -> None:
        """Read ``params``. A prefetch (``async_op``) reads only those for which buffers are free."""
        if swap_in_buffers is not None:
            raise ValueError("memascend: swap_in only takes buffers of its own pool; use swap_into_buffer for others")
        unique = {p.ds_id: p for p in params}
        if async_op:
            keys = [key for key, p in unique.items() if p.ds_status.name == "NOT_AVAILABLE"]
            self._on_their_way(unique[key] for key in self.stream.prefetch(keys))
            return
        absent = [key for key, p in unique.items() if p.ds_tensor.status != PartitionedParamStatus.AVAILABLE]
        self.stream.fetch(absent)
        self._on_their_way(unique[key] for key in absent)
        self.synchronize_reads()

    def _on_their_way(self, params: Iterable[Any]) -> None:
        """Mark parameters as being read, until `synchronize_reads`."""
        for param in params:
            self._read_in[param.ds_id] = self._arriving[param.ds_id] = param
            param.ds_tensor.status = PartitionedParamStatus.INFLIGHT

    def synchronize_reads(self) -> None:
        """Wait for all reads and give the parameters their partitions."""
        self.stream.wait(self._arriving)
        arrived, self._arriving = self._arriving, {}
        for key, param in arrived.items():
            param.ds_tensor.data = self.stream.tensor(key).data
            param.ds_tensor.status = PartitionedParamStatus.AVAILABLE

    def swap_into_buffer(self, param: Any, dest_buffer: torch.Tensor) -> None:
        """Read ``param`` into the caller's buffer, without a copy since our engine takes any address and length.

        Raises RuntimeError if ``param`` is already in memory.
        """
        if param.ds_tensor.status != PartitionedParamStatus.NOT_AVAILABLE:
            raise RuntimeError(f"memascend: parameter {param.ds_id} is already in memory")
        dest = dest_buffer.narrow(0, 0, self.param_id_to_numel[param.ds_id])
        self._storage.read(param.ds_id, dest).wait()

    def remove_partition_and_release_buffers(self, params: list[Any]) -> None:
        """Release the partitions of ``params``, which then are on NVMe only."""
        for param in params:
            self._forget(param.ds_id)
            self.stream.drop(param.ds_id)  # a buffer that is still being read into is not reused before that ends
            param.ds_tensor.data = self.invalid_buffer.data
            param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE

    def release_read_ahead(self) -> None:
        """Release the partitions in memory whose parameters are not gathered."""
        self.remove_partition_and_release_buffers(
            [p for p in self._read_in.values() if p.ds_status.name == "NOT_AVAILABLE"]
        )

    def _swap_out(self, params: list[Any], async_op: bool = True) -> None:
        """Begin to write the partitions of ``params``; `synchronize_writes` ends the writes and releases them."""
        for param in params:
            self.stream.write(param.ds_id)
        self.swap_out_params += params
        if not async_op:
            self.synchronize_writes()

    def synchronize_writes(self) -> None:
        """Wait for all writes and release the written partitions."""
        self.stream.flush()
        written, self.swap_out_params = self.swap_out_params, []
        self.remove_partition_and_release_buffers(written)

    def swap_out_partitioned_params(self, dst_fp16_params: list[Any], src_fp32_params: list[torch.Tensor]) -> None:
        """Write new weights (1-D each) through the buffer of ``reserve_partitioned_swap_space``, and wait for them."""
        self.synchronize_writes()
        begin, writes = 0, []
        for param, source in zip(dst_fp16_params, src_fp32_params, strict=True):
            slot = self.partitioned_swap_buffer.narrow(0, begin, self._io_aligned_numel(source.numel()))
            slot.narrow(0, 0, source.numel()).copy_(source.data)
            writes.append(self._storage.write(param.ds_id, slot))
            begin += slot.numel()
        for write in writes:
            write.wait()
        for param in dst_fp16_params:
            param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE

    def reserve_partitioned_swap_space(self, partition_num_elems: list[int]) -> None:
        """Allocate the swap-out buffer, once per optimizer over these parameters; frees that of the previous one."""
        if self.partitioned_swap_buffer is not None:
            self.aio_write_handle.free_cpu_locked_tensor(self.partitioned_swap_buffer)
        super().reserve_partitioned_swap_space(partition_num_elems)

    def reserve_available_buffers(self) -> list[torch.Tensor]:
        """Reserve and return all free buffers; only for ``fast_init``, which the adaptive pool does not support.

        Raises ValueError with the adaptive pool.
        """
        if not isinstance(self.pool, MonolithicBufferPool):
            raise ValueError(
                "fast_init is not supported with the adaptive pool; set offload_optimizer.fast_init to false"
            )
        self._reserved = [f"reserved-{i}" for i in range(self.pool.free_count())]
        leases = [self.pool.lease(key, self.aligned_elements_per_buffer) for key in self._reserved]
        return [lease.slot_tensor for lease in leases if lease is not None]

    def release_reserved_buffers(self) -> None:
        for key in self._reserved:
            self.pool.release(key)
        self._reserved = []

    # -- statistics -------------------------------------------------------------------------------------------------

    @property
    def denied_prefetches(self) -> int:
        """Prefetches that found no free buffer."""
        return self.stream.statistics().denied

    @property
    def evicted_prefetches(self) -> int:
        """Prefetched partitions that lost their buffer before they were used."""
        return self.stream.statistics().evicted

    @property
    def released_gathered(self) -> int:
        """Buffers that were taken from gathered parameters, which have a copy on the device."""
        return self.stream.statistics().taken

    @property
    def buffers_beside_pool(self) -> int:
        """Buffers that were allocated in addition to the pool."""
        return self.stream.statistics().extra_buffers

    @property
    def pool_fallbacks(self) -> int:
        return self.stream.statistics().fallbacks

    @property
    def pool_fallback_wasted_bytes(self) -> int:
        return self.stream.statistics().fallback_wasted_bytes


def swapped_numels_by_block(module: torch.nn.Module, swapper: Any) -> tuple[list[list[int]], list[int]]:
    """Return the partition sizes (elements) of parameters on NVMe: per repeated block, and those outside of any block.

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
