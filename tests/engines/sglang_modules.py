"""SGLang's own resolver over our configs: `python sglang_modules.py JOB.json RESULT.json`.

The job names SGLang's wheel and, per bundle and part, the folder and the module names that SGLang's
classes ask for. The files that decide (quantization configs, the renaming of the draft, the fusion
of shared experts) are loaded from the wheel; whatever else they import is a stand-in, since SGLang
as a whole needs a GPU.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import linecache
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_QUANTIZATION = "sglang.srt.layers.quantization"
_REAL = {
    f"{_QUANTIZATION}.base_config",
    f"{_QUANTIZATION}.compressed_tensors.compressed_tensors",
    f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_wNa16",
    f"{_QUANTIZATION}.compressed_tensors.utils",
    f"{_QUANTIZATION}.fp8",
    f"{_QUANTIZATION}.modelopt_quant",
    f"{_QUANTIZATION}.utils",
    f"{_QUANTIZATION}.w4afp8",
    "sglang.srt.models.deepseek_common.utils",
    "sglang.srt.models.deepseek_nextn",
    "sglang.srt.models.glm4_moe",
    "sglang.srt.models.glm4_moe_lite",
    "sglang.srt.models.glm4_moe_lite_nextn",
    "sglang.srt.models.glm4_moe_nextn",
    "sglang.srt.models.utils",
}

# What SGLang's ModelConfig makes of a draft's architecture, and the module of that class.
_DRAFTS = {
    "DeepseekV3ForCausalLM": ("deepseek_nextn", "DeepseekV3ForCausalLMNextN"),
    "DeepseekV32ForCausalLM": ("deepseek_nextn", "DeepseekV3ForCausalLMNextN"),
    "Glm4MoeForCausalLM": ("glm4_moe_nextn", "Glm4MoeForCausalLMNextN"),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite_nextn", "Glm4MoeLiteForCausalLMNextN"),
    "GlmMoeDsaForCausalLM": ("glm4_moe", "GlmMoeDsaForCausalLMNextN"),
}


class _StandIns(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)


def stand_in(name: str) -> Any:
    """A class of a name: can be subclassed, called, asked for attributes, and is never true."""
    methods = {"__init__": _take, "__getattr__": _attribute, "__call__": _call}
    return _StandIns(name, (), methods | {"__bool__": _false, "__iter__": _empty, "__len__": _zero})


def _take(self: Any, *_: Any, **__: Any) -> None:
    self.__dict__["arguments"] = None


def _attribute(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return stand_in(name)()


def _call(self: Any, *arguments: Any, **__: Any) -> Any:
    """Return the function of a decorator; anything else is another stand-in."""
    if len(arguments) == 1 and callable(arguments[0]):
        return arguments[0]
    return stand_in("Result")()


def _false(self: Any) -> bool:
    return False


def _empty(self: Any) -> Any:
    return iter(())


def _zero(self: Any) -> int:
    return 0


class _StandInModule(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = stand_in(name)
        setattr(self, name, value)  # the same class for everyone who imports it
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of SGLang: from the wheel where they are real, else stand-ins."""

    def __init__(self, wheel: Path, real: set[str]) -> None:
        from zipfile import ZipFile

        self.archive = ZipFile(wheel)
        self.real = real
        self.loaded: list[str] = []

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in ("sglang", "sgl_kernel"):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType | None:
        return ModuleType(spec.name) if spec.name in self.real else _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in self.real:
            file = module.__name__.replace(".", "/") + ".py"
            source = self.archive.read(file).decode()
            linecache.cache[file] = (len(source), None, source.splitlines(True), file)
            exec(compile(source, file, "exec"), module.__dict__)
            self.loaded.append(module.__name__)


def config_of(folder: Path, draft: bool) -> Any:
    """A folder's quantization config as SGLang reads it; the draft's names rewritten first."""
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
    from sglang.srt.layers.quantization.w4afp8 import W4AFp8Config

    document = json.loads((folder / "config.json").read_text())
    stored = document.get("quantization_config")
    if stored is None:
        return None
    classes = {"fp8": Fp8Config, "w4afp8": W4AFp8Config, "modelopt": ModelOptFp4Config}
    kind = classes.get(stored["quant_method"], CompressedTensorsConfig)
    config = kind.from_config(stored | {"packed_modules_mapping": {}})
    (architecture,) = document["architectures"]
    if draft:
        module, name = _DRAFTS[architecture]
        draft_class = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)
        # getattr would find one in any stand-in among its bases.
        own = (vars(base).get("hf_to_sglang_mapper") for base in draft_class.__mro__)
        if (mapper := next(filter(None, own), None)) is not None:
            config.apply_weight_name_mapper(mapper)
    if not architecture.startswith("Glm4"):  # as DeepseekV2ForCausalLM does, and what derives of it
        fused = {"fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"]}
        config.update_packed_modules_mapping(fused)
    return config


def resolved(config: Any, module: str) -> dict[str, Any]:
    """The method that SGLang takes for a module, and of compressed-tensors the scheme's data."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    if config is None:
        return {"method": "unquantized"}
    is_experts = module.endswith(".experts")
    kind = ParallelLMHead if module.endswith("head") else LinearBase
    layer = FusedMoE() if is_experts else kind()
    method = config.get_quant_method(layer, module)
    name = type(method).__name__
    if method is None or name.startswith("Unquantized"):
        return {"method": "unquantized"}
    if name.startswith("ModelOpt"):
        return {"method": "W4A16_NVFP4" if config.is_w4a16 else "NVFP4"}
    if not name.startswith("CompressedTensors"):
        return {"method": name}
    scheme = config.get_scheme_dict(layer, module + ".0.gate_proj" if is_experts else module)
    return {
        "method": "compressed-tensors",
        "scheme": type(layer.scheme).__name__,
        "format": scheme["format"],
        "weights": _arguments(scheme["weights"]),
        "input_activations": _arguments(scheme["input_activations"]),
    }


def _arguments(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    fields = ("num_bits", "type", "strategy", "group_size", "block_structure", "dynamic")
    return {name: getattr(value, name) for name in fields}


def prepare() -> None:
    """Provide names that the config module takes from absent packages, and a device's answer."""
    package = f"{_QUANTIZATION}.compressed_tensors"
    compressed_tensors = importlib.import_module(f"{package}.compressed_tensors")
    wna16 = importlib.import_module(f"{package}.schemes.compressed_tensors_wNa16")
    compressed_tensors.WNA16_SUPPORTED_BITS = wna16.WNA16_SUPPORTED_BITS
    config = compressed_tensors.CompressedTensorsConfig
    config._check_scheme_supported = lambda *_, **__: True  # as on an H100
    modelopt = importlib.import_module(f"{_QUANTIZATION}.modelopt_quant")
    for method in (modelopt.ModelOptFp4LinearMethod, modelopt.ModelOptNvFp4FusedMoEMethod):
        method.__init__ = _take  # they look for a GPU


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    finder = Finder(Path(job["wheel"]), _REAL)
    sys.meta_path.insert(0, finder)
    prepare()
    result: dict[str, Any] = {}
    for name, parts in job["bundles"].items():
        result[name] = {}
        for part, asked in parts.items():
            config = config_of(Path(asked["folder"]), part == "mtp")
            from sglang.srt.models.deepseek_common.utils import is_wint4afp8_or_wint4a16_config

            answers = [{"module": module} | resolved(config, module) for module in asked["modules"]]
            fuses = not is_wint4afp8_or_wint4a16_config(config)
            result[name][part] = {"modules": answers, "fuses_shared_experts": fuses}
    assert set(finder.loaded) == _REAL, _REAL - set(finder.loaded)
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
