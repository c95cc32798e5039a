"""Boxes that start together cannot enrol past what their credential allows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from django.db import connection

from nodes.errors import EnrolmentRefused
from nodes.models import Node
from nodes.services import claim_node
from tests.fakes.nodes import make_credential


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("names", "made"), [(["a", "b", "c", "d"], 2), (["a", "a", "a", "a"], 1)])
def test_at_once_is_no_way_around_the_limit(names: list[str], made: int) -> None:
    credential, _ = make_credential(max_nodes=2)
    start = Barrier(len(names))

    def enrol(name: str) -> bool:
        try:
            start.wait(30)
            return claim_node(credential=credential, name=name)[1]
        except EnrolmentRefused:
            return False
        finally:
            connection.close()

    with ThreadPoolExecutor(len(names)) as boxes:
        results = list(boxes.map(enrol, names))
    assert sum(results) == made == Node.objects.count()
