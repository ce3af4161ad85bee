"""What a user may say about drafting, in vLLM's ``kv_connector_extra_config``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from ...errors import ConfigError
from .policy import Mode

PREFIX = "lynx."
#: vLLM's rejection sampler takes no more (``MAX_SPEC_LEN``).
MOST_DRAFTS = 128


@dataclass(frozen=True)
class DraftSettings:
    """Settings of progressive decode, each given as ``lynx.NAME``.

    Attributes:
        draft: "auto" drafts where that pays, "always" wherever it can be, "never" leaves everything
            to LMCache.
        max_drafts: drafts at most, before a request waits for its residual.
        anchor_seconds: how long anchors may take; LMCache then loads the request, or vLLM computes
            it.
        residual_seconds: how long residuals may take after the anchors; the request is then
            computed.
        trace_dir: folder for a file for each request with what happened when; "" for none.
        provisional: address to publish drafts to, for requests that ask for it; "" for none.
    """

    draft: Mode = "auto"
    max_drafts: int = 64
    anchor_seconds: float = 10.0
    residual_seconds: float = 10.0
    trace_dir: str = ""
    provisional: str = ""

    @classmethod
    def load(cls, extra: Mapping[str, Any]) -> DraftSettings:
        """Read the keys that begin with ``lynx.``; others are LMCache's.

        Raises:
            ConfigError: a key is unknown, or its value of another type or out of range.
        """
        known = {f.name: type(f.default) for f in fields(cls)}
        found: dict[str, Any] = {}
        for key, value in extra.items():
            if not key.startswith(PREFIX):
                continue
            name = key.removeprefix(PREFIX)
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
                raise ConfigError(
                    f"unknown setting {key} in kv_connector_extra_config; the nearest known one is "
                    f"{PREFIX}{near[0]}"
                )
            wanted = _what_is_wrong(name, known[name], value)
            if wanted:
                raise ConfigError(f"{key} must be {wanted}, got {value!r}")
            found[name] = value
        return cls(**found)


def _what_is_wrong(name: str, kind: type, value: object) -> str:
    """What the value should have been, or ""."""
    if name == "draft":
        modes = get_args(Mode)
        return "" if value in modes else f"one of {', '.join(modes)}"
    if kind is str:
        return "" if isinstance(value, str) else "text"
    most = MOST_DRAFTS if name == "max_drafts" else math.inf
    kinds = (int,) if kind is int else (int, float)
    fits = isinstance(value, kinds) and not isinstance(value, bool) and 0 < value <= most
    limit = f", at most {most}" if name == "max_drafts" else ""
    return "" if fits else f"a {kind.__name__} above 0{limit}"
