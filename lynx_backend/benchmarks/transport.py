"""The UCX transport beside what it is built on, and anchors beside first in, first out.

``rates``: objects of one size fetched from another process of this host, against messages of that
size sent by ucxx, with its own asyncio API and by a loop that waits for nothing else, a plain
asyncio stream, and reads by NIXL where it is installed, in turns. ``link``: two network namespaces,
a veth pair shaped by ``tc``; what is carried against iperf3, and what an anchor waits while eight
requests' residuals are in full flow, against one queue for all. Needs root for ``link``.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..keys import ChunkKey, ObjectName, Part
from ..transport.client import UcxTransport
from ..transport.greeting import LinkOptions
from ..transport.server import UcxServer
from ..transport.ucx import Array, Channel, defaults, ucx_api

MODULE = "lynx_backend.benchmarks.transport"
KIB, MIB = 1 << 10, 1 << 20
SIZES = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
ROUND_BYTES = 128 * MIB
IN_FLIGHT = 8
BLOB = memoryview(np.random.default_rng(1).bytes(64 * MIB))


def name(size: int, i: int, part: Part = Part.RESIDUAL) -> ObjectName:
    return ChunkKey(bytes(16), struct.pack("<QQ", size, i)).object(part)


class Blob:
    """Has every object: the beginning of one block of random bytes."""

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        return [struct.unpack("<QQ", n.key.prefix)[0] for n in names]

    def get(self, name: ObjectName) -> memoryview:
        return BLOB[: struct.unpack("<QQ", name.key.prefix)[0]]


def count_of(size: int) -> int:
    return max(2, ROUND_BYTES // size)


def buffers(size: int) -> list[bytearray]:
    return [bytearray(size) for _ in range(max(1, min(count_of(size), 64 * MIB // size)))]


# -- the ways, each a server and a client ----------------------------------------------------


def serve_lynx(host: str) -> None:
    server = UcxServer(Blob(), host)
    print(server.address[1], flush=True)
    sys.stdin.read()
    server.close()


@contextmanager
def lynx(host: str, port: int) -> Iterator[Callable[[int, list[bytearray]], None]]:
    transport = UcxTransport(host, port)
    transport.connect()

    def fetch(size: int, outs: list[bytearray]) -> None:
        for start in range(0, count_of(size), len(outs)):
            some = outs[: count_of(size) - start]
            futures = [
                transport.fetch("r", name(size, i), memoryview(out)) for i, out in enumerate(some)
            ]
            assert all(future.result(60) for future in futures)

    yield fetch
    transport.close()


def exchange(control: socket.socket, channel: Channel) -> None:
    control.sendall(struct.pack("<I", len(channel.address)) + channel.address)
    (length,) = struct.unpack("<I", control.recv(4, socket.MSG_WAITALL))
    channel.connect(control.recv(length, socket.MSG_WAITALL))


def pump(channel: Channel, count: int, post: Callable[[int], Any]) -> None:
    """``count`` messages, ``IN_FLIGHT`` at a time.

    Waiting for events: polling was measured to carry a third of that on two cores.
    """
    requests: list[Any] = []
    for i in range(count):
        if len(requests) == IN_FLIGHT:
            first = requests.pop(0)
            while not first.completed:
                channel._worker.progress_worker_event(1)
        requests.append(post(i))
    while not all(request.completed for request in requests):
        channel._worker.progress_worker_event(1)


def serve_loop(host: str) -> None:
    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        control, _ = listener.accept()
    channel = Channel(host)
    exchange(control, channel)
    while raw := control.recv(8, socket.MSG_WAITALL):
        (size,) = struct.unpack("<Q", raw)
        data = Array(BLOB[:size])
        send = channel._endpoint.tag_send
        pump(channel, count_of(size), lambda i: send(data, ucx_api.UCXXTag(i)))  # noqa: B023
        # The other end may need us until it has everything.
        control.setblocking(False)
        while True:
            channel._worker.progress_worker_event(1)
            try:
                if control.recv(1):
                    break
            except BlockingIOError:
                pass
        control.setblocking(True)


@contextmanager
def loop(host: str, port: int) -> Iterator[Callable[[int, list[bytearray]], None]]:
    with socket.create_connection((host, port)) as control:
        channel = Channel(host)
        exchange(control, channel)

        def fetch(size: int, outs: list[bytearray]) -> None:
            arrays = [Array(memoryview(out)) for out in outs]
            control.sendall(struct.pack("<Q", size))
            receive = channel._endpoint.tag_recv
            pump(
                channel,
                count_of(size),
                lambda i: receive(arrays[i % len(arrays)], ucx_api.UCXXTag(i)),
            )
            control.sendall(b"x")

        yield fetch


async def awaited(count: int, call: Callable[[int], Awaitable[Any]]) -> None:
    """``call`` for each of ``count`` messages, ``IN_FLIGHT`` at a time."""
    numbers = iter(range(count))

    async def work() -> None:
        for i in numbers:
            await call(i)

    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))


async def met(control: socket.socket) -> Any:
    """ucxx's own endpoint to the process at the other end."""
    import ucxx

    mine = bytes(ucxx.get_worker_address())
    control.sendall(struct.pack("<I", len(mine)) + mine)
    (length,) = struct.unpack("<I", control.recv(4, socket.MSG_WAITALL))
    address = ucxx.get_ucx_address_from_buffer(control.recv(length, socket.MSG_WAITALL))
    return await ucxx.create_endpoint_from_worker_address(address, endpoint_error_handling=True)


def serve_ucxx(host: str) -> None:
    async def main(control: socket.socket) -> None:
        with defaults():
            endpoint = await met(control)
        control.setblocking(False)
        loop = asyncio.get_running_loop()
        while raw := await loop.sock_recv(control, 8):
            (size,) = struct.unpack("<Q", raw)
            data = BLOB[:size]
            await awaited(count_of(size), lambda i: endpoint.send(data, i, force_tag=True))  # noqa: B023
            await loop.sock_recv(control, 1)

    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        asyncio.run(main(listener.accept()[0]))


@contextmanager
def with_ucxx(host: str, port: int) -> Iterator[Callable[[int, list[bytearray]], None]]:
    running = asyncio.new_event_loop()
    with socket.create_connection((host, port)) as control:
        with defaults():
            endpoint = running.run_until_complete(met(control))

        async def read(size: int, outs: list[bytearray]) -> None:
            views = [memoryview(out) for out in outs]
            control.sendall(struct.pack("<Q", size))
            await awaited(
                count_of(size), lambda i: endpoint.recv(views[i % len(views)], i, force_tag=True)
            )
            control.sendall(b"x")

        yield lambda size, outs: running.run_until_complete(read(size, outs))


def agent(who: str) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    with defaults():
        return nixl_agent(who, nixl_agent_config(backends=["UCX"]))


def serve_nixl(host: str) -> None:
    mine = agent("server")
    blob = np.frombuffer(BLOB, np.uint8)
    mine.register_memory([(blob.ctypes.data, blob.size, 0, "")], "DRAM")
    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        control, _ = listener.accept()
    metadata = mine.get_agent_metadata()
    control.sendall(struct.pack("<QI", blob.ctypes.data, len(metadata)) + metadata)
    control.recv(1)


@contextmanager
def with_nixl(host: str, port: int) -> Iterator[Callable[[int, list[bytearray]], None]]:
    """Reads of the other process's memory, ``IN_FLIGHT`` at a time, prepared beforehand."""
    mine = agent("client")
    prepared: dict[int, list[Any]] = {}
    kept: list[list[bytearray]] = []  # what is registered
    with socket.create_connection((host, port)) as control:
        address, length = struct.unpack("<QI", control.recv(12, socket.MSG_WAITALL))
        peer = mine.add_remote_agent(control.recv(length, socket.MSG_WAITALL))

        def prepare(size: int, outs: list[bytearray]) -> list[Any]:
            places = [np.frombuffer(out, np.uint8).ctypes.data for out in outs]
            mine.register_memory([(place, size, 0, "") for place in places], "DRAM")
            theirs = mine.get_xfer_descs([(address, size, 0)], "DRAM")
            ours = [mine.get_xfer_descs([(place, size, 0)], "DRAM") for place in places]
            return [mine.initialize_xfer("READ", each, theirs, peer) for each in ours]

        def finish(handle: Any) -> None:
            while (state := mine.check_xfer_state(handle)) != "DONE":
                assert state == "PROC", state
                time.sleep(0)

        def fetch(size: int, outs: list[bytearray]) -> None:
            if size not in prepared:  # in the round that does not count
                prepared[size] = prepare(size, outs)
                kept.append(outs)
            handles = prepared[size]
            running: list[Any] = []
            for i in range(count_of(size)):
                if len(running) == min(IN_FLIGHT, len(handles)):
                    finish(running.pop(0))
                running.append(handles[i % len(handles)])
                mine.transfer(running[-1])
            for handle in running:
                finish(handle)

        yield fetch


def serve_stream(host: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while raw := await reader.read(8):
            (size,) = struct.unpack("<Q", raw)
            for _ in range(count_of(size)):
                writer.write(BLOB[:size])
                await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, host, 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

    asyncio.run(main())


@contextmanager
def stream(host: str, port: int) -> Iterator[Callable[[int, list[bytearray]], None]]:
    running = asyncio.new_event_loop()
    sock = socket.create_connection((host, port))
    sock.setblocking(False)

    async def read(size: int, outs: list[bytearray]) -> None:
        await running.sock_sendall(sock, struct.pack("<Q", size))
        for i in range(count_of(size)):
            view = memoryview(outs[i % len(outs)])
            while view:
                view = view[await running.sock_recv_into(sock, view) :]

    yield lambda size, outs: running.run_until_complete(read(size, outs))
    sock.close()
    running.close()


SERVERS = {
    "lynx": serve_lynx,
    "ucxx": serve_ucxx,
    "loop": serve_loop,
    "stream": serve_stream,
    "nixl": serve_nixl,
}
CLIENTS = {"lynx": lynx, "ucxx": with_ucxx, "loop": loop, "stream": stream, "nixl": with_nixl}


@contextmanager
def process(prefix: list[str], *args: str, environ: dict[str, str]) -> Iterator[str]:
    """This script in another process; its first line."""
    command = [*prefix, sys.executable, "-m", MODULE, *args]
    # What UCX and NIXL have to say must not stand before what we read.
    quiet = {"UCX_LOG_FILE": "/dev/stderr", "NIXL_LOG_LEVEL": "ERROR"}
    environ = os.environ | quiet | environ
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
    assert child.stdout is not None
    try:
        yield child.stdout.readline().decode().strip()
    finally:
        child.kill()
        child.wait()


# -- rates -----------------------------------------------------------------------------------------

WAYS = {
    "loopback TCP": {"UCX_TLS": "tcp"},
    "shared memory": {"UCX_TLS": "posix,cma,self", "UCX_POSIX_ERROR_HANDLING": "y"},
}


def rates(rounds: int) -> list[dict[str, float]]:
    """In this process for one of ``WAYS``, whose variables are set."""
    results = []
    with ExitStack() as stack:
        fetches = {}
        for what in SERVERS:
            if what == "nixl" and find_spec("nixl_cu12") is None:
                continue
            port = int(stack.enter_context(process([], "serve", what, "127.0.0.1", environ={})))
            fetches[what] = stack.enter_context(CLIENTS[what]("127.0.0.1", port))
        for size in SIZES:
            outs = buffers(size)
            seconds: dict[str, list[float]] = {what: [] for what in fetches}
            for turn in range(rounds + 1):
                for what in random.sample(list(fetches), len(fetches)):
                    started = time.perf_counter()
                    fetches[what](size, outs)
                    if turn:
                        seconds[what].append(time.perf_counter() - started)
                    assert outs[0] == BLOB[:size]
            moved = count_of(size) * size
            row: dict[str, float] = {"size": size}
            for what, taken in seconds.items():
                row[what] = moved / statistics.median(taken) / 1e9
            for what in [w for w in fetches if w != "lynx"]:
                pairs = zip(seconds[what], seconds["lynx"], strict=True)
                row[f"of {what}"] = statistics.median(theirs / ours for theirs, ours in pairs)
            results.append(row)
    return results


# -- link ------------------------------------------------------------------------------------------

ANCHOR, RESIDUAL = 256 * KIB, 4 * MIB
REQUESTS = 8
HERE, THERE = "10.77.9.2", "10.77.9.1"


@contextmanager
def namespaces(rate: str) -> Iterator[tuple[list[str], list[str]]]:
    """Two network namespaces with a shaped link between them, as command prefixes."""

    def run(*command: str) -> None:
        subprocess.run(command, check=True)

    names = ["lynx-bench-a", "lynx-bench-b"]
    try:
        for each in names:
            run("ip", "netns", "add", each)
        a, b = names
        run(*f"ip link add va netns {a} type veth peer name vb netns {b}".split())
        # A token bucket's burst has to cover what the rate carries between two of its timers.
        burst = {"1gbit": "512kb", "10gbit": "4mb"}[rate]
        for each, device, address in ((a, "va", THERE), (b, "vb", HERE)):
            run(*f"ip -n {each} addr add {address}/24 dev {device}".split())
            run(*f"ip -n {each} link set {device} up".split())
            run(*f"ip -n {each} link set lo up".split())
            shape = f"tc -n {each} qdisc add dev {device} root tbf rate {rate}"
            run(*f"{shape} burst {burst} latency 50ms".split())
        yield ["ip", "netns", "exec", a], ["ip", "netns", "exec", b]
    finally:
        for each in names:
            subprocess.run(["ip", "netns", "del", each], check=False, stderr=subprocess.DEVNULL)


def iperf(there: list[str], here: list[str], seconds: int) -> float:
    """Bytes a second that one TCP stream carries from ``there`` to ``here``."""
    with subprocess.Popen([*there, "iperf3", "-s", "-1"], stdout=subprocess.DEVNULL) as server:
        time.sleep(0.5)
        command = [*here, "iperf3", "-c", THERE, "-R", "-J", "-t", str(seconds)]
        answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        server.wait()
    return float(answer["end"]["sum_received"]["bits_per_second"]) / 8


class Flow:
    """Requests that never have enough: each keeps residuals coming, two at a time."""

    def __init__(self, transport: UcxTransport, one_queue: bool) -> None:
        self.transport, self.one_queue = transport, one_queue
        self.moved = 0
        self.stopping = False
        self.numbers = iter(range(10**9))
        self.left = 2 * REQUESTS
        self.empty = threading.Event()
        for i in range(2 * REQUESTS):
            self.next(i % REQUESTS, bytearray(RESIDUAL))

    def next(self, request: int, out: bytearray) -> None:
        who = "all" if self.one_queue else f"r{request}"
        future = self.transport.fetch(who, name(RESIDUAL, next(self.numbers)), memoryview(out))
        future.add_done_callback(lambda done: self.landed(done, request, out))

    def landed(self, done: Future[bool], request: int, out: bytearray) -> None:
        assert done.result()
        self.moved += RESIDUAL
        if not self.stopping:
            self.next(request, out)
            return
        self.left -= 1
        if not self.left:
            self.empty.set()

    def stop(self) -> None:
        self.stopping = True
        assert self.empty.wait(60)


def anchors(transport: UcxTransport, count: int, one_queue: bool = False) -> list[float]:
    """Seconds that each of ``count`` anchors took, at moments of no order."""
    rng = random.Random(3)
    part, who = (Part.RESIDUAL, "all") if one_queue else (Part.ANCHOR, "anchor")
    taken = []
    for i in range(count):
        time.sleep(rng.uniform(0.002, 0.02))
        out = memoryview(bytearray(ANCHOR))
        started = time.perf_counter()
        assert transport.fetch(who, name(ANCHOR, 10**9 + i, part), out).result(60)
        taken.append(time.perf_counter() - started)
        assert out == BLOB[:ANCHOR]
    return taken


def link_client(port: int, seconds: float) -> dict[str, object]:
    transport = UcxTransport(THERE, port, LinkOptions(timeout_seconds=20.0))
    transport.connect()
    anchors(transport, 20)
    idle = anchors(transport, 200)
    flow = Flow(transport, one_queue=False)
    time.sleep(1.0)
    moved, started = flow.moved, time.perf_counter()
    time.sleep(seconds)
    useful = (flow.moved - moved) / (time.perf_counter() - started)
    first = anchors(transport, 200)
    flow.stop()
    queue = Flow(transport, one_queue=True)
    time.sleep(0.5)
    fifo = anchors(transport, 40, one_queue=True)
    queue.stop()
    transport.close()
    return {"useful": useful, "idle": idle, "first": first, "fifo": fifo}


def link(rate: str, seconds: int) -> dict[str, Any]:
    """What a shaped link carries and what anchors wait; as root."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc", "iperf3"))):
        raise UnsupportedError("a shaped link needs root, and ip, tc and iperf3 (iproute2, iperf3)")
    tcp = {"UCX_TLS": "tcp"}
    with namespaces(rate) as (there, here):
        before = iperf(there, here, seconds)
        with process(there, "serve", "lynx", THERE, environ=tcp) as port:
            client = ("link-client", port, str(seconds))
            with process(here, *client, environ=tcp) as line:
                result = json.loads(line)
        after = iperf(there, here, seconds)
    result["iperf"] = statistics.mean((before, after))
    result["rate"] = rate
    return result


def run_rates(rounds: int) -> dict[str, Any]:
    """:func:`rates` in a process for each of ``WAYS``."""
    found = {}
    for way, environ in WAYS.items():
        with process([], "rates-client", str(rounds), environ=environ) as line:
            found[way] = json.loads(line)
    return found


def main(what: str, *args: str) -> None:
    """One of the processes that a benchmark starts."""
    gc.freeze()  # as ``lynx serve`` and engines do
    if what == "serve":
        SERVERS[args[0]](args[1])
    elif what == "rates-client":
        print(json.dumps(rates(int(args[0]))), flush=True)
    else:
        print(json.dumps(link_client(int(args[0]), float(args[1]))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
