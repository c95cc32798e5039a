"""What was used: an event of each finished request, sums of it for budgets, and for people.

Events are written by the statement that makes a request record final (``ADD_USAGE``, ``ADD_RESERVED``).
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from datetime import timedelta

from django.db import connection

from core.limits import limits
from gateway.models import ApiKey
from gateway.values import Counter
from wire.contract import OPEN_REQUEST_STATES, RequestState

_COLUMNS = (
    "event_id, created_at, finished_at, gateway_id, tenant, key_id, key_name, model, state, prompt_tokens, completion_tokens, "
    "is_estimated, tokens, cost_micros"
)
_OPEN = ", ".join(f"'{state.value}'" for state in sorted(OPEN_REQUEST_STATES))
# An estimate of ours charges no more than was reserved. A rejected request used nothing.
ADD_USAGE = f"""
INSERT INTO gateway_usageevent ({_COLUMNS})
SELECT r.id, r.created_at, coalesce(r.finished_at, clock_timestamp()), r.gateway_id, r.tenant, r.key_id, r.key_name, r.model,
       r.state, coalesce(r.prompt_tokens, 0), coalesce(r.completion_tokens, 0), r.tokens_estimated,
       LEAST(coalesce(r.prompt_tokens, 0)::bigint + coalesce(r.completion_tokens, 0),
             CASE WHEN r.tokens_estimated THEN r.reserved_tokens END),
       LEAST(ceil(coalesce(r.prompt_tokens, 0) * coalesce(m.input_price, 0)
                  + coalesce(r.completion_tokens, 0) * coalesce(m.output_price, 0))::bigint,
             CASE WHEN r.tokens_estimated THEN r.reserved_micros END)
  FROM {{source}} AS r LEFT JOIN gateway_model AS m ON m.name = r.model
 WHERE r.state NOT IN ({_OPEN}, '{RequestState.REJECTED.value}')
    ON CONFLICT (event_id) DO NOTHING
"""  # noqa: S608  # constants
"""Adds the events of those rows of ``source`` that are final; ``LEAST`` passes over what is null."""
ADD_RESERVED = f"""
INSERT INTO gateway_usageevent ({_COLUMNS})
SELECT r.id, r.created_at, r.finished_at, r.gateway_id, r.tenant, r.key_id, r.key_name, r.model, r.state,
       coalesce(r.prompt_tokens, 0), coalesce(r.completion_tokens, 0), true,
       coalesce(r.reserved_tokens, 0), coalesce(r.reserved_micros, 0)
  FROM {{source}} AS r
    ON CONFLICT (event_id) DO NOTHING
"""  # noqa: S608  # constants
"""Adds the events of requests whose gateway is gone: nobody knows what they used, so they are charged what they might have."""

_SUM = """
SELECT coalesce((SELECT sum({event}) FROM gateway_usageevent AS used WHERE {owner} AND {gateways}
                    AND used.created_at >= %(from)s AND used.created_at < %(until)s), 0)
     + coalesce((SELECT sum({reserved}) FROM gateway_requestrecord AS used WHERE {owner} AND {gateways}
                    AND used.created_at >= %(from)s AND used.created_at < %(until)s AND used.state IN ({open})), 0)
"""
_LIVING = """
SELECT EXISTS (SELECT FROM gateway_gatewayprocess WHERE stopped_at IS NULL AND NOT (id = ANY(%(joined)s::uuid[]))
                  AND heartbeat_at >= statement_timestamp() - make_interval(secs => %(dead_s)s))
"""
_GONE = """
SELECT (SELECT stopped_at IS NOT NULL OR heartbeat_at < statement_timestamp() - make_interval(secs => %(dead_s)s)
          FROM gateway_gatewayprocess WHERE id = %(gateway)s) IS NOT FALSE
   AND NOT EXISTS (SELECT FROM gateway_requestrecord WHERE gateway_id = %(gateway)s AND state = ANY(%(open)s))
"""


class Spent:
    """What PostgreSQL knows of gateways that are gone (``gateway.request.budgets.Spending``)."""

    def sum_before(self, counter: Counter, *, without: Collection[uuid.UUID]) -> int | None:
        """Return what all gateways but these used, None while another one lives, which may hold something."""
        values: dict[str, list[str] | float] = {"joined": [str(one) for one in without], "dead_s": limits().gateway.dead_s}
        with connection.cursor() as cursor:
            cursor.execute(_LIVING, values)
            if cursor.fetchone()[0]:
                return None
        return self._sum(counter, "NOT (used.gateway_id = ANY(%(gateways)s::uuid[]))", [str(one) for one in without])

    def sum_of_gone(self, counter: Counter, gateway_id: uuid.UUID) -> int | None:
        """Return what a gateway used that is gone and whose requests are all closed, None when it is not."""
        open_states = sorted(state.value for state in OPEN_REQUEST_STATES)
        values: dict[str, uuid.UUID | float | list[str]] = {
            "gateway": gateway_id,
            "dead_s": limits().gateway.dead_s,
            "open": open_states,
        }
        with connection.cursor() as cursor:
            cursor.execute(_GONE, values)
            if not cursor.fetchone()[0]:
                return None
        if not counter.kind.is_budget:  # nothing of it runs any more, and its last minute is over as it is dead
            return 0
        return self._sum(counter, "used.gateway_id = ANY(%(gateways)s::uuid[])", [str(gateway_id)])

    def _sum(self, counter: Counter, gateways: str, ids: list[str]) -> int:
        whose, _, name = counter.owner.partition(":")
        owner = "used.tenant = %(tenant)s"
        tenant, starts_at = name, counter.window.starts_at
        if whose == "key":
            owner += " AND used.key_id = %(key)s"
            tenant = ApiKey.objects.values_list("tenant__name", flat=True).get(pk=name)
        parts = {
            "event": "used.cost_micros" if counter.kind.is_cost else "used.tokens",
            "reserved": "used.reserved_micros" if counter.kind.is_cost else "used.reserved_tokens",
            "owner": owner,
            "gateways": gateways,
            "open": _OPEN,
        }
        ends_at = counter.window.ends_at or (starts_at + timedelta(days=1) if starts_at else None)
        values = {"tenant": tenant, "key": name, "gateways": ids, "from": starts_at, "until": ends_at}
        with connection.cursor() as cursor:
            cursor.execute(_SUM.format(**parts), {n: v for n, v in values.items() if n != "key" or whose == "key"})
            return int(cursor.fetchone()[0])
