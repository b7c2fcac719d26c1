"""config.json's quantization_config: access to the field, and the native fp8 of released models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.containers.base import COMPRESSION, QUANTIZATION, quantization_field
from mtp_checkpoints.dtypes import SCALE_DTYPES, WIDE_SCALE_DTYPES, DType
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.formats.base import BLOCK
from mtp_checkpoints.formats.ggml_blocks import GGUF
from mtp_checkpoints.quantization.undecoded import MLX_METHOD

Config = dict[str, Any]

DTYPE_KEYS = ("torch_dtype", "dtype")  # of config.json: that of unquantized tensors
COMPRESSED = "compressed-tensors"  # a quant_method
MLX = "quantization"  # the field in which mlx-lm has what others have in quantization_config
QUANTIZATION_FIELDS = frozenset({QUANTIZATION, COMPRESSION, MLX})


class OlderConfig(Config):
    """A quantization_config by its older name, which is said of it too."""


# Keys of others that have a group_size too, of which quant_method may be lost.
_OTHERS = frozenset(
    {"quant_method", "desc_act", "sym", "zero_point", "quant_algo", "checkpoint_format"}
)
_OF_MODELOPT = frozenset({"quant_algo", "quantization", "producer"})
NATIVE_FP8: Config = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
}
# Lists of modules that are not quantized; engines differ in which of the two they read.
_LEFT_OUT_KEYS = ("modules_to_not_convert", "ignored_layers")


def quantization_of(config: Mapping[str, Any]) -> Any:
    """Return a config.json's quantization_config by any of its names, of MLX that of its own field;
    None where it has none."""
    if config.get(MLX) and is_mlx(config):
        return config[MLX]
    found = config.get(field := quantization_field(config))
    return OlderConfig(found) if field == COMPRESSION and isinstance(found, dict) else found


def field_of(quantization: object) -> str:
    """Return the name of a quantization_config that quantization_of returned."""
    return COMPRESSION if isinstance(quantization, OlderConfig) else QUANTIZATION


def method_of(quantization: object) -> str:
    """Return the name of the method of a quantization_config as vLLM takes it, "" where it has
    none."""
    if not isinstance(quantization, Mapping):
        return ""
    if is_mlx({QUANTIZATION: quantization}):
        return MLX_METHOD
    method = str(quantization.get("quant_method") or "").lower()
    return method.replace("compressed_tensors", COMPRESSED)


def lacks_method(quantization: object) -> bool:
    """Return whether a quantization_config names no method, and is none that engines know without:
    MLX's or ModelOpt's."""
    if not isinstance(quantization, Mapping) or not quantization or method_of(quantization):
        return False
    return _OF_MODELOPT.isdisjoint(quantization)


def is_mlx(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes MLX's groups, which name no method."""
    kept = config.get(MLX) or quantization_of(config)  # mlx-lm writes both
    return isinstance(kept, Mapping) and "group_size" in kept and _OTHERS.isdisjoint(kept)


def is_gguf(quantization: object) -> bool:
    """Return whether a quantization_config is that of a GGUF file, which the element types of its
    tensors made: no engine reads a config for it."""
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == GGUF


def with_quantization(config: Mapping[str, Any], quantization: Any) -> Config:
    """Return a config.json with another quantization_config, of MLX in both its fields; None takes
    it out.

    It becomes the last field, by the name that it had; by the older one engines read
    compressed-tensors alone.
    """
    fields = QUANTIZATION_FIELDS if is_mlx(config) else QUANTIZATION_FIELDS - {MLX}
    rest = {key: value for key, value in config.items() if key not in fields}
    if method_of(quantization) == COMPRESSED:
        return {**rest, quantization_field(config): quantization}
    return rest if quantization is None else replaced_quantization(rest, quantization)


def replaced_quantization(config: Mapping[str, Any], quantization: object) -> Config:
    """Return a config.json with another quantization_config in the same place, or the last."""
    of_mlx = {MLX: quantization} if is_mlx({QUANTIZATION: quantization}) else {}
    return {**config, **of_mlx, quantization_field(config): quantization}


def describe(config: Mapping[str, Any]) -> str:
    """Return a config.json's quantization in a few words, for people; "none" without one."""
    quantization = quantization_of(config)
    if is_mlx(config):
        return "MLX affine"
    if not quantization:
        return "none"
    block = quantization.get("weight_block_size")
    fields = (
        quantization.get("quant_method"),
        quantization.get("fmt"),
        "×".join(map(str, block)) if isinstance(block, list) else None,
        quantization.get("scale_fmt"),
    )
    return " ".join(str(field) for field in fields if field)


@dataclass(frozen=True)
class NativeFp8:
    """Native fp8 weights with a scale per block, as a quantization_config describes them.

    left_out are the modules that it lists as not quantized.
    """

    scale_dtypes: tuple[DType, ...]
    left_out: tuple[str, ...]

    def covers(self, module: str) -> bool:
        """True for a linear that is stored in fp8."""
        return not any(f".{name}." in f".{module}." for name in self.left_out)


# Keys that tell native fp8 from another quantization.
_TELLING = ("quant_method", "fmt", "weight_block_size")


def native_fp8(quantization: object) -> NativeFp8 | None:
    """Read the quantization_config of a released checkpoint; None when it is not quantized.

    Raises UnsupportedError for any other quantization, InvalidInputError for one that makes no
    sense.
    """
    if not quantization:
        return None
    if not isinstance(quantization, dict):
        raise not_an_object(quantization)
    if is_gguf(quantization):
        raise UnsupportedError(
            "Nothing is exported or quantized from GGUF files",
            expected="the checkpoint that they were made from",
            found="a GGUF file",
            todo="Start from the original checkpoint",
        )
    block = quantization.get("weight_block_size")
    method, fmt = method_of(quantization), quantization.get("fmt", "e4m3")
    if method != "fp8" or fmt != "e4m3" or block != [BLOCK, BLOCK]:
        raise UnsupportedError(
            "The checkpoint is quantized in a way that this tool does not read",
            expected="no quantization, quant_method fp8 with fmt e4m3 and weight_block_size"
            " [128, 128], or compressed-tensors in fp8 alone, with a scale per channel or"
            " block",
            found=", ".join(f"{key} {quantization[key]}" for key in _TELLING if key in quantization)
            or f"a {field_of(quantization)} without quant_method",
            todo="Start from the original checkpoint",
        )
    has_powers = quantization.get("scale_fmt") == "ue8m0"
    return NativeFp8(SCALE_DTYPES if has_powers else WIDE_SCALE_DTYPES, left_out(quantization))


def native_scheme(native: NativeFp8 | None) -> str:
    """Return the name of the precision scheme that a released checkpoint is in."""
    return "bf16" if native is None else "a8w8_fp8"


def left_out(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modules that a quantization_config lists as not quantized.

    Raises InvalidInputError for anything but lists of names.
    """
    names: list[str] = []
    for key in _LEFT_OUT_KEYS:
        listed = quantization.get(key) or []
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise unusable_field(key, "a list of module names", listed)
        names += listed
    return tuple(names)


def with_left_out(quantization: Mapping[str, Any], modules: list[str]) -> Config:
    """Return a quantization_config that lists further modules as not quantized."""
    if not modules:
        return dict(quantization)
    more = {key: [*(quantization.get(key) or []), *modules] for key in _LEFT_OUT_KEYS}
    return {**quantization, **more}


def with_renamed_modules(config: Mapping[str, Any], rename: Callable[[str], str | None]) -> Config:
    """Return a config.json whose lists of unquantized modules hold other names.

    rename returns None for a module to be taken off the list.
    """
    quantization = quantization_of(config)
    if not isinstance(quantization, dict):
        return dict(config)
    lists = {
        key: [name for module in quantization[key] if (name := rename(module)) is not None]
        for key in _LEFT_OUT_KEYS
        if quantization.get(key)
    }
    return {**config, quantization_field(config): {**quantization, **lists}}


def not_an_object(found: object) -> InvalidInputError:
    """Return the error of a quantization_config that is no JSON object."""
    return InvalidInputError(
        "config.json has no usable quantization_config",
        expected="an object, or none",
        found=repr(found)[:100],
    )


def unusable_field(
    key: str, expected: str, found: object, config: str = QUANTIZATION
) -> InvalidInputError:
    """Return the error of a field that makes no sense; config: the name of the one that has it."""
    return InvalidInputError(
        f"config.json has no usable {config}.{key}",
        expected=expected,
        found=repr(found)[:100],
    )
