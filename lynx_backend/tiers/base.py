"""What a tier is: a place that keeps named objects and may lose any of them at any time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from .. import metrics
from ..errors import InvalidInputError, TierError
from ..keys import ObjectName

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class TierStats:
    """What a tier holds, counted from what is really there.

    Attributes:
        used_bytes: bytes that count against the capacity.
        capacity_bytes: the limit that holds for the tier.
        objects: number of objects; None when counting them would take a walk over all.
        anchor_only: chunks whose anchor is present and whose residual is not; None as before.
    """

    used_bytes: int
    capacity_bytes: int
    objects: int | None
    anchor_only: int | None


def flat(data: Buffer) -> memoryview:
    """``data`` as a 1-D uint8 view.

    Raises:
        InvalidInputError: it is not contiguous, or empty.
    """
    view = memoryview(data)
    if not view.c_contiguous:
        raise InvalidInputError(
            f"an object's bytes must be C-contiguous, got shape {view.shape} with strides "
            f"{view.strides}; copy the buffer first"
        )
    if not view.nbytes:
        raise InvalidInputError("an object has at least one byte; nothing is stored as nothing")
    return view.cast("B")


@contextmanager
def failing_as_tier_error(tier: str) -> Iterator[None]:
    """Around a call of a tier: whatever else it raises becomes TierError.

    Nobody can list what a client library, a driver or a bug may raise, and none of it is to end a
    request of the engine.
    """
    try:
        yield
    except TierError:
        raise
    except Exception as e:
        raise TierError(
            f"tier {tier} met what it does not expect, {e!r}; check its settings, and report this "
            "if they are in order"
        ) from e


class Tier(ABC):
    """Keeps bytes by :class:`ObjectName`. Knows names and bytes, never what they mean.

    Contract, checked by ``lynx_backend.testing.TierConformance``:

    * an object is findable only when it is whole, and stays byte-identical until it is gone;
    * :meth:`put` of an existing name replaces it, and readers see the old bytes, the new bytes or,
      where there is no room for both, a miss;
    * methods may be called from any thread; failures raise :class:`~lynx_backend.errors.TierError`
      and leave the tier usable;
    * after :meth:`close`, which may be repeated, every other method raises TierError.

    Contract of a tier that keeps its capacity itself (:attr:`keeps_capacity`), checked by
    ``BoundedTierConformance``:

    * under pressure the least recently used residual is evicted, and so a chunk's residual before
      its anchor; but while anchors without their residual take more than ``ANCHOR_ONLY_SHARE`` of
      what is held, and when there is no residual, it is the least recently used of those anchors;
    * putting one part of a chunk never evicts its other part;
    * every eviction is counted in ``lynx_objects_total``;
    * an object that could not fit even so is refused before anything is evicted for it;
    * the capacity holds at every moment, across restarts, and between processes that share it.
    """

    #: short name in metrics and logs, e.g. ``"memory"``.
    name: str
    #: whether the tier evicts by itself; else a server does, by its own rules
    keeps_capacity: bool = True
    #: whether a call returns without waiting for a device, a network or another process
    in_memory: bool = False

    @property
    def paused(self) -> tuple[str, ...]:
        """What the tier is not asked for now because it failed lately, e.g. ``("writing",)``."""
        return ()

    @abstractmethod
    def put(self, name: ObjectName, data: Buffer) -> None:
        """Keep a copy of ``data``; when this returns it is as durable as the tier can make it.

        Args:
            data: C-contiguous, of any item type, at least one byte; not changed by others before
                this returns.

        Raises:
            TierFullError: the object is larger than the tier, or nothing more can be evicted.
            TierError: the bytes could not be written. No trace of them is findable.
            InvalidInputError: ``data`` is not contiguous, or empty.
        """

    def check_size(self, size: int) -> None:
        """Raise TierFullError if no object of so many bytes is ever taken.

        Part of :meth:`put`, by itself: it asks no device and no server, and says nothing of them.
        """
        return None

    @abstractmethod
    def get(self, name: ObjectName) -> memoryview | None:
        """The whole object as read-only uint8, or None. Counts as a use for eviction.

        The view stays valid and unchanged when the object is replaced, evicted or deleted.
        """

    def get_many(self, names: Sequence[ObjectName]) -> list[memoryview | None]:
        """What :meth:`get` returns for each name; one round trip where there is one to make."""
        return [self.get(name) for name in names]

    @abstractmethod
    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        """Size in bytes of each object, None where it is absent; one round trip for all."""

    @abstractmethod
    def delete(self, names: Sequence[ObjectName]) -> None:
        """Remove objects; absent ones are no error."""

    @abstractmethod
    def names(self) -> Iterator[ObjectName]:
        """All objects, in no particular order."""

    @abstractmethod
    def stats(self) -> TierStats:
        """What is held now."""

    @abstractmethod
    def close(self) -> None:
        """Release what the tier holds in this process. Later calls raise TierError."""

    def _count_eviction(self, name: ObjectName) -> None:
        metrics.OBJECTS.labels(name.part.label, self.name, "evict", "ok").inc()
