"""The bundle or checkpoint under verification and its source, opened as far as they can be;
prompts; and one loaded model that all engines share."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_checkpoints.errors import MtpExportError, UnsupportedError
from mtp_checkpoints.families.single_experts import single_experts
from mtp_checkpoints.quantization.native import is_gguf, quantization_of
from mtp_checkpoints.quiet import quieted
from mtp_checkpoints.sources.addresses import download_command
from mtp_checkpoints.sources.byte_source import Address, local_path
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP, open_checkpoint
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export import __version__
from mtp_export.paths import refuse_overlaps
from mtp_export.progress import ShowCount, ShowProgress, format_bytes, uncounted
from mtp_export.schemes.scheme import GRAFTED
from mtp_export.verify.check import MTP_MODULE, Item, Level, Status
from mtp_export.verify.evidence.memory_room import MemoryRoom, memory_room
from mtp_export.verify.evidence.other_config import OtherConfig, other_config
from mtp_export.verify.evidence.parts import OpenedPlace, Part, opened_place
from mtp_export.verify.evidence.prompts import (
    GivenText,
    Prompt,
    choose_prompts,
    texts_of_prompts,
)
from mtp_export.verify.evidence.source_weights import SourceWeights
from mtp_export.verify.evidence.unwritten import WRITTEN, Unwritten, holes, unwritten
from mtp_export.verify.evidence.walks import Walks
from mtp_export.verify.options import VerifyOptions
from mtp_runtime.drafters import draft_folders

if TYPE_CHECKING:
    from mtp_export.verify.evidence.corpus import Corpus
    from mtp_export.verify.evidence.extra_drafts import ExtraDraft
    from mtp_runtime.models.load import Loaded, LoadOptions
    from mtp_runtime.parallel.group import Group


@dataclass(frozen=True, kw_only=True)
class Context(OpenedPlace):
    """A bundle or a checkpoint under verification. Models are loaded on first use.

    given: the texts of --prompts, kept since a pipe can be read only once. group: processes that
    take part in what is divided among several. failures: those of the checks that are done.
    """

    options: VerifyOptions
    source: Checkpoint | None
    given: tuple[GivenText, ...] | None
    show_progress: ShowProgress
    group: Group | None = None
    show_count: ShowCount = uncounted
    _loaded: dict[LoadOptions, Loaded] = field(default_factory=dict)
    _drafts: dict[tuple[str, LoadOptions], ExtraDraft] = field(default_factory=dict)
    failures: dict[str, list[Item]] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        options: VerifyOptions,
        show_progress: ShowProgress,
        group: Group | None = None,
        show_count: ShowCount = uncounted,
    ) -> Context:
        """Open what is verified and its source; damage is kept for the checks to report.

        Raises InvalidInputError for a place without a bundle or checkpoint, UsageError for a
        workdir in or around what is verified or its source, and what byte_source, open_checkpoint
        and read_texts raise for places and prompts that cannot be read.
        """
        place = options.bundle
        reads = {
            "the bundle or checkpoint": place,
            "--mtp": options.mtp,
            "--source": options.source,
        }
        refuse_overlaps(reads, {"--workdir": options.workdir})
        opened = opened_place(place, options.mtp)
        source = None if options.source is None else open_checkpoint(options.source)
        given = None
        if options.prompts is not None:
            from mtp_runtime.prompts import read_texts

            given = read_texts(options.prompts)
        return cls(
            options=options,
            **vars(opened),
            source=source,
            given=given,
            show_progress=show_progress,
            group=group,
            show_count=show_count,
        )

    @property
    def folder(self) -> Path:
        """Folder of what is verified (UnsupportedError for a remote one)."""
        return local_path(self.options.bundle)

    @property
    def mtp_folder(self) -> Path | None:
        """Folder that --mtp names (UnsupportedError for a remote one); None without it."""
        return None if self.options.mtp is None else local_path(self.options.mtp)

    @property
    def is_local(self) -> bool:
        """True where all that is verified lies on this machine."""
        places = (self.options.bundle, self.options.mtp)
        return all(place is None or isinstance(place, Path) for place in places)

    @property
    def why_not_downloaded(self) -> str:
        """The reason why no bytes of a remote place are read, with what does it."""
        places = (self.options.bundle, self.options.mtp)
        commands = [download_command(place) for place in places if isinstance(place, Address)]
        copy = f"verify a copy on this machine ({'; '.join(commands)})"
        if self.options.level is Level.WEIGHTS or self.mtp is None:
            return f"nothing but headers is downloaded for it: {copy}"
        size_bytes = sum(tensor.size_bytes for tensor in self.mtp.tensors.values())
        return (
            f"nothing but headers is downloaded: --level weights reads the MTP module's"
            f" {format_bytes(size_bytes)} and writes nothing; for all of it, {copy}"
        )

    @cached_property
    def other_config(self) -> OtherConfig | None:
        """The config.json that a checkpoint should have; None where its own is right, or none is
        found."""
        return other_config(self)

    @property
    def ranks(self) -> Group:
        """The processes that take part, or this one alone."""
        from mtp_runtime.parallel.group import LONE

        return self.group or LONE

    def extra_draft_part(self, name: str) -> Part | None:
        """The folder of an extra draft, opened; None if the bundle has none of this name."""
        folder = draft_folders(self.folder).get(name)
        return None if folder is None else Part.open(name, folder)

    @cached_property
    def unwritten_ends(self) -> tuple[Unwritten, ...]:
        """The files that were not written to their end, as level weights tells; none before it.
        Raises IoError for one that cannot be read."""
        if self.options.level < Level.WEIGHTS:
            return ()
        return unwritten(self.read_layouts, MAIN)

    @cached_property
    def unwritten(self) -> tuple[Unwritten, ...]:
        """The same, and files with zeros over the borders of tensors, by the walks over them."""
        if self.options.level < Level.WEIGHTS:
            return ()
        facts = (one for layout in self.read_layouts for one in self.walks.of(layout.name).facts)
        zero = {name for one in facts for name in one.zero_tensors}
        zero |= {name for name, own in self._fused if zero.issuperset(own)}
        zero.difference_update(*(one.tensors for one in self.unwritten_ends))
        return (*self.unwritten_ends, *holes(self.read_layouts, zero))

    @property
    def unwritten_tensors(self) -> frozenset[str]:
        """The names of the tensors at the ends of these files, and of the experts in fused ones."""
        lost = frozenset[str]().union(*(one.tensors for one in self.unwritten))
        if not lost:
            return lost
        return lost.union(*(own for name, own in self._fused if name in lost))

    @property
    def _fused(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The names of fused experts, each with those of its matrices."""
        for layout in self.read_layouts:
            yield from single_experts(layout.stored.family).items()

    @cached_property
    def source_weights(self) -> SourceWeights | None:
        """The source's weights, None without a source. Raises as stored_model."""
        return None if self.source is None else SourceWeights.of(self.source, self.manifest)

    @property
    def parts_of_others(self) -> tuple[str, ...]:
        """The parts that are no copy or conversion of the source's by this tool: the main model of
        a graft, and of a checkpoint that another tool quantized."""
        grafted = self.recorded("base_quant") == GRAFTED
        return (MAIN,) if grafted or self._is_by_another_tool else ()

    @property
    def _is_by_another_tool(self) -> bool:
        """True for a checkpoint that is quantized, and not as its source: tools move scales between
        weights, which changes every one of them and not what the model computes."""
        if self.is_bundle or self.main is None or self.source is None:
            return False
        own, source = (quantization_of(one.config) for one in (self.main, self.source))
        return bool(own) and own != source and not is_gguf(own)

    @cached_property
    def walks(self) -> Walks:
        """The walks over the bytes of the parts."""
        try:
            source = self.source_weights
        except MtpExportError:  # check `weights` says why the source cannot be followed
            source = None
        beside = () if self.tables_beside is None else (self.tables_beside,)
        return Walks(
            options=self.options,
            checkpoints={**self.checkpoints, **{one.name: one.checkpoint for one in beside}},
            layouts=(*self.read_layouts, *beside),
            recorded=(self.manifest or {}).get("parts", {}),
            source=source,
            identity=self.identity,
            show_progress=self.show_progress,
        )

    @cached_property
    def identity(self) -> str:
        """Mark of bundle and source as they are now, and of the program that reads them."""
        identity = hashlib.sha256(f"{__version__} {self.manifest_sha256}".encode())
        for checkpoint in (*self.checkpoints.values(), *filter(None, [self.source])):
            identity.update(checkpoint.config_sha256.encode())
            for shard in checkpoint.shards:
                identity.update(f"{shard.header_sha256} {shard.version}".encode())
        return identity.hexdigest()[:16]

    @property
    def why_not_opened(self) -> str | None:
        """The reason why no model can be built from the parts, None if headers show none."""
        for name in (MAIN, self.draft_apart or MTP):
            part = self.part(name) or self.extra_draft_part(name)
            if part is None:
                return f"there is no {name} part"
            if part.error is not None:
                return f"{name} cannot be opened: see check files"
        if reason := self._why_not_computed:
            model_type = next(iter(self.checkpoints.values())).config.get("model_type")
            return f"no runtime for {model_type}: {reason}"
        for layout in self.layouts:
            if not self.is_bundle and layout.differences:
                return f"{layout.name} does not hold what config.json describes: see check files"
        return None

    @property
    def _why_not_computed(self) -> str:
        """The reason why the runtime does not compute the model of a checkpoint, "" where it
        does."""
        from mtp_runtime.models.layer_types import why_not_computed

        for part in (part for part in self.parts if part.checkpoint is not None):
            try:
                reason = why_not_computed(self.layout(part).stored.family)
            except UnsupportedError as error:
                reason = f"{error.what}: see check files"
            except MtpExportError:  # damage, of which check files tells
                continue
            if reason:
                return reason
        return ""

    @cached_property
    def why_not_run(self) -> str | None:
        """The reason why the model is not run as a whole here, None if it is."""
        if self.options.stream and self.why_not_opened is None:
            return "--stream never holds the whole model"
        return self.why_not_opened or self.memory.why_too_little

    def why_not_loaded(self, options: LoadOptions) -> str | None:
        """The reason why no model is loaded with options too, None if there is room or it is."""
        own = self._usual(options)
        return None if own in self._loaded else self.memory.why_not_beside(self.folder, own)

    @cached_property
    def memory(self) -> MemoryRoom:
        return memory_room(self.folder, self.mtp_folder, self.options)

    @cached_property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts of --prompts, or built-in ones for the bundle's tokenizer."""
        return choose_prompts(self.options.prompts, self.given, self.main)

    @cached_property
    def prompt_texts(self) -> Mapping[Prompt, str | None]:
        """The text of each of the prompts, None for one that is no text."""
        return dict(zip(self.prompts, texts_of_prompts(self.given, self.main), strict=True))

    @cached_property
    def corpus(self) -> Corpus:
        """The texts that run-level checks share, generated by the fp32 model."""
        from mtp_runtime.models.load import LoadOptions

        return self.corpus_with(LoadOptions(self.options.device))

    def corpus_with(self, options: LoadOptions) -> Corpus:
        """The prompts, and what decodes them: the model that is loaded with options, and the draft
        in the place of its MTP module, if it has none. Raises what loading raises."""
        from mtp_export.verify.evidence.corpus import Corpus

        return Corpus(
            self.loaded(options).model,
            self.prompts,
            self.options.max_new_tokens,
            show_count=self.show_count,
            draft=self.extra_draft(self.draft_apart, options) if self.draft_apart else None,
        )

    def extra_draft(self, method: str, options: LoadOptions | None = None) -> ExtraDraft:
        """The bundle's extra draft for a method, read once for the model that is loaded with
        options. Raises what its reader raises."""
        from mtp_export.verify.evidence.extra_drafts import ExtraDraft
        from mtp_runtime.models.load import LoadOptions

        usual = self._usual(options or LoadOptions(self.options.device))
        if (method, usual) not in self._drafts:
            read = ExtraDraft.read(self.folder, method, self.loaded(usual))
            self._drafts[method, usual] = read
        return self._drafts[method, usual]

    @cached_property
    def extra_drafts(self) -> tuple[ExtraDraft, ...]:
        """The bundle's drafts beside the usual ones, that can be read; check `ledger` says why
        another cannot."""
        found = []
        for method in draft_folders(self.folder):
            if method == self.draft_apart:
                continue
            try:
                found.append(self.extra_draft(method))
            except MtpExportError:
                continue
        return tuple(found)

    def note_failures(self, check: str, items: Iterable[Item]) -> None:
        """Keep the failures of a check so far, for what comes after."""
        self.failures[check] = [item for item in items if item.status is Status.FAIL]

    @property
    def named_tensors(self) -> frozenset[str]:
        """The tensors that failures of check ledger so far are about."""
        items = self.failures.get("ledger", ())
        return frozenset(subject for item in items for subject in item.subjects)

    @property
    def named_damage(self) -> str:
        """Check and item that named damage of a checkpoint's MTP module before it was run; "" where
        none did. How such a module drafts is the consequence, which no other cause explains."""
        if self.is_bundle or self.mtp is None:
            return ""
        for check in ("ledger", "weights"):
            for item in self.failures.get(check, ()):
                lost = item.name == WRITTEN and self.unwritten_tensors & self.mtp.tensors.keys()
                if lost or item.subject in self.mtp.tensors or item.name.startswith(f"{MTP}: "):
                    return f"check {check}, {item.name}"
        return ""

    @property
    def main_damage(self) -> str:
        """Check and item that found the main model to be damaged, which a draft is fed with and
        judged by; "" where none did."""
        failed = self.failures.get("likelihood", ())
        names = (item.name for item in failed if MTP_MODULE not in item.name)
        return next((f"check likelihood, {name}" for name in names), "")

    @property
    def module_damage(self) -> bool:
        """True where plain text told that the MTP module is damaged."""
        return any(MTP_MODULE in item.name for item in self.failures.get("likelihood", ()))

    def loaded(self, options: LoadOptions) -> Loaded:
        """The bundle's model, loaded once per options; a deterministic one is the usual, if that
        has no layer to refuse. Raises what load_model raises."""
        from mtp_runtime.loading import weight_source
        from mtp_runtime.models.compiled import refuse_torch_layers
        from mtp_runtime.models.load import load_model

        usual = self._usual(options)
        if usual not in self._loaded:
            with quieted(weight_source.__name__, logging.ERROR):  # check ledger says it of copies
                self._loaded[usual] = load_model(self.folder, usual)
        if options.deterministic:
            refuse_torch_layers(self._loaded[usual].model, self._loaded[usual].folder)
        return self._loaded[usual]

    def _usual(self, options: LoadOptions) -> LoadOptions:
        """The options by which a model is loaded; one that is deterministic is the usual one."""
        mtp, size = self.mtp_folder, self.memory.expert_bytes
        return replace(options, deterministic=False, mtp_folder=mtp, expert_bytes=size)
