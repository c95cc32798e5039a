"""Answers of /v1/responses: the response object, and a chat completion said as one, whole or as events of output items."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from core.limits import limits
from gateway.dialects.blocks import Block, BlockKind, Blocks, ObjectScan
from gateway.dialects.chat import AnswerContext, ChatChoice, ChatReader, ChatUsage
from gateway.dialects.responses_items import CallKind, ToolName, ToolTable, unwrap_input
from gateway.errors import ForwardedRequestFailed, GatewayError, StreamTooLarge
from wire.contract import ErrorCode
from wire.limits import WIRE
from wire.unreadable import UNREADABLE
from wire.usage import PoolMetrics

_encode = msgspec.json.Encoder().encode


_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9]")


class Status(StrEnum):
    """How far a response is."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ResponseFrame:
    """What stays the same. ``echo``: the members that repeat the request, as JSON without braces. ``created``: Unix seconds.

    ``is_stored``: the response is to be kept if it does not fail.
    """

    response_id: str
    model: str
    created: int
    echo: bytes
    is_stored: bool = False

    @property
    def stem(self) -> str:
        """What the ids of this response's items have in common."""
        return _NOT_IN_IDS.sub("", self.response_id.removeprefix("resp_"))


@dataclass(frozen=True, slots=True)
class ResponseMoment:
    """What changes; everything but the status as JSON. ``extra``: further members of the object, each after a comma."""

    status: Status = Status.IN_PROGRESS
    output: bytes = b"[]"
    usage: bytes = b"null"
    error: bytes = b"null"
    incomplete_details: bytes = b"null"
    completed_at: bytes = b"null"
    extra: bytes = b""


def make_response_id(request_id: str) -> str:
    return f"resp_{_NOT_IN_IDS.sub('', request_id.removeprefix('req_'))}"


def render_response(frame: ResponseFrame, moment: ResponseMoment) -> bytes:
    return (
        b'{"id":%b,"object":"response","created_at":%d,"status":"%b","completed_at":%b,"error":%b,'
        b'"incomplete_details":%b,"model":%b,"output":%b,"usage":%b,"store":%b,%b%b}'
    ) % (
        _encode(frame.response_id),
        frame.created,
        moment.status.encode(),
        moment.completed_at,
        moment.error,
        moment.incomplete_details,
        _encode(frame.model),
        moment.output,
        moment.usage,
        b"true" if frame.is_stored and moment.status is not Status.FAILED else b"false",
        frame.echo,
        moment.extra,
    )


def write_event(name: bytes, sequence: int, members: bytes) -> bytes:
    """Return one event. ``members``: its other members as JSON without braces."""
    return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (name, name, sequence, members)


def render_usage(usage: ChatUsage | None) -> bytes:
    counts = usage.to_counts() if usage is not None else None
    if usage is None or counts is None:
        return b"null"
    return _encode(
        {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.thought or 0},
            "total_tokens": counts.total_tokens,
        }
    )


def render_error(error: GatewayError) -> bytes:
    """Return ``error`` of a failed response. Clients act on the code: only ``server_error`` and rate limits are tried again."""
    code = "server_error"
    if error.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED:
        code = "context_length_exceeded"
    elif error.status == 429:
        code = "rate_limit_exceeded"
    elif error.status < 500:
        code = "invalid_prompt"
    param = "input" if error.param == "messages" else error.param
    return _encode({"code": code, "message": error.message, "type": error.type, "param": param})


class _Candidate(msgspec.Struct):
    token: str = ""
    logprob: float = 0.0
    bytes: list[int] | None = None


class _Token(_Candidate):
    top_logprobs: list[_Candidate] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


def render_logprobs(logprobs: object) -> bytes:
    """Return the tokens of ``choices[].logprobs`` as JSON without brackets; nothing when there are none to read."""
    try:
        tokens = msgspec.convert(logprobs, _Logprobs).content or []
    except msgspec.ValidationError:
        return b""
    for token in tokens:
        token.top_logprobs = token.top_logprobs or []
        for candidate in (token, *token.top_logprobs):
            candidate.bytes = list(candidate.token.encode()) if candidate.bytes is None else candidate.bytes
    return msgspec.json.encode(tokens)[1:-1]


_NO_ARGUMENTS = "{}"


class EventLog:
    """Numbers events and keeps them until they are taken. Silent: for answers that are not streamed, so none need be made."""

    __slots__ = ("_next", "_waiting", "is_silent")

    def __init__(self, *, is_silent: bool = False) -> None:
        self.is_silent = is_silent
        self._next = 1 if is_silent else 0
        self._waiting: list[bytes] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever said; a silent one is as good as full."""
        return self._next == 0

    def add(self, name: bytes, members: bytes) -> None:
        """Add an event. ``members``: what it has beside type and number, as JSON without braces."""
        if not self.is_silent:
            self._waiting.append(write_event(name, self._next, members))
            self._next += 1

    def add_delta(self, head: bytes, text: str) -> None:
        """Add the next piece of a text. ``head``: the event up to its number."""
        if not self.is_silent:
            self._waiting.append(b'%b%d,"delta":%b}\n\n' % (head, self._next, _encode(text)))
            self._next += 1

    def take(self) -> bytes:
        waiting = self._waiting
        if len(waiting) == 1:
            return waiting.pop()
        taken = b"".join(waiting)
        waiting.clear()
        return taken


class PartKind(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A kind of content part, the block that holds it, and the names of its events."""

    part: bytes
    block: BlockKind
    text_key: bytes
    delta: bytes
    done: bytes


def _make_kind(part: bytes, block: BlockKind, text_key: bytes) -> PartKind:
    return PartKind(
        part=part, block=block, text_key=text_key, delta=b"response.%b.delta" % part, done=b"response.%b.done" % part
    )


TEXT = _make_kind(b"output_text", BlockKind.TEXT, b"text")
REFUSAL = _make_kind(b"refusal", BlockKind.TEXT, b"refusal")
THOUGHT = _make_kind(b"reasoning_text", BlockKind.THINKING, b"text")


@dataclass(slots=True)
class _Part:
    kind: PartKind
    head: bytes
    """A delta event up to its number."""
    where: bytes
    """The members that name the part in every other event."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def render(self) -> bytes:
        text = _encode(self.text)
        if self.kind is not TEXT:
            return b'{"type":"%b","%b":%b}' % (self.kind.part, self.kind.text_key, text)
        return b'{"type":"output_text","annotations":[],"logprobs":[%b],"text":%b}' % (b",".join(self.logprobs), text)


class SpokenItem:
    """A message or a thought: parts of text, one after the other.

    ``repeats_text``: a message has its text beside its parts too, for readers of llm-pool's shape.
    """

    __slots__ = ("_index", "_item_id", "_log", "_parts", "_repeats_text", "_status", "is_message", "part")

    def __init__(self, kind: BlockKind, *, stem: str, index: int, log: EventLog, repeats_text: bool) -> None:
        self.is_message = kind is BlockKind.TEXT
        self.part: _Part | None = None
        """The part that grows."""
        self._item_id = f"{'msg' if self.is_message else 'rs'}_{stem}_{index}"
        self._index = index
        self._log = log
        self._repeats_text = repeats_text and self.is_message
        self._parts: list[_Part] = []
        self._status = Status.IN_PROGRESS
        if not log.is_silent:
            log.add(b"response.output_item.added", b'"output_index":%d,"item":%b' % (index, self.render()))

    @property
    def is_open(self) -> bool:
        return self._status is Status.IN_PROGRESS

    @property
    def text(self) -> str:
        return "".join(part.text for part in self._parts if part.kind is not REFUSAL)

    def say(self, kind: PartKind, text: str, logprobs: bytes = b"") -> None:
        part = self.part
        if part is None or part.kind is not kind:
            part = self._open_part(kind)
        part.pieces.append(text)
        if not logprobs:
            self._log.add_delta(part.head, text)
            return
        part.logprobs.append(logprobs)
        self._log.add(kind.delta, b'%b,"logprobs":[%b],"delta":%b' % (part.where, logprobs, _encode(text)))

    def add_logprobs(self, logprobs: bytes) -> None:
        if logprobs and self.part is not None and self.part.kind is TEXT:
            self.part.logprobs.append(logprobs)

    def close(self, status: Status) -> None:
        if self.is_open:
            self._close_part()
            self._status = status
            if not self._log.is_silent:
                self._log.add(b"response.output_item.done", b'"output_index":%d,"item":%b' % (self._index, self.render()))

    def render(self) -> bytes:
        content = b",".join([part.render() for part in self._parts])
        place = (_encode(self._item_id), self._status.encode())
        if not self.is_message:
            return b'{"id":%b,"type":"reasoning","status":"%b","summary":[],"content":[%b]}' % (*place, content)
        extra = b',"text":' + _encode(self.text) if self._repeats_text else b""
        return b'{"id":%b,"type":"message","status":"%b","role":"assistant","content":[%b]%b}' % (*place, content, extra)

    def _open_part(self, kind: PartKind) -> _Part:
        self._close_part()
        place = (_encode(self._item_id), self._index, len(self._parts))
        where = b'"item_id":%b,"output_index":%d,"content_index":%d' % place
        logprobs = b',"logprobs":[]' if kind is TEXT else b""
        head = b'event: %b\ndata: {"type":"%b",%b%b,"sequence_number":' % (kind.delta, kind.delta, where, logprobs)
        self.part = part = _Part(kind, head, where)
        self._log.add(b"response.content_part.added", b'%b,"part":%b' % (where, part.render()))
        self._parts.append(part)
        return part

    def _close_part(self) -> None:
        part, self.part = self.part, None
        if part is None or self._log.is_silent:
            return
        members = b'%b,"%b":%b' % (part.where, part.kind.text_key, _encode(part.text))
        if part.kind is TEXT:
            members += b',"logprobs":[%b]' % b",".join(part.logprobs)
        self._log.add(part.kind.done, members)
        self._log.add(b"response.content_part.done", b'%b,"part":%b' % (part.where, part.render()))


_CALL_PREFIXES = {CallKind.FUNCTION: "fc", CallKind.CUSTOM: "ctc", CallKind.SEARCH: "tsc"}


class CallItem:
    """A call of a tool. Only a function's arguments are told while they grow: the others have to be read as a whole first."""

    __slots__ = ("_call_id", "_head", "_index", "_item_id", "_log", "_pieces", "_status", "_tool")

    def __init__(self, tool: ToolName, *, call_id: str, stem: str, index: int, log: EventLog) -> None:
        self._tool = tool
        self._call_id = call_id
        self._item_id = f"{_CALL_PREFIXES[tool.kind]}_{stem}_{index}"
        self._index = index
        self._log = log
        self._pieces: list[str] = []
        self._status = Status.IN_PROGRESS
        name = b"response.function_call_arguments.delta"
        place = (name, name, _encode(self._item_id), index)
        self._head = b'event: %b\ndata: {"type":"%b","item_id":%b,"output_index":%d,"sequence_number":' % place
        if not log.is_silent:
            log.add(b"response.output_item.added", b'"output_index":%d,"item":%b' % (index, self.render()))

    @property
    def is_open(self) -> bool:
        return self._status is Status.IN_PROGRESS

    def add_arguments(self, piece: str) -> None:
        self._pieces.append(piece)
        if self._tool.kind is CallKind.FUNCTION:
            self._log.add_delta(self._head, piece)

    def close(self, status: Status) -> None:
        """Finish it. A whole call without arguments has an empty object of them: readers parse the text."""
        if not self.is_open:
            return
        if status is Status.COMPLETED and not "".join(self._pieces).strip():
            self.add_arguments(_NO_ARGUMENTS)
        self._status = status
        if self._log.is_silent:
            return
        members = b'"item_id":%b,"output_index":%d' % (_encode(self._item_id), self._index)
        if self._tool.kind is CallKind.FUNCTION:
            said = (members, _encode(self._tool.name), _encode("".join(self._pieces)))
            self._log.add(b"response.function_call_arguments.done", b'%b,"name":%b,"arguments":%b' % said)
        elif self._tool.kind is CallKind.CUSTOM:
            text = _encode(self._read_input())
            self._log.add(b"response.custom_tool_call_input.delta", b'%b,"delta":%b' % (members, text))
            self._log.add(b"response.custom_tool_call_input.done", b'%b,"input":%b' % (members, text))
        self._log.add(b"response.output_item.done", b'"output_index":%d,"item":%b' % (self._index, self.render()))

    def render(self) -> bytes:
        tool = self._tool
        fields: dict[str, object] = {
            "id": self._item_id,
            "type": tool.kind.value,
            "status": self._status.value,
            "call_id": self._call_id,
        }
        if tool.kind is CallKind.SEARCH:
            fields |= {"execution": "client", "arguments": self._read_object()}
        else:
            fields["name"] = tool.name
            if tool.namespace:
                fields["namespace"] = tool.namespace
            if tool.kind is CallKind.CUSTOM:
                fields["input"] = self._read_input()
            else:
                fields["arguments"] = "".join(self._pieces)
        return _encode(fields)

    def _read_input(self) -> str:
        """Return a custom tool's text; nothing before the whole of it can be read."""
        return "" if self.is_open else unwrap_input("".join(self._pieces))

    def _read_object(self) -> object:
        try:
            return msgspec.json.decode("".join(self._pieces)) if self._pieces else {}
        except UNREADABLE:
            return {}


class AnswerItems:
    """The output of one answer, each block an item. Arguments are said as they come, whether they are an object or not.

    ``stem``: what the ids of the items have in common. ``repeats_text``: see ``SpokenItem``.
    """

    def __init__(self, *, stem: str, table: ToolTable, log: EventLog, repeats_text: bool) -> None:
        self.is_cut = False
        """Whether the answer was stopped early, so the item that grew last is not whole."""
        self._stem = stem
        self._table = table
        self._log = log
        self._repeats_text = repeats_text
        self._items: list[SpokenItem | CallItem] = []
        self._latest: SpokenItem | CallItem | None = None
        """The item that grew last."""
        self._chars_left = limits().gateway.responses_answer_chars

    @property
    def text(self) -> str:
        return "".join(item.text for item in self._items if isinstance(item, SpokenItem) and item.is_message)

    def take_arguments(self, block: Block, piece: str) -> str:
        """Return the whole piece. Raises StreamTooLarge."""
        self._count(len(piece))
        return piece

    def open(self, block: Block) -> None:
        """Add an item. The id of a call is settled here: one that comes later does not count. Raises StreamTooLarge."""
        index, log = block.index, self._log
        if index >= WIRE.answer_calls:
            raise StreamTooLarge
        if block.kind is BlockKind.CALL:
            block.scan = ObjectScan()
            call_id = block.call_id or f"call_{self._stem}_{index}"
            self._latest = CallItem(self._table.find(block.name), call_id=call_id, stem=self._stem, index=index, log=log)
        else:
            self._latest = SpokenItem(block.kind, stem=self._stem, index=index, log=log, repeats_text=self._repeats_text)
        self._items.append(self._latest)

    def say(self, block: Block, pieces: list[str]) -> None:
        self._latest = call = self._items[block.index]
        assert isinstance(call, CallItem)
        for piece in pieces:
            block.unscanned.append(piece)
            call.add_arguments(piece)

    def say_text(self, kind: PartKind, text: str, logprobs: object) -> None:
        """Add text to the last item, which is a message or a thought. Raises StreamTooLarge."""
        self._latest = spoken = self._items[-1]
        assert isinstance(spoken, SpokenItem)
        self._count(len(text))
        spoken.say(kind, text, b"" if logprobs is None else self._render_logprobs(logprobs))

    def add_logprobs(self, logprobs: object) -> None:
        """Note numbers of tokens that had no text, if the last item is a message or a thought. Raises StreamTooLarge."""
        if self._items and isinstance(spoken := self._items[-1], SpokenItem):
            spoken.add_logprobs(self._render_logprobs(logprobs))

    def close(self, block: Block) -> None:
        item = self._items[block.index]
        item.close(Status.INCOMPLETE if self.is_cut and item is self._latest else Status.COMPLETED)

    def render(self) -> bytes:
        return b"[%b]" % b",".join([item.render() for item in self._items])

    def _render_logprobs(self, logprobs: object) -> bytes:
        rendered = render_logprobs(logprobs)
        self._count(len(rendered))
        return rendered

    def _count(self, chars: int) -> None:
        self._chars_left -= chars
        if self._chars_left < 0:
            raise StreamTooLarge


_INCOMPLETE_REASONS = {"length": b"max_output_tokens", "content_filter": b"content_filter"}


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What an answer takes over from its request, most of it for the ``ResponseFrame``. ``response_id`` None: one is made."""

    echo: bytes
    table: ToolTable
    response_id: str | None = None
    is_stored: bool = False
    uses_pool_fields: bool = False


class ResponsesTranslator(ChatReader):
    """Says one chat answer as a response (``AnswerTranslator``). ``fail`` ends a stream that broke for any reason."""

    def __init__(self, plan: AnswerPlan, context: AnswerContext) -> None:
        super().__init__()
        self._plan = plan
        self._context = context
        self._frame = ResponseFrame(
            response_id=plan.response_id or make_response_id(context.request_id),
            model=context.model,
            created=context.created,
            echo=plan.echo,
            is_stored=plan.is_stored,
        )
        self._opened_at = context.clock()
        self._first_text_at: float | None = None
        self._log = EventLog()
        self._begin_items()
        self._kept: bytes | None = None
        self._is_over = False

    @property
    def kept(self) -> bytes | None:
        return self._kept

    def feed(self, data: bytes) -> bytes:
        if self._is_over or self._failure is not None:
            return b""
        self._read(data)
        if self._first_text_at is None and not self._blocks.is_empty:
            self._first_text_at = self._context.clock()
        return self._log.take()

    def finish(self) -> bytes:
        if self._is_over or self._failure is not None:
            return b""
        self._read_rest()
        if self._failure is None:
            self._begin()
            self._end()
        return self._log.take()

    def fail(self, error: GatewayError) -> bytes:
        if self._is_over:
            return b""
        self._is_over = True
        self._failure = self._failure or error
        self._begin()
        moment = ResponseMoment(Status.FAILED, self._items.render(), render_usage(self._usage), render_error(error))
        self._log.add(b"response.failed", b'"response":' + render_response(self._frame, moment))
        return self._log.take()

    def translate_whole(self, body: bytes) -> bytes:
        self._log = EventLog(is_silent=True)
        self._begin_items()
        self._read_whole(body)
        if self._failure is None and self._finish_reason is None:
            self._failure = ForwardedRequestFailed("The engine answered without a finished message.")
        if self._failure is None:
            self._end()
        return self._kept or b""

    def _begin_items(self) -> None:
        plan, held_chars = self._plan, limits().gateway.responses_answer_chars
        self._items = AnswerItems(stem=self._frame.stem, table=plan.table, log=self._log, repeats_text=plan.uses_pool_fields)
        self._blocks = Blocks(self._items, is_sequential=False, held_chars=held_chars)

    def _take_choice(self, choice: ChatChoice) -> None:
        said = choice.delta or choice.message
        if said is None:
            return
        thought = said.reasoning_content or said.reasoning
        if thought:
            self._say(THOUGHT, thought)
        if said.content:
            self._say(TEXT, said.content, choice.logprobs)
        elif choice.logprobs is not None and not thought:
            self._items.add_logprobs(choice.logprobs)
        if said.refusal:
            self._say(REFUSAL, said.refusal)
        if said.tool_calls:
            for part in said.tool_calls:
                self._blocks.add_call(part)

    def _say(self, kind: PartKind, text: str, logprobs: object = None) -> None:
        if self._blocks.open_kind is not kind.block:
            self._blocks.add(kind.block, "")
        self._items.say_text(kind, text, logprobs)

    def _begin(self) -> None:
        if self._log.is_empty:
            response = b'"response":' + render_response(self._frame, ResponseMoment())
            self._log.add(b"response.created", response)
            self._log.add(b"response.in_progress", response)

    def _end(self) -> None:
        if self._blocks.has_unnamed_call:
            self._failure = ForwardedRequestFailed("The engine called a tool without naming it.")
            return
        reason = _INCOMPLETE_REASONS.get(self._finish_reason or "")
        self._items.is_cut = reason is not None
        if self._blocks.is_empty and reason is None:
            self._say(TEXT, "")
        self._blocks.finish()
        self._is_over = True
        ended_at = self._context.clock()
        moment = ResponseMoment(
            status=Status.COMPLETED if reason is None else Status.INCOMPLETE,
            output=self._items.render(),
            usage=render_usage(self._usage),
            incomplete_details=b"null" if reason is None else b'{"reason":"%b"}' % reason,
            completed_at=b"%d" % (self._context.created + int(ended_at - self._opened_at)) if reason is None else b"null",
            extra=self._tell_metrics(ended_at) if self._plan.uses_pool_fields else b"",
        )
        self._kept = response = render_response(self._frame, moment)
        # To llm-pool's readers there is no end but this one; the object in it says what is missing.
        is_completed = reason is None or self._plan.uses_pool_fields
        self._log.add(b"response.completed" if is_completed else b"response.incomplete", b'"response":' + response)

    def _tell_metrics(self, ended_at: float) -> bytes:
        """Say llm-pool's numbers in an event of their own; return what its readers want in the object."""
        metrics = _encode(self._measure(ended_at))
        self._log.add(b"response.metrics", b'"id":%b,"metrics":%b' % (_encode(self._frame.response_id), metrics))
        return b',"output_text":%b,"metrics":%b' % (_encode(self._items.text), metrics)

    def _measure(self, ended_at: float) -> PoolMetrics:
        """Return the numbers of the answer as the gateway sees them, with the engine's own where it says them."""
        usage, timings, received_at, opened_at = self.usage, self._timings, self._context.received_at, self._opened_at
        backend = (ended_at - opened_at) * 1000.0
        waited = None if received_at is None else max(0.0, (opened_at - received_at) * 1000.0)
        whole = backend + (waited or 0.0)
        first = None if self._first_text_at is None else (self._first_text_at - opened_at) * 1000.0
        generated = None
        if timings is not None and timings.predicted_ms is not None:
            generated = (timings.prompt_ms or 0.0) + timings.predicted_ms
        spent = backend if generated is None else generated
        output = usage.completion_tokens if usage is not None else None
        return PoolMetrics(
            backend_inference_wall_ms=round(backend, 1),
            engine_total_wall_ms=round(whole, 1),
            engine_outside_backend_wall_ms=round(whole - backend, 1),
            pool_total_wall_ms=round(whole, 1),
            engine_queue_wait_ms=None if waited is None else round(waited, 1),
            gpu_time_to_first_token_ms=None if first is None else round(first, 1),
            gpu_generate_total_ms=None if generated is None else round(generated, 1),
            gpu_decode_after_first_token_ms=None if first is None else round(max(0.0, spent - first), 1),
            engine_prompt_tokens=usage.prompt_tokens if usage is not None else None,
            engine_output_tokens=output,
            engine_tokens_per_second=None if output is None or spent <= 0 else round(output * 1000.0 / spent, 1),
        )
