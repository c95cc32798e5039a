"""A box that lies, floods or takes another's place hurts itself: not the audit log, not the evidence, not other boxes."""

from __future__ import annotations

import secrets
import uuid
from typing import Any

import pytest
from django.utils import timezone

from core.limits import NodeLimits, limits
from governance import services
from governance.checkpoints import consistency
from governance.models import AuditCheckpoint
from nodes.consumers import courier
from nodes.consumers.courier import Courier
from nodes.links import LinkRegistry
from nodes.models import Node, NodeOpKey
from nodes.session import ServerSession
from tests.fakes.governed_nodes import Identity, make_box
from tests.fakes.nodes import audited, make_node
from tests.system.governance.team import make_governed
from tests.system.nodes.test_commands import Sent
from tests.system.nodes.test_governance_facts import now_ms, tell
from wire import bridge
from wire.bridge import GovernanceReport, OpStatus
from wire.optoken.approval import encode_bytes, read_statement, verify_receipts

pytestmark = pytest.mark.django_db


@pytest.fixture
def sent() -> Sent:
    return Sent(make_governed())


# The audit log, from which nothing is ever removed


def test_a_box_that_changes_what_it_says_all_the_time_fills_neither_the_log_nor_the_keys() -> None:
    rig = Identity()
    node = make_box(rig)
    for turn in range(limits().governance.audit_events_per_hour + 15):
        keys = {f"k{turn}.{n}": encode_bytes(secrets.token_bytes(32)) for n in range(4)}
        tell(node, Identity().tell(op_keys=keys, clock_ms=now_ms() + (10**7 if turn % 2 else 0)))
        tell(node, rig.tell(level=""))
    for action in ("node.op_key_new", "node.key_changed", "node.clock_skew", "node.governance_refused"):
        assert 1 <= len(audited(action)) <= limits().governance.audit_events_per_hour, action
    assert NodeOpKey.objects.filter(node=node).count() <= limits().nodes.retired_op_keys + 8


def test_another_box_is_recorded_while_one_floods() -> None:
    loud, quiet = make_box(Identity("loud")), make_box(Identity("quiet"))
    for _ in range(limits().governance.audit_events_per_hour + 5):
        tell(loud, Identity("loud").tell())
    tell(quiet, Identity("quiet").tell())
    assert [event.actor for event in audited("node.key_changed")].count("node:quiet") == 1


def test_a_forged_receipt_that_is_sent_again_and_again_is_recorded_a_few_times(sent: Sent) -> None:
    for _ in range(limits().governance.audit_events_per_hour + 5):
        sent.say("succeeded", receipt="AAAA", result={"n": secrets.token_hex(4)})
    assert len(audited("operation.receipt_invalid")) == limits().governance.audit_events_per_hour


# Identity


def test_a_box_below_l2_does_not_take_the_name_that_certifies_another_key() -> None:
    victim, thief = Identity(), Identity("thief")
    said = thief.tell(level="L1", runner_id=victim.runner_id)
    node = tell(make_node("thief"), said)
    assert (node.op_level, node.runner_id) == ("", "")
    assert "certifies another key" in node.policy_error
    assert tell(make_node("rig"), victim.tell()).op_level == "L2"
    assert tell(make_node("third"), thief.tell(level="L1", runner_id="any#name")).op_level == "L1"


def test_a_box_that_falls_to_a_lower_level_or_forgets_is_recorded() -> None:
    rig = Identity()
    node = make_box(rig, policy_version=4, witness_size=90)
    tell(node, rig.tell(policy_version=4, witness_size=90))
    assert not audited("node.went_back")
    tell(node, rig.tell(policy_version=3, witness_size=20))
    tell(node, rig.tell(level="L1", policy_version=3, witness_size=20))
    details = [event.detail for event in audited("node.went_back")]
    assert details == [
        {"name": "rig", "level": "L2", "policy_version": 3, "witness_size": 20, "was": "L2 4 90"},
        {"name": "rig", "level": "L1", "policy_version": 3, "witness_size": 20, "was": "L2 3 20"},
    ]


# The evidence


def evidence_of(sent: Sent) -> dict[str, object]:
    return services.read_evidence(sent.operation.printed_id)


def test_a_receipt_about_another_statement_does_not_spoil_the_evidence(sent: Sent) -> None:
    status = OpStatus(op_id=sent.command.op_id, use=1, state="succeeded")
    status.receipt = sent.rig.receipt(status, statement_digest="ab" * 32)
    sent.hear(status)
    assert (sent.run.code, sent.run.receipt) == ("receipt_invalid", "")
    assert evidence_of(sent)["receipts"] == []


def test_receipts_that_are_kept_convince_the_stand_alone_verifier(sent: Sent) -> None:
    sent.hear(sent.rig.end(sent.command.op_id, "succeeded"))
    statement = read_statement(bytes(sent.operation.statement))
    (receipt,) = verify_receipts(evidence_of(sent), statement)
    assert receipt["runnerId"] == sent.rig.runner_id


def test_of_a_box_below_l2_no_receipt_is_kept_that_names_no_statement(sent: Sent) -> None:
    Node.objects.update(op_level="L1")
    status = OpStatus(op_id=sent.command.op_id, use=1, state="succeeded")
    status.receipt = sent.rig.receipt(status, statement_digest="")
    sent.hear(status)
    assert (sent.run.code, sent.run.receipt) == ("", "")
    assert verify_receipts(evidence_of(sent), read_statement(bytes(sent.operation.statement))) == []


# The gateway's time


def test_a_word_of_a_muster_box_that_is_too_long_ends_its_session_before_it_is_read() -> None:
    session = ServerSession(NodeLimits())
    session.receive_text(bridge.encode_message(bridge.Register(protocol_version=bridge.MUSTER_V1)))
    status = bridge.encode_message(
        OpStatus(op_id="op", use=1, state="running", result={"x": "y" * limits().nodes.control_frame_chars})
    )
    with pytest.raises(bridge.ProtocolError, match="longer than"):
        session.receive_text(status)


class Link:
    """As much of a link as taking a report needs."""

    def __init__(self, node: Node) -> None:
        self.node_id, self.node_name, self.governance = node.pk, node.name, None


def test_reports_of_one_box_leave_room_for_those_of_others() -> None:
    desk: Any = Courier(LinkRegistry(), gateway_id=uuid.uuid4())
    loud, quiet = Link(Node(name="loud")), Link(Node(name="quiet"))
    for _ in range(5000):
        desk.take_report(loud, GovernanceReport(governance=Identity().tell()))
    desk.take_report(quiet, GovernanceReport(governance=Identity().tell()))
    assert [report.node_id for report in desk.due_reports()] == [loud.node_id, quiet.node_id]
    assert desk.waiting_reports == limits().nodes.courier_reports_per_node + 1


def test_no_proof_is_computed_from_a_size_that_was_never_signed(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.GOVERNANCE_LOG_KEY = encode_bytes(b"\x07" * 32)
    asked: list[int] = []

    def count(old_size: int, new_size: int) -> list[bytes]:
        asked.append(old_size)
        return consistency(old_size, new_size)

    monkeypatch.setattr(courier, "consistency", count)
    AuditCheckpoint.objects.create(size=4, root=b"r" * 32, frontier=b"", note="", made_at=timezone.now())
    assert courier._prove([9, 7, 3, 2], 8) == {9: [], 7: [], 3: [], 2: []}
    assert asked == []
