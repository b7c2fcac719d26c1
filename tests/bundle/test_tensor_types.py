"""Types of single tensors of GGUF files: by patterns of their names, in every kind of step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cases import edit_json, quantize, read_json, run_program
from mtp_export.verify.files.repair import remade

gguf = pytest.importorskip("gguf")

TARGET = ("--target", "llama.cpp", "--pre-tokenizer", "none", "--quiet")
PATTERNS = ("attn_v_b=q8_0", r"BLK\.[01]\.ffn_down=Q5_1", "nextn.eh_proj=bf16", "ffn_down=q4_1")
TYPES = tuple(word for pattern in PATTERNS for word in ("--tensor-type", pattern))


def types_of(folder: Path) -> dict[str, str]:
    readers = [gguf.GGUFReader(path) for path in sorted(folder.rglob("*.gguf"))]
    return {t.name: t.tensor_type.name for reader in readers for t in reader.tensors}


@pytest.mark.parametrize("base", ["bf16", "q4_0"])
def test_tensors_have_the_types_of_their_patterns(
    base: str, pristine: Path, tmp_path: Path
) -> None:
    """Of a source in fp8: halves one by one, merged experts, the module, and the rest as before."""
    pair = ("--base-quant", base, "--mtp-quant", "bf16" if base == "bf16" else "q8_0")
    assert quantize(pristine, tmp_path / "plain", *TARGET, *pair).code == 0
    planned = quantize(pristine, tmp_path / "out", *TARGET, *pair, *TYPES, "--dry-run", "--json")
    outcome = quantize(pristine, tmp_path / "out", *TARGET, *pair, *TYPES)
    assert outcome.code == 0, outcome.err
    plain, found = types_of(tmp_path / "plain"), types_of(tmp_path / "out")
    wanted = plain | {name: "Q8_0" for name in plain if "attn_v_b" in name}
    wanted |= {name: "Q4_1" for name in plain if "ffn_down" in name}
    wanted |= {name: "Q5_1" for name in plain if name.startswith(("blk.0.ffn_d", "blk.1.ffn_d"))}
    wanted |= {name: "BF16" for name in plain if "nextn.eh_proj" in name}
    assert found == wanted != plain
    readers = [gguf.GGUFReader(path) for path in (tmp_path / "out").rglob("*.gguf")]
    held = sum(int(tensor.n_bytes) for reader in readers for tensor in reader.tensors)
    assert json.loads(planned.out)["bytes_after"] == held
    recorded = read_json(tmp_path / "out/mtp_export.json")
    assert recorded["options"]["tensor_type"] == [*PATTERNS]
    again = remade(recorded, pristine, tmp_path / "out")
    assert "--tensor-type attn_v_b=q8_0 --tensor-type 'BLK" in again


def test_values_are_those_of_the_format(pristine: Path, tmp_path: Path) -> None:
    """A matrix in Q8_0 among others in bf16 has the bytes that a scheme gives it."""
    bf16 = ("--base-quant", "bf16", "--mtp-quant", "bf16", "--tensor-type", "blk.1=q8_0")
    eight = ("--base-quant", "q8_0")
    for name, options in (("typed", bf16), ("eight", eight)):
        assert quantize(pristine, tmp_path / name, *TARGET, *options).code == 0
    one, other = (
        {t.name: t for t in gguf.GGUFReader(next(folder.glob("*.gguf"))).tensors}
        for folder in (tmp_path / "typed/main", tmp_path / "eight/main")
    )
    names = [name for name in one if name.startswith("blk.1.")]
    assert {one[name].tensor_type.name for name in names} == {"F32", "Q8_0"}
    assert all(one[name].data.tobytes() == other[name].data.tobytes() for name in names)


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
    found = types_of(tmp_path / "out")
    assert found["blk.1.attn_v_b.weight"] == "Q8_0"
    assert found["blk.1.ffn_down_exps.weight"] == "Q5_1"


def _with_types(content: object, value: object) -> None:
    if isinstance(content, dict):
        for key, each in content.items():
            if key == "tensor_type":
                content[key] = value
            else:
                _with_types(each, value)


REFUSED = [
    (("x",), 2, "is not PATTERN=TYPE. Expected a type of bf16, q8_0"),
    (("attn=q9",), 2, "is not PATTERN=TYPE"),
    (("=q8_0",), 2, "is not PATTERN=TYPE"),
    (("(=q8_0",), 2, "has no pattern of a name"),
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
