"""Other nodes as the last tier of a store: read-only, and absent whenever they are not there."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

from .config import PeersConfig
from .errors import ConfigError, InvalidInputError, TierError, TransportError
from .keys import ObjectName
from .logs import warn_limited
from .tiers.base import Buffer, Tier, TierStats
from .transport.client import UcxTransport
from .transport.connection import LinkOptions
from .transport.protocol import Terms

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 30.0
#: Names whose holder is remembered between a lookup and the fetch that follows it.
_REMEMBERED = 65536


class PeerTier(Tier):
    """Looks objects up at all peers at once and fetches each from one that has it.

    A peer that is lost is a miss at once; a thread connects again, first soon, then every half
    minute. What a peer said it has and then has not, is a miss.

    Args:
        peers: not connected yet; closed with this.
        timeout_seconds: most time one :meth:`get_many` may take.
    """

    name = "peers"
    keeps_capacity = False

    def __init__(self, peers: Sequence[UcxTransport], timeout_seconds: float) -> None:
        if not peers:
            raise InvalidInputError("a tier of peers needs at least one peer")
        self._peers = tuple(peers)
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._holders: OrderedDict[ObjectName, tuple[UcxTransport, bytes | None, int]] = (
            OrderedDict()
        )
        self._requests = itertools.count()
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(len(self._peers), "lynx-peers")
        for peer in self._peers:
            threading.Thread(target=self._keep_connected, args=(peer,), daemon=True).start()

    def put(self, name: ObjectName, data: Buffer) -> None:
        raise TierError("peers are read from only; put into a tier of this node")

    def get(self, name: ObjectName) -> memoryview | None:
        return self.get_many([name])[0]

    def get_many(self, names: Sequence[ObjectName]) -> list[memoryview | None]:
        self._check_open()
        holders = self._locate(names)
        request = f"get-{next(self._requests)}"
        started: list[tuple[memoryview, UcxTransport, Future[bool]] | None] = []
        for name, holder in zip(names, holders, strict=True):
            if holder is None:
                started.append(None)
            else:
                data = memoryview(bytearray(holder[2]))
                started.append((data, holder[0], holder[0].fetch(request, name, data)))
        return [None if each is None else self._finish(request, *each) for each in started]

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        self._check_open()
        with self._lock:
            for name in names:
                self._holders.pop(name, None)
        return [None if holder is None else holder[2] for holder in self._locate(names)]

    def delete(self, names: Sequence[ObjectName]) -> None:
        """Nothing: what peers keep is theirs."""
        self._check_open()

    def names(self) -> Iterator[ObjectName]:
        self._check_open()
        return iter(())

    def stats(self) -> TierStats:
        self._check_open()
        return TierStats(0, 0, 0, 0)

    def close(self) -> None:
        self._closing.set()
        for peer in self._peers:
            peer.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def connected(self) -> int:
        """How many peers there are at the moment."""
        return sum(peer.connected for peer in self._peers)

    # -- details -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise TierError("the tier of peers is closed")

    def _locate(
        self, names: Sequence[ObjectName]
    ) -> list[tuple[UcxTransport, bytes | None, int] | None]:
        """Who holds each object, as known from a moment ago or asked of all peers now."""
        with self._lock:
            found = {name: self._holders.pop(name, None) for name in names}
        for name, holder in found.items():
            # A peer that came back as another process is another peer.
            if holder is not None and holder[0].node != holder[1]:
                found[name] = None
        missing = [name for name, holder in found.items() if holder is None]
        there = [peer for peer in self._peers if peer.connected]
        if missing and there:
            answers = self._pool.map(self._ask, there, [missing] * len(there))
            for peer, sizes in zip(there, answers, strict=True):
                node = peer.node
                for name, size in zip(missing, sizes, strict=True):
                    if size is not None and found[name] is None:
                        found[name] = (peer, node, size)
        with self._lock:
            self._holders.update((name, h) for name, h in found.items() if h is not None)
            while len(self._holders) > _REMEMBERED:
                self._holders.popitem(last=False)
        return [found[name] for name in names]

    @staticmethod
    def _ask(peer: UcxTransport, names: Sequence[ObjectName]) -> list[int | None]:
        try:
            return peer.sizes(names)
        except TransportError as e:
            warn_limited(logger, "peers-lookup", "no answer from a peer: %s", e)
            return [None] * len(names)

    def _finish(
        self, request: str, data: memoryview, peer: UcxTransport, future: Future[bool]
    ) -> memoryview | None:
        try:
            return data.toreadonly() if future.result(self._timeout) else None
        except TransportError as e:
            warn_limited(logger, "peers-fetch", "a peer did not give an object: %s", e)
        except FutureTimeout:
            peer.cancel(request)
            warn_limited(logger, "peers-fetch", "%s gave no object in %g s", peer, self._timeout)
        return None

    def _keep_connected(self, peer: UcxTransport) -> None:
        pause = _FIRST_RETRY_SECONDS
        while not self._closing.is_set():
            try:
                peer.connect()
                pause = _FIRST_RETRY_SECONDS
            except TransportError as e:
                warn_limited(logger, f"peer-{peer.host}:{peer.port}", "%s", e)
                pause = min(2 * pause, _LAST_RETRY_SECONDS)
            self._closing.wait(pause)


def peers_from_config(config: PeersConfig, codec: str) -> PeerTier | None:
    """The peers that a configuration names; None when it names none.

    Args:
        codec: fingerprint of the store's codec spec, which peers must share.

    Raises:
        ConfigError: an address or the secret cannot be used.
    """
    if config.nodes is None:
        return None
    options = link_options(config, codec)
    places = [_place(text.strip()) for text in config.nodes.split(",")]
    return PeerTier([UcxTransport(*p, options) for p in places], config.fetch_seconds)


def link_options(config: PeersConfig, codec: str) -> LinkOptions:
    """How a node with this configuration treats its peers."""
    secret = config.secret
    if config.secret_file is not None:
        try:
            with open(config.secret_file, encoding="utf-8") as f:
                secret = f.read().rstrip("\n")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"peers.secret_file cannot be read: {e}") from None
        if not secret:
            raise ConfigError("peers.secret_file is empty; write the shared secret into it")
    return LinkOptions(
        timeout_seconds=config.timeout_seconds,
        anchor_wait_seconds=config.anchor_wait_seconds,
        most_object_bytes=config.max_object_bytes,
        secret=None if secret is None else secret.encode(),
        terms=Terms(config.model or "", config.layout or "", codec),
    )


def _place(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(
            f"peers.nodes: {text!r} is not an address; write host:port, several with commas"
        )
    return host.strip("[]"), int(port)
