"""Commands that follow a bundle that was just made: check it, try it, and serve it, with drafts of
its MTP module and of others that it has."""

from __future__ import annotations

import shlex
from pathlib import Path

from mtp_checkpoints.quantization.methods import undecoded_of
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.launch import draft_lines, launch_lines
from mtp_export.bundle.options import Part
from mtp_export.schemes.scheme import GRAFTED
from mtp_runtime.drafters import draft_folders

_PROMPT = "def read("


def next_steps(plan: BundlePlan) -> dict[str, str]:
    """Return shell commands by what they are for: "check" compares the bundle with its source
    where that is one folder, and else its files with the manifest; "prove" runs a graft, whose
    pairing is proven by the drafts that are accepted; "try" decodes a prompt and "serve" serves it,
    both with drafts of its MTP module, where it has all that this needs."""
    bundle, source = str(plan.options.output_dir), plan.options.input_dir
    is_graft = plan.recorded.get("base_quant") == GRAFTED
    is_decoded = not is_graft or undecoded_of(plan.checkpoint.config) is None
    if isinstance(source, Path) and not is_graft:
        words = ["--source", str(source), "--level", "weights"]
    else:
        words = ["--level", "files"]
    steps = {"check": _command("verify", bundle, *words)}
    if is_graft and is_decoded:
        steps["prove"] = _command("verify", bundle, "--level", "run")
    if _can_be_tried(plan) and is_decoded:
        method = plan.family.draft_method
        drafts = ["--speculate-method", method] if method else []
        steps["try"] = _command("generate", bundle, "--prompt", _PROMPT, *drafts)
        steps["serve"] = _command("serve", bundle, *drafts)
    return steps


def draft_launch(plan: BundlePlan) -> dict[str, dict[str, str]]:
    """Return the shell commands that serve a finished bundle with its extra drafts, by method and
    by engine."""
    bundle = plan.options.output_dir
    if plan.options.content.part is not Part.BOTH:
        return {}
    found: dict[str, dict[str, str]] = {method: {} for method in draft_folders(bundle)}
    for engine in launch_lines(plan) if found else ():
        for method, lines in draft_lines(bundle, engine, None).items():
            if lines is not None:
                found[method][engine] = "\n".join(lines)
    if _can_be_tried(plan):
        for method, lines_of_method in found.items():
            own = _command("serve", str(bundle), "--speculate-method", method)
            lines_of_method["mtp-export"] = own
    return found


def _can_be_tried(plan: BundlePlan) -> bool:
    """Return True for a bundle that has all that a prompt's decoding needs."""
    is_whole = plan.options.content.part in (Part.BOTH, Part.ONE)
    return is_whole and "tokenizer.json" in plan.parts[0].extra_files


def _command(command: str, bundle: str, *words: str) -> str:
    """Return a command of the program for a shell; a folder's name is no option."""
    folder = f"./{bundle}" if bundle.startswith("-") else bundle
    return shlex.join(["mtp-export", command, folder, *words])
