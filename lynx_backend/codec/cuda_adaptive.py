"""The profile ``adaptive`` on a GPU: the kernels of ``kernels/adaptive_*.cu``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ..errors import UnsupportedError
from ..layout import KVLayout
from .adaptive_reference import AdaptivePlan, total_bits
from .calibration import Calibration
from .cuda import Kernels, shared_memory
from .cuda_defines import (
    DECODE_FILES,
    ENCODE_FILES,
    THREADS,
    decode_defines,
    encode_defines,
)
from .cuda_memory import Place
from .cuda_scheme import CudaScheme, address
from .spec import CodecSpec


class CudaAdaptive(CudaScheme):
    """See ``adaptive_reference.py`` for what is computed."""

    def __init__(
        self, spec: CodecSpec, device: torch.device, calibration: Calibration | None
    ) -> None:
        super().__init__(spec)
        self._calibration = calibration
        self._device = device
        self._most_heads = torch.cuda.get_device_properties(device).multi_processor_count
        self._most_shared = shared_memory(device)
        self._known: dict[tuple[Any, ...], tuple[Kernels, int]] = {}
        self._tables: dict[tuple[int, int, int], tuple[torch.Tensor, ...]] = {}

    def sizes(self, layout: KVLayout, exact: int) -> tuple[int, int]:
        plan = _plan(self.spec, layout)
        return plan.anchor_bytes, plan.residual_bytes

    def encode(
        self, place: Place, anchor: torch.Tensor, residual: torch.Tensor, record: torch.Tensor
    ) -> None:
        spec, layout = self.spec, place.layout
        plan = _plan(spec, layout)
        tables = self._tables_of(layout)
        kernels, shared = self._kernels(place, ENCODE_FILES)
        scratch = self.scratch()
        pages = layout.layers * plan.pages
        # Counts that heads wait for, and what is written into bytes that heads share.
        exchange = torch.zeros(
            1 + 2 * layout.heads * pages * layout.kv, dtype=torch.int64, device=self._device
        )
        published = torch.empty(
            pages * (layout.kv * layout.channels + spec.page_tokens * layout.heads),
            dtype=torch.uint8, device=self._device,
        )  # fmt: skip
        kernels.launch(
            "encode", pages * layout.heads, THREADS,
            (*place.args, *_plan_args(spec, layout), *map(address, tables), address(exchange),
             address(published), address(scratch), address(anchor), address(residual)),
            shared,
        )  # fmt: skip
        self.seal(kernels, place, anchor, residual, scratch, record)

    def verify(
        self, place: Place, anchor: torch.Tensor, residual: torch.Tensor | None,
        digests: tuple[bytes, bytes], record: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        layout = place.layout
        kernels, _ = self._kernels(place, DECODE_FILES)
        plan = _plan(self.spec, layout)
        before = _plan_args(self.spec, layout)
        return self.launch_verify(
            kernels, before, plan.units * plan.pages, anchor, residual, digests, record
        )

    def decode(
        self, place: Place, anchor: torch.Tensor, residual: torch.Tensor | None,
        gate: torch.Tensor | None,
    ) -> None:  # fmt: skip
        layout = place.layout
        plan = _plan(self.spec, layout)
        cos, sin, table, _ = self._tables_of(layout)
        kernels, shared = self._kernels(place, DECODE_FILES)
        kernels.launch(
            "decode_anchor" if residual is None else "decode_both",
            plan.units * plan.pages * layout.heads, THREADS,
            (*place.args, *_plan_args(self.spec, layout), address(cos), address(sin),
             address(table), address(anchor), address(residual), address(gate)),
            shared,
        )  # fmt: skip

    def _kernels(self, place: Place, files: tuple[str, ...]) -> tuple[Kernels, int]:
        """Kernels and the shared memory of a block."""
        layout = place.layout
        known = self._known.get((files, place.kind, layout.kv))
        if known is not None:
            return known
        pairs = 0 if self._calibration is None else self._calibration.cos.shape[2]
        find = encode_defines if files == ENCODE_FILES else decode_defines
        defines, shared = find(self.spec, place.defines, layout.kv, pairs, self._most_shared)
        if shared > self._most_shared or layout.heads > self._most_heads:
            raise UnsupportedError(
                f"profile adaptive on this GPU takes up to {self._most_heads} heads and pages of a "
                f"head of up to {self._most_shared} bytes of shared memory; {layout.heads} heads "
                f"of {layout.head_dim} need {shared}: use device='cpu' or profile linear"
            )
        found = Kernels.of(files, defines), shared
        self._known[files, place.kind, layout.kv] = found
        return found

    def _tables_of(self, layout: KVLayout) -> tuple[torch.Tensor, ...]:
        """cos, sin, table and priority on the GPU."""
        key = (layout.layers, layout.heads, layout.head_dim)
        if key not in self._tables:
            found = self._calibration or Calibration.none(layout)
            found.check(layout)
            arrays = (found.cos, found.sin, found.table, found.priority)
            self._tables[key] = tuple(
                torch.from_numpy(np.ascontiguousarray(a).copy()).to(self._device) for a in arrays
            )
        return self._tables[key]


_plan = lru_cache(maxsize=256)(AdaptivePlan.of)


@lru_cache(maxsize=256)
def _plan_args(spec: CodecSpec, layout: KVLayout) -> tuple[Any, ...]:
    """For ``PLAN_ARGS``."""
    plan = _plan(spec, layout)
    second = layout.kv - 1
    units = [plan.anchor_start(k + 1, 0) - plan.anchor_start(k, 0) for k in (0, second)]
    totals = [total_bits(spec, layout, k) for k in (0, second)]
    pages = [plan.anchor_page[k] for k in (0, second)]
    lasts = [plan.anchor_last[k] for k in (0, second)]
    return (
        *(np.int32(n) for n in (plan.pages, plan.last_len, layout.layers, *pages, *lasts)),
        *(np.int64(n) for n in (*units, plan.residual_page, plan.residual_start(1, 0))),
        *(np.int32(n) for n in totals),
    )
