"""Writes to vLLM's pages through LMCache, which knows how every backend arranges them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj


class Pages:
    """The pages of one worker.

    Args:
        connector: LMCache's ``GPUConnectorInterface``.
        caches: vLLM's pages, one tensor a layer.
    """

    def __init__(self, connector: Any, caches: Sequence[torch.Tensor]) -> None:
        self._connector = connector
        self._caches = list(caches)
        self._device = caches[0].device

    def write(self, kv: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy to pages, on the compute stream.

        Args:
            kv: [2, layers, tokens, kv_heads, head_dim] in host memory.
            slots: int64 [tokens], block * block size + place in the block.
        """
        chunk = kv.flatten(3).contiguous()
        metadata = MemoryObjMetadata(
            shape=chunk.shape,
            dtype=chunk.dtype,
            address=0,
            phy_size=chunk.nbytes,
            ref_count=1,
            fmt=MemoryFormat.KV_2LTD,
        )
        obj = TensorMemoryObj(chunk.view(-1).view(torch.uint8), metadata, None)
        self._connector.batched_to_gpu(
            [obj],
            [0],
            [len(slots)],
            kvcaches=self._caches,
            slot_mapping=slots.to(self._device),
        )
