"""A decode engine and what other processes say to it and hear from it, in stock vLLM on the CPU.

With an environment that has vLLM, under a minute on an idle core::

    PYTHONPATH=. python -m pytest integration_tests/test_vllm_handoff.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import zmq

from _vllm import decisions  # isort: skip
from lynx_backend.integrations.vllm.provisional import Provisional  # isort: skip

NEW = 12


@pytest.fixture(scope="module")
def prompt(prompts) -> list[int]:
    return prompts["short rest"]


def params(**given: Any) -> dict[str, Any]:
    return {"max_tokens": NEW, "extra_args": {"kv_transfer_params": given}}


def test_what_a_prefill_engine_has_still_to_store_is_waited_for(engine, prompt):
    wanted = engine.plain(prompt, max_tokens=NEW)
    (tier,) = engine.lynx.store.tiers
    kept = {name: bytes(tier.get(name)) for name in tier.names()}
    tier.delete(list(kept))
    engine.reset()
    engine.connector.armed = True
    drafted = decisions("drafted")
    name = engine.add(prompt, **params(**{"lynx.stored_tokens": len(prompt)}))
    release = engine.arrivals({name: 3})

    def hook(step: int) -> None:
        if step == 50:
            assert engine.drafted(name) is None
            for each in sorted(kept, key=lambda each: -each.part):  # residuals first
                tier.put(each, kept[each])
        release(step)

    assert engine.run(hook)[name].outcome == wanted.outcome
    assert decisions("drafted") == drafted + 1


def test_it_is_not_waited_for_for_ever(engine, prompt, monkeypatch):
    """Of 530 tokens 512 are stored, of those promised here 768."""
    wanted = engine.plain(prompt, max_tokens=NEW)
    settings = replace(engine.connector.settings, anchor_seconds=0.2)
    monkeypatch.setattr(engine.connector, "settings", settings)
    engine.reset()
    engine.connector.armed = False
    name = engine.add(prompt, **params(**{"lynx.stored_tokens": 768}))
    assert engine.run()[name].outcome == wanted.outcome
    engine.reset()
    name = engine.add(prompt, **params(**{"lynx.stored_tokens": "all"}))
    assert engine.run()[name].outcome == wanted.outcome
    assert not engine.connector._coming


@pytest.fixture
def heard(engine, monkeypatch):
    """Where drafts are published during a test."""
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"")
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    provisional = Provisional(f"tcp://127.0.0.1:{port}")
    monkeypatch.setattr(engine.scheduler, "_provisional", provisional)
    while True:  # until they are connected
        provisional._publisher.say("hello", _said("dropped"))
        if socket.poll(100):
            break
    yield socket
    provisional._publisher.close()
    socket.close()


def _said(name: str) -> Any:
    from lynx_backend.side_channel import Said

    return Said(name)


@pytest.mark.parametrize("arrival", [6, "lost"])
def test_drafts_are_said_aloud_for_who_asks(engine, prompt, heard, arrival):
    engine.reset()
    engine.connector.armed = True
    silent = engine.add(prompt, max_tokens=NEW)
    engine.run(engine.arrivals({silent: 3}))
    engine.reset()
    name = engine.add(prompt, **params(**{"lynx.provisional": "mine"}))
    drafts: list[int] = []
    release = engine.arrivals({name: arrival})

    def hook(step: int) -> None:
        if engine.drafted(name):
            request = engine.scheduler.requests[engine.internal(name)]
            drafts[:] = request.output_token_ids
        release(step)

    answer = engine.run(hook)[name]
    said: list[dict[str, Any]] = []
    while not said or said[-1]["said"] == "drafted":
        news = json.loads(heard.recv())
        if news["tag"] != "hello":
            said.append(news)
    assert {news["tag"] for news in said} == {"mine"}
    assert [token for news in said[:-1] for token in news["tokens"]] == drafts
    assert said[-1]["said"] == ("dropped" if arrival == "lost" else "verified")
    kept = said[-1]["count"]
    assert drafts[:kept] == answer.tokens[:kept]
    if arrival != "lost":
        assert drafts[kept : kept + 1] != answer.tokens[kept : kept + 1] or kept == len(drafts)
