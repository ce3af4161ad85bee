"""What the ``adaptive`` profile may know of a model, measured on the model itself."""

from __future__ import annotations

import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..codec.adaptive_reference import rotate
from ..codec.calibration import Calibration
from ..errors import InvalidInputError, UnsupportedError
from .kv_buffer import KVBuffer

_LOG = logging.getLogger(__name__)
_PROBE_TOKENS = 16
_PROBE_SHIFT = 255  # as far as a page's tokens are apart
_TOLERANCE = 0.01  # measured: up to 2e-4 from bfloat16, at least 0.4 from another rotation

Frequencies = npt.NDArray[np.float64]
Seen = Callable[[int, torch.Tensor, torch.Tensor], None]


def calibrate(model: Any, tokens: Sequence[int]) -> Calibration:
    """Read a prompt once and take a model's rotary angles and the sizes of its queries.

    Angles are those of the model's own ``inv_freq``, whatever scaling made them. Which of them a
    layer uses, and whether it pairs channels i and i + pairs, is tried out on its keys; a layer
    that none of them explains keeps its keys' rotation, which a warning says. A model whose angles
    change with the prompt's length is measured at the short one's.

    Args:
        model: a transformers causal LM in evaluation mode. No other model may attend meanwhile in
            this process.
        tokens: the prompt's ids, at least one; several hundred say more than a few.

    Raises:
        InvalidInputError: no tokens, or queries that are not finite.
        UnsupportedError: not every layer caches keys and values of its own, or the model attends
            other than through transformers' attention functions.
    """
    if not tokens:
        raise InvalidInputError("calibration needs a prompt of at least one token, got none")
    buffer = KVBuffer(model, len(tokens))
    _, layers, _, kv_heads, head_dim = buffer.data.shape
    power = torch.zeros(layers, kv_heads, head_dim, dtype=torch.float64)
    positions = [0] * layers

    def add(layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        by_kv_head = query[0].double().square().view(kv_heads, -1, query.shape[2], head_dim)
        power[layer] += by_kv_head.mean(1).sum(1).cpu()
        positions[layer] += query.shape[2]

    with _attention_calls(model, add):
        buffer.prefill(tokens)
    if any(n != len(tokens) for n in positions):
        raise UnsupportedError(
            f"{type(model).__name__} does not attend through transformers' attention functions, so "
            "its queries cannot be seen; use the codec without a calibration"
        )
    used = _used_frequencies(model, tokens, layers, head_dim)
    distinct = {each.tobytes(): each for each in used}
    order = list(distinct)
    table = [order.index(each.tobytes()) for each in used]
    return Calibration.of(list(distinct.values()), table, (power / len(tokens)).numpy())


@contextmanager
def _attention_calls(model: Any, seen: Seen) -> Iterator[None]:
    """Have ``seen(layer, query, key)`` called whenever a layer attends.

    query is [1, heads, new tokens, head_dim], key [1, kv_heads, all tokens, head_dim], both after
    the rotary embedding.
    """
    name = model.config.get_text_config()._attn_implementation
    registered = ALL_ATTENTION_FUNCTIONS.get(name)

    def call(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        seen(module.layer_idx, query, key)
        # "eager" is not registered: each model's own file has one.
        attend = registered or sys.modules[type(module).__module__].eager_attention_forward
        return attend(module, query, key, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = call
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]  # the library's own function shows again
        if ALL_ATTENTION_FUNCTIONS.get(name) is not registered:
            ALL_ATTENTION_FUNCTIONS[name] = registered


def _used_frequencies(
    model: Any, tokens: Sequence[int], layers: int, head_dim: int
) -> list[Frequencies]:
    """Each layer's angle between neighbouring tokens, all of one length; 0 for no rotation."""
    found = [
        buffer.double().cpu().numpy()
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    ]
    candidates = [f for f in found if f.ndim == 1 and 2 * len(f) <= head_dim]
    movable = "position_ids" in inspect.signature(model.forward).parameters
    used = _probe(model, tokens[:_PROBE_TOKENS], candidates) if candidates and movable else {}
    lengths = Counter(len(f) for f in used.values() if len(f))
    pairs = lengths.most_common(1)[0][0] if lengths else 0
    # A layer that rotates nothing is understood, too.
    unknown = [i for i in range(layers) if i not in used or len(used[i]) not in (0, pairs)]
    if unknown:
        _LOG.warning(
            "%s: no rotary embedding of a known kind in %d of %d layers; their keys are stored "
            "with what their positions add to them, which costs fidelity",
            type(model).__name__, len(unknown), layers,
        )  # fmt: skip
    still = np.zeros(pairs)
    return [used[i] if i not in unknown and len(used[i]) else still for i in range(layers)]


def _probe(
    model: Any, tokens: Sequence[int], candidates: list[Frequencies]
) -> dict[int, Frequencies]:
    """The frequencies that explain a layer's keys, for each layer that has such; empty: none turn.

    Rotary attention sees only how far tokens are apart. So when all positions move by the same
    shift, all keys of every layer turn by the shift's angle, and nothing else about them changes.
    """
    here, there = (_keys(model, tokens, first) for first in (0, _PROBE_SHIFT))
    explained = {}
    for layer, keys in here.items():
        errors = [_mismatch(keys, there[layer], f) for f in (np.zeros(0), *candidates)]
        best = int(np.argmin(errors))
        if errors[best] < _TOLERANCE:
            explained[layer] = (np.zeros(0), *candidates)[best]
    return explained


def _mismatch(
    keys: npt.NDArray[np.float32], moved: npt.NDArray[np.float32], frequencies: Frequencies
) -> float:
    """How far ``moved`` is from ``keys`` turned, [tokens, kv_heads, head_dim]; 0 is equal.

    A share of each channel's energy, averaged: slow channels are the largest and hardly turn, and
    would hide that the fast ones do not fit.
    """
    angles = np.tile(_PROBE_SHIFT * frequencies, (len(keys), 1))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    turned = rotate(keys, cos, sin, back=False)
    error = np.square(moved - turned).sum(0)
    energy = (np.square(moved) + np.square(turned)).sum(0)
    return float((error / np.maximum(energy, 1e-30)).mean())


@torch.inference_mode()
def _keys(model: Any, tokens: Sequence[int], first: int) -> dict[int, npt.NDArray[np.float32]]:
    """Every layer's keys [tokens, kv_heads, head_dim] when the first token's position is first."""
    keys: dict[int, npt.NDArray[np.float32]] = {}

    def keep(layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        keys[layer] = key[0].transpose(0, 1).float().cpu().numpy()

    ids = torch.tensor([list(tokens)], device=model.device)
    positions = torch.arange(first, first + len(tokens), device=model.device)[None]
    with _attention_calls(model, keep):
        model(ids, position_ids=positions, use_cache=False, logits_to_keep=1)
    return keys
