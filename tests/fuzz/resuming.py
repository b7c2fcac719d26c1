"""Unfinished runs and shares that go on over damaged journals, claims and requests."""

from __future__ import annotations

from pathlib import Path
from random import Random
from unittest import mock

from cases import Outcome
from fuzz import oracle
from fuzz.lab import Lab
from fuzz.sandbox import Finding, Sandbox, Tree, check_no_secret, tree_of
from mtp_export.bundle import owner

_REQUEST = ".mtp_export.shares/request.json"
_MOST_BYTES = 20_000_000
# An owner who may be alive is waited for, whose file says that it is on another machine.
_SHORT_PATIENCE = {"PATIENCE_SECONDS": 0.2, "RENEWAL_SECONDS": 0.1}


def resume(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    """Run the command of an unfinished run again."""
    before = tree_of(sandbox.bundle)
    outcome = _run(sandbox, *_export(sandbox, lab))
    if outcome.code == 8:
        if lost := _changed(_contents_of(before), _contents(sandbox.bundle)):
            raise Finding("lost", "from a refused run's output", f"{lost}\n{outcome.err}")
    elif outcome.code == 0:
        _check_resumed(sandbox, before, lab, "unfinished")
    elif (sandbox.bundle / oracle.MANIFEST).exists():
        raise Finding("looks whole", "after a failed resume", outcome.err)


def finish(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    """Finish a bundle of shares, of which one may be run again before."""
    _ask_here(sandbox, lab.input("shares"))
    if random.random() < 0.4:
        _run(sandbox, *_export(sandbox, lab), "--share", random.choice(("1/2", "2/2")))
    before = tree_of(sandbox.bundle)
    if _run(sandbox, "finish", sandbox.bundle, "--quiet").code == 0:
        _check_resumed(sandbox, before, lab, "shares")
    elif (sandbox.bundle / oracle.MANIFEST).exists():
        raise Finding("looks whole", "after shares that were not finished")


def _ask_here(sandbox: Sandbox, made: Path) -> None:
    """Have the shares' request name the copy of the source that is here."""
    path = sandbox.bundle / _REQUEST
    if path.is_file() and path.stat().st_size < _MOST_BYTES:
        asked = path.read_bytes().replace(bytes(made), bytes(sandbox.input))
        path.write_bytes(asked)


def _export(sandbox: Sandbox, lab: Lab) -> tuple[object, ...]:
    places = ("--input-dir", sandbox.source, "--output-dir", sandbox.bundle)
    return (*places, *lab.resume_options)


def _run(sandbox: Sandbox, *arguments: object) -> Outcome:
    with mock.patch.multiple(owner, **_SHORT_PATIENCE):
        return sandbox.run(*arguments)


def _check_resumed(sandbox: Sandbox, before: Tree, lab: Lab, subject: str) -> None:
    """Check the bundle that a resumed run, or the end of shares, made whole.

    It keeps finished shards without reading them again: damage to one is verify's to find.
    """
    good = _contents(lab.input(subject) / "bundle")
    shards = {name: content for name, content in _contents_of(before).items() if _is_shard(name)}
    kept = all(good.get(name) == content for name, content in shards.items())
    shown = ("--level", "files", "--quiet")
    if not kept and sandbox.run("verify", sandbox.bundle, *shown).code == 7:
        return
    oracle.check_export(sandbox.source, sandbox.bundle, "hf", ("main", "mtp"))
    check_no_secret(sandbox.bundle)
    if kept and _contents(sandbox.source) == _contents(lab.input(subject) / "source"):
        _check_same_content(sandbox.bundle, lab.resumed)


def _is_shard(name: str) -> bool:
    return name.endswith(".safetensors")


def _contents(folder: Path) -> dict[str, object]:
    return _contents_of(tree_of(folder))


def _contents_of(tree: Tree) -> dict[str, object]:
    """Return files with their contents, but for the claim of an owner that was killed, and an empty
    journal, which says as much as none."""
    contents = {name: content for name, (_, _, content) in tree.items() if name != oracle.OWNER}
    return {n: content for n, content in contents.items() if (n, content) != (oracle.JOURNAL, b"")}


def _check_same_content(folder: Path, expected: Path) -> None:
    if wrong := _changed(_contents(folder), _contents(expected)):
        raise Finding("wrong bytes", "after resuming", wrong)


def _changed(one: dict[str, object], other: dict[str, object]) -> str:
    """Return the names of files that differ, a few of them."""
    names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    return ", ".join(names[:10])
