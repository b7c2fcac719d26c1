"""Calibration within the run of a bundle: the main model is written, then run on texts; what goes
into the MTP layer chooses its codes, which are written last.

All that takes long is kept in a work folder, so that an interrupted run goes on: texts with hidden
states in parts, the inputs of linears in the same parts, and the codes expert by expert.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.families.single_experts import with_single_experts
from mtp_checkpoints.sources.files import make_folder, write_json
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_export import state_files
from mtp_export.bundle.build import Work, make_shards, write_files
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.links import link_shard, resolve_links
from mtp_export.bundle.run import Record, ShardJob
from mtp_export.bundle.shares import await_part
from mtp_export.calibrate.imatrix import Imatrix, Squares
from mtp_export.calibrate.jobs import weights_of, with_codes
from mtp_export.calibrate.linears import Linears, Unit
from mtp_export.calibrate.main_model import MainCalibration, texts_of
from mtp_export.calibrate.options import CalibrationOptions, Method
from mtp_export.calibrate.rounding import Inputs, Rounder, pieces
from mtp_export.calibrate.scales import Scales, unlinked
from mtp_export.plan import Link
from mtp_export.progress import CountCallback, ProgressCallback, ShowCount, uncounted
from mtp_export.tune.options import DataOptions, short_hash
from mtp_export.tune.row_store import PART_LINES, TRAINING_DTYPE, RowStore, identity_of, read_lines
from mtp_export.tune.rows import Fed, Line, Writer
from mtp_kernels.quantize.awq import RATIOS
from mtp_kernels.quantize.gptq import DAMPING
from mtp_runtime.layer_inputs import DEPTHS
from mtp_runtime.models.layer_types import config_for
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.streaming import StreamedModel, open_streamed

TEXT_TOKENS = DataOptions.text_tokens  # at which a text is cut
_NUMBERS: dict[Method, dict[str, float]] = {
    Method.GPTQ: {"damping": DAMPING},
    Method.AWQ: {"ratios": RATIOS},
}


@dataclass(frozen=True)
class Calibration:
    """A calibration of a bundle's MTP part by texts: linears are those whose codes it chooses; main
    is that of the main part, where its codes are chosen too.

    imatrix: to be written too. show_count opens its progress bars.
    """

    options: CalibrationOptions
    lines: Sequence[Line]
    linears: Linears
    main: MainCalibration | None = None
    imatrix: Imatrix | None = None
    show_count: ShowCount = uncounted

    @classmethod
    def of(
        cls, plan: BundlePlan, options: CalibrationOptions, show_count: ShowCount = uncounted
    ) -> Calibration:
        """Read the texts of a plan that check_calibration accepts; the plan of the calibration says
        in its options what chose the codes.

        Raises UnsupportedError where no code is to be chosen, or an imatrix has no names for the
        model, UsageError where no inputs are to be measured, and what read_lines raises.
        """
        assert options.calibrate is not None
        lines = read_lines(options.calibrate, plan.checkpoint)
        parts = [MAIN, MTP] if options.main else [MTP]
        facts = {
            "method": str(options.method),
            **_NUMBERS[options.method],
            "depths": DEPTHS,
            "texts": len(lines),
            "new_tokens": options.new_tokens,
            "data": identity_of(lines),
            "parts": [part for part in parts if Linears(plan, part).steps],
            **({"inputs": "measured"} if options.measure_inputs else {}),
        }
        kept = options.kept(is_shared=plan.options.run.share is not None)
        recorded = {**plan.recorded, "calibrate": facts}
        plan = replace(plan, recorded=recorded, calibration=kept)
        Linears(plan, MAIN if options.main else MTP).require()
        if options.measure_inputs and not any(Linears(plan, part).numbered for part in parts):
            raise UsageError(
                "No weight whose codes are chosen has a scale for its inputs",
                expected="--measure-inputs with a4w4_nvfp4",
                found="another precision",
            )
        config_for(with_single_experts(plan.family), None)  # before anything is written
        for part in parts:  # which have no scales in a folder yet
            scales = Scales(Linears(plan, part), options.method, Path())
            plan = unlinked(plan, scales.folded) if scales.folded else plan
        main = None
        if options.main:
            texts, folder = texts_of(lines, TEXT_TOKENS), _folder(plan, options)
            main = MainCalibration(Linears(plan, MAIN), texts, options, folder, show_count)
        data = options.calibrate.name
        wanted = options.imatrix is not None
        imatrix = Imatrix.of(plan, data, len(lines), TEXT_TOKENS) if wanted else None
        return cls(options, lines, Linears(plan), main, imatrix, show_count)

    @property
    def plan(self) -> BundlePlan:
        """The plan of the bundle."""
        return self.linears.plan

    @property
    def new_tokens(self) -> int:
        """Tokens that the main model writes after a prompt without an answer."""
        return self.options.new_tokens

    def make(
        self, plan: BundlePlan, work: Work, record: Record, progress: ProgressCallback
    ) -> None:
        """Make the shards of a work: those of the MTP part last, with the codes that are chosen."""
        mtp = [job for job in work.jobs if _is_mtp(job)]
        others = replace(work, jobs=[job for job in work.jobs if job not in mtp])
        make = make_shards if self.main is None else self.main.make
        make(plan, others, record, progress)
        if mtp:
            jobs = mtp
            if self.linears.steps:
                await_part(plan, MAIN)
                given = self.linears, self._files, self._scales.folded
                amax = self._inputs_amax
                jobs = [with_codes(job, *given, amax) for job in mtp]
            make_shards(plan, replace(work, jobs=jobs, checks=False), record, progress)
        if self.imatrix is not None and self.options.imatrix is not None:
            self.imatrix.write(self.options.imatrix, self._squares)
        shutil.rmtree(self._main, ignore_errors=True)

    @property
    def _squares(self) -> Iterator[Squares]:
        if self.main is not None:
            yield from self.main.squares
        for name in self.linears.steps:
            kept = self._kept(name)
            yield Squares(name, kept["squares"], kept["rows"])

    @property
    def _inputs_amax(self) -> dict[str, float]:
        """Numbers of inputs that are written as they were measured, by their weights."""
        if not self.options.measure_inputs:
            return {}
        return self.linears.inputs_amax({n: self._kept(n)["largest"] for n in self.linears.steps})

    def _kept(self, name: str) -> dict[str, Any]:
        """Return what is kept of a weight."""
        kept: dict[str, Any] = state_files.load(self._files[name], mapped=True)[name]
        return kept

    @cached_property
    def folder(self) -> Path:
        """Folder of all that a run resumes from."""
        return _folder(self.plan, self.options)

    @property
    def _main(self) -> Path:
        share = self.plan.options.run.share
        return self.folder / (MAIN if share is None else f"{MAIN}-{share.number}")

    @cached_property
    def _scales(self) -> Scales:
        return Scales(self.linears, self.options.method, self.folder / "scales")

    @property
    def _written(self) -> set[str]:
        """Weights of the MTP part that the plan's share writes; all without one."""
        jobs = filter(_is_mtp, self.plan.share_jobs)
        return {name for job in jobs for name in weights_of(job, self.linears)}

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Files of chosen codes by their weights, those of which the plan's share writes some;
        those that are missing are made, and its scales."""
        written, scales = self._written, self._scales
        others = self.linears.of_modules(self._rest.mtp_modules)
        every = (*others, *self.linears.of_experts)
        units = [unit for unit in every if not written.isdisjoint(unit.every)]
        paths = {unit: self.folder / "weights" / f"{unit.name}.pt" for unit in units}
        missing = defaultdict[str, list[Unit]](list)
        for name, fold in scales.folds.items():
            if scales.is_missing(name) and not written.isdisjoint(fold.tensors):
                missing[name] = []
        for unit in units:
            if not paths[unit].is_file() or scales.is_missing(unit.input):
                missing[unit.input].append(unit)
        with self.show_count("calibration", len(units), "units") as advance:
            advance(len(units) - sum(map(len, missing.values())))
            for name, own in missing.items():
                self._round(name, own, paths, advance)
        return {name: paths[unit] for unit in units for name in unit.every}

    def _round(
        self, name: str, units: Sequence[Unit], paths: Mapping[Unit, Path], advance: CountCallback
    ) -> None:
        """Choose and keep the codes of units of one input."""
        parts = [state_files.load(path, mapped=True)[name] for path in self._inputs]
        inputs = Inputs.of(pieces(parts), parts[0].shape[1])
        rounder = Rounder(self.linears, self.options.method)
        columns = self._scales.of(name, inputs)
        for unit in units:
            state_files.save(paths[unit], rounder.rounded(unit, parts, inputs, columns))
            advance(1)

    @cached_property
    def _inputs(self) -> list[Path]:
        """Files of what goes into linears, part by part; those that are missing are made."""
        store = self._rows
        with self.show_count("texts", len(self.lines), "texts") as advance:
            store.make(lambda: self._writer, advance)
        paths = [self.folder / "inputs" / path.name for path in store.paths]
        observation = self.linears.observation(self._rest.mtp_modules)
        for path, part in zip(paths, store.parts, strict=True):
            if not path.is_file():
                state_files.save(path, observation.rows(part.texts, part.hidden))
        return paths

    @cached_property
    def _rows(self) -> RowStore:
        # A main model on disk is read once for every part.
        part_lines = len(self.lines) if self.options.stream else PART_LINES
        return RowStore(self.folder / "rows", self.lines, TRAINING_DTYPE, part_lines)

    @cached_property
    def _streamed(self) -> StreamedModel:
        """The main model as it was written, and the MTP layers of the source."""
        self._link_main()
        return open_streamed(self._main, "cpu", self._mtp_source)

    @cached_property
    def _rest(self) -> Model:
        """Embedding, head and MTP modules, of which experts are read when they are used."""
        return self._streamed.rest()

    @property
    def _mtp_source(self) -> Path:
        checkpoint = self.plan.checkpoint
        return checkpoint.folder / MTP if checkpoint.is_bundle else checkpoint.folder

    @cached_property
    def _writer(self) -> Writer:
        stream = self.options.stream
        loading = LoadOptions(mtp_folder=self._mtp_source)
        return Writer(
            self._rest if stream else load_model(self._main, loading).model,
            fed=Fed(self._rest.mtp_modules[0].contract.target_hidden),
            new_tokens=self.new_tokens,
            text_tokens=TEXT_TOKENS,
            streamed=self._streamed if stream else None,
        )

    def _link_main(self) -> None:
        """Make a checkpoint of the main part, whose shards are finished: where the work folder
        takes no links to them, of copies (IoError)."""
        part = next(part for part in self.plan.parts if part.name == MAIN)
        made = [self.plan.options.output_dir / MAIN / shard.file_name for shard in part.shards]
        make_folder(self._main)
        ways = resolve_links(Link.AUTO, made, self._main)
        for path in made:
            link_shard(ways[path], path, self._main / path.name)
        write_files(self.plan, part, self._main)
        write_json(self._main / CONFIG_NAME, part.config)


def _is_mtp(job: ShardJob) -> bool:
    return job.key.startswith(f"{MTP}/")


def _folder(plan: BundlePlan, options: CalibrationOptions) -> Path:
    """Return the folder of a calibration of a plan."""
    facts = ("tool_version", "options", "source", "versions")
    identity = {name: plan.identity[name] for name in facts}
    name = short_hash({**identity, "stream": options.stream})
    return options.work(plan.options.output_dir) / f"calibration-{name}"
