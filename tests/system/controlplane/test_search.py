"""The search of the admin's pages: what it finds, for whom, and at what cost."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from gateway.services import allow_model
from tests.system.gateway_admin.factories import ACTOR, make_key, make_operator, make_record
from tests.system.nodes.factories import make_node

pytestmark = pytest.mark.django_db
MOST_QUERIES = 12
"""Session, operator, what waits for approval, and one for each kind of row."""


@pytest.fixture
def boss() -> Client:
    """The browser of an operator who may do everything."""
    client = Client()
    client.force_login(make_operator())
    return client


def search(client: Client, text: str) -> str:
    return client.get(reverse("admin:search"), {"s": text, "extended": "1"}).content.decode()


def test_nodes_models_keys_and_pages_are_found_by_a_part_of_their_name(boss: Client) -> None:
    node = make_node("rack-2")
    allow_model(name="rack-tuned", actor=ACTOR)
    key, _ = make_key("rack bot")
    make_operator("racker", is_superuser=False)
    found = search(boss, "RACK")

    assert reverse("admin:nodes_node_change", args=[node.pk]) in found
    assert reverse("admin:gateway_apikey_change", args=[key.pk]) in found
    assert "rack-tuned" in found
    assert "racker" in found
    assert reverse("admin:gateway_modelalias_changelist") in search(boss, "alias")


def test_a_request_is_found_by_its_id(boss: Client) -> None:
    record = make_record()

    assert reverse("admin:gateway_requestrecord_change", args=[record.pk]) in search(boss, record.printed_id)


def test_a_new_row_is_found_at_once(boss: Client) -> None:
    assert "Nothing found" in search(boss, "rack-2")
    make_node("rack-2")
    assert "Nothing found" not in search(boss, "rack-2")


@pytest.mark.parametrize("text", ["no such thing", "<script>alert(1)</script>", "%", "\x00", "req_" + "0" * 32])
def test_where_nothing_is_found_it_says_so(boss: Client, text: str) -> None:
    assert "Nothing found" in search(boss, text)


def test_an_operator_finds_only_what_they_may_look_at() -> None:
    make_node("rack-2")
    make_key("rack bot")
    person = make_operator("bob", is_superuser=False)
    person.user_permissions.add(Permission.objects.get(codename="view_node"))
    client = Client()
    client.force_login(person)
    found = search(client, "rack")

    assert "rack-2" in found
    assert "rack bot" not in found


def test_many_finds_are_cut_and_cost_no_more_queries(boss: Client) -> None:
    counts = []
    for first in (0, 20):
        for number in range(first, first + 20):
            make_node(f"rack-{number}")
            make_key(f"rack key {number}")
        with CaptureQueriesContext(connection) as queries:
            found = search(boss, "rack")
        counts.append(len(queries))
        assert found.count("<li") == 10

    assert counts[0] == counts[1] <= MOST_QUERIES, counts
