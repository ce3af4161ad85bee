"""One small JSON file for each request that Lynx loaded: what happened when; see ``lynx trace``.

Times and counts, no tokens.
"""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import Any

from ...logs import warn_limited

logger = logging.getLogger(__name__)

#: What may happen, in the usual order; ``draft`` and ``emit`` have a count of tokens.
EVENTS = ("load", "anchors", "wait", "draft", "residual", "verify", "emit", "drop", "end")


class Tracer:
    """Of one engine.

    Args:
        folder: where files go, made if need be.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._open: dict[str, dict[str, Any]] = {}

    def begin(self, request_id: str, arrived: float, **facts: Any) -> None:
        """A load begins: a request's trace, unless it has one.

        Args:
            arrived: when the engine got the request, in ``time.time()`` seconds.
        """
        if request_id not in self._open:
            zero = time.monotonic() - (time.time() - arrived)
            self._open[request_id] = {"request": request_id, **facts, "zero": zero, "events": []}
        self.note(request_id, "load")

    def note(self, request_id: str, event: str, count: int = 1) -> None:
        """Something happened to a request just now; ignored if it has no trace."""
        trace = self._open.get(request_id)
        if trace is not None:
            seconds = round(time.monotonic() - trace["zero"], 6)
            trace["events"].append([seconds, event, count])

    def end(self, request_id: str) -> None:
        """The request is gone: write its file."""
        self.note(request_id, "end")
        trace = self._open.pop(request_id, None)
        if trace is None:
            return
        del trace["zero"]
        name = re.sub(r"[^\w.-]", "_", request_id)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{name}.json").write_text(json.dumps(trace))
        except OSError as e:
            warn_limited(logger, "trace", "could not write the trace of %s: %s", request_id, e)
