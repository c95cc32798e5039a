"""The operators page: who may sign in. People are the one kind of row that the admin itself writes."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.admin import GroupAdmin as DjangoGroupAdmin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group
from django.forms import ModelForm
from django.http import HttpRequest
from unfold.admin import ModelAdmin
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from controlplane.models import User
from governance.audit import record_event
from governance.pages import name_actor


@admin.register(User)
class UserAdmin(DjangoUserAdmin, ModelAdmin):  # type: ignore[misc,type-arg]  # not generic at run time; Unfold has no types
    """Operators. Switched off, never deleted: the audit trail names them."""

    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm
    list_display = ("username", "email", "is_active", "is_staff", "is_superuser", "last_login")
    readonly_fields = ("last_login", "date_joined")
    actions = None

    def has_delete_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        """Refuse: switch the account off instead."""
        return False

    def save_model(self, request: HttpRequest, obj: User, form: ModelForm[User], change: bool) -> None:
        """Save, and write down which fields were changed (never what they hold)."""
        super().save_model(request, obj, form, change)
        record_event(
            actor=name_actor(request),
            action="operator.change" if change else "operator.create",
            target=obj.username,
            detail={"fields": sorted(form.changed_data)},
        )


admin.site.unregister(Group)


@admin.register(Group)
class GroupAdmin(DjangoGroupAdmin, ModelAdmin):  # type: ignore[misc]  # Unfold ships no types
    """Named sets of permissions."""

    actions = None
