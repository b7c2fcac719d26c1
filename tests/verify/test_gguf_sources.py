"""GGUF files of others, judged: what they hold, whether it is the source's, and whether drafts are
accepted."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.make_checkpoint import TINY_CONFIG, make_checkpoint
from cases import run_program
from gguf_files import GgufModel, gguf_model, is_of_module
from mtp_checkpoints.containers.gguf_file import read_header
from mtp_checkpoints.containers.gguf_values import u32
from mtp_checkpoints.sources.local_folder import LocalFolder

FIXTURE = Path("fixtures/deepseek-v3-tiny").resolve()
CONFIG = {key: value for key, value in TINY_CONFIG.items() if key != "quantization_config"}
LAYERS = CONFIG["num_hidden_layers"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "tiny", CONFIG)


@pytest.fixture(scope="module")
def model(source: Path) -> GgufModel:
    return gguf_model(source)


def verified(place: Path, source: Path) -> tuple[int, str]:
    found = run_program("verify", place, "--level", "weights", "--source", source)
    return found.code, " ".join((found.out + found.err).split())


@pytest.mark.parametrize("kind", [None, "q8_0", "q4_0"])
def test_a_sound_file_is_inspected_and_passes(
    kind: str | None, source: Path, tmp_path: Path
) -> None:
    place = gguf_model(source, kind).write(tmp_path / "tiny.gguf")
    found = run_program("inspect", place, "--json")
    assert found.code == 0, found.err
    facts = json.loads(found.out)
    assert (facts["model_type"], facts["layout"]) == ("deepseek_v3", "llama.cpp")
    assert (facts["mtp_layers"], facts["parts"]) == ([LAYERS], ["main", "mtp"])
    assert not facts["problems"] and not facts["missing_files"]
    code, said = verified(place, source)
    assert code == 0, said
    assert "no fault in files and weights" in said


def test_drafts_of_a_file_are_accepted(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": [5, 17, 300, 41, 900, 12, 77]}))
    place = gguf_model(FIXTURE, "q8_0").write(tmp_path / "tiny.gguf")
    found = run_program("generate", place, "--prompts", prompts, "--max-new-tokens", 24)
    assert found.code == 0, found.err
    accepted = re.search(r"\((\d+) of (\d+)\)", found.out + found.err)
    assert accepted is not None and int(accepted[1]) > 0.5 * int(accepted[2]), found.err


def test_a_module_that_was_dropped(source: Path, model: GgufModel, tmp_path: Path) -> None:
    of_module = is_of_module(model)
    place = model.only(lambda name: not of_module(name)).write(tmp_path / "tiny.gguf")
    code, said = verified(place, source)
    assert code == 7 and "MTP" in said
    uncounted = {
        "deepseek2.block_count": u32(LAYERS),
        "deepseek2.nextn_predict_layers": u32(0),
    }
    model.only(lambda name: not of_module(name)).write(place, uncounted)
    code, said = verified(place, source)
    assert code == 7 and "MTP" in said, said


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ours: of blocks, a file for the main model and one for the module."""
    folder = tmp_path_factory.mktemp("bundle") / "ours"
    source = make_checkpoint(folder.parent / "tiny", CONFIG | {"vocab_size": 2048})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURE / name, source / name)
    options = ("--target", "llama.cpp", "--base-quant", "q4_0", "--pre-tokenizer", "gpt-2")
    made = run_program("quantize", "--input-dir", source, "--output-dir", folder, *options)
    assert made.code == 0, made.err
    return folder


def test_a_bundle_passes(bundle: Path) -> None:
    found = run_program("verify", bundle, "--level", "weights")
    assert found.code == 0, found.out + found.err


def test_damage_in_a_half_is_found(bundle: Path, tmp_path: Path) -> None:
    """Manifests have the halves by themselves, and what is read is put together of them."""
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle, damaged)
    (path,) = (damaged / "main").glob("*.gguf")
    header = read_header(LocalFolder(path.parent).file(path.name))
    half = next(one for one in header.shard.tensors if one.name == "blk.1.attn_v_b.weight")
    data = bytearray(path.read_bytes())
    data[half.offset_bytes + 5] ^= 1
    path.write_bytes(data)
    found = run_program("verify", damaged, "--level", "files")
    assert found.code == 7
    assert "model.layers.1.self_attn.v_b_proj.weight" in found.out.replace("\n  ", " "), found.out
