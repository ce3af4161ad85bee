"""Calibration of a real language model: SmolLM2-135M."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

import numpy as np
import pytest

from lynx_backend.codec.adaptive_reference import rotate
from lynx_backend.codec.calibration import Calibration
from lynx_backend.errors import UnsupportedError
from lynx_backend.models import load_model
from lynx_backend.texts import default_text, prompt_tokens

pytest.importorskip("transformers", reason="models are transformers'")

from lynx_backend.engines.calibrate import calibrate
from lynx_backend.engines.kv_buffer import prefill

BOOK = Path(__file__).parents[1] / "lynx_backend" / "benchmarks" / "data" / "book.txt"
TOKENS = 512


@pytest.fixture(scope="module")
def loaded():
    try:
        return load_model("smollm2")
    except UnsupportedError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def calibration(loaded) -> Calibration:
    model, tokenizer = loaded
    return calibrate(model, prompt_tokens(tokenizer, default_text(), TOKENS))


def test_keys_without_rotation_have_smaller_ranges(loaded, calibration):
    """A page of 256 tokens; the channels that turn by half a circle or more within it."""
    model, tokenizer = loaded
    assert calibration.cos.shape == (1, 256, 32)
    turning = np.tile((calibration.cos[0] < -0.99).any(0), 2)
    keys = prefill(model, prompt_tokens(tokenizer, BOOK.read_text(encoding="utf-8"), 256))[0]
    keys = keys.float().numpy()
    unrotated = np.stack(
        [rotate(k, calibration.cos[0], calibration.sin[0], back=True) for k in keys]
    )
    # Without the first token, an attention sink.
    saved = np.log2(np.ptp(keys[:, 1:], axis=1) / np.ptp(unrotated[:, 1:], axis=1))
    assert saved[..., turning].mean() > 0.5  # bits a channel
    assert saved[..., ~turning].mean() > -0.05


@pytest.mark.parametrize(("text", "steps"), [("code", 1), ("book", 2)])
def test_another_text_gives_nearly_the_same_calibration(loaded, calibration, text, steps):
    """In 90 of 100 channels: to 1/8 of an octave on texts alike, to 1/4 on unlike ones."""
    model, tokenizer = loaded
    source = inspect.getsource(argparse) if text == "code" else BOOK.read_text(encoding="utf-8")
    other = calibrate(model, prompt_tokens(tokenizer, source, TOKENS))
    np.testing.assert_array_equal(other.cos, calibration.cos)
    apart = np.abs(other.priority.astype(int) - calibration.priority)
    assert (apart <= steps).mean() > 0.9
    assert apart.max() <= 8  # one octave, of the four and a half that priorities span
    assert np.ptp(calibration.priority.astype(int)) > 24
