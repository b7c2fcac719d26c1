"""A checkpoint of others as its headers tell it: config, tensors, and the MTP modules that are
there, announced and wanted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.containers.safetensors import SUFFIX
from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.families.base import TensorSpec
from mtp_checkpoints.families.other_names import other_names
from mtp_checkpoints.families.renamed import OtherNames
from mtp_checkpoints.families.signs import (
    Announced,
    NamedModule,
    OtherDraft,
    announced,
    in_layer,
    main_layers,
    mtp_modules,
    other_draft,
)
from mtp_checkpoints.families.stored_names import as_weight
from mtp_checkpoints.quantization.stored import StoredModel, stored_model
from mtp_checkpoints.quantization.tools import Tool, tool_of
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_export.verify.check import Problem
from mtp_export.verify.files.astray import each
from mtp_export.verify.files.repair import graft_command
from mtp_export.verify.files.unpaired import unpaired

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_MODULE_FOLDERS = (MTP, "nextn", "draft")


@dataclass(frozen=True)
class Found:
    """The opened checkpoint: its config, tensors, and the MTP modules that their names tell."""

    context: Context

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return next(iter(self.context.checkpoints.values())).config

    @property
    def named(self) -> Context:
        """The same by its names, where its quantization is not read."""
        return self.context.by_names

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: tensor
            for checkpoint in self.named.checkpoints.values()
            for name, tensor in checkpoint.tensors.items()
        }

    @property
    def has_main(self) -> bool:
        return MAIN in self.context.checkpoints

    @cached_property
    def mtp_names(self) -> Sequence[str]:
        mtp = self.named.mtp
        return () if mtp is None else tuple(mtp.tensors)

    @cached_property
    def modules(self) -> Sequence[NamedModule]:
        """The modules by their names; those of another target's layout as one."""
        named = mtp_modules(self.mtp_names, main_layers(self.config)) if self.has_main else []
        if named or not self.mtp_names:
            return named
        return [NamedModule(None, tuple(self.mtp_names))]

    @property
    def announced(self) -> Announced | None:
        """The modules that a config.json announces: the main model's, or that of a draft's own
        folder, which engines read for the draft."""
        own = self.context.mtp if self.context.options.mtp is not None else None
        return announced(self.config) or (announced(own.config) if own is not None else None)

    @property
    def count(self) -> int:
        """Number of modules that are there."""
        numbered = sum(module.number is not None for module in self.modules)
        return numbered or len(self.modules)

    @cached_property
    def wanted_names(self) -> Mapping[str, TensorSpec]:
        """The MTP part's weights by the names that a known family gives them; none of another."""
        stored = self.stored_part(MTP)
        return {} if stored is None else _by_name(stored)

    def stored_part(self, name: str) -> StoredModel | None:
        """A part of a known family as its config.json gives it; None of another."""
        part = self.named.part(name)
        if part is None or part.checkpoint is None:
            return None
        try:
            return self.named.layout(part).stored
        except MtpExportError:  # config_match says why
            return None

    @cached_property
    def stored(self) -> StoredModel | None:
        """The whole model of a known family as its config.json gives it; None of another."""
        try:
            config = next(iter(self.named.checkpoints.values())).config
            return stored_model(config, self.tensors)
        except MtpExportError:  # config_match says why
            return None

    @property
    def wanted_anywhere(self) -> Mapping[str, TensorSpec]:
        """All weights of a model of a known family by their names; none of another."""
        return {} if self.stored is None else _by_name(self.stored)

    @property
    def mtp(self) -> StoredModel | None:
        """The MTP part of a known family as its config.json gives it; None of another."""
        return self.stored_part(MTP) if self.wanted_names else None

    @property
    def joins(self) -> tuple[tuple[str, ...], ...]:
        """Linears of a known family that engines join, by the last components of their names."""
        stored = self.mtp or self.stored
        return () if stored is None else tuple(stored.family.patterns.fused)

    @property
    def astray(self) -> list[str]:
        """The MTP part's tensors that no engine looks for, and those that are missing."""
        if self.mtp is None or self.named.mtp is None:
            return []
        there, wanted = self.named.mtp.tensors, self.mtp.tensors
        return sorted(there.keys() - wanted.keys()) + sorted(wanted.keys() - there.keys())

    @property
    def wrong_in_main(self) -> set[str]:
        """Tensors of main layers that are not as config.json says, by their names in these."""
        part = self.named.part(MAIN) if self.stored_part(MAIN) is not None else None
        found = () if part is None else self.named.layout(part).differences
        return {in_layer(as_weight(one.tensor))[1] for one in found}

    @property
    def differing(self) -> list[str]:
        """Those of them that matter: no copies that may be left out."""
        wanted = {} if self.mtp is None else self.mtp.tensors
        return [n for n in self.astray if n not in wanted or not wanted[n].optional]

    def of_weights(self, names: Sequence[str]) -> list[str]:
        """Return tensors of the MTP part of a known family, and those that hold the codes of the
        weights that they are of, of which other checks tell what lacks."""
        weights = {} if self.mtp is None else self.mtp.weight_of
        return [*names, *(weights[name].tensors[0].name for name in names if name in weights)]

    @property
    def unpaired(self) -> Sequence[tuple[str, str]]:
        """The modules' codes without scales and scales without codes, each with a sentence; in a
        quantization that is not read, where no main layer has any."""
        main, mtp = self.context.main, self.context.mtp
        of_format = self.named is not self.context and main and any(unpaired(main.tensors))
        return [] if of_format or mtp is None else [*unpaired(mtp.tensors)]

    @property
    def modules_lost(self) -> list[str]:
        """The modules of a known family of which no tensor is there."""
        names = [] if self.mtp is None else [module.name for module in self.mtp.family.mtp]
        return [o for o in names if not any(name.startswith(f"{o}.") for name in self.mtp_names)]

    @property
    def modules_more(self) -> Mapping[str, Sequence[str]]:
        """The modules beside those of a known family, which are whole, with their tensors: none of
        them is wanted."""
        wanted = {} if self.mtp is None else self.mtp.tensors
        if not wanted or any(name in wanted for name in self.differing):
            return {}  # what is missing may be there under another name
        layers: dict[str, list[str]] = {}
        for name in self.mtp_names:
            layers.setdefault(in_layer(name)[0], []).append(name)
        return {one: own for one, own in layers.items() if one and wanted.keys().isdisjoint(own)}

    @property
    def module_names(self) -> list[str]:
        """The names of the modules that config.json announces, of a known family."""
        return [] if self.stored is None else [module.name for module in self.stored.family.mtp]

    @cached_property
    def others(self) -> OtherNames | None:
        """The whole model's weights that are there under other names, in files too that an index
        leaves out and that hold no names as the index's are."""
        there = {**self.tensors, **self.astray_in_files}
        if self.stored is not None:
            there = {**self.stored.family.without_carried(there)}
        return other_names(self.wanted_anywhere, there, self.joins)

    @cached_property
    def astray_in_files(self) -> Mapping[str, TensorInfo]:
        strays = (shard for one in self.context.checkpoints.values() for shard in one.strays)
        return {tensor.name: tensor for shard in strays for tensor in shard.tensors}

    def files_of(self, names: Iterable[str]) -> list[str]:
        """Return the files that an index leaves out and that tensors are in."""
        strays = self.astray_in_files
        return sorted({strays[name].path.name for name in names if name in strays})

    def renames(self, stored: StoredModel) -> bool:
        """Return whether weights of a part of the model are there under other names."""
        return self.others is not None and not stored.tensors.keys().isdisjoint(
            self.others.pairs.values()
        )

    def strange(self, words: str) -> list[Problem]:
        """The same words for every tensor of the whole model that no engine looks for, and for
        every one that is missing."""
        if self.stored is None:
            return each(sorted(self.tensors), words)
        every = self.stored.tensors.keys()
        there = self.stored.family.without_carried(self.tensors).keys()
        return each([*sorted(there - every), *sorted(every - there)], words)

    @property
    def draft_beside(self) -> OtherDraft | None:
        """The draft of another kind among the main model's tensors."""
        return other_draft({}, self.tensors)

    @property
    def files_below(self) -> str:
        """The first safetensors file in a folder of the checkpoint that is an MTP module's by its
        name: no loader looks there. "" for none."""
        files = self.context.files
        below = (f"{one}/{name}" for one in _MODULE_FOLDERS for name in sorted(files.names(one)))
        return next((name for name in below if name.endswith(SUFFIX)), "")

    @cached_property
    def tool(self) -> Tool | None:
        return tool_of(self.config, self.context.files.names())

    @property
    def repair(self) -> str:
        return graft_command(self.context)


def _by_name(stored: StoredModel) -> dict[str, TensorSpec]:
    return {as_weight(one.tensors[0].name): one.weight for one in stored.weights.values()}
