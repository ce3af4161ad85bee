"""The adaptive profile: CPU against its NumPy definition, and what the definition promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codec import DTYPES, SPLITS, bits_of, hostile_kv, layout_of, payload, random_kv, same_bits

from lynx_backend import Codec, CodecSpec, CorruptObjectError, FormatMismatchError, wire
from lynx_backend.codec import Calibration, adaptive_cpu_encode
from lynx_backend.codec import adaptive_reference as reference
from lynx_backend.errors import InvalidInputError
from lynx_backend.layout import KVLayout


def calibration_for(layout: KVLayout, pairs: int, seed: int = 0) -> Calibration:
    """Two rotary tables used in turn, and queries of very different sizes."""
    steps = np.arange(pairs) / max(1, pairs)
    power = np.exp(3 * np.random.default_rng(seed).standard_normal(
        (layout.layers, layout.heads, layout.head_dim)
    ))  # fmt: skip
    layers = [i % 2 for i in range(layout.layers)]
    return Calibration.of([1e4**-steps, 1e6**-steps], layers, power)


def assert_matches_reference(
    kv: torch.Tensor, spec: CodecSpec, calibration: Calibration | None, threads: int = 2
) -> None:
    codec, layout = Codec(spec, threads=threads, calibration=calibration), layout_of(kv)
    tables = calibration or Calibration.none(layout)
    anchor, residual = codec.encode(kv)
    expected = reference.encode(bits_of(kv), layout, codec.spec, tables)
    assert payload(anchor) == expected[0].tobytes()
    assert payload(residual) == expected[1].tobytes()
    coarse, full = codec.decode(anchor), codec.decode(anchor, residual)
    parts = (expected[0], None), expected
    for found, given_ in zip((coarse, full), parts, strict=True):
        wanted = reference.decode(*given_, layout, codec.spec, tables)
        assert np.array_equal(bits_of(found), wanted)
        assert torch.isfinite(found).all()
    assert same_bits(codec.refine(coarse, anchor, residual), full)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 300, 3, 20), (2, 1, 256, 2, 64), (2, 2, 1, 1, 1), (2, 1, 7, 5, 7), (2, 1, 33, 1, 80),
        (1, 3, 260, 1, 96), (2, 1, 2, 2, 6), (2, 1, 255, 1, 33), (2, 1, 513, 2, 8),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("rotated", [0, 1, 2])
def test_same_bytes_as_the_reference(shape: tuple[int, ...], dtype: torch.dtype, rotated: int):
    """rotated: no calibration, full rotation, half of the channels."""
    kv = random_kv(shape, dtype)
    calibration = calibration_for(layout_of(kv), shape[4] // 2 // rotated) if rotated else None
    assert_matches_reference(kv, CodecSpec("adaptive"), calibration)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("alpha", [0.0, 0.35, 0.9])
def test_same_bytes_for_every_split(split: tuple[int, int], alpha: float):
    for page_tokens in (64, 256):
        spec = CodecSpec("adaptive", *split, alpha=alpha, page_tokens=page_tokens)
        kv = random_kv((2, 2, 90, 2, 16), torch.bfloat16)
        assert_matches_reference(kv, spec, calibration_for(layout_of(kv), 8))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), rotated=st.booleans())
def test_hostile_values_match_the_reference(data: st.DataObject, dtype: torch.dtype, rotated: bool):
    kv = hostile_kv(data, [(2, 1, 40, 1, 4), (1, 2, 9, 2, 2), (2, 1, 1, 1, 4)], dtype)
    calibration = calibration_for(layout_of(kv), kv.shape[4] // 2) if rotated else None
    assert_matches_reference(kv, CodecSpec("adaptive"), calibration, threads=1)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), d=st.sampled_from([1, 2, 5, 64]))
def test_widths_add_up_and_match_the_reference(data: st.DataObject, d: int):
    """Bisection against sorting, with many equal levels."""
    bits = st.integers(0x0400, 0x0408) | st.integers(0x0400, 0x7BFF)
    ranges = np.array(data.draw(st.lists(bits, min_size=d, max_size=d)), np.uint16)
    priority = np.array(
        data.draw(st.lists(st.sampled_from([-127, -8, 0, 0, 8, 127]), min_size=d, max_size=d)),
        np.int8,
    )
    total = data.draw(st.integers(d, 8 * d))
    width = np.empty(d, np.int64)
    adaptive_cpu_encode._set_widths(ranges, priority, total, np.empty(d, np.int64), width)
    floats = ranges.view(np.float16).astype(np.float32)[None]
    assert np.array_equal(width, reference.widths_of(floats, priority[None].astype(int), total)[0])
    assert width.sum() == total
    assert 1 <= width.min() <= width.max() <= 8


def test_bits_are_in_the_budget():
    """Side information, padding and headers counted: no more than linear's 4.63 and 8.63."""
    for heads, d, layers in ((3, 64, 30), (1, 256, 18), (8, 128, 4)):
        kv = torch.randn(2, layers, 256, heads, d, generator=torch.Generator().manual_seed(0))
        codec = Codec(CodecSpec("adaptive"))
        anchor, residual = codec.encode(kv.to(torch.bfloat16))
        assert codec.bits_per_element(anchor) <= 4.63
        assert codec.bits_per_element(anchor, residual) <= 8.63


def test_error_on_gaussian_data():
    kv = torch.randn(2, 2, 512, 2, 64, generator=torch.Generator().manual_seed(0))
    codec = Codec(CodecSpec("adaptive"))
    anchor, residual = codec.encode(kv)
    for most, parts in ((8e-3, (anchor,)), (3.2e-5, (anchor, residual))):
        error = (codec.decode(*parts) - kv).square().sum() / kv.square().sum()
        assert error < most


def test_bits_go_where_the_queries_look():
    g = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 1, 256, 1, 64, generator=g)
    power = np.ones((1, 1, 64))
    power[..., 5] = 64.0**2
    calibration = Calibration.of([np.zeros(0)], [0], power)
    errors = []
    for tables in (None, calibration):
        codec = Codec(CodecSpec("adaptive"), calibration=tables)
        coarse = codec.decode(codec.encode(kv)[0])
        errors.append((coarse - kv)[0, 0, :, 0, 5].square().mean().item())
    assert errors[1] * 16 < errors[0]


def test_the_sink_of_each_head_is_nearly_exact():
    g = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 2, 300, 2, 64, generator=g)
    kv[1, :, 3] *= 1e-2
    kv[0, :, 3, :, :2] = 300
    codec = Codec(CodecSpec("adaptive"))
    anchor, residual = codec.encode(kv)
    for steps, parts in ((256, (anchor,)), (4096, (anchor, residual))):
        off = (codec.decode(*parts) - kv)[0, :, 3].abs().max()
        assert off <= 300 / steps + 2
    rest = torch.arange(300) != 3
    plain = Codec(CodecSpec("linear", exact_tokens=0))
    ours, theirs = (
        (c.decode(c.encode(kv)[0]) - kv)[0, :, rest].square().mean() for c in (codec, plain)
    )
    assert ours * 4 < theirs, "the others' scales do not see it"


def test_degenerate_pages_are_no_worse_than_plain_int4():
    """Constant channels, a huge token, all tokens equal: within a factor of 4 of INT4 by token."""
    g = torch.Generator().manual_seed(0)
    base = torch.randn(2, 1, 256, 1, 64, generator=g)
    huge = base.clone()
    huge[:, :, 100] *= 1000
    constant = base.clone()
    constant[..., ::2] = 7.5
    equal = base[:, :, :1].expand_as(base).clone()
    tiny = base * 1e-6
    codec = Codec(CodecSpec("adaptive"))
    for name, kv in {"huge": huge, "constant": constant, "equal": equal, "tiny": tiny}.items():
        coarse = codec.decode(codec.encode(kv)[0])
        scale = kv.abs().amax(-1, keepdim=True) / 7
        int4 = (kv / scale).round() * scale
        ours, theirs = ((x - kv).square().sum().item() for x in (coarse, int4))
        assert ours <= 4 * theirs + 1e-10 * kv.square().sum().item(), name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 65505.0])
def test_values_that_cannot_be_encoded_are_refused(value: float):
    for at in [(0, 0, 0, 0, 0), (1, 1, 299, 2, 19), (0, 1, 256, 1, 7)]:
        kv = random_kv((2, 2, 300, 3, 20), torch.float32)
        kv[at] = value
        with pytest.raises(InvalidInputError, match="NaN, infinity"):
            Codec(CodecSpec("adaptive")).encode(kv)


def test_another_calibration_is_another_format():
    kv = random_kv((2, 2, 40, 2, 8), torch.bfloat16)
    layout = layout_of(kv)
    mine = Codec(CodecSpec("adaptive"), calibration=calibration_for(layout, 4))
    anchor, residual = mine.encode(kv)
    for other in (None, calibration_for(layout, 4, seed=1), calibration_for(layout, 3)):
        with pytest.raises(FormatMismatchError, match="codec spec"):
            Codec(CodecSpec("adaptive"), calibration=other).decode(anchor, residual)
    again = Codec(mine.spec, calibration=calibration_for(layout, 4))
    assert same_bits(again.decode(anchor, residual), mine.decode(anchor, residual))
    with pytest.raises(InvalidInputError, match="names calibration"):
        Codec(mine.spec)
    with pytest.raises(InvalidInputError, match="takes no calibration"):
        Codec(CodecSpec("linear"), calibration=calibration_for(layout, 4))
    foreign = random_kv((2, 2, 40, 3, 8), torch.bfloat16)
    with pytest.raises(InvalidInputError, match="lynx calibrate"):
        mine.encode(foreign)
    bare = Codec(CodecSpec("adaptive")).encode(foreign)[0].numpy()
    layout, body = layout_of(foreign), memoryview(bytes(bare[wire.HEADER_BYTES :]))
    sealed = wire.seal(mine.spec.pack(), layout, wire.NO_KEY, [body, memoryview(b"")])[0]
    with pytest.raises(FormatMismatchError, match="lynx calibrate"):
        mine.decode(sealed + bytes(body))


def test_whole_objects_with_impossible_content_are_refused():
    kv = random_kv((2, 1, 40, 2, 8), torch.bfloat16)
    codec, layout = Codec(CodecSpec("adaptive")), layout_of(kv)
    anchor, residual = codec.encode(kv)
    nan = np.float16(np.nan).tobytes()
    target = torch.ones_like(kv)
    # low, range, widths that do not add up, a row beyond the page, a row's range of NaN
    for at, value in [(0, nan), (32, nan), (64, b"\x77"), (72, b"\x28"), (80, b"\xff\x7f")]:
        body = bytearray(payload(anchor))
        body[at : at + len(value)] = value
        views = [memoryview(body), memoryview(payload(residual))]
        bad = wire.seal(codec.spec.pack(), layout, wire.NO_KEY, views)[0] + bytes(body)
        with pytest.raises(CorruptObjectError, match="no encoder writes"):
            codec.decode(bad, out=target)
    assert (target == 1).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"chunk": 32}, "one scale a page"),
        ({"exact_tokens": 1}, "one exact token"),
        ({"page_tokens": 512}, "page_tokens"),
        ({"alpha": 0.95}, "alpha"),
        ({"calibration": "xyz"}, "16 lower-case hex"),
    ],
)
def test_wrong_specs_are_refused(options: dict[str, object], match: str):
    with pytest.raises(InvalidInputError, match=match):
        CodecSpec("adaptive", **options)
