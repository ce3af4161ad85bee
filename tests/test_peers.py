"""Peers as a tier, with real nodes in this process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress

import pytest

pytest.importorskip("ucxx", reason="the UCX transport needs ucxx")

from lynx_backend.errors import ConfigError
from lynx_backend.keys import ChunkKey, ObjectName, Part
from lynx_backend.peers import PeerTier, named
from lynx_backend.transport.client import UcxTransport
from lynx_backend.transport.greeting import LinkOptions
from lynx_backend.transport.member import Member
from lynx_backend.transport.server import UcxServer

WAIT_SECONDS = 30.0
SIZE = 1000
NAMES = [ChunkKey(bytes(16), bytes([i]) * 16).object(Part.ANCHOR) for i in range(4)]


class Source:
    """Has every object but those ``gone``; answers when it may."""

    def __init__(self, size: int = SIZE, gone: Sequence[ObjectName] = ()) -> None:
        self.size, self.gone = size, set(gone)
        self.lookups, self.reads = threading.Event(), threading.Event()
        self.lookups.set()
        self.reads.set()
        self.asked = 0

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        self.asked += 1
        assert self.lookups.wait(WAIT_SECONDS)
        return [None if name in self.gone else self.size for name in names]

    def get(self, name: ObjectName) -> memoryview | None:
        assert self.reads.wait(WAIT_SECONDS)
        if name in self.gone:
            return None
        return memoryview(name.key.prefix[:1] * self.size)


def eventually(check: Callable[[], object]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not check():
        assert time.monotonic() < until
        time.sleep(0.005)


Connect = Callable[..., PeerTier]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """A tier that is connected to a node for each source."""
    ends: list[PeerTier | UcxServer] = []
    gates: list[Source] = []

    def connect(
        *sources: Source, seconds: float = WAIT_SECONDS, options: LinkOptions | None = None
    ) -> PeerTier:
        gates.extend(sources)
        servers = [UcxServer(source) for source in sources]
        tier = PeerTier(options or LinkOptions(), seconds)
        ends.extend([tier, *servers])
        tier.update(named(",".join("{}:{}".format(*server.address) for server in servers)))
        eventually(lambda: len(tier.connected) == len(sources))
        return tier

    yield connect
    for gate in gates:
        gate.lookups.set()
        gate.reads.set()
    for end in ends:
        end.close()


def test_objects_come_from_a_peer(connect: Connect):
    tier = connect(Source())
    assert tier.sizes([*NAMES, NAMES[0]]) == [SIZE] * 5
    assert tier.get_many([*NAMES, NAMES[0]]) == [bytes([i]) * SIZE for i in (0, 1, 2, 3, 0)]


def test_a_peer_that_gives_nothing_in_time_is_one_wait_and_misses(connect: Connect):
    source = Source()
    source.reads.clear()
    tier = connect(source, seconds=1.0)
    started = time.monotonic()
    assert tier.get_many(NAMES) == [None] * 4
    assert 1.0 <= time.monotonic() - started < 3.0
    source.reads.set()
    eventually(lambda: tier.get(NAMES[1]) == bytes([1]) * SIZE)


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is paused stays so for the rest of a test."""
    monkeypatch.setattr("lynx_backend.tiers.breaker.FIRST_PAUSE_SECONDS", 1e6)


@pytest.mark.usefixtures("pause")
def test_a_peer_that_gives_nothing_is_left_alone_and_others_are_not(connect: Connect):
    hanging, other = Source(), Source(gone=NAMES)
    hanging.reads.clear()
    tier = connect(hanging, other, seconds=1.0)
    assert tier.get_many(NAMES) == [None] * 4
    asked = hanging.asked
    other.gone = set()
    assert tier.get_many(NAMES) == [bytes([i]) * SIZE for i in range(4)]
    other.gone = set(NAMES)
    assert tier.get_many(NAMES) == [None] * 4
    assert tier.sizes(NAMES) == [None] * 4
    assert hanging.asked == asked


@pytest.mark.usefixtures("pause")
def test_a_peer_that_gives_a_request_nothing_is_left_alone(connect: Connect):
    source = Source()
    source.reads.clear()
    tier = connect(source, seconds=1.0)
    assert tier.sizes(NAMES) == [SIZE] * 4
    future = tier.fetch("r", NAMES[0], memoryview(bytearray(SIZE)))
    assert future is not None
    assert wait([future], timeout=1.1).not_done
    tier.cancel("r")
    assert wait([future], timeout=WAIT_SECONDS).done
    eventually(lambda: tier.sizes(NAMES) == [None] * 4)
    assert tier.fetch("r", NAMES[0], memoryview(bytearray(SIZE))) is None


@pytest.mark.usefixtures("pause")
def test_a_peer_that_answers_no_lookup_is_left_alone(connect: Connect):
    source = Source()
    source.lookups.clear()
    tier = connect(source, options=LinkOptions(timeout_seconds=1.0))
    assert tier.get(NAMES[0]) is None
    assert source.asked == 1
    source.lookups.set()
    assert tier.get(NAMES[0]) is None
    assert source.asked == 1


def test_a_connection_that_is_lost_again_and_again_is_made_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
):
    times: list[float] = []
    connect = UcxTransport.connect

    def lost(self: UcxTransport) -> None:
        times.append(time.monotonic())
        connect(self)
        self.abort()

    server = UcxServer(Source())
    monkeypatch.setattr("lynx_backend.kept_peer._FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(UcxTransport, "connect", lost)
    tier = PeerTier(LinkOptions(), 1.0)
    tier.update(named("{}:{}".format(*server.address)))
    eventually(lambda: len(times) > 5)
    tier.close()
    server.close()
    for i in range(5):
        assert times[i + 1] - times[i] >= 0.01 * 2**i


def test_who_fetches_is_not_disturbed_by_who_looks_up(connect: Connect):
    source = Source()
    tier = connect(source)
    assert tier.sizes(NAMES) == [SIZE] * 4
    source.lookups.clear()
    asking = threading.Thread(target=tier.sizes, args=(NAMES,))
    asking.start()
    eventually(lambda: source.asked == 2)
    out = bytearray(SIZE)
    future = tier.fetch("another", NAMES[2], memoryview(out))
    assert future is not None
    assert future.result(WAIT_SECONDS)
    assert out == bytes([2]) * SIZE
    source.lookups.set()
    asking.join(WAIT_SECONDS)
    assert tier.fetch("another", NAMES[2], memoryview(out)) is not None


def test_what_no_peer_has_any_more_is_forgotten(connect: Connect):
    source = Source()
    tier = connect(source)
    assert tier.sizes(NAMES[:1]) == [SIZE]
    source.sizes = lambda names: [None] * len(names)  # type: ignore[method-assign]
    assert tier.sizes(NAMES[:1]) == [None]
    assert tier.fetch("r", NAMES[0], memoryview(bytearray(SIZE))) is None


def test_what_its_holder_has_no_more_comes_from_another_peer(connect: Connect):
    first, second = Source(), Source(gone=NAMES)
    tier = connect(first, second)
    assert tier.sizes(NAMES) == [SIZE] * 4
    first.gone, second.gone = set(NAMES), set()
    assert tier.get_many(NAMES) == [bytes([i]) * SIZE for i in range(4)]
    second.gone = set(NAMES)
    assert tier.get_many(NAMES) == [None] * 4
    first.gone = set()
    assert tier.get_many(NAMES) == [bytes([i]) * SIZE for i in range(4)]


def test_what_its_holder_has_again_at_another_size_is_found(connect: Connect):
    source = Source()
    tier = connect(source)
    assert tier.get(NAMES[1]) == bytes([1]) * SIZE
    source.size = 2 * SIZE
    assert tier.get(NAMES[1]) == bytes([1]) * 2 * SIZE


def test_a_size_beyond_what_is_taken_is_no_object(connect: Connect):
    tier = connect(Source(size=2**62))
    assert tier.sizes(NAMES[:1]) == [None]
    assert tier.get_many(NAMES[:1]) == [None]
    # Another peer may have it as it is.
    both = connect(Source(size=2**62), Source())
    assert both.get_many(NAMES[:1]) == [bytes([0]) * SIZE]


@pytest.mark.parametrize("host", ["10.0.0.2", "kv-3.internal", "::1", "fe80::1%eth0"])
def test_an_address_is_read_as_it_is_written(host: str):
    member = Member(host, 7430)
    assert named(f" {member.address}, a:1") == [member, Member("a", 1)]


@pytest.mark.parametrize(
    "text", ["fe80::1", "::1:7430", "[::1]", "[::1:7430", "::1]:7430", "a", "a:0", "a:65536", ":1"]
)
def test_what_is_no_address_is_an_error(text: str):
    with pytest.raises(ConfigError, match=r"peers\.nodes: .* write host:port, or \[address\]"):
        named(text)


def test_a_peer_named_twice_is_one(connect: Connect):
    (member,) = connect(Source()).connected

    def links() -> int:
        return sum(t.name == f"lynx-ucx-{member.host}:{member.port}" for t in threading.enumerate())

    before = links()
    tier = PeerTier(LinkOptions(), 1.0)
    tier.update([member, member])
    assert links() == before + 1
    tier.close()
    eventually(lambda: links() == before)


@pytest.mark.parametrize("by", ["update", "close"])
def test_peers_are_closed_all_at_once(by: str, monkeypatch: pytest.MonkeyPatch):
    all_of_them = threading.Barrier(3)
    close = UcxTransport.close
    met: list[int] = []

    def together(self: UcxTransport) -> None:
        with suppress(threading.BrokenBarrierError):
            met.append(all_of_them.wait(5.0))
        close(self)

    monkeypatch.setattr(UcxTransport, "close", together)
    tier = PeerTier(LinkOptions(), 1.0)
    tier.update(named("127.0.0.1:1,127.0.0.1:2,127.0.0.1:3"))
    if by == "update":
        tier.update([])
    tier.close()
    assert sorted(met) == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_after_a_fork_everything_is_a_miss_at_once(connect: Connect):
    tier = connect(Source())
    assert tier.sizes(NAMES) == [SIZE] * 4
    child = os.fork()
    if not child:
        status = 1
        with suppress(BaseException):
            signal.alarm(int(WAIT_SECONDS))
            missed = tier.get_many(NAMES) == tier.sizes(NAMES) == [None] * 4
            fetched = tier.fetch("r", NAMES[0], memoryview(bytearray(SIZE)))
            tier.cancel("r")
            tier.close()
            status = int(not missed or fetched is not None)
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert tier.get_many(NAMES) == [bytes([i]) * SIZE for i in range(4)]


def test_whatever_goes_wrong_connecting_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    tries: list[str] = []

    def failing(self: UcxTransport) -> None:
        tries.append(self.host)
        raise MemoryError("whatever it may be")

    tier = PeerTier(LinkOptions(), 1.0)
    monkeypatch.setattr("lynx_backend.kept_peer._FIRST_RETRY_SECONDS", 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(UcxTransport, "connect", failing)
        tier.update(named("127.0.0.1:1"))
        eventually(lambda: len(tries) > 2)
    tier.close()
