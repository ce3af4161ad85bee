"""From LMCache's keys to Lynx's.

LMCache names a chunk by a hash over its tokens and all before them, and says beside it which model,
rank and tenant it belongs to. All of that, and what Lynx adds (layout, codec), goes into the
:class:`CacheIdentity`; the hash takes the place of Lynx's own hash over the tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from ...keys import DIGEST_BYTES, CacheIdentity, ChunkKey
from ...layout import KVLayout


def chunk_key(identity: CacheIdentity, chunk_hash: int | bytes) -> ChunkKey:
    """The key of the chunk that LMCache knows by ``chunk_hash``."""
    if isinstance(chunk_hash, int):
        size = chunk_hash.bit_length() // 8 + 1
        chunk_hash = b"i" + chunk_hash.to_bytes(size, "little", signed=True)
    else:
        chunk_hash = b"b" + chunk_hash
    h = hashlib.blake2b(chunk_hash, digest_size=DIGEST_BYTES, person=b"lynx-lmcache-1")
    return ChunkKey(_fingerprint(identity), h.digest())


def salt(namespace: str, *separations: Iterable[tuple[str, str]] | str) -> str:
    """One text that differs whenever the namespace, a tenant's salt or a tag does.

    Args:
        namespace: ``Settings.namespace``.
        separations: what LMCache tells tenants and adapters apart by: a salt, or (name, value) of
            tags in any order.
    """
    parts = [each if isinstance(each, str) else sorted(each) for each in separations]
    return json.dumps([namespace, *parts]) if namespace or any(parts) else ""


def layout_of(metadata: Any) -> KVLayout:
    """The layout of a full chunk of one rank, from LMCache's ``LMCacheMetadata``.

    Raises:
        InvalidInputError: a cache that Lynx does not encode, such as fp8; the message says why.
    """
    layers, kv, tokens, heads, head_dim = metadata.kv_shape
    dtype = str(metadata.kv_dtype).removeprefix("torch.")
    return KVLayout(kv, layers, tokens, heads, head_dim, dtype)


@lru_cache(maxsize=4096)
def _fingerprint(identity: CacheIdentity) -> bytes:
    return identity.fingerprint()
