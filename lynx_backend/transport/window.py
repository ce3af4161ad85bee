"""How much may be under way on a link: pure logic, the caller brings the clock.

Bytes that were sent and not yet acknowledged stand between a newly arrived anchor and the far end.
The window holds residuals to what the link carries in the time an anchor may be made to wait, so it
follows the measured rate; anchors may use as much again, so that one never waits for residuals.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidInputError
from ..keys import Part
from .scheduler import FRAGMENT_BYTES

#: Most an arriving anchor is made to wait for residuals under way.
ANCHOR_WAIT_SECONDS = 0.005
MOST_FRAGMENT_BYTES = 4 << 20
MOST_WINDOW_BYTES = 64 << 20
#: Most messages under way; small ones must not add up to a queue of thousands.
MOST_MESSAGES = 64
# How long a rate stays believed when no faster one is seen.
_RATE_SECONDS = 1.0


@dataclass(frozen=True)
class _Sent:
    """A message under way, and what was known when it was sent."""

    size: int
    at: float
    #: bytes acknowledged until then, when the last of them were, and when those had been sent
    delivered: int
    acknowledged_at: float
    acknowledged_sent_at: float


class Window:
    """The window of one link.

    Args:
        wait_seconds: most time that residuals under way may cost an arriving anchor. It is kept
            as far as one fragment allows: a link needs longer than that for 256 KiB when it is
            slower than 0.42 Gbit/s.
        round_trip_seconds: of the idle link; what is under way for so long costs nobody anything.
    """

    def __init__(
        self, wait_seconds: float = ANCHOR_WAIT_SECONDS, round_trip_seconds: float = 0.0
    ) -> None:
        if wait_seconds <= 0:
            raise InvalidInputError(f"wait_seconds must be positive, got {wait_seconds}")
        self._span = wait_seconds + round_trip_seconds
        self._sent: dict[int, _Sent] = {}
        self._delivered = 0
        self._acknowledged_at = self._acknowledged_sent_at = 0.0
        # The largest rates seen in this and in the previous period.
        self._rates = (0.0, 0.0)
        self._period = float("-inf")
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
        while fragment < MOST_FRAGMENT_BYTES and 8 * fragment <= self.size:
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
            # The link had nothing to do: that time says nothing of its rate.
            self._acknowledged_at = self._acknowledged_sent_at = now
        last = self._acknowledged_at, self._acknowledged_sent_at
        self._sent[sequence] = _Sent(size, now, self._delivered, *last)
        self.in_flight += size

    def acknowledged(self, sequence: int, now: float) -> bool:
        """Note that a message has arrived; False when no such message is under way."""
        sent = self._sent.pop(sequence, None)
        if sent is None:
            return False
        self.in_flight -= sent.size
        self._delivered += sent.size
        self._acknowledged_at, self._acknowledged_sent_at = now, sent.at
        # What was acknowledged since the message was sent, over the time that took, or that its
        # sending took: acknowledgements held up on their way arrive faster than the link works.
        elapsed = max(now - sent.acknowledged_at, sent.at - sent.acknowledged_sent_at)
        if elapsed > 0:
            self._learn((self._delivered - sent.delivered) / elapsed, now)
        return True

    def _learn(self, rate: float, now: float) -> None:
        if now - self._period > _RATE_SECONDS:
            self._rates = (0.0, self._rates[0])
            self._period = now
        self._rates = (max(self._rates[0], rate), self._rates[1])
        self.size = int(min(max(self.rate * self._span, FRAGMENT_BYTES), MOST_WINDOW_BYTES))
