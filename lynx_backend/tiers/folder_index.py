"""What a shared folder holds, kept up to date with what other processes do to it."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import InvalidInputError
from ..keys import ObjectName
from .catalog import Catalog
from .shared_folder import FANOUT, Position, SharedFolder, fanout_of, try_lock

_TEMP_NAME = re.compile(r"([0-9a-f]{64}\.[0-9])\.[0-9a-f]{16}\.tmp")
_NOT_LISTED = -1
_LOOK_SECONDS = 1.0


class FolderIndex:
    """Catalog of the object files in a folder, and the temporary files of living writers.

    Changes by processes that use this class are followed through the folder's log. A fan-out folder
    whose modification time the log does not explain was changed by others, and is listed again; as
    there are many folders, that is looked for once a second, when asked for, and before evicting.

    Methods raise OSError.

    Args:
        catalog: an empty one.

    Attributes:
        catalog: the objects; last use is the file's modification time in ns.
        temps: size in bytes by name of each temporary file.
    """

    def __init__(self, folder: SharedFolder, catalog: Catalog) -> None:
        self.catalog = catalog
        self.temps: dict[str, int] = {}
        self._folder = folder
        self._position: Position | None = None
        self._listed: list[set[ObjectName]] = [set() for _ in range(FANOUT)]
        self._mtimes = [_NOT_LISTED] * FANOUT
        self._looked = float("-inf")

    @property
    def used_bytes(self) -> int:
        """Size of all objects and temporary files."""
        return self.catalog.used_bytes + sum(self.temps.values())

    @contextmanager
    def current(self, thorough: bool = True) -> Iterator[None]:
        """Hold the folder's lock, with this index up to date and dead writers' files removed.

        Args:
            thorough: also look for changes that others made, however short ago that was done.
        """
        with self._folder.locked():
            complete = self._follow_log()
        if not complete:
            # Listing a large folder takes seconds: let others in between its parts.
            for i in range(FANOUT):
                with self._folder.locked():
                    self._follow_log()
                    self._list_if_changed(i)
        with self._folder.locked():
            complete = self._follow_log()
            if thorough or not complete or time.monotonic() > self._looked + _LOOK_SECONDS:
                self.look_for_others()
            yield

    def look_for_others(self) -> None:
        """Find what was changed past the log; only while the lock is held."""
        for i in range(FANOUT):
            self._list_if_changed(i)
        for temp in list(self.temps):
            self._remove_if_abandoned(temp)
        self._looked = time.monotonic()

    @contextmanager
    def changing(self, file: str) -> Iterator[None]:
        """Around a change of a file, or of a temporary file into the object it is for."""
        try:
            with self._folder.changing(file):
                yield
        finally:
            self._look_at(file)

    def _follow_log(self) -> bool:
        changes = self._folder.changes(self._position)
        self._position = self._folder.position
        if changes is None:
            self._mtimes = [_NOT_LISTED] * FANOUT
            return False
        for change in changes:
            if self._look_at(change.file):
                i = fanout_of(change.file)
                if self._mtimes[i] == change.before:
                    self._mtimes[i] = change.after
        return True

    def _look_at(self, file: str) -> bool:
        """Record what is there under a name; False when it is no name of ours."""
        temp = _TEMP_NAME.fullmatch(file)
        try:
            name = ObjectName.parse(temp[1] if temp else file)
        except InvalidInputError:
            return False
        if temp:
            self.temps.pop(file, None)
            if (found := regular_file(self._folder.file(file))) is not None:
                self.temps[file] = found[0]
        if (found := regular_file(self._folder.file(str(name)))) is not None:
            self._listed[fanout_of(file)].add(name)
            self.catalog.put(name, *found)
        else:
            self._listed[fanout_of(file)].discard(name)
            self.catalog.discard(name)
        return True

    def _list_if_changed(self, i: int) -> None:
        mtime = self._folder.mtime(i)
        if mtime == self._mtimes[i]:
            return
        before = self._listed[i]
        self._listed[i] = set()
        for temp in [temp for temp in self.temps if fanout_of(temp) == i]:
            del self.temps[temp]
        with suppress(FileNotFoundError), os.scandir(self._folder.fanout[i]) as entries:
            for entry in entries:
                self._list(entry, i)
        for name in before - self._listed[i]:
            self.catalog.discard(name)
        self._mtimes[i] = mtime

    def _list(self, entry: os.DirEntry[str], i: int) -> None:
        """:meth:`_look_at`, in less time for an object: there may be a million at start-up."""
        name = ObjectName.of(entry.name)
        if name is None or fanout_of(entry.name) != i:
            self._look_at(entry.name)
            return
        with suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                self._listed[i].add(name)
                self.catalog.put(name, status.st_size, status.st_mtime_ns)

    def _remove_if_abandoned(self, temp: str) -> None:
        path = self._folder.file(temp)
        try:
            with open(path, "r+b", buffering=0) as f:
                if try_lock(f.fileno()):
                    with self.changing(temp):
                        os.unlink(path)
        except FileNotFoundError:
            self.temps.pop(temp, None)
        except PermissionError:
            pass  # another user's: it counts until a process of that user removes it


def regular_file(path: str) -> tuple[int, int] | None:
    """Size in bytes and st_mtime_ns of a regular file; None for everything else and nothing."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None
