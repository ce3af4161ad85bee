"""What every tier and every transport must do, as pytest classes to derive from."""

import pytest

# Without this a failing assertion in these classes would not say what it compared.
pytest.register_assert_rewrite(f"{__name__}.tiers", f"{__name__}.transport")

from .tiers import BoundedTierConformance, TierConformance  # noqa: E402
from .transport import ScriptedSource, TransportConformance  # noqa: E402

__all__ = [
    "BoundedTierConformance",
    "ScriptedSource",
    "TierConformance",
    "TransportConformance",
]
