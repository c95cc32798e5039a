"""The pages of approvals: what a signer sees first, what they missed, and where an operation stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from html import unescape

import pytest
from django.test import Client
from django.urls import reverse, reverse_lazy
from django.utils import timezone

from governance.models import Operation, OperationRun, PolicyVersion, SeenMark
from governance.operations import decisions
from governance.operations import policies as freezes
from governance.operations.queries import read_operation
from governance.operations.runs import RunEnd, finish_run, note_progress, run_due
from governance.states import RunEvent, RunState
from governance.web.stepper import Mark, make_stepper
from nodes.models import NodePresence
from tests.fakes.governed_team import (
    BOX,
    FakeBox,
    Identity,
    Team,
    fake_boxes,
    make_box,
    make_governed,
    open_session,
    propose_load,
    propose_token,
)
from wire import clock
from wire.optoken.documents import DEFAULT_CLASSES

pytestmark = pytest.mark.django_db


@pytest.fixture
def team() -> Team:
    return make_governed("ana", "ben", "cleo", "dan")


@pytest.fixture
def box() -> Iterator[FakeBox]:
    with fake_boxes() as found:
        yield found


def text_of(client: Client, path: str) -> str:
    response = client.get(path)
    assert response.status_code == 200
    return " ".join(unescape(response.content.decode()).split())


def page_of(operation: Operation) -> str:
    return reverse("approvals:operation", args=[operation.pk])


# The first page


def test_what_waits_says_what_it_means_how_far_it_is_and_when_it_ends(team: Team) -> None:
    node = make_box(Identity())
    replicas = [
        {"model": "old", "state": "loaded", "memory_mb": 4096, "active": 3},
        {"model": "m", "state": "loading", "memory_mb": 2048},
    ]
    NodePresence.objects.update(memory={"total_mb": 10_240, "used_mb": 8192}, replicas=replicas)
    operation = propose_load(team[0], node.runner_id, params={"modelId": "m", "evictModel": "old"})
    team[2].approve(operation)
    said = text_of(open_session(team[1].user), reverse("approvals:inbox"))
    assert "unloads old first · 3 requests run there · memory 8.0 GiB → 6.0 GiB of 10.0 GiB" in said
    for words in ("To sign (1)", "expires in 24 h", "1 of 2 approvals", 'title="cleo approved">CL</span>'):
        assert words in said


def test_a_signer_is_told_what_happened_without_them_until_they_mark_it_as_seen(team: Team) -> None:
    ben, cleo = open_session(team[1].user), open_session(team[2].user)
    first = text_of(ben, reverse("approvals:inbox"))
    assert "You have marked nothing as seen yet" in first
    until = timezone.now()
    ben.post(reverse("approvals:seen"), {"until": until.isoformat()})
    assert "Nothing was decided, changed or failed without you." in text_of(ben, reverse("approvals:inbox"))
    without_them, with_them = propose_token(team[0], params={"name": "alpha"}), propose_token(team[0], params={"name": "beta"})
    decisions.reject(op_id=without_them.pk, user=team[2].user, comment="no")
    decisions.reject(op_id=with_them.pk, user=team[1].user, comment="no")
    freezes.freeze(user=team[3].user, reason="strange loads")
    said = text_of(ben, reverse("approvals:inbox")).partition("What you missed")[2]
    assert "dan froze everything" in said
    assert "token named alpha" in said
    assert "token named beta" not in said
    # The mark is of the moment of the page: what came between its making and the press of the button is told again.
    ben.post(reverse("approvals:seen"), {"until": until.isoformat()})
    assert "token named alpha" in text_of(ben, reverse("approvals:inbox")).partition("What you missed")[2]
    ben.post(reverse("approvals:seen"), {"until": (timezone.now() + timedelta(days=9)).isoformat()})
    mark = SeenMark.objects.get(user=team[1].user)
    assert mark.seen_at <= clock.now(), "nobody has seen what is to come"
    ben.post(reverse("approvals:seen"), {"until": until.isoformat()})
    ben.post(reverse("approvals:seen"), {"until": "soon"})
    assert SeenMark.objects.get(user=team[1].user).seen_at == mark.seen_at, "a mark never goes back"
    assert "token named beta" in text_of(cleo, reverse("approvals:inbox")).partition("What you missed")[2]


# Where an operation stands


def steps_of(operation: Operation, team: Team) -> list[tuple[str, Mark]]:
    stepper = make_stepper(read_operation(operation.pk, team[1].user))
    return [(step.label, step.mark) for track in stepper.tracks for step in track.steps]


PROPOSED, APPROVED = ("Proposed", Mark.DONE), ("Approved", Mark.DONE)
SENT, ACCEPTED = ("Sent", Mark.DONE), ("Accepted", Mark.DONE)


def test_the_steps_of_an_operation_say_where_it_is_and_what_the_node_says(team: Team, box: FakeBox) -> None:
    operation = propose_load(team[0])
    ahead = [("Sent", Mark.AHEAD), ("Accepted", Mark.AHEAD), ("Carried out", Mark.AHEAD), ("Done", Mark.AHEAD)]
    assert steps_of(operation, team) == [PROPOSED, ("Approval", Mark.NOW), *ahead]
    box.busy = {"box-a"}
    team.sign(operation)
    run_due()
    assert steps_of(operation, team) == [PROPOSED, APPROVED, ("Sent", Mark.WAITS), *ahead[1:]]
    assert "box-a is busy" in text_of(open_session(team[1].user), page_of(operation))
    box.reset()
    OperationRun.objects.update(due_at=timezone.now())
    run_due()
    assert steps_of(operation, team) == [PROPOSED, APPROVED, SENT, ("Accepted", Mark.NOW), *ahead[2:]]
    run = OperationRun.objects.get(operation=operation)
    note_progress(run_id=run.pk, stage="reading weights", fraction=0.62, eta_s=48.0)
    assert steps_of(operation, team)[4:] == [("Reading weights", Mark.NOW), ("Done", Mark.AHEAD)]
    said = text_of(open_session(team[1].user), page_of(operation))
    assert "62 %" in said
    assert "about 48 s left" in said
    finish_run(run.pk, RunEnd(RunEvent.SUCCEED, message="m is loaded"))
    assert steps_of(operation, team) == [PROPOSED, APPROVED, SENT, ACCEPTED, ("Carried out", Mark.DONE), ("Done", Mark.DONE)]


@pytest.mark.parametrize(
    ("changes", "last", "advice"),
    [
        ({"state": "failed", "stage": "loading"}, ("Failed: Loading", Mark.WRONG), "what was approved is spent"),
        ({"state": "failed"}, ("Refused by the node", Mark.WRONG), "The node changed nothing"),
        ({"state": "failed", "dispatched_at": None, "code": "approval_invalid"}, ("Not sent", Mark.WRONG), "audit log"),
        ({"state": "failed", "code": "receipt_invalid"}, ("Refused by the node", Mark.WRONG), "Do not trust"),
        ({"state": "unknown", "stage": "loading"}, ("Done", Mark.AHEAD), "Wait for the node"),
        ({"state": "resolved"}, ("Looked up", Mark.UNSURE), "what the node has now"),
        ({"state": "skipped"}, ("Skipped", Mark.WRONG), "Nothing was sent"),
    ],
    ids=["failed", "refused", "forged", "receipt", "unknown", "resolved", "skipped"],
)
def test_a_run_that_stops_says_why_in_the_nodes_words_and_what_to_do(
    team: Team, box: FakeBox, changes: dict[str, object], last: tuple[str, Mark], advice: str
) -> None:
    assert box is BOX
    operation = propose_load(team[0])
    team.sign(operation)
    run_due()
    OperationRun.objects.update(**{"message": "CUDA out of memory", "stage": "", "ended_at": timezone.now(), **changes})
    track = make_stepper(read_operation(operation.pk, team[1].user)).tracks[0]
    assert (track.steps[-1].label, track.steps[-1].mark) == last
    assert advice in track.advice
    said = text_of(open_session(team[1].user), page_of(operation))
    assert "CUDA out of memory" in said
    is_over = RunState(str(changes["state"])) is not RunState.UNKNOWN
    assert ("operation=model-load&target=box-a&modelId=m" in said) is is_over


def test_several_nodes_have_a_line_of_steps_each_and_what_was_rejected_can_be_asked_for_again(team: Team, box: FakeBox) -> None:
    assert box is BOX
    operation = propose_load(team[0], "box-a", "box-b")
    team.sign(operation)
    run_due()
    stepper = make_stepper(read_operation(operation.pk, team[1].user))
    assert [step.label for step in stepper.head] == ["Proposed", "Approved"]
    assert [(track.target, track.steps[0].mark) for track in stepper.tracks] == [("box-a", Mark.DONE), ("box-b", Mark.WAITS)]
    other = propose_load(team[0], "box-c")
    decisions.reject(op_id=other.pk, user=team[2].user, comment="not today")
    track = make_stepper(read_operation(other.pk, team[1].user)).tracks[0]
    assert (track.steps[-1].label, track.said) == ("Rejected", "rejected by cleo: not today")
    assert track.again == "operation=model-load&target=box-c&modelId=m"


def test_what_is_missing_is_said_by_name(team: Team) -> None:
    operation = propose_token(team[0])
    team[1].approve(operation)
    assert "1 more of: cleo, dan" in text_of(open_session(team[2].user), page_of(operation))


# The editor of the policy

DRAFT = reverse_lazy("approvals:draft_policy")


def fill(client: Client, **changes: object) -> dict[str, object]:
    """What the editor would send as it opens with every key ticked and a number for each operation, and ``changes``."""
    form = client.get(DRAFT).content.decode()
    filled: dict[str, object] = dict(re.findall(r'name="(threshold-[^"]+)"[^>]*value="(\d+)"', form))
    for name, person in re.findall(r'name="(people-[^"]+)" value="(\d+)"', form):
        filled[name] = [*(filled.get(name) or []), person]  # type: ignore[misc]
    ticked = re.findall(r'name="key" value="(\d+)"', form)
    return filled | {"key": ticked, "rules": "1", "preset": "own", "reason": "for the test", **changes}


def preview(client: Client, sent: dict[str, object]) -> str:
    response = client.post(DRAFT, {**sent, "step": "preview"})
    assert response.status_code == 200
    return " ".join(unescape(response.content.decode()).split())


def test_a_rule_for_some_people_is_a_group_of_theirs_and_opens_as_it_was_made(team: Team) -> None:
    client, ids = open_session(team[0].user), {member.name: str(member.user.pk) for member in team.members}
    some = [ids["ben"], ids["cleo"], ids["dan"]]
    answer = client.post(DRAFT, fill(client, **{"people-model-load": some, "threshold-cache-flush": "1"}))
    operation = Operation.objects.get(reason="for the test")
    assert answer.headers["Location"] == page_of(operation)
    assert operation.adopts is not None
    drafted = operation.adopts.read_policy()
    assert (drafted.classes["model-load"].factors, drafted.classes["model-load"].threshold) == ({"model-load": 2}, 2)
    assert (drafted.classes["cache-flush"].threshold, drafted.classes["model-unload"].factors) == (1, {})
    assert [name for name, groups in sorted(drafted.groups.items()) if "model-load" in groups] == ["ben", "cleo", "dan"]
    said = text_of(open_session(team[1].user), page_of(operation))
    flushing = said.partition("Flushing caches</th>")[2].partition("</tr>")[0]
    assert flushing.count("now: needs 2 more") == 4, "approvers see who could then do what"
    team.sign(operation)
    run_due()
    opened = fill(client)
    assert (opened["people-model-load"], opened["threshold-cache-flush"]) == (list(ids.values()), "1")
    form = client.get(DRAFT).content.decode()
    assert re.findall(r'name="people-model-load" value="(\d+)" checked', form) == some
    assert 'value="own" checked' in form
    rules = text_of(client, reverse("approvals:policy"))
    assert "<strong>Loading a model</strong> needs <strong>2</strong> of ben, cleo, dan, not counting the requester." in rules
    # Everybody again: the group goes, from the class and from the people.
    client.post(DRAFT, {**opened, "reason": "all of us"})
    again = Operation.objects.get(reason="all of us")
    assert again.adopts is not None
    policy = again.adopts.read_policy()
    assert policy.classes["model-load"].factors == {}
    assert not any(policy.groups.values())


def test_presets_make_the_parameters_that_they_say(team: Team) -> None:
    client = open_session(team[0].user)
    for preset, thresholds, solo in (("two", (2, 1), False), ("one", (1, 1), False), ("alone", (1, 1), True)):
        client.post(DRAFT, {**fill(client, preset=preset), "reason": preset})
        row = Operation.objects.get(reason=preset).adopts
        assert row is not None
        classes = row.read_policy().classes
        assert (classes["model-load"].threshold, classes["node-drain"].threshold) == thresholds
        assert {found.solo for found in classes.values()} == {solo}


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"threshold-model-load": "4"}, "model-load", "Leave one person to spare: with 4 people at most 3"),
        ({"threshold-model-load": "5"}, "model-load", "5 must approve, and only 4 can"),
        ({"threshold-model-load": "3"}, "policy-change", "At least 3: changing the policy must need as many"),
        ({"threshold-model-load": "many"}, "model-load", "Write a whole number from 1 to 64"),
        ({"people-model-load": []}, "model-load", "2 must approve, and only 0 can"),
        ({"key": []}, "", "Choose at least one key of one person"),
    ],
    ids=["no spare", "too many", "above the policy", "no number", "nobody", "no keys"],
)
def test_what_is_impossible_is_said_beside_the_field_and_nothing_is_drafted(
    team: Team, changes: dict[str, object], name: str, words: str
) -> None:
    client = open_session(team[0].user)
    sent = fill(client, **changes)
    said = preview(client, sent)
    assert words in said
    assert not name or f'data-fault="{name}"' in said
    answer = client.post(DRAFT, {**sent, "reason": "kept as typed"})
    form = " ".join(unescape(answer.content.decode()).split())
    assert answer.status_code == 400
    assert words in (form.partition(f'id="fault-{name}"')[2][:300] if name else form)
    assert "kept as typed</textarea>" in form
    assert PolicyVersion.objects.count() == Operation.objects.count() == 1


def test_the_preview_says_who_could_then_do_what_and_what_differs_and_stores_nothing(team: Team) -> None:
    client, ben = open_session(team[0].user), str(team[1].user.pk)
    before = PolicyVersion.objects.count()
    assert "Nothing yet." in preview(client, fill(client))
    some = [str(member.user.pk) for member in team.members if str(member.user.pk) != ben]
    said = preview(client, fill(client, **{"people-model-load": some, "threshold-cache-flush": "1"}))
    loading = said.partition("Loading a model</th>")[2].partition("</tr>")[0]
    assert loading.count("needs 2 more") == 4, "three people, and what ben can today"
    assert re.search(r"may not</span> <span class=\"was\">now: needs 2 more", loading)
    assert "To cache-flush" in said
    assert "To node-drain" not in said, "only what differs"
    assert said.partition("Flushing caches</th>")[2].partition("</tr>")[0].count("needs 1 more") == 4
    alone = preview(client, fill(client, preset="alone"))
    assert alone.count("⚠") == 4 * len(DEFAULT_CLASSES) - 4, "everybody alone in every class but break-glass, which is left out"
    assert PolicyVersion.objects.count() == before
