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
import json, random, zlib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
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
        u = kv.permute(1, 3, 0, 2, 4).reshape(B * T, L, -1).contiguous()  # (B*T, L, U), next to each other at last
        with sdpa_kernel(SDPBackend.MATH) if torch.is_grad_enabled() else nullcontext():  # the fused kernel's backward pass is slow here
            return self.proj(self.block(u, (self.cos, self.sin)).mean(1)).view(B, T, -1)

class TokenMap(nn.Module):
    """What a drafter starts from: linear(norm(embedding)). With tied embeddings a residual stream that starts at the embedding
    itself would start by predicting the token just read, and at a fraction of the scale of the states that it must end at."""

    def __init__(self, target):
        super().__init__()
        self.__dict__["embed"] = target.model.embed_tokens  # the target's own, frozen
        self.norm = nn.RMSNorm(target.config.n_embd, target.config.norm_eps)
        self.proj = nn.Linear(target.config.n_embd, target.config.n_embd)

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        return self.proj(x).type_as(x)  # under autocast too, the residual stream keeps its precision

class CrossAttention(nn.Module):
    """Queries and keys have biases that start as the same vector, of another length in each head: under RoPE their product is
    largest for the nearest key, so that some heads begin by reading the newest memory. Zeros would be the paper's."""

    def __init__(self, n_embd, n_head, n_kv_head):
        super().__init__()
        self.n_head, self.n_kv_head, self.hs = n_head, n_kv_head, n_embd // n_head
        self.q_proj = nn.Linear(n_embd, n_embd, bias=False)
        add_fused_linear(self, "kv_proj", n_embd, k_proj=n_kv_head * self.hs, v_proj=n_kv_head * self.hs)
        self.o_proj = nn.Linear(n_embd, n_embd, bias=False)
        near = torch.linspace(0, 1.5, n_kv_head)[:, None].expand(-1, self.hs)
        self.q_bias = nn.Parameter(near.repeat_interleave(n_head // n_kv_head, 0).clone())  # (nh, hs)
        self.k_bias = nn.Parameter(near.clone())  # (nkv, hs)

    def keys_values(self, s, rope):
        """Normed memory (B, S, C) -> k, v (B, nkv, S, hs)."""
        k, v = self.kv_proj(s).view(*s.shape[:2], 2 * self.n_kv_head, self.hs).chunk(2, dim=2)
        return apply_rope(k + self.k_bias, *rope).transpose(1, 2), v.transpose(1, 2)

    def forward(self, x, k, v, rope, mask=None):
        q = apply_rope(self.q_proj(x).view(*x.shape[:2], self.n_head, self.hs) + self.q_bias, *rope)  # (B, T, nh, hs)
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

class DraftCache(KVCache):
    """A drafter's own KV cache of one layer or more: rows of the text, and behind them rows of the draft tree's nodes."""

    def __init__(self, target, n_kv_head, n_layer=1):
        c = target.config
        super().__init__(n_layer, n_kv_head, c.n_embd // c.n_head, 2 * c.block_size, target.lm_head.weight)
        self.text = 0

    def place(self, ids, tokens, parents, n):
        """What propose(ids, tokens, parents, n) must compute -> its token ids (1, T), positions (T,), and a mask for
        run_blocks.

        With no tokens a new cycle begins: the nodes of the last one go, and all of the text without a row gets one, the
        accepted tokens among them. So no row depends on which draft it was first computed in, and none is ever missing.
        """
        device, mask = self.kv.device, None
        if not tokens:
            self.truncate(min(self.text, len(ids) - 1))
            self.text, tokens, n = len(ids), ids, len(ids) - self.length
        positions = torch.arange(self.length, self.length + n, device=device)
        if list(parents) != list(range(-1, len(parents) - 1)):  # a chain is read like any text
            mask = ancestors(parents, n).to(device)
            positions = len(ids) - 1 + mask.sum(1)
        return torch.tensor([tokens[-n:]], device=device), positions, mask

def ancestors(parents, n):
    """parents[i] < i is the node before node i, -1 none -> (n, m) bool, for each of the newest n of m nodes: which nodes lie
    on its path, itself included. Its sum over a row is the node's depth."""
    mask = np.zeros((n, len(parents)), dtype=bool)
    for row, node in zip(mask, range(len(parents) - n, len(parents))):
        while node >= 0:
            row[node], node = True, parents[node]
    return torch.from_numpy(mask)

def paths(ids, tokens, parents, n):
    """The arguments of propose -> the text up to each node that it is asked about: all that a stateless drafter needs."""
    if not tokens:
        return [list(ids)]
    return [[*ids, *(token for token, on_path in zip(tokens, row) if on_path)] for row in ancestors(parents, n).tolist()]

class MoADrafter(nn.Module):
    """Mixture of Attentions.

    With N = n_target_layers > 0 CA predicts the state entering layer L-N, in units of its mean and deviation in each
    channel, and the target's last N layers, its norm and LM head finish the job (target layer inference, TLI), over their
    true keys and values of the verified tokens. With N = 0 CA's output stands for the target's final normed state.

    The ablations: without LSA, CA reads the target's final states as they are. With on_policy = False, in training each
    query reads the memory up to its own predecessor, one token beyond what the target has verified, as EAGLE's does; in
    drafting the memory still ends at the last verified token, so all queries but the first find less than in training.
    """

    def __init__(self, target, n_target_layers=0, n_kv_head=None, n_ffn=448, lsa_ffn=256, on_policy=True):
        super().__init__()
        c = target.config
        if not 0 <= n_target_layers < c.n_layer:
            raise UserError(f"the drafter can use 0 to {c.n_layer - 1} layers of this target, not {n_target_layers}")
        self.settings = dict(n_target_layers=n_target_layers, n_kv_head=n_kv_head, n_ffn=n_ffn, lsa_ffn=lsa_ffn, on_policy=on_policy)
        self.__dict__["target"] = target  # shared and frozen: not a submodule, so neither trained nor saved here
        self.N, n_kv_head, self.on_policy = n_target_layers, n_kv_head or c.n_head, on_policy
        self.lsa = LSA(c, lsa_ffn) if lsa_ffn else None
        self.tokens = TokenMap(target)
        self.sa = Block(c.n_embd, c.n_head, n_kv_head, n_ffn, c.norm_eps)
        self.ca = CA(c.n_embd, c.n_head, n_kv_head, n_ffn, c.norm_eps)
        if self.N:
            self.register_buffer("mean", torch.zeros(c.n_embd))
            self.register_buffer("std", torch.ones(c.n_embd))
        self.reset()

    # -- drafting, step by step ----------------------------------------------------------------------------------------

    def reset(self):
        """Forget everything: the caches of a new text."""
        new = lambda: DraftCache(self.target, self.sa.self_attn.n_kv_head)
        self.sa_cache, self.ca_cache = new(), new()  # of tokens, verified and drafted; of the memory, verified only
        self.tli_cache = DraftCache(self.target, self.target.config.n_kv_head, self.N)

    def memory(self, cache, states):
        """What crosses from the target to the drafter, for the newest rows of the target's cache.

        states (B, T, C): the target's final normed states of those T tokens (of use to other drafters).
        -> s (B, T, C), and the last N layers' keys and values (N, B, nkv, T, 2 hs), empty for N = 0.
        """
        kv = cache.kv[:, :, :, cache.length - states.size(1) : cache.length]
        return self.lsa(kv) if self.lsa else states, kv[kv.size(0) - self.N :]

    def observe(self, memory):
        """Take in the memory of newly verified tokens. TLI's rows came from predictions: true ones replace them."""
        s, kv = memory
        n, end = self.ca_cache.length, self.ca_cache.length + s.size(1)
        self.ca_cache.write(0, *self.ca.keys_values(s, (self.target.cos[n:end], self.target.sin[n:end])))
        self.tli_cache.kv[:, :, :, n:end] = kv
        self.ca_cache.length = self.tli_cache.length = end

    def propose(self, ids, tokens=(), parents=(), n=1):
        """The draft's next level -> logits (n, V) of what follows each of its newest n nodes.

        ids: the text so far, one more than the memory holds. tokens, parents: the draft tree, node i behind node
        parents[i] < i, or behind the text if that is -1. With no tokens yet: of what follows the text, (1, V).
        """
        target = self.target
        new, positions, mask = self.sa_cache.place(ids, tokens, parents, n)
        x = run_blocks([self.sa], self.tokens(new), (target.cos, target.sin), self.sa_cache, positions, mask)
        if not tokens:  # of all that SA had to catch up with, the last is the one to go on from
            x, positions = x[:, -1:], positions[-1:]
            self.tli_cache.truncate(self.ca_cache.length)
        k, v = (part[:, :, : self.ca_cache.length] for part in self.ca_cache.layers[0])
        x = self.ca(x, k, v, (target.cos[positions], target.sin[positions]))
        if self.N:
            first = target.config.n_layer - self.N
            x = target.run_layers(self.mean + self.std * x, self.tli_cache, positions, mask, first_layer=first)
        return target.lm_head(x[0])

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
        x = run_blocks([self.sa], self.tokens(ids), rope, mask=sa_mask)
        x = entering = self.ca(x, *self.ca.keys_values(s, rope), rope, additive(ca_mask, s.dtype))
        if self.N:  # true keys up to the reset; then those of the predicted states since it
            own = torch.ones_like(ca_mask).tril() & ~ca_mask
            layers = target.model.layers[target.config.n_layer - self.N :]
            mask = torch.cat([ca_mask, own], -1)
            x = target.model.norm(run_blocks(layers, self.mean + self.std * x, rope, TruePrefix(kv), mask=mask))
        return x, entering

class EagleDrafter(nn.Module):
    """EAGLE (arXiv 2401.15077), the baseline: a block that continues the sequence of the target's final states.

        f_i = block(linear([norm(embedding of x_i), norm(f_{i-1})]))

    Trained on true f_{i-1} with noise, all positions in one pass. In drafting only the first f is true: from the second
    token on it reads its own predictions, which it never met in training; that is the off-policyness that CA cures. The
    norms are not in the original: here a state's scale is 15 times an embedding's, and without them it learns far slower.
    """

    N, on_policy = 0, False

    def __init__(self, target, n_kv_head=None, n_ffn=1376, noise=0.1):
        super().__init__()
        c = target.config
        self.settings = dict(n_kv_head=n_kv_head, n_ffn=n_ffn, noise=noise)
        self.__dict__["target"], self.noise = target, noise  # added in training, uniform in -noise..noise
        self.token_norm, self.state_norm = nn.RMSNorm(c.n_embd, c.norm_eps), nn.RMSNorm(c.n_embd, c.norm_eps)
        self.fc = nn.Linear(2 * c.n_embd, c.n_embd)
        self.block = Block(c.n_embd, c.n_head, n_kv_head or c.n_head, n_ffn, c.norm_eps)
        self.reset()

    def reset(self):
        self.cache = DraftCache(self.target, self.block.self_attn.n_kv_head)
        self.features = self.fc.weight.new_zeros(1, self.target.config.block_size + 1, self.fc.out_features)  # row i: f_{i-1}
        self.seen = 0

    def memory(self, cache, states):
        return (states,)

    def observe(self, memory):
        [states] = memory
        self.features[:, self.seen + 1 : self.seen + 1 + states.size(1)] = states
        self.seen += states.size(1)

    def propose(self, ids, tokens=(), parents=(), n=1):
        """As MoADrafter.propose. Rows of the text are computed from true states, each once, after their verification."""
        new, positions, mask = self.cache.place(ids, tokens, parents, n)
        features = self.predicted[:, [parent + 1 for parent in parents[-n:]]] if tokens else self.features[:, positions]
        state = self.next_states(new, features, self.cache, positions, mask)[:, -n:]
        self.predicted = torch.cat([self.predicted, state], 1) if tokens else state  # of the text's end, then of each node
        return self.target.lm_head(state[0])

    def next_states(self, ids, features, *args):
        x = torch.cat([self.token_norm(self.target.model.embed_tokens(ids)), self.state_norm(features)], -1)
        return run_blocks([self.block], self.fc(x).type_as(x), (self.target.cos, self.target.sin), *args)

    def forward(self, ids, memory, last_reset=None, staircase=False):
        """ids (B, T), memory of all T tokens -> predicted states (B, T, C), that of token i from true states before i."""
        [f] = memory
        noise = self.noise * (2 * torch.rand_like(f) - 1) if self.training else 0
        return self.next_states(ids, F.pad(f + noise, (0, 0, 1, 0))[:, :-1]), None

class IndependentDrafter(nn.Module):
    """The other baseline: a small GPT that reads tokens alone, between the target's embeddings and its LM head."""

    N, on_policy = 0, False

    def __init__(self, target, n_kv_head=None, n_ffn=560, n_layer=2):
        super().__init__()
        c = target.config
        self.settings = dict(n_kv_head=n_kv_head, n_ffn=n_ffn, n_layer=n_layer)
        self.__dict__["target"] = target
        self.layers = nn.ModuleList(Block(c.n_embd, c.n_head, n_kv_head or c.n_head, n_ffn, c.norm_eps) for _ in range(n_layer))
        self.tokens, self.norm = TokenMap(target), nn.RMSNorm(c.n_embd, c.norm_eps)
        self.reset()

    def reset(self):
        self.cache = DraftCache(self.target, self.layers[0].self_attn.n_kv_head, len(self.layers))

    def memory(self, cache, states):
        return ()

    def observe(self, memory):
        pass

    def propose(self, ids, tokens=(), parents=(), n=1):
        """As MoADrafter.propose."""
        new, positions, mask = self.cache.place(ids, tokens, parents, n)
        return self.target.lm_head(self.states(new, self.cache, positions, mask)[0, -n:])

    def states(self, ids, *args):
        return self.norm(run_blocks(self.layers, self.tokens(ids), (self.target.cos, self.target.sin), *args))

    def forward(self, ids, memory=(), last_reset=None, staircase=False):
        return self.states(ids), None

DRAFTERS = {  # name: class, settings; all of the same trained size, within 1%
    **{f"moa{N}": (MoADrafter, {"n_target_layers": N}) for N in (0, 1, 3)},
    "no-lsa": (MoADrafter, {"lsa_ffn": 0, "n_ffn": 560}), "no-ca": (MoADrafter, {"on_policy": False}),
    "eagle": (EagleDrafter, {}), "independent": (IndependentDrafter, {}),
}  # fmt: skip

# ---- Training --------------------------------------------------------------------------------------------------------

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
    """Train drafters side by side on the same windows of the corpus, the target frozen and its pass shared: all get the same
    data, steps, loss and learning rates, whatever a step costs each."""
    device, folder = pick_device(args.device), Path(args.weights)
    target, enc = load_target(folder, args.device)
    args.window = min(args.window, target.config.block_size)
    low, high = args.periods
    if not 2 <= low <= high:
        raise UserError(f"--periods takes two numbers, 2 <= low <= high, not {low} {high}")
    drafters = {}
    for name in args.drafter:
        torch.manual_seed(0)
        kind, settings = DRAFTERS[name]
        drafters[name] = load_drafter(target, folder / f"{name}.pt") if args.init else kind(target, **settings).to(device)
        drafters[name].requires_grad_(True).train()
    before = [getattr(drafter, "steps", 0) for drafter in drafters.values()]  # of earlier trainings
    stream, held_out = (tokenize(documents, enc) for documents in read_corpus(args.data))
    first = window_batch(stream, 0, args.batch, args.window).to(device)  # too little text shows here
    cache = target.new_cache(batch=args.batch)

    @torch.no_grad()
    def target_pass(ids):
        cache.length, entering = 0, []
        states = target.states(ids, cache, entering=entering).float()
        return states, target.lm_head(states).float(), entering

    def drafter_loss(drafter, ids, truth, seed, patterns, staircase=False):
        """-> mean loss over random patterns of resets on ids (B, T), terms and agreement of the last one. LSA runs once."""
        rng, i = torch.Generator().manual_seed(seed), torch.arange(ids.size(1), device=device)
        states, logits, entering = truth
        memory, total = [part.float() for part in drafter.memory(cache, states)], 0.0  # whatever autocast made of it
        for _ in range(patterns):
            periods = (low * ((high + 1) / low) ** torch.rand(len(ids), generator=rng)).long().to(device)  # log-uniform
            last_reset = periodic_resets(periods, len(i)) if drafter.on_policy else (i - 1).clamp(min=0).expand(len(ids), -1)
            mask = last_reset != i  # drafting never stands on a verified token
            state, entered = drafter(ids, memory, last_reset, staircase and drafter.on_policy)
            own = target.lm_head(state).float()
            pair = (entered.float(), (entering[-drafter.N] - drafter.mean) / drafter.std) if drafter.N else ()
            loss, terms = draft_loss(own, state.float(), logits, states, mask, *pair, ce_weight=args.ce_weight)
            total = total + loss / patterns
        return total, terms, (own.argmax(-1) == logits.argmax(-1))[mask].float().mean()

    def losses_at(step, progress):
        staircase = not args.init and random.Random(step).random() < 1 - 2 * progress
        ids = window_batch(stream, max(before) + step, args.batch, args.window).to(device)
        truth = target_pass(ids)
        for drafter in drafters.values():
            yield drafter_loss(drafter, ids, truth, step, args.patterns if drafter.on_policy else 1, staircase)[0]

    @torch.no_grad()
    def held_out_terms():
        """-> {name: terms} on one held-out batch, on-policy drafters over their distances, the others one token ahead."""
        ids = window_batch(held_out, 0, args.batch, min(args.window, len(held_out) // (args.batch + 2))).to(device)
        truth, out = target_pass(ids), {}
        for name, drafter in drafters.items():
            _, terms, agree = drafter_loss(drafter.eval(), ids, truth, 0, 1)
            out[name] = {**{term: round(value.item(), 4) for term, value in terms.items()}, "agreement": round(agree.item(), 4)}
            drafter.train()
        return out

    def report():
        return "held-out " + " ".join(f"{name} {t['cross_entropy']:.3f} ({t['agreement']:.1%})" for name, t in held_out_terms().items())

    entering = target_pass(first)[-1]
    for drafter in drafters.values():
        if drafter.N and not args.init:
            drafter.mean.copy_(entering[-drafter.N].float().mean((0, 1)))
            drafter.std.copy_(entering[-drafter.N].float().std((0, 1)).clamp(min=1e-2))
    steps = fit(list(drafters.values()), losses_at, report, args, identity=[*drafters, target_id(target)])
    print(report())
    for (name, drafter), terms, earlier in zip(drafters.items(), held_out_terms().values(), before):
        what = dict(kind=type(drafter).__name__, settings=drafter.settings, steps=earlier + steps)
        save_weights(folder / f"{name}.pt", drafter, **what, target=target_id(target))
        how = {key: getattr(args, key) for key in ("batch", "window", "periods", "patterns", "lr", "ce_weight")}
        how |= dict(parameters=sum(p.numel() for p in drafter.parameters()), tokens=what["steps"] * args.batch * args.window, held_out=terms, **what)
        (folder / f"{name}.json").write_text(json.dumps(how, indent=1) + "\n")

def target_id(target):
    """A number that tells one trained target from another."""
    return zlib.crc32(target.model.norm.weight.detach().cpu().half().numpy().tobytes())

def load_drafter(target, path=WEIGHTS / "moa0.pt"):
    """-> the drafter of any kind that was trained for this target. Raises UserError."""
    kinds = {kind.__name__: kind for kind in (MoADrafter, EagleDrafter, IndependentDrafter)}
    drafter, saved = load_weights(path, lambda saved: kinds[saved["kind"]](target, **saved["settings"]), "moa.py")
    if saved.get("target") != target_id(target):
        raise UserError(f"{path}: trained for another target than the one beside it; `python moa.py train` trains one for it")
    drafter.steps = saved.get("steps", 0)
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
def agreement(target, drafter, ids, start, horizon=8, stride=1):
    """How often the drafter's likeliest token is the target's, by distance from the last verified token, the tokens between
    being the text's own. Drafts as decoding does, from every stride-th token of ids behind `start` >= 1. -> horizon shares.
    """
    cache = target.new_cache()
    states = target.states(torch.tensor([ids], device=target.lm_head.weight.device), cache)
    want = target.lm_head(states)[0].argmax(-1).tolist()
    drafter.reset()
    hits, seen, froms = [0] * horizon, 0, range(start, len(ids) - horizon, stride)
    for t in froms:  # t tokens are verified, ids[t] is the target's own
        cache.length = t
        drafter.observe(drafter.memory(cache, states[:, seen:t]))
        seen = t
        for d in range(horizon):
            logits = drafter.propose(ids[: t + 1], ids[t + 1 : t + 1 + d], list(range(-1, d - 1)))
            hits[d] += logits[-1].argmax().item() == want[t + d]
    return [hit / len(froms) for hit in hits]

def main():
    parser = arguments(__doc__, "demo", "train")
    parser.add_argument("--drafter", nargs="+", metavar="NAME", choices=DRAFTERS, default=["moa0"],
                        help=f"one, or several that train side by side: {', '.join(DRAFTERS)} (default: moa0)")  # fmt: skip
    for name in ("no-lsa", "no-ca"):
        parser.add_argument(f"--{name}", dest="drafter", action="store_const", const=[name], help=f"short for --drafter {name}")
    training_arguments(parser, checkpoint="drafters.ckpt", batch=4, lr=0.04)
    parser.add_argument("--init", action="store_true", help="start from the drafters in --weights, to train them on")
    parser.add_argument("--periods", type=int, nargs=2, default=(3, 32), help="range of tokens between verifications")
    parser.add_argument("--patterns", type=positive(int), default=2, help="patterns of verifications tried on each batch")
    parser.add_argument("--ce-weight", type=float, default=1.0, help="weight of the cross-entropy (authors: 0.1)")
    args = parser.parse_args()
    if args.command == "train":
        return train(args)
    target, enc = load_target(args.weights, args.device)
    drafter = load_drafter(target, Path(args.weights) / f"{args.drafter[0]}.pt")
    ids = encode_prompts(args, enc)[0]
    text = ids + list(generate(target, ids, args.max_new_tokens, eot=enc.eot_token))
    if len(text) < max(12, len(ids) + 9):
        raise UserError("the anatomy needs a text of 12 tokens, 9 of them decoded: another --prompt, or more --max-new-tokens")
    if isinstance(drafter, MoADrafter):
        draw_masks()
        print("\nIn drafting, 8 verified tokens and 4 drafted ones (what the caches really hold):\n")
        with torch.inference_mode():
            cache = target.new_cache()
            states = target.states(torch.tensor([text[:8]], device=args.device), cache)
            drafter.reset()
            drafter.observe(drafter.memory(cache, states))
            for n in range(9, 13):
                drafter.propose(text[:9], text[9:n], list(range(-1, n - 10)))
                sa, ca = drafter.sa_cache.length, drafter.ca_cache.length
                print(f"  query {n - 1:2d}  SA {' '.join('■' * sa):25} CA {' '.join('■' * ca)}")

    print("\nAgreement with the target's likeliest token, by distance from the last verified one:\n")
    for distance, share in enumerate(agreement(target, drafter, text, len(ids)), 1):
        print(f"  {distance}  {'█' * round(40 * share):40} {share:.0%}")

if __name__ == "__main__":
    cli(main)
