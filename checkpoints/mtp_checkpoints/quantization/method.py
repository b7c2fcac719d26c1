"""Quantization methods: how the config of a quant_method is read, changed and written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import LINEAR_ROLES, Role, TensorSpec
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.formats import (
    CODES_PER_WORD,
    FORMATS,
    WHOLE_ROW,
    FormatOptions,
    Fp8Block,
    Unquantized,
    WeightFormat,
)
from mtp_checkpoints.formats.base import COMPRESSED_SCALE, NATIVE_SCALE, SCALES_OF_CODES
from mtp_checkpoints.quantization.native import Config, NativeFp8, unusable_field


class QuantConfig(Protocol):
    """A quantization_config that was understood.

    loads_together: its engines load some linears as one matrix, which must not differ.
    """

    @property
    def loads_together(self) -> bool: ...

    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        """Return the format of a linear by its module name; None for an unquantized one."""

    def fused_format(self, fused: str, parts: WeightFormat) -> WeightFormat | None:
        """Return the format that an engine takes a fused linear for, whose parts have one format.

        Routed experts are looked up one by one, never fused.
        """


@dataclass(frozen=True)
class Unfused:
    """A config in which fused linears have the format of their parts."""

    loads_together: ClassVar[bool] = True

    def fused_format(self, fused: str, parts: WeightFormat) -> WeightFormat | None:
        return parts


# Linears that releases leave unquantized and vLLM 0.32.0 builds by the config all the same, by the
# ends of their names: gates of Qwen's and Ling's delta nets, and Qwen4's indexer. Others
# of these roles are built plain, as `weights_proj` and the gates of GLM-5 Next. Source:
# `qwen_gdn_linear_attn.py`, `bailing_moe_v3.py`, `qwen4_exp/nvidia/indexer_qsa.py`.
_GATES = frozenset({Role.DELTA_GATES, Role.INDEXER_HEADS})
_BUILT_BY_CONFIG = (
    *(".linear_attn.in_proj_a", ".linear_attn.in_proj_b", ".linear_attn.in_proj_ba"),
    *(".attention.b_proj", ".attention.f_proj", ".indexer.index_qk_proj"),
)


def with_quantized_linears(
    family: ModelSpec, names: Collection[str], *, of_mtp: bool = False
) -> list[TensorSpec]:
    """Return a model's tensors, or those of its MTP layers alone, of which gates and projections
    that are stored with scales, and that an engine builds by the config, are linears.

    names: those of the tensors that a folder holds, none where that is not known.
    """
    there = names if isinstance(names, Set | Mapping) else {*names}
    lasts = [last for own in SCALES_OF_CODES.values() for last in own]
    classes = [getattr(family, engine) for engine in family.engines]
    has_projections = any(draft.projection is not None for draft in classes)
    return [
        spec._replace(role=Role.ATTENTION)
        if (
            (spec.role in _GATES and spec.module.endswith(_BUILT_BY_CONFIG))
            or (spec.role is Role.MTP_PROJECTION and has_projections)
        )
        and any(f"{spec.module}.{last}" in there for last in lasts)
        else spec
        for spec in (family.mtp_tensors if of_mtp else family.tensors).values()
    ]


def projections_of(family: ModelSpec) -> list[str]:
    """Return the projections of a model's MTP modules."""
    every = (module.modules.projection for module in family.mtp)
    return [projection for projection in every if projection is not None]


@dataclass(frozen=True)
class Dialect:
    """One way to describe integers to a loader.

    name is what the manifest records as the reader, title the engine's name in text. own_config:
    each folder's config.json may describe that folder alone, as it does where fp8 lies beside
    integers; else both say the same of both parts.
    native_fp8: fp8 beside integers stays in native blocks; else it becomes compressed-tensors too,
    with another scale name, and linears that attention absorbs stay in bf16.
    """

    name: str
    title: str
    own_config: bool
    native_fp8: bool


# Sources: vLLM and SGLang `quantization/compressed_tensors`.
VLLM = Dialect("vllm", "vLLM", own_config=False, native_fp8=False)
SGLANG = Dialect("sglang", "SGLang", own_config=True, native_fp8=True)


@dataclass(frozen=True, kw_only=True)
class PartStorage:
    """Storage of the linears of one part, main or MTP, that a config is written for.

    Roles without one stay as stored, the head's among them unless it is asked for. bf16_modules are
    linears (last name component) that are bf16 whatever others are. native is an fp8
    source's format: what its release left out of fp8 stays as stored.
    """

    storages: Mapping[Role, str]
    options: FormatOptions = FormatOptions()
    bf16_modules: tuple[str, ...] = ()
    int4_activations_fp8: bool = False
    native: NativeFp8 | None = None

    def storage_of(self, spec: TensorSpec) -> str | None:
        """Return the storage of a weight; None for one that stays as stored whatever that is."""
        storage = self.storages.get(spec.role)
        if storage is None or len(spec.shape) != 2:
            return None
        if spec.role not in LINEAR_ROLES:  # no release has it in fp8, nor lists it for that reason
            return storage
        if self.native is not None and not self.native.covers(spec.module):
            return None
        in_bf16 = spec.module.rpartition(".")[2] in self.bf16_modules
        return Unquantized.storage if in_bf16 else storage

    @property
    def quantized_roles(self) -> frozenset[Role]:
        """Roles of the linears that are quantized."""
        plain = Unquantized.storage
        return frozenset(role for role, storage in self.storages.items() if storage != plain)

    def group(self, storage: str) -> Config:
        """Return the compressed-tensors group of a storage, but for its targets."""
        chosen = FORMATS[storage].of_options(self.options)
        return chosen.group(activations_fp8=self.int4_activations_fp8)


@dataclass(frozen=True)
class WrittenModel:
    """A model whose parts a config is to describe, for loaders of one dialect; quantization is the
    config of its source, native what it says of native fp8."""

    family: ModelSpec
    quantization: object
    native: NativeFp8 | None
    main: PartStorage
    mtp: PartStorage
    dialect: Dialect

    @property
    def storages(self) -> frozenset[str]:
        """Storages of both parts' linears."""
        return frozenset((*self.main.storages.values(), *self.mtp.storages.values()))

    def check_nothing_left_out(self, option: str) -> None:
        """Refuse a source with single linears in bf16, for which a config has no field
        (UnsupportedError)."""
        native = self.native
        if native is not None and native.left_out:
            raise UnsupportedError(
                f"{option} cannot leave single linears in bf16, as this checkpoint does",
                expected="an fp8 checkpoint without modules_to_not_convert",
                found=", ".join(native.left_out[:3]),
                todo=f"Use --format compressed-tensors --target {VLLM.name}",
            )

    def check_no_plain_matrices(self, option: str) -> None:
        """Refuse a model with matrices that a list must keep in bf16, for which a config has no
        field (UnsupportedError)."""
        plain = self.family.plain_matrices
        if plain:
            raise UnsupportedError(
                f"{option} cannot leave matrices unquantized that this model keeps so",
                expected="a model whose gates and projections engines build plain",
                found=f"{plain[0]} ({len(plain) - 1} more)",
                todo=f"Use --format compressed-tensors --target {VLLM.name}",
            )


@dataclass(frozen=True)
class ZeroLabels:
    """The field of a config that says how qzeros hold zero points, and its values for those that
    are stored less one and for those stored as they are."""

    field: str
    less_one: str
    as_they_are: str

    def value(self, *, less_one: bool) -> str:
        return self.less_one if less_one else self.as_they_are


@dataclass(frozen=True)
class Method:
    """One quant_method.

    read understands a config. leave_out returns one that leaves modules unquantized, with all below
    them; None where the method cannot. key_of returns the name that one of its lists has in a
    config of another form, where there is one. describe returns one that describes a quantized
    draft too, whose linears are in `describes`. write returns the config of a converted model, None
    for one without quantized linears. dialect is that of the only engine with the method.
    absent_key: where this field lists nothing, loaders find unquantized linears by their tensors.
    coded_by: they do so whatever is listed, by these last names, of which a quantized matrix has
    one beside it. zero_labels: how a config labels zero points, where it does. whole_names: they
    compare names of linears, not of modules above them. experts_as_one: they ask for all experts of
    a layer by one name. packs_projections: they take those of MTP modules in codes too. in_groups:
    fp8 has compressed-tensors' name for scales.
    """

    read: Callable[[Mapping[str, Any]], QuantConfig]
    leave_out: Callable[[Config, Sequence[str]], Config] | None = None
    key_of: Callable[[Config, str], str] | None = None
    describe: Callable[[Config, ModelSpec, PartStorage], Config] | None = None
    describes: frozenset[str] = frozenset()
    write: Callable[[WrittenModel], Config | None] | None = None
    dialect: Dialect | None = None
    absent_key: str = ""
    coded_by: tuple[str, ...] = ()
    zero_labels: ZeroLabels | None = None
    whole_names: bool = False
    experts_as_one: bool = False
    packs_projections: bool = False
    in_groups: bool = False

    def draft_storages(self, dialect: Dialect) -> frozenset[str]:
        """Return the storages of a draft's linears that a main model's config can describe."""
        in_native_blocks = self.in_groups and dialect.native_fp8
        return self.describes - {Fp8Block.storage} if in_native_blocks else self.describes

    @property
    def fp8_scale_name(self) -> str:
        """Last component of an fp8 scale's name."""
        return COMPRESSED_SCALE if self.in_groups else NATIVE_SCALE


def modules_of(specs: Iterable[TensorSpec]) -> list[str]:
    """Return the modules of linears; a layer's experts as one name."""
    parts = (spec.module.partition(".mlp.experts.") for spec in specs)
    return list(dict.fromkeys(layer + experts.rstrip(".") for layer, experts, _ in parts))


def names_in(quantization: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of module names or patterns; none where it is absent (InvalidInputError)."""
    listed = quantization.get(key) or []
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise unusable_field(key, "a list of module names", listed)
    return listed


def number_of(quantization: Mapping[str, Any], *keys: str) -> int:
    """Return the whole number under the first of the keys that is there (InvalidInputError)."""
    key = next((key for key in keys if key in quantization), keys[0])
    actual = quantization.get(key)
    if type(actual) is not int:
        raise unusable_field(key, "a whole number", actual)
    return actual


def group_size(quantization: Mapping[str, Any], *keys: str) -> int:
    """Return the input channels per scale, -1 for all (UnsupportedError for a broken word)."""
    size = number_of(quantization, *keys)
    if size != WHOLE_ROW and (size <= 0 or size % CODES_PER_WORD):
        raise UnsupportedError(
            "config.json has groups of a size that this tool does not read",
            expected=f"a multiple of {CODES_PER_WORD}, or {WHOLE_ROW}",
            found=size,
        )
    return size
