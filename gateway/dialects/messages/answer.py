"""A chat completion said in the words of the Messages API: a whole one, and a stream as events of ordered content blocks."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from enum import StrEnum

import msgspec
from msgspec import Raw

from core.limits import limits
from gateway.dialects.chat import (
    AnswerContext,
    CallFinder,
    ChatChoice,
    ChatMessage,
    ChatReader,
    ChatUsage,
    EngineCall,
    ObjectScan,
    ToolCallPart,
)
from gateway.errors import ForwardedRequestFailed, StreamTooLarge
from wire.limits import WIRE

_encoder = msgspec.json.Encoder()
encode = _encoder.encode

UNSIGNED = "unsigned"
"""Signature of every thinking block: no engine signs, and some clients send back only what is signed."""
RAW_ARGUMENTS_KEY = "INVALID_JSON"
"""Where the text of arguments stands that are no JSON object; Anthropic's guide to fine-grained tool streaming names it so."""

MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
DELTA_END = b"}}\n\n"
_START = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
_TEXT_BLOCK = b'{"type":"text","text":""}'
_THINKING_BLOCK = b'{"type":"thinking","thinking":"","signature":""}'


def render_message_start(message_id: str, model: str, usage: ChatUsage | None) -> bytes:
    """Return the first event. Counts that the engine has not said yet are 0; ``message_delta`` has the final ones."""
    message: dict[str, object] = {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": make_usage(usage) | {"output_tokens": 0},
    }
    return b'event: message_start\ndata: {"type":"message_start","message":%b}\n\n' % encode(message)


def render_text_start(index: int) -> bytes:
    """Return the event that opens a text block."""
    return _START % (index, _TEXT_BLOCK)


def render_thinking_start(index: int) -> bytes:
    """Return the event that opens a thinking block."""
    return _START % (index, _THINKING_BLOCK)


def render_call_start(index: int, call_id: str, name: str) -> bytes:
    """Return the event that opens a ``tool_use`` block."""
    return _START % (index, encode({"type": "tool_use", "id": call_id, "name": name, "input": {}}))


def make_text_prefix(index: int) -> bytes:
    """Return a text delta up to its text, which goes between this and ``DELTA_END`` as a JSON string."""
    return _DELTA % (index, b"text_delta", b"text")


def make_thinking_prefix(index: int) -> bytes:
    """As ``make_text_prefix``, for thinking."""
    return _DELTA % (index, b"thinking_delta", b"thinking")


def make_arguments_prefix(index: int) -> bytes:
    """As ``make_text_prefix``, for a piece of the input of a tool."""
    return _DELTA % (index, b"input_json_delta", b"partial_json")


def render_signature(index: int) -> bytes:
    """Return the last delta of a thinking block."""
    return _DELTA % (index, b"signature_delta", b"signature") + encode(UNSIGNED) + DELTA_END


def render_block_stop(index: int) -> bytes:
    """Return the event that closes a block."""
    return _STOP % index


def render_message_delta(stop_reason: str, stop_sequence: str | None, usage: ChatUsage | None) -> bytes:
    """Return the event with the reason of the end and the final counts."""
    return b'event: message_delta\ndata: {"type":"message_delta","delta":%b,"usage":%b}\n\n' % (
        encode({"stop_reason": stop_reason, "stop_sequence": stop_sequence}),
        encode(make_usage(usage)),
    )


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
    return Raw(_encoder.encode({RAW_ARGUMENTS_KEY: text}))


def is_object(text: str) -> bool:
    """Whether a text is one JSON object."""
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


def render_whole(
    choice: ChatChoice, message: ChatMessage, *, head: dict[str, object], usage: ChatUsage | None, make_id: Callable[[int], str]
) -> bytes:
    """Return an unstreamed answer as a message. ``head``: its first fields."""
    blocks = _list_texts(message)
    used: set[str] = set()
    for number, part in enumerate(message.tool_calls or ()):
        function = part.function
        call_id = part.id if part.id and part.id not in used else make_id(number)
        used.add(call_id)
        blocks.append(
            {
                "type": "tool_use",
                "id": call_id,
                "name": (function.name if function is not None else None) or "",
                "input": read_arguments((function.arguments if function is not None else None) or ""),
            }
        )
    stop_reason, stop_sequence = find_stop(
        choice.finish_reason, choice.stopped_by, has_calls=bool(message.tool_calls), refuses=bool(message.refusal)
    )
    end = {"stop_reason": stop_reason, "stop_sequence": stop_sequence, "usage": make_usage(usage)}
    return encode({**head, "content": blocks or [{"type": "text", "text": ""}], **end})


def _list_texts(message: ChatMessage) -> list[dict[str, object]]:
    blocks: list[dict[str, object]] = []
    if message.thought:
        blocks.append({"type": "thinking", "thinking": message.thought, "signature": UNSIGNED})
    if text := (message.content or "") + (message.refusal or ""):
        blocks.append({"type": "text", "text": text})
    return blocks


class Kind(StrEnum):
    """What a strand carries."""

    TEXT = "text"
    THINKING = "thinking"
    CALL = "call"


class Strand(EngineCall):
    """One block to be, a call or not. ``prefix`` is the beginning of its deltas once it is open."""

    __slots__ = ("held", "kind", "prefix", "scan")

    def __init__(self, kind: Kind, number: int = 0) -> None:
        super().__init__(number)
        self.kind = kind
        self.held: list[str] = []
        self.prefix = b""
        self.scan: ObjectScan | None = None
        """Of a call whose arguments have begun to be an object."""

    @property
    def is_whole(self) -> bool:
        """Whether the next strand may take over."""
        return self.kind is not Kind.CALL or (self.scan is not None and self.scan.is_complete)

    @property
    def is_bare(self) -> bool:
        """Whether nothing of its text has come."""
        return not self.held and self.scan is None


class Strands:
    """The blocks of one answer. ``make_id`` names a call whose engine did not."""

    def __init__(self, make_id: Callable[[int], str]) -> None:
        self._make_id = make_id
        self._strands: deque[Strand] = deque()
        self._calls = CallFinder(lambda number: self._begin(Strand(Kind.CALL, number)))
        self._limits = limits().gateway
        self._held_chars = 0
        self._next_index = 0
        self.has_calls = False
        """Whether the answer calls tools."""
        self.has_cut_calls = False
        """Whether the arguments of one ended before their JSON did."""
        self.open_kind: Kind | None = None
        """What the open block is while nothing else waits: a piece of that kind may go out at once, behind ``prefix``."""
        self.prefix = b""

    @property
    def is_empty(self) -> bool:
        """Whether no block was opened, and none will be."""
        return not self._next_index and not self._strands

    def add(self, kind: Kind, text: str) -> bytes:
        """Take a piece of text or thinking; return the events that may go out. Raises StreamTooLarge."""
        strand = self._strands[-1] if self._strands else None
        if strand is None or strand.kind is not kind:
            strand = self._begin(Strand(kind))
        self._hold(strand, text)
        return self._advance()

    def add_call(self, part: ToolCallPart) -> bytes:
        """Take a piece of a tool call; return the events that may go out. Raises ForwardedRequestFailed."""
        strand = self._calls.find(part)
        function = part.function
        if function is None:
            return self._advance()
        if function.arguments:
            if strand.scan is not None and strand.prefix and self.open_kind is Kind.CALL:
                piece = _scan(strand.scan, function.arguments)
                return strand.prefix + encode(piece) + DELTA_END if piece else b""
            self._take_arguments(strand, function.arguments)
        return self._advance()

    def finish(self) -> bytes:
        """Return what is still held, and the end of every block. Raises ForwardedRequestFailed."""
        out = [self._advance()]
        while self._strands:
            out += [self._close(self._strands.popleft()), self._advance()]
        return b"".join(out)

    def _begin(self, strand: Strand) -> Strand:
        """Put a strand behind the others. Raises StreamTooLarge."""
        if len(self._strands) >= self._limits.strands or strand.number >= WIRE.answer_calls:
            raise StreamTooLarge
        self._strands.append(strand)
        return strand

    def _take_arguments(self, strand: Strand, piece: str) -> None:
        """Follow arguments that begin like an object; hold any others, which are made into one at their end."""
        if strand.scan is None and not strand.held:
            piece = piece.lstrip()
            if piece.startswith("{"):
                strand.scan = ObjectScan()
        if strand.scan is not None:
            piece = _scan(strand.scan, piece)
        if piece:
            self._hold(strand, piece)

    def _hold(self, strand: Strand, piece: str) -> None:
        strand.held.append(piece)
        self._held_chars += len(piece)

    def _advance(self) -> bytes:
        """Write what the open strand holds, and open the next while the open one is whole. Raises StreamTooLarge."""
        strands = self._strands
        out = []
        while strands:
            out.append(self._write(strands[0]))
            if len(strands) == 1 or not strands[0].is_whole:
                break
            out.append(self._close(strands.popleft()))
        if self._held_chars > self._limits.held_chars:
            raise StreamTooLarge
        self.open_kind = strands[0].kind if len(strands) == 1 else None
        self.prefix = strands[0].prefix if strands else b""
        return b"".join(out)

    def _write(self, strand: Strand) -> bytes:
        """Open a strand's block if that is possible by now, and write what it holds."""
        if strand.kind is Kind.CALL and not (strand.name and (strand.call_id or strand.scan)):
            return b""
        out = b"" if strand.prefix else self._open(strand)
        if not strand.held or (strand.kind is Kind.CALL and strand.scan is None):
            return out
        text = "".join(strand.held)
        self._held_chars -= len(text)
        strand.held = []
        if not text:
            return out
        return out + strand.prefix + encode(text) + DELTA_END

    def _open(self, strand: Strand) -> bytes:
        index = self._next_index
        self._next_index += 1
        match strand.kind:
            case Kind.TEXT:
                strand.prefix = make_text_prefix(index)
                return render_text_start(index)
            case Kind.THINKING:
                strand.prefix = make_thinking_prefix(index)
                return render_thinking_start(index)
            case Kind.CALL:
                self.has_calls = True
                strand.call_id = strand.call_id or self._make_id(strand.number)
                strand.prefix = make_arguments_prefix(index)
                return render_call_start(index, strand.call_id, strand.name)

    def _close(self, strand: Strand) -> bytes:
        """Return the end of a block, opened now if it was not. Raises ForwardedRequestFailed for a call nobody can make."""
        strand.is_closed = True
        held = "".join(strand.held)
        self._held_chars -= len(held)
        strand.held = []
        out = b""
        if strand.kind is Kind.CALL and not strand.name:
            if not (held or strand.call_id):
                return b""
            raise ForwardedRequestFailed("The engine sent a tool call without the name of the tool.")
        if not strand.prefix:
            out = self._open(strand)
        index = self._next_index - 1
        if strand.kind is Kind.THINKING:
            out += render_signature(index)
        elif strand.scan is not None:
            self.has_cut_calls |= not strand.scan.is_complete
        elif strand.kind is Kind.CALL:
            out += strand.prefix + encode(bytes(read_arguments(held)).decode()) + DELTA_END
        return out + render_block_stop(index)


def _scan(scan: ObjectScan, piece: str) -> str:
    """Return the part of a piece that belongs to the object. Raises ForwardedRequestFailed when there is more."""
    rest = scan.feed(piece)
    if rest and not rest.isspace():
        raise ForwardedRequestFailed("The engine sent more arguments of a tool call after their end.")
    return piece[: len(piece) - len(rest)]


_SPOKEN = re.compile(r"[^A-Za-z0-9_-]")
_TEXT, _THINKING = Kind.TEXT, Kind.THINKING


class MessagesTranslator(ChatReader):
    """One answer; see ``AnswerTranslator``. The closing events are held until ``finish``: usage follows the last piece."""

    __slots__ = ("_context", "_has_started", "_id", "_is_whole", "_out", "_refuses", "_strands")

    def __init__(self, context: AnswerContext) -> None:
        super().__init__()
        self._context = context
        self._id = _SPOKEN.sub("", context.request_id.removeprefix("req_"))
        self._strands = Strands(self._make_call_id)
        self._out: list[bytes] = []
        """Events that were not returned yet."""
        self._has_started = self._is_whole = False
        self._refuses = False

    @property
    def kept(self) -> bytes | None:
        """Nothing: messages are not kept."""
        return None

    def feed(self, data: bytes) -> bytes:
        """Take bytes of a chat stream, cut anywhere; return whole events of a Messages stream, or nothing."""
        if self._failure is None:
            self._read(data)
        return self._take_out()

    def finish(self) -> bytes:
        """Return the closing events; none, and ``failure``, when the engine never said that its answer was finished."""
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
        """Return an unstreamed chat answer (HTTP 2xx) as a message; nothing, and ``failure``, when it is none."""
        self._has_started = self._is_whole = True  # what a stream begins with stands in the message
        self._read_whole(body)
        return b"" if self._failure is not None else self._take_out()

    @property
    def _message_id(self) -> str:
        return f"msg_{self._id}"

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
            self._out.append(render_message_start(self._message_id, self._context.model, self._usage))

    def _take_choice(self, choice: ChatChoice) -> None:
        if not self._is_whole:
            if (delta := choice.delta or choice.message) is not None:
                self._take_delta(delta)
        elif choice.message is not None and not self._out:
            head: dict[str, object] = {"id": self._message_id, "type": "message", "role": "assistant"}
            head["model"] = self._context.model
            said = render_whole(choice, choice.message, head=head, usage=self._usage, make_id=self._make_call_id)
            self._out.append(said)

    def _take_delta(self, delta: ChatMessage) -> None:
        content, thought, strands, out = delta.content, delta.reasoning_content or delta.reasoning, self._strands, self._out
        if not delta.tool_calls and not delta.refusal:
            if not thought and (strands.open_kind is _TEXT or not content):
                if content:
                    out.append(strands.prefix + encode(content) + DELTA_END)
                return
            if not content and strands.open_kind is _THINKING:
                out.append(strands.prefix + encode(thought) + DELTA_END)
                return
        if thought:
            out.append(strands.add(_THINKING, thought))
        if content:
            out.append(strands.add(_TEXT, content))
        if delta.refusal:
            self._refuses = True
            out.append(strands.add(_TEXT, delta.refusal))
        for part in delta.tool_calls or ():
            out.append(strands.add_call(part))

    def _end(self) -> None:
        """Close every block and the message. Raises ForwardedRequestFailed."""
        strands, out = self._strands, self._out
        if strands.is_empty:
            out.append(strands.add(_TEXT, ""))
        out.append(strands.finish())
        stop_reason, stop_sequence = find_stop(
            self._finish_reason,
            self._stopped_by,
            has_calls=strands.has_calls,
            has_cut_calls=strands.has_cut_calls,
            refuses=self._refuses,
        )
        out.append(render_message_delta(stop_reason, stop_sequence, self._usage) + MESSAGE_STOP)
