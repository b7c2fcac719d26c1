"""Digests of the bundles that the trained fixture gives, for every row and target it can hold.

`python tests/bundle/golden.py` (with `.` and `tests` on PYTHONPATH) records them anew after a
deliberate change of the format or of the fixture.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from itertools import product
from pathlib import Path

from cases import export, quantize, tree

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "fixtures/deepseek-v3-tiny"
RECORD = Path(__file__).with_name("golden.json")
TARGETS = ("hf", "vllm", "sglang", "tensorrt-llm", "lightllm", "xllm", "paddlenlp")
PAIRS = (
    ("a8w8_fp8_wint4", "a8w8_fp8"),
    ("weight_only_int4", "weight_only_int8"),
    ("a8w8_fp8", "a8w8_fp8"),
    ("weight_only_int8", "weight_only_int8"),
    ("bf16", "bf16"),
)
SCHEMES = ("a8w8_fp8_wint4", "weight_only_int4", "a8w8_fp8", "weight_only_int8", "bf16", "keep")
INT4 = ("--base-quant", "weight_only_int4", "--mtp-quant", "weight_only_int8")


def _exports() -> dict[str, tuple[str, ...]]:
    variants: dict[str, tuple[str, ...]] = {
        "": (),
        ", mtp alone": ("--part", "mtp", "--shared-weights", "drop"),
        ", small shards": ("--max-shard-size", "400kB"),
    }
    return {
        f"export {target}{name}": ("export", "--target", target, *options)
        for target, (name, options) in product(TARGETS, variants.items())
    }


def _quantizations() -> dict[str, tuple[str, ...]]:
    group = ("--group-size", "64")
    result = {
        f"{base} + {mtp}, {target}": (
            *("quantize", "--target", target, "--base-quant", base, "--mtp-quant", mtp, *group),
        )
        for target, (base, mtp) in product(TARGETS, PAIRS)
    }
    for target, base, mtp in product(("hf", "sglang"), SCHEMES, SCHEMES):
        options = ("--base-quant", base, "--mtp-quant", mtp, *group, "--allow-untested-pair")
        result.setdefault(f"{base} + {mtp}, {target}", ("quantize", "--target", target, *options))
    result["int4 everywhere"] = ("quantize", *INT4, *group, "--int4-scope", "all")
    result["int4, mse"] = ("quantize", *INT4, *group, "--scale", "mse")
    head = ("--head-quant", "weight_only_int8")
    result["int4, int8 head"] = ("quantize", *INT4, *group, *head)
    result["fp8, int8 head"] = ("quantize", *head)
    result["int4, groups of 32"] = ("quantize", *INT4, "--group-size", "32")
    return result


CASES = _exports() | _quantizations()


def digest(name: str, folder: Path) -> str:
    """One digest of a bundle's files, "exit N" for options that the fixture or a target refuses.

    The version of the program, which the manifest holds, is left out.
    """
    command, *options = CASES[name]
    run = export if command == "export" else quantize
    outcome = run(FIXTURE, folder, *options, "--link", "copy", "--quiet")
    if outcome.code:
        return f"exit {outcome.code}"
    total = hashlib.sha256()
    for path, content in tree(folder).items():
        if path == "mtp_export.json":
            manifest = json.loads(content)
            del manifest["tool_version"]
            content = json.dumps(manifest, sort_keys=True).encode()
        total.update(f"{path} {hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()


def record() -> None:
    """Write the digests of all cases."""
    digests = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            digests[name] = digest(name, Path(folder, "bundle"))
    RECORD.write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    record()
