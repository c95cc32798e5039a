"""Who can be reached from this process, by node and by model."""

from __future__ import annotations

import time
import uuid

import pytest

from nodes.links import EndKind, LinkCondition, LinkRegistry
from nodes.links.port import Link, LinkEnd
from nodes.session import OpenRequest
from nodes.states import TOKENIZE
from tests.fakes.links import FakeLink


class Sink:
    def __init__(self) -> None:
        self.ends: list[LinkEnd] = []

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        raise AssertionError

    def on_data(self, data: bytes) -> None:
        raise AssertionError

    def on_end(self, end: LinkEnd) -> None:
        self.ends.append(end)


def open_on(link: FakeLink) -> Sink:
    sink = Sink()
    request = OpenRequest(
        request_id="r", attempt=1, model="m", path="/", body=b"", headers={}, is_streaming=False, deadline_ms=1, tenant=""
    )
    link.open_stream(request, sink)
    return sink


def test_links_are_found_by_node_and_by_each_model() -> None:
    registry = LinkRegistry()
    first, second = FakeLink("a", "b"), FakeLink("b")
    registry.add(first)
    registry.add(second)
    assert list(registry) == [first, second]
    assert len(registry) == 2
    assert registry.get(first.node_id) is first
    assert list(registry.links_for("b")) == [first, second]
    assert list(registry.links_for("x")) == []
    assert registry.served_models() == ["a", "b"]


def test_a_removed_link_is_forgotten_and_its_streams_end_as_lost_once() -> None:
    registry = LinkRegistry()
    link = FakeLink("a", "b")
    registry.add(link)
    sink = open_on(link)
    registry.remove(link)
    registry.remove(link)
    assert link.closed
    assert [end.kind for end in sink.ends] == [EndKind.LINK_LOST]
    assert (registry.served_models(), registry.get(link.node_id), len(registry)) == ([], None, 0)


def test_a_newer_session_replaces_the_older_whose_late_removal_harms_nothing() -> None:
    registry = LinkRegistry()
    old = FakeLink("a")
    new = FakeLink("b", node_id=old.node_id)
    registry.add(old)
    sink = open_on(old)
    registry.add(new)
    assert old.close_reasons == ["replaced by a newer session of the same node"]
    assert [end.kind for end in sink.ends] == [EndKind.LINK_LOST]
    registry.remove(old)
    assert registry.get(new.node_id) is new
    assert not new.closed
    assert registry.served_models() == ["b"]


def test_a_link_that_was_removed_answers_nothing_any_more() -> None:
    registry = LinkRegistry()
    link = FakeLink("a")
    registry.add(link)
    assert list(registry.links_answering("a", "/v1/chat/completions")) == [link]
    other = FakeLink("a")
    registry.add(other)
    assert list(registry.links_answering("a", "/v1/chat/completions")) == [link, other]
    registry.remove(link)
    assert list(registry.links_answering("a", "/v1/chat/completions")) == [other]


def test_adding_a_link_twice_does_not_close_it() -> None:
    registry = LinkRegistry()
    link = FakeLink("a")
    registry.add(link)
    registry.remove(link)
    link.closed = False
    registry.add(link)
    assert link.close_reasons == []


def test_new_models_are_found_and_old_ones_are_not() -> None:
    registry = LinkRegistry()
    link = FakeLink("a")
    registry.add(link)
    registry.update_models(link, frozenset({"b", "c"}))
    assert registry.served_models() == ["b", "c"]
    assert list(registry.links_for("a")) == []


def test_models_of_a_link_that_was_replaced_are_not_listed() -> None:
    registry = LinkRegistry()
    link = FakeLink("a")
    registry.update_models(link, frozenset({"b"}))
    assert registry.served_models() == []
    assert link.models == {"b"}


def test_listeners_hear_of_every_change() -> None:
    registry = LinkRegistry()
    heard: list[Link | None] = []
    registry.subscribe(heard.append)
    link = FakeLink("a")
    registry.add(link)
    registry.update_models(link, frozenset({"b"}))
    registry.remove(link)
    assert heard == [link, link, None]


def test_links_may_be_removed_while_they_are_walked() -> None:
    registry = LinkRegistry()
    for _ in range(5):
        registry.add(FakeLink("a"))
    for link in registry:
        registry.remove(link)
    assert len(registry) == 0


@pytest.mark.parametrize(
    ("change", "condition"),
    [
        (lambda link: None, LinkCondition.READY),
        (lambda link: setattr(link, "last_seen", time.monotonic() - 10), LinkCondition.STALE),
        (lambda link: setattr(link.policy, "draining", True), LinkCondition.DRAINING),
        (lambda link: setattr(link.policy, "cordoned", True), LinkCondition.DRAINING),
        (lambda link: setattr(link.policy, "reclaimed", True), LinkCondition.DRAINING),
        (lambda link: setattr(link, "box_draining", True), LinkCondition.DRAINING),
        (lambda link: setattr(link, "closed", True), LinkCondition.DRAINING),
        (lambda link: setattr(link, "unhealthy_reason", "ECC"), LinkCondition.UNHEALTHY),
        (lambda link: setattr(link.policy, "provider_enabled", False), LinkCondition.DISABLED),
    ],
)
def test_a_link_takes_work_only_when_it_is_ready(change: object, condition: LinkCondition) -> None:
    assert callable(change)
    link = FakeLink()
    change(link)
    now = time.monotonic()
    assert link.condition() is condition
    assert link.can_take(now) == (condition is LinkCondition.READY)


def test_slots_and_a_busy_pause_hold_work_back() -> None:
    link = FakeLink(slots=2)
    now = time.monotonic()
    link.active = 2
    assert not link.can_take(now)
    assert not link.has_slot()
    link.active = 1
    link.busy_until = now + 1
    assert not link.can_take(now)
    assert link.can_take(now + 1)


@pytest.mark.parametrize(("reported", "external"), [(0, 0), (3, 0), (5, 2), (-7, 0), (10**40, 1_000_000)])
def test_what_a_box_says_of_its_load_orders_but_never_takes_a_slot(reported: int, external: int) -> None:
    link = FakeLink(slots=4)
    link.active = 3
    link.report_load(reported)
    assert (link.external_load, link.load) == (external, 3 + external)
    assert link.can_take(time.monotonic())


def test_node_ids_of_fakes_differ() -> None:
    assert FakeLink().node_id != FakeLink().node_id
    assert FakeLink(node_id=uuid.UUID(int=7)).node_id.int == 7


# API paths


def test_links_are_found_by_model_and_path_and_follow_every_change() -> None:
    registry = LinkRegistry()
    first, second = FakeLink("a"), FakeLink("a")
    first.endpoints = {"a": frozenset({"/chat", TOKENIZE})}
    registry.add(first)
    registry.add(second)
    assert list(registry.links_answering("a", "/chat")) == [first, second]
    assert list(registry.links_answering("a", "/embed")) == [second]
    registry.update_models(second, frozenset({"a"}), {"a": frozenset({"/other"})})
    assert list(registry.links_answering("a", "/embed")) == []
    assert registry.endpoints_of("a") == ["/chat", "/other"]
    registry.update_models(first, frozenset({"b"}))
    assert list(registry.links_answering("a", "/chat")) == []
    registry.remove(second)
    assert registry.endpoints_of("a") == []


def test_names_that_nobody_serves_leave_nothing_behind() -> None:
    registry = LinkRegistry()
    for number in range(100):
        assert list(registry.links_answering(f"guess-{number}", "/chat")) == []
    assert registry._answering == {}
