"""How a node decides about operations, as it says itself: level, identity, keys, pinned policy, clock. Keys given by hand.

Nothing here is proof: a node proves what it did by receipts, and its runner id names the key that they are signed with.
"""

from __future__ import annotations

import base64
import logging
import re
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import assert_never

from django.db import connection, transaction
from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event, record_word
from governance.checkpoints import WitnessStatus, record_witness
from governance.errors import GovernanceError
from nodes.errors import BadRequest, NodeNotFound
from nodes.models import Node, NodeOpKey, ProviderState, Reach, save_changes
from wire import clock
from wire.bridge import GovernanceReport, NodeGovernance
from wire.limits import WIRE
from wire.optoken.approval import ApprovalError, decode_bytes
from wire.optoken.op_token import owns_runner_id

_CERTIFIED = re.compile(r"#[a-z2-7]{26}\Z")
"""The end of a runner id that was made from a key: at any level only the holder of that key has it."""

logger = logging.getLogger("muster.nodes")


@transaction.atomic
def take_governance(*, node_id: uuid.UUID, said: NodeGovernance | None, heard_ms: int) -> Node | None:
    """Store how a node decides. Safe to repeat. Returns the node, None when there is none any more.

    ``said`` None: the node takes no operations from here. ``heard_ms``: Unix milliseconds at which it was heard.
    A node whose runner id is not made from its key (L2), or belongs to another node, gets the level "" and a line in the log.
    """
    node = Node.objects.select_for_update().filter(pk=node_id).first()
    if node is None:
        return None
    if said is None:
        if node.op_level and node.reach == Reach.RELAY.value:
            save_changes(node, {"op_level": ""})
        return node
    _lock_runner_id(said.runner_id)
    refusal = _find_refusal(node, said)
    if refusal:
        logger.error("node.governance_refused node=%s reason=%s", node.name, refusal)
        if node.op_level or node.policy_error != refusal:
            _record(node, "node.governance_refused", {"reason": refusal})
        save_changes(node, {"op_level": "", "policy_error": refusal})
        return node
    _store(node, said, heard_ms=heard_ms)
    _store_keys(node, said)
    return node


def take_registered(said: Sequence[tuple[Node, NodeGovernance | None, int]]) -> None:
    """Store how nodes that have registered decide: each with its row and when it was heard, as for ``take_governance``.

    Within a transaction that holds the rows. A node that says what it said before costs no statement of its own.
    """
    ids = [node.pk for node, one, _at in said if one is not None]
    keys: dict[uuid.UUID, dict[str, bytes]] = {node_id: {} for node_id in ids}
    for key in NodeOpKey.objects.filter(node__in=ids, retired_at=None) if ids else ():
        keys[key.node_id][key.kid] = bytes(key.secret)
    holders = Counter(
        _list_holders(Node.objects.filter(runner_id__in={one.runner_id for _node, one, _at in said if one is not None}))
        if ids
        else ()
    )
    for node, one, heard_ms in said:
        if one is None:
            is_news = bool(node.op_level)
        else:
            is_news = holders[one.runner_id] > 1 or _is_news(node, one, keys[node.pk], heard_ms=heard_ms)
        if is_news:
            take_governance(node_id=node.pk, said=one, heard_ms=heard_ms)


def _is_news(node: Node, said: NodeGovernance, keys: dict[str, bytes], *, heard_ms: int) -> bool:
    """Whether a node says of itself, or names as keys (by id), anything that is not stored of it."""
    skew_ms, was_ms = _measure_skew(said, heard_ms=heard_ms), node.clock_skew_ms
    if skew_ms is None or was_ms is None:
        is_same_clock = skew_ms == was_ms
    else:
        is_same_clock = abs(skew_ms - was_ms) < limits().nodes.clock_skew_shown_ms and _is_skewed(skew_ms) == _is_skewed(was_ms)
    is_same = all(getattr(node, column) == value for column, value in _columns_of(said).items())
    named = {kid: _read_secret(text) for kid, text in said.op_keys.items()}
    return not said.level or not is_same or not is_same_clock or named != keys


def _columns_of(said: NodeGovernance) -> dict[str, object]:
    same = (
        *("runner_id", "policy_version", "policy_sha256", "policy_error", "witness_size", "keeps_models", "reloads_settings"),
        "cluster_address",
    )
    return {"op_level": said.level, "box_key": said.public_key, **{name: getattr(said, name) for name in same}}


@transaction.atomic
def take_report(*, node_id: uuid.UUID, report: GovernanceReport, heard_ms: int) -> None:
    """Store what changed in how a node decides, and its signature of the audit checkpoint that it saw.

    An alarm stays until the node signs a checkpoint that the log of now contains.
    """
    node = take_governance(node_id=node_id, said=report.governance, heard_ms=heard_ms)
    if node is None or not node.op_level:
        return
    judged = _judge_witness(node, report) if report.witness_signature else None
    alarm = report.witness_alarm or judged
    if alarm is None or alarm == node.witness_alarm:
        return
    if alarm:
        logger.error("node.witness_alarm node=%s", node.name)
        _record(node, "node.witness_alarm", {"witness_size": report.governance.witness_size})
    save_changes(node, {"witness_alarm": alarm})


def _judge_witness(node: Node, report: GovernanceReport) -> str:
    """Keep the checkpoint that the node signed; return why it contradicts the log, "" = it does not."""
    said = report.governance
    try:
        status = record_witness(
            node_name=node.name,
            runner_id=node.runner_id,
            size=said.witness_size,
            root=_decode(said.witness_root),
            signature=_decode(report.witness_signature),
            public_key=decode_bytes(node.box_key),
            note=report.witness_note,
        )
    except (GovernanceError, ApprovalError, ValueError) as error:
        return f"what it says of the audit log proves nothing: {error}"[:300]
    match status:
        case WitnessStatus.OK:
            return ""
        case WitnessStatus.BEHIND:
            return f"it saw an audit log of {said.witness_size} entries; the log is shorter now"
        case WitnessStatus.INCONSISTENT:
            return f"the first {said.witness_size} entries of the audit log are not those that it saw"
    assert_never(status)


def _decode(text: str) -> bytes:
    # Base64 or base64url, padded or not.
    plain = text.rstrip("=").replace("-", "+").replace("_", "/")
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)


@transaction.atomic
def set_op_key(*, node_id: uuid.UUID, kid: str, secret: str, level: str, runner_id: str = "", actor: str) -> NodeOpKey:
    """Give the key that tokens for a node called over HTTP are signed with; older ones are retired.

    ``secret``: the text that stands in the node's key file, of at least 16 bytes. ``level``: L0 or L1. ``runner_id``:
    what the node calls itself in L1 tokens; "" = a name made from the node's. Raises NodeNotFound, BadRequest.
    """
    node = Node.objects.select_for_update().filter(pk=node_id).first()
    if node is None:
        raise NodeNotFound(_("There is no node %(node_id)s.") % {"node_id": node_id}, param="node_id")
    _check_given(node, kid=kid, secret=secret, level=level, runner_id=runner_id)
    target = runner_id or node.runner_id or f"{node.name}#{node.printed_id}"
    _lock_runner_id(target)
    if _is_held(node, target):
        raise BadRequest(
            _("Another node is called %(target)s already; every node needs its own runner id.") % {"target": target},
            param="runner_id",
        )
    NodeOpKey.objects.filter(node=node, retired_at=None).update(retired_at=clock.now())
    NodeOpKey.objects.filter(node=node, kid=kid).delete()  # given again, it is the newest
    key = NodeOpKey.objects.create(node=node, kid=kid, secret=secret.encode())
    save_changes(node, {"op_level": level, "runner_id": target})
    detail = {"name": node.name, "kid": kid, "level": level, "runner_id": target}
    record_event(actor=actor, action="node.set_op_key", target=node.printed_id, detail=detail)
    return key


def _check_given(node: Node, *, kid: str, secret: str, level: str, runner_id: str) -> None:
    if node.reach != Reach.DIRECT.value:
        raise BadRequest(_("This node dials in and makes its own keys; only nodes called over HTTP take one."), param="node_id")
    if level not in {"L0", "L1"}:
        raise BadRequest(_("level must be L0 or L1: at L2 a node makes its own keys."), param="level")
    if len(kid) > limits().nodes.op_key_id_chars or not kid.isprintable() or (level == "L1" and not kid):
        raise BadRequest(
            _("kid must be the key's id on the node, 1 to %(most)s characters; L0 needs none.")
            % {"most": limits().nodes.op_key_id_chars},
            param="kid",
        )
    if not WIRE.token_least_key_bytes <= len(secret.encode()) <= limits().nodes.op_key_bytes:
        raise BadRequest(
            _("The key must have %(token_least_key_bytes)s to %(op_key_bytes)s bytes.")
            % {"token_least_key_bytes": WIRE.token_least_key_bytes, "op_key_bytes": limits().nodes.op_key_bytes},
            param="secret",
        )
    if len(runner_id) > 200 or not runner_id.isprintable():
        raise BadRequest(_("runner_id must be at most 200 printable characters."), param="runner_id")


def _find_refusal(node: Node, said: NodeGovernance) -> str:
    """Return why a node cannot be the target of operations under what it says; "" = it can."""
    if not said.level:
        return "the node named no level that is known here"
    if not said.runner_id:
        return "the node named no runner id that can be kept"
    if said.level == "L2":
        try:
            key = decode_bytes(said.public_key)
        except ApprovalError:
            return "the node's public key cannot be read"
        if not owns_runner_id(said.runner_id, key):
            return "the node's runner id is not made from its public key"
    elif _CERTIFIED.search(said.runner_id) and not _owns(said):
        return "the node's runner id certifies another key"
    if _is_held(node, said.runner_id):
        return "the node's runner id belongs to another node; revoke the credential of the older one"
    return ""


def _owns(said: NodeGovernance) -> bool:
    try:
        return owns_runner_id(said.runner_id, decode_bytes(said.public_key))
    except ApprovalError:
        return False


def _is_held(node: Node, runner_id: str) -> bool:
    # A node whose credential was revoked, or whose provider is gone, holds nothing.
    return _list_holders(Node.objects.filter(runner_id=runner_id).exclude(pk=node.pk)).exists()


def _list_holders(nodes: QuerySet[Node]) -> QuerySet[Node, str]:
    gone = Q(credential__revoked_at__isnull=False) | Q(provider__state=ProviderState.DELETED)
    return nodes.exclude(gone).values_list("runner_id", flat=True)


def _lock_runner_id(runner_id: str) -> None:
    # Two nodes that claim one id see each other. Always after the lock of the own row, or two could wait in a ring.
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 7))", [runner_id])


def _store(node: Node, said: NodeGovernance, *, heard_ms: int) -> None:
    if node.box_key and node.box_key != said.public_key:
        logger.error("node.key_changed node=%s", node.name)
        _record(node, "node.key_changed", {"old_runner_id": node.runner_id, "runner_id": said.runner_id})
    _note_step_back(node, said)
    skew_ms = _measure_skew(said, heard_ms=heard_ms)
    if _is_skewed(skew_ms) and not _is_skewed(node.clock_skew_ms):
        logger.error("node.clock_skew node=%s skew_ms=%d", node.name, skew_ms)
        _record(node, "node.clock_skew", {"skew_ms": skew_ms})
    save_changes(node, {**_columns_of(said), "clock_skew_ms": skew_ms})


def _note_step_back(node: Node, said: NodeGovernance) -> None:
    # It may have been set up anew, restored from a backup, or be another node.
    was, now = (node.op_level, node.policy_version, node.witness_size), (said.level, said.policy_version, said.witness_size)
    if now[0] < was[0] or now[1] < was[1] or now[2] < was[2]:
        logger.error("node.went_back node=%s", node.name)
        detail = dict(zip(("level", "policy_version", "witness_size"), now, strict=True))
        _record(node, "node.went_back", {**detail, "was": " ".join(map(str, was))})


def _store_keys(node: Node, said: NodeGovernance) -> None:
    known = {key.kid: key for key in NodeOpKey.objects.filter(node=node)}
    for kid, text in said.op_keys.items():
        secret = _read_secret(text)
        if secret is None:
            logger.error("node.op_key_refused node=%s kid=%s", node.name, kid)
            continue
        key = known.get(kid)
        if key is None:
            NodeOpKey.objects.create(node=node, kid=kid, secret=secret)
            _record(node, "node.op_key_new", {"kid": kid})
        elif key.retired_at is not None or bytes(key.secret) != secret:
            key.secret, key.retired_at = secret, None
            key.save(update_fields=["secret", "retired_at"])
            _record(node, "node.op_key_new", {"kid": kid})
    gone = NodeOpKey.objects.filter(node=node, retired_at=None).exclude(kid__in=list(said.op_keys))
    if gone.update(retired_at=clock.now()):
        publish_hint("nodes", str(node.pk))
    retired = NodeOpKey.objects.filter(node=node, retired_at__isnull=False).order_by("-retired_at", "-pk")
    oldest = list(retired.values_list("pk", flat=True)[limits().nodes.retired_op_keys : limits().nodes.retired_op_keys + 100])
    if oldest:
        NodeOpKey.objects.filter(pk__in=oldest).delete()


def _read_secret(text: str) -> bytes | None:
    try:
        secret = decode_bytes(text)
    except ApprovalError:
        return None
    return secret if WIRE.token_least_key_bytes <= len(secret) <= limits().nodes.op_key_bytes else None


def _measure_skew(said: NodeGovernance, *, heard_ms: int) -> int | None:
    """Return how far a node's clock is behind, in ms; None when it does not say what it shows."""
    most = limits().nodes.report_integer
    return max(-most, min(heard_ms - said.clock_ms, most)) if said.clock_ms else None


def _is_skewed(skew_ms: int | None) -> bool:
    return skew_ms is not None and abs(skew_ms) > limits().nodes.clock_skew_warning_ms


def _record(node: Node, action: str, detail: dict[str, object]) -> None:
    record_word(actor=f"node:{node.name}", action=action, target=node.printed_id, detail={"name": node.name, **detail})
