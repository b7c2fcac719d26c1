"""A head in int8 in the engines: vLLM's own class loads its tensors; SGLang's models do not give it
to their drafts, which is why it is refused for that target."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
from engine_runs import process, sglang_wheel
from resolver_sources import SOURCES

from cases import make_checkpoint, quantize
from quantize_rows import ROWS

MODELS = ("deepseek_v2", "glm4_moe", "glm4_moe_lite")  # SGLang's main ones


@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if row.head != "bf16"])
def test_vllm_loads_the_heads_of_both_parts(row: str, tmp_path: Path) -> None:
    source, bundle = make_checkpoint(tmp_path / "source", SOURCES["fp8"]), tmp_path / "bundle"
    assert quantize(source, bundle, *ROWS[row].options, "--quiet").code == 0
    job = {row: {part: str(bundle / part) for part in ("main", "mtp")}}
    status, log, result = process(Path(__file__).with_name("vllm_heads.py"), job, tmp_path)
    assert status == 0, log[-3000:]
    loaded = json.loads(result.read_text())[row]
    assert {name: len(tensors) for name, tensors in loaded.items()} == {
        "lm_head": 3,
        "model.layers.61.shared_head.head": 3,
    }
    assert all(same for tensors in loaded.values() for same in tensors.values())


@pytest.mark.parametrize("model", MODELS)
def test_sglang_gives_the_weight_of_a_head_to_the_draft(model: str) -> None:
    """Its own function was executed, over a head with a weight and over one with packed codes."""
    file = f"sglang/srt/models/{model}.py"
    with ZipFile(sglang_wheel()) as wheel:
        tree = ast.parse(wheel.read(file))
    getters = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "get_embed_and_head"
    ]
    found: dict[str, Any] = {}
    exec(compile(ast.Module([*getters], []), file, "exec"), found)
    embedding, plain = SimpleNamespace(weight="embedding"), SimpleNamespace(weight="head")
    packed = SimpleNamespace(weight_packed="codes", weight_scale="scales")
    body = SimpleNamespace(embed_tokens=embedding)
    shared = found["get_embed_and_head"]
    assert shared(SimpleNamespace(model=body, lm_head=plain)) == ("embedding", "head")
    with pytest.raises(AttributeError, match="'weight'"):
        shared(SimpleNamespace(model=body, lm_head=packed))
