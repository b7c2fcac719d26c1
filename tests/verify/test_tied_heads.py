"""A head that is stored beside a tied embedding, which engines use in its place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import export, run_program
from verify.foreign_sources import FIXTURES

QWEN = FIXTURES / "qwen3-5-tiny"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """Stores its embedding a second time, as its head."""
    folder = shutil.copytree(QWEN, tmp_path / "tied")
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: one for file in files for name, one in load_file(file).items()}
    for file in (*files, folder / "model.safetensors.index.json"):
        file.unlink()
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, folder / "model.safetensors")
    return folder


def with_head(folder: Path, head: torch.Tensor) -> Path:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {HEAD: head}, file)
    return folder


def verified(folder: Path, level: str, *options: object) -> tuple[int, dict[str, Any]]:
    outcome = run_program("verify", folder, "--level", level, *options, "--json", "--quiet")
    checks = json.loads(outcome.out)["checks"]
    return outcome.code, {item["name"]: item for check in checks for item in check["items"]}


def test_an_equal_head_is_no_fault(tied: Path) -> None:
    code, items = verified(tied, "weights")
    assert code == 0, items
    assert items["main: the head that is stored is the embedding"]["status"] == "pass"
    assert items["runtime loads it: every tensor explained"]["status"] == "pass"


def test_another_head_is_told_by_its_values(tied: Path) -> None:
    head = load_file(tied / "model.safetensors")[HEAD]
    head[7] = head[8]
    code, items = verified(with_head(tied, head), "files")
    assert code == 0, items
    code, items = verified(tied, "weights")
    assert code == 7
    cause = items["main: the head that is stored is the embedding"]["cause"]
    assert cause.startswith(f"config.json ties head and embedding, and {HEAD} differs from")


def test_a_head_of_another_form_is_told_by_headers(tied: Path) -> None:
    code, items = verified(with_head(tied, torch.ones(500, 128).bfloat16()), "files")
    assert code == 7
    assert "lm_head holds weight BF16 [500, 128]" in items["main: precision on disk"]["cause"]
    code, items = verified(with_head(tied, torch.ones(2048, 128).char()), "files")
    assert code == 7
    assert "lm_head holds weight I8 [2048, 128]" in items["main: precision on disk"]["cause"]


def test_exports_leave_it_out(tied: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    for option in ((), ("--target", "llama.cpp", "--pre-tokenizer", "none")):
        made = export(tied, bundle, *option, "--overwrite", "--quiet")
        assert made.code == 0, made.err
        code, items = verified(bundle, "weights", "--source", tied)
        assert code == 0, items


def test_a_quantized_head_is_made_of_the_embedding(tied: Path, tmp_path: Path) -> None:
    bundle, option = tmp_path / "bundle", ("--head-quant", "weight_only_int8", "--quiet")
    made = run_program("quantize", "--input-dir", tied, "--output-dir", bundle, *option)
    assert made.code == 0, made.err
    code, items = verified(bundle, "weights", "--source", tied)
    assert code == 0, items
