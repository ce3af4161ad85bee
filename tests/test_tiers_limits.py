"""Quotas and watermarks, on both tiers that keep their capacity themselves."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lynx_backend.errors import ConfigError, TierFullError
from lynx_backend.keys import ChunkKey, ObjectName, Part
from lynx_backend.tiers import MemoryTier, NvmeTier, Tier
from lynx_backend.tiers.limits import Limits

UNIT = 4096
Make = Callable[..., Tier]


@pytest.fixture(params=["memory", "nvme"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "memory":
        return MemoryTier
    return lambda *limits: NvmeTier(
        tmp_path, limits[0], quota_bytes=limits[1], low_watermark=(*limits, 1.0)[2]
    )


def name(tenant: str, n: int, part: Part = Part.ANCHOR) -> ObjectName:
    return ChunkKey(tenant.encode() * 16, n.to_bytes(16, "little")).object(part)


def put(tier: Tier, *names: ObjectName, units: int = 1) -> None:
    for each in names:
        tier.put(each, bytes(units * UNIT))


def held(tier: Tier, tenant: str) -> list[int]:
    return sorted(
        int.from_bytes(n.key.prefix, "little")
        for n in tier.names()
        if n.key.identity == tenant.encode() * 16
    )


def test_a_tenant_over_its_quota_evicts_its_own(make: Make):
    tier = make(10 * UNIT, 4 * UNIT)
    put(tier, name("a", 0))
    for n in range(8):
        put(tier, name("b", n))
    assert held(tier, "a") == [0], "though it is the least recently used"
    assert held(tier, "b") == [4, 5, 6, 7]
    put(tier, name("b", 5), name("b", 8))
    assert held(tier, "b") == [5, 6, 7, 8] or held(tier, "b") == [5, 7, 8]


def test_the_tiers_limit_holds_for_all_together(make: Make):
    tier = make(10 * UNIT, 4 * UNIT)
    for n in range(4):
        for tenant in "abcd":
            put(tier, name(tenant, n))
    assert tier.stats().used_bytes == 10 * UNIT
    assert held(tier, "d")[-1] == 3


def test_what_is_larger_than_the_quota_is_refused_and_evicts_nothing(make: Make):
    tier = make(10 * UNIT, 4 * UNIT)
    put(tier, name("a", 0), name("a", 1))
    with pytest.raises(TierFullError, match="quota_bytes"):
        put(tier, name("a", 2), units=5)
    assert held(tier, "a") == [0, 1]


def test_residuals_first_also_within_a_quota(make: Make):
    tier = make(100 * UNIT, 16 * UNIT)
    for n in range(5):
        put(tier, name("a", n, Part.RESIDUAL), units=3)
        put(tier, name("a", n))
    sizes = tier.sizes([name("a", n, part) for n in range(5) for part in (Part.RESIDUAL,)])
    assert [size is not None for size in sizes] == [False, False, True, True, True]
    assert held(tier, "a").count(0) == 1


def test_room_is_made_down_to_the_low_watermark(make: Make):
    tier = make(10 * UNIT, None, 0.7)
    for n in range(10):
        put(tier, name("a", n))
    assert tier.stats().used_bytes == 10 * UNIT
    put(tier, name("a", 10))
    assert held(tier, "a") == [4, 5, 6, 7, 8, 9, 10]
    for n in range(11, 14):
        put(tier, name("a", n))
    assert tier.stats().used_bytes == 10 * UNIT


def test_random_use_keeps_every_limit(make: Make):
    rng = random.Random(11)
    tier = make(20 * UNIT, 8 * UNIT, 0.8)
    for _ in range(300):
        put(tier, name(rng.choice("abcd"), rng.randrange(20), rng.choice(list(Part))))
        if rng.random() < 0.1:
            tier.delete([name(rng.choice("abcd"), rng.randrange(20))])
        used = {tenant: len(held(tier, tenant)) for tenant in "abcd"}
        assert max(used.values()) <= 8
        assert sum(used.values()) * UNIT == tier.stats().used_bytes <= 20 * UNIT


@pytest.mark.parametrize(
    "limits", [(0, None, 1.0), (10, 0, 1.0), (10, 11, 1.0), (10, 5, 0.0), (10, 5, 1.1)]
)
def test_numbers_out_of_range(limits):
    with pytest.raises(ConfigError, match="low_watermark"):
        Limits(*limits)
