"""Good inputs, made once: small checkpoints, bundles of them, an unfinished run, prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from benchmarks.make_checkpoint import TINY_CONFIG, write_tokenizer
from cases import (
    Outcome,
    edit_json,
    export,
    make_checkpoint,
    quantize,
    read_json,
    run_in_a_fork,
    run_program,
)
from decoded_mains import write_mlx, write_nf4, write_quark
from fuzz.tensors import Tensors, read_tensors
from gguf_files import GgufModel, gguf_model, without_module
from mtp_checkpoints.dtypes import DType
from mtp_export.calibrate.main_model import MainCalibration
from mtp_runtime.loading.draft_folder import MEDUSA_PICKLE
from quantized_by_others import read_all, write
from runtime.checkpoints import SMALL_CONFIGS, changed, write_checkpoint
from runtime.drafts import ffn_layout, write_eagle3, write_heads
from verify.foreign import GLM, GLM_MTP, mtp_left_out, quantized

# As small as the layouts allow: groups of 32 weights, and the 256 bytes that a tokenizer needs.
CONFIG: dict[str, Any] = TINY_CONFIG | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "n_routed_experts": 2,
    "num_attention_heads": 2,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 260,
}
UNQUANTIZED = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
EXTRA_FILES = {
    "LICENSE": "Do as you like.\n",
    "modeling_x.py": "raise SystemExit('nobody may run this')\n",
    "chat_template.jinja": "{{ messages }}\n",
    "special_tokens_map.json": "{}\n",
}
CARD = "---\nlicense: mit\nbase_model:\n- acme/model\n---\n# A model\n"
PROMPTS = ({"prompt": "ab"}, {"prompt_token_ids": [5, 6, 7]}, {"prompt": "é, and on"})
# The unfinished run and the one that finishes it.
RESUMED = ("--max-shard-size", "8kB", "--link", "copy", "--workers", "1", "--quiet")
_DISK_CALLS_BEFORE_THE_END, _NEVER = 150, 1 << 29
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"model": "tiny", "prompt": "a b", "max_tokens": 3, "logprobs": 1, "seed": 1},
    "stream": {"prompt": [5, 6], "max_tokens": 3, "stream": True, "temperature": 0},
    "chat": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "n": 2},
}


@dataclass(frozen=True)
class Lab:
    """Folders of good inputs, by subject, and the bundle that the unfinished run becomes.

    An input holds source/, and what its commands take beside it: bundle/, quantized/, medusa/,
    work/, prompts.jsonl, bodies of requests, or answers.json, which names answers of a server that
    are damaged.
    """

    folder: Path

    def input(self, subject: str) -> Path:
        """Return the folder of a subject's good input."""
        return self.folder / subject

    @cached_property
    def good_tensors(self) -> list[Tensors]:
        """Return the tensors of the good checkpoints."""
        subjects = ("fp8", "bf16", "qwen")
        return [read_tensors(self.input(subject) / "source") for subject in subjects]

    @property
    def resumed(self) -> Path:
        """Return the bundle that an uninterrupted run makes of the unfinished one."""
        return self.folder / "resumed"

    @property
    def resume_options(self) -> tuple[str, ...]:
        """Return the options of the unfinished run."""
        return RESUMED


def build_lab(folder: Path) -> Lab:
    """Make the good inputs of all SUBJECTS."""
    lab = Lab(folder)
    for subject, make in SUBJECTS.items():
        make(lab.input(subject))
    assert export(lab.input("unfinished") / "source", lab.resumed, *RESUMED).code == 0
    return lab


def _fp8(folder: Path) -> None:
    """Several shards with an index, and files of every kind that travels along."""
    source = make_checkpoint(folder / "source", CONFIG, max_shard_bytes=60_000)
    for name, text in EXTRA_FILES.items():
        (source / name).write_text(text)


def _bf16(folder: Path) -> None:
    """One shard without an index."""
    source = make_checkpoint(folder / "source", UNQUANTIZED, own_copies=False)
    (source / "model.safetensors.index.json").unlink()
    (shard,) = source.glob("*.safetensors")
    shard.rename(source / "model.safetensors")


def _qwen(folder: Path) -> None:
    """Gated delta nets, experts in tensors of three dimensions, a vision tower, nested fields."""
    config = changed(SMALL_CONFIGS["qwen3_5_moe"], vocab_size=CONFIG["vocab_size"])
    source = write_checkpoint(folder / "source", config)
    write_tokenizer(source, CONFIG["vocab_size"])


def _bundle(folder: Path) -> None:
    _fp8(folder)
    options = ("--checksums", "all", "--link", "copy", "--quiet")
    _done(export(folder / "source", folder / "bundle", *options).code)


def _paddlenlp(folder: Path) -> None:
    _fp8(folder)
    options = ("--target", "paddlenlp", "--checksums", "all", "--link", "hardlink", "--quiet")
    _done(export(folder / "source", folder / "bundle", *options).code)


def _in(pair: tuple[str, str]) -> Callable[[Path], None]:
    """A bundle of one shard in a pair of schemes."""

    def make(folder: Path) -> None:
        _bf16(folder)
        _quantize(folder, *pair)

    return make


def _carried(folder: Path) -> None:
    """Codes in int4 and int8 that blocks of GGUF files hold."""
    _of_whole_blocks(folder / "source")
    _quantize(folder, *PAIRS["int4"])


def _quantize(folder: Path, base: str, mtp: str) -> None:
    """A bundle of a folder's source."""
    pair = ("--base-quant", base, "--mtp-quant", mtp)
    options = (*pair, "--group-size", "32", "--checksums", "all", "--workers", "1", "--quiet")
    _done(quantize(folder / "source", folder / "bundle", *options).code)


def _unfinished(folder: Path) -> None:
    _fp8(folder)
    source, bundle = folder / "source", folder / "bundle"
    code = run_in_a_fork(lambda: export(source, bundle, *RESUMED), _DISK_CALLS_BEFORE_THE_END)
    finished = (bundle / ".mtp_export.journal").read_bytes().count(b"\n") - 1
    assert code == 9 and finished > 2, "it was cut short, and has shards to resume from"


def _shares(folder: Path) -> None:
    """Both shares of a bundle that nobody has finished."""
    _fp8(folder)
    for share in ("1/2", "2/2"):
        _done(export(folder / "source", folder / "bundle", *RESUMED, "--share", share).code)


def _drafts(folder: Path) -> None:
    """A bundle with drafts of its own, and heads as Medusa saves them."""
    _bf16(folder)
    _done(export(folder / "source", folder / "bundle", "--link", "copy", "--quiet").code)
    sizes = {"hidden": CONFIG["hidden_size"], "vocab": CONFIG["vocab_size"]}
    write_eagle3(folder / "bundle/eagle3", UNQUANTIZED, taps=(1,), num_aux_hidden_states=1)
    write_heads(folder / "bundle/parallel_heads", ffn_layout(**sizes))
    medusa = write_heads(folder / "medusa", ffn_layout(**sizes))
    torch.save(load_file(medusa / "model.safetensors"), medusa / MEDUSA_PICKLE)
    (medusa / "model.safetensors").unlink()


def _tuning(folder: Path) -> None:
    """A bundle, prompts, and the work folder of a run that trained and did not finish."""
    _prompts(folder)
    _done(export(folder / "source", folder / "bundle", "--link", "copy", "--quiet").code)
    arguments = tune_arguments(folder, folder / "tuned")
    # In a fork: no child of a process that computed gradients may compute any.
    _done(run_in_a_fork(lambda: run_program(*arguments, "--quiet"), _NEVER))
    shutil.rmtree(folder / "tuned")


def tune_arguments(folder: Path, output: Path) -> tuple[object, ...]:
    """Return the command that tunes the bundle of an input."""
    places = ("--bundle", folder / "bundle", "--data", folder / "prompts.jsonl")
    lengths = ("--max-new-tokens", "4", "--max-text-tokens", "32", "--batch-tokens", "64")
    course = ("--steps", "2", "--k", "1", "--workdir", folder / "work")
    return ("tune", *places, "--output-dir", output, *lengths, *course)


def _calibration(folder: Path) -> None:
    """A checkpoint, prompts, and the work folders of a calibration of its MTP layer, and of one of
    the main model too that ended when all codes were chosen."""
    _prompts(folder)
    arguments = calibrate_arguments(folder, folder / "calibrated")
    _done(run_in_a_fork(lambda: run_program(*arguments, "--quiet"), _NEVER))
    shutil.rmtree(folder / "calibrated")

    def interrupted() -> Outcome:
        with patch.object(MainCalibration, "_drop", side_effect=KeyboardInterrupt):
            return run_program(*arguments, "--calibrate-main", "--quiet")

    assert run_in_a_fork(interrupted, _NEVER) == 130
    shutil.rmtree(folder / "calibrated")


def calibrate_arguments(folder: Path, output: Path) -> tuple[object, ...]:
    """Return the command that quantizes the checkpoint of an input by its prompts."""
    pair = ("--base-quant", "weight_only_nvfp4", "--mtp-quant", "weight_only_nvfp4")
    data = ("--calibrate", folder / "prompts.jsonl", "--max-new-tokens", "4")
    places = ("--input-dir", folder / "source", "--output-dir", output)
    return ("quantize", *places, *pair, *data, "--workdir", folder / "work", "--workers", "1")


def _bodies(folder: Path) -> None:
    """Bodies of requests."""
    folder.mkdir(parents=True)
    for name, body in BODIES.items():
        (folder / f"{name}.body").write_text(json.dumps(body))


def _served(folder: Path) -> None:
    """The model that answers them."""
    _bf16(folder)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "source/chat_template.jinja").write_text(template)


def _prompts(folder: Path) -> None:
    _bf16(folder)
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _hub(folder: Path) -> None:
    _bundle(folder)
    (folder / "answers.json").write_text("{}")


def _quantized(method: str) -> Callable[[Path], None]:
    """A checkpoint, and its main model as others quantize it."""

    def make(folder: Path) -> None:
        _bf16(folder)
        write(folder / "source", folder / "quantized", method)

    return make


def _gguf(folder: Path) -> None:
    """A GGUF file of both parts, in blocks, with a tokenizer beside it."""
    _bf16(folder / "released")
    source = folder / "source"
    source.mkdir()
    released = folder / "released/source"
    gguf_model(released, "q8_0").write(source / "tiny.gguf")
    for path in released.glob("tokenizer*"):
        shutil.copy2(path, source)
    shutil.rmtree(folder / "released")


def _gguf_main(folder: Path) -> None:
    """A checkpoint, and its main model alone as a GGUF file, some of it in a type that is not
    decoded."""
    _of_whole_blocks(folder / "source")
    main = without_module(gguf_model(folder / "source", "q4_0"))
    opaque = replace(main.tensors["token_embd.weight"], dtype=DType.GGML_IQ4_NL)
    (folder / "quantized").mkdir()
    model = GgufModel(main.keys, {**main.tensors, opaque.name: opaque})
    model.write(folder / "quantized/tiny.gguf")


def _gguf_bundle(*options: str) -> Callable[[Path], None]:
    """A bundle of such files."""

    def make(folder: Path) -> None:
        _of_whole_blocks(folder / "source")
        pair = ("--base-quant", "q4_0", "--target", "llama.cpp", "--pre-tokenizer", "gpt-2")
        _done(quantize(folder / "source", folder / "bundle", *pair, *options, "--quiet").code)

    return make


def _of_whole_blocks(source: Path) -> None:
    """A checkpoint whose halves of kv_b_proj have rows of whole blocks."""
    make_checkpoint(source, UNQUANTIZED | {"qk_nope_head_dim": 32}, own_copies=False)


def _foreign(method: str) -> Callable[[Path], None]:
    """A checkpoint as others publish it: its main model quantized, its MTP layer left out of that,
    and a card that names the model it was made from."""

    def make(folder: Path) -> None:
        _bf16(folder / "unquantized")
        source = quantized(folder / "unquantized/source", folder / "source", method)
        config = read_json(source / "config.json")
        if "quantization_config" in config:
            edit_json(source / "config.json", mtp_left_out)
        else:
            layer = f"model.layers.{config['num_hidden_layers']}*"
            edit_json(
                source / "hf_quant_config.json",
                lambda file: file["quantization"]["exclude_modules"].append(layer),
            )
        (source / "README.md").write_text(CARD)
        shutil.rmtree(folder / "unquantized")

    return make


def _beside(write_main: Callable[[Path, Path, str], Path]) -> Callable[[Path], None]:
    """The miniature of GLM-4.5, its main model as a tool stores it and its MTP layer as it was."""

    def make(folder: Path) -> None:
        source = write_main(GLM, folder / "source", GLM_MTP)
        layer = {n: one for n, one in read_all(GLM).items() if n.startswith(GLM_MTP)}
        (shard,) = source.glob("*.safetensors")
        save_file(load_file(shard) | layer, shard)
        edit_json(source / "config.json", mtp_left_out)

    return make


def _done(code: int) -> None:
    assert code == 0, f"a good input cannot be made: exit {code}"


def copy_of(folder: Path, target: Path) -> None:
    """Copy an input with its times, by which an unfinished run knows its source."""
    shutil.copytree(folder, target, copy_function=shutil.copy2)


_TOOLS: dict[str, Callable[[Path, Path, str], Path]] = {
    "mlx": write_mlx,
    "bitsandbytes": write_nf4,
    "quark": write_quark,
    "quark, fused experts": partial(write_quark, packs_experts=False),
}
FOREIGN = (
    *("awq", "auto-round", "compressed-tensors, int8", "fp8"),
    *("modelopt nvfp4", "modelopt fp8, in a file", *_TOOLS),
)
PAIRS = {
    "int4": ("weight_only_int4", "weight_only_int8"),
    "nvfp4": ("a4w4_nvfp4", "a4w4_nvfp4"),
    "mxfp4": ("weight_only_mxfp4", "weight_only_mxfp4"),
    "mxfp8": ("a8w8_mxfp8", "a8w8_mxfp8"),
}
SUBJECTS: dict[str, Callable[[Path], None]] = {
    "fp8": _fp8,
    "bf16": _bf16,
    "qwen": _qwen,
    "bundle": _bundle,
    "paddlenlp": _paddlenlp,
    "carried": _carried,
    "unfinished": _unfinished,
    "shares": _shares,
    "drafts": _drafts,
    "tuning": _tuning,
    "calibration": _calibration,
    "bodies": _bodies,
    "served": _served,
    "prompts": _prompts,
    "hub": _hub,
    "gguf": _gguf,
    "gguf main": _gguf_main,
    "gguf bundle": _gguf_bundle("--tensor-type", "ffn_down=f16"),
    "gguf in one": _gguf_bundle("--part", "one"),
    "awq": _quantized("awq"),
    "gptq": _quantized("gptq, permuted"),
    "compressed": _quantized("compressed-tensors, int4"),
    "modelopt": _quantized("modelopt fp8, in a file"),
}
SUBJECTS |= {name: _in(pair) for name, pair in PAIRS.items()}
SUBJECTS |= {f"foreign {method}": _foreign(method) for method in FOREIGN if method not in _TOOLS}
SUBJECTS |= {f"foreign {method}": _beside(write_main) for method, write_main in _TOOLS.items()}
