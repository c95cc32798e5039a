"""What the page that proposes offers for boxes, and what the page of the policy says that they hold."""

from __future__ import annotations

from html import unescape
from typing import Any

import pytest
from django.conf import settings
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils.module_loading import import_string

from governance.models import Operation, PolicyVersion
from governance.registry import OffersChoices, find_kind
from nodes.models import Node, NodePresence
from nodes.operations import CACHE_FLUSH, MODEL_LOAD, MODEL_UNLOAD, NODE_DRAIN, NODE_EVICT
from nodes.services import revoke_credential
from tests.fakes.governed_nodes import Identity, make_box
from tests.fakes.nodes import ACTOR, make_node
from tests.system.governance.team import Team, make_governed
from wire.optoken.approval import read_statement

pytestmark = pytest.mark.django_db
PROPOSE = "/approvals/propose"


@pytest.fixture
def rig() -> Identity:
    return Identity()


@pytest.fixture
def box(rig: Identity) -> Node:
    made = make_box(rig)
    NodePresence.objects.update(available_models=["new", "old"])
    return made


@pytest.fixture
def team() -> Team:
    return make_governed()


def sign_in(team: Team) -> Client:
    client = Client()
    client.force_login(team[0].user)
    session = client.session
    session["muster_assurance"] = "passkey"
    session.save()
    return client


def labels(kind: Any) -> dict[str, str]:
    """What a person reads of each box that is offered."""
    return {label.partition(":")[0]: label.partition(": ")[2] for _, label in kind.choices()["targets"]}


def fields(kind: Any) -> dict[str, Any]:
    return {field["name"]: field for field in kind.choices()["params"]}


@pytest.mark.parametrize("name", sorted(settings.OPERATIONS))
def test_every_operation_that_is_filled_in_has_fields_of_its_own(name: str) -> None:
    assert name == "policy-change" or isinstance(find_kind(name), OffersChoices)


def test_boxes_are_offered_by_name_with_what_an_operator_must_know(rig: Identity, box: Node) -> None:
    make_box(Identity("attic"), age_s=900, policy_version=0)
    make_box(Identity("shed"), level="L0")
    make_node("bare")
    gone = make_box(Identity("gone"))
    assert gone.credential is not None
    revoke_credential(credential_id=gone.credential.pk, actor=ACTOR)
    Node.objects.filter(name="shed").update(cordoned=True)
    assert labels(MODEL_LOAD) == {
        "attic": "away · L2, no policy pinned · has old loaded",
        "rig": "available · L2 with policy version 1 · has old loaded",
        "shed": "cordoned · L0, checks a key and no approvals · has old loaded",
        "bare": "away · takes no operations from here · nothing loaded",
    }
    assert list(labels(MODEL_LOAD))[-1] == "bare"
    assert labels(NODE_DRAIN) == labels(NODE_EVICT)
    assert labels(NODE_DRAIN)["bare"] == "away · nothing loaded"
    assert (rig.runner_id, box.printed_id) == (MODEL_LOAD.clean([rig.runner_id], {"modelId": "m"}).targets[0], box.printed_id)
    assert rig.runner_id in dict(MODEL_LOAD.choices()["targets"])  # type: ignore[call-overload]
    assert box.printed_id in dict(NODE_DRAIN.choices()["targets"])  # type: ignore[call-overload]


def test_what_is_offered_is_taken_as_the_operation_takes_it(box: Node) -> None:
    assert fields(MODEL_LOAD)["modelId"]["choices"][1:] == [("new", "new (on rig)"), ("old", "old (loaded on rig)")]
    assert fields(MODEL_LOAD)["evictModel"]["choices"] == [("", "nothing"), ("old", "old (on rig)")]
    assert fields(MODEL_UNLOAD)["modelId"]["choices"][1:] == [("old", "old (on rig)")]
    assert [value for value, _ in fields(CACHE_FLUSH)["scope"]["choices"]] == ["", "tag", "tenant", "model", "all"]
    assert (fields(NODE_DRAIN)["timeout_s"]["min"], fields(NODE_DRAIN)["timeout_s"]["max"]) == (0, 86_400)
    for kind in (MODEL_LOAD, MODEL_UNLOAD, CACHE_FLUSH):
        given: dict[str, object] = {"modelId": "old", "scope": "model"}
        known = {name: given[name] for name in fields(kind) if name in given}
        assert kind.clean([value for value, _ in kind.choices()["targets"]], known).params == known  # type: ignore[attr-defined]


def test_a_name_that_cannot_be_signed_is_not_offered_and_long_lists_end(box: Node) -> None:
    NodePresence.objects.update(available_models=["\u202eevil", " x", "", "y" * 201, *(f"m{n:03}" for n in range(300))])
    offered = fields(MODEL_LOAD)["modelId"]["choices"]
    assert len(offered) == 201
    assert offered[1][0] == "m000"


def test_without_boxes_names_are_typed() -> None:
    assert MODEL_LOAD.choices()["targets"] == []
    assert "choices" not in fields(MODEL_LOAD)["modelId"]


@pytest.mark.parametrize("kind", [MODEL_LOAD, CACHE_FLUSH, NODE_DRAIN], ids=lambda kind: kind.name)
def test_many_boxes_take_one_query(kind: Any) -> None:
    for number in range(4):
        make_box(Identity(f"box{number}"))
    with CaptureQueriesContext(connection) as queries:
        kind.choices()
    assert len(queries) == 1


# The page


def test_a_load_is_filled_in_looked_at_and_sent(team: Team, rig: Identity, box: Node) -> None:
    client = sign_in(team)
    page = client.get(f"{PROPOSE}?operation=model-load").content.decode()
    assert f'value="{rig.runner_id}" id="id_targets_0" checked' in page  # the only box there is
    filled = {
        "operation": "model-load", "targets": rig.runner_id, "param-modelId": "new", "param-evictModel": "old",
        "param-maxContextLength": "4096", "param-overrides": '{"n_ctx": 9}', "reason": "for the demo", "max_uses": "1",
    }  # fmt: skip
    assert "Load new on rig" in client.post(PROPOSE, {**filled, "step": "look"}).content.decode()
    assert client.post(PROPOSE, {**filled, "step": "send"}).status_code == 303
    signed = read_statement(bytes(Operation.objects.get(operation="model-load").statement))
    assert signed.targets == (rig.runner_id,)
    assert signed.params == {"modelId": "new", "evictModel": "old", "maxContextLength": 4096, "overrides": {"n_ctx": 9}}


def test_a_model_that_no_list_has_is_typed(team: Team, rig: Identity, box: Node) -> None:
    client = sign_in(team)
    filled = {"operation": "model-load", "targets": rig.runner_id, "param-modelId": "", "reason": "x", "max_uses": "1"}
    assert "This field is required" in client.post(PROPOSE, {**filled, "step": "look"}).content.decode()
    typed = client.post(PROPOSE, {**filled, "param-modelId_other": " rare ", "step": "look"}).content.decode()
    assert "Load rare on rig" in typed
    assert '<input type="hidden" name="param-modelId_other" value=" rare ">' in typed


def test_an_address_fills_the_form_in(team: Team, rig: Identity, box: Node) -> None:
    client = sign_in(team)
    make_box(Identity("second"))
    drain = client.get(f"{PROPOSE}?operation=node-drain&target={box.printed_id}&timeout_s=5").content.decode()
    assert 'name="param-timeout_s" value="5"' in drain
    assert drain.count("checked") == 2  # the box of the address, and stopping at the first failure
    load = client.get(f"{PROPOSE}?operation=model-load&modelId=old").content.decode()
    assert '<option value="old" selected>' in load
    assert (
        'name="param-modelId_other" value="rare"' in client.get(f"{PROPOSE}?operation=model-load&modelId=rare").content.decode()
    )


def test_a_box_that_takes_no_operations_is_refused_with_what_would_help(team: Team) -> None:
    bare = make_node("bare")
    filled = {"operation": "cache-flush", "targets": bare.printed_id, "param-scope": "all", "reason": "x", "max_uses": "1"}
    answer = sign_in(team).post(PROPOSE, {**filled, "step": "look"})
    assert answer.status_code == 400
    assert "its program must be connected with a data folder" in unescape(answer.content.decode())


# What boxes hold


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"policy_version": 1}, "level L2, version 1 pinned"),
        ({"policy_version": 0}, "level L2, none pinned: run ./muster trust on it"),
        ({"policy_version": 2}, "level L2, version 2 pinned; version 1 is in force here, an older one"),
        ({"policy_version": 1, "policy_error": "a gap"}, "level L2, version 1 pinned; it says: a gap"),
        ({"level": "L1"}, "level L1: it checks a key and no approvals, so it pins no policy"),
        ({"level": ""}, "takes no operations from here; it says: the box named no level that is known here"),
    ],
    ids=["newest", "none", "ahead", "error", "L1", "no-level"],
)
def test_the_page_of_the_policy_says_what_each_box_holds(team: Team, said: dict[str, Any], words: str) -> None:
    make_box(Identity(), **said)
    assert import_string(settings.GOVERNANCE_BOXES)() == [{"name": "rig", "text": words}]
    assert words in unescape(sign_in(team).get("/approvals/policy").content.decode())


def test_before_a_policy_and_behind_it_is_said_too() -> None:
    make_box(Identity())
    read_pins = import_string(settings.GOVERNANCE_BOXES)
    assert read_pins()[0]["text"] == "level L2, version 1 pinned; none is in force here"
    make_governed()
    Node.objects.update(policy_version=1)
    PolicyVersion.objects.update(version=3)
    assert "version 3 is in force, which is offered to it" in read_pins()[0]["text"]
