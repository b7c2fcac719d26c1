"""Runs: the same bytes whatever the workers and however often a run is killed, nothing copied that
can be linked, and a manifest and a table that say what was lost."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cases import (
    TINY_CONFIG,
    WRITTEN,
    Outcome,
    export,
    looks_finished,
    make_checkpoint,
    nightly_but,
    quantize,
    read_json,
    read_tensors,
    run_in_a_fork,
    run_program,
    tree,
)
from mtp_checkpoints.formats import FORMATS
from mtp_kernels.quantize import Fp8Block, quantize_int4_group, quantize_int8_channel
from quantize_rows import CONFIGS, MTP_PREFIX, ROWS

PAIR = ROWS["int4, mse"].options  # group 32 divides the ragged checkpoint's K
INDEX = "model.safetensors.index.json"
SMALL = ("--max-shard-size", "60kB", "--link", "copy", "--quiet")


@pytest.fixture(scope="module")
def whole(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The bundle of an uninterrupted run."""
    output = tmp_path_factory.mktemp("whole") / "output"
    outcome = quantize(pristine, output, *PAIR, *SMALL, "--workers", "1")
    assert outcome.code == 0, outcome.err
    return tree(output)


@pytest.mark.parametrize("more", [("--workers", "3"), ("--workers", "2", "--max-memory", "700MB")])
def test_workers_and_memory_change_no_byte(
    more: tuple[str, ...], pristine: Path, output: Path, whole: dict[str, bytes]
) -> None:
    assert quantize(pristine, output, *PAIR, *SMALL, *more).code == 0
    assert tree(output) == whole


@pytest.mark.parametrize("row", ["int4, mse", "fp8", "bf16"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_tensor_in_pieces_is_the_tensor_at_once(
    kind: str, row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "source", CONFIGS[kind] | {"moe_intermediate_size": 320})
    for name in ("at once", "in pieces"):
        assert quantize(source, tmp_path / name, *ROWS[row].options).code == 0
        monkeypatch.setattr("mtp_export.schemes.transforms._PIECE_ELEMENTS", 1)
    for part in ("main", "mtp"):
        files = [tree(tmp_path / name / part) for name in ("at once", "in pieces")]
        assert files[0] == files[1]
    once, pieces = (by_tensor(tmp_path / name) for name in ("at once", "in pieces"))
    for tensor, entry in once.items():
        assert entry.get("max_error") == pieces[tensor].get("max_error")
        expected = entry.get("sqnr_db")
        assert pieces[tensor].get("sqnr_db") == (expected and pytest.approx(expected, abs=1e-9))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("first", nightly_but([1], (1, 30)))
def test_death_at_disk_calls(
    first: int, pristine: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    options = (*PAIR, *SMALL, "--workers", "2")
    died = resumed = 0
    for call_number in range(first, 2000, 58):
        output = tmp_path / f"died-at-{call_number}"
        action = partial(quantize, pristine, output, *options)
        if run_in_a_fork(action, call_number) == 0:
            break
        died += 1
        if not looks_finished(output):
            outcome = quantize(pristine, output, *options)
            assert outcome.code == 0, (call_number, outcome.err)
            resumed += 1
        assert tree(output) == whole, call_number
    else:
        pytest.fail("the run never got through")
    assert died > 4
    assert resumed > 4


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_other_options_do_not_go_on(pristine: Path, output: Path) -> None:
    options = (*PAIR, *SMALL, "--workers", "1")
    assert run_in_a_fork(partial(quantize, pristine, output, *options), 120) == 9
    for other in (("--scale", "minmax"), ("--int4-scope", "all"), ("--target", "sglang")):
        outcome = quantize(pristine, output, *options, *other)
        assert outcome.code == 8, other
        assert other[1] in outcome.err
    assert quantize(pristine, output, *options).code == 0


def by_tensor(output: Path) -> dict[str, dict[str, object]]:
    """Every tensor of the manifest's written shards."""
    return {
        name: entry
        for part in read_json(output / "mtp_export.json")["parts"].values()
        for shard in part["shards"].values()
        for name, entry in shard.get("tensors", {}).items()
    }


def test_the_manifest_says_what_each_tensor_lost(pristine: Path, output: Path) -> None:
    assert quantize(pristine, output, *PAIR).code == 0
    entries, source = by_tensor(output), read_tensors(pristine)
    module = f"{MTP_PREFIX}mlp.shared_experts.up_proj"
    entry = entries[f"{module}.weight_packed"]
    assert entry["operation"] == "quantize_int8_channel"
    assert entry["scheme"] == "weight_only_int8"
    assert entry["sources"] == [f"{module}.weight", f"{module}.weight_scale_inv"]
    codes, scale = source[f"{module}.weight"], source[f"{module}.weight_scale_inv"]
    best8, error = quantize_int8_channel(Fp8Block(codes, scale))
    assert entry["sqnr_db"] == pytest.approx(error.sqnr_db, abs=1e-9)
    assert entry["max_error"] == error.max_error
    assert torch.equal(read_tensors(output / "mtp")[f"{module}.weight_packed"], best8.packed)
    expert = entries["model.layers.1.mlp.experts.0.up_proj.weight_packed"]
    assert (expert["operation"], expert["scheme"]) == ("quantize_int4_group", "weight_only_int4")
    name = "model.layers.1.mlp.experts.0.up_proj"
    fp8 = Fp8Block(source[f"{name}.weight"], source[f"{name}.weight_scale_inv"])
    best, error = quantize_int4_group(fp8, group_size=32, scale_rule="mse")
    assert expert["sqnr_db"] == pytest.approx(error.sqnr_db, abs=1e-9)
    main = read_tensors(output / "main")
    assert torch.equal(main[f"{name}.weight_packed"], best.packed)
    assert torch.equal(main[f"{name}.weight_scale"], best.scale)
    assert entries[f"{MTP_PREFIX}enorm.weight"].keys() == {"operation", "sources", "xxh3_128"}
    assert {entry["operation"] for entry in entries.values()} <= {
        "copy",
        "dequantize_fp8_block",
        *(FORMATS[name].operation for name in WRITTEN),
    }


def test_the_manifest_names_the_pair(pristine: Path, output: Path) -> None:
    assert quantize(pristine, output, *PAIR).code == 0
    options = read_json(output / "mtp_export.json")["options"]
    assert options["base_quant"] == "weight_only_int4"
    assert options["mtp_quant"] == "weight_only_int8"
    assert options["pair_in_table"] is True
    assert options["scale"] == "mse"


@pytest.mark.parametrize("as_bundle", [False, True], ids=["checkpoint", "bundle"])
def test_native_fp8_links_what_it_can(as_bundle: bool, pristine: Path, output: Path) -> None:
    source = pristine
    if as_bundle:
        source = output.parent / "bundle"
        assert export(pristine, source).code == 0
    assert quantize(source, output, "--mtp-quant", "a8w8_fp8").code == 0
    manifest = read_json(output / "mtp_export.json")
    linked = {
        part: [shard for shard in content["shards"].values() if "link" in shard]
        for part, content in manifest["parts"].items()
    }
    assert linked["main"]
    assert all((source / shard["source_shard"]).is_file() for shard in linked["main"])
    if as_bundle:
        for part, content in manifest["parts"].items():
            assert len(linked[part]) == len(content["shards"]), part
    stored = {**read_tensors(output / "main"), **read_tensors(output / "mtp")}
    original = read_tensors(pristine)
    assert stored.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), stored[name].reshape(-1).view(torch.uint8)
        ), name
    if not as_bundle:
        exported = output.parent / "exported"
        assert export(pristine, exported).code == 0
        shards = {n: b for n, b in tree(exported).items() if n.endswith(".safetensors")}
        assert {n: b for n, b in tree(output).items() if n.endswith(".safetensors")} == shards


def test_inside_a_bundle_nothing_else_is_needed(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "bundle"
    assert export(pristine, bundle).code == 0
    monkeypatch.chdir(bundle)
    outcome = run_program("quantize", "--mtp-quant", "a8w8_fp8")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "bundle-a8w8_fp8-a8w8_fp8/mtp_export.json").is_file()
    monkeypatch.chdir(tmp_path)
    outcome = run_program("quantize", "--mtp-quant", "a8w8_fp8")
    assert outcome.code == 2
    assert "not a bundle" in outcome.err


def test_a_dry_run_writes_nothing(pristine: Path, output: Path) -> None:
    outcome = quantize(pristine, output, *PAIR, "--dry-run", "--json")
    assert outcome.code == 0
    plan = json.loads(outcome.out)
    assert plan["parts"]["main"]["computed_bytes"] > 0
    assert not output.exists()


def test_the_end_shows_bytes_and_losses(pristine: Path, output: Path) -> None:
    outcome = quantize(pristine, output, *PAIR)
    for words in ("routed expert", "shared expert", "SQNR", "before", "after", "Worst:", "/s"):
        assert words in outcome.out, words
    report = output.parent / "report.json"
    again = quantize(pristine, output, *PAIR, "--overwrite", "--quiet", "--report", report)
    assert (again.code, again.out, again.err) == (0, "", "")
    facts = read_json(report)
    totals = [
        read_json(output / part / "model.safetensors.index.json")["metadata"]["total_size"]
        for part in ("main", "mtp")
    ]
    assert facts["bytes_after"] == sum(totals)
    assert facts["bytes_before"] == sum(
        tensor.numel() * tensor.itemsize for tensor in read_tensors(pristine).values()
    )
    low = min(
        float(str(entry["sqnr_db"]))
        for name, entry in by_tensor(output).items()
        if ".mlp.experts." in name and "sqnr_db" in entry
    )
    assert facts["sqnr_db"]["routed expert"]["min"] == round(low, 2)
    assert facts["worst"][0]["sqnr_db"] == round(low, 2)


def test_one_part_alone(pristine: Path, output: Path) -> None:
    assert quantize(pristine, output, *PAIR, "--part", "mtp").code == 0
    assert not (output / "main").exists()
    assert (output / "mtp/config.json").is_file()


def test_a_bundle_and_its_checkpoint_give_the_same_tensors(pristine: Path, output: Path) -> None:
    bundle = output.parent / "bundle"
    assert export(pristine, bundle).code == 0
    assert quantize(pristine, output, *PAIR).code == 0
    other = output.parent / "other"
    assert quantize(bundle, other, *PAIR).code == 0
    for part in ("main", "mtp"):
        names = sorted((output / part).glob("*.safetensors"))
        assert names
        one, two = read_tensors(output / part), read_tensors(other / part)
        assert one.keys() == two.keys()
        configs = [read_json(folder / part / "config.json") for folder in (output, other)]
        assert configs[0] == configs[1]
    entries, others = by_tensor(output), by_tensor(other)
    for name in entries.keys() & others.keys():
        assert entries[name]["xxh3_128"] == others[name]["xxh3_128"], name


def test_frequencies_that_engines_recompute_are_left_out(pristine: Path, output: Path) -> None:
    """Of main layers and of the MTP layer, by exports and conversions; nothing else changes."""
    source = output.parent / "source"
    shutil.copytree(pristine, source)
    layers = TINY_CONFIG["num_hidden_layers"]
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in (0, layers)]
    added = dict.fromkeys(names, torch.ones(4))
    save_file({name: tensor.clone() for name, tensor in added.items()}, source / "old.safetensors")
    index = read_json(source / INDEX)
    index["weight_map"] |= dict.fromkeys(names, "old.safetensors")
    (source / INDEX).write_text(json.dumps(index))
    for command, options in ((export, ()), (quantize, PAIR)):
        made = [output / f"{command.__name__} {number}" for number in range(2)]
        for place, bundle in zip((pristine, source), made, strict=True):
            outcome = command(place, bundle, *options)
            assert outcome.code == 0, outcome.err
        for part in ("main", "mtp"):
            one, two = (read_tensors(bundle / part) for bundle in made)
            assert one.keys() == two.keys()


def listed() -> Outcome:
    return run_program("quantize", "--list", "--json")


def test_the_list_agrees_with_the_real_sizes() -> None:
    """685 B parameters; the released fp8 checkpoint has 688.6 GB, scales included."""
    outcome = listed()
    assert outcome.code == 0
    rows = {(row["base"], row["mtp"]): row for row in json.loads(outcome.out)["pairs"]}
    native = rows["a8w8_fp8", "a8w8_fp8"]
    total = native["v3_bytes"]["base"] + native["v3_bytes"]["mtp"]
    assert total == pytest.approx(688.6e9, rel=1e-3)
    assert rows["a8w8_fp8_wint4", "a8w8_fp8"]["deployment"] == "TP8"
    assert rows["a8w8_fp8_wint4", "a8w8_fp8"]["bits_per_weight"]["base"] < 4.5
    text = run_program("quantize", "--list").out
    for words in ("a8w8_fp8_wint4", "weight_only_int4", "SGLang", "TP16 (2×TP8)", "w4afp8", "GB"):
        assert words in text, words
    assert "…" not in text


def test_the_list_weighs_as_a_run_writes(tmp_path: Path, output: Path) -> None:
    from mtp_checkpoints.families import family_of
    from mtp_export.schemes.table import weigh

    config = TINY_CONFIG | {"hidden_size": 256, "moe_intermediate_size": 128}
    source = make_checkpoint(tmp_path / "source", config)
    assert quantize(source, output, *ROWS["int4"].options).code == 0
    weight = weigh(family_of(config), "weight_only_int4", lambda spec: spec.mtp_layer is None)
    index = read_json(output / "main/model.safetensors.index.json")
    assert weight.size_bytes == index["metadata"]["total_size"]


def test_int4_beside_fp8_says_which_engine_reads_it_otherwise(pristine: Path, output: Path) -> None:
    """With both options that its engine takes."""
    words = ("--base-quant", "a8w8_fp8_wint4", "--mtp-quant", "a8w8_fp8", "--group-size", "32")
    outcome = quantize(pristine, output, *words, "--dry-run")
    assert outcome.code == 0
    assert "SGLang needs --target sglang or --format w4afp8." in outcome.err
