"""Drafts of requests that ask for it, said aloud before anybody knows whether they are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...request_params import PROVISIONAL
from ...side_channel import Publisher, Said


class Provisional:
    """What the scheduler says about drafts.

    A request asks by a text in its ``kv_transfer_params``, under which its drafts are published.

    Args:
        address: of whoever listens; "" for nobody.

    Raises:
        ConfigError: it is no such address.
    """

    def __init__(self, address: str) -> None:
        self._publisher = Publisher(address) if address else None

    def drafted(self, request: Any, tokens: Sequence[int]) -> None:
        """These tokens come after those drafted so far."""
        self._say(request, Said.DRAFTED, tokens)

    def verified(self, request: Any, kept: int) -> None:
        """The first ``kept`` drafts are right, the others are taken back."""
        self._say(request, Said.VERIFIED, count=kept)

    def dropped(self, request: Any) -> None:
        """All drafts are taken back."""
        self._say(request, Said.DROPPED)

    def _say(self, request: Any, said: Said, tokens: Sequence[int] = (), count: int = 0) -> None:
        if self._publisher is not None:
            tag = (request.kv_transfer_params or {}).get(PROVISIONAL)
            if isinstance(tag, str):
                self._publisher.say(tag, said, tokens, count)
