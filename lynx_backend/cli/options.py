"""Options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InvalidInputError
from ..texts import default_text

#: What the text of a prompt is when none is given.
BUILT_IN_TEXT = "the Python language reference topics"

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="YAML file of settings; default: $LYNX_CONFIG, then LYNX_* variables.",
    ),
]
TextOption = Annotated[
    Path | None,
    typer.Option(
        help=f"Text file for the prompt. Default: {BUILT_IN_TEXT}, which every Python has.",
        exists=True,
        dir_okay=False,
        show_default=False,
    ),
]


def read_text(path: Path | None) -> str:
    """The text of a :data:`TextOption`.

    Raises:
        InvalidInputError: the file is not UTF-8 text.
        UnsupportedError: none is given and this Python lacks the built-in one.
    """
    if path is None:
        return default_text()
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise InvalidInputError(f"{path} is not UTF-8 text: {e}") from None


def check_writable(path: Path) -> None:
    """Find out before a long run whether its results can be written to ``path``.

    Raises:
        InvalidInputError: they cannot. Nothing is left where there was nothing.
    """
    there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as e:
        raise InvalidInputError(f"cannot write {path}: {e.strerror}; give another file") from None
