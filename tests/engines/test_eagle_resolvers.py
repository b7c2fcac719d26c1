"""vLLM's own resolver over bundles of target eagle: every linear of EagleDeepSeekMTPModel is asked
for in the form that lies on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from resolver_sources import SOURCES
from test_resolvers import NEVER, Answers, agree, form_on_disk, run, stored_modules

from cases import make_checkpoint, quantize
from mtp_checkpoints.families import family_of
from mtp_checkpoints.tensors.bundle_folder import bundle_target
from mtp_checkpoints.tensors.reader import Checkpoint
from quantize_rows import ROWS, linears

CONFIG: dict[str, Any] = SOURCES["fp8"]
LAYER = f"model.layers.{CONFIG['num_hidden_layers']}"
NAMES = ["fp8", "bf16"]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("eagle")
    source = make_checkpoint(folder / "source", CONFIG)
    result = {}
    for name in NAMES:
        result[name] = output = folder / name.replace(" ", "-")
        options = (*ROWS[name].options, "--target", "eagle", "--quiet")
        outcome = quantize(source, output, *options)
        assert outcome.code == 0, outcome.err
        assert bundle_target(output) == "eagle"
    return result


@pytest.fixture(scope="module")
def answers(bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    job = {
        name: {"main": str(folder / "main"), "mtp": str(folder / "mtp"), "method": "eagle"}
        for name, folder in bundles.items()
    }
    return run("vllm_modules.py", job, tmp_path_factory.mktemp("vllm"))


@pytest.mark.parametrize("name", NAMES)
def test_every_linear_is_in_the_form_on_disk(
    name: str, bundles: dict[str, Path], answers: Answers
) -> None:
    found = answers[name]["mtp"]
    if ROWS[name].mtp.experts == "bf16":
        assert found == []  # vLLM asks for none
        return
    shapes = {
        tensor.replace("layers.0.", f"{LAYER}.", 1): (info.dtype, info.shape)
        for tensor, info in Checkpoint.open(bundles[name] / "mtp").tensors.items()
    }
    modules = {tensor.rpartition(".")[0] for tensor in shapes}
    on_disk = linears(f"{module}.weight" for module in modules)
    tensors, asked = family_of(CONFIG).tensors, list[str]()
    for answer in found:
        if answer["module"].rpartition(".")[2] in NEVER:
            assert answer["method"] == "unquantized", answer
            continue
        for module in stored_modules(answer["module"], on_disk, LAYER):
            form = form_on_disk(shapes, module, tensors[f"{module}.weight"].shape[1])
            assert agree(answer, form, int4_activations=False), f"{module}: {form}, {answer}"
            asked.append(module)
    assert sorted(asked) == sorted(on_disk)
