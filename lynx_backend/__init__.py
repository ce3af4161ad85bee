"""Progressive KV-cache storage and transport for LLM serving."""

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from .codec import Codec, CodecSpec

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


def __getattr__(name: str) -> object:
    # Not above: vLLM on a CPU fails to start when numba is loaded before its own kernels, and it
    # imports this package with the connector that a user names.
    if name in ("Codec", "CodecSpec"):
        from . import codec

        return getattr(codec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
