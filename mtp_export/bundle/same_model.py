"""Comparison of two checkpoints that shall be one model: shapes, arithmetic and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.facts import RouterFacts, RunFacts
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.sources import strict_json
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.tensors.reader import Checkpoint

_TOKENIZER = "tokenizer.json"
_VOCABULARIES = ("*.model", "*.tiktoken", "vocab.json", "tekken.json")
_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_nextn_predict_layers"),
    *("intermediate_size", "moe_intermediate_size", "n_routed_experts", "n_shared_experts"),
    *("first_k_dense_replace", "num_attention_heads", "num_key_value_heads"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_TODO = "Take the original checkpoint that the main model was quantized from"


def check_same_model(main: Checkpoint, config: Mapping[str, Any], donor: Checkpoint) -> None:
    """Refuse an MTP layer of another model (InvalidInputError): other shapes, other arithmetic, or
    token ids with another meaning.

    config is the main model's, with the donor's number of MTP layers.
    """
    _check_shapes(main.path, config, donor)
    _check_arithmetic(main.path, config, donor)
    check_same_tokenizer(main, donor)


def _check_shapes(where: Place, config: Mapping[str, Any], donor: Checkpoint) -> None:
    for key in ("model_type", *_SIZES):
        if key in donor.config and config.get(key) != donor.config[key]:
            raise _unlike(where, key, donor.config.get(key), config.get(key))
    ours, theirs = (
        {spec.name: spec.shape for spec in family_of(one).tensors.values()}
        for one in (config, donor.config)
    )
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            raise _unlike(where, f"shape of {name}", theirs.get(name), ours.get(name))


def _check_arithmetic(where: Place, config: Mapping[str, Any], donor: Checkpoint) -> None:
    ours, theirs = _arithmetic(config), _arithmetic(donor.config)
    for what in theirs:
        if ours.get(what) != theirs[what]:
            raise _unlike(where, what, theirs[what], ours.get(what))


def _arithmetic(config: Mapping[str, Any]) -> dict[str, object]:
    """Return what a config.json says of the numbers that a layer computes."""
    fields = Fields(config)
    facts = RunFacts.of(fields)
    found: dict[str, object] = {
        "rms_norm_eps": facts.norm_eps,
        "hidden_act": facts.hidden_act,
        "rotary embedding": facts.rope,
    }
    if fields.has("n_routed_experts"):
        found["router"] = RouterFacts.of(fields, fields.whole("n_routed_experts"))
    return found


def _unlike(where: Place, what: str, expected: object, found: object) -> InvalidInputError:
    return InvalidInputError(
        f"The MTP layer belongs to another model than this one: {what} differs",
        where=where,
        expected=f"{expected}, as in the checkpoint with the MTP layer",
        found=found,
        todo=_TODO,
    )


def check_same_tokenizer(main: Checkpoint, donor: Checkpoint) -> None:
    """Refuse tokenizers that give a token different ids; files that both have are compared."""
    names = main.files.names() & donor.files.names()
    if _TOKENIZER in names:
        _check_ids(main, donor)
        return
    for name in sorted(names):
        is_vocabulary = any(fnmatch(name, pattern) for pattern in _VOCABULARIES)
        if is_vocabulary and main.files.read(name) != donor.files.read(name):
            raise _unlike(main.path, name, "the same bytes", "others")


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
