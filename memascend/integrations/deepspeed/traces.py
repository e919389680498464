"""Invalidation of DeepSpeed's outdated traces.

DeepSpeed records once in which order modules fetch their parameters, and uses this trace for the prefetch. A parameter
that is used outside of its module is added to the module that uses it when that first happens, perhaps in the first
evaluation (RWKV scales its blocks' weights there), so the trace does not contain it. With CPU offload nothing is
missing, since all parameters have been prefetched by then. With NVMe the prefetch waits for the drive, and DeepSpeed
ends with "tracing error". Here such a trace is invalidated and recorded again, as DeepSpeed itself does when modules
come in an unexpected order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.zero.partitioned_param_coordinator import (
    PartitionedParameterCoordinator,
    iter_params,
    z3_leaf_module,
)

_TRACED = "parameters_traced_by_memascend"  # attribute of a coordinator: ids of each module's traced parameters


def give_up_outdated_traces() -> Callable[[], None]:
    """Invalidate a trace once a module's parameters differ from the traced ones; return a function that undoes this."""
    stock_record = PartitionedParameterCoordinator.record_parameters
    stock_prologue = PartitionedParameterCoordinator.trace_prologue

    def record_parameters(self: Any, sub_module: Any) -> None:
        stock_record(self, sub_module)
        vars(self).setdefault(_TRACED, {})[sub_module] = _parameters_of(sub_module)

    def trace_prologue(self: Any, sub_module: Any) -> None:
        stock_prologue(self, sub_module)
        traced = vars(self).get(_TRACED, {}).get(sub_module)
        if traced is not None and self.is_complete_trace() and traced != _parameters_of(sub_module):
            self._invalidate_trace()

    PartitionedParameterCoordinator.record_parameters = record_parameters
    PartitionedParameterCoordinator.trace_prologue = trace_prologue

    def undo() -> None:
        PartitionedParameterCoordinator.record_parameters = stock_record
        PartitionedParameterCoordinator.trace_prologue = stock_prologue

    return undo


def _parameters_of(module: Any) -> frozenset[int]:
    """Return the ids of the parameters that DeepSpeed would trace for a module."""
    return frozenset(parameter.ds_id for parameter in iter_params(module, recurse=z3_leaf_module(module)))
