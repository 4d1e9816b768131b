"""Speculative decoding: the drafter proposes, the target verifies, the output is exactly the target's. Read after moa.py.

    python speculative.py                      # held-out prompts, plain against speculative: one trace, one table
    python speculative.py --prompt "def fib"   # your own text
    python speculative.py --temperature 0.8    # sampled: the distribution is plain decoding's, the draws are not
    python speculative.py --tree 4x6:16        # draft a tree instead of a chain; --trace draws what became of it
    python speculative.py compare              # MoA against EAGLE-2, an independent drafter and ablations; --full for all

Throughout, p is the target's distribution, q the drafter's, k the draft length. A cycle is one draft and its verification;
tau is the tokens emitted a cycle, the target's own token included.
"""
import itertools
import json
import math
import platform
import re
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from model import Random, Sampling, UserError, arguments, check_prompt, cli, decode_stream, encode_prompts, generate, load_target, positive
from moa import DRAFTERS, agreement, ancestors, load_drafter

@dataclass(frozen=True)
class Tree:
    """The shape of a draft: the `breadth` likeliest nodes of each level get `breadth` children, to `depth` tokens ahead; the
    `total` best of all these nodes are verified. Breadth 1 is a chain."""

    breadth: int
    depth: int
    total: int

    def __post_init__(self):
        if self.breadth < 1 or self.depth < 0 or self.total < 0:
            raise UserError(f"a draft needs breadth >= 1 and length, depth and total >= 0, not {self}")

    def __str__(self):
        return f"{self.breadth}x{self.depth}:{self.total}"

    @staticmethod
    def parse(text):
        """ "BREADTHxDEPTH:TOTAL" -> Tree. Raises UserError."""
        if not (numbers := re.fullmatch(r"(\d+)x(\d+):(\d+)", text)):
            raise UserError(f"a tree is BREADTHxDEPTH:TOTAL, like 4x6:16, not {text!r}")
        return Tree(*map(int, numbers.groups()))

def chain(length):
    return Tree(1, length, length)

@dataclass
class Draft:
    """A tree of guesses: tokens[i] stands behind node parents[i] < i, or behind the text if that is -1, and was drawn from
    q[i] (V,), the drafter's distribution there given the siblings drawn before it. A chain's parents are -1, 0, 1, ..."""

    tokens: list = field(default_factory=list)
    parents: list = field(default_factory=list)
    q: list = field(default_factory=list)

    @property
    def is_chain(self):
        return self.parents == list(range(-1, len(self.parents) - 1))

@dataclass
class Cycle:
    """What one cycle did. path: the nodes of the draft that stand. emitted: their tokens and the target's own, up to a stop."""

    draft: Draft
    path: list
    emitted: list
    seconds: dict = field(default_factory=dict)

@torch.inference_mode()
def speculate(target, drafter, ids, max_new_tokens, tree=chain(5), sampling=Sampling(), confidence=0.0, rng=None, eot=None):
    """Yield a Cycle at a time; the emitted tokens together are distributed exactly as plain decoding's.

    At temperature 0 they are the same tokens. The first Cycle is the prefill, with an empty draft. In "a b c | x y z", with
    c the last committed token and x y z a draft, c has been emitted but not yet read by the target: its cache, and the
    drafter's memory, end at b. The pass reads c x y z; its row for c judges x, its row for z gives one token more.

    A draft ends early once its best path's probability under the drafter is below `confidence`; what brought it there stays,
    since dropping a token for what it is would bias the output. Ends after `eot`, at max_new_tokens or where block_size
    ends. Raises UserError for what cannot be decoded.
    """
    if not 0 <= confidence <= 1:
        raise UserError(f"confidence must lie in [0, 1], not {confidence}")
    if max(tree.breadth * tree.depth, tree.total) > target.config.block_size:
        raise UserError(f"a draft of {tree} is too large; breadth x depth and total may be {target.config.block_size} at most")
    rng, ids, device = rng or Random(), list(ids), target.lm_head.weight.device
    end = len(ids) + check_prompt(target.config, ids, max_new_tokens)
    cache, fed = target.new_cache(spare=tree.total), 0  # `fed`: how many of ids the target's cache holds
    drafter.reset()
    while len(ids) < end and not (fed and ids[-1] == eot):
        clock = Stopwatch()

        # 1. Draft. No deeper than one token fewer than may still come: the target adds its own. At first the target has read
        # nothing, so there is nothing to draft from: that cycle only reads the prompt.
        depth = min(tree.depth, end - len(ids) - 1) if fed else 0
        draft = grow(drafter, ids, replace(tree, depth=depth), sampling, confidence, rng, clock)

        # 2. Verify: one pass of the target over what it has not read yet gives p behind the text and behind every node.
        new = torch.tensor([ids[fed:] + draft.tokens], device=device)
        positions = mask = None  # a chain is read like any text; in a tree a node sees its own path, and stands at its depth
        if not draft.is_chain:
            mask = ancestors([-1, *(parent + 1 for parent in draft.parents)], new.size(1)).to(device)  # node 0: ids[-1]
            positions = fed - 1 + mask.sum(1)
        states = target.states(new, cache, positions, mask)  # (1, T, C)
        logits = target.lm_head(states[0, -len(draft.tokens) - 1 :])  # (1 + nodes, V)
        clock.lap("verify")

        # 3. Accept: the path that the rule lets stand, and one token of the target's own.
        path, token = verify(draft, sampling(logits), rng)
        emitted = [draft.tokens[i] for i in path] + [token]
        if eot in emitted:
            emitted = emitted[: emitted.index(eot) + 1]

        # 4. Roll back: the cache keeps the committed tokens but the last, whose keys and values come with the next pass.
        stands = [len(ids) + i for i in path[: len(emitted) - 1]]  # rows of the cache
        cache.gather(len(ids), stands)
        rows = [*range(len(ids) - fed), *(row - fed for row in stands)]  # the same of this pass alone
        ids += emitted
        clock.lap("other")

        # 5. Observe: the drafter takes in what the target computed for the tokens that stand, and nothing of the rejected.
        drafter.observe(drafter.memory(cache, states[:, rows]))
        fed = len(ids) - 1
        clock.lap("observe")
        yield Cycle(draft, path, emitted, clock.seconds)

def grow(drafter, ids, tree, sampling, confidence, rng, clock):
    """The dynamic tree of EAGLE-2 (arXiv 2406.16858), for any drafter -> Draft.

    A node's score is the log-probability of its path. Greedy: children are the likeliest tokens, and the best scores stay.
    Sampled: children are drawn one by one without replacement. Which of them stay must not depend on what they are, or the
    output is biased; so a child ranks by all the mass that was left when it was drawn, an upper bound of its score that its
    own value does not move. What its value does move, its younger siblings, its descendants and the children of nodes that
    it takes the place of, ranks below it. Who gets children may depend on anything: a node without children is where the
    target draws by itself.
    """
    tokens, parents, q, score, rank = [], [], [], [], []
    read, level = [], [-1]  # nodes that the drafter has read; those whose children come next
    for _ in range(tree.depth):
        row = {-1: -1, **{node: i for i, node in enumerate(read)}}
        logits = drafter.propose(ids, [tokens[i] for i in read], [row[parents[i]] for i in read], len(level))
        clock.lap("draft")
        first = len(tokens)
        for parent, children in zip(level, draw_children(logits, tree.breadth, sampling, rng)):
            above = score[parent] if parent >= 0 else 0.0
            for token, log_q, log_left, q_token in children:
                tokens.append(token), parents.append(parent), q.append(q_token)
                score.append(above + log_q), rank.append(above + log_left)
        level = sorted(range(first, len(tokens)), key=lambda i: -score[i])[: tree.breadth]
        read = read + level
        clock.lap("other")
        if math.exp(score[level[0]]) < confidence:
            break
    best = sorted(range(len(tokens)), key=lambda i: -rank[i])[: tree.total]  # a parent before its children, even in a tie
    row = {-1: -1, **{node: i for i, node in enumerate(sorted(best))}}
    best = [i for i in row if i >= 0]
    draft = Draft([tokens[i] for i in best], [row[parents[i]] for i in best], [q[i] for i in best])
    if sampling.temperature == 0 and best:
        draft.q = torch.zeros(len(best), logits.size(-1)).scatter_(1, torch.tensor(draft.tokens)[:, None], 1.0)
    return draft

def draw_children(logits, breadth, sampling, rng):
    """logits (n, V) -> for each row its children in order: (token, its log-probability, log of the mass not yet drawn, the q
    that it was drawn from)."""
    if sampling.temperature == 0:  # what is sure to be proposed has a one-hot q, which grow fills in for those that stay
        likeliest = logits.log_softmax(-1).topk(min(breadth, logits.size(-1)))
        for log_q, tokens in zip(likeliest.values.tolist(), likeliest.indices.tolist()):
            yield [(token, log_p, log_p, None) for token, log_p in zip(tokens, log_q)]
        return
    for q in sampling(logits):
        children, left = [], 1.0
        while len(children) < breadth and left > 0:
            token = rng.draw(q)
            children.append((token, math.log(left * q[token]), math.log(left), q))
            q = q.index_fill(0, torch.tensor(token), 0.0)
            total = min(q.sum().item(), 1.0)
            q, left = q / total if total else q, left * total
        yield children

def verify(draft, p, rng):
    """The rejection rule of speculative sampling, from the text's end down the tree. -> (nodes that stand, the target's own
    token).

        child x of where we stand is accepted with probability min(1, p(x) / q(x));
        if it is not, p becomes  (p - q)^+ / sum (p - q)^+,  and the next child has its turn;
        behind the last one that stands, a token is drawn from what p has become.

    Exact: a token y is emitted as the first child with probability q(y) min(1, p(y)/q(y)) = min(p(y), q(y)). The rejected
    mass is 1 - sum min(p, q) = sum (p - q)^+, and what follows has to spread exactly it over (p - q)^+, for then y comes
    out with min(p(y), q(y)) + (p(y) - q(y))^+ = p(y). To emit from the new p is the same task again, with one child fewer
    and the q that this child was drawn from given its elder siblings; with no child left, a draw does it. So more children
    never lower the chance that one stands. A child that was certain to be proposed has a one-hot q: it is accepted with
    probability p(x), and a rejection takes its mass away. At temperature 0, p is one-hot too and all this is a comparison.

    p (1 + nodes, V): behind the text, behind each node. Raises ValueError for a token that q cannot have drawn.
    """
    path, here, rest = [], -1, p[0]
    for i, (x, parent, q) in enumerate(zip(draft.tokens, draft.parents, draft.q)):
        if parent != here:
            continue  # a sibling of one that stands, or below one that does not
        if q[x] <= 0:
            raise ValueError(f"draft token {x} has q = 0: it was not drawn from q")
        if rng.coin(min(1.0, (rest[x] / q[x]).item())):
            here, rest = i, p[i + 1]
            path.append(i)
        else:
            rest = residual(rest, q)
    return path, rng.draw(rest)

def residual(p, q):
    """(p - q)^+ normalised; p itself where rounding leaves nothing of it (the rejection was rounding then)."""
    rest = (p - q).clamp(min=0)
    total = rest.sum()
    return rest / total if total > 0 else p

class Stopwatch:
    """Seconds by step of the loop. On a GPU a step's time is its launch; the wait shows in the step that reads the result."""

    def __init__(self):
        self.seconds, self.last = dict.fromkeys(("draft", "verify", "observe", "other"), 0.0), time.perf_counter()

    def lap(self, step):
        now = time.perf_counter()
        self.seconds[step] += now - self.last
        self.last = now

# ---- What a run looked like ------------------------------------------------------------------------------------------

def trace(enc, prompt, cycles, colour):
    """Yield the text of a run with its decisions: accepted drafts, rejected tokens struck out, the target's own token."""
    accepted, rejected, own = marks(colour)
    yield enc.decode(prompt)
    pieces = decode_stream(enc, [token for cycle in cycles for token in cycle.emitted])
    for cycle in cycles:
        for i, piece in enumerate(itertools.islice(pieces, len(cycle.emitted))):
            if i < len(cycle.path):
                yield accepted.format(piece)
            else:
                refused = zip(cycle.draft.tokens, cycle.draft.parents)
                yield from (rejected.format(enc.decode([x])) for x, parent in refused if parent == ([-1] + cycle.path)[-1])
                yield own.format(piece)

def marks(colour):
    return ("\033[32m{}\033[0m", "\033[31;9m{}\033[0m", "\033[1;34m{}\033[0m") if colour else ("{}", "[-{}-]", "{{+{}+}}")

def draw_tree(enc, cycle, colour):
    """Yield the lines of a cycle's draft: the accepted path inside its tree, and the target's own token at its end."""
    accepted, rejected, own = marks(colour)

    def lines(node, indent):
        children = [i for i, parent in enumerate(cycle.draft.parents) if parent == node]
        ends = node == ([-1] + cycle.path)[-1] and len(cycle.emitted) > len(cycle.path)
        for i in children + [None] * ends:
            last = i == (None if ends else children[-1])
            mark = own if i is None else accepted if i in cycle.path else rejected
            token = cycle.emitted[-1] if i is None else cycle.draft.tokens[i]
            yield indent + ("└─" if last else "├─") + mark.format(repr(enc.decode([token])))
            if i is not None:
                yield from lines(i, indent + ("  " if last else "│ "))

    yield from lines(-1, "  ")

def near_tie(target, prompt, a, b, gap=1e-4):
    """Whether two greedy continuations part where float32 rounding may decide: their logits there are less than gap apart."""
    i = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
    if i is None:
        return False
    logits = target(torch.tensor([prompt + a[:i]], device=target.lm_head.weight.device))[0, -1]
    return abs(logits[a[i]] - logits[b[i]]).item() < gap

# ---- Measuring -------------------------------------------------------------------------------------------------------

def measure(target, methods, prompts, enc, args, sampling):
    """Decode each prompt plainly and then with each of the methods {name: (drafter, tree)}, in turn; yield {name: run}."""
    common = dict(confidence=args.confidence, sampling=sampling, eot=enc.eot_token)
    list(generate(target, prompts[0], 8))  # warm up
    for drafter, tree in methods.values():
        list(speculate(target, drafter, prompts[0], 16, tree))
    for n, prompt in enumerate(prompts):
        start = time.perf_counter()
        plain = list(generate(target, prompt, args.max_new_tokens, sampling, Random(args.seed + n), enc.eot_token))
        plain_s, runs = time.perf_counter() - start, {}
        for name, (drafter, tree) in methods.items():
            start = time.perf_counter()
            cycles = list(speculate(target, drafter, prompt, args.max_new_tokens, tree, rng=Random(args.seed + n), **common))
            s, text = time.perf_counter() - start, [token for cycle in cycles for token in cycle.emitted]
            runs[name] = dict(prompt=prompt, plain=plain, text=text, cycles=cycles, plain_s=plain_s, s=s)
        yield runs

def median(values):
    return statistics.median(values) if (values := list(values)) else 0.0

def acceptance(cycles):
    """-> for each position of a draft, how often a token stood where the ones before it stood and there was one to try."""
    tried, stood = {}, {}
    for cycle in cycles:
        for i, node in enumerate([-1, *cycle.path]):
            if node in cycle.draft.parents:
                tried[i] = tried.get(i, 0) + 1
                stood[i] = stood.get(i, 0) + (i < len(cycle.path))
    return [stood[i] / tried[i] for i in sorted(tried)]

def summarise(runs, target, sampling):
    """-> the numbers of the table: medians over prompts, and sums over all cycles for tau and the acceptance rates."""
    cycles = [cycle for run in runs for cycle in run["cycles"][1:]]  # the first is the prefill
    ms = {f"{step}_ms": 1e3 * median(c.seconds[step] for c in cycles) for step in ("draft", "verify", "observe", "other")}
    different = [run for run in runs if run["plain"] != run["text"]] if sampling.temperature == 0 else []
    ratios = [len(run["text"]) / run["s"] / (len(run["plain"]) / run["plain_s"]) for run in runs if run["plain"]]
    tau = sum(len(c.emitted) for c in cycles) / max(1, len(cycles))
    plain = median(len(run["plain"]) / run["plain_s"] for run in runs)
    return {
        "plain_tokens_per_s": plain,
        "tokens_per_s": median(len(run["text"]) / run["s"] for run in runs),
        "speedup": median(ratios),
        "speedup_range": [min(ratios, default=0.0), max(ratios, default=0.0)],
        "free_drafter_share": median(ratios) * ms["verify_ms"] * plain / 1e3 / tau if tau else 0.0,
        "tau": tau,
        "acceptance_by_position": acceptance(cycles),
        **ms,
        "plain_target_passes": median(len(run["plain"]) for run in runs),
        "target_passes": median(len(run["cycles"]) for run in runs),
        "identical": None if sampling.temperature else not different,
        "near_tie_flips": sum(near_tie(target, run["prompt"], run["plain"], run["text"]) for run in different),
        "different": len(different),
    }

def table(r):
    """-> the lines of a summary's table."""
    yield f"{'median over prompts':26}{'plain':>12}{'speculative':>14}"
    yield f"{'tokens/s':26}{r['plain_tokens_per_s']:12.1f}{r['tokens_per_s']:14.1f}   ratio {r['speedup']:.2f}"
    yield f"{'target passes':26}{r['plain_target_passes']:12.0f}{r['target_passes']:14.0f}"
    yield f"{'tokens a cycle (tau)':26}{'1':>12}{r['tau']:14.2f}"
    yield "acceptance by position    " + " ".join(f"{a:.2f}" for a in r["acceptance_by_position"])
    yield "milliseconds a cycle      " + ", ".join(f"{s} {r[f'{s}_ms']:.2f}" for s in ("draft", "verify", "observe", "other"))
    yield verdict([r])

def verdict(results):
    different, flips = sum(r["different"] for r in results), sum(r["near_tie_flips"] for r in results)
    if results[0]["identical"] is None:
        return "identical: not expected when sampled (the distribution is the same)"
    if different == 0:
        return "identical: yes"
    if different == flips:
        return f"identical: yes, but for {different} text(s) that part at a float32 near-tie (logits < 1e-4 apart)"
    return f"identical: NO, {different - flips} text(s) differ, and not at a near-tie: this is a bug"

@torch.inference_mode()
def best_length(target, drafter, prompts, args, sampling, longest=10):
    """The chain length with the most expected tokens a second, from this machine's own T(1), T(k + 1) and drafting cost and
    the acceptance on the first prompts. -> length, and the reasoning in a line."""
    runs = [list(speculate(target, drafter, ids, 48, chain(longest), sampling, rng=Random(args.seed))) for ids in prompts[:3]]
    cycles = [cycle for run in runs for cycle in run[1:]]
    if not cycles:
        raise UserError("--draft-length auto needs prompts with room behind them for a few tokens")
    rates, stands, expected, T = [], 1.0, 1.0, []
    each = median(c.seconds["draft"] / max(1, len(c.draft.tokens)) for c in cycles)
    rest = median(c.seconds["observe"] + c.seconds["other"] for c in cycles)
    cache, device = target.new_cache(), target.lm_head.weight.device
    for rows in range(1, min(longest, target.config.block_size // 2) + 2):
        seconds = []
        for _ in range(7):
            cache.length = target.config.block_size // 4
            start = time.perf_counter()
            target(torch.zeros(1, rows, dtype=torch.long, device=device), cache)[0, -1, 0].item()
            seconds.append(time.perf_counter() - start)
        T.append(median(seconds))
    for k, rate in enumerate(acceptance(cycles)[: len(T) - 1], 1):
        stands *= rate
        expected += stands
        rates.append(expected / (T[k] + k * each + rest))
    k = max(range(len(rates)), key=rates.__getitem__) + 1
    return k, (f"draft length {k}: T(1) {1e3 * T[0]:.1f} ms, T({k + 1}) {1e3 * T[k]:.1f} ms, a drafted token {1e3 * each:.1f} ms, the rest "
               f"of a cycle {1e3 * rest:.1f} ms; expected tokens/s by length: " + " ".join(f"{r:.0f}" for r in rates))  # fmt: skip

# ---- The demos -------------------------------------------------------------------------------------------------------

def compare(target, enc, drafters, prompts, args, sampling):
    """Print the paper's main table in miniature, and where its differences come from. -> what --json writes."""
    parameters = {name: sum(p.numel() for p in drafter.parameters()) for name, drafter in drafters.items()}
    shapes = {"chain": chain(args.draft_length), "tree": args.tree}
    methods = {(name, shape): (drafter, tree) for name, drafter in drafters.items() for shape, tree in shapes.items()}
    by_prompt = list(measure(target, methods, prompts, enc, args, sampling))
    runs = {key: [by_method[key] for by_method in by_prompt] for key in methods}
    results = {key: summarise(of_method, target, sampling) for key, of_method in runs.items()}
    print(f"{'':12}{'trained':>8}  {'draft':9}{'tau':>5}  {'ratio to plain':18}{'bound':>6}{'passes':>7}{'draft':>7}{'verify':>7}"
          f"{'observe':>8}  acceptance by position")  # fmt: skip
    for (name, shape), r in results.items():
        low, high = r["speedup_range"]
        print(f"{name:12}{parameters[name] / 1e6:7.2f}M  {str(shapes[shape]):9}{r['tau']:5.2f}  {r['speedup']:.2f} ({low:.2f}..{high:.2f}) "
              f"{r['free_drafter_share']:8.2f}{r['target_passes']:7.0f}{r['draft_ms']:7.2f}{r['verify_ms']:7.2f}{r['observe_ms']:8.2f}  "
              + " ".join(f"{a:.2f}" for a in r["acceptance_by_position"]))  # fmt: skip
    print(f"ratios: medians and range over {len(prompts)} prompts; bound: share of the speed with a drafter that costs nothing,")
    print("tau T(1)/T(k+1); draft, verify, observe: milliseconds a cycle; plain decoding: "
          f"{next(iter(results.values()))['plain_tokens_per_s']:.1f} tokens/s")  # fmt: skip
    print(verdict(list(results.values())))
    ratios = {}
    for name in drafters:
        if name.startswith("moa") and "eagle" in drafters:
            ratios[name] = {f"{key}_{shape}": results[name, shape][key] / max(1e-9, results["eagle", shape][key])
                            for shape in shapes for key in ("tau", "tokens_per_s")}  # fmt: skip
            print(f"{name} / eagle: " + ", ".join(f"{key.replace('_', ' ')} {value:.2f}" for key, value in ratios[name].items()))

    curves, first = {}, next(iter(runs.values()))
    texts = [(run["prompt"] + run["plain"], len(run["prompt"])) for run in first if len(run["plain"]) > 8]
    if texts:
        print("\nAgreement with the target's likeliest token, by distance from the last verified one (bars from 40% to 100%):\n")
        for name, drafter in drafters.items():
            shares = [agreement(target, drafter, text, start, stride=args.stride) for text, start in texts]
            curves[name] = [statistics.mean(column) for column in zip(*shares)]
            bars = "".join("▁▂▃▄▅▆▇█"[min(7, max(0, int((share - 0.4) / 0.6 * 8)))] for share in curves[name])
            print(f"  {name:12} {bars}  " + " ".join(f"{share:4.0%}" for share in curves[name]), flush=True)
        if args.svg:
            args.svg.write_text(chart(curves))
    return {
        "methods": [{"name": name, "parameters": parameters[name], **{shape: results[name, shape] for shape in shapes},
                     "agreement_by_distance": curves.get(name)} for name, drafter in drafters.items()],
        "over_eagle": ratios,
    }  # fmt: skip

def chart(curves, low=0.4):
    """{name: share by distance} -> an SVG line chart."""
    x, y = (lambda i: 60 + 60 * i), (lambda share: 20 + 260 * (1 - share) / (1 - low))
    colours = ["#0b6", "#06c", "#639", "#888", "#b80", "#d22", "#222"]
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 330" font-family="sans-serif" font-size="12">',
           '<rect width="640" height="330" fill="#fff"/>']  # fmt: skip
    for tenth in range(round(10 * low), 11):
        out.append(f'<path d="M60 {y(tenth / 10):.0f}H480" stroke="#ddd"/><text x="25" y="{y(tenth / 10) + 4:.0f}">{tenth * 10}%</text>')
    out += [f'<text x="{x(i) - 3}" y="298">{i + 1}</text>' for i in range(len(next(iter(curves.values()))))]
    out.append('<text x="130" y="320">distance from the last verified token: agreement with the target</text>')
    for i, ((name, shares), colour) in enumerate(zip(curves.items(), itertools.cycle(colours))):
        points = " ".join(f"{x(j)},{y(max(low, share)):.1f}" for j, share in enumerate(shares))
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="500" y="{40 + 20 * i}" fill="{colour}">{name}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"

def decoding_arguments(add):
    add("--drafter", nargs="+", metavar="NAME", help=f"of {', '.join(DRAFTERS)} (default: moa0; the comparisons take several)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-k", type=int, default=0, help="0 is off (default)")
    add("--top-p", type=float, default=1.0, help="1 is off (default)")
    add("--seed", type=int, default=0)
    add("--prompts", type=positive(int), help="use only the first so many held-out prompts")
    add("--json", type=Path, metavar="FILE", help="write every number of the table here")

def main():
    length = lambda text: text if text == "auto" else int(text)
    length.__name__ = "length"  # which argparse's messages show
    parser = arguments(__doc__, "demo", "compare")
    add = parser.add_argument
    decoding_arguments(add)
    add("--draft-length", type=length, default=6, help="k, or auto: what this machine's timings call for (default %(default)s)")
    add("--tree", type=Tree.parse, help="BREADTHxDEPTH:TOTAL: draft trees (compare's default: 3x5:10)")
    add("--confidence", type=float, default=0.0, help="end a draft below this probability (default: never)")
    add("--trace", type=int, nargs="?", const=4, default=0, metavar="N", help="draw the first N (default 4) drafts as trees")
    add("--full", action="store_true", help="compare: every drafter, all prompts, 64 tokens; some minutes")
    add("--svg", type=Path, metavar="FILE", help="compare: draw the agreement by distance here")
    args = parser.parse_args()
    if args.svg and args.command != "compare":
        parser.error("--svg draws what `compare` measures")
    for path in filter(None, (args.json, args.svg)):
        path.open("a").close()  # a bad path shows at once
    sampling, comparing = Sampling(args.temperature, args.top_k, args.top_p), args.command == "compare"
    target, enc = load_target(args.weights, args.device)
    names = args.drafter or (list(DRAFTERS) if args.full else ["moa0", "moa1", "eagle", "independent"] if comparing else ["moa0"])
    drafters = {name: load_drafter(target, Path(args.weights) / f"{name}.pt") for name in names}
    prompts = encode_prompts(args, enc)[: args.prompts or (16 if comparing and not args.full else None)]
    if args.draft_length == "auto":
        args.draft_length, reasoning = best_length(target, drafters[names[0]], prompts, args, sampling)
        print(reasoning)
    if comparing:
        args.tree, args.stride = args.tree or Tree(3, 5, 10), 2 if args.full else 8
        args.max_new_tokens = args.max_new_tokens if args.full else min(args.max_new_tokens, 24)
        result = compare(target, enc, drafters, prompts, args, sampling)
        results = [method[shape] for method in result["methods"] for shape in ("chain", "tree")]
    else:
        runs, method = [], (drafters[names[0]], args.tree or chain(args.draft_length))
        for run in (by_method[0] for by_method in measure(target, {0: method}, prompts, enc, args, sampling)):
            if not runs:
                print(*trace(enc, run["prompt"], run["cycles"], colour=sys.stdout.isatty()), sep="")
                for n, cycle in enumerate(run["cycles"][1 : 1 + args.trace], 1):
                    print(f"cycle {n}", *draw_tree(enc, cycle, colour=sys.stdout.isatty()), sep="\n")
                print("-" * 80, flush=True)
            runs.append(run)
        results = [result := summarise(runs, target, sampling)]
        print(*table(result), sep="\n")
    if args.json:
        machine = f"{platform.machine()}, {platform.processor() or platform.system()}, {torch.get_num_threads()} threads"
        settings = {k: v for k, v in vars(args).items() if k not in ("json", "svg", "weights", "command")} | {"tree": str(args.tree)}
        args.json.write_text(json.dumps({**result, "settings": settings, "machine": machine, "torch": torch.__version__}, indent=1))
    if any(r["different"] > r["near_tie_flips"] for r in results):
        sys.exit(1)

if __name__ == "__main__":
    cli(main)
