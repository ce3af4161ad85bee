"""The arena: no two blocks overlap, and what is no longer looked at is given out again."""

from __future__ import annotations

import errno
import gc
import mmap
import random
import threading

import numpy as np
import pytest
import torch

from lynx_backend.errors import InvalidInputError
from lynx_backend.tiers.arena import Arena, page_memory


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_block_comes_back_with_its_last_view():
    arena = Arena(4096, align=4096)
    block = arena.take(4000)
    assert block.shape == (4000,)
    view = memoryview(block)[10:].toreadonly()
    del block
    assert arena.take(1) is None
    tensor = torch.frombuffer(view.cast("B"), dtype=torch.uint8)
    array = np.frombuffer(view, np.uint8)[5:]
    del view
    assert arena.take(1) is None
    del tensor
    assert arena.take(1) is None
    del array
    assert arena.take(1) is not None


def test_freed_neighbours_become_one():
    arena = Arena(6 * 64)
    blocks = [arena.take(64) for _ in range(6)]
    assert arena.take(1) is None
    for i in (0, 2, 4, 1, 3):
        blocks[i] = None
    assert arena.free_bytes == 5 * 64
    assert arena.take(5 * 64) is not None


def test_two_sizes_at_two_ends_leave_no_gaps():
    arena = Arena(8 * 64)
    large, small = [arena.take(3 * 64) for _ in range(2)], [arena.take(64, True) for _ in range(2)]
    large[0] = small[0] = None
    assert arena.take(3 * 64) is not None
    assert small


def test_random_use_never_overlaps_and_leaks_nothing():
    rng = random.Random(5)
    arena = Arena(1 << 16)
    held: list[tuple[int, np.ndarray]] = []
    for step in range(3000):
        if held and rng.random() < 0.5:
            value, block = held.pop(rng.randrange(len(held)))
            assert (block == value).all(), "somebody else wrote here"
            del block
        elif (block := arena.take(rng.randrange(1, 5000), rng.random() < 0.5)) is not None:
            block[:] = step % 251
            held.append((step % 251, block))
            assert block.ctypes.data % 64 == 0
            del block
    assert len(held) > 3
    held.clear()
    assert arena.free_bytes == 1 << 16


def test_a_cycle_collected_inside_the_arena_does_no_harm():
    arena = Arena(1 << 16)
    for _ in range(200):
        cycle: list[object] = [arena.take(1000)]
        cycle.append(cycle)
        del cycle
        arena.take(10)
    gc.collect()
    assert arena.free_bytes == 1 << 16


def test_threads():
    arena = Arena(1 << 16)
    wrong: list[int] = []

    def work(value: int) -> None:
        for _ in range(500):
            block = arena.take(3000)
            if block is not None:
                block[:] = value
                if not (block == value).all():
                    wrong.append(value)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert arena.free_bytes == 1 << 16


def test_sizes_below_one_are_refused():
    with pytest.raises(InvalidInputError):
        Arena(0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned():
    block = Arena(1 << 20, pinned=True).take(1000)
    assert torch.from_numpy(block).is_pinned()


def test_a_kernel_without_huge_pages_gives_memory_too(monkeypatch: pytest.MonkeyPatch):
    class OfThatKernel(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            assert option == mmap.MADV_HUGEPAGE
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", OfThatKernel)
    memory = page_memory(mmap.PAGESIZE)
    assert isinstance(memory, OfThatKernel)
    assert memory[:] == bytes(mmap.PAGESIZE)
    assert Arena(4096).take(4096) is not None
