"""Replicas over several nodes as programs and pages see them: put together from what each node says of its part."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from governance.admin_tokens import create_admin_token
from nodes.models import Node, NodePresence
from nodes.services.gpus import follow_gpus, list_gpus, list_models
from nodes.services.replicas import ReplicaState, list_replicas
from tests.fakes.governed_team import Identity, make_box
from tests.fakes.nodes import ACTOR

pytestmark = pytest.mark.django_db


@pytest.fixture
def pair() -> list[Node]:
    return [make_box(Identity(name), cluster_address="10.0.0.1:8070") for name in ("head", "helper")]


def say(node: Node, state: str, *, members: list[Node], replica_id: str = "op_1.1", **more: Any) -> None:
    part = {
        "model": "big",
        "state": state,
        "replica_id": replica_id,
        "members": [one.runner_id for one in members],
        "gpus": [0, 1],
    }
    NodePresence.objects.filter(node=node).update(replicas=[{**part, **more}])


def ask(path: str) -> tuple[int, Any]:
    _, token = create_admin_token(name="ops", actor=ACTOR)
    response = Client().get(path, headers={"authorization": f"Bearer {token}"})
    return response.status_code, response.json()


@pytest.mark.parametrize(
    ("head", "helper", "state"),
    [
        ("loading", "loading", ReplicaState.STARTING), ("loaded", "reserved", ReplicaState.SERVING),
        ("loaded", "loading", ReplicaState.STARTING), ("loaded", None, ReplicaState.ENDED),
        ("loading", None, ReplicaState.STARTING), (None, "failed", ReplicaState.ENDED),
        ("unloading", "reserved", ReplicaState.ENDED), ("failed", "failed", ReplicaState.ENDED),
    ],
)  # fmt: skip
def test_a_replica_serves_while_all_of_its_nodes_say_so(
    pair: list[Node], head: str | None, helper: str | None, state: ReplicaState
) -> None:
    for node, said in zip(pair, (head, helper), strict=True):
        if said is not None:
            say(node, said, members=pair, detail="lost" if said == "failed" else "")
    [found] = list_replicas()
    assert (found.state, found.model) == (state, "big")
    assert [(member.node, member.is_head, member.state) for member in found.members] == [
        (pair[0], True, head or ""), (pair[1], False, helper or ""),
    ]  # fmt: skip
    silent = f"{'head' if head is None else 'helper'} says nothing of it" if None in (head, helper) else ""
    assert found.reason == ("" if state is not ReplicaState.ENDED else "lost" if "failed" in (head, helper) else silent)


def test_what_a_node_says_of_replicas_that_it_is_not_in_or_while_it_is_away_does_not_count(pair: list[Node]) -> None:
    say(pair[0], "loaded", members=pair[1:])
    say(pair[1], "reserved", members=pair, replica_id="op_2.1")
    [found] = list_replicas()
    assert found.replica_id == "op_2.1"
    NodePresence.objects.update(last_heartbeat_at=timezone.now() - timedelta(days=1))
    assert list_replicas() == []


def test_the_api_and_the_page_of_a_node_show_a_replica_and_its_nodes(pair: list[Node], admin_client: Client) -> None:
    say(pair[0], "loaded", members=pair)
    say(pair[1], "reserved", members=pair)
    status, body = ask("/api/v1/replicas")
    assert status == 200
    [shown] = body["replicas"]
    assert (shown["replica_id"], shown["model"], shown["state"], shown["reason"]) == ("op_1.1", "big", "serving", "")
    assert shown["members"][1] == {
        "runner_id": pair[1].runner_id, "node_id": pair[1].printed_id, "role": "member", "state": "reserved", "reason": "",
        "gpus": [0, 1],
    }  # fmt: skip
    assert Client().get("/api/v1/replicas").status_code == 401
    page = admin_client.get(reverse("admin:nodes_node_change", args=[pair[1].pk])).content.decode()
    assert "Over several nodes" in page
    assert ", ".join(node.runner_id for node in pair) in page


def test_gpus_that_a_node_lends_show_the_model(pair: list[Node]) -> None:
    say(pair[1], "reserved", members=pair)
    NodePresence.objects.filter(node=pair[1]).update(gpus=[{"index": index, "name": "L4"} for index in range(3)])
    Node.objects.update(model_names=[])
    follow_gpus()
    shown = {gpu.index: list_models(gpu) for gpu in list_gpus(node_id=pair[1].pk)}
    assert shown == {0: ["big"], 1: ["big"], 2: []}
