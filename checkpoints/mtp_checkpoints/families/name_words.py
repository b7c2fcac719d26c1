"""Words of tensor names: what they say, whatever framework gave them."""

from __future__ import annotations

from collections.abc import Mapping

# Names of one meaning in the words that frameworks have for them: the first are whole components.
_MEANINGS = {
    "enorm": "embed norm",
    "hnorm": "hidden norm",
    "final_layernorm": "head norm",
    "final_norm": "head norm",
    **dict.fromkeys(("pre_mlp_layernorm", "ffn_norm", "mlp_norm"), "post attention norm"),
    "attn_output": "attention o",
    **dict.fromkeys(("attn_norm", "attention_norm", "attn_layernorm"), "input norm"),
    "output_layer": "head",
    "output": "head",
    "wte": "embed",
    "w1": "gate",
    "w2": "down",
    "w3": "up",
    "wq": "q",
    "wk": "k",
    "wv": "v",
    "wo": "o",
    "out_proj": "o",
    "router": "gate",
    **dict.fromkeys(("query", "q_proj"), "q"),
    **dict.fromkeys(("key", "k_proj"), "k"),
    **dict.fromkeys(("value", "v_proj"), "v"),
    **dict.fromkeys(("layernorm", "rmsnorm", "ln", "rms"), "norm"),
    **dict.fromkeys(("embedding", "embeddings", "emb", "tok", "token", "tokens"), "embed"),
    **dict.fromkeys(("attn", "self_attn", "self_attention", "attention"), "attention"),
    **dict.fromkeys(("experts", "expert"), "expert"),
}
_OF_ANY = frozenset({"model", "layers", "layer", "mtp", "weight", "proj", "qweight", "transformer"})


def _words(name: str) -> frozenset[str]:
    """The words of a tensor's name that say what it is, in one spelling."""
    found: set[str] = set()
    for component in name.split("."):
        tokens = [component] if component in _MEANINGS else component.split("_")
        for one in tokens:
            found.update(_MEANINGS.get(one, one).split())
    return frozenset(one for one in found - _OF_ANY if not one.isdecimal())


def likeness(name: str, other: str) -> float:
    """The share of words that two names have in common."""
    own, others = _words(name), _words(other)
    return len(own & others) / max(1, len(own | others))


def near(name: str, other: str) -> bool:
    """Return whether two names differ in one component alone, of which they have words in
    common."""
    parts, others = name.split("."), other.split(".")
    differing = [(one, own) for one, own in zip(parts, others, strict=False) if one != own]
    return len(parts) == len(others) and len(differing) == 1 and likeness(*differing[0]) > 0


def agree(name: str, other: str) -> bool:
    """Return whether two names may be of one kind of tensor, as a norm and a bias are not."""
    kinds = [_kinds(_words(one)) for one in (name, other)]
    return not all(kinds) or kinds[0] == kinds[1]


def _kinds(words: frozenset[str]) -> frozenset[str]:
    return words & {"bias"} or words & {"norm"}


_Pair = tuple[str, str]
_Likeness = Mapping[_Pair, tuple[float, bool]]


def nearest(alike: _Likeness) -> dict[str, str]:
    """The pairs of which each end is more like the other than like any else."""
    of_names, of_others = _likest(alike, 0), _likest(alike, 1)
    return {n: o for n, o in alike if of_names[n] == [(n, o)] == of_others[o]}


def _likest(alike: _Likeness, end: int) -> dict[str, list[_Pair]]:
    """The likest pairs of each name, which is one end of them."""
    best: dict[str, list[_Pair]] = {}
    for pair, like in alike.items():
        known = best.setdefault(pair[end], [pair])
        if like > alike[known[0]]:
            best[pair[end]] = [pair]
        elif like == alike[known[0]] and pair != known[0]:
            known.append(pair)
    return best
