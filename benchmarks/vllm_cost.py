"""What progressive decode costs a vLLM on the CPU in which nothing drafts, side by side.

    .venv-vllm/bin/python benchmarks/vllm_cost.py --out out/vllm-cost.json

Four engines, each in a process of its own, take turns in every round, in an order that rotates:
vLLM alone, with LMCache and Lynx's plugin, and with Lynx's connector, scheduler and worker as well,
drafting never or where it pays. Prompts are new in each round and shorter than a chunk, so that
nothing is stored or loaded and what is left is what the parts cost by being there. The machine is
noisy, so what is reported are ratios to LMCache with the plugin in the same round, their median and
quartiles: of the round's time, of the process's CPU time, and of the median step's time, which the
machine's other work disturbs least.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lynx_backend.integrations.vllm_request import CPU_CONNECTOR
from lynx_backend.models import model_folder

PLUGIN = {
    "storage_plugin.lynx.module_path": "lynx_backend.integrations.lmcache_plugin",
    "storage_plugin.lynx.class_name": "LynxBackend",
    "lynx": {"memory": {"max_bytes": "64MiB"}},
}
LMCACHE = {
    "chunk_size": 256,
    "local_cpu": False,
    "max_local_cpu_size": 0.5,
    "storage_plugins": ["lynx"],
    "extra_config": PLUGIN,
}
BASE = "LMCache with Lynx's plugin"


def progressive(draft: str) -> dict[str, Any]:
    return {
        "async_scheduling": False,
        "scheduler_cls": "lynx_backend.integrations.vllm.scheduler.LynxScheduler",
        "worker_cls": "lynx_backend.integrations.vllm.worker.LynxWorker",
        "kv_transfer_config": {
            **CPU_CONNECTOR,
            "kv_connector": "LynxConnector",
            "kv_connector_module_path": "lynx_backend.integrations.vllm.connector",
            "kv_connector_extra_config": {"lynx.draft": draft},
        },
    }


CONTESTANTS: dict[str, dict[str, Any]] = {
    "vLLM alone": {"async_scheduling": False},
    BASE: {"async_scheduling": False, "kv_transfer_config": CPU_CONNECTOR},
    "drafting never": progressive("never"),
    "drafting where it pays": progressive("auto"),
}


# -- a process with an engine ----------------------------------------------------------------------


def serve(name: str, model: str) -> None:
    """Answer rounds from standard input; each is a list of prompts and a number of new tokens."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        block_size=32,
        kv_cache_memory_bytes=1 << 29,
        enforce_eager=True,
        disable_log_stats=False,
        **CONTESTANTS[name],
    )
    engine = llm.llm_engine
    say({"ready": name})
    for line in sys.stdin:
        prompts, new = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        steps: list[float] = []
        began, used = time.perf_counter(), time.process_time()
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - start)
        took, used = time.perf_counter() - began, time.process_time() - used
        say({"seconds": took, "cpu_seconds": used, "step_seconds": statistics.median(steps)})
    engine.engine_core.shutdown()


def say(what: dict[str, Any]) -> None:
    print("SAYS", json.dumps(what), flush=True)


class Engine:
    """Such a process."""

    def __init__(self, name: str, model: str, settings: Path, log: Path) -> None:
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "LMCACHE_CONFIG_FILE": str(settings),
            "LMCACHE_LOG_LEVEL": "WARNING",
            "LMCACHE_TRACK_USAGE": "false",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name, "--model", model],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        self.hear()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("SAYS "):
                said: dict[str, Any] = json.loads(line.removeprefix("SAYS "))
                return said
        raise SystemExit("an engine ended; see its log")

    def ask(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompts, new]) + "\n")
        self._process.stdin.flush()
        return self.hear()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


# -- the comparison --------------------------------------------------------------------------------


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    settings = folder / "lmcache.yaml"
    settings.write_text(json.dumps(LMCACHE))  # JSON is YAML
    model = str(model_folder(args.model))
    logs = args.out.parent
    engines = {
        name: Engine(name, model, settings, logs / f"{args.out.stem}-{i}.log")
        for i, name in enumerate(CONTESTANTS)
    }
    rng = random.Random(0)
    rounds: list[dict[str, Any]] = []
    names = list(engines)
    for i in range(args.rounds + 1):
        prompts = [[rng.randrange(1000, 9000) for _ in range(32)] for _ in range(args.requests)]
        order = names[i % len(names) :] + names[: i % len(names)]
        found = {name: engines[name].ask(prompts, args.new) for name in order}
        if i:  # the first one warms up
            rounds.append(found)
            print(f"round {i}:", {n: round(f["seconds"], 2) for n, f in found.items()}, flush=True)
    for engine in engines.values():
        engine.close()
    return {"rounds": rounds, "ratios": ratios(rounds)}


def ratios(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each contestant to :data:`BASE` in the same round: quartiles."""
    found: dict[str, Any] = {}
    for name in CONTESTANTS:
        found[name] = {}
        for what in ("seconds", "cpu_seconds", "step_seconds"):
            each = [round_[name][what] / round_[BASE][what] for round_ in rounds]
            found[name][what] = statistics.quantiles(each, n=4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/vllm-cost.json"))
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3, or a folder")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, args.model)
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lynx-bench-") as folder:
        result = compare(args, Path(folder))
    facts = {"machine": platform.platform(), "cpus": os.cpu_count(), "arguments": vars(args)}
    args.out.write_text(json.dumps({**facts, **result}, indent=1, default=str))
    print(f"\n{'of ' + BASE:30}{'time':>22}{'CPU time':>27}{'median step':>27}")
    for name, found in result["ratios"].items():
        shown = "".join(
            f"   {mid:7.4f} ({low:.3f} to {high:.3f})" for low, mid, high in found.values()
        )
        print(f"{name:30}{shown}")


if __name__ == "__main__":
    main()
