"""Alerts: one row and one message for each start and each end, whoever dies on the way or looks beside; silence; storms."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.conf import LazySettings
from django.contrib.auth.models import Permission
from django.db import connection, connections, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from prometheus_client import REGISTRY

from core.models import User
from gateway.metrics import show_alerts
from governance.admin_tokens import create_admin_token
from governance.alerts import (
    AlertObject,
    Problem,
    count_by_kind,
    count_open_problems,
    find_last_look,
    lift_lasting_silence,
    lift_silence,
    list_open_problems,
    list_silences,
    look,
    silence_alert,
)
from governance.errors import InvalidSilence, NotFound
from governance.models import Alert, AlertSilence, AuditEvent, Notice, WebhookEndpoint
from governance.notices import write_message
from governance.states import Severity
from tests.fakes.clock import VirtualClock, install_virtual_clock
from tests.fakes.limits import set_limits
from wire import clock

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def time() -> VirtualClock:
    return install_virtual_clock()


@pytest.fixture(autouse=True)
def hook() -> WebhookEndpoint:
    return WebhookEndpoint.objects.create(name="hook", url="http://127.0.0.1:9/", secret="s" * 32, takes_alerts=True)


def silent(name: str = "rig", severity: Severity = Severity.IMPAIRED) -> Problem:
    return Problem("node.offline", severity, AlertObject("node", f"id-{name}", name))


def see(*problems: Problem) -> None:
    assert look(lambda: problems)


def last(time: VirtualClock, seconds: float, *problems: Problem) -> None:
    """Look every five seconds for so long."""
    for _ in range(round(seconds / 5)):
        time.advance(5)
        see(*problems)


def told() -> list[str]:
    return [notice.event.partition(".")[0] for notice in Notice.objects.order_by("created_at", "pk")]


def test_a_problem_is_one_row_and_one_message_at_its_start_and_one_at_its_end(time: VirtualClock) -> None:
    see(silent())
    began = clock.now()
    assert (told(), count_open_problems()) == ([], 1)
    last(time, 60, silent())
    assert told() == ["alert_started"]
    last(time, 300)
    assert (told(), count_open_problems()) == (["alert_started", "alert_ended"], 0)
    (row,) = Alert.objects.all()
    assert (row.since, row.ended_at, row.is_settled) == (began, began + timedelta(seconds=65), True)
    started, ended = (write_message(notice) for notice in Notice.objects.order_by("created_at"))
    assert started.subject == "rig is offline."
    assert ended.subject == "Over: rig is offline."
    assert started.body["alert"]["object"] == {"type": "node", "id": "id-rig", "name": "rig"}  # type: ignore[index]  # JSON
    last(time, 60, silent())
    assert Alert.objects.count() == 2, "what begins again is another row"


def test_a_problem_that_comes_and_goes_is_one_row_until_it_stays_away(time: VirtualClock) -> None:
    for _ in range(10):
        last(time, 30, silent())
        last(time, 30)
        assert count_open_problems() == 0, "what was not seen just now is not shown"
    assert (Alert.objects.count(), told()) == (1, ["alert_started"])
    last(time, 60)
    assert told() == ["alert_started", "alert_ended"]


def test_a_problem_that_is_over_at_once_is_told_to_nobody(time: VirtualClock) -> None:
    last(time, 20, silent())
    last(time, 120)
    assert Alert.objects.get().is_settled
    assert told() == []


def test_what_is_said_follows_what_is_seen(time: VirtualClock) -> None:
    failing = Problem("requests.failed", params={"percent": 7, "failed": 9})
    see(failing)
    time.advance(5)
    see(Problem("requests.failed", Severity.DOWN, params={"percent": 80, "failed": 99}))
    (shown,) = list_open_problems()
    assert (shown.what, shown.severity) == ("80 % of the last hour's requests failed.", Severity.DOWN)
    assert count_by_kind() == {("requests.failed", "down"): 1}


class Killed(BaseException):
    """The evaluator dies."""


def die_at(statement: int) -> None:
    """Run a look that dies at one of its statements, before or after it, as its server sees it."""
    count = 0

    def refuse(execute, sql, params, many, context):  # type: ignore[no-untyped-def]  # Django's own form of a wrapper
        nonlocal count
        count += 1
        if count == statement:
            raise Killed
        return execute(sql, params, many, context)

    with connection.execute_wrapper(refuse):
        look(lambda: [silent(), silent("attic")])


def test_an_evaluator_that_dies_at_any_statement_leaves_one_row_and_one_message(time: VirtualClock) -> None:
    for round_ in range(3):
        statement = 0
        while True:
            statement += 1
            before = list(Alert.objects.order_by("pk").values()), Notice.objects.count()
            try:
                die_at(statement)
            except Killed:
                assert (list(Alert.objects.order_by("pk").values()), Notice.objects.count()) == before
                continue
            break
        assert statement > 5
        assert Alert.objects.filter(ended_at=None).count() == 2
        assert told() == ["alert_started"] * (2 if round_ else 0)
        time.advance(40)


def test_of_two_evaluators_at_once_one_looks(time: VirtualClock) -> None:
    see(silent())
    time.advance(40)
    holds, may_end = threading.Event(), threading.Event()

    def find() -> list[Problem]:
        holds.set()
        assert may_end.wait(30)
        return [silent()]

    def run() -> None:
        look(find)
        connections.close_all()

    first = threading.Thread(target=run)
    first.start()
    try:
        assert holds.wait(30)
        assert not look(lambda: [silent()])
    finally:
        may_end.set()
        first.join(30)
    see(silent())
    assert (Alert.objects.count(), told()) == (1, ["alert_started"])


def test_a_storm_is_one_message_a_minute_and_the_rest_is_in_the_next(time: VirtualClock) -> None:
    set_limits(governance={"alert_storm": 3})
    many = [silent(f"n{number:02}") for number in range(20)]
    see(*many[:15])
    last(time, 30, *many[:15])
    assert told() == ["alerts_many"]
    last(time, 30, *many)
    assert told() == ["alerts_many"]
    last(time, 40, *many)
    assert told() == ["alerts_many", "alerts_many"]
    first, second = (write_message(notice) for notice in Notice.objects.order_by("created_at"))
    assert (first.body["started"], second.body["started"]) == (15, 5)
    assert first.text.count("offline") == 10
    assert "And 5 more." in first.text


def test_each_webhook_and_mail_gets_what_it_wants_to_know(
    time: VirtualClock, hook: WebhookEndpoint, settings: LazySettings
) -> None:
    settings.NOTICE_SENDER = "muster@example.com"
    User.objects.create_user("ada", email="ada@example.com", is_staff=True)
    User.objects.create_user("guest", email="guest@example.com")
    WebhookEndpoint.objects.create(name="urgent", url="http://127.0.0.1:9/", secret="s", takes_alerts=True, least_severity=0)
    WebhookEndpoint.objects.create(name="approvals", url="http://127.0.0.1:9/", secret="s")
    both = silent("down", Severity.DOWN), silent("notice", Severity.NOTICE)
    see(*both)
    last(time, 30, *both)
    rows = Notice.objects.select_related("webhook", "person")
    got = sorted((str(row.webhook or row.person), write_message(row).subject) for row in rows)
    assert got == [
        ("ada", "down is offline."), ("hook", "down is offline."), ("hook", "notice is offline."),
        ("urgent", "down is offline."),
    ]  # fmt: skip


@pytest.fixture
def row(time: VirtualClock) -> Alert:
    see(silent())
    return Alert.objects.get()


def until(hours: float = 1) -> dict[str, object]:
    return {"until": clock.now() + timedelta(hours=hours), "reason": "new fans", "actor": "user:ada"}


def test_a_silenced_alert_counts_for_nothing_and_is_told_once_the_silence_is_over(time: VirtualClock, row: Alert) -> None:
    silence_alert(alert_id=row.pk, **until())  # type: ignore[arg-type]  # a mapping
    last(time, 600, silent())
    assert (told(), count_open_problems(), list_open_problems()) == ([], 0, ())
    assert count_by_kind() == {("node.offline", "impaired"): 1}
    time.advance(3600)
    see(silent())
    assert (told(), count_open_problems()) == (["alert_started"], 1)
    assert AuditEvent.objects.get(action="alert.silence").detail["reason"] == "new fans"


def test_the_end_of_a_silenced_alert_is_told_to_nobody(time: VirtualClock, row: Alert) -> None:
    last(time, 60, silent())
    silence_alert(alert_id=row.pk, **until())  # type: ignore[arg-type]  # a mapping
    last(time, 120)
    assert (told(), Alert.objects.get().is_settled) == (["alert_started"], True)
    last(time, 60, silent())
    assert count_open_problems() == 1, "the silence was for that one alert"


def test_a_lasting_silence_holds_for_what_begins_later_until_it_is_lifted(time: VirtualClock, row: Alert) -> None:
    silence_alert(alert_id=row.pk, is_lasting=True, **until())  # type: ignore[arg-type]  # a mapping
    last(time, 120)
    last(time, 60, silent(), silent("attic"))
    assert [shown.object_name for shown in list_open_problems()] == ["attic"]
    (silence,) = list_silences()
    lift_lasting_silence(silence_id=silence.pk, actor="user:ada")
    assert count_open_problems() == 2
    last(time, 5, silent(), silent("attic"))
    assert told() == ["alert_started", "alert_started"]
    assert AuditEvent.objects.filter(action="alert.unsilence").count() == 1


def test_lifting_a_silence_shows_the_alert_again_and_is_audited_once(row: Alert) -> None:
    silence_alert(alert_id=row.pk, is_lasting=True, **until())  # type: ignore[arg-type]  # a mapping
    lift_silence(alert_id=row.pk, actor="user:ada")
    lift_silence(alert_id=row.pk, actor="user:ada")
    assert (count_open_problems(), AlertSilence.objects.count()) == (1, 0)
    assert AuditEvent.objects.filter(action="alert.unsilence").count() == 1


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"reason": " "}, "reason"), ({"reason": "x" * 301}, "reason"), ({"until": timedelta()}, "until"),
        ({"until": timedelta(days=91)}, "until")],
)  # fmt: skip
def test_a_silence_has_a_reason_and_an_end_that_is_near(row: Alert, changes: dict[str, object], param: str) -> None:
    values = until() | {name: clock.now() + value if isinstance(value, timedelta) else value for name, value in changes.items()}
    with pytest.raises(InvalidSilence) as caught:
        silence_alert(alert_id=row.pk, **values)  # type: ignore[arg-type]  # a mapping
    assert caught.value.param == param
    with pytest.raises(NotFound):
        silence_alert(alert_id=row.pk + 1, **until())  # type: ignore[arg-type]  # a mapping


def test_a_list_that_stays_short_counts_what_it_leaves_out_in_one_query(
    time: VirtualClock, django_assert_num_queries: object
) -> None:
    set_limits(console={"problem_lines": 4, "problem_lines_per_case": 3})
    many = [silent(f"n{number}", Severity.DOWN) for number in range(7)]
    see(*many, *(Problem(kind) for kind in ("charts.behind", "valkey.silent", "gateway.silent")))
    with django_assert_num_queries(1):  # type: ignore[operator]  # a context manager
        shown = list_open_problems()
    assert [one.kind for one in shown[:3]] == ["node.offline"] * 3
    assert len(shown) == 4
    assert sum(1 + one.beyond for one in shown) == count_open_problems() == 10


def test_what_ended_long_ago_is_forgotten_and_of_too_many_the_oldest(time: VirtualClock) -> None:
    set_limits(governance={"alert_rows": 2})
    for number in range(4):
        see(silent(f"n{number}"))
        last(time, 120)
    assert list(Alert.objects.order_by("pk").values_list("object_name", flat=True)) == ["n2", "n3"]
    time.advance(91 * 86_400)
    see()
    assert Alert.objects.count() == 0


def test_more_problems_than_are_stored_leave_out_the_least_urgent(time: VirtualClock) -> None:
    set_limits(governance={"alert_open": 2})
    see(silent("a", Severity.NOTICE), silent("b", Severity.DOWN), silent("c"))
    assert set(Alert.objects.values_list("object_name", flat=True)) == {"b", "c"}


def test_pages_say_since_when_nobody_looked(time: VirtualClock) -> None:
    see()
    looked_at = clock.now()
    assert find_last_look() is None
    time.advance(61)
    assert find_last_look() == looked_at
    with pytest.raises(RuntimeError), transaction.atomic():
        look(lambda: (_ for _ in ()).throw(RuntimeError("a case has a defect")))
    assert find_last_look() == looked_at


@pytest.fixture
def boss() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("boss"))
    return client


LIST = "/admin/governance/alert/"


def test_the_page_lists_what_is_open_and_hides_what_is_silenced_or_over(time: VirtualClock, row: Alert, boss: Client) -> None:
    see(silent(), silent("attic"))
    over = Alert.objects.get(object_name="attic")
    last(time, 5, silent())
    page = boss.get(LIST).content.decode()
    assert "Open <span>1</span>" in page
    assert ("attic" in page, count_open_problems()) == (False, 1), "the list and the bell agree on what is gone"
    last(time, 120, silent())
    page = boss.get(LIST).content.decode()
    assert "rig is offline." in page
    assert "attic is offline." not in page
    assert "attic is offline." in boss.get(f"{LIST}?state=ended").content.decode()
    confirm = f"{LIST}{row.pk}/change/silence/"
    assert "At most 300 characters." in boss.get(confirm).content.decode()
    assert "This field is required." in boss.post(confirm, {"hours": "4"}).content.decode()
    answer = boss.post(confirm, {"hours": "4", "reason": "new fans", "is_lasting": "on"}, follow=True).content.decode()
    assert "by boss: new fans" in answer
    assert "rig is offline." not in boss.get(LIST).content.decode()
    assert "rig is offline." in boss.get(f"{LIST}?state=silenced").content.decode()
    (silence,) = list_silences()
    silences = boss.get("/admin/governance/alertsilence/").content.decode()
    assert "new fans" in silences
    boss.post(f"/admin/governance/alertsilence/{silence.pk}/change/lift/")
    assert "rig is offline." in boss.get(LIST).content.decode()
    boss.post(f"{LIST}{over.pk}/change/silence/", {"hours": "4", "reason": "what is over"})
    assert [one.object_name for one in list_silences()] == ["attic"], "of what is over the next one is silenced"


def test_who_may_only_look_silences_nothing(row: Alert) -> None:
    guest = User.objects.create_user("guest", is_staff=True)
    guest.user_permissions.add(Permission.objects.get(codename="view_alert"))
    client = Client()
    client.force_login(guest)
    assert "rig is offline." in client.get(LIST).content.decode()
    assert client.post(f"{LIST}{row.pk}/change/silence/", {"hours": "4", "reason": "mine"}).status_code == 403
    assert count_open_problems() == 1


def test_the_page_takes_as_many_queries_for_many_alerts_as_for_few(time: VirtualClock, boss: Client) -> None:
    counts = []
    for size in (1, 30):
        see(*(silent(f"n{number}") for number in range(size)))
        with CaptureQueriesContext(connection) as queries:
            assert boss.get(LIST).status_code == 200
        counts.append(len(queries))
    assert counts[0] == counts[1]


def test_a_page_of_alerts_says_that_nobody_looks(time: VirtualClock, boss: Client) -> None:
    see()
    assert "Nobody has looked" not in boss.get(LIST).content.decode()
    time.advance(120)
    assert "Nobody has looked for problems since" in boss.get(LIST).content.decode()


@pytest.fixture
def program() -> Client:
    _token, text = create_admin_token(name="ci", actor="user:ada")
    return Client(headers={"authorization": f"Bearer {text}"})


API = "/api/v1/alerts"


def test_programs_list_alerts_a_page_at_a_time_by_state_and_kind(time: VirtualClock, program: Client) -> None:
    see(*(silent(f"n{number}") for number in range(5)), Problem("charts.behind"))
    last(time, 120, *(silent(f"n{number}") for number in range(3)))
    first = program.get(API, {"limit": 2}).json()
    second = program.get(API, {"limit": 2, "cursor": first["next_cursor"]}).json()
    names = [one["object"]["name"] for page in (first, second) for one in page["alerts"]]
    assert (names, second["next_cursor"]) == (["n2", "n1", "n0"], None)
    assert first["alerts"][0] | {"alert_id": 0} == {
        "alert_id": 0, "kind": "node.offline", "severity": "impaired", "object": {"type": "node", "id": "id-n2", "name": "n2"},
        "what": "n2 is offline.", "advice": "Check its power, its network and the runner's log.",
        "since": "2027-01-15T08:00:00Z",
        "seen_at": "2027-01-15T08:02:00Z", "ended_at": None, "silenced_until": None, "silenced_by": "", "silence_reason": "",
    }  # fmt: skip
    ended = program.get(API, {"state": "ended", "kind": "charts.behind"}).json()["alerts"]
    assert [one["kind"] for one in ended] == ["charts.behind"]
    assert len(program.get(API, {"state": "all"}).json()["alerts"]) == 6
    assert program.get(API, {"state": "odd"}).status_code == 400
    assert program.get(f"{API}/{2**70}").status_code == 404
    assert Client().get(API).status_code == 401


def test_programs_silence_an_alert_and_lift_that(row: Alert, program: Client) -> None:
    until = (clock.now() + timedelta(hours=1)).isoformat()
    body = {"until": until, "reason": "fans", "lasting": True}
    answer = program.post(f"{API}/{row.pk}/silence", body, content_type="application/json")
    assert (answer.status_code, answer.json()["silenced_by"], count_open_problems()) == (200, "token:ci", 0)
    assert len(list_silences()) == 1
    lifted = program.delete(f"{API}/{row.pk}/silence")
    assert (lifted.status_code, lifted.json()["silenced_until"], count_open_problems()) == (200, None, 1)
    late = program.post(f"{API}/{row.pk}/silence", {**body, "until": "2099-01-01T00:00:00Z"}, content_type="application/json")
    assert (late.status_code, late.json()["error"]["param"]) == (400, "until")
    odd = program.post(f"{API}/{row.pk}/silence", {**body, "for_ever": True}, content_type="application/json")
    assert odd.status_code == 400


def test_a_scrape_shows_how_many_problems_of_which_kind_there_are(row: Alert) -> None:
    show_alerts(count_by_kind())
    assert REGISTRY.get_sample_value("muster_alerts", {"kind": "node.offline", "severity": "impaired"}) == 1
    show_alerts({})
    assert REGISTRY.get_sample_value("muster_alerts", {"kind": "node.offline", "severity": "impaired"}) is None
