"""Lynx as an L2 adapter of LMCache's server, which serves vLLM (``LMCacheMPConnector``) and SGLang.

On the server's command line::

    lmcache server ... --l2-adapter '{"type": "plugin",
      "module_path": "lynx_backend.integrations.lmcache_l2", "class_name": "LynxL2Adapter",
      "adapter_params": {"nvme": {"path": "/mnt/nvme/lynx"}, "kv_cache": {"head_dim": 128}}}'

``adapter_params`` holds Lynx's own sections, beside them ``config``, ``namespace`` and ``kv_cache``
(:class:`CacheGeometry`). What fails here is a miss for LMCache, counted in Lynx's metrics and
logged at most every 30 s.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.memory_management import MemoryObj, TensorMemoryObj
from lmcache.v1.platform import create_event_notifier

try:
    from lmcache.lmcache_native import Bitmap
except ImportError:  # LMCache 0.5.3
    from lmcache.native_storage_ops import Bitmap

from ..config import TieringConfig
from ..errors import ConfigError, TierError, UnsupportedError
from ..keys import ChunkKey
from ..layout import KVLayout
from ..store import new_cache, objects_of
from ..tiers import TierStats
from .lmcache.chunk_layouts import CacheGeometry, ChunkLayout, ChunkLayouts
from .lmcache.failures import Unreadable, report
from .lmcache.key_index import KeyIndex, cursor_of, is_cursor
from .lmcache.page_layouts import fitting_layout
from .lmcache.rank_stores import RankStores
from .lmcache.settings import Settings
from .lmcache.versions import check_interface, warn_untested

logger = init_logger(__name__)

INDEX_FILE = "lmcache-keys.sqlite"
_USED = {
    ObjectKey: ("chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt",
                "to_encoded_object_key"),
    MemoryLayoutDesc: ("shapes", "dtypes"),
    TensorMemoryObj: ("tensor",),
    L2AdapterInterface: ("_notify_keys_stored", "_notify_keys_accessed", "_notify_keys_deleted"),
    AdapterUsage: ("total_bytes_used", "total_capacity_bytes", "bytes_by_cache_salt"),
    Bitmap: ("set",),
    KeyListPage: ("entries", "next_page_token"),
}  # fmt: skip
#: Of its own each: a slow store must not hold up a lookup that a request waits for.
_THREADS = {"store": 1, "lookup": 1, "load": 2}
#: Most bytes of decoded cache read from the tiers at a time.
_READ_BYTES = 256 << 20

#: Chunks that must not fit before no more are looked at: that costs as much as encoding them.
_MISFITS = 16

T = TypeVar("T")


@dataclass(frozen=True)
class LynxL2AdapterConfig(L2AdapterConfigBase):
    """``adapter_params``, read and checked.

    Attributes:
        settings: Lynx's own. The server's L1 is the tier in memory, so Lynx has one only where
            ``memory.enabled`` says so; and a store counts as done when it is written, unless
            ``tiering.write_behind_bytes`` says otherwise.
        geometry: the engine's cache.
    """

    settings: Settings
    geometry: CacheGeometry

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> LynxL2AdapterConfig:
        """Read ``adapter_params``.

        Raises:
            ConfigError: a setting is wrong or a place to keep objects in is missing.
        """
        geometry = CacheGeometry.of(given.get("kv_cache", {}))
        settings = Settings.load({k: v for k, v in given.items() if k != "kv_cache"})
        config = settings.config
        if "memory.enabled" not in config.origins:
            config = replace(config, memory=replace(config.memory, enabled=False))
        if "tiering.write_behind_bytes" not in config.origins:
            config = replace(config, tiering=TieringConfig(write_behind_bytes=0))
        if not (config.memory.enabled or config.nvme.path or config.redis.url):
            raise ConfigError(
                "adapter_params name no place to keep objects in: set nvme.path or redis.url (or "
                "memory.enabled, beside the server's own L1)"
            )
        return cls(replace(settings, config=config), geometry)

    @classmethod
    def help(cls) -> str:
        """Text for the server's command line."""
        return (
            "Lynx's sections (nvme, redis, codec, ...), beside them config (a Lynx YAML file), "
            "namespace, and kv_cache: {head_dim, page_layout, block_tokens}"
        )


@dataclass
class _Verdict:
    """Whether a model's buffers have the layout that was named, as far as chunks have told."""

    fits: bool = False
    misfits: int = 0
    refusal: str = ""


class _Tasks(Generic[T]):
    """Results by task, and the event that says there are some."""

    def __init__(self) -> None:
        self._event = create_event_notifier()
        self._lock = threading.Lock()
        self._done: dict[int, T] = {}
        self._closed = False

    def fileno(self) -> int:
        return int(self._event.fileno())

    def finish(self, task: int, result: T) -> None:
        with self._lock:
            self._done[task] = result
            if not self._closed:
                self._event.notify()

    def pop(self, task: int) -> T | None:
        with self._lock:
            return self._done.pop(task, None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._event.close()

    def pop_all(self) -> dict[int, T]:
        with self._lock:
            done, self._done = self._done, {}
            return done


class LynxL2Adapter(L2AdapterInterface):
    """Keeps the objects of LMCache's server in a :class:`~lynx_backend.store.ChunkStore`.

    Tiers keep their limits by themselves, so LMCache is not asked to evict; quotas and deletion by
    key work. A lock keeps an object from being deleted, not from being evicted by a tier: then its
    load is a miss.

    Args:
        config: from :meth:`LynxL2AdapterConfig.from_dict`.
        l1_memory_desc: not used; buffers are read and written through LMCache's objects.

    Raises:
        LynxError: LMCache has another interface, or a setting cannot be used. The server does not
            start then.
    """

    def __init__(
        self, config: LynxL2AdapterConfig, l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        check_interface(LynxL2Adapter, L2AdapterInterface, _USED)
        super().__init__()
        self._warnings = warn_untested()
        self._stores = RankStores(config.settings)
        self._tiers = self._stores.any.tiers
        self._layouts = ChunkLayouts(
            config.geometry, self._stores.codec.calibration, torch.cuda.is_available()
        )
        folder = config.settings.config.nvme.path
        self._index = KeyIndex(None if folder is None else Path(folder) / INDEX_FILE)
        self._seen: dict[tuple[str, int, int], ChunkLayout] = {}
        self._verdicts: dict[tuple[str, int, ChunkLayout], _Verdict] = {}
        self._unreadable = Unreadable()
        self._failing: dict[str, str] = {}
        self._reports: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._next_task = self._pending = 0
        self._closed = False
        self._stored = _Tasks[L2StoreResult]()
        self._looked_up = _Tasks[Bitmap]()
        self._loaded = _Tasks[Bitmap]()
        self._threads = {
            op: ThreadPoolExecutor(count, f"lynx-l2-{op}") for op, count in _THREADS.items()
        }
        self._forget_gone(self._index.chunks(self._index.sizes()))
        if known := self._index.sizes():
            self._notify_keys_stored(list(known), list(known.values()))
        self._threads["load"].submit(self._compile)
        logger.info(
            "Lynx keeps objects in: %s; %d keys known from before",
            ", ".join(tier.name for tier in self._tiers),
            len(known),
        )

    # -- events ------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._stored.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._looked_up.fileno()

    def get_load_event_fd(self) -> int:
        return self._loaded.fileno()

    # -- store -------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Encode and keep objects; the task fails when one of them is not kept."""
        failed = L2StoreResult(False, 0)
        return self._submit("store", self._stored, failed, self._store, keys, objects)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stored.pop_all()

    def _store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        placed: dict[ObjectKey, tuple[ChunkLayout, torch.Tensor, ChunkKey]] = {}
        for key, obj in zip(keys, objects, strict=True):
            with self._reported("store"):
                layout, buffer = self._layouts.of_buffer(obj.tensor)
                self._check(key, layout, buffer)
                placed[key] = (layout, buffer, self._chunk(key, layout))
        there = self._sizes([chunk for _, _, chunk in placed.values()])
        kept: dict[ObjectKey, tuple[ChunkKey, int]] = {}
        written = 0
        for (key, (layout, buffer, chunk)), size in zip(placed.items(), there, strict=True):
            if size is not None and chunk not in self._unreadable:
                kept[key] = (chunk, size)
                continue
            with self._reported("store"):
                size = self._keep(key.kv_rank, layout, buffer, chunk)
                kept[key] = (chunk, size)
                written += size
        self._remember(kept)
        return L2StoreResult(len(kept) == len(set(keys)), written)

    def _keep(
        self, kv_rank: int, layout: ChunkLayout, buffer: torch.Tensor, chunk: ChunkKey
    ) -> int:
        """Encode and write a chunk; bytes of its objects.

        Raises:
            LynxError: it cannot be encoded, or no tier took it.
        """
        store = self._stores.of(layout.kv, kv_rank)
        encoded = store.encode(chunk, layout.unpack(buffer))
        if not store.write(encoded):
            raise TierError("no tier took the chunk")
        self._unreadable.discard(chunk)
        return sum(len(data) for _, data in encoded)

    def _check(self, key: ObjectKey, layout: ChunkLayout, buffer: torch.Tensor) -> None:
        """Refuse a model whose chunks show that its buffers have another layout.

        One chunk that fits settles it. One that does not may be an odd text: so many are judged.
        """
        subject = (key.model_name, key.object_group_id, layout)
        verdict = self._verdicts.setdefault(subject, _Verdict())
        if not verdict.fits and verdict.misfits < _MISFITS:
            fitting = fitting_layout(layout.pages, buffer, layout.kv.layers, layout.kv.tokens)
            if fitting == layout.pages:
                verdict.fits, verdict.refusal = True, ""
            elif fitting is not None:
                verdict.misfits += 1
                verdict.refusal = (
                    f"the cache of {key.model_name} does not lie in memory as {layout.pages}; it "
                    f"looks like {fitting}: set that in kv_cache. Nothing of this model is stored"
                )
        if verdict.refusal:
            raise UnsupportedError(verdict.refusal)

    # -- lookup and locks --------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Find whole chunks, by one round trip to each tier."""
        none = Bitmap(len(keys))
        return self._submit("lookup", self._looked_up, none, self._lookup, keys, group_layout_descs)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._looked_up.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        self._index.unlock(keys)

    def _lookup(
        self, keys: list[ObjectKey], group_layout_descs: Mapping[int, MemoryLayoutDesc]
    ) -> Bitmap:
        chunks: dict[int, ChunkKey] = {}
        for i, key in enumerate(keys):
            with self._reported("lookup"):
                layout = self._layout_of(key, group_layout_descs.get(key.object_group_id))
                if layout is not None:
                    chunks[i] = self._chunk(key, layout)
        sizes = self._sizes(list(chunks.values()))
        found = Bitmap(len(keys))
        hits: dict[ObjectKey, tuple[ChunkKey, int]] = {}
        gone: dict[ObjectKey, ChunkKey] = {}
        for (i, chunk), size in zip(chunks.items(), sizes, strict=True):
            if size is None:
                gone[keys[i]] = chunk
            elif chunk not in self._unreadable:
                found.set(i)
                hits[keys[i]] = (chunk, size)
        self._index.lock(hits)
        self._remember(hits)
        if known := self._index.chunks(gone):
            self._forget_gone(known)
        return found

    def _layout_of(self, key: ObjectKey, desc: MemoryLayoutDesc | None) -> ChunkLayout | None:
        """What the caller says, else what was seen of this model before."""
        if desc is not None and desc.shapes:
            return self._layouts.of(desc.shapes, desc.dtypes)
        return self._seen.get((key.model_name, key.kv_rank, key.object_group_id))

    # -- load --------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Write Q_full of each chunk into its object; a buffer is unspecified after a miss."""
        none = Bitmap(len(keys))
        return self._submit("load", self._loaded, none, self._load, keys, objects)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loaded.pop(task_id)

    def _load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        wanted: dict[tuple[ChunkLayout, int], list[_Wanted]] = {}
        for i, (key, obj) in enumerate(zip(keys, objects, strict=True)):
            with self._reported("load"):
                layout, buffer = self._layouts.of_buffer(obj.tensor)
                each = _Wanted(i, self._chunk(key, layout), buffer)
                wanted.setdefault((layout, key.kv_rank), []).append(each)
        loaded = Bitmap(len(keys))
        hits: list[ObjectKey] = []
        for (layout, kv_rank), chunks in wanted.items():
            step = max(1, _READ_BYTES // (layout.kv.row_bytes * layout.kv.tokens))
            for start in range(0, len(chunks), step):
                batch = chunks[start : start + step]
                with self._reported("load"):
                    for i in self._read(layout, kv_rank, batch):
                        loaded.set(i)
                        hits.append(keys[i])
        if hits:
            self._notify_keys_accessed(hits)
        return loaded

    def _read(self, layout: ChunkLayout, kv_rank: int, chunks: list[_Wanted]) -> list[int]:
        """Fill the buffers of one rank's chunks; the task's indices of those that were."""
        in_place = layout.pages.is_view
        refused: set[int] = set()

        def target(i: int, found: KVLayout) -> torch.Tensor | None:
            if found != layout.kv:
                refused.add(i)
                return None
            return layout.unpack(chunks[i].buffer) if in_place else new_cache(found)

        store = self._stores.of(layout.kv, kv_rank)
        caches: list[torch.Tensor | None] = [None] * len(chunks)
        with self._reported("load"):
            caches = store.get_many([each.chunk for each in chunks], target, refused.add)
        filled = []
        for i, (each, kv) in enumerate(zip(chunks, caches, strict=True)):
            self._unreadable.note(each.chunk, kv is not None, i in refused)
            if kv is not None:
                if not in_place:
                    layout.pages.pack(kv, each.buffer)
                filled.append(each.index)
        return filled

    # -- away --------------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Forget objects that are not locked; absent ones are no error."""
        with self._task("delete"):
            free = self._index.unlocked(keys)
            chunks = self._index.chunks(free)
            for key in free:
                if key not in chunks and (layout := self._layout_of(key, None)) is not None:
                    chunks[key] = self._chunk(key, layout)
            self._stores.any.remove(list(chunks.values()))
            self._forget_gone(chunks)

    def _forget_gone(self, chunks: Mapping[ObjectKey, ChunkKey]) -> None:
        """Drop keys from the index whose chunk no tier has any more."""
        sizes = self._sizes(list(chunks.values()))
        gone = [key for key, size in zip(chunks, sizes, strict=True) if size is None]
        # A tier that does not answer looks as if it had nothing.
        if gone and self._answering() and (known := self._index.drop(gone)):
            self._notify_keys_deleted(list(known), list(known.values()))

    # -- what there is -----------------------------------------------------------------------------

    def _remember(self, found: Mapping[ObjectKey, tuple[ChunkKey, int]]) -> None:
        """Add keys to the index, each with its chunk and that one's bytes."""
        if new := self._index.add(found):
            self._notify_keys_stored(list(new), list(new.values()))

    def register_listener(self, listener: L2AdapterListener) -> None:
        """Also tells the listener of what earlier processes stored, so that it counts, too."""
        super().register_listener(listener)
        if known := self._index.sizes():
            listener.on_l2_keys_stored(list(known), list(known.values()))

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Keys that this server, or an earlier one on the same folder, stored or found."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        if cursor is not None and not is_cursor(cursor):
            raise ValueError(f"{cursor!r} is not a cursor of an earlier page")
        keys = self._index.page(model_name, page_size, cursor)
        self._forget_gone(self._index.chunks(keys))
        sizes = self._index.sizes()
        entries = tuple(
            KeyEntry(key.to_encoded_object_key(), sizes[key]) for key in keys if key in sizes
        )
        return KeyListPage(entries, cursor_of(keys[-1]) if len(keys) == page_size else None)

    def get_usage(self) -> AdapterUsage:
        """Bytes of the objects in the index; the capacity is the largest tier's."""
        capacities = [stats.capacity_bytes for stats in self._stats().values()]
        return replace(super().get_usage(), total_capacity_bytes=max(capacities, default=0))

    def report_status(self) -> dict[str, Any]:
        """Healthy while every tier answers, none is paused and each kind's last task worked."""
        stats = self._stats()
        tiers = {
            tier.name: {
                "answers": tier.name in stats,
                "paused": list(tier.paused),
                **(vars(stats[tier.name]) if tier.name in stats else {}),
            }
            for tier in self._tiers
        }
        healthy = all(tier["answers"] and not tier["paused"] for tier in tiers.values())
        return {
            "is_healthy": healthy and not self._failing and not self._closed,
            "type": type(self).__name__,
            "tiers": tiers,
            "failing": dict(self._failing),
            "refused": sorted({v.refusal for v in list(self._verdicts.values()) if v.refusal}),
            "codec": self._stores.codec.spec.fingerprint,
            "stored_object_count": len(self._index),
            "locked_object_count": self._index.locked,
            "pending_tasks": self._pending,
            "warnings": self._warnings,
        }

    def close(self) -> None:
        """Finish running tasks, fail waiting ones, and end all threads, tiers and descriptors."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)
        self._stores.close()
        self._index.close()
        for tasks in (self._stored, self._looked_up, self._loaded):
            tasks.close()

    # -- details -----------------------------------------------------------------------------------

    def _submit(
        self, op: str, tasks: _Tasks[T], failed: T, run: Callable[..., T], *args: Any
    ) -> int:
        """Have ``run(*args)`` done by a thread; ``failed`` is the result when it cannot be."""
        with self._lock:
            task = self._next_task
            self._next_task += 1
            self._pending += 1

        def finish(result: T) -> None:
            with self._lock:
                self._pending -= 1
            tasks.finish(task, result)

        def job() -> None:
            result = failed
            with self._task(op):
                result = run(*args)
            finish(result)

        def done(future: Future[None]) -> None:
            if future.cancelled():  # close() has dropped it
                finish(failed)

        try:
            self._threads[op].submit(job).add_done_callback(done)
        except RuntimeError:  # closed
            finish(failed)
        return task

    def _compile(self) -> None:
        """Have the codec's kernels ready before a request waits for them: it takes ten seconds."""
        codec = self._stores.codec
        known = codec.calibration
        layers, heads, head_dim = (1, 1, 64) if known is None else known.priority.shape
        # Those of the other width, if they are needed, are compiled then.
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        with self._task("load"):  # what cannot be compiled cannot be loaded, until it can
            kv = torch.zeros(2, layers, 32, heads, head_dim, dtype=dtype)
            codec.decode(*codec.encode(kv))

    def _chunk(self, key: ObjectKey, layout: ChunkLayout) -> ChunkKey:
        self._seen[key.model_name, key.kv_rank, key.object_group_id] = layout
        return self._stores.key(
            layout, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, key.chunk_hash
        )

    def _sizes(self, chunks: Sequence[ChunkKey]) -> list[int | None]:
        """Bytes of both objects of each chunk; None unless both are there."""
        sizes = self._stores.any.sizes(objects_of(chunks))
        pairs = zip(sizes[::2], sizes[1::2], strict=True)
        return [None if a is None or r is None else a + r for a, r in pairs]

    def _stats(self) -> dict[str, TierStats]:
        """Of the tiers that answer."""
        found = {}
        for tier in self._tiers:
            with suppress(TierError):
                found[tier.name] = tier.stats()
        return found

    def _answering(self) -> bool:
        return len(self._stats()) == len(self._tiers)

    @contextmanager
    def _task(self, op: str) -> Iterator[None]:
        """:meth:`_reported`; when nothing went wrong, what was said of the last task is over."""
        before = self._reports[op]
        with self._reported(op):
            yield
        if self._reports[op] == before:
            self._failing.pop(op, None)

    @contextmanager
    def _reported(self, op: str) -> Iterator[None]:
        """Whatever goes wrong is counted and logged, and nothing else."""
        try:
            yield
        except Exception as e:  # LMCache's controller threads must not see it
            self._reports[op] += 1
            self._failing[op] = f"{type(e).__name__}: {e}"
            report(logger, "lmcache-l2", op, e)


@dataclass(frozen=True)
class _Wanted:
    """A chunk to load: its place in the task, and where it is to be written."""

    index: int
    chunk: ChunkKey
    buffer: torch.Tensor
