"""Lynx inside a real LMCache engine: what a request gets, and what it gets when things fail."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from _redis_servers import Server, needs_redis, running, wait_until

from lynx_backend.errors import TierError, UnsupportedError

from _lmcache import CHANNELS, CHUNK, LAYERS, PLUGIN, assert_same, cache, engine, q_full  # isort: skip
from lynx_backend.integrations import lmcache_plugin  # isort: skip
from lynx_backend.integrations.lmcache import failures  # isort: skip

TOKENS = list(range(5, 5 + 3 * CHUNK + 40))  # three chunks, and a rest that is not stored
FULL = 3 * CHUNK
SECRET = "between nodes only"


def nvme(folder: Path, **settings: Any) -> dict[str, Any]:
    given = {"path": str(folder), "max_bytes": "64MiB", **settings}
    return {"memory": {"enabled": False}, "nvme": given}


def errors(kind: str) -> float:
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value("lynx_errors_total", {"kind": kind}) or 0.0


def tier_errors() -> float:
    return sum(map(errors, ("TierFullError", "TierError", "TierUnavailableError")))


@pytest.mark.parametrize("local_cpu", [False, True])
def test_a_second_process_loads_what_the_first_stored(tmp_path, local_cpu):
    """An engine of its own stands for the process: keys and objects are all that they share."""
    kv = cache(len(TOKENS))
    with engine(tmp_path, nvme(tmp_path / "kv"), local_cpu=local_cpu) as first:
        assert first.lookup(TOKENS) == 0
        first.store(TOKENS, kv)
        assert first.lookup(TOKENS) == FULL
        if not local_cpu:
            assert first.pool_bytes_in_use() == 0
    with engine(tmp_path, nvme(tmp_path / "kv"), local_cpu=local_cpu) as second:
        assert second.lookup(TOKENS) == FULL
        assert_same(second.request(TOKENS), q_full(kv, FULL))
        # With local_cpu the second load comes from LMCache's own memory: no worse, no better.
        assert_same(second.request(TOKENS), q_full(kv, FULL))
        other = [*TOKENS[:CHUNK], 1, *TOKENS[CHUNK + 1 :]]
        assert_same(second.request(other), q_full(kv, CHUNK))
        if not local_cpu:
            assert second.pool_bytes_in_use() == 0


def test_a_last_chunk_may_be_short(tmp_path):
    kv = cache(len(TOKENS))
    settings = {"save_unfull_chunk": True}
    with engine(tmp_path, {}, **settings) as one:
        one.store(TOKENS, kv)
        assert one.lookup(TOKENS) == len(TOKENS)
        assert_same(one.request(TOKENS), q_full(kv, len(TOKENS)))


def held_puts(one: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Stops puts into the only tier: set once one has begun, and to be set for it to go on."""
    stopped, go_on = threading.Event(), threading.Event()
    (tier,) = one.lynx.store.tiers
    put = tier.put

    def slow(*args: Any) -> None:
        stopped.set()
        assert go_on.wait(60)
        put(*args)

    monkeypatch.setattr(tier, "put", slow)
    return stopped, go_on


def test_storing_does_not_wait_for_a_tier(tmp_path, monkeypatch):
    """The worker is stopped in the middle of a write; the engine's thread goes on."""
    kv = cache(len(TOKENS))
    with engine(tmp_path, nvme(tmp_path / "kv")) as one:
        stopped, go_on = held_puts(one, monkeypatch)
        one.store(TOKENS, kv, flush=False)
        assert stopped.wait(60)
        one.store(list(range(9000, 9000 + CHUNK)), kv[:, :, :CHUNK], flush=False)
        go_on.set()
        one.store(TOKENS, kv)
        assert one.lookup(TOKENS) == FULL


def test_what_has_no_room_in_the_queue_is_skipped_and_counted(tmp_path, monkeypatch):
    kv = cache(len(TOKENS))
    before = errors("PutQueueFull")
    go_on = threading.Event()
    with engine(tmp_path, {}, max_local_cpu_size=0.003) as one:  # room for six chunks
        encode = one.lynx._store.encode

        def slow(*args: Any) -> Any:
            assert go_on.wait(60)
            return encode(*args)

        monkeypatch.setattr(one.lynx._store, "encode", slow)
        one.store(TOKENS, kv, flush=False)
        one.store(list(range(9000, 9000 + CHUNK)), kv[:, :, :CHUNK], flush=False)
        assert errors("PutQueueFull") - before == 1
        go_on.set()
        assert one.lynx._puts.flush(60)
        assert one.lookup(TOKENS) == FULL
        assert one.pool_bytes_in_use() == 0


def test_async_loading_gives_the_chunks_up_to_the_first_miss(tmp_path):
    kv = cache(len(TOKENS))
    with engine(tmp_path, nvme(tmp_path / "kv")) as one:
        one.store(TOKENS, kv)
        keys = [key for _, _, key in one.lmcache.token_database.process_tokens(TOKENS[:FULL])]
        loop = one.lmcache.storage_manager.loop

        def run(coroutine: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

        assert run(one.lynx.batched_async_contains("a", keys, pin=True)) == 3
        found = run(one.lynx.batched_get_non_blocking("a", keys, {"cum_chunk_lengths": [0]}))
        wanted = q_full(kv, FULL)
        for i, obj in enumerate(found):
            assert_same(obj.tensor, wanted[:, :, i * CHUNK : (i + 1) * CHUNK])
            obj.ref_count_down()
        assert one.lynx.remove(keys[1])
        assert not one.lynx.remove(keys[1])
        assert run(one.lynx.batched_async_contains("b", keys, pin=True)) == 1
        found = run(one.lynx.batched_get_non_blocking("b", keys))
        assert len(found) == 1
        found[0].ref_count_down()
        assert one.pool_bytes_in_use() == 0


# -- what must not be found ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"model": "another-model"},
        {"rank": 1, "world_size": 2},
        {"lynx": {"namespace": "v2"}},
        {"lynx": {"codec": {"profile": "linear"}}},
        {"lynx": {"codec": {"residual_bits": 3}}},
    ],
    ids=str,
)
def test_another_models_cache_is_a_miss(tmp_path, other):
    kv = cache(len(TOKENS))
    shared = nvme(tmp_path / "kv")
    with engine(tmp_path, shared) as first:
        first.store(TOKENS, kv)
    changed = dict(other)
    with engine(tmp_path, shared | changed.pop("lynx", {}), **changed) as second:
        assert second.lookup(TOKENS) == 0
        assert second.request(TOKENS).isnan().all()
    with engine(tmp_path, shared) as first:
        assert first.lookup(TOKENS) == FULL


def test_tensor_parallel_ranks_share_a_folder_and_nothing_else(tmp_path):
    caches = [cache(len(TOKENS), seed=rank) for rank in range(2)]
    for rank, kv in enumerate(caches):
        with engine(tmp_path, nvme(tmp_path / "kv"), rank=rank, world_size=2) as one:
            one.store(TOKENS, kv)
    for rank, kv in enumerate(caches):
        with engine(tmp_path, nvme(tmp_path / "kv"), rank=rank, world_size=2) as one:
            assert_same(one.request(TOKENS), q_full(kv, FULL))


def test_tags_separate_tenants_and_adapters(tmp_path):
    with engine(tmp_path, {}) as one:
        database = one.lmcache.token_database
        keys = {
            one.lynx._key(next(iter(database.process_tokens(TOKENS, request_configs=configs)))[2])
            for configs in (None, {"lmcache.tag.lora": "a"}, {"lmcache.tag.lora": "b"})
        }
        assert len(keys) == 3


@pytest.mark.parametrize("settings", [{}, {"local_cpu": True}])
def test_clear_forgets_everything_of_this_model_and_nothing_else(tmp_path, settings):
    kv = cache(len(TOKENS))
    lynx = {"nvme": nvme(tmp_path / "kv")["nvme"]}  # and in memory
    tagged = {"lmcache.tag.lora": "an-adapter"}
    slots = torch.arange(len(TOKENS))

    def store(one: Any, **tags: Any) -> None:
        one.lmcache.store(torch.tensor(TOKENS), kvcaches=kv, slot_mapping=slots, **tags)
        assert one.lynx.flush(60)

    with engine(tmp_path, lynx, model="another") as other, engine(tmp_path, lynx) as one:
        store(other)
        store(one)
        store(one, request_configs=tagged)
        with engine(tmp_path, lynx, **settings) as restarted:  # has met no key yet
            assert restarted.lmcache.clear() == FULL
            assert restarted.lookup(TOKENS) == 0
        found = one.lmcache.lookup(torch.tensor(TOKENS), request_configs=tagged)
        assert found == FULL
        assert one.lmcache.clear() >= FULL  # what it had in memory, and the tagged ones
        assert one.lookup(TOKENS) == 0
        assert one.lmcache.lookup(torch.tensor(TOKENS), request_configs=tagged) == 0
        assert len(objects(tmp_path / "kv")) == 6
        assert_same(other.request(TOKENS), q_full(kv, FULL))
        store(one)
        assert_same(one.request(TOKENS), q_full(kv, FULL))


def redis_alone(server: Server) -> dict[str, Any]:
    """Lynx's settings with no tier but this server."""
    return {
        "memory": {"enabled": False},
        "redis": {"url": server.url, "timeout_seconds": 0.5, "retries": 0},
    }


@needs_redis
def test_clear_reaches_a_server_and_says_when_it_does_not(tmp_path):
    kv = cache(len(TOKENS))
    with running(Server(tmp_path / "redis")) as server:
        lynx = redis_alone(server)
        with (
            engine(tmp_path, lynx, model="another") as other,
            engine(tmp_path, lynx) as one,
        ):
            other.store(TOKENS, kv)
            one.store(TOKENS, kv)
            assert one.lmcache.clear() == FULL
            assert one.lookup(TOKENS) == 0
            assert_same(other.request(TOKENS), q_full(kv, FULL))
            server.kill()
            with pytest.raises(TierError, match="do it again"):
                one.lmcache.clear()


def test_clear_waits_for_what_is_being_stored(tmp_path, monkeypatch):
    kv = cache(len(TOKENS))
    with engine(tmp_path, nvme(tmp_path / "kv")) as one:
        stopped, go_on = held_puts(one, monkeypatch)
        one.store(TOKENS, kv, flush=False)
        assert stopped.wait(60)
        clearing = threading.Thread(target=one.lmcache.clear)
        clearing.start()
        go_on.set()
        clearing.join(60)
        assert one.lynx.flush(60)
        assert one.lookup(TOKENS) == 0
        assert not objects(tmp_path / "kv")


def test_clear_says_when_a_tier_may_have_kept_something(tmp_path, monkeypatch):
    with engine(tmp_path, nvme(tmp_path / "kv")) as one:
        one.store(TOKENS, cache(len(TOKENS)))
        (tier,) = one.lynx.store.tiers

        def broken(*args: Any) -> None:
            raise TierError("the disk is gone")

        monkeypatch.setattr(tier, "delete", broken)
        with pytest.raises(TierError, match=r"do it again \(nvme: the disk is gone"):
            one.lmcache.clear()


# -- faults ----------------------------------------------------------------------------------------


def objects(folder: Path) -> list[Path]:
    return [f for part in "01" for f in folder.rglob(f"*.{part}")]


def damage(folder: Path) -> int:
    """Flip one bit in the middle of every object; how many there are."""
    files = objects(folder)
    for file in files:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    return len(files)


def test_damaged_objects_are_misses_and_then_replaced(tmp_path):
    kv = cache(len(TOKENS))
    before = errors("CorruptObjectError")
    with engine(tmp_path, nvme(tmp_path / "kv")) as one:
        one.store(TOKENS, kv)
    assert damage(tmp_path / "kv") == 6
    with engine(tmp_path, nvme(tmp_path / "kv")) as one:
        assert one.request(TOKENS).isnan().all()
        assert one.lookup(TOKENS) == 0
        assert errors("CorruptObjectError") > before
        one.store(TOKENS, kv)
        assert_same(one.request(TOKENS), q_full(kv, FULL))
        assert one.pool_bytes_in_use() == 0


def test_what_is_stored_is_not_quantized_a_second_time(tmp_path):
    """A cache that was loaded, and is handed over again with what was computed on it."""
    kv = cache(len(TOKENS))
    full = q_full(kv, FULL)
    again = torch.where(full.isnan(), kv, full)
    assert not torch.equal(q_full(again, FULL)[:, :, :FULL], full[:, :, :FULL])
    with engine(tmp_path, nvme(tmp_path / "kv")) as one:
        one.store(TOKENS, kv)
        one.store(TOKENS, again)
        assert_same(one.request(TOKENS), full)


def test_what_was_loaded_is_not_encoded_when_no_tier_has_it_any_more(tmp_path):
    """As when it came from a peer and was not promoted, or was evicted since."""
    kv = cache(len(TOKENS))
    folder = tmp_path / "kv"
    with engine(tmp_path, nvme(folder)) as one:
        one.store(TOKENS, kv)
        loaded = one.request(TOKENS)
        for file in objects(folder):
            file.unlink()
        one.store(TOKENS, torch.where(loaded.isnan(), kv, loaded))
        assert not objects(folder)
        one.store(TOKENS, kv)  # computed anew
        assert_same(one.request(TOKENS), loaded)


def test_what_a_peer_gave_is_not_encoded(tmp_path):
    pytest.importorskip("ucxx", reason="the UCX transport needs ucxx")
    kv = cache(len(TOKENS))
    with engine(tmp_path, nvme(tmp_path / "theirs")) as one:
        one.store(TOKENS, kv)
    with serving(tmp_path, nvme(tmp_path / "theirs")) as place:
        given = {
            **nvme(tmp_path / "ours"),
            "peers": {"nodes": place, "secret": SECRET},
            "tiering": {"write_behind_bytes": 0},  # nothing is promoted
        }
        with engine(tmp_path, given) as one:
            wait_until(lambda: one.lookup(TOKENS) == FULL)
            loaded = one.request(TOKENS)
            assert_same(loaded, q_full(kv, FULL))
            one.store(TOKENS, torch.where(loaded.isnan(), kv, loaded))
            assert not objects(tmp_path / "ours")
            assert one.lookup(TOKENS) == FULL  # as long as the peer has it
            assert_same(one.request(TOKENS), loaded)


@contextmanager
def serving(tmp_path: Path, settings: dict[str, Any]) -> Iterator[str]:
    """``lynx serve`` in a process of its own; where it is reached."""
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({**settings, "serve": {"port": 0}}))
    command = "from lynx_backend.cli import main; main()"
    root = str(Path(__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", command, "serve", "--config", str(file)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root, "LYNX_PEERS_SECRET": SECRET},
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " at 127.0.0.1:" in line
        yield line.split()[-1]
    finally:
        process.kill()
        process.wait()


def test_what_a_tier_has_and_nobody_can_read_is_stored_again(tmp_path):
    """Objects of a format to come: whole, under the right names, and of no use to this version."""
    import xxhash

    from lynx_backend import wire

    kv = cache(len(TOKENS))
    with engine(tmp_path, nvme(tmp_path / "kv")) as one:
        one.store(TOKENS, kv)
        (tier,) = one.lynx._store.tiers
        for name in list(tier.names()):
            raw = bytearray(tier.get(name))
            raw[8] += 1
            raw[wire.HEADER_BYTES - 8 : wire.HEADER_BYTES] = xxhash.xxh3_64_digest(
                raw[: wire.HEADER_BYTES - 8]
            )
            tier.put(name, bytes(raw))
        assert one.request(TOKENS).isnan().all()
        assert one.lookup(TOKENS) == 0
        one.store(TOKENS, kv)
        assert_same(one.request(TOKENS), q_full(kv, FULL))


def fill(path: Path) -> None:
    """Write a file until its file system is full."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_full_disk_costs_the_cache_and_no_request(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
    try:
        kv = cache(len(TOKENS))
        with engine(tmp_path, nvme(place / "kv", min_free_bytes=0)) as one:
            others = place / "others"
            fill(others)
            before = tier_errors()
            one.store(TOKENS, kv)
            assert tier_errors() > before
            assert one.request(TOKENS).isnan().all()
            assert one.pool_bytes_in_use() == 0
            others.unlink()
            wait_until(lambda: one.store(TOKENS, kv) or one.lookup(TOKENS) == FULL, 30)
            assert_same(one.request(TOKENS), q_full(kv, FULL))
    finally:
        subprocess.run(["umount", str(place)], check=True)


@needs_redis
def test_redis_killed_between_lookup_and_load(tmp_path):
    kv = cache(len(TOKENS))
    with running(Server(tmp_path / "redis")) as server:
        lynx = redis_alone(server)
        with engine(tmp_path, lynx) as one:
            one.store(TOKENS, kv)
            assert_same(one.request(TOKENS), q_full(kv, FULL))
            retrieve = one.lmcache.retrieve

            def killed(*args: Any, **kwargs: Any) -> Any:
                server.kill()
                return retrieve(*args, **kwargs)

            one.lmcache.retrieve = killed
            assert one.request(TOKENS).isnan().all()
            one.lmcache.retrieve = retrieve
            start = time.monotonic()
            for i in range(10):
                one.store([i, *TOKENS], torch.cat([kv, kv[:, :, :1]], 2), flush=False)
                assert one.lookup([i, *TOKENS]) == 0
            assert time.monotonic() - start < 10
            one.store(TOKENS, kv)
            server.start()
            # What was lost with the server is computed and stored again, once it is asked for.
            wait_until(lambda: one.store(TOKENS, kv) or one.lookup(TOKENS) == FULL, 30)
            assert_same(one.request(TOKENS), q_full(kv, FULL))


@needs_redis
def test_redis_stalls_between_lookup_and_load_and_loses_nothing(tmp_path):
    """Whole chunks that could not be asked for are found once the server answers, unwritten."""
    kv = cache(len(TOKENS))
    with running(Server(tmp_path / "redis")) as server:
        redis = {"url": server.url, "timeout_seconds": 0.3, "retries": 0}
        with engine(tmp_path, {"memory": {"enabled": False}, "redis": redis}) as one:
            one.store(TOKENS, kv)
            retrieve = one.lmcache.retrieve

            def stalled(*args: Any, **kwargs: Any) -> Any:
                server.signal(signal.SIGSTOP)
                try:
                    return retrieve(*args, **kwargs)
                finally:
                    server.signal(signal.SIGCONT)

            one.lmcache.retrieve = stalled
            assert one.request(TOKENS).isnan().all()
            one.lmcache.retrieve = retrieve
            wait_until(lambda: one.lookup(TOKENS) == FULL, 30)
            assert_same(one.request(TOKENS), q_full(kv, FULL))


def test_what_a_disk_has_and_cannot_give_is_not_promised_for_ever(tmp_path, monkeypatch):
    """A bad sector: the file is there, and reading it fails. Storing it again heals it."""
    monkeypatch.setattr(failures, "_PAUSE_SECONDS", 30.0)
    kv = cache(len(TOKENS))
    with engine(tmp_path, nvme(tmp_path / "kv")) as one:
        one.store(TOKENS, kv)
        (tier,) = one.lynx._store.tiers
        with monkeypatch.context() as patch:

            def bad(name: Any) -> None:
                raise TierError("Input/output error")

            patch.setattr(tier._tier, "get", bad)
            assert one.request(TOKENS).isnan().all()
            assert one.lookup(TOKENS) == FULL, "it may have been for a moment"
            assert one.request(TOKENS).isnan().all()
            assert one.lookup(TOKENS) == 0
        one.store(TOKENS, kv)
        assert_same(one.request(TOKENS), q_full(kv, FULL))


def test_no_room_in_lmcaches_memory_is_a_miss(tmp_path, monkeypatch):
    monkeypatch.setattr(lmcache_plugin, "_ALLOCATE_SECONDS", 0.05)
    kv = cache(len(TOKENS))
    before = errors("NoHostMemory")
    with engine(tmp_path, nvme(tmp_path / "kv")) as one:
        one.store(TOKENS, kv)
    with engine(tmp_path, nvme(tmp_path / "kv"), max_local_cpu_size=0.0012) as one:
        assert_same(one.request(TOKENS), q_full(kv, 2 * CHUNK))
        assert errors("NoHostMemory") > before
        assert one.lookup(TOKENS) == FULL  # it is there all the same
        assert one.pool_bytes_in_use() == 0


@pytest.mark.parametrize("write_behind", [0, "64MiB"])
def test_completion_is_told_of_what_is_kept_alone(tmp_path, write_behind):
    told: list[Any] = []
    fits = {**nvme(tmp_path / "kv"), "tiering": {"write_behind_bytes": write_behind}}
    tiny = {**nvme(tmp_path / "tiny", max_bytes=1000), "tiering": fits["tiering"]}
    for lynx, kept in ((fits, 3), (tiny, 0)):
        with engine(tmp_path, lynx) as one:
            keys = [key for _, _, key in one.lmcache.token_database.process_tokens(TOKENS)][:3]
            shape = torch.Size((2, LAYERS, CHUNK, CHANNELS))
            pool = one.lynx.local_cpu_backend
            given = [pool.allocate(shape, torch.bfloat16) for _ in keys]
            for each in given:
                each.tensor.copy_(cache(CHUNK))
            for _ in range(2):  # new, and known already
                told.clear()
                one.lynx.batched_submit_put_task(keys, given, on_complete_callback=told.append)
                assert one.lynx.flush(60)
                assert told == keys[:kept]
            for each in given:
                each.ref_count_down()


def test_an_exception_from_lmcaches_memory_costs_one_chunk(tmp_path, monkeypatch):
    kv = cache(len(TOKENS))
    before = errors("RuntimeError")
    with engine(tmp_path, nvme(tmp_path / "kv")) as one:
        one.store(TOKENS, kv)
        pool = one.lynx.local_cpu_backend
        allocate, calls = pool.allocate, iter(range(9))

        def broken(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == 1:
                raise RuntimeError("the allocator is broken")
            return allocate(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(pool, "allocate", broken)
            keys = [key for _, _, key in one.lmcache.token_database.process_tokens(TOKENS)][:3]
            found = one.lynx.batched_get_blocking(keys)
        assert [each is not None for each in found] == [True, False, True]
        for each in found:
            if each is not None:
                each.ref_count_down()
        assert errors("RuntimeError") - before == 1
        assert one.lookup(TOKENS) == FULL  # it is there all the same
        assert_same(one.request(TOKENS), q_full(kv, FULL))
        assert one.pool_bytes_in_use() == 0


def test_a_cache_of_nan_is_not_stored(tmp_path):
    kv = cache(len(TOKENS))
    kv[:, :, CHUNK + 5] = float("nan")
    with engine(tmp_path, nvme(tmp_path / "kv")) as one:
        one.store(TOKENS, kv)
        assert one.lookup(TOKENS) == CHUNK
        assert one.pool_bytes_in_use() == 0


# -- start and end ---------------------------------------------------------------------------------


def lynx_threads() -> list[str]:
    """Those that belong to one backend; the codec's pool is shared by the process."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("lynx-") and "codec" not in name]


def test_close_ends_every_thread(tmp_path):
    before = lynx_threads()
    with engine(tmp_path, {"nvme": {"path": str(tmp_path / "kv")}}) as one:
        one.store(TOKENS, cache(len(TOKENS)), flush=False)
        one.lookup(TOKENS)
        assert len(lynx_threads()) > len(before)
    assert lynx_threads() == before


def test_closing_takes_no_longer_than_lmcache_waits(tmp_path, monkeypatch):
    """Encoding may use up its part of the time once, and the store gets what is left of all."""
    monkeypatch.setattr(lmcache_plugin, "_CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(lmcache_plugin, "_ENCODE_SECONDS", 0.2)
    encoding, go_on = threading.Event(), threading.Event()
    given: list[tuple[str, float]] = []
    with engine(tmp_path, nvme(tmp_path / "kv")) as one:
        puts, store = one.lynx._puts, one.lynx.store
        encode, stop, close = store.encode, puts.close, store.close

        def slow(*args: Any) -> Any:
            encoding.set()
            assert go_on.wait(60)
            return encode(*args)

        def stop_encoding(seconds: float) -> int:
            given.append(("encode", seconds))
            left = stop(seconds)
            go_on.set()
            return left

        def close_store(seconds: float) -> None:
            given.append(("write", seconds))
            close(seconds)

        monkeypatch.setattr(store, "encode", slow)
        monkeypatch.setattr(puts, "close", stop_encoding)
        monkeypatch.setattr(store, "close", close_store)
        one.store(TOKENS, cache(len(TOKENS)), flush=False)
        assert encoding.wait(60)
    # LMCache closes its memory first, and then Lynx.
    assert [what for what, _ in given] == ["encode", "encode", "write"]
    assert given[0][1] <= 0.2
    assert given[1][1] == 0.0
    assert given[2][1] <= 0.3


def test_a_process_that_closes_nothing_ends_and_keeps_what_it_stored(tmp_path):
    """vLLM does not close LMCache in-process."""
    script = f"""
import sys, pathlib
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from _lmcache import *
made = engine(pathlib.Path({str(tmp_path)!r}), {nvme(tmp_path / "kv")!r})
one = made.__enter__()
kept = [made]  # else the generator would be closed
one.store({TOKENS!r}, cache(len({TOKENS!r})), flush=False)
import lmcache.v1.cache_engine
"""
    run = {**os.environ, "PYTHONHASHSEED": "0"}
    subprocess.run([sys.executable, "-c", script], env=run, check=True, timeout=120)
    assert len(objects(tmp_path / "kv")) == 6


@pytest.mark.parametrize(
    ("settings", "lynx", "message"),
    [
        ({"use_layerwise": True}, {}, "use_layerwise"),
        ({}, {"nvem": {}}, "nvme"),
        ({}, {"codec": {"calibration": "/no/such/file"}}, "/no/such/file"),
    ],
)
def test_what_cannot_work_is_one_message_at_start(tmp_path, settings, lynx, message, caplog):
    with caplog.at_level("ERROR"), engine(tmp_path, lynx, **settings) as one:
        assert not one.has_lynx
        if not settings:
            one.store(TOKENS, cache(len(TOKENS)))
            assert one.lookup(TOKENS) == 0


def test_unseeded_keys_are_a_warning_where_tiers_outlive_the_process(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with engine(tmp_path, {}):
        assert "export PYTHONHASHSEED" not in _own(caplog)
    with engine(tmp_path, nvme(tmp_path / "kv")):
        assert "export PYTHONHASHSEED" in _own(caplog)


def test_no_settings_are_a_warning_that_says_where_they_belong(tmp_path, caplog):
    misplaced = {**PLUGIN, "nvme": {"path": str(tmp_path / "kv")}}
    with engine(tmp_path, {}, extra_config=misplaced) as one:
        assert one.has_lynx
        assert "keeps 4 GiB in this process's memory" in _own(caplog)
        assert "extra_config.lynx" in _own(caplog)
    caplog.clear()
    with engine(tmp_path, {"memory": {"max_bytes": "1GiB"}}):
        assert "no settings found" not in _own(caplog)


def _own(caplog: pytest.LogCaptureFixture) -> str:
    return "".join(r.getMessage() for r in caplog.records if r.name.startswith("lynx_backend"))


def test_another_interface_is_one_message_at_start(tmp_path, monkeypatch):
    from lmcache.v1.metadata import LMCacheMetadata

    monkeypatch.setitem(lmcache_plugin._USED, LMCacheMetadata, ("kv_shape", "kv_geometry"))
    with pytest.raises(UnsupportedError, match=r"LMCacheMetadata.kv_geometry is gone.*0\.5\.6"):
        lmcache_plugin.LynxBackend()
    with engine(tmp_path, {}) as one:
        assert not one.has_lynx


def test_the_plugin_is_named_as_documented():
    module, name = PLUGIN.values()
    assert getattr(sys.modules[module], name) is lmcache_plugin.LynxBackend
