"""Which requests and which engines draft, and which do not. One table, tested and documented.

A feature drafts when stock vLLM's verifying pass treats drafts exactly as decoding would treat the
same tokens. Where it does not, the request's cache is loaded by LMCache as if Lynx did not draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Feature:
    """One row.

    Attributes:
        name: how users know it.
        drafts: whether requests that use it draft.
        why: the reason, in a few words.
        used: whether a request (vLLM's ``Request``) uses it.
        reason: the label in ``lynx_draft_decisions_total`` when it does not draft.
    """

    name: str
    drafts: bool
    why: str
    used: Callable[[Any], bool]
    reason: str = ""


def _sampling(name: str, default: object) -> Callable[[Any], bool]:
    def used(request: Any) -> bool:
        return bool(getattr(request.sampling_params, name, default) != default)

    return used


def _random(request: Any) -> bool:
    return bool(request.sampling_params.temperature > 0)


REBUILT = "vLLM rebuilds the request's row before it verifies"

#: Of requests, in the order in which reasons are looked for.
REQUEST_FEATURES = (
    Feature("pooling", False, "nothing is decoded", lambda r: r.sampling_params is None, "pooling"),
    Feature(
        "structured output",
        False,
        "drafts do not advance the grammar",
        lambda r: r.structured_output_request is not None,
        "structured_output",
    ),
    Feature("min_p", False, "not applied to drafts", _sampling("min_p", 0.0), "min_p"),
    Feature("logit_bias", False, "not applied to drafts", _sampling("logit_bias", None), "bias"),
    Feature(
        "thinking_token_budget",
        False,
        "counts tokens that may be rejected",
        _sampling("thinking_token_budget", None),
        "thinking_budget",
    ),
    Feature(
        "prompt_logprobs",
        False,
        "the prompt is computed in any case",
        _sampling("prompt_logprobs", None),
        "prompt_logprobs",
    ),
    Feature(
        "seed with temperature",
        False,
        "the same seed must give the same tokens, whenever the residual arrives",
        lambda r: _random(r) and r.sampling_params.seed is not None,
        "seed",
    ),
    Feature("LoRA", False, "not tested", lambda r: r.lora_request is not None, "lora"),
    Feature("images, audio", False, "not tested", lambda r: bool(r.mm_features), "multimodal"),
    Feature(
        "prompt embeddings",
        False,
        "chunks are named by tokens",
        lambda r: r.prompt_embeds is not None,
        "prompt_embeds",
    ),
    Feature("streamed input", False, "not tested", lambda r: r.resumable, "streamed_input"),
    Feature("penalties", True, REBUILT, _sampling("repetition_penalty", 1.0)),
    Feature("bad_words", True, REBUILT, _sampling("bad_words", None)),
    Feature("allowed_token_ids", True, REBUILT, _sampling("allowed_token_ids", None)),
    Feature("logprobs", True, "of the verifying pass", _sampling("logprobs", None)),
    Feature("min_tokens", True, REBUILT, _sampling("min_tokens", 0)),
    Feature(
        "stop_token_ids",
        True,
        "a drafted one freezes the request until it is verified",
        _sampling("stop_token_ids", None),
    ),
    Feature("stop", True, "drafts run past it, the output does not", _sampling("stop", None)),
    Feature("n above 1", True, "each sample drafts by itself", _sampling("n", 1)),
    Feature("temperature", True, "rejection sampling keeps the distribution", _random),
)


def why_request_does_not_draft(request: Any) -> str | None:
    """The label of the first feature in the way of a request (vLLM's ``Request``), or None."""
    for feature in REQUEST_FEATURES:
        if not feature.drafts and feature.used(request):
            return feature.reason
    return None


def why_engine_does_not_draft(config: Any, kv_cache: Any) -> str | None:
    """What about an engine keeps all its requests from drafting, as a sentence; None: nothing.

    Args:
        config: ``VllmConfig``.
        kv_cache: ``KVCacheConfig``.
    """
    kinds = {type(group.kv_cache_spec).__name__ for group in kv_cache.kv_cache_groups}
    parallel = config.parallel_config
    reasons = {
        f"its cache is of {', '.join(sorted(kinds))}: only full attention can be rewound": (
            kinds != {"FullAttentionSpec"} or len(kv_cache.kv_cache_groups) != 1
        ),
        "it has a sliding window": any(
            getattr(group.kv_cache_spec, name, None)
            for group in kv_cache.kv_cache_groups
            for name in ("sliding_window", "attention_chunk_size")
        ),
        "it has a speculative_config of its own": config.speculative_config is not None,
        "custom logits processors are not applied to drafts": bool(
            config.model_config.logits_processors
        ),
        "it runs pipeline or context parallel": (
            parallel.pipeline_parallel_size > 1
            or parallel.decode_context_parallel_size > 1
            or parallel.prefill_context_parallel_size > 1
        ),
        "it counts speculation per request": (
            config.observability_config.per_request_spec_decode_metrics != "none"
        ),
    }
    return next((why for why, true in reasons.items() if true), None)
