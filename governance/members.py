"""Who has which role: changes to the roles of people and to the members of tenants. What a role allows is ``core.roles``'s."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.db import transaction
from django.utils.translation import gettext as _

from core.models import Membership
from core.roles import Role, list_roles, make_role_groups
from governance.audit import record_event
from governance.errors import NotFound, NotPermitted

if TYPE_CHECKING:
    from core.models import User


@transaction.atomic
def change_roles(*, person: User, roles: Collection[Role], actor: str) -> User:
    """Give a person exactly these roles of the installation; what the person may beyond roles stays. Audited when it changes.

    Raises NotPermitted for a role of a tenant, and when nobody would be left who may change roles.
    """
    # One after the other: of two owners who take the role from each other one keeps it.
    people = {one.pk: one for one in get_user_model().objects.select_for_update().filter(is_superuser=True, is_active=True)}
    locked: User = get_user_model().objects.select_for_update().get(pk=person.pk)
    if wrong := next((role for role in roles if role.is_of_tenant), None):
        raise NotPermitted(_("The role %(role)s is held in a tenant: add the person there.") % {"role": wrong}, param="roles")
    if locked.is_superuser and Role.OWNER not in roles and not set(people) - {locked.pk}:
        raise NotPermitted(_("This is the last owner. Make somebody else an owner first."), param="roles")
    before = list_roles(locked)
    make_role_groups()
    groups = {group.name: group for group in Group.objects.filter(name__in=[role.value for role in Role])}
    locked.groups.remove(*groups.values())
    locked.groups.add(*(groups[role.value] for role in roles if role is not Role.OWNER))
    # Permissions beyond roles open the console as well.
    has_more = locked.user_permissions.exists() or locked.groups.exclude(name__in=[role.value for role in Role]).exists()
    locked.is_superuser = Role.OWNER in roles
    locked.is_staff = has_more or any(role.opens_console for role in roles)
    locked.save(update_fields=["is_superuser", "is_staff"])
    after = [role for role in Role if role in roles]
    if set(before) != set(after):
        detail = {"before": [role.value for role in before], "after": [role.value for role in after]}
        record_event(actor=actor, action="person.roles", target=locked.get_username(), detail=detail)
    return locked


@transaction.atomic
def set_member(*, person: User, tenant: str, role: Role, actor: str, is_from_issuer: bool = False) -> Membership:
    """Make a person a member of a tenant, or give a member another role there. Raises NotPermitted for another kind of role."""
    if not role.is_of_tenant:
        raise NotPermitted(_("The role %(role)s is for the whole installation.") % {"role": role}, param="role")
    make_role_groups()
    row, is_new = Membership.objects.get_or_create(
        user_id=person.pk, tenant=tenant, defaults={"role": role.value, "is_from_issuer": is_from_issuer}
    )
    if is_new or row.role != role.value or row.is_from_issuer != is_from_issuer:
        row.role, row.is_from_issuer = role.value, is_from_issuer
        row.save(update_fields=["role", "is_from_issuer"])
        detail = {"tenant": tenant, "role": role.value}
        record_event(actor=actor, action="person.join-tenant", target=person.get_username(), detail=detail)
    return row


@transaction.atomic
def remove_member(*, membership_id: int, tenant: str, actor: str) -> str:
    """End a membership of this tenant and return the person's name. Raises NotFound."""
    row = Membership.objects.select_for_update().select_related("user").filter(pk=membership_id, tenant=tenant).first()
    if row is None:
        raise NotFound(_("This person is no member of the tenant any more."), param="member")
    name = row.user.get_username()
    row.delete()
    record_event(actor=actor, action="person.leave-tenant", target=name, detail={"tenant": tenant})
    return name
