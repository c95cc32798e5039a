"""Pages and the REST API answer as their OpenAPI document says, whatever is sent, text that cannot be stored included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
import schemathesis
from django.conf import settings as django_settings
from django.contrib import admin
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import DataError, close_old_connections
from django.db.models import Model
from django.test import Client, RequestFactory
from django.urls import reverse
from django.utils import timezone
from drf_spectacular.drainage import GENERATOR_STATS
from drf_spectacular.generators import SchemaGenerator
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi import checks

from controlplane.api_errors import describe_error
from governance import admin_tokens
from governance.admin_tokens import create_admin_token
from governance.models import AuditEvent
from governance.rest.answers import STREAM_PATH
from nodes.services.credentials import create_credential, create_provider
from tests.fakes.governed_team import make_team, propose_token
from tests.fakes.nodes import make_operator
from wire.contract import ErrorCode
from wire.optoken.approval import encode_bytes

pytestmark = pytest.mark.timeout(240)
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
WITHOUT_CREDENTIAL = [*CHECKS, checks.ignored_auth]
"""Asks again without a credential and with a wrong one."""
EXAMPLES = 6
"""For each address and kind of data. What they are is fixed: a run differs from the last one only when the code does."""


@pytest.fixture
def document(db: None) -> Iterator[BaseSchema]:
    """The document that the server hands out, with the application behind it, inside the transaction of the test."""
    application = get_wsgi_application()
    for signal in (request_started, request_finished):  # as Django's own test client does
        signal.disconnect(close_old_connections)
    try:
        yield schemathesis.openapi.from_wsgi("/api/schema?format=json", application)
    finally:
        for signal in (request_started, request_finished):
            signal.connect(close_old_connections)


def test_the_document_is_made_without_a_warning() -> None:
    GENERATOR_STATS.reset()
    made = SchemaGenerator().get_schema(request=None, public=True)  # type: ignore[no-untyped-call]  # drf-spectacular
    assert STREAM_PATH in made["paths"]
    assert not GENERATOR_STATS, (GENERATOR_STATS._warn_cache, GENERATOR_STATS._error_cache)


def test_every_address_keeps_to_its_description(document: BaseSchema) -> None:
    team = make_team()
    _, admin = admin_tokens.create_admin_token(name="fuzz", actor="user:ana", owner=team[0].user)
    team.start()
    create_provider(name="local", actor="user:ana")
    _, worker = create_credential(name="box", provider_name="local", actor="user:ana")
    op_id = propose_token(team[1]).printed_id
    for found in document.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        if operation.path == STREAM_PATH:
            continue  # never ends; it has its own tests
        is_of_boxes = "nodeToken" in str(operation.definition.raw.get("security"))
        headers = {"Authorization": f"Bearer {worker if is_of_boxes else admin}"}
        _attack(operation.as_strategy(GenerationMode.POSITIVE), headers, WITHOUT_CREDENTIAL)
        if operation.body or operation.query:
            _attack(operation.as_strategy(GenerationMode.NEGATIVE), headers, CHECKS)
        if "{op_id}" in operation.path:
            _attack(operation.as_strategy(path_parameters={"op_id": op_id}), headers, CHECKS)


WORDS = st.text(max_size=12) | st.sampled_from(
    ["control-plane", "ci", "all", "muster-tiny", "attic#kq3mzp6a7x2d5n4bwlhvyt3cre"]
)
VALUES = st.recursive(
    WORDS | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["name", "modelId", "scope", "tenantId", "contextLength", "evictModel", "force", "limit"]) | WORDS
PROPOSALS = st.fixed_dictionaries(
    {
        "operation": st.sampled_from(sorted(django_settings.OPERATIONS)),
        "targets": st.lists(WORDS, max_size=2),
        "params": st.dictionaries(NAMES, VALUES, max_size=3),
        "reason": st.text(min_size=1, max_size=20),
    },
    optional={
        "op_class": st.sampled_from(["", "standing", "break-glass", "model-load"]),
        "max_uses": st.integers(-1, 1001),
        "not_before": st.datetimes().map(lambda moment: moment.isoformat() + "Z"),
        "not_after": st.datetimes().map(lambda moment: moment.isoformat() + "Z"),
        "reviews": WORDS | st.uuids().map(str),
    },
)
BYTES = st.binary(max_size=60).map(encode_bytes) | WORDS


def test_whatever_is_asked_for_or_shown_as_a_proof_is_answered_as_described(document: BaseSchema) -> None:
    team = make_team()
    _, admin = admin_tokens.create_admin_token(name="fuzz", actor="user:ana")
    team.start()
    target = propose_token(team[1])
    proof, headers = team[0].proof(target), {"Authorization": f"Bearer {admin}"}
    proofs = st.fixed_dictionaries(
        {name: st.just(value) | BYTES for name, value in proof.items()}, optional={"more": WORDS}
    )  # fmt: skip

    @_fixed(60)
    @given(PROPOSALS)
    def ask(body: dict[str, Any]) -> None:
        case = document["/api/v1/operations"]["POST"].Case(body=body, media_type="application/json")
        case.call_and_validate(headers=headers, checks=CHECKS)

    @_fixed(40)
    @given(proofs)
    def approve(body: dict[str, Any]) -> None:
        path = {"op_id": target.printed_id}
        approvals = document["/api/v1/operations/{op_id}/approvals"]["POST"]
        case = approvals.Case(path_parameters=path, body={"proof": body}, media_type="application/json")
        case.call_and_validate(headers=headers, checks=CHECKS)

    ask()
    approve()


def _fixed(examples: int) -> Callable[[Any], Any]:  # Any: decorators of Hypothesis
    """The same examples in every run, without shrinking: the first failure says enough."""
    fixed = settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    return lambda test: seed(7)(fixed(test))


def _attack(cases: st.SearchStrategy[Any], headers: dict[str, str], wanted: list[Any]) -> None:  # Any: schemathesis
    @_fixed(EXAMPLES)
    @given(cases)
    def attack(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(headers=headers, checks=wanted)

    attack()


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
@pytest.mark.django_db
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
@pytest.mark.django_db
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


@pytest.mark.django_db
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
