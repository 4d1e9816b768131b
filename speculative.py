"""Speculative decoding: the drafter proposes, the target verifies, the output is exactly the target's. Read after moa.py.

    python speculative.py                      # held-out prompts, plain against speculative: one trace, one table
    python speculative.py --prompt "def fib"   # your own text
    python speculative.py --temperature 0.8    # sampled: the distribution is plain decoding's, the draws are not

Throughout, p is the target's distribution, q the drafter's, k the draft length. A cycle is one draft and its verification;
tau is the tokens emitted a cycle, the target's own token included.
"""
import itertools
import json
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from model import Random, Sampling, UserError, arguments, check_prompt, cli, decode_stream, encode_prompts, generate, load_target, positive
from moa import load_drafter

@dataclass
class Cycle:
    """What one cycle did. emitted = the accepted part of the draft and, unless a stop fell inside it, the target's token."""

    draft: list
    accepted: int
    emitted: list
    seconds: dict = field(default_factory=dict)

@torch.inference_mode()
def speculate(target, drafter, ids, max_new_tokens, draft_length=5, sampling=Sampling(), confidence=0.0, rng=None, eot=None):
    """Yield a Cycle at a time; the emitted tokens together are distributed exactly as plain decoding's.

    At temperature 0 they are the same tokens. The first Cycle is the prefill, with an empty draft. In "a b c | x y z", with
    c the last committed token and x y z a draft, c has been emitted but not yet read by the target: its cache, and the
    drafter's memory, end at b. The pass reads c x y z; its row for c judges x, its row for z gives one token more.

    A draft ends early once the product of the drafter's probabilities for it (before temperature, top-k and top-p) is below
    `confidence`; the token that brought it there stays, since dropping a token for what it is would bias the output. Ends
    after `eot`, at max_new_tokens or where block_size ends. Raises UserError for what cannot be decoded.
    """
    if draft_length < 0:
        raise UserError(f"draft-length must be >= 0, not {draft_length}")
    if not 0 <= confidence <= 1:
        raise UserError(f"confidence must lie in [0, 1], not {confidence}")
    rng, ids, device = rng or Random(), list(ids), target.lm_head.weight.device
    end = len(ids) + check_prompt(target.config, ids, max_new_tokens)
    cache, fed = target.new_cache(), 0  # `fed`: how many of ids the target's cache holds
    drafter.reset()
    while len(ids) < end and not (fed and ids[-1] == eot):
        clock = Stopwatch()

        # 1. Draft: up to k tokens, each drawn from q. One fewer than may still come: the target adds its own. At first the
        # target has read nothing, so there is nothing to draft from: that cycle only reads the prompt.
        draft, q, sure = [], [], 1.0
        while fed and len(draft) < min(draft_length, end - len(ids) - 1) and sure >= confidence:
            logits = drafter.propose(ids + draft)
            clock.lap("draft")
            q.append(sampling(logits))
            draft.append(rng.draw(q[-1]))
            if confidence:
                sure *= logits.softmax(-1)[draft[-1]].item()
            clock.lap("other")

        # 2. Verify: one pass of the target over what it has not read yet gives p at every position of the draft, and after.
        new = torch.tensor([ids[fed:] + draft], device=device)
        states = target.states(new, cache)  # (1, T, C)
        logits = target.lm_head(states[0, -len(draft) - 1 :])  # (len(draft) + 1, V)
        clock.lap("verify")

        # 3. Accept: the longest prefix that the rule lets stand, and one token of the target's own.
        accepted, token = accept(draft, q, sampling(logits), rng)
        emitted = draft[:accepted] + [token]
        if eot in emitted:
            emitted = emitted[: emitted.index(eot) + 1]

        # 4. Roll back: the cache keeps the committed tokens but the last, whose keys and values come with the next pass.
        ids += emitted
        cache.truncate(len(ids) - 1)
        clock.lap("other")

        # 5. Observe: the drafter takes in what the target computed for the tokens that stand (the rows of those it had not
        # read, without the rejected ones), and forgets what it drafted beyond them.
        drafter.observe(drafter.memory(cache, states[:, : len(ids) - 1 - fed]))
        fed = len(ids) - 1
        clock.lap("observe")
        yield Cycle(draft, accepted, emitted, clock.seconds)

def accept(draft, q, p, rng):
    """The rejection rule of speculative sampling. -> (number of draft tokens that stand, the target's own token).

        draft token x stands with probability min(1, p(x) / q(x)); the first that does not is replaced by
        a draw from  (p - q)^+ / sum (p - q)^+;  if all stand, one more is drawn from p.

    Exact: a token y is emitted as a draft with probability q(y) min(1, p(y)/q(y)) = min(p(y), q(y)). The rejected mass is
    1 - sum min(p, q) = sum (p - q)^+, and the replacement spreads exactly it over (p - q)^+, so y comes out with
    min(p(y), q(y)) + (p(y) - q(y))^+ = p(y). At temperature 0, p and q are one-hot and the rule is a comparison.

    draft: k ids, x_i drawn from q[i]; q: k tensors (V,); p (k+1, V). Raises ValueError for a token that q cannot have drawn.
    """
    for i, x in enumerate(draft):
        p_x, q_x = p[i, x].item(), q[i][x].item()
        if q_x <= 0:
            raise ValueError(f"draft token {x} has q = 0: it was not drawn from q")
        if not rng.coin(min(1.0, p_x / q_x)):
            return i, rng.draw(residual(p[i], q[i]))
    return len(draft), rng.draw(p[len(draft)])

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

# ---- The demo: plain against speculative -----------------------------------------------------------------------------

def trace(enc, prompt, cycles, colour):
    """Yield the text of a run with its decisions: accepted drafts, the rejected token struck out, the target's own token."""
    accepted, rejected, own = ("{}", "[-{}-]", "{{+{}+}}")
    if colour:
        accepted, rejected, own = "\033[32m{}\033[0m", "\033[31;9m{}\033[0m", "\033[1;34m{}\033[0m"
    yield enc.decode(prompt)
    pieces = decode_stream(enc, [token for cycle in cycles for token in cycle.emitted])
    for cycle in cycles:
        for i, piece in enumerate(itertools.islice(pieces, len(cycle.emitted))):
            if i < cycle.accepted:
                yield accepted.format(piece)
            else:
                yield from (rejected.format(enc.decode([token])) for token in cycle.draft[i : i + 1])
                yield own.format(piece)

def near_tie(target, prompt, a, b, gap=1e-4):
    """Whether two greedy continuations part where float32 rounding may decide: their logits there are less than gap apart."""
    i = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
    if i is None:
        return False
    logits = target(torch.tensor([prompt + a[:i]], device=target.lm_head.weight.device))[0, -1]
    return abs(logits[a[i]] - logits[b[i]]).item() < gap

def measure(target, drafter, prompts, enc, args, sampling):
    """Decode each prompt plainly, then speculatively; yield a dict of both texts and times."""
    settings = dict(draft_length=args.draft_length, confidence=args.confidence)
    list(generate(target, prompts[0], 8)), list(speculate(target, drafter, prompts[0], 16, **settings))  # warm up
    for n, prompt in enumerate(prompts):
        common = dict(sampling=sampling, eot=enc.eot_token)
        start = time.perf_counter()
        plain = list(generate(target, prompt, args.max_new_tokens, rng=Random(args.seed + n), **common))
        middle = time.perf_counter()
        cycles = list(speculate(target, drafter, prompt, args.max_new_tokens, rng=Random(args.seed + n), **settings, **common))
        end = time.perf_counter()
        text = [token for cycle in cycles for token in cycle.emitted]
        yield dict(prompt=prompt, plain=plain, text=text, cycles=cycles, plain_s=middle - start, s=end - middle)

def summarise(runs, target, sampling):
    """-> the numbers of the table: medians over prompts, and sums over all cycles for tau and the acceptance rates."""
    cycles = [cycle for run in runs for cycle in run["cycles"][1:]]  # the first is the prefill
    longest = max((len(cycle.draft) for cycle in cycles), default=0)
    tried = [sum(len(c.draft) > i and c.accepted >= i for c in cycles) for i in range(longest)]
    stood = [sum(c.accepted > i for c in cycles) for i in range(longest)]
    median = lambda values: statistics.median(values) if (values := list(values)) else 0.0
    ms = {f"{step}_ms": 1e3 * median(c.seconds[step] for c in cycles) for step in ("draft", "verify", "observe", "other")}
    different = [run for run in runs if run["plain"] != run["text"]] if sampling.temperature == 0 else []
    return {
        "plain_tokens_per_s": median(len(run["plain"]) / run["plain_s"] for run in runs),
        "tokens_per_s": median(len(run["text"]) / run["s"] for run in runs),
        "speedup": median(len(run["text"]) / run["s"] / (len(run["plain"]) / run["plain_s"]) for run in runs if run["plain"]),
        "tau": sum(len(c.emitted) for c in cycles) / max(1, len(cycles)),
        "acceptance_by_position": [s / t for s, t in zip(stood, tried) if t],
        **ms,
        "plain_target_passes": median(len(run["plain"]) for run in runs),
        "target_passes": median(len(run["cycles"]) for run in runs),
        "identical": None if sampling.temperature else not different,
        "near_tie_flips": sum(near_tie(target, run["prompt"], run["plain"], run["text"]) for run in different),
        "different": len(different),
    }

def table(result):
    """-> the lines of the table."""
    r = result
    yield f"{'median over prompts':26}{'plain':>12}{'speculative':>14}"
    yield f"{'tokens/s':26}{r['plain_tokens_per_s']:12.1f}{r['tokens_per_s']:14.1f}   ratio {r['speedup']:.2f}"
    yield f"{'target passes':26}{r['plain_target_passes']:12.0f}{r['target_passes']:14.0f}"
    yield f"{'tokens a cycle (tau)':26}{'1':>12}{r['tau']:14.2f}"
    yield "acceptance by position    " + " ".join(f"{a:.2f}" for a in r["acceptance_by_position"])
    yield "milliseconds a cycle      " + ", ".join(f"{s} {r[f'{s}_ms']:.2f}" for s in ("draft", "verify", "observe", "other"))
    if r["identical"] is None:
        yield "identical                 not expected: sampled (the distribution is the same)"
    elif r["different"] == 0:
        yield "identical: yes"
    elif r["different"] == r["near_tie_flips"]:
        yield f"identical: yes, but for {r['different']} text(s) that part at a float32 near-tie (logits < 1e-4 apart)"
    else:
        yield f"identical: NO, {r['different'] - r['near_tie_flips']} text(s) differ, and not at a near-tie: this is a bug"

def main():
    parser = arguments(__doc__, "demo")
    parser.add_argument("--drafter", default="moa.pt", help="file in the weights folder (default: %(default)s)")
    parser.add_argument("--draft-length", type=int, default=5, help="k (default %(default)s)")
    parser.add_argument("--confidence", type=float, default=0.0, help="end a draft below this probability (default: never)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 is off (default)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=positive(int), help="use only the first so many held-out prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number of the table here")
    args = parser.parse_args()
    if args.json:
        args.json.open("a").close()  # a bad path shows at once
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    target, enc = load_target(args.weights, args.device)
    drafter = load_drafter(target, Path(args.weights) / args.drafter)
    prompts = encode_prompts(args, enc)[: args.prompts]

    runs = []
    for run in measure(target, drafter, prompts, enc, args, sampling):
        if not runs:
            print(*trace(enc, run["prompt"], run["cycles"], colour=sys.stdout.isatty()), sep="")
            print("-" * 80, flush=True)
        runs.append(run)
    result = summarise(runs, target, sampling)
    print(*table(result), sep="\n")
    if args.json:
        machine = f"{platform.machine()}, {platform.processor() or platform.system()}, {torch.get_num_threads()} threads"
        settings = {k: v for k, v in vars(args).items() if k not in ("json", "weights", "command")}
        args.json.write_text(json.dumps({**result, "settings": settings, "machine": machine, "torch": torch.__version__}, indent=1))
    if result["different"] > result["near_tie_flips"]:
        sys.exit(1)

if __name__ == "__main__":
    cli(main)
