"""Warnings from data paths, where one broken disk can fail ten thousand times a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

INTERVAL_SECONDS = 30.0


class WarningLimiter:
    """Lets one line per kind through each interval and counts the others.

    Args:
        interval: seconds between two lines of one kind.
        clock: monotonic seconds.
    """

    def __init__(
        self, interval: float = INTERVAL_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def warn(self, logger: logging.Logger, kind: str, message: str, *args: object) -> None:
        """Log ``message % args`` as a warning unless ``kind`` was logged less than an interval ago.

        Args:
            kind: a short constant; there is one counter for each, so never a key or a request id.
        """
        with self._lock:
            now = self._clock()
            last = self._last.get(kind)
            if last is not None and now - last < self._interval:
                self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
                return
            self._last[kind] = now
            suppressed = self._suppressed.pop(kind, 0)
        text = message % args if args else message
        if suppressed:
            text += f" ({suppressed} more like this since the last such line)"
        logger.warning("%s", text)


_limiter = WarningLimiter()
warn_limited = _limiter.warn
