"""Main models as Quark, bitsandbytes and mlx-lm name their parts, in numbers that are not decoded
here: none is one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from verify.foreign import GLM, GLM_MTP, Tensors, rewritten

LINEAR = re.compile(r"model\.layers\.\d+\..*_proj\.weight")


def clones(tensors: Tensors) -> list[tuple[str, torch.Tensor]]:
    return [(name, one.clone()) for name, one in tensors.items()]


def packed(codes: torch.dtype, **beside: torch.Tensor) -> Callable[[Tensors], Tensors]:
    """A change that leaves the MTP layer out, and packs linears as a tool names their parts."""

    def change(stored: Tensors) -> Tensors:
        main = {name: one for name, one in stored.items() if not name.startswith(GLM_MTP)}
        for name in [*filter(LINEAR.fullmatch, main)]:
            main[name] = torch.zeros(main[name].numel() // 2, 1).to(codes)
            main |= {name.removesuffix("weight") + key: one for key, one in clones(beside)}
        return main

    return change


def stacked(stored: Tensors) -> Tensors:
    """As mlx-lm has them, the embedding packed too."""
    main = packed(torch.uint32, scales=torch.ones(2, 2), biases=torch.ones(2, 2))(stored)
    embedding = main["model.embed_tokens.weight"]
    main["model.embed_tokens.weight"] = torch.zeros(len(embedding), 4).to(torch.uint32)
    return {name.replace(".experts.0.", ".switch_mlp."): one for name, one in main.items()}


MLX = {"group_size": 32, "bits": 4, "mode": "mxfp4", "lm_head": {"group_size": 64, "bits": 8}}
# By method: what it writes, and config.json's fields.
MAINS: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any]]] = {
    "quark": (
        packed(torch.float8_e4m3fn, weight_scale=torch.ones(1)),
        {
            "quantization_config": {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group"}},
                "layer_quant_config": {},
                "layer_type_quant_config": {},
                "export": {"kv_cache_group": [], "pack_method": "reorder"},
                "exclude": ["lm_head"],
            }
        },
    ),
    "bitsandbytes": (
        packed(torch.uint8, **{"weight.absmax": torch.ones(4), "weight.quant_map": torch.ones(16)}),
        {
            "quantization_config": {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_quant_storage": "bfloat16",
            }
        },
    ),
    "mlx": (stacked, {"quantization": MLX, "quantization_config": MLX}),
}


def write_main(method: str, folder: Path) -> Path:
    """The GLM miniature without its MTP layer, in a method of MAINS."""
    tensors, fields = MAINS[method]
    return rewritten(GLM, folder, tensors, lambda config: config.update(fields))
