"""``GET /metrics`` in Prometheus' text format: the names of the model-runner specification, and ours beside them.

Label values are bounded: models are the owner's, tenants are counted by name up to a limit, codes and states are ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from runner import AGENT_VERSION
from runner.errors import RunnerError
from runner.limits import MIB, limits
from runner.parts import Parts
from runner.pool.models import Model, ModelState, sum_known
from runner.serving.costs import MICROS, CostSummary
from runner.serving.request import Counters, Histogram
from runner.telemetry import Reading
from wire.bridge import GpuInfo

_PREFIX = "muster_runner"
Rows = Iterable[tuple[Sequence[str], float]]
_SHOWN: frozenset[str] = frozenset({
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason", "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc", "vllm:num_preemptions", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits",
    "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success", "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
    "tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens", "tgi_request_count", "tgi_request_success",
    "tgi_request_failure", "tgi_request_queue_duration", "tgi_request_inference_duration",
    "tgi_request_mean_time_per_token_duration", "tgi_request_generated_tokens", "tgi_request_input_length",
    "llamacpp:requests_processing", "llamacpp:requests_deferred", "llamacpp:n_busy_slots_per_decode",
    "llamacpp:prompt_tokens", "llamacpp:tokens_predicted", "llamacpp:prompt_seconds", "llamacpp:tokens_predicted_seconds",
})  # fmt: skip
"""Families that are shown, less the ``_total`` of counters; none of ours is called so (with ``vllm`` ours go on with ``_``)."""
_ENDINGS = ("_total", "_bucket", "_sum", "_count")
_KEPT_LABELS = frozenset({"le", "quantile", "reason", "finished_reason", "err", "engine"})
"""What tells samples of a model apart; whatever else an engine labels is dropped, and ``model`` and ``replica`` are added."""


async def write_metrics(parts: Parts) -> tuple[bytes, str]:
    """Return the metrics and their content type."""
    reading = await parts.look()
    engines = await _read_engines(parts.pool.registry.models)
    try:
        spending = await parts.costs.summary()
    except RunnerError:  # the ledger is out of order, which must not blind whoever looks after the node
        spending = None
    # In OpenMetrics, which Prometheus asks for, the library would put ``_`` for the colons in the names of engines' series.
    return generate_latest(_Collector(parts, reading, spending, engines)), CONTENT_TYPE_PLAIN_0_0_4


async def _read_engines(models: list[Model]) -> list[Metric]:
    asked = [
        (model.model_id, index, replica.supervisor.engine)
        for model in models
        if model.is_ready
        for index, replica in enumerate(model.replicas)
    ]
    # All are asked at once, and one that is late is left out.
    texts = await asyncio.gather(*(engine.read_metrics() for _, _, engine in asked))
    return show_series((model, index, text) for (model, index, _), text in zip(asked, texts, strict=True))


def show_series(texts: Iterable[tuple[str, int, str]]) -> list[Metric]:
    """Return the engines' own series: of each model, replica (from 0) and its metrics as text, those that are known.

    A text that is too long, or is none of this format, shows nothing. Samples beyond ``shown_samples`` are left out.
    """
    shown: dict[str, Metric] = {}
    seen: set[tuple[object, ...]] = set()
    for model, replica, text in texts:
        room = limits().engines.shown_samples
        for family in _read_families(text):
            mine = shown.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            if mine.type != family.type:
                continue
            for sample in family.samples[:room]:
                kept = {name: value for name, value in sample.labels.items() if name in _KEPT_LABELS}
                labels = {"model": model, "replica": str(replica), **kept}
                key = (sample.name, *sorted(labels.items()))
                if key not in seen:  # Prometheus refuses the whole page when two samples have the same labels
                    seen.add(key)
                    mine.add_sample(sample.name, labels, sample.value)
            room = max(0, room - len(family.samples))
    return list(shown.values())


def _read_families(text: str) -> list[Metric]:
    if len(text) > limits().engines.shown_bytes:
        return []
    known = "\n".join(line for line in text.splitlines() if _names_shown(line))
    try:
        return [family for family in text_string_to_metric_families(known + "\n") if family.samples]
    except ValueError:
        return []


def _names_shown(line: str) -> bool:
    words = line.split(None, 3)
    if line.startswith("#"):
        name = words[2] if len(words) > 2 and words[1] in {"TYPE", "HELP"} else ""
    else:
        name = line.partition("{")[0].split(" ", 1)[0]
    return name in _SHOWN or any(name.endswith(ending) and name.removesuffix(ending) in _SHOWN for ending in _ENDINGS)


class _Collector:
    def __init__(self, parts: Parts, reading: Reading, spending: CostSummary | None, engines: list[Metric]) -> None:
        self._parts = parts
        self._reading = reading
        self._spending = spending
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        models, counters = self._parts.pool.registry.models, self._parts.counters
        yield from _requests(counters)
        yield from _served(models, counters)
        yield from _queues(models, self._parts)
        yield from _memory(models, self._reading)
        yield from _loads(models)
        yield from _clusters(models)
        yield from _operations(self._parts)
        if self._spending is not None:
            yield from _money(self._spending)
        yield from self._engines
        this = [((AGENT_VERSION, self._parts.governance.runner_id), 1)]
        yield _gauge(f"{_PREFIX}_info", "Which program this is", "version runner_id", this)


def _gauge(name: str, text: str, labels: str, rows: Rows) -> Metric:
    """Return a family of gauges: a number for each row's values of ``labels``, whose names are parted by spaces."""
    family = GaugeMetricFamily(name, text, labels=labels.split())
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _counter(name: str, text: str, labels: str, rows: Rows) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels.split())
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _histogram(name: str, text: str, rows: Iterable[tuple[str, Histogram]]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=["model"])
    for model, values in rows:
        so_far = accumulate(values.counts)
        bounds = (*(str(bound) for bound in values.bounds), "+Inf")
        family.add_metric([model], [(bound, float(count)) for bound, count in zip(bounds, so_far, strict=True)], values.total)
    return family


def _requests(counters: Counters) -> Iterator[Metric]:
    yield _counter("vllm_requests", "Total requests processed", "model tenant status", counters.requests.items())
    by_tenant: dict[str, int] = {}
    for (_, tenant, _), count in counters.requests.items():
        by_tenant[tenant] = by_tenant.get(tenant, 0) + count
    tenants = [((tenant,), count) for tenant, count in by_tenant.items()]
    yield _counter(f"{_PREFIX}_tenant_requests", "Requests by tenant", "tenant", tenants)
    refusals = [((code,), count) for code, count in counters.refusals.items()]
    yield _counter(f"{_PREFIX}_refusals", "Requests that were not carried out, by reason", "code", refusals)


def _served(models: list[Model], counters: Counters) -> Iterator[Metric]:
    served = {model.model_id: counters.of(model.model_id) for model in models if model.is_ready} | counters.models
    each = served.items()
    yield _gauge("vllm_cache_hit_rate", "Cache hit rate", "model", [((name,), one.cache_hit_rate) for name, one in each])
    yield _histogram("vllm_inference_duration_seconds", "Inference duration", [(name, one.durations) for name, one in each])
    yield _histogram(f"{_PREFIX}_queue_wait_seconds", "Time from arrival to a slot", [(name, one.waits) for name, one in each])
    tokens = [
        ((name, kind), count)
        for name, one in each
        for kind, count in (("prompt", one.prompt_tokens), ("cached", one.cached_tokens), ("output", one.output_tokens))
    ]
    yield _counter(f"{_PREFIX}_tokens", "Tokens by what they were", "model kind", tokens)


def _queues(models: list[Model], parts: Parts) -> Iterator[Metric]:
    budget = parts.budget
    yield _gauge("vllm_queue_depth", "Current queue depth", "", [((), budget.depth)])
    yield _gauge(f"{_PREFIX}_queue_max_depth", "Requests that may wait", "", [((), budget.max_depth)])
    waiting = [((model.model_id,), model.queue.depth) for model in models]
    yield _gauge(f"{_PREFIX}_waiting", "Requests that wait for the model", "model", waiting)
    running = [((model.model_id,), model.active) for model in models]
    yield _gauge(f"{_PREFIX}_running", "Requests that run on the model", "model", running)
    slots = [((model.model_id,), model.slots) for model in models]
    yield _gauge(f"{_PREFIX}_slots", "Requests that the model takes at once", "model", slots)
    shares: list[tuple[tuple[str, str], float]] = []
    for model in models:
        accounts = model.queue.list_accounts()
        total = sum(score for _, score in accounts) or 1.0
        shares += [((model.model_id, key.tenant), score / total) for key, score in accounts[: limits().api.metrics_tenants]]
    text = "Share of a tenant in the slot time over weight of those known"
    yield _gauge(f"{_PREFIX}_fairness_share", text, "model tenant", shares)


def _memory(models: list[Model], reading: Reading) -> Iterator[Metric]:
    gpus = [((str(gpu.index),), gpu.memory_used_mb * MIB) for gpu in reading.gpus if gpu.memory_used_mb is not None]
    yield _gauge("vllm_gpu_memory_used", "GPU memory used in bytes", "gpu", gpus)
    yield from _gpus(reading)
    kinds = (("total", reading.total_mb), ("used", reading.used_mb), ("free", reading.free_mb))
    shared = [((reading.kind, kind), size_mb * MIB) for kind, size_mb in kinds]
    yield _gauge(f"{_PREFIX}_memory_bytes", "Memory that models share", "device kind", shared)
    held: list[tuple[tuple[str, str], int]] = []
    for model in models:
        known = {
            "weights": sum_known(replica.weights_bytes for replica in model.replicas),
            "kv": sum_known(replica.kv_bytes for replica in model.replicas),
            "total": model.memory_bytes,
            "predicted": model.predicted_bytes,
        }
        held += [((model.model_id, kind), size) for kind, size in known.items() if size is not None]
    text = "Memory of a model: weights, kv, measured total, predicted total"
    yield _gauge(f"{_PREFIX}_model_memory_bytes", text, "model kind", held)
    rss = psutil.Process().memory_info().rss
    yield _gauge(f"{_PREFIX}_process_memory_bytes", "Resident memory of the runner itself", "", [((), rss)])


def _gpus(reading: Reading) -> Iterator[Metric]:
    def rows(read: Callable[[GpuInfo], float | None]) -> Rows:
        return [((str(gpu.index),), value) for gpu in reading.gpus if (value := read(gpu)) is not None]

    busy = rows(lambda gpu: None if gpu.utilization_percent is None else gpu.utilization_percent / 100)
    size = rows(lambda gpu: None if gpu.memory_total_mb is None else gpu.memory_total_mb * MIB)
    yield _gauge(f"{_PREFIX}_gpu_memory_bytes", "Memory of a GPU", "gpu", size)
    yield _gauge(f"{_PREFIX}_gpu_utilization_ratio", "Share of time that a GPU computes, 0 to 1", "gpu", busy)
    heat, power = rows(lambda gpu: gpu.temperature_c), rows(lambda gpu: gpu.power_w)
    yield _gauge(f"{_PREFIX}_gpu_temperature_celsius", "Temperature of a GPU", "gpu", heat)
    yield _gauge(f"{_PREFIX}_gpu_power_watts", "Power that a GPU draws", "gpu", power)


def _loads(models: list[Model]) -> Iterator[Metric]:
    states = [((model.model_id, state.value), int(model.state is state)) for model in models for state in ModelState]
    yield _gauge(f"{_PREFIX}_model_state", "1 for the state a model is in", "model state", states)
    seconds = [((model.model_id,), model.load_s) for model in models if model.load_s is not None]
    yield _gauge(f"{_PREFIX}_model_load_seconds", "How long the last load took", "model", seconds)
    restarts = [((model.model_id,), sum(replica.supervisor.restarts for replica in model.replicas)) for model in models]
    yield _counter(f"{_PREFIX}_engine_restarts", "Engines that were started again", "model", restarts)


def _clusters(models: list[Model]) -> Iterator[Metric]:
    plans = [(model, replica.plan.cluster) for model in models for replica in model.replicas]
    nodes = [
        ((model.model_id, "head" if cluster.is_head else "member"), len(cluster.members))
        for model, cluster in plans
        if cluster is not None
    ]
    text = "Nodes of a replica over several, of which this one is the head or a member"
    yield _gauge(f"{_PREFIX}_replica_nodes", text, "model role", nodes)


def _operations(parts: Parts) -> Iterator[Metric]:
    refused = [((reason,), count) for reason, count in parts.gate.refusals.items()]
    yield _counter(f"{_PREFIX}_operations_refused", "Operation tokens that were refused", "reason", refused)
    standing = parts.governance.standing
    yield _gauge(f"{_PREFIX}_policy_version", "Pinned policy, 0 = none", "", [((), standing.policy_version)])
    yield _gauge(f"{_PREFIX}_witness_entries", "Entries of the audit log vouched for", "", [((), standing.witness_size)])


def _money(spending: CostSummary) -> Iterator[Metric]:
    labels, told, unit = "tenant currency", spending.spendings[:1000], spending.currency
    spent = [((one.tenant, unit), one.spent_micros / MICROS) for one in told]
    yield _gauge(f"{_PREFIX}_remote_spent", "Spent on remote models this month", labels, spent)
    caps = [((one.tenant, unit), one.cap_micros / MICROS) for one in told if one.cap_micros is not None]
    yield _gauge(f"{_PREFIX}_remote_cap", "What may be spent a month", labels, caps)
    ended = [((model, state.value), count) for (model, state), count in spending.requests.items()]
    yield _counter(f"{_PREFIX}_remote_requests", "Requests to remote models by ending", "model ending", ended)
