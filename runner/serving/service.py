"""Serving one request: choose the model, wait for a turn, ask a replica, hand on the answer, write down what it took."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
import msgspec

from runner.admission import TenantRates, Turn
from runner.engines.port import CHAT, MESSAGES, TOKENIZE, Call
from runner.errors import (
    EngineError,
    EngineNotReached,
    EngineUnavailable,
    InvalidRequest,
    ModalityUnsupported,
    ModelFailed,
    ModelLoading,
    ModelNotLoaded,
    ModelUnloading,
    RemoteNotAllowed,
    RequestRefused,
    Unavailable,
)
from runner.limits import limits
from runner.pool import Model, ModelState, Registry, Replica
from runner.serving.counting import Counting
from runner.serving.headers import INFERENCE_PATHS, headers_to_client, is_allowed_path
from runner.serving.numbers import Numbers
from runner.serving.request import Inference
from runner.serving.tally import Tally
from wire import clock
from wire.bridge import TokenCounts
from wire.engine_errors import Blame, correct_status, judge_error, quote_message, read_message
from wire.events import EndReader, StreamEnd, open_end_reader
from wire.messages_fields import FORMATS, find_unhonoured
from wire.tidy import ChatTidier
from wire.unreadable import UNREADABLE
from wire.usage import BodyReader, StreamReader, ask_for_usage

log = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"
_USAGE_CHUNK = re.compile(rb'(data: \{[^\n]*"choices"\s*:\s*\[\s*\][^\n]*"usage"[^\n]*)\}(\r?\n)')


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
    ends: EndReader | None = None
    """Of an engine's own event stream, where its dialect has a closing event: what passed of it."""


class _Failure(msgspec.Struct):
    message: str = ""


class Charge(Protocol):
    """Money set aside for one request to a remote model."""

    async def settle(self, answer: Answer | None, *, was_sent: bool) -> None:
        """Say how it ended: None = no answer came."""


class CostKeeper(Protocol):
    """Who watches what remote models cost."""

    async def reserve(self, model: Model, request: Inference) -> Charge:
        """Set aside the most that a request may cost. Raises SpendingCapReached."""


class Serving:
    """``queue_timeout_s``: longest wait for a turn. ``on_load`` hears when a request begins or ends.

    ``keeps_engine_errors``: whether the log has what an engine says when it refuses or fails.
    """

    def __init__(
        self, registry: Registry, *, rates: TenantRates, tally: Tally, costs: CostKeeper | None, queue_timeout_s: float,
        on_load: Callable[[], None], keeps_engine_errors: bool = True,
    ) -> None:  # fmt: skip
        self.registry = registry
        self._rates = rates
        self._costs = costs
        self._counting = Counting()
        self._queue_timeout_s = queue_timeout_s
        self._limits = limits().serving
        self._on_load = on_load
        self._keeps_engine_errors = keeps_engine_errors
        self._idle = asyncio.Event()
        self._idle.set()
        self.tally = tally
        self.load = 0
        """Requests that run or wait, from gateways and from the node's own port."""
        self.own_load = 0
        """Those among them that came to the node's own port."""
        self.is_stopping = False

    async def wait_idle(self) -> None:
        """Return when nothing runs or waits."""
        await self._idle.wait()

    @asynccontextmanager
    async def open(self, request: Inference) -> AsyncIterator[Answer]:
        """Serve a request for as long as the context lasts; leaving it early frees the engine. Raises RequestRefused."""
        if request.endpoint == TOKENIZE:
            yield await self._count(request)
            return
        model: Model | None = None
        answer: Answer | None = None
        status = "cancelled"
        try:
            model = self._select(request)
            if not request.on_socket:
                self._rates.take(request.tenant)
            async with self._serve(model, request) as answer:
                yield answer
            status = _name_end(answer)
        except RequestRefused as refusal:
            status = "refused" if answer is None and not isinstance(refusal, EngineUnavailable) else "error"
            self.tally.count_refusal(refusal.code)
            raise
        finally:
            if model is not None:
                self._write_down(model, request, answer, status)

    async def _count(self, request: Inference) -> Answer:
        """Return how many tokens a prompt has. It is no inference: it takes no turn, and no account of those counts it."""
        try:
            model = self._select(request)
            if not request.on_socket:
                self._rates.take(request.tenant)
            body, waited_ms = await self._counting.count(model, request)
        except RequestRefused as refusal:
            self.tally.count_refusal(refusal.code)
            raise
        numbers = Numbers(queue_wait_ms=waited_ms)
        headers = {"content-type": "application/json", "content-length": str(len(body)), **numbers.headers()}
        return Answer(200, headers, body=body, numbers=numbers)

    def _select(self, request: Inference) -> Model:
        """Return the model that is to serve. Raises RequestRefused for everything that can be told without waiting."""
        if self.is_stopping:
            raise Unavailable("The box is shutting down.", retry_after_s=5)
        if request.method not in {"GET", "POST"} or not is_allowed_path(request.path):
            raise InvalidRequest("This box serves GET and POST below /v1/ only.")
        model = self.registry.find(request.model)
        if not model.is_ready:
            raise _explain_state(model)
        capabilities = model.capabilities
        if request.endpoint == MESSAGES and not request.on_socket:
            _refuse_forgotten_format(model, request.body)
        answered = capabilities.endpoints or INFERENCE_PATHS
        if request.method == "POST" and request.endpoint not in answered:
            raise ModalityUnsupported(
                f"{model.model_id} does not answer {request.endpoint}; it answers {', '.join(answered)}.",
                param="model",
            )
        if capabilities.is_remote and not request.allow_remote:
            raise RemoteNotAllowed(
                f"{model.model_id} is a remote model: set allow_remote to true to let this request leave the box.",
                param="allow_remote",
            )
        return model

    @asynccontextmanager
    async def _serve(self, model: Model, request: Inference) -> AsyncIterator[Answer]:
        charge = await self._costs.reserve(model, request) if self._costs and model.capabilities.is_remote else None
        answer: Answer | None = None
        was_sent = False
        try:
            self._change_load(1, request)
            queue = model.queue
            turn = await queue.enter(tenant=request.tenant, priority=request.priority, timeout_s=self._queue_timeout_s)
            try:
                if model.state is ModelState.UNLOADED:
                    raise _explain_state(model)
                was_sent = True
                async with self._exchange(model, request, turn) as answer:
                    yield answer
            except RequestRefused as refusal:
                # Only an engine that was reached and then failed may have done, and may charge for, some of the work.
                was_sent = isinstance(refusal, EngineUnavailable) and not isinstance(refusal, EngineNotReached)
                raise
            finally:
                queue.leave(turn)
        finally:
            self._change_load(-1, request)
            if charge is not None:
                await asyncio.shield(charge.settle(answer, was_sent=was_sent))

    @asynccontextmanager
    async def _exchange(self, model: Model, request: Inference, turn: Turn) -> AsyncIterator[Answer]:
        """Ask a replica and yield its answer."""
        replica = model.pick()
        if replica is None:
            raise EngineNotReached(f"{model.model_id} has no replica that serves right now.", retry_after_s=2)
        body, drops_usage = ask_for_usage(request.path, request.body)
        call = Call(
            request.method, request.path, request.headers, body, request.tenant, request.cache_mode, request.cache_tag,
            request.priority,
        )  # fmt: skip
        forgotten: tuple[str, ...] = ()
        if request.endpoint == MESSAGES and not request.on_socket:  # else the gateway has seen to it
            forgotten = find_unhonoured([replica.supervisor.engine.name], request.body)
        replica.active += 1
        try:
            began = clock.monotonic()
            context = replica.supervisor.engine.stream(call)
            try:
                response = await context.__aenter__()
            except (aiohttp.ClientError, EngineError, OSError) as error:
                raise _report(replica, request, error, began_answer=False) from None
            try:
                tidy = model.definition.tidy
                answer = await self._begin(
                    replica, request, response, turn, began=began, drops_usage=drops_usage,
                    is_tidied=replica.capabilities.needs_tidying if tidy is None else tidy,
                )  # fmt: skip
                if answer.status >= 400:
                    await self._take_error(request, answer)
                if forgotten:
                    answer.headers["x-muster-ignored"] = ", ".join(forgotten)[: self._limits.ignored_chars]
                try:
                    yield answer
                finally:
                    if answer.has_failed and answer.ends is not None:
                        message = read_message(b'{"error":%b}' % answer.ends.error) if answer.ends.error else ""
                        await self._log_error(request, answer.status, message)
            finally:
                await context.__aexit__(None, None, None)
        except RequestRefused:
            raise
        except BaseException:
            replica.supervisor.watch_left(len(body))
            raise
        finally:
            replica.active -= 1

    async def _begin(
        self, replica: Replica, request: Inference, response: aiohttp.ClientResponse, turn: Turn, *, began: float,
        drops_usage: bool, is_tidied: bool,
    ) -> Answer:  # fmt: skip
        is_stream = response.content_type == "text/event-stream"
        headers = headers_to_client(response.headers, is_event_stream=is_stream)
        numbers = Numbers(queue_wait_ms=turn.waited_ms)
        answer = Answer(response.status, headers, is_event_stream=is_stream, numbers=numbers)
        if gpu_ms := headers.pop("x-gpu-time-ms", ""):
            numbers.reported_gpu_ms = float(gpu_ms) if gpu_ms.replace(".", "", 1).isdigit() else None
        if is_stream:
            headers["x-queue-wait-ms"] = str(round(turn.waited_ms))
            abilities = replica.capabilities
            if abilities.keeps_nothing or (abilities.isolates_tenants and request.cache_mode == "none"):
                headers |= {"x-cache-hit": "false", "x-cache-tokens-reused": "0"}
            reader = StreamReader(drops_usage=drops_usage)
            answer.ends = open_end_reader(request.endpoint, holds=False) if response.status < 300 else None
            tidier = ChatTidier() if request.endpoint == CHAT and is_tidied else None
            answer.chunks = _stream_events(replica, request, response, answer, reader, tidier, began=began)
            return answer
        length, held = response.content_length, b""
        is_whole = response.status >= 400 or response.content_type.endswith("json")
        # An answer is read to its end before its headers leave, because those carry final numbers. Where its length is not
        # told, JSON alone: other kinds, such as sound, may be meant to be played as they come.
        if length <= self._limits.whole_bytes if length is not None else is_whole:
            held = await _read_whole(replica, request, response, answer, began=began)
        if answer.body is None:
            headers["x-queue-wait-ms"] = str(round(turn.waited_ms))
            answer.chunks = _stream_body(replica, request, response, answer, held, began=began)
        return answer

    async def _take_error(self, request: Inference, answer: Answer) -> None:
        """Log what an engine refused a request with. Raises ModalityUnsupported where it calls the caller's mistake its own."""
        message = read_message(answer.body or b"")
        await self._log_error(request, answer.status, message)
        if correct_status(answer.status, message) != answer.status:
            raise ModalityUnsupported(message[: self._limits.message_chars])

    async def _log_error(self, request: Inference, status: int, message: str) -> None:
        """Write one line of an engine's error, with its words as far as they are none of the request's."""
        asked, quoted = request.body, ""
        if self._keeps_engine_errors:
            is_large = len(asked) > self._limits.thread_bytes
            quoted = await asyncio.to_thread(quote_message, message, asked) if is_large else quote_message(message, asked)
        log.warning(
            "engine answered with an error request=%s model=%s path=%s status=%d error=%s",
            request.request_id or "-", request.model, request.endpoint, status, quoted or "-",
        )  # fmt: skip

    def _change_load(self, by: int, request: Inference) -> None:
        self.load += by
        self.own_load += 0 if request.on_socket else by
        if self.load:
            self._idle.clear()
        else:
            self._idle.set()
        self._on_load()

    def _write_down(self, model: Model, request: Inference, answer: Answer | None, status: str) -> None:
        tally = self.tally
        tally.count(model=model.model_id, tenant=request.tenant, status=status)
        if answer is None:
            return
        mine, numbers = tally.of(model.model_id), answer.numbers
        mine.waits.observe(numbers.queue_wait_ms / 1000)
        if status == "success":
            mine.durations.observe(numbers.wall_ms / 1000)
        mine.prompt_tokens += numbers.prompt_tokens or 0
        mine.cached_tokens += numbers.cached_tokens or 0
        mine.output_tokens += numbers.output_tokens or 0


async def _read_whole(
    replica: Replica, request: Inference, response: aiohttp.ClientResponse, answer: Answer, *, began: float
) -> bytes:
    """Read an answer to its end; its headers then say what it took. Return what was read of one that is too long for that."""
    reader = BodyReader(is_readable=response.status < 300 and response.content_type.endswith("json"))
    try:
        held, is_whole = await _hold(response)
    except (aiohttp.ClientError, OSError) as error:
        raise _report(replica, request, error, began_answer=False) from None
    if not is_whole:
        return held
    body = reader.feed(held)
    numbers = answer.numbers
    numbers.wall_ms = (clock.monotonic() - began) * 1000
    if response.content_type.endswith("json"):
        numbers.take(body)
    answer.usage = reader.usage()
    answer.body = body
    answer.headers |= numbers.headers()
    return b""


async def _hold(response: aiohttp.ClientResponse) -> tuple[bytes, bool]:
    """Return a body and True; of one of unknown length that goes beyond ``whole_bytes``, its beginning and False."""
    if response.content_length is not None:
        return await response.read(), True
    held, whole_bytes = bytearray(), limits().serving.whole_bytes
    while chunk := await response.content.readany():
        held += chunk
        if len(held) > whole_bytes:
            return bytes(held), False
    return bytes(held), True


async def _stream_events(
    replica: Replica,
    request: Inference,
    response: aiohttp.ClientResponse,
    answer: Answer,
    reader: StreamReader,
    tidier: ChatTidier | None,
    *,
    began: float,
) -> AsyncIterator[bytes]:
    """Yield whole events; on the box's own port the last before ``[DONE]``, or at the end, is a comment with the numbers.

    Raises EngineUnavailable when the engine breaks off, and on the box's own port when it ends without its closing event:
    through a gateway such a stream just ends, for the gateway sees that too and has a state of its own for it.
    """
    numbers, held = answer.numbers, b""
    ends = answer.ends
    steps: list[StreamReader | ChatTidier | EndReader] = [step for step in (reader, tidier, ends) if step is not None]
    try:
        while chunk := await response.content.readany():
            out = _feed(steps, chunk)
            if numbers.first_byte_ms is None:
                numbers.first_byte_ms = (clock.monotonic() - began) * 1000
            if not out:
                continue
            if out.endswith(_DONE) and not request.on_socket:
                out, held = out[: -len(_DONE)], _DONE
            if b'"usage"' in out and not request.on_socket:
                _finish(numbers, reader, began)
                out = _annotate_usage(out, numbers)
            if out:
                yield out
    except (aiohttp.ClientError, OSError) as error:
        if ends is None or not ends.is_closed:  # behind its closing event an engine has answered
            raise _report(replica, request, error, began_answer=True) from None
    rest = b""
    for step in steps:
        rest = (step.feed(rest) if rest else b"") + step.finish()
    _finish(numbers, reader, began)
    answer.usage = reader.usage()
    if ends is not None:
        _judge(replica, request, answer, ends)
    # Through a gateway the engine's bytes pass as they are; the numbers travel beside them.
    if last := rest + (b"" if request.on_socket else numbers.comment()) + held:
        yield last


def _feed(steps: Iterable[StreamReader | ChatTidier | EndReader], data: bytes) -> bytes:
    """Return what is left of a chunk once each has taken it from the one before; nothing is fed once nothing is left."""
    for step in steps:
        data = step.feed(data) if data else data
    return data


async def _stream_body(
    replica: Replica, request: Inference, response: aiohttp.ClientResponse, answer: Answer, held: bytes, *, began: float
) -> AsyncIterator[bytes]:
    """Yield a body that is too long to be held, or of unknown length; ``held`` was read of it already."""
    reader = BodyReader(is_readable=response.status < 300 and response.content_type.endswith("json"))
    try:
        if held:
            yield reader.feed(held)
        while chunk := await response.content.readany():
            yield reader.feed(chunk)
    except (aiohttp.ClientError, OSError) as error:
        raise _report(replica, request, error, began_answer=True) from None
    answer.numbers.wall_ms = (clock.monotonic() - began) * 1000
    answer.usage = reader.usage()


def _judge(replica: Replica, request: Inference, answer: Answer, ends: EndReader) -> None:
    """Note how a stream ended. Raises EngineUnavailable on the box's own port for one that just ended."""
    end = ends.judge()
    answer.has_failed = end is not StreamEnd.WHOLE
    if end is StreamEnd.CUT:
        replica.supervisor.report_failure(f"{request.method} {request.endpoint}: the stream ended early")
        if not request.on_socket:
            words = _read_words(ends.error)
            raise EngineUnavailable(words or "The engine ended its stream before its answer was finished.")


def _read_words(error: bytes) -> str:
    """Return what an engine's error event says, as far as it is text; nothing without one."""
    try:
        said = msgspec.json.decode(error, type=_Failure).message
    except UNREADABLE:
        return ""
    return f"The engine failed: {said[: limits().engines.said_chars]}" if said else ""


def _finish(numbers: Numbers, reader: StreamReader, began: float) -> None:
    numbers.wall_ms = (clock.monotonic() - began) * 1000
    numbers.take_stream(reader)


def _annotate_usage(out: bytes, numbers: Numbers) -> bytes:
    """Add our numbers to the usage chunk of a client that asked for one."""
    extra = msgspec.json.encode(
        {
            "queue_wait_ms": round(numbers.queue_wait_ms),
            "gpu_time_ms": round(numbers.gpu_ms),
            "cache_tokens_reused": numbers.cached_tokens or 0,
        }
    )
    return _USAGE_CHUNK.sub(lambda found: found[1] + b',"muster":' + extra + b"}" + found[2], out, count=1)


def _report(replica: Replica, request: Inference, error: Exception, *, began_answer: bool) -> EngineUnavailable:
    """Have the replica looked at; return what the client hears."""
    reason = type(error).__name__
    replica.supervisor.report_failure(f"{request.method} {request.endpoint}: {reason}")
    when = "broke off in the middle of its answer" if began_answer else "did not answer"
    is_reached = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return (EngineUnavailable if is_reached else EngineNotReached)(
        f"The engine {when} ({reason}).", retry_after_s=None if began_answer else 2
    )


def _name_end(answer: Answer) -> str:
    """Return as what a request is counted that its engine answered."""
    if answer.status >= 400 and judge_error(answer.status) is Blame.CALLER:
        return "refused"
    return "success" if answer.status < 400 and not answer.has_failed else "error"


def _refuse_forgotten_format(model: Model, body: bytes) -> None:
    """Raise InvalidRequest when a replica's engine would answer in another shape than the Messages request asks for."""
    names = {replica.supervisor.engine.name for replica in model.replicas}
    path = next((path for path in find_unhonoured(names, body) if path in FORMATS), None)
    if path is not None:
        raise InvalidRequest(
            f"The engine of {model.model_id} does not keep to '{path}' on {MESSAGES}, and a node translates nothing: ask "
            f"through a gateway, or ask on {CHAT} with response_format.",
            param=path,
        )


def _explain_state(model: Model) -> RequestRefused:
    name = model.model_id
    match model.state:
        case ModelState.LOADING:
            eta = model.load.eta_s() if model.load is not None else None
            return ModelLoading(f"{name} is being loaded; try again when that has ended.", retry_after_s=eta or 5)
        case ModelState.UNLOADING:
            return ModelUnloading(f"{name} is being unloaded.")
        case ModelState.FAILED:
            return ModelFailed(f"{name} does not serve: {model.last_error or 'its engine is down'}.")
        case _:
            return ModelNotLoaded(f"{name} is not loaded on this box.")
