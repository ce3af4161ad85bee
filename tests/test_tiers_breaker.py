"""When a breaker opens, what it then costs, and how it comes back."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from itertools import pairwise

import pytest

from lynx_backend.errors import (
    InvalidInputError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from lynx_backend.testing import BoundedTierConformance
from lynx_backend.testing.tiers import anchor
from lynx_backend.tiers import GuardedTier, MemoryTier
from lynx_backend.tiers.breaker import (
    FAILURES,
    LONGEST_PAUSE_SECONDS,
    PATIENCE_SECONDS,
    Breaker,
)


class TestGuardedTier(BoundedTierConformance):
    def make_tier(self, max_bytes: int) -> GuardedTier:
        return GuardedTier(MemoryTier(max_bytes))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def changes() -> list[bool]:
    return []


@pytest.fixture
def breaker(clock: Clock, changes: list[bool]) -> Breaker:
    return Breaker("reading from a test", changes.append, clock)


def fail(breaker: Breaker, clock: Clock, seconds: float = 0.0) -> None:
    def call() -> None:
        with breaker.call():
            clock.now += seconds
            raise TierError("no route")

    with pytest.raises(TierError, match="no route"):
        call()


def refused(breaker: Breaker) -> bool:
    try:
        with breaker.call():
            raise AssertionError("the call was made")
    except TierUnavailableError:
        return True


def test_opens_after_failures_in_a_row_and_closes_after_one_success(breaker, clock, changes):
    for _ in range(3):
        for _ in range(FAILURES - 1):
            fail(breaker, clock)
        with breaker.call():
            pass
    assert not breaker.is_open
    for _ in range(FAILURES):
        fail(breaker, clock)
    assert breaker.is_open
    assert refused(breaker)
    clock.now += 1.0
    with breaker.call():
        assert refused(breaker), "one call tries, the others do not wait for it"
    assert not breaker.is_open
    assert changes == [True, False]


def test_one_call_that_takes_long_is_enough(breaker, clock):
    fail(breaker, clock, seconds=PATIENCE_SECONDS)
    assert refused(breaker)


def test_the_pause_grows_to_a_limit_and_starts_anew(breaker, clock):
    fail(breaker, clock, seconds=2)
    pauses = []
    for _ in range(12):
        start = clock.now
        while refused_now(breaker):
            clock.now += 0.01
        pauses.append(clock.now - start)
        fail(breaker, clock)
    assert all(a < b for a, b in pairwise(pauses[:4]))
    assert LONGEST_PAUSE_SECONDS * 0.7 < pauses[-1] < LONGEST_PAUSE_SECONDS * 1.3
    clock.now += 2 * LONGEST_PAUSE_SECONDS
    with breaker.call():
        pass
    fail(breaker, clock, seconds=2)
    clock.now += 1.0
    assert not refused_now(breaker)


def refused_now(breaker: Breaker) -> bool:
    """Whether a call would be refused now; makes none."""
    assert breaker._open_until is not None
    return breaker._clock() < breaker._open_until


def test_what_no_tier_should_raise_is_a_failure_too(clock, caplog):
    """Such as the bug of a client library; not what is wrong with what a caller hands over."""
    breaker = Breaker("reading from a test of the unexpected", lambda _: None, clock)

    def unexpected() -> None:
        with pytest.raises(KeyError), breaker.call((TierFullError,)):
            raise KeyError("shard")

    with caplog.at_level(logging.WARNING):
        for _ in range(FAILURES):
            unexpected()
    assert refused(breaker)
    clock.now += 1.0
    unexpected()
    assert refused(breaker), "the call that tries must not close it"
    assert "KeyError('shard')" in caplog.text
    clock.now += 2.0
    with breaker.call():
        pass
    assert not breaker.is_open
    tier = GuardedTier(MemoryTier(1000))
    for _ in range(FAILURES):
        with pytest.raises(InvalidInputError):
            tier.put(anchor(0), b"")
    tier.put(anchor(0), b"x")


class Unexpected(MemoryTier):
    """One with a bug."""

    name = "unexpected"

    def sizes(self, names):
        return {}["shard"]


def test_what_no_tier_should_raise_leaves_a_guarded_one_as_tier_error():
    tier = GuardedTier(Unexpected(1000))
    for _ in range(FAILURES):
        with pytest.raises(TierError, match=r"unexpected .* KeyError\('shard'\)") as e:
            tier.sizes([anchor(0)])
        assert isinstance(e.value.__cause__, KeyError)
    with pytest.raises(TierUnavailableError):
        tier.sizes([anchor(0)])


def test_what_is_ignored_counts_as_an_answer(breaker, clock):
    for _ in range(FAILURES - 1):
        fail(breaker, clock)
    with pytest.raises(TierFullError), breaker.call((TierFullError,)):
        raise TierFullError("full")
    fail(breaker, clock)
    assert not breaker.is_open


def test_calls_under_way_when_it_opens_do_not_make_the_pause_longer(breaker, clock):
    ready, go = threading.Barrier(9), threading.Event()

    def call() -> None:
        with suppress(TierError), breaker.call():
            ready.wait(10)
            go.wait(10)
            raise TierError("no route")

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    ready.wait(10)
    go.set()
    for thread in threads:
        thread.join()
    assert breaker.is_open
    clock.now += 1.0
    assert not refused_now(breaker)


class Refusing(MemoryTier):
    """Answers reads and refuses writes, as a replica does."""

    name = "refusing"

    def put(self, name, data):
        raise TierFullError("maxmemory")


def test_a_tier_that_refuses_writes_is_still_read(caplog):
    registry = pytest.importorskip("prometheus_client").REGISTRY

    def shown() -> float | None:
        return registry.get_sample_value("lynx_breaker_open", {"tier": "refusing"})

    tier = GuardedTier(Refusing(1000), full_is_failure=True)
    assert shown() == 0
    with caplog.at_level(logging.WARNING):
        for _ in range(FAILURES):
            with pytest.raises(TierFullError):
                tier.put(anchor(0), b"x")
    with pytest.raises(TierUnavailableError, match="writing to tier refusing failed 3 times"):
        tier.put(anchor(0), b"x")
    assert tier.get(anchor(0)) is None
    tier.delete([anchor(0)])
    assert shown() == 1
    assert [r.getMessage() for r in caplog.records] == [
        "writing to tier refusing is paused: maxmemory"
    ]
    mild = GuardedTier(Refusing(1000))
    for _ in range(2 * FAILURES):
        with pytest.raises(TierFullError):
            mild.put(anchor(0), b"x")
