"""Values of options and arguments, as Typer reads them: it imports pydantic for that, which takes
longer than what most commands do with their options."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

_WHOLE, _DECIMAL = re.compile(r"0|[1-9]\d{0,17}", re.ASCII), re.compile(r"\d+(\.\d+)?", re.ASCII)
_UNUSUAL = object()


class UsualValues:
    """Values of one parameter. What is out of the ordinary, as every mistake is, is left to
    Typer."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return a value in the type of the parameter; raises what Typer does."""
        found = usual_value(value, self._parameter)
        if found is not _UNUSUAL:
            return found
        typers = type(self._parameter).get_runtime_param(self._parameter)
        return typers.coerce(value, param=param, ctx=ctx)


def read_usual_values(command: Any) -> Any:
    """Return a Typer command that reads the usual values of all its parameters, --help included,
    without pydantic."""
    parameters_of = command.get_params

    def parameters(context: Any) -> Any:
        found = parameters_of(context)
        for parameter in found:
            values = UsualValues(parameter)
            parameter.get_runtime_param = lambda values=values: values
        return found

    command.get_params = parameters
    return command


def usual_value(value: Any, parameter: Any) -> Any:
    """Return a value in the type of a parameter, or _UNUSUAL."""
    several = parameter.multiple or parameter.nargs != 1
    if value is None:
        return () if several else None
    info, kind = parameter.type_descriptor.parameter_info, parameter.type_descriptor.annotation
    if several:
        are_texts = kind == list[str] and all(type(one) is str for one in value)
        return list(value) if are_texts else _UNUSUAL
    if info.parser is not None:
        try:
            return info.parser(value)
        except ValueError:
            return _UNUSUAL
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next((one for one in kind if value is one or value == one.value), _UNUSUAL)
    if kind is str:
        return value if type(value) is str else _UNUSUAL
    return _number(value, kind, info)


def _number(value: Any, kind: Any, info: Any) -> Any:
    """Return a number within the bounds of a parameter, or _UNUSUAL."""
    pattern = {int: _WHOLE, float: _DECIMAL}.get(kind)
    if pattern is None or (type(value) is not kind and not pattern.fullmatch(str(value))):
        return _UNUSUAL
    number = kind(value)
    too_low = info.min is not None and number < info.min
    too_high = info.max is not None and number > info.max
    return _UNUSUAL if too_low or too_high else number
