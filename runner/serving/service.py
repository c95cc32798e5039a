"""Serving one request: choose the model, wait for a turn, ask a replica, hand on the answer, write down what it took."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import aiohttp
import msgspec

from runner.definitions.fields import Decoding
from runner.definitions.settings import Fairness
from runner.engines.port import CHAT, CONTINUATIONS, MESSAGES, POOL_RESPONSES, RESPONSES, TOKENIZE, Call, Capabilities, Response
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
from runner.pool.models import Model, ModelState, Registry, Replica
from runner.queue import FairQueue, TenantRates, Turn, WaitBudget
from runner.serving.costs import Charge, Costs
from runner.serving.request import (
    INFERENCE_PATHS,
    Answer,
    Counters,
    Flow,
    Inference,
    Numbers,
    ask_to_continue,
    headers_to_client,
    is_allowed_path,
)
from runner.serving.responses import answer_pool, uses_pool_shape
from runner.serving.traces import SlotTrace, begin_trace
from wire import clock
from wire.engine_errors import Blame, correct_status, judge_error, quote_message, read_message
from wire.events import open_end_reader
from wire.limits import WIRE
from wire.logs import RequestFields, bind_request
from wire.messages_fields import FORMATS, find_unhonoured
from wire.tidy import ChatTidier
from wire.unreadable import UNREADABLE
from wire.usage import BodyReader, StreamReader, ask_for_usage

if TYPE_CHECKING:
    from wire.spans import Traces

log = logging.getLogger(__name__)

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text_decoder = msgspec.json.Decoder(str)


class Serving:
    """The one way in for a request, from the node's port or a gateway.

    ``queue_timeout_s``: longest wait for a turn. ``wakes`` are set when a request begins or ends. ``decoding``: the defaults of
    llm-pool's requests as the settings have them now.

    ``keeps_engine_errors``: whether the log has what an engine says when it refuses or fails.
    """

    def __init__(
        self, registry: Registry, *, rates: TenantRates, counters: Counters, costs: Costs | None, queue_timeout_s: float,
        wakes: Collection[asyncio.Event], decoding: Callable[[], Decoding], keeps_engine_errors: bool = True,
    ) -> None:  # fmt: skip
        self.registry = registry
        self.rates = rates
        self.costs = costs
        self._counting = Counting()
        self.queue_timeout_s = queue_timeout_s
        self.limits = limits().serving
        self._wakes = wakes
        self._keeps_engine_errors = keeps_engine_errors
        self.traces: Traces | None = None
        """None: nothing is traced."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.counters = counters
        self.load = 0
        """Requests that run or wait, from gateways and from the node's own port."""
        self.own_load = 0
        """Those among them that came to the node's own port."""
        self.is_stopping = False
        self._decoding = decoding

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def open(self, request: Inference) -> AbstractAsyncContextManager[Answer]:
        """Return the context that serves a request; leaving it early frees the engine. Entering raises RequestRefused."""
        path = request.endpoint
        is_pool_shaped = path == RESPONSES and uses_pool_shape(request.body, on_socket=request.on_socket)
        if is_pool_shaped or path == POOL_RESPONSES:
            return answer_pool(request, registry=self.registry, defaults=self._decoding(), open_chat=self.open)
        return Slot(self, request)

    async def count(self, request: Inference) -> Answer:
        """Return how many tokens a prompt has. It is no inference: it takes no turn, and no account of those counts it."""
        try:
            model = self.select(request)
            if not (request.on_socket or request.has_ticket):
                self.rates.take(request.tenant)
            body, waited_ms = await self._counting.count(model, request)
        except RequestRefused as refusal:
            self.counters.count_refusal(refusal.code)
            raise
        numbers = Numbers(queue_wait_ms=waited_ms)
        headers = {"content-type": "application/json", "content-length": str(len(body)), **numbers.headers()}
        return Answer(200, headers, body=body, numbers=numbers)

    def select(self, request: Inference) -> Model:
        """Return the model that is to serve. Raises RequestRefused for everything that can be told without waiting."""
        if self.is_stopping:
            raise Unavailable("The node is shutting down.", retry_after_s=5)
        if request.method not in {"GET", "POST"} or not is_allowed_path(request.path):
            raise InvalidRequest("This node serves GET and POST below /v1/ only.")
        model = self.registry.find(request.model)
        if not model.is_ready:
            raise _explain_state(model)
        capabilities = model.capabilities
        if request.endpoint == MESSAGES and not request.on_socket:
            _refuse_forgotten_format(model, request.body)
        answered = capabilities.endpoints or INFERENCE_PATHS
        if request.method == "POST" and request.endpoint not in answered:
            raise ModalityUnsupported(
                f"{model.model_id} does not answer {request.endpoint}; it answers {', '.join(answered)}.", param="model"
            )
        if capabilities.is_remote and not request.allow_remote:
            raise RemoteNotAllowed(
                f"{model.model_id} is a remote model: set allow_remote to true to let this request leave the node.",
                param="allow_remote",
            )
        return model

    def translate_continuation(self, request: Inference) -> Inference:
        """Return the chat by which the model's engine goes on with an answer that began elsewhere. Raises RequestRefused."""
        continuation = self.registry.find(request.model).capabilities.continuation
        if continuation is None:
            raise ModalityUnsupported(f"{request.model} cannot go on with an answer that began elsewhere.", param="model")
        return replace(request, path=CHAT, body=ask_to_continue(request.body, continuation))

    async def take_error(self, request: Inference, answer: Answer) -> None:
        """Log what an engine refused a request with. Raises ModalityUnsupported where it calls the caller's mistake its own."""
        message = read_message(answer.body or b"")
        await self.log_error(request, answer.status, message)
        if correct_status(answer.status, message) != answer.status:
            raise ModalityUnsupported(message[: self.limits.message_chars])

    async def log_error(self, request: Inference, status: int, message: str) -> None:
        """Write one line of an engine's error, with its words as far as they are none of the request's."""
        asked, quoted = request.body, ""
        if self._keeps_engine_errors:
            is_large = len(asked) > self.limits.thread_bytes
            quoted = await asyncio.to_thread(quote_message, message, asked) if is_large else quote_message(message, asked)
        log.warning(
            "engine answered with an error request=%s model=%s path=%s status=%d error=%s",
            request.request_id or "-", request.model, request.endpoint, status, quoted or "-",
        )  # fmt: skip

    def change_load(self, by: int, request: Inference) -> None:
        self.load += by
        self.own_load += 0 if request.on_socket else by
        if self.load:
            self._idle.clear()
        else:
            self._idle.set()
        for wake in self._wakes:
            wake.set()

    def write_down(self, model: Model, request: Inference, answer: Answer | None, status: str) -> None:
        counters = self.counters
        counters.count(model=model.model_id, tenant=request.tenant, status=status)
        if answer is None:
            return
        mine, numbers = counters.of(model.model_id), answer.numbers
        mine.waits.observe(numbers.queue_wait_ms / 1000)
        if status == "success":
            mine.durations.observe(numbers.wall_ms / 1000)
        mine.prompt_tokens += numbers.prompt_tokens or 0
        mine.cached_tokens += numbers.cached_tokens or 0
        mine.output_tokens += numbers.output_tokens or 0


@dataclass(slots=True, eq=False)
class Slot:
    """One request from its place in the queue to the end of its answer: it holds the turn, the replica and the engine's answer.

    Whoever reads the answer owns it: leaving the context gives all of that back, once, however the answer ended.
    """

    _serving: Serving
    request: Inference
    began: float = 0.0
    _model: Model | None = None
    _charge: Charge | None = None
    _turn: Turn | None = None
    _replica: Replica | None = None
    _context: AbstractAsyncContextManager[Response] | None = None
    _is_counted: bool = False
    _body: bytes = b""
    _answer: Answer | None = None
    _fields: RequestFields | None = None
    _trace: SlotTrace | None = None

    async def __aenter__(self) -> Answer:
        endpoint = self.request.endpoint
        self._fields = bind_request(self._describe)
        if endpoint == TOKENIZE:
            return await self._serving.count(self.request)
        if endpoint == CONTINUATIONS:
            self.request = self._serving.translate_continuation(self.request)
        if self._serving.traces is not None:
            self._trace = begin_trace(self._serving.traces, self.request)
        try:
            answer = await self._enter()
        except BaseException as error:
            await self._leave(error)
            raise
        self._answer = answer
        return answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._answer is not None:
            await self._leave(error)

    async def _enter(self) -> Answer:
        serving, request = self._serving, self.request
        self._model = model = serving.select(request)
        if not (request.on_socket or request.has_ticket):  # of others the gateway has counted it
            serving.rates.take(request.tenant)
        if serving.costs is not None and model.capabilities.is_remote:
            self._charge = await serving.costs.reserve(model, request)
        serving.change_load(1, request)
        self._is_counted = True
        turn = await model.queue.enter(tenant=request.tenant, priority=request.priority, timeout_s=serving.queue_timeout_s)
        self._turn = turn
        if model.state is ModelState.UNLOADED:
            raise _explain_state(model)
        replica = model.pick()
        if replica is None:
            raise EngineNotReached(f"{model.model_id} has no replica that serves right now.", retry_after_s=2)
        self._body, drops_usage = request.body, False
        if request.is_streaming:
            self._body, drops_usage = ask_for_usage(request.path, request.body)
        engine, forgotten, headers = replica.supervisor.engine, "", request.headers
        if self._trace is not None:
            headers = {**headers, **self._trace.ask_engine(engine.name, model.model_id, turn)}
        call = Call(
            request.method, request.path, headers, self._body, request.tenant, request.cache_mode, request.cache_tag,
            request.priority,
        )  # fmt: skip
        if request.endpoint == MESSAGES and not request.on_socket:  # else the gateway has seen to it
            forgotten = ", ".join(find_unhonoured([engine.name], request.body))
        replica.active += 1
        self._replica = replica
        self.began = clock.monotonic()
        try:
            context = engine.stream(call)
            response = await context.__aenter__()
        except (aiohttp.ClientError, EngineError, OSError) as error:
            raise self.report(error, began_answer=False) from None
        self._context = context
        answer = await self._begin(replica, response, turn, drops_usage=drops_usage)
        if answer.status >= 400:
            await serving.take_error(request, answer)
        if forgotten:
            answer.headers["x-muster-ignored"] = forgotten[: serving.limits.ignored_chars]
        return answer

    async def _begin(self, replica: Replica, response: Response, turn: Turn, *, drops_usage: bool) -> Answer:
        """Return the answer as it is passed on, a short one whole. Raises EngineUnavailable."""
        request, kind = self.request, response.content_type
        is_stream = kind == "text/event-stream"
        headers = headers_to_client(response.headers, is_event_stream=is_stream)
        numbers = Numbers(queue_wait_ms=turn.waited_ms)
        answer = Answer(response.status, headers, is_event_stream=is_stream, numbers=numbers)
        if gpu_ms := headers.pop("x-gpu-time-ms", ""):
            numbers.reported_gpu_ms = float(gpu_ms) if gpu_ms.replace(".", "", 1).isdigit() else None
        if is_stream:
            abilities = replica.capabilities
            if abilities.keeps_nothing or (abilities.isolates_tenants and request.cache_mode == "none"):
                headers |= {"x-cache-hit": "false", "x-cache-tokens-reused": "0"}
            reader = StreamReader(drops_usage=drops_usage)
            answer.ends = open_end_reader(request.endpoint, holds=False) if response.status < 300 else None
            wanted = self._tidies(abilities)
            tidier = ChatTidier() if request.endpoint == CHAT and wanted else None
            steps = [step for step in (reader, tidier, answer.ends) if step is not None]
            answer.flow = Flow(self, response, answer, reader, steps)
        else:
            length, held, is_json = response.content_length, b"", kind.endswith("json")
            # An answer is read to its end before its headers leave, because those carry final numbers. Where its length is not
            # told, JSON alone: other kinds, such as sound, may be meant to be played as they come.
            is_whole = response.status >= 400 or is_json
            if length <= self._serving.limits.whole_bytes if length is not None else is_whole:
                held = await self._read_whole(response, answer, is_json=is_json)
            if answer.body is not None:
                return answer
            body_reader = BodyReader(is_readable=response.status < 300 and is_json)
            answer.flow = Flow(self, response, answer, body_reader, [body_reader], held)
        headers["x-queue-wait-ms"] = str(round(turn.waited_ms))
        answer.chunks = answer.flow.iterate()
        return answer

    def _tidies(self, abilities: Capabilities) -> bool:
        assert self._model is not None
        tidy = self._model.definition.tidy
        return abilities.needs_tidying if tidy is None else tidy

    async def _read_whole(self, response: Response, answer: Answer, *, is_json: bool) -> bytes:
        """Read an answer to its end; its headers then say what it took. Return what was read of one too long for that."""
        try:
            body, is_whole = await _hold(response)
        except (aiohttp.ClientError, OSError) as error:
            raise self.report(error, began_answer=False) from None
        if not is_whole:
            return body
        numbers = answer.numbers
        numbers.wall_ms = (clock.monotonic() - self.began) * 1000
        if is_json:
            found = numbers.take(body)
            if response.status < 300 and len(body) <= WIRE.usage_body_bytes:
                answer.usage = found
        answer.body = body
        answer.headers |= numbers.headers()
        return b""

    async def _leave(self, error: BaseException | None) -> None:
        answer, request = self._answer, self.request
        try:
            await self._let_go(error)
        finally:
            if self._fields is not None:
                self._fields.close()
            status = "cancelled"
            if error is None and answer is not None:
                status = _name_end(answer)
            elif isinstance(error, RequestRefused):
                status = "refused" if answer is None and not isinstance(error, EngineUnavailable) else "error"
                self._serving.counters.count_refusal(error.code)
            if self._model is not None:
                self._serving.write_down(self._model, request, answer, status)
            if self._trace is not None:
                self._trace.finish(answer, status, error=error.code if isinstance(error, RequestRefused) else "")

    async def _let_go(self, error: BaseException | None) -> None:
        answer, request, serving = self._answer, self.request, self._serving
        try:
            if answer is not None and answer.has_failed and answer.ends is not None:
                message = read_message(b'{"error":%b}' % answer.ends.error) if answer.ends.error else ""
                await serving.log_error(request, answer.status, message)
        finally:
            try:
                if self._context is not None:
                    await self._context.__aexit__(None, None, None)
            finally:
                await self._free(error)

    def _describe(self) -> dict[str, object]:
        """Return what a line of the log says of the request."""
        request = self.request
        return {"request": request.request_id, "tenant": request.tenant, "model": request.model}

    async def _free(self, error: BaseException | None) -> None:
        model, replica, turn = self._model, self._replica, self._turn
        if replica is not None:
            if error is not None and not isinstance(error, RequestRefused):
                replica.supervisor.watch_left(len(self._body))
            replica.active -= 1
        if turn is not None and model is not None:
            model.queue.leave(turn)
        if self._is_counted:
            self._serving.change_load(-1, self.request)
        costs = self._serving.costs
        if costs is not None and self._charge is not None:
            was_sent = turn is not None
            if isinstance(error, RequestRefused):
                # Only an engine that was reached and then failed may have done, and may charge for, some of the work.
                was_sent = isinstance(error, EngineUnavailable) and not isinstance(error, EngineNotReached)
            await asyncio.shield(costs.settle(self._charge, self._answer, was_sent=was_sent))

    def report(self, error: Exception, *, began_answer: bool) -> EngineUnavailable:
        """Have the replica looked at; return what the client hears."""
        reason, request = type(error).__name__, self.request
        assert self._replica is not None
        self._replica.supervisor.report_failure(f"{request.method} {request.endpoint}: {reason}")
        when = "broke off in the middle of its answer" if began_answer else "did not answer"
        is_reached = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        return (EngineUnavailable if is_reached else EngineNotReached)(
            f"The engine {when} ({reason}).", retry_after_s=None if began_answer else 2
        )

    def report_cut(self) -> None:
        assert self._replica is not None
        self._replica.supervisor.report_failure(f"{self.request.method} {self.request.endpoint}: the stream ended early")


async def _hold(response: Response) -> tuple[bytes, bool]:
    """Return a body and True; of one of unknown length that goes beyond ``whole_bytes``, its beginning and False."""
    if response.content_length is not None:
        return await response.read(), True
    held, whole_bytes = bytearray(), limits().serving.whole_bytes
    while chunk := await response.content.readany():
        held += chunk
        if len(held) > whole_bytes:
            return bytes(held), False
    return bytes(held), True


def _name_end(answer: Answer) -> str:
    if answer.status >= 400 and judge_error(answer.status) is Blame.CALLER:
        return "refused"
    return "success" if answer.status < 400 and not answer.has_failed else "error"


def _refuse_forgotten_format(model: Model, body: bytes) -> None:
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
        case ModelState.LOADED:
            assert model.plan is not None
            assert model.plan.cluster is not None
            return ModelNotLoaded(f"{name} is served by {model.plan.cluster.head.name}; this node only lends its GPUs to it.")
        case ModelState.UNLOADED:
            return ModelNotLoaded(f"{name} is not loaded on this node.")


class Counting:
    """Token counts beside the inference queue: a prompt is counted while others generate, and takes no turn from them.

    Bounded all the same: few counts at once for each model, a fair and short line of those who wait, and an answer in seconds
    or a refusal.
    """

    def __init__(self) -> None:
        self._limits = bounds = limits().serving
        self._waiting = Fairness(
            pending_per_key=bounds.count_waiting_of_tenant, pending_per_executor=bounds.count_waiting_of_model
        )
        self._working: set[asyncio.Task[bytes]] = set()
        self._queues: WeakKeyDictionary[Model, FairQueue] = WeakKeyDictionary()
        self._budget = WaitBudget(bounds.count_waiting)

    async def count(self, model: Model, request: Inference) -> tuple[bytes, float]:
        """Return the answer ``{"count", "max_model_len"}`` as JSON, and the milliseconds that were waited for a turn.

        Raises RequestRefused.
        """
        fields = {**read_question(request.body), "model": msgspec.Raw(msgspec.json.encode(model.model_id))}
        queue = self._queue_of(model)
        turn = await queue.enter(tenant=request.tenant, priority=request.priority, timeout_s=self._limits.count_s)
        work = asyncio.create_task(_ask_count(model, fields))
        self._working.add(work)
        work.add_done_callback(lambda done: self._end(done, queue, turn))
        # An engine goes on with a long text when nobody waits for it any more, so its turn is taken until it has ended.
        await asyncio.wait({work}, timeout=self._limits.count_s)
        if not work.done():
            raise EngineUnavailable(f"The engine did not count within {self._limits.count_s:g} s.", retry_after_s=2)
        return work.result(), turn.waited_ms

    def _end(self, work: asyncio.Task[bytes], queue: FairQueue, turn: Turn) -> None:
        self._working.discard(work)
        queue.leave(turn)
        if not work.cancelled():
            work.exception()  # whoever still waited has heard it

    def _queue_of(self, model: Model) -> FairQueue:
        queue = self._queues.get(model)
        if queue is None:
            queue = FairQueue(
                slots=self._limits.counts, limits=self._waiting, budget=self._budget, weight_of=lambda _tenant: 1.0
            )
            self._queues[model] = queue
        return queue


def read_question(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the members of a body that has either ``messages``, as a list, or ``prompt``, as a text. Raises InvalidRequest."""
    if len(body) > limits().serving.count_bytes:
        raise InvalidRequest(f"The tokens of a body of more than {limits().serving.count_bytes} bytes are not counted.")
    try:
        fields = _fields_decoder.decode(body)
    except UNREADABLE:
        raise InvalidRequest("The request body must be a JSON object.") from None
    fields = {name: value for name, value in fields.items() if len(memoryview(value)) > 4 or bytes(value) != b"null"}
    if ("messages" in fields) == ("prompt" in fields):
        raise InvalidRequest("Send either 'messages' or 'prompt'.", param="messages")
    if "messages" in fields and bytes(memoryview(fields["messages"])[:1]) != b"[":
        raise InvalidRequest("The field 'messages' must be a list.", param="messages")
    if "prompt" in fields:
        _check_text(fields["prompt"])
    return fields


def _check_text(prompt: msgspec.Raw) -> None:
    try:
        _text_decoder.decode(prompt)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest("The field 'prompt' must be a text.", param="prompt") from None


async def _ask_count(model: Model, fields: Mapping[str, msgspec.Raw]) -> bytes:
    replica = model.pick()
    if replica is None:
        raise EngineNotReached(f"{model.model_id} has no replica that serves right now.", retry_after_s=2)
    engine = replica.supervisor.engine
    if not engine.capabilities.counts_tokens:
        raise ModalityUnsupported(f"The engine of {model.model_id} counts no tokens.", param="model")
    try:
        count = await engine.count_tokens(fields)
    except EngineError as error:
        raise EngineUnavailable(f"The engine did not count: {error}.", retry_after_s=2) from None
    return msgspec.json.encode({"count": count, "max_model_len": replica.context_tokens})
