"""Keys: whatever would change a number in the cache changes the key, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import pytest

from lynx_backend import InvalidInputError
from lynx_backend.keys import CacheIdentity, ChunkKey, ObjectName, Part, chunk_keys

IDENTITY = CacheIdentity("smollm2", "bfloat16", "kv2-layers30-heads3-dim64", "00ff")


def test_every_attribute_separates():
    for f in fields(IDENTITY):
        value = getattr(IDENTITY, f.name)
        other = replace(IDENTITY, **{f.name: value + 1 if isinstance(value, int) else value + "x"})
        assert other.fingerprint() != IDENTITY.fingerprint(), f.name


def test_attributes_do_not_run_into_each_other():
    a = replace(IDENTITY, model="ab", dtype="c").fingerprint()
    assert a != replace(IDENTITY, model="a", dtype="bc").fingerprint()


def test_a_chunk_depends_on_all_before_it_and_on_nothing_after():
    tokens = list(range(700))
    keys = chunk_keys(IDENTITY, tokens)
    assert len(keys) == 3
    assert len(set(keys)) == 3
    assert chunk_keys(IDENTITY, tokens[:600])[:2] == keys[:2]
    assert chunk_keys(IDENTITY, tokens[:600])[2] != keys[2]
    changed = chunk_keys(IDENTITY, [1, *tokens[1:]])
    assert not set(changed) & set(keys)


def test_keys_do_not_depend_on_the_process():
    script = (
        "from lynx_backend.keys import *;"
        "print(chunk_keys(CacheIdentity('m', 'float16', 'l', 'c'), [1, 2, 3])[0])"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert keys == {f"{chunk_keys(CacheIdentity('m', 'float16', 'l', 'c'), [1, 2, 3])[0]}\n"}


def test_text_round_trip():
    key = chunk_keys(IDENTITY, [1])[0]
    assert ChunkKey.parse(str(key)) == key
    for part in Part:
        assert ObjectName.parse(str(key.object(part))) == key.object(part)


@pytest.mark.parametrize("text", ["", "abc", "g" * 64, "A" * 64, "0" * 65, "../" + "0" * 61])
def test_wrong_texts_are_refused(text: str):
    with pytest.raises(InvalidInputError, match="64"):
        ChunkKey.parse(text)
    for name in (f"{text}.0", f"{'0' * 64}.7", "0" * 64, f"{'0' * 64}.0\n"):
        with pytest.raises(InvalidInputError):
            ObjectName.parse(name)


def test_wrong_tokens_are_refused():
    for token in (-1, 2**32):
        with pytest.raises(InvalidInputError, match="2\\*\\*32"):
            chunk_keys(IDENTITY, [token])
    with pytest.raises(InvalidInputError, match="chunk_tokens"):
        chunk_keys(IDENTITY, [1], chunk_tokens=0)
    with pytest.raises(InvalidInputError, match="16 bytes"):
        ChunkKey(b"short", b"short")
