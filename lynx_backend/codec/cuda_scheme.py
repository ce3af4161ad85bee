"""What a profile's kernels provide to the codec on a GPU, and the digests all profiles share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from .. import wire
from ..errors import CorruptObjectError, FormatMismatchError, LynxError
from ..layout import KVLayout
from .cuda import Kernels
from .cuda_memory import Place, Scratch
from .spec import CodecSpec

_DIGEST_THREADS = 32 * 9
_WARPS = 9
_SCRATCH_HEAD = 16 + 4 * 64


def address(tensor: torch.Tensor | None) -> Any:
    """Where a tensor's elements begin, as a kernel's argument."""
    return np.uint64(0 if tensor is None else tensor.data_ptr())


def digest_blocks(size: int) -> int:
    """Blocks of a payload that have a digest of their own."""
    return -(-size // wire.DIGEST_BLOCK)


class CudaScheme(ABC):
    """Launches a profile's kernels on the current device and stream; nothing here waits for them.

    Payloads are uint8 tensors whose address is a multiple of 16. ``record`` is pinned memory that
    the last kernel writes to: see ``seal`` and ``verify`` in ``kernels/digest.cu``.
    """

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec
        self._scratch = Scratch()

    @abstractmethod
    def sizes(self, layout: KVLayout, exact: int) -> tuple[int, int]:
        """Bytes of both payloads with ``exact`` exact tokens."""

    @abstractmethod
    def encode(
        self, place: Place, anchor: torch.Tensor, residual: torch.Tensor, record: torch.Tensor
    ) -> None:
        """Fill payloads that have room for ``spec.exact_tokens``; report to ``record``."""

    @abstractmethod
    def verify(
        self, place: Place, anchor: torch.Tensor, residual: torch.Tensor | None,
        digests: tuple[bytes, bytes], record: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Check payloads; the verdict goes to ``record`` and is returned as a gate for decode."""

    @abstractmethod
    def decode(
        self, place: Place, anchor: torch.Tensor, residual: torch.Tensor | None,
        gate: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Write the cache, unless the gate says that the payloads are not fit for it."""

    def scratch(self, words: int = 0) -> torch.Tensor:
        """What the kernels tell each other, with room for ``words`` counters."""
        return self._scratch.get(_SCRATCH_HEAD + 4 * (words + 1))

    def seal(
        self, kernels: Kernels, place: Place, anchor: torch.Tensor, residual: torch.Tensor,
        scratch: torch.Tensor, record: torch.Tensor,
    ) -> None:  # fmt: skip
        """The last step of an encoding: digests, and what the host must know."""
        least, rest = self.sizes(place.layout, 0)
        row = self.sizes(place.layout, 1)[0] - least if self.spec.exact_tokens else 0
        blocks = digest_blocks(least + row * self.spec.exact_tokens) + digest_blocks(rest)
        work = torch.empty(blocks, dtype=torch.int64, device=scratch.device)
        kernels.launch(
            "seal", blocks, _DIGEST_THREADS,
            (address(anchor), np.int64(least), np.int64(row), address(residual), np.int64(rest),
             address(work), address(scratch), address(record)),
        )  # fmt: skip

    def launch_verify(
        self, kernels: Kernels, before: tuple[Any, ...], pages: int, anchor: torch.Tensor,
        residual: torch.Tensor | None, digests: tuple[bytes, bytes], record: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """One launch over the payloads' blocks and ``pages`` sections; returns the gate."""
        rest = 0 if residual is None else len(residual)
        blocks = digest_blocks(len(anchor)) + digest_blocks(rest)
        scratch = self.scratch()
        work = torch.empty(1 + blocks, dtype=torch.int64, device=scratch.device)
        wanted = [np.uint64(int.from_bytes(d, "big")) for d in digests]
        kernels.launch(
            "verify", blocks + -(-pages // _WARPS), _DIGEST_THREADS,
            (*before, address(anchor), np.int64(len(anchor)), wanted[0],
             address(residual), np.int64(rest), wanted[1],
             address(work[1:]), address(scratch), address(work), address(record)),
        )  # fmt: skip
        return work


def refusal(verdict: int) -> LynxError | None:
    """The error for a sum of ``WRONG_*`` of ``kernels/digest.cu``; None for 0."""
    for bit, label in ((1, "anchor"), (2, "residual")):
        if verdict & bit:
            return CorruptObjectError(
                f"{label} payload checksum does not match: the object is damaged; delete it"
            )
    if verdict & 8:
        return FormatMismatchError("the anchor's exact token indices are not ascending and in it")
    if verdict & 4:
        return CorruptObjectError("anchor holds scales that no encoder writes; delete it")
    return None
