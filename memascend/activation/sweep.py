"""Order in which backward needs the regions of a forward pass; each is examined once per backward pass."""

from __future__ import annotations

import heapq
import weakref

from memascend.activation.saved import Region


class Sweep:
    """Offloaded regions of one forward pass, visited from last to first as backward unpacks them.

    A cursor moves down over the regions, so a pass over n regions costs O(n) steps in total, however many of them are
    unpacked before the read-ahead has space again. A region whose write has not ended when the cursor passes it is
    *late*: it is offered again after its write (O(log n)). Not thread-safe: guarded by the cache's lock.
    """

    def __init__(self) -> None:
        self._regions: list[weakref.ref[Region]] = []
        self._cursor = 0  # regions from here on have been examined in this backward pass
        self._backward = -1  # number of the backward pass
        self._late: list[int] = []  # a heap of negated positions
        self.steps = 0  # regions examined since the forward pass

    def add(self, region: Region, *, offloaded: bool) -> None:
        """Add a region, in the order in which forward saves them. One that stays in memory only gets a position."""
        region.sweep, region.place = self, len(self._regions)
        if offloaded:
            self._regions.append(weakref.ref(region))

    def reach(self, region: Region, backward: int) -> None:
        """Note that backward pass `backward` (autograd's number) unpacks `region`."""
        if backward != self._backward:
            self._backward, self._cursor, self._late = backward, region.place, []
        self._cursor = min(self._cursor, region.place)

    def written(self, region: Region) -> None:
        """Note that the region's write has ended; it is offered for reading if the cursor had passed it."""
        if self._backward >= 0 and region.place >= self._cursor:
            heapq.heappush(self._late, -region.place)

    def next(self) -> Region | None:
        """Return the region to read next: on the tier, not in memory, not yet unpacked. It is offered until `skip`."""
        while self._late:
            region = self._wanted(-self._late[0])
            if region is not None:
                return region
            heapq.heappop(self._late)
        while self._cursor > 0:
            region = self._wanted(self._cursor - 1)
            if region is not None:
                return region
            self._cursor -= 1
        return None

    def skip(self) -> None:
        """Advance past the region that `next` returned, which is being read."""
        if self._late:
            heapq.heappop(self._late)
        else:
            self._cursor -= 1

    def _wanted(self, place: int) -> Region | None:
        """Return the region at this position if it has to be read for backward, else None. Counts a step."""
        self.steps += 1
        region = self._regions[place]()
        if region is None or not region.on_tier or region.memory is not None or region.unpacks >= region.packs:
            return None
        return region
