"""Which objects a tier holds, how large they are, and the order in which they are evicted."""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator

from ..keys import ChunkKey, ObjectName, Part

#: Of what a tier holds under pressure, the share that anchors without their residual may take.
#: They serve drafting while the rest is fetched or recomputed, but every one of them takes room
#: from whole chunks, and only whole chunks save the recomputing.
ANCHOR_ONLY_SHARE = 1 / 8


class Catalog:
    """Sizes and last uses of the objects of one tier. Not thread safe: the tier holds its lock.

    Eviction order: the least recently used residual, and so a chunk's residual before its anchor.
    But while anchors without a residual take more than :data:`ANCHOR_ONLY_SHARE` of what is held,
    and when there is no residual, it is the least recently used of those anchors. A residual
    without an anchor waits its turn: as a rule, somebody is writing the anchor just now.

    The order comes from one heap for each part. An item whose time of last use is out of date is
    put right when it comes up, so a use costs nothing but a dictionary write; an anchor whose
    residual is there is dropped when it comes up, and added again when the residual goes.
    """

    def __init__(self) -> None:
        self._objects: dict[ObjectName, tuple[int, int]] = {}
        self._heaps: dict[Part, list[tuple[int, ObjectName]]] = {part: [] for part in Part}
        self._anchor_only_bytes = 0
        self.used_bytes = 0
        self.anchor_only = 0

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[ObjectName]:
        return iter(self._objects)

    def __contains__(self, name: object) -> bool:
        return name in self._objects

    def size(self, name: ObjectName) -> int | None:
        """Size in bytes, None when absent."""
        entry = self._objects.get(name)
        return None if entry is None else entry[0]

    def last_use(self, name: ObjectName) -> int:
        """The time given to the latest :meth:`put` or :meth:`touch` of an object that is here."""
        return self._objects[name][1]

    def put(self, name: ObjectName, size: int, used: int) -> None:
        """Add an object, or replace its size and time of last use (any increasing integer)."""
        known = self._objects.get(name)
        self._count_anchor_only(name.key, -1)
        self._objects[name] = (size, used)
        self._count_anchor_only(name.key, 1)
        if known is not None:
            self.used_bytes += size - known[0]
            return
        self.used_bytes += size
        self._push(name)
        if sum(map(len, self._heaps.values())) > 2 * len(self._objects) + 1024:  # mostly stale
            self._heaps = {part: [] for part in Part}
            for each in self._objects:
                self._push(each)

    def touch(self, name: ObjectName, used: int) -> None:
        """Record a use of an object that is here."""
        self._objects[name] = (self._objects[name][0], used)

    def discard(self, name: ObjectName) -> None:
        """Forget an object; an absent one is no error."""
        if name not in self._objects:
            return
        self._count_anchor_only(name.key, -1)
        self.used_bytes -= self._objects.pop(name)[0]
        self._count_anchor_only(name.key, 1)
        if name.part == Part.RESIDUAL:
            self._push(name.key.object(Part.ANCHOR))

    def evictable_bytes(self, writing: ObjectName) -> int:
        """Bytes of all objects but the other parts of the chunk being written."""
        others = [writing.key.object(part) for part in Part if part != writing.part]
        return self.used_bytes - sum(self.size(name) or 0 for name in others)

    def victims(self, writing: ObjectName | None) -> Generator[ObjectName, None, None]:
        """Objects in the order in which to evict them, close()d by the caller when it has enough.

        The caller discards each one, or touches it when it turns out to have been used since, in
        which case it comes again in its turn, or leaves it and goes on to the next.

        Args:
            writing: the object being put; other parts of its chunk are not offered.
        """
        passed: set[ObjectName] = set()
        try:
            while (name := self._pop(passed)) is not None:
                passed.add(name)
                used = self.last_use(name)
                if writing is None or name == writing or name.key != writing.key:
                    yield name
                if name not in self._objects or self.last_use(name) != used:
                    passed.remove(name)
                    self._push(name)
                elif name.part == Part.RESIDUAL:  # it stays, and its anchor must go without it
                    self._push(name.key.object(Part.ANCHOR))
        finally:
            for name in passed:
                self._push(name)

    def _pop(self, passed: set[ObjectName]) -> ObjectName | None:
        """Take the next object in eviction order off its heap, None after the last."""
        residuals, anchors = self._heaps[Part.RESIDUAL], self._heaps[Part.ANCHOR]
        while residuals or anchors:
            crowded = self._anchor_only_bytes > ANCHOR_ONLY_SHARE * self.used_bytes
            heap = anchors if anchors and (crowded or not residuals) else residuals
            used, name = heapq.heappop(heap)
            if name not in self._objects or name in passed:
                continue
            if self.last_use(name) != used:
                self._push(name)
            elif name.part == Part.RESIDUAL:
                return name
            else:
                residual = name.key.object(Part.RESIDUAL)
                if residual not in self._objects or residual in passed:
                    return name
        return None

    def _push(self, name: ObjectName) -> None:
        """Put an object, if it is here, on the heap of its part."""
        if name in self._objects:
            heapq.heappush(self._heaps[name.part], (self.last_use(name), name))

    def _count_anchor_only(self, key: ChunkKey, sign: int) -> None:
        anchor = self._objects.get(key.object(Part.ANCHOR))
        if anchor is not None and key.object(Part.RESIDUAL) not in self._objects:
            self.anchor_only += sign
            self._anchor_only_bytes += sign * anchor[0]
