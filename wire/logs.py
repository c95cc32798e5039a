"""Log lines of every process: one pipeline for our loggers and those of libraries, as JSON or as text for a terminal.

Our calls say ``name key=%s``: the name is the event, and each ``key=`` is a field of its own in JSON. Credentials are cut out
of every value, and no value can begin a line of its own. Nothing of this is done for a line whose level is not written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache
from logging import Formatter, LogRecord
from typing import Any

import msgspec
from structlog.dev import ConsoleRenderer, plain_traceback
from structlog.processors import ExceptionRenderer, JSONRenderer
from structlog.stdlib import ProcessorFormatter
from structlog.typing import Processor, WrappedLogger

from wire.credentials import CREDENTIAL_PATTERN

Fields = MutableMapping[str, Any]  # values of a log line, whatever somebody logs

FORMATS = ("auto", "json", "console")
"""``auto``: text where a person reads at a terminal, JSON for everything else."""
CUT_OUT = "[cut out]"
_SECRET_NAME = r"[\w-]*(?:token|secret|password|passwd|api[-_]?key|authorization|credential)"  # noqa: S105  # a pattern of names
_SECRETS = re.compile(
    "|".join(
        (
            CREDENTIAL_PATTERN,
            r"\b(?:hf|sk|pk|gh[a-z]|xox[a-z]|AKIA|eyJ)[-_A-Za-z0-9]{12,}(?:\.[-_A-Za-z0-9]+)*",
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*",
            r"(?<=://)[^/\s@]+(?=@)",
            r"(?<=/invitation/)[^/\s\"]+",
            r"(?i:\b(?:bearer|basic)\s+)\S+",
            rf"(?i:\b{_SECRET_NAME}\b[\"']?\s*[=:]\s*(?:(?:bearer|basic)\s+)?)\S+",
        )
    )
)
"""What looks like a credential, in whatever program's words it came."""
_RESERVED = frozenset({"time", "level", "logger", "event", "exc_info", "stack_info", "exception", "stack"})
_NAMES_SECRET = re.compile(rf"(?i){_SECRET_NAME}\Z").match
_PLACE = re.compile(r"(?: (\w+)=)?(%[-#0 +]*\d*(?:\.\d+)?[srdifgx]|%%)")


class RequestFields:
    """What the lines of a task say of the request that it serves. ``read`` is called only for a line that is written."""

    __slots__ = ("read",)

    def __init__(self, read: Callable[[], Mapping[str, object]]) -> None:
        self.read: Callable[[], Mapping[str, object]] | None = read

    def close(self) -> None:
        """Say nothing more: timers and tasks that outlive the request were made in its context."""
        self.read = None


_request: ContextVar[RequestFields | None] = ContextVar("request", default=None)


def bind_request(read: Callable[[], Mapping[str, object]]) -> RequestFields:
    """Have the lines of this task, and of what it begins, say what ``read`` returns, until that is closed."""
    fields = RequestFields(read)
    _request.set(fields)
    return fields


def cut_secrets(text: str) -> str:
    """Return a text without what looks like a credential."""
    return _SECRETS.sub(CUT_OUT, text)


def choose_format(said: str, *, is_terminal: bool) -> str:
    """Return which of the two formats one of ``FORMATS`` means."""
    return said if said != "auto" else "console" if is_terminal else "json"


def make_formatter(said: str, *, is_terminal: bool) -> Formatter:
    """Return the formatter of a handler. ``said``: one of ``FORMATS``; text is coloured only where nothing was said."""
    if choose_format(said, is_terminal=is_terminal) == "json":
        last: list[Processor] = [ExceptionRenderer(), _cut, JSONRenderer(serializer=_encode)]
    else:
        renderer = ConsoleRenderer(
            colors=is_terminal and said == "auto", pad_event_to=0, pad_level=False, sort_keys=False, timestamp_key="time",
            exception_formatter=plain_traceback,
        )  # fmt: skip
        last = [ExceptionRenderer(), _cut, _keep_to_one_line, renderer]
    return ProcessorFormatter(
        foreign_pre_chain=[_read_record], processors=[ProcessorFormatter.remove_processors_meta, *last], pass_foreign_args=True
    )


def render_time(unix_s: float) -> str:
    """Return a moment as lines say it: UTC with milliseconds (RFC 3339)."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")[:23] + "Z"


def _encode(fields: Fields, **_options: object) -> str:
    return msgspec.json.encode(fields, enc_hook=str).decode()


def _read_record(_logger: WrappedLogger, _method: str, event: Fields) -> Fields:
    """Return the fields of a record of ``logging``: when, how bad, who says it, what, and of which request."""
    record: LogRecord = event["_record"]
    line: Fields = {"time": render_time(record.created), "level": record.levelname.lower(), "logger": record.name}
    text, said = _split(event)
    line["event"] = text
    line.update((f"{name}_" if name in _RESERVED else name, value) for name, value in said.items())
    request = _request.get()
    if request is not None and request.read is not None:
        line.update((name, value) for name, value in request.read().items() if name not in line)
    for name in ("exc_info", "stack_info", "_record", "_from_structlog"):
        if name in event:
            line[name] = event[name]
    return line


def _split(event: Fields) -> tuple[str, dict[str, object]]:
    """Return the name of the event and its fields, told apart in the text that was written in the code, not in its values."""
    record, args = event["_record"], event.pop("positional_args", ())
    template = str(record.msg)
    if not isinstance(args, tuple) or not args or "=%" not in template:
        return event["event"], {}
    names, rest = _read_template(template)
    if len(names) != len(args):
        return event["event"], {}
    fields = {name: _plain(value) for (name, _), value in zip(names, args, strict=True) if name}
    return rest % tuple(value for (name, _), value in zip(names, args, strict=True) if not name), fields


@lru_cache(maxsize=1000)
def _read_template(template: str) -> tuple[tuple[tuple[str, str], ...], str]:
    """Return the name (or nothing) and the form of each value of a text, and the text without what has a name."""
    found = tuple((match[1] or "", match[2]) for match in _PLACE.finditer(template) if match[2] != "%%")
    return found, _PLACE.sub(lambda match: "" if match[1] and match[2] != "%%" else match[0], template).strip()


def _plain(value: object) -> object:
    if isinstance(value, float):
        return round(value, 3)
    return value if value is None or isinstance(value, bool | int) else str(value)


def _cut(_logger: WrappedLogger, _method: str, event: Fields) -> Fields:
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = CUT_OUT if value and _NAMES_SECRET(name) else cut_secrets(value)
    return event


def _keep_to_one_line(_logger: WrappedLogger, _method: str, event: Fields) -> Fields:
    for name in ("event", "exception", "stack"):  # the renderer quotes what else is not printable
        value = event.get(name, "")
        if not isinstance(value, str) or value.isprintable():
            continue
        lines = [value] if name == "event" else [f"    {line}" for line in value.splitlines()]
        event[name] = "\n".join("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in lines)
    return event
