"""Values that every release of a family has in config.json."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.released import RELEASED
from mtp_checkpoints.families import FAMILIES, family_of
from mtp_checkpoints.families.released import (
    RELEASED_VALUES,
    UnreleasedValue,
    unreleased_values,
    with_value,
)

V3 = RELEASED["deepseek_v3"].config


def unreleased(config: dict[str, Any]) -> tuple[UnreleasedValue, ...]:
    return unreleased_values(config, family_of(config))


def test_values_are_those_of_families() -> None:
    assert set(RELEASED_VALUES) <= set(FAMILIES)
    assert {str(release.config["model_type"]) for release in RELEASED.values()} <= set(
        RELEASED_VALUES
    )


@pytest.mark.parametrize("name", RELEASED)
def test_a_release_has_released_values(name: str) -> None:
    assert unreleased(RELEASED[name].config) == ()


@pytest.mark.parametrize("name", RELEASED)
def test_every_field_is_found_and_set_where_it_is_read(name: str) -> None:
    """Another value is told by its field, and is gone when a release's is put back."""
    config = RELEASED[name].config
    model_type = str(config["model_type"])
    others: dict[str, Any] = {
        "rms_norm_eps": 1e-2,
        "rope_theta": 20000.0,
        "rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 64},
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.25,
        "n_group": 4,
        "topk_group": 2,
        "partial_rotary_factor": 0.125,
    }
    for field, values in RELEASED_VALUES[model_type].items():
        if field in ("n_group", "topk_group") and values == (1,):
            continue  # of one group none is left out
        changed = with_value(config, field, others[field])
        (found,) = unreleased(changed)
        assert (found.field, found.found, found.released) == (field, others[field], values)
        assert unreleased(with_value(changed, field, values[0])) == ()


def test_what_is_left_out_is_what_its_readers_take() -> None:
    left_out = {key: value for key, value in V3.items() if key != "routed_scaling_factor"}
    assert [(one.field, one.found) for one in unreleased(left_out)] == [
        ("routed_scaling_factor", 1.0)
    ]
    assert unreleased({k: v for k, v in V3.items() if k != "norm_topk_prob"}) == ()
    assert unreleased(V3 | {"rope_theta": 10000.0}) == ()


def test_scaling_in_rope_parameters_is_read() -> None:
    moved = {key: value for key, value in V3.items() if key not in ("rope_scaling", "rope_theta")}
    parameters = V3["rope_scaling"] | {"rope_theta": 10000, "rope_type": "yarn"}
    assert unreleased(moved | {"rope_parameters": parameters}) == ()
    (found,) = unreleased(moved | {"rope_parameters": parameters | {"factor": 4}})
    assert found.field == "rope_scaling" and found.found["factor"] == 4
    assert "rope_theta" not in found.found
    mended = with_value(moved | {"rope_parameters": parameters | {"factor": 4}}, *pair(found))
    assert unreleased(mended) == () and mended["rope_parameters"]["rope_theta"] == 10000


def pair(found: UnreleasedValue) -> tuple[str, Any]:
    return found.field, found.released[0]
