"""Alerts: the problems of the installation as rows, from their start to their end; who hears of them, and what is silenced.

One evaluator at a time looks (``look``), however many processes try, and everything that follows from a look is written in one
transaction: whoever dies on the way leaves things as the look before left them. What is a problem, and in which words, is said
by the package above (``settings.GOVERNANCE_ALERT_WORDS``); nothing here knows nodes or requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Count, F, Q, QuerySet, Window
from django.db.models.functions import RowNumber
from django.utils import translation
from django.utils.translation import gettext as _

from core.db.base import LAZILY
from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from governance.errors import InvalidSilence, NotFound
from governance.models import Alert, AlertLook, AlertSilence
from governance.notices import notify_of_alerts
from governance.registry import AlertFacts, AlertWords, load_words
from governance.states import Severity
from wire import clock

logger = logging.getLogger("muster.governance")

_LOCK = 0x6D73_616C_7274
"""Key of an advisory lock: whoever holds it looks, the others leave it at that."""
Param = str | int | float | list[str] | dict[str, str] | None
"""A dict is a text in each language."""


@dataclass(frozen=True, slots=True)
class AlertObject:
    """What a problem is about. ``type`` and ``id`` tell it from others; ``name`` is for people."""

    type: str = "installation"
    id: str = ""
    name: str = ""


INSTALLATION = AlertObject()


@dataclass(frozen=True, slots=True)
class Problem:
    """What somebody should look at, as it is now. ``code``: which sentence says it; empty = that of the kind.

    ``since``: None = since it is seen.
    """

    kind: str
    severity: Severity = Severity.IMPAIRED
    object: AlertObject = INSTALLATION
    code: str = ""
    params: Mapping[str, Param] = field(default_factory=dict)
    since: datetime | None = None


Key = tuple[str, str, str]


# The evaluator


def look(find: Callable[[], Iterable[Problem]]) -> bool:
    """Bring the rows in line with what ``find`` returns, and tell of it; False while another one looks.

    ``find`` is called in the transaction, so that of two evaluators neither writes what it saw before the other one wrote.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_LOCK])
        if cursor.fetchone() != (True,):
            return False
        now = clock.now()
        is_changed = _write(_choose(find()), now)
        is_changed |= _tell(now)
        _forget(now)
        AlertLook.objects.update_or_create(pk=1, defaults={"at": now})
        if is_changed:
            publish_hint("alerts")
        else:
            cursor.execute(f"SELECT {LAZILY}")
    return True


def _choose(found: Iterable[Problem]) -> dict[Key, Problem]:
    """Return one problem for each kind and object, the most urgent; and the most urgent ones of too many."""
    chosen: dict[Key, Problem] = {}
    for problem in sorted(found, key=lambda one: (one.severity, one.kind, one.object.type, one.object.id)):
        chosen.setdefault((problem.kind, problem.object.type, problem.object.id), problem)
    most = limits().governance.alert_open
    if len(chosen) > most:
        logger.warning("alerts_not_stored count=%d", len(chosen) - most)
    return dict(list(chosen.items())[:most])


def _write(found: Mapping[Key, Problem], now: datetime) -> bool:
    """Write what began, changed and ended; return whether pages show anything else than before."""
    is_open = {(row.kind, row.object_type, row.object_id): row for row in Alert.objects.filter(ended_at=None)}
    silences = {
        (one.kind, one.object_type, one.object_id): one
        for one in (AlertSilence.objects.filter(until__gt=now) if set(found) - set(is_open) else ())
    }
    begun, changed, seen = [], [], []
    for key, problem in found.items():
        row = is_open.pop(key, None)
        if row is None:
            row = Alert(
                kind=problem.kind,
                object_type=problem.object.type,
                object_id=problem.object.id,
                since=problem.since or now,
                started_at=now,
            )
            _silence(row, silences.get(key))
            begun.append(row)
        elif row.missed_at is None and _says_the_same(row, problem):
            seen.append(row.pk)
            continue
        else:
            changed.append(row)
        row.object_name, row.severity = problem.object.name, problem.severity.value
        row.code, row.params = problem.code or problem.kind, dict(problem.params)
        row.seen_at, row.missed_at = now, None
    Alert.objects.bulk_create(begun)
    Alert.objects.bulk_update(changed, ["object_name", "severity", "code", "params", "seen_at", "missed_at"])
    Alert.objects.filter(pk__in=seen).update(seen_at=now)
    missed = [row.pk for row in is_open.values() if row.missed_at is None]
    Alert.objects.filter(pk__in=missed).update(missed_at=now)
    away = timedelta(seconds=limits().governance.alert_away_s)
    over = [row.pk for row in is_open.values() if row.missed_at is not None and now - row.missed_at >= away]
    # It ended when it was gone, not when we were sure.
    Alert.objects.filter(pk__in=over).update(ended_at=F("missed_at"))
    return bool(begun or changed or missed)


def _says_the_same(row: Alert, problem: Problem) -> bool:
    now = (problem.severity.value, problem.code or problem.kind, problem.object.name, dict(problem.params))
    return (row.severity, row.code, row.object_name, row.params) == now


def _silence(row: Alert, silence: AlertSilence | None) -> None:
    if silence is not None:
        row.silenced_until, row.silenced_by, row.silence_reason = silence.until, silence.by, silence.reason


def _tell(now: datetime) -> bool:
    """Have starts and ends told that nobody was told of; True when there were any."""
    bounds = limits().governance
    waits = Alert.objects.filter(is_settled=False)
    # Of what was silenced when it ended, or of what nobody heard that it began, nobody hears that it ended.
    unheard = Q(ended_at__isnull=False) & (Q(told_at=None) | Q(silenced_until__gt=now))
    waits.filter(unheard).update(is_settled=True)
    old_enough = now - timedelta(seconds=bounds.alert_told_after_s)
    is_new = Q(ended_at=None, missed_at=None, told_at=None, started_at__lte=old_enough)
    is_over = Q(ended_at__isnull=False)
    untold = list(waits.filter(_heard(now) & (is_new | is_over)).order_by("severity", "since", "pk"))
    if not untold:
        return False
    lately = now - timedelta(seconds=bounds.alert_storm_s)
    recent = Alert.objects.filter(Q(is_settled=False) | Q(ended_at__gte=lately - timedelta(seconds=bounds.alert_away_s)))
    told = recent.aggregate(
        starts=Count("pk", filter=Q(told_at__gt=lately)), ends=Count("pk", filter=Q(end_told_at__gt=lately))
    )
    sent = told["starts"] + told["ends"]
    if sent > bounds.alert_storm:
        return False  # a summary went out within this time: the next one waits, and says more
    started = [row for row in untold if row.ended_at is None]
    ended = [row for row in untold if row.ended_at is not None]
    notify_of_alerts(started, ended, now=now, is_summary=sent + len(untold) > bounds.alert_storm)
    Alert.objects.filter(pk__in=[row.pk for row in started]).update(told_at=now)
    Alert.objects.filter(pk__in=[row.pk for row in ended]).update(end_told_at=now, is_settled=True)
    return True


def _forget(now: datetime) -> None:
    """Delete what ended long ago, beyond so many rows too, and silences that are over."""
    bounds = limits().governance
    AlertSilence.objects.filter(until__lte=now).delete()
    gone = Alert.objects.filter(is_settled=True)
    old = list(
        gone.filter(ended_at__lt=now - timedelta(seconds=bounds.alert_kept_s)).values_list("pk", flat=True)[
            : bounds.alert_batch
        ]
    )
    old += gone.order_by("-ended_at").values_list("pk", flat=True)[bounds.alert_rows : bounds.alert_rows + bounds.alert_batch]
    if old:
        Alert.objects.filter(pk__in=old).delete()


# Silences


@transaction.atomic
def silence_alert(*, alert_id: int, until: datetime, reason: str, actor: str, is_lasting: bool = False) -> Alert:
    """Count and tell an alert no more until then; doing so again changes end and reason.

    ``is_lasting``: what begins anew of its kind and object is silenced too. Raises NotFound, InvalidSilence.
    """
    _wait_for_look()
    row, now, bounds = _lock_row(alert_id), clock.now(), limits().governance
    cleaned = " ".join(reason.split())
    if not cleaned or len(cleaned) > bounds.alert_reason_chars:
        raise InvalidSilence(
            _("Give a reason of 1 to %(most)s characters.") % {"most": bounds.alert_reason_chars}, param="reason"
        )
    if not now < until <= now + timedelta(seconds=bounds.alert_silence_s):
        days = bounds.alert_silence_s / 86_400
        raise InvalidSilence(_("A silence ends in the future, within %(days)s days.") % {"days": f"{days:g}"}, param="until")
    if row.ended_at is not None and not is_lasting:
        raise InvalidSilence(
            _("This alert has ended. Only the next one of its kind and object can be silenced."), param="lasting"
        )
    if is_lasting:
        key: dict[str, Any] = {"kind": row.kind, "object_type": row.object_type, "object_id": row.object_id}  # Any: Django's
        if not AlertSilence.objects.filter(**key).exists() and AlertSilence.objects.count() >= bounds.alert_silences:
            raise InvalidSilence(
                _("There are %(alert_silences)s silences already; lift one first.") % {"alert_silences": bounds.alert_silences}
            )
        values = {"object_name": row.object_name, "until": until, "by": actor, "reason": cleaned}
        AlertSilence.objects.update_or_create(defaults=values, **key)
    open_rows = Alert.objects.filter(pk=row.pk, ended_at=None) if not is_lasting else _open_like(row)
    open_rows.update(silenced_until=until, silenced_by=actor, silence_reason=cleaned)
    detail = {"alert": row.pk, "until": int(until.timestamp()), "reason": cleaned, "lasting": is_lasting}
    record_event(actor=actor, action="alert.silence", target=f"{row.kind} {row.object_name}"[:200], detail=detail)
    publish_hint("alerts")
    row.refresh_from_db()
    return row


@transaction.atomic
def lift_silence(*, alert_id: int, actor: str) -> Alert:
    """Count and tell an alert again, and what begins anew of its kind and object; no change when nothing is silenced.

    Raises NotFound.
    """
    _wait_for_look()
    row = _lock_row(alert_id)
    key = {"kind": row.kind, "object_type": row.object_type, "object_id": row.object_id}
    lasting, _by_table = AlertSilence.objects.filter(**key).delete()
    of_rows = _open_like(row).filter(silenced_until__gt=clock.now())
    lifted = of_rows.update(silenced_until=None, silenced_by="", silence_reason="")
    if lasting or lifted:
        record_event(
            actor=actor, action="alert.unsilence", target=f"{row.kind} {row.object_name}"[:200], detail={"alert": row.pk}
        )
        publish_hint("alerts")
    row.refresh_from_db()
    return row


@transaction.atomic
def lift_lasting_silence(*, silence_id: int, actor: str) -> AlertSilence:
    """Lift a silence of a kind and object, whether it hides an alert now or not. Raises NotFound."""
    _wait_for_look()
    silence = AlertSilence.objects.select_for_update().filter(pk=silence_id).first()
    if silence is None:
        raise NotFound(_("There is no such silence. It may have ended."))
    _open_like(silence).update(silenced_until=None, silenced_by="", silence_reason="")
    record_event(actor=actor, action="alert.unsilence", target=str(silence)[:200], detail={})
    silence.delete()
    publish_hint("alerts")
    return silence


def list_silences() -> list[AlertSilence]:
    """Return the silences of kinds and objects that hold, the first to end first."""
    return list(AlertSilence.objects.filter(until__gt=clock.now()).order_by("until", "pk"))


def _wait_for_look() -> None:
    # A look under way has read the silences, and its new rows are nobody's to see yet.
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])


def _lock_row(alert_id: int) -> Alert:
    row = Alert.objects.select_for_update().filter(pk=alert_id).first() if 0 < alert_id <= limits().governance.api_id else None
    if row is None:
        raise _not_found()
    return row


def _not_found() -> NotFound:
    return NotFound("There is no such alert. It may have been deleted since it ended.", param="alert_id")


def _open_like(one: Alert | AlertSilence) -> QuerySet[Alert]:
    return Alert.objects.filter(kind=one.kind, object_type=one.object_type, object_id=one.object_id, ended_at=None)


# For pages and programs


@dataclass(frozen=True, slots=True)
class ToldAlert:
    """An alert as programs read it, in English."""

    id: int
    kind: str
    severity: Severity
    of: AlertObject
    what: str
    advice: str
    since: datetime
    seen_at: datetime
    ended_at: datetime | None
    silenced_until: datetime | None
    silenced_by: str
    silence_reason: str


def list_alerts(
    *, state: str, limit: int, kind: str | None = None, cursor: int | None = None
) -> tuple[list[ToldAlert], int | None]:
    """Return a page of alerts, newest first, and the cursor of the next one (None: it is the last)."""
    rows = filter_alerts(Alert.objects.all(), state=state)
    rows = rows.filter(kind=kind) if kind is not None else rows
    rows = rows.filter(pk__lt=cursor) if cursor is not None else rows
    page = list(rows.order_by("-pk")[: limit + 1])
    return [_tell_program(row) for row in page[:limit]], page[limit - 1].pk if len(page) > limit else None


def read_alert(alert_id: int) -> ToldAlert:
    """Return one alert. Raises NotFound."""
    row = Alert.objects.filter(pk=alert_id).first() if 0 < alert_id <= limits().governance.api_id else None
    if row is None:
        raise _not_found()
    return _tell_program(row)


def _tell_program(row: Alert) -> ToldAlert:
    with translation.override(settings.LANGUAGE_CODE):
        what, advice = load_words().describe(AlertFacts.of(row))
    same = ("kind", "since", "seen_at", "ended_at", "silenced_until", "silenced_by", "silence_reason")
    return ToldAlert(
        id=row.pk,
        severity=Severity(row.severity),
        of=AlertObject(row.object_type, row.object_id, row.object_name),
        what=what,
        advice=advice,
        **{name: getattr(row, name) for name in same},
    )


@dataclass(frozen=True, slots=True)
class ShownAlert:
    """An alert in words. ``link`` and ``url`` mend it. ``beyond``: how many more of its kind are open that are not listed."""

    id: int
    kind: str
    severity: Severity
    what: str
    advice: str
    since: datetime
    object_name: str = ""
    object_url: str = ""
    link: str = ""
    url: str = ""
    beyond: int = 0


def count_open_problems() -> int:
    """Return how many problems are there now that nobody silenced; one query."""
    return _list_unsilenced().count()


def list_open_problems(most: int | None = None, *, of_a_kind: int | None = None) -> tuple[ShownAlert, ...]:
    """Return the problems that are there now and that nobody silenced, the most urgent first; one query.

    ``most``: of all, by default ``problem_lines``; ``of_a_kind``: of one kind, by default ``problem_lines_per_case``. What is
    left out is counted in ``beyond``.
    """
    bounds = limits().console
    most, of_a_kind = most or bounds.problem_lines, of_a_kind or bounds.problem_lines_per_case
    place = Window(RowNumber(), partition_by=F("kind"), order_by=["severity", "since", "pk"])
    rows = _list_unsilenced().annotate(place=place, of_kind=Window(Count("pk"), partition_by=F("kind")))
    # One query also counts all: of the kinds that are left out as well.
    shown = list(rows.annotate(of_all=Window(Count("pk"))).filter(place__lte=of_a_kind).order_by("severity", "since", "pk"))
    words = load_words()
    found = [show_alert(row, words, beyond=row.of_kind - of_a_kind if row.place == of_a_kind else 0) for row in shown[:most]]
    if found:
        found[-1] = _add_beyond(found, shown[0].of_all)
    return tuple(found)


def _add_beyond(found: Sequence[ShownAlert], of_all: int) -> ShownAlert:
    return replace(found[-1], beyond=found[-1].beyond + of_all - sum(1 + one.beyond for one in found))


def show_alert(row: Alert, words: AlertWords, *, beyond: int = 0) -> ShownAlert:
    """Return an alert in words, in the language that is active."""
    facts = AlertFacts.of(row)
    (what, advice), links = words.describe(facts), words.find_links(facts)
    return ShownAlert(
        id=row.pk,
        kind=row.kind,
        severity=Severity(row.severity),
        what=what,
        advice=advice,
        since=row.since,
        object_name=row.object_name,
        object_url=links.object_url,
        link=links.fix,
        url=links.fix_url,
        beyond=max(0, beyond),
    )


def filter_alerts(rows: QuerySet[Alert], *, state: str) -> QuerySet[Alert]:
    """Return those that are ``open`` (there now, not silenced), ``silenced`` or ``ended``; any other word: all.

    What the last look did not see is none of these for a minute, until it has ended or is there again.
    """
    now = clock.now()
    match state:
        case "open":
            return rows.filter(_heard(now), ended_at=None, missed_at=None)
        case "silenced":
            return rows.filter(ended_at=None, silenced_until__gt=now)
        case "ended":
            return rows.filter(ended_at__isnull=False)
    return rows


def count_states() -> dict[str, int]:
    """Return how many alerts are ``open`` and how many ``silenced``; one query."""
    is_silenced = Q(silenced_until__gt=clock.now())
    is_open = Q(missed_at=None) & _heard(clock.now())
    rows = Alert.objects.filter(ended_at=None)
    counts: dict[str, int] = rows.aggregate(open=Count("pk", filter=is_open), silenced=Count("pk", filter=is_silenced))
    return counts


def read_last_look() -> datetime | None:
    """Return when the evaluator last looked; None = never."""
    return AlertLook.objects.filter(pk=1).values_list("at", flat=True).first()


def find_last_look() -> datetime | None:
    """Return when the evaluator last looked, if that was too long ago; None when all is well, or before the first look."""
    last = read_last_look()
    late = timedelta(seconds=limits().governance.alert_late_s)
    return last if last is not None and clock.now() - last > late else None


def count_by_kind() -> dict[tuple[str, str], int]:
    """Return how many problems of which kind and severity are there now, silenced ones included; for metrics."""
    rows = Alert.objects.filter(ended_at=None, missed_at=None).order_by().values_list("kind", "severity")
    return {(kind, Severity(severity).word): count for kind, severity, count in rows.annotate(count=Count("pk"))}


def _list_unsilenced() -> QuerySet[Alert]:
    # What the last look did not see is not shown, although it has not ended yet.
    return Alert.objects.filter(_heard(clock.now()), ended_at=None, missed_at=None)


def _heard(now: datetime) -> Q:
    return Q(silenced_until=None) | Q(silenced_until__lte=now)
