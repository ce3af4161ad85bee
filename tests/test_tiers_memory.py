import pytest

from lynx_backend.errors import ConfigError
from lynx_backend.testing import BoundedTierConformance
from lynx_backend.tiers import MemoryTier


class TestMemoryTier(BoundedTierConformance):
    def make_tier(self, max_bytes: int) -> MemoryTier:
        return MemoryTier(max_bytes)


@pytest.mark.parametrize("max_bytes", [1 << 63, 1 << 62, 10**400])
def test_memory_that_no_host_has_is_a_config_error(max_bytes):
    with pytest.raises(ConfigError, match=r"lower memory\.max_bytes"):
        MemoryTier(max_bytes)


def test_a_limit_below_one_is_a_config_error():
    with pytest.raises(ConfigError, match="max_bytes"):
        MemoryTier(0)
