import random
import threading
import time
from concurrent.futures import Future, wait
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lynx_backend.errors import InvalidInputError, TransportError
from lynx_backend.keys import ChunkKey, ObjectName, Part
from lynx_backend.testing import ScriptedSource, TransportConformance
from lynx_backend.transport.local import LocalTransport
from lynx_backend.transport.pacing import CATCH_UP_SECONDS, Pacer

FRAGMENT = 16 * 1024


def name(i: int, part: Part = Part.ANCHOR) -> ObjectName:
    return ChunkKey(bytes(16), i.to_bytes(16, "little")).object(part)


class TestUnlimited(TransportConformance):
    def connect(self, source):
        return LocalTransport(source)


class TestPaced(TransportConformance):
    window = 64 * 1024

    def connect(self, source):
        return LocalTransport(source, bytes_per_second=40e6, fragment_bytes=FRAGMENT)


# -- the rate, without a clock


@given(
    rate=st.floats(1e5, 5e9),
    delays=st.lists(st.floats(0, CATCH_UP_SECONDS * 0.99), min_size=1, max_size=50),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_thread_that_wakes_late_keeps_the_rate_and_never_exceeds_it(rate, delays):
    size = max(1, int(rate / 1000))
    pacer = Pacer(rate, burst_bytes=1)
    pacer.resume(100.0)
    now, sent, late = 100.0, 0, 0
    while sent < rate:
        arrives = pacer.send(size, now)
        sent += size
        assert arrives == pytest.approx(100.0 + sent / rate, abs=1e-6)
        if arrives > now:
            now = arrives + delays[late % len(delays)]
            late += 1
    assert late


def test_idle_time_earns_nothing():
    pacer = Pacer(1000.0, burst_bytes=100)
    pacer.resume(0.0)
    assert pacer.send(500, 0.0) == 0.5
    pacer.resume(10.0)
    assert pacer.send(500, 10.0) == 10.5
    pacer.resume(10.2)  # before what was sent has arrived
    assert pacer.send(500, 10.2) == 11.0


def test_what_is_made_up_for_is_bounded():
    pacer = Pacer(1000.0, burst_bytes=100)
    pacer.resume(0.0)
    sent = 0
    while pacer.send(10, now=5.0) <= 5.0:
        sent += 10
    assert sent <= 100


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf")])
def test_a_rate_must_be_positive_and_finite(rate):
    with pytest.raises(InvalidInputError, match="bytes_per_second"):
        LocalTransport(ScriptedSource(), bytes_per_second=rate)


# -- the rate, with the real one


def test_the_real_link_is_never_faster_than_its_rate():
    source = ScriptedSource()
    rate, size = 20e6, 500_000
    for i in range(4):
        source.objects[name(i)] = bytes(size)
    link = LocalTransport(source, rate, fragment_bytes=size // 2)
    arrived: list[float] = []
    started = time.monotonic()
    futures: list[Future[bool]] = []
    for i in range(4):
        futures.append(link.fetch("r", name(i), memoryview(bytearray(size))))
        futures[-1].add_done_callback(lambda _: arrived.append(time.monotonic()))
    wait(futures, 30)
    link.close()
    assert len(arrived) == 4
    for i, when in enumerate(arrived):
        assert when - started >= (i + 1) * size / rate


# -- the thread


def test_close_does_not_wait_for_a_slow_link():
    source = ScriptedSource()
    source.objects[name(0)] = bytes(10_000)
    link = LocalTransport(source, bytes_per_second=1.0)
    future = link.fetch("r", name(0), memoryview(bytearray(10_000)))
    source.wait_until_read(name(0))
    link.close()
    with pytest.raises(TransportError, match="closed"):
        future.result(0)
    assert not any(t.name == "lynx-local-link" and t.is_alive() for t in threading.enumerate())


def test_cancelling_does_not_wait_for_a_slow_link():
    source = ScriptedSource()
    source.objects[name(0)] = source.objects[name(1)] = bytes(10_000)
    link = LocalTransport(source, bytes_per_second=1.0)
    future = link.fetch("r", name(0), memoryview(bytearray(10_000)))
    source.wait_until_read(name(0))
    link.cancel("r")
    assert future.cancelled()
    link.close()


def test_a_source_that_breaks_in_an_unforeseen_way_does_not_stop_the_link():
    class Odd(ScriptedSource):
        def get(self, wanted):
            if wanted == name(0):
                raise ZeroDivisionError("a bug")
            return super().get(wanted)

    source = Odd()
    source.objects[name(1)] = b"fine"
    link = LocalTransport(source)
    with pytest.raises(TransportError, match="a bug"):
        link.fetch("r", name(0), memoryview(bytearray(4))).result(30)
    out = bytearray(4)
    assert link.fetch("r", name(1), memoryview(out)).result(30)
    assert out == b"fine"
    link.close()


def test_a_callback_may_use_and_close_the_link():
    source = ScriptedSource()
    source.objects[name(0)] = source.objects[name(1)] = b"data"
    link = LocalTransport(source)
    second: list[Future[bool]] = []
    closed = threading.Event()

    def then(_: Future[bool]) -> None:
        second.append(link.fetch("r", name(1), memoryview(bytearray(4))))
        link.close()
        closed.set()

    link.fetch("r", name(0), memoryview(bytearray(4))).add_done_callback(then)
    assert closed.wait(30)
    with pytest.raises(TransportError):
        second[0].result(30)


def test_ends_of_one_future_may_race():
    # finish, Future.cancel, cancel(request) and close from different threads: each future ends
    # once, whichever comes first, and nobody hangs.
    rng = random.Random(3)
    source = ScriptedSource()
    for i in range(8):
        source.objects[name(i, Part(i % 2))] = bytes(3 * FRAGMENT)
    for _ in range(30):
        link = LocalTransport(source, fragment_bytes=FRAGMENT)
        futures = [
            link.fetch("r", name(i, Part(i % 2)), memoryview(bytearray(3 * FRAGMENT)))
            for i in range(8)
        ]
        actions = [*(f.cancel for f in futures), partial(link.cancel, "r"), link.close]
        rng.shuffle(actions)
        threads = [threading.Thread(target=a) for a in actions]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        assert not wait(futures, 30).not_done
        assert not any(t.is_alive() for t in threads)
