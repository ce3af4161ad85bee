"""A node as others know it."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True)
class Member:
    """Where a node listens and, unless it was named by hand, which process it is.

    Attributes:
        node: ``UcxServer.node`` in hexadecimal; None when any process at that address will do.
    """

    host: str
    port: int
    node: str | None = None

    @classmethod
    def parse(cls, text: str, setting: str) -> Member:
        """From ``host:port``; an IPv6 address may stand in brackets.

        Raises:
            ConfigError: it is something else; the message names ``setting``.
        """
        host, colon, port = text.strip().rpartition(":")
        if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(f"{setting}: {text!r} is not an address; write host:port")
        return cls(host.strip("[]"), int(port))
