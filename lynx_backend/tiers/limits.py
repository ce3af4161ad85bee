"""How many bytes a tier may hold, and how many have to go before it takes one object more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import ConfigError
from ..keys import ObjectName
from .catalog import Catalog


@dataclass(frozen=True)
class Limits:
    """Of one tier.

    Attributes:
        max_bytes: most that all objects take.
        quota_bytes: most that the objects of one identity take, which is one model, rank and salt;
            None for no such limit.
        low_watermark: when there is no room, so much is evicted that this share of the limit is
            used then, so that the next puts find room. 1 evicts no more than is needed.

    Raises:
        ConfigError: a number is out of range.
    """

    max_bytes: int
    quota_bytes: int | None = None
    low_watermark: float = 1.0

    def __post_init__(self) -> None:
        quota = self.max_bytes if self.quota_bytes is None else self.quota_bytes
        if not 1 <= quota <= self.max_bytes or not 0 < self.low_watermark <= 1:
            raise ConfigError(
                "a tier needs max_bytes >= 1, quota_bytes from 1 to max_bytes, and low_watermark "
                f"above 0 and at most 1, got {self}"
            )

    def catalog(self) -> Catalog:
        """An empty one that counts what these limits are about."""
        return Catalog(by_identity=self.quota_bytes is not None)

    def fits(
        self, catalog: Catalog, writing: ObjectName, size: int, others: int = 0, short: int = 0
    ) -> bool:
        """Whether evicting could make room for an object of so many bytes.

        Args:
            others: bytes that count against ``max_bytes`` and are not in the catalog.
            short: bytes that have to go in any case.
        """
        return all(
            max(catalog.used_by(whose) + more + size - limit, missing)
            <= catalog.evictable_bytes(writing, whose)
            for whose, limit, more, missing in self._each(writing, others, short)
        )

    def to_evict(
        self, catalog: Catalog, writing: ObjectName, size: int, others: int = 0, short: int = 0
    ) -> Iterator[tuple[bytes | None, int]]:
        """Whose objects have to go (None: anybody's), and how many bytes of them, before it fits.

        Evict before asking for the next: what one gives up counts for all. Arguments as for
        :meth:`fits`, which is to be asked first.
        """
        for whose, limit, more, missing in self._each(writing, others, short):
            used = catalog.used_by(whose) + more
            need = max(used + size - limit, missing)
            if need > 0:
                low = used + size - int(self.low_watermark * limit)
                yield whose, max(need, min(low, catalog.evictable_bytes(writing, whose)))

    def _each(
        self, writing: ObjectName, others: int, short: int
    ) -> Iterator[tuple[bytes | None, int, int, int]]:
        if self.quota_bytes is not None:
            yield writing.key.identity, self.quota_bytes, 0, 0
        yield None, self.max_bytes, others, short
