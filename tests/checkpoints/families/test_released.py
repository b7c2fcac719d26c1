"""Values that every release of a family has in config.json."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.released import RELEASED
from mtp_checkpoints.families import EVERY, FAMILIES, family_of, name_of
from mtp_checkpoints.families.released import (
    RELEASES,
    UnreleasedValue,
    released_values,
    unreleased_values,
    with_value,
)
from runtime.checkpoints import SMALL_CONFIGS

V3 = RELEASED["deepseek_v3"].config
# Of whose releases none could be read.
UNREAD = {
    *("bailing_moe_v2", "intern_s2_preview", "interns2_mobius"),
    *("nemotron_h_omni", "nemo_speechlm"),
}
OTHERS: dict[str, Any] = {
    "rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 64},
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 4,
    "topk_group": 2,
}


def unreleased(config: dict[str, Any]) -> tuple[UnreleasedValue, ...]:
    return unreleased_values(config, family_of(config))


def other_than(values: tuple[Any, ...], field: str) -> Any:
    """A value that no release has."""
    if field in OTHERS:
        return OTHERS[field]
    return not values[0] if isinstance(values[0], bool) else type(values[0])(min(values) / 2)


def test_every_family_has_releases_or_says_that_none_was_read() -> None:
    assert set(RELEASES) == set(EVERY)
    assert {name for name in FAMILIES if RELEASES[name] is None} == UNREAD
    assert all(values for values in RELEASES.values() if values is not None)
    assert all(RELEASES[str(one.config["model_type"])] for one in RELEASED.values())


@pytest.mark.parametrize("name", [name for name in SMALL_CONFIGS if RELEASES[name]])
def test_values_of_every_family_are_found_where_they_are_written(name: str) -> None:
    """A miniature with a release's values has none of its own; any other is told, beside theirs."""
    config = SMALL_CONFIGS[name]
    if name == "mellum":  # which reads no other place
        kinds = ("full_attention", "sliding_attention")
        config = config | {"rope_parameters": {kind: {"rope_theta": 1.0} for kind in kinds}}
    known = released_values(config)
    assert name_of(config) == name
    for field, values in known.items():
        if field not in ("n_group", "topk_group"):  # which the few experts do not fall into
            config = with_value(config, field, values[0])
    grouped = {one.field for one in unreleased(config)}
    assert grouped <= {"n_group", "topk_group"}
    for field, values in known.items():
        if field in ("n_group", "topk_group"):
            continue
        for value in values:
            assert {one.field for one in unreleased(with_value(config, field, value))} == grouped
        other = other_than(values, field)
        told = [one for one in unreleased(with_value(config, field, other)) if one.field == field]
        assert told == [UnreleasedValue(field, other, values)]


def bases(name: str, **written: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """Bases of rotary positions that no release has, of a miniature."""
    config = SMALL_CONFIGS[name] | written
    return [(o.found, o.released) for o in unreleased(config) if o.field == "rope_theta"]


def test_bases_by_kind_of_layer_are_read_wherever_they_are() -> None:
    full, sliding = {"rope_theta": 5e6}, {"rope_theta": 1e4}
    both = {"full_attention": full, "sliding_attention": sliding}
    assert bases("mimo_v2_flash", rope_parameters=both) == []
    wrong = both | {"full_attention": {"rope_theta": 7e6}}
    assert bases("mimo_v2_flash", rope_parameters=wrong) == [(7e6, (5e6, 1e4))]
    assert bases("step3p5", rope_theta=[5e6, 1e4, 1e4, 5e6]) == []
    assert bases("step3p5", rope_theta=[5e6, 2e4, 1e4, 5e6]) == [(2e4, (5e6, 1e4))]
    wrong = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}
    assert bases("mellum", rope_parameters=wrong) == [(2e4, (5e5, 1e4))]


@pytest.mark.parametrize("name", RELEASED)
def test_a_release_has_released_values(name: str) -> None:
    assert unreleased(RELEASED[name].config) == ()


@pytest.mark.parametrize("name", RELEASED)
def test_every_field_is_found_and_set_where_it_is_read(name: str) -> None:
    """Another value is told by its field, and is gone when a release's is put back."""
    config = RELEASED[name].config
    for field, values in released_values(config).items():
        if field in ("n_group", "topk_group") and values == (1,):
            continue  # of one group none is left out
        changed = with_value(config, field, other_than(values, field))
        (found,) = unreleased(changed)
        assert (found.field, found.found, found.released) == (
            field,
            other_than(values, field),
            values,
        )
        assert unreleased(with_value(changed, field, values[0])) == ()


def test_what_is_left_out_is_what_its_readers_take() -> None:
    left_out = {key: value for key, value in V3.items() if key != "routed_scaling_factor"}
    assert [(one.field, one.found) for one in unreleased(left_out)] == [
        ("routed_scaling_factor", 1.0)
    ]
    assert unreleased({k: v for k, v in V3.items() if k != "norm_topk_prob"}) == ()
    assert unreleased(V3 | {"rope_theta": 10000.0}) == ()


@pytest.mark.parametrize(
    ("name", "field", "usual"),
    [("hy_v3", "router_scaling_factor", 1.0), ("hy_v3", "route_norm", True)],
)
def test_what_is_left_out_by_a_name_of_its_own(name: str, field: str, usual: Any) -> None:
    config = {key: value for key, value in SMALL_CONFIGS[name].items() if key != field}
    (released,) = released_values(config)[field]
    told = [one.found for one in unreleased(config) if one.field == field]
    assert told == ([] if usual == released else [usual])


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
