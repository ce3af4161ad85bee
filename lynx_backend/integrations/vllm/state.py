"""One request between its anchors and its verified tokens, as vLLM's scheduler sees it.

LOADING -> DRAFTING -> VERIFYING, from where it is an ordinary request. :attr:`Drafting.arrived`
says what the workers have of the cache; :meth:`Drafting.due` what has to be done about it. Pure
logic: no vLLM, no clock of its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from ...states import State


class Phase(Enum):
    """What the request's pages hold, and what it does."""

    #: blocks are held, nothing was computed on them
    LOADING = "loading"
    #: pages are Q_anchor; tokens are drafts and nobody sees them
    DRAFTING = "drafting"
    #: the next forward pass finds Q_full in the pages and checks the drafts
    VERIFYING = "verifying"


class Step(Enum):
    """What a request needs before the next forward pass."""

    #: write Q_full into the pages and put the drafts up for verification
    REFINE = "refine"
    #: forget drafts and pages; compute the prompt
    RECOMPUTE = "recompute"
    #: stop waiting for anchors that did not come in time
    GIVE_UP = "give_up"


@dataclass
class Drafting:
    """One request.

    Attributes:
        first, end: the tokens whose cache comes from the store; what was computed from ``end`` on
            is computed again after the refinement.
        ranks: workers that load a part each.
        max_drafts: drafts at most; the policy may lower it.
        anchor_deadline: monotonic seconds at which waiting for anchors ends.
        residual_seconds: the longest time from the anchors to the residuals.
        phase: see :class:`Phase`.
        arrived: what every rank has; FAILED as soon as one rank will never have it.
        drafts: what is put up for verification, once the phase is VERIFYING.
        gave_up: the workers were told to stop loading.
        held: its anchors are in its pages, but it only waits, because drafting does not pay.
        withheld: drafts made and not yet put up.
        wait: expected seconds from the last report to the last residual.
        coarse_at, full_at: monotonic seconds at which every rank had anchors, and everything.
    """

    first: int
    end: int
    ranks: int
    max_drafts: int
    anchor_deadline: float
    residual_seconds: float
    phase: Phase = Phase.LOADING
    arrived: State = State.ABSENT
    drafts: list[int] = field(default_factory=list)
    gave_up: bool = False
    held: bool = False
    withheld: int = 0
    wait: float = float("inf")
    coarse_at: float | None = None
    full_at: float | None = None
    _reports: Counter[State] = field(default_factory=Counter)

    @property
    def coarse(self) -> bool:
        """Whether its pages, or what was computed from them, must not be seen by anyone."""
        return self.phase is not Phase.VERIFYING

    def report(self, counts: dict[State, int], now: float) -> None:
        """Note how many more ranks have reached each state; who is FULL was COARSE, if not long."""
        self._reports.update(counts)
        if self._reports[State.FAILED]:
            self.arrived = State.FAILED
        elif self._reports[State.FULL] >= self.ranks:
            self.arrived = State.FULL
            self.full_at = now
        elif self.arrived is State.ABSENT and self._reports[State.COARSE] >= self.ranks:
            self.arrived = State.COARSE
            self.coarse_at = now

    def due(self, now: float) -> Step | None:
        """What has to be done now, if anything."""
        if self.phase is Phase.VERIFYING:
            return None
        if self.arrived is State.FAILED:
            return Step.RECOMPUTE
        if self.arrived is State.FULL:
            return Step.REFINE
        if self.arrived is State.ABSENT and now >= self.anchor_deadline:
            return None if self.gave_up else Step.GIVE_UP
        if self.coarse_at is not None and now >= self.coarse_at + self.residual_seconds:
            return Step.RECOMPUTE
        return None

    @property
    def lead(self) -> float:
        """Seconds between its last anchor and its last residual; 0 unless both are there."""
        if self.coarse_at is None or self.full_at is None:
            return 0.0
        return self.full_at - self.coarse_at

    def full(self, drafted: int) -> bool:
        """Whether there are as many drafts as may be."""
        return drafted >= self.max_drafts
