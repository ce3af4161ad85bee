"""One long prompt on vLLM on the CPU whose cache comes over a link of a set rate: wait or draft.

    .venv-vllm/bin/python benchmarks/vllm_draft.py --out out/vllm-draft

The same request, at each rate several times in turn: it waits for its residual, drafts in any case,
or drafts where that pays. Shown are medians of when a client gets its first and its last token, and
of the seconds that Lynx says were gained beside those that it really had less to wait for its last
token. Every request's timeline is in the folder traces, for ``lynx trace``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from lynx_backend.integrations.vllm_request import (
    PROGRESSIVE_CONNECTOR,
    PROGRESSIVE_ENGINE,
    lmcache_with_lynx,
)

RATES = (25, 100, 400, 1600)  # Mbit/s
NEW = 64


class Engine:
    """vLLM in this process, with one prompt in its store."""

    def __init__(self, model: str, out: Path, prompt_tokens: int) -> None:
        settings = out / "lmcache.yaml"
        lynx = {"memory": {"max_bytes": "512MiB"}}
        settings.write_text(json.dumps(lmcache_with_lynx(lynx)))  # JSON is YAML
        os.environ["LMCACHE_CONFIG_FILE"] = str(settings)
        from vllm import EngineArgs, LLMEngine

        from lynx_backend.models import model_folder

        arguments = EngineArgs(
            model=str(model_folder(model)),
            dtype="float32",
            max_model_len=2048,
            max_num_seqs=8,
            block_size=32,
            kv_cache_memory_bytes=1 << 30,
            enforce_eager=True,
            disable_log_stats=False,
            kv_transfer_config={
                **PROGRESSIVE_CONNECTOR,
                "kv_connector_extra_config": {
                    "lynx.residual_seconds": 120,
                    "lynx.trace_dir": str(out / "traces"),
                },
            },
            **PROGRESSIVE_ENGINE,
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        # Only now: vLLM does not start where numba or LMCache were imported before.
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from lynx_backend.integrations.lmcache_plugin import LynxBackend
        from lynx_backend.texts import default_text
        from lynx_backend.texts import prompt_tokens as tokens_of

        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.worker: Any = get_kv_transfer_group()
        managed = self.worker._lmcache_engine.lmcache_engine.storage_manager.storage_backends
        self.lynx = next(each for each in managed.values() if isinstance(each, LynxBackend))
        self.prompt = tokens_of(self.engine.get_tokenizer(), default_text(), prompt_tokens)
        self.ask("store", 1)
        assert self.lynx._puts.flush(60.0)

    def set_rate(self, megabits: int) -> None:
        from lynx_backend.store import StoredObjects
        from lynx_backend.transport.local import LocalTransport

        self.worker._loads.transport.close()
        source = StoredObjects(self.lynx.store)
        self.worker._loads.transport = LocalTransport(source, megabits * 1e6 / 8)

    def ask(self, name: str, new: int) -> tuple[list[int], list[float]]:
        """The new tokens, and for each the seconds after which a client has it."""
        from vllm import SamplingParams

        for _ in range(3):
            self.engine.step()  # requests that ended are noticed in the next step
        assert self.engine.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        began = time.monotonic()
        self.engine.add_request(name, {"prompt_token_ids": self.prompt}, params)
        times: list[float] = []
        tokens: list[int] = []
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                tokens = list(output.outputs[0].token_ids)
                times += [time.monotonic() - began] * (len(tokens) - len(times))
        return tokens, times


def measure(engine: Engine, rounds: int) -> list[dict[str, Any]]:
    from lynx_backend.integrations.vllm.policy import Policy

    class Waits(Policy):
        def drafts(self, wait: float, rest: int, others: int) -> int:
            return 0

    policies = {"waits": Waits("auto"), "always": Policy("always"), "auto": Policy("auto")}
    stats = engine.scheduler._stats
    told: list[float] = []
    note = stats.verified
    stats.verified = lambda gained, lead: (told.append(gained), note(gained, lead))
    for _ in range(3):  # what a step takes is measured before anything is decided
        for policy in policies.values():
            engine.scheduler.policy = policy
            engine.ask("warm", 24)
    rows = []
    for rate in RATES:
        engine.set_rate(rate)
        for round_ in range(rounds):
            for name, policy in policies.items():
                engine.scheduler.policy = policy
                told.clear()
                tokens, times = engine.ask(f"{rate}-{name}-{round_}", NEW)
                gained = told[0] if told else 0.0
                row = {"rate": rate, "name": name, "first": times[0], "last": times[-1]}
                rows.append({**row, "told": gained, "tokens": tokens, "step": policy.step})
                print(rate, name, f"{times[0]:.2f} {times[-1]:.2f} told {gained:.2f}", flush=True)
    assert all(row["tokens"] == rows[0]["tokens"] for row in rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/vllm-draft"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1300)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(
        HF_HUB_OFFLINE="1",
        LMCACHE_LOG_LEVEL="WARNING",
        LMCACHE_TRACK_USAGE="false",
        PYTHONHASHSEED="0",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        VLLM_NO_USAGE_STATS="1",
    )
    engine = Engine(args.model, args.out, args.tokens)
    rows = measure(engine, args.rounds)
    engine.engine.engine_core.shutdown()
    facts = {"machine": platform.platform(), "cpus": os.cpu_count(), "arguments": vars(args)}
    text = json.dumps({**facts, "rows": rows}, indent=1, default=str)
    (args.out / "vllm-draft.json").write_text(text)
    print(f"\n{'Mbit/s':>8}  {'':8}{'first':>8}{f'{NEW}th':>8}{'told':>8}{'really':>8}")
    for rate in RATES:
        mine = [row for row in rows if row["rate"] == rate]

        def median(name: str, what: str, mine: Any = mine) -> float:
            return statistics.median(row[what] for row in mine if row["name"] == name)

        for name in ("waits", "always", "auto"):
            really = median("waits", "last") - median(name, "last")
            shown = "".join(f"{median(name, what):8.2f}" for what in ("first", "last", "told"))
            print(f"{rate:8}  {name:8}{shown}{really:8.2f}")


if __name__ == "__main__":
    main()
