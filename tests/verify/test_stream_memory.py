"""The streamed check reads and holds what it says beforehand: bytes that the process reads, and the
growth of its peak memory, with a model whose layers are larger than everything else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cases import export
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import Role
from runtime.checkpoints import SMALL

# Eight layers of 36 MB in bf16, of which one dense; vocabulary and attention are small.
CONFIG: dict[str, Any] = SMALL | {
    "torch_dtype": "bfloat16",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 320,
    "num_hidden_layers": 8,
    "n_routed_experts": 32,
}
PROGRAM = """
import contextlib, ctypes, gc, json, sys
from pathlib import Path
from mtp_export.progress import silent
from mtp_export.verify.decoding import stream
from mtp_export.verify.check import Level
from mtp_export.verify.context import Context
from mtp_export.verify.options import VerifyOptions
from mtp_runtime.loading.on_demand import StoredExperts

bundle, prompts, workdir = map(Path, sys.argv[1:4])
kept, real = [], StoredExperts.each
def keeping(self, numbers):
    for expert in real(self, numbers):
        kept.append(expert)
        yield expert
if "keep" in sys.argv:
    StoredExperts.each = keeping

def resident(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))

def bytes_read():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar")))

options = VerifyOptions(bundle, None, Level.RUN, prompts, stream=True, workdir=workdir)
context = Context.open(options, lambda title, total: contextlib.nullcontext(silent))
list(stream.run(context))  # loads code, makes pools
kept.clear()
gc.collect()
ctypes.CDLL("libc.so.6").malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")  # the peak starts from what is resident now
before, already = resident("VmRSS"), bytes_read()
items = list(stream.run(context))
found = {"growth": resident("VmHWM") - before, "rchar": bytes_read() - already}
print(json.dumps(found | next(item.data for item in items if item.name == "cost estimate")))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of repeated random rows, but for those that spread tokens over experts."""
    folder = tmp_path_factory.mktemp("large")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for spec in family_of(CONFIG).tensors.values():
        if spec.optional:  # the MTP layer's copies of embedding and head
            continue
        row = torch.randn(spec.shape[-1], generator=generator) * spec.shape[-1] ** -0.5
        values = 1 + 0.1 * row if spec.role is Role.NORM else row
        if spec.role in (Role.EMBEDDING, Role.ROUTER):
            spread = 50.0 if spec.role is Role.EMBEDDING else 0.01 ** (3 - len(spec.shape))
            values = spread * torch.randn(spec.shape, generator=generator)
        kind = torch.float32 if spec.name.endswith("bias") else torch.bfloat16
        tensors[spec.name] = values.to(kind).expand(spec.shape).contiguous()
    (folder / "source").mkdir()
    save_file(tensors, folder / "source/model.safetensors", metadata={"format": "pt"})
    (folder / "source/config.json").write_text(json.dumps(CONFIG))
    assert export(folder / "source", folder / "bundle", "--link", "hardlink", "--quiet").code == 0
    return folder / "bundle"


def measured(bundle: Path, folder: Path, *more: str) -> dict[str, int]:
    prompts = folder / "prompts.jsonl"
    lines = [
        json.dumps({"prompt_token_ids": [3 + (24 * i + j) % 90 for j in range(24)]})
        for i in range(4)
    ]
    prompts.write_text("\n".join(lines))
    command = [sys.executable, "-c", PROGRAM, str(bundle), str(prompts), str(folder), *more]
    # glibc moves its thresholds with what was freed, so that memory comes back sooner or later.
    fixed = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=True, env=os.environ | fixed
    )
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_bytes_and_memory_are_what_the_check_says(bundle: Path, tmp_path: Path) -> None:
    """Bytes within a fifth; memory is no more, and may be less where some was there before."""
    found = measured(bundle, tmp_path)
    memory = found["weight_bytes"] + found["dense_bytes"] + found["activation_bytes"]
    assert found["rchar"] == pytest.approx(found["read_bytes"], rel=0.2), found
    assert memory < 2 * found["weight_bytes"], "a second layer would not be seen"
    assert found["growth"] <= memory, found


@pytest.mark.nightly
def test_experts_that_are_kept_are_seen(bundle: Path, tmp_path: Path) -> None:
    """A check that keeps the experts of all layers grows by seven more."""
    (tmp_path / "own").mkdir()
    found = measured(bundle, tmp_path / "own")
    kept = measured(bundle, tmp_path, "keep")
    assert kept["growth"] > found["growth"] + 5 * found["weight_bytes"], kept
