"""Progressive quantization of KV caches: one chunk in, an anchor and a residual object out."""

from .calibration import Calibration
from .codec import Codec
from .paged import PagedCache
from .spec import PROFILES, CodecSpec

__all__ = ["PROFILES", "Calibration", "Codec", "CodecSpec", "PagedCache"]
