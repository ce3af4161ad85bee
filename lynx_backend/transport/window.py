"""How much may be under way on a link: pure logic, the caller brings the clock.

Bytes that were sent and not yet acknowledged stand between a newly arrived anchor and the far end.
The window holds residuals to what the link carries in the time an anchor may be made to wait, so it
follows the measured rate; anchors may use as much again, so that one never waits for residuals.
"""

from __future__ import annotations

from collections import deque

from ..errors import InvalidInputError
from ..keys import Part
from .scheduler import FRAGMENT_BYTES

#: Most an arriving anchor is made to wait for residuals under way.
ANCHOR_WAIT_SECONDS = 0.005
MOST_FRAGMENT_BYTES = 4 << 20
MOST_WINDOW_BYTES = 64 << 20
#: Most messages under way; small ones must not add up to a queue of thousands.
MOST_MESSAGES = 64
# A rate is what arrived in so much time in which the link had work. Over less, a token bucket on
# the way, or acknowledgements that were held up, look like a faster link.
_SLICE_SECONDS = 0.05
_SLICES = 4


class Window:
    """The window of one link.

    Args:
        wait_seconds: most time that residuals under way may cost an arriving anchor. It is kept
            as far as one fragment allows: a link needs longer than that for 256 KiB when it is
            slower than 0.42 Gbit/s.
        round_trip_seconds: of the idle link, at most: what is on its way for so long costs nobody.
    """

    def __init__(
        self, wait_seconds: float = ANCHOR_WAIT_SECONDS, round_trip_seconds: float = 0.0
    ) -> None:
        if wait_seconds <= 0:
            raise InvalidInputError(f"wait_seconds must be positive, got {wait_seconds}")
        self._wait = wait_seconds
        self._round_trip = round_trip_seconds
        self._sent: dict[int, tuple[int, float]] = {}
        self._rates: deque[float] = deque([0.0], _SLICES)
        # The slice under way: bytes that arrived, busy seconds, and until when they are counted.
        self._arrived, self._busy, self._counted = 0, 0.0, 0.0
        self.in_flight = 0
        #: bytes that were given room and are not sent yet
        self.reserved = 0
        #: bytes of residuals that may be under way
        self.size = 2 * FRAGMENT_BYTES

    @property
    def rate(self) -> float:
        """Bytes a second that the link was last seen to carry; 0 when unknown."""
        return max(self._rates)

    @property
    def messages(self) -> int:
        """Messages under way."""
        return len(self._sent)

    def room(self, part: Part) -> int:
        """Most bytes of the next fragment of this part; 0 when none may be sent now."""
        fragment = FRAGMENT_BYTES
        while fragment < MOST_FRAGMENT_BYTES and 4 * fragment <= self.size:
            fragment *= 2
        under_way = self.in_flight + self.reserved
        if not under_way:
            return fragment
        anchor = part == Part.ANCHOR
        free = self.size * (1 + anchor) - under_way
        return fragment if free >= fragment and self.messages < MOST_MESSAGES * (1 + anchor) else 0

    def sent(self, sequence: int, size: int, now: float) -> None:
        """Note that a message of ``size`` bytes was handed to the link."""
        if not self._sent:
            self._counted = now  # the link had nothing to do: that time says nothing of its rate
        self._sent[sequence] = size, now
        self.in_flight += size

    def acknowledged(self, sequence: int, now: float) -> bool:
        """Note that a message has arrived; False when no such message is under way."""
        sent = self._sent.pop(sequence, None)
        if sent is None:
            return False
        size, at = sent
        self.in_flight -= size
        self._round_trip = min(self._round_trip, now - at)
        self._arrived += size
        self._busy += now - self._counted
        self._counted = now
        if self._busy >= _SLICE_SECONDS:
            self._rates.append(self._arrived / self._busy)
            self._arrived, self._busy = 0, 0.0
            span = self._wait + self._round_trip
            self.size = int(min(max(self.rate * span, FRAGMENT_BYTES), MOST_WINDOW_BYTES))
        return True
