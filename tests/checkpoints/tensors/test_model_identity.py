"""Identity of a model: known again however its tensors are put into files, and no other model's."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.containers.safetensors_header import read_header
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.tensors.model_identity import (
    model_identity,
    recorded_main_identity,
    with_main_identity,
)

Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"
LAYERS = 40


def model() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    sizes = {f"layers.{n}.weight": (64, 96) for n in range(LAYERS)}
    sizes |= {f"layers.{n}.norm": (96,) for n in range(LAYERS)} | {"head": (3, 1)}
    return {name: torch.randn(shape, generator=generator) for name, shape in sizes.items()}


def tensors_of(folder: Path) -> list[TensorInfo]:
    source = LocalFolder(folder)
    names = sorted(name for name in source.names() if name.endswith(".safetensors"))
    return [tensor for name in names for tensor in read_header(source.file(name)).tensors]


def written(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int = 1) -> Path:
    folder.mkdir()
    for number in range(shards):
        own = {name: tensors[name] for name in list(tensors)[number::shards]}
        save_file(own, folder / f"{number}.safetensors")
    return folder


def identity_of(folder: Path) -> str:
    return model_identity(tensors_of(folder))


def test_it_is_what_its_description_says(tmp_path: Path) -> None:
    """16 of each kind, evenly by their numbers, and 4096 bytes in the middle of each."""
    tensors = model()
    chosen = {name for n in range(16) for name in (f"layers.{n * LAYERS // 16}.weight",
              f"layers.{n * LAYERS // 16}.norm")} | {"head"}  # fmt: skip
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} F32 {list(tensor.shape)}\n".encode())
        data = tensor.numpy().tobytes()
        start = max(0, (len(data) - 4096) // 2)
        if name in chosen:
            digest.update(data[start : start + 4096])
    assert identity_of(written(tmp_path / "model", tensors)) == digest.hexdigest()


def test_files_and_their_order_do_not_matter(tmp_path: Path) -> None:
    tensors = model()
    backwards = dict(reversed(tensors.items()))
    found = {identity_of(written(tmp_path / f"{n}", tensors, shards=n)) for n in (1, 2, 7)}
    found |= {identity_of(written(tmp_path / "backwards", backwards, shards=3))}
    assert len(found) == 1


def _renamed(tensors: Tensors) -> None:
    tensors["lm_head"] = tensors.pop("head")


def _reshaped(tensors: Tensors) -> None:
    tensors["head"] = tensors["head"].reshape(1, 3)


def _as_integers(tensors: Tensors) -> None:
    tensors["head"] = tensors["head"].view(torch.int32)


def _without_one(tensors: Tensors) -> None:
    del tensors["layers.1.norm"]  # which is none of those that are sampled


def _trained_further(tensors: Tensors) -> None:
    for name in tensors:
        if re.search(r"weight$", name):
            tensors[name] += 1e-3


@pytest.mark.parametrize(
    "change", [_renamed, _reshaped, _as_integers, _without_one, _trained_further]
)
def test_another_model_has_another(change: Callable[[Tensors], None], tmp_path: Path) -> None:
    tensors = model()
    before = identity_of(written(tmp_path / "before", tensors))
    change(tensors)
    assert identity_of(written(tmp_path / "after", tensors)) != before


def test_an_index_records_it_beside_the_rest(tmp_path: Path) -> None:
    index: dict[str, object] = {"metadata": {"total_size": 3}, "weight_map": {"a": "b"}}
    (tmp_path / INDEX).write_text(json.dumps(with_main_identity(index, "abc")))
    assert recorded_main_identity(tmp_path) == "abc"
    assert json.loads((tmp_path / INDEX).read_text()) == {
        "metadata": {"total_size": 3, "main_identity": "abc"},
        "weight_map": {"a": "b"},
    }
    assert index["metadata"] == {"total_size": 3}


@pytest.mark.parametrize("index", [None, {}, {"metadata": 3}, {"metadata": {"main_identity": 3}}])
def test_an_index_may_record_none(index: object, tmp_path: Path) -> None:
    if index is not None:
        (tmp_path / INDEX).write_text(json.dumps(index))
    assert recorded_main_identity(tmp_path) is None


def test_an_index_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(InvalidInputError, match=INDEX):
        recorded_main_identity(tmp_path)
