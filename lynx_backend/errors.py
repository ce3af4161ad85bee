"""The errors Lynx raises. Each message says what was found, what was expected and what to do."""

from __future__ import annotations


class LynxError(Exception):
    """Base of every error raised on purpose by ``lynx_backend``."""


class ConfigError(LynxError, ValueError):
    """A setting is unknown, missing or out of range. Nothing was started."""


class InvalidInputError(LynxError, ValueError):
    """A caller handed over a tensor, key or buffer that cannot be used. Nothing was changed."""


class UnsupportedError(LynxError, RuntimeError):
    """The request is valid, but this installation, device or version cannot serve it."""


class CorruptObjectError(LynxError):
    """Stored bytes are damaged: truncated, extended, or failing their checksum."""


class FormatMismatchError(LynxError):
    """Stored bytes are whole but belong to something else: version, key, spec, layout or chunk."""


class TierError(LynxError):
    """A tier could not do what was asked (I/O error, permission, connection). It may work later."""


class TierFullError(TierError):
    """A tier has no room, and evicting what it may evict would not make enough."""


class TierUnavailableError(TierError):
    """A tier has failed lately and is not asked for now. It is tried again by itself."""


class TransportError(LynxError):
    """A peer or link failed, closed or did not answer within its limit."""
