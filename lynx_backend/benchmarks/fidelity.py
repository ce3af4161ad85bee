"""What a quantized KV cache does to a model: attention outputs, next tokens, accepted drafts.

* vNMSE: see :mod:`.attention`; over the last 64 positions of a 2048-token prompt of every text. The
  worst layer is given beside the total. Bits are bytes on the wire, everything counted.
* KL: of the next-token distributions at those 64 positions, mean, in nats, from the bfloat16
  cache to the reconstruction of what precedes them; "same" is how often the most likely token is
  the same.
* Accepted drafts: see :mod:`.drafts`.

The texts and which of them a quantizer may be tuned on: ``data/README.md``.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import ablation, drafts
from .measure import CALIBRATION_TEXT, POSITIONS, TOKENS, Effect, Reader, Subject, effects, summary
from .peers import lmcache
from .quantizers import Quantizer, others, profiles, simple, splits
from .texts import HELD_OUT, PYTHON, TEXTS, TUNING

GROUPS = {"tuning": TUNING, "held out": HELD_OUT}
Result = dict[str, Any]
#: Announces how many steps a piece of work has; what it returns is called after each.
Progress = Callable[[str, int], Callable[[], None]]


@dataclass(frozen=True)
class Settings:
    """What is measured, and how much of it.

    Attributes:
        mode: ``"table"``, ``"ablate"``, ``"frontier"`` or ``"drafts"``.
        device: where the model runs; the codec runs on the CPU.
        texts: names; None is those of the mode.
        tokens: of each text.
        prompts: to draft after; None is the mode's number.
        match: only what has this in its name.
        slow: with what takes longer than everything else: LMCache's CacheGen.
    """

    mode: str
    device: str = "cpu"
    texts: tuple[str, ...] | None = None
    tokens: int = TOKENS
    prompts: int | None = None
    match: str = ""
    slow: bool = True

    def wanted(self, name: str) -> bool:
        """Whether something of this name is measured."""
        return self.match.lower() in name.lower()

    def quick(self) -> Settings:
        """The same with as little as possible of everything."""
        return replace(self, texts=("speech",), tokens=320, prompts=1)


PROMPTS = {"table": 14, "frontier": 56, "drafts": 224}


def measure(name: str, settings: Settings, progress: Progress) -> Result:
    """One model."""
    subject = Subject.load(name, settings.device)
    return _MODES[settings.mode](subject, settings, progress)


def environment(settings: Settings) -> Result:
    """Where and on what it was measured."""
    import transformers

    where = platform.platform()
    if torch.device(settings.device).type == "cuda":
        where = f"{torch.cuda.get_device_name()}, {where}"
    return {
        "platform": where,
        "cpus": os.cpu_count(),
        "python": PYTHON,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokens": settings.tokens,
        "positions": POSITIONS,
        "draft_prompt": drafts.PROMPT_TOKENS,
        "calibrated_on": CALIBRATION_TEXT,
        "texts": {
            name: hashlib.sha256(text().encode()).hexdigest() for name, text in TEXTS.items()
        },
    }


def _by_group(
    subject: Subject,
    compared: list[Quantizer],
    texts: list[str],
    settings: Settings,
    progress: Progress,
) -> Result:
    """Summaries of every reconstruction, for each group of texts."""
    found: dict[str, dict[str, Effect]] = {}
    done = progress(f"{subject.name}: texts", len(texts) * len(compared))
    for text in texts:
        reader = Reader(subject, subject.tokens(text, settings.tokens))
        found[text] = effects(reader, compared, done)
    groups = {}
    for group, members in GROUPS.items():
        some = [found[text] for text in texts if text in members]
        if some:
            groups[group] = {row: summary(text[row] for text in some) for row in some[0]}
    return groups


def _drafts(
    subject: Subject, compared: list[Quantizer], temperatures: tuple[float, ...],
    settings: Settings, progress: Progress,
) -> Result:  # fmt: skip
    usual = PROMPTS[settings.mode]
    prompts = usual if settings.prompts is None else settings.prompts
    compared = [q for q in compared if q.drafts]
    if not (prompts and compared):
        return {}
    steps = len(compared) * drafts.batches(settings.device, prompts)
    done = progress(f"{subject.name}: drafts", steps)
    return drafts.measure(subject, compared, prompts, temperatures, done)


def _peers(subject: Subject, settings: Settings) -> list[Quantizer]:
    layers = subject.cache_shape[0]
    return [q for q in lmcache(subject.model, layers) if settings.slow or "CacheGen" not in q.name]


def _table(subject: Subject, settings: Settings, progress: Progress) -> Result:
    compared = [*simple(), *_peers(subject, settings), *profiles(subject.calibration)]
    compared = [q for q in compared if settings.wanted(q.name)]
    texts = list(settings.texts or TEXTS)
    groups = _by_group(subject, compared, texts, settings, progress)
    return {"groups": groups, "drafts": _drafts(subject, compared, (0.0,), settings, progress)}


def _frontier(subject: Subject, settings: Settings, progress: Progress) -> Result:
    tuning = subject.tuning_caches(settings.tokens)
    compared = [*splits(subject.calibration), *_peers(subject, settings), *others(tuning)]
    compared = [q for q in compared if settings.wanted(q.name)]
    texts = list(settings.texts or HELD_OUT)
    groups = _by_group(subject, compared, texts, settings, progress)
    return {
        "groups": groups,
        "drafts": _drafts(subject, compared, (0.0,), settings, progress),
        "families": {q.name: q.family for q in compared},
        "elements_a_token": 2
        * subject.cache_shape[0]
        * subject.cache_shape[1]
        * subject.cache_shape[2],
    }


def _ablate(subject: Subject, settings: Settings, progress: Progress) -> Result:
    rows = ablation.variants(subject, subject.tuning_caches(settings.tokens))
    rows = [row for row in rows if settings.wanted(f"{row.profile} {row.name}")]
    texts = list(settings.texts or HELD_OUT)
    done = progress(f"{subject.name}: variants", len(rows) * len(texts))
    return {"variants": ablation.measure(subject, rows, texts, settings.tokens, done)}


def _only_drafts(subject: Subject, settings: Settings, progress: Progress) -> Result:
    compared = [q for q in drafts.compared(subject) if settings.wanted(q.name)]
    temperatures = (0.0, drafts.TEMPERATURE)
    return {"drafts": _drafts(subject, compared, temperatures, settings, progress)}


_MODES: dict[str, Callable[[Subject, Settings, Progress], Result]] = {
    "table": _table,
    "ablate": _ablate,
    "frontier": _frontier,
    "drafts": _only_drafts,
}
