import pytest

from lynx_backend.errors import ConfigError
from lynx_backend.testing import BoundedTierConformance
from lynx_backend.tiers import MemoryTier


class TestMemoryTier(BoundedTierConformance):
    def make_tier(self, max_bytes: int) -> MemoryTier:
        return MemoryTier(max_bytes)


def test_a_limit_below_one_is_a_config_error():
    with pytest.raises(ConfigError, match="max_bytes"):
        MemoryTier(0)
