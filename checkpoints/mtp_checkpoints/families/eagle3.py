"""EAGLE-3 drafts of DeepSeek models: one MLA layer with a dense MLP over the inputs of several
layers of the target, and a head of a vocabulary of its own.

Source: vLLM's deepseek_eagle3 and SGLang's kimi_k25_eagle3 (Eagle3DeepseekV2ForCausalLM).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.base import Role, TensorSpec
from mtp_checkpoints.families.deepseek_v3 import DeepseekV3Family
from mtp_checkpoints.families.modules import LayerModules, MlpModules, ModelModules, weight_name

ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
TARGET_OFFSETS, TARGET_MASK = "d2t", "t2d"
_MODEL_TYPE = "deepseek_v2"  # vLLM takes a draft of deepseek_v3 for an MTP layer
_LAYER, _LAYER_AS_WELL = "midlayer.", "layers.0."
_TAPS = 3
_ONE_DENSE_LAYER = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
# What the draft's layer has in common with the target's.
_OF_TARGET = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "hidden_act",
    "bos_token_id",
    "eos_token_id",
)


def usual_taps(layers: int) -> tuple[int, ...]:
    """Return the layers of a target of so many whose inputs engines take without being told."""
    return (2, layers // 2, layers - 3)


def eagle3_config(
    target: Mapping[str, Any], taps: Sequence[int], draft_vocab: int, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """Return config.json of a draft for the target of a config.json.

    taps are ascending; SGLang takes ids that begin with 1 for ones counted otherwise.
    """
    ids = list(taps)
    return {
        "architectures": [ARCHITECTURES[0]],
        "model_type": _MODEL_TYPE,
        **{key: target[key] for key in _OF_TARGET if key in target},
        "num_hidden_layers": 1,
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": target["hidden_size"],
        "num_aux_hidden_states": len(ids),
        "norm_before_residual": False,
        # Engines read the ids at either place.
        TAPS_KEY: ids,
        "eagle_config": {TAPS_KEY: ids, "use_aux_hidden_state": True},
    }


@dataclass(frozen=True)
class Eagle3Family(DeepseekV3Family):
    """Tensors of one draft by its config.json, under the names that SGLang gives them."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a draft's config.json.

        Raises UnsupportedError for a draft of another architecture or of several layers, and what
        a model's config.json raises.
        """
        found = config.get("architectures")
        if not isinstance(found, list) or not set(found) & set(ARCHITECTURES):
            raise UnsupportedError(
                "This is no EAGLE-3 draft that the runtime computes",
                expected=f"architectures {' or '.join(ARCHITECTURES)} in config.json",
                found=repr(found)[:100],
                todo="Drafts with Llama's attention run in vLLM and SGLang",
            )
        if config.get("num_hidden_layers", 1) != 1:
            raise UnsupportedError(
                "An EAGLE-3 draft of several layers is not computed",
                expected="num_hidden_layers 1",
                found=repr(config["num_hidden_layers"])[:100],
            )
        return super().from_config({**config, **_ONE_DENSE_LAYER})

    def taps(self, layers: int) -> tuple[int, ...]:
        """Return the layers of a target of so many whose inputs the draft takes, ascending.

        Raises InvalidInputError where config.json names layers that the target does not have, or
        different ones at its two places.
        """
        places = [self.fields, self.fields.section("eagle_config")]
        named = [fields.values[TAPS_KEY] for fields in places if fields.has(TAPS_KEY)]
        ids = named[0] if named else list(usual_taps(layers))
        whole = isinstance(ids, list) and all(type(tap) is int for tap in ids)
        if not whole or ids != sorted({tap for tap in ids if 0 < tap < layers}):
            raise self._unusable_taps(f"ascending ids of layers, from 1 to {layers - 1}", ids)
        if len(named) > 1 and named[1] != ids:
            raise self._unusable_taps(f"{ids}, as at the top level", named[1])
        if len(ids) != self.tap_count:
            raise self._unusable_taps(f"{self.tap_count} ids, by num_aux_hidden_states", ids)
        return tuple(ids)

    def _unusable_taps(self, expected: str, found: object) -> InvalidInputError:
        return InvalidInputError(
            f"config.json has no usable {TAPS_KEY}",
            expected=expected,
            found=repr(found)[:100],
            todo="Correct config.json; engines would feed the draft other layers",
        )

    @cached_property
    def tap_count(self) -> int:
        """Number of the target's layers that the draft is fed with."""
        for fields in (self.fields, self.fields.section("eagle_config")):
            ids = fields.values.get(TAPS_KEY)
            if isinstance(ids, list) and ids:
                return self.fields.without_nulls().whole("num_aux_hidden_states", len(ids))
        return self.fields.without_nulls().whole("num_aux_hidden_states", _TAPS)

    @cached_property
    def draft_vocab(self) -> int:
        """Rows of the draft's own head."""
        own = self.fields.without_nulls().whole("draft_vocab_size", self.vocab)
        if own > self.vocab:
            raise self.fields.unusable("draft_vocab_size", f"at most vocab_size {self.vocab}")
        return own

    @property
    def target_hidden(self) -> int:
        """Elements of the target's hidden states."""
        return self.fields.without_nulls().whole("target_hidden_size", self.hidden)

    @property
    def norm_before_residual(self) -> bool:
        """True where the layer's residual is the hidden state after hidden_norm."""
        return self._flag("norm_before_residual")

    @property
    def norm_output(self) -> bool:
        """True where the next draft is fed the output after the last norm."""
        return self._flag("norm_output")

    @property
    def fc_norms(self) -> tuple[str, ...]:
        """Norms of the tapped states, one each; none where they are joined as they are."""
        wanted = self._flag("fc_norm") or self._flag("use_aux_norm")  # as SGLang knows it too
        return tuple(f"fc_norm.{tap}" for tap in range(self.tap_count)) if wanted else ()

    def _flag(self, key: str) -> bool:
        return self.fields.without_nulls().flag(key, False)

    @property
    def modules(self) -> ModelModules:
        """Modules outside the layer."""
        return ModelModules(embedding="embed_tokens", norm="norm", head="lm_head")

    @property
    def projection(self) -> str:
        """Module that joins the tapped states."""
        return "fc"

    @property
    def hidden_norm(self) -> str:
        """Norm of the state that the layer is fed with beside the embedding."""
        return f"{_LAYER}hidden_norm"

    def layer_modules(self, layer: int) -> LayerModules:
        """Modules of the layer; its input norm is that of the embedding."""
        return LayerModules(
            input_norm=f"{_LAYER}input_layernorm",
            attention=self.attention_prefix(layer),
            post_norm=f"{_LAYER}post_attention_layernorm",
            feed_forward=MlpModules.under(f"{_LAYER}mlp"),
        )

    def attention_prefix(self, layer: int) -> str:
        return f"{_LAYER}self_attn"

    def attention_tensors(self, layer: int, mtp: int | None) -> Iterator[TensorSpec]:
        """Yield those of MLA, whose first projections take embedding and hidden state."""
        names = self.attention_modules(layer)
        first = {names.latent_down, names.query_down or names.query_up}
        for spec in super().attention_tensors(layer, mtp):
            wide = (spec.shape[0], 2 * self.hidden)
            yield spec._replace(shape=wide) if spec.module in first else spec

    def _all(self) -> Iterator[TensorSpec]:
        hidden, names = self.hidden, self.modules
        joined = (hidden, self.tap_count * self.target_hidden)
        yield self._matrix(self.projection, joined, Role.MTP_PROJECTION)
        for norm in self.fc_norms:
            yield self._norm(norm, self.target_hidden, None)
        yield self._norm(self.hidden_norm, hidden, None)
        yield from self._layer(0, None)
        yield self._norm(names.norm, hidden, None)
        reduced = self.draft_vocab != self.vocab
        head = self._matrix(names.head, (self.draft_vocab, hidden), Role.HEAD)
        yield head._replace(optional=not reduced)
        shared = self.target_hidden == hidden
        embedding = self._matrix(names.embedding, (self.vocab, hidden), Role.EMBEDDING)
        yield embedding._replace(optional=shared)
        ids = TensorSpec(TARGET_OFFSETS, (self.draft_vocab,), dtypes=("I64",), role=Role.VOCABULARY)
        yield ids._replace(optional=not reduced)
        mask = TensorSpec(TARGET_MASK, (self.vocab,), dtypes=("BOOL",), role=Role.VOCABULARY)
        yield mask._replace(optional=True)

    def _matrix(self, module: str, shape: tuple[int, int], role: Role) -> TensorSpec:
        return TensorSpec(weight_name(module), shape, dtypes=(self.dtype,), role=role)


def own_name(name: str) -> str:
    """Return a stored tensor's name as the family has it: engines know the layer by two names."""
    if name.startswith(_LAYER_AS_WELL):
        return _LAYER + name.removeprefix(_LAYER_AS_WELL)
    return name
