"""Progressive decode in stock vLLM on the CPU: what a client gets is what decoding on Q_full gives.

Run with an environment that has vLLM, about a minute on an idle core::

    PYTHONPATH=. python -m pytest integration_tests/test_vllm_progressive.py

The reference is a plain load of the same Q_full by LMCache in the same engine or, where the
residual never comes, computing the prompt. By default the model is a small Llama of random weights,
which turns the smallest error of its cache into another token; VLLM_TEST_MODEL names a real one.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from _vllm import CHUNK, LENGTHS, WAIT, Answer, Engine, decisions, key_of, tokens  # isort: skip
from lynx_backend.keys import Part  # isort: skip
from lynx_backend.texts import default_text, prompt_tokens  # isort: skip

SPLITS: list[dict[str, int]] = [{}, {"anchor_bits": 2, "residual_bits": 6}]
NEW = 40


# -- identity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_tokens_are_those_of_decoding_on_q_full(engine, prompts, name, split, monkeypatch):
    prompt = prompts[name]
    if split:
        engine.use_split(monkeypatch, **split)
        engine.store(prompt)
    wanted = engine.plain(prompt, max_tokens=NEW)
    computed = engine.computed(prompt, max_tokens=NEW)
    for arrival in (0, 1, 9, NEW, "lost", "late"):
        settings = engine.connector.settings
        if arrival == "late":
            engine.connector.settings = replace(settings, residual_seconds=0.05)
        dropped = tokens("dropped")
        got = engine.progressive(prompt, arrival, max_tokens=NEW)
        engine.connector.settings = settings
        never = arrival in ("lost", "late")
        assert got.outcome == (computed if never else wanted).outcome, arrival
        assert (tokens("dropped") > dropped) == (arrival == "lost") or arrival == "late"


def test_at_most_64_drafts_then_it_waits(engine, prompts):
    prompt = prompts["short rest"]
    wanted = engine.plain(prompt, max_tokens=80)
    before = tokens("accepted") + tokens("rejected")
    assert engine.progressive(prompt, 64, max_tokens=80).outcome == wanted.outcome
    assert tokens("accepted") + tokens("rejected") - before == 64


@pytest.mark.parametrize("budget", [80, 96])
def test_a_rest_that_takes_several_passes(engine, prompts, budget, monkeypatch):
    """188 tokens and the drafts: of these, the last pass has room for some or for all."""
    prompt = prompts["long rest"]
    wanted = engine.plain(prompt, max_tokens=NEW)
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", budget)
    before = [tokens(result) for result in ("accepted", "rejected", "dropped")]
    assert engine.progressive(prompt, 20, max_tokens=NEW).outcome == wanted.outcome
    after = [tokens(result) for result in ("accepted", "rejected", "dropped")]
    accepted, rejected, dropped = (b - a for a, b in zip(before, after, strict=True))
    assert accepted + rejected > 0
    assert accepted + rejected + dropped >= 20
    assert (dropped > 0) == (budget == 96)


def test_nothing_is_given_out_before_it_is_verified(engine, prompts):
    prompt = prompts["short rest"]
    wanted = engine.plain(prompt, max_tokens=NEW)
    engine.reset()
    engine.connector.armed = True
    name = engine.add(prompt, max_tokens=NEW)
    answers: dict[str, Answer] = {}
    release = engine.arrivals({name: 12})
    most = 0

    def hook(step: int) -> None:
        nonlocal most
        drafts = engine.drafted(name)
        if drafts is not None:
            most = max(most, drafts)
            assert name not in answers
        release(step)

    engine.run(hook, answers)
    assert most >= 12
    assert answers[name].outcome == wanted.outcome


# -- features --------------------------------------------------------------------------------------

DRAFTING: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logprobs": {"logprobs": 2},
    "max_tokens": {"max_tokens": 7},
    "one token": {"max_tokens": 1},
    "allowed_token_ids": {"allowed_token_ids": list(range(1000, 9000))},
}


@pytest.mark.parametrize("feature", DRAFTING)
def test_features_that_draft(engine, prompts, feature):
    prompt, given = prompts["short rest"], {"max_tokens": 24} | DRAFTING[feature]
    wanted = engine.plain(prompt, **given)
    drafted = decisions("drafted")
    got = engine.progressive(prompt, min(12, given["max_tokens"]), **given)
    assert got.outcome == wanted.outcome
    assert decisions("drafted") == drafted + 1
    if feature == "logprobs":
        pairs = zip(got.logprobs, wanted.logprobs, strict=True)
        for mine, theirs in pairs:
            for token, found in theirs.items():
                assert mine[token].logprob == pytest.approx(found.logprob, abs=1e-3)


def test_stops_inside_the_drafts(engine, prompts):
    prompt = prompts["short rest"]
    base = engine.plain(prompt, max_tokens=24)
    tokenizer = engine.engine.get_tokenizer()
    words = [tokenizer.decode([token]) for token in base.tokens]
    pairs = zip(base.tokens[1:], words[1:], strict=True)
    word = next(w for t, w in pairs if w.isalpha() and tokenizer.encode(w) == [t])
    cases: list[dict[str, Any]] = [
        {"stop_token_ids": [base.tokens[8]]},
        {"stop_token_ids": [base.tokens[2], base.tokens[8]], "min_tokens": 6},
        {"stop": [word]},
        {"bad_words": [word]},
    ]
    for given in cases:
        wanted = engine.plain(prompt, max_tokens=24, **given)
        assert wanted.outcome != base.outcome
        assert engine.progressive(prompt, 18, max_tokens=24, **given).outcome == wanted.outcome


def not_drafting() -> dict[str, tuple[str, dict[str, Any]]]:
    from vllm.sampling_params import StructuredOutputsParams

    return {
        "min_p": ("min_p", {"min_p": 0.1, "temperature": 0.7, "seed": 3}),
        "logit_bias": ("bias", {"logit_bias": {5: 3.0}}),
        "seed": ("seed", {"temperature": 0.7, "seed": 3}),
        "structured output": (
            "structured_output",
            {"structured_outputs": StructuredOutputsParams(choice=["yes", "no"])},
        ),
    }


def test_features_that_do_not_draft(engine, prompts):
    for name, (reason, given) in not_drafting().items():
        prompt = prompts["short rest"]
        wanted = engine.plain(prompt, max_tokens=8, **given)
        before, drafted = decisions(reason), decisions("drafted")
        got = engine.progressive(prompt, 0, max_tokens=8, **given)
        assert got.outcome == wanted.outcome, name
        assert (decisions(reason), decisions("drafted")) == (before + 1, drafted), name


# -- what must stay inside -------------------------------------------------------------------------


@pytest.mark.parametrize("guarded", [True, False])
def test_no_one_else_gets_coarse_blocks(engine, prompts, guarded, monkeypatch):
    """Without the guard another request takes the coarse blocks and gives other tokens."""
    if not guarded and "VLLM_TEST_MODEL" in os.environ:
        pytest.skip("a real model's next tokens are mostly the same on its anchor")
    prompt = prompts["short rest"]
    wanted = engine.plain(prompt, max_tokens=16)
    if not guarded:
        monkeypatch.setattr(engine.scheduler, "_is_coarse", lambda _: False)
    engine.reset()
    engine.connector.armed = True
    first = engine.add(prompt, max_tokens=16)
    second: list[str] = []
    release = engine.arrivals({first: 10})

    def hook(step: int) -> None:
        if not second and (engine.drafted(first) or 0) >= 2:
            engine.connector.armed = False
            second.append(engine.add(prompt, max_tokens=4))
        if second and engine.internal(second[0]) is None:
            release(step)

    answers = engine.run(hook)
    assert (answers[second[0]].tokens == wanted.tokens[:4]) == guarded
    if guarded:
        assert answers[first].outcome == wanted.outcome


def test_a_chunk_computed_on_coarse_pages_is_stored_once_it_is_exact(engine):
    prompt = prompt_tokens(engine.engine.get_tokenizer(), default_text(), 4000)[3000:3800]
    engine.store(prompt[: 2 * CHUNK])
    key = key_of(engine, prompt, 2)
    wanted = engine.plain(prompt, max_tokens=12)
    assert engine.lynx._puts.flush(WAIT)
    kept = engine.lynx.store.get(key)
    assert kept is not None
    engine.lynx.store.remove([key])
    engine.reset()
    engine.connector.armed = True
    name = engine.add(prompt, max_tokens=12)
    release = engine.arrivals({name: 6})

    def hook(step: int) -> None:
        if engine.drafted(name):
            assert engine.lynx._puts.flush(WAIT)
            assert engine.lynx.store.get(key) is None
        release(step)

    assert engine.run(hook)[name].outcome == wanted.outcome
    assert engine.lynx._puts.flush(WAIT)
    again = engine.lynx.store.get(key)
    assert again is not None
    error = (again - kept).abs().mean() / kept.abs().mean()
    assert error < 1e-3


# -- ways out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [None, 3, 64])
def test_an_abort_frees_everything(engine, prompts, drafts):
    """While it loads, while it drafts, and while it waits for its residual."""
    prompt = prompts["short rest"]
    engine.reset()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    engine.connector.armed = True
    name = engine.add(prompt, max_tokens=70)

    def hook(_: int) -> None:
        if drafts is None or (engine.drafted(name) or 0) >= drafts:
            engine.engine.abort_request([name])

    engine.run(hook)
    engine.reset()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free


def test_preemption_while_drafting(engine, prompts):
    prompt = prompts["long rest"]
    wanted = engine.plain(prompt, max_tokens=20)
    engine.reset()
    engine.connector.armed = True
    name = engine.add(prompt, max_tokens=20)
    preempted = []

    def hook(_: int) -> None:
        if not preempted and (engine.drafted(name) or 0) >= 5:
            preempted.append(engine.scheduler.reset_prefix_cache(reset_running_requests=True))

    assert engine.run(hook)[name].outcome == wanted.outcome
    assert preempted


def damage(engine: Engine, prompt: list[int], part: Part) -> None:
    """Flip a bit in the prompt's second chunk."""
    name = key_of(engine, prompt, 1).object(part)
    (tier,) = engine.lynx.store.tiers
    damaged = bytearray(tier.get(name))
    damaged[len(damaged) // 2] ^= 1
    tier.put(name, memoryview(bytes(damaged)))


def test_a_damaged_anchor(engine, prompts):
    """LMCache loads what comes before it; nothing is drafted."""
    prompt = prompts["short rest"]
    damage(engine, prompt, Part.ANCHOR)
    wanted = engine.plain(prompt, max_tokens=20)
    engine.store(prompt)
    damage(engine, prompt, Part.ANCHOR)
    drafted = decisions("drafted")
    assert engine.progressive(prompt, "late", max_tokens=20).outcome == wanted.outcome
    assert decisions("drafted") == drafted
    engine.store(prompt)


def test_a_damaged_residual(engine, prompts):
    prompt = prompts["short rest"]
    wanted = engine.computed(prompt, max_tokens=20)
    assert engine.lynx._puts.flush(WAIT)
    damage(engine, prompt, Part.RESIDUAL)
    before = decisions("no_residual")
    assert engine.progressive(prompt, 4, max_tokens=20).outcome == wanted.outcome
    assert decisions("no_residual") == before + 1
    assert engine.lynx._puts.flush(WAIT)
    engine.reset()
    # It was computed, so it was stored again, whole.
    assert engine.lynx.store.get(key_of(engine, prompt, 1)) is not None


def test_anchors_that_do_not_come_in_time(engine, prompts):
    prompt = prompts["short rest"]
    wanted = engine.plain(prompt, max_tokens=8)
    settings = engine.connector.settings
    engine.connector.settings = replace(settings, anchor_seconds=0.05)
    engine.gate.holds_anchors = True
    before = decisions("no_anchor")
    try:
        got = engine.progressive(prompt, "late", max_tokens=8)
    finally:
        engine.gate.holds_anchors = False
        engine.connector.settings = settings
    assert got.outcome == wanted.outcome
    assert decisions("no_anchor") == before + 1


def test_two_requests_for_one_prompt_in_different_phases(engine, prompts):
    prompt, other = prompts["short rest"], prompts["long rest"]
    wanted = {n: engine.plain(p, max_tokens=30) for n, p in (("a", prompt), ("b", other))}
    engine.reset()
    engine.connector.armed = True
    first = engine.add(prompt, max_tokens=30)
    third = engine.add(other, max_tokens=30)
    when: dict[str, int | str] = {first: 14, third: 3}
    release = [engine.arrivals(when)]
    second: list[str] = []

    def hook(step: int) -> None:
        if not second and (engine.drafted(first) or 0) >= 5:
            second.append(engine.add(prompt, max_tokens=30))
            release.append(engine.arrivals({second[0]: 4}))
        for each in release:
            each(step)

    answers = engine.run(hook)
    for name, kind in ((first, "a"), (second[0], "a"), (third, "b")):
        assert answers[name].outcome == wanted[kind].outcome


def test_without_lynx_scheduler_nothing_drafts(engine, prompts):
    """The connector drafts only for a scheduler that withholds drafts."""
    prompt = prompts["short rest"]
    engine.connector.armed = False
    engine.reset()
    before = decisions("drafted")
    name = engine.add(prompt, max_tokens=2)
    engine.run()
    assert not engine.connector.drafting
    assert decisions("drafted") == before
    assert engine.internal(name) is None


def test_preempted_again_after_it_was_computed(engine, prompts):
    """LMCache knows the request by then, and wants to have looked it up."""
    prompt = prompts["short rest"]
    wanted = engine.computed(prompt, max_tokens=16)
    assert engine.lynx._puts.flush(WAIT)
    engine.reset()
    engine.connector.armed = True
    name = engine.add(prompt, max_tokens=16)
    release = engine.arrivals({name: "lost"})
    answers: dict[str, Answer] = {}
    preempted = []

    def hook(step: int) -> None:
        release(step)
        if not preempted and name in answers and len(answers[name].tokens) >= 3:
            engine.lynx.store.remove([key_of(engine, prompt, chunk) for chunk in (0, 1)])
            preempted.append(engine.scheduler.reset_prefix_cache(reset_running_requests=True))

    assert engine.run(hook, answers)[name].outcome == wanted.outcome
    assert preempted
    engine.store(prompt)


@pytest.mark.slow
def test_soak(engine, prompts):
    """Requests come, draft, are preempted and aborted at random; what ends is as a plain load.

    No residual is lost here: exact blocks would then be in the prefix cache beside those of Q_full.
    """
    rng = random.Random(0)
    wanted = {
        (name, new): engine.plain(prompt, max_tokens=new)
        for name, prompt in prompts.items()
        for new in (4, 20, 40)
    }
    engine.reset()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    engine.connector.armed = True
    kinds: dict[str, tuple[str, int]] = {}
    aborted: set[str] = set()
    hooks: list[Any] = []
    total = int(os.environ.get("SOAK_REQUESTS", "500"))

    def arrive() -> None:
        name, new = rng.choice(list(wanted))
        request = engine.add(prompts[name], max_tokens=new)
        kinds[request] = name, new
        hooks.append(engine.arrivals({request: min(rng.choice([0, 1, 3, 8, 15, 30]), new)}))

    def hook(step: int) -> None:
        for each in hooks:
            each(step)
        if len(kinds) < total and len(engine.scheduler.requests) < 8 and rng.random() < 0.4:
            arrive()
        if rng.random() < 0.02:
            engine.scheduler.reset_prefix_cache(reset_running_requests=False)
        if rng.random() < 0.02 and engine.scheduler.running:
            victim = engine.scheduler.running.pop()
            engine.scheduler._preempt_request(victim, 0.0)
            engine.scheduler.prev_step_scheduled_req_ids.discard(victim.request_id)
        if rng.random() < 0.01:
            request = rng.choice(list(kinds))
            aborted.add(request)
            engine.engine.abort_request([request])

    answers: dict[str, Answer] = {}
    before = {reason: decisions(reason) for reason in ("drafted", "preempted", "aborted")}
    while len(kinds) < total:
        arrive()
        engine.run(hook, answers)
    engine.reset()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    whole = kinds.keys() - aborted
    wrong = [each for each in whole if answers[each].outcome != wanted[kinds[each]].outcome]
    assert not wrong
    assert all(decisions(reason) > count for reason, count in before.items())


SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    llm = LLM(**given["engine"])
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (answer,) = llm.generate({"prompt_token_ids": given["prompt"]}, params)
    found = [answer.num_cached_tokens, list(answer.outputs[0].token_ids)]
    print("FOUND", json.dumps(found), flush=True)
    llm.llm_engine.engine_core.shutdown()
"""


@pytest.mark.slow
def test_in_processes_of_their_own(engine, prompts, tmp_path):
    """Engine and scheduler in another process, as a server runs them, and chunks on a disk."""
    settings = engine.settings | {"extra_config": dict(engine.settings["extra_config"])}
    disk = {"memory": {"enabled": False}, "nvme": {"path": str(tmp_path / "kv")}}
    settings["extra_config"]["lynx"] = disk
    file = tmp_path / "lmcache.yaml"
    file.write_text(json.dumps(settings))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {
        "LMCACHE_CONFIG_FILE": str(file),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }

    def ask(draft: bool) -> tuple[int, list[int]]:
        arguments = engine.arguments | {"disable_log_stats": True}
        mode = "always" if draft else "never"
        transfer = {"kv_connector_extra_config": {"lynx.draft": mode}}
        arguments["kv_transfer_config"] = arguments["kv_transfer_config"] | transfer
        given = json.dumps({"engine": arguments, "prompt": prompts["short rest"]})
        done = subprocess.run(
            [sys.executable, str(script), given],
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        assert lines, done.stdout[-3000:] + done.stderr[-3000:]
        cached, tokens = json.loads(lines[0].removeprefix("FOUND "))
        return cached, tokens

    assert ask(draft=False)[0] == 0
    loaded = ask(draft=False)
    assert loaded[0] == 2 * CHUNK
    assert ask(draft=True) == loaded
