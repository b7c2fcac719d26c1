"""Values of config.json on which no shape depends, compared with those of the family's releases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.families.released import RELEASED_VALUES, unreleased_values
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, measured, passed, verdict
from mtp_export.verify.diagnosis.causes import files as causes

if TYPE_CHECKING:
    from mtp_export.verify.context import Context


def run(context: Context) -> Iterator[Item]:
    """The main model's values, or the MTP part's where there is no main model; nothing for a family
    of whose releases no values are known."""
    for layout in context.layouts[:1]:
        config = layout.checkpoint.config
        known = RELEASED_VALUES.get(str(config.get("model_type")))
        if known is None:
            return
        name, bound = "config values of the releases", "those of the releases"
        found = unreleased_values(config, layout.stored.family)
        figure = counted(len(known), "value")
        if context.options.strict_config:
            subject = str(layout.checkpoint.folder / CONFIG_NAME)
            words = [causes.not_released(one.field, one.found, one.released) for one in found]
            yield verdict(name, [Problem(subject, one) for one in words], figure, bound)
        elif not found:
            yield passed(name, figure=figure, bound=bound)
        else:
            data = {"unreleased": [{"field": one.field, "found": one.found} for one in found]}
            words = [causes.beside_released(one.field, one.found, one.released) for one in found]
            yield measured(name, "; ".join(words), data)
