"""The profiles ``linear`` and ``paper`` on the CPU: a scale for each channel and chunk."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import CorruptObjectError, FormatMismatchError
from ..keys import Part
from ..layout import KVLayout
from . import cpu
from .grid import grid_of
from .reference import choose_sinks, to_float
from .scheme import Bytes, CacheMemory, Ints, Scheme, Spread
from .spec import PROFILES, SINK_RATIO, CodecSpec, PayloadPlan


class ChunkedScheme(Scheme):
    """See ``reference.py`` for what is computed and ``cpu.py`` for how."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        grid = grid_of(spec)
        bits = (spec.anchor_bits, spec.residual_bits, spec.levels, spec.bias)
        self._rules = (
            PROFILES.index(spec.profile), np.array(bits, np.int64), spec.chunk, spec.page_tokens,
        )  # fmt: skip
        self._grid = (np.float32(grid.scale), grid.uniform)
        self._values = grid.values
        self._thresholds = np.full(255, np.inf, np.float32)
        self._thresholds[: len(grid.thresholds)] = grid.thresholds
        self._codes = np.zeros(256, np.uint8)
        self._codes[: len(grid.codes)] = grid.codes

    def encode(
        self, memory: CacheMemory, make: Callable[[int], Bytes], spread: Spread
    ) -> tuple[list[Bytes], int]:
        plan = PayloadPlan.of(self.spec, memory.layout)
        chosen = self._exact_tokens(memory)
        exact = np.zeros(memory.layout.tokens, np.bool_)
        exact[chosen] = True
        payloads = [make(plan.anchor_bytes(len(chosen))), make(plan.residual_bytes)]

        signed = np.dtype(f"i{memory.words.itemsize}")
        limits = np.array([np.iinfo(signed).min, np.iinfo(signed).max], signed)
        chunks = self.spec.chunks(self.spec.page_tokens)

        def run(first: int, last: int) -> int:
            bounds = np.empty((2, chunks, memory.layout.channels), signed)
            bad: int = cpu.encode_units(
                memory.words, memory.dtype, memory.strides, _shape(memory.layout), exact,
                *self._rules, *self._grid, self._thresholds, self._codes, bounds, limits,
                *payloads, _sections(plan), first, last,
            )  # fmt: skip
            return bad

        bad = sum(spread(run, plan.units))
        rows = memory.rows(chosen)
        bad += int((~np.isfinite(to_float(rows, memory.layout.dtype))).sum())
        if not bad:
            tail = payloads[0][plan.exact_offset :]
            tail[: 4 * len(chosen)] = chosen.astype("<u4").view(np.uint8)
            tail[4 * len(chosen) :] = rows.reshape(-1).view(np.uint8)
        return payloads, bad

    def check_size(self, layout: KVLayout, part: Part, payload_bytes: int) -> None:
        plan = PayloadPlan.of(self.spec, layout)
        if part == Part.ANCHOR:
            plan.exact_count(payload_bytes, self.spec.exact_tokens)
        elif payload_bytes != plan.residual_bytes:
            raise FormatMismatchError(
                f"residual payload has {payload_bytes} bytes; its layout needs "
                f"{plan.residual_bytes}"
            )

    def check_content(self, layout: KVLayout, anchor: Bytes) -> None:
        plan = PayloadPlan.of(self.spec, layout)
        chosen = self._stored_tokens(plan, anchor)
        if np.any(np.diff(chosen, prepend=-1) <= 0) or np.any(chosen >= layout.tokens):
            raise FormatMismatchError(
                f"exact token indices {chosen.tolist()} are not ascending below {layout.tokens}"
            )
        bad = cpu.count_impossible_scales(
            anchor, _sections(plan), plan.units, plan.pages, layout.channels
        )
        if bad:
            raise CorruptObjectError(
                f"anchor holds {bad} page scales that no encoder writes; delete it"
            )

    def decode(
        self, anchor: Bytes, residual: Bytes | None, memory: CacheMemory, spread: Spread
    ) -> None:
        plan = PayloadPlan.of(self.spec, memory.layout)
        extra = np.empty(0, np.uint8) if residual is None else residual

        def run(first: int, last: int) -> None:
            cpu.decode_units(
                anchor, extra, residual is not None, _shape(memory.layout),
                *self._rules, *self._grid, self._values,
                memory.words, memory.dtype, memory.strides, _sections(plan), first, last,
            )  # fmt: skip

        spread(run, plan.units)
        chosen = self._stored_tokens(plan, anchor)
        at = memory.layout
        raw = anchor[plan.exact_offset + 4 * len(chosen) :].copy().view(memory.words.dtype)
        memory.put_rows(chosen, raw.reshape(len(chosen), at.layers, at.kv, at.channels))

    def _stored_tokens(self, plan: PayloadPlan, anchor: Bytes) -> Ints:
        count = plan.exact_count(len(anchor), self.spec.exact_tokens)
        indices = anchor[plan.exact_offset : plan.exact_offset + 4 * count]
        tokens: Ints = indices.copy().view("<u4").astype(np.int64)
        return tokens

    def _exact_tokens(self, memory: CacheMemory) -> Ints:
        spec, layout = self.spec, memory.layout
        if not spec.exact_tokens:
            return np.empty(0, np.int64)
        layers = spec.sink_layers(layout.layers)
        small = cpu.count_small_keys(
            memory.words, memory.dtype, memory.strides, _shape(layout),
            layers.step, spec.page_tokens, SINK_RATIO,
        )  # fmt: skip
        return choose_sinks(small, len(layers) * layout.channels, spec.exact_tokens)


def _shape(layout: KVLayout) -> Ints:
    return np.array((layout.kv, layout.layers, layout.tokens, layout.channels), np.int64)


def _sections(plan: PayloadPlan) -> Ints:
    sizes = (plan.anchor_page, plan.anchor_unit, plan.residual_page, plan.residual_unit)
    return np.array(sizes, np.int64)
