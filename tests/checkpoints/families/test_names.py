"""Every family's tensors against implementations of others: those of the main model against what
transformers saves of it, those of the MTP layers against what transformers' MtpModel loads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from mtp_checkpoints.families import FAMILIES, family_of
from mtp_checkpoints.families.base import Role
from runtime.checkpoints import EXAMPLES, SMALL_CONFIGS, text_part, write_checkpoint
from runtime.oracles import BESIDE, MTP_MODEL, OTHER_CLASS, as_theirs, oracle, rename_mtp_tensors

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
# What transformers has beside a model, by the names.
BESIDES = {"step3p5": BESIDE}
# It keeps room for what experts do not have that do nothing.
BESIDES["longcat_flash"] = r"model\.layers\.\d+\.mlp\.experts\.([89]|1[01])\.(gate|up)_proj\."
# transformers has no class of them.
UNCONFIRMED = {name for name, example in EXAMPLES.items() if not example.in_transformers}
# What it saves of them has other names than what it loads.
LOADED = ("deepseek_v4", "hy_v4")


def saved_by_transformers(config: Config, folder: Path) -> Shapes:
    """The shapes of a random model that transformers makes of a config, and saves."""
    made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    getattr(transformers, config["architectures"][0])(made).save_pretrained(folder)
    shapes: Shapes = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names = opened.keys()
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    return shapes


@pytest.mark.parametrize(
    "model_type", [name for name in FAMILIES if name not in (*UNCONFIRMED, *LOADED)]
)
def test_the_main_model_is_what_transformers_saves(model_type: str, tmp_path: Path) -> None:
    config = SMALL_CONFIGS[model_type]
    theirs = EXAMPLES[model_type].like or OTHER_CLASS.get(model_type, dict)(config)
    saved = saved_by_transformers(theirs, tmp_path)
    family = family_of(config, saved)
    described = {
        name: shape
        for name, shape in saved.items()
        if not family.carries(name) and not re.match(BESIDES.get(model_type, "-"), name)
    }
    specs = family.tensors.values()
    assert {one.name: one.shape for one in specs if one.mtp_layer is None} == described


@pytest.mark.parametrize("model_type", LOADED)
def test_the_main_model_is_what_transformers_loads(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is missing or unexpected, in the shapes of its own."""
    oracle(write_checkpoint(tmp_path, SMALL_CONFIGS[model_type]), monkeypatch)


@pytest.mark.parametrize("model_type", MTP_MODEL)
def test_the_mtp_layers_are_what_transformers_loads(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is missing, and all numbers are in its parameters; what it joins has other shapes."""
    from transformers.modeling_layers import MtpModel  # takes seconds

    config = SMALL_CONFIGS[model_type]
    path = write_checkpoint(tmp_path, config)
    rename_mtp_tensors(path)
    reference = oracle(path, monkeypatch)
    family = family_of(config)
    fields = {"num_mtp_layers": len(family.mtp), **MTP_MODEL[model_type]}
    for name, value in fields.items():
        setattr(reference.config.get_text_config(), name, value)
    module = MtpModel.from_pretrained(reference)
    of_layers = (one for one in family.tensors.values() if one.mtp_layer is not None)
    own = [as_theirs(one.name) for one in of_layers if one.role is not Role.OWN_HEAD]
    ours = of_mtp(path, own)
    shared = {id(p) for p in reference.parameters()}
    state = module.state_dict(keep_vars=True)
    state.pop("embed_tokens.weight", None)  # of Inkling's main model, of which it makes a copy
    theirs = {name: one for name, one in state.items() if id(one) not in shared}
    assert total(theirs) == pytest.approx(total(ours))


def of_mtp(path: Path, names: list[str]) -> dict[str, torch.Tensor]:
    with safe_open(path / "model.safetensors", "pt") as opened:
        stored = set(opened.keys())
        return {name: opened.get_tensor(name) for name in names if name in stored}


def total(tensors: Mapping[str, torch.Tensor]) -> tuple[int, float, float]:
    """Numbers, and their sums."""
    each = [tensor.detach().double() for tensor in tensors.values()]
    sums = (sum(float(one.sum()) for one in each), sum(float(one.square().sum()) for one in each))
    return (sum(one.numel() for one in each), *sums)


def test_every_family_is_confirmed_or_listed() -> None:
    assert FAMILIES.keys() >= {*OTHER_CLASS, *BESIDES, *LOADED}
    assert all(text_part(config) for config in SMALL_CONFIGS.values())
