"""Which regions of a forward pass backward will need next: each is looked at once per backward pass."""

from __future__ import annotations

import heapq
import weakref

from memascend.activation.saved import Region


class Sweep:
    """Offloaded regions of one forward pass, walked from the last to the first as backward unpacks them.

    A cursor moves down over the regions, so a pass of n regions costs O(n) steps in all, however many of them are
    unpacked before the read-ahead has room again. A region whose write has not ended when the cursor passes it is
    *late*: it is offered again when the write has ended (O(log n)). Not thread-safe: under the cache's lock.
    """

    def __init__(self) -> None:
        self._regions: list[weakref.ref[Region]] = []
        self._cursor = 0  # regions from here on have been looked at in this backward pass
        self._backward = -1  # number of the backward pass
        self._late: list[int] = []  # a heap of negated places
        self.steps = 0  # regions that were looked at, since the forward pass

    def add(self, region: Region, *, offloaded: bool) -> None:
        """In the order in which forward saves them. One that stays in memory only marks a place."""
        region.sweep, region.place = self, len(self._regions)
        if offloaded:
            self._regions.append(weakref.ref(region))

    def reach(self, region: Region, backward: int) -> None:
        """Backward pass `backward` (autograd's number) unpacks `region`."""
        if backward != self._backward:
            self._backward, self._cursor, self._late = backward, region.place, []
        self._cursor = min(self._cursor, region.place)

    def written(self, region: Region) -> None:
        """Its write has ended; it is read ahead if the cursor had passed it."""
        if self._backward >= 0 and region.place >= self._cursor:
            heapq.heappush(self._late, -region.place)

    def next(self) -> Region | None:
        """The region to read next: on the tier, not in memory, and still to be unpacked. It is offered until `skip`."""
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
        """What `next` offered is being read."""
        if self._late:
            heapq.heappop(self._late)
        else:
            self._cursor -= 1

    def _wanted(self, place: int) -> Region | None:
        self.steps += 1
        region = self._regions[place]()
        if region is None or not region.on_tier or region.memory is not None or region.unpacks >= region.packs:
            return None
        return region
