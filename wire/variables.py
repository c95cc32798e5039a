"""Variables of the environment: where one was set, what it may be, and the names that other programs have for the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

HIDDEN = "••••••"
_SECRET = re.compile(r"(SECRET|PASSWORD|PASSPHRASE|TOKEN|_KEY)$")
_SWITCHES = frozenset({"on", "off", "true", "false", "yes", "no", "1", "0"})
_LOGIN = re.compile(r"(?<=://)[^/@\s]*@")


@dataclass(frozen=True, slots=True)
class Alias:
    """The name of another program for a variable of ours, and its option (``flag``) where it has one.

    ``read`` says its text as ours is written; an empty one says nothing, and the variable counts as not set.
    """

    theirs: str
    ours: str
    flag: str = ""
    read: Callable[[str], str] = str


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that a process read. ``text``: what holds, as one would write it.

    ``origin``: ``variable``, ``file``, ``alias``, ``option``, ``installation`` or ``default``; ``source``: the name, path or
    option that was given. ``allowed``: what it may be, in words; ``problem``: why it cannot be used, empty = it can.
    """

    name: str
    text: str
    origin: str
    source: str = ""
    default: str = ""
    allowed: str = ""
    problem: str = ""

    @property
    def subject(self) -> str:
        """What an error names: whatever was given, and what it is here."""
        match self.origin:
            case "file":
                return f"{self.name} (from {self.source}, which {self.name}_FILE names)"
            case "alias":
                return f"{self.source} (read as {self.name})"
            case "option":
                return self.source
        return self.name


def find_variable(
    name: str, environment: Mapping[str, str], aliases: Sequence[Alias] = (), *, has_file: bool = True
) -> Variable | None:
    """Return what sets a variable: it, ``NAME_FILE`` where it ``has_file``, else the first alias; None = nothing does.

    Of origin ``file`` the text is the path, for the caller to read.
    """
    value = environment.get(name)
    if value is not None:
        return Variable(name, value, "variable", name)
    if has_file and (path := environment.get(f"{name}_FILE")):
        return Variable(name, path, "file", path)
    for alias in aliases:
        if alias.ours == name and (text := alias.read(environment.get(alias.theirs, "").strip())):
            return Variable(name, text, "alias", alias.theirs)
    return None


def describe_aliases(environment: Mapping[str, str], aliases: Sequence[Alias]) -> list[str]:
    """Return a sentence for each alias that is set: what it is read as, or what wins over it."""
    lines: list[str] = []
    for alias in aliases:
        text = alias.read(environment.get(alias.theirs, "").strip())
        found = find_variable(alias.ours, environment, aliases)
        if not text or found is None:
            continue
        if found.source == alias.theirs:
            lines.append(f"{alias.theirs} is read as {alias.ours}.")
        elif found.text != text:
            winner = f"{alias.ours}_FILE" if found.origin == "file" else found.source
            lines.append(f"{winner} is set and wins over {alias.theirs}.")
    return lines


def hide_secret(name: str, text: str) -> str:
    """Return what may be shown of a variable: not what a secret is, nor the login in an address."""
    if _SECRET.search(name) and text.lower() not in _SWITCHES:
        return HIDDEN if text else ""
    return _LOGIN.sub(f"{HIDDEN}@", text)


def describe_variables(variables: Iterable[Variable]) -> list[dict[str, str]]:
    """Return variables by name for a program to read, with secrets hidden."""
    shown = sorted(variables, key=lambda variable: variable.name)
    return [{**asdict(one), "text": hide_secret(one.name, one.text)} for one in shown]


def print_variables(variables: Iterable[Variable]) -> str:
    """Return variables as a table: what holds, where it was set, its default and what it may be."""
    head = ("VARIABLE", "VALUE", "SET BY", "DEFAULT", "ALLOWED")
    rows = [
        (one["name"], one["text"] or "-", one["source"] or one["origin"], one["default"] or "-", one["allowed"] or "any text")
        for one in describe_variables(variables)
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in (head, *rows)
    )


def print_problems(problems: Sequence[str]) -> str:
    """Return what is wrong with settings as one message: all of it, a line for each."""
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} settings cannot be used:", *(f"  {problem}" for problem in problems)])


def report_variables(
    variables: Iterable[Variable], problems: Sequence[str], notes: Sequence[str], *, as_json: bool, is_check: bool
) -> str:
    """Return what a command prints of settings. ``is_check``: only what is wrong with them, or that nothing is."""
    if as_json:
        shown = [] if is_check else describe_variables(variables)
        return json.dumps({"settings": shown, "problems": problems, "notes": notes}, ensure_ascii=False, indent=2)
    parts = [] if is_check else [print_variables(variables)]
    parts += ["\n".join(notes)] if notes else []
    parts += [print_problems(problems)] if problems else ["Every setting can be used."] if is_check else []
    return "\n\n".join(parts)


RUST_LEVELS = frozenset({"trace", "debug", "info", "warn", "error"})


def read_rust_log(text: str) -> str:
    """Return the level that ``RUST_LOG`` sets for everything (``info,hyper=warn``: info); empty when it names parts alone."""
    return next((word for part in text.split(",") if (word := part.strip().lower()) in RUST_LEVELS), "")


def read_level(text: str) -> str:
    """Return a ``LOG_LEVEL`` of ModelRelay's, which may be what ``RUST_LOG`` may be."""
    return read_rust_log(text) if "=" in text or "," in text else text
