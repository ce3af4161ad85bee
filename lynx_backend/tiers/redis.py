"""Objects in Redis or Valkey: one server, its replicas under Sentinel, or a cluster.

An object is a string under ``<key_prefix>:<name>``, so that what one prefix holds can be given to
one ACL user. No command names two keys: the parts of a chunk may lie on different shards. Whoever
runs the server sets its ``maxmemory`` and policy, and it evicts by itself; this tier copes with any
object being gone at any time.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from .. import metrics
from ..config import RedisConfig
from ..errors import ConfigError, TierError, TierFullError
from ..keys import ObjectName, Part
from ..logs import warn_limited
from ..redis_client import (
    FAILURES,
    Client,
    OutOfMemoryError,
    RedisCluster,
    connect,
    explain,
    is_wrong_type,
)
from .base import Buffer, Tier, TierStats, flat

logger = logging.getLogger(__name__)

_PREFIX = re.compile(r"[\w.:-]+", re.ASCII)
#: Objects asked for in one go over one connection. The server holds the answers in memory until
#: they are taken, and few large ones are enough to hide the round trip.
_GETS_IN_A_BATCH = 4
_LOOKUPS_IN_A_BATCH = 4096
_SCAN_COUNT = 2000
#: Longer would keep more anchors to draft on, but a server that evicts by time left would drop the
#: residuals of everything written within it before any anchor, and keep no chunk whole.
_ANCHOR_OUTLIVES_MS = 10


class RedisTier(Tier):
    """Keeps objects in the server or cluster that ``config.url`` names.

    A server that cannot be reached is no error here but at every call: it may come later. At most
    ``config.connections`` calls are under way at once, others wait for them.

    With ``ttl_seconds`` an object goes so long after its last use, an anchor a moment later than
    its residual. Under the server's policy ``volatile-ttl`` that is also the order of eviction:
    least recently used first, and a chunk's residual before its anchor.

    Raises:
        ConfigError: the URL, the prefix or a file that is named cannot be used.
        UnsupportedError: redis-py is not installed (raised by importing this module).
    """

    name = "redis"
    keeps_capacity = False

    def __init__(self, config: RedisConfig) -> None:
        if not _PREFIX.fullmatch(config.key_prefix):
            raise ConfigError(
                f"redis.key_prefix {config.key_prefix!r} may hold letters, digits and _ . : - only"
            )
        self._config = config
        self._prefix = f"{config.key_prefix}:".encode()
        self._lifetimes = _lifetimes(config.ttl_seconds)
        self._slots = threading.BoundedSemaphore(config.connections)
        self._workers = ThreadPoolExecutor(config.connections, "lynx-redis")
        self._connecting = threading.Lock()
        self._closed = False
        self._client: Client | None = None
        with suppress(*FAILURES):  # a cluster that is not there yet
            self._client = connect(config)

    def put(self, name: ObjectName, data: Buffer) -> None:
        view = flat(data)
        self.check_size(view.nbytes)
        with self._calling(f"put {name}") as client:
            client.set(self._key(name), view, px=self._lifetime(name))

    def check_size(self, size: int) -> None:
        if size > self._config.max_object_bytes:
            raise TierFullError(
                f"an object of {size} bytes is larger than redis.max_object_bytes="
                f"{self._config.max_object_bytes}; raise it, up to the server's proto-max-bulk-len"
            )

    def get(self, name: ObjectName) -> memoryview | None:
        return self._get_batch([name])[0]

    def get_many(self, names: Sequence[ObjectName]) -> list[memoryview | None]:
        batches = _batches(names, min(_GETS_IN_A_BATCH, -(-len(names) // self._config.connections)))
        if len(batches) <= 1:
            return self._get_batch(names)
        return [found for batch in self._spread(self._get_batch, batches) for found in batch]

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        self._check_open()
        found: list[int | None] = []
        for batch in _batches(names, _LOOKUPS_IN_A_BATCH):
            with self._calling("look up objects") as client:
                pipeline = client.pipeline(transaction=False)
                for name in batch:
                    pipeline.strlen(self._key(name))
                found += self._answers(pipeline, batch, len_of=int)
        return found

    def delete(self, names: Sequence[ObjectName]) -> None:
        self._check_open()
        for batch in _batches(names, _LOOKUPS_IN_A_BATCH):
            with self._calling("delete objects") as client:
                pipeline = client.pipeline(transaction=False)
                for name in batch:
                    pipeline.unlink(self._key(name))
                pipeline.execute()

    def names(self) -> Iterator[ObjectName]:
        """All objects; the server may be asked again while this is iterated over."""
        self._check_open()
        return self._scan()

    def stats(self) -> TierStats:
        """Memory of the server, or of all primaries, whatever else it is used for.

        The capacity is ``maxmemory``, and the host's memory where that is not set.
        """
        with self._calling("ask for the memory used") as client:
            infos = self._memory_of_primaries(client)
            used = sum(int(info["used_memory"]) for info in infos)
            capacity = sum(
                int(info["maxmemory"]) or int(info["total_system_memory"]) for info in infos
            )
        return TierStats(used, capacity, None, None)

    def close(self) -> None:
        self._closed = True
        self._workers.shutdown(wait=False, cancel_futures=True)
        with self._connecting:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    # -- calls -------------------------------------------------------------------------------------

    def _get_batch(self, names: Sequence[ObjectName]) -> list[memoryview | None]:
        most = self._config.max_object_bytes
        with self._calling(f"get {names[0]}" if names else "get nothing") as client:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                # Not GET: whatever somebody stored there, no more than this is read into memory.
                pipeline.getrange(self._key(name), 0, most)
            renewed = self._config.renew_on_read and self._lifetimes is not None
            for name in names if renewed else ():
                pipeline.pexpire(self._key(name), self._lifetime(name) or 0)
            values = self._answers(pipeline, names, len_of=len)
        return [None if value is None else memoryview(value) for value in values]

    def _answers(
        self, pipeline: Any, names: Sequence[ObjectName], len_of: Callable[[Any], int]
    ) -> list[Any]:
        """The server's first answer about each name; None where there is no object.

        What somebody else keeps under a name is none, whatever it is: it must not cost the others.
        """
        answers = pipeline.execute(raise_on_error=False)
        for error in answers:
            if isinstance(error, Exception) and not is_wrong_type(error):
                raise error
        found: list[Any] = []
        for name, answer in zip(names, answers, strict=False):
            foreign = ""
            if isinstance(answer, Exception):
                answer.__traceback__ = None  # whose frames hold on to the other answers
                foreign = "of another type than a string"
            elif len_of(answer) > self._config.max_object_bytes:
                foreign = f"larger than redis.max_object_bytes={self._config.max_object_bytes}"
            if foreign:
                metrics.ERRORS.labels("ForeignValue").inc()
                warn_limited(
                    logger,
                    "redis-foreign",
                    "the value of %s is %s, and taken for none; raise the limit if it is too low, "
                    "else keep others off redis.key_prefix=%s",
                    name,
                    foreign,
                    self._config.key_prefix,
                )
            found.append(None if foreign or not len_of(answer) else answer)
        return found

    def _spread(self, call: Any, batches: Sequence[Sequence[ObjectName]]) -> list[Any]:
        """Results of one call for each batch, made at the same time."""
        try:
            futures = [self._workers.submit(call, batch) for batch in batches]
            return [future.result() for future in futures]
        except (RuntimeError, CancelledError):
            if not self._closed:
                raise
            raise self._closed_error() from None

    def _scan(self) -> Iterator[ObjectName]:
        with self._calling("list objects") as client:
            found = client.scan_iter(match=self._prefix + b"*", count=_SCAN_COUNT)
            keys = set(found)  # a scan may return a key twice
        yield from filter(None, map(self._name_of, keys))

    def _name_of(self, key: bytes) -> ObjectName | None:
        return ObjectName.of(key[len(self._prefix) :].decode(errors="replace"))

    @contextmanager
    def _calling(self, action: str) -> Iterator[Client]:
        """A client, for one call, with its failures as TierError."""
        self._check_open()
        with self._slots:
            try:
                yield self._connected()
            except OutOfMemoryError as e:
                raise TierFullError(f"cannot {action}: {explain(e, self._config)}") from e
            except FAILURES as e:
                raise TierError(f"cannot {action}: {explain(e, self._config)}") from e

    def _connected(self) -> Client:
        with self._connecting:
            if self._closed:
                raise self._closed_error()
            if self._client is None:
                self._client = connect(self._config)
            return self._client

    @staticmethod
    def _memory_of_primaries(client: Client) -> list[Any]:
        """``INFO memory`` of the server, or of each primary of a cluster."""
        if not isinstance(client, RedisCluster):
            return [client.info("memory")]
        answers = client.info("memory", target_nodes=client.PRIMARIES)
        return [answers] if "used_memory" in answers else list(answers.values())

    def _key(self, name: ObjectName) -> bytes:
        return self._prefix + str(name).encode()

    def _lifetime(self, name: ObjectName) -> int | None:
        return None if self._lifetimes is None else self._lifetimes[name.part]

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    @staticmethod
    def _closed_error() -> TierError:
        return TierError("the Redis tier is closed; open a new one")


def _lifetimes(seconds: float | None) -> dict[Part, int] | None:
    """Milliseconds that objects live after their last use."""
    if seconds is None:
        return None
    least = max(1, round(1000 * seconds))
    return {Part.RESIDUAL: least, Part.ANCHOR: least + _ANCHOR_OUTLIVES_MS}


def _batches(names: Sequence[ObjectName], size: int) -> list[Sequence[ObjectName]]:
    return [names[at : at + size] for at in range(0, len(names), max(1, size))]
