"""Plans without an output folder, checkpoints that stand behind their command, and what a plan says
of sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cases import make_checkpoint, read_json, read_tensors, run_program, tree
from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.formats import UNQUANTIZED, Int8Channel
from mtp_checkpoints.quantization.stored import stored_model
from mtp_export.bundle.sizes import Growth, Sizes, sizes_of
from mtp_export.commands.bundle_tables import size_lines
from mtp_export.plan import OutputShard, PartPlan, Step, copy_step
from mtp_export.progress import format_binary
from mtp_export.schemes.transforms import Convert

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
SIZES = ("bytes_before", "bytes_after", "weights", "bits_per_weight", "fits_8x80gb", "grown")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("original") / "original")


def facts_of(*arguments: object) -> dict[str, Any]:
    outcome = run_program(*arguments, "--json")
    assert outcome.code == 0, outcome.err
    facts: dict[str, Any] = json.loads(outcome.out)
    return facts


def test_a_graft_takes_its_checkpoints_as_arguments(
    original: Path, mains: Callable[[str], Path], tmp_path: Path
) -> None:
    main, rest = mains("gptq"), ("--output-dir", tmp_path / "out", "--dry-run")
    named = facts_of("graft", "--main", main, "--mtp", original, *rest)
    assert facts_of("graft", main, original, *rest) == named
    assert facts_of("graft", main, "--mtp", original, *rest) == named
    assert named["input_dir"] == str(main)
    for arguments, said in (
        ((), "Expected MAIN MTP, or --main MAIN --mtp MTP. Found no main model."),
        ((main,), f"Found {main} alone."),
        ((main, original, "--mtp", original), "The checkpoint with the MTP layer is given twice."),
        ((main, original, "--main", main), "The main model is given twice."),
    ):
        refused = run_program("graft", *arguments, *rest)
        assert refused.code == 2 and said in refused.err


@pytest.mark.parametrize("command", ["export", "quantize", "graft"])
def test_a_plan_needs_no_output(
    command: str, original: Path, mains: Callable[[str], Path], tmp_path: Path
) -> None:
    """It is for a folder beside the source that is not there."""
    main = mains("gptq") if command == "graft" else original
    given = {
        "export": ("--input-dir", main),
        "quantize": (main, "--base-quant", "bf16", "--mtp-quant", "bf16"),
        "graft": (main, original),
    }[command]
    before = sorted(main.parent.iterdir())
    planned = Path(facts_of(command, *given, "--dry-run")["output_dir"])
    assert planned.parent == main.parent.resolve() and planned.name.startswith(f"{main.name}-b")
    assert sorted(main.parent.iterdir()) == before
    explicit = facts_of(command, *given, "--dry-run", "--output-dir", planned)
    assert explicit == facts_of(command, *given, "--dry-run")
    if command != "quantize":  # whose default it is without a dry run, too
        refused = run_program(command, *given)
        assert refused.code == 2 and "--output-dir OUT" in refused.err
        assert sorted(main.parent.iterdir()) == before


def test_a_plan_goes_round_what_is_there(original: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.symlink_to(original)
    taken = original.with_name("original-bundle")
    taken.touch()
    planned = facts_of("export", "--input-dir", source, "--dry-run")["output_dir"]
    taken.unlink()
    assert planned == str(original.resolve().with_name("original-bundle2"))
    assert tree(tmp_path) == {}


def test_a_plan_says_what_a_bundle_weighs_and_why(output: Path) -> None:
    """Against the tensors that come out, and the parameters of the source."""
    words = ("--group-size", "64", "--base-quant", "weight_only_int4")
    words += ("--mtp-quant", "weight_only_int8", "--output-dir", output)
    planned = facts_of("quantize", FIXTURE, *words, "--dry-run")
    made = facts_of("quantize", FIXTURE, *words, "--quiet")
    sizes = {key: planned[key] for key in SIZES}
    assert sizes == {key: made[key] for key in SIZES}
    held = {part: read_tensors(output / part) for part in ("main", "mtp")}
    after = sum(t.numel() * t.itemsize for part in held.values() for t in part.values())
    inspected = facts_of("inspect", FIXTURE)
    assert (sizes["bytes_before"], sizes["bytes_after"]) == (inspected["size_bytes"], after)
    assert sizes["weights"] == inspected["parameters"]
    assert sizes["bits_per_weight"] == round(8 * after / inspected["parameters"], 3)
    assert sizes["fits_8x80gb"] is True
    attention = [one for one in inspected["amounts"] if one["role"] == "attention"]
    fp8 = sum(one["size_bytes"] for one in attention if one["dtype"] != "BF16")
    codes = sum(one["parameters"] for one in attention if one["dtype"] == "F8_E4M3")
    assert sizes["grown"][0] == {
        "role": "attention",
        "source_storage": "fp8_block",
        "storage": "bf16",
        "grown_bytes": 2 * codes - fp8,
    }
    grown = [each["grown_bytes"] for each in sizes["grown"]]
    assert grown == sorted(grown, reverse=True) and grown[-1] > 0
    assert [{key: worst[key] for key in ("storage", "least_db")} for worst in made["worst"]] == [
        {"storage": "int4_group", "least_db": 12.0}
    ] * 3


def test_an_export_is_as_large_as_its_source(output: Path) -> None:
    facts = facts_of("export", "--input-dir", FIXTURE, "--output-dir", output)
    assert facts["bytes_before"] == facts["bytes_after"] and facts["grown"] == []
    assert facts["weights"] == facts_of("inspect", FIXTURE)["parameters"]


def test_growth_is_told_where_the_whole_grew() -> None:
    """Of tensors that no family has too: a draft's, in a folder of its own."""
    names, file = ("own", "up", "down"), cast(Any, SimpleNamespace(path=FIXTURE))
    sizes = {
        name: TensorInfo(name, DType.F32, (4, 6), file, 96 * number, 96)
        for number, name in enumerate(names)
    }

    def step(name: str, format: Any, rows: int) -> Step:
        return Step(Convert(format, "minmax"), (name,), (OutputTensor(name, DType.F32, (rows, 6)),))

    def sizes_with(rows: int) -> Sizes:
        converted = step("up", Int8Channel(), 5), step("down", UNQUANTIZED, rows)
        steps = (copy_step(sizes["own"]), *converted)
        part = PartPlan("eagle3", (OutputShard(steps),), {}, ())
        stored = replace(stored_model(read_json(FIXTURE / "config.json")), kinds=[])
        return sizes_of([part], sizes, stored)

    assert sizes_with(3) == Sizes(3 * 96, 3 * 96, 3 * 24, ())
    grown = Growth("draft", "bf16", "int8_channel", 24)
    assert sizes_with(4) == Sizes(3 * 96, 3 * 96 + 24, 3 * 24, (grown,))


def test_sizes_in_words() -> None:
    grown = (*(Growth(f"role {n}", "fp8_block", "bf16", 4000 - n) for n in range(4)),)
    assert size_lines(Sizes(500, 1 << 32, 1 << 33, grown)) == [
        "500 B before, 4.3 GB (4.0 GiB) after: 8589934.59 x source, 4.00 bits per weight.",
        "Larger than the source: role 0 is bf16 in place of fp8_block (+4.0 kB); role 1 is bf16 in"
        " place of fp8_block (+4.0 kB); role 2 is bf16 in place of fp8_block (+4.0 kB).",
        "Fits 8 x 80 GB: yes, with a tenth left for the cache.",
    ]
    most = 576_000_000_000
    assert Sizes(most, most, most, ()).fits
    assert size_lines(Sizes(2 * most, most + 1, most, ())) == [
        "1.15 TB before, 576.0 GB (536.4 GiB) after: 0.50 x source, 8.00 bits per weight.",
        "Fits 8 x 80 GB: no: without a tenth for the cache 576.0 GB are left.",
    ]


@pytest.mark.parametrize(
    ("count", "words"),
    [(1023, "1023 B"), (1024, "1.0 KiB"), (3 << 30, "3.0 GiB"), (5 << 41, "10.00 TiB")],
)
def test_bytes_in_powers_of_1024(count: int, words: str) -> None:
    assert format_binary(count) == words
