"""Ways objects move between processes, anchors before residuals. Knows names and bytes only."""

from .base import ObjectSource, Transport
from .local import LocalTransport

__all__ = ["LocalTransport", "ObjectSource", "Transport"]
