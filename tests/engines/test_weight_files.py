"""Files of weights that vLLM's and SGLang's own loaders open where one lies outside the index,
beside the verdict of `verify`."""

from __future__ import annotations

import ast
import fnmatch
import json
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Optional
from zipfile import ZipFile

import pytest
from engine_runs import sglang_wheel

from cases import edit_json, read_json, run_program
from verify.foreign_damages import in_two_files_without_index
from verify.foreign_sources import DEEPSEEK, GLM, INDEX, released

# Of torch.jit, which the engines still use.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

_LOADER = "sglang/srt/model_loader/weight_utils.py"
_CHOICE = ("filter_duplicate_safetensors_files", "maybe_add_mtp_safetensors")
ITEM = "MTP modules in the index"


def vllm_opens(folder: Path) -> set[str]:
    """By the whole of its loader's choice."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(LoadConfig())
    _, files, *_ = loader._prepare_weights(str(folder), None, None, True, None)
    return {Path(file).name for file in files}


def sglang_opens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """By the functions that its loader passes every *.safetensors file through."""
    source = ZipFile(sglang_wheel()).read(_LOADER).decode()
    space: dict[str, Any] = {"os": os, "json": json, "fnmatch": fnmatch}
    space |= {"logger": logging.getLogger(__name__), "List": list, "Optional": Optional}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in _CHOICE:
            exec(compile(ast.Module([node], []), _LOADER, "exec"), space)
    stores = ModuleType("sglang.srt.utils.runai_utils")
    vars(stores).update(is_runai_obj_uri=lambda _: False, list_safetensors=list)
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, stores.__name__, stores)
    files = sorted(map(str, folder.glob("*.safetensors")))
    files = space[_CHOICE[0]](files, str(folder), INDEX)
    config = SimpleNamespace(**read_json(folder / "config.json"))
    return {Path(file).name for file in space[_CHOICE[1]](files, str(folder), INDEX, config)}


@pytest.mark.parametrize("indexed", ["whole", "without the file", "no index", "two files"])
@pytest.mark.parametrize("file", ["mtp.safetensors", "model_extra_tensors.safetensors"])
@pytest.mark.parametrize("source", [GLM, DEEPSEEK], ids=["GLM", "DeepSeek"])
def test_what_the_index_leaves_out_is_not_loaded(
    source: Path, file: str, indexed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of vLLM never; SGLang adds one file of this name to GLM's models, which `verify` says.
    Without an index both open every file, and so does `verify`."""
    folder = tmp_path / "checkpoint"
    checkpoint = released(source)
    checkpoint.shards = 1 if indexed == "two files" else checkpoint.shards
    checkpoint.own_file = file
    checkpoint.save(folder)
    if indexed == "no index":
        (folder / INDEX).unlink()
    elif indexed == "two files":
        in_two_files_without_index(folder)
    elif indexed == "without the file":
        edit_json(folder / INDEX, lambda index: without(index["weight_map"], file))
    outcome = run_program("verify", folder, "--level", "files", "--json", "--quiet")
    checks = json.loads(outcome.out)["checks"]
    items = {item["name"]: item for check in checks for item in check["items"]}
    opened = vllm_opens(folder), sglang_opens(folder, monkeypatch)
    added = source == GLM and file == "mtp.safetensors"
    if indexed == "without the file":
        assert (file in opened[0], file in opened[1]) == (False, added)
        names = [f"{ITEM}, as {engine} reads it" for engine in ("vLLM", "SGLang")]
        names = names if added else [ITEM]
        assert [items[name]["status"] for name in names] == ["fail", "pass"][: len(names)]
    elif indexed == "no index":
        assert file in opened[0] & opened[1] and len(opened[0]) == 3
        assert (outcome.code, items[ITEM]["status"]) == (0, "pass")
    else:
        assert file in opened[0] & opened[1]
        assert items[ITEM]["status"] == "pass"


def without(weight_map: dict[str, str], file: str) -> None:
    for name in [name for name, own in weight_map.items() if own == file]:
        del weight_map[name]
