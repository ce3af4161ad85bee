"""Scalar conversions that numba lacks, as LLVM instructions that vectorise.

numba widens every integer to 64 bits and has no bfloat16 or float16 on CPU, so that the obvious
Python would neither compile nor vectorise.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F16, _F32 = ir.HalfType(), ir.FloatType()


@intrinsic
def bf16_to_float(_: Any, x: Any) -> Any:
    """bfloat16 bits (uint16) to float32."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.bitcast(b.shl(b.zext(args[0], _I32), _I32(16)), _F32)

    return types.float32(types.uint16), emit


@intrinsic
def float_to_bf16(_: Any, x: Any) -> Any:
    """float32 to bfloat16 bits, half to even; x is finite."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        u = b.bitcast(args[0], _I32)
        odd = b.and_(b.lshr(u, _I32(16)), _I32(1))
        return b.trunc(b.lshr(b.add(b.add(u, _I32(0x7FFF)), odd), _I32(16)), _I16)

    return types.uint16(types.float32), emit


@intrinsic
def fp16_to_float(_: Any, x: Any) -> Any:
    """float16 bits (uint16) to float32."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.fpext(b.bitcast(args[0], _F16), _F32)

    return types.float32(types.uint16), emit


@intrinsic
def float_to_fp16(_: Any, x: Any) -> Any:
    """float32 to float16 bits, half to even."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.bitcast(b.fptrunc(args[0], _F16), _I16)

    return types.uint16(types.float32), emit


@intrinsic
def bits_to_float(_: Any, x: Any) -> Any:
    """float32 bits (uint32) to float32."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.bitcast(args[0], _F32)

    return types.float32(types.uint32), emit


@intrinsic
def float_to_bits(_: Any, x: Any) -> Any:
    """float32 to its bits (uint32)."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.bitcast(args[0], _I32)

    return types.uint32(types.float32), emit


@intrinsic
def float_to_u8(_: Any, x: Any) -> Any:
    """A whole float32 in [0, 255] to uint8."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.trunc(b.fptosi(args[0], _I32), _I8)

    return types.uint8(types.float32), emit


@intrinsic
def magnitude(_: Any, x: Any) -> Any:
    """Bits of abs(float32) as int32: sorts as the size does, with infinity and NaN above all."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.and_(b.bitcast(args[0], _I32), _I32(0x7FFFFFFF))

    return types.int32(types.float32), emit


@intrinsic
def upper_byte(_: Any, x: Any, bits: Any) -> Any:
    """What a whole float32 in [0, 65535] has above its lowest ``bits`` bits, as uint8."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.trunc(b.lshr(b.fptosi(args[0], _I32), b.trunc(args[1], _I32)), _I8)

    return types.uint8(types.float32, types.int64), emit


@intrinsic
def lower_byte(_: Any, x: Any) -> Any:
    """The lowest eight bits of a whole float32 in [0, 65535]."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.trunc(b.fptosi(args[0], _I32), _I8)

    return types.uint8(types.float32), emit


@intrinsic
def u8_to_float(_: Any, x: Any) -> Any:
    """uint8 to float32."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.sitofp(b.zext(args[0], _I32), _F32)

    return types.float32(types.uint8), emit


@intrinsic
def join_bytes(_: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Four uint8 as one uint32, the first lowest."""

    def emit(context: Any, build: Any, sig: Any, args: Any) -> Any:
        word = build.zext(args[0], _I32)
        for i in (1, 2, 3):
            word = build.or_(word, build.shl(build.zext(args[i], _I32), _I32(8 * i)))
        return word

    return types.uint32(*[types.uint8] * 4), emit


@intrinsic
def take_byte(_: Any, word: Any, bits: Any) -> Any:
    """The uint8 that starts ``bits`` above the lowest bit of a uint32."""

    def emit(context: Any, build: Any, sig: Any, args: Any) -> Any:
        return build.trunc(build.lshr(args[0], build.trunc(args[1], _I32)), _I8)

    return types.uint8(types.uint32, types.int64), emit


@intrinsic
def to_order(_: Any, bits: Any) -> Any:
    """Bits of a float (uint16 or uint32) as a signed integer that sorts as the float does."""
    signed = types.int16 if bits == types.uint16 else types.int32

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return _flip_negative(b, args[0])

    return signed(bits), emit


@intrinsic
def from_order(_: Any, order: Any) -> Any:
    """The inverse of :func:`to_order`."""
    unsigned = types.uint16 if order == types.int16 else types.uint32

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return _flip_negative(b, args[0])

    return unsigned(order), emit


def _flip_negative(b: Any, word: Any) -> Any:
    """All bits but the sign inverted where the sign is set; its own inverse."""
    width = word.type.width
    sign = b.ashr(word, word.type(width - 1))
    return b.xor(word, b.and_(sign, word.type((1 << (width - 1)) - 1)))


@intrinsic
def smaller(_: Any, x: Any, y: Any) -> Any:
    """The smaller of two signed integers of one width, in that width."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.select(b.icmp_signed("<", args[0], args[1]), args[0], args[1])

    return x(x, x), emit


@intrinsic
def larger(_: Any, x: Any, y: Any) -> Any:
    """The larger of two signed integers of one width, in that width."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.select(b.icmp_signed(">", args[0], args[1]), args[0], args[1])

    return x(x, x), emit


@intrinsic
def shift_left(_: Any, x: Any, bits: Any) -> Any:
    """uint8 << bits in 8 bits, bits below 8."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.shl(args[0], b.trunc(args[1], _I8))

    return types.uint8(types.uint8, types.int64), emit


@intrinsic
def shift_right(_: Any, x: Any, bits: Any) -> Any:
    """uint8 >> bits in 8 bits, bits below 8."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.lshr(args[0], b.trunc(args[1], _I8))

    return types.uint8(types.uint8, types.int64), emit


# As wide as LLVM's own stores: a load that spans two of them would wait for memory.
_EIGHT = ir.VectorType(_F32, 8)


def _eight(b: Any, data: Any, at: Any) -> Any:
    """Address of eight float32 from ``data[at]`` on."""
    return b.bitcast(b.gep(data, [at]), _EIGHT.as_pointer())


@intrinsic
def add_upper_half(_: Any, x: Any, half: Any) -> Any:
    """x[:half] += x[half:2 * half]; float32, half a multiple of 8."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, b, args[0]).data
        with cgutils.for_range(b, b.lshr(args[1], _I64(3))) as loop:
            at = b.shl(loop.index, _I64(3))
            lower, upper = _eight(b, data, at), _eight(b, data, b.add(at, args[1]))
            b.store(b.fadd(b.load(lower, align=4), b.load(upper, align=4)), lower, align=4)
        return context.get_dummy_value()

    return types.void(x, types.int64), emit


@intrinsic
def sum_eight(_: Any, x: Any) -> Any:
    """Sum of an array's first 8 float32 by halves: element i takes element i + 4, 2, 1."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, b, args[0]).data
        v = b.load(_eight(b, data, _I64(0)), align=4)
        for half in (4, 2, 1):
            lower, upper = (
                b.shuffle_vector(v, v, ir.VectorType(_I32, half)(list(range(at, at + half))))
                for at in (0, half)
            )
            v = b.fadd(lower, upper)
        return b.extract_element(v, _I32(0))

    return types.float32(x), emit


#: Bytes that the functions on lanes work on at once.
LANES = 32
_BYTES, _WIDE = ir.VectorType(_I8, LANES), ir.VectorType(_I16, LANES)


def _pointer(context: Any, b: Any, kind: Any, array: Any, at: Any) -> Any:
    """Address of byte ``at`` of a contiguous array."""
    data = context.make_array(kind)(context, b, array).data
    return b.gep(b.bitcast(data, _I8.as_pointer()), [at])


def _all_lanes(b: Any, value: Any) -> Any:
    """The same value in every lane."""
    vector = ir.VectorType(value.type, LANES)
    one = b.insert_element(vector(ir.Undefined), value, _I32(0))
    return b.shuffle_vector(one, vector(ir.Undefined), ir.VectorType(_I32, LANES)(None))


def _load_lanes(b: Any, address: Any) -> Any:
    return b.load(b.bitcast(address, _BYTES.as_pointer()), align=1)


def _store_lanes(b: Any, value: Any, address: Any) -> None:
    b.store(value, b.bitcast(address, _BYTES.as_pointer()), align=1)


@intrinsic
def put_lanes(_: Any, source: Any, start: Any, target: Any, at: Any, shift: Any, fresh: Any) -> Any:
    """LANES bytes of ``source``, each shifted by -8 < shift < 8, or-ed to ``target`` or put there.

    start, at: where in contiguous arrays of bytes; fresh: what was in target does not matter.
    """

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        code = b.zext(_load_lanes(b, _pointer(context, b, sig.args[0], args[0], args[1])), _WIDE)
        down = _all_lanes(b, b.sub(_I16(8), b.trunc(args[4], _I16)))
        moved = b.trunc(b.lshr(b.shl(code, _all_lanes(b, _I16(8))), down), _BYTES)
        address = _pointer(context, b, sig.args[2], args[2], args[3])
        kept = b.and_(_load_lanes(b, address), _all_lanes(b, b.select(args[5], _I8(0), _I8(255))))
        _store_lanes(b, b.or_(kept, moved), address)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64, types.int64, types.boolean), emit


@intrinsic
def get_lanes(_: Any, rows: Any, at: Any, target: Any, start: Any, shift: Any, mask: Any) -> Any:
    """``target[start]`` on = mask of rows[at] on with the next row above it, shifted down."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        address = _pointer(context, b, sig.args[0], args[0], args[1])
        low = b.zext(_load_lanes(b, address), _WIDE)
        high = b.zext(_load_lanes(b, b.gep(address, [_I32(LANES)])), _WIDE)
        both = b.or_(low, b.shl(high, _all_lanes(b, _I16(8))))
        code = b.trunc(b.lshr(both, _all_lanes(b, b.trunc(args[4], _I16))), _BYTES)
        code = b.and_(code, _all_lanes(b, b.trunc(args[5], _I8)))
        _store_lanes(b, code, _pointer(context, b, sig.args[2], args[2], args[3]))
        return context.get_dummy_value()

    return types.void(rows, types.int64, target, types.int64, types.int64, types.int64), emit


@intrinsic
def copy_lanes(_: Any, target: Any, at: Any, source: Any, start: Any) -> Any:
    """Copy LANES bytes between contiguous arrays of bytes."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        lanes = _load_lanes(b, _pointer(context, b, sig.args[2], args[2], args[3]))
        _store_lanes(b, lanes, _pointer(context, b, sig.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64), emit


@intrinsic
def copy_bytes(_: Any, target: Any, at: Any, source: Any, start: Any, count: Any) -> Any:
    """Copy bytes between contiguous arrays of bytes."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        to = _pointer(context, b, sig.args[0], args[0], args[1])
        source_ = _pointer(context, b, sig.args[2], args[2], args[3])
        cgutils.raw_memcpy(b, to, source_, args[4], 1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), emit
