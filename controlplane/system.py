"""The page System: whether each part of the installation answers, and the settings it was started with. It only looks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from typing import Any, assert_never

from django.conf import settings
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

import core.valkey
from controlplane.env import list_variables
from controlplane.navigation import SYSTEM
from controlplane.templatetags.muster import print_duration
from core.limits import Limits, limits
from gateway.services.keys import KEYLESS
from gateway.services.requests import read_gateways
from gateway.services.rollups import read_counted_until
from governance.alerts import find_last_look
from governance.audit import BACKUP_CREATED, find_last_action_at
from governance.checkpoints import read_status
from nodes.pages import count_runner_versions
from nodes.services.certificates import list_authorities
from wire import COMMAND, RELEASE, clock
from wire.limits import MIB, Bound, list_bounds
from wire.variables import Variable, hide_secret

_MARKUP = re.compile(r"\[([^\]]*)\]\([^)]*\)|`")
"""Links and code of the documentation, whose words these are too."""


class Sign(StrEnum):
    """How a part stands. People read ``SIGN_WORDS``: the colour is never the only sign."""

    OK = "ok"
    ATTENTION = "attention"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the installation: what was seen, as a sentence, what to do about it, and figures with their names."""

    name: str
    sign: Sign
    what: str
    advice: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    url: str = ""

    @property
    def sign_words(self) -> str:
        match self.sign:
            case Sign.OK:
                return _("OK")
            case Sign.ATTENTION:
                return _("Needs attention")
            case Sign.UNKNOWN:
                return _("Not known")
            case never:
                assert_never(never)


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable and what holds; ``origin`` as in ``wire.variables``. ``meaning``: what a limit is about."""

    name: str
    text: str
    origin: str
    meaning: str = ""


@require_safe
@never_cache
def show_system(request: HttpRequest) -> HttpResponse:
    """Show the page to operators who may see gateways; settings are for administrators alone."""
    if not SYSTEM.is_for(request):
        raise PermissionDenied
    is_told = bool(getattr(request.user, "is_superuser", False))
    page = {"title": str(SYSTEM.label), "parts": read_parts(), "settings": read_settings() if is_told else None}
    return TemplateResponse(request, "admin/muster/system.html", {**admin.site.each_context(request), **page})


def read_parts() -> list[Part]:
    """Look at each part; a fixed number of queries, and two looks at Valkey."""
    return [look() for look in PARTS]


def read_settings() -> list[Setting]:
    """Return every variable that this process read at its start, with secrets hidden."""
    meanings = {bound.setting: _MARKUP.sub(r"\1", bound.then) for bound in _list_bounds() if bound.setting}
    found = [
        Setting(read.name, hide_secret(read.name, read.text), read.origin, _explain(read, meanings))
        for read in list_variables()
    ]
    return sorted(found, key=lambda setting: setting.name)


def _explain(read: Variable, meanings: Mapping[str, str]) -> str:
    given = _("It was given as %(name)s.") % {"name": read.source} if read.origin == "alias" else ""
    return " ".join(filter(None, (meanings.get(read.name, ""), given)))


def _list_bounds() -> list[Bound]:
    values = Limits()
    return [bound for section in fields(values) for bound in list_bounds(getattr(values, section.name))]


# The parts


def look_at_gateways() -> Part:
    found = read_gateways()
    silent = [gateway for gateway in found if not gateway.is_alive]
    facts = tuple(
        (
            f"{gateway.name} · {gateway.release}" if gateway.release else gateway.name,
            _("heartbeat %(age)s ago") % {"age": print_duration(gateway.silent_s)},
        )
        for gateway in found[: limits().console.search_rows]
    )
    name, url = _("Gateways"), reverse("admin:gateway_gatewayprocess_changelist")
    if not found:
        advice = _("Clients cannot connect. Start one, or look at its log.")
        return Part(name, Sign.ATTENTION, _("No gateway runs."), advice, url=url)
    if silent:
        what = _("%(name)s writes no heartbeat.") % {"name": silent[0].name}
        return Part(name, Sign.ATTENTION, what, _("It died, or it cannot reach the database. Look at its log."), facts, url)
    others = [gateway for gateway in found if gateway.release != RELEASE]
    if others:
        what = _("%(name)s is a gateway of another release than this server.") % {"name": others[0].name}
        return Part(name, Sign.ATTENTION, what, _("That is well while you upgrade. Restart it with this release."), facts, url)
    alive = len(found)
    what = ngettext("%(count)s gateway is alive.", "%(count)s gateways are alive.", alive) % {"count": alive}
    return Part(name, Sign.OK, what, facts=facts, url=url)


def look_at_database() -> Part:
    begun_at = clock.monotonic()
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT current_setting('server_version'), pg_database_size(current_database()), "
            "current_setting('transaction_read_only'), count(*), current_setting('max_connections')::int FROM pg_stat_activity"
        )
        version, size, read_only, connections, most = cursor.fetchone()
    facts = (
        (_("Answered in"), _print_ms(clock.monotonic() - begun_at)),
        (_("Version"), f"PostgreSQL {version}"),
        (_("Size"), _print_size(size)),
        (_("Connections"), _("%(count)s of %(most)s") % {"count": connections, "most": most}),
    )
    if read_only == "on":
        advice = _("Nothing can be changed and no request is recorded. See to the PostgreSQL server.")
        return Part(_("Database"), Sign.ATTENTION, _("The database takes no changes."), advice, facts)
    return Part(_("Database"), Sign.OK, _("The database answers."), facts=facts)


def look_at_valkey() -> Part:
    begun_at = clock.monotonic()
    told = _ask_valkey()
    if told is None:
        advice = _("Changes reach gateways seconds later than usual. See whether Valkey runs and REDIS_URL is right.")
        return Part("Valkey", Sign.ATTENTION, _("Valkey does not answer."), advice)
    info, _queued = told
    facts = (
        (_("Answered in"), _print_ms(clock.monotonic() - begun_at)),
        (_("Version"), str(info.get("valkey_version") or info.get("redis_version") or "–")),
        (_("Memory"), _print_size(int(info.get("used_memory", 0)))),
        (_("Clients"), str(info.get("connected_clients", "–"))),
    )
    return Part("Valkey", Sign.OK, _("Valkey answers."), facts=facts)


def look_at_worker() -> Part:
    told, late = _ask_valkey(), find_last_look()
    queued = None if told is None else told[1]
    facts = () if queued is None else ((_("Tasks in the queue"), number_format(queued)),)
    if late is not None:
        what = _("The worker has not looked for problems since %(since)s UTC.") % {"since": f"{late:%Y-%m-%d %H:%M}"}
        advice = _("Notices, sums and clean-up wait for it. See whether it runs, and look at its log.")
        return Part(_("Worker"), Sign.ATTENTION, what, advice, facts)
    if queued is not None and queued > limits().console.system_queued_tasks:
        advice = _("It is slower than what is asked of it. Look at its log, or start a second one.")
        return Part(_("Worker"), Sign.ATTENTION, _("Tasks pile up in the queue of the worker."), advice, facts)
    return Part(_("Worker"), Sign.OK, _("The worker keeps up."), facts=facts)


def look_at_sums() -> Part:
    until, name = read_counted_until(), _("Sums for charts")
    if until is None:
        return Part(name, Sign.UNKNOWN, _("Nothing has been summed up yet."))
    behind = clock.now() - until
    facts = ((_("Behind by"), print_duration(max(0.0, behind.total_seconds()))),)
    if behind > timedelta(seconds=limits().console.problem_sums_s):
        advice = _("What ended since then is in no chart yet, and not lost. The worker catches up; see whether it runs.")
        return Part(name, Sign.ATTENTION, _("Charts are behind."), advice, facts)
    return Part(name, Sign.OK, _("Charts are current."), facts=facts)


def look_at_runners() -> Part:
    versions, name = count_runner_versions(), _("Versions of nodes")
    facts = (
        (_("This server"), RELEASE),
        *((version or _("not told"), ngettext("%(n)s node", "%(n)s nodes", n) % {"n": n}) for version, n, _order in versions),
    )
    url = reverse("admin:nodes_node_changelist")
    new = sum(count for _version, count, order in versions if order > 0)
    if new:
        what = ngettext("%(n)s node is newer than this server.", "%(n)s nodes are newer than this server.", new) % {"n": new}
        return Part(name, Sign.ATTENTION, what, _("It may send what this server does not know. Update the server."), facts, url)
    old = sum(count for _version, count, order in versions if order < 0)
    if old:
        what = ngettext("%(n)s node is older than this server.", "%(n)s nodes are older than this server.", old) % {"n": old}
        return Part(name, Sign.ATTENTION, what, _("It works, and lacks what is new. Update its runner."), facts, url)
    return Part(name, Sign.OK, _("No node is older than this server."), facts=facts, url=url)


def look_at_certificates() -> Part:
    found, name = list_authorities(), _("Certificates")
    if not found:
        return Part(name, Sign.OK, _("There is no internal CA; none is needed unless nodes take tickets over HTTPS."))
    facts = tuple((one.name, _("expires %(date)s") % {"date": f"{one.expires_at:%Y-%m-%d}"}) for one in found)
    ends_at = found[0].expires_at
    if ends_at - clock.now() < timedelta(days=limits().console.system_certificate_days):
        what = _("The internal CA expires on %(date)s.") % {"date": f"{ends_at:%Y-%m-%d}"}
        return Part(
            name,
            Sign.ATTENTION,
            what,
            _("Run %(muster)s ca rotate: clients need time to fetch the next one.") % {"muster": COMMAND},
            facts,
        )
    return Part(name, Sign.OK, _("The internal CA is valid."), facts=facts)


def look_at_audit() -> Part:
    log, name, url = read_status(), _("Audit log"), reverse("admin:governance_auditevent_changelist")
    signed = f"{log.checkpoint.made_at:%Y-%m-%d %H:%M} UTC" if log.checkpoint is not None else _("none yet")
    facts = (
        (_("Last entry"), number_format(log.tail.last)),
        (_("Last signed checkpoint"), signed),
        (_("Nodes that witnessed it"), number_format(log.nodes)),
    )
    if log.tail.bad:
        what = _("The audit log is broken at entry %(entry)s.") % {"entry": number_format(log.tail.bad)}
        return Part(
            name, Sign.ATTENTION, what, _("Somebody changed it. Run %(muster)s audit verify.") % {"muster": COMMAND}, facts, url
        )
    if log.alarms:
        what = ngettext("%(n)s node saw another log.", "%(n)s alarms: nodes saw another log.", log.alarms) % {"n": log.alarms}
        return Part(name, Sign.ATTENTION, what, _("Look for audit.witness_alarm in the audit log."), facts, url)
    if not log.has_key:
        advice = _("Set MUSTER_LOG_KEY, so that nodes can witness the log.")
        return Part(name, Sign.ATTENTION, _("The audit log signs no checkpoints."), advice, facts, url)
    return Part(name, Sign.OK, _("The end of the log agrees with its hashes."), facts=facts, url=url)


def look_at_keys() -> Part:
    name, url = _("Keys of clients"), reverse("admin:gateway_apikey_changelist")
    if settings.REQUIRE_API_KEYS:
        return Part(name, Sign.OK, _("Every request needs a key."), url=url)
    if not settings.KEYLESS_ADDRESSES:
        what = _("Programs on this machine need no key: their requests are those of the tenant %(tenant)s.")
        return Part(name, Sign.OK, what % {"tenant": KEYLESS}, url=url)
    what = _("Nobody needs a key: requests without one are those of the tenant %(tenant)s.") % {"tenant": KEYLESS}
    advice = _("Set MUSTER_REQUIRE_API_KEYS=on unless that is meant.")
    return Part(name, Sign.ATTENTION, what, advice, ((_("Address"), ", ".join(settings.KEYLESS_ADDRESSES)),), url)


def look_at_backups() -> Part:
    made_at, name = find_last_action_at(BACKUP_CREATED), _("Backups")
    if made_at is None:
        advice = _("Run muster backup, or watch the age of your own dumps where they are made; docs/upgrade.md says how.")
        return Part(name, Sign.UNKNOWN, _("No backup was made by Muster yet."), advice)
    facts = ((_("Last backup"), f"{made_at:%Y-%m-%d %H:%M} UTC"),)
    if clock.now() - made_at > timedelta(seconds=limits().console.backup_age_s):
        what = _("The last backup is of %(date)s.") % {"date": f"{made_at:%Y-%m-%d}"}
        return Part(name, Sign.ATTENTION, what, _("Run muster backup, and see why nothing else does."), facts)
    return Part(name, Sign.OK, _("The last backup is recent."), facts=facts)


PARTS: tuple[Callable[[], Part], ...] = (
    look_at_gateways, look_at_database, look_at_valkey, look_at_worker, look_at_sums, look_at_runners, look_at_certificates,
    look_at_audit, look_at_keys, look_at_backups,
)  # fmt: skip


def _ask_valkey() -> tuple[dict[str, Any], int] | None:  # Any: as redis-py has it
    return core.valkey.look_at_valkey(
        settings.REDIS_URL, settings.CELERY_TASK_DEFAULT_QUEUE, longest_s=limits().core.hint_read_s
    )


def _print_ms(seconds: float) -> str:
    return f"{number_format(round(seconds * 1000, 1))} ms"


def _print_size(count: int) -> str:
    number, unit = (count / MIB, "MiB") if count < 1024 * MIB else (count / MIB / 1024, "GiB")
    return f"{number_format(round(number, 1))} {unit}"
