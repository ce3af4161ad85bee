"""A fixed piece of memory, handed out in blocks that come back when nobody looks at them any more.

Fresh memory has to be faulted in and zeroed page by page, which was measured to cost more than
reading an object from a disk into it; and what is allocated once cannot grow.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ..errors import InvalidInputError

Block = npt.NDArray[np.uint8]


class Arena:
    """Gives out blocks of one allocation. Safe to use from several threads.

    A block is taken until its array, and every memoryview of it, is gone. Arrays derived from the
    array itself do not count: derive them from a memoryview.

    Args:
        size: bytes that blocks may take in all.
        align: of every block's address, a power of two up to the page size.
        pinned: page-locked for transfers to and from a GPU, all of it at once; else memory is used
            when it is first written to.

    Raises:
        InvalidInputError: a size or alignment below 1.
        MemoryError, RuntimeError: there is no such memory.
    """

    def __init__(self, size: int, align: int = 64, pinned: bool = False) -> None:
        if size < 1 or align < 1:
            raise InvalidInputError(f"size and align must be at least 1, got {size} and {align}")
        self.align = align
        self.pinned = pinned
        size = self._rounded(size)
        self._memory = _pinned(size) if pinned else np.frombuffer(page_memory(size), np.uint8)
        self._free = [(0, size)]  # by offset; no two of them touch
        self._lock = threading.Lock()
        # Blocks end in whatever thread drops the last view, perhaps while it is in here.
        self._ended: deque[tuple[int, int]] = deque()

    def take(self, size: int, from_end: bool = False) -> Block | None:
        """A block of exactly this many bytes, None when no piece of the arena is large enough.

        Its content is whatever was there.

        Args:
            from_end: take it from the last piece that is large enough, not the first. Blocks of two
                sizes leave fewer gaps when each size has its own end.
        """
        room = self._rounded(size)
        with self._lock:
            self._collect()
            places = range(len(self._free))
            fits = (
                i for i in (reversed(places) if from_end else places) if self._free[i][1] >= room
            )
            i = next(fits, None)
            if i is None:
                return None
            at, there = self._free[i]
            left = (at, there - room) if from_end else (at + room, there - room)
            self._free[i : i + 1] = [left] if there > room else []
            at += there - room if from_end else 0
        block: Block = self._memory[at : at + size]
        weakref.finalize(block, self._ended.append, (at, room)).atexit = False
        return block

    @property
    def free_bytes(self) -> int:
        """In all pieces together."""
        with self._lock:
            self._collect()
            return sum(size for _, size in self._free)

    def _collect(self) -> None:
        while self._ended:
            at, size = self._ended.popleft()
            i = bisect_left(self._free, (at, 0))
            if i < len(self._free) and self._free[i][0] == at + size:
                size += self._free.pop(i)[1]
            if i and sum(self._free[i - 1]) == at:
                before, more = self._free.pop(i - 1)
                at, size = before, size + more
            insort(self._free, (at, size))

    def _rounded(self, size: int) -> int:
        return -(-size // self.align) * self.align


def page_memory(size: int) -> mmap.mmap:
    """Page-aligned memory of this process, in huge pages as far as there are any.

    A device transfers a huge page in one go and 512 small ones in as many.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a hint, which a kernel without transparent huge pages refuses
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _pinned(size: int) -> Block:
    import torch

    block: Block = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return block
