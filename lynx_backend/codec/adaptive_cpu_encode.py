"""Encoding with the ``adaptive`` profile on the CPU, stage by stage; see ``adaptive_reference``.

Stages work on one page of one layer's keys or values: ``words`` begins at its first token, whose
channels are the first of ``step`` words. Arrays that a stage fills are its last arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._compile import inline, jit
from ._lanes import LANES, add_upper_half, sum_eight
from ._scalars import (
    bf16_to_float,
    float_to_bf16,
    float_to_bits,
    fp16_to_float,
    larger,
    lower_byte,
    magnitude,
    upper_byte,
)
from .adaptive_cpu import clip, power_of_two, rotate
from .adaptive_reference import (
    INVERSE_QUARTERS,
    LEAST_EXPONENT,
    MAX_WIDTH,
    MIN_POWER,
    MIN_RANGE,
    MIN_ROW_RANGE,
    QUARTERS,
    SCALE_STEPS,
)
from .cpu import _fp16_down, _load, _put_codes
from .width_planes import pack, reorder, sort_by_width

_INF = np.float32(np.inf)
_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_LARGEST = np.int32(np.float32(65504.0).view(np.int32))
_LOW_QUARTER = int(QUARTERS[1].view(np.uint32)) & 0x7FFFFF
_HIGH_QUARTER = int(QUARTERS[3].view(np.uint32)) & 0x7FFFFF


@jit
def _bf16_down(x: Any) -> Any:
    """Bits of the largest bfloat16 <= x; zero is +0."""
    u = np.int64(float_to_bits(x))
    cut = u & 0xFFFF0000
    if u >> 31 and u != cut:
        cut += 0x10000
    return np.uint16(0 if cut == 0x80000000 else cut >> 16)


@inline
def _put_u16(section: Any, at: int, value: Any) -> None:
    section[at] = value & 255
    section[at + 1] = value >> 8


@jit
def _sum_of_squares(x: Any, work: Any) -> Any:
    """By halves; work: float32, zeros behind x.size, the next power of two of it and at least 8.

    More halves than needed add zeros, which changes nothing.
    """
    for c in range(x.size):
        work[c] = x[c] * x[c]
    half = work.size
    while half > 8:
        half //= 2
        add_upper_half(work, half)
    return sum_eight(work)


@jit
def _quarter_exponent(power: Any) -> int:
    u = np.int64(float_to_bits(power))
    mantissa = u & 0x7FFFFF
    steps: int = (1 if mantissa >= _LOW_QUARTER else 0) + (1 if mantissa >= _HIGH_QUARTER else 0)
    return 2 * int((u >> 23) - 127) + steps


@jit
def _set_widths(ranges: Any, priority: Any, total: int, level: Any, width: Any) -> None:
    """``adaptive_reference.widths_of`` for one head, by bisection for the level of the last bit."""
    d = ranges.size
    for c in range(d):
        level[c] = np.int64(ranges[c]) + 128 * np.int64(priority[c])
    # The largest threshold at which at least total - d bits are wanted.
    low, high = level[0], level[0]
    for c in range(d):
        low, high = min(low, level[c]), max(high, level[c])
    low -= 1024 * MAX_WIDTH
    while low < high:
        middle = (low + high + 1) >> 1
        count = 0
        for c in range(d):
            count += min(max((level[c] - middle) >> 10, 0), MAX_WIDTH - 1)
        if count >= total - d:
            low = middle
        else:
            high = middle - 1
    excess = -total
    for c in range(d):
        width[c] = 1 + min(max((level[c] - low) >> 10, 0), MAX_WIDTH - 1)
        excess += width[c]
    # Of several bits at the threshold the lowest channels have theirs.
    c = d - 1
    while excess > 0:
        above = level[c] - low
        if above & 1023 == 0 and 1024 <= above <= 1024 * (MAX_WIDTH - 1):
            width[c] -= 1
            excess -= 1
        c -= 1


@jit
def _find_row(
    words: Any, dtype: int, step: int, length: int, row: Any, work: Any, squares: Any, star: Any
) -> None:
    """A. Each head's token with the smallest values; squares: float32 [tokens, heads]."""
    channels, heads = row.size, star.size
    d = channels // heads
    for t in range(length):
        _load(words[t * step : t * step + channels], dtype, row)
        for h in range(heads):
            squares[t, h] = _sum_of_squares(row[h * d : (h + 1) * d], work)
    for h in range(heads):
        star[h] = 0
        for t in range(1, length):
            if squares[t, h] < squares[star[h], h]:
                star[h] = t


@jit
def _set_token_scales(
    squares: Any, star: Any, length: int, d: int, steps: Any, exponent: Any
) -> None:
    """C. Values' scales: exponents of the page, and each token's quarter octaves below them."""
    for h in range(star.size):
        most = -1000
        for t in range(length):
            power = max(squares[t, h] / np.float32(d), MIN_POWER)
            steps[t, h] = _quarter_exponent(power)
            if t != star[h] or length == 1:
                most = max(most, steps[t, h])
        exponent[h] = most
        for t in range(length):
            below = min(most - steps[t, h], SCALE_STEPS)
            steps[t, h] = 0 if t == star[h] else below


@jit
def _load_page(
    words: Any, dtype: int, step: int, length: int, star: Any, token_scale: bool,
    cos: Any, sin: Any, steps: Any, exponent: Any,
    row: Any, peak: Any, y: Any, bottom: Any, top: Any,
) -> int:  # fmt: skip
    """B, C. The page as it is quantized, but for the keys' scale, and its channels' bounds.

    Returns:
        number of channels with a value that is not finite or beyond the largest fp16.
    """
    channels, heads = row.size, star.size
    d = channels // heads
    bottom[:] = _INF
    top[:] = -_INF
    peak[:] = 0
    for t in range(length):
        out = y[t]
        loaded = out if token_scale else row
        _load(words[t * step : t * step + channels], dtype, loaded)
        for c in range(channels):
            peak[c] = larger(peak[c], magnitude(loaded[c]))
        if not token_scale:
            rotate(row, heads, d, cos[t], sin[t], -_ONE, out)
        for h in range(heads):
            part = out[h * d : (h + 1) * d]
            if token_scale:
                n = exponent[h] - steps[t, h]
                by = INVERSE_QUARTERS[n & 3] * power_of_two(-(n >> 2))
                for c in range(d):
                    part[c] = part[c] * by
            if t != star[h]:
                lo, hi = bottom[h * d : (h + 1) * d], top[h * d : (h + 1) * d]
                for c in range(d):
                    lo[c] = min(lo[c], part[c])
                    hi[c] = max(hi[c], part[c])
    bad = 0
    for c in range(channels):
        bad += 0 if peak[c] <= _LARGEST else 1
    if length == 1:  # the row is all there is
        bottom[:] = _ZERO
        top[:] = _ZERO
    return bad


@jit
def _scale_keys(bottom: Any, top: Any, exponent: Any, scale: Any) -> None:
    """C. One power of two for each head's keys; its bounds are scaled, too."""
    d = scale.size // exponent.size
    for h in range(exponent.size):
        lo, hi = bottom[h * d : (h + 1) * d], top[h * d : (h + 1) * d]
        most = _ZERO
        for c in range(d):
            most = max(most, max(abs(lo[c]), abs(hi[c])))
        e = (np.int64(float_to_bits(most)) >> 23) - 126
        exponent[h] = LEAST_EXPONENT if most == _ZERO else max(e, LEAST_EXPONENT)
        by = power_of_two(-exponent[h])
        scale[h * d : (h + 1) * d] = by
        for c in range(d):
            lo[c] = lo[c] * by
            hi[c] = hi[c] * by


@jit
def _set_grid(bottom: Any, top: Any, section: Any, low: Any, factor: Any, ranges: Any) -> None:
    """D. Low and range of every channel; ranges: as bits of fp16."""
    channels = low.size
    for c in range(channels):
        bits = _fp16_down(bottom[c])
        _put_u16(section, 2 * c, bits)
        low[c] = fp16_to_float(bits)
        span = max(-fp16_to_float(_fp16_down(low[c] - top[c])), MIN_RANGE)
        bits = np.uint16(_fp16_down(span))  # exact: span is an fp16
        ranges[c] = bits
        _put_u16(section, 2 * (channels + c), bits)
        factor[c] = _ONE / span


@jit
def _put_row(
    words: Any, dtype: int, step: int, star: Any, exponent: Any, levels: Any, width: Any,
    residual_bits: int, heads_at: int, section: Any, row: Any, row_code: Any,
) -> None:  # fmt: skip
    """A. Each head's row, and what else there is once a head; row_code: all its bits."""
    channels, heads = row.size, star.size
    d = channels // heads
    for h in range(heads):
        at = star[h] * step
        _load(words[at : at + channels], dtype, row)
        x = row[h * d : (h + 1) * d]
        lo, hi = x[0], x[0]
        for c in range(d):
            lo, hi = min(lo, x[c]), max(hi, x[c])
        low_bits = _bf16_down(lo)
        low = bf16_to_float(low_bits)
        span = max(-bf16_to_float(_bf16_down(low - hi)), MIN_ROW_RANGE)
        section[heads_at + h] = star[h]
        section[heads_at + heads + h] = exponent[h] & 255
        _put_u16(section, heads_at + 2 * heads + 2 * h, low_bits)
        _put_u16(section, heads_at + 4 * heads + 2 * h, float_to_bf16(span))
        coded = section[heads_at + 6 * heads + h * d :]
        for c in range(d):
            of = levels[h * d + c] * np.float32(256)
            q = np.int64(clip(np.floor((x[c] - low) / span * of), _ZERO, of - _ONE))
            row_code[h * d + c] = q
            coded[c] = q >> (width[h * d + c] + residual_bits)


@inline
def _quantize(y: Any, scale: Any, low: Any, factor: Any, levels: Any, curve: Any, out: Any) -> None:
    """Whole codes of one token, as float32."""
    beta, c3, c1, c2, c4 = curve
    if beta > _ZERO:
        for c in range(out.size):
            u = clip((y[c] * scale[c] - low[c]) * factor[c], _ZERO, _ONE)
            z = u + u - _ONE
            m = abs((np.sqrt(c1 + c2 * abs(z)) - c3) * c4)
            u = ((-m if z < _ZERO else m) + _ONE) * _HALF
            out[c] = clip(np.floor(u * levels[c]), _ZERO, levels[c] - _ONE)
    else:
        for c in range(out.size):
            u = clip((y[c] * scale[c] - low[c]) * factor[c], _ZERO, _ONE)
            out[c] = clip(np.floor(u * levels[c]), _ZERO, levels[c] - _ONE)


@jit
def encode_layers(
    words: Any, dtype: int, strides: Any, shape: Any, cos: Any, sin: Any, table: Any, priority: Any,
    totals: Any, curve: Any, residual_bits: int, page_tokens: int, starts: Any,
    anchor: Any, residual: Any, first: int, last: int,
) -> int:  # fmt: skip
    """Encode layers ``first`` to ``last`` into the payloads.

    Args:
        words, dtype, strides: as in ``CacheMemory``; shape: int64 [5].
        cos, sin: float32 [tables, 256, pairs]; table: uint8 [layers]; priority: int8
            [layers, channels].
        totals: int64 [kv]: sum of a head's widths. curve: float32 [5]: β, 1-β, (1-β)², 4β, 1/(2β).
        starts: int64 [6, kv]: anchor page, anchor last page, anchor unit, offset of the unit in its
            layer, residual page, residual unit, in bytes.

    Returns:
        number of channels of a page with a value that is not finite or beyond the largest fp16;
        nothing after that page is encoded.
    """
    kvs, _, tokens, heads, d = shape
    channels = heads * d
    pages = (tokens + page_tokens - 1) // page_tokens
    row = np.empty(channels, np.float32)
    y = np.empty((page_tokens, channels), np.float32)
    peak = np.empty(channels, np.int32)
    bottom, top = np.empty(channels, np.float32), np.empty(channels, np.float32)
    ranges, width = np.empty(channels, np.uint16), np.empty(channels, np.int64)
    places = (channels + MAX_WIDTH * LANES) // LANES * LANES
    order, place = np.empty(places, np.uint32), np.empty(channels, np.uint32)
    sizes, level = np.empty(MAX_WIDTH, np.int64), np.empty(d, np.int64)
    low, factor = np.empty(channels, np.float32), np.empty(channels, np.float32)
    scale, levels = np.empty(channels, np.float32), np.empty(channels, np.float32)
    v = np.empty(channels, np.float32)
    codes, sorted_codes = np.empty((4, channels), np.uint8), np.empty((8, places), np.uint8)
    word, moved = np.empty(channels, np.uint32), np.empty(places, np.uint32)
    rows = np.empty((MAX_WIDTH, places), np.uint8)
    extra = np.empty(channels, np.uint8)
    squares = np.empty((page_tokens, heads), np.float32)
    steps = np.empty((page_tokens, heads), np.int64)
    star, exponent = np.empty(heads, np.int64), np.empty(heads, np.int64)
    row_code = np.empty(channels, np.int64)
    power = 8
    while power < d:
        power *= 2
    flat, work = np.zeros(d, np.int8), np.zeros(power, np.float32)
    rest = np.uint8((1 << residual_bits) - 1)
    widths_at = 4 * channels
    heads_at = widths_at + (channels + 1) // 2
    scales_at = heads_at + 6 * heads + channels
    token_step = strides[2]
    for layer in range(first, last):
        for page in range(pages):
            start = page * page_tokens
            length = min(page_tokens, tokens - start)
            padded = (length + 7) // 8 * 8
            origin = layer * strides[1] + start * token_step
            values = words[(kvs - 1) * strides[0] + origin :]
            _find_row(values, dtype, token_step, length, row, work, squares, star)
            for kv in range(kvs):
                token_scale = kvs == 2 and kv == 1
                source = words[kv * strides[0] + origin :]
                size = starts[0, kv] if page < pages - 1 else starts[1, kv]
                at = layer * starts[2].sum() + starts[3, kv] + page * starts[0, kv]
                section = anchor[at : at + size]
                section[:] = 0
                if token_scale:
                    _set_token_scales(squares, star, length, d, steps, exponent)
                bad: int = _load_page(
                    source, dtype, token_step, length, star, token_scale,
                    cos[table[layer]], sin[table[layer]], steps, exponent,
                    row, peak, y, bottom, top,
                )  # fmt: skip
                if bad:
                    return bad
                if token_scale:
                    scale[:] = _ONE
                else:
                    _scale_keys(bottom, top, exponent, scale)
                _set_grid(bottom, top, section, low, factor, ranges)
                for h in range(heads):
                    part = slice(h * d, (h + 1) * d)
                    known = flat if token_scale else priority[layer, part]
                    _set_widths(ranges[part], known, totals[kv], level, width[part])
                for c in range(channels):
                    section[widths_at + (c >> 1)] |= np.uint8((width[c] - 1) << (4 * (c & 1)))
                    levels[c] = power_of_two(width[c] + residual_bits)
                _put_row(
                    source, dtype, token_step, star, exponent, levels, width,
                    residual_bits, heads_at, section, row, row_code,
                )  # fmt: skip
                planes_at = scales_at
                if token_scale:
                    planes_at += (length * heads + 1) // 2
                    for t in range(length):
                        for h in range(heads):
                            n = t * heads + h
                            section[scales_at + (n >> 1)] |= np.uint8(steps[t, h] << (4 * (n & 1)))
                planes = section[planes_at:]
                used = sort_by_width(width, order, place, sizes)
                at = (layer * kvs + kv) * starts[5, kv] + page * starts[4, kv]
                filled = channels * ((length * residual_bits + 7) // 8)
                plane = residual[at : at + (filled + 7) // 8 * 8]
                plane[filled:] = 0
                for t in range(padded):
                    code = codes[t & 3]
                    if t >= length:
                        code[:] = 0
                    else:
                        _quantize(y[t], scale, low, factor, levels, curve, v)
                        for c in range(channels):
                            code[c] = upper_byte(v[c], residual_bits)
                        for c in range(channels):
                            extra[c] = lower_byte(v[c]) & rest
                        for h in range(heads):
                            if t == star[h]:
                                for c in range(h * d, (h + 1) * d):
                                    code[c] = (row_code[c] >> residual_bits) & ((1 << width[c]) - 1)
                                    extra[c] = row_code[c] & rest
                        if residual_bits:
                            _put_codes(plane, channels, t, residual_bits, extra, 0)
                    if t & 3 == 3:
                        four = sorted_codes[t & 4 : (t & 4) + 4]
                        reorder(codes, order[:used], word, moved[:used], four)
                    if t & 7 == 7:
                        pack(sorted_codes, sizes, t >> 3, padded >> 3, rows, planes)
    return 0
