"""``lynx trace``: when what happened to one request of vLLM, as a table and a picture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import ConfigError, InvalidInputError, UnsupportedError

#: Of what is shown as a line across the picture: event, label, colour.
_MARKS = (
    ("load", "load begins", "#7f8c9b"),
    ("anchors", "anchors in", "#1f77b4"),
    ("residual", "residual in", "#5aa9dc"),
    ("drop", "drafts dropped", "#c0392b"),
)
_DRAFTED, _VERIFIED = "#f0a030", "#2a8f3c"


@dataclass(frozen=True)
class Trace:
    """One request; times are seconds after vLLM got it.

    Attributes:
        request: its id.
        prompt, stored: tokens of it, and how many of them were loaded.
        events: (seconds, event, count), in order.
    """

    request: str
    prompt: int
    stored: int
    events: list[tuple[float, str, int]]

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read a file that vLLM wrote.

        Raises:
            InvalidInputError: it is not one.
        """
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            events = [(float(at), str(event), int(count)) for at, event, count in read["events"]]
            return cls(str(read["request"]), int(read["prompt"]), int(read["stored"]), events)
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as e:
            raise InvalidInputError(
                f"{path} is not a trace: {type(e).__name__}: {e}. vLLM writes one for each request "
                "into the folder that lynx.trace_dir names"
            ) from e

    def first(self, event: str) -> float | None:
        """When it happened first."""
        return next((at for at, name, _ in self.events if name == event), None)

    def curve(self, event: str) -> list[float]:
        """When the 1st, 2nd, ... token of this event was there."""
        return [at for at, name, count in self.events if name == event for _ in range(count)]


def trace(
    file: Annotated[
        Path, typer.Argument(help="A file from the folder lynx.trace_dir.", show_default=False)
    ],
    token: Annotated[
        int | None,
        typer.Option(min=1, help="The n of the n-th verified token.", show_default="the last"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Draw it here.", show_default=False)
    ] = None,
) -> None:
    """Show when one request's anchors, drafts, residual and verified tokens came.

    vLLM writes the files with `"lynx.trace_dir": FOLDER` in kv_connector_extra_config.
    """
    read = Trace.load(file)
    console = Console()
    console.print(
        f"{read.request}: prompt of {read.prompt} tokens, {read.stored} of them from the store\n",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, at in _times(read, token):
        table.add_row(name, "-" if at is None else f"{at:.3f} s")
    console.print(table)
    if out is not None:
        _draw(read, out)
        console.print(f"\nDrawn: {out}", highlight=False)


def _times(read: Trace, token: int | None) -> list[tuple[str, float | None]]:
    drafts, verified = read.curve("draft"), read.curve("emit")
    n = len(verified) if token is None else token
    return [
        ("anchors in", read.first("anchors")),
        ("first draft", drafts[0] if drafts else None),
        ("residual in", read.first("residual")),
        ("first verified token", verified[0] if verified else None),
        (f"{n}. verified token", verified[n - 1] if 0 < n <= len(verified) else None),
    ]


def _draw(read: Trace, path: Path) -> None:
    try:
        import matplotlib as mpl
    except ImportError:
        raise UnsupportedError(
            "drawing needs matplotlib: pip install 'lynx-backend[demo]'"
        ) from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    _step(axes, read.curve("draft"), "drafted, withheld", _DRAFTED)
    _step(axes, read.curve("emit"), "verified, given out", _VERIFIED)
    for event, label, colour in _MARKS:
        at = read.first(event)
        if at is not None:
            axes.axvline(at, color=colour, linewidth=1, linestyle="--", label=label)
    axes.set_xlabel("seconds after vLLM got the request")
    axes.set_ylabel("tokens")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title(f"{read.prompt} tokens of prompt, {read.stored} from the store", fontsize=10)
    axes.legend(fontsize=8, loc="upper left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot draw to {path}: {e}") from None
    finally:
        plt.close(figure)


def _step(axes: Any, times: list[float], label: str, colour: str) -> None:
    if times:
        counts = list(range(1, len(times) + 1))
        axes.step(times, counts, where="post", color=colour, label=label, marker=".", markersize=3)
