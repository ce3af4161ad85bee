"""Tables of results, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table as RichTable

from .drafts import MAX_DRAFTS, STATISTICS, Ints, interval

Result = dict[str, Any]
#: Lower ends of the ranges in which accepted drafts are counted.
_BINS = (0, 1, 4, 10, 20, 40, MAX_DRAFTS)


@dataclass(frozen=True)
class Table:
    """A title, names of columns, and rows of text."""

    title: str
    heads: list[str]
    rows: list[list[str]]

    def rich(self) -> RichTable:
        table = RichTable(title=self.title)
        table.add_column(self.heads[0])
        for head in self.heads[1:]:
            table.add_column(head, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [self.heads, ["---"] * len(self.heads), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(models: dict[str, Result]) -> Iterator[tuple[str, Table]]:
    """All tables of some models' results of one mode, each with a name that stays."""
    for model, result in models.items():
        if "families" in result:
            yield f"frontier {model}", frontier(model, result)
        else:
            for group, rows in result.get("groups", {}).items():
                yield f"fidelity {model} {group}", fidelity(f"{model}, {group} texts", rows)
        if result.get("drafts") and "families" not in result:
            yield from drafts(model, result["drafts"])
    variants = {m: result["variants"] for m, result in models.items() if "variants" in result}
    if variants:
        yield from ablation(variants)


def _number(x: float) -> str:
    return f"{x:.1e}"


def _worst(r: Result) -> str:
    return f"{_number(r['worst'])} ({r['worst_layer']})"


def fidelity(title: str, rows: dict[str, Result]) -> Table:
    """Quantizers and what they do."""
    heads = ["quantizer", "bits", "vNMSE", "worst layer", "K only", "V only", "KL", "same %"]
    return Table(title, heads, [
        [
            name, f"{r['bits']:.2f}", _number(r["vnmse"]), _worst(r), _number(r["k_only"]),
            _number(r["v_only"]), _number(r["kl"]), f"{100 * r['same']:.1f}",
        ]
        for name, r in rows.items()
    ])  # fmt: skip


def ablation(models: dict[str, list[Result]]) -> Iterator[tuple[str, Table]]:
    """Variants by profile and section, with their errors relative to the profile's own."""
    heads = ["variant", "bits"]
    for model in models:
        heads += [f"{model}: anchor", "×", "worst layer", "KL", "full", "×"]
    some = next(iter(models.values()))
    for profile, section in dict.fromkeys((v["profile"], v["section"]) for v in some):
        rows = [
            [v["variant"], f"{v['anchor']['bits']:.2f}"]
            for v in some
            if (v["profile"], v["section"]) == (profile, section)
        ]
        for variants in models.values():
            same = [v for v in variants if v["profile"] == profile]
            usual = same[0]
            shown = [v for v in same if v["section"] == section]
            for row, v in zip(rows, shown, strict=True):
                a, f = v["anchor"], v["full"]
                row += [
                    f"{a['vnmse']:.2e}", f"{a['vnmse'] / usual['anchor']['vnmse']:.2f}",
                    _worst(a), _number(a["kl"]),
                    f"{f['vnmse']:.2e}", f"{f['vnmse'] / usual['full']['vnmse']:.2f}",
                ]  # fmt: skip
        yield f"ablation {profile} {section}", Table(f"{profile}: {section}", heads, rows)


def frontier(model: str, result: Result) -> Table:
    """Every point: bytes, error, divergence, accepted drafts."""
    (rows,) = result["groups"].values()
    elements = result["elements_a_token"]
    runs = result.get("drafts", {}).get("runs", {})
    heads = ["codec", "bits", "KB a token", "vNMSE", "worst layer", "KL", "same %", "accepted"]
    out = []
    for name, r in sorted(rows.items(), key=lambda row: row[1]["bits"]):
        run = runs.get(name.removesuffix(": anchor"))
        mean = ""
        if run and not name.endswith(": full"):
            mean = "{:.1f} [{:.1f}, {:.1f}]".format(*interval(np.array(run["accepted"]["0.0"])))
        out.append([
            name, f"{r['bits']:.2f}", f"{elements * r['bits'] / 8e3:.2f}", _number(r["vnmse"]),
            _worst(r), _number(r["kl"]), f"{100 * r['same']:.1f}", mean,
        ])  # fmt: skip
    return Table(f"{model}: frontier", heads, out)


def _said(values: Ints, statistic: str) -> str:
    mark = " %" if statistic not in ("mean", "median") else ""
    digits = 0 if mark or statistic == "median" else 1
    value, low, high = interval(values, statistic)
    return f"{value:.{digits}f}{mark} [{low:.{digits}f}, {high:.{digits}f}]"


def drafts(model: str, result: Result) -> Iterator[tuple[str, Table]]:
    """Statistics, kinds of prompts and the distribution, for each temperature."""
    runs = result["runs"]
    kinds = np.array([kind for kind, _ in result["prompts"]])
    for t in next(iter(runs.values()))["accepted"]:
        how = "greedy" if float(t) == 0 else f"T = {t}"
        title = f"{model}, {how}, {len(kinds)} prompts"
        accepted = {
            f"{name}, {run['bits']:.2f} bits": np.array(run["accepted"][t])
            for name, run in runs.items()
        }
        yield f"drafts {model} {t}", Table(
            f"{title}: accepted of {MAX_DRAFTS}", ["drafted on", *STATISTICS],
            [[name, *(_said(a, s) for s in STATISTICS)] for name, a in accepted.items()],
        )  # fmt: skip
        if len(set(kinds)) > 1 and len(kinds) >= 2 * len(set(kinds)):
            each = list(dict.fromkeys(kinds.tolist()))
            yield f"drafts {model} {t} kinds", Table(
                f"{title}: mean accepted by kind", ["drafted on", *each],
                [
                    [name, *(_said(a[kinds == kind], "mean") for kind in each)]
                    for name, a in accepted.items()
                ],
            )  # fmt: skip
        ends = [*_BINS[1:], MAX_DRAFTS + 1]
        ranges = list(zip(_BINS, ends, strict=True))
        yield (
            f"drafts {model} {t} distribution",
            Table(
                f"{title}: share of runs by accepted drafts",
                ["drafted on", *(str(a) if b == a + 1 else f"{a}–{b - 1}" for a, b in ranges)],
                [
                    [
                        name,
                        *(
                            f"{100 * np.mean((a >= low) & (a < high)):.0f} %"
                            for low, high in ranges
                        ),
                    ]
                    for name, a in accepted.items()
                ],
            ),
        )
