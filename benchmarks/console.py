"""``./muster bench console``: charts, every page, 100 open Overview pages, on a demo of 1,000 nodes and 10 million requests.

``--browser`` looks at the pages of an ordinary demo in Chromium instead: axe, Lighthouse, and the flows that people time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.errors import BenchmarkError
from benchmarks.storage import open_storage

if TYPE_CHECKING:
    from django.test import Client

ROOT = Path(__file__).resolve().parent.parent
CHART_MS, PAGE_MS, CORE_PERCENT = 20.0, 150.0, 5.0
"""Floors: the median of a chart, the 95th percentile of a page on the server, and what 100 open Overview pages cost."""
OPEN_PAGES = 100
_REPEATS, _LOADS, _WATCHED_S = 7, 20, 20.0


def main(argv: Sequence[str]) -> int:
    """Run the command line; the exit code is 1 when something misses its floor."""
    parser = argparse.ArgumentParser(prog="muster bench console", description=__doc__)
    parser.add_argument("--records", type=int, default=10_000_000, help="requests (default %(default)s)")
    parser.add_argument("--nodes", type=int, default=1_000, help="nodes (default %(default)s)")
    parser.add_argument("--loads", type=int, default=_LOADS, help="of each page (default %(default)s)")
    parser.add_argument("--only", choices=["charts", "pages", "open"], help="leave the others out")
    parser.add_argument(
        "--browser", nargs="*", choices=["axe", "lighthouse", "flows"], metavar="WHAT",
        help="axe, lighthouse, flows (default: all three) on an ordinary demo in Chromium",
    )  # fmt: skip
    parser.add_argument("--data", type=Path, metavar="DIR", help="with --browser: a demo that plays (default: one is started)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.browser is not None:
        from benchmarks.console_browser import look

        return look(arguments.browser or ["axe", "lighthouse", "flows"], arguments.data)
    if arguments.inside:
        return _measure(arguments)
    port = _find_port()
    try:
        with open_storage() as storage:
            environment = {
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "controlplane.settings",
                "DATABASE_URL": storage.database_url,
                "REDIS_URL": storage.redis_url,
                "MUSTER_SECRET_KEY": secrets.token_hex(32),
                "MUSTER_LOG_KEY": secrets.token_urlsafe(32),
                "MUSTER_PUBLIC_URL": f"http://localhost:{port}",
                "MUSTER_LOG_LEVEL": "WARNING",
            }
            migrate = [sys.executable, str(ROOT / "manage.py"), "migrate", "--no-input", "-v", "0"]
            subprocess.run(migrate, cwd=ROOT, env=environment, check=True)
            inside = [sys.executable, "-m", "benchmarks.console", "--inside", *argv]
            return subprocess.run(inside, cwd=ROOT, env=environment, check=False).returncode
    except (BenchmarkError, subprocess.CalledProcessError) as error:
        print(f"muster bench: {error}", file=sys.stderr)
        return 2


def _find_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _measure(arguments: argparse.Namespace) -> int:
    import django

    django.setup()
    from django.core.management import call_command
    from django.db import connection

    from controlplane.commands import Command

    with tempfile.TemporaryDirectory(prefix="muster-console-") as folder:
        call_command(Command("bootstrap"), "--credentials", f"{folder}/credentials.json")
        words = ["--data", folder, "--write-only", "--nodes", str(arguments.nodes), "--records", str(arguments.records)]
        call_command(Command("demo_fleet"), *words)
    with connection.cursor() as cursor:
        for table in ("gateway_requestminute", "gateway_requesttenminutes", "gateway_requesthour", "gateway_requestday"):
            cursor.execute(f"VACUUM (ANALYZE) {table}")  # as autovacuum does
            cursor.execute(f"SELECT count(*), pg_total_relation_size('{table}') FROM {table}")
            rows, size = cursor.fetchone()
            print(f"{table}: {rows:,} rows, {size / 2**20:,.0f} MiB", flush=True)
        cursor.execute("VACUUM (ANALYZE) gateway_requestrecord")
    missed: list[str] = []
    with _fresh_nodes():
        if arguments.only in {None, "charts"}:
            missed += _time_charts()
        if arguments.only in {None, "pages"}:
            missed += _time_pages(arguments.loads)
        if arguments.only in {None, "open"}:
            missed += _watch_open_pages()
    print("\n" + ("\n".join(f"MISSED  {one}" for one in missed) or "every floor is met"))
    return 1 if missed else 0


@contextmanager
def _fresh_nodes() -> Iterator[None]:
    """Have the nodes that are rows heard all the time, as if they sent heartbeats."""
    from controlplane.demo.scale import keep_fresh

    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    task = loop.create_task(keep_fresh())
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)


def _time_charts() -> list[str]:
    """Print how long each chart takes; return those whose median misses its floor."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    from controlplane.demo.fleet import MODELS, NODES, TENANTS
    from gateway.services.rollups import Metric, read_comparison, read_series, read_top
    from gateway.values import Dimension

    node, model, tenant = str(NODES[0].id), MODELS[0].name, TENANTS[0].name
    shapes: dict[str, Callable[[timedelta], object]] = {
        "requests": read_series,
        "latency": lambda span: read_series(span, metric=Metric.LATENCY),
        "TTFT of a model": lambda span: read_series(span, dimension=Dimension.MODEL, name=model, metric=Metric.TTFT),
        "TTFT of a node": lambda span: read_series(span, dimension=Dimension.NODE, name=node, metric=Metric.TTFT),
        "requests of a tenant": lambda span: read_series(span, dimension=Dimension.TENANT, name=tenant),
        "all of Overview": lambda span: read_comparison(span, (Metric.TTFT, Metric.QUEUE_TIME)),
        "top nodes": lambda span: read_top(span, Dimension.NODE, most=10),
        "top models": lambda span: read_top(span, Dimension.MODEL, most=10),
        "tenant × model": lambda span: read_top(span, Dimension.TENANT_MODEL, most=1_000),
    }
    spans = {"15 min": timedelta(minutes=15), "1 h": timedelta(hours=1), "6 h": timedelta(hours=6), "24 h": timedelta(hours=24),
             "7 d": timedelta(days=7), "30 d": timedelta(days=30)}  # fmt: skip
    print(f"\nmedian of {_REPEATS} in ms: the call in Python, and PostgreSQL's own planning and execution (EXPLAIN ANALYZE)")
    print(f"{'':22}" + "".join(f"{span:>16}" for span in spans))
    missed = []
    for title, read in shapes.items():
        cells = []
        for name, span in spans.items():
            times = []
            with CaptureQueriesContext(connection) as queries:
                read(span)
            for _ in range(_REPEATS):
                began = time.perf_counter()
                read(span)
                times.append((time.perf_counter() - began) * 1_000)
            if len(queries) != 1:
                raise BenchmarkError(f"{title} takes {len(queries)} queries")
            median = statistics.median(times)
            cells.append(f"{median:8.1f} {_explain(queries[0]['sql']):7.1f}")
            if median > CHART_MS:
                missed.append(f"chart {title}, {name}: {median:.1f} ms, at most {CHART_MS:g} ms")
        print(f"{title:22}" + "".join(cells), flush=True)
    return missed


def _explain(statement: str) -> float:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) " + statement.replace("%", "%%"))
        found = cursor.fetchone()[0]
    (plan,) = json.loads(found) if isinstance(found, str) else found
    return float(plan["Planning Time"]) + float(plan["Execution Time"])


# Pages


def _sign_in() -> Client:
    """Return a client with the session of the administrator, as a passkey would open it."""
    from django.test import Client

    from core.models import User
    from governance.people import Assurance
    from governance.signin import ASSURANCE, SEEN_AT, SIGNED_IN_AT
    from wire import clock

    client = Client(SERVER_NAME="localhost")
    client.force_login(User.objects.filter(is_superuser=True).order_by("pk")[0])
    session, now = client.session, int(clock.unix_s())
    session.update({ASSURANCE: Assurance.PASSKEY.value, SIGNED_IN_AT: now, SEEN_AT: now})
    session.save()
    return client


def list_paths() -> list[tuple[str, str]]:
    """Return name and path of every page of the navigation, and of the page of one row of each list."""
    from django.apps import apps
    from django.urls import reverse

    from controlplane.navigation import ENTRIES

    found = []
    for entry in ENTRIES:
        for tab in entry.tabs:
            name = str(entry.label) if str(tab.label) == str(entry.label) else f"{entry.label} › {tab.label}"
            found.append((name, tab.url))
            if "." in tab.name:
                rows = apps.get_model(tab.name).objects.order_by("-pk")
                row = rows.filter(name="atlas").first() if tab.name == "nodes.node" else rows.first()
                if row is not None:
                    view = f"admin:{tab.name.replace('.', '_')}_change"
                    found.append((f"{name}: one", reverse(view, args=[row.pk])))
    operation = apps.get_model("governance", "Operation").objects.order_by("-requested_at").first()
    if operation is not None:
        found.append(("Approvals: one", reverse("approvals:operation", args=[operation.printed_id])))
    found += [(f"Overview, {span}", f"/admin/?range={span}") for span in ("15min", "6h", "24h", "7d", "30d")]
    return found


def _time_pages(loads: int) -> list[str]:
    """Print how long the server takes for each page; return those that miss their floor."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    from controlplane.serve_control import spare_loaded_objects

    client, missed = _sign_in(), []
    spare_loaded_objects()  # as the server does
    print(f"\n{loads} loads of each page in ms: on the server, and what of it its own thread computed")
    print(f"{'':34}{'p50':>8}{'p95':>8}{'CPU':>8}{'queries':>9}{'in SQL':>9}{'KiB':>8}")
    for name, path in list_paths():
        client.get(path)  # the first one compiles the template
        answer = client.get(path)
        if answer.status_code != 200:
            missed.append(f"page {name} ({path}): HTTP {answer.status_code}")
            print(f"{name:34}  HTTP {answer.status_code}", flush=True)
            continue
        times, works = [], []
        for _ in range(loads):
            began, worked = time.perf_counter(), time.thread_time()
            answer = client.get(path)
            times.append((time.perf_counter() - began) * 1_000)
            works.append((time.thread_time() - worked) * 1_000)
        with CaptureQueriesContext(connection) as queries:
            client.get(path)
        in_sql = sum(float(query["time"]) for query in queries.captured_queries) * 1_000
        p50, p95 = statistics.median(times), sorted(times)[max(0, round(0.95 * loads) - 1)]
        size = len(answer.getvalue() if answer.streaming else answer.content) / 1024
        print(
            f"{name:34}{p50:8.0f}{p95:8.0f}{statistics.median(works):8.0f}{len(queries):9}{in_sql:9.0f}{size:8.0f}", flush=True
        )
        if p95 > PAGE_MS:
            missed.append(f"page {name} ({path}): p95 {p95:.0f} ms, at most {PAGE_MS:g} ms")
    return missed


# Open pages


def _watch_open_pages() -> list[str]:
    """Print what 100 open Overview pages cost the control plane; return that when it misses its floor."""
    from django.conf import settings

    client = _sign_in()
    cookie = f"{settings.SESSION_COOKIE_NAME}={client.cookies[settings.SESSION_COOKIE_NAME].value}"
    port = int(str(settings.PUBLIC_URL).rstrip("/").rpartition(":")[2])
    server = subprocess.Popen([sys.executable, "-m", "controlplane.serve_control", "--port", str(port)], cwd=ROOT)
    try:
        alone_s, used_s, pushes, lost = asyncio.run(_open_pages(port, cookie, psutil.Process(server.pid)))
    finally:
        server.terminate()
        server.wait()
    # It looks for problems all the time, whoever looks on.
    percent, alone = 100 * (used_s - alone_s) / _WATCHED_S, 100 * alone_s / _WATCHED_S
    cost = f"{percent:.1f} % of a core beside the {alone:.1f} % without any"
    print(f"\n{OPEN_PAGES} open Overview pages: {cost}, {pushes} pushes in {_WATCHED_S:g} s")
    what = f"{OPEN_PAGES} open Overview pages: {percent:.1f} % of a core, at most {CORE_PERCENT:g} %; the server closed {lost}"
    return [what] if lost or percent > CORE_PERCENT else []


async def _open_pages(port: int, cookie: str, server: psutil.Process) -> tuple[float, float, int, int]:
    from websockets.asyncio.client import connect

    headers = {"Cookie": cookie, "Origin": f"http://localhost:{port}"}
    pushes = 0

    async def follow() -> None:
        nonlocal pushes
        async with connect(f"ws://localhost:{port}/ws/overview", additional_headers=headers, proxy=None) as page:
            async for _ in page:
                pushes += 1

    async with asyncio.timeout(60):
        while True:
            try:
                _reader, writer = await asyncio.open_connection("localhost", port)
                writer.close()
                break
            except OSError:
                await asyncio.sleep(0.2)

    async def watch() -> float:
        before = sum(server.cpu_times()[:2])
        await asyncio.sleep(_WATCHED_S)
        return float(sum(server.cpu_times()[:2]) - before)

    await asyncio.sleep(5)
    alone_s = await watch()
    pages = []
    for _ in range(OPEN_PAGES):
        pages.append(asyncio.create_task(follow()))
        await asyncio.sleep(0.2)
    await asyncio.sleep(5)  # they are open, and what a first look costs is over
    pushes = 0
    used_s = await watch()
    lost = [page for page in pages if page.done()]
    for page in pages:
        page.cancel()
    await asyncio.gather(*pages, return_exceptions=True)
    return alone_s, used_s, pushes, len(lost)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
