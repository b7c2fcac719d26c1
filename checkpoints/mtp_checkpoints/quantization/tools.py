"""Tools that quantize or merge checkpoints, told by what they leave in a folder, and what each is
known to do with MTP modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.quantization.native import COMPRESSED, is_mlx, quantization_of

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Tool:
    """A tool that wrote a checkpoint; version "" where the checkpoint does not tell. library: the
    one whose version it is, "" for the tool's own."""

    name: str
    version: str = ""
    library: str = ""

    def __str__(self) -> str:
        if self.library and self.version:
            return f"{self.name} ({self.library} {self.version})"
        return f"{self.name} {self.version}".rstrip()


@dataclass(frozen=True)
class Loss:
    """Loss of MTP modules by a tool, in the versions that were run, as checkpoints have them, and
    the name of these versions: docs/tools.md."""

    versions: tuple[str, ...]
    shown: str


_MERGE = "mergekit_config.yml"  # which mergekit writes beside the tensors

# llm-compressor leaves compressed-tensors' version alone: 0.19.0 is what its 0.14.0.1 asks for.
LOSSES: dict[str, Loss] = {
    "llm-compressor": Loss(("0.19.0", "0.20.0"), "0.14"),
    "GPTQModel": Loss(("7.7.0",), "7.7"),
    "ModelOpt": Loss(("0.47.0",), "0.47"),
}


def known_loss(tool: Tool) -> str:
    """Return what a tool in this version is known to do with MTP modules; "" for nothing known."""
    loss = LOSSES.get(tool.name)
    if loss is None or tool.version not in loss.versions:
        return ""
    return (
        f"{tool.name} {loss.shown} saves no MTP layer of models that transformers loads without it,"
        " and ends with exit code 0"
    )


def tool_of(config: Config, files: Collection[str]) -> Tool | None:
    """Return the tool that config.json and the names of files tell; None for a release as it was
    trained, or a tool that leaves no sign."""
    quantization = quantization_of(config)
    if is_mlx(config):
        return Tool("mlx-lm")
    if not isinstance(quantization, Mapping):
        return Tool("mergekit") if _MERGE in files else None
    method = str(quantization.get("quant_method") or "")
    reader = _TOOLS.get(method.replace("_", "-").lower())
    return None if reader is None else reader(quantization, files)


def _text(quantization: Config, key: str) -> str:
    value = quantization.get(key)
    return value if isinstance(value, str) else ""


def _compressed(quantization: Config, files: Collection[str]) -> Tool:
    version = _text(quantization, "version")
    if "recipe.yaml" in files:
        return Tool("llm-compressor", version, library=COMPRESSED)
    return Tool(COMPRESSED, version)


def _auto_round(quantization: Config, files: Collection[str]) -> Tool:
    return Tool("AutoRound", _text(quantization, "autoround_version"))


def _integers(name: str) -> Callable[[Config, Collection[str]], Tool]:
    """Return the reader of a layout that several tools write, by default one called `name`."""

    def read(quantization: Config, files: Collection[str]) -> Tool:
        if "autoround_version" in quantization:
            return _auto_round(quantization, files)
        meta = quantization.get("meta")
        writers = meta.get("quantizer") if isinstance(meta, Mapping) else None
        written = writers[0] if isinstance(writers, list) and writers else writers
        if isinstance(written, str):
            tool, _, version = written.partition(":")
            return Tool("GPTQModel" if tool == "gptqmodel" else tool, version)
        return Tool(name)

    return read


def _modelopt(quantization: Config, files: Collection[str]) -> Tool:
    producer = quantization.get("producer")
    version = producer.get("version") if isinstance(producer, Mapping) else None
    return Tool("ModelOpt", version if isinstance(version, str) else "")


def _named(name: str, *keys: str) -> Callable[[Config, Collection[str]], Tool]:
    """Return the reader of a method that one tool alone writes, its version under one of keys."""

    def read(quantization: Config, files: Collection[str]) -> Tool:
        return Tool(name, next(filter(None, (_text(quantization, key) for key in keys)), ""))

    return read


# By quant_method. Native fp8 is how models are released: it tells no tool.
_TOOLS: dict[str, Callable[[Config, Collection[str]], Tool]] = {
    COMPRESSED: _compressed,
    "auto-round": _auto_round,
    "gptq": _integers("GPTQ"),
    "awq": _integers("AutoAWQ"),
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt,
    "quark": _named("Quark", "version", "quark_version"),
    "bitsandbytes": _named("bitsandbytes", "version"),
    "torchao": _named("torchao", "version"),
    "hqq": _named("HQQ"),
    "fbgemm-fp8": _named("FBGEMM"),
    "mxfp4": _named("MXFP4"),
}
