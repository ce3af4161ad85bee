"""What test modules share that takes long to make."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """A vLLM engine with progressive decode, of which a process can have but one."""
    from _vllm import Engine, small_model

    from lynx_backend.models import model_folder

    folder = tmp_path_factory.mktemp("vllm")
    name = os.environ.get("VLLM_TEST_MODEL")
    made = Engine(folder, str(model_folder(name)) if name else small_model(folder / "model"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def prompts(engine) -> dict[str, list[int]]:
    """Prompts that are in the engine's store, by name."""
    return engine.prompts()
