"""How one chunk of KV cache lies in the buffers that LMCache's server hands over.

LMCache moves an engine's pages as they are and tags nearly all of them ``KV_2LTD``, so that neither
tag nor shape says which axis is which. A codec that took a buffer's rows for tokens and its columns
for channels would store everything and lose fidelity in silence. So the layout is named, and
:func:`roughness` says on real data whether the name fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...errors import InvalidInputError

#: What the names mean, as text for messages and documentation.
PAGE_LAYOUTS = {
    "planes": "[2, layers, tokens, kv_heads, head_dim]: all layers' K, then all layers' V (SGLang)",
    "fused": "[layers, tokens, kv_heads, 2, head_dim]: a head's K and V side by side (vLLM, GPU)",
    "vllm_cpu": "[layers, blocks, block row, kv_heads, 2·head_dim]: the pages of vLLM's CPU "
    "backend; a head's block holds K as [head_dim, block], then V as [block, head_dim]",
    "latent": "[layers, tokens, width]: one latent vector a token (MLA)",
}
BLOCKS = (16, 32, 64, 128, 256)
_HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
_SPAN = 32
#: Layers that are looked at, evenly spread: each costs as much as encoding several.
_LAYERS = 8
#: Of a chunk that is less rough than this, whatever way it is read, nothing can be told.
_LEAST_TELLING = 2.0


@dataclass(frozen=True)
class PageLayout:
    """The order of a buffer's elements.

    Attributes:
        name: one of :data:`PAGE_LAYOUTS`.
        heads: KV heads of the rank; 1 for ``latent``.
        head_dim: elements a head; the width for ``latent``.
        block: tokens of one page of the engine; only ``vllm_cpu`` depends on it, else 0.

    Raises:
        InvalidInputError: another name, or a number that cannot be.
    """

    name: str
    heads: int
    head_dim: int
    block: int = 0

    def __post_init__(self) -> None:
        if self.name not in PAGE_LAYOUTS:
            raise InvalidInputError(
                f"{self.name!r} is not a page layout; known are {', '.join(PAGE_LAYOUTS)}"
            )
        if self.heads < 1 or self.head_dim < 1 or (self.name == "vllm_cpu") != (self.block > 0):
            raise InvalidInputError(
                f"page layout {self.name} needs kv_heads and head_dim of at least 1, and a block "
                f"size if it is vllm_cpu, got {self.heads}, {self.head_dim} and {self.block}"
            )

    def __str__(self) -> str:
        block = f", block_tokens {self.block}" if self.block else ""
        return f"page_layout {self.name}, head_dim {self.head_dim}{block}"

    @property
    def planes(self) -> int:
        """2 for keys and values, 1 for a latent."""
        return 1 if self.name == "latent" else 2

    @property
    def row(self) -> int:
        """Elements of one token in one layer, K and V."""
        return self.planes * self.heads * self.head_dim

    @property
    def is_view(self) -> bool:
        """Whether :meth:`unpack` gives memory that the codec can decode into at once."""
        return self.name in ("planes", "latent")

    def fits(self, tokens: int) -> bool:
        """Whether a chunk of so many tokens can lie in it."""
        return not self.block or tokens % self.block == 0

    def unpack(self, buffer: torch.Tensor, layers: int, tokens: int) -> torch.Tensor:
        """A buffer along its true axes.

        Args:
            buffer: contiguous, ``layers * tokens * row`` elements in any shape.

        Returns:
            ``[planes, layers, tokens, heads, head_dim]``: a view, or for ``vllm_cpu`` a copy.
        """
        h, d = self.heads, self.head_dim
        if self.name == "fused":
            return buffer.view(layers, tokens, h, 2, d).permute(3, 0, 1, 2, 4)
        if self.name != "vllm_cpu":
            return buffer.view(self.planes, layers, tokens, h, d)
        blocks, rows = tokens // self.block, self.block
        pages = buffer.view(layers, blocks, rows, h, 2 * d).transpose(2, 3)
        k, v = pages.reshape(layers, blocks, h, 2, rows * d).unbind(3)
        kv = torch.empty(2, layers, blocks, rows, h, d, dtype=buffer.dtype)
        kv[0] = k.view(layers, blocks, h, d, rows).permute(0, 1, 4, 2, 3)
        kv[1] = v.view(layers, blocks, h, rows, d).transpose(2, 3)
        return kv.view(2, layers, tokens, h, d)

    def pack(self, kv: torch.Tensor, buffer: torch.Tensor) -> None:
        """Write a chunk into a buffer: the inverse of :meth:`unpack`.

        Args:
            kv: ``[planes, layers, tokens, heads, head_dim]``.
            buffer: contiguous, as many elements in any shape.
        """
        _, layers, tokens, h, d = kv.shape
        if self.name != "vllm_cpu":
            self.unpack(buffer, layers, tokens).copy_(kv)
            return
        blocks, rows = tokens // self.block, self.block
        k, v = kv.view(2, layers, blocks, rows, h, d).unbind(0)
        pages = torch.empty(layers, blocks, h, 2, rows * d, dtype=kv.dtype)
        pages[:, :, :, 0].view(layers, blocks, h, d, rows).copy_(k.permute(0, 1, 3, 4, 2))
        pages[:, :, :, 1].view(layers, blocks, h, rows, d).copy_(v.transpose(2, 3))
        whole = pages.view(layers, blocks, h, rows, 2 * d)
        buffer.view(layers, blocks, rows, h, 2 * d).copy_(whole.transpose(2, 3))


def roughness(kv: torch.Tensor) -> float:
    """How far keys reach within spans of 32 tokens of a channel: the squared range over the energy.

    It is what a codec that shares scales along tokens pays for. Keys keep to their channel: along
    the true axes 4 to 5 was measured (SmolLM2, Gemma 3), along false ones 5 to 27, and independent
    numbers have 17.6. A text of one or two tokens over and over has 0.03 to 1.5, of ten 2.4.

    Args:
        kv: ``[planes, layers, tokens, heads, head_dim]``.

    Returns:
        the median over layers and spans; NaN when there is nothing to tell (all equal, or fewer
        than 32 tokens).
    """
    layers, tokens = kv.shape[1:3]
    spans = tokens // _SPAN
    if not spans:
        return math.nan
    keys = kv[0, :, : spans * _SPAN].float().reshape(layers, spans, _SPAN, -1)
    reach = (keys.amax(2) - keys.amin(2)).square().sum(-1) * _SPAN
    rough = (reach / keys.square().sum((2, 3))).median()
    return float(rough) if rough > 0 else math.nan


def alternatives(layout: PageLayout, tokens: int) -> list[PageLayout]:
    """All known ways to read a buffer of the same size, but a latent; ``layout`` is the first."""
    width = layout.heads * layout.head_dim
    dims = [layout.head_dim, *(d for d in _HEAD_DIMS if d != layout.head_dim and width % d == 0)]
    found = [layout]
    for dim in dims:
        shape = {"heads": width // dim, "head_dim": dim}
        found += [replace(layout, name=name, block=0, **shape) for name in ("planes", "fused")]
        blocks = sorted({*BLOCKS, layout.block} - {0})
        found += [
            replace(layout, name="vllm_cpu", block=block, **shape)
            for block in blocks
            if tokens % block == 0
        ]
    return list(dict.fromkeys(found))


def fitting_layout(
    layout: PageLayout, buffer: torch.Tensor, layers: int, tokens: int, margin: float = 1.1
) -> PageLayout | None:
    """The known layout that fits a real chunk: ``layout``, unless another does clearly better.

    Args:
        layout: what the buffer is believed to hold. A latent has no alternatives.
        buffer: as for :meth:`PageLayout.unpack`.
        margin: how many times rougher ``layout`` may be than the best.

    Returns:
        None when the chunk tells nothing: a prompt that repeats itself is smooth along many axes.
    """
    if layout.planes == 1:
        return layout
    known = alternatives(layout, tokens)
    some = torch.arange(0, layers, -(-layers // _LAYERS))
    rough = [roughness(_layers_of(each, buffer, layers, tokens, some)) for each in known]
    least = min((r for r in rough if not math.isnan(r)), default=math.nan)
    if not least >= _LEAST_TELLING:
        return None
    if not rough[0] > margin * least:
        return layout
    # Some differ in the size of a head alone, which costs a codec nothing and shows in nothing.
    return next(each for each, r in zip(known, rough, strict=True) if r <= margin * least)


def _layers_of(
    layout: PageLayout, buffer: torch.Tensor, layers: int, tokens: int, some: torch.Tensor
) -> torch.Tensor:
    """:meth:`PageLayout.unpack` of some of the layers."""
    if layout.name == "planes":
        return layout.unpack(buffer, layers, tokens)[:, some]
    return layout.unpack(buffer.view(layers, -1)[some], len(some), tokens)


def plausible(sizes: Sequence[int], layout: PageLayout) -> tuple[int, int] | None:
    """Layers and tokens of a buffer of some shape, or None when ``layout`` does not fit it.

    Args:
        sizes: ``[layers, tokens, row]``, ``[1, layers, tokens, row]``, or
            ``[2, layers, tokens, row / 2]`` as LMCache announces them.
    """
    if len(sizes) == 4 and sizes[0] in (1, layout.planes):
        sizes = [*sizes[1:3], sizes[0] * sizes[3]]
    if len(sizes) != 3 or sizes[2] != layout.row or not layout.fits(sizes[1]):
        return None
    return sizes[0], sizes[1]
