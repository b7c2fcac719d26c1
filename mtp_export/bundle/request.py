"""Request of a bundle: a planner and its options, from which other processes make the same plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from mtp_checkpoints.sources.addresses import place_of
from mtp_checkpoints.sources.byte_source import Address, Place
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.options import BundleOptions, RunOptions, Share
from mtp_export.plan import Link

# Planners by the words of their command, each imported when it is asked for. A planner takes its
# options, and whether this is a dry run.
PLANNERS = {
    "export": ("mtp_export.bundle.export", "plan_export"),
    "graft": ("mtp_export.bundle.graft", "plan_graft"),
    "quantize": ("mtp_export.bundle.quantize", "plan_quantize"),
    "quantize --calibrate": ("mtp_export.calibrate.request", "plan_calibrated"),
}
_UNRECORDED = ("output_dir", "run")  # where and by what means, which each run says itself


@dataclass(frozen=True)
class Request:
    """The name of a planner and its options: BundleOptions, or a dataclass that has them."""

    planner: str
    options: Any

    @property
    def bundle(self) -> BundleOptions:
        """Options that all planners have."""
        options = self.options
        bundle: BundleOptions = options if isinstance(options, BundleOptions) else options.bundle
        return bundle

    @property
    def inputs(self) -> tuple[Place, ...]:
        """Checkpoints that it reads."""
        inputs: tuple[Place, ...] = self.options.inputs
        return inputs

    def plan(self, *, dry_run: bool = False) -> BundlePlan:
        """Check the source and plan the bundle (MtpExportError)."""
        plan: BundlePlan = _planner(self.planner)(self.options, dry_run=dry_run)
        return plan

    def absolute(self) -> Request:
        """Return the request with paths that mean the same in every process."""
        return replace(self, options=_absolute(self.options))

    def recorded(self) -> dict[str, Any]:
        """Return the request as JSON, without its output folder and means."""
        options = _as_json(self.options)
        for name in _UNRECORDED:
            options.get("bundle", options).pop(name)
        link = str(self.bundle.run.link)
        return {"planner": self.planner, "options": options, "link": link}


def restored(recorded: Mapping[str, Any], output: Path, share: Share) -> Request:
    """Return a request that was recorded, for an output folder and a share.

    Raises AttributeError, KeyError, TypeError or ValueError for what recorded() does not return.
    """
    planner = recorded["planner"]
    kind = get_type_hints(_planner(planner))["options"]
    options = dict(recorded["options"])
    run = RunOptions(link=Link(recorded["link"]), share=share)
    own = {"output_dir": str(output), "run": run}
    if kind is BundleOptions:
        options |= own
    else:
        options["bundle"] = options["bundle"] | own
    return Request(planner, _from_json(kind, options))


def _planner(name: str) -> Callable[..., BundlePlan]:
    module, function = PLANNERS[name]
    planner: Callable[..., BundlePlan] = getattr(import_module(module), function)
    return planner


def _absolute(value: Any) -> Any:
    if isinstance(value, Path):
        return value.absolute()
    if is_dataclass(value) and not isinstance(value, type):
        changed = {each.name: _absolute(getattr(value, each.name)) for each in fields(value)}
        return replace(value, **changed)
    return value


def _as_json(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, Address):
        return str(value)
    if is_dataclass(value):
        return {each.name: _as_json(getattr(value, each.name)) for each in fields(value)}
    return str(value) if isinstance(value, Enum) else value


def _from_json(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, Mapping):
        hints = get_type_hints(kind)
        return kind(**{name: _from_json(hints[name], each) for name, each in value.items()})
    if isinstance(value, str) and "\0" in value:
        raise ValueError("a null byte, which no path has")
    if kind is Place:
        return place_of(value)
    if isinstance(kind, UnionType):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
        return None if value is None else _from_json(kind, value)
    if get_origin(kind) is list:
        (own,) = get_args(kind)
        if type(value) is not list:
            raise TypeError(f"{str(value)[:100]!r} is no list")
        return [_from_json(own, each) for each in value]
    if isinstance(kind, type) and issubclass(kind, Path | Enum):
        return kind(value)
    if isinstance(kind, type) and type(value) is not kind:
        raise TypeError(f"{str(value)[:100]!r} is no {kind.__name__}")
    return value
