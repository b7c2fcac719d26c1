"""Damages of others' checkpoints, on a Checkpoint in memory or on the folder it was written to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from quantized_by_others import Tensors, read_all, unquantized
from verify.foreign_sources import INDEX, Checkpoint

Damage = Callable[[Checkpoint], None]
FolderDamage = Callable[[Path], None]
Value = Callable[[torch.Tensor], torch.Tensor]

NORM = re.compile(r"norm\.weight$")
BLOCK = re.compile(r"(self_attn|mlp|input_layernorm|post_attention_layernorm)")


def lose(pattern: str) -> Damage:
    """Leave out the MTP layer's tensors whose names the pattern finds."""

    def damage(checkpoint: Checkpoint) -> None:
        found = checkpoint.mtp()
        kept = {name: one for name, one in found.items() if not re.search(pattern, name)}
        assert len(kept) < len(found)
        checkpoint.replace(lambda _: kept)

    return damage


def rename(pairs: Iterable[tuple[str, str]]) -> Damage:
    """Rename the MTP layer's tensors by regular expressions, the first that fits."""

    def damage(checkpoint: Checkpoint) -> None:
        def one(name: str) -> str:
            for pattern, new in pairs:
                name, count = re.subn(pattern, new, name)
                if count:
                    break
            return name

        found = {one(name): tensor for name, tensor in checkpoint.mtp().items()}
        assert set(found) != set(checkpoint.mtp())
        checkpoint.replace(lambda _: found)

    return damage


def each(pattern: str, change: Value) -> Damage:
    """Apply a function of tensors to the MTP layer's tensors whose names the pattern finds."""

    def damage(checkpoint: Checkpoint) -> None:
        names = [name for name in checkpoint.mtp() if re.search(pattern, name)]
        assert names
        for name in names:
            checkpoint.tensors[name] = change(checkpoint.tensors[name].clone())

    return damage


def add(number: float) -> Value:
    return lambda tensor: (tensor.float() + number).to(tensor.dtype)


def scaled(factor: float) -> Value:
    return lambda tensor: (tensor.float() * factor).to(tensor.dtype)


def quantization(**fields: object) -> Damage:
    """Change fields of the quantization_config."""
    return lambda checkpoint: checkpoint.quantization.update(fields)


def in_compression_config(checkpoint: Checkpoint) -> None:
    """Describe the quantization in the field of older compressed-tensors."""
    checkpoint.config["compression_config"] = checkpoint.config.pop("quantization_config")


def in_turn(*damages: Damage) -> Damage:
    def damage(checkpoint: Checkpoint) -> None:
        for one in damages:
            one(checkpoint)

    return damage


def without_quantization_field(name: str) -> Damage:
    def damage(checkpoint: Checkpoint) -> None:
        del checkpoint.quantization[name]

    return damage


def weights_scheme(**fields: object) -> Damage:
    """Change fields of the weights of compressed-tensors' only group."""

    def damage(checkpoint: Checkpoint) -> None:
        checkpoint.quantization["config_groups"]["group_0"]["weights"].update(fields)

    return damage


def in_compressed_blocks(checkpoint: Checkpoint) -> None:
    """fp8 in blocks as llm-compressor's FP8_BLOCK writes it: with scales of the model's dtype."""
    scales = [name for name in checkpoint.tensors if name.endswith("_scale_inv")]
    for name in scales:
        scale = checkpoint.tensors.pop(name).bfloat16()
        checkpoint.tensors[name.removesuffix("_inv")] = scale
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block"}
    group = {"targets": ["Linear"], "weights": {**weights, "block_structure": [128, 128]}}
    checkpoint.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


def nibbles_plus_one(words: torch.Tensor) -> torch.Tensor:
    """Add one to each of a word's eight numbers, none of which is 15."""
    return words + 0x11111111


def with_frequencies(*, mtp: bool) -> Damage:
    """Store the rotary frequencies of the main layers, or of the MTP layer too."""

    def damage(checkpoint: Checkpoint) -> None:
        layers = checkpoint.config["num_hidden_layers"] + int(mtp)
        for layer in range(layers):
            name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
            checkpoint.tensors[name] = 1e4 ** -torch.linspace(0, 1, 8)

    return damage


def nibbles_in_plain_order(words: torch.Tensor) -> torch.Tensor:
    """Pack each word of eight columns again, from 0 to 7 in place of 0, 2, 4, 6, 1, 3, 5, 7."""
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    numbers = [(words.long() >> (4 * place)) & 0xF for place in places]
    total = sum(number << (4 * column) for column, number in enumerate(numbers))
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)  # type: ignore[operator, arg-type, union-attr]


def in_larger_groups(checkpoint: Checkpoint) -> None:
    """Every second group's scales and zero points of the MTP layer are left out."""
    for name in checkpoint.mtp():
        if name.endswith((".scales", ".qzeros")):
            checkpoint.tensors[name] = checkpoint.tensors[name][::2]


def pruned(pattern: str, count: int) -> Damage:
    """Keep the first experts of the layers whose names the pattern finds, and of their routers."""

    def damage(checkpoint: Checkpoint) -> None:
        for name, tensor in list(checkpoint.tensors.items()):
            if not re.search(pattern, name):
                continue
            expert = re.search(r"\.experts\.(\d+)\.", name)
            if expert is not None and int(expert[1]) >= count:
                del checkpoint.tensors[name]
            elif ".mlp.gate." in name:
                checkpoint.tensors[name] = tensor[:count]

    return damage


def experts_pruned(pattern: str, count: int, said: int) -> Damage:
    """The same, and the number that config.json says."""

    def damage(checkpoint: Checkpoint) -> None:
        checkpoint.config["n_routed_experts"] = said
        pruned(pattern, count)(checkpoint)

    return damage


def unquantized_under_its_config(checkpoint: Checkpoint) -> None:
    """Cast to bf16, its quantization_config left behind."""
    plain = unquantized(checkpoint.tensors)
    checkpoint.tensors = {
        name: one if one.dtype is torch.float32 and one.dim() == 1 else one.bfloat16()
        for name, one in plain.items()
    }


def end_never_written(file: str, count: int) -> FolderDamage:
    """Zeros in place of a file's last tensors, as a download that broke off leaves them."""

    def damage(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        length = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:length])
        starts = sorted(one["data_offsets"][0] for name, one in header.items() if name[0] != "_")
        # From the middle of the one before.
        start = length + (starts[-count - 1] + starts[-count]) // 2
        data[start:] = bytes(len(data) - start)
        (folder / file).write_bytes(data)

    return damage


def piece_never_written(file: str, first: int, last: int) -> FolderDamage:
    """Zeros from the middle of one of a file's tensors to that of another, as a piece of a download
    that never came leaves them."""

    def damage(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        length = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:length])
        places = sorted(one["data_offsets"] for name, one in header.items() if name[0] != "_")
        start, stop = (length + sum(places[number]) // 2 for number in (first, last))
        data[start:stop] = bytes(stop - start)
        (folder / file).write_bytes(data)

    return damage


def put(number: float, first: int, last: int) -> Value:
    """Write a number into a run of elements."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.flatten()
        flat[first:last] = number
        return flat.view(tensor.shape)

    return change


def embedding_half_zero(checkpoint: Checkpoint) -> None:
    weight = checkpoint.of("eh_proj.weight").clone()
    weight[:, : weight.shape[1] // 2] = 0
    checkpoint.set("eh_proj.weight", weight)


def eh_proj_rounded_by_rows(checkpoint: Checkpoint) -> None:
    """Round eh_proj to int4 by rows, after a training in which enorm made up for the small half."""
    weight = checkpoint.of("eh_proj.weight").float()
    half = weight.shape[1] // 2
    weight[:, :half] /= 40
    enorm = checkpoint.of("enorm.weight")
    checkpoint.set("enorm.weight", (enorm.float() * 40).to(enorm.dtype))
    scale = weight.abs().amax(1, keepdim=True) / 7
    checkpoint.set("eh_proj.weight", ((weight / scale).round() * scale).bfloat16())


def halves_exchanged(checkpoint: Checkpoint) -> None:
    first, second = checkpoint.of("eh_proj.weight").chunk(2, 1)
    checkpoint.set("eh_proj.weight", torch.cat((second, first), 1))


def norms_exchanged(checkpoint: Checkpoint) -> None:
    first, second = checkpoint.of("enorm.weight"), checkpoint.of("hnorm.weight")
    checkpoint.set("enorm.weight", second)
    checkpoint.set("hnorm.weight", first)


def norm_of_another(last: str, other: str) -> Damage:
    """Store another norm, by its whole name, as the MTP layer's."""
    return lambda checkpoint: checkpoint.set(last, checkpoint.tensors[other].clone())


def in_two_files_without_index(folder: Path) -> None:
    """The main model's one file by the name that needs no index, and none beside it."""
    (folder / INDEX).unlink()
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")


def main_layer_as_own(checkpoint: Checkpoint) -> None:
    """Store the last main layer's block as the MTP layer's."""
    number = int(checkpoint.layer.split(".")[2]) - 1
    for name in checkpoint.mtp():
        last = name.removeprefix(checkpoint.layer)
        if BLOCK.match(last):
            checkpoint.set(last, checkpoint.tensors[f"model.layers.{number}.{last}"].clone())


def main_layer_inserted(checkpoint: Checkpoint) -> None:
    """A merge that stacks layers: the last main one again, over the module's block."""
    main_layer_as_own(checkpoint)
    checkpoint.config["num_hidden_layers"] += 1


def random_layer(checkpoint: Checkpoint) -> None:
    """Never trained: matrices of deviation 0.02, norms of ones."""
    draw = torch.Generator().manual_seed(1)
    for name, tensor in checkpoint.mtp().items():
        drawn = torch.randn(tensor.shape, generator=draw) * 0.02
        one = (
            torch.ones_like(drawn)
            if NORM.search(name)
            else drawn
            if tensor.dim() > 1
            else 0 * drawn
        )
        checkpoint.tensors[name] = one.to(tensor.dtype)


def another_training(checkpoint: Checkpoint) -> None:
    """As another seed's training leaves it: as good, over other hidden channels."""
    size = checkpoint.config["hidden_size"]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(2))

    def moved(found: Tensors) -> Tensors:
        for name, tensor in found.items():
            if name.endswith("eh_proj.weight"):
                halves = [half[order][:, order] for half in tensor.chunk(2, 1)]
                found[name] = torch.cat(halves, 1)
            elif re.search(r"(q|k|v|gate|up)_proj\.weight$|mlp\.gate\.weight$", name):
                found[name] = tensor[:, order]
            elif re.search(
                r"(o|down)_proj\.weight$|(layernorm|enorm|hnorm|head\.norm)\.weight$", name
            ):
                found[name] = tensor[order]
        return found

    checkpoint.replace(moved)


def experts_reordered(checkpoint: Checkpoint) -> None:
    """Experts in the opposite order, their router as it was."""
    count = checkpoint.config["n_routed_experts"]
    layer = re.escape(checkpoint.layer)
    pattern = re.compile(rf"({layer}mlp\.experts\.)(\d+)(.*)")

    def turned(name: str) -> str:
        return pattern.sub(lambda m: f"{m[1]}{count - 1 - int(m[2])}{m[3]}", name)

    checkpoint.replace(lambda found: {turned(name): one for name, one in found.items()})


def gate_and_up_exchanged(checkpoint: Checkpoint) -> None:
    """Of every expert, the shared one included."""
    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}

    def exchanged(name: str) -> str:
        return re.sub(r"(?<=\.)(gate|up)_proj(?=\.)", lambda m: names[m[0]], name)

    checkpoint.replace(lambda found: {exchanged(name): one for name, one in found.items()})


def hidden_axis_reordered(checkpoint: Checkpoint) -> None:
    """Of another model: its inputs in another order, and what it adds to the residual in none."""
    size = checkpoint.config["hidden_size"]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(8))
    for name, tensor in checkpoint.mtp().items():
        if name.endswith("eh_proj.weight"):
            checkpoint.tensors[name] = tensor[order]
        elif tensor.shape[-1] == size:
            checkpoint.tensors[name] = tensor[..., order]


def labelled_fp16(checkpoint: Checkpoint) -> None:
    """A header that takes the bytes of bf16 for fp16."""
    for name, tensor in checkpoint.mtp().items():
        if tensor.dtype is torch.bfloat16:
            checkpoint.tensors[name] = tensor.view(torch.float16)


def lost_by_mlx(checkpoint: Checkpoint) -> None:
    """As mlx-lm leaves a config, under both names; the main model's codes tell nothing here."""
    groups = {"group_size": 64, "bits": 4}
    checkpoint.config |= {"quantization": groups, "quantization_config": groups}
    checkpoint.replace(lambda _: {})


def scales_inverted(checkpoint: Checkpoint) -> None:
    for name, tensor in checkpoint.mtp().items():
        if name.endswith("weight_scale_inv"):
            checkpoint.tensors[name] = 1 / tensor


def tile_rounded_to_zero(checkpoint: Checkpoint) -> None:
    """A tile of an expert, whose scale an outlier sets: all its codes but one are zero."""
    name = "mlp.experts.1.down_proj.weight"
    codes = torch.zeros_like(checkpoint.of(name).float())
    codes[0, 0] = 448
    checkpoint.set(name, codes.to(torch.float8_e4m3fn))


def experts_fused(checkpoint: Checkpoint) -> None:
    """All experts in one tensor of each kind, as transformers 5 holds them."""
    count = checkpoint.config["n_routed_experts"]
    for last in ("gate_proj", "up_proj", "down_proj"):
        names = [f"mlp.experts.{number}.{last}.weight" for number in range(count)]
        checkpoint.set(f"mlp.experts.{last}", torch.stack([checkpoint.of(name) for name in names]))
    gate_up = [checkpoint.of(f"mlp.experts.{last}") for last in ("gate_proj", "up_proj")]
    checkpoint.set("mlp.experts.gate_up_proj", torch.cat(gate_up, 1))
    lose(r"experts\.(\d+|gate_proj|up_proj)(\.|$)")(checkpoint)


def copy_of_a_smaller_vocabulary(checkpoint: Checkpoint) -> None:
    embedding = checkpoint.tensors["model.embed_tokens.weight"]
    checkpoint.set("embed_tokens.weight", embedding[:-8])


def copy_of_another(last: str) -> Damage:
    """A copy of embedding or head as another vocabulary orders it."""

    def damage(checkpoint: Checkpoint) -> None:
        order = torch.randperm(
            checkpoint.config["vocab_size"], generator=torch.Generator().manual_seed(4)
        )
        checkpoint.set(last, checkpoint.of(last)[order])

    return damage


def tuned(last: str) -> Damage:
    """A copy of embedding or head as training left it: off by a twentieth."""

    def damage(checkpoint: Checkpoint) -> None:
        table = checkpoint.of(last).float()
        noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(3))
        checkpoint.set(last, (table + 0.05 * table.std() * noise).to(torch.bfloat16))

    return damage


def copies_of_a_tuned_model(checkpoint: Checkpoint) -> None:
    for last in ("embed_tokens.weight", "shared_head.head.weight"):
        tuned(last)(checkpoint)


def config(**fields: object) -> Damage:
    """Set fields of config.json; None takes one away."""

    def damage(checkpoint: Checkpoint) -> None:
        checkpoint.config |= fields
        checkpoint.config = {key: one for key, one in checkpoint.config.items() if one is not None}

    return damage


# Of folders that are written.


def first_of_a_matrix_changed(tensor: torch.Tensor) -> torch.Tensor:
    """Change the first element of eh_proj, whose shape no other tensor has."""
    if tensor.shape == (128, 256):
        tensor = tensor.clone()
        tensor[0, 0] += 1
    return tensor


def repeated(file: str, change: Value = torch.clone, more: Tensors | None = None) -> FolderDamage:
    """Write the tensors of the last layer again, changed, into a file that the index leaves out."""

    def damage(folder: Path) -> None:
        tensors = {name: one for name, one in read_all(folder).items() if "layers.3." in name}
        assert tensors
        changed = {name: change(one) for name, one in tensors.items()}
        save_file(changed | (more or {}), folder / file)

    return damage


def alone(pattern: str, source: Path | None = None) -> FolderDamage:
    """Write tensors of a folder, or of the checkpoint itself, into model.safetensors too."""

    def damage(folder: Path) -> None:
        stored = read_all(source or folder).items()
        save_file({n: t for n, t in stored if re.search(pattern, n)}, folder / "model.safetensors")

    return damage


def beside(name: str) -> FolderDamage:
    """A file that nothing opens."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(b"PK")

    return damage


def without_file(name: str) -> FolderDamage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()

    return damage


def without_shard_and_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / "model-00003-of-00003.safetensors").unlink()


def lfs_pointer(name: str) -> FolderDamage:
    """A clone without the large files."""

    def damage(folder: Path) -> None:
        oid = "oid sha256:" + 32 * "ab"
        (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\n{oid}\nsize 9\n")

    return damage


def indexed_as_bin(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "pytorch_model-00001-of-00002.bin")
    (folder / INDEX).write_text(json.dumps(index))


def cut(name: str) -> FolderDamage:
    """An upload that ended early."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return damage


def unindexed(pattern: str) -> FolderDamage:
    """Leave tensors out of the index, not out of their file."""

    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        kept = {k: v for k, v in index["weight_map"].items() if not re.search(pattern, k)}
        assert len(kept) < len(index["weight_map"])
        (folder / INDEX).write_text(json.dumps({**index, "weight_map": kept}))

    return damage
