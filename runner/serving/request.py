"""One inference request and its answer: what is asked, by which paths, how a refusal is said, and what an answer told.

A request comes from the node's own HTTP port, or the socket of a gateway. Refusals are the error object of the
model-runner specification, which OpenAI's clients read as theirs. The counts of all answers are plain numbers, so that a
node without a metrics reader pays next to nothing.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
import msgspec
from multidict import CIMultiDictProxy

from runner.engines.http import HttpResponse
from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    IMAGES,
    MESSAGES,
    RESPONSES,
    TRANSCRIPTIONS,
    CacheMode,
    Priority,
    Response,
)
from runner.errors import EngineUnavailable, InvalidRequest
from runner.limits import limits
from wire import clock
from wire.bounds import find_crowd, find_out_of_bounds
from wire.bridge import TokenCounts
from wire.events import BLANK_LINES, EndReader, StreamEnd
from wire.tidy import ChatTidier
from wire.unreadable import UNREADABLE
from wire.usage import BodyReader, StreamReader, Usage

INFERENCE_PATHS = (
    CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES, IMAGES, TRANSCRIPTIONS, "/v1/audio/translations", "/v1/audio/speech",
    "/v1/images/edits", "/v1/moderations", "/v1/rerank", "/v1/score",
)  # fmt: skip
"""What a server that does not say which paths it answers is asked for by POST: none of them loads, unloads or flushes."""
_PATH = re.compile(r"/v1(?:/[A-Za-z0-9_.:@~-]+)+/?(?:\?[\x21-\x7e]*)?\Z")
_TAG = re.compile(r"[A-Za-z0-9._:-]{1,64}\Z")
_AT = re.compile(r" - at `\$?\.?([^`]*)`")
_FIELD = re.compile(r"field `([^`]*)`")
_MODES: dict[str, CacheMode] = {"": "auto", "auto": "auto", "prefix": "prefix", "none": "none"}
_PRIORITIES: dict[str, Priority] = {"": "normal", "high": "high", "normal": "normal", "low": "low"}
DURATION_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
WAIT_BOUNDS_S = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
OTHER_TENANTS = "other"
"""What tenants beyond the first ``tenants`` of the limits are counted under: labels must not grow without bound."""
_DONE = b"data: [DONE]\n\n"
_USAGE_CHUNK = re.compile(rb'(data: \{[^\n]*"choices"\s*:\s*\[\s*\][^\n]*"usage"[^\n]*)\}(\r?\n)')

HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "expect",
})  # fmt: skip
"""RFC 9110 section 7.6.1, and ``expect``, which only concerns the hop it was sent on."""

NOT_TO_CLIENT = HOP_BY_HOP | {
    "set-cookie", "set-cookie2", "server", "date", "alt-svc", "strict-transport-security", "www-authenticate", "via",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inference:
    """A request for a model. ``path`` may carry a query; ``headers`` are lower-case. ``allow_remote``: its owner agrees that
    it leaves the node. ``on_socket``: it came through a gateway, which has checked tenant and limits.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    model: str
    tenant: str
    priority: Priority = "normal"
    cache_mode: CacheMode = "auto"
    cache_tag: str = ""
    is_streaming: bool = False
    allow_remote: bool = False
    on_socket: bool = False
    request_id: str = ""
    """The one that its client was told, for the log."""
    has_ticket: bool = False
    """It came to the node's own port with a ticket, so a gateway has checked tenant and limits too."""

    @property
    def endpoint(self) -> str:
        return self.path.partition("?")[0]


class BodyFields(msgspec.Struct):
    """What serving reads of a JSON body; everything else stays in the bytes."""

    model: str
    stream: bool | None = None
    allow_remote: bool | None = None


_decoder = msgspec.json.Decoder(BodyFields)


def read_fields(body: bytes) -> BodyFields:
    """Parse a JSON body. Raises InvalidRequest naming the field at fault."""
    if not body.strip():
        raise InvalidRequest("The request body is empty; send a JSON object.")
    try:
        fields = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explain_fault(error) from None
    except UNREADABLE as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None
    if not 1 <= len(fields.model) <= limits().models.id_chars:
        raise InvalidRequest(f"The field 'model' must have 1 to {limits().models.id_chars} characters.", param="model")
    return fields


_members_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_object_decoder = msgspec.json.Decoder(dict[str, object])


def ask_to_continue(body: bytes, continuation: Mapping[str, object]) -> bytes:
    """Return the body of a chat by which an engine goes on with its last message (``Capabilities.continuation``).

    Raises InvalidRequest.
    """
    try:
        members = _members_decoder.decode(body)
        for name, value in continuation.items():
            given = members.get(name, b"null")
            if isinstance(value, Mapping) and bytes(given) != b"null":
                members[name] = msgspec.Raw(msgspec.json.encode({**_object_decoder.decode(given), **value}))
            else:
                members[name] = msgspec.Raw(msgspec.json.encode(value))
    except UNREADABLE as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None
    return msgspec.json.encode(members)


def explain_fault(error: msgspec.ValidationError) -> InvalidRequest:
    text = str(error)
    # Of a field that is missing or unknown, msgspec gives the path of the object around it, and none at the top.
    at, named = _AT.search(text), _FIELD.search(text)
    path = (at[1] if at else "") or (named[1] if named else None)
    return InvalidRequest(f"Invalid request body: {text}.", param=path)


def check_bounds(endpoint: str, fields: Mapping[str, object]) -> None:
    """Raise InvalidRequest for a number that the endpoint's original refuses. ``fields``: the members of a JSON body."""
    fault = find_out_of_bounds(endpoint, fields)
    if fault is not None:
        raise InvalidRequest(fault[1], param=fault[0])


def check_crowd(body: bytes) -> None:
    """Raise InvalidRequest for a JSON body with so much in one value that an engine would read it for minutes."""
    if (crowd := find_crowd(body)) is not None:
        raise InvalidRequest(crowd[1], param=crowd[0])


def read_cache_mode(text: str) -> CacheMode:
    mode = _MODES.get(text.strip().lower())
    if mode is None:
        raise InvalidRequest("X-Cache-Mode must be prefix, none or auto.", param="X-Cache-Mode")
    return mode


def read_cache_tag(text: str) -> str:
    tag = text.strip()
    if tag and not _TAG.match(tag):
        raise InvalidRequest(
            "X-Cache-Tag must have at most 64 characters of letters, digits, dot, underscore, colon and minus.",
            param="X-Cache-Tag",
        )
    return tag


def read_priority(text: str) -> Priority:
    priority = _PRIORITIES.get(text.strip().lower())
    if priority is None:
        raise InvalidRequest("X-Priority must be high, normal or low.", param="X-Priority")
    return priority


def is_allowed_path(path: str) -> bool:
    """Return whether an engine may be asked for ``path``: below ``/v1/``, no dot segments, no escapes, no fragment."""
    if not _PATH.match(path) or "#" in path:
        return False
    segments = path.partition("?")[0].split("/")
    return "." not in segments and ".." not in segments


class _Timings(msgspec.Struct):
    """llama.cpp's own numbers, which our child servers repeat: milliseconds, and tokens taken from the cache."""

    cache_n: int | None = None
    prompt_n: int | None = None
    prompt_ms: float | None = None
    predicted_n: int | None = None
    predicted_ms: float | None = None
    tokenize_ms: float | None = None


class _Inner(msgspec.Struct):
    usage: Usage | None = None


class _Answer(msgspec.Struct):
    usage: Usage | None = None
    timings: _Timings | None = None
    message: _Inner | None = None
    response: _Inner | None = None


_answer_decoder = msgspec.json.Decoder(_Answer)


@dataclass(slots=True)
class Numbers:
    """Numbers of one answer; None = nobody told. ``reported_gpu_ms`` is the engine's own time where it reports it.

    ``wall_ms`` is measured here, from sending the request to the last byte; ``first_byte_ms`` to the first of the body.
    """

    queue_wait_ms: float = 0.0
    wall_ms: float = 0.0
    first_byte_ms: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    tokenize_ms: float | None = None
    prompt_ms: float | None = None
    decode_ms: float | None = None
    reported_gpu_ms: float | None = None

    @property
    def gpu_ms(self) -> float:
        """Time the engine worked: what it reports, else what was measured around it."""
        if self.reported_gpu_ms is not None:
            return self.reported_gpu_ms
        if self.prompt_ms is not None and self.decode_ms is not None:
            return self.prompt_ms + self.decode_ms
        return self.wall_ms

    def take(self, answer: bytes) -> TokenCounts | None:
        """Read the JSON of a whole answer, or of one event of a stream; later numbers win. Anything else is ignored.

        Return its usage, None where that is missing or not as ``wire.usage`` wants it.
        """
        try:
            found = _answer_decoder.decode(answer)
        except UNREADABLE:
            return None
        usage = found.usage or next((inner.usage for inner in (found.response, found.message) if inner and inner.usage), None)
        counts = None if usage is None else self._take_usage(usage)
        if (timings := found.timings) is not None:
            self.cached_tokens = timings.cache_n if timings.cache_n is not None else self.cached_tokens
            self.prompt_ms = timings.prompt_ms if timings.prompt_ms is not None else self.prompt_ms
            self.decode_ms = timings.predicted_ms if timings.predicted_ms is not None else self.decode_ms
            self.tokenize_ms = timings.tokenize_ms if timings.tokenize_ms is not None else self.tokenize_ms
        self.fill_in(counts)
        return counts

    def fill_in(self, counts: TokenCounts | None) -> None:
        """Say in counts what was cached, where only the engine's timings do."""
        if counts is not None and not counts.cached_tokens:
            counts.cached_tokens = min(max(0, self.cached_tokens or 0), counts.prompt_tokens)

    def take_stream(self, reader: StreamReader) -> None:
        for event in reader.noted_events():
            for line in event.splitlines():
                if line.startswith(b"data:") and (b'"usage"' in line or b'"timings"' in line):
                    self.take(line[5:].strip())

    def headers(self) -> dict[str, str]:
        """Return the response headers of the model-runner specification, all of them, lower-case."""
        cached = self.cached_tokens or 0
        return {
            "x-cache-hit": "true" if cached > 0 else "false",
            "x-cache-tokens-reused": str(cached),
            "x-queue-wait-ms": str(round(self.queue_wait_ms)),
            "x-gpu-time-ms": str(round(self.gpu_ms)),
        }

    def comment(self) -> bytes:
        """Return the same as an SSE comment, which every client skips."""
        return b": " + "; ".join(f"{name}={value}" for name, value in self.headers().items()).encode() + b"\n\n"

    def _take_usage(self, usage: Usage) -> TokenCounts | None:
        self.prompt_tokens = usage.prompt if usage.prompt is not None else self.prompt_tokens
        self.output_tokens = usage.completion if usage.completion is not None else self.output_tokens
        self.cached_tokens = usage.cached if usage.cached is not None else self.cached_tokens
        return usage.to_counts()


@dataclass(slots=True)
class Histogram:
    """Counts per upper bound in seconds, the last one for everything above."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class ModelCounters:
    """What one model served. Prompt and cached tokens make its cache hit rate."""

    durations: Histogram = field(default_factory=lambda: Histogram(DURATION_BOUNDS_S))
    waits: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS_S))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def cache_hit_rate(self) -> float:
        """Share of prompt tokens that came from the cache, 0.0 to 1.0."""
        return min(1.0, self.cached_tokens / self.prompt_tokens) if self.prompt_tokens else 0.0


class Counters:
    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, str], int] = {}
        """By model, tenant and status: success, error, refused or cancelled."""
        self.refusals: dict[str, int] = {}
        """By code, from port and gateways alike; the codes are those of ``runner.errors``."""
        self.models: dict[str, ModelCounters] = {}
        self._tenants: set[str] = set()

    def count(self, *, model: str, tenant: str, status: str) -> None:
        if tenant not in self._tenants:
            if len(self._tenants) < limits().serving.tenants:
                self._tenants.add(tenant)
            else:
                tenant = OTHER_TENANTS
        key = (model, tenant, status)
        self.requests[key] = self.requests.get(key, 0) + 1

    def count_refusal(self, code: str) -> None:
        """Count a request that was not carried out, or broke off, by the code that its client was told."""
        self.refusals[code] = self.refusals.get(code, 0) + 1

    def of(self, model: str) -> ModelCounters:
        """Return the counters of a model; call it for models that exist only."""
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelCounters()
        return found


@dataclass(slots=True)
class Answer:
    """What goes back: a whole ``body``, or ``chunks`` as they come; ``usage`` and ``numbers`` are final after the last one.

    Reading ``chunks`` raises EngineUnavailable when the engine breaks off.
    """

    status: int
    headers: dict[str, str]
    body: bytes | None = None
    chunks: AsyncIterator[bytes] | None = None
    is_event_stream: bool = False
    usage: TokenCounts | None = None
    numbers: Numbers = field(default_factory=Numbers)
    has_failed: bool = False
    """Its end was an error event, or none at all: who read it knows, and nobody else would."""
    flow: Flow | None = None
    """What ``chunks`` comes from, where it is an engine's own answer; one of the two is read."""
    ends: EndReader | None = None
    """Of an engine's own event stream, where its dialect has a closing event: what passed of it."""


class _Failure(msgspec.Struct):
    message: str = ""


class Source(Protocol):
    """Where an answer comes from: one request on one replica. ``began``: when it was sent, in seconds of the clock."""

    request: Inference
    began: float

    def report(self, error: Exception, *, began_answer: bool) -> EngineUnavailable:
        """Have the replica looked at; return what the client hears."""

    def report_cut(self) -> None:
        """Have the replica looked at because its stream just ended."""


class Flow:
    """The body of an engine's answer on its way out, read once: with ``iterate``, or with ``pipe`` where ``is_piped``.

    Reading raises EngineUnavailable when the engine breaks off. Of event streams whole events come out; on the node's own port
    the last before ``[DONE]``, or at the end, is a comment with the numbers, and a stream without its closing event raises too.
    """

    __slots__ = ("_answer", "_done", "_feeds", "_held", "_reader", "_response", "_source", "_steps")

    def __init__(
        self, source: Source, response: Response, answer: Answer, reader: StreamReader | BodyReader,
        steps: Sequence[StreamReader | BodyReader | ChatTidier | EndReader], held: bytes = b"",
    ) -> None:  # fmt: skip
        self._source = source
        self._response = response
        self._answer = answer
        self._reader = reader
        self._steps = steps
        self._feeds = tuple(step.feed for step in steps)
        self._held = held
        self._done = b""

    @property
    def is_piped(self) -> bool:
        return isinstance(self._response, HttpResponse)

    async def iterate(self) -> AsyncIterator[bytes]:
        try:
            if self._held:
                yield self._take(self._held)
            while chunk := await self._response.content.readany():
                if out := self._take(chunk):
                    yield out
        except (aiohttp.ClientError, OSError) as error:
            self._break_off(error)
        if last := self._finish():
            yield last

    async def pipe(self, write: Callable[[bytes], None]) -> None:
        """Call ``write`` with what goes out, as it comes; return after the last."""
        response, take, (first, *others), numbers = self._response, self._take, self._feeds, self._answer.numbers
        assert isinstance(response, HttpResponse)
        is_on_socket = self._source.request.on_socket
        cutter = self._reader.cutter if isinstance(self._reader, StreamReader) else None

        def pass_on(chunk: bytes) -> None:
            if numbers.first_byte_ms is None or not is_on_socket:
                if chunk := take(chunk):
                    write(chunk)
                return
            is_plain = cutter is not None and not cutter.held and not cutter.is_inside_event
            # ``in`` would first raise, and drop, an error that the word is no number.
            if not (is_plain and chunk.endswith(BLANK_LINES) and chunk.find(b'"usage"') < 0):
                chunk = first(chunk)
                if not chunk:
                    return
            for feed in others:
                chunk = feed(chunk)
                if not chunk:
                    return
            write(chunk)

        if self._held:
            pass_on(self._held)
        try:
            await response.pipe(pass_on)
        except (aiohttp.ClientError, OSError) as error:
            self._break_off(error)
        if last := self._finish():
            write(last)

    def pause(self) -> None:
        """Have the engine wait; only while ``pipe`` runs."""
        if isinstance(self._response, HttpResponse):
            self._response.pause()

    def resume(self) -> None:
        if isinstance(self._response, HttpResponse):
            self._response.resume()

    def _take(self, data: bytes) -> bytes:
        for feed in self._feeds:
            data = feed(data)
            if not data:
                break
        answer, source = self._answer, self._source
        numbers = answer.numbers
        if numbers.first_byte_ms is None:
            numbers.first_byte_ms = (clock.monotonic() - source.began) * 1000
        if source.request.on_socket or not answer.is_event_stream:
            return data  # through a gateway the engine's bytes pass as they are; the numbers travel beside them
        if data.endswith(_DONE):
            data, self._done = data[: -len(_DONE)], _DONE
        if b'"usage"' in data:
            self._count()
            data = _annotate_usage(data, numbers)
        return data

    def _break_off(self, error: Exception) -> None:
        """Raise EngineUnavailable, unless the engine had said everything: behind its closing event it has answered."""
        ends = self._answer.ends
        if ends is None or not ends.is_closed:
            raise self._source.report(error, began_answer=True) from None

    def _finish(self) -> bytes:
        """Return what goes out last; usage, numbers and how it ended are known then."""
        rest, answer = b"", self._answer
        for step in self._steps:
            rest = (step.feed(rest) if rest else b"") + step.finish()
        self._count()
        answer.usage = self._reader.usage()
        answer.numbers.fill_in(answer.usage)
        if answer.ends is not None:
            self._judge(answer, answer.ends)
        if self._source.request.on_socket or not answer.is_event_stream:
            return rest
        return rest + answer.numbers.comment() + self._done

    def _count(self) -> None:
        numbers = self._answer.numbers
        numbers.wall_ms = (clock.monotonic() - self._source.began) * 1000
        if isinstance(self._reader, StreamReader):
            numbers.take_stream(self._reader)

    def _judge(self, answer: Answer, ends: EndReader) -> None:
        """Note how a stream ended. Raises EngineUnavailable on the node's own port for one that just ended."""
        end = ends.judge()
        answer.has_failed = end is not StreamEnd.WHOLE
        if end is StreamEnd.CUT:
            self._source.report_cut()
            # Through a gateway such a stream just ends: the gateway sees that, and has a state of its own for it.
            if not self._source.request.on_socket:
                words = _read_words(ends.error)
                raise EngineUnavailable(words or "The engine ended its stream before its answer was finished.")


def headers_to_client(given: CIMultiDictProxy[str], *, is_event_stream: bool) -> dict[str, str]:
    """Return the response headers to pass on, lower-case, repeated ones joined by a comma."""
    kept: dict[str, str] = {}
    for name, value in given.items():
        lower = name.lower()
        if lower in NOT_TO_CLIENT or lower.startswith("access-control-"):
            continue
        if lower == "content-length" and is_event_stream:
            continue  # a chunk may be taken out of it
        kept[lower] = f"{kept[lower]}, {value}" if lower in kept else value
    return kept


def _read_words(error: bytes) -> str:
    try:
        said = msgspec.json.decode(error, type=_Failure).message
    except UNREADABLE:
        return ""
    return f"The engine failed: {said[: limits().engines.said_chars]}" if said else ""


def _annotate_usage(out: bytes, numbers: Numbers) -> bytes:
    extra = msgspec.json.encode(
        {
            "queue_wait_ms": round(numbers.queue_wait_ms),
            "gpu_time_ms": round(numbers.gpu_ms),
            "cache_tokens_reused": numbers.cached_tokens or 0,
        }
    )
    return _USAGE_CHUNK.sub(lambda found: found[1] + b',"muster":' + extra + b"}" + found[2], out, count=1)
