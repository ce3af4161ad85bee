"""How an engine's pages are addressed, and what a codec on a GPU says where there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lynx_backend.codec import PagedCache
from lynx_backend.codec.cuda_memory import Place
from lynx_backend.errors import InvalidInputError
from lynx_backend.layout import KVLayout

LAYERS, BLOCKS, BLOCK, HEADS, DIM = 3, 5, 4, 2, 8
SHAPES = {
    "kv_first": (2, BLOCKS, BLOCK, HEADS, DIM),
    "blocks_first": (BLOCKS, 2, BLOCK, HEADS, DIM),
    "fused": (BLOCKS, HEADS, BLOCK, 2 * DIM),
    "latent": (BLOCKS, BLOCK, HEADS * DIM),
}


def element(form: str, x: torch.Tensor, part: int, slot: int, head: int, c: int) -> torch.Tensor:
    """One element, by the axes the engine gives them."""
    block, at = divmod(slot, BLOCK)
    if form == "kv_first":
        return x[part, block, at, head, c]
    if form == "blocks_first":
        return x[block, part, at, head, c]
    if form == "fused":
        return x[block, head, at, part * DIM + c]
    return x[block, at, c]


@pytest.mark.parametrize("form", SHAPES)
def test_the_kernels_arguments_lead_to_every_element(form: str):
    """The arithmetic of kernels/cache.cuh, on addresses."""
    tensors = [torch.zeros(SHAPES[form], dtype=torch.bfloat16) for _ in range(LAYERS)]
    cache = PagedCache.of(tensors, form)
    there = cache.at(torch.arange(BLOCKS * BLOCK))
    heads, dim = (1, HEADS * DIM) if form == "latent" else (HEADS, DIM)
    kv = 1 if form == "latent" else 2
    assert there.layout == KVLayout(kv, LAYERS, BLOCKS * BLOCK, heads, dim, "bfloat16")
    place = Place.of(there, there.layout)
    where, _, a, b, c, d, parts = (int(x) for x in place.args)
    assert (where, b, parts) == (cache.table.data_ptr(), BLOCKS * BLOCK, kv)
    for layer, part in ((0, 0), (2, kv - 1)):
        unit = int(cache.table[layer * kv + part])
        for slot in (0, 5, 19):
            for head, channel in ((0, 0), (heads - 1, 7)):
                found = unit + 2 * (slot // BLOCK * a + slot % BLOCK * c + head * d + channel)
                assert found == element(form, tensors[layer], part, slot, head, channel).data_ptr()
    assert place.defines["VEC"] == 8


def test_vectors_are_as_wide_as_strides_and_addresses_allow():
    for dtype, dim, offset, vec in [
        (torch.bfloat16, 128, 0, 8), (torch.float32, 128, 0, 4), (torch.bfloat16, 20, 0, 4),
        (torch.bfloat16, 33, 0, 1), (torch.bfloat16, 128, 2, 2), (torch.float16, 128, 1, 1),
    ]:  # fmt: skip
        flat = torch.zeros(2 * 3 * 4 * 2 * dim + 8, dtype=dtype)
        kv = flat[offset:][: 2 * 3 * 4 * 2 * dim].view(2, 3, 4, 2, dim)
        layout = KVLayout(*kv.shape, dtype=str(dtype).removeprefix("torch."))
        assert Place.of(kv, layout).defines["VEC"] == vec


def test_slots_of_a_block_table():
    cache = PagedCache.of([torch.zeros(SHAPES["kv_first"])], "kv_first")
    assert cache.slots(torch.tensor([3, 0, 4]), 10).tolist() == [12, 13, 14, 15, 0, 1, 2, 3, 16, 17]


def test_wrong_pages_are_refused():
    good = [torch.zeros(SHAPES["kv_first"]) for _ in range(2)]
    with pytest.raises(InvalidInputError, match="unknown form"):
        PagedCache.of(good, "heads_first")
    with pytest.raises(InvalidInputError, match="does not have shape"):
        PagedCache.of([x[0] for x in good], "kv_first")
    with pytest.raises(InvalidInputError, match="differ between layers"):
        PagedCache.of([good[0], good[1][:, :2]], "kv_first")
    with pytest.raises(InvalidInputError, match="one view"):
        PagedCache.of([x.to(torch.uint8) for x in good], "kv_first")
    with pytest.raises(InvalidInputError, match="int64"):
        PagedCache.of(good, "kv_first").at(torch.zeros(3))


def test_without_cupy_the_message_says_what_to_install():
    script = """
import sys
sys.modules["cupy"] = None
from lynx_backend import Codec, UnsupportedError
try:
    Codec(device="cuda")
except UnsupportedError as e:
    assert "cuda12" in str(e) and "device='cpu'" in str(e), e
else:
    raise SystemExit("no error")
Codec(device="cpu")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
