"""``lynx bench``: measurements of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from ..errors import InvalidInputError, UnsupportedError

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
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("torch sees no CUDA device here; leave --device out")
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
