"""Tiny models, adversarial drafters and an enumerating source of randomness. Equality is tested in float64, where a batch
of k + 1 rows and a single row round too finely to flip a choice."""
import importlib.util
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from moa import EagleDrafter, IndependentDrafter, MoADrafter, paths  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from speculative import Tree, chain  # noqa: E402

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
settings.register_profile("default", max_examples=40, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=1200, deadline=None)
settings.load_profile("default")


def tiny_target(seed=0, **config):
    """A random target with confident, varied logits: far from the near-uniform ones of a fresh initialisation."""
    torch.manual_seed(seed)
    target = GPT(GPTConfig(**{**dict(vocab_size=17, n_layer=3, n_head=4, n_kv_head=2, n_embd=16, n_ffn=24, block_size=24), **config}))
    for p in target.parameters():
        if p.dim() == 2:
            p.data *= 25
    return target.requires_grad_(False).eval()


def sharpened(drafter):
    for p in drafter.parameters():
        if p.dim() == 2:
            p.data *= 2
    return drafter.requires_grad_(False).eval()


def tiny_moa(target, n_target_layers=0, seed=0, **settings):
    torch.manual_seed(seed)
    drafter = MoADrafter(target, n_target_layers, **{**dict(n_ffn=24, lsa_ffn=12), **settings})
    if n_target_layers:
        drafter.mean.normal_(), drafter.std.uniform_(0.5, 2)
    return sharpened(drafter)


def tiny_eagle(target, seed=0):
    torch.manual_seed(seed)
    return sharpened(EagleDrafter(target, n_ffn=24))


def tiny_independent(target, seed=0):
    torch.manual_seed(seed)
    return sharpened(IndependentDrafter(target, n_ffn=24))


class Scripted:
    """A drafter that is a function of the tokens: `logits_of(ids) -> (V,)`. It sees nothing of the target."""

    def __init__(self, logits_of):
        self.propose = lambda *tree: torch.stack([logits_of(ids) for ids in paths(*tree)])

    def reset(self):
        pass

    def memory(self, cache, states):
        return None

    def observe(self, memory):
        pass


def scripted(target, kind):
    """Drafters to try the loop with: always right, always wrong, noise, and all logits equal."""

    def truth(ids):
        return target(torch.tensor([ids]))[0, -1]

    def noise(ids):
        return torch.randn(target.config.vocab_size, generator=torch.Generator().manual_seed(hash(tuple(ids)) % 2**31))

    return Scripted({
        "right": truth,
        "wrong": lambda ids: -truth(ids),
        "noise": noise,
        "ties": lambda ids: torch.zeros(target.config.vocab_size),
    }[kind])  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--drafter", metavar="FILE.py:CLASS", help="put a drafter of your own through the whole suite")


def pytest_configure(config):
    """Before the test modules are read, so that every test over KINDS has it."""
    if config.getoption("--drafter"):
        path, _, name = config.getoption("--drafter").rpartition(":")
        if not Path(path).is_file():
            raise pytest.UsageError(f"--drafter takes FILE.py:CLASS; there is no file {path!r}")
        spec = importlib.util.spec_from_file_location("yours", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, name):
            raise pytest.UsageError(f"--drafter: {path} has no class {name!r}")
        YOURS["class"] = getattr(module, name)
        KINDS.append("yours")


def any_drafter(target, kind, seed=0):
    if kind == "yours":
        return YOURS["class"](target)
    return TRAINED[kind](target, seed=seed) if kind in TRAINED else scripted(target, kind)


YOURS = {}
TRAINED = {
    "moa0": tiny_moa,
    "moa1": lambda target, seed=0: tiny_moa(target, 1, seed),
    "moa2": lambda target, seed=0: tiny_moa(target, 2, seed),
    "no-lsa": lambda target, seed=0: tiny_moa(target, 0, seed, lsa_ffn=0),
    "eagle": tiny_eagle,
    "independent": tiny_independent,
}
KINDS = ["right", "wrong", "noise", "ties", *TRAINED]
chains = st.builds(chain, st.integers(0, 6))
trees = st.builds(Tree, breadth=st.integers(1, 4), depth=st.integers(0, 6), total=st.integers(0, 14))
targets = st.builds(
    tiny_target, seed=st.integers(0, 200), n_kv_head=st.sampled_from([1, 2, 4]), tie_embeddings=st.booleans()
)
prompts = st.lists(st.integers(0, 16), min_size=1, max_size=8)


class Enumerator:
    """A source of randomness that replays the given choices, then takes the first possible one, and multiplies up the
    exact probability of what it did."""

    def __init__(self, choices=()):
        self.choices, self.taken, self.options, self.probability = list(choices), [], [], 1.0

    def pick(self, weights):
        possible = [i for i, w in enumerate(weights) if w > 0]
        choice = self.choices[len(self.taken)] if len(self.taken) < len(self.choices) else possible[0]
        self.taken.append(choice)
        self.options.append(possible)
        self.probability *= weights[choice]
        return choice

    def coin(self, p):
        return self.pick([1 - p, p]) == 1

    def draw(self, probs):
        return self.pick(probs.tolist())


def distribution(run):
    """{outcome: exact probability} of run(rng), over every branch of its randomness."""
    total, todo = defaultdict(float), [[]]
    while todo:
        prefix = todo.pop()
        rng = Enumerator(prefix)
        total[run(rng)] += rng.probability
        for i in range(len(prefix), len(rng.taken)):
            todo += [rng.taken[:i] + [other] for other in rng.options[i] if other != rng.taken[i]]
    return total


def distance(a, b):
    """Largest difference of two distributions given as dicts."""
    return max(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in {*a, *b})
