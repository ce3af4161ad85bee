"""One stock vLLM engine in this process with progressive decode on, whose residuals tests hold."""

from __future__ import annotations

import _vllm_environment  # noqa: F401  # isort: skip

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from prometheus_client import REGISTRY
from vllm import EngineArgs, LLMEngine, SamplingParams

from lynx_backend.integrations.vllm_request import (
    PROGRESSIVE_CONNECTOR,
    PROGRESSIVE_ENGINE,
    lmcache_with_lynx,
)

CHUNK = 256
WAIT = 60.0
#: Name -> tokens: a rest that is computed, a long rest, and a prompt that is stored whole.
LENGTHS = {"short rest": 530, "long rest": 700, "whole": 512}


def decisions(reason: str) -> float:
    """Of ``lynx_draft_decisions_total``."""
    return REGISTRY.get_sample_value("lynx_draft_decisions_total", {"reason": reason}) or 0.0


def tokens(result: str) -> float:
    """Of ``lynx_draft_tokens_total``."""
    return REGISTRY.get_sample_value("lynx_draft_tokens_total", {"result": result}) or 0.0


@dataclass
class Answer:
    """What a client got.

    Attributes:
        steps: of the engine, each with the number of tokens that the client had after it.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    stop: Any = None
    logprobs: Any = None
    steps: list[tuple[int, int]] = field(default_factory=list)

    @property
    def outcome(self) -> tuple[Any, ...]:
        """What must not depend on how the cache came."""
        return self.tokens, self.text, self.finish, self.stop


def gated_transport(store: Any) -> Any:
    """A link that brings a request's residuals when it is told to."""
    from lynx_backend.errors import TransportError
    from lynx_backend.keys import Part
    from lynx_backend.store import StoredObjects
    from lynx_backend.transport.local import LocalTransport

    class Gate(LocalTransport):
        def __init__(self) -> None:
            super().__init__(StoredObjects(store))
            self.open: set[str] = set()
            self.held: dict[str, list[tuple[Any, Any, Future[bool]]]] = {}
            self.guard = threading.Lock()
            self.holds_anchors = False

        def fetch(self, request: str, name: Any, out: Any) -> Future[bool]:
            with self.guard:
                anchor = name.part is Part.ANCHOR and not self.holds_anchors
                if anchor or request in self.open:
                    return super().fetch(request, name, out)
                promise: Future[bool] = Future()
                self.held.setdefault(request, []).append((name, out, promise))
                return promise

        def release(self, request: str, lost: bool = False) -> None:
            with self.guard:
                self.open.add(request)
                held = self.held.pop(request, [])
            for name, out, promise in held:
                if not promise.set_running_or_notify_cancel():
                    continue
                if lost:
                    promise.set_exception(TransportError("the link was cut"))
                else:
                    real = super().fetch(request, name, out)
                    real.add_done_callback(lambda f, p=promise: p.set_result(f.result()))

        def cancel(self, request: str) -> None:
            with self.guard:
                held = self.held.pop(request, [])
            for _, _, promise in held:
                promise.cancel()
                promise.set_running_or_notify_cancel()
            super().cancel(request)

    return Gate()


def small_model(folder: Path) -> str:
    """A Llama of random weights that reacts to the smallest change of its cache, with a tokenizer.

    Its steps take a hundredth of a real model's, and its anchors' drafts are mostly wrong.
    """
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from lynx_backend.models import model_folder

    tokenizer = AutoTokenizer.from_pretrained(model_folder("smollm2"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class Engine:
    """The engine, and what tests look at inside it.

    Args:
        lynx: Lynx's settings; by default it keeps chunks in memory, and residuals arrive when a
            test says so.
    """

    def __init__(
        self, folder: Path, model: str, blocks: int = 256, lynx: dict[str, Any] | None = None
    ) -> None:
        settings = folder / "lmcache.yaml"
        self.settings = lmcache_with_lynx(lynx or {"memory": {"max_bytes": "512MiB"}})
        settings.write_text(yaml.safe_dump(self.settings))
        os.environ["LMCACHE_CONFIG_FILE"] = str(settings)
        self.arguments: dict[str, Any] = {
            "model": model,
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1024,
            "block_size": 32,
            "num_gpu_blocks_override": blocks,
            "kv_cache_memory_bytes": 1 << 30,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            **PROGRESSIVE_ENGINE,
            "kv_transfer_config": {
                **PROGRESSIVE_CONNECTOR,
                "kv_connector_extra_config": {
                    "lynx.draft": "always",
                    "lynx.residual_seconds": 600.0,
                },
            },
        }
        self.engine = LLMEngine.from_engine_args(EngineArgs(**self.arguments))
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from lynx_backend.integrations.lmcache_plugin import LynxBackend

        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.connector = self.scheduler.connector
        worker = get_kv_transfer_group()
        self.loads = worker._loads
        self.lynx_engine = worker._lmcache_engine.lmcache_engine
        backends = self.lynx_engine.storage_manager.storage_backends.values()
        (self.lynx,) = [each for each in backends if isinstance(each, LynxBackend)]
        self.gate = None if lynx else self._gate()
        self._names = iter(range(1 << 30))

    def _gate(self) -> Any:
        self.loads.transport.close()
        self.loads.transport = gated_transport(self.lynx.store)
        return self.loads.transport

    def use_split(self, monkeypatch: Any, **codec: int) -> None:
        """For this test another store, whose chunks are encoded so."""
        from lynx_backend.config import LynxConfig
        from lynx_backend.store import ChunkStore

        config = LynxConfig.load(inline={"codec": codec, "memory": {"max_bytes": "512MiB"}})
        store = ChunkStore.from_config(config)
        self.reset()
        monkeypatch.setattr(self.lynx, "_store", store)
        monkeypatch.setattr(self.lynx, "_codec", store.codec.spec.fingerprint)
        monkeypatch.setattr(self.loads, "_store", store)
        monkeypatch.setattr(self.loads, "transport", gated_transport(store))
        monkeypatch.setattr(self, "gate", self.loads.transport)

    def params(self, **given: Any) -> Any:
        return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True} | given)

    def add(self, prompt: list[int], **given: Any) -> str:
        name = f"r{next(self._names)}"
        self.engine.add_request(name, {"prompt_token_ids": prompt}, self.params(**given))
        return name

    def internal(self, name: str) -> str | None:
        """The id by which the scheduler knows a request."""
        known = self.scheduler.requests
        return next((r for r in known if r == name or r.startswith(name + "-")), None)

    def drafted(self, name: str) -> int | None:
        """Drafts that a request has now; None when it is not drafting."""
        request_id = self.internal(name)
        drafting = self.scheduler._drafting.get(request_id)
        if drafting is None or not drafting.coarse:
            return None
        return self.scheduler.requests[request_id].num_output_tokens

    def run(
        self, hook: Callable[[int], None] | None = None, answers: dict[str, Answer] | None = None
    ) -> dict[str, Answer]:
        """Step until all requests are done.

        Args:
            hook: called with the number of the step after each.

        Returns:
            by request; of parallel samples, the second one is NAME.1.
        """
        answers = {} if answers is None else answers
        step, until = 0, time.monotonic() + 20 * WAIT
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                for one in output.outputs:
                    name = output.request_id + (f".{one.index}" if one.index else "")
                    answer = answers.setdefault(name, Answer())
                    answer.tokens, answer.text = list(one.token_ids), one.text
                    answer.finish, answer.stop = one.finish_reason, one.stop_reason
                    answer.logprobs = one.logprobs
                    answer.steps.append((step, len(one.token_ids)))
            if hook is not None:
                hook(step)
            step += 1
            assert time.monotonic() < until, "no end"
        return answers

    def reset(self) -> None:
        """Forget the prefix cache; fails while a block is held."""
        for _ in range(3):
            self.engine.step()  # requests that ended are noticed in the next step
        assert self.engine.reset_prefix_cache()
        assert not self.scheduler.requests
        assert not self.connector.drafting
        assert not self.loads._loads

    def store(self, *prompts: list[int]) -> None:
        """Compute prompts, so that their chunks are in the store."""
        self.connector.armed = False
        for prompt in prompts:
            self.reset()
            self.add(prompt, max_tokens=1)
            self.run()
            assert self.lynx._puts.flush(WAIT)
            assert self.lynx.store.flush(WAIT)
        self.reset()

    def plain(self, prompt: list[int], **given: Any) -> Answer:
        """What a plain load of Q_full by LMCache gives."""
        self.connector.armed = False
        self.reset()
        name = self.add(prompt, **given)
        return self.run()[name]

    def computed(self, prompt: list[int], **given: Any) -> Answer:
        """What vLLM gives without any stored cache."""
        self.reset()
        self.connector.armed = False
        name = self.add(prompt, **given)
        self.connector.compute(self.internal(name))
        return self.run()[name]

    def progressive(
        self, prompt: list[int], arrival: int | str, reset: bool = True, **given: Any
    ) -> Answer:
        """One request whose residuals arrive when it has ``arrival`` drafts.

        Args:
            arrival: or "lost", after some drafts; or "late", for never.
        """
        if reset:
            self.reset()
        self.connector.armed = True
        name = self.add(prompt, **given)
        return self.run(self.arrivals({name: arrival}))[name]

    def arrivals(self, when: dict[str, int | str]) -> Callable[[int], None]:
        """A hook for :meth:`run` that lets residuals come; those for 0 at once."""
        pending = dict(when)
        for name, at in when.items():
            if at == 0:
                self.gate.release(self.internal(name))
                del pending[name]

        def hook(_: int) -> None:
            for name, at in list(pending.items()):
                drafts = self.drafted(name)
                if at == "late" or drafts is None or drafts < (3 if at == "lost" else at):
                    continue
                request_id = self.internal(name)
                self.gate.release(request_id, lost=at == "lost")
                if at != "lost":
                    request = self.loads._loads[request_id].request
                    assert request.residual_ready(WAIT) or request.residual_lost
                del pending[name]

        return hook

    def prompts(self) -> dict[str, list[int]]:
        """Stored prompts of :data:`LENGTHS`, by name."""
        from lynx_backend.texts import default_text, prompt_tokens

        text = prompt_tokens(self.engine.get_tokenizer(), default_text(), 2000)
        made = {name: text[i : i + n] for i, (name, n) in enumerate(LENGTHS.items())}
        self.store(*made.values())
        return made

    def close(self) -> None:
        self.engine.engine_core.shutdown()


def key_of(engine: Engine, prompt: list[int], chunk: int) -> Any:
    """The key of one of the prompt's chunks."""
    database = engine.lynx_engine.token_database
    keys = [engine.lynx.chunk_key(key) for _, _, key in database.process_tokens(prompt)]
    return keys[chunk]
