"""Tensors under other names, and parts of another model's layer, by names and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import pytest

from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.other_kinds import of_another_kind
from mtp_checkpoints.families.other_names import other_names
from mtp_checkpoints.families.renamed import InPlace, OtherNames, Renamed
from runtime.checkpoints import SMALL_CONFIGS

NORM, SQUARE, WIDE = (4,), (4, 4), (8, 4)


class Tensor(NamedTuple):
    shape: tuple[int, ...]
    optional: bool = False
    dtype: DType = DType.BF16


def tensors(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name.replace("__", "."): Tensor(shape) for name, shape in shapes.items()}


WANTED = tensors(mtp__fc__weight=WIDE, mtp__norm__weight=NORM, mtp__mlp__up_proj__weight=SQUARE)


def found(wanted: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> OtherNames:
    names = other_names(wanted, there)
    assert names is not None
    return names


def test_other_beginnings_are_told_of_tensors_of_the_same_shapes_alone() -> None:
    there = {f"model.{name}": one for name, one in WANTED.items()}
    assert found(WANTED, there).beginnings == [Renamed("", "model", 3)]
    assert other_names(WANTED, {name: Tensor((2, 2, 2)) for name in there}) is None


def test_every_other_name_is_told_where_together_they_are_a_good_half() -> None:
    wanted = WANTED | tensors(mtp__mlp__down_proj__weight=SQUARE)
    there = tensors(draft__mlp__up_proj__weight=SQUARE, draft__mlp__down_proj__weight=SQUARE)
    own = found(wanted, there | {"norms.mtp.norm.weight": Tensor(NORM)})
    assert own.beginnings == [Renamed("mtp", "draft", 2)]
    assert own.singly == {"norms.mtp.norm.weight": "mtp.norm.weight"}
    assert own.lacking == ["mtp.fc.weight"] and own.untold == []
    assert other_names(wanted, there) is None


def test_rows_that_are_joined_in_each_of_several_layers_are_told() -> None:
    """Each by its own layer, though those of all have the same shapes."""
    layers = [f"model.layers.{number}.mlp." for number in (4, 5, 6)]
    ends = ("gate_proj.weight", "up_proj.weight")
    wanted = {f"{one}{end}": Tensor(SQUARE) for one in layers for end in ends}
    joined = found(wanted, {f"{one}gate_up_proj.weight": Tensor(WIDE) for one in layers}).joined
    assert joined == [
        InPlace((f"{one}{ends[0]}", f"{one}{ends[1]}"), [f"{one}gate_up_proj.weight"])
        for one in layers
    ]


def test_a_beginning_that_others_rightly_have_is_no_rule() -> None:
    """Who renames all that begin so would rename those too."""
    wanted = tensors(x__mlp__router__gate__weight=WIDE, x__mlp__router__head__weight=SQUARE)
    there = tensors(x__mlp__gate__weight=WIDE, x__mlp__head__weight=SQUARE)
    assert found(wanted, there).beginnings == [Renamed("x.mlp.router", "x.mlp", 2)]
    right = tensors(x__mlp__up_proj__weight=SQUARE)
    own = found(wanted | right, there | right)
    assert own.beginnings == [] and own.singly == own.pairs
    assert own.pairs == {
        "x.mlp.gate.weight": "x.mlp.router.gate.weight",
        "x.mlp.head.weight": "x.mlp.router.head.weight",
    }


def test_of_two_rules_for_one_beginning_the_smaller_is_told_singly() -> None:
    ends = ("e.weight", "h.weight", "norm.weight")
    wanted = {f"x.{end}": Tensor(NORM) for end in ends} | tensors(x__head__one__weight=NORM)
    wanted |= tensors(x__head__two__weight=SQUARE)
    there = {f"mtp.{name.rpartition('.')[0].rpartition('.')[2]}.weight" for name in wanted}
    own = found(wanted, {name: Tensor(SQUARE if "two" in name else NORM) for name in there})
    assert own.beginnings == [Renamed("x", "mtp", 3)]
    assert own.singly == {f"mtp.{one}.weight": f"x.head.{one}.weight" for one in ("one", "two")}


@pytest.mark.parametrize(
    ("last", "dtype", "shape"),
    [
        ("qweight", DType.I32, (8, 64)),
        ("qweight", DType.I32, (64, 8)),
        ("weight_packed", DType.U8, (64, 32)),
        ("weight", DType.F8_E4M3, (64, 64)),
        ("weight", DType.U32, (64, 6)),
        ("weight", DType.U8, (2048, 1)),
    ],
    ids=["GPTQ", "AWQ", "NVFP4", "fp8", "MLX, 3 bits", "bitsandbytes"],
)
def test_packed_weights_are_known_by_their_bits(
    last: str, dtype: DType, shape: tuple[int, ...]
) -> None:
    matrix = (64, 64)
    wanted = tensors(x__3__up_proj__weight=matrix, x__3__down_proj__weight=matrix)
    codes = Tensor(shape, dtype=dtype)
    there = {f"mtp.{one}_proj.{last}": codes for one in ("up", "down")}
    scales = {f"mtp.{one}_proj.scales": Tensor((64, 2)) for one in ("up", "down")}
    assert found(wanted, there | scales).beginnings == [Renamed("x.3", "mtp", 2)]
    others = {f"x.3.{one}.{last}": codes for one in ("w3", "w2")}
    own = found(wanted, others | {"x.3.w3.scales": Tensor((64, 2))})
    assert own.singly == {f"x.3.w3.{last}": f"x.3.up_proj.{last}"} | {
        f"x.3.w2.{last}": f"x.3.down_proj.{last}"
    }
    larger = {name: Tensor((*shape, 3), dtype=dtype) for name in there}
    assert other_names(wanted, larger) is None


def test_single_tensors_are_told_where_their_shapes_are_what_is_missing() -> None:
    there = tensors(
        mtp__proj__weight=WIDE, mtp__last__weight=NORM, mtp__mlp__up_proj__weight=SQUARE
    )
    own = found(WANTED, there)
    assert own.singly == {"mtp.proj.weight": "mtp.fc.weight", "mtp.last.weight": "mtp.norm.weight"}
    assert other_names(WANTED, there | tensors(mtp__last__weight=SQUARE)) is None
    assert other_names(WANTED, WANTED) is None
    optional = {"mtp.embed_tokens.weight": Tensor(WIDE, optional=True)}
    assert other_names(WANTED | optional, WANTED | tensors(mtp__other__weight=WIDE)) is None
    bias = tensors(mtp__fc__weight=WIDE, mtp__a__bias=NORM, mtp__mlp__up_proj__weight=SQUARE)
    assert other_names(WANTED, bias) is None  # a bias is no norm, whatever its shape


def test_tensors_that_nothing_tells_apart_are_told_together() -> None:
    wanted = tensors(x__3__enorm__weight=NORM, x__3__hnorm__weight=NORM)
    there = tensors(x__3__one__weight=NORM, x__3__two__weight=NORM)
    own = found(wanted, there)
    assert own.pairs == {} and own.alike == [InPlace([*wanted], [*there])]
    assert other_names(wanted, there | tensors(x__3__three__weight=NORM)) is None


def test_modules_in_order_under_other_numbers_are_all_renamed() -> None:
    """The last of them in the first one's place would put them in another order."""
    own = {f"model.layers.{n}.{one}.weight": Tensor(NORM) for n in (4, 5) for one in "ab"}
    there = {name.replace("5", "6").replace("4", "5"): one for name, one in own.items()}
    names = found(own, there)
    assert names.beginnings == [
        Renamed("model.layers.4", "model.layers.5", 2),
        Renamed("model.layers.5", "model.layers.6", 2),
    ]
    assert names.pairs == dict(zip(there, own, strict=True))
    del there["model.layers.6.b.weight"]
    assert other_names(own, there) is None


def test_a_bias_beside_its_modules_weight_is_told() -> None:
    """And a scale beside one that lacks nothing is not asked."""
    own = {"x.gate.weight": Tensor(WIDE), "x.gate.bias_of_scores": Tensor(NORM)}
    there = {"x.gate.weight": Tensor(WIDE), "x.gate.expert_bias": Tensor(NORM)}
    assert found(own, there).pairs == {"x.gate.expert_bias": "x.gate.bias_of_scores"}
    scales = {"x.up.weight": Tensor(WIDE), "x.up.scale": Tensor(NORM)}
    more = own | {"x.up.weight": Tensor(WIDE)}
    assert found(more, there | scales).untold == []


def test_rows_that_were_joined_are_told_with_their_parts() -> None:
    """As trainers store queries, keys and values, or gate and up, where one tensor alone fits."""
    own = {f"x.attn.{one}_proj.weight": Tensor(SQUARE) for one in "qkv"}
    own |= {f"x.mlp.{one}_proj.weight": Tensor(WIDE) for one in ("gate", "up")}
    own |= {"x.attn.v_proj.weight": Tensor((2, 4))}
    there = {"y.linear_qkv.weight": Tensor((10, 4)), "y.linear_fc1.weight": Tensor((16, 4))}
    qkv = ("q_proj", "k_proj", "v_proj")
    names = other_names(own, there, [qkv])
    assert names is not None and names.pairs == {} and not names.untold and not names.lacking
    assert [(one.wanted, one.found) for one in names.joined] == [
        (tuple(f"x.attn.{one}.weight" for one in qkv), ["y.linear_qkv.weight"]),
        (("x.mlp.gate_proj.weight", "x.mlp.up_proj.weight"), ["y.linear_fc1.weight"]),
    ]
    assert other_names(own, there) is None  # gate and up alone are not a good half
    two = {"y.a.weight": Tensor((16, 4)), "y.b.weight": Tensor((16, 4))}
    assert other_names(own, two, [qkv]) is None


# Names that frameworks have, as patterns of released ones.
NAMINGS = {
    "Megatron": {
        r"shared_head\.norm$": "final_layernorm",
        r"shared_head\.head$": "output_layer",
        "post_attention_layernorm": "pre_mlp_layernorm",
        r"\bself_attn\b": "self_attention",
        "o_proj": "linear_proj",
        r"mlp\.gate$": "mlp.router",
    },
    "Mixtral": {
        "gate_proj$": "w1",
        "down_proj$": "w2",
        "up_proj$": "w3",
        r"mlp\.experts": "block_sparse_moe.experts",
        r"mlp\.gate$": "block_sparse_moe.gate",
    },
    "Llama": {
        r"\b([qkvo])_proj$": r"w\1",
        r"\bself_attn\b": "attention",
        "input_layernorm": "attention_norm",
    },
    "Qwen": {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        r"shared_head\.norm": "norm",
    },
    "DeepSeek": {
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        r"\bfc$": "eh_proj",
    },
}


@pytest.mark.parametrize("beginning", ["", "draft."])
@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("model_type", SMALL_CONFIGS)
def test_modules_under_names_of_frameworks_are_told_whole(
    model_type: str, naming: str, beginning: str
) -> None:
    """Each tensor with its own name: none wrongly, and none left out."""
    family = family_of(SMALL_CONFIGS[model_type], [])
    wanted = {one.name: one for one in family.tensors.values() if one.mtp_layer is not None}
    names = dict[str, str]()
    for name in wanted:
        module, dot, last = name.rpartition(".")
        for pattern, other in NAMINGS[naming].items():
            module = re.sub(pattern, other, module)
        names[f"{beginning}{module}{dot}{last}"] = name
    there = {new: Tensor(wanted[own].shape) for new, own in names.items()}
    renamed = {new: own for new, own in names.items() if new != own}
    if not any(not wanted[own].optional for own in renamed.values()) or len(names) < len(wanted):
        return  # nothing is missing, or two would have one name
    own = found(wanted, there)
    assert own.pairs.items() <= renamed.items()
    told = {*own.pairs, *(name for one in own.alike for name in one.found)}
    assert told == renamed.keys() and not own.untold and not own.lacking
    assert len(own.pairs) >= len(renamed) - 4 and own.is_sure


def test_parts_of_another_kind_are_told_by_their_modules() -> None:
    wanted = tensors(x__self_attn__q_a_proj__weight=WIDE, x__self_attn__q_b_proj__weight=WIDE)
    there = tensors(x__self_attn__q_proj__weight=SQUARE, x__self_attn__k_proj__weight=SQUARE)
    (own,) = of_another_kind(wanted, there)
    assert (own.part, own.wanted, own.found) == (
        "x.self_attn",
        ["q_a_proj", "q_b_proj"],
        ["k_proj", "q_proj"],
    )
    packed = {name.replace("weight", "qweight"): one for name, one in wanted.items()}
    assert of_another_kind(wanted, packed) == []
    assert of_another_kind(wanted, {}) == []


def test_a_tensor_that_its_words_tell_joins_no_others() -> None:
    """Though its shape is that of the rows of two."""
    wanted = {
        "model.layers.2.self_attn.o_proj.weight": Tensor(WIDE),
        "model.layers.2.mlp.gate_proj.weight": Tensor(SQUARE),
        "model.layers.2.mlp.up_proj.weight": Tensor(SQUARE),
    }
    there = {
        "layers.2.attn.wo.weight": Tensor(WIDE),
        "layers.2.ffn.w1.weight": Tensor(SQUARE),
        "layers.2.ffn.w3.weight": Tensor(SQUARE),
    }
    names = other_names(wanted, there, joins=[])
    assert names is not None and names.joined == [] and names.untold == []
    assert names.pairs == dict(zip(there, wanted, strict=True))
