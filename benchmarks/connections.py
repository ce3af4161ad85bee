"""Connections to a node that come and go, or are lost: what is left. For docs/reliability.md.

    nice python benchmarks/connections.py --cycles 500
    nice python benchmarks/connections.py --cycles 0 --aborted 200 --hung 40 --killed 25
    nice python benchmarks/connections.py --cycles 0 --garbage 500 --slow 20

A node in a process of its own; this process connects, fetches an object, compares it and closes,
over and over. Then connections are lost with 64 MiB on their way: given up by this side with no
time to finish, or because the node is stopped (SIGSTOP, and goes on later) or killed, in which case
another, which has other data, takes its port. What comes after the fetch has failed must not be
written to its buffer, and the next object must be the one that the node has now.

Garbage: bytes of no meaning, or a greeting that breaks off in them, to the node, and such an answer
to this process. Slow: another client stops reading in the middle of 64 MiB, while this one fetches
what must be right, and ends when the node has let it go.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import REGISTRY

sys.path.insert(0, str(Path(__file__).parents[1] / "integration_tests"))
from test_ucx_faults import OPTIONS, Process, begun, fetched
from ucx_node import content

from lynx_backend.errors import TransportError
from lynx_backend.transport import connection
from lynx_backend.transport.client import UcxTransport
from lynx_backend.transport.greeting import LinkOptions
from lynx_backend.transport.protocol import NODE_BYTES

MIB = 1 << 20
SETTLE_SECONDS = 5.0
WARM_UP = 3
# This measures what is left, not how fast a busy machine is.
PATIENT = LinkOptions(timeout_seconds=30.0)


def used(pid: int) -> tuple[int, float]:
    """Open descriptors, and resident memory in MiB."""
    proc = Path(f"/proc/{pid}")
    pages = int((proc / "statm").read_text().split()[1])
    return len(list((proc / "fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE") / MIB


def cycle(node: Process) -> None:
    transport = UcxTransport("127.0.0.1", node.port, PATIENT)
    transport.connect()
    assert fetched(transport, 3) == content(1, 3)
    transport.close()


def cycles(count: int) -> None:
    """A table of what both ends have after so many connections."""
    node = Process(1, timeout=PATIENT.timeout_seconds)
    pids = {"node": node.process.pid, "client": os.getpid()}
    print("| after | node: descriptors | MiB | client: descriptors | MiB |\n|---|---|---|---|---|")
    for done in range(count + 1):
        if done in (10, *range(0, count + 1, 100)):
            time.sleep(SETTLE_SECONDS)  # endpoints are closed by threads of their own
            row = [f"{fds} | {mib:.1f}" for fds, mib in map(used, pids.values())]
            print(f"| {done} | {' | '.join(row)} |", flush=True)
        if done < count:
            cycle(node)
    node.stop()


def connected(transport: UcxTransport) -> None:
    """Connect, as often as it takes: a node that was stopped has something to do first."""
    until = time.monotonic() + PATIENT.timeout_seconds
    while not transport.connected:
        assert time.monotonic() < until
        with contextlib.suppress(TransportError):
            transport.connect()


#: Seconds that it took, whether a byte was wrong, the node's process.
Loss = tuple[float, bool, int]


def losses(how: str) -> Iterator[Loss]:
    """Lose one connection after another: seconds until the fetch failed."""
    seed = 1
    node = Process(seed)
    transport = UcxTransport("127.0.0.1", node.port, OPTIONS)
    try:
        while True:
            connected(transport)
            out, future = begun(transport)
            time.sleep(random.uniform(0, 0.004))
            started = time.monotonic()
            if how == "aborted":
                transport.abort()
            else:
                node.signal(signal.SIGSTOP if how == "hung" else signal.SIGKILL)
            with contextlib.suppress(TransportError):
                future.result(PATIENT.timeout_seconds)  # or it was all there
            seconds = time.monotonic() - started
            out[:] = bytes(len(out))
            if how == "hung":
                node.signal(signal.SIGCONT)
            elif how == "killed":
                node.stop()
                seed += 1
                node = Process(seed, node.port)
                content.cache_clear()  # what it made of the last one
            connected(transport)
            wrong = fetched(transport, 3) != content(seed, 3) or out.count(0) != len(out)
            yield seconds, wrong, node.process.pid
    finally:
        node.stop()
        transport.close()


def garbage(_: str) -> Iterator[Loss]:
    """Strangers, of this node and of this process: seconds until they were refused."""
    rng = random.Random(1)
    node = Process(1)
    transport = UcxTransport("127.0.0.1", node.port, OPTIONS)
    connected(transport)

    def meaningless() -> bytes:
        hello = OPTIONS.hello(rng.randbytes(NODE_BYTES)).pack()
        begins = hello[: rng.choice((0, 5, 40, len(hello)))]
        return begins + rng.randbytes(rng.choice((0, 50, 5000)))

    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            while True:
                started = time.monotonic()
                with socket.create_connection(("127.0.0.1", node.port)) as stranger:
                    stranger.sendall(meaningless())
                    stranger.settimeout(PATIENT.timeout_seconds)
                    with contextlib.suppress(ConnectionError):
                        while stranger.recv(4096):
                            pass
                stray = UcxTransport("127.0.0.1", port, OPTIONS)
                connecting = threading.Thread(target=refused, args=(stray,))
                connecting.start()
                with listener.accept()[0] as stranger:
                    stranger.sendall(meaningless())
                    connecting.join()
                stray.close()
                seconds = time.monotonic() - started
                yield seconds, fetched(transport, 3) != content(1, 3), node.process.pid
    finally:
        node.stop()
        transport.close()


def refused(transport: UcxTransport) -> None:
    try:
        transport.connect()
    except TransportError:
        return
    raise AssertionError("connected to a stranger")


def slow(_: str) -> Iterator[Loss]:
    """Clients that stop in the middle: seconds until the node has let them go."""
    node = Process(1)
    transport = UcxTransport("127.0.0.1", node.port, OPTIONS)
    connected(transport)
    before = used(node.process.pid)[0]
    command = [sys.executable, __file__, "--stops", str(node.port)]
    try:
        while True:
            reader = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert reader.stdout is not None
            assert b"begun\n" in iter(reader.stdout.readline, b"")
            reader.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            wrong = any(fetched(transport, i) != content(1, i) for i in range(9))
            while used(node.process.pid)[0] > before:
                assert time.monotonic() - started < PATIENT.timeout_seconds
                time.sleep(0.05)
            seconds = time.monotonic() - started
            reader.kill()
            reader.wait()
            yield seconds, wrong, node.process.pid
    finally:
        node.stop()
        transport.close()


def stops(port: int) -> None:
    """The client of :func:`slow`, which stops it."""
    transport = UcxTransport("127.0.0.1", port, OPTIONS)
    transport.connect()
    begun(transport)
    print("begun", flush=True)
    sys.stdin.read()


WAYS = {"aborted": losses, "hung": losses, "killed": losses, "garbage": garbage, "slow": slow}


def lost(how: str, count: int) -> str:
    """A row of a table, for ``count`` losses after a few that do not count."""
    grace = connection._GRACE_SECONDS
    connection._GRACE_SECONDS = 0.0 if how == "aborted" else grace

    def state(pid: int) -> tuple[float, ...]:
        gc.collect()  # an exception and the frame that caught it hold the buffer
        time.sleep(SETTLE_SECONDS)
        discarded = REGISTRY.get_sample_value("lynx_ucx_discarded_workers_total") or 0.0
        return *used(os.getpid()), *used(pid), discarded

    longest, wrong = 0.0, 0
    losing = WAYS[how](how)
    for i in range(WARM_UP + count):
        seconds, mistaken, pid = next(losing)
        if i >= WARM_UP:
            longest, wrong = max(longest, seconds), wrong + mistaken
        if i == WARM_UP - 1:
            before = state(pid)
    fds, mib, node_fds, node_mib, discarded = (
        b - a for a, b in zip(before, state(pid), strict=True)
    )
    losing.close()
    connection._GRACE_SECONDS = grace
    node = "another" if how == "killed" else f"{node_fds:+.0f}, {node_mib:+.1f} MiB"
    return (
        f"| {how} | {count} | {discarded:.0f} | {longest:.2f} s | {wrong} | "
        f"{fds:+.0f}, {mib:+.1f} MiB | {node} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cycles", type=int, default=500)
    for how in WAYS:
        parser.add_argument(f"--{how}", type=int, default=0)
    parser.add_argument("--stops", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stops:
        stops(arguments.stops)
        return
    if arguments.cycles:
        cycles(arguments.cycles)
    counts = {how: getattr(arguments, how) for how in WAYS}
    if any(counts.values()):
        print("| how | times | in the middle | longest wait | wrong | client | node |")
        print("|---|---|---|---|---|---|---|", flush=True)
    for how, count in counts.items():
        if count:
            print(lost(how, count), flush=True)


if __name__ == "__main__":
    main()
