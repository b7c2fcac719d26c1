"""What a model family knows of its checkpoints: which tensors a config promises, and what each
is for. Names and shapes come from the config alone, so they can be held against the files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from mtp_export.errors import InvalidInputError, UnsupportedError

# A block scale has its weight's name and this; the released name says inverse, but it multiplies.
SCALE_SUFFIX = "_scale_inv"


class Role(StrEnum):
    """What a tensor is for; reports add up by it."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    ATTENTION = "attention"
    DENSE_MLP = "dense mlp"
    ROUTER = "router"
    SHARED_EXPERT = "shared expert"
    ROUTED_EXPERT = "routed expert"
    MTP_PROJECTION = "mtp projection"


# Roles whose matrices engines read quantized; all else stays as released.
LINEAR_ROLES = (Role.ATTENTION, Role.DENSE_MLP, Role.SHARED_EXPERT, Role.ROUTED_EXPERT)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor a config promises.

    module is the name without its last component. scale_of names the weight a scale belongs to.
    optional tensors may be absent (the MTP layer's own copies of embedding and head).
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    role: Role
    mtp_layer: int | None = None
    scale_of: str | None = None
    optional: bool = False

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def is_linear_weight(self) -> bool:
        """Whether it is a matrix that may be quantized."""
        return self.role in LINEAR_ROLES and self.scale_of is None and len(self.shape) == 2


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor of the MTP layer that the main model has as well."""

    mtp_name: str
    main_name: str


class HasLayout(Protocol):
    """A stored tensor, as far as comparing needs it."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class ModelFamily(Protocol):
    """A config, understood: built by FAMILIES[model_type](config)."""

    @property
    def dtype(self) -> str:
        """The safetensors dtype of weights that are not quantized."""

    @property
    def mtp_layers(self) -> range:
        """Indices of the MTP layers; empty when the config promises none."""

    @property
    def quantization(self) -> BlockFp8 | None:
        """How the checkpoint is quantized, None when it is not."""

    @property
    def expected(self) -> Mapping[str, TensorSpec]:
        """Every tensor that the config promises, main and MTP, by name."""

    @property
    def shared(self) -> tuple[SharedTensor, ...]:
        """The MTP layers' copies of embedding and head, beside the main model's."""

    def mtp_layer_of(self, name: str) -> int | None:
        """The MTP layer that a tensor name belongs to, None for the main model's."""


@dataclass(frozen=True)
class Discrepancy:
    """One way in which stored tensors differ from what a config promises."""

    tensor: str
    problem: str
    expected: str
    found: str

    def raise_as_error(self, where: object, more: int) -> None:
        """Raise it as InvalidInputError; `more` counts the others like it."""
        tail = f" ({more} more like this)" if more else ""
        raise InvalidInputError(
            f"Tensor {self.tensor}: {self.problem}{tail}",
            where=where,
            expected=self.expected,
            found=self.found,
            todo="Nothing was written. Get the checkpoint again, or correct config.json",
        )


def compare(stored: Mapping[str, HasLayout], expected: Iterable[TensorSpec]) -> list[Discrepancy]:
    """Every difference between stored tensors and the promised ones, in a stable order."""
    specs = {spec.name: spec for spec in expected}
    found = [
        problem
        for spec in specs.values()
        if (problem := _compare_one(stored, spec, specs)) is not None
    ]
    for name in stored:
        if name not in specs:
            found.append(_unexpected(name, stored))
    return found


def _compare_one(
    stored: Mapping[str, HasLayout], spec: TensorSpec, specs: Mapping[str, TensorSpec]
) -> Discrepancy | None:
    tensor = stored.get(spec.name)
    wanted = f"{' or '.join(spec.dtypes)} {list(spec.shape)}"
    if tensor is None:
        if spec.optional:
            return None
        problem = "missing"
        if spec.scale_of in stored:
            problem = f"missing, though its weight {spec.scale_of} is there"
        return Discrepancy(spec.name, problem, wanted, "no such tensor")
    actual = f"{tensor.dtype} {list(tensor.shape)}"
    if tensor.shape != spec.shape:
        return Discrepancy(spec.name, "wrong shape", wanted, actual)
    if tensor.dtype not in spec.dtypes:
        return Discrepancy(spec.name, "wrong dtype", wanted, actual)
    if spec.scale_of is not None and spec.scale_of not in stored:
        return Discrepancy(spec.name, "a scale without its weight", spec.scale_of, "no such tensor")
    return None


def _unexpected(name: str, stored: Mapping[str, HasLayout]) -> Discrepancy:
    tensor = stored[name]
    problem = "not a tensor of this model by its config.json"
    weight = name.removesuffix(SCALE_SUFFIX)
    if weight != name and weight not in stored:
        problem = f"a scale without its weight ({weight} is not there)"
    return Discrepancy(name, problem, "no such tensor", f"{tensor.dtype} {list(tensor.shape)}")


def config_int(
    config: Mapping[str, Any],
    key: str,
    default: int | None = None,
    *,
    least: int = 1,
    most: int = 10_000_000,
) -> int:
    """A whole number within bounds out of config.json (InvalidInputError for anything else)."""
    value = config.get(key, default)
    if type(value) is not int or not least <= value <= most:
        raise InvalidInputError(
            f"config.json has no usable {key}",
            expected=f"a whole number from {least} to {most}",
            found=repr(value)[:100],
            todo="Correct config.json, or get it again from the checkpoint's source",
        )
    return value


@dataclass(frozen=True)
class BlockFp8:
    """Native fp8 weights with a scale per block, as config.json's quantization_config says it."""

    block: tuple[int, int]
    scale_dtypes: tuple[str, ...]
    unconverted: tuple[str, ...]

    def covers(self, module: str) -> bool:
        """Whether a linear is stored in fp8 (not listed as left out)."""
        return not any(
            module == name or module.startswith(f"{name}.") or module.endswith(f".{name}")
            for name in self.unconverted
        )


def block_fp8(config: Mapping[str, Any]) -> BlockFp8 | None:
    """The fp8 block format of a checkpoint, None when it is not quantized.

    Raises UnsupportedError for any other quantization.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    if not isinstance(quantization, dict):
        raise InvalidInputError(
            "config.json has no usable quantization_config",
            expected="an object, or none",
            found=repr(quantization)[:100],
        )
    block = quantization.get("weight_block_size")
    method, fmt = quantization.get("quant_method"), quantization.get("fmt", "e4m3")
    if method != "fp8" or fmt != "e4m3" or block != [128, 128]:
        raise UnsupportedError(
            "The checkpoint is quantized in a way that this tool does not read",
            expected="no quantization, or quant_method fp8, fmt e4m3, weight_block_size [128, 128]",
            found=f"quant_method {method}, fmt {fmt}, weight_block_size {block}",
            todo="Start from the original checkpoint",
        )
    scale_dtypes = ("F32", "F8_E8M0") if quantization.get("scale_fmt") == "ue8m0" else ("F32",)
    return BlockFp8((block[0], block[1]), scale_dtypes, left_out_of_fp8(quantization))


def left_out_of_fp8(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that a quantization_config lists as not converted (InvalidInputError for no
    list of names)."""
    names: list[str] = []
    for key in ("modules_to_not_convert", "ignored_layers"):
        listed = quantization.get(key) or []
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise InvalidInputError(
                f"config.json has no usable quantization_config.{key}",
                expected="a list of module names",
                found=repr(listed)[:100],
            )
        names += listed
    return tuple(names)
