"""The precision table and the schemes that it names: pairs, sizes, variants."""

from __future__ import annotations

from math import prod

import pytest

from cases import WHOLE_TILES
from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import LINEAR_ROLES, Role, TensorSpec
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.scheme import Scheme, every_linear
from mtp_export.schemes.table import PAIRS, Weight, check_pair, weigh

IN_TABLE = [
    ("a8w8_fp8_wint4", "a8w8_fp8", "TP8"),
    ("weight_only_int4", "weight_only_int8", "TP8"),
    ("a8w8_fp8", "a8w8_fp8", "TP16 (2×TP8)"),
    ("weight_only_int8", "weight_only_int8", "TP16 (2×TP8)"),
    ("weight_only_nvfp4", "weight_only_nvfp4", "TP8"),
    ("weight_only_nvfp4", "a8w8_fp8", "TP8"),
    ("weight_only_nvfp4", "bf16", "TP8"),
    ("a4w4_nvfp4", "a4w4_nvfp4", "TP8"),
    ("a4w4_nvfp4", "a8w8_fp8", "TP8"),
    ("a4w4_nvfp4", "bf16", "TP8"),
    ("weight_only_mxfp4", "weight_only_mxfp4", "TP8"),
    ("a8w8_mxfp8", "a8w8_mxfp8", "TP16 (2×TP8)"),
    ("bf16", "bf16", "-"),
    *((name, "q8_0", "-") for name in ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")),
    *((name, "q8_0", "-") for name in ("q6_k", "q5_k", "q4_k", "gguf_mxfp4")),
]
BLOCKS = {name: name.removeprefix("gguf_") for name, mtp, _ in IN_TABLE if mtp == "q8_0"}
OTHERS = (Role.DENSE_MLP, Role.SHARED_EXPERT)


def test_the_table() -> None:
    assert [(one.base, one.mtp, one.deployment) for one in PAIRS] == IN_TABLE
    engines = {one.base: one.engines for one in PAIRS}
    both = ("vLLM", "SGLang")
    assert engines == {
        "a8w8_fp8_wint4": both,
        "weight_only_int4": both,
        "a8w8_fp8": (*both, "TensorRT-LLM"),
        "weight_only_int8": both,
        "weight_only_nvfp4": both,
        "a4w4_nvfp4": both,
        "weight_only_mxfp4": ("vLLM",),
        "a8w8_mxfp8": ("vLLM",),
        "bf16": ("all",),
        **dict.fromkeys(BLOCKS, ("llama.cpp",)),
    }


@pytest.mark.parametrize("allow_untested", [True, False])
@pytest.mark.parametrize("base_stays_bf16", [True, False])
def test_a_pair_of_the_table_needs_no_leave(base_stays_bf16: bool, allow_untested: bool) -> None:
    for base, mtp, _ in IN_TABLE:
        assert check_pair(base, mtp, base_stays_bf16=base_stays_bf16, allow_untested=allow_untested)


def test_any_other_pair_needs_leave_or_a_base_that_stays_bf16() -> None:
    for base, mtp in (("a8w8_fp8", "bf16"), ("bf16", "a8w8_fp8"), ("a8w8_fp8", "a8w8_fp8_wint4")):
        assert not check_pair(base, mtp, base_stays_bf16=True, allow_untested=False)
        assert not check_pair(base, mtp, base_stays_bf16=False, allow_untested=True)
        with pytest.raises(UnsupportedError, match=f"^{base} goes with --mtp-quant") as refusal:
            check_pair(base, mtp, base_stays_bf16=False, allow_untested=False)
        assert refusal.value.found == f"--mtp-quant {mtp}"
        assert refusal.value.what == f"{base} goes with --mtp-quant {base}"
        assert "--allow-untested-pair" in str(refusal.value.todo)


def storages(scheme: Scheme) -> tuple[str, set[str], str]:
    """Storages of attention, of dense MLPs and shared experts, and of routed experts."""
    by_role = scheme.storages
    others = {by_role[role] for role in OTHERS}
    return by_role[Role.ATTENTION], others, by_role[Role.ROUTED_EXPERT]


def test_storages_of_every_scheme() -> None:
    fp8, bf16, int4, int8, nvfp4, nvfp4_a4 = (
        "fp8_block", "bf16", "int4_group", "int8_channel", "nvfp4_packed", "nvfp4_packed_a4",
    )  # fmt: skip
    assert {name: storages(scheme) for name, scheme in SCHEMES.items()} == {
        "a8w8_fp8_wint4": (fp8, {fp8}, int4),
        "weight_only_int4": (bf16, {bf16}, int4),
        "a8w8_fp8": (fp8, {fp8}, fp8),
        "weight_only_int8": (bf16, {int8}, int8),
        "weight_only_nvfp4": (nvfp4, {nvfp4}, nvfp4),
        "a4w4_nvfp4": (nvfp4_a4, {nvfp4_a4}, nvfp4_a4),
        "weight_only_mxfp4": ("mxfp4_packed", {"mxfp4_packed"}, "mxfp4_packed"),
        "a8w8_mxfp8": ("mxfp8", {"mxfp8"}, "mxfp8"),
        "bf16": (bf16, {bf16}, bf16),
        **{name: (storage, {storage}, storage) for name, storage in BLOCKS.items()},
    }
    assert {one.name: one.container for one in SCHEMES.values() if one.tables} == dict.fromkeys(
        BLOCKS, "gguf"
    )
    assert all(name == scheme.name for name, scheme in SCHEMES.items())
    assert {name for name, one in SCHEMES.items() if one.int4_activations_fp8} == {"a8w8_fp8_wint4"}
    words = [scheme.on_disk for scheme in SCHEMES.values()]
    others = [
        "int4 + fp8",
        "int4 + bf16",
        "fp8",
        "int8 + bf16",
        "nvfp4 + bf16",
        "nvfp4",
        "mxfp4 + bf16",
        "mxfp8",
        "bf16",
    ]
    assert words == [*others, *(f"{storage}, GGUF" for storage in BLOCKS.values())]
    assert every_linear(bf16) == dict.fromkeys(LINEAR_ROLES, bf16)


def test_variants() -> None:
    everywhere = SCHEMES["weight_only_int4"].variant("int4_scope", "all")
    int4 = "int4_group"
    assert everywhere.name == "weight_only_int4"
    assert storages(everywhere) == ("bf16", {int4}, int4)
    linears = SCHEMES["weight_only_int4"].variant("int4_scope", "linears")
    assert storages(linears) == (int4, {int4}, int4)
    assert linears.storages[Role.INDEXER] == "bf16"
    int8 = SCHEMES["weight_only_int8"].variant("int8_scope", "linears")
    assert storages(int8) == ("int8_channel", {"int8_channel"}, "int8_channel")
    assert int8.storages[Role.INDEXER] == "bf16"
    with pytest.raises(UsageError, match="--int8-scope linears does not apply to weight_only_int4"):
        SCHEMES["weight_only_int4"].variant("int8_scope", "linears")
    sglang = SCHEMES["a8w8_fp8_wint4"].variant("format", "w4afp8")
    assert sglang.storages[Role.ROUTED_EXPERT] == "w4afp8"
    assert {sglang.storages[role] for role in OTHERS} == {"fp8_block"}
    with pytest.raises(UsageError, match="--format x does not apply to bf16") as refusal:
        SCHEMES["bf16"].variant("format", "x")
    assert refusal.value.todo == "Leave --format out"
    with pytest.raises(AssertionError, match="toy leaves out a role"):
        Scheme("toy", "", {Role.ATTENTION: "bf16"})
    with pytest.raises(AssertionError, match="toy leaves out a role"):
        Scheme("toy", "", every_linear("bf16"), {"x": {"y": {}}})


def test_storages_by_a_manifest_s_options() -> None:
    int4, wint4 = SCHEMES["weight_only_int4"], SCHEMES["a8w8_fp8_wint4"]
    int8 = SCHEMES["weight_only_int8"]
    for scheme, options, expected in (
        (int4, {}, {"bf16", "int4_group"}),
        (int4, {"int4_scope": "experts"}, {"bf16", "int4_group"}),
        (wint4, {"format": "w4afp8", "int4_scope": "experts"}, {"fp8_block", "w4afp8"}),
        (wint4, {"format": "compressed-tensors"}, {"fp8_block", "int4_group"}),
        (int8, {"int4_scope": "linears", "int8_scope": "mlps"}, {"bf16", "int8_channel"}),
        (int8, {"int4_scope": "experts", "int8_scope": "linears"}, {"bf16", "int8_channel"}),
    ):
        assert scheme.recorded_storages(options) == expected
    variants = {"scope": {"all": every_linear("w4afp8")}}
    scoped = Scheme("toy", "", every_linear("bf16"), variants)
    assert scoped.recorded_storages({"scope": "all"}) == {"w4afp8"}
    assert scoped.recorded_storages({"scope": "x", "other": "all"}) == {"bf16"}


def bits(spec: TensorSpec, scheme: str) -> int:
    """Bits of a tensor, scales and shapes included, written out by hand."""
    count = prod(spec.shape)
    if scheme == "q8_0" and len(spec.shape) == 2 and spec.role is not Role.ROUTER:
        return count // 32 * 34 * 8
    if not spec.is_linear_weight:
        return count * {"BF16": 16, "F32": 32}[spec.dtypes[0]]
    rows, columns = spec.shape
    storage = SCHEMES[scheme].storages[spec.role]
    if storage == "fp8_block":
        return count * 8 + 32 * -(-rows // 128) * -(-columns // 128)
    if storage == "int8_channel":
        return count * 8 + 16 * rows + 128
    return count * 16


@pytest.mark.parametrize("scheme", ["a8w8_fp8", "weight_only_int8", "bf16", "q8_0"])
@pytest.mark.parametrize("mtp", [True, False])
def test_size_of_a_part(scheme: str, mtp: bool) -> None:
    family = family_of(WHOLE_TILES)
    specs = [spec for spec in family.tensors.values() if (spec.mtp_layer is not None) is mtp]
    found = weigh(family, scheme, lambda spec: (spec.mtp_layer is not None) is mtp)
    parameters = sum(prod(spec.shape) for spec in specs)
    assert found == Weight(parameters, sum(bits(spec, scheme) for spec in specs) // 8)
    assert found.bits_per_weight == pytest.approx(8 * found.size_bytes / parameters)
