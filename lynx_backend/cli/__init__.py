"""The ``lynx`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, and end it."""
    try:
        from .app import run  # takes seconds, in which one may think better of it

        run()
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell says of a command that SIGINT ended
