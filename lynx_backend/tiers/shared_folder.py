"""A folder of fan-out folders that several processes change, one of them at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

FANOUT = 256
_FANOUT_DIGITS = slice(32, 34)  # of a file's name: the first of the prefix half of a key
LOCK_WAIT_SECONDS = 10.0
LOG_RECORDS = 4096
_HEADER = struct.Struct("<QQ")
_RECORD = struct.Struct("<96sqq")
_LOCK_BYTES = _HEADER.size + LOG_RECORDS * _RECORD.size
_UNFINISHED = -1
_FIRST_TIME, _LAST_TIME = -1 << 63, (1 << 63) - 1  # that a record can hold

#: a log, by its random id, and the number of changes written to it
Position = tuple[int, int]


class Change(NamedTuple):
    """A file that was created, removed or renamed, and mtimes of its fan-out folder.

    Attributes:
        file: name of the file.
        before: st_mtime_ns of the folder before the change, 0 when there was no folder.
        after: the same after it; a time that no folder has when whoever made the change died.
    """

    file: str
    before: int
    after: int


class SharedFolder:
    """The lock over a folder, and a log of the files that were changed under it.

    Whoever is about to change a file writes its name into the log first; what became of it, others
    see by looking at the file. So the log needs no repair after a crash. With the mtimes of the
    folder before and after, they can tell that nothing else changed it in between.

    The log is a ring of the latest changes in the lock file itself: a header of its random id and
    the number of changes written so far, then the changes.

    Methods raise OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fanout = [str(path / f"{i:02x}") for i in range(FANOUT)]
        self.lock_path = str(path / "lock")
        self._device = os.stat(path).st_dev
        self._mutex = threading.Lock()
        self._fd = -1  # the lock file, while locked
        self.position: Position = (0, 0)  # where the log ends, while locked

    def file(self, name: str) -> str:
        """Path of the file of this name."""
        return f"{self.path}/{name[_FANOUT_DIGITS]}/{name}"

    def check(self) -> None:
        """Raise when the folder vanished or another file system has taken its place."""
        if os.stat(self.path).st_dev != self._device:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.path))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude every other thread and process. Released when the process dies, however."""
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        if not self._mutex.acquire(timeout=LOCK_WAIT_SECONDS):
            raise self._timeout()
        try:
            self._fd = self._acquire(deadline)
            try:
                log, records = _HEADER.unpack(os.pread(self._fd, _HEADER.size, 0))
                self.position = (log, records)
                yield
            finally:
                # Closing is not enough: a child forked meanwhile shares the lock.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                os.close(self._fd)
        finally:
            self._mutex.release()

    @contextmanager
    def changing(self, file: str) -> Iterator[None]:
        """Around a change of the file of this name; only while locked."""
        log, changes = self.position
        place = _HEADER.size + changes % LOG_RECORDS * _RECORD.size
        change = Change(file, self.mtime(fanout_of(file)), _UNFINISHED)
        os.pwrite(self._fd, _pack(change), place)
        self.position = (log, changes + 1)
        os.pwrite(self._fd, _HEADER.pack(*self.position), 0)
        try:
            yield
        finally:
            change = change._replace(after=self.mtime(fanout_of(file)))
            os.pwrite(self._fd, _pack(change), place)

    def changes(self, since: Position | None) -> list[Change] | None:
        """Changes since a position, None when the log forgot some; only while locked."""
        log, changes = self.position
        if since is None or since[0] != log or not 0 <= changes - since[1] <= LOG_RECORDS:
            return None
        places = (_HEADER.size + n % LOG_RECORDS * _RECORD.size for n in range(since[1], changes))
        return [_unpack(os.pread(self._fd, _RECORD.size, place)) for place in places]

    def mtime(self, i: int) -> int:
        """st_mtime_ns of a fan-out folder, 0 when there is none."""
        try:
            return os.stat(self.fanout[i]).st_mtime_ns
        except FileNotFoundError:
            return 0

    def _acquire(self, deadline: float) -> int:
        while True:
            self.check()
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self.lock_path, flags, 0o666)
            try:
                self._flock(fd, deadline)
                status = os.fstat(fd)
                if status.st_nlink:
                    if status.st_size < _LOCK_BYTES:
                        # All of it now: a full disk must not keep anyone from making room.
                        os.posix_fallocate(fd, 0, _LOCK_BYTES)
                        os.pwrite(fd, _HEADER.pack(secrets.randbits(64), 0), 0)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # a lock file that was removed excludes nobody who comes later

    def _flock(self, fd: int, deadline: float) -> None:
        # Not a blocking flock(): a process that is stopped while it holds the lock must cost the
        # others time, not hang them.
        pause = 0.0001
        while not try_lock(fd):
            if time.monotonic() > deadline:
                raise self._timeout()
            time.sleep(pause)
            pause = min(2 * pause, 0.005)

    def _timeout(self) -> TimeoutError:
        text = f"locked by another process for over {LOCK_WAIT_SECONDS:g} s"
        return TimeoutError(errno.ETIMEDOUT, text, self.lock_path)


def fanout_of(file: str) -> int:
    """The fan-out folder that a file of this name belongs in."""
    return int(file[_FANOUT_DIGITS], 16)


def try_lock(fd: int) -> bool:
    """Take an exclusive flock on an open file unless somebody holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def fsync_directory(path: str | Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _pack(change: Change) -> bytes:
    # A time that does not fit, after 2262, becomes one that the folder does not have: it is listed.
    times = (max(_FIRST_TIME, min(t, _LAST_TIME)) for t in (change.before, change.after))
    return _RECORD.pack(change.file.encode(), *times)


def _unpack(record: bytes) -> Change:
    file, before, after = _RECORD.unpack(record)
    return Change(file.rstrip(b"\0").decode("ascii", "replace"), before, after)
