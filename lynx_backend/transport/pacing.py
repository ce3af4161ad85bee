"""When bytes sent over a link of a set rate have arrived; the caller brings the clock."""

from __future__ import annotations

import math

from ..errors import InvalidInputError

# A real link keeps going while the thread that plays it waits for a core; this much of such a
# delay is made up for, so that the rate also holds on a busy machine.
CATCH_UP_SECONDS = 0.05


class Pacer:
    """A token bucket that earns nothing while idle and forgives being late.

    Counted from any moment at which the link was idle, bytes never arrive faster than the rate.
    After the caller came late they arrive faster, by at most ``burst_bytes`` or what the rate
    carries in ``CATCH_UP_SECONDS``, whichever is more.

    Args:
        bytes_per_second: the rate.
        burst_bytes: lag, in bytes, that is made up for at any rate.
    """

    def __init__(self, bytes_per_second: float, burst_bytes: int) -> None:
        if not (math.isfinite(bytes_per_second) and bytes_per_second > 0):
            raise InvalidInputError(
                f"bytes_per_second must be a positive number, got {bytes_per_second}; leave it out "
                "for an unlimited link"
            )
        self._rate = bytes_per_second
        self._most_lag = max(burst_bytes / bytes_per_second, CATCH_UP_SECONDS)
        self._free = -math.inf

    def resume(self, now: float) -> None:
        """Say that sending begins at ``now`` (monotonic seconds) after the link was idle."""
        self._free = max(self._free, now)

    def send(self, size: int, now: float) -> float:
        """The moment at which ``size`` bytes, next in line at ``now``, have arrived."""
        self._free = max(self._free, now - self._most_lag) + size / self._rate
        return self._free
