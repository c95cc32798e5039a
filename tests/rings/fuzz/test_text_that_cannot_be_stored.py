"""Text and numbers that PostgreSQL cannot take are refused as what they are, wherever a page or the REST API takes any."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from django.contrib import admin
from django.db import DataError
from django.db.models import Model
from django.test import Client, RequestFactory
from django.urls import reverse
from django.utils import timezone

from controlplane.api_errors import describe_error
from governance.models import AuditEvent
from governance.services import create_admin_token
from tests.fakes.nodes import make_node
from tests.system.gateway_admin.factories import make_operator
from wire.contract import ErrorCode

pytestmark = pytest.mark.django_db

TEXTS = ("\0", "a\0b", "9" * 30, "99999-01-01", "\udc80", "2024-13-45T25:61", "\u202e'\"\\%_;--")
HOSTILE = (*TEXTS, "-1", "10000")
DATES = ("__gte", "__lt", "__year", "__iso_year", "__date")
LOOKUPS = ("", "__exact", "__in", "__isnull", "__id__exact", "__pk__exact", *DATES)
MODELS = tuple(admin.site._registry)


def client_that_sees_500() -> Client:
    client = Client(raise_request_exception=False)
    client.force_login(make_operator())
    return client


def list_parameters(model: type[Model]) -> list[str]:
    """Return every parameter that the list of a model takes."""
    shown = admin.site._registry[model]
    request = RequestFactory().get("/")
    found = ["q", "p", "o", "all", shown.date_hierarchy or "", "no_such_field"]
    for each in shown.get_list_filter(request):
        name = each[0] if isinstance(each, tuple) else each
        found += [f"{name}{lookup}" for lookup in LOOKUPS] if isinstance(name, str) else [getattr(name, "parameter_name", "")]
    return [name for name in found if name]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model._meta.label)
def test_no_filter_search_or_address_of_an_operators_list_breaks(model: type[Model]) -> None:
    client = client_that_sees_500()
    name = f"admin:{model._meta.app_label}_{model._meta.model_name}"
    url = reverse(f"{name}_changelist")
    assert client.get(url).status_code == 200
    for parameter in list_parameters(model):
        for value in HOSTILE:
            assert client.get(f"{url}?{parameter}={quote(value, errors='surrogatepass')}").status_code < 500, (parameter, value)
    for value in (*TEXTS, "a_00b", "_00"):
        for page in ("", "/change", "/history", "/delete"):
            address = f"{url}{quote(value, errors='surrogatepass')}{page}/"
            assert client.get(address).status_code < 500, address


@pytest.mark.parametrize("query", ["at__year=-1", "at__year=0", "at__year=10000"])
def test_a_list_refuses_a_year_that_no_calendar_has_in_words_and_takes_every_other(query: str) -> None:
    AuditEvent.objects.create(actor="system:test", action="test.event", target="this year")
    client = client_that_sees_500()
    url = reverse("admin:governance_auditevent_changelist")
    refused = client.get(f"{url}?{query}")
    assert refused.status_code == 400
    assert "A filter in the address has a value that it cannot take. Remove it and try again." in refused.content.decode()
    year = timezone.now().year
    assert "this year" in client.get(f"{url}?at__year={year}").content.decode()
    assert "this year" not in client.get(f"{url}?at__year={year - 1}").content.decode()


@pytest.mark.parametrize("error", [DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes"), OverflowError("int")])
def test_a_program_is_told_the_same_in_the_contracts_envelope(error: Exception) -> None:
    said = describe_error(error)
    assert said is not None
    assert (said.status, said.code, said.retryable) == (400, ErrorCode.BAD_REQUEST, False)
    assert "Remove it and try again." in said.message


def list_rest() -> list[tuple[str, list[str]]]:
    """Return the paths of the REST API that are read, and their query parameters."""
    paths = Client().get("/api/schema?format=json").json()["paths"]
    return [
        (path, [each["name"] for each in said["get"].get("parameters", []) if each["in"] == "query"])
        for path, said in paths.items()
        if "get" in said
    ]


def test_no_query_or_path_of_the_rest_api_breaks() -> None:
    _, token = create_admin_token(name="test", actor="user:test")
    client = Client(raise_request_exception=False, headers={"Authorization": f"Bearer {token}"})
    for path, parameters in list_rest():
        for value in HOSTILE:
            quoted = quote(value, safe="", errors="surrogatepass")
            address = "/".join(quoted if part.startswith("{") else part for part in path.split("/"))
            queries = [f"?{name}={quoted}" for name in (*parameters, "no_such")]
            for asked in (address, *(f"{address}{query}" for query in queries)):
                assert client.get(asked).status_code < 500, asked
