"""The profiles ``linear`` and ``paper`` on a GPU: the kernels of ``kernels/chunked.cu``."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ..layout import DTYPE_BYTES, KVLayout
from .cuda import Kernels
from .cuda_defines import CHUNKED_FILES, chunked_defines
from .cuda_memory import Place
from .cuda_scheme import CudaScheme, address
from .grid import grid_of
from .spec import CodecSpec, PayloadPlan

_LANES = 8
_DECODE_THREADS = 256


class CudaChunked(CudaScheme):
    """See ``reference.py`` for what is computed."""

    def __init__(self, spec: CodecSpec, device: torch.device) -> None:
        super().__init__(spec)
        self._known: dict[tuple[int, ...], tuple[Kernels, int]] = {}
        grid = grid_of(spec)
        thresholds = np.full(256, np.inf, np.float32)
        thresholds[: len(grid.thresholds)] = grid.thresholds
        codes = np.zeros(256, np.uint8)
        codes[: len(grid.codes)] = grid.codes
        self._thresholds, self._codes, self._values = (
            torch.from_numpy(table.copy()).to(device) for table in (thresholds, codes, grid.values)
        )

    def sizes(self, layout: KVLayout, exact: int) -> tuple[int, int]:
        plan = _plan(self.spec, layout)
        return plan.anchor_bytes(exact), plan.residual_bytes

    def encode(
        self, place: Place, anchor: torch.Tensor, residual: torch.Tensor, record: torch.Tensor
    ) -> None:
        spec, layout = self.spec, place.layout
        plan = _plan(spec, layout)
        kernels, vec = self._kernels(place)
        width = DTYPE_BYTES[layout.dtype]
        tiles = -(-layout.channels // (vec * _LANES))
        scratch = self.scratch(plan.pages * spec.page_tokens)
        common = (*place.args, *_plan_args(plan))
        if spec.exact_tokens:
            layers = spec.sink_layers(layout.layers)
            kernels.launch(
                "sinks", len(layers) * plan.pages * tiles, spec.page_tokens,
                (*common, np.int64(layout.tokens), np.int32(layers.step), np.int32(len(layers)),
                 address(scratch)),
                spec.page_tokens * _LANES * vec * width,
            )  # fmt: skip
        runs, chunks = spec.page_tokens // math.gcd(spec.chunk, 8), spec.page_tokens // spec.chunk
        bounds = 2 * runs * _LANES * max(4, vec * width)
        kernels.launch(
            "encode", plan.units * plan.pages * tiles, spec.page_tokens,
            (*common, np.int32(layout.layers), address(scratch), address(self._thresholds),
             address(self._codes), address(anchor), address(residual)),
            bounds + 4 * vec * _LANES * (2 * chunks + 3),
        )  # fmt: skip
        self.seal(kernels, place, anchor, residual, scratch, record)

    def verify(
        self, place: Place, anchor: torch.Tensor, residual: torch.Tensor | None,
        digests: tuple[bytes, bytes], record: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        plan = _plan(self.spec, place.layout)
        exact = plan.exact_count(len(anchor), self.spec.exact_tokens)
        before = (*_plan_args(plan), np.int64(place.layout.tokens), np.int32(exact))
        kernels, _ = self._kernels(place)
        pages = plan.units * plan.pages
        return self.launch_verify(kernels, before, pages, anchor, residual, digests, record)

    def decode(
        self, place: Place, anchor: torch.Tensor, residual: torch.Tensor | None,
        gate: torch.Tensor | None,
    ) -> None:  # fmt: skip
        spec = self.spec
        plan = _plan(spec, place.layout)
        kernels, vec = self._kernels(place)
        exact = plan.exact_count(len(anchor), spec.exact_tokens)
        span = next(n for n in (32, 16, 8) if spec.chunk % n == 0 or n == 8)
        spans = -(-spec.page_tokens // span)
        threads = plan.units * plan.pages * spans * (place.layout.channels // vec)
        kernels.launch(
            "decode_anchor" if residual is None else "decode_both",
            -(-threads // _DECODE_THREADS), _DECODE_THREADS,
            (*place.args, *_plan_args(plan), address(anchor), address(residual), np.int32(exact),
             address(self._values), address(gate)),
        )  # fmt: skip

    def _kernels(self, place: Place) -> tuple[Kernels, int]:
        """Kernels and how many channels a thread has."""
        found = self._known.get(place.kind)
        if found is None:
            defines = chunked_defines(self.spec, place.defines)
            found = Kernels.of(CHUNKED_FILES, defines), int(str(defines["VEC"]))
            self._known[place.kind] = found
        return found


_plan = lru_cache(maxsize=256)(PayloadPlan.of)


@lru_cache(maxsize=256)
def _plan_args(plan: PayloadPlan) -> tuple[Any, ...]:
    """For ``PLAN_ARGS``."""
    return (
        np.int32(plan.units), np.int32(plan.pages), np.int32(plan.last_len),
        *(np.int64(size) for size in (
            plan.anchor_page, plan.anchor_unit, plan.residual_page, plan.residual_unit,
            plan.exact_offset,
        )),
    )  # fmt: skip
