"""What a wrong guess of the layout costs on a real model's keys, and that it is noticed."""

from __future__ import annotations

import pytest
import torch

from lynx_backend.codec import Codec, CodecSpec
from lynx_backend.engines.kv_buffer import KVBuffer
from lynx_backend.integrations.lmcache.page_layouts import PageLayout, better_layout, roughness
from lynx_backend.models import load_model
from lynx_backend.texts import prompt_tokens

LAYERS, TOKENS, HEADS, DIM = 8, 256, 3, 64
PAGES = PageLayout("vllm_cpu", HEADS, DIM, 128)
FUSED = PageLayout("fused", HEADS, DIM)


@pytest.fixture(scope="module")
def kv() -> torch.Tensor:
    """The first layers of SmolLM2's cache of the second chunk of a text."""
    from pathlib import Path

    import lynx_backend.benchmarks

    text = Path(lynx_backend.benchmarks.__file__).parent / "data" / "book.txt"
    model, tokenizer = load_model("smollm2")
    buffer = KVBuffer(model, 512)
    buffer.prefill(prompt_tokens(tokenizer, text.read_text(), 512))
    return buffer.data[:, :LAYERS, 256:512].contiguous()


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
    assert better_layout(true, buffer, LAYERS, TOKENS) is None
    right = error_of_keys(along)
    for wrong in (PAGES, FUSED, PageLayout("planes", HEADS, DIM)):
        if wrong != true:
            read = wrong.unpack(buffer, LAYERS, TOKENS)
            assert roughness(read) > 1.1 * roughness(along)
            assert error_of_keys(read) > 1.2 * right
            assert better_layout(wrong, buffer, LAYERS, TOKENS) == true
