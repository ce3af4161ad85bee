"""Scalar conversions that numba lacks, as LLVM instructions that vectorise.

numba widens every integer to 64 bits and has no bfloat16 or float16 on CPU, so that the obvious
Python would neither compile nor vectorise.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
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
