"""The L2 adapter as LMCache's controllers use it, and chunks as its server hands them over."""

from __future__ import annotations

import json
import os
import select
from argparse import Namespace

import pytest
import torch

pytest.importorskip("lmcache", reason="LMCache is not installed: pip install --no-deps lmcache")
pytest.importorskip(
    "lmcache.v1.distributed.l2_adapters", reason="a package that LMCache needs is missing"
)

os.environ["LMCACHE_TRACK_USAGE"] = "false"

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import (
    L2AdaptersConfig,
    parse_args_to_l2_adapters_config,
)
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from lynx_backend.integrations.lmcache.page_layouts import PageLayout
from lynx_backend.integrations.lmcache_l2 import LynxL2AdapterConfig

LAYERS, TOKENS, HEADS, DIM = 2, 256, 2, 64
RANK = ObjectKey.ComputeKVRank(1, 0, 1, 0)
PAGES = PageLayout("vllm_cpu", HEADS, DIM, 128)


def cache(seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, LAYERS, TOKENS, HEADS, DIM, generator=g)
    kv[0] += 2 * torch.randn(LAYERS, 1, HEADS, DIM, generator=g)
    return kv


def memory_object(buffer: torch.Tensor) -> TensorMemoryObj:
    raw = buffer.view(-1).view(torch.uint8)
    return TensorMemoryObj(
        raw,
        MemoryObjMetadata(
            shape=buffer.shape,
            dtype=buffer.dtype,
            address=0,
            phy_size=raw.numel(),
            ref_count=1,
            fmt=MemoryFormat.KV_2LTD,
        ),
        None,
    )


def chunk(seed: int = 0, pages: PageLayout = PAGES) -> torch.Tensor:
    """One engine-driven object, as LMCache's server gets it from vLLM on a CPU."""
    buffer = torch.empty(LAYERS, TOKENS, pages.row)
    pages.pack(cache(seed), buffer)
    return buffer


def key(n: int, **changes) -> ObjectKey:
    fields = {"chunk_hash": bytes([n]) * 32, "model_name": "smol/lm", "kv_rank": RANK, **changes}
    return ObjectKey(**fields)


DESC = {0: MemoryLayoutDesc([torch.Size((LAYERS, TOKENS, PAGES.row))], [torch.float32])}


class Client:
    """What LMCache's controllers do with an adapter: submit, poll the event, take the result."""

    def __init__(self, adapter):
        self.adapter = adapter

    def _wait(self, fd):
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(120_000), "no event"
        os.read(fd, 8)

    def store(self, keys, objects):
        task = self.adapter.submit_store_task(keys, objects)
        done = {}
        while task not in done:
            self._wait(self.adapter.get_store_event_fd())
            done |= self.adapter.pop_completed_store_tasks()
        return done[task]

    def lookup(self, keys, desc=DESC):
        task = self.adapter.submit_lookup_and_lock_task(keys, desc)
        found = None
        while found is None:
            self._wait(self.adapter.get_lookup_and_lock_event_fd())
            found = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None
        return found.get_indices_list()

    def load(self, keys, objects):
        task = self.adapter.submit_load_task(keys, objects)
        found = None
        while found is None:
            self._wait(self.adapter.get_load_event_fd())
            found = self.adapter.query_load_result(task)
        assert self.adapter.query_load_result(task) is None
        return found.get_indices_list()


def config(tmp_path, **params):
    nvme = {"path": str(tmp_path / "kv"), "min_free_bytes": 0, "max_bytes": "64MiB"}
    return LynxL2AdapterConfig.from_dict({"nvme": nvme, "kv_cache": {"head_dim": DIM}, **params})


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).square().sum() / want.square().sum())


def plugin(tmp_path, **params):
    """The adapter as it is named on the server's command line."""
    nvme = {"path": str(tmp_path / "kv"), "min_free_bytes": 0}
    return {
        "type": "plugin",
        "module_path": "lynx_backend.integrations.lmcache_l2",
        "class_name": "LynxL2Adapter",
        "adapter_params": {"nvme": nvme, "kv_cache": {"head_dim": DIM}, **params},
    }


class Storage:
    """The storage half of LMCache's server, in this process: L1, controllers, adapters."""

    def __init__(self, *specs):
        memory = L1MemoryManagerConfig(
            size_in_bytes=16 << 20, use_lazy=False, align_bytes=4096, shm_name=""
        )
        self.manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory_config=memory),
                eviction_config=EvictionConfig(eviction_policy="LRU"),
                l2_adapter_config=L2AdaptersConfig(self.parse(*specs)),
            )
        )

    @staticmethod
    def parse(*specs):
        given = Namespace(l2_adapter=[json.dumps(spec) for spec in specs])
        return parse_args_to_l2_adapters_config(given).adapters

    def store(self, keys):
        objects = self.manager.reserve_write(keys, DESC[0])
        for each, obj in objects.items():
            obj.tensor.copy_(chunk(each.chunk_hash[0]))
        self.manager.finish_write(list(objects))

    def retrieve(self, keys) -> dict[int, float]:
        """The chunks that come back after L1 was cleared, and the error of each."""
        from lmcache.v1.distributed.api import (  # not in LMCache 0.5.3
            FULL_ATTENTION_WINDOW_CHUNKS,
            GroupedObjectKeys,
            PrefetchLockMode,
            PrefetchTaskSpec,
        )

        self.manager.clear(force=True)
        rows = [GroupedObjectKeys(keys, 0, DESC[0], FULL_ATTENTION_WINDOW_CHUNKS)]
        handle = self.manager.submit_prefetch_task(
            PrefetchTaskSpec(rows, lock_mode=PrefetchLockMode.LOCK)
        )
        assert self.manager.wait_prefetch_status(handle, 30.0)
        hits = self.manager.query_prefetch_status(handle).hit_cells[0].get_indices_list()
        found = [keys[i] for i in hits]
        if not found:
            return {}
        with self.manager.read_prefetched_results(found) as objects:
            errors = [
                error(obj.tensor, chunk(each.chunk_hash[0]))
                for each, obj in zip(found, objects, strict=True)
            ]
        self.manager.finish_read_prefetched(found)
        return dict(zip(hits, errors, strict=True))
