"""The companding grid as tables, so that every device maps the same input to the same code.

The stages of a profile meet here: the chunk stage turns a value into ``v``, a position on the
chunk's scale; the tables turn ``v`` into a grid index ``q`` and back. They are computed in decimal
arithmetic, correctly rounded, because ``log`` differs between math libraries in the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .spec import CodecSpec


@dataclass(frozen=True)
class Grid:
    """Tables of one spec.

    Attributes:
        scale: ``v`` runs over [0, scale] (``linear``) or [-scale, scale] (``paper``).
        uniform: True when ``q = round_half_even(v)``, and the tables merely say the same.
        thresholds: float32, ascending; code number = how many of them are <= v.
        codes: uint8, one more than thresholds: grid index q of each code number.
        values: float32 [256]: the ``v`` that a grid index is reconstructed to.
    """

    scale: float
    uniform: bool
    thresholds: npt.NDArray[np.float32]
    codes: npt.NDArray[np.uint8]
    values: npt.NDArray[np.float32]


def _expand(f: Decimal, alpha: Decimal) -> Decimal:
    """Inverse of the α-law ``log(1 + αu) / log(1 + α)`` on [0, 1]; the identity for α = 0."""
    return f if alpha == 0 else ((1 + alpha) ** f - 1) / alpha


def _magnitudes(steps: Decimal, count: int, alpha: Decimal) -> list[Decimal]:
    return [_expand(Decimal(i) / steps, alpha) for i in range(count)]


@lru_cache(maxsize=64)
def grid_of(spec: CodecSpec) -> Grid:
    """The tables of a spec."""
    with localcontext() as ctx:
        ctx.prec = 40
        return _paper(spec) if spec.profile == "paper" else _linear(spec)


def _linear(spec: CodecSpec) -> Grid:
    """Grid indices 0..levels on [0, levels], companded outwards from the middle by α."""
    levels, alpha = spec.levels, Decimal(spec.alpha)

    def place(index: Decimal) -> Decimal:
        u = 2 * index / levels - 1
        return (1 + _expand(abs(u), alpha).copy_sign(u)) * levels / 2

    values = [place(Decimal(q)) for q in range(levels + 1)]
    bounds = [place(Decimal(q) + Decimal("0.5")) for q in range(levels)]
    return _tables(float(levels), spec.alpha == 0, bounds, list(range(levels + 1)), values)


def _paper(spec: CodecSpec) -> Grid:
    """Sign and magnitude: 0..M on a logarithmic scale, M the largest that both signs can hold.

    The upper half of the grid are the positive magnitudes, the lower half, mirrored, the negative
    ones; +0 and -0 are the anchors beside the middle, so a small value keeps its sign, and ±M are
    the outermost anchors, so a chunk's largest deviation is exact already in the anchor.
    """
    step = 1 << spec.residual_bits
    most = ((1 << spec.anchor_bits) - 2 >> 1) * step
    alpha = Decimal(spec.alpha)
    scale = Decimal(most)
    level = [m * most for m in _magnitudes(scale, most + 1, alpha)]
    middle = [_expand((Decimal(m) + Decimal("0.5")) / scale, alpha) * most for m in range(most)]
    bounds = [-b for b in reversed(middle)] + [Decimal(0)] + middle
    codes = [*range(most + 1), *range(most + step, 2 * most + step + 1)]
    values = [-v for v in reversed(level)] + [Decimal(0)] * (step - 1) + level
    return _tables(float(most), False, bounds, codes, values)


def _tables(
    scale: float, uniform: bool, bounds: list[Decimal], codes: list[int], values: list[Decimal]
) -> Grid:
    table = np.arange(256, dtype=np.float32) if uniform else np.zeros(256, np.float32)
    table[: len(values)] = [np.float32(float(v)) for v in values]
    return Grid(
        scale,
        uniform,
        np.array([float(b) for b in bounds], np.float32),
        np.array(codes, np.uint8),
        table,
    )
