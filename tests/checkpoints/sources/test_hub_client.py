"""Requests to the Hub: which failures are tried again after which waits, and what listings are."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from mtp_checkpoints.errors import InvalidInputError, IoError, MtpExportError
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.hub_client import HubClient, hub_endpoint

ENDPOINT = "https://hub.example"
WHERE = Address("hf://acme/tiny")
CLIENT = HubClient("acme/tiny", WHERE, commit="c0ffee", endpoint=ENDPOINT)
BLOB = {"type": "file", "path": "config.json", "size": 5, "oid": "b10b"}
LARGE = {
    "type": "file",
    "path": "a/model.safetensors",
    "size": 7,
    "oid": "p0inter",
    "lfs": {"size": 7, "oid": "5ha", "pointerSize": 1},
}


def refusal(error: Exception) -> MtpExportError:
    def request() -> None:
        raise error

    with pytest.raises(MtpExportError) as caught:
        CLIENT.patiently(request, WHERE)
    assert caught.value.where == WHERE
    return caught.value


def answered(status: int, **headers: str) -> HfHubHTTPError:
    request = httpx2.Request("GET", f"{ENDPOINT}/api")
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HfHubHTTPError("no", response=httpx2.Response(status, headers=named, request=request))


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_answers_that_may_be_another_one_later(status: int, waits: list[float]) -> None:
    refusal(answered(status))
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 409, 410, 451, 501, 505])
def test_answers_that_stay(status: int, waits: list[float]) -> None:
    refusal(answered(status))
    assert waits == []


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (httpx2.ReadTimeout("x"), True),
        (httpx2.ConnectTimeout("x"), True),
        (httpx2.ConnectError("x"), True),
        (httpx2.ReadError("x"), True),
        (httpx2.RemoteProtocolError("x"), True),
        (httpx2.ProxyError("x"), True),
        (httpx2.UnsupportedProtocol("x"), False),
        (httpx2.TooManyRedirects("x"), False),
        (httpx2.InvalidURL("x"), False),
        (OfflineModeIsEnabled("x"), False),
    ],
)
def test_failures_of_the_network(error: Exception, again: bool, waits: list[float]) -> None:
    assert isinstance(refusal(error), IoError)
    assert bool(waits) is again


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"retry_after": "7"}, 7.0),
        ({"retry_after": " 7 "}, 7.0),
        ({"retry_after": "soon"}, 0.0),
        ({"retry_after": "-3"}, 0.0),
        ({"ratelimit": '"api";r=0;t=40'}, 40.0),
        ({"ratelimit": '"api";r=0;t=40', "retry_after": "7"}, 40.0),
        ({"ratelimit": '"api";r=1;t=40', "retry_after": "7"}, 7.0),
        ({"ratelimit": '"api";r=1;t=40'}, 0.0),
        ({}, 0.0),
    ],
)
def test_waits_that_a_server_asks_for(
    headers: dict[str, str], told: float, waits: list[float]
) -> None:
    refusal(answered(429, **headers))
    assert waits[0] == told + 0.5


def listing(monkeypatch: pytest.MonkeyPatch, *pages: Any, following: str = "") -> list[str]:
    """Have the client get these pages, each linked to the next; return the addresses it asks."""
    left, asked = list(pages), list[str]()

    def answer(client: HubClient, url: str) -> Any:
        asked.append(url)
        page = left.pop(0)
        links = {"next": {"url": following}} if left else {}
        return SimpleNamespace(json=lambda: page, links=links)

    monkeypatch.setattr(HubClient, "answer", answer)
    return asked


def test_a_listing_is_read_from_its_own_endpoint_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = "https://elsewhere.example/api/models/acme/tiny/tree/c0ffee?cursor=x"
    folder = {"type": "directory", "path": "a"}
    asked = listing(monkeypatch, [BLOB, folder], [LARGE], following=elsewhere)
    files = CLIENT.tree()
    assert asked == [
        f"{ENDPOINT}/api/models/acme/tiny/tree/c0ffee?recursive=true",
        f"{ENDPOINT}/api/models/acme/tiny/tree/c0ffee?cursor=x",
    ]
    assert [(file.path, file.size) for file in files] == [(one["path"], one["size"])
                                                          for one in (BLOB, LARGE)]  # fmt: skip
    assert files[0].sha256 is None and files[1].sha256 == "5ha"


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        (BLOB | {"path": 1}, "TypeError"),
        (BLOB | {"oid": None}, "TypeError"),
        (BLOB | {"size": -1}, "TypeError"),
        (BLOB | {"size": True}, "TypeError"),
        (BLOB | {"size": 1.5}, "TypeError"),
        (LARGE | {"lfs": {"size": 7, "oid": 5, "pointerSize": 1}}, "TypeError"),
        (LARGE | {"lfs": {"size": 7}}, "KeyError"),
        ({"type": "file"}, "KeyError"),
        ({}, "KeyError"),
        ("text", "TypeError"),
    ],
)
def test_a_listing_of_something_else(
    entry: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing(monkeypatch, [BLOB, entry])
    with pytest.raises(IoError) as caught:
        CLIENT.tree()
    error = caught.value
    assert error.what == "The Hub does not answer as it should"
    assert error.expected == "a list of files with type, path, size and checksum"
    assert (error.where, error.found) == (WHERE, f"another answer ({kind})")


def test_a_listing_that_is_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = SimpleNamespace(json=lambda: json.loads("[" * 100_000), links={})
    monkeypatch.setattr(HubClient, "answer", lambda client, url: deep)
    with pytest.raises(IoError, match="RecursionError"):
        CLIENT.tree()


def test_an_empty_file_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    listing(monkeypatch, [BLOB | {"size": 0}])
    assert [file.size for file in CLIENT.tree()] == [0]


def test_a_repository_without_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = listing(monkeypatch, {"sha": "abc"}, {"id": "acme/tiny"})
    assert CLIENT.commit_of("a/v1") == "abc"
    with pytest.raises(IoError) as caught:
        CLIENT.commit_of(None)
    assert (caught.value.expected, caught.value.found) == ("a repository's commit", "none")
    where = f"{ENDPOINT}/api/models/acme/tiny"
    assert asked == [f"{where}/revision/a%2Fv1", where]


@pytest.mark.parametrize("facts", [["sha"], "sha", {"sha": 5}, None])
def test_facts_of_something_else(facts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listing(monkeypatch, facts)
    with pytest.raises(IoError, match="another answer") as caught:
        CLIENT.info()
    assert caught.value.expected == "an object of the repository's facts"


def test_a_mirror_may_stand_in_for_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/")
    assert hub_endpoint() == "https://mirror.example"
    monkeypatch.setenv("HF_ENDPOINT", "")
    assert hub_endpoint().startswith("https://")
    assert isinstance(refusal(answered(404)), InvalidInputError)
