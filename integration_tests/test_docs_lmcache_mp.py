"""What docs/lmcache-mp.md shows is run: a real server, a real Redis, engines that find it again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from _lmcache_server import DIM, HEADS, LAYERS, LMCacheServer, engines, serving
from _redis_servers import Server, needs_redis, running, wait_until

from lynx_backend.codec import Calibration
from lynx_backend.integrations.lmcache_l2 import LynxL2Adapter

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "lmcache-mp.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def adapter(word: str, places: dict[str, str]) -> dict[str, Any]:
    """The parameters of the one adapter with that word in it, in this machine's places."""
    (text,) = [block for block in blocks("json") if '"plugin"' in block and word in block]
    for old, new in places.items():
        assert old in text
        text = text.replace(old, new)
    spec = json.loads(text)
    assert spec["class_name"] == LynxL2Adapter.__name__
    assert spec["module_path"] == LynxL2Adapter.__module__
    return dict(spec["adapter_params"])


def found_again(folder: Path, params: dict[str, Any]) -> None:
    with (
        serving(LMCacheServer(folder / "server", params)) as server,
        engines(server, 2) as (one, two),
    ):
        one.fill(1)
        assert one.store(1)
        wait_until(lambda: server.adapter["stored_object_count"] == 2, 60)
        server.clear_l1()
        assert two.load(1) is not None


def test_nvme(tmp_path):
    power = np.random.default_rng(0).lognormal(0, 1, (LAYERS, HEADS, DIM))
    Calibration.of([np.ones(8)], [0] * LAYERS, power).save(tmp_path / "calibration.npz")
    places = {
        "/mnt/nvme/lynx": str(tmp_path / "kv"),
        "/etc/lynx/my-model.npz": str(tmp_path / "calibration.npz"),
        '"500GiB"': '"64MiB", "min_free_bytes": 0',
    }
    found_again(tmp_path, adapter("nvme", places))


@needs_redis
def test_redis(tmp_path):
    with running(Server(tmp_path / "redis")) as server:
        places = {"redis://127.0.0.1:6379": server.url, '"head_dim": 128': f'"head_dim": {DIM}'}
        found_again(tmp_path, adapter("redis", places))
        assert b"lynx" in server.ask("KEYS", "*")


def test_the_connectors_are_what_there_is():
    gpu, cpu = (json.loads(block) for block in blocks("json") if "kv_connector" in block)
    source = ROOT.joinpath(*cpu.pop("kv_connector_module_path").split(".")).with_suffix(".py")
    assert f"class {cpu['kv_connector']}({gpu['kv_connector']})" in source.read_text()
    assert {**cpu, "kv_connector": ""} == {**gpu, "kv_connector": ""}


def test_sglangs_file_is_read_by_lmcache():
    from lmcache.v1.config import LMCacheEngineConfig

    (text,) = blocks("yaml")
    given = yaml.safe_load(text)
    config = LMCacheEngineConfig.from_dict(given)
    assert {name: getattr(config, name) for name in given} == given


@pytest.mark.parametrize("name", ["planes", "fused", "vllm_cpu", "latent"])
def test_every_layout_is_explained(name):
    from lynx_backend.integrations.lmcache.page_layouts import PAGE_LAYOUTS

    assert name in PAGE_LAYOUTS
    assert f"| `{name}` |" in PAGE.read_text()
