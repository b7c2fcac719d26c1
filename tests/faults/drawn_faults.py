"""Faults drawn at random: a place in a trained fixture, a kind of damage, and its parameters.

What names a fault is written down here, before it is judged: words for its place, and words for its
kind. `exact` are those of this kind alone, `loose` those of a sentence that offers it as one of
several, such as "damaged, in another order or of another layer".
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from cases import read_json
from faults import planting

# Weights of the draw. deepseek-v3-tiny takes minutes for each fault, and most of its layers add
# next to nothing.
FIXTURES = {"glm4-moe-tiny": 4, "qwen3-5-tiny": 4, "deepseek-v3-tiny": 1}
ROWS = {
    "bf16": ("bf16", "bf16"),
    "fp8": ("a8w8_fp8", "a8w8_fp8"),
    "int8": ("weight_only_int8", "weight_only_int8"),
    "int4": ("weight_only_int4", "weight_only_int8", "--int4-scope", "all", "--group-size", "32"),
}
_LEAST_PART = 1 / 8  # of a dimension, that a part of it is
UNCHANGED = "unchanged"
Done = tuple[str, torch.Tensor]
Change = Callable[[torch.Tensor, random.Random], Done]


@dataclass(frozen=True)
class Kind:
    """Damage of one tensor, and the words of sentences that name it."""

    change: Change
    exact: str
    loose: str = "damaged"


def _factor(chance: random.Random) -> float:
    """A factor of 1.5 to 6, or the reciprocal of one."""
    size = math.exp(chance.uniform(math.log(1.5), math.log(6)))
    return size if chance.random() < 0.5 else 1 / size


def _axis(weight: torch.Tensor, chance: random.Random) -> int:
    """The number of a dimension that has more than one element."""
    return chance.choice([axis for axis, size in enumerate(weight.shape) if size > 1])


def _run(size: int, chance: random.Random) -> slice:
    length = chance.randint(max(1, math.ceil(size * _LEAST_PART)), max(1, size // 2))
    first = chance.randint(0, size - length)
    return slice(first, first + length)


def _scaled(weight: torch.Tensor, chance: random.Random) -> Done:
    factor = _factor(chance)
    return f"times {factor:.3g}", weight * factor


def _offset(weight: torch.Tensor, chance: random.Random) -> Done:
    offset = chance.choice((1.0, -1.0, chance.uniform(-0.5, 0.5)))
    return f"plus {offset:.3g}", weight + offset


def _ordered(way: Callable[[int, random.Random], tuple[str, torch.Tensor]]) -> Change:
    """Return what puts rows, or columns, in another order."""

    def change(weight: torch.Tensor, chance: random.Random) -> Done:
        axis = _axis(weight, chance)
        words, order = way(weight.shape[axis], chance)
        return f"axis {axis} {words}", weight.index_select(axis, order)

    return change


def _reversed(size: int, chance: random.Random) -> Done:
    return "reversed", torch.arange(size).flip(0)


def _rolled(size: int, chance: random.Random) -> Done:
    by = chance.randint(1, size - 1)
    return f"rolled by {by}", torch.arange(size).roll(by)


def _interleaved(size: int, chance: random.Random) -> Done:
    parts = chance.choice([number for number in (2, 4) if size % number == 0] or [1])
    order = torch.arange(size).view(parts, -1).t().flatten()
    if chance.random() < 0.5:
        return f"interleaved of {parts}", order
    return f"taken apart to {parts}", order.argsort()


def _blocks(size: int, chance: random.Random) -> Done:
    count = chance.choice([number for number in (2, 4, 8) if size % number == 0] or [size])
    one, other = chance.sample(range(count), 2)
    order = torch.arange(size).view(count, -1)
    order[[one, other]] = order[[other, one]]
    return f"blocks {one} and {other} of {count} exchanged", order.flatten()


def _shuffled(size: int, chance: random.Random) -> Done:
    return "shuffled", torch.tensor(chance.sample(range(size), size))


def _in_part(values: Callable[[torch.Tensor, float], torch.Tensor]) -> Change:
    """Return what changes a run of rows or columns."""

    def change(weight: torch.Tensor, chance: random.Random) -> Done:
        axis, factor = _axis(weight, chance), _factor(chance)
        run = _run(weight.shape[axis], chance)
        other = weight.clone().movedim(axis, 0)
        other[run] = values(other[run], factor)
        words = f"axis {axis} from {run.start} to {run.stop} by {factor:.3g}"
        return words, other.movedim(0, axis)

    return change


def _noisy(weight: torch.Tensor, chance: random.Random) -> Done:
    share = chance.uniform(0.3, 1.5)
    noise = torch.randn(weight.shape, generator=_generator(chance))
    return f"noise of {share:.2f}", weight + share * noise * weight.square().mean().sqrt()


def _adapted(weight: torch.Tensor, chance: random.Random) -> Done:
    rank, generator = chance.randint(1, 8), _generator(chance)
    flat = weight.flatten(1)
    added = torch.randn(len(flat), rank, generator=generator) @ torch.randn(
        rank, flat.shape[1], generator=generator
    )
    size = chance.uniform(0.3, 1.5) * flat.square().mean().sqrt() / added.square().mean().sqrt()
    return f"adapter of rank {rank}", (flat + added * size).view(weight.shape)


def _generator(chance: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(chance.getrandbits(32))


def _clipped(weight: torch.Tensor, chance: random.Random) -> Done:
    most = chance.uniform(0.3, 1.0) * float(weight.abs().median())
    return f"clipped to {most:.3g}", weight.clamp(-most, most)


def _transposed(weight: torch.Tensor, chance: random.Random) -> Done:
    return "transposed", weight.t().reshape(weight.shape)


_EXACT_PART = r"(rows?|columns?|elements?|part|half|halves)\b.*times|times.*(rows|columns)"
_REORDERED = r"damaged|another order"
ANY_TENSOR: dict[str, Kind] = {
    "negated": Kind(lambda w, c: ("negated", -w), r"sign|negat", "$^"),
    "scaled": Kind(_scaled, r"\btimes\b|multipl|too (flat|sharp)|another multiple", "$^"),
    "reversed": Kind(_ordered(_reversed), r"revers", _REORDERED),
    "rolled": Kind(_ordered(_rolled), r"moved|rolled|shifted", _REORDERED),
    "interleaved": Kind(_ordered(_interleaved), r"interleaved|by turns", _REORDERED),
    "blocks": Kind(_ordered(_blocks), r"exchanged|swapped|halves|blocks|heads", _REORDERED),
    "shuffled": Kind(_ordered(_shuffled), r"another order", _REORDERED),
    "part scaled": Kind(_in_part(lambda w, factor: w * factor), _EXACT_PART),
    "part zero": Kind(_in_part(lambda w, factor: w * 0), r"zero|lost"),
    "noise": Kind(_noisy, r"damaged|nothing in common|another version"),
    "clipped": Kind(_clipped, r"clipped|cut off|is constant"),
}
MATRIX = ANY_TENSOR | {
    "adapter": Kind(_adapted, r"rank|adapter"),
    "transposed": Kind(_transposed, r"transposed"),
}
VECTOR = ANY_TENSOR | {
    "offset": Kind(_offset, r"\b1 (of|too)|\bplus\b|the source's [+-]|offset", "$^"),
    "absolute": Kind(lambda w, c: ("absolute", w.abs()), r"sign|absolute"),
}
_PAIR = {
    "exchanged": r"swapped|exchanged|each other's place|it holds|reversed|taken for",
    "copied": r"it holds|holds the same|taken for|another (layer|expert)|each other's place",
}
_OF_ANOTHER = r"another (layer|expert)|another's|of another"
# Values of config.json, by field: what the field may become of its value.
CONFIG: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "rope_theta": (lambda v: v * 10, lambda v: v / 10, lambda v: v * 2),
    "rms_norm_eps": (lambda v: 1e-2, lambda v: 1e-3),
    "norm_topk_prob": (lambda v: not v,),
    "routed_scaling_factor": (lambda v: v / 2, lambda v: v * 2, lambda v: 1.0),
    "num_experts_per_tok": (lambda v: v - 1, lambda v: v * 2),
    "partial_rotary_factor": (lambda v: v / 2, lambda v: v * 2),
    "topk_group": (lambda v: max(1, v // 2), lambda v: v * 2),
}
# Words of a cause for the place of a tensor; {0} is what the pattern's group matched.
PLACES = (
    (r"eh_proj|mtp\.fc\.", r"eh_proj|concatenation|enorm|hnorm"),
    (r"enorm|norm_embedding", r"enorm|embedding half"),
    (r"hnorm|norm_hidden", r"hnorm|hidden half"),
    (r"shared_head\.norm|mtp\.norm", r"norm before the draft's head"),
    (r"model\.norm", r"last norm|model\.norm"),
    (r"(input_layernorm|post_attention_layernorm)", r"{0}|layernorm"),
    (r"(?:self|linear)_attn", r"attention|[qkvo]_proj|q_b|rope|rotary|[qk]_norm|kv_"),
    (r"\.experts\.(\d+)\.", r"expert {0}\b|experts? .*\b{0}\b"),
    (r"shared_experts", r"shared expert"),
    (r"mlp\.gate\.", r"router"),
    (r"mlp\.(?:gate|up|down)_proj", r"feed-forward|mlp|(gate|up|down)_proj"),
    (r"embed_tokens", r"embedding"),
    (r"lm_head|shared_head\.head", r"head"),
)


@dataclass(frozen=True)
class Drawn:
    """A fault: where, what, the seed of its parameters, and patterns of the words that name its
    place and its kind in a cause."""

    number: int
    fixture: str
    row: str
    part: str
    what: str
    names: tuple[str, ...]
    seed: int
    place: str
    exact: str
    loose: str


def draw(seed: int, number: int, folders: dict[str, Path]) -> Drawn:
    """Draw one fault, whatever others were drawn."""
    chance = random.Random(f"{seed} {number}")
    fixture = chance.choices([*FIXTURES], [*FIXTURES.values()])[0]
    part = chance.choices(("mtp", "main"), (1, 1))[0]
    sort = chance.choices(("tensor", "pair", "config"), (8, 3, 1))[0]
    folder, row = folders[fixture], chance.choice([*ROWS])
    fixed = {"number": number, "fixture": fixture, "row": row, "seed": chance.getrandbits(32)}
    if sort == "config":
        config = read_json(folder / "main" / "config.json")
        known = {**config, **(config.get("rope_parameters") or {})}
        field = chance.choice([field for field in CONFIG if field in known])
        words = {"place": field, "exact": field, "loose": "$^"}
        return Drawn(**fixed, part="main", what="config", names=(field,), **words)
    shapes = _shapes(folder / part)
    name = _one(list(shapes), chance)
    if sort == "pair" and (others := list(_alike(name, shapes))):
        what, other = chance.choice([*_PAIR]), _one(others, chance)
        place = f"({place_of(name, part)})|({place_of(other, part)})"
        words = {"place": place, "exact": _PAIR[what], "loose": _OF_ANOTHER}
        return Drawn(**fixed, part=part, what=what, names=(name, other), **words)
    kinds = kinds_of(shapes[name])
    what = chance.choice([*kinds])
    words = {"place": place_of(name, part), "exact": kinds[what].exact, "loose": kinds[what].loose}
    return Drawn(**fixed, part=part, what=what, names=(name,), **words)


def kinds_of(shape: tuple[int, ...]) -> dict[str, Kind]:
    """The kinds of damage that a tensor of this shape can have."""
    return MATRIX if len(shape) > 1 else VECTOR


@cache
def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    found = dict[str, tuple[int, ...]]()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                found[name] = tuple(file.get_slice(name).get_shape())
    return dict(sorted(found.items()))


def _role(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def layer_of(name: str) -> str:
    found = re.search(r"layers\.(\d+)\.", name)
    return found[1] if found else ""


def _one(names: list[str], chance: random.Random) -> str:
    """One of the names, each role being as likely as each other."""
    by_role: dict[str, list[str]] = {}
    for name in names:
        by_role.setdefault(_role(name), []).append(name)
    return chance.choice(by_role[chance.choice([*by_role])])


def _alike(name: str, shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Names of tensors of its shape, of its layer or its role."""
    for other, shape in shapes.items():
        is_near = layer_of(other) == layer_of(name) or _role(other) == _role(name)
        if other != name and shape == shapes[name] and is_near:
            yield other


def place_of(name: str, part: str) -> str:
    """The pattern of a cause that names the place of a tensor, in words or by its name."""
    own = name.removesuffix(".weight").rpartition(".")[2]
    for pattern, words in PLACES:
        if found := re.search(pattern, name):
            place = words.format(*found.groups())
            if "_attn" in name:
                place += rf"|\b{own}\b"
            if part == "main" and layer_of(name):
                place = rf"(?=.*layer {layer_of(name)}\b).*({place})"
            return f"{place}|{re.escape(name)}"
    return re.escape(name)


def plant(drawn: Drawn, bundle: Path) -> str:
    """Plant a fault into a bundle in bf16; return its parameters in words, UNCHANGED for one that
    changes no value."""
    folder, chance = bundle / drawn.part, random.Random(drawn.seed)
    if drawn.what == "config":
        how, before = chance.choice(CONFIG[drawn.names[0]]), read_json(folder / "config.json")
        for part in ("main", "mtp"):
            planting.edit_config(bundle / part, lambda config: _edit(config, drawn.names[0], how))
        after = read_json(folder / "config.json")
        changed = f"to {_holder(after, drawn.names[0])[drawn.names[0]]}"
        return UNCHANGED if after == before else changed
    if drawn.what == "exchanged":
        planting.swap(folder, *drawn.names)
        return ""
    if drawn.what == "copied":
        planting.write(folder, {drawn.names[0]: planting.read(folder, drawn.names[1])})
        return ""
    weight = planting.read(folder, drawn.names[0])
    kind = kinds_of(tuple(weight.shape))[drawn.what]
    words, changed = kind.change(weight.float(), chance)
    if changed.to(weight.dtype).equal(weight):
        return UNCHANGED
    planting.write(folder, {drawn.names[0]: changed.to(weight.dtype)})
    return words


def _holder(config: dict[str, Any], field: str) -> dict[str, Any]:
    return config if field in config else config["rope_parameters"]


def _edit(config: dict[str, Any], field: str, how: Callable[[Any], Any]) -> None:
    if field in config or field in (config.get("rope_parameters") or {}):
        holder = _holder(config, field)
        holder[field] = how(holder[field])
