"""Ways to make a KV cache smaller: Lynx, what others use, and what is simplest.

Every one takes a bfloat16 cache [2, layers, tokens, kv_heads, head_dim] on any device and gives
back what a reader would get, with the bytes that crossed the wire. Where there is no encoder to ask
for bytes, scales count as fp16 and codes as packed bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..codec import Calibration, Codec, CodecSpec

CHUNK_TOKENS = 256  # LMCache's chunk: what one object holds
Tensor = torch.Tensor


@dataclass(frozen=True)
class Reconstruction:
    """A cache as its reader gets it, and the bytes that brought it."""

    kv: Tensor
    wire_bytes: float


Run = Callable[[Tensor], list[Reconstruction]]


@dataclass(frozen=True)
class Quantizer:
    """A way to shrink a cache.

    Attributes:
        name: for tables.
        run: cache to reconstructions: one, or a coarse one and the one that refines it.
        drafts: it is small enough to draft on.
        family: what a plot draws as one line.
    """

    name: str
    run: Run
    drafts: bool = False
    family: str = ""


def _minmax(x: Tensor, bits: int, dims: tuple[int, ...]) -> tuple[Tensor, int]:
    """Asymmetric rounding with one fp16 low and step for all elements along ``dims``."""
    x = x.float()
    low = x.amin(dims, keepdim=True)
    step = ((x.amax(dims, keepdim=True) - low) / (2**bits - 1)).half().float()
    step = step.clamp_min(torch.finfo(torch.float16).tiny)
    low = low.half().float()
    codes = ((x - low) / step).round().clamp(0, 2**bits - 1)
    return codes * step + low, x.numel() * bits // 8 + low.numel() * 4


def per_layer(bits: int) -> Run:
    """One symmetric scale for the keys and one for the values of a layer."""

    def run(kv: Tensor) -> list[Reconstruction]:
        x, most = kv.float(), 2 ** (bits - 1) - 1
        step = (x.abs().amax((2, 3, 4), keepdim=True) / most).half().float()
        rebuilt = (x / step).round().clamp(-most, most) * step
        return [Reconstruction(rebuilt, x.numel() * bits // 8 + step.numel() * 2)]

    return run


def per_token(bits: int, group: int | None = None) -> Run:
    """A low and a step for every token and head, or for every ``group`` channels of it."""

    def run(kv: Tensor) -> list[Reconstruction]:
        x = kv.unflatten(-1, (-1, group or kv.shape[-1]))
        rebuilt, size = _minmax(x, bits, (-1,))
        return [Reconstruction(rebuilt.flatten(-2), size)]

    return run


def key_channel_value_token(bits: int, tokens: int, channels: int | None) -> Run:
    """Keys by channel over ``tokens`` tokens, values by token over ``channels`` channels."""

    def run(kv: Tensor) -> list[Reconstruction]:
        keys, values = kv
        group = channels or values.shape[-1]
        pieces = [_minmax(k, bits, (1,)) for k in keys.split(tokens, dim=1)]
        k, k_bytes = torch.cat([p[0] for p in pieces], dim=1), sum(p[1] for p in pieces)
        v, v_bytes = _minmax(values.unflatten(-1, (-1, group)), bits, (4,))
        return [Reconstruction(torch.stack([k, v.flatten(-2)]), k_bytes + v_bytes)]

    return run


def fp8(kind: torch.dtype) -> Run:
    """A cast, no scale."""
    return lambda kv: [Reconstruction(kv.to(kind).float(), kv.numel())]


# -- after KVQuant ---------------------------------------------------------------------------------

_OUTLIERS = 0.01
_FIT = 50_000  # elements that a codebook is fitted to


def _normalized(kv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Elements over [-1, 1], middle and half-range of each scale, and which are outliers.

    A scale spans a channel of 256 keys or all values of a token, without its outliers: half a
    percent at either end.
    """
    x = kv.float()
    parts = []
    for part, dim in ((x[0].flatten(2), 1), (x[1].flatten(2), 2)):
        count = part.shape[dim]
        cut = max(1, round(count * _OUTLIERS / 2))
        ranked = part.sort(dim).values
        low, high = (ranked.narrow(dim, at, 1) for at in (cut, count - 1 - cut))
        middle = ((low + high) / 2).half().float()
        half = ((high - low) / 2).half().float().clamp_min(torch.finfo(torch.float16).tiny)
        outside = (part < low) | (part > high)
        parts.append(((part - middle) / half, middle, half, outside))
    z, middles, halves, outsides = (
        torch.stack([p.expand_as(parts[0][0]) for p in same]).view_as(x)
        for same in zip(*parts, strict=True)
    )
    return z, middles, halves, outsides


def _codebook(samples: Tensor, size: int) -> Tensor:
    """Ascending levels for samples in [-1, 1]: one-dimensional k-means, begun at quantiles."""
    x = samples[:: max(1, len(samples) // _FIT)].sort().values
    at = (torch.arange(size, device=x.device) + 0.5) / size
    levels = x[(at * len(x)).long()]
    for _ in range(20):
        group = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        sums, counts = (torch.bincount(group, w, size) for w in (x.double(), None))
        levels = torch.where(counts > 0, sums / counts.clamp_min(1), levels.double()).float()
        levels = levels.sort().values
    return levels


def kvquant_like(bits: int, caches: Sequence[Tensor]) -> Run:
    """After KVQuant: non-uniform levels learnt per layer, 1 % outliers apart, the first token fp16.

    Levels are fitted to ``caches``. An outlier costs 32 bits, its value and its place; scales span
    256 tokens of a channel of keys, which KVQuant fixes in advance and stores before the rotation.
    """
    layers = caches[0].shape[1]
    pages = [page for kv in caches for page in kv.split(CHUNK_TOKENS, dim=2)]
    normal = [_normalized(page)[0] for page in pages]
    books = [
        [_codebook(torch.cat([z[k, i].flatten() for z in normal]), 2**bits) for i in range(layers)]
        for k in range(2)
    ]

    def run(kv: Tensor) -> list[Reconstruction]:
        pieces, size = [], 0.0
        for number, page in enumerate(kv.split(CHUNK_TOKENS, dim=2)):
            z, middle, half, outside = _normalized(page)
            rebuilt = torch.empty_like(z)
            for k in range(2):
                for i in range(layers):
                    levels = books[k][i].to(z.device)
                    code = torch.bucketize(z[k, i], (levels[1:] + levels[:-1]) / 2)
                    rebuilt[k, i] = levels[code]
            rebuilt = rebuilt * half + middle
            rebuilt = torch.where(outside, page.float().half().float(), rebuilt)
            heads, d = page.shape[3:]
            scales = layers * (heads * d + page.shape[2])
            size += page.numel() * bits / 8 + int(outside.sum()) * 4 + scales * 4
            if number == 0:
                rebuilt[:, :, 0] = page[:, :, 0].float().half().float()
                size += page[:, :, 0].numel() * 2
            pieces.append(rebuilt)
        return [Reconstruction(torch.cat(pieces, dim=2), size)]

    return run


# -- Lynx ------------------------------------------------------------------------------------------


def lynx(spec: CodecSpec, calibration: Calibration | None = None) -> Run:
    """Q_anchor and Q_full, one object pair a chunk, as they are stored; no Q_full without bits."""
    codec = Codec(spec, calibration=calibration)

    def run(kv: Tensor) -> list[Reconstruction]:
        coarse, full, sizes = [], [], [0, 0]
        for chunk in kv.cpu().split(CHUNK_TOKENS, dim=2):
            anchor, residual = codec.encode(chunk)
            coarse.append(codec.decode(anchor))
            sizes[0] += anchor.numel()
            if spec.residual_bits:
                full.append(codec.decode(anchor, residual))
                sizes[1] += anchor.numel() + residual.numel()
        return [
            Reconstruction(torch.cat(parts, dim=2).to(kv.device), size)
            for parts, size in zip((coarse, full), sizes, strict=True)
            if parts
        ]

    return run


def profiles(calibration: Calibration) -> list[Quantizer]:
    """The codec's profiles as they are by default."""
    return [
        Quantizer("Lynx paper", lynx(CodecSpec("paper")), True),
        Quantizer("Lynx linear", lynx(CodecSpec("linear")), True),
        Quantizer("Lynx adaptive, uncalibrated", lynx(CodecSpec("adaptive"))),
        Quantizer("Lynx adaptive", lynx(CodecSpec("adaptive"), calibration), True),
    ]


SPLITS = ((2, 2), (3, 3), (3, 5), (4, 2), (4, 4), (5, 3), (6, 2), (4, 0), (8, 0))


def splits(calibration: Calibration) -> list[Quantizer]:
    """``adaptive`` and ``linear`` with other numbers of anchor and residual bits."""
    return [
        Quantizer(
            f"Lynx {profile} {a}+{r}",
            lynx(CodecSpec(profile, a, r), calibration if profile == "adaptive" else None),
            drafts=True,
            family=f"Lynx {profile}",
        )
        for profile in ("adaptive", "linear")
        for a, r in SPLITS
    ]


def simple() -> list[Quantizer]:
    """The few that everybody compares with."""
    return [
        Quantizer("uniform INT8, one scale a layer", per_layer(8)),
        Quantizer("FP8 e4m3 (LMCache fp8)", fp8(torch.float8_e4m3fn)),
        Quantizer("INT8 per token", per_token(8)),
        Quantizer("INT8, K per channel (256), V per token", key_channel_value_token(8, 256, None)),
        Quantizer("INT4 per token", per_token(4), True),
        Quantizer("KIVI-4, groups of 32", key_channel_value_token(4, 32, 32), True),
        Quantizer("uniform INT4, one scale a layer", per_layer(4)),
    ]


def others(caches: Sequence[Tensor]) -> list[Quantizer]:
    """What a frontier shows beside Lynx; ``caches`` are of tuning texts."""
    scaled = [
        Quantizer(f"INT{bits} {name}", run, True, f"INT {name}")
        for name, run_of in (
            ("one scale a layer", per_layer),
            ("per token", per_token),
            ("per token, groups of 32", lambda b: per_token(b, 32)),
            ("K per channel (256), V per token", lambda b: key_channel_value_token(b, 256, None)),
            ("K per channel (32), V groups of 32", lambda b: key_channel_value_token(b, 32, 32)),
        )
        for bits, run in ((b, run_of(b)) for b in (8, 4))
        if (bits, name) != (4, "K per channel (32), V groups of 32")  # that is KIVI-4
    ]
    return [
        Quantizer("FP8 e4m3 (LMCache fp8)", fp8(torch.float8_e4m3fn), True, "FP8"),
        Quantizer("FP8 e5m2", fp8(torch.float8_e5m2), True, "FP8"),
        Quantizer("KIVI-4, groups of 32", key_channel_value_token(4, 32, 32), True, "KIVI"),
        Quantizer("KIVI-2, groups of 32", key_channel_value_token(2, 32, 32), True, "KIVI"),
        *(
            Quantizer(f"KVQuant-like {b} bit, 1 % outliers", kvquant_like(b, caches), True, family)
            for b, family in ((4, "KVQuant-like"), (3, "KVQuant-like"), (2, "KVQuant-like"))
        ),
        *scaled,
    ]
