"""Main models as others quantize them, made from the specifications of their formats and by
compressed-tensors itself: nothing here comes from the code under test.

`write(source, folder, NAME)` takes a checkpoint in fp8 blocks or unquantized, leaves its MTP layer
out, and quantizes the main linears; it returns what a reader must find in them, by tensor name.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
# Tensors on disk of a linear, by the last component of their names, and the numbers they encode.
Encoded = tuple[Tensors, torch.Tensor]
Encode = Callable[[torch.Tensor], Encoded]

LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn\.\w+_proj\w*|mlp\.(?!gate\.).+_proj)\.weight$")
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Method:
    """A way to quantize: the linears that it covers, and its quantization_config.

    file: the config lies in a file of this name instead.
    """

    encode: Encode
    config: Config
    covers: str = r".*"
    dtype: torch.dtype = torch.bfloat16
    file: str | None = None
    others: Config = field(default_factory=dict)


def read_all(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return tensors


def unquantized(tensors: Tensors) -> Tensors:
    """fp8 blocks multiplied out; everything else as it is."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            tensor = tensor.float() * spread[: tensor.shape[0], : tensor.shape[1]]
        if not name.endswith("_scale_inv"):
            found[name] = tensor
    return found


def write(source: Path, folder: Path, name: str, shards: int = 2, **changes: Any) -> Tensors:
    """Quantize a main model as others do; changes are fields of its config.json."""
    method, config = METHODS[name], json.loads((source / "config.json").read_text())
    mtp = f"model.layers.{config['num_hidden_layers']}."
    stored: Tensors = {}
    values: Tensors = {}
    for key, tensor in unquantized(read_all(source)).items():
        if key.startswith(mtp):
            continue
        if LINEAR.match(key) and re.match(method.covers, key):
            module = key.removesuffix(".weight")
            parts, values[key] = method.encode(tensor.float())
            stored |= {f"{module}.{last}": part.contiguous() for last, part in parts.items()}
        else:
            keeps = tensor.dtype is torch.float32 and tensor.dim() == 1
            stored[key] = tensor if keeps else tensor.to(method.dtype)
    config |= {"torch_dtype": str(method.dtype).removeprefix("torch."), **method.others, **changes}
    config.pop("quantization_config", None)
    config.pop("num_nextn_predict_layers", None)
    folder.mkdir(parents=True)
    if method.file is None:
        config["quantization_config"] = method.config
    else:
        (folder / method.file).write_text(json.dumps(method.config))
    (folder / "config.json").write_text(json.dumps(config))
    for path in (*source.glob("tokenizer*"), *source.glob("generation_config.json")):
        shutil.copy(path, folder)
    write_shards(folder, stored, shards)
    return values


def write_shards(folder: Path, tensors: Tensors, count: int) -> None:
    names, weight_map = list(tensors), {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        own = names[number::count]
        save_file({name: tensors[name] for name in own}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def asymmetric(weight: torch.Tensor, group: int, bits: int = 4) -> tuple[torch.Tensor, ...]:
    """Codes [N, K], scale and zero point [N, K/group] of rounding to nearest."""
    groups, most = weight.unflatten(1, (-1, group)), (1 << bits) - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / most).clamp(min=1e-6).half().float()
    zero = (-low / scale).round().clamp(0, most)
    codes = ((groups / scale[..., None]).round() + zero[..., None]).clamp(0, most)
    return codes.flatten(1).int(), scale, zero.int()


def symmetric(weight: torch.Tensor, group: int, bits: int = 4) -> tuple[torch.Tensor, ...]:
    groups, middle = weight.unflatten(1, (-1, group)), 1 << (bits - 1)
    scale = (groups.abs().amax(-1) / (middle - 1)).clamp(min=1e-6).half().float()
    codes = ((groups / scale[..., None]).round() + middle).clamp(0, 2 * middle - 1)
    return codes.flatten(1).int(), scale, torch.full_like(scale, middle).int()


def _words(lanes: Iterable[torch.Tensor], bits: int = 4) -> torch.Tensor:
    """32-bit words of as many numbers as they have room for, the first in the lowest bits."""
    total: Any = sum(lane.long() << (bits * place) for place, lane in enumerate(lanes))
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def _values(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    group = codes.shape[1] // scale.shape[1]
    wide = [one.repeat_interleave(group, 1) for one in (zero, scale)]
    return (codes - wide[0]).float() * wide[1]


def awq(quantize: Callable[[torch.Tensor, int], tuple[torch.Tensor, ...]]) -> Encode:
    def encode(weight: torch.Tensor) -> Encoded:
        codes, scale, zero = quantize(weight, GROUP)
        columns = [codes.t(), zero.t()]  # [K, N], [K/group, N]
        packed = [_words(one[:, place::8] for place in AWQ_ORDER) for one in columns]
        tensors = {"qweight": packed[0], "qzeros": packed[1], "scales": scale.t().half()}
        return tensors, _values(codes, scale, zero)

    return encode


def gptq(
    quantize: Callable[..., tuple[torch.Tensor, ...]],
    *,
    zeros_less_one: bool = True,
    act_order: bool = False,
    bits: int = 4,
    group_size: int = GROUP,
) -> Encode:
    """group_size -1: the whole row."""

    def encode(weight: torch.Tensor) -> Encoded:
        columns, in_word = weight.shape[1], 32 // bits
        group = columns if group_size == -1 else group_size
        order = torch.arange(columns)
        if act_order:
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        permuted, scale, zero = quantize(weight[:, order], group, bits)
        values = _values(permuted, scale, zero)
        back = order.argsort()
        codes = permuted[:, back].t()  # [K, N]
        zeros = zero.t()
        qzeros = _words((zeros[:, place::in_word] for place in range(in_word)), bits)
        if zeros_less_one:  # by words, as GPTQModel does: 0 borrows from the number above it
            qzeros = qzeros - (0x11111111 if bits == 4 else 0x01010101)
        tensors = {
            "qweight": _words((codes[place::in_word] for place in range(in_word)), bits),
            "qzeros": qzeros,
            "scales": scale.t().half(),
            "g_idx": (back // group).int(),
        }
        return tensors, values[:, back]

    return encode


def auto_round(
    *,
    zeros_less_one: bool,
    quantize: Callable[..., tuple[torch.Tensor, ...]] = asymmetric,
    bits: int = 4,
    group_size: int = GROUP,
) -> Encode:
    """As GPTQ's unpermuted, without g_idx."""
    encode_gptq = gptq(quantize, zeros_less_one=zeros_less_one, bits=bits, group_size=group_size)

    def encode(weight: torch.Tensor) -> Encoded:
        tensors, values = encode_gptq(weight)
        return {name: tensor for name, tensor in tensors.items() if name != "g_idx"}, values

    return encode


def int8_channel(weight: torch.Tensor) -> Encoded:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def compressed_int4(weight: torch.Tensor) -> Encoded:
    """Packed by compressed-tensors."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes, scale, zero = symmetric(weight, GROUP)
    scale = scale.bfloat16()
    tensors = {
        "weight_packed": pack_to_int32((codes - 8).to(torch.int8), 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, _values(codes, scale.float(), zero)


def compressed_zero_points(weight: torch.Tensor) -> Encoded:
    """int8 with zero points, packed by compressed-tensors."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes, scale, zero = asymmetric(weight, GROUP, 8)
    scale = scale.bfloat16()
    signed = [(one - 128).to(torch.int8) for one in (codes, zero)]
    tensors = {
        "weight_packed": pack_to_int32(signed[0], 8),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
        "weight_zero_point": pack_to_int32(signed[1], 8, packed_dim=0),
    }
    return tensors, _values(codes, scale.float(), zero)


def fp8_channel(weight: torch.Tensor) -> Encoded:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_block(weight: torch.Tensor) -> Encoded:
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    padded[:rows, :columns] = weight
    tiles = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = tiles.abs().amax((1, 3)).clamp(min=1e-8) / 448
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread


def fp8_tensor(weight: torch.Tensor) -> Encoded:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return tensors, codes.float() * scale


def nvfp4(weight: torch.Tensor) -> Encoded:
    """Codes packed by compressed-tensors, which shares them with ModelOpt."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    second = torch.tensor(2.0**-9)  # one for all weights: engines join some
    groups = weight.unflatten(1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6 / second).clamp(min=2**-6).to(torch.float8_e4m3fn)
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    factor = (scale.float() * second)[..., None]
    nearest = ((groups / factor).abs()[..., None] - numbers).abs().argmin(-1)
    codes = (numbers[nearest] * groups.sign()).flatten(1)
    tensors = {
        "weight": pack_fp4_to_uint8(codes.bfloat16()),
        "weight_scale": scale,
        "weight_scale_2": second,
        "input_scale": torch.tensor(0.25),
    }
    return tensors, codes * factor.expand(groups.shape).flatten(1)


_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "lm_head": False}
_AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": GROUP,
    "data_type": "int",
    "sym": False,
    "autoround_version": "0.16.1",
    "block_name_to_quantize": "model.layers",
}
_MODELOPT = {"producer": {"name": "modelopt"}, "kv_cache_quant_algo": None}


def _compressed(layout: str, weights: Config) -> Config:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


METHODS: dict[str, Method] = {
    "awq": Method(
        awq(asymmetric),
        {**_AWQ, "zero_point": True, "modules_to_not_convert": None},
        dtype=torch.float16,
    ),
    "awq, symmetric": Method(
        awq(symmetric),
        {**_AWQ, "zero_point": False, "modules_to_not_convert": ["self_attn"]},
        covers=r".*mlp\.",
        dtype=torch.float16,
    ),
    "awq, experts alone": Method(
        awq(asymmetric),
        {**_AWQ, "zero_point": True},
        covers=r".*\.experts\.",
        dtype=torch.float16,
    ),
    "gptq": Method(gptq(symmetric), {**_GPTQ, "sym": True, "desc_act": False}, dtype=torch.float16),
    "gptq, asymmetric": Method(gptq(asymmetric), {**_GPTQ, "sym": False, "desc_act": False}),
    "gptq, permuted": Method(
        gptq(symmetric, act_order=True),
        {**_GPTQ, "sym": True, "desc_act": True, "dynamic": {r"-:.*\.self_attn\..*": {}}},
        covers=r".*mlp\.",
    ),
    "gptq v2": Method(
        gptq(asymmetric, zeros_less_one=False),
        {**_GPTQ, "sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"},
    ),
    "gptq, 8 bits": Method(
        gptq(symmetric, bits=8), {**_GPTQ, "bits": 8, "sym": True, "desc_act": False}
    ),
    "auto-round, 8 bits": Method(
        auto_round(zeros_less_one=True, quantize=symmetric, bits=8),
        {**_AUTO_ROUND, "bits": 8, "sym": True, "packing_format": "auto_round:auto_gptq"},
    ),
    "auto-round, 8 bits, whole rows": Method(
        auto_round(zeros_less_one=False, bits=8, group_size=-1),
        {**_AUTO_ROUND, "bits": 8, "group_size": -1, "packing_format": "auto_round"},
    ),
    "auto-round": Method(
        auto_round(zeros_less_one=True), {**_AUTO_ROUND, "packing_format": "auto_round:auto_gptq"}
    ),
    "auto-round, attention unquantized": Method(
        auto_round(zeros_less_one=False),
        {
            **_AUTO_ROUND,
            "packing_format": "auto_round",
            "extra_config": {r".*self_attn.*": {"bits": 16, "data_type": "float"}},
        },
        covers=r".*mlp\.",
    ),
    "auto-round, awq": Method(
        awq(asymmetric), {**_AUTO_ROUND, "packing_format": "auto_round:auto_awq"}
    ),
    "compressed-tensors, int8": Method(
        int8_channel,
        _compressed(
            "int-quantized",
            {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "actorder": "weight",
            },
        ),
    ),
    "compressed-tensors, int4": Method(
        compressed_int4, _compressed("pack-quantized", {**_WEIGHTS, "group_size": GROUP})
    ),
    "compressed-tensors, zero points": Method(
        compressed_zero_points,
        _compressed(
            "pack-quantized",
            {**_WEIGHTS, "num_bits": 8, "symmetric": False, "group_size": GROUP},
        ),
    ),
    "compressed-tensors, fp8": Method(
        fp8_channel,
        _compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        ),
    ),
    "fp8": Method(
        fp8_block,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        },
    ),
    "modelopt nvfp4": Method(
        nvfp4,
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head", "model.layers.*.self_attn*"],
            **_MODELOPT,
        },
        covers=r".*mlp\.",
    ),
    "modelopt fp8, in a file": Method(
        fp8_tensor,
        {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        },
        file="hf_quant_config.json",
    ),
}
