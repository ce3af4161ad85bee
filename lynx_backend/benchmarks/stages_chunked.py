"""The profiles ``linear`` and ``paper`` with a switch for every stage, in torch, on any device.

With all switches as they are by default this is what :mod:`..codec.reference` defines: the same
reconstructions and the same bits (``tests/test_benchmark_stages.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..codec import CodecSpec
from ..codec.grid import grid_of
from ..codec.reference import find_exact_tokens
from ..layout import KVLayout
from .stages_adaptive import Simulated

Tensor = torch.Tensor
_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.float32: torch.uint32}


@dataclass(frozen=True)
class ChunkedStages:
    """What is on.

    Attributes:
        page_scale: a chunk's scale is two bytes within the page's range; off: two fp16.
        centre: ``paper``: deviations are from the chunk's mean; off: from the page's middle, which
            costs no bits.
        zero: ``paper``: ``"two"`` anchor codes stand for 0, a positive and a negative one;
            ``"one"``: there is one, and a code is spare; ``"signed"``: the two stand for the middle
            of what they cover.
        bias: the residual is a centred correction; off: the anchor is the code cut off.
    """

    page_scale: bool = True
    centre: bool = True
    zero: str = "two"
    bias: bool = True


class Chunked:
    """One variant of a profile; chunk, companding and exact tokens are those of ``spec``."""

    def __init__(self, stages: ChunkedStages, spec: CodecSpec) -> None:
        self.stages, self.spec = stages, spec
        grid = grid_of(spec)
        self._scale, self._uniform = grid.scale, grid.uniform
        self._thresholds, self._values = map(torch.from_numpy, (grid.thresholds, grid.values))
        self._codes = torch.from_numpy(grid.codes).long()
        self._coarse = self._values
        if stages.zero == "one":
            self._merge_zeros()
        elif stages.zero == "signed":
            most, step = int(self._scale), 1 << spec.residual_bits
            self._coarse = self._values.clone()
            inside = self._values[most + step + step // 4]
            self._coarse[most], self._coarse[most + step] = -inside, inside

    def _merge_zeros(self) -> None:
        """Magnitudes 0..M and their signs as one line of codes -M..M; there is one 0."""
        most = int(self._scale)
        positive = self._thresholds[self._thresholds > 0]
        self._thresholds = torch.cat([-positive.flip(0), positive])
        self._codes = torch.arange(2 * most + 1)
        magnitudes = self._values[self._values > 0]
        values = torch.cat([-magnitudes.flip(0), torch.zeros(1), magnitudes])
        self._values = self._coarse = torch.nn.functional.pad(values, (0, 256 - len(values)))

    def __call__(self, kv: Tensor) -> Simulated:
        """``kv`` [2, layers, tokens, kv_heads, head_dim], bfloat16, float16 or float32."""
        size = self.spec.page_tokens
        anchors: list[Tensor] = []
        fulls: list[Tensor] = []
        bits = 0.0
        for page in kv.split(size, dim=2):
            exact = self._exact(page)
            anchor, full = self._page(page.float().flatten(3), exact)
            kept = exact[None, None, :, None]
            for out, part in ((anchors, anchor), (fulls, full)):
                out.append(torch.where(kept, page.float().flatten(3), part).view_as(page))
            bits += self._page_bits(page, int(exact.sum()))
        spent = bits / kv.numel()
        return Simulated(
            torch.cat(anchors, 2), torch.cat(fulls, 2), spent, spent + self.spec.residual_bits
        )

    def _exact(self, page: Tensor) -> Tensor:
        """bool [tokens]: kept as they are."""
        exact = torch.zeros(page.shape[2], dtype=torch.bool, device=page.device)
        if self.spec.exact_tokens:
            kv, layers, tokens, heads, d = page.shape
            layout = KVLayout(kv, layers, tokens, heads, d, str(page.dtype).removeprefix("torch."))
            raw: Any = page.flatten(3).cpu().contiguous().view(_BITS[page.dtype]).numpy()
            exact[torch.from_numpy(find_exact_tokens(raw, layout, self.spec)).to(page.device)] = 1
        return exact

    def _page_bits(self, page: Tensor, exact: int) -> float:
        kv, layers, tokens, heads, d = page.shape
        rows = kv * layers * heads * d
        scale = 16 if self.spec.profile == "linear" or self.stages.centre else 8
        if not self.stages.page_scale:
            scale *= 2
        side = self.spec.chunks(tokens) * scale + (32 if self.stages.page_scale else 0)
        stored = exact * (32 + rows * 8 * page.element_size())
        return rows * (tokens * self.spec.anchor_bits + side) + stored

    def _page(self, x: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
        """Anchor and full of [kv, layers, tokens, channels]."""
        hidden = exact[None, None, :, None]
        nothing = bool(exact.all())
        low = _fp16(x.masked_fill(hidden, torch.inf).amin(2) if not nothing else x[:, :, 0] * 0, 0)
        high = _fp16(
            x.masked_fill(hidden, -torch.inf).amax(2) if not nothing else x[:, :, 0] * 0, 1
        )
        anchors, fulls = [], []
        for part, keep in zip(
            x.split(self.spec.chunk, 2), (~exact).split(self.spec.chunk), strict=True
        ):
            offset, span = self._chunk_scale(part, keep, low, high)
            v = (part - offset) * _ratio(self._scale, span)
            coarse, fine = self._codes_of(v)
            step = span / torch.full_like(span, self._scale)
            anchors.append(offset + coarse * step)
            fulls.append(offset + fine * step)
        return torch.cat(anchors, 2), torch.cat(fulls, 2)

    def _chunk_scale(
        self, part: Tensor, keep: Tensor, low: Tensor, high: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Offset and span [kv, layers, 1, channels], in the cache's units."""
        linear = self.spec.profile == "linear"
        if not keep.any():
            zero = torch.zeros_like(low)[:, :, None]
            return low[:, :, None] + zero, zero
        kept = part[:, :, keep]
        if not self.stages.page_scale:
            if linear:
                bottom, top = _fp16(kept.amin(2, keepdim=True), 0), _fp16(kept.amax(2, True), 1)
                return bottom, top - bottom
            middle = (low + high)[:, :, None] / 2
            mean = kept.mean(2, keepdim=True).half().float() if self.stages.centre else middle
            return mean, _fp16((kept - mean).abs().amax(2, keepdim=True), 1)
        place = (kept - low[:, :, None]) * _ratio(255.0, high - low)[:, :, None]
        if linear:
            base = place.amin(2).floor().clamp(0, 255)
            span = place.amax(2).ceil().clamp(0, 255) - base
        else:
            total = torch.zeros_like(low)
            for t in range(place.shape[2]):  # in the definition's order
                total = total + place[:, :, t]
            base = torch.full_like(low, 127.5)
            if self.stages.centre:
                base = (total / place.shape[2]).round().clamp(0, 255)
            span = (place - base[:, :, None]).abs().amax(2).ceil().clamp(0, 255)
        unit = (high - low) / torch.full_like(low, 255.0)
        return (low + base * unit)[:, :, None], (span * unit)[:, :, None]

    def _codes_of(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """What anchor and full code of each position on a chunk's scale stand for."""
        thresholds, codes, coarse, values = (
            t.to(v.device) for t in (self._thresholds, self._codes, self._coarse, self._values)
        )
        if self._uniform:
            q = v.round().clamp(0, self.spec.levels).long()
        else:
            q = codes[torch.bucketize(v, thresholds, right=True)]
        bias = self.spec.bias if self.stages.bias else 0
        r = self.spec.residual_bits
        return coarse[(q + bias) >> r << r], values[q]


def _fp16(x: Tensor, up: int) -> Tensor:
    """The nearest fp16 above or below, as float32."""
    h = x.half()
    wrong = h.float() < x if up else h.float() > x
    towards = torch.full_like(h, torch.inf if up else -torch.inf)
    return torch.where(wrong, h.cpu().nextafter(towards.cpu()).to(h.device), h).float() + 0.0


def _ratio(a: float, b: Tensor) -> Tensor:
    return torch.where(b > 0, torch.full_like(b, a) / b, torch.zeros_like(b))
