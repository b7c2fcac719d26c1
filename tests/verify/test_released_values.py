"""Values of config.json that no release of the family has: reported, or failed on demand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cases import edit_json, run_program
from mtp_checkpoints.families.released import released_values, with_value
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
ITEM = "config values of the releases"


def judged(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code at level files, and the item."""
    outcome = run_program("verify", folder, "--level", "files", "--json", "--quiet", *options)
    items = json.loads(outcome.out)["checks"][0]["items"]
    return outcome.code, next(item for item in items if item["name"] == ITEM)


@pytest.fixture
def glm(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "fixtures/glm4-moe-tiny", tmp_path / "glm"))


def test_a_value_of_a_release_passes(glm: Path) -> None:
    for factor in (2.5, 1.0):
        edit_json(glm / "config.json", lambda c, f=factor: c.update(routed_scaling_factor=f))
        code, item = judged(glm, "--strict-config")
        assert (code, item["status"]) == (0, "pass")
        assert item["bound"] == "those of the releases" and item["figure"].endswith("values")


def test_another_value_is_reported_and_fails_on_demand(glm: Path) -> None:
    edit_json(glm / "config.json", lambda c: c.update(rope_theta=2e6, norm_topk_prob=False))
    code, item = judged(glm)
    assert (code, item["status"], item["bound"]) == (0, "pass", "reported")
    words = "rope_theta 2000000.0 (releases: 1000000.0)"
    assert item["figure"] == f"norm_topk_prob false (releases: true); {words}"
    assert [one["field"] for one in item["data"]["unreleased"]] == ["norm_topk_prob", "rope_theta"]
    code, item = judged(glm, "--strict-config")
    assert (code, item["status"]) == (7, "fail")
    assert f"no release of the family has this value: {words}" in item["cause"] and item[
        "subject"
    ].endswith("config.json")
    assert item["figure"] == "2 wrong of 10 values"


def test_miniatures_pass() -> None:
    """Theirs are sized for them; of an object, what differs is shown."""
    figures = {}
    for name in ("deepseek-v3-tiny", "qwen3-5-tiny"):
        code, item = judged(ROOT / "fixtures" / name)
        assert (code, item["status"]) == (0, "pass")
        figures[name] = item["figure"]
    scaling = '{"factor": 4.0, "original_max_position_embeddings": 1024}'
    assert figures["deepseek-v3-tiny"].startswith(f"rope_scaling {scaling} (releases: ")
    assert figures["qwen3-5-tiny"] == "4 values"


def miniature(name: str, folder: Path) -> dict[str, Any]:
    """Write a family's miniature with a release's values; return its config.json."""
    config = SMALL_CONFIGS[name]
    for field, values in released_values(config).items():
        if field not in ("n_group", "topk_group"):
            config = with_value(config, field, values[0])
    write_checkpoint(folder, config)
    return config


@pytest.mark.parametrize(
    ("name", "field", "value", "words"),
    [
        ("hy_v3", "router_scaling_factor", 1.0, "1.0 (releases: 2.826)"),
        ("mimo_v2_flash", "attention_value_scale", 1.0, "1.0 (releases: 0.707)"),
        ("nemotron_h", "routed_scaling_factor", 1.0, "1.0 (releases: 2.5 or 5.0)"),
        ("glm_ocr", "rope_theta", 1e6, "1000000.0 (releases: 10000.0)"),
        ("glm5_next", "swiglu_limit", 7.0, "7.0 (releases: 10.0)"),
    ],
)
def test_values_of_other_families(
    tmp_path: Path, name: str, field: str, value: float, words: str
) -> None:
    config = miniature(name, tmp_path)
    code, item = judged(tmp_path, "--strict-config")
    assert (code, item["status"]) == (0, "pass")
    changed = with_value(config, field, value)
    edit_json(tmp_path / "config.json", lambda c: c.update(changed))
    code, item = judged(tmp_path)
    assert (code, item["status"], item["figure"]) == (0, "pass", f"{field} {words}")
    code, item = judged(tmp_path, "--strict-config")
    assert (code, item["status"]) == (7, "fail") and f"{field} {words}" in item["cause"]


def test_a_family_of_which_no_release_was_read_says_so(tmp_path: Path) -> None:
    miniature("bailing_moe_v2", tmp_path)
    words = "no release of bailing_moe_v2 was read"
    code, item = judged(tmp_path)
    assert (code, item["status"], item["figure"], item["bound"]) == (0, "pass", words, "reported")
    code, item = judged(tmp_path, "--strict-config")
    assert (code, item["status"], item["cause"]) == (0, "not tested", words)
