"""A store under mixed load and random faults for a long time: does anything grow, or lie?

    nice python benchmarks/soak.py --minutes 20 --out out/soak

Memory, NVMe (an ext4 file system of its own, in a file) and a real Redis server, each given less
than the working set, which goes from 80 to 120 % of what NVMe holds and back. Every result is
compared, bit by bit, with what was stored. Writes a JSON of all samples and faults, and a plot.
Needs root, for mounting, and redis-server.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "integration_tests"))
from _redis_servers import Server, running

from lynx_backend import Codec
from lynx_backend.config import RedisConfig
from lynx_backend.keys import ChunkKey
from lynx_backend.store import ChunkStore
from lynx_backend.tiers import GuardedTier, MemoryTier, NvmeTier
from lynx_backend.tiers.redis import RedisTier

MIB = 1 << 20
MEMORY_BYTES, NVME_BYTES, DISK_BYTES, REDIS_BYTES = 64 * MIB, 512 * MIB, 700 * MIB, 256 * MIB
QUEUE_BYTES = 32 * MIB
CONTENTS = 16
THREADS = 3
PAUSE_SECONDS = 0.004


def content(n: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(n % CONTENTS)
    return torch.randn(2, 2, 256, 2, 128, generator=g).to(torch.bfloat16)


def key(n: int) -> ChunkKey:
    return ChunkKey(b"soak" * 4, n.to_bytes(16, "big")[::-1])


class Load:
    """Threads that get chunks and put what is missing."""

    def __init__(self, store: ChunkStore) -> None:
        codec = store.codec
        self.store = store
        self.contents = [content(n) for n in range(CONTENTS)]
        self.expected = [codec.decode(*codec.encode(kv)) for kv in self.contents]
        self.chunk_bytes = sum(map(len, codec.encode(self.contents[0])))
        self.chunks = 1
        self.counts: Counter[str] = Counter()
        self.slowest = 0.0
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(i,)) for i in range(THREADS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.wait(PAUSE_SECONDS):
            # Recent chunks are asked for more often, as prompts of one conversation are.
            n = int(self.chunks * rng.random() ** 1.5)
            start = time.perf_counter()
            try:
                self._one(n, rng.random())
            except BaseException as e:
                self.errors.append(repr(e))
            self.slowest = max(self.slowest, time.perf_counter() - start)

    def _one(self, n: int, what: float) -> None:
        if what < 0.02:
            self.store.remove([key(n)])
            self.counts["removed"] += 1
            return
        if what < 0.1:
            self.store.lookup([key(i) for i in range(n, n + 32)])
            self.counts["looked up"] += 1
            return
        found = self.store.get(key(n))
        if found is None:
            self.counts["misses"] += 1
            self.store.put(key(n), self.contents[n % CONTENTS])
        elif torch.equal(found, self.expected[n % CONTENTS]):
            self.counts["hits"] += 1
        else:
            self.counts["wrong"] += 1


class Faults:
    """One fault after the other, and what each of them is."""

    def __init__(self, server: Server, disk: Path, rng: random.Random) -> None:
        self.server, self.disk, self.rng = server, disk, rng
        self.kinds: dict[str, Callable[[], None]] = {
            "Redis killed, started empty": self.kill_redis,
            "Redis frozen": self.freeze_redis,
            "Redis full": self.fill_redis,
            "Redis values damaged": self.damage_redis,
            "disk full": self.fill_disk,
            "disk read-only": self.read_only,
            "files damaged": self.damage_files,
            "files removed": self.remove_files,
            "another writer killed": self.kill_writer,
        }

    def kill_redis(self) -> None:
        self.server.kill()
        time.sleep(self.rng.uniform(0, 4))
        self.server.start()
        set_limit(self.server, REDIS_BYTES)

    def freeze_redis(self) -> None:
        self.server.signal(signal.SIGSTOP)
        time.sleep(self.rng.uniform(1, 8))
        self.server.signal(signal.SIGCONT)

    def fill_redis(self) -> None:
        self.server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        self.server.ask("CONFIG", "SET", "maxmemory", str(REDIS_BYTES // 8))
        time.sleep(self.rng.uniform(2, 6))
        set_limit(self.server, REDIS_BYTES)

    def damage_redis(self) -> None:
        for _ in range(20):
            name = self.server.ask("RANDOMKEY").decode().strip()
            if name:
                self.server.ask("SETRANGE", name, str(self.rng.randrange(100_000)), "\x07")

    def fill_disk(self) -> None:
        ballast = self.disk / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as f:
            while True:
                f.write(bytes(MIB))
        time.sleep(self.rng.uniform(1, 4))
        ballast.unlink()

    def read_only(self) -> None:
        # Refused while a file is open for writing; then there is no fault this time.
        if mount("-o", "remount,ro", str(self.disk)):
            time.sleep(self.rng.uniform(1, 4))
            mount("-o", "remount,rw", str(self.disk))

    def damage_files(self) -> None:
        files = self._some_files(20)
        for path in files:
            with suppress(OSError), path.open("r+b") as f:
                f.seek(self.rng.randrange(max(1, path.stat().st_size)))
                byte = f.read(1)
                f.seek(-1, os.SEEK_CUR)
                f.write(bytes([byte[0] ^ 1 << self.rng.randrange(8)]))

    def remove_files(self) -> None:
        for path in self._some_files(100):
            path.unlink(missing_ok=True)

    def kill_writer(self) -> None:
        command = [sys.executable, __file__, "--writer", str(self.disk / "kv")]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(self.rng.uniform(0, 2))
        writer.kill()
        writer.wait()
        writer.stdout.close()

    def _some_files(self, count: int) -> list[Path]:
        files = [p for p in (self.disk / "kv").glob("??/*") if p.suffix != ".tmp"]
        return self.rng.sample(files, min(count, len(files)))


def set_limit(server: Server, limit: int) -> None:
    server.ask("CONFIG", "SET", "maxmemory", str(limit))
    server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")


def mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0


@contextmanager
def file_system(folder: Path):
    """An ext4 file system of DISK_BYTES, in a file."""
    image, point = folder / "image", folder / "disk"
    with image.open("wb") as f:
        f.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    point.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def write_forever(folder: str) -> None:
    """Another process on the same folder, to be killed."""
    tier = NvmeTier(folder, NVME_BYTES)
    store = ChunkStore(Codec(), [tier])
    rng = random.Random(os.getpid())
    print("writing", flush=True)
    while True:
        n = rng.randrange(2000)
        store.put(key(n), content(n))


def sample(load: Load, disk: Path, server: Server) -> dict[str, float]:
    me = psutil.Process()
    files = sum(f.stat().st_size for f in (disk / "kv").glob("??/*") if f.exists())
    space = os.statvfs(disk)
    redis = 0.0
    if server.process is not None:
        with suppress(psutil.Error):
            redis = psutil.Process(server.process.pid).memory_info().rss / MIB
    slowest, load.slowest = load.slowest, 0.0
    return {
        "rss": me.memory_info().rss / MIB,
        "descriptors": me.num_fds(),
        "threads": me.num_threads(),
        "files": files / MIB,
        "disk": (space.f_blocks - space.f_bfree) * space.f_frsize / MIB,
        "redis rss": redis,
        "queued": sum(a._queue.bytes for a in load.store._accesses if a._queue) / MIB,
        "slowest": slowest,
        **load.counts,
    }


def run(minutes: float, seed: int) -> dict[str, object]:
    rng = random.Random(seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lynx-soak-")))
        disk = stack.enter_context(file_system(folder))
        server = stack.enter_context(running(Server(folder / "redis")))
        set_limit(server, REDIS_BYTES)
        config = RedisConfig(url=server.url, timeout_seconds=0.5, connect_timeout_seconds=0.5)
        tiers = [
            MemoryTier(MEMORY_BYTES),
            GuardedTier(NvmeTier(disk / "kv", NVME_BYTES)),
            GuardedTier(RedisTier(config), full_is_failure=True),
        ]
        load = Load(ChunkStore(Codec(), tiers, QUEUE_BYTES))
        faults = Faults(server, disk, rng)
        samples: list[dict[str, float]] = []
        happened: list[tuple[float, str]] = []
        begin = time.monotonic()
        load.start()
        stop = threading.Event()

        def disturb() -> None:
            while not stop.wait(rng.uniform(4, 12)):
                kind = rng.choice(list(faults.kinds))
                happened.append((time.monotonic() - begin, kind))
                faults.kinds[kind]()

        disturber = threading.Thread(target=disturb)
        disturber.start()
        try:
            while (now := time.monotonic() - begin) < 60 * minutes:
                share = 1 - 0.2 * math.cos(2 * math.pi * now / (60 * minutes) * 3)
                load.chunks = int(share * NVME_BYTES / load.chunk_bytes)
                with suppress(OSError):
                    samples.append({"time": now, "share": share, **sample(load, disk, server)})
                time.sleep(1)
        finally:
            stop.set()
            disturber.join()
            load.stop()
        # Afterwards everything is well again: what is put can be got, from each tier alone.
        recovered = {}
        for access in load.store._accesses:
            lone = ChunkStore(load.store.codec, [access.tier])
            deadline = time.monotonic() + 30
            while not (well := lone.put(key(0), load.contents[0])) and time.monotonic() < deadline:
                time.sleep(0.1)
            found = lone.get(key(0))
            recovered[access.name] = (
                well and found is not None and torch.equal(found, load.expected[0])
            )
        load.store.close()
        return {
            "minutes": minutes,
            "samples": samples,
            "faults": happened,
            "counts": dict(load.counts),
            "errors": load.errors,
            "recovered": recovered,
        }


def plot(result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    samples = result["samples"]
    minutes = [s["time"] / 60 for s in samples]
    figure, axes = plt.subplots(4, 1, figsize=(11, 12), sharex=True)
    rows = [
        ("MiB", ["rss", "files", "redis rss", "queued"]),
        ("count", ["descriptors", "threads"]),
        ("seconds", ["slowest"]),
    ]
    for ax, (unit, names) in zip(axes, rows, strict=False):
        for name in names:
            ax.plot(minutes, [s[name] for s in samples], label=name)
        ax.set_ylabel(unit)
        ax.legend(loc="center right")
    axes[0].axhline(NVME_BYTES / MIB, color="grey", ls=":", lw=1)
    axes[0].set_title(
        f"{result['minutes']:g} minutes, {len(result['faults'])} faults, {result['counts']}"
    )
    hits = [s.get("hits", 0) for s in samples]
    misses = [s.get("misses", 0) for s in samples]
    rate = [
        (hits[i] - hits[i - 30]) / max(1, hits[i] + misses[i] - hits[i - 30] - misses[i - 30])
        for i in range(30, len(samples))
    ]
    axes[3].plot(minutes[30:], rate, label="hits, of the last 30 s")
    axes[3].plot(minutes, [s["share"] for s in samples], label="working set / NVMe capacity")
    axes[3].legend(loc="lower right")
    axes[3].set_xlabel("minutes; grey lines are faults")
    for at, _ in result["faults"]:
        for ax in axes:
            ax.axvline(at / 60, color="grey", alpha=0.25, lw=0.7)
    figure.tight_layout()
    figure.savefig(path, dpi=75)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/soak"))
    parser.add_argument("--writer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.writer:
        write_forever(arguments.writer)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    result = run(arguments.minutes, arguments.seed)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.with_suffix(".json").write_text(json.dumps(result))
    plot(result, arguments.out.with_suffix(".png"))
    print(json.dumps({k: result[k] for k in ("counts", "errors", "recovered")}, indent=1))
    bad = result["errors"] or result["counts"].get("wrong") or not all(result["recovered"].values())
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
