from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace

import pytest

pytest.importorskip("ucxx", reason="the UCX transport needs ucxx")

from lynx_backend import logs, metrics
from lynx_backend.errors import TierError, TransportError
from lynx_backend.keys import ChunkKey, ObjectName, Part
from lynx_backend.testing.transport import WAIT_SECONDS, ScriptedSource, TransportConformance
from lynx_backend.transport import ObjectSource, Transport, protocol
from lynx_backend.transport.client import UcxTransport
from lynx_backend.transport.greeting import LinkOptions, greet
from lynx_backend.transport.loop import LoopThread
from lynx_backend.transport.protocol import Kind, Piece, Request, Terms
from lynx_backend.transport.server import UcxServer
from lynx_backend.transport.stream import FrameStream
from lynx_backend.transport.ucx import Channel

QUICK = LinkOptions(timeout_seconds=2.0)


class TestUcxTransport(TransportConformance):
    window = 4 << 20

    @pytest.fixture(autouse=True)
    def _servers(self) -> Iterator[None]:
        self.servers: list[UcxServer] = []
        yield
        for server in self.servers:
            server.close()

    def connect(self, source: ObjectSource) -> Transport:
        server = UcxServer(source)
        self.servers.append(server)
        transport = UcxTransport(*server.address)
        transport.connect()
        return transport


# -- life


def name(i: int, part: Part = Part.ANCHOR) -> ObjectName:
    return ChunkKey(bytes(16), i.to_bytes(16, "little")).object(part)


@pytest.fixture
def source() -> Iterator[ScriptedSource]:
    made = ScriptedSource()
    made.objects[name(0)] = b"data"
    yield made
    for event in made.held.values():
        event.set()


Serve = Callable[..., UcxServer]
Connect = Callable[..., UcxTransport]


@pytest.fixture
def serve(source: ScriptedSource) -> Iterator[Serve]:
    made: list[UcxServer] = []

    def serve(**options: object) -> UcxServer:
        made.append(UcxServer(source, **options))
        return made[-1]

    yield serve
    for server in made:
        server.close()


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[UcxTransport] = []

    def connect(server: UcxServer, options: LinkOptions | None = None) -> UcxTransport:
        made.append(UcxTransport(*server.address, options))
        made[-1].connect()
        return made[-1]

    yield connect
    for transport in made:
        transport.close()


def fetched(transport: UcxTransport, wanted: ObjectName, size: int) -> bytes:
    out = bytearray(size)
    assert transport.fetch("r", wanted, memoryview(out)).result(WAIT_SECONDS)
    return bytes(out)


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_unconnected_it_fails_at_once_and_connects_when_told_to(serve: Serve):
    server = serve()
    transport = UcxTransport(*server.address)
    assert not transport.connected
    assert transport.node is None
    with pytest.raises(TransportError, match="not connected"):
        transport.sizes([name(0)])
    with pytest.raises(TransportError, match="not connected"):
        transport.fetch("r", name(0), memoryview(bytearray(4))).result(WAIT_SECONDS)
    transport.connect()
    transport.connect()
    assert transport.connected
    assert transport.node == server.node
    assert fetched(transport, name(0), 4) == b"data"
    transport.close()


def test_what_is_sent_is_counted_apart_from_what_is_got(serve: Serve, connect: Connect):
    def sent() -> list[dict[str, int]]:
        return [
            metrics.counts("lynx_bytes_total", "tier", part="anchor", direction="out"),
            metrics.counts("lynx_objects_total", "tier", part="anchor", op="send"),
        ]

    pytest.importorskip("prometheus_client")
    transport = connect(serve())
    wanted = [
        counted | {"served": counted["served"] + more}
        for counted, more in zip(sent(), (4, 1), strict=True)
    ]
    assert fetched(transport, name(0), 4) == b"data"
    eventually(lambda: sent() == wanted)  # it is counted once it is under way


def test_nobody_there_is_an_error_that_names_the_place():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    transport = UcxTransport("127.0.0.1", port)
    with pytest.raises(TransportError, match=f"cannot connect to 127.0.0.1:{port}"):
        transport.connect()
    transport.close()


def test_an_address_that_is_taken_is_an_error(serve: Serve, source: ScriptedSource):
    server = serve()
    with pytest.raises(TransportError, match="cannot listen"):
        UcxServer(source, *server.address)


def test_abort_fails_what_is_unfinished_and_one_may_connect_again(
    serve: Serve, connect: Connect, source: ScriptedSource
):
    transport = connect(serve())
    source.objects[name(1)] = b"more"
    source.held[name(1)] = threading.Event()
    future = transport.fetch("r", name(1), memoryview(bytearray(4)))
    source.wait_until_read(name(1))
    transport.abort()
    with pytest.raises(TransportError, match="aborted"):
        future.result(WAIT_SECONDS)
    source.held[name(1)].set()
    transport.connect()
    assert fetched(transport, name(1), 4) == b"more"


def test_a_server_that_closes_fails_what_is_unfinished(
    serve: Serve, connect: Connect, source: ScriptedSource
):
    server = serve()
    transport = connect(server)
    source.held[name(0)] = threading.Event()
    future = transport.fetch("r", name(0), memoryview(bytearray(4)))
    source.wait_until_read(name(0))
    server.close()
    with pytest.raises(TransportError, match="closed the connection"):
        future.result(WAIT_SECONDS)
    assert not transport.connected
    with pytest.raises(TransportError, match=r"not connected.*last connection ended"):
        transport.sizes([name(0)])


def test_another_process_at_the_same_address_is_another_peer(serve: Serve, connect: Connect):
    first = serve()
    transport = connect(first)
    node = transport.node
    first.close()
    eventually(lambda: not transport.connected)
    second = serve(port=first.address[1])
    transport.connect()
    assert transport.node == second.node != node
    assert fetched(transport, name(0), 4) == b"data"


def test_a_process_that_is_not_the_expected_one_is_not_connected_to(serve: Serve):
    server = serve()
    transport = UcxTransport(*server.address, expected=server.node.hex())
    transport.connect()
    assert fetched(transport, name(0), 4) == b"data"
    transport.close()
    other = UcxTransport(*server.address, expected="00" * 16)
    with pytest.raises(TransportError, match="another process"):
        other.connect()
    assert not other.connected
    eventually(lambda: server.peers == 0)
    other.close()


def test_a_lookup_need_not_be_waited_for(serve: Serve, connect: Connect, source: ScriptedSource):
    transport = connect(serve())
    assert transport.look_up([name(0), name(1)]).result(WAIT_SECONDS) == [4, None]
    transport.abort()
    with pytest.raises(TransportError):
        transport.look_up([name(0)]).result(WAIT_SECONDS)


def test_draining_finishes_what_was_asked_and_takes_nothing_new(
    serve: Serve, connect: Connect, source: ScriptedSource
):
    server = serve()
    transport = connect(server)
    source.held[name(0)] = threading.Event()
    out = bytearray(4)
    future = transport.fetch("r", name(0), memoryview(out))
    source.wait_until_read(name(0))
    assert not server.drain(0.05)
    with pytest.raises(TransportError, match="draining"):
        transport.sizes([name(0)])
    with pytest.raises(TransportError, match="draining"):
        transport.fetch("s", name(0), memoryview(bytearray(4))).result(WAIT_SECONDS)
    with pytest.raises(TransportError, match="cannot connect"):
        connect(server)
    source.held[name(0)].set()
    assert server.drain(WAIT_SECONDS)
    assert future.result(WAIT_SECONDS)
    assert out == b"data"


def test_a_callback_may_use_and_close_the_transport(serve: Serve, connect: Connect):
    transport = connect(serve())
    second: list[Future[bool]] = []
    closed = threading.Event()

    def then(_: Future[bool]) -> None:
        second.append(transport.fetch("r", name(0), memoryview(bytearray(4))))
        transport.close()
        closed.set()

    transport.fetch("r", name(0), memoryview(bytearray(4))).add_done_callback(then)
    assert closed.wait(WAIT_SECONDS)
    with pytest.raises(TransportError):
        second[0].result(WAIT_SECONDS)


def test_many_connections_leave_nothing_behind(serve: Serve, source: ScriptedSource):
    server = serve()
    source.objects[name(1)] = bytes(300_000)

    def once() -> None:
        transport = UcxTransport(*server.address)
        transport.connect()
        future = transport.fetch("r", name(1), memoryview(bytearray(300_000)))
        assert future.result(WAIT_SECONDS)
        transport.close()

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def threads() -> int:
        # asyncio's default pool, which opens channels, is bounded but grows when it likes.
        return sum(not t.name.startswith("asyncio_") for t in threading.enumerate())

    for _ in range(5):
        once()
    eventually(lambda: server.peers == 0)
    before, before_threads = descriptors(), threads()
    for _ in range(30):
        once()
    eventually(lambda: server.peers == 0)
    eventually(lambda: descriptors() <= before)
    eventually(lambda: threads() <= before_threads)


# -- who may connect


def test_a_shared_secret_is_proved_by_both(serve: Serve, connect: Connect):
    right = LinkOptions(secret=b"right")
    server = serve(options=right)
    assert fetched(connect(server, right), name(0), 4) == b"data"
    for options in (LinkOptions(secret=b"wrong"), LinkOptions()):
        with pytest.raises(TransportError, match="refused: the client has another shared secret"):
            connect(server, options)
    with pytest.raises(TransportError, match="the client has another shared secret"):
        connect(serve(), right)
    assert "right" not in repr(right)


@pytest.mark.parametrize("field", ["model", "layout", "codec"])
def test_nodes_that_do_not_agree_refuse_each_other_by_name(
    serve: Serve, connect: Connect, field: str
):
    server = serve(options=LinkOptions(terms=Terms(**{field: "this"})))
    with pytest.raises(TransportError, match=f"{field} is '(this|that)'"):
        connect(server, LinkOptions(terms=Terms(**{field: "that"})))
    connect(server, LinkOptions(terms=Terms(**{field: "this"})))
    connect(server, LinkOptions())


def test_what_is_too_large_or_too_much_is_refused(serve: Serve, connect: Connect):
    server = serve(options=LinkOptions(most_object_bytes=3))
    transport = connect(server)
    with pytest.raises(TransportError, match=r"would refuse .* 3 bytes an object"):
        fetched(transport, name(0), 4)
    assert transport.put("r", name(1), memoryview(b"1234")).result(WAIT_SECONDS) is False
    with pytest.raises(TransportError, match=r"would refuse .* 0 at a time"):
        fetched(connect(serve(options=LinkOptions(most_open=0))), name(0), 4)
    # A client that asks all the same.
    transport._connection.peer = replace(transport._connection.peer, most_object_bytes=4)
    with pytest.raises(TransportError, match="refused: object too large"):
        fetched(transport, name(0), 4)


def test_a_read_that_fails_after_its_client_has_left_harms_nobody_else(
    serve: Serve, connect: Connect, source: ScriptedSource
):
    server = serve()
    leaving, staying = connect(server), connect(server)
    source.held[name(1)] = threading.Event()
    source.broken.add(name(1))
    future = leaving.fetch("r", name(1), memoryview(bytearray(4)))
    source.wait_until_read(name(1))
    leaving.abort()
    with pytest.raises(TransportError, match="aborted"):
        future.result(WAIT_SECONDS)
    eventually(lambda: server.peers == 1)
    source.held[name(1)].set()
    assert fetched(staying, name(0), 4) == b"data"


def test_little_is_read_for_a_client_that_takes_nothing(
    serve: Serve, connect: Connect, source: ScriptedSource
):
    server = serve()
    size, count = 200_000, 300
    source.objects |= {name(i + 1): bytes(size) for i in range(count)}
    honest = connect(server)

    async def asking() -> None:
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(FrameStream, *server.address)
        greeting = await greet(stream, "client", bytes(16), QUICK, Channel)
        for i in range(count):
            stream.write(Request(i, 0, False, name(i + 1), size).pack(Kind.FETCH))
        await loop.run_in_executor(None, source.wait_until_read, name(1))
        for _ in range(5):  # the others are served meanwhile
            assert await loop.run_in_executor(None, fetched, honest, name(0), 4) == b"data"
        stream.abort()
        greeting.channel.destroy()

    asyncio.run(asyncio.wait_for(asking(), WAIT_SECONDS))
    assert len(source.reading) * size < 24 << 20


# -- puts


def test_a_put_object_is_kept_whole(serve: Serve, connect: Connect):
    kept: dict[ObjectName, bytes] = {}

    def sink(wanted: ObjectName, data: memoryview) -> bool:
        kept[wanted] = bytes(data)
        return wanted != name(9)

    transport = connect(serve(sink=sink, most_put_bytes=4_000_000))
    data = os.urandom(3_000_001)
    small = [os.urandom(1000 + i) for i in range(50)]
    futures = [transport.put("r", name(0, Part.RESIDUAL), memoryview(data))]
    futures += [transport.put("r", name(i + 10), memoryview(d)) for i, d in enumerate(small)]
    assert all(f.result(WAIT_SECONDS) is True for f in futures)
    assert kept.pop(name(0, Part.RESIDUAL)) == data
    assert list(kept.values()) == small
    assert transport.put("r", name(9), memoryview(b"x")).result(WAIT_SECONDS) is False
    # Beyond what the server has room for, and what it takes at all.
    too_much = memoryview(bytes(4_000_001))
    assert transport.put("r", name(1), too_much).result(WAIT_SECONDS) is False
    assert connect(serve()).put("r", name(1), memoryview(b"x")).result(WAIT_SECONDS) is False


def test_what_waits_to_be_kept_counts_also_when_its_client_has_left(serve: Serve):
    go = threading.Event()

    def sink(wanted: ObjectName, data: memoryview) -> bool:
        return go.wait(WAIT_SECONDS)

    server = serve(sink=sink, most_put_bytes=1000)
    data = memoryview(bytes(400))
    for i in range(2):
        with closing(UcxTransport(*server.address)) as client:
            client.connect()
            client.put("r", name(i), data)
            eventually(lambda: server._put_bytes == 400 * (i + 1))  # noqa: B023
            eventually(lambda: not any(peer.puts for peer in server._peers.values()))
    eventually(lambda: server.peers == 0)
    with closing(UcxTransport(*server.address)) as client:
        client.connect()
        assert client.put("r", name(2), data).result(WAIT_SECONDS) is False
        go.set()
        eventually(lambda: server._put_bytes == 0)
        assert client.put("r", name(2), data).result(WAIT_SECONDS) is True


def test_a_cancelled_put_of_which_some_is_under_way_still_counts(serve: Serve, connect: Connect):
    """Its buffer is there until UCX has given it up."""
    server = serve(sink=lambda *_: True, most_put_bytes=1000)
    transport = connect(server)
    connection = transport._connection

    def announce(kind: Kind, payload: bytes) -> None:
        if kind == Kind.READY:
            id_ = protocol.unpack_id(payload)
            connection.write(protocol.pack_data(0, [Piece(id_, 0, 1)]))  # and never send it
            connection.write(protocol.pack_id(Kind.CANCEL, id_))
        elif kind == Kind.END:
            ended.set()

    ended = threading.Event()
    connection.handle = announce
    request = Request(77, 1, False, name(0), 700)
    transport._thread.soon(connection.write, request.pack(Kind.PUT))
    assert ended.wait(WAIT_SECONDS)
    assert server._put_bytes == 700
    other = connect(server)
    assert other.put("r", name(1), memoryview(bytes(700))).result(WAIT_SECONDS) is False
    transport.abort()
    eventually(lambda: server._put_bytes == 0)
    assert other.put("r", name(1), memoryview(bytes(700))).result(WAIT_SECONDS) is True


def test_many_lookups_and_long_ones_are_all_answered(
    serve: Serve, connect: Connect, source: ScriptedSource
):
    transport = connect(serve())
    futures = [transport.look_up([name(0), name(1)]) for _ in range(300)]
    assert all(future.result(WAIT_SECONDS) == [4, None] for future in futures)
    # Asked for all at once, its frames would be more than is queued for a peer that does not read.
    many = [name(i) for i in range(300_000)]
    assert transport.look_up(many).result(WAIT_SECONDS) == [4] + [None] * (len(many) - 1)
    assert transport.connected


def test_a_peer_that_is_busy_with_lookups_alone_is_not_given_up(
    serve: Serve, connect: Connect, source: ScriptedSource, monkeypatch: pytest.MonkeyPatch
):
    def slow(names: Sequence[ObjectName]) -> list[int | None]:
        time.sleep(0.02)
        return [None] * len(names)

    monkeypatch.setattr(source, "sizes", slow)
    transport = connect(serve(), LinkOptions(timeout_seconds=0.1))
    until = time.monotonic() + 6 * 0.1 * 3
    waiting: list[Future[list[int | None]]] = []
    while time.monotonic() < until:
        waiting = [f for f in waiting if not f.done()]
        waiting += [transport.look_up([name(0)]) for _ in range(8 - len(waiting))]
        time.sleep(0.001)
    assert transport.connected


def test_a_host_that_is_no_name_and_a_port_that_is_none_are_readable_errors():
    with (
        closing(UcxTransport("a..b", 7430)) as client,
        pytest.raises(TransportError, match=r"cannot connect to a\.\.b:7430"),
    ):
        client.connect()
    before = threading.active_count()
    with pytest.raises(TransportError, match=r"cannot listen on 127\.0\.0\.1:70000"):
        UcxServer(ScriptedSource(), port=70000)
    eventually(lambda: threading.active_count() <= before)


def test_a_sink_that_fails_is_an_error_of_that_put_only(serve: Serve, connect: Connect):
    def sink(wanted: ObjectName, data: memoryview) -> bool:
        if wanted == name(1):
            raise TierError("disk on fire")
        return True

    transport = connect(serve(sink=sink))
    with pytest.raises(TransportError, match="disk on fire"):
        transport.put("r", name(1), memoryview(b"x")).result(WAIT_SECONDS)
    assert transport.put("r", name(2), memoryview(b"x")).result(WAIT_SECONDS) is True


# -- peers that do not keep to the protocol


def speak(server: UcxServer, raw: bytes) -> bytes:
    """All that a server answers to some bytes."""
    with socket.create_connection(server.address, timeout=WAIT_SECONDS) as s:
        s.sendall(raw)
        s.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: s.recv(1 << 16), b""))


def test_garbage_ends_its_own_connection_only(serve: Serve, connect: Connect):
    server = serve(options=QUICK)
    transport = connect(server)
    rng = random.Random(11)
    hello = LinkOptions().hello(bytes(16)).pack()
    for raw in [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"",
        hello[:-1],
        hello + protocol.pack_proof(bytes(32), b"address")[:20],
        hello + hello,
        b"\xff" * 100,
        *(rng.randbytes(200) for _ in range(30)),
    ]:
        speak(server, raw)
    assert fetched(transport, name(0), 4) == b"data"
    assert server.peers == 1


def test_a_peer_that_says_nothing_is_let_go(serve: Serve, caplog: pytest.LogCaptureFixture):
    logs._limiter._last.clear()
    server = serve(options=QUICK)
    with socket.create_connection(server.address, timeout=WAIT_SECONDS) as s:
        told = b"".join(iter(lambda: s.recv(1000), b""))
    assert b"did not greet" in told
    assert f"did not greet within {QUICK.timeout_seconds:g} s" in caplog.text


class Liar:
    """A server that greets properly and then says what it is told to."""

    def __init__(self, says: Callable[[Request], bytes]) -> None:
        self.thread = LoopThread("liar")
        self.says = says
        self.address = self.thread.wait(self._listen(), WAIT_SECONDS)

    async def _listen(self) -> tuple[str, int]:
        loop = asyncio.get_running_loop()

        def made(stream: FrameStream) -> None:
            self.serving = loop.create_task(self._serve(stream))

        self.server = await loop.create_server(lambda: FrameStream(made), "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()

    async def _serve(self, stream: FrameStream) -> None:
        greeting = await greet(stream, "server", bytes(16), QUICK, Channel)

        def handle(kind: Kind, payload: bytes) -> None:
            if kind == Kind.FETCH:
                stream.write(self.says(Request.unpack(payload)))
            elif kind == Kind.LOOKUP:
                wanted = Request(protocol.unpack_lookup(payload)[0], 0, False, name(0), 0)
                stream.write(self.says(wanted))

        stream.start(handle, lambda error: greeting.channel.destroy())


LIES: dict[str, Callable[[Request], bytes]] = {
    "data nobody asked for": lambda r: protocol.pack_data(0, [Piece(r.id + 1, 0, 4)]),
    "data beyond the end": lambda r: protocol.pack_data(0, [Piece(r.id, 0, 5)]),
    "data from the middle": lambda r: protocol.pack_data(0, [Piece(r.id, 2, 2)]),
    "data twice": lambda r: protocol.pack_data(0, [Piece(r.id, 0, 4), Piece(r.id, 0, 4)]),
    "a huge message": lambda r: protocol.pack_data(0, [Piece(r.id, 0, 2**32 - 1)]),
    "a message out of order": lambda r: protocol.pack_data(7, [Piece(r.id, 0, 4)]),
    "an acknowledgement of nothing": lambda r: protocol.pack_acks([3]),
    "more sizes than names": lambda r: protocol.pack_sizes(r.id, [1, 2, 3]),
    "what clients say": lambda r: protocol.pack_id(Kind.CANCEL, r.id),
    "nothing that can be read": lambda r: b"\xff" * 50,
    "a frame without an end": lambda r: protocol.frame(Kind.END, bytes(5000))[:5] * 3,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_server_is_left_and_writes_nowhere(lie: str):
    liar = Liar(LIES[lie])
    transport = UcxTransport(*liar.address, QUICK)
    transport.connect()
    memory = bytearray(b"\xa5" * 64)
    future = transport.fetch("r", name(0), memoryview(memory)[30:34])
    with pytest.raises(TransportError):
        future.result(WAIT_SECONDS)
    assert memory == b"\xa5" * 64
    assert not transport.connected
    transport.close()
    liar.thread.stop(WAIT_SECONDS)


@pytest.mark.parametrize("answer", [b"", protocol.frame(Kind.PONG)], ids=["silent", "idle"])
def test_a_server_that_answers_nothing_useful_costs_a_bounded_wait(answer: bytes):
    liar = Liar(lambda r: answer)
    transport = UcxTransport(*liar.address, QUICK)
    transport.connect()
    with pytest.raises(TransportError, match="no answer within"):
        transport.sizes([name(0)])
    transport.connect()
    future = transport.fetch("r", name(0), memoryview(bytearray(4)))
    with pytest.raises(TransportError, match=r"silent|moved no data"):
        future.result(WAIT_SECONDS)
    transport.close()
    liar.thread.stop(WAIT_SECONDS)


CLIENT_LIES: dict[str, Callable[[], bytes]] = {
    "data nobody asked for": lambda: protocol.pack_data(0, [Piece(1, 0, 4)]),
    "an acknowledgement of nothing": lambda: protocol.pack_acks([3]),
    "the same twice": lambda: Request(1, 1, False, name(0), 4).pack(Kind.FETCH) * 2,
    "what servers say": lambda: protocol.pack_sizes(1, [1]),
    "a greeting again": lambda: LinkOptions().hello(bytes(16)).pack(),
    "nothing that can be read": lambda: b"\xff" * 50,
}


@pytest.mark.parametrize("lie", CLIENT_LIES)
def test_a_lying_client_is_left_and_the_others_go_on(
    serve: Serve, connect: Connect, source: ScriptedSource, lie: str
):
    server = serve(options=QUICK)
    honest = connect(server)
    source.held[name(0)] = threading.Event()

    async def lying() -> None:
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(FrameStream, *server.address)
        greeting = await greet(stream, "client", bytes(16), QUICK, Channel)
        left = asyncio.Event()
        stream.write(CLIENT_LIES[lie]())
        stream.start(lambda kind, payload: None, lambda error: left.set())
        await left.wait()
        greeting.channel.destroy()

    asyncio.run(asyncio.wait_for(lying(), WAIT_SECONDS))
    source.held[name(0)].set()
    eventually(lambda: server.peers == 1)
    assert fetched(honest, name(0), 4) == b"data"
