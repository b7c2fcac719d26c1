"""Values of an MTP module that no source is needed for: norms of 1 + w, halves and blocks that were
rounded to zero, another layer's weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import nightly_but, run_program
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint
from verify.foreign import DEEPSEEK, FIXTURES, GLM, GLM_MTP, Tensors, rewritten
from verify.foreign_folders import both

ATTENTION = f"{GLM_MTP}self_attn.o_proj.weight"


def failures(folder: Path) -> dict[str, dict[str, Any]]:
    """Failed items of check `ledger` by name."""
    outcome = run_program("verify", folder, "--level", "weights", "--json", "--quiet")
    checks = {check["name"]: check for check in json.loads(outcome.out)["checks"]}
    items = {item["name"]: item for item in checks["ledger"]["items"]}
    assert "mtp: no block rounded to zero" in items
    found = {name: item for name, item in items.items() if item["status"] == "fail"}
    assert outcome.code == (7 if found else 0), outcome.err
    return found


def less_one(stored: Tensors) -> None:
    for name in stored:
        if name.startswith(GLM_MTP) and "layernorm" in name:
            stored[name] = stored[name] - 1


def without_embedding_half(stored: Tensors) -> None:
    stored[f"{GLM_MTP}eh_proj.weight"][:, :128] = 0


def coarse_rows(stored: Tensors) -> None:
    """int4 with a scale per row: halves that differ 25 times in size lose the smaller."""
    weight = stored[f"{GLM_MTP}eh_proj.weight"].float()
    weight[:, 128:] *= 25 * weight[:, :128].std() / weight[:, 128:].std()
    scale = weight.abs().amax(dim=1, keepdim=True) / 7
    rounded = (weight / scale).round() * scale
    stored[f"{GLM_MTP}eh_proj.weight"] = rounded.bfloat16()


def zeroed_rows(stored: Tensors) -> None:
    stored[f"{GLM_MTP}self_attn.q_proj.weight"][64:] = 0


def zeroed_rows_of_projection(stored: Tensors) -> None:
    stored[f"{GLM_MTP}eh_proj.weight"][64:] = 0


def zeroed_columns(stored: Tensors) -> None:
    stored[f"{GLM_MTP}mlp.experts.4.up_proj.weight"][:, :64] = 0


def main_layer(stored: Tensors) -> None:
    for name in list(stored):
        own = name.replace("model.layers.2.", GLM_MTP)
        if own != name and own in stored:
            stored[own] = stored[name].clone()


def router_halved(stored: Tensors) -> None:
    stored[f"{GLM_MTP}mlp.gate.weight"][4:] = 0


def experts_moved_on(stored: Tensors) -> None:
    before = dict(stored)
    for name in before:
        if found := re.match(rf"({re.escape(GLM_MTP)}mlp\.experts\.)(\d+)(.*)", name):
            stored[name] = before[f"{found[1]}{(int(found[2]) + 3) % 8}{found[3]}"]


def main_norms_less_one(stored: Tensors) -> None:
    for name in stored:
        if not name.startswith(GLM_MTP) and name.endswith("norm.weight"):
            stored[name] = stored[name] - 1


def half_an_embedding(stored: Tensors) -> None:
    stored["model.embed_tokens.weight"][1024:] = 0


def bias_of_another(stored: Tensors) -> None:
    last = "mlp.gate.e_score_correction_bias"
    stored[f"{GLM_MTP}{last}"] = stored[f"model.layers.2.{last}"].clone()


def columns_of_lost_scales(stored: Tensors) -> None:
    stored[f"{GLM_MTP}mlp.experts.4.up_proj.weight"][:, :64] *= 1e-30


def norm_of_any_bits(stored: Tensors) -> None:
    bits = torch.randint(-(1 << 15), 1 << 15, (128,), generator=torch.Generator().manual_seed(1))
    bits[(bits >> 7) & 255 == 255] = 7  # neither NaN nor infinity
    stored[f"{GLM_MTP}enorm.weight"] = bits.to(torch.int16).view(torch.bfloat16)


def huge_bias(stored: Tensors) -> None:
    stored[f"{GLM_MTP}mlp.gate.e_score_correction_bias"][3] = 1e20


DAMAGE: dict[str, tuple[Callable[[Tensors], None], str, str]] = {
    "norms of 1 + w": (less_one, "mtp: norms multiply by w", "multiplies by 1 + w"),
    "norm of any bits": (
        norm_of_any_bits,
        "mtp: finite values, sound scales",
        "as no norm's do: memory that was never written",
    ),
    "huge bias": (
        huge_bias,
        "mtp: finite values, sound scales",
        "1 NaN, infinite or huge value, the first in element 3: memory that was never written",
    ),
    "zeroed half": (
        without_embedding_half,
        "mtp: halves of eh_proj",
        "columns (0 to 127), which takes the embedding, is zero",
    ),
    "coarse scales": (coarse_rows, "mtp: halves of eh_proj", "the first half"),
    "zeroed rows": (
        zeroed_rows,
        "mtp: no block rounded to zero",
        f"rows 64 to 127 of {GLM_MTP}self_attn.q_proj.weight are zero, half of it (128 rows, 128",
    ),
    "rows of eh_proj": (zeroed_rows_of_projection, "mtp: no block rounded to zero", "eh_proj"),
    "zeroed columns": (zeroed_columns, "mtp: no block rounded to zero", "columns 0 to 63 of"),
    "rows of the router": (
        router_halved,
        "no weight is cut off or lost in part",
        f"rows 4 to 7 of {GLM_MTP}mlp.gate.weight are zero",
    ),
    "experts in another order": (
        experts_moved_on,
        "experts answer to their rows of the router",
        "router are moved on by 3; or its experts are in another order",
    ),
    "main norms of 1 + w": (main_norms_less_one, "main: norms multiply by w", "by 1 + w"),
    "half an embedding": (
        half_an_embedding,
        "no weight is cut off or lost in part",
        "rows 1024 to 2047 of model.embed_tokens.weight are zero, half of it",
    ),
    "another layer's bias": (
        bias_of_another,
        "mtp: no norm or bias is a main layer's",
        "holds the same as model.layers.2.mlp.gate.e_score_correction_bias",
    ),
    "columns of lost scales": (
        columns_of_lost_scales,
        "mtp: no block rounded to zero",
        "columns 0 to 63 of",
    ),
    "another layer": (
        main_layer,
        "no matrix of a layer is stored twice",
        f"{GLM_MTP[:-1]} holds the same as model.layers.2 (",
    ),
}


@pytest.mark.parametrize("damage", nightly_but([*DAMAGE][1:], DAMAGE))
def test_damage_is_found_and_named(tmp_path: Path, damage: str) -> None:
    change, item, words = DAMAGE[damage]
    found = failures(rewritten(GLM, tmp_path / "damaged", change))
    assert words in found[item]["cause"]
    if damage == "norm of any bits":
        assert [*found] == [item]


@pytest.mark.parametrize(
    ("source", "layer", "add", "count"),
    [(FIXTURES / "qwen3-5-tiny", "mtp.", 1, 6), (GLM, GLM_MTP, -1, 6)],
    ids=["1 + w", "w"],
)
def test_norms_that_were_all_moved_are_all_named(
    tmp_path: Path, source: Path, layer: str, add: int, count: int
) -> None:
    """Those that no main layer has the like of too, and none that lies as it did."""

    def move(stored: Tensors) -> None:
        names = [n for n in stored if n.startswith(layer) and "norm" in n]
        for name in names[1:]:
            stored[name] = stored[name] + add
        assert len(names) == count + 1

    found = failures(rewritten(source, tmp_path / "moved", move)).values()
    problems = [problem["subject"] for item in found for problem in item["data"]["problems"]]
    assert len({*problems}) == len(problems) == count


@pytest.mark.parametrize("norm", ["model.norm", "model.layers.1.input_layernorm"])
def test_the_main_models_last_norm_may_be_a_modules_too(tmp_path: Path, norm: str) -> None:
    """It is said and no failure, as any other norm of the main model in its place is."""
    own = f"{GLM_MTP}shared_head.norm.weight"

    def share(stored: Tensors) -> None:
        stored[own] = stored[f"{norm}.weight"].clone()

    folder = rewritten(GLM, tmp_path / "shared", share)
    outcome = run_program("verify", folder, "--level", "weights")
    text = " ".join((outcome.out + outcome.err).split())
    assert outcome.code == (0 if norm == "model.norm" else 7)
    assert f"{own} holds the same as {norm}.weight" in text


def test_a_half_of_zeros_has_no_ratio(tmp_path: Path) -> None:
    found = failures(rewritten(GLM, tmp_path / "damaged", without_embedding_half))
    figure = found["mtp: halves of eh_proj"]["figure"]
    assert figure.startswith("0 and ") and "times" not in figure


@pytest.mark.parametrize("source", [GLM, DEEPSEEK], ids=lambda path: path.name)
def test_trained_modules_pass(source: Path) -> None:
    assert not failures(source)


@pytest.mark.parametrize("shifted", [True, False], ids=["all but the module's", "the last one"])
def test_main_norms_that_had_one_added_are_named(tmp_path: Path, shifted: bool) -> None:
    """Of a model whose norms multiply by 1 + w; no graft mends them."""

    def add_one(stored: Tensors) -> None:
        for name in stored:
            if "norm" in name and not name.startswith("mtp.") and "linear_attn" not in name:
                stored[name] = stored[name] + (shifted or name == "model.norm.weight")

    found = failures(rewritten(FIXTURES / "qwen3-5-tiny", tmp_path / "shifted", add_one))
    if not shifted:
        assert not found  # level run tells
        return
    (item,) = found.values()
    assert item["name"] == "main: norms hold the w of 1 + w" and not item.get("repair")
    assert item["subject"] == "model.layers.0.input_layernorm.weight"
    assert "50% of one of the MTP module is negative" in item["cause"]


@pytest.mark.parametrize(("by", "size"), [(-1, "small"), (1, "large")])
def test_norms_of_a_module_that_engines_add_one_to_are_told_in_one_sentence(
    by: int, size: str, tmp_path: Path
) -> None:
    def change(stored: Tensors) -> None:
        for name in stored:
            if name.startswith("mtp.") and "norm" in name:
                stored[name] = (stored[name].float() + by).bfloat16()

    folder = rewritten(FIXTURES / "qwen3-5-tiny", tmp_path / "moved", change)
    outcome = run_program("verify", folder, "--level", "weights")
    text = " ".join(outcome.out.split())
    assert outcome.code == 7 and f"norm.weight is 1 too {size}: its median is" in text
    assert ("Add 1 to it" if by < 0 else "Take 1 from it") in text and "likewise mtp." in text
    assert text.count("engines of this model add 1, and the main layers' norms suit") == 1


def test_a_bias_of_a_norm_may_be_negative(tmp_path: Path) -> None:
    """As of an indexer's, whose norms subtract the mean."""
    small = write_checkpoint(tmp_path / "small", SMALL_CONFIGS["deepseek_v32"])

    def negate(stored: Tensors) -> None:
        for name in stored:
            if name.endswith("indexer.k_norm.bias"):
                stored[name] = -stored[name].abs() - 0.1

    assert failures(rewritten(small, tmp_path / "negative", negate)) == {}


@pytest.mark.parametrize(
    ("source", "one", "other"),
    [
        (GLM, "model.layers.1.mlp.gate.weight", "model.layers.2.mlp.gate.weight"),
        (
            FIXTURES / "qwen3-5-tiny",
            "model.layers.0.linear_attn.in_proj_a.weight",
            "model.layers.0.linear_attn.in_proj_b.weight",
        ),
    ],
    ids=["routers", "gates"],
)
def test_a_matrix_that_is_never_quantized_is_stored_once(
    source: Path, one: str, other: str, tmp_path: Path
) -> None:
    def copied(stored: Tensors) -> None:
        stored[one] = stored[other].clone()

    found = failures(rewritten(source, tmp_path / "damaged", copied))
    words = found["no matrix of a layer is stored twice"]["cause"]
    assert "holds the same as" in words and one in words and other in words


def test_linears_of_a_module_under_other_names_are_compared_too(tmp_path: Path) -> None:
    """Those of `mtp.layers.0` with those of `model.layers.0`."""

    def larger(stored: Tensors) -> None:
        for name in stored:
            if name.startswith("mtp.layers.0.") and name.endswith("_proj.weight"):
                stored[name] = stored[name] * 30

    found = failures(rewritten(FIXTURES / "qwen3-5-tiny", tmp_path / "larger", larger))
    assert "times as large" in found["mtp: linears as large as the main model's"]["cause"]


def test_of_two_alike_the_one_of_an_unusual_size_is_named(tmp_path: Path) -> None:
    name = "mtp.layers.0.self_attn.o_proj.weight"

    def larger(stored: Tensors) -> None:
        stored[name] = stored[name] * 1000

    found = failures(rewritten(FIXTURES / "qwen3-5-tiny", tmp_path / "larger", larger))
    assert found["sane size of every matrix"]["subject"] == name


@pytest.mark.parametrize(
    ("family", "main", "module"),
    [
        ("hy_v4", "model.layers.2", "model.mtp_layers.0"),
        ("deepseek_v4", "layers.2", "mtp.0"),
    ],
)
def test_a_part_of_a_main_layer_is_named_as_such(
    family: str, main: str, module: str, tmp_path: Path
) -> None:
    """In modules that are numbered under names of their own."""
    small = write_checkpoint(tmp_path / "small", SMALL_CONFIGS[family])
    part = "self_attn" if family == "hy_v4" else "attn"

    def copied(stored: Tensors) -> None:
        for name in [*stored]:
            if (last := name.removeprefix(f"{main}.{part}.")) != name:
                stored[f"{module}.{part}.{last}"] = stored[name].clone()

    found = failures(rewritten(small, tmp_path / "damaged", copied))
    words = found["no matrix of a layer is stored twice"]["cause"]
    assert f"{module}.{part} holds the same as {main}.{part} (" in words


def test_experts_that_are_no_mlps_are_looked_at_too(tmp_path: Path) -> None:
    """Ernie-4.5's, whose layers are lists of tensors."""
    small = write_checkpoint(tmp_path / "small", SMALL_CONFIGS["ernie4_5_moe"])
    name = "model.layers.2.mlp.experts.0.down_proj.weight"

    def zero(stored: Tensors) -> None:
        stored[name][:32] = 0

    (item,) = failures(rewritten(small, tmp_path / "zero", zero)).values()
    assert f"rows 0 to 31 of {name} are zero" in item["cause"]


def test_a_norm_with_one_zero_is_whole(tmp_path: Path) -> None:
    """Of so few elements that it is a tenth of them."""
    small = write_checkpoint(tmp_path / "small", SMALL_CONFIGS["dots3_note"])
    name = "model.layers.1.self_attn.k_rope_only_layernorm.weight"

    def zero(stored: Tensors) -> None:
        stored[name][3] = 0
        assert len(stored[name]) == 8

    assert failures(rewritten(small, tmp_path / "zero", zero)) == {}


def test_experts_are_counted_as_the_module_has_them(tmp_path: Path) -> None:
    """Nemotron-Puzzle's layers have numbers of their own."""
    small = write_checkpoint(tmp_path / "small", SMALL_CONFIGS["nemotron_h_puzzle"])
    assert run_program("verify", small, "--level", "files", "--quiet").code == 0


def test_a_norm_that_is_many_times_negative_is_named_where_no_other_is(tmp_path: Path) -> None:
    name = f"{GLM_MTP}hnorm.weight"

    def lower(stored: Tensors) -> None:
        values = stored[name].float()
        stored[name] = (values - values.sort().values[19]).bfloat16()  # 15 % are negative

    (item,) = failures(rewritten(GLM, tmp_path / "lower", lower)).values()
    assert (item["name"], item["subject"]) == ("mtp: norms multiply by w", name)


def test_main_norms_are_blamed_alone(tmp_path: Path) -> None:
    """And not the module's beside them, which suit engines that add 1."""
    small = write_checkpoint(tmp_path / "small", SMALL_CONFIGS["qwen3_next"])

    def shift(stored: Tensors) -> None:
        for number, name in enumerate(name for name in stored if "norm" in name):
            values = stored[name].float()
            spread = torch.linspace(-0.3, 0.3, len(values)) + number / 1000
            main = not name.startswith("mtp.") and "linear_attn" not in name
            stored[name] = (spread + main).to(stored[name].dtype)

    (item,) = failures(rewritten(small, tmp_path / "shifted", shift)).values()
    assert item["name"] == "main: norms hold the w of 1 + w"


def test_scattered_values_that_are_not_finite_are_placed_by_the_rows_that_have_any(
    tmp_path: Path,
) -> None:
    """As memory that was never written has them."""

    def scattered(stored: Tensors) -> None:
        stored[ATTENTION][64:100:3, ::5] = torch.inf

    found = failures(rewritten(GLM, tmp_path / "damaged", scattered))
    words = found["mtp: finite values, sound scales"]["cause"]
    assert words == f"{ATTENTION}: 312 NaN or infinite values, all in rows 64 to 97"


def test_a_norm_may_be_that_of_a_main_layer_of_another_kind(tmp_path: Path) -> None:
    """Of Nemotron's layers of state spaces, which share no linear with the module's."""
    small = write_checkpoint(tmp_path / "small", SMALL_CONFIGS["nemotron_h"])
    own, other = "mtp.layers.0.norm.weight", "backbone.layers.0.norm.weight"

    def taken(stored: Tensors) -> None:
        stored[own] = stored[other].clone()

    found = failures(rewritten(small, tmp_path / "taken", taken))
    words = found["mtp: no norm or bias is a main layer's"]["cause"]
    assert words.startswith(f"{own} holds the same as {other}")


def test_memory_that_was_never_written_is_told_by_its_huge_values_too(tmp_path: Path) -> None:
    """Of which few are not finite."""

    def garbage(stored: Tensors) -> None:
        stored[ATTENTION][96:, ::2] = 1e30
        stored[ATTENTION][100, 5] = torch.nan

    found = failures(rewritten(GLM, tmp_path / "damaged", garbage))
    words = found["mtp: finite values, sound scales"]["cause"]
    assert words == (
        f"{ATTENTION}: 2,049 NaN, infinite or huge values, all in rows 96 to 127:"
        " memory that was never written"
    )


def test_a_constant_is_told_with_its_sign(tmp_path: Path) -> None:
    name = "mtp.layers.0.input_layernorm.weight"

    def negative(stored: Tensors) -> None:
        stored[name] = torch.full_like(stored[name], -1)

    found = failures(rewritten(FIXTURES / "qwen3-5-tiny", tmp_path / "damaged", negative))
    assert f"{name} is constant (-1)" in found["mtp: no constant tensor"]["cause"]


def test_one_matrix_that_is_far_from_its_like_is_named(tmp_path: Path) -> None:
    def larger(stored: Tensors) -> None:
        stored[ATTENTION] = stored[ATTENTION] * 100

    found = failures(rewritten(GLM, tmp_path / "larger", larger))
    assert found["every matrix near its like"]["subject"] == ATTENTION


@pytest.mark.parametrize("trained", [False, True])
def test_biases_of_routers_are_zero_before_any_training(trained: bool, tmp_path: Path) -> None:
    def start(stored: Tensors) -> None:
        for name, tensor in stored.items():
            if name.endswith("e_score_correction_bias"):
                stored[name] = torch.zeros_like(tensor)
            elif tensor.dim() == 1 and not trained:
                stored[name] = torch.full_like(tensor, float("norm" in name))

    found = failures(rewritten(GLM, tmp_path / "zero", start))
    assert ("mtp: no constant tensor" in found) == trained


def test_gates_of_delta_nets_are_one_before_any_training(tmp_path: Path) -> None:
    """Beside A_log, which begins at random, as transformers makes both."""

    def start(stored: Tensors) -> None:
        for name, tensor in stored.items():
            if name.endswith(("linear_attn.dt_bias", "linear_attn.norm.weight")):
                stored[name] = torch.ones_like(tensor)
            elif "norm" in name:
                stored[name] = torch.zeros_like(tensor)

    assert not failures(rewritten(FIXTURES / "qwen3-5-tiny", tmp_path / "untrained", start))


def test_scales_that_are_all_one_were_not_rounded(tmp_path: Path) -> None:
    def leave_out(stored: Tensors) -> None:
        for name in stored:
            if name.startswith("model.layers.61.") and name.endswith("weight_scale_inv"):
                stored[name] = torch.ones_like(stored[name])

    layers = json.loads((DEEPSEEK / "config.json").read_text())["num_hidden_layers"]
    assert layers == 61
    found = failures(rewritten(DEEPSEEK, tmp_path / "ones", leave_out))
    assert "sane size of every matrix" in found and "mtp: fp8 scales fit their codes" not in found


def test_scales_of_a_module_that_are_all_one_are_said_to_be(tmp_path: Path) -> None:
    def leave_out(stored: Tensors) -> None:
        for name in stored:
            if name.startswith("model.layers.3.") and name.endswith(".scales"):
                stored[name] = torch.ones_like(stored[name])

    both("awq", "lm_head")().save(tmp_path / "good")
    found = failures(rewritten(tmp_path / "good", tmp_path / "ones", leave_out))
    causes = " ".join(item["cause"] for item in found.values())
    assert "is 1, and those of other linears differ: they were never written" in causes
    assert "amax" not in causes
