"""Progressive decoding on tiny random models: same tokens, whenever the residual arrives."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter

import pytest
import torch

from lynx_backend import Codec, CodecSpec, metrics
from lynx_backend.errors import InvalidInputError, UnsupportedError
from lynx_backend.keys import CacheIdentity, Part, chunk_keys
from lynx_backend.progressive import ProgressiveRequest, State
from lynx_backend.store import ChunkStore
from lynx_backend.testing import ScriptedSource
from lynx_backend.tiers import MemoryTier
from lynx_backend.transport.local import LocalTransport

pytest.importorskip("transformers", reason="the reference engine runs on transformers")

from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from lynx_backend.engines.kv_buffer import KVBuffer
from lynx_backend.engines.reference import Sampler, decode, prefill, progressive_decode
from lynx_backend.engines.sampling import verify

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.4,  # so that the next token depends on the context
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """These models are too small to be shared between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(kind: str, **changes):
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE | changes)).eval()
    sliding = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
    config = Gemma3TextConfig(**SHAPE | {"num_hidden_layers": 4} | sliding | changes)
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():  # or every token would predict itself, whatever attention adds
        model.get_input_embeddings().weight.mul_(0.1)
    return model


@pytest.fixture(scope="module", params=["llama", "gemma"])
def model(request):
    return make(request.param)


def prompts(count: int, length: int = 40, vocab: int = 96) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab, (count, length), generator=generator).tolist()


class Scripted:
    """A request whose residual arrives when a set number of drafts has been made, or never.

    Args:
        kv: what the engine reads; coarse at first, ``fine`` after refine().
        arrives_after: drafts, or None for never.
    """

    def __init__(self, kv, fine, arrives_after, *, lost_after=None, refines=True):
        self.kv, self.fine = kv, fine
        self.arrives_after, self.lost_after, self.refines = arrives_after, lost_after, refines
        self.state = State.COARSE
        self.asked = 0

    @property
    def residual_lost(self):
        return self.lost_after is not None and self.asked >= self.lost_after

    def wait(self, state, timeout=None):
        return state <= self.state < State.FAILED

    def residual_ready(self, timeout=0.0):
        if self.arrives_after is None or self.state != State.COARSE:
            return False
        # Asked once before each draft, and once with a limit when drafting has ended.
        ready = self.asked >= self.arrives_after or timeout > 0
        self.asked += 1
        return ready

    def refine(self):
        if self.refines:
            self.kv.copy_(self.fine)
            self.state = State.FULL
        else:
            self.kv.fill_(math.nan)
            self.state = State.FAILED
        return self.refines

    def cancel(self):
        if self.state != State.FULL:
            self.state = State.FAILED


def caches(model, prompt, noise: float):
    """(coarse, fine) in bfloat16; the coarse one off by ``noise`` times its RMS."""
    fine = prefill(model, prompt[:-1]).bfloat16()
    generator = torch.Generator().manual_seed(2)
    error = torch.randn(fine.shape, generator=generator) * fine.float().square().mean().sqrt()
    return (fine.float() + noise * error).bfloat16(), fine


def run(model, prompt, arrives_after, *, noise=0.3, max_new=32, max_drafts=16, **options):
    """(result, plain decoding on the fine cache)."""
    coarse, fine = caches(model, prompt, noise)
    script = {k: options.pop(k) for k in ("lost_after", "refines") if k in options}
    request = Scripted(coarse, fine, arrives_after, **script)
    plain = decode(model, fine.clone(), prompt, max_new)
    result = progressive_decode(
        model, request, coarse, prompt, max_new, max_drafts=max_drafts, **options
    )
    return result, plain.tokens


# -- the cache -------------------------------------------------------------------------------------


def test_decoding_equals_generate(model):
    for prompt in prompts(3):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        kv = prefill(model, prompt)  # one token more than is used
        assert decode(model, kv, prompt, 40).tokens == expected[0, len(prompt) :].tolist()


def test_prefill_in_blocks_equals_one_pass(model):
    (prompt,) = prompts(1, 1100)
    buffer = KVBuffer(model, len(prompt))
    buffer.forward(prompt)
    torch.testing.assert_close(prefill(model, prompt), buffer.data, rtol=1e-3, atol=1e-3)


def test_logits_and_times_of_plain_decoding(model):
    (prompt,) = prompts(1)
    done = decode(model, prefill(model, prompt), prompt, 5, keep_logits=True)
    assert done.logits is not None
    assert done.logits.argmax(-1).tolist() == done.tokens
    assert len(done.times) == 5
    assert done.times == sorted(done.times)


def test_a_cache_of_another_model_is_refused(model):
    (prompt,) = prompts(1)
    kv = prefill(model, prompt)
    for wrong in (kv[:1], kv[:, :1], kv[:, :, :, :1], kv[..., :4], kv[0], kv[0, 0, 0]):
        with pytest.raises(InvalidInputError, match="shape"):
            decode(model, wrong, prompt, 4)
    with pytest.raises(InvalidInputError, match="no tokens"):
        decode(model, kv, [], 4)


def test_models_that_cannot_rewind_are_refused():
    latent = DeepseekV3Config(
        **SHAPE | {"head_dim": 8},
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=3,
    )
    state_space = MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2)
    for unfit in (DeepseekV3ForCausalLM(latent), MambaForCausalLM(state_space)):
        with pytest.raises(UnsupportedError, match="plain"):
            prefill(unfit, [1, 2, 3])


# -- greedy: the same tokens -----------------------------------------------------------------------


@pytest.mark.parametrize("arrives_after", [0, 1, 5, 15, 16, 1000])
def test_tokens_equal_plain_decoding(model, arrives_after):
    accepted = 0
    for prompt in prompts(4):
        result, plain = run(model, prompt, arrives_after)
        assert result.tokens == plain
        assert result.drafted == min(arrives_after, 16)
        assert not result.recomputed
        accepted += result.accepted
    assert accepted > 0 or arrives_after == 0


def test_a_useless_draft_changes_nothing(model):
    rejected = 0
    for prompt in prompts(4):
        result, plain = run(model, prompt, 16, noise=30.0)
        assert result.tokens == plain
        rejected += result.drafted - result.accepted
    assert rejected > 0


def test_a_perfect_draft_is_kept_whole(model):
    for prompt in prompts(4):
        result, plain = run(model, prompt, 16, noise=0.0)
        assert (result.tokens, result.drafted, result.accepted) == (plain, 16, 16)


def test_verification_is_one_pass(model):
    (prompt,) = prompts(1)
    coarse, fine = caches(model, prompt, 0.0)
    passes = []
    hook = model.register_forward_pre_hook(lambda _, args: passes.append(args[0].shape[1]))
    progressive_decode(model, Scripted(coarse, fine, 16), coarse, prompt, 24, max_drafts=16)
    hook.remove()
    assert passes == [1] * 16 + [17] + [1] * 7


def test_a_prompt_that_is_only_partly_cached(model):
    for prompt, kept in zip(prompts(4), (0, 1, 20, 38), strict=True):
        coarse, fine = (kv[:, :, :kept].clone() for kv in caches(model, prompt, 0.3))
        plain = decode(model, fine.clone(), prompt, 32)
        result = progressive_decode(model, Scripted(coarse, fine, 8), coarse, prompt, 32)
        assert result.tokens == plain.tokens
        assert result.drafted == 8


def test_a_prompt_of_one_token(model):
    coarse, fine = caches(model, [7], 0.3)
    assert fine.shape[2] == 0
    result = progressive_decode(model, Scripted(coarse, fine, 3), coarse, [7], 8)
    assert result.tokens == decode(model, fine, [7], 8).tokens


@pytest.mark.parametrize("max_new", [0, 1, 5, 16, 17])
def test_no_more_tokens_than_asked_for(model, max_new):
    for prompt in prompts(2):
        result, plain = run(model, prompt, 1000, noise=0.0, max_new=max_new)
        assert result.tokens == plain
        assert len(result.tokens) == len(result.events.visible) == max_new
        assert result.drafted == min(max_new, 16)


def test_negative_limits_are_refused(model):
    coarse, fine = caches(model, [1, 2, 3], 0.0)
    for limits in ({"max_new": -1}, {"max_new": 4, "max_drafts": -1}):
        with pytest.raises(InvalidInputError, match="at least 0"):
            progressive_decode(model, Scripted(coarse, fine, 0), coarse, [1, 2, 3], **limits)


@pytest.mark.parametrize("arrives_after", [0, 2, 1000])
@pytest.mark.parametrize("noise", [0.0, 0.3, 30.0])
def test_stop_tokens_end_the_text_where_plain_decoding_does(arrives_after, noise):
    model = make("llama")
    free = [run(model, prompt, 0)[1] for prompt in prompts(6)]
    # Tokens that turn up early in some texts, late or never in others.
    model.generation_config.eos_token_id = [text[4] for text in free[:3]]
    lengths = set()
    for prompt in prompts(6):
        result, plain = run(model, prompt, arrives_after, noise=noise)
        assert result.tokens == plain
        lengths.add(len(plain))
    assert len(lengths) > 1


def test_ties_are_decided_by_an_ordinary_step():
    model = make("llama")
    with torch.no_grad():  # every token has a twin with the same logit, up to rounding
        model.lm_head.weight[48:] = model.lm_head.weight[:48] * (1 + 1e-7)
    for prompt in prompts(4):
        result, plain = run(model, prompt, 16, noise=0.0)
        assert result.tokens == plain
        assert result.accepted == 0


def test_verification_makes_no_choice_between_near_ties():
    greedy = Sampler()
    logits = torch.tensor([[0.0, 1.0, 0.5], [1.0, 0.9995, 0.0], [0.0, 0.0, 1.0]])
    assert verify(greedy, [1, 0], [], logits) == (1, None)
    assert verify(greedy, [1, 0], [], logits, tie_gap=1e-4) == (2, 2)
    assert verify(greedy, [0, 0], [], logits) == (0, 1)
    assert verify(greedy, [1], [], logits[:2]) == (1, None)
    assert verify(greedy, [1, 0], [], logits * float("nan")) == (0, None)


# -- what fails is recomputed ----------------------------------------------------------------------


def check_recomputed(model, prompt, result, drafted):
    assert result.recomputed
    assert (result.drafted, result.accepted) == (drafted, 0)
    assert result.tokens == decode(model, prefill(model, prompt[:-1]), prompt, 32).tokens
    assert result.events.refined is result.events.verified is None


def test_residual_never_comes(model):
    (prompt,) = prompts(1)
    result, _ = run(model, prompt, None, residual_timeout=0.0)
    check_recomputed(model, prompt, result, drafted=16)


def test_residual_is_lost_while_drafting(model):
    (prompt,) = prompts(1)
    result, _ = run(model, prompt, 1000, lost_after=4, residual_timeout=0.0)
    check_recomputed(model, prompt, result, drafted=4)


def test_residual_does_not_fit_its_anchor(model):
    (prompt,) = prompts(1)
    result, _ = run(model, prompt, 4, refines=False)
    check_recomputed(model, prompt, result, drafted=4)


def test_anchor_never_comes(model):
    (prompt,) = prompts(1)
    coarse, fine = caches(model, prompt, 0.3)
    request = Scripted(coarse.fill_(math.nan), fine, None)
    request.state = State.ABSENT
    result = progressive_decode(model, request, coarse, prompt, 32, anchor_timeout=0.0)
    check_recomputed(model, prompt, result, drafted=0)
    assert request.state == State.FAILED  # nobody writes into the tensor any more
    assert result.events.coarse is None


def test_everything_was_there_at_once(model):
    (prompt,) = prompts(1)
    _, fine = caches(model, prompt, 0.3)
    request = Scripted(fine.clone(), fine, None)
    request.state = State.FULL
    result = progressive_decode(model, request, request.kv, prompt, 32)
    assert result.tokens == decode(model, fine, prompt, 32).tokens
    assert (result.drafted, result.recomputed) == (0, False)


# -- with a real request over a real link ----------------------------------------------------------

CHUNK = 32


class Far:
    """A prompt's objects at the far end of a link, and the request that fetches them."""

    def __init__(self, model, prompt):
        codec = Codec(CodecSpec(), threads=1)
        identity = CacheIdentity("tiny", "bfloat16", "layout", codec.spec.fingerprint)
        kv = prefill(model, prompt[:-1]).bfloat16()
        self.keys = chunk_keys(identity, prompt[:-1], CHUNK)
        self.source = ScriptedSource()
        full = []
        for key, part in zip(self.keys, kv.split(CHUNK, dim=2), strict=True):
            objects = codec.encode(part, key.digest)
            full.append(codec.decode(*objects))
            for which, data in zip(Part, objects, strict=True):
                self.source.objects[key.object(which)] = bytes(data.numpy())
        self.full = torch.cat(full, dim=2)
        self.kv = torch.full_like(kv, math.nan)
        self.store = ChunkStore(codec, [MemoryTier(1 << 20)])

    def decode(self, model, prompt, **options):
        transport = LocalTransport(self.source)
        try:
            request = ProgressiveRequest(self.store, transport, "r", self.keys, self.kv, CHUNK)
            return progressive_decode(model, request, self.kv, prompt, 32, max_drafts=16, **options)
        finally:
            for event in self.source.held.values():
                event.set()
            transport.close()


@pytest.mark.parametrize("released_after", [1, 6, 16])
def test_a_residual_that_lands_while_drafting(model, released_after):
    (prompt,) = prompts(1, 76)
    far = Far(model, prompt)
    landed = far.source.held[far.keys[1].object(Part.RESIDUAL)] = threading.Event()
    passes = itertools.count(1)
    hook = model.register_forward_hook(
        lambda *_: landed.set() if next(passes) >= released_after else None
    )
    result = far.decode(model, prompt)
    hook.remove()
    assert result.tokens == decode(model, far.full, prompt, 32).tokens
    assert released_after <= result.drafted <= 16
    assert not result.recomputed


@pytest.mark.parametrize("part", Part)
def test_an_object_that_is_not_there(model, part):
    (prompt,) = prompts(1, 76)
    far = Far(model, prompt)
    del far.source.objects[far.keys[2].object(part)]
    check_recomputed(model, prompt, far.decode(model, prompt), drafted=0)


@pytest.mark.parametrize("part", Part)
def test_an_object_with_a_flipped_bit(model, part):
    (prompt,) = prompts(1, 76)
    far = Far(model, prompt)
    name = far.keys[1].object(part)
    damaged = bytearray(far.source.objects[name])
    damaged[-1] ^= 1
    far.source.objects[name] = bytes(damaged)
    result = far.decode(model, prompt)
    check_recomputed(model, prompt, result, result.drafted)


def test_a_residual_that_stays_away_too_long(model):
    (prompt,) = prompts(1, 76)
    far = Far(model, prompt)
    far.source.held[far.keys[0].object(Part.RESIDUAL)] = threading.Event()
    check_recomputed(model, prompt, far.decode(model, prompt, residual_timeout=0.0), drafted=16)


def test_every_request_is_counted_once_with_its_reason(model):
    def counted():
        return {
            reason: metrics.REGISTRY.get_sample_value(
                "lynx_draft_decisions_total", {"reason": reason}
            )
            or 0
            for reason in ("drafted", "residual_was_first", "no_residual", "no_anchor")
        }

    (prompt,) = prompts(1)
    before = counted()
    run(model, prompt, 3)
    run(model, prompt, None, residual_timeout=0.0)
    run(model, prompt, 0)
    run(model, prompt, None, lost_after=0)
    after = counted()
    rise = {reason: after[reason] - before[reason] for reason in before}
    assert rise == {"drafted": 2, "residual_was_first": 1, "no_residual": 1, "no_anchor": 0}


# -- nothing provisional ---------------------------------------------------------------------------


def test_events_are_in_order_and_nothing_shows_before_it_is_verified(model):
    (prompt,) = prompts(1)
    result, plain = run(model, prompt, 8, noise=0.0)
    events = result.events
    order = [events.started, events.coarse, *events.drafts, events.residual, events.refined]
    order += [events.verified, *events.visible]
    assert order == sorted(order)
    assert len(events.drafts) == result.drafted == 8
    assert len(events.visible) == len(plain)
    assert events.visible[:9] == [events.verified] * 9
    assert events.visible[9] > events.verified


# -- sampling: the same distribution ---------------------------------------------------------------


def chi_square(counts: Counter, expected: dict) -> float:
    """In standard deviations above its mean, for outcomes expected at least 5 times."""
    total = counts.total()
    common = {k: p * total for k, p in expected.items() if p * total >= 5}
    rare = max(total - sum(common.values()), 1e-9)
    seen = sum(counts[k] for k in common)
    value = sum((counts[k] - e) ** 2 / e for k, e in common.items())
    value += (total - seen - rare) ** 2 / rare if rare >= 5 else 0.0
    freedom = len(common) - (rare < 5)
    return (value - freedom) / math.sqrt(2 * freedom)


def test_verified_samples_have_the_refined_distribution():
    generator = torch.Generator().manual_seed(3)
    before, now = torch.randn(2, 16, generator=generator) * 1.5
    sampler = Sampler(temperature=0.8, seed=4)
    q, p = sampler.distribution(before), sampler.distribution(now)
    kept = Counter()
    for _ in range(20_000):
        draft = sampler.draw(q)
        accepted, following = verify(sampler, [draft], [before], torch.stack([now, now]))
        kept[draft if accepted else following] += 1
    assert abs(chi_square(kept, dict(enumerate(p.tolist())))) < 5
    assert chi_square(kept, dict(enumerate(q.tolist()))) > 100  # the test would notice


def test_sampling_end_to_end_has_the_distribution_of_plain_decoding():
    model = make("llama", vocab_size=6, num_hidden_layers=1, initializer_range=0.5)
    (prompt,) = prompts(1, 8, vocab=6)
    coarse, fine = caches(model, prompt, 2.0)

    def exact(kv):
        """Probability of every pair of first tokens."""
        sampler, pairs = Sampler(temperature=1.0), {}
        buffer = KVBuffer(model, 16)
        buffer.load(kv)
        first = sampler.distribution(buffer.forward(prompt[-1:])[-1])
        for a in range(6):
            buffer.length = len(prompt)
            second = sampler.distribution(buffer.forward([a])[-1])
            pairs |= {(a, b): float(first[a] * second[b]) for b in range(6)}
        return pairs

    pairs = Counter()
    for seed, arrives_after in itertools.product(range(400), (0, 1, 3)):
        kv = coarse.clone()
        sampler = Sampler(temperature=1.0, seed=seed * 4 + arrives_after)
        request = Scripted(kv, fine, arrives_after)
        result = progressive_decode(model, request, kv, prompt, 2, max_drafts=2, sampler=sampler)
        pairs[tuple(result.tokens)] += 1
    assert abs(chi_square(pairs, exact(fine))) < 5
    assert chi_square(pairs, exact(coarse)) > 20  # the test would notice unverified drafts


def test_a_seed_repeats_its_text(model):
    (prompt,) = prompts(1)
    kv = prefill(model, prompt)
    a, b, c = (decode(model, kv, prompt, 16, Sampler(0.9, seed)).tokens for seed in (1, 1, 2))
    assert a == b != c


def test_temperature_is_checked():
    for wrong in (-0.1, math.inf, math.nan):
        with pytest.raises(InvalidInputError, match="temperature"):
            Sampler(wrong)
