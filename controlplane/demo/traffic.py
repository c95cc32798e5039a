"""Traffic of the demo: the requests of a week, what they used, and how the GPUs did, written in bulk into the product's tables.

Requests are drawn from one seed and copied into the table of records; the product's own statement makes the usage of them, and
its own sweep the sums that charts read.
"""

from __future__ import annotations

import json
import math
import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection, transaction

from controlplane.demo.fleet import (
    ALIASES,
    BURSTS,
    BY_NAME,
    CHAT,
    DAYS,
    EMBEDDINGS,
    GATEWAY_ID,
    MISSING,
    NODES,
    SEED,
    SPEECH,
    TENANTS,
    DemoModel,
    DemoNode,
    DemoTenant,
    rate_at,
)
from controlplane.demo.nodes import Held
from gateway.services.rollups import read_counted_until, roll_up_requests
from gateway.services.usage import ADD_USAGE, RECORDED
from gateway.tasks import maintain_day_partitions
from nodes.services.gpus import derive_gpu_id
from nodes.services.history import FLEET
from wire import clock
from wire.contract import ErrorCode, RequestState

Progress = Callable[[float], None]
"""Takes how much of it is done, from 0 to 1."""
_COLUMNS = (
    "id", "created_at", "gateway_id", "tenant", "key_id", "key_name", "endpoint", "model", "asked_model", "is_streaming",
    "state",
    "error_code", "status_code", "engine_error", "node_id", "node_name", "attempts", "lost_attempts", "max_tokens",
    "prompt_tokens_est", "prompt_tokens", "completion_tokens", "cached_tokens", "tokens_estimated", "bytes_out", "queue_ms",
    "ttfb_ms", "latency_ms", "finished_at", "decision",
)  # fmt: skip
_ASKED = {alias_targets[0][0]: alias for alias, alias_targets, tenant in ALIASES if not tenant}
"""By model, the alias that some clients use."""
_IMAGE = "image input is not supported by this model"
_TOO_LONG = "the prompt has 52,310 tokens, and the context of the model holds 40,960"
_WEIGHTS = [300, 200, 200, 200, 100]
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class DemoKey:
    """An API key of the demo as records name it."""

    id: uuid.UUID
    name: str


@dataclass(frozen=True, slots=True)
class _End:
    """How a request ended. ``error``: what the engine said."""

    state: RequestState
    status: int | None
    code: ErrorCode | None = None
    error: str = ""


_SERVED = _End(RequestState.COMPLETED, 200)


class Week:
    """Draws the requests of the days before ``now``; ``keys`` by the name of their tenant."""

    def __init__(self, now: datetime, keys: Mapping[str, list[DemoKey]]) -> None:
        self._now, self._keys = now, keys
        self._draw = random.Random(SEED)  # noqa: S311  # a scene, no secret

    def list_rows(self, show: Progress, *, requests: int) -> Iterator[tuple[object, ...]]:
        """Yield a row of ``_COLUMNS`` for each request, oldest first."""
        minutes = DAYS * 24 * 60
        whole = sum(rate_at(timedelta(minutes=age)) for age in range(minutes))
        left = 0.0
        for age in range(minutes, 0, -1):
            expected = requests * rate_at(timedelta(minutes=age)) / whole
            left += self._draw.gauss(expected, math.sqrt(expected))
            count = max(0, int(left))
            left -= count
            for second in sorted(self._draw.uniform(0, 60) for _ in range(count)):
                row = self._make(timedelta(seconds=60 * age - second))
                if row is not None:
                    yield row
            if age % 240 == 0:
                show(1 - age / minutes)

    def _make(self, age: timedelta) -> tuple[object, ...] | None:
        draw = self._draw
        (tenant,) = draw.choices(TENANTS, [one.share for one in TENANTS])
        (name,) = draw.choices([one for one, _ in tenant.models], [weight for _, weight in tenant.models])
        if draw.random() < 0.002:
            name = MISSING
        model, key = BY_NAME.get(name), draw.choice(self._keys[tenant.name])
        node = self._choose(name, age)
        end = self._end(tenant, node, age)
        queue_ms, first_ms, took_ms, tokens, generated = self._measure(tenant, model, node, end)
        if timedelta(milliseconds=took_ms) >= age:
            return None  # it would not have ended yet
        at = self._now - age
        is_streaming = draw.random() < tenant.streams and (model is None or model.endpoint not in {EMBEDDINGS, SPEECH})
        is_served, used = end.state is RequestState.COMPLETED, end.state is not RequestState.REJECTED
        has_begun, counted = is_served or end.state is RequestState.CANCELLED, bool(used and node)
        lost = self._lose(name, node, age) if is_served else None
        return (
            self._make_id(at), at, GATEWAY_ID, tenant.name, key.id, key.name, model.endpoint if model else CHAT,
            name, _ASKED.get(name, "") if draw.random() < 0.4 else "", is_streaming, end.state.value,
            end.code and end.code.value, end.status, end.error, node and node.id, node.name if node else "",
            (2 if lost else 1) if node else 0, f"{lost.id.hex} {name}\n" if lost else "",
            draw.choice((None, 512, 1024, 4096)), tokens, tokens if counted else None, generated if counted else None,
            round(tokens * draw.choice((0, 0, 0.3, 0.8))) if is_served and node else None, False, generated * 5 if node else 0,
            queue_ms if node else None, queue_ms + first_ms if node and has_begun else None,
            took_ms, at + timedelta(milliseconds=took_ms), self._decide(name, node, age),
        )  # fmt: skip

    def _make_id(self, at: datetime) -> uuid.UUID:
        # A UUIDv7 (RFC 9562, section 5.7), of the moment and of the seed.
        value = int(at.timestamp() * 1000) << 80 | self._draw.getrandbits(80)
        return uuid.UUID(int=value & ~(0xF << 76) & ~(0x3 << 62) | 7 << 76 | 2 << 62)

    def _list_nodes(self, model: str, age: timedelta) -> list[DemoNode]:
        return [node for node in NODES if model in _models_then(node, age)]

    def _choose(self, model: str, age: timedelta) -> DemoNode | None:
        nodes = self._list_nodes(model, age)
        return self._draw.choices(nodes, [node.slots * node.speed for node in nodes])[0] if nodes else None

    def _end(self, tenant: DemoTenant, node: DemoNode | None, age: timedelta) -> _End:
        chance, draw = self._draw.random(), self._draw
        if chance < 0.006:
            return _End(RequestState.REJECTED, 429, ErrorCode.RATE_LIMITED)
        if node is None:
            return _End(RequestState.REJECTED, 503, ErrorCode.NO_AVAILABLE_NODE)
        burst = next((b for b in BURSTS if b.node == node.name and b.began - b.length < age < b.began), None)
        fails = burst.fails if burst else node.fails
        if draw.random() < fails:
            said = burst.error if burst else node.last_error or "the engine closed the connection before it answered"
            return _End(RequestState.FAILED, 502, ErrorCode.FORWARDED_REQUEST_FAILED, said)
        if chance < 0.010:
            return _End(RequestState.REJECTED, 400, ErrorCode.CONTEXT_LENGTH_EXCEEDED, _TOO_LONG)
        if chance < 0.012 and tenant.name != "platform":
            return _End(RequestState.REJECTED, 400, ErrorCode.BAD_REQUEST, _IMAGE)
        if chance < 0.020:
            return _End(RequestState.CANCELLED, 499, ErrorCode.CLIENT_CLOSED_REQUEST)
        if chance < 0.0207:
            return _End(RequestState.INTERRUPTED, 502, ErrorCode.REQUEST_INTERRUPTED)
        return _SERVED

    def _measure(
        self, tenant: DemoTenant, model: DemoModel | None, node: DemoNode | None, end: _End
    ) -> tuple[int, int, int, int, int]:
        """Return queue, time to the first byte and the whole time in ms, tokens of the prompt and of the answer."""
        draw = self._draw
        prompt = max(4, round(tenant.prompt * draw.lognormvariate(-0.3, 0.8)))
        answer = max(1, round(tenant.answer * draw.lognormvariate(-0.3, 0.7)))
        if end.state is RequestState.REJECTED:
            return 0, 0, 9_000 if end.status == 503 else draw.randint(2, 40), prompt, 0
        speed = node.speed if node else 1.0
        ttft = model.ttft_ms if model else 200.0
        queue = round(draw.expovariate(1 / 900)) if node and draw.random() < 0.25 * node.busy else 0
        first = round(ttft / speed * draw.lognormvariate(0, 0.35) * (1 + prompt / 9_000))
        if model is not None and model.endpoint == EMBEDDINGS:
            return queue, first, queue + first, prompt, 0
        if end.state is not RequestState.COMPLETED:
            answer = round(answer * draw.random()) if end.state is RequestState.CANCELLED else 0
        took = first + round(1000 * answer / ((model.tokens_per_s if model else 50) * speed * draw.uniform(0.8, 1.15)))
        return queue, first, queue + took, prompt, answer

    def _lose(self, model: str, node: DemoNode | None, age: timedelta) -> DemoNode | None:
        """Return a node that failed before another one answered, of one request in a hundred."""
        others = [other for other in self._list_nodes(model, age) if other is not node] if self._draw.random() < 0.01 else []
        return others[0] if others else None

    def _decide(self, model: str, node: DemoNode | None, age: timedelta) -> str | None:
        nodes = self._list_nodes(model, age) if node is not None and age < timedelta(days=2) else []
        if node is None or len(nodes) < 2:
            return None
        draw = self._draw
        compared = [[one.name, *(draw.randint(250, 980) for _ in _WEIGHTS[1:]), 0] for one in nodes]
        decided: dict[str, object] = {
            "reason": "score", "candidates": compared, "chosen": nodes.index(node), "weights": _WEIGHTS,
        }  # fmt: skip
        return json.dumps(decided)


def _models_then(node: DemoNode, age: timedelta) -> tuple[str, ...]:
    """Return what a node had loaded so long ago and was asked for."""
    if node.offline is not None and age < node.offline:
        return ()
    if node.is_drained and age < timedelta(hours=2, minutes=10):
        return ()
    if node.is_cordoned and age < timedelta(hours=26):
        return ()
    if node.loading and age > timedelta(minutes=40):
        return (*node.model_names, node.loading)
    return node.model_names


def write_week(now: datetime, keys: Mapping[str, list[DemoKey]], show: Progress, *, requests: int) -> int:
    """Write the records of the week before ``now`` and what they used; return how many."""
    for days in range(DAYS + 1, -1, -1):
        maintain_day_partitions(today=(now - timedelta(days=days)).date())
    count = 0
    with transaction.atomic(), connection.cursor() as cursor:
        with cursor.copy(f"COPY gateway_requestrecord ({', '.join(_COLUMNS)}) FROM STDIN") as copy:
            for row in Week(now, keys).list_rows(show, requests=requests):
                copy.write_row(row)
                count += 1
        source = f"(SELECT {RECORDED} FROM gateway_requestrecord WHERE gateway_id = '{GATEWAY_ID}' ORDER BY finished_at)"  # noqa: S608  # constants
        cursor.execute(ADD_USAGE.format(source=source))
    show(1.0)
    return count


def sum_up(show: Progress, events: int) -> None:
    """Have everything that was used counted for charts. A worker that does it too leaves this less to do, or nothing."""
    counted, began = 0, clock.now()
    while (until := read_counted_until()) is None or until < began:
        batch = roll_up_requests()
        counted += batch
        show(min(1.0, counted / max(1, events)))
        if not batch:
            clock.sleep(_LOOK_S)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE gateway_requestrecord, gateway_usageevent")
    show(1.0)


_HISTORY = """
INSERT INTO {table} (gpu_id, at, load_percent, vram_used_mb, weights_mb, kv_mb, temperature_c, power_w, active_requests)
SELECT g.id, at, load, g.used * (0.97 + 0.03 * load / 100), g.weights, g.cache * (0.8 + 0.2 * load / 100),
       34 + 0.42 * load + 2 * random(), g.watts * (0.18 + 0.82 * load / 100), round(g.slots * load / 100)
  FROM jsonb_to_recordset(%(gpus)s::jsonb) AS g (id uuid, busy float8, used float8, weights float8, cache float8, watts float8,
       slots float8, off_s float8)
 CROSS JOIN LATERAL (
       SELECT at, LEAST(99.5, GREATEST(0, 100 * g.busy * (0.12 + 0.88 * power(0.5 + 0.5 * cos(
                  2 * pi() * (extract(epoch FROM %(now)s - at) - 7200) / 86400), 1.6)) * (0.75 + 0.5 * random()))) AS load
         FROM generate_series(
              date_bin(%(step)s::interval, %(now)s - %(kept)s::interval, '2000-01-01 00:00:00+00'), %(now)s::timestamptz,
              %(step)s::interval) AS at
        WHERE at < %(now)s - make_interval(secs => g.off_s)) AS moment
    ON CONFLICT DO NOTHING
"""
_FLEET = """
INSERT INTO {table} (gpu_id, at, load_percent, vram_used_mb, weights_mb, kv_mb, temperature_c, power_w, active_requests)
SELECT %(fleet)s, at, avg(load_percent), sum(vram_used_mb), sum(weights_mb), sum(kv_mb), max(temperature_c), sum(power_w),
       sum(active_requests)
  FROM {table} GROUP BY at
    ON CONFLICT DO NOTHING
"""
_LEVELS = (
    ("nodes_gpusample", "10 seconds", "2 hours"), ("nodes_gpuminute", "1 minute", "2 days"),
    ("nodes_gputenminutes", "10 minutes", "8 days"),
)  # fmt: skip


def write_gpu_history(now: datetime, nodes: Mapping[DemoNode, list[Held]]) -> int:
    """Write how GPUs did before ``now``; return how many rows. ``nodes``: what each of their GPUs holds."""
    gpus = [
        {
            "id": str(derive_gpu_id(node.id, str(index))), "busy": max(node.busy, 0.01), "watts": node.watts, **held._asdict(),
            "slots": node.slots / node.gpus, "off_s": node.offline.total_seconds() if node.offline else 0,
        }
        for node, memory in nodes.items()
        for index, held in enumerate(memory)
    ]  # fmt: skip
    rows = 0
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT setseed(0.17)")
        for table, step, kept in _LEVELS:
            cursor.execute(_HISTORY.format(table=table), {"gpus": json.dumps(gpus), "now": now, "step": step, "kept": kept})
            rows += cursor.rowcount
            cursor.execute(_FLEET.format(table=table), {"fleet": FLEET})
    return rows
