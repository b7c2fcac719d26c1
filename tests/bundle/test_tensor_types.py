"""Types of single tensors of GGUF files: by patterns of their names, in every kind of step."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bundle.test_gguf_bundles import WIDE, coded, expected, stored
from cases import (
    UNQUANTIZED,
    edit_json,
    make_checkpoint,
    nightly_but,
    quantize,
    read_json,
    read_tensors,
    run_program,
)
from mtp_checkpoints.errors import UsageError
from mtp_export.bundle.tensor_types import TensorTypes
from mtp_export.verify.files.repair import remade

gguf = pytest.importorskip("gguf")

TARGET = ("--target", "llama.cpp", "--pre-tokenizer", "none", "--quiet")
PATTERNS = ("attn_v_b=q8_0", r"BLK\.[01]\.ffn_down=Q5_1", "nextn.eh_proj=bf16", "ffn_down=q4_1")
TYPES = tuple(word for pattern in PATTERNS for word in ("--tensor-type", pattern))
# What they mean: the types of names that begin so, or have this in them.
WANTED = {
    "attn_v_b": "Q8_0",
    "blk.0.ffn_down": "Q5_1",
    "blk.1.ffn_down": "Q5_1",
    "nextn.eh_proj": "BF16",
    "ffn_down": "Q4_1",
}
TABLES = ("token_embd.weight", "output.weight")


@pytest.mark.parametrize("base", nightly_but(["q4_0"], ["bf16", "q4_0"]))
def test_tensors_have_the_types_of_their_patterns(
    base: str, pristine: Path, tmp_path: Path
) -> None:
    """Of a source in fp8, in the values of the package `gguf`: halves one by one, merged experts,
    the module, and the rest as the scheme has them."""
    eight = "bf16" if base == "bf16" else "q8_0"
    options = (*TARGET, "--base-quant", base, "--mtp-quant", eight, *TYPES)
    planned = quantize(pristine, tmp_path / "out", *options, "--dry-run", "--json")
    outcome = quantize(pristine, tmp_path / "out", *options)
    assert outcome.code == 0, outcome.err
    wanted, held = expected(pristine, rounded=False), 0
    for part in ("main", "mtp"):
        for name, (kind, values) in stored(tmp_path / "out" / part).items():
            own = wanted[name if part == "main" else f"mtp/{name}"]
            plain = eight if part == "mtp" or name in TABLES else base
            chosen = next((WANTED[one] for one in WANTED if one in name), plain.upper())
            assert kind == ("F32" if WIDE.search(name) else chosen), name
            own_type = gguf.GGMLQuantizationType[kind]
            block, size = gguf.GGML_QUANT_SIZES[own_type]
            held += own.numel() // block * size
            again = torch.from_numpy(coded(own.float().contiguous().numpy(), own_type))
            assert torch.equal(values.float(), again.reshape(values.shape)), name
    assert json.loads(planned.out)["bytes_after"] == held
    recorded = read_json(tmp_path / "out/mtp_export.json")
    assert recorded["options"]["tensor_type"] == [*PATTERNS]
    again = remade(recorded, pristine, tmp_path / "out")
    assert "--tensor-type attn_v_b=q8_0 --tensor-type 'BLK" in again


def test_shares_have_them(pristine: Path, tmp_path: Path) -> None:
    pair = ("--base-quant", "q4_0", *TYPES)
    for share in ("1/2", "2/2"):
        assert quantize(pristine, tmp_path / "out", *TARGET, *pair, "--share", share).code == 0
    shutil.copytree(tmp_path / "out", tmp_path / "damaged")
    for request in (tmp_path / "damaged").rglob("*.json"):
        edit_json(request, lambda content: _with_types(content, 3))
    outcome = run_program("finish", tmp_path / "damaged")
    assert outcome.code == 3 and "Traceback" not in outcome.err, outcome.err
    assert run_program("finish", tmp_path / "out").code == 0
    found = stored(tmp_path / "out/main")
    assert found["blk.1.attn_v_b.weight"][0] == "Q8_0"
    assert found["blk.1.ffn_down_exps.weight"][0] == "Q5_1"


def _with_types(content: object, value: object) -> None:
    if isinstance(content, dict):
        for key, each in content.items():
            if key == "tensor_type":
                content[key] = value
            else:
                _with_types(each, value)


WORDS = [
    ("x", "is not PATTERN=TYPE. Expected a type of bf16, f16, q8_0"),
    ("attn=q9", "is not PATTERN=TYPE"),
    ("=q8_0", "is not PATTERN=TYPE"),
    ("(=q8_0", "has no pattern of a name"),
]


@pytest.mark.parametrize(("word", "said"), WORDS)
def test_words_that_are_refused(word: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        TensorTypes.of([word])


REFUSED = [
    (("attn=q8_0", "nonsense=q8_0"), 2, "--tensor-type nonsense=TYPE names no matrix"),
    (("attn_norm=q8_0",), 2, "--tensor-type attn_norm=TYPE names no matrix"),
    (("attn_q_a.weight=q6_k",), 4, "cannot become q6_k. Expected rows divisible by 256"),
]


@pytest.mark.parametrize(("words", "code", "said"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_is_refused(
    words: tuple[str, ...], code: int, said: str, pristine: Path, tmp_path: Path
) -> None:
    types = [part for word in words for part in ("--tensor-type", word)]
    outcome = quantize(pristine, tmp_path / "out", *TARGET, "--base-quant", "q4_0", *types)
    assert (outcome.code, said in outcome.err) == (code, True), outcome.err
    assert not (tmp_path / "out").exists()


def test_another_target_has_no_types(pristine: Path, tmp_path: Path) -> None:
    fp8 = ("--base-quant", "a8w8_fp8", "--mtp-quant", "a8w8_fp8", "--tensor-type", "attn=q8_0")
    outcome = quantize(pristine, tmp_path / "out", *fp8)
    assert outcome.code == 2 and "Only files for llama.cpp have types by tensor" in outcome.err


@pytest.mark.nightly
def test_half_precision_is_converted_as_the_numbers_that_it_holds(tmp_path: Path) -> None:
    """Tensors of a source in fp16 are those of the same numbers in fp32, halves of latents too."""
    config = UNQUANTIZED | {"qk_nope_head_dim": 32}
    released = make_checkpoint(tmp_path / "released", config, own_copies=False)
    halves = {name: one.half() for name, one in read_tensors(released).items()}
    made = []
    for dtype in (torch.float16, torch.float32):
        source, output = tmp_path / f"{dtype}", tmp_path / f"{dtype} out"
        shutil.copytree(released, source, ignore=shutil.ignore_patterns("*.safetensors*"))
        tensors = {n: one.to(torch.float32 if "bias" in n else dtype) for n, one in halves.items()}
        save_file(tensors, source / "model.safetensors")
        outcome = quantize(source, output, *TARGET, "--base-quant", "q4_0", *TYPES[:-4])
        assert outcome.code == 0, outcome.err
        made.append([stored(output / part) for part in ("main", "mtp")])
    for found, wanted in zip(*made, strict=True):
        assert found.keys() == wanted.keys()
        for name, (kind, values) in found.items():
            assert kind == wanted[name][0] and torch.equal(values, wanted[name][1]), name
