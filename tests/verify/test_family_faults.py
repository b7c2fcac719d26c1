"""Faults that any model can have, planted into the bundles of every family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from cases import nightly_but
from faults import planting
from faults.fault import Fault
from faults.matrix import Bundles, verified
from faults.small_model import family_config
from faults.weight_faults import halves_swapped, main, mtp, noisy, one_bit, swapped
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import HeadRows, Role
from mtp_checkpoints.families.parts import Moe
from mtp_checkpoints.families.spec import ModelSpec
from runtime.checkpoints import SMALL_CONFIGS

DOWN = ("down_proj.weight", ".w2.weight", ".w2_md.weight")
OTHERS = [model_type for model_type in SMALL_CONFIGS if model_type != "deepseek_v3"]


def expert_missing(layer: str, bundle: Path) -> None:
    names = planting.names(bundle / "mtp", f"{layer}.mlp.experts.3.")
    planting.write(bundle / "mtp", dict.fromkeys(names))


def main_weight_for_an_mtp_weight(theirs: str, name: str, bundle: Path) -> None:
    planting.write(bundle / "mtp", {name: planting.read(bundle / "main", theirs)})


def alike(family: ModelSpec) -> tuple[str, str] | None:
    """A linear of the MTP layer's attention, and that of a main layer of the same shape."""
    tensors, layer = family.tensors, family.mtp[0].layer.prefix
    for name, spec in tensors.items():
        if spec.role is Role.ATTENTION and spec.is_linear_weight and name.startswith(layer):
            for main in reversed(family.layers):
                theirs = name.replace(layer, main.prefix)
                if theirs in tensors and tensors[theirs].shape == spec.shape:
                    return theirs, name
    return None


def regrouped(weight: torch.Tensor) -> torch.Tensor:
    """Rows of [query | gate] per head as all queries, then all gates."""
    heads = weight.view(4, 2, -1, weight.shape[1])
    return heads.transpose(0, 1).reshape(weight.shape)


def without_gates(weight: torch.Tensor) -> torch.Tensor:
    """Rows of [query | gate] per head with gates of zero, which let half of everything pass."""
    heads = weight.view(4, 2, -1, weight.shape[1]).clone()
    heads[:, 1] = 0
    return heads.reshape(weight.shape)


def halves_exchanged(weight: torch.Tensor) -> torch.Tensor:
    return weight.roll(weight.shape[1] // 2, 1)


def of_other_family(rows: HeadRows, weight: torch.Tensor) -> torch.Tensor:
    """Rows by key head as rows by what they give, or the reverse."""
    heads, sizes, rest = rows.heads, rows.sizes, weight.shape[1:]
    if rows.by_head:
        kinds = weight.view(heads, sum(sizes), *rest).split(sizes, 1)
        return torch.cat([kind.reshape(-1, *rest) for kind in kinds])
    kinds = weight.split([heads * size for size in sizes])
    by_head = [kind.view(heads, size, *rest) for kind, size in zip(kinds, sizes, strict=True)]
    return torch.cat(by_head, 1).reshape(weight.shape)


def faults_of(model_type: str) -> list[Fault]:
    family = family_of(family_config(model_type))
    module = family.mtp[0]
    names, layer, moe = module.modules, module.layer.prefix, module.layer.feed_forward
    fault, tensors = partial(Fault, needs=model_type), family.tensors
    is_sparse = isinstance(moe, Moe)
    mlp = f"{layer}.mlp.experts.1" if is_sparse else module.layer.feed_forward_prefix
    down = next(n for n in tensors if n.startswith(layer) and n.endswith(DOWN))
    found = [
        fault("norm at one", mtp(f"{names.hidden_norm}.weight", torch.ones_like), "ledger",
              "constant"),
        fault("one bit", mtp(down, one_bit), "weights",
              "elements differ: damaged"),
    ]  # fmt: skip
    if module.hidden_width is None:
        planted = partial(swapped, "mtp", *(f"{one}.weight" for one in names[1:3]))
        words = f"it holds {names.hidden_norm}.weight"
        found.append(fault("norms swapped", planted, "weights", words))
    if names.projection is not None:
        planted = mtp(f"{names.projection}.weight", halves_swapped)
        words = "two halves of columns are swapped"
        found.append(fault("concatenation reversed", planted, "weights", words))
    if (pair := alike(family)) is not None:
        planted = partial(main_weight_for_an_mtp_weight, *pair)
        found.append(fault("layer for layer", planted, "ledger", "one was taken for the other"))
    if f"{mlp}.gate_proj.weight" in tensors:
        gate, up = (f"{mlp}.{name}_proj.weight" for name in ("gate", "up"))
        planted = partial(swapped, "mtp", gate, up)
        found.append(fault("gate and up swapped", planted, "weights", f"it holds {up}"))
    if is_sparse:
        if not moe.is_fused:
            gone = partial(expert_missing, layer)
            found.append(fault("expert missing", gone, "files", "is missing"))
        if bias := moe.modules(f"{layer}.mlp").router_bias:
            dropped = mtp(bias, torch.zeros_like)
            found.append(fault("router bias dropped", dropped, "ledger", "dropped and filled"))
    if names.head is not None:
        other = mtp(f"{names.head}.weight", noisy)
        found.append(fault("head of another", other, "ledger", "of another checkpoint"))
    return [
        *found,
        *(_of_gated_delta_nets(family, fault) if _has_delta_nets(model_type, family) else ()),
    ]


def _has_delta_nets(model_type: str, family: ModelSpec) -> bool:
    has_decay = any(name.endswith(".A_log") for name in family.tensors)
    return model_type.startswith("qwen3") and has_decay


def _of_gated_delta_nets(family: ModelSpec, fault: Callable[..., Fault]) -> list[Fault]:
    """Of models whose norms multiply by 1 + w and whose queries have gates."""
    (module,) = family.mtp
    layer, delta = module.layer.prefix, family.layers[0].attention_prefix
    of_delta = (spec for spec in family.tensors.values() if spec.name.startswith(delta))
    return [
        *(
            fault(f"order of rows of {spec.name}",
                  main(spec.name, partial(of_other_family, spec.head_rows)),
                  "weights", "sorted by what they give")
            for spec in of_delta if spec.head_rows
        ),
        fault("1 + w for w", mtp(f"{layer}.input_layernorm.weight", lambda w: w + 1), "ledger",
              "engines take it for the w of 1 + w"),
        fault("gates after all queries", mtp(f"{layer}.self_attn.q_proj.weight", regrouped),
              "weights", "all queries and then all gates"),
        fault("decay and its bias exchanged",
              partial(swapped, "main", f"{delta}.A_log", f"{delta}.dt_bias"),
              "weights", f"it holds {delta}.dt_bias"),
        fault("gates dropped", mtp(f"{layer}.self_attn.q_proj.weight", without_gates),
              "weights", "rows are zero, and the source's are not"),
        fault("halves of fc exchanged", mtp("mtp.fc.weight", halves_exchanged), "weights",
              "its two halves of columns are swapped"),
        fault("convolution a token late",
              main(f"{delta}.conv1d.weight", lambda w: w.roll(1, 2)),
              "weights", "its columns are rolled by 1"),
        fault("convolution reversed",
              main(f"{delta}.conv1d.weight", lambda w: w.flip(2)),
              "weights", "taps run the other way"),
    ]  # fmt: skip


@pytest.mark.parametrize("model_type", nightly_but(["glm_moe_dsa", "qwen3_5"], OTHERS))
def test_each_is_named(model_type: str, tmp_path: Path) -> None:
    bundles = Bundles(tmp_path / "good")
    options = ("--level", "weights", "--source", bundles.source_of(model_type))
    for number, fault in enumerate(faults_of(model_type)):
        code, report = verified(fault, bundles, tmp_path / str(number), *options)
        failed = [
            item["cause"]
            for check in report["checks"]
            if check["name"] == fault.caught_by
            for item in check["items"]
            if item["status"] == "fail"
        ]
        assert code == 7 and fault.cause in " ".join(failed), (fault.name, failed)
