"""nvfp4, mxfp4 and mxfp8 beside what ModelOpt's own classes make of the same weight."""

from __future__ import annotations

import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file
from tool_runs import SCRIPTS, TOOLS

from mtp_checkpoints.formats import MxFp4Packed, MxFp8, NvFp4
from mtp_kernels.quantize.block_floats import E2M1, e8m0_values, unpack_pairs

ZEROS, TIES, OTHERS = 0, 1, 2  # rows, and the first of the others
BETWEEN = [(low + high) / 2 for low, high in zip(E2M1, E2M1[1:], strict=False)]
MINUS_ZERO = 8  # an e2m1 code
LAST_BITS = 2**-21  # of a quotient

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    """Rows of unlike size in bf16, before them a row of zeros, and one of numbers between codes."""
    random = torch.Generator().manual_seed(7)
    rows = torch.randn(96, 512, generator=random) * torch.logspace(-2, 0, 96)[:, None]
    rows[ZEROS] = 0
    rows[TIES] = torch.tensor([*BETWEEN, E2M1[-1]]).repeat(64)
    return rows.bfloat16().float()


@pytest.fixture(scope="module")
def theirs(weight: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensors]:
    folder = tmp_path_factory.mktemp("modelopt")
    save_file({"weight": weight}, folder / "given")
    command = [TOOLS["ModelOpt"].python, SCRIPTS / "blocks_of_modelopt.py"]
    subprocess.run([*command, folder / "given", folder / "made"], check=True)
    found: dict[str, Tensors] = {}
    for name, tensor in load_file(folder / "made").items():
        of, _, part = name.partition(".")
        found.setdefault(of, {})[part] = tensor
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """True where bytes of the usual rows are equal."""
    return (one.view(torch.uint8) == other.view(torch.uint8))[OTHERS:]


def check_codes(
    codes: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, multiplier: torch.Tensor
) -> None:
    """Codes may differ, and some do, where a weight lies midway between two of them alone."""
    spread = multiplier.repeat_interleave(weight.shape[1] // multiplier.shape[1], dim=1)
    numbers = (weight / spread).abs()
    off = (numbers[..., None] - torch.tensor(BETWEEN)).abs().amin(-1)
    differ = (codes != other)[OTHERS:]
    assert (off <= LAST_BITS * numbers)[OTHERS:][differ].all()
    assert 0 < differ.float().mean() < 0.01


def test_nvfp4(weight: torch.Tensor, theirs: dict[str, Tensors]) -> None:
    """The same bytes, but for scales of zeros, which are compressed-tensors' here, and codes where
    the quotient, whose last bit is compressed-tensors' here, is midway between two."""
    (codes, scale, of_matrix), _ = NvFp4().quantize(weight, "minmax")
    made = theirs["nvfp4"]
    assert of_matrix == made["of_matrix"]
    assert same(scale, made["scale"]).all()
    multiplier = scale.float() * of_matrix
    check_codes(unpack_pairs(codes), unpack_pairs(made["codes"]), weight, multiplier)
    assert set(made["scale"][ZEROS].tolist()) == {1.0} != set(scale[ZEROS].tolist())
    read = NvFp4().encoded((made["codes"], made["scale"], made["of_matrix"])).dequantize()
    assert torch.equal(read, made["values"])


def test_the_search_for_scales_of_nvfp4(weight: torch.Tensor, theirs: dict[str, Tensors]) -> None:
    (_, scale, _), _ = NvFp4().quantize(weight, "mse")
    assert same(scale, theirs["nvfp4"]["swept"]).all()


def test_mxfp8(weight: torch.Tensor, theirs: dict[str, Tensors]) -> None:
    """The same bytes, but for exponents of zeros, which are those of 1 here."""
    (codes, scale), _ = MxFp8().quantize(weight, "minmax")
    made = theirs["mxfp8"]
    assert torch.equal(codes.view(torch.uint8), made["codes"].view(torch.uint8))
    assert torch.equal(scale[TIES:], made["scale"][TIES:])
    assert (set(made["scale"][ZEROS].tolist()), set(scale[ZEROS].tolist())) == ({0}, {127})
    read = MxFp8().encoded((made["codes"], made["scale"])).dequantize()
    assert torch.equal(read, made["values"])


def test_mxfp4(weight: torch.Tensor, theirs: dict[str, Tensors]) -> None:
    """The same, but that ModelOpt has 0 as -0, and the smaller one of two codes for a number midway
    between them, where the even one is here."""
    (packed, scale), _ = MxFp4Packed().quantize(weight, "minmax")
    made = theirs["mxfp4"]
    assert torch.equal(scale[TIES:], made["scale"][TIES:])
    codes, other = unpack_pairs(packed), unpack_pairs(made["codes"])
    codes[codes == MINUS_ZERO] = 0
    other[other == MINUS_ZERO] = 0
    check_codes(codes, other, weight, e8m0_values(scale))
    assert codes[TIES, : len(E2M1)].tolist() == [0, 2, 2, 4, 4, 6, 6, 7]
    assert other[TIES, : len(E2M1)].tolist() == [*range(len(E2M1))]
    read = MxFp4Packed().encoded((made["codes"], made["scale"])).dequantize()
    assert torch.equal(read, made["values"])
