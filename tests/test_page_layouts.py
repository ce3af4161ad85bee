"""How LMCache's buffers lie in memory: there and back, and which wrong guesses are noticed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lynx_backend.codec import Calibration
from lynx_backend.errors import ConfigError, InvalidInputError, UnsupportedError
from lynx_backend.integrations.lmcache.chunk_layouts import CacheGeometry, ChunkLayouts
from lynx_backend.integrations.lmcache.page_layouts import (
    PAGE_LAYOUTS,
    PageLayout,
    alternatives,
    fitting_layout,
    roughness,
)
from lynx_backend.layout import KVLayout

LAYERS, TOKENS, HEADS, DIM = 2, 256, 2, 64


def cache(layers=LAYERS, tokens=TOKENS, heads=HEADS, dim=DIM, seed=0) -> torch.Tensor:
    """Keys with a mean of their own in each channel, as rough as a real model's; values without."""
    g = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, layers, tokens, heads, dim, generator=g)
    kv[0] += 2 * torch.randn(layers, 1, heads, dim, generator=g)
    return kv


def buffer_of(layout: PageLayout, kv: torch.Tensor) -> torch.Tensor:
    buffer = torch.full((kv.numel(),), math.nan, dtype=kv.dtype)
    layout.pack(kv, buffer)
    return buffer


def test_vllm_cpu_pages_element_by_element():
    kv = cache(layers=2, tokens=64, heads=3, dim=8)
    layout = PageLayout("vllm_cpu", 3, 8, block=32)
    # vLLM's CPU backend: [blocks, kv_heads, block, 2·head_dim] in memory; LMCache copies block
    # rows out as [blocks, block rows, kv_heads, 2·head_dim].
    pages = torch.empty(2, 2, 3, 32 * 16)
    for layer in range(2):
        for block in range(2):
            for head in range(3):
                of_block = kv[:, layer, 32 * block : 32 * (block + 1), head]
                pages[layer, block, head, : 32 * 8] = of_block[0].T.reshape(-1)
                pages[layer, block, head, 32 * 8 :] = of_block[1].reshape(-1)
    rows = pages.view(2, 2, 3, 32, 16).permute(0, 1, 3, 2, 4).reshape(2, 64, 48)
    assert torch.equal(layout.unpack(rows, 2, 64), kv)
    assert torch.equal(buffer_of(layout, kv), rows.flatten())


def test_fused_and_planes_element_by_element():
    kv = cache(tokens=8)
    fused = torch.stack([kv[0], kv[1]], dim=-2).reshape(LAYERS, 8, -1)
    assert torch.equal(PageLayout("fused", HEADS, DIM).unpack(fused, LAYERS, 8), kv)
    assert torch.equal(PageLayout("planes", HEADS, DIM).unpack(kv, LAYERS, 8), kv)


@given(
    name=st.sampled_from(sorted(PAGE_LAYOUTS)),
    layers=st.integers(1, 3),
    blocks=st.integers(1, 3),
    block=st.sampled_from([1, 2, 16]),
    heads=st.integers(1, 3),
    dim=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(deadline=None, max_examples=60)
def test_every_layout_there_and_back(name, layers, blocks, block, heads, dim, dtype):
    tokens = blocks * block
    if name == "latent":
        layout = PageLayout(name, 1, dim)
    else:
        layout = PageLayout(name, heads, dim, block if name == "vllm_cpu" else 0)
    elements = layers * tokens * layout.row
    buffer = torch.randn(elements).to(dtype)
    kv = layout.unpack(buffer, layers, tokens)
    assert kv.shape == (layout.planes, layers, tokens, layout.heads, dim)
    assert torch.equal(buffer_of(layout, kv.contiguous()), buffer)


PLANES, FUSED = PageLayout("planes", HEADS, DIM), PageLayout("fused", HEADS, DIM)
PAGES_16, PAGES_128 = (PageLayout("vllm_cpu", HEADS, DIM, block) for block in (16, 128))


@pytest.mark.parametrize(
    ("true", "wrong"),
    [(PLANES, FUSED), (FUSED, PAGES_128), (PAGES_128, FUSED), (PAGES_16, PAGES_128)],
)
def test_a_wrong_guess_is_noticed_and_the_right_one_named(true, wrong):
    buffer = buffer_of(true, cache())
    assert fitting_layout(true, buffer, LAYERS, TOKENS) == true
    assert fitting_layout(wrong, buffer, LAYERS, TOKENS) == true


def test_what_sglang_announces():
    """All layers' K, then all layers' V, under a shape that could as well be fused layers."""
    buffer = buffer_of(PLANES, cache())
    shape = (2 * LAYERS, TOKENS, HEADS * DIM)
    found = layouts(on_gpu=True, head_dim=DIM, page_layout="planes").of([shape], [torch.float32])
    assert found.pages == PLANES
    assert torch.equal(found.unpack(buffer.view(shape)), cache())


def test_what_tells_nothing_is_not_refused():
    layout = PageLayout("vllm_cpu", HEADS, DIM, 64)
    for buffer in (torch.zeros(LAYERS * TOKENS * layout.row), torch.ones(LAYERS * 16 * layout.row)):
        tokens = buffer.numel() // (LAYERS * layout.row)
        if layout.fits(tokens):
            assert fitting_layout(layout, buffer, LAYERS, tokens) is None
    assert math.isnan(roughness(torch.zeros(2, 1, 64, 1, 8)))
    assert math.isnan(roughness(torch.randn(2, 1, 16, 1, 8)))


def test_alternatives_have_the_same_size():
    layout = PageLayout("vllm_cpu", 3, 64, 48)
    others = alternatives(layout, 192)
    assert others[0] == layout
    assert len(set(others)) == len(others)
    assert {each.row for each in others} == {layout.row}
    assert all(each.fits(192) for each in others)


@pytest.mark.parametrize(
    ("name", "heads", "dim", "block"),
    [("rows", 1, 1, 0), ("fused", 0, 1, 0), ("fused", 1, 1, 16), ("vllm_cpu", 1, 1, 0)],
)
def test_impossible_layouts(name, heads, dim, block):
    with pytest.raises(InvalidInputError):
        PageLayout(name, heads, dim, block)


# -- what a shape says -----------------------------------------------------------------------------


def layouts(on_gpu=False, calibration=None, **said) -> ChunkLayouts:
    return ChunkLayouts(CacheGeometry.of(said), calibration, on_gpu)


def test_what_follows_from_a_shape():
    width = 2 * 3 * 64
    cpu = layouts(head_dim=64).of([(30, 256, width)], [torch.float32])
    assert cpu.pages == PageLayout("vllm_cpu", 3, 64, 128)
    assert cpu.kv == KVLayout(2, 30, 256, 3, 64, "float32")
    gpu = layouts(on_gpu=True, head_dim=64)
    assert gpu.of([(1, 30, 256, width)], [torch.bfloat16]).pages == PageLayout("fused", 3, 64)
    apart = gpu.of([(2, 30, 256, width // 2)], [torch.float16])
    assert apart.pages == PageLayout("planes", 3, 64)
    latent = layouts(page_layout="latent").of([(1, 27, 256, 576)], [torch.bfloat16])
    assert latent.kv == KVLayout(1, 27, 256, 1, 576, "bfloat16")
    assert len({each.signature for each in (cpu, apart, latent)}) == 3


def test_the_calibration_says_the_head_size():
    calibration = Calibration.none(KVLayout(2, 30, 256, 6, 64, "float32"))
    # A tensor-parallel rank of two has half of the heads.
    found = layouts(calibration=calibration).of([(30, 256, 2 * 3 * 64)], [torch.float32])
    assert found.pages == PageLayout("vllm_cpu", 3, 64, 128)


@pytest.mark.parametrize(
    ("said", "shapes", "dtype", "message"),
    [
        ({}, [(30, 256, 384)], torch.float32, "set kv_cache.head_dim"),
        ({"head_dim": 80}, [(30, 256, 384)], torch.float32, "correct kv_cache.head_dim"),
        ({"head_dim": 64}, [(30, 192, 384)], torch.float32, "multiple of the block"),
        ({"head_dim": 64}, [(30, 256, 384)] * 2, torch.float32, "hybrid models"),
        ({"head_dim": 64}, [(30, 256, 384)], torch.uint8, "already quantized"),
        ({"head_dim": 64}, [(1024,)], torch.bfloat16, "expected \\[layers, tokens"),
    ],
)
def test_what_is_refused(said, shapes, dtype, message):
    with pytest.raises(UnsupportedError, match=message):
        layouts(**said).of(shapes, [dtype] * len(shapes))


def test_objects_that_come_as_bytes():
    said = {"layers": 2, "tokens": 32, "dtype": "bfloat16", "head_dim": 8, "page_layout": "fused"}
    data = torch.arange(2 * 32 * 2 * 3 * 8 * 2).to(torch.uint8)
    layout, buffer = layouts(**said).of_buffer(data)
    assert layout.kv == KVLayout(2, 2, 32, 3, 8, "bfloat16")
    assert buffer.data_ptr() == data.data_ptr()
    with pytest.raises(UnsupportedError, match="no chunk of 2 layers"):
        layouts(**said).of_buffer(data[:-2])
    with pytest.raises(UnsupportedError, match="without a shape"):
        layouts(head_dim=8).of_buffer(data)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("fused", "must hold settings"),
        ({"heads": 3}, "unknown setting kv_cache.heads"),
        ({"head_dim": "64"}, "kv_cache.head_dim must be a positive integer"),
        ({"block_tokens": 0}, "positive integer"),
        ({"head_dim": True}, "positive integer"),
        ({"page_layout": "rows"}, "must be one of planes"),
        ({"dtype": "float8"}, "must be one of bfloat16"),
    ],
)
def test_wrong_settings_name_themselves(given, message):
    with pytest.raises(ConfigError, match=message):
        CacheGeometry.of(given)
