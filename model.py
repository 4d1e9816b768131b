"""The target: a small Llama-style GPT, its tokenizer, KV cache, sampling, plain decoding and training. Start here.

    python model.py                       # decode held-out prompts twice: recomputing everything, and with a KV cache
    python model.py train --minutes 60    # train on the standard library's sources, or --data PATH
    python model.py eval                  # held-out loss

Shapes: B batch, T new tokens, S tokens in the cache after them, C = n_embd, V = vocab_size, L = n_layer, nh = n_head,
nkv = n_kv_head, hs = C / nh. State dicts carry Llama's names, so Llama-style checkpoints load by name.
"""
import argparse, base64, codecs, math, os, random, statistics, sys, sysconfig, time, zipfile, zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F

WEIGHTS = Path(__file__).resolve().parent / "weights"
EOT = "<|endoftext|>"
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"  # words, digits, signs, spaces

class UserError(Exception):
    """Bad input from the person at the terminal; every demo prints it as one line."""

# ---- Text ------------------------------------------------------------------------------------------------------------

def load_tokenizer(path=WEIGHTS / "tokenizer.tiktoken"):
    """-> tiktoken.Encoding: ranks 0..n-1 from the file, <|endoftext|> is n. Never touches a network. Raises UserError.

    Encode what a person typed with `encode_ordinary`: "<|endoftext|>" is plain text there.
    """
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `python model.py train --weights {path.parent}` makes it") from None
    except ValueError:
        raise UserError(f"{path}: not a rank file (a line: base64 of a token's bytes, a space, its rank)") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([b]) in ranks for b in range(256)):
        raise UserError(f"{path}: ranks must run 0..n-1 and cover all 256 single bytes")
    return tiktoken.Encoding("local", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={EOT: len(ranks)})

def decode_stream(enc, ids):
    """Yield text as ids arrive, whole characters only: the joined pieces equal enc.decode(ids)."""
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for i in ids:
        yield utf8.decode(enc.decode_single_token_bytes(i))
    yield utf8.decode(b"", final=True)

# ---- The model -------------------------------------------------------------------------------------------------------

@dataclass
class GPTConfig:
    vocab_size: int = 2048
    n_layer: int = 24
    n_head: int = 4
    n_kv_head: int = 1  # grouped-query attention: nh / nkv query heads share one key/value head
    n_embd: int = 256
    n_ffn: int = 448
    block_size: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True

def add_fused_linear(parent, name, n_in, **n_out):
    """Give `parent` several projections of one input as a single matmul; state dicts keep their separate Llama names."""
    parent.add_module(name, nn.Linear(n_in, sum(n_out.values()), bias=False))

    def split(_, state, prefix, __):
        pieces = state.pop(f"{prefix}{name}.weight").split(list(n_out.values()))
        state.update({f"{prefix}{part}.weight": piece for part, piece in zip(n_out, pieces)})

    def join(_, state, prefix, *__):
        parts = [f"{prefix}{part}.weight" for part in n_out]
        if all(part in state for part in parts):
            state[f"{prefix}{name}.weight"] = torch.cat([state.pop(part) for part in parts])

    parent.register_state_dict_post_hook(split)
    parent.register_load_state_dict_pre_hook(join)

def rope_tables(n, hs, theta):
    """-> cos and sin of n positions, each (n, 1, hs), computed in float32 as Llama's reference code does. sin carries the
    sign of rotate-half, so that a rotation is x * cos + roll(x) * sin."""
    angle = torch.outer(torch.arange(n).float(), 1 / theta ** (torch.arange(0, hs, 2).float() / hs))
    tables = angle.cos().repeat(1, 2), torch.cat([-angle.sin(), angle.sin()], -1)
    return [table.unsqueeze(1).to(torch.get_default_dtype()) for table in tables]

def apply_rope(x, cos, sin):
    """Rotary position embedding in Llama's half-split convention. x (B, T, heads, hs); cos, sin (T, 1, hs)."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)

def attend(q, k, v, mask=None, causal=False):
    """Grouped-query attention. q (B, T, nh, hs); k, v (B, nkv, S, hs) -> (B, T, nh * hs).

    mask: additive, broadcast to (B, nh, T, S). `causal` is for T == S only. Neither: every query sees all S keys.
    """
    B, T, nh, hs = q.shape
    if T == 1 and mask is None:  # the heads that share a key become query rows of it, so that no key is repeated
        return F.scaled_dot_product_attention(q.view(B, k.size(1), -1, hs), k, v).reshape(B, 1, nh * hs)
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return y.transpose(1, 2).reshape(B, T, nh * hs)

class Attention(nn.Module):
    def __init__(self, n_embd, n_head, n_kv_head):
        super().__init__()
        self.n_head, self.n_kv_head, self.hs = n_head, n_kv_head, n_embd // n_head
        add_fused_linear(self, "qkv_proj", n_embd, q_proj=n_embd, k_proj=n_kv_head * self.hs, v_proj=n_kv_head * self.hs)
        self.o_proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x, rope, mask=None, causal=False, cache=None, layer=0):
        qkv = self.qkv_proj(x).view(*x.shape[:2], -1, self.hs)  # (B, T, nh + 2 nkv, hs)
        qk, v = qkv.split([self.n_head + self.n_kv_head, self.n_kv_head], dim=2)
        q, k = apply_rope(qk, *rope).split([self.n_head, self.n_kv_head], dim=2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # (B, nkv, T, hs)
        if cache is not None:
            k, v = cache.write(layer, k, v)  # (B, nkv, S, hs)
        return self.o_proj(attend(q, k, v, mask, causal))

class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, n_embd, n_ffn):
        super().__init__()
        add_fused_linear(self, "gate_up_proj", n_embd, gate_proj=n_ffn, up_proj=n_ffn)
        self.down_proj = nn.Linear(n_ffn, n_embd, bias=False)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)

class Block(nn.Module):
    """One pre-norm transformer layer, (B, T, C) -> (B, T, C)."""

    def __init__(self, n_embd, n_head, n_kv_head, n_ffn, norm_eps):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(n_embd, norm_eps)
        self.self_attn = Attention(n_embd, n_head, n_kv_head)
        self.post_attention_layernorm = nn.RMSNorm(n_embd, norm_eps)
        self.mlp = MLP(n_embd, n_ffn)

    def forward(self, x, *args):
        x = x + self.self_attn(self.input_layernorm(x), *args)
        return x + self.mlp(self.post_attention_layernorm(x))

class KVCache:
    """Keys (after RoPE) and values of some layers for the first `length` tokens, allocated once and written in place.

    Rows past `length` are scratch and never read, whatever they hold. kv (L, B, nkv, S_max, 2 hs) keeps [key; value] of a
    head side by side, so that a slice of it is what MoA's layer self-attention reads.
    """

    def __init__(self, n_layer, n_kv_head, hs, n_max, like, batch=1):
        self.kv = torch.zeros(n_layer, batch, n_kv_head, n_max, 2 * hs, dtype=like.dtype, device=like.device)
        self.layers = [(kv[..., :hs], kv[..., hs:]) for kv in self.kv]  # views
        self.length = 0

    def write(self, layer, k, v):
        """k, v (B, nkv, T, hs) go behind the first `length` rows of a layer -> its k, v (B, nkv, length + T, hs). Raises
        ValueError when full. `length` itself moves once a pass, when every layer has written."""
        K, V = self.layers[layer]
        end = self.length + k.size(2)
        if end > K.size(2):
            raise ValueError(f"the cache is full: {self.length} + {k.size(2)} tokens do not fit in {K.size(2)}")
        K[:, :, self.length : end] = k
        V[:, :, self.length : end] = v
        return K[:, :, :end], V[:, :, :end]

    def truncate(self, length):
        """Keep exactly the first `length` tokens. Raises ValueError unless 0 <= length <= self.length."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} tokens to {length}")
        self.length = length

    def gather(self, start, rows):
        """Keep the first `start` tokens, and behind them these rows (increasing, >= start). Raises ValueError."""
        if not start <= self.length or any(not a < b for a, b in zip([start - 1, *rows], [*rows, self.length])):
            raise ValueError(f"cannot gather rows {rows} behind {start} from a cache of {self.length} tokens")
        if rows != list(range(start, start + len(rows))):
            self.kv[:, :, :, start : start + len(rows)] = self.kv[:, :, :, rows]
        self.length = start + len(rows)

def additive(mask, dtype):
    """Boolean mask, True = may see -> what is added to attention scores: 0 or -inf."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)

def run_blocks(blocks, x, rope, cache=None, positions=None, mask=None, entering=None):
    """x (B, T, C) through transformer blocks, behind the n tokens that `cache` holds; they are added to it.

    positions (T,): those of the new tokens, by default n..n+T-1. mask (..., T, m) bool: which of the last m rows, the new
    tokens' own included, each new token sees; by default causal; all see the rows before those. entering: a list, gets the
    state entering each block.
    """
    T, n = x.size(1), cache.length if cache else 0
    rope = [table[n : n + T] if positions is None else table[positions] for table in rope]
    causal, bias = mask is None and n == 0, None
    if mask is not None or (n and T > 1):  # is_causal would align its triangle to the wrong corner
        mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril() if mask is None else mask
        bias = F.pad(additive(mask, x.dtype), (max(0, n + T - mask.size(-1)), 0))  # (..., T, n + T)
    for i, block in enumerate(blocks):
        if entering is not None:
            entering.append(x)
        x = block(x, rope, bias, causal, cache, i)
    if cache:
        cache.length += T
    return x

class GPT(nn.Module):
    """Decoder-only transformer: RMSNorm before each sublayer, RoPE, grouped-query attention, SwiGLU, no biases."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        blocks = (Block(c.n_embd, c.n_head, c.n_kv_head, c.n_ffn, c.norm_eps) for _ in range(c.n_layer))
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(c.vocab_size, c.n_embd), "layers": nn.ModuleList(blocks),
                                    "norm": nn.RMSNorm(c.n_embd, c.norm_eps)})  # fmt: skip
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        for name, table in zip(("cos", "sin"), rope_tables(c.block_size, c.n_embd // c.n_head, c.rope_theta)):
            self.register_buffer(name, table, persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # the 2 L projections that add to the residual stream start smaller
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * c.n_layer) if "o_proj" in name or "down_proj" in name else 0.02)

    def new_cache(self, batch=1, spare=0):
        """An empty cache of block_size rows, and `spare` ones more for the branches of a draft tree."""
        c = self.config
        return KVCache(c.n_layer, c.n_kv_head, c.n_embd // c.n_head, c.block_size + spare, self.lm_head.weight, batch)

    def run_layers(self, x, cache=None, positions=None, mask=None, entering=None, first_layer=0):
        """Layers first_layer..L-1 and the final norm, (B, T, C) -> (B, T, C). The other arguments are run_blocks's."""
        blocks = self.model.layers[first_layer:]
        return self.model.norm(run_blocks(blocks, x, (self.cos, self.sin), cache, positions, mask, entering))

    def states(self, idx, *args, **kwargs):
        """idx (B, T) -> the final normed states (B, T, C), which lm_head turns into logits."""
        return self.run_layers(self.model.embed_tokens(idx), *args, **kwargs)

    def forward(self, idx, *args, **kwargs):
        """idx (B, T) -> logits (B, T, V)."""
        return self.lm_head(self.states(idx, *args, **kwargs))

# ---- Plain decoding --------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Sampling:
    """Logits -> the distribution that is drawn from; the one definition, for target and drafter alike.

    temperature 0 is greedy: all mass on the largest logit, the first of equals. top_k 0 and top_p 1 are off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature must be finite and >= 0 (0 is greedy), not {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top-k must be >= 0 (0 is off), not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p must lie in (0, 1] (1 is off), not {self.top_p}")

    def __call__(self, logits):
        """logits (..., V) -> probabilities (..., V), float64 on the CPU."""
        logits = logits.to("cpu", torch.float64)
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # the maximum first: nothing overflows
        if 0 < self.top_k < logits.size(-1):  # all that tie with the k-th stay: no order among equals
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[..., -1:], -math.inf)
        probs = logits.softmax(-1)
        if self.top_p < 1:  # the fewest likeliest tokens whose mass reaches top_p
            ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
            dropped = ordered.cumsum(-1) - ordered >= self.top_p
            probs = probs.masked_fill(dropped.scatter(-1, ids, dropped), 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs

class Random:
    """All the randomness of decoding: a seed and two primitives, so that a test can put an enumerating source in its place."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed % 2**63)

    def uniform(self):
        return torch.rand((), generator=self.generator, dtype=torch.float64).item()  # in [0, 1)

    def coin(self, p):
        """True with probability p: strictly u < p, so never for p = 0 and always for p = 1."""
        return self.uniform() < p

    def draw(self, probs):
        """probs (V,) -> an index drawn with these probabilities: the first whose cumulative mass exceeds u, so p > 0."""
        mass = probs.cumsum(0)
        total = mass[-1].item()
        return torch.searchsorted(mass, min(self.uniform() * total, math.nextafter(total, 0)), right=True).item()

def check_prompt(config, ids, max_new_tokens):
    """-> how many tokens may follow the prompt: max_new_tokens, or fewer where block_size ends. Raises UserError."""
    if not 1 <= len(ids) <= config.block_size:
        raise UserError(f"the prompt has {len(ids)} tokens; this model takes 1 to {config.block_size}")
    if not 0 <= min(ids) <= max(ids) < config.vocab_size:
        raise UserError(f"the prompt has ids outside 0..{config.vocab_size - 1}: made by another tokenizer?")
    if max_new_tokens < 0:
        raise UserError(f"max-new-tokens must be >= 0, not {max_new_tokens}")
    return min(max_new_tokens, config.block_size - len(ids))

@torch.inference_mode()
def generate(target, ids, max_new_tokens, sampling=Sampling(), rng=None, eot=None):
    """Plain decoding: yield ids one by one, each for one pass over one token. Ends after `eot`. Raises UserError."""
    rng, cache, new = rng or Random(), target.new_cache(), ids
    for _ in range(check_prompt(target.config, ids, max_new_tokens)):
        idx = torch.tensor([new], device=target.lm_head.weight.device)
        token = rng.draw(sampling(target.lm_head(target.states(idx, cache)[0, -1])))
        yield token
        if token == eot:
            return
        new = [token]

@torch.inference_mode()
def generate_naive(target, ids, max_new_tokens, sampling=Sampling(), rng=None, eot=None):
    """The same tokens without a cache, each for a pass over everything before it: the oracle, and what caching saves."""
    rng, ids = rng or Random(), list(ids)
    for _ in range(check_prompt(target.config, ids, max_new_tokens)):
        ids.append(rng.draw(sampling(target(torch.tensor([ids], device=target.lm_head.weight.device))[0, -1])))
        yield ids[-1]
        if ids[-1] == eot:
            return

# ---- Weights and prompts on disk -------------------------------------------------------------------------------------

def save(path, content):
    """torch.save, whole or not at all."""
    with open(f"{path}.new", "wb") as file:
        torch.save(content, file)
    os.replace(f"{path}.new", path)

def save_weights(path, module, **meta):
    """A module's own weights in fp16 (tied ones once), and plain values beside them."""
    half = {}
    weights = {name: half.setdefault(p.data_ptr(), p.detach().cpu().half()) for name, p in module.state_dict().items()}
    save(path, {**meta, "weights": weights})

def load_weights(path, build, script):
    """-> (build(saved) with the saved weights, frozen; saved). Raises UserError for a missing, damaged or strange file."""
    hint = f"`python {script} train --weights {path.parent}`"
    try:
        if bad := zipfile.ZipFile(path).testzip():  # torch itself does not compare checksums
            raise ValueError(bad)
        saved = torch.load(path, map_location="cpu", weights_only=True)  # tensors and plain values, never code
        module = build(saved)
        module.load_state_dict(saved["weights"])
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {hint} makes it") from None
    except UserError:
        raise
    except Exception as e:  # torch raises half a dozen types for a damaged file
        raise UserError(f"{path}: not weights of this version, or damaged ({type(e).__name__}); {hint} makes them anew") from None
    return module.requires_grad_(False).eval(), saved

def load_target(folder=WEIGHTS, device="cpu"):
    """-> (GPT in float32, its tokenizer). Raises UserError where one is missing or they are not of one training."""
    path, device = Path(folder) / "target.pt", pick_device(device)
    enc = load_tokenizer(path.with_name("tokenizer.tiktoken"))
    target, saved = load_weights(path, lambda saved: GPT(GPTConfig(**saved["config"])), "model.py")
    if saved.get("tokenizer") != fingerprint(enc):
        raise UserError(f"{path}: trained with another tokenizer than the one beside it; put that one back, or train in a new folder")
    return target.to(device), enc

def fingerprint(enc):
    return zlib.crc32(b"\n".join(map(enc.decode_single_token_bytes, range(enc.n_vocab))))

def pick_device(name):
    try:
        torch.zeros(1, device=name).cpu()
        return torch.device(name)
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"device {name!r} cannot be used here: {str(e).splitlines()[0]}") from None

def write_prompts(path, documents, enc, length, n=20):
    """Held-out prompts as plain text, so that every machine decodes the same: `length` tokens from each of n documents, or
    several from each of fewer."""
    rng, prompts, documents = random.Random(0), [], sorted(documents, key=len)[-n:]
    for i in range(n):
        ids = enc.encode_ordinary(documents[i % len(documents)])
        start = rng.randrange(max(1, len(ids) - length))
        prompts.append(enc.decode(ids[start : start + length]))
    path.write_text(f"\n{EOT}\n".join(prompts), encoding="utf-8")

def encode_prompts(args, enc):
    """-> ids of --prompt (an empty one opens a document), or of each held-out prompt beside the weights. Raises UserError."""
    path, texts = Path(args.weights) / "prompts.txt", [args.prompt]
    if args.prompt is None:
        if not path.exists():
            raise UserError(f"{path}: no such file; give a --prompt")
        texts = path.read_text(encoding="utf-8", errors="replace").split(f"\n{EOT}\n")
    return [enc.encode_ordinary(text) or [enc.eot_token] for text in texts]

# ---- Training --------------------------------------------------------------------------------------------------------

def read_corpus(path=None):
    """-> (training documents, held-out documents), lists of str, one a file. Raises UserError.

    Default: the Python standard library's own sources, tests included, generated tables left out. A module that is not a
    test is held out when a hash of its name says so, about one in twenty. Any other file or folder: likewise by name.
    """
    root = Path(path or sysconfig.get_paths()["stdlib"])
    skip = set() if path else {"site-packages", "dist-packages", "encodings", "pydoc_data"}
    train, held_out = [], []
    for file in [root] if root.is_file() else sorted(root.rglob("*" if path else "*.py")):
        name = file.relative_to(root if root.is_dir() else root.parent)
        if not file.is_file() or skip & set(name.parts):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):  # a few of Python's tests are deliberately not UTF-8
            continue
        is_test = not path and {"test", "tests", "idle_test"} & set(name.parts)
        (train if is_test or zlib.crc32(name.as_posix().encode()) % 20 else held_out).append(text)
    if not train or sum(map(len, held_out)) < 1000:  # too few files to choose from: hold out the end of the text instead
        text = "\n".join(train + held_out)
        train, held_out = [text[: len(text) * 19 // 20]], [text[len(text) * 19 // 20 :]]
    if len(held_out[0]) < 1000 and len(held_out) == 1:
        raise UserError(f"{root}: found too little UTF-8 text; --data takes a file or folder of 20 kB and more")
    return train, held_out

def train_tokenizer(documents, path, vocab_size=2048, sample=1_000_000):
    """Learn a BPE from `sample` characters taken all over the documents; write it in tiktoken's rank format."""
    from tiktoken._educational import bpe_train

    text, rng = "\n".join(documents), random.Random(0)
    if len(text) > sample:
        text = "".join(text[i : i + 2000] for i in (rng.randrange(len(text) - 2000) for _ in range(sample // 2000)))
    try:
        ranks = bpe_train(text, vocab_size - 1, PATTERN, visualise=None)
    except ValueError:  # no pair left to merge
        raise UserError(f"{len(text)} characters are too little text for a vocabulary of {vocab_size}") from None
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))

def tokenize(documents, enc):
    """-> (n,) int32: the ids of all documents, <|endoftext|> behind each."""
    return torch.tensor([i for text in documents for i in [*enc.encode_ordinary(text), enc.eot_token]], dtype=torch.int32)

def window_batch(stream, step, B, T):
    """-> ids (B, T). Each epoch cuts the stream at another offset and shuffles the pieces; a function of `step` alone, so
    that a resumed run needs no state of the data. Raises UserError where the text is too short."""
    n = len(stream) // T - 1
    if n < B:
        raise UserError(f"{len(stream)} tokens are too few for batches of {B} x {T}: more text, or a smaller --batch")
    epoch, k = divmod(step, n // B)
    rng = torch.Generator().manual_seed(epoch)
    starts = torch.randint(T, (1,), generator=rng) + torch.randperm(n, generator=rng)[k * B : (k + 1) * B] * T
    return stream[starts[:, None] + torch.arange(T)].long()

def fast_bfloat16(device):
    """Whether this machine multiplies bfloat16 much faster than float32; others are a hundred times slower at it."""
    def seconds(dtype):
        a = torch.randn(1024, 1024, device=device, dtype=dtype)
        start = time.perf_counter()
        (a @ a).sum().item()
        return time.perf_counter() - start

    return min(seconds(torch.bfloat16) for _ in range(5)) < 0.5 * min(seconds(torch.float32) for _ in range(5))

def fit(modules, losses_at, report, args, identity):
    """Train modules side by side for args.minutes or args.steps -> number of steps. losses_at(step, progress) yields the
    loss of each in turn. With args.resume, go on from args.checkpoint, if it is of the same `identity` (a list of plain
    values). Raises UserError.

    The blocks' matrices are trained by Muon where its bfloat16 iterations are fast, all else by AdamW. Learning rates rise
    in 20 steps, stay, and fall linearly to zero over the last 70% of the budget.
    """
    named = [(name, p) for module in modules for name, p in module.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in named if p.dim() != 2 or "embed" in name]
    device, saved = others[0].device, {}
    if args.resume:
        try:
            saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        except Exception as e:  # torch raises half a dozen types for a damaged file
            raise UserError(f"{args.checkpoint}: no checkpoint to resume from ({type(e).__name__})") from None
        if saved.get("identity") != identity:
            raise UserError(f"{args.checkpoint}: of another run ({saved.get('identity')}, not {identity}); train without --resume")
    fast = saved["fast"] if saved else fast_bfloat16(device)  # a resumed run keeps its optimisers
    precision = torch.autocast(device.type, torch.bfloat16, enabled=fast)
    if fast:
        optimizers = [torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.01)]
    else:
        optimizers = [torch.optim.AdamW(matrices, lr=args.lr / 10, betas=(0.9, 0.95), weight_decay=0.1)]
    optimizers.append(torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0))
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    step, spent, tokens = 0, 0.0, 0
    if saved:
        for part, state in zip([*modules, *optimizers], saved["states"]):
            part.load_state_dict(state)
        step, spent = saved["step"], saved["spent"]
        print(f"resumed at step {step}, {spent / 60:.1f} minutes spent", flush=True)
    reported, written, start = time.time(), 0.0, time.time() - spent
    done = lambda: step / args.steps if args.steps else spent / (args.minutes * 60)
    while (progress := done()) < 1:
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]["lr"] = peak * min(1, (step + 1) / 20, (1 - progress) / 0.7)
            optimizer.zero_grad()
        losses = []
        with precision:
            for loss in losses_at(step, progress):  # one graph at a time
                losses.append(loss.item())
                with torch.autocast(device.type, enabled=False):
                    loss.backward()
        if not all(map(math.isfinite, losses)):
            raise UserError(f"the loss became {losses} at step {step}; the last checkpoint is {args.checkpoint}")
        for module in modules:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step, spent, tokens = step + 1, time.time() - start, tokens + args.batch * args.window
        if time.time() - reported > 60:
            with precision:
                line = report()
            print(f"step {step}  loss {' '.join(f'{loss:.3f}' for loss in losses)}  {line}  "
                  f"{tokens / (time.time() - reported):.0f} tokens/s  {spent / done() * (1 - done()) / 60:.1f} min left", flush=True)  # fmt: skip
            reported, tokens = time.time(), 0
        if time.time() - written > args.save_every * 60:  # after the first step too: a bad path shows at once
            save(args.checkpoint, {"identity": identity, "step": step, "spent": spent, "fast": fast,
                                   "states": [part.state_dict() for part in [*modules, *optimizers]]})  # fmt: skip
            written = time.time()
    return step

@torch.inference_mode()
def held_out_loss(target, stream, enc, windows=None):
    """-> (nats per token, bits per byte) over a stream of ids, in windows of block_size: all, or the first so many."""
    T, total, count = target.config.block_size, 0.0, 0
    for i in range(0, len(stream) - 1, T)[:windows]:
        ids = stream[i : i + T + 1].long().to(target.lm_head.weight.device)
        total += F.cross_entropy(target(ids[None, :-1])[0].float(), ids[1:], reduction="sum").item()
        count += len(ids) - 1
    n_bytes = sum(len(enc.decode_single_token_bytes(i)) for i in stream.tolist() if i != enc.eot_token)
    return total / count, total / count * len(stream) / n_bytes / math.log(2)

def train(args):
    """Train the target; first what it stands on, the tokenizer (if the folder has none) and the held-out prompts."""
    device, folder = pick_device(args.device), Path(args.weights)
    if args.window < 4:
        raise UserError(f"--window must be >= 4, not {args.window}")
    documents, held_out = read_corpus(args.data)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.tiktoken").exists():
        print("training the tokenizer: once, about ten minutes", flush=True)
        train_tokenizer(documents, folder / "tokenizer.tiktoken")
    enc = load_tokenizer(folder / "tokenizer.tiktoken")
    write_prompts(folder / "prompts.txt", held_out, enc, length=min(64, args.window // 2))
    stream, held_out = tokenize(documents, enc), tokenize(held_out, enc)
    torch.manual_seed(0)
    target = GPT(GPTConfig(vocab_size=enc.n_vocab, block_size=args.window)).to(device)
    forward = torch.compile(target) if args.compile else target

    def losses_at(step, progress):
        ids = window_batch(stream, step, args.batch, args.window).to(device)
        yield F.cross_entropy(forward(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())

    def report(windows=20):
        return "held-out {:.3f} nats/token {:.3f} bits/byte".format(*held_out_loss(target, held_out, enc, windows))

    fit([target], losses_at, report, args, identity=["target", fingerprint(enc), args.window])
    save_weights(folder / "target.pt", target, config=asdict(target.config), tokenizer=fingerprint(enc))
    print(report(windows=None))

# ---- Command line ----------------------------------------------------------------------------------------------------

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; --help shows what there is")

def positive(kind):
    """-> an argument type: `kind`, and > 0."""
    def parse(text):
        if not kind(text) > 0:
            raise argparse.ArgumentTypeError(f"must be > 0, not {text}")
        return kind(text)
    return parse

def arguments(description, *commands):
    """-> the parser that all files share; the first of the commands is the default."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=commands, default=commands[0])
    parser.add_argument("--weights", default=WEIGHTS, help="folder of weights, tokenizer and prompts (default: weights/)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: %(default)s)")
    parser.add_argument("--prompt", help="decode this text instead of the held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="fewer where the context ends (default: %(default)s)")
    return parser

def training_arguments(parser, checkpoint, batch, lr=0.02):
    add = parser.add_argument_group("training").add_argument
    add("--minutes", type=positive(float), default=60, help="time budget, that of resumed runs included (default: %(default)s)")
    add("--steps", type=positive(int), help="a budget of steps in place of minutes")
    add("--data", help="a text file or a folder of them (default: the Python standard library)")
    add("--batch", type=positive(int), default=batch, help="windows a step (default: %(default)s)")
    add("--lr", type=positive(float), default=lr, help="Muon's, of the blocks' matrices; a tenth of it AdamW's (default: %(default)s)")
    add("--window", type=positive(int), default=512, help="tokens a window (default: %(default)s)")
    add("--checkpoint", default=checkpoint, help="where to (default: %(default)s)")
    add("--save-every", type=float, default=5, help="minutes between checkpoints (default: %(default)s)")
    add("--resume", action="store_true", help="go on from the checkpoint")

def cli(main):
    """Run a demo; what a person can cause ends in one clear line, not in a traceback."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # closed by the caller
    sys.stdout.reconfigure(errors="replace")  # a terminal that knows ASCII only
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output went away
        os._exit(1)
    except (UserError, OSError) as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)

def main():
    parser = arguments(__doc__, "demo", "train", "eval")
    training_arguments(parser, checkpoint="target.ckpt", batch=8)
    parser.add_argument("--compile", action="store_true", help="train with torch.compile: faster, needs a C++ compiler")
    args = parser.parse_args()
    if args.command == "train":
        return train(args)
    target, enc = load_target(args.weights, args.device)
    if args.command == "eval":
        stream = tokenize(read_corpus(args.data)[1], enc)
        return print("held-out {:.3f} nats/token, {:.3f} bits/byte".format(*held_out_loss(target, stream, enc)))
    rates = []
    for ids in encode_prompts(args, enc)[:3]:
        texts, seconds = [], []
        for decode in (generate_naive, generate):
            start = time.perf_counter()
            texts.append(list(decode(target, ids, args.max_new_tokens, eot=enc.eot_token)))
            seconds.append(time.perf_counter() - start)
        rates.append([len(texts[0]) / s for s in seconds])
        print(enc.decode(ids + texts[0]), "-" * 80, sep="\n")
        print("naive {:.0f}, cached {:.0f} tokens/s;".format(*rates[-1]), "identical:", "yes" if texts[0] == texts[1] else "NO")
    naive, cached = map(statistics.median, zip(*rates))
    print(f"median: naive {naive:.0f}, cached {cached:.0f} tokens/s, {cached / max(naive, 1e-9):.1f}x")

if __name__ == "__main__":
    cli(main)
