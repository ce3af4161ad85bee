"""Reading and writing whole files past the page cache where the file system allows it.

What is stored here is read once in a while and is larger than memory, so keeping it in the page
cache as well would only push out what others need; and reading past it was measured to be faster.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading

from .arena import Arena, page_memory

logger = logging.getLogger(__name__)

#: Of addresses, offsets and sizes; no block device in use asks for more.
_ALIGN = 4096
_PIECE_BYTES = 8 << 20
#: Memory that is read into over and over; readers that hold on to more get memory of their own.
_ARENA_BYTES = 256 << 20
#: Smaller files are not worth the alignment.
DIRECT_FROM_BYTES = 64 << 10


class ObjectFiles:
    """How the files of one folder are read and written.

    Args:
        probe: a file in the folder of at least 4 KiB, to find out whether O_DIRECT works there.
        direct: False to go through the page cache in any case.
        direct_from: size in bytes from which on a file is read and written past the page cache.

    Attributes:
        direct: whether it works. When it does not, this was logged.
    """

    def __init__(
        self, probe: str, direct: bool = True, direct_from: int = DIRECT_FROM_BYTES
    ) -> None:
        self._folder = os.path.dirname(probe)
        self._direct_from = direct_from
        self._local = threading.local()
        self._arena = Arena(_ARENA_BYTES, _ALIGN)
        self.direct = direct
        if direct:
            try:
                fd = os.open(probe, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                try:
                    os.readv(fd, [page_memory(_ALIGN)])
                finally:
                    os.close(fd)
            except OSError as e:
                self._give_up(e)

    def read(self, path: str, most: int) -> memoryview:
        """All bytes of a file of at most so many. Raises OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size > most:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
            memory = self._memory(size)
            if size < self._direct_from or not self._set_direct(fd, True):
                return _fill(fd, memory, size)
            try:
                return _fill(fd, memory, size)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self._give_up(e)
                self._set_direct(fd, False)
                os.lseek(fd, 0, os.SEEK_SET)
                return _fill(fd, memory, size)
        finally:
            os.close(fd)

    def write(self, fd: int, data: memoryview) -> None:
        """Write a new file's bytes from its start on. Not flushed. Raises OSError."""
        done = 0
        if len(data) >= self._direct_from and self._set_direct(fd, True):
            try:
                done = self._write_aligned(fd, data)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self._give_up(e)
            self._set_direct(fd, False)
        while done < len(data):
            done += os.pwrite(fd, data[done:], done)

    def _write_aligned(self, fd: int, data: memoryview) -> int:
        """Write all but the end that does not fill a block; how many bytes that were."""
        whole = len(data) // _ALIGN * _ALIGN
        piece = self._piece()
        done = 0
        while done < whole:
            size = min(_PIECE_BYTES, whole - done)
            piece[:size] = data[done : done + size]
            written = os.pwrite(fd, piece[:size], done)
            done += written // _ALIGN * _ALIGN
            if written % _ALIGN:
                break  # the rest goes through the page cache, which says why if it cannot
        return done

    def _memory(self, size: int) -> memoryview:
        """Aligned memory for a file and, as direct reads end with a block, a bit more."""
        room = max(_ALIGN, -(-size // _ALIGN) * _ALIGN)
        block = self._arena.take(room)
        return memoryview(page_memory(room)) if block is None else block.data

    def _piece(self) -> memoryview:
        """Aligned memory of this thread."""
        if not hasattr(self._local, "piece"):
            self._local.piece = memoryview(page_memory(_PIECE_BYTES))
        piece: memoryview = self._local.piece
        return piece

    def _set_direct(self, fd: int, on: bool) -> bool:
        if on and not self.direct:
            return False
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            self._give_up(e)
            return False
        return True

    def _give_up(self, why: OSError) -> None:
        self.direct = False
        logger.warning(
            "%s: this file system does not take O_DIRECT (%s); reading and writing go through the "
            "page cache, which is slower and takes memory from others",
            self._folder,
            os.strerror(why.errno or 0),
        )


def _fill(fd: int, memory: memoryview, size: int) -> memoryview:
    done = 0
    while done < size:
        got = os.readv(fd, [memory[done:]])
        if not got:
            break
        done += got
    return memory[: min(done, size)].toreadonly()
