"""Half precision of GGUF files: the package's bits, by torch and compiled; what is too large."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats import FORMATS, GGUF, Float16
from mtp_kernels.quantize import Fp8Block
from mtp_kernels.quantize.array_conversions import Rows
from mtp_kernels.quantize.layouts import OutOfRangeError

quants: Any = pytest.importorskip("gguf.quants")

# 65519 is the last number that rounds to the largest, and 2^-25 the last that rounds to 0.
EDGES = [0.0, -0.0, 65504, -65519, 2.0**-14, 2.0**-24, 2.0**-25, 1 + 2.0**-11, 1 + 3 * 2.0**-11]


def weights() -> torch.Tensor:
    """Rows of every size that there is, subnormal ones too, and ties between two neighbours."""
    values = torch.randn(130, 257, generator=torch.Generator().manual_seed(1))
    values *= torch.logspace(-8, 3, 130)[:, None]
    values[0, : len(EDGES)] = torch.tensor(EDGES)
    return values


def test_values_have_the_bits_of_the_package() -> None:
    one, values = Float16(), weights()
    (halves,), error = one.quantize(values, "minmax")
    wanted = quants.quantize(values.numpy(), quants.GGMLQuantizationType.F16)
    assert np.array_equal(halves.numpy().view(np.uint16), wanted.view(np.uint16))
    kept = one.encoded((halves,)).dequantize()
    noise = float((values.double() - kept.double()).square().sum())
    assert error.error_energy == pytest.approx(noise, rel=1e-6)
    made = one.quantize_rows(Rows(values.numpy()), "minmax")
    assert made is not None and made.error == error
    assert np.array_equal(made.outputs[0].view(np.uint16), wanted.view(np.uint16))


def test_other_sources_are_rounded_once() -> None:
    one, values = Float16(), weights().clamp(-400, 400)
    codes, scale = values.to(torch.float8_e4m3fn), torch.rand(2, 3) + 0.1
    rows = Rows(codes.view(torch.uint8).numpy(), scale.numpy())
    (halves,), error = one.quantize(Fp8Block(codes, scale), "minmax")
    made = one.quantize_rows(rows, "minmax")
    assert made is not None and made.error == error
    assert np.array_equal(made.outputs[0].view(np.float16), halves.numpy())
    bits = values.bfloat16()
    made = one.quantize_rows(Rows(bits.view(torch.uint16).numpy()), "minmax")
    assert made is not None
    assert np.array_equal(made.outputs[0].view(np.float16), bits.half().numpy())


@pytest.mark.parametrize("number", [65520.0, -1e9])
def test_what_is_too_large_is_refused(number: float) -> None:
    values = torch.ones(2, 3)
    values[1, 2] = number
    assert Float16().quantize_rows(Rows(values.numpy()), "minmax") is None
    found = r"f16: expected magnitudes of at most 65504, found (65520|1e\+09)"
    with pytest.raises(OutOfRangeError, match=found):
        Float16().quantize(values, "minmax")


def test_a_format_of_gguf_files() -> None:
    assert FORMATS["f16"] is Float16 and Float16.storage == "f16"
    assert Float16.methods == (GGUF,) and Float16.operation == "round_f16"
    assert Float16().tensors("a", (2, 3)) == (OutputTensor("a", DType.F16, (2, 3)),)
    assert Float16().quantize_rows(Rows(np.full((1, 2), np.nan, np.float32)), "minmax") is None
