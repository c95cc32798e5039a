"""The text format of Prometheus: the numbers that an engine's adapter reads, and the series that the node shows as its own.

Pure. Series are shown under the names that the engines document, so that dashboards made for them work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from runner.limits import limits

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
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
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one scrape: name to values, with the labels of each."""

    found: dict[str, list[tuple[dict[str, str], float]]]

    def total(self, *names: str) -> float | None:
        """Return the sum over all labels of the first of ``names`` that is there, or None."""
        for name in names:
            if name in self.found:
                return sum(value for _, value in self.found[name])
        return None

    def count(self, *names: str) -> int | None:
        """Return ``total`` as a whole number."""
        found = self.total(*names)
        return None if found is None else int(found)

    def labels(self, name: str) -> dict[str, str]:
        """Return the labels of the first sample called ``name``; nothing when there is none."""
        return next((labels for labels, _ in self.found.get(name, [])), {})


def read_samples(text: str, prefix: str) -> Samples:
    """Return the samples whose names begin with ``prefix``; buckets, other lines and values that are no number are left out."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, value in _parse_lines(text, prefix):
        found.setdefault(name, []).append((labels, value))
    return Samples(found)


def _parse_lines(text: str, prefix: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        if not line.startswith(prefix) or "_bucket{" in line or (match := _SAMPLE.match(line)) is None:
            continue
        name, labels, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        if value == value and value not in (float("inf"), float("-inf")):
            yield name, dict(_LABEL.findall(labels or "")), value


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
