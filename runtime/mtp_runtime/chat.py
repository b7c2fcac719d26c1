"""Chats as prompts: the chat template of a checkpoint, rendered in a process with limits."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from mtp_checkpoints.errors import InvalidInputError, UsageError
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.sources.strict_json import parse

Message = Mapping[str, Any]  # "role" and "content", and what else the template knows

_TEMPLATE_NAME, _SETTINGS_NAME = "chat_template.jinja", "tokenizer_config.json"
_MAX_TEMPLATE = 1_000_000  # characters; those of releases have some thousands
_MAX_LINE = 1 << 24  # characters of an answer
_SECONDS = 5.0
_GET_AGAIN = "Get the template again from the checkpoint's source"
_WORKER = Path(__file__).with_name("chat_worker.py")


class Chat:
    """The chat template of a checkpoint folder, if it has one, and the process that renders it."""

    def __init__(self, folder: Path, seconds: float = _SECONDS) -> None:
        self._folder = folder
        self._seconds = seconds
        self._worker: subprocess.Popen[str] | None = None
        self._lock = Lock()

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return _read_settings(self._folder)

    @cached_property
    def _template(self) -> str | None:
        return _read_template(self._folder, self._settings)

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text of a chat up to where the assistant answers, special tokens included.

        Raises UsageError without a template, or for messages that it refuses, and
        InvalidInputError for a template that is too large, breaks off whatever the messages are, or
        takes too much time or memory.
        """
        if self._template is None:
            raise UsageError(
                "There is no chat template",
                where=self._folder,
                expected=f"{_TEMPLATE_NAME}, or chat_template in {_SETTINGS_NAME}",
                todo="Give prompts instead of chats",
            )
        variables = {
            **_special_tokens(self._settings),
            "messages": messages,
            "add_generation_prompt": True,
        }
        asked = {"template": self._template, "variables": variables, "seconds": self._seconds}
        with self._lock:
            answer = self._ask(json.dumps(asked))
        if "refused" in answer:
            raise UsageError(
                "The chat template refuses the messages",
                where=self._folder,
                found=answer["refused"],
            )
        if "broken" in answer:
            raise InvalidInputError(
                "The chat template cannot be rendered",
                where=self._folder,
                expected="a template that renders a chat, in a sandbox",
                found=answer["broken"],
                todo=_GET_AGAIN,
            )
        return answer["text"]

    def _ask(self, line: str) -> dict[str, str]:
        """Return the worker's answer; one that broke a limit is replaced by the next call."""
        worker = self._worker or self._start()
        assert worker.stdin is not None and worker.stdout is not None
        try:
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline(_MAX_LINE)
        except OSError:
            answer = ""
        if answer.endswith("\n"):
            result: dict[str, str] = json.loads(answer)
            return result
        self._worker = None
        _end(worker)
        raise InvalidInputError(
            "The chat template was cut off",
            where=self._folder,
            expected=f"an answer of at most {_MAX_LINE} characters in {self._seconds:g} seconds"
            " and 512 MiB",
            todo=_GET_AGAIN,
        )

    def _start(self) -> subprocess.Popen[str]:
        """Start a worker, which ends with this object at the latest."""
        self._worker = subprocess.Popen(
            [sys.executable, str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for us to handle
        )
        weakref.finalize(self, _end, self._worker)
        return self._worker


def _end(worker: subprocess.Popen[str]) -> None:
    """End a worker, if it has not ended, and close what leads to it."""
    worker.kill()
    worker.wait()
    for stream in (worker.stdin, worker.stdout):
        assert stream is not None
        with suppress(OSError):  # a line that the worker never took
            stream.close()


def _read_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, empty where there is none."""
    source = LocalFolder(folder)
    if _SETTINGS_NAME not in source.names():
        return {}
    try:
        settings = parse(source.read(_SETTINGS_NAME))
    except ValueError as error:
        raise InvalidInputError(
            "The tokenizer's settings are no JSON", where=folder / _SETTINGS_NAME, found=error
        ) from None
    return settings if isinstance(settings, dict) else {}


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the template, of several the default one, or None."""
    source = LocalFolder(folder)
    template = settings.get("chat_template")
    if _TEMPLATE_NAME in source.names():
        template = source.read(_TEMPLATE_NAME).decode("utf-8", "replace")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
    if not isinstance(template, str):
        return None
    if len(template) > _MAX_TEMPLATE:
        raise InvalidInputError(
            "The chat template is too large",
            where=folder,
            expected=f"at most {_MAX_TEMPLATE} characters",
            found=len(template),
            todo="Get it again from the checkpoint's source",
        )
    return template


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the tokens that templates name, as bos_token."""
    tokens = {key: value for key, value in settings.items() if key.endswith("_token")}
    texts = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in tokens.items()
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}
