"""Tickets at the node: who may ask for what on its own port, once, and what is told of it to a gateway.

A ticket is spent on disk before the engine sees a byte. How its request ended lies in the same row until a gateway has said
that it is stored. Keys and the server's clock come with each session; no ticket lives long enough to need them after that.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from runner.config import TicketConfig
from runner.engines.port import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
from runner.errors import TICKET_REFUSALS, InvalidRequest, TicketRefused, Unavailable
from runner.ledger.database import LedgerFull
from runner.ledger.ledger import Ledger
from runner.limits import limits
from wire import clock
from wire.bridge import TicketPublicKey, TicketUsage
from wire.contract import RequestState
from wire.ticket import Ticket, TicketError, TicketFault, verify_ticket

log = logging.getLogger(__name__)

TICKET_PATHS = frozenset({CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES})
"""What a ticket opens: nothing else of a node's port is for clients of the fleet."""
RUNNING = RequestState.RUNNING.value
_RECLAIMED = "The owner has taken this node back."
_DRAINED = "The node was drained, and the time for what still ran is over."
_LIMIT_FIELDS = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
"""The field that bounds an answer, by path; no other path answers with tokens."""
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "max_new_tokens")
"""All the names by which engines take that bound, whatever the path: of two the larger may be the one that counts."""
_TIMES = ("n", "best_of", "n_cmpl")
"""Fields that ask for several answers at once."""


@dataclass(frozen=True, slots=True)
class Spent:
    """A ticket that was used, and when (clock.monotonic())."""

    ticket: Ticket
    endpoint: str
    is_streaming: bool
    at: float


class Tickets:
    """Verifies, spends and reports the tickets of one node. Every refusal is a TicketRefused."""

    def __init__(self, config: TicketConfig | None, ledger: Ledger) -> None:
        self.config = config
        self._ledger = ledger
        self._keys: dict[str, bytes] = {}
        self._audience = ""
        self._skew_s = 0.0
        """The server's clock less that of this machine."""
        self.has_news = asyncio.Event()
        """Set = something waits to be told to a gateway."""
        self.is_reclaimed = False
        """Whether the owner has taken the node back: no ticket opens it then."""
        self.running: dict[asyncio.Task[None], str] = {}
        """What serves requests that came with tickets, and why it was cut; empty = it was not."""
        self._cuts: dict[str, asyncio.TimerHandle] = {}
        """What will cut them, by its reason."""

    @property
    def url(self) -> str:
        """Where clients reach this node; empty = it takes no tickets."""
        return "" if self.config is None else self.config.url

    @property
    def origins(self) -> frozenset[str]:
        """Web pages of these origins may use tickets; ``*`` among them stands for all."""
        return frozenset() if self.config is None else self.config.origins

    # what a gateway says

    def hear_audience(self, node_id: str) -> None:
        self._audience = node_id

    def hear_keys(self, keys: Sequence[TicketPublicKey]) -> None:
        """Verify with these keys from now on; one that cannot be read is left out."""
        read = {key.kid: _read_key(key.public_key) for key in keys if key.alg == "EdDSA"}
        self._keys = {kid: public for kid, public in read.items() if len(public) == 32}

    def hear_time(self, server_ms: int) -> None:
        """Take the server's clock, in Unix milliseconds, as it was a moment ago."""
        self._skew_s = server_ms / 1000 - clock.unix_s()

    def reclaim(self, *, is_reclaimed: bool) -> None:
        """Take that the owner takes the node back, or lends it again. What runs then is cut after ``reclaim_s``."""
        if is_reclaimed == self.is_reclaimed:
            return
        self.is_reclaimed = is_reclaimed
        self._cut_in(limits().tickets.reclaim_s if is_reclaimed else None, _RECLAIMED)

    def drain(self, within_s: float | None) -> None:
        """Take that the control plane drains the node: what runs in ``within_s`` seconds is cut then; None = it may end."""
        self._cut_in(within_s, _DRAINED)

    def _cut_in(self, seconds: float | None, why: str) -> None:
        if (before := self._cuts.pop(why, None)) is not None:
            before.cancel()
        if seconds is not None:
            self._cuts[why] = asyncio.get_running_loop().call_later(seconds, self._cut_running, why)

    def _cut_running(self, why: str) -> None:
        for task in self.running:
            self.running[task] = why
            task.cancel()

    # what a client shows

    def verify(self, text: str) -> Ticket:
        """Return the ticket if it is for this node and not out of date; what is asked with it is judged by ``spend``.

        Raises TicketRefused, Unavailable.
        """
        if self.is_reclaimed:
            raise Unavailable(_RECLAIMED)
        try:
            ticket = verify_ticket(text, self._keys, audience=self._audience, now=self.now())
        except TicketError as error:
            raise refuse(error.fault) from None
        # What was spent before the ledger began is not known to it.
        if ticket.issued_at < self._ledger.born_at + self._skew_s:
            raise refuse(TicketFault.SPENT)
        return ticket

    async def spend(self, ticket: Ticket, *, endpoint: str, model: str, is_streaming: bool) -> Spent:
        """Use a ticket up for a request that it permits. Raises TicketRefused, Unavailable."""
        if model != ticket.model:
            raise refuse(TicketFault.WRONG_MODEL)
        bounds = limits().tickets
        until = ticket.expires_at + bounds.body_s
        if self.now() >= until:  # its head came in time, and its body did not
            raise refuse(TicketFault.EXPIRED)
        spent = Spent(ticket, endpoint, is_streaming, clock.monotonic())
        report = msgspec.json.encode(_report(spent, status=RUNNING)).decode()
        # Kept by the clock of this machine, which may be set back, and well beyond the last moment at which it could be spent.
        expires_at = until - self._skew_s + bounds.grace_s
        try:
            is_first = await self._ledger.spend_ticket(ticket.ticket_id, expires_at=expires_at, report=report)
        except LedgerFull:
            raise Unavailable(
                "This node has as many tickets in its books as it can hold; its gateways take no reports.", retry_after_s=5
            ) from None
        if not is_first:
            raise refuse(TicketFault.SPENT)
        self.has_news.set()
        return spent

    async def finish(self, spent: Spent, report: TicketUsage) -> None:
        """Write down how the request of a ticket ended; a gateway is told until it says that it knows."""
        await self._ledger.end_ticket(spent.ticket.ticket_id, msgspec.json.encode(report).decode())
        self.has_news.set()

    def report(self, spent: Spent, *, status: str) -> TicketUsage:
        """Return what is told of a request, as far as that is known without its answer."""
        report = _report(spent, status=status)
        report.inference_ms = max(0, round((clock.monotonic() - spent.at) * 1000))
        return report

    # what gateways are told

    async def has_books(self) -> bool:
        """Whether there is, or may be, anything to tell: also of tickets that the node took before it was told to stop that."""
        return self.config is not None or bool(await self._ledger.list_tickets(1))

    async def list_reports(self) -> list[TicketUsage]:
        """Return what no gateway has taken yet, the oldest first; of those that run what can be said now."""
        texts = await self._ledger.list_tickets(limits().tickets.reports)
        return [msgspec.json.decode(text, type=TicketUsage) for text in texts]

    async def take_receipts(self, taken: Mapping[str, str]) -> None:
        """Take that a gateway has stored these reports: their status by ticket."""
        await self._ledger.forget_tickets([(ticket_id, status != RUNNING) for ticket_id, status in taken.items()])

    def now(self) -> float:
        """Return Unix seconds by the server's clock."""
        return clock.unix_s() + self._skew_s


def refuse(fault: TicketFault) -> TicketRefused:
    return TICKET_REFUSALS[fault]()


def apply_cap(ticket: Ticket, *, endpoint: str, fields: Mapping[str, object], body: bytes) -> bytes:
    """Return the body with the bound of the ticket where it has none of its own. ``fields``: its members.

    Raises TicketRefused for one that asks for more, InvalidRequest for one whose bound cannot be told.
    """
    cap, field = ticket.caps.max_tokens, _LIMIT_FIELDS.get(endpoint)
    if not cap or field is None:
        return body
    if "decoding" in fields:
        raise InvalidRequest("A ticket does not open llm-pool's form of this endpoint; leave decoding out.", param="decoding")
    asked = [fields[name] for name in _LIMITS if fields.get(name) is not None]
    times = _count_answers(fields)
    if any(not isinstance(value, int | float) or not 0 <= value * times <= cap for value in asked):
        raise refuse(TicketFault.TOO_MUCH)
    if asked:
        return body
    if times > cap:
        raise refuse(TicketFault.TOO_MUCH)
    # A null would count as well as nothing: the name is ours alone then.
    rest = body if field not in fields else msgspec.json.encode({name: fields[name] for name in fields if name != field})
    return b'{"%b":%d,%b' % (field.encode(), cap // times, rest[rest.index(b"{") + 1 :])


def _count_answers(fields: Mapping[str, object]) -> int:
    """Return how many answers a body asks for: each may be as long as its bound."""
    times = max([value for name in _TIMES if isinstance(value := fields.get(name), int)], default=1)
    prompt = fields.get("prompt")
    is_several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)  # else tokens of one
    return max(1, times) * (len(prompt) if isinstance(prompt, list) and is_several else 1)


def _report(spent: Spent, *, status: str) -> TicketUsage:
    ticket = spent.ticket
    return TicketUsage(
        ticket_id=ticket.ticket_id, record_id=ticket.record_id, model=ticket.model, status=status, endpoint=spent.endpoint,
        is_streaming=spent.is_streaming,
    )  # fmt: skip


def _read_key(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return b""
