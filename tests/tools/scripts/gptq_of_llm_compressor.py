"""Round a weight by llm-compressor's GPTQ.

python gptq_of_llm_compressor.py INPUT OUTPUT; both are files of safetensors. INPUT has weight,
hessian and, of each format in OUTPUT, its scales; of nvfp4 its global scale too. OUTPUT has the
numbers that are kept of the weight, by format.
"""

from __future__ import annotations

import sys

from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from safetensors.torch import load_file, save_file
from torch import Tensor, zeros_like

FORMATS = {
    "int4": QuantizationArgs(
        num_bits=4, type="int", strategy="group", group_size=64, actorder="static"
    ),
    "nvfp4": QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, actorder="static"
    ),
}


def kept(given: dict[str, Tensor], name: str) -> Tensor:
    """Return what is kept of the weight in a format; all tensors have a batch of one."""
    scale, total = given[f"{name}.scale"][None], given.get(f"{name}.global")
    weight, hessian = given["weight"].clone()[None], given["hessian"].clone()[None]
    codes, _, fell_back = quantize_weight(
        weight,
        hessian,
        scale,
        zeros_like(scale),
        None if total is None else total[None],
        FORMATS[name],
    )
    assert not fell_back.any()
    return codes[0].contiguous()


if __name__ == "__main__":
    _, source, output = sys.argv
    tensors = load_file(source)
    save_file({name: kept(tensors, name) for name in FORMATS}, output)
