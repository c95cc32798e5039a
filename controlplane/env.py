"""Typed readers for environment variables. A secret may also be given as ``NAME_FILE``, a path to read it from.

Standard library only: the launcher uses it before anything is installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from core.limits import Limits
from wire.limits import list_bounds

if TYPE_CHECKING:
    from core.valkey import ValkeyAddress

# libpq's, in seconds, the last in milliseconds: a server or network that is gone must not hang us. The URL may differ.
_BOUNDS = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}
Number = TypeVar("Number", int, float)

LOG_LEVELS = {
    "trace": "DEBUG",
    "debug": "DEBUG",
    "info": "INFO",
    "warn": "WARNING",
    "warning": "WARNING",
    "error": "ERROR",
    "critical": "CRITICAL",
}
"""Words for a log level, in any case, and what Python calls each. ``runner.config.options`` has the same for a node."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that this process read. ``text``: what holds, as one would write it; ``origin``: where that comes from."""

    name: str
    text: str
    origin: Literal["variable", "file", "default"]


_READ: dict[str, Variable] = {}
"""By name, in the order in which they were first asked for."""


def list_variables() -> list[Variable]:
    """Return every variable that this process has read, set or not."""
    return list(_READ.values())


class SettingError(ValueError):
    """A variable holds something that cannot be used; the text says which and what would do."""


def report_setting_errors() -> None:
    """Let a process that a SettingError ends say one line instead of a traceback. Entry points call it before settings load."""

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, SettingError):
            sys.stderr.write(f"muster: {error}\n")
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = report


def read_text(name: str, default: str = "") -> str:
    """Return the variable, or the content of the file that ``NAME_FILE`` names, or ``default``."""
    value = os.environ.get(name)
    if value is not None:
        _READ[name] = Variable(name, value, "variable")
        return value
    path = os.environ.get(f"{name}_FILE")
    if path:
        try:
            value = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise SettingError(f"{name}_FILE: cannot read {path}: {error.strerror}") from error
        _READ[name] = Variable(name, value, "file")
        return value
    _READ[name] = Variable(name, default, "default")
    return default


def _read_raw(name: str, default: object) -> str:
    """Return the variable's text, "" when it is not set; ``default`` is what its reader takes then."""
    raw = read_text(name).strip()
    if not raw:
        number = int(default) if isinstance(default, float) and default.is_integer() else default
        _READ[name] = Variable(name, str(number), "default")
    return raw


def read_int(name: str, default: int, *, minimum: int = 0) -> int:
    """Return the variable as a whole number of at least ``minimum``. Raises SettingError."""
    return _read_number(name, default, minimum, int, "a whole number")


def read_float(name: str, default: float, *, minimum: float = 0.0) -> float:
    """Return the variable as a number of at least ``minimum``. Raises SettingError."""
    return _read_number(name, default, minimum, float, "a number")


def _read_number(name: str, default: Number, minimum: Number, kind: Callable[[str], Number], what: str) -> Number:
    raw = _read_raw(name, default)
    if not raw:
        return default
    try:
        value = kind(raw)
    except ValueError:
        raise SettingError(f"{name} must be {what}, not {raw!r}") from None
    if not value >= minimum:  # said so, it holds for what is no number either
        raise SettingError(f"{name} must be at least {minimum}, not {value}")
    return value


def read_bool(name: str, *, default: bool) -> bool:
    """Return the variable as a switch: 1, true, yes, on or 0, false, no, off."""
    raw = _read_raw(name, "on" if default else "off").lower()
    if not raw:
        return default
    if raw in {"1", "true", "yes", "on"}:
        return True
    if raw in {"0", "false", "no", "off"}:
        return False
    raise SettingError(f"{name} must be one of 1/true/yes/on or 0/false/no/off, not {raw!r}")


def read_log_level(name: str) -> str:
    """Return Python's name of the log level in the variable, INFO when it is not set. Raises SettingError."""
    raw = _read_raw(name, "info") or "info"
    level = LOG_LEVELS.get(raw.lower())
    if level is None:
        raise SettingError(f"{name} must be one of {', '.join(LOG_LEVELS)}, not {raw!r}")
    return level


def read_choice(name: str, choices: Mapping[str, str]) -> str:
    """Return the variable, one of ``choices``; the first of them when it is not set. Raises SettingError."""
    raw = _read_raw(name, next(iter(choices))).lower() or next(iter(choices))
    if raw not in choices:
        raise SettingError(f"{name} must be one of {', '.join(choices)}, not {raw!r}")
    return raw


def read_list(name: str, default: list[str] | None = None) -> list[str]:
    raw = _read_raw(name, ",".join(default or []))
    return [part.strip() for part in raw.split(",") if part.strip()] if raw else list(default or [])


def read_limits() -> Limits:
    """Return the limits of a server process: the defaults, and what variables say of those that have one."""
    chosen = Limits()
    for section in fields(chosen):
        values = getattr(chosen, section.name)
        told: dict[str, float] = {}
        for bound in list_bounds(values):
            if bound.setting and _read_raw(bound.setting, bound.default / bound.factor):
                if isinstance(bound.default, int):
                    value: float = read_int(bound.setting, 0, minimum=int(bound.minimum))
                else:
                    value = read_float(bound.setting, 0.0, minimum=bound.minimum)
                told[bound.name] = value * bound.factor
        chosen = replace(chosen, **{section.name: replace(values, **told)})
    return chosen


def read_networks(name: str) -> list[IPv4Network | IPv6Network]:
    try:
        return [ip_network(text) for text in read_list(name)]
    except ValueError as error:
        raise SettingError(f"{name}: {error}; list addresses and networks such as 127.0.0.1,10.0.0.0/24") from None


def read_valkey(name: str) -> ValkeyAddress:
    """Return where Valkey is. Raises SettingError."""
    # The launcher imports this module before anything is installed.
    from core.valkey import DEFAULT_URL, read_address

    try:
        return read_address(read_text(name) or DEFAULT_URL)
    except ValueError as error:
        raise SettingError(f"{name} {error}") from None


def read_database(url: str) -> dict[str, object]:
    """Return Django's settings for ``postgresql://user:pass@host:port/name?host=/socket/dir``."""
    parts = urlsplit(url)
    if parts.scheme not in {"postgres", "postgresql"}:
        raise SettingError("DATABASE_URL must start with postgresql://; other databases are not supported")
    query = dict(parse_qsl(parts.query))
    host = query.pop("host", "") or parts.hostname or ""
    port = query.pop("port", "") or (str(parts.port) if parts.port else "")
    return {
        "ENGINE": "core.db",
        "NAME": unquote(parts.path.lstrip("/")) or "muster",
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": host,
        "PORT": port,
        "OPTIONS": {**_BOUNDS, **query},
    }
