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
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from django.db import DatabaseError, DataError, InterfaceError

from core.db.threads import Batcher, run_in_database, run_upkeep
from core.limits import limits
from core.throttle import AuthThrottle
from governance.checkpoints import consistency, has_checkpoint, latest_checkpoint
from governance.errors import GovernanceError
from governance.operations.evidence import policy_chain
from nodes.delivery import FINAL_STATES, Ask, Delivery, Send, plan_deliveries, store_status
from nodes.errors import EnrolmentRefused, NodeNotFound
from nodes.links import LinkRegistry
from nodes.links.keeper import LinkKeeper
from nodes.links.relay import RelayLink
from nodes.metrics import AUTH_FAILURES
from nodes.models import NodeCredential
from nodes.reports import store_endpoints
from nodes.services import sessions
from nodes.services.credentials import find_credentials, read_credential_digests
from nodes.services.drains import set_mode
from nodes.services.governance import take_report
from nodes.session import ModeRequested
from wire import bridge, clock
from wire.contract import NodeMode
from wire.credentials import digest_credential

logger = logging.getLogger("muster.nodes")

StatusKey = tuple[uuid.UUID, str, int]


@dataclass(frozen=True, slots=True)
class _Report:
    node_id: uuid.UUID
    report: bridge.GovernanceReport
    heard_ms: int


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """The newest checkpoint (``root`` in base64)."""

    note: str
    size: int
    root: str


@dataclass(frozen=True, slots=True)
class OwnerWord:
    """What an owner said at a node, and when (clock.monotonic())."""

    effect: ModeRequested
    said_at: float


Connect = Callable[[sessions.OpenedSession, float], RelayLink]
"""Links a node whose session was opened; the float is when it was asked for (clock.monotonic())."""


class CredentialRefused(Exception):
    """The text says why."""


@dataclass(frozen=True, slots=True)
class CredentialCheck:
    """What a socket of an address brings to be let in."""

    address: str
    secret: str


@dataclass(frozen=True, slots=True)
class Registration:
    """A session to be opened, and what links its node then."""

    request: sessions.SessionRequest
    connect: Connect


class NodeChannel:
    """What the node sockets of one gateway process share: it delivers to the nodes, and takes down what they say."""

    def __init__(self, keeper: LinkKeeper, *, advertised_gateways: list[str]) -> None:
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
        self.owner_words: dict[uuid.UUID, OwnerWord] = {}
        """What owners said at their nodes and the database does not know yet; the newest of each."""
        self._beside: set[asyncio.Task[None]] = set()
        self._statuses: dict[StatusKey, bridge.OpStatus] = {}
        self._written_at: dict[StatusKey, float] = {}
        self._reports: dict[uuid.UUID, deque[_Report]] = {}
        self._has_work = asyncio.Event()
        self._looked_at = dict.fromkeys(("commands", "policy", "checkpoints"), float("-inf"))
        self._woken: set[str] = set()

    @property
    def waiting_statuses(self) -> tuple[bridge.OpStatus, ...]:
        """What boxes said of operations and the database does not know yet."""
        return tuple(self._statuses.values())

    @property
    def waiting_reports(self) -> int:
        """How many words on how boxes decide are not stored yet."""
        return sum(map(len, self._reports.values()))

    @property
    def links(self) -> list[RelayLink]:
        """The links of the nodes on these sockets."""
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
        """Return the credentials; runs in a thread, where the throttle may ask the database."""
        throttle = self.throttle
        waiting = {check for check in asked if throttle.must_wait(check.address, digest_credential(check.secret))}
        found = find_credentials({check.secret for check in asked if check not in waiting})
        answers: list[NodeCredential | CredentialRefused] = []
        for check in asked:
            credential = found.get(check.secret)
            if credential is not None:
                answers.append(credential)
            elif check in waiting or throttle.is_blocked(check.address):
                AUTH_FAILURES.labels("throttled").inc()
                answers.append(CredentialRefused("worker authentication temporarily rate limited"))
            else:
                throttle.record_failure(check.address)
                AUTH_FAILURES.labels("rejected").inc()
                answers.append(CredentialRefused("worker authentication failed"))
        return answers

    async def _open_sessions(self, asked: list[Registration]) -> list[RelayLink | Exception]:
        """Open sessions and link their nodes before others are opened: bridge workers that share a name must see each other."""
        asked_at = clock.monotonic()
        opened = await run_in_database(
            sessions.open_sessions,
            [registration.request for registration in asked],
            gateway_id=self.gateway_id,
            live_nodes=frozenset(link.node_id for link in self.links),
            other_gateways=self.keeper.other_gateways,
        )
        return [
            session if isinstance(session, EnrolmentRefused) else registration.connect(session, asked_at)
            for registration, session in zip(asked, opened, strict=True)
        ]

    # on the event loop, from the frame path

    def take_status(self, link: RelayLink, status: bridge.OpStatus) -> None:
        """Note where an operation stands on a box; the newest word counts, and a last word stays the last."""
        key = (link.node_id, status.op_id, status.use)
        before = self._statuses.get(key)
        if (
            before is None
            and sum(node_id == link.node_id for node_id, _, _ in self._statuses) >= self.limits.channel_statuses_per_node
        ):
            logger.error("node.status_dropped node=%s; the box is asked again", link.node_name)
            return
        if before is not None and before.state in FINAL_STATES and status.state not in FINAL_STATES:
            return
        self._statuses[key] = status
        self._has_work.set()

    def take_report(self, link: RelayLink, report: bridge.GovernanceReport) -> None:
        """Note how a box decides now."""
        link.governance = report.governance
        waiting = self._reports.setdefault(link.node_id, deque())
        if len(waiting) >= self.limits.channel_reports_per_node:
            logger.error("node.report_dropped node=%s; it says so again when it registers", link.node_name)
            return
        waiting.append(_Report(link.node_id, report, clock.unix_ms()))
        self.wake("policy")

    def take_owner_word(self, link: RelayLink, effect: ModeRequested) -> None:
        """Write down that the owner lends a node or takes it back, however long the database is away and the link lives."""
        is_storing = link.node_id in self.owner_words
        self.owner_words[link.node_id] = OwnerWord(effect, clock.monotonic())
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
                await self._deliver()
                await self._offer_policies()
                await self._offer_checkpoints()
            except (DatabaseError, InterfaceError, OSError) as error:
                logger.warning("node.courier_waits error=%s", type(error).__name__)
                await asyncio.sleep(self.limits.channel_retry_s)

    def _rest_s(self) -> float:
        """Return how long nothing is due by the clock."""
        now = clock.monotonic()
        due = [self._looked_at["commands"] + self.limits.channel_sweep_s]
        due += [self._looked_at[topic] + self.limits.channel_hint_pause_s for topic in self._woken]
        due += [self._written_at.get(key, 0.0) + self.limits.channel_progress_s for key in self._statuses]
        return max(0.02, min(due) - now)

    def _is_due(self, topic: str, every_s: float) -> bool:
        """Whether to look at the rows of a topic now; saying so counts as the look."""
        now = clock.monotonic()
        if now - self._looked_at[topic] < (self.limits.channel_hint_pause_s if topic in self._woken else every_s):
            return False
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
            if self._statuses.get(key) is status:  # else the box has said something newer meanwhile
                del self._statuses[key]
            self._written_at[key] = now
        self._written_at = {key: at for key, at in self._written_at.items() if now - at < self.limits.channel_progress_s}

    def due_reports(self) -> list[_Report]:
        """Return the oldest report of every box."""
        return [waiting[0] for waiting in self._reports.values()]

    async def _store_reports(self) -> None:
        for report in self.due_reports():
            await run_upkeep(_store_report, report)
            waiting = self._reports[report.node_id]
            waiting.popleft()
            if not waiting:
                del self._reports[report.node_id]
        if self._reports:
            self._has_work.set()

    async def _deliver(self) -> None:
        if not self._is_due("commands", self.limits.channel_sweep_s):
            return
        linked = {link.node_id: link.linked_at for link in self._governed_links()}
        if not linked:
            return
        for delivery in await run_upkeep(plan_deliveries, linked=linked, gateway_id=self.gateway_id):
            self._send(delivery)

    def _send(self, delivery: Delivery) -> None:
        link = self.registry.get(delivery.node_id)
        if not isinstance(link, RelayLink) or link.closed or link.governance is None:
            return  # the row says that it was sent; the next session of the box is asked
        match delivery:
            case Send():
                link.send_message(
                    bridge.OpCommand(
                        op_id=delivery.op_id,
                        use=delivery.use,
                        operation=delivery.operation,
                        body=delivery.body,
                        token=delivery.token,
                    )
                )
            case Ask():
                link.send_message(bridge.OpQuery(op_id=delivery.op_id, use=delivery.use))

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
        sizes = {link: _witnessed(link) for link in self._governed_links() if _is_witness(link)}
        newest = await run_upkeep(_read_checkpoint) if sizes else None
        if newest is None:
            return
        due = {
            link: size
            for link, (size, root) in sizes.items()
            if (size, root) != (newest.size, newest.root) and link.offered_size != newest.size
        }
        # A box says itself what it saw, and a proof from early on reads the whole log: others wait for the next look.
        wanted = sorted(set(due.values()), reverse=True)[: self.limits.channel_proofs]
        proofs = await run_upkeep(_prove, wanted, newest.size) if wanted else {}
        for link, size in due.items():
            proof = proofs.get(size)
            if proof is not None and not link.closed:
                link.offered_size = newest.size
                offer = bridge.CheckpointOffer(note=newest.note, old_size=size, proof=proof, wants_name=True)
                link.send_message(offer)

    def _governed_links(self) -> list[RelayLink]:
        """Return the links of boxes that know operations; others would end their session over a frame they do not know."""
        return [link for link in self.links if link.governance is not None]

    # beside

    async def _store_mode(self, node_id: uuid.UUID, node_name: str) -> None:
        """Store the owner's newest word; until then rows do not undo it. One that was said elsewhere later makes it void."""
        while (word := self.owner_words.get(node_id)) is not None:
            try:
                await run_in_database(
                    set_mode,
                    node_id=node_id,
                    mode=NodeMode(word.effect.mode),
                    reason=(word.effect.reason or "owner at the box")[:200],
                    actor=f"node:{node_name}",
                    said_age_s=clock.monotonic() - word.said_at,
                )
            except NodeNotFound:
                logger.warning("node.mode_not_stored node=%s; the node was removed", node_name)
            except (DatabaseError, InterfaceError):
                logger.warning("node.mode_not_stored node=%s; trying again", node_name)
                await asyncio.sleep(1.0)
                continue
            if self.owner_words[node_id] is word:
                del self.owner_words[node_id]
                link = self.registry.get(node_id)
                if isinstance(link, RelayLink):
                    link.wanted_mode, link.mode_stored_at = None, clock.monotonic()

    async def store_farewells(self, links: Sequence[RelayLink], reason: str) -> None:
        """Mark the nodes of these links as gone from here, all in one statement."""
        ends = [sessions.SessionEnd(link.node_id, link.link_id, reason) for link in links]
        try:
            await run_upkeep(sessions.close_sessions, ends, gateway_id=self.gateway_id)
        except (DatabaseError, InterfaceError):
            logger.warning("worker.disconnect_not_stored nodes=%d; their presence will time out", len(links))
        else:
            for link in links:
                link.is_farewell_stored = True

    async def say_goodbye(self) -> None:
        """Write down at once that every node is gone from here, before the sockets close one by one."""
        links = [link for link in self.links if not link.is_farewell_stored]
        if links:
            await self.store_farewells(links, "server shutdown")
        for link in links:
            link.is_farewell_stored = True  # or the database is away, and trying for each alone would not help

    async def close(self) -> None:
        """Wait a moment for what is still written about the nodes, then end it. The gateway stops."""
        if self._beside:
            await asyncio.wait(list(self._beside), timeout=self.limits.socket_close_s)
        for task in list(self._beside):
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        for node_id in self.owner_words:
            logger.warning("node.mode_not_stored node_id=%s; the gateway stops, and the node says it again elsewhere", node_id)


def _witnessed(link: RelayLink) -> tuple[int, str]:
    """Return size and root (base64) of the last checkpoint that a box saw."""
    return (0, "") if link.governance is None else (link.governance.witness_size, link.governance.witness_root)


def _is_witness(link: RelayLink) -> bool:
    """Whether a box can check a checkpoint: the log's key stands in the policy that it pinned."""
    return link.governance is not None and link.governance.policy_version > 0


def presence_reports(registry: LinkRegistry, *, news_only: bool = False) -> list[sessions.PresenceReport]:
    """Return what this process knows of the boxes on its sockets, for writing to the database.

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
                max_concurrent=link.max_concurrent,
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
    if link.box_draining:
        return "draining"
    if _serves_nothing(link):
        return "error"
    return "available" if link.has_slot() else "busy"


# in a database thread


def _store_statuses(statuses: Mapping[StatusKey, bridge.OpStatus]) -> None:
    for (node_id, _, _), status in statuses.items():
        try:
            store_status(node_id=node_id, status=status)
        except DataError:  # what one box says must not keep the others from being heard
            logger.exception("node.status_refused node_id=%s", node_id)


def _store_report(report: _Report) -> None:
    try:
        take_report(node_id=report.node_id, report=report.report, heard_ms=report.heard_ms)
    except DataError:
        logger.exception("node.report_refused node_id=%s", report.node_id)


def _read_checkpoint() -> _Checkpoint | None:
    newest = latest_checkpoint()
    return None if newest is None else _Checkpoint(newest.note, newest.size, base64.b64encode(bytes(newest.root)).decode())


def _prove(sizes: Iterable[int], newest_size: int) -> dict[int, list[str]]:
    """Return by old size the proof that the log of ``newest_size`` extends it.

    Nothing can be proved to a box that saw more, or a size at which this log never signed anything: the proof is empty, and the
    box shows what it saw, or raises the alarm.
    """
    proofs: dict[int, list[str]] = {}
    for size in sizes:
        proofs[size] = []
        if size >= newest_size or not (size == 0 or has_checkpoint(size)):
            continue
        try:
            proofs[size] = [base64.b64encode(step).decode() for step in consistency(size, newest_size)]
        except GovernanceError as error:
            del proofs[size]
            logger.error("node.checkpoint_not_proved size=%d error=%s", size, error)  # noqa: TRY400 - the text says it all
    return proofs
