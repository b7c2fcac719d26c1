"""Requests that the server refuses: each with a 4xx and OpenAI's error body, none with a 500."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mtp_export.serve import app
from mtp_export.serve.intake import take
from mtp_export.serve.limits import PIECE_BYTES
from mtp_export.serve.protocol import ChatBody, CompletionBody
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.models.load import Loaded
from mtp_runtime.tokenizer import Tokenizer
from serve.conftest import FIXTURE
from serve.running import Client, Running, running, wait_for

JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    1e999,
    "x",
    "",
    [],
    {},
    [[]],
    [None],
    {"a": 1},
    10**30,
)
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "a b", "max_tokens": 2}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
# For each field, values that no server may take.
BAD: dict[str, tuple[Any, ...]] = {
    "model": (1, [], {}, "other", "", "a" * 257),
    "temperature": (-0.1, "0", 101, True, [], 1e400),
    "top_p": (-0.1, 1.1, "1", {}),
    "top_k": (-2, 1.5, "5", 2**31),
    "n": (0, -1, 129, 1.5, "2", True),
    "max_tokens": (0, -1, 1.5, "9", 10**9, 10**30, []),
    "min_tokens": (-1, 3, "1", 10**30),
    "seed": (-1, 2**63, 0.5, "1", {}),
    "stop": (1, [1], {}, "", [""], ["a"] * 65, "a" * 1025, [None]),
    "stop_token_ids": ("a", [-1], [2**31], [1.5], [True], 5, [1] * 65),
    "ignore_eos": ("yes", 1, []),
    "stream": ("yes", 1),
    "stream_options": ({}, {"include_usage": True}, 1, "x"),
    "speculation": (1, "x"),
    "user": (1, [], "a" * 257),
    "frequency_penalty": (0.5, -1, "0"),
    "presence_penalty": (2, {}),
    "best_of": (1, 2),
    "unknown": (1, "x"),
}
BAD_COMPLETION = BAD | {
    "prompt": (None, 1, {}, [], [[]], [None], [1.5], ["a", 1], [[1], "a"], [-1], [99999], [True]),
    "echo": ("yes", 1),
    "logprobs": (-1, 21, 1.5, True, "1"),
    "messages": ([],),
    "top_logprobs": (1,),
}
BAD_CHAT = BAD | {
    "messages": (
        *(None, [], "hi", {}, [1], [[]], [{}], [{"role": "user", "content": 1}]),
        *([{"content": "a"}], [{"role": "", "content": "a"}], [{"role": 1, "content": "a"}]),
        *([{"role": "user", "content": "a", "x": 1}], [{"role": "user", "content": [{}]}]),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ),
    "max_completion_tokens": (0, -1, "1", 10**30),
    "logprobs": (1, "yes"),
    "top_logprobs": (1, 21, -1),
    "response_format": ({"type": "json_object"}, 1, {}),
    "tools": ([], [{}]),
    "prompt": ("a",),
}


def malformed(random: Random) -> tuple[str, bytes]:
    """A path, and a body that must be refused there."""
    chat = random.random() < 0.5
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = dict(CHAT if chat else COMPLETION)
    bad = BAD_CHAT if chat else BAD_COMPLETION
    name = random.choice(list(bad))
    body[name] = random.choice(bad[name])
    raw = json.dumps(body).encode()
    kind = random.random()
    if kind < 0.1:
        return path, raw[: random.randrange(len(raw))]
    if kind < 0.15:
        return path, random.randbytes(random.randrange(200))
    if kind < 0.2:
        return path, raw.replace(b'"max_tokens"', b'"max_tokens": 1, "max_tokens"', 1)
    if kind < 0.25:
        return path, b"[" * random.randrange(1, 100_000)
    if kind < 0.3:
        return path, json.dumps(random.choice(JUNK[:-1])).encode()
    if kind < 0.35:
        return path, raw.replace(b'"a', b'"\\ud800', 1)
    return path, raw


def check_refusal(client: Client, path: str, raw: bytes) -> None:
    reply = client.ask("POST", path, raw, Content_Type="application/json")
    assert 400 <= reply.status < 500, (path, raw[:500], reply)
    error = reply.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and len(error["message"]) <= 2000


def run_malformed(client: Client, served: Running, seed: int, count: int) -> None:
    random = Random(seed)
    for _ in range(count):
        check_refusal(client, *malformed(random))
    wait_for(served.is_idle)


def test_every_bad_value_is_refused(client: Client, served: Running) -> None:
    for path, good, bad in (
        ("/v1/completions", COMPLETION, BAD_COMPLETION),
        ("/v1/chat/completions", CHAT, BAD_CHAT),
    ):
        for name, values in bad.items():
            for value in values:
                check_refusal(client, path, json.dumps(good | {name: value}).encode())
        assert client.post(path, **good).status == 200


def test_malformed_requests_are_refused(client: Client, served: Running) -> None:
    run_malformed(client, served, seed=0, count=300)


@pytest.mark.nightly
def test_ten_thousand_malformed_requests_are_refused(client: Client, served: Running) -> None:
    run_malformed(client, served, seed=1, count=10_000)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": [1 << 31]}, "prompt.0", "Input should be less than 2147483648"),
        ({"prompt": [-1]}, "prompt.0", "Input should be greater than or equal to 0"),
        ({"prompt": [1.0]}, "prompt.0", "Input should be a valid integer"),
        ({"prompt": [[1], [2, "a"]]}, "prompt.1.1", "Input should be a valid integer"),
        ({"prompt": ["a", 1]}, "prompt.1", "Input should be a valid string"),
        ({"prompt": []}, "prompt", "List should have at least 1 item"),
        ({"prompt": "a", "stop": ""}, "stop", "String should have at least 1 character"),
        ({"prompt": "a", "stop": ["b", 1]}, "stop.1", "Input should be a valid string"),
        ({"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty", "Only 0 is supported"),
        ({"prompt": "a", "x" * 9999: 1, "y": 1}, "x" * 200, "x" * 2000),
        ({"prompt": "a", "n": 64, "logprobs": 20, "max_tokens": 999}, "logprobs", "1048576"),
    ],
)
def test_what_a_refusal_says(client: Client, body: dict[str, Any], param: str, words: str) -> None:
    error = client.post("/v1/completions", **body).json["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_a_key_twice_is_named(client: Client) -> None:
    raw = b'{"prompt": "a", "prompt": "b"}'
    reply = client.ask("POST", "/v1/completions", raw, Content_Type="application/json")
    assert reply.json["error"]["message"] == "The body is no JSON: the key 'prompt' twice"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"prompt": [%s7]}' % (b"7," * (1 << 18)), "more than 262144 values"),
        (b'{"prompt": ["%s"]}' % b'","'.join([b""] * (1 << 18)), "more than 262144 texts"),
        (b'{"prompt": %s' % (b'"' * (1 << 20)), "more than 262144 texts"),
        (b"[" * (1 << 17), "more than 32768 arrays and objects"),
        (b"{%s}" % b",".join(b'"%d":1' % key for key in range(1 << 16)), "more than 32768 fields"),
        (b'{"prompt": [%s]}' % (b"1" * (1 << 17)), "more than 256 digits or spaces in a row"),
        (b'{"prompt": [%s]}' % b",".join([b"1" * 257] * 300), "more than 256 digits or spaces"),
        (b'{"prompt": "\\\\\\"%s"}' % (b"," * (1 << 18)), "A text has more tokens"),
        # A quote whose backslash is the last byte of a mebibyte.
        (b'{"prompt": "%s\\"%s"}' % (b"a" * 1048563, b"," * (1 << 18)), "A text has more tokens"),
    ],
)
def test_bodies_of_too_many_values_are_not_parsed(client: Client, raw: bytes, words: str) -> None:
    reply = client.ask("POST", "/v1/completions", raw, Content_Type="application/json")
    assert reply.status == 400
    assert words in reply.json["error"]["message"]


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 1])
def test_a_body_is_taken_whole_and_once(size: int) -> None:
    whole = Random(size).randbytes(size)
    body = bytearray(whole)
    assert take(body) == whole
    assert not body


def test_bodies_are_taken_outside_of_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noted(body: bytearray) -> bytes:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        threads.append(threading.current_thread())
        return take(body)

    monkeypatch.setattr(app, "take", noted)
    assert client.post("/v1/completions", **COMPLETION).status == 200
    assert len(threads) == 1


def test_a_text_far_too_long_is_refused_before_it_is_tokenized(
    client: Client, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lengths = type(served.llm.tokenizer).encode, []

    def counted(self: Any, text: str, **options: Any) -> tuple[int, ...]:
        lengths.append(len(text))
        return real(self, text, **options)

    monkeypatch.setattr(type(served.llm.tokenizer), "encode", counted)
    text = "a " * 500_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        reply = client.post(path, **body)
        assert reply.status == 400 and "more tokens than" in reply.json["error"]["message"]
    assert sum(lengths) < 200_000


def test_ids_are_echoed_where_there_is_a_tokenizer_alone(loaded: Loaded, tmp_path: Path) -> None:
    llm = LLM(FIXTURE, loaded=loaded)
    llm.tokenizer = Tokenizer(tmp_path, None)
    body = {"prompt": [1, 2, 3], "max_tokens": 3}
    with running(llm) as server:
        client = server.client()
        assert client.post("/v1/completions", **body).status == 200
        reply = client.post("/v1/completions", **body, echo=True)
        client.close()
    assert reply.status == 400 and "no tokenizer" in reply.json["error"]["message"]


def test_null_is_a_field_that_is_not_there(client: Client) -> None:
    for path, good, fields in (
        ("/v1/completions", COMPLETION, CompletionBody.model_fields),
        ("/v1/chat/completions", CHAT, ChatBody.model_fields),
    ):
        optional = [name for name in fields if name not in good]
        nulls = dict.fromkeys((*optional, "tools", "logit_bias"))
        assert client.post(path, **good, **nulls).status == 200
    for part in ({"content": None}, {"name": None}, {"refusal": None, "tool_calls": None}):
        message = {"role": "assistant", "content": "a"} | part
        assert client.post("/v1/chat/completions", messages=[message], max_tokens=1).status == 200


def test_other_ways_to_ask_wrongly(client: Client) -> None:
    good = json.dumps(COMPLETION).encode()
    for method, path, status in (
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/nothing", 404),
        ("GET", "/../etc/passwd", 404),
        ("GET", "/v1/models/other", 404),
    ):
        reply = client.ask(method, path, None, Content_Type="application/json")
        assert (reply.status, reply.json["error"]["type"]) == (status, "invalid_request_error")
    for kind in ("text/plain", "", "application/x-www-form-urlencoded"):
        assert client.ask("POST", "/v1/completions", good, Content_Type=kind).status == 415
    assert client.ask("GET", "/health", Host="evil.example").status == 403
    large = client.ask(
        "POST", "/v1/completions", b" " * ((8 << 20) + 1), Content_Type="application/json"
    )
    assert large.status == 413


@pytest.mark.parametrize(
    "raw",
    [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\n"],
)
def test_what_is_no_http_ends_the_connection_alone(raw: bytes, served: Running) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(1000)
    assert answer == b"" or b" 40" in answer.splitlines()[0]
    client = served.client()
    assert client.ask("GET", "/health").status == 200
    client.close()


def test_neutral_values_are_taken(client: Client, plain: LLM) -> None:
    (expected,) = plain.generate("a b", SamplingParams(max_tokens=4))
    neutral = {"top_p": 1, "top_k": -1, "n": 1, "stop": None, "seed": None, "user": "me"}
    neutral |= {"frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": None}
    reply = client.post("/v1/completions", prompt="a b", max_tokens=4, temperature=0, **neutral)
    assert reply.json["choices"][0]["text"] == expected.text
