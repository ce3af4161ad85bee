"""The profile ``adaptive`` on a GPU: the kernels of ``kernels/adaptive.cu``."""

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
from .cuda_memory import Place
from .cuda_scheme import CudaScheme, address
from .spec import CodecSpec

_COMMON = ("element.cuh", "cache.cuh", "digest.cu", "adaptive.cuh")
ENCODE_FILES, DECODE_FILES = (*_COMMON, "adaptive_encode.cu"), (*_COMMON, "adaptive_decode.cu")
_WARP, _THREADS = 32, 256


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
        self._tables: dict[tuple[int, int, int], tuple[torch.Tensor, ...]] = {}

    def sizes(self, layout: KVLayout, exact: int) -> tuple[int, int]:
        plan = AdaptivePlan.of(self.spec, layout)
        return plan.anchor_bytes, plan.residual_bytes

    def encode(
        self, place: Place, anchor: torch.Tensor, residual: torch.Tensor, record: torch.Tensor
    ) -> None:
        spec, layout = self.spec, place.layout
        plan = AdaptivePlan.of(spec, layout)
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
            "encode", pages * layout.heads, _THREADS,
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
        plan = AdaptivePlan.of(self.spec, layout)
        before = _plan_args(self.spec, layout)
        return self.launch_verify(
            kernels, before, plan.units * plan.pages, anchor, residual, digests, record
        )

    def decode(
        self, place: Place, anchor: torch.Tensor, residual: torch.Tensor | None,
        gate: torch.Tensor | None,
    ) -> None:  # fmt: skip
        layout = place.layout
        plan = AdaptivePlan.of(self.spec, layout)
        cos, sin, table, _ = self._tables_of(layout)
        kernels, shared = self._kernels(place, DECODE_FILES)
        kernels.launch(
            "decode_anchor" if residual is None else "decode_both",
            plan.units * plan.pages * layout.heads, _THREADS,
            (*place.args, *_plan_args(self.spec, layout), address(cos), address(sin),
             address(table), address(anchor), address(residual), address(gate)),
            shared,
        )  # fmt: skip

    def _kernels(self, place: Place, files: tuple[str, ...]) -> tuple[Kernels, int]:
        """Kernels and the shared memory of a block."""
        layout = place.layout
        pairs = 0 if self._calibration is None else self._calibration.cos.shape[2]
        find = encode_defines if files == ENCODE_FILES else decode_defines
        defines, shared = find(self.spec, place.defines, layout.kv, pairs, self._most_shared)
        if shared > self._most_shared or layout.heads > self._most_heads:
            raise UnsupportedError(
                f"profile adaptive on this GPU takes up to {self._most_heads} heads and pages of a "
                f"head of up to {self._most_shared} bytes of shared memory; {layout.heads} heads "
                f"of {layout.head_dim} need {shared}: use device='cpu' or profile linear"
            )
        return Kernels.of(files, defines), shared

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


def encode_defines(
    spec: CodecSpec, place: dict[str, int], kv: int, pairs: int, most: int
) -> tuple[dict[str, object], int]:
    """What ``kernels/adaptive_encode.cu`` is compiled with; shared memory of a block."""
    defines, apart = _defines(spec, place, kv, pairs)
    dim, width = place["DIM"], 4 if place["DTYPE"] == 2 else 2
    rest = dim * (4 * apart + 28) + 8 * spec.page_tokens + 512
    staged = spec.page_tokens * dim * width + rest <= most
    shared = rest + spec.page_tokens * dim * (width if staged else 1)
    blocks = max(1, min(3, most // shared))
    return defines | {
        "STAGED": int(staged), "COPY": place["VEC"], "BLOCKS": blocks, "SHARED_BYTES": shared,
    }, shared  # fmt: skip


def decode_defines(
    spec: CodecSpec, place: dict[str, int], kv: int, pairs: int, most: int
) -> tuple[dict[str, object], int]:
    """What ``kernels/adaptive_decode.cu`` is compiled with; shared memory of a block."""
    defines, apart = _defines(spec, place, kv, pairs)
    shared = place["DIM"] * (spec.page_tokens + 4 * apart + 16) + 4 * spec.page_tokens + 512
    blocks = max(1, min(4, most // shared))
    return defines | {"BLOCKS": blocks, "SHARED_BYTES": shared}, shared


def _defines(
    spec: CodecSpec, place: dict[str, int], kv: int, pairs: int
) -> tuple[dict[str, object], int]:
    """Definitions for ``kernels/adaptive.cuh``, and rows of threads that rotate through memory."""
    dim, beta = place["DIM"], spec.alpha
    power = 1 << (dim - 1).bit_length()
    vec = min(place["VEC"], max(4, dim // _WARP))  # whole warps to a token, but 4 bytes to a thread
    paired = dim == power and 2 <= vec <= dim and dim // vec <= _WARP and pairs in (0, dim // 2)
    if not paired:
        vec = place["VEC"]
    packs = dim // vec if paired else max(1, power // vec)
    lanes = min(packs, _WARP)
    curve = {
        "BETA": beta, "ONE_LESS": 1 - beta, "ONE_LESS_SQUARED": (1 - beta) ** 2, "FOUR": 4 * beta,
        "INVERSE": 1 / (2 * beta) if beta else 0.0,
    }  # fmt: skip
    defines: dict[str, object] = place | {
        "VEC": vec,
        "KV": kv,
        "RESIDUAL_BITS": spec.residual_bits,
        "PAGE": spec.page_tokens,
        "PAIRS": pairs,
        "THREADS": _THREADS,
        "LANES": lanes,
        "COLUMNS": packs // lanes,
        "PAIRED": int(paired),
        "CURVED": int(beta > 0),
        **{name: f"{float(np.float32(x))!r}f" for name, x in curve.items()},
    }
    return defines, _THREADS // lanes if pairs and not paired else 0


@lru_cache(maxsize=256)
def _plan_args(spec: CodecSpec, layout: KVLayout) -> tuple[Any, ...]:
    """For ``PLAN_ARGS``."""
    plan = AdaptivePlan.of(spec, layout)
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
