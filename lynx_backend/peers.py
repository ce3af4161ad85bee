"""Other nodes as the last tier of a store: read-only, and absent whenever they are not there."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import TYPE_CHECKING

from . import metrics
from .config import LynxConfig, PeersConfig, read_secret
from .errors import ConfigError, TierError, TierUnavailableError, TransportError
from .kept_peer import KeptPeer, close_all
from .keys import ObjectName
from .logs import warn_limited
from .tiers.base import Buffer, Tier, TierStats
from .tiers.breaker import PATIENCE_SECONDS
from .transport.greeting import LinkOptions
from .transport.member import Member
from .transport.protocol import Terms

if TYPE_CHECKING:
    from .directory import Directory, Watch

logger = logging.getLogger(__name__)

#: Names whose holder is remembered between a lookup and the fetch that follows it.
_REMEMBERED = 65536
#: The peer, its identity when it was asked, and the object's size in bytes.
_Holder = tuple[KeptPeer, bytes | None, int]


class PeerTier(Tier):
    """Looks objects up at all peers at once and fetches each from one that has it.

    Who the peers are is told by :meth:`update`. A peer that is lost is a miss at once; a thread
    connects again, first soon, then every half minute. What a peer said it has and then has not,
    is a miss. A peer that answers too late, or does not give what it said it has, is left alone for
    a while, as a tier that fails is. A process made by ``os.fork()`` has none of the threads: there
    everything is a miss.

    Args:
        options: how to treat the peers.
        timeout_seconds: most time one :meth:`get_many` may take.
    """

    name = "peers"
    keeps_capacity = False

    def __init__(self, options: LinkOptions, timeout_seconds: float) -> None:
        self._options, self._timeout = options, timeout_seconds
        self._lock = threading.Lock()
        self._peers: dict[Member, KeptPeer] = {}
        self._holders: OrderedDict[ObjectName, _Holder] = OrderedDict()
        self._requests = itertools.count()
        self._closed = False
        self._process = os.getpid()
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
                member: before.get(member) or KeptPeer(member, self._options, self._show)
                for member in dict.fromkeys(members)
            }
            gone = [peer for member, peer in before.items() if member not in self._peers]
        close_all(gone)
        self._show()

    def put(self, name: ObjectName, data: Buffer) -> None:
        raise TierError("peers are read from only; put into a tier of this node")

    def get(self, name: ObjectName) -> memoryview | None:
        return self.get_many([name])[0]

    def get_many(self, names: Sequence[ObjectName]) -> list[memoryview | None]:
        if self._is_forked():
            return [None] * len(names)
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
        if self._is_forked():
            return [None] * len(names)
        holders = self._locate(dict.fromkeys(names))
        return [None if (holder := holders[name]) is None else holder[2] for name in names]

    # -- one object at a time, without waiting: for transports -------------------------------------

    def fetch(self, request: str, name: ObjectName, out: memoryview) -> Future[bool] | None:
        """Start fetching an object that :meth:`sizes` has found, as ``Transport.fetch``.

        Returns:
            None when no peer is known to have it any more.
        """
        if self._is_forked():
            return None
        with self._lock:
            holder = self._holders.get(name)
        if holder is None or not _is_there(holder) or (start := holder[0].begin()) is None:
            return None
        peer = holder[0]
        try:
            future = peer.transport.fetch(request, name, out)
        except BaseException:
            peer.fetching.release()
            raise
        future.add_done_callback(partial(self._ended, peer, start))
        return future

    def cancel(self, request: str) -> None:
        """Give up what :meth:`fetch` has started for a request, as ``Transport.cancel``."""
        if self._is_forked():
            return
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
        if self._is_forked():
            self._closed = True  # all there is to close is the parent's
            return
        with self._lock:
            self._closed = True
            peers, self._peers = self._peers, {}
        if self._watch is not None:
            self._watch.close()
        close_all(peers.values())
        self._show()

    @property
    def connected(self) -> list[Member]:
        """The peers that there are at the moment."""
        with self._lock:
            return [member for member, peer in self._peers.items() if peer.transport.connected]

    # -- details -----------------------------------------------------------------------------------

    def _show(self, _: bool = False) -> None:
        with self._lock:
            peers = list(self._peers.values())
        paused = any(peer.asking.is_open or peer.fetching.is_open for peer in peers)
        metrics.BREAKER_OPEN.labels(self.name).set(float(paused))

    def _is_forked(self) -> bool:
        if os.getpid() == self._process:
            return False
        warn_limited(
            logger,
            "peers-fork",
            "peers were opened before os.fork() and cannot be used in process %d, where they have "
            "nothing; open a store after forking",
            os.getpid(),
        )
        return True

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
            peers = [peer for peer in self._peers.values() if peer.transport.connected]
        metrics.PEERS_CONNECTED.set(len(peers))
        peers = [peer for peer in peers if not peer.fetching.is_paused]
        peers.sort(key=lambda peer: peer.fetching.is_open)  # rather from one that works
        found = {n: h if h is not None and _is_there(h) else None for n, h in known.items()}
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
        self, peers: Sequence[KeptPeer], names: Sequence[ObjectName], until: float
    ) -> Iterator[tuple[KeptPeer, bytes | None, list[int | None]]]:
        """The answers of those peers that give one in time, all asked at once."""
        asked = []
        for peer in peers:
            try:
                start = peer.asking.enter()
            except TierUnavailableError:
                continue
            try:
                asked.append((peer, start, peer.transport.node, peer.transport.look_up(names)))
            except TransportError:  # closed a moment ago
                peer.asking.release()
        until = min(until, time.monotonic() + self._options.timeout_seconds)
        for peer, start, node, answer in asked:
            sizes = self._answer(peer, start, answer, until - time.monotonic())
            if sizes is not None:
                yield peer, node, sizes

    @staticmethod
    def _answer(
        peer: KeptPeer, start: float, answer: Future[list[int | None]], seconds: float
    ) -> list[int | None] | None:
        failure: BaseException | None = None
        try:
            return answer.result(max(0.0, seconds))
        except (TransportError, CancelledError) as e:
            failure = e
            warn_limited(logger, "peers-lookup", "no answer from %s: %s", peer.transport, e)
        except FutureTimeout:
            answer.cancel()
            failure = TransportError("it did not answer in time")
            warn_limited(logger, "peers-lookup", "no answer from %s in time", peer.transport)
        finally:
            peer.asking.leave(start, failure)
        return None

    def _fetch_all(
        self, holders: Mapping[ObjectName, _Holder | None], until: float
    ) -> dict[ObjectName, memoryview | None]:
        """What the holders give in time; who does not give an object is not remembered for it."""
        request = f"get-{next(self._requests)}"
        asked = {holder[0] for holder in holders.values() if holder is not None}
        tries = {peer: start for peer in asked if (start := peer.begin()) is not None}
        since = time.monotonic()
        came: set[KeptPeer] = set()
        late: set[KeptPeer] = set()
        try:
            started = {
                name: self._start(request, name, holder)
                for name, holder in holders.items()
                if holder is not None and holder[0] in tries
            }
            got: dict[ObjectName, memoryview | None] = dict.fromkeys(holders)
            for name, each in started.items():
                if each is not None:
                    got[name] = self._finish(request, since, until, late, *each)
                    if got[name] is not None:
                        came.add(each[1])
        finally:
            for peer, start in tries.items():
                peer.end(start, peer in came, peer in late)
        with self._lock:
            for name in started:
                if got[name] is None and self._holders.get(name) is holders[name]:
                    self._holders.pop(name, None)
        return got

    def _start(
        self, request: str, name: ObjectName, holder: _Holder
    ) -> tuple[memoryview, KeptPeer, Future[bool]] | None:
        peer, _, size = holder
        data = memoryview(bytearray(size))
        try:
            return data, peer, peer.transport.fetch(request, name, data)
        except TransportError as e:  # closed since it was asked
            warn_limited(logger, "peers-fetch", "a peer did not give an object: %s", e)
            return None

    def _finish(
        self,
        request: str,
        since: float,
        until: float,
        late: set[KeptPeer],
        data: memoryview,
        peer: KeptPeer,
        future: Future[bool],
    ) -> memoryview | None:
        try:
            there = future.result(max(0.0, until - time.monotonic()))
            return data.toreadonly() if there else None
        except TransportError as e:
            if time.monotonic() - since >= PATIENCE_SECONDS:  # what fails at once costs nothing
                late.add(peer)
            warn_limited(logger, "peers-fetch", "a peer did not give an object: %s", e)
        except FutureTimeout:
            late.add(peer)
            peer.transport.cancel(request)  # all that it has not given: the time is for all of it
            who = peer.transport
            warn_limited(logger, "peers-fetch", "%s gave no object in %g s", who, self._timeout)
        except CancelledError:  # with the one before it, or the tier was closed
            pass
        return None

    def _ended(self, peer: KeptPeer, start: float, future: Future[bool]) -> None:
        """What :meth:`fetch` has started is over."""
        seconds = time.monotonic() - start
        if future.cancelled():
            peer.end(start, False, seconds >= self._timeout)
        elif future.exception() is not None:
            peer.end(start, False, seconds >= PATIENCE_SECONDS)
        else:
            peer.end(start, future.result(), False)


def _is_there(holder: _Holder) -> bool:
    """Whether it may be fetched from. A peer that came back as another process is another peer."""
    peer, node, _ = holder
    return peer.transport.node == node and not peer.fetching.is_paused


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
