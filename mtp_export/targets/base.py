"""What a target engine reads as the draft: names, config fields and precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from mtp_export.errors import InvalidInputError

Config = dict[str, Any]


@dataclass(frozen=True)
class Deployment:
    """A finished bundle as an engine is started on it; schemes are the parts' by name."""

    output_dir: Path
    base_scheme: str
    mtp_scheme: str

    @property
    def main(self) -> str:
        """The main folder, quoted for a shell."""
        return quote(str(self.folder("main")))

    @property
    def mtp(self) -> str:
        """The MTP folder, quoted for a shell."""
        return quote(str(self.folder("mtp")))

    def folder(self, part: str) -> Path:
        """A part's folder, absolute where a shell would take it for an option."""
        folder = self.output_dir / part
        return folder.absolute() if str(folder).startswith("-") else folder


Launch = Callable[[Deployment], str]


@dataclass(frozen=True)
class Target:
    """One layout of the draft (MTP) folder; the main folder keeps the source's layout.

    mtp_name maps a source tensor or module name of an MTP layer to the target's.
    mtp_config maps the source's config.json to the draft's; released_config maps a draft's back,
    as far as tensors go, given the main model's num_hidden_layers.
    engines are further engines that read the same layout; their names are aliases of it.
    needs_shared_weights: the engine takes embedding and head from the draft folder.
    integer_options: the names of --target, of this layout or its engines, that read int4 and int8.
    mtp_schemes: the precision schemes in which the engine reads the draft; None for all.
    launch: per engine that takes the MTP part as a folder of its own, the shell command that serves
    a bundle with one draft token.
    dequantizes: fp8 weights become bf16. transposes: linear weights and scales are [in, out].
    """

    name: str
    engines: tuple[str, ...]
    mtp_name: Callable[[str, int], str]
    mtp_config: Callable[[Mapping[str, Any]], Config]
    released_config: Callable[[Mapping[str, Any], int], Config]
    needs_shared_weights: bool = False
    dequantizes: bool = False
    transposes: bool = False
    single_mtp_layer: bool = True
    integer_options: tuple[str, ...] = ()
    mtp_schemes: frozenset[str] | None = frozenset({"bf16", "a8w8_fp8"})
    launch: Mapping[str, Launch] = field(default_factory=dict)


def single_layer_config(
    config: Mapping[str, Any], mtp_name: Callable[[str, int], str], **changes: object
) -> Config:
    """The config of a draft whose one decoder layer is layer 0, a MoE layer."""
    result = {
        **config,
        "num_hidden_layers": 1,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 0,
        **changes,
    }
    quantization = result.get("quantization_config")
    if isinstance(quantization, dict):
        layer = config["num_hidden_layers"]
        result["quantization_config"] = quantization | {
            key: _renamed_modules(quantization[key], mtp_name, layer)
            for key in ("modules_to_not_convert", "ignored_layers")
            if quantization.get(key)
        }
    return result


def released_from_single_layer(config: Mapping[str, Any], main_layers: int) -> Config:
    """The released config of a draft with one decoder layer (InvalidInputError for another)."""
    for key in ("num_hidden_layers", "num_nextn_predict_layers"):
        if config.get(key) != 1:
            raise InvalidInputError(
                f"config.json of the MTP folder has another {key} than its target reads",
                expected=1,
                found=repr(config.get(key))[:100],
                todo="Export the MTP part again",
            )
    return {**config, "num_hidden_layers": main_layers}


def _renamed_modules(
    modules: list[str], mtp_name: Callable[[str, int], str], layer: int
) -> list[str]:
    """Module names as the draft has them: the MTP layer's renamed, other layers' left out."""
    own = f"model.layers.{layer}"
    result: list[str] = []
    for module in modules:
        if module == own:
            result.append(mtp_name(f"{own}.mlp.weight", layer).removesuffix(".mlp.weight"))
        elif module.startswith(f"{own}."):
            result.append(mtp_name(f"{module}.weight", layer).removesuffix(".weight"))
        elif not module.startswith("model.layers."):
            result.append(module)
    return result
