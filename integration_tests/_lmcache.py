"""A real LMCache engine with Lynx loaded by configuration, and a stand-in for vLLM's pages."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("lmcache", reason="LMCache is not installed: pip install --no-deps lmcache")
os.environ["LMCACHE_TRACK_USAGE"] = "false"

from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

from lynx_backend.codec import Codec
from lynx_backend.integrations.lmcache_plugin import LynxBackend

LAYERS, HEADS, DIM, CHUNK = 4, 2, 64, 256
CHANNELS = HEADS * DIM
PLUGIN = {
    "storage_plugin.lynx.module_path": "lynx_backend.integrations.lmcache_plugin",
    "storage_plugin.lynx.class_name": "LynxBackend",
}
_lookups = itertools.count()


class Pages(GPUConnectorInterface):
    """Slots of one token each, [2, layers, slots, channels], that LMCache copies from and to."""

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        slots = kwargs["slot_mapping"][start:end]
        memory_obj.tensor.copy_(kwargs["kvcaches"][:, :, slots])

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        kwargs["kvcaches"][:, :, kwargs["slot_mapping"][start:end]] = memory_obj.tensor

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for args in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(*args, **kwargs)

    def batched_to_gpu(
        self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any
    ) -> None:
        for args in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(*args, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size((2, LAYERS, num_tokens, CHANNELS))


@dataclass
class Engine:
    """LMCache as vLLM uses it: look a prompt up, load what was found, hand over what is new."""

    lmcache: LMCacheEngine

    @property
    def lynx(self) -> LynxBackend:
        return self.lmcache.storage_manager.storage_backends["lynx"]

    @property
    def has_lynx(self) -> bool:
        return "lynx" in self.lmcache.storage_manager.storage_backends

    def store(self, tokens: list[int], kv: torch.Tensor, flush: bool = True) -> None:
        slots = torch.arange(len(tokens))
        self.lmcache.store(torch.tensor(tokens), kvcaches=kv, slot_mapping=slots)
        if flush and self.has_lynx:
            assert self.lynx.flush(60)

    def lookup(self, tokens: list[int]) -> int:
        """How many tokens from the first on LMCache would load."""
        found: int = self.lmcache.lookup(torch.tensor(tokens))
        return found

    def request(self, tokens: list[int]) -> torch.Tensor:
        """What vLLM's pages hold of a prompt after a lookup and a load; NaN where nothing came."""
        name = f"request-{next(_lookups)}"
        found = self.lmcache.lookup(torch.tensor(tokens), lookup_id=name, pin=True)
        kv = torch.full((2, LAYERS, len(tokens), CHANNELS), float("nan"), dtype=torch.bfloat16)
        slots = torch.arange(len(tokens))
        if found:
            mask = self.lmcache.retrieve(
                torch.tensor(tokens[:found]), kvcaches=kv, slot_mapping=slots, req_id=name
            )
            kv[:, :, int(mask.sum()) :] = float("nan")
        self.lmcache.lookup_unpin(name)
        return kv

    def pool_bytes_in_use(self) -> int:
        pool = self.lmcache.storage_manager.allocator_backend.memory_allocator
        used: int = pool.pin_allocator.total_allocated_size
        return used


@contextmanager
def engine(
    folder: Path,
    lynx: object,
    model: str = "a-model",
    rank: int = 0,
    world_size: int = 1,
    **settings: Any,
) -> Iterator[Engine]:
    """An engine set up by a file, as users do it.

    Args:
        lynx: ``extra_config["lynx"]``.
        settings: of LMCache.
    """
    file = folder / f"lmcache-{uuid.uuid4().hex}.yaml"
    given = {
        "chunk_size": CHUNK,
        "local_cpu": False,
        "max_local_cpu_size": 0.1,
        "storage_plugins": ["lynx"],
        "extra_config": {**PLUGIN, "lynx": lynx},
    }
    file.write_text(yaml.safe_dump(given | settings))
    metadata = LMCacheMetadata(
        model_name=model,
        world_size=world_size,
        local_world_size=world_size,
        worker_id=rank,
        local_worker_id=rank,
        kv_dtype=torch.bfloat16,
        kv_shape=(LAYERS, 2, CHUNK, HEADS, DIM),
        role="worker",
    )
    config = LMCacheEngineConfig.from_file(str(file))
    name = file.stem
    made = LMCacheEngineBuilder.get_or_create(
        name, config, metadata, Pages(), lambda t, _: t, lambda o, _: o
    )
    made.post_init()
    try:
        yield Engine(made)
    finally:
        LMCacheEngineBuilder.destroy(name)


def cache(tokens: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(2, LAYERS, tokens, CHANNELS, generator=made).to(torch.bfloat16)


def q_full(kv: torch.Tensor, tokens: int) -> torch.Tensor:
    """What a load gives back of the first tokens, whole chunks of them; NaN behind."""
    codec = Codec()
    out = torch.full_like(kv, float("nan"))
    for start in range(0, tokens, CHUNK):
        part = kv[:, :, start : start + CHUNK].unflatten(3, (HEADS, DIM))
        out[:, :, start : start + CHUNK] = codec.decode(*codec.encode(part)).flatten(3)
    return out


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal bit for bit, NaN being equal to NaN."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
