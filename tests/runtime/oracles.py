"""transformers' models of the checkpoints that the tests write."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from runtime.checkpoints import EXAMPLES

Config = dict[str, Any]


def _like(model_type: str, architecture: str) -> Callable[[Config], Config]:
    """Another model of the same main tensors."""
    return lambda config: config | {"model_type": model_type, "architectures": [architecture]}


def _step(config: Config) -> Config:
    """transformers has the model with a vision tower alone."""
    return {
        "model_type": "step3p7",
        "architectures": ["Step3p7ForConditionalGeneration"],
        "text_config": config,
        "vision_config": EXAMPLES["step3p7"].config["vision_config"],
    }


# transformers' class of a family that has none of its own, whose main model it computes too, as a
# change of the config.
OTHER_CLASS: dict[str, Callable[[Config], Config]] = {
    "mimo": _like("qwen2", "Qwen2ForCausalLM"),
    "dots3_note": _like("dots3_note_text", "Dots3NoteForCausalLM"),
    "intern_s2_preview": _like("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    "step3p5": _step,
}
# Parts that transformers has beside a model, by the names.
BESIDE = (
    r"(model\.)?(visual|vision_model|vit_large_projector|multi_modal_projector"
    r"|vision_encoder|audio_encoder|audio_adapter|(vision|audio)_tower)\."
)

# Families whose MTP layers transformers' MtpModel loads, with the fields that it needs.
MTP_MODEL = {
    name: example.mtp_model for name, example in EXAMPLES.items() if example.mtp_model is not None
}


# Parts of names of MTP layers' tensors for which MtpModel has none, with those that it has.
_THEIRS = {
    "final_layernorm": "shared_head.norm",
    "transformer.shared_head.norm": "shared_head.norm",
}


def as_theirs(name: str) -> str:
    """The name under which MtpModel looks for a tensor."""
    for part, other in _THEIRS.items():
        name = name.replace(part, other)
    return name


def rename_mtp_tensors(path: Path) -> None:
    """Give tensors MtpModel's names in a checkpoint of one file."""
    file = path / "model.safetensors"
    tensors = {as_theirs(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def oracle(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' model; it finds MTP layers by the layer numbers of the releases alone."""
    config = json.loads((path / "config.json").read_text())
    if config["model_type"] in OTHER_CLASS:
        config = OTHER_CLASS[config["model_type"]](config)
        original, path = path, path.with_name(f"{path.name}-as-{config['model_type']}")
        shutil.copytree(original, path)
        (path / "config.json").write_text(json.dumps(config))
    kind = getattr(transformers, config["architectures"][0])
    text = config.get("text_config", config)
    first, count = text["num_hidden_layers"], text.get("num_nextn_predict_layers") or 1
    numbers = "|".join(str(first + number) for number in range(count))
    patterns = [rf"model\.(language_model\.)?layers\.({numbers})\..*", r"mtp(_layers)?\."]
    for owner in kind.__mro__:
        if "_keys_to_ignore_on_load_unexpected" in vars(owner):
            known = vars(owner)["_keys_to_ignore_on_load_unexpected"] or []
            others = [pattern for pattern in known if "layers" not in pattern]
            monkeypatch.setattr(owner, "_keys_to_ignore_on_load_unexpected", [*others, *patterns])
    model, info = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    differing = [*info["missing_keys"], *info["unexpected_keys"]]
    assert not [name for name in differing if not re.match(BESIDE, name)]
    return model.eval()


def with_own_heads(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have MTP layers of transformers' model draft by heads of their own, and take every hidden
    state before its norm, as engines run Step's: norms become the first step of the heads."""
    from transformers.modeling_layers import MtpModel  # takes seconds

    main, head = reference.get_decoder(), reference.lm_head
    load = MtpModel.from_pretrained

    def loaded(model: Any, **options: Any) -> Any:
        model.lm_head = head  # that transformers shares
        module = load(model, **options)
        model.lm_head = nn.Sequential(norm, head)
        heads = [_own_head(layer, number) for number, layer in enumerate(module.layers)]
        run = module.forward_layer

        def forward_layer(number: int, *arguments: Any, **options: Any) -> Any:
            module._project_to_logits = heads[number].forward
            return run(number, *arguments, **options)

        module.forward_layer = forward_layer
        return module

    def _own_head(layer: Any, number: int) -> nn.Module:
        after, layer.post_norm = layer.post_norm, nn.Identity()
        weight = stored[f"model.layers.{first + number}.transformer.shared_head.output.weight"]
        own = nn.Linear(*weight.shape[::-1], bias=False)
        own.weight.data = weight.float()
        return nn.Sequential(after, own)

    stored = load_file(Path(reference.config.name_or_path) / "model.safetensors")
    first = reference.config.get_text_config().num_hidden_layers
    norm, main.norm = main.norm, nn.Identity()
    reference.lm_head = nn.Sequential(norm, head)
    monkeypatch.setattr(MtpModel, "from_pretrained", loaded)
