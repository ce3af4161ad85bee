"""What the kernels are compiled with. No CuPy and no GPU: tests compile them without either."""

from __future__ import annotations

import math

import numpy as np

from .grid import grid_of
from .spec import SINK_RATIO, SINK_SHARE, CodecSpec

#: IEEE arithmetic, one operation at a time: what makes the bytes equal to the CPU's.
OPTIONS = ("--std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")
_COMMON = ("element.cuh", "cache.cuh", "digest.cu")
#: Files of ``kernels/`` that make one module, in order.
CHUNKED_FILES = (*_COMMON, "chunked.cu")
ENCODE_FILES = (*_COMMON, "adaptive.cuh", "adaptive_encode.cu")
DECODE_FILES = (*_COMMON, "adaptive.cuh", "adaptive_decode.cu")
#: Threads of a block of the kernels of ``adaptive``.
THREADS = 256
_WARP = 32


def chunked_defines(spec: CodecSpec, place: dict[str, int]) -> dict[str, object]:
    """What ``kernels/chunked.cu`` is compiled with."""
    grid = grid_of(spec)
    # Chunks that are not whole groups of 8 tokens need more shared memory for each channel.
    vec = 1 if spec.chunk % 8 else place["VEC"]
    return place | {
        "VEC": vec,
        "ENCODE_BLOCKS": max(1, min(4, 1024 // spec.page_tokens)),
        "PAPER": int(spec.profile == "paper"),
        "ANCHOR_BITS": spec.anchor_bits,
        "RESIDUAL_BITS": spec.residual_bits,
        "CHUNK": spec.chunk,
        "PAGE": spec.page_tokens,
        "RUN": math.gcd(spec.chunk, 8),
        "UNIFORM": int(grid.uniform),
        "SCALE": f"{grid.scale}f",
        "EXACT": spec.exact_tokens,
        "SINK_RATIO": SINK_RATIO,
        "SINK_SHARE": SINK_SHARE[0],
        "SINK_SHARE_OF": SINK_SHARE[1],
    }


def encode_defines(
    spec: CodecSpec, place: dict[str, int], kv: int, pairs: int, most: int
) -> tuple[dict[str, object], int]:
    """What ``kernels/adaptive_encode.cu`` is compiled with; shared memory of a block."""
    defines, apart = _defines(spec, place, kv, pairs)
    dim, width = place["DIM"], 4 if place["DTYPE"] == 2 else 2
    slots = 8 if place["BLOCK"] else 0
    rest = dim * (4 * apart + 29) + (8 + slots) * spec.page_tokens + 1024
    staged = spec.page_tokens * dim * width + rest <= most
    shared = rest + spec.page_tokens * dim * (width if staged else 1)
    blocks = max(1, min(3, most // shared))
    return defines | {
        "STAGED": int(staged), "COPY": place["VEC"], "BLOCKS": blocks, "SHARED_BYTES": shared,
    }, shared  # fmt: skip


def decode_defines(
    spec: CodecSpec, place: dict[str, int], kv: int, pairs: int, most: int
) -> tuple[dict[str, object], int]:
    """What ``kernels/adaptive_decode.cu`` is compiled with; shared memory of a block."""
    defines, apart = _defines(spec, place, kv, pairs)
    slots = 8 if place["BLOCK"] else 0
    shared = place["DIM"] * (spec.page_tokens + 4 * apart + 17)
    shared += (4 + slots) * spec.page_tokens + 1536
    blocks = max(1, min(3, most // shared))
    return defines | {"BLOCKS": blocks, "SHARED_BYTES": shared}, shared


def _defines(
    spec: CodecSpec, place: dict[str, int], kv: int, pairs: int
) -> tuple[dict[str, object], int]:
    """Definitions for ``kernels/adaptive.cuh``, and rows of threads that rotate through memory."""
    dim, beta = place["DIM"], spec.alpha
    power = 1 << (dim - 1).bit_length()
    vec = min(place["VEC"], max(4, dim // _WARP))  # whole warps to a token, but 4 bytes to a thread
    paired = dim == power and 2 <= vec <= dim and dim // vec <= _WARP and pairs in (0, dim // 2)
    if not paired:
        vec = place["VEC"]
    packs = dim // vec if paired else max(1, power // vec)
    lanes = min(packs, _WARP)
    curve = {
        "BETA": beta, "ONE_LESS": 1 - beta, "ONE_LESS_SQUARED": (1 - beta) ** 2, "FOUR": 4 * beta,
        "INVERSE": 1 / (2 * beta) if beta else 0.0,
    }  # fmt: skip
    defines: dict[str, object] = place | {
        "VEC": vec,
        "KV": kv,
        "RESIDUAL_BITS": spec.residual_bits,
        "PAGE": spec.page_tokens,
        "PAIRS": pairs,
        "THREADS": THREADS,
        "LANES": lanes,
        "COLUMNS": packs // lanes,
        "PAIRED": int(paired),
        "CURVED": int(beta > 0),
        **{name: f"{float(np.float32(x))!r}f" for name, x in curve.items()},
    }
    return defines, THREADS // lanes if pairs and not paired else 0
