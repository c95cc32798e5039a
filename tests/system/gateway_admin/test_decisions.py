"""Why a request went to its node: on its page, over REST and on the command line, and scored anew with other weights."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from gateway.models import RequestRecord
from gateway.services.decisions import explain_decision, find_decision, read_weights, replay_routing
from gateway.services.errors import InvalidValue, RequestNotFound
from gateway.services.models import allow_model, change_model_weights
from governance.admin_tokens import create_admin_token
from tests.fakes.nodes import make_record
from tests.system.controlplane.test_commands import run
from wire.ids import format_id

pytestmark = pytest.mark.django_db

WEIGHTS = [250, 250, 200, 200, 100]
FAST, IDLE = ["fast", 500, 500, 1000, 900, 0], ["idle", 1000, 1000, 250, 900, 0]


def decided(
    *candidates: list[object], chosen: int = 0, reason: str = "score", more: dict[str, Any] | None = None, **changes: Any
) -> RequestRecord:
    decision = {"reason": reason, "candidates": list(candidates), "chosen": chosen, "weights": WEIGHTS, **(more or {})}
    return make_record(node_id=uuid.UUID(int=1), node_name="idle", model="m", decision=decision, **changes)


def test_a_decision_is_on_the_page_over_rest_and_on_the_command_line(boss: Client) -> None:
    record = decided(IDLE, FAST)
    page = boss.get(reverse("admin:gateway_requestrecord_change", args=[record.pk])).content.decode()
    assert "It had the best score" in page
    assert "0.730" in page  # (250 + 250 + 50 + 180) / 1000
    headers = {"authorization": f"Bearer {create_admin_token(name='t', actor='user:x')[1]}"}
    answer = boss.get(f"/requests/{record.printed_id}/decision", headers=headers)
    assert answer.status_code == 200
    body = answer.json()
    assert (body["reason"], body["node"], [one["node"] for one in body["candidates"]]) == ("score", "idle", ["idle", "fast"])
    assert body["candidates"][0] == {
        "node": "idle", "score": 0.73, "is_chosen": True,
        "parts": {"load": 1.0, "active": 1.0, "latency": 0.25, "reliability": 0.9, "affinity": 0.0},
    }  # fmt: skip
    assert boss.get(f"/requests/{format_id('req', uuid.uuid4())}/decision", headers=headers).status_code == 404
    said = run("explain", record.printed_id)
    assert "went to idle. It had the best score" in said
    assert "* idle  0.730" in said


def test_a_decision_says_from_where_it_waited_and_what_tied_it_to_a_node(boss: Client) -> None:
    tied = {"session_by": "x-session-id", "session_node": "fast", "prefix": 250}
    wait = {"tier": "low", "position": 3, "estimate_ms": 4200}
    record = decided(IDLE, FAST, queue_ms=3900, more=tied | wait)
    page = boss.get(reverse("admin:gateway_requestrecord_change", args=[record.pk])).content.decode()
    said = run("explain", record.printed_id)
    for sentence in (
        "It waited 3.9 s with low priority, from place 3; the estimate was 4.2 s.",
        "Its session (x-session-id) was at fast last, which counted for nothing, having more to do.",
        "idle had been sent the first 25% of the prompt before.",
    ):
        assert sentence in page
        assert sentence in said
    headers = {"authorization": f"Bearer {create_admin_token(name='t', actor='user:x')[1]}"}
    body = boss.get(f"/requests/{record.printed_id}/decision", headers=headers).json()
    assert body["waited"] == wait | {"waited_ms": 3900}
    assert body["affinity"] == tied | {"prefix": 0.25}
    for node, word in (("idle", "last."), ("gone", "no free slot"), ("fast", "outweighed")):
        weighed = [*FAST[:-1], 300]
        notes = explain_decision(decided(IDLE, weighed, more=tied | {"session_node": node, "session_by": "key"})).notes
        assert (notes[0].startswith(f"Its key was at {node} last"), word in notes[0]) == (True, True)


def test_a_request_without_a_choice_says_so_and_one_of_a_later_release_is_no_error() -> None:
    assert "no other node" in explain_decision(make_record(node_id=uuid.UUID(int=1))).text
    assert explain_decision(make_record()).text == "It got no node."
    assert explain_decision(decided(["odd"])).reason == ""
    with pytest.raises(RequestNotFound):
        find_decision("nonsense")


def test_other_weights_say_what_they_would_have_changed() -> None:
    for _ in range(3):
        decided(IDLE, FAST)
    decided(FAST, IDLE)
    decided(IDLE, FAST, reason="least_load")  # nothing was known of them
    decided(IDLE, FAST, age_s=25 * 3600.0)
    decided(IDLE)
    replay = replay_routing(read_weights("latency=0.8"))
    assert (replay.compared, replay.changed) == (4, 3)
    assert replay.moves == {("m", "idle", "fast"): 3}
    assert replay_routing(read_weights("load=0.25")).changed == 1  # what went to the slow one by mistake
    assert replay_routing(read_weights("latency=0.8"), model="other").compared == 0
    allow_model(name="m", actor="user:x")
    change_model_weights(name="m", weights={"latency": 0.8}, actor="user:x")
    assert replay_routing(read_weights("reliability=0.2")).changed == 3
    assert replay_routing(read_weights("latency=0.2")).changed == 1
    assert "3 of 4 requests with a choice would have gone elsewhere (75.0 %)" in run(
        "replay_routing", "--weights", "latency=0.8"
    )


@pytest.mark.parametrize("text", ["", "speed=1", "load=2", "load", "load=x"])
def test_weights_that_cannot_be_read_are_named(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"Weights look like load=0\.3"):
        read_weights(text)
