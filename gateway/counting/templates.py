"""Chat templates of models, rendered as Hugging Face does it, in jinja2's sandbox and within bounds of time and size.

A template comes from whoever made the model. The sandbox keeps it from our objects; what it lacks is added here: every
round of a loop and every call of a macro is a step, steps are counted and timed, and no text may grow beyond a limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from gateway.counting.values import ChatPrompt

MAX_TEMPLATE_CHARS = 1024 * 1024
MAX_TEXT_CHARS = 2_000_000
"""Of a prompt, and of anything on the way to it: what is longer takes too much memory to count."""
MAX_STEPS = 200_000
RENDER_S = 2.0
_MAX_NUMBER = 2**63
_STEP, _BOUND = "muster_step", "muster_bound"
_PADDING_METHODS = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"})
_PADDING_FILTERS = ("center", "format", "indent", "wordwrap")


class TemplateFailed(Exception):
    """The template does not take this conversation, or goes beyond its bounds. Says nothing of either."""


class ChatTemplate:
    """A compiled template. Raises ValueError when ``source`` is none."""

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ValueError(f"the chat template has more than {MAX_TEMPLATE_CHARS} characters")
        environment = _make_environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(_Bounds(environment).visit(tree))
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            raise ValueError(f"the chat template cannot be read ({type(error).__name__})") from None
        self._specials = dict(specials)

    def render(self, prompt: ChatPrompt) -> str:
        """Return the text that the model would read. Raises TemplateFailed."""
        steps = _Steps()
        values = {
            **prompt.variables,
            **self._specials,
            "messages": prompt.messages,
            "tools": prompt.tools,
            "documents": None,
            "add_generation_prompt": True,
            _STEP: steps.take,
            _BOUND: _bound,
        }
        try:
            pieces, length = [], 0
            for piece in self._template.generate(values):
                length += len(piece)
                if length > MAX_TEXT_CHARS:
                    raise TemplateFailed
                pieces.append(piece)
                steps.take()
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError):
            raise TemplateFailed from None
        return "".join(pieces)


class _Steps:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self._left = MAX_STEPS
        self._ends_at = time.monotonic() + RENDER_S

    def take(self) -> None:
        """Count a step. Raises TemplateFailed after the last."""
        self._left -= 1
        if self._left < 0 or time.monotonic() > self._ends_at:
            raise TemplateFailed


class _Bounds(NodeTransformer):
    """Puts a step into every loop and macro, and a look at its length around every text that is put together."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For, *args: Any, **kwargs: Any) -> nodes.For:  # noqa: N802  # named by jinja2
        """Add the step. Any: as the base class has it."""
        self.generic_visit(node, *args, **kwargs)
        node.body.insert(0, self._make_step(node))
        return node

    def visit_Macro(self, node: nodes.Macro, *args: Any, **kwargs: Any) -> nodes.Macro:  # noqa: N802  # named by jinja2
        """Add the step. Any: as the base class has it."""
        self.generic_visit(node, *args, **kwargs)
        node.body.insert(0, self._make_step(node))
        return node

    def visit_Concat(self, node: nodes.Concat, *args: Any, **kwargs: Any) -> nodes.Call:  # noqa: N802  # named by jinja2
        """Hand the text on through the bound. Any: as the base class has it."""
        self.generic_visit(node, *args, **kwargs)
        return self._make_call(_BOUND, [node], node)

    def _make_step(self, beside: nodes.Node) -> nodes.Node:
        statement = nodes.ExprStmt(self._make_call(_STEP, [], beside), lineno=beside.lineno)
        return statement.set_environment(self._environment)

    def _make_call(self, name: str, arguments: list[nodes.Expr], beside: nodes.Node) -> nodes.Call:
        callee = nodes.Name(name, "load", lineno=beside.lineno)
        call = nodes.Call(callee, arguments, [], None, None, lineno=beside.lineno)
        call.set_environment(self._environment)
        return call


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses what makes much out of little."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Calculate with numbers; of texts and lists, only put two together. Any: values of a template."""
        if operator == "**" or (operator != "+" and not (_is_number(left) and _is_number(right))):
            raise SecurityError(operator)
        return _bound(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Keep methods away that fill a text up to any length. Any: values of a template."""
        return attr not in _PADDING_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Leave ``str.format`` to ``is_safe_attribute``. Any: values of a template."""
        del value
        return None


class _Generation(Extension):
    """``{% generation %}``, by which templates mark what an assistant said; it prints what is in it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Said(jinja2.TemplateError):
    """The template called ``raise_exception``."""


def _make_environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    for name in _PADDING_FILTERS:
        del environment.filters[name]
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: datetime.now().astimezone().strftime(layout)
    return environment


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _bound(value: Any) -> Any:  # Any: a value of a template, handed on
    if isinstance(value, str | list | tuple):
        is_large = len(value) > MAX_TEXT_CHARS
    else:
        is_large = isinstance(value, int) and abs(value) > _MAX_NUMBER
    if is_large:
        raise TemplateFailed
    return value


def _raise(message: object) -> None:
    del message  # may quote the conversation
    raise _Said


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    indent = min(indent, 8) if indent is not None else None
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
