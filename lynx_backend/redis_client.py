"""Connections to Redis or Valkey: one server, Sentinel or a cluster; TLS, ACL users, retries.

URLs (``valkey`` may stand for ``redis`` in every scheme, and the double s asks for TLS):

* ``redis://host:6379/0``, ``rediss://host:6379/0``
* ``unix:///run/redis.sock``
* ``redis+sentinel://host1:26379,host2:26379/service/0``, ``rediss+sentinel://…``
* ``redis+cluster://host1:6379,host2:6379``, ``rediss+cluster://…``

Each may have ``user:password@`` before the hosts, percent-encoded.

This is the one module that imports redis-py; without it, importing this raises UnsupportedError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .config import RedisConfig, read_secret, redacted
from .errors import ConfigError, UnsupportedError

try:
    import redis
    from redis._parsers import Encoder
    from redis.backoff import ExponentialWithJitterBackoff
    from redis.cluster import ClusterNode, RedisCluster
    from redis.connection import (
        Connection,
        ConnectionPool,
        PythonRespSerializer,
        SSLConnection,
        UnixDomainSocketConnection,
    )
    from redis.exceptions import (
        AuthenticationError,
        BusyLoadingError,
        ConnectionError,
        MaxConnectionsError,
        NoPermissionError,
        OutOfMemoryError,
        ReadOnlyError,
        RedisClusterException,
        RedisError,
        ResponseError,
        TimeoutError,
    )
    from redis.retry import Retry
    from redis.sentinel import MasterNotFoundError, Sentinel
except ImportError as e:
    raise UnsupportedError(
        "Redis and Valkey need the package redis: pip install 'lynx-backend[redis]'"
    ) from e

__all__ = [
    "FAILURES",
    "Client",
    "OutOfMemoryError",
    "ReadOnlyError",
    "RedisCluster",
    "connect",
    "explain",
    "is_wrong_type",
]

Client = redis.Redis | RedisCluster

#: What a call on a client raises when the server, the network or the settings are to blame; the
#: last two are of a host that is no name, as a Sentinel may give one, and a number no socket takes.
FAILURES = (RedisError, RedisClusterException, OSError, UnicodeError, OverflowError)

_SCHEME = re.compile(r"(?:redis|valkey)(s?)(?:\+(sentinel|cluster))?|unix")
_BACKOFF_BASE_SECONDS, _BACKOFF_CAP_SECONDS = 0.02, 0.5
#: Large objects come in few reads, small answers in one; it is also the size of a buffer.
_READ_BYTES = 1 << 20
_COPIED_BYTES = 4096
_FORMS = (
    "redis://host:6379/0, unix:///run/redis.sock, redis+sentinel://host:26379,host:26379/service, "
    "redis+cluster://host:6379,host:6379, or with rediss for TLS"
)


@dataclass(frozen=True)
class _Place:
    """What a URL says."""

    kind: str  # "", "sentinel", "cluster" or "unix"
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    path: tuple[str, ...]
    username: str | None
    password: str | None

    @classmethod
    def parse(cls, url: str) -> _Place:
        wrong = ConfigError(f"redis.url {redacted(url)!r} is none of {_FORMS}")
        try:
            parts = urlsplit(url)
        except ValueError:  # brackets, which only an IPv6 address may have
            raise wrong from None
        scheme = _SCHEME.fullmatch(parts.scheme)
        login, _, netloc = parts.netloc.rpartition("@")
        if scheme is None or parts.query or parts.fragment:
            raise wrong
        user, _, password = map(unquote, login.partition(":"))
        login_of = (user or None, password or None)
        if parts.scheme == "unix":
            if netloc or len(parts.path) < 2:
                raise wrong
            return cls("unix", False, (), (unquote(parts.path),), *login_of)
        kind = scheme[2] or ""
        default_port = 26379 if kind == "sentinel" else 6379
        try:
            hosts = tuple(_host(text, default_port) for text in netloc.split(","))
        except ValueError:
            raise wrong from None
        path = tuple(unquote(p) for p in parts.path.split("/") if p)
        numbers = path[1:] if kind == "sentinel" else path
        fits = {"": len(hosts) == 1, "cluster": not path, "sentinel": bool(path)}[kind]
        if not fits or len(numbers) > 1 or not all(n.isdecimal() for n in numbers):
            raise wrong
        return cls(kind, bool(scheme[1]), hosts, path, *login_of)

    @property
    def db(self) -> int:
        numbers = self.path[1:] if self.kind == "sentinel" else self.path
        return int(numbers[0]) if numbers and self.kind != "unix" else 0


def _host(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(text)
    parts.hostname.encode("idna")  # as the resolver will; a UnicodeError is a ValueError
    return parts.hostname, default_port if parts.port is None else parts.port


def connect(config: RedisConfig) -> Client:
    """A client for the server or cluster that a configuration names.

    Safe to use from several threads; each takes a connection of its own while it waits. For one
    server, and for Sentinel, nothing is connected before the first command; a cluster is asked for
    its nodes now.

    Raises:
        ConfigError: the URL is of no known form, or a file that is named cannot be read.
        redis.RedisError, RedisClusterException, OSError and others (:data:`FAILURES`): no node of
            the cluster answers.
    """
    if config.url is None:
        raise ConfigError(f"redis.url is not set; it is one of {_FORMS}")
    place = _Place.parse(config.url)
    options: dict[str, Any] = {
        "username": config.username or place.username,
        "password": read_secret("redis.password", config.password, config.password_file)
        or place.password,
        **(_tls(config) if place.tls else {}),
        **_timing(config),
        "retry": _retry(config.retries),
        "max_connections": config.connections,
        "protocol": 2,  # what every server speaks, and has no messages between the answers
    }
    if place.kind != "unix":
        options["socket_keepalive"] = True
    if place.kind == "cluster":
        nodes = [ClusterNode(*host) for host in place.hosts]  # type: ignore[no-untyped-call]
        return RedisCluster(startup_nodes=nodes, **_asking_for_tls(place), **options)
    # Sends a large value from where it lies; redis-py's default copies it twice before.
    encode = Encoder("utf-8", "strict", False).encode  # type: ignore[no-untyped-call]
    options |= {"db": place.db, "command_packer": PythonRespSerializer(_COPIED_BYTES, encode)}
    if place.kind == "sentinel":
        return _primary_by_sentinel(config, place, options)
    if place.kind == "unix":
        options |= {"connection_class": UnixDomainSocketConnection, "path": place.path[0]}
    else:
        options |= {"connection_class": SSLConnection if place.tls else Connection}
        options |= zip(("host", "port"), place.hosts[0], strict=True)
    return redis.Redis.from_pool(ConnectionPool(**options))


def _primary_by_sentinel(
    config: RedisConfig, place: _Place, options: dict[str, Any]
) -> redis.Redis:
    password = config.sentinel_password, config.sentinel_password_file
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        list(place.hosts),
        sentinel_kwargs={
            "username": config.sentinel_username,
            "password": read_secret("redis.sentinel_password", *password),
            **_asking_for_tls(place),
            **(_tls(config) if place.tls else {}),
            **_timing(config),
            "retry": _retry(0),  # the next Sentinel is asked instead
        },
        **_asking_for_tls(place),
        **options,
    )
    primary: redis.Redis = sentinel.master_for(place.path[0])  # type: ignore[no-untyped-call]
    return primary


def is_wrong_type(e: Exception) -> bool:
    """Whether the server says that the value is of another type than the command is for."""
    return isinstance(e, ResponseError) and str(e).startswith("WRONGTYPE")


def explain(e: BaseException, config: RedisConfig) -> str:
    """What failed and what to do, without secrets. ``e`` is one of :data:`FAILURES`."""
    remedy = next((text for kind, text in _REMEDIES if isinstance(e, kind)), _OTHER_REMEDY)
    return f"{redacted(config.url or '')}: {str(e) or type(e).__name__}; {remedy}"


_REMEDIES: list[tuple[type[BaseException], str]] = [
    (AuthenticationError, "check redis.username and LYNX_REDIS_PASSWORD or redis.password_file"),
    (NoPermissionError, "the ACL user needs +@read +@write +@connection +info on its key prefix"),
    (BusyLoadingError, "the server is still loading its data; it is tried again"),
    (OutOfMemoryError, "raise the server's maxmemory, or set a maxmemory-policy that evicts"),
    (ReadOnlyError, "the URL names a replica; name the primary, or use redis+sentinel://"),
    (MaxConnectionsError, "raise redis.connections"),
    (MasterNotFoundError, "check the Sentinels' addresses and the service's name in redis.url"),
    (TimeoutError, "the server or the network is too slow; check both, or timeout_seconds"),
    (ResponseError, "the server refused the command; see its log"),
]
_OTHER_REMEDY = "check that the server runs and can be reached, and redis.url with its TLS and port"


def _asking_for_tls(place: _Place) -> dict[str, Any]:
    return {"ssl": True} if place.tls else {}


def _retry(retries: int) -> Retry:
    # A timeout is not tried again: who waited for one has waited long enough.
    backoff = ExponentialWithJitterBackoff(cap=_BACKOFF_CAP_SECONDS, base=_BACKOFF_BASE_SECONDS)
    return Retry(backoff, retries, (ConnectionError,))


def _timing(config: RedisConfig) -> dict[str, Any]:
    return {
        "socket_timeout": config.timeout_seconds,
        "socket_connect_timeout": config.connect_timeout_seconds,
        "socket_read_size": _READ_BYTES,
    }


def _tls(config: RedisConfig) -> dict[str, Any]:
    files = {
        "ssl_ca_certs": config.tls_ca_file,
        "ssl_certfile": config.tls_cert_file,
        "ssl_keyfile": config.tls_key_file,
    }
    try:
        for file in filter(None, files.values()):
            Path(file).read_bytes()
    except OSError as e:
        raise ConfigError(f"a TLS file of the redis section cannot be read: {e}") from None
    return {**files, "ssl_check_hostname": config.tls_check_hostname}
