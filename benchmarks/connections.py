"""Connections to a node that come and go: what is left behind. For docs/reliability.md.

    nice python benchmarks/connections.py --cycles 500

A node in a process of its own; this process connects, fetches an object, compares it and closes,
over and over. With ``--killed``, it also loses so many connections in the middle of a message: the
node is killed while it sends, and another started at once.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration_tests"))
from test_ucx_faults import OPTIONS, Process, begun, fetched
from ucx_node import content

from lynx_backend.errors import TransportError
from lynx_backend.transport.client import UcxTransport
from lynx_backend.transport.greeting import LinkOptions

MIB = 1 << 20
SETTLE_SECONDS = 5.0
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


def lose_one() -> bool:
    """Kill a node in the middle of a message; whether that was one."""
    node = Process(1)
    transport = UcxTransport("127.0.0.1", node.port, OPTIONS)
    try:
        transport.connect()
        _, future = begun(transport)
        node.stop()
        with contextlib.suppress(TransportError):
            return not future.result(30.0)
        return True
    finally:
        node.stop()
        transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cycles", type=int, default=500)
    parser.add_argument("--killed", type=int, default=0)
    arguments = parser.parse_args()
    node = Process(1, timeout=PATIENT.timeout_seconds)
    pids = {"node": node.process.pid, "client": os.getpid()}
    print("| after | node: descriptors | MiB | client: descriptors | MiB |\n|---|---|---|---|---|")
    for done in range(arguments.cycles + 1):
        if done in (10, *range(0, arguments.cycles + 1, 100)):
            time.sleep(SETTLE_SECONDS)  # endpoints are closed by threads of their own
            row = [f"{fds} | {mib:.1f}" for fds, mib in map(used, pids.values())]
            print(f"| {done} | {' | '.join(row)} |", flush=True)
        if done < arguments.cycles:
            cycle(node)
    node.stop()
    for lost in range(arguments.killed):
        before = used(os.getpid())
        if lose_one():
            gc.collect()  # an exception and the frame that caught it hold the buffer
            time.sleep(1.0)
            fds, mib = used(os.getpid())
            print(f"lost {lost + 1}: {fds - before[0]:+} descriptors, {mib - before[1]:+.1f} MiB")


if __name__ == "__main__":
    main()
