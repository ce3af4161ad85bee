"""The reference engine on a real language model: SmolLM2-135M, real texts, the real codec."""

from __future__ import annotations

import argparse
import inspect
import threading

import pytest
import torch

from lynx_backend import Codec, CodecSpec
from lynx_backend.errors import UnsupportedError
from lynx_backend.keys import CacheIdentity, Part, chunk_keys
from lynx_backend.models import load_model
from lynx_backend.progressive import ProgressiveRequest
from lynx_backend.store import ChunkStore
from lynx_backend.testing import ScriptedSource
from lynx_backend.texts import default_text, prompt_tokens
from lynx_backend.tiers import MemoryTier
from lynx_backend.transport.local import LocalTransport

pytest.importorskip("transformers", reason="the reference engine runs on transformers")

from lynx_backend.engines.kv_buffer import KVBuffer
from lynx_backend.engines.reference import decode, prefill, progressive_decode
from lynx_backend.engines.sampling import TIE_GAP

CHUNK = 256
NEW = 20
TEXTS = {
    "documentation": default_text,
    "code": lambda: inspect.getsource(argparse),
}


@pytest.fixture(scope="module")
def loaded():
    try:
        return load_model("smollm2")
    except UnsupportedError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module", params=TEXTS)
def served(loaded, request):
    """(prompt, its keys, its objects, Q_full, what plain decoding makes of Q_full)."""
    model, tokenizer = loaded
    prompt = prompt_tokens(tokenizer, TEXTS[request.param](), 400)
    codec = Codec(CodecSpec())
    identity = CacheIdentity("smollm2", "bfloat16", "layout", codec.spec.fingerprint)
    keys = chunk_keys(identity, prompt[:-1], CHUNK)
    kv = prefill(model, prompt[:-1]).bfloat16()
    objects, full = {}, []
    for key, part in zip(keys, kv.split(CHUNK, dim=2), strict=True):
        pair = codec.encode(part, key.digest)
        full.append(codec.decode(*pair))
        objects |= {key.object(p): bytes(t.numpy()) for p, t in zip(Part, pair, strict=True)}
    full_kv = torch.cat(full, dim=2)
    return prompt, keys, objects, full_kv, decode(model, full_kv, prompt, NEW).tokens


@pytest.mark.parametrize("arrives_after", [0, 5, 12, None])
def test_tokens_equal_decoding_on_the_refined_cache(loaded, served, arrives_after):
    """The last residual lands before the first draft, after some, after the last, or never."""
    model, _ = loaded
    prompt, keys, objects, full, plain = served
    source = ScriptedSource()
    source.objects = dict(objects)
    store = ChunkStore(Codec(CodecSpec()), [MemoryTier(1 << 20)])
    landed = source.held[keys[-1].object(Part.RESIDUAL)] = threading.Event()
    if arrives_after == 0:
        landed.set()
    passes = []

    def watch(*_):
        passes.append(1)
        if len(passes) == arrives_after:
            landed.set()

    hook = model.register_forward_hook(watch)
    link = LocalTransport(source)
    kv = torch.zeros_like(full)
    try:
        request = ProgressiveRequest(store, link, "r", keys, kv, CHUNK)
        patience = 0.0 if arrives_after is None else 60.0
        result = progressive_decode(
            model, request, kv, prompt, NEW, max_drafts=12, residual_timeout=patience
        )
    finally:
        hook.remove()
        landed.set()
        link.close()
    if arrives_after is None:
        assert result.recomputed
        exact = decode(model, prefill(model, prompt[:-1]), prompt, NEW)
        assert result.tokens == exact.tokens
    else:
        assert not result.recomputed
        assert result.tokens == plain
        assert torch.equal(kv, full)
        assert result.drafted >= arrives_after
        assert result.drafted == 12 or arrives_after < 12


def test_decoding_equals_generate(loaded):
    model, tokenizer = loaded
    prompt = prompt_tokens(tokenizer, default_text(), 300)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    assert decode(model, prefill(model, prompt), prompt, 16).tokens == expected[0, 300:].tolist()


def test_one_pass_and_single_steps_differ_far_less_than_the_tie_gap(loaded, served):
    model, _ = loaded
    prompt, _, _, full, plain = served
    steps = decode(model, full, prompt, NEW, keep_logits=True)
    buffer = KVBuffer(model, len(prompt) + NEW)
    buffer.load(full)
    logits = buffer.forward([prompt[-1], *plain[:-1]], keep=NEW)
    assert steps.logits is not None
    assert (logits - steps.logits).abs().max() < TIE_GAP / 4


def test_the_tokenizer_gives_every_text_back(loaded):
    _, tokenizer = loaded
    texts = [text()[:20_000] for text in TEXTS.values()]
    texts.append("naïve café — 東京 🦊\r\n\tx  =  12345 ;\n\n\n  don't")
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_model_says_something_sensible(loaded):
    model, tokenizer = loaded
    prompt = tokenizer("The capital of France is")["input_ids"]
    tokens = decode(model, prefill(model, prompt), prompt, 5).tokens
    assert tokenizer.decode(tokens).startswith(" Paris.")
    question = [{"role": "user", "content": "What colour is the sky on a clear day?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text)["input_ids"]
    tokens = decode(model, prefill(model, prompt), prompt, 40).tokens
    assert "blue" in tokenizer.decode(tokens)
