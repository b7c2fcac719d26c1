"""Decoders with a mixture of experts and MTP layers stored behind the last main layer, as
DeepSeek-V3 lays them out, around any attention. A family adds its attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, repeat
from typing import Any, ClassVar, Self

from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.base import (
    SGLANG_DRAFT,
    ModulePatterns,
    Role,
    SharedTensor,
    TensorSpec,
)
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.facts import RouterFacts, RunFacts
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.modules import (
    LayerModules,
    MlpModules,
    ModelModules,
    MoeModules,
    MtpModules,
    weight_name,
)
from mtp_checkpoints.named_tuples import rows_of

_LAYERS_PREFIX = "model.layers."
_MAX_LAYERS = 1_000
_MAX_EXPERT_MATRICES = 160_000  # twice those of any release; their names take 3 s and 160 MB
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_LINEARS = {
    Role.ATTENTION: "self_attn.*_proj.*",
    Role.DENSE_MLP: "mlp.(gate_proj|up_proj|gate_up_proj|down_proj)$",
    Role.SHARED_EXPERT: "mlp.shared_experts.*",
    Role.ROUTED_EXPERT: "mlp.experts.*",
}
_OTHER_MATRICES = (
    "lm_head",
    "re:.*mlp.gate$",
    "re:.*eh_proj$",
    "re:.*shared_head.*",
    "re:.*embed_tokens$",
)
_FUSED: dict[tuple[str, ...], tuple[str, ...]] = {("gate_proj", "up_proj"): ("gate_up_proj",)}


@dataclass(frozen=True)
class MoeDecoderFamily(ABC):
    """Tensors of one config, but for its attention.

    refused: keys of config.json that no release of the family sets. fused and absorbed are those
    linears of the attention that ModulePatterns has under these names, and so are mtp_names.
    usual_contract: the contract of MTP modules whose config.json records none.
    """

    config: Mapping[str, Any]
    num_hidden_layers: int
    mtp_layers: range
    dtype: str
    facts: RunFacts
    mtp_contract: MtpContract

    refused: ClassVar[tuple[str, ...]] = ("tie_word_embeddings",)
    usual_contract: ClassVar[MtpContract] = MtpContract()
    fused: ClassVar[Mapping[tuple[str, ...], tuple[str, ...]]] = {}
    absorbed: ClassVar[tuple[str, ...]] = ()
    mtp_names: ClassVar[tuple[str, ...]] = (SGLANG_DRAFT,)

    @abstractmethod
    def attention_tensors(self, layer: int, mtp: int | None) -> Iterator[TensorSpec]:
        """Yield the tensors of one layer's attention."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a config.json.

        Raises InvalidInputError for a missing or unusable field, UnsupportedError for a variant
        that no release has.
        """
        fields = Fields(config)
        layers = fields.whole("num_hidden_layers", maximum=_MAX_LAYERS)
        promised = fields.whole("num_nextn_predict_layers", 0, minimum=0, maximum=_MAX_LAYERS)
        mtp_layers = range(layers, layers + promised)
        for key in cls.refused:
            if config.get(key):
                raise UnsupportedError(
                    f"config.json sets {key}, which no released {config.get('model_type')} does",
                    expected="false",
                    found=config[key],
                )
        name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        if not isinstance(name, str) or name not in _DTYPES:
            raise InvalidInputError(
                "config.json names an unknown torch_dtype",
                expected=", ".join(_DTYPES),
                found=repr(name)[:100],
            )
        return cls(
            config=config,
            num_hidden_layers=layers,
            mtp_layers=mtp_layers,
            dtype=_DTYPES[name],
            facts=RunFacts.of(fields),
            mtp_contract=cls.usual_contract.overridden_by(fields),
        )

    @cached_property
    def fields(self) -> Fields:
        """Fields of config.json, to be read with their types and bounds."""
        return Fields(self.config)

    @cached_property
    def router(self) -> RouterFacts:
        """Choice of experts in a sparse layer."""
        return RouterFacts.of(self.fields, self.experts)

    @cached_property
    def patterns(self) -> ModulePatterns:
        """Module names as engines' quantization configs refer to them."""
        return ModulePatterns(
            linears=_LINEARS,
            other_matrices=_OTHER_MATRICES,
            fused={**_FUSED, **self.fused},
            absorbed=self.absorbed,
            mtp_names=self.mtp_names,
        )

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor that the config promises, main and MTP, by name.

        Raises InvalidInputError for sizes that are missing or make no sense.
        """
        self._check_count()
        return {spec.name: spec for spec in self._all()}

    def _check_count(self) -> None:
        """Refuse more experts than any model has, before their tensors are named."""
        sparse = sum(map(self.is_sparse, range(self.mtp_layers.stop)))
        matrices = 3 * self.experts * sparse if sparse else 0
        if matrices > _MAX_EXPERT_MATRICES:
            raise InvalidInputError(
                "config.json promises more tensors than any model has",
                expected=f"at most {_MAX_EXPERT_MATRICES} matrices of experts",
                found=f"{matrices}: {self.experts} n_routed_experts in {sparse} layers",
                todo="Correct config.json, or get it again from the checkpoint's source",
            )

    @property
    def shared(self) -> tuple[SharedTensor, ...]:
        """Pairs of the MTP layers' copies of embedding and head and the main model's own."""
        main = self.modules
        return tuple(
            SharedTensor(weight_name(own), weight_name(of_main))
            for mtp in map(self.mtp_modules, self.mtp_layers)
            for own, of_main in ((mtp.embedding, main.embedding), (mtp.head, main.head))
        )

    @property
    def experts(self) -> int:
        """Routed experts of a sparse layer."""
        return self._size("n_routed_experts")

    @property
    def shared_experts(self) -> int:
        """Experts of a sparse layer that every token goes through."""
        return self._size("n_shared_experts", 0, minimum=0)

    def is_sparse(self, layer: int) -> bool:
        """True for a layer with a mixture of experts; every MTP layer has one."""
        return layer in self.mtp_layers or (
            layer >= self._dense_layers and layer % self._size("moe_layer_freq", 1) == 0
        )

    @property
    def modules(self) -> ModelModules:
        """Modules outside the layers."""
        return ModelModules(embedding="model.embed_tokens", norm="model.norm", head="lm_head")

    def layer_modules(self, layer: int) -> LayerModules:
        """Modules of one layer, main or MTP."""
        prefix = f"{_LAYERS_PREFIX}{layer}"
        feed_forward = self._moe_modules if self.is_sparse(layer) else MlpModules.under
        return LayerModules(
            input_norm=f"{prefix}.input_layernorm",
            attention=self.attention_prefix(layer),
            post_norm=f"{prefix}.post_attention_layernorm",
            feed_forward=feed_forward(f"{prefix}.mlp"),
        )

    def attention_prefix(self, layer: int) -> str:
        """Prefix of one layer's attention modules, main or MTP."""
        return f"{_LAYERS_PREFIX}{layer}.self_attn"

    def _moe_modules(self, prefix: str) -> MoeModules:
        experts = (f"{prefix}.experts.{expert}" for expert in range(self.experts))
        return MoeModules(
            router=f"{prefix}.gate",
            router_bias=f"{prefix}.gate.e_score_correction_bias",
            experts=tuple(map(MlpModules.under, experts)),
            shared=MlpModules.under(f"{prefix}.shared_experts") if self.shared_experts else None,
        )

    def mtp_modules(self, layer: int) -> MtpModules:
        """Modules around the decoder layer of one MTP layer."""
        prefix = f"{_LAYERS_PREFIX}{layer}"
        return MtpModules(
            embedding=f"{prefix}.embed_tokens",
            embedding_norm=f"{prefix}.enorm",
            hidden_norm=f"{prefix}.hnorm",
            projection=f"{prefix}.eh_proj",
            head_norm=f"{prefix}.shared_head.norm",
            head=f"{prefix}.shared_head.head",
        )

    def mtp_layer_of(self, name: str) -> int | None:
        """Return the MTP layer that a tensor name belongs to, None for the main model's."""
        if not name.startswith(_LAYERS_PREFIX):
            return None
        digits = name.removeprefix(_LAYERS_PREFIX).partition(".")[0]
        return self._mtp_layer_of_digits.get(digits)

    @cached_property
    def _mtp_layer_of_digits(self) -> dict[str, int]:
        return {str(layer): layer for layer in self.mtp_layers}

    @cached_property
    def vocab(self) -> int:
        """Rows of embedding and head."""
        return self._size("vocab_size")

    @cached_property
    def hidden(self) -> int:
        """Elements of a hidden state."""
        return self._size("hidden_size")

    @cached_property
    def _dense_layers(self) -> int:
        return self._size("first_k_dense_replace", minimum=0)

    def _size(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        return self.fields.whole(key, default, minimum=minimum)

    def _all(self) -> Iterator[TensorSpec]:
        hidden, names = self.hidden, self.modules
        yield self._table(names.embedding, Role.EMBEDDING, None)
        yield self._norm(names.norm, hidden, None)
        yield self._table(names.head, Role.HEAD, None)
        for layer in range(self.num_hidden_layers):
            yield from self._layer(layer, None)
        for layer in self.mtp_layers:
            yield from self._layer(layer, layer)
            yield from self._mtp_extras(self.mtp_modules(layer), layer)

    def _layer(self, layer: int, mtp: int | None) -> Iterator[TensorSpec]:
        names, hidden = self.layer_modules(layer), self.hidden
        yield self._norm(names.input_norm, hidden, mtp)
        yield self._norm(names.post_norm, hidden, mtp)
        yield from self.attention_tensors(layer, mtp)
        if isinstance(names.feed_forward, MoeModules):
            yield from self._moe(names.feed_forward, mtp)
        else:
            size = self._size("intermediate_size")
            yield from self._mlps([names.feed_forward], size, Role.DENSE_MLP, mtp)

    def _mlps(
        self, all_names: Iterable[MlpModules], size: int, role: Role, mtp: int | None
    ) -> Iterator[TensorSpec]:
        inward, outward = (size, self.hidden), (self.hidden, size)
        names = [weight_name(module) for gate_up_down in all_names for module in gate_up_down]
        return rows_of(  # as many as 46,000
            TensorSpec,
            name=names,
            shape=cycle((inward, inward, outward)),
            dtypes=repeat((self.dtype,)),
            role=repeat(role),
            mtp_layer=repeat(mtp),
        )

    def _moe(self, names: MoeModules, mtp: int | None) -> Iterator[TensorSpec]:
        experts, size = len(names.experts), self._size("moe_intermediate_size")
        kept = tuple(dict.fromkeys((self.dtype, "F32")))
        shape = (experts, self.hidden)
        yield TensorSpec(
            weight_name(names.router), shape, dtypes=kept, role=Role.ROUTER, mtp_layer=mtp
        )
        if self.router.method == "noaux_tc":
            yield TensorSpec(
                names.router_bias, (experts,), dtypes=kept[::-1], role=Role.ROUTER, mtp_layer=mtp
            )
        if names.shared is not None:
            width = size * self.shared_experts
            yield from self._mlps([names.shared], width, Role.SHARED_EXPERT, mtp)
        yield from self._mlps(names.experts, size, Role.ROUTED_EXPERT, mtp)

    def _mtp_extras(self, names: MtpModules, layer: int) -> Iterator[TensorSpec]:
        hidden = self.hidden
        for norm in (names.embedding_norm, names.hidden_norm, names.head_norm):
            yield self._norm(norm, hidden, layer)
        yield TensorSpec(
            weight_name(names.projection),
            (hidden, 2 * hidden),
            dtypes=(self.dtype,),
            role=Role.MTP_PROJECTION,
            mtp_layer=layer,
        )
        for module, role in ((names.embedding, Role.EMBEDDING), (names.head, Role.HEAD)):
            yield self._table(module, role, layer)

    def _table(self, module: str, role: Role, mtp: int | None) -> TensorSpec:
        """Embedding or head; an MTP layer may be without its own."""
        shape = (self.vocab, self.hidden)
        return TensorSpec(
            weight_name(module),
            shape,
            dtypes=(self.dtype,),
            role=role,
            mtp_layer=mtp,
            optional=mtp is not None,
        )

    def _norm(self, module: str, size: int, mtp: int | None) -> TensorSpec:
        dtypes = tuple(dict.fromkeys((self.dtype, "F32")))
        return TensorSpec(f"{module}.weight", (size,), dtypes=dtypes, role=Role.NORM, mtp_layer=mtp)

    def _linear(
        self, module: str, shape: tuple[int, int], role: Role, mtp: int | None
    ) -> TensorSpec:
        return TensorSpec(
            weight_name(module), shape, dtypes=(self.dtype,), role=role, mtp_layer=mtp
        )
