"""The governed operations that are governance's own: policy, freeze, review, and admin tokens. Wired up in ``OPERATIONS``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from core.limits import limits
from core.roles import MEANINGS, Role
from governance.errors import ApprovalRefused, InvalidProposal
from governance.models import Operation, PolicyVersion
from governance.operations.approvals import (
    active_policy,
    explain_own_review,
    list_users,
    read_freeze,
)
from governance.operations.policies import adopt_policy, lift_freeze, name_freeze
from governance.registry import Asked, Brief, Description, Done, Impact, Line, NotNow, Request, RunOrder, Sent, Signer
from wire.ids import parse_id
from wire.optoken.approval import Policy, policy_words

CONTROL_PLANE = "control-plane"


class _Local:
    """What operations of the control plane itself share: no node, no token."""

    is_remote: ClassVar[bool] = False

    def find_signer(self, target: str) -> Signer | None:
        del target
        return None

    def preview(self, targets: Sequence[str], params: Mapping[str, object]) -> Sequence[Impact]:
        del targets, params
        return ()

    def write_title(self, params: Mapping[str, object]) -> str:
        """Return the title of a description, from the parameters alone."""
        raise NotImplementedError

    def sum_up(self, asked: Sequence[Asked]) -> Sequence[Brief]:
        """Return the title of each."""
        return [Brief(self.write_title(params)) for _targets, params in asked]


def _find(printed_id: str) -> Operation | None:
    ident = parse_id("op", printed_id)
    return None if ident is None else Operation.objects.filter(pk=ident).first()


def _require_control_plane(targets: Sequence[str]) -> tuple[str, ...]:
    if list(targets) not in ([], [CONTROL_PLANE]):
        raise InvalidProposal(
            _("The one target of this operation is %(control_plane)s.") % {"control_plane": CONTROL_PLANE}, param="targets"
        )
    return (CONTROL_PLANE,)


def _require_only(params: Mapping[str, object], *names: str) -> None:
    if unknown := sorted(set(params) - set(names)):
        raise InvalidProposal(
            _("This operation takes no %(unknown)s; it takes: %(names)s.")
            % {"unknown": unknown[0], "names": ", ".join(names) or _("nothing")},
            param="params",
        )


class PolicyChange(_Local):
    """Puts the next version of the policy in force. Proposed by drafting it (``policies.draft_policy``)."""

    name = "policy-change"
    title = gettext_noop("Change the approval policy")

    def clean(self, targets: Sequence[str], params: Mapping[str, object]) -> Request:
        del targets, params
        raise InvalidProposal(_("A policy is changed by drafting its next version."), param="operation")

    def write_title(self, params: Mapping[str, object]) -> str:
        return _("Put version %(version)s of the approval policy in force") % {"version": params.get("version")}

    def describe(self, targets: Sequence[str], params: Mapping[str, object]) -> Description:
        del targets
        row = PolicyVersion.objects.filter(sha256=str(params.get("sha256", ""))).first()
        if row is None:
            return Description(_("Change the approval policy"), [Line(_("Policy"), _("this version is not stored here"))])
        new, found = row.read_policy(), active_policy()
        old = found[1] if found else None
        words = policy_words(new.ref.sha256)
        lines = [Line(_("Version"), str(new.ref.version), str(old.ref.version) if old else _("none"))]
        lines.append(Line(_("Fingerprint"), words))
        lines += describe_change(old, new)
        return Description(self.write_title({"version": new.ref.version}), lines)

    def carry_out(self, order: RunOrder) -> Sent | Done | NotNow:
        """Put it in force; what is pending under the old one is blocked."""
        row = PolicyVersion.objects.select_for_update().get(sha256=str(order.params["sha256"]))
        blocked = adopt_policy(row, actor="system:governance", op_id=order.op_id)
        return Done(f"Version {row.version} is in force; {blocked} pending operations were blocked.")


class Unfreeze(_Local):
    """Lifts the freeze."""

    name = "unfreeze"
    title = gettext_noop("Lift the freeze")

    def choices(self) -> Mapping[str, object]:
        return {"targets": [], "params": []}

    def clean(self, targets: Sequence[str], params: Mapping[str, object]) -> Request:
        """Return the request, which names the freeze in force. Raises InvalidProposal when there is none, or another."""
        _require_only(params, "freeze", "frozenBy", "frozenAt")
        found = read_freeze()
        if found is None:
            raise InvalidProposal(_("Nothing is frozen."), param="operation")
        named = name_freeze(found)
        if any(named[name] != value for name, value in params.items()):
            raise InvalidProposal(
                _("In force is freeze %(pk)s, by %(frozen_by)s, and no other.")
                % {"pk": found.pk, "frozen_by": found.frozen_by},
                param="freeze",
            )
        return Request(_require_control_plane(targets), named)

    def write_title(self, params: Mapping[str, object]) -> str:
        del params
        return _("Let approved operations run again")

    def describe(self, targets: Sequence[str], params: Mapping[str, object]) -> Description:
        del targets
        found = read_freeze()
        now = _("not frozen")
        if found is not None:
            now = _("in force")
            if name_freeze(found) != params:
                now = _("ended; in force is another one, by %(name)s") % {"name": found.frozen_by}
        which = _("named by nobody")
        if "freeze" in params:
            which = _("%(number)s, by %(name)s") % {"number": params["freeze"], "name": params.get("frozenBy")}
        return Description(self.write_title(params), [Line(_("Lifts the freeze"), which, now)])

    def carry_out(self, order: RunOrder) -> Sent | Done | NotNow:
        """Lift it. Raises StateChanged when another freeze is in force than the one that was signed."""
        lifted = lift_freeze(named=order.params, operation=_find(order.op_id))
        return Done("Operations run again." if lifted else "What this was asked for is not frozen any more.")


class BreakGlassReview(_Local):
    """Closes a break-glass use: the normal quorum has looked at it."""

    name = "break-glass-review"
    title = gettext_noop("Review a break-glass use")

    def choices(self) -> Mapping[str, object]:
        return {"params": []}

    def clean(self, targets: Sequence[str], params: Mapping[str, object]) -> Request:
        """Return the request; the one target is the printed id of the operation that was used."""
        _require_only(params)
        used = _find(targets[0]) if len(targets) == 1 else None
        if used is None or used.op_class != "break-glass":
            raise InvalidProposal(_("The one target is the id (op_…) of a break-glass operation."), param="targets")
        return Request((used.printed_id,), {})

    def write_title(self, params: Mapping[str, object]) -> str:
        del params
        return _("Confirm that this break-glass use was looked at")

    def describe(self, targets: Sequence[str], params: Mapping[str, object]) -> Description:
        used = _find(targets[0])
        lines = [Line(_("Break-glass operation"), targets[0])]
        if used is not None:
            lines += [Line(_("What was done"), used.operation), Line(_("Asked for by"), used.requested_by)]
            lines.append(Line(_("Why"), used.reason))
            lines.append(Line(_("Not to be reviewed by"), ", ".join(sorted(list_users(used)))))
        return Description(self.write_title(params), lines)

    def carry_out(self, order: RunOrder) -> Sent | Done | NotNow:
        """Note it; the operation itself is the record. Raises ApprovalRefused when one of the signers used what is reviewed."""
        found = _find(order.op_id)
        # What is closed has to be what people signed, whatever the row refers to.
        if found is None or found.reviews is None or found.reviews.printed_id != order.target:
            raise ApprovalRefused(_("What would be closed is not what was signed."), rule="bad_statement")
        if why := explain_own_review(found, found.policy.read_policy(), order.approved_by):
            raise ApprovalRefused(why, rule="reviewer_used_it")
        return Done(f"{order.target} is reviewed; break-glass may be used again.")


class AdminTokenMint(_Local):
    """Lets the requester make one admin token."""

    name = "admin-token-mint"
    title = gettext_noop("Make an admin token")

    def choices(self) -> Mapping[str, object]:
        roles = [["", "Everything"], *([role.value, str(name)] for role, (name, _meaning) in MEANINGS.items())]
        days = {"least": 1, "most": limits().governance.token_days}
        return {
            "targets": [],
            "params": [
                {"name": "name", "label": "Name of the token", "help": "What it is for."},
                {"name": "role", "label": "Role", "kind": "select", "choices": roles, "required": False},
                {"name": "tenant", "label": "Tenant", "help": "For a role of tenants.", "required": False},
                {"name": "days", "label": "Days", "kind": "number", "help": "Empty: no end.", "required": False, **days},
            ],
        }

    def clean(self, targets: Sequence[str], params: Mapping[str, object]) -> Request:
        """Return the request: {"name"}, and what it gives where that is not everything for ever: {"role", "tenant", "days"}."""
        _require_only(params, "name", "role", "tenant", "days")
        name = params.get("name")
        if not isinstance(name, str) or not 1 <= len(name.strip()) <= limits().governance.token_name_chars:
            raise InvalidProposal(
                _("Give the token a name of 1 to %(most)s characters.") % {"most": limits().governance.token_name_chars},
                param="name",
            )
        found: dict[str, object] = {"name": name.strip()}
        found |= {key: value for key in ("role", "tenant", "days") if (value := params.get(key)) not in ("", None)}
        self._check(found)
        return Request(_require_control_plane(targets), found)

    def _check(self, params: Mapping[str, object]) -> None:
        role, tenant, days = params.get("role", ""), params.get("tenant", ""), params.get("days", 1)
        most = limits().governance.token_days
        if role not in ("", *Role):
            raise InvalidProposal(_("There is no role %(role)s.") % {"role": str(role)[:40]}, param="role")
        if not isinstance(tenant, str) or bool(tenant) != (role in {Role.TENANT_ADMIN, Role.TENANT_VIEWER}):
            raise InvalidProposal(_("A role of tenants needs a tenant, and other roles take none."), param="tenant")
        if isinstance(days, bool) or not isinstance(days, int) or not 1 <= days <= most:
            raise InvalidProposal(_("Give 1 to %(most)s days, or none.") % {"most": most}, param="days")

    def write_title(self, params: Mapping[str, object]) -> str:
        return _("Make an admin token named %(name)s") % {"name": params.get("name", "")}

    def describe(self, targets: Sequence[str], params: Mapping[str, object]) -> Description:
        del targets
        name = str(params.get("name", ""))
        lines = [
            Line(_("Name"), name),
            Line(_("It opens"), _("the admin APIs of control plane and gateway")),
            Line(_("It may"), self._say_rights(params)),
            Line(_("It works for"), _("%(days)s days") % {"days": params["days"]} if "days" in params else _("no end")),
            Line(_("Shown"), _("to its requester, once")),
        ]
        return Description(self.write_title(params), lines)

    def _say_rights(self, params: Mapping[str, object]) -> str:
        if not params.get("role"):
            return _("everything")
        name = MEANINGS[Role(str(params["role"]))][0]
        if not params.get("tenant"):
            return str(name)
        return _("%(role)s of %(tenant)s") % {"role": name, "tenant": params["tenant"]}

    def carry_out(self, order: RunOrder) -> Sent | Done | NotNow:
        # It is left to be claimed: nothing secret passes through rows and workers.
        return Done("The requester can claim the token once, on this page.", {"claimable": True, "name": order.params["name"]})


def describe_change(old: Policy | None, new: Policy) -> list[Line]:
    """Return who and what a policy names, beside the one in force."""
    people = sorted(set(new.groups) | (set(old.groups) if old else set()))
    lines = [
        Line(_("Approver %(name)s") % {"name": person}, _describe_person(new, person), _describe_person(old, person))
        for person in people
    ]
    names = sorted(set(new.classes) | (set(old.classes) if old else set()))
    return [
        *lines,
        *(
            Line(_("To %(operation)s") % {"operation": name}, _describe_class(new, name), _describe_class(old, name))
            for name in names
        ),
    ]


def _describe_person(policy: Policy | None, person: str) -> str:
    if policy is None or person not in policy.groups:
        return _("not an approver")
    kinds = sorted(f"{key.kind} {key.thumbprint[:8]}" + (" (break-glass)" if key.is_break_glass else "")
                   for key in policy.keys.values() if key.approver == person)  # fmt: skip
    groups = ", ".join(sorted(policy.groups[person]))
    return f"{', '.join(kinds)}{f'; {groups}' if groups else ''}"


def _describe_class(policy: Policy | None, name: str) -> str:
    found = None if policy is None else policy.classes.get(name)
    if policy is None or found is None:
        return _("not possible")
    if found.solo:
        return _("the requester alone (solo)")
    able = {key.approver for key in policy.keys.values() if key.is_break_glass == (name == "break-glass")}
    said = {"needed": found.threshold, "able": len(able)}
    factors = [
        _("%(count)s of the group %(group)s") % {"count": count, "group": group}
        for group, count in sorted(found.factors.items())
    ]
    return "; ".join([_("%(needed)s of %(able)s") % said, *factors])


POLICY_CHANGE, UNFREEZE, BREAK_GLASS_REVIEW, ADMIN_TOKEN_MINT = PolicyChange(), Unfreeze(), BreakGlassReview(), AdminTokenMint()
