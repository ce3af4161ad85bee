"""Who is there: the nodes that serve objects, each under a lease, in Redis or Valkey.

All nodes of one codec are members of one sorted set; a member's score is when its lease ends, by
the clock of the server that keeps the set. A node that dies is out of it when its lease has ended,
and whoever renews a lease removes what is long dead. One key, so any shard of a cluster may have
it; and no time to live, so that a server that evicts by it leaves the leases alone.

What a node holds is not written down: it is asked. See docs/transport.md.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from . import metrics
from .config import LynxConfig, RedisConfig
from .errors import ConfigError, LynxError, TransportError
from .logs import warn_limited
from .redis_client import FAILURES, Client, RedisCluster, connect, explain
from .transport.member import Member

logger = logging.getLogger(__name__)

#: A lease is renewed, and the directory looked at, so many times within its length.
TIMES_A_LEASE = 3
#: A set that somebody filled with nonsense makes a node connect to no more than this.
MOST_MEMBERS = 256
#: Members whose lease ended so many seconds ago are removed.
_FORGOTTEN_SECONDS = 60.0


class Directory:
    """The set of live nodes. Safe to use from several threads.

    Args:
        redis: the server that keeps it, and the prefix of its key.
        codec: fingerprint of the codec spec; nodes of another one are of no use to each other, and
            are in a set of their own.

    Raises:
        ConfigError: ``redis.url`` is not set or cannot be used.
        UnsupportedError: redis-py is not installed (raised by importing this module).
    """

    def __init__(self, redis: RedisConfig, codec: str) -> None:
        if redis.url is None:
            raise ConfigError(
                "directory.enabled needs redis.url, the server that keeps the directory; "
                "redis.tier: false keeps objects out of it"
            )
        self._config = redis
        self._key = f"{redis.key_prefix}:nodes:{codec}"
        self._lock = threading.Lock()
        self._client: Client | None = None
        with suppress(*FAILURES):  # it may come later
            self._client = connect(redis)

    def renew(self, member: Member, seconds: float) -> None:
        """Give a node a lease that ends in so many seconds.

        Raises:
            TransportError: the server cannot be reached or refuses.
        """

        def call(client: Client) -> None:
            now = self._now(client)
            pipeline = client.pipeline(transaction=False)
            pipeline.zadd(self._key, {_packed(member): now + seconds})
            pipeline.zremrangebyscore(self._key, "-inf", now - _FORGOTTEN_SECONDS)
            pipeline.execute()

        self._call("renew this node's lease", call)

    def leave(self, member: Member) -> None:
        """End a node's lease now.

        Raises:
            TransportError: as for :meth:`renew`.
        """
        self._call("end this node's lease", lambda client: client.zrem(self._key, _packed(member)))

    def members(self) -> list[Member]:
        """The nodes whose lease has not ended, in no order; at most :data:`MOST_MEMBERS`.

        Raises:
            TransportError: as for :meth:`renew`.
        """

        def call(client: Client) -> list[bytes]:
            now = self._now(client)
            found: Any = client.zrangebyscore(self._key, now, "+inf", start=0, num=MOST_MEMBERS)
            return list(found)

        return [m for m in map(_unpacked, self._call("list the nodes", call)) if m is not None]

    def close(self) -> None:
        """Give the connections back; the next call opens others."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _call(self, action: str, call: Callable[[Client], Any]) -> Any:
        try:
            with self._lock:
                if self._client is None:
                    self._client = connect(self._config)
                client = self._client
            return call(client)
        except FAILURES as e:
            raise TransportError(f"cannot {action}: {explain(e, self._config)}") from e

    def _now(self, client: Client) -> float:
        """Seconds by the clock of the server that keeps the set: all leases are of one clock."""
        if isinstance(client, RedisCluster):
            node = client.get_node_from_key(self._key)  # type: ignore[no-untyped-call]
            seconds, micros = client.time(target_nodes=node)
        else:
            seconds, micros = client.time()
        return float(seconds) + float(micros) / 1e6


def _packed(member: Member) -> str:
    return f"{member.node} {member.host} {member.port}"


def _unpacked(raw: bytes) -> Member | None:
    """A member as somebody wrote it; None for what is none: anybody may write there."""
    pieces = raw.decode(errors="replace").split(" ")
    if len(pieces) != 3 or not pieces[2].isdecimal() or not 0 < int(pieces[2]) < 65536:
        return None
    return Member(pieces[1], int(pieces[2]), pieces[0])


class _Repeated:
    """Something done at once and then again and again, by a thread of its own, until closed."""

    def __init__(self, name: str, seconds: float) -> None:
        self._seconds = seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait for what is being done."""
        self._closing.set()
        self._thread.join()

    def once(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.once()
            # Whatever it is, a password file that is away for a moment among it: without this
            # thread the node, or all its peers, would be gone for good.
            except Exception as e:
                metrics.ERRORS.labels("DirectoryError").inc()
                warn_limited(logger, "directory", "%s: %s", type(e).__name__, e)
            self._closing.wait(self._seconds)


class Registration(_Repeated):
    """Keeps a node in the directory while this lives; without the server it tries again."""

    def __init__(self, directory: Directory, member: Member, lease_seconds: float) -> None:
        super().__init__("lynx-lease", lease_seconds / TIMES_A_LEASE)
        self._directory, self._member, self._lease = directory, member, lease_seconds
        self.start()

    def once(self) -> None:
        self._directory.renew(self._member, self._lease)

    def close(self) -> None:
        """Leave the directory, if the server can be reached."""
        super().close()
        try:
            self._directory.leave(self._member)
        except LynxError as e:  # the lease ends by itself
            warn_limited(logger, "directory", "%s", e)
        self._directory.close()


class Watch(_Repeated):
    """Tells who is there whenever it looks; while the server is away, nothing: the last stands."""

    def __init__(
        self,
        directory: Directory,
        lease_seconds: float,
        update: Callable[[Sequence[Member]], None],
    ) -> None:
        super().__init__("lynx-directory", lease_seconds / TIMES_A_LEASE)
        self._directory, self._update = directory, update
        self.start()

    def once(self) -> None:
        members = self._directory.members()
        metrics.DIRECTORY_NODES.set(len(members))
        self._update(members)

    def close(self) -> None:
        super().close()
        self._directory.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def registered(
    config: LynxConfig, codec: str, listening: tuple[str, int], node: bytes
) -> Registration:
    """Registers a server as configured.

    Args:
        listening: where it listens; what is said to others without ``serve.advertise``.

    Raises:
        ConfigError: others could not reach the node at that address; or as ``Directory``.
    """
    host, port = listening
    if config.serve.advertise is not None:
        place = Member.parse(config.serve.advertise, "serve.advertise")
        host, port = place.host, place.port
    elif host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"serve.host is {host}, which is no address that other nodes could use; set "
            "serve.advertise to host:port as they reach this node"
        )
    elif _is_loopback(host):
        logger.warning(
            "the directory names this node as %s, where only processes of this machine reach it; "
            "for others set serve.host, or serve.advertise to host:port as they reach this node",
            Member(host, port).address,
        )
    member = Member(host, port, node.hex())
    return Registration(Directory(config.redis, codec), member, config.directory.lease_seconds)
