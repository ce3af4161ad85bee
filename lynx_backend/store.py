"""The store of chunks: the one place where codec and tiers meet.

A chunk is put residual first, then anchor, so that a findable anchor means a whole chunk was
written. What a tier returns is believed only after its checksums, key, spec and chunk id agree;
what does not agree is a miss, and removed if it is of no use to anyone. A failing tier costs time,
never the request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TypeVar

import torch

from . import metrics, wire
from .codec import Calibration, Codec, CodecSpec
from .config import CodecConfig, LynxConfig
from .errors import (
    ConfigError,
    CorruptObjectError,
    FormatMismatchError,
    InvalidInputError,
    TierError,
)
from .keys import ChunkKey, ObjectName, Part
from .logs import warn_limited
from .tiers import MemoryTier, NvmeTier, Tier

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class Presence(IntEnum):
    """What of a chunk is in the store."""

    ABSENT = 0
    #: the anchor alone: enough to draft on, a miss for a plain get.
    COARSE = 1
    FULL = 2


class ChunkStore:
    """Keeps chunks of KV cache in tiers, fastest first.

    Safe to use from several threads and, with tiers that allow it, from several processes. Closing
    the store closes its tiers.

    Args:
        codec: how chunks are encoded; a chunk of another spec is a miss.
        tiers: at least one, with different names.

    Raises:
        InvalidInputError: no tiers, or two with one name.
    """

    def __init__(self, codec: Codec, tiers: Sequence[Tier]) -> None:
        names = [tier.name for tier in tiers]
        if not names or len(set(names)) < len(names):
            raise InvalidInputError(
                f"a store needs one or more tiers of different names, got {names}"
            )
        self.codec = codec
        self.tiers = tuple(tiers)

    @classmethod
    def from_config(cls, config: LynxConfig) -> ChunkStore:
        """The store that a configuration describes.

        Raises:
            ConfigError: a tier's place or the calibration file cannot be used.
            InvalidInputError: the codec's numbers are out of range, or no tier is configured.
        """
        codec = codec_from_config(config.codec)
        tiers: list[Tier] = []
        if config.memory.enabled:
            tiers.append(MemoryTier(config.memory.max_bytes))
        if config.nvme.path is not None:
            tiers.append(
                NvmeTier(config.nvme.path, config.nvme.max_bytes, config.nvme.min_free_bytes)
            )
        return cls(codec, tiers)

    # -- chunks ------------------------------------------------------------------------------------

    def put(self, key: ChunkKey, kv: torch.Tensor) -> bool:
        """Encode a chunk and keep it in every tier that takes it.

        Args:
            kv: as for ``Codec.encode``.

        Returns:
            True when at least one tier now holds the whole chunk.

        Raises:
            InvalidInputError: ``kv`` cannot be encoded. A tier's failure is not raised.
        """
        anchor, residual = self.codec.encode(kv, key.digest)
        parts = [(Part.RESIDUAL, residual), (Part.ANCHOR, anchor)]
        kept = [
            all(self._put(tier, key.object(part), data.numpy().data) for part, data in parts)
            for tier in self.tiers
        ]
        for tier in self.tiers:
            self._measure(tier)
        return any(kept)

    def get(self, key: ChunkKey, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """The chunk as Q_full, or None. A chunk that has only its anchor is a miss.

        Args:
            out: written in place when given; unspecified after a miss.

        Raises:
            InvalidInputError: ``out`` does not have the shape and dtype of the chunk.
        """
        for tier in self.tiers:
            anchor = self._load(tier, key.object(Part.ANCHOR))
            if anchor is None:
                continue
            residual = self._residual_of(wire.parse(anchor), key, tier)
            if residual is None:
                continue
            try:
                return self.codec.decode(anchor, residual, out, key.digest)
            except (CorruptObjectError, FormatMismatchError) as e:
                self._discard(tier, objects_of([key]), e)
        return None

    def lookup(self, keys: Sequence[ChunkKey]) -> list[Presence]:
        """What is there of each chunk, by one round trip to each tier. Contents are not checked."""
        there = [size is not None for size in self.sizes(objects_of(keys))]
        pairs = zip(there[:: len(Part)], there[1 :: len(Part)], strict=True)
        return [Presence(int(anchor) + int(anchor and residual)) for anchor, residual in pairs]

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Forget chunks; absent ones are no error."""
        # Anchors first: without its anchor a chunk cannot be found, whatever happens then.
        for part in Part:
            names = [key.object(part) for key in keys]
            for tier in self.tiers:
                with self._guarded(tier, "delete"):
                    tier.delete(names)

    # -- objects, for the progressive path and transports ------------------------------------------

    def load(self, name: ObjectName) -> memoryview | None:
        """One object's bytes, checked against its checksums, key and spec, or None."""
        for tier in self.tiers:
            data = self._load(tier, name)
            if data is not None:
                return data
        return None

    def validate(self, name: ObjectName, data: wire.Buffer) -> wire.Header:
        """Check that ``data`` is the object called ``name``, made by this store's codec spec.

        Raises:
            CorruptObjectError: it is damaged.
            FormatMismatchError: it is something else.
        """
        return self.codec.validate(data, name.part, name.key.digest)

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        """Size in bytes of each object in the first tier that has it, None where it is absent."""
        found: list[int | None] = [None] * len(names)
        for tier in self.tiers:
            with self._guarded(tier, "lookup"):
                sizes = tier.sizes(names)
                found = [b if a is None else a for a, b in zip(found, sizes, strict=True)]
        return found

    def close(self) -> None:
        """Close all tiers."""
        for tier in self.tiers:
            tier.close()

    def _residual_of(self, anchor: wire.Header, key: ChunkKey, tier: Tier) -> memoryview | None:
        """The residual for an anchor found in ``tier``; evicted there, another may have it."""
        for other in (tier, *(t for t in self.tiers if t is not tier)):
            residual = self._load(other, key.object(Part.RESIDUAL))
            if residual is None:
                continue
            try:
                wire.expect_same_chunk(anchor, wire.parse(residual))
                return residual
            except FormatMismatchError as e:
                if other is tier:  # two writers of one key met here: neither half is of use
                    self._discard(tier, objects_of([key]), e)
                    return None
        return None

    # -- one tier ----------------------------------------------------------------------------------

    def _put(self, tier: Tier, name: ObjectName, data: memoryview) -> bool:
        with self._timed(tier, name, "put") as record:
            try:
                tier.put(name, data)
            except TierError as e:
                record("error")
                self._failed(tier, "put", e)
                return False
            record("ok")
        metrics.BYTES.labels(name.part.label, tier.name, "in").inc(len(data))
        return True

    def _load(self, tier: Tier, name: ObjectName) -> memoryview | None:
        with self._timed(tier, name, "get") as record:
            try:
                data = tier.get(name)
            except TierError as e:
                record("error")
                self._failed(tier, "get", e)
                return None
            if data is None:
                record("miss")
                return None
            try:
                self.validate(name, data)
            except CorruptObjectError as e:
                record("corrupt")
                self._discard(tier, [name], e)
                return None
            except FormatMismatchError as e:
                # Whole, and perhaps of use to whoever wrote it: another version, another spec.
                record("mismatch")
                self._refused(tier, e, f"not using {name}")
                return None
            record("hit")
        metrics.BYTES.labels(name.part.label, tier.name, "out").inc(len(data))
        return data

    def _discard(self, tier: Tier, names: list[ObjectName], why: Exception) -> None:
        self._refused(tier, why, f"removing {', '.join(map(str, names))}")
        with self._guarded(tier, "delete"):
            tier.delete(names)

    @contextmanager
    def _guarded(self, tier: Tier, op: str) -> Iterator[None]:
        try:
            yield
        except TierError as e:
            self._failed(tier, op, e)

    @staticmethod
    def _refused(tier: Tier, why: Exception, what: str) -> None:
        kind = type(why).__name__
        metrics.ERRORS.labels(kind).inc()
        warn_limited(logger, f"{tier.name}-{kind}", "tier %s: %s: %s", tier.name, what, why)

    @staticmethod
    def _failed(tier: Tier, op: str, why: TierError) -> None:
        metrics.ERRORS.labels(type(why).__name__).inc()
        warn_limited(logger, f"{tier.name}-{op}", "tier %s failed to %s: %s", tier.name, op, why)

    @contextmanager
    def _timed(self, tier: Tier, name: ObjectName, op: str) -> Iterator[Callable[[str], None]]:
        part, start = name.part.label, time.perf_counter()

        def record(result: str) -> None:
            metrics.OBJECTS.labels(part, tier.name, op, result).inc()
            metrics.OP_SECONDS.labels(part, tier.name, op).observe(time.perf_counter() - start)

        yield record

    def _measure(self, tier: Tier) -> None:
        with self._guarded(tier, "stats"):
            stats = tier.stats()
            metrics.TIER_BYTES.labels(tier.name).set(stats.used_bytes)
            metrics.TIER_CAPACITY_BYTES.labels(tier.name).set(stats.capacity_bytes)
            if stats.anchor_only is not None:
                metrics.ANCHOR_ONLY_CHUNKS.labels(tier.name).set(stats.anchor_only)


def objects_of(keys: Sequence[ChunkKey]) -> list[ObjectName]:
    """The names of all objects of some chunks, key by key, in part order."""
    return [key.object(part) for key in keys for part in Part]


class StoredObjects:
    """A store's checked objects as what a transport takes them from (``ObjectSource``)."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        """As ``ChunkStore.sizes``."""
        return self._store.sizes(names)

    def get(self, name: ObjectName) -> memoryview | None:
        """As ``ChunkStore.load``."""
        return self._store.load(name)


def codec_from_config(config: CodecConfig) -> Codec:
    """The codec that a configuration's codec section describes.

    Raises:
        ConfigError: the calibration file cannot be read.
        CorruptObjectError: it is damaged, or something else.
        InvalidInputError: a number is out of range.
    """
    given = {name: value for name, value in vars(config).items() if value is not None}
    path = given.pop("calibration", None)
    try:
        calibration = None if path is None else Calibration.load(path)
    except OSError as e:
        raise ConfigError(f"cannot read the calibration {path}: {e}") from e
    codec = Codec(CodecSpec(**given), calibration=calibration)
    if codec.spec.profile == "adaptive" and calibration is None:
        logger.warning(
            "codec.calibration is not set: anchors have about twice the error they could have at "
            "the same size. Run `lynx calibrate` once for this model and name its file there"
        )
    return codec
