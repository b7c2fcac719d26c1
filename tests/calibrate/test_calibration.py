"""quantize --calibrate: the codes that it chooses, what it resumes from, what it refuses."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrate.texts import LENGTH, PROMPT, TEXTS
from cases import Outcome, looks_finished, quantize, read_json, read_tensors, run_program
from faults import planting
from faults.matrix import no_progress
from mtp_export import state_files
from mtp_export.bundle import shares
from mtp_export.calibrate.rounding import Rounder
from mtp_export.verify.check import Level
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import rounding
from mtp_export.verify.options import VerifyOptions
from mtp_kernels.quantize.gptq import Factor, Grid, gptq
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.teacher_forcing import DraftInputs, Text, Texts, draft_states, target_states
from runtime.checkpoints import SMALL, write_checkpoint

gguf = pytest.importorskip("gguf")
CONFIG = SMALL | {
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "q_lora_rank": 32,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
}
INT4 = (
    *("--base-quant", "weight_only_int4", "--mtp-quant", "weight_only_int4"),
    *("--group-size", "32", "--allow-untested-pair"),
    *("--max-shard-size", "20kB"),
)
IN_BF16 = ("--base-quant", "weight_only_nvfp4", "--mtp-quant", "bf16")
NVFP4 = ("--base-quant", "weight_only_nvfp4", "--mtp-quant", "weight_only_nvfp4")
EXPERTS, LAYER = 4, 3
MOST = (0.75, 0.9)  # of the error of rounding to the nearest, by depth


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "model", CONFIG)


@pytest.fixture(scope="module")
def make(source: Path, data: Path) -> Callable[..., Outcome]:
    """A quantization of the source, calibrated."""
    return lambda output, *options: quantize(source, output, *options, "--calibrate", data)


@pytest.fixture(scope="module")
def calibrated(
    make: Callable[..., Outcome], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Outcome, Path]:
    """A finished run, its work folder beside it."""
    output = tmp_path_factory.mktemp("calibrated") / "bundle"
    return make(output, *INT4, "--imatrix", output.with_name("imatrix.gguf")), output


@pytest.fixture(scope="module")
def nearest(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same bundle, every weight rounded to the nearest."""
    output = tmp_path_factory.mktemp("nearest") / "bundle"
    assert quantize(source, output, *INT4).code == 0
    return output


def chosen(bundle: Path) -> dict[str, dict[str, Any]]:
    """The manifest's entries of weights whose codes a calibration chose."""
    shards = read_json(bundle / "mtp_export.json")["parts"]["mtp"]["shards"].values()
    tensors = {name: own for shard in shards for name, own in shard["tensors"].items()}
    return {name: own for name, own in tensors.items() if "rounding" in own}


def files_of(bundle: Path) -> dict[str, bytes]:
    return {
        path.relative_to(bundle).as_posix(): path.read_bytes()
        for path in bundle.rglob("*")
        if path.is_file()
    }


def verify_weights(bundle: Path, source: Path) -> None:
    """Compare all weights with the source's; a random model has no tokenizer."""
    outcome = run_program("verify", bundle, "--source", source, "--level", "weights")
    assert re.search(r"^weights +\d+ pass +[\d.]+ s$", outcome.out, re.MULTILINE), outcome.out


def drafted(model: Model, main: Model) -> list[torch.Tensor]:
    """Output of a model's MTP layer at each depth along the texts, fed by a main model."""
    texts = Texts(tuple(Text(tuple(text), PROMPT) for text in TEXTS))
    hidden = main.mtp_input(*target_states(main, texts))
    return draft_states(model.mtp_modules, DraftInputs(texts, hidden, texts.anchors(0)), len(MOST))


@torch.inference_mode()
def test_the_layer_computes_more_as_before_than_rounded_to_the_nearest(
    source: Path, calibrated: tuple[Outcome, Path], nearest: Path
) -> None:
    """Along the texts that it is calibrated with, at every depth, beside the main model that runs:
    whatever goes wrong between a linear's input and the codes on disk makes it worse."""
    outcome, bundle = calibrated
    assert outcome.code == 0, outcome.err
    original, by_gptq, rounded = (
        load_model(folder, LoadOptions(dequantize_at_load=False)).model
        for folder in (source, bundle, nearest)
    )
    wanted, found, before = (drafted(m, by_gptq) for m in (original, by_gptq, rounded))
    for depth, most in enumerate(MOST):
        error, plain = (
            float((states[depth] - wanted[depth]).square().sum()) for states in (found, before)
        )
        assert error < most * plain


def test_the_manifest_and_the_result_say_what_was_gained(calibrated: tuple[Outcome, Path]) -> None:
    outcome, bundle = calibrated
    facts = chosen(bundle)
    assert len(facts) == 3 * EXPERTS
    for own in facts.values():
        assert own["rounding"] == "gptq" and own["operation"] == "quantize_int4_group"
        assert own["outputs_sqnr_db"] > own["nearest_outputs_sqnr_db"] + 0.5
        assert own["sqnr_db"] > 12
    recorded = read_json(bundle / "mtp_export.json")["options"]["calibrate"]
    assert recorded["method"] == "gptq" and recorded["texts"] == len(TEXTS)
    assert re.search(rf"Calibrated: {3 * EXPERTS} weights, SQNR of outputs [\d.]+ dB", outcome.out)


@pytest.mark.nightly
def test_verify_passes_it(calibrated: tuple[Outcome, Path], source: Path) -> None:
    verify_weights(calibrated[1], source)


def test_its_imatrix_has_the_sums_of_squares(calibrated: tuple[Outcome, Path]) -> None:
    """By the names of gguf's own tables, as llama.cpp's loader takes them: sums of all experts."""
    reader = gguf.GGUFReader(calibrated[1].with_name("imatrix.gguf"))
    found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    kinds = ("FFN_GATE_EXP", "FFN_UP_EXP", "FFN_DOWN_EXP")
    names = [gguf.TENSOR_NAMES[getattr(gguf.MODEL_TENSOR, kind)] for kind in kinds]
    gate, up, down = (f"{name.format(bid=LAYER)}.weight" for name in names)
    ends = ("in_sum2", "counts")
    assert found.keys() == {f"{name}.{end}" for name in (gate, up, down) for end in ends}
    (work,) = calibrated[1].with_name("bundle-work").iterdir()
    parts = [state_files.load(path) for path in (work / "inputs").iterdir()]
    rows = torch.cat([part[f"model.layers.{LAYER}.mlp"] for part in parts]).float()
    sums = rows.square().sum(dim=0).expand(EXPERTS, -1)
    for name in (gate, up):
        torch.testing.assert_close(found[f"{name}.in_sum2"], sums, rtol=1e-4, atol=1e-6)
    assert found[f"{down}.in_sum2"].shape == (EXPERTS, CONFIG["moe_intermediate_size"])
    assert not found[f"{down}.in_sum2"][0].allclose(found[f"{down}.in_sum2"][1])
    assert all(found[f"{name}.counts"].tolist() == [[len(rows)]] * EXPERTS for name in (gate, down))
    keys = {key: reader.fields[key].contents() for key in reader.fields if "." in key}
    assert keys["general.type"] == "imatrix" and keys["imatrix.datasets"] == ["texts.jsonl"]
    assert keys["imatrix.chunk_count"] == len(TEXTS) and keys["imatrix.chunk_size"] > 0


def test_verify_names_the_hessian_of_another_layer(
    calibrated: tuple[Outcome, Path], source: Path, data: Path, tmp_path: Path
) -> None:
    """Of one expert; the others, beside texts that they were not calibrated with, pass. So it is by
    their outputs: of the weights themselves both lose more than the nearest codes."""
    bundle = Path(shutil.copytree(calibrated[1], tmp_path / "bundle"))
    weights, random = read_tensors(source), torch.Generator().manual_seed(5)
    wrong = [name for name in chosen(bundle) if ".experts.1." in name]
    for name in wrong:
        prefix = name.removesuffix("_packed")
        scale = planting.read(bundle / "mtp", f"{prefix}_scale")
        mixed = torch.randn(16, len(TEXTS[0]) * 16, generator=random).t()
        x = (mixed @ torch.randn(16, 64, generator=random)) * torch.linspace(0.1, 4, 64)
        grid = Grid.int4(scale.float(), 32)
        codes = gptq(weights[prefix].float(), Factor.of(x.t() @ x), grid)
        planting.write(bundle / "mtp", {name: grid.stored(codes)})
    texts = [json.loads(line) for line in data.read_text().splitlines()]
    prompts = tmp_path / "prompts.jsonl"
    others = [{"prompt_token_ids": text["prompt_token_ids"][::-1]} for text in texts]
    prompts.write_text("\n".join(map(json.dumps, others)))
    options = VerifyOptions(bundle, source, Level.RUN, prompts=prompts, max_new_tokens=32)
    (item,) = rounding.run(Context.open(options, no_progress))
    assert {one["subject"] for one in item.data["problems"]} == {*wrong}
    assert "Its Hessian was that of another layer" in item.cause


@pytest.mark.nightly
def test_a_work_folder_without_links_gets_copies(
    calibrated: tuple[Outcome, Path],
    make: Callable[..., Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def elsewhere(*arguments: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", elsewhere)
    monkeypatch.setattr(fcntl, "ioctl", elsewhere)
    assert make(tmp_path / "bundle", *INT4).code == 0
    assert files_of(tmp_path / "bundle") == files_of(calibrated[1])


def test_it_resumes_by_expert_and_ends_with_the_same_bytes(
    calibrated: tuple[Outcome, Path],
    make: Callable[..., Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output, rounded = tmp_path / "bundle", Rounder.rounded
    done: list[str] = []

    def interrupted(self: Rounder, unit: Any, *given: Any) -> dict[str, Any]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(unit.name)
        return rounded(self, unit, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Rounder, "rounded", interrupted)
        assert make(output, *INT4).code == 130
    assert not (output / "mtp_export.json").exists() and not (output / "mtp/config.json").exists()
    more: list[str] = []

    def counted(self: Rounder, unit: Any, *given: Any) -> dict[str, Any]:
        more.append(unit.name)
        return rounded(self, unit, *given)

    monkeypatch.setattr(Rounder, "rounded", counted)
    assert make(output, *INT4).code == 0
    assert len({*done, *more}) == len(done) + len(more) == EXPERTS
    assert files_of(output) == files_of(calibrated[1])


def test_shares_make_the_bundle_of_one_run(
    calibrated: tuple[Outcome, Path],
    make: Callable[..., Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One after the other. What goes into the MTP layer comes of the whole main part: a share says
    which others are missing, and then goes on."""
    monkeypatch.setattr(shares, "PATIENCE_SECONDS", 0)
    output, rounded, units = tmp_path / "bundle", Rounder.rounded, list[str]()

    def counted(self: Rounder, unit: Any, *given: Any) -> dict[str, Any]:
        units.append(unit.name)
        return rounded(self, unit, *given)

    monkeypatch.setattr(Rounder, "rounded", counted)
    early = make(output, *INT4, "--share", "2/3")
    said = " ".join(early.err.split())
    assert early.code == 6 and "the whole main part" in said and "1/3 (not begun)" in said
    assert "3/3" not in said and not units
    for share in ("1/3", "2/3", "3/3"):
        before = len(units)
        assert make(output, *INT4, "--share", share).code == 0
        assert (len(units) == before) == (share == "1/3")  # which has the main part
        assert not looks_finished(output)
    assert len({*units}) == len(units) == EXPERTS  # none twice
    finished = run_program("finish", output)
    assert finished.code == 0 and f"Calibrated: {3 * EXPERTS} weights" in finished.out
    assert files_of(output) == files_of(calibrated[1])


def test_shares_of_other_rows_or_another_work_folder_are_refused(
    make: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Scales of AWQ that two folders have may differ, and so may rows in bits."""
    common = (*NVFP4, "--method", "awq", "--max-shard-size", "20kB")
    assert make(tmp_path / "bundle", *common, "--share", "1/3").code == 0
    other = str(tmp_path / "other")
    for given, found in ((("--stream",), True), (("--workdir", other), other)):
        refused = make(tmp_path / "bundle", *common, *given, "--share", "2/3")
        said = "".join(refused.err.split())
        assert refused.code == 8 and "holdssharesofsomethingelse" in said
        assert f"calibration{given[0]}{found}(now)" in said


def test_without_a_factor_weights_are_rounded_to_the_nearest_and_named(
    nearest: Path, make: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(hessian: torch.Tensor, damping: float = 0.0) -> Factor:
        raise ValueError("its Hessian has no Cholesky factor")

    monkeypatch.setattr(Factor, "of", fails)
    outcome = make(tmp_path / "bundle", *INT4)
    assert outcome.code == 0
    said = " ".join(outcome.out.split())
    assert f"{3 * EXPERTS} weights rounded to the nearest after all: " in said
    assert "(its Hessian has no Cholesky factor)" in said
    own, plain = files_of(tmp_path / "bundle"), files_of(nearest)
    assert own.pop("mtp_export.json") != plain["mtp_export.json"]
    assert own == {name: data for name, data in plain.items() if name != "mtp_export.json"}


def test_a_damaged_file_of_the_work_folder_is_named(
    calibrated: tuple[Outcome, Path], make: Callable[..., Outcome], tmp_path: Path
) -> None:
    (work,) = calibrated[1].with_name("bundle-work").iterdir()
    file = sorted((work / "weights").iterdir())[0]
    kept = file.read_bytes()
    damaged = bytearray(kept)
    damaged[len(kept) // 2] ^= 1
    try:
        file.write_bytes(damaged)
        outcome = make(calibrated[1], *INT4, "--overwrite")
    finally:
        file.write_bytes(kept)
    assert outcome.code == 3 and file.name in outcome.err and "Remove it" in outcome.err


@pytest.mark.nightly
def test_nvfp4_of_all_linears(make: Callable[..., Outcome], source: Path, tmp_path: Path) -> None:
    """Attention and shared experts too; what engines join shares one number."""
    bundle = tmp_path / "bundle"
    assert make(bundle, *NVFP4).code == 0
    facts = chosen(bundle)
    assert any("self_attn" in name for name in facts)
    assert any("shared_experts" in name for name in facts)
    better = [own["outputs_sqnr_db"] > own["nearest_outputs_sqnr_db"] for own in facts.values()]
    assert sum(better) > 0.8 * len(better)
    verify_weights(bundle, source)


def test_a_dry_run_says_what_it_takes_and_writes_nothing(
    make: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = make(tmp_path / "bundle", *INT4, "--dry-run", "--json")
    assert outcome.code == 0, outcome.err
    said = " ".join(json.loads(outcome.out)["remarks"])
    rows = 3 * len(TEXTS) * LENGTH
    assert f"Calibration of the MTP part: {3 * EXPERTS} weights by {rows} rows" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((*INT4, "--share", "1/2", "--calibrate-main"), 2, "of a main model is not divided"),
        (
            (*INT4, "--share", "1/2", "--imatrix", "{folder}/a.gguf"),
            2,
            "--imatrix takes the inputs of all weights",
        ),
        ((*INT4, "--cluster", "local"), 2, "The tasks of a cluster share no work folder"),
        ((*INT4, "--part", "mtp"), 2, "the main model of the bundle that it is part of"),
        (
            (*IN_BF16, "--imatrix", "{folder}/bundle/x.gguf"),
            2,
            "neither in --imatrix nor around it",
        ),
        (IN_BF16, 4, "no weight whose codes a calibration chooses"),
    ],
    ids=[
        *("share of main", "imatrix of a share", "cluster", "mtp alone"),
        *("imatrix in the bundle", "mtp in bf16"),
    ],
)
def test_refusals(
    options: tuple[str, ...],
    code: int,
    said: str,
    make: Callable[..., Outcome],
    tmp_path: Path,
) -> None:
    outcome = make(tmp_path / "bundle", *(word.format(folder=tmp_path) for word in options))
    assert outcome.code == code and said in " ".join(outcome.err.split()), outcome.err
    assert list(tmp_path.iterdir()) == []


def test_an_imatrix_alone_is_refused(tmp_path: Path) -> None:
    paths = ("--output-dir", tmp_path / "bundle", "--imatrix", tmp_path / "a.gguf")
    refused = run_program("quantize", tmp_path / "source", *paths)
    assert (refused.code, list(tmp_path.iterdir())) == (2, [])
    assert "--imatrix beside --calibrate" in refused.err
