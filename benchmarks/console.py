"""``./muster bench console``: how fast the sums of charts are made, and how long charts take that have millions behind."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.storage import open_storage

ROOT = Path(__file__).resolve().parent.parent
DAYS, NODES, MODELS, TENANTS, KEYS = 30, 1_000, 50, 20, 200
FLOOR_MS = 20.0
_CHUNK = 250_000
_REPEATS = 7

# An installation of 1,000 nodes: some models and tenants are asked much more often than others, all nodes about as often.
_ADD = """
INSERT INTO gateway_usageevent (event_id, created_at, finished_at, gateway_id, tenant, key_id, key_name, model, state,
    prompt_tokens, completion_tokens, tokens, cost_micros, is_estimated, node_id, status_code, queue_ms, ttft_ms, latency_ms)
SELECT gen_random_uuid(), at, at, 'a0000000-0000-0000-0000-000000000000', 'tenant ' || tenant, md5('key' || key)::uuid,
       'key ' || key, 'model ' || model,
       CASE WHEN fate < 0.01 THEN 'failed' WHEN fate < 0.04 THEN 'rejected' ELSE 'completed' END,
       500, 200, 700, 90, false, CASE WHEN fate BETWEEN 0.01 AND 0.04 THEN NULL ELSE md5('node' || node)::uuid END,
       CASE WHEN fate < 0.01 THEN 502 WHEN fate < 0.04 THEN 429 ELSE 200 END,
       CASE WHEN fate > 0.7 THEN 1000 * fate ELSE 0 END, exp(random_normal(5, 0.7)), exp(random_normal(8, 0.7)) + 200
  FROM (SELECT statement_timestamp() - make_interval(secs => %(days)s * 86400.0 * (1 - n::float8 / %(records)s)) AS at,
               random() AS fate, floor(%(nodes)s * random()) AS node, floor(%(models)s * random() ^ 2) AS model,
               floor(%(tenants)s * random() ^ 2) AS tenant, floor(%(keys)s * random() ^ 2) AS key
          FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n) AS request
"""


def main(argv: Sequence[str]) -> int:
    """Run the command line; the exit code is 1 when a chart takes longer than the floor."""
    parser = argparse.ArgumentParser(prog="muster bench console", description=__doc__)
    parser.add_argument("--records", type=int, default=10_000_000, help="requests within 30 days (default %(default)s)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.inside:
        return _measure(arguments.records)
    try:
        with open_storage() as storage:
            environment = {
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "controlplane.settings",
                "DATABASE_URL": storage.database_url,
                "REDIS_URL": storage.redis_url,
                "MUSTER_SECRET_KEY": secrets.token_hex(32),
                "MUSTER_LOG_LEVEL": "WARNING",
            }
            migrate = [sys.executable, str(ROOT / "manage.py"), "migrate", "--no-input", "-v", "0"]
            subprocess.run(migrate, cwd=ROOT, env=environment, check=True)
            inside = [sys.executable, "-m", "benchmarks.console", "--inside", "--records", str(arguments.records)]
            return subprocess.run(inside, cwd=ROOT, env=environment, check=False).returncode
    except (BenchmarkError, subprocess.CalledProcessError) as error:
        print(f"muster bench: {error}", file=sys.stderr)
        return 2


def _measure(records: int) -> int:
    import django

    django.setup()
    from django.db import connection

    from gateway.models import Model
    from gateway.services.rollups import roll_up_requests

    Model.objects.bulk_create([Model(name=f"model {number}", allowed=True) for number in range(MODELS)])
    began = time.perf_counter()
    for first in range(0, records, _CHUNK):
        values = {"records": records, "days": DAYS, "nodes": NODES, "models": MODELS, "tenants": TENANTS, "keys": KEYS}
        with connection.cursor() as cursor:
            cursor.execute(_ADD, values | {"first": first + 1, "last": min(first + _CHUNK, records)})
    print(f"{records:,} requests of {DAYS} days written in {time.perf_counter() - began:.0f} s", flush=True)

    began, longest_s = time.perf_counter(), 0.0
    counted = 0
    while True:
        before = time.perf_counter()
        batch = roll_up_requests()
        longest_s = max(longest_s, time.perf_counter() - before)
        counted += batch
        if not batch:
            break
    took_s = time.perf_counter() - began
    rate = counted / took_s
    print(f"summed up in {took_s:.0f} s: {rate:,.0f} requests a second, longest round {longest_s:.1f} s", flush=True)
    with connection.cursor() as cursor:
        for table in ("gateway_requestminute", "gateway_requesttenminutes", "gateway_requesthour", "gateway_requestday"):
            cursor.execute(f"VACUUM (ANALYZE) {table}")  # as autovacuum does
            cursor.execute(f"SELECT count(*), pg_total_relation_size('{table}') FROM {table}")
            rows, size = cursor.fetchone()
            print(f"{table}: {rows:,} rows, {size / 2**20:,.0f} MiB", flush=True)
    return 1 if max(_time_charts()) > FLOOR_MS else 0


def _time_charts() -> list[float]:
    """Print how long each chart takes and return the medians in ms."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    from gateway.services.rollups import Metric, read_series, read_top
    from gateway.values import Dimension

    with connection.cursor() as cursor:
        cursor.execute("SELECT md5('node1')::uuid::text")
        node = cursor.fetchone()[0]
    shapes: dict[str, Callable[[timedelta], object]] = {
        "requests": read_series,
        "latency": lambda span: read_series(span, metric=Metric.LATENCY),
        "TTFT of a model": lambda span: read_series(span, dimension=Dimension.MODEL, name="model 1", metric=Metric.TTFT),
        "TTFT of a node": lambda span: read_series(span, dimension=Dimension.NODE, name=node, metric=Metric.TTFT),
        "requests of a tenant": lambda span: read_series(span, dimension=Dimension.TENANT, name="tenant 1"),
        "top nodes": lambda span: read_top(span, Dimension.NODE, most=10),
        "top models": lambda span: read_top(span, Dimension.MODEL, most=10),
        "tenant × model": lambda span: read_top(span, Dimension.TENANT_MODEL, most=1_000),
    }
    spans = {"15 min": timedelta(minutes=15), "1 h": timedelta(hours=1), "6 h": timedelta(hours=6), "24 h": timedelta(hours=24),
             "7 d": timedelta(days=7), "30 d": timedelta(days=30)}  # fmt: skip
    print(f"\nmedian of {_REPEATS} in ms: the call in Python, and PostgreSQL's own planning and execution (EXPLAIN ANALYZE)")
    print(f"{'':22}" + "".join(f"{span:>16}" for span in spans))
    medians = []
    for title, read in shapes.items():
        cells = []
        for span in spans.values():
            times = []
            with CaptureQueriesContext(connection) as queries:
                read(span)
            for _ in range(_REPEATS):
                began = time.perf_counter()
                read(span)
                times.append((time.perf_counter() - began) * 1_000)
            if len(queries) != 1:
                raise BenchmarkError(f"{title} takes {len(queries)} queries")
            medians.append(statistics.median(times))
            cells.append(f"{medians[-1]:8.1f} {_explain(queries[0]['sql']):7.1f}")
        print(f"{title:22}" + "".join(cells), flush=True)
    return medians


def _explain(statement: str) -> float:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) " + statement.replace("%", "%%"))
        found = cursor.fetchone()[0]
    (plan,) = json.loads(found) if isinstance(found, str) else found
    return float(plan["Planning Time"]) + float(plan["Execution Time"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
