"""Exactness: greedy output equals plain decoding, sampled output has plain decoding's distribution, and nothing leaks."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from conftest import (KINDS, TRAINED, Scripted, any_drafter, chains, distance, distribution, prompts, scripted, targets, tiny_moa,
                      tiny_target, trees)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st

import speculative
from model import KVCache, Random, Sampling, UserError, generate, generate_naive, load_tokenizer
from moa import ancestors, paths
from speculative import (Cycle, Draft, Tree, acceptance, best_length, chain, draw_tree, near_tie, residual, speculate, summarise, table,
                         trace, verify)  # fmt: skip


def tokens(cycles):
    return [token for cycle in cycles for token in cycle.emitted]


# ---- Greedy ----------------------------------------------------------------------------------------------------------


@settings(max_examples=9 * settings.default.max_examples)
@given(targets, prompts, st.sampled_from(KINDS), chains, st.integers(0, 30), st.sampled_from([0.0, 0.3, 1.0]),
       st.none() | st.integers(0, 16))  # fmt: skip
def test_greedy_output_equals_plain(target, prompt, kind, tree, n, confidence, eot):
    """Any target, drafter, prompt (id 0 is a token like any other), draft length, budget (also past block_size), EOT."""
    plain = list(generate(target, prompt, n, eot=eot))
    cycles = list(speculate(target, any_drafter(target, kind), prompt, n, tree, confidence=confidence, eot=eot))
    assert tokens(cycles) == plain
    assert all(len(cycle.draft.tokens) <= tree.total and cycle.draft.is_chain for cycle in cycles)
    assert len(prompt) + len(plain) <= target.config.block_size
    if kind == "wrong":
        assert all(cycle.path == [] for cycle in cycles)
    if kind == "right" and eot is None:
        assert all(len(cycle.path) == len(cycle.draft.tokens) for cycle in cycles)


@settings(max_examples=9 * settings.default.max_examples)
@given(targets, prompts, st.sampled_from(KINDS), trees, st.integers(0, 30), st.sampled_from([0.0, 0.3]), st.none() | st.integers(0, 16))
def test_greedy_output_equals_plain_with_any_tree(target, prompt, kind, tree, n, confidence, eot):
    plain = list(generate(target, prompt, n, eot=eot))
    cycles = list(speculate(target, any_drafter(target, kind), prompt, n, tree, confidence=confidence, eot=eot))
    assert tokens(cycles) == plain
    for draft in (cycle.draft for cycle in cycles):
        assert len(draft.tokens) <= tree.total
        assert all(-1 <= parent < i for i, parent in enumerate(draft.parents))
        assert len({*zip(draft.parents, draft.tokens)}) == len(draft.tokens)  # no sibling twice
    if kind == "right" and eot is None and tree.total:
        assert all(cycle.path for cycle in cycles[1:] if cycle.draft.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_eot_anywhere_in_a_draft(kind):
    """Each emitted token in turn is declared the end; nothing follows its first occurrence."""
    target = tiny_target(3)
    text = list(generate(target, [1, 2], 20))
    for eot in set(text):
        out = tokens(speculate(target, any_drafter(target, kind), [1, 2], 20, tree=chain(5), eot=eot))
        assert out == text[: text.index(eot) + 1]


@pytest.mark.parametrize("n", [0, 1, 2, 4, 5, 6])
def test_max_new_tokens_is_exact(n):
    target = tiny_target(1)
    for kind in KINDS:
        assert tokens(speculate(target, any_drafter(target, kind), [1], n, tree=chain(5))) == list(generate(target, [1], n))


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
    target = tiny_target(0, tie_embeddings=False, vocab_size=32)
    target.lm_head.weight.data = torch.eye(16, dtype=torch.float64).repeat(2, 1)  # every row twice; a sum of one term, no CPU rounds it
    out = tokens(speculate(target, any_drafter(target, kind), [1, 2], 20))
    assert out == list(generate(target, [1, 2], 20)) == list(generate_naive(target, [1, 2], 20)) and max(out) < 16


def test_near_ties_are_told_from_bugs():
    target = tiny_target(0, tie_embeddings=False)
    [first] = generate(target, [1, 2], 1)
    other = (first + 1) % 17
    assert not near_tie(target, [1, 2], [first], [other]) and not near_tie(target, [1, 2], [first], [first])
    target.lm_head.weight.data[other] = target.lm_head.weight.data[first]
    assert near_tie(target, [1, 2], [first], [other])


@pytest.mark.parametrize("bad", [
    dict(ids=[]), dict(ids=[17]), dict(ids=[-1]), dict(ids=[0] * 25), dict(max_new_tokens=-1), dict(confidence=2),
    dict(tree=Tree(5, 5, 3)), dict(tree=Tree(1, 1, 25)),
])  # fmt: skip
def test_bad_input_is_one_line(bad):
    target = tiny_target()
    with pytest.raises(UserError) as error:
        list(speculate(target, tiny_moa(target), **{**dict(ids=[1], max_new_tokens=3), **bad}))
    assert "\n" not in str(error.value)


def test_tree_shapes_are_read_and_checked():
    assert Tree.parse("4x6:16") == Tree(4, 6, 16) and str(Tree(4, 6, 16)) == "4x6:16" and chain(3) == Tree(1, 3, 3)
    for bad in ("", "4", "4x6", "x:", "axb:c", "4x6:16:1"):
        with pytest.raises(UserError):
            Tree.parse(bad)
    for bad in ((0, 1, 1), (1, -1, 1), (1, 1, -1)):
        with pytest.raises(UserError):
            Tree(*bad)


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
        self.cache, self.states = cache, states
        return self.drafter.memory(cache, states)


@given(targets, prompts, st.sampled_from(KINDS), chains | trees)
def test_target_cache_holds_the_committed_tokens_but_the_last(target, prompt, kind, tree):
    """After any cycle: exact length, values of a fresh prefill, as are the states handed on; NaN in the rows beyond changes
    nothing."""
    spy, ids = Spy(any_drafter(target, kind)), list(prompt)
    for cycle in speculate(target, spy, prompt, 14, tree):
        ids += cycle.emitted
        fresh = target.new_cache()
        states = target.states(torch.tensor([ids[:-1]]), fresh)
        assert torch.allclose(spy.states, states[:, -spy.states.size(1) :], atol=1e-9)
        n = spy.cache.length
        assert n == fresh.length == len(ids) - 1
        assert torch.allclose(spy.cache.kv[..., :n, :], fresh.kv[..., :n, :], atol=1e-9)
        poison(spy.cache)
    assert ids[len(prompt) :] == list(generate(target, prompt, 14))


@given(targets, prompts, st.sampled_from(list(TRAINED)), chains | trees)
def test_drafter_state_after_any_cycles_is_that_of_a_fresh_one(target, prompt, kind, tree):
    """No hole when all is accepted, nothing of rejected tokens: NaN in the drafter's spare rows, and after every cycle the
    next proposal is a fresh drafter's that read the verified tokens at once."""
    drafter, fresh, ids = any_drafter(target, kind), any_drafter(target, kind), list(prompt)
    for cycle in speculate(target, drafter, prompt, 14, tree):
        ids += cycle.emitted
        for part in vars(drafter).values():
            if isinstance(part, KVCache):
                part.truncate(min(part.length, len(ids) - 1))
                poison(part)
        with torch.inference_mode():
            cache = target.new_cache()
            states = target.states(torch.tensor([ids[:-1]]), cache)
            fresh.reset()
            fresh.observe(fresh.memory(cache, states))
            assert torch.allclose(drafter.propose(ids), fresh.propose(ids), atol=1e-9)


@given(targets, prompts, st.sampled_from(list(TRAINED)), st.lists(st.tuples(st.integers(0, 16), st.integers(-1, 6)), min_size=1, max_size=7))
def test_a_tree_is_drafted_as_its_paths_are(target, ids, kind, nodes):
    """The logits at every node, drafted node by node in one tree, are those of its path drafted as a chain: no other branch,
    and no position of one, has a part in them."""
    drafter, tokens, parents = any_drafter(target, kind), [x for x, _ in nodes], [min(parent, i - 1) for i, (_, parent) in enumerate(nodes)]
    cache = target.new_cache()
    states = target.states(torch.tensor([ids]), cache)
    text = [*ids, 3]

    def draft(tokens, parents):
        drafter.reset()
        drafter.observe(drafter.memory(cache, states))
        return torch.cat([drafter.propose(text, tokens[:n], parents[:n]) for n in range(len(tokens) + 1)])

    whole = draft(tokens, parents)
    for i in range(len(tokens)):
        path = ancestors(parents, len(tokens))[i].nonzero()[:, 0].tolist()
        alone = draft([tokens[j] for j in path], list(range(-1, len(path) - 1)))
        assert torch.allclose(whole[i + 1], alone[-1], atol=1e-9)
    drafter.reset()
    drafter.observe(drafter.memory(cache, states))
    drafter.propose(text)
    first = sum(parent == -1 for parent in parents)  # all nodes of the first level at once, as the loop asks
    if parents[:first] == [-1] * first:
        assert torch.allclose(drafter.propose(text, tokens[:first], parents[:first], first), whole[1 : first + 1], atol=1e-9)


@given(targets, prompts, st.lists(st.tuples(st.integers(0, 16), st.integers(-1, 6)), min_size=2, max_size=7), st.data())
def test_a_path_of_a_tree_is_read_as_a_text_is(target, prompt, nodes, data):
    """Through any child: the target's logits at a node and the gathered cache are those of a chain; siblings do not matter."""
    tokens, parents = [x for x, _ in nodes], [min(parent, i - 1) for i, (_, parent) in enumerate(nodes)]
    mask, cache, fresh = ancestors(parents, len(tokens)), target.new_cache(), target.new_cache()
    path = mask[data.draw(st.integers(0, len(tokens) - 1))].nonzero()[:, 0].tolist()
    target(torch.tensor([prompt]), cache)
    logits = target(torch.tensor([tokens]), cache, len(prompt) - 1 + mask.sum(1), mask)
    cache.gather(len(prompt), [len(prompt) + i for i in path])
    want = target(torch.tensor([prompt + [tokens[i] for i in path]]), fresh)
    n = fresh.length
    assert torch.allclose(logits[0, path], want[0, len(prompt) :], atol=1e-9) and cache.length == n
    assert torch.allclose(cache.kv[..., :n, :], fresh.kv[..., :n, :], atol=1e-9)


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

        def propose(self, ids, tokens=(), parents=(), n=1):
            return self.target(torch.tensor([[*ids, *tokens][self.cache.length :]]), self.cache)[0, -1:]

    for seed in range(10):
        target = tiny_target(seed)
        cycles = list(speculate(target, SelfDrafter(target), [1, 2, 3], 21, tree=chain(4)))
        assert all(len(cycle.path) == len(cycle.draft.tokens) for cycle in cycles)
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


def emission_error(sampling, kind="moa0", seed=0, n=4, tree=chain(2), confidence=0.0, vocab_size=3):
    target = tiny_target(seed, vocab_size=vocab_size, tie_embeddings=False)
    target.lm_head.weight.data /= 20
    drafter = any_drafter(target, kind, seed)
    run = lambda rng: tuple(tokens(speculate(target, drafter, [1, 2], n, tree, sampling, confidence, rng)))
    return distance(distribution(run), plain_distribution(target, [1, 2], n, sampling))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SETTINGS)
def test_sampled_output_has_the_targets_distribution(sampling, kind):
    """The shipped loop, every branch of its randomness walked: exact to rounding, not a statistic."""
    long = sampling.top_k or kind in ("noise", "moa1", "eagle", "yours")  # a draft of two, which the others' shorter text cuts
    assert emission_error(sampling, kind, n=4 if long else 3) <= 1e-12
    assert emission_error(sampling, kind, n=3, tree=Tree(2, 1, 2)) <= 1e-12


def scripts(vocab_size, seed, support):
    """-> a target's and a drafter's logits as functions of the text. The drafter's have `support` possible tokens behind the
    first level: fewer branches to walk."""

    @cache
    def logits(salt, *ids):
        rng = torch.Generator().manual_seed(hash((salt, seed, *ids)) % 2**31)
        return torch.randn(vocab_size, generator=rng)

    def q(ids):
        out = logits(1, *ids)
        return out if len(ids) == 1 else out.index_fill(0, out.argsort()[: vocab_size - support], -torch.inf)

    return lambda ids: logits(0, *ids), q


def forest(tree, vocab_size=3, support=2, seed=0, sampling=Sampling(1.0), confidence=0.0):
    """-> one draft and its verification behind the text [0], as a function of rng that returns the tokens emitted; and the
    target's distribution behind a path."""
    p_logits, q_logits = scripts(vocab_size, seed, support)
    p_of = cache(lambda *path: sampling(p_logits([0, *path])))

    def run(rng):
        draft = speculative.grow(Scripted(q_logits), [0], tree, sampling, confidence, rng, speculative.Stopwatch())
        nodes = paths([0], draft.tokens, draft.parents, len(draft.tokens)) if draft.tokens else []
        path, token = speculative.verify(draft, torch.stack([p_of(*text[1:]) for text in [[0], *nodes]]), rng)
        return *(draft.tokens[i] for i in path), token

    return run, p_of


def forest_error(tree, **settings):
    """Every branch walked; what is emitted is made up to depth + 1 tokens by plain decoding. -> the largest error of such a
    text's probability."""
    run, p_of = forest(tree, **settings)

    def complete(texts):
        for n in range(tree.depth + 1):
            for text in [text for text in texts if len(text) == n]:
                mass = texts.pop(text)
                for x, p in enumerate(p_of(*text).tolist()):
                    texts[*text, x] = texts.get((*text, x), 0.0) + mass * p
        return texts

    return distance(complete(distribution(run)), complete({(): 1.0}))


# whole, pruned so that siblings compete with other branches, depth up to 3, vocabularies of 3 to 5
FORESTS = [
    *(dict(tree=Tree(2, 3, total), seed=total) for total in (2, 3, 4, 5, 7, 10)), dict(tree=Tree(2, 2, 3), support=3), dict(tree=Tree(3, 2, 4)), dict(tree=Tree(1, 3, 3), support=3),
    dict(tree=Tree(2, 2, 4), vocab_size=4, seed=3), dict(tree=Tree(2, 2, 3), vocab_size=5), dict(tree=Tree(3, 1, 2), vocab_size=5),
    dict(tree=Tree(3, 1, 3), vocab_size=5), dict(tree=Tree(2, 3, 4), sampling=Sampling(0.7, top_p=0.8)),
    dict(tree=Tree(2, 3, 4), vocab_size=5, sampling=Sampling(1.3, top_k=2)), dict(tree=Tree(2, 3, 5), confidence=0.3),
]  # fmt: skip


@pytest.mark.parametrize("settings", FORESTS, ids=str)
def test_sampled_trees_have_the_targets_distribution(settings):
    assert forest_error(**settings) <= 1e-12


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
    run = lambda rng: tuple(tokens(speculate(target, drafter, [1, 2], 4, chain(2), sampling, rng=rng, eot=2)))
    assert distance(distribution(run), want) <= 1e-12


P, Q = torch.tensor([0.2, 0.4, 0.4]), torch.tensor([0.8, 0.1, 0.1])


def draft_of(tokens, q):
    return Draft(tokens, list(range(-1, len(tokens) - 1)), q)


def rule_error(p, q):
    """Largest error of the first token emitted, the draft token drawn from q."""

    def run(rng):
        x = rng.draw(q)
        path, token = verify(draft_of([x], [q]), torch.stack([p, p]), rng)
        return x if path else token

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


def siblings(q, n):
    """n children of one node, drawn from q without replacement, by the function that ships."""

    def draw(rng):
        [children] = speculative.draw_children(q.log()[None], n, Sampling(1.0), rng)
        return Draft([x for x, *_ in children], [-1] * len(children), [q for *_, q in children])

    return draw


def sibling_error(p, draw, verify=verify):
    """Largest error of the first token emitted, and the chance that a child of the drawn draft stands."""

    def run(rng):
        draft = draw(rng)
        path, token = verify(draft, torch.stack([p] * (1 + len(draft.tokens))), rng)
        return draft.tokens[path[0]] if path else token, bool(path)

    total, out = distribution(run), {}
    for (token, _), mass in total.items():
        out[token] = out.get(token, 0.0) + mass
    return distance(out, dict(enumerate(p.tolist()))), sum(mass for (_, stands), mass in total.items() if stands)


@pytest.mark.parametrize("p, q", [([0.1, 0.9], [0.9, 0.1]), ([0.2, 0.4, 0.4], [0.8, 0.1, 0.1]), ([0.1, 0.0, 0.3, 0.6], [0.25, 0.5, 0.25, 0.0])])
def test_siblings_are_exact_and_never_hurt(p, q):
    """1, 2, ... children: exact, and each one more raises the chance that one stands, or leaves it."""
    p, q = torch.tensor(p), torch.tensor(q)
    errors, stands = zip(*(sibling_error(p, siblings(q, n)) for n in range(1, len(p) + 1)))
    assert max(errors) <= 1e-12
    assert all(b >= a - 1e-12 for a, b in zip(stands, stands[1:])) and stands[-1] == pytest.approx(sum(p[q > 0]).item())
    likeliest = q.topk(2).indices.tolist()  # a deterministic choice: one-hot is right, as if drawn from q is wrong
    assert sibling_error(p, lambda rng: Draft(likeliest, [-1, -1], [torch.eye(len(p))[x] for x in likeliest]))[0] <= 1e-12
    assert sibling_error(p, lambda rng: Draft(likeliest, [-1, -1], [q, q]))[0] > 1e-3


def test_siblings_drawn_without_replacement_need_their_q_renormalised():
    p, q = torch.tensor([0.1, 0.0, 0.3, 0.6]), torch.tensor([0.25, 0.5, 0.25, 0.0])

    def not_renormalised(rng):
        draft = siblings(q, 2)(rng)
        return Draft(draft.tokens, draft.parents, [q] * len(draft.tokens))

    assert sibling_error(p, siblings(q, 2))[0] <= 1e-12 and sibling_error(p, not_renormalised)[0] > 1e-3


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0)])
def test_more_branches_never_lower_the_expected_acceptance(sampling):
    """Expected length of the path that stands, by enumeration, over growing totals of the same breadth and depth."""

    def expected(tree, seed):
        return sum((len(text) - 1) * mass for text, mass in distribution(forest(tree, sampling=sampling, seed=seed)[0]).items())

    for breadth, depth, seed in ((2, 2, 0), (2, 2, 1), (3, 1, 2), (2, 3, 3)):
        stands = [expected(Tree(breadth, depth, total), seed) for total in range(breadth * depth + 1)]
        assert stands[0] == 0 and all(b >= a - 1e-12 for a, b in zip(stands, stands[1:]))
        assert sampling.temperature == 0 or stands[-1] > expected(chain(depth), seed) + 1e-3


def accept_everything(draft, p, rng):
    return list(range(len(draft.tokens))), rng.draw(p[len(draft.tokens)])


def verify_with(residual_of=residual, row=0, q_of=lambda q: q):
    """The rule for chains with one part replaced."""

    def rule(draft, p, rng):
        for i, (x, q) in enumerate(zip(draft.tokens, draft.q)):
            if not rng.coin(min(1.0, (p[i, x] / q_of(q)[x]).item())):
                return list(range(i)), rng.draw(residual_of(p[min(i + row, len(p) - 1)], q))
        return accept_everything(draft, p, rng)

    return rule


BROKEN = {
    "accepts everything": accept_everything,
    "residual unnormalised": verify_with(lambda p, q: (p - q).clamp(min=0)),
    "residual softmaxed": verify_with(lambda p, q: (p - q).clamp(min=0).softmax(-1)),
    "replacement drawn from p": verify_with(lambda p, q: p),
    "replacement from the next row": verify_with(row=1),
    "argmax draft divided by a soft q": verify_with(q_of=lambda q: (q + 0.5) / (1 + 0.5 * len(q))),
}


@pytest.mark.parametrize("name", BROKEN)
def test_negative_controls_fail(name, monkeypatch):
    """Each broken rule is caught by the very tests above."""
    monkeypatch.setattr(speculative, "verify", BROKEN[name])
    assert emission_error(Sampling(1.0), "noise") > 1e-3


def test_pruning_a_sampled_tree_by_value_is_caught(monkeypatch):
    """Children that stay for what they are, as in a greedy tree, bias the output: the rule in grow's docstring matters."""
    draw = speculative.draw_children
    monkeypatch.setattr(speculative, "draw_children", lambda *args: ([(x, log_q, log_q, q) for x, log_q, _, q in c] for c in draw(*args)))
    assert max(forest_error(**settings) for settings in FORESTS[:4]) > 1e-3


def test_a_tree_read_without_its_mask_is_caught(monkeypatch):
    monkeypatch.setattr(speculative, "ancestors", lambda parents, n: torch.ones(n, n, dtype=torch.bool).tril())
    target = tiny_target(3, block_size=48)
    run = lambda i: tokens(speculate(target, scripted(target, "noise"), [i], 20, Tree(3, 4, 12)))
    assert any(run(i) != list(generate(target, [i], 20)) for i in range(9))


def test_one_sided_settings_are_caught(monkeypatch):
    """temperature, top-k and top-p on q alone: a Sampling that leaves p, which comes as rows, as it is."""
    warp = Sampling.__call__
    monkeypatch.setattr(Sampling, "__call__", lambda self, logits: warp(self if logits.dim() == 1 else Sampling(1.0), logits))
    sampling = Sampling(0.7, top_k=2, top_p=0.5)
    target = tiny_target(0, vocab_size=3, tie_embeddings=False)
    target.lm_head.weight.data /= 20
    run = lambda rng: tuple(tokens(speculate(target, scripted(target, "noise"), [1, 2], 3, chain(2), sampling, rng=rng)))
    mixed = distribution(run)
    monkeypatch.undo()
    assert distance(mixed, plain_distribution(target, [1, 2], 3, sampling)) > 1e-3


def test_known_wrong_answers_are_wrong():
    """Two published bugs, by the numbers they give: a soft q for an argmax draft, one uniform for coin and replacement."""
    soft = distribution(lambda rng: (lambda path, t: 0 if path else t)(*verify(draft_of([0], [Q]), torch.stack([P, P]), rng)))
    assert soft[0] == pytest.approx(0.25) and soft[1] == pytest.approx(0.375)  # the drafter's argmax, as if drawn from Q
    assert rule_error(P, one_hot(0)) <= 1e-12  # one-hot q: right
    counts = torch.zeros(3)
    rng = Random(0)
    for _ in range(20000):
        x = rng.draw(Q)
        path, token = verify(draft_of([x], [Q]), torch.stack([P, P]), rng)
        counts[x if path else token] += 1
    # one uniform used twice would give (.2, .3, .5). Five standard deviations: false alarm below 1e-5 at a fresh seed.
    assert (counts / 20000 - P).abs().max() < 5 * (0.24 / 20000) ** 0.5


def test_replacement_comes_from_the_row_of_the_rejection():
    p = torch.eye(5)[[0, 1, 2, 3, 4]]  # the right token of row j is j
    for j in range(4):
        draft = [i if i < j else 4 for i in range(4)]
        q = [torch.eye(5)[x] for x in draft]
        assert verify(draft_of(draft, q), p, Random()) == (list(range(j)), j)
    assert verify(draft_of([0, 1, 2, 3], list(torch.eye(5)[:4])), p, Random()) == ([0, 1, 2, 3], 4)


def test_impossible_tokens():
    """u = 0 does not accept a token with p = 0; a token that q cannot have drawn is an error."""

    class Zero(Random):
        def uniform(self):
            return 0.0

    assert verify(draft_of([0], [one_hot(0)]), torch.stack([one_hot(1)] * 2), Zero()) == ([], 1)
    assert not any(Random(seed).coin(0.0) for seed in range(100)) and all(Random(seed).coin(1.0) for seed in range(100))
    with pytest.raises(ValueError, match="q = 0"):
        verify(draft_of([1], [one_hot(0)]), torch.stack([P, P]), Random())


def test_trace_and_table_of_a_known_run():
    """Cycles made by hand: a chain of three with one rejection, one that stands whole, and a tree with two levels."""
    enc = load_tokenizer()
    ids = [enc.encode_single_token(bytes([b])) for b in "abcdeé".encode()]
    step = lambda ms: dict(draft=ms, verify=2 * ms, observe=0.0, other=0.0)
    empty, a_chain = Draft(), draft_of([ids[1], ids[0], ids[2]], [])
    cycles = [Cycle(empty, [], ids[:1], step(9.0)), Cycle(a_chain, [0], ids[1:3], step(0.001)),
              Cycle(draft_of([ids[3]], []), [0], ids[3:5], step(0.003)), Cycle(empty, [], ids[5:6]), Cycle(empty, [], ids[6:7])]  # fmt: skip
    assert "".join(trace(enc, [], cycles, False)) == "{+a+}b[-a-]{+c+}d{+e+}{++}{+é+}"
    run = dict(prompt=[1], plain=ids[:5], text=ids[:5], cycles=cycles[:3], plain_s=2.0, s=1.0)
    result = summarise([run], None, Sampling())
    assert result["tau"] == 2 and result["speedup"] == 2 and result["target_passes"] == 3 and result["identical"]
    assert result["acceptance_by_position"] == [1.0, 0.0] and result["draft_ms"] == pytest.approx(2.0)
    assert result["verify_ms"] == pytest.approx(4.0) and "identical: yes" in "\n".join(table(result))
    assert result["free_drafter_share"] == pytest.approx(2 * 0.004 / (2 * 0.4))  # speedup / (tau T(1) / T(k + 1))
    tree = Cycle(Draft([ids[0], ids[1], ids[2], ids[3], ids[4]], [-1, -1, 1, 1, 0], []), [1, 3], [ids[1], ids[3], ids[0]])
    assert list(draw_tree(enc, tree, False)) == ["  ├─[-'a'-]", "  │ └─[-'e'-]", "  └─'b'", "    ├─[-'c'-]", "    └─'d'", "      └─{+'a'+}"]
    assert acceptance([tree]) == [1.0, 1.0] and acceptance([tree, Cycle(tree.draft, [1], [ids[1], ids[0]])]) == [1.0, 0.5]
    assert "".join(trace(enc, [], [Cycle(tree.draft, [1], [ids[1], ids[0]])], False)) == "b[-c-][-d-]{+a+}"


def test_best_length_of_a_drafter_that_is_always_wrong_or_right():
    """Wrong: nothing to expect of a second token. Right: the chain costs far less than the passes it saves."""
    target = tiny_target(3, n_layer=12, block_size=64)
    args = SimpleNamespace(seed=0)
    assert best_length(target, scripted(target, "wrong"), [[1, 2]], args, Sampling())[0] == 1
    free = Scripted(lambda ids: torch.eye(17)[answers[tuple(ids)]])
    text = [1, 2] + list(generate(target, [1, 2], 62))
    answers = {tuple(text[:n]): text[n] for n in range(1, 64)} | {tuple(text): 0}
    assert best_length(target, free, [[1, 2]], args, Sampling())[0] >= 2
    with pytest.raises(UserError):
        best_length(target, free, [[1] * 64], args, Sampling())


def test_sampled_long_run_frequencies():
    """The production generator, end to end: 1,500 second tokens of the loop against the exact distribution.

    Five standard deviations on each of 3 ids: the odds of a false alarm at a fresh seed are below 2e-6.
    """
    target = tiny_target(0, vocab_size=3, tie_embeddings=False)
    target.lm_head.weight.data /= 20
    drafter, sampling, n = scripted(target, "noise"), Sampling(0.9), 1500
    rng, counts = Random(1), torch.zeros(3)
    for _ in range(n):
        counts[tokens(speculate(target, drafter, [1, 2], 3, chain(2), sampling, rng=rng))[1]] += 1
    exact = torch.zeros(3)
    for (_, second), mass in plain_distribution(target, [1, 2], 2, sampling).items():
        exact[second] += mass
    assert ((counts / n - exact).abs() < 5 * (exact * (1 - exact) / n).sqrt() + 1e-9).all()
