"""Tickets: requests that their callers take to a node themselves. Judged, planned and recorded as if they were relayed.

A ticket is given where a node that can be reached directly has a free slot. Otherwise the caller is told to ask the gateway,
which can wait.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import msgspec

from core.limits import limits
from gateway import metrics
from gateway.dialects.body import check_model_name, read_fault, read_options
from gateway.errors import BadRequest, ClientLeft, GatewayError, RateLimited, RecordsUnavailable, ShuttingDown, TicketUnknown
from gateway.request.access_log import Refused
from gateway.request.budgets import Reservation
from gateway.request.candidates import Candidate, choose_path
from gateway.request.client import ClientConnection
from gateway.request.dispatch import Job, Lease, Ready
from gateway.request.models import choose_priority
from gateway.request.pipeline import Call, Pipeline
from gateway.request.records import Ending, name_model
from gateway.services.tickets import EndedRequest
from gateway.values import (
    CHAT_PATH,
    TICKETS_PATH,
    Caller,
    Header,
    InferenceRequest,
    Record,
    RequestOutcome,
    WholeNumber,
    judge_outcome,
    read_whole_number,
)
from nodes.certificates import CertificateChannel
from nodes.links import Link, LinkRegistry
from nodes.services.tickets import TicketKeyring
from wire import clock
from wire.bridge import TicketUsage
from wire.contract import RequestState
from wire.ids import format_id, new_uuid7
from wire.ticket import Caps, Ticket, TicketKey, issue_ticket
from wire.unreadable import UNREADABLE

PATHS = {
    "chat": CHAT_PATH,
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
"""API paths that a node answers clients on, by what callers name them. Nothing is translated there."""


class TicketWish(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/tickets``. ``dialects``: what the caller may speak with the node, which has to answer all of them.

    ``max_tokens``: of the answer, 0 = as many as the model allows here; ``prompt_tokens_est``: about how long the prompt is.
    """

    model: str
    max_tokens: WholeNumber | None = None
    prompt_tokens_est: WholeNumber = 0
    dialects: tuple[Literal["chat", "completions", "embeddings", "messages", "responses"], ...] = ("chat",)
    x_pool_options: msgspec.Raw = msgspec.Raw()


class GivenTicket(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Answer 201. ``base_url`` and ``ticket`` are what an SDK takes as base URL and API key. ``model``: the name to ask for.

    ``ca_url``: where the internal CAs lie that the node is verified with, beside those that everybody trusts.
    """

    ticket: str
    ticket_id: str
    base_url: str
    expires_at: str
    model: str
    node_id: str
    ca_url: str = ""


class RelayAdvice(msgspec.Struct, kw_only=True):
    """Answer 200: no node that can be reached directly has room now; ``base_url`` is the gateway, with the caller's own key."""

    base_url: str
    relay: bool = True


@dataclass(slots=True)
class _Asked:
    """What one caller asks for, where there is room for it, and what is reserved of budgets."""

    request: InferenceRequest
    found: tuple[Candidate, Ready] | None = None
    reservation: Reservation | None = None

    def let_go(self) -> None:
        if self.reservation is not None:
            self.reservation.settle()


@dataclass(slots=True)
class HeldSlot:
    """A slot that is held for a ticket until its request has ended, or ``timer`` ends it.

    ``is_interrupted``: its node has cut the request; the slot is free then, and the holder is still told where to go on.
    """

    lease: Lease
    caller: Caller
    request: InferenceRequest
    timer: asyncio.TimerHandle
    is_used: bool = False
    """Whether its node said that its request began, or ended."""
    is_interrupted: bool = False


@dataclass(slots=True)
class TicketOffice:
    """Gives tickets. One per gateway process; the pipeline decides, as for requests that are relayed."""

    pipeline: Pipeline
    registry: LinkRegistry
    keyring: TicketKeyring
    certificates: CertificateChannel
    relay_url: str
    """Base URL of the gateways for clients, ``/v1`` included."""
    slots: dict[str, HeldSlot] = field(default_factory=dict)
    """Slots of nodes that tickets of this process hold, by ticket."""
    held: dict[uuid.UUID, Reservation] = field(default_factory=dict)
    """What tickets of this process reserved of budgets and is not settled, by record."""

    async def issue(self, client: ClientConnection, extra: list[Header]) -> GivenTicket | RelayAdvice:
        """Return a ticket, or the advice to ask the gateway; ``extra`` gets the headers of the answer. Raises GatewayError."""
        pipeline = self.pipeline
        if pipeline.is_stopping:
            raise ShuttingDown(retry_after_s=2)
        caller = await pipeline.keys.identify(client.headers, address=client.address, scope=client.scope)
        record_id = new_uuid7()
        asked = await self._judge(client, caller, record_id, extra)
        answer = await self._give(client, caller, record_id, asked)
        if isinstance(answer, RelayAdvice):
            pipeline.limiter.give_back(caller.key_id)  # the relayed request is counted then
        return answer

    def find_slot(self, ticket_id: str, caller: Caller) -> HeldSlot:
        """Return what a ticket of the caller's holds here. Raises TicketUnknown."""
        slot = self.slots.get(ticket_id)
        if slot is None or slot.caller.key_id != caller.key_id:
            raise TicketUnknown
        return slot

    def find_loss(self, link: Link, *, is_cut: bool = False) -> str:
        """Return why what runs on a node may not end well there, or was cut; empty = nothing speaks against it."""
        if link.silence_s >= link.windows.stale_s:
            return "gpu_timeout"
        if link.closed or self.registry.get(link.node_id) is not link:
            return "gpu_lost"
        policy = link.policy
        if is_cut or (policy.drain_deadline_at is not None and clock.monotonic() >= policy.drain_deadline_at):
            return "gpu_reclaimed" if policy.reclaimed else "gpu_draining" if policy.draining else "gpu_lost"
        return ""

    async def say_failover(self, client: ClientConnection, slot: HeldSlot, reason: str) -> bytes:
        """Return the event that tells the holder of a ticket whose node was lost where to ask anew. Raises ClientLeft."""
        return await self._say_failover(client, slot.caller, slot.request, reason, avoid=[slot.lease.link])

    async def say_failover_of_stream(self, call: Call, job: Job, link: Link) -> bytes:
        """Return the same event for the client of a relayed stream that its node broke. Raises ClientLeft."""
        asked, path = job.request, call.surface.path
        request = InferenceRequest(
            endpoint=TICKETS_PATH,
            paths=(path,) if path in PATHS.values() else (),
            model=job.asked_model,
            max_tokens=asked.max_tokens,
            prompt_chars=asked.prompt_chars,
            options=asked.options,
        )
        reason = self.find_loss(link, is_cut=True)
        is_chunk = path in (CHAT_PATH, PATHS["completions"])
        return await self._say_failover(call.client, call.caller, request, reason, avoid=job.avoid, is_chunk=is_chunk)

    async def _say_failover(
        self, client: ClientConnection, caller: Caller, request: InferenceRequest, reason: str,
        *, avoid: Iterable[Link], is_chunk: bool = False,
    ) -> bytes:  # fmt: skip
        # The event of the central-server document, section 3.3. Its ticket is for a request of its own, with a record and a
        # reservation; none: ask the gateway. SDKs of OpenAI take each event of a chat for a chunk, which has choices.
        answer: GivenTicket | RelayAdvice = RelayAdvice(base_url=self.relay_url)
        record_id = new_uuid7()
        try:
            if request.paths and not self.pipeline.is_stopping:
                asked = await self._reserve(client, caller, request, record_id, avoid=avoid)
                answer = await self._give(client, caller, record_id, asked)
        except ClientLeft:
            raise
        except GatewayError:  # the gateway says why when it is asked
            pass
        given = msgspec.to_builtins(answer)
        said = {"type": "x_pool_failover", "reason": reason, "new_ticket": given.pop("ticket", None), **given}
        said |= {"choices": []} if is_chunk else {}
        return b"event: x_pool_failover\ndata: %b\n\n" % _encode(said)

    async def _give(
        self, client: ClientConnection, caller: Caller, record_id: uuid.UUID, asked: _Asked
    ) -> GivenTicket | RelayAdvice:
        pipeline, key, found = self.pipeline, self.keyring.find_signing(), asked.found
        if found is None or key is None:
            asked.let_go()
            metrics.TICKETS.labels("relayed").inc()
            return RelayAdvice(base_url=self.relay_url)
        candidate, ready = found
        record = pipeline.recorder.make_record(record_id, caller, candidate.request, asked_model=asked.request.model)
        name_model(record, candidate.entry.name, asked_model=asked.request.model)
        if record.max_tokens is None:
            record.max_tokens = candidate.entry.max_tokens
        if asked.reservation is not None:
            record.reserved_tokens, record.reserved_micros = asked.reservation.tokens, asked.reservation.micros
        path = choose_path(ready.link, candidate.request)
        lease = pipeline.dispatcher.grant(ready.link, candidate.entry.name, path, clock.monotonic(), ready.choice)
        if lease.choice is not None:
            record.decision = pipeline.dispatcher.describe(lease)
        lease.granted = 0.0  # how long it is held says nothing of how long requests take
        try:
            await self._write_down(client, record, ready.link)
        except BaseException:
            lease.release()
            asked.let_go()
            raise
        if asked.reservation is not None:
            self.held[record_id] = asked.reservation
        return self._sign(key, caller, record, lease, asked.request)

    async def _judge(self, client: ClientConnection, caller: Caller, record_id: uuid.UUID, extra: list[Header]) -> _Asked:
        """Return what is asked for and where there is room. Raises GatewayError, and writes down what is refused."""
        pipeline, model = self.pipeline, ""
        request = InferenceRequest(endpoint=TICKETS_PATH, paths=(TICKETS_PATH,), model="")
        body = await client.read_body()
        try:
            extra += pipeline.limiter.take(caller.key_id, caller.requests_per_minute).headers()
            request = _make_request(read_wish(body))
            model = request.model
            return await self._reserve(client, caller, request, record_id)
        except GatewayError as error:
            if isinstance(error, RateLimited):
                extra += pipeline.limiter.peek(caller.key_id, caller.requests_per_minute).headers()
            pipeline.recorder.record_refusal(error, caller, request, record_id, asked_model=model)
            refused = Refused(record_id, TICKETS_PATH, client.address, caller, request)
            pipeline.recorder.count_refusal(error, refused)
            raise

    async def _reserve(
        self, client: ClientConnection, caller: Caller, request: InferenceRequest, record_id: uuid.UUID,
        *, avoid: Iterable[Link] = (),
    ) -> _Asked:  # fmt: skip
        """Return where there is room for a request, with what it may use reserved. Raises GatewayError."""
        budgets, asked = self.pipeline.budgets, _Asked(request)
        job = self._make_job(caller, request, record_id, client)
        job.avoid.update(avoid)
        asked.found = self._find_room(job)
        if asked.found is not None and caller.budgets and budgets is not None:
            entries = [one.entry for one in job.candidates]
            asked.reservation = await self.pipeline.reserve(budgets, caller, request, entries)
            try:
                asked.found = self._find_room(job)  # what was found before is old then
            except GatewayError:
                asked.let_go()
                raise
        return asked

    def _make_job(self, caller: Caller, request: InferenceRequest, record_id: uuid.UUID, client: ClientConnection) -> Job:
        entries = self.pipeline.admission.admit(caller, request)
        return self.pipeline.dispatcher.new_job(
            request_id=format_id("req", record_id),
            candidates=[Candidate(entry, request, _rename) for entry in entries],
            tenant=caller.tenant,
            asked_model=request.model,
            priority=choose_priority(caller, request.options),
            key_id=caller.key_id,
            headers=client.headers,
            weight=caller.weight,
        )

    def _find_room(self, job: Job) -> tuple[Candidate, Ready] | None:
        """Return a model and a node of it that its caller can reach and that has a free slot. Raises what refuses everybody."""
        for candidate in job.candidates:
            model, paths = candidate.entry.name, candidate.request.paths
            links = self.registry.links_answering(model, paths)
            job.avoid.update([link for link in links if not _is_reachable(link, model, paths)])
        plan = self.pipeline.dispatcher.plan(job)
        if plan.refusal is not None:
            raise plan.refusal
        for candidate in plan.rank(0.0):
            ready = plan.find_ready(candidate)
            if ready is not None:
                return candidate, ready
        return None

    async def _write_down(self, client: ClientConnection, record: Record, link: Link) -> None:
        record.node_id, record.node_name = link.node_id, link.node_name
        record.attempts, record.queue_ms = 1, 0
        record.state = RequestState.ASSIGNED
        accepted = self.pipeline.records.accept(record)
        try:
            await client.wait(accepted)
        except GatewayError as error:
            if not isinstance(error, RecordsUnavailable):
                self.pipeline.recorder.seal(record, Ending(error.state, error))
            raise

    def _sign(self, key: TicketKey, caller: Caller, record: Record, lease: Lease, request: InferenceRequest) -> GivenTicket:
        now, link = clock.unix_s(), lease.link
        expires_at = now + limits().gateway.ticket_s
        ticket = Ticket(
            ticket_id=f"tkt_{record.id.hex}",
            issued_at=now,
            expires_at=expires_at,
            gpu_endpoint=link.ticket_url,
            model=record.model,
            audience=format_id("node", link.node_id),
            tenant=caller.tenant,
            key_id=format_id("key", caller.key_id),
            record_id=format_id("req", record.id),
            caps=Caps(max_tokens=record.max_tokens or 0),
        )
        timer = self._free_after(ticket.ticket_id, limits().gateway.ticket_s)
        metrics.TICKETS.labels("given").inc()
        self.slots[ticket.ticket_id] = HeldSlot(lease, caller, request, timer)
        if self.pipeline.is_stopping:
            self._free(ticket.ticket_id)
        return GivenTicket(
            ticket=issue_ticket(key, ticket),
            ticket_id=ticket.ticket_id,
            base_url=f"{link.ticket_url.rstrip('/')}/v1",
            expires_at=datetime.fromtimestamp(expires_at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            model=record.model,
            node_id=ticket.audience,
            ca_url=f"{self.relay_url}/ca" if link.ticket_url.startswith("https:") and self.certificates.authorities else "",
        )

    def hear(self, node_id: uuid.UUID, report: TicketUsage) -> None:
        """Take at once what a node says of a ticket: its slot is held while its request runs, and is free when that ended."""
        slot = self.slots.get(report.ticket_id)
        if slot is None or slot.lease.link.node_id != node_id:
            return
        slot.timer.cancel()
        if not slot.is_used:
            slot.is_used = True
            metrics.TICKETS.labels("used").inc()
        if report.status == RequestState.RUNNING:
            slot.timer = self._free_after(report.ticket_id, limits().gateway.request_s)
        elif report.status == RequestState.INTERRUPTED:
            slot.is_interrupted = True
            slot.lease.release()
            slot.timer = self._free_after(report.ticket_id, limits().gateway.ticket_s)
        else:
            self._free(report.ticket_id)

    def _free_after(self, ticket_id: str, seconds: float) -> asyncio.TimerHandle:
        # After that, what the node says of its load counts: it may report to another gateway.
        return asyncio.get_running_loop().call_later(seconds, self._expire, ticket_id)

    def _expire(self, ticket_id: str) -> None:
        slot = self.slots.get(ticket_id)
        if slot is not None and not slot.is_used:
            metrics.TICKETS.labels("expired").inc()
        self._free(ticket_id)

    def _free(self, ticket_id: str) -> None:
        if (slot := self.slots.pop(ticket_id, None)) is not None:
            slot.lease.release()

    def free_slots(self) -> None:
        """Let go of all slots."""
        for ticket_id in tuple(self.slots):
            self._free(ticket_id)

    def take_ended(self, ended: Sequence[EndedRequest]) -> None:
        """Count and settle requests of which nodes have just said how they ended."""
        for one in ended:
            metrics.COUNTERS.add(
                model=one.model,
                state=one.state,
                outcome=judge_outcome(one.state, one.status_code) or RequestOutcome.FAILED,
                latency_s=one.latency_ms / 1000,
                ttfb_ms=None,
                queue_ms=one.queue_ms,
                prompt_tokens=one.prompt_tokens,
                completion_tokens=one.completion_tokens,
            )
        self.settle(ended)

    def settle(self, ended: Sequence[EndedRequest]) -> None:
        """Give back what tickets of this process reserved and did not use; one of which nobody knows used all of it."""
        for one in ended:
            reservation = self.held.pop(one.record_id, None)
            if reservation is None:
                continue
            is_known = one.prompt_tokens is not None or one.state is RequestState.REJECTED
            reservation.settle(
                model=one.model,
                prompt_tokens=one.prompt_tokens or 0,
                completion_tokens=(one.completion_tokens or 0) if is_known else reservation.tokens,
                cached_tokens=one.cached_tokens or 0,
                is_estimated=one.is_estimated or not is_known,
            )


def read_wish(body: bytes) -> TicketWish:
    """Parse a body. Raises BadRequest naming the field at fault."""
    try:
        wish = _wishes.decode(body)
    except msgspec.ValidationError as error:
        reason, path = read_fault(error)
        raise BadRequest(f"The ticket cannot be asked for so: {reason}.", param=path.lstrip(".") or None) from None
    except UNREADABLE as error:
        raise BadRequest(f"The request body is not valid JSON: {error}.") from None
    check_model_name(wish.model, "model")
    for name, value in (("max_tokens", wish.max_tokens or 0), ("prompt_tokens_est", wish.prompt_tokens_est)):
        if not 0 <= value <= limits().gateway.record_integer:
            raise BadRequest(f"The field '{name}' must lie between 0 and {limits().gateway.record_integer}.", param=name)
    if not wish.dialects:
        raise BadRequest(f"The field 'dialects' must name at least one of {', '.join(PATHS)}.", param="dialects")
    return wish


_wishes = msgspec.json.Decoder(TicketWish, dec_hook=read_whole_number)
_encode = msgspec.json.Encoder().encode


def _make_request(wish: TicketWish) -> InferenceRequest:
    raw = bytes(wish.x_pool_options)
    return InferenceRequest(
        endpoint=TICKETS_PATH,
        paths=tuple(dict.fromkeys(PATHS[dialect] for dialect in wish.dialects)),
        model=wish.model,
        max_tokens=wish.max_tokens or None,
        prompt_chars=wish.prompt_tokens_est * limits().gateway.token_chars,
        options=read_options(wish.x_pool_options) if raw and raw != b"null" else None,
    )


def _rename(request: InferenceRequest, model: str) -> InferenceRequest:
    return msgspec.structs.replace(request, model=model)


def _is_reachable(link: Link, model: str, paths: Sequence[str]) -> bool:
    return bool(link.ticket_url) and all(link.answers(model, path) for path in paths)
