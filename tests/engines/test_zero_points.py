"""Int4 weights with zero points, as vLLM's own functions quantize and pack them, decoded by ours.

vLLM's product with such weights on a CPU needs AVX-512; nothing is multiplied here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.scalar_type import scalar_types

from mtp_checkpoints.formats import AwqInt4, GptqInt4

COLUMNS, ROWS, GROUP = 128, 64, 32
Pack = Callable[[torch.Tensor, int, int, int], torch.Tensor]


@pytest.mark.parametrize(
    ("form", "pack", "pack_zeros"),
    [
        (AwqInt4(GROUP), quant_utils.awq_pack, quant_utils.awq_pack),
        (GptqInt4(GROUP, zeros_less_one=False), quant_utils.gptq_pack, quant_utils.pack_cols),
    ],
    ids=["AWQ", "GPTQ v2"],
)
def test_what_vllm_packed_is_decoded(
    form: AwqInt4 | GptqInt4, pack: Pack, pack_zeros: Pack
) -> None:
    weight = torch.randn(COLUMNS, ROWS, generator=torch.Generator().manual_seed(0)) + 0.5
    values, codes, scales, zeros = quant_utils.quantize_weights(
        weight, scalar_types.uint4, GROUP, zero_points=True
    )
    assert zeros.unique().numel() > 4
    words = pack(codes, 4, COLUMNS, ROWS)
    zero_words = pack_zeros(zeros, 4, COLUMNS // GROUP, ROWS)
    found = form.encoded([words, scales, zero_words]).dequantize(torch.float32)
    torch.testing.assert_close(found, values.t().contiguous(), rtol=1e-6, atol=1e-7)
