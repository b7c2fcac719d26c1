"""A new engine that reads integers is one target and one line in TARGETS: nothing else knows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cases import WHOLE_TILES, make_checkpoint, quantize, read_json, run_program
from mtp_checkpoints.formats.storage import Storage
from mtp_checkpoints.layouts import TARGETS
from mtp_checkpoints.layouts.base import Config, Deployment, Engine, Target
from mtp_checkpoints.quantization.dialects import VLLM
from mtp_export.inspection import inspect
from mtp_runtime.models.load import LoadOptions, load_model


def _config(config: Mapping[str, Any]) -> Config:
    return {**config, "toy_draft": True}


def _released(config: Mapping[str, Any], main_layers: int) -> Config:
    return {key: value for key, value in config.items() if key != "toy_draft"}


def _launch(bundle: Deployment) -> str:
    return f"toy serve {bundle.main} --draft {bundle.mtp}"


TOY = Target(
    name="toy",
    engines=(Engine("toy", frozenset(Storage) - {Storage.W4AFP8}, VLLM, launch=_launch),),
    mtp_name=lambda name, layer: name,
    mtp_config=_config,
    released_config=_released,
    model_types=frozenset({"deepseek_v3"}),
    mtp_storages=frozenset(Storage) - {Storage.W4AFP8},
)
PAIR = ("--base-quant", "weight_only_int4", "--mtp-quant", "weight_only_int8")


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine in the registry."""
    monkeypatch.setitem(TARGETS, TOY.name, TOY)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "source", WHOLE_TILES)


def test_a_new_engine_that_reads_integers(source: Path, output: Path) -> None:
    """Quantized, launched, inspected, loaded and verified by its name alone."""
    outcome = quantize(source, output, *PAIR, "--group-size", "32", "--target", TOY.name)
    assert outcome.code == 0, outcome.err
    assert f"toy serve {output}/main --draft {output}/mtp" in outcome.out + outcome.err
    options = read_json(output / "mtp_export.json")["options"]
    assert (options["target"], options["reader"]) == (TOY.name, VLLM.name)
    assert read_json(output / "mtp/config.json")["toy_draft"] is True
    assert not inspect(output / "main").problems and not inspect(output / "mtp").problems
    ledger = load_model(output, LoadOptions()).ledger
    assert ledger.loaded | ledger.tied == ledger.expected
    verified = run_program("verify", output, "--source", source, "--level", "weights")
    assert verified.code == 0, verified.out + verified.err


def test_what_the_engine_does_not_read_is_refused(source: Path, output: Path) -> None:
    """Other engines do: those that declare the storage are named."""
    options = ("--base-quant", "a8w8_fp8_wint4", "--mtp-quant", "a8w8_fp8", "--format", "w4afp8")
    outcome = quantize(source, output, *options, "--target", TOY.name)
    assert outcome.code == 4
    assert "Target toy does not read a bundle with w4afp8" in outcome.err
    assert "--target hf or sglang." in outcome.err
    assert not output.exists()


def test_another_model_is_refused(
    tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtp_checkpoints.families import FAMILIES
    from mtp_checkpoints.families.deepseek_v3 import DeepseekV3Family

    monkeypatch.setitem(FAMILIES, "toy_model", DeepseekV3Family.from_config)
    other = make_checkpoint(tmp_path / "other", WHOLE_TILES | {"model_type": "toy_model"})
    outcome = quantize(other, output, *PAIR, "--group-size", "32", "--target", TOY.name)
    assert outcome.code == 4
    assert "toy" in outcome.err and "model_type deepseek_v3" in outcome.err
    assert "'toy_model'" in outcome.err
    assert not output.exists()


def test_an_engine_with_integers_says_how_it_reads_them() -> None:
    with pytest.raises(AssertionError, match="has no dialect"):
        Engine("mute", frozenset(Storage))
