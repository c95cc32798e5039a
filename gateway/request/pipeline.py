"""The life of a request as one function: who, what, may it, write it down, find a box, relay, close the record."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

import msgspec

from core.limits import GatewayLimits
from gateway import metrics
from gateway.counting import TokenCounter, run_beside
from gateway.dialects import Surface
from gateway.dialects.messages import to_chat_body
from gateway.dialects.surface import Dialect
from gateway.dialects.translation import Translation
from gateway.errors import (
    BadRequest,
    ContextTooLong,
    EndpointNotAnswered,
    EngineRefused,
    ForwardedRequestFailed,
    GatewayError,
    NoAvailableNode,
    PathNotOffered,
    QueueTimeout,
    RateLimited,
    RecordsUnavailable,
    RequestInterrupted,
    RequeueExhausted,
    ShuttingDown,
)
from gateway.request.attempt import Exchange, KeepAlive
from gateway.request.client import ClientConnection
from gateway.request.dispatch import (
    Broken,
    Busy,
    Closed,
    Dispatcher,
    Job,
    Lease,
    Outcome,
    Outlook,
    Ready,
    Retry,
    RetryReason,
    Served,
    choose_path,
    pick_name,
)
from gateway.request.identity import KeyRing, RateLimiter
from gateway.request.models import Admission, choose_priority
from gateway.request.records import (
    BUGGED,
    COMPLETED,
    TORN_DOWN,
    Bookkeeper,
    Ending,
    Record,
    RecordWriter,
    count_tokens,
    name_model,
    unread_request,
)
from gateway.request.response import id_headers, name_box, name_header, refuse
from gateway.request.stored import LANE as KEPT_LANE
from gateway.request.stored import Keeping, keep_answer, mark_unkept, plan_keeping
from gateway.values import Caller, Header, InferenceRequest, ModelEntry, PoolOptions, Unmatched
from nodes.links import Link
from nodes.links.ejections import Trial
from nodes.states import AS_IT_IS, POOL_RESPONSES, SPOKEN_THROUGH
from wire import clock
from wire.contract import RequestState
from wire.engine_errors import quote_message
from wire.ids import format_id, new_uuid7

logger = logging.getLogger("muster.gateway")


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
    record: Record | None = None
    job: Job | None = None
    exchange: Exchange | None = None
    """The attempt that runs, or ran last."""
    trial: Trial | None = None
    """What the node of an attempt is judged by that was begun elsewhere."""
    keeping: Keeping | None = None
    keepalive: KeepAlive | None = None
    queue_ms: int = 0
    unsaid: BadRequest | None = None
    """Why it cannot be said in other words, while it waits for a box that takes it as it is."""
    entries: dict[str, ModelEntry] = field(default_factory=dict)
    """The models that may serve it by name, best first."""
    translations: dict[str, Translation] = field(default_factory=dict)
    accepted: asyncio.Future[None] | None = None
    """Done when its row is durable; until then the client gets nothing of what is said."""


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
    is_stopping: bool = False
    books: Bookkeeper = field(init=False)

    def __post_init__(self) -> None:
        self.books = Bookkeeper(self.gateway_id, self.records)

    async def serve(self, client: ClientConnection, surface: Surface) -> None:
        """Answer one inference request. The only place that calls the stages in sequence."""
        record_id = new_uuid7()
        request_id = format_id("req", record_id)
        call = Call(client, surface, record_id, request_id, id_headers(request_id, is_anthropic=surface.is_anthropic))
        await self._conduct(call, self._begin(call))

    async def take_over(self, call: Call, job: Job, record: Record) -> None:
        """Answer a request that was accepted elsewhere; ``call`` has the exchange that runs, and its trial."""
        await self._conduct(call, self._answer(call, job, record))

    async def _begin(self, call: Call) -> Ending:
        if self.is_stopping:
            raise ShuttingDown(retry_after_s=2)
        client = call.client
        call.caller = await self.keys.identify(client.headers, allow_x_api_key=True, address=client.address)
        body = await client.read_body(self.limits.max_audio_bytes if call.surface.is_form else None)
        record, job = await self._admit(call, body)
        return await self._answer(call, job, record)

    async def _conduct(self, call: Call, answering: Coroutine[Any, Any, Ending]) -> None:
        """Have a request answered; whatever comes of it, its record and its client are told."""
        client, surface, request_id = call.client, call.surface, call.request_id
        ending = TORN_DOWN
        try:
            ending = await answering
        except GatewayError as raised:
            error = client.settle() or raised
            if call.unsaid is not None and isinstance(error, EndpointNotAnswered):
                error = call.unsaid
            ending = Ending(error.state, error)
            if call.record is not None and self.books.is_refused(call.record):  # it has no row, and is no request
                metrics.TALLY.in_flight -= 1
                call.record = None
            refuse(client, surface, error, request_id, call.extra, call.job.request if call.job is not None else None)
            raised.__traceback__ = None  # its frames hold the request, and are held by the error: a ring
        finally:
            client.unwatch()
            if call.keepalive is not None:
                call.keepalive.stop()
            if ending is TORN_DOWN and not self.is_stopping:
                ending = BUGGED
            if call.record is not None:
                self.books.finish(call.record, call.exchange, call.started, ending)
            elif ending.error is not None:
                self.books.count_refusal(ending.error)

    async def _answer(self, call: Call, job: Job, record: Record) -> Ending:
        """Have nodes try an accepted request until one of them answers; return how it ended. Raises GatewayError."""
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
            self.books.fill_in(record, exchange, call.started, ending)
            self.books.count(record, call.started)
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
                self.books.note_start(record)
                trial = self.dispatcher.begin_trial(job, lease, exchange, caller=call.caller.key_id)
            outcome = await self._run_attempt(job, trial, exchange)
            if not self._should_retry(call, outcome, job, trial.link):
                return outcome

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
                call.keeping = await plan_keeping(caller, request, call.request_id)
                if call.keeping is not None:
                    chars = request.prompt_chars + call.keeping.history_chars
                    request = msgspec.structs.replace(request, lane=KEPT_LANE, prompt_chars=chars)
            entries = self.admission.admit(caller, request)
            call.entries = {row.name: row for row in entries}
            entry, asked_model = entries[0], request.model
            request = self._rename(call, request, entry.name)
            self._check_room(call, request)
            if surface.translate is not None:
                self._translate_early(call, request)
        except GatewayError as error:
            if isinstance(error, RateLimited):
                rate = self.limiter.peek(caller.key_id, caller.requests_per_minute)
                call.extra += rate.headers(is_anthropic=surface.is_anthropic)
            refused = request or unread_request(surface.path)
            self.books.record_refusal(error, caller, refused, call.record_id, asked_model=asked_model)
            raise
        job = self.dispatcher.new_job(
            request_id=call.request_id,
            request=request,
            tenant=caller.tenant,
            max_queue=entry.max_queue,
            priority=choose_priority(caller, request.options),
        )
        call.job, job.asked_model = job, asked_model
        if request.options is not None:
            job.unmatched = self._find_unmatched(caller, request.options)
        job.models = tuple(call.entries)
        record = self.books.make_record(call.record_id, caller, request, asked_model=asked_model)
        client.watch()
        await self._accept(call, record)
        call.record = record
        if request.is_streaming:
            call.keepalive = KeepAlive(client, extra=call.extra, every_s=self.limits.stream_ping_s)
            call.keepalive.start()
        return record, job

    async def _accept(self, call: Call, record: Record) -> None:
        """Write the row, and go on meanwhile while the database keeps up. Raises RecordsUnavailable, ClientLeft."""
        metrics.TALLY.in_flight += 1
        accepted = self.records.accept(record)
        if self.records.keeps_up and not accepted.done():
            call.accepted = accepted
            call.client.hold(accepted)
            return
        try:
            await call.client.wait(accepted)
        except GatewayError as error:
            metrics.TALLY.in_flight -= 1
            if not isinstance(error, RecordsUnavailable):
                self.books.seal(record, Ending(error.state, error))
            raise

    async def _be_durable(self, call: Call) -> None:
        """Wait for the row: without it nothing is final and nothing is said. Raises RecordsUnavailable, ClientLeft."""
        if call.accepted is not None and not call.client.is_gone:
            await call.client.wait(call.accepted)

    def _find_unmatched(self, caller: Caller, options: PoolOptions) -> Unmatched | None:
        """Return what the options name that is nothing here, None when everything is something."""
        gpu = options.prefer_gpu or ""
        unmatched = Unmatched(
            prefer_gpu="" if self.dispatcher.knows_node(gpu) else gpu,
            fallback_models=self.admission.list_unusable(caller, options.fallback_models),
        )
        return unmatched if unmatched.prefer_gpu or unmatched.fallback_models else None

    def _rename(self, call: Call, request: InferenceRequest, model: str) -> InferenceRequest:
        """Return the request for a model, on the API path on which that model's boxes are asked for it."""
        renamed, lane = call.surface.rename(request, model), self._find_lane(call, request, model)
        return renamed if lane == renamed.lane else msgspec.structs.replace(renamed, lane=lane)

    def _find_lane(self, call: Call, request: InferenceRequest, model: str) -> str:
        if request.lane == KEPT_LANE or not request.is_pool_shaped:
            return request.lane  # in those words in any case, or natively wherever a box can
        return POOL_RESPONSES if self.dispatcher.declares(model, POOL_RESPONSES) else ""

    def _outlook(self, call: Call, model: str, request: InferenceRequest, job: Job | None = None) -> Outlook:
        """Return how the request would fare if it asked for that model now."""
        lane = self._find_lane(call, request, model) or request.endpoint
        if job is not None and job.attempts:
            return self.dispatcher.outlook(model, lane, avoid=job.avoid)
        return self.dispatcher.outlook(model, lane, max_queue=call.entries[model].max_queue)

    def _check_room(self, call: Call, request: InferenceRequest) -> None:
        """Refuse what no model behind the name can take now. Raises what the first of them says."""
        first, *others = call.entries.values()
        try:
            self.dispatcher.refuse_disabled(first.name)
            self.dispatcher.check_room(first.name, request.path, first.max_queue)
        except GatewayError as error:
            if not all(isinstance(self._outlook(call, row.name, request), Closed) for row in others):
                return
            if call.surface.lane and isinstance(error, EndpointNotAnswered):
                raise PathNotOffered(
                    f"The model '{first.name}' cannot be asked on {request.endpoint}: that takes nodes on which it answers "
                    f"{call.surface.lane}.",
                    param="model",
                ) from None
            raise

    def _translate_early(self, call: Call, request: InferenceRequest) -> None:
        """Find out before anything is accepted whether a request can be said in the only words its boxes speak."""
        if request.lane.startswith(AS_IT_IS):
            return
        endpoint = request.path if request.lane == POOL_RESPONSES else request.endpoint
        if self.dispatcher.needs_translation(request.model, endpoint=endpoint, lane=request.path):
            self._translate(call, request, KEPT_LANE)

    def _translate(self, call: Call, request: InferenceRequest, path: str) -> Translation | None:
        """Return the request as it is said on ``path``, None when that is where it came from. Raises BadRequest."""
        if path in (request.endpoint, POOL_RESPONSES):
            return None
        known = call.translations.get(request.model)
        if known is None:
            translate = call.keeping.translate if call.keeping is not None else call.surface.translate
            if translate is None:
                raise EndpointNotAnswered(f"The model '{request.model}' does not answer {request.endpoint}.", param="model")
            known = call.translations[request.model] = translate(request)
        return known

    async def _find_slot(self, call: Call, job: Job, record: Record) -> Lease:
        """Return a slot on a box of the first model that can answer in time. Raises ShuttingDown: nothing is begun any more."""
        if self.is_stopping:
            raise ShuttingDown(retry_after_s=2)
        self.books.require_open(record)
        asked_at = clock.monotonic()
        if len(job.models) > 1:
            self._choose_model(call, job, job.models)
        try:
            lease = await self._wait_for_slot(call.client, job, record)
        except (QueueTimeout, NoAvailableNode):
            rest = [name for name in job.models if name != job.request.model]
            ready = [name for name in rest if isinstance(self._outlook(call, name, job.request, job), Ready)]
            if not self._choose_model(call, job, ready):
                raise
            lease = await self._wait_for_slot(call.client, job, record)
        try:
            self.books.require_open(record)
        except RecordsUnavailable:
            lease.release()
            raise
        job.attempts += 1
        record.queue_ms = call.queue_ms = (record.queue_ms or 0) + int((clock.monotonic() - asked_at) * 1000)
        record.attempts = min(job.attempts, self.limits.record_attempts)
        name_model(record, job.request.model, asked_model=job.asked_model)
        record.node_id = lease.link.node_id
        record.node_name = lease.link.node_name
        record.state = RequestState.ASSIGNED
        self.records.touch(record)
        return lease

    async def _wait_for_slot(self, client: ClientConnection, job: Job, record: Record) -> Lease:
        found = self.dispatcher.acquire(job)
        if isinstance(found, Lease):
            return found
        self.books.note_wait(record, model=job.request.model, asked_model=job.asked_model)
        try:
            return await client.wait(found)
        except asyncio.CancelledError:
            if found.done() and not found.cancelled() and found.exception() is None:
                found.result().release()  # granted in the same loop turn as the cancel
            raise

    def _choose_model(self, call: Call, job: Job, models: Sequence[str]) -> bool:
        """Give the job to the best of the models whose boxes can be told the request; return whether there is one."""
        left, budget_s = list(models), min(self.limits.queue_s, job.max_wait_s)
        while left:
            best = pick_name(((name, self._outlook(call, name, job.request, job)) for name in left), budget_s)
            request = self._rename(call, job.request, best)
            try:
                if call.surface.translate is not None:
                    self._translate_early(call, request)
            except BadRequest:
                left.remove(best)  # what it cannot be told another one may take as it is
                continue
            job.request, job.max_queue = request, call.entries[best].max_queue
            return True
        return False

    def _open_exchange(self, call: Call, job: Job, lease: Lease) -> Exchange | None:
        """Return the attempt on a box, in the words it speaks; whatever is raised, the slot is free then.

        None: it cannot be said in those words, and has to wait for a box that speaks the client's own.
        """
        try:
            return self._prepare_exchange(call, job, lease)
        except BaseException as error:
            lease.release()
            request = job.request
            if isinstance(error, BadRequest) and not request.lane and self.dispatcher.speaks(request.model, request.endpoint):
                job.request = msgspec.structs.replace(request, lane=AS_IT_IS + request.endpoint)
                job.attempts -= 1
                call.unsaid, error.__traceback__ = error, None
                return None
            raise

    def _prepare_exchange(self, call: Call, job: Job, lease: Lease) -> Exchange:
        """Return the attempt on a box. Raises BadRequest for what cannot be said in the words that it speaks."""
        request, link = job.request, lease.link
        translation = None
        if call.surface.translate is not None:
            translation = self._translate(call, request, choose_path(link, request))
        return self.make_exchange(call, job, lease, translation)

    def make_exchange(self, call: Call, job: Job, lease: Lease, translation: Translation | None = None) -> Exchange:
        """Return an attempt that was not begun yet."""
        request, link = job.request, lease.link
        extra = [*call.extra, *name_box(link.node_name, request.model)]
        if translation is not None and translation.ignored:
            extra.append(name_header(b"x-muster-ignored", ", ".join(translation.ignored)))
        return Exchange(
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
            tidies=call.entries[request.model].tidy and request.is_streaming and request.endpoint == KEPT_LANE,
        )

    async def _run_attempt(self, job: Job, trial: Trial, exchange: Exchange) -> Outcome:
        """Return how an attempt ended, which the node is judged by. Raises ClientLeft."""
        outcome: Outcome | None = None
        try:
            outcome = await exchange.run()
            return outcome
        finally:
            self.dispatcher.end_trial(job, trial, outcome)

    async def _keep(self, call: Call, job: Job, exchange: Exchange) -> None:
        """Write an answer down that is to be kept, before its last bytes go; they say so when that failed."""
        keeping, translator = call.keeping, exchange.translator
        if keeping is None or exchange.is_delivered or not keeping.is_stored or translator is None:
            return
        if not await call.client.wait_for_work(keep_answer(call.caller, job.request, keeping, translator)):
            exchange.last = mark_unkept(exchange.last)

    def _should_retry(self, call: Call, outcome: Outcome, job: Job, link: Link) -> bool:
        """Decide whether another box gets the request. Raises RequeueExhausted when it had its chances."""
        if not isinstance(outcome, Retry):
            return False
        if self.is_stopping:
            raise ShuttingDown(retry_after_s=2)
        metrics.REDISPATCHES.labels(outcome.reason).inc()
        if outcome.reason is RetryReason.UNSPOKEN:
            self.dispatcher.note_unspoken(link, job.request.model, job.request.endpoint)
            return True
        if outcome.reason is RetryReason.FOREIGN_TOOLS:
            job.request = msgspec.structs.replace(job.request, lane=SPOKEN_THROUGH[job.request.endpoint])
            return True
        if outcome.reason is RetryReason.BUSY:
            job.avoid.add(link)
            self.dispatcher.note_busy(link, outcome.error.retry_after_s)
            if outcome.error.retry_after_s is not None and not self._has_other_node(call, job):
                raise outcome.error
            return True
        job.losses += 1
        job.avoid.add(link)
        if job.losses > self.limits.max_requeues:
            raise RequeueExhausted(retry_after_s=5) if isinstance(outcome.error, RequestInterrupted) else outcome.error
        if outcome.reason is RetryReason.LOST:
            return True
        if all(isinstance(self._outlook(call, name, job.request, job), Closed) for name in job.models):
            is_reclaimed = outcome.reason is RetryReason.RECLAIMED
            raise RequestInterrupted(retry_after_s=5) if is_reclaimed else ForwardedRequestFailed(retry_after_s=2)
        return True

    def _has_other_node(self, call: Call, job: Job) -> bool:
        """Whether a node that did not refuse the request can serve it, with its model or a fallback."""
        outlooks = [self._outlook(call, name, job.request, job) for name in job.models or (job.request.model,)]
        return any(isinstance(one, Ready) or (isinstance(one, Busy) and one.wait_s < math.inf) for one in outlooks)

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
                    call.extra += name_box(record.node_name, record.model)
                    raise await recount_prompt(
                        self.counter,
                        outcome.error,
                        client=call.client,
                        surface=call.surface,
                        entry=call.entries[record.model],
                        request=job.request,
                        tenant=job.tenant,
                        request_id=job.request_id,
                    )
                return Ending(outcome.error.state, outcome.error)
            case Retry():
                raise AssertionError("a retry never concludes a request")
            case _:
                assert_never(outcome)

    async def _quote_engine(self, job: Job, error: GatewayError, record: Record) -> None:
        """Keep and log what an engine said, without what it repeats of the request."""
        if self.limits.max_engine_error_chars:
            body = job.request.body
            quoted = await run_beside(len(body), lambda: quote_message(error.message, body))
            record.engine_error = quoted[: self.limits.max_engine_error_chars]
        logger.warning(
            "request.engine_error request=%s node=%s model=%s status=%d error=%s",
            job.request_id, record.node_name, record.model, error.status, record.engine_error or "-",
        )  # fmt: skip


async def recount_prompt(
    counter: TokenCounter,
    error: GatewayError,
    *,
    client: ClientConnection,
    surface: Surface,
    entry: ModelEntry,
    request: InferenceRequest,
    tenant: str,
    request_id: str,
) -> GatewayError:
    """Return what to tell the client: the error with a count of ours where it has a lower bound and the client acts on it.

    ``request``: as it was asked, for the model of ``entry``. Raises ClientLeft when nobody waits for the count any more.
    """
    if not isinstance(error, ContextTooLong) or not surface.wants_count(error):
        return error
    try:
        chat, _ = await run_beside(len(request.body), lambda: to_chat_body(request.body, is_counting=True))
    except BadRequest:
        return error  # an engine that speaks the surface itself takes more than a translation carries
    counted = await client.wait_for_work(counter.count(entry, chat, tenant=tenant, request_id=request_id))
    return error.recount(counted.tokens)
