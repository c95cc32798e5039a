"""Ejections as rows: what gateways hold against a node, on its page, in the API and in the audit log."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
from django.utils import timezone

from nodes.models import Node, NodePresence
from nodes.services.ejections import EjectionReport, list_ejections, write_ejections
from nodes.services.overview import read_fleet
from tests.fakes.nodes import audited, make_credential, make_node, make_presence

pytestmark = pytest.mark.django_db
HERE, THERE = uuid.UUID(int=1), uuid.UUID(int=2)


def report(node: Node, **changes: object) -> EjectionReport:
    """Return that a gateway ejected the node for ``m`` now, for twenty seconds."""
    made = EjectionReport(node_id=node.pk, model="m", reason="failed", age_s=0.0, left_s=20.0, is_news=True)
    return replace(made, **changes)  # type: ignore[arg-type]  # the fields of the report


def shown(node: Node) -> list[str]:
    return [one.words for one in list_ejections(NodePresence.objects.get(pk=node.pk), now=timezone.now())]


def test_why_and_until_when_a_node_is_ejected_is_told_once_and_goes_when_it_is_over() -> None:
    node, other = make_node("bad"), make_node("good", credential=make_credential("second")[0])
    make_presence(node), make_presence(other)
    write_ejections([report(node)], gateway_id=HERE)
    write_ejections([report(node, is_news=False, left_s=40.0)], gateway_id=HERE)
    (words,) = shown(node)
    assert words.startswith("it failed requests that other nodes answered; no new requests until ")
    assert shown(other) == []
    (event,) = audited("node.ejected")
    assert (event.target, event.detail["model"]) == (node.printed_id, "m")
    assert {one.name: len(one.ejections) for one in read_fleet().nodes} == {"bad": 1, "good": 0}
    write_ejections([], gateway_id=HERE)
    assert shown(node) == []


def test_what_another_gateway_holds_against_a_node_stays_until_it_is_long_over() -> None:
    node = make_node()
    make_presence(node)
    write_ejections([report(node, reason="slow")], gateway_id=THERE)
    write_ejections([report(node)], gateway_id=HERE)
    write_ejections([], gateway_id=HERE)
    assert len(shown(node)) == 1
    write_ejections([report(node, left_s=-1.0)], gateway_id=THERE)
    assert shown(node)[0].endswith("one request at a time tries it")
    write_ejections([report(node, left_s=-600.0)], gateway_id=THERE)
    assert shown(node) == []
    write_ejections([report(node, is_held=False, left_s=60.0)], gateway_id=HERE)
    assert NodePresence.objects.get(pk=node.pk).ejections.keys() == {HERE.hex}, "a dead gateway's leftovers go"
    assert "gets requests all the same" in shown(node)[0]
