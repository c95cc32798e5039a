"""Sending notices: claimed under a lease, tried again with growing pauses, given up after a day with the reason kept."""

from __future__ import annotations

import json
import logging
import smtplib
from datetime import datetime, timedelta
from urllib.parse import urlsplit

from django.conf import settings
from django.core.mail import EmailMessage
from django.db import transaction
from django.db.models import F, Q, QuerySet

from core.limits import limits
from governance.models import Notice
from governance.notice_text import Message, write_message
from governance.webhooks import DeliveryFailed, post_notice
from wire import clock
from wire.optoken.approval import ApprovalError

logger = logging.getLogger(__name__)


def deliver_due(limit: int = 50) -> int:
    """Send up to ``limit`` notices that are due; return how many got through. Begins none after ``notice_budget_s``.

    Safe to run several times at once, also while another process dies in the middle: then a notice may arrive twice.
    """
    sent, until = 0, clock.monotonic() + limits().governance.notice_budget_s
    for _ in range(limit):
        notice = _claim() if clock.monotonic() < until else None
        if notice is None:
            break
        sent += _deliver(notice)
    return sent


def is_delivery_due() -> bool:
    """Whether a notice is to be sent now."""
    return _find_due(clock.now()).exists()


def _find_due(now: datetime) -> QuerySet[Notice]:
    is_free = Q(lease_until=None) | Q(lease_until__lt=now)
    return Notice.objects.filter(is_free, sent_at=None, given_up_at=None, due_at__lte=now)


def _claim() -> Notice | None:
    now = clock.now()
    with transaction.atomic():
        found = _find_due(now).select_for_update(skip_locked=True).order_by("due_at").values_list("pk", flat=True).first()
        if found is None:
            return None
        Notice.objects.filter(pk=found).update(
            lease_until=now + timedelta(seconds=limits().governance.notice_lease_s), attempt=F("attempt") + 1
        )
    return Notice.objects.select_related("operation__policy", "person", "webhook").get(pk=found)


def _deliver(notice: Notice) -> bool:
    try:
        message = write_message(notice)
        if notice.webhook is not None:
            post_notice(
                url=notice.webhook.url,
                secret=notice.webhook.secret,
                body=json.dumps(dict(message.body), ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode(),
                at=int(clock.unix_s()),
            )
        else:
            _send_mail(notice, message)
    except DeliveryFailed as failure:
        _note_failure(notice, str(failure))
        return False
    except ApprovalError:
        # Nothing to tell of an operation whose stored statement cannot be read; trying again would not mend it.
        _finish(notice, given_up_at=clock.now(), last_error="the stored statement cannot be read")
        return False
    return _finish(notice, sent_at=clock.now(), last_error="")


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
    now = clock.now()
    pause = min(
        timedelta(seconds=limits().governance.notice_pause_max_s),
        timedelta(seconds=limits().governance.notice_pause_s) * 2 ** min(notice.attempt - 1, 10),
    )
    if now + pause - notice.created_at > timedelta(seconds=limits().governance.notice_give_up_s):
        _finish(notice, given_up_at=now, last_error=why)
        logger.error("notice_given_up notice=%s event=%s reason=%s", notice.pk, notice.event, why)
        return
    _finish(notice, due_at=now + pause, last_error=why)


def _finish(notice: Notice, *, last_error: str, **changes: datetime) -> bool:
    """Write how an attempt ended, unless its lease ran out and another one has begun meanwhile."""
    mine = Notice.objects.filter(pk=notice.pk, attempt=notice.attempt, sent_at=None, given_up_at=None)
    return bool(mine.update(lease_until=None, last_error=last_error[: limits().governance.notice_error_chars], **changes))
