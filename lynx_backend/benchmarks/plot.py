"""Figures of results."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InvalidInputError, UnsupportedError
from .drafts import MAX_DRAFTS

Result = dict[str, Any]


def plot(results: Result, path: Path) -> None:
    """Draw a frontier (error by bits) or drafts (share of runs with at least n accepted).

    Raises:
        UnsupportedError: matplotlib is not installed.
        InvalidInputError: results of a kind that has no figure.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as e:
        raise UnsupportedError("a plot needs matplotlib: pip install matplotlib") from e
    draw = {"frontier": _frontier, "drafts": _drafts}.get(results["mode"])
    if draw is None:
        raise InvalidInputError(f"there is no figure of --{results['mode']}; leave --plot out")
    models = results["models"]
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(5.6 * len(models) + 2.6, 5.2), sharey=True, squeeze=False
    )
    for axis, (model, result) in zip(axes[0], models.items(), strict=True):
        draw(axis, result)
        axis.set_title(model)
        axis.grid(True, which="major", alpha=0.3)
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), fontsize=8, loc="center right", frameon=False
    )
    figure.tight_layout(rect=(0, 0, 1 - 2.6 / figure.get_figwidth(), 1))
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _frontier(axis: Any, result: Result) -> None:
    (rows,) = result["groups"].values()
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, r in rows.items():
        quantizer, _, part = name.partition(": ")
        family = result["families"][quantizer]
        if family.startswith("Lynx"):
            family += ": full" if part == "full" else ": anchor"
        points[family].append((r["bits"], r["vnmse"]))
    colors = {"Lynx adaptive": "C0", "Lynx linear": "C1"}
    others = (f"C{i}" for i in range(2, 100))
    for family, places in points.items():
        bits, errors = zip(*sorted(places), strict=True)
        profile, _, part = family.partition(": ")
        if part:
            color, style, marker = colors[profile], "-" if part == "anchor" else "none", "o"
        else:
            color, style, marker = next(others), "none", "x"
        fill = "none" if part == "full" else color
        axis.plot(
            bits, errors, color=color, linestyle=style, marker=marker, markerfacecolor=fill,
            label=family,
        )  # fmt: skip
    axis.set_yscale("log")
    axis.set_xlabel("bits an element on the wire")
    axis.set_ylabel("vNMSE of attention outputs")


def _drafts(axis: Any, result: Result) -> None:
    counts = np.arange(MAX_DRAFTS + 1)
    lines = []
    for number, (name, run) in enumerate(result["drafts"]["runs"].items()):
        for t, accepted in run["accepted"].items():
            share = (np.array(accepted)[:, None] >= counts).mean(0)
            how = "greedy" if float(t) == 0 else f"T = {t}"
            style = "-" if float(t) == 0 else "--"
            lines += axis.step(
                counts, 100 * share, where="mid", color=f"C{number}", linestyle=style,
                label=f"{name}, {how}",
            )  # fmt: skip
    axis.set_xlabel("drafts")
    axis.set_ylabel("% of runs that accept at least as many")
    axis.set_ylim(0, 102)
