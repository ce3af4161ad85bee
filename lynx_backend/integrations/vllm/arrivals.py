"""When residuals will be there: bytes that are still to come over the rate at which they came."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from ...keys import Part
from ...states import State

#: Seconds after which a measurement has lost most of its weight.
MEMORY_SECONDS = 5.0


class Arriving(Protocol):
    """What is looked at of a :class:`lynx_backend.progressive.ProgressiveRequest`."""

    bytes_received: dict[Part, int]
    bytes_expected: dict[Part, int]

    @property
    def state(self) -> State: ...


class Arrivals:
    """One worker's estimate.

    The rate is bytes landed in the seconds in which any cache was not FULL, so that it includes
    what decoding takes. On the link all anchors go before any residual, and residuals in the order
    in which requests came; so does the estimate.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._bytes = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def rate(self) -> float:
        """Bytes a second; 0 if nothing ever came."""
        return self._bytes / self._seconds if self._seconds else 0.0

    def observe(self, now: float, requests: Mapping[str, Arriving]) -> None:
        """Look at all requests under way, before any is taken out of them.

        Args:
            now: monotonic seconds.
            requests: by id, in the order in which they came.
        """
        if not requests and self._since is None:
            return
        landed = {name: sum(request.bytes_received.values()) for name, request in requests.items()}
        new = sum(count - self._seen.get(name, 0) for name, count in landed.items())
        if self._since is not None:
            passed = now - self._since
            kept = math.exp(-passed / MEMORY_SECONDS)
            self._bytes = self._bytes * kept + new
            self._seconds = self._seconds * kept + passed
        self._seen = landed
        waiting = any(request.state < State.FULL for request in requests.values())
        self._since = now if waiting else None

    def waits(self, requests: Mapping[str, Arriving]) -> dict[str, float]:
        """Seconds until each residual is expected to be in; infinite where nothing ever came."""
        left = {
            name: {p: request.bytes_expected[p] - request.bytes_received[p] for p in Part}
            for name, request in requests.items()
        }
        ahead = sum(parts[Part.ANCHOR] for parts in left.values())
        waits = {}
        for name, parts in left.items():
            ahead += parts[Part.RESIDUAL]
            waits[name] = (ahead / self.rate if self.rate else math.inf) if ahead else 0.0
        return waits
