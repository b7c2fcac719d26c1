"""Description of a model: its layers by their parts, and the names of what is around them.

It follows from config.json alone. Export, quantization and verification take its tensors from it;
the runtime walks its parts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, TypeVar

from mtp_checkpoints.families.base import (
    ModulePatterns,
    Role,
    SharedTensor,
    TensorMaker,
    TensorSpec,
    linears_by_role,
    weight_name,
)
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_USUAL, VLLM_USUAL, EngineDraft
from mtp_checkpoints.families.facts import ModelFacts
from mtp_checkpoints.families.layer_halves import Attention, FeedForward
from mtp_checkpoints.families.parts.feed_forward import DENSE, Moe
from mtp_checkpoints.families.parts.listed import Entry, Listed, matrix

_LINEARS = {
    Role.DENSE_MLP: DENSE,
    Role.SHARED_EXPERT: "mlp.shared_experts.*",
    Role.ROUTED_EXPERT: "mlp.experts.*",
}
PLAIN_HEADS = ("lm_head", "re:.*shared_head.*")
"""Entries of a config that leave out the heads."""
_PLAIN_ROLES = (
    *(Role.ROUTER, Role.DELTA_GATES, Role.CONVOLUTION, Role.HYPER_CONNECTION),
    *(Role.MTP_PROJECTION, Role.MTP_INPUT, Role.ATTENTION_GATES),
)
_PLAIN_APART = (Role.MTP_PROJECTION, Role.PER_LAYER_INPUT, Role.VOCABULARY)
_USUAL = ".eh_proj"  # of most MTP layers' projections
_OF_ONE_EXPERT = re.compile(r".*?\.experts(?=\.\d)", re.ASCII)
_FUSED: dict[tuple[str, ...], tuple[str, ...]] = {("gate_proj", "up_proj"): ("gate_up_proj",)}

Stored = TypeVar("Stored")


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer, main or MTP: its parts, and the names of its modules under a prefix.

    The name of a part is "" where its modules lie in the layer itself. norms are those of the
    stream; a layer that the runtime computes has one before each part, or after each where
    norms_after is True. It has no more than these: more are other tensors, by their names under the
    prefix.
    """

    prefix: str
    attention: Attention
    feed_forward: FeedForward
    attention_name: str = "self_attn"
    feed_forward_name: str = "mlp"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    more: tuple[Entry, ...] = ()
    norms_after: bool = False

    @property
    def input_norm(self) -> str:
        return f"{self.prefix}.{self.norms[0]}"

    @property
    def attention_prefix(self) -> str:
        return f"{self.prefix}.{self.attention_name}".rstrip(".")

    @property
    def post_norm(self) -> str:
        return f"{self.prefix}.{self.norms[-1]}"

    @property
    def feed_forward_prefix(self) -> str:
        return f"{self.prefix}.{self.feed_forward_name}".rstrip(".")

    def tensors(self, hidden: int, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield the tensors of a layer of a stream [T, hidden]."""
        for norm in self.norms:
            yield make.norm(f"{self.prefix}.{norm}", hidden)
        yield from self.attention.tensors(self.attention_prefix, make)
        yield from self.feed_forward.tensors(self.feed_forward_prefix, make)
        yield from (one.tensor(f"{self.prefix}.", make) for one in self.more)


class Input(StrEnum):
    """Half of what an MTP module's projection takes, both normed."""

    EMBEDDING = "embedding"  # of the next token
    HIDDEN = "hidden state"


class MtpModules(NamedTuple):
    """Modules that an MTP layer has around its decoder layer; embedding and head may be absent
    from a checkpoint, and are the main model's then, as they always are where they are None.

    projection is that of embedding and hidden state together, None where each has its own;
    head_norm is None in a module without a norm before its head.
    """

    embedding: str | None
    embedding_norm: str
    hidden_norm: str
    projection: str | None
    head_norm: str | None
    head: str | None

    @classmethod
    def under(cls, prefix: str) -> MtpModules:
        """Names as DeepSeek-V3 has them."""
        names = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm")
        return cls(*(f"{prefix}.{name}" for name in (*names, "shared_head.head")))

    @classmethod
    def with_last_norm(cls, prefix: str) -> MtpModules:
        """Names of several families: DeepSeek-V3's but for the last norm, and without copies."""
        return cls.without_copies(prefix, ("enorm", "hnorm", "eh_proj", "final_layernorm"))

    @classmethod
    def of_qwen(cls) -> MtpModules:
        """Names of several families that call the module mtp."""
        return cls.without_copies(
            "mtp", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        )

    @classmethod
    def without_copies(cls, prefix: str, names: tuple[str, str, str, str]) -> MtpModules:
        """Modules under a prefix: norms of embedding and hidden state, projection, last norm."""
        embedding_norm, hidden_norm, projection, head_norm = (f"{prefix}.{one}" for one in names)
        return cls(None, embedding_norm, hidden_norm, projection, head_norm, None)


@dataclass(frozen=True)
class MtpSpec:
    """One MTP layer; inputs are the halves of its projection's input, in the order of columns.

    prefix: that of all its modules' names, where it is not the decoder layer's. hidden_width: the
    size of the hidden state that it takes, where it is not the stream's. more: other tensors of
    its own, by their full names.
    """

    layer: LayerSpec
    modules: MtpModules
    inputs: tuple[Input, Input] = (Input.EMBEDDING, Input.HIDDEN)
    prefix: str = ""
    hidden_width: int | None = None
    more: tuple[Entry, ...] = ()

    @property
    def name(self) -> str:
        """Beginning of the names of its modules, where all have one."""
        return self.prefix or self.layer.prefix

    @property
    def own_head(self) -> str | None:
        """Module of its head that is no copy of the main model's."""
        return next((own.module for own in self.more if own.role is Role.OWN_HEAD), None)

    @property
    def names(self) -> tuple[str, ...]:
        """Beginnings of the names of all its modules."""
        own = f"{self.name}."
        modules = (*self.modules, *(entry.module for entry in self.more))
        others = (one for one in modules if one is not None)
        return (self.name, *dict.fromkeys(one for one in others if not one.startswith(own)))

    def tensors(self, facts: ModelFacts, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield the tensors of the layer, and of what is around it."""
        names, hidden = self.modules, facts.hidden
        yield from self.layer.tensors(hidden, make)
        yield make.norm(names.embedding_norm, hidden)
        yield make.norm(names.hidden_norm, self.hidden_width or hidden)
        if names.head_norm is not None:
            yield make.norm(names.head_norm, hidden)
        if names.projection is not None:
            yield make.matrix(names.projection, (hidden, 2 * hidden), Role.MTP_PROJECTION)
        yield from (one.tensor("", make) for one in self.more)
        for module, role in ((names.embedding, Role.EMBEDDING), (names.head, Role.HEAD)):
            if module is not None:
                yield make.matrix(module, (facts.vocab, hidden), role)._replace(optional=True)


@dataclass(frozen=True)
class ModelSpec:
    """Everything that a config.json says of a model but how its weights are stored.

    mtp_contract: inputs of the MTP modules, as config.json records them or else as is usual;
    usual_contract: as they were trained. mtp_names: names that engines have for the MTP layer
    besides its own; a config that names the layer must name it by each. norm is "" in a model
    without a last one, head the embedding where both are one tensor; head_rows: its rows where they
    are not the vocabulary. count_field: that of config.json which counts the MTP layers.
    mtp_prefix: that of their tensors, "" where they are the layers after the last. vllm, sglang:
    their classes of its drafts. quantized_fields: what config.json says beside a quantization by
    this tool. may_fuse: checkpoints store the experts of a layer one by one or fused. uncomputed:
    why the runtime does not compute a model though it has a layer for every part. engines: names of
    targets whose engines load its MTP layers, others of the released layout do not. drafts_apart:
    where the drafts of a model are that has no MTP layer, or which draft it is itself;
    draft_method: the drafting method of both, and name of the draft's folder in a bundle. more:
    other tensors of the main part, by their full names. carried: what names of tensors begin with
    that belong to the main part and are not described, such as those of a vision tower;
    carried_modules are those that are stored.
    """

    facts: ModelFacts
    layers: tuple[LayerSpec, ...]
    mtp: tuple[MtpSpec, ...]
    mtp_contract: MtpContract
    usual_contract: MtpContract
    mtp_names: tuple[str, ...]
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    head_rows: int = 0
    count_field: str = "num_nextn_predict_layers"
    mtp_prefix: str = ""
    vllm: EngineDraft = VLLM_USUAL
    sglang: EngineDraft = SGLANG_USUAL
    quantized_fields: tuple[tuple[str, str], ...] = ()
    may_fuse: bool = False
    uncomputed: str = ""
    drafts_apart: str = ""
    draft_method: str = ""
    engines: tuple[str, ...] = ("vllm", "sglang")
    more: tuple[Entry, ...] = ()
    carried: tuple[str, ...] = ()
    carried_modules: tuple[str, ...] = ()

    def as_stored(self, names: Collection[str]) -> ModelSpec:
        """Return the model with the experts of each layer fused or one by one, as tensors of these
        names have them; as is usual for a layer of which none is there. Of tensors that are carried
        it has the modules. Beside a tied embedding it has the head that is stored all the same."""
        if self.head == self.embedding and weight_name(PLAIN_HEADS[0]) in names:
            spare = matrix(PLAIN_HEADS[0], self.facts.vocab, self.facts.hidden, Role.HEAD)
            self = replace(self, more=(*self.more, spare))
        if self.carried:
            modules = (n.removesuffix(".weight") for n in names if n.endswith(".weight"))
            own = tuple(module for module in modules if self.carries(module))
            self = replace(self, carried_modules=own)
        if not self.may_fuse:
            return self
        apart = {found[0] for name in names if (found := _OF_ONE_EXPERT.match(name))}
        layers = tuple(_as_stored(layer, names, apart) for layer in self.layers)
        mtp = tuple(replace(m, layer=_as_stored(m.layer, names, apart)) for m in self.mtp)
        return replace(self, layers=layers, mtp=mtp)

    @property
    def plain_matrices(self) -> tuple[str, ...]:
        """Modules of matrices that are never quantized, and that engines build as linears unless a
        list names them; none where they build them plain."""
        listed = self.mtp_prefix or self.carried or any(isinstance(p, Listed) for p in self.parts)
        roles = {*_PLAIN_ROLES} if listed else {Role.ATTENTION_GATES}  # which all build as linears
        roles |= {*_PLAIN_APART} if self.drafts_apart else set()
        own = self._matrices(roles)
        names = (name for spec in own for name in self.names_of(spec.module, spec.mtp_layer))
        return (*names, *self.carried_modules)

    def _matrices(self, roles: Collection[Role]) -> Iterator[TensorSpec]:
        """Yield the weights of some roles that are matrices of modules."""
        some = (s for s in self.tensors.values() if s.role in roles and len(s.shape) > 1)
        return (spec for spec in some if spec.name == weight_name(spec.module))

    def names_of(self, module: str, mtp_layer: int | None) -> list[str]:
        """Return a module's name, and of an MTP layer's those that engines have."""
        if mtp_layer is None:
            return [module]
        layer = self.mtp[mtp_layer - len(self.layers)].layer.prefix
        others = [module.replace(f"{layer}.", f"{name}.") for name in self.mtp_names]
        return [*dict.fromkeys([module, *others, self.vllm.name_of([layer], module)])]

    def carries(self, name: str) -> bool:
        """Return whether a tensor belongs to the main part though it is not described."""
        return name.startswith(self.carried)

    def without_carried(self, tensors: Mapping[str, Stored]) -> Mapping[str, Stored]:
        """Return tensors by name without those that are carried."""
        kept = ((name, one) for name, one in tensors.items() if not self.carries(name))
        return dict(kept) if self.carried else tensors

    @property
    def mtp_layers(self) -> range:
        """Indices of the MTP layers, which follow the main ones; empty where there are none."""
        return range(len(self.layers), len(self.layers) + len(self.mtp))

    @cached_property
    def every_layer(self) -> tuple[LayerSpec, ...]:
        """Main layers, then the MTP modules'."""
        return (*self.layers, *(module.layer for module in self.mtp))

    @cached_property
    def parts(self) -> tuple[Attention | FeedForward, ...]:
        """Attentions and feed-forwards of all layers, equal ones once."""
        layers = self.every_layer
        parts = (part for layer in layers for part in (layer.attention, layer.feed_forward))
        return tuple(dict.fromkeys(parts))

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor that the config promises, main and MTP, by name."""
        return {spec.name: spec for spec in self._main()} | self.mtp_tensors

    @cached_property
    def mtp_tensors(self) -> dict[str, TensorSpec]:
        """Those of the MTP layers alone, a sixtieth of a large model's."""
        modules = zip(self.mtp_layers, self.mtp, strict=True)
        makers = ((TensorMaker(self.facts.dtype, number), module) for number, module in modules)
        own = (spec for make, module in makers for spec in module.tensors(self.facts, make))
        return {spec.name: spec for spec in own}

    def _main(self) -> Iterator[TensorSpec]:
        facts, make = self.facts, TensorMaker(self.facts.dtype)
        table = (facts.vocab, facts.hidden)
        yield make.matrix(self.embedding, table, Role.EMBEDDING)
        if self.norm:
            yield make.norm(self.norm, facts.hidden)
        if self.head != self.embedding:
            yield make.matrix(self.head, (self.head_rows or facts.vocab, facts.hidden), Role.HEAD)
        for layer in self.layers:
            yield from layer.tensors(facts.hidden, make)
        yield from (one.tensor("", make) for one in self.more)

    @property
    def shared(self) -> tuple[SharedTensor, ...]:
        """Pairs of the MTP layers' copies of embedding and head and the main model's own."""
        return tuple(
            SharedTensor(weight_name(local), weight_name(of_main))
            for mtp in self.mtp
            for local, of_main in (
                (mtp.modules.embedding, self.embedding),
                (mtp.modules.head, self.head),
            )
            if local is not None
        )

    @cached_property
    def patterns(self) -> ModulePatterns:
        """Module names as engines' quantization configs refer to them."""
        of_parts = [part.patterns for part in self.parts]
        kinds = list({id(patterns): patterns for patterns in of_parts}.values())
        every = _LINEARS | linears_by_role(kinds)
        linears = {role: self.vllm.pattern_of(own) for role, own in every.items()}
        others = (pattern for kind in kinds for pattern in kind.other_matrices)
        copied = [m.layer.prefix for m in self.mtp if m.modules.head is not None]
        # vLLM looks for the copy as the layer's `head`, and loads no codes of another name's head.
        heads = (PLAIN_HEADS[0], *(f"re:{prefix}.(shared_head.)?head$" for prefix in copied))
        return ModulePatterns(
            linears={role: linears[role] for role in Role if role in linears},
            heads=heads if self.head in (PLAIN_HEADS[0], self.embedding) else (),
            other_matrices=(*self._usual_matrices(), *dict.fromkeys(others)),
            fused=_FUSED | {parts: names for kind in kinds for parts, names in kind.fused.items()},
            absorbed=tuple(dict.fromkeys(name for kind in kinds for name in kind.absorbed)),
        )

    def _usual_matrices(self) -> Iterator[str]:
        """Yield names and patterns of matrices around layers that are not quantized, and of gates
        of experts."""
        head = {self.head} - {self.embedding}
        yield from dict.fromkeys((PLAIN_HEADS[0], *head, "re:.*mlp.gate$"))
        joint = ((m, m.modules.projection) for m in self.mtp)
        own = {name: None for m, name in joint if name and (m.prefix or not name.endswith(_USUAL))}
        if own and self.vllm.projection:
            own[self.vllm.projection] = None
        yield from (f"re:.*{projection}$" for projection in own)
        if not own:
            yield from ("re:.*eh_proj$", PLAIN_HEADS[1])
        yield "re:.*embed_tokens$"
        if self.drafts_apart:
            named = (s.module.rpartition(".")[2] for s in self._matrices(_PLAIN_APART))
            yield from dict.fromkeys(f"re:.*{name}$" for name in named)
        for prefix in self.carried:
            yield f"re:.*{prefix.rstrip('.').rpartition('.')[2]}[.].*"

    def mtp_layer_of(self, name: str) -> int | None:
        """Return the MTP layer that a tensor name belongs to, None for the main model's."""
        for prefix, layer in self._mtp_prefixes:
            if name.startswith(prefix):
                return layer
        return None

    @cached_property
    def _mtp_prefixes(self) -> list[tuple[str, int]]:
        modules = zip(self.mtp, self.mtp_layers, strict=True)
        return [(f"{name}.", layer) for module, layer in modules for name in module.names]


def _as_stored(layer: LayerSpec, names: Collection[str], apart: Collection[str]) -> LayerSpec:
    moe, prefix = layer.feed_forward, layer.feed_forward_prefix
    if isinstance(moe, Moe):
        return replace(layer, feed_forward=moe.as_stored(prefix, names, apart))
    return layer
