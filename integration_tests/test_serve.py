"""``lynx serve`` in a process of its own, and a store elsewhere that lists it as a peer."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("ucxx", reason="the UCX transport needs ucxx")

from lynx_backend.config import LynxConfig
from lynx_backend.errors import TransportError
from lynx_backend.keys import ChunkKey, Part
from lynx_backend.progressive import ProgressiveRequest, State
from lynx_backend.store import ChunkStore, Presence
from lynx_backend.store_transport import StoreTransport

KEYS = [ChunkKey(bytes(16), bytes([i]) * 16) for i in range(3)]
SECRET = "between nodes only"
WAIT_SECONDS = 60.0
CODEC = {"profile": "linear"}
COMMAND = "from lynx_backend.cli import main; main()"
Node = Callable[..., tuple[subprocess.Popen[bytes], str]]


def chunk(i: int) -> torch.Tensor:
    return torch.randn(2, 4, 256, 2, 64, generator=torch.Generator().manual_seed(i)).bfloat16()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tier on disk that holds two chunks, and the anchor of a third."""
    path = tmp_path / "objects"
    store = ChunkStore.from_config(local(path))
    for i, key in enumerate(KEYS):
        assert store.put(key, chunk(i))
    store.flush(WAIT_SECONDS)
    store.tiers[0].delete([KEYS[2].object(Part.RESIDUAL)])
    store.close()
    return path


def local(path: Path) -> LynxConfig:
    inline = {"codec": CODEC, "memory": {"enabled": False}, "nvme": {"path": str(path)}}
    return LynxConfig.load(inline=inline, environ={})


@pytest.fixture
def node(tmp_path: Path, folder: Path) -> Iterator[Node]:
    made: list[subprocess.Popen[bytes]] = []

    def start(**serve: object) -> tuple[subprocess.Popen[bytes], str]:
        file = tmp_path / "lynx.yaml"
        settings = {
            "codec": CODEC,
            "memory": {"enabled": False},
            "nvme": {"path": str(folder)},
            "serve": {"port": 0, "drain_seconds": 5.0} | serve,
        }
        file.write_text(yaml.safe_dump(settings))
        environ = {k: v for k, v in os.environ.items() if not k.startswith("LYNX_")}
        root = str(Path(__file__).parents[1])
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "serve", "--config", str(file)],
            stdout=subprocess.PIPE,
            env=environ | {"PYTHONPATH": root, "LYNX_PEERS_SECRET": SECRET},
        )
        made.append(process)
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert "serving nvme at 127.0.0.1:" in line
        return process, line.split()[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()


def elsewhere(place: str, **peers: object) -> ChunkStore:
    inline = {
        "codec": CODEC,
        "memory": {"max_bytes": "64MiB"},
        "peers": {"nodes": place, "secret": SECRET} | peers,
    }
    return ChunkStore.from_config(LynxConfig.load(inline=inline, environ={}))


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_store_reads_whole_chunks_from_a_peer_and_keeps_them(node: Node, folder: Path):
    process, place = node()
    store = elsewhere(place)
    eventually(lambda: store.lookup(KEYS[:1]) == [Presence.FULL])
    assert store.lookup(KEYS) == [Presence.FULL, Presence.FULL, Presence.COARSE]
    there = ChunkStore.from_config(local(folder))
    for key in KEYS[:2]:
        kv = store.get(key)
        assert kv is not None
        assert torch.equal(kv, there.get(key))
    assert store.get(KEYS[2]) is None  # an anchor alone is a miss
    assert store.get(ChunkKey(bytes(16), bytes([9]) * 16)) is None
    store.flush(WAIT_SECONDS)
    process.kill()
    # What was read is kept in this node's memory; what was not is a miss, at once.
    eventually(lambda: store.lookup([KEYS[2]]) == [Presence.ABSENT])
    assert store.get(KEYS[0]) is not None
    store.close()
    there.close()


def test_a_node_takes_as_many_descriptors_as_it_may(node: Node):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        process, _ = node()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def start(store: ChunkStore, transport: StoreTransport, name: str = "r") -> ProgressiveRequest:
    """Bring the two whole chunks."""
    kv = torch.zeros(2, 4, 512, 2, 64, dtype=torch.bfloat16)
    return ProgressiveRequest(store, transport, name, KEYS[:2], kv)


def finish(request: ProgressiveRequest) -> torch.Tensor:
    assert request.wait(State.COARSE, WAIT_SECONDS)
    assert request.state == State.FULL or request.residual_ready(WAIT_SECONDS)
    assert request.refine()
    return torch.cat(request._slices, 2)


def test_a_progressive_request_is_served_by_a_peer_and_kept(node: Node, folder: Path):
    process, place = node()
    there = ChunkStore.from_config(local(folder))
    wanted = torch.cat([there.get(key) for key in KEYS[:2]], 2)
    store = elsewhere(place)
    transport = StoreTransport(store)
    eventually(lambda: store.lookup(KEYS[:1]) == [Presence.FULL])
    assert torch.equal(finish(start(store, transport)), wanted)
    assert store.flush(WAIT_SECONDS)
    process.kill()
    eventually(lambda: store.lookup([KEYS[2]]) == [Presence.ABSENT])
    assert torch.equal(finish(start(store, transport, "again")), wanted)
    transport.close()
    store.close()
    there.close()


def test_a_peer_that_hangs_holds_up_nobody_and_one_that_dies_is_lost_at_once(node: Node):
    process, place = node()
    store = elsewhere(place)
    transport = StoreTransport(store)
    mine = ChunkKey(bytes(16), bytes([9]) * 16)
    assert store.put(mine, chunk(9))
    names = [KEYS[0].object(Part.ANCHOR), KEYS[0].object(Part.RESIDUAL), mine.object(Part.ANCHOR)]
    eventually(lambda: None not in transport.sizes(names))
    outs = [memoryview(bytearray(size or 0)) for size in transport.sizes(names)]
    process.send_signal(signal.SIGSTOP)
    far = [transport.fetch("far", name, out) for name, out in zip(names[:2], outs, strict=False)]
    assert transport.fetch("near", names[2], outs[2]).result(WAIT_SECONDS)
    assert not any(future.done() for future in far)
    process.kill()
    for future in far:
        with pytest.raises(TransportError):
            future.result(WAIT_SECONDS)
    assert transport.sizes(names) == [None, None, len(outs[2])]
    request = start(store, transport)
    assert not request.wait(State.COARSE, WAIT_SECONDS)
    assert request.state == State.FAILED
    transport.close()
    store.close()


def test_closing_ends_what_is_under_way_and_leaves_the_links(node: Node):
    process, place = node()
    store = elsewhere(place)
    transport, other = StoreTransport(store), StoreTransport(store)
    names = [KEYS[0].object(part) for part in Part]
    eventually(lambda: None not in transport.sizes(names))
    outs = [memoryview(bytearray(size or 0)) for size in transport.sizes(names)]
    process.send_signal(signal.SIGSTOP)
    futures = [
        each.fetch(str(i), name, out)
        for i, (each, name, out) in enumerate(zip((transport, other), names, outs, strict=True))
    ]
    transport.close()
    process.send_signal(signal.SIGCONT)
    assert futures[1].result(WAIT_SECONDS)
    with pytest.raises(CancelledError):
        futures[0].result(WAIT_SECONDS)
    with pytest.raises(TransportError):
        transport.fetch("2", names[0], outs[0])
    other.close()
    store.close()


def test_without_the_secret_or_with_another_codec_it_stays_a_miss(node: Node):
    _, place = node()
    inline = {"codec": {"profile": "paper"}, "peers": {"nodes": place, "secret": SECRET}}
    other = ChunkStore.from_config(LynxConfig.load(inline=inline, environ={}))
    guessing = elsewhere(place, secret="guessed")
    right = elsewhere(place)
    eventually(lambda: right.lookup(KEYS[:1]) == [Presence.FULL])
    for store in (other, guessing):
        assert store.lookup(KEYS) == [Presence.ABSENT] * 3
        assert store.get(KEYS[0]) is None
        store.close()
    right.close()


def test_sigterm_drains_and_says_so(node: Node):
    with_metrics, place = node(metrics_port=free_port())
    store = elsewhere(place)
    eventually(lambda: store.lookup(KEYS[:1]) == [Presence.FULL])
    with_metrics.send_signal(signal.SIGTERM)
    assert with_metrics.wait(WAIT_SECONDS) == 0
    assert with_metrics.stdout is not None
    assert with_metrics.stdout.read().endswith(b"stopped\n")  # UCX may have said something first
    store.close()


def test_metrics_and_readiness_are_shown_where_asked(node: Node):
    port = free_port()
    _, place = node(metrics_port=port, metrics_host="127.0.0.2")
    store = elsewhere(place)
    eventually(lambda: store.get(KEYS[0]) is not None)
    with urllib.request.urlopen(f"http://127.0.0.2:{port}/", timeout=WAIT_SECONDS) as answer:
        text = answer.read().decode()
    assert "lynx_ready 1.0" in text
    assert "lynx_peer_connections 1.0" in text
    assert 'lynx_objects_total{op="send",part="anchor",result="ok",tier="served"} 1.0' in text
    store.close()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
