"""Every number and choice of config.json is checked once, in the family: nonsense is refused by
everybody, a variant that makes sense is exported, and refused by the runtime if need be."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cases import edit_json, export, nightly_but, run_program
from mtp_checkpoints.errors import InvalidInputError, MtpExportError, UnsupportedError
from mtp_checkpoints.families import FAMILIES, family_of
from mtp_checkpoints.families.contract import Hidden, MtpContract
from mtp_checkpoints.families.signs import COUNT_FIELDS, announced
from mtp_checkpoints.quantization.native import NATIVE_FP8
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.models.layer_types import config_for
from runtime.checkpoints import SMALL, SMALL_CONFIGS, YARN, changed, text_part, write_checkpoint

NAN, INFINITE = float("nan"), float("inf")
# Values of other types, signs and sizes than any field has.
NASTY: tuple[Any, ...] = (
    *(None, True, False, "", "1", "yarn", "\ud800", [], [1], [None], {}, {"a": 1}, 1.5, 2.0),
    *(0, -1, 1, 2, 3, 10**9, -(2**63), 2**64, 10**400, 1e-320, -0.0, 1e300, NAN, INFINITE),
)
NO_NUMBER = (None, True, "1", [1], {}, -1, NAN, INFINITE, 10**400)
NO_COUNT = (*NO_NUMBER, 0, 1.5, 2.0)
REFUSED: dict[str, tuple[Any, ...]] = {
    "rms_norm_eps": (*NO_NUMBER, 2),
    "rope_theta": (*NO_NUMBER, 0, 1),
    "routed_scaling_factor": NO_NUMBER,
    "max_position_embeddings": NO_COUNT,
    "num_experts_per_tok": (*NO_COUNT, 9),
    "n_group": (-1, 1.5, "4", True, 3, 8),  # 8 experts: 3 groups are unequal, 8 have one each
    "topk_group": (-1, 1.5, "2", True),
    "moe_layer_freq": NO_COUNT,
    "first_k_dense_replace": (None, -1, 1.5, "1", True),
    "norm_topk_prob": (None, 1, 0, "true"),
    "scoring_func": (None, 1, ["sigmoid"]),
    "topk_method": (None, 1),
    "hidden_act": (None, 1, {}),
    "eos_token_id": ("1", 1.5, -1, True, [1, "2"], [[1]], {}, 2**40),
    "bos_token_id": ("0", 0.5, -1),
    "qk_rope_head_dim": (*NO_COUNT, 7),
    "rope_scaling": (1, "yarn", [1], {"type": 1}, {"type": ["yarn"]}, {"type": "yarn"}),
    "rope_parameters": ("yarn", [], {"rope_theta": "1e4"}, {"rope_type": "yarn", "factor": None}),
    "mtp_contract": (
        *(1, "none", [], {"target": 1}, {"target_hidden": "between"}, {"target_hidden": 1}),
        *({"recycled_hidden": ["after_norm"]}, {"zero_first_embedding": "false"}),
    ),
    "torch_dtype": (1, "float8"),
}
REFUSED_OF_YARN: dict[str, tuple[Any, ...]] = {
    "factor": (*NO_NUMBER, 0, 0.5),
    "original_max_position_embeddings": (0, -1, 1.5, "4096", True),
    "beta_fast": ("32", -1, True, NAN, [32]),
    "beta_slow": ("1", -1, {}),
    "mscale": ("1", -1, INFINITE),
    "mscale_all_dim": ("1", -1, True),
}
# Exported, since an engine may compute it.
EXPORTED: tuple[dict[str, Any], ...] = (
    {"scoring_func": "softmax"},
    {"hidden_act": "gelu"},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},
)
# Computed too: defaults, nulls that stand for them, and the bounds.
COMPUTED: tuple[dict[str, Any], ...] = (
    {"rope_scaling": None, "rope_parameters": None, "n_group": None, "topk_group": None},
    {"rope_scaling": YARN | {"beta_fast": None, "beta_slow": 0, "mscale": 0, "factor": 40}},
    {"rope_scaling": YARN | {"mscale_all_dim": None, "factor": 1}},
    {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 2}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e15}},
    {"rms_norm_eps": 0, "routed_scaling_factor": 0, "num_experts_per_tok": 4},
    {"rms_norm_eps": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8},
    {"n_group": 0, "eos_token_id": [1, 2], "bos_token_id": None, "max_position_embeddings": 2**40},
)


EVERY_PUSH = ["deepseek_v3", "glm_moe_dsa", "hy_v3", "mimo_v2_flash", "exaone_moe", "mellum"]


def nasty_configs(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A config with every nasty value in every field, and in those that it may have."""
    if "text_config" in config:
        yield from (config | {"text_config": text} for text in nasty_configs(config["text_config"]))
    config = config | {"rope_scaling": YARN}
    for key in {*config, *REFUSED, "dtype", "bos_token_id", "partial_rotary_factor"}:
        yield from (config | {key: value} for value in NASTY)
        yield {name: value for name, value in config.items() if name != key}
    for key in {*YARN, "rope_type", "rope_theta", "partial_rotary_factor"}:
        for value in NASTY:
            yield config | {"rope_scaling": YARN | {key: value}}
            yield config | {"rope_scaling": None, "rope_parameters": YARN | {key: value}}


@pytest.mark.parametrize("model_type", nightly_but(EVERY_PUSH, FAMILIES))
def test_no_config_is_an_internal_error(model_type: str) -> None:
    """Whatever is in a field, a family and a model's config are made of it or refuse it."""
    made = 0
    for config in nasty_configs(SMALL_CONFIGS[model_type]):
        try:
            family = family_of(config)
            assert family.tensors
            made += 1
            config_for(family, None)
        except MtpExportError as error:
            assert len(str(error)) <= 2000
    assert made > 50


@pytest.mark.parametrize("model_type", FAMILIES)
def test_nonsense_is_refused_by_the_family(model_type: str) -> None:
    config = SMALL_CONFIGS[model_type]
    refused = REFUSED | {"layer_norm_epsilon": REFUSED["rms_norm_eps"]}  # of Nemotron-H
    for key in refused.keys() & text_part(config).keys():
        for value in refused[key]:
            if value is None and "text_config" in config:  # there a null is no field
                continue
            with pytest.raises(InvalidInputError, match=key):
                assert not family_of(changed(config, **{key: value})).tensors, (key, value)


def test_nonsense_that_the_small_config_does_not_have_is_refused() -> None:
    cases = [({key: value}, key) for key, values in REFUSED.items() for value in values]
    cases += [
        ({"rope_scaling": YARN | {key: value}}, f"rope_scaling.{key}")
        for key, values in REFUSED_OF_YARN.items()
        for value in values
    ]
    for changes, key in cases:
        with pytest.raises(InvalidInputError) as caught:
            assert not family_of(SMALL | changes).tensors, changes
        assert key in str(caught.value), changes


def test_fp8_of_deepseek_v4_is_read_with_experts_in_fp8_alone() -> None:
    """Engines take its experts for fp4 where config.json does not say otherwise."""
    config = SMALL_CONFIGS["deepseek_v4"] | {"quantization_config": NATIVE_FP8}
    for said in ({}, {"expert_dtype": "fp4"}):
        with pytest.raises(UnsupportedError, match="fp4 is not read"):
            family_of(config | said)
    assert family_of(config | {"expert_dtype": "fp8"}).tensors


def test_gates_of_lings_latent_attention_are_per_head_or_element() -> None:
    """As vLLM and SGLang build them by the field; transformers' are per head without it."""
    config, key = SMALL_CONFIGS["bailing_hybrid"], "gated_attention_proj_granularity_type"
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    each = heads * config["v_head_dim"]
    for said, rows in ((None, heads), ("head_wise", heads), ("element_wise", each)):
        tensors = family_of(config | {key: said}).tensors
        assert tensors["model.layers.4.attention.g_proj.weight"].shape == (rows, hidden)
    with pytest.raises(InvalidInputError, match=key):
        family_of(config | {key: "group_wise"})


def test_a_variant_that_makes_sense_is_the_runtime_s_to_refuse() -> None:
    for changes in EXPORTED:
        family = family_of(SMALL | changes)
        assert family.tensors
        with pytest.raises(UnsupportedError, match="runtime"):
            config_for(family, None)


def test_what_is_accepted_runs(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    for number, changes in enumerate(COMPUTED):
        folder = write_checkpoint(tmp_path / str(number), SMALL | changes)
        (output,) = LLM(folder).generate([[3, 1, 4]], params)
        assert len(output.token_ids) == 1, changes


def test_the_contract_of_a_config() -> None:
    recorded = {"target_hidden": "before_norm", "zero_first_embedding": True}
    assert family_of(SMALL).mtp_contract == MtpContract()
    assert family_of(SMALL | {"mtp_contract": recorded}).mtp_contract == MtpContract(
        target_hidden=Hidden.BEFORE_NORM, zero_first_embedding=True
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": None},
        {"rope_theta": "10000"},
        {"num_experts_per_tok": -1},
        {"num_experts_per_tok": None},
        {"rope_scaling": YARN | {"factor": None}},
        {"eos_token_id": "1"},
        {"mtp_contract": {"zero_first_embedding": "no"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_nothing_is_written_of_nonsense(
    changes: dict[str, Any], source: Path, output: Path
) -> None:
    edit_json(source / "config.json", lambda config: config.update(changes))
    for outcome in (export(source, output), run_program("inspect", source)):
        assert outcome.code == 3, outcome.err
        assert next(iter(changes)) in outcome.err and "Traceback" not in outcome.err
    assert not output.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"n_routed_experts": 1_000_000},
        {"n_routed_experts": 2000, "num_hidden_layers": 1000},
        {"num_hidden_layers": 1000, "num_nextn_predict_layers": 1000, "n_routed_experts": 500},
    ],
    ids=str,
)
def test_promises_beyond_any_model_are_refused_before_they_are_listed(
    changes: dict[str, Any],
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match="n_routed_experts"):
            family_of(SMALL | changes)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_the_largest_releases_are_within_the_bound() -> None:
    sizes = SMALL | {"num_hidden_layers": 78, "n_routed_experts": 384}
    assert len(family_of(sizes).tensors) > 3 * 77 * 384


def test_listed_layers_of_nemotron_need_not_be_counted() -> None:
    """As in the config.json of Nemotron-3-Ultra."""
    whole = SMALL_CONFIGS["nemotron_h"]
    words = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
    kept = {key: value for key, value in whole.items() if not key.endswith("override_pattern")}
    del kept["num_hidden_layers"]
    listed = {
        "layers_block_type": [words[one] for one in whole["hybrid_override_pattern"]],
        "mtp_layers_block_type": ["attention", "moe"],
    }
    assert family_of(kept | listed).tensors == family_of(whole).tensors


@pytest.mark.parametrize("name", FAMILIES)
def test_a_count_of_modules_that_is_null_is_absent(name: str) -> None:
    """Kinds of layers may be listed for modules that are gone."""

    def less(fields: dict[str, Any], *, null: bool) -> dict[str, Any]:
        own = {
            key: less(value, null=null) if isinstance(value, dict) else value
            for key, value in fields.items()
            if key not in COUNT_FIELDS
        }
        return own | ({key: None for key in fields if key in COUNT_FIELDS} if null else {})

    config = SMALL_CONFIGS[name]
    absent, null = (less(config, null=value) for value in (False, True))
    assert announced(null) == announced(absent)
    assert family_of(null).mtp == family_of(absent).mtp


def test_step_counts_no_module_and_lists_its_attention_still() -> None:
    config = SMALL_CONFIGS["step3p5"]
    assert len(config["layer_types"]) > config["num_hidden_layers"]
    assert family_of(config | {"num_nextn_predict_layers": 0}).mtp == ()
