"""Signs of MTP modules in any checkpoint, of a known family or not: how many its config.json
announces, which tensors are theirs by name, and which drafts go by MTP's names without being one.

Names and fields are those that vLLM's, SGLang's and transformers' loaders look for.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

# Fields of config.json that count MTP modules; nested configs are those of a model's text part.
COUNT_FIELDS = (
    *("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"),
    *("num_mtp_layers", "mtp_num_layers"),
)
LAYER_FIELDS = ("num_hidden_layers", "num_layers")  # LongCat's is the second
NESTED = ("text_config", "llm_config", "language_config")
_OWN_BLOCK = "mtp_config"  # announces modules, and may count them
# Models whose config.json has no such field, with the number that engines take.
USUAL_COUNTS = {
    "qwen3_next": 1,
    "longcat_flash": 1,
    "dots3_note": 1,
    "mimo_v2": 3,
    "mimo_v2_flash": 3,
}
# SGLang's `maybe_add_mtp_safetensors`: the file that it loads though the index leaves it out.
_ADDED_BY_SGLANG = "mtp.safetensors"
_ADDED_TO = frozenset({"Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"})
_ONE_MODULE = frozenset({"hy_v4"})  # counts the passes over one module
_EXPERT_COUNTS = (
    *("mtp_num_experts", "n_routed_experts", "num_experts", "num_local_experts"),
    "moe_num_experts",
)

# Numbers of more digits are none of a layer or an expert.
_BY_NAME = re.compile(r"(?:^|\.)((?:mtp|nextn)(?:_[a-z_]+)?)\.(?:layers\.)?(?:(\d{1,6})\.)?")
# blk is that of a GGUF file's tensors that have no released name.
_LAYER = re.compile(
    r"^((?:language_model\.|llm\.|model\.|transformer\.|backbone\.)*layers|blk)\.(\d{1,6})\.",
    re.ASCII,
)
_IN_LAYER = re.compile(r"(.*?\b(?:(?:mtp_)?layers|mtp_block|mtp)\.\d+)\.(.+)", re.ASCII)
_FUSED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj", ".experts.w13", ".experts.w2")
_ENDS = (".weight", "_weight")  # of fused ones: vLLM's own names have the second
_EXPERT = re.compile(r"^(.*\.experts)\.(\d{1,6})\.(.*)$", re.ASCII)
# Modules that join the embedding and the hidden state, by the last component of their names.
_PROJECTIONS = frozenset(
    {
        *("eh_proj", "fc", "e_proj", "h_proj", "input_proj", "linear_proj", "mtp_linear_proj"),
        *("fc_embedding", "fc_hidden", "pre_projection", "hidden_proj"),
    }
)
# Of these, those of one matrix [hidden, 2 hidden] for both.
_JOINT_PROJECTIONS = frozenset({"eh_proj", "fc", "input_proj", "linear_proj", "mtp_linear_proj"})
# Linears that take the hidden state.
_TAKING = frozenset({"gate_proj", "up_proj", "gate_up_proj", "q_proj", "q_a_proj"})


def sglang_adds(config: Mapping[str, Any], file: str) -> bool:
    """Return whether SGLang loads a file of a checkpoint though the index leaves it out."""
    names = config.get("architectures") or [None]
    counted = config.get("num_nextn_predict_layers") or 0
    return file == _ADDED_BY_SGLANG and names[0] in _ADDED_TO and counted > 0


@dataclass(frozen=True)
class Announced:
    """MTP modules that a config.json announces, and the field that does; count None: it does not
    say how many."""

    count: int | None
    field: str

    def __str__(self) -> str:
        if self.count is None:
            return f"MTP modules ({self.field})"
        return f"{self.count} MTP module{'s' * (self.count != 1)} ({self.field})"


@dataclass(frozen=True)
class NamedModule:
    """The tensors of one MTP module by their names; number is its own in its model's naming, None
    for tensors that all modules share."""

    number: int | None
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class OtherDraft:
    """A draft that is no MTP module, and what tells."""

    kind: str
    sign: str


def _configs(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the config and those of its text part, each with the prefix of its fields."""
    yield "", config
    for name in NESTED:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            yield f"{name}.", inner


def _counting(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield what may count MTP modules: the configs, and their blocks of such."""
    for prefix, fields in _configs(config):
        yield prefix, fields
        block = fields.get(_OWN_BLOCK)
        if isinstance(block, Mapping):
            yield f"{prefix}{_OWN_BLOCK}.", block


def text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a config.json that describe the decoder: those of its text part, where
    it has one, whatever its family."""
    return list(_configs(config))[-1][1]


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json with those of its text part one by one, behind its name
    and a dot."""
    result = dict(config)
    for prefix, fields in _configs(config):
        if prefix:
            del result[prefix.rstrip(".")]
            result |= {f"{prefix}{name}": value for name, value in fields.items()}
    return result


def announced(config: Mapping[str, Any]) -> Announced | None:
    """Return what a config.json announces; None for no MTP module at all."""
    for prefix, fields in _counting(config):
        for name in COUNT_FIELDS:
            count = fields.get(name)
            if type(count) is int and count > 0:
                one = str(fields.get("model_type")) in _ONE_MODULE
                return Announced(1 if one else count, f"{prefix}{name}")
    for prefix, fields in _configs(config):
        block = fields.get(_OWN_BLOCK)
        if isinstance(block, Mapping) and all(block.get(name) is None for name in COUNT_FIELDS):
            return Announced(None, f"{prefix}{_OWN_BLOCK}")
    for prefix, fields in _configs(config):
        model_type = fields.get("model_type")
        counts = any(fields.get(name) is not None for name in COUNT_FIELDS)
        if isinstance(model_type, str) and model_type in USUAL_COUNTS and not counts:
            return Announced(USUAL_COUNTS[model_type], f"{prefix}model_type {model_type}")
    return None


def with_counts_of(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json that counts MTP modules as another of the same model does, in the fields
    and parts of that."""
    names = (*COUNT_FIELDS, _OWN_BLOCK)
    result = {**config, **{name: other[name] for name in names if name in other}}
    for name in NESTED:
        own, inner = config.get(name), other.get(name)
        if isinstance(own, Mapping) and isinstance(inner, Mapping):
            result[name] = with_counts_of(own, inner)
    return result


def count_field(config: Mapping[str, Any]) -> str:
    """Return the field of a config.json that counts MTP modules, with what it says; "" for none."""
    for prefix, own in _counting(config):
        for name in COUNT_FIELDS:
            if name in own:
                said = "null" if own[name] is None else repr(own[name])[:100]
                return f"{prefix}{name} {said}"
    return ""


def without_null_counts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the fields of its own that count MTP modules and are null."""
    return {k: one for k, one in config.items() if one is not None or k not in COUNT_FIELDS}


def fused_experts(tensors: Mapping[str, Sequence[int]]) -> str | None:
    """Return the first of some tensors, by their shapes, that holds all experts of a layer; None
    where there is none."""
    for name, shape in tensors.items():
        stem = next((name.removesuffix(end) for end in _ENDS if name.endswith(end)), name)
        if len(shape) == 3 and stem.endswith(_FUSED_EXPERTS):
            return name
    return None


def main_layers(config: Mapping[str, Any]) -> int | None:
    """Return the number of main layers; None where config.json has no usable one."""
    return _positive(config, *LAYER_FIELDS)


def experts_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of routed experts of a layer; None where config.json has none."""
    return _positive(config, *_EXPERT_COUNTS)


def hidden_size(config: Mapping[str, Any]) -> int | None:
    """Return the width of the hidden state; None where config.json has no usable one."""
    return _positive(config, "hidden_size")


def expert_field(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the field of config.json, or of its text part, that has the number of experts, and
    that number."""
    return next(_fields_above_0(config, *_EXPERT_COUNTS), None)


def _positive(config: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of some fields that is a number above 0, of config.json or its text part."""
    return next((value for _, value in _fields_above_0(config, *names)), None)


def _fields_above_0(config: Mapping[str, Any], *names: str) -> Iterator[tuple[str, int]]:
    for name in names:
        for prefix, fields in _configs(config):
            value = fields.get(name)
            if type(value) is int and value > 0:
                yield f"{prefix}{name}", value


def is_transposed(name: str, shape: Sequence[int], hidden: int | None) -> bool:
    """Return whether a tensor is a projection of embedding and hidden state that is stored with
    its inputs as rows, as Paddle stores linears."""
    is_joint = is_joint_projection(name)
    return is_joint and hidden is not None and tuple(shape) == (2 * hidden, hidden)


def is_joint_projection(name: str) -> bool:
    """Return whether a tensor is by its name of one projection of embedding and hidden state
    together."""
    return not _JOINT_PROJECTIONS.isdisjoint(name.split("."))


def are_transposed(shapes: Mapping[str, Sequence[int]], hidden: int | None) -> bool:
    """Return whether most linears of a main model that take the hidden state are stored with it as
    rows. Square ones tell nothing."""
    as_rows: Counter[bool] = Counter()
    for name, shape in shapes.items():
        if len(shape) == 2 and not _TAKING.isdisjoint(name.split(".")):
            rows, columns = (size == hidden for size in shape)
            as_rows[rows] += rows != columns
    return as_rows[True] > as_rows[False]


def mtp_modules(names: Iterable[str], layers: int | None) -> list[NamedModule]:
    """Return the MTP modules that tensors are of by their names, in the order of their numbers,
    what they share first.

    A module is named mtp or nextn, with or without a number, or it is a layer that follows the
    `layers` main ones.
    """
    found: dict[int | None, list[str]] = defaultdict(list)
    for name in names:
        layer = _LAYER.match(name)
        if layer is not None:
            number = int(layer[2])
            if layers and number >= layers:
                found[number].append(name)
        elif (module := _BY_NAME.search(name)) is not None:
            found[None if module[2] is None else int(module[2])].append(name)
    numbers = sorted(found, key=lambda number: -1 if number is None else number)
    return [NamedModule(number, tuple(sorted(found[number]))) for number in numbers]


def has_layers(names: Iterable[str]) -> bool:
    """Return whether a tensor is of a numbered decoder layer, as every main model has."""
    return any(_LAYER.match(name) for name in names)


def layer_numbers(names: Iterable[str]) -> set[int]:
    """Return the numbers of the decoder layers that tensors are of."""
    return {int(layer[2]) for name in names if (layer := _LAYER.match(name)) is not None}


def in_layer(name: str) -> tuple[str, str]:
    """Return the layer that a tensor is of by its name, "" of none, and its name in that."""
    found = _IN_LAYER.fullmatch(name)
    return (found[1], found[2]) if found else ("", name)


def projection_in_main(names: Iterable[str], layers: int | None) -> str | None:
    """Return the projection of embedding and hidden state in one of the `layers` main layers, none
    of which has any; None where there is none."""
    for name in names:
        layer = _LAYER.match(name)
        if layer is not None and layers and int(layer[2]) < layers and "eh_proj" in name.split("."):
            return name
    return None


def lacks_projection(tensors: Iterable[str]) -> bool:
    """Return whether no tensor is of the projection of embedding and hidden state."""
    parts = (part for name in tensors for part in name.split("."))
    return _PROJECTIONS.isdisjoint(parts)


def expert_gaps(tensors: Iterable[str], count: int | None) -> list[str]:
    """Return what routed experts lack, one sentence each: experts that are not there, and tensors
    that others have. count: how many there are to be, None where that is not known."""
    experts: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in tensors:
        if (match := _EXPERT.match(name)) is not None:
            experts[match[1]][int(match[2])].add(match[3])
    gaps = []
    for module, by_number in experts.items():
        wanted = count or max(by_number) + 1
        missing = wanted - sum(number < wanted for number in by_number)
        if len(by_number) == wanted == max(by_number) and min(by_number) == 1:
            found = f"{module} counts its experts from 1 to {wanted}, and engines from 0"
            gaps.append(f"{found} to {wanted - 1}: take 1 from the number of each")
        elif missing:
            experts_word = "expert" if missing == 1 else "experts"
            shown = _first_missing(by_number, wanted, missing)
            gaps.append(f"{module} lacks {experts_word} {shown} (of {wanted})")
        every = set().union(*by_number.values())
        for number, own in sorted(by_number.items()):
            if own != every:
                gaps.append(f"{module}.{number} lacks {', '.join(sorted(every - own))}")
    return gaps


def expert_count(tensors: Iterable[str]) -> int | None:
    """Return the number of routed experts of every layer by their names; None where there are none,
    or layers differ."""
    last: dict[str, int] = {}
    for name in tensors:
        if (match := _EXPERT.match(name)) is not None:
            last[match[1]] = max(last.get(match[1], 0), int(match[2]))
    counts = {number + 1 for number in last.values()}
    return counts.pop() if len(counts) == 1 else None


def _first_missing(there: Collection[int], wanted: int, missing: int) -> str:
    """The first five numbers below `wanted` that are not there, and how many more are `missing`:
    a damaged config.json may want any number."""
    numbers = (number for number in range(wanted) if number not in there)
    shown = ", ".join(map(str, islice(numbers, min(missing, 5))))
    return shown if missing <= 5 else f"{shown} and {missing - 5} more"


def other_draft(config: Mapping[str, Any], names: Collection[str]) -> OtherDraft | None:
    """Return the draft of another kind that config.json or tensor names tell; None for none."""
    fields = [key for _, own in _configs(config) for key, value in own.items() if value is not None]
    for key in fields:
        if key.startswith("dspark_") or key == "mtp_dspark":
            return OtherDraft("DSpark", f"config.json has {key}")
    architectures = config.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    for text in filter(lambda one: isinstance(one, str), listed):
        for word, kind in _KINDS_BY_ARCHITECTURE.items():
            if word in text.lower():
                return OtherDraft(kind, f"config.json's architectures name {text}")
    for name in names:
        parts = set(name.split("."))
        for signs, kind in _KINDS_BY_TENSOR.items():
            if not parts.isdisjoint(signs):
                return OtherDraft(kind, f"there is a tensor {name}")
    return None


# In this order: the first word that an architecture's name holds decides.
_KINDS_BY_ARCHITECTURE = {
    "eagle3": "EAGLE-3",
    "eagle": "EAGLE",
    "medusa": "Medusa",
    "dspark": "DSpark",
    "dflash": "DFlash",
    "mlpspeculator": "MLP speculator",
}
_KINDS_BY_TENSOR = {
    ("markov_head", "markov_w1", "markov_w2", "main_norm", "confidence_head"): "DSpark",
    ("d2t", "t2d", "midlayer"): "EAGLE-3",
    ("eagle_module", "eagle_head"): "EAGLE",  # ModelOpt's
    ("medusa_head", "medusa_heads"): "Medusa",
}
