"""Values of config.json on which no shape depends, compared with those of the family's releases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.families import name_of
from mtp_checkpoints.families.released import released_values, unreleased_values
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, measured, not_tested, passed, verdict
from mtp_export.verify.diagnosis.causes import files as causes

if TYPE_CHECKING:
    from mtp_export.verify.context import Context


def run(context: Context) -> Iterator[Item]:
    """The main model's values, or the MTP part's where there is no main model."""
    for layout in context.layouts[:1]:
        config = layout.checkpoint.config
        name, bound = "config values of the releases", "those of the releases"
        family = name_of(config)
        if family is None:  # a draft by an engine's own name
            return
        known = released_values(config)
        if not known:
            why = f"no release of {family} was read"
            is_asked = context.options.strict_config
            yield not_tested(name, why) if is_asked else measured(name, why, {"unread": family})
            return
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
