"""SGLang's map of models to drafts, executed: `python sglang_draft_map.py JOB.json RESULT.json`.

Takes the method of its ModelConfig from the wheel that the job names, and gives it a config of
every architecture that it names or the job knows; notes what each becomes.
"""

from __future__ import annotations

import ast
import copy
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

from sglang_modules import Finder

_FILE = "sglang/srt/configs/model_config.py"
_METHOD = "_config_draft_model"
_COUNTS = ("num_nextn_predict_layers", "mtp_num_experts", "mtp_num_experts_per_tok")


def method_of(source: str) -> tuple[Callable[[Any], None], set[str]]:
    """The method as a function, and the architectures that it and the constants it reads name."""
    tree = ast.parse(source)
    (method,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == _METHOD
    )
    read = {node.id for node in ast.walk(method) if isinstance(node, ast.Name)}
    constants: list[ast.stmt] = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and read & {ast.unparse(t) for t in node.targets}
    ]
    names: dict[str, Any] = {
        "copy": copy,
        "logging": logging,
        "get_hf_text_config": lambda config: config.text_config,
    }
    module = ast.Module([*constants, method], type_ignores=[])
    exec(compile(module, _FILE, "exec"), names)
    named = {
        node.value
        for part in module.body
        for node in ast.walk(part)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return names[_METHOD], {name for name in named if name[:1].isupper() and name.isidentifier()}


def draft_of(method: Callable[[Any], None], architecture: str) -> str:
    """The architecture that SGLang gives the draft of a model."""
    counts: dict[str, Any] = dict.fromkeys(_COUNTS, 1)
    text = SimpleNamespace(**counts, mtp_local_layer_ids=[], architectures=[architecture])
    config = SimpleNamespace(**counts, architectures=[architecture], text_config=text)
    model = SimpleNamespace(
        is_draft_model=True, speculative_algorithm="NEXTN", hf_config=config, hf_text_config=text
    )
    method(model)
    return str(model.hf_config.architectures[0])


def main() -> None:
    """Write what every architecture becomes."""
    job = json.loads(Path(sys.argv[1]).read_text())
    sys.meta_path.insert(0, Finder(Path(job["wheel"]), set()))
    method, named = method_of(ZipFile(job["wheel"]).read(_FILE).decode())
    made = {name: draft_of(method, name) for name in sorted({*named, *job["architectures"]})}
    Path(sys.argv[2]).write_text(json.dumps(made))


if __name__ == "__main__":
    main()
