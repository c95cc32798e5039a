"""The operators page: who may sign in. People are the one kind of row that the admin itself writes."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from allauth.account.models import EmailAddress
from allauth.socialaccount.models import SocialAccount, SocialApp, SocialToken
from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.contrib.auth.admin import GroupAdmin as DjangoGroupAdmin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import Count, Exists, OuterRef, Q, QuerySet
from django.forms import ModelForm
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.text import format_lazy
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from django.views.decorators.cache import never_cache
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm
from unfold.widgets import UnfoldAdminCheckboxSelectMultipleWidget

from core.admin_pages import ChangeLink, FindingAdmin, Text, column, name_actor
from core.models import User
from core.roles import MEANINGS, Role, list_roles
from governance.audit import record_event
from governance.errors import GovernanceError
from governance.keys import list_keys
from governance.members import change_roles
from governance.people import create_invitation, make_invitation_url
from governance.signin import close_sessions, may_act

INVITATION_MEANING = gettext_lazy(
    "The person opens a link once, makes a passkey and is signed in. Earlier links of the person end. Who has lost every "
    "passkey comes back this way too; the new one approves only once a version of the policy names it."
)
RIGHTS = ("groups", "user_permissions")
ROLES_MEANING = gettext_lazy(
    "Takes effect with the next click of the person. Roles add up. A person without a role sees the tenants whose member they "
    "are, and operations if the policy names them."
)
SESSIONS_MEANING = gettext_lazy("The person is signed out everywhere at once and can sign in again.")
PASSKEY_ALONE_MEANING = gettext_lazy(
    "Disabled: the person signs in with a passkey alone. The next page makes the invitation that lets them make one."
)
INVITATION_USAGE = gettext_lazy("Hand this link to the person yourself. It works once, for 72 hours.")


class OperatorCreationForm(UserCreationForm):  # type: ignore[misc]  # Unfold ships no types
    """What is asked for a new person. Django's own words promise single sign-on and LDAP, which are not here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: Django's form arguments
        super().__init__(*args, **kwargs)
        field = self.fields["usable_password"]
        field.label, field.help_text = gettext_lazy("Sign in with a password"), PASSKEY_ALONE_MEANING
        field.initial = "false"
        name_help = gettext_lazy("At most 150 letters, digits and @ . + - _. It cannot be changed later.")
        self.fields["username"].help_text = name_help


class OperatorForm(UserChangeForm):  # type: ignore[misc]  # Unfold ships no types
    """The page of a person."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: Django's form arguments
        super().__init__(*args, **kwargs)
        if "password" in self.fields:
            kept, change = _("Muster stores only a hash of it."), _("Change the password")
            text = format_html('{} <a class="mst-link" href="../password/">{}</a>', kept, change)
            self.fields["password"].help_text = text
        if "groups" in self.fields:
            # Those of roles are given by *Change roles*, which keeps an owner and opens the console.
            self.fields["groups"].queryset = Group.objects.exclude(name__in=list(Role))

    def clean_groups(self) -> list[Group]:
        """Return the groups that were ticked, and the person's roles, which this page does not change."""
        return [*self.cleaned_data["groups"], *self.instance.groups.filter(name__in=list(Role))]


class RolesForm(forms.Form):
    """The roles of a person in the whole installation."""

    roles = forms.MultipleChoiceField(
        label=gettext_lazy("Roles"),
        required=False,
        choices=[
            (role.value, format_lazy("{name}: {meaning}", name=name, meaning=meaning))
            for role, (name, meaning) in MEANINGS.items()
            if not role.is_of_tenant
        ],
        widget=UnfoldAdminCheckboxSelectMultipleWidget,
    )


class TickingAdmin(FindingAdmin):
    """Lets groups and permissions be ticked: the two lists of Django's own script have no names for screen readers."""

    def formfield_for_manytomany(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:  # Any: Django's
        """Return check boxes instead of two lists to move rows between."""
        field = super().formfield_for_manytomany(db_field, request, **kwargs)
        if field is not None:
            field.widget = UnfoldAdminCheckboxSelectMultipleWidget(choices=field.choices)
            field.help_text = ""
        return field


@admin.register(User)
class UserAdmin(DjangoUserAdmin, TickingAdmin):  # type: ignore[type-arg, misc]  # not generic at run time; Unfold has no types
    """Operators. Switched off, never deleted: the audit trail names them."""

    form = OperatorForm
    filter_horizontal = ()
    add_form = OperatorCreationForm
    add_form_template = None
    add_fieldsets = (
        (
            None,
            {
                "description": gettext_lazy(
                    "The person becomes an approver; their page changes roles. An invitation lets the person sign in."
                ),
                "fields": ("username", "usable_password", "password1", "password2"),
            },
        ),
    )
    change_password_form = AdminPasswordChangeForm
    list_display = ("username", "email", "show_state", "show_roles", "show_source", "show_passkeys", "last_login")
    list_filter = ("is_active", "groups")
    fieldsets = (
        (None, {"fields": ("username", "password", "first_name", "last_name", "email", "is_active")}),
        (gettext_lazy("Roles"), {"fields": ("show_roles", "show_source", "last_login", "date_joined")}),
        (gettext_lazy("Permissions beyond roles"), {"classes": ("collapse",), "fields": RIGHTS}),
    )
    readonly_fields = ("show_roles", "show_source", "last_login", "date_joined")
    actions = None
    change_form_outer_before_template = "admin/muster/row_changes.html"

    def get_queryset(self, request: HttpRequest) -> QuerySet[User]:
        passkeys = Count("approver_keys", filter=Q(approver_keys__revoked_at__isnull=True))
        linked = Exists(SocialAccount.objects.filter(user_id=OuterRef("pk")))
        queryset: QuerySet[User] = super().get_queryset(request).annotate(passkeys=passkeys, is_linked=linked)
        return queryset.prefetch_related("groups", "memberships")

    @column(gettext_lazy("State"), ordering="is_active", label={"active": "success", "disabled": "default"})
    def show_state(self, person: User) -> tuple[str, str]:
        return ("active", _("active")) if person.is_active else ("disabled", _("disabled"))

    @column(gettext_lazy("Roles"))
    def show_roles(self, person: User) -> str:
        """Return the person's roles, those in tenants behind the others."""
        roles = [str(MEANINGS[role][0]) for role in list_roles(person)]
        for held in person.memberships.all():
            words = {"role": MEANINGS[Role(held.role)][0], "tenant": held.tenant}
            roles.append(_("%(role)s of %(tenant)s") % words)
        if not roles and person.is_staff:
            return _("as permitted")
        return ", ".join(roles) or _("none")

    @column(gettext_lazy("Account"))
    def show_source(self, person: User) -> str:
        """Return where the person signs in."""
        if not getattr(person, "is_linked", False):
            return _("local")
        is_local = person.has_usable_password() or getattr(person, "passkeys", 0) > 0
        return _("single sign-on and local") if is_local else _("single sign-on")

    @column(gettext_lazy("Passkeys and key files"), ordering="passkeys")
    def show_passkeys(self, person: User) -> str:
        return str(getattr(person, "passkeys", 0)) if getattr(person, "passkeys", 0) else _("none yet")

    def has_add_permission(self, request: HttpRequest) -> bool:
        # A session that may only look is offered no form.
        return bool(super().has_add_permission(request)) and may_act(request)

    def has_delete_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        # The audit trail names people: an account is switched off instead.
        return False

    def has_change_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        # Whoever sets a password or makes a link could sign in as that person, so administrators are for administrators.
        is_above = obj is not None and obj.is_superuser and not getattr(request.user, "is_superuser", False)
        return not is_above and may_act(request) and bool(super().has_change_permission(request, obj))

    def get_readonly_fields(self, request: HttpRequest, obj: User | None = None) -> tuple[str, ...]:
        """Return what nobody changes here; the name of a person stays, and rights are given by administrators."""
        fixed = (*self.readonly_fields, *(("username",) if obj is not None else ()))
        return fixed if getattr(request.user, "is_superuser", False) else (*fixed, *RIGHTS)

    def get_urls(self) -> list[URLPattern]:
        own = {"invite": self.invite_view, "roles": self.roles_view, "sessions": self.sessions_view}
        return [
            *(
                path(
                    f"<path:object_id>/{name}/", never_cache(self.admin_site.admin_view(view)), name=f"controlplane_user_{name}"
                )
                for name, view in own.items()
            ),
            *super().get_urls(),
        ]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,  # Any: Django's template context
    ) -> HttpResponse:
        links = []
        if self.has_change_permission(request):
            named = {"invite": gettext_lazy("Invite"), "sessions": gettext_lazy("End sessions")}
            if getattr(request.user, "is_superuser", False):
                named = {"roles": gettext_lazy("Change roles"), **named}
            urls = {name: reverse(f"admin:controlplane_user_{name}", args=[object_id]) for name in named}
            links = [ChangeLink(label, urls[name], is_danger=False) for name, label in named.items()]
        return super().change_view(request, object_id, form_url, {**(extra_context or {}), "row_changes": links})

    def roles_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask for the roles of a person on GET, give exactly those on POST. For owners alone."""
        person = self._find_person(request, object_id)
        if not getattr(request.user, "is_superuser", False):
            raise PermissionDenied
        sent = request.POST if request.method == "POST" else None
        form = RolesForm(sent, initial={"roles": [role.value for role in list_roles(person)]})
        if request.method == "POST" and form.is_valid():
            try:
                change_roles(person=person, roles=list(map(Role, form.cleaned_data["roles"])), actor=name_actor(request))
            except GovernanceError as refusal:
                form.add_error("roles", refusal.message)
            else:
                messages.success(request, _("Changed the roles of %(person)s.") % {"person": person})
                return HttpResponseRedirect(reverse("admin:controlplane_user_change", args=[person.pk]))
        title = _("Roles of %(person)s") % {"person": person}
        return self._ask(request, person, form, title=title, explanation=ROLES_MEANING, button=_("Change roles"))

    def sessions_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask on GET; on POST sign a person out everywhere."""
        person = self._find_person(request, object_id)
        form = forms.Form(request.POST if request.method == "POST" else None)
        if request.method == "POST":
            ended = close_sessions(person=person, actor=name_actor(request))
            said = ngettext("%(count)s session ended.", "%(count)s sessions ended.", ended)
            messages.success(request, said % {"count": ended})
            return HttpResponseRedirect(reverse("admin:controlplane_user_change", args=[person.pk]))
        title = _("End the sessions of %(person)s?") % {"person": person}
        return self._ask(request, person, form, title=title, explanation=SESSIONS_MEANING, button=_("End sessions"))

    def _find_person(self, request: HttpRequest, object_id: str) -> User:
        """Return a person whose account may be changed. Raises PermissionDenied, Http404."""
        person: User | None = self.get_object(request, unquote(object_id))
        if not self.has_change_permission(request, person):
            raise PermissionDenied
        if person is None:
            raise Http404
        return person

    def _ask(self, request: HttpRequest, person: User, form: forms.Form, **said: Text) -> HttpResponse:
        back_url = reverse("admin:controlplane_user_change", args=[person.pk])
        return self.render_page(request, "admin/muster/confirm.html", {**said, "form": form, "back_url": back_url})

    def invite_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask on GET; on POST make an invitation and show its link, which is stored nowhere."""
        person = self._find_person(request, object_id)
        if list_keys(person) and not request.user.is_superuser:
            # Whoever holds the link signs in as that person: it must not be a way into an account that somebody uses.
            raise PermissionDenied
        form = forms.Form(request.POST if request.method == "POST" else None)
        back_url = reverse("admin:controlplane_user_change", args=[person.pk])
        if request.method == "POST" and form.is_valid():
            try:
                _invitation, text = create_invitation(user=person, actor=name_actor(request))
            except GovernanceError as refusal:
                form.add_error(None, refusal.message)
            else:
                page = {
                    "title": _("Invitation of %(person)s") % {"person": person},
                    "secret": make_invitation_url(text),
                    "usage": INVITATION_USAGE,
                }
                response = self.render_page(request, "admin/muster/secret.html", {**page, "back_url": back_url})
                response["Cache-Control"] = "no-store"
                return response
        title = _("Invite %(person)s?") % {"person": person}
        return self._ask(request, person, form, title=title, explanation=INVITATION_MEANING, button=_("Make a link"))

    def user_change_password(self, request: HttpRequest, id: str, form_url: str = "") -> HttpResponse:  # noqa: A002  # Django's name
        """Set somebody's password, and write down that it was done."""
        with transaction.atomic():
            response: HttpResponse = super().user_change_password(request, id, form_url)
            person = self.get_object(request, unquote(id))
            if request.method == "POST" and response.status_code == HTTPStatus.FOUND and person is not None:
                detail = {"fields": ["password"]}
                record_event(actor=name_actor(request), action="operator.change", target=person.username, detail=detail)
        return response

    def response_add(self, request: HttpRequest, obj: User, post_url_continue: str | None = None) -> HttpResponse:
        """Lead to the invitation of a person who has no other way in, else to the person's page."""
        if obj.has_usable_password():
            return super().response_add(request, obj, post_url_continue)
        messages.success(request, _("Created %(row)s.") % {"row": obj})
        return HttpResponseRedirect(reverse("admin:controlplane_user_invite", args=[obj.pk]))

    def save_related(self, request: HttpRequest, form: ModelForm[User], formsets: Any, change: bool) -> None:  # Any: Django's
        """Store groups and permissions; whoever got some beyond roles sees the console from now on."""
        super().save_related(request, form, formsets, change)
        if not change:
            # Whoever is invited to sign the first policy has to read it.
            change_roles(person=form.instance, roles=[Role.APPROVER], actor=name_actor(request))
        elif {"groups", "user_permissions"} & set(form.changed_data):
            change_roles(person=form.instance, roles=list_roles(form.instance), actor=name_actor(request))

    def save_model(self, request: HttpRequest, obj: User, form: ModelForm[User], change: bool) -> None:
        super().save_model(request, obj, form, change)
        record_event(
            actor=name_actor(request),
            action="operator.change" if change else "operator.create",
            target=obj.username,
            # Which fields, never what they hold.
            detail={"fields": sorted(form.changed_data)},
        )


admin.site.unregister([Group, EmailAddress, SocialAccount, SocialApp, SocialToken])


@admin.register(Group)
class GroupAdmin(DjangoGroupAdmin, TickingAdmin):  # type: ignore[misc]  # Unfold has no types
    """Named sets of permissions."""

    actions = None
    filter_horizontal = ()

    def has_add_permission(self, request: HttpRequest, obj: Group | None = None) -> bool:
        # Administrators alone: whoever is in a group could give it more.
        return bool(request.user.is_active and getattr(request.user, "is_superuser", False)) and may_act(request)

    has_change_permission = has_add_permission

    def has_delete_permission(self, request: HttpRequest, obj: Group | None = None) -> bool:
        return not _is_role(obj) and self.has_add_permission(request)

    def get_readonly_fields(self, request: HttpRequest, obj: Group | None = None) -> tuple[str, ...]:
        return ("name",) if _is_role(obj) else ()

    def save_related(self, request: HttpRequest, form: ModelForm[Group], formsets: Any, change: bool) -> None:  # Any: Django's
        super().save_related(request, form, formsets, change)
        detail = {"permissions": sorted(form.instance.permissions.values_list("codename", flat=True))}
        record_event(actor=name_actor(request), action="group.change", target=form.instance.name, detail=detail)


def _is_role(group: Group | None) -> bool:
    return group is not None and group.name in set(Role)
