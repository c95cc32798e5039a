"""Audit events in words for people: what was done as a sentence, its target as a link, its details as "key: value".

The log itself keeps the names of actions: programs and the hash chain read those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlencode

from django.urls import NoReverseMatch, reverse
from django.utils.functional import Promise
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from core.limits import limits
from governance.models import AuditEvent
from wire.ids import parse_id

SENTENCES: dict[str, Promise] = {
    "admin_token.create": gettext_lazy("Created the admin token {target}"),
    "admin_token.revoke": gettext_lazy("Revoked the admin token {target}"),
    "alert.silence": gettext_lazy("Silenced the alert {target}"),
    "alert.unsilence": gettext_lazy("Lifted the silence of {target}"),
    "alias.change": gettext_lazy("Changed the model alias {target}"),
    "alias.create": gettext_lazy("Created the model alias {target}"),
    "alias.delete": gettext_lazy("Deleted the model alias {target}"),
    "api_key.budgets": gettext_lazy("Changed the budgets of the API key {target}"),
    "api_key.create": gettext_lazy("Created the API key {target}"),
    "api_key.limits": gettext_lazy("Changed the limits of the API key {target}"),
    "api_key.raise": gettext_lazy("Raised the limits of the API key {target}"),
    "api_key.revoke": gettext_lazy("Revoked the API key {target}"),
    "api_key.rotate": gettext_lazy("Rotated the API key {target}"),
    "approver-key.enrol": gettext_lazy("Enrolled a key of {target}"),
    "approver-key.revoke": gettext_lazy("Removed a key of {target}"),
    "audit.witness_alarm": gettext_lazy("{target} saw another audit log"),
    "budget.reached": gettext_lazy("{target} reached its budget"),
    "freeze": gettext_lazy("Froze all operations"),
    "unfreeze": gettext_lazy("Lifted the freeze"),
    "group.change": gettext_lazy("Changed the permissions of the group {target}"),
    "invitation.create": gettext_lazy("Invited {target}"),
    "invitation.use": gettext_lazy("{target} accepted an invitation"),
    "messages.set_aside": gettext_lazy("Set messages aside that nobody could read"),
    "model.allow": gettext_lazy("Allowed the model {target}"),
    "model.canary": gettext_lazy("Changed the test questions of the model {target}"),
    "model.caps": gettext_lazy("Changed the limits of the model {target}"),
    "model.details": gettext_lazy("Changed the details of the model {target}"),
    "model.disallow": gettext_lazy("Disallowed the model {target}"),
    "model.prices": gettext_lazy("Changed the prices of the model {target}"),
    "model.raise": gettext_lazy("Raised the limits of the model {target}"),
    "model.requirements": gettext_lazy("Changed the requirements of the model {target}"),
    "model.weights": gettext_lazy("Changed the weights of the model {target}"),
    "node.connect": gettext_lazy("The node {target} connected"),
    "node.cordon": gettext_lazy("Cordoned the node {target}"),
    "node.disconnect": gettext_lazy("The node {target} disconnected"),
    "node.drain": gettext_lazy("Drained the node {target}"),
    "node.drained": gettext_lazy("The node {target} is drained"),
    "node.ejected": gettext_lazy("Gateways hold the node {target} back"),
    "node.online": gettext_lazy("The node {target} is online again"),
    "node.offline": gettext_lazy("The node {target} is offline"),
    "node.read_log": gettext_lazy("Read the log of the node {target}"),
    "node.register": gettext_lazy("The node {target} registered"),
    "node.remove": gettext_lazy("Removed the node {target}"),
    "node.rival_refused": gettext_lazy("Refused a second node that calls itself {target}"),
    "node.set_api_key": gettext_lazy("Changed the API key of the node {target}"),
    "node.set_op_key": gettext_lazy("Changed the operation key of the node {target}"),
    "node.uncordon": gettext_lazy("Uncordoned the node {target}"),
    "node.undrain": gettext_lazy("Ended the drain of the node {target}"),
    "node_ca.create": gettext_lazy("Created the internal CA"),
    "node_ca.issue": gettext_lazy("Issued a certificate for {target}"),
    "node_ca.rotate": gettext_lazy("Replaced the internal CA"),
    "node_credential.create": gettext_lazy("Created the node credential {target}"),
    "node_credential.revoke": gettext_lazy("Revoked the node credential {target}"),
    "node_credential.trust_models": gettext_lazy("Changed whether the node credential {target} allows its models"),
    "one-time-password.remove": gettext_lazy("Removed the authenticator app of {target}"),
    "one-time-password.set-up": gettext_lazy("Set up an authenticator app of {target}"),
    "operation.approve": gettext_lazy("Approved the operation {target}"),
    "operation.approved": gettext_lazy("The operation {target} has enough approvals"),
    "operation.block": gettext_lazy("The operation {target} cannot go on"),
    "operation.cancel": gettext_lazy("Cancelled the operation {target}"),
    "operation.dispatch": gettext_lazy("Sent the operation {target} to its node"),
    "operation.expire": gettext_lazy("The operation {target} expired"),
    "operation.propose": gettext_lazy("Proposed the operation {target}"),
    "operation.reject": gettext_lazy("Rejected the operation {target}"),
    "operation.rejected": gettext_lazy("The operation {target} is rejected"),
    "operation.use": gettext_lazy("Used the standing approval {target}"),
    "operation.withdraw": gettext_lazy("Withdrew from the operation {target}"),
    "operator.change": gettext_lazy("Changed the account of {target}"),
    "operator.create": gettext_lazy("Created the account of {target}"),
    "person.join-tenant": gettext_lazy("Made {target} a member of a tenant"),
    "person.leave-tenant": gettext_lazy("Removed {target} from a tenant"),
    "person.roles": gettext_lazy("Changed the roles of {target}"),
    "policy.activate": gettext_lazy("Put the policy {target} into force"),
    "policy.draft": gettext_lazy("Drafted the policy {target}"),
    "provider.create": gettext_lazy("Created the provider {target}"),
    "provider.delete": gettext_lazy("Deleted the provider {target}"),
    "provider.disable": gettext_lazy("Disabled the provider {target}"),
    "provider.enable": gettext_lazy("Enabled the provider {target}"),
    "provider.terms": gettext_lazy("Changed the limits of the provider {target}"),
    "sign-in.close": gettext_lazy("{target} signed out"),
    "sign-in.close-others": gettext_lazy("{target} ended all other sessions"),
    "sign-in.close-all": gettext_lazy("Ended the sessions of {target}"),
    "sign-in.connect": gettext_lazy("{target} connected single sign-on"),
    "sign-in.disconnect": gettext_lazy("{target} disconnected single sign-on"),
    "sign-in.open": gettext_lazy("{target} signed in"),
    "sign-in.slow-down": gettext_lazy("Slowed down somebody who guesses passwords"),
    "tenant.budgets": gettext_lazy("Changed the budgets of the tenant {target}"),
    "tenant.create": gettext_lazy("Created the tenant {target}"),
    "tenant.disable": gettext_lazy("Disabled the tenant {target}"),
    "tenant.enable": gettext_lazy("Enabled the tenant {target}"),
    "tenant.forget_responses": gettext_lazy("Deleted the stored responses of the tenant {target}"),
    "tenant.limit": gettext_lazy("Changed the limits of the tenant {target}"),
    "tenant.response_policy": gettext_lazy("Changed what is stored for the tenant {target}"),
    "tenant.weight": gettext_lazy("Changed the share of the tenant {target}"),
    "ticket_key.rotate": gettext_lazy("Replaced the key that signs tickets"),
    "webhook.add": gettext_lazy("Added the webhook {target}"),
    "webhook.change": gettext_lazy("Changed the webhook {target}"),
    "webhook.remove": gettext_lazy("Removed the webhook {target}"),
    "webhook.test": gettext_lazy("Sent a test to the webhook {target}"),
}
"""By action, what was done, with the place of its target. An action that is not here shows its own name."""
LISTS = {
    "admin_token": "governance_admintoken",
    "alias": "gateway_modelalias",
    "api_key": "gateway_apikey",
    "approver-key": "controlplane_user",
    "invitation": "controlplane_user",
    "model": "gateway_model",
    "node": "nodes_node",
    "node_credential": "nodes_nodecredential",
    "operator": "controlplane_user",
    "person": "controlplane_user",
    "provider": "nodes_provider",
    "sign-in": "controlplane_user",
    "tenant": "gateway_tenant",
    "webhook": "governance_webhookendpoint",
}
"""The list in which a target is found, by the first part of an action."""
_DIGEST = re.compile(r"[0-9a-f]{32,}")
_ACTORS = {
    "system": gettext_lazy("Muster ({name})"),
    "node": gettext_lazy("node {name}"),
    "token": gettext_lazy("admin token {name}"),
    "admin-token": gettext_lazy("admin token {name}"),
    "credential": gettext_lazy("node credential {name}"),
}


def describe_event(event: AuditEvent) -> SafeString:
    """Return what was done, with a link to what it was done to."""
    target: str | SafeString = event.target
    url = _find_target(event)
    if url and target:
        # The front of an id is the time, which stands beside it.
        shown = f"…{target[-12:]}" if parse_id("node", target) or parse_id("op", target) else target
        target = format_html('<a class="mst-link" href="{}" title="{}">{}</a>', url, target, shown)
    sentence = SENTENCES.get(event.action)
    return format_html("{}: {}", event.action, target) if sentence is None else format_html(str(sentence), target=target)


def _find_target(event: AuditEvent) -> str:
    op_id = parse_id("op", event.op_id) if event.op_id else None
    if op_id is not None:
        return reverse("approvals:operation", args=[op_id])
    name = LISTS.get(event.action.partition(".")[0])
    node_id = parse_id("node", event.target)
    try:
        if node_id is not None:
            return reverse("admin:nodes_node_change", args=[node_id])
        return f"{reverse(f'admin:{name}_changelist')}?{urlencode({'q': event.target})}" if name else ""
    except NoReverseMatch:  # a process without these pages
        return ""


def describe_actor(actor: str) -> str:
    kind, colon, name = actor.partition(":")
    words = _ACTORS.get(kind)
    return str(words).format(name=name) if words is not None else name if colon else actor


def describe_detail(detail: Mapping[str, object]) -> str:
    """Return details as "key: value", without those that say nothing."""
    told = ((key.replace("_", " "), _print(value)) for key, value in detail.items())
    return " · ".join(f"{key}: {text}" for key, text in told if text)


def _print(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return _("yes") if value else _("no")
        case list():
            return ", ".join(filter(None, map(_print, value)))
        case dict():
            return ", ".join(f"{key} {text}" for key, inner in value.items() if (text := _print(inner)))
    text = str(value)
    return f"{text[: limits().governance.shown_digest_chars]}…" if _DIGEST.fullmatch(text) else text
