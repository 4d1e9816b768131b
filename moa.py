"""The drafter: Mixture of Attentions for speculative decoding (arXiv 2410.03804), and its training. Read after model.py.

    python moa.py                       # anatomy: what the drafter may see, and how far ahead it still agrees with the target
    python moa.py train --minutes 30    # train it for the target in weights/

Two things hold back a drafter that reads the target's activations. It sees only the last hidden state, although the next
step depends on the keys and values of every layer (partial observability): layer self-attention, LSA, reads them all.
And it is trained on true activations but must draft from its own predictions of them (off-policy): cross-attention, CA,
reads verified tokens only, in training as in drafting, so it never meets a prediction of its own.

    target's KV of verified tokens --LSA, mean, W--> s_t      memory()   on the target's side, once a cycle
    s_t --CA's keys and values--> cached                      observe()  on the drafter's side, once a cycle
    ids --embedding--> SA --> CA --> (TLI) --> LM head        propose()  on the drafter's side, once a drafted token

Shapes as in model.py; N = n_target_layers, U = 2 * nkv * hs the width of one layer's [key; value] of a token.
"""
import random
import zlib
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import (MLP, WEIGHTS, Block, KVCache, UserError, add_fused_linear, additive, apply_rope, arguments, attend, cli,
                   encode_prompts, fit, generate, load_target, load_weights, pick_device, positive, read_corpus, rope_tables,
                   run_blocks, save_weights, tokenize, training_arguments, window_batch)  # fmt: skip

class LSA(nn.Module):
    """Layer self-attention, the cure for partial observability (paper, section on LSA).

    A verified token's own column of the KV cache is a sequence over layers: u_{t,l} = [key; value] of every kv head, and

        s_t = W mean_l LSA(u_t)_l + b

    One transformer block over the L positions, unmasked, RoPE over the layer index. It mixes layers, never tokens: what
    it says of a token never changes, so it runs once for each verified token.
    """

    def __init__(self, config, n_ffn):
        super().__init__()
        c, U = config, 2 * config.n_kv_head * config.n_embd // config.n_head
        self.block = Block(U, c.n_head, c.n_kv_head, n_ffn, c.norm_eps)
        self.proj = nn.Linear(U, c.n_embd)  # W, b
        for name, table in zip(("cos", "sin"), rope_tables(c.n_layer, U // c.n_head, c.rope_theta)):
            self.register_buffer(name, table, persistent=False)

    def forward(self, kv):
        """kv (L, B, nkv, T, 2 hs) -> s (B, T, C)."""
        L, B, _, T, _ = kv.shape
        u = kv.permute(1, 3, 0, 2, 4).reshape(B * T, L, -1)  # (B*T, L, U)
        with sdpa_kernel(SDPBackend.MATH):  # for many sequences of L the fused kernel's backward pass is far slower on a CPU
            return self.proj(self.block(u, (self.cos, self.sin)).mean(1)).view(B, T, -1)

class CrossAttention(nn.Module):
    def __init__(self, n_embd, n_head, n_kv_head):
        super().__init__()
        self.n_head, self.n_kv_head, self.hs = n_head, n_kv_head, n_embd // n_head
        self.q_proj = nn.Linear(n_embd, n_embd, bias=False)
        add_fused_linear(self, "kv_proj", n_embd, k_proj=n_kv_head * self.hs, v_proj=n_kv_head * self.hs)
        self.o_proj = nn.Linear(n_embd, n_embd, bias=False)

    def keys_values(self, s, rope):
        """Normed memory (B, S, C) -> k, v (B, nkv, S, hs)."""
        k, v = self.kv_proj(s).view(*s.shape[:2], 2 * self.n_kv_head, self.hs).chunk(2, dim=2)
        return apply_rope(k, *rope).transpose(1, 2), v.transpose(1, 2)

    def forward(self, x, k, v, rope, mask=None):
        q = apply_rope(self.q_proj(x).view(*x.shape[:2], self.n_head, self.hs), *rope)  # (B, T, nh, hs)
        return self.o_proj(attend(q, k, v, mask))

class CA(nn.Module):
    """Cross-attention, the cure for off-policy training (paper, section on CA): the block that reads the memory s_1..s_t.

        h_i = CA(x_i; s_1..s_t),   t the last verified token, i > t

    Queries come from SA's output, keys and values from the memory alone; one RMSNorm serves both; RoPE at true positions.
    """

    def __init__(self, n_embd, n_head, n_kv_head, n_ffn, norm_eps):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(n_embd, norm_eps)
        self.self_attn = CrossAttention(n_embd, n_head, n_kv_head)
        self.post_attention_layernorm = nn.RMSNorm(n_embd, norm_eps)
        self.mlp = MLP(n_embd, n_ffn)

    def keys_values(self, s, rope):
        return self.self_attn.keys_values(self.input_layernorm(s), rope)

    def forward(self, x, k, v, rope, mask=None):
        x = x + self.self_attn(self.input_layernorm(x), k, v, rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))

class TruePrefix:
    """A training stand-in for a KV cache: behind the true keys and values of all T tokens come those computed from
    predictions, 2 T columns that the mask chooses from. Its length stays 0: nothing is cached, nothing is padded."""

    def __init__(self, kv):
        self.kv, self.length = kv, 0

    def write(self, layer, k, v):
        true_k, true_v = self.kv[layer].to(k.dtype).chunk(2, -1)
        return torch.cat([true_k, k], 2), torch.cat([true_v, v], 2)

class MoADrafter(nn.Module):
    """Mixture of Attentions. The loop (speculative.py) calls reset, memory, observe and propose; training calls forward.

    With N = n_target_layers > 0 CA predicts the state entering layer L-N, and the target's last N layers, its norm and LM
    head finish the job (target layer inference, TLI), over their true keys and values of the verified tokens. With N = 0
    CA's output stands for the target's final normed state.
    """

    def __init__(self, target, n_target_layers=0, n_kv_head=None, n_ffn=448, lsa_ffn=256):
        super().__init__()
        c = target.config
        if not 0 <= n_target_layers < c.n_layer:
            raise UserError(f"the drafter can use 0 to {c.n_layer - 1} layers of this target, not {n_target_layers}")
        self.settings = dict(n_target_layers=n_target_layers, n_kv_head=n_kv_head, n_ffn=n_ffn, lsa_ffn=lsa_ffn)
        self.__dict__["target"] = target  # shared and frozen: not a submodule, so neither trained nor saved here
        self.N, n_kv_head = n_target_layers, n_kv_head or c.n_head
        self.lsa = LSA(c, lsa_ffn)
        self.sa = Block(c.n_embd, c.n_head, n_kv_head, n_ffn, c.norm_eps)
        self.ca = CA(c.n_embd, c.n_head, n_kv_head, n_ffn, c.norm_eps)
        self.reset()

    # -- drafting, step by step ----------------------------------------------------------------------------------------

    def reset(self):
        """Forget everything: the caches of a new text."""
        c, like = self.target.config, self.lsa.proj.weight
        new = lambda: KVCache(1, self.sa.self_attn.n_kv_head, c.n_embd // c.n_head, c.block_size, like)
        self.sa_cache, self.ca_cache = new(), new()  # of tokens, verified and drafted; of the memory, verified only
        self.tli_cache = self.target.new_cache(first_layer=c.n_layer - self.N)

    def memory(self, cache, states):
        """What crosses from the target to the drafter, for the newest rows of the target's cache.

        states (B, T, C): the target's final normed states of those T tokens (read by other drafters, not by this one).
        -> s (B, T, C), and the last N layers' keys and values (N, B, nkv, T, 2 hs), empty for N = 0.
        """
        kv = cache.kv[:, :, :, cache.length - states.size(1) : cache.length]
        return self.lsa(kv), kv[kv.size(0) - self.N :]

    def observe(self, memory):
        """Take in the memory of newly verified tokens; rejected drafts fall out of the caches here.

        SA's rows depend on tokens alone, so those of accepted drafts stay. TLI's came from predictions: true ones replace
        them.
        """
        s, kv = memory
        n, end = self.ca_cache.length, self.ca_cache.length + s.size(1)
        rope = self.target.cos[n:end], self.target.sin[n:end]
        self.ca_cache.write(0, *self.ca.keys_values(s, rope))
        self.tli_cache.kv[:, :, :, n:end] = kv
        self.ca_cache.length = self.tli_cache.length = end
        self.sa_cache.truncate(min(self.sa_cache.length, end))

    def propose(self, ids):
        """ids: the text so far, drafted tokens included -> logits (V,) of the next one.

        ids are one more than the memory holds, or than at the last call. SA computes all tokens that it has not seen, so
        that one accepted without having been fed here leaves no hole; CA and TLI compute the newest.
        """
        target, n = self.target, self.sa_cache.length
        new = torch.tensor([ids[n:]], device=target.lm_head.weight.device)
        x = run_blocks([self.sa], target.model.embed_tokens(new), (target.cos, target.sin), self.sa_cache)
        at = slice(len(ids) - 1, len(ids))
        x, rope = x[:, -1:], (target.cos[at], target.sin[at])
        k, v = self.ca_cache.layers[0]
        x = self.ca(x, k[:, :, : self.ca_cache.length], v[:, :, : self.ca_cache.length], rope)
        if self.N:
            x = target.run_layers(x, self.tli_cache, first_layer=target.config.n_layer - self.N)
        return target.lm_head(x[0, -1])

    # -- training, all positions at once -------------------------------------------------------------------------------

    def forward(self, ids, memory, last_reset, staircase=False):
        """What drafting computes step by step, for every position of a text in one pass (T-step bounded, on-policy).

        ids (B, T); memory of all T tokens; last_reset (B, T): the last token that query i knows to be verified, <= i.
        Query i reads memory j <= last_reset_i only: it stands where a drafter does, i - last_reset_i tokens beyond what
        it has seen of the target. -> final state (B, T, C), and CA's output.
        """
        target, (s, kv) = self.target, memory
        rope = target.cos[: ids.size(1)], target.sin[: ids.size(1)]
        sa_mask, ca_mask = attention_masks(last_reset, staircase)
        x = run_blocks([self.sa], target.model.embed_tokens(ids), rope, mask=sa_mask)
        x = entering = self.ca(x, *self.ca.keys_values(s, rope), rope, additive(ca_mask, s.dtype))
        if self.N:  # true keys up to the reset; then those of the predicted states since it
            own = torch.ones_like(ca_mask).tril() & ~ca_mask
            layers = target.model.layers[target.config.n_layer - self.N :]
            x = target.model.norm(run_blocks(layers, x, rope, TruePrefix(kv), mask=torch.cat([ca_mask, own], -1)))
        return x, entering

def attention_masks(last_reset, staircase=False):
    """last_reset (B, T) -> what SA and CA may see, each (B, 1, T, T) bool, [query i, key j].

    CA: j <= last_reset_i. SA: j <= i; under the staircase only tokens after the reset, and itself, so that early in
    training everything older must come through CA.
    """
    i = torch.arange(last_reset.size(1), device=last_reset.device)[:, None]
    j = i.T
    verified = (j <= last_reset[:, None, :, None]).expand(-1, -1, len(i), -1)
    causal = (j <= i).expand_as(verified)
    return causal & (~verified | (i == j)) if staircase else causal, verified

def periodic_resets(periods, T):
    """periods (B,) -> last_reset (B, T): a verification at every multiple of the period."""
    i = torch.arange(T, device=periods.device)
    return i - i % periods[:, None]

def draft_loss(logits, state, target_logits, target_state, mask, entering=None, target_entering=None, ce_weight=0.1):
    """Cross-entropy of the drafter's distribution under the target's, and SmoothL1 of the states, over mask's ones.

        loss = ce_weight * E_p[-log q] + SmoothL1(h, f)

    With N > 0 the state term is half that and half SmoothL1 of the states entering layer L-N. logits (B, T, V), states
    (B, T, C), mask (B, T). -> loss, and its terms as a dict.
    """
    mean = lambda x: (x * mask).sum() / mask.sum().clamp(min=1)  # an empty mask gives 0, not NaN
    terms = {
        "cross_entropy": mean(-(target_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)),
        "state": mean(F.smooth_l1_loss(state, target_state, reduction="none").mean(-1)),
    }
    if entering is not None:
        terms["entering"] = mean(F.smooth_l1_loss(entering, target_entering, reduction="none").mean(-1))
    state_term = terms["state"] if entering is None else 0.5 * terms["state"] + 0.5 * terms["entering"]
    return ce_weight * terms["cross_entropy"] + state_term, terms

def train(args):
    """Train a drafter on windows of the corpus, the target frozen."""
    device, folder = pick_device(args.device), Path(args.weights)
    target, enc = load_target(folder, args.device)
    torch.manual_seed(0)
    drafter = MoADrafter(target, args.target_layers).to(device)
    args.window = min(args.window, target.config.block_size)
    low, high = args.periods
    if not 2 <= low <= high:
        raise UserError(f"--periods takes two numbers, 2 <= low <= high, not {low} {high}")
    stream, held_out = (tokenize(documents, enc) for documents in read_corpus(args.data))
    window_batch(stream, 0, args.batch, args.window)  # too little text shows here
    cache = target.new_cache(batch=args.batch)

    def losses(ids, seed, patterns, staircase=False):
        """-> mean loss over several random patterns of resets on ids (B, T), the terms and the agreement of the last one.
        The target and LSA run once for all of them."""
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            cache.length, entering = 0, []
            target_state = target.states(ids, cache, entering=entering).float()
            target_logits = target.lm_head(target_state).float()
        memory, total = [part.float() for part in drafter.memory(cache, target_state)], 0.0  # whatever autocast made of it
        for _ in range(patterns):
            periods = torch.randint(low, high + 1, (len(ids),), generator=rng).to(device)
            last_reset = periodic_resets(periods, ids.size(1))
            mask = last_reset != torch.arange(ids.size(1), device=device)  # drafting never stands on a verified token
            state, entered = drafter(ids, memory, last_reset, staircase)
            logits = target.lm_head(state).float()
            pair = (entered.float(), entering[-drafter.N].float()) if drafter.N else ()
            loss, terms = draft_loss(logits, state.float(), target_logits, target_state, mask, *pair, ce_weight=args.ce_weight)
            total = total + loss / patterns
        return total, terms, (logits.argmax(-1) == target_logits.argmax(-1))[mask].float().mean()

    def loss_at(step, progress):
        staircase = random.Random(step).random() < 1 - 2 * progress
        return losses(window_batch(stream, step, args.batch, args.window).to(device), step, args.patterns, staircase)[0]

    @torch.no_grad()
    def report():
        T = min(args.window, len(held_out) // (args.batch + 2))
        _, terms, agree = losses(window_batch(held_out, 0, args.batch, T).to(device), 0, 4)
        return f"held-out cross-entropy {terms['cross_entropy']:.3f} state {terms['state']:.3f} agreement {agree:.3f}"

    fit(drafter, loss_at, report, args, identity=["moa", target_id(target), args.target_layers])
    print(report())
    save_weights(folder / args.drafter, drafter, settings=drafter.settings, target=target_id(target))

def target_id(target):
    """A number that tells one trained target from another."""
    return zlib.crc32(target.model.norm.weight.detach().cpu().half().numpy().tobytes())

def load_drafter(target, path=WEIGHTS / "moa.pt"):
    """-> the MoADrafter trained for this target. Raises UserError."""
    drafter, saved = load_weights(path, lambda saved: MoADrafter(target, **saved["settings"]), "moa.py")
    if saved.get("target") != target_id(target):
        raise UserError(f"{path}: trained for another target than the one beside it; `python moa.py train` trains one for it")
    return drafter.to(target.lm_head.weight.device)

# ---- Anatomy ---------------------------------------------------------------------------------------------------------

def draw_masks(period=4, T=12):
    """Print what SA and CA may see in training: a row a query, a column a key; ■ seen, · hidden."""
    resets = periodic_resets(torch.tensor([period]), T)
    (stairs, seen), (causal, _) = attention_masks(resets, staircase=True), attention_masks(resets)
    print(f"In training, verifications every {period} tokens (rows: queries, columns: keys; ■ seen):\n")
    print(f"    {'SA, staircase':{2 * T + 2}}{'SA, later':{2 * T + 2}}CA (memory s)")
    for i in range(T):
        row = lambda mask: " ".join("■" if x else "·" for x in mask[0, 0, i].tolist())
        print(f"{i:3d} {row(stairs)}   {row(causal)}   {row(seen)}{'   <- reset' if resets[0, i] == i else ''}")

@torch.inference_mode()
def agreement(target, drafter, ids, start, horizon=8):
    """How often the drafter's likeliest token is the target's, by distance from the last verified token.

    One pass over the text for every phase of a period of horizon + 1. Counts queries from `start` on. -> list of horizon.
    """
    T, period = len(ids), horizon + 1
    idx = torch.tensor([ids], device=target.lm_head.weight.device)
    cache = target.new_cache()
    states = target.states(idx, cache)
    want = target.lm_head(states)[0].argmax(-1)
    memory = drafter.memory(cache, states)
    i = torch.arange(T, device=idx.device)
    hits, count = torch.zeros(period), torch.zeros(period)
    for phase in range(period):
        last_reset = (i - (i - phase) % period).clamp(min=0)
        state, _ = drafter(idx, memory, last_reset[None])
        same = (target.lm_head(state)[0].argmax(-1) == want).float()
        for distance in range(1, period):
            at = (i - last_reset == distance) & (i >= max(start, phase))
            hits[distance] += same[at].sum().item()
            count[distance] += at.sum().item()
    return (hits / count.clamp(min=1))[1:].tolist()

def main():
    parser = arguments(__doc__, "demo", "train")
    parser.add_argument("--drafter", default="moa.pt", help="file in the weights folder (default: %(default)s)")
    training_arguments(parser, checkpoint="drafter.ckpt", batch=4)
    parser.add_argument("--target-layers", type=int, default=0, help="N: frozen target layers that finish a draft")
    parser.add_argument("--periods", type=int, nargs=2, default=(3, 8), help="range of tokens between verifications")
    parser.add_argument("--patterns", type=positive(int), default=4, help="patterns of verifications tried on each batch")
    parser.add_argument("--ce-weight", type=float, default=1.0, help="weight of the cross-entropy (authors: 0.1)")
    args = parser.parse_args()
    if args.command == "train":
        return train(args)
    target, enc = load_target(args.weights, args.device)
    drafter = load_drafter(target, Path(args.weights) / args.drafter)
    ids = encode_prompts(args, enc)[0]
    text = ids + list(generate(target, ids, args.max_new_tokens, eot=enc.eot_token))
    if len(text) < max(12, len(ids) + 9):
        raise UserError("the anatomy needs a text of 12 tokens, 9 of them decoded: another --prompt, or more --max-new-tokens")
    draw_masks()

    print("\nIn drafting, 8 verified tokens and 4 drafted ones (what the caches really hold):\n")
    with torch.inference_mode():
        cache = target.new_cache()
        states = target.states(torch.tensor([text[:8]], device=args.device), cache)
        drafter.reset()
        drafter.observe(drafter.memory(cache, states))
        for n in range(9, 13):
            drafter.propose(text[:n])
            sa, ca = drafter.sa_cache.length, drafter.ca_cache.length
            print(f"  query {n - 1:2d}  SA {' '.join('■' * sa):25} CA {' '.join('■' * ca)}")

    print("\nAgreement with the target's likeliest token, by distance from the last verified one:\n")
    for distance, share in enumerate(agreement(target, drafter, text, len(ids)), 1):
        print(f"  {distance}  {'█' * round(40 * share):40} {share:.0%}")

if __name__ == "__main__":
    cli(main)
