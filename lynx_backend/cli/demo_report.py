"""The demo's results: a table, a timeline and the raw numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from .demo import Run

mpl.use("Agg")
from matplotlib import pyplot as plt

_COLOURS = {"cache": "#7f8c9b", "anchor": "#1f77b4", "residual": "#9ecae1"}


def table(console: Console, facts: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """Print what each run cost and gave."""
    console.print(
        f"\n{facts['prompt_tokens']} tokens of {facts['text']}, {facts['model']}: "
        f"{facts['cache_mb']:.0f} MB of BF16 cache over {facts['gbps']:g} Gbit/s. Reading the "
        f"prompt again would take {facts['prefill_seconds']:.1f} s here.\n"
    )
    out = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    headings = (
        "", "MB", "bits", "first\ndraft", "first\ntoken", "32nd\ntoken", "64th\ntoken",
        "drafted", "kept", "same as\nQ_full", "same as\nBF16",
    )  # fmt: skip
    for heading in headings:
        out.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    total = facts["new_tokens"]
    for run in runs:
        out.add_row(
            run.name,
            f"{run.wire_bytes / 1e6:.1f}",
            f"{run.bits:.2f}",
            _nth(run.drafts, 1),
            *(_nth(run.visible, n) for n in (1, 32, 64)),
            str(len(run.drafts)) if run.drafts else "",
            str(run.accepted) if run.drafts else "",
            f"{run.same_as_full}/{total}",
            f"{run.same_as_bf16}/{total}",
        )
    console.print(out)
    console.print(
        "\nTimes in seconds after the request; tokens are verified ones, which a client\n"
        "may see. bits: on the wire, for each element of the cache. kept: drafts that\n"
        "verification accepted. same as: tokens equal to plain decoding on Lynx's\n"
        "refined cache (Q_full) and on the exact one (BF16).\n"
    )


def _nth(times: Sequence[float], n: int) -> str:
    return f"{times[n - 1]:.2f}" if len(times) >= n else ""


def write_json(path: Path, facts: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> None:
    """All raw numbers."""
    path.write_text(json.dumps({**facts, "runs": list(runs)}, indent=1))


def plot(path: Path, facts: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """One lane a run: when its bytes landed, and when each token was drafted and visible."""
    figure, axes = plt.subplots(figsize=(10, 0.9 + 1.05 * len(runs)), layout="constrained")
    for lane, run in enumerate(reversed(runs)):
        start = 0.0
        for part, curve in run.landed.items():
            end = curve[-1][0]
            axes.barh(lane - 0.2, end - start, 0.3, start, color=_COLOURS[part], edgecolor="white")
            axes.text((start + end) / 2, lane - 0.2, part, ha="center", va="center", fontsize=8)
            start = end
        axes.vlines(run.drafts, lane + 0.0, lane + 0.2, color="#f0a030", linewidth=0.8)
        axes.vlines(run.visible, lane + 0.2, lane + 0.42, color="#2a8f3c", linewidth=0.8)
    axes.set_yticks(range(len(runs)), [run.name for run in reversed(runs)])
    axes.set_xlabel("seconds after the request")
    axes.set_xlim(left=0)
    axes.set_title(
        f"{facts['prompt_tokens']} tokens, {facts['cache_mb']:.0f} MB of BF16 cache over "
        f"{facts['gbps']:g} Gbit/s\norange: token drafted, green: token verified and visible",
        fontsize=10,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
