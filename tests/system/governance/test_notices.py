"""Who is told of an operation, once, in the transaction of what happened; and how notices get through or are given up."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urljoin

import pytest
from django.core.mail import EmailMessage
from django.core.management import CommandError, call_command
from django.db import transaction
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from pytest_django.fixtures import Settings

from controlplane.commands import Command
from controlplane.problems import watch
from core.limits import limits
from core.models import User
from governance.alerts import AlertObject, Problem, look
from governance.models import Alert, AlertLook, AuditEvent, Notice, Operation, WebhookEndpoint
from governance.notices import (
    NOTICE_EVENTS,
    SIGNATURE_HEADER,
    DeliveryFailed,
    InvalidWebhook,
    Wishes,
    add_webhook,
    change_webhook,
    deliver_due,
    find_failing_webhooks,
    notify,
    parse_webhook_url,
    post_notice,
    remove_webhook,
    try_webhook,
)
from governance.operations.decisions import reject
from governance.operations.policies import freeze
from governance.operations.runs import run_due
from governance.states import Severity
from tests.fakes.clock import virtual_clock
from tests.fakes.governed_team import Team, make_governed, propose_token
from wire.optoken.approval import digest_words

pytestmark = pytest.mark.django_db
ACTOR = "user:ada"


@dataclass
class Receiver:
    """A web server that keeps what is posted to it. ``status``: what it answers."""

    url: str = ""
    status: int = 204
    location: str = ""
    answer: bytes = b""
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(found.status)
            if found.location:
                self.send_header("location", found.location)
            self.end_headers()
            self.wfile.write(found.answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        found.url = f"http://127.0.0.1:{server.server_address[1]}/hooks/muster?room=1"
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def team(settings: Settings) -> Team:
    """Three people with a policy, each with an address; what the policy itself told them is taken away."""
    made = make_governed()
    settings.NOTICE_SENDER = "muster@example.com"
    for member in made.members:
        User.objects.filter(pk=member.user.pk).update(email=f"{member.name}@example.com")
    Notice.objects.all().delete()
    return made


def told(event: str) -> set[str]:
    """Return who is told of an event: user names and names of webhooks."""
    rows = Notice.objects.filter(event__startswith=event).select_related("person", "webhook")
    return {row.person.get_username() if row.person else f"webhook:{row.webhook}" for row in rows}


def test_each_event_is_told_once_to_those_whom_it_concerns(team: Team, mailoutbox: list[EmailMessage]) -> None:
    add_webhook(name="ops", url="https://chat.example.com/x", actor=ACTOR)
    operation = propose_token(team[0])
    assert told("proposed") == {"ben", "cleo", "webhook:ops"}, "who can approve it, every webhook, and not its requester"
    before = Notice.objects.count()
    notify(operation, "proposed")
    assert Notice.objects.count() == before
    team[1].approve(operation)
    notify(operation, "expiring_50")
    assert told("expiring_50") == {"ana", "cleo", "webhook:ops"}, "who has not decided, and the requester"
    assert told("approved") == set()
    team[2].approve(operation)
    run_due()
    assert told("approved") == told("succeeded") == {"ana", "ben", "cleo", "webhook:ops"}
    reject(op_id=propose_token(team[0]).pk, user=team[1].user, comment="not today")
    assert "ana" in told("rejected")
    Notice.objects.all().delete()
    freeze(user=team[1].user, reason="odd things happen")
    assert told("frozen") == {"ana", "ben", "cleo", "webhook:ops"}
    Notice.objects.filter(person=None).delete()
    assert deliver_due() == 3
    assert "ben has frozen all operations" in str(mailoutbox[0].body)
    with pytest.raises(ValueError, match="no notice 'eaten'"):
        notify(None, "eaten")


def test_a_notice_goes_with_the_transaction_that_wrote_it(team: Team) -> None:
    operation = propose_token(team[0])

    @transaction.atomic
    def fail_after_telling() -> None:
        assert notify(operation, "blocked")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_telling()
    assert told("blocked") == set()


def test_nobody_gets_mail_without_a_sender_an_address_or_an_active_account(team: Team, settings: Settings) -> None:
    User.objects.filter(username="ben").update(email="")
    User.objects.filter(username="cleo").update(is_active=False)
    propose_token(team[0])
    settings.NOTICE_SENDER = ""
    propose_token(team[1])
    assert Notice.objects.count() == 0


def test_every_mail_carries_title_words_and_link_and_says_that_an_answer_approves_nothing(
    team: Team, mailoutbox: list[EmailMessage]
) -> None:
    operation = propose_token(team[0])
    for event in sorted(NOTICE_EVENTS - {"frozen"}):
        Notice.objects.all().delete()
        mailoutbox.clear()
        notify(operation, event)
        assert deliver_due() == Notice.objects.count() > 0
        mail = mailoutbox[0]
        assert "Make an admin token" in mail.subject
        assert "\n" not in mail.subject
        assert mail.from_email == "muster@example.com"
        link, words = f"http://localhost:8000/approvals/{operation.pk}/", digest_words(bytes.fromhex(operation.digest))
        assert not [each for each in (link, words, "Nothing can be approved by answering") if each not in str(mail.body)], event
        assert not [each for each in ("&#x27;", "{%") if each in str(mail.body)], event


def test_a_webhook_gets_signed_json_whose_signature_its_owner_can_check(team: Team, receiver: Receiver) -> None:
    _, secret = add_webhook(name="ops", url=receiver.url, actor=ACTOR)
    operation = propose_token(team[0])
    Notice.objects.filter(webhook=None).delete()
    assert deliver_due() == 1
    event = AuditEvent.objects.get(action="webhook.add")
    assert event.detail == {"host": "127.0.0.1"}
    headers, body = receiver.got[0]
    parts = dict(part.split("=", 1) for part in headers[SIGNATURE_HEADER.lower()].split(","))
    expected = hmac.new(secret.encode(), f"{parts['t']}.".encode() + body, hashlib.sha256).hexdigest()
    assert hmac.compare_digest(parts["v1"], expected)
    said = json.loads(body)
    assert said["event"] == "proposed"
    assert said["operation"]["words"] == digest_words(bytes.fromhex(operation.digest))
    assert said["operation"]["id"] == operation.printed_id
    assert said["link"].endswith(f"/approvals/{operation.pk}/")
    assert secret not in body.decode()


@pytest.fixture
def waiting(team: Team, receiver: Receiver) -> Notice:
    receiver.status = 500
    add_webhook(name="ops", url=receiver.url, actor=ACTOR)
    propose_token(team[0])
    Notice.objects.filter(webhook=None).delete()
    return Notice.objects.get()


def age(notice: Notice, by: timedelta) -> None:
    Notice.objects.filter(pk=notice.pk).update(created_at=timezone.now() - by, due_at=timezone.now())


def test_what_does_not_get_through_is_tried_again_later_and_says_why(waiting: Notice, receiver: Receiver) -> None:
    for pause_s in (30, 60, 120):
        age(waiting, timedelta())
        before = timezone.now()
        assert deliver_due() == 0
        waiting.refresh_from_db()
        assert before <= waiting.due_at - timedelta(seconds=pause_s) <= timezone.now()
    assert waiting.last_error == "answered with 500"
    receiver.status, receiver.location = 307, receiver.url  # which nobody follows
    age(waiting, timedelta())
    deliver_due()
    waiting.refresh_from_db()
    assert (len(receiver.got), waiting.last_error) == (4, "answered with 307")
    receiver.status = 200
    age(waiting, timedelta())
    assert deliver_due() == 1
    waiting.refresh_from_db()
    assert (waiting.last_error, waiting.attempt, waiting.lease_until) == ("", 5, None)
    assert waiting.sent_at


def test_a_webhook_that_takes_nothing_is_found_until_it_takes_something(waiting: Notice, receiver: Receiver) -> None:
    for _ in range(limits().governance.webhook_attempts):
        assert find_failing_webhooks() == ()
        age(waiting, timedelta())
        deliver_due()
    (found,) = find_failing_webhooks()
    assert (found.name, found.waiting, found.error) == ("ops", 1, "answered with 500")
    receiver.status = 200
    age(waiting, timedelta())
    deliver_due()
    assert find_failing_webhooks() == ()


def test_what_is_a_day_old_is_given_up_with_its_reason_as_what_cannot_be_read_is(waiting: Notice, team: Team) -> None:
    age(waiting, timedelta(seconds=limits().governance.notice_give_up_s))
    deliver_due()
    waiting.refresh_from_db()
    assert (bool(waiting.given_up_at), waiting.last_error) == (True, "answered with 500")
    operation = propose_token(team[0])
    Operation.objects.filter(pk=operation.pk).update(statement=b"{}")
    assert deliver_due() == 0
    words = set(Notice.objects.exclude(pk=waiting.pk).values_list("last_error", flat=True))
    assert words == {"the stored statement cannot be read"}


def test_what_another_process_is_sending_is_left_alone_until_its_lease_is_over(waiting: Notice, receiver: Receiver) -> None:
    for left_s, sent in ((limits().governance.notice_lease_s, 0), (-1, 1)):
        Notice.objects.update(lease_until=timezone.now() + timedelta(seconds=left_s))
        receiver.status = 200
        assert deliver_due() == len(receiver.got) == sent


def test_a_removed_webhook_gets_nothing_more_and_its_name_can_be_used_again(waiting: Notice, receiver: Receiver) -> None:
    remove_webhook(name="ops", actor=ACTOR)
    assert deliver_due() == 0
    assert receiver.got == []
    waiting.refresh_from_db()
    assert waiting.last_error == "the webhook was removed"
    first = WebhookEndpoint.objects.get().secret
    _, second = add_webhook(name="ops", url="https://chat.example.com/y", actor=ACTOR)
    assert second != first
    with pytest.raises(InvalidWebhook, match="already"):
        add_webhook(name="ops", url="https://chat.example.com/y", actor=ACTOR)


@pytest.mark.parametrize(
    "url",
    ["ftp://example.com/", "http://", "https://user:pw@example.com/", "http://8.8.8.8/x", "https://169.254.169.254/x",
        "http://[fe80::1]/", "https://[::ffff:127.0.0.1]/", "http://0.0.0.0/", "https://224.0.0.1/", "https://[fd00:ec2::254]/",
        "https://example.com:99999/", "https://example.com/#x", "https://exämple.com/", "https://example.com/a b",
        "https://example.com/" + "x" * 300],
)  # fmt: skip
def test_an_address_that_must_not_be_called_is_refused(url: str) -> None:
    with pytest.raises(InvalidWebhook) as refusal:
        parse_webhook_url(url)
    assert refusal.value.param == "url"


def embed(four: str) -> list[str]:
    """The IPv6 addresses by which a gateway on the way leads to an IPv4 address, a client of Teredo behind it included."""
    number = int(ipaddress.IPv4Address(four))
    teredo = (0x20010000 << 96) | (0x08080808 << 64) | (number ^ 0xFFFFFFFF)
    made = [(0x64FF9B << 96) | number, (0x2002 << 112) | (number << 80), teredo]
    return [str(ipaddress.IPv6Address(each)) for each in made]


NOT_PUBLIC = ["127.0.0.1", "10.1.2.3", "192.168.1.4", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"]


@pytest.mark.parametrize(
    "address",
    [*[each for four in NOT_PUBLIC for each in embed(four)], "64:ff9b:1::8.8.8.8", "64:ff9b:1:fffe::a00:1", "::ffff:10.0.0.1",
        "::10.0.0.1", str(ipaddress.IPv6Address((0x20010000 << 96) | (0x0A000001 << 64) | (0x08080808 ^ 0xFFFFFFFF)))],
)  # fmt: skip
def test_an_address_that_leads_to_an_inner_one_by_a_gateway_is_refused_by_number_and_by_name(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidWebhook, match="never called"):
        parse_webhook_url(f"https://[{address}]/")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(10, 1, 6, "", (address, 443, 0, 0))])
    with pytest.raises(DeliveryFailed, match="never called"):
        post_notice(url="https://hooks.example.com/", secret="s", body=b"{}", at=1)


def test_https_anywhere_and_http_nearby_is_accepted() -> None:
    nearby = ["http://127.0.0.1:9/", "http://192.168.1.4/x", "http://[::1]:9/", "http://[fd00::5]/"]
    for url in ("https://example.com/x?y=1", *nearby, *(f"https://[{address}]/" for address in embed("8.8.8.8"))):
        assert parse_webhook_url(url).path.startswith("/")
    for address in embed("8.8.8.8"):
        with pytest.raises(InvalidWebhook, match="by plain http"):
            parse_webhook_url(f"http://[{address}]/")


def test_a_name_that_cannot_be_resolved_is_a_reason_to_try_again() -> None:
    with pytest.raises(DeliveryFailed, match=r"cannot be resolved|did not answer"):
        post_notice(url="http://webhook.invalid/", secret="s", body=b"{}", at=1)


def test_webhooks_are_managed_from_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    call_command(Command("webhook"), "add", "ops", "https://chat.example.com/secret-path")
    assert capsys.readouterr().out.startswith("whsec_")
    call_command(Command("webhook"), "list")
    shown = capsys.readouterr().out
    assert "ops  active" in shown
    assert "secret-path" not in shown
    call_command(Command("webhook"), "remove", "ops")
    call_command(Command("webhook"), "list")
    assert "ops  removed" in capsys.readouterr().out
    with pytest.raises(CommandError, match="no webhook 'other'"):
        call_command(Command("webhook"), "remove", "other")


def test_the_page_of_webhooks_shows_the_secret_once_and_the_address_never() -> None:
    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    body = {"name": "ops", "url": "https://chat.example.com/secret-path", "format": "generic", "least_severity": "2",
        "takes_alerts": "on"}  # fmt: skip
    made = client.post(reverse("admin:governance_webhookendpoint_add"), body).content.decode()
    secret = WebhookEndpoint.objects.get().secret
    assert secret in made
    row = WebhookEndpoint.objects.get()
    listed = client.get(reverse("admin:governance_webhookendpoint_changelist")).content.decode()
    shown = client.get(reverse("admin:governance_webhookendpoint_change", args=[row.pk])).content.decode()
    assert "chat.example.com" in listed
    assert not [page for page in (listed, shown) if secret in page or "secret-path" in page]
    client.post(reverse("admin:governance_webhookendpoint_confirm", args=[row.pk, "remove"]))
    row.refresh_from_db()
    assert not row.is_active


def test_a_mail_server_that_does_not_answer_is_a_reason_kept(team: Team, settings: Settings, receiver: Receiver) -> None:
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", 1
    propose_token(team[0])
    assert deliver_due() == 0
    assert set(Notice.objects.values_list("last_error", flat=True)) == {
        "the mail server did not take it (ConnectionRefusedError)"
    }


def make_told_alert() -> None:
    with virtual_clock() as time:
        look(lambda: [Problem("node.offline", Severity.DOWN, AlertObject("node", "1", "rig"))])
        time.advance(60)
        look(lambda: [Problem("node.offline", Severity.DOWN, AlertObject("node", "1", "rig"))])


def test_each_webhook_gets_a_message_in_its_format_and_of_what_it_takes(team: Team, receiver: Receiver) -> None:
    slack = Wishes(format="slack", takes_operations=False, takes_events=False, takes_alerts=True, least_severity=0)
    ntfy = Wishes(format="ntfy", takes_operations=True, takes_events=False, takes_alerts=True)
    add_webhook(name="chat", url=receiver.url, wishes=slack, actor=ACTOR)
    add_webhook(name="push", url=urljoin(receiver.url, "/my-topic"), wishes=ntfy, actor=ACTOR)
    propose_token(team[0])
    make_told_alert()
    Notice.objects.filter(webhook=None).delete()
    Notice.objects.update(due_at=timezone.now(), created_at=timezone.now())
    assert deliver_due() == 3
    said = [json.loads(body) for _headers, body in receiver.got]
    assert sorted(one["title"] for one in said if one.get("topic") == "my-topic")[1] == "rig is offline."
    (block, _context) = next(one["blocks"] for one in said if "blocks" in one)
    assert "/admin/governance/alert/" in block["text"]["text"]


def test_an_alert_that_was_deleted_ends_its_message(receiver: Receiver) -> None:
    add_webhook(name="chat", url=receiver.url, wishes=Wishes(takes_alerts=True), actor=ACTOR)
    make_told_alert()
    Alert.objects.all().delete()
    Notice.objects.filter(webhook=None).delete()
    Notice.objects.update(due_at=timezone.now())
    assert deliver_due() == 0
    assert Notice.objects.get().last_error == "the alert was deleted"


def test_a_test_says_what_was_answered_and_what_did_not_get_through(receiver: Receiver) -> None:
    add_webhook(name="chat", url=receiver.url, wishes=Wishes(format="discord", takes_alerts=True), actor=ACTOR)
    receiver.status, receiver.answer = 200, b"what stands behind the wall"
    answer = try_webhook(name="chat", actor=ACTOR)
    assert (answer.status, answer.text) == (200, ""), "an inner service is not read out"
    assert json.loads(receiver.got[0][1])["embeds"][0]["title"] == "Test message of Muster"
    boss = Client()
    boss.force_login(User.objects.create_superuser("boss"))
    page = f"/admin/governance/webhookendpoint/{WebhookEndpoint.objects.get().pk}/change/test/"
    assert "127.0.0.1 took the test with HTTP 200" in boss.post(page, follow=True).content.decode()
    receiver.status = 404
    assert "127.0.0.1 refused the test with HTTP 404" in boss.post(page).content.decode()
    assert Notice.objects.count() == 0
    assert AuditEvent.objects.filter(action="webhook.test").count() == 3


@pytest.mark.parametrize(
    ("wishes", "url", "param"),
    [(Wishes(format="irc"), "https://example.com/", "format"), (Wishes(format="ntfy"), "https://ntfy.sh/", "url"),
        (Wishes(format="slack", takes_usage=True), "https://example.com/", "takes_usage"),
        (Wishes(takes_operations=False, takes_events=False), "https://example.com/", "takes_alerts")],
)  # fmt: skip
def test_a_webhook_that_could_get_nothing_is_refused(wishes: Wishes, url: str, param: str) -> None:
    with pytest.raises(InvalidWebhook) as caught:
        add_webhook(name="chat", url=url, wishes=wishes, actor=ACTOR)
    assert caught.value.param == param


def test_what_a_webhook_gets_can_be_changed_and_is_audited_once() -> None:
    add_webhook(name="chat", url="https://example.com/x", actor=ACTOR)
    for _ in range(2):
        change_webhook(name="chat", wishes=Wishes(format="slack", takes_alerts=True, least_severity=1), actor=ACTOR)
    event = AuditEvent.objects.get(action="webhook.change")
    assert event.detail == {"format": "slack", "least_severity": 1, "takes_alerts": True}
    boss = Client()
    boss.force_login(User.objects.create_superuser("boss"))
    page = boss.get(f"/admin/governance/webhookendpoint/{WebhookEndpoint.objects.get().pk}/change/").content.decode()
    assert "alerts (impaired), approvals, events" in page


def test_what_no_worker_sends_in_time_the_control_plane_sends(team: Team, receiver: Receiver) -> None:
    add_webhook(name="ops", url=receiver.url, actor=ACTOR)
    propose_token(team[0])
    Notice.objects.filter(webhook=None).delete()
    assert watch() == 0, "a worker has its time"
    Notice.objects.update(due_at=timezone.now() - timedelta(seconds=limits().governance.notice_overdue_s + 1))
    assert watch() == len(receiver.got) == 1
    assert AlertLook.objects.exists()
