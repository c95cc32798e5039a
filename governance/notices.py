"""Notices: who is told what, in which words, and how it gets there, by e-mail and by webhooks. Nothing in one can approve.

Rows are written in the transaction of what they tell of. They are sent under a lease, tried again with growing pauses, and
given up after a day with the reason kept.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import re
import secrets
import smtplib
import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LookupTimeout
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.mail import EmailMessage
from django.db import connection, transaction
from django.db.models import Count, F, Max, Min, Q, QuerySet
from django.template.loader import render_to_string
from django.utils import translation
from django.utils.translation import gettext
from django.utils.translation import gettext as _

from core.hints import UNREADABLE_KEY
from core.limits import limits
from governance.audit import record_event
from governance.errors import GovernanceError, UnknownOperation
from governance.models import Alert, AuditEvent, Freeze, Notice, Operation, OperationRun, PolicyVersion, WebhookEndpoint
from governance.registry import SEVERITY_LABELS, AlertFacts, find_kind, load_words
from governance.states import Severity
from governance.webhook_formats import Chat, find_topic, write_post
from wire import clock
from wire.ids import format_id, new_uuid7, parse_id
from wire.optoken.approval import BREAK_GLASS, ApprovalError, digest_words

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("muster.governance")

RUN_EVENTS = frozenset({"succeeded", "failed", "unknown"})
_OF_REQUESTER_AND_SIGNERS = RUN_EVENTS | {"approved", "rejected", "expired", "blocked"}
_OF_EVERY_APPROVER = frozenset({"break_glass", "review_overdue", "frozen"})
NOTICE_EVENTS = _OF_REQUESTER_AND_SIGNERS | _OF_EVERY_APPROVER | {"proposed", "expiring_50", "expiring_90"}
"""These and FLEET_EVENTS have each a template of their name in ``templates/notices``."""
FLEET_EVENTS = frozenset({"drained", "ejected", "reload_failed", "messages_unreadable", "budget_reached"})
"""What is told of a node, of Valkey or of a budget, as its audit event says."""
ALERT_EVENTS = frozenset({"alert_started", "alert_ended", "alerts_many"})
"""What is told of alerts: of one, or of many within a minute."""
# Key of an advisory lock: of two looks at once the second one sees what the first has told.
_UNREADABLE_LOCK = 0x6D73_6773_756E_7264
_BUDGET_LOCK = 0x6D73_6773_6275_6467
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def notify(operation: Operation | None, event: str, *, run: OperationRun | None = None) -> int:
    """Tell whoever an event concerns, and every webhook; return how many are told. Doing so again tells nobody twice.

    ``event``: one of NOTICE_EVENTS; ``operation`` None: of the whole control plane (frozen). Runs in the caller's transaction.
    ``run``: which carrying out succeeded or failed, so that each of a batch is told of. People are told by e-mail: nobody when
    MUSTER_MAIL_FROM is empty, nor who has no address. Raises ValueError for an event that does not exist.
    """
    if event not in NOTICE_EVENTS:
        raise ValueError(f"there is no notice {event!r}")
    name = f"{event}.{run.use}.{run.position}" if run is not None else event
    return _add(_list_concerned(operation, event), name, operation=operation, hooks=Q(takes_operations=True))


def notify_of_event(audited: AuditEvent, event: str, *, usernames: Iterable[str]) -> int:
    """Tell these users, and every webhook, what an audit event says; return how many are told.

    ``event``: one of FLEET_EVENTS. Runs in the transaction that wrote ``audited``. Raises ValueError for another event.
    """
    if event not in FLEET_EVENTS:
        raise ValueError(f"there is no notice {event!r}")
    return _add(usernames, f"{event}.{audited.pk}", operation=None, hooks=Q(takes_events=True))


def notify_of_alerts(started: Sequence[Alert], ended: Sequence[Alert], *, now: datetime, is_summary: bool) -> int:
    """Tell operators, and webhooks that take alerts, what began and ended; return how many are told.

    ``is_summary``: in one message, which finds them again by ``now``, their ``told_at`` or ``end_told_at``. Runs in the
    transaction that writes those.
    """
    if is_summary:
        most_urgent = min(alert.severity for alert in (*started, *ended))
        return _add_alert(f"alerts_many.{(now - _EPOCH) // timedelta(microseconds=1)}", most_urgent)
    told = sum(_add_alert(f"alert_started.{alert.pk}", alert.severity) for alert in started)
    return told + sum(_add_alert(f"alert_ended.{alert.pk}", alert.severity) for alert in ended)


def _add_alert(event: str, severity: int) -> int:
    operators = get_user_model().objects.filter(is_staff=True) if severity <= settings.ALERT_MAIL_SEVERITY else ()
    usernames = [person.get_username() for person in operators]
    return _add(usernames, event, operation=None, hooks=Q(takes_alerts=True, least_severity__gte=severity))


def notify_of_unreadable(total: int, *, now: datetime) -> bool:
    """Tell every approver, and every webhook, that workers set ``total`` messages aside so far.

    False when nothing is new, or they were told within notice_unreadable_s.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_UNREADABLE_LOCK])
        last = AuditEvent.objects.filter(action="messages.set_aside").last()
        if total == (0 if last is None else last.detail["total"]):
            return False
        if total == 0 or (last is not None and now - last.at < timedelta(seconds=limits().governance.notice_unreadable_s)):
            return False
        event = record_event(actor="system:worker", action="messages.set_aside", target=UNREADABLE_KEY, detail={"total": total})
        notify_of_event(event, "messages_unreadable", usernames=_list_concerned(None, "messages_unreadable"))
    return True


def notify_of_budget(*, owner: str, kind: str, window: str, percent: int, amount: int, used: int, is_hard: bool) -> bool:
    """Tell every webhook that so much of a budget was used in a day or month; False when that was told before."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_BUDGET_LOCK])
        told = AuditEvent.objects.filter(action="budget.reached", target=owner)
        if told.filter(detail__kind=kind, detail__window=window, detail__percent__gte=percent).exists():
            return False
        detail = {
            "owner": owner, "kind": kind, "window": window, "percent": percent, "amount": amount, "used": used,
            "is_hard": is_hard,
        }  # fmt: skip
        event = record_event(actor="system:worker", action="budget.reached", target=owner, detail=detail)
        notify_of_event(event, "budget_reached", usernames=())
    return True


def list_reached_budgets(*, since: datetime) -> list[Mapping[str, Any]]:
    """Return what ``notify_of_budget`` told since then, the oldest first."""
    told = AuditEvent.objects.filter(action="budget.reached", at__gte=since)
    return list(told.order_by("pk").values_list("detail", flat=True))


def list_requester_and_signers(op_id: uuid.UUID) -> set[str]:
    """Return the user names of who asked for an operation and of who signed for it and did not withdraw."""
    return _list_concerned(Operation.objects.get(pk=op_id), "approved")


def _list_concerned(operation: Operation | None, event: str) -> set[str]:
    if operation is None:
        active = PolicyVersion.objects.filter(state=PolicyVersion.State.ACTIVE).first()
        return set() if active is None else set(active.read_policy().groups)
    if event in _OF_EVERY_APPROVER:
        return set(operation.policy.read_policy().groups)
    requester = operation.requested_by
    if event == "proposed":
        return _list_able(operation) - {requester}
    standing = operation.decisions.filter(withdrawn_at=None).values_list("person_name", flat=True)
    if event in _OF_REQUESTER_AND_SIGNERS:
        return {requester, *standing}
    return (_list_able(operation) - set(standing)) | {requester}


def _list_able(operation: Operation) -> set[str]:
    is_break_glass = operation.op_class == BREAK_GLASS
    return {key.approver for key in operation.policy.read_policy().keys.values() if key.is_break_glass == is_break_glass}


def _add(usernames: Iterable[str], event: str, *, operation: Operation | None, hooks: Q) -> int:
    now = clock.now()
    endpoints = WebhookEndpoint.objects.filter(hooks, is_active=True, takes_usage=False)
    notices = [Notice(operation=operation, event=event, webhook=endpoint, due_at=now) for endpoint in endpoints]
    if settings.NOTICE_SENDER:
        people = get_user_model().objects.filter(~Q(email=""), username__in=set(usernames), is_active=True)
        notices += [Notice(operation=operation, event=event, person=person, due_at=now) for person in people]
    # A second call for the same event tells nobody twice: the rows are unique for each receiver.
    Notice.objects.bulk_create(notices, ignore_conflicts=True)
    return len(notices)


# What a notice says

# Of each of FLEET_EVENTS: what of the audit event's detail a webhook gets.
_FLEET_MEMBERS = {
    "drained": ("interrupted",),
    "ejected": ("model", "reason"),
    "reload_failed": ("model", "reason"),
    "messages_unreadable": ("total",),
    "budget_reached": ("owner", "kind", "window", "percent", "amount", "used", "is_hard"),
}


@dataclass(frozen=True, slots=True)
class Message:
    """A notice in words. ``subject``: one line. ``body``: what a webhook gets, as JSON members.

    ``severity``: of an alert, None = it is about something else. ``is_over``: it tells of an end.
    """

    subject: str
    text: str
    body: Mapping[str, object]
    severity: Severity | None = None
    is_over: bool = False


def write_message(notice: Notice) -> Message:
    """Return what the notice says as things stand now. Raises ApprovalError when the stored statement was tampered with."""
    event, _, which = notice.event.partition(".")
    if event in FLEET_EVENTS:
        page, context, members = _describe_fleet_event(AuditEvent.objects.get(pk=int(which)), event)
    elif event == "alerts_many":
        page, context, members = _describe_alerts(notice, _EPOCH + timedelta(microseconds=int(which)))
    elif event in ALERT_EVENTS:
        page, context, members = _describe_alert(Alert.objects.get(pk=int(which)))
    elif notice.operation is None:
        freeze = Freeze.objects.filter(frozen_at__lte=notice.created_at).order_by("-frozen_at").first()
        page, context, members = "approvals/", {"freeze": freeze}, {"frozenBy": freeze.frozen_by if freeze else ""}
    else:
        page, context, members = _describe_operation(notice.operation, event, which)
    link = f"{settings.PUBLIC_URL.rstrip('/')}/{page}"
    # The first line of a template is the subject.
    with translation.override(settings.NOTICE_LANGUAGE):
        written = render_to_string(f"notices/{event}.txt", {"event": event, "link": link, **context})
    subject, _, text = written.strip().partition("\n")
    body = {"id": str(notice.pk), "event": event, "operation": None, "link": link, **members}
    severity = context.get("severity")
    return Message(
        " ".join(subject.split())[:200],
        text.strip() + "\n",
        body,
        severity=severity if isinstance(severity, Severity) else None,
        is_over=event == "alert_ended",
    )


Described = tuple[str, dict[str, object], dict[str, object]]
"""Path of the page that a notice leads to, what its template reads, what a webhook gets."""


def _describe_operation(operation: Operation, event: str, which: str) -> Described:
    run = _find_run(operation, which) if event in RUN_EVENTS else None
    title, words = _find_title(operation), digest_words(bytes.fromhex(operation.digest))
    receipt = hashlib.sha256(run.receipt.encode()).hexdigest() if run is not None and run.receipt else ""
    context = {"operation": operation, "title": title, "words": words, "run": run, "receipt": receipt}
    members: dict[str, object] = {
        "operation": {
            "id": format_id("op", operation.pk), "operation": operation.operation, "class": operation.op_class,
            "state": operation.state, "title": title, "digest": operation.digest, "words": words,
            "requestedBy": operation.requested_by, "expiresAt": int(operation.expires_at.timestamp()),
        }
    }  # fmt: skip
    if run is not None:
        members["run"] = {"target": run.target, "state": run.state, "code": run.code, "receiptSha256": receipt}
    return f"approvals/{operation.pk}/", context, members


def _describe_fleet_event(audited: AuditEvent, event: str) -> Described:
    page, detail = "admin/", audited.detail
    members: dict[str, object] = {member: detail[member] for member in _FLEET_MEMBERS[event]}
    members["at"] = int(audited.at.timestamp())
    if event not in ("messages_unreadable", "budget_reached"):
        page = f"admin/nodes/node/{parse_id('node', audited.target)}/change/"
        members["node"] = {"id": audited.target, "name": detail["name"]}
    if audited.op_id:
        members["operation"] = {"id": audited.op_id}
    return page, {"event": audited}, members


def _describe_alert(alert: Alert) -> Described:
    what, advice = _say_alert(alert, settings.NOTICE_LANGUAGE)
    context = {"what": what, "advice": advice, "alert": alert, "severity": Severity(alert.severity)}
    return f"admin/governance/alert/{alert.pk}/change/", context, {"alert": _show_alert(alert)}


def _describe_alerts(notice: Notice, told_at: datetime) -> Described:
    """Describe all that was told of at that moment, as far as its receiver wants to know."""
    least = notice.webhook.least_severity if notice.webhook is not None else settings.ALERT_MAIL_SEVERITY
    rows = Alert.objects.filter(severity__lte=least)
    started, ended = rows.filter(told_at=told_at), rows.filter(end_told_at=told_at)
    named = limits().governance.alert_named
    first, over = list(started[:named]), list(ended[:named])
    counts: dict[str, int] = {"started": started.count(), "ended": ended.count()}
    context: dict[str, object] = {
        **counts, "hidden": counts["started"] + counts["ended"] - len(first) - len(over),
        "first": [_say_alert(row, settings.NOTICE_LANGUAGE)[0] for row in first],
        "over": [_say_alert(row, settings.NOTICE_LANGUAGE)[0] for row in over],
        "severity": Severity(min((row.severity for row in first or over), default=Severity.NOTICE)),
    }  # fmt: skip
    members: dict[str, object] = {
        **counts, "startedAlerts": [_show_alert(row) for row in first], "endedAlerts": [_show_alert(row) for row in over],
    }  # fmt: skip
    return "admin/governance/alert/", context, members


def _say_alert(alert: Alert, language: str) -> tuple[str, str]:
    with translation.override(language):
        return load_words().describe(AlertFacts.of(alert))


def _show_alert(alert: Alert) -> dict[str, object]:
    what, advice = _say_alert(alert, settings.LANGUAGE_CODE)  # programs read it
    return {
        "id": alert.pk, "kind": alert.kind, "severity": Severity(alert.severity).word, "what": what, "advice": advice,
        "object": {"type": alert.object_type, "id": alert.object_id, "name": alert.object_name},
        "since": int(alert.since.timestamp()), "endedAt": int(alert.ended_at.timestamp()) if alert.ended_at else None,
    }  # fmt: skip


def _find_title(operation: Operation) -> str:
    statement = operation.read_statement()
    try:
        return find_kind(operation.operation).describe(statement.targets, statement.params).title
    except UnknownOperation:  # the release that knew it is gone
        return operation.operation


def _find_run(operation: Operation, which: str) -> OperationRun | None:
    """Return the carrying out that a notice is about: ``<use>.<position>``, or the last one that ended."""
    use, _, position = which.partition(".")
    if position:
        return operation.runs.filter(use=int(use), position=int(position)).first()
    return operation.runs.filter(ended_at__isnull=False).order_by("-ended_at").first()


# Sending


def deliver_due(limit: int = 50) -> int:
    """Send up to ``limit`` notices that are due; return how many got through. Begins none after ``notice_budget_s``.

    Safe to run several times at once.
    """
    sent, until = 0, clock.monotonic() + limits().governance.notice_budget_s
    for _notice in range(limit):
        notice = _claim() if clock.monotonic() < until else None
        if notice is None:
            break
        sent += _deliver(notice)
    return sent


def is_delivery_due(*, since: datetime | None = None) -> bool:
    """Whether a notice is to be sent now, or is since then."""
    return _find_due(since or clock.now()).exists()


@dataclass(frozen=True, slots=True)
class FailingWebhook:
    """A webhook that did not take messages lately. ``since``: when the first of them was written."""

    webhook_id: int
    name: str
    waiting: int
    since: datetime
    error: str


def find_failing_webhooks() -> tuple[FailingWebhook, ...]:
    """Return the webhooks that did not take a message in ``webhook_attempts``; one query."""
    lately = clock.now() - timedelta(seconds=limits().governance.notice_pause_max_s)
    rows = Notice.objects.filter(
        webhook__is_active=True, due_at__gte=lately, attempt__gte=limits().governance.webhook_attempts, sent_at=None
    )
    by_hook = rows.order_by().values_list("webhook_id", "webhook__name")
    found = by_hook.annotate(waiting=Count("pk"), since=Min("created_at"), error=Max("last_error"))
    return tuple(FailingWebhook(*row) for row in found.order_by("webhook__name"))


def _find_due(now: datetime) -> QuerySet[Notice]:
    is_free = Q(lease_until=None) | Q(lease_until__lt=now)
    return Notice.objects.filter(is_free, sent_at=None, given_up_at=None, due_at__lte=now)


def _claim() -> Notice | None:
    now = clock.now()
    with transaction.atomic():
        found = _find_due(now).select_for_update(skip_locked=True).order_by("due_at").values_list("pk", flat=True).first()
        if found is None:
            return None
        # The lease: who dies after it has sent leaves a notice that arrives twice, never one that is lost.
        Notice.objects.filter(pk=found).update(
            lease_until=now + timedelta(seconds=limits().governance.notice_lease_s), attempt=F("attempt") + 1
        )
    return Notice.objects.select_related("operation__policy", "person", "webhook").get(pk=found)


def _deliver(notice: Notice) -> bool:
    try:
        message = write_message(notice)
        if notice.webhook is not None:
            url, body = _write_post(notice.webhook, message)
            post_notice(url=url, secret=notice.webhook.secret, body=body, at=int(clock.unix_s()))
        else:
            _send_mail(notice, message)
    except DeliveryFailed as failure:
        _note_failure(notice, str(failure))
        return False
    except Alert.DoesNotExist:
        _finish(notice, given_up_at=clock.now(), last_error="the alert was deleted")
        return False
    except ApprovalError:
        # Nothing to tell of an operation whose stored statement cannot be read; trying again would not mend it.
        _finish(notice, given_up_at=clock.now(), last_error="the stored statement cannot be read")
        return False
    return _finish(notice, sent_at=clock.now(), last_error="")


def _write_post(hook: WebhookEndpoint, message: Message) -> tuple[str, bytes]:
    """Return where a message goes and its bytes, in the format of its webhook."""
    if hook.format == WebhookEndpoint.Format.GENERIC:
        body = json.dumps(dict(message.body), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        return hook.url, body.encode()
    link = str(message.body.get("link", ""))
    # The link is behind the title.
    text = re.sub(r"\n{3,}", "\n\n", message.text.replace(link, "") if link else message.text).strip()
    with translation.override(settings.NOTICE_LANGUAGE):
        label = "" if message.severity is None else str(SEVERITY_LABELS[message.severity])
    chat = Chat(message.subject, text, link, message.severity, label, message.is_over)
    return write_post(hook.format, chat, hook.url)


def _send_mail(notice: Notice, message: Message) -> None:
    if not settings.NOTICE_SENDER or notice.person is None or not notice.person.email:
        raise DeliveryFailed("there is no sender (MUSTER_MAIL_FROM) or no address to send to")
    # An id of its own: a second attempt at the same notice is seen as the same mail.
    identity = f"<{notice.pk.hex}@{urlsplit(settings.PUBLIC_URL).hostname or 'muster'}>"
    headers = {"Message-ID": identity, "Auto-Submitted": "auto-generated"}
    mail = EmailMessage(message.subject, message.text, settings.NOTICE_SENDER, [notice.person.email], headers=headers)
    try:
        mail.send()
    except smtplib.SMTPResponseException as error:
        raise DeliveryFailed(f"the mail server answered with {error.smtp_code}") from None
    except (smtplib.SMTPException, OSError) as error:
        raise DeliveryFailed(f"the mail server did not take it ({type(error).__name__})") from None


def _note_failure(notice: Notice, why: str) -> None:
    now, bounds = clock.now(), limits().governance
    pause = timedelta(seconds=min(bounds.notice_pause_max_s, bounds.notice_pause_s * 2 ** min(notice.attempt - 1, 10)))
    if now + pause - notice.created_at > timedelta(seconds=bounds.notice_give_up_s):
        _finish(notice, given_up_at=now, last_error=why)
        logger.error("notice_given_up notice=%s event=%s reason=%s", notice.pk, notice.event, why)
        return
    _finish(notice, due_at=now + pause, last_error=why)


def _finish(notice: Notice, *, last_error: str, **changes: datetime) -> bool:
    # Of an attempt whose lease ran out another one has begun meanwhile, and says how it ended.
    mine = Notice.objects.filter(pk=notice.pk, attempt=notice.attempt, sent_at=None, given_up_at=None)
    return bool(mine.update(lease_until=None, last_error=last_error[: limits().governance.notice_error_chars], **changes))


# Webhooks. One is switched off, never deleted: its notices keep pointing at it

SIGNATURE_HEADER = "X-Muster-Signature"
_PORTS = {"http": 80, "https": 443}
# Where clouds answer with credentials, beside the link-local addresses.
_METADATA = {ipaddress.ip_address(text) for text in ("100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254")}
_NAT64, _LOCAL_NAT64 = ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48")
"""RFC 6052 and RFC 8215. Where in the second one the IPv4 address stands, only its network knows: it is never called."""
_LOOKUPS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="webhook-lookup")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class InvalidWebhook(GovernanceError):
    """The name or the address of a webhook cannot be used; ``param`` says which."""


class DeliveryFailed(Exception):
    """A notice did not get through. The text says why, without the address, which may itself be a secret."""


@dataclass(frozen=True, slots=True)
class Target:
    """An address taken apart. ``path`` includes the query."""

    scheme: str
    host: str
    port: int
    path: str


def parse_webhook_url(url: str) -> Target:
    """Take an address apart. Raises InvalidWebhook: plain http only goes to loopback and private addresses."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        raise _refusal("has no host and port that can be read") from None
    if (
        len(url) > limits().governance.webhook_url_chars
        or not url.isascii()
        or not url.strip().isprintable()
        or " " in url.strip()
    ):
        raise _refusal(f"must be at most {limits().governance.webhook_url_chars} ASCII characters without blanks")
    if parts.scheme not in _PORTS or not parts.hostname:
        raise _refusal("must start with https://, or with http:// for an address on this machine or a private network")
    if parts.username is not None or parts.fragment:
        raise _refusal("must carry no user name, password or fragment")
    target = Target(parts.scheme, parts.hostname, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
    literal = _read_literal(target.host)
    if literal is not None:
        try:
            _check_address(literal, target.scheme)
        except DeliveryFailed as refusal:
            raise _refusal(str(refusal)) from None
    return target


def sign_body(secret: str, body: bytes, *, at: int) -> str:
    """Return the signature header: ``t=<Unix seconds>,v1=<HMAC-SHA256 of "t.body" in hex>``."""
    mac = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={mac}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a webhook answered. ``text``: the beginning of it."""

    status: int
    text: str

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


def post_notice(*, url: str, secret: str, body: bytes, at: int) -> None:
    """Post ``body`` once; each phase blocks for about ``webhook_s`` at most. Raises DeliveryFailed unless answered with 2xx."""
    answer = _post(url=url, secret=secret, body=body, at=at)
    if not answer.is_success:
        raise DeliveryFailed(f"answered with {answer.status}")


def _post(*, url: str, secret: str, body: bytes, at: int, reads_answer: bool = False) -> Answer:
    import httpx  # 6 MB that most processes need for nothing

    try:
        target = parse_webhook_url(url)
    except InvalidWebhook as refusal:
        raise DeliveryFailed(refusal.message) from None
    # The host is resolved once, and the address that was checked is the one dialled; a redirect would lead past the check.
    address = _resolve(target)
    path, _, query = target.path.partition("?")
    dialled = httpx.URL(scheme=target.scheme, host=address, port=target.port, path=path, query=query.encode() or None)
    host = f"[{target.host}]" if ":" in target.host else target.host
    headers = {
        "host": host if target.port == _PORTS[target.scheme] else f"{host}:{target.port}",
        "content-type": "application/json",
        "user-agent": "muster",
        SIGNATURE_HEADER: sign_body(secret, body, at=at),
    }
    try:
        with httpx.Client(timeout=limits().governance.webhook_s, follow_redirects=False, trust_env=False) as client:
            extensions = {"sni_hostname": target.host}
            request = client.build_request("POST", dialled, content=body, headers=headers, extensions=extensions)
            answer = client.send(request, stream=True)
            try:
                # What an inner service says beside the status is nobody's business.
                text = _read_start(answer) if reads_answer and ipaddress.ip_address(address).is_global else ""
            finally:
                answer.close()
    except httpx.TimeoutException:
        raise DeliveryFailed(f"no answer within {limits().governance.webhook_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DeliveryFailed(f"cannot be reached ({type(error).__name__})") from None
    return Answer(answer.status_code, text)


def _read_start(answer: httpx.Response) -> str:
    """Return the first printable characters of an answer; no more than one piece of it is read."""
    first = next(answer.iter_raw(), b"")
    text = first[: limits().governance.webhook_answer_chars].decode(errors="replace")
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def try_webhook(*, name: str, actor: str) -> Answer:
    """Post a test there now, in the webhook's format; return what was answered. Raises InvalidWebhook, DeliveryFailed."""
    endpoint = _find_active(name)
    link = f"{settings.PUBLIC_URL.rstrip('/')}/admin/governance/webhookendpoint/"
    with translation.override(settings.NOTICE_LANGUAGE):
        subject = gettext("Test message of Muster")
        text = gettext("%(name)s will hear of what it asked for.") % {"name": endpoint.name}
    body = {"id": str(new_uuid7()), "event": "test", "operation": None, "link": link}
    url, posted = _write_post(endpoint, Message(subject, text, body))
    with transaction.atomic():
        record_event(actor=actor, action="webhook.test", target=endpoint.name)
    return _post(url=url, secret=endpoint.secret, body=posted, at=int(clock.unix_s()), reads_answer=True)


def _resolve(target: Target) -> str:
    literal = _read_literal(target.host)
    if literal is not None:
        return str(literal)
    # The resolver of the C library has no time-out that we control, so it runs where we can stop waiting.
    lookup = _LOOKUPS.submit(socket.getaddrinfo, target.host, target.port, type=socket.SOCK_STREAM)
    try:
        found = lookup.result(timeout=limits().governance.webhook_lookup_s)
    except LookupTimeout:
        lookup.cancel()
        raise DeliveryFailed(f"the name server did not answer within {limits().governance.webhook_lookup_s:g} s") from None
    except (OSError, UnicodeError):
        raise DeliveryFailed("the host name cannot be resolved") from None
    addresses = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
    # One refused address among several refuses the host: which one is dialled later is not ours to say.
    for text in addresses:
        _check_address(ipaddress.ip_address(text), target.scheme)
    if not addresses:
        raise DeliveryFailed("the host name has no address")
    return addresses[0]


def _check_address(address: Address, scheme: str) -> None:
    behind = _read_embedded(address)
    is_reserved = address.is_reserved and not address.is_loopback and address not in _NAT64
    is_odd = address.is_multicast or address.is_unspecified or is_reserved
    is_inner = address in _LOCAL_NAT64 or not all(four.is_global and not four.is_multicast for four in behind)
    is_mapped = isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None
    if address.is_link_local or is_odd or is_inner or is_mapped or address in _METADATA:
        raise DeliveryFailed("leads to a link-local, metadata or special address, which is never called")
    if scheme == "http" and (behind or not (address.is_loopback or address.is_private)):
        raise DeliveryFailed("leads to a public address by plain http; use https://")


def _read_embedded(address: Address) -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses that a gateway on the way to an IPv6 address would call: of NAT64, 6to4 or Teredo."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    if address in _NAT64:
        return [ipaddress.IPv4Address(address.packed[-4:])]
    return [four for four in (address.sixtofour, *(address.teredo or ())) if four is not None]


def _read_literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _refusal(what: str) -> InvalidWebhook:
    return InvalidWebhook(f"The address {what}.", param="url")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a webhook gets, and in which format. ``least_severity``: of alerts, less urgent ones are not sent.

    ``takes_usage``: the usage of finished requests, and then nothing else.
    """

    format: str = WebhookEndpoint.Format.GENERIC.value
    takes_operations: bool = True
    takes_events: bool = True
    takes_alerts: bool = False
    least_severity: int = Severity.NOTICE.value
    takes_usage: bool = False


@transaction.atomic
def add_webhook(
    *, name: str, url: str, actor: str, takes_usage: bool = False, wishes: Wishes | None = None
) -> tuple[WebhookEndpoint, str]:
    """Post notices to ``url`` from now on; return the row and the secret that signs them, which is shown once.

    ``takes_usage``: of ``wishes`` that are not given. The name of a webhook that was removed may be used again.
    Raises InvalidWebhook.
    """
    cleaned = name.strip()
    if not cleaned or len(cleaned) > limits().governance.webhook_name_chars or not cleaned.isprintable():
        raise InvalidWebhook(
            _("Give the webhook a name of 1 to %(most)s printable characters.")
            % {"most": limits().governance.webhook_name_chars},
            param="name",
        )
    target, wanted = parse_webhook_url(url), wishes or Wishes(takes_usage=takes_usage)
    _check_wishes(wanted, url.strip())
    secret = f"whsec_{secrets.token_urlsafe(32)}"
    values = {"url": url.strip(), "secret": secret, "is_active": True, **asdict(wanted)}
    endpoint, is_new = WebhookEndpoint.objects.select_for_update().get_or_create(name=cleaned, defaults=values)
    if not is_new:
        if endpoint.is_active:
            raise InvalidWebhook(
                _("There is a webhook %(cleaned)s already; remove it first.") % {"cleaned": cleaned}, param="name"
            )
        for field, value in values.items():
            setattr(endpoint, field, value)
        endpoint.save(update_fields=list(values))
    # Of the address only the host: chat services put their password into the path.
    record_event(actor=actor, action="webhook.add", target=cleaned, detail={"host": target.host, **_list_wishes(wanted)})
    return endpoint, secret


@transaction.atomic
def change_webhook(*, name: str, wishes: Wishes, actor: str) -> WebhookEndpoint:
    """Send something else there, or in another format; no change of the address. Raises InvalidWebhook."""
    endpoint = _find_active(name, is_locked=True)
    _check_wishes(wishes, endpoint.url)
    before = {field: getattr(endpoint, field) for field in asdict(wishes)}
    if before != asdict(wishes):
        for field, value in asdict(wishes).items():
            setattr(endpoint, field, value)
        endpoint.save(update_fields=list(asdict(wishes)))
        record_event(actor=actor, action="webhook.change", target=endpoint.name, detail=_list_wishes(wishes))
    return endpoint


def _find_active(name: str, *, is_locked: bool = False) -> WebhookEndpoint:
    rows = WebhookEndpoint.objects.select_for_update() if is_locked else WebhookEndpoint.objects.all()
    endpoint = rows.filter(name=name.strip(), is_active=True).first()
    if endpoint is None:
        raise InvalidWebhook(
            _("There is no webhook %(strip)r.") % {"strip": name.strip()[: limits().governance.webhook_name_chars]},
            param="name",
        )
    return endpoint


def _check_wishes(wishes: Wishes, url: str) -> None:
    if wishes.format not in WebhookEndpoint.Format.values:
        raise InvalidWebhook(
            _("format must be one of %(values)s.") % {"values": ", ".join(WebhookEndpoint.Format.values)}, param="format"
        )
    if wishes.takes_usage and wishes.format != WebhookEndpoint.Format.GENERIC:
        raise InvalidWebhook(_("Usage is for programs: it goes out as signed JSON alone."), param="takes_usage")
    if wishes.format == WebhookEndpoint.Format.NTFY and not find_topic(url):
        raise InvalidWebhook(_("The address of ntfy ends in a topic, such as https://ntfy.sh/my-topic."), param="url")
    if not any((wishes.takes_operations, wishes.takes_events, wishes.takes_alerts, wishes.takes_usage)):
        raise InvalidWebhook(_("Choose at least one thing that is sent there."), param="takes_alerts")


def _list_wishes(wishes: Wishes) -> dict[str, object]:
    """Return those that are not the usual ones."""
    usual = asdict(Wishes())
    return {field: value for field, value in asdict(wishes).items() if value != usual[field]}


@transaction.atomic
def remove_webhook(*, name: str, actor: str) -> WebhookEndpoint:
    """Post nothing there any more, what waits included; doing so again changes nothing. Raises InvalidWebhook."""
    endpoint = WebhookEndpoint.objects.select_for_update().filter(name=name.strip()).first()
    if endpoint is None:
        raise InvalidWebhook(
            _("There is no webhook %(strip)r.") % {"strip": name.strip()[: limits().governance.webhook_name_chars]},
            param="name",
        )
    if endpoint.is_active:
        endpoint.is_active = False
        endpoint.save(update_fields=["is_active"])
        waiting = Notice.objects.filter(webhook=endpoint, sent_at=None, given_up_at=None)
        waiting.update(given_up_at=clock.now(), last_error="the webhook was removed")
        record_event(actor=actor, action="webhook.remove", target=endpoint.name)
    return endpoint


def list_webhooks() -> list[WebhookEndpoint]:
    return list(WebhookEndpoint.objects.order_by("name"))
