"""bitsandbytes' layouts, by tensors that its own functions made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import FORMATS, BitsAndBytes4, BitsAndBytesInt8, WeightFormat
from mtp_checkpoints.quantization.methods import quant_config_of
from recorded_tensors import Rows, tensor_of

MADE = json.loads(Path(__file__).with_name("bitsandbytes.json").read_text())
SHAPE = (4, 128)
FORMS: dict[str, WeightFormat] = {
    "int8": BitsAndBytesInt8(),
    "nf4": BitsAndBytes4("nf4", nested=False),
    "nf4, nested": BitsAndBytes4("nf4", nested=True),
    "fp4": BitsAndBytes4("fp4", nested=False),
}


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    """The tensors that bitsandbytes made, by their last names."""
    return {last: tensor_of(one) for last, one in MADE[name]["tensors"].items()}


@pytest.mark.parametrize("name", FORMS)
def test_numbers_are_those_that_bitsandbytes_makes(name: str) -> None:
    form, stored = FORMS[name], tensors_of(name)
    layout = form.tensors("a.weight", SHAPE)
    ordered = [stored[one.name.removeprefix("a.")] for one in layout]
    assert len(layout) == len(stored) and FORMATS[form.storage] is type(form)
    for one, tensor in zip(layout, ordered, strict=True):
        assert one.shape in (tuple(tensor.shape), (-1,))
    form.check_constants(dict(zip([t.name for t in layout[2:]], ordered[2:], strict=True)), SHAPE)
    found = form.encoded(ordered)
    values = found.dequantize()
    assert found.shape == values.shape == SHAPE
    torch.testing.assert_close(values.sum(1), torch.tensor(MADE[name]["sums"]), atol=2e-2, rtol=0)
    near = {"atol": 2e-4, "rtol": 1e-3}
    torch.testing.assert_close(values[1, 60:68], torch.tensor(MADE[name]["values"]), **near)
    rows = form.encoded_rows(Rows(ordered), 1, 3)
    assert torch.equal(rows.dequantize(), values[1:3])
    assert rows.dequantize(torch.bfloat16).dtype is torch.bfloat16


def test_states_of_other_weights() -> None:
    form, stored = FORMS["nf4, nested"], tensors_of("nf4, nested")
    (name,) = (one for one in stored if "quant_state" in one)
    state = json.loads(bytes(stored[name].tolist()))

    def refused(words: str, **changes: Any) -> None:
        said = torch.tensor([*json.dumps(state | changes).encode()], dtype=torch.uint8)
        with pytest.raises(InvalidInputError, match=words):
            form.check_constants({f"a.{name}": said}, SHAPE)

    refused("not the state of this weight", shape=[8, 64])
    refused("shape, nf4, blocksize 64", quant_type="fp4")
    refused("blocksize 64", blocksize=128)
    refused("nested_offset", nested_blocksize=64)
    refused("nested_offset", nested_offset=None)
    with pytest.raises(InvalidInputError, match="JSON"):
        form.check_constants({f"a.{name}": torch.tensor([123], dtype=torch.uint8)}, SHAPE)
    table = stored["weight.quant_map"].flip(0)
    with pytest.raises(InvalidInputError, match="other numbers than nf4"):
        form.check_constants({"a.weight.quant_map": table}, SHAPE)
    with pytest.raises(InvalidInputError, match="an order of the codes"):
        FORMS["int8"].check_constants({"a.weight_format": torch.tensor(1)}, SHAPE)
    for one, codes in ((FORMS["nf4"], torch.uint8), (FORMS["int8"], torch.int8)):
        with pytest.raises(ValueError, match="finite"):
            one.decode(torch.zeros(1, 64, dtype=codes), torch.full((1, 1), torch.nan), torch.float)


@pytest.mark.parametrize("name", ["nf4", "nf4, nested", "fp4"])
@pytest.mark.parametrize("shape", [(16, 32), (3, 100), (7, 33)])
def test_blocks_run_over_the_ends_of_rows(name: str, shape: tuple[int, int]) -> None:
    """The matrix is one row of blocks to bitsandbytes, the last of which may be shorter."""
    form, stored = FORMS[name], tensors_of(name)
    values = form.encoded(
        [stored[t.name.removeprefix("a.")] for t in form.tensors("a.weight", SHAPE)]
    )
    flat = values.dequantize().flatten()
    elements = shape[0] * shape[1]
    (key,) = (one for one in stored if "quant_state" in one)
    state = json.loads(bytes(stored[key].tolist())) | {"shape": [*shape]}
    said = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    sizes = {"weight": -(-elements // 2), "weight.absmax": -(-elements // 64)}
    cut = {last: one[: sizes.get(last, len(one))] for last, one in (stored | {key: said}).items()}
    layout = form.tensors("a.weight", shape)
    ordered = [cut[one.name.removeprefix("a.")] for one in layout]
    for one, tensor in zip(layout, ordered, strict=True):
        assert one.shape in (tuple(tensor.shape), (-1,)), one
    form.check_constants(dict(zip([t.name for t in layout[2:]], ordered[2:], strict=True)), shape)
    found = form.encoded(ordered)
    assert found.shape == shape
    assert torch.equal(found.dequantize().flatten(), flat[:elements])
    assert torch.equal(form.encoded_rows(Rows(ordered), 1, 3).dequantize(), found.dequantize()[1:3])


def test_codes_of_rows() -> None:
    form, stored = FORMS["int8"], tensors_of("int8")
    found = form.encoded([*stored.values()])
    assert found.scale is not None
    rows = form.row_codes(found.codes, found.scale)
    assert torch.equal(rows.values(), found.dequantize())


FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def test_what_a_config_says() -> None:
    found = quant_config_of(FOUR)
    assert found.format_of("model.layers.1.self_attn.q_proj", Role.ATTENTION) == FORMS["nf4"]
    assert found.format_of("lm_head", Role.HEAD) is None
    assert found.format_of("model.embed_tokens", Role.EMBEDDING) is None
    nested = quant_config_of(FOUR | {"bnb_4bit_use_double_quant": True})
    assert nested.format_of("a", Role.ATTENTION) == FORMS["nf4, nested"]
    of_int8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    listed = quant_config_of(of_int8 | {"llm_int8_skip_modules": ["model.layers.3", "q_proj"]})
    assert listed.format_of("lm_head", Role.HEAD) == BitsAndBytesInt8()
    for module, is_left_out in {
        "model.layers.3.mlp.up_proj": True,
        "model.layers.30.mlp.up_proj": False,
        "model.layers.1.self_attn.q_proj": True,
        "model.layers.1.self_attn.o_proj": False,
    }.items():
        assert (listed.format_of(module, Role.ATTENTION) is None) is is_left_out
    assert not listed.loads_together
    for change in ({"bnb_4bit_quant_type": "int4"}, {"bnb_4bit_quant_storage": "bfloat16"}):
        with pytest.raises(UnsupportedError, match="does not read these numbers of bitsandbytes"):
            quant_config_of(FOUR | change)
