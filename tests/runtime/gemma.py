"""Small random Gemma-4 models and assistants, made and saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

VOCAB, HIDDEN, WINDOW = 96, 64, 16
_SLIDING, _FULL = "sliding_attention", "full_attention"
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
    "max_position_embeddings": 256,
    "final_logit_softcapping": 30.0,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
# As the releases of 12B and 31B, of E2B and E4B, and of 26B-A4B have it; the large one is of 12B's
# classes.
KINDS: dict[str, dict[str, Any]] = {
    "large": {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "small": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    "experts": {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}
CLASSES = {"large": "Gemma4Unified", "small": "Gemma4", "experts": "Gemma4"}
OF_ASSISTANT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 4,
    "layer_types": [_SLIDING] * 3 + [_FULL],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}


def share_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transformers share keys and values as 5.19 does: 5.23 makes no model whose layers all
    take those of another, which every assistant is."""

    def modes(config: Any) -> list[str | None]:
        own = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
        found: list[str | None] = [None] * len(own) + ["reuse"] * config.num_kv_shared_layers
        for kind in set(own):
            found[len(own) - 1 - own[::-1].index(kind)] = "store"
        return found

    for name in ("Gemma4TextConfig", "Gemma4UnifiedTextConfig"):
        kind = getattr(transformers, name)
        if hasattr(kind, "kv_sharing_modes"):
            monkeypatch.setattr(kind, "kv_sharing_modes", property(modes))


def text_config(kind: str = "Gemma4TextConfig", **changes: Any) -> Any:
    return getattr(transformers, kind)(**TEXT | changes)


def write_target(folder: Path, kind: str, **changes: Any) -> Any:
    """transformers' model of a random target, which the folder holds."""
    own = CLASSES[kind]
    config = text_config(f"{own}TextConfig", **KINDS[kind] | changes)
    return _saved(getattr(transformers, f"{own}ForCausalLM")(config), folder)


def write_assistant(folder: Path, kind: str, **changes: Any) -> Any:
    """transformers' model of a random assistant, which the folder holds; that of a small target has
    its vocabulary in clusters, as the releases have."""
    own, heads = CLASSES[kind], ("attention_k_eq_v", "num_global_key_value_heads")
    of_target = {key: KINDS[kind][key] for key in heads if key in KINDS[kind]}
    config = getattr(transformers, f"{own}AssistantConfig")(
        text_config=text_config(f"{own}TextConfig", **OF_ASSISTANT | of_target | changes),
        backbone_hidden_size=HIDDEN,
        **CLUSTERS if kind == "small" else {},
    )
    return _saved(getattr(transformers, f"{own}AssistantForCausalLM")(config), folder)


def _saved(model: Any, folder: Path) -> Any:
    generator = torch.Generator().manual_seed(1)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            tensor.data.copy_(0.8 + 0.4 * torch.rand(tensor.shape, generator=generator))
        elif name.endswith("token_ordering"):
            tensor.copy_(torch.randperm(VOCAB, generator=generator))
        elif name.endswith("norm.weight"):
            tensor.data.copy_(1 + 0.1 * torch.randn(tensor.shape, generator=generator))
        elif tensor.dim() > 1:
            tensor.data.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(folder)
    return model.eval()


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors, of which its head is no other than the embedding."""
    found = {name: tuple(one.shape) for name, one in model.state_dict().items()}
    del found["lm_head.weight"]
    return found


def generated(model: Any, prompt: tuple[int, ...], tokens: int, assistant: Any = None) -> list[int]:
    """The tokens that transformers decodes after a prompt, with or without an assistant."""
    out = model.generate(
        torch.tensor([prompt]),
        assistant_model=assistant,
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
    )
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids
