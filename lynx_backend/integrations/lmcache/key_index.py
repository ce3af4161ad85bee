"""Which of LMCache's objects are stored, so that they can be listed, counted and deleted.

Lynx's tiers know objects by a digest, which cannot be turned back into LMCache's key. The index
holds the keys that this server stored or was asked for. With a file they outlive the server.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lmcache.v1.distributed.api import ObjectKey

from ... import metrics
from ...keys import ChunkKey
from ...logs import warn_limited

logger = logging.getLogger(__name__)

_TABLE = (
    "CREATE TABLE IF NOT EXISTS chunks (key TEXT PRIMARY KEY, model TEXT, hash BLOB, rank INTEGER, "
    "grp INTEGER, salt TEXT, chunk TEXT, size INTEGER) WITHOUT ROWID"
)
_INSERT = "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_DELETE = "DELETE FROM chunks WHERE key = ?"


def cursor_of(key: ObjectKey) -> str:
    """A text that orders keys, and differs between any two."""
    place = f"{key.model_name}@{key.kv_rank:x}@{key.object_group_id}@{key.cache_salt}"
    return f"{place}@{key.chunk_hash.hex()}"


def is_cursor(text: str) -> bool:
    """Whether a text can be one of :func:`cursor_of`."""
    return text.count("@") == 4


class KeyIndex:
    """Stored keys, their chunk and their size, and which of them are locked.

    Args:
        path: of an SQLite file, made when it is not there; None keeps the index in memory. Several
            servers may share one. A file that fails is a warning: the index then ends with the
            process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._stored: dict[ObjectKey, tuple[ChunkKey, int]] = {}
        self._locks: Counter[ObjectKey] = Counter()
        # Another process may keep the file for a while, which no lookup is to wait for: changes are
        # noted under the lock above, and written, in that order, under one of their own.
        self._unwritten: deque[tuple[str, Sequence[tuple[object, ...]]]] = deque()
        self._writing = threading.Lock()
        self._db: sqlite3.Connection | None = None
        if path is not None:
            try:
                self._open(path)
            except (sqlite3.Error, OSError, ValueError) as e:
                logger.warning(
                    "the index of stored keys %s cannot be used (%s): keys stored by earlier "
                    "processes are found, but not listed; delete the file to make a new one",
                    path, e,
                )  # fmt: skip

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Autocommit; what a crash loses of it is found again by the next lookup.
        db = sqlite3.connect(path, timeout=1.0, check_same_thread=False, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=OFF")
            db.execute(_TABLE)
            columns = "model, hash, rank, grp, salt, chunk, size"
            for model, digest, rank, group, salt, chunk, size in db.execute(
                f"SELECT {columns} FROM chunks"
            ):
                key = ObjectKey(digest, model, rank, group, salt)
                self._stored[key] = (ChunkKey.parse(chunk), size)
        except BaseException:
            self._stored.clear()
            db.close()
            raise
        self._db = db

    def __len__(self) -> int:
        return len(self._stored)

    def chunks(self, keys: Iterable[ObjectKey]) -> dict[ObjectKey, ChunkKey]:
        """The chunks of those keys that are known."""
        with self._lock:
            return {key: self._stored[key][0] for key in keys if key in self._stored}

    def add(self, stored: Mapping[ObjectKey, tuple[ChunkKey, int]]) -> dict[ObjectKey, int]:
        """Note that keys are stored; the sizes of those that were not known."""
        with self._lock:
            new = {key: each for key, each in stored.items() if key not in self._stored}
            self._stored.update(new)
            rows = [
                (cursor_of(k), k.model_name, k.chunk_hash, k.kv_rank, k.object_group_id,
                 k.cache_salt, str(chunk), size)
                for k, (chunk, size) in new.items()
            ]  # fmt: skip
            if rows:
                self._unwritten.append((_INSERT, rows))
        if rows:
            self._write()
        return {key: size for key, (_, size) in new.items()}

    def drop(self, keys: Iterable[ObjectKey]) -> dict[ObjectKey, int]:
        """Forget keys; the sizes of those that were known."""
        with self._lock:
            gone = {key: self._stored.pop(key)[1] for key in keys if key in self._stored}
            rows = [(cursor_of(k),) for k in gone]
            if rows:
                self._unwritten.append((_DELETE, rows))
        if rows:
            self._write()
        return gone

    def sizes(self) -> dict[ObjectKey, int]:
        """All known keys with the size of what is stored."""
        with self._lock:
            return {key: size for key, (_, size) in self._stored.items()}

    def page(self, model: str | None, count: int, after: str | None) -> list[ObjectKey]:
        """Up to ``count`` keys in a fixed order, those of one model or of all."""
        with self._lock:
            known = [key for key in self._stored if model in (None, key.model_name)]
        named = sorted((cursor_of(key), key) for key in known)
        return [key for name, key in named if after is None or name > after][:count]

    # -- locks -------------------------------------------------------------------------------------

    def lock(self, keys: Iterable[ObjectKey]) -> None:
        """Keep keys from being deleted, once more for each time they are given."""
        with self._lock:
            self._locks.update(list(keys))  # a mapping would add its values

    def unlock(self, keys: Iterable[ObjectKey]) -> None:
        """Undo :meth:`lock` once for each key; keys that are not locked are no error."""
        with self._lock:
            for key in keys:
                if self._locks[key] > 1:
                    self._locks[key] -= 1
                else:
                    del self._locks[key]

    def unlocked(self, keys: Iterable[ObjectKey]) -> list[ObjectKey]:
        """Those keys that may be deleted."""
        with self._lock:
            return [key for key in keys if key not in self._locks]

    @property
    def locked(self) -> int:
        """Keys that are locked."""
        return len(self._locks)

    def close(self) -> None:
        """Close the file."""
        with self._writing:
            if self._db is not None:
                self._db.close()
                self._db = None

    def _write(self) -> None:
        """Bring the file up to date; what this thread changed is in it when this returns."""
        with self._writing:
            while self._unwritten:
                statement, rows = self._unwritten.popleft()
                if self._db is None:
                    continue
                try:
                    with self._db:
                        self._db.execute("BEGIN")
                        self._db.executemany(statement, rows)
                except sqlite3.Error as e:
                    metrics.ERRORS.labels("IndexError").inc()
                    warn_limited(
                        logger, "key-index", "the index of stored keys cannot be written: %s", e
                    )
