"""The page of kept answers of /v1/responses. They hold prompts: a page shows them to those who may view them, when asked."""

from __future__ import annotations

import msgspec
from django.contrib import admin
from django.db.models import F, Func, IntegerField, Model, QuerySet
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.utils.html import format_html
from django.utils.safestring import SafeString

from core.admin_pages import ShowingAdmin, column
from core.limits import limits
from gateway.admin.paginator import EstimatedPaginator
from gateway.models import StoredResponse

_SIZE = Func(F("body"), function="octet_length", output_field=IntegerField()) + Func(
    F("input_items"), function="octet_length", output_field=IntegerField()
)


@admin.register(StoredResponse)
class StoredResponseAdmin(ShowingAdmin):
    """Kept answers, newest first. Contents are read for the page of one row alone."""

    list_display = ("id", "tenant", "model", "show_size", "created_at", "expires_at")
    list_select_related = ("tenant",)
    list_filter = ("tenant",)
    empty_words = (
        "Answers of /v1/responses are kept here, with their prompts, for tenants that have Keep answers switched on: "
        "their clients can go on from an earlier answer."
    )
    empty_link = ("Choose a tenant", "admin:gateway_tenant_changelist")
    search_fields = ("id__exact",)
    search_help_text = "The id of a response: resp_…"
    ordering = ("-created_at",)
    sortable_by = ("created_at", "expires_at")
    paginator = EstimatedPaginator
    show_full_result_count = False
    list_per_page = 50
    list_max_show_all = 0
    fields = (
        "id",
        "tenant",
        "key_id",
        "model",
        "previous_id",
        "created_at",
        "expires_at",
        "show_size",
        "show_input",
        "show_body",
    )
    readonly_fields = fields

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Ask for the permission to view itself: that to change stands for it on other pages, and here it shows prompts."""
        return bool(request.user.has_perm("gateway.view_storedresponse"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[StoredResponse]:
        """Leave contents in the database; sizes come without them."""
        queryset: QuerySet[StoredResponse] = super().get_queryset(request)
        return queryset.defer("input_items", "body").annotate(size_bytes=_SIZE)

    @column("Size")
    def show_size(self, response: StoredResponse) -> str:
        """Return how much is kept."""
        return filesizeformat(getattr(response, "size_bytes", 0))

    @column("Input")
    def show_input(self, response: StoredResponse) -> SafeString:
        """Return the input, folded."""
        return _fold(bytes(response.input_items))

    @column("Answer")
    def show_body(self, response: StoredResponse) -> SafeString:
        """Return the response object, folded."""
        return _fold(bytes(response.body))


def _fold(content: bytes) -> SafeString:
    """Return JSON behind a disclosure: indented when it is short, else its beginning."""
    if len(content) <= limits().gateway.page_body_chars:
        text = msgspec.json.format(content, indent=2).decode()
    else:
        text = content[: limits().gateway.page_body_chars].decode(errors="replace") + " …"
    return format_html(
        '<details><summary class="cursor-pointer">Show</summary>'
        '<pre class="max-w-full whitespace-pre-wrap break-words">{}</pre></details>',
        text,
    )
