"""What a chat template may make: how large any value is, and how much all of them are together.

Every value that a template puts together is measured as it would be printed, so that a list that holds itself twice, forty
times over, is seen for what it is. All of it is charged to the rendering that runs in this thread.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from jinja2.filters import FILTERS, make_attrgetter
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace, pass_environment

from core.limits import limits
from wire import clock

_TEXT_METHODS = frozenset({
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
    "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix",
    "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith",
    "strip", "swapcase", "title", "upper",
})  # fmt: skip
_METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, _TEXT_METHODS),
    ((list, tuple), frozenset({"copy", "count", "index"})),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    ((int, float, bytes), frozenset({"is_integer"})),
)
_PLAIN_FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby", "int",
    "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "safe", "select",
    "selectattr", "sort", "title", "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
)  # fmt: skip
"""What they make is at most some times as large as what they get."""


class TemplateFailed(Exception):
    """The template does not take this conversation, or goes beyond its bounds. Says nothing of either."""


class Rendering:
    """What one rendering may still do."""

    def __init__(self) -> None:
        bounds = limits().gateway
        self._left = bounds.template_steps
        self._step_chars = bounds.template_step_chars
        self._ends_at = clock.monotonic() + bounds.template_s

    def take(self, chars: int = 0) -> None:
        """Count a step that makes so many characters. Raises TemplateFailed after the last."""
        self._left -= 1 + chars // self._step_chars
        if self._left < 0 or clock.monotonic() > self._ends_at:
            raise TemplateFailed


class _Running(threading.local):
    rendering: Rendering | None = None


running = _Running()
"""The rendering of this thread. A template is also run in part when it is compiled; then there is none, and that part fails."""


def charge(value: Any) -> Any:  # Any: a value of a template, handed on
    """Return what a template has made, once it is measured and paid for. Raises TemplateFailed."""
    size = measure(value)
    if running.rendering is None:
        raise TemplateFailed
    running.rendering.take(size)
    return value


def show(value: Any) -> Any:  # Any: a value of a template, handed on
    """Return what a template prints. Raises TemplateFailed when it is too large."""
    return value if running.rendering is None and isinstance(value, str) else charge(value)


def measure(value: object) -> int:
    """Return about how many characters a value has when it is printed. Raises TemplateFailed beyond ``template_chars``.

    What a value holds several times is looked through once and counted each time.
    """
    most = limits().gateway.template_chars
    size = _weigh(value)
    waiting: list[tuple[object, int, Iterator[object]]] = [(value, size, _list_parts(value))]
    known: dict[int, tuple[object, int]] = {}  # with the values themselves, so that no other can get their identity
    while waiting and size <= most:
        whole, before, parts = waiting[-1]
        part = next(parts, waiting)
        if part is waiting:
            waiting.pop()
            known[id(whole)] = whole, size - before
            continue
        size += _weigh(part) + 2
        if not isinstance(part, list | tuple | Mapping):
            continue
        if id(part) in known:
            size += known[id(part)][1]
        else:
            known[id(part)] = part, most + 1  # until all of it is seen: what holds itself has no end
            waiting.append((part, size, _list_parts(part)))
    if size > most:
        raise TemplateFailed
    return size


def _weigh(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Namespace) or (isinstance(value, int) and abs(value) > 2**63):
        raise TemplateFailed  # a namespace prints all that it holds
    return 2


def _list_parts(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        return chain.from_iterable(value.items())
    return iter(value) if isinstance(value, list | tuple) else iter(())


def is_known_method(owner: object, name: str) -> bool:
    """Return whether a template may use an attribute of a value: of texts, lists and numbers a few methods only."""
    for kinds, names in _METHODS:
        if isinstance(owner, kinds):
            return name in names
    return True


def call_method(owner: str, name: str, arguments: tuple[Any, ...]) -> None:  # Any: values of a template
    """Find out before a method of a text is called whether it makes too much. Raises TemplateFailed."""
    if name == "replace" and len(arguments) >= 2:
        _check_replaced(owner, str(arguments[0]), str(arguments[1]))
    elif name == "join" and arguments and isinstance(arguments[0], Collection):
        _check_joined(owner, (str(part) for part in arguments[0]))
    elif name == "join":
        raise TemplateFailed  # of what is not there yet, nothing can be said


def make_filters() -> dict[str, Callable[..., Any]]:  # Any: values of a template
    """Return the filters that a template may use, each of which pays for what it makes."""
    plain = {name: _charged(FILTERS[name]) for name in _PLAIN_FILTERS}
    own: Mapping[str, Callable[..., Any]] = {
        "join": _join,
        "replace": _replace,
        "round": _round,
        "string": _to_text,
        "sum": _sum,
        "tojson": _to_json,
    }
    return {**plain, **{name: _charged(own[name]) for name in own}}


def _charged(function: Callable[..., Any]) -> Callable[..., Any]:  # Any: values of a template
    def charged(*arguments: Any, **options: Any) -> Any:
        if running.rendering is None:
            raise TemplateFailed
        running.rendering.take()
        return charge(function(*arguments, **options))

    mark = "jinja_pass_arg"
    if hasattr(function, mark):  # what the engine hands over beside the value
        setattr(charged, mark, getattr(function, mark))
    return charged


def _replace(text: object, old: object, new: object, count: int | None = None) -> str:
    measure(text)
    whole, before, after = str(text), str(old), str(new)
    _check_replaced(whole, before, after)
    return whole.replace(before, after, -1 if count is None else count)


def _check_replaced(text: str, old: str, new: str) -> None:
    found = text.count(old)
    if len(text) + found * max(0, len(new) - len(old)) > limits().gateway.template_chars:
        raise TemplateFailed


@pass_environment
def _join(environment: SandboxedEnvironment, parts: Iterable[Any], between: object = "", attribute: Any = None) -> str:
    """``join`` of jinja2. Any: values of a template."""
    found = parts if attribute is None else map(make_attrgetter(environment, attribute), parts)
    texts: list[str] = []
    separator, size, most = str(between), 0, limits().gateway.template_chars
    for part in found:
        size += measure(part) + len(separator)
        if size > most:
            raise TemplateFailed
        texts.append(str(part))
    return separator.join(texts)


def _check_joined(between: str, parts: Iterable[str]) -> None:
    size, most = 0, limits().gateway.template_chars
    for part in parts:
        size += len(part) + len(between)
        if size > most:
            raise TemplateFailed


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:  # Any: values of a template
    if not isinstance(precision, int) or abs(precision) > limits().gateway.template_digits:
        raise TemplateFailed
    return FILTERS["round"](value, precision, method)


def _to_text(value: object) -> str:
    measure(value)
    return str(value)


@pass_environment
def _sum(environment: SandboxedEnvironment, values: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """``sum`` of jinja2, of numbers alone. Any: values of a template."""
    numbers = values if attribute is None else map(make_attrgetter(environment, attribute), values)
    total = start
    for number in numbers:
        if not (isinstance(total, int | float) and isinstance(number, int | float)):
            raise TemplateFailed
        total += number
    return total


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``tojson`` as Hugging Face has it."""
    if separators is not None and any(len(part) > limits().gateway.template_separator_chars for part in separators):
        raise TemplateFailed
    indent = min(indent, limits().gateway.template_indent) if indent is not None else None
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    pieces: list[str] = []
    size, most = 0, limits().gateway.template_chars
    for piece in encoder.iterencode(value):
        size += len(piece)
        if size > most:
            raise TemplateFailed
        pieces.append(piece)
    return "".join(pieces)
