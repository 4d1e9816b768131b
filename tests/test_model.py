"""The target alone: tokenizer, cache, masks, sampling, loss, weights on disk."""
import base64
import math
import socket

import pytest
import torch
from conftest import prompts, targets, tiny_target
from hypothesis import given
from hypothesis import strategies as st

from model import (EOT, WEIGHTS, GPT, GPTConfig, KVCache, Random, Sampling, UserError, attend, decode_stream, generate,
                   generate_naive, held_out_loss, load_target, load_tokenizer, read_corpus, save_weights, tokenize,
                   train_tokenizer, window_batch)  # fmt: skip

ENC = load_tokenizer()

# ---- Text ------------------------------------------------------------------------------------------------------------


@given(st.text())
def test_tokenizer_round_trips_any_text(text):
    ids = ENC.encode_ordinary(text)
    assert ENC.decode(ids) == text and ENC.eot_token not in ids


@given(st.lists(st.integers(0, ENC.n_vocab - 1)))
def test_streamed_pieces_join_to_the_whole(ids):
    """Any ids at all: halves of characters, broken UTF-8, the end of text."""
    assert "".join(decode_stream(ENC, ids)) == ENC.decode(ids)


def test_streaming_never_splits_a_character():
    ids = [ENC.encode_single_token(bytes([b])) for b in "añ漢🙂b".encode()]
    assert [piece for piece in decode_stream(ENC, ids) if piece] == ["a", "ñ", "漢", "🙂", "b"]


def test_typed_special_token_is_plain_text():
    ids = ENC.encode_ordinary(f"a{EOT}b")
    assert ENC.eot_token not in ids and ENC.decode(ids) == f"a{EOT}b"


def test_loading_touches_no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load_tokenizer().n_vocab == ENC.n_vocab


@pytest.mark.parametrize("damage", [
    lambda lines: lines[1:],  # a byte is missing
    lambda lines: lines[:-2] + lines[-1:],  # a rank is missing
    lambda lines: lines + ["!!! not base64"],
    lambda lines: lines[:-1] + ["!!! 2046"],
    lambda lines: lines + ["AAEC"],
])  # fmt: skip
def test_damaged_ranks_are_refused(damage, tmp_path):
    path = tmp_path / "ranks"
    path.write_text("\n".join(damage((WEIGHTS / "tokenizer.tiktoken").read_text().splitlines())))
    with pytest.raises(UserError):
        load_tokenizer(path)


def test_training_a_tokenizer(tmp_path):
    train_tokenizer(["the cat sat on the mat\n" * 20], tmp_path / "ranks", vocab_size=264)
    enc = load_tokenizer(tmp_path / "ranks")
    assert enc.n_vocab == 264 and len(enc.encode_ordinary("the cat sat")) < len("the cat sat")
    assert base64.b64decode((tmp_path / "ranks").read_text().split()[0]) == b"\0"


def test_corpus_is_divided_by_name_alone(tmp_path):
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"{i} " * 400)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 1000)
    train, held_out = read_corpus(tmp_path)
    assert train and held_out and not set(train) & set(held_out) and len(train + held_out) == 60
    (tmp_path / "another.txt").write_text("x" * 2000)
    again = read_corpus(tmp_path)
    assert set(held_out) <= set(again[1]) and set(train) <= set(again[0])
    (tmp_path / "one").write_text("".join(f"line {i}\n" for i in range(5000)))
    train, held_out = read_corpus(tmp_path / "one")  # a single file: its end is held out
    assert train[0] + held_out[0] == (tmp_path / "one").read_text()
    for missing in (tmp_path / "nothing", tmp_path / "binary"):
        with pytest.raises(UserError):
            read_corpus(missing)


@given(st.integers(0, 40), st.integers(1, 4), st.integers(2, 6))
def test_window_batches_cut_every_epoch_without_overlap(step, B, T):
    stream = torch.arange(101)
    ids = window_batch(stream, step, B, T)
    assert ids.shape == (B, T) and (ids[:, 1:] - ids[:, :-1] == 1).all()
    per_epoch = (101 // T - 1) // B
    epoch = [window_batch(stream, step // per_epoch * per_epoch + i, B, T) for i in range(per_epoch)]
    assert len(set(torch.cat(epoch).flatten().tolist())) == per_epoch * B * T
    with pytest.raises(UserError):
        window_batch(stream, 0, 200, T)


# ---- Model and cache -------------------------------------------------------------------------------------------------


@given(targets, prompts, st.lists(st.integers(0, 16), min_size=1, max_size=5))
def test_cached_forward_equals_the_full_one(target, prefix, new):
    """A prefix of n, then 1, 2, 5 new tokens: the causal triangle must end at the last row, not at the first."""
    cache = target.new_cache()
    target(torch.tensor([prefix]), cache)
    full = target(torch.tensor([prefix + new]))[:, len(prefix) :]
    assert torch.allclose(target(torch.tensor([new]), cache), full, atol=1e-9)
    assert cache.length == len(prefix) + len(new)


@given(targets, prompts, st.data())
def test_a_token_sees_itself_and_the_past_only(target, ids, data):
    at = data.draw(st.integers(0, len(ids) - 1))
    other = ids[:at] + [(ids[at] + 1) % 17] + ids[at + 1 :]
    a, b = target(torch.tensor([ids]))[0], target(torch.tensor([other]))[0]
    assert torch.allclose(a[:at], b[:at], atol=1e-12) and not torch.allclose(a[at], b[at], atol=1e-6)


def test_tree_branches_equal_chains():
    """Positions and mask of a small tree, verified in one pass; a path through the second child, gathered, equals a chain's
    prefill, and a sibling's token does not matter."""
    target = tiny_target(4)
    prefix, tokens, parents = [1, 2, 3], [4, 5, 6, 7, 8], [-1, 0, 0, 2, 2]  # 4 -> (5, 6 -> (7, 8))
    depth, mask = [], torch.eye(5, dtype=torch.bool)
    for i, parent in enumerate(parents):
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
        if parent >= 0:
            mask[i] |= mask[parent]
    for sibling in (5, 9):
        tokens[1] = sibling
        cache, chain = target.new_cache(), target.new_cache()
        target(torch.tensor([prefix]), cache)
        logits = target(torch.tensor([tokens]), cache, positions=3 + torch.tensor(depth), mask=mask)
        want = target(torch.tensor([prefix + [4, 6, 8]]), chain)
        assert torch.allclose(logits[0, [0, 2, 4]], want[0, 3:], atol=1e-9)
        cache.gather(3, [3, 5, 7])
        assert cache.length == 6 and torch.allclose(cache.kv[..., :6, :], chain.kv[..., :6, :], atol=1e-9)


def test_cache_lengths_are_exact_or_an_error():
    cache = KVCache(1, 1, 2, 4, torch.zeros(1))
    k = torch.randn(1, 1, 3, 2)
    cache.write(0, k, k)
    cache.length = 3
    for bad in (-1, 4):
        with pytest.raises(ValueError):
            cache.truncate(bad)
    with pytest.raises(ValueError, match="full"):
        cache.write(0, k[:, :, :2], k[:, :, :2])
    for start, rows in ((4, []), (1, [0]), (1, [2, 1]), (0, [1, 3]), (0, [1, 1]), (2, [-1])):
        with pytest.raises(ValueError):
            cache.gather(start, rows)
    assert cache.length == 3  # errors change nothing
    cache.gather(1, [2])
    assert cache.length == 2 and torch.equal(cache.kv[0, 0, 0, :2, :2], k[0, 0, [0, 2]])
    cache.truncate(0)
    assert cache.length == 0


@given(targets, prompts)
def test_cached_decoding_equals_naive(target, prompt):
    assert list(generate(target, prompt, 30)) == list(generate_naive(target, prompt, 30))


def test_llama_names_and_one_query_row():
    """State dicts speak Llama's names both ways; the single-row attention path equals the general one."""
    target, other = tiny_target(0), tiny_target(1)
    names = set(target.state_dict())
    assert {f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkvo"} <= names and "lm_head.weight" in names
    assert not any("qkv" in name or "gate_up" in name for name in names)
    other.load_state_dict(target.state_dict())
    assert torch.equal(other(torch.tensor([[1, 2]])), target(torch.tensor([[1, 2]])))
    q, k, v = torch.randn(2, 1, 4, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    assert torch.allclose(attend(q, k, v), attend(q, k, v, mask=torch.zeros(1, 5)), atol=1e-12)


# ---- Sampling --------------------------------------------------------------------------------------------------------

logit_lists = st.lists(st.floats(-50, 50), min_size=1, max_size=8)


@given(logit_lists, st.floats(0, 3), st.integers(0, 10), st.floats(0.01, 1))
def test_sampling_gives_a_distribution(logits, temperature, top_k, top_p):
    p = Sampling(temperature, top_k, top_p)(torch.tensor(logits))
    assert abs(p.sum() - 1) < 1e-9 and (p >= 0).all() and p.argmax() in torch.tensor(logits).eq(max(logits)).nonzero()


@given(st.lists(st.integers(-400, 400).map(lambda x: x / 8), min_size=1, max_size=8), st.integers(1, 10), st.floats(0.01, 0.99))
def test_top_k_and_top_p_keep_the_likeliest(logits, top_k, top_p):
    logits = torch.tensor(logits)
    full = logits.softmax(-1)
    kept = Sampling(1.0, top_k=top_k)(logits) > 0
    kth = sorted(logits.tolist())[-min(top_k, len(logits))]
    assert torch.equal(kept, (logits >= kth) & (full > 0))
    kept = Sampling(1.0, top_p=top_p)(logits) > 0
    assert full[kept].sum() >= top_p - 1e-9
    assert full[kept].sum() - full[kept].min() < top_p + 1e-9  # one fewer would not do


def test_sampling_edges():
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    assert Sampling(0)(logits).tolist() == [0, 1, 0, 0]  # the first of equals
    assert torch.allclose(Sampling(1.0, top_k=99)(logits), logits.softmax(-1))
    assert torch.allclose(Sampling(1.0, top_k=0, top_p=1.0)(logits), logits.softmax(-1))
    assert torch.allclose(Sampling(1e-300)(logits), torch.tensor([0, 0.5, 0.5, 0]))  # no overflow
    assert torch.allclose(Sampling(0.7)(torch.zeros(4)), torch.full((4,), 0.25))
    for bad in (dict(temperature=-1), dict(temperature=math.nan), dict(temperature=math.inf), dict(top_k=-1), dict(top_p=0),
                dict(top_p=1.1)):  # fmt: skip
        with pytest.raises(UserError):
            Sampling(**bad)


def test_random_primitives():
    assert [Random(3).draw(torch.ones(9)) for _ in range(3)] == [Random(3).draw(torch.ones(9))] * 3
    assert all(Random(s).draw(torch.tensor([0.0, 1.0, 0.0])) == 1 for s in range(50))

    class Fixed(Random):
        def uniform(self):
            return self.u

    rng, probs = Fixed(), torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    for rng.u, want in ((0.0, 1), (0.2499, 1), (0.25, 3), (1 - 2**-53, 3)):
        assert rng.draw(probs) == want


# ---- Loss and weights ------------------------------------------------------------------------------------------------


def test_held_out_loss_is_the_mean_over_every_token():
    """Against each token by itself; bits per byte leave the end-of-text marks out of the bytes."""
    target = tiny_target(0, vocab_size=ENC.n_vocab, block_size=8)
    stream = tokenize(["hello world, hello", "def f(x):\n    return x"], ENC)
    assert (stream == ENC.eot_token).sum() == 2 and stream[-1] == ENC.eot_token  # one behind each document
    nats, bits = held_out_loss(target, stream, ENC)
    ids, each = stream.long(), []
    for i in range(1, len(ids)):  # a token is predicted from its window's start
        first = (i - 1) // 8 * 8
        each.append(-target(ids[None, first:i])[0, -1].log_softmax(-1)[ids[i]].item())
    assert nats == pytest.approx(sum(each) / len(each))
    n_bytes = len("hello world, hello" + "def f(x):\n    return x")
    assert bits == pytest.approx(nats * len(ids) / n_bytes / math.log(2))


def flip(content, at):
    return content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :]


def test_weights_that_do_not_fit_are_one_line(tmp_path):
    target, enc = load_target()
    assert target.config.vocab_size == enc.n_vocab and target.lm_head.weight.dtype == torch.get_default_dtype()
    ranks = (WEIGHTS / "tokenizer.tiktoken").read_text()
    (tmp_path / "tokenizer.tiktoken").write_text(ranks)
    small = GPT(GPTConfig(vocab_size=enc.n_vocab, n_layer=1, n_embd=8, n_ffn=8))
    for damage in (
        lambda path: None,  # missing
        lambda path: path.write_bytes(b"junk"),
        lambda path: path.write_bytes((WEIGHTS / "target.pt").read_bytes()[:5000]),
        lambda path: path.write_bytes(flip((WEIGHTS / "target.pt").read_bytes(), 5_000_000)),
        lambda path: torch.save({"weights": {}}, path),
        lambda path: save_weights(path, small, config={"n_layer": 2}, tokenizer=0),
        lambda path: save_weights(path, small, config={"vocab_size": enc.n_vocab, "n_layer": 1, "n_embd": 8, "n_ffn": 8}, tokenizer=1),
    ):  # fmt: skip
        damage(tmp_path / "target.pt")
        with pytest.raises(UserError) as error:
            load_target(tmp_path)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError):
        load_target(WEIGHTS, device="nonsense")
