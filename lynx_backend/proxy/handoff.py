"""What is asked of the prefill side, what it answers, and what the decode side is asked then.

Requests and answers are those of vLLM's OpenAI-compatible server, as parsed JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import TransportError
from ..request_params import PROVISIONAL, STORED

Json = dict[str, Any]

#: With anything else in a request the decode side samples its first token again: what else counts
#: a request's own tokens (penalties, stop strings, seeds, grammars, logprobs) would not see it.
CONTINUABLE = {
    "ignore_eos",
    "kv_transfer_params",
    "logit_bias",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "min_p",
    "min_tokens",
    "model",
    "prompt",
    "repetition_penalty",
    "stop_token_ids",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
    "user",
}
#: What means nothing when it has this value.
_NEUTRAL: Json = {
    "n": 1, "best_of": 1, "frequency_penalty": 0, "presence_penalty": 0, "echo": False,
    "logprobs": False, "tools": [], "stop": [],
}  # fmt: skip
_LIMITS = ("max_completion_tokens", "max_tokens")
#: Tokens of a completion whose length is not given, and not of a chat's.
_DEFAULT_TOKENS = 16


@dataclass(frozen=True)
class Prefilled:
    """What came of the prompt on the prefill side.

    Attributes:
        body: the whole answer.
        prompt: its token ids; empty when there are several prompts.
        token: the first token, sampled on the exact cache.
        text: of that token; None unless it stands for whole characters.
        finished: why the answer ends with that token, if it does.
        params: for the decode side's ``kv_transfer_params``.
    """

    body: Json
    prompt: tuple[int, ...]
    token: int | None
    text: str | None
    finished: str | None
    params: Mapping[str, Any]


def prefill_request(body: Mapping[str, Any]) -> Json:
    """``body``, for one token."""
    asked = {name: value for name, value in body.items() if name != "stream_options"}
    for name in _LIMITS:
        asked.pop(name, None)
    if asked.get("min_tokens"):
        asked["min_tokens"] = 1
    return asked | {
        "max_tokens": 1,
        "stream": False,
        "return_token_ids": True,
        "kv_transfer_params": client_params(body),
    }


def prefilled(answer: Json) -> Prefilled:
    """Read the prefill side's answer.

    Raises:
        TransportError: it is not one.
    """
    try:
        choice = answer["choices"][0]
        chat = "message" in choice
        prompt = (answer if chat else choice).get("prompt_token_ids") or []
        tokens = choice.get("token_ids") or []
        text = choice["message"].get("content") if chat else choice["text"]
        one = len(answer["choices"]) == 1
    except (AttributeError, IndexError, KeyError, TypeError) as e:
        raise TransportError(f"the prefill side did not answer as vLLM does: {e!r}") from e
    whole = isinstance(text, str) and text != "" and "\ufffd" not in text
    return Prefilled(
        answer,
        tuple(prompt) if one else (),
        tokens[0] if one and len(tokens) == 1 else None,
        text if whole else None,
        choice.get("finish_reason") if choice.get("finish_reason") != "length" else None,
        answer.get("kv_transfer_params") or {},
    )


def wanted_tokens(body: Mapping[str, Any], chat: bool) -> int | None:
    """Most tokens that the client of a continuable request wants; None for as many as fit."""
    given: list[int] = [body[name] for name in _LIMITS if body.get(name) is not None]
    return given[0] if given else None if chat else _DEFAULT_TOKENS


def can_continue(body: Mapping[str, Any]) -> bool:
    """Whether decoding may go on after a first token that another engine has sampled."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt):
        return False  # several
    numbers = [body.get(name) for name in (*_LIMITS, "min_tokens")]
    if not all(each is None or isinstance(each, int) for each in numbers):
        return False  # not a request that is answered
    if any(each is not None and each < 1 for each in numbers[:2]):
        return False
    return all(
        name in CONTINUABLE or value is None or value == _NEUTRAL.get(name)
        for name, value in body.items()
    )


def is_whole(body: Mapping[str, Any], first: Prefilled, chat: bool) -> bool:
    """Whether the prefill side's answer is all that the client wants."""
    return first.finished is not None or wanted_tokens(body, chat) == 1


def decode_request(
    body: Mapping[str, Any],
    chat: bool,
    first: Prefilled | None,
    continued: bool,
    tag: str | None,
) -> Json:
    """What to ask of the decode side.

    Args:
        first: what the prefill side said; None when it did not answer.
        continued: whether the first token is given, and decoding begins at the second.
        tag: under which to publish drafts.
    """
    asked = dict(body)
    asked["return_token_ids"] = True
    params = client_params(body)
    if first is not None:
        params |= first.params
    if first is not None and first.prompt:
        params[STORED] = len(first.prompt)
    if tag is not None:
        params[PROVISIONAL] = tag
    if continued:
        assert first is not None
        assert first.token is not None
        prompt = [*first.prompt, first.token]
        if chat:
            params["prompt_token_ids"] = prompt  # vLLM's own, instead of the messages
        else:
            asked["prompt"] = prompt
        wanted = wanted_tokens(body, chat)
        if wanted is not None:
            for name in _LIMITS:
                asked.pop(name, None)
            asked["max_tokens"] = wanted - 1
        if asked.get("min_tokens"):
            asked["min_tokens"] -= 1
    return asked | {"kv_transfer_params": params}


def client_params(body: Mapping[str, Any]) -> Json:
    """The client's own ``kv_transfer_params``, without what is meant for the proxy."""
    given = body.get("kv_transfer_params") or {}
    return {name: value for name, value in given.items() if name != PROVISIONAL}


def wants_drafts(body: Mapping[str, Any]) -> bool:
    """Whether the client asked to be shown drafts, in a stream that can hold them."""
    given = body.get("kv_transfer_params") or {}
    return bool(given.get(PROVISIONAL) and body.get("stream")) and body.get("n") in (None, 1)


def delta(chat: bool, text: str, opening: bool = False) -> Json:
    """A choice of a stream's chunk that adds ``text`` to the answer."""
    common = {"index": 0, "logprobs": None, "finish_reason": None}
    if not chat:
        return common | {"text": text}
    message = {"content": text} if text else {}
    return common | {"delta": {"role": "assistant"} | message if opening else message}


def count_first_token(usage: Json) -> None:
    """Correct what the decode side counted: its prompt's last token is the answer's first."""
    usage["prompt_tokens"] -= 1
    usage["completion_tokens"] += 1
