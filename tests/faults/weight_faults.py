"""Faults of weights, in intact files that agree with their manifest."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cases import edit_json
from faults import planting
from faults.fault import Fault
from faults.small_model import CONFIG, MTP, write_dense, write_row

EXPERT = f"{MTP}.mlp.experts.1.gate_proj"
OTHER = f"{MTP}.mlp.experts.2.gate_proj"
UP = f"{MTP}.mlp.experts.1.up_proj"
DOWN = f"{MTP}.mlp.experts.1.down_proj"
MAIN_EXPERT = "model.layers.5.mlp.experts.1.down_proj"
Change = Callable[[torch.Tensor], torch.Tensor]


def changed(part: str, name: str, how: Change, bundle: Path) -> None:
    planting.change(bundle / part, name, how)


def mtp(name: str, how: Change) -> Callable[[Path], None]:
    """Planting of a change of one tensor of the draft."""
    return partial(changed, "mtp", name, how)


def main(name: str, how: Change) -> Callable[[Path], None]:
    """Planting of a change of one tensor of the main model."""
    return partial(changed, "main", name, how)


def memory_never_written(tensor: torch.Tensor) -> torch.Tensor:
    """Memory as malloc returns it: pointers, text and old data."""
    raw = bytes(range(7, 256, 3)) * (tensor.numel() * tensor.element_size() // 83 + 1)
    size = tensor.numel() * tensor.element_size()
    return torch.frombuffer(bytearray(raw[:size]), dtype=tensor.dtype).view(tensor.shape)


def nan_code(codes: torch.Tensor) -> torch.Tensor:
    changed = codes.view(torch.uint8).clone()
    changed[3, 5] = 0x7F
    return changed.view(codes.dtype)


def rounded_up(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale)))


def all_scales_rounded_up(bundle: Path) -> None:
    for part in ("main", "mtp"):
        folder = bundle / part
        planting.change_all(folder, planting.names(folder, "weight_scale_inv"), rounded_up)


def inverted_everywhere(bundle: Path) -> None:
    for part in ("main", "mtp"):
        folder = bundle / part
        planting.change_all(folder, planting.names(folder, "weight_scale_inv"), lambda s: 1 / s)


def flip_bits(mask: int, packed: torch.Tensor) -> torch.Tensor:
    return (packed.contiguous().view(torch.uint8) ^ mask).view(packed.dtype)


def nibbles_swapped(packed: torch.Tensor) -> torch.Tensor:
    raw = packed.contiguous().view(torch.uint8)
    return ((raw << 4) | (raw >> 4)).view(packed.dtype)


def words_reversed(packed: torch.Tensor) -> torch.Tensor:
    raw = nibbles_swapped(packed).contiguous().view(torch.uint8)
    return raw.view(raw.shape[0], -1, 4).flip(2).reshape(raw.shape[0], -1).view(packed.dtype)


def bytes_of_words_reversed(packed: torch.Tensor) -> torch.Tensor:
    words = packed.contiguous().view(torch.uint8).view(packed.shape[0], -1, 4)
    return words.flip(2).reshape(packed.shape[0], -1).view(packed.dtype)


def scales_of_heads_doubled(bundle: Path) -> None:
    main("lm_head.weight_scale", lambda s: s * 2)(bundle)
    mtp(f"{MTP}.shared_head.head.weight_scale", lambda s: s * 2)(bundle)


def grouped_along_rows(bundle: Path) -> None:
    """Groups taken along N: codes and scales fit each other, but not as they are read."""
    folder, name = bundle / "main", MAIN_EXPERT
    packed = planting.read(folder, f"{name}.weight_packed")
    scale = planting.read(folder, f"{name}.weight_scale")
    turned = scale.t().reshape(scale.shape).contiguous()
    assert packed.shape[0] == packed.shape[1] * 8, "square, so that shapes do not tell"
    planting.write(folder, {f"{name}.weight_scale": turned})


def config_changed(changes: dict[str, Any], bundle: Path) -> None:
    """Values of both configs changed, None for those that were left out."""
    for part in ("main", "mtp"):
        planting.edit_config(
            bundle / part,
            lambda config: [
                config.pop(key) if value is None else config.update({key: value})
                for key, value in changes.items()
            ],
        )


def halves_swapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(tensor.shape[1] // 2, 1)


def rope_as_halves(rows: torch.Tensor) -> torch.Tensor:
    """The last 64 rows, interleaved pairs, as two halves."""
    rope = CONFIG["qk_rope_head_dim"]
    order = torch.arange(rope).view(-1, 2).t().reshape(-1)
    raw = rows.view(torch.uint8).clone() if rows.element_size() == 1 else rows.clone()
    raw[-rope:] = raw[-rope:][order]
    return raw.view(rows.dtype)


def swapped(part: str, one: str, other: str, bundle: Path) -> None:
    planting.swap(bundle / part, one, other)


def experts_swapped(bundle: Path) -> None:
    folder = bundle / "mtp"
    for projection in ("gate", "up", "down"):
        for end in ("weight", "weight_scale_inv"):
            one = f"{MTP}.mlp.experts.1.{projection}_proj.{end}"
            planting.swap(folder, one, one.replace("experts.1", "experts.2"))


def gate_and_up_swapped(bundle: Path) -> None:
    for end in ("weight", "weight_scale_inv"):
        planting.swap(bundle / "mtp", f"{EXPERT}.{end}", f"{UP}.{end}")


def expert_written_twice(bundle: Path) -> None:
    folder = bundle / "mtp"
    for end in ("weight", "weight_scale_inv"):
        planting.write(folder, {f"{OTHER}.{end}": planting.read(folder, f"{EXPERT}.{end}")})


def layer_6_for_the_mtp_layer(bundle: Path) -> None:
    """A loop over names that start with model.layers.6 overwrote layer 61's with layer 6's."""
    for end in ("weight", "weight_scale_inv"):
        name = f"{MTP}.self_attn.o_proj.{end}"
        theirs = planting.read(bundle / "main", name.replace(MTP, "model.layers.6"))
        planting.write(bundle / "mtp", {name: theirs})


def every_router_bias_dropped(bundle: Path) -> None:
    for part in ("main", "mtp"):
        biases = planting.names(bundle / part, "e_score_correction_bias")
        planting.change_all(bundle / part, biases, torch.zeros_like)


def draft_of_another_training(bundle: Path) -> None:
    """The draft of V3 beside the main model of R1: all shapes agree."""
    aside = bundle.parent / "another"
    write_row(write_dense(aside / "dense", seed=1), aside / "bundle", "fp8")
    shutil.rmtree(bundle / "mtp")
    shutil.copytree(aside / "bundle/mtp", bundle / "mtp")
    planting.sign(bundle)


def tokenizer_of_the_same_size(bundle: Path) -> None:
    def swap(tokenizer: dict[str, dict[str, dict[str, int]]]) -> None:
        vocab = tokenizer["model"]["vocab"]
        one, other = sorted(vocab, key=vocab.__getitem__)[10:12]
        vocab[one], vocab[other] = vocab[other], vocab[one]

    for part in ("main", "mtp"):
        edit_json(bundle / part / "tokenizer.json", swap)
    planting.sign(bundle)


def one_bit(tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor.contiguous().view(torch.uint8).clone()
    raw.view(-1)[777] ^= 0x08
    return raw.view(tensor.dtype)


def region_lost(tensor: torch.Tensor) -> torch.Tensor:
    """A few hundred bytes in the middle of it read as zeros."""
    changed = tensor.clone()
    changed.view(-1)[5000:5300] = 0
    return changed


def noisy(tensor: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    return (tensor.float() * (1 + 0.05 * noise)).to(tensor.dtype)


_SCALE = f"{EXPERT}.weight_scale_inv"
_PACKED = f"{MAIN_EXPERT}.weight_packed"
WEIGHT_FAULTS: tuple[Fault, ...] = (
    Fault("MTP matrix left at zero", mtp(f"{MTP}.eh_proj.weight", torch.zeros_like), "ledger",
          "is constant (zero): it was never written", seen_as="vLLM 35548"),
    Fault("MTP norm left at one", mtp(f"{MTP}.hnorm.weight", torch.ones_like), "ledger",
          "is constant (1)", seen_as="vLLM 35548"),
    Fault("MTP matrix never written", mtp(f"{MTP}.eh_proj.weight", memory_never_written), "ledger",
          "eh_proj.weight", seen_as="vLLM 35548"),
    Fault("NaN code in an fp8 weight", mtp(f"{EXPERT}.weight", nan_code), "ledger", "e4m3"),
    Fault("zero scale over codes", mtp(_SCALE, torch.zeros_like), "ledger", "block scale"),
    Fault("scale inverted", mtp(_SCALE, lambda s: 1 / s), "ledger", "its scale is inverted",
          seen_as="fp8_cast_bf16"),
    Fault("every scale inverted", inverted_everywhere, "ledger", "its scale is inverted"),
    Fault("scale left at one", mtp(_SCALE, torch.ones_like), "ledger", "left out"),
    Fault("ue8m0 scales rounded after quantizing", all_scales_rounded_up, "ledger",
          "rounded after the weights were quantized", seen_as="transformers 46763"),
    Fault("int4 offset 8 dropped", main(_PACKED, partial(flip_bits, 0x88)), "ledger",
          "the offset 8 was dropped", needs="int4"),
    Fault("w4afp8 offset added", main(f"{MAIN_EXPERT}.weight", partial(flip_bits, 0x88)), "ledger",
          "the offset 8 was dropped (or added)", needs="w4afp8"),
    Fault("int8 offset 128 dropped", mtp(f"{EXPERT}.weight_packed", partial(flip_bits, 0x80)),
          "ledger", "the offset 128 was dropped", needs="int8"),
    Fault("embedding of another checkpoint", mtp(f"{MTP}.embed_tokens.weight", noisy), "ledger",
          "of another checkpoint", seen_as="vllm-ascend 6754"),
    Fault("head of another checkpoint", mtp(f"{MTP}.shared_head.head.weight", noisy), "ledger",
          "of another checkpoint", seen_as="vllm-ascend 6754"),
    Fault("region of the main model's head lost", main("lm_head.weight", region_lost), "ledger",
          "one of the two is damaged"),
    Fault("offset 128 of a head in int8 dropped",
          mtp(f"{MTP}.shared_head.head.weight_packed", partial(flip_bits, 0x80)), "ledger",
          "the offset 128 was dropped", needs="int8 head"),
    Fault("scales of one of two heads in int8 doubled",
          main("lm_head.weight_scale", lambda s: s * 2), "ledger", "has the codes of lm_head",
          needs="int8 head"),
    Fault("draft of V3 with main of R1", draft_of_another_training, "ledger",
          "a V3 draft with an R1 main", seen_as="DeepSeek-V3 190"),
    Fault("layer 6 taken for layer 61", layer_6_for_the_mtp_layer, "ledger",
          "one was taken for the other", seen_as="xLLM's export tool"),
    Fault("one expert written twice", expert_written_twice, "ledger", "one was taken for"),
    Fault("router bias dropped", mtp(f"{MTP}.mlp.gate.e_score_correction_bias", torch.zeros_like),
          "ledger", "dropped and filled in"),
    Fault("router bias dropped in every layer", every_router_bias_dropped, "ledger",
          "a trained router's bias differs between experts"),
    Fault("region of the main model's head lost, source", main("lm_head.weight", region_lost),
          "ledger", "lm_head.weight is not the source's: 300 of its", source=True),
    Fault("layer 6 taken for layer 61, source", layer_6_for_the_mtp_layer, "weights",
          "it holds model.layers.6.self_attn.o_proj.weight", source=True),
    Fault("draft of V3 with main of R1, source", draft_of_another_training, "weights",
          "another ", source=True),
    Fault("scale inverted, source", mtp(_SCALE, lambda s: 1 / s), "weights",
          "its scales are inverted: the reciprocal", source=True),
    Fault("scale left at one, source", mtp(_SCALE, torch.ones_like), "weights",
          "its scales are all one: they were left out", source=True),
    Fault("scales permuted", mtp(_SCALE, lambda s: s.flip(0)), "weights",
          "its scales are permuted", source=True, seen_as="vllm-mlx 658"),
    Fault("scales along the other axis", mtp(_SCALE, lambda s: s.t()), "weights",
          "the other axis", source=True),
    Fault("scales off by a factor", mtp(_SCALE, lambda s: s * 448), "weights",
          "every scale is 448 times", source=True),
    Fault("one expert's scale doubled", mtp(_SCALE, lambda s: s * 2), "weights",
          "every scale is 2 times", source=True),
    Fault("scales of another tensor",
          partial(swapped, "mtp", _SCALE, f"{OTHER}.weight_scale_inv"), "weights",
          "its scales are not those of its codes", source=True),
    Fault("one ue8m0 scale rounded after quantizing", mtp(_SCALE, rounded_up), "weights",
          "rounded to powers of two (ue8m0) after", source=True, seen_as="transformers 46763"),
    Fault("concatenation reversed", mtp(f"{MTP}.eh_proj.weight", halves_swapped), "weights",
          "two halves of columns are swapped", source=True, seen_as="mlx-lm 1469"),
    Fault("enorm and hnorm swapped",
          partial(swapped, "mtp", f"{MTP}.enorm.weight", f"{MTP}.hnorm.weight"), "weights",
          f"it holds {MTP}.hnorm.weight", source=True, seen_as="mlx-lm 1469"),
    Fault("two experts swapped", experts_swapped, "weights", f"it holds {OTHER}.weight",
          source=True),
    Fault("an expert's gate and up swapped", gate_and_up_swapped, "weights",
          f"it holds {UP}.weight", source=True),
    Fault("router bias dropped, source",
          mtp(f"{MTP}.mlp.gate.e_score_correction_bias", torch.zeros_like), "weights",
          "dropped and filled in", source=True),
    Fault("rotary rows as halves", mtp(f"{MTP}.self_attn.kv_a_proj_with_mqa.weight",
          rope_as_halves), "weights", "its rotary rows are stored as two halves", source=True),
    Fault("int4 nibbles swapped", main(_PACKED, nibbles_swapped), "weights",
          "nibble order", needs="int4", source=True),
    Fault("int4 words reversed", main(_PACKED, words_reversed), "weights",
          "the order of the codes in a word", needs="int4", source=True),
    Fault("int4 offset 8 dropped, source", main(_PACKED, partial(flip_bits, 0x88)), "weights",
          "the offset 8 was dropped", needs="int4", source=True),
    Fault("int4 groups along the wrong axis", grouped_along_rows, "weights",
          "the groups were taken over rows", needs="int4", source=True),
    Fault("w4afp8 nibbles swapped", main(f"{MAIN_EXPERT}.weight", nibbles_swapped), "weights",
          "nibble order", needs="w4afp8", source=True),
    Fault("nvfp4 half of an expert under another number",
          mtp(f"{UP}.weight_global_scale", lambda number: number * 1.25), "ledger",
          "have unlike numbers of the whole matrix", needs="nvfp4",
          seen_as="TensorRT-LLM 14199, vLLM 54974"),
    Fault("nvfp4 latent keys under another number than queries",
          main("model.layers.5.self_attn.q_a_proj.weight_global_scale", lambda one: one / 2),
          "ledger", "have unlike numbers of the whole matrix", needs="nvfp4"),
    Fault("nvfp4 reciprocal number", mtp(f"{DOWN}.weight_global_scale", torch.reciprocal),
          "ledger", "the reciprocal of what its layout has", needs="nvfp4"),
    Fault("ModelOpt's nvfp4 reciprocal number",
          main(f"{MAIN_EXPERT}.weight_scale_2", torch.reciprocal),
          "ledger", "the reciprocal of what its layout has", needs="modelopt"),
    Fault("nvfp4 nibbles swapped", mtp(f"{DOWN}.weight_packed", nibbles_swapped), "weights",
          "nibble order", needs="nvfp4", source=True),
    Fault("nvfp4 half of an expert under another input scale",
          mtp(f"{UP}.input_global_scale", lambda number: number * 3), "ledger",
          "have unlike scales of their inputs", needs="nvfp4 inputs"),
    Fault("mxfp4 exponents one too large", mtp(f"{DOWN}.weight_scale", lambda one: one + 1),
          "weights", "exponents of its scales (e8m0) are one too large", needs="mxfp4",
          source=True),
    Fault("mxfp8 exponents one too small", main(f"{MAIN_EXPERT}.weight_scale", lambda one: one - 1),
          "weights", "exponents of its scales (e8m0) are one too small", needs="mxfp8",
          source=True),
    Fault("int8 words reversed", mtp(f"{EXPERT}.weight_packed", bytes_of_words_reversed), "weights",
          "the order of the codes in a word", needs="int8", source=True),
    Fault("scales of both heads in int8 doubled", scales_of_heads_doubled, "weights",
          "every scale is 2 times", needs="int8 head", source=True),
    Fault("words of a head in int8 reversed",
          main("lm_head.weight_packed", bytes_of_words_reversed), "weights",
          "the order of the codes in a word", needs="int8 head", source=True),
    Fault("transposed matrix", main("model.layers.5.self_attn.o_proj.weight", torch.t), "weights",
          "it is transposed", needs="bf16", source=True),
    Fault("one bit of a weight, then checksummed", mtp(f"{EXPERT}.weight", one_bit), "weights",
          "elements differ: damaged", source=True),
    Fault("weights of another version", main("model.layers.5.self_attn.o_proj.weight", noisy),
          "weights", "another version", needs="bf16", source=True),
    Fault("yarn dropped", partial(config_changed, {"rope_scaling": None}), "weights",
          "yarn's attention scale was dropped or changed", source=True),
    Fault("another rotary base", partial(config_changed, {"rope_theta": 500000.0}), "weights",
          "rope_theta is 500000.0", source=True),
    Fault("experts' weights not normalised", partial(config_changed, {"norm_topk_prob": False}),
          "weights", "norm_topk_prob is False", source=True),
    Fault("tokenizer of another model of the same size", tokenizer_of_the_same_size, "weights",
          "another model's tokenizer", source=True),
)  # fmt: skip
