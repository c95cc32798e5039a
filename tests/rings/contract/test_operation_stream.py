"""``GET …/events`` on the real server: what followers see, when it ends, who may, and that those who leave cost nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import psutil
import pytest

from core.limits import limits
from governance.admin_tokens import create_admin_token
from governance.errors import StateChanged
from governance.models import Operation
from governance.operations.proposals import cancel
from governance.operations.runs import _FENCE_LOCK, run_due
from tests.fakes.audit_logs import raw_connection
from tests.fakes.control_process import ServerProcess, serve_control
from tests.fakes.governed_team import Team, make_team, propose_token
from tests.fakes.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]
WITHIN_S = 30.0
STOP_GRACE_S = 600
"""Longer than anybody waits for the end of the server."""


@pytest.fixture(scope="module")
def server(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One for all tests of this file; the last one stops it."""
    with serve_control(tmp_path_factory.mktemp("stream") / "control.log", "--stop-grace", str(STOP_GRACE_S)) as process:
        yield process


@pytest.fixture
def team() -> Team:
    return make_team()


@pytest.fixture
def token(team: Team) -> str:
    _, text = create_admin_token(name="ci", actor="user:ana", owner=team[0].user)
    team.start()
    return text


@pytest.fixture
def client(server: ServerProcess, token: str) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {token}"}
    with httpx.Client(
        base_url=server.url, headers=headers, timeout=WITHIN_S, limits=httpx.Limits(max_keepalive_connections=0)
    ) as opened:
        yield opened


def path_of(operation: Operation) -> str:
    return f"/api/v1/operations/{operation.printed_id}/events"


def read_events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


@contextmanager
def held_back() -> Iterator[None]:
    """Let nothing be carried out until the block ends, by the server either, which looks for what is due every few seconds."""
    with raw_connection() as session:
        session.execute("SELECT pg_advisory_xact_lock(%s)", [_FENCE_LOCK])
        yield


def test_a_follower_sees_every_change_until_the_end(client: httpx.Client, team: Team) -> None:
    operation = propose_token(team[0])
    with client.stream("GET", path_of(operation)) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-store"
        events = read_events(answer)
        first = next(events)
        assert (first["state"], first["approvals"], first["required"], first["is_final"]) == ("pending", 0, 2, False)
        team[1].approve(operation)
        assert next(events)["approvals"] == 1
        with held_back():
            team[2].approve(operation)
            approved = next(events)
        assert (approved["state"], approved["run_state"], approved["is_final"]) == ("approved", "queued", False)
        run_due()
        rest = list(events)
    assert (rest[-1]["run_state"], rest[-1]["percent"], rest[-1]["is_final"]) == ("succeeded", 100, True)
    assert [run["state"] for run in rest[-1]["runs"]] == ["succeeded"]
    with client.stream("GET", path_of(operation)) as answer:
        assert [event["is_final"] for event in read_events(answer)] == [True]


def test_a_change_that_no_hint_told_of_is_seen_by_polling(client: httpx.Client, team: Team) -> None:
    operation = propose_token(team[0])
    with client.stream("GET", path_of(operation)) as answer:
        events = read_events(answer)
        next(events)
        Operation.objects.filter(pk=operation.pk).update(state="expired")
        assert [(event["state"], event["is_final"]) for event in events] == [("expired", True)]


def is_followed_to_the_end(client: httpx.Client, operation: Operation, team: Team) -> bool:
    """Return whether there is room for one more follower; if so, end what it follows, and the stream with that."""
    with client.stream("GET", path_of(operation)) as answer:
        if answer.status_code != 200:
            return False
        with suppress(StateChanged):  # it was cancelled the last time, and the stream ended without saying so
            cancel(op_id=operation.pk, proposer=team[0].proposer)
        return "cancelled" in [event["state"] for event in read_events(answer)]


def test_streams_are_bounded_and_those_who_leave_make_room(client: httpx.Client, server: ServerProcess, team: Team) -> None:
    operation = propose_token(team[0])
    process = psutil.Process(server.process.pid)
    with client.stream("GET", path_of(operation)) as answer:
        next(read_events(answer))
    files = process.num_fds()
    followed: list[Iterator[dict[str, Any]]] = []  # an iterator that is dropped closes its connection
    with ExitStack() as open_streams:
        for _ in range(limits().governance.stream_max):
            answer = open_streams.enter_context(client.stream("GET", path_of(operation)))
            followed.append(read_events(answer))
            assert next(followed[-1])["state"] == "pending"
        refused = client.get(path_of(operation))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["error"]["retryable"] is True
        wait_until(lambda: client.get("/healthz").status_code == 200)
    wait_until(lambda: process.num_fds() <= files + 2)
    wait_until(lambda: is_followed_to_the_end(client, operation, team))
    assert "Traceback" not in server.log.read_text()


def test_a_server_that_stops_does_not_wait_for_followers(client: httpx.Client, server: ServerProcess, team: Team) -> None:
    operation = propose_token(team[0])
    with client.stream("GET", path_of(operation)) as answer:
        events = read_events(answer)
        next(events)
        assert server.terminate() == 0
    assert "Traceback" not in server.log.read_text()
