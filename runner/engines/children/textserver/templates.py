"""The chat template of a model folder, rendered in jinja2's sandbox as Hugging Face does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runner.engines.children.textserver.fields import ChatFields
from runner.engines.children.web import Refusal
from wire import clock


def read_template(folder: Path) -> str | None:
    """Return the template of a model: ``chat_template.jinja``, else that of ``tokenizer_config.json``; None = it has none."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    settings = read_json(folder / "tokenizer_config.json")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def read_json(path: Path) -> dict[str, Any]:  # Any: JSON
    """Return the object in a file, an empty one when there is no such file. Raises ValueError for anything else in it."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} does not hold a JSON object")  # noqa: TRY004  # a file's content, not an argument
    return found


def special_tokens(words: dict[str, Any]) -> dict[str, str]:  # Any: JSON
    """Return the special tokens that chat templates name; an entry may be a text or an object with ``content``."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = words.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


class ChatTemplate:
    """A compiled template; ``enable_thinking`` holds where a request does not say. Raises ValueError for what is none."""

    def __init__(self, source: str, specials: dict[str, str], enable_thinking: bool | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda layout: clock.now().astimezone().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template cannot be read, line {error.lineno}") from None
        self._specials = specials
        self._defaults = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._takes_tools = "tools" in source

    def render(self, fields: ChatFields) -> str:
        """Return the prompt of a conversation. Raises Refusal when the template does not accept it."""
        tools = fields.tools if fields.tool_choice != "none" else None
        if tools and not self._takes_tools:
            raise Refusal("the chat template of this model takes no tools", param="tools", code="unsupported_parameter")
        values = {**self._defaults, **(fields.chat_template_kwargs or {}), **self._specials}
        try:
            return self._template.render(values, messages=fields.messages, tools=tools, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            # What the template says itself is meant for the client; anything else could quote the conversation.
            words = f": {error}" if isinstance(error, _Said) else ""
            raise Refusal(f"the chat template does not accept these messages{words}", param="messages") from None


class _Said(jinja2.TemplateError):
    """The template called ``raise_exception``."""


def _raise(message: object) -> None:
    raise _Said(str(message)[:300])


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
