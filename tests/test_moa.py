"""The drafter: the authors' own numbers, training against drafting, what each attention may see, the loss."""
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import prompts, scripted, targets, tiny_eagle, tiny_independent, tiny_moa, tiny_target
from hypothesis import given
from hypothesis import strategies as st

import moa
from model import GPT, MLP, GPTConfig, UserError, save_weights
from moa import (DRAFTERS, EagleDrafter, IndependentDrafter, MoADrafter, agreement, attention_masks, draft_loss, load_drafter,
                 periodic_resets, target_id)  # fmt: skip

GOLDEN = Path(__file__).parent / "golden"


def rms_norm_in_float32(x, shape, weight, eps):
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def attend_in_float32(q, k, v, mask=None):
    k, v = (x.repeat_interleave(q.size(2) // x.size(1), 1) for x in (k, v))
    scores = q.transpose(1, 2) @ k.mT / q.size(-1) ** 0.5 + (0 if mask is None else mask)
    return (scores.float().softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("N", [0, 1])
def test_golden_numbers_of_the_authors_code(N, monkeypatch):
    """Their training forward pass on random weights, in float64. Their code normalises in float32 whatever the model's
    type, takes CA's softmax in float32, and divides by the mask's sum + 1e-5 in float32; the first two are put in place of
    ours here, so that all the rest must agree to 1e-9."""
    monkeypatch.setattr(F, "rms_norm", rms_norm_in_float32)
    monkeypatch.setattr(moa, "attend", attend_in_float32)
    z = np.load(GOLDEN / f"n{N}.npz")
    c = json.loads(str(z["config"]))
    weights = {key[2:]: torch.tensor(z[key]).double() for key in z.files if key.startswith("w/")}
    target = GPT(GPTConfig(c["vocab_size"], c["num_hidden_layers"], c["num_attention_heads"], c["num_key_value_heads"],
                           c["hidden_size"], c["intermediate_size"], c["max_position_embeddings"], tie_embeddings=False))  # fmt: skip
    target.load_state_dict({name: w for name, w in weights.items() if name.startswith(("model.", "lm_head."))})
    drafter = MoADrafter(target, N, n_kv_head=c["num_key_value_heads"], n_ffn=1, lsa_ffn=24)
    drafter.sa.mlp, drafter.ca.mlp = MLP(32, 28), MLP(32, 36)
    ours = {"layer_self_attention": "lsa.block", "Ekv2E": "lsa.proj", "self_attention": "sa", "cross_attention": "ca"}
    drafter.tokens = nn.Identity()
    drafter.tokens.register_forward_hook(lambda _, __, ids: target.model.embed_tokens(ids))
    units = {"ca.self_attn.q_bias": torch.zeros(4, 8), "ca.self_attn.k_bias": torch.zeros(2, 8)}
    units |= {"mean": torch.zeros(32), "std": torch.ones(32)} if N else {}
    drafter.load_state_dict({**units, **{ours[name.split(".")[0]] + name[name.index(".") :]: w for name, w in weights.items()
                             if name.split(".")[0] in ours}})  # fmt: skip
    compared = []

    def same(got, key):
        compared.append(key)
        assert np.abs(got.detach().numpy() - z[key]).max() <= 1e-9, key

    ids, mask = torch.tensor(z["ids"]), torch.tensor(z["response_mask"])
    with torch.no_grad():
        cache, entering = target.new_cache(batch=2), []
        target_state = target.states(ids, cache, entering=entering)
        target_logits = target.lm_head(target_state)
        same(target_logits, "target_logits"), same(target_state, "target_last_hidden")
        same(cache.kv[:, :, :, :20], "kv")
        memory = drafter.memory(cache, target_state)
        same(memory[0], "lsa_memory")
        last_reset = (torch.arange(20) * (1 - mask)).cummax(1).values
        drafter.sa.register_forward_hook(lambda _, __, out: same(out, "sa_out"))
        state, ca_out = drafter(ids, memory, last_reset)
        same(ca_out, "ca_out")
        pair = ()
        if N:  # theirs: true states at the resets, one causal pass over the mixture
            state = target.run_layers(torch.where(mask[..., None] == 0, entering[-1], ca_out), first_layer=2)
            pair = ca_out, entering[-1]
        same(state, "draft_hidden"), same(target.lm_head(state), "draft_logits")
        loss, terms = draft_loss(target.lm_head(state), state, target_logits, target_state, mask, *pair)
    scale = float(mask.sum() / (np.float32(mask.sum()) + np.float32(1e-5)))
    keys = {"cross_entropy": "stat_forward_KL", "state": "stat_feature_loss", "entering": "stat_prev_feature_loss"}
    for name, value in terms.items():
        same(value * scale, keys[name])
    same(loss * scale, "loss")
    assert set(compared) | {"ids", "response_mask", "config"} == {key for key in z.files if not key.startswith("w/")}


def draft_along(target, drafter, ids, reset, steps):
    """Drafting behind `reset` verified tokens, the draft being the text's own -> logits of each step."""
    cache = target.new_cache()
    states = target.states(torch.tensor([ids[:reset]]), cache)
    drafter.reset()
    drafter.observe(drafter.memory(cache, states))
    rest = ids[reset + 1 :]
    return [drafter.propose(ids[: reset + 1], rest[:d], list(range(-1, d - 1)))[-1] for d in range(steps)]


@given(targets, st.integers(0, 2), st.booleans(), st.integers(2, 6), st.lists(st.integers(0, 16), min_size=12, max_size=12))
def test_training_computes_what_drafting_does(target, N, lsa, period, ids):
    """Each block of the parallel pass against the drafter, step by step, that has verified up to the block's reset."""
    drafter, idx = tiny_moa(target, N, lsa_ffn=12 * lsa), torch.tensor([ids])
    cache = target.new_cache()
    states = target.states(idx, cache)
    state, _ = drafter(idx, drafter.memory(cache, states), periodic_resets(torch.tensor([period]), len(ids)))
    parallel = target.lm_head(state)[0]
    with torch.inference_mode():
        for reset in range(0, len(ids) - 1, period):
            steps = min(period, len(ids) - reset) - 1
            for i, logits in enumerate(draft_along(target, drafter, ids, reset + 1, steps), reset + 1):
                assert torch.allclose(logits, parallel[i], atol=1e-9)


@given(targets, st.sampled_from([tiny_eagle, tiny_independent]), st.integers(1, 10), st.lists(st.integers(0, 16), min_size=12, max_size=12))
def test_training_of_the_baselines_computes_what_drafting_does(target, tiny, verified, ids):
    """EAGLE: the first step of a draft; a later one is a pass over its own predictions, which training never saw.
    Independent: every step."""
    drafter, idx, cache = tiny(target), torch.tensor([ids]), target.new_cache()
    states = target.states(idx, cache)
    parallel, _ = drafter(idx, drafter.memory(cache, states))
    with torch.inference_mode():
        drafted = torch.stack(draft_along(target, drafter, ids, verified, len(ids) - verified))
    if tiny is tiny_independent:
        assert torch.allclose(drafted, target.lm_head(parallel)[0, verified:], atol=1e-9)
        return
    assert torch.allclose(drafted[0], target.lm_head(parallel)[0, verified], atol=1e-9)
    own = states.clone()  # by definition, one predicted state after the other in place of the true ones
    for i in range(verified, len(ids)):
        own[:, i] = drafter(idx, (own,))[0][:, i]
    assert torch.allclose(drafted, target.lm_head(own)[0, verified:], atol=1e-9)
    if verified < 10:
        assert not torch.allclose(drafted[1:], target.lm_head(parallel)[0, verified + 1 :], atol=1e-6)


def test_eagle_trains_on_noise_and_drafts_without():
    target = tiny_target(0)
    drafter, ids, f = tiny_eagle(target), torch.randint(17, (1, 12)), torch.randn(1, 12, 16)
    run = lambda f: drafter(ids, (f,))[0]
    assert torch.equal(run(f), run(f))
    other = f.clone()
    other[:, 5] += 1
    moved = (run(f) - run(other)).abs().amax(-1)[0] > 1e-9
    assert not moved[:6].any() and moved[6]  # state 5 is read with token 6
    drafter.train()
    assert not torch.allclose(run(f), run(f), atol=1e-3)


def test_all_drafters_have_the_same_trained_size():
    target = GPT(GPTConfig())
    sizes = [sum(p.numel() for p in kind(target, **settings).parameters()) for kind, settings in DRAFTERS.values()]
    assert max(sizes) < 1.05 * min(sizes)


@given(targets, prompts, st.integers(0, 2))
def test_memory_in_pieces_equals_memory_at_once(target, ids, N):
    """LSA mixes layers, never tokens."""
    drafter, cache, pieces = tiny_moa(target, N), target.new_cache(), []
    for i in ids:
        states = target.states(torch.tensor([[i]]), cache)
        pieces.append(drafter.memory(cache, states))
    s, kv = drafter.memory(cache, torch.zeros(1, len(ids), 16))
    assert torch.allclose(torch.cat([piece[0] for piece in pieces], 1), s, atol=1e-9)
    assert torch.allclose(torch.cat([piece[1] for piece in pieces], 3), kv, atol=1e-9) and kv.size(0) == N


@given(st.integers(0, 2), st.integers(0, 11), st.integers(2, 5), st.booleans())
def test_what_a_query_may_depend_on(N, at, period, staircase):
    """Changing token t+1 moves no query before it; changing the memory of token j moves only queries whose reset is >= j."""
    target = tiny_target(6)
    drafter, ids = tiny_moa(target, N), torch.randint(17, (1, 12), generator=torch.Generator().manual_seed(1))
    cache = target.new_cache()
    memory = drafter.memory(cache, target.states(ids, cache))
    resets = periodic_resets(torch.tensor([period]), 12)
    run = lambda ids, memory: drafter(ids, memory, resets, staircase)[0][0]
    before = run(ids, memory)
    moved = lambda after: (after - before).abs().amax(-1) > 1e-9
    other = ids.clone()
    other[0, at] = (ids[0, at] + 1) % 17
    assert not moved(run(other, memory))[:at].any() and moved(run(other, memory))[at]
    s, kv = memory[0].clone(), memory[1].clone()
    s[:, at] += 1
    kv[..., at, :] += 1
    assert torch.equal(moved(run(ids, (s, kv))), resets[0] >= at)


@given(st.integers(1, 9), st.integers(1, 30))
def test_masks_say_what_the_paper_says(period, T):
    """By definition, entry by entry: CA j <= last reset <= i; the staircase only what follows the reset, and itself."""
    resets = periodic_resets(torch.tensor([period]), T)
    (stairs, seen), (causal, _) = attention_masks(resets, True), attention_masks(resets)
    for i in range(T):
        reset = i // period * period
        assert resets[0, i] == reset
        for j in range(T):
            assert seen[0, 0, i, j] == (j <= reset) and causal[0, 0, i, j] == (j <= i)
            assert stairs[0, 0, i, j] == (reset < j <= i or j == i)


def test_loss_averages_over_the_mask_alone():
    torch.manual_seed(0)
    logits, state, mask = torch.randn(2, 5, 7), torch.randn(2, 5, 3), torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 1]])
    want, terms = draft_loss(logits, state, logits * 0.5, state * 2, mask)
    hidden = mask == 0
    logits_, state_ = logits.clone(), state.clone()
    logits_[hidden], state_[hidden] = 99.0, -99.0
    got, _ = draft_loss(logits_, state_, (logits * 0.5).masked_fill(hidden[..., None], 5), state * 2, mask)
    assert torch.allclose(got, want)
    rows = [draft_loss(logits[b : b + 1, t : t + 1], state[b : b + 1, t : t + 1], logits[b : b + 1, t : t + 1] * 0.5,
                       state[b : b + 1, t : t + 1] * 2, torch.ones(1, 1))[0] for b, t in mask.nonzero().tolist()]  # fmt: skip
    assert torch.allclose(want, torch.stack(rows).mean())
    empty, _ = draft_loss(logits, state, logits, state, torch.zeros(2, 5))
    assert empty == 0  # not NaN
    p = logits.softmax(-1)
    best, _ = draft_loss(logits, state, logits, state, torch.ones(2, 5))
    assert torch.allclose(best, 0.1 * -(p * p.log()).sum(-1).mean())  # the entropy of p: no q does better


def test_gradients_reach_the_drafter_and_not_the_target():
    target = tiny_target(0)
    for N in (0, 2):
        drafter, ids = tiny_moa(target, N).requires_grad_(True), torch.randint(17, (2, 12))
        with torch.no_grad():
            cache = target.new_cache(batch=2)
            states = target.states(ids, cache)
        state, _ = drafter(ids, drafter.memory(cache, states), periodic_resets(torch.tensor([3, 4]), 12))
        state.square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())
        assert all(p.grad is None for p in target.parameters())
        assert not any("target" in name for name in drafter.state_dict())


def test_agreement_counts_by_distance():
    """A drafter that is right always agrees; one that is right for three tokens behind what it was shown, there only."""
    target, text = tiny_target(0, block_size=40), torch.randint(17, (24,), generator=torch.Generator().manual_seed(0)).tolist()

    class Reaching(type(scripted(target, "right"))):
        def __init__(self, reach):
            self.reach, self.right = reach, scripted(target, "right")

        def memory(self, cache, states):
            self.verified = cache.length

        def propose(self, ids, tokens, parents, n=1):
            assert len(ids) == self.verified + 1
            return self.right.propose(ids, tokens, parents, n) * (1 if len(tokens) < self.reach else -1)

    assert agreement(target, Reaching(99), text, 5) == [1.0] * 8
    assert agreement(target, Reaching(3), text, 1, stride=3) == [1.0] * 3 + [0.0] * 5


@pytest.mark.parametrize("kind", [MoADrafter, EagleDrafter, IndependentDrafter])
def test_drafter_files_are_what_was_saved(kind, tmp_path):
    target, path = tiny_target(0), tmp_path / "drafter.pt"
    drafter = kind(target, n_ffn=24)
    save_weights(path, drafter, kind=kind.__name__, settings=drafter.settings, target=target_id(target))
    again = load_drafter(target, path)
    assert type(again) is kind and again.settings == drafter.settings and not again.training
    assert all(torch.equal(p.half(), q.half()) for p, q in zip(drafter.parameters(), again.parameters()))


def test_drafter_files_that_do_not_fit_are_one_line(tmp_path):
    target, path = tiny_target(0), tmp_path / "moa1.pt"
    drafter = MoADrafter(target, 1, n_ffn=24, lsa_ffn=12)
    good = dict(kind="MoADrafter", settings=drafter.settings, target=target_id(target))
    for bad in (None, dict(settings={"n_target_layers": 9}), dict(settings={}), dict(settings={"colour": 1}),
                dict(target=target_id(target) + 1), dict(kind="GPT"), dict(kind="EagleDrafter")):  # fmt: skip
        if bad:
            save_weights(path, drafter, **{**good, **bad})
        with pytest.raises(UserError) as error:
            load_drafter(target, path)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError):
        MoADrafter(target, 3)
