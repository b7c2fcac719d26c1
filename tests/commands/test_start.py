"""Start of the program: as a module, Ctrl-C while it imports what its commands need, and what they
do not import."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cases import WHOLE_TILES, make_checkpoint, run_program
from mtp_checkpoints.sources.files import write_failure
from mtp_checkpoints.sources.remote_failures import UNREACHABLE
from mtp_export import __version__
from mtp_export.commands.names import COMMANDS
from mtp_export.commands.program import exit_code
from mtp_export.commands.registry import RESUMED

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

# Ctrl-C at the import of a module, for several of them in the order in which they come.
INTERRUPTED = """
import sys

class CtrlC:
    at = ""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == cls.at:
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC)
before = set(sys.modules)
from mtp_export.cli import main

own = {"__future__", "mtp_export", "mtp_export.cli", "mtp_checkpoints", "mtp_checkpoints.errors"}
assert set(sys.modules) - before <= own, set(sys.modules) - before - own
for CtrlC.at in ("mtp_export.commands", "typer", "mtp_export.commands.export", "mtp_export.bundle"):
    assert CtrlC.at not in sys.modules, CtrlC.at
    try:
        main(["--version"])
    except SystemExit as end:
        assert end.code == 130, (CtrlC.at, end.code)
"""


# Packages that commands do without; one process, since each takes seconds with torch.
IMPORTED = """
import sys
from mtp_export.commands.program import exit_code

source, whole, output = sys.argv[1:]
commands = {
    "inspect": (["inspect", source, "--json"], ["mtp_export.bundle.build", "tqdm"]),
    "--dry-run": (["--input-dir", source, "--output-dir", output, "--dry-run", "--json"], ["tqdm"]),
}
heavy = ["huggingface_hub", "llvmlite", "mtp_kernels.cpu.jit", "mtp_runtime.llm", "numba"]
heavy += ["pydantic", "torch"]
for name, (arguments, more) in commands.items():
    assert exit_code(arguments) == 0
    imported = {module for module in (*heavy, *more) if module in sys.modules}
    assert not imported, (name, imported)
nowhere = f"{output}-nowhere"
package = ("--output", f"{output}.pt2")
for name, *more in (("generate", "text"), ("serve",), ("compile", *package)):
    assert exit_code([name, nowhere, *more]) == 3
    assert "torch" not in sys.modules, name
assert exit_code(["verify", "--help"]) == 0
assert not {"torch", "mtp_export.verify.context"} & {*sys.modules}
assert exit_code(["verify", source, "--level", "files", "--quiet"]) == 0
assert "torch" not in sys.modules, "verify --level files"
pair = ["--base-quant", "weight_only_int4", "--mtp-quant", "weight_only_int8"]
for name, options in (("quantize", ["quantize", *pair]), ("xllm", ["--target", "xllm"])):
    folders = ["--input-dir", whole, "--output-dir", f"{output}-{name}"]
    assert exit_code([*options, *folders, "--quiet"]) == 0
    assert "torch" not in sys.modules, name
"""


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=ENVIRONMENT, capture_output=True, text=True
    )


def test_it_runs_as_a_module() -> None:
    done = run_python("-m", "mtp_export", "--version")
    assert (done.returncode, done.stdout) == (0, f"mtp-export {__version__}\n")


def test_commands_that_need_no_torch_import_little(
    pristine: Path, tmp_path: Path, output: Path
) -> None:
    whole = make_checkpoint(tmp_path / "whole", WHOLE_TILES)
    done = run_python("-c", IMPORTED, str(pristine), str(whole), str(output))
    assert done.returncode == 0, done.stderr


PAGE_ALONE = """
import sys
from mtp_export.commands.program import exit_code

assert exit_code(sys.argv[1:]) == 0
loaded = {module for module in sys.modules if module.startswith("mtp_export.")}
assert not loaded & {"mtp_export.bundle", "mtp_export.schemes", "mtp_export.commands.export"}
assert not [module for module in sys.modules if module.startswith("mtp_runtime")]
"""


@pytest.mark.parametrize("words", [(), ("--help",), ("help",)])
def test_the_page_of_the_program_imports_no_command(words: tuple[str, ...]) -> None:
    """They take three times as long as the page."""
    done = run_python("-c", PAGE_ALONE, *words)
    assert done.returncode == 0 and "Commands" in done.stdout, done.stderr


def test_ctrl_c_while_it_starts_ends_as_at_any_other_time() -> None:
    done = run_python("-c", INTERRUPTED)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("mtp-export: Interrupted.") for line in lines)


def test_the_module_of_the_program_is_the_program() -> None:
    """python -m mtp_export.cli ended without a word."""
    for module in ("mtp_export", "mtp_export.cli"):
        done = run_python("-m", module, "--version")
        assert (done.returncode, done.stdout) == (0, f"mtp-export {__version__}\n"), done.stderr
        wrong = run_python("-m", module, "inspect")
        assert wrong.returncode == 2 and wrong.stderr.startswith("mtp-export: error: ")


NO_LEAKS = """
from mtp_export import cli
from mtp_export.commands.garbage import gc_paused
with gc_paused():
    import torch._inductor.package.package
    import triton
cli.main(["--version"])
"""


def test_triton_finds_no_leaks_at_the_end() -> None:
    """As torch's compiler loads it, in compile and with --compiled-step."""
    pytest.importorskip("triton")
    done = run_python("-c", NO_LEAKS)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the start of every command."""

    def end(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("mtp_export.commands.program._run", end)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_ctrl_c_promises_what_the_command_keeps(
    command: str, interrupted: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command to go on with, where it goes on."""
    words = [*filter(None, [command]), "--input-dir", "a b", "--output-dir", "x"]
    assert exit_code([*words, "--no-resume"]) == 130
    said = capsys.readouterr().err
    if command in ("", *RESUMED):
        again = shlex.join(["mtp-export", *words])
        assert said == f"mtp-export: Interrupted. To go on:\n  {again}\n"
    elif command == "verify":
        assert said == (
            "mtp-export: Interrupted. Nothing is kept (--stream --workdir DIR keeps progress).\n"
        )
    else:
        assert said == "mtp-export: Interrupted.\n"


def test_ctrl_c_promises_nothing_where_nothing_was_done(
    interrupted: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["quantize", "--dry-run"], ["--version"], ["--help"]):
        assert exit_code(words) == 130
        assert capsys.readouterr().err == "mtp-export: Interrupted.\n"


@pytest.mark.parametrize(
    ("words", "goes_on"),
    [
        (["inspect", "hf://a/b"], False),
        (["export", "hf://a/b", "x"], True),
        (["--input-dir", "hf://a/b", "--output-dir", "x"], True),
        (["--input-dir", "hf://a/b", "--output-dir", "x", "--dry-run"], False),
        (["verify", "hf://a/b"], False),
        (["verify", "hf://a/b", "--share", "1/2", "--workdir", "w"], True),
    ],
)
def test_a_broken_network_promises_what_the_command_keeps(
    words: list[str],
    goes_on: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the message and in the hint below it, and of a full disk too."""

    def end(arguments: list[str]) -> int:
        raise failures.pop()

    monkeypatch.setattr("mtp_export.commands.program._run", end)
    full = write_failure(Path("x"), OSError(errno.ENOSPC, "No space left"))
    failures = [full, UNREACHABLE.at("hf://a/b", "no route")]
    for _ in range(2):
        assert exit_code([*words, "--json"]) == 6
        out, err = capsys.readouterr()
        error = json.loads(out)["error"]
        assert error["hint"] and error["hint"] in error["message"] and error["message"] in err
        assert ("goes on where it stopped" in error["hint"]) is goes_on
        assert error["hint"].endswith("." if goes_on else "un the same command again.")


@pytest.mark.parametrize("kept", ["--stream", "--share=1/2"])
def test_ctrl_c_tells_how_a_verification_goes_on(
    kept: str, interrupted: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["verify", "x", "--workdir", "w"]
    assert exit_code([*words, kept]) == 130
    assert f"To go on:\n  mtp-export verify x --workdir w {kept}\n" in capsys.readouterr().err
    assert exit_code(words) == 130
    assert "Nothing is kept" in capsys.readouterr().err


def test_the_end_of_a_file_is_no_ctrl_c(monkeypatch: pytest.MonkeyPatch, pristine: Path) -> None:
    """Typer takes it for one: a damaged file said that the command goes on where it stopped."""

    def at_its_end(source: Path) -> None:
        raise EOFError("Ran out of input")

    monkeypatch.setattr("mtp_export.commands.inspect.inspect_checkpoint", at_its_end)
    outcome = run_program("inspect", pristine)
    assert outcome.code == 1 and "EOFError" in outcome.err, outcome


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_json_is_json_in_every_encoding(encoding: str, pristine: Path) -> None:
    """Precisions of fp8 checkpoints have a multiplication sign."""
    done = subprocess.run(
        [sys.executable, "-m", "mtp_export", "inspect", str(pristine), "--json"],
        env=ENVIRONMENT | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        check=True,
    )
    assert "×" in json.dumps(json.loads(done.stdout), ensure_ascii=False)


def test_an_engine_that_there_is_not(trained_bundle: Path) -> None:
    outcome = run_program("launch", trained_bundle, "--engine", "vlm")
    assert (outcome.code, "--engine" in outcome.err, "sglang" in outcome.err) == (2, True, True)
    nothing = run_program("launch", trained_bundle / "none", "--engine", "vllm")
    assert nothing.code == 3 and "goes on" not in nothing.err
