"""Whether a process makes traces: the standard variables, what is said of those that cannot be used, and which are kept."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.fakes.collector import run_collector
from tests.fakes.traces import Remembered
from wire import spans
from wire.ids import new_uuid7
from wire.traces import find_finish_reasons, is_wanted, open_traces

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}


@pytest.mark.parametrize(
    ("variables", "is_on"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_traces_are_on_where_a_standard_variable_asks_for_them(variables: Mapping[str, str], *, is_on: bool) -> None:
    assert is_wanted(variables) is is_on


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER must be otlp, none, not 'zipkin'"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf, which collectors take on ",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "me:pass@host:4318"}, "must be a URL such as http://localhost:4318, not 'host:4318'"),
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "OTEL_TRACES_SAMPLER must be one of parentbased_always_on, "),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"}, "a share from 0 to 1, such as 0.01, not '2'"),
        (
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "nan"},
            "a share from 0 to 1, such as 0.01, not 'nan'",
        ),
    ],
)
def test_a_variable_that_cannot_be_used_is_named_in_one_line_and_the_process_goes_on_without_traces(
    variables: Mapping[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_traces({**ENDPOINT, **variables}, service="s", instance="i") is None
    (line,) = caplog.messages
    assert said in line
    assert "pass" not in line


def test_a_process_whose_sdk_is_not_installed_says_how_and_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wire.spans", None)
    assert open_traces(ENDPOINT, service="s", instance="i") is None
    (line,) = caplog.messages
    assert line.endswith("the SDK is not installed: pip install 'muster[otel]'")


def test_a_process_without_traces_imports_nothing_of_the_sdk() -> None:
    program = (
        "import sys, django; django.setup(); import runner.parts, gateway.process, wire.traces\n"
        "assert wire.traces.open_traces({}, service='s', instance='i') is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize("sampler", ["traceidratio", "parentbased_traceidratio"])
def test_the_share_of_traces_that_is_kept_is_the_one_asked_for_though_request_ids_begin_alike(sampler: str) -> None:
    kept = Remembered(sampler, 0.1)
    for _ in range(2000):
        span = kept.traces.begin("r", {}, at=0.0, trace_id=new_uuid7().int)
        if span is not None:
            span.begin("inner", at=0.0).end(0.0, {})
            span.end(0.0, {})
    assert 120 <= len(kept.of("r")) <= 290  # 200 on average, and six times the deviation
    assert len(kept.of("inner")) == len(kept.of("r"))


@pytest.mark.parametrize(("sampler", "roots"), [("always_off", 0), ("parentbased_always_off", 0), ("always_on", 1)])
def test_a_trace_that_begins_here_is_kept_or_not_as_the_sampler_says(sampler: str, roots: int) -> None:
    kept = Remembered(sampler)
    span = kept.traces.begin("r", {}, at=0.0)
    assert (span is not None) is bool(roots)


def test_an_answer_tells_why_it_stopped_and_what_it_says_of_that_is_not_taken_for_it() -> None:
    whole = b'{"choices":[{"message":{"content":"\\"finish_reason\\":\\"lie\\""},"finish_reason":"length"}]}'
    assert find_finish_reasons(whole) == ("length",)
    assert find_finish_reasons(b'data: {"delta":{"stop_reason": "end_turn"}}\n\n') == ("end_turn",)
    assert find_finish_reasons(b'{"finish_reason":null}') == ()


@pytest.fixture
def sdk_log() -> Iterator[logging.Logger]:
    """The log of the SDK, put back as it was."""
    log = logging.getLogger("opentelemetry")
    before = log.propagate, log.handlers
    yield log
    log.propagate, log.handlers = before


def test_a_file_may_hold_the_collectors_token(
    sdk_log: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "headers"
    with run_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS_FILE", str(token))
        assert open_traces(os.environ, service="s", instance="i") is None
        assert f"OTEL_EXPORTER_OTLP_HEADERS_FILE: cannot read {token}" in caplog.text
        token.write_text("authorization=Bearer secret\n")
        traces = open_traces(os.environ, service="s", instance="i")
        assert traces is not None
        span = traces.begin("r", {}, at=0.0)
        assert span is not None
        span.end(0.0, {})
        traces.close()
    assert collector.tokens == ["Bearer secret"]
    assert [(each.service, each.name) for each in collector.spans] == [("s", "r")]
    assert "Bearer" not in caplog.text


def test_a_process_that_ends_sends_what_waits() -> None:
    kept = InMemorySpanExporter()
    traces = spans.make_traces("always_on", 1.0, {}, BatchSpanProcessor(kept, schedule_delay_millis=600_000))
    span = traces.begin("r", {}, at=0.0)
    assert span is not None
    span.end(0.0, {})
    assert not kept.get_finished_spans()
    traces.close()
    assert [each.name for each in kept.get_finished_spans()] == ["r"]


def test_a_collector_that_cannot_be_reached_costs_a_line_a_minute_and_nothing_at_the_end(
    sdk_log: logging.Logger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    traces = spans.export_traces("always_on", 1.0, {"service.name": "s"})
    for _ in range(5):
        span = traces.begin("r", {}, at=0.0)
        assert span is not None
        span.end(0.0, {})
    traces.close()
    sdk_log.getChild("exporter").warning("once more")
    lines = [message for message in caplog.messages if message.startswith("traces.")]
    assert len(lines) == 1
    assert lines[0].startswith("traces.not_exported reason=")
