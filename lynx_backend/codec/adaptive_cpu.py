"""The ``adaptive`` profile on the CPU: the arithmetic of ``adaptive_reference``, compiled by numba.

Kernels release the GIL and work on a range of layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._lanes import LANES, add_upper_half, sum_eight
from ._scalars import (
    bf16_to_float,
    bits_to_float,
    float_to_bf16,
    float_to_bits,
    fp16_to_float,
    larger,
    lower_byte,
    magnitude,
    u8_to_float,
    upper_byte,
)
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
from .cpu import FP16, _fp16_down, _get_codes, _inline, _jit, _load, _put_codes, _read_fp16, _store
from .width_planes import pack, reorder, sort_by_width, unpack

_MAX = np.float32(65504.0)
_INF = np.float32(np.inf)
_LARGEST = np.int32(_MAX.view(np.int32))
_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_LOW_QUARTER = int(QUARTERS[1].view(np.uint32)) & 0x7FFFFF
_HIGH_QUARTER = int(QUARTERS[3].view(np.uint32)) & 0x7FFFFF


@_inline
def _power_of_two(e: Any) -> Any:
    return bits_to_float(np.uint32((e + 127) << 23))


@_jit
def _bf16_down(x: Any) -> Any:
    """Bits of the largest bfloat16 <= x; zero is +0."""
    u = np.int64(float_to_bits(x))
    cut = u & 0xFFFF0000
    if u >> 31 and u != cut:
        cut += 0x10000
    return np.uint16(0 if cut == 0x80000000 else cut >> 16)


@_inline
def _clip(x: Any, least: Any, most: Any) -> Any:
    return min(max(x, least), most)


@_inline
def _put_u16(section: Any, at: int, value: Any) -> None:
    section[at] = value & 255
    section[at + 1] = value >> 8


@_jit
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


@_jit
def _quarter_exponent(power: Any) -> int:
    u = np.int64(float_to_bits(power))
    mantissa = u & 0x7FFFFF
    steps: int = (1 if mantissa >= _LOW_QUARTER else 0) + (1 if mantissa >= _HIGH_QUARTER else 0)
    return 2 * int((u >> 23) - 127) + steps


@_jit
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


@_inline
def _rotate(row: Any, heads: int, d: int, cos: Any, sin: Any, out: Any) -> None:
    """Turn the pairs of every head into ``out``, which is other memory than ``row``."""
    pairs = cos.size
    for h in range(heads):
        a, b = row[h * d : h * d + pairs], row[h * d + pairs : h * d + 2 * pairs]
        x, y = out[h * d : h * d + pairs], out[h * d + pairs : h * d + 2 * pairs]
        for c in range(pairs):
            x[c] = a[c] * cos[c] - b[c] * sin[c]
        for c in range(pairs):
            y[c] = b[c] * cos[c] + a[c] * sin[c]
        a, x = row[h * d + 2 * pairs : (h + 1) * d], out[h * d + 2 * pairs : (h + 1) * d]
        for c in range(a.size):
            x[c] = a[c]


@_inline
def _rotate_back(row: Any, heads: int, d: int, cos: Any, sin: Any, out: Any) -> None:
    """The inverse turn of :func:`_rotate`."""
    pairs = cos.size
    for h in range(heads):
        a, b = row[h * d : h * d + pairs], row[h * d + pairs : h * d + 2 * pairs]
        x, y = out[h * d : h * d + pairs], out[h * d + pairs : h * d + 2 * pairs]
        for c in range(pairs):
            x[c] = a[c] * cos[c] + b[c] * sin[c]
        for c in range(pairs):
            y[c] = b[c] * cos[c] - a[c] * sin[c]
        a, x = row[h * d + 2 * pairs : (h + 1) * d], out[h * d + 2 * pairs : (h + 1) * d]
        for c in range(a.size):
            x[c] = a[c]


@_jit
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
    for layer in range(first, last):
        for page in range(pages):
            start = page * page_tokens
            length = min(page_tokens, tokens - start)
            padded = (length + 7) // 8 * 8
            # A. the row, by the values
            for t in range(length):
                at = (kvs - 1) * strides[0] + layer * strides[1] + (start + t) * strides[2]
                _load(words[at : at + channels], dtype, row)
                for h in range(heads):
                    squares[t, h] = _sum_of_squares(row[h * d : (h + 1) * d], work)
            for h in range(heads):
                star[h] = 0
                for t in range(1, length):
                    if squares[t, h] < squares[star[h], h]:
                        star[h] = t
            for kv in range(kvs):
                token_scale = kvs == 2 and kv == 1
                angles = table[layer]
                size = starts[0, kv] if page < pages - 1 else starts[1, kv]
                at = layer * starts[2].sum() + starts[3, kv] + page * starts[0, kv]
                section = anchor[at : at + size]
                section[:] = 0
                # C. token scales
                if token_scale:
                    for h in range(heads):
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
                # B. and the bounds of every channel
                bottom[:] = _INF
                top[:] = -_INF
                peak[:] = 0
                for t in range(length):
                    at = kv * strides[0] + layer * strides[1] + (start + t) * strides[2]
                    out = y[t]
                    loaded = out if token_scale else row
                    _load(words[at : at + channels], dtype, loaded)
                    for c in range(channels):
                        peak[c] = larger(peak[c], magnitude(loaded[c]))
                    if not token_scale:
                        _rotate_back(row, heads, d, cos[angles, t], sin[angles, t], out)
                    for h in range(heads):
                        part = out[h * d : (h + 1) * d]
                        if token_scale:
                            n = exponent[h] - steps[t, h]
                            by = INVERSE_QUARTERS[n & 3] * _power_of_two(-(n >> 2))
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
                if bad:
                    return bad
                for h in range(heads):
                    by = _ONE
                    if not token_scale:
                        most_y = _ZERO
                        for c in range(h * d, (h + 1) * d):
                            if length > 1:
                                most_y = max(most_y, max(abs(bottom[c]), abs(top[c])))
                        e = (np.int64(float_to_bits(most_y)) >> 23) - 126
                        exponent[h] = LEAST_EXPONENT if most_y == _ZERO else max(e, LEAST_EXPONENT)
                        by = _power_of_two(-exponent[h])
                    for c in range(h * d, (h + 1) * d):
                        scale[c] = by
                        if length == 1:
                            bottom[c] = top[c] = _ZERO
                        else:
                            bottom[c] = bottom[c] * by
                            top[c] = top[c] * by
                # D. grid and widths
                scales_at = 4 * channels + (channels + 1) // 2 + 6 * heads + channels
                for c in range(channels):
                    bits = _fp16_down(bottom[c])
                    _put_u16(section, 2 * c, bits)
                    low[c] = fp16_to_float(bits)
                    span = max(-fp16_to_float(_fp16_down(low[c] - top[c])), MIN_RANGE)
                    bits = np.uint16(_fp16_down(span))  # exact: span is an fp16
                    ranges[c] = bits
                    _put_u16(section, 2 * (channels + c), bits)
                    factor[c] = _ONE / span
                for h in range(heads):
                    part = slice(h * d, (h + 1) * d)
                    known = flat if token_scale else priority[layer, part]
                    _set_widths(ranges[part], known, totals[kv], level, width[part])
                for c in range(channels):
                    section[4 * channels + (c >> 1)] |= np.uint8((width[c] - 1) << (4 * (c & 1)))
                    levels[c] = _power_of_two(width[c] + residual_bits)
                used = sort_by_width(width, order, place, sizes)
                # the row itself
                head_at = 4 * channels + (channels + 1) // 2
                for h in range(heads):
                    at = kv * strides[0] + layer * strides[1] + (start + star[h]) * strides[2]
                    _load(words[at : at + channels], dtype, row)
                    part_row = row[h * d : (h + 1) * d]
                    lo1, hi1 = part_row[0], part_row[0]
                    for c in range(d):
                        lo1, hi1 = min(lo1, part_row[c]), max(hi1, part_row[c])
                    low_bits = _bf16_down(lo1)
                    row_low = bf16_to_float(low_bits)
                    span = max(-bf16_to_float(_bf16_down(row_low - hi1)), MIN_ROW_RANGE)
                    section[head_at + h] = star[h]
                    section[head_at + heads + h] = exponent[h] & 255
                    _put_u16(section, head_at + 2 * heads + 2 * h, low_bits)
                    _put_u16(section, head_at + 4 * heads + 2 * h, float_to_bf16(span))
                    most_code = (256 << residual_bits) - 1
                    for c in range(d):
                        q = np.floor((part_row[c] - row_low) / span * np.float32(most_code + 1))
                        q = _clip(q, _ZERO, np.float32(most_code))
                        row_code[h * d + c] = np.int64(q)
                        section[head_at + 6 * heads + h * d + c] = (
                            row_code[h * d + c] >> residual_bits
                        )
                planes_at = scales_at
                if token_scale:
                    planes_at += (length * heads + 1) // 2
                    for t in range(length):
                        for h in range(heads):
                            n = t * heads + h
                            section[scales_at + (n >> 1)] |= np.uint8(steps[t, h] << (4 * (n & 1)))
                # codes
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
                                    code[c] = 0
                                    extra[c] = row_code[c] & rest
                        if residual_bits:
                            _put_codes(plane, channels, t, residual_bits, extra, 0)
                    if t & 3 == 3:
                        four = sorted_codes[t & 4 : (t & 4) + 4]
                        reorder(codes, order[:used], word, moved[:used], four)
                    if t & 7 == 7:
                        planes = section[planes_at:]
                        pack(sorted_codes, sizes, t >> 3, padded >> 3, rows, planes)
    return 0


@_inline
def _quantize(y: Any, scale: Any, low: Any, factor: Any, levels: Any, curve: Any, out: Any) -> None:
    """Whole codes of one token, as float32."""
    beta, c3, c1, c2, c4 = curve
    if beta > _ZERO:
        for c in range(out.size):
            u = _clip((y[c] * scale[c] - low[c]) * factor[c], _ZERO, _ONE)
            z = u + u - _ONE
            m = abs((np.sqrt(c1 + c2 * abs(z)) - c3) * c4)
            u = ((-m if z < _ZERO else m) + _ONE) * _HALF
            out[c] = _clip(np.floor(u * levels[c]), _ZERO, levels[c] - _ONE)
    else:
        for c in range(out.size):
            u = _clip((y[c] * scale[c] - low[c]) * factor[c], _ZERO, _ONE)
            out[c] = _clip(np.floor(u * levels[c]), _ZERO, levels[c] - _ONE)


@_jit
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


@_inline
def _rebuild(
    code: Any, extra: Any, step: Any, fraction: Any, low: Any, span: Any, by: Any,
    beta: Any, c3: Any, out: Any,
) -> None:  # fmt: skip
    """One head of one token from its codes."""
    if beta > _ZERO:
        for c in range(out.size):
            q = u8_to_float(code[c]) * step + u8_to_float(extra[c])
            w = (q + _HALF) * fraction[c]
            z = w + w - _ONE
            w = (z * (c3 + beta * abs(z)) + _ONE) * _HALF
            out[c] = (low[c] + w * span[c]) * by
    else:
        for c in range(out.size):
            q = u8_to_float(code[c]) * step + u8_to_float(extra[c])
            out[c] = (low[c] + (q + _HALF) * fraction[c] * span[c]) * by


@_inline
def _read_bf16(section: Any, base: int, index: int) -> Any:
    at = base + 2 * index
    return bf16_to_float(np.uint16(section[at] | section[at + 1] << 8))


@_jit
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
    low, span = np.empty(channels, np.float32), np.empty(channels, np.float32)
    fraction, width = np.empty(channels, np.float32), np.empty(channels, np.int64)
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
                    span[c] = _read_fp16(section, channels + c)
                    fraction[c] = _power_of_two(-(width[c] + added))
                head_at = 4 * channels + (channels + 1) // 2
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
                    for h in range(heads):
                        exponent = np.int64(np.int8(section[head_at + heads + h]))
                        by = _power_of_two(exponent)
                        if token_scale:
                            n = t * heads + h
                            n = exponent - ((section[scales_at + (n >> 1)] >> (4 * (n & 1))) & 15)
                            by = QUARTERS[n & 3] * _power_of_two(n >> 2)
                        part = slice(h * d, (h + 1) * d)
                        _rebuild(
                            codes[t & 3, part], extra[part], step, fraction[part], low[part],
                            span[part], by, beta, c3, row[part],
                        )  # fmt: skip
                    out = row
                    if not token_scale:
                        _rotate(row, heads, d, cos[angles, t], sin[angles, t], turned)
                        out = turned
                    for h in range(heads):
                        if section[head_at + h] == t:
                            row_low = _read_bf16(section, head_at + 2 * heads, h)
                            width_ = _read_bf16(section, head_at + 4 * heads, h)
                            by = _power_of_two(-(8 + added))
                            for c in range(h * d, (h + 1) * d):
                                q = u8_to_float(section[head_at + 6 * heads + c]) * step
                                if use:
                                    q = q + u8_to_float(extra[c])
                                out[c] = row_low + (q + _HALF) * by * width_
                    if dtype == FP16:
                        for c in range(channels):
                            out[c] = _clip(out[c], -_MAX, _MAX)
                    at = kv * strides[0] + layer * strides[1] + (start + t) * strides[2]
                    _store(out, dtype, words[at : at + channels])
