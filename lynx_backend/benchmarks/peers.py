"""LMCache's own codecs, where LMCache is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from .quantizers import CHUNK_TOKENS, Quantizer, Reconstruction, Run

Tensor = torch.Tensor
TURBOQUANT_PRESETS = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")


def lmcache(model: Any, layers: int) -> list[Quantizer]:
    """CacheGen and TurboQuant; none without LMCache.

    Args:
        model: of transformers, loaded from a folder: CacheGen's bins follow its configuration.
        layers: of the cache.
    """
    if importlib.util.find_spec("lmcache") is None:
        return []
    return [
        Quantizer("LMCache CacheGen", cachegen(model.config._name_or_path), True, "CacheGen"),
        *(
            Quantizer(f"LMCache TurboQuant {p}", turboquant(p, layers), True, "TurboQuant")
            for p in TURBOQUANT_PRESETS
        ),
    ]


def cachegen(model_folder: str) -> Run:
    """Its own encoder and decoder on the CPU: hundreds of times slower than everything else."""
    from lmcache.storage_backend.serde.cachegen_decoder import CacheGenDeserializer
    from lmcache.storage_backend.serde.cachegen_encoder import CacheGenSerializer
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    def run(kv: Tensor) -> list[Reconstruction]:
        pieces, size = [], 0
        for chunk in kv.cpu().split(CHUNK_TOKENS, dim=2):
            theirs = chunk.transpose(0, 1).contiguous()
            shape = tuple(theirs.shape)
            config = LMCacheEngineConfig.from_defaults(chunk_size=shape[2])
            meta = LMCacheMetadata(model_folder, 1, 1, 0, 0, kv.dtype, shape)
            data = CacheGenSerializer(config, meta).to_bytes(theirs)
            rebuilt = CacheGenDeserializer(config, meta, kv.dtype).from_bytes(data)
            pieces.append(rebuilt.reshape(shape).transpose(0, 1))
            size += len(data)
        return [Reconstruction(torch.cat(pieces, dim=2).to(kv.device), size)]

    return run


def turboquant(preset: str, layers: int) -> Run:
    """TurboQuant's arithmetic on its own tables and sizes: its kernels need Triton on a GPU.

    Tables (signs, Hadamard matrix, Lloyd-Max centroids and midpoints), layers left raw (two at
    either end) and bytes are what LMCache's functions give; the steps between are those of its
    store and decode kernels.
    """
    from lmcache.v1.distributed.serde.turboquant import turboquant as theirs

    def run(kv: Tensor) -> list[Reconstruction]:
        _, _, tokens, heads, d = kv.shape
        config = theirs.TurboQuantSerdeConfig(preset=f"turboquant_{preset}", head_dim=d)
        first, last = theirs._layer_ranges(layers, config)
        rebuilt = kv.float().clone()
        for layer in range(first, last):
            rotation, midpoints, centroids = theirs._make_tq_tensors_for_layer(
                config, layer, kv.device
            )
            keys, values = kv[:, layer].float()
            if config.key_fp8:
                k = keys.to(torch.float8_e4m3fn).float()
            else:
                norm = keys.norm(dim=-1, keepdim=True)
                index = torch.bucketize(keys / (norm + 1e-8) @ rotation, midpoints, right=True)
                unit = centroids[index]
                if config.norm_correction:
                    unit = unit / (unit.square().sum(-1, keepdim=True) + 1e-16).sqrt()
                # LMCache turns the keys back where the dequantized cache is read.
                k = (norm.half().float() * unit).half().float() @ rotation.T
            most = 2**config.value_quant_bits - 1
            low = values.amin(-1, keepdim=True)
            step = ((values.amax(-1, keepdim=True) - low) / most).clamp_min(1e-8)
            code = ((values - low) / step + 0.5).floor().clamp(0, most)
            v = code * step.half().float() + low.half().float()
            rebuilt[:, layer] = torch.stack([k, v]).half().float()
        size = sum(
            theirs._serialized_nbytes_for_shape(
                torch.Size((2, layers, len(part), heads * d)), kv.dtype, config
            )
            for part in torch.arange(tokens).split(CHUNK_TOKENS)
        )
        return [Reconstruction(rebuilt, size)]

    return run
