"""What goes between a gateway process and its nodes beside requests: commands, policies, checkpoints, and what nodes say.

Frames are only noted here; everything that needs the database happens in ``run`` or beside, in a database thread. What is lost
with the process is asked again: rows say what is open, and the node answers a question as often as it is put.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

import msgspec
from django.db import DatabaseError, DataError, InterfaceError, transaction
from prometheus_client import Counter as Metric

from core.db.threads import Batcher, run_in_database, run_upkeep
from core.limits import limits
from core.throttle import AuthThrottle
from governance.audit import record_word
from governance.checkpoints import consistency, has_checkpoint, latest_checkpoint
from governance.errors import GovernanceError
from governance.operations.approvals import find_operation, policy_chain, read_freeze
from governance.operations.runs import (
    NodeRun,
    RunEnd,
    claim_contact,
    find_run_of,
    finish_run,
    list_node_runs,
    list_nodes_with_runs,
    note_progress,
    requeue_run,
)
from governance.states import RunEvent, RunState
from nodes.errors import EnrolmentRefused, NodeNotFound, SessionUnknown
from nodes.links import LinkRegistry
from nodes.links.keeper import LinkKeeper
from nodes.links.relay import RelayLink
from nodes.models import Node, NodeCredential, NodePresence
from nodes.questions import open_questions
from nodes.reports import clean_status, store_endpoints
from nodes.services import sessions
from nodes.services.agents import AgentReport, AgentStanding, record_agent_heartbeats
from nodes.services.credentials import find_credentials, read_bearer, read_credential_digests
from nodes.services.drains import set_mode
from nodes.services.governance import take_report
from nodes.session import ModeRequested
from nodes.states import NodeRow
from nodes.tickets import HearUsage, StoreUsage, TicketChannel
from wire import bridge, clock
from wire.agent import DRAIN, EVICT_MODEL, LOAD_MODEL, AgentCommand, AgentCommandStatus
from wire.bridge import OpStatus
from wire.contract import NodeMode
from wire.credentials import digest_credential
from wire.ids import parse_id
from wire.optoken.approval import ApprovalError, decode_bytes, read_statement
from wire.optoken.documents import Receipt, ReceiptError, digest_result, read_receipt
from wire.optoken.op_token import TOKEN_MEMBER

logger = logging.getLogger("muster.nodes")

AUTH_FAILURES = Metric("muster_worker_auth_failures_total", "Worker sockets refused at authentication", ["reason"])

StatusKey = tuple[uuid.UUID, str, int]


@dataclass(frozen=True, slots=True)
class OwnerWish:
    """What an owner said at a node, and when (clock.monotonic())."""

    effect: ModeRequested
    said_at: float


Connect = Callable[[sessions.OpenedSession, float], RelayLink]
"""Links a node whose session was opened; the float is when it was asked for (clock.monotonic())."""


class CredentialRefused(Exception):
    """The text says why."""


@dataclass(frozen=True, slots=True)
class CredentialCheck:
    address: str
    secret: str


@dataclass(frozen=True, slots=True)
class Registration:
    request: sessions.SessionRequest
    connect: Connect


class AgentLine:
    """Where one agent is sent commands: its socket, or the answer to its heartbeat. ``since``: when its session began."""

    def __init__(self, *, session: Node, send: Callable[[msgspec.Struct], None], kick: Callable[[str], None]) -> None:
        assert session.agent_session is not None
        assert session.agent_session_at is not None
        self.node_id, self.node_name = session.pk, session.name
        self.session_id, self.since, self._epoch = session.agent_session, session.agent_session_at, session.epoch
        self.takes_operations = bool(session.op_level)
        self.kick, self.send_message = kick, send
        self.told_ticket_keys: tuple[str, ...] | None = None

    def send_operation(self, message: bridge.OpCommand) -> bridge.OpStatus | None:
        """Send an operation as a command of the document; return what became of it where it has none for it."""
        command = _AGENT_COMMANDS.get(message.operation)
        if command is None:
            text = f"agents know no {message.operation}"
            return bridge.OpStatus(
                op_id=message.op_id, use=message.use, state="refused", code="unknown_operation", message=text
            )
        params = {"model_id": message.body.get("modelId"), **message.body, TOKEN_MEMBER: message.token}
        self.send_message(AgentCommand(command_id=f"{message.op_id}.{message.use}", command=command, params=params))
        return None

    def follow(self, row: NodeRow | None, told: dict[uuid.UUID, datetime]) -> None:
        """Go by what the row of the node says now: whether the session is still its own, and whether it drains.

        ``told``: which drain each session was told of, however often its agent asks.
        """
        if row is None or row.epoch < self._epoch:
            return  # it was read before the agent registered
        if row.agent_session != self.session_id:
            self.kick("another session of the same node took over")
        if row.draining and row.draining_since is not None and told.get(self.session_id) != row.draining_since:
            told[self.session_id] = row.draining_since
            self.send_message(make_drain(row.draining_since, reason=row.drain_reason, remaining_s=row.drain_remaining_s))


def make_drain(since: datetime, *, reason: str, remaining_s: float | None) -> AgentCommand:
    """Return the command by which an agent hears of a drain; the same drain has the same id."""
    deadline_s = None if remaining_s is None else max(0, round(remaining_s))
    return AgentCommand(
        command_id=f"drain-{int(since.timestamp() * 1000)}", command=DRAIN, params={"reason": reason, "deadline_s": deadline_s}
    )


def read_command_status(said: AgentCommandStatus) -> bridge.OpStatus | None:
    """Return what an agent says of an operation, cut to size; None where it is about no operation of ours."""
    op_id, _, use = said.command_id.rpartition(".")
    if not op_id or not use.isdecimal() or len(use) > 9:
        return None
    status = bridge.OpStatus(
        op_id=op_id,
        use=int(use),
        state={"completed": "succeeded"}.get(said.state, said.state),
        fraction=said.progress,
        code=said.code,
        message=said.message,
        result=said.result,
        receipt=said.receipt,
    )
    clean_status(status)
    return status


_AGENT_COMMANDS = {"model-load": LOAD_MODEL, "model-unload": EVICT_MODEL}
"""Commands of the central-server document by the operation that governs them."""


class NodeChannel:
    """What the node sockets of one gateway process share: it delivers to the nodes, and takes down what they say."""

    def __init__(
        self,
        keeper: LinkKeeper,
        *,
        advertised_gateways: list[str],
        store_usage: StoreUsage | None = None,
        hear_usage: HearUsage | None = None,
    ) -> None:
        self.limits = limits().nodes
        self.keeper = keeper
        self.registry = keeper.registry
        self.gateway_id = keeper.gateway_id
        self.advertised_gateways = advertised_gateways
        self.throttle = AuthThrottle(
            failures=self.limits.auth_failures, block_s=self.limits.auth_block_s, read_digests=read_credential_digests
        )
        self.reading_good = asyncio.Lock()
        """Held while the good credentials are read: sockets that come meanwhile read none."""
        self.unregistered: Counter[str] = Counter()
        """Sockets by address, from the upgrade until they have registered or are closed."""
        at_once = self.limits.registered_at_once
        self.credentials = Batcher(self._check_credentials, most=at_once, spawn=self.run_beside)
        """Finds the credentials that sockets bring. Raises CredentialRefused, DatabaseError."""
        self.registrations = Batcher(self._open_sessions, most=at_once, spawn=self.run_beside)
        """Opens sessions and links their nodes. Raises EnrolmentRefused, and DatabaseError, DataError of them."""
        self.owner_wishes: dict[uuid.UUID, OwnerWish] = {}
        """What owners said at their nodes and the database does not know yet; the newest of each."""
        self.heartbeats = Batcher(self._store_heartbeats, most=at_once, spawn=self.run_beside)
        """Stores heartbeats of agents. Raises SessionUnknown, DatabaseError."""
        self.agents: dict[uuid.UUID, AgentLine] = {}
        """Where agents that listen here are sent commands, by node."""
        self._has_work = asyncio.Event()
        self.tickets = TicketChannel(
            self.registry, self.agents, spawn=self.run_beside, wake=self._has_work.set, store=store_usage, hear=hear_usage
        )
        self.questions = open_questions(self.registry, wake=self._has_work.set)
        self._drains_told: dict[uuid.UUID, datetime] = {}
        self._beside: set[asyncio.Task[None]] = set()
        self._statuses: dict[StatusKey, bridge.OpStatus] = {}
        self._written_at: dict[StatusKey, float] = {}
        self._reports: dict[uuid.UUID, deque[tuple[bridge.GovernanceReport, int]]] = {}
        """By node, each with the Unix milliseconds at which it was heard."""
        self._looked_at = dict.fromkeys(("commands", "policy", "checkpoints"), float("-inf"))
        self._woken: set[str] = set()

    @property
    def waiting_statuses(self) -> tuple[bridge.OpStatus, ...]:
        """What nodes said of operations and the database does not know yet."""
        return tuple(self._statuses.values())

    @property
    def waiting_reports(self) -> dict[uuid.UUID, int]:
        """How many reports of each node on how it decides are not stored yet, the oldest node first."""
        return {node_id: len(reports) for node_id, reports in self._reports.items()}

    @property
    def links(self) -> list[RelayLink]:
        return [link for link in self.registry if isinstance(link, RelayLink)]

    @contextmanager
    def count_unregistered(self, address: str) -> Iterator[None]:
        """Count a socket of an address among those that have not registered."""
        self.unregistered[address] += 1
        try:
            yield
        finally:
            self.unregistered[address] -= 1
            if not self.unregistered[address]:
                del self.unregistered[address]

    def run_beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that outlives the call that made it; it is bounded by a time-out of its own, or ended by ``close``."""
        task = asyncio.get_running_loop().create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    async def _check_credentials(self, asked: list[CredentialCheck]) -> Sequence[NodeCredential | CredentialRefused]:
        return await run_in_database(self._find_credentials, asked)

    def _find_credentials(self, asked: list[CredentialCheck]) -> list[NodeCredential | CredentialRefused]:
        # In a database thread: the throttle may ask the database.
        throttle = self.throttle
        waiting = {check for check in asked if throttle.must_wait(check.address, digest_credential(read_bearer(check.secret)))}
        found = find_credentials({check.secret for check in asked if check not in waiting})
        answers: list[NodeCredential | CredentialRefused] = []
        for check in asked:
            if (credential := found.get(check.secret)) is not None:
                answers.append(credential)
            elif check in waiting or throttle.is_blocked(check.address):
                AUTH_FAILURES.labels("throttled").inc()
                answers.append(CredentialRefused("worker authentication temporarily rate limited"))
            else:
                if throttle.record_failure(check.address):  # not each: who guesses would fill the log
                    logger.warning("worker.wrong_secret address=%s", check.address)
                AUTH_FAILURES.labels("rejected").inc()
                answers.append(CredentialRefused("worker authentication failed"))
        return answers

    async def _store_heartbeats(self, asked: list[AgentReport]) -> Sequence[AgentStanding | SessionUnknown]:
        return await run_in_database(record_agent_heartbeats, asked)

    def take_command_status(self, node_id: uuid.UUID, node_name: str, said: AgentCommandStatus) -> None:
        """Note what an agent says of a command; of a drain it needs to say nothing."""
        status = read_command_status(said)
        if status is not None:
            self._take_status(node_id, node_name, status)

    def tell_agents(self, rows: Mapping[uuid.UUID, NodeRow]) -> None:
        """Have every agent that listens here follow the row of its node."""
        sessions_now = {row.agent_session for row in rows.values()}
        self._drains_told = {session: since for session, since in self._drains_told.items() if session in sessions_now}
        for line in list(self.agents.values()):
            line.follow(rows.get(line.node_id), self._drains_told)

    def listen(self, line: AgentLine) -> None:
        """Have an agent sent its commands on this line from now on."""
        if (older := self.agents.get(line.node_id)) is not None:
            older.kick("the agent opened another socket")
        self.agents[line.node_id] = line
        line.follow(self.keeper.rows.get(line.node_id), self._drains_told)
        self.tickets.tell(line)
        self.wake("commands")

    def hang_up(self, line: AgentLine) -> None:
        if self.agents.get(line.node_id) is line:
            del self.agents[line.node_id]

    async def _open_sessions(self, asked: list[Registration]) -> list[RelayLink | Exception]:
        asked_at = clock.monotonic()
        opened = await run_in_database(
            sessions.open_sessions,
            [registration.request for registration in asked],
            gateway_id=self.gateway_id,
            live_nodes=frozenset(link.node_id for link in self.links),
            other_gateways=self.keeper.other_gateways,
        )
        return [
            # Each is linked before others are opened: bridge workers that share a name must see each other.
            session if isinstance(session, EnrolmentRefused) else registration.connect(session, asked_at)
            for registration, session in zip(asked, opened, strict=True)
        ]

    # on the event loop, from the frame path

    def take_status(self, link: RelayLink, status: bridge.OpStatus) -> None:
        if status.state == "succeeded":
            link.replicas.clear()  # it loaded, unloaded or flushed: what it had computed of prompts may be gone
        """Note where an operation stands on a node; the newest status counts, and a final one stays."""
        self._take_status(link.node_id, link.node_name, status)

    def _take_status(self, node_id: uuid.UUID, node_name: str, status: bridge.OpStatus) -> None:
        key = (node_id, status.op_id, status.use)
        before = self._statuses.get(key)
        if before is None and sum(each == node_id for each, _, _ in self._statuses) >= self.limits.channel_statuses_per_node:
            logger.error("node.status_dropped node=%s; the node is asked again", node_name)
            return
        if before is not None and before.state in FINAL_STATES and status.state not in FINAL_STATES:
            return
        self._statuses[key] = status
        self._has_work.set()

    def take_report(self, link: RelayLink, report: bridge.GovernanceReport) -> None:
        link.governance = report.governance
        waiting = self._reports.setdefault(link.node_id, deque())
        if len(waiting) >= self.limits.channel_reports_per_node:
            logger.error("node.report_dropped node=%s; it says so again when it registers", link.node_name)
            return
        waiting.append((report, clock.unix_ms()))
        self.wake("policy")

    def take_owner_wish(self, link: RelayLink, effect: ModeRequested) -> None:
        """Write down that the owner lends a node or takes it back, however long the database is away and the link lives."""
        is_storing = link.node_id in self.owner_wishes
        self.owner_wishes[link.node_id] = OwnerWish(effect, clock.monotonic())
        if not is_storing:
            self.run_beside(self._store_mode(link.node_id, link.node_name))

    def wake(self, topic: str = "") -> None:
        """Look at the rows of a topic (commands, policy, checkpoints) at once; "" = at all of them."""
        self._woken |= {topic} if topic else self._looked_at.keys()
        self._has_work.set()

    # in the background

    async def run(self) -> None:
        """Deliver and take down for ever. While the database is away everything is kept and tried again."""
        while True:
            try:
                async with asyncio.timeout(self._rest_s()):
                    await self._has_work.wait()
            except TimeoutError:
                pass
            self._has_work.clear()
            try:
                await self._store_statuses()
                await self._store_reports()
                await self.tickets.store()
                await self.questions.store()
                await self._deliver()
                await self._offer_policies()
                await self._offer_checkpoints()
            except (DatabaseError, InterfaceError, OSError) as error:
                logger.warning("node.courier_waits error=%s", type(error).__name__)
                await asyncio.sleep(self.limits.channel_retry_s)

    def _rest_s(self) -> float:
        now = clock.monotonic()
        due = [self._looked_at["commands"] + self.limits.channel_sweep_s]
        due += [self._looked_at[topic] + self.limits.channel_hint_pause_s for topic in self._woken]
        due += [self._written_at.get(key, 0.0) + self.limits.channel_progress_s for key in self._statuses]
        return max(0.02, min(due) - now)

    def _is_due(self, topic: str, every_s: float) -> bool:
        now = clock.monotonic()
        if now - self._looked_at[topic] < (self.limits.channel_hint_pause_s if topic in self._woken else every_s):
            return False
        # Before the look: what is woken while it lasts is looked at once more.
        self._looked_at[topic] = now
        self._woken.discard(topic)
        return True

    def _due_statuses(self) -> dict[StatusKey, bridge.OpStatus]:
        now = clock.monotonic()
        due = (
            (key, status)
            for key, status in self._statuses.items()
            if status.state != "running" or now - self._written_at.get(key, 0.0) >= self.limits.channel_progress_s
        )
        return dict(islice(due, self.limits.channel_statuses))

    async def _store_statuses(self) -> None:
        due = self._due_statuses()
        if not due:
            return
        await run_upkeep(_store_statuses, due)
        now = clock.monotonic()
        for key, status in due.items():
            if self._statuses.get(key) is status:  # else the node has said something newer meanwhile
                del self._statuses[key]
            self._written_at[key] = now
        self._written_at = {key: at for key, at in self._written_at.items() if now - at < self.limits.channel_progress_s}

    async def _store_reports(self) -> None:
        # The oldest report of every node: one node that says much does not keep the others waiting.
        for node_id, waiting in list(self._reports.items()):
            await run_upkeep(_store_report, node_id, *waiting[0])
            waiting.popleft()
            if not waiting:
                del self._reports[node_id]
        if self._reports:
            self._has_work.set()

    async def _deliver(self) -> None:
        if not self._is_due("commands", self.limits.channel_sweep_s):
            return
        await self.questions.ask()
        linked = {link.node_id: link.linked_at for link in self._governed_links()}
        agents = {line.node_id: line.since for line in self.agents.values() if line.takes_operations}
        if not linked and not agents:
            return
        deliveries = await run_upkeep(plan_deliveries, linked=linked | agents, gateway_id=self.gateway_id, agents=agents.keys())
        for node_id, message in deliveries:
            if (line := self.agents.get(node_id)) is not None and isinstance(message, bridge.OpCommand):
                if (status := line.send_operation(message)) is not None:
                    self._take_status(node_id, line.node_name, status)
                continue
            link = self.registry.get(node_id)
            # Else the row says that it was sent, and the next session of the node is asked.
            if isinstance(link, RelayLink) and not link.closed and link.governance is not None:
                link.send_message(message)

    async def _offer_policies(self) -> None:
        if not self._is_due("policy", self.limits.channel_policy_s):
            return
        versions = {link: link.governance.policy_version for link in self._governed_links() if link.governance is not None}
        if not versions:
            return
        oldest = min(versions.values())
        chain = await run_upkeep(policy_chain, after_version=oldest)
        newest = oldest + len(chain)
        for link, version in versions.items():
            if version < newest and link.offered_policy != (version, newest) and not link.closed:
                link.offered_policy = (version, newest)
                following = chain[version - oldest :][: self.limits.channel_policies]
                link.send_message(bridge.PolicyOffer(policies=following))

    async def _offer_checkpoints(self) -> None:
        if not self._is_due("checkpoints", self.limits.channel_checkpoint_s):
            return
        # A node can check a checkpoint when the log's key stands in the policy that it pinned.
        witnesses = {link: link.governance for link in self.links if link.governance is not None}
        sizes = {link: (said.witness_size, said.witness_root) for link, said in witnesses.items() if said.policy_version > 0}
        newest = await run_upkeep(latest_checkpoint) if sizes else None
        if newest is None:
            return
        seen = (newest.size, base64.b64encode(bytes(newest.root)).decode())
        due = {link: said[0] for link, said in sizes.items() if said != seen and link.offered_size != newest.size}
        # A node says itself what it saw, and a proof from early on reads the whole log: others wait for the next look.
        wanted = sorted(set(due.values()), reverse=True)[: self.limits.channel_proofs]
        proofs = await run_upkeep(_prove, wanted, newest.size) if wanted else {}
        for link, size in due.items():
            proof = proofs.get(size)
            if proof is not None and not link.closed:
                link.offered_size = newest.size
                offer = bridge.CheckpointOffer(note=newest.note, old_size=size, proof=proof, wants_name=True)
                link.send_message(offer)

    def _governed_links(self) -> list[RelayLink]:
        # Nodes that know no operations would end their session over a frame that they do not know.
        return [link for link in self.links if link.governance is not None]

    # beside

    async def _store_mode(self, node_id: uuid.UUID, node_name: str) -> None:
        # Until the database knows it, rows do not undo what the owner said here. What was said elsewhere later makes it void.
        while (wish := self.owner_wishes.get(node_id)) is not None:
            try:
                await run_in_database(
                    set_mode,
                    node_id=node_id,
                    mode=NodeMode(wish.effect.mode),
                    reason=(wish.effect.reason or "owner at the node")[:200],
                    actor=f"node:{node_name}",
                    said_age_s=clock.monotonic() - wish.said_at,
                )
            except NodeNotFound:
                logger.warning("node.mode_not_stored node=%s; the node was removed", node_name)
            except (DatabaseError, InterfaceError):
                logger.warning("node.mode_not_stored node=%s; trying again", node_name)
                await asyncio.sleep(1.0)
                continue
            if self.owner_wishes[node_id] is wish:
                del self.owner_wishes[node_id]
                link = self.registry.get(node_id)
                if isinstance(link, RelayLink):
                    link.wanted_mode, link.mode_stored_at = None, clock.monotonic()

    async def store_ends(self, links: Sequence[RelayLink], reason: str) -> None:
        """Mark the nodes of these links as gone from here, all in one statement."""
        ends = [sessions.SessionEnd(link.node_id, link.link_id, reason) for link in links]
        try:
            await run_upkeep(sessions.close_sessions, ends, gateway_id=self.gateway_id)
        except (DatabaseError, InterfaceError):
            logger.warning("worker.disconnect_not_stored nodes=%d; their presence will time out", len(links))
        else:
            for link in links:
                link.is_end_stored = True

    async def end_sessions(self) -> None:
        """Write down at once that every node is gone from here, before the sockets close one by one."""
        links = [link for link in self.links if not link.is_end_stored]
        if links:
            await self.store_ends(links, "server shutdown")
        for link in links:
            link.is_end_stored = True  # or the database is away, and trying for each alone would not help

    async def close(self) -> None:
        """Wait a moment for what is still written about the nodes, then end it. The gateway stops."""
        if self._beside:
            await asyncio.wait(list(self._beside), timeout=self.limits.socket_close_s)
        for task in list(self._beside):
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        for node_id in self.owner_wishes:
            logger.warning("node.mode_not_stored node_id=%s; the gateway stops, and the node says it again elsewhere", node_id)


def presence_reports(registry: LinkRegistry, *, news_only: bool = False) -> list[sessions.PresenceReport]:
    """Return what this process knows of the nodes on its sockets, for writing to the database.

    ``news_only``: of those alone that said something which was not returned before.
    """
    reports = []
    for link in registry:
        if not isinstance(link, RelayLink) or (news_only and not link.has_news):
            continue
        link.has_news = False
        telemetry = link.telemetry
        reports.append(
            sessions.PresenceReport(
                node_id=link.node_id,
                epoch=link.epoch,
                age_s=link.silence_s,
                active=link.load,
                models=tuple(sorted(link.models)),
                status=_status_of(link),
                last_error=(telemetry.last_error or "") if telemetry is not None else "",
                endpoints=store_endpoints(link.endpoints),
                said=telemetry,
                link_id=link.link_id,
            )
        )
    return reports


def _serves_nothing(link: RelayLink) -> bool:
    """Return whether a node says why it serves no model, and neither loads one nor could: its engine or server is away."""
    said = link.telemetry
    if link.models or said is None or not said.last_error or said.available:
        return False
    return not any(replica.state == "loading" for replica in said.replicas)


def _status_of(link: RelayLink) -> str:
    if link.node_draining:
        return "draining"
    if _serves_nothing(link):
        return "error"
    return "available" if link.has_slot() else "busy"


# in a database thread


def _store_statuses(statuses: Mapping[StatusKey, bridge.OpStatus]) -> None:
    for (node_id, _, _), status in statuses.items():
        try:
            store_status(node_id=node_id, status=status)
        except DataError:  # what one node says must not keep the others from being heard
            logger.exception("node.status_refused node_id=%s", node_id)


def _store_report(node_id: uuid.UUID, report: bridge.GovernanceReport, heard_ms: int) -> None:
    try:
        take_report(node_id=node_id, report=report, heard_ms=heard_ms)
    except DataError:
        logger.exception("node.report_refused node_id=%s", node_id)


def _prove(sizes: Iterable[int], newest_size: int) -> dict[int, list[str]]:
    proofs: dict[int, list[str]] = {}
    for size in sizes:
        # Nothing can be proved to a node that saw more, or at a size at which this log never signed anything: the proof is
        # empty, and the node shows what it saw, or raises the alarm.
        proofs[size] = []
        if size >= newest_size or not (size == 0 or has_checkpoint(size)):
            continue
        try:
            proofs[size] = [base64.b64encode(step).decode() for step in consistency(size, newest_size)]
        except GovernanceError as error:
            del proofs[size]
            logger.error("node.checkpoint_not_proved size=%d error=%s", size, error)  # noqa: TRY400 - the text says it all
    return proofs


FINAL_STATES = frozenset({"succeeded", "failed", "refused", "interrupted"})
TRY_AGAIN_CODES = frozenset({"unavailable", "busy", "leaving", "op_token_expired", "operation_running", "operation_limit"})
"""Refusals that say nothing against the operation: it is sent again, with a new token."""
RECEIPT_INVALID = "receipt_invalid"


Delivery = tuple[uuid.UUID, bridge.OpCommand | bridge.OpQuery]
"""A node, and what it is sent: a command with its token, or the question where one stands."""


def plan_deliveries(
    *, linked: Mapping[uuid.UUID, datetime], gateway_id: uuid.UUID, agents: Collection[uuid.UUID] = ()
) -> list[Delivery]:
    """Return what to send now, marked as sent. ``linked``: since when each node is linked to this process.

    ``agents``: those of them that answer no questions. What was sent in an earlier session of an agent is unknown to it.

    A command whose token has run out goes back to be given another. While all operations are frozen none is sent; nodes are
    still asked about those that they have.
    """
    if not linked:
        return []
    # Few nodes have operations under way, and thousands may be linked: the database is not told of all these each time.
    wanted = linked.keys() & list_nodes_with_runs()
    if not wanted:
        return []
    now, most = clock.now(), limits().nodes.command_batch
    runs = list_node_runs(wanted, most=most, is_sent=False)
    if runs and read_freeze() is not None:
        runs = list_node_runs(wanted, most=most, is_sent=True)
    for run in runs:
        if run.node_id in agents and not run.is_waiting and run.sent_at is not None and run.sent_at < linked[run.node_id]:
            store_status(node_id=run.node_id, status=OpStatus(op_id=run.op_id, use=run.use, state="unknown"))
    runs = [run for run in runs if run.is_waiting or run.node_id not in agents]
    found = (_plan(run, since=linked[run.node_id], now=now, gateway_id=gateway_id) for run in runs)
    return [delivery for delivery in found if delivery is not None]


def read_order(run: NodeRun) -> dict[str, object] | None:
    """Return what a node is sent beside the token: what people signed. None when the run goes back to be verified anew."""
    margin = timedelta(seconds=limits().nodes.command_token_margin_s)
    if run.token_expires_at is None or run.token_expires_at - clock.now() <= margin:
        requeue_run(run_id=run.run_id, reason="its token ran out before the node could be reached")
        return None
    try:
        return dict(read_statement(run.statement).params)
    except ApprovalError:
        requeue_run(run_id=run.run_id, reason="its statement cannot be read")
        return None


def _plan(run: NodeRun, *, since: datetime, now: datetime, gateway_id: uuid.UUID) -> Delivery | None:
    if run.is_waiting:
        params = read_order(run)
        if params is None or not claim_contact(run, gateway_id=gateway_id):
            return None
        command = bridge.OpCommand(op_id=run.op_id, use=run.use, operation=run.operation, body=params, token=run.token)
        return run.node_id, command
    # What was sent over a socket of ours that is gone may never have arrived. Of another gateway's sockets nothing is known.
    contact_at = run.contact_at or since
    is_cut_off = run.gateway_id == gateway_id and contact_at < since
    if not is_cut_off and now - contact_at < timedelta(seconds=limits().nodes.command_quiet_s):
        return None
    if not claim_contact(run, gateway_id=gateway_id):
        return None
    return run.node_id, bridge.OpQuery(op_id=run.op_id, use=run.use)


# What nodes say


@transaction.atomic
def store_status(*, node_id: uuid.UUID, status: OpStatus) -> bool:
    """Store what a node said of an operation that is for it; False when there is no such run, or it has ended.

    A final status is passed on however late it comes: governance knows whether it still waits for one.
    """
    op_id = parse_id("op", status.op_id)
    run = None if op_id is None else find_run_of(node_id, op_id, status.use)
    node = None if run is None else Node.objects.filter(pk=node_id).first()
    if node is None or run is None:
        logger.debug("node.unknown_operation node_id=%s state=%s", node_id, status.state)
        return False
    match status.state:
        case "running" if not run.has_ended:
            note_progress(run_id=run.run_id, stage=status.stage, fraction=status.fraction, eta_s=status.eta_s)
        case "succeeded" | "failed":
            code, receipt = _check_end(run, node, status)
            event = RunEvent.SUCCEED if status.state == "succeeded" else RunEvent.FAIL
            end = RunEnd(event, code, status.message, status.result, receipt, receipt_key=receipt and node.box_key)
            finish_run(run.run_id, end)
        case "refused" if status.code in TRY_AGAIN_CODES:
            requeue_run(run_id=run.run_id, reason=f"the node refused it for now: {status.code}")
        case "refused":
            finish_run(run.run_id, RunEnd(RunEvent.FAIL, status.code or "refused", status.message, status.result))
        case "interrupted":
            lose_run(run, node, result=status.result, receipt=_check_end(run, node, status)[1])
        case "unknown" if not run.has_ended:
            _take_unknown(run, node)
        case _:
            return False
    return not run.has_ended


def lose_run(
    run: NodeRun, node: Node, *, result: Mapping[str, object], receipt: str = "", loaded: list[str] | None = None
) -> None:
    """End a run that was cut off, with what the node has loaded now as its result. ``loaded`` None: as it last said.

    Without effect on one that is about to be sent again: the node then says so again.
    """
    loaded = find_loaded(node.pk) if loaded is None else loaded
    what = "The node was cut off while it worked."
    finish_run(run.run_id, RunEnd(RunEvent.LOSE, "interrupted", what))
    message = f"{what} Loaded on it now: {', '.join(loaded) or 'nothing'}"[:500]
    result = {**result, "loadedNow": loaded}
    receipt_key = node.box_key if receipt else ""
    finish_run(run.run_id, RunEnd(RunEvent.RESOLVE, "interrupted", message, result, receipt, receipt_key))


def find_loaded(node_id: uuid.UUID) -> list[str]:
    replicas = NodePresence.objects.filter(node_id=node_id).values_list("replicas", flat=True).first() or []
    return sorted({str(replica.get("model")) for replica in replicas if replica.get("state") == "loaded"})


def _take_unknown(run: NodeRun, node: Node) -> None:
    if run.state is RunState.EXECUTING:
        # It had begun there, and the node forgot: nobody can tell how far it came.
        lose_run(run, node, result={})
    elif run.sent_at is not None and clock.now() - run.sent_at >= timedelta(seconds=limits().nodes.command_unheard_s):
        requeue_run(run_id=run.run_id, reason="the node never heard of it")


def _check_end(run: NodeRun, node: Node, status: OpStatus) -> tuple[str, str]:
    # Only at L2 is a node expected to bring a receipt; below, a token names no statement that it could sign for.
    if not status.receipt and node.op_level != "L2":
        return status.code, ""
    try:
        receipt = read_receipt(status.receipt, decode_bytes(node.box_key))
    except (ReceiptError, ApprovalError, ValueError) as error:
        reason = str(error)
    else:
        reason = _find_fault(receipt, run, node, status)
        if not reason:
            is_proof = node.op_level == "L2" or _names_statement(receipt, run)
            return status.code, status.receipt if is_proof else ""
    _report_receipt(node, run, reason)
    return RECEIPT_INVALID, ""


def _find_fault(receipt: Receipt, run: NodeRun, node: Node, status: OpStatus) -> str:
    """Return why a receipt is not about this end of this run; "" = it is."""
    if node.op_level == "L2" and receipt.runner_id != node.runner_id:
        return "it is of another node"
    if node.op_level == "L2" and not _names_statement(receipt, run):
        return "it is about another statement"
    if (receipt.op_id, receipt.use, receipt.operation) != (run.op_id, run.use, run.operation):
        return "it is about another operation"
    if receipt.outcome != status.state:
        return "it says another outcome"
    return "" if receipt.result_digest == digest_result(status.result) else "it is about another result"


def _names_statement(receipt: Receipt, run: NodeRun) -> bool:
    # A receipt that is for another node or statement than were approved spoils the evidence.
    op_id = parse_id("op", run.op_id)
    targets = set() if op_id is None else {each.target for each in find_operation(op_id).runs.all()}
    return receipt.runner_id in targets and receipt.statement_digest == run.digest


def _report_receipt(node: Node, run: NodeRun, reason: str) -> None:
    logger.error("operation.receipt_invalid node=%s run=%s reason=%s", node.name, run.run_id, reason)
    record_word(
        actor=f"node:{node.name}",
        action="operation.receipt_invalid",
        target=node.runner_id or node.printed_id,
        detail={"run": str(run.run_id), "reason": reason[:200]},
        op_id=run.op_id,
    )
