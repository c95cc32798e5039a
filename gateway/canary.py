"""Canary questions: what a gateway asks the nodes of a model now and then, to find those that make their answers up.

A question goes to a node as any chat request does: same path, ordinary headers, a free slot. It belongs to no tenant, so it
counts in nobody's limits. Only an answer is judged: a node that is down, slow or refuses is not lying.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from dataclasses import dataclass, field

import msgspec

from core.limits import limits
from gateway.request.attempt import read_usage
from gateway.request.dispatch import Dispatcher, Lease
from gateway.request.models import Catalogue
from gateway.request.records import RecordWriter
from gateway.token_counts import exchange
from gateway.values import CHAT_PATH, ModelEntry, Record
from nodes.links import Link, LinkRegistry
from nodes.session import OpenRequest
from wire import clock
from wire.contract import RequestState
from wire.ids import format_id, new_uuid7
from wire.unreadable import UNREADABLE

logger = logging.getLogger("muster.gateway")

KEY_NAME = "canary"
"""Stands in the record of a canary question, whose tenant is empty."""
_HEADERS = {"content-type": "application/json"}


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []


_decoder = msgspec.json.Decoder(_Completion)


@dataclass(slots=True)
class Canaries:
    """Asks the nodes linked to this gateway. ``interval_s``: seconds between two questions to a replica, on average."""

    gateway_id: uuid.UUID
    registry: LinkRegistry
    dispatcher: Dispatcher
    catalogue: Catalogue
    records: RecordWriter
    interval_s: float
    _due: dict[tuple[uuid.UUID, str], float] = field(default_factory=dict)

    def list_due(self, now: float) -> list[tuple[Link, ModelEntry]]:
        """Return whom to ask now. One that has no free slot is asked once it has one; the first time comes at random."""
        asked = [
            (link, entry)
            for entry in self.catalogue.models.values()
            if entry.allowed and entry.canary_question
            for link in self.registry.links_for(entry.name)
            if link.answers(entry.name, CHAT_PATH)
        ]
        known = self._due
        self._due = {
            (link.node_id, entry.name): known.get((link.node_id, entry.name), now + random.random() * self.interval_s)  # noqa: S311
            for link, entry in asked
        }
        return [
            (link, entry)
            for link, entry in asked
            if now >= self._due[link.node_id, entry.name] and link.can_take(now) and link.load < link.max_concurrent
        ]

    async def ask_due(self) -> None:
        """Ask everybody whose time has come; each takes ``canary_deadline_s`` at most."""
        await asyncio.gather(*(self.ask(link, entry) for link, entry in self.list_due(clock.monotonic())))

    async def ask(self, link: Link, entry: ModelEntry) -> None:
        """Ask one node, judge what it says, and say when it is asked again."""
        if not link.can_take(clock.monotonic()):
            return  # its slot was taken, or it was lost, since it was found to be due
        lease = Lease(self.dispatcher, link, CHAT_PATH)
        link.active += 1
        record_id, started = new_uuid7(), clock.monotonic()
        self._plan_next(link, entry, self.interval_s)
        try:
            answer = await exchange(link, _write_request(entry, format_id("req", record_id), tenant=self.gateway_id.hex[-8:]))
        except TimeoutError:
            return
        finally:
            lease.release()
        if answer is None or answer[0] != 200:
            return
        is_right = entry.canary_answer.casefold() in _read_text(answer[1]).casefold()
        self._record(record_id, link, entry, answer[1], seconds=clock.monotonic() - started)
        again_s = self.interval_s if is_right else min(self.interval_s, limits().gateway.canary_again_s)
        now = self._plan_next(link, entry, again_s)
        if not is_right:
            logger.error(
                "node.canary_wrong node=%s model=%s request=%s", link.node_name, entry.name, format_id("req", record_id)
            )
        until = now + limits().gateway.canary_missed * self.interval_s
        self.registry.ejections.note_canary(link, entry.name, is_right=is_right, until=until, now=now)
        self.registry.announce(link)

    def _plan_next(self, link: Link, entry: ModelEntry, pause_s: float) -> float:
        now = clock.monotonic()
        # Half a pause sooner or later, so that a node cannot tell when it is asked.
        self._due[link.node_id, entry.name] = now + pause_s * (0.5 + random.random())  # noqa: S311 - no secret
        return now

    def _record(self, record_id: uuid.UUID, link: Link, entry: ModelEntry, body: bytes, *, seconds: float) -> None:
        record = Record(
            id=record_id,
            created_at=clock.now(),
            gateway_id=self.gateway_id,
            tenant="",
            key_id=uuid.UUID(int=0),
            key_name=KEY_NAME,
            endpoint=CHAT_PATH,
            model=entry.name,
            is_streaming=False,
            max_tokens=limits().gateway.canary_tokens,
            node_id=link.node_id,
            node_name=link.node_name,
            attempts=1,
            status_code=200,
            bytes_out=len(body),
            latency_ms=int(seconds * 1000),
            finished_at=clock.now(),
            state=RequestState.COMPLETED,
        )
        usage = read_usage(body)
        if usage is not None:
            record.prompt_tokens = min(max(0, usage.prompt_tokens), limits().gateway.record_integer)
            record.completion_tokens = min(max(0, usage.completion_tokens), limits().gateway.record_integer)
        self.records.add_final(record)


def _write_request(entry: ModelEntry, request_id: str, *, tenant: str) -> OpenRequest:
    message = {"role": "user", "content": entry.canary_question}
    body = {"model": entry.name, "messages": [message], "temperature": 0, "max_tokens": limits().gateway.canary_tokens}
    return OpenRequest(
        request_id=request_id,
        attempt=1,
        model=entry.name,
        path=CHAT_PATH,
        body=msgspec.json.encode(body),
        headers=_HEADERS,
        is_streaming=False,
        deadline_ms=int(limits().gateway.canary_deadline_s * 1000),
        tenant=tenant,
    )


def _read_text(body: bytes) -> str:
    try:
        choices = _decoder.decode(body).choices
    except UNREADABLE:
        return ""
    said = [text for each in choices for text in (each.message.reasoning_content, each.message.reasoning, each.message.content)]
    return "\n".join(text for text in said if text)
