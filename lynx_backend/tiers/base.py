"""What a tier is: a place that keeps named objects and may lose any of them at any time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .. import metrics
from ..errors import InvalidInputError
from ..keys import ObjectName

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class TierStats:
    """What a tier holds, counted from what is really there.

    Attributes:
        used_bytes: bytes that count against the capacity.
        capacity_bytes: the limit the tier keeps.
        objects: number of objects.
        anchor_only: chunks whose anchor is present and whose residual is not.
    """

    used_bytes: int
    capacity_bytes: int
    objects: int
    anchor_only: int


def flat(data: Buffer) -> memoryview:
    """``data`` as a 1-D uint8 view; raises InvalidInputError when it is not contiguous."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise InvalidInputError(
            f"an object's bytes must be C-contiguous, got shape {view.shape} with strides "
            f"{view.strides}; copy the buffer first"
        )
    return view.cast("B") if view.nbytes else memoryview(b"")


class Tier(ABC):
    """Keeps bytes by :class:`ObjectName`. Knows names and bytes, never what they mean.

    Contract, checked by ``lynx_backend.testing.TierConformance``:

    * an object is findable only when it is whole, and stays byte-identical until it is gone;
    * :meth:`put` of an existing name replaces it, and readers see the old bytes, the new bytes or,
      where there is no room for both, a miss;
    * under pressure the least recently used residual is evicted, and so a chunk's residual before
      its anchor; but while anchors without their residual take more than ``ANCHOR_ONLY_SHARE`` of
      what is held, and when there is no residual, it is the least recently used of those anchors;
    * putting one part of a chunk never evicts its other part;
    * every eviction is counted in ``lynx_objects_total``;
    * an object that could not fit even so is refused before anything is evicted for it;
    * the capacity holds at every moment, across restarts, and between processes that share it;
    * methods may be called from any thread; failures raise :class:`~lynx_backend.errors.TierError`
      and leave the tier usable;
    * after :meth:`close`, which may be repeated, every other method raises TierError.
    """

    #: short name in metrics and logs, e.g. ``"memory"``.
    name: str

    @abstractmethod
    def put(self, name: ObjectName, data: Buffer) -> None:
        """Keep a copy of ``data``; when this returns it is as durable as the tier can make it.

        Args:
            data: C-contiguous, of any item type; not changed by others before this returns.

        Raises:
            TierFullError: the object is larger than the tier, or nothing more can be evicted.
            TierError: the bytes could not be written. No trace of them is findable.
            InvalidInputError: ``data`` is not contiguous.
        """

    @abstractmethod
    def get(self, name: ObjectName) -> memoryview | None:
        """The whole object as read-only uint8, or None. Counts as a use for eviction.

        The view stays valid and unchanged when the object is replaced, evicted or deleted.
        """

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
