"""Control plane and nodes of one process: the real services and rows, the real runner, and frames that a test hands over.

The control plane runs inside the transaction of the test. What a process of it would commit is a savepoint there, so a crash is
an exception at one of its statements: all since its last commit is rolled back, and what follows a commit is not done.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from django.db import connection
from django.db.models.functions import Now

from governance.services import active_policy, policy_chain
from nodes.commands import Send, plan_deliveries, store_status
from nodes.models import Node, NodePresence
from nodes.services.governance import take_governance, take_report
from nodes.session.governance import clean_governance, clean_report, clean_status
from runner.operations.fingerprint import write_trusted
from tests.fakes.runner_process import Effect, RunnerProcess
from wire import bridge, clock
from wire.bridge import PolicyOffer
from wire.optoken.approval import policy_words

Result = TypeVar("Result")
Execute = Callable[..., Any]


class Killed(BaseException):
    """A process of the control plane ends here."""


@dataclass
class Broker:
    """What workers were rung for: ids of runs. It outlives the processes of the control plane."""

    rings: list[str] = field(default_factory=list)

    def send_task(self, name: str, *, args: list[str], **options: object) -> None:
        assert name == "governance.tasks.work"
        assert not options.pop("retry")
        self.rings.append(args[0])


BROKER = Broker()
BROKER_PATH = f"{__name__}.BROKER"
"""For the setting TASK_APP."""


class Processes:
    """The processes of the control plane, one step of one of them after the other."""

    def __init__(self) -> None:
        self.deaths = 0
        self._fuse: int | None = None
        self._has_committed = False
        self._is_dying = self._is_between = False
        self._floor = 0
        self._interlude: Callable[[], object] | None = None

    def kill_at(self, statements: int, *, has_committed: bool) -> None:
        """Have the next step end before its so manieth statement; ``has_committed``: if that is a commit, right after it."""
        self._fuse, self._has_committed = statements, has_committed

    def interrupt(self, interlude: Callable[[], object]) -> None:
        """Have something else happen behind the first commit of the next step, before its process goes on."""
        self._interlude = interlude

    def perform(self, work: Callable[[], Result]) -> Result | None:
        """Do one step, and ring behind it; None = its process was killed. Hints are lost: whoever listens looks at rows too."""
        first = len(connection.run_on_commit)
        self._floor = len(connection.savepoint_ids)
        try:
            with connection.execute_wrapper(self._execute):
                result = work()
                if self._fuse is not None:  # it had fewer statements
                    raise Killed
        except Killed:
            del connection.run_on_commit[first:]
            self.deaths += 1
            return None
        finally:
            self._fuse, self._interlude, self._is_dying = None, None, False
        waiting = connection.run_on_commit[first:]
        del connection.run_on_commit[first:]
        for each in waiting:
            if each[1].__module__ != "core.hints":
                each[1]()
        return result

    def _execute(self, execute: Execute, sql: str, params: Any, many: bool, context: Any) -> Any:
        if self._is_dying or self._is_between:
            return execute(sql, params, many, context)
        is_commit = sql.startswith("RELEASE SAVEPOINT") and len(connection.savepoint_ids) == self._floor
        if self._fuse is not None:
            self._fuse -= 1
            if self._fuse < 0:
                self._die(lambda: execute(sql, params, many, context), sql if is_commit else "")
        result = execute(sql, params, many, context)
        if is_commit and self._interlude is not None:
            interlude, self._interlude, self._is_between = self._interlude, None, True
            try:
                interlude()
            finally:
                self._is_between = False
        return result

    def _die(self, execute: Callable[[], object], commit: str) -> None:
        self._is_dying = True
        if commit and self._has_committed:
            execute()
        elif commit:  # Django rolls back what it was to commit for errors of the database alone
            connection.savepoint_rollback(commit.split('"')[1])
        raise Killed


@dataclass
class Link:
    """The socket between gateway and node, while it is open: encoded frames that have not arrived."""

    since: datetime
    policy_version: int
    down: list[str] = field(default_factory=list)
    up: list[str] = field(default_factory=list)
    is_open: bool = True

    def post(self, message: bridge.Message) -> None:
        """Have the node say something; on a link that is gone nobody hears it."""
        if self.is_open:
            self.up.append(bridge.encode_message(message))


class FleetNode:
    """A node: its row, its runner process and its effects, which nothing undoes."""

    def __init__(self, row: Node, folder: Path, models: list[str]) -> None:
        self.row = row
        self.runner_id = ""
        """As it registered; the same at every start."""
        self.effects: list[Effect] = []
        self.process = RunnerProcess(folder, row.name, effects=self.effects, models=models)
        self.link: Link | None = None

    def take(self, frame: str) -> None:
        if self.link is not None:
            self.process.take(bridge.decode_server_message(frame), self.link.post)
        self.notice_its_end()

    def notice_its_end(self) -> None:
        if not self.process.is_up:
            self.unlink()

    def unlink(self) -> None:
        if self.link is not None:
            self.link.is_open, self.link = False, None
        NodePresence.objects.filter(node=self.row).update(connected=False)


class Gateway:
    """The gateway process: it holds the links, delivers commands and policies, and takes down what nodes say."""

    def __init__(self, processes: Processes, nodes: list[FleetNode]) -> None:
        self._processes = processes
        self._nodes = nodes
        self._id = uuid.uuid4()
        self.sent: list[str] = []
        """Every command that ever left, for whoever has listened."""

    def link(self, node: FleetNode) -> None:
        if not node.process.is_up:
            node.process.start()
        node.unlink()
        said = node.process.describe()
        node.runner_id = said.runner_id
        clean_governance(said)

        def register() -> None:
            taken = take_governance(node_id=node.row.pk, said=said, heard_ms=clock.unix_ms())
            assert taken is not None
            assert taken.op_level == "L2", taken.policy_error
            # Reckoned by the database's clock, which no test turns: it is heard until it is unlinked.
            NodePresence.objects.filter(node=node.row).update(connected=True, last_heartbeat_at=Now() + timedelta(days=1))

        self._perform(register)
        if NodePresence.objects.get(node=node.row).connected:
            node.link = Link(clock.now(), said.policy_version)

    def look(self) -> None:
        """Send what is due: commands, questions, policies."""
        linked = {node.row.pk: node for node in self._nodes if node.link is not None}
        since = {pk: node.link.since for pk, node in linked.items() if node.link is not None}
        deliveries = self._perform(lambda: plan_deliveries(linked=since, gateway_id=self._id))
        for each in deliveries or ():
            message: bridge.OpCommand | bridge.OpQuery
            if isinstance(each, Send):
                message = bridge.OpCommand(
                    op_id=each.op_id, use=each.use, operation=each.operation, body=each.body, token=each.token
                )  # fmt: skip
                self.sent.append(bridge.encode_message(message))
            else:
                message = bridge.OpQuery(op_id=each.op_id, use=each.use)
            self._send(linked[each.node_id], message)
        for node in linked.values():
            if node.link is not None:
                chain = policy_chain(after_version=node.link.policy_version)
                if chain:
                    self._send(node, bridge.PolicyOffer(policies=chain))

    def take(self, node: FleetNode, frame: str) -> None:
        message = bridge.decode_worker_message(frame)
        match message:
            case bridge.OpStatus():
                clean_status(message)
                self._perform(lambda: store_status(node_id=node.row.pk, status=message))
            case bridge.GovernanceReport():
                clean_report(message)
                if node.link is not None:
                    node.link.policy_version = message.governance.policy_version
                self._perform(lambda: take_report(node_id=node.row.pk, report=message, heard_ms=clock.unix_ms()))
            case _:
                raise TypeError(message)

    def _send(self, node: FleetNode, message: bridge.Message) -> None:
        if node.link is not None:
            node.link.down.append(bridge.encode_message(message))

    def _perform(self, work: Callable[[], Result]) -> Result | None:
        deaths = self._processes.deaths
        result = self._processes.perform(work)
        if self._processes.deaths > deaths:
            self._restart()
        return result

    def _restart(self) -> None:
        self._id = uuid.uuid4()
        for node in self._nodes:
            node.unlink()


def make_folders(place: Path, names: Iterable[str]) -> list[Path]:
    """Data folders of runners on which a person confirmed the active policy, and that have pinned it."""
    found, folders = active_policy(), []
    assert found is not None
    for name in names:
        folder = place / name
        folder.mkdir()
        write_trusted(folder, policy_words(found[1].ref.sha256))
        process = RunnerProcess(folder, name, effects=[], models=[])
        process.start()
        process.take(PolicyOffer(policies=policy_chain(after_version=0)), lambda _: None)
        assert process.governance.policy is not None
        process.kill()
        folders.append(process.folder)
    return folders
