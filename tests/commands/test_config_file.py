"""Options of serve from a YAML file: below the command line and the environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cases import run_program
from mtp_export.commands import serve as serving
from mtp_export.commands.registry import command_named
from mtp_export.commands.serve import ServeCommand

FILE = """
port: 9000
k-schedule: 1:5,16:2
enable_prefix_cache: true
enable-chunked-prefill: false
max-memory: 2GB
"""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[ServeCommand]:
    """The options that serve got."""
    taken: list[ServeCommand] = []

    def serve(options: ServeCommand) -> None:
        taken.append(options)

    monkeypatch.setattr(serving, "serve", serve)
    return taken


@pytest.fixture(autouse=True)
def fresh_command() -> Iterator[None]:
    command_named.cache_clear()
    yield
    command_named.cache_clear()


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    taken: list[ServeCommand], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    words = ("serve", "bundle", "--config", path)
    assert run_program(*words).code == 0
    (first,) = taken
    assert (first.server.port, first.runtime.max_memory) == (9000, 2_000_000_000)
    assert first.limits.enable_prefix_cache and not first.limits.enable_chunked_prefill
    assert first.runtime.drafting.k_schedule == ((1, 5), (16, 2))
    assert first.limits.block_size == 64
    monkeypatch.setenv("MTP_EXPORT_PORT", "9001")
    assert run_program(*words).code == 0
    assert run_program(*words, "--port", "9002").code == 0
    assert [each.server.port for each in taken] == [9000, 9001, 9002]


def test_the_file_may_be_named_by_the_environment(
    taken: list[ServeCommand], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("bundle: here\nport: 9003\n")
    monkeypatch.setenv("MTP_EXPORT_CONFIG", str(path))
    assert run_program("serve").code == 0
    assert (taken[0].server.port, taken[0].bundle) == (9003, Path("here"))


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("prot: 1\n", 2, "'prot' is no option"),
        ("prot: 1\n", 2, "Did you mean port?"),
        ("config: x.yaml\n", 2, "'config' is no option"),
        ("block-size: 1\nblock_size: 2\n", 2, "'block_size' is given twice"),
        ("port:\n", 2, "'port' has no value"),
        ("port: {a: b}\n", 2, "'port' has no value"),
        ('draft-model: "a\\0"\n', 2, "'draft-model' has no value"),
        ("port: 99999\n", 2, "--port is out of range"),
        ("- port\n", 2, "has no options"),
        ("port: [\n", 2, "is no YAML"),
        (None, 6, "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(text: str | None, code: int, says: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_text(text)
    outcome = run_program("serve", "bundle", "--config", path)
    assert (outcome.code, outcome.out) == (code, "")
    assert says in outcome.err
