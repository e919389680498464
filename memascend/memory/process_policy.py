"""Memory policy of a whole process, as `numactl` sets it: needs only a system call, so it can run before torch loads.

It applies to all pages that this thread, and the threads and processes that it starts later, touch without a policy of
their own. Pages that already exist do not move.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Iterable

from memascend.memory.topology import Topology

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_INTERLEAVE = 3
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def interleave_process(nodes: Iterable[int] | None = None) -> tuple[int, ...]:
    """Take all later pages from `nodes` in turn (default: all allowed nodes with memory); return the nodes.

    Raises ValueError for nodes that the kernel refuses, OSError if the system call is not permitted.
    """
    topology = Topology.read()
    usable = [n for n, node in topology.nodes.items() if node.total_bytes and n in topology.allowed]
    chosen = tuple(usable if nodes is None else nodes)
    mask = (ctypes.c_ulong * (max(chosen, default=0) // _BITS + 1))()
    for node in chosen:
        mask[node // _BITS] |= 1 << (node % _BITS)
    what = f"interleaving over node {', '.join(map(str, chosen))}"
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"{what}: not supported on {platform.machine()}; start the program with numactl")
    libc = ctypes.CDLL(None, use_errno=True)
    bits = len(mask) * _BITS + 1  # the kernel ignores the last bit
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(_INTERLEAVE), mask, ctypes.c_ulong(bits)) == 0:
        return chosen
    code = ctypes.get_errno()
    if code == errno.EINVAL:
        raise ValueError(f"{what}: the kernel refuses; name nodes that have memory and that this process may use")
    raise OSError(code, f"{what}: {os.strerror(code)}; in Docker: --cap-add SYS_NICE")
