"""What progressive decode costs a vLLM on the CPU in which nothing drafts.

    .venv-vllm/bin/python benchmarks/vllm_cost.py --out out/vllm-cost.json

Two processes with the same configuration differ by 4 % here, and so do two rounds of one process,
as the machine has other work. So it is one engine, whose parts are taken out and put in between
steps: vLLM with LMCache and Lynx's plugin; with Lynx's connector, scheduler and worker as well,
drafting never, or where it pays. Each has one of three steps in a row, in an order drawn anew.
Prompts are shorter than a chunk, so that nothing is stored or loaded, and what is left is what the
parts cost by being there. Shown are the median step, its ratio to that without Lynx's parts, and
where the ratio lies with a probability of 95 % (bootstrap).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from lynx_backend.integrations.vllm_request import (
    PROGRESSIVE_CONNECTOR,
    PROGRESSIVE_ENGINE,
    lmcache_with_lynx,
)

BASE = "LMCache, Lynx's plugin"
CONTESTANTS = (BASE, "drafting never", "drafting where it pays")


class Engine:
    """vLLM in this process, as each contestant in turn."""

    def __init__(self, model: str) -> None:
        from vllm import EngineArgs, LLMEngine

        arguments = EngineArgs(
            model=model,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=16,
            block_size=32,
            kv_cache_memory_bytes=1 << 29,
            enforce_eager=True,
            disable_log_stats=False,
            kv_transfer_config=PROGRESSIVE_CONNECTOR,
            **PROGRESSIVE_ENGINE,
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        # Only now: vLLM does not start where numba or LMCache were imported before.
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.v1.core.sched.scheduler import Scheduler

        from lynx_backend.integrations.lmcache_cpu import LMCacheConnectorCPU

        core: Any = self.engine.engine_core
        self._scheduler = core.engine_core.scheduler
        self._requests = self._scheduler.requests
        self._runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        self._parts = {
            self._scheduler: Scheduler,
            self._scheduler.connector: LMCacheConnectorCPU,
            get_kv_transfer_group(): LMCacheConnectorCPU,
        }
        self._lynx = {part: type(part) for part in self._parts}
        names = ("execute_model", "sample_tokens")
        self._methods = {name: vars(self._runner)[name] for name in names}

    def become(self, contestant: str) -> None:
        lynx = contestant != BASE
        for part, stock in self._parts.items():
            part.__class__ = self._lynx[part] if lynx else stock
        for name, method in self._methods.items():
            vars(self._runner).pop(name, None)
            if lynx:
                setattr(self._runner, name, method)
        self._scheduler.connector.armed = contestant == "drafting where it pays"

    def steps(self, prompts: list[list[int]], new: int) -> list[dict[str, float]]:
        """Seconds of decode steps of all requests, three in a row, one as each contestant."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            self.engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        while any(request.num_output_tokens == 0 for request in self._requests.values()):
            self.engine.step()
        found = []
        for _ in range((new - 2) // len(CONTESTANTS)):
            triple = {}
            for name in random.sample(CONTESTANTS, len(CONTESTANTS)):
                self.become(name)
                start = time.perf_counter()
                self.engine.step()
                triple[name] = time.perf_counter() - start
            found.append(triple)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.engine.step()  # requests that ended are noticed in the next step
        return found


def ratio(steps: list[dict[str, float]], name: str) -> tuple[float, float, float]:
    """Of median steps, to :data:`BASE`: the ratio and the ends of its interval."""
    times = np.array([[each[name], each[BASE]] for each in steps])
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(1000):
        mine, base = np.median(times[rng.integers(len(times), size=len(times))], axis=0)
        drawn.append(mine / base)
    mine, base = np.median(times, axis=0)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(mine / base), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/vllm-cost.json"))
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3, or a folder")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--new", type=int, default=256)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    from lynx_backend.models import model_folder

    with tempfile.TemporaryDirectory(prefix="lynx-bench-") as folder:
        settings = Path(folder) / "lmcache.yaml"
        lynx = {"memory": {"max_bytes": "64MiB"}}
        settings.write_text(json.dumps(lmcache_with_lynx(lynx)))  # JSON is YAML
        os.environ.update(
            HF_HUB_OFFLINE="1",
            LMCACHE_CONFIG_FILE=str(settings),
            LMCACHE_LOG_LEVEL="WARNING",
            LMCACHE_TRACK_USAGE="false",
            OMP_NUM_THREADS="1",
            PYTHONHASHSEED="0",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_LOGGING_LEVEL="WARNING",
            VLLM_NO_USAGE_STATS="1",
        )
        engine = Engine(str(model_folder(args.model)))
        random.seed(0)
        steps = []
        for i in range(args.rounds + 1):
            prompts = [random.choices(range(1000, 9000), k=32) for _ in range(args.requests)]
            found = engine.steps(prompts, args.new)
            steps += found if i else []  # the first round warms up
        engine.become(CONTESTANTS[-1])
        engine.engine.engine_core.shutdown()
    facts = {"machine": platform.platform(), "cpus": os.cpu_count(), "arguments": vars(args)}
    args.out.write_text(json.dumps({**facts, "steps": steps}, indent=1, default=str))
    print(f"{len(steps)} times three steps of {args.requests} requests")
    for name in CONTESTANTS:
        median = statistics.median(each[name] for each in steps)
        mid, low, high = ratio(steps, name)
        print(f"{name:24}{median * 1e3:8.3f} ms{mid:9.4f} ({low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
