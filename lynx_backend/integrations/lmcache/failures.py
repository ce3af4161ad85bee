"""What both of LMCache's interfaces do about what fails."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from ... import metrics
from ...keys import ChunkKey
from ...logs import warn_limited

_REMEMBERED = 65536


class Unreadable:
    """Chunks that could not be read although a tier says that it has them; the latest of them.

    Lookups say no to them, so that they are computed and put again, which replaces them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: OrderedDict[ChunkKey, None] = OrderedDict()

    def __contains__(self, chunk: ChunkKey) -> bool:
        return chunk in self._chunks

    def add(self, chunk: ChunkKey) -> None:
        with self._lock:
            self._chunks[chunk] = None
            while len(self._chunks) > _REMEMBERED:
                self._chunks.popitem(last=False)

    def discard(self, chunk: ChunkKey) -> None:
        with self._lock:
            self._chunks.pop(chunk, None)


def report(logger: logging.Logger, where: str, op: str, error: Exception) -> None:
    """Count a failure and log it, at most every 30 s for each kind of it.

    Args:
        where: the interface, as part of what is told apart.
        op: what was tried, as a verb.
    """
    kind = type(error).__name__
    metrics.ERRORS.labels(kind).inc()
    warn_limited(logger, f"{where}-{op}-{kind}", "could not %s: %s: %s", op, kind, error)
