"""Serving: bodies and headers that are read or refused, tenants' rates, numbers of an answer, health."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from starlette.requests import Request
from starlette.responses import Response

from runner.admission import FairQueue, QueueLimits, RateState, WaitBudget, clean_tenant, read_rates, read_weights
from runner.api.access import AccessGuard
from runner.api.answers import spec_name
from runner.api.bodies import BodyBudget, decode, parse_object
from runner.api.forms import read_form_fields
from runner.api.health import find_ailments
from runner.api.lifecycle import Interruptible
from runner.api.refusals import render
from runner.config import ApiConfig
from runner.definitions.definition import ModelDefinition
from runner.errors import (
    AccessRefused,
    ConfigError,
    InvalidRequest,
    RateLimitExceeded,
    RequestRefused,
    Unavailable,
    UnknownModel,
)
from runner.limits import limits
from runner.operations.bodies import LoadBody
from runner.parts import Parts, Phase
from runner.pool import Model, ModelEvent
from runner.serving.headers import headers_to_client, is_allowed_path
from runner.serving.numbers import Numbers
from runner.serving.request import read_cache_mode, read_cache_tag, read_fields, read_priority
from runner.serving.tally import OTHER_TENANTS, Histogram, Tally
from runner.telemetry import Reading
from tests.fakes.clock import install_virtual_clock

CHAT = b'{"usage":{"prompt_tokens":30,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":12}}}'


def test_the_engines_own_times_make_the_gpu_time_and_what_cannot_be_read_changes_nothing() -> None:
    numbers = Numbers(wall_ms=50.0, queue_wait_ms=12.6)
    assert numbers.headers() == {
        "x-cache-hit": "false", "x-cache-tokens-reused": "0", "x-queue-wait-ms": "13", "x-gpu-time-ms": "50",
    }  # fmt: skip
    for answer in (CHAT, b"", b"no json", b"[1]", b'{"usage":"many"}', b'{"usage":{"prompt_tokens":"x"}}', b"\xff"):
        numbers.take(answer)
        assert (numbers.prompt_tokens, numbers.output_tokens, numbers.gpu_ms) == (30, 7, 50.0)
    numbers.take(b'{"timings":{"cache_n":9,"prompt_n":3,"prompt_ms":2.5,"predicted_n":7,"predicted_ms":10.0}}')
    assert (numbers.gpu_ms, numbers.cached_tokens) == (12.5, 9)
    numbers.reported_gpu_ms = 3.0
    assert numbers.gpu_ms == 3.0


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", None, "empty"), (b"{", None, "not valid JSON"), (b"[]", None, "object"), (b"{}", "model", "model"),
        (b'{"model":3}', "model", "model"), (b'{"model":""}', "model", "1 to 200"),
        (b'{"model":"m","stream":"yes"}', "stream", "stream"),
        (b'{"model":"m","allow_remote":1}', "allow_remote", "allow_remote"),
    ],
)  # fmt: skip
def test_a_body_that_cannot_be_served_names_the_field(body: bytes, param: str | None, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        read_fields(body)
    assert refused.value.param == param


def test_headers_of_the_specification_are_read_and_anything_else_is_refused_by_name() -> None:
    assert [read_cache_mode(text) for text in ("", " Prefix ", "none", "AUTO")] == ["auto", "prefix", "none", "auto"]
    assert [read_priority(text) for text in ("", "HIGH", "low")] == ["normal", "high", "low"]
    assert read_cache_tag(" session-1:a.b_c ") == "session-1:a.b_c"
    for read, text, name in (
        (read_cache_mode, "all", "X-Cache-Mode"),
        (read_priority, "urgent", "X-Priority"),
        (read_cache_tag, "x" * 65, "X-Cache-Tag"),
        (read_cache_tag, "a b", "X-Cache-Tag"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            read(text)
        assert refused.value.param == name


def test_counts_stay_bounded_however_many_tenants_are_named() -> None:
    tally = Tally()
    for number in range(limits().serving.tenants + 50):
        tally.count(model="m", tenant=f"t{number}", status="success")
    assert len(tally.requests) == limits().serving.tenants + 1
    assert tally.requests["m", OTHER_TENANTS, "success"] == 50
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 99.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.count, histogram.total) == ([2, 1, 1], 4, 102.0)


class Rates:
    """Rates under a clock that the test turns."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.clock = install_virtual_clock(unix_s=1_745_880_000.0)
        self.rates = read_rates(env)

    def take(self, tenant: str, times: int = 1) -> RateState:
        """Take several times, and return the last state."""
        for _ in range(times - 1):
            self.rates.take(tenant)
        return self.rates.take(tenant)

    def is_refused(self, tenant: str) -> bool:
        try:
            self.rates.take(tenant)
        except RateLimitExceeded:
            return True
        return False


def test_a_tenant_beyond_its_rate_hears_the_limit_and_when_to_come_again() -> None:
    box = Rates({"TENANT_RATE_LIMIT_community-x": "100req/min"})
    assert box.take("community-x") == RateState(limit=100, remaining=99, reset_at=1_745_880_060)
    box.clock.advance(29.5)
    assert box.take("community-x", 99) == RateState(limit=100, remaining=0, reset_at=1_745_880_060)
    with pytest.raises(RateLimitExceeded, match=r"^Tenant community-x exceeded 100 req/min$") as caught:
        box.take("community-x")
    error = caught.value
    assert (error.code, error.status, error.retry_after_s) == ("rate_limit_exceeded", 429, 30.5)
    assert error.details == {"limit": 100, "remaining": 0, "resetAt": 1_745_880_060}


def test_the_window_moves_and_refused_requests_are_not_counted() -> None:
    box = Rates({"DEFAULT_RATE_LIMIT": "2req/s"})
    box.take("a")
    box.clock.advance(0.9)
    box.take("a")
    assert [box.is_refused("a") for _ in range(10)] == [True] * 10
    box.clock.advance(0.1)  # the first is a second old, the other is not
    assert [box.is_refused("a"), box.is_refused("a")] == [False, True]
    box.clock.advance(0.9)
    assert not box.is_refused("a")
    for text, period_s in (
        ("1req/s", 1.0), ("1req/second", 1.0), ("1req/min", 60.0), (" 1 REQ / minute ", 60.0), ("1req/h", 3600.0),
        ("1req/hour", 3600.0),
    ):  # fmt: skip
        box = Rates({"TENANT_RATE_LIMIT_a": text})
        box.take("a")
        box.clock.advance(period_s - 0.01)
        assert box.is_refused("a")
        box.clock.advance(0.02)
        assert not box.is_refused("a")


def test_tenants_have_windows_of_their_own_and_the_rate_that_is_set_for_them() -> None:
    box = Rates({
        "TENANT_RATE_LIMIT_a": "1req/min", "TENANT_RATE_LIMIT_default": "2req/min", "DEFAULT_RATE_LIMIT": "9req/min",
    })  # fmt: skip
    assert [box.take(tenant).limit for tenant in "abc"] == [1, 2, 2]
    assert (box.is_refused("a"), box.take("b").remaining, box.is_refused("b"), box.take("c").remaining) == (True, 0, True, 0)
    box = Rates({"TENANT_RATE_LIMIT_a": "1req/min"})
    assert box.take("b", 1000) == RateState(limit=None, remaining=None, reset_at=None)
    assert box.rates.stranger_count == 0
    box = Rates({"ENABLE_MULTI_TENANT": "false", "DEFAULT_RATE_LIMIT": "2req/min", "TENANT_RATE_LIMIT_a": "50req/min"})
    box.take("a")
    box.take("b")
    assert (box.is_refused("a"), box.is_refused("c")) == (True, True), "without tenants all share one window"
    assert [box.rates.key_of(tenant) for tenant in "ab"] == ["default", "default"]


def test_invented_tenants_do_not_grow_memory_without_bound() -> None:
    box = Rates({"DEFAULT_RATE_LIMIT": "3req/min", "TENANT_RATE_LIMIT_known": "5req/min"})
    for number in range(limits().admission.tenant_windows):
        box.take(f"stranger-{number}")
    assert box.take("late-1").remaining == 2
    assert box.take("late-2").remaining == 1  # one window for all that come now
    tracemalloc.start()
    for number in range(2_000):
        box.is_refused(f"invented-{number}")
    grown_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown_bytes < 100_000
    assert box.rates.stranger_count == limits().admission.tenant_windows
    assert box.is_refused("invented-again")
    assert box.take("stranger-5").remaining == 1
    assert box.take("known").remaining == 4
    box.clock.advance(61.0)  # windows that are over make room
    assert (box.take("late-3").remaining, box.rates.stranger_count) == (2, 1)


def test_a_rate_or_weight_that_cannot_be_read_names_its_variable() -> None:
    for text in ("", "100", "100/min", "req/min", "-1req/min", "0req/min", "1.5req/s", "100req/day", "999999req/s", "x"):
        for name in ("TENANT_RATE_LIMIT_community-x", "DEFAULT_RATE_LIMIT") if text else ("TENANT_RATE_LIMIT_x",):
            with pytest.raises(ConfigError, match=name):
                read_rates({name: text})
    for name in ("", " a", "caf\u00e9", "x" * 129):
        with pytest.raises(ConfigError, match="names no tenant"):
            read_rates({f"TENANT_RATE_LIMIT_{name}": "1req/s"})
    with pytest.raises(ConfigError, match="ENABLE_MULTI_TENANT must be true or false"):
        read_rates({"ENABLE_MULTI_TENANT": "perhaps"})
    for text in ("", "0", "-1", "nan", "inf", "1001", "two"):
        with pytest.raises(ConfigError, match="TENANT_WEIGHT_a must be a number above 0"):
            read_weights({"TENANT_WEIGHT_a": text})
    weight_of = read_weights({"TENANT_WEIGHT_community-x": "2.5", "TENANT_RATE_LIMIT_b": "1req/s"})
    assert (weight_of("community-x"), weight_of("b"), weight_of("default")) == (2.5, 1.0, 1.0)
    assert read_weights({"TENANT_WEIGHT_default": "0.5", "TENANT_WEIGHT_a": "4"})("b") == 0.5


def test_a_tenant_is_a_short_printable_name_and_the_nameless_are_anonymous() -> None:
    assert [clean_tenant(text) for text in ("  community-x ", "", "   ", "a b", "x" * 128)] == [
        "community-x", "anonymous", "anonymous", "a b", "x" * 128,
    ]  # fmt: skip
    for text in ("x" * 129, "caf\u00e9", "a\x00b", "a\nb", "a\x7f", "\u202eb"):
        with pytest.raises(InvalidRequest, match="128 printable ASCII") as caught:
            clean_tenant(text)
        assert caught.value.param == "X-Tenant-ID"


FORM = "multipart/form-data; boundary=line"


def part(name: str, value: bytes, extra: str = "") -> bytes:
    return b"--line\r\n" + f'Content-Disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode() + value + b"\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b'"text"', b"{", b'{"a":1,"a":1}', b'{"a":{"b":1,"b":2}}', b'{"a":NaN}', b'{"a":Infinity}',
        b'{"a":1}x', b"\xff", b'{"a":"\xff"}', b'{"a":"\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000, b"\xef\xbb\xbf{}",
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused_without_repeating_it(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(body)
    assert len(caught.value.message) < 200


def test_the_field_at_fault_is_named() -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({}, "modelId"), ({"modelId": 5}, "modelId"), ({"modelId": "a", "maxContextLength": True}, "maxContextLength"),
        ({"modelId": "a", "overrides": []}, "overrides"), ({"modelId": "a", "surprise": 1}, "surprise"),
    ]  # fmt: skip
    for fields, param in cases:
        with pytest.raises(InvalidRequest) as caught:
            decode(fields, LoadBody)
        assert caught.value.param == param


def test_a_form_gives_up_its_model_and_its_flags_and_no_more() -> None:
    file = part("file", b"--lin\r\nmodel", '; filename="a.wav"') + part("model", b"other", '; filename="m"')
    fields = read_form_fields(FORM, part("model", b" whisper ") + part("stream", b"True") + file + b"--line--\r\n")
    assert (fields.model, fields.stream, fields.allow_remote) == ("whisper", True, False)


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (FORM, part("model", b"a") + part("model", b"b") + b"--line--\r\n"),
        (FORM, part("model", b"") + b"--line--\r\n"), (FORM, part("model", b"\xff") + b"--line--\r\n"),
        (FORM, part("model", b"a" * 2000) + b"--line--\r\n"),
        (FORM, part("model", b"a") + part("stream", b"perhaps") + b"--line--\r\n"),
        (FORM, part("model", b"a") + b"".join(part(f"f{number}", b"") for number in range(70)) + b"--line--\r\n"),
        (FORM, b"no form at all"), (FORM, b""), ("multipart/form-data", part("model", b"a") + b"--line--\r\n"),
        ("multipart/form-data; boundary=", part("model", b"a") + b"--line--\r\n"),
        ("multipart/form-data; boundary=" + "x" * 5000, part("model", b"a")),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_trusted_is_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_form_fields(content_type, body)


def test_the_bodies_of_all_requests_share_one_budget_and_give_it_back() -> None:
    budget = BodyBudget(10)
    with budget.hold() as first, budget.hold() as second:
        first(6)
        second(4)
        with pytest.raises(Unavailable):
            first(1)
        assert budget.held_bytes == 10
    assert budget.held_bytes == 0
    names = {
        "gpu_memory_total_mb": "gpuMemoryTotalMB", "kv_mb": "kvMB", "p95_wait_ms": "p95WaitMs", "gpu_ids": "gpuIds", "id": "id",
    }  # fmt: skip
    assert {name: spec_name(name) for name in names} == names


def make_model(*events: ModelEvent, error: str | None = None) -> Model:
    budget = WaitBudget(10)
    queue = FairQueue(slots=1, limits=QueueLimits(), budget=budget, weight_of=lambda _: 1.0)
    model = Model(ModelDefinition(model_id="m", backend="gguf"), queue, lambda: None)
    for event in events:
        model.apply(event, error=error if event is ModelEvent.FAIL else None)
    return model


def make_parts(*models: Model, phase: Phase = Phase.SERVING, waiting: int = 0, max_depth: int = 10) -> Parts:
    """Return the few parts that health is judged by."""
    budget = WaitBudget(max_depth)
    for _ in range(waiting):
        budget.add()
    pool = SimpleNamespace(registry=SimpleNamespace(models=list(models)))
    return cast("Parts", SimpleNamespace(phase=phase, pool=pool, budget=budget))


def make_reading(*, free_mb: int) -> Reading:
    return Reading(gpus=[], kind="gpu", total_mb=10_000, used_mb=10_000 - free_mb, free_mb=free_mb, driver_version=None, at=0.0)


LOADED = (ModelEvent.LOAD, ModelEvent.SERVE)
FAILED = (ModelEvent.LOAD, ModelEvent.FAIL)


def test_a_node_is_unwell_while_it_starts_or_stops_or_has_no_memory_or_a_full_queue() -> None:
    assert find_ailments(make_parts(), make_reading(free_mb=5000)) == []
    assert find_ailments(make_parts(make_model(*LOADED)), None) == []
    for phase in (Phase.STARTING, Phase.STOPPING):
        assert find_ailments(make_parts(phase=phase), None) == [f"the box is {phase.value}"]
    assert find_ailments(make_parts(), make_reading(free_mb=200)) == []
    assert find_ailments(make_parts(), make_reading(free_mb=199)) == ["out of memory: 199 of 10000 MiB of the gpu are free"]
    for waiting, max_depth, is_well in ((8, 10, True), (9, 10, False), (0, 0, True), (1, 1, False)):
        assert (find_ailments(make_parts(waiting=waiting, max_depth=max_depth), None) == []) is is_well


def test_a_failed_load_makes_it_unwell_for_lack_of_memory_or_while_no_other_model_serves_or_comes() -> None:
    for error in (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "std::bad_alloc", "mmap: Cannot allocate memory",
        "ggml_backend_alloc: failed to allocate CUDA0 buffer", "killed by the OOM killer",
    ):  # fmt: skip
        parts = make_parts(make_model(*LOADED), make_model(*FAILED, error=error))
        assert find_ailments(parts, None) == [f"out of memory: m says {error}"]
    failed = make_model(*FAILED, error="no room: bloom filter")
    assert find_ailments(make_parts(failed), None) == ["no model serves, m failed: no room: bloom filter"]
    for other in ((ModelEvent.LOAD,), LOADED):
        assert find_ailments(make_parts(failed, make_model(*other)), None) == []


async def test_a_handler_that_waits_is_interrupted_and_answers_and_refusals_pass_as_they_are() -> None:
    interruptible, has_begun, was_cancelled = Interruptible(), asyncio.Event(), asyncio.Event()

    async def wait(_request: Request) -> Response:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()
        return Response()

    async def answer(_request: Request) -> Response:
        return Response(status_code=204)

    async def refuse(_request: Request) -> Response:
        raise UnknownModel("no such model")

    assert (await _call(interruptible, answer)).status_code == 204
    with pytest.raises(UnknownModel):
        await _call(interruptible, refuse)
    asked = asyncio.create_task(_call(interruptible, wait))
    await asyncio.wait_for(has_begun.wait(), 30)
    interruptible.close()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(asked, 30)
    assert was_cancelled.is_set()


async def _call(interruptible: Interruptible, handler: object) -> Response:
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": []})
    return await interruptible.wrap(handler)(request)  # type: ignore[arg-type]  # either of the handlers above


def test_the_type_of_an_error_is_what_clients_choose_their_exception_by() -> None:
    refusals: list[tuple[RequestRefused, str]] = [
        (AccessRefused("no"), "authentication_error"), (UnknownModel("no"), "not_found_error"),
        (InvalidRequest("no", param="stream"), "invalid_request_error"),
    ]  # fmt: skip
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        for refusal, kind in refusals:
            said = json.loads(bytes(render(refusal, path=path).body))
            assert (said["error"]["type"], said["error"]["code"], said["error"]["message"]) == (kind, refusal.code, "no")
            assert said.get("type") == ("error" if path == "/v1/messages" else None)


async def test_a_wrong_key_is_named_in_the_words_that_litellm_looks_for() -> None:
    sent: list[MutableMapping[str, Any]] = []  # Any: ASGI leaves it open

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    config = ApiConfig(host="127.0.0.1", port=0, key="a key of more than 16 characters", has_metrics=False, metrics_port=None)
    guard = AccessGuard(cast("Any", None), config=config)  # nobody is let through
    await guard({"type": "http", "path": "/v1/models", "headers": []}, cast("Any", None), send)
    assert (sent[0]["status"], b"Incorrect API key provided" in sent[1]["body"]) == (401, True)


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "/v1", "/v1/", "/v2/models", "/slots", "/v1/../slots", "/v1/x/..", "/v1/./x", "/v1//slots", "v1/models",
        "/v1/%2e%2e/slots", "/v1/x#y", "/v1/x?a b", "/v1/x\n", "/v1/x\\..\\y", "http://evil/v1/x", "//evil/v1/x", "/v1/é",
        "/v1/x?a=\n",
    ],
)  # fmt: skip
def test_every_other_path_is_refused(path: str) -> None:
    assert not is_allowed_path(path)
    for good in ("/v1/chat/completions", "/v1/models/org-x_1.5:q8", "/v1/messages?beta=true", "/v1/threads/t_1/runs"):
        assert is_allowed_path(good)


def test_answers_lose_hop_by_hop_headers_and_cookies_and_streams_their_length() -> None:
    given = CIMultiDictProxy(
        CIMultiDict([
            ("Content-Type", "text/event-stream"), ("Content-Length", "5"), ("Transfer-Encoding", "chunked"),
            ("Set-Cookie", "a=b"), ("Server", "llama"), ("X-Note", "1"), ("x-note", "2"),
            ("Access-Control-Allow-Origin", "*"),
        ])
    )  # fmt: skip
    assert headers_to_client(given, is_event_stream=True) == {"content-type": "text/event-stream", "x-note": "1, 2"}
    assert headers_to_client(given, is_event_stream=False)["content-length"] == "5"
