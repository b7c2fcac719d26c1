"""A checkpoint as a whole: what is read of it, and contradictions of config, index and shards."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cases import edit_json, read_json
from mtp_checkpoints.containers import safetensors
from mtp_checkpoints.containers.repeated import RepeatedTensorsError, are_equal
from mtp_checkpoints.errors import InvalidInputError, IoError, MtpExportError
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.sources.strict_json import read_json_object
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.tensors.tensor_reader import read_rows

INDEX = "model.safetensors.index.json"
ONE = "one.safetensors"
CONFIG = b'{"model_type": "x"}'
TENSORS = {
    "one.safetensors": {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(2.5)},
    "two.safetensors": {"c": torch.zeros(0, 4), "d": torch.arange(4, dtype=torch.int64)},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of two tensors each, and their index."""
    for name, tensors in TENSORS.items():
        save_file(tensors, tmp_path / name)
    (tmp_path / "config.json").write_bytes(CONFIG)
    weight_map = {tensor: name for name, tensors in TENSORS.items() for tensor in tensors}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def refusal(folder: Path, error: type[MtpExportError] = InvalidInputError) -> MtpExportError:
    with pytest.raises(error) as caught:
        Checkpoint.open(folder)
    return caught.value


def test_what_is_read(folder: Path) -> None:
    found = Checkpoint.open(folder)
    assert found.config == {"model_type": "x"}
    assert found.config_sha256 == hashlib.sha256(CONFIG).hexdigest()
    assert found.path == found.folder == found.files.path == folder
    assert not found.is_bundle
    assert [found.shard_name(shard) for shard in found.shards] == list(TENSORS)
    expected = {name: tensor for shard in TENSORS.values() for name, tensor in shard.items()}
    assert found.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found.tensors[name].name == name
        read = found.tensor(name)
        assert (read.shape, read.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(read, tensor)
    with pytest.raises(KeyError):
        found.tensor("e")


def test_a_quantization_in_a_file_of_its_own(folder: Path) -> None:
    """Its method has no name there; a config.json with one is read alone."""
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    found = Checkpoint.open(folder).config
    assert found == {"model_type": "x", "quantization_config": {"quant_method": "modelopt", **own}}
    config = {"model_type": "x", "quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert Checkpoint.open(folder).config == config


def test_rows_of_one_tensor(folder: Path) -> None:
    found = Checkpoint.open(folder)
    assert read_rows(found.tensors["a"], 1, 2).tolist() == [[3.0, 4.0, 5.0]]
    assert read_rows(found.tensors["d"], 0, 4).tolist() == [0, 1, 2, 3]
    assert read_rows(found.tensors["c"], 0, 0).shape == (0, 4)


def test_a_single_file_needs_no_index(folder: Path) -> None:
    for name in (INDEX, "two.safetensors"):
        (folder / name).unlink()
    (folder / "one.safetensors").rename(folder / "model.safetensors")
    assert Checkpoint.open(folder).tensors.keys() == {"a", "b"}
    save_file({"z": torch.zeros(1)}, folder / "stray.safetensors")
    assert refusal(folder).where == folder / "stray.safetensors"


def test_a_whole_set_of_shards_needs_no_index(folder: Path) -> None:
    """As for vLLM and SGLang; of several sets nothing tells which is the model's."""
    (folder / INDEX).unlink()
    for number, name in enumerate(TENSORS, start=1):
        (folder / name).rename(folder / f"part-{number:05d}-of-00002.safetensors")
    assert Checkpoint.open(folder).tensors.keys() == {"a", "b", "c", "d"}
    save_file({"z": torch.zeros(1)}, folder / "model-00001-of-00001.safetensors")
    assert refusal(folder).what == "The folder has shards and no index"
    (folder / "model-00001-of-00001.safetensors").unlink()
    (folder / "part-00002-of-00002.safetensors").unlink()
    assert refusal(folder).what == "The folder has shards and no index"


def test_no_folder(folder: Path) -> None:
    for path in (folder / "none", folder / "config.json"):
        error = refusal(path)
        assert (error.what, error.where) == ("There is no checkpoint folder here", path)
        assert error.todo == "Check the path"


def test_neither_index_nor_single_file(folder: Path) -> None:
    (folder / INDEX).unlink()
    error = refusal(folder)
    assert error.what == "The folder has neither an index nor a file of weights"
    assert (error.where, error.expected) == (folder, f"{INDEX} or model.safetensors, or *.gguf")
    assert str(error.todo).startswith("Point at")


@pytest.mark.parametrize("weight_map", [None, {}, [], "a"])
def test_an_index_without_map(weight_map: Any, folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    error = refusal(folder)
    assert (error.what, error.where) == ("The index has no weight_map", folder / INDEX)
    assert error.expected == "tensor name -> file name"


LONG = "x" * 244 + ".safetensors"


def test_an_index_of_files_of_another_kind(folder: Path) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(c="one.bin"))
    error = refusal(folder)
    assert error.what == "The index names a file of another kind for tensor c"
    assert (error.where, error.found) == (folder / INDEX, "one.bin")
    assert error.expected == "a *.safetensors file"
    assert error.todo == "It is the index of another upload: write that of the *.safetensors files"


@pytest.mark.parametrize(
    "file_name",
    [
        5,
        None,
        "a/one.safetensors",
        "..\\one.safetensors",
        "a\n.safetensors",
        LONG,
        "é" * 122 + "x.safetensors",
        "x" * 400,
    ],
)
def test_a_file_name_that_leads_elsewhere(file_name: Any, folder: Path) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(c=file_name))
    error = refusal(folder)
    assert error.what == "The index puts tensor c at a path outside the folder"
    assert (error.where, error.found) == (folder / INDEX, repr(file_name)[:200])
    assert error.expected == "a plain *.safetensors file name"
    assert str(error.todo).startswith("Do not trust")


def test_the_longest_file_name(folder: Path) -> None:
    (folder / "two.safetensors").rename(folder / LONG[1:])
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(c=LONG[1:], d=LONG[1:]))
    assert Checkpoint.open(folder).tensors.keys() == {"a", "b", "c", "d"}


def test_a_shard_that_is_not_there(folder: Path) -> None:
    (folder / "one.safetensors").unlink()
    error = refusal(folder)
    assert error.what == "The index names a shard that is not in the folder"
    assert (error.where, error.found) == (folder / "one.safetensors", "no such file")
    assert error.expected == "a file that holds 2 tensors, such as a"
    assert error.todo == "Download the missing shard"


def test_shards_that_are_not_there_are_all_named(folder: Path) -> None:
    """And whether they hold the MTP module."""
    weight_map = {"model.layers.1.a": "x.safetensors", "mtp.fc.weight": "y.safetensors"}
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(weight_map))
    error = refusal(folder)
    assert error.what == "The index names 2 shards that are not in the folder"
    held = "2 tensors, 1 of the MTP module, such as mtp.fc.weight"
    assert error.expected == f"x.safetensors, y.safetensors, which hold {held}"


def test_a_tensor_in_two_shards(folder: Path) -> None:
    save_file({**TENSORS["two.safetensors"], "a": torch.zeros(1)}, folder / "two.safetensors")
    error = refusal(folder)
    assert (error.what, error.where) == ("Tensor a is in two shards", folder)
    assert error.found == "one.safetensors and two.safetensors"
    assert str(error.todo).startswith("Remove the stale shard")


def test_a_tensor_that_the_index_leaves_out(folder: Path) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop("b"))
    error = refusal(folder)
    assert error.what == "Tensor b is in a shard but the index does not say so"
    assert (error.where, error.found) == (folder / "one.safetensors", "no index entry")
    assert error.expected == "an index entry that names one.safetensors"
    assert "write the index again" in str(error.todo)


def test_a_tensor_in_another_shard_than_the_index_says(folder: Path) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(b="two.safetensors"))
    error = refusal(folder)
    assert error.what == "Tensor b is in a shard but the index does not say so"
    assert (error.where, error.found) == (folder / "one.safetensors", "two.safetensors")


def test_a_tensor_of_the_index_that_no_shard_holds(folder: Path) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(e="two.safetensors"))
    error = refusal(folder)
    assert error.what == "The index names tensor e, which its shard does not hold"
    assert (error.where, error.found) == (folder / "two.safetensors", "no such tensor")
    assert error.expected == "e in this file"
    assert str(error.todo).startswith("Download the shard again")


def test_a_shard_that_the_index_does_not_name(folder: Path) -> None:
    save_file({"a.e": torch.zeros(1)}, folder / "three.safetensors")
    (folder / "notes.txt").touch()
    error = refusal(folder)
    assert error.what == "A shard lies in the folder but the index does not name it"
    assert (error.where, error.found) == (
        folder / "three.safetensors",
        "1 tensor, such as a.e, and an index of 2 other files",
    )
    assert str(error.expected).startswith("every *.safetensors file in the index, or MTP modules")
    assert str(error.todo).startswith("Remove the file")


@pytest.mark.parametrize(
    ("content", "what", "found"),
    [
        ("{", "A JSON file cannot be parsed", "Expecting property name"),
        ('{"a":1,"a":2}', "A JSON file cannot be parsed", "the key 'a' twice"),
        ("[1]", "A JSON file holds no object", "list"),
        ("3", "A JSON file holds no object", "int"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_that_is_none(name: str, content: str, what: str, found: str, folder: Path) -> None:
    (folder / name).write_text(content)
    error = refusal(folder)
    assert (error.what, error.where) == (what, folder / name)
    assert str(error.found).startswith(found)
    if what.endswith("parsed"):
        assert error.todo == "Download it again"
    else:
        assert error.expected == "{...}"
    with pytest.raises(InvalidInputError) as caught:
        read_json_object(folder / name)
    assert caught.value.what == what


def test_one_file_of_json(folder: Path) -> None:
    assert read_json_object(folder / "config.json") == read_json(folder / "config.json")
    with pytest.raises(InvalidInputError, match="is missing"):
        read_json_object(folder / "none.json")


def test_the_mtp_layer_s_own_shard_need_not_be_in_the_index(folder: Path) -> None:
    """Some releases add it so."""
    assert Checkpoint.open(folder).unindexed == ()
    save_file({"m": torch.ones(2)}, folder / "mtp.safetensors")
    found = Checkpoint.open(folder)
    assert found.unindexed == ("mtp.safetensors",)
    assert found.tensors.keys() == {"a", "b", "c", "d", "m"}
    names = [found.shard_name(shard) for shard in found.shards]
    assert names == [*TENSORS, "mtp.safetensors"]
    assert found.main_shards == found.mtp_shards == found.shards
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(m="mtp.safetensors"))
    assert Checkpoint.open(folder).unindexed == ()
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(m="two.safetensors"))
    assert refusal(folder).what == "The index names tensor m, which its shard does not hold"


LAYER = {"model.layers.2.eh_proj.weight": torch.ones(2)}


@pytest.mark.parametrize("tensors", [{"mtp.fc.weight": torch.ones(2)}, LAYER])
@pytest.mark.parametrize("index", [True, False])
def test_a_file_of_mtp_modules_need_not_be_in_the_index(
    tensors: dict[str, torch.Tensor], index: bool, folder: Path
) -> None:
    """Under any name: what its header lists is those modules', and nothing else. Where there is no
    index, none leaves it out."""
    if not index:
        for name in (INDEX, "two.safetensors"):
            (folder / name).unlink()
        (folder / "one.safetensors").rename(folder / "model.safetensors")
    (folder / "config.json").write_text('{"num_hidden_layers": 2}')
    save_file(tensors, folder / "a_draft.safetensors")
    found = Checkpoint.open(folder)
    assert found.unindexed == (("a_draft.safetensors",) if index else ())
    assert tensors.keys() < found.tensors.keys()
    assert found.shards[-1].path.name == "a_draft.safetensors"


@pytest.mark.parametrize(
    "tensors", [{"a.m": torch.ones(2)}, LAYER | {"model.layers.1.a": torch.ones(2)}]
)
def test_a_file_of_others_must_be_in_the_index(
    tensors: dict[str, torch.Tensor], folder: Path
) -> None:
    (folder / "config.json").write_text('{"num_hidden_layers": 2}')
    save_file(tensors, folder / "other.safetensors")
    error = refusal(folder)
    assert error.where == folder / "other.safetensors"
    assert error.what == "A shard lies in the folder but the index does not name it"
    assert str(error.found).endswith(", and an index of 2 other files")
    assert ("1 of the MTP module, such as model.layers.2." in str(error.found)) == (
        len(tensors) > 1
    )


@pytest.mark.parametrize("tensors", [{}, {"base_model.q.lora_A.weight": torch.ones(2, 2)}])
def test_a_file_of_something_else_beside_the_index(
    tensors: dict[str, torch.Tensor], folder: Path
) -> None:
    """An adapter, or what a save of one shard after another leaves of one whose tensors a filter
    dropped."""
    save_file(tensors, folder / "other.safetensors")
    found = Checkpoint.open(folder)
    assert found.unindexed == ()
    assert [shard.path.name for shard in found.strays] == ["other.safetensors"]
    assert {shard.path.name for shard in found.shards} == {"one.safetensors", "two.safetensors"}


def test_tensors_that_the_index_puts_in_another_file(folder: Path) -> None:
    """An index of an earlier upload: its files are those of another split."""
    (folder / "config.json").write_text('{"num_hidden_layers": 2}')
    save_file(LAYER, folder / "three.safetensors")
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(dict.fromkeys(LAYER, ONE)))
    error = refusal(folder)
    assert error.what == "The index puts tensors of a shard in another, which does not hold them"
    assert error.where == folder / "three.safetensors"
    assert f"puts {len(LAYER)} tensor" in str(error.expected)
    assert "all of the MTP module, such as model.layers.2." in str(error.expected)
    assert str(error.found).startswith(f"{ONE} in the index")


def test_modules_that_the_index_puts_in_another_file(folder: Path) -> None:
    (folder / "config.json").write_text('{"num_hidden_layers": 2}')
    tensors = {f"model.layers.2.{name}": torch.ones(2) for name in ("eh_proj.weight", "enorm")}
    save_file(TENSORS[ONE] | tensors, folder / ONE)
    wrong = dict.fromkeys(tensors, "two.safetensors")
    edit_json(folder / INDEX, lambda index: index.update(weight_map=index["weight_map"] | wrong))
    error = refusal(folder)
    assert error.where == folder / ONE
    assert str(error.found).startswith(
        "two.safetensors; so are 2 tensors, all of the MTP module, such as model.layers.2."
    )


def test_a_stale_file_of_mtp_modules(folder: Path) -> None:
    """An earlier upload's: the index has its tensors in another file."""
    (folder / "config.json").write_text('{"num_hidden_layers": 2}')
    save_file(TENSORS["two.safetensors"] | LAYER, folder / "two.safetensors")
    names = dict.fromkeys(LAYER, "two.safetensors")
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(names))
    assert Checkpoint.open(folder).unindexed == ()
    for name in ("old.safetensors", "mtp.safetensors"):
        save_file(LAYER | {"mtp.fc.weight": torch.ones(2)}, folder / name)
        error = refusal(folder)
        assert isinstance(error, RepeatedTensorsError)
        assert error.what == "A shard that the index does not name repeats tensors of the index"
        assert error.where == folder / name
        assert error.found == f"1 of its 2 tensors, such as {[*LAYER][0]}, also in two.safetensors"
        assert [(own.path.name, listed.path.name) for own, listed in error.pairs] == [
            (name, "two.safetensors")
        ]
        (folder / name).unlink()


def test_some_tensors_are_named_in_any_order(folder: Path) -> None:
    """By an iterator, which nobody can search for each of 100,000 tensors."""
    found = Checkpoint.open(folder)
    names = list(found.tensors)
    assert len(names) > 2
    assert list(found.of_tensors(reversed(names[1:])).tensors) == names[1:]


@pytest.mark.parametrize("index", [True, False])
def test_a_file_that_repeats_equal_tensors_is_passed_over(index: bool, folder: Path) -> None:
    tensors = TENSORS["one.safetensors"]
    if not index:
        for name in (INDEX, "two.safetensors"):
            (folder / name).unlink()
        (folder / "one.safetensors").rename(folder / "model.safetensors")
    before = Checkpoint.open(folder)
    assert before.repeated == ()
    save_file({"a": tensors["a"]}, folder / "copy.safetensors")
    found = Checkpoint.open(folder)
    assert (found.shards, found.unindexed) == (before.shards, ())
    (copy,) = found.repeated
    assert (copy.name, len(copy.pairs), copy.compared) == ("copy.safetensors", 1, 1)
    assert found.of_tensors(["b"]).repeated == found.repeated
    for other in (tensors["a"] + 1, tensors["a"].view(3, 2), tensors["a"].to(torch.float16)):
        save_file({"a": other}, folder / "copy.safetensors")
        error = refusal(folder)
        if index:
            assert isinstance(error, RepeatedTensorsError)
            assert (error.unlike, error.compared) == (("a",), 1)


def test_tensors_are_equal_by_every_byte(folder: Path) -> None:
    """Of more than one piece, with a difference that no sample has."""
    large = torch.arange(3 << 18, dtype=torch.int32)
    save_file({"a": large}, folder / "large.safetensors")
    edit_json(folder / INDEX, lambda index: index["weight_map"].update(a="large.safetensors"))
    save_file({"b": TENSORS["one.safetensors"]["b"]}, folder / "one.safetensors")
    for place, equal in ((None, True), (0, False), (-1, False), (1 << 18, False)):
        other = large.clone()
        if place is not None:
            other[place] += 1
        save_file({"a": other}, folder / "copy.safetensors")
        (copy,) = Checkpoint.open(folder).repeated
        assert are_equal(copy.pairs[0]) == equal
        own, listed = copy.pairs[0]
        assert not are_equal((own._replace(shape=(3, 1 << 18)), listed))


def test_a_folder_is_read_from_a_local_disk(folder: Path) -> None:
    found = Checkpoint.open(folder)
    assert (dict(found.origin), found.readers) == ({}, 1)


@pytest.mark.parametrize("readers", [1, 2])
def test_as_many_headers_are_read_at_once_as_the_source_says(
    readers: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, reading, most = safetensors.read_header, list[int](), list[int]()
    together = threading.Barrier(readers)

    def read_header(file: Any) -> Any:
        reading.append(1)
        together.wait(10)
        time.sleep(0.02)
        most.append(len(reading))
        reading.pop()
        return real(file)

    monkeypatch.setattr(safetensors, "read_header", read_header)
    monkeypatch.setattr(LocalFolder, "readers", readers)
    assert len(Checkpoint.open(folder).shards) == 2
    assert max(most) == readers


def test_a_shard_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pread

    def fails(file: int, *more: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{file}").endswith(".safetensors"):
            raise OSError(5, "Input/output error")
        return real(file, *more)

    monkeypatch.setattr(os, "pread", fails)
    error = refusal(folder, IoError)
    assert (error.where, error.found) == (folder / "one.safetensors", "Input/output error")
