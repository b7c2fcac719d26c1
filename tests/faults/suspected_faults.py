"""Faults of weights that look right and that no source is at hand for: what running the bundle
shows of them. They are planted into the trained fixture."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from cases import read_tensors
from faults import planting
from faults.fault import Fault
from faults.run_faults import EXPERT, MTP
from mtp_checkpoints.families.released import with_value

_SIGN = 0x80  # of an fp8 code


def negated_codes(part: str, name: str, bundle: Path) -> None:
    """An fp8 matrix with the wrong sign."""

    def negated(codes: torch.Tensor) -> torch.Tensor:
        return (codes.view(torch.uint8) ^ _SIGN).view(codes.dtype)

    planting.change(bundle / part, name, negated)


def shifted(name: str, by: float, bundle: Path) -> None:
    planting.change(bundle / "mtp", name, lambda w: (w.float() + by).to(w.dtype))


def half_scaled(half: int, factor: float, bundle: Path) -> None:
    """A half of eh_proj multiplied by a factor: 0 is the embedding's, 1 the hidden state's."""

    def scaled(weight: torch.Tensor) -> torch.Tensor:
        halves = [*weight.chunk(2, dim=1)]
        halves[half] = halves[half] * factor
        return torch.cat(halves, dim=1)

    planting.change(bundle / "mtp", f"{MTP}.eh_proj.weight", scaled)


def router_rows_reversed(bundle: Path) -> None:
    planting.change(bundle / "mtp", f"{MTP}.mlp.gate.weight", lambda w: w.flip(0))


def shared_scale_times_four(bundle: Path) -> None:
    name = f"{MTP}.mlp.shared_experts.down_proj.weight_scale_inv"
    planting.change(bundle / "mtp", name, lambda scale: scale * 4)


def main_norm_scaled(factor: float, bundle: Path) -> None:
    planting.change(bundle / "main", "model.norm.weight", lambda w: w * factor)


def changed(part: str, name: str, how: planting.Change, bundle: Path) -> None:
    planting.change(bundle / part, name, how)


def in_another_order(weight: torch.Tensor) -> torch.Tensor:
    """Its rows in an order that is none of those that converters make."""
    return weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(1))]


def noisy(weight: torch.Tensor) -> torch.Tensor:
    """With noise of 1.2 times its root mean square."""
    values = weight.float()
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(2))
    return (values + 1.2 * values.square().mean().sqrt() * noise).to(weight.dtype)


def config_value(field: str, value: object, bundle: Path) -> None:
    for part in ("main", "mtp"):
        planting.edit_config(bundle / part, lambda config: config.update({field: value}))


def rotated(share: float, bundle: Path) -> None:
    """With another share of each head rotated, of a model whose rope_parameters say it."""
    for part in ("main", "mtp"):
        planting.edit_config(
            bundle / part,
            lambda config: config.update(with_value(config, "partial_rotary_factor", share)),
        )


def rows_by_turns(weight: torch.Tensor) -> torch.Tensor:
    """Its rows by turns from both halves."""
    return weight.view(2, len(weight) // 2, -1).transpose(0, 1).reshape(weight.shape)


def exchanged(one: str, other: str, bundle: Path, part: str = "main") -> None:
    planting.swap(bundle / part, one, other)


def values_and_gates_exchanged(layer: int, bundle: Path) -> None:
    """Values and output gates of a gated delta net of the Qwen3.5 fixture in each other's place."""
    net, tensors = f"model.layers.{layer}.linear_attn", read_tensors(bundle / "main")
    mixed, gates = (tensors[f"{net}.{name}.weight"] for name in ("in_proj_qkv", "in_proj_z"))
    values = mixed[-len(gates) :].clone()
    mixed = torch.cat([mixed[: -len(gates)], gates])
    changes = {f"{net}.in_proj_qkv.weight": mixed, f"{net}.in_proj_z.weight": values}
    planting.write(bundle / "main", changes)


def gates_behind(weight: torch.Tensor) -> torch.Tensor:
    """Its rows, a query and a gate of 32 rows for each of four heads, with all gates last."""
    return weight.view(4, 2, 32, -1).transpose(0, 1).reshape(weight.shape)


def gates_first(weight: torch.Tensor) -> torch.Tensor:
    """The same rows, with the gate of each head before its query."""
    return weight.view(4, 2, 32, -1).flip(1).reshape(weight.shape)


def run_scaled(
    weight: torch.Tensor, axis: int, first: int, last: int, factor: float
) -> torch.Tensor:
    """With some of its rows, columns or elements multiplied."""
    weight.movedim(axis, 0)[first:last] *= factor
    return weight


def columns_exchanged(weight: torch.Tensor) -> torch.Tensor:
    """Its halves of columns in each other's place."""
    return torch.cat([*weight.chunk(2, dim=1)][::-1], dim=1)


def layers_exchanged(one: int, other: int, bundle: Path, half: str = "") -> None:
    mark, instead = (f"model.layers.{number}.{half}" for number in (one, other))
    for name in [name for name in read_tensors(bundle / "main") if name.startswith(mark)]:
        exchanged(name, name.replace(mark, instead), bundle)


def exchanged_everywhere(bundle: Path) -> None:
    """In the three gated delta nets of the Qwen3.5 fixture."""
    for layer in range(3):
        net = f"model.layers.{layer}.linear_attn"
        exchanged(f"{net}.in_proj_a.weight", f"{net}.in_proj_b.weight", bundle)


_fields = {"needs": "trained"}
# Of the MTP module, whose drafts show them.
SUSPECTED_FAULTS: tuple[Fault, ...] = (
    Fault("the draft's last norm less one", partial(shifted, f"{MTP}.shared_head.norm.weight", -1),
          "acceptance", "the norm before the draft's head lacks the 1", **_fields),
    Fault("one norm less one", partial(shifted, f"{MTP}.post_attention_layernorm.weight", -1),
          "acceptance", "post_attention_layernorm of the MTP layer lacks the 1", **_fields),
    Fault("one norm plus one", partial(shifted, f"{MTP}.hnorm.weight", 1),
          "acceptance", "hnorm has 1 too much", **_fields),
    Fault("embedding half of eh_proj times four", partial(half_scaled, 0, 4.0),
          "acceptance", "the embedding half of eh_proj, or enorm, is about 4 times", **_fields),
    Fault("hidden half of eh_proj negated", partial(half_scaled, 1, -1.0),
          "acceptance", "the hidden half of eh_proj, or hnorm, has the wrong sign", **_fields),
    Fault("rows of the router reversed", router_rows_reversed,
          "acceptance", "router has its rows in reverse order", **_fields),
    Fault("output of attention negated",
          partial(negated_codes, "mtp", f"{MTP}.self_attn.o_proj.weight"),
          "acceptance", "o_proj of the MTP layer has the wrong sign", **_fields),
    Fault("shared expert's scale times four", shared_scale_times_four,
          "acceptance", "of the shared expert of the MTP layer is about 2 times", **_fields),
    Fault("one expert negated", partial(negated_codes, "mtp", EXPERT % (3, "down", "weight")),
          "acceptance", "down_proj of expert 3 has the wrong sign", **_fields),
)  # fmt: skip
# Of the main model, by which its own texts change too.
SUSPECTED_MAIN_FAULTS: tuple[Fault, ...] = (
    Fault("last norm of the main model halved", partial(main_norm_scaled, 0.5),
          "likelihood", "too flat: the last norm (model.norm) or the head is about", **_fields),
    Fault("routed_scaling_factor halved", partial(config_value, "routed_scaling_factor", 1.25),
          "likelihood", "routed_scaling_factor of config.json is no release's", **_fields),
    Fault("norm_topk_prob flipped", partial(config_value, "norm_topk_prob", False),
          "likelihood", "norm_topk_prob of config.json is no release's", **_fields),
    Fault("topk_group halved", partial(config_value, "topk_group", 1),
          "likelihood", "topk_group of config.json is 1, and the model was trained with about",
          **_fields),
    Fault("one expert of a main layer negated",
          partial(negated_codes, "main", "model.layers.20.mlp.experts.5.down_proj.weight"),
          "likelihood", "down_proj of expert 5 of layer 20 has the wrong sign", **_fields),
    Fault("shared expert of a main layer negated",
          partial(negated_codes, "main", "model.layers.40.mlp.shared_experts.down_proj.weight"),
          "likelihood", "down_proj of the shared expert of layer 40 has the wrong sign", **_fields),
)  # fmt: skip
# Of a main model of few layers, which are bundles of the fixtures that they need.
_glm, _qwen = {"needs": "glm4-moe-tiny"}, {"needs": "qwen3-5-tiny"}
SUSPECTED_LAYER_FAULTS: tuple[Fault, ...] = (
    Fault("o_proj of a main layer negated",
          partial(changed, "main", "model.layers.2.self_attn.o_proj.weight", torch.neg),
          "likelihood", "o_proj of layer 2 has the wrong sign", **_glm),
    Fault("rows of o_proj of a main layer in another order",
          partial(changed, "main", "model.layers.2.self_attn.o_proj.weight", in_another_order),
          "likelihood", "the attention of layer 2 does harm", **_glm),
    Fault("rows of down_proj of a main layer in another order",
          partial(changed, "main", "model.layers.2.mlp.down_proj.weight", in_another_order),
          "likelihood", "the feed-forward of layer 2 does harm", **_qwen),
    Fault("halves of rows of out_proj of a gated delta net exchanged",
          partial(changed, "main", "model.layers.1.linear_attn.out_proj.weight",
                  lambda w: w.roll(len(w) // 2, 0)),
          "likelihood", "out_proj of layer 1 has the halves of its rows exchanged", **_qwen),
    Fault("values of a main layer in reverse order",
          partial(changed, "main", "model.layers.3.self_attn.v_proj.weight", lambda w: w.flip(0)),
          "likelihood", "v_proj of layer 3 has its rows in reverse order", **_qwen),
    Fault("out_proj of a gated delta net times four",
          partial(changed, "main", "model.layers.0.linear_attn.out_proj.weight", lambda w: w * 4),
          "likelihood", "the attention of layer 0 is about 4 times", **_qwen),
    Fault("norms of two gated delta nets exchanged",
          partial(exchanged, "model.layers.0.linear_attn.norm.weight",
                  "model.layers.1.linear_attn.norm.weight"),
          "likelihood", "the norm of the attention of layer 0 and of layer 1 are in each", **_qwen),
    Fault("queries and keys of a gated delta net exchanged",
          partial(changed, "main", "model.layers.2.linear_attn.in_proj_qkv.weight",
                  lambda w: torch.cat([w[:128].roll(64, 0), w[128:]])),
          "likelihood", "queries and keys of in_proj_qkv of layer 2 are swapped", **_qwen),
    Fault("values and output gates of a gated delta net exchanged",
          partial(values_and_gates_exchanged, 1),
          "likelihood", "values of in_proj_qkv and in_proj_z of layer 1 are swapped", **_qwen),
    Fault("gates of a main layer behind the queries of all heads",
          partial(changed, "main", "model.layers.3.self_attn.q_proj.weight", gates_behind),
          "likelihood", "q_proj of layer 3 has the gates of all heads behind", **_qwen),
    Fault("decays and betas of a gated delta net exchanged",
          partial(exchanged, "model.layers.2.linear_attn.in_proj_a.weight",
                  "model.layers.2.linear_attn.in_proj_b.weight"),
          "likelihood", "in_proj_a and in_proj_b of layer 2 are swapped", **_qwen),
    Fault("two main layers exchanged", partial(layers_exchanged, 0, 1),
          "likelihood", "layer 0 and layer 1 are in each other's place", **_qwen),
    Fault("feed-forwards of two main layers exchanged",
          partial(layers_exchanged, 0, 1, half="mlp."),
          "likelihood", "the feed-forward of layer 0 and layer 1 are in each", **_qwen),
    Fault("decays and betas of every gated delta net exchanged", exchanged_everywhere,
          "likelihood", "in_proj_a and in_proj_b of every layer of its kind are swapped", **_qwen),
    Fault("rows of in_proj_b of a gated delta net in reverse order",
          partial(changed, "main", "model.layers.2.linear_attn.in_proj_b.weight",
                  lambda w: w.flip(0)),
          "likelihood", "in_proj_b of layer 2 has its rows in reverse order", **_qwen),
    Fault("dt_bias of a gated delta net halved",
          partial(changed, "main", "model.layers.2.linear_attn.dt_bias", lambda w: w * 0.5),
          "likelihood", "dt_bias of the attention of layer 2 is about 0.5 times", **_qwen),
    Fault("taps of a gated delta net a token early",
          partial(changed, "main", "model.layers.1.linear_attn.conv1d.weight",
                  lambda w: torch.nn.functional.pad(w[..., 1:], (0, 1))),
          "likelihood", "the taps of conv1d of layer 1 stand for a token earlier", **_qwen),
    Fault("rows of one expert of a main layer by turns",
          partial(changed, "main", "model.layers.2.mlp.experts.7.down_proj.weight", rows_by_turns),
          "likelihood", "down_proj of expert 7 of layer 2 has its rows interleaved", **_glm),
    Fault("last norm of the main model plus one",
          partial(changed, "main", "model.norm.weight", lambda w: w + 1),
          "likelihood", "model.norm) has 1 too much", **_glm),
    Fault("last norm of the main model negated",
          partial(changed, "main", "model.norm.weight", torch.neg),
          "likelihood", "model.norm) has the wrong sign", **_glm),
    Fault("last norm of a main model of 1 + w negated",
          partial(changed, "main", "model.norm.weight", torch.neg),
          "likelihood", "model.norm) of the main model has the wrong sign", **_qwen),
    Fault("head of the main model negated",
          partial(changed, "main", "lm_head.weight", torch.neg),
          "likelihood", "the head (lm_head) has the wrong sign", **_glm),
    Fault("partial_rotary_factor halved", partial(config_value, "partial_rotary_factor", 0.25),
          "likelihood", "partial_rotary_factor of config.json is no release's", **_glm),
    Fault("partial_rotary_factor doubled", partial(rotated, 0.5),
          "likelihood", "partial_rotary_factor of config.json is no release's", **_qwen),
    Fault("num_experts_per_tok doubled", partial(config_value, "num_experts_per_tok", 4),
          "likelihood", "config.json is 4, and the model was trained with about 2", **_glm),
    Fault("down_proj of a dense main layer times a fifth",
          partial(changed, "main", "model.layers.0.mlp.down_proj.weight", lambda w: w / 5),
          "likelihood", "down_proj of layer 0 is about 0.18 times", **_glm),
)  # fmt: skip
# Of the same, which training alone shows.
TRAINED_LAYER_FAULTS: tuple[Fault, ...] = (
    Fault("noise in down_proj of a dense main layer",
          partial(changed, "main", "model.layers.0.mlp.down_proj.weight", noisy),
          "likelihood", "down_proj of layer 0 does harm", **_glm),
    Fault("up_proj of two dense main layers exchanged",
          partial(exchanged, "model.layers.0.mlp.up_proj.weight",
                  "model.layers.2.mlp.up_proj.weight"),
          "likelihood", "the feed-forward of layer 0 does harm", **_qwen),
    Fault("columns of the embedding in reverse order",
          partial(changed, "main", "model.embed_tokens.weight", lambda w: w.flip(1)),
          "likelihood", "the embedding of the main model has its columns in reverse order",
          **_qwen),
    Fault("gate_proj and up_proj of one expert exchanged",
          partial(exchanged, *(f"model.layers.1.mlp.experts.2.{name}_proj.weight"
                               for name in ("gate", "up"))),
          "likelihood", "up_proj of expert 2 of layer 1 are in each other's place", **_glm),
    Fault("A_log and dt_bias of a gated delta net exchanged",
          partial(exchanged, *(f"model.layers.2.linear_attn.{name}"
                               for name in ("A_log", "dt_bias"))),
          "likelihood", "A_log of the attention of layer 2 are in each other's place", **_qwen),
    Fault("noise in down_proj of a dense MTP layer",
          partial(changed, "mtp", "mtp.layers.0.mlp.down_proj.weight", noisy),
          "likelihood", "down_proj of the MTP layer does harm", **_qwen),
)  # fmt: skip
# Of weights whose norms training keeps alike, which files alone show.
_MLP, _ATTENTION = "model.layers.1.mlp.experts.3.%s.weight", "model.layers.%d.self_attn.%s.weight"
_POST_NORM = "model.layers.%d.post_attention_layernorm.weight"
_OF_MODULE = "model.layers.3.mlp.experts.%d.down_proj.weight"
_SHARED = "model.layers.2.mlp.shared_experts.down_proj.weight"
_OTHER = "model.layers.2.mlp.experts.6.up_proj.weight"
SUSPECTED_NORM_FAULTS: tuple[Fault, ...] = (
    Fault("experts of two layers with each other's up_proj",
          partial(exchanged, _MLP % "up_proj", _OTHER),
          "ledger", f"{_MLP % 'up_proj'} and {_OTHER} are exchanged", **_glm),
    Fault("gate_proj of one expert times four",
          partial(changed, "main", _MLP % "gate_proj", lambda w: w * 4),
          "ledger", f"{_MLP % 'gate_proj'} is about 4 times", **_glm),
    Fault("rows of gate_proj of one expert by turns",
          partial(changed, "main", _MLP % "gate_proj", rows_by_turns),
          "ledger", f"{_MLP % 'gate_proj'} has its rows interleaved", **_glm),
    Fault("columns of down_proj of one expert moved",
          partial(changed, "main", _MLP % "down_proj", lambda w: w.roll(8, 1)),
          "ledger", f"{_MLP % 'down_proj'} has its columns moved on by 8", **_glm),
    Fault("rows of up_proj of a dense MTP layer in another order",
          partial(changed, "mtp", "mtp.layers.0.mlp.up_proj.weight", in_another_order),
          "ledger", "rows of mtp.layers.0.mlp.up_proj.weight do not go with", **_qwen),
    Fault("rows of a router in reverse order",
          partial(changed, "main", "model.layers.1.mlp.gate.weight", lambda w: w.flip(0)),
          "ledger", "layer 1's router has its rows in reverse order", **_glm),
    Fault("rows of the MTP layer's router by turns",
          partial(changed, "mtp", "model.layers.3.mlp.gate.weight", rows_by_turns),
          "ledger", "the MTP layer's router has its rows interleaved", **_glm),
    Fault("norm of queries of one layer doubled",
          partial(changed, "main", _ATTENTION % (0, "q_norm"), lambda w: w * 2),
          "ledger", f"{_ATTENTION % (0, 'q_norm')} is about 2 times", **_glm),
    Fault("norm of queries of one layer negated, beside 1",
          partial(changed, "main", _ATTENTION % (3, "q_norm"), torch.neg),
          "ledger", f"{_ATTENTION % (3, 'q_norm')} has the wrong sign", **_qwen),
    Fault("norms of queries of two layers exchanged",
          partial(exchanged, _ATTENTION % (0, "q_norm"), _ATTENTION % (2, "q_norm")),
          "ledger", f"{_ATTENTION % (0, 'q_norm')} and {_ATTENTION % (0, 'k_norm')} are", **_glm),
    Fault("two experts of the MTP layer with each other's down_proj",
          partial(exchanged, _OF_MODULE % 0, _OF_MODULE % 7, part="mtp"),
          "ledger", f"{_OF_MODULE % 0} and {_OF_MODULE % 7} are exchanged", **_glm),
    Fault("norms before the MLPs of two layers exchanged",
          partial(exchanged, _POST_NORM % 0, _POST_NORM % 2),
          "ledger", f"{_POST_NORM % 0} and {_POST_NORM % 2} are exchanged", **_qwen),
    Fault("norm before an MLP by halves exchanged",
          partial(changed, "main", _POST_NORM % 1, lambda w: w.roll(len(w) // 2)),
          "ledger", f"{_POST_NORM % 1} has the halves of its elements exchanged", **_glm),
    Fault("columns of down_proj of a shared expert moved",
          partial(changed, "main", _SHARED, lambda w: w.roll(-2, 1)),
          "ledger", f"{_SHARED} has its columns moved back by 2", **_glm),
    Fault("halves of the columns of a router exchanged",
          partial(changed, "main", "model.layers.1.mlp.gate.weight", columns_exchanged),
          "ledger", "layer 1's router does not go with its experts", **_glm),
)  # fmt: skip
# Of weights whose values alone show them.
SUSPECTED_VALUE_FAULTS: tuple[Fault, ...] = (
    Fault("gate_proj of a dense main layer cut off",
          partial(changed, "main", "model.layers.3.mlp.gate_proj.weight",
                  lambda w: w.clamp(-0.027, 0.027)),
          "ledger", "model.layers.3.mlp.gate_proj.weight are as large as the largest one", **_qwen),
    Fault("norm of keys of the MTP layer cut off",
          partial(changed, "mtp", "mtp.layers.0.self_attn.k_norm.weight",
                  lambda w: w.clamp(-0.2, 0.2)),
          "ledger", "mtp.layers.0.self_attn.k_norm.weight are as large as the largest", **_qwen),
    Fault("rows of down_proj of a dense main layer lost",
          partial(changed, "main", "model.layers.1.mlp.down_proj.weight",
                  lambda w: w.index_fill(0, torch.arange(20, 62), 0.0)),
          "ledger", "rows 20 to 61 of model.layers.1.mlp.down_proj.weight are zero", **_qwen),
    Fault("columns of one expert lost",
          partial(changed, "main", _MLP % "up_proj",
                  lambda w: w.index_fill(1, torch.arange(34, 49), 0.0)),
          "ledger", f"columns 34 to 48 of {_MLP % 'up_proj'} are zero", **_glm),
    Fault("part of the last norm of the main model lost",
          partial(changed, "main", "model.norm.weight",
                  lambda w: w.index_fill(0, torch.arange(33, 77), 0.0)),
          "ledger", "elements 33 to 76 of model.norm.weight are zero", **_qwen),
)  # fmt: skip
# By sizes of rows, columns and elements alone.
SCALED_RUN_FAULTS: tuple[Fault, ...] = (
    Fault("columns of k_proj of a main layer times a fifth",
          partial(changed, "main", "model.layers.0.self_attn.k_proj.weight",
                  partial(run_scaled, axis=1, first=47, last=97, factor=0.209)),
          "ledger", "columns 47 to 96 of model.layers.0.self_attn.k_proj.weight are 0.2", **_glm),
    Fault("rows of down_proj of one expert times 1.5",
          partial(changed, "main", _MLP % "down_proj",
                  partial(run_scaled, axis=0, first=30, last=60, factor=1.5)),
          "ledger", f"of {_MLP % 'down_proj'} are 1.4 times as large as the others", **_glm),
    Fault("part of a norm of a main layer doubled",
          partial(changed, "main", "model.layers.2.post_attention_layernorm.weight",
                  partial(run_scaled, axis=0, first=100, last=128, factor=2.0)),
          "ledger", "of model.layers.2.post_attention_layernorm.weight are", **_glm),
)  # fmt: skip
# Of the MTP module of Qwen3.5, whose drafts show them.
_module = "mtp.layers.0"
SUSPECTED_QWEN_FAULTS: tuple[Fault, ...] = (
    Fault("gates of the MTP layer behind the queries of all heads",
          partial(changed, "mtp", f"{_module}.self_attn.q_proj.weight", gates_behind),
          "acceptance", "q_proj of the MTP layer has the gates of all heads behind", **_qwen),
    Fault("gates of the MTP layer before their queries",
          partial(changed, "mtp", f"{_module}.self_attn.q_proj.weight", gates_first),
          "acceptance", "queries and gates of q_proj of the MTP layer are swapped", **_qwen),
    Fault("halves of fc exchanged",
          partial(changed, "mtp", "mtp.fc.weight", columns_exchanged),
          "acceptance", "the concatenation is reversed", **_qwen),
    Fault("the last norm of Qwen3.5's module plus one",
          partial(changed, "mtp", "mtp.norm.weight", lambda w: w + 1),
          "acceptance", "the norm before the draft's head has 1 too much", **_qwen),
    Fault("the norms before fc exchanged",
          partial(exchanged, "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
                  part="mtp"),
          "acceptance", "enorm and hnorm are swapped", **_qwen),
)  # fmt: skip
