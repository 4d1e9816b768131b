"""Client and server: the target in a process of its own, the drafter at the client, a simulated network between them.

    python serve_local.py                            # one text through an outage: what was drafted, sent, verified, repaired
    python serve_local.py --profile 3g --wire int8   # other networks and formats; --real-time waits as a user would
    python serve_local.py compare                    # seconds, calls and bytes a token on every network, drafter by drafter
    python serve_local.py policies                   # when to call: fixed draft lengths against `auto`
    python serve_local.py wires                      # what travels: bytes a token as fp32, fp16, int8, and what rounding costs
    python serve_local.py disconnect                 # the link is cut for good: how well each drafter goes on alone

Read after speculative.py. The server holds the target and the drafter's LSA and W; the client holds embeddings, LM head, SA, CA
and the last N target layers. What crosses is the draft's ids upwards and, for each verified token, the drafter's `memory`
downwards: C numbers a token for N = 0, where the target's keys and values would be 2 L nkv hs.

    client: draft k tokens --VERIFY--> server: one pass over them --accepted, own token, memory--> client: commit, observe

Compute is measured, or given; the network's part is added on a virtual clock, so that a minute of 3G takes no minute.
"""
import argparse, hmac, itertools, json, math, os, secrets, socket, socketserver, statistics, struct, subprocess, sys, threading, time, zlib
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

from model import Random, Sampling, UserError, arguments, check_prompt, cli, encode_prompts, generate, load_target
from moa import load_drafter
from speculative import decoding_arguments, near_tie

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

LONGEST = 24  # tokens that a draft may have while the link is up

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
            out.append((x.clip(-65504, 65504) if wire == "fp16" else x).astype(WIRES[wire]).tobytes())
    return b"".join(out)

def decode_memory(body, shapes, wire, like):
    """-> the tensors again, of like's type. shapes: each part's for a single token, (..., width). Raises FrameError."""
    size = memory_bytes(shapes, wire)
    T, rest = divmod(len(body), size) if size else (0, len(body))
    if rest:
        raise FrameError(f"{len(body)} bytes of memory are not a multiple of {size}")
    parts, at = [], 0

    def read(kind, *shape):
        nonlocal at
        x = np.frombuffer(body, kind, math.prod(shape), at).reshape(shape)
        at += x.nbytes
        return x

    for shape in shapes:
        x = read(WIRES[wire], T, *shape)
        x = x * read("<f4", T, *shape[:-1], 1) if wire == "int8" else x.astype("f4")
        parts.append(torch.from_numpy(x).to(like).movedim(0, -2))
    return parts

def memory_bytes(shapes, wire):
    """Bytes of one token's memory."""
    return sum(math.prod(shape) * WIRES[wire].itemsize + (4 * math.prod(shape[:-1]) if wire == "int8" else 0) for shape in shapes)

class Coupled:
    """Draws that both ends can repeat (arXiv 2408.07978): from p at position i,

        x_i = argmax_x log p(x) + g_i(x),   g_i Gumbel noise, a function of (seed, i) alone

    which has distribution p, independently for each i. The client draws from q with the same noise, and its token stands while
    the server, drawing from p, gets the same. So q never travels, and the text is the one that plain decoding gives with this
    source, token for token, whatever the drafter, the network or the retries (but for rounding: see near_tie). A token stands
    with probability sum_x 1 / sum_y max(p(y)/p(x), q(y)/q(x)), between (1 - d) / (1 + d) and 1 - d, d the total variation of p
    and q; the rejection rule has 1 - d, the most that is possible, but needs q at the server. At temperature 0 both compare.
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

class NoDrafter:
    """For the API client that calls for each token: it drafts nothing and is sent nothing."""

    def reset(self):
        pass

    def memory(self, cache, states):
        return ()

    def observe(self, memory):
        pass

class Service:
    """The target's side of the protocol, whatever carries it. Requests:

        open      secret, drafter, wire, seed, sampling, base, have; body: ids of text and draft    starts or restarts a session
        verify    base, text; body: ids of the draft     base: tokens of the client's text, text: their CRC-32
        generate  secret, seed, sampling, limit, eot; body: ids of the text     the API client's: one frame for each token
        close

    each with session and request, a number that grows. The reply to open and verify: accepted, token, busy (seconds), and in
    the body the memory of text and accepted draft from row `have` on (for verify: base - 1, what the client lacks). The last
    request's reply is on record: the same number again gets it again and changes nothing, a smaller one is stale. Going
    back is allowed, to any base that the client's text has, since its reply may have been lost. At most `max_sessions`
    live, each with a cache of fixed size; the least recently used goes, and its client opens it again.
    """

    def __init__(self, target, drafters, secret, max_sessions=8, timer=time.perf_counter):
        self.target, self.drafters, self.secret = target, {**drafters, "none": NoDrafter()}, secret
        self.max_sessions, self.timer, self.sessions, self.lock = max_sessions, timer, OrderedDict(), threading.Lock()

    def answer(self, header, body):
        """A request -> yields its replies, frames; whatever is wrong with it is one as well."""
        request = None
        try:
            request = whole(header, "request", 1, 2**53)
            if header.get("op") == "generate":
                yield from self.stream(header, self.read_ids(body), request)
                return
            with self.lock, torch.inference_mode():
                reply = self.answer_session(header, body, request)
            yield reply  # unlocked: its reader may be slow
        except Refused as e:
            yield pack({"request": request, "error": e.args[0], "message": e.args[1]})
        except Exception as e:  # ours, not the client's: it is told, and the next one is served
            with self.lock:
                self.sessions.pop(str(header.get("session")), None)
            yield pack({"request": request, "error": "internal", "message": f"{type(e).__name__}: {e}"[:1000]})

    def answer_session(self, header, body, request):
        op, name = choice(header, "op", ["open", "verify", "close", "generate"]), header.get("session")
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
        base = whole(header, "base", 1, block_size - 1)
        have, start, draft = base - 1, base - 1, ids
        if op == "open":
            start, draft = 0, ids[base:]
            if base > len(ids):
                raise Refused("bad", f"base is {base}, but the body has {len(ids)} ids")
            have = whole(header, "have", 0, base - 1)
        elif base > len(session.ids) or crc(session.ids[:base]) != header.get("text"):
            raise Refused("session", "this session's text is not the client's; open it again")
        if base + len(draft) >= block_size:
            raise Refused("bad", f"{base} + {len(draft)} tokens and one more are over the {block_size} that the target reads")
        if op == "open":
            drafter, wire = self.drafters[choice(header, "drafter", [*self.drafters])], choice(header, "wire", [*WIRES])
            sampling, seed = self.randomness(header)
            self.sessions.pop(name, None)
            while len(self.sessions) >= self.max_sessions:
                self.sessions.popitem(last=False)
            session = self.sessions[name] = Session(drafter, wire, sampling, seed, self.target.new_cache(), ids[:base])
        self.sessions.move_to_end(name)
        clock = self.timer()
        accepted, token, memory = self.verify(session, base, draft, start, have)
        reply, body = {"request": request, "base": base, "accepted": accepted, "token": token}, encode_memory(memory, session.wire)
        if op == "open":
            reply["shapes"] = [list(part.movedim(-2, 0).shape[1:]) for part in memory]
        session.request, session.reply = request, pack({**reply, "busy": 0.0}, body)  # to send it again will take no time
        return pack({**reply, "busy": round(self.timer() - clock, 5)}, body)

    def verify(self, session, base, draft, start, have):
        """One pass over the text from row `start` on and the draft -> how many stand, the target's own token, the memory."""
        target, cache, text = self.target, session.cache, session.ids[:base]
        cache.truncate(start)
        states = target.states(torch.tensor([text[start:] + draft], device=target.lm_head.weight.device), cache)
        p, rng, accepted = session.sampling(target.lm_head(states[0, -len(draft) - 1 :])), Coupled(session.seed, base), 0
        while (token := rng.draw(p[accepted])) in draft[accepted : accepted + 1]:
            accepted += 1
        end = base + accepted
        cache.truncate(end)  # all but the target's own token, which has not been read
        session.ids = text + draft[:accepted] + [token]
        return accepted, token, session.drafter.memory(cache, states[:, have - start : end - start]) or ()

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
            if token is None:
                yield pack({"request": request, "token": None})
                return
            yield pack({"request": request, "token": token, "busy": round(self.timer() - clock, 5)})

    def admit(self, header):
        if not hmac.compare_digest(str(header.get("secret")).encode(errors="replace"), self.secret.encode()):
            raise Refused("denied", "wrong secret")

    def randomness(self, header):
        values = header.get("sampling")
        if not isinstance(values, list) or len(values) != 3 or any(type(x) not in (int, float) for x in values):
            raise Refused("bad", "sampling must be [temperature, top_k, top_p]")
        try:
            sampling = Sampling(float(values[0]), whole({"top_k": values[1]}, "top_k", 0, 2**31), float(values[2]))
        except (UserError, OverflowError) as e:
            raise Refused("bad", str(e)) from None
        return sampling, whole(header, "seed", 0, 2**63 - 1)

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

def choice(header, key, options):
    """-> header[key], one of the options, a list. Raises Refused."""
    if header.get(key) not in options:
        raise Refused("bad", f"{key} must be one of {', '.join(options)}")
    return header[key]

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
    """On the loopback address only. Port 0: the system's choice."""

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

def serve(args, names):
    """The server process: prints its port and serves until standard input, its parent's, closes."""
    if not (secret := os.environ.get("MOA_SECRET")):
        raise UserError("serve is what the other commands start; by itself it needs MOA_SECRET in the environment, which clients must show")
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # one core is the client's: threads that wait for it slow all
    target, _ = load_target(args.weights, args.device)
    drafters = {name: load_drafter(target, Path(args.weights) / f"{name}.pt") for name in names}
    with Server(Service(target, drafters, secret), args.port) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()

@contextmanager
def server_process(args, names, port=0, secret=None):
    """A server that ends with us -> its process, port and secret."""
    secret = secret or secrets.token_hex(16)
    command = [sys.executable, __file__, "serve", "--weights", args.weights, "--device", args.device, "--port", port, "--drafter", *names]
    with subprocess.Popen(map(str, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
                          env={**os.environ, "MOA_SECRET": secret}) as process:  # Ctrl-C is for us; its stdin's end, for it; fmt: skip
        if not (line := process.stdout.readline()):
            sys.exit(process.wait())  # it has said why
        yield process, int(line), secret

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

    Computing takes what was measured (or draft_s a drafted token, verify_s a request), times client_slowdown or over
    server_speedup; a message takes rtt / 2 + bits / bandwidth, and what jitter and loss add. One that is on its way while the
    link is out is lost, which is noticed `timeout` seconds after the request. To connect again costs nothing more.
    spans: (what, start, end) of all that happened. real_time: wait until the real clock has come as far.
    """

    def __init__(self, connection, profile=Profile(), outages=(), client_slowdown=1.0, server_speedup=1.0, draft_s=None, verify_s=None,
                 real_time=False, seed=0):  # fmt: skip
        self.connection, self.profile, self.outages, self.real_time, self.rng = connection, profile, list(outages), real_time, Random(seed)
        self.client_slowdown, self.server_speedup, self.draft_s, self.verify_s = client_slowdown, server_speedup, draft_s, verify_s
        self.now, self.busy, self.spans, self.started, self.timeout = 0.0, 0.0, [], time.perf_counter(), 0.5 + 2 * profile.rtt
        self.calls = self.faults = self.bytes_up = self.bytes_down = 0

    def advance(self, what, until):
        until = max(until, self.now)
        if self.real_time:
            time.sleep(max(0.0, self.started + until - time.perf_counter()))
        self.spans.append((what, self.now, until))
        self.now = until

    def compute(self, what, seconds):
        """The client computed for so long, as measured."""
        seconds = seconds if what == "observe" or self.draft_s is None else self.draft_s
        self.advance(what, self.now + seconds * self.client_slowdown)

    def travel(self, size, rate):
        """-> seconds that a message of so many bytes is on its way."""
        late = self.profile.jitter * self.rng.uniform()
        while self.rng.coin(self.profile.loss):
            late += 0.2 + self.profile.rtt
        return self.profile.rtt / 2 + 8 * size / rate + late

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
        if busy := header.get("busy"):
            busy = (busy if self.verify_s is None else self.verify_s) / self.server_speedup
            self.busy, self.at_server = self.busy + busy, self.at_server + busy
            self.advance("verify", self.at_server)
        arrives = self.at_server + self.travel(size, self.profile.down)
        if self.out(self.at_server, arrives):
            self.fault()
        self.bytes_down += size
        self.advance("down", arrives)
        return header, body

    def fault(self):
        self.connection.close()
        self.faults += 1
        self.advance("timeout", self.sent + self.timeout)
        raise Disconnected

    def reachable(self):
        """Try to connect, in the background."""
        if self.out(self.now, self.now):
            return False
        try:
            self.connection.connect()
        except OSError:
            time.sleep(0.05)  # a real fault: real time has to pass
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

        P(it stands) > c * r,   c the seconds to draft and verify one more, r the tokens per second so far

    for one more token raises the long-run rate just if its own, P / c, exceeds that (the marginal value theorem; r, the rate so
    far, stands for the best one). A slow link lowers r, so drafts get longer. P is calibrated on what happened to tokens of the
    same confidence before, c fitted to the server's times over lengths. At most `longest` tokens a draft.

    Without an answer the client drafts alone, up to offline_limit tokens, and tries again every `retry` seconds until
    `patience` seconds are over. Whatever it drafted is the next request's draft: one pass verifies it, the text is repaired
    from the first mismatch. A server that has lost the session is sent the text again.
    """

    def __init__(self, target, drafter, name, link, secret, sampling=Sampling(), seed=0, wire="fp16", policy="auto", draft_length=6,
                 confidence=0.3, longest=LONGEST, offline_limit=512, patience=10.0, retry=0.25, eot=None, timer=time.perf_counter):  # fmt: skip
        self.target, self.drafter, self.name, self.link, self.secret = target, drafter, name, link, secret
        self.sampling, self.seed, self.wire, self.policy, self.draft_length = sampling, seed, wire, policy, draft_length
        self.confidence, self.longest, self.offline_limit, self.patience, self.retry = confidence, longest, offline_limit, patience, retry
        self.eot, self.timer, self.request, self.shapes = eot, timer, 0, []
        # by confidence c, in tenths; the prior, two tokens in each: 0.4 + 0.6 c, as the target's first choice is often the drafter's
        # own where that is far from sure of it
        self.tried, self.stood = [2.0] * 10, [2 * (0.4 + 0.6 * (0.05 + 0.1 * i)) for i in range(10)]
        self.emitted, self.cycle_seconds, self.drafted, self.draft_seconds, self.passes = 0, 0.0, 0, 0.0, []

    @torch.inference_mode()
    def generate(self, ids, max_new_tokens):
        """Yield an Event for each call and each token drafted offline. Afterwards `ids` is the committed text, and where patience
        ended, `unverified` what was drafted behind it. Raises UserError for what cannot be decoded, or is refused."""
        end = len(ids) + check_prompt(self.target.config, ids, max_new_tokens)
        # fed: of how many tokens the drafter has the memory; gives_up: when, if no answer comes before
        self.ids, self.session, self.is_open, self.fed, self.gives_up, self.gave_up = list(ids), secrets.token_hex(8), False, 0, None, False
        self.drafter.reset()
        self.start_draft()
        while len(self.ids) < end and not (len(self.ids) > len(ids) and self.ids[-1] == self.eot):
            room, start, faults, first = end - len(self.ids) - 1, self.link.now, self.link.faults, not self.is_open
            while self.fed and len(self.unverified) < min(room, self.longest) and self.pays():
                self.draft_one("draft")
            try:
                accepted, token = self.call(self.unverified[:room])
            except Disconnected:
                self.gave_up = not (yield from self.alone(end))
                if self.gave_up:
                    return
                continue
            draft, new = self.unverified, [*self.unverified[:accepted], token]
            if self.eot in new:
                new = new[: new.index(self.eot) + 1]
            for i, tenth in enumerate(self.tenths[: min(accepted + 1, room)]):
                self.tried[tenth] += 1
                self.stood[tenth] += i < accepted
            if not first and faults == self.link.faults and self.gives_up is None:
                self.emitted, self.cycle_seconds = self.emitted + len(new), self.cycle_seconds + self.link.now - start
            self.ids, self.gives_up = self.ids + new, None
            self.start_draft()
            yield Event("call", draft, accepted, new)
        self.close()

    def start_draft(self):
        self.unverified, self.tenths, self.stands, self.probability = [], [], 1.0, 1.0  # stands: P, calibrated; probability: q's own

    def draft_one(self, what):
        clock, before, draft = self.timer(), self.link.now, self.unverified
        logits = self.drafter.propose(self.ids, draft, list(range(-1, len(draft) - 1)), 1)[-1]
        draft.append(Coupled(self.seed, len(self.ids) + len(draft)).draw(self.sampling(logits)))
        confidence = logits.softmax(-1)[draft[-1]].item()
        self.link.compute(what, self.timer() - clock)
        self.tenths.append(min(9, int(10 * confidence)))
        self.probability *= confidence
        self.stands *= self.stood[self.tenths[-1]] / self.tried[self.tenths[-1]]
        self.drafted, self.draft_seconds = self.drafted + 1, self.draft_seconds + self.link.now - before

    def pays(self):
        """Whether to draft another token before the call."""
        if self.eot in self.unverified[-1:]:
            return False
        if self.policy == "confidence":
            return self.probability >= self.confidence
        if self.policy == "fixed" or not self.cycle_seconds:
            return len(self.unverified) < self.draft_length
        seconds = self.draft_seconds / max(1, self.drafted) + self.row_seconds
        # the token to come has no confidence yet: its chance is that of all before
        return self.stands * sum(self.stood) / sum(self.tried) > seconds * self.emitted / self.cycle_seconds

    def alone(self, end):
        """Draft without the server, yielding each token's Event. -> whether the server can be reached again."""
        if self.gives_up is None:
            self.gives_up = self.link.now + self.patience
        again = self.link.now + self.retry
        while self.link.now < self.gives_up:
            if self.fed and len(self.unverified) < min(self.offline_limit, end - len(self.ids)) and self.eot not in self.unverified[-1:]:
                self.draft_one("alone")
                yield Event("offline", list(self.unverified))
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
        base, busy = len(self.ids), self.link.busy
        for _ in range(3):
            header, ids, have = {"op": "verify", "base": base, "text": crc(self.ids)}, draft, base - 1
            if not self.is_open:
                s, have, ids = self.sampling, self.fed, self.ids + draft
                header = {"op": "open", "base": base, "have": have, "secret": self.secret, "drafter": self.name, "wire": self.wire,
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
            self.shapes, self.is_open = reply.get("shapes", self.shapes), True
            self.drafter.observe(decode_memory(body, self.shapes, self.wire, self.target.lm_head.weight))
        except (Refused, FrameError, KeyError, TypeError, RuntimeError) as e:
            raise UserError(f"the server speaks another version ({e}); start it from the same sources") from None
        self.fed = base + accepted
        self.passes.append((1 + len(draft) if header["op"] == "verify" else len(ids), self.link.busy - busy))
        rows, seconds = np.array(self.passes[-32:]).T
        self.row_seconds = max(0.0, np.polyfit(rows, seconds, 1)[0]) if rows.min() < rows.max() else 0.0  # of one more in a pass
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
        self.request += 1
        try:
            self.link.connection.send(pack({"op": "close", "session": self.session, "request": self.request}))
            self.link.connection.receive()
        except (OSError, FrameError):
            self.link.connection.close()

def api_client(link, secret, ids, max_new_tokens, sampling=Sampling(), seed=0, eot=None):
    """The client without a drafter: one request, the server decodes and streams. Yields tokens; stops dead at a fault."""
    header = {"op": "generate", "request": 1, "secret": secret, "limit": max_new_tokens, "eot": -1 if eot is None else eot,
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
    """Yield the lines of a picture of (what, start, end): a row for each kind of thing, time to the right."""
    end = max((end for _, _, end in spans), default=0.0) or 1.0
    for label, kinds in {"drafting": ("draft", "observe"), "on the wire": ("up", "down"), "verifying": ("verify",),
                         "no answer": ("timeout", "wait"), "alone": ("alone",)}.items():  # fmt: skip
        row = ["·"] * width
        for what, a, b in spans:
            if what in kinds and b > a:
                first, last = int(a / end * width), min(width - 1, int(b / end * width))
                row[first : last + 1] = "█" * (last + 1 - first)
        yield f"{label:>12} {''.join(row)}"
    yield f"{'':12} 0{end:{width - 1}.2f} s"

class Bench:
    """What the commands share: the drafters at the client, the whole target to judge them by, and a server's address."""

    def __init__(self, args, names):
        self.args, self.different, self.held = args, 0, {}
        self.sampling = Sampling(args.temperature, args.top_k, args.top_p)
        self.judge, self.enc = load_target(args.weights, args.device)
        self.prompts = encode_prompts(args, self.enc)[: args.prompts or 4]
        for ids in self.prompts:
            check_prompt(self.judge.config, ids, args.max_new_tokens)
        self.drafters = {"none": (self.judge, NoDrafter())}
        for name in names:
            target, _ = load_target(args.weights, args.device)
            self.drafters[name] = target, load_drafter(target, Path(args.weights) / f"{name}.pt")
            self.held[name] = keep_client_side(*self.drafters[name])

    def connect(self, port, secret):
        self.port, self.secret = port, secret
        for name in self.held:  # warm up
            link = Link(Connection(port))
            list(self.client(name, link).generate(self.prompts[0], 16))
            link.connection.close()

    def link(self, profile=None, outages=()):
        a = self.args
        profile = replace(PROFILES[profile or a.profile or "lte"], jitter=a.jitter / 1e3, loss=a.loss)
        draft_s, verify_s = (ms and ms / 1e3 for ms in (a.draft_ms, a.verify_ms))
        return Link(Connection(self.port), profile, outages, a.client_slowdown, a.server_speedup, draft_s, verify_s, a.real_time, a.seed)

    def client(self, name, link, **settings):
        a = self.args
        settings = dict(policy=a.policy, draft_length=a.draft_length, confidence=a.confidence, wire=a.wire) | settings
        return Client(*self.drafters[name], name, link, self.secret, self.sampling, a.seed, eot=self.enc.eot_token, **settings)

    def plain(self, ids):
        return list(generate(self.judge, ids, self.args.max_new_tokens, self.sampling, Coupled(self.args.seed, len(ids)), self.enc.eot_token))

    def same(self, ids, text, plain):
        """Whether this is plain decoding's text, greedy near-ties apart; one that is not is counted."""
        same = text == plain or self.sampling.temperature == 0 and near_tie(self.judge, ids, plain, text)
        self.different += not same
        return same

    def table(self, profiles, methods):
        """methods {label: (a drafter's name, settings), or None: the streaming API client}. Decode the prompts with each in turn,
        print a row for each -> {profile: {label: row}}."""
        out, a = {}, self.args
        print(f"{'':30}{'ms/token':>9}{'calls':>7}{'tokens/call':>12}{'up B/token':>11}{'down B/token':>13}{'server ms/token':>16}")
        for profile in profiles:
            clients = {label: method and self.client(method[0], None, **method[1]) for label, method in methods.items()}
            sums, out[profile] = {label: np.zeros(6) for label in methods}, {}
            for ids in self.prompts:
                want = self.plain(ids)
                for label, client in clients.items():
                    link = self.link(profile)
                    if client:
                        client.link = link
                        tokens = [token for event in client.generate(ids, a.max_new_tokens) for token in event.new]
                    else:
                        tokens = list(api_client(link, self.secret, ids, a.max_new_tokens, self.sampling, a.seed, self.enc.eot_token))
                    link.connection.close()
                    if len(tokens) < len(want):
                        raise UserError(f"the server stopped answering ({label}, {profile}); run it again, and look for what ended it")
                    self.same(ids, tokens, want)
                    sums[label] += len(tokens), link.now, link.calls, link.bytes_up, link.bytes_down, link.busy
            for label, (n, s, calls, up, down, busy) in sums.items():
                n, calls = max(1, int(n)), max(1, int(calls))
                out[profile][label] = dict(s_per_token=s / n, tokens=n, calls=calls, tokens_per_call=n / calls, bytes_up_per_token=up / n,
                                           bytes_down_per_token=down / n, busy_s_per_token=busy / n)  # fmt: skip
                print(f"{profile:10}{label:20}{1e3 * s / n:9.1f}{calls:7}{n / calls:12.2f}{up / n:11.0f}{down / n:13.0f}"
                      f"{1e3 * busy / n:16.2f}", flush=True)  # fmt: skip
        return out

def demo(bench, names):
    """One text, step by step: what was drafted, what stood, what happened without the link."""
    args, name, ids, decode = bench.args, names[0], bench.prompts[0], bench.enc.decode
    link, alone = bench.link(), []
    link.outages = [*(args.outage or []), *([(args.disconnect_after, math.inf)] if args.disconnect_after is not None else [])]
    if not link.outages:
        link.outages = [(0.4 + 4 * link.profile.rtt, 1.4 + 8 * link.profile.rtt)]
    client, held, of = bench.client(name, link), bench.held[name], sum(p.numel() for p in bench.judge.parameters())
    print(f"{name} at the client: {held / 1e6:.2f} M parameters, {4 * held / 1e6:.1f} MB in float32, of the target's {of / 1e6:.2f} M ({held / of:.0%})\n"
          f"{args.profile or 'lte'}, outages " + " ".join(f"{a:.2f}:{b:.2f}" for a, b in link.outages) + f" s; memory as {args.wire}\n")  # fmt: skip
    for event in client.generate(ids, args.max_new_tokens):
        if event.what == "offline":
            alone = event.draft
            continue
        if alone:
            print(f"{'':10} alone {len(alone):3} unverified            {decode(alone)!r}")
        print(f"{link.now:8.2f} s call {len(event.draft):4} drafted, {event.accepted:3} stand  {decode(event.new)!r}")
        alone = []
    text, plain = client.ids[len(ids) :], bench.plain(ids)
    if client.gave_up:
        print(f"{link.now:8.2f} s end  {len(client.unverified):4} never verified        {decode(client.unverified)!r}\n{'':11}no answer for "
              f"{client.patience:g} s: gave up with {len(text)} of {len(plain)} tokens")  # fmt: skip
        plain = plain[: len(text)]
    network = sum(end - start for what, start, end in link.spans if what in ("up", "down"))
    print("", *timeline(link.spans), "", f"{len(text)} tokens in {link.now:.2f} s: {link.calls} calls, {link.bytes_up} bytes up, {link.bytes_down} down; "
          f"network {network:.2f} s, server {link.busy:.2f} s", sep="\n")  # fmt: skip
    return dict(seconds=link.now, tokens=len(text), unverified=len(client.unverified), calls=link.calls, bytes_up=link.bytes_up,
                bytes_down=link.bytes_down, busy=link.busy, identical=bench.same(ids, text, plain))  # fmt: skip

def compare(bench, names):
    """Every network: the API client that is streamed to and the one that calls for each token; then the drafters."""
    methods = {"API, streamed": None, "API, a call a token": ("none", dict(policy="fixed", draft_length=0))}
    out = bench.table([bench.args.profile] if bench.args.profile else PROFILES, methods | {name: (name, {}) for name in names})
    for profile, rows in out.items() if "eagle" in names else ():
        for name in names:
            if name.startswith("moa"):
                faster, longer = rows["eagle"]["s_per_token"] / rows[name]["s_per_token"], rows[name]["tokens_per_call"] / rows["eagle"]["tokens_per_call"]
                rows[name] |= {"speed_over_eagle": faster, "tokens_per_call_over_eagle": longer}
                print(f"{profile:10}{name} / eagle: {faster:.2f}x as fast, {longer:.2f}x the tokens a call")
    return out

def policies(bench, names):
    """When to call: fixed draft lengths, the drafter's confidence, `auto`, and how near that is to the best fixed length."""
    fixed = {f"fixed {k}": (names[0], dict(policy="fixed", draft_length=k)) for k in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24)}
    out = bench.table([bench.args.profile] if bench.args.profile else PROFILES, fixed | {policy: (names[0], dict(policy=policy)) for policy in ("confidence", "auto")})
    for profile, rows in out.items():
        best = min(fixed, key=lambda label: rows[label]["s_per_token"])
        rows["auto"]["over_best_fixed"] = rows["auto"]["s_per_token"] / rows[best]["s_per_token"]
        print(f"{profile:10}auto takes {rows['auto']['over_best_fixed']:.2f} of the time of the best fixed length ({best.split()[1]})")
    return out

def wires(bench, names):
    """What a verified token costs downstream in each format, and what rounding does to the tokens a call."""
    c, name = bench.judge.config, names[0]
    out = bench.table([bench.args.profile or "lte"], {wire: (name, dict(wire=wire, policy="fixed")) for wire in WIRES})
    for wire, row in next(iter(out.values())).items():
        verified = row["tokens"] + sum(len(ids) - 1 for ids in bench.prompts)  # each but a text's last, the prompt's tokens too
        row["bytes_down_per_verified_token"] = row["bytes_down_per_token"] * row["tokens"] / verified
        raw, state = (memory_bytes(shapes, wire) for shapes in ([(c.n_layer, 2 * c.n_kv_head, c.n_embd // c.n_head)], [(c.n_embd,)]))
        print(f"{wire}: {row['bytes_down_per_verified_token']:.0f} bytes down a verified token, the prompt's and frames included; "
              f"EAGLE's final state is {state}, all keys and values are {raw}")  # fmt: skip
    return out

@torch.inference_mode()
def disconnect(bench, names):
    """The link is cut for good once a quarter, half, three quarters of a text are there: what each drafter writes alone."""
    out = {name: {} for name in names}
    print(f"{'cut at':22}{'tokens':>7}{'first divergence':>18}{'agreement':>11}{'log-probability':>17}")
    for cut, name in itertools.product((0.25, 0.5, 0.75), names):
        rows = []
        for ids in bench.prompts:
            want, link = bench.plain(ids), bench.link()
            client, n = bench.client(name, link), int(cut * len(want))
            for _ in client.generate(ids + want[:n], len(want) - n):  # the same text for all; one call, then the cut
                link.outages = [(link.now, math.inf)]
            link.connection.close()
            if len(client.ids) <= len(ids) + n < len(ids) + len(want):
                raise UserError(f"the server stopped answering ({name}, cut at {cut:.0%}); run it again, and look for what ended it")
            if tail := client.unverified:
                text = torch.tensor([client.ids + tail], device=bench.judge.lm_head.weight.device)
                p = bench.judge(text)[0, len(client.ids) - 1 : -1].log_softmax(-1).cpu()
                apart = [a != b for a, b in zip(tail, want[len(client.ids) - len(ids) :])] + [True]
                agree = (p.argmax(-1) == torch.tensor(tail)).double().mean().item()
                rows.append((len(tail), apart.index(True), agree, p[range(len(tail)), tail].mean().item()))
        if not rows:
            raise UserError("the texts are too short to be cut; more --max-new-tokens")
        r = [statistics.mean(column) for column in zip(*rows)]
        out[name][str(cut)] = dict(zip(("tokens", "first_divergence", "agreement", "log_probability"), r))
        print(f"{cut:4.0%} of the text  {name:12}{r[0]:7.1f}{r[1]:18.1f}{r[2]:11.1%}{r[3]:17.2f}", flush=True)
    print("tokens: drafted alone, mean over the prompts that go on so far; first divergence: as many of them are plain decoding's before\none is not; "
          "agreement: the target's first choice behind the text before them; log-probability: the target's. An API client stops dead.")  # fmt: skip
    return out

COMMANDS = {command.__name__: command for command in (demo, compare, policies, wires, disconnect)}

def within(low, high, kind=float):
    """-> an argument type: a number in low..high."""
    def parse(text):
        if not low <= kind(text) <= high:
            raise argparse.ArgumentTypeError(f"must lie in {low:g}..{high:g}, not {text}")
        return kind(text)
    return parse

def outage(text):
    """ "A:B" -> seconds (A, B)."""
    a, b = map(within(0, 1e6), text.split(":"))
    if not a < b:
        raise argparse.ArgumentTypeError(f"an outage is A:B, A < B, not {text}")
    return a, b

def parse(argv=None):
    parser = arguments(__doc__, *COMMANDS, "serve")
    add, factor, milliseconds = parser.add_argument, within(1e-3, 1e3), within(1e-3, 1e5)
    decoding_arguments(add)
    add("--profile", choices=PROFILES, help="the network (default: lte; compare and policies: all)")
    add("--jitter", type=within(0, 1e5), default=0.0, help="up to so many milliseconds more each way")
    add("--loss", type=within(0, 0.9), default=0.0, help="share of messages that are lost and sent again")
    add("--outage", type=outage, action="append", metavar="A:B", help="demo: no link from second A to B; may be repeated (default: once)")
    add("--disconnect-after", type=within(0, 1e6), metavar="T", help="demo: no link from second T on")
    add("--wire", choices=WIRES, default="fp16", help="how memory travels (default %(default)s)")
    add("--policy", choices=("auto", "fixed", "confidence"), default="auto", help="when to call the server (default %(default)s)")
    add("--draft-length", type=within(0, LONGEST, int), default=6, help="of --policy fixed (default %(default)s)")
    add("--confidence", type=within(0, 1), default=0.3, help="of --policy confidence (default %(default)s)")
    add("--client-slowdown", type=factor, default=1.0, help="a slower client than this machine")
    add("--server-speedup", type=factor, default=1.0, help="a faster server than this machine")
    add("--draft-ms", type=milliseconds, help="a drafted token takes so long, given instead of measured")
    add("--verify-ms", type=milliseconds, help="a request takes the server so long, given instead of measured")
    add("--real-time", action="store_true", help="wait for the simulated network")
    add("--port", type=within(0, 65535, int), default=0, help="serve: where to listen (default: any free port)")
    args = parser.parse_args(argv)
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed must lie in 0..2^63 - 1 here, not {args.seed}")
    if args.command != "demo" and (args.outage or args.disconnect_after is not None):
        raise UserError("--outage and --disconnect-after are for the demo; `disconnect` cuts the link by itself")
    least = {"demo": 0, "disconnect": 5}.get(args.command, 1)
    if args.max_new_tokens < least:
        raise UserError(f"{args.command} needs --max-new-tokens {least} or more")
    return args

def main():
    args = parse()
    names = args.drafter or (["moa0", "moa1", "eagle", "independent"] if args.command in ("compare", "disconnect") else ["moa0"])
    if args.command == "serve":
        return serve(args, names)
    if args.json:
        args.json.open("a").close()  # a bad path shows at once
    torch.set_num_threads(1)  # the client's; its small matrices gain nothing from more
    bench = Bench(args, names)  # bad input shows here, before there is a server
    with server_process(args, names) as (_, port, secret):
        bench.connect(port, secret)
        print(f"client x{args.client_slowdown:g} slower, server x{args.server_speedup:g} faster than measured here")
        result = COMMANDS[args.command](bench, names)
    if args.command != "disconnect":
        print(f"identical to plain decoding: {'NO' if bench.different else 'yes'}")
    if args.json:
        args.json.write_text(json.dumps({args.command: result, "settings": vars(args)}, indent=1, default=str))
    if bench.different:
        sys.exit(1)

if __name__ == "__main__":
    cli(main)
