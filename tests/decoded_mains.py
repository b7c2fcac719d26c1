"""Main models as mlx-lm writes them, in affine groups and the experts of a layer in one tensor, as
bitsandbytes does, in nf4, and as Quark does, in int4."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from mtp_checkpoints.formats.bitsandbytes import NF4
from quantized_by_others import read_all
from verify.foreign import INDEX, Tensors, rewritten, without

_LINEAR = re.compile(r"(lm_head|model\.embed_tokens|model\.layers\.\d+\..*_proj)\.weight")
BITSANDBYTES_NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
}
QUARK_INT4 = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": {"dtype": "int4", "qscheme": "per_group", "group_size": 32, "is_dynamic": False}
    },
    "export": {"kv_cache_group": [], "pack_method": "reorder"},
    "exclude": ["lm_head"],
}
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(.*)")


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Words U32 of codes [n, K]: one stream of bits, each code from its lowest on."""
    stream = (codes[..., None] >> torch.arange(bits) & 1).flatten(1).unflatten(1, (-1, 32))
    words = (stream.long() << torch.arange(32)).sum(-1)
    return words.to(torch.uint32)


def affine(weight: torch.Tensor, bits: int, group: int) -> dict[str, torch.Tensor]:
    """Tensors of a matrix [N, K]: the least of a group is code 0, the greatest the last one."""
    groups = weight.float().unflatten(1, (-1, group))
    biases = groups.amin(-1).bfloat16()
    scales = ((groups.amax(-1) - biases.float()) / ((1 << bits) - 1)).bfloat16()
    steps = (groups - biases.float()[..., None]) / scales.float()[..., None].clamp(min=1e-9)
    codes = steps.round().clamp(0, (1 << bits) - 1).long().flatten(1)
    return {"weight": packed(codes, bits), "scales": scales, "biases": biases}


def write_mlx(source: Path, folder: Path, layer: str, *, bits: int = 8, group: int = 32) -> Path:
    """A checkpoint without its MTP layer, quantized and stacked as mlx-lm does it."""

    def change(stored: Tensors) -> Tensors:
        made: Tensors = {}
        for name, one in without(layer)(stored).items():
            if not _LINEAR.fullmatch(name):
                made[name] = one
                continue
            parts = affine(one, bits, group).items()
            made |= {name.removesuffix("weight") + last: part for last, part in parts}
        return stacked(made)

    own = {"group_size": group, "bits": bits, "mode": "affine"}
    fields = {"quantization": own, "quantization_config": own}
    return rewritten(source, folder, change, lambda config: config.update(fields))


def write_mlx_qwen(source: Path, folder: Path, *, offset_module: bool = False) -> Path:
    """Qwen3.5's text model as `sanitize` of mlx-lm leaves it, in 8 bits, and the MTP module in a
    file of its own: as it was released, or, where one is added to its norms, in MLX's format."""
    stored, made, mtp = read_all(source), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, one in stored.items():
        is_norm = "norm" in name and "linear_attn" not in name
        if name.startswith("mtp."):
            mtp[name] = one + 1 if is_norm and offset_module else one
            continue
        own = f"language_model.{name}"
        if one.dim() == 2:
            packed = affine(one, 8, 64).items()
            made |= {f"{own.removesuffix('weight')}{last}": part for last, part in packed}
        else:
            made[own] = one.transpose(1, 2).contiguous() if one.dim() == 3 else one + is_norm
    groups = {"group_size": 64, "bits": 8, "mode": "affine"}
    fields = json.loads((source / "config.json").read_text())
    fields = {"model_type": "qwen3_5", "text_config": fields, "quantization": groups}
    folder.mkdir(parents=True)
    shutil.copy(source / "tokenizer.json", folder)
    tied = {"tie_word_embeddings": True, "quantization_config": groups}
    (folder / "config.json").write_text(json.dumps(fields | tied))
    kind = "mlx" if offset_module else "pt"
    files = {"model.safetensors": (made, "mlx"), "mtp.safetensors": (mtp, kind)}
    for file, (tensors, said) in files.items():
        save_file(tensors, folder / file, metadata={"format": said})
    index = {name: file for file, (tensors, _) in files.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


def stacked(tensors: Tensors) -> Tensors:
    """The same with one tensor for all experts of a layer."""
    apart: dict[str, list[torch.Tensor]] = {}
    others = {}
    for name, one in tensors.items():
        if found := _EXPERT.fullmatch(name):
            apart.setdefault(f"{found[1]}.switch_mlp.{found[3]}", []).append(one)
        else:
            others[name] = one
    return others | {name: torch.stack(parts) for name, parts in apart.items()}


def nf4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of a matrix [N, K] whose rows are whole blocks of 64."""
    blocks = weight.float().reshape(-1, 64)
    absmax, table = blocks.abs().amax(1), torch.tensor(NF4)
    codes = ((blocks / absmax[:, None]).reshape(-1, 1) - table).abs().argmin(1).to(torch.uint8)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [*weight.shape]}
    said = json.dumps(state).encode()
    return {
        "weight": (codes[::2] << 4 | codes[1::2]).unsqueeze(1),
        "weight.absmax": absmax,
        "weight.quant_map": table.clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor([*said], dtype=torch.uint8),
    }


def int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of a matrix [N, K] as bitsandbytes has them in 8 bits."""
    largest = weight.float().abs().amax(1)
    codes = (weight.float() / largest[:, None].clamp(min=1e-9) * 127).round().to(torch.int8)
    return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}


def write_nf4(source: Path, folder: Path, layer: str) -> Path:
    """A checkpoint without its MTP layer, attention and dense layers in nf4: experts are no linear
    layers to transformers 5."""

    def change(stored: Tensors) -> Tensors:
        made: Tensors = {}
        for name, one in without(layer)(stored).items():
            if ".layers." not in name or ".experts." in name or not _LINEAR.fullmatch(name):
                made[name] = one
                continue
            made |= {name.removesuffix("weight") + last: part for last, part in nf4(one).items()}
        return made

    own = BITSANDBYTES_NF4
    return rewritten(source, folder, change, lambda config: config.update(quantization_config=own))


def quark_words(codes: torch.Tensor) -> torch.Tensor:
    """Words I32 of codes [n, N]: eight columns in each, in AWQ's order."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    lanes = codes.long().unflatten(1, (-1, 8))[..., order] & 15
    return (lanes << torch.arange(0, 32, 4)).sum(-1).to(torch.uint32).view(torch.int32)


def int4(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """Tensors of a matrix [N, K]: codes from -8 to 7, whose zero points are 0."""
    groups = weight.float().unflatten(1, (-1, group))
    scales = (groups.abs().amax(-1) / 7).clamp(min=1e-9).bfloat16()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).flatten(1)
    return {
        "weight": quark_words(codes.t()),
        "weight_scale": scales.t().contiguous(),
        "weight_zero_point": quark_words(torch.zeros_like(scales.t())),
    }


def fused(tensors: Tensors) -> Tensors:
    """The same with all experts of a layer in two tensors, as transformers 5 has them."""
    layers: dict[str, dict[str, list[torch.Tensor]]] = {}
    others = {}
    for name, one in tensors.items():
        if found := _EXPERT.fullmatch(name):
            layers.setdefault(found[1], {}).setdefault(found[3], []).append(one)
        else:
            others[name] = one
    for layer, parts in layers.items():
        gate, up, down = (torch.stack(parts[f"{n}_proj.weight"]) for n in ("gate", "up", "down"))
        others[f"{layer}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        others[f"{layer}.experts.down_proj"] = down
    return others


def write_quark(source: Path, folder: Path, layer: str, *, packs_experts: bool = True) -> Path:
    """A checkpoint without its MTP layer, every linear layer of the others in int4; experts are no
    linear layers to transformers 5."""

    def change(stored: Tensors) -> Tensors:
        made: Tensors = {}
        kept = without(layer)(stored)
        for name, one in (kept if packs_experts else fused(kept)).items():
            if ".layers." not in name or not _LINEAR.fullmatch(name):
                made[name] = one
                continue
            parts = int4(one, 32).items()
            made |= {name.removesuffix("weight") + last: part for last, part in parts}
        return made

    own = QUARK_INT4
    return rewritten(source, folder, change, lambda config: config.update(quantization_config=own))
