"""quantize --calibrate --method awq: scales before rounding, folded into what comes before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.test_calibration import (
    CONFIG,
    EXPERTS,
    INT4,
    LAYER,
    NVFP4,
    chosen,
    drafted,
    files_of,
    gguf,
    verify_weights,
)
from calibrate.texts import LENGTH, TEXTS
from cases import (
    Outcome,
    make_checkpoint,
    nightly_but,
    quantize,
    read_json,
    read_tensors,
    run_program,
)
from faults import planting
from faults.matrix import no_progress
from fuzz.lab import CONFIG as IN_FP8
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.tensors.bundle_folder import open_checkpoint
from mtp_checkpoints.weights.folding import Folding, of_letters
from mtp_export.bundle.folded_scales import refuse_folded
from mtp_export.bundle.options import BundleOptions, Part
from mtp_export.bundle.quantize import QuantizeOptions, plan_quantize
from mtp_export.calibrate.linears import Linears
from mtp_export.calibrate.options import Method
from mtp_export.calibrate.rounding import Inputs, Rounder
from mtp_export.tune.source_bundle import SourceBundle
from mtp_export.verify.check import Level
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import rounding
from mtp_export.verify.options import VerifyOptions
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.streaming import attend_through, open_streamed, pass_through
from mtp_runtime.teacher_forcing import PagedTexts, Text, Texts
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint

AWQ = ("--method", "awq")
NORM = f"model.layers.{LAYER}.post_attention_layernorm.weight"
ROUTER = f"model.layers.{LAYER}.mlp.gate.weight"
SHARED = f"model.layers.{LAYER}.mlp.shared_experts.up_proj.weight"
DENSE = SMALL_CONFIGS["mimo"] | {"torch_dtype": "bfloat16"}
DENSE_NORM = "model.mtp_layers.0.post_attention_layernorm.weight"
LEAST_DB = 14.0  # of what the layer makes: with a fold left out it has less than 8
LAST = LAYER - 1  # of the main layers; those with experts are this and the one before
MAIN_NORM = NORM.replace(str(LAYER), str(LAST))
MAIN_ROUTER = ROUTER.replace(str(LAYER), str(LAST))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which some columns go into experts large."""
    folder = write_checkpoint(tmp_path_factory.mktemp("source") / "model", CONFIG)
    tensors = load_file(folder / "model.safetensors")
    for norm in (NORM, MAIN_NORM):
        tensors[norm][::9] *= 30
    alone = {name: tensors.pop(name) for name in (MAIN_NORM, MAIN_ROUTER)}  # a shard to be linked
    for number, shard in enumerate((tensors, alone), 1):
        path = folder / f"model-{number:05d}-of-00002.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    places = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
    places |= dict.fromkeys(alone, "model-00002-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def scaled(
    source: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Outcome, Path]:
    """Both parts with scales."""
    output = tmp_path_factory.mktemp("scaled") / "bundle"
    options = (*INT4, "--calibrate", data, *AWQ, "--calibrate-main")
    return quantize(source, output, *options, "--imatrix", output.with_name("a.gguf")), output


def layer_db(bundle: Path, source: Path) -> float:
    """SQNR of what the MTP layer makes along the texts, beside the main model that runs."""
    original, own = (
        load_model(folder, LoadOptions(dequantize_at_load=False)).model
        for folder in (source, bundle)
    )
    with torch.inference_mode():
        wanted, found = (drafted(model, own)[0] for model in (original, own))
    noise = (found - wanted).square().sum()
    return float(10 * torch.log10(wanted.square().sum() / noise))


def test_the_outputs_are_closer(scaled: tuple[Outcome, Path], source: Path) -> None:
    """Those of linears, and so those of the layer."""
    outcome, bundle = scaled
    assert outcome.code == 0, outcome.err
    facts = chosen(bundle)
    assert len(facts) == 3 * EXPERTS
    for name, own in facts.items():
        if "down_proj" not in name:
            assert own["rounding"] == "awq"
            assert own["outputs_sqnr_db"] > own["nearest_outputs_sqnr_db"] + 1
    recorded = read_json(bundle / "mtp_export.json")["options"]["calibrate"]
    assert recorded["method"] == "awq" and "damping" not in recorded
    assert layer_db(bundle, source) > LEAST_DB
    assert f"Calibrated: {3 * 3 * EXPERTS} weights" in " ".join(outcome.out.split())


@pytest.mark.parametrize(("part", "layer"), [("main", LAST), ("mtp", LAYER)])
def test_what_is_no_code_is_scaled_exactly(
    part: str, layer: int, scaled: tuple[Outcome, Path], source: Path
) -> None:
    """By the powers of two that the norm is divided by, in its dtype."""
    found, before = read_tensors(scaled[1] / part), read_tensors(source)
    norm, *others = (name.replace(str(LAYER), str(layer)) for name in (NORM, ROUTER, SHARED))
    scales = before[norm].double() / found[norm].double()
    assert scales.unique().numel() > 1 and scales.log2().frac().eq(0).all()
    for name in others:
        assert found[name].dtype == before[name].dtype
        assert found[name].double().equal(before[name].double() * scales)


@torch.inference_mode()
def test_scales_are_those_of_what_the_scaled_layers_make(
    scaled: tuple[Outcome, Path], source: Path
) -> None:
    """By the bundle itself, run up to the last layer's experts: with its own norm undone."""
    texts = Texts(tuple(Text(tuple(text), len(text)) for text in TEXTS))
    streamed, paged = open_streamed(scaled[1], "cpu"), PagedTexts.of(texts)
    x, chunks = streamed.embedded(texts.tokens), paged.chunks(torch.device("cpu"))
    *before, last = streamed.layers(0)
    for layer in before:
        pass_through(layer, x, paged, chunks)
    attend_through(last, x, paged, chunks)
    (letters,) = (own for name, own in folded_of(scaled[1], "main") if name == MAIN_NORM)
    exponents = of_letters(letters, CONFIG["hidden_size"])
    assert exponents is not None
    rows = Folding(rows=-exponents).of(last.fed(x).t()).t().bfloat16().float()
    options = QuantizeOptions(
        BundleOptions(source, scaled[1].with_name("unwritten")),
        base_quant="weight_only_int4",
        mtp_quant="weight_only_int4",
        group_size=32,
        allow_untested_pair=True,
    )
    linears = Linears(plan_quantize(options, dry_run=True), "main")
    rounder, units = Rounder(linears, Method.AWQ), linears.experts[LAST]
    assert rounder.exponents(units, Inputs.of(iter([rows]), len(exponents))).equal(exponents)


def folded_of(bundle: Path, part: str) -> Iterator[tuple[str, str]]:
    """Tensors of a part that were divided, with their exponents."""
    for shard in read_json(bundle / "mtp_export.json")["parts"][part]["shards"].values():
        yield from (
            (name, own["folded"]) for name, own in shard["tensors"].items() if "folded" in own
        )


def test_the_imatrix_has_main_layers_too(scaled: tuple[Outcome, Path]) -> None:
    """Of unscaled inputs, by which another program rounds the model as it was released."""
    reader = gguf.GGUFReader(scaled[1].with_name("a.gguf"))
    found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    kinds = ("FFN_GATE_EXP", "FFN_UP_EXP", "FFN_DOWN_EXP")
    names = [gguf.TENSOR_NAMES[getattr(gguf.MODEL_TENSOR, kind)] for kind in kinds]
    layers = (LAST - 1, LAST, LAYER)
    every = {f"{name.format(bid=layer)}.weight" for name in names for layer in layers}
    assert found.keys() == {f"{name}.{end}" for name in every for end in ("in_sum2", "counts")}
    sums = [found[f"blk.{layer}.ffn_up_exps.weight.in_sum2"] for layer in layers]
    assert all(own.shape == (EXPERTS, CONFIG["hidden_size"]) for own in sums)
    assert (sums[1][0][::9].mean() > 50 * sums[1][0].median()).all()
    counts = found[f"blk.{LAST}.ffn_down_exps.weight.counts"]
    assert counts.tolist() == [[len(TEXTS) * LENGTH]] * EXPERTS


def test_verify_passes_it(scaled: tuple[Outcome, Path], source: Path) -> None:
    verify_weights(scaled[1], source)


@pytest.mark.nightly
def test_verify_judges_outputs_under_the_scales(
    scaled: tuple[Outcome, Path], source: Path, data: Path
) -> None:
    """Of both parts, along the texts of a run: as near as with the nearest codes."""
    options = VerifyOptions(scaled[1], source, Level.RUN, prompts=data, max_new_tokens=2)
    items = [*rounding.run(Context.open(options, no_progress))]
    assert [item.status for item in items] == ["pass", "pass"], items


def test_no_bundle_is_made_of_its_layer(scaled: tuple[Outcome, Path]) -> None:
    for part in Part:
        with pytest.raises(UnsupportedError) as caught:
            refuse_folded(open_checkpoint(scaled[1]), part)
        assert "tensors that were divided" in str(caught.value)
        assert "--method awq" in str(caught.value)
    with pytest.raises(UnsupportedError, match="scales of AWQ"):
        SourceBundle.open(scaled[1])


@pytest.mark.nightly
def test_scales_of_inner_values_cost_up_no_more_than_down_gains(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of nvfp4, where rows that are divided get other codes: both together lose less than with the
    scales that are best for down."""
    options = QuantizeOptions(
        BundleOptions(source, tmp_path / "bundle"),
        base_quant="weight_only_nvfp4",
        mtp_quant="weight_only_nvfp4",
    )
    linears = Linears(plan_quantize(options, dry_run=True))
    width, real = CONFIG["hidden_size"], Linears.values

    def values(self: Linears, name: str) -> torch.Tensor:
        """Of up some rows large, which make large inner values."""
        own = real(self, name)
        own[::9] *= 30 if "up_proj" in name else 1
        return own

    monkeypatch.setattr(Linears, "values", values)
    x = torch.randn(512, width, generator=torch.Generator().manual_seed(3))
    inputs, columns = Inputs.of(iter([x]), width), torch.zeros(width, dtype=torch.int8)

    def lost() -> float:
        rounder, total = Rounder(linears, Method.AWQ), 0.0
        for unit in linears.of_experts:
            found = rounder.rounded(unit, [x], inputs, columns)
            own = (found[name]["facts"] for name in (unit.weights[-1], str(unit.down)))
            total += sum(10 ** (-facts["outputs_sqnr_db"] / 10) for facts in own)
        return total

    def by_down(
        self: Rounder, own: dict[str, torch.Tensor], columns: torch.Tensor, both: dict[str, Inputs]
    ) -> torch.Tensor:
        down = list(both)[-1]
        weights = {down: own[down]}
        return self._exponents(weights, both, lambda e: {down: Folding(columns=e)}, [down])

    found = lost()
    monkeypatch.setattr(Rounder, "_inner_exponents", by_down)
    assert found < lost()


@pytest.mark.parametrize("name", nightly_but([MAIN_ROUTER], [NORM, ROUTER, SHARED, MAIN_ROUTER]))
def test_a_tensor_without_its_scales_is_named(
    name: str, scaled: tuple[Outcome, Path], source: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(scaled[1], tmp_path / "bundle"))
    part = "main" if name == MAIN_ROUTER else "mtp"
    planting.write(bundle / part, {name: read_tensors(source)[name]})
    outcome = run_program("verify", bundle, "--source", source, "--level", "weights", "--json")
    checks = {one["name"]: one for one in json.loads(outcome.out)["checks"]}
    failed = [one for one in checks["weights"]["items"] if one["status"] == "fail"]
    assert [one["subject"] for one in failed] == [name]
    assert "mlp.gate" in name or layer_db(bundle, source) < LEAST_DB


@pytest.mark.nightly
def test_it_resumes_with_the_same_bytes(
    scaled: tuple[Outcome, Path], source: Path, data: Path
) -> None:
    """Without some codes and the scales, which are chosen again."""
    bundle, before = scaled[1], files_of(scaled[1])
    (work,) = bundle.with_name("bundle-work").iterdir()
    for scales in (work / "scales").iterdir():
        scales.unlink()
    sorted((work / "weights").iterdir())[0].unlink()
    options = (*INT4, "--calibrate", data, *AWQ, "--calibrate-main")
    again = quantize(source, bundle, *options, "--overwrite")
    assert again.code == 0 and files_of(bundle) == before


@pytest.mark.nightly
def test_nvfp4_of_norms_with_an_offset(data: Path, tmp_path: Path) -> None:
    """Of a shared expert behind a gate; what engines join shares one number with its scales."""
    config: dict[str, Any] = SMALL_CONFIGS["qwen3_next"] | {"torch_dtype": "bfloat16"}
    source = write_checkpoint(tmp_path / "model", config)
    norm = "mtp.layers.0.post_attention_layernorm.weight"
    tensors = load_file(source / "model.safetensors")
    tensors[norm][::9] += 20
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    bundle = tmp_path / "bundle"
    outcome = quantize(source, bundle, *NVFP4, "--calibrate", data, *AWQ, "--calibrate-main")
    assert outcome.code == 0, outcome.err
    assert len([*folded_of(bundle, "main")]) >= config["num_hidden_layers"]
    facts = chosen(bundle)
    assert {own["rounding"] for own in facts.values()} == {"awq", "nearest"}
    verify_weights(bundle, source)
    assert layer_db(bundle, source) > LEAST_DB
    again = quantize(bundle, tmp_path / "again", *NVFP4)
    assert again.code == 4 and "scales of AWQ folded in" in " ".join(again.err.split())
    assert not (tmp_path / "again").exists()


def test_dense_mlps_get_scales(data: Path, tmp_path: Path) -> None:
    """Of main layers and of the MTP layer: one expert each, before which there is no router."""
    source = write_checkpoint(tmp_path / "model", DENSE)
    tensors = load_file(source / "model.safetensors")
    tensors[DENSE_NORM][::9] *= 30
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    bundle = tmp_path / "bundle"
    outcome = quantize(source, bundle, *NVFP4, "--calibrate", data, *AWQ, "--calibrate-main")
    assert outcome.code == 0, outcome.err
    divided = {name for name, _ in folded_of(bundle, "main")}
    for layer in range(DENSE["num_hidden_layers"]):
        assert {name for name in divided if f"layers.{layer}." in name} == {
            f"model.layers.{layer}.{name}"
            for name in ("post_attention_layernorm.weight", "mlp.up_proj.weight_packed")
        }
    assert {name for name, _ in folded_of(bundle, "mtp")} > {DENSE_NORM}
    mlps = {name: own for name, own in chosen(bundle).items() if ".mlp." in name}
    assert len(mlps) == 3 and {own["rounding"] for own in mlps.values()} == {"awq"}
    verify_weights(bundle, source)
    assert layer_db(bundle, source) > LEAST_DB
    planting.write(bundle / "mtp", {DENSE_NORM: tensors[DENSE_NORM]})
    assert layer_db(bundle, source) < LEAST_DB


def test_scales_fold_beside_a_vision_tower(tmp_path: Path) -> None:
    """Whose tensors are carried, and are no weights of the family."""
    source = write_checkpoint(tmp_path / "model", SMALL_CONFIGS["qwen3_5_moe"])
    assert any("visual" in name for name in read_tensors(source))
    options = QuantizeOptions(
        BundleOptions(source, tmp_path / "bundle"),
        base_quant="weight_only_nvfp4",
        mtp_quant="weight_only_nvfp4",
    )
    linears = Linears(plan_quantize(options, dry_run=True), "main")
    assert linears.folds.keys() == {layer.feed_forward_prefix for layer in linears.layers}


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (SMALL_CONFIGS["exaone4_5"], NVFP4, "has norms after its parts"),
        (SMALL_CONFIGS["nemotron_h"], NVFP4, "Experts without gates are not calibrated"),
        (IN_FP8, INT4, "mlp.shared_experts.gate_proj.weight, which is neither rounded"),
    ],
    ids=["norms after", "without gates", "fp8 beside int4"],
)
def test_refusals(
    config: dict[str, Any], options: tuple[str, ...], said: str, data: Path, tmp_path: Path
) -> None:
    write = make_checkpoint if config is IN_FP8 else write_checkpoint
    source = write(tmp_path / "model", config)
    outcome = quantize(source, tmp_path / "bundle", *options, "--calibrate", data, *AWQ)
    assert outcome.code == 4 and said in " ".join(outcome.err.split()), outcome.err
    assert not (tmp_path / "bundle").exists()


def test_a_method_alone_is_refused(tmp_path: Path) -> None:
    refused = run_program("quantize", tmp_path / "s", "--output-dir", tmp_path / "b", *AWQ)
    assert refused.code == 2 and "--method beside --calibrate" in refused.err
