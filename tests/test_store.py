"""The store over real tiers: whole chunks or misses, whatever the tiers hold."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest
import torch

from lynx_backend import (
    Codec,
    CodecSpec,
    ConfigError,
    InvalidInputError,
    TierError,
    tier_access,
)
from lynx_backend.codec import Calibration
from lynx_backend.config import LynxConfig
from lynx_backend.keys import ChunkKey, ObjectName, Part
from lynx_backend.layout import KVLayout
from lynx_backend.logs import WarningLimiter
from lynx_backend.store import ChunkStore, Presence, StoredObjects, new_cache
from lynx_backend.tiers import MemoryTier, NvmeTier, Tier

KEYS = [ChunkKey(b"i" * 16, bytes([n]) * 16) for n in range(4)]


def cache(seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, 64, 2, 8, generator=g).to(torch.bfloat16)


@pytest.fixture
def tiers(tmp_path: Path) -> list[Tier]:
    return [MemoryTier(1 << 20), NvmeTier(tmp_path / "nvme", 1 << 20)]


@pytest.fixture
def store(tiers: list[Tier]):
    store = ChunkStore(Codec(), tiers)
    yield store
    store.close()


def q_full(kv: torch.Tensor, spec: CodecSpec | None = None) -> torch.Tensor:
    codec = Codec(spec)
    return codec.decode(*codec.encode(kv))


def test_put_then_get_is_q_full(store: ChunkStore):
    assert store.get(KEYS[0]) is None
    assert store.put(KEYS[0], cache())
    assert torch.equal(store.get(KEYS[0]), q_full(cache()))
    out = torch.empty(2, 2, 100, 2, 8, dtype=torch.bfloat16)[:, :, 20:84]
    assert store.get(KEYS[0], out) is out
    assert torch.equal(out, q_full(cache()))


def test_lookup_and_remove(store: ChunkStore):
    store.put(KEYS[0], cache())
    store.put(KEYS[1], cache(1))
    for tier in store.tiers:
        tier.delete([KEYS[1].object(Part.RESIDUAL)])
        tier.delete([KEYS[2].object(Part.ANCHOR)])
    assert store.lookup(KEYS[:3]) == [Presence.FULL, Presence.COARSE, Presence.ABSENT]
    store.remove(KEYS)
    assert store.lookup(KEYS[:3]) == [Presence.ABSENT] * 3
    assert [list(tier.names()) for tier in store.tiers] == [[], []]


def test_an_anchor_alone_is_a_miss_to_get_and_there_to_draft_on(store: ChunkStore):
    store.put(KEYS[0], cache())
    for tier in store.tiers:
        tier.delete([KEYS[0].object(Part.RESIDUAL)])
    assert store.get(KEYS[0]) is None
    anchor = store.load(KEYS[0].object(Part.ANCHOR))
    assert torch.equal(store.codec.decode(anchor), Codec().decode(Codec().encode(cache())[0]))
    assert store.load(KEYS[0].object(Part.RESIDUAL)) is None


def test_parts_may_lie_in_different_tiers(store: ChunkStore):
    store.put(KEYS[0], cache())
    store.tiers[0].delete([KEYS[0].object(Part.RESIDUAL)])
    store.tiers[1].delete([KEYS[0].object(Part.ANCHOR)])
    assert store.lookup(KEYS[:1]) == [Presence.FULL]
    assert torch.equal(store.get(KEYS[0]), q_full(cache()))


def test_a_second_process_finds_what_the_first_stored(tmp_path: Path):
    first = ChunkStore(Codec(), [NvmeTier(tmp_path, 1 << 20)])
    first.put(KEYS[0], cache())
    second = ChunkStore(Codec(), [NvmeTier(tmp_path, 1 << 20)])
    assert torch.equal(second.get(KEYS[0]), q_full(cache()))


@pytest.mark.parametrize("part", list(Part))
def test_a_damaged_object_is_removed_and_the_next_tier_answers(
    store: ChunkStore, part: Part, caplog: pytest.LogCaptureFixture
):
    store.put(KEYS[0], cache())
    name = KEYS[0].object(part)
    for offset in (12, 60, 90, 110, 140, -1):
        data = bytearray(store.tiers[1].get(name))
        data[offset] ^= 4
        store.tiers[0].put(name, data)
        with caplog.at_level(logging.WARNING):
            assert torch.equal(store.get(KEYS[0]), q_full(cache()))
        assert store.tiers[0].get(name) is None
    damaged = bytearray(store.tiers[1].get(name))
    damaged[200] ^= 4
    store.tiers[1].put(name, damaged)
    assert store.get(KEYS[0]) is None
    assert store.put(KEYS[0], cache())
    assert torch.equal(store.get(KEYS[0]), q_full(cache()))


def test_objects_under_a_foreign_name_are_refused(store: ChunkStore):
    """A whole pair, stored under another chunk's key, must not be served for it."""
    store.put(KEYS[0], cache())
    for tier in store.tiers:
        for part in Part:
            tier.put(KEYS[1].object(part), tier.get(KEYS[0].object(part)))
    assert store.get(KEYS[1]) is None
    assert store.load(KEYS[1].object(Part.ANCHOR)) is None


def test_a_residual_of_another_encoding_is_never_combined(store: ChunkStore):
    """Two writers of one key: the parts of both are whole, of one key, and do not fit."""
    anchor, _ = store.codec.encode(cache(0), KEYS[0].digest)
    _, residual = store.codec.encode(cache(1), KEYS[0].digest)
    for tier in store.tiers:
        tier.put(KEYS[0].object(Part.ANCHOR), anchor.numpy().data)
        tier.put(KEYS[0].object(Part.RESIDUAL), residual.numpy().data)
    assert store.get(KEYS[0]) is None
    assert store.lookup(KEYS[:1]) == [Presence.ABSENT], "so that the next put can heal it"


def test_another_codec_spec_is_a_miss_and_stays(tmp_path: Path):
    mine = ChunkStore(Codec(), [NvmeTier(tmp_path, 1 << 20)])
    theirs = ChunkStore(Codec(CodecSpec("paper")), [NvmeTier(tmp_path, 1 << 20)])
    theirs.put(KEYS[0], cache())
    assert mine.get(KEYS[0]) is None
    assert theirs.get(KEYS[0]) is not None


class CountedTier(MemoryTier):
    """Counts how often it is asked for objects."""

    name = "counted"
    asked = 0

    def get_many(self, names: list[ObjectName]) -> list[memoryview | None]:
        self.asked += 1
        return super().get_many(names)


def test_several_chunks_are_one_round_trip_to_each_tier():
    first, second = CountedTier(1 << 20), MemoryTier(1 << 20)
    store = ChunkStore(Codec(), [first, second])
    for i, key in enumerate(KEYS):
        store.put(key, cache(i))
    first.delete([KEYS[1].object(part) for part in Part])
    for tier in store.tiers:
        tier.delete([KEYS[2].object(Part.RESIDUAL)])
    outs: dict[int, torch.Tensor] = {}

    def target(i: int, layout: KVLayout) -> torch.Tensor | None:
        if i == 3:
            return None  # the caller has no room for it
        return outs.setdefault(i, torch.empty(layout.shape, dtype=torch.bfloat16))

    first.asked = 0
    found = store.get_many(KEYS, target)
    assert first.asked == 2  # all of them; then the residual that another tier's anchor lacks
    assert [kv is not None for kv in found] == [True, True, False, False]
    for i in (0, 1):
        assert found[i] is outs[i]
        assert torch.equal(found[i], q_full(cache(i)))
    assert store.get_many([], target) == []
    store.close()


class Device(MemoryTier):
    """Answers like a device: only when asked, each time anew."""

    name = "device"
    in_memory = False

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.asked: list[int] = []
        self.written = 0
        self.asked_again = threading.Event()

    def get_many(self, names: list[ObjectName]) -> list[memoryview | None]:
        self.asked.append(len(names))
        if len(self.asked) > 1:
            self.asked_again.set()
        return super().get_many(names)

    def put(self, name: ObjectName, data: bytes) -> None:
        super().put(name, data)
        self.written += 1


def test_the_next_chunks_are_read_while_some_are_decoded():
    tier = Device()
    store = ChunkStore(Codec(), [tier])
    keys = [ChunkKey(b"i" * 16, bytes([n]) * 16) for n in range(20)]
    for i, key in enumerate(keys):
        store.put(key, cache(i))
    tier.delete([keys[11].object(Part.RESIDUAL)])

    def target(i: int, layout: KVLayout) -> torch.Tensor:
        # Decoding waits for this, and what follows is read meanwhile.
        assert tier.asked_again.wait(30)
        return torch.empty(layout.shape, dtype=torch.bfloat16)

    found = store.get_many(keys, target)
    assert tier.asked == [16, 16, 8]
    assert [i for i, kv in enumerate(found) if kv is None] == [11]
    assert all(torch.equal(found[i], q_full(cache(i))) for i in range(20) if i != 11)

    def closing(i: int, layout: KVLayout) -> torch.Tensor:
        store.close()
        return torch.empty(layout.shape, dtype=torch.bfloat16)

    # What was read before is decoded, the rest are misses.
    assert [kv is not None for kv in store.get_many(keys, closing)[16:]] == [False] * 4


def test_closing_does_not_wait_for_reads_and_what_is_cancelled_is_a_miss():
    tier = Device()
    store = ChunkStore(Codec(), [tier])
    keys = [ChunkKey(b"i" * 16, bytes([n]) * 16) for n in range(20)]
    for i, key in enumerate(keys):
        store.put(key, cache(i))
    closed = threading.Event()
    stuck = [store._readers.submit(closed.wait, 20) for _ in range(4)]

    def target(i: int, layout: KVLayout) -> torch.Tensor:
        store.close()
        closed.set()
        return torch.empty(layout.shape, dtype=torch.bfloat16)

    assert [kv is not None for kv in store.get_many(keys, target)] == [True] * 8 + [False] * 12
    assert [each.result() for each in stuck] == [True] * 4
    store.close()


def test_a_cache_may_change_once_it_is_encoded(store: ChunkStore):
    kv = cache()
    chunk = store.encode(KEYS[0], kv)
    kv.zero_()
    assert store.lookup(KEYS[:1]) == [Presence.ABSENT]
    assert store.write(chunk)
    assert torch.equal(store.get(KEYS[0]), q_full(cache()))


class BrokenTier(MemoryTier):
    """A tier whose device has gone: every call fails as a real one does."""

    name = "broken"
    broken = True
    error: Exception = TierError("device gone; check the mount")

    def _check(self) -> None:
        if self.broken:
            raise self.error

    def put(self, name: ObjectName, data: bytes) -> None:
        self._check()
        super().put(name, data)

    def get(self, name: ObjectName) -> memoryview | None:
        self._check()
        return super().get(name)

    def sizes(self, names: list[ObjectName]) -> list[int | None]:
        self._check()
        return super().sizes(names)

    def delete(self, names: list[ObjectName]) -> None:
        self._check()
        super().delete(names)

    def names(self):
        self._check()
        return super().names()

    def stats(self):
        self._check()
        return super().stats()


@pytest.mark.parametrize(
    "error",
    [
        TierError("device gone; check the mount"),
        OverflowError("device gone"),  # no tier should raise it: a bug, or a client library's
        ConfigError("device gone"),
    ],
)
def test_a_failing_tier_costs_nothing_but_itself(
    error: Exception, caplog: pytest.LogCaptureFixture
):
    broken = BrokenTier(1 << 20)
    broken.name = f"broken-{type(error).__name__}"  # log lines are limited for each name
    broken.error = error
    store = ChunkStore(Codec(), [broken, MemoryTier(1 << 20)])
    with caplog.at_level(logging.WARNING):
        assert store.put(KEYS[0], cache())
        assert torch.equal(store.get(KEYS[0]), q_full(cache()))
        assert store.lookup(KEYS[:1]) == [Presence.FULL]
        store.remove(KEYS[:1])
    assert store.lookup(KEYS[:1]) == [Presence.ABSENT]
    assert "device gone" in caplog.text
    alone = ChunkStore(Codec(), [broken])
    assert not alone.put(KEYS[0], cache())
    assert alone.get(KEYS[0]) is None
    assert alone.lookup(KEYS[:1]) == [Presence.ABSENT]
    alone.remove(KEYS[:1])
    with pytest.raises(TierError, match="device gone"):
        ChunkStore(Codec(), [broken]).clear([KEYS[0].identity])
    broken.broken = False
    assert alone.put(KEYS[0], cache())
    assert torch.equal(alone.get(KEYS[0]), q_full(cache()))


class ReadOnlyTier(MemoryTier):
    """A disk that was mounted read-only once it had errors."""

    name = "read-only"
    read_only = True

    def delete(self, names: list[ObjectName]) -> None:
        if self.read_only:
            raise TierError("read-only; look for disk errors")
        super().delete(names)


def test_refused_is_what_is_found_again_and_again_and_never_read():
    """Not what is gone by then, and not what might be read by asking once more."""
    first, second = ReadOnlyTier(1 << 20), BrokenTier(1 << 20)
    second.broken = first.read_only = False
    store = ChunkStore(Codec(), [first, second])

    def refused() -> list[int]:
        told: list[int] = []
        store.get_many(KEYS, lambda _, layout: new_cache(layout), told.append)
        return told

    assert refused() == [], "nothing is there"
    theirs = ChunkStore(Codec(CodecSpec("paper")), [first])
    for key in KEYS[:2]:
        theirs.put(key, cache())
    ChunkStore(Codec(), [second]).put(KEYS[1], cache())
    assert refused() == [0], "another codec's; of the other chunk there is also one of ours"
    second.broken = True
    assert refused() == [], "the tier that fails may have one of ours"
    second.broken = False

    for part in Part:
        first.put(KEYS[2].object(part), b"damaged")
    first.read_only = True
    assert refused() == [0, 2]
    first.read_only = False
    assert refused() == [0], "what is damaged was removed"

    for part, tier in ((Part.ANCHOR, first), (Part.RESIDUAL, second)):
        objects = store.codec.encode(cache(part), KEYS[3].digest)
        tier.put(KEYS[3].object(part), objects[part].numpy().data)
    assert refused() == [0, 3], "halves of two encodings"


def test_a_chunk_that_fits_nowhere_is_not_stored():
    store = ChunkStore(Codec(), [MemoryTier(1000)])
    assert not store.put(KEYS[0], cache())
    assert store.lookup(KEYS[:1]) == [Presence.ABSENT]


def test_a_residual_goes_before_its_anchor_under_pressure():
    size = sum(map(len, Codec().encode(cache())))
    store = ChunkStore(Codec(), [MemoryTier(int(3.7 * size))])
    for n, key in enumerate(KEYS):
        assert store.put(key, cache(n))
    assert store.lookup(KEYS) == [Presence.COARSE] + [Presence.FULL] * 3


def test_wrong_input_is_the_callers_to_see(store: ChunkStore):
    with pytest.raises(InvalidInputError, match="NaN"):
        store.put(KEYS[0], cache() * float("nan"))
    store.put(KEYS[0], cache())
    with pytest.raises(InvalidInputError, match="target is"):
        store.get(KEYS[0], torch.empty(2, 2, 63, 2, 8, dtype=torch.bfloat16))
    assert store.get(KEYS[0]) is not None, "a wrong target must not cost the chunk"
    with pytest.raises(InvalidInputError, match="different names"):
        ChunkStore(Codec(), [])
    with pytest.raises(InvalidInputError, match="different names"):
        ChunkStore(Codec(), [MemoryTier(1), MemoryTier(1)])


def test_clear_removes_identities_from_all_tiers(store: ChunkStore):
    other = ChunkKey(b"o" * 16, bytes(16))
    for key in (*KEYS, other):
        assert store.put(key, cache())
    store.tiers[0].delete([KEYS[0].object(Part.RESIDUAL)])
    assert store.clear({KEYS[0].identity, b"?" * 16}) == 2 * len(KEYS)
    assert [sorted(tier.names()) for tier in store.tiers] == [
        [other.object(part) for part in Part]
    ] * 2
    assert store.clear({KEYS[0].identity}) == 0


def test_clear_goes_in_batches_and_on_when_a_tier_fails(store: ChunkStore, monkeypatch):
    monkeypatch.setattr(tier_access, "_CLEARED_AT_A_TIME", 3)
    for key in KEYS:
        assert store.put(key, cache())
    memory, nvme = store.tiers

    def broken(_: object) -> None:
        raise TierError("no")

    with monkeypatch.context() as patch:
        patch.setattr(nvme, "delete", broken)
        with pytest.raises(TierError, match="nvme: no"):
            store.clear({KEYS[0].identity})
    assert not list(memory.names())
    assert store.clear({KEYS[0].identity}) == len(KEYS)
    assert not list(nvme.names())


def test_clear_drops_what_waits_to_be_written(tmp_path: Path, monkeypatch):
    nvme = NvmeTier(tmp_path, 1 << 20)
    store = ChunkStore(Codec(), [nvme], write_behind_bytes=1 << 20)
    stopped, go_on = threading.Event(), threading.Event()
    put = nvme.put

    def slow(*args: object) -> None:
        stopped.set()
        assert go_on.wait(60)
        put(*args)

    monkeypatch.setattr(nvme, "put", slow)
    for key in KEYS:
        assert store.put(key, cache())
    assert stopped.wait(60)
    clearing = threading.Thread(target=store.clear, args=[{KEYS[0].identity}])
    clearing.start()
    go_on.set()
    clearing.join(60)
    assert store.flush(60)
    assert not list(nvme.names())
    store.close()


def test_from_config(tmp_path: Path):
    inline = {
        "codec": {"profile": "paper", "chunk": 16},
        "memory": {"max_bytes": "1MiB"},
        "nvme": {"path": str(tmp_path), "max_bytes": "2MiB", "min_free_bytes": 0},
    }
    store = ChunkStore.from_config(LynxConfig.load(inline=inline, environ={}))
    assert store.codec.spec == CodecSpec("paper", chunk=16)
    assert [(t.name, t.stats().capacity_bytes) for t in store.tiers] == [
        ("memory", 1 << 20),
        ("nvme", 2 << 20),
    ]
    (tmp_path / "file").touch()
    bad = {"nvme": {"path": str(tmp_path / "file")}}
    with pytest.raises(ConfigError):
        ChunkStore.from_config(LynxConfig.load(inline=bad, environ={}))


def test_from_config_without_a_tier_opens_nothing():
    pytest.importorskip("ucxx", reason="the UCX transport needs ucxx")
    before = threading.enumerate()
    inline = {"memory": {"enabled": False}, "peers": {"nodes": "127.0.0.1:7439"}}
    with pytest.raises(ConfigError, match=r"set nvme\.path, redis\.url .* or memory\.enabled"):
        ChunkStore.from_config(LynxConfig.load(inline=inline, environ={}))
    assert threading.enumerate() == before


@pytest.mark.parametrize("bad", [{"nvme": {"path": "/dev/null"}}, {"peers": {"nodes": "nowhere"}}])
def test_from_config_closes_what_it_opened(bad: dict[str, object], monkeypatch):
    closed: list[Tier] = []
    monkeypatch.setattr(MemoryTier, "close", lambda tier: closed.append(tier))
    inline = {"memory": {"max_bytes": "1MiB"}, **bad}
    with pytest.raises(ConfigError):
        ChunkStore.from_config(LynxConfig.load(inline=inline, environ={}))
    assert [tier.name for tier in closed] == ["memory"]


def test_objects_as_a_transports_source(store: ChunkStore):
    store.put(KEYS[0], cache())
    source = StoredObjects(store)
    names = [KEYS[0].object(part) for part in Part] + [KEYS[1].object(Part.ANCHOR)]
    sizes = source.sizes(names)
    assert sizes == [len(o) for o in Codec().encode(cache())] + [None]
    assert [len(source.get(n) or b"") or None for n in names] == sizes


def test_calibration_from_config(tmp_path: Path):
    layout = KVLayout(2, 2, 64, 2, 8, "bfloat16")
    made = Calibration.none(layout)
    made.save(tmp_path / "model.npz")
    codec = {"profile": "adaptive", "calibration": str(tmp_path / "model.npz")}
    config = LynxConfig.load(inline={"codec": codec}, environ={})
    store = ChunkStore.from_config(config)
    assert store.codec.spec.calibration == made.fingerprint
    assert store.put(KEYS[0], cache())
    assert store.get(KEYS[0]).shape == cache().shape
    codec["calibration"] = str(tmp_path / "none.npz")
    with pytest.raises(ConfigError, match=r"none\.npz"):
        ChunkStore.from_config(LynxConfig.load(inline={"codec": codec}, environ={}))


class HeldTier(MemoryTier):
    """A slow device: a put waits until it is let through."""

    name = "slow"
    in_memory = False

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.let_through = threading.Event()

    def put(self, name: ObjectName, data: bytes) -> None:
        assert self.let_through.wait(20)
        super().put(name, data)


def count(op: str, result: str, tier: str) -> float:
    registry = pytest.importorskip("prometheus_client").REGISTRY
    labels = {"part": "anchor", "tier": tier, "op": op, "result": result}
    return registry.get_sample_value("lynx_objects_total", labels) or 0.0


class TestWriteBehind:
    size = sum(map(len, Codec().encode(cache())))

    @pytest.fixture
    def slow(self) -> HeldTier:
        return HeldTier(1 << 20)

    @pytest.fixture
    def store(self, slow: HeldTier):
        store = ChunkStore(Codec(), [MemoryTier(1 << 20), slow], int(2.5 * self.size))
        yield store
        slow.let_through.set()
        store.close()

    def test_a_put_waits_for_memory_only(self, store: ChunkStore, slow: HeldTier):
        written = count("put", "ok", "slow")
        assert store.put(KEYS[0], cache())
        assert torch.equal(store.get(KEYS[0]), q_full(cache()))
        assert not store.flush(0)
        assert list(slow.names()) == []
        assert count("put", "ok", "slow") == written, "counted when it is done"
        slow.let_through.set()
        assert store.flush(20)
        assert len(list(slow.names())) == 2
        assert count("put", "ok", "slow") == written + 1

    def test_a_full_queue_skips_and_says_so(self, store: ChunkStore, slow: HeldTier):
        skipped = count("put", "skipped", "slow")
        for key in KEYS[:3]:
            assert store.put(key, cache())
        assert count("put", "skipped", "slow") == skipped + 1
        slow.let_through.set()
        assert store.flush(20)
        assert slow.sizes([KEYS[2].object(Part.ANCHOR)]) == [None]
        assert store.lookup(KEYS[:3]) == [Presence.FULL] * 3

    def test_each_reason_to_skip_has_its_own_message(
        self, caplog: pytest.LogCaptureFixture, monkeypatch
    ):
        monkeypatch.setattr(tier_access, "warn_limited", WarningLimiter().warn)
        slow = HeldTier(1 << 20)
        small = ChunkStore(Codec(), [slow], self.size - 1)
        store = ChunkStore(Codec(), [slow], self.size)
        with caplog.at_level(logging.WARNING):
            assert not small.put(KEYS[0], cache())
            assert small.flush(0)
            assert store.put(KEYS[0], cache())
            assert not store.put(KEYS[1], cache())
            slow.let_through.set()
            store.close()
            assert not store.put(KEYS[2], cache())
        small.close()
        messages = [record.getMessage() for record in caplog.records]
        skipped = [text for text in messages if "a chunk was not written" in text]
        assert len(skipped) == 3
        assert f"more than tiering.write_behind_bytes={self.size - 1}" in skipped[0]
        assert f"does not keep up: {self.size} bytes wait already" in skipped[1]
        assert "it is closed" in skipped[2]

    def test_a_writer_may_wait_for_room(self, store: ChunkStore, slow: HeldTier):
        chunks = [store.encode(key, cache()) for key in KEYS[:3]]
        for chunk in chunks[:2]:
            assert store.write(chunk)
        waiting = threading.Thread(target=store.write, args=(chunks[2], 20.0))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        slow.let_through.set()
        waiting.join(20)
        assert store.flush(20)
        assert slow.sizes([KEYS[2].object(Part.ANCHOR)]) != [None]

    def test_closing_gives_all_tiers_together_so_much_time(self):
        tiers = [HeldTier(1 << 20) for _ in range(3)]
        for i, tier in enumerate(tiers):
            tier.name = f"slow{i}"
        tiers.append(Device())
        store = ChunkStore(Codec(), tiers, 1 << 20)
        store.put(KEYS[0], cache())
        start = time.monotonic()
        assert not store.flush(0.5)
        store.close(0.5)
        assert time.monotonic() - start < 2.5, "one wait for all of them, and not one each"
        assert tiers[-1].written == 2, "those that can, have written meanwhile"
        for tier in tiers[:3]:
            tier.let_through.set()

    def test_a_tier_that_cannot_be_closed_does_not_keep_the_others_open(self, monkeypatch):
        broken, other = MemoryTier(1 << 20), Device()
        closed: list[bool] = []
        monkeypatch.setattr(broken, "close", lambda: 1 / 0)
        monkeypatch.setattr(other, "close", lambda: closed.append(True))
        ChunkStore(Codec(), [broken, other]).close()
        assert closed

    def test_what_is_removed_does_not_come_back(self, store: ChunkStore, slow: HeldTier):
        for key in KEYS[:2]:
            store.put(key, cache())
        slow.let_through.set()
        store.remove(KEYS[:2])
        assert store.flush(20)
        assert store.lookup(KEYS[:2]) == [Presence.ABSENT] * 2

    def test_what_a_slow_tier_answers_is_promoted_whole(self, store: ChunkStore, slow: HeldTier):
        slow.let_through.set()
        store.put(KEYS[0], cache())
        assert store.flush(20)
        memory = store.tiers[0]
        names = [KEYS[0].object(part) for part in Part]
        promoted = count("promote", "ok", "memory")
        for lost in (names, names[1:]):
            memory.delete(lost)
            assert torch.equal(store.get(KEYS[0]), q_full(cache()))
            assert store.flush(20)
            assert None not in memory.sizes(names)
        memory.delete(names)
        for name in names:
            assert store.load(name) is not None
        assert store.flush(20)
        assert None not in memory.sizes(names)
        assert count("promote", "ok", "memory") == promoted + 2

    def test_damaged_and_coarse_chunks_are_not_promoted(self, store: ChunkStore, slow: HeldTier):
        slow.let_through.set()
        for key in KEYS[:2]:
            store.put(key, cache())
        assert store.flush(20)
        anchor, residual = (KEYS[0].object(part) for part in Part)
        damaged = bytearray(slow.get(residual))
        damaged[-1] ^= 1
        slow.put(residual, damaged)
        slow.delete([KEYS[1].object(Part.RESIDUAL)])
        store.tiers[0].delete([each.object(part) for each in KEYS[:2] for part in Part])
        assert store.get(KEYS[0]) is None
        assert store.get(KEYS[1]) is None
        assert store.flush(20)
        assert list(store.tiers[0].names()) == []
        assert slow.sizes([anchor, residual])[1] is None, "the damaged one is removed"
