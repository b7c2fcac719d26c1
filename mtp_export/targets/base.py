"""What a target engine reads as the draft: names, config fields and precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """One layout of the draft (MTP) folder; the main folder keeps the source's layout.

    mtp_name maps a source tensor or module name of an MTP layer to the target's.
    mtp_config maps the source's config.json to the draft's.
    engines are further engines that read the same layout; their names are aliases of it.
    needs_shared_weights: the engine takes embedding and head from the draft folder.
    mtp_schemes: the precision schemes in which the engine reads the draft; None for all.
    dequantizes: fp8 weights become bf16. transposes: linear weights and scales are [in, out].
    """

    name: str
    engines: tuple[str, ...]
    mtp_name: Callable[[str, int], str]
    mtp_config: Callable[[Mapping[str, Any]], Config]
    needs_shared_weights: bool = False
    dequantizes: bool = False
    transposes: bool = False
    single_mtp_layer: bool = True
    mtp_schemes: frozenset[str] | None = frozenset({"bf16", "a8w8_fp8"})


def rename_unconverted(config: Config, rename: Callable[[str], str]) -> None:
    """Apply a renaming to the modules that quantization_config leaves out, in place."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return
    quantization = dict(quantization)
    for key in ("modules_to_not_convert", "ignored_layers"):
        if quantization.get(key):
            quantization[key] = [rename(name) for name in quantization[key]]
    config["quantization_config"] = quantization


def single_layer_config(
    config: Mapping[str, Any], mtp_name: Callable[[str, int], str], **changes: object
) -> Config:
    """The config of a draft whose one decoder layer is layer 0, a MoE layer."""
    layer = config["num_hidden_layers"]
    result = {
        **config,
        "num_hidden_layers": 1,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 0,
        **changes,
    }
    prefix = f"model.layers.{layer}."
    rename_unconverted(
        result, lambda name: mtp_name(name, layer) if name.startswith(prefix) else name
    )
    return result
