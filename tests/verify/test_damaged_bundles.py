"""Damage that verify exists for: each ends with exit code 7, an item that names it and all reports,
none as an internal error."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.make_checkpoint import write_tokenizer
from cases import edit_json, export, read_json, run_program
from faults import planting
from mtp_checkpoints.errors import InvalidInputError, IoError
from mtp_checkpoints.layouts import TARGETS
from mtp_export.verify import CHECKS
from mtp_export.verify.check import Check, Item, Level, passed
from runtime.checkpoints import SMALL, YARN, write_checkpoint

Edit = Callable[[dict[str, Any]], object]
SHARD = "model-00001-of-00001.safetensors"


def config(**values: Any) -> Edit:
    return lambda content: content.update(values)


def vocabulary(value: Any) -> Edit:
    """Another vocabulary, or another id of one of its tokens."""

    def edit(tokenizer: dict[str, Any]) -> None:
        if isinstance(value, dict):
            tokenizer["model"]["vocab"] |= value
        else:
            tokenizer["model"]["vocab"] = value

    return edit


def part(*path: str, value: Any) -> Edit:
    """Another value somewhere in the manifest's entry of main."""

    def edit(manifest: dict[str, Any]) -> None:
        inner = manifest["parts"]["main"]
        for name in path[:-1]:
            inner = inner[name]
        assert path[-1] in inner
        inner[path[-1]] = value

    return edit


CONFIG, TOKENIZER, MANIFEST = "main/config.json", "main/tokenizer.json", planting.MANIFEST
# File, change, and words that a failed item must say.
DAMAGE: dict[str, tuple[str, Edit, str]] = {
    "rope_scaling is a number": (CONFIG, config(rope_scaling=4.0), "no usable rope_scaling"),
    "rope_scaling is a list": (CONFIG, config(rope_scaling=["yarn", 4]), "no usable rope_scaling"),
    "rope_parameters is text": (
        CONFIG,
        config(rope_scaling=None, rope_parameters="yarn"),
        "no usable rope_parameters",
    ),
    "hidden_size is an object": (CONFIG, config(hidden_size={"a": 1}), "no usable hidden_size"),
    "hidden_size is null": (CONFIG, config(hidden_size=None), "no usable hidden_size"),
    "vocab_size is text": (CONFIG, config(vocab_size="96"), "no usable vocab_size"),
    "layers are a list": (CONFIG, config(num_hidden_layers=[3]), "no usable num_hidden_layers"),
    "model_type is a list": (CONFIG, config(model_type=["deepseek_v3"]), "model type"),
    "quantization_config is text": (CONFIG, config(quantization_config="fp8"), "quantization"),
    "a value is a megabyte": (CONFIG, config(eos_token_id="x" * 10**6), "eos_token_id is 1 in mtp"),
    "an id is text": (TOKENIZER, vocabulary({"x": "7"}), "'x' has the id '7'"),
    "an id is null": (TOKENIZER, vocabulary({"x": None}), "'x' has the id None"),
    "an id is negative": (TOKENIZER, vocabulary({"x": -1}), "'x' has the id -1"),
    "an id is half a number": (TOKENIZER, vocabulary({"x": 1.5}), "'x' has the id 1.5"),
    "ids are huge": (TOKENIZER, vocabulary({"x": 10**30}), "another model's"),
    "entries are no pairs": (TOKENIZER, vocabulary([["a", 0.0], [], 5, None]), "token None"),
    "the vocabulary is text": (TOKENIZER, vocabulary("abc"), "another model's"),
    "the model is a list": (TOKENIZER, config(model=[]), "another model's"),
    "added tokens are numbers": (TOKENIZER, config(added_tokens=[1, {"id": 2}]), "token None"),
    "added tokens have a list of ids": (
        *(TOKENIZER, config(added_tokens=[{"content": "y", "id": [3]}]), "'y' has the id [3]"),
    ),
    "parts are a list": (MANIFEST, config(parts=[1]), "damaged at parts"),
    "a part is null": (MANIFEST, config(parts={"main": None}), "damaged at parts → main"),
    "files are a list": (MANIFEST, part("files", value=["config.json"]), "→ main → files"),
    "a file is text": (MANIFEST, part("files", "config.json", value="?"), "→ config.json"),
    "shards are a number": (MANIFEST, part("shards", value=4), "→ main → shards"),
    "a shard is a list": (MANIFEST, part("shards", SHARD, value=[]), SHARD),
    "a size is text": (MANIFEST, part("shards", SHARD, "size_bytes", value="9"), "a size in bytes"),
    "a size is huge": (MANIFEST, part("shards", SHARD, "size_bytes", value=10**400), "a size in"),
    "tensors are a list": (MANIFEST, part("shards", SHARD, "tensors", value=[]), "→ tensors"),
    "a tensor has no checksum": (
        MANIFEST,
        part("shards", SHARD, "tensors", value={"a": {}}),
        "→ a",
    ),
    "a shard has no tensors": (MANIFEST, part("shards", SHARD, value={"size_bytes": 1}), "tensors"),
    "there are no parts": (MANIFEST, lambda manifest: manifest.pop("parts"), "an entry parts"),
    "options are text": (MANIFEST, config(options="hf"), "damaged at options"),
    "the source is a list": (MANIFEST, config(source=[]), "damaged at source"),
    "the source's sizes are text": (
        *(MANIFEST, config(source={"shards": {"a": {"size_bytes": "1"}}}), "damaged at source"),
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a tiny model, all of whose tensors the manifest lists."""
    folder = tmp_path_factory.mktemp("damaged")
    source = write_checkpoint(folder / "source", SMALL | {"rope_scaling": YARN})
    write_tokenizer(source, SMALL["vocab_size"])
    outcome = export(source, folder / "good", "--checksums", "all", "--link", "copy", "--quiet")
    assert outcome.code == 0, outcome.err
    return folder / "good"


def verified(bundle: Path, reports: Path, *options: object) -> tuple[int, str, dict[str, Any]]:
    """Exit code, stderr and report of verify; every kind of report was written."""
    files = [f"--{option}={reports / name}" for option, name in
             (("report", "r.json"), ("junit", "r.xml"), ("html", "r.html"))]  # fmt: skip
    outcome = run_program("verify", bundle, "--level", "weights", "--quiet", *files, *options)
    ElementTree.parse(reports / "r.xml")
    assert "NOT verified" in (reports / "r.html").read_text()
    return outcome.code, outcome.err, read_json(reports / "r.json")


def failed_items(report: dict[str, Any]) -> dict[str, str]:
    """Causes of failed items by name."""
    return {
        item["name"]: item["cause"]
        for check in report["checks"]
        for item in check["items"]
        if item["status"] == "fail"
    }


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_an_item_of_its_check(name: str, good: Path, tmp_path: Path) -> None:
    file, edit, words = DAMAGE[name]
    bundle = shutil.copytree(good, tmp_path / "bundle")
    edit_json(bundle / file, edit)
    code, _, report = verified(bundle, tmp_path)
    failed = failed_items(report)
    assert code == 7 and words in " | ".join(failed.values()), failed
    assert not [item for item in failed if item.startswith("internal")], failed
    assert max(map(len, failed.values())) < 10_000


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_config_without_layers_is_no_failure_of_a_target(
    target: str, good: Path, tmp_path: Path
) -> None:
    """The draft's config of some targets is made from the main one's number of layers."""
    bundle = shutil.copytree(good, tmp_path / "bundle")
    edit_json(bundle / CONFIG, lambda content: content.pop("num_hidden_layers"))
    edit_json(bundle / MANIFEST, lambda content: content["options"].update(target=target))
    code, _, report = verified(bundle, tmp_path)
    failed = failed_items(report)
    assert code == 7 and "no usable num_hidden_layers" in failed["main: config"]
    assert not [item for item in failed if item.startswith("internal")], failed


def test_a_file_of_3_gb_is_not_read(good: Path, tmp_path: Path) -> None:
    """Sizes are compared first: with the manifest, with the other part and with the source."""
    bundle = shutil.copytree(good, tmp_path / "bundle")
    os.truncate(bundle / TOKENIZER, 3_000_000_000)  # a hole: no disk is used
    tracemalloc.start()
    try:
        code, _, report = verified(bundle, tmp_path, "--source", good.parent / "source")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert code == 7 and peak < 300_000_000
    assert {"main: files", "one tokenizer", "tokenizer is the source's"} <= failed_items(
        report
    ).keys()


@pytest.mark.parametrize("file", [CONFIG, TOKENIZER, MANIFEST])
def test_a_damaged_file_spoils_no_other_item(file: str, good: Path, tmp_path: Path) -> None:
    """Checks that do not need the file still run: the values of the other part are looked at."""
    bundle = shutil.copytree(good, tmp_path / "bundle")
    (bundle / file).write_text('{"')
    code, _, report = verified(bundle, tmp_path)
    passes = {i["name"] for c in report["checks"] for i in c["items"] if i["status"] == "pass"}
    assert code == 7
    assert {"mtp: headers and index", "mtp: no constant tensor", "export finished"} <= passes


def toy_module(monkeypatch: pytest.MonkeyPatch, name: str, *items: Item | Exception) -> str:
    """A module of a check that yields items, and raises an exception."""

    def run(context: object) -> Any:
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield item

    module = ModuleType(name)
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"mtp_export.verify.{name}", module)
    return name


@pytest.mark.parametrize(
    ("error", "name", "status"),
    [
        (KeyError("planted"), "internal: KeyError", "fail"),
        (RecursionError("planted"), "internal: RecursionError", "fail"),
        (InvalidInputError("planted"), "could be checked to the end", "fail"),
        (MemoryError("planted"), "all of it", "not tested"),
        (torch.OutOfMemoryError("planted"), "all of it", "not tested"),
        (RuntimeError("planted: can't allocate memory"), "all of it", "not tested"),
    ],
)
def test_an_exception_ends_one_module_of_its_check(
    error: Exception,
    name: str,
    status: str,
    good: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Items before it, other modules and other checks are in the reports; --debug shows where an
    internal error arose."""
    modules = (
        toy_module(monkeypatch, "toy1", passed("before"), error),
        toy_module(monkeypatch, "toy2", passed("after")),
    )
    broken = Check("Broken", Level.FILES, modules)
    monkeypatch.setattr("mtp_export.verify.CHECKS", {"broken": broken, **CHECKS})
    if status != "fail":  # so that every case ends with a report of a failure
        good = shutil.copytree(good, tmp_path / "bundle")
        (good / TOKENIZER).unlink()
    code, err, report = verified(good, tmp_path, "--debug")
    items = report["checks"][0]["items"]
    assert code == 7
    assert [item["name"] for item in items] == ["before", name, "after"]
    assert items[1]["status"] == status and "planted" in items[1]["cause"]
    assert [check["name"] for check in report["checks"][1:]] == list(CHECKS)
    internal = name.startswith("internal")
    assert ("Please report this internal error" in items[1]["cause"]) == internal
    assert ("raise item" in err) == internal
    assert json.dumps(report).isascii()


def caused(error: IoError, cause: OSError) -> IoError:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "planted", "bundle/main/config.json"),
        OSError(errno.EIO, "planted"),
        OSError(errno.ENOSPC, "planted", "/elsewhere"),
        FileNotFoundError(errno.ENOENT, "planted", "/elsewhere"),
        IoError("planted", where="bundle/main/config.json"),
        caused(IoError("planted", where="bundle/main"), OSError(errno.EIO, "planted")),
        RuntimeError("planted: can't start new thread"),
    ],
    ids=repr,
)
def test_trouble_of_the_machine_is_no_verdict(
    error: Exception, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing of the bundle: no item fails, no report is written."""
    monkeypatch.chdir(good.parent)
    module = toy_module(monkeypatch, "toy1", passed("before"), error)
    monkeypatch.setattr("mtp_export.verify.CHECKS", {"broken": Check("B", Level.FILES, (module,))})
    report = tmp_path / "r.json"
    outcome = run_program("verify", good.name, "--level", "files", "--report", report)
    assert outcome.code == 6 and "planted" in outcome.err, outcome.err
    assert "ship" not in outcome.err and not report.exists()


@pytest.mark.parametrize(
    "file", [CONFIG, TOKENIZER, MANIFEST, "main/model.safetensors.index.json", f"main/{SHARD}"]
)
def test_a_file_that_may_not_be_read_is_no_verdict(
    file: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = shutil.copytree(good, tmp_path / "bundle")
    refused, real = {os.fspath(bundle / file), (bundle / file).name}, io.open

    def opening(file: Any, *given: Any, **more: Any) -> Any:
        if file in refused or os.fspath(file) in refused:
            raise PermissionError(errno.EACCES, "Permission denied", file)
        return real(file, *given, **more)

    monkeypatch.setattr(io, "open", opening)
    monkeypatch.setattr("builtins.open", opening)
    outcome = run_program("verify", bundle, "--level", "weights", "--quiet")
    assert outcome.code == 6 and "Permission denied" in outcome.err, outcome.err
    assert "ship" not in outcome.err


def test_a_tokenizer_that_the_source_lacks_is_to_be_put_there(good: Path, tmp_path: Path) -> None:
    """An export of the same source would lack it again."""
    source = shutil.copytree(good.parent / "source", tmp_path / "source")
    for path in source.glob("tokenizer*"):
        path.unlink()
    assert export(source, tmp_path / "bundle", "--part", "mtp", "--quiet").code == 0
    _, message, _ = verified(tmp_path / "bundle", tmp_path)
    assert (
        "no tokenizer: mtp/ has none of" in message
        and "; its source had none either: put" in message
    )
    (tmp_path / "bundle" / MANIFEST).unlink()
    _, message, _ = verified(tmp_path / "bundle", tmp_path)
    assert "no tokenizer: mtp/ has none of" in message and "none either" not in message


ONE_CAUSE: dict[str, tuple[dict[str, Edit | None], str]] = {
    "no tokenizer in one part": ({TOKENIZER: None}, "tokenizer.json is missing"),
    "no tokenizer at all": (
        {TOKENIZER: None, "mtp/tokenizer.json": None},
        "tokenizer.json is missing",
    ),
    "two files of one part": (
        {TOKENIZER: None, CONFIG: lambda content: content.update(rope_theta=123.0)},
        "config.json was changed after the export; tokenizer.json is missing",
    ),
    "a field of the main config": (
        {CONFIG: lambda content: content.update(rope_theta=123.0)},
        "rope_theta is 10000.0 in mtp/config.json, which is as it was exported, and 123.0 by main/",
    ),
    "a field of the draft's config": (
        {"mtp/config.json": lambda content: content.update(rope_theta=123.0)},
        "where main/config.json makes it 10000.0: the draft belongs to another model",
    ),
    "the draft's tokenizer": (
        {"mtp/tokenizer.json": lambda content: content.update(added_tokens=[])},
        "tokenizer.json differs between main/ and mtp/",
    ),
}


@pytest.mark.parametrize("name", ONE_CAUSE)
def test_what_follows_from_one_file_is_one_cause(name: str, good: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(good, tmp_path / "bundle")
    edits, words = ONE_CAUSE[name]
    for file, edit in edits.items():
        if edit is None:
            (bundle / file).unlink()
        else:
            edit_json(bundle / file, edit)
    code, message, report = verified(bundle, tmp_path)
    assert code == 7 and len(failed_items(report)) > 1
    assert "Found 1 cause." in message and words in message, message
    of_files = {item["name"]: item["subject"] for item in report["checks"][0]["items"]}
    assert of_files["one tokenizer"] in ("", *edits)


def test_a_file_that_is_no_file_is_the_bundles_fault(good: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(good, tmp_path / "bundle")
    for file in (TOKENIZER, "main/tokenizer_config.json"):
        (bundle / file).unlink(missing_ok=True)
        (bundle / file).mkdir()
    code, _, report = verified(bundle, tmp_path)
    assert code == 7
    assert not [item for item in failed_items(report) if item.startswith("internal")]
