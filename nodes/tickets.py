"""What goes between a gateway process and its nodes about tickets: keys and addresses there, reports of usage back."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from django.db import DatabaseError, InterfaceError

from core.db.threads import run_in_database
from core.limits import limits
from nodes.certificates import CertificateChannel
from nodes.links import LinkRegistry
from nodes.links.relay import RelayLink
from nodes.services.tickets import (
    TicketKeyring,
    ensure_ticket_key,
    find_ticket_refusal,
    load_ticket_keys,
    store_ticket_refusal,
)
from wire import bridge

logger = logging.getLogger("muster.nodes")

Refusals = Mapping[tuple[uuid.UUID, str], str]
"""Why what a node said of a ticket had no effect, by node and ticket."""
StoreUsage = Callable[[Sequence[tuple[uuid.UUID, bridge.TicketUsage]]], Coroutine[Any, Any, Refusals]]
"""Writes down what nodes say of tickets, each with the node that says it. Raises DatabaseError."""
HearUsage = Callable[[uuid.UUID, bridge.TicketUsage], None]
"""Told at once what a node says of a ticket, before that is written down."""


class KeyTaker(Protocol):
    """A node as far as it is told of ticket keys. ``told_ticket_keys``: what it knows, by id; None = it takes no tickets."""

    told_ticket_keys: tuple[str, ...] | None

    def send_message(self, message: bridge.Message) -> object:
        """Send a message soon."""


class TicketChannel:
    """One per gateway process. ``spawn`` runs work beside, ``wake`` has ``store`` called soon."""

    def __init__(
        self,
        registry: LinkRegistry,
        agents: Mapping[uuid.UUID, KeyTaker],
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        wake: Callable[[], None],
        store: StoreUsage | None,
        hear: HearUsage | None,
    ) -> None:
        self.keyring = TicketKeyring()
        self.certificates = CertificateChannel(registry, spawn=spawn, judge=self._look_at)
        self._limits = limits().nodes
        self._registry, self._agents = registry, agents
        self._spawn = spawn
        self._wake = wake
        self._store_usage = store
        self._hear_usage = hear
        self._usage: dict[tuple[uuid.UUID, str], bridge.TicketUsage] = {}
        """What nodes said of tickets and the database does not know yet, the newest of each, by node and ticket."""

    def welcome(self, link: RelayLink, said: bridge.Register) -> None:
        """Take that clients may reach a node that has just registered at the URL it names, once that was looked at."""
        link.told_ticket_keys = tuple(key.kid for key in self.keyring.list_public())
        link.named_url = said.ticket_url
        if said.takes_certificates:
            self.certificates.welcome(link)  # it answers whether clients can verify it by now
        else:
            self._spawn(self._look_at(link, ""))

    def take_certificate_request(self, link: RelayLink, message: bridge.CertificateRequest) -> None:
        """Take what a node says of its certificate; one that was told of no CAs has nothing to say."""
        if link.told_authorities is not None:
            self.certificates.take_request(link, message)

    async def _look_at(self, link: RelayLink, error: str) -> None:
        # In the order in which the node spoke: what it said first would else be stored last.
        async with link.looking:
            try:
                if self.keyring.is_empty:
                    await run_in_database(ensure_ticket_key)
                # A name server may be slow.
                error = error or await asyncio.to_thread(find_ticket_refusal, link.named_url)
                error = error[: self._limits.probe_error_chars]
                await run_in_database(store_ticket_refusal, node_id=link.node_id, url=link.named_url, error=error)
            except (DatabaseError, InterfaceError):
                logger.warning("node.ticket_url_not_checked node_id=%s; looked at when the node registers again", link.node_id)

    async def ensure_key(self) -> None:
        """See to it that there is a key before a node is told of them. Raises DatabaseError."""
        if self.keyring.is_empty:
            await run_in_database(ensure_ticket_key)
            self.keyring.take(await run_in_database(load_ticket_keys))

    def tell_keys(self) -> None:
        """Tell the nodes that take tickets which keys and CAs hold now, those that do not know it yet."""
        self.certificates.tell()
        links = (link for link in self._registry if isinstance(link, RelayLink))
        nodes: list[KeyTaker] = [*links, *self._agents.values()]
        if takers := [node for node in nodes if node.told_ticket_keys is not None]:
            keys = self.keyring.list_public()
            for taker in takers:
                self.tell(taker, keys)

    def tell(self, taker: KeyTaker, keys: list[bridge.TicketPublicKey] | None = None) -> None:
        """Tell one node the keys (None = those of now), unless it knows them or takes no tickets."""
        if taker.told_ticket_keys is None:
            return
        keys = self.keyring.list_public() if keys is None else keys
        kids = tuple(key.kid for key in keys)
        if taker.told_ticket_keys != kids:
            taker.told_ticket_keys = kids
            taker.send_message(bridge.TicketKeys(keys=keys))

    def take_usage(self, link: RelayLink, reports: Sequence[bridge.TicketUsage]) -> None:
        """Note what became of requests with tickets; the node says it again until it hears that it is stored."""
        waiting = sum(node_id == link.node_id for node_id, _ in self._usage)
        for report in reports:
            key = (link.node_id, report.ticket_id)
            waiting += key not in self._usage
            if waiting > self._limits.ticket_reports_per_node:
                logger.warning("node.usage_dropped node=%s; the node says it again", link.node_name)
                break
            self._usage[key] = report
            if self._hear_usage is not None:
                self._hear_usage(link.node_id, report)
        self._wake()

    async def take_usage_of_agent(self, node_id: uuid.UUID, reports: Sequence[bridge.TicketUsage]) -> bridge.UsageTaken:
        """Write down what an agent says and return the answer. What is over the most of a node is not named: it says it again.

        Raises DatabaseError.
        """
        said = list(reports[: self._limits.ticket_reports_per_node])
        answer = bridge.UsageTaken(taken={report.ticket_id: report.status for report in said})
        if self._store_usage is None or not said:
            return answer
        refused = await self._store_usage([(node_id, report) for report in said])
        for report in said:
            if self._hear_usage is not None:
                self._hear_usage(node_id, report)
        answer.refused = {ticket_id: why for (_, ticket_id), why in refused.items()}
        return answer

    async def store(self) -> None:
        """Have what nodes said written down, and tell them. Raises DatabaseError: it is kept then."""
        due = dict(islice(self._usage.items(), self._limits.channel_statuses))
        if not due or self._store_usage is None:
            return
        refused = await self._store_usage([(node_id, report) for (node_id, _), report in due.items()])
        answers: dict[uuid.UUID, bridge.UsageTaken] = {}
        for (node_id, ticket_id), report in due.items():
            answer = answers.setdefault(node_id, bridge.UsageTaken(taken={}))
            answer.taken[ticket_id] = report.status
            if (why := refused.get((node_id, ticket_id))) is not None:
                answer.refused[ticket_id] = why
            if self._usage.get((node_id, ticket_id)) is report:  # else the node has said something newer meanwhile
                del self._usage[node_id, ticket_id]
        for node_id, answer in answers.items():
            link = self._registry.get(node_id)
            if isinstance(link, RelayLink) and not link.closed:
                link.send_message(answer)
        if self._usage:
            self._wake()
