"""Faults that headers, configs and checksums show, without decoding a weight."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cases import add_tensor, drop_tensor, edit_json
from faults import planting
from faults.fault import Fault
from faults.small_model import MTP

EXPERT = f"{MTP}.mlp.experts.1.down_proj"
SCALE = f"{EXPERT}.weight_scale_inv"


def manifest_missing(bundle: Path) -> None:
    (bundle / planting.MANIFEST).unlink()


def manifest_of_another_version(bundle: Path) -> None:
    edit_json(bundle / planting.MANIFEST, lambda manifest: manifest.update(format_version=99))


def manifest_entry_of_another_type(bundle: Path) -> None:
    edit_json(bundle / planting.MANIFEST, lambda m: m["parts"]["mtp"].update(shards=[]))


def journal_left(bundle: Path) -> None:
    (bundle / ".mtp_export.journal").write_text("{}\n")


def mtp_tensors_missing(bundle: Path) -> None:
    planting.write(bundle / "mtp", dict.fromkeys(planting.names(bundle / "mtp", MTP, "self_attn")))


def mtp_part_missing(bundle: Path) -> None:
    shutil.rmtree(bundle / "mtp")
    edit_json(bundle / planting.MANIFEST, lambda manifest: manifest["parts"].pop("mtp"))


def mtp_no_longer_advertised(bundle: Path) -> None:
    planting.edit_config(bundle / "main", lambda c: c.update(num_nextn_predict_layers=0))


def one_expert_missing(bundle: Path) -> None:
    planting.write(bundle / "mtp", dict.fromkeys(planting.names(bundle / "mtp", "experts.3.")))


def tensor_not_in_index(bundle: Path) -> None:
    edit_json(bundle / "mtp" / planting.INDEX, lambda i: i["weight_map"].pop(f"{EXPERT}.weight"))
    planting.sign(bundle)


def index_entry_without_tensor(bundle: Path) -> None:
    drop_tensor(bundle / "mtp", f"{EXPERT}.weight", from_index=False)
    planting.sign(bundle)


def index_entry_for_another_shard(bundle: Path) -> None:
    places = planting.weight_map(bundle / "main")
    first, last = min(places.values()), max(places.values())
    name = next(name for name, shard in places.items() if shard == first)
    edit_json(bundle / "main" / planting.INDEX, lambda i: i["weight_map"].update({name: last}))
    planting.sign(bundle)


def stale_extra_shard(bundle: Path) -> None:
    shard = planting.only_shard(bundle / "mtp")
    data = bytearray(shard.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start:] = bytes(byte ^ 1 for byte in data[start:])
    shard.with_name("model-00002-of-00002.safetensors").write_bytes(data)
    planting.sign(bundle)


def stale_pickle(bundle: Path) -> None:
    (bundle / "mtp" / "pytorch_model.bin").write_bytes(b"stale")


def truncated_shard(bundle: Path) -> None:
    shard = planting.only_shard(bundle / "mtp")
    shard.write_bytes(shard.read_bytes()[:-100])


def flipped_byte(bundle: Path) -> None:
    planting.flip_a_byte(planting.only_shard(bundle / "mtp"), -1000)


def flipped_byte_in_a_header(bundle: Path) -> None:
    planting.flip_a_byte(planting.only_shard(bundle / "mtp"), 40)


def swapped_shards(bundle: Path) -> None:
    shards = sorted((bundle / "main").glob("*.safetensors"))
    aside = shards[0].with_suffix(".aside")
    for path, to in ((shards[0], aside), (shards[1], shards[0]), (aside, shards[1])):
        path.rename(to)


def shard_of_another_bundle(bundle: Path) -> None:
    """Names and sizes are right, the bytes are not: an interrupted copy of another export."""
    shard = planting.only_shard(bundle / "mtp")
    raw = bytearray(shard.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    raw[start:] = bytes(byte ^ 1 for byte in raw[start:])
    shard.write_bytes(raw)


def config_edited(bundle: Path) -> None:
    edit_json(bundle / "main/config.json", lambda config: config.update(rms_norm_eps=1e-5))
    edit_json(bundle / "mtp/config.json", lambda config: config.update(rms_norm_eps=1e-5))


def scale_missing(bundle: Path) -> None:
    planting.write(bundle / "mtp", {SCALE: None})


def input_scale_missing(bundle: Path) -> None:
    planting.write(bundle / "mtp", {f"{EXPERT}.input_global_scale": None})


def scale_without_weight(bundle: Path) -> None:
    planting.write(bundle / "mtp", {f"{EXPERT}.weight": None})


def stray_scale(bundle: Path) -> None:
    add_tensor(bundle / "mtp", SCALE, f"{MTP}.eh_proj.weight_scale_inv")
    planting.sign(bundle)


def scale_of_another_shape(bundle: Path) -> None:
    planting.change(bundle / "mtp", SCALE, lambda scale: scale[:1])


def bf16_draft_under_fp8_config(bundle: Path) -> None:
    """The draft was dequantized, and both configs still say fp8."""
    folder = bundle / "mtp"
    changes: dict[str, torch.Tensor | None] = {}
    for name in planting.names(folder, "weight_scale_inv"):
        weight = name.removesuffix("_scale_inv")
        changes |= {name: None, weight: planting.read(folder, weight).float().bfloat16()}
    planting.write(folder, changes)


def fp8_draft_without_config(bundle: Path) -> None:
    """The reverse: native fp8 tensors, and a config that says nothing of them."""
    for part in ("main", "mtp"):
        planting.edit_config(bundle / part, lambda config: config.pop("quantization_config"))


def main_config_silent_on_the_draft(bundle: Path) -> None:
    """The draft is bf16 and its own config says so, but the main config, which vLLM builds the
    draft with, says fp8."""
    bf16_draft_under_fp8_config(bundle)
    planting.edit_config(bundle / "mtp", lambda config: config.pop("quantization_config"))


def one_layer_in_bf16(bundle: Path) -> None:
    name = f"{MTP}.self_attn.o_proj.weight"
    weight = planting.read(bundle / "mtp", name).float().bfloat16()
    planting.write(bundle / "mtp", {name: weight, f"{name}_scale_inv": None})


def _edit_both_quantizations(bundle: Path, how: Any) -> None:
    for part in ("main", "mtp"):
        planting.edit_config(bundle / part, lambda config: how(config["quantization_config"]))


def ignore_list_escaped(bundle: Path) -> None:
    """SGLang replaces the literal model.layers.N in patterns: an escaped one matches nothing."""
    layer = MTP.replace(".", r"\.")
    _edit_both_quantizations(
        bundle,
        lambda q: q.update(
            ignore=[f"re:{layer}\\..*self_attn.*", "re:model.layers.[0-7].*self_attn.*"]
            + [entry for entry in q["ignore"] if "self_attn" not in entry]
        ),
    )


def ignore_list_without_attention(bundle: Path) -> None:
    _edit_both_quantizations(
        bundle,
        lambda q: q.update(ignore=[entry for entry in q["ignore"] if "self_attn" not in entry]),
    )


def ignore_list_with_half_a_fused_linear(bundle: Path) -> None:
    """gate_proj is bf16 and ignored, up_proj is packed; engines load them as gate_up_proj."""
    _edit_both_quantizations(bundle, lambda q: q["ignore"].append("re:.*shared_experts.gate_proj$"))
    for part in ("main", "mtp"):
        _unpack(bundle / part, "shared_experts.gate_proj")


def _unpack(folder: Path, module: str) -> None:
    """Packed weights replaced by bf16 ones of the right shape."""
    changes: dict[str, torch.Tensor | None] = {}
    for name in planting.names(folder, f"{module}.weight_packed"):
        stem = name.removesuffix("_packed")
        rows, columns = planting.read(folder, f"{stem}_shape").tolist()
        changes |= {name: None, f"{stem}_scale": None, f"{stem}_shape": None}
        changes[stem] = torch.randn(rows, columns).bfloat16()
    planting.write(folder, changes)


def int4_config_over_int8(bundle: Path) -> None:
    def change(quantization: dict[str, Any]) -> None:
        for group in quantization["config_groups"].values():
            group["weights"] |= {"num_bits": 4, "strategy": "group", "group_size": 128}

    _edit_both_quantizations(bundle, change)


def wrong_group_size(bundle: Path) -> None:
    def change(quantization: dict[str, Any]) -> None:
        for group in quantization["config_groups"].values():
            if group["weights"]["num_bits"] == 4:
                group["weights"]["group_size"] = 128

    _edit_both_quantizations(bundle, change)


def unknown_quantization(bundle: Path) -> None:
    _edit_both_quantizations(bundle, lambda q: q.update(quant_method="hqq"))


def tokenizer_missing(bundle: Path) -> None:
    for part in ("main", "mtp"):
        (bundle / part / "tokenizer.json").unlink()
    planting.sign(bundle)


def tokenizer_of_another_model(bundle: Path) -> None:
    def shrink(tokenizer: dict[str, Any]) -> None:
        vocab = tokenizer["model"]["vocab"]
        for token in sorted(vocab, key=vocab.__getitem__)[100:]:
            del vocab[token]

    for part in ("main", "mtp"):
        edit_json(bundle / part / "tokenizer.json", shrink)
    planting.sign(bundle)


def tokenizer_with_other_end(bundle: Path) -> None:
    for part in ("main", "mtp"):
        edit_json(
            bundle / part / "tokenizer_config.json", lambda t: t.update(eos_token="<unused3>")
        )
    planting.sign(bundle)


def token_id_as_text(bundle: Path) -> None:
    for part in ("main", "mtp"):
        edit_json(bundle / part / "tokenizer.json", lambda t: t["model"]["vocab"].update(a="97"))
    planting.sign(bundle)


def draft_with_another_tokenizer(bundle: Path) -> None:
    def swap(tokenizer: dict[str, Any]) -> None:
        vocab = tokenizer["model"]["vocab"]
        one, other = sorted(vocab, key=vocab.__getitem__)[10:12]
        vocab[one], vocab[other] = vocab[other], vocab[one]

    edit_json(bundle / "mtp/tokenizer.json", swap)
    planting.sign(bundle)


def layer_6_beside_the_mtp_layer(bundle: Path) -> None:
    """The prefix model.layers.6 without its dot takes layer 6 along with layers 60 to 69."""
    folder = bundle / "mtp"
    name = f"{MTP}.input_layernorm.weight"
    planting.write(folder, {name.replace(MTP, "model.layers.6"): planting.read(folder, name)})


def draft_of_a_model_of_other_sizes(bundle: Path) -> None:
    planting.edit_config(bundle / "mtp", lambda c: c.update(n_group=1, routed_scaling_factor=1.0))


def draft_with_other_layer_number(bundle: Path) -> None:
    """The draft's tensors say layer 0 as LightLLM wants them, its config as vLLM wants it."""
    folder = bundle / "mtp"
    changes: dict[str, torch.Tensor | None] = {}
    for name in planting.names(folder, MTP):
        changes |= {name: None, name.replace(MTP, "model.layers.0"): planting.read(folder, name)}
    planting.write(folder, changes)


def yarn_scale_dropped(bundle: Path) -> None:
    """A converter that knows mscale alone."""
    for part in ("main", "mtp"):
        planting.edit_config(bundle / part, lambda c: c["rope_scaling"].pop("mscale_all_dim"))


def config_value(key: str, value: object) -> Callable[[Path], None]:
    """Planting of a value in both configs."""

    def plant(bundle: Path) -> None:
        for part in ("main", "mtp"):
            planting.edit_config(bundle / part, lambda config: config.update({key: value}))

    return plant


FILE_FAULTS: tuple[Fault, ...] = (
    Fault("manifest missing", manifest_missing, "files", "no manifest"),
    Fault("manifest of another version", manifest_of_another_version, "files", "version 99"),
    Fault("manifest entry of another type", manifest_entry_of_another_type, "files",
          "damaged at parts → mtp → shards"),
    Fault("export not finished", journal_left, "files", "did not finish"),
    Fault("MTP attention missing", mtp_tensors_missing, "files", "is missing",
          seen_as="vLLM 35548, llm-compressor 2735"),
    Fault("MTP part missing, still advertised", mtp_part_missing, "files",
          "advertises 1 MTP layer", seen_as="Model-Optimizer 2427"),
    Fault("MTP no longer advertised", mtp_no_longer_advertised, "files",
          "would serve without speculation", seen_as="llm-compressor 1630"),
    Fault("one MTP expert missing", one_expert_missing, "files", "is missing",
          seen_as="vLLM 35548"),
    Fault("tensor absent from the index", tensor_not_in_index, "files",
          "the index does not say so", seen_as="Model-Optimizer 2427"),
    Fault("index entry without tensor", index_entry_without_tensor, "files",
          "which its shard does not hold", seen_as="Model-Optimizer 2427"),
    Fault("index entry for another shard", index_entry_for_another_shard, "files",
          "the index does not say so"),
    Fault("stale extra shard", stale_extra_shard, "files", "that the index does not name",
          seen_as="vLLM 54230"),
    Fault("stale pickle beside the shards", stale_pickle, "files", "stale or foreign"),
    Fault("truncated shard", truncated_shard, "files", "truncated", seen_as="vmlx-swift 217"),
    Fault("one flipped bit in a weight", flipped_byte, "files", "other bytes than the export wrote",
          seen_as="vLLM 53537"),
    Fault("one flipped bit in a header", flipped_byte_in_a_header, "files", "header"),
    Fault("two shards swapped", swapped_shards, "files", "the index does not say so"),
    Fault("a shard of another export", shard_of_another_bundle, "files",
          "other bytes than the export wrote"),
    Fault("config edited after the export", config_edited, "files", "was changed after the export"),
    Fault("scale missing", scale_missing, "files", "is missing, though its weight is there",
          seen_as="fp8_cast_bf16"),
    Fault("nvfp4 input scale missing", input_scale_missing, "files", "input_global_scale",
          needs="nvfp4 inputs", seen_as="vLLM 45212"),
    Fault("scale without weight", scale_without_weight, "files", "without its weight"),
    Fault("stray scale on eh_proj", stray_scale, "files", "not a tensor of this model",
          seen_as="KeyError in vLLM"),
    Fault("scale of another shape", scale_of_another_shape, "files", "expected weight"),
    Fault("bf16 draft under an fp8 config", bf16_draft_under_fp8_config, "files",
          "by quantization_config an engine expects fp8_block", seen_as="vLLM 43304, 43893"),
    Fault("fp8 draft without a config", fp8_draft_without_config, "files",
          "by quantization_config an engine expects bf16", seen_as="SGLang 29781"),
    Fault("main config silent on the draft", main_config_silent_on_the_draft, "files",
          "vLLM builds the draft with", seen_as="vLLM 43893"),
    Fault("one linear in bf16", one_layer_in_bf16, "files", "is stored as weight BF16"),
    Fault("ignore list escaped", ignore_list_escaped, "files", "SGLang knows the draft's layer",
          needs="int8", seen_as="SGLang 35797"),
    Fault("ignore list without attention", ignore_list_without_attention, "files",
          "an engine expects int8_channel", needs="int8", seen_as="vLLM 53387"),
    Fault("ignore list with half a fused linear", ignore_list_with_half_a_fused_linear, "files",
          "patterns must match fused names", needs="int8", seen_as="vLLM 53387"),
    Fault("int4 config over int8 tensors", int4_config_over_int8, "files", "expected",
          needs="int8"),
    Fault("wrong int4 group size", wrong_group_size, "files", "weight_scale", needs="int4"),
    Fault("quantization that nobody reads", unknown_quantization, "files", "quantization method"),
    Fault("tokenizer missing", tokenizer_missing, "files", "no tokenizer", seen_as="vllm 31444"),
    Fault("tokenizer of another model", tokenizer_of_another_model, "files", "another model's"),
    Fault("tokenizer with another end of text", tokenizer_with_other_end, "files",
          "another model's tokenizer"),
    Fault("token id as text", token_id_as_text, "files", "'a' has the id '97'"),
    Fault("draft with another tokenizer", draft_with_another_tokenizer, "files",
          "the draft would read other ids"),
    Fault("layer 6 beside layer 61", layer_6_beside_the_mtp_layer, "files",
          "not a tensor of this model", seen_as="xLLM's export tool"),
    Fault("draft of another model: config", draft_of_a_model_of_other_sizes, "files",
          "the draft belongs to another model", seen_as="DeepSeek-V3 190"),
    Fault("yarn scale dropped", yarn_scale_dropped, "files", "yarn's attention scale was dropped"),
    Fault("rope_scaling that is no object", config_value("rope_scaling", 4.0), "files",
          "no usable rope_scaling"),
    Fault("hidden_size that is no number", config_value("hidden_size", {"value": 256}), "files",
          "no usable hidden_size"),
    Fault("draft in another engine's names", draft_with_other_layer_number, "files", "is missing"),
)  # fmt: skip
