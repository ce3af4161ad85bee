"""Sampling: tokens that are drafted and verified are distributed as those decoded on Q_full.

Two samples of plain loads differ by chance; what they seldom exceed is the threshold. It has to
tell broken verification apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from _vllm import Engine, decisions  # isort: skip

SAMPLES = 1600
TOKENS = 3
#: Six tokens, so that 3 of them make few enough sequences to count.
GIVEN = {"temperature": 1.0, "allowed_token_ids": [11, 260, 284, 310, 327, 338]}

Sequences = list[tuple[int, ...]]


def drawn(engine: Engine, prompt: list[int], drafts: bool, count: int = SAMPLES) -> Sequences:
    """So many sequences, eight at a time; all of them drafted before any is verified."""
    found: Sequences = []
    while len(found) < count:
        engine.connector.armed = drafts
        if drafts:
            engine.reset()
        name = engine.add(prompt, n=8, max_tokens=TOKENS, **GIVEN)
        answers = engine.run(all_at_once(engine) if drafts else None)
        found += [tuple(each.tokens) for key, each in answers.items() if key.startswith(name)]
    return found


def all_at_once(engine: Engine) -> Callable[[int], None]:
    """Lets residuals come when every request has all its drafts."""

    def hook(_: int) -> None:
        drafting = engine.connector.drafting
        if len(drafting) == 8 and all(each.withheld == TOKENS for each in drafting.values()):
            for request_id in drafting:
                engine.gate.release(request_id)

    return hook


def variation(one: Sequences, other: Sequences) -> float:
    """Total variation distance of two samples."""
    a, b = Counter(one), Counter(other)
    return sum(abs(a[key] / len(one) - b[key] / len(other)) for key in a | b) / 2


def threshold(plain: Sequences) -> float:
    """What a random :data:`SAMPLES` of ``plain`` differ from the others by, once in a thousand."""
    rng = np.random.default_rng(0)
    kinds = {key: i for i, key in enumerate(set(plain))}
    coded = np.array([kinds[key] for key in plain])
    distances = []
    for _ in range(10_000):
        mixed = rng.permutation(coded)
        a = np.bincount(mixed[:SAMPLES], minlength=len(kinds)) / SAMPLES
        b = np.bincount(mixed[SAMPLES:], minlength=len(kinds)) / (len(coded) - SAMPLES)
        distances.append(np.abs(a - b).sum() / 2)
    return float(np.quantile(distances, 0.999))


def accept_everything(monkeypatch: Any) -> None:
    """Broken verification: every draft is given out."""
    from vllm.v1.sample import rejection_sampler

    def broken(drafts: Any, counts: list[int], most: int, *args: Any, **kwargs: Any) -> Any:
        out = torch.full((len(counts), most + 1), -1, dtype=torch.int32)
        for i, part in enumerate(drafts.split(counts)):
            out[i, : len(part)] = part
        return out

    monkeypatch.setattr(rejection_sampler, "rejection_sample", broken)


def never_reject_twice(monkeypatch: Any) -> None:
    """Broken verification: a rejected draft may be drawn again in its place."""
    from vllm.v1.sample import rejection_sampler

    def broken(
        most: int, counts: Any, ends: Any, drafts: Any, no: Any, target: Any, *args: Any
    ) -> Any:
        return torch.multinomial(target, 1).squeeze(1)

    monkeypatch.setattr(rejection_sampler, "sample_recovered_tokens", broken)


@pytest.mark.slow
def test_drafted_and_verified_is_distributed_as_plain(engine, prompts, monkeypatch):
    prompt = prompts["short rest"]
    torch.manual_seed(0)
    plain = drawn(engine, prompt, drafts=False, count=4 * SAMPLES)
    limit = threshold(plain)
    before = decisions("drafted")
    drafted = drawn(engine, prompt, drafts=True)
    assert decisions("drafted") - before == SAMPLES
    found = {"verified": variation(drafted, plain)}
    for mutation in (accept_everything, never_reject_twice):
        with monkeypatch.context() as patch:
            mutation(patch)
            found[mutation.__name__] = variation(drawn(engine, prompt, drafts=True), plain)
    print(f"\n{len(set(plain))} sequences; threshold {limit:.3f}; {found}")
    assert found.pop("verified") < limit
    assert all(distance > limit for distance in found.values())


def test_values_of_requests_become_values_of_their_drafts():
    from lynx_backend.integrations.vllm.worker import expand_batch_to_tokens

    found = expand_batch_to_tokens(
        torch.tensor([0.5, 0.0, 0.7, 1.5]), torch.tensor([2, 5, 5, 6], dtype=torch.int32), 6, 0, 1
    )
    assert found.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0, 1.5]


def test_a_greedy_request_is_verified_beside_one_that_samples(engine, prompts):
    """vLLM then takes temperatures into account for all of a step's drafts."""
    prompt, other = prompts["short rest"], prompts["long rest"][100:140]
    wanted = engine.plain(prompt, max_tokens=24)
    for arrival in (1, 5, 9, 13):
        engine.reset()
        engine.connector.armed = True
        name = engine.add(prompt, max_tokens=24)
        engine.add(other, max_tokens=60, temperature=0.7, top_k=40, top_p=0.9)
        assert engine.run(engine.arrivals({name: arrival}))[name].outcome == wanted.outcome
