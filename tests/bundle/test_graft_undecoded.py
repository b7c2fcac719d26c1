"""Grafts onto main models of Quark, bitsandbytes and MLX in numbers that are not decoded here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases import Outcome, edit_json, read_json, run_program
from undecoded_mains import MAINS, write_main
from verify.foreign import GLM, rewritten, without

LAYER = "model.layers.3"
LAUNCHED = {"quark": {"vllm", "sglang"}, "bitsandbytes": {"sglang"}, "mlx": set[str]()}


@pytest.fixture(scope="module")
def main_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("mains")

    def made(method: str) -> Path:
        place = folder / method
        return place if place.exists() else write_main(method, place)

    return made


def graft(main: Path, output: Path, *options: object) -> Outcome:
    return run_program("graft", main, GLM, "--output-dir", output, "--quiet", *options)


@pytest.mark.parametrize("method", MAINS)
def test_the_main_model_is_kept_and_its_list_leaves_the_layer_out(
    method: str, main_of: Callable[[str], Path], tmp_path: Path
) -> None:
    main, output = main_of(method), tmp_path / "out"
    made = graft(main, output, "--json")
    assert made.code == 0, made.err
    (shard,) = (output / "main").glob("*.safetensors")
    assert shard.samefile(main / "model.safetensors")
    facts = json.loads(made.out)
    assert facts["pairing"]["status"] == "not tested"
    assert "values not decoded" in facts["pairing"]["words"]
    assert facts["launch"].keys() == LAUNCHED[method] and facts["next"].keys() == {"check"}
    config, own = read_json(output / "main/config.json"), read_json(main / "config.json")
    check_listed(method, config, own)
    draft = read_json(output / "mtp/config.json")
    assert draft.keys().isdisjoint(("quantization", "quantization_config"))
    assert draft["num_nextn_predict_layers"] == 1


def check_listed(method: str, config: dict[str, Any], own: dict[str, Any]) -> None:
    """A list has the layer, behind what it had, and nothing else of config.json differs."""
    quantization, before = (one.pop("quantization_config") for one in (config, own))
    if method == "mlx":
        assert config.pop("quantization") == quantization and own.pop("quantization") == before
        added = quantization.keys() - before.keys()
        assert (
            all(quantization[name] is False for name in added)
            and before.items() <= quantization.items()
        )
        assert {f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.switch_mlp.up_proj"} < added
        assert all(name.startswith(f"{LAYER}.") for name in added)
    elif method == "quark":
        assert quantization.pop("exclude") == [*before.pop("exclude"), r"re:model\.layers\.3(\.|$)"]
        assert quantization == before
    else:
        # Without a list transformers leaves the head out, with one what it has alone.
        assert quantization.pop("llm_int8_skip_modules") == ["lm_head", LAYER]
        assert quantization == before
    assert config == own


def test_nothing_is_said_of_what_is_not_decoded(
    main_of: Callable[[str], Path], tmp_path: Path
) -> None:
    assert graft(main_of("quark"), tmp_path / "out").code == 0
    found = run_program("verify", tmp_path / "out", "--level", "run", "--json", "--quiet")
    assert found.code == 0, found.out
    checks = {check["name"]: check for check in json.loads(found.out)["checks"]}
    items = {item["name"]: item for check in checks.values() for item in check["items"]}
    for name in ("main: config", "mtp: precision as vLLM reads it"):
        assert items[name]["status"] == "not tested"
        assert items[name]["cause"].startswith("values not decoded")
    assert {
        items[f"mtp: {one}"]["status"] for one in ("tensors", "in Quark's exclude as stored")
    } == {"pass"}
    (acceptance,) = checks["acceptance"]["items"]
    assert acceptance["status"] == "not tested" and "Values not decoded" in acceptance["cause"]
    edit_json(
        tmp_path / "out/main/config.json", lambda own: own["quantization_config"].pop("exclude")
    )
    found = run_program("verify", tmp_path / "out", "--level", "files", "--json", "--quiet")
    assert found.code == 7 and "to exclude" in found.out


def test_what_is_refused(main_of: Callable[[str], Path], tmp_path: Path) -> None:
    def refused(code: int, words: str, main: Path, *options: object) -> None:
        outcome = graft(main, tmp_path / "out", *options)
        assert outcome.code == code and words in outcome.err, outcome.err
        assert not (tmp_path / "out").exists()

    quark = main_of("quark")
    refused(4, "does not read these numbers of Quark", quark, "--prove")
    refused(
        4, "does not read main models of bitsandbytes", main_of("bitsandbytes"), "--target", "vllm"
    )
    refused(4, "does not read main models of MLX", main_of("mlx"), "--target", "sglang")
    refused(4, "vLLM builds both parts", quark, "--mtp-quant", "weight_only_int8")
    lost = rewritten(quark, tmp_path / "lost", without("model.layers.1.self_attn.q_proj."))
    refused(3, "q_proj.weight: missing", lost)


@pytest.mark.nightly
def test_a_draft_of_another_precision_beside_it(
    main_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """For SGLang, which reads the draft's own config.json."""
    options = ("--target", "sglang", "--mtp-quant", "weight_only_int8")
    made = graft(main_of("quark"), tmp_path / "out", *options)
    assert made.code == 0, made.err
    own = read_json(tmp_path / "out/mtp/config.json")["quantization_config"]
    assert own["quant_method"] == "compressed-tensors"
    found = run_program("verify", tmp_path / "out", "--level", "files", "--quiet")
    assert found.code == 0, found.err
