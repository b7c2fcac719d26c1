"""Output of the program for people and scripts: plans, tables, JSON, reports, inspection."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.make_checkpoint import REAL_CONFIG
from cases import (
    MTP_LAYER,
    SAFETENSORS_TARGETS,
    TARGET_OPTIONS,
    TINY_CONFIG,
    drop_tensor,
    export,
    hub_cache,
    make_checkpoint,
    nightly_but,
    read_json,
    read_tensors,
    run_program,
    tree,
)
from mtp_checkpoints.layouts import TARGETS
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_export.bundle.options import DEFAULT_WORKERS
from mtp_export.commands.names import COMMANDS
from mtp_export.commands.registry import command_named, program
from mtp_export.commands.typed_command import QuickReading
from mtp_export.options import parse_path, parse_size, parse_source
from mtp_export.progress import format_bytes
from mtp_export.schemes.table import PAIRS
from peak_memory import peak_bytes


def test_dry_run_plans_and_writes_nothing(pristine: Path, output: Path) -> None:
    before = tree(pristine.parent)
    outcome = export(pristine, output, "--dry-run", "--json")
    assert outcome.code == 0
    plan = json.loads(outcome.out)
    assert not output.exists()
    assert tree(pristine.parent) == before
    assert export(pristine, output, "--report", output.parent / "r.json", "--quiet").code == 0
    done = read_json(output.parent / "r.json")
    assert {key: done["parts"][key] for key in plan["parts"]} == plan["parts"]
    written = [p for p in output.glob("*/model-*") if p.stat().st_nlink == 1]
    headers = sum(int.from_bytes(p.read_bytes()[:8], "little") + 8 for p in written)
    assert sum(p.stat().st_size for p in written) == plan["disk_bytes"] + headers
    for part, facts in plan["parts"].items():
        assert {p.name for p in (output / part).iterdir()} == set(facts["files"])


def test_dry_run_shows_a_table(pristine: Path, output: Path) -> None:
    outcome = export(pristine, output, "--dry-run", "--target", "xllm")
    shown = " ".join(outcome.out.split())
    for words in ("main", "mtp", "copied", "computed", "linked", "Nothing was written"):
        assert words in shown
    assert not output.exists()


def test_json_alone_is_on_stdout(pristine: Path, output: Path) -> None:
    outcome = export(pristine, output, "--json")
    facts = json.loads(outcome.out)
    assert facts["parts"]["mtp"]["tensors"] == 52
    assert facts["resumed_shards"] == 0
    assert "export:" in outcome.err


def test_quiet_says_nothing(pristine: Path, output: Path) -> None:
    outcome = export(pristine, output, "--quiet")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")


def test_the_table_says_what_the_source_lacks(source: Path, output: Path) -> None:
    (source / "tokenizer.json").unlink()
    assert "no tokenizer.json" in export(source, output).out


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("4GiB", 4 * 2**30), ("4096", 4096), ("1.5 mib", 3 * 2**19), ("2k", 2000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_inspect_counts_what_is_there(pristine: Path) -> None:
    facts = json.loads(run_program("inspect", pristine, "--json").out)
    data_bytes = 0
    for path in pristine.glob("*.safetensors"):
        data_bytes += path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
    assert facts["size_bytes"] == data_bytes
    assert facts["mtp_layers"] == [MTP_LAYER]
    assert facts["parts"] == ["main", "mtp"]
    assert facts["quantization"] == "fp8 e4m3 128×128"
    assert facts["problems"] == []
    names = read_json(pristine / "model.safetensors.index.json")["weight_map"]
    assert facts["tensors"] == len(names)
    experts = [a for a in facts["amounts"] if a["role"] == "routed expert" and a["part"] == "mtp"]
    assert {a["dtype"]: (a["tensors"], a["parameters"]) for a in experts} == {
        "F8_E4M3": (12, 12 * 96 * 192),
        "F32 scale": (12, 0),
    }
    table = run_program("inspect", pristine)
    assert table.code == 0
    assert "routed expert" in table.out


def test_inspect_names_what_is_wrong(source: Path) -> None:
    name = f"model.layers.{MTP_LAYER}.hnorm.weight"
    drop_tensor(source, name)
    (source / "generation_config.json").unlink()
    outcome = run_program("inspect", source)
    assert outcome.code == 3
    assert f"Problem: {name}: missing" in outcome.out
    assert "Missing file: generation_config.json" in outcome.out
    assert name in outcome.err
    facts = json.loads(run_program("inspect", source, "--json").out)
    assert [problem["tensor"] for problem in facts["problems"]] == [name]


def test_inspect_tells_whether_embedding_and_head_are_stored_twice(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", own_copies=False)
    states = json.loads(run_program("inspect", source, "--json").out)["shared_tensors"]
    assert all(state.startswith("not stored: tied to") for state in states.values())
    assert len(states) == 2


@pytest.mark.parametrize("target", TARGETS)
def test_inspect_reads_the_parts_of_a_bundle(target: str, pristine: Path, output: Path) -> None:
    options = ("--target", target, *TARGET_OPTIONS.get(target, ()))
    assert export(pristine, output, *options).code == 0
    of_main = target if TARGETS[target].rewrites_main else "hf"
    for part, layout in (("main", of_main), ("mtp", target)):
        outcome = run_program("inspect", output / part, "--json")
        assert outcome.code == 0, outcome.err
        facts = json.loads(outcome.out)
        assert (facts["parts"], facts["layout"], facts["problems"]) == ([part], layout, [])
        assert not [amount for amount in facts["amounts"] if amount["role"] == "unexpected"]
    (_, embedding), (_, head) = sorted(facts["shared_tensors"].items())
    assert embedding.startswith("own copy; ") and head.startswith("own copy; ")
    says = f"a draft as --target {target} writes it" in run_program("inspect", output / "mtp").out
    assert says == (target != "hf")
    outcome = run_program("inspect", output)
    assert (outcome.code, str(output / "main") in outcome.out) == (0, True)


@pytest.mark.parametrize("target", SAFETENSORS_TARGETS)
def test_inspect_names_what_is_wrong_in_any_layout(
    target: str, pristine: Path, output: Path
) -> None:
    assert export(pristine, output, "--target", target, "--part", "mtp").code == 0
    (name,) = [name for name in read_tensors(output / "mtp") if name.endswith("hnorm.weight")]
    drop_tensor(output / "mtp", name)
    outcome = run_program("inspect", output / "mtp")
    assert (outcome.code, f"Problem: {name}: missing" in outcome.out) == (3, True)


@pytest.mark.parametrize("part", ["main", "mtp"])
def test_only_parts_that_are_there_are_inspected(part: str, pristine: Path, output: Path) -> None:
    assert export(pristine, output, "--part", part).code == 0
    outcome = run_program("inspect", output)
    other = {"main": "mtp", "mtp": "main"}[part]
    assert outcome.code == 0
    assert str(output / part) in outcome.out and str(output / other) not in outcome.out


def test_a_draft_alone_cannot_generate(pristine: Path, output: Path) -> None:
    assert export(pristine, output, "--part", "mtp").code == 0
    outcome = run_program("generate", output, "--prompt", "a")
    assert outcome.code == 3
    assert "has an mtp part alone" in outcome.err


def test_tables_show_figures_whole_on_any_terminal(
    pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    facts = json.loads(run_program("inspect", pristine, "--json").out)
    inspected = run_program("inspect", pristine).out
    for amount in facts["amounts"]:
        assert f" {amount['parameters']:,} " in inspected
        assert f" {format_bytes(amount['size_bytes'])} " in inspected
    exported = export(pristine, output, "--link", "copy").out
    copied = [part["copied_bytes"] for part in plan_of(pristine, output)["parts"].values()]
    assert all(f" {format_bytes(size)} " in exported for size in copied)
    listed = run_program("quantize", "--list").out
    ends = {line.rstrip().rpartition("  ")[2].strip() for line in listed.splitlines()}
    assert {pair.deployment for pair in PAIRS} <= ends
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        verified = run_program("verify", output, "--level", "files", "--verbose").out
        assert ("│ not tested │" if columns == 80 else "not tested") in verified
        assert not re.search("│ not +│", verified)
        assert "…" not in inspected + exported + listed + verified


def plan_of(source: Path, output: Path) -> Any:
    """The plan of an export of copies."""
    options = ("--link", "copy", "--dry-run", "--json")
    return json.loads(export(source, output.with_name("plan"), *options).out)


def before_paths() -> Iterator[tuple[str, ...]]:
    """Arguments of every command up to a path or a source that it takes."""
    for name in ("", *COMMANDS):
        command = cast(QuickReading, command_named(name) if name else program())
        for leaf in command.leaves.values():
            if leaf.option.parser in (parse_path, parse_source):
                own = [name] if name else []
                yield (*own,) if leaf.option.is_argument else (*own, leaf.flag)


def test_an_empty_path_is_not_the_current_folder() -> None:
    given = list(before_paths())
    assert ("--input-dir",) in given and ("--output-dir",) in given
    assert ("verify", "--junit") in given and ("inspect",) in given
    for arguments in given:
        outcome = run_program(*arguments, "")
        assert (outcome.code, outcome.out) == (2, ""), arguments
        assert "an empty path" in outcome.err


def test_an_address_is_no_path(output: Path) -> None:
    for option in ("--source", "--prompts"):
        outcome = run_program("verify", output, option, "hf://org/name")
        assert outcome.code == 2
        assert "hf://org/name is an address" in outcome.err and option in outcome.err


def test_a_bundle_of_one_part_is_no_source(pristine: Path, output: Path) -> None:
    assert export(pristine, output, "--part", "mtp").code == 0
    outcome = export(output, output.with_name("again"))
    assert (outcome.code, "one part only" in outcome.err) == (3, True)


@pytest.mark.parametrize("option", [("--dry-run",), ("--json",), ("--input-dir", "x")])
def test_options_before_a_command_are_refused(option: tuple[str, ...], pristine: Path) -> None:
    outcome = run_program(*option, "inspect", pristine)
    assert outcome.code == 2
    if option == ("--json",):
        assert json.loads(outcome.out)["error"]["exit_code"] == 2
    else:
        assert outcome.out == ""
    assert f"Found {option[0]}" in outcome.err


def test_without_arguments_it_says_what_it_needs() -> None:
    outcome = run_program("export")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "--help" in outcome.err


def test_a_dry_run_asks_for_the_room_that_the_run_asks_for(
    pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = json.loads(export(pristine, output, "--dry-run", "--json").out)["needed_disk_bytes"]
    for free, code in ((needed - 1, 5), (needed, 0)):
        usage = SimpleNamespace(total=0, used=0, free=free)
        monkeypatch.setattr("shutil.disk_usage", lambda path, usage=usage: usage)
        assert export(pristine, output, "--dry-run").code == code


def test_a_checkpoint_without_mtp_layer_can_be_inspected(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "s", TINY_CONFIG | {"num_nextn_predict_layers": 0})
    facts = json.loads(run_program("inspect", source, "--json").out)
    assert (facts["mtp_layers"], facts["parts"]) == ([], ["main"])


@pytest.fixture(scope="module")
def real_shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 671B checkpoint, every byte of it a hole in a sparse file."""
    return make_checkpoint(
        tmp_path_factory.mktemp("real") / "source",
        REAL_CONFIG,
        max_shard_bytes=4_230_000_000,
        filled=lambda name: False,
    )


def test_real_shapes_are_the_released_ones(real_shapes: Path) -> None:
    """Figures of the released checkpoint: 91,991 tensors, 684,489,845,504 parameters (685 B)."""
    facts = json.loads(run_program("inspect", real_shapes, "--json").out)
    assert facts["tensors"] == 91_991
    assert facts["parameters"] == 684_489_845_504
    assert facts["shards"] > 160
    assert facts["problems"] == []
    mtp = [amount for amount in facts["amounts"] if amount["part"] == "mtp"]
    assert sum(amount["tensors"] for amount in mtp) == 1564


def test_real_shapes_can_be_planned(
    real_shapes: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(real_shapes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**12))
    plan = json.loads(export(real_shapes, output, "--dry-run", "--json").out)
    assert plan["parts"]["main"]["tensors"] + plan["parts"]["mtp"]["tensors"] == 91_991
    assert plan["parts"]["main"]["linked_shards"] > 150
    xllm = json.loads(export(real_shapes, output, "--dry-run", "--json", "--target", "xllm").out)
    assert xllm["parts"]["mtp"]["computed_bytes"] == 2 * (11_274_289_152 + 187_105_280 + 44_040_192)


@pytest.mark.parametrize("target", nightly_but(["hf", "xllm"], ("hf", "xllm", "paddlenlp")))
def test_memory_stays_within_its_bound(target: str, tmp_path: Path) -> None:
    """Embedding and head are 230 MB each here: two of them, or one and its transpose, would not
    fit beside the program, and a copy needs no more than a small checkpoint's. They are holes in
    their file."""
    config = TINY_CONFIG | {"vocab_size": 75_000, "hidden_size": 1536, "num_hidden_layers": 2}
    large = make_checkpoint(
        tmp_path / "large",
        config,
        own_copies=False,
        max_shard_bytes=10**9,
        filled=lambda name: False,
    )
    options = ("--target", target, "--part", "mtp", "--max-memory", "600MB")
    # The small one first: Python compiles modules that were never imported, which takes memory.
    small = peak_bytes(make_checkpoint(tmp_path / "small"), tmp_path / "a", *options)
    peak = peak_bytes(large, tmp_path / "b", *options)
    assert peak < 600_000_000
    if target == "hf":
        assert peak - small < DiskQueue.memory_bytes(16, DEFAULT_WORKERS)


def test_tokenizer_config_of_a_bundle_is_the_source_s(pristine: Path, output: Path) -> None:
    assert export(pristine, output).code == 0
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert (output / "mtp" / name).read_bytes() == (pristine / name).read_bytes()


TEMPLATE = "additional_chat_templates/tool_use.jinja"


def test_additional_chat_templates_come_along(source: Path, output: Path) -> None:
    (source / TEMPLATE).parent.mkdir()
    (source / TEMPLATE).write_text("{{ tools }}")
    (source / "additional_chat_templates/notes.txt").write_text("not a template")
    assert export(source, output).code == 0
    manifest = read_json(output / "mtp_export.json")
    for part in ("main", "mtp"):
        assert (output / part / TEMPLATE).read_text() == "{{ tools }}"
        assert [path.name for path in (output / part / TEMPLATE).parent.iterdir()] == [
            "tool_use.jinja"
        ]
        assert TEMPLATE in manifest["parts"][part]["files"]
    again = export(output, output.with_name("again"))
    assert again.code == 0, again.err
    assert (output.with_name("again") / "mtp" / TEMPLATE).exists()


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_a_chat_template_outside_the_checkpoint_is_refused(
    linked: str, source: Path, output: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "elsewhere/tool_use.jinja"
    secret.parent.mkdir()
    secret.write_text("secret")
    if linked == "folder":
        (source / TEMPLATE).parent.symlink_to(secret.parent)
    else:
        (source / TEMPLATE).parent.mkdir()
        (source / TEMPLATE).symlink_to(secret)
    outcome = export(source, output)
    assert outcome.code == 3
    assert "leads out of the checkpoint" in outcome.err
    assert not output.exists()


def test_chat_templates_of_a_download_cache_are_links(
    source: Path, output: Path, tmp_path: Path
) -> None:
    (source / TEMPLATE).parent.mkdir()
    (source / TEMPLATE).write_text("{{ x }}")
    snapshot = hub_cache(source, tmp_path / "cache")
    assert (snapshot / TEMPLATE).is_symlink()
    assert export(snapshot, output).code == 0
    assert (output / "main" / TEMPLATE).read_text() == "{{ x }}"
    assert not (output / "main" / TEMPLATE).is_symlink()
