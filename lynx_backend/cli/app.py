"""All commands of ``lynx``, and what becomes of their errors."""

from __future__ import annotations

import logging
import os
import sys

import typer
from rich.console import Console

from .. import __version__
from ..errors import ConfigError, LynxError
from . import (
    bench,
    calibrate,
    check,
    demo,
    demo_vllm,
    demo_vllm_mp,
    demo_vllm_progressive,
    inspect,
    proxy,
    serve,
    trace,
)

logger = logging.getLogger(__name__)

app = typer.Typer(
    name="lynx",
    help="Progressive KV-cache storage and transport for LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)
app.command("demo")(demo.demo)
app.command("demo-vllm")(demo_vllm.demo_vllm)
app.command("demo-vllm-mp")(demo_vllm_mp.demo_vllm_mp)
app.command("demo-vllm-progressive")(demo_vllm_progressive.demo_vllm_progressive)
app.command("check")(check.check)
app.command("inspect")(inspect.inspect)
app.command("serve")(serve.serve)
app.command("trace")(trace.trace)
app.command("proxy")(proxy.proxy)
app.command("calibrate")(calibrate.calibrate)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lynx-backend {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def run() -> None:
    """Run the command line; an error meant for the user becomes one line and exit status 2."""
    level = logging.getLevelName((os.environ.get("LYNX_LOG_LEVEL") or "WARNING").upper())
    try:
        if not isinstance(level, int):
            raise ConfigError(
                f"LYNX_LOG_LEVEL must be DEBUG, INFO, WARNING or ERROR, not {level[6:]}"
            )
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where it can be told that it did not work
    except (LynxError, OSError) as e:
        logger.debug("the command failed", exc_info=True)
        Console(stderr=True, soft_wrap=True).print(
            f"[red]error[/red] ({type(e).__name__}): ", end=""
        )
        print(e, file=sys.stderr)
        _give_up_what_cannot_be_printed()
        sys.exit(2)


def _give_up_what_cannot_be_printed() -> None:
    """Python tries once more when it ends, and would show a traceback of that."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
