"""Help and shell completion: options in panels that fit the terminal, completed by the shell."""

from __future__ import annotations

import re

import pytest

from cases import run_program

BUNDLE_PANELS = ("Input and output", "Content of the bundle", "Performance", "Report")
PANELS: dict[str, tuple[str, ...]] = {
    "": ("Commands",),
    "export": BUNDLE_PANELS,
    "quantize": ("Precision", *BUNDLE_PANELS),
    "graft": ("Precision", "Checks", *BUNDLE_PANELS),
    "tune": ("Input and output", "Data", "Training", "Performance", "Report"),
    "finish": ("Checks", "Report"),
    "verify": ("Checks", "Decoding", "Performance", "Report"),
    "generate": (
        *("Decoding", "Speculation", "Number and temperature of drafts"),
        *("Performance", "Report"),
    ),
    "serve": (
        *("Server", "Speculation", "Number and temperature of drafts", "Batch and cache"),
        *("Prompts", "Performance", "Report"),
    ),
    "compile": ("Input and output", "Performance", "Report"),
    "launch": ("Machines and devices", "Speculation", "Report"),
    "inspect": ("Report",),
    "env": ("Report",),
    "push": ("Input and output", "Content of the bundle", "Model card", "Report"),
}


def help_page(command: str) -> str:
    outcome = run_program(*([command] if command else []), "--help")
    assert (outcome.code, outcome.err) == (0, "")
    return outcome.out


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", PANELS)
def test_options_are_grouped_in_panels(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    page = help_page(command)
    titles = set(re.findall(r"^╭─ (.+?) ─+╮$", page, re.M))
    assert set(PANELS[command]) <= titles <= {*PANELS[command], "Options", "Arguments"}
    assert max(map(len, page.splitlines())) <= columns
    # A name or a type that does not fit would be cut off.
    assert "…" not in page


@pytest.mark.parametrize("command", ["export", "quantize", "inspect", "graft"])
def test_an_address_is_shown_whole(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets are no markup here."""
    monkeypatch.setenv("COLUMNS", "160")
    assert "hf://org/name[@revision]" in help_page(command)


@pytest.mark.parametrize("command", PANELS)
def test_each_option_outside_the_panel_of_all_programs_has_a_group(command: str) -> None:
    (general,) = re.findall(r"╭─ Options ─+╮\n(.*?)╰", help_page(command), re.S)
    options = set(re.findall(r"--[a-z-]+", general))
    own = {"--debug", "--json"} if command == "" else set()
    shown = {"--help", "--version", "--install-completion", "--show-completion"}
    assert options <= shown | own


def test_bash_gets_a_completion_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `--show-completion` prints it for the shell that it finds itself in."""
    monkeypatch.setenv("_MTP_EXPORT_COMPLETE", "source_bash")
    outcome = run_program()
    assert (outcome.code, outcome.err) == (0, "")
    assert "complete -o default -F _mtp_export_completion mtp-export" in outcome.out


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("mtp-export qu", "quantize"),
        ("mtp-export verify --no-", "--no-checksums"),
        ("mtp-export quantize --mtp-quant weight_only_m", "weight_only_mxfp4"),
    ],
)
def test_bash_completes_commands_options_and_values(
    words: str, completed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_MTP_EXPORT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    outcome = run_program()
    assert (outcome.code, outcome.out.split()) == (0, [completed])
