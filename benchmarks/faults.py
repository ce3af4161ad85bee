"""What each fault of a tier costs a store: the table in docs/reliability.md.

    nice python benchmarks/faults.py --tries 5 --out out/faults.json

One tier at a time, without another to fall back on, under load from two threads that get chunks,
compare them, and put again what is missing. A request is one get. It is lost when the chunk had
been stored and was not there; wrong when it differs in any bit. Recovery is the time from the end
of the fault until a put and a get work. Needs root and redis-server.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "integration_tests"))
from _redis_servers import Server, running
from soak import CONTENTS, MIB, REDIS_BYTES, Faults, content, file_system, key, set_limit

from lynx_backend import Codec
from lynx_backend.config import RedisConfig
from lynx_backend.store import ChunkStore
from lynx_backend.tiers import GuardedTier, NvmeTier
from lynx_backend.tiers.redis import RedisTier

CHUNKS = 64
LIMIT_SECONDS = 60.0
WELL_SECONDS = 2.0


@dataclass
class Seen:
    """During the tries of one fault."""

    tries: int = 0
    requests: int = 0
    lost: int = 0
    wrong: int = 0
    exceptions: int = 0
    slowest: float = 0.0
    recovery: list[float] = field(default_factory=list)


class Watch:
    """The load."""

    def __init__(self, store: ChunkStore) -> None:
        self.store = store
        self.contents = [content(n) for n in range(CONTENTS)]
        codec = store.codec
        self.expected = [codec.decode(*codec.encode(kv)) for kv in self.contents]
        self.seen = Seen()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(i,)) for i in range(2)]

    def __enter__(self) -> Watch:
        for n in range(CHUNKS):
            self.store.put(key(n), self.contents[n % CONTENTS])
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def works(self) -> bool:
        """Whether a put and a get of a chunk that nobody else uses work now."""
        if not self.store.put(key(CHUNKS + 1), self.contents[0]):
            return False
        found = self.store.get(key(CHUNKS + 1))
        return found is not None and torch.equal(found, self.expected[0])

    def _work(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.wait(0.002):
            n = rng.randrange(CHUNKS)
            seen, start = self.seen, time.perf_counter()
            try:
                found = self.store.get(key(n))
                seen.requests += 1
                seen.lost += found is None
                if found is None:
                    self.store.put(key(n), self.contents[n % CONTENTS])
                elif not torch.equal(found, self.expected[n % CONTENTS]):
                    seen.wrong += 1
            except BaseException:
                seen.exceptions += 1
            seen.slowest = max(seen.slowest, time.perf_counter() - start)


class MoreFaults(Faults):
    """Also those that a soak's one store cannot take in turn."""

    def freeze_for_30_s(self) -> None:
        import signal

        self.server.signal(signal.SIGSTOP)
        time.sleep(30)
        self.server.signal(signal.SIGCONT)

    def other_data(self) -> None:
        """Another server on the port, whose values under our names are foreign or damaged."""
        self.server.kill()
        self.server.start()
        set_limit(self.server, REDIS_BYTES)
        other = ChunkStore(Codec(), [RedisTier(RedisConfig(url=self.server.url))])
        tier = other.tiers[0]
        for n in range(CHUNKS):
            anchor, residual = other.codec.encode(content(n + 1), key((n + 1) % CHUNKS).digest)
            tier.put(key(n).object(0), anchor.numpy().data)  # of another chunk
            tier.put(key(n).object(1), residual.numpy().data[:-1])
        other.close()

    def cut_link(self) -> None:
        link = ("ip", "netns", "exec", str(self.server.netns), "ip", "link", "set", "lynxb")
        subprocess.run([*link, "down"], check=True)
        time.sleep(self.rng.uniform(2, 5))
        subprocess.run([*link, "up"], check=True)


@contextmanager
def network_namespace():
    """One that is reached over a link, as another host is; its name and address."""

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    ip("netns", "add", "lynxfaults")
    try:
        inside = ("netns", "exec", "lynxfaults", "ip")
        ip("link", "add", "lynxa", "type", "veth", "peer", "name", "lynxb")
        ip("link", "set", "lynxb", "netns", "lynxfaults")
        ip("addr", "add", "10.213.9.1/30", "dev", "lynxa")
        ip("link", "set", "lynxa", "up")
        ip(*inside, "link", "set", "lo", "up")
        ip(*inside, "addr", "add", "10.213.9.2/30", "dev", "lynxb")
        ip(*inside, "link", "set", "lynxb", "up")
        yield "lynxfaults", "10.213.9.2"
    finally:
        ip("netns", "del", "lynxfaults")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/faults.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    results: dict[str, Seen] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lynx-faults-")))
        disk = stack.enter_context(file_system(folder))
        netns, address = stack.enter_context(network_namespace())
        server = Server(
            folder / "redis", host=address, netns=netns, arguments=("--protected-mode", "no")
        )
        stack.enter_context(running(server))
        set_limit(server, REDIS_BYTES)
        faults = MoreFaults(server, disk, random.Random(3))
        config = RedisConfig(url=server.url, timeout_seconds=0.5, connect_timeout_seconds=0.5)
        on_redis = {
            "Redis killed (-9) mid-batch, started empty": (faults.kill_redis, arguments.tries),
            "Redis restarted with other data": (faults.other_data, arguments.tries),
            "Redis at `maxmemory`, `noeviction`": (faults.fill_redis, arguments.tries),
            "Redis frozen for 30 s": (faults.freeze_for_30_s, min(2, arguments.tries)),
            "Redis: network link cut": (faults.cut_link, arguments.tries),
            "Redis: bits of values changed": (faults.damage_redis, arguments.tries),
        }
        on_disk = {
            "disk full": (faults.fill_disk, arguments.tries),
            "disk read-only": (faults.read_only, arguments.tries),
            "bits of files flipped": (faults.damage_files, arguments.tries),
            "files removed by hand": (faults.remove_files, arguments.tries),
            "another writer killed (-9)": (faults.kill_writer, arguments.tries),
        }
        for kinds, make in (
            (on_redis, lambda: GuardedTier(RedisTier(config), full_is_failure=True)),
            (on_disk, lambda: GuardedTier(NvmeTier(disk / "kv", 400 * MIB))),
        ):
            for name, (fault, tries) in kinds.items():
                store = ChunkStore(Codec(), [make()])
                with Watch(store) as watch:
                    for _ in range(tries):
                        fault()
                        end = time.monotonic()
                        while not watch.works() and time.monotonic() < end + LIMIT_SECONDS:
                            time.sleep(0.01)
                        watch.seen.recovery.append(time.monotonic() - end)
                        watch.seen.tries += 1
                        time.sleep(WELL_SECONDS)  # what is damaged is found while all is well
                store.close()
                results[name] = watch.seen
                print(row(name, watch.seen), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({name: vars(seen) for name, seen in results.items()}))
    sys.exit(any(seen.wrong or seen.exceptions for seen in results.values()))


def row(name: str, seen: Seen) -> str:
    median, most = statistics.median(seen.recovery), max(seen.recovery)
    return (
        f"| {name} | {seen.tries} | {seen.wrong} | {seen.exceptions} | {seen.lost} of "
        f"{seen.requests} | {seen.slowest:.2f} s | {median:.2f} s, at most {most:.2f} s |"
    )


if __name__ == "__main__":
    main()
