"""How a store's objects come to a request: from this node's tiers, and from peers over their links.

What peers have is fetched by their own transports, many objects at a time, so that anchors of all
requests cross a link before residuals of any, and a peer that hangs holds up nobody else.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from .errors import TierError, TransportError
from .keys import ObjectName
from .store import ChunkStore, StoredObjects
from .transport import LocalTransport, Transport


class StoreTransport(Transport):
    """Fetches what a store has, here or at its peers.

    As for any store, a peer that is lost is a miss. What a peer gave is also kept here, if the
    store promotes.

    Args:
        store: not closed by this, nor are the links to its peers: what is still under way on them
            is cancelled by :meth:`close`.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._peers = store.peers
        self._here = LocalTransport(StoredObjects(store, here=True))
        self._lock = threading.Lock()
        self._closed = False
        self._far: set[Future[bool]] = set()

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        sizes = dict(zip(names, self._here.sizes(names), strict=True))
        missing = [name for name, size in sizes.items() if size is None]
        if self._peers is not None:
            # A peer that was once asked for what is here by now must not be asked again.
            self._peers.forget([name for name, size in sizes.items() if size is not None])
            try:
                sizes.update(zip(missing, self._peers.sizes(missing), strict=True))
            except TierError as e:
                raise TransportError(f"peers could not look up {len(missing)} objects: {e}") from e
        return [sizes[name] for name in names]

    def fetch(self, request: str, name: ObjectName, out: memoryview) -> Future[bool]:
        future = None
        with self._lock:
            if self._peers is not None and not self._closed:
                future = self._peers.fetch(request, name, out)
            if future is not None:
                self._far.add(future)
        if future is None:
            return self._here.fetch(request, name, out)
        future.add_done_callback(partial(self._ended, name, out))
        return future

    def cancel(self, request: str) -> None:
        self._here.cancel(request)
        if self._peers is not None:
            self._peers.cancel(request)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            far = list(self._far)
        for future in far:
            future.cancel()
        self._here.close()

    def _ended(self, name: ObjectName, out: memoryview, future: Future[bool]) -> None:
        with self._lock:
            self._far.discard(future)
        if not future.cancelled() and future.exception() is None and future.result():
            self._store.promote(name, out)
