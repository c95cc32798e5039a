"""Prometheus series of the gateway. Labels come from closed sets (states, codes, surfaces) and from allow-listed models.

What changes once a request is kept in plain numbers by ``RequestCounters`` and turned into series at a scrape: twelve
locked increments would cost more than relaying a chunk does. It is touched on the event loop thread only.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from core.db.threads import count_calls
from core.hints import dropped_hints, unreadable_hints
from core.limits import limits
from gateway.values import RequestOutcome
from wire import RELEASE
from wire.ids import format_id

_OTHERS = "others"
"""What stands for models, nodes and tenants beyond those that a scrape names (``GatewayLimits.metrics_names``)."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

REFUSALS = Counter("muster_refusals_total", "Requests not accepted, or refused by the engine for what they hold", ["code"])
ERRORS = Counter("muster_request_errors_total", "Accepted requests that failed or were left by their caller", ["code"])
REDISPATCHES = Counter(
    "muster_redispatches_total", "Requests sent to another node, or with a stream that it went on with", ["reason"]
)
FAILOVER_SLOTS = Counter(
    "muster_failover_slots_total", "Slots held for requests of nodes that missed two heartbeats, and used by them", ["event"]
)
FAILOVER_HELD = Gauge("muster_failover_slots_held", "Slots held now for requests of nodes that missed two heartbeats")
BUDGET_REFUSALS = Counter(
    "muster_budget_refusals_total",
    "Requests refused for a hard budget: used up, or because nobody could say what is left",
    ["kind", "reason"],
)
BUDGETS_HELD = Gauge("muster_budgets_held", "Limits and budgets of which this gateway holds a share")
BUDGET_ERRORS = Counter("muster_budget_errors_total", "Rounds of budgets that were not answered", ["dealer"])
VALKEY_AWAY_SINCE = Gauge(
    "muster_budgets_valkey_away_since_seconds", "When Valkey last stopped to answer rounds of budgets, 0 = it answers"
)
CONTINUED = Counter("muster_continued_streams_total", "Streams that their node broke and that might be resumed", ["result"])
TICKETS = Counter("muster_tickets_total", "Tickets of this gateway by what became of them", ["event"])
ALERTS = Gauge(
    "muster_alerts", "Problems that are there now, silenced ones too, of the whole installation", ["kind", "severity"]
)
QUEUE_DEPTH = Gauge("muster_queue_depth", "Requests waiting for a node")
WORKERS = Gauge("muster_workers_connected", "Nodes reachable from this gateway")
RECORDS_DROPPED = Counter("muster_records_dropped_total", "Refused requests of which no record is kept: too many at once")

BUILD = Gauge("muster_build_info", "1, and which release runs", ["release", "part"])
BUILD.labels(RELEASE, "gateway").set(1)
ACCESS_LINES_DROPPED = Counter(
    "muster_access_lines_dropped_total", "Lines of the access log that were not written: nobody read them in time"
)


class _Timing:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        running, result = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            result.append((bound, float(running)))
        return result


class _ModelCounters:
    __slots__ = ("cached_tokens", "completion_tokens", "latency", "per_token", "prompt_tokens", "queue_wait", "states", "ttfb")

    def __init__(self) -> None:
        self.states: defaultdict[str, int] = defaultdict(int)
        self.latency, self.ttfb, self.queue_wait, self.per_token = _Timing(), _Timing(), _Timing(), _Timing(_TOKEN_SECONDS)
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0


class _TenantCounters:
    __slots__ = ("completion_tokens", "outcomes", "prompt_tokens")

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(RequestOutcome, 0)
        self.prompt_tokens = self.completion_tokens = 0


class _NodeCounters:
    __slots__ = ("names", "outcomes")

    def __init__(self, node: str, node_id: str) -> None:
        self.names = [node, node_id]
        self.outcomes = dict.fromkeys(RequestOutcome, 0)


def show_alerts(counts: Mapping[tuple[str, str], int]) -> None:
    """Have a scrape show how many problems of which kind and severity there are."""
    ALERTS.clear()
    for (kind, severity), count in counts.items():
        ALERTS.labels(kind, severity).set(count)


class RequestCounters(Collector):
    """Counts requests, their times and their tokens by model."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.flushes = dict.fromkeys(("ok", "refused", "failed"), 0)
        """Group commits of records, by what became of them."""
        self.count_waiting: Callable[[], Mapping[str, int]] = dict
        """Returns how many requests wait, by tier."""
        self.read_reuse: Callable[[], tuple[int, float]] = lambda: (0, 0.0)
        """Returns how many prompts were placed among several nodes, and the sum of their shares that the chosen node had."""
        self.count_pending: Callable[[], int] = int
        """Returns how many changes of records are not written yet."""
        self.count_queued: Callable[[], Mapping[str, int]] = dict
        """Returns how many requests wait, by model."""
        self.tells_tenants = False
        """Whether a scrape names tenants, which whoever reads metrics may not know."""
        self._outcomes = dict.fromkeys(RequestOutcome, 0)
        self._models: dict[str, _ModelCounters] = {}
        self._nodes: dict[uuid.UUID | None, _NodeCounters] = {}
        self._tenants: dict[str, _TenantCounters] = {}

    def add(
        self,
        *,
        model: str,
        state: str,
        outcome: RequestOutcome,
        latency_s: float,
        ttfb_ms: int | None,
        queue_ms: int | None,
        prompt_tokens: int | None,
        completion_tokens: int | None,
        cached_tokens: int | None = None,
        is_streaming: bool = False,
        node_id: uuid.UUID | None = None,
        node: str = "",
        tenant: str = "",
    ) -> None:
        """Count a request that was accepted and has ended. ``node_id`` None: it got to none."""
        self._outcomes[outcome] += 1
        counters = self._models.get(model)
        if counters is None:
            counters = self._open_model(model)
        if node_id is not None:
            (self._nodes.get(node_id) or self._open_node(node_id, node)).outcomes[outcome] += 1
        if self.tells_tenants:
            tenant_counters = self._tenants.get(tenant) or self._open_tenant(tenant)
            tenant_counters.outcomes[outcome] += 1
            tenant_counters.prompt_tokens += prompt_tokens or 0
            tenant_counters.completion_tokens += completion_tokens or 0
        if is_streaming and ttfb_ms is not None and completion_tokens is not None and completion_tokens > 1:
            counters.per_token.add(max(0.0, latency_s - ttfb_ms / 1000) / (completion_tokens - 1))
        counters.states[state] += 1
        counters.latency.add(latency_s)
        if ttfb_ms is not None:
            counters.ttfb.add(ttfb_ms / 1000)
        if queue_ms is not None:
            counters.queue_wait.add(queue_ms / 1000)
        counters.prompt_tokens += prompt_tokens or 0
        counters.completion_tokens += completion_tokens or 0
        counters.cached_tokens += cached_tokens or 0

    def _open_model(self, model: str) -> _ModelCounters:
        name = model if len(self._models) < limits().gateway.metrics_names else _OTHERS
        return self._models.setdefault(name, _ModelCounters())

    def _open_node(self, node_id: uuid.UUID, node: str) -> _NodeCounters:
        if len(self._nodes) < limits().gateway.metrics_names:
            return self._nodes.setdefault(node_id, _NodeCounters(node, format_id("node", node_id)))
        return self._nodes.setdefault(None, _NodeCounters(_OTHERS, ""))

    def _open_tenant(self, tenant: str) -> _TenantCounters:
        name = tenant if len(self._tenants) < limits().gateway.metrics_names else _OTHERS
        return self._tenants.setdefault(name, _TenantCounters())

    def count(self, outcome: RequestOutcome) -> None:
        self._outcomes[outcome] += 1

    def collect(self) -> Iterator[Metric]:
        unreadable = "Messages from Valkey that were no hints of ours"
        yield CounterMetricFamily("muster_messages_unreadable", unreadable, unreadable_hints.total)
        yield CounterMetricFamily("muster_hints_dropped", "Hints for which there was no room", dropped_hints.total)
        yield GaugeMetricFamily("muster_requests_in_flight", "Accepted requests that are not final", self.in_flight)
        waiting = GaugeMetricFamily("muster_queue_waiting", "Requests waiting for a node, by tier", labels=["tier"])
        for tier, number in self.count_waiting().items():
            waiting.add_metric([tier], number)
        yield waiting
        queued = GaugeMetricFamily("muster_model_queue_depth", "Requests waiting for a node, by model", labels=["model"])
        rest = 0
        for index, (model, number) in enumerate(sorted(self.count_queued().items(), key=lambda item: -item[1])):
            if index < limits().gateway.metrics_names:
                queued.add_metric([model], number)
            else:
                rest += number
        if rest:
            queued.add_metric([_OTHERS], rest)
        yield queued
        prompts, reused = self.read_reuse()
        yield CounterMetricFamily("muster_prompts_placed", "Prompts for which there were several nodes", prompts)
        what = "Sum of the shares of these prompts that their node had probably computed, 0 to 1 each"
        yield CounterMetricFamily("muster_prompt_shares_reused", what, reused)
        text = "Calls for callers that run in the database or wait for one of its threads"
        yield GaugeMetricFamily("muster_database_calls", text, count_calls())
        yield GaugeMetricFamily("muster_records_pending", "Record changes not yet written", self.count_pending())
        flushes = CounterMetricFamily("muster_record_flushes", "Group commits of request records", labels=["result"])
        for result, number in self.flushes.items():
            flushes.add_metric([result], number)
        yield flushes
        outcomes = CounterMetricFamily("muster_request_outcomes", "Requests by what became of them", labels=["outcome"])
        for outcome, count in self._outcomes.items():
            outcomes.add_metric([outcome], count)
        yield outcomes
        requests = CounterMetricFamily("muster_requests", "Requests that reached a final state", labels=["model", "state"])
        tokens = CounterMetricFamily("muster_tokens", "Tokens of completed requests", labels=["model", "kind"])
        latency = HistogramMetricFamily("muster_request_seconds", "Acceptance to last byte", labels=["model"])
        ttfb = HistogramMetricFamily("muster_request_ttfb_seconds", "Acceptance to first byte", labels=["model"])
        queue = HistogramMetricFamily("muster_queue_wait_seconds", "Time spent waiting for a node", labels=["model"])
        text = "From the first byte of a stream to its end, by the tokens after the first"
        per_token = HistogramMetricFamily("muster_time_per_output_token_seconds", text, labels=["model"])
        for model, counters in sorted(self._models.items()):
            for state, count in sorted(counters.states.items()):
                requests.add_metric([model, state], count)
            tokens.add_metric([model, "prompt"], counters.prompt_tokens)
            tokens.add_metric([model, "completion"], counters.completion_tokens)
            tokens.add_metric([model, "cached"], counters.cached_tokens)
            latency.add_metric([model], counters.latency.buckets(), counters.latency.total)
            ttfb.add_metric([model], counters.ttfb.buckets(), counters.ttfb.total)
            queue.add_metric([model], counters.queue_wait.buckets(), counters.queue_wait.total)
            per_token.add_metric([model], counters.per_token.buckets(), counters.per_token.total)
        yield from (requests, tokens, latency, ttfb, queue, per_token)
        yield from self._collect_nodes()
        if self.tells_tenants:
            yield from self._collect_tenants()

    def _collect_nodes(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "muster_node_requests", "Requests by the node that had them last", labels=["node", "node_id", "outcome"]
        )
        for counters in self._nodes.values():
            for outcome, number in counters.outcomes.items():
                family.add_metric([*counters.names, outcome], number)
        yield family

    def _collect_tenants(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("muster_tenant_requests", "Accepted requests by tenant", labels=["tenant", "outcome"])
        tokens = CounterMetricFamily("muster_tenant_tokens", "Tokens of requests by tenant", labels=["tenant", "kind"])
        for tenant, counters in sorted(self._tenants.items()):
            for outcome, number in counters.outcomes.items():
                requests.add_metric([tenant, outcome], number)
            tokens.add_metric([tenant, "prompt"], counters.prompt_tokens)
            tokens.add_metric([tenant, "completion"], counters.completion_tokens)
        yield from (requests, tokens)


COUNTERS = RequestCounters()
REGISTRY.register(COUNTERS)
