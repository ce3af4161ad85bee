"""The KV cache of one sequence in one tensor, which transformers fills and which can be rewound."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ..errors import InvalidInputError, UnsupportedError

_REWINDABLE = {"full_attention", "sliding_attention"}
_PREFILL_BLOCK = 512  # bounds the attention masks and activations of a long prompt


class KVBuffer:
    """Keys and values of up to ``capacity`` tokens.

    transformers' own ``DynamicCache`` copies the whole cache for every token and forgets what has
    left a sliding window. Here every token is kept, the model masks what its windows hide, and to
    rewind is to set ``length``.

    Raises:
        UnsupportedError: the model keeps a state that cannot be rewound (state-space or linear
            attention), or caches something other than equal-sized keys and values.
    """

    def __init__(self, model: Any, capacity: int) -> None:
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        unfit = set(getattr(config, "layer_types", None) or ()) - _REWINDABLE
        if not heads or unfit or getattr(config, "kv_lora_rank", None):
            raise UnsupportedError(
                f"{type(model).__name__} has {', '.join(sorted(unfit)) or 'no plain attention'} "
                "layers; drafting needs every layer to cache plain keys and values"
            )
        self._model = model
        # Head by head: attention over one head's tokens then reads memory in order.
        self._data = torch.empty(
            2,
            config.num_hidden_layers,
            getattr(config, "num_key_value_heads", None) or heads,
            capacity,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=model.dtype,
            device=model.device,
        )
        self._layers = [_BufferLayer(*pair) for pair in self._data.unbind(1)]
        self._cache = Cache(layers=self._layers)
        # The argument was renamed during transformers 5.
        known = inspect.signature(model.forward).parameters
        self._argument = "cache" if "cache" in known else "past_key_values"

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._layers[0].length

    @length.setter
    def length(self, tokens: int) -> None:
        for layer in self._layers:
            layer.length = tokens

    @property
    def data(self) -> torch.Tensor:
        """What is held, [2, layers, tokens, kv_heads, head_dim] in the model's dtype; a view."""
        return self._data[:, :, :, : self.length].transpose(2, 3)

    def load(self, kv: torch.Tensor) -> None:
        """Hold the tokens of ``kv`` [2, layers, tokens, kv_heads, head_dim], any dtype, alone.

        Raises:
            InvalidInputError: the model has other layers or heads, or there is no room.
        """
        shape = list(self._data.transpose(2, 3).shape)
        room = shape[2]
        shape[2] = kv.shape[2] if kv.ndim == 5 else room
        if list(kv.shape) != shape or shape[2] > room:
            raise InvalidInputError(
                f"got a cache of shape {list(kv.shape)}; this model's is [2, layers, tokens, "
                f"kv_heads, head_dim] = {shape} with at most {room} tokens here"
            )
        self.length = shape[2]
        self.data.copy_(kv)

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], keep: int = 1) -> torch.Tensor:
        """Append ``tokens`` in one pass; the logits of the last ``keep``, float32 [keep, vocab]."""
        ids = torch.tensor([list(tokens)], device=self._data.device)
        output = self._model(
            ids, use_cache=True, logits_to_keep=keep, **{self._argument: self._cache}
        )
        if any(layer.length != self.length for layer in self._layers):
            raise UnsupportedError(
                f"not every layer of {type(self._model).__name__} caches keys and values of its own"
            )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` block by block."""
        for start in range(0, len(tokens), _PREFILL_BLOCK):
            self.forward(tokens[start : start + _PREFILL_BLOCK])


class _BufferLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of a :class:`KVBuffer`, as transformers wants to see it."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self._keys, self._values = keys, values
        self.length = 0
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, kv_heads, new, head_dim] and return everything held, in the same order."""
        end = self.length + key_states.shape[2]
        self._keys[:, self.length : end] = key_states[0]
        self._values[:, self.length : end] = value_states[0]
        self.length = end
        return self._keys[None, :, :end], self._values[None, :, :end]

    def get_seq_length(self) -> int:
        return self.length


def prefill(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """The KV cache of ``tokens``: [2, layers, tokens, kv_heads, head_dim] in the model's dtype.

    Keys are as attention sees them, after the rotary embedding.
    """
    buffer = KVBuffer(model, len(tokens))
    buffer.prefill(tokens)
    return buffer.data
