"""Greedy tokens equal those of a plain load of Q_full: prompts x arrivals x bit splits x features.

Some minutes, so not part of what runs by default::

    PYTHONPATH=. python -m pytest -m slow integration_tests/test_vllm_identity.py

Each test is one feature on one prompt in one split, with residuals that come before the first
draft, after 1, after 9, after 64 (or when nothing more may be drafted), never, and too late.
References are plain loads by LMCache in the same engine or, where the residual does not come,
computing the prompt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from _vllm import CHUNK, LENGTHS, WAIT, Answer, Engine, decisions, key_of  # isort: skip

pytestmark = pytest.mark.slow

SPLITS: list[dict[str, int]] = [{}, {"anchor_bits": 2, "residual_bits": 6}]
ARRIVALS: tuple[int | str, ...] = (0, 1, 9, 64, "lost", "late")
NEW = 70


@dataclass(frozen=True)
class Feature:
    """Something that a request or the engine does.

    Attributes:
        given: makes sampling parameters from the engine and the tokens of a plain answer.
        drafts: whether such a request drafts.
        budget: tokens of one step, if fewer than usual.
        cached: tokens of the prompt that are in vLLM's own prefix cache before.
        beside: whether another request is decoded at the same time.
    """

    given: Callable[[Engine, list[int]], dict[str, Any]] = lambda engine, base: {}
    drafts: bool = True
    budget: int | None = None
    cached: int = 0
    beside: bool = False


def word(engine: Engine, base: list[int]) -> str:
    """A word that comes in the middle of an answer, of one token and of letters."""
    tokenizer = engine.engine.get_tokenizer()
    words = ((token, tokenizer.decode([token])) for token in base[1:])
    return next(w for t, w in words if w.strip().isalpha() and tokenizer.encode(w) == [t])


def fixed(**given: Any) -> Feature:
    return Feature(lambda engine, base: given)


def falls_back(**given: Any) -> Feature:
    return Feature(lambda engine, base: given, drafts=False)


def choice(engine: Engine, base: list[int]) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(choice=["yes", "no"])}


FEATURES = {
    "nothing": fixed(),
    "max_tokens": fixed(max_tokens=7),
    "one token": fixed(max_tokens=1),
    "penalties": fixed(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    "logprobs": fixed(logprobs=2),
    "allowed_token_ids": fixed(allowed_token_ids=list(range(1000, 9000))),
    "stop token": Feature(lambda engine, base: {"stop_token_ids": [base[8]]}),
    "stop token, min_tokens": Feature(
        lambda engine, base: {"stop_token_ids": [base[2], base[8]], "min_tokens": 6}
    ),
    "stop string": Feature(lambda engine, base: {"stop": [word(engine, base)]}),
    "bad word": Feature(lambda engine, base: {"bad_words": [word(engine, base)]}),
    "rest in several passes": Feature(budget=96),
    "prefix cache": Feature(cached=CHUNK),
    "beside another": Feature(beside=True),
    "logit_bias": falls_back(logit_bias={5: 3.0}),
    "min_p": falls_back(min_p=0.1, temperature=0.7, seed=3),
    "seed": falls_back(temperature=0.7, seed=3),
    "n = 2": falls_back(temperature=0.7, seed=3, n=2),
    "structured output": Feature(choice, drafts=False),
}


class Case:
    """One request as it is asked in every way."""

    def __init__(self, engine: Engine, prompt: list[int], feature: Feature, beside: list[int]):
        self.engine, self.prompt, self.feature = engine, prompt, feature
        self.beside = beside if feature.beside else []
        self.given: dict[str, Any] = {"max_tokens": NEW}

    def _add(self) -> str:
        """With the engine as it has to be before the request comes."""
        self.engine.connector.armed = False
        self.engine.reset()
        if self.feature.cached:
            # What is computed beyond a cached Q_full prefix replaces what was stored.
            chunks = len(self.prompt) // CHUNK
            self.engine.lynx.store.remove(
                [key_of(self.engine, self.prompt, chunk) for chunk in range(chunks)]
            )
            self.engine.store(self.prompt)
            self.engine.add(self.prompt[: self.feature.cached + 1], max_tokens=1)
            self.engine.run()
        if self.beside:
            name = self.engine.add(self.beside, max_tokens=NEW)
            self.engine.connector.compute(self.engine.internal(name))
        return self.engine.add(self.prompt, **self.given)

    def plain(self) -> list[Answer]:
        return self._answers(self._add())

    def computed(self) -> list[Answer]:
        name = self._add()
        self.engine.connector.compute(self.engine.internal(name))
        return self._answers(name)

    def progressive(self, arrival: int | str) -> list[Answer]:
        name = self._add()
        self.engine.connector.armed = True
        engine, pending = self.engine, True

        def hook(_: int) -> None:
            nonlocal pending
            drafts = engine.drafted(name)
            if not pending or arrival == "late" or drafts is None:
                return
            request_id = engine.internal(name)
            request = engine.scheduler.requests[request_id]
            frozen = request.next_decode_eligible_step > engine.scheduler.current_step
            if frozen or drafts >= (3 if arrival == "lost" else arrival):
                engine.gate.release(request_id, lost=arrival == "lost")
                pending = False

        if arrival == 0:
            for request_id in list(engine.scheduler.requests):
                engine.gate.release(request_id)
        return self._answers(name, hook)

    def _answers(self, name: str, hook: Any = None) -> list[Answer]:
        answers = self.engine.run(hook)
        return [answers[each] for each in answers if each.split(".")[0] == name]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("feature", FEATURES)
def test_tokens_are_those_of_decoding_on_q_full(engine, prompts, feature, name, split, monkeypatch):
    prompt, what = prompts[name], FEATURES[feature]
    if split:
        engine.use_split(monkeypatch, **split)
        engine.store(prompt)
    if what.budget is not None:
        monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", what.budget)
    case = Case(engine, prompt, what, beside=prompts["long rest"][100:140])
    case.given |= what.given(engine, engine.plain(prompt, max_tokens=NEW).tokens)
    wanted, computed = case.plain(), None
    settings = engine.connector.settings
    for arrival in ARRIVALS if what.drafts else (0,):
        late = replace(settings, residual_seconds=0.05)
        monkeypatch.setattr(engine.connector, "settings", late if arrival == "late" else settings)
        if arrival in ("lost", "late"):
            right = computed = computed or case.computed()
        else:
            right = wanted
        drafted = decisions("drafted")
        got = case.progressive(arrival)
        assert [each.outcome for each in got] == [each.outcome for each in right], arrival
        assert len(got) == case.given.get("n", 1)
        if isinstance(arrival, int) and arrival > 0:
            assert decisions("drafted") == drafted + 1
        if "logprobs" in case.given:
            for mine, theirs in zip(got[0].logprobs, right[0].logprobs, strict=True):
                for token, found in theirs.items():
                    assert mine[token].logprob == pytest.approx(found.logprob, abs=1e-3)


# -- several engines -------------------------------------------------------------------------------

SCRIPT = """
import json, sys
from pathlib import Path
from _vllm import Engine
given = json.loads(sys.argv[1])
engine = Engine(Path(given["folder"]), given["model"], lynx=given["lynx"])
engine.gate = engine._gate()
def say(*what):
    print("SAYS", json.dumps(what), flush=True)
if given["arrival"] is None:
    engine.store(given["prompt"])
    say(engine.plain(given["prompt"], max_tokens=40).tokens)
else:
    engine.connector.armed = True
    name = engine.add(given["prompt"], max_tokens=40)
    waits = True
    def hook(step):
        global waits
        if waits and (engine.drafted(name) or 0) >= given["arrival"]:
            say(engine.drafted(name))
            sys.stdin.readline()
            engine.gate.release(engine.internal(name))
            waits = False
    say(engine.run(hook)[name].tokens)
engine.close()
"""


def test_two_engines_draft_on_one_store_at_once(engine, prompts, tmp_path):
    """Each in a process of its own, on a disk that a third one filled; both while they draft."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here.parent}:{here}"}
    disk = {"memory": {"enabled": False}, "nvme": {"path": str(tmp_path / "kv")}}

    def start(name: str, arrival: int | None) -> subprocess.Popen[str]:
        folder = tmp_path / name
        folder.mkdir()
        given = {
            "folder": str(folder),
            "model": engine.arguments["model"],
            "lynx": disk,
            "prompt": prompts["short rest"],
            "arrival": arrival,
        }
        return subprocess.Popen(
            [sys.executable, str(script), json.dumps(given)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "log").open("w"),
            text=True,
        )

    def said(process: subprocess.Popen[str]) -> Any:
        for line in process.stdout:
            if line.startswith("SAYS "):
                return json.loads(line.removeprefix("SAYS "))[0]
        raise AssertionError("it ended")

    writer = start("writer", None)
    wanted = said(writer)
    assert writer.wait(WAIT) == 0
    first, second = start("first", 3), start("second", 20)
    try:
        assert said(first) >= 3
        assert said(second) >= 20
        for process in (second, first):
            process.stdin.write("go on\n")
            process.stdin.flush()
            assert said(process) == wanted
            assert process.wait(WAIT) == 0
    finally:
        for process in (first, second):
            process.kill()
