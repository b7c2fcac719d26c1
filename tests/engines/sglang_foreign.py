"""SGLang's own reading of others' checkpoints: `python sglang_foreign.py JOB.json RESULT.json`.

The job names SGLang's wheel and, by name, a folder with the modules that SGLang's draft class asks
for. The quantization configs, the draft classes and what they derive of come from the wheel; what
else they import is a stand-in. Checks for kernels say yes, as on a GPU of NVIDIA's. Notes for every
module whether it is built quantized, and what the projection is built as; or the reason why SGLang
refuses the folder.
"""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sglang_modules
from sglang_modules import Finder
from torch import nn

_QUANTIZATION = sglang_modules._QUANTIZATION
_CONFIGS = {
    "awq": (f"{_QUANTIZATION}.awq.awq", "AWQMarlinConfig", "AWQConfig"),
    "gptq": (f"{_QUANTIZATION}.gptq.gptq", "GPTQMarlinConfig", "GPTQConfig"),
    "auto-round": (f"{_QUANTIZATION}.auto_round", "AutoRoundConfig", "AutoRoundConfig"),
    "fp8": (f"{_QUANTIZATION}.fp8", "Fp8Config", "Fp8Config"),
    "FP8": (f"{_QUANTIZATION}.modelopt_quant", "ModelOptFp8Config", "ModelOptFp8Config"),
    "NVFP4": (f"{_QUANTIZATION}.modelopt_quant", "ModelOptFp4Config", "ModelOptFp4Config"),
    "compressed-tensors": (
        f"{_QUANTIZATION}.compressed_tensors.compressed_tensors",
        *("CompressedTensorsConfig", "CompressedTensorsConfig"),
    ),
    "quark": (f"{_QUANTIZATION}.quark.quark", "QuarkConfig", "QuarkConfig"),
}
_REAL = sglang_modules._REAL | {module for module, *_ in _CONFIGS.values()}
_REAL |= {f"{_QUANTIZATION}.quark.utils"}
_FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"],
}
# What SGLang's loader gives Quark's config, for every model.
_FUSED_OF = {"quark": {name: parts for name, parts in _FUSED.items() if name != "qkv_proj"}}
_CHECKS = (
    *("check_marlin_supported", "check_marlin_supports_layer", "check_moe_marlin_supports_layer"),
    "verify_marlin_supported",
)


def prepare() -> None:
    """Let every check for a kernel say yes, and classes be built that only note."""
    sglang_modules.prepare()
    marlin = importlib.import_module(f"{_QUANTIZATION}.marlin_utils")
    vars(marlin).update(dict.fromkeys(_CHECKS, lambda *_, **__: True))
    boundary = importlib.import_module("sglang.srt.layers.layer_boundary")
    vars(boundary).update(layer_stack=nullcontext)
    environ = importlib.import_module("sglang.srt.utils")
    vars(environ).update(add_prefix=lambda name, prefix: f"{prefix}.{name}" if prefix else name)
    vocabulary = importlib.import_module("sglang.srt.layers.vocab_parallel_embedding")
    vars(vocabulary).update(get_embedding_tp_kwargs=dict)
    quark = importlib.import_module(f"{_QUANTIZATION}.quark.quark")
    quark.QuarkConfig._check_scheme_supported = lambda *_, **__: True
    experts = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton")
    layers = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer")
    vars(layers).update(FusedMoE=experts.FusedMoE)


def config_of(document: dict[str, Any]) -> Any:
    """A quantization config by the class that SGLang takes for it on a GPU; None without one."""
    stored = document.get("quantization_config")
    if stored is None:
        return None
    stored = stored | {"packed_modules_mapping": {}}
    nested = stored.get("quantization", stored)
    module, usual, fallback = _CONFIGS[nested.get("quant_algo") or stored["quant_method"]]
    found = importlib.import_module(module)
    if hasattr(found, "_is_cuda"):
        found._is_cuda = True
    override = getattr(getattr(found, usual), "override_quantization_method", None)
    chosen = usual if usual == fallback or override(stored, None) else fallback
    return getattr(found, chosen).from_config(stored)


def draft_of(document: dict[str, Any], asked: list[str]) -> dict[str, Any]:
    """The modules of a draft as SGLang builds them, or why it does not."""
    try:
        return _built_draft(document, asked)
    except (ValueError, TypeError, NotImplementedError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def _built_draft(document: dict[str, Any], asked: list[str]) -> dict[str, Any]:
    config = config_of(document)
    (architecture,) = document["architectures"]
    module, name = sglang_modules._DRAFTS[architecture]
    draft_class = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)
    if config is not None:
        if (mapper := own_of(draft_class, "hf_to_sglang_mapper")) is not None:
            config.apply_weight_name_mapper(mapper)
        config.update_packed_modules_mapping(_FUSED_OF.get(config.get_name(), _FUSED))
    resolve, of_draft = own_of(draft_class, "_resolve_nextn_quant_config"), config
    if resolve is not None:
        of_draft = resolve(draft_class, SimpleNamespace(**document), config)
    builds = next(base for base in draft_class.__mro__ if "__init__" in vars(base))
    own, projection = built(importlib.import_module(builds.__module__), document, of_draft)
    answers = {each: is_quantized(config if each.endswith("head") else own, each) for each in asked}
    is_plain = projection is nn.Linear
    return {
        "modules": answers,
        "projections": [is_plain],
        "projection": not is_plain and is_quantized(own, "model.eh_proj"),
    }


def own_of(draft_class: type, name: str) -> Any:
    """An attribute of a class or its bases; getattr would find one in any stand-in."""
    return next(filter(None, (vars(base).get(name) for base in draft_class.__mro__)), None)


def built(module: Any, document: dict[str, Any], config: Any) -> tuple[Any, type]:
    """The config that a draft's decoder layer is built with, and the class of its projection."""
    (inner,) = (own for name, own in vars(module).items() if name.endswith("ModelNextN"))
    given: list[Any] = []
    (decoder,) = (name for name in vars(module) if name.endswith("DecoderLayer"))

    def layer(*_: Any, quant_config: Any, **__: Any) -> nn.Module:
        given.append(quant_config)
        return nn.Identity()

    setattr(module, decoder, layer)
    sizes = SimpleNamespace(**document)
    model = inner(sizes, config, prefix="model")
    return given[0], type(model.eh_proj)


def is_quantized(config: Any, module: str) -> bool:
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    if config is None:
        return False
    kind = ParallelLMHead if module.endswith("head") else LinearBase
    is_experts = module.endswith(".experts")
    layer = FusedMoE() if is_experts else kind()
    if config.get_name() == "compressed_tensors":
        if kind is ParallelLMHead:
            return config.get_lm_head_scheme(layer, module) is not None
        if is_experts:
            config._add_fused_moe_to_target_scheme_map()
        name = f"{module}.0.gate_proj" if is_experts else module
        return config.get_scheme_dict(layer, name) is not None
    method = config.get_quant_method(layer, module)
    return method is not None and not type(method).__name__.startswith("Unquantized")


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    finder = Finder(Path(job["wheel"]), _REAL)
    sys.meta_path.insert(0, finder)
    prepare()
    result = {
        name: draft_of(asked["config"], asked["modules"]) for name, asked in job["drafts"].items()
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
