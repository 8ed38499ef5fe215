"""The client against servers of every temper, all on this machine.

A `Stub` answers each completion with bytes that the test made up, piece by piece.
"""

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest

from lecture_util.model.sampling import Sampling
from lecture_util.serving import client
from lecture_util.serving.client import RemoteCompletion, RemoteEngine
from lecture_util.serving.metrics import stats
from lecture_util.serving.request import EndsAfter, Params, Request
from lecture_util.serving.wire import RemoteError

DONE = b"data: [DONE]\n\n"
PATIENCE_S = 20  # of waits that end at once where all is well


class Stub(ThreadingHTTPServer):
    """answer(body, send) writes the stream; the server keeps what it was asked."""

    daemon_threads = True

    def __init__(self, answer, models=("tiny", "other")):
        self.answer, self.models = answer, models
        self.asked, self.headers = [], []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """A client that hangs up is no news here."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, code, body, kind="application/json"):
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        listed = {"data": [{"id": name} for name in self.server.models]}
        self.server.headers.append(self.headers)
        self.reply(200 if self.path == "/v1/models" else 404, json.dumps(listed).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.headers.append(self.headers)
        if self.path != "/v1/completions":
            return self.reply(404, b"{}")
        try:
            self.server.answer(body, Sender(self))
        finally:
            self.close_connection = True


class Sender:
    """How an answer is written: as a chunked stream, or as an error."""

    def __init__(self, handler):
        self.handler, self.started = handler, False

    def __call__(self, *pieces):
        if not self.started:
            self.handler.send_response(200)
            self.handler.send_header("Content-Type", "text/event-stream")
            self.handler.send_header("Transfer-Encoding", "chunked")
            self.handler.end_headers()
            self.started = True
        for piece in pieces:
            self.handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.handler.wfile.flush()

    def end(self):
        self.handler.wfile.write(b"0\r\n\r\n")

    def error(self, code, body):
        self.handler.reply(code, body)

    def hang_up(self):
        self.handler.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def stub(answer, **options):
    server = Stub(answer, **options)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def event(text="", ids=None, finish=None, index=0, usage=None, **more):
    """One event as vLLM writes it; `more` goes into the choice."""
    choice = {"index": index, "text": text, "finish_reason": finish, **more}
    if ids is not None:
        choice["token_ids"] = ids
    found = {"object": "text_completion", "choices": [choice]}
    if usage is not None:
        found["usage"] = {"prompt_tokens": 3, "completion_tokens": usage}
    return b"data: " + json.dumps(found, ensure_ascii=False).encode() + b"\n\n"


def total(count):
    found = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": count}}
    return b"data: " + json.dumps(found).encode() + b"\n\n"


def always(*pieces):
    def answer(body, send):
        send(*pieces)
        send.end()

    return answer


def counting(body, send):
    """As many tokens as asked for: 100, 101, ... for each sample."""
    for i in range(body["max_tokens"]):
        finish = "length" if i == body["max_tokens"] - 1 else None
        for index in range(body["n"]):
            send(event(f" {i}", [100 * (index + 1) + i], finish, index))
    send(DONE)
    send.end()


GREETING = (
    event("Gr", [7], prompt_token_ids=[1, 2, 3]),
    event("üß", [8, 9]),
    event("", [10]),
    event(" dich", [2], "stop"),
    total(5),
    DONE,
)


def greeting(**about):
    with stub(always(*GREETING)) as server:
        return RemoteEngine(server.url, **about).generate(["Hallo"], Params(eos=2))[0]


def check_greeting(found):
    assert (found.text, found.tokens, found.reason) == ("Grüß dich", [7, 8, 9, 10, 2], "end")
    assert found.prompt == [1, 2, 3] and found.error is None


# What comes back.


def test_a_streamed_answer_becomes_a_completion():
    found = greeting()
    check_greeting(found)
    assert isinstance(found, RemoteCompletion) and found.num_tokens == 5
    assert (found.number, found.sample, found.queue_s) == (0, 0, None)
    times = found.token_times_s
    assert len(times) == 5 and times[1] == times[2]  # two came together
    assert found.arrival_s <= times[0] and list(times) == sorted(times)
    assert found.finished_s == times[-1] and found.ttft_s > 0 and found.tpot_s > 0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10**6])
def test_packets_may_end_in_the_middle_of_an_event_or_of_a_letter(size):
    stream = b": a comment\n\n" + b"".join(GREETING)
    pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
    with stub(always(*pieces)) as server:
        check_greeting(RemoteEngine(server.url).generate(["Hallo"], Params(eos=2))[0])


def test_events_may_have_other_line_ends_more_lines_and_no_space():
    stream = b"".join(GREETING).replace(b"data: ", b"data:").replace(b"\n", b"\r\n")
    whole = b'data: {"choices": [{"index": 0,\ndata: "text": "a", "finish_reason": "length"}]}\n\n'
    with stub(always(b"event: x\nid: 1\n" + stream)) as server:
        check_greeting(RemoteEngine(server.url).generate(["Hallo"], Params(eos=2))[0])
    with stub(always(whole, DONE)) as server:
        (found,) = RemoteEngine(server.url).generate(["Hallo"])
        assert (found.text, found.reason, found.num_tokens) == ("a", "length", 1)


def test_each_piece_is_timed_when_it_comes():
    """The server sends the next piece only after the client has looked at its clock."""
    looks, late = [], []

    def answer(body, send):
        for i in range(4):
            send(event("a", [i], "length" if i == 3 else None))
            end_s = time.monotonic() + PATIENCE_S
            while len(looks) < i + 3:  # start, arrival, and one a piece
                if time.monotonic() > end_s:
                    late.append(i)
                    break
                time.sleep(0.001)
        send(DONE)
        send.end()

    with stub(answer) as server:
        engine = RemoteEngine(server.url)
        engine.now = lambda: float(looks.append(0) or len(looks))
        (found,) = engine.generate([[5]], Params(4))
    assert not late
    assert found.token_times_s == (3, 4, 5, 6) and found.arrival_s == 2
    assert (found.ttft_s, found.tpot_s, found.latency_s) == (1, 1, 4)


@pytest.mark.parametrize(
    "pieces",
    [
        [event("ab", usage=2), event("c", usage=3), event("", None, "length", usage=4), total(4)],
        [event("a"), event("b"), event("c"), event("d", None, "length")],
        [event("ab"), event("cd", None, "length"), total(4)],
        [event("a", usage=1), event("", usage=2), event("cd", None, "length", usage=4)],
    ],
)
def test_tokens_are_counted_where_their_numbers_are_not_told(pieces):
    with stub(always(*pieces, DONE)) as server:
        (found,) = RemoteEngine(server.url).generate([[1, 2, 3]], Params(4))
    assert found.tokens == [] and found.num_tokens == len(found.token_times_s) == 4
    assert found.prompt == [1, 2, 3] and found.reason == "length"
    assert stats([found], []).new_tokens == 4


def test_samples_come_interleaved_and_are_told_apart():
    with stub(counting) as server:
        found = RemoteEngine(server.url).generate([[1], [2]], Params(2, Sampling(1.0), samples=3))
    assert [c.tokens for c in found] == [[100, 101], [200, 201], [300, 301]] * 2
    assert [(c.number, c.sample) for c in found] == [(n, s) for n in range(2) for s in range(3)]
    assert [b["n"] for b in server.asked] == [3, 3]


# What is sent.


def test_a_request_is_sent_with_all_its_parameters():
    sampling = Sampling(0.7, top_k=40, top_p=0.9, min_p=0.05)
    params = Params(12, sampling, seed=5, eos=[4, 2], samples=2)
    request = Request(np.array([3, 1]), params, user="eve", space=("adapter", "b"))
    with stub(counting) as server:
        found = RemoteEngine(server.url, "other").serve([request])
        (body,) = server.asked
    assert found[1].user == "eve" and found[1].prompt == [3, 1]
    assert body == {
        "model": "other", "prompt": [3, 1], "max_tokens": 12, "n": 2, "seed": 5,
        "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.0,
        "stop_token_ids": [2, 4], "ignore_eos": True, "stream": True, "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "cache_salt": '["adapter", "b"]',
    }  # fmt: skip


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.0, top_k=3, top_p=0.5, min_p=0.1)])
def test_greedy_requests_and_missing_filters_say_so(sampling):
    """Else the server would take what the model's makers recommend."""
    with stub(counting) as server:
        RemoteEngine(server.url).generate(["a", [1]], [Params(1, sampling), Params(1)])
    for body in server.asked:
        neutral = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
        assert neutral.items() <= body.items() and "cache_salt" not in body
        assert body["stop_token_ids"] == [] and body["model"] == "tiny"
    assert sorted(str(body["prompt"]) for body in server.asked) == ["[1]", "a"]


def test_a_stop_is_sent_where_it_is_a_count():
    params = [Params(9, stop=EndsAfter(4)), Params(3, stop=EndsAfter(4)), Params(4)]
    params.append(Params(9, stop=lambda new: True))
    with stub(counting) as server:
        found = RemoteEngine(server.url).generate([[1]] * 4, params)
    assert [c.num_tokens for c in found] == [4, 3, 4, 0] and len(server.asked) == 3
    assert [c.reason for c in found] == ["stop", "length", "length", "failed"]
    assert "use eos, or EndsAfter" in str(found[3].error)


def test_the_key_is_sent_if_there_is_one(monkeypatch):
    with stub(counting) as server:
        monkeypatch.delenv("LECTURE_ENGINE_KEY", raising=False)
        RemoteEngine(server.url).generate([[1]], Params(1))
        assert [h["Authorization"] for h in server.headers] == [None, None]
        monkeypatch.setenv("LECTURE_ENGINE_KEY", "open sesame")
        RemoteEngine(server.url).generate([[1]], Params(1))
        assert [h["Authorization"] for h in server.headers[2:]] == ["Bearer open sesame"] * 2


def test_the_address_comes_from_the_environment_in_any_form(monkeypatch):
    with stub(counting) as server:
        for end in ("", "/", "/v1", "/v1/"):
            monkeypatch.setenv("LECTURE_ENGINE_URL", server.url + end)
            assert RemoteEngine().models() == ["tiny", "other"]


def test_without_an_address_the_error_says_how_to_give_one(monkeypatch):
    monkeypatch.delenv("LECTURE_ENGINE_URL", raising=False)
    for url in (None, "", "localhost:8000", "ftp://localhost", "http://"):
        with pytest.raises(ValueError, match="export LECTURE_ENGINE_URL=http://localhost:8000"):
            RemoteEngine(url)
    with pytest.raises(ValueError, match="1 params for 2 prompts"):
        RemoteEngine("http://localhost").generate([[1], [2]], [Params()])
    assert RemoteEngine("http://localhost").generate([]) == []
    assert RemoteEngine("http://localhost").serve([]) == []


# What goes wrong, and that it goes wrong alone.


def only_the_second_fails(answer, *messages, **about):
    """Three requests of which the second, whose prompt is [2], is answered by `answer`."""

    def answers(body, send):
        (answer if body["prompt"] == [2] else counting)(body, send)

    with stub(answers) as server:
        found = RemoteEngine(server.url, **about).generate([[1], [2], [3]], Params(3))
    assert [c.reason for c in found] == ["length", "failed", "length"]
    assert [c.tokens for c in found[::2]] == [[100, 101, 102]] * 2
    assert isinstance(found[1].error, RemoteError)
    for message in messages:
        assert message in str(found[1].error)
    return found[1]


@pytest.mark.parametrize(
    ("code", "body", "message"),
    [
        (400, b'{"error": {"message": "max_tokens is too large", "code": 400}}', "is too large"),
        (404, b'{"object": "error", "message": "no model `x`", "code": 404}', "no model `x`"),
        (401, b'{"error": "Unauthorized"}', "Unauthorized"),
        (500, b"Internal Server Error", "Internal Server Error"),
        (503, b"", "nothing"),
    ],
)
def test_an_error_of_the_server_is_told_with_its_message(code, body, message):
    failed = only_the_second_fails(
        lambda _, send: send.error(code, body), f"answered {code} to /v1/completions: ", message
    )
    assert failed.tokens == [] and failed.ttft_s is None and failed.text == ""
    assert str(failed.error).endswith(message)  # and nothing of the JSON around it


def test_a_dropped_connection_fails_and_keeps_what_had_come():
    def drop(body, send):
        send(event("ab", [5, 6]), event("c", [7])[:20])
        send.hang_up()

    failed = only_the_second_fails(drop)
    assert (failed.tokens, failed.text, failed.num_tokens) == ([5, 6], "ab", 2)


def test_an_answer_that_ends_early_fails():
    only_the_second_fails(always(event("ab", [5, 6])), "stops in the middle")
    only_the_second_fails(always(event("ab", [5, 6]), DONE), "stops in the middle")
    only_the_second_fails(always(DONE), "stops in the middle")
    only_the_second_fails(always(event("a", [1], "length")[:-2]), "stops in the middle")


def test_an_error_in_the_stream_or_an_abort_fails():
    oops = b'data: {"error": {"message": "out of memory"}}\n\n'
    failed = only_the_second_fails(always(event("a", [5]), oops, DONE), "out of memory")
    assert failed.tokens == [5]
    only_the_second_fails(always(event("a", [5], "abort"), DONE), "'abort'")


def test_what_is_no_json_is_told():
    only_the_second_fails(always(b"data: <html>\n\n"), "OpenAI-compatible", "<html>")
    only_the_second_fails(always(b"data: [1]\n\n"), "OpenAI-compatible")


def test_a_silent_server_is_given_up():
    over = threading.Event()
    with stub(lambda body, send: over.wait(PATIENCE_S)) as server:
        (found,) = RemoteEngine(server.url, "tiny", timeout_s=0.2).generate([[1]])
        over.set()
    assert found.reason == "failed" and isinstance(found.error, RemoteError)
    assert "silent for 0.2 s" in str(found.error) and "larger timeout_s" in str(found.error)


def test_no_server_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        engine = RemoteEngine(url)
        with pytest.raises(RemoteError, match=r"no server at http.*LECTURE_ENGINE_URL"):
            engine.models()
        with pytest.raises(RemoteError, match="no server at"):
            engine.generate([[1]])
        found = RemoteEngine(url, model="tiny").generate([[1], [2]])
        assert [c.reason for c in found] == ["failed"] * 2
        assert all("no server at" in str(c.error) for c in found)


def test_a_prompt_that_is_none_fails_alone():
    with stub(counting) as server:
        found = RemoteEngine(server.url).generate([[1.5], None, [4]], Params(2))
    assert [c.reason for c in found] == ["failed", "failed", "length"]
    assert len(server.asked) == 1


# Many at a time.


def test_as_many_are_on_their_way_as_allowed_and_no_more():
    together, too_many = threading.Barrier(3), threading.Event()
    lock, inside = threading.Lock(), []

    def answer(body, send):
        with lock:
            inside.append(body["prompt"])
            if len(inside) > 3:
                too_many.set()
        together.wait(PATIENCE_S)  # passes only if three are here at once
        too_many.wait(0.1)  # time for a fourth to come
        with lock:
            inside.remove(body["prompt"])
        counting(body, send)

    with stub(answer) as server:
        found = RemoteEngine(server.url).generate([[i] for i in range(9)], Params(1), 3)
    assert [c.reason for c in found] == ["length"] * 9 and not too_many.is_set()
    assert [c.prompt for c in found] == [[i] for i in range(9)]


def test_a_trace_is_sent_at_its_times_whoever_is_still_waiting(monkeypatch):
    came, waited, slept, clock = threading.Event(), [], [], [100.0]

    def sleep(seconds):
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=sleep, perf_counter=lambda: clock[0]))

    def answer(body, send):
        if body["prompt"] == [0]:
            waited.append(came.wait(PATIENCE_S))  # it is done after the last has come
        if body["prompt"] == [2]:
            came.set()
        counting(body, send)

    trace = [
        Request([2], Params(4), 6.0, "eve"),
        Request([0], Params(2), 1.0),
        Request([1], Params(3), 3.0),
    ]
    with stub(answer) as server:
        engine = RemoteEngine(server.url)
        clock[0] += 50
        found = engine.serve(trace)
    assert waited == [True] and slept == [1, 2, 3]
    assert [c.prompt for c in found] == [[2], [0], [1]] and found[0].user == "eve"
    assert [c.arrival_s for c in found] == [56, 51, 53]
    assert found[1].finished_s == 56 and found[1].latency_s == 5
    summary = stats(found, [])
    assert (summary.requests, summary.new_tokens, summary.seconds) == (3, 9, 5)
    assert summary.tokens_per_s == 9 / 5 and summary.ttft.count == 3
    assert summary.queue.count == 0  # only the server knows


def test_nothing_is_sent_before_its_time():
    came_s = []

    def answer(body, send):
        came_s.append((body["prompt"], time.perf_counter()))
        counting(body, send)

    with stub(answer) as server:
        engine = RemoteEngine(server.url, "tiny")
        start_s = time.perf_counter()
        found = engine.serve([Request([0], Params(1), 0.08), Request([1], Params(1), 0.04)])
    for prompt, at_s in came_s:
        assert at_s - start_s >= (0.08, 0.04)[prompt[0]]
    assert all(c.ttft_s > 0 for c in found) and len(came_s) == 2


def test_numbers_go_on_from_call_to_call():
    with stub(counting) as server:
        engine = RemoteEngine(server.url)
        first, second = (engine.generate([[1], [2]], Params(1)) for _ in range(2))
    assert [c.number for c in (*first, *second)] == [0, 1, 2, 3]
    assert second[0].arrival_s >= first[0].finished_s


def test_bad_arguments_are_refused_before_anything_is_sent():
    engine = RemoteEngine("http://localhost:8000", "tiny")
    for call, error, says in (
        (lambda: engine.generate("hello"), TypeError, "prompts='hello'"),
        (lambda: engine.generate([[1]], 5), TypeError, "params=5"),
        (lambda: engine.generate([[1]], concurrency=0), ValueError, "concurrency=0"),
        (lambda: engine.serve([[1, 2]]), TypeError, "Request"),
        (lambda: RemoteEngine("http://localhost", timeout_s=0), ValueError, "timeout_s=0"),
        (lambda: RemoteEngine("http://localhost", timeout_s="5"), TypeError, "timeout_s='5'"),
        (lambda: RemoteEngine("http://localhost:port"), ValueError, "expected the address"),
        (lambda: RemoteEngine("http://localhost:99999"), ValueError, "expected the address"),
    ):
        with pytest.raises(error, match=says):
            call()
