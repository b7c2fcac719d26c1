"""Parts of layers of another model's kind, as their modules' names tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from mtp_checkpoints.families.renamed import InPlace
from mtp_checkpoints.families.stored_names import Stored, Wanted

_FEWEST = 2  # modules by which a part of a layer is known as another's


def of_another_kind(wanted: Mapping[str, Wanted], there: Mapping[str, Stored]) -> list[InPlace]:
    """Return the parts of layers (attention, MLP) of which modules are missing that others lie in
    the place of, as those of another model's layer do."""
    missing, others = _missing(wanted, there), sorted(there.keys() - wanted.keys())
    lost, strange = (_modules_by_part(names) for names in (missing, others))
    here, known = (_modules_by_part(names) for names in (there, wanted))
    found = []
    for part, modules in lost.items():
        own = sorted(modules - here.get(part, set()))
        instead = sorted(strange.get(part, set()) - known[part])
        if len(own) >= _FEWEST <= len(instead):
            found.append(InPlace(own, instead, part))
    return found


def _missing(wanted: Mapping[str, Wanted], there: Collection[str]) -> list[str]:
    return [name for name, one in wanted.items() if not one.optional and name not in there]


_PARTS = frozenset({"self_attn", "mlp", "mixer"})


def _modules_by_part(names: Iterable[str]) -> dict[str, set[str]]:
    """Modules of parts of layers, each by the component after the part's, by the parts' names."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        components = name.split(".")
        place = next((at for at, one in enumerate(components) if one in _PARTS), -1)
        if 0 <= place < len(components) - 1:
            found[".".join(components[: place + 1])].add(components[place + 1])
    return found
