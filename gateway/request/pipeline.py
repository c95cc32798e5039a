"""The life of a request as one function: who, what, may it, write it down, find a node, relay, close the record."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from core.limits import GatewayLimits
from gateway import metrics
from gateway.dialects.chat import AnswerContext, AnswerTranslator, Translation
from gateway.dialects.continuation import Continuation, JoinedTranslator, find_ineligibility
from gateway.dialects.messages_request import to_chat_body
from gateway.dialects.surface import Dialect, Surface
from gateway.errors import (
    BadRequest,
    ClientLeft,
    ContextTooLong,
    EndpointNotAnswered,
    EngineRefused,
    ForwardedRequestFailed,
    GatewayError,
    NoAvailableNode,
    PathNotOffered,
    QueueFull,
    QueueTimeout,
    RateLimited,
    RecordsUnavailable,
    RequestInterrupted,
    RequeueExhausted,
    ShuttingDown,
)
from gateway.request.access_log import AccessLog, Refused
from gateway.request.attempt import Exchange, KeepAlive
from gateway.request.budgets import Budgets, Reservation
from gateway.request.candidates import Candidate
from gateway.request.client import ClientConnection
from gateway.request.dispatch import Dispatcher, Job, Lease, Plan
from gateway.request.failover import FailoverSlots
from gateway.request.identity import KeyRing, RateLimiter
from gateway.request.models import Admission, choose_priority
from gateway.request.outcomes import Broken, Outcome, Retry, RetryReason, Served
from gateway.request.records import BUGGED, COMPLETED, TORN_DOWN, Ending, Recorder, RecordWriter, count_tokens, name_model
from gateway.request.response import id_headers, name_header, name_node, refuse
from gateway.request.stored import StoragePlan, keep_answer, mark_unkept, plan_storage
from gateway.request.traces import RequestTrace, begin_trace
from gateway.token_counts import TokenCounter, run_beside
from gateway.values import CHAT_PATH, Caller, Header, InferenceRequest, ModelEntry, PoolOptions, Record, Unmatched
from nodes.links import Link
from nodes.links.ejections import Trial
from nodes.states import POOL_RESPONSES
from wire import clock
from wire.contract import RequestState
from wire.engine_errors import quote_message
from wire.ids import format_id, new_uuid7
from wire.logs import bind_request

if TYPE_CHECKING:
    from wire.spans import Traces

logger = logging.getLogger("muster.gateway")

_POOL_PATHS = (POOL_RESPONSES,)
_CHAT_PATHS = (CHAT_PATH,)
_WITHOUT_TOKENS = frozenset(
    {"/v1/embeddings", "/v1/rerank", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/generations"}
)
"""Where an answer is not made of tokens, so that the prompt is all that is reserved."""


def _wants_resume(request: InferenceRequest, entry: ModelEntry) -> bool:
    """Whether another node is to go on with the stream of a request: as the client says, else as the model is set."""
    wish = request.options.resume if request.options is not None else None
    return request.is_streaming and (entry.resumes if wish is None else wish)


def _join(translation: Translation, continuation: Continuation) -> Translation:
    def open_answer(context: AnswerContext) -> AnswerTranslator:
        return JoinedTranslator(continuation, translation.open_answer(context))

    return replace(translation, open_answer=open_answer)


class _Answers(msgspec.Struct):
    """How many answers a body asks for. ``best_of``: of completions, which are made and not all said."""

    n: float | None = None
    best_of: float | None = None


_read_answers = msgspec.json.Decoder(_Answers).decode


def _count_answers(body: bytes) -> int:
    try:
        asked = _read_answers(body)
    except msgspec.MsgspecError:
        return 1  # the engine refuses it
    return max(1, int(asked.n or 1), int(asked.best_of or 1))


@dataclass(slots=True, eq=False)
class Call:
    """One request on its way through the stages. ``extra``: headers of whatever answer it gets."""

    client: ClientConnection
    surface: Surface
    record_id: uuid.UUID
    request_id: str
    extra: list[Header]
    started: float = field(default_factory=clock.monotonic)
    """clock.monotonic() seconds."""
    caller: Caller = field(init=False)
    """Set once it is identified."""
    bytes_in: int = 0
    """Of its body."""
    record: Record | None = None
    job: Job | None = None
    plan: Plan | None = None
    """What was planned in this turn of the loop."""
    exchange: Exchange | None = None
    """The attempt that runs, or ran last."""
    trial: Trial | None = None
    """What the node of an attempt is judged by that was begun elsewhere."""
    storage: StoragePlan | None = None
    reservation: Reservation | None = None
    keepalive: KeepAlive | None = None
    queue_ms: int = 0
    trace: RequestTrace | None = None
    accepted: asyncio.Future[None] | None = None
    """Done when its row is durable; until then the client gets nothing of what is said."""
    refused: InferenceRequest | None = None
    """What was read of it when it was refused, before it had a record."""

    def describe(self) -> dict[str, object]:
        """Return what a line of the log says of it."""
        said: dict[str, object] = {"request": self.request_id}
        if self.record is not None:
            said |= {"tenant": self.record.tenant, "model": self.record.model, "node": self.record.node_name}
        if self.trace is not None:
            said["trace"] = self.trace.trace_id
        return said

    @property
    def trace_id(self) -> str:
        return "" if self.trace is None else self.trace.trace_id

    def name_refused(self) -> Refused:
        """Return what the log says of it where it has no record."""
        request = self.refused or (self.job.request if self.job is not None else None)
        return Refused(
            self.record_id, self.surface.path, self.client.address, getattr(self, "caller", None), request, self.trace_id
        )


@dataclass(slots=True)
class Pipeline:
    """The stages and what they share. One per gateway process."""

    gateway_id: uuid.UUID
    keys: KeyRing
    limiter: RateLimiter
    admission: Admission
    dispatcher: Dispatcher
    records: RecordWriter
    counter: TokenCounter
    limits: GatewayLimits
    budgets: Budgets | None = None
    """None: no caller has any."""
    access: AccessLog | None = None
    """None: no request has a line in the access log."""
    say_failover: Callable[[Call, Job, Link], Awaitable[bytes]] | None = None
    """Returns the event that tells the client of a stream which nobody goes on with where else to ask."""
    traces: Traces | None = None
    """None: nothing is traced."""
    is_stopping: bool = False
    refused: int = 0
    """Requests that found their queue full since a line of the log said so, and when that was (clock.monotonic())."""
    refused_told_at: float = float("-inf")
    recorder: Recorder = field(init=False)
    failover: FailoverSlots = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.gateway_id, self.records, access=self.access)
        self.failover = FailoverSlots(self.dispatcher, most=self.limits.failover_slots, requeues=self.limits.max_requeues)

    async def serve(self, client: ClientConnection, surface: Surface) -> None:
        """Answer one inference request. The only place that calls the stages in sequence."""
        record_id = new_uuid7()
        request_id = format_id("req", record_id)
        call = Call(client, surface, record_id, request_id, id_headers(request_id, is_anthropic=surface.is_anthropic))
        if self.traces is not None:
            call.trace = begin_trace(self.traces, client.headers, surface.path, record_id, at=call.started)
        await self._conduct(call, self._begin(call))

    async def take_over(self, call: Call, job: Job, record: Record) -> None:
        """Answer a request that was accepted elsewhere; ``call`` has the exchange that runs, and its trial."""
        await self._conduct(call, self._answer(call, job, record))

    async def _begin(self, call: Call) -> Ending:
        if self.is_stopping:
            raise ShuttingDown(retry_after_s=2)
        client = call.client
        call.caller = await self.keys.identify(client.headers, address=client.address, scope=client.scope)
        body = await client.read_body(self.limits.max_audio_bytes if call.surface.is_form else None)
        call.bytes_in = len(body)
        record, job = await self._admit(call, body)
        return await self._answer(call, job, record)

    async def _conduct(self, call: Call, answering: Coroutine[Any, Any, Ending]) -> None:
        client, surface, request_id = call.client, call.surface, call.request_id
        ending = TORN_DOWN
        fields = bind_request(call.describe)
        try:
            ending = await answering
        except GatewayError as raised:
            error = client.settle() or raised
            if call.job is not None and call.job.candidate.unsaid is not None and isinstance(error, EndpointNotAnswered):
                error = call.job.candidate.unsaid
            ending = Ending(error.state, error)
            if call.record is not None and self.recorder.is_refused(call.record):  # it has no row, and is no request
                metrics.COUNTERS.in_flight -= 1
                call.record = None
            refuse(client, surface, error, request_id, call.extra, call.job.request if call.job is not None else None)
            if isinstance(error, QueueFull | QueueTimeout | RequeueExhausted):
                self._log_end_of_wait(call, error)
            raised.__traceback__ = None  # its frames hold the request, and are held by the error: a ring
        finally:
            fields.close()
            client.unwatch()
            if call.keepalive is not None:
                call.keepalive.stop()
            if call.job is not None and call.job.failover is not None:
                call.job.failover.release()
            if ending is TORN_DOWN and not self.is_stopping:
                ending = BUGGED
            if call.record is not None:
                self.recorder.finish(
                    call.record, call.exchange, call.started, ending, bytes_in=call.bytes_in, trace=call.trace_id
                )
            elif ending.error is not None:
                self.recorder.count_refusal(ending.error, call.name_refused())
            if call.reservation is not None:
                self.settle(call.reservation, call.record)
            if call.trace is not None:
                call.trace.finish(call.record, ending.error)

    def _log_end_of_wait(self, call: Call, error: GatewayError) -> None:
        request, now = call.job.request if call.job is not None else call.refused, clock.monotonic()
        model = request.model if request is not None else ""
        if isinstance(error, QueueFull):  # a flood of them has one line in a while
            self.refused += 1
            if now >= self.refused_told_at + self.limits.queue_full_log_s:
                logger.warning("queue.full model=%s waiting=%d refused=%d", model, self.dispatcher.depth, self.refused)
                self.refused, self.refused_told_at = 0, now
        elif isinstance(error, QueueTimeout):
            logger.warning("queue.timeout request=%s model=%s waited_s=%.1f", call.request_id, model, now - call.started)
        else:
            losses = call.job.losses if call.job is not None else 0
            logger.warning("request.exhausted request=%s model=%s losses=%d", call.request_id, model, losses)

    async def _answer(self, call: Call, job: Job, record: Record) -> Ending:
        client = call.client
        try:
            outcome = await self._run_attempts(call, job, record)
        except Exception:
            await self._be_durable(call)
            raise
        await self._be_durable(call)
        exchange = call.exchange
        assert exchange is not None
        if isinstance(outcome, Served):
            if outcome.usage is not None or outcome.status < 400:
                count_tokens(record, exchange, outcome.usage, text_chars=outcome.text_chars)
            await self._keep(call, job, exchange)
            exchange.send_ahead()
        await client.drain()  # until then the server would cut what the client has not taken
        ending = await self._conclude(call, job, outcome, record)
        if isinstance(outcome, Served) and not exchange.is_delivered:
            self.recorder.fill_in(record, exchange, call.started, ending)
            self.recorder.count(record, call.started, error=ending.error, bytes_in=call.bytes_in, trace=call.trace_id)
            await self.records.finish(record)  # a client that has the whole answer has it recorded, even if we die
            exchange.deliver(exchange.last)
            await client.drain()
        return ending

    async def _run_attempts(self, call: Call, job: Job, record: Record) -> Outcome:
        while True:
            trial, exchange = call.trial, call.exchange
            call.trial = None
            if trial is None or exchange is None:
                lease = await self._find_slot(call, job, record)
                call.exchange = exchange = self._open_exchange(call, job, lease)
                if exchange is None:
                    continue
                self.recorder.note_start(record)
                trial = self.dispatcher.begin_trial(job, lease, exchange, caller=call.caller.key_id)
            outcome = await self._run_attempt(call, job, trial, exchange)
            if isinstance(outcome, Retry) and outcome.reason is RetryReason.BROKEN:
                return await self._go_on(call, job, record, trial, outcome)
            if not self._should_retry(call, outcome, job, trial.link):
                return outcome

    async def _go_on(self, call: Call, job: Job, record: Record, trial: Trial, broken: Retry) -> Outcome:
        """Have other nodes go on with a stream until one has ended it; where none can, tell the client what broke it.

        A client that sent ``x_pool_options`` is told before that where it may ask anew.
        """
        begun, outcome = call.exchange, broken
        assert begun is not None
        while True:
            job.losses += 1
            job.avoid.add(trial.link)
            lease = await self._find_successor(call, job, record, begun)
            following = self._open_exchange(call, job, lease) if lease is not None else None
            if lease is None or following is None:
                metrics.CONTINUED.labels("given_up").inc()
                if self.say_failover is not None and job.request.options is not None:
                    event = await self.say_failover(call, job, trial.link)
                    call.client.write(event if call.client.tail.endswith(b"\n\n") else b"\n\n" + event)
                return begun.give_up(broken.error)
            metrics.REDISPATCHES.labels(outcome.reason).inc()
            self.recorder.note_loss(record, trial.link.node_id, model=job.request.model, reason=outcome.reason)
            call.exchange = following
            self.recorder.note_start(record)
            trial = self.dispatcher.begin_trial(job, lease, following, caller=call.caller.key_id)
            ended = await self._run_attempt(call, job, trial, following)
            following.first_byte_at, begun = begun.first_byte_at, following
            if not isinstance(ended, Retry):
                metrics.CONTINUED.labels("resumed").inc()
                return ended
            outcome = ended

    async def _find_successor(self, call: Call, job: Job, record: Record, exchange: Exchange) -> Lease | None:
        """Return a slot on a node that can go on with a stream; None where nobody can, now or soon. Raises ClientLeft."""
        continuation = exchange.continuation
        if continuation is None or continuation.ineligibility or self.is_stopping or job.losses > self.limits.max_requeues:
            return None
        ask, request, translator = continuation.ask_next(), job.request, exchange.translator
        if translator is None:
            asked = msgspec.structs.replace(request, paths=(ask.path,), body=ask.body)
            job.candidate = Candidate(job.candidate.entry, asked)
        else:
            asked, translation = (
                msgspec.structs.replace(request, paths=(ask.path,)),
                Translation(ask.path, ask.body, lambda _: translator),
            )
            job.candidate = Candidate(job.candidate.entry, asked, translate=lambda _: translation)
        job.candidates, job.accepted = (job.candidate,), clock.monotonic()  # it waits from now on
        if not self.dispatcher.plan(job).is_served_elsewhere:
            return None
        try:
            return await self._find_slot(call, job, record)
        except ClientLeft:
            raise
        except GatewayError:
            return None

    # stages

    async def _admit(self, call: Call, body: bytes) -> tuple[Record, Job]:
        """Check, then accept: from the durable row on, the request reaches exactly one final state."""
        surface, caller, client = call.surface, call.caller, call.client
        request: InferenceRequest | None = None
        asked_model = ""
        try:
            rate = self.limiter.take(caller.key_id, caller.requests_per_minute)
            call.extra += rate.headers(is_anthropic=surface.is_anthropic)
            if surface.is_form:
                request = await run_beside(len(body), lambda: surface.parse(body, client.headers))
            else:
                request = surface.parse(body, client.headers)
            if surface.dialect is Dialect.RESPONSES and (
                caller.stores_responses or request.store or request.previous_response_id
            ):
                call.storage = await plan_storage(caller, request, call.request_id)
                if call.storage is not None:  # an engine's own object has another id, and says that it is not stored
                    chars = request.prompt_chars + call.storage.history_chars
                    request = msgspec.structs.replace(request, paths=(CHAT_PATH,), prompt_chars=chars)
            entries, asked_model = self.admission.admit(caller, request), request.model
            candidates = [self._make_candidate(call, request, entry) for entry in entries]
            request = candidates[0].request
            job = self.dispatcher.new_job(
                request_id=call.request_id,
                candidates=candidates,
                tenant=caller.tenant,
                asked_model=asked_model,
                priority=choose_priority(caller, request.options),
                key_id=caller.key_id,
                headers=client.headers,
                weight=caller.weight,
            )
            call.plan = self._plan(call, job)
            if caller.budgets and self.budgets is not None:
                call.plan = None  # what is planned in this turn of the loop is old then
                call.reservation = await self.reserve(self.budgets, caller, request, entries)
        except GatewayError as error:
            if isinstance(error, RateLimited):
                rate = self.limiter.peek(caller.key_id, caller.requests_per_minute)
                call.extra += rate.headers(is_anthropic=surface.is_anthropic)
            call.refused = request or InferenceRequest(endpoint=surface.path, paths=surface.paths, model="")
            self.recorder.record_refusal(error, caller, call.refused, call.record_id, asked_model=asked_model)
            raise
        call.job, job.trace = job, call.trace
        if request.options is not None:
            job.unmatched = self._find_unmatched(caller, request.options)
        record = self.recorder.make_record(call.record_id, caller, request, asked_model=asked_model)
        if call.reservation is not None:
            record.reserved_tokens, record.reserved_micros = call.reservation.tokens, call.reservation.micros
        client.watch()
        await self._accept(call, record)
        call.record = record
        if request.is_streaming:
            call.keepalive = KeepAlive(client, extra=call.extra, every_s=self.limits.stream_ping_s)
            call.keepalive.start()
        return record, job

    async def reserve(
        self, budgets: Budgets, caller: Caller, request: InferenceRequest, entries: Sequence[ModelEntry]
    ) -> Reservation:
        """Reserve the most that a request may use on any of its models. Raises BudgetExhausted, BudgetUnknown."""
        reservation = self.draft_reservation(budgets, caller, request, entries)
        await budgets.reserve(reservation)
        return reservation

    def draft_reservation(
        self, budgets: Budgets, caller: Caller, request: InferenceRequest, entries: Sequence[ModelEntry]
    ) -> Reservation:
        """Return the most that a request may use on any of these models, not taken yet."""
        answer = 0
        if request.endpoint not in _WITHOUT_TOKENS:
            caps = [min(entry.max_tokens, entry.context_tokens or entry.max_tokens) for entry in entries]
            answer = (request.max_tokens if request.max_tokens is not None else max(caps)) * _count_answers(request.body)
        return budgets.draft(
            caller,
            prompt_tokens=request.prompt_chars // self.limits.budget_token_chars + self.limits.token_message,
            completion_tokens=answer,
            prices={entry.name: entry.price for entry in entries},
        )

    def settle(self, reservation: Reservation, record: Record | None) -> None:
        """Give back what a request did not use; ``record``: as it ended, None = it was not accepted."""
        if record is None or record.state is RequestState.REJECTED:
            reservation.settle()
            return
        reservation.settle(
            model=record.model,
            prompt_tokens=record.prompt_tokens or 0,
            completion_tokens=record.completion_tokens or 0,
            cached_tokens=record.cached_tokens or 0,
            is_estimated=record.tokens_estimated,
        )

    async def _accept(self, call: Call, record: Record) -> None:
        """Write the row, and go on meanwhile while the database keeps up. Raises RecordsUnavailable, ClientLeft."""
        metrics.COUNTERS.in_flight += 1
        accepted = self.records.accept(record)
        if self.records.keeps_up and not accepted.done():
            call.accepted = accepted
            call.client.hold(accepted)
            return
        call.plan = None
        try:
            await call.client.wait(accepted)
        except GatewayError as error:
            metrics.COUNTERS.in_flight -= 1
            if not isinstance(error, RecordsUnavailable):
                self.recorder.seal(record, Ending(error.state, error))
            raise

    async def _be_durable(self, call: Call) -> None:
        # Without its row nothing of a request is final, and nothing is said.
        if call.accepted is not None and not call.client.is_gone:
            await call.client.wait(call.accepted)

    def _make_candidate(self, call: Call, request: InferenceRequest, entry: ModelEntry) -> Candidate:
        """Return a model that may serve a request, on the API paths on which that model's nodes are asked for it."""
        surface, translate = call.surface, call.surface.translate
        if call.storage is not None:
            translate = call.storage.translate
        elif translate is not None and request.is_streaming and (entry.resumes or request.options is not None):
            in_chat = self._prefer_chat(request, entry, surface)
            if in_chat is not None:
                return in_chat
        if (
            call.storage is None
            and request.is_pool_shaped
            and request.paths == surface.paths
            and self.dispatcher.is_answered(entry.name, _POOL_PATHS)
        ):
            request = msgspec.structs.replace(request, paths=_POOL_PATHS)
        return Candidate(entry, request, surface.rename, translate)

    def _plan(self, call: Call, job: Job) -> Plan:
        """Return where a new request may go. Raises what the first model says where none can take it, or can be told it."""
        plan, surface = self.dispatcher.plan(job), call.surface
        refusal = plan.refusal
        if isinstance(refusal, EndpointNotAnswered) and surface.path not in surface.paths:
            raise PathNotOffered(
                f"The model '{job.request.model}' cannot be asked on {surface.path}: that takes nodes on which it answers "
                f"{surface.paths[0]}.",
                param="model",
            )
        if refusal is not None:
            raise refusal
        self._translate_early(job.candidate)
        return plan

    def _find_unmatched(self, caller: Caller, options: PoolOptions) -> Unmatched | None:
        gpu = options.prefer_gpu or ""
        unmatched = Unmatched(
            prefer_gpu="" if self.dispatcher.knows_node(gpu) else gpu,
            fallback_models=self.admission.list_unusable(caller, options.fallback_models),
        )
        return unmatched if unmatched.prefer_gpu or unmatched.fallback_models else None

    def _translate_early(self, candidate: Candidate) -> None:
        request = candidate.request
        if candidate.translate is None or request.paths[0] == POOL_RESPONSES:
            return
        if request.paths[0] == request.endpoint and (
            len(request.paths) == 1 or self.dispatcher.is_answered(request.model, request.paths[:1])
        ):
            return
        if self.dispatcher.is_answered(request.model, request.paths):
            # Every node has to be told it in other words: what cannot be said so is refused before it waits.
            candidate.choose_translation(CHAT_PATH)

    async def _find_slot(self, call: Call, job: Job, record: Record) -> Lease:
        """Return a slot on a node of the first model that can answer in time. Raises ShuttingDown: nothing is begun then."""
        if self.is_stopping:
            raise ShuttingDown(retry_after_s=2)
        self.recorder.require_open(record)
        asked_at = clock.monotonic()
        plan, call.plan = call.plan, None
        if len(job.candidates) > 1 and job.failover is None:
            plan = plan or self.dispatcher.plan(job)
            self._choose_candidate(job, plan.rank(min(self.limits.queue_s, self.limits.degrade_wait_s, job.max_wait_s)))
        try:
            lease = await self._wait_for_slot(call, job, record, plan)
        except (QueueTimeout, NoAvailableNode):
            rest = [candidate for candidate in self.dispatcher.plan(job).list_ready() if candidate is not job.candidate]
            if not self._choose_candidate(job, rest):
                raise
            lease = await self._wait_for_slot(call, job, record)
        try:
            self.recorder.require_open(record)
        except RecordsUnavailable:
            lease.release()
            raise
        job.attempts += 1
        record.queue_ms = call.queue_ms = (record.queue_ms or 0) + int((clock.monotonic() - asked_at) * 1000)
        record.attempts = min(job.attempts, self.limits.record_attempts)
        name_model(record, job.request.model, asked_model=job.asked_model)
        if lease.choice is not None or job.place is not None:
            record.decision = self.dispatcher.describe(lease, job)
        record.node_id = lease.link.node_id
        record.node_name = lease.link.node_name
        record.state = RequestState.ASSIGNED
        self.records.touch(record)
        if self.recorder.logs_dispatch:
            self.recorder.note_dispatch(record)
        return lease

    async def _wait_for_slot(self, call: Call, job: Job, record: Record, plan: Plan | None = None) -> Lease:
        found = self.dispatcher.acquire(job, plan)
        if isinstance(found, Lease):
            return found
        self.recorder.note_wait(record, model=job.request.model, asked_model=job.asked_model)
        self._name_place(call, job)
        since, reason = 0.0, ""
        if call.trace is not None:
            since, reason = clock.monotonic(), self.dispatcher.name_wait(job.request)
        try:
            return await call.client.wait(found)
        except asyncio.CancelledError:
            if found.done() and not found.cancelled() and found.exception() is None:
                found.result().release()  # granted in the same loop turn as the cancel
            raise
        finally:
            if call.keepalive is not None:
                call.keepalive.leave_queue()
            if call.trace is not None:
                call.trace.note_wait(since, reason=reason, place=job.place)

    def _name_place(self, call: Call, job: Job) -> None:
        """Have the answer say where the request began to wait, and a stream where it waits."""
        place = self.dispatcher.find_place(job)
        if place is not None:
            job.place = place
            said = (b"x-queue-position", b"%d" % place.position), (b"x-queue-wait-estimate-ms", b"%d" % place.estimate_ms)
            call.extra[:] = [*(header for header in call.extra if not header[0].startswith(b"x-queue-")), *said]
        if call.keepalive is not None:
            call.keepalive.watch_queue(lambda: self.dispatcher.find_place(job), self.limits.queue_note_s)

    def _choose_candidate(self, job: Job, candidates: Sequence[Candidate]) -> bool:
        for candidate in candidates:
            try:
                self._translate_early(candidate)
            except BadRequest:  # what it cannot be told another one may take as it is
                continue
            job.candidate = candidate
            return True
        return False

    def _open_exchange(self, call: Call, job: Job, lease: Lease) -> Exchange | None:
        """Return the attempt on a node, in the words it speaks; whatever is raised, the slot is free then.

        None: it cannot be said in those words, and has to wait for a node that speaks the client's own.
        """
        candidate, request = job.candidate, job.request
        try:
            translation = None if candidate.translate is None else candidate.choose_translation(lease.path)
            return self.make_exchange(call, job, lease, translation)
        except BaseException as error:
            lease.release()
            own = request.paths[:1]
            if isinstance(error, BadRequest) and len(request.paths) > 1 and self.dispatcher.is_answered(request.model, own):
                candidate.send_on(*own)
                job.attempts -= 1
                candidate.unsaid, error.__traceback__ = error, None
                return None
            raise

    def _prefer_chat(self, request: InferenceRequest, entry: ModelEntry, surface: Surface) -> Candidate | None:
        """Return a model that is asked for chat, the only dialect in which a node can go on with another's answer.

        None where that is not wished for, or cannot be.
        """
        if not _wants_resume(request, entry) or not self.dispatcher.is_answered(entry.name, _CHAT_PATHS):
            return None
        asked = msgspec.structs.replace(request, paths=_CHAT_PATHS)
        candidate = Candidate(entry, asked, surface.rename, surface.translate)
        try:
            translation = candidate.choose_translation(CHAT_PATH)
        except BadRequest:
            return None
        return candidate if translation is not None and not find_ineligibility(CHAT_PATH, translation.body) else None

    def _open_continuation(self, job: Job, lease: Lease, translation: Translation | None) -> Continuation | None:
        """Return what keeps a stream that may go on elsewhere; None where that is not wished for, or cannot be."""
        request = job.request
        if not _wants_resume(request, job.candidate.entry):
            return None
        path, body = (lease.path, request.body) if translation is None else (translation.path, translation.body)
        if ineligibility := find_ineligibility(path, body):
            if request.options is not None and request.options.resume:
                job.unmatched = msgspec.structs.replace(job.unmatched or Unmatched(), resume=ineligibility)
            return None
        prompt_tokens = request.prompt_chars // self.limits.token_chars
        return Continuation(path, body, max_bytes=self.limits.continued_bytes, prompt_tokens=prompt_tokens)

    def make_exchange(self, call: Call, job: Job, lease: Lease, translation: Translation | None = None) -> Exchange:
        """Return an attempt that was not begun yet."""
        request, link, begun, continuation = job.request, lease.link, None, None
        if request.is_streaming and (request.options is not None or job.candidate.entry.resumes):
            begun = call.exchange
            if begun is None or begun.continuation is None or begun.continuation.number == 1:
                begun, continuation = None, self._open_continuation(job, lease, translation)
            if continuation is not None and translation is not None:
                translation = _join(translation, continuation)
        extra = [*call.extra, *name_node(link.node_name, request.model)]
        if translation is not None and translation.ignored:
            extra.append(name_header(b"x-muster-ignored", ", ".join(translation.ignored)))
        exchange = Exchange(
            job=job,
            lease=lease,
            client=call.client,
            surface=call.surface,
            limits=self.limits,
            extra=extra,
            translation=translation,
            keepalive=call.keepalive,
            queue_ms=call.queue_ms,
            waits=True,
            tidies=job.candidate.entry.tidy and request.is_streaming and request.endpoint == CHAT_PATH,
            continuation=continuation,
        )
        if begun is not None:
            exchange.follow(begun)
        return exchange

    async def _run_attempt(self, call: Call, job: Job, trial: Trial, exchange: Exchange) -> Outcome:
        outcome: Outcome | None = None
        try:
            outcome = await exchange.run()
            return outcome
        finally:
            self.dispatcher.end_trial(job, trial, outcome)
            if call.trace is not None:
                first_byte_at = exchange.first_byte_at if job.request.is_streaming else None
                call.trace.end_attempt(outcome, first_byte_at=first_byte_at, answer=exchange.recent)

    async def _keep(self, call: Call, job: Job, exchange: Exchange) -> None:
        storage, translator = call.storage, exchange.translator
        if storage is None or exchange.is_delivered or not storage.is_stored or translator is None:
            return
        # Before the last bytes go: they say so when it failed.
        if not await call.client.wait_for_work(keep_answer(call.caller, job.request, storage, translator)):
            exchange.last = mark_unkept(exchange.last)

    def _should_retry(self, call: Call, outcome: Outcome, job: Job, link: Link) -> bool:
        """Decide whether another node gets the request. Raises RequeueExhausted when it had its chances."""
        if not isinstance(outcome, Retry):
            return False
        if self.is_stopping:
            raise ShuttingDown(retry_after_s=2)
        metrics.REDISPATCHES.labels(outcome.reason).inc()
        if outcome.reason is RetryReason.UNSPOKEN:
            self.dispatcher.note_unspoken(link, job.request.model, job.request.endpoint)
            return True
        if outcome.reason is RetryReason.FOREIGN_TOOLS:
            job.candidate.send_on(CHAT_PATH)
            return True
        if outcome.reason is RetryReason.BUSY:
            job.avoid.add(link)
            self.dispatcher.note_busy(link, outcome.error.retry_after_s)
            if outcome.error.retry_after_s is not None and not self.dispatcher.plan(job).is_served_elsewhere:
                raise outcome.error
            return True
        job.losses += 1
        job.avoid.add(link)
        if job.losses > self.limits.max_requeues:
            raise RequeueExhausted(retry_after_s=5) if isinstance(outcome.error, RequestInterrupted) else outcome.error
        is_closed = outcome.reason is not RetryReason.LOST and self.dispatcher.plan(job).is_closed
        if not is_closed and call.record is not None:  # the row will name another node, and this failure is not forgotten
            self.recorder.note_loss(call.record, link.node_id, model=job.request.model, reason=outcome.reason)
        if outcome.reason is RetryReason.LOST:
            return True
        if is_closed:
            is_reclaimed = outcome.reason is RetryReason.RECLAIMED
            raise RequestInterrupted(retry_after_s=5) if is_reclaimed else ForwardedRequestFailed(retry_after_s=2)
        return True

    # endings

    async def _conclude(self, call: Call, job: Job, outcome: Outcome, record: Record) -> Ending:
        if isinstance(outcome, Served | Broken) and isinstance(outcome.error, EngineRefused | ContextTooLong):
            await self._quote_engine(job, outcome.error, record)
        match outcome:
            case Served():
                record.status_code = outcome.status
                if outcome.error is not None and outcome.error.state is RequestState.REJECTED:
                    record.status_code = outcome.error.status  # also where it was said in a stream
                    return Ending(RequestState.REJECTED, outcome.error)
                if outcome.status < 400 and not outcome.has_failed:
                    return COMPLETED
                return Ending(RequestState.FAILED, ForwardedRequestFailed())
            case Broken():
                if not outcome.told:
                    call.extra += name_node(record.node_name, record.model)
                    raise await self._recount_prompt(call, job, outcome.error)
                return Ending(outcome.error.state, outcome.error)
            case Retry():
                raise AssertionError("a retry never concludes a request")
            case _:
                assert_never(outcome)

    async def _recount_prompt(self, call: Call, job: Job, error: GatewayError) -> GatewayError:
        """Return the error with a count of ours where it has a lower bound and the client acts on it. Raises ClientLeft."""
        if not isinstance(error, ContextTooLong) or not call.surface.wants_count(error):
            return error
        body = job.request.body
        try:
            chat, _ = await run_beside(len(body), lambda: to_chat_body(body, is_counting=True))
        except BadRequest:
            return error  # an engine that speaks the surface itself takes more than a translation carries
        counting = self.counter.count(job.candidate.entry, chat, tenant=job.tenant, request_id=job.request_id)
        return error.recount((await call.client.wait_for_work(counting)).tokens)

    async def _quote_engine(self, job: Job, error: GatewayError, record: Record) -> None:
        if self.limits.max_engine_error_chars:
            body = job.request.body
            quoted = await run_beside(len(body), lambda: quote_message(error.message, body))
            record.engine_error = quoted[: self.limits.max_engine_error_chars]
        logger.warning(
            "request.engine_error request=%s node=%s model=%s status=%d error=%s",
            job.request_id, record.node_name, record.model, error.status, record.engine_error or "-",
        )  # fmt: skip
