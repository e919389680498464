"""The memory policy of a whole process, as `numactl` sets it: by the system call alone, before torch is imported.

It holds for every page that this thread, and threads and processes that it starts afterwards, touch without a policy of
its own. Nothing that is there already moves.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Iterable

from memascend.memory.topology import Topology

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_DEFAULT, _INTERLEAVE = 0, 3
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def interleave_process(nodes: Iterable[int] | None = None) -> tuple[int, ...]:
    """From now on pages are taken from `nodes` in turn (default: all that have memory and are allowed); returns them.

    Raises ValueError for nodes that the kernel refuses, OSError where the system call is not allowed.
    """
    topology = Topology.read()
    usable = [n for n, node in topology.nodes.items() if node.total_bytes and n in topology.allowed]
    chosen = tuple(usable if nodes is None else nodes)
    mask = (ctypes.c_ulong * (max(chosen, default=0) // _BITS + 1))()
    for node in chosen:
        mask[node // _BITS] |= 1 << (node % _BITS)
    _set(_INTERLEAVE, mask, f"interleaving over node {', '.join(map(str, chosen))}")
    return chosen


def default_policy() -> None:
    """Back to the kernel's: the node of the thread that touches."""
    _set(_DEFAULT, None, "the default policy")


def _set(mode: int, mask: ctypes.Array[ctypes.c_ulong] | None, what: str) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"{what}: not supported on {platform.machine()}; start the program with numactl")
    libc = ctypes.CDLL(None, use_errno=True)
    bits = 0 if mask is None else len(mask) * _BITS + 1  # the kernel leaves out the last
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), mask, ctypes.c_ulong(bits)) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.EINVAL:
        raise ValueError(f"{what}: the kernel refuses; name nodes that have memory and that this process may use")
    raise OSError(code, f"{what}: {os.strerror(code)}; in Docker: --cap-add SYS_NICE")
