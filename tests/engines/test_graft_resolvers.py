"""vLLM's and SGLang's own rules over the config.json of grafts: what is left unquantized is what is
stored so. vLLM builds both parts by the main folder's config, SGLang the main model alone."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable
from fnmatch import fnmatch
from functools import cache, lru_cache, partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
from engine_runs import sglang_wheel

from cases import MTP_LAYER, make_checkpoint, read_json, read_tensors, run_program
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.quantization.methods import quant_config_of
from mtp_checkpoints.quantization.readers import sglang_reads, vllm_reads
from quantized_by_others import LINEAR, METHODS, write
from undecoded_mains import write_main
from verify.foreign import GLM

# Of torch.jit, which the engines still use.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LeftOut = Callable[[str], bool]
FUSED = {
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}
EXPERT = re.compile(r"(\.mlp\.experts)\..*")


def awq(config: dict[str, Any]) -> LeftOut:
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    names = config["modules_to_not_convert"]
    return lambda module: is_layer_skipped(module, names, FUSED, match_mode="substring")


def gptq(config: dict[str, Any]) -> LeftOut:
    from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override

    own: Any = SimpleNamespace(dynamic=config["dynamic"], packed_modules_mapping=FUSED)
    return lambda module: get_dynamic_override(own, layer_name=module) is False


def fp8(config: dict[str, Any]) -> LeftOut:
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    return partial(is_layer_skipped, ignored_layers=config["ignored_layers"], fused_mapping=FUSED)


def compressed(config: dict[str, Any]) -> LeftOut:
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import (
        should_ignore_layer,
    )

    return partial(should_ignore_layer, ignore=config["ignore"], fused_mapping=FUSED)


def modelopt(config: dict[str, Any]) -> LeftOut:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptQuantConfigBase

    rules: Any = SimpleNamespace(exclude_modules=config["ignore"], packed_modules_mapping=FUSED)
    excluded = ModelOptQuantConfigBase.is_layer_excluded
    return lambda module: bool(excluded(rules, module))


RULES: dict[str, Callable[[dict[str, Any]], LeftOut]] = {
    "awq": awq,
    "gptq": gptq,
    "fp8": fp8,
    "compressed-tensors": compressed,
    "modelopt": modelopt,
}


_QUANTIZATION = "sglang/srt/layers/quantization"
_TYPING = ("Any", "Dict", "Iterable", "List", "Mapping", "Optional", "Tuple", "Union")


def from_sglang(file: str, *names: str) -> dict[str, Any]:
    """Functions and constants of one of SGLang's files, without what else the file imports."""
    source = ZipFile(sglang_wheel()).read(f"{_QUANTIZATION}/{file}").decode()
    space: dict[str, Any] = {"re": re, "fnmatch": fnmatch, "lru_cache": lru_cache}
    space |= {"MappingProxyType": MappingProxyType, "QuantizationConfig": object, "Module": object}
    space |= {name: getattr(__import__("typing"), name) for name in _TYPING}
    wanted = [
        node
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.FunctionDef) and node.name in names)
        or (isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in names)
    ]
    assert len(wanted) == len(names), (file, names)
    for node in wanted:
        exec(compile(ast.Module([node], []), file, "exec"), space)
    return space


def sglang_awq(config: dict[str, Any]) -> LeftOut:
    rule = from_sglang("awq/awq.py", "is_layer_skipped_awq")["is_layer_skipped_awq"]
    return lambda module: bool(rule(module, config["modules_to_not_convert"]))


def sglang_gptq(config: dict[str, Any]) -> LeftOut:
    rule = from_sglang("utils.py", "get_dynamic_override")["get_dynamic_override"]
    own = SimpleNamespace(dynamic=config["dynamic"])
    return lambda module: rule(own, module) is False


def sglang_fp8(config: dict[str, Any]) -> LeftOut:
    names = ("_module_path_match", "_FALLBACK_FUSED_SHARDS", "is_layer_skipped")
    rule = from_sglang("utils.py", *names)["is_layer_skipped"]
    return lambda module: bool(rule(module, config["ignored_layers"]))


def sglang_compressed(config: dict[str, Any]) -> LeftOut:
    names = ("should_ignore_layer", "check_equal_or_regex_match", "_is_equal_or_regex_match")
    rule = from_sglang("compressed_tensors/utils.py", *names)["should_ignore_layer"]
    return lambda module: bool(rule(module, ignore=config["ignore"]))


def sglang_modelopt(config: dict[str, Any]) -> LeftOut:
    names = ("_compile_exclusion_pattern", "is_layer_excluded")
    rule = from_sglang("modelopt_quant.py", *names)["is_layer_excluded"]
    own = SimpleNamespace(exclude_modules=config["ignore"])
    return lambda module: bool(rule(own, module))


SGLANG: dict[str, Callable[[dict[str, Any]], LeftOut]] = {
    "awq": sglang_awq,
    "gptq": sglang_gptq,
    "fp8": sglang_fp8,
    "compressed-tensors": sglang_compressed,
    "modelopt": sglang_modelopt,
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("original") / "original")


@pytest.fixture(scope="module")
def grafted(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Grafted bundles by the method of the main model."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("graft")
        write(original, folder / "main", name)
        arguments = ("--main", folder / "main", "--mtp", original, "--output-dir", folder / "out")
        outcome = run_program("graft", *arguments, "--quiet")
        assert outcome.code == 0, outcome.err
        return folder / "out"

    return make


def check(config: dict[str, Any], left_out: LeftOut, original: Path, bundle: Path) -> None:
    """Compare a rule with the tensors on disk, for every linear of both parts."""
    stored = read_tensors(bundle / "main") | read_tensors(bundle / "mtp")
    draft = f"model.layers.{MTP_LAYER}."
    linears = [key for key in read_tensors(original) if LINEAR.match(key)]
    for key in linears:
        module = key.removesuffix(".weight")
        if config["quant_method"] != "compressed-tensors":  # which is asked expert by expert
            module = EXPERT.sub(r"\1", module)
        plain = key in stored and stored[key].is_floating_point() and stored[key].itemsize == 2
        assert left_out(module) is plain, module
    assert len([key for key in linears if key.startswith(draft)]) > 10


def listed(config: dict[str, Any], key: str) -> list[str]:
    names: list[str] = config["quantization_config"][key]
    return names


def vllm_quark(config: dict[str, Any]) -> LeftOut:
    from vllm.model_executor.layers.quantization.quark.utils import should_ignore_layer

    names = listed(config, "exclude")
    return lambda module: should_ignore_layer(
        module, names, FUSED, check_children=module.endswith(".experts")
    )


def sglang_quark(config: dict[str, Any]) -> LeftOut:
    names = ("should_ignore_layer", "check_equal_or_regex_match", "_is_equal_or_regex_match")
    rule = from_sglang("quark/utils.py", *names)["should_ignore_layer"]
    return partial(rule, ignore=listed(config, "exclude"), fused_mapping=FUSED)


def sglang_bitsandbytes(config: dict[str, Any]) -> LeftOut:
    rule = from_sglang("bitsandbytes.py", "is_layer_skipped_bnb")["is_layer_skipped_bnb"]
    return lambda module: bool(rule(module, listed(config, "llm_int8_skip_modules")))


def transformers_bitsandbytes(config: dict[str, Any]) -> LeftOut:
    from transformers.quantizers.quantizers_utils import should_convert_module

    return lambda module: not should_convert_module(module, listed(config, "llm_int8_skip_modules"))


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("quark", vllm_quark),
        ("quark", sglang_quark),
        ("bitsandbytes", sglang_bitsandbytes),
        ("bitsandbytes", transformers_bitsandbytes),
    ],
)
def test_lists_of_main_models_that_are_not_decoded(
    method: str, rule: Callable[[dict[str, Any]], LeftOut], tmp_path: Path
) -> None:
    """They leave out the layer and the head, and nothing else."""
    main = write_main(method, tmp_path / "main")
    made = run_program("graft", main, GLM, "--output-dir", tmp_path / "out", "--quiet")
    assert made.code == 0, made.err
    left_out = rule(read_json(tmp_path / "out/main/config.json"))
    linears = [key.removesuffix(".weight") for key in read_tensors(GLM) if LINEAR.match(key)]
    for module in (*linears, "lm_head"):
        asked = EXPERT.sub(r"\1", module)
        assert left_out(asked) is module.startswith(("model.layers.3.", "lm_head")), asked
    assert len(linears) > 80


@pytest.mark.parametrize(
    "entry",
    [
        *("mtp", "gate", "model.layers.3", "mlp.up_proj", r"model\.layers\.[34]", "up_proj"),
        *("gate_up_proj", "down_proj", "model.layers.3.self_attn.qkv_proj"),
    ],
)
def test_entries_of_bitsandbytes_are_read_as_both_read_them(entry: str) -> None:
    """By every linear of a miniature and of one below other names: by SGLang those that it joins by
    the name of all."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    listed = {"load_in_4bit": True, "llm_int8_skip_modules": [entry]}
    config = read_json(GLM / "config.json")
    config |= {"quantization_config": {"quant_method": "bitsandbytes", **listed}}
    joined = {part: name for name, parts in FUSED.items() for part in parts}
    joined |= dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
    rule = sglang_bitsandbytes(config)
    for_sglang = quant_config_of(sglang_reads(config, ())["quantization_config"])
    as_written = quant_config_of(config["quantization_config"])
    linears = [name.removesuffix(".weight") for name in read_tensors(GLM) if LINEAR.match(name)]
    for module in (*linears, *(f"model.language_model.mtp.{one}" for one in linears)):
        left_out = for_sglang.format_of(module, Role.ATTENTION) is None
        parent, _, last = module.rpartition(".")
        assert left_out is rule(f"{parent}.{joined.get(last, last)}"), module
        left_out = as_written.format_of(module, Role.ATTENTION) is None
        assert left_out is not should_convert_module(module, [entry]), module


@pytest.mark.parametrize("export", [None, {}, {"kv_cache_group": []}, {"kv_cache_group": ["*k"]}])
@pytest.mark.parametrize("named", [None, {"layers.1.k": {"output_tensors": {"dtype": "fp8_e4m3"}}}])
def test_what_vllms_class_of_quark_ends_on(export: Any, named: Any) -> None:
    from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig

    quantization: dict[str, Any] = {"quant_method": "quark", "layer_quant_config": named}
    quantization |= {} if export is None else {"export": export}
    ends, refused = False, False
    try:
        vllm_reads({"quantization_config": copy.deepcopy(quantization)}, ())
    except InvalidInputError:
        refused = True
    try:
        QuarkConfig.from_config(quantization)
    except (AttributeError, TypeError, ValueError):
        ends = True
    assert refused is ends


# Those of AutoRound are executed in test_foreign_readers.py; of experts with zero points none is.
EXECUTED = [name for name in METHODS if not name.startswith("auto-round") and "zero" not in name]


@pytest.mark.parametrize("name", EXECUTED)
def test_vllm(name: str, original: Path, grafted: Callable[[str], Path]) -> None:
    config = read_json(grafted(name) / "main/config.json")["quantization_config"]
    check(config, RULES[config["quant_method"]](config), original, grafted(name))


@pytest.mark.parametrize("name", EXECUTED)
def test_sglang(name: str, original: Path, grafted: Callable[[str], Path]) -> None:
    """Its own draft has no quantization_config, and is built unquantized."""
    config = read_json(grafted(name) / "main/config.json")["quantization_config"]
    check(config, SGLANG[config["quant_method"]](config), original, grafted(name))
    assert "quantization_config" not in read_json(grafted(name) / "mtp/config.json")
