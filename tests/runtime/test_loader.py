"""Loading: bundles and checkpoints, the ledger, refusals, stored formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import MTP_LAYER, WRITTEN
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.contract import Hidden, MtpContract
from mtp_checkpoints.formats import (
    FORMATS,
    EncodedWeight,
    FormatOptions,
    unquantized,
)
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.options import BundleOptions
from mtp_kernels.cpu import matrix_units
from mtp_runtime.layers.linear import Linear, Stacked
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.sampling import SamplingParams
from runtime.harness import Walk, load, prompts_of, run

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def exported(source: Path, folder: Path) -> Path:
    """A bundle, by the export's own API."""
    run_bundle(plan_export(BundleOptions(source, folder)), lambda count: None)
    return folder


def change(source: Path, folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def test_a_bundle_decodes_as_its_source(small: Path, tmp_path: Path) -> None:
    bundle = exported(small, tmp_path / "bundle")
    prompts = prompts_of([6, 11], 96)
    expected = run(load(small), prompts, PARAMS, method="mtp", k=3)
    found = run(load(bundle), prompts, PARAMS, method="mtp", k=3)
    assert found.outputs == expected.outputs
    assert [r.metrics.accepted for r in found.requests] == [
        r.metrics.accepted for r in expected.requests
    ]


def test_the_ledger_accounts_for_every_tensor(pristine: Path) -> None:
    stored = json.loads((pristine / "model.safetensors.index.json").read_text())[
        "weight_map"
    ].keys()
    ledger = load_model(pristine, LoadOptions()).ledger
    assert ledger.loaded | ledger.tied | ledger.skipped == stored
    assert not ledger.skipped and ledger.loaded | ledger.tied <= ledger.expected
    without = load_model(pristine, LoadOptions(with_mtp=False)).ledger
    assert without.skipped == {n for n in stored if n.startswith(f"model.layers.{MTP_LAYER}.")}


def test_copies_are_tied_and_others_are_not(small: Path, tmp_path: Path) -> None:
    names = {
        "model.layers.3.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight": "lm_head.weight",
    }

    def same(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({own: tensors[main].clone() for own, main in names.items()})

    def other(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({own: tensors[main] * 2 for own, main in names.items()})

    tied = load_model(change(small, tmp_path / "tied", same), LoadOptions())
    assert tied.ledger.tied == names.keys() and tied.model.mtp is not None
    assert tied.model.mtp.embedding is tied.model.embedding
    own = load_model(change(small, tmp_path / "own", other), LoadOptions())
    assert not own.ledger.tied and own.model.mtp is not None
    tokens = torch.arange(96)
    assert torch.equal(own.model.mtp.embedding(tokens), own.model.embedding(tokens) * 2)
    linear = own.model.mtp.head.linear.matrix(torch.float32)
    assert torch.equal(linear, own.model.head.linear.matrix(torch.float32) * 2)


@pytest.mark.parametrize("part", ["model.layers.1.mlp.experts.3.up_proj", "model.layers.3.hnorm"])
def test_damaged_checkpoints_are_refused(small: Path, tmp_path: Path, part: str) -> None:
    name = f"{part}.weight"

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name.replace("weight", "wait")] = tensors[name].clone()

    def reshape(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1].clone()

    edits = {"lost": lambda t: t.pop(name), "more": rename, "shape": reshape}
    for case, edit in edits.items():
        with pytest.raises(InvalidInputError, match=part.replace(".", r"\.")):
            load_model(change(small, tmp_path / case, edit), LoadOptions())  # type: ignore[arg-type]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="neither a bundle nor a checkpoint"):
        load_model(tmp_path, LoadOptions())
    with pytest.raises(UnsupportedError, match="dtype"):
        LoadOptions(dtype="float64")
    for options in ({"device": "cuda"}, {"dequantize_at_load": False}):
        with pytest.raises(UnsupportedError, match="deterministic"):
            LoadOptions(deterministic=True, **options)  # type: ignore[arg-type]


def test_activations_that_go_by_batches_are_not_deterministic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matrix_units, "HAS_TILES", False)
    LoadOptions(deterministic=True, activations="bfloat16")
    monkeypatch.setattr(matrix_units, "HAS_TILES", True)
    LoadOptions(deterministic=True, activations="int8")
    with pytest.raises(UnsupportedError, match="not deterministic on this CPU"):
        LoadOptions(deterministic=True, activations="bfloat16")


@pytest.mark.parametrize("key", ["scoring_func", "topk_method", "hidden_act"])
def test_other_arithmetic_is_refused(variant: Callable[..., Path], key: str) -> None:
    if key == "topk_method":
        return  # the family already promises other tensors
    with pytest.raises(UnsupportedError, match=key):
        load_model(variant(**{key: "other"}), LoadOptions())


WEIGHTS = torch.randn(192, 256, generator=torch.Generator().manual_seed(0))


def encoded(storage: str) -> EncodedWeight:
    """The same weights in any storage."""
    stored_as = FORMATS[storage].of_options(FormatOptions())
    if storage == "bf16":
        return unquantized(WEIGHTS)
    tensors, _ = stored_as.quantize(WEIGHTS, "minmax")
    return stored_as.encoded(tensors)


@pytest.mark.parametrize("storage", [*WRITTEN, None], ids=lambda storage: storage or "stacked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_format_multiplies(storage: str | None, dtype: torch.dtype) -> None:
    """Dequantized at load or in every call, the product is the same."""
    original, weight = WEIGHTS, None if storage is None else encoded(storage)
    if weight is None:
        weight = Stacked((encoded("fp8_block"), unquantized(WEIGHTS[:7])))
        original = torch.cat([original, original[:7]])
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    early = Linear.build(weight, dtype, keep_dense=True)
    late = Linear.build(weight, dtype, keep_dense=False)
    assert torch.equal(early.matrix(dtype), late.matrix(dtype))
    assert torch.allclose(early(x), late(x), atol=0.3 if dtype is torch.bfloat16 else 1e-4)
    assert weight.shape == original.shape
    exact = x.float() @ original.t()
    bound = {
        "bf16": 0.01,
        "fp8_block": 0.05,
        "fp8_channel": 0.05,
        "int8_channel": 0.02,
        "int4_group": 0.2,
        "w4afp8": 0.2,
        "mxfp4_packed": 0.2,
        "mxfp8": 0.05,
        **dict.fromkeys(("nvfp4_packed", "nvfp4_packed_a4", "nvfp4", "nvfp4_a16"), 0.2),
        None: 0.05,
    }
    error = (early(x).float() - exact).norm() / exact.norm()
    assert error < bound[storage]


def test_every_storage_has_a_format() -> None:
    for storage, known in FORMATS.items():
        assert known.storage == storage and known.gate.sqnr_db > 0


def test_quantized_weights_may_stay_as_they_are(pristine: Path) -> None:
    """Dequantizing in every call gives what dequantizing at load gives."""
    (tokens,) = prompts_of([3], 512)
    at_load = load_model(pristine, LoadOptions(with_mtp=False)).model
    in_calls = load_model(pristine, LoadOptions(dequantize_at_load=False, with_mtp=False)).model
    expected, found = Walk(at_load).feed(tokens)[0], Walk(in_calls).feed(tokens)[0]
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_the_contract_reaches_the_drafts(small: Path) -> None:
    """Each field changes the drafts, and never the output."""
    prompts = prompts_of([6, 11, 9], 96)
    drafts = set()
    outputs = []
    for contract in (
        MtpContract(),
        MtpContract(target_hidden=Hidden.BEFORE_NORM),
        MtpContract(recycled_hidden=Hidden.BEFORE_NORM),
        MtpContract(zero_first_embedding=True),
    ):
        options = LoadOptions(deterministic=True, contract=contract)
        model = load_model(small, options).model
        hidden = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
        outputs.append(run(model, prompts, PARAMS, method="mtp", k=3).outputs)
        drafts.add(mtp_fingerprint(model, hidden))
    assert all(output == outputs[0] for output in outputs)
    assert len(drafts) == 4


def mtp_fingerprint(model: object, hidden: torch.Tensor) -> tuple[float, ...]:
    """MTP outputs for positions 0 to 3, and what is fed in and back."""
    from mtp_runtime.cache import lay_out
    from mtp_runtime.models.model import Model

    assert isinstance(model, Model) and model.mtp is not None
    walk = Walk(model)
    walk.pages.append(walk.sequence, 4)
    layout = lay_out(walk.pages, [walk.sequence], [(0, 4)], model.device)
    with torch.inference_mode():
        fed = model.mtp_input(hidden, model.head.normed(hidden))
        out = model.mtp(torch.tensor([5, 6, 7, 8]), fed, walk.cache.mtp[0], layout)
        back = model.mtp.recycled(out, model.mtp.head.normed(out))
    return (float(fed.sum()), float(out.sum()), float(back.sum()))
