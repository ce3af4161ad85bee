"""The profile ``adaptive`` on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import CorruptObjectError, FormatMismatchError, InvalidInputError
from ..keys import Part
from ..layout import KVLayout
from . import adaptive_cpu, adaptive_cpu_encode
from .adaptive_reference import AdaptivePlan, total_bits
from .calibration import Calibration
from .scheme import Bytes, CacheMemory, Ints, Scheme, Spread
from .spec import CodecSpec


class AdaptiveScheme(Scheme):
    """See ``adaptive_reference.py`` for what is computed and ``adaptive_cpu.py`` for how."""

    def __init__(self, spec: CodecSpec, calibration: Calibration | None) -> None:
        super().__init__(spec)
        self._calibration = calibration
        beta = spec.alpha
        inverse = 1 / (2 * beta) if beta else 0.0
        self._curve = np.array([beta, 1 - beta, (1 - beta) ** 2, 4 * beta, inverse], np.float32)

    def encode(
        self, memory: CacheMemory, make: Callable[[int], Bytes], spread: Spread
    ) -> tuple[list[Bytes], int]:
        spec, layout = self.spec, memory.layout
        tables = self._tables(layout)
        plan = AdaptivePlan.of(spec, layout)
        payloads = [make(plan.anchor_bytes), make(plan.residual_bytes)]
        priority = tables.priority.reshape(layout.layers, layout.channels)

        def run(first: int, last: int) -> int:
            bad: int = adaptive_cpu_encode.encode_layers(
                memory.words, memory.dtype, memory.strides, _shape(layout),
                tables.cos, tables.sin, tables.table, priority,
                self._totals(layout), self._curve, spec.residual_bits, spec.page_tokens,
                _starts(plan), *payloads, first, last,
            )  # fmt: skip
            return bad

        return payloads, sum(spread(run, layout.layers))

    def check_size(self, layout: KVLayout, part: Part, payload_bytes: int) -> None:
        if self._calibration is not None:
            try:
                self._calibration.check(layout, part=True)
            except InvalidInputError as e:
                raise FormatMismatchError(str(e)) from None
        plan = AdaptivePlan.of(self.spec, layout)
        wanted = plan.anchor_bytes if part == Part.ANCHOR else plan.residual_bytes
        if payload_bytes != wanted:
            raise FormatMismatchError(
                f"{part.label} payload has {payload_bytes} bytes; its layout needs {wanted}"
            )

    def check_content(self, layout: KVLayout, anchor: Bytes) -> None:
        bad = adaptive_cpu.count_impossible(
            anchor, _shape(layout), self._totals(layout), self.spec.page_tokens,
            _starts(AdaptivePlan.of(self.spec, layout)),
        )  # fmt: skip
        if bad:
            raise CorruptObjectError(
                f"anchor holds {bad} scales, widths or rows that no encoder writes; delete it"
            )

    def decode(
        self, anchor: Bytes, residual: Bytes | None, memory: CacheMemory, spread: Spread
    ) -> None:
        spec, layout = self.spec, memory.layout
        tables = self._tables(layout)
        starts = _starts(AdaptivePlan.of(spec, layout))
        extra = np.empty(0, np.uint8) if residual is None else residual

        def run(first: int, last: int) -> None:
            adaptive_cpu.decode_layers(
                anchor, extra, residual is not None, _shape(layout),
                tables.cos, tables.sin, tables.table,
                self._curve, spec.residual_bits, spec.page_tokens, starts,
                memory.words, memory.dtype, memory.strides, first, last,
            )  # fmt: skip

        spread(run, layout.layers)

    def _tables(self, layout: KVLayout) -> Calibration:
        if self._calibration is None:
            return Calibration.none(layout)
        self._calibration.check(layout)
        return self._calibration

    def _totals(self, layout: KVLayout) -> Ints:
        return np.array([total_bits(self.spec, layout, k) for k in range(layout.kv)], np.int64)


def _shape(layout: KVLayout) -> Ints:
    return np.array(layout.shape, np.int64)


def _starts(plan: AdaptivePlan) -> Ints:
    kv = len(plan.anchor_page)
    units = [plan.anchor_start(k + 1, 0) - plan.anchor_start(k, 0) for k in range(kv)]
    residual_unit = plan.residual_start(1, 0)
    return np.array(
        [
            plan.anchor_page, plan.anchor_last, units, [sum(units[:k]) for k in range(kv)],
            [plan.residual_page] * kv, [residual_unit] * kv,
        ],
        np.int64,
    )  # fmt: skip
