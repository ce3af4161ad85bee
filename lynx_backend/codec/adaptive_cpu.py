"""Decoding of the ``adaptive`` profile on the CPU, as ``adaptive_reference`` defines it.

Compiled by numba, like encoding in ``adaptive_cpu_encode``. Kernels release the GIL and work on
a range of layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._compile import inline, jit
from ._lanes import LANES
from ._scalars import (
    bf16_to_float,
    bits_to_float,
    u8_to_float,
)
from .adaptive_reference import (
    MAX_WIDTH,
    MIN_RANGE,
    MIN_ROW_RANGE,
    QUARTERS,
)
from .cpu import _get_codes, _read_fp16, _store
from .width_planes import reorder, sort_by_width, unpack

_MAX = np.float32(65504.0)
_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)


@inline
def power_of_two(e: Any) -> Any:
    """2^e as float32, e in [-126, 127]."""
    return bits_to_float(np.uint32((e + 127) << 23))


@inline
def clip(x: Any, least: Any, most: Any) -> Any:
    return min(max(x, least), most)


@inline
def rotate(row: Any, heads: int, d: int, cos: Any, sin: Any, way: Any, out: Any) -> None:
    """Turn the pairs of every head into ``out``, other memory than ``row``; way: -1 turns back."""
    pairs = cos.size
    for h in range(heads):
        a, b = row[h * d : h * d + pairs], row[h * d + pairs : h * d + 2 * pairs]
        x, y = out[h * d : h * d + pairs], out[h * d + pairs : h * d + 2 * pairs]
        for c in range(pairs):
            x[c] = a[c] * cos[c] - b[c] * (way * sin[c])
        for c in range(pairs):
            y[c] = b[c] * cos[c] + a[c] * (way * sin[c])
        a, x = row[h * d + 2 * pairs : (h + 1) * d], out[h * d + 2 * pairs : (h + 1) * d]
        for c in range(a.size):
            x[c] = a[c]


@jit
def count_impossible(anchor: Any, shape: Any, totals: Any, page_tokens: int, starts: Any) -> int:
    """Number of scales, widths and rows in an anchor that no encoder writes."""
    kvs, layers, tokens, heads, d = shape
    channels = heads * d
    pages = (tokens + page_tokens - 1) // page_tokens
    wrong = 0
    for layer in range(layers):
        for kv in range(kvs):
            for page in range(pages):
                length = min(page_tokens, tokens - page * page_tokens)
                at = layer * starts[2].sum() + starts[3, kv] + page * starts[0, kv]
                section = anchor[at:]
                for h in range(heads):
                    total = 0
                    for c in range(h * d, (h + 1) * d):
                        low, span = _read_fp16(section, c), _read_fp16(section, channels + c)
                        fine = -_MAX <= low <= _MAX and MIN_RANGE <= span <= _MAX
                        wrong += 0 if fine else 1
                        nibble = (section[4 * channels + (c >> 1)] >> (4 * (c & 1))) & 15
                        wrong += 0 if nibble < MAX_WIDTH else 1
                        total += 1 + nibble
                    wrong += 0 if total == totals[kv] else 1
                    head_at = 4 * channels + (channels + 1) // 2
                    wrong += 0 if section[head_at + h] < length else 1
                    exponent = np.int64(np.int8(section[head_at + heads + h]))
                    wrong += 0 if -120 <= exponent <= 120 else 1
                    row_low = _read_bf16(section, head_at + 2 * heads, h)
                    span = _read_bf16(section, head_at + 4 * heads, h)
                    fine = -2 * _MAX <= row_low <= _MAX and MIN_ROW_RANGE <= span <= 4 * _MAX
                    wrong += 0 if fine else 1
    return wrong


@inline
def _rebuild(
    code: Any, extra: Any, step: Any, fraction: Any, low: Any, half: Any, scale: Any,
    beta: Any, c3: Any, out: Any,
) -> None:  # fmt: skip
    """One token from its codes; fraction, half: twice a code's width, half the range.

    Where a two is multiplied in changes no bit; β = 0 needs no case of its own.
    """
    for c in range(out.size):
        q = u8_to_float(code[c]) * step + u8_to_float(extra[c])
        z = (q + _HALF) * fraction[c] - _ONE
        out[c] = (low[c] + (z * (c3 + beta * abs(z)) + _ONE) * half[c]) * scale[c]


@inline
def _read_bf16(section: Any, base: int, index: int) -> Any:
    at = base + 2 * index
    return bf16_to_float(np.uint16(section[at] | section[at + 1] << 8))


@jit
def decode_layers(
    anchor: Any, residual: Any, fine: bool, shape: Any, cos: Any, sin: Any, table: Any,
    curve: Any, residual_bits: int, page_tokens: int, starts: Any,
    words: Any, dtype: int, strides: Any, first: int, last: int,
) -> None:  # fmt: skip
    """Decode layers ``first`` to ``last`` from their payloads into a cache.

    Args: as for :func:`encode_layers`; fine: use the residual.
    """
    kvs, _, tokens, heads, d = shape
    channels = heads * d
    pages = (tokens + page_tokens - 1) // page_tokens
    row = np.empty(channels, np.float32)
    low, half = np.empty(channels, np.float32), np.empty(channels, np.float32)
    fraction, width = np.empty(channels, np.float32), np.empty(channels, np.int64)
    scale, exponent = np.empty(channels, np.float32), np.empty(heads, np.int64)
    places = (channels + MAX_WIDTH * LANES) // LANES * LANES
    order, place = np.empty(places, np.uint32), np.empty(channels, np.uint32)
    sizes = np.empty(MAX_WIDTH, np.int64)
    codes, sorted_codes = np.empty((4, channels), np.uint8), np.empty((8, places), np.uint8)
    word, moved = np.empty(places, np.uint32), np.empty(channels, np.uint32)
    rows = np.empty((MAX_WIDTH + 1, LANES), np.uint8)
    turned = np.empty(channels, np.float32)
    extra = np.zeros(channels, np.uint8)
    beta, c3 = curve[0], curve[1]
    use = fine and residual_bits > 0
    step = np.float32(1 << residual_bits) if fine else _ONE
    added = residual_bits if fine else 0
    for layer in range(first, last):
        for kv in range(kvs):
            token_scale = kvs == 2 and kv == 1
            angles = table[layer]
            for page in range(pages):
                start = page * page_tokens
                length = min(page_tokens, tokens - start)
                padded = (length + 7) // 8 * 8
                at = layer * starts[2].sum() + starts[3, kv] + page * starts[0, kv]
                section = anchor[at:]
                for c in range(channels):
                    width[c] = 1 + ((section[4 * channels + (c >> 1)] >> (4 * (c & 1))) & 7)
                used = sort_by_width(width, order, place, sizes)
                for c in range(channels):
                    low[c] = _read_fp16(section, c)
                    half[c] = _read_fp16(section, channels + c) * _HALF
                    fraction[c] = power_of_two(1 - (width[c] + added))
                head_at = 4 * channels + (channels + 1) // 2
                for h in range(heads):
                    exponent[h] = np.int8(section[head_at + heads + h])
                    if not token_scale:
                        scale[h * d : (h + 1) * d] = power_of_two(exponent[h])
                scales_at = head_at + 6 * heads + channels
                planes_at = scales_at + ((length * heads + 1) // 2 if token_scale else 0)
                at = (layer * kvs + kv) * starts[5, kv] + page * starts[4, kv]
                plane = residual[at:]
                for t in range(length):
                    if t & 7 == 0:
                        planes = section[planes_at:]
                        unpack(planes, sizes, t >> 3, padded >> 3, rows, sorted_codes)
                    if t & 3 == 0:
                        four = sorted_codes[t & 4 : (t & 4) + 4]
                        reorder(four, place, word[:used], moved, codes)
                    if use:
                        _get_codes(plane, channels, t, residual_bits, extra)
                    if token_scale:
                        for h in range(heads):
                            n = t * heads + h
                            below = (section[scales_at + (n >> 1)] >> (4 * (n & 1))) & 15
                            n = exponent[h] - below
                            scale[h * d : (h + 1) * d] = QUARTERS[n & 3] * power_of_two(n >> 2)
                    _rebuild(codes[t & 3], extra, step, fraction, low, half, scale, beta, c3, row)
                    out = row
                    if not token_scale:
                        rotate(row, heads, d, cos[angles, t], sin[angles, t], _ONE, turned)
                        out = turned
                    for h in range(heads):
                        if section[head_at + h] == t:
                            row_low = _read_bf16(section, head_at + 2 * heads, h)
                            width_ = _read_bf16(section, head_at + 4 * heads, h)
                            code = codes[t & 3]
                            for c in range(h * d, (h + 1) * d):
                                upper = np.int64(section[head_at + 6 * heads + c]) << width[c]
                                q = (upper + code[c]) << added
                                if use:
                                    q += extra[c]
                                by = power_of_two(-(8 + width[c] + added))
                                out[c] = row_low + (np.float32(q) + _HALF) * by * width_
                    at = kv * strides[0] + layer * strides[1] + (start + t) * strides[2]
                    _store(out, dtype, words[at : at + channels])
