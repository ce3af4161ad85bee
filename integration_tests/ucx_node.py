"""A process that serves made-up objects: ``ucx_node.py HOST PORT SEED [SECONDS_A_READ [TIMEOUT]]``.

Object ``i`` is ``size_of(i)`` bytes that depend on the seed, so that a reader can tell whose it is.
Prints its port when it listens, and ends when its standard input does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from lynx_backend.keys import ChunkKey, ObjectName, Part
from lynx_backend.transport.greeting import LinkOptions
from lynx_backend.transport.server import UcxServer


def name(i: int, part: Part = Part.RESIDUAL) -> ObjectName:
    return ChunkKey(bytes(16), i.to_bytes(16, "little")).object(part)


def size_of(i: int) -> int:
    """64 KiB to 64 MiB by the last digit; up to 4 bytes more, so that nothing is aligned."""
    return (65536 << (i % 10 + i % 10 // 9)) + i % 5


@lru_cache(maxsize=64)
def content(seed: int, i: int) -> bytes:
    return np.random.default_rng([seed, i]).bytes(size_of(i))


class MadeUp:
    def __init__(self, seed: int, seconds: float) -> None:
        self.seed, self.seconds = seed, seconds

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        return [size_of(int.from_bytes(n.key.prefix, "little")) for n in names]

    def get(self, name: ObjectName) -> memoryview | None:
        time.sleep(self.seconds)
        return memoryview(content(self.seed, int.from_bytes(name.key.prefix, "little")))


def main(host: str, port: str, seed: str, seconds: str = "0", timeout: str = "1") -> None:
    options = LinkOptions(timeout_seconds=float(timeout))
    server = UcxServer(MadeUp(int(seed), float(seconds)), host, int(port), options)
    print(server.address[1], flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
