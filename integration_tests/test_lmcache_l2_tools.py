"""The L2 adapter behind LMCache's controllers, benchmark and fault injector, and over Redis."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
import torch
from _lmcache_l2 import Client, Storage, chunk, key, memory_object, plugin
from _redis_servers import Server, needs_redis, running
from _redis_servers import wait_until as wait_seconds
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.fault_inject_l2_adapter import FaultInjectL2AdapterConfig

from lynx_backend import metrics


def wait_until(what):
    wait_seconds(what, 120)  # the first store may have to wait for the codec to be compiled


def test_behind_the_fault_injecting_adapter(tmp_path):
    spec = {"type": "fault_inject", "inner": plugin(tmp_path), "gap_indices": [1]}
    adapter = create_l2_adapter(FaultInjectL2AdapterConfig.from_dict(spec))
    client = Client(adapter)
    keys = [key(n) for n in range(3)]
    assert client.store(keys, [memory_object(chunk(n)) for n in range(3)]).is_successful()
    assert client.lookup(keys) == [0, 1, 2]
    targets = [memory_object(torch.zeros_like(chunk())) for _ in keys]
    assert client.load(keys, targets) == [0, 2]
    adapter.submit_unlock(keys)
    adapter.delete(keys)
    assert client.lookup(keys) == []
    adapter.close()


def test_behind_lmcaches_controllers_until_it_is_removed(tmp_path):
    storage = Storage(plugin(tmp_path))
    keys = [key(n) for n in range(4)]
    storage.store(keys)
    ((descriptor, adapter),) = storage.manager.l2_adapters()
    wait_until(lambda: len(adapter.list_l2_keys().entries) == 4)
    errors = storage.retrieve(keys)
    assert list(errors) == [0, 1, 2, 3]
    assert max(errors.values()) < 1e-4
    wait_until(lambda: adapter.report_status()["locked_object_count"] == 0)
    assert storage.manager.report_status()["is_healthy"]

    storage.manager.delete_l2_adapter(descriptor.index)
    assert storage.retrieve(keys) == {}
    storage.store(keys)  # L1 goes on alone
    assert not [t for t in threading.enumerate() if t.name.startswith("lynx-l2")]

    (spec,) = Storage.parse(plugin(tmp_path))
    storage.manager.add_l2_adapter(spec)
    assert list(storage.retrieve(keys)) == [0, 1, 2, 3]
    storage.manager.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("lynx-l2")]


def test_lmcaches_benchmark_of_l2_adapters(tmp_path):
    # It compares byte by byte, which holds because each of its objects is one value throughout.
    spec = plugin(
        tmp_path,
        kv_cache={"layers": 2, "tokens": 64, "dtype": "float16", "head_dim": 64,
                  "page_layout": "fused"},
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "lmcache.cli.main", "bench", "l2", "--num-keys", "8",
         "--data-size-kb", "64", "--rounds", "2", "--lookup-max-hit-rate", "0.5",
         "--no-skip-verify", "--l2-adapter", json.dumps(spec)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data verified OK" in done.stdout
    assert "MISMATCH" not in done.stdout


def test_others_have_filled_the_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
    try:
        nvme = {"path": str(disk / "kv"), "min_free_bytes": 0, "direct": False}
        storage = Storage(plugin(tmp_path, nvme=nvme))
        ((_, adapter),) = storage.manager.l2_adapters()
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(1 << 20))
        failed = metrics.ERRORS.labels("TierError")._value.get()
        storage.store([key(1)])
        wait_until(lambda: "store" in adapter.report_status()["failing"])
        assert not adapter.report_status()["is_healthy"]
        assert metrics.ERRORS.labels("TierError")._value.get() > failed
        assert list(storage.retrieve([key(1)])) == []
        filler.unlink()
        storage.store([key(2)])
        wait_until(lambda: len(adapter.list_l2_keys().entries) == 1)
        assert adapter.report_status()["is_healthy"]
        assert list(storage.retrieve([key(2)])) == [0]
        storage.manager.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@needs_redis
def test_redis_is_killed_and_comes_back(tmp_path):
    server = Server(tmp_path / "redis")
    params = {"redis": {"url": server.url, "timeout_seconds": 1.0, "retries": 0}}
    with running(server):
        spec = plugin(tmp_path, **params)
        del spec["adapter_params"]["nvme"]
        storage = Storage(spec)
        ((_, adapter),) = storage.manager.l2_adapters()
        storage.store([key(0), key(1)])
        wait_until(lambda: len(adapter.list_l2_keys().entries) == 2)
        assert list(storage.retrieve([key(0), key(1)])) == [0, 1]
        lost = metrics.ERRORS.labels("TierError")._value.get()

        server.kill()
        assert storage.retrieve([key(0), key(1)]) == {}
        storage.store([key(2)])
        wait_until(lambda: adapter.report_status()["failing"])
        status = adapter.report_status()
        assert not status["is_healthy"]
        assert not status["tiers"]["redis"]["answers"]
        assert len(adapter.list_l2_keys().entries) == 2  # not known to be gone
        adapter.delete([key(0)])
        assert metrics.ERRORS.labels("TierError")._value.get() > lost

        server.start()
        wait_until(lambda: adapter.report_status()["tiers"]["redis"]["answers"])
        # The server comes back empty.
        wait_until(lambda: storage.retrieve([key(0), key(1)]) == {})
        numbers = iter(range(3, 250))

        def stored():
            """Once the breaker lets writes pass again."""
            storage.store([key(next(numbers))])
            listed = [entry.key.to_object_key() for entry in adapter.list_l2_keys().entries]
            return [each for each in listed if each.chunk_hash[0] >= 3]

        wait_until(stored)
        assert list(storage.retrieve(stored()[:1])) == [0]
        storage.manager.close()
