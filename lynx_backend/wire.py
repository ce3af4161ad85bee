"""The bytes of an object: one fixed header, then the payload of one part of one chunk.

Little-endian, version 2. The header says everything needed to refuse the object: what wrote it,
what it is a part of, and checksums over itself and the payload. What the payload means is the
codec's business; its spec travels here as opaque bytes.

====== ======= =====================================================================
offset bytes   field
====== ======= =====================================================================
0      8       magic
8      2       version of this format
10     1       part (0 anchor, 1 residual)
11     1       number of parts of the chunk
12     1       dtype (index into ``DTYPES``)
13     1       kv axis (1 or 2)
14     2       reserved, zero
16     16      layers, tokens, heads, head_dim (u32 each)
32     8       payload bytes
40     32      codec spec, as the codec packs it
72     32      chunk key (zeros when the object was made without one)
104    16      chunk id: equal in all parts of one encoding, different in any other
120    8       payload digest
128    8       header digest over bytes 0 to 127
====== ======= =====================================================================

Digests are XXH3-64; the payload's is the digest of the digests of its 1 MiB blocks, so that it can
be computed in parallel. They find damage, not forgery: what must not be forged belongs on a private
network or behind an authenticated tier.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from .errors import CorruptObjectError, FormatMismatchError, InvalidInputError
from .keys import Part
from .layout import KVLayout

MAGIC = b"\x89LYNXKV\n"
VERSION = 2
PARTS = 2
DTYPES = ("bfloat16", "float16", "float32")
SPEC_BYTES = 32
KEY_BYTES = 32
CHUNK_ID_BYTES = 16
NO_KEY = bytes(KEY_BYTES)
DIGEST_BLOCK = 1 << 20

_FIELDS = struct.Struct("<8sHBBBBH4IQ32s32s16s8s")
_BEGINS = struct.Struct("<8sH")
_DIGEST = struct.Struct("<8s")
HEADER_BYTES = _FIELDS.size + _DIGEST.size

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Header:
    """A header, parsed and checked against itself and the length of its object."""

    part: Part
    layout: KVLayout
    payload_bytes: int
    spec: bytes
    key: bytes
    chunk_id: bytes
    payload_digest: bytes

    def pack(self) -> bytes:
        """The ``HEADER_BYTES`` bytes of this header."""
        at = self.layout
        fields = _FIELDS.pack(
            MAGIC, VERSION, self.part, PARTS, DTYPES.index(at.dtype), at.kv, 0,
            at.layers, at.tokens, at.heads, at.head_dim, self.payload_bytes,
            self.spec, self.key, self.chunk_id, self.payload_digest,
        )  # fmt: skip
        return fields + xxhash.xxh3_64_digest(fields)


def payload_digest(payload: Buffer) -> bytes:
    """8 bytes: XXH3-64 of the XXH3-64 digests of the payload's 1 MiB blocks."""
    view = memoryview(payload)
    blocks = xxhash.xxh3_64()
    for start in range(0, len(view), DIGEST_BLOCK):
        blocks.update(xxhash.xxh3_64_digest(view[start : start + DIGEST_BLOCK]))
    return blocks.digest()


def chunk_id(spec: bytes, layout: KVLayout, key: bytes, digests: list[bytes]) -> bytes:
    """16 bytes that tie the parts of one encoding together: a hash of all that is in them."""
    axes = struct.pack("<5I", *layout.shape) + layout.dtype.encode()
    return xxhash.xxh3_128_digest(spec + axes + key + b"".join(digests))


def seal(spec: bytes, layout: KVLayout, key: bytes, payloads: list[memoryview]) -> list[bytes]:
    """Headers for the finished payloads of one chunk, in part order."""
    return headers(spec, layout, key, [(len(p), payload_digest(p)) for p in payloads])


def headers(
    spec: bytes, layout: KVLayout, key: bytes, payloads: list[tuple[int, bytes]]
) -> list[bytes]:
    """As :func:`seal`, from the payloads' sizes and digests.

    Raises:
        InvalidInputError: the key does not have ``KEY_BYTES`` bytes.
    """
    if len(key) != KEY_BYTES:
        raise InvalidInputError(
            f"a chunk key is {KEY_BYTES} bytes (ChunkKey.digest), got {len(key)}"
        )
    ident = chunk_id(spec, layout, key, [digest for _, digest in payloads])
    return [
        Header(Part(i), layout, size, spec, key, ident, digest).pack()
        for i, (size, digest) in enumerate(payloads)
    ]


def parse(data: Buffer) -> Header:
    """Read and check the header; the payload's length is checked, its content is not.

    Raises:
        CorruptObjectError: truncated, extended or damaged header.
        FormatMismatchError: not an object, or of a version this code does not read.
    """
    return parse_header(bytes(memoryview(data)[:HEADER_BYTES]), len(data))


def parse_header(raw: bytes, size: int) -> Header:
    """As :func:`parse`, from the first ``HEADER_BYTES`` bytes of an object of ``size`` bytes."""
    if size < HEADER_BYTES:
        raise CorruptObjectError(
            f"object truncated: {size} bytes, but the header alone has {HEADER_BYTES}; delete it "
            "and let it be stored again"
        )
    (
        magic, version, part, parts, dtype, kv, reserved,
        layers, tokens, heads, head_dim, payload_bytes, spec, key, ident, digest,
    ) = _FIELDS.unpack_from(raw)  # fmt: skip
    sealed = raw[_FIELDS.size :]
    if (magic, version) != (MAGIC, VERSION):
        whole = _BEGINS.pack(MAGIC, VERSION) + raw[_BEGINS.size : _FIELDS.size]
        if xxhash.xxh3_64_digest(whole) == sealed:
            raise CorruptObjectError("the first bytes of the header are damaged; delete it")
    if magic != MAGIC:
        raise FormatMismatchError(
            f"not a Lynx object: starts with {magic!r}, expected {MAGIC!r}; something else writes "
            "under these names"
        )
    if version != VERSION:
        raise FormatMismatchError(
            f"object has format version {version}, this build reads {VERSION}; use one version of "
            "lynx-backend on all nodes or clear the store"
        )
    if xxhash.xxh3_64_digest(raw[: _FIELDS.size]) != sealed:
        raise CorruptObjectError("header checksum does not match: the object is damaged; delete it")
    # From here on the header is what its writer wrote; a value out of range is a foreign writer.
    if parts != PARTS or part >= PARTS or dtype >= len(DTYPES) or reserved:
        raise FormatMismatchError(
            f"header names part {part} of {parts} and dtype code {dtype}, expected {PARTS} parts "
            f"and a dtype code below {len(DTYPES)}"
        )
    try:
        layout = KVLayout(kv, layers, tokens, heads, head_dim, DTYPES[dtype])
    except InvalidInputError as e:
        raise FormatMismatchError(f"header holds an impossible layout: {e}") from None
    if size != HEADER_BYTES + payload_bytes:
        raise CorruptObjectError(
            f"object has {size} bytes, its header says {HEADER_BYTES + payload_bytes}: truncated "
            "or extended; delete it"
        )
    return Header(Part(part), layout, payload_bytes, spec, key, ident, digest)


def verify(data: Buffer) -> Header:
    """:func:`parse`, and check the payload against its digest.

    Raises:
        CorruptObjectError, FormatMismatchError: as :func:`parse`, or a damaged payload.
    """
    header = parse(data)
    if payload_digest(memoryview(data)[HEADER_BYTES:]) != header.payload_digest:
        raise CorruptObjectError(
            f"{header.part.label} payload checksum does not match: the object is damaged; delete it"
        )
    return header


def expect(header: Header, part: Part, spec: bytes, key: bytes | None = None) -> None:
    """Check that a header is of the wanted part, spec and (if given) key.

    Raises:
        FormatMismatchError: it is whole, but it is something else.
    """
    if header.part != part:
        raise FormatMismatchError(f"expected the {part.label}, got the {header.part.label}")
    if header.spec != spec:
        raise FormatMismatchError(
            f"object was made with codec spec {header.spec.hex()}, this reader uses {spec.hex()}; "
            "configure the same codec on all nodes"
        )
    if key is not None and header.key != key:
        raise FormatMismatchError(
            f"object belongs to chunk {header.key.hex()}, expected {key.hex()}: stored under a "
            "foreign name"
        )


def expect_same_chunk(anchor: Header, residual: Header) -> None:
    """Check that two headers come from one encoding.

    Raises:
        FormatMismatchError: they are parts of different encodings.
    """
    if anchor.chunk_id != residual.chunk_id or anchor.layout != residual.layout:
        raise FormatMismatchError(
            f"residual of chunk {residual.chunk_id.hex()} does not belong to anchor of chunk "
            f"{anchor.chunk_id.hex()}: written by two encodings of one key"
        )
