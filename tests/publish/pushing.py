"""Pushes of the tests' bundle, and looks at what a local Hub then has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cases import Outcome, run_program
from hub_server import HubServer, Request

NAME = "org/name"


def push(folder: Path, *options: object, name: str = NAME) -> Outcome:
    """Push the bundle in a folder, with the report beside it."""
    report = () if "--unverified" in options else ("--report", folder / "report.json")
    return run_program("push", folder / "bundle", name, *report, *options)


def facts(folder: Path, *options: object, name: str = NAME) -> dict[str, Any]:
    """Push, and return the JSON that it prints."""
    outcome = push(folder, *options, "--json", "--quiet", name=name)
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def content(hub: HubServer, name: str = NAME) -> dict[str, bytes]:
    """Return the files of a repository with their bytes, but the one that the Hub itself makes."""
    repository = hub.repositories[name]
    files = repository.commits[repository.revisions["main"]]
    found = {path: file.read(0, file.size) for path, file in files.items()}
    del found[".gitattributes"]
    return found


def requests(hub: HubServer, method: str, part: str = "") -> list[Request]:
    """Return the requests of a method whose path has a part."""
    return [r for r in hub.log if r.method == method and part in r.path]


def is_untouched(hub: HubServer, name: str = NAME) -> bool:
    """Return True for a repository without a file of ours, or none at all."""
    return name not in hub.repositories or not content(hub, name)


def sent_shards(hub: HubServer) -> int:
    """Return how many files arrived in the storage."""
    puts = requests(hub, "PUT")
    return len({request.path.partition("?")[0] for request in puts if request.status == 200})
