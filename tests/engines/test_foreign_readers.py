"""Checkpoints that others wrote, with their MTP layer, as vLLM's and SGLang's own code reads them:
`verify` fails what an engine would build in another precision than it is stored in, says what an
engine refuses, and passes the rest."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from engine_runs import sglang_wheel
from test_resolvers import FUSED, run, sglang_block

from cases import read_json, run_program
from mtp_checkpoints.tensors.bundle_folder import open_checkpoint
from quantized_by_others import LINEAR, METHODS, unquantized
from verify.foreign_sources import DEEPSEEK, GLM, LISTS, Checkpoint, ignore, quantized, released

# Of torch.jit, which the engines still use.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Answers = dict[str, dict[str, Any]]
Change = Callable[[Checkpoint], object]
LEFT_OUT = "mtp: left out of quantization as stored"
OWN_LISTS = {"gptq": "dynamic", "auto-round": "extra_config", "awq": "modules_to_not_convert"}


def put(value: Any) -> Change:
    """Put a value in the place of the list of what is not quantized; `...` takes it out."""

    def change(checkpoint: Checkpoint) -> None:
        quantization = checkpoint.quantization
        usual = next((name for name in LISTS if name in quantization), "ignored_layers")
        field = OWN_LISTS.get(quantization.get("quant_method", ""), usual)
        quantization.pop(field, None)
        if value is not ...:
            is_list = value != [] or field not in ("dynamic", "extra_config")
            quantization[field] = value if is_list else {}

    return change


def whole(checkpoint: Checkpoint) -> None:
    """The layer by one entry, as the method has it."""
    layer = checkpoint.layer.removesuffix(".")
    method = checkpoint.quantization.get("quant_method", "modelopt")
    entries = {
        "gptq": rf"{layer}\..*",
        "compressed-tensors": rf"re:{layer}\..*",
        "auto-round": rf"^{re.escape(layer)}(\..*)?$",
        "modelopt": f"{layer}*",
    }
    ignore(checkpoint, entries.get(method, layer))


def each(checkpoint: Checkpoint) -> None:
    """Every linear of the layer by its name."""
    modules = {name.rpartition(".")[0] for name in checkpoint.mtp()}
    ignore(checkpoint, *sorted(m for m in modules if "_proj" in m.rpartition(".")[2]))


def ends(checkpoint: Checkpoint) -> None:
    """Modules by the ends, or parts, of their names."""
    ignore(checkpoint, "self_attn", "mlp.experts", "shared_experts")


def blocks(checkpoint: Checkpoint) -> None:
    """GPTQ's list of what is quantized instead."""
    checkpoint.quantization["modules_in_block_to_quantize"] = [["self_attn.o_proj"], ["mlp"]]


LISTED: dict[str, Change] = {
    "as it is": lambda _: None,
    "absent": put(...),
    "empty": put([]),
    "null": put(None),
    "whole": whole,
    "each": each,
    "ends": ends,
}


def draft_alone(source: Path, method: str, stored: str) -> Checkpoint:
    """The miniature's layer as in quantized(), beside no main layer: that of 61 takes long."""
    found, how = released(source), METHODS[method]
    whole = unquantized(found.tensors)
    found.tensors = {n: one for n, one in whole.items() if not n.startswith("model.layers.")}
    for name, tensor in whole.items():
        if not name.startswith(found.layer):
            continue
        if stored == "quantized" and LINEAR.match(name):
            parts, _ = how.encode(tensor.float())
            module = name.removesuffix(".weight")
            found.tensors |= {f"{module}.{end}": part for end, part in parts.items()}
        else:
            found.tensors[name] = tensor if tensor.dim() == 1 else tensor.to(how.dtype)
    found.config.pop("quantization_config", None)
    if how.file is not None:
        found.config_file = (how.file, copy.deepcopy(how.config))
    else:
        found.config["quantization_config"] = copy.deepcopy(how.config)
    return found


CASES: dict[str, tuple[Path, str, str, Change]] = {
    f"GLM; {method}; {stored}; {listed}": (GLM, method, stored, change)
    for method in METHODS
    if "zero points" not in method  # of experts with them nothing was executed
    for stored in ("unquantized", "quantized")
    for listed, change in LISTED.items()
}
CASES |= {
    f"DeepSeek; {method}; {stored}; {listed}": (DEEPSEEK, method, stored, LISTED[listed])
    for method in ("awq", "gptq", "compressed-tensors, int4", "fp8", "modelopt fp8, in a file")
    for stored in ("unquantized", "quantized")
    for listed in ("whole", "each")
}
CASES |= {
    f"GLM; gptq; {stored}; blocks": (GLM, "gptq", stored, blocks)
    for stored in ("unquantized", "quantized")
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for number, (name, (source, method, stored, change)) in enumerate(CASES.items()):
        make = quantized if source == GLM else draft_alone
        checkpoint = make(source, method, stored)  # type: ignore[operator]
        change(checkpoint)
        found[name] = tmp_path_factory.mktemp("foreign") / str(number)
        checkpoint.save(found[name])
    return found


@pytest.fixture(scope="module")
def vllm_answers(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    job = {name: {"folder": str(folder)} for name, folder in folders.items()}
    return run("vllm_foreign.py", job, tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def sglang_answers(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    drafts = {}
    for name, folder in folders.items():
        config = read_json(folder / "config.json")
        own_file = folder / "hf_quant_config.json"
        if own_file.exists():
            config["quantization_config"] = read_json(own_file)
        modules = sglang_block(config, "model.decoder", dense=False, indexer=False)
        drafts[name] = {"config": config, "modules": [*modules, "model.shared_head.head"]}
    job = {"wheel": str(sglang_wheel()), "drafts": drafts}
    return run("sglang_foreign.py", job, tmp_path_factory.mktemp("sglang"))


def stored_quantized(folder: Path, layer: str) -> dict[str, bool]:
    """By each linear, head and expert of the layer, whether it is stored quantized."""
    found = {}
    for name, tensor in open_checkpoint(folder).tensors.items():
        module, _, last = name.rpartition(".")
        if name.startswith(layer) and last in ("weight", "qweight", "weight_packed"):
            found[module] = last != "weight" or tensor.dtype not in ("BF16", "F16", "F32")
    return found


def parts_of(module: str, stored: Iterable[str]) -> list[str]:
    """The stored linears that an engine's module is made of."""
    parent, _, last = module.rpartition(".")
    if last == "head":  # which vLLM names without the module that it is in
        return [f"{parent.removesuffix('.shared_head')}.shared_head.head"]
    if last == "experts":
        return [name for name in stored if name.startswith(f"{module}.")]
    return [f"{parent}.{part}" for part in FUSED.get(last, (last,))]


def verdict_of(folder: Path, answer: dict[str, Any], *, loads_head: bool) -> str:
    """The status that the verdict on an engine should have, by the engine's own answers."""
    if "refused" in answer:
        return "not tested"
    layer = f"model.layers.{read_json(folder / 'config.json')['num_hidden_layers']}"
    stored = stored_quantized(folder, layer)
    for module, is_quantized in answer["modules"].items():
        if module.endswith("head") and not loads_head:
            continue
        parts = parts_of(module.replace("model.decoder", layer), stored)
        if any(stored.get(part, is_quantized) != is_quantized for part in parts):
            return "fail"
    return "pass"


@pytest.mark.parametrize("name", CASES)
def test_verdicts_are_those_of_the_engines(
    name: str, folders: dict[str, Path], vllm_answers: Answers, sglang_answers: Answers
) -> None:
    """SGLang takes the draft's head from the main model, and loads none of its own."""
    outcome = run_program("verify", folders[name], "--level", "files", "--json", "--quiet")
    checks = json.loads(outcome.out)["checks"]
    found = {item["name"]: item["status"] for check in checks for item in check["items"]}
    wanted = {
        "vLLM": verdict_of(folders[name], vllm_answers[name], loads_head=True),
        "SGLang": verdict_of(folders[name], sglang_answers[name], loads_head=False),
    }
    if found.get(LEFT_OUT) == "fail":  # which stands for what every engine finds
        assert "pass" not in wanted.values()
        return
    ours = {engine: found[f"mtp: precision as {engine} reads it"] for engine in wanted}
    assert ours == wanted


def test_projections_are_built_unquantized_whatever_the_config_says(
    vllm_answers: Answers, sglang_answers: Answers
) -> None:
    for answers in (vllm_answers, sglang_answers):
        built = [one["projections"] for one in answers.values() if "refused" not in one]
        assert len(built) > 100 and all(kinds == [True] for kinds in built)


def test_sglang_builds_drafts_beside_nvfp4_unquantized(sglang_answers: Answers) -> None:
    found = [one for name, one in sglang_answers.items() if "nvfp4" in name]
    layers = [
        quantized
        for one in found
        for module, quantized in one.get("modules", {}).items()
        if not module.endswith("head")
    ]
    assert len(layers) > 50 and not any(layers)
