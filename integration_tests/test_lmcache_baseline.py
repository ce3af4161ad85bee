"""What Lynx is compared with in a demo goes through LMCache as Lynx does."""

from __future__ import annotations

from _lmcache import CHUNK, cache, engine  # isort: skip

import pytest
import torch

from lynx_backend.integrations.lmcache_baseline import BACKENDS

TOKENS = list(range(2 * CHUNK))


@pytest.mark.parametrize(
    ("name", "bits", "worst"), [("BF16", 16, 0.0), ("INT8", 8, 2e-4), ("INT4", 4, 4e-2)]
)
def test_what_was_stored_comes_back(tmp_path, name: str, bits: int, worst: float):
    kv = cache(len(TOKENS))
    extra = {
        "storage_plugin.lynx.module_path": "lynx_backend.integrations.lmcache_baseline",
        "storage_plugin.lynx.class_name": BACKENDS[name].__name__,
        "lynx": {"nvme": {"path": str(tmp_path / "kv"), "min_free_bytes": 0}},
    }
    with engine(tmp_path, {}, extra_config=extra) as one:
        one.store(TOKENS, kv)
    with engine(tmp_path, {}, extra_config=extra) as one:
        found = one.request(TOKENS).float()
    error = (found - kv.float()).square().sum() / kv.float().square().sum()
    assert error <= worst
    assert (error > 0) == (worst > 0)
    stored = sum(f.stat().st_size for f in (tmp_path / "kv").rglob("*.0"))
    scales = 16 / kv.shape[3]  # bits an element
    assert stored == kv.numel() * (bits + (scales if bits < 16 else 0)) / 8
    assert torch.isfinite(found).all()
