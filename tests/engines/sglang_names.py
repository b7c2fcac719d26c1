"""Names that SGLang's own classes of drafts ask a quantization config for: `python sglang_names.py
JOB.json RESULT.json`.

The job names SGLang's wheel and, by name, a class with the config.json that it is built by. As in
sglang_families.py, but that the classes get a config: stand-ins of each kind that the job names.
Notes the linears and experts that are given it, those that are not, and what of the layer is
renamed in lists.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sglang_families as families
from sglang_modules import Finder

_LINEARS = ("ColumnParallelLinear", "ReplicatedLinear", "RowParallelLinear")
_JOINED = ("MergedColumnParallelLinear", "QKVParallelLinear")
_REAL = {f"{families._MODELS}.{name}" for name in ("mimo_v2", "mimo_v2_nextn", "qwen3_next_mtp")}
_given: dict[str, bool] = {}


def noting(make: Callable[..., Any]) -> Callable[..., Any]:
    """A class that notes the names that it is built by, and whether with a config."""

    def made(*arguments: Any, prefix: str = "", quant_config: Any = None, **more: Any) -> Any:
        _given[prefix] = quant_config is not None
        return make(*arguments, **more)

    return made


def prepare(finder: Finder) -> None:
    """Put stand-ins into SGLang's modules that note their names."""
    families.prepare(finder)
    linear = importlib.import_module("sglang.srt.layers.linear")
    for name in (*_LINEARS, *_JOINED):
        setattr(linear, name, noting(getattr(linear, name)))
    experts = importlib.import_module("sglang.srt.layers.moe.ep_moe.layer")
    experts.get_moe_impl_class = lambda _: _Experts
    importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer").FusedMoE = _Experts


class _Experts(families.Experts):
    """Experts that note their name."""

    def __init__(self, *, prefix: str = "", quant_config: Any = None, **more: Any) -> None:
        _given[prefix] = quant_config is not None
        super().__init__(**more)


class Quantization:
    """A quantization config that says its name alone."""

    is_checkpoint_nvfp4_serialized = True
    weight_block_size = None

    def __init__(self, name: str) -> None:
        self._name = name

    def get_name(self) -> str:
        return self._name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ()


def names_of(
    module: str, name: str, config: dict[str, Any], kind: str, renamed: list[str]
) -> dict[str, Any]:
    """The names that a class asks a kind of config for, and what it makes of names in lists."""
    _given.clear()
    own = getattr(importlib.import_module(f"{families._MODELS}.{module}"), name)
    model = families.config_of(config, {})
    more = {"draft_model_idx": 0} if module in families.NUMBERED else {}
    own(model, quant_config=Quantization(kind), **more)
    get = vars(own).get("get_hf_to_sglang_mapper")
    mapper = next(filter(None, (vars(c).get("hf_to_sglang_mapper") for c in own.__mro__)), None)
    if get is not None:
        mapper = own.get_hf_to_sglang_mapper(SimpleNamespace(**config))
    return {
        "asked": sorted(name for name, quantized in _given.items() if quantized),
        "plain": sorted(name for name, quantized in _given.items() if not quantized),
        "renamed": renamed if mapper is None else mapper.apply_list(renamed),
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    finder = Finder(Path(job.pop("wheel")), families._REAL | _REAL)
    prepare(finder)
    result = {key: names_of(**asked) for key, asked in job.items()}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
