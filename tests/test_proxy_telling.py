"""What a client is told of drafts. With real engines: integration_tests/test_vllm_proxy.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from lynx_backend.proxy.telling import Clock, Provisional
from lynx_backend.side_channel import News, Said

#: Tokens are characters' UTF-8 bytes.
BEFORE = list(b"so ")


async def text(tokens: Sequence[int]) -> str | None:
    return bytes(tokens).decode(errors="replace")


def drafted(what: str | bytes) -> News:
    tokens = what.encode() if isinstance(what, str) else what
    return News("r", Said.DRAFTED, tuple(tokens), heard=time.monotonic())


def told(*said: list[News], wanted: bool = True) -> list[dict[str, Any]]:
    async def scene() -> list[dict[str, Any]]:
        provisional = Provisional(Clock("decode"), text, BEFORE, wanted)
        return [each["lynx"] for news in said for each in await provisional.of(news)]

    return asyncio.run(scene())


def test_drafts_and_what_became_of_them():
    assert told(
        [drafted("on")], [drafted("e "), drafted("t")], [News("r", Said.VERIFIED, (), 4)]
    ) == [
        {"provisional": "on", "tokens": 2},
        {"provisional": "e t", "tokens": 5},
        {"confirmed": 4, "retracted": 1},
    ]
    assert told([drafted("on"), News("r", Said.DROPPED)], [drafted("a")]) == [
        {"provisional": "on", "tokens": 2},
        {"confirmed": 0, "retracted": 2},
        {"provisional": "a", "tokens": 1},
    ]


def test_characters_are_shown_whole():
    half, rest = "é".encode()[:1], "é".encode()[1:]
    assert told([drafted("a")], [drafted(half)], [drafted(rest)]) == [
        {"provisional": "a", "tokens": 1},
        {"provisional": "é", "tokens": 3},
    ]


def test_who_does_not_ask_is_not_shown_any():
    assert told([drafted("on")], [News("r", Said.VERIFIED, (), 2)], wanted=False) == []
    assert told([News("r", Said.VERIFIED, (), 0)]) == []


def test_drafts_that_come_after_verified_text_are_old():
    async def scene() -> list[dict[str, Any]]:
        provisional = Provisional(Clock("decode"), text, BEFORE, True)
        provisional.verified = True
        return await provisional.of([drafted("on")])

    assert asyncio.run(scene()) == []


def test_times_are_kept_for_each_doubling_and_the_last():
    clock = Clock("prefill")
    for tokens in (1, 1, 1, 0, 30, 1):
        clock.count(tokens)
    clock.hear(drafted("a"))
    first = clock.first_draft
    clock.hear(drafted("b"))
    found = clock.told()
    assert [tokens for tokens, _ in found["verified"]] == [1, 2, 33, 34]
    assert found["first_verified"] == found["verified"][0][1]
    assert found["first_draft"] == first is not None
    assert clock.told() == found
    assert Clock("decode").told()["first_verified"] is None
