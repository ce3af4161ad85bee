"""The L2 adapter against LMCache's own interface and memory objects."""

from __future__ import annotations

import os
import sqlite3
import threading
from dataclasses import replace

import pytest
import torch
from _lmcache_l2 import (
    DESC,
    DIM,
    HEADS,
    LAYERS,
    PAGES,
    TOKENS,
    Client,
    cache,
    chunk,
    config,
    error,
    key,
    memory_object,
)
from _redis_servers import wait_until
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener

from lynx_backend import metrics
from lynx_backend.codec import Calibration, Codec
from lynx_backend.errors import ConfigError, TierError, UnsupportedError
from lynx_backend.integrations import lmcache_l2
from lynx_backend.integrations.lmcache import failures
from lynx_backend.integrations.lmcache.key_index import KeyIndex
from lynx_backend.integrations.lmcache.page_layouts import PageLayout
from lynx_backend.integrations.lmcache_l2 import LynxL2Adapter, LynxL2AdapterConfig
from lynx_backend.keys import ChunkKey
from lynx_backend.layout import KVLayout


@pytest.fixture
def opened(tmp_path):
    """Opens adapters on one folder and closes them all."""
    made = []

    def make(**params):
        made.append(LynxL2Adapter(config(tmp_path, **params)))
        return Client(made[-1])

    yield make
    for adapter in made:
        adapter.close()


# -- the contract ----------------------------------------------------------------------------------


def test_store_lookup_load(opened):
    client = opened()
    events = {
        client.adapter.get_store_event_fd(),
        client.adapter.get_lookup_and_lock_event_fd(),
        client.adapter.get_load_event_fd(),
    }
    assert len(events) == 3
    keys, buffers = [key(0), key(1)], [chunk(0), chunk(1)]
    untouched = [each.clone() for each in buffers]
    assert client.lookup(keys) == []
    result = client.store(keys, [memory_object(each) for each in buffers])
    assert result.is_successful()
    assert result.bytes_transferred() == client.adapter.get_usage().total_bytes_used > 0
    # float32 buffers: at about 8.6 bits an element, well below a third.
    assert result.bytes_transferred() < sum(each.numel() * 4 for each in buffers) / 3
    assert all(torch.equal(a, b) for a, b in zip(buffers, untouched, strict=True))

    wanted = [key(0), key(9), key(1)]
    assert client.lookup(wanted) == [0, 2]
    targets = [torch.zeros_like(buffers[0]) for _ in wanted]
    assert client.load(wanted, [memory_object(each) for each in targets]) == [0, 2]
    assert error(targets[0], buffers[0]) < 1e-4
    assert error(targets[2], buffers[1]) < 1e-4
    client.adapter.submit_unlock(wanted)
    client.adapter.submit_unlock([key(200)])  # was never locked
    assert client.adapter.report_status()["is_healthy"]


def test_storing_again_writes_nothing(opened):
    client = opened()
    obj = memory_object(chunk())
    first = client.store([key(0)], [obj])
    again = client.store([key(0)], [obj])
    assert again.is_successful()
    assert again.bytes_transferred() == 0
    assert client.adapter.get_usage().total_bytes_used == first.bytes_transferred()


@pytest.mark.parametrize(
    ("pages", "shape", "dtype", "said"),
    [
        (PageLayout("fused", HEADS, DIM), (LAYERS, TOKENS, 2 * HEADS * DIM), torch.bfloat16,
         {"page_layout": "fused"}),
        (PageLayout("fused", HEADS, DIM), (1, LAYERS, TOKENS, 2 * HEADS * DIM), torch.float16,
         {"page_layout": "fused"}),
        (PageLayout("planes", HEADS, DIM), (2, LAYERS, TOKENS, HEADS * DIM), torch.bfloat16, {}),
        (PageLayout("vllm_cpu", HEADS, DIM, 16), (1, LAYERS, TOKENS, 2 * HEADS * DIM),
         torch.float32, {"block_tokens": 16}),
    ],
)  # fmt: skip
def test_every_layout_is_encoded_along_its_axes(opened, pages, shape, dtype, said):
    client = opened(kv_cache={"head_dim": DIM, **said})
    buffer = torch.empty(shape, dtype=dtype)
    pages.pack(cache().to(dtype), buffer)
    desc = {0: MemoryLayoutDesc([buffer.shape], [dtype])}
    assert client.store([key(0)], [memory_object(buffer)]).is_successful()
    assert client.lookup([key(0)], desc) == [0]
    target = torch.zeros_like(buffer)
    assert client.load([key(0)], [memory_object(target)]) == [0]
    assert error(target.float(), buffer.float()) < 1e-4


def test_a_latent_cache(opened):
    client = opened(kv_cache={"page_layout": "latent"})
    buffer = cache()[0, :, :, 0].contiguous()
    assert client.store([key(0)], [memory_object(buffer)]).is_successful()
    target = torch.zeros_like(buffer)
    assert client.load([key(0)], [memory_object(target)]) == [0]
    assert error(target, buffer) < 1e-4


def test_a_calibration_serves_every_rank(opened, tmp_path):
    whole = Calibration.none(KVLayout(2, LAYERS, TOKENS, 2 * HEADS, DIM, "float32"))
    whole.save(tmp_path / "calibration")
    client = opened(codec={"calibration": str(tmp_path / "calibration")}, kv_cache={})
    keys = [key(0, kv_rank=ObjectKey.ComputeKVRank(2, rank, 2, rank)) for rank in range(2)]
    buffers = [chunk(rank) for rank in range(2)]
    assert client.store(keys, [memory_object(each) for each in buffers]).is_successful()
    targets = [torch.zeros_like(each) for each in buffers]
    assert client.load(keys, [memory_object(each) for each in targets]) == [0, 1]
    assert max(error(a, b) for a, b in zip(targets, buffers, strict=True)) < 1e-4
    # One rank of one would have all heads.
    assert not client.store([key(0)], [memory_object(chunk())]).is_successful()
    assert (
        "codec.calibration is of a model with" in client.adapter.report_status()["failing"]["store"]
    )


# -- only what was computed alike is found ---------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"model_name": "other/model"},
        {"kv_rank": ObjectKey.ComputeKVRank(2, 1, 2, 1)},
        {"cache_salt": "tenant"},
        {"object_group_id": 1},
        {"chunk_hash": b"\x01" * 32},
    ],
)
def test_another_key_is_a_miss(opened, changes):
    client = opened()
    client.store([key(0)], [memory_object(chunk())])
    other = key(0, **changes)
    assert client.lookup([other], {**DESC, 1: DESC[0]}) == []
    assert client.load([other], [memory_object(torch.zeros_like(chunk()))]) == []


@pytest.mark.parametrize(
    "params",
    [
        {"codec": {"profile": "linear"}},
        {"codec": {"anchor_bits": 3}},
        {"namespace": "new weights"},
        {"kv_cache": {"head_dim": DIM, "block_tokens": 64}},
    ],
)
def test_another_setting_is_a_miss(opened, params):
    opened().store([key(0)], [memory_object(chunk())])
    other = opened(**params)
    assert other.lookup([key(0)]) == []
    assert other.load([key(0)], [memory_object(torch.zeros_like(chunk()))]) == []


def test_another_dtype_is_a_miss(opened):
    client = opened()
    client.store([key(0)], [memory_object(chunk())])
    half = {0: MemoryLayoutDesc(DESC[0].shapes, [torch.bfloat16])}
    assert client.lookup([key(0)], half) == []


# -- what is refused -------------------------------------------------------------------------------


def test_a_wrong_layout_is_refused_with_the_right_one(opened, caplog):
    client = opened(kv_cache={"head_dim": DIM, "block_tokens": 32})
    assert not client.store([key(0)], [memory_object(chunk())]).is_successful()
    status = client.adapter.report_status()
    assert not status["is_healthy"]
    (refused,) = status["refused"]
    assert "looks like page_layout vllm_cpu, head_dim 64, block_tokens 128" in refused
    assert client.lookup([key(0)]) == []
    assert client.adapter.get_usage().total_bytes_used == 0


def test_a_prompt_that_repeats_itself_settles_nothing(opened):
    same = cache()
    same[:] = same[:, :, :1]  # every token is the first
    buffer = torch.empty(LAYERS, TOKENS, PAGES.row)
    PAGES.pack(same, buffer)
    client = opened()
    assert client.store([key(0)], [memory_object(buffer)]).is_successful()
    assert client.store([key(1)], [memory_object(chunk())]).is_successful()
    assert client.adapter.report_status()["refused"] == []


def test_one_chunk_that_fits_takes_a_refusal_back_unless_many_did_not(opened, monkeypatch):
    monkeypatch.setattr(lmcache_l2, "_MISFITS", 2)
    odd = [chunk(seed, replace(PAGES, block=32)) for seed in range(2)]
    client = opened()
    assert not client.store([key(0)], [memory_object(odd[0])]).is_successful()
    assert client.adapter.report_status()["refused"]
    assert client.store([key(1)], [memory_object(chunk())]).is_successful()
    assert client.adapter.report_status()["refused"] == []
    assert client.store([key(0)], [memory_object(odd[0])]).is_successful()
    client = opened()
    for i in range(2):
        assert not client.store([key(i)], [memory_object(odd[i])]).is_successful()
    assert not client.store([key(2)], [memory_object(chunk())]).is_successful()


@pytest.mark.parametrize(
    "buffer",
    [torch.zeros(4096, dtype=torch.uint8), torch.zeros(2, 3, 5), torch.full((2, 256, 256), 1e30)],
)
def test_what_cannot_be_encoded_is_a_failed_store(opened, buffer):
    client = opened()
    before = metrics.ERRORS.labels("UnsupportedError")._value.get()
    assert not client.store([key(0)], [memory_object(buffer)]).is_successful()
    assert not client.adapter.report_status()["is_healthy"]
    assert client.load([key(0)], [memory_object(buffer)]) == []
    if buffer.dim() != 3 or buffer.shape[1] != TOKENS:
        assert metrics.ERRORS.labels("UnsupportedError")._value.get() == before + 2
    # The next one that works makes it healthy again.
    assert client.store([key(1)], [memory_object(chunk())]).is_successful()


def test_part_of_a_task_may_fail(opened):
    client = opened()
    objects = [memory_object(chunk()), memory_object(torch.zeros(7, dtype=torch.uint8))]
    assert not client.store([key(0), key(1)], objects).is_successful()
    assert client.lookup([key(0), key(1)]) == [0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "name no place to keep objects"),
        ({"nvme": {"path": "/tmp/x", "size": 3}}, "unknown setting nvme.size"),
        ({"nvmee": {}}, "unknown section nvmee"),
        ({"redis": {"url": "redis://h"}, "kv_cache": {"dim": 3}}, "unknown setting kv_cache.dim"),
    ],
)
def test_wrong_parameters(params, message):
    with pytest.raises(ConfigError, match=message):
        LynxL2AdapterConfig.from_dict(params)


def test_defaults_beside_the_servers_own_memory(tmp_path):
    ours = config(tmp_path).settings.config
    assert not ours.memory.enabled
    assert ours.tiering.write_behind_bytes == 0
    said = config(tmp_path, memory={"enabled": True}, tiering={"write_behind_bytes": "1MiB"})
    assert said.settings.config.memory.enabled
    assert said.settings.config.tiering.write_behind_bytes == 1 << 20


def test_a_changed_interface_fails_at_start(tmp_path, monkeypatch):
    monkeypatch.setattr(lmcache_l2, "_USED", {ObjectKey: ("chunk_hash", "tenant")})
    with pytest.raises(UnsupportedError, match=r"ObjectKey\.tenant is gone"):
        LynxL2Adapter(config(tmp_path))


# -- deletion, listing, accounting -----------------------------------------------------------------


class Listener(L2AdapterListener):
    def __init__(self):
        self.sizes, self.accessed = {}, []

    def on_l2_keys_stored(self, keys, sizes):
        self.sizes |= dict(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys):
        self.accessed += keys

    def on_l2_keys_deleted(self, keys):
        for each in keys:
            del self.sizes[each]


def test_deletion_listing_and_accounting(opened):
    client = opened()
    listener = Listener()
    client.adapter.register_listener(listener)
    keys = [key(n, cache_salt="ab"[n % 2]) for n in range(4)]
    client.store(keys, [memory_object(chunk(n)) for n in range(4)])
    usage = client.adapter.get_usage()
    assert usage.total_bytes_used == sum(listener.sizes.values())
    assert usage.bytes_by_cache_salt.keys() == {"a", "b"}
    assert usage.total_capacity_bytes == 64 << 20
    assert not client.adapter.supports_global_eviction

    first = client.adapter.list_l2_keys(page_size=3)
    rest = client.adapter.list_l2_keys(page_size=3, cursor=first.next_page_token)
    assert rest.next_page_token is None
    listed = [entry.key.to_object_key() for entry in (*first.entries, *rest.entries)]
    assert sorted(listed, key=keys.index) == keys
    assert client.adapter.list_l2_keys(model_name="other").entries == ()

    client.lookup(keys[:1])  # locked until the load is done
    client.adapter.delete([*keys[:2], key(99)])
    assert set(listener.sizes) == {keys[0], *keys[2:]}
    assert client.load(keys[:1], [memory_object(torch.zeros_like(chunk()))]) == [0]
    assert listener.accessed == keys[:1]
    client.adapter.submit_unlock(keys[:1])
    client.adapter.delete(keys)
    assert client.adapter.get_usage().total_bytes_used == 0
    assert client.adapter.get_usage().bytes_by_cache_salt == {}
    assert client.lookup(keys) == []


@pytest.mark.parametrize("wrong", [{"page_size": 0}, {"cursor": "no cursor"}])
def test_wrong_pages(opened, wrong):
    with pytest.raises(ValueError, match=r"page_size|cursor"):
        opened().adapter.list_l2_keys(**wrong)


def test_everything_outlives_the_process(opened):
    client = opened()
    keys = [key(n, cache_salt="ab"[n % 2]) for n in range(3)]
    client.store(keys, [memory_object(chunk(n)) for n in range(3)])
    before = client.adapter.get_usage()
    client.adapter.close()
    again = opened()
    listener = Listener()
    again.adapter.register_listener(listener)
    assert again.adapter.get_usage() == before
    assert set(listener.sizes) == set(keys)
    again.adapter.delete(keys[:1])
    assert again.lookup(keys) == [1, 2]


def test_what_a_tier_evicted_is_forgotten(opened, tmp_path):
    nvme = {"path": str(tmp_path / "kv"), "min_free_bytes": 0, "max_bytes": "320KiB"}
    client = opened(nvme=nvme)  # room for two chunks
    for n in range(6):
        assert client.store([key(n)], [memory_object(chunk(n))]).is_successful()
    found = client.lookup([key(n) for n in range(6)])
    assert found[-1:] == [5]
    page = client.adapter.list_l2_keys()
    assert [entry.key.to_object_key() for entry in page.entries] == [key(n) for n in found]
    usage = client.adapter.get_usage()
    assert usage.total_bytes_used == sum(entry.size_bytes for entry in page.entries) <= 320 << 10


def test_an_index_that_cannot_be_read(opened, tmp_path):
    client = opened()
    client.store([key(0)], [memory_object(chunk())])
    client.adapter.close()
    for each in (tmp_path / "kv").glob(lmcache_l2.INDEX_FILE + "*"):
        each.write_bytes(b"no database, but long enough to look like one" * 100)
    again = opened()
    assert again.adapter.list_l2_keys().entries == ()
    assert again.lookup([key(0)]) == [0]  # and so it is listed again
    assert len(again.adapter.list_l2_keys().entries) == 1


def test_nobody_waits_for_an_index_that_another_process_writes(tmp_path):
    file = tmp_path / "index"
    index = KeyIndex(file)
    index._db.execute("PRAGMA busy_timeout = 60000")
    known = {key(n): (ChunkKey(b"i" * 16, bytes([n]) * 16), 10 + n) for n in range(2)}
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writers = [
        threading.Thread(target=index.add, args=(known,)),
        threading.Thread(target=index.drop, args=([key(0)],)),
    ]
    for writer, left in zip(writers, (2, 1), strict=True):
        writer.start()
        wait_until(lambda left=left: len(index) == left)
        assert len(index.chunks(known)) == left
        index.lock(known)
        assert writer.is_alive()
    other.execute("COMMIT")
    for writer in writers:
        writer.join(60)
    index.close()
    assert KeyIndex(file).sizes() == {key(1): 11}, "written in the order in which it was changed"


# -- faults ----------------------------------------------------------------------------------------


def test_a_damaged_object_is_a_miss_and_is_replaced(opened, tmp_path):
    client = opened()
    client.store([key(0)], [memory_object(chunk())])
    objects = [p for p in (tmp_path / "kv").rglob("*.1") if p.is_file()]
    assert objects
    for path in objects:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert client.lookup([key(0)]) == [0]
    target = torch.zeros_like(chunk())
    assert client.load([key(0)], [memory_object(target)]) == []
    assert client.lookup([key(0)]) == []
    assert client.store([key(0)], [memory_object(chunk())]).bytes_transferred() > 0
    assert client.load([key(0)], [memory_object(target)]) == [0]


def test_what_could_not_be_asked_for_is_looked_up_again(opened, monkeypatch):
    monkeypatch.setattr(failures, "_PAUSE_SECONDS", 30.0)
    client = opened()
    client.store([key(0)], [memory_object(chunk())])
    nvme = client.adapter._tiers[0]._tier

    def broken(*args):
        raise TierError("no answer in time")

    target = torch.zeros_like(chunk())
    with monkeypatch.context() as patch:
        patch.setattr(nvme, "get_many", broken)
        for found in ([0], []):  # not for ever, either
            assert client.load([key(0)], [memory_object(target)]) == []
            assert client.lookup([key(0)]) == found
    assert client.load([key(0)], [memory_object(target)]) == [0]
    assert client.lookup([key(0)]) == [0]


def test_a_tier_that_fails(opened, monkeypatch):
    client = opened()
    client.store([key(0)], [memory_object(chunk())])
    nvme = client.adapter._tiers[0]._tier

    def broken(*args):
        raise TierError("the disk is gone")

    with monkeypatch.context() as patch:
        for name in ("put", "get_many", "sizes", "stats", "delete"):
            patch.setattr(nvme, name, broken)
        assert not client.store([key(1)], [memory_object(chunk(1))]).is_successful()
        assert client.lookup([key(0)]) == []
        assert client.load([key(0)], [memory_object(torch.zeros_like(chunk()))]) == []
        client.adapter.delete([key(0)])
        client.adapter.submit_unlock([key(0)])
        status = client.adapter.report_status()
        assert not status["is_healthy"]
        assert not status["tiers"]["nvme"]["answers"]
        assert len(client.adapter.list_l2_keys().entries) == 1  # not known to be gone
    assert client.adapter.report_status()["tiers"]["nvme"]["paused"]


def test_an_error_is_shown_until_the_next_task_of_its_kind_works(opened, monkeypatch):
    client = opened()
    adapter = client.adapter
    client.store([key(0)], [memory_object(chunk())])

    def broken(*args):
        raise RuntimeError("once")

    with monkeypatch.context() as patch:
        patch.setattr(adapter._stores.any, "remove", broken)
        adapter.delete([key(0)])
    assert adapter.report_status()["failing"] == {"delete": "RuntimeError: once"}
    client.lookup([key(1)])
    assert not adapter.report_status()["is_healthy"]
    adapter.delete([key(0)])
    assert adapter.report_status()["is_healthy"]
    assert client.lookup([key(0)]) == []


def test_kernels_that_do_not_compile_are_an_error_until_a_load_works(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("no compiler")

    with monkeypatch.context() as patch:
        patch.setattr(Codec, "encode", broken)
        client = Client(LynxL2Adapter(config(tmp_path)))
        wait_until(lambda: client.adapter.report_status()["failing"])
    assert not client.adapter.report_status()["is_healthy"]
    client.store([key(0)], [memory_object(chunk())])
    assert client.load([key(0)], [memory_object(torch.zeros_like(chunk()))]) == [0]
    assert client.adapter.report_status()["is_healthy"]
    client.adapter.close()


def test_close_ends_every_thread_and_descriptor(tmp_path):
    def held():
        mine = [t.name for t in threading.enumerate() if t.name.startswith("lynx-l2")]
        return mine, len(os.listdir("/proc/self/fd"))

    LynxL2Adapter(config(tmp_path)).close()
    before = held()
    client = Client(LynxL2Adapter(config(tmp_path)))
    client.store([key(0)], [memory_object(chunk())])
    client.lookup([key(0)])
    client.load([key(0)], [memory_object(torch.zeros_like(chunk()))])
    assert len(held()[0]) >= 3
    client.adapter.close()
    client.adapter.close()
    assert held() == before
    client.adapter.submit_store_task([key(1)], [memory_object(chunk())])
    client.adapter.submit_unlock([key(1)])
    ((_, result),) = client.adapter.pop_completed_store_tasks().items()
    assert not result.is_successful()
    assert not client.adapter.report_status()["is_healthy"]


def test_close_fails_what_waits_and_nothing_stays_pending(tmp_path, monkeypatch):
    adapter = LynxL2Adapter(config(tmp_path))
    running, go_on = threading.Event(), threading.Event()
    store = adapter._store

    def slow(*args):
        running.set()
        assert go_on.wait(60)
        return store(*args)

    monkeypatch.setattr(adapter, "_store", slow)
    tasks = [adapter.submit_store_task([key(n)], [memory_object(chunk(n))]) for n in range(3)]
    assert running.wait(60)
    closing = threading.Thread(target=adapter.close)
    closing.start()
    done = {}
    while len(done) < 2:  # those that wait fail at once, whatever the running one does
        Client(adapter)._wait(adapter.get_store_event_fd())
        done |= adapter.pop_completed_store_tasks()
    assert sorted(done) == tasks[1:]
    go_on.set()
    closing.join(60)
    tasks.append(adapter.submit_store_task([key(3)], [memory_object(chunk(3))]))
    done |= adapter.pop_completed_store_tasks()
    assert [done[task].is_successful() for task in tasks] == [True, False, False, False]
    assert adapter.report_status()["pending_tasks"] == 0
