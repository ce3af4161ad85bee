"""The simulations behind the ablation are the codec: the same reconstructions, the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lynx_backend import Codec, CodecSpec
from lynx_backend.benchmarks.stages_adaptive import Adaptive, AdaptiveStages, Simulated, learn
from lynx_backend.benchmarks.stages_chunked import Chunked, ChunkedStages
from lynx_backend.codec import Calibration
from lynx_backend.wire import HEADER_BYTES

LAYERS, HEADS, DIM = 3, 2, 16


def cache(tokens: int = 600, seed: int = 0) -> torch.Tensor:
    """Channels of unequal size, keys that turn, a sink, values whose size follows the token."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, LAYERS, tokens, HEADS, DIM, generator=g)
    size = torch.exp2(torch.randint(-3, 4, (2, LAYERS, 1, HEADS, DIM), generator=g).float())
    x = x + 2 * torch.randn(2, LAYERS, 1, HEADS, DIM, generator=g)
    x[1] *= torch.exp2(torch.randn(LAYERS, tokens, HEADS, 1, generator=g))
    x *= size
    x[:, :, 0] = x[:, :, 0] / 64
    x[0, :, 0, :, 3] = 200
    x[0, 1, :, 0, 5] = 2.5  # a constant channel
    return x


def calibration() -> Calibration:
    rng = np.random.default_rng(1)
    frequencies = [10000.0 ** -(np.arange(6) / 6), np.zeros(6)]  # 12 of 16 channels turn
    power = np.exp2(rng.normal(0, 3, (LAYERS, HEADS, DIM)))
    return Calibration.of(frequencies, [0, 1, 0], power)


def from_codec(spec: CodecSpec, kv: torch.Tensor, known: Calibration | None = None) -> Simulated:
    codec = Codec(spec, calibration=known)
    anchors, fulls, sizes = [], [], np.zeros(2)
    for chunk in kv.split(256, dim=2):
        objects = codec.encode(chunk)
        anchors.append(codec.decode(objects[0]))
        fulls.append(codec.decode(*objects))
        sizes += [len(o) - HEADER_BYTES for o in objects]
    anchor_bits, rest = 8 * sizes / kv.numel()
    return Simulated(torch.cat(anchors, 2), torch.cat(fulls, 2), anchor_bits, anchor_bits + rest)


def same(found: Simulated, wanted: Simulated, kv: torch.Tensor) -> None:
    assert torch.equal(found.anchor.to(kv.dtype), wanted.anchor)
    assert torch.equal(found.full.to(kv.dtype), wanted.full)
    # What the wire has more is padding: of each section to 8 or 16 bytes, of a page's last codes.
    sections = 2 * LAYERS * -(-kv.shape[2] // 256)
    padding = (15 * 8 + 7 * 8 * HEADS * DIM) * sections / kv.numel()
    assert 0 <= wanted.anchor_bits - found.anchor_bits <= padding
    assert 0 <= wanted.full_bits - found.full_bits <= 2 * padding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [(4, 4), (3, 5), (2, 2), (4, 0)])
def test_adaptive_with_all_stages_on_is_the_codec(dtype: torch.dtype, bits: tuple[int, int]):
    kv, known = cache().to(dtype), calibration()
    spec = CodecSpec("adaptive", *bits)
    same(Adaptive(AdaptiveStages(), spec, known)(kv), from_codec(spec, kv, known), kv)


@pytest.mark.parametrize("tokens", [1, 2, 256])
def test_adaptive_of_short_and_whole_pages(tokens: int):
    kv, known = cache(tokens).to(torch.bfloat16), calibration()
    spec = CodecSpec("adaptive")
    same(Adaptive(AdaptiveStages(), spec, known)(kv), from_codec(spec, kv, known), kv)


def test_adaptive_bits_of_whole_pages_are_those_of_the_wire():
    kv, known = cache(256).to(torch.bfloat16), calibration()
    found = Adaptive(AdaptiveStages(), CodecSpec("adaptive"), known)(kv)
    wanted = from_codec(CodecSpec("adaptive"), kv, known)
    assert wanted.anchor_bits - found.anchor_bits < 7 * 8 * 2 * LAYERS / kv.numel()
    assert found.full_bits == pytest.approx(wanted.full_bits, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "spec",
    [
        CodecSpec("linear"),
        CodecSpec("linear", 3, 5, chunk=64),
        CodecSpec("linear", alpha=1.0, exact_tokens=0),
        CodecSpec("paper"),
        CodecSpec("paper", 4, 2, chunk=8, alpha=15.0, exact_tokens=4),
    ],
    ids=str,
)
def test_chunked_with_all_stages_on_is_the_codec(dtype: torch.dtype, spec: CodecSpec):
    kv = cache().to(dtype)
    same(Chunked(ChunkedStages(), spec)(kv), from_codec(spec, kv), kv)


def error(kv: torch.Tensor, rebuilt: torch.Tensor) -> float:
    return float((kv - rebuilt).square().mean())


@pytest.mark.parametrize(
    "changed",
    [
        {"exact_rows": 0},
        {"exact_rows": 2},
        {"rotation": ""},
        {"rotation": "absolute"},
        {"token_scale": (False, False)},
        {"token_scale": (True, True)},
        {"widths": False},
        {"priority": False},
        {"companding": (False, False)},
        {"key_bits_to_values": False},
        {"basis": ("hadamard", "hadamard")},
        {"basis": ("klt", "klt")},
        {"shrink": 0.02},
        {"at_mean": True},
        {"feedback": 0.5},
    ],
    ids=str,
)
def test_every_switch_changes_the_codec_and_not_the_bits(changed: dict[str, Any]):
    """A switch that breaks the way back would leave an error that no stage can explain."""
    kv, known = cache(512), calibration()
    spec = CodecSpec("adaptive")
    stages = replace(AdaptiveStages(), **changed)
    learnt = learn([cache(512, seed=1)], spec, known)[stages.rotation or "page"]
    usual = Adaptive(AdaptiveStages(), spec, known)(kv)
    found = Adaptive(stages, spec, known, learnt)(kv)
    assert not torch.equal(found.anchor, usual.anchor)
    assert found.anchor_bits == pytest.approx(usual.anchor_bits, abs=0.1)
    # Units are unlike, so by channel: at 4 bits no variant errs by more than a fifth of a channel.
    spread = kv.var(2, keepdim=True).mean((0, 1), keepdim=True)
    rows = slice(1, None)
    relative = (kv - found.anchor).square()[:, :, rows] / spread
    assert relative.mean() < 0.2
    if not (stages.feedback or stages.shrink):
        assert error(kv, found.full) < error(kv, found.anchor) / 50


@pytest.mark.parametrize(
    ("profile", "changed"),
    [
        ("linear", {"page_scale": False}),
        ("linear", {"bias": False}),
        ("paper", {"page_scale": False}),
        ("paper", {"centre": False}),
        ("paper", {"zero": "signed"}),
        ("paper", {"bias": False}),
    ],
    ids=str,
)
def test_every_switch_changes_a_chunked_profile(profile: str, changed: dict[str, Any]):
    kv, spec = cache(512), CodecSpec(profile)
    usual = Chunked(ChunkedStages(), spec)(kv)
    found = Chunked(ChunkedStages(**changed), spec)(kv)
    assert not torch.equal(found.anchor, usual.anchor)
    assert error(kv, found.full) < error(kv, kv.mean(2, keepdim=True)) / 50


def test_the_second_zero_of_the_paper_changes_nothing_by_itself():
    kv, spec = cache(512), CodecSpec("paper")
    usual, found = (Chunked(ChunkedStages(zero=zero), spec)(kv) for zero in ("two", "one"))
    assert torch.equal(found.anchor, usual.anchor)
    assert torch.equal(found.full, usual.full)
