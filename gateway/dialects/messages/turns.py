"""The turns of a conversation as chat messages: one system message first, then user and assistant in turn.

Chat templates are strict where the Messages API is not: a system message after the first turn, two user turns in a row and
results of tools among other content make them fail. So what the user's side says between two answers becomes the results
of tools, in order, and then one user message.
"""

from __future__ import annotations

from gateway.dialects.messages.blocks import (
    SEPARATOR,
    Part,
    describe_call,
    join_parts,
    make_text,
    read_content,
    render_block,
    require_text,
)
from gateway.dialects.messages.schema import Block, LeftOut, Message, is_absent
from gateway.errors import BadRequest

ChatMessage = dict[str, object]

_BILLING_HEADER = "x-anthropic-billing-header:"
"""Claude Code's first block of ``system``: of no meaning to a model, and new each time, so no prefix would be found cached."""
_SYSTEM_ROLES = frozenset({"system", "developer"})
_REMINDER = "<system-reminder>"
"""How Claude Code marks, within a user turn, what the user did not write."""
_UNTIL_NEXT_USER = "next_user_message"
_SILENT_BLOCKS = frozenset({"fallback"})
"""Not shown to a model by its own API either."""


class Turns:
    """Collects messages. ``ignored`` gets the names of what is left out."""

    def __init__(self, ignored: LeftOut) -> None:
        self._ignored = ignored
        self._system: list[str] = []
        self._messages: list[ChatMessage] = []
        self._said: list[Part] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[object] = []
        self._has_begun = False

    def finish(self) -> list[ChatMessage]:
        """Return the chat messages."""
        self._flush_answer()
        self._flush_user()
        system: list[ChatMessage] = []
        if self._system:
            system = [{"role": "system", "content": SEPARATOR.join(self._system)}]
        return system + self._messages

    def add_system(self, blocks: list[Block], path: str) -> None:
        """Take the ``system`` field."""
        for number, block in enumerate(blocks):
            if block.type != "text":
                raise BadRequest("The field 'system' may have blocks of text only.", param=f"{path}[{number}].type")
            text = require_text(block.text, f"{path}[{number}].text")
            if text.startswith(_BILLING_HEADER):
                text = text.partition("\n")[2]
            if text:
                self._system.append(text)

    def add_all(self, messages: list[Message]) -> None:
        """Take the ``messages`` field. Raises BadRequest."""
        last_user = max((number for number, message in enumerate(messages) if message.role == "user"), default=-1)
        for number, message in enumerate(messages):
            path = f"messages[{number}]"
            blocks = message.content
            if isinstance(blocks, str):
                blocks = [Block(type="text", text=blocks)]
            if message.role in _SYSTEM_ROLES:
                if message.clear_at != _UNTIL_NEXT_USER or number > last_user:
                    self._add_reminder(message, blocks or [], path)
                continue
            self._has_begun = True
            if blocks is None:
                raise BadRequest(f"The field '{path}.content' is required.", param=f"{path}.content")
            if message.role == "user":
                self._add_user(blocks, path)
            elif message.role == "assistant":
                self._add_assistant(blocks, path)
            else:
                raise BadRequest("The role of a message must be 'user', 'assistant' or 'system'.", param=f"{path}.role")

    def _add_reminder(self, message: Message, blocks: list[Block], path: str) -> None:
        """A system message: part of the first one while nobody has spoken, later a marked part of the user's turn."""
        if not is_absent(message.output_config):
            self._ignored.note("messages.output_config")
        texts = [block for block in blocks if block.type not in {"tool_addition", "tool_removal"}]
        if not self._has_begun:
            self.add_system(texts, f"{path}.content")
            return
        self._flush_answer()
        for number, block in enumerate(texts):
            text = require_text(block.text, f"{path}.content[{number}].text")
            if text:
                is_marked = text.lstrip().startswith(_REMINDER)
                self._said.append(make_text(text if is_marked else f"{_REMINDER}\n{text}\n</system-reminder>"))

    def _add_user(self, blocks: list[Block], path: str) -> None:
        self._flush_answer()
        seen: list[Part] = []
        said: list[Part] = []
        for number, block in enumerate(blocks):
            inner = f"{path}.content[{number}]"
            if block.type == "tool_result":
                seen += self._add_result(block, inner)
            else:
                said += render_block(block, inner)
        if not said and all(block.type != "tool_result" for block in blocks):
            said.append(make_text(""))  # somebody has to be there to answer
        self._said += seen + said

    def _add_result(self, block: Block, path: str) -> list[Part]:
        """Add what a tool returned, and return what of it only a user message can hold."""
        call = require_text(block.tool_use_id, f"{path}.tool_use_id")
        told: list[Part] = []
        shown: list[Part] = []
        for number, item in enumerate(read_content(block.content, f"{path}.content")):
            for part in render_block(item, f"{path}.content[{number}]"):
                (told if part["type"] == "text" else shown).append(part)
        if shown:
            told.append(make_text(f"[{len(shown)} attached in the next user message]"))
            shown.insert(0, make_text(f"Attached to the result of tool call {call}:"))
        text = str(join_parts(told))
        if block.is_error:
            text = f"The tool call failed:\n{text}" if text else "The tool call failed."
        self._messages.append({"role": "tool", "tool_call_id": call, "content": text})
        return shown

    def _add_assistant(self, blocks: list[Block], path: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[object] = []
        for number, block in enumerate(blocks):
            inner = f"{path}.content[{number}]"
            match block.type:
                case "text":
                    texts.append(require_text(block.text, f"{inner}.text"))
                case "thinking":
                    thoughts.append(block.thinking or "")
                case "tool_use":
                    calls.append(_make_call(block, inner))
                case _:
                    texts += self._tell_of_server(block, inner)
        self._append_answer("".join(texts), "".join(thoughts), calls)

    def _tell_of_server(self, block: Block, path: str) -> list[str]:
        """Return as text what a server did within an answer. A conversation that began elsewhere must go on here."""
        match block.type:
            case "server_tool_use" | "mcp_tool_use":
                parts = [describe_call(block, f"{path}.input")]
            case "compaction" | "search_result":
                parts = render_block(block, path)
            case kind if kind.endswith("_tool_result"):
                parts = render_block(block, path)
            case kind:
                if kind not in _SILENT_BLOCKS:
                    self._ignored.note(f"messages.{kind}")
                return []
        return [f"{part['text']}\n" for part in parts]

    def _append_answer(self, text: str, thought: str, calls: list[object]) -> None:
        if not (text or thought or calls):
            return
        self._flush_user()
        if self._calls:
            self._flush_answer()  # calls end a message
        if text:
            self._texts.append(text)
        self._thoughts.append(thought)
        self._calls += calls

    def _flush_answer(self) -> None:
        """Write down what the assistant said, over one message or several in a row."""
        thought = "".join(self._thoughts)
        if not (self._texts or thought or self._calls):
            return
        message: ChatMessage = {"role": "assistant", "content": SEPARATOR.join(self._texts)}
        if thought:
            # Engines read one name or the other (vLLM renamed it), and none minds both.
            message["reasoning_content"] = message["reasoning"] = thought
        if self._calls:
            message["tool_calls"] = self._calls
        self._messages.append(message)
        self._texts, self._thoughts, self._calls = [], [], []

    def _flush_user(self) -> None:
        if self._said:
            self._messages.append({"role": "user", "content": join_parts(self._said)})
            self._said = []


def _make_call(block: Block, path: str) -> dict[str, object]:
    """Return a tool call; its arguments are the input as the client wrote it."""
    arguments = "{}" if is_absent(block.input) else bytes(block.input).decode()
    if not arguments.startswith("{"):
        raise BadRequest(f"The field '{path}.input' must be an object.", param=f"{path}.input")
    return {
        "id": require_text(block.id, f"{path}.id"),
        "type": "function",
        "function": {"name": require_text(block.name, f"{path}.name"), "arguments": arguments},
    }
