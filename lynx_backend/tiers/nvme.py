"""Objects as files on a local disk, in a folder that several processes may share.

An object is the file ``<folder>/<xx>/<name>``, where ``xx`` are the first two hex digits of the
prefix half of its key. It is written under a temporary name, flushed, and renamed, so that a file
under an object's name is always whole. Files with other names are not touched and not counted.

The limit is kept by reserving: under the lock a writer learns what others changed, evicts, and
creates its temporary file at its full size; it writes without the lock. While it lives it holds a
flock on that file, so a temporary file that can be locked belongs to nobody and is removed.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from io import FileIO
from pathlib import Path

from .. import metrics
from ..errors import ConfigError, CorruptObjectError, TierError, TierFullError
from ..keys import ObjectName
from ..logs import warn_limited
from .base import Buffer, Tier, TierStats, flat
from .folder_index import FolderIndex, regular_file
from .limits import Limits
from .object_file import ObjectFiles
from .shared_folder import SharedFolder, fsync_directory, try_lock

logger = logging.getLogger(__name__)

_READERS = 4
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


class NvmeTier(Tier):
    """Keeps objects as files. Any number of threads and processes may share the folder.

    Least recently used means by modification time, which :meth:`get` sets; it is thus shared
    between processes and survives restarts. Open the tier in each process: an instance must not be
    carried over a fork.

    Objects are read and written past the page cache (O_DIRECT) where the file system takes it;
    where it does not, a warning says so.

    Args:
        path: the folder, made when absent (its owner's only: objects hold what users wrote).
        max_bytes: limit on the sizes of all object files and temporary files together. Processes
            that share a folder should all be given the same.
        min_free_bytes: what a put leaves free on the file system for others.
        direct: False to use the page cache in any case.
        quota_bytes, low_watermark: as for ``Limits``.
        max_object_bytes: a larger object is not taken, and a larger file under an object's name is
            damage: it is not read into memory, but removed.

    Attributes:
        direct: whether objects are read and written past the page cache.

    Raises:
        ConfigError: a limit is out of range, or the folder cannot be used.
    """

    name = "nvme"

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int,
        min_free_bytes: int = 0,
        direct: bool = True,
        quota_bytes: int | None = None,
        low_watermark: float = 1.0,
        max_object_bytes: int = 1 << 30,
    ) -> None:
        if max_object_bytes < 1:
            raise ConfigError(
                f"max_object_bytes of the NVMe tier must be >= 1, got {max_object_bytes}"
            )
        if min_free_bytes < 0:
            raise ConfigError(f"min_free_bytes of the NVMe tier must be >= 0, got {min_free_bytes}")
        self._limits = Limits(max_bytes, quota_bytes, low_watermark)
        self._path = Path(path).absolute()
        self._max_bytes = max_bytes
        self._max_object_bytes = min(max_object_bytes, max_bytes)
        self._min_free_bytes = min_free_bytes
        self._not_evicted: OSError | None = None
        self._closed = False
        self._readers = ThreadPoolExecutor(_READERS, "lynx-nvme")
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = SharedFolder(self._path)
            self._index = FolderIndex(self._folder, self._limits.catalog())
            with self._index.current():
                self._evict(self._index.used_bytes - max_bytes, None)
            self._files = ObjectFiles(self._folder.lock_path, direct)
        except OSError as e:
            raise ConfigError(f"the NVMe tier cannot use {_explain(e, self._path)}") from e

    @property
    def direct(self) -> bool:
        return self._files.direct

    def put(self, name: ObjectName, data: Buffer) -> None:
        view = flat(data)
        self.check_size(view.nbytes)
        with self._failures(f"put {name}"):
            try:
                self._store(name, view)
            except OSError as e:
                if e.errno not in _NO_SPACE:
                    raise
                # Inodes or a quota ran out, or the free space counted on went to someone else.
                with self._index.current():
                    self._evict(max(view.nbytes, 1), name)
                self._store(name, view)

    def check_size(self, size: int) -> None:
        if size > self._max_object_bytes:
            raise TierFullError(
                f"an object of {size} bytes is larger than the {self._max_object_bytes} that one "
                f"may have in {self._path}; raise max_object_bytes, or max_bytes if that is lower"
            )

    def get(self, name: ObjectName) -> memoryview | None:
        path = self._folder.file(str(name))
        with self._failures(f"get {name}"):
            if regular_file(path) is None:
                self._folder.check()
                return None
            try:
                data = self._files.read(path, self._max_object_bytes)
            except FileNotFoundError:
                return None
            except OSError as e:
                if e.errno != errno.EFBIG:
                    raise
                self._remove_too_large(name)
                return None
            with suppress(OSError):  # a read-only disk or another user's file is readable even so
                now = time.time_ns()
                os.utime(path, ns=(now, now))
            return data

    def get_many(self, names: Sequence[ObjectName]) -> list[memoryview | None]:
        if len(names) <= 1 or self._closed:
            return [self.get(name) for name in names]
        # A disk does more at once than one thread asks for.
        try:
            return list(self._readers.map(self.get, names))
        except RuntimeError:  # closed in between
            return [self.get(name) for name in names]

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        with self._failures("look up objects"):
            self._folder.check()
            found = (regular_file(self._folder.file(str(name))) for name in names)
            most = self._max_object_bytes
            return [None if file is None or file[0] > most else file[0] for file in found]

    def delete(self, names: Sequence[ObjectName]) -> None:
        with self._failures("delete objects"), self._folder.locked():
            for name in names:
                if regular_file(self._folder.file(str(name))) is not None:
                    self._remove(name)

    def names(self) -> Iterator[ObjectName]:
        with self._failures("list objects"), self._index.current():
            return iter(list(self._index.catalog))

    def stats(self) -> TierStats:
        with self._failures("count objects"), self._index.current():
            return TierStats(
                used_bytes=self._index.used_bytes,
                capacity_bytes=self._max_bytes,
                objects=len(self._index.catalog),
                anchor_only=self._index.catalog.anchor_only,
            )

    def close(self) -> None:
        self._closed = True
        self._readers.shutdown(wait=False)

    def _store(self, name: ObjectName, view: memoryview) -> None:
        file = str(name)
        temp = f"{file}.{secrets.token_hex(8)}.tmp"
        path, temp_path = self._folder.file(file), self._folder.file(temp)
        try:
            with self._reserve(name, temp, view.nbytes) as f:
                self._files.write(f.fileno(), view)
                now = time.time_ns()
                os.utime(f.fileno(), ns=(now, now))
                os.fsync(f.fileno())
                with self._folder.locked(), self._index.changing(temp):
                    os.rename(temp_path, path)
            fsync_directory(os.path.dirname(path))
        except BaseException:
            if os.path.lexists(temp_path):  # closed by now, so to everybody a dead writer's
                with suppress(OSError), self._index.current():
                    pass
            raise

    def _reserve(self, name: ObjectName, temp: str, size: int) -> FileIO:
        """Make room for, create, and open a temporary file of the object's full size."""
        path, temp_path = self._folder.file(str(name)), self._folder.file(temp)
        with self._index.current(thorough=False):
            if os.path.lexists(path) and regular_file(path) is None:
                raise FileExistsError(errno.EEXIST, "not a regular file", path)
            self._make_room(name, size)
            with self._index.changing(temp):
                try:
                    os.mkdir(os.path.dirname(path))
                except FileExistsError:
                    pass
                else:
                    fsync_directory(self._path)
                f = FileIO(temp_path, "x")
                try:
                    try_lock(f.fileno())
                    if size:
                        os.posix_fallocate(f.fileno(), 0, size)
                except BaseException:
                    f.close()
                    raise
        return f

    def _make_room(self, name: ObjectName, size: int) -> None:
        disk = os.statvfs(self._path)
        free = disk.f_bavail * disk.f_frsize
        blocks = -(-size // disk.f_frsize) * disk.f_frsize
        short = self._min_free_bytes + blocks - free
        catalog = self._index.catalog
        others = self._index.used_bytes - catalog.used_bytes
        if not any(self._limits.to_evict(catalog, name, size, others, short)):
            return
        self._index.look_for_others()  # before anything is evicted for what is not there any more
        others = self._index.used_bytes - catalog.used_bytes
        if self._limits.fits(catalog, name, size, others, short) and all(
            self._evict(need, name, identity) >= need
            for identity, need in self._limits.to_evict(catalog, name, size, others, short)
        ):
            return
        used, evictable = self._index.used_bytes, catalog.evictable_bytes(name)
        message = (
            f"no room for an object of {size} bytes in {self._path}: {used} of "
            f"max_bytes={self._max_bytes} are used, {evictable} of them evictable, and {free} "
            f"bytes of the file system are free, of which min_free_bytes={self._min_free_bytes} "
            f"stay so, and quota_bytes={self._limits.quota_bytes}; raise a limit or free space on "
            "the file system"
        )
        if self._not_evicted is not None:
            message += (
                f". Some objects cannot be removed: {_explain(self._not_evicted, self._path)}"
            )
        raise TierFullError(message)

    def _evict(self, need: int, writing: ObjectName | None, identity: bytes | None = None) -> int:
        """Remove objects in eviction order until ``need`` bytes are gone; how many are gone."""
        gone = 0
        catalog = self._index.catalog
        self._not_evicted = None
        with closing(catalog.victims(writing, identity)) as victims:
            while gone < need and (name := next(victims, None)) is not None:
                size = catalog.size(name) or 0
                try:
                    found = regular_file(self._folder.file(str(name)))
                    if found is not None and found[1] > catalog.last_use(name):
                        catalog.touch(name, found[1])  # read since, perhaps by another process
                    else:
                        self._remove(name)
                        self._count_eviction(name)
                        gone += size
                except OSError as e:  # this one has to stay; the next may go
                    self._not_evicted = e
        return gone

    def _remove(self, name: ObjectName) -> None:
        file = str(name)
        with self._index.changing(file), suppress(FileNotFoundError):
            os.unlink(self._folder.file(file))

    def _remove_too_large(self, name: ObjectName) -> None:
        metrics.ERRORS.labels(CorruptObjectError.__name__).inc()
        path = self._folder.file(str(name))
        warn_limited(
            logger,
            "nvme-too-large",
            "%s is larger than the %d bytes that an object may have: damaged, and removed; if it "
            "was in order, raise nvme.max_object_bytes",
            path,
            self._max_object_bytes,
        )
        with suppress(OSError), self._folder.locked():
            found = regular_file(path)
            if found is not None and found[0] > self._max_object_bytes:  # nobody replaced it
                self._remove(name)

    @contextmanager
    def _failures(self, action: str) -> Iterator[None]:
        if self._closed:
            raise TierError(f"cannot {action}: the NVMe tier at {self._path} is closed; reopen it")
        try:
            yield
        except OSError as e:
            kind = TierFullError if e.errno in _NO_SPACE else TierError
            raise kind(f"cannot {action}: {_explain(e, self._path)}") from e


_REMEDIES = {
    errno.ENOSPC: "free space or inodes on this file system, or lower max_bytes",
    errno.EDQUOT: "raise this user's disk quota, or lower max_bytes",
    errno.EROFS: "the file system is read-only; look for disk errors in dmesg and remount it",
    errno.EACCES: "give uid {uid} read, write and search permission here, or choose another folder",
    errno.EPERM: "give uid {uid} the ownership of this, or choose another folder",
    errno.ENOENT: "there is no such folder; mount it, make it, or choose another folder",
    errno.ESTALE: "another file system is mounted here than at start-up; mount the former again",
    errno.ENOTDIR: "a folder is expected here; move what is in its place away, or choose another",
    errno.EEXIST: "it is in the way; move it away, or choose another folder",
    errno.EMFILE: "raise the limit on open files of this process (`ulimit -n`)",
    errno.EIO: "the disk fails; look for its errors in dmesg and replace it",
    errno.ETIMEDOUT: "find the process with `fuser -v` on this file and continue or end it",
}


def _explain(e: OSError, path: Path) -> str:
    """The path an OSError concerns, what went wrong there, and what to do."""
    remedy = _REMEDIES.get(e.errno or 0, "check this folder and its file system").format(
        uid=os.geteuid()
    )
    return f"{e.filename or path}: {e.strerror or e}; {remedy}"
