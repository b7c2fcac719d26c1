"""Object stores answer by answer: how they are asked, which failures are tried again, and the words
of each refusal. Real requests are those of test_object_stores.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_checkpoints.errors import InvalidInputError, IoError, MtpExportError, UnsupportedError
from mtp_checkpoints.sources import object_store, transfers
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.object_store import ObjectFile, open_object_store
from mtp_export import __version__

obstore = pytest.importorskip("obstore", reason="the extra cloud is not installed")
of = pytest.importorskip("obstore.exceptions")
pytest.importorskip("obstore.store")

PLACE = Address("s3://bucket/tiny")
WHERE = PLACE / "config.json"
PATIENT = [0.5, 1.0, 2.0, 4.0, 8.0]
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and AWS_REGION;"
    " AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or log in with gcloud auth application-default login;"
    " GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN;"
    " AZURE_SKIP_SIGNATURE=true for a public container",
}
META: dict[str, Any] = {"path": "config.json", "e_tag": '"abc"', "size": 9}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials of the machine's."""
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_ALLOW_HTTP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


def file_of(size: int = 9, place: Address = WHERE) -> ObjectFile:
    store: Any = object()
    return ObjectFile(place, name="tiny/name", size_bytes=size, version="abc", store=store)


def fetch(file: ObjectFile, span: range, waits: list[float]) -> bytes:
    data = bytearray()
    file.fetch(span, data.extend, waits.append)
    return bytes(data)


def fetch_error(waits: list[float], place: Address = WHERE) -> MtpExportError:
    with pytest.raises(MtpExportError) as caught:
        fetch(file_of(place=place), range(2, 7), waits)
    assert caught.value.where == place
    return caught.value


Answer = Callable[..., Any]


def answer(**changes: Any) -> SimpleNamespace:
    """Bytes 2 to 6 of the object, in two chunks."""
    plain = {"meta": META, "range": (2, 7), "stream": lambda least: iter([b"cd", b"efg"])}
    return SimpleNamespace(**(plain | changes))


def answering(patch: pytest.MonkeyPatch, *answers: Any) -> list[tuple[Any, ...]]:
    """Have the store give these answers, the last again and again; return what it is asked."""
    left, asked = list(answers), list[tuple[Any, ...]]()

    def get(*arguments: Any, **options: Any) -> Any:
        asked.append((*arguments[1:], options))
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found

    patch.setattr(obstore, "get", get)
    return asked


def test_bytes_are_asked_for_on_the_condition_of_their_etag(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(monkeypatch, answer())
    assert fetch(file_of(), range(2, 7), waits) == b"cdefg"
    options = {"options": {"range": (2, 7), "if_match": '"abc"'}}
    assert (asked, waits) == ([("tiny/name", options)], [])
    answering(monkeypatch, answer(range=(0, 9), stream=lambda least: iter([b"a" * 9])))
    assert file_of().whole() == b"a" * 9
    assert file_of() == file_of(size=5) and file_of().sha256 is None


def test_a_transfer_that_breaks_off_goes_on(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it stopped, and as patiently as at first after every byte."""

    def broken(least: int) -> Iterator[bytes]:
        assert least == 1
        yield b"cd"
        raise OSError("reset")

    rest = answer(range=(4, 7), stream=lambda least: iter([b"efg"]))
    asked = answering(monkeypatch, of.GenericError("x"), answer(stream=broken), rest)
    assert fetch(file_of(), range(2, 7), waits) == b"cdefg"
    assert [options["options"]["range"] for _, options in asked] == [(2, 7), (2, 7), (4, 7)]
    assert waits == [0.5, 0.5]


def test_a_body_that_ends_early(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, answer(stream=lambda least: iter(())))
    error = fetch_error(waits)
    assert (error.what, error.found) == (
        "The object store does not answer",
        "the body ended early",
    )
    assert (error.expected, waits) == ("an answer within 6 attempts", PATIENT)
    assert str(error.todo).startswith("Check the network, and the endpoint and region")


@pytest.mark.parametrize(
    "changes",
    [
        {"meta": META | {"size": 8}},
        {"range": (2, 6)},
        {"range": (0, 9)},
    ],
)
def test_other_bytes_than_were_asked_for(
    changes: dict[str, Any], waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, answer(**changes))
    error = fetch_error(waits)
    assert isinstance(error, IoError) and waits == []
    assert error.what == "A store does not answer as an object store must"
    assert error.expected == "size and range (9, (2, 7))"
    meta, span = ({"meta": META, "range": (2, 7)} | changes).values()
    assert error.found == str((meta["size"], span))
    assert str(error.todo).startswith("Check the endpoint that the environment sets")


@pytest.mark.parametrize(
    "words", ["NotPartial", "UnexpectedRange", "ContentRange", "InvalidRangeRequest"]
)
def test_other_bytes_by_the_library_s_own_words(
    words: str, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, of.GenericError(f"Generic error: {words} secret"))
    error = fetch_error(waits)
    assert (error.expected, error.found) == ("the bytes that it was asked for", "others")
    assert isinstance(error, IoError) and waits == []


@pytest.mark.parametrize(
    "found",
    [of.PreconditionError("status code: 503 secret"), answer(meta=META | {"e_tag": '"other"'})],
    ids=["refused", "sent"],
)
def test_an_object_that_has_changed(
    found: Any, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a store ignores the condition, and sends it."""
    answering(monkeypatch, found)
    error = fetch_error(waits)
    assert isinstance(error, InvalidInputError) and waits == []
    assert error.what == "The source changed while it was exported"
    assert error.expected == "the object that was listed at the beginning, by its ETag"
    assert error.found == "an object with another one"
    assert str(error.todo).startswith("Wait until nothing writes it any more")


@pytest.mark.parametrize("scheme", CREDENTIALS)
@pytest.mark.parametrize(
    ("said", "found", "again"),
    [
        ("status code: 401", "HTTP 401", False),
        ("status code: 403", "HTTP 403", False),
        ("http://169.254.169.254/latest status code: 404", "no credentials", True),
        ("TokenRequest", "no credentials", True),
    ],
)
def test_a_store_that_gives_no_access(
    scheme: str,
    said: str,
    found: str,
    again: bool,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering(monkeypatch, of.GenericError(f"{said} secret"))
    error = fetch_error(waits, Address(f"{scheme}://bucket/config.json"))
    assert isinstance(error, InvalidInputError) and waits == (PATIENT if again else [])
    assert (error.what, error.found) == ("The store gives no access", found)
    assert error.expected == "credentials that may list and read it"
    assert error.todo == f"Check the name, and the credentials: {CREDENTIALS[scheme]}"


@pytest.mark.parametrize(
    ("error", "found", "again"),
    [
        *((of.GenericError(f"status code: {status} x"), f"HTTP {status}", True)
          for status in (408, 429, 500, 502, 503, 504)),
        *((of.GenericError(f"status code: {status} x"), f"HTTP {status}", False)
          for status in (400, 409, 416, 501)),
        (of.GenericError("secret"), "no whole answer", True),
        (ConnectionResetError("secret"), "no whole answer", True),
    ],
)  # fmt: skip
def test_a_store_that_does_not_answer(
    error: Exception,
    found: str,
    again: bool,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering(monkeypatch, error)
    refusal = fetch_error(waits)
    assert isinstance(refusal, IoError) and waits == (PATIENT if again else [])
    assert (refusal.what, refusal.found) == ("The object store does not answer", found)


def test_a_further_attempt_names_the_bucket(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", transfers.__name__)
    cut = answer(stream=lambda least: iter([b"cd"]))
    rest = answer(range=(4, 7), stream=lambda least: iter([b"efg"]))
    answering(monkeypatch, cut, rest)
    assert fetch(file_of(), range(2, 7), waits) == b"cdefg"
    assert caplog.messages == ["s3://bucket: the body ended early; attempt 2 of 6 in 0.5 s"]
    caplog.clear()
    answering(monkeypatch, of.GenericError("status code: 503 secret"), answer())
    assert fetch(file_of(), range(2, 7), waits) == b"cdefg"
    assert caplog.messages == ["s3://bucket: HTTP 503; attempt 2 of 6 in 0.5 s"]


def test_an_object_that_is_gone(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, of.GenericError("status code: 404 secret"))
    error = fetch_error(waits)
    assert isinstance(error, InvalidInputError) and waits == []
    assert error.what == "There is no such bucket, folder or object"
    assert error.expected == "one that the credentials may list and read"
    assert error.found == "HTTP 404"
    words = "Check the address, and the endpoint and region that the environment sets"
    assert error.todo == words


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A store that lists pages; asked holds the addresses and options that it was made with."""
    found = SimpleNamespace(pages=[[META]], asked=[], chunks=[])

    def from_url(url: str, **options: Any) -> Any:
        found.asked.append((url, options))
        return found

    def listed(store: Any, chunk_size: int) -> Iterator[list[dict[str, Any]]]:
        assert store is found
        found.chunks.append(chunk_size)
        yield from found.pages

    monkeypatch.setattr(obstore.store, "from_url", from_url)
    monkeypatch.setattr(obstore, "list", listed)
    return found


def open_error(address: str, kind: type[MtpExportError]) -> MtpExportError:
    with pytest.raises(kind) as caught:
        open_object_store(Address(address))
    return caught.value


@pytest.mark.parametrize(("scheme", "variable"), [("s3", "AWS"), ("gs", "GOOGLE"), ("az", "AZURE")])
def test_how_a_store_is_opened(
    scheme: str, variable: str, store: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slash at the end says nothing; waiting is the transfers' own."""
    text = f"{scheme}://bucket/tiny"
    store.pages = [
        [META, {"path": "", "e_tag": None, "size": 0}],
        [{"path": "a/b", "e_tag": 'W/"x"', "size": 0}],
    ]
    source = open_object_store(Address(f"{text}/"))
    options = {
        "client_options": {
            "allow_http": False,
            "user_agent": f"mtp-export/{__version__}",
            "connect_timeout": timedelta(seconds=10),
            "read_timeout": timedelta(seconds=10),
            "timeout": timedelta(days=1),
        },
        "retry_config": {"max_retries": 0},
    }
    assert (store.asked, store.chunks) == ([(text, options)], [1000])
    assert (source.path, source.origin) == (Address(text), {"url": text})
    found = [(f.path, f.size_bytes, f.version) for f in source.files.values()]
    assert found == [
        (Address(f"{text}/config.json"), 9, "abc"),
        (Address(f"{text}/a/b"), 0, "x"),
    ]
    assert source.names() == {"config.json"} and source.names("a") == {"b"}
    for value, allowed in (("true", True), ("1", False)):
        monkeypatch.setenv(f"{variable}_ALLOW_HTTP", value)
        open_object_store(Address(text))
        assert store.asked[-1][1]["client_options"]["allow_http"] is allowed


@pytest.mark.parametrize(
    ("variables", "file", "asks"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"AWS_PROFILE": "x"}, False, True),
        ({"AWS_PROFILE": "x", "AWS_ACCESS_KEY_ID": "x"}, True, False),
        ({"AWS_PROFILE": "x", "AWS_SKIP_SIGNATURE": "true"}, True, False),
    ],
)
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_profiles_are_amazon_s(
    scheme: str,
    variables: dict[str, str],
    file: bool,
    asks: bool,
    store: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = object()
    module = SimpleNamespace(Boto3CredentialProvider=lambda: provider)
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", module)  # type: ignore[arg-type]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if file:
        (tmp_path / "none").touch()
    open_object_store(Address(f"{scheme}://bucket/tiny"))
    wanted = provider if asks and scheme == "s3" else None
    assert store.asked[0][1].get("credential_provider") is wanted


def test_credentials_in_the_home_folder(
    store: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE")
    monkeypatch.setenv("HOME", str(tmp_path))
    module = SimpleNamespace(Boto3CredentialProvider=lambda: "provider")
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", module)  # type: ignore[arg-type]
    open_object_store(PLACE)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").touch()
    open_object_store(PLACE)
    found = ["credential_provider" in options for _, options in store.asked]
    assert found == [False, True]


def test_profiles_that_cannot_be_read(
    store: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def provider() -> None:
        raise LookupError("secret")

    monkeypatch.setenv("AWS_PROFILE", "x")
    module = SimpleNamespace(Boto3CredentialProvider=provider)
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", module)  # type: ignore[arg-type]
    error = open_error(PLACE.text, InvalidInputError)
    assert error.what == "Amazon's credentials cannot be read from the profile"
    assert (error.where, error.found) == (PLACE, "LookupError")
    assert error.expected == "a profile that boto3 reads"
    assert error.todo == "Check AWS_PROFILE and ~/.aws/credentials, or unset it"
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", None)
    error = open_error(PLACE.text, UnsupportedError)
    assert error.what == "Profiles of Amazon's credentials need a package that is not installed"
    assert error.where == PLACE
    assert str(error.todo).startswith("Install it with pip install boto3")


def test_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    error = open_error(PLACE.text, UnsupportedError)
    assert error.what == "Object stores need a package that is not installed"
    assert error.where == PLACE
    assert str(error.todo).startswith("Install it with pip install 'mtp-export[cloud]'")


@pytest.mark.parametrize("scheme", CREDENTIALS)
def test_settings_that_obstore_refuses(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_url(url: str, **options: Any) -> None:
        raise ValueError("secret")

    monkeypatch.setattr(obstore.store, "from_url", from_url)
    error = open_error(f"{scheme}://bucket", InvalidInputError)
    assert error.what == "The environment's settings for the store cannot be used"
    assert (error.where, error.found) == (Address(f"{scheme}://bucket"), "ValueError")
    assert error.expected == "settings that obstore takes"
    assert error.todo == f"Check {CREDENTIALS[scheme]}"


@pytest.mark.parametrize("scheme", CREDENTIALS)
@pytest.mark.parametrize(
    "rest", ["", "user:secret@bucket", "bucket?secret", "bucket/a#secret", "/a"]
)
def test_addresses_that_are_none(scheme: str, rest: str) -> None:
    error = open_error(f"{scheme}://{rest}", InvalidInputError)
    assert error.what == "This is no address of a folder in a bucket"
    assert error.where == f"{scheme}://…"
    assert str(error.expected).startswith("s3://bucket/folder, gs://bucket/folder or az://")
    assert "secret" not in str(error).replace("may be a secret", "")
    assert error.todo == f"Give credentials by the environment: {CREDENTIALS[scheme]}"


def test_a_folder_without_objects(store: SimpleNamespace) -> None:
    for pages in ([], [[]], [[{"path": "", "e_tag": "x", "size": 0}]]):
        store.pages = pages
        error = open_error(f"{PLACE.text}//", InvalidInputError)
        assert error.what == "There are no objects here"
        assert (error.where, error.found) == (PLACE, "no object")
        assert error.expected == "config.json and safetensors shards"
        assert str(error.todo).startswith("Check the bucket and the folder")


def test_a_folder_of_too_many_objects(
    store: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "MAX_OBJECTS", 4000)
    metas = [META | {"path": str(number)} for number in range(4001)]
    store.pages = [metas[:2000], metas[2000:4000]]
    assert len(open_object_store(PLACE).files) == 4000
    store.pages = [metas[:2000], metas[2000:]]
    error = open_error(PLACE.text, InvalidInputError)
    assert error.what == "There are too many objects for a checkpoint"
    assert (error.where, error.expected, error.found) == (PLACE, "at most 4,000", "more")
    words = "Point at the folder that holds config.json and the safetensors shards"
    assert error.todo == words


def test_a_listing_that_fails(
    store: SimpleNamespace, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(store: Any, chunk_size: int) -> None:
        raise of.GenericError("status code: 503")

    monkeypatch.setattr(obstore, "list", listed)
    error = open_error(PLACE.text, IoError)
    assert (error.where, error.found, waits) == (PLACE, "HTTP 503", PATIENT)


@pytest.mark.parametrize("etag", [None, "", '""', "W/"])
def test_an_object_without_etag(etag: str | None, store: SimpleNamespace) -> None:
    store.pages = [[META | {"e_tag": etag}]]
    error = open_error(PLACE.text, IoError)
    assert error.where == PLACE / "config.json"
    assert error.expected == "an ETag, by which a change of the object is noticed"
    assert error.found == "none"


def test_objects_are_told_apart_by_their_addresses() -> None:
    """As the files of a folder are, whatever a store tells of them."""
    store: Any = object()
    renamed = ObjectFile(WHERE, name="b", size_bytes=1, version="d", store=store)
    assert file_of() == renamed and hash(file_of()) == hash(renamed)
    assert file_of() != file_of(place=PLACE / "model.safetensors")
