"""The queue before a slow tier: bounded, in order, and never in anybody's way."""

from __future__ import annotations

import threading

import pytest

from lynx_backend.errors import InvalidInputError
from lynx_backend.testing.tiers import anchor, chunk
from lynx_backend.tiers.write_behind import WriteBehind

WAIT = 20.0


@pytest.fixture
def queue():
    queue = WriteBehind("test", 100, workers=1)
    yield queue
    queue.close(WAIT)


@pytest.fixture
def hold(queue: WriteBehind):
    """Keeps the one worker busy with 10 bytes of chunk 99 until the event is set."""
    begun, release = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        release.wait(WAIT)

    assert queue.submit([anchor(99)], 10, run)
    assert begun.wait(WAIT)
    yield release
    release.set()


def test_jobs_run_in_order(queue, hold):
    ran: list[int] = []
    for i in range(5):
        assert queue.submit([anchor(i)], 1, lambda i=i: ran.append(i))
    assert not queue.flush(0)
    hold.set()
    assert queue.flush(WAIT)
    assert ran == [0, 1, 2, 3, 4]
    assert queue.bytes == 0


def test_what_does_not_fit_is_refused_at_once(queue, hold):
    assert queue.submit([anchor(0)], 90, lambda: None)
    assert not queue.submit([anchor(1)], 1, lambda: None)
    hold.set()
    assert queue.flush(WAIT)
    assert queue.submit([anchor(1)], 100, lambda: None)
    assert not queue.submit([anchor(2)], 101, lambda: None)


def test_one_unfinished_job_for_the_same_objects(queue, hold):
    ran: list[str] = []
    assert queue.submit([anchor(99)], 50, lambda: ran.append("again"))
    assert queue.submit([anchor(0)], 50, lambda: ran.append("first"))
    assert queue.submit([anchor(0)], 50, lambda: ran.append("second"))
    assert queue.bytes == 60
    hold.set()
    assert queue.flush(WAIT)
    assert ran == ["first"]


def test_discarded_jobs_do_not_run_and_running_ones_are_waited_for(queue, hold):
    ran: list[int] = []
    for i in range(4):
        queue.submit([anchor(i)], 10, lambda i=i: ran.append(i))
    queue.discard([chunk(1), chunk(3)])
    assert queue.bytes == 30
    waiter = threading.Thread(target=queue.discard, args=([chunk(99)],))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    hold.set()
    waiter.join(WAIT)
    assert not waiter.is_alive()
    assert queue.flush(WAIT)
    assert ran == [0, 2]


def test_a_job_that_raises_does_not_stop_the_next(queue, caplog):
    ran: list[int] = []
    queue.submit([anchor(0)], 10, lambda: 1 / 0)
    queue.submit([anchor(1)], 10, lambda: ran.append(1))
    assert queue.flush(WAIT)
    assert ran == [1]
    assert queue.bytes == 0
    assert "ZeroDivisionError" in caplog.text


def test_close_finishes_what_it_can_in_its_time(queue, hold):
    ran: list[int] = []
    queue.submit([anchor(0)], 10, lambda: ran.append(0))
    assert queue.close(0.01) == 1
    assert not queue.submit([anchor(1)], 1, lambda: None)
    hold.set()
    assert queue.flush(WAIT)
    assert ran == []


def test_two_workers_run_two_chunks_at_once():
    queue = WriteBehind("test", 100, workers=2)
    both = threading.Barrier(2)
    for i in range(2):
        queue.submit([anchor(i)], 1, lambda: both.wait(WAIT))
    assert queue.flush(WAIT)
    assert not both.broken
    assert queue.close(WAIT) == 0


@pytest.mark.parametrize(("size", "workers"), [(0, 1), (1, 0)])
def test_limits_below_one_are_refused(size, workers):
    with pytest.raises(InvalidInputError):
        WriteBehind("test", size, workers)


def test_a_job_that_will_not_run_is_told(queue, hold):
    told: list[str] = []

    def submit(i: int, name: str) -> bool:
        ran, dropped = (lambda: told.append("ran")), (lambda: told.append(name))
        return queue.submit([anchor(i)], 1, ran, dropped=dropped)

    for i, name in enumerate(("discarded", "twice", "closed")):
        assert submit(i, name)
    assert submit(1, "again")
    assert told == ["again"]
    queue.discard([chunk(0)])
    assert told == ["again", "discarded"]
    assert queue.close(0) == 2
    assert sorted(told[2:]) == ["closed", "twice"]
    assert not submit(5, "refused")
    assert len(told) == 4


def test_close_ends_the_threads():
    before = threading.active_count()
    queue = WriteBehind("ending", 100, workers=2)
    for i in range(4):
        queue.submit([anchor(i)], 1, lambda: None)
    assert threading.active_count() > before
    assert queue.close(WAIT) == 0
    assert threading.active_count() == before
