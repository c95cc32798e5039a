"""Every address of the REST API answers as its OpenAPI document says, whatever is sent: schemathesis, in process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schemathesis
from django.conf import settings as django_settings
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections
from drf_spectacular.drainage import GENERATOR_STATS
from drf_spectacular.generators import SchemaGenerator
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi import checks

from governance import services
from governance.api.schema import STREAM_PATH
from nodes.services import create_credential, create_provider
from tests.system.governance.team import make_team, propose_token
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
    _, admin = services.create_admin_token(name="fuzz", actor="user:ana", owner=team[0].user)
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


TEXTS = st.text(max_size=12) | st.sampled_from(
    ["control-plane", "ci", "all", "muster-tiny", "attic#kq3mzp6a7x2d5n4bwlhvyt3cre"]
)
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["name", "modelId", "scope", "tenantId", "contextLength", "evictModel", "force", "limit"]) | TEXTS
PROPOSALS = st.fixed_dictionaries(
    {
        "operation": st.sampled_from(sorted(django_settings.OPERATIONS)),
        "targets": st.lists(TEXTS, max_size=2),
        "params": st.dictionaries(NAMES, VALUES, max_size=3),
        "reason": st.text(min_size=1, max_size=20),
    },
    optional={
        "op_class": st.sampled_from(["", "standing", "break-glass", "model-load"]),
        "max_uses": st.integers(-1, 1001),
        "not_before": st.datetimes().map(lambda moment: moment.isoformat() + "Z"),
        "not_after": st.datetimes().map(lambda moment: moment.isoformat() + "Z"),
        "reviews": TEXTS | st.uuids().map(str),
    },
)
BYTES = st.binary(max_size=60).map(encode_bytes) | TEXTS


def test_whatever_is_asked_for_or_shown_as_a_proof_is_answered_as_described(document: BaseSchema) -> None:
    team = make_team()
    _, admin = services.create_admin_token(name="fuzz", actor="user:ana")
    team.start()
    target = propose_token(team[1])
    proof, headers = team[0].proof(target), {"Authorization": f"Bearer {admin}"}
    proofs = st.fixed_dictionaries(
        {name: st.just(value) | BYTES for name, value in proof.items()}, optional={"more": TEXTS}
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
