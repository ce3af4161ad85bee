"""Peers that die, hang, come back as somebody else or read slowly: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

pytest.importorskip("ucxx", reason="the UCX transport needs ucxx")

from prometheus_client import REGISTRY

from lynx_backend.errors import TransportError
from lynx_backend.keys import Part
from lynx_backend.transport import connection, ucx
from lynx_backend.transport.client import UcxTransport
from lynx_backend.transport.greeting import LinkOptions

sys.path.insert(0, str(Path(__file__).parent))
from ucx_node import content, name, size_of

WAIT_SECONDS = 30.0
TIMEOUT = 1.0
LARGE = 9  # an object of 64 MiB
OPTIONS = LinkOptions(timeout_seconds=TIMEOUT)
Node = Callable[..., "Process"]


class Process:
    """A node in a process of its own."""

    def __init__(
        self, seed: int, port: int = 0, seconds: float = 0.0, timeout: float = TIMEOUT
    ) -> None:
        script = Path(__file__).parent / "ucx_node.py"
        arguments = map(str, (port, seed, seconds, timeout))
        self.process = subprocess.Popen(
            [sys.executable, str(script), "127.0.0.1", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def node() -> Iterator[Node]:
    made: list[Process] = []

    def start(*args: object, **options: object) -> Process:
        made.append(Process(*args, **options))
        return made[-1]

    yield start
    for process in made:
        process.signal(signal.SIGCONT)
        process.stop()


@pytest.fixture
def connect() -> Iterator[Callable[[Process], UcxTransport]]:
    made: list[UcxTransport] = []

    def connect(process: Process) -> UcxTransport:
        transport = UcxTransport("127.0.0.1", process.port, OPTIONS)
        made.append(transport)
        transport.connect()
        return transport

    yield connect
    for transport in made:
        transport.close()


Connect = Callable[[Process], UcxTransport]


def begun(transport: UcxTransport) -> tuple[bytearray, Future[bool]]:
    """A large fetch of which some has arrived and some has not."""
    out = bytearray(size_of(LARGE))
    future = transport.fetch("r", name(LARGE), memoryview(out))
    until = time.monotonic() + WAIT_SECONDS
    while not any(out[:64]):
        assert time.monotonic() < until
        time.sleep(0.0005)
    return out, future


def fetched(transport: UcxTransport, i: int, part: Part = Part.RESIDUAL) -> bytes:
    out = bytearray(size_of(i))
    assert transport.fetch("r", name(i, part), memoryview(out)).result(WAIT_SECONDS)
    return bytes(out)


def test_objects_of_all_sizes_arrive_as_they_are(node: Node, connect: Connect):
    transport = connect(node(1))
    for i in range(10):
        assert transport.sizes([name(i)]) == [size_of(i)]
        assert fetched(transport, i) == content(1, i)


def test_a_server_killed_in_the_middle_fails_the_fetch_at_once(node: Node, connect: Connect):
    server = node(1)
    transport = connect(server)
    out, future = begun(transport)
    server.signal(signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(TransportError):
        future.result(WAIT_SECONDS)
    assert time.monotonic() - started < 3 * TIMEOUT
    assert out != content(1, LARGE)


def test_a_hung_server_costs_a_bounded_wait_and_never_writes_afterwards(
    node: Node, connect: Connect
):
    server = node(1)
    transport = connect(server)
    out, future = begun(transport)
    server.signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(TransportError, match="silent"):
        future.result(WAIT_SECONDS)
    assert time.monotonic() - started < 3 * TIMEOUT
    out[:] = bytes(len(out))
    server.signal(signal.SIGCONT)
    transport.connect()
    assert fetched(transport, 8) == content(1, 8)
    assert not any(out)


def test_cancelling_on_a_hung_server_does_not_wait_for_it(node: Node, connect: Connect):
    server = node(1)
    transport = connect(server)
    out, future = begun(transport)
    server.signal(signal.SIGSTOP)
    started = time.monotonic()
    transport.cancel("r")
    assert not wait([future], WAIT_SECONDS).not_done
    assert time.monotonic() - started < 3 * TIMEOUT
    assert future.cancelled()
    out[:] = bytes(len(out))
    server.signal(signal.SIGCONT)
    if not transport.connected:
        transport.connect()
    assert fetched(transport, 8) == content(1, 8)
    assert not any(out)


def test_another_server_at_the_same_address_is_never_taken_for_the_first(
    node: Node, connect: Connect
):
    server = node(1)
    transport = connect(server)
    first = transport.node
    _, future = begun(transport)
    server.signal(signal.SIGKILL)
    server.process.wait()
    with pytest.raises(TransportError):
        future.result(WAIT_SECONDS)
    node(2, port=server.port)
    transport.connect()
    assert transport.node != first
    # Nothing of the first is mixed into what the second gives.
    assert fetched(transport, 5) == content(2, 5)


def test_a_client_that_hangs_holds_up_nobody_else(node: Node, connect: Connect):
    server = node(1)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_ucx_faults import *\n"
        "t = UcxTransport('127.0.0.1', int(sys.argv[2]), OPTIONS); t.connect()\n"
        "begun(t); print('begun', flush=True); sys.stdin.read()\n"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parent), str(server.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    try:
        assert client.stdout is not None
        assert b"begun\n" in iter(client.stdout.readline, b"")  # UCX may have said something first
        client.send_signal(signal.SIGSTOP)
        transport = connect(server)
        for i in range(9):
            assert fetched(transport, i) == content(1, i)
    finally:
        client.kill()
        client.wait()


def test_two_clients_and_a_slow_source_get_their_own_bytes(node: Node, connect: Connect):
    server = node(1, seconds=0.02)

    def wrong(start: int) -> list[int]:
        transport = connect(server)
        return [i for i in range(start, start + 7) if fetched(transport, i) != content(1, i)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wrong, (0, 10))) == [[], []]


def test_a_client_that_comes_and_goes_all_the_time_leaves_nothing_at_the_server(node: Node):
    server = node(1)
    proc = Path(f"/proc/{server.process.pid}")

    def once() -> None:
        transport = UcxTransport("127.0.0.1", server.port, OPTIONS)
        transport.connect()
        assert fetched(transport, 3) == content(1, 3)
        transport.close()

    def used() -> tuple[int, int]:
        pages = int((proc / "statm").read_text().split()[1])
        return len(list((proc / "fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE")

    for _ in range(10):
        once()
    descriptors, memory = used()
    for _ in range(60):
        once()
    until = time.monotonic() + WAIT_SECONDS
    while used()[0] > descriptors and time.monotonic() < until:
        time.sleep(0.05)
    assert used()[0] <= descriptors
    assert used()[1] < memory + (32 << 20)


def test_connections_lost_in_the_middle_leave_nothing_behind(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    # Nothing that has begun may finish.
    monkeypatch.setattr(connection, "_GRACE_SECONDS", 0.0)
    server = node(1, timeout=WAIT_SECONDS)
    transport = UcxTransport("127.0.0.1", server.port, LinkOptions(timeout_seconds=WAIT_SECONDS))

    def lost() -> float:
        return REGISTRY.get_sample_value("lynx_ucx_discarded_workers_total") or 0.0

    def lose(count: int) -> None:
        until = lost() + count
        while lost() < until:
            transport.connect()
            out, future = begun(transport)
            transport.abort()
            with pytest.raises(TransportError, match="aborted"):
                future.result(WAIT_SECONDS)
            out[:] = bytes(len(out))
            outs.append(out)

    def used() -> tuple[int, int]:
        proc = Path("/proc/self")
        pages = int((proc / "statm").read_text().split()[1])
        return len(list((proc / "fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE")

    outs: deque[bytearray] = deque(maxlen=2)
    lose(2)
    descriptors, memory = used()
    lose(5)
    until = time.monotonic() + WAIT_SECONDS
    while used()[0] > descriptors and time.monotonic() < until:
        time.sleep(0.05)
    assert used()[0] <= descriptors
    assert used()[1] < memory + (4 << 20)
    transport.connect()
    assert fetched(transport, 8) == content(1, 8)
    assert not any(out.strip(b"\0") for out in outs)
    transport.close()


def test_what_a_lost_connection_leaves_serves_all_later_ones(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    """ucxx keeps the context of a discarded worker for ever: there must not be one more each time
    that a connection in between ended in order."""
    monkeypatch.setattr(connection, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(ucx._Context, "_spare", [])
    kept: list[ucx._Context] = []
    keep = ucx._Context.keep
    monkeypatch.setattr(ucx._Context, "keep", lambda self: (kept.append(self), keep(self)))
    server = node(1, timeout=WAIT_SECONDS)
    transport = UcxTransport("127.0.0.1", server.port, LinkOptions(timeout_seconds=WAIT_SECONDS))

    def over() -> None:
        until = time.monotonic() + WAIT_SECONDS
        closing = "lynx-ucx-close"
        while transport.connected or any(t.name == closing for t in threading.enumerate()):
            assert time.monotonic() < until
            time.sleep(0.005)

    until = time.monotonic() + WAIT_SECONDS
    while len(kept) < 3:
        assert time.monotonic() < until
        transport.connect()
        _, future = begun(transport)
        transport.abort()
        wait([future], WAIT_SECONDS)
        over()
        transport.connect()
        assert fetched(transport, 3) == content(1, 3)
        transport.abort()
        over()
    transport.close()
    assert set(kept) == set(ucx._Context._spare) == {kept[0]}
