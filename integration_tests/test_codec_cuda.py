"""The codec on a GPU against the codec on the CPU: the same bytes and bits, nothing else touched.

Needs CuPy and a GPU of compute capability 8.0 or more.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from test_adaptive import calibration_for
from test_codec import DTYPES, SPLITS, bits_of, layout_of, payload, random_kv, same_bits

from lynx_backend import (
    Codec,
    CodecSpec,
    CorruptObjectError,
    FormatMismatchError,
    InvalidInputError,
    wire,
)
from lynx_backend.codec import reference
from lynx_backend.codec.calibration import Calibration
from lynx_backend.keys import Part

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU here", allow_module_level=True)
pytest.importorskip("cupy", reason="CuPy is not installed")

from lynx_backend.codec.cuda_codec import CudaCodec
from lynx_backend.codec.paged import PagedCache

GPU = torch.device("cuda", 0)


def pair(spec: CodecSpec, calibration: Calibration | None = None) -> tuple[Codec, CudaCodec]:
    gpu = Codec(spec, device="cuda", calibration=calibration)
    assert isinstance(gpu, CudaCodec)
    return Codec(spec, calibration=calibration), gpu


def assert_same(kv: torch.Tensor, spec: CodecSpec, calibration: Calibration | None = None) -> None:
    cpu, gpu = pair(spec, calibration)
    key = b"k" * 32
    wanted = cpu.encode(kv, key)
    found = gpu.encode(kv.to(GPU), key)
    for name, a, b in zip(("anchor", "residual"), wanted, found, strict=True):
        assert torch.equal(a, b.cpu()), name
    for parts in ((wanted[0],), wanted):
        full = cpu.decode(*parts)
        assert same_bits(gpu.decode(*parts).cpu(), full)  # from host memory
        assert same_bits(gpu.decode(*found[: len(parts)]).cpu(), full)  # from the GPU's
    coarse = gpu.decode(found[0])
    assert gpu.refine(coarse, *found) is coarse
    assert same_bits(coarse.cpu(), cpu.decode(*wanted))


def hostile(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any finite bit pattern up to the largest fp16, with denormals and equal values."""
    rng = np.random.default_rng(seed)
    wide = dtype == torch.float32
    raw = rng.integers(0, 2 ** (32 if wide else 16), shape, np.uint32 if wide else np.uint16)
    kv = torch.from_numpy(raw.view(np.int32 if wide else np.int16)).view(dtype).clone()
    kv[~(kv.float().abs() <= reference.MAX_ABS)] = 0
    kv[:, :, :: 2 + seed % 3] *= 1e-30 if seed % 2 else 1
    if seed % 4 == 3:
        kv[:] = kv[:, :, :1]
    return kv


@pytest.mark.parametrize("profile", ["linear", "paper"])
@pytest.mark.parametrize("split", SPLITS)
def test_every_split(profile: str, split: tuple[int, int]):
    dtype = DTYPES[sum(split) % 3]
    assert_same(random_kv((2, 2, 300, 3, 20), dtype), CodecSpec(profile, *split))


@pytest.mark.parametrize("alpha", [0.0, 15.0])
@pytest.mark.parametrize("chunk", [1, 4, 8, 16, 64, 256])
@pytest.mark.parametrize("profile", ["linear", "paper"])
def test_every_chunk_and_companding(profile: str, chunk: int, alpha: float):
    spec = CodecSpec(profile, chunk=chunk, alpha=alpha)
    assert_same(random_kv((2, 1, 270, 2, 16), torch.bfloat16), spec)


@pytest.mark.parametrize("page_tokens", [8, 24, 1024])
def test_other_pages(page_tokens: int):
    for dtype in DTYPES:
        spec = CodecSpec("linear", page_tokens=page_tokens, chunk=8)
        assert_same(random_kv((2, 2, 1100, 2, 8), dtype), spec)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("alpha", [0.0, 0.35, 0.9])
def test_every_split_of_adaptive(split: tuple[int, int], alpha: float):
    spec = CodecSpec("adaptive", *split, alpha=alpha, page_tokens=64 if alpha else 256)
    kv = random_kv((2, 2, 90, 2, 16), torch.bfloat16)
    assert_same(kv, spec, calibration_for(layout_of(kv), 8))


SHAPES = [
    (2, 3, 300, 3, 20), (2, 1, 256, 2, 64), (2, 2, 1, 1, 1), (2, 1, 7, 5, 7), (2, 1, 33, 1, 80),
    (1, 3, 260, 1, 96), (2, 1, 2, 2, 6), (2, 1, 255, 1, 33), (2, 1, 513, 2, 8), (2, 1, 300, 4, 256),
    (1, 2, 300, 1, 576), (2, 2, 700, 8, 128), (2, 1, 300, 40, 64),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rotated", [0, 1, 4])
def test_every_shape_of_adaptive(shape: tuple[int, ...], rotated: int):
    kv = random_kv(shape, DTYPES[(sum(shape) + rotated) % 3] if shape[4] != 576 else DTYPES[0])
    pairs = 32 if shape[4] == 576 else shape[4] // 2 // max(1, rotated)
    calibration = calibration_for(layout_of(kv), pairs) if rotated else None
    assert_same(kv, CodecSpec("adaptive"), calibration)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("profile", ["linear", "paper"])
def test_every_shape(profile: str, shape: tuple[int, ...]):
    assert_same(random_kv(shape, DTYPES[sum(shape) % 3]), CodecSpec(profile))


@pytest.mark.parametrize("profile", ["linear", "paper", "adaptive"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_hostile_values(profile: str, dtype: torch.dtype):
    for seed in range(8):
        shape = [(2, 2, 40, 1, 4), (1, 2, 9, 2, 2), (2, 1, 300, 2, 64)][seed % 3]
        kv = hostile(shape, dtype, seed)
        calibration = None
        if profile == "adaptive" and seed % 2:
            calibration = calibration_for(layout_of(kv), shape[4] // 2)
        assert_same(kv, CodecSpec(profile), calibration)


@pytest.mark.parametrize("profile", ["linear", "adaptive"])
def test_a_long_prompt_equals_itself_every_time(profile: str):
    """Many blocks at once, several digest blocks; races would show."""
    kv = random_kv((2, 16, 5000, 8, 128), torch.bfloat16)
    assert_same(kv, CodecSpec(profile))
    gpu = Codec(CodecSpec(profile), device="cuda")
    first = gpu.encode(kv.to(GPU))
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, gpu.encode(kv.to(GPU)), strict=True))


@pytest.mark.parametrize("count", [0, 1, 2, 4, 9, 70])
def test_attention_sinks(count: int):
    kv = torch.randn(2, 9, 600, 2, 64, generator=torch.Generator().manual_seed(3)) + 2
    at = torch.randperm(600, generator=torch.Generator().manual_seed(4))[:count]
    kv[:, :, at] *= 1e-3
    for most in (0, 4, 64):
        assert_same(kv.to(torch.bfloat16), CodecSpec("linear", exact_tokens=most))


# -- caches in pages -------------------------------------------------------------------------------


def engine(
    form: str, layers: int, blocks: int, block: int, heads: int, dim: int, dtype: torch.dtype
):
    """Poisoned tensors of an engine's cache, and how the codec sees them."""
    shape = {
        "kv_first": (2, blocks, block, heads, dim),
        "blocks_first": (blocks, 2, block, heads, dim),
        "fused": (blocks, heads, block, 2 * dim),
        "latent": (blocks, block, heads * dim),
    }.get(form)
    if form == "tokens":
        pairs = [torch.full((blocks * block, heads, dim), 777.0, dtype=dtype, device=GPU)
                 for _ in range(2 * layers)]  # fmt: skip
        views = [x[:, None] for x in pairs]
        return pairs, PagedCache(views[::2], views[1::2])
    tensors = [torch.full(shape, 777.0, dtype=dtype, device=GPU) for _ in range(layers)]
    return tensors, PagedCache.of(tensors, form)


FORMS = ["kv_first", "blocks_first", "fused", "tokens", "latent"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("profile", ["linear", "adaptive"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pages_equal_the_plain_form_and_nothing_else_is_touched(
    form: str, profile: str, dtype: torch.dtype
):
    layers, heads, dim, tokens = 3, (1 if form == "latent" else 4), 64, 301
    kv = random_kv((1 if form == "latent" else 2, layers, tokens, heads, dim), dtype)
    cpu, gpu = pair(CodecSpec(profile))
    anchor, residual = cpu.encode(kv)
    tensors, cache = engine(form, layers, 40, 16, heads, dim, dtype)
    order = torch.randperm(40 * 16, generator=torch.Generator().manual_seed(1))[:tokens]
    there = cache.at(order.to(GPU))
    untouched = [x.clone() for x in tensors]

    gpu.decode(anchor, out=there)
    assert same_bits(gathered(cache, order), cpu.decode(anchor))
    gpu.refine(there, anchor, residual)
    assert same_bits(gathered(cache, order), cpu.decode(anchor, residual))
    for view in cache.views:  # as if those tokens had never been written
        rows = view.reshape(-1, heads, dim) if view.is_contiguous() else None
        if rows is None:
            view[order // cache.block, order % cache.block] = 777.0
        else:
            rows[order] = 777.0
    assert all(torch.equal(a, b) for a, b in zip(tensors, untouched, strict=True))

    for number, view in enumerate(cache.views):
        layer, part = divmod(number, cache.kv)
        view[order // cache.block, order % cache.block] = kv[part, layer].to(GPU)
    found = gpu.encode(there)
    assert torch.equal(found[0].cpu(), anchor)
    assert torch.equal(found[1].cpu(), residual)


def gathered(cache: PagedCache, order: torch.Tensor) -> torch.Tensor:
    rows = [v[order // cache.block, order % cache.block] for v in cache.views]
    return torch.stack(rows).unflatten(0, (-1, cache.kv)).transpose(0, 1).cpu()


def test_slots_from_a_block_table():
    _, cache = engine("kv_first", 1, 9, 16, 1, 8, torch.bfloat16)
    table = torch.tensor([5, 2, 7], device=GPU)
    slots = cache.slots(table, 35).cpu()
    assert slots.tolist() == [*range(80, 96), *range(32, 48), *range(112, 115)]


@pytest.mark.parametrize("profile", ["linear", "adaptive"])
def test_slots_outside_the_pages_are_skipped_and_refused(profile: str):
    kv = random_kv((2, 2, 40, 2, 16), torch.bfloat16)
    gpu = Codec(CodecSpec(profile), device="cuda")
    objects = gpu.encode(kv.to(GPU))
    tensors, cache = engine("kv_first", 2, 4, 16, 2, 16, torch.bfloat16)
    slots = torch.arange(40, device=GPU)
    slots[3], slots[9] = -1, 64
    gpu.decode(*objects, out=cache.at(slots))
    assert (tensors[0][:, 0, 3] == 777).all()
    with pytest.raises(InvalidInputError, match="slot"):
        gpu.encode(cache.at(slots))


@pytest.mark.parametrize(
    ("shape", "form", "match"),
    [
        ((3, 4, 16, 2, 8), "kv_first", "does not have shape"),
        ((4, 16, 8), "fused", "does not have shape"),
        ((4, 16, 8), "other", "unknown form"),
    ],
)
def test_wrong_pages_are_refused(shape: tuple[int, ...], form: str, match: str):
    with pytest.raises(InvalidInputError, match=match):
        PagedCache.of([torch.zeros(shape, device=GPU, dtype=torch.bfloat16)], form)
    _, cache = engine("kv_first", 1, 4, 16, 2, 8, torch.bfloat16)
    with pytest.raises(InvalidInputError, match="int64"):
        cache.at(torch.zeros(3, dtype=torch.int32, device=GPU))


# -- memory, streams, errors -----------------------------------------------------------------------


def test_strided_views_are_read_and_written_in_place():
    for profile in ("linear", "adaptive"):
        cpu, gpu = pair(CodecSpec(profile))
        whole = random_kv((2, 3, 600, 2, 16), torch.bfloat16)
        objects = cpu.encode(whole[:, :, 250:506])
        there = whole.to(GPU)
        for a, b in zip(objects, gpu.encode(there[:, :, 250:506]), strict=True):
            assert torch.equal(a, b.cpu())
        target = torch.zeros_like(there)
        gpu.decode(*objects, out=target[:, :, 250:506])
        assert same_bits(target[:, :, 250:506].cpu(), cpu.decode(*objects))
        assert not target[:, :, :250].any()
        assert not target[:, :, 506:].any()
        for apart in (
            torch.zeros(2, 3, 2, 256, 16, dtype=torch.bfloat16, device=GPU).transpose(2, 3),
            torch.zeros(2, 3, 256, 16, 2, dtype=torch.bfloat16, device=GPU).transpose(3, 4),
        ):
            gpu.decode(*objects, out=apart)
            assert same_bits(apart.cpu(), cpu.decode(*objects))


def test_work_stays_on_its_stream_and_nothing_waits():
    gpu = Codec(CodecSpec("linear"), device="cuda")
    kv = random_kv((2, 4, 600, 4, 64), torch.bfloat16).to(GPU)
    anchor, residual = (x.cpu().pin_memory() for x in gpu.encode(kv))
    full = gpu.decode(anchor, residual)
    out = torch.zeros_like(kv)
    busy, stream = torch.cuda.Event(), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000_000)
        busy.record(stream)
        encoding = gpu.start_encode(kv, stream=stream)
        loaded = gpu.load(anchor, Part.ANCHOR), gpu.load(residual, Part.RESIDUAL)
        decoding = gpu.start_decode(*loaded, out=out, stream=stream)
        host = gpu.start_encode(kv, host=True, stream=stream)
        assert not busy.query(), "launching has waited"
        assert not encoding.done()
        assert not decoding.done()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert decoding.wait() is out
    assert torch.equal(out, full)
    for parts in (encoding.wait(), host.wait()):
        stream.synchronize()
        assert torch.equal(parts[0].cpu(), anchor)
        assert torch.equal(parts[1].cpu(), residual)
    assert host.wait()[0].is_pinned()


@pytest.mark.parametrize("profile", ["linear", "paper", "adaptive"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 65536.0])
def test_values_that_cannot_be_encoded_are_refused(profile: str, value: float):
    gpu = Codec(CodecSpec(profile), device="cuda")
    good = random_kv((2, 2, 300, 3, 20), torch.bfloat16)
    for at in [(0, 0, 5, 0, 0), (1, 1, 299, 2, 19), (0, 1, 256, 1, 7)]:
        kv = good.clone()
        kv[at] = value
        with pytest.raises(InvalidInputError, match="NaN, infinity"):
            gpu.encode(kv.to(GPU))
    assert torch.equal(gpu.encode(good.to(GPU))[0].cpu(), Codec(CodecSpec(profile)).encode(good)[0])


@pytest.mark.parametrize("profile", ["linear", "adaptive"])
def test_damaged_objects_are_refused_and_the_target_left_alone(profile: str):
    cpu, gpu = pair(CodecSpec(profile))
    kv = random_kv((2, 4, 600, 4, 64), torch.bfloat16)
    objects = [bytearray(x.numpy()) for x in cpu.encode(kv)]
    target = torch.ones_like(kv, device=GPU)
    for part in (0, 1):
        for at in (wire.HEADER_BYTES, len(objects[part]) // 2, len(objects[part]) - 1):
            bad = [bytearray(x) for x in objects]
            bad[part][at] ^= 4
            with pytest.raises(CorruptObjectError, match="checksum"):
                gpu.decode(*bad, out=target)
    header = bytearray(objects[0])
    header[50] ^= 1
    with pytest.raises(CorruptObjectError, match="header"):
        gpu.decode(header, out=target)
    with pytest.raises(CorruptObjectError, match="truncated"):
        gpu.decode(objects[0][:-1], out=target)
    nan = bytearray(payload(torch.frombuffer(objects[0], dtype=torch.uint8)))
    nan[0:2] = np.float16(np.nan).tobytes()
    views = [memoryview(nan), memoryview(objects[1])[wire.HEADER_BYTES :]]
    sealed = wire.seal(cpu.spec.pack(), layout_of(kv), wire.NO_KEY, views)[0] + bytes(nan)
    with pytest.raises(CorruptObjectError, match="no encoder writes"):
        gpu.decode(sealed, out=target)
    assert (target == 1).all()
    gpu.decode(*objects, out=target)
    assert same_bits(target.cpu(), cpu.decode(*objects))


def test_foreign_objects_and_targets_are_refused():
    gpu = Codec(CodecSpec("linear"), device="cuda")
    kv = random_kv((2, 1, 40, 2, 8), torch.bfloat16).to(GPU)
    anchor, residual = gpu.encode(kv)
    with pytest.raises(InvalidInputError, match="target is"):
        gpu.decode(anchor, residual, out=torch.zeros_like(kv).float())
    with pytest.raises(InvalidInputError, match="works on cuda"):
        gpu.decode(anchor, residual, out=torch.zeros_like(kv).cpu())
    with pytest.raises(InvalidInputError, match="works on cuda"):
        gpu.encode(kv.cpu())
    with pytest.raises(InvalidInputError, match="on the CPU"):
        Codec(CodecSpec("linear")).encode(kv)
    with pytest.raises(FormatMismatchError, match="expected the anchor"):
        gpu.decode(residual, anchor)
    with pytest.raises(FormatMismatchError, match="does not belong"):
        gpu.decode(anchor, gpu.encode(kv * 2)[1])
    with pytest.raises(FormatMismatchError, match="foreign"):
        gpu.decode(anchor, key=b"k" * 32)
    with pytest.raises(InvalidInputError, match="32 bytes"):
        gpu.encode(kv, key=b"short")
    assert gpu.validate(anchor, Part.ANCHOR).layout == layout_of(kv)
    assert gpu.bits_per_element(anchor.cpu(), residual.cpu()) > 8


def test_sizes_around_what_xxh3_treats_differently():
    """Payloads of many lengths, so that last digest blocks are short, medium and long."""
    spec = CodecSpec("adaptive", page_tokens=8)
    for tokens in (*range(1, 40), 700, 1400):
        assert_same(random_kv((1, 1, tokens, 1, 8), torch.float16), spec)
    for layers in (33, 65):
        kv = random_kv((2, layers, 256, 8, 128), torch.bfloat16)
        assert_same(kv, CodecSpec("adaptive"))
    assert bits_of(kv).any()
