"""Steps exported and compiled ahead of time: nothing is read back, and tokens stay the same."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_runtime import SamplingParams
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.static_graph import compiled, programs
from mtp_runtime.static_graph.compiled import CompiledStep, PackageFacts
from mtp_runtime.static_graph.programs import (
    Program,
    export_layers,
    outline,
    tensors_of,
    with_tensors,
)
from runtime.harness import prompts_of, run


def load(path: Path, **options: Any) -> Model:
    return load_model(path, LoadOptions(static_graph=True, **options)).model


@pytest.fixture(scope="module")
def model(small: Path) -> Model:
    return load(small)


def test_a_layer_of_every_form_exports_without_any_tensor_s_contents(model: Model) -> None:
    """Traced with tensors that hold no data, for batches of any size; no weight is a constant."""
    exported = export_layers(model, 16)
    assert len(model.layers) == 3 and len(exported) == 2, "a dense one, and one with experts"
    for program, products in zip(exported.values(), (0, 2), strict=True):
        assert not program.constants and not program.state_dict
        targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert targets.count("mtp_export.verify_attention.default") == 1
        assert targets.count("mtp_export.grouped_linear.default") == products
        reads = "aten.item", "_local_scalar", "sym_constrain", "_assert_scalar"
        assert not any(read in target for target in targets for read in reads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_layers_give_the_tokens_of_eager_ones(small: Path, dtype: str) -> None:
    """The programs that a package compiles, called with the tensors of each layer in turn."""
    model, calls = load(small, dtype=dtype), list[str]()

    def program(form: str, module: Any) -> Program:
        def call(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            calls.append(form)
            return [module(tensors)]

        return call

    exported = export_layers(model, 16)
    step = CompiledStep({form: program(form, own.module()) for form, own in exported.items()})
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = prompts_of([5, 23, 17], 96)
    expected = run(model, prompts, params, method="mtp", k=2)
    found = run(model, prompts, params, method="mtp", k=2, graphs=step)
    assert found.outputs == expected.outputs
    dense, sparse = exported
    assert calls[:6] == [dense, sparse, sparse] * 2


def test_what_reads_lengths_back_does_not_export(
    model: Model, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looped = load_model(small, LoadOptions(dequantize_at_load=False)).model
    with pytest.raises(UnsupportedError, match="experts in several formats"):
        export_layers(looped, 16)
    monkeypatch.setattr(programs, "refuse_dynamic_layers", lambda model: None)
    with pytest.raises(Exception, match="data-dependent|Could not guard|unbacked"):
        export_layers(looped, 16)


def test_a_package_fits_other_weights_of_the_same_form(small: Path, variant: Any) -> None:
    """The digest follows shapes, dtypes and constants of layers, and no value."""
    paths = [small, variant(seed=3), variant(vocab_size=128), variant(num_hidden_layers=4)]
    others = [variant(rms_norm_eps=1e-5), variant(moe_intermediate_size=32)]
    facts = [PackageFacts.of(load(path), 16) for path in (*paths, *others)]
    assert len({one.step for one in facts[: len(paths)]}) == 1
    assert len({one.step for one in facts}) == 1 + len(others)
    assert PackageFacts.of(load(small, dtype="bfloat16"), 16).dtype == "bfloat16"


def fake_package(path: Path, facts: PackageFacts) -> Path:
    """A package without code, which is never loaded."""
    content = {"mtp_export": json.dumps(vars(facts)), "AOTI_DEVICE_KEY": "cpu"}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data/aotinductor/model/abc.wrapper_metadata.json", json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch": "2.1.0"}, r"Expected torch 2\.\d+.*Found torch 2\.1\.0\. Compile it again"),
        ({"cpu": "NEON"}, "Found cpu NEON"),
        ({"dtype": "bfloat16"}, "Expected dtype float32. Found dtype bfloat16"),
        ({"page_size": 64}, "Expected page_size 16. Found page_size 64"),
        ({"step": "0"}, "Found step 0"),
    ],
)
def test_a_package_for_something_else_is_refused(
    model: Model, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    made_for = replace(PackageFacts.of(model, 16), **changes)
    path = fake_package(tmp_path / "step.pt2", made_for)
    with pytest.raises(UnsupportedError, match=message):
        CompiledStep.open(path, model, 16)


@pytest.mark.parametrize("content", [None, b"", b"no archive", "empty", "others"])
def test_what_is_no_package_is_refused(
    model: Model, tmp_path: Path, content: bytes | str | None
) -> None:
    path = tmp_path / "step.pt2"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x/abc.wrapper_metadata.json" if content == "others" else "x", "{}")
    with pytest.raises(InvalidInputError, match="no compiled step .*that mtp-export compile wrote"):
        CompiledStep.open(path, model, 16)


def test_compiling_needs_a_compiler(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnsupportedError, match=r"no C\+\+ compiler.*Expected no-such-compiler"):
        compiled.compile_step(model, 16, tmp_path / "step.pt2")


def test_tensors_of_a_model_are_taken_out_and_put_back(model: Model) -> None:
    part = model.layers
    tensors = tensors_of(part)
    assert len({id(tensor) for tensor in tensors}) == len(tensors)
    doubled = with_tensors(part, [2 * tensor for tensor in tensors])
    found = tensors_of(doubled)
    assert all(torch.equal(new, 2 * old) for new, old in zip(found, tensors, strict=True))
    ropes = {id(layer.attention.rope) for layer in doubled.layers}  # type: ignore[attr-defined]
    assert len(ropes) == 1, "what is shared stays shared"
    assert outline(doubled) == outline(part) and "0x" not in outline(part)
