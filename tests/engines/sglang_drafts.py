"""SGLang's own class over an EAGLE-3 draft of ours: `python sglang_drafts.py JOB.json RESULT.json`.

Its file comes from SGLang's wheel. The layers that it is made of are stand-ins with the parameters
of SGLang's own, filled with a value that no weight has. Notes those that kept it, the names that
SGLang skipped, the target's token of every draft id, and the layers of the target that it taps.
"""

from __future__ import annotations

import ast
import importlib
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from sglang_modules import Finder
from torch import nn
from transformers import AutoConfig

UNTOUCHED = 12345.0
_CLASS = "sglang.srt.models.kimi_k25_eagle3"
_TARGET = "sglang/srt/models/deepseek_v2.py"


class Matrix(nn.Module):
    """A linear layer, an embedding or a head."""

    def __init__(self, columns: int, rows: int, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows, columns), UNTOUCHED), requires_grad=False)


class Table(Matrix):
    def __init__(self, rows: int, columns: int, **_: Any) -> None:
        super().__init__(columns, rows)


class Norm(nn.Module):
    def __init__(self, size: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), UNTOUCHED), requires_grad=False)


class Mlp(nn.Module):
    """A gate and an up projection side by side, loaded one at a time."""

    def __init__(self, *, hidden_size: int, intermediate_size: int, **_: Any) -> None:
        super().__init__()
        self.gate_up_proj = Matrix(hidden_size, 2 * intermediate_size)
        self.gate_up_proj.weight.weight_loader = self._load  # type: ignore[attr-defined]
        self.down_proj = Matrix(intermediate_size, hidden_size)

    @staticmethod
    def _load(parameter: nn.Parameter, loaded: torch.Tensor, part: int) -> None:
        load(parameter.data.chunk(2)[part], loaded)


class Mla(nn.Module):
    def __init__(self, *, config: Any, hidden_size: int, **given: Any) -> None:
        super().__init__()
        vars(self).update({name: own for name, own in given.items() if type(own) is int})
        heads, key = given["num_heads"], given["qk_nope_head_dim"] + given["qk_rope_head_dim"]
        values = given["qk_nope_head_dim"] + given["v_head_dim"]
        self.q_a_layernorm = Norm(given["q_lora_rank"])
        self.q_b_proj = Matrix(given["q_lora_rank"], heads * key)
        self.kv_a_layernorm = Norm(given["kv_lora_rank"])
        self.kv_b_proj = Matrix(given["kv_lora_rank"], heads * values)
        self.o_proj = Matrix(heads * given["v_head_dim"], hidden_size)


def load(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    assert parameter.shape == loaded.shape, (parameter.shape, loaded.shape)
    parameter.data.copy_(loaded)


_LAYERS: dict[str, dict[str, Any]] = {
    "sglang.srt.layers.layernorm": {"RMSNorm": Norm},
    "sglang.srt.layers.linear": {"ColumnParallelLinear": Matrix, "ReplicatedLinear": Matrix},
    "sglang.srt.layers.vocab_parallel_embedding": {
        "ParallelLMHead": Table,
        "VocabParallelEmbedding": Table,
        "get_embedding_tp_kwargs": dict,
    },
    "sglang.srt.models.deepseek_v2": {"DeepseekV2AttentionMLA": Mla, "DeepseekV2MLP": Mlp},
    "sglang.srt.model_loader.weight_utils": {"default_weight_loader": load},
}


class Skipped(logging.Handler):
    """Keeps the names of weights that SGLang warns of."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.names.append(record.getMessage().rpartition(" ")[2])


def loading(folder: Path, skipped: Skipped) -> dict[str, Any]:
    """Load one draft."""
    module = importlib.import_module(_CLASS)
    config = AutoConfig.from_pretrained(folder)
    (name,) = config.architectures
    model = getattr(module, name)(config)
    stored = load_file(folder / "model.safetensors")
    skipped.names.clear()
    model.load_weights(iter(stored.items()))
    parameters = dict(model.named_parameters())
    tokens = model.get_hot_token_id()
    return {
        "untouched": [n for n, p in parameters.items() if bool((p == UNTOUCHED).any())],
        "elements": sum(p.numel() for p in parameters.values()),
        "skipped": list(skipped.names),
        "tokens": None if tokens is None else tokens.tolist(),
    }


def tapped(finder: Finder, ids: list[int], layers: int) -> list[int]:
    """Layers whose inputs the target keeps, by its own function."""
    tree = ast.parse(finder.archive.read(_TARGET))
    name = "set_eagle3_layers_to_capture"
    (function,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    function.args.args[1].annotation = None
    found: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), _TARGET, "exec"), found)
    target = SimpleNamespace(
        pp_group=SimpleNamespace(is_last_rank=True),
        config=SimpleNamespace(num_hidden_layers=layers),
        model=SimpleNamespace(layers_to_capture=[]),
    )
    found[name](target, ids)
    kept: list[int] = target.model.layers_to_capture
    return kept


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    finder, skipped = Finder(Path(job["wheel"]), {_CLASS}), Skipped()
    sys.meta_path.insert(0, finder)
    for module, names in _LAYERS.items():
        vars(importlib.import_module(module)).update(names)
    logging.getLogger(_CLASS).addHandler(skipped)
    result = {name: loading(Path(folder), skipped) for name, folder in job["drafts"].items()}
    taps = {str(ids[0]): tapped(finder, ids, job["layers"]) for ids in job["taps"]}
    Path(sys.argv[2]).write_text(json.dumps({"drafts": result, "taps": taps}))


if __name__ == "__main__":
    main()
