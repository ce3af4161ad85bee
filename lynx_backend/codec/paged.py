"""An engine's paged KV cache, as the kernels address it: views [blocks, block, heads, dim]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import InvalidInputError
from ..layout import DTYPE_BYTES, KVLayout

_DTYPES = {getattr(torch, name): name for name in DTYPE_BYTES}


class PagedCache:
    """The pages of all layers, read and written where they lie.

    Args:
        keys: for each layer a view ``[blocks, block, heads, dim]``, a head's elements side by side;
            all of one shape, dtype, device and strides.
        values: likewise, of the same shape and strides; None for latents (MLA).

    Raises:
        InvalidInputError: the views do not fit each other.
    """

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor] | None) -> None:
        views = (
            [v for layer in zip(keys, values, strict=True) for v in layer] if values else [*keys]
        )
        if not views or views[0].dim() != 4 or views[0].dtype not in _DTYPES:
            raise InvalidInputError(
                "a paged cache is one view [blocks, block, heads, dim] of bfloat16, float16 or "
                "float32 for each layer's keys and values"
            )
        first = views[0]
        for view in views:
            same = view.shape == first.shape and view.stride() == first.stride()
            if not (same and view.dtype == first.dtype and view.device == first.device):
                raise InvalidInputError(
                    f"pages differ between layers: {tuple(view.shape)} {view.dtype} {view.device} "
                    f"strides {view.stride()} and {tuple(first.shape)} {first.dtype} "
                    f"{first.device} strides {first.stride()}; give groups of equal layers apart"
                )
        if first.shape[3] > 1 and first.stride(3) != 1:
            raise InvalidInputError(
                f"a head's elements must lie side by side, got strides {first.stride()}"
            )
        self.views = tuple(views)
        self.kv = 2 if values else 1
        self.blocks, self.block, self.heads, self.dim = first.shape
        self.dtype = first.dtype
        self.device = first.device
        self.strides = first.stride()
        addresses = [view.data_ptr() for view in views]
        self.aligned = min(16, *(a & -a for a in addresses if a))
        self.table = torch.tensor(addresses, dtype=torch.int64).to(self.device)

    @classmethod
    def of(cls, layers: Sequence[torch.Tensor], form: str) -> PagedCache:
        """From an engine's tensors, one for each layer.

        Args:
            layers: the tensors.
            form: ``"kv_first"``: ``[2, blocks, block, heads, dim]`` (FlashAttention);
                ``"blocks_first"``: ``[blocks, 2, block, heads, dim]``;
                ``"fused"``: ``[blocks, heads, block, 2*dim]``, a head's key then its value;
                ``"latent"``: ``[blocks, block, latent]`` (MLA).
                SGLang's ``[slots, heads, dim]`` for keys and for values are pages of one token:
                ``PagedCache([k[:, None] for k in keys], [v[:, None] for v in values])``.

        Raises:
            InvalidInputError: another form, or tensors that do not have it.
        """
        axes = {"kv_first": 5, "blocks_first": 5, "fused": 4, "latent": 3}
        if form not in axes:
            raise InvalidInputError(f"unknown form {form!r}; available: {', '.join(axes)}")
        for layer in layers:
            pair = {"kv_first": 0, "blocks_first": 1}.get(form)
            if layer.dim() != axes[form] or (pair is not None and layer.shape[pair] != 2):
                raise InvalidInputError(f"form {form!r} does not have shape {tuple(layer.shape)}")
        if form == "kv_first":
            return cls([x[0] for x in layers], [x[1] for x in layers])
        if form == "blocks_first":
            return cls([x[:, 0] for x in layers], [x[:, 1] for x in layers])
        if form == "latent":
            return cls([x.unsqueeze(2) for x in layers], None)
        halves = [x.transpose(1, 2).chunk(2, -1) for x in layers]
        return cls([k for k, _ in halves], [v for _, v in halves])

    def slots(self, block_table: torch.Tensor, tokens: int) -> torch.Tensor:
        """int64 [tokens]: the slots of a sequence's tokens, from its blocks in order."""
        at = torch.arange(tokens, device=block_table.device)
        return block_table.long()[at // self.block] * self.block + at % self.block

    def at(self, slots: torch.Tensor) -> Slots:
        """Some tokens of the cache, in the order of ``slots`` (int64 [tokens], on its device)."""
        return Slots(self, slots)


@dataclass(frozen=True)
class Slots:
    """Tokens of a paged cache: what a codec encodes and decodes into, like a tensor.

    Attributes:
        cache: the pages.
        slots: int64 [tokens], ``block * block_size + offset`` each, on the cache's device. Their
            values are the device's: one outside the cache is not written to, and makes encoding
            fail.
    """

    cache: PagedCache
    slots: torch.Tensor

    def __post_init__(self) -> None:
        s = self.slots
        if s.dim() != 1 or s.dtype != torch.int64 or s.device != self.cache.device:
            raise InvalidInputError(
                f"slots are int64 [tokens] on {self.cache.device}, got {s.dtype} "
                f"{tuple(s.shape)} on {s.device}"
            )
        if not s.is_contiguous():
            object.__setattr__(self, "slots", s.contiguous())

    @property
    def layout(self) -> KVLayout:
        """The axes of these tokens as a chunk."""
        c = self.cache
        layers = len(c.views) // c.kv
        return KVLayout(c.kv, layers, len(self.slots), c.heads, c.dim, _DTYPES[c.dtype])
