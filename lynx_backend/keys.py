"""From what a cache was computed with to the names its objects are stored under.

A chunk of KV cache may be reused only by a reader that would have computed the same numbers. The
:class:`CacheIdentity` holds everything that decides this; its fingerprint is half of every
:class:`ChunkKey`. The other half is a hash chained over the tokens up to and including the chunk,
because attention makes a chunk depend on everything before it.

Hashes are BLAKE2b: tenants choose tokens, so a collision must not be something one can look for,
and the result does not depend on ``PYTHONHASHSEED`` or the machine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

from .errors import InvalidInputError

DIGEST_BYTES = 16
_KEY_TEXT = re.compile(r"[0-9a-f]{64}")
_NAME_TEXT = re.compile(r"([0-9a-f]{64})\.([0-9])")


class Part(IntEnum):
    """The parts of one encoded chunk, in the order in which a reader needs them."""

    ANCHOR = 0
    RESIDUAL = 1

    @property
    def label(self) -> str:
        """The part's name in metrics, logs and tables."""
        return self.name.lower()


_PARTS = {str(part.value): part for part in Part}


@dataclass(frozen=True)
class CacheIdentity:
    """Everything that must be equal for one process to use KV that another one computed.

    Attributes:
        model: name and revision of the weights, as the engine knows them.
        dtype: element type of the cache, ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        layout: the axes of one chunk without its token count (``KVLayout.signature``).
        codec: fingerprint of the codec spec (``CodecSpec.fingerprint``).
        world_size: number of tensor-parallel ranks that share the model.
        rank: which of them this cache belongs to.
        salt: tenant or adapter (LoRA) separation; empty when shared.
    """

    model: str
    dtype: str
    layout: str
    codec: str
    world_size: int = 1
    rank: int = 0
    salt: str = ""

    def fingerprint(self) -> bytes:
        """16 bytes that differ when any attribute differs."""
        h = hashlib.blake2b(b"lynx-identity-1", digest_size=DIGEST_BYTES)
        for f in fields(self):
            text = str(getattr(self, f.name)).encode()
            h.update(len(text).to_bytes(4, "little") + text)
        return h.digest()


@dataclass(frozen=True, order=True, slots=True)
class ChunkKey:
    """The key of one chunk: 16 bytes of identity and 16 bytes of token-prefix hash."""

    identity: bytes
    prefix: bytes

    def __post_init__(self) -> None:
        if len(self.identity) != DIGEST_BYTES or len(self.prefix) != DIGEST_BYTES:
            raise InvalidInputError(
                f"a ChunkKey is two digests of {DIGEST_BYTES} bytes, got {len(self.identity)} and "
                f"{len(self.prefix)}; make keys with chunk_keys() or ChunkKey.parse()"
            )

    def __hash__(self) -> int:
        # Indexes hash a million of these at start-up, and bytes remember their hash.
        return hash(self.prefix)

    def __str__(self) -> str:
        return self.identity.hex() + self.prefix.hex()

    @property
    def digest(self) -> bytes:
        """32 bytes written into every object of this chunk, so that a renamed object is noticed."""
        return self.identity + self.prefix

    @classmethod
    def parse(cls, text: str) -> ChunkKey:
        """Read a key back from ``str(key)``; raises InvalidInputError when it is not one."""
        if not _KEY_TEXT.fullmatch(text):
            raise InvalidInputError(
                f"{text!r} is not a chunk key: expected 64 lower-case hex digits, as printed by "
                "`lynx inspect`"
            )
        raw = bytes.fromhex(text)
        return cls(raw[:DIGEST_BYTES], raw[DIGEST_BYTES:])

    def object(self, part: Part) -> ObjectName:
        """The name of one of this chunk's objects."""
        return ObjectName(self, part)


@dataclass(frozen=True, order=True, slots=True)
class ObjectName:
    """One part of one chunk: what a tier stores bytes under. ``str()`` is safe as a file name."""

    key: ChunkKey
    part: Part

    def __hash__(self) -> int:
        return hash(self.key.prefix) ^ self.part

    def __str__(self) -> str:
        return f"{self.key}.{int(self.part)}"

    @classmethod
    def of(cls, text: str) -> ObjectName | None:
        """Read a name back from ``str(name)``; None when it is not one."""
        m = _NAME_TEXT.fullmatch(text)
        part = _PARTS.get(m[2]) if m else None
        if m is None or part is None:
            return None
        raw = bytes.fromhex(m[1])
        return cls(ChunkKey(raw[:DIGEST_BYTES], raw[DIGEST_BYTES:]), part)

    @classmethod
    def parse(cls, text: str) -> ObjectName:
        """As :meth:`of`, but InvalidInputError when it is not one."""
        name = cls.of(text)
        if name is None:
            raise InvalidInputError(
                f"{text!r} is not an object name: expected 64 lower-case hex digits, a dot and a "
                f"part number from 0 to {max(Part)}"
            )
        return name


def chunk_keys(
    identity: CacheIdentity, tokens: Sequence[int], chunk_tokens: int = 256
) -> list[ChunkKey]:
    """Keys of all chunks of ``tokens``, the last, shorter one included.

    Args:
        identity: what the cache was computed with.
        tokens: token ids of the prompt, each in [0, 2**32).
        chunk_tokens: tokens a chunk holds, LMCache's chunk size.
    """
    if chunk_tokens < 1:
        raise InvalidInputError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    mine = identity.fingerprint()
    keys: list[ChunkKey] = []
    prefix = b""
    for start in range(0, len(tokens), chunk_tokens):
        ids = tokens[start : start + chunk_tokens]
        try:
            raw = b"".join(int(t).to_bytes(4, "little") for t in ids)
        except OverflowError:
            raise InvalidInputError(
                "token ids must be integers in [0, 2**32); mask or drop placeholder ids first"
            ) from None
        h = hashlib.blake2b(prefix + raw, digest_size=DIGEST_BYTES, person=b"lynx-prefix-1")
        prefix = h.digest()
        keys.append(ChunkKey(mine, prefix))
    return keys
