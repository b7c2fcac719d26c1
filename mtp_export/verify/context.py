"""What the checks look at: the bundle and its source, opened as far as they can be, prompts, and
one loaded model that all engines share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_export.checkpoint.bundle_folder import open_checkpoint
from mtp_export.checkpoint.manifest import MANIFEST_NAME, read_manifest
from mtp_export.checkpoint.reader import CONFIG_NAME, Checkpoint
from mtp_export.errors import InvalidInputError, MtpExportError
from mtp_export.progress import ProgressCallback
from mtp_export.verify.check import Level
from mtp_export.verify.evidence.memory import why_too_large
from mtp_export.verify.evidence.prompts import Prompt, choose_prompts
from mtp_runtime.prompts import read_prompts

if TYPE_CHECKING:
    from mtp_export.verify.evidence.corpus import Corpus
    from mtp_runtime import LLM
    from mtp_runtime.models.load import Loaded, LoadOptions

MAIN, MTP = "main", "mtp"
# Shows a step of so many bytes while the block runs; the callback takes bytes just done.
ShowProgress = Callable[[str, int], AbstractContextManager[ProgressCallback]]


@dataclass(frozen=True)
class VerifyOptions:
    """What to verify, and how deep.

    ks: numbers of drafts. checksums False: no tensor's bytes are read for level files. stream: run
    the model layer by layer, for one that does not fit into memory. workdir: where a streamed pass
    keeps what it resumes from.
    """

    bundle: Path
    source: Path | None = None
    level: Level = Level.RUN
    prompts: Path | None = None
    max_new_tokens: int = 128
    ks: tuple[int, ...] = (1, 2, 3)
    device: str = "cpu"
    checksums: bool = True
    stream: bool = False
    workdir: Path | None = None
    workers: int = 2


@dataclass(frozen=True)
class BundlePart:
    """main/ or mtp/ of a bundle: opened, or the error that it could not be."""

    name: str
    folder: Path
    checkpoint: Checkpoint | None
    error: MtpExportError | None = None

    @classmethod
    def open(cls, name: str, folder: Path) -> BundlePart:
        try:
            return cls(name, folder, Checkpoint.open(folder))
        except MtpExportError as error:
            return cls(name, folder, None, error)


@dataclass(frozen=True)
class Context:
    """A bundle on its way through the checks. Models are loaded when first asked for."""

    options: VerifyOptions
    parts: tuple[BundlePart, ...]
    manifest: Mapping[str, Any] | None
    manifest_error: MtpExportError | None
    source: Checkpoint | None
    show_progress: ShowProgress
    _loaded: dict[LoadOptions, Loaded] = field(default_factory=dict)

    @classmethod
    def open(cls, options: VerifyOptions, show_progress: ShowProgress) -> Context:
        """Open what is there. Damage is kept for the checks to report.

        Raises InvalidInputError where there is no bundle at all, and what open_checkpoint and
        read_prompts raise for a source and prompts that cannot be read.
        """
        folder = options.bundle
        names = [name for name in (MAIN, MTP) if (folder / name).is_dir()]
        if not names or (folder / CONFIG_NAME).exists():
            raise InvalidInputError(
                "There is no bundle here",
                where=folder,
                expected=f"a folder with {MAIN}/, {MTP}/ and {MANIFEST_NAME}",
                todo="Point at the output folder of an export",
            )
        manifest, error = None, None
        try:
            manifest = read_manifest(folder)
        except MtpExportError as problem:
            error = problem
        parts = tuple(BundlePart.open(name, folder / name) for name in names)
        source = None if options.source is None else open_checkpoint(options.source)
        if options.prompts is not None:
            read_prompts(options.prompts)
        return cls(options, parts, manifest, error, source, show_progress)

    def part(self, name: str) -> BundlePart | None:
        """A part by name, None where the bundle has no such folder."""
        return next((part for part in self.parts if part.name == name), None)

    def recorded(self, option: str) -> Any:
        """An option of the export, as the manifest has it; None where it says nothing."""
        options = (self.manifest or {}).get("options")
        return options.get(option) if isinstance(options, dict) else None

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The parts that could be opened."""
        return tuple(part.checkpoint for part in self.parts if part.checkpoint is not None)

    @property
    def main(self) -> Checkpoint | None:
        part = self.part(MAIN)
        return None if part is None else part.checkpoint

    @property
    def mtp(self) -> Checkpoint | None:
        part = self.part(MTP)
        return None if part is None else part.checkpoint

    @property
    def why_not_opened(self) -> str | None:
        """Why no model can be made of the parts, None when it can, as far as headers tell."""
        for name in (MAIN, MTP):
            part = self.part(name)
            if part is None:
                return f"the bundle has no {name} part"
            if part.error is not None:
                return f"{name} cannot be opened: see check files"
        return None

    @cached_property
    def why_not_run(self) -> str | None:
        """Why the model is not run as a whole here, None when it is."""
        if self.options.stream and self.why_not_opened is None:
            return "--stream never holds the whole model"
        return self.why_not_opened or why_too_large(self.checkpoints)

    @cached_property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts of --prompts, or built-in ones for the bundle's tokenizer."""
        return choose_prompts(self.options.prompts, self.main)

    @cached_property
    def corpus(self) -> Corpus:
        """The texts that run-level checks share, of the fast fp32 model."""
        from mtp_export.verify.evidence.corpus import Corpus
        from mtp_runtime.models.load import LoadOptions

        model = self.loaded(LoadOptions(self.options.device)).model
        return Corpus(model, self.prompts, self.options.max_new_tokens)

    def loaded(self, options: LoadOptions) -> Loaded:
        """The bundle's model, loaded once for the same options. Raises what load_model raises."""
        from mtp_runtime.models.load import load_model

        if options not in self._loaded:
            self._loaded[options] = load_model(self.options.bundle, options)
        return self._loaded[options]

    def llm(
        self,
        method: str = "none",
        k: int = 1,
        *,
        dtype: str = "float32",
        deterministic: bool = False,
        **more: Any,
    ) -> LLM:
        """An engine of its own over the shared model; `more` are further options of LLM."""
        from mtp_runtime import LLM
        from mtp_runtime.models.load import LoadOptions

        options = LoadOptions(self.options.device, dtype, deterministic)
        return LLM(
            self.options.bundle,
            device=self.options.device,
            dtype=dtype,
            deterministic=deterministic,
            speculate_method=method,
            speculate_max_draft_token_num=k,
            loaded=self.loaded(options),
            **more,
        )
