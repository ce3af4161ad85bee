"""Lynx as a storage backend of LMCache inside vLLM (``LMCacheConnectorV1``).

In LMCache's configuration::

    local_cpu: true
    max_local_cpu_size: 8            # GB; also what Lynx reads into
    storage_plugins: [lynx]
    extra_config:
      storage_plugin.lynx.module_path: lynx_backend.integrations.lmcache_plugin
      storage_plugin.lynx.class_name: LynxBackend
      lynx: {nvme: {path: /mnt/nvme/lynx}}    # or the path of a Lynx YAML file

LMCache asks :meth:`LynxBackend.batched_contains` for a prompt's chunks, loads the ones found before
the forward pass, and hands over new ones after it. What fails here is a miss for LMCache, counted
in Lynx's metrics and logged at most every 30 s.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lmcache.logging import init_logger
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, TensorMemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from .. import metrics
from ..config import LynxConfig
from ..errors import InvalidInputError, UnsupportedError
from ..keys import CacheIdentity, ChunkKey
from ..layout import KVLayout
from ..logs import warn_limited
from ..store import ChunkStore, EncodedChunk, Presence, objects_of
from ..tiers.write_behind import WriteBehind
from .lmcache.failures import Unreadable, report
from .lmcache.keys import chunk_key, layout_of, salt
from .lmcache.loaded import Loaded
from .lmcache.settings import Settings, open_store
from .lmcache.versions import (
    check_interface,
    warn_if_failed_loads_end_requests,
    warn_untested,
)

logger = init_logger(__name__)

#: In ``extra_config``: what :meth:`Settings.load` reads.
SETTING = "lynx"
_USED = {
    CacheEngineKey: ("model_name", "world_size", "worker_id", "chunk_hash", "dtype", "tags"),
    LMCacheMetadata: (
        "model_name",
        "kv_shape",
        "kv_dtype",
        "use_mla",
        "world_size",
        "worker_id",
        "local_world_size",
    ),
    LocalCPUBackend: ("allocate", "close"),
    TensorMemoryObj: ("tensor", "get_size", "get_shape", "ref_count_up", "ref_count_down"),
    MemoryFormat: ("KV_2LTD", "KV_MLA_FMT"),
}
_CLOSE_SECONDS = 9.0  # LMCache gives all its backends 10
_ENCODE_SECONDS = 5.0  # of these, for chunks that wait to be encoded; then all are to be written
_WRITE_SECONDS = 30.0
_ALLOCATE_SECONDS = 2.0
#: Most bytes of decoded cache read from the tiers at a time.
_READ_BYTES = 1 << 30


class LynxBackend(StoragePluginInterface):
    """Keeps LMCache's chunks in a :class:`~lynx_backend.store.ChunkStore`.

    Args:
        config, metadata, local_cpu_backend, loop, dst_device: given by LMCache.

    Raises:
        LynxError: LMCache has an interface, or is set up in a way, that this does not fit; or a
            setting is wrong. LMCache logs it and runs without Lynx.
    """

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        check_interface(LynxBackend, StoragePluginInterface, _USED)
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        warn_untested()
        warn_if_failed_loads_end_requests()
        _check_mode(config, metadata, local_cpu_backend)
        settings = Settings.load((config.extra_config or {}).get(SETTING))
        self._layout = layout_of(metadata)
        self._format = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD
        self._namespace = settings.namespace
        self._store = self._open_store(settings.config, metadata)
        self._codec = self._store.codec.spec.fingerprint
        self._identities: set[bytes] = set()  # of all keys met
        self._keys(_untagged_keys(metadata))
        _warn_of(settings.config)
        # Waiting chunks lie in LMCache's own memory, which must not run out for it.
        pool_bytes = int(config.max_local_cpu_size * 1024**3)
        self._puts = WriteBehind("lynx-lmcache-put", max(1, pool_bytes // 2), workers=1)
        self._putting: set[ChunkKey] = set()
        self._unreadable = Unreadable()
        self._loaded = Loaded()
        self._lock = threading.Lock()
        self._pool = threading.Lock()  # held while LMCache's memory is read for a put
        self._pool_closed = False
        self._closing_since: float | None = None
        self._readers = ThreadPoolExecutor(2, "lynx-lmcache-get")
        if local_cpu_backend is not None:
            _close_first(local_cpu_backend, self._stop_encoding)
        _close_at_exit(self)
        logger.info(
            "Lynx keeps this rank's cache, %s %s, in: %s",
            self._layout.signature,
            self._layout.dtype,
            ", ".join(tier.name for tier in self._store.tiers),
        )

    def __str__(self) -> str:
        return "LynxBackend"

    def _open_store(self, config: LynxConfig, metadata: LMCacheMetadata) -> ChunkStore:
        return open_store(
            config,
            self._layout,
            metadata.world_size,
            metadata.worker_id,
            metadata.local_world_size,
        )

    # -- for progressive decode, which reads the same objects --------------------------------------

    @property
    def store(self) -> ChunkStore:
        """Where this rank's chunks are; closed with this."""
        return self._store

    @property
    def layout(self) -> KVLayout:
        """Of a full chunk of this rank."""
        return self._layout

    def chunk_key(self, key: CacheEngineKey) -> ChunkKey:
        """The key in :attr:`store` of what LMCache knows by ``key``."""
        return self._key(key)

    # -- lookup ------------------------------------------------------------------------------------

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """How many chunks from the first on can be read.

        Args:
            pin: of no effect: a tier may lose any object at any time, and that is a miss.
        """
        ours = self._keys(keys)
        hits = 0
        with self._reported("lookup"):
            for key, presence in zip(ours, self._store.lookup(ours), strict=True):
                if presence < Presence.FULL or key in self._unreadable:
                    break
                hits += 1
        return hits

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, self.batched_contains, keys, pin)

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        return self._key(key) in self._putting

    def pin(self, key: CacheEngineKey) -> bool:
        return self.contains(key)

    def unpin(self, key: CacheEngineKey) -> bool:
        return True

    # -- out ---------------------------------------------------------------------------------------

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Q_full of each chunk in LMCache's memory, None for a miss."""
        group = max(1, _READ_BYTES // self._layout.bytes)
        found: list[MemoryObj | None] = []
        for start in range(0, len(keys), group):
            found += self._read(self._keys(keys[start : start + group]))
            if found[-1] is None:  # LMCache uses nothing after a miss
                break
        return found + [None] * (len(keys) - len(found))

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """Q_full of the chunks up to the first miss."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._readers, self.batched_get_blocking, keys)
        hits = found.index(None) if None in found else len(found)
        for each in found[hits:]:
            if each is not None:
                each.ref_count_down()
        return [each for each in found[:hits] if each is not None]

    def _read(self, keys: list[ChunkKey]) -> list[MemoryObj | None]:
        objects: dict[int, MemoryObj] = {}
        deadline = time.monotonic() + _ALLOCATE_SECONDS
        no_memory: set[int] = set()
        refused: set[int] = set()

        def target(i: int, layout: KVLayout) -> torch.Tensor | None:
            if layout != self._layout.with_tokens(min(layout.tokens, self._layout.tokens)):
                refused.add(i)
                return None
            if i not in objects:
                made: MemoryObj | None = None
                with self._reported("allocate memory"):
                    made = self._allocate(layout, deadline)
                if made is None:
                    no_memory.add(i)
                    return None
                objects[i] = made
            return self._view(objects[i], layout)

        found: list[torch.Tensor | None] = [None] * len(keys)
        with self._reported("get"):
            found = self._store.get_many(keys, target, refused.add)
        for i, (key, kv) in enumerate(zip(keys, found, strict=True)):
            if kv is not None:
                self._loaded.note(key, kv)
            elif i in objects:
                objects.pop(i).ref_count_down()
            if i not in no_memory:
                self._unreadable.note(key, kv is not None, i in refused)
        return [objects.get(i) for i in range(len(keys))]

    def _allocate(self, layout: KVLayout, deadline: float) -> MemoryObj | None:
        """Room in LMCache's memory, which puts under way may have to leave first."""
        shape = torch.Size((*layout.shape[:3], layout.channels))
        while True:
            made = self.local_cpu_backend.allocate(
                shape, self.metadata.kv_dtype, self._format, eviction=True, busy_loop=False
            )
            if made is not None:
                return made
            if time.monotonic() >= deadline:
                metrics.ERRORS.labels("NoHostMemory").inc()
                warn_limited(
                    logger,
                    "lmcache-memory",
                    "LMCache's CPU memory has no room for a chunk that was found: raise "
                    "max_local_cpu_size",
                )
                return None
            time.sleep(0.01)

    # -- in ----------------------------------------------------------------------------------------

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        """Keep chunks later, in order; what has no room in the queue is skipped, and counted.

        Args:
            on_complete_callback: called for each chunk that a tier of this node has in the end.
        """
        for theirs, obj in zip(keys, objs, strict=False):
            key = self._key(theirs)
            with self._lock:
                if key in self._putting:
                    continue
                self._putting.add(key)
            obj.ref_count_up()
            done = partial(self._finished, key, obj)
            kept = self._puts.submit(
                objects_of([key]),
                obj.get_size(),
                partial(self._put, key, obj, theirs, on_complete_callback),
                dropped=done,
            )
            if not kept:
                done()
                metrics.ERRORS.labels("PutQueueFull").inc()
                warn_limited(
                    logger,
                    "lmcache-put",
                    "encoding does not keep up: a chunk was not stored, as %d bytes wait already",
                    self._puts.bytes,
                )

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        self.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback)

    def _put(
        self,
        key: ChunkKey,
        obj: MemoryObj,
        theirs: CacheEngineKey,
        callback: Callable[[CacheEngineKey], None] | None,
    ) -> None:
        try:
            with self._reported("put"):
                try:
                    chunk = None if self._is_kept(key) else self._encode(key, obj)
                finally:
                    obj.ref_count_down()  # writing does not need LMCache's memory any more
                if chunk is not None and self._store.write(chunk, _WRITE_SECONDS):
                    self._unreadable.discard(key)
                if callback is not None:
                    self._store.flush(_WRITE_SECONDS)  # what is written later may fail
                    if self._is_kept(key):
                        callback(theirs)
        finally:
            self._putting.discard(key)

    def _is_kept(self, key: ChunkKey) -> bool:
        """Whether this node has the chunk."""
        (there,) = self._store.lookup([key], here=True)
        return there is Presence.FULL and key not in self._unreadable

    def _encode(self, key: ChunkKey, obj: MemoryObj) -> EncodedChunk | None:
        """The chunk's objects; None for what was loaded, or when LMCache has freed its memory."""
        with self._pool:
            if self._pool_closed:
                return None
            kv = self._checked_view(obj)
            if self._loaded.is_what_was_loaded(key, kv):
                return None
            return self._store.encode(key, kv)

    def _finished(self, key: ChunkKey, obj: MemoryObj) -> None:
        obj.ref_count_down()
        self._putting.discard(key)

    # -- away --------------------------------------------------------------------------------------

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        return self.batched_remove([key], force) == 1

    def batched_remove(self, keys: list[CacheEngineKey], force: bool = True) -> int:
        """Forget chunks, in all tiers of this node; how many were there."""
        ours = self._keys(keys)
        self._puts.discard(set(ours))
        there = 0
        with self._reported("delete"):
            found = self._store.lookup(ours, here=True)
            there = sum(presence > Presence.ABSENT for presence in found)
            self._store.remove(ours)
        return there

    def clear(self) -> int:
        """Forget all of this rank's chunks, in all tiers of this node.

        Of those with tags, it knows the ones whose tags this process has met.

        Returns:
            tokens that there were in each tier; a short chunk counts as a whole one.

        Raises:
            TierError: some may be left. LMCache answers with it who asked to clear.
        """
        with self._lock:
            putting = set(self._putting)
        self._puts.discard(putting)
        return self._store.clear(frozenset(self._identities)) * self._layout.tokens

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything handed over so far is written to all tiers; whether it is."""
        return self._puts.flush(timeout) and self._store.flush(timeout)

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def close(self) -> None:
        """Finish what was handed over, for some seconds at most, and end all threads."""
        self._stop_encoding()
        self._readers.shutdown(cancel_futures=True)
        self._store.close(self._left_to_close(_CLOSE_SECONDS))

    def _stop_encoding(self) -> None:
        if left := self._puts.close(self._left_to_close(_ENCODE_SECONDS)):
            logger.warning("closed with %d chunks not stored", left)
        with self._pool:
            self._pool_closed = True

    def _left_to_close(self, seconds: float) -> float:
        """What is left of so many seconds since closing began, which is when first asked."""
        now = time.monotonic()
        with self._lock:
            if self._closing_since is None:
                self._closing_since = now
            return max(0.0, self._closing_since + seconds - now)

    # -- details -----------------------------------------------------------------------------------

    def _key(self, key: CacheEngineKey) -> ChunkKey:
        identity = CacheIdentity(
            model=key.model_name,
            dtype=str(key.dtype).removeprefix("torch."),
            layout=self._layout.signature,
            codec=self._codec,
            world_size=key.world_size,
            rank=key.worker_id,
            salt=salt(self._namespace, key.tags or ()),
        )
        ours = chunk_key(identity, key.chunk_hash)
        self._identities.add(ours.identity)
        return ours

    def _keys(self, keys: Sequence[CacheEngineKey]) -> list[ChunkKey]:
        return [self._key(key) for key in keys]

    def _checked_view(self, obj: MemoryObj) -> torch.Tensor:
        shape, dtype = tuple(obj.get_shape()), obj.get_dtype()
        tokens = shape[2] if len(shape) == 4 else 0
        layout = self._layout.with_tokens(tokens) if tokens else self._layout
        if shape != (*layout.shape[:3], layout.channels) or dtype != self.metadata.kv_dtype:
            raise InvalidInputError(
                f"LMCache handed over a chunk of shape {shape} {dtype}, this model's have "
                f"{(*self._layout.shape[:3], self._layout.channels)} {self.metadata.kv_dtype}; a "
                "model with several kinds of cache is not supported"
            )
        return self._view(obj, layout)

    @staticmethod
    def _view(obj: MemoryObj, layout: KVLayout) -> torch.Tensor:
        tensor: torch.Tensor = obj.tensor
        return tensor.view(layout.shape)

    @contextmanager
    def _reported(self, op: str) -> Iterator[None]:
        """Whatever goes wrong is counted and logged, and nothing else."""
        try:
            yield
        except Exception as e:  # LMCache runs this on the engine's threads
            report(logger, "lmcache", op, e)


def _check_mode(config: Any, metadata: Any, local_cpu_backend: Any) -> None:
    """Raise UnsupportedError for a way of running LMCache that cannot work with whole chunks."""
    if config.use_layerwise:
        raise UnsupportedError(
            "use_layerwise hands over single layers; Lynx stores chunks of all layers: set "
            "use_layerwise: false"
        )
    if local_cpu_backend is None and metadata.role != "scheduler":
        raise UnsupportedError(
            "Lynx reads into LMCache's CPU memory: set max_local_cpu_size above 0 (local_cpu may "
            "be false)"
        )


def _untagged_keys(metadata: LMCacheMetadata) -> list[CacheEngineKey]:
    """A key of each identity that chunks of this rank have when a request has no tags."""
    # With latent attention, one rank may store for all of them, as if it were alone.
    world_sizes = {metadata.world_size, 1 if metadata.use_mla else metadata.world_size}
    return [
        CacheEngineKey(metadata.model_name, size, metadata.worker_id, 0, metadata.kv_dtype)
        for size in world_sizes
    ]


def _warn_of(config: LynxConfig) -> None:
    """Log a warning about settings that work, but hardly as they were meant."""
    if not config.origins:
        logger.warning(
            "no settings found, so Lynx keeps %.0f GiB in this process's memory and nothing "
            "elsewhere. They belong into extra_config.%s of LMCache's configuration, as "
            "{nvme: {path: /mnt/nvme/lynx}} or the path of a Lynx YAML file; or into LYNX_CONFIG "
            "or LYNX_* variables",
            config.memory.max_bytes / 1024**3,
            SETTING,
        )
    if "PYTHONHASHSEED" not in os.environ and _is_shared(config):
        logger.warning(
            "PYTHONHASHSEED is not set: LMCache's keys are others in every process, so that "
            "none finds what another stored; export PYTHONHASHSEED=0 for all of them"
        )


def _is_shared(config: LynxConfig) -> bool:
    """Whether a tier outlives the process, or is another's."""
    return bool(config.nvme.path or config.redis.url or config.peers.nodes)


def _close_first(pool: Any, stop: Callable[[], None]) -> None:
    """Have ``stop()`` called before LMCache frees its memory.

    It closes the backend that owns the memory before those that read from it.
    """
    close = pool.close

    def close_in_order() -> None:
        stop()
        close()

    pool.close = close_in_order


def _close_at_exit(backend: LynxBackend) -> None:
    """Close when the process ends, unless that was done.

    vLLM's connector does not pass its shutdown on to LMCache. LMCache's event loop, in a thread
    that is no daemon, would then keep the process from ending, and what waits would be lost.
    """
    known = weakref.ref(backend)

    def close() -> None:
        if (each := known()) is not None:
            each.close()
            if each.loop is not None and each.loop.is_running():
                each.loop.call_soon_threadsafe(each.loop.stop)

    # Called when the main thread has ended, before Python waits for the others; atexit comes after.
    threading._register_atexit(close)  # type: ignore[attr-defined]
