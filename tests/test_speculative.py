"""Exactness: greedy output equals plain decoding, sampled output has plain decoding's distribution, and nothing leaks."""

import pytest
import torch
from conftest import KINDS, Scripted, any_drafter, distance, distribution, prompts, scripted, targets, tiny_moa, tiny_target
from hypothesis import given, settings
from hypothesis import strategies as st

import speculative
from model import Random, Sampling, UserError, generate, generate_naive, load_tokenizer
from speculative import Cycle, accept, near_tie, residual, speculate, summarise, table, trace


def tokens(cycles):
    return [token for cycle in cycles for token in cycle.emitted]


# ---- Greedy ----------------------------------------------------------------------------------------------------------


@settings(max_examples=9 * settings.default.max_examples)
@given(targets, prompts, st.sampled_from(KINDS), st.integers(0, 6), st.integers(0, 30), st.sampled_from([0.0, 0.3, 1.0]),
       st.none() | st.integers(0, 16))  # fmt: skip
def test_greedy_output_equals_plain(target, prompt, kind, k, n, confidence, eot):
    """Any target, drafter, prompt (id 0 is a token like any other), draft length, budget (also past block_size), EOT."""
    plain = list(generate(target, prompt, n, eot=eot))
    cycles = list(speculate(target, any_drafter(target, kind), prompt, n, draft_length=k, confidence=confidence, eot=eot))
    assert tokens(cycles) == plain
    assert all(len(cycle.draft) <= k and cycle.accepted <= len(cycle.draft) for cycle in cycles)
    assert len(prompt) + len(plain) <= target.config.block_size
    if kind == "wrong":
        assert all(cycle.accepted == 0 for cycle in cycles)
    if kind == "right" and eot is None:
        assert all(cycle.accepted == len(cycle.draft) for cycle in cycles)


@pytest.mark.parametrize("kind", KINDS)
def test_eot_anywhere_in_a_draft(kind):
    """Each emitted token in turn is declared the end; nothing follows its first occurrence."""
    target = tiny_target(3)
    text = list(generate(target, [1, 2], 20))
    for eot in set(text):
        out = tokens(speculate(target, any_drafter(target, kind), [1, 2], 20, draft_length=5, eot=eot))
        assert out == text[: text.index(eot) + 1]


@pytest.mark.parametrize("n", [0, 1, 2, 4, 5, 6])
def test_max_new_tokens_is_exact(n):
    target = tiny_target(1)
    for kind in KINDS:
        assert tokens(speculate(target, any_drafter(target, kind), [1], n, draft_length=5)) == list(generate(target, [1], n))


def test_prompt_up_to_block_size():
    target = tiny_target(2)
    for length in range(17, 25):
        prompt = [i % 17 for i in range(length)]
        out = tokens(speculate(target, tiny_moa(target), prompt, 99))
        assert out == list(generate(target, prompt, 99)) and len(out) == 24 - length


@pytest.mark.parametrize("kind", KINDS)
def test_tied_logits_give_the_first_id_on_every_path(kind):
    target = tiny_target(0, tie_embeddings=False)
    target.lm_head.weight.data.zero_()  # every logit ties
    assert set(tokens(speculate(target, any_drafter(target, kind), [1, 2], 12))) == {0}
    target = tiny_target(0, tie_embeddings=False, vocab_size=34)
    target.lm_head.weight.data[17:] = target.lm_head.weight.data[:17]  # every row twice
    out = tokens(speculate(target, any_drafter(target, kind), [1, 2], 20))
    assert out == list(generate(target, [1, 2], 20)) == list(generate_naive(target, [1, 2], 20)) and max(out) < 17


def test_near_ties_are_told_from_bugs():
    target = tiny_target(0, tie_embeddings=False)
    [first] = generate(target, [1, 2], 1)
    other = (first + 1) % 17
    assert not near_tie(target, [1, 2], [first], [other]) and not near_tie(target, [1, 2], [first], [first])
    target.lm_head.weight.data[other] = target.lm_head.weight.data[first]
    assert near_tie(target, [1, 2], [first], [other])


@pytest.mark.parametrize("bad", [
    dict(ids=[]), dict(ids=[17]), dict(ids=[-1]), dict(ids=[0] * 25), dict(max_new_tokens=-1), dict(draft_length=-1),
    dict(confidence=2),
])  # fmt: skip
def test_bad_input_is_one_line(bad):
    target = tiny_target()
    with pytest.raises(UserError) as error:
        list(speculate(target, tiny_moa(target), **{**dict(ids=[1], max_new_tokens=3), **bad}))
    assert "\n" not in str(error.value)


# ---- State -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def poison(cache):
    """NaN in every row that the cache does not hold."""
    cache.kv[..., cache.length :, :] = torch.nan


class Spy:
    """A drafter that passes everything on, and keeps the target's cache for inspection between cycles."""

    def __init__(self, drafter):
        self.drafter, self.reset, self.propose, self.observe = drafter, drafter.reset, drafter.propose, drafter.observe

    def memory(self, cache, states):
        self.cache, self.rows = cache, states.size(1)
        return self.drafter.memory(cache, states)


@given(targets, prompts, st.sampled_from(KINDS), st.integers(1, 5))
def test_target_cache_holds_the_committed_tokens_but_the_last(target, prompt, kind, k):
    """After any cycle: exact length, values of a fresh prefill; NaN in the rows beyond changes nothing."""
    spy, ids = Spy(any_drafter(target, kind)), list(prompt)
    for cycle in speculate(target, spy, prompt, 14, draft_length=k):
        ids += cycle.emitted
        fresh = target.new_cache()
        target(torch.tensor([ids[:-1]]), fresh)
        n = spy.cache.length
        assert n == fresh.length == len(ids) - 1
        assert torch.allclose(spy.cache.kv[..., :n, :], fresh.kv[..., :n, :], atol=1e-9)
        poison(spy.cache)
    assert ids[len(prompt) :] == list(generate(target, prompt, 14))


@given(targets, prompts, st.integers(0, 2), st.integers(1, 5))
def test_drafter_state_after_any_cycles_is_that_of_a_fresh_one(target, prompt, n_layers, k):
    """No hole when all is accepted, nothing of rejected tokens: NaN in the drafter's spare rows, and after every cycle the
    next proposal is a fresh drafter's that read the verified tokens at once."""
    drafter, fresh, ids = tiny_moa(target, n_layers), tiny_moa(target, n_layers), list(prompt)
    for cycle in speculate(target, drafter, prompt, 14, draft_length=k):
        ids += cycle.emitted
        for cache in (drafter.sa_cache, drafter.ca_cache, drafter.tli_cache):
            poison(cache)
        with torch.inference_mode():
            cache = target.new_cache()
            states = target.states(torch.tensor([ids[:-1]]), cache)
            fresh.reset()
            fresh.observe(fresh.memory(cache, states))
            want = fresh.propose(ids)
            n = drafter.sa_cache.length
            got = drafter.propose(ids)
            drafter.sa_cache.length = n  # as if we had not looked
            drafter.tli_cache.length = len(ids) - 1
        assert torch.allclose(got, want, atol=1e-9)


def test_a_target_drafting_for_itself_is_always_right():
    """Self-drafting over a cache of its own: a hole after a fully accepted draft would show as a rejection."""

    class SelfDrafter(Scripted):
        def __init__(self, target):
            self.target = target

        def reset(self):
            self.cache = self.target.new_cache()

        def memory(self, cache, states):
            return cache.length

        def observe(self, length):
            self.cache.truncate(min(self.cache.length, length))

        def propose(self, ids):
            return self.target(torch.tensor([ids[self.cache.length :]]), self.cache)[0, -1]

    for seed in range(10):
        target = tiny_target(seed)
        cycles = list(speculate(target, SelfDrafter(target), [1, 2, 3], 21, draft_length=4))
        assert all(cycle.accepted == len(cycle.draft) for cycle in cycles)
        assert len(cycles) == 1 + 4  # the prefill's token, then 20 in fives


def test_output_depends_on_the_seed_alone():
    """No global generator, no leftovers of another run, no order of requests."""
    target = tiny_target(5)
    drafter, sampling = tiny_moa(target), Sampling(1.0)
    run = lambda prompt, seed: tokens(speculate(target, drafter, prompt, 12, sampling=sampling, rng=Random(seed)))
    first, other = run([1], 7), run([2, 3], 8)
    torch.manual_seed(99)
    assert run([2, 3], 8) == other and run([1], 7) == first
    assert any(run([1], seed) != first for seed in range(5))


# ---- Sampled: every branch enumerated ----------------------------------------------------------------------------------


def plain_distribution(target, prompt, n, sampling):
    """{text: probability} of plain decoding."""
    out = {(): 1.0}
    for _ in range(n):
        out = {
            text + (x,): mass * p
            for text, mass in out.items()
            for x, p in enumerate(sampling(target(torch.tensor([prompt + list(text)]))[0, -1]).tolist())
            if p > 0
        }
    return out


SETTINGS = [Sampling(1.0), Sampling(0.7, top_k=2, top_p=0.5), Sampling(1.5, top_p=0.8), Sampling(0.6, top_k=2)]


def emission_error(sampling, kind="moa0", seed=0, n=4, k=2, confidence=0.0):
    target = tiny_target(seed, vocab_size=3, tie_embeddings=False)
    target.lm_head.weight.data /= 20
    drafter = any_drafter(target, kind, seed)
    run = lambda rng: tuple(tokens(speculate(target, drafter, [1, 2], n, k, sampling, confidence, rng)))
    return distance(distribution(run), plain_distribution(target, [1, 2], n, sampling))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SETTINGS)
def test_sampled_output_has_the_targets_distribution(sampling, kind):
    """The shipped loop, every branch of its randomness walked: exact to rounding, not a statistic."""
    assert emission_error(sampling, kind) <= 1e-12


def test_early_stop_keeps_the_distribution():
    for confidence in (0.4, 0.7):
        assert emission_error(Sampling(1.0), "noise", seed=1, confidence=confidence) <= 1e-12


def test_sampled_output_ends_at_eot():
    """As plain decoding: a text that holds the end stops there, with the mass of all that could have followed."""
    target = tiny_target(1, vocab_size=3, tie_embeddings=False)
    target.lm_head.weight.data /= 20
    sampling, drafter = Sampling(1.0), tiny_moa(target)
    want = {}
    for text, mass in plain_distribution(target, [1, 2], 4, sampling).items():
        text = text[: text.index(2) + 1] if 2 in text else text
        want[text] = want.get(text, 0.0) + mass
    run = lambda rng: tuple(tokens(speculate(target, drafter, [1, 2], 4, 2, sampling, rng=rng, eot=2)))
    assert distance(distribution(run), want) <= 1e-12


P, Q = torch.tensor([0.2, 0.4, 0.4]), torch.tensor([0.8, 0.1, 0.1])


def rule_error(p, q, accept=accept):
    """Largest error of the first token emitted, the draft token drawn from q."""

    def run(rng):
        x = rng.draw(q)
        n, token = accept([x], [q], torch.stack([p, p]), rng)
        return x if n else token

    return distance(distribution(run), dict(enumerate(p.tolist())))


def one_hot(i):
    return torch.eye(3)[i]


EDGES = [(P, Q), (P, P), (P + 1e-8 * (one_hot(0) - one_hot(1)), P), (one_hot(1), Q), (P, one_hot(0)), (one_hot(0), one_hot(2)),
         (torch.tensor([0.0, 0.5, 0.5]), Q), (torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.1, 0.9]))]  # fmt: skip


@pytest.mark.parametrize("p, q", EDGES)
def test_rejection_rule_is_exact(p, q):
    assert rule_error(p, q) <= 1e-12
    assert not residual(p, q).isnan().any() and abs(residual(p, q).sum() - 1) < 1e-12


@given(st.lists(st.integers(0, 9), min_size=3, max_size=5), st.data())
def test_rejection_rule_is_exact_for_random_tables(weights, data):
    other = data.draw(st.lists(st.integers(0, 9), min_size=len(weights), max_size=len(weights)))
    if sum(weights) and sum(other):
        p, q = (torch.tensor(w) / sum(w) for w in (weights, other))
        assert rule_error(p, q) <= 1e-12


def accept_everything(draft, q, p, rng):
    return len(draft), rng.draw(p[len(draft)])


def accept_with(residual_of=residual, row=0, q_of=lambda q: q):
    """The rule with one part replaced."""

    def rule(draft, q, p, rng):
        for i, x in enumerate(draft):
            if not rng.coin(min(1.0, (p[i, x] / q_of(q[i])[x]).item())):
                return i, rng.draw(residual_of(p[min(i + row, len(p) - 1)], q[i]))
        return len(draft), rng.draw(p[len(draft)])

    return rule


BROKEN = {
    "accepts everything": accept_everything,
    "residual unnormalised": accept_with(lambda p, q: (p - q).clamp(min=0)),
    "residual softmaxed": accept_with(lambda p, q: (p - q).clamp(min=0).softmax(-1)),
    "replacement drawn from p": accept_with(lambda p, q: p),
    "replacement from the next row": accept_with(row=1),
    "argmax draft divided by a soft q": accept_with(q_of=lambda q: (q + 0.5) / (1 + 0.5 * len(q))),
}


@pytest.mark.parametrize("name", BROKEN)
def test_negative_controls_fail(name, monkeypatch):
    """Each broken rule is caught by the very tests above."""
    monkeypatch.setattr(speculative, "accept", BROKEN[name])
    assert emission_error(Sampling(1.0), "noise") > 1e-3


def test_one_sided_settings_are_caught(monkeypatch):
    """temperature, top-k and top-p on q alone: a Sampling that leaves p, which comes as rows, as it is."""
    warp = Sampling.__call__
    monkeypatch.setattr(Sampling, "__call__", lambda self, logits: warp(self if logits.dim() == 1 else Sampling(1.0), logits))
    sampling = Sampling(0.7, top_k=2, top_p=0.5)
    target = tiny_target(0, vocab_size=3, tie_embeddings=False)
    target.lm_head.weight.data /= 20
    run = lambda rng: tuple(tokens(speculate(target, scripted(target, "noise"), [1, 2], 3, 2, sampling, rng=rng)))
    mixed = distribution(run)
    monkeypatch.undo()
    assert distance(mixed, plain_distribution(target, [1, 2], 3, sampling)) > 1e-3


def test_known_wrong_answers_are_wrong():
    """Two published bugs, by the numbers they give: a soft q for an argmax draft, one uniform for coin and replacement."""
    soft = distribution(lambda rng: (lambda n, t: 0 if n else t)(*accept([0], [Q], torch.stack([P, P]), rng)))
    assert soft[0] == pytest.approx(0.25) and soft[1] == pytest.approx(0.375)  # the drafter's argmax, as if drawn from Q
    assert rule_error(P, one_hot(0)) <= 1e-12  # one-hot q: right
    counts = torch.zeros(3)
    rng = Random(0)
    for _ in range(20000):
        x = rng.draw(Q)
        n, token = accept([x], [Q], torch.stack([P, P]), rng)
        counts[x if n else token] += 1
    # one uniform used twice would give (.2, .3, .5). Five standard deviations: false alarm below 1e-5 at a fresh seed.
    assert (counts / 20000 - P).abs().max() < 5 * (0.24 / 20000) ** 0.5


def test_replacement_comes_from_the_row_of_the_rejection():
    p = torch.eye(5)[[0, 1, 2, 3, 4]]  # the right token of row j is j
    for j in range(4):
        draft = [i if i < j else 4 for i in range(4)]
        q = [torch.eye(5)[x] for x in draft]
        assert accept(draft, q, p, Random()) == (j, j)
    assert accept([0, 1, 2, 3], list(torch.eye(5)[:4]), p, Random()) == (4, 4)


def test_impossible_tokens():
    """u = 0 does not accept a token with p = 0; a token that q cannot have drawn is an error."""

    class Zero(Random):
        def uniform(self):
            return 0.0

    assert accept([0], [one_hot(0)], torch.stack([one_hot(1)] * 2), Zero()) == (0, 1)
    assert not any(Random(seed).coin(0.0) for seed in range(100)) and all(Random(seed).coin(1.0) for seed in range(100))
    with pytest.raises(ValueError, match="q = 0"):
        accept([1], [one_hot(0)], torch.stack([P, P]), Random())


def test_trace_and_table_of_a_known_run():
    """Two cycles made by hand: one draft of three with one rejection, one that stands whole."""
    enc = load_tokenizer()
    ids = [enc.encode_single_token(bytes([b])) for b in "abcdeé".encode()]
    step = lambda ms: dict(draft=ms, verify=2 * ms, observe=0.0, other=0.0)
    cycles = [Cycle([], 0, ids[:1], step(9.0)), Cycle([ids[1], ids[0], ids[2]], 1, ids[1:3], step(0.001)),
              Cycle([ids[3]], 1, ids[3:5], step(0.003)), Cycle([], 0, ids[5:6]), Cycle([], 0, ids[6:7])]  # fmt: skip
    assert "".join(trace(enc, [], cycles, False)) == "{+a+}b[-a-]{+c+}d{+e+}{++}{+é+}"
    run = dict(prompt=[1], plain=ids[:5], text=ids[:5], cycles=cycles[:3], plain_s=2.0, s=1.0)
    result = summarise([run], None, Sampling())
    assert result["tau"] == 2 and result["speedup"] == 2 and result["target_passes"] == 3 and result["identical"]
    assert result["acceptance_by_position"] == [1.0, 0.0] and result["draft_ms"] == pytest.approx(2.0)
    assert result["verify_ms"] == pytest.approx(4.0) and "identical: yes" in "\n".join(table(result))


def test_sampled_long_run_frequencies():
    """The production generator, end to end: 4,000 second tokens of the loop against the exact distribution.

    Five standard deviations on each of 3 ids: the odds of a false alarm at a fresh seed are below 2e-6.
    """
    target = tiny_target(0, vocab_size=3, tie_embeddings=False)
    target.lm_head.weight.data /= 20
    drafter, sampling, n = scripted(target, "noise"), Sampling(0.9), 4000
    rng, counts = Random(1), torch.zeros(3)
    for _ in range(n):
        counts[tokens(speculate(target, drafter, [1, 2], 3, 2, sampling, rng=rng))[1]] += 1
    exact = torch.zeros(3)
    for (_, second), mass in plain_distribution(target, [1, 2], 2, sampling).items():
        exact[second] += mass
    assert ((counts / n - exact).abs() < 5 * (exact * (1 - exact) / n).sqrt() + 1e-9).all()
