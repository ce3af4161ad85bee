"""The ``adaptive`` profile with a switch for every stage, in torch, on any device.

With all switches as they are by default this is what :mod:`..codec.adaptive_reference` defines: the
same reconstructions and the same bits (``tests/test_benchmark_stages.py``). What a stage saves when
it is off goes to the code bits, so variants are compared at equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..codec import Calibration, CodecSpec
from ..codec import adaptive_reference as definition
from ..codec.calibration import OCTAVE
from ..layout import KVLayout

Tensor = torch.Tensor
KEYS, VALUES = 0, 1


@dataclass(frozen=True)
class AdaptiveStages:
    """What is on. Pairs are (keys, values).

    Attributes:
        exact_rows: tokens of every head and page that are kept nearly exact.
        rotation: keys are stored without the rotation that their place adds: ``"page"``, counted
            from the page's first token, ``"absolute"``, from the prompt's (which a codec of chunks
            does not know), or ``""``, never.
        token_scale: a scale for every token.
        widths: bits by channel; off: the same number of levels everywhere, billed as if codes of
            a fraction of a bit could be packed.
        priority: widths follow the calibration's priorities, too.
        companding: strength, of both.
        key_bits_to_values: values get more bits than keys.
        basis: another basis for a head's channels: ``""``, ``"hadamard"`` or ``"klt"``, learnt
            from another text; keys are weighted by their priorities first.
        shrink: share of the range that is cut off at both ends.
        at_mean: an anchor code stands for the mean of what another text put there, not for the
            middle of its bin.
        feedback: share of a token's anchor error that is taken off the next token's.
    """

    exact_rows: int = 1
    rotation: str = "page"
    token_scale: tuple[bool, bool] = (False, True)
    widths: bool = True
    priority: bool = True
    companding: tuple[bool, bool] = (True, True)
    key_bits_to_values: bool = True
    basis: tuple[str, str] = ("", "")
    shrink: float = 0.0
    at_mean: bool = False
    feedback: float = 0.0


@dataclass
class Learnt:
    """What variants take from another text.

    Attributes:
        basis: of keys and values, orthonormal [layers, kv_heads, head_dim, head_dim], columns are
            the new channels.
        levels: of keys and values, by width: [2^width] what a code stands for, in [0, 1].
    """

    basis: dict[int, Tensor] = field(default_factory=dict)
    levels: dict[tuple[int, int], Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Simulated:
    """Reconstructions, float32 in the cache's shape, and bits an element without headers."""

    anchor: Tensor
    full: Tensor
    anchor_bits: float
    full_bits: float


@dataclass(frozen=True)
class _Side:
    """What a page has beside its codes. [layers, 1, kv_heads, ...] where not said otherwise."""

    rows: Tensor  # bool [layers, tokens, kv_heads, 1]: kept nearly exact
    row_values: tuple[Tensor, Tensor]  # of anchor and full, at the rows
    scale: Tensor  # [layers, tokens or 1, kv_heads, 1]
    low: Tensor
    range: Tensor
    levels: Tensor  # anchor levels of each channel


# -- pieces, as in the definition ------------------------------------------------------------------


def _sum_of_squares(x: Tensor) -> Tensor:
    d = x.shape[-1]
    half = 1 << (d - 1).bit_length()
    s = torch.nn.functional.pad(x * x, (0, half - d))
    while half > 1:
        half //= 2
        s = s[..., :half] + s[..., half : 2 * half]
    return s


def _fp16_down(x: Tensor) -> Tensor:
    h = x.half()
    bits = h.view(torch.int16)
    zero = torch.full_like(bits, -32767)  # the largest fp16 below 0
    below = torch.where(h > 0, bits - 1, torch.where(h < 0, bits + 1, zero))
    return torch.where(h.float() > x, below.view(torch.half).float(), h.float()) + 0.0


def _bf16_down(x: Tensor) -> Tensor:
    u = x.contiguous().view(torch.int32)
    cut = u & -65536
    return torch.where((u < 0) & (u != cut), cut + 65536, cut).view(torch.float32) + 0.0


def _quarter_exponent(power: Tensor) -> Tensor:
    u = power.view(torch.int32)
    mantissa = u & 0x7FFFFF
    low, high = (int(definition.QUARTERS[i].view("uint32")) & 0x7FFFFF for i in (1, 3))
    return 2 * ((u >> 23) - 127) + (mantissa >= low).int() + (mantissa >= high).int()


def _power_of_two(e: Tensor) -> Tensor:
    return ((e.int() + 127) << 23).view(torch.float32)


def _widths(ranges: Tensor, priority: Tensor, total: int) -> Tensor:
    d = ranges.shape[-1]
    level = ranges.half().view(torch.int16).int() + 128 * priority
    steps = 1024 * torch.arange(1, definition.MAX_WIDTH, device=ranges.device, dtype=torch.int32)
    wanted = (level[..., None] - steps).flatten(-2)
    order = wanted.sort(dim=-1, descending=True, stable=True).indices[..., : total - d]
    given = torch.zeros_like(wanted).scatter_(-1, order, 1)
    return 1 + given.unflatten(-1, (d, len(steps))).sum(-1)


def _compand(u: Tensor, beta: float) -> Tensor:
    if beta == 0:
        return u
    z = u + u - 1
    # torch's own float32 sqrt is not always IEEE's.
    root = ((1 - beta) ** 2 + (4 * beta) * z.abs()).double().sqrt().float()
    m = (root - (1 - beta)) * (1 / (2 * beta))
    return (torch.copysign(m, z) + 1) * 0.5


def _expand(w: Tensor, beta: float) -> Tensor:
    if beta == 0:
        return w
    z = w + w - 1
    return (z * ((1 - beta) + beta * z.abs()) + 1) * 0.5


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    pairs = cos.shape[-1]
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    turned = (a * cos + b * sin, b * cos - a * sin) if back else (
        a * cos - b * sin, b * cos + a * sin
    )  # fmt: skip
    return torch.cat([*turned, rest], -1)


def hadamard(d: int) -> Tensor:
    """The orthonormal Hadamard matrix [d, d]; d is a power of two."""
    h = torch.ones(1, 1)
    while len(h) < d:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / d**0.5


# -- the profile -----------------------------------------------------------------------------------


class Adaptive:
    """One variant for one model.

    Args:
        stages: what is on.
        spec: profile ``adaptive``; its bits and companding count.
        calibration: of the model.
        learnt: needed by the variants that say so.
    """

    def __init__(
        self,
        stages: AdaptiveStages,
        spec: CodecSpec,
        calibration: Calibration,
        learnt: Learnt | None = None,
    ) -> None:
        self.stages, self.spec, self.learnt = stages, spec, learnt or Learnt()
        table = calibration.table.astype(int)
        self._cos, self._sin = (
            torch.from_numpy(t[table])[:, :, None] for t in (calibration.cos, calibration.sin)
        )
        self._priority = torch.from_numpy(calibration.priority.astype("int32"))[:, None]

    def __call__(self, kv: Tensor) -> Simulated:
        """``kv`` [2, layers, tokens, kv_heads, head_dim], any float dtype."""
        _, layers, tokens, heads, d = kv.shape
        layout = KVLayout(2, layers, tokens, heads, d, "float32")
        size = self.spec.page_tokens
        anchors, fulls, bits = [], [], 0
        for start in range(0, tokens, size):
            page = kv[:, :, start : start + size].float()
            both = [self._page(page, k, start, layout) for k in (KEYS, VALUES)]
            anchors.append(torch.stack([b[0] for b in both]))
            fulls.append(torch.stack([b[1] for b in both]))
            bits += (
                layers
                * heads
                * sum(self.page_bits(layout, k, page.shape[2]) for k in (KEYS, VALUES))
            )
        spent = bits / kv.numel()
        return Simulated(
            torch.cat(anchors, 2), torch.cat(fulls, 2), spent, spent + self.spec.residual_bits
        )

    def code_bits(self, layout: KVLayout, kv: int) -> int:
        """Anchor bits of one token's codes in one head, at the profile's budget."""
        d, s = layout.head_dim, self.stages
        usual = AdaptiveStages()
        totals = [definition.total_bits(self.spec, layout, k) for k in (KEYS, VALUES)]
        total = totals[kv]
        if not s.key_bits_to_values:
            moved = (totals[VALUES] + 4 - totals[KEYS]) // 2
            total += moved if kv == KEYS else -moved
        page = self.spec.page_tokens
        freed = _side_bits(usual, d, kv, page) - _side_bits(s, d, kv, page)
        return min(definition.MAX_WIDTH * d, total + round(freed / page))

    def page_bits(self, layout: KVLayout, kv: int, tokens: int) -> int:
        """Anchor bits of one head's page, all side information counted."""
        codes = tokens * self.code_bits(layout, kv)
        return codes + _side_bits(self.stages, layout.head_dim, kv, tokens)

    # One page of all layers: [layers, tokens, kv_heads, head_dim].

    def _page(self, page: Tensor, kv: int, start: int, layout: KVLayout) -> tuple[Tensor, Tensor]:
        y, side, turn = self._prepare(page, kv, start, layout)
        anchor, full = self._code(y, side, kv)
        out = []
        for part, rows in zip((anchor, full), side.row_values, strict=True):
            x = self._back(part * side.scale, kv, turn)
            out.append(torch.where(side.rows, rows, x))
        return out[0], out[1]

    def _prepare(
        self, page: Tensor, kv: int, start: int, layout: KVLayout
    ) -> tuple[Tensor, _Side, Any]:
        """What is quantized, in units of its scale, and how."""
        s, r, d = self.stages, self.spec.residual_bits, layout.head_dim
        x, tokens = page[kv], page.shape[2]
        squares = _sum_of_squares(page[VALUES])
        order = squares.argsort(dim=1, stable=True)[:, : s.exact_rows]
        rows = torch.zeros_like(squares, dtype=torch.bool).scatter(1, order, True)
        row_low = _bf16_down(x.amin(-1, keepdim=True))
        row_range = -_bf16_down(row_low - x.amax(-1, keepdim=True))
        row_range = row_range.clamp_min(float(definition.MIN_ROW_RANGE))
        most = 1 << (8 + r)
        code = ((x - row_low) / row_range * most).floor().clamp(0, most - 1).int()
        row_values = tuple(
            row_low + ((code >> drop).float() + 0.5) * 2.0 ** -(8 + r - drop) * row_range
            for drop in (r, 0)
        )

        turn = self._turn(start, tokens, page.device) if kv == KEYS and s.rotation else None
        y = self._forth(x, kv, turn)
        if s.token_scale[kv]:
            own = squares if kv == VALUES else _sum_of_squares(y)
            e = _quarter_exponent(
                (own / torch.full_like(own, d)).clamp_min(float(definition.MIN_POWER))
            )
            top = e.masked_fill(rows, -(1 << 30)).amax(1, keepdim=True)
            top = torch.where(rows.all(1, keepdim=True), e[:, :1], top)
            n = torch.where(rows, top, top - (top - e).clamp_max(definition.SCALE_STEPS))
            quarters, inverse = (
                torch.from_numpy(q).to(y.device)
                for q in (definition.QUARTERS, definition.INVERSE_QUARTERS)
            )
            scale = quarters[(n & 3).long()] * _power_of_two(n >> 2)
            y = y * (inverse[(n & 3).long()] * _power_of_two(-(n >> 2)))
        else:
            largest = y.abs().masked_fill(rows, 0).amax((1, 3), keepdim=True)
            e = torch.frexp(largest).exponent.clamp_min(definition.LEAST_EXPONENT)
            e = e.masked_fill(largest == 0, definition.LEAST_EXPONENT)
            scale, y = _power_of_two(e), y * _power_of_two(-e)
        if kv == VALUES:
            y = self._to_basis(y, kv)

        none = rows.all(1, keepdim=True)
        bottom = y.masked_fill(rows, torch.inf).amin(1, keepdim=True).masked_fill(none, 0)
        above = y.masked_fill(rows, -torch.inf).amax(1, keepdim=True).masked_fill(none, 0)
        if s.shrink:
            cut = (above - bottom) * s.shrink
            bottom, above = bottom + cut, above - cut
        low = _fp16_down(bottom)
        ranges = (-_fp16_down(low - above)).clamp_min(float(definition.MIN_RANGE))
        total = self.code_bits(layout, kv)
        if s.widths:
            used = kv == KEYS and s.priority and not s.basis[KEYS]
            priority = self._priority.to(y.device) if used else torch.zeros_like(self._priority)
            levels = _power_of_two(_widths(ranges, priority.to(y.device), total))
        else:
            levels = torch.full_like(ranges, float(int(2 ** (total / d))))
        return y, _Side(rows, (row_values[0], row_values[1]), scale, low, ranges, levels), turn

    def _code(self, y: Tensor, side: _Side, kv: int) -> tuple[Tensor, Tensor]:
        """Anchor and full, in units of the scale."""
        fine = 1 << self.spec.residual_bits
        beta = self.spec.alpha if self.stages.companding[kv] else 0.0
        levels = side.levels
        u = _compand(((y - side.low) * (1 / side.range)).clamp(0, 1), beta)
        q = torch.minimum((u * (levels * fine)).floor().clamp_min(0), levels * fine - 1)
        a = (q / fine).floor()
        if self.stages.feedback:
            a = self._fed_back(u, levels)
            q = a * fine + (((u * levels) - a) * fine).floor().clamp(0, fine - 1)
        coarse = _expand((a + 0.5) * (1 / levels), beta)
        if self.stages.at_mean:
            coarse = self._at_mean(a, coarse, levels, kv)
        full = _expand((q + 0.5) * (1 / (levels * fine)), beta)
        return side.low + coarse * side.range, side.low + full * side.range

    def _fed_back(self, u: Tensor, levels: Tensor) -> Tensor:
        codes, error = [], torch.zeros_like(u[:, 0])
        for t in range(u.shape[1]):
            wanted = u[:, t] + self.stages.feedback * error
            code = torch.minimum((wanted * levels[:, 0]).floor().clamp_min(0), levels[:, 0] - 1)
            error = wanted - (code + 0.5) / levels[:, 0]
            codes.append(code)
        return torch.stack(codes, 1)

    def _at_mean(self, a: Tensor, middle: Tensor, levels: Tensor, kv: int) -> Tensor:
        out = middle
        for width in range(1, definition.MAX_WIDTH + 1):
            table = self.learnt.levels[kv, width].to(a.device)
            has = (levels == 2**width).expand_as(a)
            out = torch.where(has, table[a.long().clamp_max(2**width - 1)], out)
        return out

    # -- bases

    def _turn(self, start: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [layers, tokens, 1, pairs]."""
        cos, sin = self._cos[:, :tokens], self._sin[:, :tokens]
        if self.stages.rotation == "absolute":
            step = torch.atan2(self._sin[:, 1:2].double(), self._cos[:, 1:2].double())
            at = torch.arange(start, start + tokens, dtype=torch.float64)[None, :, None, None]
            cos, sin = (step * at).cos().float(), (step * at).sin().float()
        return cos.to(device), sin.to(device)

    def _forth(self, x: Tensor, kv: int, turn: Any) -> Tensor:
        """Keys without their rotation, in their basis."""
        if turn is not None:
            x = _rotate(x, turn[0], turn[1], back=True)
        if kv == KEYS and self.stages.basis[KEYS]:
            x = self._to_basis(x * self._weight(x.device), KEYS)
        return x

    def _back(self, x: Tensor, kv: int, turn: Any) -> Tensor:
        if (basis := self._basis(kv, x)) is not None:
            x = torch.einsum("lthj,lhij->lthi", x, basis)
            if kv == KEYS:
                x = x / self._weight(x.device)
        return x if turn is None else _rotate(x, turn[0], turn[1], back=False)

    def _weight(self, device: torch.device) -> Tensor:
        return torch.exp2(self._priority.to(device) / OCTAVE)

    def _basis(self, kv: int, x: Tensor) -> Tensor | None:
        kind = self.stages.basis[kv]
        if not kind:
            return None
        if kind == "hadamard":
            layers, _, heads, d = x.shape
            return hadamard(d).to(x.device).expand(layers, heads, d, d)
        return self.learnt.basis[kv].to(x.device)

    def _to_basis(self, x: Tensor, kv: int) -> Tensor:
        basis = self._basis(kv, x)
        return x if basis is None else torch.einsum("lthi,lhij->lthj", x, basis)

    # -- learning

    def spread(self, kv: Tensor, part: int) -> Iterator[tuple[Tensor, _Side]]:
        """What is quantized of each page, [layers, tokens, kv_heads, head_dim], and how."""
        _, layers, tokens, heads, d = kv.shape
        layout = KVLayout(2, layers, tokens, heads, d, "float32")
        for start in range(0, tokens, self.spec.page_tokens):
            page = kv[:, :, start : start + self.spec.page_tokens].float()
            y, side, _ = self._prepare(page, part, start, layout)
            yield y, side


def _side_bits(stages: AdaptiveStages, d: int, kv: int, tokens: int) -> int:
    """Bits of one head's page beside its codes."""
    grid = (36 if stages.widths else 32) * d + 8
    rows = stages.exact_rows * (8 * d + 40)
    return grid + rows + (4 * tokens if stages.token_scale[kv] else 0)


def learn(caches: list[Tensor], spec: CodecSpec, calibration: Calibration) -> dict[str, Learnt]:
    """From caches of tuning texts, for rotation ``"page"`` and ``"absolute"``, what variants need.

    Bases are the principal axes of what is quantized, within a page; for keys after the weighting
    by priorities.
    """
    found = {}
    for rotation in ("page", "absolute"):
        plain = AdaptiveStages(rotation=rotation)
        usual = Adaptive(plain, spec, calibration)
        axes = {}
        for part in (KEYS, VALUES):
            total: Any = 0
            for kv in caches:
                for y, side in usual.spread(kv, part):
                    if part == KEYS:
                        y = y * usual._weight(y.device)
                    y = y.masked_fill(side.rows, 0)
                    count = (~side.rows).sum(1, keepdim=True)
                    y = (y - y.sum(1, keepdim=True) / count).masked_fill(side.rows, 0)
                    total = total + torch.einsum("lthi,lthj->lhij", y, y).double()
            axes[part] = torch.linalg.eigh(total.cpu()).eigenvectors.float()
        found[rotation] = Learnt(axes, _levels(usual, caches))
    return found


def _levels(usual: Adaptive, caches: list[Tensor]) -> dict[tuple[int, int], Tensor]:
    """Mean place in [0, 1] of what each anchor code was given for."""
    tables = {}
    for part in (KEYS, VALUES):
        sums, counts = (
            [torch.zeros(2**w, dtype=torch.float64) for w in range(definition.MAX_WIDTH + 1)]
            for _ in range(2)
        )
        for kv in caches:
            for y, side in usual.spread(kv, part):
                u = ((y - side.low) * (1 / side.range)).clamp(0, 1)
                beta = usual.spec.alpha
                code = (_compand(u, beta) * side.levels).floor().clamp_min(0)
                code = torch.minimum(code, side.levels - 1)
                for width in range(1, definition.MAX_WIDTH + 1):
                    has = (side.levels == 2**width).expand_as(u) & ~side.rows
                    index = code[has].long()
                    sums[width] += torch.bincount(index, u[has], 2**width).cpu()
                    counts[width] += torch.bincount(index, minlength=2**width).cpu()
        for width in range(1, definition.MAX_WIDTH + 1):
            middle = _expand((torch.arange(2**width) + 0.5) / 2**width, usual.spec.alpha)
            mean = sums[width] / counts[width].clamp_min(1)
            enough = counts[width] >= 100
            tables[part, width] = torch.where(enough, mean.float(), middle)
    return tables
