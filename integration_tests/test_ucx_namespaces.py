"""A peer in another network namespace, behind a shaped link that can be cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ucxx", reason="the UCX transport needs ucxx")

from lynx_backend.errors import TransportError
from lynx_backend.keys import Part
from lynx_backend.transport.client import UcxTransport
from lynx_backend.transport.greeting import LinkOptions

sys.path.insert(0, str(Path(__file__).parent))
from ucx_node import content, name, size_of

if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
    pytest.skip("network namespaces need root, ip and tc", allow_module_level=True)

NAMESPACE, DEVICE = f"lynx-{os.getpid()}", f"lynx{os.getpid() % 10**7}"
HERE, THERE = "10.79.13.1", "10.79.13.2"
WAIT_SECONDS = 60.0
TIMEOUT = 1.0
LARGE = 9


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def there(*command: str) -> subprocess.Popen[bytes]:
    """A script of this folder, or Python's options, in the other namespace."""
    folder = Path(__file__).parent
    return subprocess.Popen(
        ["ip", "netns", "exec", NAMESPACE, sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{folder.parent}:{folder}"},
    )


# Once for all tests: UCX reads a process's routes once, and finds no way to a device made later.
@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of a node at THERE, 1 Gbit/s away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        yield from _server()


def _server() -> Iterator[int]:
    try:
        run(f"ip netns add {NAMESPACE}")
    except subprocess.CalledProcessError as e:
        pytest.skip(f"no network namespaces here: {e.stderr.decode().strip()}")
    child = None
    try:
        run(f"ip link add {DEVICE} type veth peer name inner netns {NAMESPACE}")
        run(f"ip addr add {HERE}/24 dev {DEVICE}")
        run(f"ip link set {DEVICE} up")
        run(f"ip -n {NAMESPACE} addr add {THERE}/24 dev inner")
        run(f"ip -n {NAMESPACE} link set inner up")
        run(f"ip -n {NAMESPACE} link set lo up")
        shape = "root tbf rate 1gbit burst 512kb latency 50ms"
        run(f"tc -n {NAMESPACE} qdisc add dev inner {shape}")
        child = there("ucx_node.py", THERE, "0", "1")
        assert child.stdout is not None
        yield int(child.stdout.readline())
    finally:
        if child is not None:
            child.kill()
            child.wait()
        subprocess.run(["ip", "link", "del", DEVICE], check=False, capture_output=True)
        run(f"ip netns del {NAMESPACE}")


@pytest.fixture
def transport(server: int) -> Iterator[UcxTransport]:
    made = UcxTransport(THERE, server, LinkOptions(timeout_seconds=TIMEOUT))
    made.connect()
    yield made
    made.close()


def fetched(transport: UcxTransport, i: int, part: Part = Part.RESIDUAL) -> bytes:
    out = bytearray(size_of(i))
    future = transport.fetch(f"{i}", name(i, part), memoryview(out))
    assert future.result(WAIT_SECONDS)
    return bytes(out)


def test_bytes_are_exact_with_anchors_among_the_residuals_of_eight_requests(
    transport: UcxTransport,
):
    outs = {i: bytearray(size_of(i)) for r in range(8) for i in (10 * r + 4, 10 * r + 6)}
    futures = [transport.fetch(f"{i // 10}", name(i), memoryview(out)) for i, out in outs.items()]
    for i in range(102, 112, 3):
        assert fetched(transport, i, Part.ANCHOR) == content(1, i)
    assert all(future.result(WAIT_SECONDS) for future in futures)
    assert all(out == content(1, i) for i, out in outs.items())


def test_a_cut_link_costs_a_bounded_wait_and_heals(transport: UcxTransport):
    out = bytearray(size_of(LARGE))
    future = transport.fetch("r", name(LARGE), memoryview(out))
    until = time.monotonic() + WAIT_SECONDS
    while not any(out[:64]):
        assert time.monotonic() < until
        time.sleep(0.001)
    run(f"ip link set {DEVICE} down")
    started = time.monotonic()
    with pytest.raises(TransportError, match="silent"):
        future.result(WAIT_SECONDS)
    assert time.monotonic() - started < 4 * TIMEOUT
    # Down for as long as TCP would go on trying; what it still holds must not arrive here.
    time.sleep(max(0.0, started + 10 - time.monotonic()))
    with pytest.raises(TransportError):
        transport.connect()
    out[:] = bytes(len(out))
    run(f"ip link set {DEVICE} up")
    until = time.monotonic() + WAIT_SECONDS
    while not transport.connected:
        assert time.monotonic() < until
        with contextlib.suppress(TransportError):
            transport.connect()
    assert fetched(transport, 5) == content(1, 5)
    assert not any(out)


CONNECTS = f"""
from lynx_backend.transport.client import UcxTransport
import sys
client = UcxTransport("{THERE}", int(sys.argv[1]))
client.connect()
client.close()
"""


@pytest.mark.skipif(not shutil.which("nft"), reason="a firewall needs nft (nftables)")
def test_a_client_behind_a_firewall_keeps_out_nobody_else_and_ends_with_its_node(server: int):
    """What the node's UCX sends to the client's own port is dropped: it tries for two minutes."""
    try:
        run(f"nft add table inet {NAMESPACE}")
    except subprocess.CalledProcessError as e:
        pytest.skip(f"no firewall here: {e.stderr.decode().strip()}")
    node = there("ucx_node.py", THERE, "0", "2")
    try:
        assert node.stdout is not None
        assert node.stdin is not None
        port = int(node.stdout.readline())
        run(f"nft add chain inet {NAMESPACE} input {{ type filter hook input priority 0 ; }}")
        run(
            f"nft add rule inet {NAMESPACE} input iifname {DEVICE} "
            "tcp flags & ( syn | ack ) == syn drop"
        )
        client = UcxTransport(THERE, port, LinkOptions(timeout_seconds=TIMEOUT))
        said = ""
        for _ in range(12):  # more than an executor has threads
            with contextlib.suppress(TransportError):
                client.connect()
                client.sizes([name(0)])
            until = time.monotonic() + WAIT_SECONDS
            while client.connected:
                assert time.monotonic() < until
                time.sleep(0.01)
            said += str(client._lost)
        assert "ports of its own" in said
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 3.0
        other = there("-c", CONNECTS, str(port))
        assert other.wait(WAIT_SECONDS) == 0
        node.stdin.close()
        assert node.wait(WAIT_SECONDS) == 0
    finally:
        run(f"nft delete table inet {NAMESPACE}")
        node.kill()
