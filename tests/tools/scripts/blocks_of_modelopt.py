"""Quantize a weight with the classes by which ModelOpt stores nvfp4, mxfp4 and mxfp8.

python blocks_of_modelopt.py INPUT OUTPUT; both are files of safetensors. INPUT has weight [N, K] in
float32. OUTPUT has codes, scale and, decoded again, values of each format; of nvfp4 the number of
the matrix too, and the block scales that its search by the squared error finds.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

from modelopt.torch.quantization.calib.mse import NVFP4MSECalibrator
from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from torch import Tensor

NVFP4_BLOCK, MX_BLOCK = {-1: 16}, {-1: 32}


def nvfp4(weight: Tensor) -> dict[str, Tensor]:
    made, scale, of_matrix = NVFP4QTensor.quantize(weight.clone(), NVFP4_BLOCK[-1])
    values = made.dequantize(scale=scale, double_scale=of_matrix, block_sizes=NVFP4_BLOCK)
    swept = swept_scale(weight.view(-1, NVFP4_BLOCK[-1])).view(scale.shape)
    stored = {"codes": made._quantized_data, "scale": scale, "of_matrix": of_matrix}
    return stored | {"values": values, "swept": swept}


def swept_scale(blocks: Tensor) -> Tensor:
    """Return the scale that ModelOpt's search finds for each block, with its own rounding."""
    largest = blocks.abs().max()

    def scale_of(amax: Tensor) -> tuple[Tensor, Tensor]:
        quantizer = SimpleNamespace(global_amax=largest, _amax=amax, block_sizes=NVFP4_BLOCK)
        return NVFP4QTensor.get_weights_scaling_factor_from_quantizer(quantizer, blocks)

    def rounded(values: Tensor, amax: Tensor) -> Tensor:
        scale, of_matrix = scale_of(amax)
        made = NVFP4QTensor.quantize(values.clone(), NVFP4_BLOCK[-1], scale, of_matrix)[0]
        return made.dequantize(scale=scale, double_scale=of_matrix, block_sizes=NVFP4_BLOCK)

    own = blocks.abs().amax(1, keepdim=True)
    search = NVFP4MSECalibrator(own, largest, axis=0, quant_func=rounded)
    search.collect(blocks)
    return scale_of(search.compute_amax())[0]


def mxfp4(weight: Tensor) -> dict[str, Tensor]:
    made, exponents = MXFP4QTensor.quantize(weight.clone(), MX_BLOCK[-1])
    values = made.dequantize(scale=exponents, block_sizes=MX_BLOCK)
    return {
        "codes": made._quantized_data,
        "scale": exponents.view(len(weight), -1),
        "values": values,
    }


def mxfp8(weight: Tensor) -> dict[str, Tensor]:
    made, exponents = MXFP8QTensor.quantize(weight.clone())
    values = made.dequantize(scale=exponents)
    return {"codes": made._quantized_data, "scale": exponents, "values": values}


if __name__ == "__main__":
    _, source, output = sys.argv
    given = load_file(source)["weight"]
    found = {"nvfp4": nvfp4(given), "mxfp4": mxfp4(given), "mxfp8": mxfp8(given)}
    save_file(
        {
            f"{name}.{part}": tensor.contiguous()
            for name, tensors in found.items()
            for part, tensor in tensors.items()
        },
        output,
    )
