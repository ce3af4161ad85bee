"""Ways to make a KV cache smaller: Lynx, what others use, and what is simplest.

Every one takes a bfloat16 cache [2, layers, tokens, kv_heads, head_dim] and gives back what a
reader would get, with the bytes that crossed the wire. Scales count as fp16, codes as packed bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lynx_backend import Codec, CodecSpec
from lynx_backend.codec import Calibration

CHUNK_TOKENS = 256  # LMCache's chunk: what one object holds


@dataclass(frozen=True)
class Reconstruction:
    """A cache as its reader gets it, and the bytes that brought it."""

    kv: torch.Tensor
    wire_bytes: int


@dataclass(frozen=True)
class Quantizer:
    """A way to shrink a cache.

    Attributes:
        name: for tables.
        run: cache to reconstructions: one, or a coarse one and the one that refines it.
        drafts: it is small enough to draft on.
    """

    name: str
    run: Callable[[torch.Tensor], list[Reconstruction]]
    drafts: bool = False


def _minmax(x: torch.Tensor, bits: int, dims: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """Asymmetric rounding with one fp16 low and step for all elements along ``dims``."""
    x = x.float()
    low = x.amin(dims, keepdim=True)
    step = ((x.amax(dims, keepdim=True) - low) / (2**bits - 1)).half().float()
    step = step.clamp_min(torch.finfo(torch.float16).tiny)
    low = low.half().float()
    codes = ((x - low) / step).round().clamp(0, 2**bits - 1)
    return codes * step + low, x.numel() * bits // 8 + low.numel() * 4


def per_layer(bits: int) -> Callable[[torch.Tensor], list[Reconstruction]]:
    """One symmetric scale for the keys and one for the values of a layer."""

    def run(kv: torch.Tensor) -> list[Reconstruction]:
        x, most = kv.float(), 2 ** (bits - 1) - 1
        step = (x.abs().amax((2, 3, 4), keepdim=True) / most).half().float()
        rebuilt = (x / step).round().clamp(-most, most) * step
        return [Reconstruction(rebuilt, x.numel() * bits // 8 + step.numel() * 2)]

    return run


def per_token(bits: int) -> Callable[[torch.Tensor], list[Reconstruction]]:
    """A low and a step for every token and head."""

    def run(kv: torch.Tensor) -> list[Reconstruction]:
        return [Reconstruction(*_minmax(kv, bits, (4,)))]

    return run


def key_channel_value_token(
    bits: int, tokens: int, channels: int | None
) -> Callable[[torch.Tensor], list[Reconstruction]]:
    """Keys by channel over ``tokens`` tokens, values by token over ``channels`` channels."""

    def run(kv: torch.Tensor) -> list[Reconstruction]:
        keys, values = kv
        group = channels or values.shape[-1]
        pieces = [_minmax(k, bits, (1,)) for k in keys.split(tokens, dim=1)]
        k, k_bytes = torch.cat([p[0] for p in pieces], dim=1), sum(p[1] for p in pieces)
        v, v_bytes = _minmax(values.unflatten(-1, (-1, group)), bits, (4,))
        return [Reconstruction(torch.stack([k, v.flatten(-2)]), k_bytes + v_bytes)]

    return run


def fp8(kv: torch.Tensor) -> list[Reconstruction]:
    """A cast to e4m3, no scale."""
    return [Reconstruction(kv.to(torch.float8_e4m3fn).float(), kv.numel())]


def lynx(
    spec: CodecSpec, calibration: Calibration | None = None
) -> Callable[[torch.Tensor], list[Reconstruction]]:
    """Q_anchor and Q_full, one object pair a chunk, as they are stored."""
    codec = Codec(spec, calibration=calibration)

    def run(kv: torch.Tensor) -> list[Reconstruction]:
        coarse, full, sizes = [], [], [0, 0]
        for chunk in kv.split(CHUNK_TOKENS, dim=2):
            anchor, residual = codec.encode(chunk)
            coarse.append(codec.decode(anchor))
            full.append(codec.decode(anchor, residual))
            sizes[0] += anchor.numel()
            sizes[1] += anchor.numel() + residual.numel()
        return [
            Reconstruction(torch.cat(parts, dim=2), size)
            for parts, size in zip((coarse, full), sizes, strict=True)
        ]

    return run


def cachegen(model_folder: str) -> Quantizer | None:
    """LMCache's own CacheGen, if installed; its bins follow the model's number of layers."""
    try:
        from lmcache.storage_backend.serde.cachegen_decoder import CacheGenDeserializer
        from lmcache.storage_backend.serde.cachegen_encoder import CacheGenSerializer
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
    except ImportError:
        return None

    def run(kv: torch.Tensor) -> list[Reconstruction]:
        pieces, size = [], 0
        for chunk in kv.split(CHUNK_TOKENS, dim=2):
            theirs = chunk.transpose(0, 1).contiguous()
            shape = tuple(theirs.shape)
            config = LMCacheEngineConfig.from_defaults(chunk_size=shape[2])
            meta = LMCacheMetadata(model_folder, 1, 1, 0, 0, kv.dtype, shape)
            data = CacheGenSerializer(config, meta).to_bytes(theirs)
            rebuilt = CacheGenDeserializer(config, meta, kv.dtype).from_bytes(data)
            pieces.append(rebuilt.reshape(shape).transpose(0, 1))
            size += len(data)
        return [Reconstruction(torch.cat(pieces, dim=2), size)]

    return Quantizer("LMCache CacheGen", run, drafts=True)


def quantizers(model_folder: str | None, calibration: Calibration, match: str) -> list[Quantizer]:
    """What is compared: all whose names hold ``match``.

    CacheGen needs the folder of the model; None leaves it out. The calibration is for ``adaptive``.
    """
    peer = cachegen(model_folder) if model_folder else None
    compared = [
        Quantizer("uniform INT8, one scale a layer", per_layer(8)),
        Quantizer("FP8 e4m3 (LMCache fp8)", fp8),
        Quantizer("INT8 per token", per_token(8)),
        Quantizer("INT8, K per channel (256), V per token", key_channel_value_token(8, 256, None)),
        Quantizer("INT4 per token", per_token(4), drafts=True),
        Quantizer("KIVI-4, groups of 32", key_channel_value_token(4, 32, 32), drafts=True),
        *([peer] if peer else []),
        Quantizer("uniform INT4, one scale a layer", per_layer(4)),
        Quantizer("Lynx paper profile", lynx(CodecSpec("paper")), drafts=True),
        Quantizer("Lynx linear profile", lynx(CodecSpec("linear")), drafts=True),
        Quantizer("Lynx adaptive, uncalibrated", lynx(CodecSpec("adaptive"))),
        Quantizer("Lynx adaptive profile", lynx(CodecSpec("adaptive"), calibration), drafts=True),
    ]
    return [quantizer for quantizer in compared if match.lower() in quantizer.name.lower()]
