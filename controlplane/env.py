"""Typed readers for environment variables. A secret may also be given as ``NAME_FILE``, a path to read it from.

Standard library only: the launcher uses it before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from core.issuer import Issuer
from core.limits import Limits
from wire.limits import WIRE, list_bounds
from wire.variables import Alias, Variable, describe_aliases, find_variable, print_problems, read_level, read_rust_log

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
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}\Z")
_REQUIRE_KEYS, _KEYLESS_ADDRESSES = "MUSTER_REQUIRE_API_KEYS", "MUSTER_KEYLESS_ADDRESSES"
Number = TypeVar("Number", int, float)

LOG_FORMATS = ("auto", "json", "console")
"""``wire.logs`` makes them; ``auto`` is text at a terminal and JSON elsewhere."""
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


def _read_bound(text: str, *, without: str) -> str:
    # There 0 is no bound; here nobody would wait.
    return without if text == "0" else text


ALIASES = (
    Alias("LISTEN_ADDR", "MUSTER_LISTEN", "--listen"),
    Alias("PROVIDER_NAME", "MUSTER_PROVIDER", "--provider"),
    Alias("WORKER_SECRET", "MUSTER_WORKER_SECRET", "--worker-secret"),
    Alias("MODELRELAY_ADMIN_TOKEN", "MUSTER_ADMIN_TOKEN", "--admin-token"),
    Alias("MODELRELAY_REQUIRE_API_KEYS", "MUSTER_REQUIRE_API_KEYS", "--require-api-keys"),
    Alias("MODELRELAY_REJECT_UNVERSIONED_WORKERS", "MUSTER_REJECT_UNVERSIONED_WORKERS"),
    Alias("MAX_QUEUE_LEN", "MUSTER_MAX_QUEUE_LEN", "--max-queue-len", partial(_read_bound, without="1000000")),
    Alias("QUEUE_TIMEOUT_SECS", "MUSTER_QUEUE_TIMEOUT_S", "--queue-timeout", partial(_read_bound, without="604800")),
    Alias("REQUEST_TIMEOUT_SECS", "MUSTER_REQUEST_TIMEOUT_S", "--request-timeout", partial(_read_bound, without="604800")),
    Alias("RUST_LOG", "MUSTER_LOG_LEVEL", read=read_rust_log),
    Alias("LOG_LEVEL", "MUSTER_LOG_LEVEL", "--log-level", read_level),
)
"""What servers read for users of ModelRelay where ours is not set; the first counts. ``runner.config`` has a node's."""

_READ: dict[str, Variable] = {}
"""By name, in the order in which they were first asked for."""


class _Errors:
    """What is wrong so far, while settings are read as a whole; None = the first mistake is raised."""

    collected: ClassVar[list[str] | None] = None


def list_variables() -> list[Variable]:
    """Return every variable that this process has read, set or not."""
    return list(_READ.values())


def list_problems() -> list[str]:
    """Return what is wrong with the variables that this process has read."""
    return list(dict.fromkeys(variable.problem for variable in _READ.values() if variable.problem))


def list_alias_notes() -> list[str]:
    """Return a sentence for each alias in the environment: what it is read as, or what wins over it."""
    return describe_aliases(os.environ, ALIASES)


class SettingError(ValueError):
    """A variable holds something that cannot be used; the text says which and what would do."""


def collect_errors() -> None:
    """Read on after a mistake from now on, with the default, until ``raise_errors``."""
    _Errors.collected = []


def raise_errors() -> None:
    """Raise one SettingError that has every mistake since ``collect_errors``; a later one is raised where it is made."""
    problems, _Errors.collected = list(dict.fromkeys(_Errors.collected or [])), None
    if problems:
        raise SettingError(print_problems(problems))


def refuse(name: str, what: str) -> None:
    """Say that a variable cannot be used. Raises SettingError; while errors are collected, at the end of that."""
    _note_problem(name, f"{_READ.get(name, Variable(name, '', 'variable')).subject} {what}")


def _note_problem(name: str, problem: str) -> None:
    if name in _READ:
        _READ[name] = replace(_READ[name], problem=problem)
    if _Errors.collected is None:
        raise SettingError(problem)
    _Errors.collected.append(problem)


def report_setting_errors() -> None:
    """Let a process that a SettingError ends say one line instead of a traceback. Entry points call it before settings load."""

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, SettingError):
            sys.stderr.write(f"muster: {error}\n")
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = report


def read_text(name: str, default: str = "", *, allowed: str = "") -> str:
    """Return the variable, the content of the file that ``NAME_FILE`` names, what an alias says, or ``default``."""
    found = find_variable(name, os.environ, ALIASES)
    if found is None:
        _READ[name] = Variable(name, default, "default", default=default, allowed=allowed)
        return default
    _READ[name] = found = replace(found, default=default, allowed=allowed)
    if found.origin != "file":
        return found.text
    try:
        value = Path(found.source).read_text(encoding="utf-8").strip()
    except OSError as error:
        _note_problem(name, f"{name}_FILE: cannot read {found.source}: {error.strerror}")
    except UnicodeDecodeError:
        _note_problem(name, f"{name}_FILE: cannot read {found.source}: it is no text in UTF-8")
    else:
        _READ[name] = replace(found, text=value)
        return value
    return default


def _read_raw(name: str, default: object, allowed: str) -> str:
    """Return the variable's text, "" when it is not set; ``default`` is what its reader takes then."""
    number = int(default) if isinstance(default, float) and default.is_integer() else default
    raw = read_text(name, allowed=allowed).strip()
    read = replace(_READ[name], default=str(number))
    _READ[name] = read if raw or read.problem else replace(read, text=str(number), origin="default", source="")
    return raw


def read_int(name: str, default: int, *, minimum: int = 0) -> int:
    """Return the variable as a whole number of at least ``minimum``. Raises SettingError."""
    return _read_number(name, default, minimum, int, "a whole number")


def read_float(name: str, default: float, *, minimum: float = 0.0) -> float:
    """Return the variable as a number of at least ``minimum``. Raises SettingError."""
    return _read_number(name, default, minimum, float, "a number")


def _read_number(name: str, default: Number, minimum: Number, kind: Callable[[str], Number], what: str) -> Number:
    raw = _read_raw(name, default, f"{what} of at least {minimum:g}")
    if not raw:
        return default
    try:
        value = kind(raw)
    except ValueError:
        refuse(name, f"must be {what}, not {raw!r}")
        return default
    if not value >= minimum:  # said so, it holds for what is no number either
        refuse(name, f"must be at least {minimum}, not {value}")
        return default
    return value


def read_bool(name: str, *, default: bool) -> bool:
    """Return the variable as a switch: 1, true, yes, on or 0, false, no, off."""
    raw = _read_raw(name, "on" if default else "off", "1/true/yes/on or 0/false/no/off").lower()
    if raw in {"1", "true", "yes", "on"}:
        return True
    if raw in {"0", "false", "no", "off"}:
        return False
    if raw:
        refuse(name, f"must be one of 1/true/yes/on or 0/false/no/off, not {raw!r}")
    return default


def read_log_level(name: str) -> str:
    """Return Python's name of the log level in the variable, INFO when it is not set. Raises SettingError."""
    raw = _read_raw(name, "info", ", ".join(LOG_LEVELS)) or "info"
    level = LOG_LEVELS.get(raw.lower())
    if level is None:
        refuse(name, f"must be one of {', '.join(LOG_LEVELS)}, not {raw!r}")
    return level or "INFO"


def read_choice(name: str, choices: Mapping[str, str]) -> str:
    """Return the variable, one of ``choices``; the first of them when it is not set. Raises SettingError."""
    first = next(iter(choices))
    raw = _read_raw(name, first, ", ".join(choices)).lower() or first
    if raw not in choices:
        refuse(name, f"must be one of {', '.join(choices)}, not {raw!r}")
        return first
    return raw


def read_list(name: str, default: list[str] | None = None) -> list[str]:
    raw = _read_raw(name, ",".join(default or []), "a list, separated by commas")
    return [part.strip() for part in raw.split(",") if part.strip()] if raw else list(default or [])


def read_name(name: str, default: str) -> str:
    """Return a name of letters, digits, hyphens and underscores. Raises SettingError."""
    text = _read_raw(name, default, "letters, digits, - and _") or default
    if not _NAME.match(text):
        refuse(name, f"must be 1 to 60 letters, digits, hyphens or underscores, not {text!r}")
        return default
    return text


def read_address(name: str, default: str) -> tuple[str, int]:
    """Return host and port of an address to listen on, such as 127.0.0.1:8080 or [::1]:8080. Raises SettingError."""
    raw = _read_raw(name, default, "HOST:PORT") or default
    host, _, port = raw.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        refuse(name, f"must be an address and a port such as 127.0.0.1:8080, not {raw!r}")
        host, _, port = default.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def read_secret(name: str) -> str:
    """Return a secret that the operator chose, empty = none. Raises SettingError for one that is easily guessed or mistyped."""
    least = WIRE.least_secret_chars
    text = read_text(name, allowed=f"at least {least} characters: letters, digits and signs, no spaces").strip()
    if text and (len(text) < least or not text.isascii() or not text.isprintable() or " " in text):
        advice = "make one with `openssl rand -hex 24`"
        refuse(name, f"must have at least {least} letters, digits or signs, without spaces: {advice}")
        return ""
    return text


def read_path(name: str) -> str:
    """Return the path of a file, "" when none is named. Raises SettingError when the variable holds a file's content."""
    path = read_text(name, allowed="the path of a file").strip()
    if path.startswith("-----BEGIN"):
        _READ[name] = replace(_READ[name], text="")  # it may be a key
        refuse(name, f"takes the path of a file: set {name}, not {name}_FILE, to that path")
        return ""
    return path


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a server that speaks TLS itself; ``set_tls_variables`` puts them where the settings read them."""
    parser.add_argument("--tls-cert", metavar="FILE", help="speak TLS with this certificate and chain (PEM), and take it anew")
    parser.add_argument("--tls-key", metavar="FILE", help="its key, where that lies in a file of its own")
    parser.add_argument("--plain-port", type=int, default=0, metavar="PORT", help=argparse.SUPPRESS)  # for ./muster up


def set_tls_variables(options: argparse.Namespace) -> None:
    for name, path in (("MUSTER_TLS_CERT", options.tls_cert), ("MUSTER_TLS_KEY", options.tls_key)):
        if path:
            os.environ[name] = path


def read_keyless(*names: str) -> Literal["refused", "near", "admitted"]:
    """Return which requests without a key a gateway lets in that listens on an address with these names.

    None; those of programs on this machine; all, where the operator names the address. Raises SettingError for an address that
    others reach and nobody named.
    """
    if read_bool(_REQUIRE_KEYS, default=True):
        return "refused"
    named = read_list(_KEYLESS_ADDRESSES)
    if set(names) & set(named):
        return "admitted"
    if not all(is_loopback(name) for name in names):
        address = names[-1]
        refuse(
            _REQUIRE_KEYS,
            f"is off: everybody would be let in without a key, and the gateway listens on {address}. Set "
            f"{_KEYLESS_ADDRESSES}={','.join([*named, address])} if that is meant, or {_REQUIRE_KEYS}=on",
        )
    return "near"


def is_loopback(host: str) -> bool:
    return host in {"localhost", "::1"} or host.startswith("127.")


def read_limits() -> Limits:
    """Return the limits of a server process: the defaults, and what variables say of those that have one."""
    chosen = Limits()
    for section in fields(chosen):
        values = getattr(chosen, section.name)
        told: dict[str, float] = {}
        for bound in list_bounds(values):
            if not bound.setting:
                continue
            if isinstance(bound.default, int):
                value: float = read_int(bound.setting, bound.default // bound.factor, minimum=int(bound.minimum))
            else:
                value = read_float(bound.setting, bound.default / bound.factor, minimum=bound.minimum)
            told[bound.name] = value * bound.factor
        chosen = replace(chosen, **{section.name: replace(values, **told)})
    return chosen


def read_networks(name: str) -> list[IPv4Network | IPv6Network]:
    try:
        return [ip_network(text) for text in read_list(name)]
    except ValueError as error:
        refuse(name, f"cannot be used: {error}; list addresses and networks such as 127.0.0.1,10.0.0.0/24")
        return []


def read_valkey(name: str) -> ValkeyAddress:
    """Return where Valkey is. Raises SettingError."""
    # The launcher imports this module before anything is installed.
    from core.valkey import DEFAULT_URL, read_address

    try:
        return read_address(read_text(name, allowed="redis://, rediss://, unix:// or sentinel://") or DEFAULT_URL)
    except ValueError as error:
        refuse(name, str(error))
        return read_address(DEFAULT_URL)


_ROLES = ("owner", "operator", "approver", "viewer", "tenant-admin:TENANT", "tenant-viewer:TENANT")
"""What a group of an issuer may be mapped to, as ``core.roles`` has them; the last two with the name of a tenant."""


def read_issuer(name: str) -> str:
    """Return the address of an issuer, empty = none. Raises SettingError."""
    url = read_text(name, allowed="https://…").strip().rstrip("/")
    parts = urlsplit(url)
    is_local = parts.scheme == "http" and parts.hostname in {"localhost", "127.0.0.1", "::1"}
    # As long as the column is in which accounts name their issuer.
    if url and not ((parts.scheme == "https" or is_local) and parts.hostname and len(url) <= 200):
        refuse(name, f"must be an https:// address of at most 200 characters, or http://localhost, not {url!r}")
        return ""
    return url


def read_roles(name: str) -> dict[str, tuple[str, ...]]:
    """Return which roles each group has: a JSON object of a role or a list of roles, or ``group=role,group=role``."""
    raw = _read_raw(name, "", f"group=role,group=role or a JSON object, with the roles {', '.join(_ROLES)}")
    pairs: list[tuple[str, str]] = []
    if raw.startswith("{"):
        try:
            told = json.loads(raw)
        except ValueError as error:
            refuse(name, f'is no JSON ({error}); write {{"group": "role"}} or group=role,group=role')
            return {}
        for group, roles in told.items():
            pairs += [(group, str(role)) for role in (roles if isinstance(roles, list) else [roles])]
    else:
        for part in filter(None, (one.strip() for one in raw.split(","))):
            group, _sign, role = part.rpartition("=")
            pairs.append((group.strip(), role.strip()))
    found: dict[str, tuple[str, ...]] = {}
    for group, role in pairs:
        if not group or not _is_role(role):
            refuse(name, f"must map a group to one of {', '.join(_ROLES)}, not {group!r} to {role!r}")
            return {}
        found[group] = (*found.get(group, ()), role)
    return found


def read_role(name: str) -> str:
    """Return the role of who has no group that is mapped, "none" for nobody. Raises SettingError."""
    role = _read_raw(name, "none", ", ".join((*_ROLES, "none"))) or "none"
    if role != "none" and not _is_role(role):
        refuse(name, f"must be one of {', '.join((*_ROLES, 'none'))}, not {role!r}")
        return "none"
    return role


def _is_role(role: str) -> bool:
    kind, colon, tenant = role.partition(":")
    return f"{kind}:TENANT" in _ROLES and tenant not in ("", "TENANT") if colon else role in _ROLES


def check_issuer(found: Issuer) -> Issuer | None:
    """Return the issuer, None when none is named. Raises SettingError for what does not go together."""
    if not found.url:
        return None
    if not found.client_id:
        refuse("MUSTER_OIDC_CLIENT_ID", "must be set where MUSTER_OIDC_ISSUER is")
    if "openid" not in found.scopes:
        refuse("MUSTER_OIDC_SCOPES", "must name openid, such as 'openid profile email groups'")
    if not found.roles and found.default_role == "none":
        refuse("MUSTER_OIDC_ROLES", "or MUSTER_OIDC_DEFAULT_ROLE must be set: nobody could come in otherwise")
    return replace(found, name=found.name or urlsplit(found.url).hostname or "")


def read_database(url: str) -> dict[str, object]:
    """Return Django's settings for ``postgresql://user:pass@host:port/name?host=/socket/dir``."""
    try:
        parts = urlsplit(url)
        port_in_url = str(parts.port) if parts.port else ""
    except ValueError as error:
        refuse("DATABASE_URL", f"cannot be used: {error}")
        return read_database("postgresql:///")
    if parts.scheme not in {"postgres", "postgresql"}:
        refuse("DATABASE_URL", "must start with postgresql://; other databases are not supported")
        return read_database("postgresql:///")
    query = dict(parse_qsl(parts.query))
    host = query.pop("host", "") or parts.hostname or ""
    port = query.pop("port", "") or port_in_url
    return {
        "ENGINE": "core.db",
        "NAME": unquote(parts.path.lstrip("/")) or "muster",
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": host,
        "PORT": port,
        "OPTIONS": {**_BOUNDS, **query},
    }
