"""EAGLE-3 drafts of DeepSeek models: one MLA layer with a dense MLP over the inputs of several
layers of the target, and a head of a vocabulary of its own.

Source: vLLM's deepseek_eagle3 and SGLang's kimi_k25_eagle3 (Eagle3DeepseekV2ForCausalLM).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.base import Role, TensorMaker, TensorSpec
from mtp_checkpoints.families.facts import ModelFacts, refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.parts.feed_forward import GatedMlp
from mtp_checkpoints.families.parts.mla import Mla
from mtp_checkpoints.families.spec import LayerSpec

ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
TARGET_OFFSETS, TARGET_MASK = "d2t", "t2d"
_MODEL_TYPE = "deepseek_v2"  # vLLM takes a draft of deepseek_v3 for an MTP layer
_LAYER, _LAYER_AS_WELL = "midlayer", "layers.0"
_TAPS = 3
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
class Eagle3Family:
    """Description of one draft by its config.json, under the names that SGLang gives its tensors.

    layer takes [embedding | state]; its input norm is that of the embedding. projection joins the
    tapped states, hidden_norm is the norm of a state.
    """

    fields: Fields
    facts: ModelFacts
    layer: LayerSpec

    embedding: ClassVar = "embed_tokens"
    norm: ClassVar = "norm"
    head: ClassVar = "lm_head"
    projection: ClassVar = "fc"
    hidden_norm: ClassVar = f"{_LAYER}.hidden_norm"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Eagle3Family:
        """Read a draft's config.json.

        Raises UnsupportedError for a draft of another architecture or of several layers, and what
        a model's config.json raises.
        """
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or not set(architectures) & set(ARCHITECTURES):
            raise UnsupportedError(
                "This is no EAGLE-3 draft that the runtime computes",
                expected=f"architectures {' or '.join(ARCHITECTURES)} in config.json",
                found=repr(architectures)[:100],
                todo="Drafts with Llama's attention run in vLLM and SGLang",
            )
        if config.get("num_hidden_layers", 1) != 1:
            raise UnsupportedError(
                "An EAGLE-3 draft of several layers is not computed",
                expected="num_hidden_layers 1",
                found=repr(config["num_hidden_layers"])[:100],
            )
        fields = Fields(config)
        for key in ("attention_bias", "tie_word_embeddings"):
            refuse_set(fields, key)
        attention = Mla.of(fields)
        attention = replace(attention, inputs=2 * attention.hidden)
        layer = LayerSpec(_LAYER, attention, GatedMlp.of(fields))
        return cls(fields, ModelFacts.of(fields), layer)

    @property
    def vocab(self) -> int:
        """Tokens of the target."""
        return self.facts.vocab

    @property
    def hidden(self) -> int:
        """Elements of the draft's hidden states."""
        return self.facts.hidden

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
        size = self.fields.without_nulls().whole("draft_vocab_size", self.vocab)
        if size > self.vocab:
            raise self.fields.unusable("draft_vocab_size", f"at most vocab_size {self.vocab}")
        return size

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
        has_norms = self._flag("fc_norm") or self._flag("use_aux_norm")  # as SGLang knows it too
        return tuple(f"fc_norm.{tap}" for tap in range(self.tap_count)) if has_norms else ()

    def _flag(self, key: str) -> bool:
        return self.fields.without_nulls().flag(key, False)

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor that the config promises, by name."""
        return {spec.name: spec for spec in self._all()}

    def _all(self) -> Iterator[TensorSpec]:
        hidden, make = self.hidden, TensorMaker(self.facts.dtype)
        joined = (hidden, self.tap_count * self.target_hidden)
        yield make.matrix(self.projection, joined, Role.MTP_PROJECTION)
        for norm in self.fc_norms:
            yield make.norm(norm, self.target_hidden)
        yield make.norm(self.hidden_norm, hidden)
        yield from self.layer.tensors(hidden, make)
        yield make.norm(self.norm, hidden)
        reduced = self.draft_vocab != self.vocab
        head = make.matrix(self.head, (self.draft_vocab, hidden), Role.HEAD)
        yield head._replace(optional=not reduced)
        shared = self.target_hidden == hidden
        embedding = make.matrix(self.embedding, (self.vocab, hidden), Role.EMBEDDING)
        yield embedding._replace(optional=shared)
        ids = TensorSpec(
            TARGET_OFFSETS, (self.draft_vocab,), dtypes=(DType.I64,), role=Role.VOCABULARY
        )
        yield ids._replace(optional=not reduced)
        mask = TensorSpec(TARGET_MASK, (self.vocab,), dtypes=(DType.BOOL,), role=Role.VOCABULARY)
        yield mask._replace(optional=True)


def own_name(name: str) -> str:
    """Return a stored tensor's name as the family has it: engines know the layer by two names."""
    if name.startswith(f"{_LAYER_AS_WELL}."):
        return _LAYER + name.removeprefix(_LAYER_AS_WELL)
    return name
