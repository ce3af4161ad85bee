"""Where a cache lies on a GPU, as kernels/cache.cuh takes it, and memory the kernels need."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..layout import DTYPE_BYTES, KVLayout
from .paged import Slots

_CODES = {"bfloat16": 0, "float16": 1, "float32": 2}


@dataclass(frozen=True)
class Place:
    """A cache's memory. ``defines`` choose the kernels, ``args`` say where.

    Attributes:
        layout: the axes.
        defines: DTYPE, HEADS, DIM, BLOCK and the widest VEC that strides and addresses allow.
        args: for ``CACHE_ARGS``.
    """

    layout: KVLayout
    defines: dict[str, int]
    args: tuple[Any, ...]

    @property
    def kind(self) -> tuple[int, ...]:
        """The same for places that take the same kernels."""
        return tuple(self.defines.values())

    @classmethod
    def of(cls, kv: torch.Tensor | Slots, layout: KVLayout) -> Place:
        """Of a tensor [kv, layers, tokens, heads, dim] whose last axis is dense, or of slots."""
        strides: tuple[int, ...]
        steps: tuple[int, ...]
        if isinstance(kv, Slots):
            cache = kv.cache
            block, token, head, _ = cache.strides
            where, slots, aligned = cache.table.data_ptr(), kv.slots.data_ptr(), cache.aligned
            strides = (block, cache.blocks * cache.block, token, head)
            steps = (block, token, head)
            size = cache.block
        else:
            where, slots, size = kv.data_ptr(), 0, 0
            aligned = where & -where if where else 16
            strides = kv.stride()[:4]
            steps = tuple(s for s, n in zip(strides, kv.shape[:4], strict=True) if n > 1)
        width = DTYPE_BYTES[layout.dtype]
        vec = min(16, aligned) // width
        for step in (*steps, layout.head_dim):
            vec = min(vec, step & -step) if step else vec
        defines = {
            "DTYPE": _CODES[layout.dtype], "HEADS": layout.heads, "DIM": layout.head_dim,
            "BLOCK": size, "VEC": max(1, vec),
        }  # fmt: skip
        numbers = (np.int64(s) for s in strides)
        args = (np.uint64(where), np.uint64(slots), *numbers, np.int32(layout.kv))
        return cls(layout, defines, args)


class Scratch:
    """Memory that the kernels of one stream use one after the other, zero between calls."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], torch.Tensor] = {}

    def get(self, size: int) -> torch.Tensor:
        """At least ``size`` bytes for the current stream; what is new is zero."""
        stream = torch.cuda.current_stream()
        key = (stream.device_index, stream.cuda_stream)
        found = self._of.get(key)
        if found is None or len(found) < size:
            room = 1 << max(16, (size - 1).bit_length())
            found = self._of[key] = torch.zeros(room, dtype=torch.uint8, device="cuda")
        return found


class Records:
    """Small pieces of pinned host memory that kernels report into."""

    WORDS = 8
    _GROW = 256

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []
        # Records come back in whatever thread drops what had them, perhaps while it is in here.
        self._used: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()

    def take(self) -> torch.Tensor:
        """An int64 [WORDS] tensor that no kernel writes to any more."""
        with self._lock:
            while self._used and self._used[0][0].query():
                self._free.append(self._used.popleft()[1])
            if not self._free:
                more = torch.zeros((self._GROW, self.WORDS), dtype=torch.int64, pin_memory=True)
                self._free.extend(more)
            return self._free.pop()

    def give_back(self, record: torch.Tensor, event: torch.cuda.Event) -> None:
        """``record`` may be used again once ``event`` has come. Waits for no lock: a finalizer."""
        self._used.append((event, record))
