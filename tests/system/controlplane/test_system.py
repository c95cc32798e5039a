"""The page System, and the audit list: what they say of an installation that is well and of one that is not."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from html import unescape

import pytest
from django.conf import LazySettings
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from controlplane.system import Sign, read_parts
from core.models import User
from gateway.models import GatewayProcess
from governance.audit import record_event
from nodes.models import Node
from tests.fakes.nodes import make_gateway, make_node
from wire import RELEASE, clock
from wire.variables import HIDDEN, hide_secret

pytestmark = pytest.mark.django_db

MOST_QUERIES = 15
"""Gateways, the database itself, the last look of the worker, the sums, versions, CAs, three of the audit log,
the last backup; a clock."""


def sign_in(name: str, *permissions: str, is_superuser: bool = False) -> Client:
    person = User.objects.create(username=name, is_staff=True, is_superuser=is_superuser)
    person.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(person)
    return client


def read(client: Client, name: str) -> str:
    response = client.get(reverse(name))
    assert response.status_code == 200
    return unescape(response.content.decode())


def test_each_part_says_how_it_stands_in_words() -> None:
    make_gateway()
    make_node("old", agent_version="0.0.1")
    make_node("new", agent_version=RELEASE)
    page = read(sign_in("ada", is_superuser=True), "system")
    for told in ("1 gateway is alive.", "The database answers.", "PostgreSQL 1", "Valkey answers.", "Tasks in the queue",
                 "1 node is older than this server.", "There is no internal CA", "No backup was made by"):  # fmt: skip
        assert told in page, told


def test_parts_that_are_not_well_ask_for_attention(settings: LazySettings) -> None:
    GatewayProcess.objects.filter(pk=make_gateway().pk).update(heartbeat_at=clock.now() - timedelta(minutes=2))
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    parts = {part.name: part for part in read_parts()}
    assert parts["Gateways"].sign is Sign.ATTENTION
    assert "writes no heartbeat" in parts["Gateways"].what
    assert parts["Valkey"].sign is Sign.ATTENTION
    assert parts["Backups"].sign is Sign.UNKNOWN
    assert not parts["Worker"].facts


def test_the_parts_take_as_many_queries_for_many_rows_as_for_few() -> None:
    counts = []
    for number in (1, 6):
        for index in range(number):
            make_gateway()
            make_node(f"n{number}-{index}", agent_version=f"0.0.{index}")
        with CaptureQueriesContext(connection) as queries:
            read_parts()
        counts.append(len(queries))
    assert counts[1] <= counts[0] <= MOST_QUERIES


def test_settings_are_for_administrators_and_hide_secrets() -> None:
    page = read(sign_in("ada", is_superuser=True), "system")
    for name in ("MUSTER_SECRET_KEY", "DATABASE_URL", "MUSTER_QUEUE_TIMEOUT_S", "MUSTER_LOG_LEVEL"):
        assert f"<code>{name}</code>" in page
    assert os.environ["MUSTER_SECRET_KEY"] not in page
    assert "MUSTER_QUEUE_TIMEOUT_S" not in read(sign_in("eve", "view_gatewayprocess"), "system")
    assert sign_in("bob", "view_node").get(reverse("system")).status_code == 403


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("MUSTER_SECRET_KEY", "abc", HIDDEN),
        ("MUSTER_CLUSTER_SECRET", "", ""),
        ("MUSTER_MAIL_PASSWORD", "abc", HIDDEN),
        ("MUSTER_LOG_KEY", "abc", HIDDEN),
        ("DATABASE_URL", "postgresql://muster:p:w@db/muster", f"postgresql://{HIDDEN}@db/muster"),
        ("REDIS_URL", "sentinel://u:pw@a:1,b:2/m", f"sentinel://{HIDDEN}@a:1,b:2/m"),
        ("MUSTER_ALLOW_QUERY_SECRET", "on", "on"),
        ("MUSTER_TICKET_KEY_DAYS", "30", "30"),
    ],
)
def test_a_secret_is_not_shown(name: str, text: str, shown: str) -> None:
    assert hide_secret(name, text) == shown


def test_a_variable_is_told_with_where_it_comes_from() -> None:
    program = "from controlplane.env import *; from controlplane.env import list_variables\n"
    program += "read_int('A', 7); read_bool('B', default=True); read_list('C', ['x', 'y'])\n"
    program += "read_text('D'); read_choice('E', {'en': ''})\n"
    program += "print([(v.name, v.text, v.origin) for v in list_variables()])"
    env = {**os.environ, "B": "no", "C": "", "D_FILE": "/dev/null"}
    told = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True).stdout
    expected = [
        ("A", "7", "default"),
        ("B", "no", "variable"),
        ("C", "x,y", "default"),
        ("D", "", "file"),
        ("E", "en", "default"),
    ]
    assert told.strip() == str(expected)


def test_the_audit_list_says_what_was_done_in_sentences() -> None:
    node: Node = make_node("rack-2")
    detail = {"keyid": "k1", "allowed_models": [], "limits": {"rpm": 5}, "is_new": True, "none": None}
    record_event(actor="user:ada", action="api_key.create", target="ci <b>", detail=detail)
    record_event(actor="system:sweep", action="node.drained", target=node.name)
    record_event(actor="user:ada", action="of.an_older_release", target="x")
    page = read(sign_in("ada", is_superuser=True), "admin:governance_auditevent_changelist")
    assert (
        'Created the API key <a class="mst-link" href="/admin/gateway/apikey/?q=ci+%3Cb%3E" title="ci <b>">ci <b></a>' in page
    )
    assert "keyid: k1 · is new: yes · limits: rpm 5" in page
    assert "allowed_models" not in page
    assert "The node <a" in page
    assert "Muster (sweep)" in page
    assert "of.an_older_release: x" in page
    assert "Verify<" in page
