"""How many drafts pay: what they gain the request against what they cost the others.

Drafting costs nothing while a step would be run anyway and has room; it does cost when the rest of
the prompt is computed twice and every draft twice, in steps that other requests share. What is
compared, in seconds, for the k-th draft of a request beside ``others`` running ones::

    gains   p^k * step             if all k are accepted, one decode step less after the residual
    costs   token                  its own place in the verifying pass
            others * token * (2 - p^k)   computed twice, once of which it saves if accepted

and once a request ``others * token * rest`` for the rest of the prompt. ``step`` and ``token`` are
measured, as is ``p``. Pure logic: no vLLM, no clock of its own.
"""

from __future__ import annotations

from typing import Literal

Mode = Literal["auto", "always", "never"]

#: How much the newest measurement counts in a running average.
NEWEST = 0.1
#: What acceptance is taken to be before anything was measured, and how many drafts that weighs.
PRIOR, PRIOR_DRAFTS = 0.9, 20.0
#: Kept of all earlier drafts' weight when a request was verified, or waited and said nothing: so an
#: estimate that stopped all drafting goes back to the prior, and is tried again.
KEPT = 0.97


class Policy:
    """Decides for one engine.

    Args:
        mode: "auto" weighs; "always" drafts whatever it costs; "never" does not.
        limit: drafts at most.

    Attributes:
        step: mean seconds of a step that decodes one token of each request; 0 until there was one.
        token: mean seconds that each further token adds to a step.
    """

    def __init__(self, mode: Mode = "auto", limit: int = 64) -> None:
        self.mode = mode
        self.limit = limit
        self.step = 0.0
        self.token = 0.0
        self._accepted = 0.0
        self._tried = 0.0

    @property
    def acceptance(self) -> float:
        """Measured probability that a draft is accepted if all before it were; in (0, 1)."""
        return (PRIOR * PRIOR_DRAFTS + self._accepted) / (PRIOR_DRAFTS + self._tried)

    def measured(self, seconds: float, tokens: int, requests: int) -> None:
        """Note what a step took.

        Args:
            seconds: of the whole step.
            tokens: computed in it.
            requests: that shared it, at least one.
        """
        if tokens <= requests:
            self.step += (seconds - self.step) * (NEWEST if self.step else 1.0)
        elif self.step:
            more = max(0.0, seconds - self.step) / (tokens - requests)
            self.token += (more - self.token) * (NEWEST if self.token else 1.0)

    def verified(self, drafted: int, accepted: int) -> None:
        """Note what came of a request's drafts; what follows a rejected one says nothing."""
        self._forget()
        self._accepted += accepted
        self._tried += min(drafted, accepted + 1)

    def waited(self) -> None:
        """Note that a request did not draft, so that nothing was learned."""
        self._forget()

    def drafts(self, wait: float, rest: int, others: int) -> int:
        """How many drafts a request may make while it waits for its residual; 0: it only waits.

        The number does not depend on ``wait``: should the residual be late, more drafts pay.

        Args:
            wait: expected seconds until the residual is there; infinite if nothing is known.
            rest: tokens of the prompt that the store does not have.
            others: running requests beside this one.
        """
        if self.mode != "auto":
            return self.limit if self.mode == "always" else 0
        if not self.step:
            return self.limit if wait > 0 else 0
        fitting = max(0.0, wait - rest * self.token) / self.step
        kept, total, fits, most = 1.0, 0.0, 0.0, 0
        while most < self.limit:
            kept *= self.acceptance
            gain = kept * self.step - self.token * (1 + others * (2 - kept))
            if gain <= 0:
                break
            most += 1
            total += gain
            if most <= fitting:
                fits = total
        return most if fits > others * self.token * rest else 0

    def gained(self, drafted: int, accepted: int) -> float:
        """Seconds by which a request's accepted drafts came earlier than without drafting.

        Without, decoding would have begun in the same pass, which would have been shorter by the
        drafts' tokens, and each accepted token would have taken one more step. Estimated from
        mean steps; negative if little was accepted.
        """
        return accepted * self.step - drafted * self.token

    def _forget(self) -> None:
        self._accepted *= KEPT
        self._tried *= KEPT
