"""Repositories of the Hub as they are opened: addresses, folders in them, and files."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.hub import HubFile, model_uri, open_repository
from mtp_checkpoints.sources.hub_client import HubClient, RepositoryFile

LISTED = [
    RepositoryFile(path="config.json", size=5, blob_id="b10b"),
    RepositoryFile(path="int4/config.json", size=6, blob_id="b10c"),
    RepositoryFile(path="int4/deep/x.jinja", size=7, blob_id="b10d"),
    RepositoryFile(path="int4-more/x", size=8, blob_id="b10e"),
    RepositoryFile(path="a.safetensors", size=9, blob_id="p0", sha256="5ha"),
]


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """A repository; what is asked of it."""
    found = list[tuple[str, ...]]()

    def commit_of(client: HubClient, revision: str | None) -> str:
        found.append(("commit", client.repo, str(client.address), str(revision)))
        return "c0ffee"

    def tree(client: HubClient) -> list[RepositoryFile]:
        found.append(("tree", client.repo, str(client.address), client.commit))
        return LISTED

    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    monkeypatch.setattr(HubClient, "commit_of", commit_of)
    monkeypatch.setattr(HubClient, "tree", tree)
    return found


def refusal(call: Callable[[], object]) -> InvalidInputError:
    with pytest.raises(InvalidInputError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("address", "revision"),
    [("hf://acme/tiny", "None"), ("hf://acme/tiny@v1", "v1")],
)
def test_a_repository(address: str, revision: str, asked: list[tuple[str, ...]]) -> None:
    source = open_repository(Address(address))
    root = Address("hf://acme/tiny@c0ffee")
    assert asked == [
        ("commit", "acme/tiny", address, revision),
        ("tree", "acme/tiny", str(root), "c0ffee"),
    ]
    assert (source.path, source.origin) == (root, {"repo": "acme/tiny", "commit": "c0ffee"})
    assert source.files.keys() == {file.path for file in LISTED}
    for file in LISTED:
        assert source.files[file.path].path == root / file.path
    small, large = source.files["config.json"], source.files["a.safetensors"]
    assert (small.size_bytes, small.sha256, small.version) == (5, None, "b10b")
    assert (large.size_bytes, large.sha256, large.version) == (9, "5ha", "5ha")


def test_a_folder_of_a_repository() -> None:
    """And nothing beside it."""
    source = open_repository(Address("hf://acme/tiny@v1/int4"))
    root = Address("hf://acme/tiny@c0ffee")
    assert source.path == root / "int4"
    assert source.origin == {"repo": "acme/tiny", "commit": "c0ffee", "folder": "int4"}
    assert {name: file.path for name, file in source.files.items()} == {
        "config.json": root / "int4/config.json",
        "deep/x.jinja": root / "int4/deep/x.jinja",
    }


def test_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Address("hf://acme/tiny@c0ffee")
    error = refusal(lambda: open_repository(Address("hf://acme/tiny@v1/int")))
    assert error.what == "There is no such folder in the repository"
    assert (error.where, error.found) == (root / "int", "no file")
    assert error.expected == "a folder with config.json and safetensors shards"
    assert error.todo == "Check the address; its parts are hf://org/name@revision/folder"
    monkeypatch.setattr(HubClient, "tree", lambda client: [])
    error = refusal(lambda: open_repository(Address("hf://acme/tiny")))
    assert (error.what, error.where) == ("The repository is empty", root)


@pytest.mark.parametrize("address", ["hf://", "hf://acme/tiny@", "hf://datasets/acme/texts"])
def test_an_address_of_no_model(address: str) -> None:
    for call in (model_uri, open_repository):
        error = refusal(lambda call=call: call(Address(address)))  # type: ignore[misc, operator]
        assert error.what == "This is no address of a model on the Hub"
        assert error.where == Address(address)
        assert str(error.expected).startswith("hf://org/name, with @revision or @revision/folder")
        assert error.todo == "Copy the name from the model's page"
        assert error.found == "a dataset" or "datasets" not in address


def test_a_file_is_read_by_its_client() -> None:
    asked = list[tuple[Any, ...]]()

    def fetch(file: RepositoryFile, span: range, *, sink: Any, pause: Any) -> None:
        asked.append((file, span, sink, pause))

    client: Any = SimpleNamespace(fetch=fetch, whole=lambda file: file.path.encode())
    file = HubFile(Address("hf://acme/tiny@c0ffee/a"), LISTED[0], client)
    sink, pause = list[bytes]().append, list[float]().append
    file.fetch(range(2, 5), sink, pause)
    assert asked == [(LISTED[0], range(2, 5), sink, pause)]
    assert file.whole() == b"config.json"
    opened = file.open()
    assert (opened.size_bytes, opened.version) == (5, "b10b")
    assert file == HubFile(file.path, LISTED[1], client)
