"""What a profile's implementation provides, in terms of memory, to the public codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..keys import Part
from ..layout import KVLayout
from .spec import CodecSpec

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class CacheMemory:
    """The elements of a cache where they lie; a token's channels are side by side.

    Attributes:
        words: uint16 or uint32 [span]: the memory from the first element to the last.
        dtype: code of the element type, as in ``cpu.DTYPE_CODES``.
        strides: int64 [3]: elements between kv, layers and tokens.
        layout: the axes.
    """

    words: Words
    dtype: int
    strides: Ints
    layout: KVLayout

    def rows(self, tokens: Ints) -> Words:
        """A copy of some tokens' elements, [token, layer, kv, channel]."""
        return np.ascontiguousarray(self._elements()[:, :, tokens].transpose(2, 1, 0, 3))

    def put_rows(self, tokens: Ints, rows: Words) -> None:
        """The inverse of :meth:`rows`."""
        self._elements()[:, :, tokens] = rows.transpose(2, 1, 0, 3)

    def _elements(self) -> Words:
        """The same memory as [kv, layer, token, channel]."""
        at, step = self.layout, self.words.itemsize
        shape = (at.kv, at.layers, at.tokens, at.channels)
        strides = (*(int(s) * step for s in self.strides), step)
        return np.lib.stride_tricks.as_strided(self.words, shape, strides)


class Spread(Protocol):
    """Runs a kernel over ranges that together cover ``count`` pieces of work, on some threads."""

    def __call__(self, run: Callable[[int, int], Any], count: int) -> list[Any]: ...


class Scheme(ABC):
    """Encodes into and decodes from payloads; headers, tensors and threads are the codec's."""

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    @abstractmethod
    def encode(
        self, memory: CacheMemory, make: Callable[[int], Bytes], spread: Spread
    ) -> tuple[list[Bytes], int]:
        """Payloads of anchor and residual, each in memory that ``make(size)`` gave.

        Returns:
            the payloads, and a number that is not 0 when the cache cannot be encoded.
        """

    @abstractmethod
    def check_size(self, layout: KVLayout, part: Part, payload_bytes: int) -> None:
        """Raise FormatMismatchError when no payload of this layout and part has this size."""

    @abstractmethod
    def check_content(self, layout: KVLayout, anchor: Bytes) -> None:
        """Raise CorruptObjectError or FormatMismatchError for what no encoder writes."""

    @abstractmethod
    def decode(
        self, anchor: Bytes, residual: Bytes | None, memory: CacheMemory, spread: Spread
    ) -> None:
        """Write the cache; from checked payloads."""
