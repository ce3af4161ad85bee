"""Drafting only where it pays, in stock vLLM on the CPU; and what vLLM then says about it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from _vllm import Answer, Engine, decisions, tokens  # isort: skip
from prometheus_client import REGISTRY  # isort: skip
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging  # isort: skip
from lynx_backend.integrations.vllm.policy import Policy  # isort: skip
from lynx_backend.integrations.vllm.trace import Tracer  # isort: skip

NEW = 24


class Scripted(Policy):
    """Decides what it is told."""

    def __init__(self, drafts: int) -> None:
        super().__init__("auto")
        self.say = drafts

    def drafts(self, wait: float, rest: int, others: int) -> int:
        return self.say


@pytest.fixture
def policy(engine, monkeypatch) -> Scripted:
    """That holds every request; tests may change its mind."""
    made = Scripted(0)
    monkeypatch.setattr(engine.scheduler, "policy", made)
    return made


def held(engine: Engine, name: str) -> bool:
    """Whether the request has its anchors and only waits."""
    drafting = engine.connector.drafting.get(engine.internal(name))
    return drafting is not None and drafting.held


def start(engine: Engine, prompt: list[int], **given: Any) -> str:
    engine.reset()
    engine.connector.armed = True
    return engine.add(prompt, **{"max_tokens": NEW} | given)


@pytest.mark.parametrize("name", ["short rest", "whole"])
def test_a_request_that_waits_gives_the_same_tokens(engine, prompts, policy, name):
    """And others go on meanwhile."""
    prompt, other = prompts[name], prompts["long rest"]
    wanted = engine.plain(prompt, max_tokens=NEW)
    others = engine.computed(other[:100], max_tokens=NEW)
    before = decisions("waited"), decisions("drafted")
    request = start(engine, prompt)
    beside = engine.add(other[:100], max_tokens=NEW)
    answers: dict[str, Answer] = {}
    steps = 0

    def hook(_: int) -> None:
        nonlocal steps
        if held(engine, request):
            steps += 1
            assert engine.drafted(request) == 0
            if beside in answers and answers[beside].finish:
                engine.gate.release(engine.internal(request))

    engine.run(hook, answers)
    assert steps
    assert answers[request].outcome == wanted.outcome
    assert answers[beside].outcome == others.outcome
    assert (decisions("waited"), decisions("drafted")) == (before[0] + 1, before[1])


def test_a_request_that_waits_may_draft_later(engine, prompts, policy):
    """And then only as many tokens as pay."""
    prompt = prompts["short rest"]
    wanted = engine.plain(prompt, max_tokens=NEW)
    drafted = decisions("drafted")
    withheld = tokens("accepted") + tokens("rejected")
    request = start(engine, prompt)
    release = engine.arrivals({request: 5})
    frozen = 0

    def hook(step: int) -> None:
        nonlocal frozen
        if held(engine, request):
            policy.say = 5
        elif (engine.drafted(request) or 0) == 5 and frozen < 3:
            frozen += 1
            return
        release(step)

    assert engine.run(hook)[request].outcome == wanted.outcome
    assert frozen == 3
    assert decisions("drafted") == drafted + 1
    assert tokens("accepted") + tokens("rejected") == withheld + 5


def test_an_abort_while_it_waits_frees_everything(engine, prompts, policy):
    engine.reset()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    request = start(engine, prompts["short rest"])

    def hook(_: int) -> None:
        if held(engine, request):
            engine.engine.abort_request([request])

    assert not engine.run(hook)
    engine.reset()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free


@pytest.mark.parametrize("why", ["lost", "late"])
def test_a_residual_that_never_comes_while_it_waits(engine, prompts, policy, why, monkeypatch):
    """Late: it is computed. Lost: LMCache may load what there is, here everything."""
    prompt = prompts["short rest"]
    given = {"max_tokens": NEW}
    wanted = (engine.plain if why == "lost" else engine.computed)(prompt, **given)
    if why == "late":
        settings = replace(engine.connector.settings, residual_seconds=0.05)
        monkeypatch.setattr(engine.connector, "settings", settings)
    before = decisions("no_residual")
    request = start(engine, prompt)

    def hook(_: int) -> None:
        if why == "lost" and held(engine, request):
            engine.gate.release(engine.internal(request), lost=True)

    assert engine.run(hook)[request].outcome == wanted.outcome
    assert decisions("no_residual") == before + 1


def test_a_link_that_stalls_makes_drafting_pay(engine, prompts, monkeypatch):
    """The real policy on measured steps and a measured rate."""
    prompt = prompts["short rest"]
    wanted = engine.plain(prompt, max_tokens=NEW)
    assert engine.scheduler.policy.step > 0
    policy = Policy("auto")
    policy.step, policy.token = engine.scheduler.policy.step, engine.scheduler.policy.token
    monkeypatch.setattr(engine.scheduler, "policy", policy)
    request = start(engine, prompt)
    assert engine.run(engine.arrivals({request: 1}))[request].outcome == wanted.outcome
    assert policy._tried > 0


def test_a_link_that_is_fast_makes_it_wait(engine, prompts, monkeypatch):
    """One step takes longer than what is left of the residual."""
    prompt = prompts["short rest"]
    wanted = engine.plain(prompt, max_tokens=NEW)
    policy = Policy("auto")
    policy.step = policy.token = 1e6
    monkeypatch.setattr(policy, "measured", lambda *_: None)
    monkeypatch.setattr(engine.scheduler, "policy", policy)
    drafted = decisions("drafted")
    request = start(engine, prompt)

    def hook(_: int) -> None:
        if held(engine, request):
            engine.gate.release(engine.internal(request))

    assert engine.run(hook)[request].outcome == wanted.outcome
    assert decisions("drafted") == drafted


# -- what vLLM says --------------------------------------------------------------------------------


def sample(name: str, **labels: str) -> float:
    """Of a metric of vLLM's front end, of its only engine."""
    for family in REGISTRY.collect():
        for each in family.samples:
            if each.name == name and labels.items() <= each.labels.items():
                return each.value
    return 0.0


def test_vllm_logs_and_exports_what_drafting_did(engine, prompts, monkeypatch):
    prompt = prompts["short rest"]
    accepted, given_out = tokens("accepted"), tokens("rejected")
    name = {"drafts": "vllm:lynx_draft_tokens_total", "gained": "vllm:lynx_gained_seconds_count"}
    before = [sample(name["drafts"], result=r) for r in ("accepted", "rejected")]
    gained = sample(name["gained"])
    withheld = []
    log = KVConnectorLogging(engine.engine.vllm_config.kv_transfer_config)
    take = engine.connector.get_kv_connector_stats

    def taken() -> Any:
        stats = take()
        if stats is not None:
            log.observe(json.loads(json.dumps(stats.to_dict())))  # it goes to another process
        return stats

    monkeypatch.setattr(engine.connector, "get_kv_connector_stats", taken)
    request = start(engine, prompt)
    release = engine.arrivals({request: 6})

    def hook(step: int) -> None:
        withheld.append(sample("vllm:lynx_withheld_drafts"))
        release(step)

    engine.run(hook)
    after = [sample(name["drafts"], result=r) for r in ("accepted", "rejected")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [
        tokens("accepted") - accepted,
        tokens("rejected") - given_out,
    ]
    assert sample(name["gained"]) == gained + 1
    assert max(withheld) >= 6
    assert sample("vllm:lynx_withheld_drafts") == 0
    lines: list[str] = []
    log.log(lambda text, *values: lines.append(text % values))
    (line,) = lines
    assert line.startswith("KV Transfer metrics: Lynx requests that drafted=1, ")
    assert "avg anchor lead (s)=" in line


def test_a_trace_has_what_happened_in_order(engine, prompts, tmp_path, monkeypatch):
    tracer = Tracer(str(tmp_path))
    monkeypatch.setattr(engine.connector, "tracer", tracer)
    monkeypatch.setattr(engine.scheduler, "_tracer", tracer)
    before = tokens("accepted") + tokens("rejected")
    request = start(engine, prompts["short rest"])
    answer = engine.run(engine.arrivals({request: 4}))[request]
    drafted = tokens("accepted") + tokens("rejected") - before
    engine.reset()
    (file,) = tmp_path.iterdir()
    read = json.loads(file.read_text())
    assert (read["prompt"], read["stored"]) == (530, 512)
    names = list(dict.fromkeys(event for _, event, _ in read["events"]))
    assert names == ["load", "anchors", "draft", "residual", "verify", "emit", "end"]
    times = [at for at, _, _ in read["events"]]
    assert times == sorted(times)
    totals = {
        kind: sum(count for _, event, count in read["events"] if event == kind)
        for kind in ("draft", "emit")
    }
    assert totals == {"draft": drafted, "emit": len(answer.tokens)}
