"""Attention as a model computes it, on a KV cache as it is and as a quantizer gives it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Capture:
    """What a model's attention layers saw while it read a prompt.

    Attributes:
        kv: [2, layers, tokens, kv_heads, head_dim], bfloat16; keys after the rotary embedding.
        queries: [layers, heads, positions, head_dim], float32; the last positions of the prompt,
            after the rotary embedding, not yet scaled.
        scaling: what each layer multiplies queries by.
        windows: how many tokens each layer attends to, itself included; None is all of them.
    """

    kv: torch.Tensor
    queries: torch.Tensor
    scaling: list[float]
    windows: list[int | None]


@contextmanager
def _recording(layers: dict[int, dict[str, Any]], positions: int) -> Iterator[None]:
    """Record the arguments of every attention call, for as long as the context lasts."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def record(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kw: Any,
    ) -> Any:
        layers[module.layer_idx] = {
            "q": query[0, :, -positions:].float().clone(),
            "k": key[0].transpose(0, 1).to(torch.bfloat16),
            "v": value[0].transpose(0, 1).to(torch.bfloat16),
            "scaling": float(kw["scaling"]),
            "window": kw.get("sliding_window"),
        }
        return attend(module, query, key, value, *args, **kw)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = record
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]  # the library's own function shows again


@torch.inference_mode()
def capture(model: Any, tokens: list[int], positions: int = 64) -> Capture:
    """Read ``tokens`` once and keep every layer's KV and its last ``positions`` queries."""
    seen: dict[int, dict[str, Any]] = {}
    with _recording(seen, positions):
        model(torch.tensor([tokens], device=model.device), use_cache=False, logits_to_keep=1)
    layers = [seen[i] for i in range(len(seen))]
    return Capture(
        kv=torch.stack([torch.stack([x[part] for x in layers]) for part in ("k", "v")]),
        queries=torch.stack([x["q"] for x in layers]),
        scaling=[x["scaling"] for x in layers],
        windows=[x["window"] for x in layers],
    )


def attention(seen: Capture, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The layer's attention output for the captured queries, in float32.

    Args:
        seen: queries, scale and window.
        layer: whose queries to use.
        keys: [tokens, kv_heads, head_dim].
        values: the same shape.

    Returns:
        [heads, positions, head_dim].
    """
    query = seen.queries[layer]
    heads, positions, dim = query.shape
    tokens, kv_heads, _ = keys.shape
    place = torch.arange(tokens, device=keys.device)
    distance = place[tokens - positions :, None] - place
    hidden = distance < 0
    if (window := seen.windows[layer]) is not None:
        hidden |= distance >= window
    grouped = query.reshape(kv_heads, heads // kv_heads * positions, dim)
    scores = grouped @ keys.float().permute(1, 2, 0) * seen.scaling[layer]
    scores = scores.reshape(heads, positions, tokens).masked_fill(hidden, -torch.inf)
    weights = scores.softmax(-1).reshape(kv_heads, -1, tokens)
    return (weights @ values.float().transpose(0, 1)).reshape(heads, positions, dim)


@dataclass(frozen=True)
class AttentionError:
    """vNMSE of attention outputs, Σ‖o−ô‖² / Σ‖o‖²; errors of several prompts add up with ``+``.

    The sums run over heads, captured positions, layers and prompts. o attends over the bfloat16
    cache, ô over a reconstruction rounded to bfloat16: of both keys and values, of the keys alone,
    of the values alone.

    Attributes:
        error: Σ‖o−ô‖², float64 [both, keys, values; layers].
        energy: Σ‖o‖², float64 [layers].
    """

    error: torch.Tensor
    energy: torch.Tensor

    def __add__(self, other: AttentionError) -> AttentionError:
        return AttentionError(self.error + other.error, self.energy + other.energy)

    def report(self) -> dict[str, float]:
        """``vnmse``, ``k_only``, ``v_only``, and the ``worst_layer`` with its ``worst`` vNMSE."""
        both, keys, values = (self.error.sum(-1) / self.energy.sum()).tolist()
        by_layer = self.error[0] / self.energy
        return {
            "vnmse": both,
            "worst": by_layer.max().item(),
            "worst_layer": int(by_layer.argmax()),
            "k_only": keys,
            "v_only": values,
        }


def outputs(seen: Capture) -> list[torch.Tensor]:
    """Every layer's attention output over the captured cache itself."""
    return [attention(seen, layer, *seen.kv[:, layer]) for layer in range(seen.kv.shape[1])]


def attention_error(
    seen: Capture, exact: list[torch.Tensor], rebuilt: torch.Tensor
) -> AttentionError:
    """Compare a reconstruction of ``seen.kv`` with it; ``exact`` is :func:`outputs` of it."""
    (k, v), (true_k, true_v) = rebuilt.to(torch.bfloat16), seen.kv
    error = [
        [
            (attention(seen, layer, keys[layer], values[layer]) - o).double().square().sum()
            for layer, o in enumerate(exact)
        ]
        for keys, values in ((k, v), (k, true_v), (true_k, v))
    ]
    return AttentionError(
        torch.stack([torch.stack(e) for e in error]).cpu(),
        torch.stack([o.double().square().sum() for o in exact]).cpu(),
    )
