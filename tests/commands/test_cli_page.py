"""The page of the command line is what its script writes, and the table of names is what
completion, help, refusals and the page have."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from cases import run_program
from mtp_export.commands import names
from mtp_export.commands.names import COMMANDS, names_of
from mtp_export.commands.registry import command_named
from mtp_export.commands.typed_command import QuickReading
from mtp_export.commands.typed_option import UNUSUAL, Leaf
from mtp_export.options import Names
from mtp_runtime.layers.tensor_parallel import MODES
from mtp_runtime.models.load import ACTIVATIONS, DTYPES

ROOT = Path(__file__).resolve().parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cli_page", ROOT / "scripts/cli_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def leaves_of(command: str) -> list[Leaf]:
    return list(cast(QuickReading, command_named(command)).leaves.values())


def test_the_page_is_what_its_script_writes() -> None:
    page, text = script(), (ROOT / "docs/cli.md").read_text()
    assert page.page_of(text) == text, "run python scripts/cli_page.py"
    spoilt = text.replace("| `--no-resume` |  |", "| `--no-resume` | on |")
    assert spoilt != text and page.page_of(spoilt) == text
    with pytest.raises(ValueError, match="no table of options for env"):
        page.page_of(text.replace("<!-- options: env -->", ""))


def test_the_page_and_the_help_have_the_same_words() -> None:
    text, shown = (ROOT / "docs/cli.md").read_text(), run_program("--help").out
    for command, words in COMMANDS.items():
        assert f"mtp-export {command:8}  {words}" in text
        assert f"│ {command} " in shown
        help_page = " ".join(run_program(command, "--help").out.split())
        assert words in help_page and words in " ".join(shown.replace("│", " ").split())


def test_every_kind_of_name_is_known() -> None:
    assert all(len(names_of(kind)) > 1 for kind in Names)
    # Their owners bring torch.
    assert (names_of(Names.JOIN_MODE), names_of(Names.DTYPE)) == (MODES, tuple(DTYPES))
    assert names_of(Names.ACTIVATIONS) == tuple(ACTIVATIONS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_choice(command: str) -> None:
    for leaf in leaves_of(command):
        assert "{names}" not in leaf.help
        assert [name for name in leaf.choices if name not in leaf.help] == []


def test_a_new_name_is_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In completion, help, refusals and the page, by the table alone."""
    table: Any = names._NAMES
    monkeypatch.setitem(table, Names.ENGINE, lambda: ("vllm", "toyengine"))
    (engine,) = (leaf for leaf in leaves_of("launch") if leaf.flag == "--engine")
    assert engine.completions("to") == ["toyengine"]
    assert engine.help == "One of vllm or toyengine."
    refused = run_program("launch", "x", "--engine", "toyengin")
    assert (
        "'toyengin' is no engine for --engine. Expected vllm, toyengine. Did you mean toyengine?"
    ) in refused.err
    page = script().page_of((ROOT / "docs/cli.md").read_text())
    assert "| One of vllm or toyengine. |" in page


def test_addresses_are_offered_once_something_is_typed() -> None:
    """Before that a shell offers its files."""
    (source,) = (leaf for leaf in leaves_of("inspect") if leaf.flag == "SRC")
    assert source.completions("") == [] and source.completions("hf") == ["hf://"]
    assert source.choices == ()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("export", "--link", "x"), "'x' is no way for --link"),
        (("export", "--checksums", "al"), "'al' is no value for --checksums"),
        (("quantize", "--format", "w4afp"), "'w4afp' is no value for --format"),
        (("quantize", "--mtp-quant", "x"), "'x' is no scheme of the MTP module for --mtp-quant"),
    ],
)
def test_a_refusal_says_what_a_value_is(words: tuple[str, ...], said: str) -> None:
    assert run_program(*words).err.startswith(f"mtp-export: error: {said}. Expected ")


def test_a_switch_has_four_words_for_each_state() -> None:
    """In environment variables and files."""
    (switch,) = (leaf for leaf in leaves_of("export") if leaf.flag == "--dry-run")
    assert [switch.usual(text) for text in ("1", "true", "yes", "On")] == [True] * 4
    assert [switch.usual(text) for text in ("0", "False", "no", "off")] == [False] * 4
    assert switch.usual("2") is UNUSUAL


def test_a_default_is_not_parsed() -> None:
    """Typer gives it to parsers of texts too."""
    (level,) = (leaf for leaf in leaves_of("verify") if leaf.flag == "--level")
    assert level.parsed(level.field.default) is level.field.default
    assert level.parsed("files") < level.field.default
