"""What every transport must do, as a pytest class to derive from."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import TypeVar

import pytest

from ..errors import InvalidInputError, TierError, TransportError
from ..keys import ChunkKey, ObjectName, Part
from ..transport import ObjectSource, Transport

WAIT_SECONDS = 30.0

Add = Callable[..., ObjectName]
HoldLink = Callable[[], threading.Event]
T = TypeVar("T")


class ScriptedSource:
    """An object source in memory that can be told to hold a reader up or to fail.

    Attributes:
        objects: what there is.
        broken: names whose reading raises TierError.
        held: names whose reading waits for the event.
        reading: names whose reading has begun, in order.
    """

    def __init__(self) -> None:
        self.objects: dict[ObjectName, bytes] = {}
        self.broken: set[ObjectName] = set()
        self.held: dict[ObjectName, threading.Event] = {}
        self.reading: list[ObjectName] = []
        self._begun = threading.Condition()

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        if self.broken.intersection(names):
            raise TierError("scripted failure")
        return [len(self.objects[n]) if n in self.objects else None for n in names]

    def get(self, name: ObjectName) -> memoryview | None:
        with self._begun:
            self.reading.append(name)
            self._begun.notify_all()
        if name in self.held:
            self.held[name].wait(WAIT_SECONDS)
        if name in self.broken:
            raise TierError("scripted failure")
        data = self.objects.get(name)
        return None if data is None else memoryview(data)

    def wait_until_read(self, name: ObjectName) -> None:
        """Return once somebody has begun to read ``name``."""
        with self._begun:
            assert self._begun.wait_for(lambda: name in self.reading, WAIT_SECONDS)


def note_in(notes: list[T], what: T) -> Callable[[Future[bool]], None]:
    """A callback for a future that notes its end."""
    return lambda _: notes.append(what)


class TransportConformance:
    """Derive from this, name the class ``Test...``, and implement :meth:`connect`.

    ``window`` is the most bytes of residuals that may be under way when an anchor arrives.
    """

    window: int = 1 << 20

    def connect(self, source: ObjectSource) -> Transport:
        """A new transport that brings objects from ``source``, as fast as it can."""
        raise NotImplementedError

    @pytest.fixture
    def source(self) -> Iterator[ScriptedSource]:
        made = ScriptedSource()
        yield made
        for event in made.held.values():
            event.set()

    @pytest.fixture
    def transport(self, source: ScriptedSource) -> Iterator[Transport]:
        made = self.connect(source)
        yield made
        made.close()

    @pytest.fixture
    def add(self, source: ScriptedSource) -> Add:
        rng = random.Random(7)

        def add(size: int, part: Part = Part.ANCHOR) -> ObjectName:
            key = ChunkKey(bytes(16), len(source.objects).to_bytes(16, "little"))
            source.objects[key.object(part)] = rng.randbytes(size)
            return key.object(part)

        return add

    @pytest.fixture
    def hold_link(self, source: ScriptedSource, transport: Transport, add: Add) -> HoldLink:
        """Keeps the sender busy until the returned event is set, so that a queue builds up."""

        def hold() -> threading.Event:
            plug = add(10)
            source.held[plug] = threading.Event()
            transport.fetch("plug", plug, memoryview(bytearray(10)))
            source.wait_until_read(plug)
            return source.held[plug]

        return hold

    # -- lookups

    def test_sizes_come_in_the_order_of_the_names(self, transport: Transport, add: Add) -> None:
        a, b = add(3), add(70_000, Part.RESIDUAL)
        absent = b.key.object(Part.ANCHOR)
        assert transport.sizes([b, absent, a, b]) == [70_000, None, 3, 70_000]
        assert transport.sizes([]) == []

    def test_a_failed_lookup_is_a_transport_error(
        self, transport: Transport, source: ScriptedSource, add: Add
    ) -> None:
        bad, good = add(3), add(4)
        source.broken.add(bad)
        with pytest.raises(TransportError):
            transport.sizes([bad])
        assert transport.sizes([good]) == [4]

    # -- bytes

    @pytest.mark.parametrize("size", [1, 255, 256 * 1024, 256 * 1024 + 1, 3_000_001])
    @pytest.mark.parametrize("part", list(Part))
    def test_brings_exactly_the_object_and_touches_nothing_else(
        self, transport: Transport, source: ScriptedSource, add: Add, size: int, part: Part
    ) -> None:
        name = add(size, part)
        memory = bytearray(b"\xa5" * (size + 64))
        future = transport.fetch("r", name, memoryview(memory)[32 : 32 + size])
        assert future.result(WAIT_SECONDS) is True
        assert memory == b"\xa5" * 32 + source.objects[name] + b"\xa5" * 32

    def test_an_absent_object_is_false(self, transport: Transport, add: Add) -> None:
        absent = add(10).key.object(Part.RESIDUAL)
        assert transport.fetch("r", absent, memoryview(bytearray(10))).result(WAIT_SECONDS) is False

    @pytest.mark.parametrize("size", [9, 11])
    def test_another_size_than_the_buffers_is_false(
        self, transport: Transport, add: Add, size: int
    ) -> None:
        name = add(10)
        assert transport.fetch("r", name, memoryview(bytearray(size))).result(WAIT_SECONDS) is False

    def test_an_object_can_be_fetched_again_and_by_two_requests_at_once(
        self, transport: Transport, source: ScriptedSource, add: Add
    ) -> None:
        name = add(1_000_000)
        for _ in range(2):
            outs = [bytearray(1_000_000) for _ in range(2)]
            futures = [transport.fetch(f"r{i}", name, memoryview(o)) for i, o in enumerate(outs)]
            assert all(f.result(WAIT_SECONDS) for f in futures)
            assert all(o == source.objects[name] for o in outs)

    def test_many_threads_get_their_own_bytes(
        self, transport: Transport, source: ScriptedSource, add: Add
    ) -> None:
        names = [add(20_000 + i, Part(i % 2)) for i in range(64)]
        outs = {n: bytearray(len(source.objects[n])) for n in names}
        futures: list[Future[bool]] = []

        def work(mine: list[ObjectName], request: str) -> None:
            futures.extend([transport.fetch(request, n, memoryview(outs[n])) for n in mine])

        threads = [threading.Thread(target=work, args=(names[i::8], f"r{i}")) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(futures) == len(names)
        assert all(f.result(WAIT_SECONDS) for f in futures)
        assert all(outs[n] == source.objects[n] for n in names)

    # -- order

    def test_anchors_of_all_requests_come_before_residuals_of_any(
        self, transport: Transport, source: ScriptedSource, add: Add, hold_link: HoldLink
    ) -> None:
        release = hold_link()
        finished: list[ObjectName] = []
        futures = []
        size = self.window + 1
        for part in (Part.RESIDUAL, Part.ANCHOR):
            for request in ("a", "b", "c"):
                name = add(size, part)
                future = transport.fetch(request, name, memoryview(bytearray(size)))
                future.add_done_callback(note_in(finished, name))
                futures.append(future)
        release.set()
        assert all(f.result(WAIT_SECONDS) for f in futures)
        assert [n.part for n in finished] == [Part.ANCHOR] * 3 + [Part.RESIDUAL] * 3

    def test_a_short_request_overtakes_a_long_one(
        self, transport: Transport, source: ScriptedSource, add: Add, hold_link: HoldLink
    ) -> None:
        release = hold_link()
        size = 2 * self.window
        finished: list[str] = []
        futures = []
        for request, count in (("long", 6), ("short", 1)):
            for _ in range(count):
                future = transport.fetch(request, add(size), memoryview(bytearray(size)))
                future.add_done_callback(note_in(finished, request))
                futures.append(future)
        release.set()
        assert all(f.result(WAIT_SECONDS) for f in futures)
        assert finished.index("short") <= 2

    # -- giving up

    def test_cancel_ends_the_requests_fetches_and_leaves_the_others(
        self, transport: Transport, source: ScriptedSource, add: Add, hold_link: HoldLink
    ) -> None:
        release = hold_link()
        mine, other = [add(50_000, part) for part in Part], add(50_000)
        outs = [bytearray(50_000) for _ in mine]
        cancelled = [
            transport.fetch("mine", n, memoryview(o)) for n, o in zip(mine, outs, strict=True)
        ]
        kept_out = bytearray(50_000)
        kept = transport.fetch("other", other, memoryview(kept_out))
        transport.cancel("mine")
        assert not wait(cancelled, WAIT_SECONDS).not_done
        for future in cancelled:
            assert future.cancelled()
            with pytest.raises(CancelledError):
                future.result(0)
        release.set()
        assert kept.result(WAIT_SECONDS) is True
        assert kept_out == source.objects[other]
        assert all(o == bytes(50_000) for o in outs)
        transport.cancel("mine")
        transport.cancel("never seen")

    def test_a_cancelled_request_may_fetch_the_same_again(
        self, transport: Transport, source: ScriptedSource, add: Add, hold_link: HoldLink
    ) -> None:
        release = hold_link()
        name = add(600_000)
        first, second = bytearray(600_000), bytearray(600_000)
        transport.fetch("r", name, memoryview(first))
        transport.cancel("r")
        future = transport.fetch("r", name, memoryview(second))
        release.set()
        assert future.result(WAIT_SECONDS) is True
        assert second == source.objects[name]
        assert first == bytes(600_000)

    def test_one_future_can_be_cancelled(
        self, transport: Transport, source: ScriptedSource, add: Add, hold_link: HoldLink
    ) -> None:
        release = hold_link()
        names = [add(1000), add(1000)]
        outs = [bytearray(1000), bytearray(1000)]
        gone, kept = (
            transport.fetch("r", n, memoryview(o)) for n, o in zip(names, outs, strict=True)
        )
        assert gone.cancel()
        assert not wait([gone], WAIT_SECONDS).not_done
        release.set()
        assert kept.result(WAIT_SECONDS) is True
        assert outs == [bytes(1000), source.objects[names[1]]]

    def test_a_buffer_is_never_written_after_its_future_has_ended(
        self, transport: Transport, source: ScriptedSource, add: Add
    ) -> None:
        # Cancelled at many different moments of a transfer, the buffer belongs to somebody else:
        # what is put there must still be there when the link has done much more.
        size = 4 * self.window
        name, after = add(size), add(self.window)
        for turn in range(20):
            out = bytearray(size)
            future = transport.fetch("r", name, memoryview(out))
            watched = slice((turn - 1) * size // 20, (turn - 1) * size // 20 + 64)
            while turn and not any(out[watched]) and not future.done():
                pass
            transport.cancel("r")
            assert not wait([future], WAIT_SECONDS).not_done
            out[:] = bytes(size)
            done = transport.fetch("next", after, memoryview(bytearray(self.window)))
            assert done.result(WAIT_SECONDS) is True
            assert not any(out), f"written after the end (turn {turn})"

    # -- failing

    def test_a_failing_read_fails_its_own_future_only(
        self, transport: Transport, source: ScriptedSource, add: Add
    ) -> None:
        bad, good = add(10), add(10)
        source.broken.add(bad)
        failed = transport.fetch("r", bad, memoryview(bytearray(10)))
        fine = transport.fetch("r", good, memoryview(bytearray(10)))
        with pytest.raises(TransportError):
            failed.result(WAIT_SECONDS)
        assert fine.result(WAIT_SECONDS) is True
        source.broken.clear()
        assert transport.fetch("r", bad, memoryview(bytearray(10))).result(WAIT_SECONDS) is True

    def test_a_buffer_that_cannot_be_written_is_refused(
        self, transport: Transport, add: Add
    ) -> None:
        name = add(10)
        with pytest.raises(InvalidInputError, match="writable"):
            transport.fetch("r", name, memoryview(bytes(10)))
        with pytest.raises(InvalidInputError, match="contiguous"):
            transport.fetch("r", name, memoryview(bytearray(20))[::2])

    def test_fetching_the_same_twice_in_one_request_is_refused(
        self, transport: Transport, add: Add, hold_link: HoldLink
    ) -> None:
        release = hold_link()
        name = add(10)
        first = transport.fetch("r", name, memoryview(bytearray(10)))
        with pytest.raises(InvalidInputError):
            transport.fetch("r", name, memoryview(bytearray(10)))
        release.set()
        assert first.result(WAIT_SECONDS) is True

    # -- closing

    def test_close_fails_what_is_unfinished_and_everything_after(
        self, source: ScriptedSource, transport: Transport, add: Add, hold_link: HoldLink
    ) -> None:
        release = hold_link()
        outs = [bytearray(50_000) for _ in range(4)]
        futures = [
            transport.fetch(f"r{i}", add(50_000, Part(i % 2)), memoryview(o))
            for i, o in enumerate(outs)
        ]
        closer = threading.Thread(target=transport.close)
        closer.start()
        for future in futures:
            with pytest.raises(TransportError):
                future.result(WAIT_SECONDS)
        release.set()
        closer.join(WAIT_SECONDS)
        assert not closer.is_alive()
        assert all(o == bytes(50_000) for o in outs)
        transport.close()
        with pytest.raises(TransportError):
            transport.sizes([])
        with pytest.raises(TransportError):
            transport.fetch("r", add(10), memoryview(bytearray(10)))
