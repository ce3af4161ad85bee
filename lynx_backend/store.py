"""The store of chunks: the one place where codec and tiers meet.

A chunk is put residual first, then anchor, so that a findable anchor means a whole chunk was
written. What a tier returns is believed only after its checksums, key, spec and chunk id agree;
what does not agree is a miss, and removed if it is of no use to anyone. A failing tier costs time,
never the request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING

import torch

from . import wire
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
from .layout import KVLayout
from .tier_access import Found, TierAccess, Trouble
from .tiers import GuardedTier, MemoryTier, NvmeTier, Tier

if TYPE_CHECKING:
    from .peers import PeerTier

logger = logging.getLogger(__name__)

#: Chunks that are read from a device at a time, while the ones before them are decoded.
_CHUNKS_AT_A_TIME = 8
#: Most time in which :meth:`ChunkStore.close` still writes, unless it is told otherwise.
CLOSE_SECONDS = 10.0

#: The objects of one chunk in the order in which they are written: residual, anchor.
EncodedChunk = Sequence[tuple[ObjectName, memoryview]]


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
        write_behind_bytes: with 0, :meth:`put` waits for every tier, and nothing is promoted. Else
            tiers that wait for a device are written to later, by threads of their own, and what a
            tier answers is also written into those before it. This many bytes may wait for each
            tier; what would be more is skipped, and counted as that.
        peers: read from when no tier has a chunk, never written to; closed with the store.

    Attributes:
        codec, tiers, peers: as given.

    Raises:
        InvalidInputError: no tiers, or two with one name.
    """

    def __init__(
        self,
        codec: Codec,
        tiers: Sequence[Tier],
        write_behind_bytes: int = 0,
        peers: PeerTier | None = None,
    ) -> None:
        names = [tier.name for tier in tiers]
        if not names or len(set(names)) < len(names):
            raise InvalidInputError(
                f"a store needs one or more tiers of different names, got {names}"
            )
        self.codec = codec
        self.tiers = tuple(tiers)
        self.peers = peers
        self._promotes = write_behind_bytes > 0
        self._wire_spec = codec.spec.pack()
        self._accesses = [
            TierAccess(tier, self._check_header, self.validate, write_behind_bytes)
            for tier in tiers
        ]
        self._readers = ThreadPoolExecutor(4, "lynx-read")
        self._readable = list(self._accesses)
        if peers is not None:
            self._readable.append(TierAccess(peers, self._check_header, self.validate, 0))

    @classmethod
    def from_config(
        cls, config: LynxConfig, with_peers: bool = True, codec: Codec | None = None
    ) -> ChunkStore:
        """The store that a configuration describes.

        Args:
            with_peers: whether it also reads from other nodes. A node that is itself a peer
                answers only for what it holds: else two would ask each other for ever.
            codec: instead of the one that the configuration's codec section describes.

        Raises:
            ConfigError: no tier is configured, or the place of one, a peer's address or the
                calibration file cannot be used. What was opened is closed again.
            InvalidInputError: the codec's numbers are out of range.
            UnsupportedError: a tier needs a package that is not installed.
        """
        codec = codec or codec_from_config(config.codec)
        tiers, peers = places_from_config(config, codec, with_peers)
        return cls(codec, tiers, config.tiering.write_behind_bytes, peers)

    # -- chunks ------------------------------------------------------------------------------------

    def put(self, key: ChunkKey, kv: torch.Tensor) -> bool:
        """Encode a chunk and keep it in every tier that takes it.

        A key names one cache. While an earlier put of it waits to be written to a slower tier, a
        later one is not written there: what waits will do.

        Args:
            kv: as for ``Codec.encode``.

        Returns:
            True when at least one tier now holds the whole chunk, or will if it can write it. What
            others skip, because their queue is full or too small, is logged and counted.

        Raises:
            InvalidInputError: ``kv`` cannot be encoded. A tier's failure is not raised.
        """
        return self.write(self.encode(key, kv))

    def encode(self, key: ChunkKey, kv: torch.Tensor) -> EncodedChunk:
        """The first half of :meth:`put`, after which ``kv`` may change.

        Raises:
            InvalidInputError: as :meth:`put`.
        """
        anchor, residual = self.codec.encode(kv, key.digest)
        return [
            (key.object(Part.RESIDUAL), residual.numpy().data),
            (key.object(Part.ANCHOR), anchor.numpy().data),
        ]

    def write(self, chunk: EncodedChunk, wait_seconds: float = 0.0) -> bool:
        """The second half of :meth:`put`.

        Args:
            wait_seconds: most time to wait for each slower tier's queue, if it is full.
        """
        kept = [self._write(access, chunk, wait_seconds) for access in self._accesses]
        return any(kept)

    def get(self, key: ChunkKey, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """The chunk as Q_full, or None. A chunk that has only its anchor is a miss.

        Args:
            out: written in place when given; unspecified after a miss.

        Raises:
            InvalidInputError: ``out`` does not have the shape and dtype of the chunk.
        """

        def target(_: int, layout: KVLayout) -> torch.Tensor:
            return new_cache(layout) if out is None else out

        return self.get_many([key], target)[0]

    def get_many(
        self,
        keys: Sequence[ChunkKey],
        target: Callable[[int, KVLayout], torch.Tensor | None],
        refused: Callable[[int], object] = lambda _: None,
    ) -> list[torch.Tensor | None]:
        """:meth:`get` for several chunks, by few round trips to each tier that is asked.

        The next eight chunks are read from a disk, server or peer while eight are decoded.

        Args:
            target: called as ``target(i, layout)`` when ``keys[i]`` was found, for the tensor to
                write it to; None is a miss. Called again when that copy proves damaged and another
                tier has one.
            refused: called as ``refused(i)`` when ``keys[i]`` is a miss and will be one until it is
                put again, although :meth:`lookup` finds it: every tier answered, and what there is
                was made by another codec, or is damaged and cannot be removed.

        Raises:
            InvalidInputError: a target does not have the shape and dtype of its chunk.
        """
        done: list[torch.Tensor | None] = [None] * len(keys)
        trouble = Trouble()
        for access in self._readable:
            missing = [i for i, kv in enumerate(done) if kv is None]
            if not missing:
                break
            pairs = self._pairs(access, [keys[i] for i in missing], trouble)
            for i, (anchor, residual) in zip(missing, pairs, strict=True):
                to = partial(target, i)
                done[i] = self._assemble(keys[i], access, anchor, residual, to, trouble)
        if trouble.refused:
            useless = trouble.refused - trouble.failed
            missing = [i for i, kv in enumerate(done) if kv is None and keys[i] in useless]
            there = self.lookup([keys[i] for i in missing])
            for i, presence in zip(missing, there, strict=True):
                if presence is Presence.FULL:
                    refused(i)
        return done

    def lookup(self, keys: Sequence[ChunkKey], here: bool = False) -> list[Presence]:
        """What is there of each chunk, by one round trip to each tier. Contents are not checked.

        Args:
            here: in this node's tiers alone.
        """
        there = [size is not None for size in self.sizes(objects_of(keys), here)]
        pairs = zip(there[:: len(Part)], there[1 :: len(Part)], strict=True)
        return [Presence(int(anchor) + int(anchor and residual)) for anchor, residual in pairs]

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Forget chunks; absent ones are no error."""
        # Anchors first: without its anchor a chunk cannot be found, whatever happens then.
        for part in Part:
            for access in self._accesses:
                access.delete([key.object(part) for key in keys])

    def clear(self, identities: Collection[bytes]) -> int:
        """Forget all chunks of some identities, in this node's tiers.

        Args:
            identities: as in ``ChunkKey.identity``.

        Returns:
            how many there were, counted in each tier.

        Raises:
            TierError: a tier failed, so that some may be left; the others are cleared.
        """
        chunks = 0
        failed: list[str] = []
        # Slower tiers first: what one of them answered last may wait to be promoted into the next.
        for access in reversed(self._accesses):
            try:
                chunks += access.clear(identities)
            except TierError as e:  # noqa: PERF203 - a tier that fails must not spare the others
                failed.append(f"{access.name}: {e}")
        if failed:
            raise TierError(f"not everything is cleared; do it again ({'; '.join(failed)})")
        return chunks

    # -- objects, for the progressive path and transports ------------------------------------------

    def load(self, name: ObjectName, here: bool = False) -> memoryview | None:
        """One object's bytes, checked against its checksums, key and spec, or None.

        Args:
            here: from this node's tiers alone.
        """
        for access in self._accesses if here else self._readable:
            (found,) = access.get([name], Trouble())
            if found is not None and access.accept(found):
                self._promote([(access, found)])
                return found.data
        return None

    def keep(self, name: ObjectName, data: memoryview) -> bool:
        """Put an object that another node made, once it is checked; whether a tier took it.

        Raises:
            CorruptObjectError, FormatMismatchError: it is not the object of that name.
        """
        self.validate(name, data)
        kept = [self._write(access, [(name, data)], 0.0) for access in self._accesses]
        return any(kept)

    def validate(self, name: ObjectName, data: wire.Buffer) -> wire.Header:
        """Check that ``data`` is the object called ``name``, made by this store's codec spec.

        Raises:
            CorruptObjectError: it is damaged.
            FormatMismatchError: it is something else.
        """
        return self.codec.validate(data, name.part, name.key.digest)

    def promote(self, name: ObjectName, data: memoryview) -> None:
        """Also write an object that a peer gave into this node's tiers, if answers are promoted.

        It is checked when it is read. ``data`` must not change any more.
        """
        for access in self._accesses if self._promotes else []:
            access.put_later([(name, data)], "promote")

    def sizes(self, names: Sequence[ObjectName], here: bool = False) -> list[int | None]:
        """Size in bytes of each object in the first tier that has it, None where it is absent.

        Args:
            here: of this node's tiers alone.
        """
        found: list[int | None] = [None] * len(names)
        for access in self._accesses if here else self._readable:
            missing = [i for i, size in enumerate(found) if size is None]
            if not missing:
                break
            for i, size in zip(missing, access.sizes([names[i] for i in missing]), strict=True):
                found[i] = size
        return found

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing that :meth:`put` left for later waits any more.

        Returns:
            whether that is so. True although a tier failed to write something, or refused it, which
            is logged and counted: ask the tier for it to know what it holds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        return all(
            access.flush(None if end is None else max(0.0, end - time.monotonic()))
            for access in self._accesses
        )

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Write what waits and close all tiers. What is read meanwhile is a miss.

        Args:
            timeout: most seconds to write in, of all tiers together; they write at the same time.
        """
        end = time.monotonic() + timeout
        self._readers.shutdown(wait=False, cancel_futures=True)
        for access in self._readable:
            access.close(max(0.0, end - time.monotonic()))

    # -- details -----------------------------------------------------------------------------------

    def _pairs(
        self, access: TierAccess, keys: Sequence[ChunkKey], trouble: Trouble
    ) -> Iterator[tuple[Found | None, Found | None]]:
        """The anchor and the residual that a tier has of each chunk, read ahead of the caller."""
        step = max(1, len(keys)) if access.tier.in_memory else _CHUNKS_AT_A_TIME
        groups = [objects_of(keys[i : i + step]) for i in range(0, len(keys), step)]
        ahead: Future[list[Found | None]] | None = None
        for i, names in enumerate(groups):
            try:
                found = access.get(names, trouble) if ahead is None else ahead.result()
            except CancelledError:  # closed before its turn came, as the tier will say
                found = access.get(names, trouble)
            ahead = self._start(access, groups[i + 1], trouble) if i + 1 < len(groups) else None
            yield from zip(found[:: len(Part)], found[1 :: len(Part)], strict=True)

    def _start(
        self, access: TierAccess, names: Sequence[ObjectName], trouble: Trouble
    ) -> Future[list[Found | None]] | None:
        """Read ahead; None when this has been closed."""
        try:
            return self._readers.submit(access.get, names, trouble)
        except RuntimeError:
            return None

    @staticmethod
    def _write(access: TierAccess, objects: EncodedChunk, wait_seconds: float) -> bool:
        if access.tier.in_memory:
            return access.put(objects)
        return access.put_later(objects, wait_seconds=wait_seconds)

    def _assemble(
        self,
        key: ChunkKey,
        access: TierAccess,
        anchor: Found | None,
        residual: Found | None,
        target: Callable[[KVLayout], torch.Tensor | None],
        trouble: Trouble,
    ) -> torch.Tensor | None:
        """Q_full from what one tier has of a chunk, completed from the others; else None."""
        if anchor is None:
            if residual is not None:
                access.accept(residual)
            return None
        parts = [(access, anchor), self._residual_for(anchor, residual, access, trouble)]
        kv = self._decode(key, parts, target, trouble)
        if kv is not None:
            self._promote(parts)
        return kv

    def _promote(self, parts: Sequence[tuple[TierAccess, Found | None]]) -> None:
        """Also write each object into the tiers before the one it was found in, residual first."""
        for at, access in enumerate(self._accesses if self._promotes else []):
            objects = [
                (found.name, found.data)
                for holder, found in reversed(parts)
                if found is not None and holder in self._readable[at + 1 :]
            ]
            if objects:
                access.put_later(objects, "promote")

    def _check_header(self, name: ObjectName, data: wire.Buffer) -> wire.Header:
        header = wire.parse(data)
        wire.expect(header, name.part, self._wire_spec, name.key.digest)
        return header

    def _residual_for(
        self, anchor: Found, residual: Found | None, access: TierAccess, trouble: Trouble
    ) -> tuple[TierAccess, Found | None]:
        """The residual found beside an anchor, or, as it may be evicted there, in another tier."""
        name = anchor.name.key.object(Part.RESIDUAL)
        if residual is not None:
            try:
                wire.expect_same_chunk(anchor.header, residual.header)
                return access, residual
            except FormatMismatchError as e:  # two writers of one key met: neither half is of use
                access.discard(objects_of([name.key]), e)
                trouble.refused.add(name.key)
                return access, None
        for other in self._readable:
            (found,) = other.get([name], trouble) if other is not access else [None]
            if found is None:
                continue
            try:
                wire.expect_same_chunk(anchor.header, found.header)
                return other, found
            except FormatMismatchError:
                other.accept(found)  # of use there
                trouble.refused.add(name.key)
        return access, None

    def _decode(
        self,
        key: ChunkKey,
        parts: list[tuple[TierAccess, Found | None]],
        target: Callable[[KVLayout], torch.Tensor | None],
        trouble: Trouble,
    ) -> torch.Tensor | None:
        """Q_full from an anchor and its residual; None, and each of them accounted for, if not."""
        found = [(access, each) for access, each in parts if each is not None]
        checked = False
        try:
            if len(found) < len(parts):
                return None
            out = target(found[0][1].header.layout)
            if out is None:
                return None
            anchor, residual = (each.data for _, each in found)
            kv = self.codec.decode(anchor, residual, out, key.digest)
            checked = True
            return kv
        except (CorruptObjectError, FormatMismatchError):
            trouble.refused.add(key)
            return None
        finally:
            # Decoding reads every byte; only when it did not come to that they are read once more.
            for access, each in found:
                access.accept(each, checked)


def new_cache(layout: KVLayout) -> torch.Tensor:
    """An uninitialised tensor for a chunk of this layout."""
    return torch.empty(layout.shape, dtype=getattr(torch, layout.dtype))


def objects_of(keys: Sequence[ChunkKey]) -> list[ObjectName]:
    """The names of all objects of some chunks, key by key, in part order."""
    return [key.object(part) for key in keys for part in Part]


class StoredObjects:
    """A store's checked objects as what a transport takes them from (``ObjectSource``).

    Args:
        here: those in this node's tiers alone.
    """

    def __init__(self, store: ChunkStore, here: bool = False) -> None:
        self._store, self._here = store, here

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        """As ``ChunkStore.sizes``."""
        return self._store.sizes(names, self._here)

    def get(self, name: ObjectName) -> memoryview | None:
        """As ``ChunkStore.load``."""
        return self._store.load(name, self._here)


def places_from_config(
    config: LynxConfig, codec: Codec, with_peers: bool = True
) -> tuple[list[Tier], PeerTier | None]:
    """The tiers and the peers of a store that a configuration describes.

    Raises:
        as ``ChunkStore.from_config``.
    """
    redis = config.redis.url is not None and config.redis.tier
    if not (config.memory.enabled or config.nvme.path is not None or redis):
        raise ConfigError(
            "no place to keep objects in is configured: set nvme.path, redis.url (with redis.tier) "
            "or memory.enabled; peers are only read from"
        )
    with ExitStack() as undo:
        tiers = tiers_from_config(config)
        for tier in tiers:
            undo.callback(tier.close)
        peers = peers_from_config(config, codec) if with_peers else None
        undo.pop_all()
    return tiers, peers


def tiers_from_config(config: LynxConfig) -> list[Tier]:
    """The tiers that a configuration describes, fastest first.

    Raises:
        as ``ChunkStore.from_config``, but there may be none.
    """
    tiers: list[Tier] = []
    memory, nvme = config.memory, config.nvme
    with ExitStack() as undo:
        if memory.enabled:
            pinned = torch.cuda.is_available() if memory.pinned is None else memory.pinned
            limits = (memory.max_bytes, memory.quota_bytes, memory.low_watermark)
            tiers.append(MemoryTier(*limits, pinned=pinned))
            undo.callback(tiers[-1].close)
        if nvme.path is not None:
            tier = NvmeTier(
                nvme.path,
                nvme.max_bytes,
                nvme.min_free_bytes,
                nvme.direct,
                nvme.quota_bytes,
                nvme.low_watermark,
                nvme.max_object_bytes,
            )
            tiers.append(GuardedTier(tier))
            undo.callback(tiers[-1].close)
        if config.redis.url is not None and config.redis.tier:
            from .tiers.redis import RedisTier  # needs a package that not everybody has

            tiers.append(GuardedTier(RedisTier(config.redis), full_is_failure=True))
        undo.pop_all()
    return tiers


def peers_from_config(config: LynxConfig, codec: Codec) -> PeerTier | None:
    """The peers that a configuration names, or finds in a directory; None without either.

    Raises:
        as ``ChunkStore.from_config``.
    """
    if config.peers.nodes is None and not config.directory.enabled:
        return None
    from . import peers  # needs a package that not everybody has

    return peers.peers_from_config(config, codec.spec.fingerprint)


def codec_from_config(config: CodecConfig) -> Codec:
    """The codec that a configuration's codec section describes.

    Raises:
        ConfigError: the calibration file cannot be read.
        CorruptObjectError: it is damaged, or something else.
        InvalidInputError: a number is out of range.
    """
    given = {name: value for name, value in vars(config).items() if value is not None}
    path, threads = given.pop("calibration", None), given.pop("threads", None)
    try:
        calibration = None if path is None else Calibration.load(path)
    except OSError as e:
        raise ConfigError(f"cannot read the calibration {path}: {e}") from e
    codec = Codec(CodecSpec(**given), threads=threads, calibration=calibration)
    if codec.spec.profile == "adaptive" and calibration is None:
        logger.warning(
            "codec.calibration is not set: anchors have about twice the error they could have at "
            "the same size. Run `lynx calibrate` once for this model and name its file there"
        )
    return codec
