"""What docs/lmcache.md shows is run: LMCache's own engine, a real Redis, a real peer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from _redis_servers import Server, free_port, needs_redis, running, wait_until

from lynx_backend.codec import Calibration

from _lmcache import CHUNK, DIM, HEADS, LAYERS, cache, engine  # isort: skip

PAGE = Path(__file__).parents[1] / "docs" / "lmcache.md"
TOKENS = list(range(2 * CHUNK + 10))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def shown(word: str) -> str:
    """The one YAML block with that word in it."""
    (text,) = [block for block in blocks("yaml") if word in block]
    return text


@pytest.fixture
def here(tmp_path: Path):
    """Puts this machine's places into a block, and sizes that fit it."""
    power = np.random.default_rng(0).lognormal(0, 1, (LAYERS, HEADS, DIM))
    Calibration.of([np.ones(8)], [0] * LAYERS, power).save(tmp_path / "calibration.npz")

    def replaced(text: str, **more: str) -> dict[str, Any]:
        places = {
            "/mnt/nvme/lynx": str(tmp_path / "kv"),
            "/etc/lynx/my-model.npz": str(tmp_path / "calibration.npz"),
            "500GiB": "64MiB, min_free_bytes: 0",
            "max_local_cpu_size: 8": "max_local_cpu_size: 0.1",
            "max_bytes: 4GiB": "max_bytes: 64MiB",
            **more,
        }
        for old, new in places.items():
            text = text.replace(old, new)
        return yaml.safe_load(text)

    return replaced


def found_again(folder: Path, settings: dict[str, Any]) -> None:
    """Stored by one engine, found by the next."""
    for found in (0, 2 * CHUNK):
        with engine(folder, None, **settings) as one:
            assert one.has_lynx
            assert one.lookup(TOKENS) == found
            one.store(TOKENS, cache(len(TOKENS)))


def test_every_block_is_run():
    assert len(blocks("yaml")) == 4


def test_nvme(here, tmp_path):
    found_again(tmp_path, here(shown("chunk_size")))


@needs_redis
def test_redis(here, tmp_path):
    with running(Server(tmp_path / "redis")) as server:
        settings = here(shown("redis:"), **{"redis://127.0.0.1:6379": server.url})
        found_again(tmp_path, settings)
        assert b"lynx" in server.ask("KEYS", "*")


def test_two_hosts(here, tmp_path):
    pytest.importorskip("ucxx", reason="ucxx is not installed")
    port = str(free_port())
    with engine(tmp_path, None, **here(shown("chunk_size"))) as first:
        first.store(TOKENS, cache(len(TOKENS)))
    file, log = tmp_path / "serve.yaml", tmp_path / "log"
    file.write_text(yaml.safe_dump(here(shown("serve:"), **{"7430": port})))
    main = "from lynx_backend.cli import main; main()"
    command = [sys.executable, "-c", main, "serve", "--config", str(file)]
    with ExitStack() as stack:
        out = stack.enter_context(log.open("wb"))
        server = stack.enter_context(subprocess.Popen(command, stdout=out, stderr=out))
        stack.callback(server.terminate)
        wait_until(lambda: "serving" in log.read_text(), 60)
        settings = here(shown("peers:"), **{"7430": port})
        one = stack.enter_context(engine(tmp_path, None, **settings))
        wait_until(lambda: one.lookup(TOKENS) == 2 * CHUNK)
        assert not one.request(TOKENS)[:, :, : 2 * CHUNK].isnan().any()


def test_connector_settings_name_what_there_is():
    (cpu,) = (json.loads(block) for block in blocks("json"))
    source = Path(__file__).parents[1].joinpath(*cpu["kv_connector_module_path"].split("."))
    assert f"class {cpu['kv_connector']}(" in source.with_suffix(".py").read_text()
    (plain,) = re.findall(r"--kv-transfer-config '(.*?)'", PAGE.read_text(), re.DOTALL)
    assert cpu["kv_load_failure_policy"] == json.loads(plain)["kv_load_failure_policy"]
