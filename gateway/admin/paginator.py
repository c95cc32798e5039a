"""A paginator that never counts a large table: it estimates, and says so by its type only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from django.core.paginator import Paginator
from django.db import connection
from django.db.models import QuerySet
from django.utils.functional import cached_property

from core.limits import limits

if TYPE_CHECKING:
    _Paginator = Paginator[Any]  # Any: whichever rows the list shows
else:
    _Paginator = Paginator


class EstimatedPaginator(_Paginator):
    """Counts up to ``page_exact_rows``. Beyond that a filtered list shows this number, all records the planner's estimate."""

    @cached_property
    def count(self) -> int:
        """Return how many rows there are, at least for the page links."""
        queryset = cast("QuerySet[Any]", self.object_list)
        most = limits().gateway.page_exact_rows
        counted = int(queryset.order_by()[: most + 1].count())
        if counted <= most:
            return counted
        return most if queryset.query.where else max(most, _estimate_rows(queryset.query.get_meta().db_table))


def _estimate_rows(table: str) -> int:
    """Return what ANALYZE last saw in a table and its partitions; 0 when it never ran."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(sum(greatest(reltuples, 0)), 0)::bigint FROM pg_class "
            "WHERE relkind = 'r' AND oid IN (SELECT relid FROM pg_partition_tree(%s::regclass))",
            [table],
        )
        row = cursor.fetchone()
    return int(row[0]) if row else 0
