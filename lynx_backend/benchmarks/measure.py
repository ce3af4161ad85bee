"""A model, what it saw of a text, and what a reconstruction of its cache does to it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch

from ..codec import Calibration
from ..engines.calibrate import calibrate
from ..engines.kv_buffer import KVBuffer
from ..models import load_model
from ..texts import prompt_tokens
from .attention import AttentionError, attention_error, capture, outputs
from .quantizers import Quantizer, Reconstruction
from .texts import TEXTS, TUNING

TOKENS = 2048
POSITIONS = 64
CALIBRATION_TOKENS = 1024
CALIBRATION_TEXT = "chat"  # one of the tuning texts
Tensor = torch.Tensor


@dataclass
class Subject:
    """A model under measurement, on its device."""

    name: str
    model: Any
    tokenizer: Any
    calibration: Calibration

    @classmethod
    def load(cls, name: str, device: str) -> Subject:
        """In float32; calibrated on a tuning text."""
        model, tokenizer = load_model(name)
        text = prompt_tokens(tokenizer, TEXTS[CALIBRATION_TEXT](), CALIBRATION_TOKENS)
        known = calibrate(model, text)  # on the CPU: the same file wherever the rest runs
        return cls(name, model.to(device), tokenizer, known)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, KV heads and head_dim."""
        layers, heads, d = self.calibration.priority.shape
        return layers, heads, d

    def tokens(self, text: str, count: int) -> list[int]:
        """The first tokens of one of the texts."""
        return prompt_tokens(self.tokenizer, TEXTS[text](), count)

    def tuning_caches(self, count: int) -> list[Tensor]:
        """Caches of the tuning texts, for what is learnt from them."""
        return [capture(self.model, self.tokens(t, count), 1).kv for t in TUNING]


@dataclass(frozen=True)
class Effect:
    """What one reconstruction of one text's cache does.

    Attributes:
        bits: an element.
        attention: see there.
        kl: of the next token, mean over the last positions, in nats, from the bfloat16 cache's.
        same: share of those positions whose most likely token stays.
    """

    bits: float
    attention: AttentionError
    kl: float
    same: float


def summary(effects: Iterable[Effect]) -> dict[str, float]:
    """One reconstruction over several texts."""
    some = list(effects)
    means = {k: statistics.fmean(getattr(e, k) for e in some) for k in ("bits", "kl", "same")}
    return means | reduce(add, (e.attention for e in some)).report()


class Reader:
    """Judges reconstructions of the cache of one prompt."""

    def __init__(self, subject: Subject, tokens: list[int]) -> None:
        self._seen = capture(subject.model, tokens, POSITIONS)
        self._exact = outputs(self._seen)
        self._buffer = KVBuffer(subject.model, len(tokens))
        self._tokens = tokens
        self._reference = self._next_tokens(self.kv)

    @property
    def kv(self) -> Tensor:
        """The cache, bfloat16 [2, layers, tokens, kv_heads, head_dim]."""
        return self._seen.kv

    def _next_tokens(self, kv: Tensor) -> Tensor:
        """Log-probabilities after each of the last tokens, on top of a cache of the others."""
        self._buffer.load(kv[:, :, : len(self._tokens) - POSITIONS])
        logits = self._buffer.forward(self._tokens[-POSITIONS:], keep=POSITIONS)
        return logits.log_softmax(-1)

    def judge(self, rebuilt: Tensor, bits: float) -> Effect:
        """``rebuilt`` in the cache's shape, any dtype; rounded to bfloat16 here."""
        found, reference = self._next_tokens(rebuilt.to(self.kv.dtype)), self._reference
        return Effect(
            bits,
            attention_error(self._seen, self._exact, rebuilt),
            (reference.exp() * (reference - found)).sum(-1).mean().item(),
            (reference.argmax(-1) == found.argmax(-1)).float().mean().item(),
        )


def part_names(quantizer: Quantizer, rebuilt: list[Reconstruction]) -> list[str]:
    """What a quantizer's reconstructions are called."""
    if len(rebuilt) == 1:
        return [quantizer.name]
    return [f"{quantizer.name}: {part}" for part in ("anchor", "full")]


def effects(
    reader: Reader, compared: list[Quantizer], done: Callable[[], None]
) -> dict[str, Effect]:
    """Of every reconstruction of one text, by name."""
    rows = {}
    for quantizer in compared:
        rebuilt = quantizer.run(reader.kv)
        for name, part in zip(part_names(quantizer, rebuilt), rebuilt, strict=True):
            rows[name] = reader.judge(part.kv, 8 * part.wire_bytes / reader.kv.numel())
        done()
    return rows
