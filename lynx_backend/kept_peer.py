"""One peer of a store: kept connected to, and left alone for a while when it only costs time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from .errors import TierUnavailableError, TransportError
from .logs import warn_limited
from .tiers.breaker import Breaker
from .transport.client import UcxTransport
from .transport.greeting import LinkOptions
from .transport.member import Member

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 30.0


class KeptPeer:
    """A node that is kept connected to, by a thread of its own.

    Args:
        changed: called when one of the breakers opens or closes.

    Attributes:
        asking, fetching: the breakers of its lookups and its fetches: a node whose storage hangs,
            or to which only small packets get through, answers what objects it has all the same.
    """

    def __init__(
        self, member: Member, options: LinkOptions, changed: Callable[[bool], None]
    ) -> None:
        self.transport = UcxTransport(member.host, member.port, options, member.node)
        place = f"{member.host}:{member.port}"
        self.asking = Breaker(f"asking peer {place}", changed)
        self.fetching = Breaker(f"fetching from peer {place}", changed)
        self._came = float("-inf")
        self._closing = threading.Event()
        threading.Thread(target=self._keep_connected, daemon=True, name="lynx-peer").start()

    def begin(self) -> float | None:
        """When a fetch began, for :meth:`end`; None when this peer is to be left alone."""
        try:
            return self.fetching.enter()
        except TierUnavailableError:
            return None

    def end(self, start: float, came: bool, late: bool) -> None:
        """A fetch is over.

        Args:
            came: whether it brought anything.
            late: whether it cost time for nothing; not held against a peer that gave something to
                another meanwhile.
        """
        now = time.monotonic()
        if came:
            self._came = now
            self.fetching.leave(start, None)
        elif late and self._came < start:
            self.fetching.leave(start, TransportError(f"it gave nothing in {now - start:.1f} s"))
        else:
            self.fetching.release()

    def close(self) -> None:
        self._closing.set()
        try:
            self.transport.close()
        except TransportError as e:  # the others are to be closed as well
            warn_limited(logger, "peers-close", "%s was not closed in order: %s", self.transport, e)

    def _keep_connected(self) -> None:
        pause = _FIRST_RETRY_SECONDS
        while not self._closing.is_set():
            started = time.monotonic()
            try:
                self.transport.connect()
            except Exception as e:  # whatever it is: without this thread the peer is lost for good
                if not self._closing.is_set():
                    place = f"{self.transport.host}:{self.transport.port}"
                    warn_limited(logger, f"peer-{place}", "%s", e)
            else:
                while self.transport.connected and not self._closing.wait(_FIRST_RETRY_SECONDS):
                    pass
                # That connecting works says little where nothing comes and it is lost each time.
                if self._came > started or time.monotonic() - started > _LAST_RETRY_SECONDS:
                    pause = _FIRST_RETRY_SECONDS
            self._closing.wait(pause)
            pause = min(2 * pause, _LAST_RETRY_SECONDS)


def close_all(peers: Iterable[KeptPeer]) -> None:
    """All at once: one that still waits for a name server takes seconds."""
    threads = [threading.Thread(target=peer.close, name="lynx-close") for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
