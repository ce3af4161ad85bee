"""The codec in NumPy: the definition that every other implementation must match byte for byte.

All arithmetic is float32, one IEEE operation at a time in the order written (no fused
multiply-add), rounding half to even. Inputs are finite and at most ``MAX_ABS`` in magnitude;
anything else is refused before it gets here. Written for reading, not for speed.

A page is ``x[tokens, channels]``: one layer's K or V over ``page_tokens`` tokens. Per channel it
has ``low`` and ``high`` in fp16, rounded outwards, and per chunk of ``spec.chunk`` tokens two bytes
that place the chunk's scale inside [low, high]. Exact tokens take no part in any scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..layout import KVLayout
from .grid import Grid, grid_of
from .spec import SINK_RATIO, SINK_SHARE, CodecSpec, PayloadPlan, packed_rows

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.unsignedinteger]

#: Largest magnitude that can be encoded: the largest fp16.
MAX_ABS = 65504.0
_f = np.float32


# -- element types ---------------------------------------------------------------------------------


def to_float(bits: Bits, dtype: str) -> F32:
    """Elements given as their bits (uint16 or uint32) as float32, exactly."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if dtype == "float16" else np.float32).astype(np.float32)


def from_float(x: F32, dtype: str) -> Bits:
    """float32 as the bits of ``dtype``, rounded half to even; x is finite.

    What lies beyond the largest fp16 becomes that: no code decodes to infinity.
    """
    if dtype == "bfloat16":
        u = x.view(np.uint32)
        return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    if dtype == "float16":
        return x.clip(_f(-MAX_ABS), _f(MAX_ABS)).astype(np.float16).view(np.uint16)
    return x.view(np.uint32)


def _fp16_outwards(x: F32, direction: float) -> npt.NDArray[np.float16]:
    """fp16 nearest to x on the side of ``direction`` (-inf or inf); zero is +0."""
    h = x.astype(np.float16)
    beyond = h.astype(np.float32) > x if direction < 0 else h.astype(np.float32) < x
    h = np.where(beyond, np.nextafter(h, np.float16(direction)), h)
    zero: npt.NDArray[np.float16] = h + np.float16(0)
    return zero


# -- bit planes ------------------------------------------------------------------------------------


def pack_codes(codes: U8, bits: int) -> U8:
    """Codes [tokens, channels] as byte rows [packed_rows, channels].

    Each channel's codes form a little-endian bit string over the tokens; row j holds byte j of
    every channel's string.
    """
    tokens, channels = codes.shape
    rows = packed_rows(tokens, bits)
    out = np.zeros((rows + 1, channels), np.uint8)
    for t in range(tokens if bits else 0):
        row, shift = divmod(t * bits, 8)
        wide = codes[t].astype(np.uint16) << shift
        out[row] |= (wide & 0xFF).astype(np.uint8)
        out[row + 1] |= (wide >> 8).astype(np.uint8)
    return out[:rows]


def unpack_codes(rows: U8, tokens: int, bits: int) -> U8:
    """The inverse of :func:`pack_codes`: codes [tokens, channels]."""
    padded = np.vstack([rows, np.zeros((1, rows.shape[1]), np.uint8)]).astype(np.uint16)
    out = np.zeros((tokens, rows.shape[1]), np.uint8)
    for t in range(tokens if bits else 0):
        row, shift = divmod(t * bits, 8)
        wide = padded[row] | (padded[row + 1] << 8)
        out[t] = (wide >> shift) & ((1 << bits) - 1)
    return out


# -- one page --------------------------------------------------------------------------------------


@dataclass
class Page:
    """A quantized page. low, high: fp16 [channels]; base, span: u8 [chunks, channels]; q: u8."""

    low: npt.NDArray[np.float16]
    high: npt.NDArray[np.float16]
    base: U8
    span: U8
    q: U8


def _chunk_scale(page: Page, chunk: int, spec: CodecSpec, grid: Grid) -> tuple[F32, F32]:
    """Offset and span of one chunk of every channel, in the cache's own units."""
    low = page.low.astype(np.float32)
    unit = (page.high.astype(np.float32) - low) / _f(255)
    base, span = page.base[chunk].astype(np.float32), page.span[chunk].astype(np.float32)
    if spec.profile == "linear":
        span = span - base
    return low + base * unit, span * unit


def encode_page(x: F32, exact: npt.NDArray[np.bool_], spec: CodecSpec) -> Page:
    """Quantize ``x`` [tokens, channels]; tokens marked in ``exact`` [tokens] get q = 0."""
    grid = grid_of(spec)
    tokens, channels = x.shape
    kept = x[~exact]
    bottom = kept.min(axis=0) if len(kept) else np.zeros(channels, np.float32)
    top = kept.max(axis=0) if len(kept) else np.zeros(channels, np.float32)
    low, high = _fp16_outwards(bottom, -np.inf), _fp16_outwards(top, np.inf)
    chunks = spec.chunks(tokens)
    shape = (chunks, channels)
    page = Page(low, high, np.zeros(shape, np.uint8), np.zeros(shape, np.uint8),
                np.zeros((tokens, channels), np.uint8))  # fmt: skip
    width = high.astype(np.float32) - low.astype(np.float32)
    per_unit = np.divide(_f(255), width, out=np.zeros_like(width), where=width > 0)
    for c in range(chunks):
        rows = slice(c * spec.chunk, min(tokens, (c + 1) * spec.chunk))
        part, keep = x[rows], ~exact[rows]
        if not keep.any():
            continue
        place = (part[keep] - low.astype(np.float32)) * per_unit
        if spec.profile == "linear":
            page.base[c] = np.clip(np.floor(place.min(axis=0)), 0, 255)
            page.span[c] = np.clip(np.ceil(place.max(axis=0)), 0, 255)
        else:
            total = np.zeros(channels, np.float32)
            for row in place:  # in token order: float addition does not commute with regrouping
                total = total + row
            mean = np.rint(total / _f(len(place)))
            page.base[c] = np.clip(mean, 0, 255)
            page.span[c] = np.clip(np.ceil(np.abs(place - mean).max(axis=0)), 0, 255)
        offset, span = _chunk_scale(page, c, spec, grid)
        per_span = np.divide(_f(grid.scale), span, out=np.zeros_like(span), where=span > 0)
        v = (part - offset) * per_span
        if grid.uniform:
            q = np.clip(np.rint(v), 0, spec.levels).astype(np.uint8)
        else:
            q = grid.codes[np.searchsorted(grid.thresholds, v, side="right")]
        page.q[rows] = np.where(keep[:, None], q, 0)
    return page


def decode_page(page: Page, spec: CodecSpec) -> F32:
    """Reconstruct [tokens, channels] in float32."""
    grid = grid_of(spec)
    out = np.empty(page.q.shape, np.float32)
    for c in range(len(page.base)):
        offset, span = _chunk_scale(page, c, spec, grid)
        rows = slice(c * spec.chunk, (c + 1) * spec.chunk)
        out[rows] = offset + grid.values[page.q[rows]] * (span / _f(grid.scale))
    return out


# -- attention sinks -------------------------------------------------------------------------------


def find_exact_tokens(bits: Bits, layout: KVLayout, spec: CodecSpec) -> npt.NDArray[np.int64]:
    """Indices, ascending, of the tokens to keep exact: at most ``spec.exact_tokens``.

    An attention sink has keys close to zero in most channels. Its few large ones stretch the
    scales of its chunk, and most of the softmax mass rides on its score.
    """
    layers = spec.sink_layers(layout.layers)
    small = np.zeros(layout.tokens, np.int64)
    for start in range(0, layout.tokens, spec.page_tokens):
        rows = slice(start, min(layout.tokens, start + spec.page_tokens))
        for layer in layers:
            size = np.abs(to_float(bits[0, layer, rows], layout.dtype))
            total = np.zeros(layout.channels, np.float32)
            for row in size:
                total = total + row
            small[rows] += (size * _f(SINK_RATIO * len(size)) < total).sum(axis=1)
    return choose_sinks(small, len(layers) * layout.channels, spec.exact_tokens)


def choose_sinks(small: npt.NDArray[np.int64], channels: int, most: int) -> npt.NDArray[np.int64]:
    """From each token's number of small key channels, out of ``channels``, to the exact tokens."""
    ranked = np.argsort(-small, kind="stable")
    enough = small[ranked] * SINK_SHARE[1] >= SINK_SHARE[0] * channels
    return np.sort(ranked[enough][:most])


# -- one chunk of cache ----------------------------------------------------------------------------


def encode(bits: Bits, layout: KVLayout, spec: CodecSpec) -> tuple[U8, U8]:
    """Payloads of anchor and residual.

    Args:
        bits: the cache's elements as uint16 or uint32 [kv, layers, tokens, channels].
    """
    plan = PayloadPlan.of(spec, layout)
    chosen = find_exact_tokens(bits, layout, spec)
    exact = np.zeros(layout.tokens, bool)
    exact[chosen] = True
    anchor = np.zeros(plan.anchor_bytes(len(chosen)), np.uint8)
    residual = np.zeros(plan.residual_bytes, np.uint8)
    for unit in range(plan.units):
        layer, kv = divmod(unit, layout.kv)
        for p in range(plan.pages):
            rows = slice(p * spec.page_tokens, min(layout.tokens, (p + 1) * spec.page_tokens))
            page = encode_page(to_float(bits[kv, layer, rows], layout.dtype), exact[rows], spec)
            biased = page.q + np.uint8(spec.bias)
            a, r = biased >> spec.residual_bits, biased & ((1 << spec.residual_bits) - 1)
            scales = (page.low.view(np.uint8), page.high.view(np.uint8), page.base, page.span)
            start = unit * plan.anchor_unit + p * plan.anchor_page
            write_pieces(anchor, start, *scales, pack_codes(a, spec.anchor_bits))
            start = unit * plan.residual_unit + p * plan.residual_page
            write_pieces(residual, start, pack_codes(r, spec.residual_bits))
    rows_exact = np.ascontiguousarray(bits[:, :, chosen].transpose(2, 1, 0, 3))
    write_pieces(anchor, plan.exact_offset, chosen.astype("<u4"), rows_exact)
    return anchor, residual


def decode(anchor: U8, residual: U8 | None, layout: KVLayout, spec: CodecSpec) -> Bits:
    """The cache's elements as bits [kv, layers, tokens, channels]; coarse without a residual."""
    plan = PayloadPlan.of(spec, layout)
    count = plan.exact_count(len(anchor), spec.exact_tokens)
    kind = np.uint32 if layout.dtype == "float32" else np.uint16
    out = np.empty((layout.kv, layout.layers, layout.tokens, layout.channels), kind)
    width = layout.channels
    for unit in range(plan.units):
        layer, kv = divmod(unit, layout.kv)
        for p in range(plan.pages):
            tokens = plan.last_len if p == plan.pages - 1 else spec.page_tokens
            chunks = spec.chunks(tokens)
            take = Reader(anchor, unit * plan.anchor_unit + p * plan.anchor_page)
            low = take(2 * width).view(np.float16)
            high = take(2 * width).view(np.float16)
            base = take(chunks * width).reshape(chunks, width)
            span = take(chunks * width).reshape(chunks, width)
            n = packed_rows(tokens, spec.anchor_bits)
            a = unpack_codes(take(n * width).reshape(n, width), tokens, spec.anchor_bits)
            q = a.astype(np.int16) << spec.residual_bits
            if residual is not None:
                take = Reader(residual, unit * plan.residual_unit + p * plan.residual_page)
                n = packed_rows(tokens, spec.residual_bits)
                r = unpack_codes(take(n * width).reshape(n, width), tokens, spec.residual_bits)
                q = q + r - spec.bias
            # Codes that no encoder writes leave the grid; as bytes they wrap around, everywhere.
            x = decode_page(Page(low, high, base, span, q.astype(np.uint8)), spec)
            start = p * spec.page_tokens
            out[kv, layer, start : start + tokens] = from_float(x, layout.dtype)
    take = Reader(anchor, plan.exact_offset)
    chosen = take(4 * count).view("<u4")
    rows = take(count * layout.row_bytes).view(kind)
    shape = (count, layout.layers, layout.kv, layout.channels)
    out[:, :, chosen] = rows.reshape(shape).transpose(2, 1, 0, 3)
    return out


class Reader:
    """Takes consecutive pieces of a payload, each as a copy."""

    def __init__(self, data: U8, start: int) -> None:
        self.data, self.at = data, start

    def __call__(self, size: int) -> U8:
        piece: U8 = self.data[self.at : self.at + size].copy()
        self.at += size
        return piece


def write_pieces(out: U8, start: int, *pieces: npt.NDArray[Any]) -> None:
    """Put the bytes of some arrays one after the other into a payload."""
    for piece in pieces:
        flat = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
        out[start : start + len(flat)] = flat
        start += len(flat)
