"""Grafts as they are planned: what each option decides, and every refusal before the first byte."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cases import MTP_LAYER, UNQUANTIZED, drop_tensor, edit_json, make_checkpoint, read_json
from mtp_checkpoints.errors import (
    InvalidInputError,
    IoError,
    MtpExportError,
    OutputExistsError,
    UnsupportedError,
    UsageError,
)
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.weights.weight_values import PIECE_ELEMENTS
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.graft import GraftOptions, plan_graft
from mtp_export.bundle.options import BundleOptions, ContentOptions, RunOptions, SharedWeights
from mtp_export.plan import Link

LAYER = f"model.layers.{MTP_LAYER}"
COPIES = {
    f"{LAYER}.embed_tokens.weight": "model.embed_tokens.weight",
    f"{LAYER}.shared_head.head.weight": "lm_head.weight",
}
Words = tuple[str, object, object, object, object]
UNTIED = ContentOptions(allow_untied=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("original") / "original")


@pytest.fixture
def options(mains: Callable[[str], Path], original: Path, output: Path) -> GraftOptions:
    run = RunOptions(link=Link.COPY, workers=1)
    return GraftOptions(BundleOptions(mains("awq"), output, run=run), original)


def of_bundle(options: GraftOptions, **changes: Any) -> GraftOptions:
    return replace(options, bundle=replace(options.bundle, **changes))


def refusal(options: GraftOptions, kind: type[MtpExportError]) -> Words:
    with pytest.raises(kind) as caught:
        plan_graft(options)
    error = caught.value
    return error.what, error.where, error.expected, error.found, error.todo


def names_of(plan: BundlePlan, part: str) -> dict[str, str]:
    """Outputs of a part, with their first inputs."""
    (found,) = [one for one in plan.parts if one.name == part]
    steps = [step for shard in found.shards for step in shard.steps]
    return {tensor.name: step.inputs[0] for step in steps for tensor in step.outputs}


@pytest.mark.parametrize(
    ("name", "method", "storages"),
    [
        ("awq", "awq", ["awq_int4", "bf16"]),
        ("fp8", "fp8", ["bf16", "fp8_block"]),
        ("modelopt fp8, in a file", "modelopt", ["bf16", "fp8_tensor"]),
    ],
)
def test_what_is_recorded(
    name: str, method: str, storages: list[str], options: GraftOptions, mains: Any
) -> None:
    options = of_bundle(options, input_dir=mains(name))
    assert plan_graft(options).recorded == options.bundle.recorded() | {
        "base_quant": "grafted",
        "mtp_quant": "bf16",
        "main_quant_method": method,
        "main_storages": storages,
    }


def test_a_draft_that_one_engine_describes_says_which(options: GraftOptions, mains: Any) -> None:
    """Beside fp8 every engine reads an fp8 draft; beside AWQ only the one that reads its own
    config.json."""
    fp8 = replace(of_bundle(options, input_dir=mains("fp8")), mtp_quant="a8w8_fp8")
    recorded = plan_graft(fp8).recorded
    assert (recorded["mtp_quant"], "reader" in recorded) == ("a8w8_fp8", False)
    other = replace(of_bundle(options, target="sglang"), mtp_quant="a8w8_fp8")
    assert plan_graft(other).recorded["reader"] == "sglang"


def test_an_unquantized_main_model(options: GraftOptions, tmp_path: Path) -> None:
    main = make_checkpoint(tmp_path / "main", UNQUANTIZED)
    index = main / "model.safetensors.index.json"
    for name in read_json(index)["weight_map"]:
        if name.startswith(f"{LAYER}."):
            drop_tensor(main, name)
    for shard in {path.name for path in main.glob("*.safetensors")}:
        if shard not in read_json(index)["weight_map"].values():
            (main / shard).unlink()
    edit_json(main / "config.json", lambda config: config.pop("num_nextn_predict_layers"))
    recorded = plan_graft(of_bundle(options, input_dir=main, content=UNTIED)).recorded
    assert (recorded["main_quant_method"], recorded["main_storages"]) == ("none", ["bf16"])


def test_each_part_says_its_own_dtype_and_how_the_layer_is_fed(
    options: GraftOptions, original: Path, tmp_path: Path
) -> None:
    donor = Path(shutil.copytree(original, tmp_path / "donor"))
    contract = {"target_hidden": "before_norm"}
    edit_json(donor / "config.json", lambda config: config.update(mtp_contract=contract))
    main, mtp = plan_graft(replace(options, mtp_source=donor)).parts
    assert (main.name, mtp.name) == ("main", "mtp")
    for part, dtype in ((main, "float16"), (mtp, "bfloat16")):
        assert part.config["torch_dtype"] == dtype
        assert part.config["num_nextn_predict_layers"] == 1
        assert part.config["mtp_contract"] == contract
    assert main.config["quantization_config"]["modules_to_not_convert"]
    assert "quantization_config" not in mtp.config
    own = read_json(Path(str(options.bundle.input_dir)) / "config.json")
    assert mtp.config["vocab_size"] == own["vocab_size"]
    assert "mtp_contract" not in plan_graft(options).parts[0].config


def test_the_contents_are_those_that_are_asked_for(options: GraftOptions) -> None:
    whole = names_of(plan_graft(options), "mtp")
    assert {name: whole[name] for name in COPIES} == {name: name for name in COPIES}
    content = ContentOptions(shared_weights=SharedWeights.DROP)
    dropped = names_of(plan_graft(of_bundle(options, content=content)), "mtp")
    assert dropped == {name: own for name, own in whole.items() if name not in COPIES}
    small = of_bundle(options, content=ContentOptions(max_shard_bytes=100_000))
    assert len(plan_graft(small).parts[1].shards) > len(plan_graft(options).parts[1].shards)


def test_a_layer_without_copies_gets_the_main_ones(options: GraftOptions, tmp_path: Path) -> None:
    """Under the names that the layer's own would have."""
    donor = make_checkpoint(tmp_path / "donor", own_copies=False)
    plan = plan_graft(replace(options, mtp_source=donor))
    assert COPIES.keys() <= names_of(plan, "mtp").keys()
    assert plan.tied.unlike == COPIES


def test_a_dry_run_tries_nothing(options: GraftOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object, **options: object) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", failing)
    linked = of_bundle(options, run=RunOptions(link=Link.HARDLINK))
    plan_graft(linked, dry_run=True)
    assert refusal(linked, IoError)[3] == "Read-only file system"


def test_places_that_make_no_graft(
    options: GraftOptions, original: Path, output: Path, tmp_path: Path
) -> None:
    main = options.bundle.input_dir
    same = (
        "The main model and the checkpoint with its MTP layer are the same",
        "--main without an MTP layer, and --mtp with it",
        str(main),
        "mtp-export splits one checkpoint that has both: --input-dir",
    )
    link = tmp_path / "link"
    link.symlink_to(str(main))
    for other in (main, link):
        found = refusal(replace(options, mtp_source=other), UsageError)
        assert (found[0], *found[2:]) == same
    place = Address("hf://acme/tiny")
    remote = replace(of_bundle(options, input_dir=place), mtp_source=Address("hf://acme/tiny"))
    assert refusal(remote, UsageError)[3] == "hf://acme/tiny"
    for target in ("xllm", "lightllm"):
        found = refusal(of_bundle(options, target=target), UnsupportedError)
        assert found[0] == f"Target {target} does not read models that others quantized"
        assert (found[2], found[3]) == ("--target hf, vllm or sglang", target)
    for place in (main, original):
        inside = of_bundle(options, output_dir=Path(str(place)) / "inside")
        assert "must lie apart from what it reads" in refusal(inside, UsageError)[0]
    output.mkdir()
    (output / "notes").touch()
    assert refusal(options, OutputExistsError)[1:4] == (output, "a new or empty folder", "notes")


def test_a_main_model_with_its_layer(options: GraftOptions, original: Path, tmp_path: Path) -> None:
    main = Path(shutil.copytree(original, tmp_path / "main"))
    names = read_json(main / "model.safetensors.index.json")["weight_map"]
    own = [name for name in names if name.startswith(f"{LAYER}.")]
    found = refusal(of_bundle(options, input_dir=main), InvalidInputError)
    assert found[:3] == (
        "The main model has an MTP layer already",
        main,
        f"no tensor of {LAYER}",
    )
    assert str(found[3]).endswith(f" ({len(own) - 1} more)")
    assert str(found[3]).removesuffix(f" ({len(own) - 1} more)") in own
    assert found[4] == (
        "Serve it as it is, split it with mtp-export --input-dir, or give --replace to graft the"
        " other layer in its place"
    )


def test_a_main_model_that_lacks_tensors(
    options: GraftOptions, mains: Callable[[str], Path], tmp_path: Path
) -> None:
    main = Path(shutil.copytree(mains("awq"), tmp_path / "main"))
    drop_tensor(main, "model.norm.weight")
    drop_tensor(main, "lm_head.weight")
    found = refusal(of_bundle(options, input_dir=main), InvalidInputError)
    assert found[1] == main
    assert found[0].endswith("missing (1 more like this)")


def test_a_model_opt_file_is_read_where_the_config_has_none(
    options: GraftOptions, mains: Callable[[str], Path], tmp_path: Path
) -> None:
    main = Path(shutil.copytree(mains("modelopt fp8, in a file"), tmp_path / "main"))
    config = plan_graft(of_bundle(options, input_dir=main)).parts[0].config
    stored = read_json(main / "hf_quant_config.json")
    assert config["quantization_config"]["quant_method"] == "modelopt"
    assert config["quantization_config"]["producer"] == stored["producer"]
    (main / "hf_quant_config.json").write_text("[]")
    assert refusal(of_bundle(options, input_dir=main), InvalidInputError)[1] == (
        main / "hf_quant_config.json"
    )
    other = Path(shutil.copytree(mains("fp8"), tmp_path / "other"))
    shutil.copy(main / "hf_quant_config.json", other)
    plan_graft(of_bundle(options, input_dir=other))


@pytest.fixture
def another(options: GraftOptions, tmp_path: Path) -> GraftOptions:
    """The layer of another model of the same shapes."""
    return replace(options, mtp_source=make_checkpoint(tmp_path / "another", seed=1))


def compare(plan: BundlePlan, proceed: Callable[[], None] = lambda: None) -> None:
    with DiskQueue(2) as queue:
        plan.tied.compare(plan.checkpoint.tensors, (), queue, proceed)


def test_copies_in_another_precision_are_compared_by_their_values(
    options: GraftOptions, another: GraftOptions
) -> None:
    """Embedding and head in float16 beside the layer's in bf16."""
    plan, proceeded = plan_graft(options), list[None]()
    assert (plan.tied.alike, plan.tied.unlike) == ({}, COPIES)
    names = [name for pair in COPIES.items() for name in pair]
    assert plan.tied.unlike_tensors == tuple(names)
    compare(plan, lambda: proceeded.append(None))
    sizes = [plan.checkpoint.tensors[name].shape for name in COPIES]
    assert len(proceeded) == sum(-(-rows * columns // PIECE_ELEMENTS) for rows, columns in sizes)
    with pytest.raises(InvalidInputError) as caught:
        compare(plan_graft(another))
    error = caught.value
    own, main = next(iter(COPIES.items()))
    assert error.what == f"The MTP layer's {own} differs from the main model's {main}"
    assert Path(str(error.where)).parent == another.mtp_source
    assert error.expected == (
        "the same values, cast from one dtype to the other: engines use the main model's for both"
    )
    assert str(error.found).startswith("other values, ")
    assert "--allow-untied exports it nevertheless" in str(error.todo)
    compare(plan_graft(of_bundle(another, content=UNTIED)))


def test_two_checkpoints_read_as_one(options: GraftOptions, original: Path) -> None:
    checkpoint = plan_graft(options).checkpoint
    main, mtp = Checkpoint.open(options.bundle.input_dir), Checkpoint.open(original)
    assert (checkpoint.path, checkpoint.unindexed) == (main.path, ())
    assert checkpoint.files.path == main.files.path and not checkpoint.is_bundle
    assert checkpoint.main_shards == main.shards
    used = {mtp.tensors[name].path for name in mtp.tensors if name.startswith(f"{LAYER}.")}
    assert {shard.path for shard in checkpoint.mtp_shards} == used
    assert len(used) < len(mtp.shards)
    assert checkpoint.shards == (*checkpoint.main_shards, *checkpoint.mtp_shards)
    joined = (main.config_sha256 + mtp.config_sha256).encode()
    assert checkpoint.config_sha256 == hashlib.sha256(joined).hexdigest()
    assert checkpoint.origin == {
        "main": {"config_sha256": main.config_sha256},
        "mtp": {"config_sha256": mtp.config_sha256},
    }
    assert checkpoint.readers == 1
    remote: Any = SimpleNamespace(readers=8)
    for side in ("host", "donor"):
        assert replace(checkpoint, **{side: remote}).readers == 8
    names = [checkpoint.shard_name(shard) for shard in checkpoint.shards]
    assert names == [
        *(f"main/{shard.path.name}" for shard in main.shards),
        *(f"mtp/{path.name}" for path in sorted(used)),
    ]
    own = {name for name in mtp.tensors if name.startswith(f"{LAYER}.")}
    assert checkpoint.tensors.keys() == main.tensors.keys() | own
    for name, tensor in checkpoint.tensors.items():
        assert tensor == (mtp if name in own else main).tensors[name]
