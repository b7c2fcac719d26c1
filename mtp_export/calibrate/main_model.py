"""Calibration of a main model that is read layer by layer: the codes of a layer are chosen by what
the layers before it make of the texts, as they are written.

A work folder holds the hidden states around one layer, which are read in parts, and the codes of
layers until their shards are made, so that an interrupted run goes on with the layer that it was at
and memory does not depend on the number of texts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_export import state_files
from mtp_export.bundle.build import Work, make_shards
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.run import Record, ShardJob
from mtp_export.calibrate.hidden_states import FedRows, HiddenStates, Part, parts_of
from mtp_export.calibrate.imatrix import Squares
from mtp_export.calibrate.jobs import weights_of, with_codes
from mtp_export.calibrate.linears import Linears, Unit
from mtp_export.calibrate.options import CalibrationOptions
from mtp_export.calibrate.rounding import Inputs, Rounder, Sums, pieces
from mtp_export.calibrate.scales import Scales
from mtp_export.progress import ProgressCallback, ShowCount
from mtp_export.schemes.calibrated import Folded, kept_values
from mtp_export.tune.rows import Line
from mtp_runtime.layer_inputs import ROW_DTYPE, seen
from mtp_runtime.models.layer_types import load_part
from mtp_runtime.models.load import OpenedModel
from mtp_runtime.streaming import StreamedModel, open_streamed
from mtp_runtime.teacher_forcing import Text, Texts


def texts_of(lines: Sequence[Line], text_tokens: int) -> Texts:
    """Return prompts with the answers that they have, cut at a number of tokens."""
    whole = ((line.prompt + (line.answer or ()))[:text_tokens] for line in lines)
    return Texts(tuple(Text(tokens, len(tokens)) for tokens in whole))


@dataclass(frozen=True)
class WrittenValues(Mapping[str, Tensor]):
    """Weights of layers as a bundle has them, each read when it is asked for: [N, K], fp32, with
    the codes that were chosen, or as their conversion makes them; in their dtype those that scales
    are folded into."""

    linears: Linears
    files: Mapping[str, Path]
    folded: Mapping[str, Folded]

    def __getitem__(self, name: str) -> Tensor:
        if name in self.folded:
            return self.folded[name].of(self.linears.floats(name))
        convert = self.linears.convert(name)
        if name in self.linears.steps:
            return kept_values(convert, state_files.load(self.files[name], mapped=True)[name])
        tensors, _ = convert.format.quantize(self.linears.values(name), convert.scale_rule)
        return convert.format.encoded(tensors).dequantize(torch.float32)

    def __contains__(self, name: object) -> bool:
        return name in self.folded or name in self.linears.converted

    def __iter__(self) -> Iterator[str]:
        return iter({**self.folded, **self.linears.converted})

    def __len__(self) -> int:
        return len({*self.folded, *self.linears.converted})


@dataclass(frozen=True)
class MainCalibration:
    """Calibration of the main part of a plan by texts, in a work folder: at its end scales and
    squares are there alone. show_count opens its progress bar."""

    linears: Linears
    texts: Texts
    options: CalibrationOptions
    work: Path
    show_count: ShowCount

    def make(
        self, plan: BundlePlan, work: Work, record: Record, progress: ProgressCallback
    ) -> None:
        """Make the shards of a work: each as soon as the codes of its layers are chosen."""
        last = {job.key: self._last_layer(job) for job in work.jobs}
        waiting = [job for job in work.jobs if last[job.key] >= 0]
        others = [job for job in work.jobs if last[job.key] < 0]
        make_shards(plan, replace(work, jobs=others), record, progress)
        if not waiting:
            shutil.rmtree(self.folder, ignore_errors=True)  # of a run that ended just before
            return

        given = self.linears, self.files, self._scales.folded

        def write(layers: int) -> None:
            ready = [job for job in waiting if last[job.key] < layers]
            if ready:
                amax = self._inputs_amax(ready)
                made = [with_codes(job, *given, amax) for job in ready]
                make_shards(plan, replace(work, jobs=made, checks=False), record, progress)
            for job in ready:
                waiting.remove(job)
                self._drop(job)

        count = max(last.values()) + 1
        with self.show_count("calibration", count, "layers") as advance:
            done = self._resumed(waiting, count)
            advance(done)
            for number in range(done, count):
                write(number)
                self._pass(number)
                for passed in ("attended", "hidden"):
                    shutil.rmtree(self._states(passed, number).folder)
                advance(1)
            write(count)
        shutil.rmtree(self.folder)

    @property
    def folder(self) -> Path:
        """Folder of hidden states and codes, which is gone at the end."""
        return self.work / "layers"

    @cached_property
    def files(self) -> dict[str, Path]:
        """Files of chosen codes by their weights."""
        return {name: self.folder / f"{name}.pt" for name in self.linears.steps}

    @property
    def squares(self) -> Iterator[Squares]:
        """Squares of what went into the linears of all layers."""
        for number in sorted({self._layer_of[name] for name in self.files}):
            for name, (sums, rows, _) in state_files.load(self._squares_of(number)).items():
                yield Squares(name, sums, rows)

    def _inputs_amax(self, jobs: Iterable[ShardJob]) -> dict[str, float]:
        """Return the numbers of inputs that jobs write as they were measured, by their weights."""
        if not self.options.measure_inputs:
            return {}
        layers = {self._layer_of[name] for job in jobs for name in self._changed(job)}
        found = dict[str, float]()
        for number in layers:
            kept = state_files.load(self._squares_of(number))
            found |= {name: largest for name, (_, _, largest) in kept.items()}
        return self.linears.inputs_amax(found)

    def _squares_of(self, number: int) -> Path:
        """File of the squares of a layer's inputs, and of the largest."""
        return self.work / "squares" / f"layer-{number:05d}.pt"

    def _keep_squares(self, number: int) -> None:
        """Keep the squares of a layer's inputs, those that are alike once, and their largest."""
        alike, found = dict[bytes, Tensor](), dict[str, tuple[Tensor, int, float]]()
        for name in (name for name in self.files if self._layer_of[name] == number):
            kept = state_files.load(self.files[name], mapped=True)[name]
            sums = kept["squares"].clone()
            same = alike.setdefault(sums.numpy().tobytes(), sums)
            found[name] = same, kept["rows"], kept["largest"]
        state_files.save(self._squares_of(number), found)

    @cached_property
    def _scales(self) -> Scales:
        return Scales(self.linears, self.options.method, self.work / "scales")

    @cached_property
    def _layer_of(self) -> dict[str, int]:
        """Number of the layer of each weight that the calibration changes."""
        prefixes = {f"{layer.prefix}.": n for n, layer in enumerate(self.linears.layers)}
        found = dict[str, int]()
        for name in (*self.linears.steps, *self._scales.folded):
            own = (name[: at + 1] for at, letter in enumerate(name) if letter == ".")
            found[name] = next(prefixes[prefix] for prefix in own if prefix in prefixes)
        return found

    def _changed(self, job: ShardJob) -> list[str]:
        """Return the weights of a job that the calibration changes."""
        return [name for name in weights_of(job, self.linears) if name in self._layer_of]

    def _last_layer(self, job: ShardJob) -> int:
        """Return the last layer of which a job writes what is chosen; -1: of none."""
        return max((self._layer_of[name] for name in self._changed(job)), default=-1)

    def _file_of(self, name: str) -> Path:
        """File of the codes of a weight, or of the scales in it."""
        return self.files[name] if name in self.files else self._scales.folded[name].file

    @property
    def most_kept_bytes(self) -> int:
        """Bytes of the codes that wait for their shards at a time, at most."""
        steps, most = self.linears.steps, 0
        last = [(job, self._last_layer(job)) for job in self.linears.plan.jobs]
        for number in range(len(self.linears.layers)):
            waiting = (job for job, layer in last if layer >= number)
            names = (name for job in waiting for name in self._changed(job) if name in steps)
            kept = (steps[n].size_bytes for n in names if self._layer_of[n] <= number)
            most = max(most, sum(kept))
        return most

    def _states(self, kind: str, number: int) -> HiddenStates:
        """Hidden states before a layer, or those behind its attention."""
        return HiddenStates(self.folder / f"{kind}-{number:05d}", len(self._parts))

    def _resumed(self, waiting: Iterable[ShardJob], count: int) -> int:
        """Return the number of layers of so many that an earlier run passed, whose hidden states
        are there; 0, with those of the embedding, where it left none, or not all codes that are
        still to be written."""
        names = [name for job in waiting for name in self._changed(job)]
        for passed in range(count, 0, -1):
            if self._states("hidden", passed).are_whole:
                layers = range(passed)
                needed = (self._file_of(name) for name in names if self._layer_of[name] in layers)
                if all(path.is_file() for path in (*needed, *map(self._squares_of, layers))):
                    return passed
        self._streamed.config.check_positions(max(len(t.tokens) for t in self.texts.texts))
        embedded = self._streamed.embedded
        self._states("hidden", 0).make(lambda part: embedded(self._parts[part].texts.tokens))
        return 0

    def _drop(self, made: ShardJob) -> None:
        """Remove the codes that a shard has."""
        for name in self._changed(made):
            if name in self.files:
                self.files[name].unlink()

    @cached_property
    def _streamed(self) -> StreamedModel:
        return open_streamed(self.linears.plan.checkpoint.folder, "cpu")

    @cached_property
    def _as_written(self) -> OpenedModel:
        opened = self._streamed.opened
        values = WrittenValues(self.linears, self.files, self._scales.folded)
        return replace(opened, source=replace(opened.source, values=values))

    @cached_property
    def _parts(self) -> list[Part]:
        return parts_of(self.texts)

    @torch.inference_mode()
    def _pass(self, number: int) -> None:
        """Choose the codes of a layer, and make the hidden states behind it, as it is written."""
        layer, spec = self._streamed.layer(number), self._as_written.spec.layers[number]
        before, behind = self._states("hidden", number), self._states("attended", number)

        def attend(attention: Any, part: int) -> Tensor:
            own = replace(layer, attention=attention)
            return self._parts[part].attended(own, before[part])

        def added(feed_forward: Any, part: int) -> Tensor:
            return replace(layer, feed_forward=feed_forward).added(behind[part])

        self._choose(layer.attention, attend)
        loader = self._as_written.loader
        attention = load_part(loader, spec.attention, spec.attention_prefix)
        behind.make(partial(attend, attention))
        if units := self.linears.experts[number]:
            self._choose_experts(units, FedRows(layer, behind, ROW_DTYPE))
        else:
            self._choose(layer.feed_forward, added)
        self._keep_squares(number)
        written = replace(
            layer,
            post_norm=loader.norm(spec.post_norm),
            feed_forward=load_part(loader, spec.feed_forward, spec.feed_forward_prefix),
        )
        self._states("hidden", number + 1).make(lambda part: written.fed_forward(behind[part]))

    def _choose(self, part: object, run: Callable[[Any, int], object]) -> None:
        """Choose codes of the linears of a part of a layer beside experts; run takes rows through
        the part with its inputs seen, those of some texts at a time."""
        units = [unit for unit in self.linears.others([part]) if self._is_missing(unit)]
        sums = dict[str, Sums]()

        def see(name: str, rows: Tensor) -> None:
            if name not in sums:
                sums[name] = Sums(rows.shape[1])
            sums[name].add(rows.float())

        if units:
            wanted = {self.linears.steps[n].inputs[0] for unit in units for n in unit.weights}
            observed = seen(part, wanted, see)
            for number in range(len(self._parts)):
                run(observed, number)
        for unit in units:
            self._keep(unit, (), sums[unit.input].inputs, None)

    def _choose_experts(self, units: Sequence[Unit], rows: FedRows) -> None:
        """Choose codes of experts, or of a dense layer's one MLP, which take rows."""
        missing = [unit for unit in units if self._is_missing(unit)]
        if missing:
            inputs = Inputs.of(pieces(rows), self.linears.plan.family.facts.hidden)
            columns = self._scales.of(units[0].input, inputs)
            for unit in missing:
                self._keep(unit, rows, inputs, columns)

    def _is_missing(self, unit: Unit) -> bool:
        files = (self.files[name] for name in unit.every if name in self.linears.steps)
        return self._scales.is_missing(unit.input) or not all(path.is_file() for path in files)

    def _keep(
        self, unit: Unit, rows: Iterable[Tensor], inputs: Inputs, columns: Tensor | None
    ) -> None:
        rounder = Rounder(self.linears, self.options.method)
        for name, kept in rounder.rounded(unit, rows, inputs, columns).items():
            state_files.save(self.files[name], {name: kept})
