"""Inference over HTTP: a request read, handed to the node, and its answer sent for as long as the client stays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from runner.api.bodies import BodyBudget, check_media_type, parse_object, read_body, read_form_fields, render
from runner.errors import EngineUnavailable, ModelUnloading, QueueTimeout, RequestRefused, Unavailable, error_event
from runner.limits import limits
from runner.parts import Parts
from runner.queue import clean_tenant
from runner.serving.request import (
    Answer,
    BodyFields,
    Inference,
    Numbers,
    check_bounds,
    check_crowd,
    read_cache_mode,
    read_cache_tag,
    read_fields,
    read_priority,
)
from runner.tickets import apply_cap
from wire import clock
from wire.bridge import TicketUsage
from wire.contract import RequestState
from wire.engine_errors import Blame, judge_error
from wire.events import EndReader
from wire.ticket import Ticket

log = logging.getLogger(__name__)

_NOT_TO_ENGINE = frozenset({"authorization", "x-api-key", "cookie", "origin", "referer", "host", "content-length", "expect"})
_WAITED = (QueueTimeout, ModelUnloading)
"""Refusals that a request may hear after it has waited."""


class _ClientStalled(Exception):
    """The client takes nothing of its answer."""


class InferenceEndpoint:
    """ASGI endpoint of every inference path. ``is_form``: the body is multipart, with the model in one of its fields."""

    def __init__(self, parts: Parts, budget: BodyBudget, *, is_form: bool) -> None:
        self._parts = parts
        self._budget = budget
        self._is_form = is_form
        self._jobs: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; when the client leaves, the engine is freed in the next turn of the loop."""
        with self._budget.hold() as take:
            try:
                inference = await self._read(Request(scope, receive), take)
            except ClientDisconnect:
                return
            reply = _Reply(scope, send, inference)
            if inference.has_ticket:
                await self._serve_ticket(scope["state"]["ticket"], inference, reply, receive)
            else:
                await self._serve(inference, reply, receive)

    async def _serve_ticket(self, ticket: Ticket, inference: Inference, reply: _Reply, receive: Receive) -> None:
        tickets = self._parts.tickets
        spent = await tickets.spend(
            ticket, endpoint=inference.endpoint, model=inference.model, is_streaming=inference.is_streaming
        )
        try:
            await self._serve(inference, reply, receive)
        finally:
            report = tickets.report(spent, status=reply.judge().value)
            reply.fill_in(report)
            await asyncio.shield(tickets.finish(spent, report))

    async def _serve(self, inference: Inference, reply: _Reply, receive: Receive) -> None:
        work = asyncio.create_task(self._answer(inference, reply))
        gone = asyncio.create_task(_wait_gone(receive))
        self._jobs.add(work)
        if inference.has_ticket:
            self._parts.tickets.running[work] = ""
        why = ""
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            has_left = gone.done() and not work.done()
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._jobs.discard(work)
            if inference.has_ticket:
                why = self._parts.tickets.running.pop(work)
        if not work.cancelled():
            work.result()
        elif not has_left:
            await reply.refuse(Unavailable(why or "The node is shutting down.", retry_after_s=5))

    def close(self) -> None:
        for work in self._jobs:
            work.cancel()

    async def _read(self, request: Request, take: Callable[[int], None]) -> Inference:
        headers = {name: value for name, value in request.headers.items() if name not in _NOT_TO_ENGINE}
        headers["x-request-id"] = request.scope["state"]["request_id"]
        tenant, priority = clean_tenant(headers.get("x-tenant-id", "")), read_priority(headers.get("x-priority", ""))
        mode, tag = read_cache_mode(headers.get("x-cache-mode", "")), read_cache_tag(headers.get("x-cache-tag", ""))
        body, fields, members = await self._read_body(request, take)
        ticket: Ticket | None = request.scope["state"].get("ticket")
        if ticket is not None:
            # Tenant and limits are those that the gateway knows the caller by, whatever the headers say.
            tenant, priority = ticket.tenant, "low" if priority == "low" else "normal"
            headers["x-request-id"] = ticket.record_id
            body = apply_cap(ticket, endpoint=request.scope["path"], fields=members, body=body)
        query = request.scope["query_string"].decode("latin-1")
        return Inference(
            "POST", request.scope["path"] + (f"?{query}" if query else ""), headers, body, fields.model, tenant, priority, mode,
            tag, is_streaming=bool(fields.stream), allow_remote=bool(fields.allow_remote),
            request_id=headers["x-request-id"], has_ticket=ticket is not None,
        )  # fmt: skip

    async def _read_body(self, request: Request, take: Callable[[int], None]) -> tuple[bytes, BodyFields, Mapping[str, object]]:
        """Return a body, what serving reads of it, and the members of a JSON body."""
        if self._is_form:
            check_media_type(request, "multipart/form-data")
            body = await read_body(request, most_bytes=limits().api.form_bytes, take=take)
            return body, read_form_fields(request.headers["content-type"], body), {}
        check_media_type(request, "application/json")
        body = await read_body(request, most_bytes=limits().api.json_bytes, take=take)
        fields = read_fields(body)
        check_crowd(body)
        # Parsed as a whole: an engine may take the other one of two fields of the same name.
        members = parse_object(body)
        check_bounds(request.scope["path"], members)
        return body, fields, members

    async def _answer(self, inference: Inference, reply: _Reply) -> None:
        try:
            async with self._parts.serving.open(inference) as answer:
                await reply.send_answer(answer)
        except RequestRefused as refusal:
            await reply.refuse(refusal)
        except _ClientStalled:
            log.warning("client took nothing of its answer for %.0f s model=%s", limits().api.client_stall_s, inference.model)


class _Reply:
    """What goes back to one client."""

    def __init__(self, scope: Scope, send: Send, inference: Inference) -> None:
        self._scope = scope
        self._send_message = send
        self._inference = inference
        self._stall_s = limits().api.client_stall_s
        self._began = clock.monotonic()
        self._has_started = False
        self._has_ended = False
        self._is_event_stream = False
        self._ends: EndReader | None = None
        self._tail = b""
        self._answer: Answer | None = None
        self._refusal: RequestRefused | None = None
        self._bytes_out = 0

    def judge(self) -> RequestState:
        """Return how the request ended, once nothing more is sent."""
        refusal, answer = self._refusal, self._answer
        if isinstance(refusal, Unavailable):
            return RequestState.INTERRUPTED
        if refusal is not None and answer is None and refusal.status < 500:
            return RequestState.REJECTED
        if refusal is not None or answer is None:
            return RequestState.FAILED if refusal is not None else RequestState.CANCELLED
        if not self._has_ended:
            return RequestState.CANCELLED
        if answer.status >= 400 and judge_error(answer.status) is Blame.CALLER:
            return RequestState.REJECTED
        return RequestState.COMPLETED if answer.status < 400 and not answer.has_failed else RequestState.FAILED

    def fill_in(self, report: TicketUsage) -> None:
        """Say in a report what the answer told."""
        report.bytes_out = self._bytes_out
        if (refusal := self._refusal) is not None:
            report.code, report.http_status = refusal.code, refusal.status
        if (answer := self._answer) is not None:
            report.usage, report.queue_ms = answer.usage, round(answer.numbers.queue_wait_ms)
            report.http_status = answer.status

    async def send_answer(self, answer: Answer) -> None:
        """Send an answer to its end. Raises what reading it raises, and _ClientStalled."""
        self._answer, self._is_event_stream, self._ends = answer, answer.is_event_stream, answer.ends
        await self._start(answer.status, answer.headers)
        if answer.body is not None:
            await self._send_body(answer.body, more=False)
            return
        assert answer.chunks is not None
        async for chunk in answer.chunks:
            self._tail = chunk
            await self._send_body(chunk, more=True)
        await self._send_body(b"", more=False)

    async def refuse(self, refusal: RequestRefused) -> None:
        """Send a refusal: as an answer of its own, or, in an event stream that has begun, as its last event."""
        if self._has_ended:
            return
        self._refusal = refusal
        if not self._has_started:
            path = self._inference.endpoint
            response = render(refusal, path=path, headers=self._numbers(refusal))
            await response(self._scope, _receive_nothing, self._send_message)
            self._has_started = self._has_ended = True
        elif self._is_event_stream:
            torn = not self._tail.endswith(b"\n\n")  # of an event too large to be held a part may be out
            said = error_event(self._inference.endpoint, refusal, model=self._inference.model, ends=self._ends)
            await self._send_body(b"\n\n" * torn + said, more=False)
        # Else the body stays short of its end, by which a client sees that it is not whole.

    def _numbers(self, refusal: RequestRefused) -> dict[str, str]:
        # The headers of the model-runner specification; how long a request waited only where that is known.
        waited_ms = (clock.monotonic() - self._began) * 1000 if isinstance(refusal, _WAITED) else 0.0
        headers = Numbers(queue_wait_ms=waited_ms).headers()
        if isinstance(refusal, EngineUnavailable):
            del headers["x-queue-wait-ms"]
        return headers

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._has_started = True
        await self._send({
            "type": "http.response.start", "status": status,
            "headers": [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()],
        })  # fmt: skip

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        self._has_ended = not more
        self._bytes_out += len(body)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _send(self, message: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send_message(message)
        except TimeoutError:
            raise _ClientStalled from None


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _receive_nothing() -> dict[str, object]:
    return {"type": "http.disconnect"}
