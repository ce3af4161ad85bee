"""Several elements at a time, for loops that LLVM cannot make vectors of by itself.

Arrays are contiguous; an offset into bytes or float32 is not checked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()

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
