"""Bundles that are written without their weights, against those that quantize writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.make_bundle import SCHEMES, make_bundle
from cases import tree
from mtp_checkpoints.containers.safetensors import INDEX_NAME
from mtp_checkpoints.tensors.bundle_folder import open_parts
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME
from mtp_checkpoints.tensors.tensor_reader import read_rows
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.options import BundleOptions, RunOptions
from mtp_export.bundle.quantize import QuantizeOptions, plan_quantize
from mtp_export.plan import Link
from mtp_export.progress import silent


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_but_weights_is_as_quantize_writes_it(
    scheme: str, row_sources: dict[str, Path], tmp_path: Path
) -> None:
    source, made, written = row_sources["fp8"], tmp_path / "made", tmp_path / "written"
    run = RunOptions(link=Link.COPY)
    options = QuantizeOptions(BundleOptions(source, written, run=run), **SCHEMES[scheme])
    run_bundle(plan_quantize(options), silent)
    make_bundle(source, made, scheme)
    ours, theirs = tree(made), tree(written)
    assert ours.keys() == theirs.keys() - {MANIFEST_NAME}
    for name in ours:
        if name == f"mtp/{INDEX_NAME}":  # whose identity is of weights, which ours has none of
            index = json.loads(theirs[name])
            assert index["metadata"].pop("main_identity")
            assert json.loads(ours[name]) == index
        elif not name.endswith(".safetensors"):
            assert ours[name] == theirs[name], name
        else:
            head = 8 + int.from_bytes(theirs[name][:8], "little")
            assert ours[name][:head] == theirs[name][:head], name
            assert len(ours[name]) == len(theirs[name])
    check_constants(made, written)


def check_constants(made: Path, written: Path) -> None:
    """Shapes and input scales are there; nothing else is."""
    ours, theirs = (open_parts(folder).main.tensors for folder in (made, written))
    constants = [name for name in theirs if name.endswith(("weight_shape", "input_scale"))]
    for name, tensor in ours.items():
        found = read_rows(tensor, 0, tensor.shape[0])
        if name in constants:
            assert found.tolist() == read_rows(theirs[name], 0, tensor.shape[0]).tolist()
        else:
            assert not found.float().any(), name
    assert constants
