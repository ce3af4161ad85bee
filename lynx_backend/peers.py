"""Other nodes as the last tier of a store: read-only, and absent whenever they are not there."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import TYPE_CHECKING

from . import metrics
from .config import LynxConfig, PeersConfig, read_secret
from .errors import ConfigError, TierError, TransportError
from .keys import ObjectName
from .logs import warn_limited
from .tiers.base import Buffer, Tier, TierStats
from .transport.client import UcxTransport
from .transport.greeting import LinkOptions
from .transport.member import Member
from .transport.protocol import Terms

if TYPE_CHECKING:
    from .directory import Directory, Watch

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 30.0
#: Names whose holder is remembered between a lookup and the fetch that follows it.
_REMEMBERED = 65536
#: The peer, its identity when it was asked, and the object's size in bytes.
_Holder = tuple[UcxTransport, bytes | None, int]


class PeerTier(Tier):
    """Looks objects up at all peers at once and fetches each from one that has it.

    Who the peers are is told by :meth:`update`. A peer that is lost is a miss at once; a thread
    connects again, first soon, then every half minute. What a peer said it has and then has not,
    is a miss.

    Args:
        options: how to treat the peers.
        timeout_seconds: most time one :meth:`get_many` may take.
    """

    name = "peers"
    keeps_capacity = False

    def __init__(self, options: LinkOptions, timeout_seconds: float) -> None:
        self._options, self._timeout = options, timeout_seconds
        self._lock = threading.Lock()
        self._peers: dict[Member, _Peer] = {}
        self._holders: OrderedDict[ObjectName, _Holder] = OrderedDict()
        self._requests = itertools.count()
        self._closed = False
        self._watch: Watch | None = None

    def follow(self, directory: Directory, lease_seconds: float) -> None:
        """From now on, peers are the nodes in a directory; closed with this."""
        from .directory import Watch

        self._watch = Watch(directory, lease_seconds, self.update)

    def update(self, members: Iterable[Member]) -> None:
        """Read from these nodes and no others. One that stays is not disturbed."""
        with self._lock:
            if self._closed:
                return
            before = self._peers
            self._peers = {
                member: before.get(member) or _Peer(member, self._options)
                for member in dict.fromkeys(members)
            }
            gone = [peer for member, peer in before.items() if member not in self._peers]
        for peer in gone:
            peer.close()

    def put(self, name: ObjectName, data: Buffer) -> None:
        raise TierError("peers are read from only; put into a tier of this node")

    def get(self, name: ObjectName) -> memoryview | None:
        return self.get_many([name])[0]

    def get_many(self, names: Sequence[ObjectName]) -> list[memoryview | None]:
        with self._lock:
            known = {name: self._holders.get(name) for name in names}
        holders = self._locate(known)
        until = time.monotonic() + self._timeout
        got = self._fetch_all(holders, until)
        # Who was remembered may have it no more, or at another size, while another peer has it.
        stale = {n: None for n, holder in known.items() if holder is not None and got[n] is None}
        if stale and time.monotonic() < until:
            got |= self._fetch_all(self._locate(stale, until), until)
        return [got[name] for name in names]

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        holders = self._locate(dict.fromkeys(names))
        return [None if (holder := holders[name]) is None else holder[2] for name in names]

    # -- one object at a time, without waiting: for transports -------------------------------------

    def fetch(self, request: str, name: ObjectName, out: memoryview) -> Future[bool] | None:
        """Start fetching an object that :meth:`sizes` has found, as ``Transport.fetch``.

        Returns:
            None when no peer is known to have it any more.
        """
        with self._lock:
            holder = self._holders.get(name)
        if holder is None or holder[0].node != holder[1]:
            return None
        return holder[0].fetch(request, name, out)

    def cancel(self, request: str) -> None:
        """Give up what :meth:`fetch` has started for a request, as ``Transport.cancel``."""
        with self._lock:
            peers = [peer.transport for peer in self._peers.values()]
        for peer in peers:
            peer.cancel(request)

    def forget(self, names: Sequence[ObjectName]) -> None:
        """No peer need be asked for these."""
        with self._lock:
            for name in names:
                self._holders.pop(name, None)

    # -- the rest of a tier ------------------------------------------------------------------------

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
        with self._lock:
            self._closed = True
            peers, self._peers = self._peers, {}
        if self._watch is not None:
            self._watch.close()
        for peer in peers.values():
            peer.close()

    @property
    def connected(self) -> list[Member]:
        """The peers that there are at the moment."""
        with self._lock:
            return [member for member, peer in self._peers.items() if peer.transport.connected]

    # -- details -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("the tier of peers is closed")

    def _locate(
        self, known: Mapping[ObjectName, _Holder | None], until: float = math.inf
    ) -> dict[ObjectName, _Holder | None]:
        """Who holds each object: as ``known``, or asked of all peers now where that is nobody.

        What is remembered stays so until there is an answer: others may be fetching by it.
        """
        self._check_open()
        with self._lock:
            peers = [peer.transport for peer in self._peers.values() if peer.transport.connected]
        metrics.PEERS_CONNECTED.set(len(peers))
        # A peer that came back as another process is another peer.
        found = {n: h if h is not None and h[0].node == h[1] else None for n, h in known.items()}
        missing = [name for name, holder in found.items() if holder is None]
        answered = set()
        for peer, node, sizes in self._ask(peers, missing, until) if missing else ():
            answered.add(peer)
            for name, size in zip(missing, sizes, strict=True):
                if size is None or found[name] is not None:
                    continue
                if size <= self._options.most_object_bytes:
                    found[name] = (peer, node, size)
        with self._lock:
            for name in missing:
                holder = found[name]
                if holder is not None:
                    self._holders[name] = holder
                elif name in self._holders and self._holders[name][0] in answered:
                    del self._holders[name]
            for name in found:
                if name in self._holders:
                    self._holders.move_to_end(name)
            while len(self._holders) > _REMEMBERED:
                self._holders.popitem(last=False)
        return found

    def _ask(
        self, peers: Sequence[UcxTransport], names: Sequence[ObjectName], until: float
    ) -> Iterator[tuple[UcxTransport, bytes | None, list[int | None]]]:
        """The answers of those peers that give one in time, all asked at once."""
        asked = []
        for peer in peers:
            with suppress(TransportError):  # closed a moment ago
                asked.append((peer, peer.node, peer.look_up(names)))
        until = min(until, time.monotonic() + self._options.timeout_seconds)
        for peer, node, answer in asked:
            sizes = self._answer(peer, answer, until - time.monotonic())
            if sizes is not None:
                yield peer, node, sizes

    @staticmethod
    def _answer(
        peer: UcxTransport, answer: Future[list[int | None]], seconds: float
    ) -> list[int | None] | None:
        try:
            return answer.result(max(0.0, seconds))
        except (TransportError, CancelledError) as e:
            warn_limited(logger, "peers-lookup", "no answer from %s: %s", peer, e)
        except FutureTimeout:
            answer.cancel()
            warn_limited(logger, "peers-lookup", "no answer from %s in time", peer)
        return None

    def _fetch_all(
        self, holders: Mapping[ObjectName, _Holder | None], until: float
    ) -> dict[ObjectName, memoryview | None]:
        """What the holders give in time; who does not give an object is not remembered for it."""
        request = f"get-{next(self._requests)}"
        started = {
            name: None if holder is None else self._start(request, name, holder)
            for name, holder in holders.items()
        }
        got = {
            name: None if each is None else self._finish(request, until, *each)
            for name, each in started.items()
        }
        with self._lock:
            for name, holder in holders.items():
                if got[name] is None and self._holders.get(name) is holder:
                    self._holders.pop(name, None)
        return got

    def _start(
        self, request: str, name: ObjectName, holder: _Holder
    ) -> tuple[memoryview, UcxTransport, Future[bool]] | None:
        peer, _, size = holder
        data = memoryview(bytearray(size))
        try:
            return data, peer, peer.fetch(request, name, data)
        except TransportError as e:  # closed since it was asked
            warn_limited(logger, "peers-fetch", "a peer did not give an object: %s", e)
            return None

    def _finish(
        self,
        request: str,
        until: float,
        data: memoryview,
        peer: UcxTransport,
        future: Future[bool],
    ) -> memoryview | None:
        try:
            there = future.result(max(0.0, until - time.monotonic()))
            return data.toreadonly() if there else None
        except TransportError as e:
            warn_limited(logger, "peers-fetch", "a peer did not give an object: %s", e)
        except FutureTimeout:
            peer.cancel(request)  # all that it has not given: the time is that of all together
            warn_limited(logger, "peers-fetch", "%s gave no object in %g s", peer, self._timeout)
        except CancelledError:  # with the one before it, or the tier was closed
            pass
        return None


class _Peer:
    """A node that is kept connected to, by a thread of its own."""

    def __init__(self, member: Member, options: LinkOptions) -> None:
        self.transport = UcxTransport(member.host, member.port, options, member.node)
        self._closing = threading.Event()
        threading.Thread(target=self._keep_connected, daemon=True, name="lynx-peer").start()

    def close(self) -> None:
        self._closing.set()
        try:
            self.transport.close()
        except TransportError as e:  # the others are to be closed as well
            warn_limited(logger, "peers-close", "%s was not closed in order: %s", self.transport, e)

    def _keep_connected(self) -> None:
        pause = _FIRST_RETRY_SECONDS
        while not self._closing.is_set():
            try:
                self.transport.connect()
                pause = _FIRST_RETRY_SECONDS
            except Exception as e:  # whatever it is: without this thread the peer is lost for good
                if not self._closing.is_set():
                    place = f"{self.transport.host}:{self.transport.port}"
                    warn_limited(logger, f"peer-{place}", "%s", e)
                pause = min(2 * pause, _LAST_RETRY_SECONDS)
            self._closing.wait(pause)


def peers_from_config(config: LynxConfig, codec: str) -> PeerTier | None:
    """The peers that a configuration names, or finds in the directory; None without either.

    Args:
        codec: fingerprint of the store's codec spec, which peers must share.

    Raises:
        ConfigError: an address, the secret or the directory cannot be used.
        UnsupportedError: the directory needs a package that is not installed.
    """
    nodes = config.peers.nodes
    if config.directory.enabled:
        from .directory import Directory  # needs a package that not everybody has

        if nodes is not None:
            raise ConfigError(
                "both peers.nodes and directory.enabled are set; peers come from one of them"
            )
        directory = Directory(config.redis, codec)
        tier = PeerTier(link_options(config.peers, codec), config.peers.fetch_seconds)
        tier.follow(directory, config.directory.lease_seconds)
        return tier
    if nodes is None:
        return None
    members = named(nodes)
    tier = PeerTier(link_options(config.peers, codec), config.peers.fetch_seconds)
    tier.update(members)
    return tier


def named(nodes: str) -> list[Member]:
    """The nodes of ``peers.nodes``; ConfigError when one is no address."""
    return [Member.parse(text, "peers.nodes") for text in nodes.split(",")]


def link_options(config: PeersConfig, codec: str) -> LinkOptions:
    """How a node with this configuration treats its peers.

    Raises:
        ConfigError: its secret cannot be used.
    """
    secret = read_secret("peers.secret", config.secret, config.secret_file)
    return LinkOptions(
        timeout_seconds=config.timeout_seconds,
        anchor_wait_seconds=config.anchor_wait_seconds,
        most_object_bytes=config.max_object_bytes,
        secret=None if secret is None else secret.encode(),
        terms=Terms(config.model or "", config.layout or "", codec),
    )
