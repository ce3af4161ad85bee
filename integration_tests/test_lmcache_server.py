"""A real ``lmcache server`` with Lynx: shared, started again, and without it."""

from __future__ import annotations

import pytest
import torch
from _lmcache_server import DIM, LMCacheServer, engines, serving
from _redis_servers import wait_until


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    a, b = torch.stack(got), torch.stack(want)
    return float((a - b).square().sum() / b.square().sum())


def assert_clean(log: str) -> None:
    assert "MPCacheServer closed" in log
    assert "Traceback" not in log


def test_two_engines_a_restart_and_removal(tmp_path):
    nvme = {"path": str(tmp_path / "kv"), "min_free_bytes": 0}
    server = LMCacheServer(tmp_path / "server", {"nvme": nvme, "kv_cache": {"head_dim": DIM}})
    with serving(server):
        with engines(server, 2) as (first, second):
            assert first.load(1) is None
            cache = first.fill(1)
            assert first.store(1)
            wait_until(lambda: server.adapter["stored_object_count"] == 2, 60)
            server.clear_l1()
            loaded = second.load(1)
            assert loaded is not None
            # Something came from Lynx, not from L1: near, and not equal.
            assert 0 < error(loaded, cache) < 1e-4
            assert server.adapter["is_healthy"]
            assert server.metrics("lynx_objects_total") >= 8
            listed = server.get("/cache/objects?tier=l2")
            assert len(listed["entries"]) == 2
        assert_clean(server.stop())

        server.start()
        assert server.adapter["stored_object_count"] == 2
        with engines(server, 1) as (third,):
            loaded = third.load(1)
            assert loaded is not None
            assert error(loaded, cache) < 1e-4

            (server.folder / "remove").touch()
            wait_until(lambda: not (server.folder / "remove").exists())
            assert server.get("/status")["storage_manager"]["l2_adapters"] == []
            server.clear_l1()
            assert third.load(1) is None
            third.fill(2)
            assert third.store(2)  # L1 goes on alone
        assert_clean(server.stop())


def test_a_wrong_setting_stops_the_server_with_one_line(tmp_path):
    server = LMCacheServer(tmp_path / "server", {"nvme": {"path": str(tmp_path), "size": 1}})
    with pytest.raises(RuntimeError, match=r"unknown setting nvme\.size"), serving(server):
        pass
