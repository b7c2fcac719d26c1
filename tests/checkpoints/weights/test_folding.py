"""Scales that are folded into a layer: it computes the same, as transformers has it in float64."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cases import nightly_but
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import family_of, parts
from mtp_checkpoints.families.folds import folds_of
from mtp_checkpoints.weights.folding import MOST, Folding, as_letters, of_letters
from runtime.checkpoints import COMPUTED, SMALL_CONFIGS, write_checkpoint

ORACLES = {"deepseek_v3": "DeepseekV3ForCausalLM", "qwen3_next": "Qwen3NextForCausalLM"}
REFUSED = {
    "exaone4_5",  # norms after its parts alone
    *("nemotron_h", "nemotron_h_puzzle", "nemotron_h_omni"),  # no gates
}
LAYER = 2  # has experts in both


def logits_of(folder: Path, model_type: str) -> torch.Tensor:
    model: Any = getattr(transformers, ORACLES[model_type]).from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.inference_mode():
        return torch.as_tensor(model.eval()(torch.arange(30)[None] * 3).logits)


@pytest.mark.parametrize("model_type", nightly_but(["qwen3_next"], ORACLES))
def test_the_logits_are_the_same(model_type: str, tmp_path: Path) -> None:
    """With scales in norm, router, every expert and the gate of the shared one, and in a dense MLP;
    left out of the router alone, they are not."""
    source = write_checkpoint(tmp_path / "source", SMALL_CONFIGS[model_type])
    expected = logits_of(source, model_type)
    folder = Path(shutil.copytree(source, tmp_path / "folded"))
    (path,) = folder.glob("*.safetensors")
    tensors = {name: tensor.double() for name, tensor in load_file(path).items()}
    family = family_of(SMALL_CONFIGS[model_type], tensors)
    random, router = torch.Generator().manual_seed(7), ""
    dense, sparse = family.layers[0], family.layers[LAYER]
    layers = [sparse] if isinstance(dense.feed_forward, parts.Moe) else [dense, sparse]
    for fold in (fold for layer in layers for fold in folds_of(layer)):
        divided = tensors[fold.divided]
        numbers = torch.randint(-3, 4, (len(divided),), generator=random, dtype=torch.int8)
        is_norm = divided.dim() == 1
        router = fold.multiplied[0] if is_norm else router
        offset = family.facts.norm_offset if is_norm else 0.0
        folding = Folding(rows=numbers, offset=offset)
        tensors[fold.divided] = folding.of(divided)
        torch.testing.assert_close(folding.undone(tensors[fold.divided]), divided)
        for name in fold.multiplied:
            tensors[name] = Folding(columns=numbers).of(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
    # transformers' norms are computed in float32 whatever the model is in.
    torch.testing.assert_close(logits_of(folder, model_type), expected, rtol=1e-4, atol=1e-6)
    tensors[router] = load_file(source / path.name)[router].double()
    save_file(tensors, path, metadata={"format": "pt"})
    assert (logits_of(folder, model_type) - expected).abs().max() > 1e-3


def test_families_without_a_fold_are_refused() -> None:
    refused = set()
    for model_type in COMPUTED:
        for mtp in family_of(SMALL_CONFIGS[model_type]).mtp:
            try:
                folds = folds_of(mtp.layer)
            except UnsupportedError as error:
                assert mtp.layer.prefix in str(error) and "--method gptq" in str(error)
                refused.add(model_type)
            else:
                assert folds[0].divided == f"{mtp.layer.post_norm}.weight"
    assert refused == REFUSED


def test_exponents_as_letters() -> None:
    numbers = torch.arange(-MOST, MOST + 1, dtype=torch.int8)
    letters = as_letters(numbers)
    found = of_letters(letters, len(numbers))
    assert found is not None and found.equal(numbers) and letters[MOST] == "i"
    for wrong, count in ((letters, 16), (f"{letters[1:]}z", len(numbers)), ("", 3)):
        assert of_letters(wrong, count) is None


def test_rows_in_pieces() -> None:
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 4, generator=random)
    folding = Folding(torch.tensor([0, 1, -2, 3, 8, -8]).char(), torch.tensor([1, 0, -1, 2]).char())
    whole = folding.of(weight)
    assert torch.cat([folding.of(weight[:4]), folding.of(weight[4:], 4)]).equal(whole)
    assert folding.undone(whole).equal(weight) and folding.changes
    assert whole[4, 3] == weight[4, 3] * 4 / 256
    assert not Folding(columns=torch.zeros(4, dtype=torch.int8)).changes
