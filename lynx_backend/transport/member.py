"""A node as others know it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConfigError

_ADDRESS = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]+)):(\d+)")


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
        """From ``host:port``; an IPv6 address stands in brackets.

        Raises:
            ConfigError: it is something else; the message names ``setting``.
        """
        match = _ADDRESS.fullmatch(text.strip())
        if match is None or not 0 < int(match[3]) < 65536:
            raise ConfigError(
                f"{setting}: {text!r} is not an address; write host:port, or [address]:port for "
                "an IPv6 address"
            )
        return cls(match[1] or match[2], int(match[3]))

    @property
    def address(self) -> str:
        """As :meth:`parse` takes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
