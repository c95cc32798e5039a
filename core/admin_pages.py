"""Admin pages that show rows and change them only through a service, on a confirmed POST.

Unfold's own row actions run on GET, which is a hole for forged requests; these pages take their place. Which rows,
which changes and which service is up to the admin classes of each app.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import urlencode

from django import forms
from django.contrib import messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import NON_FIELD_ERRORS, BadRequest, EmptyResultSet, PermissionDenied, ValidationError
from django.db import models
from django.forms.widgets import Script
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.cache import never_cache
from unfold.admin import ModelAdmin
from unfold.decorators import display
from unfold.views import ChangeList

from core.errors import ContractError
from core.roles import may
from wire import clock
from wire.contract import ErrorCode

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise as Promise  # of a text, as the stubs tell it from other promises
else:
    from django.utils.functional import Promise

Row = Any
"""An instance of the model an admin class is for. Django's admin does not say which, so neither can we."""
Method = TypeVar("Method", bound=Callable[..., object])
Values = Mapping[str, Any]
"""Cleaned data of a form."""
Text = str | Promise
"""What a page says; a promise is said in the language of the page."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The operation that would do with approval what a service refuses without. ``params``: as the operation takes them."""

    operation: str
    target: str
    params: Mapping[str, object]

    @property
    def url(self) -> str:
        """The page that proposes it, filled in."""
        return f"/approvals/propose?{urlencode({'operation': self.operation, 'target': self.target, **self.params})}"


@dataclass(frozen=True, slots=True)
class RowChange:
    """A change of one row that an operator may confirm.

    ``run(row, actor, values)`` calls the service and returns the sentence that says it is done, or what it made.
    ``is_offered`` hides a change that makes no sense in the row's state. ``form`` asks for more; its cleaned data become
    ``values``, and ``read_initial`` says what it holds at first. ``find_offer`` says what may be proposed when the service
    asks for approval.
    ``removes_row``: it is gone afterwards, so the list follows instead of its page. ``permission``: what it takes beside the
    one to change the row; the list, which asks nobody who they are, does not offer it.
    """

    name: str
    label: Text
    explanation: Text
    run: Callable[[Row, str, Values], str | Created]
    is_offered: Callable[[Row], bool] = lambda row: True
    form: type[forms.Form] | None = None
    is_danger: bool = False
    removes_row: bool = False
    permission: str = ""
    read_initial: Callable[[Row], Values] = lambda row: {}
    find_offer: Callable[[Row, Values], Offer | None] = lambda row, values: None


@dataclass(frozen=True, slots=True)
class NextStep:
    """What to do with something that was just made. ``command``: can be pasted as it stands; ``url``: a page.

    ``is_folded``: shown once somebody opens it.
    """

    text: Text
    command: str = ""
    url: str = ""
    is_folded: bool = False


@dataclass(frozen=True, slots=True)
class Created:
    """What a service made. ``secret`` is shown on the answering page only; ``usage`` and ``steps`` say what to do with it.

    ``trial``: the model that a button of that page asks with it, empty = there is no such button.
    """

    row: models.Model
    secret: str = ""
    usage: Text = ""
    steps: tuple[NextStep, ...] = ()
    trial: str = ""


@dataclass(frozen=True, slots=True)
class ChangeLink:
    """A change as a page offers it."""

    label: Text
    url: str
    is_danger: bool


def column(
    description: Text, *, ordering: str | None = None, label: Mapping[str, str] | None = None
) -> Callable[[Method], Method]:
    """Mark a method of an admin class as a column. ``label`` maps its text to the colour of a badge."""

    def mark(method: Method) -> Method:
        marked: Method = display(description=description, ordering=ordering, label=dict(label) if label else None)(method)
        return marked

    return mark


def name_actor(request: HttpRequest) -> str:
    return f"user:{request.user.get_username()}"


class RowList(ChangeList):  # type: ignore[misc]  # Unfold ships no types
    """The rows of a list. What its address asks for and no filter can mean, such as the year -1, is the caller's error."""

    def get_queryset(self, request: HttpRequest, exclude_parameters: list[str | None] | None = None) -> models.QuerySet[Any]:
        try:
            rows: models.QuerySet[Any] = super().get_queryset(request, exclude_parameters)
            with suppress(EmptyResultSet):
                # Some lookups convert their value only here, on the way to the database.
                rows.query.get_compiler(rows.db).as_sql()
        except ValueError as error:
            raise BadRequest(_("A filter in the address has a value that it cannot take. Remove it and try again.")) from error
        return rows


class FindingAdmin(ModelAdmin):  # type: ignore[misc]  # Unfold ships no types
    """Answers 404 for a row that is not there."""

    removed_because: ClassVar[Text] = gettext_lazy("It may have been removed.")
    """Why there may be none, as a sentence."""

    @property
    def media(self) -> forms.Media:
        """Return what every page needs, without Django's script of windows in which related rows are added.

        No page of ours opens one, and its listener for ``unload`` keeps browsers from going back in an instant.
        """
        media: forms.Media = super().media
        # Django merges media and takes nothing out, and its stubs do not show what they hold.
        scripts = [one for one in media._js if not str(one).endswith("/RelatedObjectLookups.js")]  # type: ignore[attr-defined]  # noqa: SLF001
        return forms.Media(css=media._css, js=scripts)  # type: ignore[attr-defined]  # noqa: SLF001

    def get_changelist(self, request: HttpRequest, **kwargs: object) -> type[RowList]:
        return RowList

    def _get_obj_does_not_exist_redirect(self, request: HttpRequest, opts: Any, object_id: str) -> HttpResponse:  # Any: untyped
        # Django's own would lead to the first page, as if nothing had been asked.
        raise Http404(
            _('There is no %(kind)s "%(id)s". %(reason)s')
            % {"kind": opts.verbose_name, "id": unquote(object_id), "reason": self.removed_because}
        )

    def render_page(self, request: HttpRequest, template: str, context: Mapping[str, Any]) -> TemplateResponse:  # Any: Django's
        whole = {**self.admin_site.each_context(request), "opts": self.opts, "media": self.media, **context}
        return TemplateResponse(request, template, whole)


class ShowingAdmin(FindingAdmin):
    """Shows rows. Nothing can be edited or deleted; ``row_changes`` are links to confirm pages."""

    row_changes: ClassVar[Sequence[RowChange]] = ()
    is_live: ClassVar[bool] = False
    """Whether an open list is kept current. Its ages are true either way: the list says as of when."""
    empty_words: ClassVar[Text] = ""
    """What the rows are for, shown while there is none, as a sentence; and where the first comes from."""
    empty_link: ClassVar[tuple[Text, str] | None] = None
    """Label and name of the URL that leads to the first row, where it is not this list's own *Add*."""
    actions: Sequence[str] | None = None
    list_filter_submit = True
    list_after_template = "admin/muster/list_as_of.html"
    change_form_outer_before_template = "admin/muster/row_changes.html"

    @property
    def media(self) -> forms.Media:
        """Return what every list needs, and the script that keeps this one current."""
        media: forms.Media = super().media
        script = Script("muster/list.js", type="module")
        return media + forms.Media(js=[script]) if self.is_live else media  # type: ignore[list-item]  # the stubs know text alone

    def changelist_view(
        self,
        request: HttpRequest,
        extra_context: dict[str, Any] | None = None,  # Any: Django's template context
    ) -> HttpResponse:
        """Show the list, and as of when it is."""
        context = {"as_of": clock.now() if self.is_live else None, **(extra_context or {})}
        return super().changelist_view(request, context)  # type: ignore[no-any-return]  # Unfold ships no types

    def may_change(self, request: HttpRequest) -> bool:
        # The permission to change: it allows ``row_changes``, not editing.
        return bool(super().has_change_permission(request))

    def has_add_permission(self, request: HttpRequest) -> bool:
        # Rows are made by services.
        return False

    def has_change_permission(self, request: HttpRequest, obj: models.Model | None = None) -> bool:
        # Fields are for reading; what may be done are ``row_changes``.
        return False

    def has_delete_permission(self, request: HttpRequest, obj: models.Model | None = None) -> bool:
        # Records point at rows.
        return False

    def get_list_display(self, request: HttpRequest) -> list[str]:
        """Return the columns; the one with changes is for those who may make them."""
        columns = super().get_list_display(request)
        may_change = self.may_change(request) and self.admin_site.may_act(request)
        return [name for name in columns if name != "show_changes" or may_change]

    def get_urls(self) -> list[URLPattern]:
        view = never_cache(self.admin_site.admin_view(self.confirm_view))
        own = path("<path:object_id>/change/<slug:change_name>/", view, name=self._url_name("confirm"))
        return [own, *super().get_urls()]

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,  # Any: Django's template context
    ) -> HttpResponse:
        """Show one row with links to what may be done to it."""
        row = self.get_object(request, unquote(object_id)) if object_id else None
        told = {"row_changes": self.list_links(request, row), **self.describe_row(request, row)} if row is not None else {}
        return super().changeform_view(request, object_id, form_url, {**(extra_context or {}), **told})  # type: ignore[no-any-return]  # Unfold ships no types

    def describe_row(self, request: HttpRequest, row: Row) -> dict[str, Any]:  # Any: Django's template context
        """Return what the page of a row shows beside its fields, as variables of ``change_form_outer_before_template``."""
        return {}

    def list_links(self, request: HttpRequest, row: Row) -> list[ChangeLink]:
        """Return the changes this operator may make to the row as it is now."""
        if not self.may_change(request):
            return []
        return [
            ChangeLink(change.label, self._confirm_url(row, change), change.is_danger)
            for change in self.row_changes
            if change.is_offered(row) and _may_make(request, change)
        ]

    @column(gettext_lazy("Actions"))
    def show_changes(self, row: Row) -> SafeString:
        """Return two of the row's changes as small links, the second of more leads to its page. Opening one shows a page."""
        offered = [c for c in self.row_changes if c.is_offered(row) and not c.permission]
        pairs = [(self._confirm_url(row, c), c.label) for c in offered]
        if len(pairs) > 2:
            pairs = [pairs[0], (reverse(f"admin:{self._url_name('change')}", args=[row.pk]), _("More"))]
        links = format_html_join(" · ", '<a class="text-primary-600 dark:text-primary-500" href="{}">{}</a>', pairs)
        return format_html('<span class="whitespace-nowrap">{}</span>', links)

    def confirm_view(self, request: HttpRequest, object_id: str, change_name: str) -> HttpResponse:
        """Ask on GET, act on POST. 403 without the change permission, 404 for an unknown row or change."""
        if not self.may_change(request):
            raise PermissionDenied
        row = self.get_object(request, unquote(object_id))
        change = next((c for c in self.row_changes if c.name == change_name), None)
        if row is None or change is None:
            raise Http404
        if not _may_make(request, change):
            raise PermissionDenied
        back_url = reverse(f"admin:{self._url_name('change')}", args=[row.pk])
        if not change.is_offered(row):
            messages.warning(
                request,
                _("%(change)s: nothing to do. %(row)s has changed in the meantime.") % {"change": change.label, "row": row},
            )
            return HttpResponseRedirect(back_url)
        sent = request.POST if request.method == "POST" else None
        form = (change.form or forms.Form)(sent, initial=dict(change.read_initial(row)))
        if request.method == "POST" and form.is_valid():
            done = self._run_change(request, change, row, form)
            if isinstance(done, Created):
                return self._show_secret(request, done, back_url)
            if done is not None:
                messages.success(request, done)
                return HttpResponseRedirect(
                    reverse(f"admin:{self._url_name('changelist')}") if change.removes_row else back_url
                )
        offer = change.find_offer(row, form.cleaned_data) if needs_approval(form) else None
        context = {
            "title": _("%(change)s: %(row)s?") % {"change": change.label, "row": row},
            "explanation": change.explanation,
            "button": change.label,
            "is_danger": change.is_danger,
            "form": form,
            "back_url": back_url,
            "offer": offer,
        }
        return self.render_page(request, "admin/muster/confirm.html", context)

    def _run_change(self, request: HttpRequest, change: RowChange, row: Row, form: forms.Form) -> str | Created | None:
        try:
            return change.run(row, name_actor(request), form.cleaned_data)
        except ContractError as refusal:
            form.add_error(None, ValidationError(str(refusal), code=refusal.code.value))
            return None

    def _show_secret(self, request: HttpRequest, created: Created, back_url: str) -> HttpResponse:
        # On the answer itself: a secret passes no session and no cache.
        page = {"title": f"{created.row}", "secret": created.secret, "usage": created.usage, "steps": created.steps}
        page |= {"trial": created.trial, "back_url": back_url}
        response = self.render_page(request, "admin/muster/secret.html", page)
        response["Cache-Control"] = "no-store"
        return response

    def _confirm_url(self, row: Row, change: RowChange) -> str:
        return reverse(f"admin:{self._url_name('confirm')}", args=[row.pk, change.name])

    def _url_name(self, page: str) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}_{page}"


class CreatingAdmin(ShowingAdmin):
    """Shows rows, and makes new ones through a service (``create``) from the fields of ``create_form``."""

    create_form: ClassVar[type[forms.Form]]
    create_title: ClassVar[Text]
    create_explanation: ClassVar[Text] = ""

    def create(self, actor: str, values: Values) -> Created:
        """Call the service with the cleaned values of ``create_form``. May raise ContractError."""
        raise NotImplementedError

    def find_offer(self, values: Values) -> Offer | None:
        """Return what may be proposed when the service asks for approval."""
        del values
        return None

    def has_add_permission(self, request: HttpRequest) -> bool:
        # A session that may only look is offered no *Add*.
        return self._may_create(request) and self.admin_site.may_act(request)

    def _may_create(self, request: HttpRequest) -> bool:
        return bool(ModelAdmin.has_add_permission(self, request))

    def add_view(
        self,
        request: HttpRequest,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,  # Any: Django's template context
    ) -> HttpResponse:
        """Ask on GET, create on POST. A secret is shown on the answer itself: it passes no session and no cache."""
        if not self._may_create(request):  # who may only look sees the form, disabled, below the reason
            raise PermissionDenied
        form = self.create_form(request.POST if request.method == "POST" else None, initial=request.GET.dict())
        created = self._try_create(request, form) if request.method == "POST" and form.is_valid() else None
        list_url = reverse(f"admin:{self._url_name('changelist')}")
        if created is None:
            context = {
                "title": self.create_title,
                "explanation": self.create_explanation,
                "button": _("Create"),
                "form": form,
                "back_url": list_url,
                "offer": self.find_offer(form.cleaned_data) if needs_approval(form) else None,
            }
            return self.render_page(request, "admin/muster/confirm.html", context)
        if not created.secret:
            messages.success(request, _("Created %(row)s.") % {"row": created.row})
            return HttpResponseRedirect(list_url)
        return self._show_secret(request, created, list_url)

    def _try_create(self, request: HttpRequest, form: forms.Form) -> Created | None:
        try:
            return self.create(name_actor(request), form.cleaned_data)
        except ContractError as refusal:
            is_on_field = refusal.param in form.fields and refusal.code is not ErrorCode.APPROVAL_REFUSED
            form.add_error(refusal.param if is_on_field else None, ValidationError(str(refusal), code=refusal.code.value))
            return None


def _may_make(request: HttpRequest, change: RowChange) -> bool:
    return not change.permission or may(request.user, change.permission)


def needs_approval(form: forms.Form) -> bool:
    """Return whether a service refused the form because the change has to be approved."""
    return form.is_bound and form.has_error(NON_FIELD_ERRORS, ErrorCode.APPROVAL_REFUSED.value)
