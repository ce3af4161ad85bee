"""One tier as a store uses it: failures are misses, and what happened is counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from . import metrics, wire
from .errors import CorruptObjectError, FormatMismatchError, TierError
from .keys import ChunkKey, ObjectName, Part
from .logs import warn_limited
from .tiers import Tier
from .tiers.base import failing_as_tier_error
from .tiers.write_behind import WriteBehind

logger = logging.getLogger(__name__)

Check = Callable[[ObjectName, wire.Buffer], wire.Header]

_MEASURE_SECONDS = 1.0
#: Objects that :meth:`TierAccess.clear` deletes by one call, during which others may have to wait.
_CLEARED_AT_A_TIME = 1000


@dataclass(frozen=True)
class Found:
    """An object that a tier returned, its header checked.

    Attributes:
        seconds: how long the tier took.
    """

    name: ObjectName
    data: memoryview
    header: wire.Header
    seconds: float


@dataclass(frozen=True)
class Trouble:
    """What went wrong while chunks were read.

    Attributes:
        failed: chunks that a tier could not be asked for.
        refused: chunks of which an object was found that is of no use.
    """

    failed: set[ChunkKey] = field(default_factory=set)
    refused: set[ChunkKey] = field(default_factory=set)


class TierAccess:
    """Puts objects into a tier, now or later, and takes checked ones out.

    Only :meth:`clear` raises TierError.

    Args:
        tier: closed with this.
        check_header: raises CorruptObjectError or FormatMismatchError unless the bytes can be the
            object of that name.
        validate: the same, for every byte.
        queue_bytes: most bytes of objects that wait to be written; 0 for no queue.
    """

    def __init__(self, tier: Tier, check_header: Check, validate: Check, queue_bytes: int) -> None:
        self.tier = tier
        self.name = tier.name
        self._check_header = check_header
        self._validate = validate
        self._queue_bytes = queue_bytes
        self._closed = False
        self._queue = WriteBehind(f"lynx-{tier.name}", queue_bytes) if queue_bytes else None
        self._measured = float("-inf")
        self._measuring = threading.Lock()

    # -- in ----------------------------------------------------------------------------------------

    def put(self, objects: Sequence[tuple[ObjectName, memoryview]], op: str = "put") -> bool:
        """Put objects in this order, as far as it goes; whether all of them are there."""
        done = all(self._put(name, data, op) for name, data in objects)
        self._measure()
        return done

    def put_later(
        self,
        objects: Sequence[tuple[ObjectName, memoryview]],
        op: str = "put",
        wait_seconds: float = 0.0,
    ) -> bool:
        """:meth:`put` when its turn comes; without a queue, now.

        Args:
            wait_seconds: most time to wait for room in a full queue.

        Returns:
            whether it will be tried. False, and counted as skipped, when the queue is full or
            closed, or smaller than this.
        """
        if self._queue is None:
            return self.put(objects, op)
        size = sum(len(data) for _, data in objects)
        names = [name for name, _ in objects]
        if self._queue.submit(names, size, lambda: self.put(objects, op), wait_seconds):
            return True
        for name in names:
            metrics.OBJECTS.labels(name.part.label, self.name, op, "skipped").inc()
        if self._closed:
            kind, why = "closed", "it is closed"
        elif size > self._queue_bytes:
            kind = "small"
            why = f"its {size} bytes are more than tiering.write_behind_bytes={self._queue_bytes}"
            why += "; raise that, or set it to 0 to write without waiting"
        else:
            kind = "queue"
            why = f"the tier does not keep up: {self._queue.bytes} bytes wait already"
        warn_limited(
            logger,
            f"{self.name}-{kind}",
            "tier %s: a chunk was not written, as %s",
            self.name,
            why,
        )
        return False

    # -- out ---------------------------------------------------------------------------------------

    def get(self, names: Sequence[ObjectName], trouble: Trouble) -> list[Found | None]:
        """Objects whose header is in order; each is to be given to :meth:`accept`.

        Args:
            trouble: told why others are None, unless they are just not there.
        """
        start = time.perf_counter()
        try:
            with failing_as_tier_error(self.name):
                datas = self.tier.get_many(names)
        except TierError as e:
            self._failed("get", e)
            datas = None
            trouble.failed.update(name.key for name in names)
        seconds = time.perf_counter() - start
        if datas is None:
            for name in names:
                self._record(name, "get", "error", seconds)
            return [None] * len(names)
        pairs = zip(names, datas, strict=True)
        return [self._found(name, data, seconds, trouble) for name, data in pairs]

    def accept(self, found: Found, checked: bool = False) -> bool:
        """Whether every byte of an object is as it was written; counted, and removed if not.

        Args:
            checked: the caller knows that it is.
        """
        try:
            if not checked:
                self._validate(found.name, found.data)
        except (CorruptObjectError, FormatMismatchError) as e:
            self._refuse(found.name, e, found.seconds)
            return False
        self._record(found.name, "get", "hit", found.seconds)
        metrics.BYTES.labels(found.name.part.label, self.name, "out").inc(len(found.data))
        return True

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        """As ``Tier.sizes``, with a failure as nothing found."""
        with self._guarded("lookup"):
            return self.tier.sizes(names)
        return [None] * len(names)

    # -- away --------------------------------------------------------------------------------------

    def delete(self, names: Sequence[ObjectName]) -> None:
        """Remove objects, also those that wait to be written."""
        if self._queue is not None:
            self._queue.discard({name.key for name in names})
        with self._guarded("delete"):
            self.tier.delete(names)

    def clear(self, identities: Collection[bytes]) -> int:
        """Remove all objects of some identities, also those that wait to be written.

        Returns:
            how many chunks' anchors were removed.

        Raises:
            TierError: some may be left.
        """
        if self._queue is not None:
            self._queue.discard(_ChunksOf(identities))
        anchors = 0
        with failing_as_tier_error(self.name):
            names = (name for name in self.tier.names() if name.key.identity in identities)
            while batch := list(islice(names, _CLEARED_AT_A_TIME)):
                self.tier.delete(batch)
                anchors += sum(name.part is Part.ANCHOR for name in batch)
        return anchors

    def discard(self, names: Sequence[ObjectName], why: Exception) -> None:
        """Remove objects that are of no use to anyone, and say so."""
        self._report(why, f"removing {', '.join(map(str, names))}")
        with self._guarded("delete"):
            self.tier.delete(names)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing waits to be written; whether that is so."""
        return self._queue is None or self._queue.flush(timeout)

    def close(self, timeout: float) -> None:
        """Write what waits, for so many seconds at most, and close the tier."""
        self._closed = True
        if self._queue is not None and (left := self._queue.close(timeout)):
            logger.warning("tier %s closed with %d chunks not written", self.name, left)
        with self._guarded("close"):  # the others are to be closed as well
            self.tier.close()

    # -- details -----------------------------------------------------------------------------------

    def _put(self, name: ObjectName, data: memoryview, op: str) -> bool:
        start = time.perf_counter()
        try:
            with failing_as_tier_error(self.name):
                self.tier.put(name, data)
        except TierError as e:
            self._record(name, op, "error", time.perf_counter() - start)
            self._failed(op, e)
            return False
        self._record(name, op, "ok", time.perf_counter() - start)
        metrics.BYTES.labels(name.part.label, self.name, "in").inc(len(data))
        return True

    def _found(
        self, name: ObjectName, data: memoryview | None, seconds: float, trouble: Trouble
    ) -> Found | None:
        if data is None:
            self._record(name, "get", "miss", seconds)
            return None
        try:
            return Found(name, data, self._check_header(name, data), seconds)
        except (CorruptObjectError, FormatMismatchError) as e:
            self._refuse(name, e, seconds)
            trouble.refused.add(name.key)
            return None

    def _refuse(self, name: ObjectName, why: Exception, seconds: float) -> None:
        if isinstance(why, CorruptObjectError):
            self._record(name, "get", "corrupt", seconds)
            self.discard([name], why)
        else:
            # Whole, and perhaps of use to whoever wrote it: another version, another spec.
            self._record(name, "get", "mismatch", seconds)
            self._report(why, f"not using {name}")

    def _record(self, name: ObjectName, op: str, result: str, seconds: float) -> None:
        metrics.OBJECTS.labels(name.part.label, self.name, op, result).inc()
        metrics.OP_SECONDS.labels(name.part.label, self.name, op).observe(seconds)

    @contextmanager
    def _guarded(self, op: str) -> Iterator[None]:
        try:
            with failing_as_tier_error(self.name):
                yield
        except TierError as e:
            self._failed(op, e)

    def _report(self, why: Exception, what: str) -> None:
        kind = type(why).__name__
        metrics.ERRORS.labels(kind).inc()
        warn_limited(logger, f"{self.name}-{kind}", "tier %s: %s: %s", self.name, what, why)

    def _failed(self, op: str, why: TierError) -> None:
        metrics.ERRORS.labels(type(why).__name__).inc()
        warn_limited(logger, f"{self.name}-{op}", "tier %s failed to %s: %s", self.name, op, why)

    def _measure(self) -> None:
        """Set the gauges, now and then: a tier may have to ask a server, or list a folder."""
        now = time.monotonic()
        with self._measuring:
            if now - self._measured < _MEASURE_SECONDS:
                return
            self._measured = now
        with self._guarded("stats"):
            stats = self.tier.stats()
            metrics.TIER_BYTES.labels(self.name).set(stats.used_bytes)
            metrics.TIER_CAPACITY_BYTES.labels(self.name).set(stats.capacity_bytes)
            if stats.anchor_only is not None:
                metrics.ANCHOR_ONLY_CHUNKS.labels(self.name).set(stats.anchor_only)


@dataclass(frozen=True)
class _ChunksOf:
    """All chunks of some identities, as a container."""

    identities: Collection[bytes]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, ChunkKey) and key.identity in self.identities
