"""Start of the program: as a module, Ctrl-C while it imports what its commands need, and what they
do not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cases import WHOLE_TILES, make_checkpoint
from mtp_export import __version__

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


def test_ctrl_c_while_it_starts_ends_as_at_any_other_time() -> None:
    done = run_python("-c", INTERRUPTED)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 4
    assert set(lines) == {lines[0]} and "Interrupted" in lines[0]
