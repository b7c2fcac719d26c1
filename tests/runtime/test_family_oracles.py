"""Every family's model against transformers' class of the same model_type, in float32.

Compiled kernels and torch run latent and grouped-query attention, torch alone sparse: all
executions are compared. A random model with a tiny vocabulary accepts drafts by chance.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import nightly_but
from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.families import family_of
from mtp_runtime import SamplingParams
from runtime.checkpoints import SMALL_CONFIGS, changed, write_checkpoint
from runtime.harness import Walk, load, prompts_of, run
from runtime.oracles import MTP_MODEL, oracle, rename_mtp_tensors, with_own_heads

TOLERANCE = 1e-4
ORACLES = {
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "mellum": "MellumForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "exaone4_5": "Exaone4_5_ForConditionalGeneration",
    "step3p5": "Step3p7ForConditionalGeneration",
}
# The others draft at night, and their logits are compared on every push.
EVERY_PUSH = [
    name for name in ORACLES if name not in ("mellum", "qwen3_moe", "exaone4_5", "step3p5")
]
# transformers runs no MTP layer with an indexer: the same weights without it are another model's.
WITHOUT_INDEXER = {"deepseek_v32": "deepseek_v3", "glm_moe_dsa": "glm4_moe_lite"}
# As the release has it: rotations by layer, of which full attention's are stretched, and limits.
STEP_RELEASED = {
    "rope_theta": [5000000.0, 10000.0] * 2 + [10000.0] * 3,
    "partial_rotary_factors": [0.5, 1.0] * 2 + [1.0] * 3,
    "yarn_only_types": ["full_attention"],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
        "original_max_position_embeddings": 128,
    },
    "moe_router_scaling_factor": 3.0,
    "swiglu_limits": [0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.05, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0],
}
# Experts of latents and in groups, and a constant of norms that shows.
OTHER_NEMOTRON = {
    "moe_latent_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "layer_norm_epsilon": 0.1,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe without norms": ("glm4_moe", {"use_qk_norm": False}),
    "glm4_moe without biases": ("glm4_moe", {"attention_bias": False}),
    "glm4_moe, all sparse": ("glm4_moe", {"n_shared_experts": 2, "first_k_dense_replace": 0}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "deepseek_v32": ("deepseek_v32", {}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "hy_v3": ("hy_v3", {}),
    "mimo": ("mimo", {}),
    "exaone_moe": ("exaone_moe", {}),
    "mellum": ("mellum", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "exaone4_5": ("exaone4_5", {}),
    "step3p5": ("step3p5", STEP_RELEASED),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next, weights not normalised": ("qwen3_next", {"norm_topk_prob": False}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5, not tied": ("qwen3_5_text", {"tie_word_embeddings": False}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h, experts of latents": ("nemotron_h", OTHER_NEMOTRON),
}


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def logits_of(reference: Any, tokens: Any) -> torch.Tensor:
    with torch.inference_mode():
        return torch.as_tensor(reference(torch.tensor([tokens])).logits[0])


@pytest.mark.parametrize("name", VARIANTS)
def test_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one prefill, and token by token after one."""
    model_type, changes = VARIANTS[name]
    path = write_checkpoint(tmp_path, changed(SMALL_CONFIGS[model_type], **changes))
    (tokens,) = prompts_of([150], 96)
    expected = logits_of(oracle(path, monkeypatch), tokens)
    for compiled in (False, True):
        model = load(path, compiled=compiled)
        assert relative_error(Walk(model).feed(tokens)[0], expected) <= TOLERANCE
        walk = Walk(model)
        parts = [tokens[:120], *([token] for token in tokens[120:])]
        assert relative_error(torch.cat([walk.feed(p)[0] for p in parts]), expected) <= TOLERANCE


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_contexts_beyond_the_indexers_choice_are_refused(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense attention is another model there, up to there it is the same."""
    config = SMALL_CONFIGS[model_type] | {"index_topk": 64}
    path = write_checkpoint(tmp_path, config)
    (tokens,) = prompts_of([150], 96)
    expected, model = logits_of(oracle(path, monkeypatch), tokens), load(path)
    found = Walk(model).feed(tokens)[0]
    assert relative_error(found[:64], expected[:64]) <= TOLERANCE
    assert relative_error(found, expected) > 10 * TOLERANCE
    for prompt, fits in ((tokens[:56], True), (tokens[:57], False)):
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        if fits:
            assert len(run(model, [prompt], params).outputs[0]) == 8
        else:
            with pytest.raises(UsageError, match="at most 64 together, index_topk of config.json"):
                run(model, [prompt], params)


@pytest.mark.parametrize(("count", "new"), nightly_but([(3, 32)], [(3, 32), (16, 64)]))
@pytest.mark.parametrize("model_type", nightly_but(EVERY_PUSH, ORACLES))
def test_greedy_tokens_and_mtp_steps(
    model_type: str, count: int, new: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens equal transformers', with speculation or without, in as many steps of the target."""
    config = changed(SMALL_CONFIGS[model_type], vocab_size=4, eos_token_id=None)
    path = write_checkpoint(tmp_path / "model", config)
    model, accepted, expected = load(path), 0, []
    reference = drafting_oracle(path, tmp_path / "oracle", monkeypatch)
    steps = counted_steps(reference, monkeypatch)
    prompts = prompts_of(range(9, 9 + 11 * count, 11), 4, seed=2)
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    for prompt in prompts:
        ids = torch.tensor([prompt])
        steps.clear()
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_mtp=True,
            max_new_tokens=params.max_tokens,
            pad_token_id=0,
        )
        ours = run(model, [prompt], params, method="mtp", k=len(model.mtp_modules))
        expected.append(out[0, len(prompt) :].tolist())
        assert ours.outputs[0] == expected[-1]
        assert ours.requests[0].metrics.target_steps == len(steps)
        accepted += sum(ours.requests[0].metrics.accepted)
    assert accepted
    assert run(model, prompts, params).outputs == expected
    assert run(model, prompts, params, method="mtp", k=3).outputs == expected


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["step3p5", "exaone4_5"])
def test_batches_of_eight(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten requests that come and go at their own times, most beyond the windows of 8 tokens: each
    has transformers' tokens, plain and with drafts."""
    config = SMALL_CONFIGS[model_type]
    config = changed(config, vocab_size=4, eos_token_id=None, sliding_window=8)
    path = write_checkpoint(tmp_path, config)
    reference, model = oracle(path, monkeypatch), load(path)
    prompts = prompts_of(range(5, 55, 5), 4, seed=3)
    params = [SamplingParams(max_tokens=new, ignore_eos=True) for new in (12, 3, 7, 9, 5) * 2]
    expected = []
    for prompt, own in zip(prompts, params, strict=True):
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=own.max_tokens,
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    for drafts in (0, 1, 3):
        method = "mtp" if drafts else "none"
        found = run(model, prompts, params, method=method, k=drafts or 1, max_batch_size=8)
        assert found.outputs == expected, f"{drafts} drafts"


def drafting_oracle(path: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' model of a checkpoint, ready to draft with its MTP layer."""
    shutil.copytree(path, other)  # ours reads its weights when it uses them
    config = json.loads((other / "config.json").read_text())
    if config["model_type"] in WITHOUT_INDEXER:
        like = SMALL_CONFIGS[WITHOUT_INDEXER[config["model_type"]]]
        tensors = load_file(path / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if ".indexer." not in name}
        save_file(kept, other / "model.safetensors", metadata={"format": "pt"})
        named = {key: like[key] for key in ("model_type", "architectures")}
        (other / "config.json").write_text(json.dumps(config | named))
    rename_mtp_tensors(other)
    reference = oracle(other, monkeypatch)
    text = reference.config.get_text_config()
    text.num_mtp_layers = len(family_of(config).mtp)
    if getattr(text, "mlp_layer_types", None) is not None:
        text.mtp_mlp_layer_types = ["sparse"]
    for key, value in MTP_MODEL.get(config["model_type"], {}).items():
        setattr(text, key, value)
    if any(mtp.own_head for mtp in family_of(config).mtp):
        with_own_heads(reference, monkeypatch)
    return reference


def counted_steps(reference: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with every forward pass of the main model."""
    calls: list[int] = []
    forward = reference.model.forward

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return forward(*arguments, **options)

    monkeypatch.setattr(reference.model, "forward", counted)
    return calls
