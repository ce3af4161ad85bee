"""The UCX transport beside what it is built on, and anchors beside first in, first out.

``rates``: objects of one size fetched from another process of this host, against messages of that
size sent by ucxx, with its own asyncio API and by a loop that waits for nothing else, and a plain
asyncio stream, in turns; then reads by NIXL, and by LMCache's channel over it, where they are.

``link``: two network namespaces, a veth pair shaped by ``tc``; what is carried against iperf3, and
what an anchor waits while eight requests' residuals are in full flow, against one queue for all.
Needs root.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

from ..errors import UnsupportedError
from ..keys import ChunkKey, ObjectName, Part
from ..transport.client import UcxTransport
from ..transport.greeting import LinkOptions
from ..transport.server import UcxServer
from .transport_peers import (
    BLOB,
    KIB,
    MIB,
    ROUND_BYTES,
    Fetch,
    buffers,
    count_of,
    lmcache,
    loop,
    serve_lmcache,
    serve_loop,
    serve_nixl,
    serve_stream,
    serve_ucxx,
    stream,
    with_nixl,
    with_ucxx,
)

MODULE = "lynx_backend.benchmarks.transport"
SIZES = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]


def name(size: int, i: int, part: Part = Part.RESIDUAL) -> ObjectName:
    return ChunkKey(bytes(16), struct.pack("<QQ", size, i)).object(part)


class Blob:
    """Has every object: the beginning of one block of random bytes."""

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        return [struct.unpack("<QQ", n.key.prefix)[0] for n in names]

    def get(self, name: ObjectName) -> memoryview:
        return BLOB[: struct.unpack("<QQ", name.key.prefix)[0]]


def serve_lynx(host: str) -> None:
    server = UcxServer(Blob(), host)
    print(server.address[1], flush=True)
    sys.stdin.read()
    server.close()


@contextmanager
def lynx(host: str, port: int) -> Iterator[Fetch]:
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


SERVERS = {
    "lynx": serve_lynx,
    "ucxx": serve_ucxx,
    "loop": serve_loop,
    "stream": serve_stream,
    "nixl": serve_nixl,
    "lmcache": serve_lmcache,
}
#: What Lynx can be measured beside; the first three in turns with it.
QUIET = ("ucxx", "loop", "stream")
BESIDE = (*QUIET, "nixl", "lmcache")
CLIENTS = {"lynx": lynx, "ucxx": with_ucxx, "loop": loop, "stream": stream, "nixl": with_nixl}


@contextmanager
def process(prefix: list[str], *args: str, environ: dict[str, str]) -> Iterator[str]:
    """This script in another process; its first line."""
    command = [*prefix, sys.executable, "-m", MODULE, *args]
    # What they have to say must not stand before what we read.
    quiet = {"UCX_LOG_FILE": "/dev/stderr", "NIXL_LOG_LEVEL": "ERROR", "LMCACHE_LOG_LEVEL": "ERROR"}
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
    "loopback TCP": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
    "shared memory": {"UCX_TLS": "posix,cma,self", "UCX_POSIX_ERROR_HANDLING": "y"},
}


def rates(rounds: int, beside: Sequence[str]) -> list[dict[str, float]]:
    """In this process for one of ``WAYS``, whose variables are set."""
    rows = in_turns(["lynx", *(what for what in beside if what in QUIET)], rounds)
    # These two by themselves: they have threads that never wait.
    if "nixl" in beside:
        rows = [a | b for a, b in zip(rows, in_turns(["nixl"], rounds), strict=True)]
    if "lmcache" in beside:
        for row in rows:
            row["lmcache"] = with_lmcache(str(row["size"]), rounds)
    return rows


def with_lmcache(size: str, rounds: int) -> float:
    with process([], "serve", "lmcache", size, environ={}) as port:
        client = ("lmcache-client", size, port, str(rounds))
        with process([], *client, environ={}) as line:
            return ROUND_BYTES / statistics.median(json.loads(line)) / 1e9


def in_turns(whats: list[str], rounds: int) -> list[dict[str, float]]:
    """GB/s of each for every size, and Lynx's share of theirs."""
    results = []
    with ExitStack() as stack:
        fetches = {}
        for what in whats:
            port = int(stack.enter_context(process([], "serve", what, "127.0.0.1", environ={})))
            fetches[what] = stack.enter_context(CLIENTS[what]("127.0.0.1", port))
        for size in SIZES:
            outs = buffers(size)
            seconds: dict[str, list[float]] = {what: [] for what in fetches}
            for turn in range(rounds + 1):
                for what in random.sample(whats, len(whats)):
                    started = time.perf_counter()
                    fetches[what](size, outs)
                    if turn:
                        seconds[what].append(time.perf_counter() - started)
                    assert outs[0] == BLOB[:size]
            moved = count_of(size) * size
            row: dict[str, float] = {"size": size}
            for what, taken in seconds.items():
                row[what] = moved / statistics.median(taken) / 1e9
            for what in {*QUIET} & {*whats}:
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


def run_rates(rounds: int, beside: Sequence[str]) -> dict[str, Any]:
    """:func:`rates` in a process for each of ``WAYS``.

    Args:
        beside: of ``BESIDE``; those that are not installed are left out.
    """
    nixl, lmcache = (find_spec(package) is not None for package in ("nixl_cu12", "lmcache"))
    missing = {"nixl": not nixl, "lmcache": not (nixl and lmcache)}
    beside = [what for what in beside if not missing.get(what)]
    found = {}
    for way, environ in WAYS.items():
        with process([], "rates-client", str(rounds), *beside, environ=environ) as line:
            found[way] = json.loads(line)
    return found


def main(what: str, *args: str) -> None:
    """One of the processes that a benchmark starts."""
    gc.freeze()  # as ``lynx serve`` and engines do
    if what == "serve":
        SERVERS[args[0]](args[1])
    elif what == "lmcache-client":
        print(json.dumps(lmcache(*map(int, args))), flush=True)
    elif what == "rates-client":
        print(json.dumps(rates(int(args[0]), args[1:])), flush=True)
    else:
        print(json.dumps(link_client(int(args[0]), float(args[1]))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
