"""One vLLM engine in a process of its own: requests in, numbers out. For demos, tests, benchmarks.

``python -m lynx_backend.integrations.vllm_request JOB RESULT``, both JSON files. :func:`run` starts
it. The job is what :class:`Job` says, the result one mapping for each prompt, see :class:`Answer`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import metrics
from ..errors import UnsupportedError

#: What vLLM is told to load LMCache with on a CPU.
CPU_CONNECTOR = {
    "kv_connector": "LMCacheConnectorCPU",
    "kv_connector_module_path": "lynx_backend.integrations.lmcache_cpu",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
#: The same for progressive decode, and the arguments that the engine needs for it.
PROGRESSIVE_CONNECTOR = {
    **CPU_CONNECTOR,
    "kv_connector": "LynxConnector",
    "kv_connector_module_path": "lynx_backend.integrations.vllm.connector",
}
PROGRESSIVE_ENGINE = {
    "async_scheduling": False,
    "scheduler_cls": "lynx_backend.integrations.vllm.scheduler.LynxScheduler",
    "worker_cls": "lynx_backend.integrations.vllm.worker.LynxWorker",
}
_WARM_UP = [1] * 40  # too short for LMCache to store


def lmcache_with_lynx(lynx: object) -> dict[str, Any]:
    """LMCache's configuration with Lynx, set up by ``lynx``, and nothing in its own memory."""
    return {
        "chunk_size": 256,
        "local_cpu": False,
        "max_local_cpu_size": 0.5,
        "storage_plugins": ["lynx"],
        "extra_config": {
            "storage_plugin.lynx.module_path": "lynx_backend.integrations.lmcache_plugin",
            "storage_plugin.lynx.class_name": "LynxBackend",
            "lynx": lynx,
        },
    }


@dataclass
class Job:
    """What one process does.

    Attributes:
        model: folder of the model.
        prompts: token ids of each, one request after the other.
        new_tokens: to generate for each, greedily.
        transfer: vLLM's ``KVTransferConfig``; None for vLLM alone.
        lmcache: LMCache's configuration, as in its file.
        environment: further variables of the process.
        passes: how often all prompts are asked; in between vLLM forgets its own cache.
        logprobs: whether to keep the whole distribution of every new token of the last pass.
        ranks: tensor parallel processes. With several, Lynx's metrics are theirs, and not counted.
        settle_seconds: time to let LMCache finish its writes in after each pass. Then the process
            ends by force, as LMCache without Lynx does not end by itself. With 0 it ends as any.
        engine: further arguments of vLLM's engine.
        device: network device whose traffic is counted.
    """

    model: str
    prompts: list[list[int]]
    new_tokens: int = 32
    transfer: dict[str, Any] | None = None
    lmcache: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    passes: int = 1
    logprobs: bool = False
    ranks: int = 1
    settle_seconds: float = 0.0
    engine: dict[str, Any] = field(default_factory=dict)
    device: str | None = None


@dataclass
class Answer:
    """What came of one request.

    Attributes:
        tokens: the new ones.
        first_token_seconds: from the request's arrival.
        cached_tokens: of the prompt, from wherever.
        external_hits: tokens of all prompts so far that the connector gave.
        own_hits: tokens of all prompts so far that vLLM had itself.
        store_seconds, retrieve_seconds: for how long LMCache kept the engine waiting.
        token_seconds: from the request's arrival to when each token could be shown.
        draft_seconds: the same for each draft, which nobody is shown.
        received_bytes: that came in over the network device ``Job.device`` meanwhile.
        logprobs: [new tokens, vocabulary], if asked for.
    """

    tokens: list[int]
    first_token_seconds: float
    cached_tokens: int
    external_hits: int
    own_hits: int
    store_seconds: float
    retrieve_seconds: float
    token_seconds: list[float]
    draft_seconds: list[float]
    received_bytes: int
    logprobs: list[list[float]] | None = None


@dataclass
class Result:
    """What came of a job.

    Attributes:
        answers: one for each prompt, pass by pass.
        written: bytes put into each of Lynx's tiers.
        errors: of Lynx, by kind.
        drafts: of Lynx, by what became of them.
    """

    answers: list[Answer]
    written: dict[str, int]
    errors: dict[str, int]
    drafts: dict[str, int]


def run(
    job: Job,
    seconds: float = 600.0,
    log: Path | None = None,
    python: str = sys.executable,
    prefix: Sequence[str] = (),
) -> Result:
    """Run a job in a new process.

    Args:
        seconds: most time it may take.
        log: where the process writes what it prints; by default that is shown only if it fails.
        python: of an environment that has vLLM.
        prefix: what starts the command, such as ``ip netns exec NAME``.

    Raises:
        UnsupportedError: it failed, or took too long; the message has the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="lynx-vllm-") as folder:
        paths = [Path(folder) / name for name in ("job.json", "result.json", "lmcache.yaml", "log")]
        given, result, settings, default_log = paths
        given.write_text(json.dumps(asdict(job)))
        settings.write_text(json.dumps(job.lmcache))  # JSON is YAML
        env = {
            **os.environ,
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_CONFIG_FILE": str(settings),
            **job.environment,
        }
        log = log or default_log
        command = [*prefix, python, "-m", __name__, str(given), str(result)]
        with log.open("wb") as out, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, env=env, stdout=out, stderr=out, timeout=seconds)
        if not result.exists():
            tail = log.read_text(errors="replace")[-3000:]
            raise UnsupportedError(f"vLLM did not answer; the end of what it printed:\n{tail}")
        found = json.loads(result.read_text())
        answers = [Answer(**each) for each in found.pop("answers")]
        return Result(answers, **found)


def _main(job: Job) -> Result:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=job.model,
        dtype="float32",  # bfloat16 is many times slower on CPUs without instructions for it
        max_model_len=max(map(len, job.prompts)) + job.new_tokens + 1,
        enforce_eager=True,
        tensor_parallel_size=job.ranks,
        disable_log_stats=False,
        max_logprobs=-1 if job.logprobs else 20,
        kv_transfer_config=KVTransferConfig(**job.transfer) if job.transfer else None,
        **job.engine,
    )
    waited = _time_lmcache() if job.transfer else {"store": 0.0, "retrieve": 0.0}
    short = SamplingParams(temperature=0, max_tokens=2)
    llm.generate([{"prompt_token_ids": _WARM_UP}], short, use_tqdm=False)
    answers: list[Answer] = []
    for number in range(job.passes):
        if number:
            llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0, max_tokens=job.new_tokens, ignore_eos=True)
        with_logprobs = job.logprobs and number == job.passes - 1
        if with_logprobs:
            sampling.logprobs, sampling.flat_logprobs, sampling.detokenize = -1, True, False
        for prompt in job.prompts:
            before = dict(waited)
            received = _received(job.device)
            out, shown, drafted = _ask(llm, prompt, sampling)
            counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
            answers.append(
                Answer(
                    tokens=list(out.outputs[0].token_ids),
                    first_token_seconds=out.metrics.first_token_latency,
                    cached_tokens=out.num_cached_tokens,
                    external_hits=int(counts["vllm:external_prefix_cache_hits"]),
                    own_hits=int(counts["vllm:prefix_cache_hits"]),
                    store_seconds=waited["store"] - before["store"],
                    retrieve_seconds=waited["retrieve"] - before["retrieve"],
                    token_seconds=shown,
                    draft_seconds=drafted,
                    received_bytes=_received(job.device) - received,
                    logprobs=_logprobs(out.outputs[0].logprobs) if with_logprobs else None,
                )
            )
        _flush()
        time.sleep(job.settle_seconds)
    written = metrics.counts("lynx_bytes_total", "tier", direction="in")
    return Result(
        answers,
        written,
        errors=metrics.counts("lynx_errors_total", "kind"),
        drafts=metrics.counts("lynx_draft_tokens_total", "result"),
    )


def _ask(llm: Any, prompt: list[int], sampling: Any) -> tuple[Any, list[float], list[float]]:
    """One request's output, and when each of its tokens and drafts was there."""
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    drafting = getattr(scheduler.connector, "drafting", {})
    shown: list[float] = []
    drafted: list[float] = []
    start = time.monotonic()
    engine.add_request(uuid.uuid4().hex, {"prompt_token_ids": prompt}, sampling)
    out = None
    while engine.has_unfinished_requests():
        found = engine.step()
        now = time.monotonic() - start
        for out in found:
            shown += [now] * (len(out.outputs[0].token_ids) - len(shown))
        for name in drafting:
            drafted += [now] * (scheduler.requests[name].num_output_tokens - len(drafted))
    return out, shown, drafted


def _received(device: str | None) -> int:
    path = f"/sys/class/net/{device}/statistics/rx_bytes"
    return 0 if device is None else int(Path(path).read_text())


def _time_lmcache() -> dict[str, float]:
    """From now on, the seconds spent in LMCache's engine, by method."""
    from lmcache.v1.cache_engine import LMCacheEngine

    spent = {"store": 0.0, "retrieve": 0.0}

    def timed(name: str) -> None:
        method = getattr(LMCacheEngine, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - start

        setattr(LMCacheEngine, name, call)

    for name in spent:
        timed(name)
    return spent


def _logprobs(found: Any) -> list[list[float]]:
    """vLLM's flat lists, in which each position has the whole vocabulary by rank, in its order."""
    rows = []
    for start, end in zip(found.start_indices, found.end_indices, strict=True):
        by_token = dict(zip(found.token_ids[start:end], found.logprobs[start:end], strict=True))
        rows.append([by_token[token] for token in range(len(by_token))])
    return rows


def _flush() -> None:
    """Wait for what Lynx, if LMCache loaded it, has still to write, so that it is counted."""
    from lmcache.v1.cache_engine import LMCacheEngineBuilder

    from .lmcache_plugin import LynxBackend

    for engine in LMCacheEngineBuilder._instances.values():
        for backend in engine.storage_manager.storage_backends.values():
            if isinstance(backend, LynxBackend):
                backend.flush(60.0)


if __name__ == "__main__":
    _job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    _result = _main(_job)
    Path(sys.argv[2]).write_text(json.dumps(asdict(_result)))
    if _job.settle_seconds:
        os._exit(0)
