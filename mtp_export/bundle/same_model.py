"""Comparison of two checkpoints that shall be one model: shapes, arithmetic and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from mtp_checkpoints.containers.gguf_architectures.keys_read import TOKENS
from mtp_checkpoints.containers.gguf_file import NAME as GGUF
from mtp_checkpoints.containers.gguf_file import read_header
from mtp_checkpoints.containers.gguf_vocabulary import unlike_tokens
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.parts import GatedMlp, Moe
from mtp_checkpoints.families.signs import with_counts_of
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.sources import strict_json
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.gguf_config import said_twice

_TOKENIZER = "tokenizer.json"
_VOCABULARIES = ("*.model", "*.tiktoken", "vocab.json", "tekken.json")
_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_nextn_predict_layers"),
    *("intermediate_size", "moe_intermediate_size", "n_routed_experts", "n_shared_experts"),
    *("first_k_dense_replace", "num_attention_heads", "num_key_value_heads"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_CONTRACT = "mtp_contract"
_EXPERTS = "n_routed_experts"
_TODO = "Take the original checkpoint that the main model was quantized from"


def with_mtp_layers(config: Mapping[str, Any], donor: Mapping[str, Any]) -> dict[str, Any]:
    """Return the main config.json with the MTP layers of the donor's, and how they are fed."""
    contract = {_CONTRACT: donor[_CONTRACT]} if _CONTRACT in donor else {}
    return {**with_counts_of(config, donor), **contract}


def check_same_model(main: Checkpoint, config: Mapping[str, Any], donor: Checkpoint) -> None:
    """Refuse an MTP layer of another model (InvalidInputError): other shapes, other arithmetic, or
    token ids with another meaning.

    config is the main model's, with the donor's number of MTP layers.
    """
    _check_sizes(main.path, config, donor)
    ours, theirs = family_of(config), family_of(donor.config)
    _check_shapes(main.path, ours, theirs)
    _check_arithmetic(main.path, ours, theirs)
    _check_keys(main, donor)
    check_same_tokenizer(main, donor)


def _check_sizes(where: Place, config: Mapping[str, Any], donor: Checkpoint) -> None:
    for key in ("model_type", *_SIZES):
        theirs, ours = donor.config.get(key), config.get(key)
        if key not in donor.config or ours == theirs:
            continue
        if key == _EXPERTS and isinstance(ours, int) and isinstance(theirs, int) and ours < theirs:
            raise _pruned(where, theirs, ours)
        raise _unlike(where, key, theirs, ours)


def _check_shapes(where: Place, ours: ModelSpec, theirs: ModelSpec) -> None:
    for name in {**ours.tensors, **theirs.tensors}:
        found, expected = (
            one.tensors[name].shape if name in one.tensors else None for one in (ours, theirs)
        )
        if found != expected:
            raise _unlike(where, f"shape of {name}", expected, found)


def _check_arithmetic(where: Place, ours: ModelSpec, theirs: ModelSpec) -> None:
    found, expected = _arithmetic(ours), _arithmetic(theirs)
    for what in expected:
        if found.get(what) != expected[what]:
            raise _unlike(where, what, expected[what], found.get(what))


def _check_keys(main: Checkpoint, donor: Checkpoint) -> None:
    """Compare the keys of a main model in GGUF files with the donor's config.json, which a graft
    writes beside them."""
    if not _is_gguf(main):
        return
    for one in said_twice(main.shards, donor.config, of_main=True):
        if not one.is_alike:
            raise _unlike(main.path, one.field, one.wanted, one.said)


def _arithmetic(spec: ModelSpec) -> dict[str, object]:
    """Return what a config.json says of the numbers that the last layer computes."""
    layer = spec.every_layer[-1]
    found: dict[str, object] = {
        "rms_norm_eps": spec.facts.norm_eps,
        "rotary embedding": layer.attention.rope,
    }
    mlp = layer.feed_forward
    if isinstance(mlp, Moe):
        found["router"], mlp = mlp.router, mlp.expert
    if isinstance(mlp, GatedMlp):
        found["hidden_act"] = mlp.activation
    return found


def _unlike(where: Place, what: str, expected: object, found: object) -> InvalidInputError:
    return InvalidInputError(
        f"The MTP layer belongs to another model than this one: {what} differs",
        where=where,
        expected=f"{expected}, as in the checkpoint with the MTP layer",
        found=found,
        todo=_TODO,
    )


def _pruned(where: Place, expected: int, found: int) -> InvalidInputError:
    return InvalidInputError(
        "Experts were pruned from the main model, and not from the MTP layer, and engines build as"
        " many in both",
        where=where,
        expected=f"{_EXPERTS} {expected}, as in the checkpoint with the MTP layer",
        found=found,
        todo="Prune those of the MTP layer alike, with the rows of its gate, and set"
        f" {_EXPERTS} {found} in its config.json",
    )


def _is_gguf(main: Checkpoint) -> bool:
    return bool(main.shards) and main.shards[0].container == GGUF


def check_same_tokenizer(main: Checkpoint, donor: Checkpoint) -> None:
    """Refuse tokenizers that give a token different ids; files that both have are compared, and of
    a GGUF file its tokens."""
    if _is_gguf(main):
        _check_tokens(main, donor)
        return
    names = main.files.names() & donor.files.names()
    if _TOKENIZER in names:
        _check_ids(main, donor)
        return
    for name in sorted(names):
        is_vocabulary = any(fnmatch(name, pattern) for pattern in _VOCABULARIES)
        if is_vocabulary and main.files.read(name) != donor.files.read(name):
            raise _unlike(main.path, name, "the same bytes", "others")


def _check_tokens(main: Checkpoint, donor: Checkpoint) -> None:
    """Compare the tokens of a GGUF file with the donor's tokenizer.json, where there are both."""
    tokens = read_header(main.shards[0].file).keys.get(TOKENS)
    if tokens is None or not isinstance(tokens.data, tuple):
        return
    if _TOKENIZER in donor.files.names():
        for number, found, expected in unlike_tokens(tokens.data, donor.files, donor.config):
            what = f"token {number} of {_TOKENIZER}"
            raise _unlike(main.path, what, repr(expected)[:40], repr(found)[:40])


def _check_ids(main: Checkpoint, donor: Checkpoint) -> None:
    """Compare ids alone: saving a tokenizer again writes the same one in other bytes."""
    raw = [one.files.read(_TOKENIZER) for one in (main, donor)]
    if raw[0] == raw[1]:
        return
    ours, theirs = (
        _ids(one.files.path / _TOKENIZER, content)
        for one, content in zip((main, donor), raw, strict=True)
    )
    for token in {**theirs, **ours}:
        if ours.get(token) != theirs.get(token):
            shown = repr(token)[:40]
            found, expected = (one.get(token, "no id") for one in (ours, theirs))
            raise _unlike(main.path, f"{_TOKENIZER}, token {shown}", expected, found)


def _ids(path: Place, raw: bytes) -> dict[str, int]:
    """Return the id of every token of a tokenizer.json (InvalidInputError for anything else)."""
    try:
        content = strict_json.parse(raw)
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens") or []}
        return {**vocabulary, **added}
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            "A tokenizer cannot be read",
            where=path,
            expected="a tokenizer.json with model.vocab and added_tokens",
            found=f"{type(error).__name__}: {error}"[:100],
            todo="Get the file again from the checkpoint's source",
        ) from None
