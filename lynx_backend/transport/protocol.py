"""What two nodes say to each other: fixed binary structs, and every length checked.

A connection is a TCP stream of frames (this module) and a UCX channel that carries objects. Only
frames say what a UCX message holds and where it belongs, and a receiver believes none that it did
not ask for. The first frames state who speaks, prove the shared secret, and carry the UCX address;
until then nothing but a few hundred bytes is accepted.

All integers are little-endian. A frame is ``kind: u8, length: u32`` and ``length`` bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from ..errors import InvalidInputError, TransportError
from ..keys import DIGEST_BYTES, ChunkKey, ObjectName, Part

VERSION = 2
MAGIC = b"LYNXUCX\0"
NODE_BYTES = 16
NONCE_BYTES = 16
PROOF_BYTES = 32
#: Most bytes of one frame's payload, and of one before the peer has proved itself.
MOST_FRAME_BYTES = 1 << 20
MOST_GREETING_BYTES = 8192
#: Most names of one lookup, and pieces of one message.
MOST_NAMES = 8192
MOST_PIECES = 4096
_MOST_TEXT = 512

_FRAME = struct.Struct("<BI")
_HELLO = struct.Struct(f"<8sH{NODE_BYTES}s{NONCE_BYTES}sQIHHH")
_COUNT = struct.Struct("<IH")
_NAME = struct.Struct(f"<{2 * DIGEST_BYTES}sB")
_SIZE = struct.Struct("<Q")
_REQUEST = struct.Struct(f"<IIBQ{2 * DIGEST_BYTES}sB")
_DATA = struct.Struct("<QH")
_PIECE = struct.Struct("<IQI")
_SEQUENCE = struct.Struct("<Q")
_ID = struct.Struct("<I")
_END = struct.Struct("<IB")
_ABSENT = 2**64 - 1
FRAME_HEADER_BYTES = _FRAME.size


class Kind(IntEnum):
    """Kinds of frames."""

    HELLO = 1
    PROOF = 2
    REFUSED = 3
    LOOKUP = 4
    SIZES = 5
    FETCH = 6
    PUT = 7
    READY = 8
    DATA = 9
    ACK = 10
    CANCEL = 11
    END = 12
    PING = 13
    PONG = 14


class End(IntEnum):
    """How a lookup, fetch or put ended, where no data says so."""

    STORED = 0
    ABSENT = 1
    FAILED = 2
    CANCELLED = 3
    REFUSED = 4


_KINDS = {int(kind): kind for kind in Kind}
_PARTS = {int(part): part for part in Part}


@dataclass(frozen=True)
class Terms:
    """What both ends of a connection must agree on; an empty text agrees with anything.

    Attributes:
        model: name and revision of the weights whose caches are exchanged.
        layout: the axes of a chunk, ``KVLayout.signature``.
        codec: fingerprint of the codec spec.
    """

    model: str = ""
    layout: str = ""
    codec: str = ""

    def mismatch(self, other: Terms) -> str | None:
        """What differs, in words, or None."""
        for field in ("model", "layout", "codec"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine and theirs and mine != theirs:
                return f"{field} is {mine!r} here and {theirs!r} at the peer"
        return None


@dataclass(frozen=True)
class Hello:
    """The first frame of either side.

    Attributes:
        node: identity of the process; a peer that comes back with another one is a new peer.
        nonce: random bytes for the proofs of this connection.
        most_object_bytes: largest object that this side takes.
        most_open: most unfinished fetches and puts it allows the other side.
        terms: what has to agree.
    """

    node: bytes
    nonce: bytes
    most_object_bytes: int
    most_open: int
    terms: Terms

    def pack(self) -> bytes:
        """The frame."""
        texts = [getattr(self.terms, f).encode() for f in ("model", "layout", "codec")]
        if max(map(len, texts)) > _MOST_TEXT:
            raise InvalidInputError(
                f"model, layout and codec of a peer have at most {_MOST_TEXT} bytes each, got "
                f"{[len(t) for t in texts]}; use a shorter name"
            )
        fixed = (self.node, self.nonce, self.most_object_bytes, self.most_open)
        head = _HELLO.pack(MAGIC, VERSION, *fixed, *map(len, texts))
        return frame(Kind.HELLO, head + b"".join(texts))

    @classmethod
    def unpack(cls, payload: bytes) -> Hello:
        """Read it back; raises TransportError that names what does not fit."""
        # Magic and version come first in every version.
        if len(payload) < 10 or payload[:8] != MAGIC:
            raise TransportError("the peer does not speak Lynx's protocol; check host and port")
        version = int.from_bytes(payload[8:10], "little")
        if version != VERSION:
            raise TransportError(
                f"the peer speaks protocol version {version}, this node {VERSION}; install the "
                "same version of lynx-backend on both"
            )
        fixed, rest = _split(_HELLO, payload, "HELLO")
        node, nonce, most_bytes, most_open, *sizes = fixed[2:]
        if max(sizes) > _MOST_TEXT or sum(sizes) != len(rest):
            raise _malformed("HELLO")
        texts, at = [], 0
        for size in sizes:
            texts.append(rest[at : at + size].decode(errors="replace"))
            at += size
        return cls(node, nonce, most_bytes, most_open, Terms(*texts))


class Request(NamedTuple):
    """Asks for an object (FETCH) or offers one (PUT).

    Attributes:
        id: the asking side's number for it.
        request: its number for the request that waits; the unit of fairness.
        alone: the object must not share a message with others.
        size: bytes that the asking side has or has room for.
    """

    id: int
    request: int
    alone: bool
    name: ObjectName
    size: int

    def pack(self, kind: Kind) -> bytes:
        """The frame."""
        n = self.name
        fixed = (self.id, self.request, int(self.alone), self.size, n.key.digest, int(n.part))
        return frame(kind, _REQUEST.pack(*fixed))

    @classmethod
    def unpack(cls, payload: bytes) -> Request:
        """Read it back."""
        (id_, request, alone, size, digest, part), rest = _split(_REQUEST, payload, "request")
        if rest or alone > 1:
            raise _malformed("request")
        return cls(id_, request, bool(alone), _name(digest, part), size)


class Piece(NamedTuple):
    """Bytes ``[offset, offset + length)`` of the object of one fetch or put."""

    id: int
    offset: int
    length: int


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """One frame."""
    return _FRAME.pack(kind, len(payload)) + payload


def frame_header(raw: bytes | bytearray, most: int) -> tuple[Kind, int]:
    """Kind and payload length (at most ``most``) of the frame with which ``raw`` begins."""
    kind, length = _FRAME.unpack_from(raw)
    if kind not in _KINDS or length > most:
        raise TransportError(
            f"the peer sent a frame of kind {kind} and {length} bytes (at most {most} are taken "
            "now); it does not speak Lynx's protocol"
        )
    return _KINDS[kind], length


# -- who speaks ------------------------------------------------------------------------------------


def proof(secret: bytes, side: str, hellos: tuple[bytes, bytes], address: bytes) -> bytes:
    """HMAC over a connection's two hello frames, a side's UCX address, and which side it is.

    Args:
        side: ``"client"`` or ``"server"``, so that nobody's own proof can be sent back to it.
        hellos: the client's and the server's, as sent.
    """
    h = hmac.new(secret, f"lynx-ucx-{VERSION}-{side}".encode(), hashlib.sha256)
    for part in (*hellos, address):
        h.update(len(part).to_bytes(4, "little") + part)
    return h.digest()


def pack_proof(mac: bytes, address: bytes) -> bytes:
    """The PROOF frame."""
    return frame(Kind.PROOF, mac + address)


def unpack_proof(payload: bytes) -> tuple[bytes, bytes]:
    """(HMAC, UCX address) of a PROOF frame."""
    if len(payload) <= PROOF_BYTES:
        raise _malformed("PROOF")
    return payload[:PROOF_BYTES], payload[PROOF_BYTES:]


def pack_text(kind: Kind, text: str) -> bytes:
    """A frame that is a text, REFUSED."""
    return frame(kind, text.encode()[:_MOST_TEXT])


def unpack_text(payload: bytes) -> str:
    """The text, harmless to print."""
    text = payload[:_MOST_TEXT].decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)


# -- objects ---------------------------------------------------------------------------------------


def pack_lookup(id_: int, names: Sequence[ObjectName]) -> bytes:
    """The LOOKUP frame of at most ``MOST_NAMES`` names."""
    body = b"".join(_NAME.pack(n.key.digest, n.part) for n in names)
    return frame(Kind.LOOKUP, _COUNT.pack(id_, len(names)) + body)


def unpack_lookup(payload: bytes) -> tuple[int, list[ObjectName]]:
    """(id, names)."""
    (id_, count), rest = _split(_COUNT, payload, "LOOKUP")
    if count > MOST_NAMES or len(rest) != count * _NAME.size:
        raise _malformed("LOOKUP")
    return id_, [_name(*fields) for fields in _NAME.iter_unpack(rest)]


def pack_sizes(id_: int, sizes: Sequence[int | None]) -> bytes:
    """The SIZES frame."""
    body = b"".join(_SIZE.pack(_ABSENT if size is None else size) for size in sizes)
    return frame(Kind.SIZES, _COUNT.pack(id_, len(sizes)) + body)


def unpack_sizes(payload: bytes) -> tuple[int, list[int | None]]:
    """(id, sizes)."""
    (id_, count), rest = _split(_COUNT, payload, "SIZES")
    if len(rest) != count * _SIZE.size:
        raise _malformed("SIZES")
    return id_, [None if s == _ABSENT else s for (s,) in _SIZE.iter_unpack(rest)]


def pack_data(sequence: int, pieces: Sequence[Piece]) -> bytes:
    """The DATA frame: what the UCX message tagged ``sequence`` holds, in order."""
    body = b"".join([_PIECE.pack(*piece) for piece in pieces])
    return frame(Kind.DATA, _DATA.pack(sequence, len(pieces)) + body)


def unpack_data(payload: bytes) -> tuple[int, list[Piece]]:
    """(sequence, pieces); at least one piece."""
    (sequence, count), rest = _split(_DATA, payload, "DATA")
    if not 0 < count <= MOST_PIECES or len(rest) != count * _PIECE.size:
        raise _malformed("DATA")
    return sequence, list(map(Piece._make, _PIECE.iter_unpack(rest)))


def pack_acks(sequences: Sequence[int]) -> bytes:
    """The ACK frame: the UCX messages with these tags, at least one, have been received."""
    return frame(Kind.ACK, b"".join(map(_SEQUENCE.pack, sequences)))


def unpack_acks(payload: bytes) -> list[int]:
    """The sequence numbers."""
    if not payload or len(payload) % _SEQUENCE.size:
        raise _malformed("ACK")
    return [sequence for (sequence,) in _SEQUENCE.iter_unpack(payload)]


def pack_id(kind: Kind, id_: int) -> bytes:
    """A frame that only names a fetch or put: CANCEL, READY."""
    return frame(kind, _ID.pack(id_))


def unpack_id(payload: bytes) -> int:
    """The id."""
    (id_,), rest = _split(_ID, payload, "id")
    if rest:
        raise _malformed("id")
    return int(id_)


def pack_end(id_: int, end: End, text: str = "") -> bytes:
    """The END frame."""
    return frame(Kind.END, _END.pack(id_, end) + text.encode()[:_MOST_TEXT])


def unpack_end(payload: bytes) -> tuple[int, End, str]:
    """(id, how, why)."""
    (id_, end), rest = _split(_END, payload, "END")
    if end not in list(End):
        raise _malformed("END")
    return id_, End(end), unpack_text(rest)


def _name(digest: bytes, part: int) -> ObjectName:
    if part not in _PARTS:
        raise _malformed("object name")
    return ChunkKey(digest[:DIGEST_BYTES], digest[DIGEST_BYTES:]).object(_PARTS[part])


def _split(head: struct.Struct, payload: bytes, what: str) -> tuple[tuple[Any, ...], bytes]:
    if len(payload) < head.size:
        raise _malformed(what)
    return head.unpack_from(payload), payload[head.size :]


def _malformed(what: str) -> TransportError:
    return TransportError(f"the peer sent a malformed {what}; it does not speak Lynx's protocol")
