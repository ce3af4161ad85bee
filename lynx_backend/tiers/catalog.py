"""Which objects a tier holds, how large they are, and the order in which they are evicted."""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator

from ..keys import ChunkKey, ObjectName, Part

#: Of what a tier holds under pressure, the share that anchors without their residual may take.
#: They serve drafting while the rest is fetched or recomputed, but every one of them takes room
#: from whole chunks, and only whole chunks save the recomputing.
ANCHOR_ONLY_SHARE = 1 / 8


class _Share:
    """Of the objects of a catalog, or of one identity: bytes, and two heaps of (last use, name)."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.anchor_only_bytes = 0
        self.heaps: dict[Part, list[tuple[int, ObjectName]]] = {part: [] for part in Part}

    def next_heap(self) -> list[tuple[int, ObjectName]]:
        """Where the next victim is looked for; empty after the last."""
        residuals, anchors = self.heaps[Part.RESIDUAL], self.heaps[Part.ANCHOR]
        crowded = self.anchor_only_bytes > ANCHOR_ONLY_SHARE * self.used_bytes
        return anchors if anchors and (crowded or not residuals) else residuals


class Catalog:
    """Sizes and last uses of the objects of one tier. Not thread safe: the tier holds its lock.

    Eviction order: the least recently used residual, and so a chunk's residual before its anchor.
    But while anchors without a residual take more than :data:`ANCHOR_ONLY_SHARE` of what is held,
    and when there is no residual, it is the least recently used of those anchors. A residual
    without an anchor waits its turn: as a rule, somebody is writing the anchor just now.

    The order comes from one heap for each part. An item whose time of last use is out of date is
    put right when it comes up, so a use costs nothing but a dictionary write; an anchor whose
    residual is there is dropped when it comes up, and added again when the residual goes.

    Args:
        by_identity: whether bytes and order are also kept for each identity (``ChunkKey.identity``:
            a model, a rank and a salt), for quotas.
    """

    def __init__(self, by_identity: bool = False) -> None:
        self._objects: dict[ObjectName, tuple[int, int]] = {}
        self._all = _Share()
        self._shares: dict[bytes, _Share] | None = {} if by_identity else None
        self.anchor_only = 0

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[ObjectName]:
        return iter(self._objects)

    def __contains__(self, name: object) -> bool:
        return name in self._objects

    @property
    def used_bytes(self) -> int:
        """Of all objects."""
        return self._all.used_bytes

    def used_by(self, identity: bytes | None) -> int:
        """Bytes of one identity's objects, or of all."""
        return self._share(identity).used_bytes

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
        if known is not None:
            self._count_anchor_only(name.key, -1)
        self._objects[name] = (size, used)
        self._add_bytes(name.key, size - (known[0] if known else 0))
        if known is not None:
            self._count_anchor_only(name.key, 1)
            return
        if name.part == Part.ANCHOR:
            self._count_anchor_only(name.key, 1)
        else:  # its anchor, if it is here, is not alone any more
            anchor = self._objects.get(name.key.object(Part.ANCHOR))
            if anchor is not None:
                self._add_anchor_only(name.key, -anchor[0], -1)
        self._push(name)
        if sum(map(len, self._all.heaps.values())) > 2 * len(self._objects) + 1024:  # mostly stale
            for share in (self._all, *(self._shares or {}).values()):
                share.heaps = {part: [] for part in Part}
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
        self._add_bytes(name.key, -self._objects.pop(name)[0])
        self._count_anchor_only(name.key, 1)
        if name.part == Part.RESIDUAL:
            self._push(name.key.object(Part.ANCHOR))

    def evictable_bytes(self, writing: ObjectName, identity: bytes | None = None) -> int:
        """Bytes of all objects, or one identity's, but the other parts of the chunk written."""
        others = [writing.key.object(part) for part in Part if part != writing.part]
        return self.used_by(identity) - sum(self.size(name) or 0 for name in others)

    def victims(
        self, writing: ObjectName | None, identity: bytes | None = None
    ) -> Generator[ObjectName, None, None]:
        """Objects in the order in which to evict them, close()d by the caller when it has enough.

        The caller discards each one, or touches it when it turns out to have been used since, in
        which case it comes again in its turn, or leaves it and goes on to the next.

        Args:
            writing: the object being put; other parts of its chunk are not offered.
            identity: whose objects; None for everybody's.
        """
        share = self._share(identity)
        passed: set[ObjectName] = set()
        try:
            while (name := self._pop(share, passed)) is not None:
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

    def _pop(self, share: _Share, passed: set[ObjectName]) -> ObjectName | None:
        """Take the next object in eviction order off its heap, None after the last."""
        while heap := share.next_heap():
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
        """Put an object, if it is here, on the heaps of its part."""
        entry = self._objects.get(name)
        if entry is not None:
            for share in self._shares_of(name.key):
                heapq.heappush(share.heaps[name.part], (entry[1], name))

    def _count_anchor_only(self, key: ChunkKey, sign: int) -> None:
        anchor = self._objects.get(key.object(Part.ANCHOR))
        if anchor is not None and key.object(Part.RESIDUAL) not in self._objects:
            self._add_anchor_only(key, sign * anchor[0], sign)

    def _add_anchor_only(self, key: ChunkKey, size: int, count: int) -> None:
        self.anchor_only += count
        for share in self._shares_of(key):
            share.anchor_only_bytes += size

    def _add_bytes(self, key: ChunkKey, size: int) -> None:
        for share in self._shares_of(key):
            share.used_bytes += size

    def _share(self, identity: bytes | None) -> _Share:
        if identity is None or self._shares is None:
            return self._all
        return self._shares.get(identity) or _Share()

    def _shares_of(self, key: ChunkKey) -> tuple[_Share, ...]:
        if self._shares is None:
            return (self._all,)
        return self._all, self._shares.setdefault(key.identity, _Share())
