"""``lynx calibrate``: measure a model once, for the codec's profile ``adaptive``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from ..codec.calibration import OCTAVE
from ..errors import InvalidInputError, UnsupportedError
from .options import TextOption, check_writable, read_text


def calibrate(
    model: Annotated[
        str,
        typer.Option(
            help="Folder with a causal language model in Hugging Face format, or smollm2 or gemma3."
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write.", dir_okay=False, writable=True)],
    text: TextOption = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to read, from the text's start.")
    ] = 1024,
) -> None:
    """Measure what the codec's profile adaptive may know of a model: rotary angles, query sizes.

    The model reads one text, on the CPU in bfloat16. Every process that stores or reads this
    model's cache needs the same file; one made again has another fingerprint.
    """
    console = Console()
    try:
        from ..engines import calibrate as measure
    except ImportError as e:
        raise UnsupportedError(
            f"calibration needs {e.name}: pip install 'lynx-backend[demo]'"
        ) from e
    from ..models import load_model
    from ..texts import prompt_tokens

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InvalidInputError(f"cannot write {out}: {e}; give another --out") from None
    check_writable(out)
    with console.status(f"load {model}") as status:
        loaded, tokenizer = load_model(model, torch.bfloat16)
        prompt = prompt_tokens(tokenizer, read_text(text), tokens)
        status.update(f"read {len(prompt)} tokens")
        made = measure.calibrate(loaded, prompt)
    try:
        made.save(out)
    except OSError as e:
        raise InvalidInputError(f"cannot write {out}: {e}; give another --out") from None
    layers, kv_heads, head_dim = made.priority.shape
    tables, _, pairs = made.cos.shape
    turned = sum(bool(made.sin[t].any()) for t in made.table)
    low, high = (int(x) / OCTAVE for x in (made.priority.min(), made.priority.max()))
    table = Table("property", "value", title=f"Calibration of {model}", show_header=False)
    for name, value in {
        "fingerprint": made.fingerprint,
        "cache": f"{layers} layers, {kv_heads} KV heads of {head_dim} channels",
        "rotation": f"{turned} of {layers} layers, {pairs} pairs of channels, {tables} table"
        + "s" * (tables > 1),
        "priorities": f"{low:+.1f} to {high:+.1f} octaves about a head's mean",
    }.items():
        table.add_row(name, value)
    console.print(table)
    console.print(
        f"Written: {out}\n"
        f"To use it: codec.profile: adaptive and codec.calibration: {out} in the configuration "
        "file, or\n"
        f"LYNX_CODEC_PROFILE=adaptive LYNX_CODEC_CALIBRATION={shlex.quote(str(out))}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
