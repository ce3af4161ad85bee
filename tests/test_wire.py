"""Objects: golden bytes, every field's damage, and no input that gets through wrong."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from lynx_backend import Codec, CodecSpec, CorruptObjectError, FormatMismatchError, wire
from lynx_backend.keys import Part
from lynx_backend.layout import KVLayout

GOLDEN = Path(__file__).parent / "golden"
FIELDS = {
    "magic": 0, "version": 8, "part": 10, "parts": 11, "dtype": 12, "kv": 13, "reserved": 14,
    "layers": 16, "tokens": 20, "heads": 24, "head_dim": 28, "payload_bytes": 32, "spec": 40,
    "key": 72, "chunk_id": 104, "payload_digest": 120, "header_digest": 128, "payload": 136,
}  # fmt: skip


def golden_kv(dtype: torch.dtype) -> torch.Tensor:
    """A cache made of integers alone, the same on every machine."""
    n = torch.arange(2 * 2 * 50 * 2 * 6, dtype=torch.int64)
    values = ((n * 2654435761 % 4093) - 2046).reshape(2, 2, 50, 2, 6) / 256
    values[:, :, 7] /= 64
    values[0, :, 7, 0, 0] = 30
    return values.to(dtype)


GOLDEN_CASES = {
    "linear-bfloat16": (CodecSpec("linear"), torch.bfloat16),
    "linear-float32-3+5": (CodecSpec("linear", 3, 5, chunk=16), torch.float32),
    "paper-float16": (CodecSpec("paper"), torch.float16),
    "adaptive-bfloat16": (CodecSpec("adaptive"), torch.bfloat16),
}


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_golden_bytes(case: str):
    """These bytes lie in other people's stores: a change needs a new format version."""
    spec, dtype = GOLDEN_CASES[case]
    objects = Codec(spec).encode(golden_kv(dtype), key=bytes(range(32)))
    for part, data in zip(Part, objects, strict=True):
        assert bytes(data.numpy()) == (GOLDEN / f"{case}.{part.label}").read_bytes()
    stored = [(GOLDEN / f"{case}.{part.label}").read_bytes() for part in Part]
    assert torch.equal(Codec(spec).decode(*stored), Codec(spec).decode(*objects))


@pytest.fixture(scope="module")
def objects() -> list[bytes]:
    kv = torch.randn(2, 2, 40, 2, 8, generator=torch.Generator().manual_seed(0))
    return [bytes(o.numpy()) for o in Codec().encode(kv.to(torch.bfloat16), key=b"k" * 32)]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("part", list(Part))
def test_a_flipped_bit_in_every_field_is_noticed(objects: list[bytes], field: str, part: Part):
    start = FIELDS[field]
    end = min([at for at in FIELDS.values() if at > start], default=start + 64)
    for bit in range(8 * (end - start)):
        bad = bytearray(objects[part])
        bad[start + bit // 8] ^= 1 << bit % 8
        # Not FormatMismatchError, for which an object is left alone.
        with pytest.raises(CorruptObjectError):
            wire.verify(bad)


def test_every_truncation_and_extension_is_noticed(objects: list[bytes]):
    for data in objects:
        for size in range(len(data)):
            with pytest.raises(CorruptObjectError):
                wire.parse(data[:size])
        with pytest.raises(CorruptObjectError, match="extended"):
            wire.parse(data + b"\0")


@pytest.mark.parametrize(
    ("offset", "value", "match"),
    [
        (8, struct.pack("<H", 1), "version 1, this build reads 2"),
        (10, b"\x02", "part 2 of 2"),
        (11, b"\x03", "part 0 of 3"),
        (12, b"\x03", "dtype code 3"),
        (13, b"\x03", "impossible layout"),
        (14, b"\x01", "part 0"),
        (20, struct.pack("<I", 0), "impossible layout"),
        (20, struct.pack("<I", 0xFFFFFFFF), "impossible layout"),
    ],
)
def test_well_sealed_headers_of_foreign_writers_are_refused(
    objects: list[bytes], offset: int, value: bytes, match: str
):
    bad = bytearray(objects[0])
    bad[offset : offset + len(value)] = value
    bad[128:136] = xxhash.xxh3_64_digest(bytes(bad[:128]))
    with pytest.raises(FormatMismatchError, match=match):
        wire.parse(bad)


@pytest.mark.parametrize("axis", [16, 20, 24, 28])
@pytest.mark.parametrize("profile", ["linear", "adaptive"])
def test_a_layout_that_its_payload_cannot_fill_allocates_nothing(profile: str, axis: int):
    """A sealed header may claim terabytes; sizes are compared before anything is made."""
    codec = Codec(CodecSpec(profile))
    for part, data in enumerate(codec.encode(torch.ones(2, 2, 40, 2, 8))):
        bad = bytearray(data.numpy())
        most = {16: 1 << 12, 20: 1 << 24, 24: 1 << 12, 28: 1 << 16}[axis]
        bad[axis : axis + 4] = struct.pack("<I", most)
        bad[128:136] = xxhash.xxh3_64_digest(bytes(bad[:128]))
        with pytest.raises(FormatMismatchError, match="layout needs"):
            codec.validate(bad, Part(part))


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(data: bytes):
    with pytest.raises((CorruptObjectError, FormatMismatchError)):
        Codec().decode(data)


@pytest.mark.parametrize(
    ("profile", "dtype"),
    [("adaptive", torch.float32), ("linear", torch.float16), ("paper", torch.float16)],
)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), reseal=st.booleans())
def test_mutated_objects_raise_or_decode_to_finite_numbers(
    profile: str, dtype: torch.dtype, data: st.DataObject, reseal: bool
):
    """Even with checksums made to fit, the outcome is an error or finite values of that shape."""
    kv = torch.randn(2, 1, 20, 1, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    if dtype == torch.float16:
        kv[..., 0] *= 65504 / kv[..., 0].abs().max()
    codec = Codec(CodecSpec(profile))
    objects = [bytearray(o.numpy()) for o in codec.encode(kv)]
    for victim in objects:
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, len(victim) - 1))
            victim[at] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):
            del victim[data.draw(st.integers(0, len(victim))) :]
    changed = objects != [bytearray(o.numpy()) for o in codec.encode(kv)]
    if reseal and all(len(o) >= wire.HEADER_BYTES for o in objects):
        for victim in objects:
            victim[120:128] = wire.payload_digest(memoryview(victim)[wire.HEADER_BYTES :])
            victim[128:136] = xxhash.xxh3_64_digest(bytes(victim[:128]))
    try:
        out = codec.decode(*objects)
    except (CorruptObjectError, FormatMismatchError):
        return
    assert reseal or not changed
    assert out.shape == kv.shape
    assert torch.isfinite(out).all()
    coarse = codec.decode(objects[0])
    assert torch.isfinite(coarse).all()
    assert torch.equal(codec.refine(coarse, *objects), out)


def test_messages_say_what_was_found_and_expected(objects: list[bytes]):
    with pytest.raises(FormatMismatchError, match=r"not a Lynx object.*PNG"):
        wire.parse(b"\x89PNG\r\n\x1a\n" + bytes(200))
    with pytest.raises(CorruptObjectError, match=r"5 bytes.*136"):
        wire.parse(b"hello")
    header = wire.verify(objects[0])
    with pytest.raises(FormatMismatchError, match=(b"j" * 32).hex()):
        wire.expect(header, Part.ANCHOR, header.spec, b"j" * 32)


def test_digest_covers_every_block():
    size = 2 * wire.DIGEST_BLOCK + 5
    whole = bytearray(size)
    digest = wire.payload_digest(whole)
    for at in (0, wire.DIGEST_BLOCK - 1, wire.DIGEST_BLOCK, size - 1):
        whole[at] ^= 1
        assert wire.payload_digest(whole) != digest
        whole[at] ^= 1
    assert wire.payload_digest(b"") == wire.payload_digest(b"")


def test_chunk_id_depends_on_all_that_was_encoded():
    layout = KVLayout(2, 1, 8, 1, 4, "float32")
    base = wire.chunk_id(b"s", layout, b"k", [b"a", b"r"])
    assert base != wire.chunk_id(b"t", layout, b"k", [b"a", b"r"])
    assert base != wire.chunk_id(b"s", layout, b"l", [b"a", b"r"])
    assert base != wire.chunk_id(b"s", layout, b"k", [b"a", b"q"])
    assert base != wire.chunk_id(b"s", KVLayout(2, 1, 8, 1, 4, "float16"), b"k", [b"a", b"r"])
