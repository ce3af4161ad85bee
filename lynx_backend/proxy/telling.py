"""What a client is told about its answer: when things happened, and drafts as what they are."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from ..side_channel import News, Said
from .handoff import Json

#: Tokens before the drafts that their text may depend on.
_CONTEXT = 8


@dataclass
class Clock:
    """When things of one answer happened, in seconds after the request came.

    Attributes:
        first_token_from: "prefill", on the exact cache, or "decode", on what it has loaded.
        first_draft: None if there was none, or nobody listened.
        tokens: that the client has.
        verified: (tokens, when) for the first, and each time that they have at least doubled.
        last: when the last token came.
    """

    first_token_from: str
    began: float = field(default_factory=time.monotonic)
    first_draft: float | None = None
    tokens: int = 0
    verified: list[tuple[int, float]] = field(default_factory=list)
    last: float = 0.0

    def count(self, tokens: int) -> None:
        """So many tokens more are given out now."""
        if not tokens:
            return
        self.tokens += tokens
        self.last = time.monotonic() - self.began
        if not self.verified or self.tokens >= 2 * self.verified[-1][0]:
            self.verified.append((self.tokens, self.last))

    def hear(self, news: News) -> None:
        """Note a draft's time, if it is the first."""
        if news.said is Said.DRAFTED and self.first_draft is None:
            self.first_draft = news.heard - self.began

    def told(self) -> Json:
        """What the client is told."""
        verified = list(self.verified)
        if verified and verified[-1][0] < self.tokens:
            verified.append((self.tokens, self.last))
        return {
            "first_token_from": self.first_token_from,
            "first_draft": self.first_draft,
            "first_verified": verified[0][1] if verified else None,
            "verified": verified,
        }


class Provisional:
    """The drafts of one answer, as text.

    Args:
        clock: told of the first draft.
        text: what tokens stand for; None if that cannot be said.
        before: tokens that come before the drafts.
        wanted: whether the client wants to see drafts.

    Attributes:
        verified: set once the client has verified text; later news of drafts are old.
    """

    def __init__(
        self,
        clock: Clock,
        text: Callable[[Sequence[int]], Awaitable[str | None]],
        before: Sequence[int],
        wanted: bool,
    ) -> None:
        self.verified = False
        self._clock, self._text, self._wanted = clock, text, wanted
        self._before = tuple(before[-_CONTEXT:])
        self._drafts: list[int] = []
        self._shown = ""

    async def of(self, said: Sequence[News]) -> list[Json]:
        """What to show for some news."""
        for news in said:
            self._clock.hear(news)
        if not self._wanted:
            return []
        shown: list[Json] = []
        drafts = [token for news in said for token in news.tokens if news.said is Said.DRAFTED]
        if drafts and not self.verified:
            self._drafts += drafts
            new = await self._new_text()
            if new:
                shown.append({"lynx": {"provisional": new, "tokens": len(self._drafts)}})
        for news in said:
            if news.said is not Said.DRAFTED and self._drafts:
                kept = min(news.count, len(self._drafts))
                taken_back = len(self._drafts) - kept
                shown.append({"lynx": {"confirmed": kept, "retracted": taken_back}})
                self._drafts, self._shown = [], ""
        return shown

    async def _new_text(self) -> str:
        before = await self._text(self._before) if self._before else ""
        text = await self._text([*self._before, *self._drafts])
        if before is None or text is None or text.endswith("\ufffd"):  # half a character
            return ""
        text = text[len(before) :]
        new = text[len(self._shown) :]
        self._shown = text
        return new
