"""Bad input ends with the right exit code and one paragraph, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cases import (
    MTP_LAYER,
    UNQUANTIZED,
    add_tensor,
    drop_tensor,
    edit_json,
    export,
    make_checkpoint,
    read_shard,
    run_program,
    shard_of,
    tree,
    write_shard,
)

INDEX = "model.safetensors.index.json"
MTP = f"model.layers.{MTP_LAYER}."
EXPERT = f"{MTP}mlp.experts.2.up_proj.weight"


def edit_header(source: Path, tensor: str, change: Callable[[dict[str, Any]], object]) -> None:
    path = shard_of(source, tensor)
    header, data = read_shard(path)
    change(header)
    write_shard(path, header, data)


def truncate(source: Path) -> None:
    path = shard_of(source, EXPERT)
    os.truncate(path, path.stat().st_size - 100)


def long_header(source: Path) -> None:
    path = shard_of(source, EXPERT)
    raw = path.read_bytes()
    path.write_bytes((len(raw) * 2).to_bytes(8, "little") + raw[8:])


def overlap(source: Path) -> None:
    def move(header: dict[str, Any]) -> None:
        start, end = header[EXPERT]["data_offsets"]
        header[EXPERT]["data_offsets"] = [start - 8, end - 8]

    edit_header(source, EXPERT, move)


def duplicate_entry(source: Path) -> None:
    path = shard_of(source, EXPERT)
    header, data = read_shard(path)
    text = json.dumps(header)
    again = json.dumps({EXPERT: header[EXPERT]})[1:-1]
    write_shard(path, text[:-1] + "," + again + "}", data)


def no_index(source: Path) -> None:
    """Nor one of the shards, without which no engine needs it."""
    (source / INDEX).unlink()
    min(source.glob("*.safetensors")).unlink()


def index_to(value: str) -> Callable[[Path], None]:
    def damage(source: Path) -> None:
        edit_json(source / INDEX, lambda index: index["weight_map"].update({EXPERT: value}))

    return damage


def set_entry(tensor: str, **changes: Any) -> Callable[[Path], None]:
    def damage(source: Path) -> None:
        edit_header(source, tensor, lambda header: header[tensor].update(changes))

    return damage


def set_config(**changes: Any) -> Callable[[Path], None]:
    def damage(source: Path) -> None:
        edit_json(source / "config.json", lambda config: config.update(changes))

    return damage


def no_mtp_at_all(source: Path) -> None:
    names = [n for n in json.loads((source / INDEX).read_text())["weight_map"] if n.startswith(MTP)]
    for name in names:
        drop_tensor(source, name)
    for path in source.glob("*.safetensors"):
        if not read_shard(path)[1]:
            path.unlink()
    set_config(num_nextn_predict_layers=0)(source)


def mtp_lost_but_advertised(source: Path) -> None:
    no_mtp_at_all(source)
    set_config(num_nextn_predict_layers=1)(source)


def flip_byte(tensor: str) -> Callable[[Path], None]:
    def damage(source: Path) -> None:
        path = shard_of(source, tensor)
        header, data = read_shard(path)
        at = header[tensor]["data_offsets"][0] + 77
        write_shard(path, header, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])

    return damage


def in_two_shards(source: Path) -> None:
    other = next(p for p in sorted(source.glob("*.safetensors")) if p != shard_of(source, EXPERT))
    header, data = read_shard(other)
    header[EXPERT] = {"dtype": "U8", "shape": [4], "data_offsets": [len(data), len(data) + 4]}
    write_shard(other, header, data + b"1234")


def stale_shard(source: Path) -> None:
    """Another version's, under a name that the index does not have."""
    header, data = read_shard(shard_of(source, EXPERT))
    write_shard(source / "stale.safetensors", header, bytes(byte ^ 1 for byte in data))


class Case(NamedTuple):
    damage: Callable[[Path], object]
    code: int
    says: tuple[str, ...]


def removed(name: str) -> Callable[[Path], None]:
    return lambda source: drop_tensor(source, name)


CASES: dict[str, Case] = {
    "truncated shard": Case(truncate, 3, ("truncated", "bytes")),
    "header longer than the file": Case(long_header, 3, ("longer than the file",)),
    "overlapping entries": Case(overlap, 3, (EXPERT, "overlaps")),
    "duplicate entries": Case(duplicate_entry, 3, ("duplicate", EXPERT)),
    "index names a missing file": Case(index_to("gone.safetensors"), 3, ("gone.safetensors",)),
    "index names a path outside": Case(index_to("../x.safetensors"), 3, ("outside", EXPERT)),
    "index names an absolute path": Case(index_to("/etc/x.safetensors"), 3, ("outside", EXPERT)),
    "index names the wrong shard": Case(
        lambda s: index_to(min(p.name for p in s.glob("*.safetensors")))(s), 3, (EXPERT,)
    ),
    "index names a missing tensor": Case(
        lambda s: drop_tensor(s, EXPERT, from_index=False), 3, (EXPERT, "does not hold")
    ),
    "tensor not in the index": Case(
        lambda s: add_tensor(s, EXPERT, f"{MTP}lost.weight", to_index=False),
        3,
        (f"{MTP}lost.weight", "index"),
    ),
    "shard not in the index": Case(stale_shard, 3, ("stale", "repeats tensors of the index")),
    "tensor in two shards": Case(in_two_shards, 3, (EXPERT, "two shards")),
    "missing MTP tensor": Case(removed(f"{MTP}enorm.weight"), 3, (f"{MTP}enorm.weight", "missing")),
    "extra MTP tensor": Case(
        lambda s: add_tensor(s, EXPERT, f"{MTP}mlp.experts.9.up_proj.weight"),
        3,
        ("experts.9", "not a tensor of this model"),
    ),
    "missing main tensor": Case(removed("model.layers.0.mlp.up_proj.weight"), 3, ("layers.0.mlp",)),
    "fp8 weight without scale": Case(
        removed(f"{EXPERT}_scale_inv"), 3, (EXPERT, "missing, though its weight")
    ),
    "scale without weight": Case(removed(EXPERT), 3, (EXPERT,)),
    "wrong shape": Case(set_entry(EXPERT, shape=[192, 96]), 3, (EXPERT, "[96, 192]", "[192, 96]")),
    "wrong dtype": Case(set_entry(EXPERT, dtype="F8_E5M2"), 3, (EXPERT, "F8_E4M3", "F8_E5M2")),
    "config does not fit": Case(set_config(hidden_size=256), 3, ("shape",)),
    "config is no JSON": Case(lambda s: (s / "config.json").write_text("{"), 3, ("config.json",)),
    "config names a key twice": Case(
        lambda s: (s / "config.json").write_text('{"model_type": 1, "model_type": 2}'),
        3,
        ("config.json", "'model_type' twice"),
    ),
    "config field is missing": Case(
        lambda s: edit_json(s / "config.json", lambda c: c.pop("kv_lora_rank")),
        3,
        ("kv_lora_rank",),
    ),
    "no config": Case(lambda s: (s / "config.json").unlink(), 3, ("config.json",)),
    "no weights": Case(no_index, 3, (INDEX,)),
    "no MTP layer": Case(no_mtp_at_all, 4, ("no MTP layer", "num_nextn_predict_layers")),
    "MTP layer lost": Case(mtp_lost_but_advertised, 4, ("no MTP layer", f"layers.{MTP_LAYER}")),
    "MTP layer not advertised": Case(set_config(num_nextn_predict_layers=0), 4, ("no MTP layer",)),
    "other model": Case(set_config(model_type="mixtral"), 4, ("mixtral", "deepseek_v3")),
    "other quantization": Case(
        set_config(quantization_config={"quant_method": "awq"}), 4, ("awq", "fp8")
    ),
    "untied embedding": Case(
        flip_byte(f"{MTP}embed_tokens.weight"),
        3,
        (f"{MTP}embed_tokens.weight", "model.embed_tokens.weight", "--allow-untied"),
    ),
    "untied head": Case(
        flip_byte("lm_head.weight"), 3, (f"{MTP}shared_head.head.weight", "lm_head.weight")
    ),
}


CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "quantization_config is a string": ({"quantization_config": "fp8"}, 3),
    "quantization_config is a list": ({"quantization_config": ["fp8"]}, 3),
    "quantization_config is a number": ({"quantization_config": 5}, 3),
    "model_type is a list": ({"model_type": ["deepseek_v3"]}, 4),
    "model_type is missing": ({"model_type": None}, 4),
    "torch_dtype is a list": ({"torch_dtype": ["bfloat16"]}, 3),
    "moe_layer_freq is 0": ({"moe_layer_freq": 0}, 3),
    "a size is 0": ({"moe_intermediate_size": 0}, 3),
    "a size is a string": ({"hidden_size": "192"}, 3),
    "a size is a float": ({"hidden_size": 192.0}, 3),
    "a count is null": ({"num_hidden_layers": None}, 3),
    "a count is a bool": ({"num_nextn_predict_layers": True}, 3),
    "absurdly many MTP layers": ({"num_nextn_predict_layers": 10**9}, 3),
    "tied embeddings": ({"tie_word_embeddings": True}, 4),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_odd_configs(name: str, source: Path, output: Path) -> None:
    """The export alone refuses what is not supported: inspect counts it, and says why."""
    changes, code = CONFIGS[name]
    set_config(**changes)(source)
    field = next(iter(changes)).removeprefix("tie_")
    exported, inspected = export(source, output), run_program("inspect", source)
    for outcome in (exported, inspected) if code == 3 else (exported,):
        assert outcome.code == code, outcome.err
        assert field in outcome.err
        assert len(outcome.err.splitlines()) == 1
    if code == 4:
        assert inspected.code == 0, inspected.err
        assert "told by their names alone" in " ".join(inspected.out.split())
    assert not output.exists()


@pytest.mark.parametrize("listed", [5, "lm_head", [5], {"a": 1}])
def test_odd_lists_of_unquantized_modules(listed: object, source: Path, output: Path) -> None:
    edit_json(
        source / "config.json",
        lambda config: config["quantization_config"].update(modules_to_not_convert=listed),
    )
    outcome = export(source, output, "--target", "lightllm")
    assert outcome.code == 3
    assert "modules_to_not_convert" in outcome.err


@pytest.mark.parametrize(
    "name", ["evil[/bold]", "esc\x1b[31m", "two\nlines", "sur\ud800gate", "nul\0"]
)
def test_names_that_would_spoil_the_screen(name: str, source: Path, output: Path) -> None:
    add_tensor(source, EXPERT, f"{MTP}{name}")
    for outcome in (export(source, output), run_program("inspect", source)):
        assert outcome.code == 3
        assert len(outcome.err.splitlines()) == 1
        assert outcome.err[:-1].isprintable()


def test_folders_whose_names_look_like_markup(source: Path, tmp_path: Path) -> None:
    folder = source.rename(tmp_path / "a[bold]b[:smile:")
    outcome = export(folder, tmp_path / "o[red]:heart:", "--link", "copy")
    assert outcome.code == 0
    assert f"Exported to {tmp_path}/o[red]:heart:\n" in outcome.out
    assert run_program("inspect", folder).out.startswith(f"{folder}\n")
    verified = run_program("verify", tmp_path / "o[red]:heart:", "--level", "files")
    words = "".join(verified.out.split())
    assert words.startswith(
        f"Verificationof{tmp_path}/o[red]:heart::nofaultinheadersandconfigs".replace(" ", "")
    )


@pytest.mark.parametrize("where", ["{source}/config.json", "{output}/r.json", "{output}.d/r.json"])
def test_a_report_goes_outside_of_both_folders(where: str, source: Path, output: Path) -> None:
    before = tree(source)
    report = where.format(source=source, output=output)
    assert export(source, output, "--report", report).code == 2
    assert not output.exists()
    assert tree(source) == before


def test_a_part_that_is_a_link_elsewhere(source: Path, output: Path) -> None:
    assert export(source, output).code == 0
    shutil.rmtree(output / "main")
    (output / "main").symlink_to(source)
    before = tree(source)
    for options in ((), ("--overwrite",), ("--no-resume",)):
        assert export(source, output, *options).code == 8
    assert tree(source) == before
    output.parent.joinpath("loop").symlink_to("loop")
    assert export(source, output.parent / "loop").code == 8


def test_a_good_bundle_outlives_a_bad_source(source: Path, output: Path) -> None:
    assert export(source, output, "--link", "copy").code == 0
    before = tree(output)
    flip_byte(f"{MTP}embed_tokens.weight")(source)
    assert export(source, output, "--overwrite").code == 3
    assert tree(output) == before


def test_a_tokenizer_that_cannot_be_read_is_found_first(source: Path, output: Path) -> None:
    (source / "tokenizer.model").symlink_to("nowhere")
    outcome = export(source, output)
    assert outcome.code == 3
    assert "tokenizer.model" in outcome.err
    assert not output.exists()


def test_a_name_that_no_manifest_can_hold(source: Path, output: Path) -> None:
    Path(os.fsdecode(os.fsencode(source) + b"/tokenizer\xff.model")).write_bytes(b"x")
    outcome = export(source, output)
    assert (outcome.code, "is not UTF-8" in outcome.err) == (3, True)
    assert not output.exists()


def test_a_second_shard_beside_a_single_file(tmp_path: Path, output: Path) -> None:
    source = make_checkpoint(tmp_path / "one", UNQUANTIZED, max_shard_bytes=10**9)
    (source / INDEX).unlink()
    (only,) = source.glob("*.safetensors")
    only.rename(source / "model.safetensors")
    assert export(source, output, "--dry-run").code == 0
    second = source / "model-00002.safetensors"
    shutil.copy(source / "model.safetensors", second)
    outcome = export(source, output, "--dry-run")
    assert outcome.code == 0 and f"{second.name} repeats" in outcome.err
    header, data = read_shard(second)
    write_shard(second, header, bytes(byte ^ 1 for byte in data))
    outcome = export(source, output)
    assert outcome.code == 3
    assert "model-00002" in outcome.err


def test_xllm_needs_bf16(tmp_path: Path, output: Path) -> None:
    source = make_checkpoint(tmp_path / "f16", UNQUANTIZED | {"torch_dtype": "float32"})
    assert export(source, output, "--target", "xllm").code == 4
    assert export(source, output, "--target", "hf").code == 0


def test_a_dry_run_refuses_what_the_run_would(source: Path, output: Path) -> None:
    assert export(source, output, "--dry-run", "--max-memory", "10MB").code == 5
    assert export(source, output).code == 0
    assert export(source, output, "--dry-run").code == 8


@pytest.mark.parametrize("name", CASES)
def test_refuses(name: str, source: Path, output: Path) -> None:
    case = CASES[name]
    case.damage(source)
    before = tree(source)
    outcome = export(source, output)
    assert outcome.code == case.code, outcome.err
    paragraph = [line for line in outcome.err.splitlines() if not line.startswith("export:")]
    assert len(paragraph) == 1, "one paragraph, no traceback"
    assert paragraph[0].startswith("mtp-export: error: ")
    for words in case.says:
        assert words in paragraph[0]
    assert not output.exists()
    assert tree(source) == before


def test_allow_untied_exports_the_layer_s_own_copy(source: Path, output: Path) -> None:
    flip_byte(f"{MTP}embed_tokens.weight")(source)
    assert export(source, output, "--allow-untied").code == 0


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_untied_is_refused_also_when_the_copies_are_dropped(
    name: str, source: Path, output: Path
) -> None:
    flip_byte(f"{MTP}{name}.weight")(source)
    assert export(source, output, "--shared-weights", "drop").code == 3
    assert not output.exists()


def test_nan_codes_are_refused_when_they_must_be_computed_with(source: Path, output: Path) -> None:
    path = shard_of(source, EXPERT)
    header, data = read_shard(path)
    at = header[EXPERT]["data_offsets"][0] + 2 * 192 + 5
    write_shard(path, header, data[:at] + b"\x7f" + data[at + 1 :])
    outcome = export(source, output, "--target", "xllm", "--quiet")
    assert outcome.code == 3
    assert EXPERT in outcome.err
    assert "127 at row 2" in outcome.err
    assert not output.exists()


@pytest.mark.parametrize("inner", [True, False])
def test_output_and_input_must_not_contain_each_other(inner: bool, source: Path) -> None:
    output = source / "out" if inner else source.parent
    outcome = export(source, output, "--overwrite")
    assert outcome.code == 2
    assert "must lie apart" in outcome.err
    assert not (source / "out").exists()


def test_input_must_exist(tmp_path: Path, output: Path) -> None:
    assert export(tmp_path / "nowhere", output).code == 3
    assert run_program("--input-dir", tmp_path).code == 2
    assert run_program("--frobnicate").code == 2
    assert export(tmp_path, output, "--target", "ollama").code == 2
    assert export(tmp_path, output, "--max-memory", "much").code == 2


def test_existing_output_is_kept(pristine: Path, output: Path) -> None:
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    for options in ((), ("--overwrite",), ("--no-resume",)):
        outcome = export(pristine, output, *options)
        assert outcome.code == 8
        assert "thesis.txt" in outcome.err
        assert tree(output) == {"thesis.txt": b"years of work"}


def test_a_finished_bundle_is_replaced_only_when_asked(pristine: Path, output: Path) -> None:
    assert export(pristine, output, "--target", "lightllm").code == 0
    before = tree(output)
    refused = export(pristine, output)
    assert refused.code == 8
    assert "--overwrite" in refused.err
    assert tree(output) == before
    assert export(pristine, output, "--overwrite", "--part", "mtp").code == 0
    assert sorted(p.name for p in output.iterdir()) == ["mtp", "mtp_export.json"]


def test_an_output_that_is_a_file(pristine: Path, output: Path) -> None:
    output.write_text("x")
    assert export(pristine, output).code == 8
    assert output.read_text() == "x"


def test_too_little_disk_is_found_before_the_first_byte(
    pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(pristine)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    outcome = export(pristine, output)
    assert outcome.code == 5
    assert "1000 bytes" in outcome.err
    assert not output.exists()


def test_too_little_memory_is_found_before_the_first_byte(pristine: Path, output: Path) -> None:
    outcome = export(pristine, output, "--max-memory", "10MB")
    assert outcome.code == 5
    assert "--max-memory" in outcome.err
    assert not output.exists()


def test_a_disk_that_fills_up_midway(
    pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.posix_fallocate, [0]

    def full(fd: int, offset: int, length: int) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    outcome = export(pristine, output, "--quiet", "--max-shard-size", "200kB")
    assert outcome.code == 6
    assert "disk filled up" in outcome.err
    assert len(outcome.err.splitlines()) == 1
    names = {path.name for path in output.rglob("*") if path.is_file()}
    assert not names & {"mtp_export.json", "config.json", INDEX}
    assert not [name for name in names if name.endswith(".tmp")]
    assert export(pristine, output, "--max-shard-size", "200kB").code == 0


@pytest.mark.parametrize("call", ["preadv", "pwrite", "fsync", "replace"])
def test_a_disk_that_fails(
    call: str, pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, broken)
    outcome = export(pristine, output, "--quiet")
    assert outcome.code == 6
    assert os.strerror(errno.EIO) in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert not (output / "mtp_export.json").exists()


def test_an_unreadable_file(source: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name.endswith(".safetensors"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    outcome = export(source, output)
    assert outcome.code == 6
    assert "Permission denied" in outcome.err
    assert not output.exists()


def test_our_own_bugs_are_one_line_too(
    pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("mtp_export.commands.export.plan_export", bug)
    plain, debug = export(pristine, output), export(pristine, output, "--debug")
    assert plain.code == debug.code == 1
    assert "Traceback" not in plain.err
    assert "Traceback" in debug.err
