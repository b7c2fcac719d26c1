"""Gemma-4 by name, against the tensors of transformers' classes, and run, against their logits and
tokens in float32."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cases import nightly_but
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families import DRAFTED_APART, SEPARATE_DRAFTS, family_of
from mtp_checkpoints.families.spec import ModelSpec
from mtp_export.bundle.export import open_source
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.models.layer_types import why_not_computed
from mtp_runtime.streaming import open_streamed
from mtp_runtime.teacher_forcing import CHUNK_TOKENS, Text, Texts, target_states
from runtime.gemma import (
    CLUSTERS,
    HIDDEN,
    KINDS,
    OF_ASSISTANT,
    TEXT,
    generated,
    shapes_of,
    share_as_before,
    text_config,
    write_target,
)
from runtime.harness import Walk, load, prompts_of
from runtime.test_family_oracles import TOLERANCE, relative_error

# Sizes of the release of 26B-A4B, of its text alone.
RELEASED: dict[str, Any] = KINDS["experts"] | {
    "vocab_size": 262_144,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "moe_intermediate_size": 704,
    "num_hidden_layers": 30,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_experts": 128,
    "top_k_experts": 8,
}
TOWER = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16} | {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    share_as_before(monkeypatch)


def described(config: Any) -> tuple[ModelSpec, dict[str, tuple[int, ...]]]:
    """The family of transformers' config, and its tensors."""
    written = json.loads(json.dumps(config.to_dict()))
    spec = family_of({"model_type": config.model_type, **written})
    return spec, {name: one.shape for name, one in spec.tensors.items()}


def made(kind: str, config: Any) -> dict[str, tuple[int, ...]]:
    """The tensors that transformers' class has, without their values."""
    with torch.device("meta"):
        return shapes_of(getattr(transformers, kind)(config))


@pytest.mark.parametrize("changes", [*KINDS.values(), RELEASED], ids=[*KINDS, "26B-A4B"])
def test_tensors_of_a_decoder(changes: dict[str, Any]) -> None:
    config = text_config(**changes)
    spec, tensors = described(config)
    assert tensors == made("Gemma4ForCausalLM", config)
    assert not why_not_computed(spec)
    assert not spec.mtp and spec.head == spec.embedding


def test_the_release_with_experts_has_its_size() -> None:
    """26B-A4B is named after its parameters, and those that a token takes."""
    spec, tensors = described(text_config(**RELEASED))
    experts = sum(prod(shape) for name, shape in tensors.items() if ".experts." in name)
    total = sum(map(prod, tensors.values()))
    picked = RELEASED["top_k_experts"] / RELEASED["num_experts"]
    assert 25e9 < total < 26e9
    assert 3.5e9 < total - experts * (1 - picked) < 4.2e9


@pytest.mark.parametrize("name", ["Gemma4", "Gemma4Unified"])
def test_tensors_beside_a_tower_are_carried(name: str) -> None:
    text = text_config(f"{name}TextConfig", **KINDS["large"])
    towers = {"vision_config": TOWER} if name == "Gemma4" else {}
    config = getattr(transformers, f"{name}Config")(text_config=text, **towers)
    spec, tensors = described(config)
    theirs = made(f"{name}ForConditionalGeneration", config)
    assert tensors == {n: shape for n, shape in theirs.items() if not spec.carries(n)}
    assert all(n.startswith("model.language_model.") for n in tensors)


@pytest.mark.parametrize("name", ["Gemma4Assistant", "Gemma4UnifiedAssistant"])
@pytest.mark.parametrize("more", [{}, CLUSTERS], ids=["whole", "clusters"])
def test_tensors_of_an_assistant(name: str, more: dict[str, Any]) -> None:
    kind = f"{name.removesuffix('Assistant')}TextConfig"
    text = text_config(kind, **OF_ASSISTANT)
    config = getattr(transformers, f"{name}Config")(
        text_config=text, backbone_hidden_size=HIDDEN, **more
    )
    spec, tensors = described(config)
    assert tensors == made(f"{name}ForCausalLM", config)
    assert "draft in a checkpoint of its own" in why_not_computed(spec)


def test_every_name_has_a_class_of_transformers() -> None:
    names = {*DRAFTED_APART, *SEPARATE_DRAFTS}
    assert names <= set(transformers.CONFIG_MAPPING.keys())
    assert names == {
        *("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        *("gemma4_assistant", "gemma4_unified_assistant"),
    }


def test_names_in_layers_that_take_others_keys_are_carried() -> None:
    """Releases have them, and transformers drops them."""
    spec, _ = described(text_config(**KINDS["small"]))
    assert spec.carries("model.layers.3.self_attn.k_proj.weight")
    assert not spec.carries("model.layers.2.self_attn.k_proj.weight")
    assert not spec.carries("model.layers.3.self_attn.q_proj.weight")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"attention_bias": True}, UnsupportedError),
        ({"use_bidirectional_attention": "all"}, InvalidInputError),
        ({"per_layer_config": {"2": {"intermediate_size": 8}}}, InvalidInputError),
        ({"layer_types": ["full_attention"]}, InvalidInputError),
        ({"num_kv_shared_layers": 7}, InvalidInputError),
    ],
)
def test_unusable_fields(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        family_of({"model_type": "gemma4_text", **TEXT, **KINDS["small"], **changes})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemma")


@pytest.mark.parametrize("kind", nightly_but(["experts"], KINDS))
def test_logits_and_tokens(kind: str, folders: Path) -> None:
    """Of a prefill, of tokens one by one behind it, and of batches of one and of eight, whose
    texts are shorter and longer than the window."""
    theirs, path = write_target(folders / kind, kind), folders / kind
    (tokens,) = prompts_of([50], 96)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    walk = Walk(load(path))
    parts = [tokens[:38], *([token] for token in tokens[38:])]
    found = torch.cat([walk.feed(part)[0] for part in parts])
    assert relative_error(found, expected) <= TOLERANCE
    llm, params = LLM(path), SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = prompts_of([1, 9, 15, 16, 17, 23, 30, 41], 96)
    outputs = llm.generate(prompts, params)
    for prompt, output in list(zip(prompts, outputs, strict=True))[1::3]:  # the slow part
        assert list(output.token_ids) == generated(theirs, prompt, 8)
    assert llm.generate(prompts[7], params)[0].token_ids == outputs[7].token_ids


@torch.inference_mode()
def test_texts_side_by_side_have_the_states_of_a_run(folders: Path) -> None:
    """With embeddings per layer and keys of others, in several chunks; layers are not streamed."""
    write_target(folders / "forced", "small", max_position_embeddings=2 * CHUNK_TOKENS)
    model, prompts = load(folders / "forced"), prompts_of([40, 9, CHUNK_TOKENS], 96)
    _, found = target_states(model, Texts(tuple(Text(tuple(one), 1) for one in prompts)))
    walks = [Walk(model, page_size=64) for _ in prompts]
    expected = torch.cat([w.feed(one)[2] for w, one in zip(walks, prompts, strict=True)])
    assert relative_error(found, expected) <= TOLERANCE
    with pytest.raises(UnsupportedError, match="not read one by one"):
        open_streamed(folders / "forced", "cpu")


def test_a_model_without_mtp_layers_is_not_exported(folders: Path) -> None:
    write_target(folders / "apart", "large")
    with pytest.raises(UnsupportedError, match="no MTP layer here to export") as caught:
        open_source(folders / "apart")
    assert "assistant" in str(caught.value)
