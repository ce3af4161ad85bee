"""The codec on CPU: the reference's arithmetic, compiled by numba, one page at a time.

Every loop runs over the channels of one token, which lie side by side in memory, so that LLVM
vectorises it; a page's rows stay in cache between its passes. Kernels release the GIL and work on a
range of units; ``Codec`` spreads ranges over threads. Nothing is allocated but a few rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._compile import inline, jit
from ._scalars import (
    bf16_to_float,
    bits_to_float,
    float_to_bf16,
    float_to_bits,
    float_to_fp16,
    float_to_u8,
    fp16_to_float,
    from_order,
    larger,
    shift_left,
    shift_right,
    smaller,
    to_order,
    u8_to_float,
)

BF16, FP16, FP32 = 0, 1, 2
DTYPE_CODES = {"bfloat16": BF16, "float16": FP16, "float32": FP32}
LINEAR, PAPER = 0, 1

_MAX = np.float32(65504.0)
_INF = np.float32(np.inf)
_ZERO, _255 = np.float32(0), np.float32(255)
_HALF_EVEN = np.float32(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds half to even


@inline
def _load(row: Any, dtype: int, out: Any) -> None:
    """One token's elements as float32."""
    if dtype == BF16:
        for c in range(out.size):
            out[c] = bf16_to_float(np.uint16(row[c]))
    elif dtype == FP16:
        for c in range(out.size):
            out[c] = fp16_to_float(np.uint16(row[c]))
    else:
        for c in range(out.size):
            out[c] = bits_to_float(np.uint32(row[c]))


@inline
def _element(bits: Any, dtype: int) -> Any:
    """One element as float32."""
    if dtype == BF16:
        return bf16_to_float(np.uint16(bits))
    if dtype == FP16:
        return fp16_to_float(np.uint16(bits))
    return bits_to_float(np.uint32(bits))


@inline
def _store(x: Any, dtype: int, row: Any) -> None:
    """One token's float32 as elements, rounded half to even, as ``reference.from_float``."""
    if dtype == BF16:
        for c in range(x.size):
            row[c] = float_to_bf16(x[c])
    elif dtype == FP16:
        for c in range(x.size):
            row[c] = float_to_fp16(min(max(x[c], -_MAX), _MAX))
    else:
        for c in range(x.size):
            row[c] = float_to_bits(x[c])


@inline
def _put_codes(plane: Any, channels: int, token: int, bits: int, codes: Any, drop: int) -> None:
    """Write ``bits`` bits of one token's codes, above the lowest ``drop``, into a bit plane.

    The plane is ``reference.pack_codes``; tokens must come in order.
    """
    at, shift = (token * bits) >> 3, (token * bits) & 7
    mask = np.uint8((1 << bits) - 1)
    row = plane[at * channels : (at + 1) * channels]
    if shift == 0:
        for c in range(channels):
            row[c] = shift_right(codes[c], drop) & mask
    else:
        for c in range(channels):
            row[c] |= shift_left(shift_right(codes[c], drop) & mask, shift)
    if shift + bits > 8:
        row = plane[(at + 1) * channels : (at + 2) * channels]
        for c in range(channels):
            row[c] = shift_right(shift_right(codes[c], drop) & mask, 8 - shift)


@inline
def _get_codes(plane: Any, channels: int, token: int, bits: int, codes: Any) -> None:
    """Read one token's codes from a bit plane."""
    at, shift = (token * bits) >> 3, (token * bits) & 7
    mask = np.uint8((1 << bits) - 1)
    row = plane[at * channels : (at + 1) * channels]
    if shift + bits <= 8:
        for c in range(channels):
            codes[c] = shift_right(row[c], shift) & mask
    else:
        more = plane[(at + 1) * channels : (at + 2) * channels]
        for c in range(channels):
            codes[c] = (shift_right(row[c], shift) | shift_left(more[c], 8 - shift)) & mask


@jit
def _fp16_down(x: Any) -> Any:
    """Bits of the largest float16 <= x; zero is +0."""
    h = np.int64(float_to_fp16(x))
    if fp16_to_float(np.uint16(h)) > x:
        h = 0x8001 if h & 0x7FFF == 0 else (h + 1 if h & 0x8000 else h - 1)
    return np.uint16(0 if h == 0x8000 else h)


@jit
def _fp16_up(x: Any) -> Any:
    """Bits of the smallest float16 >= x; zero is +0."""
    h = np.int64(float_to_fp16(x))
    if fp16_to_float(np.uint16(h)) < x:
        h = 0x0001 if h & 0x7FFF == 0 else (h - 1 if h & 0x8000 else h + 1)
    return np.uint16(0 if h == 0x8000 else h)


@inline
def _whole(x: Any) -> Any:
    """x rounded half to even, |x| < 2**22."""
    return (x + _HALF_EVEN) - _HALF_EVEN


@inline
def _clip(x: Any, most: Any) -> Any:
    return min(max(x, _ZERO), most)


@jit
def count_small_keys(
    x: Any, dtype: int, strides: Any, shape: Any, layer_step: int, page_tokens: int, ratio: int
) -> Any:
    """Per token, key channels below the page's mean over ``ratio``: int64 [tokens].

    Args: as for :func:`encode_units`; layer_step: look at every so many layers.
    """
    _, layers, tokens, channels = shape
    row, total = np.empty(channels, np.float32), np.empty(channels, np.float32)
    small = np.zeros(tokens, np.int64)
    for start in range(0, tokens, page_tokens):
        end = min(tokens, start + page_tokens)
        factor = np.float32(ratio * (end - start))
        for layer in range(0, layers, layer_step):
            total[:] = _ZERO
            for t in range(start, end):
                at = layer * strides[1] + t * strides[2]
                _load(x[at : at + channels], dtype, row)
                for c in range(channels):
                    total[c] = total[c] + abs(row[c])
            for t in range(start, end):
                at = layer * strides[1] + t * strides[2]
                _load(x[at : at + channels], dtype, row)
                count = 0
                for c in range(channels):
                    count += 1 if abs(row[c]) * factor < total[c] else 0
                small[t] += count
    return small


@jit
def encode_units(
    x: Any, dtype: int, strides: Any, shape: Any, exact: Any,
    profile: int, bits: Any, chunk: int, page_tokens: int,
    scale: Any, uniform: bool, thresholds: Any, codes: Any,
    bounds: Any, limits: Any,
    anchor: Any, residual: Any, sections: Any, first: int, last: int,
) -> int:  # fmt: skip
    """Encode units ``first`` to ``last`` of a cache into its payloads.

    Args:
        x: uint16 or uint32 [span]: the memory the cache's elements lie in.
        strides: int64 [3]: elements between kv, layers and tokens.
        shape: int64 [4]: kv, layers, tokens, channels.
        exact: bool [tokens].
        bits: int64 [4]: anchor bits, residual bits, levels, bias.
        scale, uniform: of the grid; thresholds, codes: padded to 255 and 256 entries.
        bounds: scratch, int16 or int32 as x has 16 or 32 bits, [2, chunks of a page, channels];
            limits: the smallest and largest integer of that type.
        sections: int64 [4]: bytes of anchor page, anchor unit, residual page, residual unit.

    Returns:
        number of channels and chunks of a page with a value that is not finite or beyond the
        largest fp16, exact tokens apart; nothing after that page is encoded.
    """
    kvs, _, tokens, channels = shape
    anchor_bits, residual_bits, levels, bias = bits
    pages = (tokens + page_tokens - 1) // page_tokens
    chunks = page_tokens // chunk
    row = np.empty(channels, np.float32)
    lows, highs = bounds[0], bounds[1]
    bad = 0
    low, high = np.empty(channels, np.float32), np.empty(channels, np.float32)
    bottom = np.empty((chunks, channels), np.float32)
    top = np.empty((chunks, channels), np.float32)
    offset, factor = np.empty(channels, np.float32), np.empty(channels, np.float32)
    per_unit, unit_width = np.empty(channels, np.float32), np.empty(channels, np.float32)
    biased = np.empty(channels, np.uint8)
    most, shift = np.float32(levels), np.float32(bias)
    for unit in range(first, last):
        origin = (unit % kvs) * strides[0] + (unit // kvs) * strides[1]
        for page in range(pages):
            start = page * page_tokens
            length = min(page_tokens, tokens - start)
            used = (length + chunk - 1) // chunk
            # Bounds are taken on integers that sort as the elements do, at their own width.
            for k in range(used):
                least, most_ = lows[k], highs[k]
                least[:] = limits[1]
                most_[:] = limits[0]
                for t in range(start + k * chunk, start + min(length, (k + 1) * chunk)):
                    if not exact[t]:
                        at = origin + t * strides[2]
                        source = x[at : at + channels]
                        for c in range(channels):
                            least[c] = smaller(least[c], to_order(source[c]))
                            most_[c] = larger(most_[c], to_order(source[c]))
                lo, hi = bottom[k], top[k]
                for c in range(channels):
                    empty = least[c] > most_[c]  # every token of the chunk is exact
                    lo[c] = _INF if empty else _element(from_order(least[c]), dtype)
                    hi[c] = -_INF if empty else _element(from_order(most_[c]), dtype)
                    bad += 0 if empty or (lo[c] >= -_MAX and hi[c] <= _MAX) else 1
            if bad:
                return bad
            section = anchor[unit * sections[1] + page * sections[0] :]
            codes_at = channels * (4 + 2 * used)
            for c in range(channels):
                lo1, hi1 = _INF, -_INF
                for k in range(used):
                    lo1 = min(lo1, bottom[k, c])
                    hi1 = max(hi1, top[k, c])
                if lo1 > hi1:  # every token of the page is exact
                    lo1 = hi1 = _ZERO
                lo16, hi16 = _fp16_down(lo1), _fp16_up(hi1)
                section[2 * c] = lo16 & 255
                section[2 * c + 1] = lo16 >> 8
                section[2 * (channels + c)] = hi16 & 255
                section[2 * (channels + c) + 1] = hi16 >> 8
                low[c], high[c] = fp16_to_float(lo16), fp16_to_float(hi16)
                width = high[c] - low[c]
                per_unit[c] = _255 / width if width > _ZERO else _ZERO
                unit_width[c] = width / _255
            plane = section[codes_at:]
            correction = residual[unit * sections[3] + page * sections[2] :]
            for k in range(used):
                base = section[channels * (4 + k) : channels * (5 + k)]
                span = section[channels * (4 + used + k) : channels * (5 + used + k)]
                from_t, to_t = start + k * chunk, start + min(length, (k + 1) * chunk)
                if profile == LINEAR:
                    for c in range(channels):
                        empty = bottom[k, c] > top[k, c]
                        lo1 = np.floor((bottom[k, c] - low[c]) * per_unit[c])
                        hi1 = np.ceil((top[k, c] - low[c]) * per_unit[c])
                        base[c] = float_to_u8(_ZERO if empty else _clip(lo1, _255))
                        span[c] = float_to_u8(_ZERO if empty else _clip(hi1, _255))
                else:
                    _mean_scale(
                        x, dtype, origin, strides[2], exact, from_t, to_t,
                        low, per_unit, row, bottom[k], top[k], base, span,
                    )  # fmt: skip
                for c in range(channels):
                    steps = u8_to_float(span[c])
                    if profile == LINEAR:
                        steps = steps - u8_to_float(base[c])
                    offset[c] = low[c] + u8_to_float(base[c]) * unit_width[c]
                    wide = steps * unit_width[c]
                    factor[c] = scale / wide if wide > _ZERO else _ZERO
                for t in range(from_t, to_t):
                    if exact[t]:
                        biased[:] = bias
                    else:
                        at = origin + t * strides[2]
                        _load(x[at : at + channels], dtype, row)
                        if uniform:
                            for c in range(channels):
                                v = (row[c] - offset[c]) * factor[c]
                                biased[c] = float_to_u8(_whole(_clip(v, most)) + shift)
                        else:
                            for c in range(channels):
                                v = (row[c] - offset[c]) * factor[c]
                                n = 0
                                for step in (128, 64, 32, 16, 8, 4, 2, 1):
                                    n += step if thresholds[n + step - 1] <= v else 0
                                biased[c] = np.uint8(codes[n] + bias)
                    _put_codes(plane, channels, t - start, anchor_bits, biased, residual_bits)
                    if residual_bits:
                        _put_codes(correction, channels, t - start, residual_bits, biased, 0)
            size = codes_at + channels * ((length * anchor_bits + 7) // 8)
            section[size : (size + 15) // 16 * 16] = 0
            size = channels * ((length * residual_bits + 7) // 8)
            correction[size : (size + 15) // 16 * 16] = 0
    return 0


@jit
def _mean_scale(
    x: Any, dtype: int, origin: int, stride: int, exact: Any, from_t: int, to_t: int,
    low: Any, per_unit: Any, row: Any, mean: Any, dev: Any, base: Any, span: Any,
) -> None:  # fmt: skip
    """The paper's chunk scale: mean (into base) and largest deviation from it (into span)."""
    channels = row.size
    mean[:] = _ZERO
    dev[:] = _ZERO
    count = 0
    for sweep in range(2):
        for t in range(from_t, to_t):
            if exact[t]:
                continue
            at = origin + t * stride
            _load(x[at : at + channels], dtype, row)
            for c in range(channels):
                place = (row[c] - low[c]) * per_unit[c]
                if sweep == 0:
                    mean[c] = mean[c] + place
                else:
                    dev[c] = max(dev[c], abs(place - mean[c]))
            if sweep == 0:
                count += 1
        if sweep == 0:
            for c in range(channels):
                mean[c] = _whole(mean[c] / np.float32(count)) if count else _ZERO
    for c in range(channels):
        base[c] = float_to_u8(_clip(mean[c], _255))
        span[c] = float_to_u8(_clip(np.ceil(dev[c]), _255))


@inline
def _read_fp16(section: Any, index: int) -> Any:
    return fp16_to_float(np.uint16(section[2 * index] | section[2 * index + 1] << 8))


@jit
def count_impossible_scales(
    anchor: Any, sections: Any, units: int, pages: int, channels: int
) -> int:
    """Number of page scales that are not finite or upside down, which no encoder writes."""
    wrong = 0
    for unit in range(units):
        for page in range(pages):
            section = anchor[unit * sections[1] + page * sections[0] :]
            for c in range(channels):
                low, high = _read_fp16(section, c), _read_fp16(section, channels + c)
                wrong += 0 if -_MAX <= low <= high <= _MAX else 1
    return wrong


@jit
def decode_units(
    anchor: Any, residual: Any, both: bool, shape: Any,
    profile: int, bits: Any, chunk: int, page_tokens: int,
    scale: Any, uniform: bool, values: Any,
    out: Any, dtype: int, strides: Any, sections: Any, first: int, last: int,
) -> None:  # fmt: skip
    """Decode units ``first`` to ``last`` from their payloads into a cache.

    Args: as for :func:`encode_units`; both: use the residual; values: float32 [256].
    """
    kvs, _, tokens, channels = shape
    anchor_bits, residual_bits, _, bias = bits
    pages = (tokens + page_tokens - 1) // page_tokens
    row = np.empty(channels, np.float32)
    low, width = np.empty(channels, np.float32), np.empty(channels, np.float32)
    offset, factor = np.empty(channels, np.float32), np.empty(channels, np.float32)
    q, r = np.empty(channels, np.uint8), np.empty(channels, np.uint8)
    for unit in range(first, last):
        origin = (unit % kvs) * strides[0] + (unit // kvs) * strides[1]
        for page in range(pages):
            start = page * page_tokens
            length = min(page_tokens, tokens - start)
            used = (length + chunk - 1) // chunk
            section = anchor[unit * sections[1] + page * sections[0] :]
            for c in range(channels):
                low[c] = _read_fp16(section, c)
                width[c] = (_read_fp16(section, channels + c) - low[c]) / _255
            plane = section[channels * (4 + 2 * used) :]
            correction = residual[unit * sections[3] + page * sections[2] :]
            for k in range(used):
                base = section[channels * (4 + k) : channels * (5 + k)]
                span = section[channels * (4 + used + k) : channels * (5 + used + k)]
                for c in range(channels):
                    steps = u8_to_float(span[c])
                    if profile == LINEAR:
                        steps = steps - u8_to_float(base[c])
                    offset[c] = low[c] + u8_to_float(base[c]) * width[c]
                    factor[c] = (steps * width[c]) / scale
                for t in range(start + k * chunk, start + min(length, (k + 1) * chunk)):
                    _get_codes(plane, channels, t - start, anchor_bits, q)
                    if both and residual_bits:
                        _get_codes(correction, channels, t - start, residual_bits, r)
                        for c in range(channels):
                            q[c] = np.uint8(shift_left(q[c], residual_bits) + r[c] - bias)
                    else:
                        for c in range(channels):
                            q[c] = shift_left(q[c], residual_bits)
                    at = origin + t * strides[2]
                    target = out[at : at + channels]
                    if uniform and dtype == BF16:  # the common case, in one loop
                        for c in range(channels):
                            target[c] = float_to_bf16(offset[c] + u8_to_float(q[c]) * factor[c])
                    else:
                        if uniform:
                            for c in range(channels):
                                row[c] = offset[c] + u8_to_float(q[c]) * factor[c]
                        else:
                            for c in range(channels):
                                row[c] = offset[c] + values[q[c]] * factor[c]
                        _store(row, dtype, target)
