"""Prometheus series of the gateway. Labels come from closed sets (states, codes, surfaces) and from allow-listed models."""

from __future__ import annotations

from functools import lru_cache

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

REQUESTS = Counter("muster_requests_total", "Requests that reached a final state", ["model", "state"])
REFUSALS = Counter("muster_refusals_total", "Requests refused before acceptance", ["code"])
ERRORS = Counter("muster_request_errors_total", "Accepted requests that ended with an error", ["code"])
LATENCY = Histogram("muster_request_seconds", "Acceptance to last byte", ["model"], buckets=_SECONDS)
TTFB = Histogram("muster_request_ttfb_seconds", "Acceptance to first byte", ["model"], buckets=_SECONDS)
QUEUE_WAIT = Histogram("muster_queue_wait_seconds", "Time spent waiting for a node", ["model"], buckets=_SECONDS)
TOKENS = Counter("muster_tokens_total", "Tokens of completed requests", ["model", "kind"])
REDISPATCHES = Counter("muster_redispatches_total", "Requests sent to another node before their first byte", ["reason"])
IN_FLIGHT = Gauge("muster_requests_in_flight", "Accepted requests that are not final")
QUEUE_DEPTH = Gauge("muster_queue_depth", "Requests waiting for a node")
WORKERS = Gauge("muster_workers_connected", "Nodes reachable from this gateway")
RECORDS_PENDING = Gauge("muster_records_pending", "Record changes not yet written")
RECORD_FLUSHES = Counter("muster_record_flushes_total", "Group commits of request records", ["result"])


@lru_cache(maxsize=4096)
def request_counter(model: str, state: str) -> Counter:
    """Return the child counter; looking it up each time costs more than incrementing it."""
    return REQUESTS.labels(model, state)


@lru_cache(maxsize=4096)
def timing(model: str) -> tuple[Histogram, Histogram, Histogram]:
    """Return the latency, TTFB and queue-wait histograms of a model."""
    return LATENCY.labels(model), TTFB.labels(model), QUEUE_WAIT.labels(model)


@lru_cache(maxsize=4096)
def token_counters(model: str) -> tuple[Counter, Counter]:
    """Return the prompt and completion token counters of a model."""
    return TOKENS.labels(model, "prompt"), TOKENS.labels(model, "completion")
