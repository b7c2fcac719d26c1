"""Bundles of GGUF files for llama.cpp: every tensor as its graph has it, read by the package that
its converter writes with."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.make_checkpoint import REAL_CONFIG
from cases import (
    MTP_LAYER,
    TINY_CONFIG,
    UNQUANTIZED,
    export,
    looks_finished,
    make_checkpoint,
    nightly_but,
    quantize,
    read_json,
    read_shard,
    read_tensors,
    run_in_a_fork,
    run_program,
    shard_of,
    tree,
    write_shard,
)
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import FORMATS, FormatOptions
from mtp_export.schemes.table import GGUF_SCHEMES
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint

gguf = pytest.importorskip("gguf")

TARGET = ("--target", "llama.cpp", "--pre-tokenizer", "none")
HEADS, NOPE, VALUE = (
    TINY_CONFIG[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
)
EXPERTS = TINY_CONFIG["n_routed_experts"]
OF_LAYERS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
OF_MODULE = {
    "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight",
    "eh_proj.weight": "nextn.eh_proj.weight",
    "shared_head.norm.weight": "nextn.shared_head_norm.weight",
}
WIDE = re.compile(r"norm\.weight|ffn_gate_inp|exp_probs_b|\.(enorm|hnorm)\.")


def readers(folder: Path) -> list[Any]:
    return [gguf.GGUFReader(path) for path in sorted(folder.glob("*.gguf"))]


def stored(folder: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """Every tensor of a folder's files: its type, and its values in the order of torch."""
    return dict(_stored(folder))


def _stored(folder: Path) -> Iterator[tuple[str, tuple[str, torch.Tensor]]]:
    for reader in readers(folder):
        for tensor in reader.tensors:
            kind, shape = tensor.tensor_type.name, [int(n) for n in reversed(tensor.shape)]
            raw = torch.from_numpy(np.array(tensor.data).reshape(-1).view(np.uint8))
            if kind in ("F32", "BF16"):
                values = raw.view(torch.float32 if kind == "F32" else torch.bfloat16)
            else:
                values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            yield tensor.name, (kind, values.reshape(shape))


def keys_of(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def dense(source: Path, *, rounded: bool) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors, fp8 ones dequantized to float32, or rounded once to bf16."""
    tensors = read_tensors(source)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scale, weight = tensors.pop(name), name.removesuffix("_scale_inv")
        codes = tensors[weight].float()
        rows = scale.repeat_interleave(128, 0)[: len(codes)]
        values = codes * rows.repeat_interleave(128, 1)[:, : codes.shape[1]]
        tensors[weight] = values.bfloat16() if rounded else values
    return tensors


def expected(source: Path, *, rounded: bool = True) -> dict[str, torch.Tensor]:
    """Values of both parts' tensors under llama.cpp's names, as its converter makes them; the MTP
    part's are behind mtp/."""
    tensors = dense(source, rounded=rounded)
    wanted = {
        "token_embd.weight": tensors["model.embed_tokens.weight"],
        "output_norm.weight": tensors["model.norm.weight"],
        "output.weight": tensors["lm_head.weight"],
    }
    for layer in range(MTP_LAYER + 1):
        own, block = f"model.layers.{layer}.", f"blk.{layer}."
        if layer == MTP_LAYER:
            block = f"mtp/{block}"
        names = OF_LAYERS | (OF_MODULE if layer == MTP_LAYER else {})
        wanted |= {
            block + name: tensors[own + o] for o, name in names.items() if own + o in tensors
        }
        both = tensors[f"{own}self_attn.kv_b_proj.weight"].view(HEADS, NOPE + VALUE, -1)
        wanted[f"{block}attn_k_b.weight"] = both[:, :NOPE].transpose(1, 2)
        wanted[f"{block}attn_v_b.weight"] = both[:, NOPE:]
        for kind in ("gate", "up", "down"):
            every = [f"{own}mlp.experts.{e}.{kind}_proj.weight" for e in range(EXPERTS)]
            if every[0] in tensors:
                merged = torch.stack([tensors[name] for name in every])
                wanted[f"{block}ffn_{kind}_exps.weight"] = merged
    own = f"model.layers.{MTP_LAYER}."
    wanted["mtp/token_embd.weight"] = tensors[f"{own}embed_tokens.weight"]
    wanted["mtp/output.weight"] = tensors[f"{own}shared_head.head.weight"]
    wanted["mtp/output_norm.weight"] = wanted["output_norm.weight"]
    return wanted


@pytest.fixture(scope="module")
def bundle(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in fp8 with ragged tiles, exported for llama.cpp."""
    output = tmp_path_factory.mktemp("gguf") / "out"
    outcome = export(pristine, output, *TARGET)
    assert outcome.code == 0, outcome.err
    return output


def test_every_tensor_is_as_llama_cpp_has_it(bundle: Path, pristine: Path) -> None:
    wanted = expected(pristine)
    found = stored(bundle / "main")
    found |= {f"mtp/{name}": one for name, one in stored(bundle / "mtp").items()}
    assert found.keys() == wanted.keys()
    for name, (kind, values) in found.items():
        assert kind == ("F32" if WIDE.search(name) else "BF16"), name
        assert values.shape == wanted[name].shape, name
        assert torch.equal(values.float(), wanted[name].float()), name


def test_files_are_named_as_llama_cpp_looks_for_them(bundle: Path, pristine: Path) -> None:
    assert [path.name for path in (bundle / "main").glob("*.gguf")] == [f"{pristine.name}.gguf"]
    assert [path.name for path in (bundle / "mtp").glob("*.gguf")] == [f"mtp-{pristine.name}.gguf"]
    for part in ("main", "mtp"):
        config = read_json(bundle / part / "config.json")
        assert "quantization_config" not in config
        kept = {k: v for k, v in TINY_CONFIG.items() if k != "quantization_config"}
        assert kept.items() <= config.items()


def test_the_module_is_counted_in_its_own_file_alone(bundle: Path) -> None:
    (main,), (mtp,) = (readers(bundle / part) for part in ("main", "mtp"))
    assert keys_of(main)["deepseek2.block_count"] == MTP_LAYER
    assert "deepseek2.nextn_predict_layers" not in keys_of(main)
    assert keys_of(mtp)["deepseek2.block_count"] == MTP_LAYER + 1
    assert keys_of(mtp)["deepseek2.nextn_predict_layers"] == 1
    for reader in (main, mtp):
        keys = keys_of(reader)
        assert keys["general.architecture"] == "deepseek2"
        assert keys["general.file_type"] == 32
        assert keys["tokenizer.ggml.model"] == "none"


@pytest.fixture(scope="module")
def whole(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the module in the main model's file."""
    output = tmp_path_factory.mktemp("one") / "out"
    outcome = export(pristine, output, *TARGET, "--part", "one")
    assert outcome.code == 0, outcome.err
    return output


def test_one_file_holds_both_parts(whole: Path, bundle: Path, pristine: Path) -> None:
    """Embedding and head once: those of the main model."""
    assert not (whole / "mtp").exists()
    found, apart = (stored(folder) for folder in (whole / "main", bundle / "mtp"))
    tables = ("token_embd.weight", "output.weight", "output_norm.weight")
    wanted = stored(bundle / "main") | {n: one for n, one in apart.items() if n not in tables}
    assert found.keys() == wanted.keys()
    for name, (kind, values) in wanted.items():
        assert found[name][0] == kind and torch.equal(found[name][1], values), name
    (reader,) = readers(whole / "main")
    (module,) = readers(bundle / "mtp")
    counts = [{n: v for n, v in keys_of(r).items() if "count" in n} for r in (reader, module)]
    assert counts[0] | {"GGUF.tensor_count": 0, "GGUF.kv_count": 0} == counts[1] | {
        "GGUF.tensor_count": 0,
        "GGUF.kv_count": 0,
    }
    line = run_program("launch", whole)
    path = whole / f"main/{pristine.name}.gguf"
    assert f"llama-server -m {path} --spec-type draft-mtp --spec-draft-n-max 1" in line.out


def test_one_file_is_verified_whole(whole: Path, pristine: Path, tmp_path: Path) -> None:
    found = run_program("verify", whole, "--level", "weights", "--source", pristine)
    assert found.code == 0, found.out
    damaged = Path(shutil.copytree(whole, tmp_path / "damaged"))
    (path,) = (damaged / "main").glob("*.gguf")
    module = next(t for t in gguf.GGUFReader(path).tensors if "nextn.eh_proj" in t.name)
    data = bytearray(path.read_bytes())
    data[module.data_offset + 5] ^= 1
    path.write_bytes(data)
    found = run_program("verify", damaged, "--level", "files")
    assert found.code == 7
    assert f"model.layers.{MTP_LAYER}.eh_proj.weight" in found.out.replace("\n  ", " "), found.out


def test_large_parts_are_split_between_whole_tensors(
    bundle: Path, pristine: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert export(pristine, output, *TARGET, "--max-shard-size", "300kB").code == 0
    for part in ("main", "mtp"):
        files = readers(output / part)
        names = [path.name for path in sorted((output / part).glob("*.gguf"))]
        stem = next((bundle / part).glob("*.gguf")).stem
        count = len(names)
        assert count > 2
        assert names == [f"{stem}-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1)]
        keys = [keys_of(reader) for reader in files]
        assert [own["split.no"] for own in keys] == [*range(count)]
        assert {own["split.count"] for own in keys} == {count}
        tensors = sum(len(reader.tensors) for reader in files)
        assert {own["split.tensors.count"] for own in keys} == {tensors}
        assert ["general.architecture" in own for own in keys] == [True] + [False] * (count - 1)
        found, whole = stored(output / part), stored(bundle / part)
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name][1], whole[name][1]) for name in whole)


def test_shares_make_the_same_bytes(bundle: Path, pristine: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    for number in (2, 1):
        outcome = export(pristine, output, *TARGET, "--share", f"{number}/2")
        assert outcome.code == 0, outcome.err
    assert run_program("finish", output).code == 0
    assert tree(output) == tree(bundle)


@pytest.mark.parametrize("call", nightly_but([40, 90], range(5, 105, 5)))
def test_a_run_that_dies_is_finished_with_the_same_bytes(
    call: int, bundle: Path, pristine: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    died = run_in_a_fork(lambda: export(pristine, output, *TARGET), call)
    assert died and not looks_finished(output)
    outcome = export(pristine, output, *TARGET)
    assert outcome.code == 0, outcome.err
    assert tree(output) == tree(bundle)


@pytest.mark.nightly
def test_a_split_run_of_blocks_that_dies_again_and_again_is_finished(
    pristine: Path, tmp_path: Path
) -> None:
    """No file has its name before it is whole."""
    options = (*TARGET, "--base-quant", "q4_0", "--max-shard-size", "300kB")
    whole, output = tmp_path / "whole", tmp_path / "out"
    assert quantize(pristine, whole, *options).code == 0
    sizes = {path.name: path.stat().st_size for path in whole.rglob("*.gguf")}
    codes = []
    while codes[-1:] != [0]:
        run = len(codes)
        codes.append(run_in_a_fork(lambda: quantize(pristine, output, *options), 50 + 10 * run))
        for path in output.rglob("*.gguf"):
            assert path.stat().st_size == sizes[path.name], (codes, path.name)
    assert len(codes) > 2 and {*codes[:-1]} == {9}
    assert tree(output) == tree(whole)


def test_a_pair_of_bf16_makes_the_same_tensors(
    bundle: Path, pristine: Path, tmp_path: Path
) -> None:
    pair = ("--base-quant", "bf16", "--mtp-quant", "bf16")
    outcome = quantize(pristine, tmp_path / "out", *TARGET, *pair)
    assert outcome.code == 0, outcome.err
    for part in ("main", "mtp"):
        found, wanted = stored(tmp_path / "out" / part), stored(bundle / part)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name][1], wanted[name][1]) for name in wanted)


def test_an_unquantized_source_keeps_its_elements(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", UNQUANTIZED)
    assert export(source, tmp_path / "out", *TARGET).code == 0
    wanted = expected(source)
    for name, (_, values) in stored(tmp_path / "out/main").items():
        assert torch.equal(values.float(), wanted[name].float()), name


@pytest.mark.parametrize("model_type", ["glm4_moe", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"])
def test_other_families_are_whole(model_type: str, tmp_path: Path) -> None:
    """Every tensor of the model is in the files, and what no engine quantizes is in float32."""
    config = SMALL_CONFIGS[model_type] | {"num_nextn_predict_layers": 1}
    source = tmp_path / "source"
    write_checkpoint(source, config)
    outcome = export(source, tmp_path / "out", *TARGET)
    assert outcome.code == 0, outcome.err
    count = sum(
        len(tensors) for tensors in (stored(tmp_path / f"out/{p}") for p in ("main", "mtp"))
    )
    spec = family_of(config)
    apart = [s for s in spec.tensors.values() if s.role is not Role.ROUTED_EXPERT]
    latent = sum(".kv_b_proj." in s.name for s in apart)
    merged = 3 * sum(
        f"{layer.feed_forward_prefix}.gate.weight" in spec.tensors for layer in spec.every_layer
    )
    assert count == len(apart) + latent + merged + 1  # the main model's norm beside the module
    main = stored(tmp_path / "out/main")
    if model_type == "glm_moe_dsa":
        assert main["blk.0.indexer.proj.weight"][0] == "F32"


TABLES = (Role.EMBEDDING, Role.HEAD)
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"


@pytest.mark.parametrize("base", ["bf16", "q8_0"])
def test_damaged_halves_are_named(base: str, source: Path, tmp_path: Path) -> None:
    scale = f"{KV_B}_scale_inv"
    shard = shard_of(source, scale)
    header, data = read_shard(shard)
    start = header[scale]["data_offsets"][0]
    write_shard(shard, header, data[:start] + b"\0\0\xc0\x7f" + data[start + 4 :])  # NaN
    pair = ("--base-quant", base, "--mtp-quant", "bf16" if base == "bf16" else "q8_0")
    outcome = quantize(source, tmp_path / "out", *TARGET, *pair)
    assert outcome.code == 3 and f"{KV_B} cannot be converted (rows 0 to " in outcome.err
    assert not [*(tmp_path / "out").rglob("*.gguf")]


TYPES = {"gguf_mxfp4": "MXFP4"}
# Of rows that 256 does not divide, as nearly all of the miniature's.
FALLBACK = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0"}
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "MXFP4": 38}


def coded(values: Any, kind: Any) -> Any:
    """Values that blocks leave; those of K-quants, which the package does not encode, as they
    are written, as test_ggml_blocks compares them with llama.cpp's."""
    if not kind.name.endswith("_K"):
        return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    one = FORMATS[kind.name.lower()].of_options(FormatOptions())
    (blocks,), _ = one.quantize(torch.from_numpy(values).flatten(0, -2), "minmax")
    return gguf.quants.dequantize(blocks.numpy(), kind)


@pytest.mark.parametrize("base", GGUF_SCHEMES)
def test_every_linear_is_in_blocks(base: str, pristine: Path, tmp_path: Path) -> None:
    """From fp8, without bf16 between; the module, and tables of both parts, have 8 bits, those
    beside f16 its own."""
    output = tmp_path / "out"
    outcome = quantize(pristine, output, *TARGET, "--base-quant", base)
    assert outcome.code == 0, outcome.err
    kind, wanted = TYPES.get(base, base.upper()), expected(pristine, rounded=False)
    tables = ("token_embd.weight", "output.weight")
    for part in ("main", "mtp"):
        for name, (found, values) in stored(output / part).items():
            own = wanted[name if part == "main" else f"mtp/{name}"]
            is_wide = WIDE.search(name)
            of_eight = part == "mtp" or (name in tables and base != "f16")
            expects = "Q8_0" if of_eight else kind
            if own.shape[-1] % 256:
                expects = FALLBACK.get(expects, expects)
            assert found == ("F32" if is_wide else expects), name
            assert values.shape == own.shape, name
            if is_wide:
                assert torch.equal(values, own.float()), name
                continue
            own_type = gguf.GGMLQuantizationType[expects]
            again = torch.from_numpy(coded(own.float().contiguous().numpy(), own_type))
            assert torch.equal(values.float(), again.reshape(values.shape)), name
    (reader,) = readers(output / "main")
    assert keys_of(reader)["general.file_type"] == FILE_TYPES[FALLBACK.get(kind, kind)]
    replaced = FALLBACK.get(kind)
    assert (f"in {replaced} in place of {base}".lower() in outcome.err.lower()) is (
        replaced is not None
    ), outcome.err
    options = read_json(output / "mtp_export.json")["options"]
    assert (options["base_quant"], options["mtp_quant"]) == (base, "q8_0")


def test_weights_beyond_half_precision_are_named(pristine: Path, tmp_path: Path) -> None:
    """And are written in another type, beside which verify reads the others in half precision."""
    source = Path(shutil.copytree(pristine, tmp_path / "source"))
    name = "model.layers.1.self_attn.o_proj.weight"
    path = shard_of(source, f"{name}_scale_inv")
    header, data = read_shard(path)
    start, end = header[f"{name}_scale_inv"]["data_offsets"]
    large = np.full((end - start) // 4, 1e6, np.float32).tobytes()
    write_shard(path, header, data[:start] + large + data[end:])
    options = (*TARGET, "--base-quant", "f16")
    outcome = quantize(source, tmp_path / "out", *options)
    assert (outcome.code, f"Tensor {name} cannot be converted" in outcome.err) == (4, True)
    assert "of at most 65504, found" in outcome.err and "--tensor-type" in outcome.err
    assert not looks_finished(tmp_path / "out")
    typed = ("--tensor-type", "blk.1.attn_output=bf16")
    assert quantize(source, tmp_path / "typed", *options, *typed).code == 0
    kinds = {name: kind for name, (kind, _) in stored(tmp_path / "typed/main").items()}
    assert kinds["blk.1.attn_output.weight"] == "BF16"
    assert kinds["blk.0.attn_output.weight"] == kinds["output.weight"] == "F16"
    levels = ("--source", source, "--level", "weights", "--json", "--quiet")
    found = json.loads(run_program("verify", tmp_path / "typed", *levels).out)
    passed = {check["name"] for check in found["checks"] if check["status"] == "pass"}
    assert {"files", "weights"} <= passed  # and its size is implausible indeed


REFUSED = [
    (("--target", "llama.cpp", "--pre-tokenizer", "gpt2"), 2, "no pre-tokenizer of this name"),
    (("--pre-tokenizer", "gpt-2"), 2, "Only files for llama.cpp have a pre-tokenizer"),
    (("--part", "one"), 2, "Only files for llama.cpp hold the MTP module beside the main model"),
    ((*TARGET, "--shared-weights", "drop"), 4, "loads embedding and head"),
]
REFUSED_PAIRS = [
    (("--base-quant", "q8_0", "--mtp-quant", "q8_0"), "does not take the MTP module in q8_0"),
    ((*TARGET, "--base-quant", "a8w8_fp8"), "--mtp-quant bf16"),
    ((*TARGET, "--base-quant", "q4_0", "--mtp-quant", "bf16"), "q4_0 goes with --mtp-quant q8_0"),
    ((*TARGET, "--base-quant", "keep"), "does not take the MTP module in a8w8_fp8"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED_PAIRS, ids=lambda value: str(value)[-40:])
def test_pairs_that_are_refused(
    options: tuple[str, ...], words: str, pristine: Path, tmp_path: Path
) -> None:
    outcome = quantize(pristine, tmp_path / "out", *options)
    assert (outcome.code, words in outcome.err) == (4, True), outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("options", "code", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused(
    options: tuple[str, ...], code: int, words: str, pristine: Path, tmp_path: Path
) -> None:
    outcome = export(pristine, tmp_path / "out", *options)
    assert (outcome.code, words in outcome.err) == (code, True), outcome.err
    assert not (tmp_path / "out").exists()


def test_other_families_and_several_modules_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", SMALL_CONFIGS["mimo"])
    outcome = export(tmp_path / "other", tmp_path / "out", *TARGET)
    assert outcome.code == 4 and "has no layout for this model" in outcome.err
    make_checkpoint(tmp_path / "two", TINY_CONFIG | {"num_nextn_predict_layers": 2})
    outcome = export(tmp_path / "two", tmp_path / "out", *TARGET)
    assert outcome.code == 4 and "reads one MTP layer" in outcome.err


def test_a_finished_bundle_is_served_with_both_files(bundle: Path) -> None:
    outcome = run_program("launch", bundle)
    assert outcome.code == 0, outcome.err
    main, mtp = (next((bundle / part).glob("*.gguf")) for part in ("main", "mtp"))
    assert f"llama-server -m {main} -md {mtp} --spec-type draft-mtp" in outcome.out


def test_the_module_is_made_alone_beside_somebody_s_main_model(
    pristine: Path, tmp_path: Path
) -> None:
    options = ("--base-quant", "q4_0", "--part", "mtp")
    assert quantize(pristine, tmp_path / "alone", *TARGET, *options).code == 0
    assert quantize(pristine, tmp_path / "both", *TARGET, *options[:2]).code == 0
    alone, both = (readers(tmp_path / name / "mtp")[0] for name in ("alone", "both"))
    assert [t.data.tobytes() for t in alone.tensors] == [t.data.tobytes() for t in both.tensors]
    own = {"mtp_export.main_identity": "0" * 64}  # of a main model that is not there
    assert keys_of(alone) == keys_of(both) | own != keys_of(both)
    assert not (tmp_path / "alone/main").exists()


def test_the_command_names_both_first_files(pristine: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    outcome = export(pristine, output, *TARGET, "--max-shard-size", "300kB")
    main, mtp = (next((output / part).glob("*-00001-of-*.gguf")) for part in ("main", "mtp"))
    line = f"llama-server -m {main} -md {mtp} --spec-type draft-mtp --spec-draft-n-max 1"
    assert line in outcome.out


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 in its released shapes, every byte of it a hole in a sparse file."""
    folder = tmp_path_factory.mktemp("released") / "source"
    return make_checkpoint(
        folder, REAL_CONFIG, max_shard_bytes=4_300_000_000, filled=lambda _: False
    )


@pytest.mark.parametrize(
    ("base", "bits"), nightly_but([("q4_0", 4.5)], [("bf16", 16), ("q8_0", 8.5), ("q4_0", 4.5)])
)
def test_the_released_model_is_planned_to_the_byte(
    base: str, bits: float, released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**13))
    options = ("--base-quant", base, "--mtp-quant", "bf16" if base == "bf16" else "q8_0")
    outcome = quantize(released, tmp_path / "out", *TARGET, *options, "--dry-run", "--json")
    assert outcome.code == 0, outcome.err
    plan = json.loads(outcome.out)
    eight = 16 if base == "bf16" else 8.5
    expected_bytes = 4 * REAL_CONFIG["hidden_size"]  # the main model's norm beside the module
    for spec in family_of(REAL_CONFIG).tensors.values():
        own = eight if spec.mtp_layer is not None or spec.role in TABLES else bits
        is_wide = len(spec.shape) == 1 or spec.role is Role.ROUTER
        expected_bytes += int(prod(spec.shape) * (32 if is_wide else own)) // 8
    assert plan["bytes_after"] == expected_bytes
    assert plan["parts"]["mtp"]["tensors"] == 22 + 3 * 256
