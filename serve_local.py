"""Client and server: the target in a process of its own, the drafter at the client, a simulated network between them.

    python serve_local.py                            # one text through an outage: what was drafted, sent, verified, repaired
    python serve_local.py --profile 3g --wire int8   # other networks and formats; --real-time waits as a user would
    python serve_local.py compare                    # seconds, calls and bytes a token on every network, drafter by drafter
    python serve_local.py policies                   # when to call: fixed draft lengths against `auto`
    python serve_local.py disconnect                 # the link is cut for good: how well each drafter goes on alone

Read after speculative.py. The server holds the target and the drafter's LSA and W; the client holds embeddings, LM head, SA, CA
and the last N target layers. What crosses is the draft's ids upwards and, for each verified token, the drafter's `memory`
downwards: E numbers a token for N = 0, where the target's keys and values would be 2 L nkv hs.

    client: draft k tokens --VERIFY--> server: one pass over them --accepted, own token, memory--> client: commit, observe

Compute is measured, or given; the network's part is added on a virtual clock, so that a minute of 3G takes no minute.
"""
import hmac
import json
import math
import os
import secrets
import socket
import socketserver
import statistics
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

from model import Random, Sampling, UserError, arguments, check_prompt, cli, encode_prompts, generate, load_target, positive
from moa import DRAFTERS, load_drafter

class FrameError(Exception):
    """Bytes that are no frame: nothing behind them in the same stream can be trusted."""

class Refused(Exception):
    """The other side's considered answer: an error of the request, not of the connection. args: code, message."""

class Disconnected(Exception):
    """No answer: the connection failed, or nothing came in time."""

# ---- The wire --------------------------------------------------------------------------------------------------------

PREFIX = struct.Struct(">III")  # bytes of header, bytes of body, CRC-32 of both
REQUEST_LIMIT, REPLY_LIMIT = 1 << 16, 1 << 24  # bytes of a body; a header has 4 KiB at most

def pack(header, body=b""):
    """header, a dict of plain values; body, raw bytes -> a frame."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return PREFIX.pack(len(text), len(body), zlib.crc32(body, zlib.crc32(text))) + text + body

def read_frame(file, limit):
    """-> (header, body, size of the frame), or None where the stream ends between two frames. Sizes are checked before anything
    is allocated. Raises FrameError."""
    prefix = file.read(PREFIX.size)
    if not prefix:
        return None
    if len(prefix) < PREFIX.size:
        raise FrameError("the stream ends inside a frame's prefix")
    n_header, n_body, crc = PREFIX.unpack(prefix)
    if not 2 <= n_header <= 4096 or n_body > limit:
        raise FrameError(f"a header of {n_header} and a body of {n_body} bytes; allowed are 2..4096 and 0..{limit}")
    content = file.read(n_header + n_body)
    if len(content) < n_header + n_body:
        raise FrameError("the stream ends inside a frame")
    if zlib.crc32(content) != crc:
        raise FrameError("the checksum does not fit: damaged on the way")
    try:
        header = json.loads(content[:n_header])
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise FrameError("the header is not a JSON object")
    return header, content[n_header:], PREFIX.size + len(content)

WIRES = {"fp32": np.dtype("<f4"), "fp16": np.dtype("<f2"), "int8": np.dtype("i1")}

def encode_memory(parts, wire):
    """The drafter's memory, tensors with tokens in the last dimension but one -> bytes. int8: a scale per vector, max |x| / 127."""
    out = []
    for x in parts:
        x = x.movedim(-2, 0).float().cpu().numpy()  # (T, ..., width)
        if wire == "int8":
            scale = np.abs(x).max(-1, keepdims=True).astype("<f4") / 127
            out += [np.rint(x / np.where(scale > 0, scale, 1)).astype("i1").tobytes(), scale.tobytes()]
        else:
            out.append(np.clip(x, -65504, 65504).astype(WIRES[wire]).tobytes())
    return b"".join(out)

def decode_memory(body, shapes, wire, like):
    """-> the tensors again, of like's type. shapes: each part's for a single token, (..., width). Raises FrameError."""
    size = memory_bytes(shapes, wire)
    T, rest = divmod(len(body), size) if size else (0, len(body))
    if rest:
        raise FrameError(f"{len(body)} bytes of memory are not a multiple of {size}")
    parts, at = [], 0
    for shape in shapes:
        read = lambda kind, *shape: np.frombuffer(body, kind, math.prod(shape), at).reshape(shape)
        x = read(WIRES[wire], T, *shape)
        at += x.nbytes
        if wire == "int8":
            scale = read("<f4", T, *shape[:-1], 1)
            x, at = x * scale, at + scale.nbytes
        parts.append(torch.from_numpy(x.astype("f4")).to(like).movedim(0, -2))
    return parts

def memory_bytes(shapes, wire):
    """Bytes of one token's memory."""
    return sum(math.prod(shape) * WIRES[wire].itemsize + (4 * math.prod(shape[:-1]) if wire == "int8" else 0) for shape in shapes)

class Coupled:
    """Draws that both ends can repeat (arXiv 2408.07978): from p at position i,

        x_i = argmax_x log p(x) + g_i(x),   g_i Gumbel noise, a function of (seed, i) alone

    which has distribution p, independently for each i. The client draws from q with the same noise, and its token stands while
    the server, drawing from p, gets the same. So q never travels, and the text is the one that plain decoding gives with this
    source, token for token, whatever the drafter, the network or the retries. A token stands with probability
    sum_x 1 / sum_y max(p(y)/p(x), q(y)/q(x)), between (1 - d) / (1 + d) and 1 - d, d the total variation of p and q; the
    rejection rule has 1 - d, the most that is possible, but needs q at the server. At temperature 0 both are a comparison.
    """

    def __init__(self, seed, position):
        self.seed, self.position = seed, position

    def draw(self, probs):
        """probs (V,) -> the token at self.position, which then moves on. For generate: a Random that needs no state."""
        bits = np.random.Philox(key=self.seed, counter=self.position << 64).random_raw(len(probs))
        self.position += 1
        uniform = torch.from_numpy(((bits >> 11) + 0.5) * 2.0**-53)  # in (0, 1)
        return (probs.log() - (-uniform.log()).log()).argmax().item()

# ---- The server ------------------------------------------------------------------------------------------------------

@dataclass
class Session:
    """ids: all tokens known here, the target's own last one included; the cache holds all of them but that one."""

    drafter: object
    wire: str
    sampling: Sampling
    seed: int
    cache: object
    ids: list = field(default_factory=list)
    request: int = 0
    reply: bytes = b""

class Service:
    """The target's side of the protocol, whatever carries it. Requests:

        open      token, drafter, wire, seed, sampling, base, have; body: ids of text and draft    starts or restarts a session
        verify    base, text; body: ids of the draft     base: tokens of the client's text, text: their CRC-32
        generate  token, seed, sampling, limit, eot; body: ids of the text     the API client's: one frame for each token
        close

    each with session and request, a number that grows. The reply to open and verify: accepted, token, busy (seconds), and in
    the body the memory of text and accepted draft from row `have` on (for verify: base - 1, what the client lacks). The last
    request's reply is on record: the same number again gets it again and changes nothing, a smaller one is stale. Going
    back is allowed, to any base that the client's text has, since its reply may have been lost. At most `max_sessions`
    live, each of a cache's fixed size; the least recently used goes, and its client opens it again.
    """

    def __init__(self, target, drafters, token, max_sessions=8, timer=time.perf_counter):
        self.target, self.drafters, self.token, self.max_sessions, self.timer = target, drafters, token, max_sessions, timer
        self.sessions, self.lock = OrderedDict(), threading.Lock()

    def answer(self, header, body):
        """A request -> yields its replies, frames; whatever is wrong with it is one as well."""
        request = None
        try:
            request = whole(header, "request", 1, 2**53)
            if header.get("op") == "generate":
                yield from self.stream(header, self.read_ids(body), request)
                return
            with self.lock, torch.inference_mode():
                yield self.answer_session(header, body, request)
        except Refused as e:
            yield pack({"request": request, "error": e.args[0], "message": e.args[1]})
        except Exception as e:  # ours, not the client's: it is told, and the next one is served
            self.sessions.pop(str(header.get("session")), None)
            yield pack({"request": request, "error": "internal", "message": f"{type(e).__name__}: {e}"[:1000]})

    def answer_session(self, header, body, request):
        op, name = header.get("op"), header.get("session")
        if op not in ("open", "verify", "close"):
            raise Refused("bad", "op must be open, verify, generate or close")
        if not isinstance(name, str) or not 8 <= len(name) <= 64:
            raise Refused("bad", "session must be a string of 8 to 64 characters")
        session = self.sessions.get(name)
        if op == "open":
            self.admit(header)
        elif session is None:
            raise Refused("session", "no such session here; open it again")
        if session and request == session.request:
            return session.reply
        if session and request < session.request:
            raise Refused("stale", f"request {request} is older than {session.request}, which was answered")
        if op == "close":
            del self.sessions[name]
            return pack({"request": request})
        ids, block_size = self.read_ids(body), self.target.config.block_size
        if op == "open":
            base = whole(header, "base", 1, min(len(ids), block_size - 1))
            have, draft, start = whole(header, "have", 0, base - 1), ids[base:], 0
            drafter, wire = header.get("drafter"), header.get("wire")
            if not isinstance(drafter, str) or drafter not in self.drafters:
                raise Refused("bad", f"drafter must be one of {', '.join(self.drafters)}")
            if not isinstance(wire, str) or wire not in WIRES:
                raise Refused("bad", f"wire must be one of {', '.join(WIRES)}")
            session = Session(self.drafters[drafter], wire, *self.randomness(header), self.target.new_cache(), ids[:base])
        else:
            base = whole(header, "base", 1, block_size - 1)
            have, draft, start = base - 1, ids, base - 1
            if base > len(session.ids) or crc(session.ids[:base]) != header.get("text"):
                raise Refused("session", "this session's text is not the client's; open it again")
        if base + len(draft) >= block_size:
            raise Refused("bad", f"{base} + {len(draft)} tokens and one more are over the {block_size} that the target reads")
        session.request, session.reply = request, self.verify(session, base, draft, start, have, request, op)
        self.sessions[name] = session
        self.sessions.move_to_end(name)
        while len(self.sessions) > self.max_sessions:
            self.sessions.popitem(last=False)
        return session.reply

    def verify(self, session, base, draft, start, have, request, op):
        """One pass over the text from row `start` on and the draft -> the reply."""
        clock, target, cache, text = self.timer(), self.target, session.cache, session.ids[:base]
        cache.truncate(start)
        new = torch.tensor([text[start:] + draft], device=target.lm_head.weight.device)
        states = target.states(new, cache)
        p, rng, accepted = session.sampling(target.lm_head(states[0, -len(draft) - 1 :])), Coupled(session.seed, base), 0
        while (token := rng.draw(p[accepted])) in draft[accepted : accepted + 1]:
            accepted += 1
        end = base + accepted
        cache.truncate(end)
        memory = session.drafter.memory(cache, states[:, have - start : end - start]) or ()
        session.ids = text + draft[:accepted] + [token]
        reply = {"request": request, "base": base, "accepted": accepted, "token": token}
        if op == "open":
            reply["shapes"] = [list(part.movedim(-2, 0).shape[1:]) for part in memory]
        body = encode_memory(memory, session.wire)
        return pack({**reply, "busy": round(self.timer() - clock, 5)}, body)

    def stream(self, header, ids, request):
        self.admit(header)
        limit, eot = whole(header, "limit", 0, 2**31), whole(header, "eot", -1, self.target.config.vocab_size - 1)
        sampling, seed = self.randomness(header)
        if not 1 <= len(ids) <= self.target.config.block_size:
            raise Refused("bad", f"the text has {len(ids)} tokens; the target takes 1 to {self.target.config.block_size}")
        tokens = generate(self.target, ids, limit, sampling, Coupled(seed, len(ids)), eot)
        while True:
            with self.lock:
                clock = self.timer()
                token = next(tokens, None)
            yield pack({"request": request, "token": token, "busy": round(self.timer() - clock, 5)})  # None: the end
            if token is None:
                return

    def admit(self, header):
        if not hmac.compare_digest(str(header.get("token")).encode(errors="replace"), self.token.encode()):
            raise Refused("denied", "wrong token")

    def randomness(self, header):
        values = header.get("sampling")
        if not isinstance(values, list) or len(values) != 3 or any(type(x) not in (int, float) for x in values):
            raise Refused("bad", "sampling must be [temperature, top_k, top_p]")
        try:
            return Sampling(values[0], whole({"top_k": values[1]}, "top_k", 0, 2**31), values[2]), whole(header, "seed", 0, 2**63 - 1)
        except UserError as e:
            raise Refused("bad", str(e)) from None

    def read_ids(self, body):
        if len(body) % 4:
            raise Refused("bad", "the body must be int32 ids")
        ids = np.frombuffer(body, "<i4")
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.target.config.vocab_size:
            raise Refused("bad", f"ids must lie in 0..{self.target.config.vocab_size - 1}: made by another tokenizer?")
        return ids.tolist()

def whole(header, key, low, high):
    """-> header[key], an integer in low..high. Raises Refused."""
    if type(value := header.get(key)) is not int or not low <= value <= high:
        raise Refused("bad", f"{key} must be an integer in {low}..{high}")
    return value

def pack_ids(ids):
    return np.asarray(ids, "<i4").tobytes()

def crc(ids):
    return zlib.crc32(pack_ids(ids))

def converse(service, rfile, wfile):
    """Serve one connection until it ends. What is no frame gets an error frame, and no more is read."""
    while True:
        try:
            frame = read_frame(rfile, REQUEST_LIMIT)
        except FrameError as e:
            wfile.write(pack({"request": None, "error": "frame", "message": str(e)}))
            return
        if frame is None:
            return
        for reply in service.answer(*frame[:2]):
            wfile.write(reply)

class Server(socketserver.ThreadingTCPServer):
    """Loopback only; the port is the system's choice."""

    allow_reuse_address = daemon_threads = True

    class Handler(socketserver.StreamRequestHandler):
        timeout, disable_nagle_algorithm = 60, True  # idle seconds after which a connection is closed; its session stays

        def handle(self):
            try:
                converse(self.server.service, self.rfile, self.wfile)
            except OSError:  # the client went away
                pass

    def __init__(self, service, port=0):
        self.service = service
        super().__init__(("127.0.0.1", port), self.Handler)

    def verify_request(self, *_):
        return threading.active_count() < 64

def serve(args):
    """The server process: prints its port and serves until standard input, its parent's, closes."""
    target, _ = load_target(args.weights, args.device)
    drafters = {name: load_drafter(target, Path(args.weights) / f"{name}.pt") for name in args.drafter}
    with Server(Service(target, drafters, os.environ.get("MOA_TOKEN") or secrets.token_hex(16)), args.port) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()

class ServerProcess:
    """`with ServerProcess(args, names) as server`: a child that ends with us; its port and token."""

    def __init__(self, args, names):
        self.token = secrets.token_hex(16)
        command = [sys.executable, __file__, "serve", "--weights", str(args.weights), "--device", args.device, "--drafter", *names]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, "MOA_TOKEN": self.token})  # fmt: skip
        if not (line := self.process.stdout.readline()):
            raise UserError("the server process ended at its start; its own message stands above")
        self.port = int(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

# ---- The network -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Profile:
    """A link: bits/s in each direction, round-trip time in seconds; jitter: up to so many seconds more each way; loss: the share
    of messages, each way, that are sent again after 0.2 seconds and a round trip."""

    down: float = math.inf
    up: float = math.inf
    rtt: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0

PROFILES = {  # the published figures of WebPageTest; loopback and 5g-like are ours
    "loopback": Profile(), "5g-like": Profile(100e6, 20e6, 0.015), "cable": Profile(5e6, 1e6, 0.028),
    "lte": Profile(12e6, 12e6, 0.070), "4g": Profile(9e6, 9e6, 0.170), "3g": Profile(1.6e6, 0.768e6, 0.300),
}  # fmt: skip

class Connection:
    """Frames over TCP to the server, connected when needed."""

    def __init__(self, port, timeout=30.0):
        self.port, self.timeout, self.file = port, timeout, None

    def connect(self):
        if self.file is None:
            with socket.create_connection(("127.0.0.1", self.port), self.timeout) as s:
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.file = s.makefile("rwb")

    def send(self, frame):
        self.connect()
        self.file.write(frame)
        self.file.flush()

    def receive(self):
        """-> (header, body, size). Raises OSError, FrameError."""
        if self.file is None or not (frame := read_frame(self.file, REPLY_LIMIT)):
            raise ConnectionError("the server closed the connection")
        return frame

    def close(self):
        file, self.file = self.file, None
        try:
            file and file.close()
        except OSError:
            pass

class Link:
    """A connection behind a simulated network and a virtual clock: `now`, in seconds.

    Computing takes what was measured, times client_slowdown, or over server_speedup; a message takes rtt / 2 + bits / bandwidth,
    and what jitter and loss add. One that is on its way while the link is out is lost; that is noticed after `timeout` seconds.
    spans: (what, start, end) of all that happened.
    """

    def __init__(self, connection, profile=Profile(), outages=(), client_slowdown=1.0, server_speedup=1.0, draft_s=None, verify_s=None,
                 real_time=False, seed=0):  # fmt: skip
        self.connection, self.profile, self.outages, self.real_time, self.rng = connection, profile, list(outages), real_time, Random(seed)
        self.client_slowdown, self.server_speedup, self.draft_s, self.verify_s = client_slowdown, server_speedup, draft_s, verify_s
        self.now, self.spans, self.timeout = 0.0, [], 0.5 + 2 * profile.rtt
        self.calls = self.bytes_up = self.bytes_down = 0
        self.busy = 0.0

    def advance(self, what, until, spent=0.0):
        """Move the clock; in real time also wait, for what computing did not already take."""
        until = max(until, self.now)
        if self.real_time:
            time.sleep(max(0.0, until - self.now - spent))
        self.spans.append((what, self.now, until))
        self.now = until

    def compute(self, what, seconds):
        """The client computed for so long, as measured."""
        given = seconds if what == "observe" or self.draft_s is None else self.draft_s
        self.advance(what, self.now + given * self.client_slowdown, seconds)

    def travel(self, size, rate):
        p, late = self.profile, 0.0
        while self.rng.coin(p.loss):
            late += 0.2 + p.rtt
        return p.rtt / 2 + 8 * size / rate + p.jitter * self.rng.uniform() + late

    def out(self, start, end):
        return any(a <= end and start < b for a, b in self.outages)

    def send(self, frame):
        """Raises Disconnected."""
        self.sent, self.at_server = self.now, self.now + self.travel(len(frame), self.profile.up)
        self.calls, self.bytes_up = self.calls + 1, self.bytes_up + len(frame)
        if self.out(self.sent, self.at_server):
            self.fault()
        try:
            self.connection.send(frame)
        except OSError:
            self.fault()
        self.advance("up", self.at_server)

    def receive(self):
        """-> (header, body). Raises Disconnected."""
        try:
            header, body, size = self.connection.receive()
        except (OSError, FrameError):
            self.fault()
        if isinstance(spent := header.get("busy"), float):
            busy = (spent if self.verify_s is None else self.verify_s) / self.server_speedup
            self.busy += busy
            self.at_server += busy
            self.advance("verify", self.at_server, spent)
        arrives = self.at_server + self.travel(size, self.profile.down)
        if self.out(self.at_server, arrives):
            self.fault()
        self.bytes_down += size
        self.advance("down", arrives)
        return header, body

    def fault(self):
        self.connection.close()
        self.advance("timeout", self.sent + self.timeout)
        raise Disconnected

    def reachable(self):
        """Try to connect, in the background."""
        if self.out(self.now, self.now):
            return False
        try:
            self.connection.connect()
        except OSError:
            return False
        return True

# ---- The client ------------------------------------------------------------------------------------------------------

@dataclass
class Event:
    """One step of a text. what: "call" or "offline". draft: the tokens that were guessed; of these `accepted` stand. new: the
    tokens committed by this step; while offline none is, and the draft is what may be shown as unverified."""

    what: str
    draft: list
    accepted: int = 0
    new: list = field(default_factory=list)
    at: float = 0.0

def keep_client_side(target, drafter):
    """Drop what lives on the server: the target's layers but the last N, and LSA with W. -> parameters that are left."""
    for i in range(target.config.n_layer - getattr(drafter, "N", 0)):
        target.model.layers[i] = nn.Identity()
    if getattr(drafter, "lsa", None):
        drafter.lsa = None
    return sum(p.numel() for part in (target, drafter) if isinstance(part, nn.Module) for p in part.parameters())

class Client:
    """Decodes a text with a drafter here and the target behind `link`. What is committed is what the server decided.

    policy: when to call. "fixed": every draft_length tokens. "confidence": when the drafter's own probability of the whole
    draft falls below `confidence`. "auto": as long as another token pays,

        P(it stands) > c * r,   c the seconds to draft and verify one more, r the tokens per second of whole cycles so far

    for a cycle's tokens per second grow with one more token just if that token's own rate, P / c, exceeds the cycle's
    (the marginal value theorem); a slow link lowers r, so drafts get longer. P is calibrated on what happened to tokens of
    the same confidence before. At most `longest` tokens a draft.

    Without an answer the client drafts alone, up to offline_limit tokens, and tries again every `retry` seconds until
    `patience` seconds are over. Whatever it drafted is the next request's draft: one pass verifies it, the text is repaired
    from the first mismatch. A server that has lost the session is sent the text again.
    """

    def __init__(self, target, drafter, name, link, token, sampling=Sampling(), seed=0, wire="fp16", policy="auto", draft_length=6,
                 confidence=0.3, longest=24, offline_limit=512, patience=10.0, retry=0.25, eot=None, timer=time.perf_counter):  # fmt: skip
        self.target, self.drafter, self.name, self.link, self.token = target, drafter, name, link, token
        self.sampling, self.seed, self.wire, self.policy, self.draft_length = sampling, seed, wire, policy, draft_length
        self.confidence, self.longest, self.offline_limit, self.patience, self.retry = confidence, longest, offline_limit, patience, retry
        self.eot, self.timer, self.request = eot, timer, 0
        self.tried, self.stood = [2.0] * 10, [0.1 + 0.2 * i for i in range(10)]  # by confidence, in tenths; a weak prior
        self.drafted, self.draft_seconds, self.emitted, self.cycle_seconds = 0, 0.0, 0, 0.0

    @torch.inference_mode()
    def generate(self, ids, max_new_tokens):
        """Yield an Event for each call and each token drafted offline. Afterwards `ids` is the committed text, `unverified` what
        was drafted behind it. Raises UserError for what cannot be decoded, or is refused."""
        end = len(ids) + check_prompt(self.target.config, ids, max_new_tokens)
        self.ids, self.session, self.is_open, self.fed, self.gives_up = list(ids), secrets.token_hex(8), False, 0, None
        self.drafter.reset()
        self.start_draft()
        while len(self.ids) < end and not (len(self.ids) > len(ids) and self.ids[-1] == self.eot):
            room, start = end - len(self.ids) - 1, self.link.now  # the target adds a token of its own
            while self.fed and len(self.unverified) < min(room, self.longest) and self.pays():
                self.draft_one("draft")
            try:
                accepted, token = self.call(self.unverified[:room])
            except Disconnected:
                if not (yield from self.alone(end)):
                    return
                continue
            draft, new = self.unverified, [*self.unverified[:accepted], token]
            if self.eot in new:
                new = new[: new.index(self.eot) + 1]
            for i, tenth in enumerate(self.tenths[: accepted + 1]):
                self.tried[tenth] += 1
                self.stood[tenth] += i < accepted
            if len(self.ids) > len(ids) and self.gives_up is None:
                self.emitted, self.cycle_seconds = self.emitted + len(new), self.cycle_seconds + self.link.now - start
            self.ids, self.gives_up = self.ids + new, None
            self.start_draft()
            yield Event("call", draft, accepted, new, self.link.now)
        self.close()

    def start_draft(self):
        self.unverified, self.tenths, self.chance, self.probability = [], [], 1.0, 1.0

    def draft_one(self, what):
        clock, before, draft = self.timer(), self.link.now, self.unverified
        logits = self.drafter.propose(self.ids, draft, list(range(-1, len(draft) - 1)), 1)[-1]
        draft.append(Coupled(self.seed, len(self.ids) + len(draft)).draw(self.sampling(logits)))
        confidence = logits.softmax(-1)[draft[-1]].item()
        self.link.compute(what, self.timer() - clock)
        self.tenths.append(min(9, int(10 * confidence)))
        self.probability *= confidence
        self.chance *= self.stood[self.tenths[-1]] / self.tried[self.tenths[-1]]
        self.drafted, self.draft_seconds = self.drafted + 1, self.draft_seconds + self.link.now - before

    def pays(self):
        """Whether to draft another token before the call."""
        if self.eot in self.unverified[-1:]:
            return False
        if self.policy == "confidence":
            return self.probability >= self.confidence
        if self.policy == "fixed" or not self.cycle_seconds:
            return len(self.unverified) < self.draft_length
        stands, rate = self.chance * sum(self.stood) / sum(self.tried), self.emitted / self.cycle_seconds
        return stands > self.draft_seconds / max(1, self.drafted) * rate

    def alone(self, end):
        """Draft without the server, yielding each token's Event. -> whether the server can be reached again."""
        if self.gives_up is None:
            self.gives_up = self.link.now + self.patience
        again = self.link.now + self.retry
        while self.link.now < self.gives_up:
            if self.fed and len(self.unverified) < min(self.offline_limit, end - len(self.ids)) and self.eot not in self.unverified[-1:]:
                self.draft_one("alone")
                yield Event("offline", list(self.unverified), at=self.link.now)
            else:
                self.link.advance("wait", again)
            if self.link.now >= again:
                if self.link.reachable():
                    return True
                again = self.link.now + self.retry
        return False

    def call(self, draft):
        """Have the draft verified, in a session that is opened if need be -> (how many stand, the target's own token); the drafter
        has observed. Raises Disconnected, UserError."""
        base = len(self.ids)
        for _ in range(3):
            header, ids, have = {"op": "verify", "base": base, "text": crc(self.ids)}, draft, base - 1
            if not self.is_open:
                s, have, ids = self.sampling, self.fed, self.ids + draft
                header = {"op": "open", "base": base, "have": have, "token": self.token, "drafter": self.name, "wire": self.wire,
                          "seed": self.seed, "sampling": [s.temperature, s.top_k, s.top_p]}  # fmt: skip
            try:
                reply, body = self.exchange(header, ids)
                break
            except Refused as e:
                if e.args[0] != "session":
                    raise UserError(f"the server refuses: {e.args[1]}") from None
                self.is_open = False
        else:
            raise UserError("the server loses every session at once; can it hold one?")
        clock = self.timer()
        try:
            accepted, token = whole(reply, "accepted", 0, len(draft)), whole(reply, "token", 0, self.target.config.vocab_size - 1)
            self.shapes, self.is_open = reply["shapes"] if not self.is_open else self.shapes, True
            self.drafter.observe(decode_memory(body, self.shapes, self.wire, self.target.lm_head.weight))
        except (Refused, FrameError, KeyError, TypeError, RuntimeError) as e:
            raise UserError(f"the server speaks another version ({e}); start it from the same sources") from None
        self.fed = base + accepted
        self.link.compute("observe", self.timer() - clock)
        return accepted, token

    def exchange(self, header, ids):
        """A request and its reply. A reply that does not come is asked for once more, under the same number: the server then
        answers from its record. Raises Disconnected, Refused."""
        self.request += 1
        frame = pack({**header, "session": self.session, "request": self.request}, pack_ids(ids))
        for last in (False, True):
            try:
                self.link.send(frame)
                reply, body = self.link.receive()
                while reply.get("request") != self.request or reply.get("base", header.get("base")) != header.get("base"):
                    reply, body = self.link.receive()  # that one was late, or doubled
            except Disconnected:
                if last or not self.link.reachable():
                    raise
            else:
                if "error" in reply:
                    raise Refused(reply["error"], reply.get("message"))
                return reply, body

    def close(self):
        """Give the session back; nobody waits for that, so it takes no time. Where it fails the server drops it one day."""
        try:
            self.link.connection.send(pack({"op": "close", "session": self.session, "request": self.request + 1}))
            self.link.connection.receive()
        except (OSError, FrameError):
            self.link.connection.close()

def api_client(link, token, ids, max_new_tokens, sampling=Sampling(), seed=0, eot=None):
    """The client without a drafter: one request, the server decodes and streams. Yields tokens; stops dead at a fault."""
    header = {"op": "generate", "request": 1, "token": token, "limit": max_new_tokens, "eot": -1 if eot is None else eot,
              "seed": seed, "sampling": [sampling.temperature, sampling.top_k, sampling.top_p]}  # fmt: skip
    try:
        link.send(pack(header, pack_ids(ids)))
        while (reply := link.receive()[0]).get("token") is not None:
            yield reply["token"]
    except Disconnected:
        return
    if "error" in reply:
        raise UserError(f"the server refuses: {reply.get('message')}")

# ---- The demos -------------------------------------------------------------------------------------------------------

def timeline(spans, width=100):
    """Yield the lines of a picture of (what, start, end): a row for each thing that goes on, time to the right."""
    end = max((end for _, _, end in spans), default=0) or 1.0
    for label, kinds in {"drafting": ("draft", "observe"), "on the wire": ("up", "down"), "verifying": ("verify",), "no answer": ("timeout", "wait"),
                         "alone": ("alone",)}.items():  # fmt: skip
        row = ["·"] * width
        for what, a, b in spans:
            if what in kinds and b > a:
                for i in range(int(a / end * width), min(width - 1, int(b / end * width)) + 1):
                    row[i] = "█"
        yield f"{label:>12} {''.join(row)}"
    yield f"{'':12} 0{end:{width - 1}.2f} s"

class Bench:
    """The server process, and the clients of the drafters that the command asks for."""

    def __init__(self, args, names, server, sampling):
        self.args, self.server, self.sampling, self.clients, self.held = args, server, sampling, {}, {}
        self.judge, self.enc = load_target(args.weights, args.device)
        for name in names:
            target, _ = load_target(args.weights, args.device)
            drafter = load_drafter(target, Path(args.weights) / f"{name}.pt")
            self.held[name] = keep_client_side(target, drafter)
            self.clients[name] = Client(target, drafter, name, None, server.token, sampling, args.seed, args.wire, args.policy,
                                        args.draft_length, args.confidence, eot=self.enc.eot_token)  # fmt: skip
            list(self.events(name, [1, 2, 3], Link(Connection(server.port))))  # warm up

    def link(self, profile=None, outages=()):
        a, milli = self.args, lambda ms: None if ms is None else ms / 1e3
        profile = replace(PROFILES[profile or a.profile], jitter=a.jitter / 1e3, loss=a.loss)
        return Link(Connection(self.server.port), profile, outages, a.client_slowdown, a.server_speedup, milli(a.draft_ms),
                    milli(a.verify_ms), a.real_time, a.seed)  # fmt: skip

    def events(self, name, ids, link):
        self.clients[name].link = link
        yield from self.clients[name].generate(ids, self.args.max_new_tokens)

    def plain(self, ids):
        return list(generate(self.judge, ids, self.args.max_new_tokens, self.sampling, Coupled(self.args.seed, len(ids)), self.enc.eot_token))

    def run(self, method, ids, profile, **settings):
        """Decode one text -> (tokens, link). method: a drafter's name, or one of the API clients'."""
        link, a = self.link(profile), self.args
        if method == "api stream":
            return list(api_client(link, self.server.token, ids, a.max_new_tokens, self.sampling, a.seed, self.enc.eot_token)), link
        client = self.clients["independent" if method == "api calls" else method]
        settings = dict(policy="fixed", draft_length=0) if method == "api calls" else settings
        before = {key: getattr(client, key) for key in settings}
        vars(client).update(settings)
        tokens = [token for event in self.events(client.name, ids, link) for token in event.new]
        vars(client).update(before)
        return tokens, link

    def table(self, methods, profile, prompts, **settings):
        """-> {method: numbers a token over all prompts}, run in turn."""
        sums = {method: np.zeros(6) for method in methods}
        for ids in prompts:
            want = self.plain(ids)
            for method in methods:
                tokens, link = self.run(method, ids, profile, **settings)
                link.connection.close()
                sums[method] += len(tokens), link.now, link.calls, link.bytes_up, link.bytes_down, link.busy
                self.different = getattr(self, "different", 0) + (tokens != want)
        keys = ("s_per_token", "calls", "bytes_up_per_token", "bytes_down_per_token", "busy_s_per_token")
        out = {method: dict(zip(keys, (s[1:] / max(1, s[0])).tolist())) for method, s in sums.items()}
        for method, s in sums.items():
            out[method] |= {"calls": s[2], "tokens": s[0], "tokens_per_call": s[0] / max(1, s[2])}
        return out

def demo(bench, prompts, args):
    """One text, step by step: what was drafted, what stood, what happened without the link."""
    name, ids, decode = args.drafter[0], prompts[0], bench.enc.decode
    link = bench.link(outages=args.outage)
    held, whole_target = bench.held[name], sum(p.numel() for p in bench.judge.parameters())
    print(f"{name} at the client: {held / 1e6:.2f} M parameters, {4 * held / 1e6:.1f} MB in float32, where the target has {whole_target / 1e6:.2f} M "
          f"({held / whole_target:.0%})\nnetwork: {args.profile}, outages {args.outage or 'none'}; client x{args.client_slowdown:g} slower, "
          f"server x{args.server_speedup:g} faster than measured here; memory as {args.wire}\n")  # fmt: skip
    alone = []
    for event in bench.events(name, ids, link):
        if event.what == "offline":
            alone = event.draft
            continue
        if alone:
            print(f"{'':9} alone      {len(alone):2} unverified             {decode(alone)!r}")
            alone = []
        print(f"{event.at:7.2f} s call  {len(event.draft):4} drafted, {event.accepted:2} stand   {decode(event.new)!r}")
    client = bench.clients[name]
    if client.unverified:
        print(f"{link.now:7.2f} s end   {len(client.unverified):4} never verified        {decode(client.unverified)!r}")
    print("\n" + "\n".join(timeline(link.spans)) + "\n")
    text, plain = client.ids[len(ids) :], bench.plain(ids)
    same = text == (plain[: len(text)] if client.unverified else plain)
    network = link.calls * link.profile.rtt + 8 * (link.bytes_up / link.profile.up + link.bytes_down / link.profile.down)
    print(f"{len(text)} tokens in {link.now:.2f} s: {link.calls} calls, {link.bytes_up} bytes up, {link.bytes_down} down; network {network:.2f} s, "
          f"server {link.busy:.2f} s\nidentical to plain decoding: {'yes' if same else 'NO'}")  # fmt: skip
    return dict(seconds=link.now, tokens=len(text), calls=link.calls, bytes_up=link.bytes_up, bytes_down=link.bytes_down,
                busy=link.busy, identical=same, unverified=len(client.unverified))  # fmt: skip

def compare(bench, prompts, args):
    """Every network, every drafter with each call policy's best, and the two API clients."""
    methods, out = ["api stream", "api calls", *args.drafter], {}
    print(f"{'':22}{'ms/token':>9}{'calls':>7}{'tokens/call':>12}{'up B/token':>11}{'down B/token':>13}{'server ms/token':>16}")
    for profile in args.profiles:
        out[profile] = rows = bench.table(methods, profile, prompts)
        for method, r in rows.items():
            print(f"{profile:10}{method:12}{1e3 * r['s_per_token']:9.1f}{r['calls']:7.0f}{r['tokens_per_call']:12.2f}{r['bytes_up_per_token']:11.0f}"
                  f"{r['bytes_down_per_token']:13.0f}{1e3 * r['busy_s_per_token']:16.2f}", flush=True)  # fmt: skip
        moas = [name for name in args.drafter if name.startswith("moa")]
        if moas and "eagle" in rows:
            best = min(moas, key=lambda name: rows[name]["s_per_token"])
            print(f"{profile:10}{best} / eagle: seconds per token {rows['eagle']['s_per_token'] / rows[best]['s_per_token']:.2f}x better, "
                  f"tokens per call {rows[best]['tokens_per_call'] / rows['eagle']['tokens_per_call']:.2f}x")  # fmt: skip
    return {"profiles": out, "wires": wires(bench, prompts, args)}

def wires(bench, prompts, args):
    """What a verified token costs downstream in each format, and what rounding does to tau."""
    c, name, out = bench.judge.config, args.drafter[0], {}
    raw = c.n_layer * 2 * c.n_kv_head * c.n_embd // c.n_head
    print(f"\n{name}, draft length 6, lte: tau and bytes a verified token, frames included; numbers sent: {c.n_embd} of s_t (EAGLE: "
          f"{c.n_embd} of f_t), against {raw} of all keys and values")  # fmt: skip
    for wire in WIRES:
        r = bench.table([name], "lte", prompts, wire=wire, policy="fixed", draft_length=6)[name]
        verified = r["tokens"] + sum(map(len, prompts))
        out[wire] = {"tokens_per_call": r["tokens_per_call"], "bytes_down": r["bytes_down_per_token"] * r["tokens"] / verified}
        print(f"  {wire:5} {r['tokens_per_call']:.3f} tokens a call, {out[wire]['bytes_down']:.0f} bytes; raw keys and values: "
              f"{memory_bytes([(c.n_layer, 2 * c.n_kv_head, c.n_embd // c.n_head)], wire)}")  # fmt: skip
    return out

def policies(bench, prompts, args):
    """When to call: seconds a token by policy, and how near `auto` is to the best fixed length."""
    name, out, lengths = args.drafter[0], {}, (1, 2, 3, 4, 6, 8, 10, 12, 16)
    print(f"{name}, ms a token{'':6}" + "".join(f"{k:>7}" for k in lengths) + f"{'confid.':>9}{'auto':>7}{'tokens/call':>13}   auto / best fixed")
    for profile in args.profiles:
        rows = {k: bench.table([name], profile, prompts, policy="fixed", draft_length=k)[name] for k in lengths}
        rows |= {policy: bench.table([name], profile, prompts, policy=policy)[name] for policy in ("confidence", "auto")}
        out[profile] = {str(k): r for k, r in rows.items()}
        ms = {k: 1e3 * r["s_per_token"] for k, r in rows.items()}
        print(f"{profile:22}" + "".join(f"{ms[k]:7.1f}" for k in lengths) + f"{ms['confidence']:9.1f}{ms['auto']:7.1f}"
              f"{rows['auto']['tokens_per_call']:13.2f}{ms['auto'] / min(ms[k] for k in lengths):12.2f}", flush=True)  # fmt: skip
    return out

@torch.inference_mode()
def disconnect(bench, prompts, args):
    """The link is cut for good once a quarter, half, three quarters of the text are there: what each drafter writes alone."""
    out = {name: {} for name in args.drafter}
    print(f"alone after a cut at      {'tokens':>7}{'first divergence':>18}{'agreement':>11}{'log-probability':>17}")
    for cut in (0.25, 0.5, 0.75):
        for name in args.drafter:
            rows = []
            for ids in prompts:
                want, link = bench.plain(ids), bench.link()
                for event in bench.events(name, ids, link):
                    if event.what == "call" and len(bench.clients[name].ids) - len(ids) >= cut * len(want):
                        link.outages = [(link.now, math.inf)]
                text, tail = bench.clients[name].ids, bench.clients[name].unverified
                if tail:
                    logits = bench.judge(torch.tensor([text + tail], device=args.device))[0, len(text) - 1 : -1]
                    agree = (logits.argmax(-1) == torch.tensor(tail, device=args.device)).double().mean().item()
                    logp = logits.log_softmax(-1)[range(len(tail)), tail].mean().item()
                    rest = want[len(text) - len(ids) :]
                    rows.append((len(tail), next((i for i, (a, b) in enumerate(zip(tail, rest)) if a != b), len(tail)), agree, logp))
            r = [statistics.mean(column) for column in zip(*rows)] if rows else [0.0] * 4
            out[name][str(cut)] = dict(zip(("tokens", "first_divergence", "agreement", "log_probability"), r))
            print(f"  {cut:4.0%} of the text  {name:12}{r[0]:5.1f}{r[1]:18.1f}{r[2]:11.1%}{r[3]:17.2f}", flush=True)
    print("tokens: how many were drafted alone; first divergence: how many of them are plain decoding's before the first that is not;\n"
          "agreement: how many are the target's choice behind the text before them; log-probability: the target's, mean. An API\n"
          "client has none of them: it stops at the cut.")  # fmt: skip
    return out

def outage(text):
    a, _, b = text.partition(":")
    if not 0 <= float(a) < float(b):
        raise ValueError
    return float(a), float(b)

def main():
    parser = arguments(__doc__, "demo", "compare", "policies", "disconnect", "serve")
    add, number = parser.add_argument, positive(float)
    add("--drafter", nargs="+", metavar="NAME", choices=DRAFTERS, help=f"of {', '.join(DRAFTERS)} (default: moa0; compare: several)")
    add("--profile", choices=PROFILES, help="the network (default: lte; compare and policies: all)")
    add("--jitter", type=float, default=0.0, help="milliseconds, at most, each way")
    add("--loss", type=float, default=0.0, help="share of messages sent twice")
    add("--outage", type=outage, action="append", metavar="A:B", help="no link from second A to B; may be given again (the demo's default: 0.5:1.5)")
    add("--disconnect-after", type=float, metavar="T", help="no link from second T on")
    add("--wire", choices=WIRES, default="fp16", help="how memory travels (default: %(default)s)")
    add("--policy", choices=("auto", "fixed", "confidence"), default="auto", help="when to call the server (default: %(default)s)")
    add("--draft-length", type=int, default=6, help="of --policy fixed (default: %(default)s)")
    add("--confidence", type=float, default=0.3, help="of --policy confidence (default: %(default)s)")
    add("--client-slowdown", type=number, default=1.0, help="a slower client than this machine")
    add("--server-speedup", type=number, default=1.0, help="a faster server than this machine")
    add("--draft-ms", type=float, help="milliseconds a drafted token, given instead of measured")
    add("--verify-ms", type=float, help="milliseconds of the server a request, given instead of measured")
    add("--real-time", action="store_true", help="wait for the simulated network")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-k", type=int, default=0, help="0 is off (default)")
    add("--top-p", type=float, default=1.0, help="1 is off (default)")
    add("--seed", type=int, default=0)
    add("--prompts", type=positive(int), default=4, help="held-out prompts of the tables (default: %(default)s)")
    add("--port", type=int, default=0, help="serve: where to listen (default: any free port)")
    add("--json", type=Path, metavar="FILE", help="write every number here")
    args = parser.parse_args()
    several = ["moa0", "moa1", "eagle", "independent"] if args.command in ("compare", "disconnect") else ["moa0"]
    args.drafter, args.profiles, args.profile = args.drafter or several, [args.profile] if args.profile else list(PROFILES), args.profile or "lte"
    if args.command == "serve":
        return serve(args)
    cut = [] if args.disconnect_after is None else [(args.disconnect_after, math.inf)]
    args.outage = (args.outage or []) + cut or [(0.5, 1.5)]
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    if args.json:
        args.json.open("a").close()  # a bad path shows at once
    torch.set_num_threads(1)  # the client's; its tiny matrices gain nothing from more
    names = list(dict.fromkeys([*args.drafter, *(["independent"] if args.command == "compare" else [])]))
    with ServerProcess(args, names) as server:
        bench = Bench(args, names, server, sampling)
        prompts = encode_prompts(args, bench.enc)[: args.prompts]
        result = {"demo": demo, "compare": compare, "policies": policies, "disconnect": disconnect}[args.command](bench, prompts, args)
    if args.command in ("compare", "policies"):
        print(f"identical to plain decoding: {'yes' if not bench.different else f'NO, {bench.different} texts differ'}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    if not result.get("identical", True) or getattr(bench, "different", 0):
        sys.exit(1)

if __name__ == "__main__":
    cli(main)
