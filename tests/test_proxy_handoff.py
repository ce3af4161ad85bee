"""What the proxy asks of either side. With real engines: integration_tests/test_vllm_proxy.py."""

from __future__ import annotations

from typing import Any

import pytest

from lynx_backend.errors import TransportError
from lynx_backend.proxy import handoff

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Once", "max_tokens": 9, "temperature": 0}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Once"}]}


def answer(chat: bool, text: str = " upon", **choice: Any) -> dict[str, Any]:
    """As vLLM gives it for one token."""
    ids = {"prompt_token_ids": [7, 8]}
    made = {"index": 0, "finish_reason": "length", "token_ids": [9]} | choice
    if chat:
        return {"choices": [made | {"message": {"role": "assistant", "content": text}}]} | ids
    return {"choices": [made | {"text": text} | ids]}


def test_the_prefill_side_is_asked_for_one_token_and_its_ids():
    asked = handoff.prefill_request(
        CHAT
        | {
            "max_completion_tokens": 50,
            "min_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "kv_transfer_params": {"lynx.provisional": True, "lmcache.tag.lora": "a"},
        }
    )
    assert asked == CHAT | {
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "return_token_ids": True,
        "kv_transfer_params": {"lmcache.tag.lora": "a"},
    }


@pytest.mark.parametrize("chat", [False, True])
def test_the_decode_side_goes_on_after_the_first_token(chat: bool):
    first = handoff.prefilled(answer(chat))
    assert (first.prompt, first.token, first.text, first.finished) == ((7, 8), 9, " upon", None)
    body = (CHAT if chat else COMPLETION) | {"max_tokens": 9, "min_tokens": 4}
    asked = handoff.decode_request(body, chat, first, True, "tag")
    assert (asked["max_tokens"], asked["min_tokens"]) == (8, 3)
    params = asked["kv_transfer_params"]
    assert params["lynx.stored_tokens"] == 2
    assert params["lynx.provisional"] == "tag"
    assert (params if chat else asked)["prompt_token_ids" if chat else "prompt"] == [7, 8, 9]


def test_an_unlimited_chat_stays_unlimited_and_a_completion_has_its_default():
    first = handoff.prefilled(answer(True))
    assert "max_tokens" not in handoff.decode_request(CHAT, True, first, True, None)
    unlimited = {"model": "m", "prompt": "Once"}
    first = handoff.prefilled(answer(False))
    assert handoff.decode_request(unlimited, False, first, True, None)["max_tokens"] == 15


def test_without_a_first_token_the_decode_side_gets_what_the_client_asked():
    first = handoff.prefilled(answer(False))
    asked = handoff.decode_request(COMPLETION, False, first, False, None)
    assert {name: asked[name] for name in COMPLETION} == COMPLETION
    assert asked["kv_transfer_params"] == {"lynx.stored_tokens": 2}
    asked = handoff.decode_request(COMPLETION, False, None, False, None)
    assert asked["kv_transfer_params"] == {}


@pytest.mark.parametrize(
    "given",
    [
        {"stop": ["\n"]},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"seed": 3},
        {"logprobs": 1},
        {"n": 2},
        {"bad_words": ["x"]},
        {"response_format": {"type": "json_object"}},
        {"tools": [{}]},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"something": "new"},
        {"max_tokens": "9"},
        {"max_tokens": 0},
    ],
    ids=str,
)
def test_what_counts_a_requests_own_tokens_is_not_continued(given: dict[str, Any]):
    assert not handoff.can_continue(COMPLETION | given)


@pytest.mark.parametrize(
    "given", [{}, {"n": 1}, {"stop": None}, {"presence_penalty": 0.0}, {"prompt": [1, 2]}], ids=str
)
def test_the_rest_is(given: dict[str, Any]):
    assert handoff.can_continue(COMPLETION | given)
    assert handoff.can_continue(CHAT)


def test_an_answer_that_ends_with_its_first_token_needs_no_decoding():
    first = handoff.prefilled(answer(False))
    assert handoff.is_whole(COMPLETION | {"max_tokens": 1}, first, False)
    assert not handoff.is_whole(COMPLETION, first, False)
    ended = handoff.prefilled(answer(True, "", finish_reason="stop"))
    assert handoff.is_whole(CHAT, ended, True)


@pytest.mark.parametrize("text", ["", "\ufffd"])
def test_half_a_character_is_no_first_token_to_show(text: str):
    assert handoff.prefilled(answer(False, text)).text is None


@pytest.mark.parametrize("wrong", [{}, {"choices": []}, {"choices": [None]}, {"choices": [{}]}])
def test_what_is_no_answer_is_said(wrong: dict[str, Any]):
    with pytest.raises(TransportError, match="did not answer as vLLM does"):
        handoff.prefilled(wrong)
