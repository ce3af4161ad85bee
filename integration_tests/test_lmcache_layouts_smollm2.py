"""What a wrong guess of the layout costs on a real model's keys, and that it is noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import lynx_backend.benchmarks
from lynx_backend.codec import Codec, CodecSpec
from lynx_backend.engines.kv_buffer import KVBuffer
from lynx_backend.integrations.lmcache.page_layouts import PageLayout, fitting_layout, roughness
from lynx_backend.models import load_model
from lynx_backend.texts import prompt_tokens

LAYERS, TOKENS, HEADS, DIM = 8, 256, 3, 64
PAGES = PageLayout("vllm_cpu", HEADS, DIM, 128)
FUSED = PageLayout("fused", HEADS, DIM)
PLANES = PageLayout("planes", HEADS, DIM)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    return load_model("smollm2")


@pytest.fixture(scope="module")
def kv_of(smollm2: tuple[Any, Any]) -> Callable[[Sequence[int]], torch.Tensor]:
    """The first layers of SmolLM2's cache of some tokens."""

    def kv_of(tokens: Sequence[int]) -> torch.Tensor:
        buffer = KVBuffer(smollm2[0], len(tokens))
        buffer.prefill(tokens)
        return buffer.data[:, :LAYERS].contiguous()

    return kv_of


@pytest.fixture(scope="module")
def kv(smollm2: tuple[Any, Any], kv_of: Callable[[Sequence[int]], torch.Tensor]) -> torch.Tensor:
    """The same of the second chunk of a text."""
    text = Path(lynx_backend.benchmarks.__file__).parent / "data" / "book.txt"
    tokens = prompt_tokens(smollm2[1], text.read_text(), 2 * TOKENS)
    return kv_of(tokens)[:, :, TOKENS:].contiguous()


def error_of_keys(kv: torch.Tensor) -> float:
    """vNMSE of the keys as the anchor alone has them."""
    codec = Codec(CodecSpec())
    anchor, _ = codec.encode(kv)
    return float((codec.decode(anchor)[0] - kv[0]).square().sum() / kv[0].square().sum())


@pytest.mark.parametrize("true", [PAGES, FUSED], ids=["vllm_cpu", "fused"])
def test_wrong_axes_cost_fidelity_and_are_noticed(kv, true):
    buffer = torch.empty(LAYERS, TOKENS, true.row)
    true.pack(kv, buffer)
    along = true.unpack(buffer, LAYERS, TOKENS)
    assert torch.equal(along, kv)
    assert fitting_layout(true, buffer, LAYERS, TOKENS) == true
    right = error_of_keys(along)
    for wrong in (PAGES, FUSED, PLANES):
        if wrong != true:
            read = wrong.unpack(buffer, LAYERS, TOKENS)
            assert roughness(read) > 1.1 * roughness(along)
            assert error_of_keys(read) > 1.2 * right
            assert fitting_layout(wrong, buffer, LAYERS, TOKENS) == true


@pytest.mark.parametrize("true", [PAGES, FUSED, PLANES], ids=lambda layout: layout.name)
@pytest.mark.parametrize("period", [1, 2])
def test_a_prompt_that_repeats_itself_tells_nothing(kv_of, true, period):
    """A warm-up, a load test, padding: smooth along many axes, the false ones among them."""
    kv = kv_of([1000 + i % period for i in range(2 * TOKENS)])
    for chunk in kv.split(TOKENS, dim=2):
        buffer = torch.empty(LAYERS * TOKENS * true.row)
        true.pack(chunk.contiguous(), buffer)
        assert fitting_layout(true, buffer, LAYERS, TOKENS) is None
