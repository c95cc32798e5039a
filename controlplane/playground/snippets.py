"""A question as code that anybody can run: curl, and the official SDKs for Python and Node. Pure.

The key is never in it: every program reads ``MUSTER_API_KEY`` from its environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from controlplane.playground.asks import Ask, Json, SurfaceName, build_body

WIDTH = 80
_IDENTIFIER = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*\Z")
# Letters that hide, turn round what stands beside them, end a line, or tell a terminal to do something.
_DECEIVING = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]",
)


@dataclass(frozen=True, slots=True)
class ImageText:
    """A text whose end is the base64 of a picture, which the printed code reads from a file when it runs."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Notation:
    """How a language writes a value. ``write_image`` takes what stands in front of the base64."""

    write_text: Callable[[str], str]
    write_key: Callable[[str], str]
    write_image: Callable[[str], str]
    true: str = "true"
    false: str = "false"
    null: str = "null"
    indent: str = "  "
    is_padded: bool = False
    """Whether braces on one line stand apart from what they hold."""
    trailing_comma: str = ""


def quote_json(text: str) -> str:
    """Return a JSON string, which Python and JavaScript read as the same text."""
    return _DECEIVING.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def _write_javascript_key(key: str) -> str:
    if key == "__proto__":  # anything but a computed key would set the prototype
        return f"[{quote_json(key)}]"
    return key if _IDENTIFIER.match(key) else quote_json(key)


def _escape_here_document(text: str) -> str:
    """Keep a shell from reading ``text`` inside a here-document that it expands."""
    return re.sub(r"([\\$`])", r"\\\1", text)


PYTHON = Notation(
    write_text=quote_json,
    write_key=quote_json,
    write_image=lambda prefix: f'f"{prefix}{{image}}"' if prefix else "image",
    true="True",
    false="False",
    null="None",
    indent="    ",
    trailing_comma=",",
)
JAVASCRIPT = Notation(
    write_text=quote_json,
    write_key=_write_javascript_key,
    write_image=lambda prefix: f"`{prefix}${{image}}`" if prefix else "image",
    is_padded=True,
    trailing_comma=",",
)
JSON = Notation(write_text=quote_json, write_key=quote_json, write_image=quote_json)


def expanding_json(image_name: str) -> Notation:
    """Return JSON for a here-document in which the shell puts the base64 of a file, and changes nothing else."""

    def write(text: str) -> str:
        return _escape_here_document(quote_json(text))

    def write_image(prefix: str) -> str:
        return f'"{prefix}$(base64 < {image_name} | tr -d "\\n")"'

    return Notation(write_text=write, write_key=write, write_image=write_image)


def print_literal(value: object, notation: Notation, *, depth: int = 0, used: int = 0) -> str:
    """Return ``value`` on one line when it fits, else one member to a line. ``used``: columns in front of it."""
    line = _print_line(value, notation)
    if not (isinstance(value, Mapping | list) and value) or len(line) + used + depth * len(notation.indent) <= WIDTH:
        return line
    inner = notation.indent * (depth + 1)
    if isinstance(value, Mapping):
        keys = [f"{notation.write_key(key)}: " for key in value]
        members = [
            key + print_literal(member, notation, depth=depth + 1, used=len(key) + 1)
            for key, member in zip(keys, value.values(), strict=True)
        ]
    else:
        members = [print_literal(member, notation, depth=depth + 1, used=1) for member in value]
    opening, closing = "{}" if isinstance(value, Mapping) else "[]"
    body = f",\n{inner}".join(members)
    return f"{opening}\n{inner}{body}{notation.trailing_comma}\n{notation.indent * depth}{closing}"


def _print_line(value: object, notation: Notation) -> str:
    match value:
        case None:
            return notation.null
        case bool():
            return notation.true if value else notation.false
        case str():
            return notation.write_text(value)
        case ImageText(prefix):
            return notation.write_image(prefix)
        case Mapping():
            members = (f"{notation.write_key(key)}: {_print_line(member, notation)}" for key, member in value.items())
            return _enclose("{", ", ".join(members), "}", is_padded=notation.is_padded)
        case Sequence():
            return _enclose("[", ", ".join(_print_line(member, notation) for member in value), "]")
        case _:
            return json.dumps(value)


def _enclose(opening: str, inside: str, closing: str, *, is_padded: bool = False) -> str:
    pad = " " if is_padded and inside else ""
    return f"{opening}{pad}{inside}{pad}{closing}"


ANTHROPIC_VERSION = "2023-06-01"
_ANTHROPIC_EXTRAS = ("temperature", "x_pool_options")
_OPENAI_EXTRAS = ("x_pool_options",)


@dataclass(frozen=True, slots=True)
class Code:
    curl: str
    python: str
    node: str


@dataclass(frozen=True, slots=True)
class _Calls:
    """How a surface is called and its answer is read, in both SDKs: what is the same in both, and lines of a loop over events.

    ``…_tools``: further lines of it when tools were given.
    """

    method: str
    whole: str
    python_events: tuple[str, ...] = ()
    node_events: tuple[str, ...] = ()
    python_tools: tuple[str, ...] = ()
    node_tools: tuple[str, ...] = ()


_CALLS = {
    SurfaceName.CHAT: _Calls(
        method="chat.completions.create",
        whole="answer.choices[0].message",
        python_events=(
            "for choice in event.choices:",
            '    print(choice.delta.content or "", end="", flush=True)',
        ),
        python_tools=(
            "    for call in choice.delta.tool_calls or []:",
            '        print(call.function.name or "", call.function.arguments or "", sep="", end="", flush=True)',
        ),
        node_events=('process.stdout.write(event.choices[0]?.delta?.content ?? "");',),
        node_tools=(
            "for (const call of event.choices[0]?.delta?.tool_calls ?? []) {",
            '  process.stdout.write(`${call.function?.name ?? ""}${call.function?.arguments ?? ""}`);',
            "}",
        ),
    ),
    SurfaceName.MESSAGES: _Calls(
        method="messages.create",
        whole="answer.content",
        python_events=(
            'if event.type == "content_block_delta" and event.delta.type == "text_delta":',
            '    print(event.delta.text, end="", flush=True)',
        ),
        python_tools=(
            'elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":',
            '    print(event.delta.partial_json, end="", flush=True)',
        ),
        node_events=(
            'if (event.type === "content_block_delta" && event.delta.type === "text_delta") {',
            "  process.stdout.write(event.delta.text);",
            "}",
        ),
        node_tools=(
            'if (event.type === "content_block_delta" && event.delta.type === "input_json_delta") {',
            "  process.stdout.write(event.delta.partial_json);",
            "}",
        ),
    ),
    SurfaceName.RESPONSES: _Calls(
        method="responses.create",
        whole="answer.output",
        python_events=(
            'if event.type == "response.output_text.delta":',
            '    print(event.delta, end="", flush=True)',
        ),
        python_tools=(
            'elif event.type == "response.function_call_arguments.delta":',
            '    print(event.delta, end="", flush=True)',
        ),
        node_events=(
            'if (event.type === "response.output_text.delta") {',
            "  process.stdout.write(event.delta);",
            "}",
        ),
        node_tools=(
            'if (event.type === "response.function_call_arguments.delta") {',
            "  process.stdout.write(event.delta);",
            "}",
        ),
    ),
    SurfaceName.COMPLETIONS: _Calls(
        method="completions.create",
        whole="answer.choices[0].text",
        python_events=("for choice in event.choices:", '    print(choice.text, end="", flush=True)'),
        node_events=('process.stdout.write(event.choices[0]?.text ?? "");',),
    ),
    SurfaceName.EMBEDDINGS: _Calls(
        method="embeddings.create",
        whole="answer.data[0].embedding",
    ),
}


def write_code(ask: Ask, *, base_url: str) -> Code:
    """Return the question as programs that ask the gateway at ``base_url`` (no slash at its end)."""
    body = build_body(ask, lambda prefix, _image: ImageText(prefix))
    return Code(
        curl=_write_curl(ask, body, base_url),
        python=_write_python(ask, body, base_url),
        node=_write_node(ask, body, base_url),
    )


def _write_curl(ask: Ask, body: Json, base_url: str) -> str:
    is_messages = ask.surface.name is SurfaceName.MESSAGES
    headers = (
        ['-H "x-api-key: $MUSTER_API_KEY"', f'-H "anthropic-version: {ANTHROPIC_VERSION}"']
        if is_messages
        else ['-H "Authorization: Bearer $MUSTER_API_KEY"']
    )
    # A quoted word keeps the shell's hands off the body; a picture needs them.
    notation, word = (JSON, "'JSON'") if ask.image is None else (expanding_json(ask.image.name), "JSON")
    no_buffer = "-N " if ask.is_streaming else ""
    lines = [
        f"curl {no_buffer}{base_url}{ask.surface.path}",
        *headers,
        '-H "Content-Type: application/json"',
        f"--data-binary @- <<{word}",
    ]
    return " \\\n  ".join(lines) + f"\n{print_literal(body, notation)}\nJSON\n"


def _write_python(ask: Ask, body: Json, base_url: str) -> str:
    is_messages = ask.surface.name is SurfaceName.MESSAGES
    package, client = ("anthropic", "Anthropic") if is_messages else ("openai", "OpenAI")
    url = base_url if is_messages else f"{base_url}/v1"
    calls = _CALLS[ask.surface.name]
    arguments = _set_extras_apart(body, _ANTHROPIC_EXTRAS if is_messages else _OPENAI_EXTRAS)
    printed = [f"    {name}={print_literal(value, PYTHON, depth=1, used=len(name) + 2)}," for name, value in arguments.items()]
    lines = ["import os", f"from {package} import {client}", ""]
    if ask.image is not None:
        lines[0:1] = ["import base64", "import os", "from pathlib import Path"]
    lines.insert(-2, "")
    lines.append(f'client = {client}(base_url="{url}", api_key=os.environ["MUSTER_API_KEY"])')
    if ask.image is not None:
        lines.append(f'image = base64.b64encode(Path("{ask.image.name}").read_bytes()).decode()')
    lines += [f"{'events' if ask.is_streaming else 'answer'} = client.{calls.method}(", *printed, ")"]
    if ask.is_streaming:
        loop = [*calls.python_events, *(calls.python_tools if ask.tools else ())]
        lines += ["for event in events:", *(f"    {line}" for line in loop)]
    else:
        lines.append(f"print({calls.whole})")
    return "\n".join(lines) + "\n"


def _write_node(ask: Ask, body: Json, base_url: str) -> str:
    is_messages = ask.surface.name is SurfaceName.MESSAGES
    package, client = ("@anthropic-ai/sdk", "Anthropic") if is_messages else ("openai", "OpenAI")
    url = base_url if is_messages else f"{base_url}/v1"
    calls = _CALLS[ask.surface.name]
    lines = [f'import {client} from "{package}";', ""]
    if ask.image is not None:
        lines.insert(0, 'import { readFile } from "node:fs/promises";')
    lines.append(f'const client = new {client}({{ baseURL: "{url}", apiKey: process.env.MUSTER_API_KEY }});')
    if ask.image is not None:
        lines.append(f'const image = await readFile("{ask.image.name}", "base64");')
    name = "events" if ask.is_streaming else "answer"
    call = f"const {name} = await client.{calls.method}("
    lines.append(f"{call}{print_literal(body, JAVASCRIPT, used=len(call) + 2)});")
    if ask.is_streaming:
        loop = [*calls.node_events, *(calls.node_tools if ask.tools else ())]
        lines += ["for await (const event of events) {", *(f"  {line}" for line in loop), "}"]
    else:
        lines.append(f"console.log({calls.whole});")
    return "\n".join(lines) + "\n"


def _set_extras_apart(body: Json, extras: tuple[str, ...]) -> Json:
    """Return the arguments of the Python SDK: what it does not know by name goes into ``extra_body``."""
    known = {name: value for name, value in body.items() if name not in extras}
    others = {name: body[name] for name in extras if name in body}
    return {**known, "extra_body": others} if others else known
