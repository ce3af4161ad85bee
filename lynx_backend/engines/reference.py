"""Draft on the coarse cache, verify on the refined one: the reference, on transformers.

The cache of a prompt of n tokens holds tokens 0 to n-2. Decoding starts by feeding the rest, so the
first token chosen is draft 0. If fewer are cached, as many more are fed.

What comes out equals plain :func:`decode` on the refined cache: the same tokens when greedy, the
same distribution when sampling. Greedy equality is up to ties. Verification makes no choice between
logits within :data:`~.sampling.TIE_GAP`; and since the cache entries of verified tokens were
rounded in that pass, later logits differ from plain decoding by about 6e-5 in float32.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch

from .. import metrics
from ..errors import InvalidInputError
from ..logs import warn_limited
from ..progressive import State
from .kv_buffer import KVBuffer, prefill
from .sampling import TIE_GAP, Sampler, verify

__all__ = ["Decoded", "Events", "Result", "Sampler", "decode", "prefill", "progressive_decode"]

logger = logging.getLogger(__name__)


class Request(Protocol):
    """What is used of a :class:`~lynx_backend.progressive.ProgressiveRequest`."""

    residual_lost: bool

    @property
    def state(self) -> State: ...
    def wait(self, state: State, timeout: float | None = None) -> bool: ...
    def residual_ready(self, timeout: float = 0.0) -> bool: ...
    def refine(self) -> bool: ...
    def cancel(self) -> None: ...


@dataclass
class Decoded:
    """What plain decoding gave.

    Attributes:
        tokens: the new tokens, a stop token included.
        times: when each was known, ``time.monotonic()``.
        logits: float32 [tokens, vocab] each was chosen from, or None when not asked for.
    """

    tokens: list[int]
    times: list[float]
    logits: torch.Tensor | None = None


@dataclass
class Events:
    """When things happened, ``time.monotonic()``; None or empty for what did not.

    Attributes:
        started: the call.
        coarse: the coarse cache was there.
        drafts: each draft was chosen.
        residual: the residual was seen to be there.
        refined: the cache was the refined one.
        verified: the drafts had been checked.
        visible: each token of the result could be shown.
    """

    started: float
    coarse: float | None = None
    drafts: list[float] = field(default_factory=list)
    residual: float | None = None
    refined: float | None = None
    verified: float | None = None
    visible: list[float] = field(default_factory=list)


@dataclass
class Result:
    """What progressive decoding gave. Nothing in it is provisional.

    Attributes:
        tokens: the new tokens, a stop token included.
        drafted: tokens chosen on the coarse cache.
        accepted: how many of them verification kept.
        recomputed: the cache did not become the refined one, so the prompt was read here.
        events: when things happened.
    """

    tokens: list[int]
    drafted: int
    accepted: int
    recomputed: bool
    events: Events


def decode(
    model: Any,
    kv: torch.Tensor,
    prompt: Sequence[int],
    max_new: int,
    sampler: Sampler | None = None,
    keep_logits: bool = False,
) -> Decoded:
    """Plain decoding on a given cache.

    Args:
        model: a causal LM of transformers.
        kv: [2, layers, tokens, kv_heads, head_dim], any dtype: the cache of the prompt's first
            tokens. What goes beyond all but the last is not used.
        prompt: token ids, at least one.
        max_new: tokens to decode, unless a stop token of the model comes first.
        sampler: greedy by default.
        keep_logits: whether to return them.

    Raises:
        InvalidInputError: the prompt is empty, or ``kv`` is not this model's.
        UnsupportedError: the model's cache is not of plain keys and values.
    """
    kv = _usable(kv, prompt)
    buffer = KVBuffer(model, len(prompt) + max_new)
    buffer.load(kv)
    steps = _steps(buffer, prompt[kv.shape[2] :], sampler or Sampler(), _stop_tokens(model))
    done = Decoded([], [])
    kept = []
    for token, logits in islice(steps, max_new):
        done.tokens.append(token)
        done.times.append(time.monotonic())
        if keep_logits:
            kept.append(logits)
    if kept:
        done.logits = torch.stack(kept)
    return done


def progressive_decode(
    model: Any,
    request: Request,
    kv: torch.Tensor,
    prompt: Sequence[int],
    max_new: int,
    *,
    max_drafts: int = 64,
    anchor_timeout: float = 10.0,
    residual_timeout: float = 10.0,
    sampler: Sampler | None = None,
    tie_gap: float = TIE_GAP,
) -> Result:
    """Decode while the cache is still arriving.

    Drafts are chosen as soon as the cache is coarse, until the residual is there, a stop token is
    drafted or there are ``max_drafts``. Then the cache is refined and all drafts are verified in
    one forward pass. If the cache never comes, or is never refined, the prompt is read here and
    the drafts are dropped; the reference is then plain decoding on :func:`prefill`.

    Args:
        model: a causal LM of transformers.
        request: brings the cache.
        kv: the request's tensor, as in :func:`decode`; read when ``request`` says that it may be.
        prompt: token ids, at least one.
        max_new: tokens to decode, unless a stop token of the model comes first.
        max_drafts: drafts at most; 0 waits for the refined cache.
        anchor_timeout: seconds to wait for the coarse cache.
        residual_timeout: seconds to wait for the residual after the last draft.
        sampler: greedy by default.
        tie_gap: see :func:`~.sampling.verify`.

    Raises:
        InvalidInputError: the prompt is empty, or ``kv`` is not this model's.
        UnsupportedError: the model's cache is not of plain keys and values.
    """
    if max_new < 0 or max_drafts < 0:
        raise InvalidInputError(
            f"max_new and max_drafts must be at least 0, got {max_new} and {max_drafts}"
        )
    events = Events(time.monotonic())
    kv = _usable(kv, prompt)
    cached = kv.shape[2]
    sampler = sampler or Sampler()
    stop = _stop_tokens(model)
    buffer = KVBuffer(model, len(prompt) + max_new + max_drafts)
    drafts: list[int] = []
    draft_logits: list[torch.Tensor] = []

    if request.wait(State.COARSE, anchor_timeout):
        events.coarse = time.monotonic()
        buffer.load(kv)
        steps = _steps(buffer, prompt[cached:], sampler, stop)
        while len(drafts) < min(max_drafts, max_new) and _arriving(request):
            step = next(steps, None)
            if step is None:
                break
            drafts.append(step[0])
            draft_logits.append(step[1])
            events.drafts.append(time.monotonic())
        if request.state == State.FULL or request.residual_ready(residual_timeout):
            events.residual = time.monotonic()
            request.refine()

    tokens: list[int] = []
    accepted = 0
    refined = request.state == State.FULL
    if refined:
        buffer.load(kv)
        events.refined = time.monotonic()
        if drafts:
            logits = buffer.forward([*prompt[cached:], *drafts], keep=len(drafts) + 1)
            accepted, following = verify(sampler, drafts, draft_logits, logits, tie_gap)
            tokens = drafts[:accepted]
            if following is not None and not stop.intersection(tokens):
                tokens = [*tokens, following][:max_new]
            events.verified = time.monotonic()
            events.visible = [events.verified] * len(tokens)
    else:
        request.cancel()
        warn_limited(logger, "recompute", "a prompt's cache did not arrive and is computed here")
        cached = len(prompt) - 1
        buffer.length = 0
        buffer.prefill(prompt[:cached])
    _count(events, len(drafts), accepted, refined)

    # Go on where an ordinary step would: the last token has not been fed, or is fed again.
    buffer.length = len(prompt) + len(tokens) - 1 if tokens else cached
    if not stop.intersection(tokens):
        steps = _steps(buffer, tokens[-1:] or prompt[cached:], sampler, stop)
        for token, _ in islice(steps, max_new - len(tokens)):
            tokens.append(token)
            events.visible.append(time.monotonic())
    return Result(tokens, len(drafts), accepted, not refined, events)


def _usable(kv: torch.Tensor, prompt: Sequence[int]) -> torch.Tensor:
    """The part of ``kv`` that decoding starts from."""
    if not prompt:
        raise InvalidInputError("the prompt has no tokens; decoding needs at least one")
    if kv.ndim != 5:
        raise InvalidInputError(
            f"got a cache of shape {list(kv.shape)}; expected five axes, [2, layers, tokens, "
            "kv_heads, head_dim]"
        )
    return kv[:, :, : len(prompt) - 1]


def _stop_tokens(model: Any) -> frozenset[int]:
    ids = model.generation_config.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def _steps(
    buffer: KVBuffer, feed: Sequence[int], sampler: Sampler, stop: frozenset[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Plain decoding: (token, the logits it was chosen from) until a stop token has been given."""
    while True:
        logits = buffer.forward(feed)[-1]
        token = sampler.pick(logits)
        yield token, logits
        if token in stop:
            return
        feed = [token]


def _arriving(request: Request) -> bool:
    """Whether a draft can pay: the residual is still on its way."""
    return (
        request.state == State.COARSE and not request.residual_lost and not request.residual_ready()
    )


def _count(events: Events, drafted: int, accepted: int, refined: bool) -> None:
    if refined:
        metrics.DRAFT_TOKENS.labels("accepted").inc(accepted)
        metrics.DRAFT_TOKENS.labels("rejected").inc(drafted - accepted)
    else:
        metrics.DRAFT_TOKENS.labels("dropped").inc(drafted)
    if drafted:
        reason = "drafted"
    elif refined:
        reason = "residual_was_first"
    else:
        reason = "no_anchor" if events.coarse is None else "no_residual"
    metrics.DRAFT_DECISIONS.labels(reason).inc()
