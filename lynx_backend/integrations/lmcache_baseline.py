"""What Lynx is compared with, in the same place: plain BF16, INT8 and INT4 as LMCache backends.

``python -m lynx_backend.integrations.lmcache_baseline FOLDER HOST PORT [BYTES_A_SECOND]`` offers
whatever objects lie in a folder to others over UCX, its own and Lynx's alike, and says its port.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from ..baselines import PerToken, Raw
from ..config import LynxConfig
from ..keys import ChunkKey, ObjectName, Part
from ..layout import KVLayout
from ..peers import link_options, peers_from_config
from ..store import Presence
from ..tiers import NvmeTier, Tier
from ..transport.pacing import Pacer
from ..transport.server import UcxServer
from .lmcache_plugin import LynxBackend

_MOST_BYTES = 4 << 30
_AT_ONCE = 1 << 20


class PlainStore:
    """What a :class:`LynxBackend` needs of a store, for objects that hold a whole chunk.

    Args:
        method: makes and reads the objects.
        layout: of a full chunk.
        tier: where they are.
    """

    def __init__(self, method: Raw | PerToken, layout: KVLayout, tier: Tier) -> None:
        self.tiers = (tier,)
        self.codec = SimpleNamespace(spec=SimpleNamespace(fingerprint=method.name))
        self._method, self._layout, self._tier = method, layout, tier

    def lookup(self, keys: Sequence[ChunkKey], here: bool = False) -> list[Presence]:
        sizes = self._tier.sizes([_name(key) for key in keys])
        return [Presence.ABSENT if size is None else Presence.FULL for size in sizes]

    def get_many(
        self,
        keys: Sequence[ChunkKey],
        target: Callable[[int, KVLayout], torch.Tensor | None],
        refused: Callable[[int], object],
    ) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        for i, data in enumerate(self._tier.get_many([_name(key) for key in keys])):
            out = None if data is None else target(i, self._layout)
            if data is not None and out is not None:
                self._method.decode(torch.from_numpy(np.frombuffer(data, np.uint8).copy()), out)
            found.append(out)
        return found

    def encode(self, key: ChunkKey, kv: torch.Tensor) -> list[tuple[ObjectName, memoryview]]:
        return [(_name(key), self._method.encode(kv).numpy().data)]

    def write(self, chunk: Sequence[tuple[ObjectName, memoryview]], wait_seconds: float) -> bool:
        for name, data in chunk:
            self._tier.put(name, data)
        return True

    def flush(self, timeout: float | None = None) -> bool:
        return True

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        self._tier.delete([_name(key) for key in keys])

    def close(self, timeout: float) -> None:
        self._tier.close()


class _Baseline(LynxBackend):
    method: ClassVar[Raw | PerToken]

    def _open_store(self, config: LynxConfig, metadata: Any) -> Any:
        peers = peers_from_config(config, "")
        tier = peers or NvmeTier(config.nvme.path or "", _MOST_BYTES)
        return PlainStore(self.method, self._layout, tier)


class Bf16Backend(_Baseline):
    method = Raw()


class Int8Backend(_Baseline):
    method = PerToken(8)


class Int4Backend(_Baseline):
    method = PerToken(4)


BACKENDS = {each.method.name: each for each in (Bf16Backend, Int8Backend, Int4Backend)}


class PacedSource:
    """Objects of a tier, each given out when a link of a set rate would have carried it."""

    def __init__(self, tier: Tier, bytes_per_second: float) -> None:
        self._tier = tier
        self._pacer = Pacer(bytes_per_second, _AT_ONCE)

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        return self._tier.sizes(names)

    def get(self, name: ObjectName) -> memoryview | None:
        data = self._tier.get(name)
        if data is not None:
            now = time.monotonic()
            time.sleep(max(0.0, self._pacer.send(len(data), now) - now))
        return data


def _name(key: ChunkKey) -> ObjectName:
    return key.object(Part.ANCHOR)


def _serve(folder: str, host: str, port: str, bytes_per_second: str = "") -> None:
    tier = NvmeTier(folder, _MOST_BYTES)
    source = PacedSource(tier, float(bytes_per_second)) if bytes_per_second else tier
    server = UcxServer(source, host, int(port), link_options(LynxConfig().peers, ""))
    print(server.address[1], flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
