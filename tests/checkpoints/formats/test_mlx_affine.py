"""MLX's affine groups, by numbers that mx.quantize made."""

from __future__ import annotations

import pytest
import torch

from decoded_mains import packed
from mtp_checkpoints.dtypes import OutputTensor
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import FORMATS, MlxAffine
from mtp_checkpoints.quantization.methods import quant_config_of, undecoded_of

# Of MLX 0.32.4: words, scale and bias of the same 32 numbers, and the first and last that
# mx.dequantize makes of them.
MADE = {
    2: ([1486224058, 2589695722], 1.1625154, -2.3250308, 0.0, 0.0),
    3: ([3554326884, 1297836552, 2318722735], 0.581257701, -2.3250308, 0.0, 0.0),
    4: (
        [3735526281, 1686148934, 2800343943, 2242336412],
        *(0.258336753, -2.3250308, 0.0, -0.258336782),
    ),
    5: (
        [4009421429, 171781863, 3794760292, 3166420798, 2465007162],
        *(0.116251543, -2.3250308, 0.116251707, -0.232502937),
    ),
    6: (
        [2678798762, 3567051755, 1832452261, 3874158815, 3132668383, 2440765537],
        *(0.0581257716, -2.3250308, 0.116251707, -0.232502937),
    ),
    8: (
        [2832046250, 3824925308, 2759215472, 1850446336]
        + [3921578875, 3111387032, 1634642144, 2472259713],
        *(0.0144411847, -2.3250308, 0.129970551, -0.202176571),
    ),
}


@pytest.mark.parametrize("bits", MADE)
def test_numbers_as_mlx_makes_them(bits: int) -> None:
    words, scale, bias, first, last = MADE[bits]
    form = MlxAffine(32, bits)
    stored = torch.tensor([words], dtype=torch.uint32)
    found = form.encoded([stored, torch.tensor([[scale]]), torch.tensor([[bias]])])
    values = found.dequantize()
    assert found.shape == values.shape == (1, 32)
    torch.testing.assert_close(values[0, [0, -1]], torch.tensor([first, last]))


@pytest.mark.parametrize("bits", MADE)
def test_words_of_many_rows_and_groups(bits: int) -> None:
    codes = torch.randint(1 << bits, (6, 128), generator=torch.Generator().manual_seed(bits))
    scales, biases = torch.rand(6, 2) + 0.5, torch.randn(6, 2)
    form = MlxAffine(64, bits)
    layout = form.tensors("a.weight", (6, 128))
    words = packed(codes, bits)
    assert layout[0] == OutputTensor("a.weight", "U32", tuple(words.shape))
    found = form.encoded([words, scales, biases])
    wide = (one.repeat_interleave(64, dim=1) for one in (scales, biases))
    torch.testing.assert_close(found.dequantize(), next(wide) * codes + next(wide))
    (_, every), *_ = form.places(range(6), range(128), (6, 128))
    assert every == range(words.shape[1])
    part = form.places(range(2, 4), range(64, 128), (6, 128))
    cut = [
        one[rows.start : rows.stop, columns.start : columns.stop]
        for one, (rows, columns) in zip((words, scales, biases), part, strict=True)
    ]
    assert torch.equal(form.encoded(cut).dequantize(), found.dequantize()[2:4, 64:])
    with pytest.raises(ValueError, match="finite"):
        form.encoded([words, scales * torch.nan, biases]).dequantize()


def test_what_a_config_says() -> None:
    config = {"group_size": 64, "bits": 4, "mode": "affine"}
    named = {
        "model.layers.1.mlp.switch_mlp.up_proj": {"group_size": 32, "bits": 8},
        "model.layers.0.mlp.up_proj": False,
        "model.layers.1.mlp.gate": {"group_size": 64, "bits": 8},
        "lm_head": True,
    }
    reading = quant_config_of(config | named)
    usual = MlxAffine(64, 4)
    expert = "model.layers.1.mlp.experts.3"
    assert FORMATS["mlx_affine"] is MlxAffine
    assert reading.format_of(f"{expert}.up_proj", Role.ROUTED_EXPERT) == MlxAffine(32, 8)
    assert reading.format_of(f"{expert}.down_proj", Role.ROUTED_EXPERT) == usual
    assert reading.format_of("model.layers.0.mlp.up_proj", Role.DENSE_MLP) is None
    assert reading.format_of("model.layers.1.mlp.gate", Role.ROUTER) == MlxAffine(64, 8)
    assert reading.format_of("model.layers.2.mlp.gate", Role.ROUTER) is None
    for table, role in (("lm_head", Role.HEAD), ("model.embed_tokens", Role.EMBEDDING)):
        assert reading.format_of(table, role) == usual
        assert reading.format_of(f"model.layers.3.{table}", role) is None
    assert not reading.loads_together


@pytest.mark.parametrize(
    "change", [{"mode": "mxfp4"}, {"bits": 7}, {"group_size": 16}], ids=lambda one: next(iter(one))
)
def test_groups_that_are_not_decoded(change: dict[str, object]) -> None:
    config = {"group_size": 32, "bits": 4} | change
    with pytest.raises(UnsupportedError, match="does not read these numbers of MLX") as caught:
        quant_config_of(config)
    assert str(next(iter(change.values()))) in str(caught.value.found)
    known = undecoded_of({"model_type": "glm4_moe", "quantization": config})
    assert known is not None and known.title == "MLX"


def test_a_model_type_that_is_none_is_no_model_of_theirs() -> None:
    known = undecoded_of({"model_type": ["glm4_moe"], "quantization": {"group_size": 32}})
    assert known is not None and known.title == "MLX"


def test_models_that_mlx_lm_keeps_otherwise() -> None:
    quantization = {"group_size": 32, "bits": 4}
    decoded = {"glm4_moe": True, "mimo": True, "deepseek_v3": True, "step3p5": False}
    for model, is_decoded in decoded.items():
        known = undecoded_of({"model_type": model, "quantization": quantization})
        assert (known is None) is is_decoded
