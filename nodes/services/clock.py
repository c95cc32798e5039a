"""The clock by which machines of one installation agree: the database's. That of any one of them may be wrong."""

from __future__ import annotations

from datetime import datetime

from django.db import connection
from django.db.models import QuerySet
from django.db.models.functions import Now

from nodes.models import Node


def read_clock() -> datetime:
    """Return what time it is. What one process writes and another one judges by its age is reckoned from this."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT statement_timestamp()")
        row = cursor.fetchone()
    now: datetime = row[0]
    return now


def with_clock(nodes: QuerySet[Node]) -> QuerySet[Node]:
    """Have each box come with the time at which it was read, for ``clock_of``."""
    return nodes.annotate(database_now=Now())


def clock_of(node: Node) -> datetime:
    """Return what time it was when a box was read ``with_clock``: its age and its status count then."""
    now: datetime = node.database_now  # type: ignore[attr-defined]  # the annotation
    return now
