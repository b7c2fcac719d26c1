"""Contracts of every entry of FAMILIES; a new entry needs an example in its file and no test."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import FAMILIES, deepseek_v3, family_of, parts
from mtp_checkpoints.families.base import SharedTensor, TensorSpec
from mtp_checkpoints.families.single_experts import with_single_experts
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.without_mtp import WITHOUT_MTP
from mtp_export.commands.registry import command_named
from mtp_export.tune.draft import DraftType, draft_type
from mtp_export.tune.drafts import DRAFTS
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.drafters import DRAFTERS, extra_drafts
from mtp_runtime.models.layer_types import LAYERS, config_for, layer_type, why_not_computed
from runtime.checkpoints import COMPUTED, SMALL, SMALL_CONFIGS, write_checkpoint

PROMPT = (3, 1, 4)
INTEGERS = ".tid2eid"  # a table of experts by token


def small_config(model_type: str) -> dict[str, Any]:
    assert model_type in SMALL_CONFIGS, (
        f"add an example of {model_type} to EXAMPLES in its family's file"
    )
    config = SMALL_CONFIGS[model_type]
    assert model_type in (config["model_type"], *config["architectures"])
    return config


def check_tensors(family: ModelSpec) -> None:
    """The tensors' keys, MTP layers, dtypes and patterns agree with what else the family says."""
    assert family.mtp_layers, "the small config has an MTP layer"
    layers = [f"{layer.prefix}." for layer in family.every_layer]
    for name, spec in family.tensors.items():
        assert spec.name == name
        assert family.mtp_layer_of(name) == spec.mtp_layer, name
        assert family.facts.dtype in spec.dtypes or name.endswith(INTEGERS), name
        if spec.is_linear_weight:
            layer = next(p for p in layers if spec.module.startswith(p))
            module = spec.module.removeprefix(layer)
            assert re.match(family.patterns.linears[spec.role], module), name
    owners = {spec.mtp_layer for spec in family.tensors.values()}
    assert owners == {None, *family.mtp_layers}


def check_shared(family: ModelSpec) -> None:
    """Every pair is an MTP layer's tensor, which may be absent, and its like in the main part."""
    for pair in family.shared:
        own, main = family.tensors[pair.mtp_name], family.tensors[pair.main_name]
        assert own.mtp_layer is not None and main.mtp_layer is None, pair
        assert (own.shape, own.dtypes, own.role) == (main.shape, main.dtypes, main.role), pair
        assert own.optional and not main.optional, pair
    optional = {spec.name for spec in family.tensors.values() if spec.optional}
    assert optional <= {pair.mtp_name for pair in family.shared}, (
        "what is absent is found elsewhere"
    )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_runtime_has_a_layer_for_every_part_or_says_which_it_lacks(model_type: str) -> None:
    family = family_of(small_config(model_type))
    if model_type in COMPUTED:
        for part in family.parts:
            assert layer_type(part) is LAYERS[type(part)]
        return
    with pytest.raises(UnsupportedError, match="runtime") as caught:
        config_for(family, None)
    assert why_not_computed(family) and "verify --level weights" in str(caught.value)


def test_a_family_without_layers_is_refused_by_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path, small_config("qwen3_next"))
    monkeypatch.delitem(LAYERS, parts.GatedDeltaNet)
    with pytest.raises(UnsupportedError, match="no layer for a part") as caught:
        LLM(path)
    assert "GatedDeltaNet" in str(caught.value)


def test_small_configs_are_of_families() -> None:
    assert SMALL_CONFIGS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_familys_tensors_are_consistent(model_type: str) -> None:
    family = family_of(small_config(model_type))
    check_tensors(family)
    check_shared(family)


@pytest.mark.parametrize("method", ["none", "mtp"])
@pytest.mark.parametrize("model_type", COMPUTED)
def test_a_model_loads_and_generates(model_type: str, method: str, tmp_path: Path) -> None:
    """Every tensor of a random checkpoint is loaded, of the MTP layers only where they are used; of
    fused experts each."""
    path = write_checkpoint(tmp_path, small_config(model_type))
    llm = LLM(path, speculate_method=method)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    (output,) = llm.generate([list(PROMPT)], params)
    assert len(output.token_ids) == 1
    family = with_single_experts(family_of(small_config(model_type)))
    needed = {
        spec.name
        for spec in family.tensors.values()
        if not spec.optional and (method == "mtp" or spec.mtp_layer is None)
    }
    indexers = {name for name in needed if ".indexer." in name}
    assert llm.ledger.loaded == needed - indexers
    assert indexers <= llm.ledger.skipped


@dataclass(frozen=True)
class MainLayersOnly(ModelSpec):
    """A family that takes every tensor for the main model's."""

    def mtp_layer_of(self, name: str) -> int | None:
        return None


@dataclass(frozen=True)
class Unpaired(ModelSpec):
    """A family that does not say where an absent head is found."""

    @property
    def shared(self) -> tuple[SharedTensor, ...]:
        return super().shared[:1]


@dataclass(frozen=True)
class OtherShape(ModelSpec):
    """A family whose MTP layers have tables of another shape than the main model's."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:  # type: ignore[override]
        return {
            name: spec._replace(shape=(1, *spec.shape)) if spec.optional else spec
            for name, spec in super().tensors.items()
        }


def small_as(kind: type[ModelSpec]) -> ModelSpec:
    spec = family_of(SMALL)
    return kind(**{field.name: getattr(spec, field.name) for field in fields(spec)})


def test_contradictions_are_found() -> None:
    with pytest.raises(AssertionError, match=r"model\.layers\.3\."):
        check_tensors(small_as(MainLayersOnly))
    with pytest.raises(AssertionError, match="found elsewhere"):
        check_shared(small_as(Unpaired))
    with pytest.raises(AssertionError, match="SharedTensor"):
        check_shared(small_as(OtherShape))


def test_an_unknown_model_is_told_how_families_are_added() -> None:
    """And nothing of checkpoints that are not its own."""
    with pytest.raises(UnsupportedError, match="CONTRIBUTING") as caught:
        family_of(SMALL | {"model_type": "rwkv"})
    assert "'rwkv'" in str(caught.value) and "DeepSeek" not in str(caught.value)


@pytest.mark.parametrize("model_type", WITHOUT_MTP)
def test_a_release_without_mtp_tensors_is_told_so(model_type: str) -> None:
    with pytest.raises(UnsupportedError, match="no MTP tensors in this release"):
        family_of({"model_type": model_type, "num_mtp_modules": 3})


def test_a_draft_that_is_no_mtp_module_is_named_as_what_it_is() -> None:
    for model_type in ("deepseek_v4", "deepseek_v3"):
        with pytest.raises(UnsupportedError, match="DSpark") as caught:
            family_of(SMALL | {"model_type": model_type, "dspark_block_size": 5})
        assert "dspark_block_size" in str(caught.value)


def test_a_family_without_a_small_config_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "new_model", deepseek_v3.spec)
    with pytest.raises(AssertionError, match="add an example of new_model to EXAMPLES"):
        small_config("new_model")


def test_what_is_trained_is_a_drafter_with_weights() -> None:
    assert set(DRAFTS) <= {"mtp", *extra_drafts()}
    assert all(isinstance(draft_type(name), DraftType) for name in DRAFTS)


@pytest.mark.parametrize("method", extra_drafts())
def test_a_drafter_with_weights_has_a_toy(method: str) -> None:
    assert DRAFTERS[method].toy is not None, "tests/runtime/test_distribution.py enumerates it"


def test_registries_of_drafts_are_read_without_torch() -> None:
    modules = "mtp_runtime.drafters, mtp_export.tune.drafts"
    program = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_help_names_every_drafter_and_every_draft_to_train() -> None:
    for command, registry in (("generate", DRAFTERS), ("serve", DRAFTERS), ("tune", DRAFTS)):
        (option,) = (
            parameter
            for parameter in command_named(command).params
            if set(parameter.opts) & {"--speculate-method", "--draft"}
        )
        assert set(registry) <= set(re.findall(r"\w+", option.help)), command
