"""The split over a network: the text is plain decoding's whatever the network does, and the server outlives every input."""
import io
import math
import os
import random
import socket
import threading
from argparse import Namespace
from collections import deque

import numpy as np
import pytest
import torch
from conftest import KINDS, Scripted, any_drafter, tiny_moa, tiny_target
from hypothesis import given, settings
from hypothesis import strategies as st

import serve_local
from model import WEIGHTS, Sampling, UserError, generate, load_target
from moa import load_drafter
from serve_local import (PREFIX, PROFILES, REPLY_LIMIT, REQUEST_LIMIT, Client, Connection, Coupled, Disconnected, FrameError, Link, Profile,
                         Server, Service, api_client, converse, decode_memory, encode_memory, keep_client_side,
                         memory_bytes, pack, pack_ids, read_frame, server_process, timeline)  # fmt: skip
from speculative import near_tie

SECRET = "let me in"


def clock():
    """A timer that moves by a millisecond whenever it is read: compute that is the same on every machine."""
    ticks = iter(range(10**9))
    return lambda: next(ticks) / 1e3


class Pipe:
    """A connection to a Service in this process, over the production's own framing. faults: what happens to each message in
    turn; after them the network is good."""

    def __init__(self, service, faults=(), seed=0):
        self.make = service if callable(service) else lambda: service
        self.service, self.faults, self.random = self.make(), iter(faults), random.Random(seed)
        self.inbox, self.late_request, self.late_replies, self.sent = deque(), None, [], 0

    def serve(self, data):
        """-> the replies to these bytes, each a frame."""
        wfile = io.BytesIO()
        converse(self.service, io.BytesIO(data), wfile)
        rfile, replies = io.BytesIO(wfile.getvalue()), []
        while frame := read_frame(rfile, REPLY_LIMIT):
            replies.append(pack(*frame[:2]))
        return replies

    def damaged(self, frame):
        bits = bytearray(frame)
        bits[self.random.randrange(len(bits))] ^= 1 << self.random.randrange(8)
        return bytes(bits)

    def connect(self):
        pass

    def send(self, frame):
        self.sent += 1
        fault, late, self.late_request = next(self.faults, "none"), self.late_request, None
        if fault == "kill":
            self.service = self.make()
        if fault == "drop":
            return
        if fault == "late request":
            self.late_request = frame
            return
        if fault == "truncate":
            frame = frame[: self.random.randrange(len(frame))]
        if fault == "damage":
            frame = self.damaged(frame)
        replies = self.late_replies + self.serve(frame)
        self.late_replies = []
        if late is not None:  # overtaken by the one that was sent after it
            replies += self.serve(late)
        if fault == "double":
            replies += self.serve(frame)
        if fault == "late reply":
            self.late_replies, replies = replies, []
        if fault == "drop reply":
            replies = []
        if fault == "truncate reply" and replies:
            replies[-1] = replies[-1][: self.random.randrange(len(replies[-1]))]
        if fault == "damage reply" and replies:
            replies[-1] = self.damaged(replies[-1])
        if fault == "swap replies":
            replies.reverse()
        if fault == "kill after":
            self.service, replies = self.make(), []
        self.inbox.extend(replies)

    def receive(self):
        if not self.inbox or not (frame := read_frame(io.BytesIO(self.inbox.popleft()), REPLY_LIMIT)):
            raise TimeoutError
        return frame

    def close(self):
        self.inbox.clear()


FAULTS = ["none", "drop", "drop reply", "double", "late reply", "late request", "truncate", "truncate reply", "damage", "damage reply",
          "swap replies", "kill", "kill after"]  # fmt: skip


def split(target, drafter, pipe=None, link=None, **options):
    """-> a client in this process whose server serves this drafter."""
    service = Service(target, {"it": drafter}, SECRET, timer=clock())
    link = link or Link(pipe or Pipe(service))
    return Client(target, drafter, "it", link, SECRET, timer=clock(), **options)


def plain(target, ids, n, sampling=Sampling(), seed=0, eot=None):
    return list(generate(target, ids, n, sampling, Coupled(seed, len(ids)), eot))


samplings = st.sampled_from([Sampling(), Sampling(0.8), Sampling(1.3, top_k=5, top_p=0.9)])
prompts = st.lists(st.integers(0, 16), min_size=1, max_size=8)

# ---- The text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fixed", "confidence", "auto"])
@given(data=st.data(), seed=st.integers(0, 200), kind=st.sampled_from(KINDS), ids=prompts, n=st.integers(0, 24), sampling=samplings,
       faults=st.lists(st.sampled_from(FAULTS), max_size=14))  # fmt: skip
def test_any_schedule_of_faults_leaves_plain_decodings_text(policy, data, seed, kind, ids, n, sampling, faults):
    """faults.md's 25 to 28 and worse: nothing lost, nothing doubled, no hang, whatever is drafted."""
    target = tiny_target(seed)
    drafter = any_drafter(target, kind, seed)
    bounds = sorted(data.draw(st.lists(st.floats(0, 6), max_size=4)))
    service = lambda: Service(target, {"it": drafter}, SECRET, timer=clock())
    link = Link(Pipe(service, faults, seed), Profile(1e6, 1e5, 0.1, jitter=0.01, loss=0.1), list(zip(bounds[::2], bounds[1::2])), draft_s=0.01)
    client = split(target, drafter, link=link, sampling=sampling, seed=seed, policy=policy, patience=1e9, eot=data.draw(st.integers(-1, 16)),
                   wire=data.draw(st.sampled_from(["fp32", "fp16", "int8"])), draft_length=data.draw(st.integers(0, 7)),
                   offline_limit=data.draw(st.integers(0, 30)))  # fmt: skip
    events, want = [], plain(target, ids, n, sampling, seed, client.eot)
    for event in client.generate(ids, n):
        events.append(event)
        new = [token for event in events for token in event.new]
        assert new == want[: len(new)] and len(events) < 2000
        assert event.accepted <= len(event.draft) and event.new[: event.accepted] == event.draft[: event.accepted][: len(event.new)]
    assert new == want if events else not want
    assert client.ids == ids + want and client.unverified == []
    assert link.connection.sent <= 4 * (len(want) + 1) + 5 * len(faults) + 40


def test_a_lost_reply_is_answered_from_the_record():
    """faults.md's 25: the same request twice, one pass; the session is what one of them leaves."""
    target = tiny_target()
    service, passes, states = Service(target, {"it": tiny_moa(target)}, SECRET), [], target.states
    target.states = lambda *args: passes.append(1) or states(*args)
    opened = ask(service, op="open", base=3, have=0, ids=[1, 2, 3])
    text = [1, 2, 3, opened[0]["token"]]
    twice = [ask(service, op="verify", request=2, base=4, text=serve_local.crc(text), ids=[5, 6]) for _ in range(2)]
    assert twice[0][0].pop("busy") > 0 == twice[1][0].pop("busy")
    assert len(passes) == 2 and twice[0] == twice[1] and twice[0][0]["request"] == 2
    session = service.sessions["a session"]
    assert session.cache.length == len(session.ids) - 1 == 4 + twice[0][0]["accepted"]


def ask(service, op="verify", request=1, ids=(), body=None, **fields):
    """-> (header, body) of the one reply to a request, by default a valid one of this session."""
    header = {"op": op, "session": "a session", "request": request, "secret": SECRET, "drafter": "it", "wire": "fp32", "seed": 0,
              "sampling": [0.0, 0, 1.0], **fields}  # fmt: skip
    [frame] = service.answer(header, pack_ids(list(ids)) if body is None else body)
    return read_frame(io.BytesIO(frame), REPLY_LIMIT)[:2]


@pytest.mark.parametrize("fields, error", [
    (dict(op="open", secret="guess"), "denied"), (dict(op="open", secret=None), "denied"), (dict(op="generate", secret=""), "denied"),
    (dict(op="dance"), "bad"), (dict(op=["open"]), "bad"), (dict(op=None), "bad"), (dict(session=3), "bad"), (dict(session="x"), "bad"),
    (dict(session="another session"), "session"), (dict(request=0), "bad"), (dict(request=True), "bad"), (dict(request="9"), "bad"),
    (dict(request=3), "stale"), (dict(base=0), "bad"), (dict(base=-1), "bad"), (dict(base=10**9), "bad"), (dict(base=2.0), "bad"),
    (dict(base=9), "session"), (dict(text=7), "session"), (dict(ids=[17]), "bad"), (dict(ids=[-1]), "bad"), (dict(body=b"abc"), "bad"),
    (dict(ids=[1] * 21), "bad"), (dict(op="open", drafter="that"), "bad"), (dict(op="open", drafter=["it"]), "bad"),
    (dict(op="open", wire="fp8"), "bad"), (dict(op="open", wire={}), "bad"), (dict(op="open", sampling=[0, 0]), "bad"),
    (dict(op="open", sampling=[-1, 0, 1]), "bad"), (dict(op="open", sampling=[math.inf, 0, 1]), "bad"),
    (dict(op="open", sampling=[math.nan, 0, 1]), "bad"), (dict(op="open", sampling=["1", 0, 1]), "bad"),
    (dict(op="open", sampling=[10**400, 0, 1]), "bad"), (dict(op="open", sampling=[1, 0.5, 1]), "bad"), (dict(op="open", seed=-1), "bad"), (dict(op="open", ids=[]), "bad"),
    (dict(op="open", have=3), "bad"), (dict(op="open", base=4, ids=[1, 2, 3]), "bad"), (dict(op="open", ids=[1] * 24, base=24), "bad"),
    (dict(op="generate", ids=[], limit=4, eot=0), "bad"), (dict(op="generate", ids=[1] * 25, limit=4, eot=0), "bad"),
    (dict(op="generate", ids=[1], limit=-1, eot=0), "bad"), (dict(op="generate", ids=[1], limit=1, eot=17), "bad"),
])  # fmt: skip
def test_bad_requests_are_refused_and_change_nothing(fields, error):
    target = tiny_target()
    service = Service(target, {"it": tiny_moa(target)}, SECRET)
    opened = ask(service, op="open", request=4, base=3, have=0, ids=[1, 2, 3])[0]
    good = dict(base=3, text=serve_local.crc([1, 2, 3]), ids=[4, 5, 6], have=0, request=5)
    before = (dict(vars(service.sessions["a session"])), opened["token"])
    reply, body = ask(service, **{**good, **fields})
    assert reply["error"] == error and reply["message"] and not body
    assert reply["request"] == (fields.get("request", 5) if fields.get("request", 5) in (3, 5) else None)
    assert (vars(service.sessions["a session"]), opened["token"]) == before
    assert "accepted" in ask(service, **good)[0]  # the negative control: without what is bad it is served


def test_a_client_that_does_not_read_keeps_nobody_waiting():
    service = Service(tiny_target(), {}, SECRET)
    header = {"op": "open", "session": "a session", "request": 1, "secret": SECRET, "drafter": "none", "wire": "fp32", "seed": 0,
              "sampling": [0.0, 0, 1.0], "base": 1, "have": 0, "limit": 3, "eot": -1}  # fmt: skip
    for op in ("open", "generate"):
        replies = service.answer({**header, "op": op}, pack_ids([1]))
        assert next(replies) and not service.lock.locked() and not torch.is_inference_mode_enabled()


def test_an_error_of_ours_reaches_the_client_and_costs_only_its_session():
    target = tiny_target()
    service = Service(target, {"it": tiny_moa(target)}, SECRET)
    ask(service, op="open", base=3, have=0, ids=[1, 2, 3])
    service.sessions["a session"].cache.kv = None  # as a bug would
    reply, _ = ask(service, request=2, base=3, text=serve_local.crc([1, 2, 3]))
    assert reply["error"] == "internal" and reply["request"] == 2 and not service.sessions
    assert "token" in ask(service, op="open", base=3, have=0, ids=[1, 2, 3])[0]


def test_an_error_answer_is_not_a_disconnection():
    """faults.md's 29: it ends the text with one clear line; nothing is drafted alone, nothing is tried again."""
    target = tiny_target()
    client = split(target, tiny_moa(target))
    client.secret = "guess"
    events = client.generate([1, 2, 3], 8)
    with pytest.raises(UserError, match="the server refuses: wrong secret"):
        list(events)
    assert client.link.calls == 1 and not any(what in ("alone", "timeout", "wait") for what, _, _ in client.link.spans)


def test_the_least_recently_used_session_is_the_one_that_goes():
    target = tiny_target()
    service = Service(target, {"it": tiny_moa(target)}, SECRET, max_sessions=2)
    for name in ("session a", "session b"):
        ask(service, op="open", session=name, base=3, have=0, ids=[1, 2, 3])
    ask(service, session="session a", request=2, base=3, text=serve_local.crc([1, 2, 3]))
    ask(service, op="open", session="session c", base=3, have=0, ids=[1, 2, 3])
    assert list(service.sessions) == ["session a", "session c"]


def test_least_recently_used_sessions_go_and_their_clients_never_notice():
    target = tiny_target()
    service = Service(target, {"it": tiny_moa(target)}, SECRET, max_sessions=2)
    runs, texts = [], []
    for i in range(4):
        drafter = tiny_moa(target)
        client = Client(target, drafter, "it", Link(Pipe(service)), SECRET, policy="fixed", draft_length=2)
        runs.append((client, client.generate([i, 5], 14)))
    while runs:  # four texts a call at a time in two sessions
        for client, events in list(runs):
            if next(events, None) is None:
                runs.remove((client, events))
                texts.append(client.ids)
        assert len(service.sessions) <= 2
    assert sorted(texts) == sorted([i, 5, *plain(target, [i, 5], 14)] for i in range(4))


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_restarting_asks_only_for_the_memory_that_is_missing(rows):
    """A session lost and opened again: the drafter's memory is what it would be without."""
    target, memory = tiny_target(), {}
    for lost in (False, True):
        drafter = tiny_moa(target, 1)
        client = split(target, drafter, wire="fp32", policy="fixed", draft_length=2)
        for event in client.generate([3] * rows, 10):
            if lost:
                client.link.connection.service.sessions.clear()
        n = drafter.ca_cache.length
        memory[lost] = torch.cat([drafter.ca_cache.kv[:, :, :, :n].flatten(), drafter.tli_cache.kv[:, :, :, :n].flatten()])
        assert client.fed == n == len(client.ids) - 1
    torch.testing.assert_close(memory[True], memory[False], rtol=1e-5, atol=1e-5)


# ---- Alone and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["right", "noise", "moa1", "eagle"])
def test_an_outage_is_bridged_and_repaired_in_one_pass(kind):
    target = tiny_target()
    drafter = any_drafter(target, kind)
    link = Link(Pipe(Service(target, {"it": drafter}, SECRET, timer=clock())), Profile(1e6, 1e6, 0.1), [(0.45, 2.0)], draft_s=0.05)
    client = split(target, drafter, link=link, policy="fixed", draft_length=1)
    events = list(client.generate([1, 2, 3], 20))
    offline = [event for event in events if event.what == "offline"]
    assert len(offline) >= 3 and [len(e.draft) for e in offline] == list(range(len(offline[0].draft), len(offline[-1].draft) + 1))
    repair = events[events.index(offline[-1]) + 1]
    want = plain(target, [1, 2, 3], 20)
    assert repair.what == "call" and repair.draft == offline[-1].draft and client.ids == [1, 2, 3, *want]
    done = sum(len(e.new) for e in events[: events.index(repair)])
    follows = next((i for i, (a, b) in enumerate(zip(repair.draft, want[done:])) if a != b), len(want) - done)
    assert repair.accepted == min(follows, len(want) - done - 1)  # kept up to the first mismatch, in one pass


def test_disconnected_for_good_the_drafters_own_text_stays_as_unverified():
    target = tiny_target()
    drafter = any_drafter(target, "right")
    link = Link(Pipe(Service(target, {"it": drafter}, SECRET, timer=clock())), Profile(rtt=0.1), [(0.5, math.inf)], draft_s=0.01)
    client = split(target, drafter, link=link, policy="fixed", draft_length=1, patience=5.0)
    new = [token for event in client.generate([1, 2, 3], 20) for token in event.new]
    want = plain(target, [1, 2, 3], 20)
    assert 0 < len(new) < 20 and client.ids == [1, 2, 3, *new] and client.ids[3:] + client.unverified == [*want]
    assert link.now < 0.5 + 5.0 + 3 * link.timeout
    client.link = Link(Pipe(Service(target, {"it": drafter}, SECRET)), outages=[(0, math.inf)])
    assert not list(client.generate([1, 2, 3], 20)) and client.ids == [1, 2, 3] and not client.unverified  # nothing to go on from


def test_time_through_an_outage_is_exact():
    """The request of 1.0 s is lost with the reply to it: noticed at 1.0 + timeout; what the server did is asked for again."""
    target = tiny_target()
    service = Service(target, {"it": tiny_moa(target)}, SECRET)
    link = Link(Pipe(service), Profile(rtt=0.2), [(1.15, 1.3)], verify_s=0.01)
    client = split(target, tiny_moa(target), link=link, policy="fixed", draft_length=0)
    link.compute = lambda what, seconds: None
    link.now = 0.79
    list(client.generate([1, 2, 3], 3))  # 0.79 .. 1.0, then 1.0 .. 1.21: its reply leaves at 1.11 and is lost at 1.15
    spans = [(what, round(start, 9), round(end, 9)) for what, start, end in link.spans]
    assert spans[2:6] == [("down", 0.9, 1.0), ("up", 1.0, 1.1), ("verify", 1.1, 1.11), ("timeout", 1.11, 1.9)]
    assert [what for what, _, _ in spans[6:]] == ["up", "down", "up", "verify", "down"]  # the record costs no pass
    assert math.isclose(link.now, 1.9 + 0.2 + 0.21) and math.isclose(link.busy, 0.03)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_second_text_after_any_fault_in_the_first(fault):
    """Also in its last message, when the session is given back."""
    target = tiny_target()
    for n in range(4):
        service = lambda: Service(target, {"it": drafter}, SECRET)
        drafter = tiny_moa(target)
        client = split(target, drafter, Pipe(service, ["none"] * n + [fault]), policy="fixed", draft_length=8)
        for ids in ([1, 2, 3], [4, 5]):
            list(client.generate(ids, 8))
            assert client.ids == [*ids, *plain(target, ids, 8)]


def test_the_offline_limit_holds():
    target = tiny_target()
    drafter = any_drafter(target, "right")
    link = Link(Pipe(Service(target, {"it": drafter}, SECRET)), Profile(rtt=0.1), [(0.5, math.inf)], draft_s=0.01)
    client = split(target, drafter, link=link, policy="fixed", draft_length=1, offline_limit=4)
    assert max(len(event.draft) for event in client.generate([1, 2, 3], 20)) == 4 == len(client.unverified)


def test_the_api_client_streams_plain_decoding_and_stops_dead():
    target = tiny_target()
    def stream(outages, eot=None):
        link = Link(Pipe(Service(target, {}, SECRET, timer=clock())), Profile(rtt=0.1), outages)
        return list(api_client(link, SECRET, [1, 2, 3], 20, Sampling(0.9), 5, eot))

    want = plain(target, [1, 2, 3], 20, Sampling(0.9), 5)
    assert stream([]) == want and stream([], want[4]) == want[: want.index(want[4]) + 1]
    cut = stream([(0.105, math.inf)])
    assert 0 < len(cut) < len(want) and cut == want[: len(cut)]
    with pytest.raises(UserError, match="wrong secret"):
        list(api_client(Link(Pipe(Service(target, {}, SECRET))), "guess", [1], 4))


# ---- Coupled draws ---------------------------------------------------------------------------------------------------


def test_coupled_draws_have_distribution_p_and_agree_as_the_docstring_says():
    """20,000 positions. Each of 14 frequencies lies within 5 standard deviations: false alarm odds below 1 in 100,000."""
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]), torch.tensor([0.2, 0.3, 0.0, 0.4, 0.1])
    n = 20_000
    draws = {name: np.array([Coupled(7, i).draw(x) for i in range(n)]) for name, x in (("p", p), ("q", q))}
    near = lambda share, of: abs(share - of) <= 5 * math.sqrt(of * (1 - of) / n)
    for name, x in (("p", p), ("q", q)):
        for token, probability in enumerate(x.tolist()):
            assert near((draws[name] == token).mean(), probability)
    both = [(a, b) for a, b in zip(p.tolist(), q.tolist())]
    agree = sum(1 / sum(max(y[0] / x[0], y[1] / x[1]) for y in both) for x in both if min(x) > 0)
    distance = sum(max(0, a - b) for a, b in both)
    assert near((draws["p"] == draws["q"]).mean(), agree) and (1 - distance) / (1 + distance) <= agree <= 1 - distance
    assert not near((draws["p"] == np.roll(draws["q"], 1)).mean(), agree)  # other positions, other noise
    assert near((draws["p"][1:] == draws["p"][:-1]).mean(), (p**2).sum().item())  # one position says nothing of the next
    other = np.array([Coupled(8, i).draw(p) for i in range(n)])
    assert near((draws["p"] == other).mean(), (p**2).sum().item())  # nor one seed of another


# ---- What travels ----------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 99), T=st.integers(0, 6), scale=st.sampled_from([0.0, 1e-3, 1.0, 1e3]))
def test_memory_survives_the_wire(seed, T, scale):
    torch.manual_seed(seed)
    parts = [scale * torch.randn(1, T, 12), scale * torch.randn(2, 1, 3, T, 8)]
    shapes = [list(part.movedim(-2, 0).shape[1:]) for part in parts]
    for wire, error in (("fp32", 1e-6), ("fp16", 1e-3), ("int8", 0.5 / 127)):
        body = encode_memory(parts, wire)
        assert len(body) == T * memory_bytes(shapes, wire)
        for sent, got in zip(parts, decode_memory(body, shapes, wire, parts[0])):
            assert got.shape == sent.shape and got.dtype == sent.dtype
            assert ((got - sent).abs() <= (error + 1e-9) * sent.abs().amax(-1, keepdim=True) * 1.001 + 1e-7).all()
    with pytest.raises(FrameError):
        decode_memory(b"x", shapes, "fp16", parts[0])
    assert encode_memory([torch.full((1, 1, 4), 1e9)], "fp16") == np.full(4, 65504, "<f2").tobytes()  # never infinity


class Guarded(io.BytesIO):
    """A stream that nothing large may be asked of."""

    def read(self, n):
        assert 0 <= n <= 4096 + REQUEST_LIMIT
        return super().read(n)


@pytest.mark.parametrize("data, says", [
    (PREFIX.pack(0, 0, 0) + b"more", "a header of 0"), (PREFIX.pack(2**32 - 1, 2**32 - 1, 0) + b"x" * 99, "4294967295"),
    (PREFIX.pack(2, REQUEST_LIMIT + 1, 0) + b"{}", "a body of"), (PREFIX.pack(4097, 0, 0), "a header of 4097"), (b"\x00" * 5, "prefix"),
    (pack({"a": 1})[:-1], "ends inside a frame"), (pack({"a": 1})[:-1] + b"]", "checksum"), (pack([1]), "JSON object"), (pack(None), "JSON object"),
    (pack({})[: PREFIX.size] + b"{]", "checksum"),
])  # fmt: skip
def test_what_is_no_frame_is_named_before_anything_is_allocated(data, says):
    """faults.md's 27."""
    with pytest.raises(FrameError, match=says):
        read_frame(Guarded(data), REQUEST_LIMIT)
    wfile = io.BytesIO()
    converse(None, Guarded(data), wfile)  # one error frame, and no more is read
    wfile.seek(0)
    assert says in read_frame(wfile, REPLY_LIMIT)[0]["message"] and not wfile.read()


def test_frames_are_read_one_by_one_and_the_end_is_the_end():
    file = Guarded(pack({"a": [1, "ü"]}, b"body") + pack({}))
    assert read_frame(file, 4) == ({"a": [1, "ü"]}, b"body", len(pack({"a": [1, "ü"]}, b"body")))
    assert read_frame(file, 0)[:2] == ({}, b"") and read_frame(file, 0) is None
    for depth in (900, 2000):
        nested = b"[" * depth + b"]" * depth
        assert len(nested) <= 4096 and reads_or_is_no_frame(b'{"a":' + nested + b"}")


def reads_or_is_no_frame(text):
    import zlib

    try:
        return bool(read_frame(io.BytesIO(PREFIX.pack(len(text), 0, zlib.crc32(text)) + text), 0))
    except FrameError:
        return True


def fuzz(rng, valid):
    """A stream of bytes that is not what a client sends."""
    kind = rng.randrange(5)
    header, body = rng.choice(valid)
    if kind == 0:
        return rng.randbytes(rng.randrange(60))
    if kind == 1:
        frame = bytearray(pack(header, body))
        for _ in range(rng.randrange(1, 4)):
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        return bytes(frame)
    if kind == 2:
        frame = pack(header, body)
        return PREFIX.pack(*(rng.choice([0, 1, 2, 50, 2**31, 2**32 - 1]) for _ in range(3))) + frame[PREFIX.size :]
    values = [None, True, -1, 0, 1, 3, 10**6, 2**63, 1.5, "", "it", "a session", [], {}, [0.0, 0, 1.0], [math.nan] * 3, "x" * 3000]
    header = {**header, rng.choice([*header]): rng.choice(values)}
    if kind == 4:
        body = np.array([rng.randrange(-3, 25) for _ in range(rng.randrange(30))], "<i4").tobytes() + rng.choice([b"", b"\0"])
    return pack(header, body)


def test_fuzzed_frames_leave_the_server_alive_and_bounded():
    """3,200 streams (thorough: 96,000), each followed by silence; afterwards a client's text is plain decoding's."""
    target, rng = tiny_target(), random.Random(0)
    drafter = tiny_moa(target)
    service = Service(target, {"it": drafter}, SECRET, max_sessions=3)
    base = {"session": "a session", "request": 2, "secret": SECRET, "seed": 1, "sampling": [0.0, 0, 1.0]}
    valid = [({**base, "op": "open", "drafter": "it", "wire": "int8", "base": 3, "have": 0}, pack_ids([1, 2, 3, 4])),
             ({**base, "op": "verify", "base": 3, "text": serve_local.crc([1, 2, 3])}, pack_ids([5, 6])),
             ({**base, "op": "close"}, b""), ({**base, "op": "generate", "limit": 2, "eot": -1}, pack_ids([1]))]  # fmt: skip
    errors, served = set(), 0
    for _ in range(80 * settings.default.max_examples):
        wfile = io.BytesIO()
        converse(service, Guarded(fuzz(rng, valid)), wfile)
        wfile.seek(0)
        while frame := read_frame(wfile, REPLY_LIMIT):
            errors.add(frame[0].get("error"))
            served += "error" not in frame[0]
        assert len(service.sessions) <= 3 and all(len(s.ids) <= 24 and s.cache.kv.numel() == target.new_cache().kv.numel() for s in service.sessions.values())
    assert errors == {None, "frame", "bad", "denied", "stale", "session"} and served > 10  # all kinds were met, none is ours
    client = Client(target, drafter, "it", Link(Pipe(service)), SECRET)
    list(client.generate([1, 2, 3], 9))
    assert client.ids[3:] == plain(target, [1, 2, 3], 9)


# ---- The network's arithmetic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("kind", ["moa1", "independent"])
def test_seconds_are_round_trips_and_transfer_and_compute(profile, kind):
    target = tiny_target()
    drafter = any_drafter(target, kind)
    link = Link(Pipe(Service(target, {"it": drafter}, SECRET, timer=clock())), PROFILES[profile], client_slowdown=3, server_speedup=2,
                draft_s=0.004, verify_s=0.030)  # fmt: skip
    client = split(target, drafter, link=link, policy="fixed", draft_length=3)
    events = [event for event in client.generate([1, 2, 3], 20) if event.what == "call"]
    drafted, p = sum(len(event.draft) for event in events), link.profile
    observed = sum(end - start for what, start, end in link.spans if what == "observe")
    network = link.calls * p.rtt + 8 * link.bytes_up / p.up + 8 * link.bytes_down / p.down
    assert link.calls == len(events)
    assert math.isclose(link.now, network + 3 * 0.004 * drafted + len(events) * 0.030 / 2 + observed, rel_tol=1e-9)
    assert math.isclose(sum(end - start for _, start, end in link.spans), link.now, rel_tol=1e-9)  # nothing overlaps, no gap
    assert math.isclose(link.busy, len(events) * 0.015) and "".join(timeline(link.spans)).count("█") > 10


def test_jitter_and_loss_delay_but_never_change_the_text():
    target = tiny_target()
    drafter, times = tiny_moa(target), []
    for profile in (Profile(rtt=0.1), Profile(rtt=0.1, jitter=0.05), Profile(rtt=0.1, loss=0.3)):
        link = Link(Pipe(Service(target, {"it": drafter}, SECRET, timer=clock())), profile, draft_s=0.001, verify_s=0.001)
        client = split(target, drafter, link=link, policy="fixed", draft_length=3)
        list(client.generate([1, 2, 3], 20))
        assert client.ids[3:] == plain(target, [1, 2, 3], 20)
        times.append(link.now)
    messages = 2 * link.calls
    assert times[0] < times[1] < times[0] + 0.05 * messages and times[2] > times[0] + 0.3


def unsure(text, V):
    """A drafter that is right as often as it says: it knows the text, and mostly tells it."""

    def logits(ids):
        rng = random.Random(len(ids))
        sure = rng.choice([0.5, 0.9, 0.97])
        truth = text[len(ids)] if len(ids) < len(text) else 0
        p = torch.full((V,), (1 - sure) / (V - 1))
        p[truth if rng.random() < sure else (truth + 1) % V] = sure
        return p.log()

    return Scripted(logits)


def test_auto_is_near_the_best_fixed_length_and_calls_less_on_slower_links():
    """With times that are given; all lengths meet the same drafts, so nothing is random."""
    target, calls = tiny_target(block_size=130), {}
    drafter = unsure([1, 2, 3, *plain(target, [1, 2, 3], 120)], 17)
    for name in ("loopback", "lte", "3g"):
        seconds = {}
        for policy, k in [("fixed", k) for k in (1, 2, 4, 6, 8, 12, 24)] + [("auto", 6)]:
            link = Link(Pipe(Service(target, {"it": drafter}, SECRET, timer=clock())), PROFILES[name], draft_s=0.002, verify_s=0.010)
            list(split(target, drafter, link=link, policy=policy, draft_length=k).generate([1, 2, 3], 120))
            seconds[policy, k] = link.now
        calls[name] = link.calls
        assert seconds.pop(("auto", 6)) <= 1.1 * min(seconds.values())
    assert calls["loopback"] > calls["lte"] >= calls["3g"]


def test_real_time_waits_for_what_is_simulated(monkeypatch):
    real = Namespace(now=100.0, perf_counter=lambda: real.now, sleep=lambda seconds: setattr(real, "now", real.now + seconds))
    monkeypatch.setattr(serve_local, "time", real)
    target = tiny_target()
    drafter = tiny_moa(target)
    link = Link(Pipe(Service(target, {"it": drafter}, SECRET, timer=clock())), Profile(rtt=0.2), real_time=True)
    for _ in split(target, drafter, link=link).generate([1, 2, 3], 9):
        assert math.isclose(real.now, 100.0 + link.now) and link.now > 0.2
        real.now += 0.05  # whatever else takes time is not waited for twice


# ---- Real sockets, real processes ------------------------------------------------------------------------------------


def test_two_clients_interleaved_over_sockets_are_each_as_if_alone():
    target = tiny_target()
    drafters = [tiny_moa(target, 1), any_drafter(target, "eagle")]
    with Server(Service(target, {"it": drafters[0], "other": drafters[1]}, SECRET)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        links = [Link(Connection(server.server_address[1])) for _ in range(2)]
        clients = [Client(target, drafter, name, link, SECRET, Sampling(0.9), seed=seed)
                   for drafter, name, link, seed in zip(drafters, ("it", "other"), links, (1, 2))]  # fmt: skip
        runs = [client.generate([1, 2, 3], 20) for client in clients]
        while any([next(run, None) for run in runs]):
            pass
        for seed, client in enumerate(clients, 1):
            assert client.ids[3:] == plain(target, [1, 2, 3], 20, Sampling(0.9), seed)
            client.link.connection.close()
        texts = [None] * 6

        def decode(i):
            drafter = tiny_moa(target, 1)
            client = Client(target, drafter, "it", Link(Connection(server.server_address[1])), SECRET, seed=i)
            list(client.generate([1, 2, i], 20))
            client.link.connection.close()
            texts[i] = client.ids[3:]

        threads = [threading.Thread(target=decode, args=[i]) for i in range(6)]  # and six at once
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == [plain(target, [1, 2, i], 20) for i in range(6)]
        with socket.create_connection(server.server_address) as s:  # garbage on a live socket, a byte at a time
            for byte in b"\xff" * 20:
                try:
                    s.send(bytes([byte]))
                except OSError:
                    break
            assert read_frame(s.makefile("rb"), REPLY_LIMIT)[0]["error"] == "frame"
        link = Link(Connection(server.server_address[1]))
        assert list(api_client(link, SECRET, [1, 2, 3], 20)) == plain(target, [1, 2, 3], 20)
        link.connection.close()
        server.shutdown()
    link = Link(Connection(server.server_address[1]))
    with pytest.raises(Disconnected):  # nobody there
        link.send(b"")


@pytest.fixture(scope="module")
def bench():
    """-> run(command, *flags): a command of the file as main runs it, on the one server process; what it returns and `bench`."""
    torch.set_default_dtype(torch.float32)
    parse = lambda flags: serve_local.parse([*flags, "--prompts", "1", "--draft-ms", "2", "--verify-ms", "20"])
    names = ["moa0", "moa1", "eagle", "independent"]
    bench = serve_local.Bench(parse([]), names)
    with server_process(bench.args, names) as (_, port, secret):
        bench.connect(port, secret)

        def run(command, *flags, drafters=("moa0",)):
            bench.args, bench.different = parse([command.__name__, *flags]), 0
            torch.set_default_dtype(torch.float32)
            try:
                return command(bench, list(drafters))
            finally:
                torch.set_default_dtype(torch.float64)

        torch.set_default_dtype(torch.float64)
        run.bench = bench
        yield run


def test_compare_measures_every_network_and_method(bench, capsys):
    out = bench(serve_local.compare, "--max-new-tokens", "8", drafters=["moa0", "eagle"])
    assert "3g        moa0 / eagle" in capsys.readouterr().out and not bench.bench.different
    assert list(out) == ["loopback", "5g-like", "cable", "lte", "4g", "3g"]
    for rows in out.values():
        assert list(rows) == ["API, streamed", "API, a call a token", "moa0", "eagle"]
        assert all(row["tokens"] == 8 and row["s_per_token"] > 0 and row["bytes_down_per_token"] > 0 for row in rows.values())
        assert rows["API, streamed"]["calls"] == 1 and rows["API, a call a token"]["calls"] == 8 >= rows["moa0"]["calls"]
    assert out["3g"]["API, a call a token"]["s_per_token"] > 0.3 + 0.02 > out["loopback"]["API, a call a token"]["s_per_token"]


def test_policies_and_wires_have_their_numbers(bench, capsys):
    out = bench(serve_local.policies, "--max-new-tokens", "8", "--profile", "3g")
    best = min(row["s_per_token"] for label, row in out["3g"].items() if label.startswith("fixed"))
    assert math.isclose(out["3g"]["auto"]["over_best_fixed"], out["3g"]["auto"]["s_per_token"] / best) and "auto takes" in capsys.readouterr().out
    rows = bench(serve_local.wires, "--max-new-tokens", "8")["lte"]
    int8, fp16, fp32 = (rows[wire]["bytes_down_per_verified_token"] for wire in ("int8", "fp16", "fp32"))
    assert 256 + 4 < int8 < 256 + 4 + 60 and 512 < fp16 < 512 + 60 and 1024 < fp32 < 1024 + 60
    assert "EAGLE's final state is 260, all keys and values are 3264" in capsys.readouterr().out and not bench.bench.different


def test_disconnect_lets_every_drafter_go_on_alone(bench, capsys):
    out = bench(serve_local.disconnect, "--max-new-tokens", "24", drafters=["moa1", "independent"])
    for cuts in out.values():
        assert [18 >= cut["tokens"] > 0 for cut in cuts.values()] == [True] * 3
        for cut in cuts.values():
            assert 0 <= cut["first_divergence"] <= cut["tokens"] and 0 <= cut["agreement"] <= 1 and cut["log_probability"] < 0
    assert capsys.readouterr().out.count("of the text") == 6


def test_tables_say_that_the_server_is_gone(bench, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as s:
        monkeypatch.setattr(bench.bench, "port", s.getsockname()[1])  # where soon nobody listens
    for command in (serve_local.disconnect, serve_local.wires):
        with pytest.raises(UserError, match="the server stopped answering"):
            bench(command, "--max-new-tokens", "8")


def test_a_text_too_short_for_its_command_is_refused_at_once():
    for command, least in ("demo", 0), ("wires", 1), ("disconnect", 5):
        serve_local.parse([command, "--max-new-tokens", str(least)])
        with pytest.raises(UserError, match=f"needs --max-new-tokens {least} or more"):
            serve_local.parse([command, "--max-new-tokens", str(least - 1)])


@pytest.mark.parametrize("flags, says", [
    (["--profile", "3g", "--outage", "1.5:4", "--wire", "int8"], "unverified"), (["--disconnect-after", "0.3", "--temperature", "0.8"], "never verified"),
    (["--disconnect-after", "0"], "gave up with 0 of 24 tokens"), (["--jitter", "5", "--loss", "0.2"], "24 tokens in"), (["--max-new-tokens", "0"], "0 tokens"),
])  # fmt: skip
def test_the_demo_tells_what_happened(bench, capsys, flags, says):
    bench.bench.prompts = [[100, 200, 300]]
    out = bench(serve_local.demo, "--max-new-tokens", "24", *flags)
    assert says in capsys.readouterr().out and out["identical"] and not bench.bench.different


def test_a_server_process_killed_and_started_again_in_the_middle_of_a_text():
    """faults.md's 28, with the shipped weights, and a client that holds its own part of them only."""
    torch.set_default_dtype(torch.float32)
    try:
        judge, _ = load_target()
        target, _ = load_target()
        drafter = load_drafter(target, WEIGHTS / "moa1.pt")
        whole, held = sum(p.numel() for p in judge.parameters()), keep_client_side(target, drafter)
        assert held < 0.2 * whole and drafter.lsa is None
        args, ids = Namespace(weights=WEIGHTS, device="cpu"), [100, 200, 300, 400]
        with server_process(args, ["moa1"]) as (process, port, secret):
            client = Client(target, drafter, "moa1", Link(Connection(port)), secret, patience=1e9)
            events = client.generate(ids, 24)
            first = [next(events), next(events)]
            assert os.getsid(process.pid) == process.pid  # a terminal's Ctrl-C is its parent's
            process.kill()
        with server_process(args, ["moa1"], port, secret) as (process, _, _):
            assert all(event.new or event.what == "offline" for event in [*first, *events])
            client.link.connection.close()
        assert process.returncode == 0  # it ends with its parent's pipe
        want, text = plain(judge, ids, 24), client.ids[4:]
        assert len(text) == 24 and (text == want or near_tie(judge, ids, want, text))
        assert any(what == "timeout" for what, _, _ in client.link.spans)
    finally:
        torch.set_default_dtype(torch.float64)
