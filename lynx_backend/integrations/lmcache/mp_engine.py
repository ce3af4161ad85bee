"""One vLLM engine behind an LMCache server, in a process of its own: what demo and benchmark run.

Reads a job as JSON from its standard input, answers each prompt, and writes one line of JSON to
file descriptor 3. vLLM and LMCache log to the standard output and error as they like.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Answer prompts.

    Args:
        job: ``model`` (folder), ``prompts`` (token ids each), ``max_tokens``, ``block_size``,
            ``server`` (host and port of LMCache's server, or None for an engine without a cache),
            and optionally ``wait_for`` (a file: written ones are waited for between prompts).

    Returns:
        ``answers``: per prompt its ``tokens``, ``cached`` (prompt tokens not computed),
        ``first_seconds`` (time to the first token); and the engine's own counters.
    """
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = None
    if job["server"] is not None:
        host, port = job["server"]
        transfer = KVTransferConfig(
            kv_connector="LMCacheMPConnectorCPU",
            kv_connector_module_path="lynx_backend.integrations.lmcache_mp_cpu",
            kv_role="kv_both",
            kv_connector_extra_config={
                "lmcache.mp.host": f"tcp://{host}",
                "lmcache.mp.port": port,
            },
        )
    engine = LLM(
        model=job["model"],
        dtype="float32",
        max_model_len=job["max_model_len"],
        block_size=job["block_size"],
        enforce_eager=True,
        kv_transfer_config=transfer,
        disable_log_stats=False,
        max_num_batched_tokens=job["max_model_len"],
        max_num_seqs=4,
    )
    # What is compiled or allocated once must not count as a prompt's time.
    engine.generate({"prompt_token_ids": [1] * 8}, SamplingParams(max_tokens=2, temperature=0))
    answers = [_answer(engine, prompt, job["max_tokens"]) for prompt in job["prompts"]]
    counters = {
        metric.name: metric.value
        for metric in engine.get_metrics()
        if "prefix_cache" in metric.name and hasattr(metric, "value")
    }
    return {"answers": answers, "counters": counters}


def _answer(engine: Any, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    (output,) = engine.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    stats = output.metrics
    first = None if stats is None else getattr(stats, "first_token_latency", None)
    return {
        "tokens": list(output.outputs[0].token_ids),
        "cached": output.num_cached_tokens,
        "first_seconds": first,
        "seconds": seconds,
    }


if __name__ == "__main__":
    result = run(json.load(sys.stdin))
    with os.fdopen(3, "w") as out:
        json.dump(result, out)
