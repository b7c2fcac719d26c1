"""Process that renders chat templates: a script of its own, which mtp_runtime.chat starts.

A template comes with a checkpoint and is a program. Jinja's sandbox keeps it from what is outside;
its time and memory the operating system bounds, and at the bound of time ends this process. One
JSON object per line: {"template", "variables", "seconds"} comes in; {"text"} goes out, or
{"refused"} where the messages are at fault, or {"broken"} where the template is.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MEMORY_BYTES = 512 << 20


_PLAIN_CHAT = {"messages": [{"role": "user", "content": "a"}]}


class _Refusal(Exception):
    """Refusal of the messages by the template itself."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Return JSON as it is: Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


@cache
def _compiled(template: str) -> Template:
    """Compile a template with the settings and functions that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _answer(line: str) -> dict[str, str]:
    asked = json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, asked["seconds"])  # of computing; its signal ends us
    try:
        return {"text": _compiled(asked["template"]).render(asked["variables"])}
    except _Refusal as error:
        return {"refused": str(error)[:1000]}
    except Exception as error:  # of whatever kind a template can raise
        kind = "refused" if _renders(asked) and not isinstance(error, SecurityError) else "broken"
        return {kind: f"{type(error).__name__}: {error}"[:1000]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _renders(asked: Mapping[str, Any]) -> bool:
    """Return whether a template renders a chat that none refuses."""
    try:
        _compiled(asked["template"]).render(asked["variables"] | _PLAIN_CHAT)
    except _Refusal:
        return True
    except Exception:
        return False
    return True


def main() -> None:
    """Render until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_answer(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
