"""Commands that follow a bundle that was just made: check it, and try it."""

from __future__ import annotations

import shlex
from pathlib import Path

from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.options import Part
from mtp_export.schemes.scheme import GRAFTED

_PROMPT = "def read("


def next_steps(plan: BundlePlan) -> dict[str, str]:
    """Return shell commands by what they are for: "check" compares the bundle with its source
    where that is one folder, and else its files with the manifest; "try" decodes a prompt, where
    the bundle has all that this needs."""
    bundle, source = str(plan.options.output_dir), plan.options.input_dir
    is_graft = plan.recorded.get("base_quant") == GRAFTED
    if isinstance(source, Path) and not is_graft:
        words = ["--source", str(source), "--level", "weights"]
    else:
        words = ["--level", "files"]
    steps = {"check": _command("verify", bundle, *words)}
    is_whole = plan.options.content.part is Part.BOTH
    if is_whole and "tokenizer.json" in plan.parts[0].extra_files:
        steps["try"] = _command("generate", bundle, "--prompt", _PROMPT)
    return steps


def _command(command: str, bundle: str, *words: str) -> str:
    """Return a command of the program for a shell; a folder's name is no option."""
    folder = f"./{bundle}" if bundle.startswith("-") else bundle
    return shlex.join(["mtp-export", command, folder, *words])
