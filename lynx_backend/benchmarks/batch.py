"""Drafting after many prompts of one length at once, and verifying it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

Tensor = torch.Tensor
_PREFILL_BLOCK = 512
_PASS_TOKENS = 1 << 11  # tokens whose logits are held at once


class _Layer(DynamicLayer):  # type: ignore[misc]
    """One layer of a :class:`BatchBuffer`, as transformers wants to see it."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self._keys, self._values = keys, values
        self.length = 0
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [batch, kv_heads, new, head_dim] and return everything held."""
        end = self.length + key_states.shape[2]
        self._keys[:, :, self.length : end] = key_states
        self._values[:, :, self.length : end] = value_states
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length


class BatchBuffer:
    """:class:`~..engines.kv_buffer.KVBuffer` for several sequences of one length.

    Args:
        model: of transformers, every layer with plain keys and values.
        shape: layers, kv_heads and head_dim of its cache.
        batch: sequences.
        capacity: tokens of each.
    """

    def __init__(self, model: Any, shape: tuple[int, int, int], batch: int, capacity: int) -> None:
        layers, heads, d = shape
        self._model = model
        self._data = torch.empty(
            2, layers, batch, heads, capacity, d, dtype=model.dtype, device=model.device
        )
        known = inspect.signature(model.forward).parameters
        self._argument = "cache" if "cache" in known else "past_key_values"
        self._length = 0

    def load(self, caches: Sequence[Tensor]) -> None:
        """Hold these, each [2, layers, tokens, kv_heads, head_dim], any dtype and device, alone."""
        self._length = caches[0].shape[2]
        for i, kv in enumerate(caches):
            self._data[:, :, i, :, : self._length] = kv.to(self._data.device).transpose(2, 3)

    @torch.inference_mode()
    def forward(self, ids: Tensor, keep: int, rows: slice = slice(None)) -> Tensor:
        """Append ``ids`` [rows, new] to some sequences: logits [rows, keep, vocab], float32.

        The buffer's length grows when all sequences are fed; else the next call starts anew.
        """
        layers = [_Layer(k[rows], v[rows]) for k, v in self._data.unbind(1)]
        for layer in layers:
            layer.length = self._length
        cache = {self._argument: Cache(layers=layers)}
        output = self._model(ids, use_cache=True, logits_to_keep=keep, **cache)
        if rows == slice(None):
            self._length = layers[0].length
        logits: Tensor = output.logits.float()
        return logits

    def rewind(self, length: int) -> None:
        """Forget all tokens from ``length`` on."""
        self._length = length

    def stored(self, rows: int) -> list[Tensor]:
        """The first sequences' caches, [2, layers, tokens, kv_heads, head_dim] each, bfloat16."""
        held = self._data[..., : self._length, :].to(torch.bfloat16)
        return [held[:, :, i].transpose(2, 3).cpu() for i in range(rows)]


def prefill(model: Any, shape: tuple[int, int, int], prompts: list[list[int]]) -> list[Tensor]:
    """Every prompt's cache but for its last token, bfloat16, on the CPU."""
    ids = torch.tensor(prompts, device=model.device)[:, :-1]
    buffer = BatchBuffer(model, shape, len(ids), ids.shape[1])
    for block in ids.split(_PREFILL_BLOCK, 1):
        buffer.forward(block, keep=1)
    return buffer.stored(len(ids))


@dataclass(frozen=True)
class Drafting:
    """How drafts are made.

    Attributes:
        count: drafts a prompt. Stop tokens are never chosen, so every run has as many.
        temperature: 0 is greedy.
        seed: of the random numbers; equal batches get equal ones, whatever they are drafted on.
    """

    count: int = 64
    temperature: float = 0.0
    seed: int = 0


@torch.inference_mode()
def accepted(
    buffer: BatchBuffer,
    last: Tensor,
    coarse: Sequence[Tensor],
    full: Sequence[Tensor],
    how: Drafting,
    stop: Sequence[int],
) -> list[int]:
    """How many drafts on ``coarse`` one pass on ``full`` accepts, for every prompt.

    Args:
        buffer: of as many sequences as prompts.
        last: the prompts' last tokens [prompts], which the caches do not hold.
        coarse, full: the prompts' caches.
        how: greedy, or sampling verified by rejection as in :mod:`..engines.sampling`.
        stop: tokens never chosen.
    """
    noise = torch.Generator(last.device).manual_seed(how.seed)
    buffer.load(coarse)
    drafts, chances = [last], []
    for _ in range(how.count):
        scores = _scores(buffer.forward(drafts[-1][:, None], 1)[:, 0], how, stop)
        if how.temperature:
            scores = scores.log_softmax(-1)
            chosen = (scores + _gumbel(scores, noise)).argmax(-1)
            chances.append(scores.gather(-1, chosen[:, None])[:, 0])
        else:
            chosen = scores.argmax(-1)
        drafts.append(chosen)
    ids = torch.stack(drafts, 1)
    buffer.load(full)
    stands = []
    luck = torch.rand(ids.shape[0], how.count, generator=noise, device=last.device)
    step = max(1, _PASS_TOKENS // ids.shape[1])
    for start in range(0, len(ids), step):
        rows = slice(start, start + step)
        scores = _scores(buffer.forward(ids[rows], how.count + 1, rows)[:, :-1], how, stop)
        wanted = ids[rows, 1:]
        if how.temperature:
            now = scores.gather(-1, wanted[..., None])[..., 0] - scores.logsumexp(-1)
            before = torch.stack(chances, 1)[rows]
            stands.append(luck[rows].log() < now - before)
        else:
            stands.append(scores.argmax(-1) == wanted)
    run: list[int] = torch.cat(stands).int().cumprod(1).sum(1).tolist()
    return run


def _scores(logits: Tensor, how: Drafting, stop: Sequence[int]) -> Tensor:
    if stop:
        logits[..., list(stop)] = -torch.inf
    return logits / how.temperature if how.temperature else logits


def _gumbel(like: Tensor, noise: torch.Generator) -> Tensor:
    u = torch.rand(like.shape, generator=noise, device=like.device)
    return -torch.log(-torch.log(u.clamp(1e-20, 1 - 1e-7)))
