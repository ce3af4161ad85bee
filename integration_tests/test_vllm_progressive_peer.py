"""Progressive decode in stock vLLM from a peer: real UCX, over a slow link between namespaces.

In a process of its own, with an environment that has vLLM, about a minute on an idle core::

    PYTHONPATH=. python -m pytest integration_tests/test_vllm_progressive_peer.py
"""

from __future__ import annotations

import _vllm_environment  # noqa: F401  # isort: skip

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

pytest.importorskip("ucxx", reason="the UCX transport needs ucxx")

from _vllm import WAIT, Engine, small_model  # isort: skip
from prometheus_client import REGISTRY  # isort: skip
from lynx_backend.shaped_link import Link, shaped_link  # isort: skip
from lynx_backend.texts import default_text, prompt_tokens  # isort: skip

if TYPE_CHECKING:
    from lynx_backend.progressive import Timeline

#: At this rate a prompt's residuals, about 140 kB, take a second.
MBPS = 1.0
NEW = 24
COMMAND = "from lynx_backend.cli import main; main()"


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    """UCX reads a process's routes once: this comes before all."""
    with shaped_link(MBPS) as made:
        if not made.shaped:
            pytest.skip("network namespaces need root, ip and tc")
        yield made


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("far")


@pytest.fixture(scope="module")
def node(link, objects) -> Iterator[subprocess.Popen[bytes]]:
    """``lynx serve`` at the far end."""
    settings = {
        "memory": {"enabled": False},
        "nvme": {"path": str(objects), "min_free_bytes": 0},
        "serve": {"host": link.there, "port": 7430},
    }
    file = objects.parent / "serve.yaml"
    file.write_text(yaml.safe_dump(settings))
    process = subprocess.Popen(
        [*link.prefix, sys.executable, "-c", COMMAND, "serve", "--config", str(file)],
        stdout=subprocess.PIPE,
        env=os.environ | {"UCX_TLS": "tcp", "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert process.stdout is not None
    assert b"serving" in process.stdout.readline()
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def engine(tmp_path_factory, link, node) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("vllm")
    os.environ["UCX_TLS"] = "tcp"
    lynx = {
        "memory": {"max_bytes": "512MiB"},
        "peers": {"nodes": f"{link.there}:7430", "fetch_seconds": WAIT},
        "tiering": {"write_behind_bytes": 0},  # what was fetched is not kept
    }
    made = Engine(folder, small_model(folder / "model"), lynx=lynx)
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompts(engine, objects) -> list[list[int]]:
    """Two prompts whose chunks are at the peer alone."""
    from lynx_backend.tiers import NvmeTier

    tokens = prompt_tokens(engine.engine.get_tokenizer(), default_text(), 2000)
    made = [tokens[:530], tokens[600:1160]]
    engine.store(*made)
    (here,) = engine.lynx.store.tiers
    there = NvmeTier(objects, 1 << 30)
    names = sorted(here.names(), key=lambda name: -name.part)  # residuals first
    for name in names:
        there.put(name, here.get(name))
    here.delete(names)
    there.close()
    until = time.monotonic() + WAIT
    while None in engine.lynx.store.sizes(names):  # connected to by and by
        assert time.monotonic() < until
        time.sleep(0.05)
    return made


def decisions(reason: str) -> float:
    return REGISTRY.get_sample_value("lynx_draft_decisions_total", {"reason": reason}) or 0.0


def watched(engine: Engine, names: list[str]) -> tuple[Callable[[int], None], dict[str, Timeline]]:
    """A hook that notes each request's timeline while it loads."""
    found: dict[str, Timeline] = {}

    def hook(_: int) -> None:
        for name in names:
            loading = engine.loads._loads.get(engine.internal(name))
            if loading is not None:
                found[name] = loading.request.timeline

    return hook, found


def test_two_requests_draft_while_their_residuals_cross_the_link(engine, prompts):
    wanted = [engine.plain(prompt, max_tokens=NEW).outcome for prompt in prompts]
    engine.reset()
    engine.connector.armed = True
    drafted = decisions("drafted")
    names = [engine.add(prompt, max_tokens=NEW) for prompt in prompts]
    hook, timelines = watched(engine, names)
    answers = engine.run(hook)
    assert [answers[name].outcome for name in names] == wanted
    assert decisions("drafted") == drafted + 2
    last_anchor = max(max(timelines[name].anchors) for name in names)
    assert last_anchor < min(max(timelines[name].residuals) for name in names)


def test_a_peer_that_is_lost_while_its_requests_draft_costs_a_computation(
    engine, prompts, link, node
):
    """The last test: nobody is there afterwards."""
    wanted = engine.computed(prompts[0], max_tokens=NEW).outcome
    (here,) = engine.lynx.store.tiers
    here.delete(list(here.names()))  # what was just computed was stored
    engine.reset()
    engine.connector.armed = True
    lost = decisions("no_residual")
    name = engine.add(prompts[0], max_tokens=NEW)
    gone: list[bool] = []

    def hook(_: int) -> None:
        if not gone and (engine.drafted(name) or 0) >= 3:
            request = engine.loads._loads[engine.internal(name)].request
            link.cut()  # else the kernel would still deliver what a dead process has sent
            node.kill()
            assert not request.residual_ready(WAIT)
            gone.append(request.residual_lost)

    assert engine.run(hook)[name].outcome == wanted
    assert gone == [True]
    assert decisions("no_residual") == lost + 1
    here.delete(list(here.names()))
    drafted = decisions("drafted")
    engine.reset()
    name = engine.add(prompts[0], max_tokens=NEW)
    assert engine.run()[name].outcome == wanted
    assert decisions("drafted") == drafted
