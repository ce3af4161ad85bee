"""Redis and NVMe tiers against what lies beneath them and against LMCache's, in one run.

    python benchmarks/tiers.py --out out/tiers.json [--folder /mnt/nvme/scratch] [--objects 1000000]

Every round runs all contestants one after the other, so that they meet the same noise. What is
printed is the median of the rounds' GB/s, and of the rounds' ratios to the first contestant. CPU is
that of this process, in seconds per GB. Needs redis-server; LMCache is left out if not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hiredis
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "integration_tests"))
from _redis_servers import Server, running

from lynx_backend.config import RedisConfig
from lynx_backend.keys import ChunkKey, ObjectName, Part
from lynx_backend.tiers import NvmeTier
from lynx_backend.tiers.arena import page_memory
from lynx_backend.tiers.redis import RedisTier

MIB = 1 << 20
SIZES = (1, 4, 16)
BATCH_BYTES = 64 * MIB
Contestants = dict[str, Callable[[], object]]


def names(count: int) -> list[ObjectName]:
    digests = (hashlib.blake2b(bytes([i, 7]), digest_size=16).digest() for i in range(count))
    return [ChunkKey(b"benchmark-tiers!", digest).object(Part.ANCHOR) for digest in digests]


def compete(contestants: Contestants, moved: int, rounds: int) -> list[dict[str, Any]]:
    """GB/s, ratio to the first contestant and CPU seconds per GB of each."""
    took: dict[str, list[float]] = {name: [] for name in contestants}
    cpu: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, work in contestants.items():
            start, used = time.perf_counter(), time.process_time()
            work()
            if number:  # the first round warms up
                took[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - used)
    first = next(iter(took.values()))
    return [
        {
            "who": name,
            "GB/s": moved / 1e9 / statistics.median(times),
            "ratio": statistics.median(f / t for f, t in zip(first, times, strict=True)),
            "CPU s/GB": statistics.median(cpu[name]) * 1e9 / moved,
        }
        for name, times in took.items()
    ]


class BareHiredis:
    """One socket, commands packed and answers parsed by hiredis, all of a batch in one go."""

    def __init__(self, server: Server) -> None:
        self.socket = socket.create_connection((server.host, server.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = bytearray(MIB)

    def put(self, keys: list[bytes], data: bytes) -> None:
        reader = hiredis.Reader(notEnoughData=self)
        for key in keys:
            self.socket.sendall(hiredis.pack_command((b"SET", key, data)))
        self._answers(reader, len(keys))

    def get(self, keys: list[bytes]) -> list[bytes]:
        reader = hiredis.Reader(notEnoughData=self)
        self.socket.sendall(b"".join(hiredis.pack_command((b"GET", key)) for key in keys))
        return self._answers(reader, len(keys))

    def lengths(self, keys: list[bytes]) -> list[Any]:
        reader = hiredis.Reader(notEnoughData=self)
        self.socket.sendall(b"".join(hiredis.pack_command((b"STRLEN", key)) for key in keys))
        return self._answers(reader, len(keys))

    def _answers(self, reader: hiredis.Reader, count: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < count:
            answer = reader.gets()
            if answer is self:
                reader.feed(self.buffer, 0, self.socket.recv_into(self.buffer))
            else:
                found.append(answer)
        return found


class LMCache:
    """LMCache's Redis connector and local disk backend, set up as its engine does it."""

    def __init__(self, size: int, count: int, url: str, folder: Path, direct: bool) -> None:
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        shape = (8, 2, 256, 1, size // 2 // 8 // 2 // 256)  # bfloat16
        metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.bfloat16, shape)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=256,
            local_cpu=False,
            max_local_cpu_size=1.0,
            local_disk=str(folder),
            max_local_disk_size=4.0,
            lmcache_instance_id="benchmark",
            extra_config={"use_odirect": direct},
        )
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.cpu = LocalCPUBackend(config, metadata, "cpu")
        self.redis = self._call(self._made(RedisConnector, url, self.loop, self.cpu))
        self.disk = LocalDiskBackend(config, self.loop, self.cpu, "cpu", None, metadata)
        kv_shape = torch.Size((2, 8, 256, shape[-1]))
        self.keys = [CacheEngineKey("m", 1, 0, i, torch.bfloat16) for i in range(count)]
        self.objects = []
        for _ in range(count):
            made = self.cpu.allocate(kv_shape, torch.bfloat16, MemoryFormat.KV_2LTD)
            memoryview(made.byte_array).cast("B")[:] = os.urandom(size)
            self.objects.append(made)
        assert len(self.objects[0].byte_array) == size

    def put_redis(self) -> None:
        self._call(self.redis.batched_put(self.keys, self.objects))

    def get_redis(self) -> None:
        self._drop(self._call(self.redis.batched_get_non_blocking("l", self.keys)))

    def put_disk(self) -> None:
        done = threading.Semaphore(0)
        for key in self.keys:
            self.disk.remove(key)
        for key, made in zip(self.keys, self.objects, strict=True):
            self.disk.submit_put_task(key, made, lambda _: done.release())
        for _ in self.keys:
            assert done.acquire(timeout=60)

    def get_disk(self) -> None:
        self._drop(self.disk.batched_get_blocking(self.keys))

    def _drop(self, found: list[Any]) -> None:
        assert len(found) == len(self.keys)
        assert None not in found
        for each in found:
            each.ref_count_down()

    def _call(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(120)

    @staticmethod
    async def _made(kind: Any, *arguments: Any) -> Any:
        return kind(*arguments)


class RawFiles:
    """A plain loop over files with O_DIRECT and one aligned buffer, flushed like the tier's."""

    def __init__(self, folder: Path, data: bytes, count: int) -> None:
        folder.mkdir()
        self.paths = [str(folder / str(i)) for i in range(count)]
        self.memory = page_memory(len(data))
        self.memory.write(data)
        self.view = memoryview(self.memory)
        self.views = [memoryview(page_memory(len(data))) for _ in range(8)]
        self.pool = ThreadPoolExecutor(4)

    def put(self, flush: bool) -> None:
        for path in self.paths:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
            os.pwrite(fd, self.view, 0)
            if flush:
                os.fsync(fd)
            os.close(fd)

    def get(self) -> None:
        for path in self.paths:
            self._read(path, self.view)

    def get_by_four(self) -> None:
        list(self.pool.map(self._read, self.paths, itertools.cycle(self.views)))

    @staticmethod
    def _read(path: str, into: memoryview) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        assert os.readv(fd, [into]) == len(into)
        os.close(fd)


def lmcache_or_none(*arguments: Any) -> LMCache | None:
    try:
        return LMCache(*arguments)
    except ImportError as e:
        print(f"LMCache is left out: {e}", file=sys.stderr)
        return None


def redis_against(server: Server, peer: LMCache | None, size: int, count: int, rounds: int) -> Any:
    tier = RedisTier(RedisConfig(url=server.url))
    objects = names(count)
    bare = BareHiredis(server)
    data = os.urandom(size)
    raw_keys = [b"raw:%d" % i for i in range(count)]

    def put() -> None:
        for name in objects:
            tier.put(name, data)

    pool = ThreadPoolExecutor(2)  # as many as a store has for writing
    puts: Contestants = {
        "bare hiredis pipeline": lambda: bare.put(raw_keys, data),
        "Lynx": put,
        "Lynx, 2 threads": lambda: list(pool.map(lambda name: tier.put(name, data), objects)),
    }
    gets: Contestants = {
        "bare hiredis pipeline": lambda: bare.get(raw_keys),
        "Lynx": lambda: tier.get_many(objects),
    }
    if peer is not None:
        puts["LMCache RedisConnector"] = peer.put_redis
        gets["LMCache RedisConnector"] = peer.get_redis
    return {
        "put": compete(puts, size * count, rounds),
        "get": compete(gets, size * count, rounds),
    }


def nvme_against(
    folder: Path, peers: dict[str, LMCache], size: int, count: int, rounds: int
) -> Any:
    data = os.urandom(size)
    objects = names(count)
    raw = RawFiles(folder / "raw", data, count)
    tier = NvmeTier(folder / "lynx", 4 << 30)
    cached = NvmeTier(folder / "lynx-cached", 4 << 30, direct=False)
    pool = ThreadPoolExecutor(2)

    def put_all(tier: NvmeTier) -> None:
        for name in objects:
            tier.put(name, data)

    def get_all(tier: NvmeTier) -> None:
        for name in objects:
            assert tier.get(name) is not None

    def put_by_two() -> None:
        list(pool.map(lambda name: tier.put(name, data), objects))

    puts: Contestants = {
        "raw O_DIRECT loop, fsync": lambda: raw.put(True),
        "raw O_DIRECT loop, not flushed": lambda: raw.put(False),
        "Lynx": lambda: put_all(tier),
        "Lynx, 2 threads": put_by_two,
        "Lynx, page cache": lambda: put_all(cached),
    }
    gets: Contestants = {
        "raw O_DIRECT loop": raw.get,
        "raw O_DIRECT, 4 threads": raw.get_by_four,
        "Lynx": lambda: get_all(tier),
        "Lynx, get_many": lambda: tier.get_many(objects),
    }
    for name, peer in peers.items():
        puts[f"{name} (not flushed)"] = peer.put_disk
        gets[name] = peer.get_disk
    found = {
        "put": compete(puts, size * count, rounds),
        "get": compete(gets, size * count, rounds),
    }
    pool.shutdown()
    return found


def lookup(server: Server, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds for 1,000 keys, half of them there."""
    keys = [
        ChunkKey(b"benchmark-tiers!", i.to_bytes(16, "big")[::-1]).object(Part.ANCHOR)
        for i in range(1000)
    ]
    redis, nvme, bare = RedisTier(RedisConfig(url=server.url)), NvmeTier(folder, 1 << 30), None
    bare = BareHiredis(server)
    raw = [f"lynx:{name}".encode() for name in keys]
    for name in keys[::2]:
        redis.put(name, b"x")
        nvme.put(name, b"x")
    contestants: Contestants = {
        "bare hiredis pipeline": lambda: bare.lengths(raw),
        "Lynx Redis": lambda: redis.sizes(keys),
        "Lynx NVMe": lambda: nvme.sizes(keys),
    }
    rows = compete(contestants, 10**9, 5 * rounds)
    return [{"who": row["who"], "ms": 1000 / row["GB/s"]} for row in rows]


def scan(folder: Path, objects: int) -> dict[str, float]:
    """Seconds until a tier with so many (empty) object files is open, and a bare walk over them."""
    for i in range(256):
        (folder / f"{i:02x}").mkdir(parents=True)
    identity = b"benchmark-tiers!".hex()
    for i in range(objects // 2):
        prefix = hashlib.blake2b(i.to_bytes(8, "little"), digest_size=16).hexdigest()
        for part in Part:
            name = f"{folder}/{prefix[:2]}/{identity}{prefix}.{int(part)}"
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT))
    os.sync()
    start = time.perf_counter()
    for i in range(256):
        for entry in os.scandir(folder / f"{i:02x}"):
            entry.stat(follow_symlinks=False)
    walk = time.perf_counter() - start
    start, cpu = time.perf_counter(), time.process_time()
    tier = NvmeTier(folder, 1 << 40)
    took, used = time.perf_counter() - start, time.process_time() - cpu
    assert tier.stats().objects == objects // 2 * 2
    return {"objects": objects, "walk s": walk, "start s": took, "start CPU s": used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/tiers.json"))
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Linux "
        f"{platform.release()}, Python {platform.python_version()}",
    }
    folder = Path(tempfile.mkdtemp(prefix="lynx-benchmark-", dir=arguments.folder))
    try:
        with running(Server(folder / "redis")) as server:
            for mib in SIZES:
                size, count = mib * MIB, BATCH_BYTES // (mib * MIB)
                place = folder / str(mib)
                place.mkdir()
                peers = {
                    f"LMCache local disk{', O_DIRECT' * direct}": made
                    for direct in (False, True)
                    if (
                        made := lmcache_or_none(
                            size, count, server.url, place / f"lmcache{direct}", direct
                        )
                    )
                }
                peer = next(iter(peers.values()), None)
                results[f"redis {mib} MiB"] = redis_against(
                    server, peer, size, count, arguments.rounds
                )
                server.ask("FLUSHALL")
                results[f"nvme {mib} MiB"] = nvme_against(
                    place, peers, size, count, arguments.rounds
                )
                shutil.rmtree(place)
                show({k: v for k, v in results.items() if k.endswith(f" {mib} MiB")})
            results["lookup of 1,000"] = lookup(server, folder / "lookup", arguments.rounds)
        if arguments.objects:
            results["start-up scan"] = scan(folder / "million", arguments.objects)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
    print(json.dumps({k: results[k] for k in results if "MiB" not in k}, indent=1))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1))
    os._exit(0)  # LMCache's threads do not end


def show(results: dict[str, Any]) -> None:
    for what, by_op in results.items():
        for op, rows in by_op.items():
            for row in rows:
                print(
                    f"{what:14} {op:4} {row['who']:45} {row['GB/s']:6.2f} GB/s "
                    f"{row['ratio']:6.2f} x {row['CPU s/GB']:6.2f} CPU s/GB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
