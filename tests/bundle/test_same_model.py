"""Two checkpoints that shall be one model: every field that is compared, and the refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cases import TINY_CONFIG
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.same_model import check_same_model, check_same_tokenizer

MAIN, DONOR = Path("/models/main"), Path("/models/donor")
Config = dict[str, Any]
SIZES = [
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_nextn_predict_layers"),
    *("intermediate_size", "moe_intermediate_size", "n_routed_experts", "n_shared_experts"),
    *("first_k_dense_replace", "num_attention_heads", "num_key_value_heads", "q_lora_rank"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
]


@dataclass(frozen=True)
class Files:
    """Files of a folder; one that is not there must not be asked for."""

    path: Path
    content: Mapping[str, bytes] = field(default_factory=dict)

    def names(self) -> frozenset[str]:
        return frozenset(self.content)

    def read(self, name: str) -> bytes:
        return self.content[name]


def checkpoint(path: Path, config: Config = TINY_CONFIG, **files: bytes) -> Checkpoint:
    content = {name.replace("__", "."): value for name, value in files.items()}
    found: Any = SimpleNamespace(path=path, config=config, shards=(), files=Files(path, content))
    return cast(Checkpoint, found)


def compare(config: Config, donor: Config = TINY_CONFIG) -> None:
    check_same_model(checkpoint(MAIN), config, checkpoint(DONOR, donor))


def without(*keys: str) -> Config:
    return {key: value for key, value in TINY_CONFIG.items() if key not in keys}


def refusal(config: Config, donor: Config = TINY_CONFIG) -> tuple[str, str, object]:
    """The difference, as the donor has it, and as the main model has it."""
    with pytest.raises(InvalidInputError) as caught:
        compare(config, donor)
    return words_of(caught.value)


def words_of(error: InvalidInputError) -> tuple[str, str, object]:
    assert error.where == MAIN
    assert error.todo == "Take the original checkpoint that the main model was quantized from"
    start, end = "The MTP layer belongs to another model than this one: ", " differs"
    assert error.what.startswith(start) and error.what.endswith(end)
    tail = ", as in the checkpoint with the MTP layer"
    assert str(error.expected).endswith(tail)
    differs = error.what.removeprefix(start).removesuffix(end)
    return differs, str(error.expected).removesuffix(tail), error.found


def test_equal_configs() -> None:
    compare(TINY_CONFIG)
    compare(TINY_CONFIG | {"torch_dtype": "float16", "quantization_config": None})


@pytest.mark.parametrize("key", SIZES)
def test_every_size_is_compared(key: str) -> None:
    assert key in TINY_CONFIG
    other = TINY_CONFIG[key] + 1
    assert refusal(TINY_CONFIG | {key: other}) == (key, str(TINY_CONFIG[key]), other)
    assert refusal(without(key)) == (key, str(TINY_CONFIG[key]), None)


def test_experts_that_were_pruned_from_the_main_model_alone() -> None:
    with pytest.raises(InvalidInputError) as caught:
        compare(TINY_CONFIG | {"n_routed_experts": TINY_CONFIG["n_routed_experts"] - 1})
    assert caught.value.what.startswith("Experts were pruned from the main model")
    assert "Prune those of the MTP layer alike" in str(caught.value)


def test_a_size_that_the_donor_does_not_say_is_not_compared() -> None:
    compare(TINY_CONFIG, without("num_key_value_heads"))
    compare(without("num_key_value_heads"), without("num_key_value_heads"))


def test_the_model_type_is_compared_first() -> None:
    config = TINY_CONFIG | {"model_type": "glm4_moe", "vocab_size": 7}
    assert refusal(config) == ("model_type", "deepseek_v3", "glm4_moe")


def test_tensors_that_only_one_of_them_has() -> None:
    """By their shapes: a field that the donor lacks says nothing by itself."""
    what, expected, found = refusal(TINY_CONFIG, without("q_lora_rank"))
    assert what == "shape of model.layers.0.self_attn.q_a_layernorm.weight"
    assert (expected, found) == ("None", (160,))


def test_tensors_of_another_shape() -> None:
    """Where neither config.json says the size that they follow from by a field that is compared."""
    main, donor = (
        TINY_CONFIG | {"model_type": "glm4_moe", "num_nextn_predict_layers": 1, "head_dim": size}
        for size in (32, 64)
    )
    what, expected, found = refusal(main, donor)
    assert what == "shape of model.layers.0.self_attn.q_proj.weight"
    heads, hidden = TINY_CONFIG["num_attention_heads"], TINY_CONFIG["hidden_size"]
    assert (expected, found) == (str((heads * 64, hidden)), (heads * 32, hidden))


@pytest.mark.parametrize(
    ("changes", "differs", "shown"),
    [
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps", ("1e-06", "0.001")),
        ({"hidden_act": "gelu"}, "hidden_act", ("silu", "gelu")),
        ({"rope_theta": 5e5}, "rotary embedding", ("theta=10000.0", "theta=500000.0")),
        ({"routed_scaling_factor": 1.0}, "router", ("scale=2.5", "scale=1.0")),
        ({"norm_topk_prob": False}, "router", ("normalises=True", "normalises=False")),
    ],
)
def test_arithmetic_is_compared(changes: Config, differs: str, shown: tuple[str, str]) -> None:
    what, expected, found = refusal(TINY_CONFIG | changes)
    assert what == differs
    assert shown[0] in expected and shown[1] in str(found)


def tokenizer(vocabulary: object, added: object = None, **more: object) -> bytes:
    return json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added, **more}).encode()


def tokenizers(ours: dict[str, bytes], theirs: dict[str, bytes]) -> InvalidInputError | None:
    main, donor = checkpoint(MAIN, **ours), checkpoint(DONOR, **theirs)
    results = list[InvalidInputError | None]()
    for compared in (
        lambda: check_same_tokenizer(main, donor),
        lambda: check_same_model(main, TINY_CONFIG, donor),
    ):
        try:
            compared()
            results.append(None)
        except InvalidInputError as error:
            results.append(error)
    assert str(results[0]) == str(results[1])
    return results[0]


def ids(ours: bytes, theirs: bytes) -> InvalidInputError | None:
    return tokenizers({"tokenizer__json": ours}, {"tokenizer__json": theirs})


def differing(error: InvalidInputError | None) -> tuple[str, str, object]:
    assert error is not None
    return words_of(error)


def test_files_that_one_of_them_has_are_not_compared() -> None:
    assert tokenizers({"tokenizer__json": b"{"}, {}) is None
    assert tokenizers({}, {"tokenizer__json": b"{", "tokenizer__model": b"x"}) is None
    assert tokenizers({"tokenizer__json": b"{"}, {"vocab__json": b"x"}) is None


def test_equal_files_are_not_read() -> None:
    assert ids(b"no JSON", b"no JSON") is None


VOCABULARIES = ["spiece__model", "qwen__tiktoken", "vocab__json", "tekken__json"]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_other_vocabularies_are_compared_byte_by_byte(name: str) -> None:
    assert tokenizers({name: b"same"}, {name: b"same"}) is None
    found = differing(tokenizers({name: b"ours"}, {name: b"theirs"}))
    assert found == (name.replace("__", "."), "the same bytes", "others")
    both = {"tokenizer__json": tokenizer({"a": 0})}
    assert tokenizers(both | {name: b"ours"}, both | {name: b"theirs"}) is None


def test_the_first_vocabulary_that_differs_is_named() -> None:
    ours, theirs = (dict.fromkeys(VOCABULARIES, content) for content in (b"ours", b"theirs"))
    assert differing(tokenizers(ours, theirs))[0] == "qwen.tiktoken"
    assert differing(tokenizers(ours, theirs | {"qwen__tiktoken": b"ours"}))[0] == "spiece.model"
    others = {"merges__txt": b"ours", "vocab__txt": b"ours"}
    assert tokenizers(others, {"merges__txt": b"theirs", "vocab__txt": b"theirs"}) is None


def test_ids_are_compared_whatever_the_bytes() -> None:
    one = tokenizer({"a": 0, "b": 1}, [{"id": 2, "content": "<eos>"}])
    assert ids(one, tokenizer({"b": 1, "a": 0, "<eos>": 2}, version="1.0")) is None
    assert (
        ids(one, tokenizer({"b": 1, "a": 0, "<eos>": 9}, [{"id": 2, "content": "<eos>"}])) is None
    )
    pieces = tokenizer([["a", 0.0], ["b", -1.0]], [{"id": 2, "content": "<eos>"}])
    assert ids(one, pieces) is None
    swapped = tokenizer([["b", 0.0], ["a", -1.0]], [{"id": 2, "content": "<eos>"}])
    assert differing(ids(one, swapped)) == ("tokenizer.json, token 'b'", "0", 1)
    added = tokenizer({"a": 0, "b": 1}, [{"id": 3, "content": "<eos>"}])
    assert differing(ids(one, added)) == ("tokenizer.json, token '<eos>'", "3", 2)


def test_tokens_that_one_of_them_has() -> None:
    long = "x" * 60
    one, other = tokenizer({"a": 0}), tokenizer({"a": 0, long: 1})
    assert differing(ids(one, other)) == (f"tokenizer.json, token '{long[:39]}", "1", "no id")
    assert differing(ids(other, one)) == (f"tokenizer.json, token '{long[:39]}", "no id", 1)


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"{}", "KeyError: 'model'"),
        (b'{"model": {}}', "KeyError: 'vocab'"),
        (b'{"model": {"vocab": 5}}', "TypeError: 'int' object is not a mapping"),
        (b'{"model": {"vocab": [5]}}', "TypeError: cannot unpack non-iterable int object"),
        (tokenizer({}, [{"content": "a"}]), "KeyError: 'id'"),
        (
            b'{"' + b"k" * 99 + b'":1,"' + b"k" * 99 + b'":1}',
            f"DuplicateKeyError: the key '{'k' * 72}",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_read(raw: bytes, found: str) -> None:
    good = tokenizer({"a": 0})
    for ours, theirs, folder in ((raw, good, MAIN), (good, raw, DONOR)):
        error = ids(ours, theirs)
        assert error is not None
        assert error.what == "A tokenizer cannot be read"
        assert error.where == folder / "tokenizer.json"
        assert error.expected == "a tokenizer.json with model.vocab and added_tokens"
        assert error.found == found
        assert error.todo == "Get the file again from the checkpoint's source"
