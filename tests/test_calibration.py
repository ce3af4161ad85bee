"""A calibration's tables: their mathematics, their file, their fingerprint."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from lynx_backend.codec import Codec
from lynx_backend.codec.calibration import OCTAVE, Calibration
from lynx_backend.errors import CorruptObjectError, FormatMismatchError, InvalidInputError
from lynx_backend.keys import Part
from lynx_backend.layout import KVLayout

LAYERS, HEADS, DIM, PAIRS = 3, 2, 16, 6


@pytest.fixture
def calibration() -> Calibration:
    random = np.random.default_rng(0)
    frequencies = [10000.0 ** -(np.arange(PAIRS) / PAIRS), 500.0 ** -(np.arange(PAIRS) / PAIRS)]
    return Calibration.of(frequencies, [0, 1, 0], random.lognormal(0, 2, (LAYERS, HEADS, DIM)))


def test_a_file_gives_back_the_same(calibration, tmp_path):
    calibration.save(tmp_path / "c")
    loaded = Calibration.load(tmp_path / "c")
    for name in ("cos", "sin", "table", "priority"):
        ours, theirs = getattr(calibration, name), getattr(loaded, name)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    assert loaded.fingerprint == calibration.fingerprint
    assert re.fullmatch(r"[0-9a-f]{16}", loaded.fingerprint)


def test_the_fingerprint_depends_on_every_table(calibration):
    seen = {calibration.fingerprint}
    for name in ("cos", "sin", "table", "priority"):
        changed = getattr(calibration, name).copy()
        changed.flat[1] = changed.flat[0] + 1 if name == "priority" else 1 - changed.flat[1]
        seen.add(replace(calibration, **{name: changed}).fingerprint)
    assert len(seen) == 5


def test_the_fingerprint_depends_on_the_shape():
    a, b = (Calibration.none(KVLayout(2, 2, 8, h, d, "bfloat16")) for h, d in ((2, 8), (4, 4)))
    assert a.fingerprint != b.fingerprint


def test_damaged_and_foreign_files_are_refused(calibration, tmp_path):
    path = tmp_path / "c"
    calibration.save(path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 0x40
    np.savez(tmp_path / "other.npz", weights=np.zeros(3))
    arrays = {n: getattr(calibration, n) for n in ("cos", "sin", "table")}
    np.savez(tmp_path / "flat.npz", priority=np.zeros(4), **arrays)
    np.save(tmp_path / "pickled.npy", np.array([{}], object), allow_pickle=True)
    foreign = [(tmp_path / n).read_bytes() for n in ("other.npz", "flat.npz", "pickled.npy")]
    for raw in (b"", b"no tables", whole[:-1], whole[: len(whole) // 2], bytes(flipped), *foreign):
        path.write_bytes(raw)
        with pytest.raises(CorruptObjectError, match=r"lynx calibrate"):
            Calibration.load(path)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "none")


@pytest.mark.parametrize(
    "wrong",
    [
        {"sin": np.zeros((2, 256, PAIRS - 1), np.float32)},
        {"cos": np.zeros((2, 255, PAIRS), np.float32), "sin": np.zeros((2, 255, PAIRS), "f4")},
        {"cos": np.zeros((256, PAIRS), np.float32), "sin": np.zeros((256, PAIRS), np.float32)},
        {"cos": np.zeros((2, 256, 9), np.float32), "sin": np.zeros((2, 256, 9), np.float32)},
        {"table": np.zeros(LAYERS + 1, np.uint8)},
        {"table": np.array([0, 1, 2], np.uint8)},
        {"priority": np.zeros((LAYERS, DIM), np.int8)},
        {"priority": np.zeros((LAYERS + 1, HEADS, DIM), np.int8)},
    ],
)
def test_tables_that_do_not_fit_are_refused(calibration, wrong):
    with pytest.raises(InvalidInputError, match="do not fit"):
        replace(calibration, **wrong)


@pytest.mark.parametrize("name", ["cos", "sin"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_angles_that_are_not_finite_are_refused(calibration, name, value, tmp_path):
    wrong = getattr(calibration, name).copy()
    wrong[1, 3, 2] = value
    with pytest.raises(InvalidInputError, match="NaN or infinity"):
        replace(calibration, **{name: wrong})
    tables = {n: getattr(calibration, n) for n in ("cos", "sin", "table", "priority")}
    np.savez(tmp_path / "c.npz", **tables | {name: wrong})
    with pytest.raises(CorruptObjectError, match="NaN or infinity"):
        Calibration.load(tmp_path / "c.npz")


@pytest.mark.parametrize(("first", "count"), [(9, 1), (2, 1), (0, 3), (1, 2), (-1, 1), (0, 0)])
def test_heads_that_the_model_does_not_have_are_refused(calibration, first, count):
    with pytest.raises(InvalidInputError, match=f"2 KV heads, asked for {count} from {first}"):
        calibration.of_heads(first, count)


@pytest.mark.parametrize(
    ("frequencies", "power"),
    [
        ([], np.ones((1, 1, 4))),
        ([np.ones(2), np.ones(1)], np.ones((1, 1, 4))),
        ([np.ones(3)], np.ones((1, 1, 4))),
        ([np.array([1.0, np.nan])], np.ones((1, 1, 4))),
        ([np.ones(2)], np.full((1, 1, 4), np.inf)),
    ],
)
def test_what_a_model_says_wrongly_is_refused(frequencies, power):
    with pytest.raises(InvalidInputError):
        Calibration.of(frequencies, [0], power)


def test_it_fits_only_its_own_models_cache(calibration):
    calibration.check(KVLayout(2, LAYERS, 100, HEADS, DIM, "bfloat16"))
    for shape in ((LAYERS + 1, HEADS, DIM), (LAYERS, HEADS + 1, DIM), (LAYERS, HEADS, DIM + 2)):
        with pytest.raises(InvalidInputError, match="lynx calibrate"):
            calibration.check(KVLayout(2, shape[0], 100, *shape[1:], "bfloat16"))


def test_angles_grow_with_the_token(calibration):
    angle = 500.0 ** -(2 / PAIRS)
    assert calibration.cos.shape == (2, 256, PAIRS)
    assert calibration.cos[1, 255, 2] == pytest.approx(np.cos(255 * angle))
    assert calibration.sin[1, 255, 2] == pytest.approx(np.sin(255 * angle))
    assert calibration.cos[:, 0].tolist() == [[1] * PAIRS] * 2


def test_priority_is_log2_of_the_size_in_eighths_and_one_for_a_pair():
    # Channels 0 and 2 are a pair, of mean square 16; 1 and 3, of 1; 4 and 5 are alone.
    power = np.array([[[30.0, 1, 2, 1, 4, 2]]])
    level = np.array([2, 0, 2, 0, 1, 0.5])
    got = Calibration.of([np.ones(2)], [0], power).priority[0, 0]
    np.testing.assert_array_equal(got, np.rint(OCTAVE * (level - level.mean())))


def test_priority_does_not_depend_on_the_heads_own_size():
    power = np.random.default_rng(1).lognormal(0, 2, (1, 1, 32))
    a, b = (Calibration.of([np.ones(0)], [0], f * power).priority for f in (1, 1e6))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("live", [1, 15, 31])
def test_channels_without_queries_keep_the_others_apart(live):
    power = np.zeros((1, 1, 32))
    power[0, 0, :live] = 4.0 ** -np.arange(live).clip(0, 3)
    priority = Calibration.of([np.ones(0)], [0], power).priority[0, 0].astype(int)
    assert (priority[0] - priority[:live] == OCTAVE * np.arange(live).clip(0, 3)).all()
    assert (priority[0] - priority[live:] == 15 * OCTAVE).all()


def test_a_head_without_queries_has_equal_priorities():
    priority = Calibration.of([np.ones(0)], [0], np.zeros((1, 1, 4))).priority
    assert not priority.any()


def test_a_ranks_heads_are_of_the_models_spec(calibration):
    """Two ranks of one head each: objects of one spec, each decoded with its own head's tables."""
    kv = torch.randn(2, LAYERS, 100, HEADS, DIM)
    whole = Codec(calibration=calibration)
    for head in range(HEADS):
        rank = Codec(calibration=calibration.of_heads(head, 1))
        assert rank.spec == whole.spec
        mine = kv[:, :, :, head : head + 1].contiguous()
        anchor, residual = rank.encode(mine)
        assert rank.decode(anchor, residual).sub(mine).abs().mean() < 0.02
        # Whoever keeps objects for all ranks can check them.
        assert whole.validate(anchor, Part.ANCHOR).layout.heads == 1
        with pytest.raises(FormatMismatchError, match="lynx calibrate"):
            rank.validate(whole.encode(kv)[0], Part.ANCHOR)
