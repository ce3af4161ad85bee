"""Packing of codes whose widths differ by channel: a plane for each width, for ``adaptive_cpu``.

Channels of equal width lie side by side, so that packing runs over many channels at once: eight
tokens and LANES channels at a time. A token's channels get into that order and back by a gather;
four tokens share one, as the bytes of a word.
"""

from __future__ import annotations

from typing import Any

from ._compile import inline, jit
from ._lanes import LANES, copy_bytes, copy_lanes, get_lanes, put_lanes
from ._scalars import join_bytes, take_byte
from .adaptive_reference import MAX_WIDTH


@jit
def sort_by_width(width: Any, order: Any, place: Any, sizes: Any) -> int:
    """Channels by falling width, each width padded to whole lanes.

    Args:
        order: channel at each place, place: of each channel, sizes: channels of width 8, 7 … 1.

    Returns:
        number of places.
    """
    at = 0
    for i in range(MAX_WIDTH):
        start = at
        for c in range(width.size):
            if width[c] == MAX_WIDTH - i:
                order[at] = c
                place[c] = at
                at += 1
        sizes[i] = at - start
        while at % LANES:
            order[at] = 0
            at += 1
    return at


@jit
def pack(codes: Any, sizes: Any, block: int, blocks: int, rows: Any, planes: Any) -> None:
    """Write eight tokens' codes, sorted by width, into the planes of all widths.

    Args:
        codes: uint8 [8, places]; block: which eight tokens of ``blocks``, to be given in order;
            rows: scratch, uint8 [MAX_WIDTH, places].
    """
    places = codes.shape[1]
    place, start = 0, 0
    for i in range(MAX_WIDTH):
        bits, n = MAX_WIDTH - i, sizes[i]
        end = start + blocks * bits * n
        for first in range(place, place + n, LANES):
            for t in range(8):
                j, shift = (t * bits) >> 3, (t * bits) & 7
                source, target = t * places + first, j * places + first
                put_lanes(codes, source, rows, target, shift, shift == 0)
                if shift + bits > 8:
                    put_lanes(codes, source, rows, target + places, shift - 8, True)
        for j in range(bits):
            row, at = j * places + place, start + (block * bits + j) * n
            for first in range(0, n, LANES):
                # What whole lanes write too far is written again later, inside this width's planes.
                if at + first + LANES <= end:
                    copy_lanes(planes, at + first, rows, row + first)
                else:
                    copy_bytes(planes, at + first, rows, row + first, n - first)
        place += (n + LANES - 1) // LANES * LANES
        start = end


@jit
def unpack(planes: Any, sizes: Any, block: int, blocks: int, rows: Any, codes: Any) -> None:
    """The inverse of :func:`pack`; rows: scratch, uint8 [MAX_WIDTH + 1, LANES]."""
    places = codes.shape[1]
    place, start = 0, 0
    for i in range(MAX_WIDTH):
        bits, n = MAX_WIDTH - i, sizes[i]
        for first in range(0, n, LANES):
            at = start + block * bits * n + first
            for j in range(bits):
                if at + LANES <= planes.size:
                    copy_lanes(rows, j * LANES, planes, at)
                else:
                    copy_bytes(rows, j * LANES, planes, at, n - first)
                at += n
            for t in range(8):
                j, shift = (t * bits) >> 3, (t * bits) & 7
                get_lanes(rows, j * LANES, codes, t * places + place, shift, (1 << bits) - 1)
            place += LANES
        start += blocks * bits * n


@inline
def reorder(codes: Any, order: Any, word: Any, moved: Any, out: Any) -> None:
    """Four tokens' codes [4, channels] into another order of channels, by one gather."""
    first, second, third, fourth = codes[0], codes[1], codes[2], codes[3]
    for c in range(word.size):
        word[c] = join_bytes(first[c], second[c], third[c], fourth[c])
    for i in range(order.size):
        moved[i] = word[order[i]]
    for k in range(4):
        row = out[k]
        for i in range(moved.size):
            row[i] = take_byte(moved[i], 8 * k)
