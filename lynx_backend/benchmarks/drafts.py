"""How many drafts on a small cache are accepted: prompts of seven kinds, with confidence intervals.

Up to 64 tokens are drafted on the small cache after a prompt of 1,024 tokens and verified in one
pass, on Q_full of the same codec, or on the bfloat16 cache for what has nothing to refine with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..codec import CodecSpec
from ..texts import prompt_tokens
from .batch import BatchBuffer, Drafting, accepted, prefill
from .measure import Subject
from .quantizers import Quantizer, lynx
from .texts import Prompt, draft_prompts

PROMPT_TOKENS = 1024
MAX_DRAFTS = 64
TEMPERATURE = 0.7
RESAMPLES = 4_000
#: Runs at once, and prompts read at once.
_BATCH = {"cpu": (4, 2), "cuda": (112, 16)}
Result = dict[str, Any]


def compared(subject: Subject) -> list[Quantizer]:
    """The anchors that are drafted on."""
    known = subject.calibration
    return [
        Quantizer("Lynx paper", lynx(CodecSpec("paper")), True),
        Quantizer("Lynx linear", lynx(CodecSpec("linear")), True),
        Quantizer("Lynx adaptive", lynx(CodecSpec("adaptive"), known), True),
        Quantizer("Lynx adaptive 3+5", lynx(CodecSpec("adaptive", 3, 5), known), True),
    ]


def measure(
    subject: Subject,
    quantizers: list[Quantizer],
    prompts: int,
    temperatures: tuple[float, ...],
    done: Callable[[], None],
) -> Result:
    """Accepted drafts of the first prompts.

    Returns:
        ``prompts``: kind and source of each; ``runs``: for every quantizer its ``bits`` and, under
        ``accepted``, for every temperature (as text) the accepted drafts of each prompt.
    """
    model = subject.model
    chosen = draft_prompts()[:prompts]
    stop = model.generation_config.eos_token_id
    stop = [stop] if isinstance(stop, int) else list(stop or [])
    runs: dict[str, Result] = {
        q.name: {"bits": 0.0, "accepted": {str(t): [] for t in temperatures}} for q in quantizers
    }
    for number, (some, caches) in enumerate(_batches(subject, chosen)):
        buffer = BatchBuffer(model, subject.cache_shape, len(some), PROMPT_TOKENS + MAX_DRAFTS)
        last = torch.tensor([ids[-1] for ids in some], device=model.device)
        for quantizer in quantizers:
            rebuilt = [quantizer.run(kv.to(model.device)) for kv in caches]
            coarse = [r[0].kv.to(torch.bfloat16) for r in rebuilt]
            full = [r[1].kv.to(torch.bfloat16) for r in rebuilt] if len(rebuilt[0]) > 1 else caches
            run = runs[quantizer.name]
            spent = sum(
                8 * r[0].wire_bytes / kv.numel() for r, kv in zip(rebuilt, caches, strict=True)
            )
            run["bits"] += spent / len(chosen)
            for t in temperatures:
                how = Drafting(MAX_DRAFTS, t, seed=number)
                run["accepted"][str(t)] += accepted(buffer, last, coarse, full, how, stop)
            done()
    return {"prompts": [[p.kind, p.source] for p in chosen], "runs": runs}


def batches(device: str, prompts: int) -> int:
    """Into how many batches so many prompts fall."""
    return -(-prompts // _BATCH[torch.device(device).type][0])


def _batches(
    subject: Subject, chosen: list[Prompt]
) -> Iterator[tuple[list[list[int]], list[torch.Tensor]]]:
    """Token ids and caches of some prompts at a time."""
    at_once, reading = _BATCH[subject.model.device.type]
    shape = subject.cache_shape
    for start in range(0, len(chosen), at_once):
        some = [
            prompt_tokens(subject.tokenizer, p.text, PROMPT_TOKENS)
            for p in chosen[start : start + at_once]
        ]
        caches = [
            kv
            for i in range(0, len(some), reading)
            for kv in prefill(subject.model, shape, some[i : i + reading])
        ]
        yield some, caches


# -- statistics ------------------------------------------------------------------------------------

Ints = npt.NDArray[np.int64]
#: Names of what is said of a list of accepted drafts, and what it is.
STATISTICS: dict[str, Callable[[Ints], npt.NDArray[np.float64]]] = {
    "mean": lambda a: a.mean(-1),
    "median": lambda a: np.median(a, -1),
    "all 64": lambda a: 100 * (a >= MAX_DRAFTS).mean(-1),
    "≥ 10": lambda a: 100 * (a >= 10).mean(-1),
    "≥ 20": lambda a: 100 * (a >= 20).mean(-1),
}


def interval(values: Ints, statistic: str = "mean") -> tuple[float, float, float]:
    """A statistic of ``values`` [prompts] and its 95 % interval, by resampling prompts."""
    of = STATISTICS[statistic]
    picks = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(of(values[picks]), (2.5, 97.5))
    return float(of(values)), float(low), float(high)
