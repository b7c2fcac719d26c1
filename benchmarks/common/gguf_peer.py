"""llama.cpp as a peer: files of the same shapes with random weights, and its own benchmarks.

Source: llama.cpp `ggml/src/ggml-common.h` (blocks).
"""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.gguf_models import IN_FLOAT32, architecture_of
from benchmarks.common.serve_peer import running

THREADS = 2
_POOL_BLOCKS = 1 << 21  # of random weights, of which every matrix has some
_SCALES = {"Q4_0": 0.005, "Q8_0": 0.0003, "Q6_K": 0.00003}
_SCALE_AT = {"Q6_K": 208}  # byte of a block's float16 scale; others begin with it


def write_gguf(path: Path, config: dict[str, Any], kind: str) -> Path:
    """Write the main layers of a config's fields, with every matrix in one kind of blocks, but the
    head in Q6_K beside Q4_0, as llama-quantize has it."""
    import gguf

    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(path, architecture.name)
    adding = {
        float: writer.add_float32,
        int: writer.add_uint32,
        bool: writer.add_bool,
        list: writer.add_array,
    }
    for key, value in architecture.keys(config).items():
        adding[type(value)](f"{architecture.name}.{key}", value)
    writer.add_tokenizer_model("gpt2")  # its server answers with texts
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"token{number}" for number in range(config["vocab_size"])])
    writer.add_token_types([1] * config["vocab_size"])
    writer.add_token_merges(["t o"])
    tensors = [(*tensor, _type_of(*tensor, kind)) for tensor in architecture.tensors(config)]
    for name, shape, own in tensors:
        width, size = gguf.GGML_QUANT_SIZES[own]
        stored = (*shape[:-1], shape[-1] // width * size)
        writer.add_tensor_info(name, stored, np.dtype("u1"), prod(stored), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, (_, shape, own) in enumerate(tensors):  # one at a time in memory
        writer.write_tensor_data(_content(shape, own, number))
    writer.close()
    return path


def _type_of(name: str, shape: tuple[int, ...], kind: str) -> Any:
    import gguf

    if len(shape) == 1 or name.endswith(IN_FLOAT32):
        kind = "F32"
    elif kind == "Q4_0" and name == "output.weight":
        kind = "Q6_K"
    return gguf.GGMLQuantizationType[kind]


def _content(shape: tuple[int, ...], kind: Any, number: int) -> np.ndarray[Any, Any]:
    """Return what a file has of a tensor: ones, small random numbers, or random blocks."""
    import gguf

    if len(shape) == 1:
        return np.ones(shape, "f4")
    if kind.name == "F32":
        values = np.random.default_rng(number).standard_normal(shape) * shape[-1] ** -0.5
        return values.astype("f4")
    pool = _blocks(kind.name)
    count, at = prod(shape) // gguf.GGML_QUANT_SIZES[kind][0], 4093 * number % 65536
    repeats = -(-(at + count) // len(pool))
    return (np.concatenate([pool] * repeats) if repeats > 1 else pool)[at : at + count]


@cache
def _blocks(kind: str) -> np.ndarray[Any, Any]:
    """Random blocks of a kind [blocks, bytes], each with the same scale."""
    import gguf

    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = np.random.default_rng(0).integers(0, 256, (_POOL_BLOCKS, size), dtype=np.uint8)
    at = _SCALE_AT.get(kind, 0)
    blocks[:, at : at + 2] = np.array([_SCALES[kind]], "f2").view(np.uint8)
    return blocks


def speeds(programs: Path, model: Path, prompt: int, tokens: int, batches: tuple[int, ...]) -> Any:
    """Return tokens per second of a prompt, and of decoding at every batch, by llama.cpp's own
    llama-batched-bench in a folder of programs."""
    command = [programs / "llama-batched-bench", "-m", model, "-t", THREADS, "-c", 8192]
    command += ["--output-format", "jsonl"]
    prompts = _lines([*command, "-npp", prompt, "-ntg", 1, "-npl", 1])
    decodes = _lines([*command, "-npp", 4, "-ntg", tokens, "-npl", ",".join(map(str, batches))])
    return {
        "prompt": max(line["speed_pp"] for line in prompts),
        "decode": {str(line["pl"]): line["speed_tg"] for line in decodes},
    }


def drafted_speed(programs: Path, model: Path, rates: Sequence[float], tokens: int) -> float:
    """Return tokens per second of one request by llama-server, with drafts of the model's MTP layer
    accepted at given rates."""
    command = [programs / "llama-server", "-m", model, "-t", THREADS, "-c", 8192, "-np", 1]
    command += ["--spec-type", "draft-mtp", "--spec-draft-n-max", len(rates)]
    command += ["--spec-draft-p-min", 0, "--spec-synth-rates", ",".join(map(str, rates))]
    asked = {"prompt": [5, 6, 7, 8], "n_predict": tokens, "temperature": 0, "ignore_eos": True}
    with running([*map(str, command)]) as port:
        answers = [_answer(port, asked) for _ in range(2)]  # the first one warms up
    return float(answers[-1]["timings"]["predicted_per_second"])


def _answer(port: int, asked: dict[str, Any]) -> dict[str, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/completion", json.dumps(asked), headers)
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
    return answer


def _lines(command: list[Any]) -> list[dict[str, Any]]:
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
