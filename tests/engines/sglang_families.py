"""SGLang's own classes over drafts of ours, and main models: `python sglang_families.py JOB.json
RESULT.json`.

The files of the models come from SGLang's wheel. The layers that they are made of are stand-ins
with the parameters of SGLang's own, filled with a value that no weight has; what parts of joined
parameters are loaded with is compared in shape. Notes the parameters that kept the value, and the
numbers of the others.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang_drafts import UNTOUCHED, Matrix, Norm, Table, load
from sglang_modules import Finder, stand_in
from torch import nn
from vllm_drafts import stored_in

_MODELS = "sglang.srt.models"
_REAL = {
    f"{_MODELS}.{name}"
    for name in (
        *("bailing_moe", "bailing_moe_linear", "bailing_moe_nextn", "bailing_moe_v3"),
        *("deepseek_nextn", "deepseek_v2", "glm4", "glm4v", "glm_ocr", "glm_ocr_nextn"),
        *("deepseek_common.deepseek_weight_loader", "deepseek_common.utils"),
        *("ernie4", "ernie45_moe_vl", "ernie4_eagle", "exaone_moe", "exaone_moe_mtp"),
        *("gigachat35", "gigachat35_mtp", "glm4_moe", "glm4_moe_nextn", "glm4_moe_lite"),
        *("glm4_moe_lite_nextn", "hunyuan_v3", "hunyuan_v3_nextn", "llama", "longcat_flash"),
        *("longcat_flash_nextn", "mimo", "mimo_mtp", "qwen2", "qwen2_moe", "qwen3_5"),
        *("qwen3_5_mtp", "qwen3_moe", "qwen3_moe_mtp", "qwen3_next", "step3p5", "step3p5_mtp"),
        "utils",
    )
}
_OF_CONFIGS = "sglang.srt.configs"
# The files and classes of configs whose methods models call.
_CONFIGS = {"gigachat3_5": ("gigachat35", "GigaChat35Config")}
_REAL |= {f"{_OF_CONFIGS}.{file}" for file, _ in _CONFIGS.values()}
_EXPERTS = "sglang/srt/layers/moe/fused_moe_triton/layer.py"


class FusingNorm(Norm):
    def fuse_input_quant(self, *_: Any) -> None:
        """Do nothing: nothing is quantized."""


class Linear(Matrix):
    """A linear layer with or without a bias."""

    def __init__(self, input_size: int, output_size: int, bias: bool = True, **_: Any) -> None:
        super().__init__(input_size, output_size)
        self.quant_method = self.tp_group = None
        self.output_size_per_partition = output_size
        self.bias = nn.Parameter(torch.empty(output_size), requires_grad=False) if bias else None
        for parameter in self.parameters():
            parameter.weight_loader = self._load  # type: ignore[attr-defined]

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor) -> None:
        load(parameter, loaded)


class Joined(Linear):
    """Linear layers one below another, loaded as a whole or one at a time."""

    def __init__(self, columns: int, rows: dict[Any, int], bias: bool = True) -> None:
        super().__init__(columns, sum(rows.values()), bias)
        self._rows = rows

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor, part: Any = None) -> None:
        parts = dict(zip(self._rows, parameter.data.split([*self._rows.values()]), strict=True))
        load(parameter if part is None else parts[part], loaded)


def merged(input_size: int, output_sizes: list[int], bias: bool = True, **_: Any) -> Joined:
    """SGLang's MergedColumnParallelLinear."""
    return Joined(input_size, dict(enumerate(output_sizes)), bias)


def qkv(
    columns: int, head: int, heads: int, kv_heads: int | None = None, bias: bool = True, **_: Any
) -> Joined:
    """SGLang's QKVParallelLinear."""
    own = head * (heads if kv_heads is None else kv_heads)
    return Joined(columns, {"q": head * heads, "k": own, "v": own}, bias)


class Experts(nn.Module):
    """Routed experts, of which gate and up are joined."""

    should_fuse_routed_scaling_factor_in_topk = False
    runner_backend = routing_method_type = moe_runner_config = quant_method = None

    def __init__(
        self, *, num_experts: int, hidden_size: int, intermediate_size: int, **_: Any
    ) -> None:
        super().__init__()
        self.num_local_experts = num_experts
        for name, shape in (
            ("w13_weight", (num_experts, 2 * intermediate_size, hidden_size)),
            ("w2_weight", (num_experts, hidden_size, intermediate_size)),
        ):
            parameter = nn.Parameter(torch.empty(shape), requires_grad=False)
            parameter.weight_loader = self._load  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    @staticmethod
    def _load(
        parameter: nn.Parameter, loaded: torch.Tensor, name: str, shard_id: str, expert_id: int
    ) -> None:
        own = parameter.data[expert_id]
        load(own if shard_id == "w2" else own.chunk(2)[shard_id == "w3"], loaded)


def layers(
    count: int, make: Callable[..., nn.Module], *, prefix: str = "", **_: Any
) -> tuple[nn.ModuleList, int, int]:
    """SGLang's make_pp_layers on one rank."""
    made = (make(idx=index, prefix=f"{prefix}.{index}") for index in range(count))
    return nn.ModuleList(made), 0, count


def submitted(
    *, func: Callable[..., None], func_args: Any, func_kwargs: Any = None, **_: Any
) -> None:
    """SGLang's maybe_executor_submit, at once."""
    func(*func_args, **func_kwargs or {})


def with_attributes(parameter: nn.Parameter, attributes: dict[str, Any]) -> None:
    """SGLang's set_weight_attrs."""
    for name, value in attributes.items():
        setattr(parameter, name, value)


def execution() -> Any:
    """SGLang's settings of how models are run: its usual ones, as far as they are asked for."""
    settings = stand_in("Settings")()
    settings.moe = SimpleNamespace(ep_num_redundant_experts=0)
    return settings


def layer_number(name: str) -> int | None:
    """The number of the layer that a tensor is named for."""
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else None


_RANK = SimpleNamespace(is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1)
_ONE: dict[str, Any] = dict.fromkeys(
    ("tp_size", "attn_tp_size", "moe_ep_size", "moe_tp_size", "attn_dcp_size", "pp_size"), 1
)
_ONE |= dict.fromkeys(("tp_rank", "attn_tp_rank", "moe_ep_rank", "moe_tp_rank"), 0)
_ONE |= {"pp_group": _RANK, "enable_dp_lm_head": False, "enable_prefill_cp": False}
_FORWARDS = {
    "MHAForward": "init_mha_forward",
    "MHARocmForward": "",
    "MLAForward": "init_mla_forward",
    "MLARocmForward": "",
    "MLAFusedRopeRocmForward": "init_mla_fused_rope_rocm_forward",
    "MLACpuForward": "init_mla_fused_rope_cpu_forward",
}
_STANDING_IN: dict[str, dict[str, Any]] = {
    "srt.distributed": {
        "divide": lambda whole, parts: whole // parts,
        "get_pp_indices": lambda layers, *_: (0, layers),
    },
    "srt.distributed.utils": {"get_group_rank_size": lambda _: (0, 1)},
    "srt.layers.layer_boundary": {
        **dict.fromkeys(("declare_attn", "declare_ffn"), SimpleNamespace),
        "layer_stack": nullcontext,
        "append_stages": lambda *_: (None, None),
    },
    "kernels.ops.attention.fla.fused_norm_gate": {"FusedRMSNormGated": Norm},
    "srt.layers.attention.mamba.mamba": {"mamba_v2_sharded_weight_loader": lambda *_: load},
    "srt.layers.layernorm": {"RMSNorm": FusingNorm, "GemmaRMSNorm": FusingNorm},
    "srt.layers.linear": {
        **dict.fromkeys(("ColumnParallelLinear", "ReplicatedLinear", "RowParallelLinear"), Linear),
        "MergedColumnParallelLinear": merged,
        "QKVParallelLinear": qkv,
        "resolve_linear_parallel_group": lambda _: (0, 1),
    },
    "srt.layers.moe.ep_moe.layer": {"get_moe_impl_class": lambda _: Experts},
    "srt.layers.moe.fused_moe_triton.layer": {"FusedMoE": Experts},
    "srt.layers.moe.fused_moe_triton": {"FusedMoE": Experts},
    "srt.layers.moe.utils": {"get_num_fused_shared_experts": int},
    "srt.layers.utils": {"get_layer_id": layer_number},
    "srt.layers.vocab_parallel_embedding": {
        "ParallelLMHead": Table,
        "VocabParallelEmbedding": Table,
        "get_embedding_tp_kwargs": dict,
    },
    "srt.model_loader.utils": {"maybe_executor_submit": submitted},
    "srt.model_loader.weight_utils": {
        "RUNAI_STREAMER_TENSOR_ATTR": "streamed",
        "default_weight_loader": load,
        "sharded_weight_loader": lambda *_, **__: load,
    },
    "srt.models.deepseek_common.attention_forward_methods": {
        f"Deepseek{name}Mixin": type(name, (), {method: lambda _: None} if method else {})
        for name, method in _FORWARDS.items()
    },
    "srt.runtime_context": {
        "get_parallel": lambda: SimpleNamespace(**_ONE),
        "get_exec": execution,
    },
    "srt.utils": {
        "add_prefix": lambda name, prefix: f"{prefix}.{name}" if prefix else name,
        "is_cuda": bool,
        "make_layers": lambda *given, **more: layers(*given, **more)[0],
        "make_pp_layers": layers,
        "set_weight_attrs": with_attributes,
    },
    "srt.utils.hf_transformers_utils": {"get_rope_config": lambda config: (1e4, None)},
}


def prepare(finder: Finder) -> None:
    """Put the stand-ins into SGLang's modules, and its own maps of experts' names into theirs."""
    sys.meta_path.insert(0, finder)
    for module, names in _STANDING_IN.items():
        vars(importlib.import_module(f"sglang.{module}")).update(names)
    tree = ast.parse(finder.archive.read(_EXPERTS))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("make_expert_"):
            node.decorator_list, node.returns = [], None
            for argument in node.args.args:
                argument.annotation = None
            found: dict[str, Any] = {}
            exec(compile(ast.Module([node], []), _EXPERTS, "exec"), found)
            setattr(Experts, node.name, classmethod(found[node.name]))


# Fields that classes read and configs may leave out.
_USUAL: dict[str, Any] = {"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 1e4}
_USUAL |= {"rope_scaling": None, "hidden_act": "silu", "tie_word_embeddings": False}


NUMBERED = ("step3p5_mtp",)  # modules whose classes are told the number of the draft


class _Config(SimpleNamespace):
    """Fields of a config, which some classes look for by name."""

    def __contains__(self, name: str) -> bool:
        return name in vars(self)


def config_of(document: dict[str, Any], fields: dict[str, Any]) -> Any:
    """A config.json, or the part of it that is the text's, with more fields, as models have it."""
    document = document.get("text_config", document)
    make: Callable[..., Any] = _Config
    if document["model_type"] in _CONFIGS:
        file, kind = _CONFIGS[document["model_type"]]
        make = getattr(importlib.import_module(f"{_OF_CONFIGS}.{file}"), kind)
    return make(**_USUAL | document | fields)


def loading_of(folder: str, module: str, name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The loading of a folder by a class, which is given more fields than config.json has."""
    document = json.loads(Path(folder, "config.json").read_text())
    own = getattr(importlib.import_module(f"{_MODELS}.{module}"), name)
    more = {"draft_model_idx": 0} if module in NUMBERED else {}
    model = own(config_of(document, fields), **more)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data.fill_(UNTOUCHED)
    model.load_weights(iter(stored_in(folder).items()))
    untouched = [key for key, p in parameters.items() if bool((p == UNTOUCHED).any())]
    return {
        "class": type(model).__name__,
        "untouched": untouched,
        "elements": sum(p.numel() for key, p in parameters.items() if key not in untouched),
        "embedding": sum(
            p.numel()
            for key, p in parameters.items()
            if key not in untouched and key.endswith("embed_tokens.weight")
        ),
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    finder = Finder(Path(job.pop("wheel")), _REAL)
    prepare(finder)
    result = {key: loading_of(**asked) for key, asked in job.items()}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
