"""What every tier must do, as tests."""

from __future__ import annotations

import array
import hashlib
import random
import threading
from abc import ABC, abstractmethod

import pytest

from ..errors import InvalidInputError, TierError, TierFullError
from ..keys import ChunkKey, ObjectName, Part
from ..tiers.base import Buffer, Tier, TierStats
from ..tiers.catalog import ANCHOR_ONLY_SHARE

#: Sizes in these tests are multiples of it, for tiers that count in blocks of up to this size.
UNIT = 4096


def chunk(number: int) -> ChunkKey:
    """The key of an imaginary chunk."""
    prefix = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()
    return ChunkKey(b"conformance-test", prefix)


def anchor(number: int) -> ObjectName:
    """The name of an imaginary chunk's anchor."""
    return chunk(number).object(Part.ANCHOR)


def residual(number: int) -> ObjectName:
    """The name of an imaginary chunk's residual."""
    return chunk(number).object(Part.RESIDUAL)


def content(name: ObjectName, size: int, version: int = 0) -> bytes:
    """Bytes that no other name, size or version has, each of them depending on all three."""
    seed = f"{name} {size} {version}".encode()
    return hashlib.shake_128(seed).digest(size)


class TierConformance(ABC):
    """Subclass it as ``class TestMyTier(TierConformance)``, and pytest runs it on your tier.

    Use a fixture with ``autouse=True`` for what :meth:`make_tier` needs. A tier that keeps its
    capacity itself takes :class:`BoundedTierConformance`.
    """

    @abstractmethod
    def make_tier(self, max_bytes: int) -> Tier:
        """A new, empty tier of this capacity."""

    def reopen(self, tier: Tier, max_bytes: int) -> Tier:
        """What a new process finds where ``tier`` kept its objects; tiers that forget skip this."""
        pytest.skip(f"a {tier.name} tier does not outlive its process")

    def put(self, tier: Tier, *names: ObjectName, units: int = 1) -> None:
        for name in names:
            tier.put(name, content(name, units * UNIT))

    def read(self, tier: Tier, name: ObjectName) -> bytes | None:
        got = tier.get(name)
        return None if got is None else bytes(got)

    def held(self, tier: Tier, *names: ObjectName) -> list[bool]:
        return [size is not None for size in tier.sizes(names)]

    def put_chunk(self, tier: Tier, number: int) -> None:
        """A whole chunk of 4 units, an anchor of 1 and a residual of 3, in a store's order."""
        self.put(tier, residual(number), units=3)
        self.put(tier, anchor(number))

    def chunks(self, tier: Tier, numbers: range) -> str:
        """What is there of each chunk: ``W``hole, the ``A``nchor, the ``R``esidual or nothing."""
        there = zip(
            self.held(tier, *map(anchor, numbers)),
            self.held(tier, *map(residual, numbers)),
            strict=True,
        )
        return "".join("-RAW"[2 * a + r] for a, r in there)

    def test_get_returns_what_was_put(self) -> None:
        tier = self.make_tier(8 * UNIT)
        for name, size in [(anchor(0), UNIT), (residual(0), 2 * UNIT), (anchor(1), 1)]:
            data = content(name, size)
            tier.put(name, data)
            got = tier.get(name)
            assert got is not None
            assert (got.format, got.ndim, got.readonly) == ("B", 1, True)
            assert bytes(got) == data

    def test_absent_is_none(self) -> None:
        tier = self.make_tier(8 * UNIT)
        self.put(tier, anchor(0))
        assert tier.get(residual(0)) is None
        assert tier.get(anchor(1)) is None
        assert tier.sizes([residual(0), anchor(0), anchor(1)]) == [None, UNIT, None]

    def test_sizes_of_many_and_of_none(self) -> None:
        tier = self.make_tier(100 * UNIT)
        names = [anchor(i) for i in range(50)]
        for i, name in enumerate(names[::2]):
            tier.put(name, content(name, i + 1))
        assert tier.sizes(names) == [None if i % 2 else i // 2 + 1 for i in range(50)]
        assert tier.sizes([]) == []

    def test_refuses_an_empty_object(self) -> None:
        tier = self.make_tier(8 * UNIT)
        with pytest.raises(InvalidInputError, match="at least one byte"):
            tier.put(anchor(0), b"")
        assert tier.sizes([anchor(0)]) == [None]

    def test_get_many_is_get_of_each(self) -> None:
        tier = self.make_tier(32 * UNIT)
        names = [chunk(i).object(part) for i in range(10) for part in Part]
        self.put(tier, *names[::2])
        got = tier.get_many([*names, names[0]])
        wanted = [None if i % 2 else content(name, UNIT) for i, name in enumerate(names)]
        assert [None if view is None else bytes(view) for view in got] == [*wanted, wanted[0]]
        assert tier.get_many([]) == []

    @pytest.mark.parametrize("kind", ["bytes", "bytearray", "memoryview", "float view", "2-D view"])
    def test_takes_any_contiguous_buffer(self, kind: str) -> None:
        data = content(anchor(0), UNIT)
        buffers: dict[str, Buffer] = {
            "bytes": data,
            "bytearray": bytearray(data),
            "memoryview": memoryview(b"x" + data + b"x")[1:-1],
            "float view": memoryview(array.array("f", data)),
            "2-D view": memoryview(data).cast("B", (4, UNIT // 4)),
        }
        tier = self.make_tier(8 * UNIT)
        tier.put(anchor(0), buffers[kind])
        assert self.read(tier, anchor(0)) == data
        assert tier.sizes([anchor(0)]) == [UNIT]

    def test_refuses_a_strided_buffer(self) -> None:
        tier = self.make_tier(8 * UNIT)
        with pytest.raises(InvalidInputError):
            tier.put(anchor(0), memoryview(bytes(UNIT))[::2])
        assert tier.get(anchor(0)) is None

    def test_keeps_a_copy(self) -> None:
        tier = self.make_tier(8 * UNIT)
        data = bytearray(content(anchor(0), UNIT))
        tier.put(anchor(0), data)
        data[:] = bytes(UNIT)
        assert self.read(tier, anchor(0)) == content(anchor(0), UNIT)

    def test_replace(self) -> None:
        tier = self.make_tier(8 * UNIT)
        self.put(tier, anchor(1))
        for version, units in enumerate([1, 3, 2, 2]):
            data = content(anchor(0), units * UNIT, version)
            tier.put(anchor(0), data)
            assert self.read(tier, anchor(0)) == data
            if tier.keeps_capacity:
                assert tier.stats() == TierStats((units + 1) * UNIT, 8 * UNIT, 2, 2)

    def test_delete(self) -> None:
        tier = self.make_tier(8 * UNIT)
        self.put(tier, residual(0), anchor(0), anchor(1))
        tier.delete([anchor(0), anchor(7), residual(0)])
        tier.delete([anchor(0)])
        tier.delete([])
        assert self.held(tier, anchor(0), residual(0), anchor(1)) == [False, False, True]
        assert tier.get(anchor(0)) is None
        assert set(tier.names()) == {anchor(1)}
        self.put(tier, anchor(0))
        assert self.read(tier, anchor(0)) == content(anchor(0), UNIT)

    def test_names(self) -> None:
        tier = self.make_tier(8 * UNIT)
        assert list(tier.names()) == []
        self.put(tier, residual(0), anchor(0), anchor(1))
        assert sorted(tier.names()) == sorted([residual(0), anchor(0), anchor(1)])
        for name in tier.names():
            tier.delete([name])
        assert list(tier.names()) == []

    def test_threads(self) -> None:
        """Every get sees one version whole, whatever the others put, evict and delete."""
        capacity = 12 * UNIT
        tier = self.make_tier(capacity)
        names = [chunk(i).object(part) for i in range(4) for part in Part]
        versions = {
            name: {content(name, units * UNIT, v) for v, units in enumerate([1, 2, 3])}
            for name in names
        }
        failures: list[str] = []
        hits = [0] * 4

        def work(worker: int) -> None:
            rng = random.Random(worker)
            for _ in range(60):
                name = rng.choice(names)
                what = rng.random()
                try:
                    if what < 0.4:
                        tier.put(name, rng.choice(sorted(versions[name])))
                    elif what < 0.45:
                        tier.delete([name])
                    elif what < 0.5:
                        if tier.stats().used_bytes > tier.stats().capacity_bytes:
                            failures.append("over capacity")
                    elif (got := self.read(tier, name)) is not None:
                        hits[worker] += 1
                        if got not in versions[name]:
                            failures.append(f"{name}: {len(got)} bytes nobody put")
                except TierFullError:
                    pass  # the others are using all of it just now
                except Exception as e:
                    failures.append(repr(e))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert all(hits)
        left = list(tier.names())
        assert all(self.read(tier, name) in versions[name] for name in left)
        if tier.keeps_capacity:
            sizes = [size or 0 for size in tier.sizes(left)]
            assert tier.stats().used_bytes == sum(sizes) <= capacity

    def test_stats_are_within_the_capacity(self) -> None:
        tier = self.make_tier(8 * UNIT)
        before = tier.stats()
        self.put(tier, residual(0), anchor(0), anchor(1), units=2)
        stats = tier.stats()
        assert before.used_bytes < stats.used_bytes <= stats.capacity_bytes
        assert stats.objects in (None, 3)
        assert stats.anchor_only in (None, 1)

    def test_closed(self) -> None:
        tier = self.make_tier(8 * UNIT)
        self.put(tier, anchor(0))
        tier.close()
        tier.close()
        for call in (
            lambda: tier.put(anchor(1), b"x"),
            lambda: tier.get(anchor(0)),
            lambda: tier.get_many([anchor(0), residual(0)]),
            lambda: tier.sizes([anchor(0)]),
            lambda: tier.delete([anchor(0)]),
            lambda: tier.names(),
            lambda: tier.stats(),
        ):
            with pytest.raises(TierError, match="closed"):
                call()

    def test_reopen_finds_everything(self) -> None:
        tier = self.make_tier(8 * UNIT)
        self.put(tier, residual(0), anchor(0), anchor(1))
        before = tier.stats()
        again = self.reopen(tier, 8 * UNIT)
        if tier.keeps_capacity:
            assert again.stats() == before
        for name in (residual(0), anchor(0), anchor(1)):
            assert self.read(again, name) == content(name, UNIT)


class BoundedTierConformance(TierConformance):
    """The same for a tier that keeps its capacity itself (``Tier.keeps_capacity``)."""

    def test_a_view_outlives_its_object(self) -> None:
        tier = self.make_tier(4 * UNIT)
        self.put(tier, anchor(0), anchor(1), anchor(2))
        views = [tier.get(anchor(i)) for i in range(3)]
        tier.put(anchor(0), content(anchor(0), UNIT, version=1))
        tier.delete([anchor(1)])
        for i in range(10, 20):
            self.put(tier, anchor(i))
        assert self.held(tier, anchor(0), anchor(1), anchor(2)) == [False] * 3
        tier.close()
        assert [bytes(view or b"") for view in views] == [
            content(anchor(i), UNIT) for i in range(3)
        ]

    def test_replace_where_both_versions_do_not_fit(self) -> None:
        tier = self.make_tier(3 * UNIT)
        for version in range(3):
            data = content(anchor(0), 3 * UNIT, version)
            tier.put(anchor(0), data)
            assert self.read(tier, anchor(0)) == data

    def test_stats(self) -> None:
        tier = self.make_tier(8 * UNIT)
        assert tier.stats() == TierStats(0, 8 * UNIT, 0, 0)
        self.put(tier, residual(0), units=2)
        assert tier.stats() == TierStats(2 * UNIT, 8 * UNIT, 1, 0)
        self.put(tier, anchor(0))
        assert tier.stats() == TierStats(3 * UNIT, 8 * UNIT, 2, 0)
        self.put(tier, anchor(1))
        assert tier.stats() == TierStats(4 * UNIT, 8 * UNIT, 3, 1)
        tier.delete([residual(0)])
        assert tier.stats() == TierStats(2 * UNIT, 8 * UNIT, 2, 2)

    def test_a_residual_goes_before_its_anchor(self) -> None:
        tier = self.make_tier(16 * UNIT)
        for i in range(4):
            self.put_chunk(tier, i)
        for i in range(4):  # the most recently used objects are the residuals
            tier.get(residual(i))
        self.put_chunk(tier, 4)
        assert self.chunks(tier, range(5)) == "AAWWW"

    def test_the_least_recently_used_chunk_loses_its_residual_first(self) -> None:
        tier = self.make_tier(16 * UNIT)
        for i in range(4):
            self.put_chunk(tier, i)
        for name in (anchor(0), residual(0)):
            tier.get(name)
        self.put_chunk(tier, 4)
        assert self.chunks(tier, range(5)) == "WAAWW"

    def test_anchors_without_residuals_take_no_more_than_their_share(self) -> None:
        tier = self.make_tier(16 * UNIT)
        for i in range(5):
            self.put_chunk(tier, i)
        assert self.chunks(tier, range(5)) == "AAWWW"
        self.put(tier, residual(5), units=3)  # one more anchor alone would be more than an eighth
        assert self.chunks(tier, range(6)) == "-AWWWR"
        tier.get(anchor(1))
        self.put(tier, anchor(5))
        assert self.chunks(tier, range(6)) == "-AAWWW"
        self.put(tier, residual(6), units=3)
        assert self.chunks(tier, range(7)) == "-A-WWWR"  # 2 was used before 1

    def test_a_residual_whose_anchor_is_still_to_come_is_not_the_first_to_go(self) -> None:
        """Or two writers would evict each other's chunks before they are whole."""
        tier = self.make_tier(16 * UNIT)
        for i in range(4):
            self.put_chunk(tier, i)
        for i in (4, 5):
            self.put(tier, residual(i), units=3)
        for i in (4, 5):
            self.put(tier, anchor(i))
        assert self.chunks(tier, range(2, 6)).endswith("WW")

    def test_most_of_a_full_tier_is_whole_chunks(self) -> None:
        capacity, written = 32 * UNIT, range(80)  # ten times as much as there is room for
        tier = self.make_tier(capacity)
        for i in written:
            self.put_chunk(tier, i)
        found = self.chunks(tier, written)
        whole, anchors = found.count("W"), found.count("A")
        assert found == "-" * (len(written) - whole - anchors) + "A" * anchors + "W" * whole
        assert whole * 4 * UNIT >= 3 / 4 * capacity
        assert 1 < anchors <= ANCHOR_ONLY_SHARE * capacity / UNIT + 1

    def test_evictions_are_counted(self) -> None:
        registry = pytest.importorskip("prometheus_client").REGISTRY
        tier = self.make_tier(16 * UNIT)

        def evicted(part: str) -> float:
            labels = {"part": part, "tier": tier.name, "op": "evict", "result": "ok"}
            return registry.get_sample_value("lynx_objects_total", labels) or 0.0

        anchors, residuals = evicted("anchor"), evicted("residual")
        for i in range(4):
            self.put_chunk(tier, i)
        tier.delete([residual(0)])
        self.put(tier, anchor(1))
        assert (evicted("anchor"), evicted("residual")) == (anchors, residuals)
        for i in range(4, 10):
            self.put_chunk(tier, i)
        held = self.chunks(tier, range(10))
        assert evicted("anchor") - anchors == held.count("-") > 0
        assert evicted("residual") - residuals == 10 - held.count("W") - 1 > 0

    def test_least_recently_put_goes_first(self) -> None:
        tier = self.make_tier(4 * UNIT)
        for i in range(7):
            self.put(tier, anchor(i))
        assert self.held(tier, *map(anchor, range(7))) == [False] * 3 + [True] * 4

    def test_get_and_replace_are_uses_and_sizes_is_not(self) -> None:
        tier = self.make_tier(4 * UNIT)
        self.put(tier, *map(anchor, range(4)))
        tier.get(anchor(2))
        tier.put(anchor(0), content(anchor(0), UNIT, version=1))  # 1 may have to go for it
        tier.sizes([anchor(3), anchor(1)])
        self.put(tier, anchor(4), anchor(5))
        assert self.held(tier, anchor(2), anchor(0), anchor(4), anchor(5)) == [True] * 4

    def test_eviction_takes_no_more_than_it_must(self) -> None:
        tier = self.make_tier(6 * UNIT)
        self.put(tier, *map(anchor, range(6)))
        self.put(tier, anchor(9), units=2)
        assert self.held(tier, *map(anchor, range(6))) == [False] * 2 + [True] * 4

    def test_an_anchor_never_evicts_its_residual(self) -> None:
        tier = self.make_tier(4 * UNIT)
        self.put(tier, *map(anchor, range(3)))
        self.put(tier, residual(9), anchor(9))
        assert self.held(tier, residual(9), anchor(9)) == [True, True]
        assert self.held(tier, *map(anchor, range(3))) == [False, True, True]

    def test_a_residual_never_evicts_its_anchor(self) -> None:
        tier = self.make_tier(4 * UNIT)
        self.put(tier, anchor(9), *map(anchor, range(3)))
        self.put(tier, residual(9), units=2)
        assert self.held(tier, anchor(9), residual(9)) == [True, True]
        assert self.held(tier, *map(anchor, range(3))) == [False, False, True]

    def test_what_cannot_fit_evicts_nothing(self) -> None:
        tier = self.make_tier(4 * UNIT)
        self.put(tier, residual(0), anchor(0), anchor(1))
        with pytest.raises(TierFullError, match="max_bytes"):
            self.put(tier, anchor(2), units=5)
        with pytest.raises(TierFullError, match="max_bytes"):  # not beside anchor(0)
            self.put(tier, residual(0), units=4)
        assert sorted(tier.names()) == sorted([residual(0), anchor(0), anchor(1)])
        self.put(tier, anchor(2), units=4)
        assert list(tier.names()) == [anchor(2)]

    def test_an_object_of_exactly_the_capacity_fits(self) -> None:
        tier = self.make_tier(4 * UNIT)
        self.put(tier, anchor(0), units=4)
        self.put(tier, residual(1), units=4)
        assert list(tier.names()) == [residual(1)]

    def test_capacity_under_random_use(self) -> None:
        rng = random.Random(7)
        capacity = 20 * UNIT
        tier = self.make_tier(capacity)
        latest: dict[ObjectName, bytes] = {}
        for step in range(300):
            name = chunk(rng.randrange(15)).object(rng.choice(list(Part)))
            if rng.random() < 0.2:
                tier.delete([name])
                latest.pop(name, None)
            else:
                latest[name] = content(name, rng.randrange(1, 4 * UNIT), step)
                tier.put(name, latest[name])
            names = list(tier.names())
            sizes = tier.sizes(names)
            stats = tier.stats()
            assert sizes == [len(latest[n]) for n in names]
            assert stats.used_bytes == sum(len(latest[n]) for n in names) <= capacity
            assert stats.objects == len(names)
            anchors = {n.key for n in names if n.part == Part.ANCHOR}
            residuals = {n.key for n in names if n.part == Part.RESIDUAL}
            assert stats.anchor_only == len(anchors - residuals)
            assert all(self.read(tier, n) == latest[n] for n in names)

    def test_reopen_remembers_uses(self) -> None:
        tier = self.make_tier(4 * UNIT)
        self.put(tier, *map(anchor, range(4)))
        tier.get(anchor(0))
        again = self.reopen(tier, 4 * UNIT)
        self.put(again, anchor(4))
        assert self.held(again, *map(anchor, range(5))) == [True, False, True, True, True]

    def test_reopen_with_less_room(self) -> None:
        tier = self.make_tier(8 * UNIT)
        for i in range(4):
            self.put(tier, residual(i), anchor(i))
        again = self.reopen(tier, 5 * UNIT)
        assert again.stats() == TierStats(5 * UNIT, 5 * UNIT, 5, 1)
        assert self.chunks(again, range(4)) == "-AWW"
