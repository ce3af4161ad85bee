"""The codec's profiles with one stage off at a time, chunks of other sizes, and what might be next.

Simulated by :mod:`.stages_adaptive` and :mod:`.stages_chunked`. What a stage of ``adaptive`` saves
goes to its codes, so its variants have equal bits; of ``linear`` and ``paper`` the bits are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..codec import Calibration, CodecSpec
from .measure import Effect, Reader, Subject, summary
from .quantizers import lynx
from .stages_adaptive import Adaptive, AdaptiveStages, Simulated, learn
from .stages_chunked import Chunked, ChunkedStages

CHUNKS = (8, 16, 32, 64, 128, 256)
_HADAMARD, _KLT = "hadamard", "klt"


@dataclass(frozen=True)
class Variant:
    """One row of the table; the first of its profile and section is what others compare with."""

    profile: str
    section: str
    name: str
    run: Callable[[torch.Tensor], Simulated]


_ADAPTIVE_OFF: dict[str, dict[str, Any]] = {
    "no nearly exact row": {"exact_rows": 0},
    "keys keep their rotation": {"rotation": ""},
    "no token scale for values": {"token_scale": (False, False)},
    "no bits by channel: one number of levels": {"widths": False},
    "no priorities: widths by range alone": {"priority": False},
    "keys not companded": {"companding": (False, True)},
    "values not companded": {"companding": (True, False)},
    "nothing companded": {"companding": (False, False)},
    "keys and values get equal bits": {"key_bits_to_values": False},
}
_ADAPTIVE_NEXT: dict[str, dict[str, Any]] = {
    "two nearly exact rows": {"exact_rows": 2},
    "four nearly exact rows": {"exact_rows": 4},
    "token scale for keys, too": {"token_scale": (True, True)},
    "rotation undone from the prompt's start": {"rotation": "absolute"},
    "V: KLT": {"basis": ("", _KLT)},
    "K: KLT": {"basis": (_KLT, "")},
    "K: KLT, rotation undone from the prompt's start": {
        "basis": (_KLT, ""),
        "rotation": "absolute",
    },
    "K and V: KLT, rotation undone from the prompt's start": {
        "basis": (_KLT, _KLT),
        "rotation": "absolute",
    },
    "V: Hadamard": {"basis": ("", _HADAMARD)},
    "K: Hadamard": {"basis": (_HADAMARD, "")},
    "ranges shrunk by 1 % at both ends": {"shrink": 0.01},
    "ranges shrunk by 3 % at both ends": {"shrink": 0.03},
    "anchor reconstructed at the mean": {"at_mean": True},
    "noise shaping, half of the error": {"feedback": 0.5},
    "noise shaping, all of the error": {"feedback": 1.0},
}


def real(spec: CodecSpec, calibration: Calibration | None = None) -> Callable[..., Simulated]:
    """The codec itself; its bits are bytes on the wire, headers included."""
    run = lynx(spec, calibration)

    def through(kv: torch.Tensor) -> Simulated:
        anchor, full = run(kv)
        bits = [8 * part.wire_bytes / kv.numel() for part in (anchor, full)]
        return Simulated(anchor.kv, full.kv, *bits)

    return through


def variants(subject: Subject, tuning: list[torch.Tensor]) -> list[Variant]:
    """All rows; ``tuning`` are caches that bases and means are learnt from."""
    return [*_adaptive(subject.calibration, tuning), *_linear(), *_paper()]


def _adaptive(known: Calibration, tuning: list[torch.Tensor]) -> list[Variant]:
    spec, usual = CodecSpec("adaptive"), AdaptiveStages()
    learnt = learn(tuning, spec, known)

    def simulated(changed: dict[str, Any]) -> Adaptive:
        stages = replace(usual, **changed)
        return Adaptive(stages, spec, known, learnt[stages.rotation or "page"])

    rows: list[tuple[str, str, Callable[..., Simulated]]] = [
        ("stages", "all stages", simulated({})),
        ("stages", "all stages, the codec itself", real(spec, known)),
        *(("stages", name, simulated(changed)) for name, changed in _ADAPTIVE_OFF.items()),
        *(("next", name, simulated(changed)) for name, changed in _ADAPTIVE_NEXT.items()),
    ]
    return [Variant("adaptive", *row) for row in rows]


def _linear() -> list[Variant]:
    spec, usual = CodecSpec("linear"), ChunkedStages()
    rows: list[tuple[str, str, Callable[..., Simulated]]] = [
        ("stages", "all stages", Chunked(usual, spec)),
        ("stages", "all stages, the codec itself", real(spec)),
        (
            "stages", "no page scale: two fp16 a chunk",
            Chunked(replace(usual, page_scale=False), spec),
        ),
        (
            "stages", "no page scale, chunk 64",
            Chunked(replace(usual, page_scale=False), replace(spec, chunk=64)),
        ),
        ("stages", "no exact tokens", Chunked(usual, replace(spec, exact_tokens=0))),
        ("stages", "no chunks: one scale a page", Chunked(usual, replace(spec, chunk=256))),
        ("stages", "residual not centred", Chunked(replace(usual, bias=False), spec)),
        ("stages", "companded, α = 1", Chunked(usual, replace(spec, alpha=1.0))),
        *(
            ("chunks", f"chunk {chunk}", Chunked(usual, replace(spec, chunk=chunk)))
            for chunk in CHUNKS
        ),
    ]  # fmt: skip
    return [Variant("linear", *row) for row in rows]


def _paper() -> list[Variant]:
    spec, usual = CodecSpec("paper"), ChunkedStages()
    rows: list[tuple[str, str, Callable[..., Simulated]]] = [
        ("stages", "all stages", Chunked(usual, spec)),
        ("stages", "all stages, the codec itself", real(spec)),
        (
            "stages", "no page normalisation: two fp16 a chunk",
            Chunked(replace(usual, page_scale=False), spec),
        ),
        (
            "stages", "no page normalisation, chunk 64",
            Chunked(replace(usual, page_scale=False), replace(spec, chunk=64)),
        ),
        ("stages", "no chunks: one scale a page", Chunked(usual, replace(spec, chunk=256))),
        ("stages", "no companding (α = 0)", Chunked(usual, replace(spec, alpha=0.0))),
        ("stages", "weaker companding (α = 15)", Chunked(usual, replace(spec, alpha=15.0))),
        ("stages", "not centred on the mean", Chunked(replace(usual, centre=False), spec)),
        ("stages", "no bias: residual not centred", Chunked(replace(usual, bias=False), spec)),
        ("stages", "one zero instead of two", Chunked(replace(usual, zero="one"), spec)),
        (
            "next", "zeros stand off zero, by their sign",
            Chunked(replace(usual, zero="signed"), spec),
        ),
        ("next", "up to 4 exact tokens", Chunked(usual, replace(spec, exact_tokens=4))),
        *(
            ("chunks", f"chunk {chunk}", Chunked(usual, replace(spec, chunk=chunk)))
            for chunk in CHUNKS
        ),
    ]  # fmt: skip
    return [Variant("paper", *row) for row in rows]


def measure(
    subject: Subject, rows: list[Variant], texts: list[str], tokens: int, done: Callable[[], None]
) -> list[dict[str, Any]]:
    """Every variant over some texts: its place in the table, and ``anchor`` and ``full``."""
    found: list[tuple[list[Effect], list[Effect]]] = [([], []) for _ in rows]
    for text in texts:
        reader = Reader(subject, subject.tokens(text, tokens))
        for row, (anchors, fulls) in zip(rows, found, strict=True):
            made = row.run(reader.kv)
            anchors.append(reader.judge(made.anchor, made.anchor_bits))
            fulls.append(reader.judge(made.full, made.full_bits))
            done()
    return [
        {
            "profile": row.profile,
            "section": row.section,
            "variant": row.name,
            "anchor": summary(anchors),
            "full": summary(fulls),
        }
        for row, (anchors, fulls) in zip(rows, found, strict=True)
    ]
