"""Damaged checkpoints of others and good ones, from the trained miniatures.

Each says the lowest level of `verify` at which its damage can be told, and words, as regular
expressions, that the causes and repairs of the verdict must have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from verify import foreign_damages as damages
from verify.foreign_damages import Damage, FolderDamage, add, each, lose, put, rename, scaled
from verify.foreign_sources import (
    DEEPSEEK,
    GLM,
    INDEX,
    Checkpoint,
    ignore,
    modules,
    quantized,
    released,
    shortened,
)

Level = Literal["files", "weights", "run"]
INT4, FP8 = "compressed-tensors, int4", "compressed-tensors, fp8"
MTP_OF_GLM = r"re:.*layers\.3\..*"
AS_SGLANG_NAMES_IT = r"re:.*decoder\..*"


def _nothing(_: object) -> None:
    """Leave it as it is."""


@dataclass(frozen=True)
class Folder:
    """A checkpoint of others: damaged, with a level and words, or good."""

    name: str
    start: Callable[[], Checkpoint]
    damage: Damage = _nothing
    level: Level = "files"
    words: tuple[str, ...] = ()
    written: FolderDamage = _nothing

    def write(self, folder: Path) -> Path:
        checkpoint = self.start()
        self.damage(checkpoint)
        checkpoint.save(folder)
        self.written(folder)
        return folder


def glm(shards: int = 2, own_file: str = "") -> Callable[[], Checkpoint]:
    def start() -> Checkpoint:
        found = released(GLM)
        found.shards, found.own_file = shards, own_file
        return found

    return start


def deepseek() -> Checkpoint:
    return shortened(DEEPSEEK, 5)


def lost(method: str) -> Callable[[], Checkpoint]:
    return lambda: quantized(GLM, method, "lost")


def unquantized(method: str, *entries: str) -> Callable[[], Checkpoint]:
    """With the MTP layer unquantized, and entries in the list of what is."""
    return lambda: ignore(quantized(GLM, method, "unquantized"), *entries)


def listed(method: str) -> Callable[[], Checkpoint]:
    """With the MTP layer unquantized, and each of its linears in the list of what is."""

    def start() -> Checkpoint:
        found = quantized(GLM, method, "unquantized")
        names = (*modules(found), f"{found.layer}eh_proj")
        as_sglang = [name.replace(found.layer, "model.decoder.") for name in names]
        return ignore(found, *names, *as_sglang)

    return start


def both(method: str, *entries: str) -> Callable[[], Checkpoint]:
    """With the MTP layer quantized as the main model is."""
    return lambda: ignore(quantized(GLM, method, "quantized"), *entries)


def but_of(method: str, spared: str) -> Callable[[], Checkpoint]:
    """Unquantized, with each linear in the list but one kind's."""

    def start() -> Checkpoint:
        found = quantized(GLM, method, "unquantized")
        return ignore(found, *(name for name in modules(found) if spared not in name))

    return start


QWEN_NAMES = (
    (r"^model\.layers\.3\.eh_proj", "mtp.fc"),
    (r"^model\.layers\.3\.enorm", "mtp.pre_fc_norm_embedding"),
    (r"^model\.layers\.3\.hnorm", "mtp.pre_fc_norm_hidden"),
    (r"^model\.layers\.3\.shared_head\.norm", "mtp.norm"),
    (r"^model\.layers\.3\.", "mtp.layers.0."),
)
BLOCK = ((r"\.3\.(self_attn|mlp|input_layernorm|post_attention)", r".3.mtp_block.\1"),)
LOST = ("graft", "announce")


def _without(words: str) -> str:
    """A pattern of texts that lack these words."""
    return rf"(?s)\A(?!.*{words})"


DAMAGED = (
    Folder("lost by a quantization to int4", lost(INT4), words=(*LOST, "config.json")),
    Folder("lost by AWQ", lost("awq"), words=LOST),
    Folder(
        "in a pickle",
        glm(),
        lose(""),
        words=(
            r"pytorch_model-mtp\.bin, by its name the module's, is a pickle",
            "graft --main",
            _without("left it out"),
        ),
        written=damages.beside("pytorch_model-mtp.bin"),
    ),
    Folder("lost by a fine-tune, in one file", glm(1), lose(""), words=LOST),
    Folder("lost in blocks of fp8", deepseek, lose(""), words=LOST),
    Folder(
        "the MTP layer's shard is missing",
        glm(own_file="model-00003-of-00003.safetensors"),
        words=(r"model-00003-of-00003", "download|missing"),
        written=damages.without_file("model-00003-of-00003.safetensors"),
    ),
    Folder(
        "one expert is missing", glm(), lose(r"experts\.5\."), words=(r"lacks expert 5\b", "graft")
    ),
    Folder("hnorm is missing", glm(), lose("hnorm"), words=("hnorm",)),
    Folder(
        "hnorm is missing, and no list leaves the layer out",
        unquantized(INT4),
        lose("hnorm"),
        words=(r"hnorm\.weight is missing", "leaves them out nowhere"),
    ),
    Folder("eh_proj is missing", glm(), lose("eh_proj"), words=("eh_proj",)),
    Folder(
        "a scale is missing",
        deepseek,
        lose(r"experts\.3\.down_proj\.weight_scale_inv"),
        words=(r"experts\.3\.down_proj\.weight_scale_inv",),
    ),
    Folder("zero points are missing", both("awq"), lose("o_proj.qzeros"), words=("o_proj.qzeros",)),
    Folder(
        "tensors are missing from the index",
        glm(),
        words=(r"3\.self_attn\.[kqvo]", "index"),
        written=damages.unindexed(r"layers\.3\.self_attn"),
    ),
    Folder(
        "in a file outside the index",
        glm(own_file="mtp.safetensors"),
        words=(r"mtp\.safetensors", "index: vLLM and transformers"),
        written=damages.unindexed(r"layers\.3\."),
    ),
    Folder(
        "in a file of another name outside the index",
        glm(own_file="draft_head.safetensors"),
        words=(r"draft_head\.safetensors", "index: vLLM, SGLang and transformers"),
        written=damages.unindexed(r"layers\.3\."),
    ),
    Folder(
        "again in a file outside the index, with other values",
        glm(),
        words=(
            r"model-00003-of-00003\.safetensors.*SGLang load the file that the index names",
            "44 of its 44 tensors, such as model.layers.3",
            "It matters which is loaded: 44 of the 44",
        ),
        written=damages.repeated("model-00003-of-00003.safetensors", scaled(2)),
    ),
    Folder(
        "again in a file outside the index, with other values where no sample is",
        glm(),
        level="weights",
        words=(
            r"mtp\.safetensors.*SGLang load the file that the index names",
            "It matters which is loaded: 1 of the 44 tensors compared differ",
            _without("graft"),
        ),
        written=damages.repeated("mtp.safetensors", damages.first_of_a_matrix_changed),
    ),
    Folder(
        "again in a file outside the index, and another tensor",
        glm(),
        words=("It does not matter which is loaded", "44 of its 45 tensors"),
        written=damages.repeated("mtp.safetensors", more={"extra": torch.ones(2)}),
    ),
    Folder(
        "a shard is cut",
        glm(),
        words=("model-00002-of-00002",),
        written=damages.cut("model-00002-of-00002.safetensors"),
    ),
    Folder(
        "one layer further",
        glm(),
        rename([(r"layers\.3\.", "layers.4.")]),
        words=(r"begin with model\.layers\.4, where", r"model\.layers\.3\b"),
    ),
    Folder(
        "without model.",
        glm(),
        rename([(r"^model\.", "")]),
        words=(r"look for them with model\. before each",),
    ),
    Folder(
        "by Qwen's names", glm(), rename(QWEN_NAMES), words=(r"begin with mtp\.layers\.0, where",)
    ),
    Folder(
        "by vLLM's inner names",
        glm(),
        rename(BLOCK),
        words=(r"begin with model\.layers\.3\.mtp_block",),
    ),
    Folder(
        "its norm under another name",
        glm(),
        rename([("shared_head.norm", "norm")]),
        words=(r"shared_head\.norm",),
    ),
    Folder("int4 of which nothing is left out", unquantized(INT4), words=(r"layers\.3", "ignore")),
    Folder(
        "fp8 of which nothing is left out",
        unquantized("fp8"),
        words=(r"layers\.3", r"whole name \(data.to_add of --json\), to ignored_layers"),
    ),
    Folder(
        "AWQ of which nothing is left out",
        unquantized("awq"),
        words=(r"24 matrices", r"add model\.layers\.3, model\.decoder to modules_to_not_convert"),
    ),
    Folder(
        "GPTQ, whose experts SGLang quantizes whatever is left out",
        unquantized("gptq", r".*layers\.3\..*", r".*decoder\..*"),
        words=("SGLang builds every expert", "mtp-export graft"),
    ),
    Folder("left out though quantized", both(FP8, MTP_OF_GLM), words=(r"layers\\?\.3", "ignore")),
    Folder("left out but for v_proj", but_of(INT4, "v_proj"), words=("v_proj|qkv_proj", "ignore")),
    Folder(
        "int4 in compression_config of which nothing is left out",
        unquantized(INT4),
        damages.in_compression_config,
        words=(
            "and compression_config leaves them out nowhere",
            r"add re:model\.layers\.3",
            _without("quantization_config"),
        ),
    ),
    Folder(
        "main layer 0 once more, where transformers looks first",
        glm(),
        written=damages.alone(r"\.layers\.0\."),
        words=("transformers loads model.safetensors alone .* lacks 83 of the 97 .*: delete it",),
    ),
    Folder(
        "an unquantized model beside the shards of an int4 one",
        both(INT4),
        written=damages.alone("", GLM),
        words=("transformers loads model.safetensors alone.*It matters .* 100 of its tensors",),
    ),
    Folder(
        "an entry of the list that no matcher comes to an end with",
        both(INT4, r"re:(\w+\.?)+!"),
        words=(r"takes too long to match.*Found \(\\w", _without("[Ii]nternal error")),
    ),
    Folder(
        "int4 called 8 bits in compression_config",
        both(INT4),
        damages.in_turn(damages.weights_scheme(num_bits=8), damages.in_compression_config),
        words=("compression_config says num_bits 8", _without("quantization_config")),
    ),
    Folder(
        "left out by mtp. alone",
        unquantized(INT4, "re:^mtp.*"),
        words=(r"layers\.3", "ignore"),
    ),
    Folder(
        "left out as vLLM names it alone",
        unquantized(INT4, MTP_OF_GLM),
        words=("SGLang", r"model\.decoder", "ignore"),
    ),
    Folder(
        "left out as SGLang names it alone",
        unquantized(INT4, AS_SGLANG_NAMES_IT),
        words=("vLLM", r"re:model\.layers\.3.* to ignore", _without("engines build")),
    ),
    Folder(
        "with rotary frequencies of GLM's MTP layer",
        glm(),
        damages.with_frequencies(mtp=True),
        words=(r"layers\.3\.self_attn\.rotary_emb\.inv_freq .* KeyError",),
    ),
    Folder(
        "left out but for experts",
        unquantized("modelopt nvfp4", "model.layers.3.self_attn*"),
        words=(r"3\.mlp", "ignore|exclude"),
    ),
    Folder(
        "left out by mtp. alone, which is to blame",
        unquantized(FP8, "re:^mtp.*"),
        words=(r"re:\^mtp\.\* in ignore matches no module",),
    ),
    Folder(
        "left out under another prefix",
        unquantized(INT4, *(f"model.language_model.layers.3.{last}" for last in ("a", "b"))),
        words=(r"language_model\.layers\.3\.a in ignore, like 1 more, matches no module",),
    ),
    Folder(
        "left out as another layer",
        unquantized("gptq", r"model\.layers\.30\..*"),
        words=(r"layers\\\.30\\\.\.\* in dynamic matches no module",),
    ),
    Folder(
        "the router's bias is missing",
        glm(),
        lose("e_score_correction_bias"),
        words=("e_score_correction_bias is missing", "graft .*--replace"),
    ),
    Folder("of zero modules", glm(), damages.config(num_nextn_predict_layers=0), words=("to 1",)),
    Folder(
        "counted as a main layer",
        glm(),
        damages.config(num_hidden_layers=4),
        words=("set num_hidden_layers to 3",),
    ),
    Folder(
        "counted as a main layer, and as no module",
        glm(),
        damages.config(num_hidden_layers=4, num_nextn_predict_layers=0),
        words=("set num_hidden_layers to 3, and the field that counts MTP modules to their",),
    ),
    Folder(
        "another layer is left out",
        unquantized("awq", "model.layers.2."),
        words=(
            r"of the main model, .*layers\.2.*\(model\.layers\.2\. in modules_to_not_convert\)",
            r"take model\.layers\.2\. out of modules_to_not_convert",
            r"and add model\.layers\.3, .* to it",
            _without("graft"),
        ),
    ),
    Folder(
        "one of the main model's joined linears is left out",
        unquantized("awq", "model.layers.2.self_attn.q_proj"),
        words=(
            r"layers\.2\.self_attn\.q_proj and .* different formats",
            r"take \S+q_proj out of modules_to_not_convert and add model.layers.3",
            _without("no weight is quantized"),
        ),
    ),
    Folder(
        "AutoRound, left out by Qwen's names",
        unquantized("auto-round", "mtp.fc", "mtp.layers.0"),
        words=(r"\(mtp\.fc in extra_config, like 1 more, matches no module",),
    ),
    Folder(
        "GPTQ, its projection alone left out",
        unquantized("gptq", r"model\.layers\.3\.eh_proj"),
        words=(r"24 matrices of the MTP module", _without("matches no module")),
    ),
    Folder(
        "4 bits that are called 8",
        both("auto-round"),
        damages.quantization(bits=8),
        words=("says bits 8.* as by 4: set bits to 4", _without("weight holds|graft")),
    ),
    Folder(
        "groups of another size in both parts",
        both("awq"),
        damages.quantization(group_size=64),
        words=("says group_size 64.* set group_size to 32", _without("graft")),
    ),
    Folder(
        "groups of another size in the MTP layer",
        both("awq"),
        damages.in_larger_groups,
        words=("group_size 32.* as by 64; the other part", "graft .*--replace"),
    ),
    Folder(
        "blocks of fp8 that are said to be narrower",
        deepseek,
        damages.quantization(weight_block_size=[128, 64]),
        words=(r"says weight_block_size \[128, 64\], .*set weight_block_size to \[128, 128\]",),
    ),
    Folder(
        "blocks of fp8 without their size",
        deepseek,
        damages.without_quantization_field("weight_block_size"),
        words=(r"has no weight_block_size, and .* set weight_block_size to \[128, 128\]",),
    ),
    Folder(
        "integers that are called floats",
        both("compressed-tensors, zero points"),
        damages.weights_scheme(type="float"),
        words=("says type float, and every weight is stored as by int: set type to int",),
    ),
    Folder(
        "codes of fp8 cast to bf16 beside their scales",
        deepseek,
        each(r"_proj\.weight$", lambda codes: codes.bfloat16()),
        words=(r"down_proj\.weight is BF16, and its weight_scale_inv is beside", _without("add ")),
    ),
    Folder(
        "the class of a draft",
        glm(),
        damages.config(architectures=["Glm4MoeForCausalLMNextN"]),
        words=("Glm4MoeForCausalLMNextN, the class of a draft",),
    ),
    Folder(
        "below another module's name",
        glm(),
        rename([(r"^", "student.")]),
        words=(r"engines look for them without student\. before each",),
    ),
    Folder(
        "a shard and the index are missing",
        glm(shards=3),
        words=(
            "shards and no index",
            r"model-00001-of-00003\S+ and 1 more; .* model-00003-of-00003\S+ is missing too",
        ),
        written=damages.without_shard_and_index,
    ),
    Folder(
        "without its quantization_config",
        deepseek,
        damages.config(quantization_config=None),
        words=("has no quantization_config", _without("graft")),
    ),
    Folder(
        "count as text",
        glm(),
        damages.config(num_nextn_predict_layers="1"),
        words=('says num_nextn_predict_layers "1", and all tensors are stored as by 1',),
    ),
    Folder(
        "under the name of a compiled module",
        glm(),
        rename([(r"^model\.", "model._orig_mod.")]),
        words=(r"begin with model\._orig_mod, where",),
    ),
    Folder(
        "experts in one tensor",
        glm(),
        damages.experts_fused,
        words=("holds all experts in one tensor", "graft .*--replace"),
    ),
    Folder(
        "copy of a smaller vocabulary",
        glm(),
        damages.copy_of_a_smaller_vocabulary,
        words=("another number of tokens: the layer is of another", "leave this copy out"),
    ),
    Folder(
        "a pointer of Git LFS",
        glm(),
        words=("model-00002-of-00002", "git lfs pull"),
        written=damages.lfs_pointer("model-00002-of-00002.safetensors"),
    ),
    Folder(
        "index of another upload",
        glm(),
        words=("index of another upload",),
        written=damages.indexed_as_bin,
    ),
    Folder(
        "lost by MLX",
        glm(),
        damages.lost_by_mlx,
        words=("mlx-lm, which wrote this folder", "mtp-export graft --main"),
    ),
    Folder("two are announced", glm(), damages.config(num_nextn_predict_layers=2), words=("2",)),
    Folder(
        "not announced",
        glm(),
        damages.config(num_nextn_predict_layers=None),
        words=("num_nextn_predict_layers",),
    ),
    Folder(
        "experts pruned from the main layers alone",
        glm(),
        damages.experts_pruned(r"layers\.[012]\.", 6, said=6),
        words=("every layer of mtp has 8 experts.* Prune those of mtp alike", _without("graft")),
    ),
    Folder(
        "experts pruned from the MTP layer alone",
        glm(),
        damages.experts_pruned(r"layers\.3\.", 6, said=8),
        words=("every layer of mtp has 6 experts.* graft the original", "graft .*--replace"),
    ),
    Folder(
        "experts pruned from both, and counted as before",
        glm(),
        damages.experts_pruned("layers", 6, said=8),
        words=("set n_routed_experts to 6", _without("graft|Prune")),
    ),
    Folder(
        "bf16 under the quantization_config that it had before",
        deepseek,
        damages.unquantized_under_its_config,
        words=("no weight is quantized.* remove quantization_config", _without("graft|add ")),
    ),
    Folder(
        "zeros at the end of a shard",
        glm(shards=3),
        level="weights",
        words=(
            r"model-00003-of-00003\.safetensors is zero .* download it again",
            _without("graft|constant"),
        ),
        written=damages.end_never_written("model-00003-of-00003.safetensors", 40),
    ),
    Folder(
        "zeros at the end of the MTP file",
        glm(own_file="mtp.safetensors"),
        level="weights",
        words=(
            r"mtp\.safetensors is zero from byte [\d,]+ of [\d,]+ to its end, in 21 tensors",
            r"download it again",
            _without("graft|constant|block"),
        ),
        written=damages.end_never_written("mtp.safetensors", 20),
    ),
    Folder(
        "zeros in the middle of the MTP file",
        glm(own_file="mtp.safetensors"),
        level="weights",
        words=(
            r"mtp\.safetensors is zero from byte [\d,]+ of [\d,]+ to [\d,]+, in 7 tensors",
            r"download it again",
            _without("graft|constant|block"),
        ),
        written=damages.piece_never_written("mtp.safetensors", 8, 14),
    ),
    Folder(
        "norms less one", glm(), each(r"norm\.weight", add(-1)), "weights", ("norm", r"1 ?\+ ?w")
    ),
    Folder(
        "ones as shared_head.norm",
        glm(),
        each(r"shared_head\.norm", torch.ones_like),
        "weights",
        (r"shared_head\.norm",),
    ),
    Folder(
        "norms plus one",
        glm(),
        each(r"norm\.weight", add(1)),
        "run",
        ("taken from every norm", r"1 \+ w"),
    ),
    Folder("enorm and hnorm exchanged", glm(), damages.norms_exchanged, "run", ("enorm|hnorm",)),
    Folder(
        "half of eh_proj zero",
        glm(),
        damages.embedding_half_zero,
        "weights",
        ("first half of .*eh_proj.* is zero: it was never written", _without("scale")),
    ),
    Folder(
        "one half of eh_proj for both",
        glm(),
        each(r"eh_proj", lambda tensor: tensor.chunk(2, 1)[0].repeat(1, 2)),
        "weights",
        ("both halves of .*eh_proj", "graft .*--replace"),
    ),
    Folder(
        "half of eh_proj rounded to zero",
        glm(),
        damages.eh_proj_rounded_by_rows,
        "weights",
        ("first half of .*eh_proj.* rounded to zero", "quantized before it was stored"),
    ),
    Folder(
        "GPTQ's lists of what is quantized instead",
        unquantized("gptq"),
        damages.quantization(modules_in_block_to_quantize=[["self_attn.o_proj"], ["mlp"]]),
        words=("28 matrices of the MTP module", _without("internal")),
    ),
    Folder(
        "halves of eh_proj exchanged",
        glm(),
        damages.halves_exchanged,
        "run",
        ("eh_proj|halves", _without("the one before is accepted|position 0"), "graft .*--replace"),
    ),
    Folder(
        "of another model",
        glm(),
        damages.hidden_axis_reordered,
        "run",
        (
            "worse than the frequencies .* the whole layer is another main model's",
            _without("loading:|in each other's place"),
            "graft .*--replace",
        ),
    ),
    Folder(
        "bf16 that is labelled fp16",
        glm(),
        damages.labelled_fp16,
        "weights",
        (r"times as large", "labelled F16"),
    ),
    Folder(
        "amax as scales",
        both("compressed-tensors, int8"),
        each("weight_scale", scaled(127)),
        "weights",
        (r"times as large", "amax / 127"),
    ),
    Folder(
        "a tile of an expert rounded to zero",
        deepseek,
        damages.tile_rounded_to_zero,
        "weights",
        (r"experts\.1\.down_proj", "zero"),
    ),
    Folder(
        "zero points of GPTQ v2 labelled v1",
        both("gptq v2"),
        damages.quantization(checkpoint_format="gptq"),
        "weights",
        ("set checkpoint_format to gptq_v2", _without("graft")),
    ),
    Folder(
        "zero points of GPTQ v1 labelled v2",
        both("gptq"),
        damages.quantization(checkpoint_format="gptq_v2"),
        "weights",
        (r"set checkpoint_format to gptq\b(?!_)", _without("graft")),
    ),
    Folder(
        "zero points of 8 bits under the other packing",
        both("auto-round, 8 bits"),
        damages.quantization(packing_format="auto_round:gptqmodel"),
        "weights",
        ("set packing_format to auto_round:auto_gptq",),
    ),
    Folder(
        "zero points of the MTP layer alone as v2 has them",
        both("gptq"),
        each("qzeros", damages.nibbles_plus_one),
        "weights",
        ("no checkpoint_format is right for both", "graft .*--replace"),
    ),
    Folder(
        "AWQ's words in plain order",
        both("awq"),
        each("qweight|qzeros", damages.nibbles_in_plain_order),
        "weights",
        ("plain nibble order", "graft .*--replace", _without("zero points")),
    ),
    Folder(
        "channels of the MTP layer that are all in group 0",
        both("gptq, permuted"),
        each("g_idx", torch.zeros_like),
        "weights",
        ("like 26 more, puts every input channel into group 0", "graft .*--replace"),
    ),
    Folder(
        "channels of the MTP layer in groups of other sizes",
        both("gptq, permuted"),
        each("0.gate_proj.g_idx", put(1, 0, 8)),
        "weights",
        (r"gate_proj\.g_idx puts more input channels into some groups", "graft .*--replace"),
    ),
    Folder(
        "a permutation that desc_act false makes engines pass over",
        both("gptq, permuted"),
        damages.quantization(desc_act=False),
        "weights",
        ("set desc_act to true", _without("graft")),
    ),
    Folder(
        "the main model's last norm as hnorm",
        glm(),
        damages.norm_of_another("hnorm.weight", "model.norm.weight"),
        "weights",
        (r"3\.hnorm\.weight holds the same as model\.norm\.weight", "graft .*--replace"),
    ),
    Folder(
        "a main layer's norm as enorm",
        unquantized(INT4, MTP_OF_GLM, AS_SGLANG_NAMES_IT),
        damages.norm_of_another("enorm.weight", "model.layers.1.post_attention_layernorm.weight"),
        "weights",
        (r"3\.enorm\.weight holds the same as model\.layers\.1\.post_attention_layernorm",),
    ),
    Folder(
        "enorm as hnorm",
        deepseek,
        damages.norm_of_another("hnorm.weight", "model.layers.5.enorm.weight"),
        "weights",
        (r"5\.hnorm\.weight holds the same as model\.layers\.5\.enorm", "graft .*--replace"),
    ),
    Folder(
        "the norm before attention as that after it",
        glm(),
        damages.norm_of_another(
            "post_attention_layernorm.weight", "model.layers.3.input_layernorm.weight"
        ),
        "weights",
        (r"post_attention_layernorm\.weight holds the same as model\.layers\.3\.input_layernorm",),
    ),
    Folder(
        "a norm of another layer",
        glm(),
        damages.norm_of_another("input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
        "weights",
        (r"3\.input_layernorm\.weight holds the same as model\.layers\.0\.input_layernorm",),
    ),
    Folder(
        "a norm of the wrong sign",
        glm(),
        each(r"3\.input_layernorm", scaled(-1)),
        "weights",
        (r"3\.input_layernorm\.weight is negative: its sign is flipped",),
    ),
    Folder("a main layer instead", glm(), damages.main_layer_as_own, "weights", (r"layers\.2",)),
    Folder(
        "a main layer of fp8 instead",
        deepseek,
        damages.main_layer_as_own,
        "weights",
        (r"layers\.4",),
    ),
    Folder(
        "a main layer that a merge inserted over it",
        glm(),
        damages.main_layer_inserted,
        "weights",
        (
            "unless a merge wrote a main layer over the module",
            r"model\.layers\.3, whose eh_proj .* linears of model\.layers\.2: a merge",
            _without("graft --main|holds the same"),
        ),
    ),
    Folder("never trained", glm(), damages.random_layer, "weights", ("norm",)),
    Folder(
        "of another training",
        glm(),
        damages.another_training,
        "run",
        ("the whole layer is another main model's", _without("loading:|contract:")),
    ),
    Folder(
        "experts in another order",
        glm(),
        damages.experts_reordered,
        "run",
        (r"or its experts come in reverse order",),
    ),
    Folder(
        "gate and up exchanged in every expert",
        glm(),
        damages.gate_and_up_exchanged,
        "run",
        ("gate_proj and up_proj of every expert are swapped", "graft .*--replace"),
    ),
    Folder(
        "scales of fp8's other form",
        both("fp8"),
        each(r"weight_scale_inv$", scaled(0.5)),
        "run",
        ("every linear of the MTP module is about 0.5 times", "graft .*--replace"),
    ),
    Folder(
        "queries of two ranks in another order",
        glm(),
        each(r"q_proj\.(weight|bias)", lambda tensor: tensor.roll(len(tensor) // 2, 0)),
        "run",
        ("halves of q_proj's rows are swapped", "graft .*--replace"),
    ),
    Folder(
        "NaN in an expert",
        glm(),
        each(r"experts\.2\.up_proj", put(float("nan"), 100, 104)),
        "weights",
        (r"experts\.2\.up_proj", "NaN|finite"),
    ),
    Folder(
        "infinity in a bias",
        glm(),
        each(r"q_proj\.bias", put(float("inf"), 7, 8)),
        "weights",
        (r"q_proj\.bias", "inf|finite"),
    ),
    Folder(
        "the end of a matrix was not written",
        glm(),
        each(r"o_proj\.weight", put(0, 8192, 16384)),
        "weights",
        (r"o_proj", "zero|written"),
    ),
    Folder(
        "scales 10,000 times as large",
        deepseek,
        each(r"experts\.3\.\w+\.weight_scale_inv", scaled(1e4)),
        "weights",
        (r"experts\.3\.",),
    ),
    Folder(
        "scales inverted", deepseek, damages.scales_inverted, "weights", ("scale", r"layers\.5")
    ),
    Folder(
        "another model's embedding",
        deepseek,
        damages.copy_of_another("embed_tokens.weight"),
        "weights",
        ("embed_tokens",),
    ),
    Folder(
        "embedding and head of a model of the same base",
        deepseek,
        damages.copies_of_a_tuned_model,
        "weights",
        ("embed_tokens", r"shared_head\.head", "of another checkpoint"),
    ),
    Folder(
        "a head beside embeddings that are said to be its own",
        deepseek,
        damages.config(tie_word_embeddings=True),
        words=(r"sets tie_word_embeddings, and lm_head\.weight is stored", "Set it to false"),
    ),
    Folder(
        "another model's head",
        deepseek,
        damages.copy_of_another("shared_head.head.weight"),
        "weights",
        (r"shared_head\.head",),
    ),
)


def _own_copies(checkpoint: Checkpoint) -> None:
    checkpoint.set("embed_tokens.weight", checkpoint.tensors["model.embed_tokens.weight"])
    checkpoint.set("shared_head.head.weight", checkpoint.tensors["lm_head.weight"])


def _float16(checkpoint: Checkpoint) -> None:
    checkpoint.config["torch_dtype"] = "float16"
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype is torch.bfloat16:
            checkpoint.tensors[name] = tensor.half()


def _tied(checkpoint: Checkpoint) -> None:
    checkpoint.config["tie_word_embeddings"] = True
    del checkpoint.tensors["lm_head.weight"]


def _blocks_of_sglang(checkpoint: Checkpoint) -> None:
    checkpoint.quantization["block_name_to_quantize"] = ["model.layers", "model.decoder"]


def _main_alone(checkpoint: Checkpoint) -> None:
    checkpoint.replace(lambda _: {})
    del checkpoint.config["num_nextn_predict_layers"]


def _other_files(folder: Path) -> None:
    for name in (
        "README.md",
        ".gitattributes",
        "chat_template.jinja",
        "training_args.bin",
        "merges.txt",
    ):
        (folder / name).write_text("---\nlicense: mit\n---\n")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(bytes(64))


GOOD = (
    Folder("as released", glm()),
    Folder("as released, in fp8", lambda: released(DEEPSEEK)),
    Folder("without copies", deepseek, lose(r"embed_tokens|shared_head\.head")),
    Folder("with copies", glm(), _own_copies),
    Folder("with a tuned head of its own", deepseek, damages.tuned("shared_head.head.weight")),
    Folder("in one file", glm(1)),
    Folder("in five files", glm(5)),
    Folder("the MTP layer in a file of its own", glm(own_file="mtp.safetensors")),
    Folder(
        "the MTP layer in a file of its own, without an index",
        glm(1, own_file="mtp.safetensors"),
        written=damages.in_two_files_without_index,
    ),
    Folder("in shards without an index", glm(3), written=lambda f: (f / INDEX).unlink()),
    Folder("float16", glm(), _float16),
    Folder("tied", glm(), _tied),
    Folder("with rotary frequencies", deepseek, damages.with_frequencies(mtp=True)),
    Folder(
        "with rotary frequencies of the main layers", glm(), damages.with_frequencies(mtp=False)
    ),
    Folder("beside other files", glm(), written=_other_files),
    Folder(
        "the MTP layer again in a file outside the index",
        glm(),
        written=damages.repeated("mtp.safetensors"),
    ),
    Folder(
        "the main model again in one file, of which transformers reads no other",
        glm(),
        written=damages.alone(r"^(?!.*\.layers\.3\.)"),
    ),
    Folder("main model alone, nothing announced", glm(), _main_alone),
    Folder("int4, left out by a pattern", unquantized(INT4, MTP_OF_GLM, AS_SGLANG_NAMES_IT)),
    Folder("int4, left out by names", listed(INT4)),
    Folder("int8, left out by names", listed("compressed-tensors, int8")),
    Folder("int8 with zero points, both parts", both("compressed-tensors, zero points")),
    Folder("fp8 by channels, both parts", both(FP8)),
    Folder("fp8 by channels in compression_config", both(FP8), damages.in_compression_config),
    Folder(
        "int4 in compression_config, left out by a pattern",
        unquantized(INT4, MTP_OF_GLM, AS_SGLANG_NAMES_IT),
        damages.in_compression_config,
    ),
    Folder("fp8 in blocks, left out by names", listed("fp8")),
    Folder("fp8 in blocks, both parts", both("fp8")),
    Folder(
        "fp8 in blocks with scales in bf16, as Qwen releases it",
        both("fp8"),
        each("_scale_inv$", torch.Tensor.bfloat16),
    ),
    Folder("llm-compressor's fp8 in blocks, both parts", both("fp8"), damages.in_compressed_blocks),
    Folder("AWQ, left out by its prefix", unquantized("awq", "model.layers.3.", "model.decoder.")),
    Folder("AWQ, both parts", both("awq")),
    Folder("GPTQ, both parts", both("gptq")),
    Folder("GPTQ v2, both parts", both("gptq v2")),
    Folder("GPTQ, permuted, both parts", both("gptq, permuted")),
    Folder(
        "GPTQ, groups of no meaning that engines pass over",
        both("gptq"),
        each("g_idx", torch.zeros_like),
    ),
    Folder("GPTQ of 8 bits, both parts", both("gptq, 8 bits")),
    Folder("AutoRound of 8 bits, both parts", both("auto-round, 8 bits"), _blocks_of_sglang),
    Folder("AutoRound, left out by a pattern", unquantized("auto-round", r".*layers\.3\..*")),
    Folder("NVFP4, left out by a pattern", unquantized("modelopt nvfp4", "model.layers.3*")),
    Folder(
        "ModelOpt's fp8, left out in its file",
        unquantized("modelopt fp8, in a file", "model.layers.3*", "model.decoder*"),
    ),
)
