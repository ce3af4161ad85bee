"""How the next token is chosen, and how drafts are checked so that the choice stays the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InvalidInputError

#: A logit lead below this is not trusted when several tokens went through the model at once. The
#: pass over 65 tokens and the step over one round differently: in float32, with PyTorch's CPU
#: kernels, the lead of the first over the second differed by up to 3.6e-5 on SmolLM2-135M and
#: 2.7e-5 on Gemma-3-270M (five texts each). In bfloat16 it differed by up to 0.4: there tokens may
#: differ from plain decoding whatever this is.
TIE_GAP = 1e-3


class Sampler:
    """Chooses tokens from logits.

    Args:
        temperature: 0 takes the most likely token; else logits are divided by it.
        seed: of the random numbers, which are this object's own.

    Raises:
        InvalidInputError: the temperature is negative or not finite.
    """

    def __init__(self, temperature: float = 0.0, seed: int = 0) -> None:
        if not 0 <= temperature < float("inf"):
            raise InvalidInputError(f"temperature must be 0 or more and finite, got {temperature}")
        self.temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def pick(self, logits: torch.Tensor) -> int:
        """A token, given its logits [vocab]."""
        if self.greedy:
            return int(logits.argmax())
        return self.draw(self.distribution(logits))

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """The probabilities :meth:`pick` draws from when not greedy, float64, same shape."""
        return (logits.double() / self.temperature).softmax(-1)

    def draw(self, weights: torch.Tensor) -> int:
        """An index into ``weights`` [vocab], with probability proportional to its weight."""
        return int(torch.multinomial(weights.cpu(), 1, generator=self._generator))

    def uniform(self) -> float:
        """A number from [0, 1)."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def verify(
    sampler: Sampler,
    drafts: Sequence[int],
    draft_logits: Sequence[torch.Tensor],
    logits: torch.Tensor,
    tie_gap: float = TIE_GAP,
) -> tuple[int, int | None]:
    """Decide how many drafts stand, and what follows them.

    Greedy: the drafts that are the most likely token, up to the first that is not. Otherwise
    speculative sampling: a draft that was drawn with probability q and has p now stands with
    probability min(1, p/q), and the first that falls is replaced by a draw from max(p - q, 0). What
    comes out is distributed as if it had been drawn from p.

    Args:
        sampler: what chose the drafts.
        drafts: the drafted tokens.
        draft_logits: what each was chosen from, [vocab] each.
        logits: [drafts + 1, vocab], what each, and one more, would be chosen from now.
        tie_gap: greedy only: no choice is made between logits closer than this.

    Returns:
        ``(accepted, next)``. ``next`` is the token after the accepted drafts; None leaves it to an
        ordinary step.
    """
    if sampler.greedy:
        return _verify_greedy(drafts, logits, tie_gap)
    return _verify_sampled(sampler, drafts, draft_logits, logits)


def _verify_greedy(
    drafts: Sequence[int], logits: torch.Tensor, tie_gap: float
) -> tuple[int, int | None]:
    values, tokens = logits.topk(2, -1)
    sure = (values[:, 0] - values[:, 1] >= tie_gap).tolist()  # False for NaN
    best = tokens[:, 0].tolist()
    for at, draft in enumerate(drafts):
        if not sure[at]:
            return at, None
        if best[at] != draft:
            return at, best[at]
    return len(drafts), best[-1] if sure[-1] else None


def _verify_sampled(
    sampler: Sampler,
    drafts: Sequence[int],
    draft_logits: Sequence[torch.Tensor],
    logits: torch.Tensor,
) -> tuple[int, int]:
    now = sampler.distribution(logits)
    for at, draft in enumerate(drafts):
        before = sampler.distribution(draft_logits[at])
        if sampler.uniform() * before[draft] >= now[at, draft]:
            return at, sampler.draw((now[at] - before).clamp_min(0))
    return len(drafts), sampler.draw(now[-1])
