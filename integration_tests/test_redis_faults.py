"""What a store makes of a Redis server that is killed, emptied, replaced, full, frozen or cut off.

After each fault: no exception out of the store, no wrong number, and the tier is used again.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from _redis_servers import Server, cluster, needs_redis, running, wait_until

from lynx_backend import Codec
from lynx_backend.config import RedisConfig
from lynx_backend.keys import ChunkKey, Part
from lynx_backend.store import ChunkStore, Presence, new_cache
from lynx_backend.tiers import GuardedTier
from lynx_backend.tiers.breaker import FAILURES
from lynx_backend.tiers.redis import RedisTier

registry = pytest.importorskip("prometheus_client").REGISTRY
pytestmark = needs_redis

KEYS = [ChunkKey(b"i" * 16, n.to_bytes(16, "little")) for n in range(200)]
LIMIT = 20.0
TIMEOUT = 0.5


def cache(n: int) -> torch.Tensor:
    """The cache of chunk n, about 300 kB of objects."""
    g = torch.Generator().manual_seed(n)
    return torch.randn(2, 2, 256, 2, 128, generator=g).to(torch.bfloat16)


def store_of(server: Server, **settings: object) -> ChunkStore:
    waits = {"timeout_seconds": TIMEOUT, "connect_timeout_seconds": TIMEOUT}
    given = {"url": server.url, **waits, **settings}
    return ChunkStore(Codec(), [GuardedTier(RedisTier(RedisConfig(**given)), True)])


@pytest.fixture(scope="module")
def q_full() -> list[torch.Tensor]:
    codec = Codec()
    return [codec.decode(*codec.encode(cache(n))) for n in range(8)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(Server(tmp_path / "redis")) as server:
        yield server


@pytest.fixture
def store(server: Server) -> Iterator[ChunkStore]:
    store = store_of(server)
    yield store
    store.close()


def right(store: ChunkStore, n: int, q_full: list[torch.Tensor]) -> bool:
    """Whether chunk n is there; it is as it was stored whenever it is."""
    found = store.get(KEYS[n])
    assert found is None or torch.equal(found, q_full[n])
    return found is not None


def works(store: ChunkStore, n: int, q_full: list[torch.Tensor]) -> bool:
    return store.put(KEYS[n], cache(n)) and right(store, n, q_full)


def metric(name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


def breaker_open() -> bool:
    return metric("lynx_breaker_open", tier="redis") == 1


def errors() -> float:
    return sum(metric("lynx_errors_total", kind=k) for k in ("TierError", "TierUnavailableError"))


@contextmanager
def traffic(store: ChunkStore, q_full: list[torch.Tensor]) -> Iterator[list[str]]:
    """Two threads that put and get all the while; what went wrong, so far."""
    failures: list[str] = []
    stop = threading.Event()

    def work(mine: range) -> None:
        try:
            while not stop.is_set():
                for n in mine:
                    store.put(KEYS[n], cache(n))
                    right(store, n, q_full)
                    store.lookup(KEYS[:8])
        except BaseException as e:
            failures.append(repr(e))

    threads = [threading.Thread(target=work, args=(range(i, 8, 2),)) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_killed_in_the_middle_of_batches_and_started_empty(server, store, q_full):
    before = errors()
    with traffic(store, q_full) as failures:
        for _ in range(5):
            wait_until(lambda: int(server.ask("DBSIZE")) > 4)
            server.kill()
            wait_until(breaker_open)
            server.start()
            wait_until(lambda: not breaker_open())
    assert failures == []
    assert errors() > before
    assert works(store, 0, q_full)


def test_another_server_with_other_data_on_the_same_port(server, store, q_full):
    """Its values under our keys are foreign, damaged or of another encoding: all of them misses."""
    assert works(store, 0, q_full)
    server.kill()
    server.start()
    other = store_of(server)
    pairs = [Codec().encode(cache(n), KEYS[0].digest) for n in (0, 1)]
    anchors, residuals = zip(*pairs, strict=True)
    tier = other.tiers[0]
    tier.put(KEYS[0].object(Part.ANCHOR), anchors[0].numpy().data)
    tier.put(KEYS[0].object(Part.RESIDUAL), residuals[1].numpy().data)
    tier.put(KEYS[1].object(Part.ANCHOR), anchors[0].numpy().data)
    tier.put(KEYS[1].object(Part.RESIDUAL), residuals[0].numpy().data)
    tier.put(KEYS[2].object(Part.ANCHOR), b"something else")
    wait_until(lambda: store.lookup(KEYS[:1]) == [Presence.FULL])
    assert [store.get(KEYS[n]) for n in range(4)] == [None] * 4
    assert works(store, 0, q_full)


def test_maxmemory_without_eviction(server, store, q_full):
    """Writes pause, reads go on, and when there is room again it is used."""
    assert works(store, 0, q_full)
    used = int(server.ask("INFO", "memory").decode().split("used_memory:")[1].split()[0])
    server.ask("CONFIG", "SET", "maxmemory", str(used + (1 << 20)))
    server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    full = metric("lynx_errors_total", kind="TierFullError")
    n = 10
    while store.put(KEYS[n], cache(n)):
        n += 1
        assert n < 20
    for _ in range(FAILURES):
        assert not store.put(KEYS[n], cache(n))
    assert metric("lynx_errors_total", kind="TierFullError") >= full + FAILURES
    assert breaker_open()
    assert right(store, 0, q_full), "reading is not paused"
    assert store.lookup([KEYS[n]]) != [Presence.FULL]
    server.ask("CONFIG", "SET", "maxmemory", "0")
    wait_until(lambda: store.put(KEYS[n], cache(n)), LIMIT)
    assert not breaker_open()


def test_a_foreign_value_costs_its_own_chunk_alone(server, store, q_full):
    for n in range(3):
        assert works(store, n, q_full)
    residual = f"lynx:{KEYS[0].object(Part.RESIDUAL)}"
    server.ask("DEL", residual)
    server.ask("RPUSH", residual, "x")
    for _ in range(2 * FAILURES):
        found = store.get_many(KEYS[:3], lambda _, layout: new_cache(layout))
        assert [kv is not None for kv in found] == [False, True, True]
        wanted = [Presence.COARSE, Presence.FULL, Presence.FULL]
        assert store.lookup(KEYS[:3]) == wanted
    assert not breaker_open()
    assert works(store, 0, q_full)


def test_what_is_too_large_here_says_nothing_of_the_server(server, q_full):
    store = store_of(server, max_object_bytes=400_000)
    large = torch.cat([cache(0)] * 4, dim=2)
    for n in range(2 * FAILURES):
        assert not store.put(KEYS[n], large)
    assert not breaker_open()
    assert works(store, 0, q_full)
    server.kill()
    while not breaker_open():
        assert not store.put(KEYS[1], cache(1))
    assert not store.put(KEYS[1], large)
    assert breaker_open(), "it was not asked"
    store.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "volatile-ttl"])
def test_maxmemory_with_eviction(server, q_full, policy):
    """Either part of a chunk may go at any time. Under volatile-ttl a residual goes first."""
    store = store_of(server, ttl_seconds=3600)
    empty = int(server.ask("INFO", "memory").decode().split("used_memory:")[1].split()[0])
    server.ask("CONFIG", "SET", "maxmemory", str(empty + (12 << 20)))
    server.ask("CONFIG", "SET", "maxmemory-policy", policy)
    server.ask("CONFIG", "SET", "maxmemory-samples", "64")
    for n in range(80):
        assert store.put(KEYS[n], cache(n % 8))
    found = store.lookup(KEYS[:80])
    assert found.count(Presence.FULL) > 10
    assert found.count(Presence.FULL) < 60
    for n in range(80):
        got = store.get(KEYS[n])
        assert got is None or torch.equal(got, q_full[n % 8])
    names = set(store.tiers[0].names())
    orphans = [
        key
        for key in KEYS[:80]
        if key.object(Part.RESIDUAL) in names and key.object(Part.ANCHOR) not in names
    ]
    if policy == "volatile-ttl":
        assert orphans == []
        assert found.count(Presence.COARSE) < 10
        assert found[-20:] == [Presence.FULL] * 20
    store.close()


@pytest.mark.parametrize("seconds", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_frozen(server, store, q_full, seconds):
    """It takes connections and says nothing: one wait, then none until it answers."""
    assert works(store, 0, q_full)
    server.signal(signal.SIGSTOP)
    try:
        assert not store.put(KEYS[1], cache(1))
        assert not right(store, 0, q_full)
        deadline = time.monotonic() + seconds
        taken = []
        while (started := time.monotonic()) < deadline:
            assert not right(store, 0, q_full)
            taken.append(time.monotonic() - started)
            assert not store.put(KEYS[1], cache(1))
        assert statistics.median(taken) < TIMEOUT / 4, "most calls must not wait"
        assert breaker_open()
    finally:
        server.signal(signal.SIGCONT)
    wait_until(lambda: right(store, 0, q_full), LIMIT)
    wait_until(lambda: works(store, 1, q_full), LIMIT)
    assert not breaker_open()


def test_not_there_at_start(server, q_full):
    server.kill()
    store = store_of(server)
    assert not store.put(KEYS[0], cache(0))
    assert store.lookup(KEYS[:2]) == [Presence.ABSENT] * 2
    server.start()
    wait_until(lambda: works(store, 0, q_full), LIMIT)
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make network namespaces")
def test_the_networks_link_is_cut(tmp_path, q_full):
    name = f"lynx{os.getpid()}"

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"no network namespace can be made here: {e}")
    try:
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b")
        ip("link", "set", f"{name}b", "netns", name)
        ip("addr", "add", "10.213.7.1/30", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("netns", "exec", name, "ip", "link", "set", "lo", "up")
        ip("netns", "exec", name, "ip", "addr", "add", "10.213.7.2/30", "dev", f"{name}b")
        ip("netns", "exec", name, "ip", "link", "set", f"{name}b", "up")
        server = Server(
            tmp_path,
            host="10.213.7.2",
            netns=name,
            arguments=("--protected-mode", "no"),
        )
        with running(server):
            store = store_of(server)
            assert works(store, 0, q_full)
            with traffic(store, q_full) as failures:
                for _ in range(2):
                    ip("netns", "exec", name, "ip", "link", "set", f"{name}b", "down")
                    wait_until(breaker_open)
                    ip("netns", "exec", name, "ip", "link", "set", f"{name}b", "up")
                    wait_until(lambda: not breaker_open())
            assert failures == []
            wait_until(lambda: works(store, 0, q_full), LIMIT)
            store.close()
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


def test_a_cluster_loses_a_node(tmp_path, q_full):
    with cluster(tmp_path, 3, "--cluster-require-full-coverage", "no") as nodes:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        config = RedisConfig(url=f"redis+cluster://{hosts}", timeout_seconds=TIMEOUT)
        store = ChunkStore(Codec(), [GuardedTier(RedisTier(config), True)])
        for n in range(8):
            assert works(store, n, q_full)
        nodes[0].kill()
        for n in range(8):
            right(store, n, q_full)
            store.put(KEYS[n], cache(n))
        nodes[0].start()
        wait_until(lambda: b"cluster_state:ok" in nodes[0].ask("CLUSTER", "INFO"))
        wait_until(lambda: all(works(store, n, q_full) for n in range(8)), LIMIT)
        store.close()
