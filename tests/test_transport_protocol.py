from __future__ import annotations

import contextlib
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lynx_backend.errors import InvalidInputError, TransportError
from lynx_backend.keys import ChunkKey, ObjectName, Part
from lynx_backend.transport import protocol
from lynx_backend.transport.protocol import End, Hello, Kind, Piece, Request, Terms

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 2)
NAMES = st.builds(
    lambda digest, part: ChunkKey(digest[:16], digest[16:]).object(part),
    st.binary(min_size=32, max_size=32),
    st.sampled_from(list(Part)),
)
TEXTS = st.text(st.characters(categories=["L", "N"]), max_size=40)
HELLOS = st.builds(
    Hello,
    node=st.binary(min_size=16, max_size=16),
    nonce=st.binary(min_size=16, max_size=16),
    most_object_bytes=U64,
    most_open=U32,
    terms=st.builds(Terms, TEXTS, TEXTS, TEXTS),
)
READERS = {
    "hello": Hello.unpack,
    "request": Request.unpack,
    "proof": protocol.unpack_proof,
    "lookup": protocol.unpack_lookup,
    "sizes": protocol.unpack_sizes,
    "data": protocol.unpack_data,
    "ack": protocol.unpack_acks,
    "id": protocol.unpack_id,
    "end": protocol.unpack_end,
}


def payload(raw: bytes, kind: Kind) -> bytes:
    """What is in one frame, after its header was checked."""
    head = protocol.FRAME_HEADER_BYTES
    assert protocol.frame_header(raw[:head], len(raw) - head) == (kind, len(raw) - head)
    return raw[head:]


@given(HELLOS)
def test_hellos_come_back(hello: Hello):
    assert Hello.unpack(payload(hello.pack(), Kind.HELLO)) == hello


@given(st.builds(Request, U32, U32, st.booleans(), NAMES, U64))
def test_requests_come_back(request: Request):
    for kind in (Kind.FETCH, Kind.PUT):
        assert Request.unpack(payload(request.pack(kind), kind)) == request


@given(U32, st.lists(NAMES, max_size=20), st.lists(st.none() | U64, max_size=20))
def test_lookups_and_sizes_come_back(id_: int, names: list[ObjectName], sizes: list[int | None]):
    packed = protocol.pack_lookup(id_, names)
    assert protocol.unpack_lookup(payload(packed, Kind.LOOKUP)) == (id_, names)
    packed = protocol.pack_sizes(id_, sizes)
    assert protocol.unpack_sizes(payload(packed, Kind.SIZES)) == (id_, sizes)


@given(U64, st.lists(st.builds(Piece, U32, U64, U32), min_size=1, max_size=20))
def test_data_comes_back(sequence: int, pieces: list[Piece]):
    packed = protocol.pack_data(sequence, pieces)
    assert protocol.unpack_data(payload(packed, Kind.DATA)) == (sequence, pieces)


@given(U32, st.sampled_from(list(End)), TEXTS)
def test_ends_come_back(id_: int, end: End, why: str):
    packed = protocol.pack_end(id_, end, why)
    assert protocol.unpack_end(payload(packed, Kind.END)) == (id_, end, why)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@given(raw=st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_are_read_or_refused(reader, raw: bytes):
    with contextlib.suppress(TransportError):
        reader(raw)


def whole_frames() -> dict[str, bytes]:
    key = ChunkKey(bytes(16), bytes(16))
    name = key.object(Part.ANCHOR)
    frames = {
        "hello": Hello(bytes(16), bytes(16), 1, 1, Terms("m", "l", "c")).pack(),
        "request": Request(1, 1, False, name, 5).pack(Kind.FETCH),
        "lookup": protocol.pack_lookup(1, [name]),
        "sizes": protocol.pack_sizes(1, [5]),
        "data": protocol.pack_data(1, [Piece(1, 0, 5)]),
        "ack": protocol.pack_acks([1]),
        "id": protocol.pack_id(Kind.CANCEL, 1),
    }
    return {what: raw[protocol.FRAME_HEADER_BYTES :] for what, raw in frames.items()}


@pytest.mark.parametrize("what", whole_frames())
def test_every_truncation_and_extension_is_refused(what: str):
    raw = whole_frames()[what]
    READERS[what](raw)
    for wrong in [*(raw[:n] for n in range(len(raw))), raw + b"\0"]:
        with pytest.raises(TransportError):
            READERS[what](wrong)


def test_a_frame_beyond_the_limit_is_refused_before_it_is_read():
    raw = struct.pack("<BI", Kind.LOOKUP, 2**32 - 1)
    with pytest.raises(TransportError, match="at most 100"):
        protocol.frame_header(raw, 100)
    with pytest.raises(TransportError, match="kind 77"):
        protocol.frame_header(struct.pack("<BI", 77, 0), 100)


def test_other_programs_and_other_versions_are_named():
    raw = whole_frames()["hello"]
    with pytest.raises(TransportError, match="does not speak"):
        Hello.unpack(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(TransportError, match=r"version 9.*same version of lynx-backend"):
        Hello.unpack(raw[:8] + b"\x09\0" + raw[10:])


def test_what_does_not_agree_is_named():
    mine = Terms("llama", "kv2", "a")
    assert mine.mismatch(mine) is None
    assert mine.mismatch(Terms()) is None
    assert Terms().mismatch(mine) is None
    assert "layout is 'kv2' here and 'kv1'" in str(mine.mismatch(Terms("llama", "kv1", "a")))
    with pytest.raises(InvalidInputError, match="512"):
        Hello(bytes(16), bytes(16), 1, 1, Terms("x" * 513)).pack()


def test_a_proof_depends_on_everything_that_is_said():
    args = (b"secret", "client", (b"hello", b"hi"), b"address")
    proof = protocol.proof(*args)
    assert proof == protocol.proof(*args)
    others = [
        (b"Secret", *args[1:]),
        (args[0], "server", *args[2:]),
        (*args[:2], (b"hello", b"ho"), args[3]),
        (*args[:2], (b"hell", b"ohi"), args[3]),
        (*args[:3], b"addresS"),
    ]
    assert proof not in [protocol.proof(*other) for other in others]


def test_a_peers_text_cannot_move_the_cursor():
    assert protocol.unpack_text(b"\x1b[2Jowned\n\xff") == "?[2Jowned?\N{REPLACEMENT CHARACTER}"


def test_flipped_bits_never_raise_anything_else():
    rng = random.Random(5)
    for what, raw in whole_frames().items():
        for _ in range(300):
            flipped = bytearray(raw)
            flipped[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            with contextlib.suppress(TransportError):
                READERS[what](bytes(flipped))
