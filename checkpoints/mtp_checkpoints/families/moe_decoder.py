"""Decoders with a mixture of experts and MTP layers stored behind the last main layer, as
DeepSeek-V3 lays them out, around any attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.base import SGLANG_DRAFT
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_USUAL, EngineDraft, sglang_deepseek
from mtp_checkpoints.families.facts import ModelFacts, refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.layer_halves import Attention
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, Moe, MoeNames
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec

_MAX_LAYERS = 1_000
_MAX_EXPERT_MATRICES = 160_000  # twice those of any release; their names take 3 s and 160 MB


@dataclass(frozen=True)
class DecoderNames:
    """Names of modules: of a mixture of experts, and around the decoder layer of an MTP layer."""

    moe: MoeNames = MoeNames()
    mtp: Callable[[str], MtpModules] = MtpModules.under


_USUAL = DecoderNames()


def moe_decoder(
    fields: Fields,
    attention: Callable[[int], Attention],
    *,
    usual_contract: MtpContract,
    sglang: EngineDraft | None = SGLANG_USUAL,
    refused: tuple[str, ...] = ("tie_word_embeddings",),
    names: DecoderNames = _USUAL,
) -> ModelSpec:
    """Describe a config.json, given the attention of each layer by its index.

    usual_contract: that of MTP modules whose config.json records none. sglang: SGLang's class of
    their drafts, None for DeepSeek's, which replaces the layer's name in lists. refused: keys that
    no release of the family sets. names: those of modules, where they are not DeepSeek-V3's. Raises
    InvalidInputError for a missing or unusable field, UnsupportedError for a variant that no
    release has.
    """
    main = main_layers(fields)
    total = main + mtp_count(fields)
    for key in refused:
        refuse_set(fields, key)
    facts, sparse = ModelFacts.of(fields), _sparse(fields, main, total)
    moe, dense = None, None
    if any(sparse):
        check_expert_count(fields, "n_routed_experts", sum(sparse))
        moe = Moe.of(fields, names.moe)
    if not all(sparse):
        dense = GatedMlp.of(fields)
    layers = []
    for index, is_sparse in enumerate(sparse):
        feed_forward = moe if is_sparse else dense
        assert feed_forward is not None, "made above"
        layers.append(LayerSpec(_prefix(index), attention(index), feed_forward))
    return ModelSpec(
        facts,
        tuple(layers[:main]),
        tuple(MtpSpec(layer, names.mtp(layer.prefix)) for layer in layers[main:]),
        mtp_contract=usual_contract.overridden_by(fields),
        usual_contract=usual_contract,
        mtp_names=() if sglang is None else (SGLANG_DRAFT,),
        sglang=sglang or sglang_deepseek(_prefix(main)),
    )


def main_layers(fields: Fields) -> int:
    """Return the number of main layers."""
    return fields.whole("num_hidden_layers", maximum=_MAX_LAYERS)


def mtp_count(fields: Fields, usual: int = 0) -> int:
    """Return the number of MTP layers; usual: that of a config.json that does not say."""
    return fields.whole("num_nextn_predict_layers", usual, minimum=0, maximum=_MAX_LAYERS)


def attention_of(layer: int) -> str:
    """Return the prefix of the attention's modules in a layer."""
    return f"{_prefix(layer)}.self_attn"


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}"


def _sparse(fields: Fields, main: int, total: int) -> list[bool]:
    """Return which layers have a mixture of experts; every MTP layer has one."""
    key = "mlp_layer_types"
    if fields.has(key) and not fields.has("first_k_dense_replace"):
        listed = fields.kinds(key, ("dense", "sparse"), main)
        return [at >= main or listed[at] == "sparse" for at in range(total)]
    dense = fields.whole("first_k_dense_replace", minimum=0)
    every = fields.whole("moe_layer_freq", 1)
    return [at >= main or (at >= dense and at % every == 0) for at in range(total)]


def check_expert_count(fields: Fields, key: str, sparse_layers: int) -> None:
    """Refuse more experts than any model has, before their tensors are named; key is the field of
    those of one layer (InvalidInputError)."""
    experts = fields.whole(key)
    matrices = 3 * experts * sparse_layers
    if matrices > _MAX_EXPERT_MATRICES:
        raise InvalidInputError(
            "config.json promises more tensors than any model has",
            expected=f"at most {_MAX_EXPERT_MATRICES} matrices of experts",
            found=f"{matrices}: {experts} {fields.name(key)} in {sparse_layers} layers",
            todo="Correct config.json, or get it again from the checkpoint's source",
        )
