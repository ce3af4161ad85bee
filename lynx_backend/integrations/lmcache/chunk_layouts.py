"""Which layout the buffers of LMCache's server have: what is said, what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ...codec import Calibration
from ...errors import ConfigError, InvalidInputError, UnsupportedError
from ...layout import DTYPE_BYTES, KVLayout
from .page_layouts import PAGE_LAYOUTS, PageLayout, plausible

_DTYPES = {getattr(torch, name): name for name in DTYPE_BYTES}


@dataclass(frozen=True)
class CacheGeometry:
    """What a user says of the engine's cache; None leaves it to what can be derived.

    Attributes:
        head_dim: elements of a KV head (of a token's latent); by default the calibration's.
        page_layout: one of :data:`PAGE_LAYOUTS`; by default ``planes`` for a buffer of two,
            else ``fused`` where there is a GPU and ``vllm_cpu`` where there is none.
        block_tokens: tokens of one page of the engine; matters for ``vllm_cpu`` alone.
        layers, tokens, dtype: of a chunk. Only needed for objects that come without a shape, as
            bytes; LMCache's own benchmark makes such.
    """

    head_dim: int | None = None
    page_layout: str | None = None
    block_tokens: int = 128
    layers: int | None = None
    tokens: int | None = None
    dtype: str | None = None

    @classmethod
    def of(cls, given: object) -> CacheGeometry:
        """From the ``kv_cache`` section of a configuration.

        Raises:
            ConfigError: a name is unknown or a value of another kind; the message names it.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"kv_cache must hold settings such as {{head_dim: 128}}, got {given!r}"
            )
        kinds = {f.name: str if "str" in str(f.type) else int for f in fields(cls)}
        for name, value in given.items():
            kind = kinds.get(str(name))
            if kind is None:
                raise ConfigError(f"unknown setting kv_cache.{name}; known are {', '.join(kinds)}")
            if (
                type(value) is not kind
                or value in (0, "")
                or (isinstance(value, int) and value < 0)
            ):
                wanted = "a text" if kind is str else "a positive integer"
                raise ConfigError(f"kv_cache.{name} must be {wanted}, got {value!r}")
        geometry = cls(**given)
        if geometry.page_layout not in (None, *PAGE_LAYOUTS):
            raise ConfigError(
                f"kv_cache.page_layout must be one of {', '.join(PAGE_LAYOUTS)}, got "
                f"{geometry.page_layout!r}"
            )
        if geometry.dtype not in (None, *DTYPE_BYTES):
            raise ConfigError(
                f"kv_cache.dtype must be one of {', '.join(DTYPE_BYTES)}, got {geometry.dtype!r}"
            )
        return geometry


@dataclass(frozen=True)
class ChunkLayout:
    """One chunk's axes, and how they lie in a buffer."""

    kv: KVLayout
    pages: PageLayout

    @property
    def signature(self) -> str:
        """Text that differs whenever a stored chunk could not be read back into the same buffer."""
        pages = f"{self.pages.name}{self.pages.block or ''}"
        return f"{self.kv.signature}-tokens{self.kv.tokens}-{pages}"

    def unpack(self, buffer: torch.Tensor) -> torch.Tensor:
        """As :meth:`PageLayout.unpack`."""
        return self.pages.unpack(buffer, self.kv.layers, self.kv.tokens)


class ChunkLayouts:
    """Tells the layout of a chunk from its announced shape.

    Args:
        geometry: what the user said.
        calibration: of the model; says the head size, too.
        on_gpu: whether the engine's cache is on an accelerator.
    """

    def __init__(
        self, geometry: CacheGeometry, calibration: Calibration | None, on_gpu: bool
    ) -> None:
        self._geometry = geometry
        self._calibrated = None if calibration is None else calibration.priority.shape[2]
        self._single_plane = "fused" if on_gpu else "vllm_cpu"
        self._known: dict[tuple[Any, ...], ChunkLayout] = {}

    def of(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> ChunkLayout:
        """The layout of an object that LMCache describes by these.

        Raises:
            UnsupportedError: it cannot be told, or is none that Lynx encodes. The message says
                what to set, if anything helps.
        """
        key = (tuple(map(tuple, shapes)), tuple(dtypes))
        if key not in self._known:
            try:
                self._known[key] = self._find(shapes, dtypes)
            except InvalidInputError as e:
                raise UnsupportedError(str(e)) from None
        return self._known[key]

    def of_buffer(self, buffer: torch.Tensor) -> tuple[ChunkLayout, torch.Tensor]:
        """The layout of a tensor from LMCache, and the tensor as elements of its dtype.

        Raises:
            as :meth:`of`.
        """
        if buffer.dtype == torch.uint8 and buffer.dim() == 1:
            buffer = self._with_shape(buffer)
        return self.of([buffer.shape], [buffer.dtype]), buffer

    def _find(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> ChunkLayout:
        if len(shapes) != 1:
            raise UnsupportedError(
                f"an object holds {len(shapes)} groups of layers with shapes "
                f"{[tuple(s) for s in shapes]}: hybrid models are not encoded; use another L2 "
                "adapter for this model"
            )
        sizes, geometry = list(shapes[0]), self._geometry
        if len(sizes) not in (3, 4):
            raise UnsupportedError(
                f"an object has shape {tuple(sizes)} ({dtypes[0]}); expected [layers, tokens, "
                "width], with or without a first axis for K and V. For objects that come as bytes "
                "set layers, tokens, dtype, head_dim and page_layout in kv_cache"
            )
        two = len(sizes) == 4 and sizes[0] == 2
        name = geometry.page_layout or ("planes" if two else self._single_plane)
        if name == "planes" and not two and sizes[-3] % 2 == 0:
            sizes = [2, sizes[-3] // 2, *sizes[-2:]]  # as SGLang announces them
            two = True
        width = sizes[-1] * (2 if two else 1)
        pages = self._pages(name, width)
        fit = plausible(sizes, pages)
        if fit is None:
            raise UnsupportedError(
                f"an object of shape {tuple(sizes)} is no {pages}: expected [layers, tokens, "
                f"{pages.row}], tokens a multiple of the block; correct kv_cache.head_dim, "
                "kv_cache.page_layout or kv_cache.block_tokens"
            )
        dtype = _DTYPES.get(dtypes[0], str(dtypes[0]).removeprefix("torch."))
        kv = KVLayout(pages.planes, *fit, pages.heads, pages.head_dim, dtype)
        return ChunkLayout(kv, pages)

    def _pages(self, name: str, width: int) -> PageLayout:
        block = self._geometry.block_tokens if name == "vllm_cpu" else 0
        if name == "latent":
            return PageLayout(name, 1, width, block)
        head_dim = self._geometry.head_dim or self._calibrated
        if head_dim is None:
            raise UnsupportedError(
                f"{width} elements a token do not say how wide a KV head is: set kv_cache.head_dim "
                "to the model's, or codec.calibration"
            )
        return PageLayout(name, max(1, width // (2 * head_dim)), head_dim, block)

    def _with_shape(self, data: torch.Tensor) -> torch.Tensor:
        """Bytes as the chunk that the configuration describes."""
        said = self._geometry
        if said.layers is None or said.tokens is None or said.dtype is None:
            raise UnsupportedError(
                f"an object comes as {data.numel()} bytes without a shape: set layers, tokens and "
                "dtype in kv_cache if that is what the engine's cache is (LMCache's benchmark); a "
                "cache that is already quantized is not encoded again"
            )
        rows, size = said.layers * said.tokens, DTYPE_BYTES[said.dtype]
        if data.numel() % (rows * size):
            raise UnsupportedError(
                f"an object of {data.numel()} bytes is no chunk of {said.layers} layers and "
                f"{said.tokens} tokens in {said.dtype}; correct kv_cache"
            )
        return data.view(getattr(torch, said.dtype)).view(said.layers, said.tokens, -1)
