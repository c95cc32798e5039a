"""What every list of the admin says: what it is for while it is empty, and as of when it is."""

from __future__ import annotations

import re

import pytest
from django.test import Client
from django.urls import reverse

from tests.system.gateway_admin.factories import make_operator
from tests.system.nodes.factories import make_node

pytestmark = pytest.mark.django_db

EMPTY = {
    "nodes_node": ("A node is a machine with GPUs that answers requests.", "admin:nodes_nodecredential_add"),
    "nodes_nodecredential": ("A node shows its credential when it connects.", "admin:nodes_nodecredential_add"),
    "nodes_provider": ("A provider is a group of nodes", "admin:nodes_provider_add"),
    "gateway_model": ("Clients may use the models that are allowed here.", "admin:gateway_model_add"),
    "gateway_modelalias": ("An alias is another name for models", "admin:gateway_modelalias_add"),
    "gateway_storedresponse": ("Answers of /v1/responses are kept here", "admin:gateway_tenant_changelist"),
    "gateway_apikey": ("A client sends an API key with every request.", "admin:gateway_apikey_add"),
    "gateway_tenant": ("A tenant is a team or a customer.", "admin:gateway_tenant_add"),
    "governance_admintoken": ("Programs send an admin token", "admin:governance_admintoken_add"),
    "governance_webhookendpoint": (
        "Webhooks tell Slack, PagerDuty or a program of yours",
        "admin:governance_webhookendpoint_add",
    ),
}
"""List → what it is for, and the page that adds the first."""
LIVE = ("nodes_node", "gateway_apikey", "gateway_requestrecord", "gateway_gatewayprocess")


@pytest.fixture
def boss() -> Client:
    """The browser of an operator who may do everything."""
    client = Client()
    client.force_login(make_operator())
    return client


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_list_says_what_it_is_for_and_how_to_add_the_first(boss: Client, name: str) -> None:
    page = boss.get(reverse(f"admin:{name}_changelist")).content.decode()
    shown = page.split('class="mst-empty"')[1].split("</div>")[0]
    words, url = EMPTY[name]

    assert words in shown
    assert f'href="{reverse(url)}' in shown
    assert "yielded" not in page


@pytest.mark.parametrize("query", ["?q=no-such-thing", "?status=error"])
def test_a_search_or_a_filter_that_matches_nothing_says_that_and_not_that_there_is_nothing(boss: Client, query: str) -> None:
    make_node("attic")
    page = boss.get(reverse("admin:nodes_node_changelist") + query).content.decode()

    assert "Nothing matches" in page
    assert "No nodes yet" not in page


@pytest.mark.parametrize("name", LIVE)
def test_a_list_with_ages_is_kept_current_and_says_as_of_when_it_is(boss: Client, name: str) -> None:
    page = boss.get(reverse(f"admin:{name}_changelist")).content.decode()

    assert re.search(r'id="list-as-of"[^>]*>As of \d\d:\d\d:\d\d UTC<', page)
    assert re.search(r'<script[^>]*src="/static/muster/list.js"[^>]*type="module"|<script[^>]*type="module"[^>]*list.js', page)
