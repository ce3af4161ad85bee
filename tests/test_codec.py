"""The CPU codec against its NumPy definition, and what both promise."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lynx_backend import (
    Codec,
    CodecSpec,
    CorruptObjectError,
    FormatMismatchError,
    InvalidInputError,
    UnsupportedError,
    wire,
)
from lynx_backend.codec import reference
from lynx_backend.codec.grid import grid_of
from lynx_backend.codec.spec import LEAST_ALPHA, PROFILES, PayloadPlan
from lynx_backend.layout import KVLayout

SPLITS = [(4, 4), (3, 5), (5, 3), (3, 3), (2, 2), (4, 2), (6, 2), (4, 0), (8, 0), (7, 1)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def random_kv(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Channels of different size and offset, a sink in front, constant and empty channels."""
    g = torch.Generator().manual_seed(seed)
    kv = torch.randn(shape, generator=g)
    kv *= torch.exp(torch.randn(shape[3:], generator=g))
    kv += 3 * torch.randn(shape[3:], generator=g)
    kv[:, :, 0] *= 1e-3
    kv[0, 0, 0, 0] = 40
    kv[0, 0, :, 0, -1] = 0
    kv[-1, -1, :, 0, 0] = 2.5
    return kv.to(dtype)


def hostile_kv(
    data: st.DataObject, shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> torch.Tensor:
    """Any finite bit pattern up to the largest fp16: denormals, signed zeros, huge spreads."""
    shape = data.draw(st.sampled_from(shapes))
    bits = 32 if dtype == torch.float32 else 16
    count = int(np.prod(shape))
    raw = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count))
    kind = np.uint32 if bits == 32 else np.uint16
    kv = torch.from_numpy(np.array(raw, kind).view(np.int32 if bits == 32 else np.int16).copy())
    kv = kv.view(dtype).reshape(shape).clone()
    kv[~(kv.float().abs() <= reference.MAX_ABS)] = 0
    return kv


def layout_of(kv: torch.Tensor) -> KVLayout:
    return KVLayout(*kv.shape, dtype=str(kv.dtype).removeprefix("torch."))


def bits_of(kv: torch.Tensor) -> np.ndarray:
    """Elements as unsigned integers [kv, layers, tokens, channels]."""
    kind = np.uint32 if kv.dtype == torch.float32 else np.uint16
    raw = kv.contiguous().view(INTEGERS[kv.dtype]).numpy().view(kind)
    return raw.reshape(*kv.shape[:3], -1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and np.array_equal(bits_of(a), bits_of(b))


def payload(data: torch.Tensor) -> bytes:
    return bytes(data.numpy()[wire.HEADER_BYTES :])


def assert_matches_reference(kv: torch.Tensor, spec: CodecSpec, threads: int = 2) -> None:
    codec, layout = Codec(spec, threads=threads), layout_of(kv)
    anchor, residual = codec.encode(kv)
    expected = reference.encode(bits_of(kv), layout, spec)
    assert payload(anchor) == expected[0].tobytes()
    assert payload(residual) == expected[1].tobytes()
    coarse, full = codec.decode(anchor), codec.decode(anchor, residual)
    assert np.array_equal(bits_of(coarse), reference.decode(expected[0], None, layout, spec))
    assert np.array_equal(bits_of(full), reference.decode(*expected, layout, spec))
    assert same_bits(codec.refine(coarse, anchor, residual), full)
    assert torch.isfinite(full).all()


@pytest.mark.parametrize("profile", ["linear", "paper"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bytes_as_the_reference(profile: str, split: tuple[int, int], dtype: torch.dtype):
    spec = CodecSpec(profile, *split)
    assert_matches_reference(random_kv((2, 2, 300, 3, 20), dtype), spec)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 15.0, 255.0])
@pytest.mark.parametrize("chunk", [8, 16, 64, 256])
def test_same_bytes_for_every_chunk_and_companding(alpha: float, chunk: int):
    for profile in ("linear", "paper"):
        spec = CodecSpec(profile, chunk=chunk, alpha=alpha)
        assert_matches_reference(random_kv((2, 1, 270, 2, 16), torch.bfloat16), spec)


@pytest.mark.parametrize("tokens", [1, 2, 7, 31, 32, 33, 255, 256, 257, 511])
def test_short_last_pages(tokens: int):
    for profile, dtype in itertools.product(("linear", "paper"), DTYPES):
        assert_matches_reference(random_kv((2, 2, tokens, 2, 8), dtype), CodecSpec(profile))


@pytest.mark.parametrize(
    "shape",
    [(1, 3, 260, 1, 576), (2, 2, 64, 1, 1), (2, 1, 70, 1, 33), (2, 1, 40, 5, 7), (2, 1, 9, 1, 80)],
    ids=["mla", "one-channel", "odd-head", "odd-heads", "one-head"],
)
def test_unusual_axes(shape: tuple[int, ...]):
    for profile, dtype in itertools.product(("linear", "paper"), DTYPES):
        assert_matches_reference(random_kv(shape, dtype), CodecSpec(profile))


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    profile=st.sampled_from(["linear", "paper"]),
    split=st.sampled_from(SPLITS),
    dtype=st.sampled_from(DTYPES),
)
def test_hostile_values_match_the_reference(
    data: st.DataObject, profile: str, split: tuple[int, int], dtype: torch.dtype
):
    shapes = [(2, 1, 40, 1, 3), (1, 2, 9, 2, 2), (2, 1, 1, 1, 4)]
    kv = hostile_kv(data, shapes, dtype)
    assert_matches_reference(kv, CodecSpec(profile, *split), threads=1)


def test_one_thread_and_many_give_the_same_bytes():
    kv = random_kv((2, 5, 300, 2, 16), torch.bfloat16)
    one, many = (Codec(threads=n).encode(kv) for n in (1, 7))
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


def test_strided_views_are_read_and_written_in_place():
    whole = random_kv((2, 3, 600, 2, 16), torch.bfloat16)
    codec = Codec()
    objects = codec.encode(whole[:, :, 256:512])
    assert all(
        torch.equal(a, b)
        for a, b in zip(objects, codec.encode(whole[:, :, 256:512].contiguous()), strict=True)
    )
    target = torch.zeros_like(whole)
    codec.decode(*objects, out=target[:, :, 256:512])
    assert same_bits(target[:, :, 256:512], codec.decode(*objects))
    assert not target[:, :, :256].any()
    assert not target[:, :, 512:].any()
    # Heads before tokens, as transformers keeps them: a token's channels are not side by side.
    apart = torch.zeros(2, 3, 2, 256, 16, dtype=torch.bfloat16).transpose(2, 3)
    codec.decode(*objects, out=apart)
    assert same_bits(apart, codec.decode(*objects))


def test_bounded_error():
    """Half a step of the full grid, and half an anchor step, of the chunk's own span."""
    kv = random_kv((2, 1, 256, 2, 16), torch.float32)
    codec = Codec(CodecSpec("linear", exact_tokens=0))
    anchor, residual = codec.encode(kv)
    page = kv.amax(2, keepdim=True) - kv.amin(2, keepdim=True)
    chunks = kv.unflatten(2, (-1, 32))
    span = (chunks.amax(3) - chunks.amin(3)).repeat_interleave(32, 2) + page * (2.1 / 255)
    assert ((codec.decode(anchor, residual) - kv).abs() <= span / 240 * 0.51 + 1e-6).all()
    assert ((codec.decode(anchor) - kv).abs() <= span / 15 * 0.54 + 1e-6).all()


def test_a_constant_channel_is_exact():
    kv = torch.full((2, 1, 100, 1, 4), -1.3671875, dtype=torch.bfloat16)
    for profile in ("linear", "paper"):
        codec = Codec(CodecSpec(profile))
        assert same_bits(codec.decode(*codec.encode(kv)), kv)
        assert same_bits(codec.decode(codec.encode(kv)[0]), kv)


def test_extremes_are_exact_already_in_the_anchor():
    """Page minimum and maximum that fp16 holds come back unchanged from the anchor alone."""
    kv = torch.rand(2, 1, 256, 1, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    kv[:, :, 3], kv[:, :, 200] = -4.0, 8.0
    kv = kv.to(torch.bfloat16)
    codec = Codec(CodecSpec("linear", exact_tokens=0))
    coarse = codec.decode(codec.encode(kv)[0])
    assert (coarse[:, :, 3] == -4).all()
    assert (coarse[:, :, 200] == 8).all()


def test_small_values_keep_their_sign_in_the_papers_anchor():
    x = torch.linspace(-1, 1, 32).reshape(1, 1, 32, 1, 1).repeat(2, 1, 1, 1, 1)
    codec = Codec(CodecSpec("paper"))
    coarse = codec.decode(codec.encode(x)[0])
    assert (torch.sign(coarse[x.abs() > 0.1]) == torch.sign(x[x.abs() > 0.1])).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_sinks_are_kept_exact(dtype: torch.dtype):
    kv = torch.randn(2, 4, 300, 2, 64, generator=torch.Generator().manual_seed(3)) + 2
    kv[:, :, 17] *= 1e-3
    kv[0, :, 17, 0, :4] = 90
    kv = kv.to(dtype)
    codec = Codec(CodecSpec("linear"))
    anchor, _ = codec.encode(kv)
    coarse = codec.decode(anchor)
    assert same_bits(coarse[:, :, 17:18], kv[:, :, 17:18])
    assert not same_bits(coarse[:, :, 18:19], kv[:, :, 18:19])
    without = Codec(CodecSpec("linear", exact_tokens=0))
    error, worse = (
        (c.decode(c.encode(kv)[0])[0, :, :, 0, :4].float() - kv[0, :, :, 0, :4].float())
        .abs()[:, torch.arange(300) != 17]
        .max()
        for c in (codec, without)
    )
    assert error * 5 < worse


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_input_is_refused(value: float, dtype: torch.dtype):
    for at in [(0, 0, 0, 0, 0), (1, 1, 299, 2, 19), (0, 1, 256, 1, 7)]:
        kv = random_kv((2, 2, 300, 3, 20), dtype)
        kv[at] = value
        for profile in ("linear", "paper"):
            with pytest.raises(InvalidInputError, match="NaN, infinity"):
                Codec(CodecSpec(profile)).encode(kv)


def test_values_that_fp16_cannot_hold_are_refused():
    kv = torch.ones(2, 1, 10, 1, 4)
    kv[0, 0, 5, 0, 0] = 65504
    Codec().encode(kv)
    kv[0, 0, 5, 0, 0] = 65505
    with pytest.raises(InvalidInputError, match="65504"):
        Codec().encode(kv)


@pytest.mark.parametrize("profile", PROFILES)
def test_values_up_to_the_largest_fp16_come_back_finite(profile: str):
    """A grid's last step ends beyond the largest fp16 when rounding has its way."""
    rising = torch.linspace(0, 65504, 32).half().reshape(1, 1, 32, 1, 1)
    codec = Codec(CodecSpec(profile))
    for kv in (rising, -rising):
        anchor, residual = codec.encode(kv)
        coarse, full = codec.decode(anchor), codec.decode(anchor, residual)
        assert torch.isfinite(coarse).all()
        assert torch.isfinite(full).all()
        if profile != "adaptive":
            parts = [np.frombuffer(payload(o), np.uint8) for o in (anchor, residual)]
            for found, extra in ((coarse, None), (full, parts[1])):
                wanted = reference.decode(parts[0], extra, layout_of(kv), codec.spec)
                assert np.array_equal(bits_of(found), wanted)
        assert same_bits(codec.refine(coarse, anchor, residual), full)


@pytest.mark.parametrize(
    ("kv", "match"),
    [
        (torch.zeros(2, 1, 0, 1, 4), "tokens must be between 1"),
        (torch.zeros(3, 1, 4, 1, 4), "kv must be between 1 and 2"),
        (torch.zeros(2, 4, 1, 4), "axes"),
        (torch.zeros(2, 1, 4, 1, 4, dtype=torch.float64), "float64"),
        (torch.zeros(2, 1, 4, 1, 4, dtype=torch.uint8), "already quantized"),
        (torch.zeros(2, 1, 4, 1, 4, device="meta"), "meta"),
        (np.zeros((2, 1, 4, 1, 4), np.float32), "torch.Tensor"),
        (torch.zeros(2, 1, 4, 1, 4).to_sparse(), "sparse_coo"),
        (torch._neg_view(torch.ones(2, 1, 4, 1, 4)), "resolve_neg"),
    ],
)
def test_wrong_caches_are_refused(kv: torch.Tensor, match: str):
    with pytest.raises(InvalidInputError, match=match):
        Codec().encode(kv)


def test_wrong_objects_and_targets_are_refused():
    kv = random_kv((2, 1, 40, 2, 8), torch.bfloat16)
    codec = Codec()
    anchor, residual = codec.encode(kv)
    with pytest.raises(InvalidInputError, match="target is"):
        codec.decode(anchor, residual, out=torch.zeros(2, 1, 41, 2, 8, dtype=torch.bfloat16))
    with pytest.raises(InvalidInputError, match="target is"):
        codec.decode(anchor, residual, out=kv.float())
    with pytest.raises(InvalidInputError, match="1-D uint8"):
        codec.decode(kv)
    with pytest.raises(InvalidInputError, match="got list"):
        codec.decode([1, 2])
    with pytest.raises(FormatMismatchError, match="expected the anchor"):
        codec.decode(residual, anchor)
    with pytest.raises(FormatMismatchError, match="expected the residual"):
        codec.decode(anchor, anchor)
    with pytest.raises(FormatMismatchError, match="codec spec"):
        Codec(CodecSpec(alpha=0.25)).decode(anchor)
    other = codec.encode(kv * 2)[1]
    with pytest.raises(FormatMismatchError, match="does not belong"):
        codec.decode(anchor, other)
    with pytest.raises(FormatMismatchError, match="foreign"):
        codec.decode(anchor, key=b"k" * 32)
    with pytest.raises(InvalidInputError, match="32 bytes"):
        codec.encode(kv, key=b"short")


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(2, 1, 1, 2, 8).expand(2, 1, 40, 2, 8),
        torch.zeros(1, 1, 40, 2, 8).expand(2, 1, 40, 2, 8),
        torch.zeros(2, 1, 40, 2, 1).expand(2, 1, 40, 2, 8),
        torch.zeros(4000).as_strided((2, 1, 40, 2, 8), (640, 640, 15, 8, 1)),
        torch.zeros(2, 1, 40, 2, 8, requires_grad=True),
        torch.zeros(2, 1, 40, 8, 2, requires_grad=True).transpose(3, 4),
        torch.zeros(2, 1, 40, 2, 8).to_sparse(),
        torch._neg_view(torch.zeros(2, 1, 40, 2, 8)),
    ],
    ids=["tokens", "kv", "dim", "rows", "leaf", "view-of-leaf", "sparse", "negated"],
)
def test_targets_that_cannot_be_written_to_are_refused(out: torch.Tensor):
    codec = Codec(CodecSpec("linear"))
    objects = codec.encode(torch.ones(2, 1, 40, 2, 8))
    with pytest.raises(InvalidInputError):
        codec.decode(*objects, out=out)
    with pytest.raises(InvalidInputError):
        codec.refine(out, *objects)
    if not out.is_sparse:
        assert not out.any()


def test_a_target_may_have_gaps_and_any_order_of_axes():
    kv = random_kv((2, 3, 40, 2, 8), torch.float32)
    codec = Codec(CodecSpec("linear"))
    objects = codec.encode(kv)
    wanted = codec.decode(*objects)
    for out in (
        torch.zeros(40, 8, 2, 4, 6).permute(3, 4, 0, 2, 1)[1:3, ::2],
        torch.zeros(2, 3, 40, 2, 9)[..., 1:],
        torch.zeros(6000).as_strided((2, 3, 40, 2, 8), (2000, 645, 16, 8, 1)),
    ):
        assert same_bits(codec.decode(*objects, out=out), wanted)


def test_arguments_of_the_wrong_type_are_refused():
    codec = Codec(CodecSpec("linear"))
    kv = torch.ones(2, 1, 40, 2, 8)
    anchor, residual = codec.encode(kv)
    for make in (
        lambda: Codec("adaptive"),
        lambda: Codec(False),
        lambda: Codec(calibration="x.npz"),
        lambda: Codec(device="foo"),
        lambda: Codec(device=None),
        lambda: Codec(threads=1.5),
        lambda: codec.encode(kv, key=None),
        lambda: codec.encode(kv, key="k" * 32),
        lambda: codec.decode(anchor, residual, key=7),
        lambda: codec.decode(anchor, residual, key=b"k"),
        lambda: codec.decode(memoryview(bytes(anchor.numpy()))[::2]),
        lambda: codec.decode(anchor.to_sparse()),
    ):
        with pytest.raises(InvalidInputError):
            make()


def test_refine_refused_leaves_the_coarse_cache_as_it_was():
    codec = Codec()
    kv = random_kv((2, 2, 300, 2, 8), torch.bfloat16)
    anchor, residual = codec.encode(kv)
    coarse = codec.decode(anchor)
    before = coarse.clone()
    residual[-1] ^= 1
    with pytest.raises(CorruptObjectError):
        codec.refine(coarse, anchor, residual)
    assert same_bits(coarse, before)


def test_whole_objects_with_impossible_content_are_refused():
    """Checksums that fit prove nothing about a writer: scales and indices are checked too."""
    kv = random_kv((2, 1, 40, 2, 8), torch.bfloat16)
    kv[:, :, 1:] += 2
    spec, layout = CodecSpec("linear"), layout_of(kv)
    codec = Codec(spec)
    anchor, residual = codec.encode(kv)
    plan = PayloadPlan.of(spec, layout)
    assert len(payload(anchor)) > plan.exact_offset, "the sink is kept exact"

    def resealed(change: slice, value: bytes) -> bytes:
        body = bytearray(payload(anchor))
        body[change] = value
        views = [memoryview(body), memoryview(payload(residual))]
        return wire.seal(spec.pack(), layout, wire.NO_KEY, views)[0] + bytes(body)

    before = torch.ones_like(kv)
    for name, bad in {
        "scales": resealed(slice(0, 2), np.float16(np.nan).tobytes()),
        "scales that no": resealed(slice(0, 2), np.float16(np.inf).tobytes()),
        "indices": resealed(slice(plan.exact_offset, plan.exact_offset + 4), b"\x28\0\0\0"),
    }.items():
        with pytest.raises((CorruptObjectError, FormatMismatchError), match=name):
            codec.decode(bad, out=before)
    assert (before == 1).all()


def test_bytes_and_memoryviews_decode_like_tensors():
    codec = Codec()
    anchor, residual = codec.encode(random_kv((2, 1, 40, 2, 8), torch.float16))
    raw = [bytes(o.numpy()) for o in (anchor, residual)]
    assert same_bits(codec.decode(*raw), codec.decode(anchor, residual))
    assert same_bits(codec.decode(*map(memoryview, raw)), codec.decode(anchor, residual))


@pytest.mark.parametrize("profile", PROFILES)
def test_bits_per_element_counts_everything(profile: str):
    codec = Codec(CodecSpec(profile))
    kv = torch.randn(2, 30, 2048, 3, 64, generator=torch.Generator().manual_seed(0))
    anchor, residual = codec.encode(kv.to(torch.bfloat16))
    assert codec.bits_per_element(anchor) == 8 * len(anchor) / kv.numel()
    assert (
        codec.bits_per_element(anchor, residual) == 8 * (len(anchor) + len(residual)) / kv.numel()
    )
    assert codec.bits_per_element(anchor) <= 4.63
    assert codec.bits_per_element(anchor, residual) <= 8.63
    with pytest.raises(InvalidInputError):
        codec.bits_per_element()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"profile": "best"}, "available: linear, paper, adaptive"),
        ({"anchor_bits": 1}, "anchor_bits"),
        ({"anchor_bits": 5, "residual_bits": 4}, "residual_bits"),
        ({"profile": "linear", "chunk": 48}, "multiple"),
        ({"chunk": 32}, "one scale a page"),
        ({"page_tokens": 100}, "multiple"),
        ({"chunk": True}, "chunk"),
        ({"alpha": -1.0}, "alpha"),
        ({"alpha": 0.91}, "alpha must be 0 .* 0.9, got 0.91"),
        ({"alpha": 1e-7}, "below 0.001 it changes nothing"),
        ({"profile": "linear", "alpha": 1e-40}, "below 0.001 it changes nothing"),
        ({"profile": "paper", "alpha": 9e-4}, "below 0.001 it changes nothing"),
        ({"profile": "paper", "alpha": float("inf")}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"alpha": "a"}, "alpha"),
        ({"exact_tokens": 65}, "exact_tokens"),
    ],
)
def test_wrong_specs_are_refused(options: dict[str, object], match: str):
    with pytest.raises(InvalidInputError, match=match):
        CodecSpec(**options)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_smallest_alpha_is_as_good_as_none(profile: str):
    kv = random_kv((2, 1, 256, 2, 16), torch.float32)
    least, none = (
        (codec.decode(*codec.encode(kv)) - kv).square().mean().item()
        for codec in (Codec(CodecSpec(profile, alpha=a)) for a in (LEAST_ALPHA, 0))
    )
    assert least == pytest.approx(none, rel=0.01)


@pytest.mark.parametrize("profile", PROFILES)
def test_equal_specs_have_equal_fingerprints(profile: str):
    a, b = CodecSpec(profile, alpha=-0.0), CodecSpec(profile, alpha=0)
    assert a == b
    assert a.fingerprint == b.fingerprint


def test_spec_travels_unchanged():
    for spec in (CodecSpec(), CodecSpec("linear"), CodecSpec("paper", 3, 5, 16, 15.0, 512, 2)):
        assert CodecSpec.unpack(spec.pack()) == spec
    raw = bytearray(CodecSpec().pack())
    raw[0] = 99
    with pytest.raises(FormatMismatchError, match="#99"):
        CodecSpec.unpack(bytes(raw))
    raw = bytearray(CodecSpec().pack())
    raw[-1] = 1
    with pytest.raises(FormatMismatchError, match="extra fields"):
        CodecSpec.unpack(bytes(raw))


def test_tables_invert_each_other():
    for profile, split, alpha in itertools.product(("linear", "paper"), SPLITS, (0.0, 1.0, 255.0)):
        grid = grid_of(CodecSpec(profile, *split, alpha=alpha))
        assert (np.diff(grid.thresholds) > 0).all()
        back = grid.codes[np.searchsorted(grid.thresholds, grid.values[grid.codes], "right")]
        signed_zero = grid.values[grid.codes] == 0
        assert np.array_equal(back[~signed_zero], grid.codes[~signed_zero])


def test_devices_and_threads_are_checked():
    with pytest.raises(UnsupportedError, match="meta"):
        Codec(device="meta")
    with pytest.raises(InvalidInputError, match="threads"):
        Codec(threads=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_error_says_what_to_do():
    with pytest.raises(UnsupportedError, match=r"use device='cpu'"):
        Codec(device="cuda")


def test_encoding_after_a_fork():
    """Threads do not survive a fork; a pool made before must not be waited for after."""
    script = """
import os, torch
from lynx_backend import Codec
codec, kv = Codec(threads=2), torch.ones(2, 4, 40, 1, 8)
first = codec.encode(kv)[0]
pid = os.fork()
if pid == 0:
    os._exit(0 if torch.equal(codec.encode(kv)[0], first) else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
