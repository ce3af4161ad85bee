"""A long real text that every Python brings along, and prompts of an exact length."""

from __future__ import annotations

from typing import Any

from .errors import InvalidInputError, UnsupportedError


def default_text() -> str:
    """The topics of the Python language reference: about 400,000 characters of technical prose.

    The wording follows the running Python's version.

    Raises:
        UnsupportedError: this Python was installed without its documentation topics.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UnsupportedError(
            "this Python lacks the module pydoc_data, the source of the default text; give a text "
            "file instead (--text FILE), or install the full standard library"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def prompt_tokens(tokenizer: Any, text: str, count: int) -> list[int]:
    """The first ``count`` token ids of ``text``, with the special tokens the tokenizer adds.

    Raises:
        InvalidInputError: the text is shorter than that.
    """
    # Tokenizers hardly ever need 16 characters a token, and never look back that far.
    head = text[: 16 * count + 256]
    ids: list[int] = tokenizer(head)["input_ids"]
    if len(ids) < count and len(head) < len(text):
        ids = tokenizer(text)["input_ids"]
    if len(ids) < count:
        raise InvalidInputError(
            f"the text has {len(ids)} tokens, but a prompt of {count} was asked for; give a longer "
            "text or ask for fewer tokens"
        )
    return ids[:count]
