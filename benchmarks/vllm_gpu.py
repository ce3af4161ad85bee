"""How fast LMCache inside a vLLM on a GPU loads a long prompt's cache, from Lynx or from its own.

    python benchmarks/vllm_gpu.py lynx-nvme          # or lynx-memory, lmcache-cpu, lmcache-disk

One process and one contestant: stores the cache of a prompt, has vLLM forget it and loads it again,
some times over, and prints one line of JSON. The model has random weights: 16 layers, 8 KV heads of
128, 64 KiB of cache for each token. Times are of ``LMCacheEngine.retrieve``, from one
synchronization with the GPU to the next. Needs vLLM (0.24 ran) and LMCache (0.5.3 ran).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

LAYERS, HEADS, HEAD_DIM = 16, 8, 128
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * 2
PLUGIN = {
    "storage_plugin.lynx.module_path": "lynx_backend.integrations.lmcache_plugin",
    "storage_plugin.lynx.class_name": "LynxBackend",
}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def settings(contestant: str, folder: Path) -> dict[str, Any]:
    """LMCache's configuration."""
    found: dict[str, Any] = {"chunk_size": 256, "local_cpu": False, "max_local_cpu_size": 8}
    nvme = {"path": str(folder), "max_bytes": "8GiB", "min_free_bytes": 0}
    lynx: dict[str, Any] = {
        "lynx-memory": {"memory": {"max_bytes": "8GiB"}},
        "lynx-nvme": {"memory": {"enabled": False}, "nvme": nvme},
    }
    if contestant in lynx:
        extra = {**PLUGIN, "lynx": lynx[contestant]}
        return {**found, "storage_plugins": ["lynx"], "extra_config": extra}
    if contestant == "lmcache-disk":
        return {**found, "local_disk": f"file://{folder}/", "max_local_disk_size": 8}
    return {**found, "local_cpu": True}


def timed_calls() -> dict[str, list[tuple[int, float]]]:
    """From now on, (tokens, seconds) of every call of LMCache's engine, by method."""
    import torch
    from lmcache.v1.cache_engine import LMCacheEngine

    calls: dict[str, list[tuple[int, float]]] = {"store": [], "retrieve": []}

    def time_method(name: str) -> None:
        method = getattr(LMCacheEngine, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            start = time.perf_counter()
            result = method(self, *args, **kwargs)
            torch.cuda.synchronize()
            tokens = 0 if result is None else int(result.sum())
            calls[name].append((tokens, time.perf_counter() - start))
            return result

        setattr(LMCacheEngine, name, call)

    for name in calls:
        time_method(name)
    return calls


def measure(contestant: str, model: Path, tokens: int, rounds: int) -> dict[str, Any]:
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="LMCacheConnectorV1", kv_role="kv_both", kv_load_failure_policy="recompute"
    )
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=tokens + 512,
        gpu_memory_utilization=0.4,
        kv_transfer_config=transfer,
        disable_log_stats=False,
        seed=0,
    )
    calls = timed_calls()
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)

    def ask(ids: list[int]) -> tuple[list[int], int, float]:
        (out,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        return (
            list(out.outputs[0].token_ids),
            out.num_cached_tokens,
            out.metrics.first_token_latency,
        )

    draw = random.Random(1)
    warm_up = [draw.randrange(3, 32000) for _ in range(2048)]
    prompt = [draw.randrange(3, 32000) for _ in range(tokens + 100)]
    ask(warm_up)
    (engine,) = LMCacheEngineBuilder._instances.values()
    lynx = engine.storage_manager.storage_backends.get("lynx")

    def flush() -> None:
        if lynx is None:
            time.sleep(4)
        elif not lynx.flush(120):
            raise SystemExit("Lynx did not write everything within 120 s")

    flush()
    llm.reset_prefix_cache()
    ask(warm_up)  # compiles, pins memory and opens files
    for each in calls.values():
        each.clear()
    cold_tokens, _, cold_seconds = ask(prompt)
    store_seconds = sum(seconds for _, seconds in calls["store"])
    flush()
    loaded = []
    for _ in range(rounds):
        llm.reset_prefix_cache()
        calls["retrieve"].clear()
        new, cached, first = ask(prompt)
        hits = [call for call in calls["retrieve"] if call[0]]
        loaded.append(
            {
                "tokens": sum(count for count, _ in hits),
                "seconds": sum(seconds for _, seconds in hits),
                "cached": cached,
                "first_token_seconds": first,
                "same": sum(a == b for a, b in zip(new, cold_tokens, strict=True)),
            }
        )
    if not all(each["tokens"] for each in loaded):
        raise SystemExit(f"nothing was loaded from {contestant}: see the log above")
    found = {
        "contestant": contestant,
        "prompt": len(prompt),
        "cold_first_token_seconds": cold_seconds,
        "store_seconds": store_seconds,
        "rounds": loaded,
        "raw_gb_per_second": statistics.median(
            each["tokens"] * TOKEN_BYTES / each["seconds"] / 1e9 for each in loaded
        ),
        "first_token_seconds": statistics.median(each["first_token_seconds"] for each in loaded),
    }
    if lynx is not None:
        from lynx_backend import metrics

        found["written"] = metrics.counts("lynx_bytes_total", "tier", direction="in")
        found["errors"] = metrics.counts("lynx_errors_total", "kind")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = ["lmcache-cpu", "lmcache-disk", "lynx-memory", "lynx-nvme"]
    parser.add_argument("contestant", choices=names)
    parser.add_argument("--tokens", type=int, default=16384, help="of the prompt, whole chunks")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lynx-vllm-gpu-") as text:
        folder = Path(text)
        model, kept = folder / "model", folder / "kept"
        model.mkdir()
        kept.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        config = folder / "lmcache.yaml"
        config.write_text(json.dumps(settings(given.contestant, kept)))  # JSON is YAML
        os.environ |= {
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_CONFIG_FILE": str(config),
        }
        print(json.dumps(measure(given.contestant, model, given.tokens, given.rounds)), flush=True)
    # LMCache's threads would keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
