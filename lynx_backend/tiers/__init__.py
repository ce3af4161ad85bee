"""Places that keep objects. A tier knows names and bytes, never the codec or a transport."""

from .base import Buffer, Tier, TierStats
from .breaker import GuardedTier
from .memory import MemoryTier
from .nvme import NvmeTier

__all__ = ["Buffer", "GuardedTier", "MemoryTier", "NvmeTier", "Tier", "TierStats"]
