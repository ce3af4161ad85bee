"""Progressive KV-cache storage and transport for LLM serving."""

from .codec import Codec, CodecSpec
from .errors import (
    ConfigError,
    CorruptObjectError,
    FormatMismatchError,
    InvalidInputError,
    LynxError,
    TierError,
    TierFullError,
    TierUnavailableError,
    TransportError,
    UnsupportedError,
)

__all__ = [
    "Codec",
    "CodecSpec",
    "ConfigError",
    "CorruptObjectError",
    "FormatMismatchError",
    "InvalidInputError",
    "LynxError",
    "TierError",
    "TierFullError",
    "TierUnavailableError",
    "TransportError",
    "UnsupportedError",
]
__version__ = "0.1.0"
