"""``GET /metrics`` in Prometheus' text format: the names of the model-runner specification, and ours beside them.

Label values are bounded: models are the owner's, tenants are counted by name up to a limit, codes and states are ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from runner import AGENT_VERSION
from runner.engines.port import MetricsSource
from runner.errors import RunnerError
from runner.limits import MIB, limits
from runner.parts import Parts
from runner.pool import Model, ModelState
from runner.serving.costs import MICROS, CostSummary
from runner.serving.request import Histogram, Tally
from runner.telemetry import Reading

_PREFIX = "muster_runner"
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


async def write_metrics(parts: Parts, accept: str) -> tuple[bytes, str]:
    """Return the metrics and their content type, in the format that ``accept`` asks for."""
    reading = await parts.look()
    engines = await _read_engines(parts.pool.registry.models)
    try:
        spending = await parts.costs.summary()
    except RunnerError:  # the ledger is out of order, which must not blind whoever looks after the box
        spending = None
    encode, content_type = choose_encoder(accept)
    return encode(_Collector(parts, reading, spending, engines)), content_type


async def _read_engines(models: list[Model]) -> list[Metric]:
    """Return what the engines of loaded models count; all are asked at once, and one that is late is left out."""
    asked = [
        (model.model_id, index, engine)
        for model in models
        if model.is_ready
        for index, replica in enumerate(model.replicas)
        if isinstance(engine := replica.supervisor.engine, MetricsSource)
    ]
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
    """Return whether a line is a sample of a family that is shown, or tells its type or what it means."""
    words = line.split(None, 3)
    if line.startswith("#"):
        name = words[2] if len(words) > 2 and words[1] in {"TYPE", "HELP"} else ""
    else:
        name = line.partition("{")[0].split(" ", 1)[0]
    return name in _SHOWN or any(name.endswith(ending) and name.removesuffix(ending) in _SHOWN for ending in _ENDINGS)


class _Collector:
    """What ``prometheus_client`` writes out."""

    def __init__(self, parts: Parts, reading: Reading, spending: CostSummary | None, engines: list[Metric]) -> None:
        self._parts = parts
        self._reading = reading
        self._spending = spending
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        models, tally = self._parts.pool.registry.models, self._parts.tally
        yield from _requests(tally)
        yield from _served(models, tally)
        yield from _queues(models, self._parts)
        yield from _memory(models, self._reading)
        yield from _loads(models)
        yield from _operations(self._parts)
        if self._spending is not None:
            yield from _money(self._spending)
        yield from self._engines
        info = GaugeMetricFamily(f"{_PREFIX}_info", "Which program this is", labels=["version", "runner_id"])
        info.add_metric([AGENT_VERSION, self._parts.governance.runner_id], 1)
        yield info


def _requests(tally: Tally) -> Iterator[Metric]:
    total = CounterMetricFamily("vllm_requests", "Total requests processed", labels=["model", "tenant", "status"])
    by_tenant: dict[str, int] = {}
    for (model, tenant, status), count in tally.requests.items():
        total.add_metric([model, tenant, status], count)
        by_tenant[tenant] = by_tenant.get(tenant, 0) + count
    yield total
    tenants = CounterMetricFamily(f"{_PREFIX}_tenant_requests", "Requests by tenant", labels=["tenant"])
    for tenant, count in by_tenant.items():
        tenants.add_metric([tenant], count)
    yield tenants
    refusals = CounterMetricFamily(f"{_PREFIX}_refusals", "Requests that were not carried out, by reason", labels=["code"])
    for code, count in tally.refusals.items():
        refusals.add_metric([code], count)
    yield refusals


def _served(models: list[Model], tally: Tally) -> Iterator[Metric]:
    hits = GaugeMetricFamily("vllm_cache_hit_rate", "Cache hit rate", labels=["model"])
    durations = HistogramMetricFamily("vllm_inference_duration_seconds", "Inference duration", labels=["model"])
    waits = HistogramMetricFamily(f"{_PREFIX}_queue_wait_seconds", "Time from arrival to a slot", labels=["model"])
    tokens = CounterMetricFamily(f"{_PREFIX}_tokens", "Tokens by what they were", labels=["model", "kind"])
    served = {model.model_id: tally.of(model.model_id) for model in models if model.is_ready} | tally.models
    for name, counts in served.items():
        hits.add_metric([name], counts.cache_hit_rate)
        _add_histogram(durations, name, counts.durations)
        _add_histogram(waits, name, counts.waits)
        tokens.add_metric([name, "prompt"], counts.prompt_tokens)
        tokens.add_metric([name, "cached"], counts.cached_tokens)
        tokens.add_metric([name, "output"], counts.output_tokens)
    yield from (hits, durations, waits, tokens)


def _queues(models: list[Model], parts: Parts) -> Iterator[Metric]:
    budget = parts.budget
    yield GaugeMetricFamily("vllm_queue_depth", "Current queue depth", value=budget.depth)
    yield GaugeMetricFamily(f"{_PREFIX}_queue_max_depth", "Requests that may wait", value=budget.max_depth)
    waiting = GaugeMetricFamily(f"{_PREFIX}_waiting", "Requests that wait for the model", labels=["model"])
    running = GaugeMetricFamily(f"{_PREFIX}_running", "Requests that run on the model", labels=["model"])
    slots = GaugeMetricFamily(f"{_PREFIX}_slots", "Requests that the model takes at once", labels=["model"])
    shares = GaugeMetricFamily(
        f"{_PREFIX}_fairness_share", "Share of a tenant in the slot time over weight of those known", labels=["model", "tenant"]
    )
    for model in models:
        waiting.add_metric([model.model_id], model.queue.depth)
        running.add_metric([model.model_id], model.active)
        slots.add_metric([model.model_id], model.slots)
        accounts = model.queue.snapshot()
        total = sum(account.score for account in accounts)
        for account in accounts[: limits().api.metrics_tenants]:
            shares.add_metric([model.model_id, account.fairness_key], account.score / total if total else 0.0)
    yield from (waiting, running, slots, shares)


def _memory(models: list[Model], reading: Reading) -> Iterator[Metric]:
    gpus = GaugeMetricFamily("vllm_gpu_memory_used", "GPU memory used in bytes", labels=["gpu"])
    for gpu in reading.gpus:
        if gpu.memory_used_mb is not None:
            gpus.add_metric([str(gpu.index)], gpu.memory_used_mb * MIB)
    yield gpus
    shared = GaugeMetricFamily(f"{_PREFIX}_memory_bytes", "Memory that models share", labels=["device", "kind"])
    for kind, size_mb in (("total", reading.total_mb), ("used", reading.used_mb), ("free", reading.free_mb)):
        shared.add_metric([reading.kind, kind], size_mb * MIB)
    yield shared
    held = GaugeMetricFamily(
        f"{_PREFIX}_model_memory_bytes", "Memory of a model: weights, kv, measured total, predicted total",
        labels=["model", "kind"],
    )  # fmt: skip
    for model in models:
        known = {
            "weights": _sum([replica.weights_bytes for replica in model.replicas]),
            "kv": _sum([replica.kv_bytes for replica in model.replicas]),
            "total": model.memory_bytes,
            "predicted": model.predicted_bytes,
        }
        for kind, size in known.items():
            if size is not None:
                held.add_metric([model.model_id, kind], size)
    yield held
    rss = psutil.Process().memory_info().rss
    yield GaugeMetricFamily(f"{_PREFIX}_process_memory_bytes", "Resident memory of the runner itself", value=rss)


def _loads(models: list[Model]) -> Iterator[Metric]:
    states = GaugeMetricFamily(f"{_PREFIX}_model_state", "1 for the state a model is in", labels=["model", "state"])
    seconds = GaugeMetricFamily(f"{_PREFIX}_model_load_seconds", "How long the last load took", labels=["model"])
    restarts = CounterMetricFamily(f"{_PREFIX}_engine_restarts", "Engines that were started again", labels=["model"])
    for model in models:
        for state in ModelState:
            states.add_metric([model.model_id, state.value], int(model.state is state))
        if model.load_s is not None:
            seconds.add_metric([model.model_id], model.load_s)
        restarts.add_metric([model.model_id], sum(replica.supervisor.restarts for replica in model.replicas))
    yield from (states, seconds, restarts)


def _operations(parts: Parts) -> Iterator[Metric]:
    refused = CounterMetricFamily(f"{_PREFIX}_operations_refused", "Operation tokens that were refused", labels=["reason"])
    for reason, count in parts.gate.refusals.items():
        refused.add_metric([reason], count)
    standing = parts.governance.standing
    yield refused
    yield GaugeMetricFamily(f"{_PREFIX}_policy_version", "Pinned policy, 0 = none", value=standing.policy_version)
    yield GaugeMetricFamily(f"{_PREFIX}_witness_entries", "Entries of the audit log vouched for", value=standing.witness_size)


def _money(spending: CostSummary) -> Iterator[Metric]:
    labels = ["tenant", "currency"]
    spent = GaugeMetricFamily(f"{_PREFIX}_remote_spent", "Spent on remote models this month", labels=labels)
    cap = GaugeMetricFamily(f"{_PREFIX}_remote_cap", "What may be spent a month", labels=labels)
    for entry in spending.spendings[:1000]:
        spent.add_metric([entry.tenant, spending.currency], entry.spent_micros / MICROS)
        if entry.cap_micros is not None:
            cap.add_metric([entry.tenant, spending.currency], entry.cap_micros / MICROS)
    ended = CounterMetricFamily(f"{_PREFIX}_remote_requests", "Requests to remote models by ending", labels=["model", "ending"])
    for (model, state), count in spending.requests.items():
        ended.add_metric([model, state.value], count)
    yield from (spent, cap, ended)


def _add_histogram(family: HistogramMetricFamily, model: str, values: Histogram) -> None:
    buckets, so_far = [], 0
    for bound, count in zip((*(str(bound) for bound in values.bounds), "+Inf"), values.counts, strict=True):
        so_far += count
        buckets.append((bound, float(so_far)))
    family.add_metric([model], buckets, values.total)


def _sum(sizes: list[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None
