"""Roles: what somebody may do in the whole installation and in single tenants. Pages, lists, APIs and sockets ask ``may``.

A role is a group of Django's with permissions, which owners may change. The roles of a tenant count only in the tenants of
which somebody is a member, so that whatever asks without naming a tenant refuses them. Owners are superusers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from django.contrib.auth.models import AnonymousUser, Group, Permission
from django.db import models, transaction
from django.db.models import Q, QuerySet
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy

from core.models import Membership, User

Rows = TypeVar("Rows", bound=models.Model)


class Role(StrEnum):
    """A role, and the name of its group. The last two are held in a tenant."""

    OWNER = "owner"
    OPERATOR = "operator"
    APPROVER = "approver"
    VIEWER = "viewer"
    TENANT_ADMIN = "tenant-admin"
    TENANT_VIEWER = "tenant-viewer"

    @property
    def is_of_tenant(self) -> bool:
        return self in _TENANT_DEFAULTS

    @property
    def opens_console(self) -> bool:
        """Whether its people see the whole console, not only approvals or their tenants."""
        return self in {Role.OWNER, Role.OPERATOR, Role.VIEWER}


MEANINGS: Mapping[Role, tuple[str | Promise, str | Promise]] = {
    Role.OWNER: (gettext_lazy("Owner"), gettext_lazy("Everything, including people and roles")),
    Role.OPERATOR: (
        gettext_lazy("Operator"),
        gettext_lazy("Reads what a viewer reads; changes nodes and models, silences alerts, proposes operations"),
    ),
    Role.APPROVER: (gettext_lazy("Approver"), gettext_lazy("Reads operations; the policy says who approves")),
    Role.VIEWER: (gettext_lazy("Viewer"), gettext_lazy("Reads everything but secrets and kept answers; changes nothing")),
    Role.TENANT_ADMIN: (
        gettext_lazy("Tenant admin"), gettext_lazy("Keys, members, usage, budgets and requests of one tenant"),
    ),
    Role.TENANT_VIEWER: (gettext_lazy("Tenant viewer"), gettext_lazy("Reads what a tenant admin reads")),
}  # fmt: skip
"""How people call a role, and what it is for."""

SEE_OPERATIONS = "governance.view_operation"
PROPOSE = "governance.add_operation"
DECIDE = "governance.change_operation"
"""Of tokens: a person decides about what the policy lets them, by their own key."""
SEE_NODES, SEE_GATEWAYS = "nodes.view_node", "gateway.view_gatewayprocess"
SEE_TENANT, SEE_KEYS, SEE_REQUESTS = "gateway.view_tenant", "gateway.view_apikey", "gateway.view_requestrecord"
ADD_KEY, CHANGE_KEY = "gateway.add_apikey", "gateway.change_apikey"
SEE_MEMBERS, ADD_MEMBER, REMOVE_MEMBER = (
    "controlplane.view_membership", "controlplane.add_membership", "controlplane.delete_membership",
)  # fmt: skip

_SECRETS = frozenset({
    "gateway.view_storedresponse", "governance.view_onetimepassword", "governance.view_invitation",
    "governance.view_signinfailure",
})  # fmt: skip
"""Prompts with their answers, and what signs people in."""
_VIEWER = ("nodes.view_*", "gateway.view_*", "governance.view_*", "controlplane.view_*", "auth.view_group")
_TENANT_DEFAULTS: Mapping[Role, tuple[str, ...]] = {
    Role.TENANT_ADMIN: (
        SEE_TENANT, SEE_KEYS, SEE_REQUESTS, ADD_KEY, CHANGE_KEY, SEE_MEMBERS, ADD_MEMBER, REMOVE_MEMBER,
    ),
    Role.TENANT_VIEWER: (SEE_TENANT, SEE_KEYS, SEE_REQUESTS, SEE_MEMBERS),
}  # fmt: skip
_DEFAULTS: Mapping[Role, tuple[str, ...]] = {
    Role.OPERATOR: (
        *_VIEWER, "nodes.add_*", "nodes.change_*", "gateway.*_model", "gateway.*_modelalias", PROPOSE,
        "governance.change_alert", "governance.change_alertsilence",
    ),
    Role.APPROVER: (SEE_OPERATIONS, DECIDE),
    Role.VIEWER: _VIEWER,
    **_TENANT_DEFAULTS,
}  # fmt: skip
"""What the group of a role holds when it is made, as patterns of permissions."""


@dataclass(frozen=True, slots=True)
class Rights:
    """Permissions (``app.codename``) that somebody has everywhere (None: all there are), and more of them in single tenants."""

    everywhere: frozenset[str] | None = frozenset()
    in_tenants: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def has(self, permission: str, *, tenant: str = "") -> bool:
        if self.everywhere is None or permission in self.everywhere:
            return True
        return permission in self.in_tenants.get(tenant, frozenset())

    def find_tenants(self, permission: str) -> frozenset[str] | None:
        """Return the tenants in which it holds; None: in all."""
        if self.has(permission):
            return None
        return frozenset(tenant for tenant, held in self.in_tenants.items() if permission in held)

    def within(self, other: Rights) -> Rights:
        """Return what both have."""
        names = {*self.in_tenants, *other.in_tenants}
        both = {name: self._list(name, other) & other._list(name, self) for name in names}
        if self.everywhere is None or other.everywhere is None:
            everywhere = other.everywhere if self.everywhere is None else self.everywhere
        else:
            everywhere = self.everywhere & other.everywhere
        return Rights(everywhere, both)

    def _list(self, tenant: str, other: Rights) -> frozenset[str]:
        """Return what it has in a tenant; where that is everything, what ``other`` has there."""
        if self.everywhere is None:
            return (other.everywhere or frozenset()) | other.in_tenants.get(tenant, frozenset())
        return self.everywhere | self.in_tenants.get(tenant, frozenset())


class Holder(Protocol):
    """The caller of an API: the bearer of a token."""

    @property
    def rights(self) -> Rights:
        """What the token may do."""


Asker = User | AnonymousUser | Holder


def may(who: Asker, permission: str, *, tenant: str = "") -> bool:
    """Return whether somebody may do what ``permission`` names; ``tenant``: in this one. No query more for each tenant."""
    if isinstance(who, User | AnonymousUser):
        return bool(who.has_perm(permission)) or (bool(tenant) and read_rights(who).has(permission, tenant=tenant))
    return who.rights.has(permission, tenant=tenant)


def find_tenants(who: Asker, permission: str) -> frozenset[str] | None:
    """Return the names of the tenants in which somebody may; None: in all, also those to come."""
    if isinstance(who, User | AnonymousUser):
        return None if who.has_perm(permission) else read_rights(who).find_tenants(permission)
    return who.rights.find_tenants(permission)


def has_tenants(person: User | AnonymousUser) -> bool:
    """Return whether somebody is a member of tenants and has no list of all of them."""
    return bool(find_tenants(person, SEE_TENANT))


def limit_rows(rows: QuerySet[Rows], who: Asker, permission: str, *, tenant: str) -> QuerySet[Rows]:
    """Return those of ``rows`` that somebody may see; ``tenant``: the path to the name of a row's tenant."""
    names = find_tenants(who, permission)
    return rows if names is None else rows.filter(**{f"{tenant}__in": names})


def read_rights(person: User | AnonymousUser) -> Rights:
    """Return what a person may do. Three queries, once for each time that the person was loaded."""
    if not isinstance(person, User) or not person.is_active:
        return Rights()
    known: Rights | None = person.__dict__.get("_rights")
    if known is None:
        everywhere = None if person.is_superuser else frozenset(person.get_all_permissions())
        held = dict(Membership.objects.filter(user_id=person.pk).values_list("tenant", "role"))
        granted = read_role_permissions(held.values()) if held else {}
        known = Rights(everywhere, {tenant: granted.get(role, frozenset()) for tenant, role in held.items()})
        person.__dict__["_rights"] = known
    return known


def read_role_permissions(roles: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the permissions that the groups of roles hold now, by role; one query."""
    found = Permission.objects.filter(group__name__in=set(roles)).values_list(
        "group__name", "content_type__app_label", "codename"
    )
    granted: dict[str, set[str]] = {}
    for role, app, codename in found:
        granted.setdefault(role, set()).add(f"{app}.{codename}")
    return {role: frozenset(names) for role, names in granted.items()}


def read_rights_of_role(role: str, tenant: str) -> Rights:
    """Return what a token of a role may do. One without a role is older than roles and may do everything."""
    if role in ("", Role.OWNER):
        return Rights(everywhere=None)
    held = read_role_permissions([role]).get(role, frozenset())
    return Rights(in_tenants={tenant: held}) if tenant else Rights(held)


def list_roles(person: User) -> list[Role]:
    """Return the roles that a person has in the whole installation; ``groups`` may be prefetched."""
    names = {group.name for group in person.groups.all()}
    return [
        role
        for role in MEANINGS
        if not role.is_of_tenant and (person.is_superuser if role is Role.OWNER else role.value in names)
    ]


@transaction.atomic
def make_role_groups(*, is_update: bool = False) -> None:
    """Make the groups of roles that are missing. A group that is there stays as its owners made it.

    ``is_update``: after a migration; whoever was there before there were roles then keeps what they could do.
    """
    known = set(Group.objects.filter(name__in=[role.value for role in _DEFAULTS]).values_list("name", flat=True))
    missing = {role: patterns for role, patterns in _DEFAULTS.items() if role.value not in known}
    if not missing:
        return
    groups = {group.name: group for group in Group.objects.bulk_create([Group(name=role.value) for role in missing])}
    permissions = list(Permission.objects.select_related("content_type"))
    Group.permissions.through.objects.bulk_create([
        Group.permissions.through(group_id=groups[role.value].pk, permission_id=permission.pk)
        for role, patterns in missing.items()
        for permission in permissions
        if (name := f"{permission.content_type.app_label}.{permission.codename}") not in _SECRETS
        and any(fnmatchcase(name, pattern) for pattern in patterns)
    ])  # fmt: skip
    if is_update and Role.APPROVER in missing:
        _keep_rights(groups[Role.APPROVER.value], permissions)


def _keep_rights(approvers: Group, permissions: list[Permission]) -> None:
    """Let people who were there before roles go on with operations: they could read them, and staff could propose."""
    earlier = list(User.objects.filter(Q(is_superuser=False)).values_list("pk", "is_staff"))
    User.groups.through.objects.bulk_create(
        [User.groups.through(user_id=pk, group_id=approvers.pk) for pk, _is_staff in earlier], ignore_conflicts=True
    )
    propose = [one.pk for one in permissions if f"{one.content_type.app_label}.{one.codename}" == PROPOSE]
    User.user_permissions.through.objects.bulk_create(
        [
            User.user_permissions.through(user_id=pk, permission_id=permission)
            for pk, is_staff in earlier
            if is_staff
            for permission in propose
        ],
        ignore_conflicts=True,
    )
