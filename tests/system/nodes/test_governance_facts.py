"""How a node decides about operations, as it says itself: what is stored, what is refused, and what is an alarm."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import psycopg
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.conf import settings
from django.db import OperationalError, connection, transaction
from django.utils import timezone
from pytest_django import Settings

from core.limits import limits
from governance.checkpoints import consistency, make_checkpoint, root_at
from governance.models import AuditCheckpoint
from nodes import channel
from nodes.errors import BadRequest
from nodes.links.relay import RelayLink
from nodes.models import Node, NodeOpKey, Reach
from nodes.services.credentials import revoke_credential
from nodes.services.governance import set_op_key, take_governance, take_report
from tests.fakes.governed_team import Identity, make_box
from tests.fakes.limits import set_limits
from tests.fakes.links import Door, FakeLink
from tests.fakes.nodes import ACTOR, audited, make_node, make_provider
from wire.auditlog import Checkpoint, LogKey
from wire.bridge import GovernanceReport, NodeGovernance, OpStatus
from wire.optoken.approval import decode_bytes, encode_bytes

pytestmark = pytest.mark.django_db

LOG_SEED = encode_bytes(b"\x07" * 32)


@pytest.fixture
def other_session() -> Iterator[psycopg.Connection]:
    """A second connection to the test database."""
    with psycopg.connect(**connection.get_connection_params()) as other:
        yield other


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def tell(node: Node, said: NodeGovernance | None, heard_ms: int | None = None) -> Node:
    taken = take_governance(node_id=node.pk, said=said, heard_ms=heard_ms if heard_ms is not None else now_ms())
    assert taken is not None
    return taken


def live_keys(node: Node) -> dict[str, bytes]:
    return {key.kid: bytes(key.secret) for key in NodeOpKey.objects.filter(node=node, retired_at=None)}


def test_what_a_node_says_of_itself_is_stored_once() -> None:
    rig = Identity()
    node = make_box(rig, policy_version=3, policy_sha256="a" * 64, witness_size=9)
    assert (node.op_level, node.runner_id, node.box_key) == ("L2", rig.runner_id, encode_bytes(rig.public_key))
    assert (node.policy_version, node.policy_sha256, node.witness_size) == (3, "a" * 64, 9)
    assert node.clock_skew_ms is not None
    assert abs(node.clock_skew_ms) < 10_000
    assert live_keys(node) == {"k1": rig.secret}
    tell(node, rig.tell(policy_version=3, policy_sha256="a" * 64, witness_size=9))
    assert len(audited("node.op_key_new")) == 1, "saying it again records nothing more"
    assert not audited("node.key_changed") + audited("node.went_back")


def test_a_runner_id_that_is_not_made_from_the_key_or_said_too_briefly_is_refused() -> None:
    rig, thief = Identity(), Identity()
    node = make_box(thief, runner_id=rig.runner_id)
    assert (node.op_level, node.runner_id) == ("", "")
    assert "not made from its public key" in node.policy_error
    assert live_keys(node) == {}
    assert len(audited("node.governance_refused")) == 1
    for field, value, why in (
        ("level", "", "no level"),
        ("runner_id", "", "no runner id"),
        ("public_key", "%", "cannot be read"),
    ):
        changes: dict[str, Any] = {field: value}
        node = make_box(Identity(f"brief-{field}"), **changes)
        assert (node.op_level, why in node.policy_error) == ("", True)


def test_two_boxes_cannot_share_a_runner_id() -> None:
    rig = Identity()
    first = make_box(rig)
    second = tell(make_node("copy"), rig.tell())
    assert second.op_level == ""
    assert "belongs to another node" in second.policy_error
    assert first.credential is not None
    revoke_credential(credential_id=first.credential.pk, actor=ACTOR)
    assert tell(second, rig.tell()).op_level == "L2"


def test_two_claims_of_one_runner_id_wait_for_each_other(other_session: psycopg.Connection) -> None:
    rig = Identity()
    node = make_node()
    other_session.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 7))", [rig.runner_id])
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL lock_timeout = '50ms'")
        with pytest.raises(OperationalError, match="lock timeout"), transaction.atomic():
            tell(node, rig.tell())
    other_session.rollback()
    assert tell(node, rig.tell()).op_level == "L2"


def test_another_key_is_an_event_and_one_that_is_no_longer_named_or_cannot_sign_is_not_kept() -> None:
    rig, swapped = Identity(), Identity()
    node = make_box(rig)
    renewed = {"k1": encode_bytes(rig.secret), "k2": encode_bytes(b"2" * 32)}
    tell(node, rig.tell(op_keys=renewed))
    assert list(NodeOpKey.objects.filter(node=node).order_by("pk").values_list("kid", flat=True)) == ["k1", "k2"]
    tell(node, rig.tell(op_keys={"k2": encode_bytes(b"2" * 32)}))
    assert live_keys(node) == {"k2": b"2" * 32}
    assert NodeOpKey.objects.get(node=node, kid="k1").retired_at is not None
    tell(node, rig.tell(op_keys=renewed))
    assert set(live_keys(node)) == {"k1", "k2"}
    tell(node, rig.tell(op_keys={"a": "%", "b": encode_bytes(b"short"), "c": encode_bytes(b"l" * 65)}))
    assert live_keys(node) == {}
    assert tell(node, swapped.tell()).runner_id == swapped.runner_id
    (event,) = audited("node.key_changed")
    assert event.detail["old_runner_id"] == rig.runner_id
    assert tell(node, None).op_level == "", "without governance it takes no operations any more"
    assert Node.objects.get(pk=node.pk).runner_id, "so that its next word can be compared"


def test_a_clock_that_is_off_is_an_alarm_once() -> None:
    rig = Identity()
    node = make_box(rig, clock_ms=now_ms() - limits().nodes.clock_skew_warning_ms - 5_000)
    assert node.clock_skew_ms is not None
    assert node.clock_skew_ms > limits().nodes.clock_skew_warning_ms
    tell(node, rig.tell(clock_ms=now_ms() - limits().nodes.clock_skew_warning_ms - 9_000))
    assert len(audited("node.clock_skew")) == 1
    tell(node, rig.tell())
    tell(node, rig.tell(clock_ms=now_ms() + limits().nodes.clock_skew_warning_ms + 60_000))
    assert len(audited("node.clock_skew")) == 2
    assert tell(node, rig.tell(clock_ms=2**47)).clock_skew_ms == -(2**31 - 1), "what is impossible fits its column"


# Witnesses


@pytest.fixture
def log_key(settings: Settings) -> None:
    """The audit log signs checkpoints."""
    settings.GOVERNANCE_LOG_KEY = LOG_SEED
    make_provider()


def seen(rig: Identity, size: int, root: bytes, *, shows: bool = True, names: bool = False, **changes: Any) -> GovernanceReport:
    """The signed word of a node on a checkpoint; ``shows``: with that in the form in which the log signed it.

    ``names``: it signs its runner id too, as nodes of this release do.
    """
    checkpoint = Checkpoint(settings.GOVERNANCE_LOG_ORIGIN, size, root)
    key = Ed25519PrivateKey.from_private_bytes(decode_bytes(LOG_SEED))
    log = LogKey(settings.GOVERNANCE_LOG_ORIGIN, key.public_key().public_bytes_raw())
    message = checkpoint.witness_message(rig.tell().runner_id if names else "")
    return GovernanceReport(
        witness_note=checkpoint.note(log, key.sign(checkpoint.text().encode())) if shows else "",
        governance=rig.tell(witness_size=size, witness_root=encode_bytes(root)),
        witness_signature=encode_bytes(rig.private_key.sign(message)),
        **changes,
    )


def report(node: Node, said: GovernanceReport) -> str:
    take_report(node_id=node.pk, report=said, heard_ms=now_ms())
    return Node.objects.get(pk=node.pk).witness_alarm


@pytest.mark.usefixtures("log_key")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("forge", "alarm"),
    [
        (lambda rig, size: seen(rig, size, root_at(size)), ""),
        (lambda rig, size: seen(rig, size, root_at(size), names=True), ""),
        (lambda rig, size: seen(rig, size, b"x" * 32), "are not those that it saw"),
        (lambda rig, size: seen(rig, size + 1000, b"x" * 32), "the log is shorter now"),
        (lambda rig, size: seen(rig, size, root_at(size), shows=False), ""),
        (lambda rig, size: seen(rig, size, b"x" * 32, shows=False), "shows no checkpoint"),
        (lambda rig, size: seen(rig, size + 1000, b"x" * 32, shows=False), "shows no checkpoint"),
        (lambda rig, size: seen(Identity(private_key=rig.private_key), size, root_at(size), witness_alarm="no"), "no"),
        (lambda rig, size: msgspec.structs.replace(seen(rig, 0, b"x" * 32), witness_signature="AAAA"), "proves nothing"),
    ],
    ids=range(9),
)
def test_the_word_of_a_box_is_compared_with_the_log_and_an_alarm_stays_until_it_signs_the_log_of_now(
    forge: Callable[..., GovernanceReport], alarm: str
) -> None:
    rig = Identity()
    node, checkpoint = make_box(rig), make_checkpoint(now=timezone.now())
    assert checkpoint is not None
    found = report(node, forge(rig, checkpoint.size))
    assert (alarm in found, bool(found), len(audited("node.witness_alarm"))) == (True, bool(alarm), bool(alarm))
    assert report(node, GovernanceReport(governance=rig.tell())) == found
    assert report(node, seen(rig, checkpoint.size, root_at(checkpoint.size))) == ""


# Keys that an operator gives


def direct_node(name: str = "far") -> Node:
    return make_node(name, reach=Reach.DIRECT, public_base_url="http://far.lan:8000")


def test_an_operator_gives_a_box_called_over_http_its_key() -> None:
    rig = Identity()
    box, node = make_box(rig), direct_node()
    set_op_key(node_id=node.pk, kid="", secret="0123456789abcdef", level="L0", actor=ACTOR)
    node.refresh_from_db()
    assert (node.op_level, node.runner_id) == ("L0", f"far#{node.printed_id}")
    set_op_key(node_id=node.pk, kid="k2", secret="another secret, 32 bytes in all.", level="L1", runner_id="box-7", actor=ACTOR)
    node.refresh_from_db()
    assert (node.op_level, node.runner_id) == ("L1", "box-7")
    assert live_keys(node) == {"k2": b"another secret, 32 bytes in all."}
    assert "secret" not in str([event.detail for event in audited("node.set_op_key")])
    tell(node, None)
    node.refresh_from_db()
    assert node.op_level == "L1", "what an operator gave does not depend on what the node says"
    refused: list[tuple[Node, dict[str, str], str]] = [
        (node, {"level": "L2"}, "level"),
        (node, {"secret": "short"}, "secret"),
        (node, {"secret": "x" * 65}, "secret"),
        (node, {"kid": "", "level": "L1"}, "kid"),
        (node, {"runner_id": "a\nb"}, "runner_id"),
        (node, {"level": "L1", "runner_id": rig.runner_id}, "its own runner id"),
        (box, {}, "makes its own keys"),
    ]
    for target, changes, why in refused:
        values: dict[str, Any] = {"kid": "k", "secret": "0123456789abcdef", "level": "L0", **changes}
        with pytest.raises(BadRequest) as caught:
            set_op_key(node_id=target.pk, actor=ACTOR, **values)
        assert why in (caught.value.param, caught.value.message) or why in caught.value.message


# Nodes that lie or flood


def test_a_node_that_changes_what_it_says_all_the_time_fills_neither_the_log_nor_the_keys_nor_keeps_another_out() -> None:
    set_limits(governance={"audit_events_per_hour": 6}, nodes={"retired_op_keys": 8})
    rig = Identity()
    node, quiet = make_box(rig), make_box(Identity("quiet"))
    for turn in range(10):
        keys = {f"k{turn}.{n}": encode_bytes(secrets.token_bytes(32)) for n in range(4)}
        tell(node, Identity().tell(op_keys=keys, clock_ms=now_ms() + (10**7 if turn % 2 else 0)))
        tell(node, rig.tell(level=""))
    for action in ("node.op_key_new", "node.key_changed", "node.clock_skew", "node.governance_refused"):
        assert 1 <= len([event for event in audited(action) if event.actor == "node:rig"]) <= 6, action
    assert NodeOpKey.objects.filter(node=node).count() <= limits().nodes.retired_op_keys + 8
    tell(quiet, Identity("quiet").tell())
    assert [event.actor for event in audited("node.key_changed")].count("node:quiet") == 1


def test_a_node_below_l2_does_not_take_the_name_that_certifies_another_key() -> None:
    victim, thief = Identity(), Identity("thief")
    said = thief.tell(level="L1", runner_id=victim.runner_id)
    node = tell(make_node("thief"), said)
    assert (node.op_level, node.runner_id) == ("", "")
    assert "certifies another key" in node.policy_error
    assert tell(make_node("rig"), victim.tell()).op_level == "L2"
    assert tell(make_node("third"), thief.tell(level="L1", runner_id="any#name")).op_level == "L1"


def test_a_node_that_falls_to_a_lower_level_or_forgets_is_recorded() -> None:
    rig = Identity()
    node = make_box(rig, policy_version=4, witness_size=90)
    tell(node, rig.tell(policy_version=3, witness_size=20))
    tell(node, rig.tell(level="L1", policy_version=3, witness_size=20))
    details = [event.detail for event in audited("node.went_back")]
    assert details == [
        {"name": "rig", "level": "L2", "policy_version": 3, "witness_size": 20, "was": "L2 4 90"},
        {"name": "rig", "level": "L1", "policy_version": 3, "witness_size": 20, "was": "L2 3 20"},
    ]


def test_of_what_one_node_says_no_more_waits_than_its_share_and_a_last_word_stays_the_last() -> None:
    desk = Door().channel
    loud, quiet = FakeLink(), FakeLink()
    ended = OpStatus(op_id="op", use=1, state="failed")
    said = GovernanceReport(governance=Identity().tell())
    for link in (loud, quiet):
        relayed = cast("RelayLink", link)  # as much of one as taking a word needs
        for status in (ended, OpStatus(op_id="op", use=1, state="running")):
            desk.take_status(relayed, status)
        for number in range(limits().nodes.channel_statuses_per_node + 5 if link is loud else 0):
            desk.take_status(relayed, OpStatus(op_id=f"op{number}", use=1, state="running"))
        for _ in range(limits().nodes.channel_reports_per_node + 5 if link is loud else 1):
            desk.take_report(relayed, said)
    assert desk.waiting_statuses.count(ended) == 2
    assert len(desk.waiting_statuses) == limits().nodes.channel_statuses_per_node + 1
    assert desk.waiting_reports == {loud.node_id: limits().nodes.channel_reports_per_node, quiet.node_id: 1}
    assert list(desk.waiting_reports) == [loud.node_id, quiet.node_id]


def test_no_proof_is_computed_from_a_size_that_was_never_signed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.GOVERNANCE_LOG_KEY = LOG_SEED
    asked: list[int] = []

    def count(old_size: int, new_size: int) -> list[bytes]:
        asked.append(old_size)
        return consistency(old_size, new_size)

    monkeypatch.setattr(channel, "consistency", count)
    AuditCheckpoint.objects.create(size=4, root=b"r" * 32, frontier=b"", note="", made_at=timezone.now())
    assert channel._prove([9, 7, 3, 2], 8) == {9: [], 7: [], 3: [], 2: []}
    assert asked == []
