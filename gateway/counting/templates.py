"""Chat templates of models, rendered as Hugging Face does it, in jinja2's sandbox and within bounds of time and size.

A template comes from whoever made the model. The sandbox keeps it from our objects; what it lacks is added here: every
round of a loop, every call and every value that is put together is counted, timed and measured before it can grow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from core.limits import limits
from gateway.counting.bounds import (
    Rendering,
    TemplateFailed,
    call_method,
    charge,
    is_known_method,
    make_filters,
    measure,
    running,
    show,
)
from gateway.counting.values import ChatPrompt
from wire import clock

_GLOBALS = ("range", "dict", "namespace")

__all__ = ["ChatTemplate", "TemplateFailed"]


class ChatTemplate:
    """A compiled template. Raises ValueError when ``source`` is none."""

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        if len(source) > limits().gateway.template_source_chars:
            raise ValueError(f"the chat template has more than {limits().gateway.template_source_chars} characters")
        environment = _make_environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(_Bounds(environment).visit(tree))
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            raise ValueError(f"the chat template cannot be read ({type(error).__name__})") from None
        self._specials = dict(specials)

    def render(self, prompt: ChatPrompt) -> str:
        """Return the text that the model would read. Raises TemplateFailed."""
        values = {
            **prompt.variables,
            **self._specials,
            "messages": prompt.messages,
            "tools": prompt.tools,
            "documents": None,
            "add_generation_prompt": True,
        }
        running.rendering = Rendering()
        try:
            pieces, length = [], 0
            for piece in self._template.generate(values):
                length += len(piece)
                if length > limits().gateway.template_chars:
                    raise TemplateFailed
                pieces.append(piece)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError):
            raise TemplateFailed from None
        finally:
            running.rendering = None
        return "".join(pieces)


class _Bounds(NodeTransformer):
    """Puts a step into every loop and macro, and ``charge`` around every value that is put together.

    Both are methods of the environment: a template, which can give any name another meaning, does not reach them.
    """

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

    def visit_Output(self, node: nodes.Output, *args: Any, **kwargs: Any) -> list[nodes.Node]:  # noqa: N802  # by jinja2
        """Charge the text that stands in the template. Any: as the base class has it."""
        written = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        written += sum(len(const.value) for const in node.find_all(nodes.Const) if isinstance(const.value, str))
        self.generic_visit(node, *args, **kwargs)
        return [self._make_step(node, written), node]

    def visit_Concat(self, node: nodes.Concat, *args: Any, **kwargs: Any) -> nodes.Call:  # noqa: N802  # named by jinja2
        """Measure what is made text of, and the text. Any: as the base class has it."""
        self.generic_visit(node, *args, **kwargs)
        node.nodes = [self._make_call("measured", [part], node) for part in node.nodes]
        return self._make_call("charged", [node], node)

    def visit_Getitem(self, node: nodes.Getitem, *args: Any, **kwargs: Any) -> nodes.Expr:  # noqa: N802  # named by jinja2
        """Charge a slice. Any: as the base class has it."""
        self.generic_visit(node, *args, **kwargs)
        return self._make_call("charged", [node], node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List, *args: Any, **kwargs: Any) -> nodes.Call:  # noqa: N802  # named by jinja2
        """Charge it. Any: as the base class has it."""
        self.generic_visit(node, *args, **kwargs)
        return self._make_call("charged", [node], node)

    def visit_Dict(self, node: nodes.Dict, *args: Any, **kwargs: Any) -> nodes.Call:  # noqa: N802  # named by jinja2
        """Charge it. Any: as the base class has it."""
        self.generic_visit(node, *args, **kwargs)
        return self._make_call("charged", [node], node)

    def visit_Tuple(self, node: nodes.Tuple, *args: Any, **kwargs: Any) -> nodes.Expr:  # noqa: N802  # named by jinja2
        """Charge it, unless it stands for names that are set. Any: as the base class has it."""
        self.generic_visit(node, *args, **kwargs)
        return self._make_call("charged", [node], node) if node.ctx == "load" else node

    def _make_step(self, beside: nodes.Node, chars: int = 0) -> nodes.Node:
        call = self._make_call("step", [nodes.Const(chars)], beside)
        return nodes.ExprStmt(call, lineno=beside.lineno).set_environment(self._environment)

    def _make_call(self, name: str, arguments: list[nodes.Expr], beside: nodes.Node) -> nodes.Call:
        callee = nodes.EnvironmentAttribute(name, lineno=beside.lineno)
        call = nodes.Call(callee, arguments, [], None, None, lineno=beside.lineno)
        call.set_environment(self._environment)
        return call


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses what makes much out of little."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    @staticmethod
    def step(chars: int) -> None:
        """Count a step of the rendering. Raises TemplateFailed."""
        if running.rendering is not None:
            running.rendering.take(chars)

    @staticmethod
    def charged(value: Any) -> Any:
        """Return a value that was put together. Raises TemplateFailed. Any: a value of a template."""
        return charge(value)

    @staticmethod
    def measured(value: Any) -> Any:
        """Return a value of which text is made. Raises TemplateFailed. Any: a value of a template."""
        measure(value)
        return value

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template may call. Any: values of a template."""
        if function in (self.step, self.charged, self.measured):
            return function(*args)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            call_method(owner, getattr(function, "__name__", ""), args)
        made = super().call(context, function, *args, **kwargs)
        return charge(made) if isinstance(made, str | list | tuple | dict) else made

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Calculate with numbers; of texts and lists, only put two together. Any: values of a template."""
        if operator == "**" or (operator != "+" and not (_is_number(left) and _is_number(right))):
            raise SecurityError(operator)
        return charge(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Keep methods away that make any amount of anything. Any: values of a template."""
        return is_known_method(obj, attr) and super().is_safe_attribute(obj, attr, value)

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
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation], finalize=show
    )
    environment.filters = make_filters()
    environment.globals = {name: environment.globals[name] for name in _GLOBALS}
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: clock.now().astimezone().strftime(layout)
    return environment


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _raise(message: object) -> None:
    del message  # may quote the conversation
    raise _Said
