"""What both of LMCache's interfaces do about what fails."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from ... import metrics
from ...keys import ChunkKey
from ...logs import warn_limited

_REMEMBERED = 65536
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
_NEVER = (-math.inf, -math.inf)


class Unreadable:
    """Chunks that could not be read although a tier says that it has them; the latest of them.

    A chunk that was refused is in here until it is put again, which replaces it. One that could not
    be asked for is not, as the tier may be well again; but if it fails once more before it is read,
    it is for as long as it has been failing, from a second up to half a minute. Else whoever looks
    it up, is told that it is there, and cannot load it, would do so for ever.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: since when each has been failing, and until when it is in here
        self._chunks: OrderedDict[ChunkKey, tuple[float, float]] = OrderedDict()

    def __contains__(self, chunk: ChunkKey) -> bool:
        _, until = self._chunks.get(chunk, _NEVER)
        return self._clock() < until

    def note(self, chunk: ChunkKey, found: bool, refused: bool) -> None:
        """Take note of how reading a chunk went.

        Args:
            found: it was read.
            refused: what there is of it is of no use, as told by ``ChunkStore.get_many``.
        """
        if found:
            self.discard(chunk)
            return
        with self._lock:
            now = self._clock()
            since, until = self._chunks.pop(chunk, _NEVER)
            if refused:
                until = math.inf
            elif now > until + _LONGEST_PAUSE_SECONDS:  # well for all that is known
                since = until = now
            else:
                pause = min(max(now - since, _PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
                until = max(until, now + pause)
            self._chunks[chunk] = since, until
            while len(self._chunks) > _REMEMBERED:
                self._chunks.popitem(last=False)

    def discard(self, chunk: ChunkKey) -> None:
        """Nothing is known against a chunk any more: it was read, or put again."""
        if chunk in self._chunks:
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
