"""Between LMCache's chunks and the pages in which vLLM keeps its cache on a CPU.

A page is ``[kv_heads, K and V, block, head_dim]``, but how a block's keys are arranged inside
depends on the instruction set that vLLM's attention kernel uses: transposed, or in tiles. So it is
not assumed: vLLM's own kernel writes numbered elements into a scratch page, and their order is read
back.
"""

from __future__ import annotations

from typing import Any

import lmcache.v1.gpu_connector as gpu_connector
import torch
from lmcache import torch_device_type
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryObj
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from ...errors import UnsupportedError
from .keys import layout_of
from .versions import check_interface

_create = gpu_connector.CreateGPUConnector


def register() -> None:
    """Have LMCache make a :class:`CpuPages` for vLLM where there is no accelerator."""
    if torch_device_type == "cpu":
        gpu_connector.CreateGPUConnector = create


def create(config: Any, metadata: Any, engine: EngineType, layout_hints: Any = None) -> Any:
    """In the place of LMCache's ``CreateGPUConnector``, which knows no CPU."""
    if engine != EngineType.VLLM:
        return _create(config, metadata, engine, layout_hints)
    check_interface(CpuPages, GPUConnectorInterface)
    if config.use_layerwise or metadata.use_mla:
        raise UnsupportedError(
            "on a CPU, LMCache can use neither use_layerwise nor models with latent attention (MLA)"
        )
    return CpuPages(metadata)


class CpuPages(GPUConnectorInterface):
    """Copies chunks, ``[2, layers, tokens, kv_heads * head_dim]``, from and to vLLM's pages.

    Args:
        metadata: LMCache's, of this rank.
    """

    def __init__(self, metadata: Any) -> None:
        self._layout = layout_of(metadata)
        self.kvcaches: list[torch.Tensor] = []
        self._places: torch.Tensor | None = None

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size((*self._layout.with_tokens(num_tokens).shape[:3], self._layout.channels))

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        chunk, slots = self._begin(memory_obj, kwargs["slot_mapping"][start:end], 0, kwargs)
        for layer, page in enumerate(self.kvcaches):
            chunk[:, layer] = self._view(page)[self._elements(page, slots)]

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        # vLLM shares the blocks that it had already, and they are complete.
        skip = min(max(0, kwargs.get("vllm_cached_tokens", 0) - start), end - start)
        chunk, slots = self._begin(memory_obj, kwargs["slot_mapping"][start:end], skip, kwargs)
        for layer, page in enumerate(self.kvcaches):
            self._view(page)[self._elements(page, slots)] = chunk[:, layer]

    def batched_from_gpu(
        self, memory_objs: list[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(
        self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any
    ) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def _begin(
        self, memory_obj: MemoryObj, slots: torch.Tensor, skip: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The chunk as [2, layers, tokens, kv_heads, head_dim], and its tokens' slots."""
        self.kvcaches = list(kwargs.get("kvcaches") or self.kvcaches)
        tensor: torch.Tensor = memory_obj.tensor
        shape = (*tensor.shape[:3], self._layout.heads, self._layout.head_dim)
        return tensor.view(shape)[:, :, skip:], slots.long()[skip:]

    @staticmethod
    def _view(page: torch.Tensor) -> torch.Tensor:
        """[blocks, kv_heads, 2, elements of one head's block]."""
        blocks, heads, block, double = page.shape
        return page.view(blocks, heads, 2, block * double // 2)

    def _elements(self, page: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Index of [2, tokens, kv_heads, head_dim] into :meth:`_view`."""
        if self._places is None:
            self._places = element_places(page.shape[2], page.shape[3] // 2, page.dtype)
        block = page.shape[2]
        kv = torch.arange(2)[:, None, None, None]
        heads = torch.arange(page.shape[1])[None, None, :, None]
        return slots[None, :, None, None] // block, heads, kv, self._places[:, slots % block, None]


def element_places(block: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Where in a head's block vLLM's kernel puts each element: int64 [2, block, head_dim].

    Raises:
        UnsupportedError: not every place is filled exactly once.
    """
    isa = _get_attn_isa(dtype, block, head_dim)
    elements = block * head_dim
    numbers = torch.arange(elements).view(block, 1, head_dim)
    found = torch.zeros(2, elements, dtype=torch.int64)
    for shift in range(0, elements.bit_length(), 7):  # every dtype holds 7 bits exactly
        digit = (numbers >> shift & 127).to(dtype)
        page = torch.zeros(1, 1, block * 2, head_dim, dtype=dtype)
        keys, values = page.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(digit, digit, keys, values, torch.arange(block), isa)
        found |= page.view(2, elements).long() << shift
    places = found.argsort()
    if not (found.sort().values == torch.arange(elements)).all():
        raise UnsupportedError(
            f"vLLM's pages of {block} tokens by {head_dim} {dtype} ({isa}) are of a kind that "
            "LMCache cannot use on a CPU"
        )
    return places.view(2, block, head_dim)
