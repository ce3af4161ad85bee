"""What a transport is: it brings objects from where they are into memory the caller owns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from ..errors import InvalidInputError
from ..keys import ObjectName


class ObjectSource(Protocol):
    """The far end of a transport: any tier satisfies this."""

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]: ...

    def get(self, name: ObjectName) -> memoryview | None: ...


class Transport(ABC):
    """Fetches objects with anchors of all requests strictly before residuals of any.

    Contract, checked by ``lynx_backend.testing.TransportConformance``:

    * a future resolves to True when the whole object lies in its buffer, to False when the source
      does not have it or its size is not the buffer's, and raises TransportError when the link
      failed;
    * after a future is done, failed or cancelled, its buffer is never written again;
    * :meth:`cancel` and :meth:`close` end every future they concern within a bounded time, and so
      does ``cancel()`` of a single future;
    * after :meth:`close`, the other methods raise TransportError.
    """

    @abstractmethod
    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        """Size in bytes of each object at the source, None where it is absent; one round trip."""

    @abstractmethod
    def fetch(self, request: str, name: ObjectName, out: memoryview) -> Future[bool]:
        """Start fetching ``name`` into ``out`` (writable, of the object's exact size).

        Args:
            request: id of the request that waits for it; the unit of fairness and of cancelling.
        """

    @abstractmethod
    def cancel(self, request: str) -> None:
        """Give up all unfinished fetches of one request; their futures are cancelled."""

    @abstractmethod
    def close(self) -> None:
        """Stop; unfinished futures fail with TransportError. Idempotent."""


def already_fetching(request: str, name: ObjectName) -> InvalidInputError:
    """What :meth:`Transport.fetch` raises while the same request waits for the same object."""
    return InvalidInputError(
        f"request {request!r} is already fetching {name}; wait for it, cancel it or "
        "use another request id"
    )
