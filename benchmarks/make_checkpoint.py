"""Write checkpoints of released shapes, of random weights.

    python -m benchmarks.make_checkpoint OUT --real          DeepSeek-V3's 671B shapes, 160+ shards
    python -m benchmarks.make_checkpoint OUT --family NAME   another family's, without any weights;
                                                             with --real as above, with --filled
                                                             all random
    python -m benchmarks.make_checkpoint OUT                 a tiny DeepSeek-V3, all random

Names, shapes and dtypes are the released ones. In --real every main layer is a hole in a sparse
file (it reads as zeros and takes no disk); the MTP layer, embedding and head are random: 19 GB.
With --family alone all tensors are holes unless --filled, so that terabytes fit anywhere.
The MTP layer begins in the shard where the main model ends and fills the ones after it, as in the
release. The tiny one has ragged 128x128 tiles, and an MTP weight in another shard than its scale.
"""

from __future__ import annotations

import argparse
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.released import DEEPSEEK, RELEASED
from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.containers.safetensors import INDEX_NAME
from mtp_checkpoints.containers.safetensors_header import file_layout
from mtp_checkpoints.dtypes import OutputTensor
from mtp_checkpoints.families import family_of
from mtp_checkpoints.quantization.native import NATIVE_FP8
from mtp_checkpoints.quantization.stored import stored_model
from mtp_export.plan import OutputShard, Step, copy_step, number_shards, pack

REAL_CONFIG = RELEASED["deepseek_v3"].config
TINY_CONFIG: dict[str, Any] = DEEPSEEK | {
    "first_k_dense_replace": 1,
    "hidden_size": 192,
    "intermediate_size": 320,
    "kv_lora_rank": 64,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 96,
    "n_group": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 160,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "quantization_config": NATIVE_FP8,
    "rope_scaling": None,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "v_head_dim": 32,
    "vocab_size": 512,
}
_PIECE_BYTES = 16 << 20
_REAL_SHARD_BYTES = 4_300_000_000
_TINY_SHARD_BYTES = 500_000


def _in_file_order(config: dict[str, Any], own_copies: bool) -> list[Step]:
    """The tensors as the released shards order them: embedding, layers, norm, head, MTP."""
    family = family_of(config)
    tensors = stored_model(config).tensors.values()
    stored = [tensor for tensor in tensors if own_copies or not tensor.optional]
    last = {f"{family.norm}.weight": 1, "lm_head.weight": 2}
    stored.sort(key=lambda t: 3 if family.mtp_layer_of(t.name) is not None else last.get(t.name, 0))
    return [copy_step(OutputTensor(t.name, t.dtypes[0], t.shape)) for t in stored]


def _split_a_scale_from_its_weight(groups: list[tuple[Step, ...]]) -> list[tuple[Step, ...]]:
    """Put a shard boundary between the last quantized weight (an MTP one) and its scale."""
    group, at = next(
        (g, i)
        for g in range(len(groups) - 1, -1, -1)
        for i in range(len(groups[g]) - 1, 0, -1)
        if groups[g][i].inputs[0].endswith("_scale_inv")
    )
    return [*groups[:group], groups[group][:at], groups[group][at:], *groups[group + 1 :]]


def _bytes_of(tensor: OutputTensor, seed: int) -> Iterator[memoryview]:
    """Random but valid bytes: finite weights, positive norms and scales, copies equal to their
    originals."""
    same = {"embed_tokens.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
    key = next((main for own, main in same.items() if tensor.name.endswith(own)), tensor.name)
    random = np.random.Generator(np.random.SFC64(zlib.crc32(key.encode()) + seed))
    for start in range(0, tensor.size_bytes, _PIECE_BYTES):
        size = min(_PIECE_BYTES, tensor.size_bytes - start)
        if tensor.dtype == "F32":
            values: np.ndarray[Any, Any] = random.random(size // 4, dtype=np.float32)
            if tensor.name.endswith("_scale_inv"):  # of blocks of one size, as training leaves them
                values = values * np.float32(1.5e-4) + np.float32(5e-4)
            else:
                values = values * np.float32(1e-3) + np.float32(1e-4)
        elif tensor.dtype == "BF16":
            bits = random.integers(0, 2**16, size // 2, dtype=np.uint16)
            kept = 0x807F if len(tensor.shape) > 1 else 0x007F  # norms have no signs
            values = (bits & np.uint16(kept)) | np.uint16(0x3C80)  # ±[2^-6, 2^-5)
        else:
            codes = random.integers(0, 2**8, size, dtype=np.uint8)
            values = codes & np.uint8(0xF7)  # no e4m3 NaN (0x7f, 0xff)
        yield memoryview(values.view(np.uint8))


def write_sparse(
    path: Path,
    tensors: Sequence[OutputTensor],
    content: Callable[[OutputTensor], Iterable[memoryview]],
) -> None:
    """Write a shard of which the tensors without content are holes."""
    layout = file_layout(tensors)
    with path.open("wb") as file:
        file.truncate(layout.size_bytes)
        os.pwrite(file.fileno(), layout.head, 0)
        for tensor in tensors:
            position = layout.places[tensor.name].start
            for piece in content(tensor):
                position += os.pwrite(file.fileno(), piece, position)


def _is_filled_in_real(config: dict[str, Any]) -> Callable[[str], bool]:
    family = family_of(config)
    return lambda name: ".layers." not in name or family.mtp_layer_of(name) is not None


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer of the right size, and a generation config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<bos>", "<eos>", *alphabet]
    tokens += [f"<unused{i}>" for i in range(max(0, vocab_size - len(tokens)))]
    vocab = {token: i for i, token in enumerate(tokens[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))


def make_checkpoint(
    folder: Path,
    config: dict[str, Any] = TINY_CONFIG,
    *,
    own_copies: bool = True,
    max_shard_bytes: int = _TINY_SHARD_BYTES,
    filled: Callable[[str], bool] = lambda name: True,
    parted: bool = True,
    seed: int = 0,
) -> Path:
    """Write a checkpoint of a config.json.

    own_copies: whether the MTP layer stores embedding and head. Tensors for which `filled` says no
    are holes in the file. parted: whether an MTP weight and its scale lie in two shards.
    """

    def content(tensor: OutputTensor) -> Iterable[memoryview]:
        return _bytes_of(tensor, seed) if filled(tensor.name) else ()

    folder.mkdir(parents=True, exist_ok=True)
    groups = pack(_in_file_order(config, own_copies), max_shard_bytes)
    if parted and config.get("quantization_config"):
        groups = _split_a_scale_from_its_weight(groups)
    shards = number_shards([OutputShard(group) for group in groups])
    weight_map: dict[str, str] = {}
    for shard in shards:
        write_sparse(folder / shard.file_name, shard.tensors, content)
        weight_map |= {step.inputs[0]: shard.file_name for step in shard.steps}
    index = {
        "metadata": {"total_size": sum(shard.size_bytes for shard in shards)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2))
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2))
    write_tokenizer(folder, family_of(config).facts.vocab)
    return folder


def make_released(
    folder: Path, model_type: str, *, filled: Callable[[str], bool] = lambda name: False
) -> Path:
    """Write the shapes of a family's release; tensors that are not filled are holes."""
    released = RELEASED[model_type]
    return make_checkpoint(
        folder,
        released.config,
        own_copies=released.own_copies,
        max_shard_bytes=_REAL_SHARD_BYTES,
        filled=filled,
        parted=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--real", action="store_true", help="the 671B shapes (19 GB of disk), or those of --family"
    )
    parser.add_argument("--family", choices=RELEASED, help="the shapes of a release of a family")
    parser.add_argument("--filled", action="store_true", help="random weights, with --family")
    arguments = parser.parse_args()
    if arguments.real or arguments.family:
        model_type = arguments.family or "deepseek_v3"
        in_real = _is_filled_in_real(RELEASED[model_type].config)
        filled = in_real if arguments.real else lambda name: arguments.filled
        make_released(arguments.folder, model_type, filled=filled)
    else:
        make_checkpoint(arguments.folder)


if __name__ == "__main__":
    main()
