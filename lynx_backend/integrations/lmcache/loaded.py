"""Tells a cache that was loaded from one that was computed."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

import torch

from ...keys import ChunkKey

_REMEMBERED = 65536
_SAMPLED_ELEMENTS = 1024


class Loaded:
    """What chunks looked like when they were loaded; the latest of them.

    LMCache also hands over for storing what it has loaded, perhaps after every tier has lost it.
    Encoded again it would be quantized a second time, so it must not be. The same chunk computed
    anew must: it differs in nearly every element, and a sample of them tells.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: OrderedDict[ChunkKey, bytes] = OrderedDict()

    def note(self, chunk: ChunkKey, kv: torch.Tensor) -> None:
        """``kv`` was loaded as this chunk.

        Args:
            kv: contiguous, on the CPU.
        """
        sample = _sample(kv)
        with self._lock:
            self._samples[chunk] = sample
            self._samples.move_to_end(chunk)
            while len(self._samples) > _REMEMBERED:
                self._samples.popitem(last=False)

    def is_what_was_loaded(self, chunk: ChunkKey, kv: torch.Tensor) -> bool:
        """Whether ``kv`` is what was last loaded as this chunk."""
        known = self._samples.get(chunk)
        return known is not None and known == _sample(kv)


def _sample(kv: torch.Tensor) -> bytes:
    # An odd step, so that it does not meet the same channels in every token.
    step = max(1, kv.numel() // _SAMPLED_ELEMENTS) | 1
    sample = kv.view(-1)[::step].contiguous().view(torch.uint8)
    return hashlib.blake2b(sample.numpy().tobytes(), digest_size=16).digest()
