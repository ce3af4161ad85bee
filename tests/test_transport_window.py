"""The window against a simulated link: a queue that drains at a set rate, and a round trip."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lynx_backend.errors import InvalidInputError
from lynx_backend.keys import Part
from lynx_backend.transport.scheduler import FRAGMENT_BYTES
from lynx_backend.transport.window import MOST_FRAGMENT_BYTES, Window

WAIT = 0.005


class Link:
    """Carries ``rate`` bytes a second; an acknowledgement is back ``round_trip`` after arrival."""

    def __init__(self, window: Window, rate: float, round_trip: float) -> None:
        self.window, self.rate, self.round_trip = window, rate, round_trip
        self.now = self.free = 0.0
        self.delivered = self.count = 0
        self.acks: list[tuple[float, int]] = []

    def send(self, size: int) -> None:
        self.free = max(self.free, self.now) + size / self.rate
        heapq.heappush(self.acks, (self.free + self.round_trip, self.count))
        self.window.sent(self.count, size, self.now)
        self.count += 1
        self.delivered += size

    def fill(self, part: Part) -> None:
        while room := self.window.room(part):
            self.send(room)

    def step(self) -> None:
        self.now, sequence = heapq.heappop(self.acks)
        assert self.window.acknowledged(sequence, self.now)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.fill(Part.RESIDUAL)
            self.step()

    @property
    def queue_seconds(self) -> float:
        """What an anchor that arrives now would wait for."""
        return max(0.0, self.free - self.now)


@given(
    rate=st.floats(20e6, 10e9),
    round_trip=st.floats(20e-6, 0.002),
)
@settings(max_examples=60, deadline=None)
def test_residuals_fill_the_link_and_an_anchor_waits_no_longer_than_allowed(rate, round_trip):
    link = Link(Window(WAIT, round_trip), rate, round_trip)
    link.run(0.5)
    before, started = link.delivered, link.now
    worst = 0.0
    until = link.now + 0.5
    while link.now < until:
        link.fill(Part.RESIDUAL)
        worst = max(worst, link.queue_seconds)
        link.step()
    # One fragment is the least that can be under way.
    assert worst <= max(WAIT + round_trip, FRAGMENT_BYTES / rate) * 1.02
    carried = (link.delivered - before) / (link.now - started)
    # Whole fragments only: on a slow link there may be no second one in time.
    under_way = max(1, int(rate * (WAIT + round_trip) / FRAGMENT_BYTES)) * FRAGMENT_BYTES
    assert carried >= 0.9 * min(rate, under_way / (FRAGMENT_BYTES / rate + round_trip))


def test_the_window_follows_a_rate_that_falls():
    link = Link(Window(WAIT), 1e9, 1e-4)
    link.run(0.5)
    assert link.queue_seconds <= WAIT
    link.rate = 125e6
    link.run(3.0)
    link.fill(Part.RESIDUAL)
    assert link.queue_seconds <= WAIT * 1.05


def test_an_anchor_has_room_when_residuals_have_none():
    window = Window(WAIT)
    sequence = 0
    while room := window.room(Part.RESIDUAL):
        window.sent(sequence, room, 0.0)
        sequence += 1
    assert window.room(Part.ANCHOR) >= FRAGMENT_BYTES
    while room := window.room(Part.ANCHOR):
        window.sent(sequence, room, 0.0)
        sequence += 1
    assert window.in_flight <= 2 * window.size


def test_many_small_messages_do_not_make_a_queue():
    window = Window(WAIT)
    sent = 0
    while window.room(Part.RESIDUAL):
        window.sent(sent, 1, 0.0)
        sent += 1
    assert sent == 64


def test_idle_time_does_not_change_the_rate():
    window = Window(WAIT)
    now = 0.0
    for i in range(50):
        window.sent(i, FRAGMENT_BYTES, now)
        assert window.acknowledged(i, now + 0.002)
        now += 0.05
    assert window.rate == pytest.approx(FRAGMENT_BYTES / 0.002)


def test_a_token_bucket_on_the_way_does_not_look_like_a_faster_link():
    # Now and then the link has a pause, and then carries what it saved up at once.
    window = Window(WAIT)
    rate, burst, now = 125e6, 512_000, 0.0
    for turn in range(2000):
        size = window.room(Part.RESIDUAL)
        window.sent(turn, size, now)
        now += size / rate if turn % 10 else max(1e-5, (size - burst) / rate)
        if turn % 10 == 9:
            now += burst / rate
        assert window.acknowledged(turn, now)
    assert window.rate <= 1.25 * rate
    assert window.size <= 1.25 * rate * WAIT


def test_a_round_trip_that_was_measured_too_long_is_corrected():
    link = Link(Window(WAIT, 0.5), 1e9, 1e-4)
    link.run(1.0)
    link.fill(Part.RESIDUAL)
    assert link.queue_seconds <= 2 * WAIT


def test_what_was_not_sent_cannot_be_acknowledged():
    window = Window(WAIT)
    window.sent(1, 10, 0.0)
    assert window.acknowledged(1, 1.0)
    assert not window.acknowledged(1, 1.0)
    assert not window.acknowledged(7, 1.0)
    assert window.in_flight == 0


def test_fragments_grow_with_the_link_but_not_for_ever():
    window = Window(WAIT)
    assert window.room(Part.RESIDUAL) == FRAGMENT_BYTES
    window.sent(0, 1 << 30, 0.0)
    window.acknowledged(0, 0.06)
    assert window.room(Part.RESIDUAL) == MOST_FRAGMENT_BYTES
    with pytest.raises(InvalidInputError, match="wait_seconds"):
        Window(0)
