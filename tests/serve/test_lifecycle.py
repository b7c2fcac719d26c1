"""Lives of requests: queue, clients that go away or read slowly, failures, keys, the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from random import Random
from typing import Any, TextIO

import pytest

from forked import Forked, Pipe, environment_of, program
from mtp_checkpoints.errors import UsageError
from mtp_export.serve import answers
from mtp_export.serve.address import Address
from mtp_export.serve.app import Server, ServerOptions
from mtp_export.serve.engine_thread import EngineThread
from mtp_export.serve.errors import ApiError
from mtp_export.serve.limits import PREPARING_THREADS
from mtp_export.serve.metrics import ServerMetrics
from mtp_export.serve.replies import Reply
from mtp_export.serve.run import _Connection, run_server
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.engine import Engine
from mtp_runtime.models.load import Loaded
from serve.conftest import FIXTURE
from serve.hanging import HANGING
from serve.running import Client, Running, announced_port, running, wait_for

LONG = {"prompt": "Once upon a time", "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture
def small(loaded: Loaded) -> Iterator[LLM]:
    """One request at a time."""
    yield LLM(FIXTURE, loaded=loaded, max_batch_size=1, cache_tokens=4096)


def test_a_client_that_goes_away_frees_its_pages(client: Client, served: Running) -> None:
    for _ in range(3):
        before = served.llm.engine.totals.output_tokens
        stream = served.client().stream("/v1/completions", **LONG)
        next(stream)
        stream.close()
        wait_for(served.is_idle)
        assert served.llm.engine.totals.output_tokens - before < 2500
    raw = json.dumps(LONG).encode()
    whole = served.client()
    whole._connection.request("POST", "/v1/completions", raw, {"Content-Type": "application/json"})
    wait_for(lambda: served.llm.engine.running == 1)
    whole.close()
    wait_for(served.is_idle)
    assert client.metric("vllm:request_success_total", finished_reason="abort") >= 4


def test_clients_that_go_away_leave_the_queue_for_threads(
    small: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, lost, go_on = [], [], threading.Event()

    def waiting(server: Server, kind: object, raw: bytes) -> Reply:
        prepared.append(raw)
        go_on.wait(60)
        raise ApiError(400, "prepared")

    def counted(connection: _Connection, error: Exception | None) -> None:
        lost.append(connection.server)  # of another server, perhaps
        connection_lost(connection, error)

    connection_lost = _Connection.connection_lost
    monkeypatch.setattr(Server, "_prepared", waiting)
    monkeypatch.setattr(_Connection, "connection_lost", counted)
    raw, kind = json.dumps(LONG).encode(), {"Content-Type": "application/json"}
    with running(small) as server:
        clients = [server.client() for _ in range(3 * PREPARING_THREADS)]
        for client in clients:
            client._connection.request("POST", "/v1/completions", raw, kind)
        wait_for(lambda: len(prepared) == PREPARING_THREADS)
        for client in clients:
            client.close()
        wait_for(lambda: lost.count(("127.0.0.1", server.port)) == len(clients))
        go_on.set()
        with closing(server.client()) as patient:
            assert patient.post("/v1/completions", **LONG).status == 400
        assert len(prepared) == PREPARING_THREADS + 1


def test_a_full_queue_is_refused_and_has_room_again(small: LLM) -> None:
    with running(small, max_queued_requests=1) as server:
        streams = [server.client().stream("/v1/completions", **LONG)]
        next(streams[0])
        waiting = server.client()
        raw = json.dumps(LONG | {"max_tokens": 2}).encode()
        kind = {"Content-Type": "application/json"}
        waiting._connection.request("POST", "/v1/completions", raw, kind)
        wait_for(lambda: small.engine.waiting == 1)
        client = server.client()
        refused = client.post("/v1/completions", **LONG)
        assert (refused.status, refused.json["error"]["message"]) == (503, "The queue is full")
        assert refused.headers["retry-after"] == "1"
        assert client.metric("vllm:admission_rejections_total", reason="queue_full") == 1
        too_many = client.post("/v1/completions", prompt="a", n=3)
        assert too_many.status == 400
        streams[0].close()
        assert waiting._connection.getresponse().status == 200
        assert client.post("/v1/completions", prompt="a").status == 200
        for one in (waiting, client):
            one.close()


def test_a_slow_reader_is_cut_off(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_BUFFERED_TOKENS", 20)
    thread = EngineThread(small.engine, ServerMetrics(small.engine, "tiny"), 2)

    async def read_slowly() -> None:
        thread.start()
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        requests = small.requests(["a b c"], [params])
        answer = thread.submit(requests)
        while requests[0].finish_reason is None:
            await asyncio.sleep(0.01)
        assert requests[0].finish_reason == "abort"
        with pytest.raises(ApiError, match="too slowly"):
            async for _ in answer.parts():
                pass
        await thread.stop()

    asyncio.run(read_slowly())
    assert not small.engine.has_work


def test_a_failed_step_ends_its_requests_alone(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Engine._pass, iter([False, True])

    def fails_once(engine: Engine) -> None:
        if next(calls, False):
            raise RuntimeError("planted")
        real(engine)

    with running(small) as server:
        client = server.client()
        monkeypatch.setattr(Engine, "_pass", fails_once)
        reply = client.post("/v1/completions", **LONG)
        assert (reply.status, reply.json["error"]["type"]) == (500, "server_error")
        assert client.post("/v1/completions", prompt="a").status == 200
        monkeypatch.setattr(Engine, "_pass", fails_once)
        assert client.ask("GET", "/health").status == 200
        client.close()


def test_a_stream_that_fails_says_so_in_a_chunk(
    small: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Engine._pass, iter([False, False, False, True])

    def fails_late(engine: Engine) -> None:
        if next(calls, False):
            raise RuntimeError("planted")
        real(engine)

    monkeypatch.setattr(Engine, "_pass", fails_late)
    with running(small) as server:
        chunks = list(server.client().stream("/v1/completions", **LONG))
    assert chunks[-1]["error"]["message"] == "The engine failed"


def test_a_key_is_asked_for_where_there_is_one(small: LLM) -> None:
    with running(small, api_key="secret") as server:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "secret"}, 401),
            ({"Authorization": "Bearer secret"}, 200),
        ):
            client = server.client(**headers)
            assert client.post("/v1/completions", prompt="a").status == status
            assert client.ask("GET", "/v1/models").status == status
            assert client.ask("GET", "/health", Host="elsewhere").status == 200
            client.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org"])
def test_without_a_key_only_this_machine_is_listened_on(host: str) -> None:
    with pytest.raises(UsageError, match="this machine alone"):
        Address(host).check(None)
    Address(host).check("key")
    for own in ("127.0.0.1", "::1", "localhost"):
        Address(own).check(None)


def test_metrics_have_vllm_s_names(client: Client, served: Running) -> None:
    before = {
        name: client.metric(f"vllm:{name}_total")
        for name in ("generation_tokens", "prompt_tokens", "prefix_cache_hits")
    }
    prompt = "a story of the sea and the wind " * 8
    for _ in range(2):
        reply = client.post("/v1/completions", prompt=prompt, max_tokens=20, ignore_eos=True)
    cached = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert client.metric("vllm:prefix_cache_hits_total") - before["prefix_cache_hits"] == cached
    assert client.metric("vllm:generation_tokens_total") - before["generation_tokens"] == 40
    prompts = client.metric("vllm:prompt_tokens_total") - before["prompt_tokens"]
    assert prompts == 2 * reply.json["usage"]["prompt_tokens"]
    accepted = client.metric("vllm:spec_decode_num_accepted_tokens_total")
    drafts = client.metric("vllm:spec_decode_num_draft_tokens_total")
    by_position = [
        [
            client.metric(f"vllm:spec_decode_num_{kind}_per_pos_total", position=str(position))
            for position in range(3)
        ]
        for kind in ("accepted_tokens", "draft_tokens")
    ]
    assert 0 < accepted <= drafts and list(map(sum, by_position)) == [accepted, drafts]
    assert [counts[2] for counts in by_position] == [0, 0]
    assert by_position[1][0] == client.metric("vllm:spec_decode_num_drafts_total")
    assert client.metric("vllm:spec_decode_num_drafts_total") <= drafts
    assert client.metric("vllm:time_to_first_token_seconds_count") > 0
    assert client.metric("vllm:num_requests_running") == 0
    assert client.metric("vllm:kv_cache_usage_perc") == 0
    assert client.ask("GET", "/version").json.keys() == {"version"}


def test_metrics_tell_what_threads_waited_for_processors(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_export.serve.metrics.processor_seconds", lambda: (5.0, 7.0))
    assert client.metric("vllm:processor_seconds_total") == 5.0
    assert client.metric("vllm:processor_wait_seconds_total") == 7.0


def test_speculation_is_shown_where_it_is_asked_for(client: Client, served: Running) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
    whole = client.post("/v1/completions", **body, speculation=True).json["choices"][0]
    assert "".join(token["text"] for token in whole["speculation"]) == whole["text"]
    assert {token["draft_position"] for token in whole["speculation"]} == {0, 1, 2}
    streamed = [
        token
        for chunk in served.client().stream("/v1/completions", **body, speculation=True)
        for token in chunk["choices"][0]["speculation"]
    ]
    assert streamed == whole["speculation"]
    assert "speculation" not in client.post("/v1/completions", **body).json["choices"][0]
    plain = client.post("/v1/completions", **body, speculation=True, use_drafts=False).json
    (choice,) = plain["choices"]
    assert choice["text"] == whole["text"]
    assert {token["draft_position"] for token in choice["speculation"]} == {0}


def test_many_clients_some_of_whom_hang_up(served: Running, plain: LLM) -> None:
    """No answer is wrong, and no page is lost."""
    prompts = [f"{words} {number}" for number in range(6) for words in ("Once upon", "def f(")]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    expected = dict(zip(prompts, plain.generate(prompts, params), strict=True))

    def ask(number: int) -> None:
        random = Random(number)
        prompt = random.choice(prompts)
        body: dict[str, Any] = {"prompt": prompt, "ignore_eos": True, "temperature": 0}
        client = served.client()
        if random.random() < 0.5:
            stream = client.stream("/v1/completions", **body, max_tokens=2000)
            for _ in range(random.randrange(1, 6)):
                next(stream)
            stream.close()
        else:
            reply = client.post("/v1/completions", **body, max_tokens=24)
            assert reply.json["choices"][0]["text"] == expected[prompt].text
        client.close()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(60)))
    wait_for(served.is_idle)


@contextmanager
def in_a_process(
    *options: str, serve: Callable[..., None] = program
) -> Iterator[tuple[Forked, int, TextIO]]:
    """Serve in a process of its own; yields it, its port, and what it writes to stderr."""
    pipe = Pipe()
    words = ("serve", FIXTURE, "--port", 0, *options)
    process = Forked(serve, *words, streams=(0, 1, pipe), environment=environment_of({}))
    with pipe as lines:
        try:
            yield process, announced_port(lines), lines
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_once_is_an_ordinary_end(
    small: LLM, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the banner on, a signal ends the server in order."""
    monkeypatch.setattr("mtp_export.serve.run._leave_threads", int)  # those of other tests are left
    said: list[str] = []

    def announce(url: str) -> None:
        said.append(url)
        os.kill(os.getpid(), number)

    with warnings.catch_warnings(), default_interrupts():
        warnings.simplefilter("error")
        server = Server(small, ServerOptions("tiny"))
        address = Address(port=0)
        with address.bound() as bound:
            leave = partial(said.append, "")
            run_server(server, address, bound, announce=announce, take_leave=leave)
    assert len(said) == 2 and said[0].startswith("http://127.0.0.1:") and said[1] == ""


@contextmanager
def default_interrupts() -> Iterator[None]:
    """SIGINT as Python takes it, where a shell's & had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_sigterm_drains_and_ends() -> None:
    """Requests under way end whole, nothing new is taken, and the exit code is 0."""
    with in_a_process("--enable-prefix-cache") as (process, port, lines):
        stream = Client(port).stream("/v1/completions", **LONG | {"max_tokens": 1000})
        chunks = [next(stream)]
        process.send_signal(signal.SIGTERM)
        chunks += stream
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert process.wait(60) == 0
        assert lines.read().endswith("Stopped: 1 request served.\n")
        with pytest.raises(OSError):
            Client(port).ask("GET", "/health")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_requests_that_are_left_at_the_end_get_an_error(number: int) -> None:
    error = {"message": "The server ended the request", "type": "server_error"}
    with in_a_process("--shutdown-timeout", "1") as (process, port, lines):
        stream = Client(port).stream("/v1/completions", **LONG)
        next(stream)
        kind = {"Content-Type": "application/json"}
        whole, unread = Client(port), Client(port)
        body = json.dumps(LONG).encode()
        whole._connection.request("POST", "/v1/completions", body, kind)
        # Of this one's body the server will never see the end.
        unread._connection.putrequest("POST", "/v1/completions")
        for header, value in (kind | {"Content-Length": "10"}).items():
            unread._connection.putheader(header, value)
        unread._connection.endheaders(b"{")
        client = Client(port)
        wait_for(lambda: client.metric("vllm:num_requests_running") == 2)
        process.send_signal(number)
        assert list(stream)[-1]["error"].items() >= error.items()
        for asked in (whole, unread):
            response = asked._connection.getresponse()
            assert response.status == 503
            assert json.loads(response.read())["error"].items() >= error.items()
        for asked in (whole, unread, client):
            asked.close()
        assert process.wait(60) == 0
        assert lines.read().endswith("Stopped: 0 requests served.\n")


@pytest.mark.parametrize("part", HANGING)
def test_what_hangs_does_not_keep_the_process(part: str) -> None:
    with in_a_process("--shutdown-timeout", "0", serve=HANGING[part]) as (process, port, lines):
        client = Client(port)
        kind = {"Content-Type": "application/json"}
        client._connection.request("POST", "/v1/completions", json.dumps(LONG).encode(), kind)
        assert next(line for line in lines if "hangs" in line)
        process.send_signal(signal.SIGTERM)
        assert client._connection.getresponse().status == 503
        client.close()
        assert process.wait(60) == 0
