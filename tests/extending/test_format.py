"""A new number format is one file, with a codec in torch, and one line in FORMATS: no kernel,
config writer, engine or check of verify knows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from cases import WHOLE_TILES, export, make_checkpoint, read_json, run_program
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import FORMATS
from mtp_checkpoints.formats.base import WeightFormat
from mtp_checkpoints.formats.compressed import COMPRESSED, WeightsEntry, group, numbers
from mtp_checkpoints.formats.verification import Bug, FormatGate, RunGate
from mtp_checkpoints.quantization.stored import stored_model
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.options import BundleOptions
from mtp_export.bundle.quantize import QuantizeOptions, plan_quantize
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.scheme import Scheme, every_linear

_LAYOUT, _LARGEST = "toy-quantized", 31.0


# --- The file -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Int6Channel(WeightFormat):
    """Codes weight_int6 I8 [N, K] in [-31, 31], scale weight_scale F32 [N, 1]."""

    storage: ClassVar[str] = "int6_channel"
    operation: ClassVar[str] = "quantize_int6_channel"
    gate: ClassVar[FormatGate] = FormatGate(25.0, RunGate(0.05, 0.90, 3.0))
    methods: ClassVar[tuple[str, ...]] = (COMPRESSED,)
    in_words: ClassVar[str] = "toy-quantized int6 per channel"
    bugs: ClassVar[tuple[Bug, ...]] = (
        Bug(
            "two's complement was taken for sign and magnitude",
            lambda codes, scale: (_resigned(codes), scale),
        ),
    )

    @classmethod
    def of_entry(cls, entry: WeightsEntry) -> Int6Channel | None:
        described = entry.has_numbers(_LAYOUT, kind="int", bits=6, strategy="channel")
        return cls() if described else None

    def group(self, *, activations_fp8: bool) -> dict[str, Any]:
        return group(_LAYOUT, numbers(6, "int", "channel"), None)

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        module = name.removesuffix(".weight")
        return (
            OutputTensor(f"{module}.weight_int6", DType.I8, shape),
            OutputTensor(f"{module}.weight_scale", DType.F32, (shape[0], 1)),
        )

    def encode(self, values: torch.Tensor, scale_rule: str) -> tuple[torch.Tensor, ...]:
        scale = (values.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp(min=2.0**-126)
        return torch.round(values / scale).to(torch.int8), scale

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not (scale.isfinite() & (scale > 0)).all():
            raise ValueError("scale: expected finite numbers above 0")
        return (codes.float() * scale).to(dtype)


def _resigned(codes: torch.Tensor) -> torch.Tensor:
    magnitude = codes & 0x7F
    return torch.where(codes < 0, -magnitude, magnitude)


# --- The test -------------------------------------------------------------------------------------

TOY = Int6Channel.storage
SCHEME = Scheme(
    "toy_int6",
    "int6 + bf16",
    every_linear("bf16") | {Role.ROUTED_EXPERT: TOY, Role.DENSE_MLP: TOY, Role.SHARED_EXPERT: TOY},
)
MIXED = Scheme("toy_int6_fp8", "int6 + fp8", every_linear("fp8_block") | {Role.ROUTED_EXPERT: TOY})


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The format, and schemes with it, in the registries."""
    monkeypatch.setitem(FORMATS, TOY, Int6Channel)
    for scheme in (SCHEME, MIXED):
        monkeypatch.setitem(SCHEMES, scheme.name, scheme)


@pytest.fixture
def bundle(tmp_path: Path, output: Path) -> Path:
    """A bundle in the format, of an export's bundle."""
    source, exported = make_checkpoint(tmp_path / "source", WHOLE_TILES), tmp_path / "exported"
    assert export(source, exported).code == 0
    _quantize(exported, output, SCHEME)
    return output


def _quantize(source: Path, output: Path, scheme: Scheme, target: str = "hf") -> None:
    # Not as a command, which is made with the schemes of the first time.
    options = QuantizeOptions(
        BundleOptions(source, output, target=target),
        base_quant=scheme.name,
        mtp_quant=scheme.name,
        allow_untested_pair=True,
    )
    run_bundle(plan_quantize(options), lambda count: None)


def test_a_new_format_is_written_read_verified_and_run(bundle: Path, tmp_path: Path) -> None:
    config = read_json(bundle / "main/config.json")
    assert config["quantization_config"]["format"] == _LAYOUT
    stored = stored_model(config)
    experts = [one for one in stored.main.weights.values() if one.weight.role is Role.ROUTED_EXPERT]
    assert {one.format for one in experts} == {Int6Channel()}
    assert stored.main.tensors.keys() == Checkpoint.open(bundle / "main").tensors.keys()
    source = tmp_path / "source"
    verified = run_program("verify", bundle, "--source", source, "--level", "weights")
    assert verified.code == 0, verified.out + verified.err
    assert "≥ 25 dB" in verified.out
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [3, 1, 4]}\n')
    texts = run_program("generate", bundle, "--prompts", prompts, "--max-new-tokens", 4)
    assert texts.code == 0, texts.out + texts.err


@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_a_new_format_beside_fp8(target: str, tmp_path: Path, output: Path) -> None:
    """It has a group of its own, beside fp8 as each dialect describes that."""
    source = make_checkpoint(tmp_path / "source", WHOLE_TILES)
    _quantize(source, output, MIXED, target)
    config = read_json(output / "main/config.json")["quantization_config"]
    layouts = {group["format"] for group in config["config_groups"].values()}
    assert layouts == ({_LAYOUT} if target == "sglang" else {_LAYOUT, "float-quantized"})
    verified = run_program("verify", output, "--level", "files")
    assert verified.code == 0, verified.out + verified.err


def test_a_known_bug_of_a_new_format_is_named(bundle: Path, tmp_path: Path) -> None:
    from faults import planting

    def signed(codes: torch.Tensor) -> torch.Tensor:
        return torch.where(codes < 0, -codes | -128, codes)

    name = "model.layers.1.mlp.experts.1.up_proj.weight_int6"
    planting.change(bundle / "main", name, signed)
    options = ("--source", tmp_path / "source", "--level", "weights")
    verified = run_program("verify", bundle, *options)
    assert verified.code == 7
    assert "two's complement was taken for sign and magnitude" in verified.out
