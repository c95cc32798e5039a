"""What alerts say: for each kind its name, for each code a sentence and what to do, and where the problem is mended.

Sentences are made where they are read, in the language of whoever reads: an alert keeps a code and values alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.urls import reverse
from django.utils import formats
from django.utils.functional import Promise
from django.utils.translation import get_language, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from controlplane.templatetags.muster import print_duration
from gateway.services.explanations import join_names
from governance.registry import AlertFacts, Links
from wire import COMMAND

Text = str | Promise


@dataclass(frozen=True, slots=True)
class Words:
    """One code. ``advice`` may hold ``%(detail)s``, what a node or engine said; ``unsaid`` stands for it."""

    what: Text
    advice: Text
    unsaid: Text = ""


KINDS: dict[str, Text] = {
    "backup.old": _("Backup is old"),
    "budget.cost_per_day": _("Costs of the day"),
    "budget.cost_per_month": _("Costs of the month"),
    "budget.tokens_per_day": _("Tokens of the day"),
    "budget.tokens_per_month": _("Tokens of the month"),
    "certificate.expiring": _("CA of nodes expires"),
    "charts.behind": _("Charts are behind"),
    "gateway.none": _("No gateway"),
    "gateway.silent": _("Gateway silent"),
    "key.expiring": _("API key expires"),
    "model.failed": _("Model failed"),
    "model.lost": _("Model lost"),
    "model.unserved": _("Model without a node"),
    "node.alarm": _("Audit log not trusted"),
    "node.clock": _("Clock of a node"),
    "node.drained": _("Node drained"),
    "node.duplicate": _("Two nodes with one name"),
    "node.ejected": _("Node ejected"),
    "node.empty": _("Node without a model"),
    "node.error": _("Node in error"),
    "node.late": _("Node late"),
    "node.no_operations": _("Operations disabled"),
    "node.none": _("No node"),
    "node.offline": _("Node offline"),
    "node.policy_refused": _("Policy refused"),
    "node.unavailable": _("No node takes work"),
    "node.unreachable": _("Node unreachable"),
    "node.untrusting": _("Node trusts no policy"),
    "policy.expiring": _("Policy expires"),
    "requests.failed": _("Requests fail"),
    "requests.waiting": _("Requests wait"),
    "valkey.silent": _("Valkey silent"),
    "valkey.unreadable": _("Unreadable messages"),
    "webhook.failing": _("Webhook fails"),
}

_NO_POWER = _("Check its power, its network and the runner's log.")

WORDS_OF: dict[str, Words] = {
    "backup.old": Words(
        _("The last backup is of %(made_at)s."), _("Run muster backup, and see why what should make backups does not.")
    ),
    "gateway.none": Words(_("No gateway runs."), _("Clients cannot connect. Start one, or look at its log.")),
    "gateway.silent": Words(
        _("The gateway %(gateway)s writes no heartbeat."),
        _("It died, or it cannot reach the database. Look at its process and its log."),
    ),
    "valkey.silent": Words(
        _("Valkey does not answer the control plane."),
        _("Changes reach gateways seconds later than usual. See whether Valkey runs and MUSTER_REDIS_URL is right."),
    ),
    "valkey.unreadable": Words(
        ngettext_lazy(
            "Valkey brought %(messages)d message that Muster could not read.",
            "Valkey brought %(messages)d messages that Muster could not read.",
            "messages",
        ),
        _("Something else writes there: see its list muster.unreadable. Deleting muster.unreadable.total ends this alert."),
    ),
    "webhook.failing": Words(
        ngettext_lazy(
            "The webhook %(webhook)s does not take %(messages)d message.",
            "The webhook %(webhook)s does not take %(messages)d messages.",
            "messages",
        ),
        _("It says: %(detail)s. Send a test from its page."),
    ),
    "node.none": Words(_("No node has connected yet."), _("Add a node.")),
    "node.unavailable": Words(_("No node takes work."), _("Clients get NO_AVAILABLE_NODE. Start, uncordon or undrain one.")),
    "requests.waiting": Words(
        ngettext_lazy("%(requests)d request waits for %(model)s.", "%(requests)d requests wait for %(model)s.", "requests"),
        _("%(reason)s %(advice)s"),
    ),
    "model.unserved": Words(_("Clients may use %(model)s, and no node answers for it."), _("%(reason)s %(advice)s")),
    "model.unserved.asked": Words(
        ngettext_lazy(
            "No node answers for %(model)s, and clients sent %(requests)d request for it in the last hour.",
            "No node answers for %(model)s, and clients sent %(requests)d requests for it in the last hour.",
            "requests",
        ),
        _("%(reason)s %(advice)s"),
    ),
    "requests.failed": Words(
        _("%(percent)d %% of the last hour's requests failed."), _("See by error code what the failed requests have in common.")
    ),
    "charts.behind": Words(
        _("Charts are behind."),
        _("What ended since then is in no chart yet, and not lost. The worker catches up; see whether it runs."),
    ),
    "node.error": Words(_("%(node)s reports an error."), "%(detail)s", unsaid=_("See its own log.")),
    "node.late": Words(_("%(node)s is late."), _("It gets no new work until it is seen.")),
    "node.late.failing": Words(
        _("%(node)s is late."),
        _(
            "It gets no new work until it is seen. "
            "Slots of other nodes are held for requests that run there and can be tried again."
        ),
    ),
    "node.offline": Words(_("%(node)s is offline."), _NO_POWER),
    "node.offline.never": Words(_("%(node)s was never seen."), _NO_POWER),
    "node.unreachable": Words(
        _("%(node)s sends heartbeats, but its URL does not answer."), "%(detail)s", unsaid=_("See its own log.")
    ),
    "model.failed": Words(
        _("%(model)s failed on %(node)s."), "%(detail)s", unsaid=_("The node gives no reason. See its own log.")
    ),
    "model.lost": Words(
        _("%(model)s was loaded on %(node)s and is not any more."),
        _("%(node)s says: %(detail)s."),
        unsaid=_("Its approval did not ask to keep it loaded."),
    ),
    "model.lost.kept": Words(
        _("%(model)s was loaded on %(node)s and is not any more."),
        _("It is approved to stay loaded, and %(node)s says: %(detail)s."),
        unsaid=_("It is approved to stay loaded, and %(node)s says nothing about it."),
    ),
    "node.alarm": Words(_("%(node)s does not trust the audit log."), "%(detail)s"),
    "node.policy_refused": Words(_("%(node)s refuses what governs it."), "%(detail)s"),
    "node.ejected": Words(_("Gateways hold %(node)s back."), "%(detail)s."),
    "node.ejected.models": Words(_("Gateways hold %(node)s back for %(models)s."), "%(detail)s."),
    "node.duplicate": Words(
        _("Two nodes call themselves %(node)s."),
        _("The second one is refused. Give it another name or a credential of its own."),
    ),
    "node.duplicate.address": Words(
        _("Two nodes call themselves %(node)s."),
        _("The second one, at %(address)s, is refused. Give it another name or a credential of its own."),
    ),
    "node.clock.behind": Words(_("The clock of %(node)s is %(off_s)s behind."), _("Set its clock, for example by NTP.")),
    "node.clock.ahead": Words(_("The clock of %(node)s is %(off_s)s ahead."), _("Set its clock, for example by NTP.")),
    "node.clock.behind.refused": Words(
        _("The clock of %(node)s is %(off_s)s behind."), _("No operation is sent to it until its clock is set.")
    ),
    "node.clock.ahead.refused": Words(
        _("The clock of %(node)s is %(off_s)s ahead."), _("No operation is sent to it until its clock is set.")
    ),
    "policy.expiring": Words(
        _("The approval policy, version %(version)d, expires on %(ends_at)s."),
        _("After that nothing can be approved but its next version. Draft that version now."),
    ),
    "policy.expiring.over": Words(
        _("The approval policy, version %(version)d, expired on %(ends_at)s."),
        _("Nothing can be approved but its next version. Draft that version now."),
    ),
    "certificate.expiring": Words(
        _("The CA that gives nodes certificates expires on %(ends_at)s."),
        _("After that clients refuse the nodes that they reach directly. Run %(muster)s ca rotate."),
    ),
    "certificate.expiring.over": Words(
        _("The CA that gives nodes certificates expired on %(ends_at)s."),
        _("Clients refuse the nodes that they reach directly. Run %(muster)s ca rotate."),
    ),
    "node.untrusting": Words(
        _("%(node)s trusts no policy."),
        _("It carries out no operation. Run %(muster)s trust on it with the words of the policy."),
    ),
    "node.no_operations": Words(
        _("%(node)s takes no operations."), _("Models cannot be loaded or unloaded on it from here. Start it with --data DIR.")
    ),
    "node.empty": Words(
        _("%(node)s has no model."), _("It gets no requests. Load a model on it, or see whether its backend answers.")
    ),
    "node.drained": Words(
        _("%(node)s is drained and takes no work."), _("It is safe to power it off. Undrain it if it is to work again.")
    ),
    "key.expiring": Words(
        _("The API key %(key)s expires on %(ends_at)s."), _("It is in use. Create a new one for its client.")
    ),
    "budget.used": Words(
        _("%(owner)s has used %(percent)d %% of its budget for %(window)s."), _("Raise the budget, or tell whoever uses it.")
    ),
    "budget.used.over": Words(
        _("%(owner)s has used its whole budget for %(window)s."), _("The budget is soft: nothing is refused.")
    ),
    "budget.used.refusing": Words(
        _("%(owner)s has used its whole budget for %(window)s."),
        _("The budget is hard: further requests are refused. Raise it, or wait for the next day or month."),
    ),
}


class ProblemWords:
    """What governance asks (``governance.registry.AlertWords``)."""

    def describe(self, alert: AlertFacts) -> tuple[str, str]:
        """Return what was seen and what to do, in the language that is active."""
        words = WORDS_OF.get(alert.code)
        if words is None:  # the release that knew it is gone
            return alert.code, ""
        values = _print_values(alert) | {"muster": COMMAND}
        advice = words.unsaid if words.unsaid and not values.get("detail") else words.advice
        return str(words.what % values), str(advice % values)

    def list_kinds(self) -> Iterable[str]:
        """Return every kind there is."""
        return KINDS

    def name_kind(self, kind: str) -> str:
        """Return what a kind is called, in a few words."""
        return str(KINDS.get(kind, kind))

    def find_links(self, alert: AlertFacts) -> Links:
        """Return where pages lead from it; programs without pages do not ask."""
        url = _find_object(alert)
        find_fix = _FIXES.get(alert.kind)
        if find_fix is None:
            return Links(url, str(_("Open its page")) if url else "", url)
        fix, fix_url = find_fix(alert)
        return Links(url, str(fix), fix_url)


WORDS = ProblemWords()


def _print_values(alert: AlertFacts) -> dict[str, Any]:  # Any: what a sentence is filled with, numbers too
    """Return the values as people read them: ``…_s`` is a duration, ``…_at`` a moment, a list names."""
    values: dict[str, Any] = {alert.object_type: alert.object_name, "owner": alert.object_name}
    return values | {name: _print_value(name, value) for name, value in alert.params.items()}


def _print_value(name: str, value: object) -> Any:
    if name.endswith("_s") and isinstance(value, (int, float)):
        return print_duration(value)
    if name.endswith("_at") and isinstance(value, str):
        return formats.date_format(datetime.fromisoformat(value), "DATE_FORMAT")
    if isinstance(value, dict):  # said in each language when it was seen
        return value.get(get_language() or "") or value.get(settings.LANGUAGE_CODE, "")
    return join_names(value) if isinstance(value, list) else value


def _find_object(alert: AlertFacts) -> str:
    match alert.object_type:
        case "node" | "replica":
            return reverse("admin:nodes_node_change", args=[alert.object_id.partition("/")[0]])
        case "key":
            return reverse("admin:gateway_apikey_change", args=[alert.object_id])
        case "tenant":
            return _list("gateway_tenant", q=alert.object_id)
        case "model":
            return _list("gateway_model", q=alert.object_id)
        case "gateway":
            return _list("gateway_gatewayprocess")
        case "webhook":
            return reverse("admin:governance_webhookendpoint_change", args=[alert.object_id])
        case "policy":
            return reverse("approvals:policy")
    return ""


def _list(listed: str, **query: str) -> str:
    return reverse(f"admin:{listed}_changelist") + (f"?{urlencode(query)}" if query else "")


_FIXES: Mapping[str, Callable[[AlertFacts], tuple[Text, str]]] = {
    "gateway.none": lambda _alert: (_("Gateway processes"), _list("gateway_gatewayprocess")),
    "gateway.silent": lambda _alert: (_("Gateway processes"), _list("gateway_gatewayprocess")),
    "node.none": lambda _alert: (_("Add a node"), reverse("admin:nodes_node_setup")),
    "node.unavailable": lambda _alert: (_("Nodes"), _list("nodes_node")),
    "requests.waiting": lambda _alert: (_("Requests in progress"), _list("gateway_requestrecord", state="open")),
    "requests.failed": lambda _alert: (_("Failed requests"), _list("gateway_requestrecord", state="wrong", range="1h")),
    "model.unserved": lambda alert: (_("Models"), _find_object(alert)),
    "model.lost": lambda alert: (_("Propose it again"), f"{reverse('approvals:propose')}?{alert.params.get('again', '')}"),
    "policy.expiring": lambda _alert: (_("Policy"), reverse("approvals:policy")),
}
"""Where a problem is mended, if not on the page of its object."""
