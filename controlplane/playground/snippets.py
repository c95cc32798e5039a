"""A question as code that anybody can run: curl, and the official SDKs for Python and Node. Pure.

The key is never in it: every program reads ``MUSTER_API_KEY`` from its environment.
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.playground.asks import Ask, Image, Json, SurfaceName, build_body
from controlplane.playground.literals import (
    JAVASCRIPT,
    JSON,
    PYTHON,
    ImageText,
    expanding_json,
    print_literal,
)

ANTHROPIC_VERSION = "2023-06-01"
_ANTHROPIC_EXTRAS = ("temperature", "x_pool_options")
_OPENAI_EXTRAS = ("x_pool_options",)


@dataclass(frozen=True, slots=True)
class Code:
    """One question three times. Each is a whole program."""

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
    body = build_body(ask, _mark_image)
    return Code(
        curl=_write_curl(ask, body, base_url),
        python=_write_python(ask, body, base_url),
        node=_write_node(ask, body, base_url),
    )


def _mark_image(prefix: str, image: Image) -> object:
    del image
    return ImageText(prefix)


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
