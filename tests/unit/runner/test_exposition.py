"""Reading the metrics text of an engine."""

from __future__ import annotations

import pytest
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from runner.engines.exposition import read_samples, show_series
from runner.limits import limits

TEXT = """\
# HELP e:running Requests that run.
# TYPE e:running gauge
e:running{engine="0",model_name="a \\"b\\""} 2.0
e:running{engine="1",model_name="a \\"b\\""} 3
e:config_info{block_size="16",note="x{y} 1"} 1.0 1795288626000
e:wait_bucket{le="1.0"} 4
e:nan NaN
e:infinite +Inf
e:plain 7e2
other:thing 1
e:broken{ 1
"""


def test_samples_are_summed_over_their_labels() -> None:
    samples = read_samples(TEXT, "e:")
    assert samples.total("e:running") == 5.0
    assert samples.count("e:absent", "e:plain") == 700
    assert samples.total("e:absent") is None


def test_labels_may_hold_any_text() -> None:
    samples = read_samples(TEXT, "e:")
    assert samples.labels("e:config_info") == {"block_size": "16", "note": "x{y} 1"}
    assert samples.labels("e:absent") == {}


def test_what_is_no_number_or_of_others_is_left_out() -> None:
    samples = read_samples(TEXT, "e:")
    assert set(samples.found) == {"e:running", "e:config_info", "e:plain"}


WAITING = '# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{engine="0",model_name="x"} 2\n'


def test_series_of_several_models_and_replicas_are_one_family_that_prometheus_reads_again() -> None:
    made = show_series([("a", 0, WAITING), ("a", 1, WAITING), ("b", 0, WAITING + WAITING.splitlines()[1] + "\n")])

    class Shown(Collector):
        def collect(self) -> list[Metric]:
            return made

    (family,) = text_string_to_metric_families(generate_latest(Shown()).decode())
    assert [(sample.labels["model"], sample.labels["replica"], sample.value) for sample in family.samples] == [
        ("a", "0", 2.0), ("a", "1", 2.0), ("b", "0", 2.0),
    ]  # fmt: skip
    assert all(sample.labels.keys() == {"model", "replica", "engine"} for sample in family.samples)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "vllm:num_requests_waiting{ 1\n",
        "vllm:num_requests_waiting nothing\n",
        "# TYPE vllm:num_requests_waiting poem\nvllm:num_requests_waiting 1\n",
        "secret_of_the_engine 1\nvllm:unheard_of 1\nvllm_requests_total 1\nmuster_runner_info 1\n",
        WAITING + "#" * limits().engines.shown_bytes,
    ],
)
def test_what_is_not_known_or_not_in_this_format_shows_nothing(text: str) -> None:
    assert show_series([("a", 0, text)]) == []


def test_one_engine_cannot_fill_the_page() -> None:
    lines = "".join(
        f'vllm:request_success_total{{finished_reason="{n}"}} 1\n' for n in range(2 * limits().engines.shown_samples)
    )
    text = "# TYPE vllm:request_success_total counter\n" + lines
    (first, second) = show_series([("a", 0, text + WAITING), ("b", 0, WAITING)])
    assert len(first.samples) == limits().engines.shown_samples
    assert [sample.labels["model"] for sample in second.samples] == ["b"]
