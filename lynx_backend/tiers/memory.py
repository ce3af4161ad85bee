"""Objects in host memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

from ..errors import ConfigError, TierError, TierFullError
from ..keys import ObjectName, Part
from .arena import Arena, Block
from .base import Buffer, Tier, TierStats, flat
from .limits import Limits

_ALIGN = 64
_GAPS = 1 / 8


class MemoryTier(Tier):
    """Keeps copies of objects in this process, in one piece of memory of fixed size.

    An object that a reader still looks at keeps its memory even after it was evicted: while readers
    hold on to much, less is held, and never more memory is taken.

    Args:
        max_bytes: limit on the objects held. The memory is an eighth larger, because objects of
            different sizes leave gaps.
        quota_bytes, low_watermark: as for ``Limits``.
        pinned: whether it is page-locked for transfers to a GPU. It is then taken all at once, else
            as it is used.

    Raises:
        ConfigError: ``max_bytes`` is below 1, or the host has no such memory.
    """

    name = "memory"
    in_memory = True

    def __init__(
        self,
        max_bytes: int,
        quota_bytes: int | None = None,
        low_watermark: float = 1.0,
        pinned: bool = False,
    ) -> None:
        self._limits = Limits(max_bytes, quota_bytes, low_watermark)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        try:
            self._arena = Arena(max_bytes + max(_ALIGN, int(_GAPS * max_bytes)), _ALIGN, pinned)
        except (MemoryError, OSError, OverflowError, RuntimeError) as e:
            raise ConfigError(
                f"the memory tier cannot have {max_bytes} bytes{' page-locked' * pinned} ({e}); "
                "lower memory.max_bytes" + " or set memory.pinned to false" * pinned
            ) from e
        self._objects: dict[ObjectName, memoryview] = {}
        self._catalog = self._limits.catalog()
        self._clock = itertools.count()
        self._closed = False

    def put(self, name: ObjectName, data: Buffer) -> None:
        view = flat(data)
        with self._lock:
            self._check_open()
            if not self._limits.fits(self._catalog, name, view.nbytes):
                raise TierFullError(
                    f"an object of {view.nbytes} bytes does not fit the memory tier of "
                    f"{self._limits} beside the other part of its chunk; raise max_bytes"
                )
            self._remove(name)
            for identity, need in self._limits.to_evict(self._catalog, name, view.nbytes):
                self._evict(name, identity, need)
            block = self._take(name, view.nbytes)
            block.data[:] = view
            self._objects[name] = block.data.toreadonly()
            self._catalog.put(name, view.nbytes, next(self._clock))

    def get(self, name: ObjectName) -> memoryview | None:
        with self._lock:
            self._check_open()
            data = self._objects.get(name)
            if data is None:
                return None
            self._catalog.touch(name, next(self._clock))
            return data

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        with self._lock:
            self._check_open()
            return [self._catalog.size(name) for name in names]

    def delete(self, names: Sequence[ObjectName]) -> None:
        with self._lock:
            self._check_open()
            for name in names:
                self._remove(name)

    def names(self) -> Iterator[ObjectName]:
        with self._lock:
            self._check_open()
            return iter(list(self._catalog))

    def stats(self) -> TierStats:
        with self._lock:
            self._check_open()
            return TierStats(
                used_bytes=self._catalog.used_bytes,
                capacity_bytes=self._max_bytes,
                objects=len(self._catalog),
                anchor_only=self._catalog.anchor_only,
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._objects = {}
            self._catalog = self._limits.catalog()

    def _take(self, name: ObjectName, size: int) -> Block:
        """Memory for an object; where it is in pieces, or looked at, more is evicted."""
        while (block := self._arena.take(size, from_end=name.part == Part.ANCHOR)) is None:
            if not self._evict(name, None, 1):
                raise TierFullError(
                    f"no {size} bytes in one piece are free in the memory tier, as readers hold "
                    f"on to what was evicted; raise its max_bytes={self._max_bytes}"
                )
        return block

    def _evict(self, writing: ObjectName, identity: bytes | None, need: int) -> int:
        """Evict until so many bytes are gone; how many are."""
        gone = 0
        with closing(self._catalog.victims(writing, identity)) as victims:
            while gone < need and (victim := next(victims, None)) is not None:
                gone += self._catalog.size(victim) or 0
                self._remove(victim)
                self._count_eviction(victim)
        return gone

    def _remove(self, name: ObjectName) -> None:
        self._objects.pop(name, None)
        self._catalog.discard(name)

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("the memory tier is closed; open a new one")
