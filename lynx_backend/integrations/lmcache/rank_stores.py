"""The stores of all tensor-parallel ranks that one LMCache server keeps, over the same tiers."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from ...codec import Codec
from ...keys import CacheIdentity, ChunkKey
from ...layout import KVLayout
from ...store import CLOSE_SECONDS, ChunkStore, codec_from_config, places_from_config
from .chunk_layouts import ChunkLayout
from .keys import chunk_key, salt
from .settings import Settings, rank_calibration


@dataclass(frozen=True)
class Rank:
    """A rank's place in the model, as LMCache packs it into ``ObjectKey.kv_rank``."""

    world_size: int
    rank: int

    @classmethod
    def of(cls, kv_rank: int) -> Rank:
        """World size in the highest of four bytes, the global rank in the next."""
        return cls(max(1, kv_rank >> 24), kv_rank >> 16 & 0xFF)


class RankStores:
    """Opens the tiers once, and a store over them for each rank whose codec is another one.

    Args:
        settings: what the user said.

    Raises:
        LynxError: as ``ChunkStore.from_config``.
    """

    def __init__(self, settings: Settings) -> None:
        config = settings.config
        self._namespace = settings.namespace
        self._queue_bytes = config.tiering.write_behind_bytes
        self.codec = codec_from_config(config.codec)
        self._fingerprint = self.codec.spec.fingerprint
        self._tiers, self._peers = places_from_config(config, self.codec)
        #: for what needs no codec: lookups, sizes, removal of any rank's chunks
        self.any = self._open(self.codec)
        self._stores: dict[tuple[KVLayout, Rank], ChunkStore] = {}
        self._lock = threading.Lock()

    def of(self, layout: KVLayout, kv_rank: int) -> ChunkStore:
        """The store that encodes and decodes a rank's chunks.

        Raises:
            ConfigError: the calibration is not of this model.
        """
        if self.codec.calibration is None:
            return self.any
        rank = Rank.of(kv_rank)
        with self._lock:
            if (layout, rank) not in self._stores:
                tables = rank_calibration(
                    self.codec.calibration, layout, rank.world_size, rank.rank
                )
                codec = Codec(self.codec.spec, threads=self.codec.threads, calibration=tables)
                self._stores[layout, rank] = self._open(codec)
            return self._stores[layout, rank]

    def key(
        self, layout: ChunkLayout, model: str, kv_rank: int, group: int, tenant: str, digest: bytes
    ) -> ChunkKey:
        """The key of a chunk.

        Args:
            model, kv_rank, group, tenant, digest: the fields of LMCache's ``ObjectKey``.
        """
        identity = CacheIdentity(
            model=model,
            dtype=layout.kv.dtype,
            layout=layout.signature,
            codec=self._fingerprint,
            world_size=kv_rank >> 24,
            rank=kv_rank & 0xFFFFFF,
            salt=salt(self._namespace, tenant, [("group", str(group))] if group else ()),
        )
        return chunk_key(identity, digest)

    def close(self) -> None:
        """Write what waits, for some seconds at most, and close tiers and peers."""
        stores = [self.any, *self._stores.values()]
        end = time.monotonic() + CLOSE_SECONDS
        for store in stores:  # all of them before the first closes the tiers that they share
            store.flush(max(0.0, end - time.monotonic()))
        for store in stores:
            store.close(max(0.0, end - time.monotonic()))

    def _open(self, codec: Codec) -> ChunkStore:
        return ChunkStore(codec, self._tiers, self._queue_bytes, self._peers)
