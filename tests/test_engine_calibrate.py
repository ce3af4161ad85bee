"""Calibrations measured on tiny random models, and the command that writes them."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
import torch

from lynx_backend.codec.adaptive_reference import rotate
from lynx_backend.codec.calibration import Calibration
from lynx_backend.errors import InvalidInputError, UnsupportedError
from lynx_backend.layout import KVLayout

pytest.importorskip("transformers", reason="models are transformers'")

import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lynx_backend.engines.calibrate import calibrate
from lynx_backend.engines.kv_buffer import prefill

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TOKENS = torch.randint(96, (600,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(autouse=True)
def one_thread():
    """These models are too small to be shared between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(family: str, attention: str = "sdpa", text: str = "", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}{text}Config")(**SHAPE | changes)
    auto = transformers.AutoModelForCausalLM
    return auto.from_config(config, attn_implementation=attention).eval()


def unrotated(model, calibration: Calibration, tokens: list[int]) -> np.ndarray:
    """Keys [layers, tokens, kv_heads, head_dim] with their rotation within a page undone."""
    keys = prefill(model, tokens)[0].float().numpy()
    return np.stack(
        [
            rotate(k, calibration.cos[t], calibration.sin[t], back=True)
            for k, t in zip(keys, calibration.table, strict=True)
        ]
    )


def spread(keys: np.ndarray) -> np.ndarray:
    """How far the keys of equal tokens are apart, of their size, by layer."""
    return keys.std(1).max((1, 2)) / np.abs(keys).max((1, 2, 3))


def test_queries_are_measured_under_their_kv_head(monkeypatch):
    model = make("Llama")
    seen: dict[int, torch.Tensor] = {}
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def keep(module, query, *args, **kwargs):
        seen[module.layer_idx] = query[0]
        return sdpa(module, query, *args, **kwargs)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", keep)
        model(torch.tensor([TOKENS]))
    queries = torch.stack([seen[i] for i in range(4)]).numpy().astype(np.float64)
    power = np.empty((4, 2, 16))
    for head in range(2):  # query heads 0, 1 read KV head 0; 2, 3 read KV head 1
        power[:, head] = np.square(queries[:, 2 * head : 2 * head + 2]).mean((1, 2))
    frequencies = model.model.rotary_emb.inv_freq.double().numpy()
    direct = Calibration.of([frequencies], [0] * 4, power)
    measured = calibrate(model, TOKENS)  # in two blocks
    assert measured.fingerprint == direct.fingerprint
    assert np.ptp(direct.priority.astype(int), axis=1).any(), "the heads differ"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nothing_stays_hooked(attention):
    model = make("Llama", attention)
    before = dict(ALL_ATTENTION_FUNCTIONS)
    calibrate(model, TOKENS[:20])
    assert dict(ALL_ATTENTION_FUNCTIONS) == before
    with pytest.raises(IndexError):
        calibrate(model, [*TOKENS[:20], 96])
    model.model.layers[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibrate(model, TOKENS[:20])
    assert dict(ALL_ATTENTION_FUNCTIONS) == before


def test_a_function_put_in_place_before_is_there_again(monkeypatch):
    sdpa, calls = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def mine(*args, **kwargs):
        calls.append(1)
        return sdpa(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", mine)
    calibrate(make("Llama"), TOKENS[:20])
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mine
    assert calls


def test_every_way_to_attend_measures_the_same():
    a, b = (calibrate(make("Llama", way), TOKENS[:100]) for way in ("sdpa", "eager"))
    assert np.abs(a.priority.astype(int) - b.priority).max() <= 1
    np.testing.assert_array_equal(a.cos, b.cos)


SCALED = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes", "pairs", "tables"),
    [
        ("Llama", {}, 8, [0] * 4),
        *(
            ("Llama", {"rope_parameters": {"rope_type": t, "rope_theta": 1e4, **p}}, 8, [0] * 4)
            for t, p in SCALED.items()
        ),
        ("Qwen2", {}, 8, [0] * 4),
        ("GPTNeoX", {"rotary_pct": 0.25, "num_key_value_heads": 4}, 2, [0] * 4),
        ("StableLm", {"partial_rotary_factor": 0.5}, 4, [0] * 4),
        ("Phi", {"partial_rotary_factor": 0.5}, 4, [0] * 4),
        ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0]}, 8, [0, 1, 0, 1]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_undone(family, changes, pairs, tables, dtype, caplog):
    """Equal tokens have, without rotation, equal keys: also above the first layer."""
    model = make(family, **changes).to(dtype)
    with caplog.at_level(logging.WARNING):
        made = calibrate(model, TOKENS[:40])
    assert not caplog.records
    assert made.cos.shape[2] == pairs
    assert made.table.tolist() == tables
    keys = prefill(model, [5] * 256)[0].float().numpy()
    limit = 1e-4 if dtype == torch.float32 else 0.05
    assert spread(unrotated(model, made, [5] * 256)).max() < limit
    turning = np.array([made.sin[t].any() for t in made.table])
    assert spread(keys)[turning].min() > 4 * limit


def test_gemma_has_two_rotations():
    model = make(
        "Gemma3", text="Text", sliding_window=16, num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    made = calibrate(model, TOKENS)
    assert made.table.tolist() == [0, 0, 1, 0, 0, 1]
    for table, kind in enumerate(("sliding_attention", "full_attention")):
        frequencies = getattr(model.model.rotary_emb, f"{kind}_inv_freq").double().numpy()
        np.testing.assert_allclose(made.sin[table, 100], np.sin(100 * frequencies), atol=1e-5)
    assert spread(unrotated(model, made, [5] * 256)).max() < 1e-4


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Cohere", {}),  # pairs neighbouring channels
        ("GPTJ", {"rotary_dim": 8, "num_key_value_heads": 4}),  # likewise, without inv_freq
        ("GPT2", {"n_positions": 128, "num_key_value_heads": 4}),  # learned positions
    ],
)
def test_other_positions_are_left_in_the_keys(family, changes, caplog):
    with caplog.at_level(logging.WARNING):
        made = calibrate(make(family, **changes), TOKENS[:100])
    assert "4 of 4 layers" in caplog.text
    assert made.cos.shape == (1, 256, 0)
    assert made.priority.any()


def test_one_token_is_enough():
    made = calibrate(make("Llama"), [7])
    assert made.cos.shape == (1, 256, 8)
    assert made.priority.any()


def test_no_token_is_not():
    with pytest.raises(InvalidInputError, match="at least one token"):
        calibrate(make("Llama"), [])


def test_models_with_another_kind_of_cache_are_refused():
    mamba = transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(UnsupportedError):
        calibrate(transformers.MambaForCausalLM(mamba), TOKENS[:20])
    shared = make(
        "Gemma3n", text="Text", num_kv_shared_layers=2, layer_types=["full_attention"] * 4,
        vocab_size_per_layer_input=96, hidden_size_per_layer_input=8, laurel_rank=8,
        altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="of its own"):
        calibrate(shared, TOKENS[:20])
    assert calibrate(make("Llama"), TOKENS[:20]).priority.any(), "nothing was left behind"


def test_models_that_attend_on_their_own_are_refused():
    with pytest.raises(UnsupportedError, match="attention functions"):
        calibrate(make("Bloom", "eager", num_key_value_heads=4), TOKENS[:20])


# -- command line ----------------------------------------------------------------------------------


def lynx(*arguments: str) -> int:
    from lynx_backend.cli import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        patch.setattr(sys, "argv", ["lynx", "calibrate", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
    return int(exit_.value.code or 0)


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"?": 0, "one": 1, "two": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "model"
    make("Llama").save_pretrained(path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


def test_the_command_writes_a_file_and_says_how_to_use_it(folder, tmp_path, capsys):
    text, out = tmp_path / "text", tmp_path / "new folder" / "tiny.npz"
    text.write_text("one two three " * 20)
    options = ("--model", str(folder), "--text", str(text), "--tokens", "50", "--out", str(out))
    assert lynx(*options) == 0
    printed = capsys.readouterr().out
    made = Calibration.load(out)
    made.check(KVLayout(2, 4, 256, 2, 16, "bfloat16"))
    for part in (
        made.fingerprint,
        "4 layers, 2 KV heads of 16 channels",
        "4 of 4 layers, 8 pairs of channels, 1 table",
        f"codec.calibration: {out}",
        f"LYNX_CODEC_CALIBRATION='{out}'",
    ):
        assert part in printed
    assert lynx(*options) == 0
    assert Calibration.load(out).fingerprint == made.fingerprint


@pytest.mark.parametrize(
    ("content", "out", "message"),
    [("one two", "c.npz", "fewer tokens"), ("one " * 60, "model/config.json/c.npz", "--out")],
)
def test_the_commands_mistakes_are_one_line(folder, tmp_path, capsys, content, out, message):
    (tmp_path / "text").write_text(content)
    options = ("--model", str(folder), "--text", str(tmp_path / "text"), "--tokens", "50")
    assert lynx(*options, "--out", str(tmp_path / out)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert "Traceback" not in error
