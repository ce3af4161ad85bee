"""``lynx bench``: measurements of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..errors import InvalidInputError, UnsupportedError
from .options import check_writable

app = typer.Typer(help="Measure what Lynx does here.", no_args_is_help=True)


@app.command()
def fidelity(
    ablate: Annotated[
        bool, typer.Option("--ablate", help="One stage of each profile off at a time.")
    ] = False,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="Quality by bits, for many splits and peers.")
    ] = False,
    drafts: Annotated[
        bool, typer.Option("--drafts", help="Accepted drafts over 224 prompts of seven kinds.")
    ] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="smollm2, gemma3, or a folder; several times for several. Default: both."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu or cuda.")] = "cpu",
    prompts: Annotated[
        int | None, typer.Option(min=0, max=224, help="Prompts to draft after.")
    ] = None,
    match: Annotated[str, typer.Option(help="Only what has this in its name.")] = "",
    slow: Annotated[bool, typer.Option(help="With LMCache's CacheGen, which takes long.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the raw numbers here.", dir_okay=False)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw --frontier or --drafts into this PNG.", dir_okay=False),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke run: one model, one short text, one prompt.")
    ] = False,
) -> None:
    """What quantizers do to a model: attention, next tokens, accepted drafts.

    On real models and texts; see docs/benchmarks.md for what the columns mean. LMCache's codecs
    take part where LMCache is installed.
    """
    modes = {"ablate": ablate, "frontier": frontier, "drafts": drafts}
    chosen = [mode for mode, on in modes.items() if on] or ["table"]
    if len(chosen) > 1:
        raise InvalidInputError(f"--{' and --'.join(chosen)} are different runs; choose one")
    _check_device(device)
    if plot and (chosen[0] not in ("frontier", "drafts") or plot.suffix != ".png"):
        raise InvalidInputError(
            f"--plot draws --frontier or --drafts into a file called .png, not --{chosen[0]} into "
            f"{plot}"
        )
    for path in filter(None, (json_file, plot)):
        check_writable(path)
    try:
        from ..benchmarks import fidelity as benchmark
        from ..benchmarks.plot import plot as draw
        from ..benchmarks.report import tables
    except ImportError as e:
        raise UnsupportedError(
            f"this benchmark needs {e.name}: pip install 'lynx-backend[demo]'"
        ) from e
    names = model or ["smollm2", "gemma3"]
    settings = benchmark.Settings(
        chosen[0], device, prompts=prompts, match=match, slow=slow and not quick
    )
    if quick:
        names = names[:1]
        settings = settings.quick()
    console = Console(width=None if Console().is_terminal else 170)
    results: dict[str, Any] = {
        "mode": settings.mode,
        "environment": benchmark.environment(settings),
        "models": {},
    }
    for name in names:
        with Progress(console=console, transient=True) as bars:

            def steps(what: str, total: int, bars: Progress = bars) -> Callable[[], None]:
                task = bars.add_task(what, total=total)
                return lambda: bars.advance(task)

            found = {Path(name).name: benchmark.measure(name, settings, steps)}
        results["models"] |= found
        for _, table in tables(found):
            console.print(table.rich())
        if json_file:  # after every model: a long run that is stopped has something to show
            json_file.write_text(json.dumps(results, ensure_ascii=False) + "\n")
    if plot:
        draw(results, plot)


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:  # whose message lists two dozen kinds
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InvalidInputError(f"--device must be cpu or cuda, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(f"torch sees no device {name} here; leave --device out")


@app.command()
def transport(
    link: Annotated[
        str | None,
        typer.Option(help="1gbit or 10gbit: between network namespaces, as root, with iperf3."),
    ] = None,
    beside: Annotated[
        str, typer.Option(help="What to measure beside Lynx.")
    ] = "ucxx,loop,stream,nixl,lmcache",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each, in random order.")] = 7,
    seconds: Annotated[int, typer.Option(min=1, help="How long the link is filled.")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the raw numbers here.", dir_okay=False)
    ] = None,
) -> None:
    """Objects between two processes, against ucxx, NIXL, LMCache's P2P and an asyncio stream.

    "ucxx" awaits each message, eight at a time, with that package's own API; in "loop" one thread
    does nothing but progress. NIXL takes part where nixl_cu12 can be
    imported, and LMCache's channel over it where lmcache can.

    With --link: what a shaped link carries against iperf3, and what an anchor waits while eight
    requests' residuals are in full flow, against one queue for all.
    """
    if link not in (None, "1gbit", "10gbit"):
        raise InvalidInputError(f"--link must be 1gbit or 10gbit, got {link}")
    if json_file:
        check_writable(json_file)
    from ..benchmarks import transport as benchmark

    others = beside.split(",")
    if unknown := {*others} - {*benchmark.BESIDE}:
        raise InvalidInputError(f"--beside knows {', '.join(benchmark.BESIDE)}, not {unknown}")
    console = Console()
    results: dict[str, Any]
    if link is None:
        results = benchmark.run_rates(rounds, others)
        for way, rows in results.items():
            columns = {
                "lynx": "Lynx",
                "ucxx": "ucxx",
                "loop": "ucxx in a loop",
                "nixl": "NIXL",
                "lmcache": "LMCache P2P",
                "stream": "stream",
                "of ucxx": "Lynx / ucxx",
                "of loop": "Lynx / loop",
            }
            table = Table("KiB", *columns.values(), title=f"{way}, GB/s")
            for row in rows:
                cells = [f"{row[what]:.2f}" if what in row else "" for what in columns]
                table.add_row(str(row["size"] >> 10), *cells)
            console.print(table)
    else:
        results = benchmark.link(link, seconds)
        share = results["useful"] / results["iperf"]
        console.print(
            f"{link}: {results['useful'] / 1e6:.1f} MB/s of objects, {share:.3f} of iperf3's"
        )
        table = Table("anchors", "n", "median ms", "p99 ms", title="What 256 KiB took")
        names = {"idle": "idle link", "first": "beside residuals", "fifo": "one queue for all"}
        for what, label in names.items():
            median, p99 = np.quantile(results[what], [0.5, 0.99]) * 1e3
            table.add_row(label, str(len(results[what])), f"{median:.2f}", f"{p99:.2f}")
        console.print(table)
    if json_file:
        json_file.write_text(json.dumps(results) + "\n")
