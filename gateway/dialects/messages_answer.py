"""A chat completion said in the words of the Messages API: a whole one, and a stream as events of ordered content blocks."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
from msgspec import Raw

from core.limits import limits
from gateway.dialects.blocks import Block, BlockKind, Blocks, ObjectScan
from gateway.dialects.chat import AnswerContext, ChatChoice, ChatMessage, ChatReader, ChatUsage, FunctionPart
from gateway.errors import ForwardedRequestFailed

encode = msgspec.json.Encoder().encode

UNSIGNED = "unsigned"
"""Signature of every thinking block: no engine signs, and some clients send back only what is signed."""
RAW_ARGUMENTS_KEY = "INVALID_JSON"
"""Where the text of arguments stands that are no JSON object; Anthropic's guide to fine-grained tool streaming names it so."""

_MESSAGE_START = b'event: message_start\ndata: {"type":"message_start","message":%b}\n\n'
_MESSAGE_END = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":%b,"usage":%b}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
_DELTA_END = b"}}\n\n"
_START = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
_SPOKEN_FORMS = {
    BlockKind.TEXT: (b'{"type":"text","text":""}', b"text_delta", b"text"),
    BlockKind.THINKING: (b'{"type":"thinking","thinking":"","signature":""}', b"thinking_delta", b"thinking"),
}
"""How a block begins, and the type of its deltas with the member that has the text."""


def make_usage(usage: ChatUsage | None) -> dict[str, object]:
    """Return ``usage`` of a message, in tokens. ``input_tokens`` is without those read from a cache; an engine counts all."""
    if usage is None:
        usage = ChatUsage()
    cached, thought = usage.cached, usage.thought
    counts: dict[str, object] = {
        "input_tokens": max(0, usage.prompt - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion,
    }
    return counts if thought is None else counts | {"output_tokens_details": {"thinking_tokens": thought}}


_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_text_decoder = msgspec.json.Decoder(str)


def read_arguments(text: str) -> Raw:
    """Return arguments as the JSON text of an object. None at all is ``{}``; what is no object stands in one under a key."""
    stripped = text.strip()
    if stripped in {"", "null"}:
        return Raw(b"{}")
    if is_object(stripped):
        return Raw(stripped.encode())
    if stripped.startswith('"'):  # some engines encode the object twice
        try:
            inner = _text_decoder.decode(stripped.encode())
        except (msgspec.DecodeError, UnicodeError):
            inner = ""
        if is_object(inner):
            return Raw(inner.encode())
    return Raw(encode({RAW_ARGUMENTS_KEY: text}))


def is_object(text: str) -> bool:
    try:
        _object_decoder.decode(text.encode())
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True


_CALL_FINISHES = frozenset({"tool_calls", "function_call"})


def find_stop(
    finish_reason: str | None,
    stopped_by: int | str | None,
    *,
    has_calls: bool,
    has_cut_calls: bool = False,
    refuses: bool,
) -> tuple[str, str | None]:
    """Return ``stop_reason`` and ``stop_sequence``.

    ``stopped_by``: the stop sequence, from engines that say it (vLLM; a number is a token). Calls count whatever an engine
    says, but for a sequence that cut one short: that call must not be made.
    """
    if finish_reason == "length":
        return "max_tokens", None
    if refuses or finish_reason == "content_filter":
        return "refusal", None
    is_stopped = isinstance(stopped_by, str) and bool(stopped_by)
    if has_calls and (finish_reason in _CALL_FINISHES or not (has_cut_calls and is_stopped)):
        return "tool_use", None
    if is_stopped:
        return "stop_sequence", str(stopped_by)
    return "end_turn", None


class MessageBlocks:
    """Blocks as events of a Messages stream. ``make_id`` names a call whose engine did not."""

    __slots__ = ("_make_id", "events", "has_calls", "has_cut_calls", "prefix")

    def __init__(self, make_id: Callable[[int], str]) -> None:
        self._make_id = make_id
        self.events: list[bytes] = []
        self.prefix = b""
        """A delta of the block that was opened last, up to its text."""
        self.has_calls = False
        """Whether the answer calls tools."""
        self.has_cut_calls = False
        """Whether the arguments of one ended before their JSON did."""

    def take_arguments(self, block: Block, piece: str) -> str:
        """Follow arguments that begin like an object; any others are held, and made into one at their end."""
        if block.is_bare:
            piece = piece.lstrip()
            if piece.startswith("{"):
                block.scan = ObjectScan()
        if block.scan is None:
            return piece
        rest = block.scan.feed(piece)
        if rest and not rest.isspace():
            raise ForwardedRequestFailed("The engine sent more arguments of a tool call after their end.")
        return piece[: len(piece) - len(rest)] if rest else piece

    def open(self, block: Block) -> None:
        if block.kind is BlockKind.CALL:
            self.has_calls = True
            block.call_id = block.call_id or self._make_id(block.number)
            start = encode({"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}})
            delta, key = b"input_json_delta", b"partial_json"
        else:
            start, delta, key = _SPOKEN_FORMS[block.kind]
        self.prefix = _DELTA % (block.index, delta, key)
        self.events.append(_START % (block.index, start))

    def say(self, block: Block, pieces: list[str]) -> None:
        """Say pieces in one delta. ``block``: the one that was opened last."""
        self.events.append(self.prefix + encode("".join(pieces)) + _DELTA_END)

    def close(self, block: Block) -> None:
        """Close a block: sign a thinking one, and say arguments that are no object."""
        if block.kind is BlockKind.THINKING:
            self.events.append(_DELTA % (block.index, b"signature_delta", b"signature") + encode(UNSIGNED) + _DELTA_END)
        elif block.scan is not None:
            self.has_cut_calls |= not block.is_whole
        elif block.kind is BlockKind.CALL:
            self.say(block, [bytes(read_arguments("".join(block.held))).decode()])
        self.events.append(_STOP % block.index)


_SPOKEN = re.compile(r"[^A-Za-z0-9_-]")
_TEXT, _THINKING = BlockKind.TEXT, BlockKind.THINKING


class MessagesTranslator(ChatReader):
    """One answer; see ``AnswerTranslator``. The closing events are held until ``finish``: usage follows the last piece."""

    __slots__ = ("_blocks", "_context", "_has_started", "_id", "_is_whole", "_out", "_refuses", "_renderer")

    def __init__(self, context: AnswerContext) -> None:
        super().__init__()
        self._context = context
        self._id = _SPOKEN.sub("", context.request_id.removeprefix("req_"))
        self._renderer = MessageBlocks(self._make_call_id)
        self._blocks = Blocks(self._renderer, is_sequential=True, held_chars=limits().gateway.held_chars)
        self._out: list[bytes] = []
        """Events that were not returned yet."""
        self._has_started = self._is_whole = False
        self._refuses = False

    @property
    def kept(self) -> bytes | None:
        return None

    def feed(self, data: bytes) -> bytes:
        if self._failure is None:
            self._read(data)
        return self._take_out()

    def finish(self) -> bytes:
        if self._failure is None:
            self._read_rest()
        if self._failure is None:
            self._begin()
            try:
                self._end()
            except ForwardedRequestFailed as error:
                self._failure = error
        return self._take_out()

    def translate_whole(self, body: bytes) -> bytes:
        self._has_started = self._is_whole = True  # what a stream begins with stands in the message
        self._read_whole(body)
        return b"" if self._failure is not None else self._take_out()

    @property
    def _head(self) -> dict[str, object]:
        return {"id": f"msg_{self._id}", "type": "message", "role": "assistant", "model": self._context.model}

    def _make_call_id(self, number: int) -> str:
        return f"toolu_{self._id}_{number}"

    def _take_out(self) -> bytes:
        out = self._out
        if len(out) == 1:
            return out.pop()
        taken = b"".join(out)
        out.clear()
        return taken

    def _begin(self) -> None:
        if not self._has_started:
            self._has_started = True
            message = {
                **self._head,
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": make_usage(self._usage) | {"output_tokens": 0},  # ``message_delta`` has the final counts
            }
            self._out.append(_MESSAGE_START % encode(message))

    def _take_choice(self, choice: ChatChoice) -> None:
        if not self._is_whole:
            if (delta := choice.delta or choice.message) is not None:
                self._take_delta(delta)
        elif choice.message is not None and not self._out:
            self._out.append(self._render_whole(choice, choice.message))

    def _render_whole(self, choice: ChatChoice, message: ChatMessage) -> bytes:
        blocks: list[dict[str, object]] = []
        if message.thought:
            blocks.append({"type": "thinking", "thinking": message.thought, "signature": UNSIGNED})
        if text := (message.content or "") + (message.refusal or ""):
            blocks.append({"type": "text", "text": text})
        used: set[str] = set()
        for number, part in enumerate(message.tool_calls or ()):
            function = part.function or FunctionPart()
            # Some engines give every call the same id.
            call_id = part.id if part.id and part.id not in used else self._make_call_id(number)
            used.add(call_id)
            arguments = read_arguments(function.arguments or "")
            blocks.append({"type": "tool_use", "id": call_id, "name": function.name or "", "input": arguments})
        stop_reason, stop_sequence = find_stop(
            choice.finish_reason, choice.stopped_by, has_calls=bool(message.tool_calls), refuses=bool(message.refusal)
        )
        end = {"stop_reason": stop_reason, "stop_sequence": stop_sequence, "usage": make_usage(self._usage)}
        return encode({**self._head, "content": blocks or [{"type": "text", "text": ""}], **end})

    def _take_delta(self, delta: ChatMessage) -> None:
        content, thought, blocks, out = delta.content, delta.reasoning_content or delta.reasoning, self._blocks, self._out
        if not delta.tool_calls and not delta.refusal:
            if not thought and (blocks.open_kind is _TEXT or not content):
                if content:
                    out.append(self._renderer.prefix + encode(content) + _DELTA_END)
                return
            if not content and blocks.open_kind is _THINKING:
                out.append(self._renderer.prefix + encode(thought) + _DELTA_END)
                return
        self._refuses |= bool(delta.refusal)
        for kind, text in ((_THINKING, thought), (_TEXT, content), (_TEXT, delta.refusal)):
            if text:
                blocks.add(kind, text)
                self._move_events()
        for part in delta.tool_calls or ():
            blocks.add_call(part)
            self._move_events()

    def _move_events(self) -> None:
        self._out += self._renderer.events
        self._renderer.events.clear()

    def _end(self) -> None:
        if self._blocks.is_empty:
            self._blocks.add(_TEXT, "")
        self._blocks.finish()
        self._move_events()
        stop_reason, stop_sequence = find_stop(
            self._finish_reason,
            self._stopped_by,
            has_calls=self._renderer.has_calls,
            has_cut_calls=self._renderer.has_cut_calls,
            refuses=self._refuses,
        )
        end = encode({"stop_reason": stop_reason, "stop_sequence": stop_sequence})
        self._out.append(_MESSAGE_END % (end, encode(make_usage(self._usage))))
