"""Words that the program answers with: its page, examples, refusals with what was meant, settings
from the environment, completion of shells."""

from __future__ import annotations

import importlib.metadata
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest

from cases import run_program
from mtp_checkpoints.errors import UsageError
from mtp_export import __version__
from mtp_export.commands import help_page
from mtp_export.commands.failures import Failure, print_failure
from mtp_export.commands.help_page import EXAMPLES
from mtp_export.commands.names import COMMANDS
from mtp_export.commands.registry import command_named
from mtp_export.commands.typed_command import QuickReading

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_the_program_alone_shows_its_page(arguments: tuple[str, ...]) -> None:
    outcome = run_program(*arguments)
    assert (outcome.code, outcome.err) == (0, "")
    assert all(f"│ {command} " in outcome.out for command in COMMANDS)
    lines = outcome.out.splitlines()
    assert sum(line.startswith("  mtp-export ") for line in lines) == 5
    assert f"Documentation: {ROOT}/docs/index.md" in lines


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_two_examples_that_fit_and_a_page(command: str) -> None:
    *examples, page = EXAMPLES[command]
    helped = run_program("help", command).out
    assert helped == run_program(command, "-h").out == run_program(command, "--help").out
    for example in examples:
        assert f"   {example} " in helped, "it does not fit into a line of 80 columns"
        parser = command_named(example.split()[1])
        known = {name for parameter in parser.params for name in parameter.opts}
        assert {word for word in example.split() if word.startswith("--")} <= known
    assert f"Documentation: {ROOT / page}" in " ".join(helped.split())
    assert "<bool>" not in helped and "{" not in helped.splitlines()[1]
    assert "--debug" in helped and "MTP_EXPORT_OUTPUT_DIR" in helped


def test_documentation_is_named_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside packages that were installed from a checkout there is none, and of other packages
    nothing is known of one."""
    monkeypatch.setattr(help_page, "__file__", tmp_path / "lib/mtp_export/commands/help_page.py")
    checkout = tmp_path / "a checkout"
    (checkout / "docs").mkdir(parents=True)
    (checkout / "docs/cli.md").write_text("# Command line")
    for record, found in (
        ({"url": checkout.as_uri(), "dir_info": {}}, [f"Documentation: {checkout}/docs/cli.md"]),
        ({"url": f"https://host{checkout}", "archive_info": {}}, []),
        (None, []),
    ):
        raw = None if record is None else json.dumps(record)
        files = SimpleNamespace(read_text={"direct_url.json": raw}.get)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name, files=files: files)
        help_page._installed_from.cache_clear()
        assert help_page.documentation("docs/cli.md") == found
    help_page._installed_from.cache_clear()


def test_verify_names_its_exit_codes() -> None:
    assert "7 a check failed" in " ".join(run_program("verify", "--help").out.split())


def test_the_version_has_a_short_name_and_a_form_for_machines() -> None:
    assert run_program("-V").out == f"mtp-export {__version__}\n"
    facts = json.loads(run_program("--version", "--json").out)
    assert facts == {"name": "mtp-export", "version": __version__}


def test_an_export_has_a_name(pristine: Path, tmp_path: Path) -> None:
    folders = ("--input-dir", pristine, "--output-dir", tmp_path / "out", "--dry-run", "--json")
    named, alone = run_program("export", *folders), run_program(*folders)
    assert named.code == alone.code == 0
    assert json.loads(named.out) == json.loads(alone.out)


def test_the_folders_of_an_export_may_be_arguments(pristine: Path, tmp_path: Path) -> None:
    folders, options = (pristine, tmp_path / "out"), ("--dry-run", "--json")
    named = run_program("export", "--input-dir", folders[0], "--output-dir", folders[1], *options)
    for words in (folders, (folders[0], "--output-dir", folders[1])):
        outcome = run_program("export", *words, *options)
        assert outcome.code == 0 and json.loads(outcome.out) == json.loads(named.out)
    assert run_program("export", pristine, *options).code == 0
    twice = run_program("export", *folders, "--output-dir", tmp_path / "other")
    assert twice.code == 2 and "The output is given twice" in twice.err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("FOLDER", "my out"), "mtp-export export FOLDER 'my out'?"),
        (("FOLDER",), "mtp-export export FOLDER OUT?"),
        (("hf://org/name", "--part", "mtp"), "mtp-export export hf://org/name --part mtp?"),
        (("quantize", "FOLDER", "my out"), "--output-dir 'my out'?"),
        (("graft", "FOLDER", "b", "c"), "--output-dir c?"),
        (("compile", "FOLDER", "b.pt2"), "--output b.pt2?"),
        (("tune", "FOLDER", "out", "--data", "x"), "--bundle FOLDER --output-dir out?"),
        (("verify", "FOLDER", "my source"), "--source 'my source'?"),
        (("generate", "FOLDER", "def", "read(x):", "y"), "'def read(x): y'?"),
    ],
    ids=lambda words: words[0],
)
def test_a_folder_in_the_wrong_place_ends_with_what_was_meant(
    words: tuple[str, ...], meant: str, tmp_path: Path
) -> None:
    given = [word.replace("FOLDER", str(tmp_path)) for word in words]
    outcome = run_program(*given)
    assert outcome.code == 2
    assert outcome.err.endswith(f" Did you mean {meant.replace('FOLDER', str(tmp_path))}\n")


@pytest.mark.parametrize(
    ("words", "found", "expected"),
    [
        (("export", "a", "b", "c"), "'c'", "SRC OUT"),
        (("verify", "a", "b", "--source", "c"), "'b'", "BUNDLE"),
        (("quantize", "a", "b", "--output-dir", "c"), "'b'", "BUNDLE"),
        (("serve", "a", "b", "c"), "'b', 'c'", "BUNDLE"),
        (("push", "a", "b/c", "d"), "'d'", "BUNDLE NAME"),
        (("env", "a"), "'a'", "options alone"),
    ],
    ids=lambda words: words[0],
)
def test_an_argument_too_many_is_named(words: tuple[str, ...], found: str, expected: str) -> None:
    outcome, command = run_program(*words), f"mtp-export {words[0]}"
    assert outcome.code == 2
    assert outcome.err == (
        f"mtp-export: error: {command} has no place for {found}. Expected {expected}."
        f" See {command} --help.\n"
    )


def test_a_value_may_begin_as_an_option_does(tmp_path: Path) -> None:
    for words in (("--prompt", "--chat"), ("--prompt", "a", "--", "--stop")):
        outcome = run_program("generate", tmp_path, *words)
        assert outcome.code == 3 and "has no value" not in outcome.err


@pytest.mark.parametrize("option", ["--install-completion", "--show-completion"])
def test_a_shell_without_completion_is_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # finds none
    outcome = run_program(option)
    assert outcome.code == 2 and not list(tmp_path.iterdir())
    assert outcome.err.endswith(
        f"mtp-export: error: Option {option} takes a shell that has completion. Expected bash, zsh,"
        " fish, powershell, pwsh. Found the current one.\n"
    )


REFUSALS = {
    ("verfy", "x"): "'verfy' is no command. Did you mean verify?",
    ("xyzzy",): "'xyzzy' is no command. See mtp-export help.",
    ("help", "quantise"): "'quantise' is no command. Did you mean quantize?",
    ("quantize", "--base-qant", "bf16"): (
        "mtp-export quantize has no option --base-qant. Did you mean --base-quant?"
    ),
    ("quantize", "--base-quant", "int4"): (
        "'int4' is no scheme for --base-quant. Expected a8w8_fp8_wint4, weight_only_int4, a8w8_fp8,"
        " weight_only_int8, weight_only_nvfp4, a4w4_nvfp4, weight_only_mxfp4,"
        " a8w8_mxfp8, bf16, f16, q8_0, q5_1, q5_0, q4_1, q4_0, q6_k, q5_k, q4_k, gguf_mxfp4, keep."
        " Did you mean weight_only_int4?"
    ),
    ("launch", "x", "--engine", "vlm"): (
        "'vlm' is no engine for --engine. Expected vllm, sglang, lightllm, xllm, paddlenlp, eagle,"
        " llama.cpp. Did you mean vllm?"
    ),
    (
        "inspect",
    ): "Missing argument 'SRC'. Expected checkpoint or bundle: a folder, or hf://org/name[@revision].",
    ("launch", "x", "--engine", "trtllm"): (
        "'trtllm' is no engine for --engine. Expected vllm, sglang, lightllm, xllm, paddlenlp,"
        " eagle, llama.cpp. A bundle of --target tensorrt-llm has no command here."
    ),
    ("graft", "x", "--mtp"): (
        "Option --mtp has no value. Expected checkpoint that it was made from, with the MTP layer:"
        " a folder, or an address."
    ),
    ("graft", "x", "--mtp", "--dry-run"): (
        "Option --mtp has no value. Expected checkpoint that it was made from, with the MTP layer:"
        " a folder, or an address. Found --dry-run behind it."
    ),
    ("quantize", "x", "--mtp-quant", "-q"): (
        "Option --mtp-quant has no value. Expected weight_only_int4, a8w8_fp8, weight_only_int8,"
        " weight_only_nvfp4, a4w4_nvfp4, weight_only_mxfp4, a8w8_mxfp8, bf16, q8_0, keep. Found -q"
        " behind it."
    ),
    ("generate", "x", "--prompts"): (
        'Option --prompts has no value. Expected JSON lines: {"prompt": TEXT} or'
        ' {"prompt_token_ids": [...]}.'
    ),
    ("inspect", "hf:org/name"): (
        "There is no checkpoint folder here (hf:org/name). Did you mean hf://org/name?"
    ),
    ("inspect", "s3:/bucket/name"): (
        "There is no checkpoint folder here (s3:/bucket/name). Did you mean s3://bucket/name?"
    ),
    ("verify", "--level", "wieghts"): (
        "'wieghts' is no level for --level. Expected files, weights, run, all."
        " Did you mean weights?"
    ),
    (
        "serve",
        "x",
        "--port",
        "99999",
    ): "--port is out of range. Expected 0 to 65535. Found '99999'.",
    ("serve", "x", "--max-tokens-per-batch", "0"): (
        "--max-tokens-per-batch is out of range. Expected 1 or more. Found '0'."
    ),
    ("generate", "x", "--max-new-tokens", "0"): (
        "--max-new-tokens is out of range. Expected 1 to 1073741824. Found '0'."
    ),
    ("generate", "x", "--top-k", "-1"): (
        "--top-k is out of range. Expected 0 to 1073741824. Found '-1'."
    ),
    ("generate", "x", "--seed", "18446744073709551616"): (
        "--seed is out of range. Expected 0 to 18446744073709551615. Found '18446744073709551616'."
    ),
    ("generate", "x", "--speculate-max-draft-token-num", "6"): (
        "--speculate-max-draft-token-num is out of range. Expected 1 to 5. Found '6'."
    ),
    ("tune", "--lr", "2"): "--lr is out of range. Expected 0 to 1. Found '2'.",
    ("tune", "--k", "0"): "--k is out of range. Expected 1 to 5. Found '0'.",
    (
        *("tune", "--bundle", "x", "--data", "y", "--output-dir", "z"),
        *("--max-new-tokens", "9", "--max-text-tokens", "10"),
    ): (
        "Texts are cut before their new tokens end. Expected --max-text-tokens of at least"
        " --max-new-tokens and 2. Found 10 and 9."
    ),
    ("inspect", "deepseek-ai/DeepSeek-V3"): (
        "There is no checkpoint folder here (deepseek-ai/DeepSeek-V3)."
        " Did you mean hf://deepseek-ai/DeepSeek-V3?"
    ),
    ("--input-dir", "x", "--output-dir", "y", "--max-memory", "much"): (
        "Option --max-memory: 'much' is no size: write for example 5GB, 4GiB or 4096."
    ),
    ("--install-completion", "fsh"): (
        "Option --install-completion takes a shell that has completion. Expected bash, zsh, fish,"
        " powershell, pwsh. Found fsh. Did you mean fish?"
    ),
}


@pytest.mark.parametrize("arguments", REFUSALS, ids=" ".join)
def test_a_wrong_word_is_answered_with_what_was_meant(arguments: tuple[str, ...]) -> None:
    outcome = run_program(*arguments)
    assert outcome.err == f"mtp-export: error: {REFUSALS[arguments]}\n"
    assert (outcome.code, outcome.out) == (
        3 if arguments[0] == "inspect" and arguments[1:] else 2,
        "",
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_is_refused_by_its_option(command: str) -> None:
    """Numbers have bounds, so that no refusal names a field of the runtime's instead."""
    leaves = cast(QuickReading, command_named(command)).leaves.values()
    numbers = [
        leaf
        for leaf in leaves
        if {int, float} & {leaf.hint, *get_args(leaf.hint)} and leaf.option.parser is None
    ]
    assert [leaf.flag for leaf in numbers if leaf.option.low is None] == []
    for leaf in numbers:
        with pytest.raises(UsageError, match=f"^{leaf.flag} is out of range"):
            leaf.refuse(str(leaf.option.low - 1), from_environment=False)


class Terminal:
    """A text stream that is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("no file, and so no width")


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, "mtp-export: \x1b[31merror:\x1b[0m It failed.\n\x1b[2mhint: Do this.\x1b[0m\n"),
        ({"NO_COLOR": "1"}, "mtp-export: error: It failed.\nhint: Do this.\n"),
        ({"TERM": "dumb"}, "mtp-export: error: It failed. Do this.\n"),
    ],
)
def test_a_terminal_gets_the_hint_on_its_own_line(
    settings: dict[str, str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ({"NO_COLOR": "", "TERM": "xterm"} | settings).items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    print_failure(Failure("It failed. Do this.", 2, "Do this."), "error: ")
    assert terminal.text == shown


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (0, "mtp-export: error: It failed in many ways.\nhint: Do this and that.\n"),
        (24, "mtp-export: error: It\nfailed in many ways.\nhint: Do this and that.\n"),
        (18, "mtp-export: error:\nIt failed in many\nways.\nhint: Do this and\nthat.\n"),
        (8, "mtp-export:\nerror:\nIt\nfailed\nin many\nways.\nhint: Do\nthis and\nthat.\n"),
    ],
)
def test_a_terminal_gets_whole_words(
    columns: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("mtp_export.commands.failures._columns", lambda: columns)
    hint = "Do this and that."
    print_failure(Failure(f"It failed in many ways. {hint}", 2, hint), "error: ")
    assert terminal.text == shown


def test_a_terminal_gets_commands_to_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Ctrl-C, and those that a hint ends with, on lines of their own."""
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("mtp_export.commands.failures._columns", lambda: 26)
    command = "  mtp-export --input-dir source --output-dir bundle"
    print_failure(Failure(f"Interrupted at 45 %. To go on:\n{command}", 130), "")
    broken = "  mtp-export \\\n    --input-dir source \\\n    --output-dir bundle\n"
    assert terminal.text == f"\nmtp-export: Interrupted at\n45 %. To go on:\n{broken}"
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    hint = f"Do this: {command.strip()}"
    print_failure(Failure(f"It failed. {hint}", 2, hint, command.strip()), "error: ")
    shown = "mtp-export: error: It\nfailed.\nhint: Do this:\n"
    assert terminal.text == f"{shown}{broken}"


def test_a_terminal_gets_entries_of_a_list_indented(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("mtp_export.commands.failures._columns", lambda: 12)
    print_failure(Failure("It\n- failed in many ways\nTo repair it all:", 7), "error: ")
    shown = "- failed in\n  many ways\nTo repair it\nall:"
    assert terminal.text == f"mtp-export:\nerror: It\n{shown}\n"


def test_options_come_from_the_environment_after_the_command_line(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "MTP_EXPORT_INPUT_DIR": str(pristine),
        "MTP_EXPORT_OUTPUT_DIR": str(tmp_path / "out"),
        "MTP_EXPORT_PART": "mtp",
        "MTP_EXPORT_DRY_RUN": "1",
        "MTP_EXPORT_JSON": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert list(json.loads(run_program("export").out)["parts"]) == ["mtp"]
    assert list(json.loads(run_program("export", "--part", "main").out)["parts"]) == ["main"]
    monkeypatch.setenv("MTP_EXPORT_DRY_RUN", "perhaps")
    assert (
        "--dry-run (MTP_EXPORT_DRY_RUN) is a switch. Expected 1 or 0" in run_program("export").err
    )
    monkeypatch.setenv("MTP_EXPORT_DRY_RUN", "1")
    monkeypatch.setenv("MTP_EXPORT_PART", "mian")
    outcome = run_program("export")
    assert (outcome.code, outcome.out) == (2, "")
    assert (
        "'mian' is no part for --part (MTP_EXPORT_PART)" in outcome.err
        and "mean main?" in outcome.err
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_each_option_has_its_own_variable(command: str) -> None:
    leaves = cast(QuickReading, command_named(command)).leaves.values()
    variables = [leaf.envvar for leaf in leaves if leaf.envvar is not None]
    assert len(set(variables)) == len(variables)
    without = {leaf.flag for leaf in leaves if leaf.envvar is None}
    assert all(flag == "--list" or not flag.startswith("-") for flag in without)


def test_several_values_are_lines_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    command: Any = command_named("generate")
    prompt = next(each for each in command.params if each.name == "prompt")
    monkeypatch.setenv("MTP_EXPORT_PROMPT", "def read(\nclass A")
    assert prompt.value_from_envvar(None) == ["def read(", "class A"]


@pytest.mark.parametrize(
    ("shell", "place"),
    [
        ("bash", ".bash_completions/mtp-export.sh"),
        ("zsh", ".zfunc/_mtp-export"),
        ("fish", ".config/fish/completions/mtp-export.fish"),
    ],
)
def test_completion_is_installed_for_the_shell_that_is_named(
    shell: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    outcome = run_program("--install-completion", shell)
    assert (outcome.code, outcome.err) == (0, "") and str(tmp_path / place) in outcome.out
    script = (tmp_path / place).read_text()
    assert f"complete_{shell}" in script
    assert run_program(f"--show-completion={shell}").out.strip() == script.strip()


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("mtp-export launch x --engine v", "vllm"),
        ("mtp-export quantize --target li", "lightllm"),
        ("mtp-export verify --level w", "weights"),
        ("mtp-export generate x --speculate-method eagle", "eagle eagle3"),
        ("mtp-export generate x --dtype b", "bfloat16"),
        ("mtp-export graft --main s", "s3://"),
        (
            "mtp-export quantize --base-quant weight",
            "weight_only_int4 weight_only_int8 weight_only_nvfp4 weight_only_mxfp4",
        ),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_every_choice(
    words: str, completed: str, shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_MTP_EXPORT_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", words)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    outcome = run_program()
    assert outcome.code == 0
    assert all(each in outcome.out.replace("\\", "") for each in completed.split())
    assert len(outcome.out.split()) <= 2 + len(completed.split()), outcome.out


def test_inspect_shows_both_parts_of_a_bundle(output: Path, pristine: Path) -> None:
    assert run_program("--input-dir", pristine, "--output-dir", output).code == 0
    shown = run_program("inspect", output)
    assert (shown.code, shown.err) == (0, "")
    assert all(str(output / part) in shown.out for part in ("main", "mtp"))
    facts = json.loads(run_program("inspect", output, "--json").out)
    assert facts["bundle"] == str(output) and list(facts["parts"]) == ["main", "mtp"]
    main = json.loads(run_program("inspect", output / "main", "--json").out)
    assert facts["parts"]["main"] == main


def test_a_bundle_to_quantize_needs_no_option(pristine: Path, output: Path) -> None:
    words = ("--output-dir", output, "--dry-run", "--json")
    named = run_program("quantize", "--input-dir", pristine, *words)
    given = run_program("quantize", pristine, *words)
    assert named.code == given.code == 0 and named.out == given.out
    twice = run_program("quantize", pristine, "--input-dir", pristine, *words)
    assert twice.code == 2 and "The input is given twice" in twice.err


def test_a_pair_is_refused_with_what_goes_with_its_base(pristine: Path, output: Path) -> None:
    refused = run_program(
        "quantize", pristine, "--output-dir", output, "--base-quant", "weight_only_int4"
    )
    assert refused.code == 4
    assert refused.err == (
        "mtp-export: error: weight_only_int4 goes with --mtp-quant weight_only_int8. Found"
        " --mtp-quant keep (the source's a8w8_fp8). All pairs: mtp-export quantize --list."
        " --allow-untested-pair builds this one all the same.\n"
    )


def test_a_prompt_stands_behind_the_bundle_or_comes_from_stdin(
    pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--max-new-tokens", "1", "--json")
    named = json.loads(run_program("generate", pristine, "--prompt", "ab", *words).out)
    given = json.loads(run_program("generate", pristine, "ab", *words).out)
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n"))
    read = json.loads(run_program("generate", pristine, "-", *words).out)
    texts = [each["outputs"][0]["prompt"] for each in (named, given, read)]
    assert texts == ["ab", "ab", "ab"]


def test_a_dry_run_says_what_is_free_and_what_the_reserve_is_for(
    pristine: Path, output: Path
) -> None:
    shown = run_program("export", "--input-dir", pristine, "--output-dir", output, "--dry-run")
    words = " ".join(shown.out.split())
    assert "(128.0 MB of it in reserve for indexes, configs and the manifest)" in words
    assert "are free" in words
