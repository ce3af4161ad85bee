"""A link of a set rate on one machine: two network namespaces, or else the loopback.

Needs root, ``ip`` and ``tc``. Both ends are network devices; the kernel's token bucket (tc tbf)
lets the set number of bits a second through, from the far end to this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Link:
    """Two addresses of this machine.

    Attributes:
        there: address of the far end.
        prefix: what starts a command at the far end.
        device: the network device of this end.
        shaped: whether the kernel keeps the rate; else whoever sends has to.
    """

    there: str
    prefix: tuple[str, ...]
    device: str
    shaped: bool

    @property
    def received(self) -> int:
        """Bytes that came in so far, with all headers."""
        return int(Path(f"/sys/class/net/{self.device}/statistics/rx_bytes").read_text())

    def cut(self) -> None:
        """Take the link down, as if a cable were pulled."""
        _run(f"ip link set {self.device} down")


@contextmanager
def shaped_link(mbps: float) -> Iterator[Link]:
    """A link of ``mbps`` Mbit/s for as long as this lasts; without the rights, the loopback."""
    pid = os.getpid()
    name, device = f"lynx-{pid}", f"lynx{pid % 10**7}"
    # Of its own, as another process may do the same.
    here, there = (f"10.{64 + pid // 256 % 64}.{pid % 256}.{i}" for i in (1, 2))
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")) or not _made(name):
        yield Link("127.0.0.1", (), "lo", False)
        return
    try:
        inside = f"ip -n {name}"
        _run(f"ip link add {device} type veth peer name inner netns {name}")
        _run(f"ip addr add {here}/24 dev {device}")
        _run(f"ip link set {device} up")
        _run(f"{inside} addr add {there}/24 dev inner")
        _run(f"{inside} link set inner up")
        _run(f"{inside} link set lo up")
        kbit = round(1000 * mbps)
        _run(f"tc -n {name} qdisc add dev inner root tbf rate {kbit}kbit burst 128kb latency 100ms")
        yield Link(there, ("ip", "netns", "exec", name), device, True)
    finally:
        subprocess.run(["ip", "link", "del", device], check=False, capture_output=True)
        _run(f"ip netns del {name}")


def _made(namespace: str) -> bool:
    made = subprocess.run(["ip", "netns", "add", namespace], check=False, capture_output=True)
    return made.returncode == 0


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
