"""Keys that several architectures have in common, from a model's parts; all are named behind the
architecture and a dot."""

from __future__ import annotations

from collections.abc import Iterator

from mtp_checkpoints.containers.gguf_values import Value, boolean, f32, text, u32
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, Moe
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.parts.mla import Mla
from mtp_checkpoints.families.parts.rope import PLAIN, YARN, Rope, Yarn
from mtp_checkpoints.families.spec import ModelSpec

GATING = {"softmax": 1, "sigmoid": 2}  # of expert_gating_func
LOG_MULTIPLIER = 0.1  # times mscale_all_dim, in architectures of latent attention


def model_keys(spec: ModelSpec) -> Iterator[tuple[str, Value]]:
    """Yield sizes of the whole model, its norms and its feed-forward parts (UnsupportedError for
    layers in an order that no key tells)."""
    facts = spec.facts
    yield "context_length", u32(facts.max_positions)
    yield "embedding_length", u32(facts.hidden)
    yield "vocab_size", u32(facts.vocab)
    yield "attention.layer_norm_rms_epsilon", f32(facts.norm_eps)
    parts = [layer.feed_forward for layer in spec.layers]
    dense = [part for part in parts if isinstance(part, GatedMlp)]
    if dense:
        yield "feed_forward_length", u32(dense[0].inner)
    if any(isinstance(part, Moe) for part in parts[: len(dense)]):
        raise UnsupportedError(
            "llama.cpp has no key for dense layers behind sparse ones",
            expected="first_k_dense_replace dense layers, then sparse ones (moe_layer_freq 1)",
            found="dense layers among sparse ones",
            todo="Use --target hf",
        )
    yield "leading_dense_block_count", u32(len(dense))
    every = (layer.feed_forward for layer in spec.every_layer)
    moe = next((part for part in every if isinstance(part, Moe)), None)
    if moe is not None:
        yield from _experts(moe)


def _experts(moe: Moe) -> Iterator[tuple[str, Value]]:
    router, routing = moe.router, moe.router.routing
    if router.scoring not in GATING:
        raise UnsupportedError(
            "llama.cpp has no gating function for this router",
            expected=f"scoring_func {' or '.join(GATING)}",
            found=router.scoring[:100],
        )
    yield "expert_count", u32(moe.experts)
    yield "expert_used_count", u32(routing.experts_per_token)
    yield "expert_shared_count", u32(moe.shared)
    yield "expert_feed_forward_length", u32(moe.expert.inner)
    yield "expert_group_count", u32(routing.groups)
    yield "expert_group_used_count", u32(routing.groups_per_token)
    yield "expert_weights_scale", f32(routing.scale)
    if routing.normalises:
        yield "expert_weights_norm", boolean(True)
    yield "expert_gating_func", u32(GATING[router.scoring])


def latent_keys(mla: Mla) -> Iterator[tuple[str, Value]]:
    """Yield the keys of latent attention, which llama.cpp runs with one key head: the latent.

    Raises UnsupportedError for rotary positions that no key tells.
    """
    sizes = mla.sizes
    yield "attention.head_count", u32(sizes.heads)
    yield "attention.head_count_kv", u32(1)
    if sizes.query_rank:
        yield "attention.q_lora_rank", u32(sizes.query_rank)
    yield "attention.kv_lora_rank", u32(sizes.latent)
    yield "attention.key_length", u32(sizes.latent + sizes.rope)
    yield "attention.value_length", u32(sizes.latent)
    yield "attention.key_length_mla", u32(sizes.nope + sizes.rope)
    yield "attention.value_length_mla", u32(sizes.value)
    yield from rope_keys(mla.rope)
    yarn = mla.rope.yarn
    if yarn is not None:
        _check_scales(yarn, yarn.mscale_all_dim or yarn.mscale)
        yield "rope.scaling.yarn_log_multiplier", f32(LOG_MULTIPLIER * yarn.mscale_all_dim)


def grouped_keys(gqa: Gqa) -> Iterator[tuple[str, Value]]:
    """Yield the keys of grouped-query attention."""
    sizes = gqa.sizes
    yield "attention.head_count", u32(sizes.heads)
    yield "attention.head_count_kv", u32(sizes.kv_heads)
    yield "attention.key_length", u32(sizes.head)
    yield "attention.value_length", u32(sizes.head)
    yield from rope_keys(gqa.rope)
    if gqa.rope.yarn is not None:
        _check_scales(gqa.rope.yarn, 0.0)


def rope_keys(rope: Rope) -> Iterator[tuple[str, Value]]:
    """Yield the keys of rotary positions (UnsupportedError for a stretching that none tells)."""
    yield "rope.dimension_count", u32(rope.size)
    yield "rope.freq_base", f32(rope.theta)
    if rope.scaling not in (PLAIN, YARN):
        raise UnsupportedError(
            "This scaling of rotary positions is not written for llama.cpp",
            expected=f"{PLAIN} or {YARN} in config.json's rope_scaling",
            found=rope.scaling[:100],
        )
    yarn = rope.yarn
    if yarn is None:
        return
    yield "rope.scaling.type", text(YARN)
    yield "rope.scaling.factor", f32(yarn.factor)
    if yarn.original_positions is not None:
        yield "rope.scaling.original_context_length", u32(yarn.original_positions)
    yield "rope.scaling.yarn_beta_fast", f32(yarn.beta_fast)
    yield "rope.scaling.yarn_beta_slow", f32(yarn.beta_slow)


def _check_scales(yarn: Yarn, of_all: float) -> None:
    """Refuse scales of YaRN that llama.cpp has no key for (UnsupportedError): it takes mscale for
    mscale_all_dim, and 1 for mscale where that is 0."""
    if (yarn.mscale, yarn.mscale_all_dim) != (of_all or 1.0, of_all):
        raise UnsupportedError(
            "llama.cpp has no keys for these scales of YaRN",
            expected=f"mscale {of_all or 1:g} and mscale_all_dim {of_all:g} in config.json's"
            " rope_scaling",
            found=f"{yarn.mscale:g} and {yarn.mscale_all_dim:g}",
            todo="Use --target hf",
        )
