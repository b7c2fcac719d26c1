"""Requests that the server refuses: each with a 4xx and OpenAI's error body, none with a 500."""

from __future__ import annotations

import json
import socket
from random import Random
from typing import Any

import pytest

from mtp_runtime import LLM, SamplingParams
from serve.running import Client, Running, wait_for

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
    "model": (1, [], {}, "other", ""),
    "temperature": (-0.1, "0", 101, True, [], 1e400),
    "top_p": (-0.1, 1.1, "1", {}),
    "top_k": (-2, 1.5, "5", 2**31),
    "n": (0, -1, 129, 1.5, "2", None, True),
    "max_tokens": (0, -1, 1.5, "9", 10**9, 10**30, []),
    "min_tokens": (-1, 3, "1", None, 10**30),
    "seed": (-1, 2**63, 0.5, "1", {}),
    "stop": (1, [1], {}, "", [""], ["a"] * 65),
    "stop_token_ids": ("a", [-1], [2**31], [1.5], [True], 5, [1] * 65),
    "ignore_eos": ("yes", 1, None, []),
    "stream": ("yes", 1, None),
    "stream_options": ({}, {"include_usage": True}, 1, "x"),
    "speculation": (1, "x", None),
    "user": (1, []),
    "frequency_penalty": (0.5, -1, "0", None),
    "presence_penalty": (2, {}),
    "best_of": (1, 2, None),
    "unknown": (None, 1, "x"),
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
    "logprobs": (1, "yes", None),
    "top_logprobs": (1, 21, -1),
    "response_format": ({"type": "json_object"}, 1, {}),
    "tools": ([], None, [{}]),
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
        "POST", "/v1/completions", b" " * ((16 << 20) + 1), Content_Type="application/json"
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
