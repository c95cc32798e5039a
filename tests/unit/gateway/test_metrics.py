"""Series of requests by model, node and tenant: what is counted where, and that nobody makes their number grow."""

from __future__ import annotations

import uuid

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import RequestCounters
from gateway.values import RequestOutcome
from tests.fakes.limits import set_limits


def scrape(counters: RequestCounters) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples of a scrape by name and values of labels (by the names of these), but for buckets."""
    registry = CollectorRegistry()
    registry.register(counters)
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            if "le" not in sample.labels:
                found.setdefault(sample.name, {})[tuple(value for _, value in sorted(sample.labels.items()))] = sample.value
    return found


def add(counters: RequestCounters, model: str = "m", *, node: int = 1, tenant: str = "t", **said: object) -> None:
    usual = {"state": "completed", "outcome": RequestOutcome.SERVED, "latency_s": 3.0, "ttfb_ms": 1000, "queue_ms": 5,
             "prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 4, "is_streaming": True}  # fmt: skip
    named = {"node_id": uuid.UUID(int=node), "node": f"gpu-{node}", "tenant": tenant}
    counters.add(model=model, **{**usual, **named, **said})  # type: ignore[arg-type]  # what a test changes of the usual


def test_a_request_counts_for_its_model_its_node_and_where_that_is_wished_its_tenant() -> None:
    counters = RequestCounters()
    add(counters)
    add(counters, node=2, outcome=RequestOutcome.FAILED, state="failed", completion_tokens=None)
    counters.count_queued = lambda: {"m": 3}
    seen = scrape(counters)
    assert seen["muster_tokens_total"] == {("prompt", "m"): 20, ("completion", "m"): 5, ("cached", "m"): 8}
    assert (seen["muster_time_per_output_token_seconds_count"], seen["muster_time_per_output_token_seconds_sum"]) == (
        {("m",): 1}, {("m",): 0.5},
    )  # fmt: skip
    assert seen["muster_model_queue_depth"] == {("m",): 3}
    nodes = {key: number for key, number in seen["muster_node_requests_total"].items() if number}
    assert nodes == {("gpu-1", f"node_{1:032x}", "served"): 1, ("gpu-2", f"node_{2:032x}", "failed"): 1}
    assert not [name for name in seen if "tenant" in name], "whoever reads metrics need not know who asks"

    counters.tells_tenants = True
    add(counters)
    seen = scrape(counters)
    assert seen["muster_tenant_requests_total"]["served", "t"] == 1
    assert seen["muster_tenant_tokens_total"] == {("prompt", "t"): 10, ("completion", "t"): 5}


def test_only_a_stream_of_several_tokens_has_a_time_per_token() -> None:
    counters = RequestCounters()
    add(counters, completion_tokens=1)
    add(counters, is_streaming=False)
    add(counters, ttfb_ms=None)
    assert scrape(counters)["muster_time_per_output_token_seconds_count"] == {("m",): 0}


def test_models_nodes_and_tenants_beyond_the_bound_share_a_name_and_none_is_lost() -> None:
    set_limits(gateway={"metrics_names": 3})
    counters = RequestCounters()
    counters.tells_tenants = True
    for number in range(1, 11):
        add(counters, f"m{number}", node=number, tenant=f't{number}"\n')
    counters.count_queued = lambda: {f"m{number}": number for number in range(1, 11)}
    seen = scrape(counters)
    for name, label in (
        ("muster_requests_total", 0), ("muster_node_requests_total", 1), ("muster_tenant_requests_total", 1),
        ("muster_model_queue_depth", 0),
    ):  # fmt: skip
        assert len({key[label] for key in seen[name]}) == 4, name
    assert sum(seen["muster_requests_total"].values()) == 10
    assert sum(seen["muster_node_requests_total"].values()) == 10
    assert seen["muster_tenant_requests_total"]["served", "others"] == 7
    assert seen["muster_model_queue_depth"]["others",] == sum(range(1, 8))
