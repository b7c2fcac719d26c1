"""quantize --calibrate-main: codes of main layers, chosen by what the quantized layers before them
make of texts."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from calibrate.test_calibration import CONFIG, EXPERTS, NVFP4, files_of, gguf, verify_weights
from calibrate.texts import LENGTH, TEXTS
from cases import Outcome, quantize, read_json, read_tensors, run_program
from faults import planting
from faults.matrix import no_progress
from mtp_checkpoints.containers.gguf_architectures import ARCHITECTURE_OF
from mtp_checkpoints.tensors.bundle_folder import open_checkpoint
from mtp_export import state_files
from mtp_export.calibrate import hidden_states
from mtp_export.calibrate.main_model import MainCalibration
from mtp_export.calibrate.rounding import Rounder
from mtp_export.verify.check import Level
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import rounding
from mtp_export.verify.evidence.prompts import encoded
from mtp_export.verify.options import VerifyOptions
from mtp_kernels.quantize.gptq import Factor, Grid, gptq
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.streaming import attend_through, open_streamed, pass_through
from mtp_runtime.teacher_forcing import PagedTexts, Text, Texts, target_states
from peak_memory import peak_bytes
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint

MINIATURE = Path(__file__).parents[2] / "fixtures/deepseek-v3-tiny"
PROMPTS = MINIATURE.with_name("prompts.jsonl")
MAIN = ("--calibrate-main",)
PAIR = (
    *("--base-quant", "weight_only_int4", "--mtp-quant", "weight_only_int8"),
    *("--group-size", "32"),
)
LAYERS = (1, 2)  # with experts
GATE = "model.layers.2.mlp.experts.1.gate_proj"


@pytest.fixture(scope="module", autouse=True)
def parts() -> Iterator[None]:
    """Two texts are in memory at a time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hidden_states, "PART_TOKENS", 2 * LENGTH + LENGTH // 2)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a file for each layer."""
    folder = write_checkpoint(tmp_path_factory.mktemp("source") / "model", CONFIG)
    shards = defaultdict[str, dict[str, torch.Tensor]](dict)
    for name, tensor in read_tensors(folder).items():
        layer = name.removeprefix("model.layers.")[0]
        shards[f"model-0000{layer if layer.isdigit() else 9}.safetensors"][name] = tensor
    (folder / "model.safetensors").unlink()
    for file, tensors in shards.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    places = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def make(source: Path, data: Path) -> Callable[..., Outcome]:
    """A quantization of the source whose main model is calibrated."""
    return lambda output, *options: quantize(
        source, output, *PAIR, *MAIN, "--calibrate", data, *options
    )


@pytest.fixture(scope="module")
def calibrated(
    make: Callable[..., Outcome], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Outcome, Path]:
    output = tmp_path_factory.mktemp("calibrated") / "bundle"
    return make(output), output


def hidden(folder: Path, given: Sequence[Sequence[int]] = TEXTS) -> torch.Tensor:
    """Hidden states after the last layer, along texts."""
    texts = Texts(tuple(Text(tuple(text), len(text)) for text in given))
    model = load_model(folder, LoadOptions(dequantize_at_load=False)).model
    with torch.inference_mode():
        return target_states(model, texts)[0]


def sqnr_db(found: torch.Tensor, wanted: torch.Tensor) -> float:
    noise = (found - wanted).square().sum()
    return float(10 * torch.log10(wanted.square().sum() / noise))


def test_the_result_and_the_manifest_say_so(calibrated: tuple[Outcome, Path]) -> None:
    outcome, bundle = calibrated
    assert outcome.code == 0, outcome.err
    assert read_json(bundle / "mtp_export.json")["options"]["calibrate"]["parts"] == ["main"]
    count = 3 * EXPERTS * len(LAYERS)
    assert f"Calibrated: {count} weights" in " ".join(outcome.out.split())
    left = {path.parent.name for path in bundle.with_name("bundle-work").rglob("*.pt")}
    assert left == {"squares"}


@torch.inference_mode()
def test_codes_are_those_of_what_the_quantized_layers_make(
    calibrated: tuple[Outcome, Path], source: Path
) -> None:
    """By the bundle itself, which is run up to the input of the last layer's experts."""
    bundle = calibrated[1]
    texts = Texts(tuple(Text(tuple(text), len(text)) for text in TEXTS))
    streamed, paged = open_streamed(bundle, "cpu"), PagedTexts.of(texts)
    x, chunks = streamed.embedded(texts.tokens), paged.chunks(torch.device("cpu"))
    *before, last = streamed.layers(0)
    for layer in before:
        pass_through(layer, x, paged, chunks)
    attend_through(last, x, paged, chunks)
    rows = last.fed(x).bfloat16().float()
    stored = read_tensors(bundle / "main")
    grid = Grid.int4(stored[f"{GATE}.weight_scale"].float(), 32)
    weight = read_tensors(source)[f"{GATE}.weight"].float()
    codes = grid.stored(gptq(weight, Factor.of(rows.t() @ rows), grid))
    assert codes.equal(stored[f"{GATE}.weight_packed"])


def test_it_resumes_by_layer_and_ends_with_the_same_bytes(
    calibrated: tuple[Outcome, Path],
    make: Callable[..., Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interrupted in the last layer, the shards before it finished: no expert that was done, and no
    layer, is done again."""
    output, rounded, passed = tmp_path / "bundle", Rounder.rounded, MainCalibration._pass
    done: list[str] = []

    def interrupted(self: Rounder, unit: Any, *given: Any) -> dict[str, Any]:
        if len(done) == EXPERTS + 1:
            raise KeyboardInterrupt
        done.append(unit.name)
        return rounded(self, unit, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Rounder, "rounded", interrupted)
        assert make(output).code == 130
    assert not (output / "mtp_export.json").exists() and not (output / "main/config.json").exists()
    assert len([*(output / "main").glob("*.safetensors")]) == 3
    states = [*output.with_name("bundle-work").rglob("part-*.pt")]
    assert {path.parent.name for path in states} == {"hidden-00002", "attended-00002"}
    assert {len(state_files.load(path)["rows"]) for path in states} == {2 * LENGTH}
    assert len(states) == len(TEXTS)
    more: list[str] = []
    layers: list[int] = []

    def counted(self: Rounder, unit: Any, *given: Any) -> dict[str, Any]:
        more.append(unit.name)
        return rounded(self, unit, *given)

    def passing(self: MainCalibration, number: int) -> None:
        layers.append(number)
        passed(self, number)

    monkeypatch.setattr(Rounder, "rounded", counted)
    monkeypatch.setattr(MainCalibration, "_pass", passing)
    assert make(output).code == 0
    assert len({*done, *more}) == len(done) + len(more) == EXPERTS * len(LAYERS)
    assert layers == [2]
    assert files_of(output) == files_of(calibrated[1])


@pytest.mark.nightly
def test_verify_passes_it(calibrated: tuple[Outcome, Path], source: Path) -> None:
    verify_weights(calibrated[1], source)


@pytest.mark.nightly
def test_verify_names_the_hessian_of_another_layer(
    calibrated: tuple[Outcome, Path], source: Path, data: Path, tmp_path: Path
) -> None:
    """Of one linear; all others pass."""
    bundle = Path(shutil.copytree(calibrated[1], tmp_path / "bundle"))
    stored = read_tensors(bundle / "main")
    grid = Grid.int4(stored[f"{GATE}.weight_scale"].float(), 32)
    x = hidden(source)[:, torch.randperm(CONFIG["hidden_size"])] * torch.linspace(0.1, 4, 64)
    weight = read_tensors(source)[f"{GATE}.weight"].float()
    codes = grid.stored(gptq(weight, Factor.of(x.t() @ x), grid))
    planting.write(bundle / "main", {f"{GATE}.weight_packed": codes})
    options = VerifyOptions(bundle, source, Level.RUN, prompts=data, max_new_tokens=2)
    (item,) = rounding.run(Context.open(options, no_progress))
    assert [one["subject"] for one in item.data["problems"]] == [f"{GATE}.weight_packed"]
    assert "Its Hessian was that of another layer" in item.cause


def test_a_dry_run_says_what_it_takes_and_writes_nothing(
    make: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = make(tmp_path / "bundle", "--dry-run", "--json")
    said = " ".join(json.loads(outcome.out)["remarks"])
    count, rows = 3 * EXPERTS * len(LAYERS), len(TEXTS) * LENGTH
    words = f"of the main model, layer by layer: {count} weights by {rows} rows"
    assert words in said and "MTP part" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "options", "code", "said"),
    [
        (CONFIG, ("--base-quant", "bf16"), 4, "The main part has no weight whose codes"),
        (SMALL_CONFIGS["ernie4_5_moe"], NVFP4, 4, "The runtime has no layer"),
    ],
    ids=["bf16", "not run"],
)
def test_refusals(
    config: dict[str, Any],
    options: tuple[str, ...],
    code: int,
    said: str,
    data: Path,
    tmp_path: Path,
) -> None:
    source = write_checkpoint(tmp_path / "model", config)
    given = (*PAIR, "--calibrate", data, *MAIN, *options)
    outcome = quantize(source, tmp_path / "bundle", *given)
    assert outcome.code == code and said in " ".join(outcome.err.split()), outcome.err
    assert not (tmp_path / "bundle").exists()


def test_it_needs_texts(tmp_path: Path) -> None:
    refused = run_program("quantize", tmp_path / "s", "--output-dir", tmp_path / "b", *MAIN)
    assert refused.code == 2 and "--calibrate-main beside --calibrate" in refused.err


@pytest.mark.nightly
def test_the_trained_model_computes_more_as_before(tmp_path: Path) -> None:
    """Of its fp8 weights: the hidden states after 61 layers, along other texts."""
    lines = [json.loads(line) for line in PROMPTS.read_text().splitlines()[:24]]
    prompts = encoded(open_checkpoint(MINIATURE), PROMPTS, [one["prompt"] for one in lines])
    texts = [prompt[:48] for prompt in prompts]
    data = tmp_path / "texts.jsonl"
    data.write_text("\n".join(json.dumps({"prompt_token_ids": own}) for own in texts[:16]))
    pair = (*PAIR[:4], "--group-size", "64", "--int4-scope", "all")
    assert quantize(MINIATURE, tmp_path / "nearest", *pair).code == 0
    assert quantize(MINIATURE, tmp_path / "bundle", *pair, "--calibrate", data, *MAIN).code == 0
    wanted, found, nearest = (
        hidden(one, texts[16:]) for one in (MINIATURE, tmp_path / "bundle", tmp_path / "nearest")
    )
    assert sqnr_db(found, wanted) > sqnr_db(nearest, wanted) + 0.5


@pytest.mark.nightly
@pytest.mark.parametrize(
    "family", ["glm4_moe", "glm_moe_dsa", "mimo", "qwen3_next", "qwen3_5_moe", "exaone_moe"]
)
def test_both_parts_in_nvfp4(family: str, data: Path, tmp_path: Path) -> None:
    """All linears, whatever the attention, and experts that are stored fused; an imatrix has the
    names of gguf's own table."""
    config = SMALL_CONFIGS[family]
    text = config.get("text_config", config)
    if "linear_key_head_dim" in text:  # llama.cpp has one size for both
        text = text | {"linear_value_head_dim": text["linear_key_head_dim"]}
        config = config | {"text_config": text} if "text_config" in config else text
    source = write_checkpoint(tmp_path / "model", config)
    pair = (*NVFP4, "--allow-untested-pair")
    assert quantize(source, tmp_path / "nearest", *pair).code == 0
    imatrix = ("--imatrix", tmp_path / "a.gguf") if family in ARCHITECTURE_OF else ()
    outcome = quantize(source, tmp_path / "bundle", *pair, "--calibrate", data, *MAIN, *imatrix)
    assert outcome.code == 0, outcome.err
    wanted = hidden(source)
    found, nearest = (sqnr_db(hidden(tmp_path / one), wanted) for one in ("bundle", "nearest"))
    assert found > nearest
    verify_weights(tmp_path / "bundle", source)
    if imatrix:
        check_imatrix(tmp_path, family, text)


def check_imatrix(folder: Path, family: str, config: dict[str, Any]) -> None:
    """Compare the names of an imatrix with gguf's, and columns with heads in llama.cpp's order."""
    tensors = {one.name: one.data for one in gguf.GGUFReader(folder / "a.gguf").tensors}
    names, known = gguf.MODEL_ARCH_NAMES, ARCHITECTURE_OF[family].name
    arch = next(arch for arch, name in names.items() if name == known)
    known_names = {f"{gguf.TENSOR_NAMES[kind]}.weight" for kind in gguf.MODEL_TENSORS[arch]}
    whole = {name.rpartition(".")[0] for name in tensors}
    assert {re.sub(r"^blk\.\d+", "blk.{bid}", name) for name in whole} <= known_names
    assert tensors.keys() == {f"{name}.{end}" for name in whole for end in ("in_sum2", "counts")}
    layers = {int(name.split(".")[1]) for name in whole}
    assert layers == {*range(config["num_hidden_layers"] + 1)}
    if family == "qwen3_5_moe":
        (path,) = (folder / "bundle-work").rglob("layer-00000.pt")
        kept = state_files.load(path)
        sums, *_ = next(own for name, own in kept.items() if name.endswith("out_proj.weight"))
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        assert values > keys
        turned = sums.reshape(keys, values // keys, -1).swapaxes(0, 1).reshape(-1)
        assert torch.from_numpy(tensors["blk.0.ssm_out.weight.in_sum2"].copy()[0]).equal(turned)


@pytest.mark.nightly
def test_memory_does_not_depend_on_the_number_of_texts(tmp_path: Path) -> None:
    """Of the process, at its peak, with 16 times as many texts: it grows by less than half of what
    their hidden states take once. The dry run says the same memory for both."""
    width, counts = 512, (50, 800)
    source = write_checkpoint(tmp_path / "model", CONFIG | {"hidden_size": width})
    setup = (
        "import sys; from mtp_export.calibrate import hidden_states\n"
        "sys.argv.insert(1, 'quantize'); hidden_states.PART_TOKENS = 1024"
    )
    peaks, said = list[int](), list[str]()
    for count in counts:
        data, output = tmp_path / f"{count}.jsonl", tmp_path / f"bundle-{count}"
        tokens = [
            [(7 * n + at * at) % CONFIG["vocab_size"] for at in range(40)] for n in range(count)
        ]
        data.write_text("\n".join(json.dumps({"prompt_token_ids": own}) for own in tokens))
        options = (*PAIR, *MAIN, "--calibrate", str(data))
        peaks.append(peak_bytes(source, output, *options, setup=setup, OMP_NUM_THREADS="1"))
        outcome = quantize(source, tmp_path / "unwritten", *options, "--dry-run", "--json")
        (remark,) = (one for one in json.loads(outcome.out)["remarks"] if "layer by layer" in one)
        said.append(remark.rpartition("work folder, ")[2])
    stream_bytes = counts[1] * 40 * width * 4
    assert peaks[1] - peaks[0] < stream_bytes // 2, peaks
    assert said[0] == said[1]
