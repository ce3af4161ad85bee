"""The ``adaptive`` profile in NumPy: the definition that every implementation matches bit for bit.

All arithmetic is float32, one IEEE operation at a time in the order written; ``sqrt`` and division
are IEEE's. What decides about bits is integer. Everything happens for each layer, head and page of
at most 256 tokens:

A. *Row.* The token with the smallest values, in the sum of squares, is the attention sink where a
   head has one. Its row is kept apart, shapes no scale, and has 8 bits more than the channel's
   other codes: they lie apart, the rest where the row's codes would be.
B. *Rotation.* Keys are turned back by the rotary angle that their place in the page adds.
C. *Scale.* Values are divided by a step of 2^(1/4) that follows their size, token by token; keys by
   one power of two for the page.
D. *Grid.* Each channel has fp16 ``low`` and ``range`` and a width in bits. A head's widths add up
   to the same sum on every page: bits go, one by one, to the channel whose error weighs most, by
   its range and by the calibration's priority. Codes are companded by a quadratic curve.

A width's codes are the anchor; the residual adds ``residual_bits`` to each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..layout import KVLayout
from .calibration import Calibration
from .reference import (
    Reader,
    from_float,
    pack_codes,
    to_float,
    unpack_codes,
    write_pieces,
)
from .spec import CodecSpec, packed_rows

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.unsignedinteger]
Array = npt.NDArray[Any]

ALIGN = 8
MAX_WIDTH = 8
SCALE_STEPS = 15
_f = np.float32
MIN_RANGE = _f(2.0**-14)
MIN_ROW_RANGE = _f(2.0**-100)
MIN_POWER = _f(2.0**-60)
LEAST_EXPONENT = -100
QUARTERS = np.array([2 ** (i / 4) for i in range(4)], np.float32)
INVERSE_QUARTERS = np.array([2 ** (-i / 4) for i in range(4)], np.float32)


# -- sizes -----------------------------------------------------------------------------------------


def total_bits(spec: CodecSpec, layout: KVLayout, kv: int) -> int:
    """Sum of the widths of one head's channels.

    The budget is ``anchor_bits + 0.629`` bits an element with all side information of a full page,
    3/16 less for keys and 3/16 more for values, whose errors weigh more.
    """
    d = layout.head_dim
    token_scale = has_token_scale(layout, kv)
    shift = (375 if token_scale else -375) if layout.kv == 2 else 0
    budget = 16 * d * (2000 * spec.anchor_bits + 1258 + shift)
    side = 125 * (44 * d + 48) + (128000 if token_scale else 0)
    return max(d, min(MAX_WIDTH * d, (budget - side) // 32000))


def has_token_scale(layout: KVLayout, kv: int) -> bool:
    """Values have a scale for each token; keys, and the latents of MLA, one for each page."""
    return layout.kv == 2 and kv == 1


@dataclass(frozen=True)
class AdaptivePlan:
    """Where everything lies. A unit is ``layer * kv + k``; sizes in bytes, padded to 8.

    A page's section of the anchor: low and range (fp16 [channels] each), widths less one (nibbles
    [channels]), then for each head: index of the row's token (u8), exponent (i8), the row's low and
    range (bf16 each); the row's upper 8 bits (u8 [channels]); for values the token scales (nibbles
    [token][head]); last the code planes, one for each width from 8 down to 1, of the channels that
    have it, in order. The section of the residual is one plane of all channels.
    """

    units: int
    pages: int
    last_len: int
    anchor_page: tuple[int, ...]
    anchor_last: tuple[int, ...]
    residual_page: int
    residual_last: int

    @classmethod
    def of(cls, spec: CodecSpec, layout: KVLayout) -> AdaptivePlan:
        """The plan for one chunk."""
        full = spec.page_tokens
        pages = layout.pages(full)
        last = layout.tokens - full * (pages - 1)

        def pad(size: int) -> int:
            return -(-size // ALIGN) * ALIGN

        def anchor(tokens: int, kv: int) -> int:
            codes = -(-tokens // 8) * layout.heads * total_bits(spec, layout, kv)
            return pad(header_bytes(layout, kv, tokens) + codes)

        def residual(tokens: int) -> int:
            return pad(layout.channels * packed_rows(tokens, spec.residual_bits))

        each = range(layout.kv)
        return cls(
            layout.layers * layout.kv, pages, last,
            tuple(anchor(full, k) for k in each), tuple(anchor(last, k) for k in each),
            residual(full), residual(last),
        )  # fmt: skip

    def anchor_start(self, unit: int, page: int) -> int:
        """Offset of a page's section in the anchor."""
        kv = len(self.anchor_page)
        layer, k = divmod(unit, kv)
        unit_bytes = [
            full * (self.pages - 1) + last
            for full, last in zip(self.anchor_page, self.anchor_last, strict=True)
        ]
        return layer * sum(unit_bytes) + sum(unit_bytes[:k]) + page * self.anchor_page[k]

    def residual_start(self, unit: int, page: int) -> int:
        """Offset of a page's section in the residual."""
        whole = self.residual_page * (self.pages - 1) + self.residual_last
        return unit * whole + page * self.residual_page

    @property
    def anchor_bytes(self) -> int:
        """Size of the anchor's payload."""
        return self.anchor_start(self.units, 0)

    @property
    def residual_bytes(self) -> int:
        """Size of the residual's payload."""
        return self.residual_start(self.units, 0)


def header_bytes(layout: KVLayout, kv: int, tokens: int) -> int:
    """Bytes of a page's section before its code planes."""
    c, h = layout.channels, layout.heads
    scales = (tokens * h + 1) // 2 if has_token_scale(layout, kv) else 0
    return 4 * c + (c + 1) // 2 + 6 * h + c + scales


# -- pieces ----------------------------------------------------------------------------------------


def pack_nibbles(x: Array) -> U8:
    """Values below 16 in order, two a byte, the first in the low half."""
    flat = x.reshape(-1).astype(np.uint8)
    pairs: U8 = np.append(flat, np.zeros(len(flat) % 2, np.uint8)).reshape(-1, 2)
    return pairs[:, 0] | np.left_shift(pairs[:, 1], np.uint8(4))


def unpack_nibbles(data: U8, count: int) -> U8:
    """The inverse of :func:`pack_nibbles`."""
    return np.stack([data & 15, data >> 4], -1).reshape(-1)[:count]


def fp16_down(x: F32) -> F32:
    """The largest fp16 <= x, as float32; zero is +0."""
    h = x.astype(np.float16)
    h = np.where(h.astype(np.float32) > x, np.nextafter(h, np.float16(-np.inf)), h)
    down: F32 = (h + np.float16(0)).astype(np.float32)
    return down


def bf16_down(x: F32) -> F32:
    """The largest bfloat16 <= x, as float32; zero is +0."""
    u = x.view(np.uint32)
    cut = u & np.uint32(0xFFFF0000)
    down = np.where((u >> 31 == 1) & (u != cut), cut + np.uint32(0x10000), cut)
    return down.astype(np.uint32).view(np.float32) + _f(0)


def sum_of_squares(x: F32) -> F32:
    """Over the last axis, by halves: element i takes element i + half, half = 2^k .. 1."""
    d = x.shape[-1]
    half = 1 << (d - 1).bit_length()
    s = np.zeros((*x.shape[:-1], half), np.float32)
    s[..., :d] = x * x
    while half > 1:
        half //= 2
        s = s[..., :half] + s[..., half : 2 * half]
    total: F32 = s[..., 0]
    return total


def quarter_exponent(power: F32) -> npt.NDArray[np.int32]:
    """floor(4·log2(sqrt(power)) + 1/2) for power >= 2^-60, by its bits and two comparisons."""
    u = power.view(np.uint32)
    mantissa = u & 0x7FFFFF
    e = 2 * ((u >> 23).astype(np.int32) - 127)
    low, high = (QUARTERS[i].view(np.uint32) & 0x7FFFFF for i in (1, 3))
    out: npt.NDArray[np.int32] = e + (mantissa >= low) + (mantissa >= high)
    return out


def power_of_two(e: Array) -> F32:
    """2^e, exactly; e in [-126, 127]."""
    return ((e.astype(np.int32) + 127) << 23).view(np.float32)


def widths_of(ranges: F32, priority: Array, total: int) -> npt.NDArray[np.int64]:
    """Bits of each channel [heads, head_dim], from 1 to 8, adding up to ``total`` in every head.

    Every channel has one bit. The others go, one at a time, to the channel with the highest level,
    the lowest channel among equals; a bit lowers its channel's level by an octave.
    """
    heads, d = ranges.shape
    level = ranges.astype(np.float16).view(np.int16).astype(np.int64) + 128 * priority
    wanted = (level[..., None] - 1024 * np.arange(1, MAX_WIDTH)).reshape(heads, -1)
    order = np.argsort(-wanted, axis=-1, kind="stable")[:, : total - d]
    given = np.zeros_like(wanted)
    np.put_along_axis(given, order, 1, axis=-1)
    return 1 + given.reshape(heads, d, MAX_WIDTH - 1).sum(-1)


def compand(u: F32, beta: float) -> F32:
    """Spread [0, 1] outwards from its middle: the inverse of :func:`expand`."""
    if beta == 0:
        return u
    z = u + u - _f(1)
    root = np.sqrt(_f((1 - beta) ** 2) + _f(4 * beta) * np.abs(z))
    m = (root - _f(1 - beta)) * _f(1 / (2 * beta))
    return (np.copysign(m, z) + _f(1)) * _f(0.5)


def expand(w: F32, beta: float) -> F32:
    """z·((1-β) + β|z|) on [-1, 1], shifted to [0, 1]."""
    if beta == 0:
        return w
    z = w + w - _f(1)
    return (z * (_f(1 - beta) + _f(beta) * np.abs(z)) + _f(1)) * _f(0.5)


# -- one page of one unit, all heads: x is [tokens, heads, head_dim] -------------------------------


@dataclass
class AdaptivePage:
    """What of a page crosses the wire, as numbers. [heads, head_dim] unless said otherwise.

    star: token of the row [heads]; exponent [heads]; row_low, row_range [heads, 1]; steps: token
    scales below the exponent [tokens, heads]; row, q: codes with the residual's bits in them.
    """

    low: F32
    ranges: F32
    width: npt.NDArray[np.int64]
    star: npt.NDArray[np.int64]
    exponent: npt.NDArray[np.int32]
    row_low: F32
    row_range: F32
    row: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int32]
    q: npt.NDArray[np.int64]


def rotate(x: F32, cos: F32, sin: F32, back: bool) -> F32:
    """Turn pairs of channels by their angles, or back. cos, sin: [tokens, pairs]."""
    pairs = cos.shape[1]
    a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    c, s = cos[: len(x), None], sin[: len(x), None]
    out = x.copy()
    if back:
        out[..., :pairs], out[..., pairs : 2 * pairs] = a * c + b * s, b * c - a * s
    else:
        out[..., :pairs], out[..., pairs : 2 * pairs] = a * c - b * s, b * c + a * s
    return out


def find_row(values: F32) -> tuple[npt.NDArray[np.int64], F32]:
    """Each head's token with the smallest values, the first among equals; all sums of squares."""
    squares = sum_of_squares(values)
    return squares.argmin(0), squares


def encode_page(
    x: F32, star: npt.NDArray[np.int64], squares: F32 | None, cos: F32, sin: F32,
    priority: Array, total: int, spec: CodecSpec,
) -> AdaptivePage:  # fmt: skip
    """Quantize a page; squares [tokens, heads] for values, None for keys and latents."""
    tokens, heads, d = x.shape
    r = spec.residual_bits
    other = np.arange(tokens)[:, None] != star
    y = rotate(x, cos, sin, back=True)
    steps = np.zeros((tokens, heads), np.int32)
    if squares is None:
        most = np.where(other[..., None], np.abs(y), _f(0)).max((0, 2))
        exponent = np.maximum(np.frexp(most)[1], LEAST_EXPONENT).astype(np.int32)
        exponent[most == 0] = LEAST_EXPONENT
        y = y * power_of_two(-exponent)[:, None]
    else:
        e = quarter_exponent(np.maximum(squares / _f(d), MIN_POWER))
        top = np.where(other, e, np.iinfo(np.int32).min).max(0)
        exponent = np.where(tokens > 1, top, e[0]).astype(np.int32)
        steps = np.where(other, np.minimum(exponent - e, SCALE_STEPS), 0).astype(np.int32)
        n = exponent - steps
        y = y * (INVERSE_QUARTERS[n & 3] * power_of_two(-(n >> 2)))[..., None]

    rest = other[..., None]
    bottom = (
        np.where(rest, y, _f(np.inf)).min(0) if tokens > 1 else np.zeros((heads, d), np.float32)
    )
    top_y = (
        np.where(rest, y, _f(-np.inf)).max(0) if tokens > 1 else np.zeros((heads, d), np.float32)
    )
    low = fp16_down(bottom)
    ranges = np.maximum(-fp16_down(low - top_y), MIN_RANGE)
    width = widths_of(ranges, priority, total)
    u = np.clip((y - low) * (_f(1) / ranges), _f(0), _f(1))
    levels = power_of_two(width + r)
    place = np.floor(compand(u, spec.alpha) * levels)
    q = np.where(rest, np.clip(place, _f(0), levels - _f(1)), _f(0)).astype(np.int64)

    row = x[star, np.arange(heads)]
    row_low = bf16_down(row.min(1, keepdims=True))
    row_range = np.maximum(-bf16_down(row_low - row.max(1, keepdims=True)), MIN_ROW_RANGE)
    levels = power_of_two(8 + width + r)
    place = np.floor((row - row_low) / row_range * levels)
    row_code = np.clip(place, _f(0), levels - _f(1)).astype(np.int64)
    return AdaptivePage(low, ranges, width, star, exponent, row_low, row_range, row_code, steps, q)


def decode_page(
    page: AdaptivePage, fine: bool, token_scale: bool, cos: F32, sin: F32, spec: CodecSpec
) -> F32:
    """Reconstruct [tokens, heads, head_dim]; from the anchor's bits alone unless ``fine``."""
    r = spec.residual_bits
    drop = 0 if fine else r
    bits = page.width + r - drop
    w = ((page.q >> drop).astype(np.float32) + _f(0.5)) * power_of_two(-bits)
    y = page.low + expand(w, spec.alpha) * page.ranges
    if token_scale:
        n = page.exponent - page.steps
        y = y * (QUARTERS[n & 3] * power_of_two(n >> 2))[..., None]
    else:
        y = y * power_of_two(page.exponent)[:, None]
    x = rotate(y, cos, sin, back=False)
    part = ((page.row >> drop).astype(np.float32) + _f(0.5)) * power_of_two(-(8 + bits))
    x[page.star, np.arange(x.shape[1])] = page.row_low + part * page.row_range
    return x


# -- one chunk of cache ----------------------------------------------------------------------------


def _tables(calibration: Calibration, layout: KVLayout, layer: int, kv: int) -> tuple[Any, ...]:
    """cos, sin and priority of a unit; only keys have them."""
    table = calibration.table[layer]
    cos, sin = calibration.cos[table], calibration.sin[table]
    priority = calibration.priority[layer].astype(np.int64)
    if has_token_scale(layout, kv):
        return cos[:, :0], sin[:, :0], np.zeros_like(priority)
    return cos, sin, priority


def encode(
    bits: Bits, layout: KVLayout, spec: CodecSpec, calibration: Calibration
) -> tuple[U8, U8]:
    """Payloads of anchor and residual; bits are uint16 or uint32 [kv, layers, tokens, channels]."""
    plan = AdaptivePlan.of(spec, layout)
    anchor, residual = (
        np.zeros(plan.anchor_bytes, np.uint8),
        np.zeros(plan.residual_bytes, np.uint8),
    )
    r, heads = spec.residual_bits, layout.heads
    for unit in range(plan.units):
        layer, kv = divmod(unit, layout.kv)
        cos, sin, priority = _tables(calibration, layout, layer, kv)
        for p in range(plan.pages):
            rows = slice(p * spec.page_tokens, min(layout.tokens, (p + 1) * spec.page_tokens))
            x, values = (
                to_float(bits[k, layer, rows], layout.dtype).reshape(-1, heads, layout.head_dim)
                for k in (kv, layout.kv - 1)
            )
            star, squares = find_row(values)
            scaled = squares if has_token_scale(layout, kv) else None
            total = total_bits(spec, layout, kv)
            page = encode_page(x, star, scaled, cos, sin, priority, total, spec)
            tokens = len(x)
            pieces: list[Array] = [
                page.low.astype(np.float16), page.ranges.astype(np.float16),
                pack_nibbles(page.width - 1), star.astype(np.uint8),
                page.exponent.astype(np.int8),
                from_float(page.row_low, "bfloat16"), from_float(page.row_range, "bfloat16"),
                (page.row >> (page.width + r)).astype(np.uint8),
            ]  # fmt: skip
            if scaled is not None:
                pieces.append(pack_nibbles(page.steps))
            below = (1 << (page.width + r)) - 1
            page.q[star, np.arange(heads)] = page.row & below
            codes = page.q.reshape(tokens, -1)
            for bits_, channels in width_groups(page.width.reshape(-1)):
                padded = np.zeros((-(-tokens // 8) * 8, len(channels)), np.uint8)
                padded[:tokens] = codes[:, channels] >> r
                pieces.append(pack_codes(padded, bits_))
            write_pieces(anchor, plan.anchor_start(unit, p), *pieces)
            rest = (page.q.reshape(tokens, -1) & ((1 << r) - 1)).astype(np.uint8)
            write_pieces(residual, plan.residual_start(unit, p), pack_codes(rest, r))
    return anchor, residual


def width_groups(width: Array) -> list[tuple[int, Array]]:
    """(width, the channels that have it, in order), widest first."""
    groups = [(b, np.flatnonzero(width == b)) for b in range(MAX_WIDTH, 0, -1)]
    return [(b, channels) for b, channels in groups if len(channels)]


def decode(
    anchor: U8, residual: U8 | None, layout: KVLayout, spec: CodecSpec, calibration: Calibration
) -> Bits:
    """The cache's elements as bits [kv, layers, tokens, channels]; coarse without a residual."""
    plan = AdaptivePlan.of(spec, layout)
    kind = np.uint32 if layout.dtype == "float32" else np.uint16
    out = np.empty((layout.kv, layout.layers, layout.tokens, layout.channels), kind)
    r, heads, d, width_ = spec.residual_bits, layout.heads, layout.head_dim, layout.channels
    for unit in range(plan.units):
        layer, kv = divmod(unit, layout.kv)
        cos, sin, _ = _tables(calibration, layout, layer, kv)
        token_scale = has_token_scale(layout, kv)
        for p in range(plan.pages):
            tokens = plan.last_len if p == plan.pages - 1 else spec.page_tokens
            take = Reader(anchor, plan.anchor_start(unit, p))
            low, ranges = (
                take(2 * width_).view(np.float16).astype(np.float32).reshape(heads, d)
                for _ in range(2)
            )
            width = unpack_nibbles(take((width_ + 1) // 2), width_).astype(np.int64) % 8 + 1
            star = take(heads).astype(np.int64)
            exponent = take(heads).view(np.int8).astype(np.int32)
            row_low, row_range = (
                to_float(take(2 * heads).view(np.uint16), "bfloat16")[:, None] for _ in range(2)
            )
            row = take(width_).astype(np.int64).reshape(heads, d)
            steps = np.zeros((tokens, heads), np.int32)
            if token_scale:
                nibbles = unpack_nibbles(take((tokens * heads + 1) // 2), tokens * heads)
                steps = nibbles.astype(np.int32).reshape(tokens, heads)
            q = np.zeros((tokens, width_), np.int64)
            for bits_, channels in width_groups(width):
                rows = -(-tokens // 8) * bits_
                plane = take(rows * len(channels)).reshape(rows, len(channels))
                q[:, channels] = unpack_codes(plane, tokens, bits_).astype(np.int64) << r
            width = width.reshape(heads, d)
            page = AdaptivePage(
                low, ranges, width, star, exponent, row_low, row_range, row,
                steps, q.reshape(tokens, heads, d),
            )  # fmt: skip
            if residual is not None:
                take = Reader(residual, plan.residual_start(unit, p))
                n = packed_rows(tokens, r)
                rest = unpack_codes(take(n * width_).reshape(n, width_), tokens, r).astype(np.int64)
                page.q += rest.reshape(tokens, heads, d)
            page.row = (row << (width + r)) + page.q[star, np.arange(heads)]
            x = decode_page(page, residual is not None, token_scale, cos, sin, spec)
            start = p * spec.page_tokens
            out[kv, layer, start : start + tokens] = from_float(x.reshape(tokens, -1), layout.dtype)
    return out
