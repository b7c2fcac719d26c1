"""Gemma-4: most layers attend to the last tokens alone and the others rotate a part of wider heads;
the last layers of some releases take keys and values of layers before them.

Source: transformers' gemma4 and gemma4_unified.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.facts import refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers
from mtp_checkpoints.families.parts.feed_forward import GatedMlp
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.parts.listed import Entry, matrix
from mtp_checkpoints.families.parts.normed_moe import NormedMoe
from mtp_checkpoints.families.parts.rope import Rope
from mtp_checkpoints.families.parts.shared_gqa import SharedGqa
from mtp_checkpoints.families.releases import Releases, Values
from mtp_checkpoints.families.sandwich_layer import PerLayerInput, SandwichLayerSpec
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.text_part import TextPart

ASSISTANT = "assistant"  # the method of its drafts
SLIDING, FULL = "sliding_attention", "full_attention"
_PERIOD = 6  # of layers without a window
_PARTS = ("vision_tower", "audio_tower", "vision_embedder", "embed_vision", "embed_audio")
_BESIDE = tuple(f"model.{name}." for name in _PARTS)
_UNUSED = ("k_proj", "v_proj", "k_norm", "v_norm")  # that releases have in layers with others' keys
# As transformers' configs have them.
_DEFAULTS = {
    "use_qk_norm": True,
    "tie_word_embeddings": True,
    "partial_rotary_factor": 1.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
}
_ROTATIONS = {
    SLIDING: {"rope_theta": 1e4},
    FULL: {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_OF_LAYERS = {"head_dim", "num_key_value_heads"}
_CONTRACT = MtpContract(source="transformers")  # of the models, which have no MTP layer
_APART = "its drafts are made by an assistant, a model in a checkpoint of its own"


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    tied = fields.with_defaults(tie_word_embeddings=True)
    return decoder(TextPart.of(tied, carried=_BESIDE))


def text_spec(fields: Fields) -> ModelSpec:
    """Describe a config.json of the decoder alone."""
    return decoder(TextPart.whole(fields.with_defaults(tie_word_embeddings=True)))


def decoder(part: TextPart) -> ModelSpec:
    """Describe the decoder of a config.json."""
    part = replace(part, fields=usual_fields(part.fields))
    fields, layers = part.fields, sandwich_layers(part.fields, part.prefix)
    shared = (one for one in layers if isinstance(one.attention, SharedGqa) and one.attention.reads)
    unused = (f"{one.attention_prefix}.{name}." for one in shared for name in _UNUSED)
    described = listed_decoder(
        replace(part, carried=(*part.carried, *unused)), layers, (), _CONTRACT
    )
    cap = None
    if fields.has("final_logit_softcapping"):
        cap = fields.number("final_logit_softcapping", minimum=1e-3, maximum=1e6)
    facts = replace(described.facts, embedding_scale=described.facts.hidden**0.5, logit_cap=cap)
    return replace(
        described,
        facts=facts,
        more=_per_layer_embeddings(fields, part.prefix, len(layers)),
        drafts_apart=_APART,
        draft_method=ASSISTANT,
        may_fuse=any(one.beside is not None for one in layers),
    )


def usual_fields(fields: Fields) -> Fields:
    """Return the fields of a decoder with the usual values of those that are absent."""
    known = fields.without_nulls().named(hidden_act="hidden_activation").with_defaults(**_DEFAULTS)
    refuse_set(known, "attention_bias")
    if known.has("use_bidirectional_attention"):
        known.word("use_bidirectional_attention", choices=("vision",))
    return known


def sandwich_layers(fields: Fields, prefix: str) -> list[SandwichLayerSpec]:
    """Return the layers of a decoder, whose modules have a prefix."""
    count = main_layers(fields)
    kinds = _kinds(fields, count)
    own = count - fields.whole("num_kv_shared_layers", 0, minimum=0, maximum=count)
    last = {kind: index for index, kind in enumerate(kinds[:own])}
    size, experts = fields.whole("hidden_size_per_layer_input", minimum=0), None
    if fields.flag("enable_moe_block", False):
        check_expert_count(fields, "num_experts", count)
        experts = NormedMoe.read(fields)
    layers = []
    for index, kind in enumerate(kinds):
        reads = kind if index >= own else ""
        mlp = _mlp(fields, shared=bool(reads))
        layer = SandwichLayerSpec(
            f"{prefix}.layers.{index}",
            _attention(
                _with_own_heads(fields, index, kind),
                kind,
                keeps=kind if last.get(kind) == index else "",
                reads=reads,
            ),
            mlp,
            inputs=PerLayerInput(size, index) if size else None,
        )
        layers.append(layer if experts is None else _with_experts(layer, experts, mlp))
    return layers


def _kinds(fields: Fields, count: int) -> Sequence[str]:
    """Return the kinds of layers, of which the last attends to all tokens."""
    if fields.has("layer_types"):
        kinds = list(fields.kinds("layer_types", (SLIDING, FULL), count))
    else:
        kinds = [FULL if (index + 1) % _PERIOD == 0 else SLIDING for index in range(count)]
    return [*kinds[:-1], FULL]


def _with_own_heads(fields: Fields, index: int, kind: str) -> Fields:
    """Return the fields with the heads of one layer: those that a config.json lists by layer, or
    else those of layers without a window."""
    if fields.has("per_layer_config"):
        listed = fields.section("per_layer_config")
        names = {int(name): name for name in listed.values if name.isdecimal()}  # as "05"
        own = listed.section(names.get(index, ""))
        if not own.values.keys() <= _OF_LAYERS:
            raise own.unusable(next(iter(own.values.keys() - _OF_LAYERS)), "none by layer")
        return fields.with_values(**own.values)
    if kind == SLIDING:
        return fields
    own_heads = {"head_dim": fields.whole("global_head_dim", 512)}
    if fields.flag("attention_k_eq_v", False) and fields.has("num_global_key_value_heads"):
        own_heads["num_key_value_heads"] = fields.whole("num_global_key_value_heads")
    return fields.with_values(**own_heads)


def _attention(fields: Fields, kind: str, *, keeps: str, reads: str) -> SharedGqa:
    """Read the attention of layers of a kind."""
    full, joint = kind == FULL, fields.flag("attention_k_eq_v", False)
    rotation = {**_ROTATIONS[kind], **fields.section("rope_parameters").section(kind).values}
    whole = Gqa.of(fields.with_values(rope_parameters=rotation))
    head, rope = whole.sizes.head, whole.rope
    # All pairs lie in two halves of the whole head, whichever turn.
    turning = None if whole.sizes.rope == head else whole.sizes.rope // 2
    rope = Rope(head, rope.theta, turning=turning)
    return SharedGqa(
        whole.hidden,
        whole.sizes._replace(rope=head),
        rope,
        window=None if full else fields.whole("sliding_window"),
        keeps=keeps,
        reads=reads,
        own_values=not (full and joint),
    )


def _mlp(fields: Fields, *, shared: bool) -> GatedMlp:
    """Read the MLP of a layer, shared: of one that takes keys and values of another."""
    mlp = GatedMlp.of(fields)
    if shared and fields.flag("use_double_wide_mlp", False):
        return replace(mlp, inner=2 * mlp.inner)
    return mlp


def _with_experts(layer: SandwichLayerSpec, experts: NormedMoe, mlp: GatedMlp) -> SandwichLayerSpec:
    """Return a layer whose experts lie in it beside its MLP."""
    return replace(layer, feed_forward=experts, feed_forward_name="", beside=mlp)


def _per_layer_embeddings(fields: Fields, prefix: str, layers: int) -> tuple[Entry, ...]:
    """Return what a model has of embeddings per layer; nothing in one without them."""
    return tuple(_entries(fields, prefix, layers))


def _entries(fields: Fields, prefix: str, layers: int) -> Iterator[Entry]:
    size = fields.whole("hidden_size_per_layer_input", minimum=0)
    if not size:
        return
    rows = fields.whole("vocab_size_per_layer_input", fields.whole("vocab_size"))
    hidden, role = fields.whole("hidden_size"), Role.PER_LAYER_INPUT
    yield matrix(f"{prefix}.embed_tokens_per_layer", rows, layers * size, role)
    yield matrix(f"{prefix}.per_layer_model_projection", layers * size, hidden, role)
    yield Entry(f"{prefix}.per_layer_projection_norm.weight", (size,), role)


# Gemma-4-26B-A4B and 31B: config.json in NVIDIA's aiconfigurator. Gemma-4-12B, which is unified:
# config.json in tests of two engines.
_VALUES: Values = {
    "rms_norm_eps": (1e-6,),
    "rope_theta": (1e6, 10000.0),
    "final_logit_softcapping": (30.0,),
}
RELEASES: Releases = {
    "gemma4": _VALUES,
    "gemma4_text": _VALUES,
    "gemma4_unified": _VALUES,
    "gemma4_unified_text": _VALUES,
}
