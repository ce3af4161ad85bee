"""What a user would send instead of anchors and residuals: the cache itself, or plain integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Raw:
    """The cache's elements as bfloat16."""

    name: str = "BF16"

    def encode(self, kv: torch.Tensor) -> torch.Tensor:
        """``kv`` (any shape) as 1-D uint8."""
        return kv.bfloat16().contiguous().view(torch.uint8).reshape(-1)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out`` from bytes made of a cache of its shape."""
        out.copy_(data.view(torch.bfloat16).view(out.shape))


@dataclass(frozen=True)
class PerToken:
    """Symmetric integers with one fp16 scale for each token of each layer's K or V.

    Attributes:
        bits: 8, or 4 with two values a byte.
    """

    bits: int

    @property
    def name(self) -> str:
        return f"INT{self.bits}"

    def encode(self, kv: torch.Tensor) -> torch.Tensor:
        """``kv`` [2, layers, tokens, kv_heads, head_dim] as 1-D uint8: scales, then integers."""
        x = kv.flatten(3).float()
        most = 2 ** (self.bits - 1) - 1
        scale = (x.abs().amax(-1, keepdim=True) / most).half()
        q = (x / scale.float().clamp_min(1e-12)).round().clamp(-most, most) + most + 1
        q = q.to(torch.uint8)
        if self.bits == 4:
            q = q.reshape(-1, 2)
            q = q[:, 0] | q[:, 1] << 4
        return torch.cat([scale.reshape(-1).view(torch.uint8), q.reshape(-1)])

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out`` from bytes made of a cache of its shape."""
        x = out.flatten(3)
        rows = x.shape[:-1]
        side = 2 * rows.numel()
        scale, q = data[:side].view(torch.float16).view(*rows, 1), data[side:]
        if self.bits == 4:
            q = torch.stack([q & 15, q >> 4], -1)
        most = 2 ** (self.bits - 1) - 1
        values = (q.reshape(x.shape).float() - (most + 1)) * scale.float()
        out.copy_(values.view(out.shape))
