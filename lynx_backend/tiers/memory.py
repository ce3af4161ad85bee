"""Objects in host memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

from ..errors import ConfigError, TierError, TierFullError
from ..keys import ObjectName
from .base import Buffer, Tier, TierStats, flat
from .catalog import Catalog


class MemoryTier(Tier):
    """Keeps copies of objects in this process.

    Args:
        max_bytes: limit on the objects held. Views that readers keep after an object was evicted
            are theirs and not counted.
    """

    name = "memory"
    in_memory = True

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ConfigError(f"max_bytes of the memory tier must be at least 1, got {max_bytes}")
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._objects: dict[ObjectName, bytes] = {}
        self._catalog = Catalog()
        self._clock = itertools.count()
        self._closed = False

    def put(self, name: ObjectName, data: Buffer) -> None:
        view = flat(data)
        with self._lock:
            self._check_open()
            need = self._catalog.used_bytes + view.nbytes - self._max_bytes
            if need > self._catalog.evictable_bytes(name):
                raise TierFullError(
                    f"an object of {view.nbytes} bytes does not fit the memory tier of "
                    f"{self._max_bytes} bytes beside the other part of its chunk; raise max_bytes"
                )
            self._remove(name)
            with closing(self._catalog.victims(name)) as victims:
                while self._catalog.used_bytes + view.nbytes > self._max_bytes:
                    victim = next(victims)
                    self._remove(victim)
                    self._count_eviction(victim)
            try:
                self._objects[name] = bytes(view)
            except MemoryError as e:
                raise TierFullError(
                    f"the host has no memory for {view.nbytes} bytes more while the memory tier "
                    f"holds {self._catalog.used_bytes}; lower its max_bytes of {self._max_bytes}"
                ) from e
            self._catalog.put(name, view.nbytes, next(self._clock))

    def get(self, name: ObjectName) -> memoryview | None:
        with self._lock:
            self._check_open()
            data = self._objects.get(name)
            if data is None:
                return None
            self._catalog.touch(name, next(self._clock))
            return memoryview(data)

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
            self._catalog = Catalog()

    def _remove(self, name: ObjectName) -> None:
        self._objects.pop(name, None)
        self._catalog.discard(name)

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("the memory tier is closed; open a new one")
