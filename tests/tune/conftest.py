"""Small trained bundles to tune: the tiny GLM-4.5, its draft quantized and then damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cases import edit_json, quantize
from mtp_export.tune.options import DataOptions, TuneOptions
from mtp_export.tune.run import TuneResult, tune
from mtp_export.verify.evidence.prompts import BUILT_IN
from tune.running import TRAIN, Watch

ROOT = Path(__file__).resolve().parents[2]
GLM = ROOT / "fixtures/glm4-moe-tiny"
DEEPSEEK = ROOT / "fixtures/deepseek-v3-tiny"
QWEN = ROOT / "fixtures/qwen3-5-tiny"
INT8 = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Products this small lose time to a second thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny GLM-4.5 in int8, both parts, with the record of a calibration."""
    output = tmp_path_factory.mktemp("tune") / "bundle"
    assert quantize(GLM, output, *INT8, "--quiet").code == 0
    record = {"calibrate": {"method": "gptq", "parts": ["main", "mtp"]}}
    edit_json(output / "mtp_export.json", lambda manifest: manifest["options"].update(record))
    return output


@pytest.fixture(scope="session")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts to measure on."""
    path = tmp_path_factory.mktemp("data") / "held-out.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in BUILT_IN))
    return path


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts to train on: some of the fixture's."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines = (ROOT / "fixtures/prompts.jsonl").read_text().splitlines()
    path.write_text("\n".join(lines[::4]) + "\n")
    return path


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Work folder that all runs share, so that the target writes its texts once."""
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="session")
def options(bundle: Path, prompts: Path, held_out: Path, rows: Path) -> TuneOptions:
    data = DataOptions(prompts, held_out=held_out, new_tokens=32)
    return TuneOptions(bundle, rows.parent / "unused", data, train=TRAIN, workdir=rows)


@pytest.fixture(scope="session")
def tuned(
    options: TuneOptions, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TuneResult, Path]:
    """A finished run."""
    output = tmp_path_factory.mktemp("tuned") / "bundle"
    result = tune(replace(options, output_dir=output), Watch())
    assert result is not None
    return result, output


@pytest.fixture
def work(options: TuneOptions, tuned: tuple[TuneResult, Path], tmp_path: Path) -> Path:
    """A work folder of its own with the rows of the finished run."""
    assert options.workdir is not None
    (rows,) = options.workdir.glob("rows-*")
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / rows.name).symlink_to(rows)
    return folder
