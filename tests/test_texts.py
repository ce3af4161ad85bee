"""The default text is long and real, and prompts have exactly the length asked for."""

from __future__ import annotations

import sys

import pytest

from lynx_backend.errors import InvalidInputError, UnsupportedError
from lynx_backend.texts import default_text, prompt_tokens


def by_bytes(text: str) -> dict:
    """A tokenizer that needs no model: one token a byte, after one special token."""
    return {"input_ids": [256, *text.encode()]}


def by_lines(text: str) -> dict:
    """A tokenizer whose tokens are far longer than usual."""
    return {"input_ids": list(range(text.count("\n")))}


def test_the_default_text_is_long_prose():
    text = default_text()
    assert len(text) > 200_000
    assert text.count("the ") > 3000
    assert text == default_text()


def test_a_python_without_documentation_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UnsupportedError, match="--text"):
        default_text()


@pytest.mark.parametrize("count", [1, 2, 1000, 6001])
def test_prompts_have_the_length_asked_for(count):
    text = "word\n" * 1200
    assert prompt_tokens(by_bytes, text, count) == by_bytes(text)["input_ids"][:count]


def test_long_tokens_are_found_beyond_the_first_guess():
    text = ("x" * 99 + "\n") * 50
    assert prompt_tokens(by_lines, text, 50) == list(range(50))


def test_a_text_too_short_is_refused():
    with pytest.raises(InvalidInputError, match="51"):
        prompt_tokens(by_bytes, "x" * 50, 52)
