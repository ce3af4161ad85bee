"""Drafting in batches is drafting one by one; statistics, prompts and reports of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from lynx_backend.benchmarks import drafts, fidelity, measure, plot, report
from lynx_backend.benchmarks.batch import BatchBuffer, Drafting, accepted, prefill
from lynx_backend.benchmarks.texts import HELD_OUT, PER_KIND, TUNING, draft_prompts
from lynx_backend.engines import reference
from lynx_backend.engines.calibrate import calibrate
from lynx_backend.engines.kv_buffer import KVBuffer
from lynx_backend.engines.sampling import Sampler, verify
from lynx_backend.errors import InvalidInputError

SHAPE = (2, 2, 32)  # layers, KV heads, head_dim
VOCAB = 128


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=24,
        layer_types=["sliding_attention", "full_attention"], max_position_embeddings=4096,
        eos_token_id=None, pad_token_id=0, bos_token_id=1, initializer_range=0.5,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    made = transformers.Gemma3ForCausalLM(config).eval()
    with torch.no_grad():  # or every token would predict itself, whatever attention adds
        made.get_input_embeddings().weight.mul_(0.1)
    return made


def prompts(count: int, tokens: int = 40) -> list[list[int]]:
    g = torch.Generator().manual_seed(3)
    return torch.randint(2, VOCAB, (count, tokens), generator=g).tolist()


def coarsened(kv: torch.Tensor, by: float) -> torch.Tensor:
    g = torch.Generator().manual_seed(5)
    return kv + by * kv.float().std() * torch.randn(kv.shape, generator=g)


def test_a_batch_is_prefilled_like_each_prompt(model: Any):
    some = prompts(3)
    for ids, kv in zip(some, prefill(model, SHAPE, some), strict=True):
        alone = reference.prefill(model, ids[:-1])
        torch.testing.assert_close(kv.float(), alone.float(), rtol=0.01, atol=0.01)


def one_by_one(model: Any, ids: list[int], coarse: torch.Tensor, full: torch.Tensor) -> int:
    tokens = reference.decode(model, coarse, ids, 12).tokens
    buffer = KVBuffer(model, len(ids) + 12)
    buffer.load(full)
    logits = buffer.forward([ids[-1], *tokens], keep=13)
    return verify(Sampler(), tokens, [], logits, tie_gap=0.0)[0]


def test_greedy_drafts_are_accepted_as_the_engine_accepts_them(model: Any, monkeypatch: Any):
    monkeypatch.setattr("lynx_backend.benchmarks.batch._PASS_TOKENS", 39)  # three passes
    some = prompts(7)
    full = prefill(model, SHAPE, some)
    coarse = [coarsened(kv, 0.05 * i) for i, kv in enumerate(full)]
    buffer = BatchBuffer(model, SHAPE, len(some), 40 + 12)
    last = torch.tensor([ids[-1] for ids in some])
    found = accepted(buffer, last, coarse, full, Drafting(12), [])
    wanted = [one_by_one(model, *each) for each in zip(some, coarse, full, strict=True)]
    assert found == wanted
    assert found[0] == 12
    assert min(found) < 12


def test_sampled_drafts_on_the_same_cache_are_all_accepted(model: Any):
    some = prompts(3)
    full = prefill(model, SHAPE, some)
    buffer = BatchBuffer(model, SHAPE, len(some), 40 + 12)
    last = torch.tensor([ids[-1] for ids in some])
    assert accepted(buffer, last, full, full, Drafting(12, 0.7), []) == [12] * 3


def test_sampled_drafts_stand_as_often_as_the_distributions_overlap(model: Any):
    """The first draft stands with probability Σ min(p, q), whatever is drawn."""
    (ids,) = prompts(1)
    (full,) = prefill(model, SHAPE, [ids])
    coarse = coarsened(full, 1.0)
    sampler = Sampler(0.7)
    chances = []
    for kv in (coarse, full):
        step = reference.decode(model, kv, ids, 1, keep_logits=True)
        assert step.logits is not None
        chances.append(sampler.distribution(step.logits[0]))
    overlap = float(torch.minimum(*chances).sum())
    count = 400
    buffer = BatchBuffer(model, SHAPE, count, 41)
    last = torch.tensor([ids[-1]] * count)
    runs = accepted(buffer, last, [coarse] * count, [full] * count, Drafting(1, 0.7), [])
    assert 0.2 < overlap < 0.9
    assert np.mean(runs) == pytest.approx(overlap, abs=0.08)  # three standard errors


def test_stop_tokens_are_never_drafted(model: Any):
    some = prompts(2)
    full = prefill(model, SHAPE, some)
    buffer = BatchBuffer(model, SHAPE, 2, 40 + 12)
    last = torch.tensor([ids[-1] for ids in some])
    first = reference.decode(model, full[0], some[0], 1).tokens
    assert accepted(buffer, last, full, full, Drafting(12), first) == [12, 12]


def test_an_interval_holds_its_statistic_and_shrinks_with_prompts():
    rng = np.random.default_rng(0)
    few, many = rng.integers(0, 65, 20), rng.integers(0, 65, 2000)
    for statistic in drafts.STATISTICS:
        value, low, high = drafts.interval(many, statistic)
        assert low <= value <= high
    narrow, wide = (np.diff(drafts.interval(values)[1:])[0] for values in (many, few))
    assert narrow < wide / 5
    assert drafts.interval(np.full(30, 64), "all 64") == (100, 100, 100)


def test_prompts_are_many_of_each_kind_and_of_no_tuning_text():
    found = draft_prompts()
    kinds = [p.kind for p in found]
    assert len(found) == 7 * PER_KIND
    assert all(kinds.count(kind) == PER_KIND for kind in kinds)
    assert len(set(kinds[:7])) == 7
    assert len({p.text for p in found}) > 0.95 * len(found)
    tuned = [text() for text in TUNING.values()]
    for p in found:
        assert not any(p.text[500:700] in text for text in tuned), p.source
    assert not set(TUNING) & set(HELD_OUT)


class Characters:
    """A tokenizer: one token a character."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(c) % (VOCAB - 2) for c in text]}


@pytest.mark.parametrize("mode", ["table", "ablate", "frontier", "drafts"])
def test_every_mode_runs_and_is_reported(
    mode: str, model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(drafts, "PROMPT_TOKENS", 64)
    monkeypatch.setattr(drafts, "MAX_DRAFTS", 4)
    tokens = Characters()
    known = calibrate(model, tokens(TUNING["chat"]()[:200])["input_ids"])
    subject = measure.Subject("tiny", model, tokens, known)
    monkeypatch.setattr(measure.Subject, "load", lambda name, device: subject)
    match = {"frontier": "4", "ablate": "adaptive"}.get(mode, "")
    settings = fidelity.Settings(
        mode, texts=("speech",), tokens=96, prompts=14, match=match, slow=False
    )
    done = []
    result = fidelity.measure("tiny", settings, lambda what, total: lambda: done.append(what))
    results = {
        "mode": mode,
        "environment": fidelity.environment(settings),
        "models": {"tiny": json.loads(json.dumps(result))},
    }
    found = dict(report.tables(results["models"]))
    assert done
    assert found
    for table in found.values():
        assert all(len(row) == len(table.heads) for row in table.rows)
        assert table.markdown().count("\n") == len(table.rows) + 1
        assert len(table.rows) >= 2
    if mode in ("frontier", "drafts"):
        plot.plot(results, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    else:
        with pytest.raises(InvalidInputError, match="no figure"):
            plot.plot(results, tmp_path / "plot.png")
