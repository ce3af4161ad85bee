"""A real vLLM on the CPU with LMCache and Lynx: what a client gets, also when things fail.

Needs an environment with vLLM, ``.venv-vllm`` as `make demo-vllm` makes it or the one that
VLLM_VENV names. Each case is a vLLM process of its own, so they take minutes: ``pytest -m slow``.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from _redis_servers import Server, needs_redis, running, wait_until

from lynx_backend.cli.demo_vllm import _peer
from lynx_backend.integrations.vllm_request import (
    CPU_CONNECTOR,
    Job,
    Result,
    lmcache_with_lynx,
    run,
)
from lynx_backend.models import load_model, model_folder
from lynx_backend.texts import default_text, prompt_tokens

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm")) / "bin" / "python"
HITS = 5 * 256
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: {PYTHON} is made by make demo-vllm"),
]


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    _, tokenizer = load_model("smollm2")
    return prompt_tokens(tokenizer, default_text(), 1450)


def ask(
    prompt: list[int],
    lynx: object,
    log: Path,
    model: str | None = None,
    after_start: Callable[[], object] | None = None,
    transfer: dict[str, Any] = CPU_CONNECTOR,
    ranks: int = 1,
    **lmcache: Any,
) -> Result:
    """One request to a fresh engine.

    Args:
        after_start: called once Lynx is loaded, before the request comes.
        lmcache: settings of LMCache.
    """
    job = Job(
        model or str(model_folder("smollm2")),
        [prompt],
        16,
        transfer,
        lmcache_with_lynx(lynx) | lmcache,
        {"PYTHONPATH": str(ROOT), **(bind_threads(ranks) if ranks > 1 else {})},
        ranks=ranks,
    )
    if after_start is not None:
        log.touch()

        def watch() -> None:
            wait_until(lambda: "Lynx keeps" in log.read_text(errors="replace"), 300)
            after_start()

        threading.Thread(target=watch, daemon=True).start()
    return run(job, log=log, python=str(PYTHON))


def bind_threads(ranks: int) -> dict[str, str]:
    """One core for each rank: vLLM's own choice is a NUMA node for each."""
    cores = sorted(os.sched_getaffinity(0))
    bound = (str(cores[i % len(cores)]) for i in range(ranks))
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(bound)}


def nvme(folder: Path) -> dict[str, Any]:
    place = {"path": str(folder), "max_bytes": "64MiB", "min_free_bytes": 0}
    return {"memory": {"enabled": False}, "nvme": place}


@pytest.fixture(scope="module")
def stored(prompt, tmp_path_factory) -> tuple[Path, list[int]]:
    """A folder with the prompt's cache, and the tokens that come without any."""
    folder = tmp_path_factory.mktemp("stored")
    cold = ask(prompt, nvme(folder / "kv"), folder / "log")
    assert cold.answers[0].cached_tokens == 0
    assert cold.errors == {}
    return folder / "kv", cold.answers[0].tokens


def test_a_fresh_process_hits(prompt, stored, tmp_path):
    folder, tokens = stored
    (warm,) = ask(prompt, nvme(folder), tmp_path / "log").answers
    assert (warm.cached_tokens, warm.external_hits, warm.own_hits) == (HITS, HITS, 0)
    assert warm.tokens == tokens
    assert "kv_load_failure_policy is" not in (tmp_path / "log").read_text(errors="replace")


def test_it_warns_where_a_failed_load_would_end_a_request(prompt, stored, tmp_path):
    transfer = {k: v for k, v in CPU_CONNECTOR.items() if k != "kv_load_failure_policy"}
    ask(prompt, nvme(stored[0]), tmp_path / "log", transfer=transfer)
    assert "kv_load_failure_policy is fail" in (tmp_path / "log").read_text(errors="replace")


def test_a_fresh_process_hits_when_lmcache_loads_ahead(prompt, stored, tmp_path):
    folder, tokens = stored
    (warm,) = ask(prompt, nvme(folder), tmp_path / "log", enable_async_loading=True).answers
    assert (warm.cached_tokens, warm.external_hits, warm.own_hits) == (HITS, HITS, 0)
    assert warm.tokens == tokens


def test_damaged_objects(prompt, stored, tmp_path):
    folder, tokens = stored
    copy = tmp_path / "kv"
    subprocess.run(["cp", "-r", folder, copy], check=True)
    for file in copy.rglob("*.0"):
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    result = ask(prompt, nvme(copy), tmp_path / "log")
    assert result.answers[0].tokens == tokens
    assert result.errors["CorruptObjectError"] > 0


def test_another_models_cache(prompt, stored, tmp_path):
    """The same weights under another name stand for other weights: nothing must be found."""
    folder, tokens = stored
    other = tmp_path / "another-model"
    other.symlink_to(model_folder("smollm2"))
    result = ask(prompt, nvme(folder), tmp_path / "log", model=str(other))
    assert result.answers[0].external_hits == 0
    assert result.answers[0].tokens == tokens


def test_ranks_have_caches_of_their_own(prompt, stored, tmp_path):
    folder, tokens = stored  # of one rank
    copy = tmp_path / "kv"
    subprocess.run(["cp", "-r", folder, copy], check=True)
    ranks = 3  # SmolLM2 has 3 KV heads
    cold = ask(prompt, nvme(copy), tmp_path / "cold", ranks=ranks).answers[0]
    assert (cold.external_hits, cold.tokens) == (0, tokens)
    warm = ask(prompt, nvme(copy), tmp_path / "warm", ranks=ranks).answers[0]
    assert (warm.cached_tokens, warm.external_hits, warm.own_hits) == (HITS, HITS, 0)
    assert warm.tokens == tokens


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_full_disk(prompt, stored, tmp_path):
    _, tokens = stored
    place = tmp_path / "small"
    place.mkdir()
    # A chunk has two objects of 1.6 MB.
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)]
    subprocess.run(mount, check=True)
    try:
        result = ask(prompt, nvme(place), tmp_path / "log")
    finally:
        subprocess.run(["umount", str(place)], check=True)
    assert result.answers[0].tokens == tokens
    assert result.errors["TierFullError"] > 0


@needs_redis
def test_redis_killed(prompt, stored, tmp_path):
    _, tokens = stored
    with running(Server(tmp_path / "redis")) as server:
        lynx = {"memory": {"enabled": False}, "redis": {"url": server.url}}
        first = ask(prompt, lynx, tmp_path / "first")
        assert first.written["redis"] > 0
        hit = ask(prompt, lynx, tmp_path / "hit")
        assert hit.answers[0].external_hits == HITS
        killed = ask(prompt, lynx, tmp_path / "killed", after_start=server.kill)
    assert [r.answers[0].tokens for r in (first, hit, killed)] == [tokens] * 3
    assert sum(killed.errors.values()) > 0


def test_a_peer_that_goes(prompt, stored, tmp_path):
    pytest.importorskip("ucxx", reason="ucxx is not installed")
    folder, tokens = stored
    with ExitStack() as stack:
        address = stack.enter_context(_peer(tmp_path, nvme(folder)))
        lynx = {"peers": {"nodes": address}, "memory": {"max_bytes": "64MiB"}}
        hit = ask(prompt, lynx, tmp_path / "hit")
        assert hit.answers[0].external_hits == HITS
        gone = ask(prompt, lynx, tmp_path / "gone", after_start=stack.close)
    assert [r.answers[0].tokens for r in (hit, gone)] == [tokens] * 2
    assert gone.answers[0].external_hits == 0
