"""Sources that are compiled at run time, shipped as package data. See README.md beside this."""

from importlib.resources import files


def source(name: str) -> str:
    """The text of one file in this folder, in an editable install and in a wheel alike.

    Raises:
        FileNotFoundError: there is no such file.
    """
    return (files(__name__) / name).read_text(encoding="utf-8")
