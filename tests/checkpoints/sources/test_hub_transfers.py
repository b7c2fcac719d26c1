"""Bytes from the Hub request by request: what is asked of whom, and answers that are not taken."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import httpcore2
import httpx2
import pytest
from huggingface_hub import constants

from mtp_checkpoints.errors import IoError, MtpExportError
from mtp_checkpoints.sources import hub_client
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.hub_client import HubClient, RepositoryFile
from mtp_export import __version__
from mtp_export.publish.repository import Repository

ENDPOINT, STORAGE = "https://hub.example", "https://storage.example/signed"
WHERE = Address("hf://acme/tiny@c0ffee")
DATA = bytes(range(100))
SHA256 = hashlib.sha256(DATA).hexdigest()
BLOB = hashlib.sha1(b"blob 100\0" + DATA).hexdigest()
LARGE = RepositoryFile(path="a/b.bin", size=100, blob_id="p0inter", sha256=SHA256)
SMALL = RepositoryFile(path="a/b.json", size=100, blob_id=BLOB)
Handler = Callable[[httpx2.Request], httpx2.Response]
LINKS: dict[int, Handler] = {}  # what the Hub answers who asks it for a range


@pytest.fixture
def client() -> HubClient:
    return HubClient("acme/tiny", WHERE, commit="c0ffee", endpoint=ENDPOINT)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")


def serve(patch: pytest.MonkeyPatch, *handlers: Handler) -> list[httpx2.Request]:
    """Have requests answered by these, the last again and again; return the requests."""
    left, asked = list(handlers), list[httpx2.Request]()

    def handle(request: httpx2.Request) -> httpx2.Response:
        if "/resolve/" in request.url.path and "Range" in request.headers:
            return LINKS[0](request)
        asked.append(request)
        return (left.pop(0) if len(left) > 1 else left[0])(request)

    session = httpx2.Client(transport=httpx2.MockTransport(handle), follow_redirects=True)
    patch.setattr(hub_client, "get_session", lambda: session)
    return asked


def located(patch: pytest.MonkeyPatch, **changes: str | None) -> list[httpx2.Request]:
    """Have the Hub say where a file's bytes are, and of which file they are; return the requests
    for it. changes are headers, None one that is not there."""
    asked = list[httpx2.Request]()
    plain = {"x-repo-commit": "c0ffee", "x-linked-size": "100", "x-linked-etag": f'"{SHA256}"'}
    changed = {name.replace("_", "-"): value for name, value in changes.items()}
    headers = plain | {"location": STORAGE} | changed

    def redirect(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        return httpx2.Response(302, headers={k: v for k, v in headers.items() if v is not None})

    patch.setitem(LINKS, 0, redirect)
    return asked


def partial_answer(**changes: str) -> Handler:
    """The range that is asked for; changes are headers."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        first, last = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
        headers = {"content-range": f"bytes {first}-{last}/100"}
        headers |= {name.replace("_", "-"): value for name, value in changes.items()}
        return httpx2.Response(206, headers=headers, stream=Body(DATA[first : last + 1]))

    return handle


class Body(httpx2.SyncByteStream):
    """A body in two chunks."""

    def __init__(self, data: bytes, error: Exception | None = None) -> None:
        self._data, self._error = data, error

    def __iter__(self) -> Iterator[bytes]:
        yield self._data[:10]
        if self._error is not None:
            raise self._error
        yield self._data[10:]


def status(code: int, body: bytes = b"secret") -> Handler:
    return lambda request: httpx2.Response(code, content=body, request=request)


def fetch(client: HubClient, waits: list[float], file: RepositoryFile = LARGE) -> bytes:
    data = bytearray()
    client.fetch(file, range(20, 60), sink=data.extend, pause=waits.append)
    return bytes(data)


def refusal(call: Callable[[], object]) -> MtpExportError:
    with pytest.raises(MtpExportError) as caught:
        call()
    assert "secret" not in str(caught.value)
    return caught.value


def test_the_storage_is_asked_for_a_range_without_the_token(
    client: HubClient, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the Hub once for its link."""
    asked, links = serve(monkeypatch, partial_answer()), located(monkeypatch)
    for _ in range(2):
        assert fetch(client, waits) == DATA[20:60]
    (link,) = links
    assert str(link.url) == f"{ENDPOINT}/acme/tiny/resolve/c0ffee/a/b.bin"
    assert link.headers["Authorization"] == "Bearer hf_secret"
    assert [str(request.url) for request in asked] == [STORAGE] * 2
    for request in (link, *asked):
        assert request.method == "GET"
        assert request.headers["Range"] == "bytes=20-59"
        assert request.headers["Accept-Encoding"] == "identity"
        assert f"mtp-export/{__version__}" in request.headers["User-Agent"]
    assert not any("Authorization" in request.headers for request in asked)
    assert client.locations == {"a/b.bin": STORAGE} and waits == []


def test_the_hub_itself_is_given_the_token(
    client: HubClient, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = serve(monkeypatch, partial_answer())
    located(monkeypatch, location=f"{ENDPOINT}/bytes")
    fetch(client, waits)
    assert asked[0].headers["Authorization"] == "Bearer hf_secret"
    for other in ("https://hub.example:8443/x", "http://hub.example/x", "https://hub.example.org/"):
        located(monkeypatch, location=other)
        client.locations.clear()
        fetch(client, waits)
        assert "Authorization" not in asked[-1].headers


@pytest.mark.parametrize(
    ("changes", "expected", "found"),
    [
        ({"x_repo_commit": "beef"}, "commit c0ffee, as it listed", "commit beef"),
        ({"x_linked_size": "99"}, "size 100, as it listed", "size 99"),
        ({"x_linked_etag": 'W/"x"'}, f"checksum {SHA256}, as it listed", "checksum x"),
    ],
)
def test_a_link_to_another_file_is_not_taken(
    changes: dict[str, str],
    expected: str,
    found: str,
    client: HubClient,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve(monkeypatch, partial_answer())
    located(monkeypatch, **changes)
    error = refusal(lambda: fetch(client, waits))
    assert (error.where, error.expected, error.found) == (WHERE / "a/b.bin", expected, found)
    assert client.locations == {}
    located(monkeypatch, **dict.fromkeys(changes, None))  # a server that does not say it
    assert fetch(client, waits) == DATA[20:60]


def test_the_etag_of_a_small_file_says_nothing(
    client: HubClient, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, partial_answer())
    located(monkeypatch, x_linked_etag="whatever the mirror makes")
    assert fetch(client, waits, SMALL) == DATA[20:60]


@pytest.mark.parametrize(
    ("handler", "found"),
    [
        (status(200), "200, no Content-Range, identity"),
        (partial_answer(content_range="bytes 21-60/100"), "206, bytes 21-60/100, identity"),
        (partial_answer(content_range="bytes 20-59/99"), "206, bytes 20-59/99, identity"),
        (partial_answer(content_encoding="gzip"), "206, bytes 20-59/100, gzip"),
    ],
)
def test_other_bytes_than_were_asked_for(
    handler: Handler,
    found: str,
    client: HubClient,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve(monkeypatch, handler)
    located(monkeypatch)
    error = refusal(lambda: fetch(client, waits))
    assert error.what == "A server does not send the bytes that it was asked for"
    assert (error.where, error.found) == (WHERE / "a/b.bin", found)
    assert error.expected == "206, bytes 20-59/100, identity"


def test_more_bytes_than_were_asked_for_are_left(
    client: HubClient, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"content-range": "bytes 20-59/100"}
    serve(monkeypatch, lambda _: httpx2.Response(206, headers=headers, stream=Body(DATA[20:90])))
    located(monkeypatch)
    assert fetch(client, waits) == DATA[20:60]


def test_a_transfer_that_breaks_off_goes_on_where_it_stopped(
    client: HubClient, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(request: httpx2.Request) -> httpx2.Response:
        headers = {"content-range": "bytes 20-59/100"}
        body = Body(DATA[20:60], httpx2.ReadError("reset"))
        return httpx2.Response(206, headers=headers, stream=body)

    def short(request: httpx2.Request) -> httpx2.Response:
        headers = {"content-range": "bytes 30-59/100"}
        return httpx2.Response(206, headers=headers, stream=Body(DATA[30:50]))

    asked = serve(monkeypatch, cut, short, partial_answer())
    located(monkeypatch)
    assert fetch(client, waits) == DATA[20:60]
    ranges = [request.headers["Range"] for request in asked]
    assert ranges == ["bytes=20-59", "bytes=30-59", "bytes=50-59"]
    assert waits == [0.5, 0.5]


@pytest.mark.parametrize(
    ("code", "links"), [(403, 6), (400, 6), (404, 6), (503, 1), (429, 1), (500, 1)]
)
def test_a_link_that_has_expired_is_signed_anew(
    code: int,
    links: int,
    client: HubClient,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One whose storage is only busy is kept."""
    serve(monkeypatch, status(code))
    asked = located(monkeypatch)
    error = refusal(lambda: fetch(client, waits))
    assert error.what == "The Hub's storage serves no bytes of a file"
    assert (error.where, error.found) == (WHERE / "a/b.bin", f"HTTP {code}")
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert len(asked) == links


def test_the_hub_s_own_refusal_of_a_file_is_final(
    client: HubClient, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(403, headers={"x-error-code": "GatedRepo"}, request=request)

    serve(monkeypatch, partial_answer())
    monkeypatch.setitem(LINKS, 0, refuse)
    assert refusal(lambda: fetch(client, waits)).what == "The repository is gated"
    assert client.locations == {} and waits == []


@pytest.mark.parametrize("file", [SMALL, LARGE])
def test_a_whole_file_comes_with_its_checksum(
    file: RepositoryFile, client: HubClient, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = serve(monkeypatch, status(503), status(200, DATA))
    assert client.whole(file) == DATA
    assert waits == [0.5]
    for request in asked:
        assert request.method == "GET"
        assert str(request.url) == f"{ENDPOINT}/acme/tiny/resolve/c0ffee/{file.path}"
        assert request.headers["Authorization"] == "Bearer hf_secret"


@pytest.mark.parametrize(
    ("body", "found"),
    [(DATA[:99], "99 bytes"), (DATA[::-1], "100 bytes"), (DATA + b"x", "more bytes")],
)
def test_a_whole_file_that_is_another(
    body: bytes,
    found: str,
    client: HubClient,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve(monkeypatch, status(200, body))
    for file in (SMALL, LARGE):
        error = refusal(lambda file=file: client.whole(file))
        assert isinstance(error, IoError) and waits == []
        assert error.what == "A file does not arrive as the repository lists it"
        assert (error.where, error.found) == (WHERE / file.path, found)
        assert error.expected == "100 bytes with the listed checksum"
        assert str(error.todo).startswith("Run the same command again; if it fails again")


def test_an_endless_file_is_left_after_its_size(
    client: HubClient, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless(httpx2.SyncByteStream):
        sent = 0

        def __iter__(self) -> Iterator[bytes]:
            while True:
                Endless.sent += 10
                assert Endless.sent < 1000
                yield b"x" * 10

    serve(monkeypatch, lambda request: httpx2.Response(200, stream=Endless(), request=request))
    assert refusal(lambda: client.whole(SMALL)).found == "more bytes"


@pytest.mark.parametrize("code", [401, 404, 500])
def test_answers_of_the_hub(
    code: int, client: HubClient, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked as its listings are: with the token, and patiently."""
    asked = serve(monkeypatch, status(code))
    error = refusal(lambda: client.answer(f"{ENDPOINT}/api/models"))
    assert (error.where, error.found) == (WHERE, f"HTTP {code}")
    assert len(asked) == len(waits) + 1 == (6 if code == 500 else 1)
    asked = serve(monkeypatch, status(200, b"[]"))
    assert client.answer(f"{ENDPOINT}/api/models").json() == []
    assert asked[0].headers["Authorization"] == "Bearer hf_secret"
    assert asked[0].headers["Accept-Encoding"] == "identity"


def test_every_request_gives_up_after_as_long_as_the_library_s(
    client: HubClient, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which people set by HF_HUB_DOWNLOAD_TIMEOUT."""
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 7)
    answers = (partial_answer(), status(200, DATA), status(200, b"[]"))
    asked, links = serve(monkeypatch, *answers), located(monkeypatch)
    fetch(client, waits)
    client.whole(LARGE)
    client.answer(f"{ENDPOINT}/api/models")
    seconds = [set(request.extensions["timeout"].values()) for request in (*links, *asked)]
    assert seconds == [{7.0}] * 4


def test_a_read_of_a_socket_is_larger_than_the_library_s() -> None:
    assert 64 << 10 < httpcore2.HTTP11Connection.READ_NUM_BYTES <= 1 << 20


def test_the_library_s_own_interface_says_who_asks(client: HubClient) -> None:
    api = Repository(client).api
    assert (api.endpoint, api.library_name, api.library_version) == (
        ENDPOINT,
        "mtp-export",
        __version__,
    )
