"""Classes that engines have for the drafts of a family: how they ask a quantization_config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtp_checkpoints.families.base import SGLANG_DRAFT

AS_STORED = ""  # the name of a projection that a class asks for by that of its tensor
_WITH_MAPPER = frozenset({"compressed-tensors", "fp8", "modelopt"})


@dataclass(frozen=True)
class EngineDraft:
    """A class of drafts, by the names that it asks a quantization_config for.

    layer: its name of the decoder layer, "" where it has none, None where that is the tensors' own.
    modules: beginnings of the names within the layer that it has others for, with these.
    projection: its name of the projection, None where that is a linear of torch, which asks
    nothing. listed: parts of names that it replaces in the lists of the methods `renames`, in an
    entry the first of them; renames_patterns: in those that begin with re: too. fp8_ends: entries
    of native fp8 in blocks are ends of names to it.
    plain: linears within the layer that it builds unquantized whatever a config says.
    projection_in_nvfp4: False where it builds the projection unquantized in ModelOpt's NVFP4.
    beside_nvfp4: False where it builds every draft unquantized beside a main model in ModelOpt's
    NVFP4; by_config: False where it does so whatever a config says.
    """

    layer: str | None = None
    modules: tuple[tuple[str, str], ...] = ()
    projection: str | None = None
    listed: tuple[tuple[str, str], ...] = ()
    renames: frozenset[str] = _WITH_MAPPER
    renames_patterns: bool = True
    fp8_ends: bool = False
    plain: tuple[str, ...] = ()
    projection_in_nvfp4: bool = True
    beside_nvfp4: bool = True
    by_config: bool = True

    @property
    def plain_linears(self) -> tuple[str, ...]:
        """The last name components of linears that it builds unquantized."""
        return tuple(one.rpartition(".")[2] for one in self.plain)

    def name_of(self, layers: Sequence[str], name: str) -> str:
        """Return the name that it has for a module or a tensor of layers of these names."""
        layer = next((one for one in layers if f"{name}.".startswith(f"{one}.")), None)
        if layer is None:
            return name
        rest = name[len(layer) + 1 :]
        if self.projection:
            last = self.projection.rpartition(".")[2]
            _, is_it, behind = f".{rest}.".partition(f".{last}.")
            if is_it:
                return f"{self.projection}.{behind}".removesuffix(".")
        for module, own in self.modules:
            if rest.startswith(module):
                rest = own + rest.removeprefix(module)
                break
        return ".".join(filter(None, (layer if self.layer is None else self.layer, rest)))

    def pattern_of(self, pattern: str) -> str:
        """Return a pattern of names within a layer that is for its own names too."""
        for pair in self.modules:
            for module, own in (pair, [one.replace(".", "[.]") for one in pair]):
                pattern = pattern.replace(module, f"({module}|{own})")
        return pattern

    def entry_of(self, entry: str) -> str:
        """Return what it makes of an entry of a list."""
        if entry.startswith("re:") and not self.renames_patterns:
            return entry
        first = next((pair for pair in self.listed if pair[0] in entry), ("", ""))
        return entry.replace(*first, 1)


# Of vLLM 0.32: what most of its classes are, and those that build the projection as any linear.
VLLM_USUAL = EngineDraft()
VLLM_LINEAR = EngineDraft(projection=AS_STORED)
# Of SGLang 0.5.23: what most of its classes are, those of models/*_nextn.py that a config of
# NVFP4 is taken from, and those of models/*_mtp.py that have a decoder of one layer.
SGLANG_USUAL = EngineDraft(SGLANG_DRAFT)
SGLANG_NEXTN = EngineDraft(SGLANG_DRAFT, beside_nvfp4=False)
SGLANG_FIRST_LAYER = EngineDraft("model.layers.0")
SGLANG_OWN_NAMES = EngineDraft(beside_nvfp4=False)
SGLANG_UNQUANTIZED = EngineDraft(by_config=False)


def sglang_deepseek(layer: str) -> EngineDraft:
    """Return the class of DeepSeek's drafts, which replaces the layer's name in lists: that of the
    releases, model.layers.61, for which the last layer of any size stands here."""
    return replace(SGLANG_NEXTN, listed=((layer, SGLANG_DRAFT),))
