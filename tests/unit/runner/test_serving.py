"""Serving: bodies and headers that are read or refused, rates and queues of tenants, numbers of an answer, health."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections import Counter
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from starlette.requests import Request
from starlette.responses import Response

from runner import errors
from runner import queue as queues
from runner.api.admin import Interruptible
from runner.api.bodies import BodyBudget, decode, parse_object, read_form_fields, render
from runner.api.capabilities import find_ailments
from runner.api.schemas import spec_name
from runner.api.server import AccessGuard
from runner.config import ApiConfig
from runner.definitions.fields import ModelDefinition
from runner.definitions.settings import Fairness
from runner.limits import limits
from runner.operations.operation import LoadBody
from runner.parts import Parts, Phase
from runner.pool.models import Model, ModelEvent
from runner.serving.request import (
    OTHER_TENANTS,
    Counters,
    Histogram,
    Numbers,
    headers_to_client,
    is_allowed_path,
    read_cache_mode,
    read_cache_tag,
    read_fields,
    read_priority,
)
from runner.telemetry import Reading
from runner.tickets import Tickets
from tests.fakes.clock import install_virtual_clock
from tests.fakes.examples import examples
from tests.fakes.limits import set_runner_limits
from tests.fakes.runners.parts import LONG_S, Visitors, settle

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
    with pytest.raises(errors.InvalidRequest, match=words) as refused:
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
        with pytest.raises(errors.InvalidRequest) as refused:
            read(text)
        assert refused.value.param == name


def test_counts_stay_bounded_however_many_tenants_are_named() -> None:
    counters = Counters()
    for number in range(limits().serving.tenants + 50):
        counters.count(model="m", tenant=f"t{number}", status="success")
    assert len(counters.requests) == limits().serving.tenants + 1
    assert counters.requests["m", OTHER_TENANTS, "success"] == 50
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 99.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.count, histogram.total) == ([2, 1, 1], 4, 102.0)


class Rates:
    """Rates under a clock that the test turns."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.clock = install_virtual_clock(unix_s=1_745_880_000.0)
        self.rates = queues.read_rates(env)

    def take(self, tenant: str, times: int = 1) -> None:
        for _ in range(times):
            self.rates.take(tenant)

    def is_refused(self, tenant: str) -> bool:
        try:
            self.rates.take(tenant)
        except errors.RateLimitExceeded:
            return True
        return False


def test_a_tenant_beyond_its_rate_hears_the_limit_and_when_to_come_again() -> None:
    box = Rates({"TENANT_RATE_LIMIT_community-x": "100req/min"})
    box.take("community-x")
    box.clock.advance(29.5)
    box.take("community-x", 99)
    with pytest.raises(errors.RateLimitExceeded, match=r"^Tenant community-x exceeded 100 req/min$") as caught:
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
    assert [box.is_refused(tenant) for tenant in "abcabcbc"] == [False] * 3 + [True, False, False, True, True]
    box = Rates({"TENANT_RATE_LIMIT_a": "1req/min"})
    box.take("b", 1000)
    assert not box.rates._strangers
    box = Rates({"ENABLE_MULTI_TENANT": "false", "DEFAULT_RATE_LIMIT": "2req/min", "TENANT_RATE_LIMIT_a": "50req/min"})
    box.take("a")
    box.take("b")
    assert (box.is_refused("a"), box.is_refused("c")) == (True, True), "without tenants all share one window"


def test_invented_tenants_do_not_grow_memory_without_bound() -> None:
    box = Rates({"DEFAULT_RATE_LIMIT": "3req/min", "TENANT_RATE_LIMIT_known": "5req/min"})
    for number in range(limits().admission.tenant_windows):
        box.take(f"stranger-{number}")
    assert [box.is_refused(f"late-{number}") for number in range(4)] == [False] * 3 + [True], "one window for all that come now"
    tracemalloc.start()
    for number in range(2_000):
        box.is_refused(f"invented-{number}")
    grown_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown_bytes < 100_000
    assert len(box.rates._strangers) == limits().admission.tenant_windows
    assert box.is_refused("invented-again")
    assert [box.is_refused("stranger-5") for _ in range(3)] == [False, False, True]
    assert [box.is_refused("known") for _ in range(6)] == [False] * 5 + [True]
    box.clock.advance(61.0)  # windows that are over make room
    assert (box.is_refused("late-5"), len(box.rates._strangers)) == (False, 1)


def test_a_rate_or_weight_that_cannot_be_read_names_its_variable() -> None:
    for text in ("", "100", "100/min", "req/min", "-1req/min", "0req/min", "1.5req/s", "100req/day", "999999req/s", "x"):
        for name in ("TENANT_RATE_LIMIT_community-x", "DEFAULT_RATE_LIMIT") if text else ("TENANT_RATE_LIMIT_x",):
            with pytest.raises(errors.ConfigError, match=name):
                queues.read_rates({name: text})
    for name in ("", " a", "caf\u00e9", "x" * 129):
        with pytest.raises(errors.ConfigError, match="names no tenant"):
            queues.read_rates({f"TENANT_RATE_LIMIT_{name}": "1req/s"})
    with pytest.raises(errors.ConfigError, match="ENABLE_MULTI_TENANT must be true or false"):
        queues.read_rates({"ENABLE_MULTI_TENANT": "perhaps"})
    for text in ("", "0", "-1", "nan", "inf", "1001", "two"):
        with pytest.raises(errors.ConfigError, match="TENANT_WEIGHT_a must be a number above 0"):
            queues.read_weights({"TENANT_WEIGHT_a": text})
    weight_of = queues.read_weights({"TENANT_WEIGHT_community-x": "2.5", "TENANT_RATE_LIMIT_b": "1req/s"})
    assert (weight_of("community-x"), weight_of("b"), weight_of("default")) == (2.5, 1.0, 1.0)
    assert queues.read_weights({"TENANT_WEIGHT_default": "0.5", "TENANT_WEIGHT_a": "4"})("b") == 0.5


def test_a_tenant_is_a_short_printable_name_and_the_nameless_are_anonymous() -> None:
    assert [queues.clean_tenant(text) for text in ("  community-x ", "", "   ", "a b", "x" * 128)] == [
        "community-x", "anonymous", "anonymous", "a b", "x" * 128,
    ]  # fmt: skip
    for text in ("x" * 129, "caf\u00e9", "a\x00b", "a\nb", "a\x7f", "\u202eb"):
        with pytest.raises(errors.InvalidRequest, match="128 printable ASCII") as caught:
            queues.clean_tenant(text)
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
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_object(body)
    assert len(caught.value.message) < 200


def test_the_field_at_fault_is_named() -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({}, "modelId"), ({"modelId": 5}, "modelId"), ({"modelId": "a", "maxContextLength": True}, "maxContextLength"),
        ({"modelId": "a", "overrides": []}, "overrides"), ({"modelId": "a", "surprise": 1}, "surprise"),
    ]  # fmt: skip
    for fields, param in cases:
        with pytest.raises(errors.InvalidRequest) as caught:
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
    with pytest.raises(errors.InvalidRequest):
        read_form_fields(content_type, body)


def test_the_bodies_of_all_requests_share_one_budget_and_give_it_back() -> None:
    set_runner_limits(api={"held_bytes": 10})
    budget = BodyBudget()
    with budget.hold() as first, budget.hold() as second:
        first(6)
        second(4)
        with pytest.raises(errors.Unavailable):
            first(1)
        assert budget.held_bytes == 10
    assert budget.held_bytes == 0
    names = {
        "gpu_memory_total_mb": "gpuMemoryTotalMB", "kv_mb": "kvMB", "p95_wait_ms": "p95WaitMs", "gpu_ids": "gpuIds", "id": "id",
    }  # fmt: skip
    assert {name: spec_name(name) for name in names} == names


def make_model(*events: ModelEvent, error: str | None = None) -> Model:
    budget = queues.WaitBudget(10)
    queue = queues.FairQueue(slots=1, limits=Fairness(), budget=budget, weight_of=lambda _: 1.0)
    model = Model(ModelDefinition(model_id="m", backend="gguf"), queue, lambda: None)
    for event in events:
        model.apply(event, error=error if event is ModelEvent.FAIL else None)
    return model


def make_parts(*models: Model, phase: Phase = Phase.SERVING, waiting: int = 0, max_depth: int = 10) -> Parts:
    """Return the few parts that health is judged by."""
    budget = queues.WaitBudget(max_depth)
    for _ in range(waiting):
        budget.add()
    pool = SimpleNamespace(registry=SimpleNamespace(models=list(models)))
    return cast("Parts", SimpleNamespace(phase=phase, pool=pool, budget=budget))


def make_reading(*, free_mb: int) -> Reading:
    return Reading(gpus=[], kind="gpu", total_mb=10_000, used_mb=10_000 - free_mb, free_mb=free_mb)


LOADED = (ModelEvent.LOAD, ModelEvent.SERVE)
FAILED = (ModelEvent.LOAD, ModelEvent.FAIL)


def test_a_node_is_unwell_while_it_starts_or_stops_or_has_no_memory_or_a_full_queue() -> None:
    assert find_ailments(make_parts(), make_reading(free_mb=5000)) == []
    assert find_ailments(make_parts(make_model(*LOADED)), None) == []
    for phase in (Phase.STARTING, Phase.STOPPING):
        assert find_ailments(make_parts(phase=phase), None) == [f"the node is {phase.value}"]
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
        raise errors.UnknownModel("no such model")

    assert (await _call(interruptible, answer)).status_code == 204
    with pytest.raises(errors.UnknownModel):
        await _call(interruptible, refuse)
    asked = asyncio.create_task(_call(interruptible, wait))
    await asyncio.wait_for(has_begun.wait(), 30)
    interruptible.close()
    with pytest.raises(errors.Unavailable):
        await asyncio.wait_for(asked, 30)
    assert was_cancelled.is_set()


async def _call(interruptible: Interruptible, handler: object) -> Response:
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": []})
    return await interruptible.wrap(handler)(request)  # type: ignore[arg-type]  # either of the handlers above


def test_the_type_of_an_error_is_what_clients_choose_their_exception_by() -> None:
    refusals: list[tuple[errors.RequestRefused, str]] = [
        (errors.AccessRefused("no"), "authentication_error"), (errors.UnknownModel("no"), "not_found_error"),
        (errors.InvalidRequest("no", param="stream"), "invalid_request_error"),
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
    guard = AccessGuard(cast("Any", None), config=config, tickets=Tickets(None, cast("Any", None)))  # nobody is let through
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


async def test_weights_of_one_two_and_four_hold_within_five_percent_of_slot_time_in_the_long_run() -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    visitors = Visitors(slots=3, weight_of=weights.__getitem__)
    service_s = {"a": 0.9, "b": 0.35, "c": 0.2}  # unlike sizes: shares are of time, not of requests
    used: Counter[str] = Counter()
    ends: dict[str, float] = {}
    came = 0
    for tenant in "abc" * 10:
        came += 1
        await visitors.come(f"{tenant}{came}")
    for _ in range(3000):
        for name in [name for name in visitors.turns if name not in ends]:
            ends[name] = visitors.clock.monotonic_s + service_s[name[0]]
        name = min(ends, key=ends.__getitem__)
        used[name[0]] += service_s[name[0]]  # type: ignore[assignment]  # a Counter of seconds
        await visitors.go(name, after_s=ends.pop(name) - visitors.clock.monotonic_s)
        came += 1
        await visitors.come(f"{name[0]}{came}")
    total = sum(used.values())
    for tenant, weight in weights.items():
        assert used[tenant] / total == pytest.approx(weight / 7, rel=0.05)


async def test_the_soft_cap_is_borrowed_while_nobody_else_waits_and_then_stands_behind() -> None:
    visitors = Visitors(slots=2)
    await visitors.come("a1", "a2", "a3", "a4")
    assert visitors.served == ["a1", "a2"]
    visitors.clock.advance(0.5)
    await visitors.come("b1")
    await visitors.go("a1", after_s=0.1)
    assert visitors.served[-1] == "b1"
    equal = Visitors(slots=2)
    await equal.come("a1", "b1", "a2", "b2")
    await equal.go("b1")
    assert equal.served[-1] == "b2"  # although a was served longer ago


async def test_a_tenant_that_was_away_has_saved_up_nothing_but_still_owes() -> None:
    visitors = Visitors(slots=2)
    await visitors.come("a1", "b1", "c1")
    await visitors.go("b1", after_s=1.0)
    await visitors.go("c1", after_s=100.0)
    await visitors.go("a1", after_s=9.0)
    assert (visitors.score_of("a"), visitors.score_of("b"), visitors.score_of("c")) == (110_000.0, 1000.0, 100_000.0)
    await visitors.come("c2")
    await visitors.come("b2")
    assert visitors.score_of("b") == visitors.score_of("c") == 110_000.0
    visitors.clock.advance(50.0)
    await visitors.come("d1")
    assert visitors.score_of("d") == visitors.score_of("b") == 160_000.0
    await visitors.come("a2")
    assert visitors.score_of("a") == 160_000.0


async def test_a_tenant_is_forgotten_after_the_idle_time_and_accounts_are_bounded() -> None:
    visitors = Visitors()
    for number in range(1500):
        turn = await visitors.queue.enter(tenant=f"tenant-{number}", priority="normal", timeout_s=1.0)
        visitors.queue.leave(turn)
    assert (len(visitors.known()), "tenant-1499" in visitors.known()) == (1000, True)
    visitors.clock.advance(299.0)
    assert visitors.known()
    visitors.clock.advance(1.0)
    assert visitors.known() == set()


async def refused(visitors: Visitors, name: str) -> BaseException:
    """Return the error with which a request is turned away without waiting."""
    await visitors.come(name)
    error = visitors.tasks[name].exception()
    assert error is not None
    return error


async def test_a_tenant_and_a_model_have_only_so_many_requests_waiting() -> None:
    visitors = Visitors(limits=Fairness(pending_per_key=2))
    await visitors.come("a1", "a2", "a3")
    error = await refused(visitors, "a4")
    assert isinstance(error, errors.TenantQueueFull)
    assert (error.code, error.status, error.details) == ("fairness_key_queue_full", 429, {"queueDepth": 2})
    await visitors.come("b1")
    assert not visitors.tasks["b1"].done()
    assert (visitors.queue.rejected_per_key_limit, visitors.queue.rejected_executor_limit) == (1, 0)
    assert {key.tenant: key.rejected for key, _ in visitors.queue.list_accounts()} == {"a": 1, "b": 0}
    visitors = Visitors(limits=Fairness(pending_per_executor=2))
    await visitors.come("a1", "a2", "b1")
    error = await refused(visitors, "c1")
    assert isinstance(error, errors.ModelQueueFull)
    assert (error.code, error.status, error.details) == ("executor_queue_full", 429, {"queueDepth": 2})
    assert (visitors.queue.rejected_per_key_limit, visitors.queue.rejected_executor_limit) == (0, 1)
    assert visitors.known() == {"a", "b"}  # a refused stranger leaves no account


async def test_the_box_has_only_so_many_requests_waiting_over_all_models() -> None:
    first, second = Visitors(max_depth=2), Visitors()
    second.queue = queues.FairQueue(slots=1, limits=Fairness(), budget=first.budget, weight_of=lambda _: 1.0)
    await first.come("a1", "a2")
    await second.come("a1", "a2")
    assert (first.budget.depth, first.queue.depth, second.queue.depth) == (2, 1, 1)
    assert isinstance(await refused(first, "b1"), errors.QueueFull)
    first.queue.cancel_waiting(errors.ModelUnloading("gone"))
    assert first.budget.depth == 1
    await settle()
    assert isinstance(first.tasks["a2"].exception(), errors.ModelUnloading)
    second.tasks["a2"].cancel()
    await settle()
    assert first.budget.depth == 0


async def test_a_full_box_tells_its_depth_its_average_wait_and_when_to_come_again() -> None:
    visitors = Visitors(max_depth=2)
    await visitors.come("a1", "a2")
    await visitors.go("a1", after_s=2.5)  # one waited 0 ms, the next 2500 ms
    await visitors.come("a3", "a4")
    error = await refused(visitors, "b1")
    assert isinstance(error, errors.QueueFull)
    assert (error.code, error.status, error.retry_after_s) == ("queue_full", 503, 5)
    assert error.message == "Queue depth 2/2, retry in 5 seconds"
    assert error.details == {"queueDepth": 2, "avgWaitMs": 1250}
    for wait_s, advice_s in ((0.001, 1), (10_000.0, 60)):
        visitors = Visitors(max_depth=1)
        await visitors.come("a1", "a2")
        await visitors.go("a1", after_s=wait_s)
        await visitors.come("a3")
        error = await refused(visitors, "a4")
        assert isinstance(error, errors.QueueFull)
        assert error.retry_after_s == advice_s


async def test_a_request_that_waited_too_long_is_refused_and_its_place_given_up() -> None:
    visitors = Visitors()
    await visitors.come("a1")
    await visitors.come("a2", timeout_s=0.02)
    with pytest.raises(errors.QueueTimeout, match=r"within 0\.02 s") as caught:
        await asyncio.wait_for(visitors.tasks["a2"], 30.0)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    assert (visitors.queue.depth, visitors.budget.depth) == (0, 0)
    await visitors.come("b1")
    await visitors.go("a1")
    assert visitors.served == ["a1", "b1"]


async def test_a_slot_granted_to_a_request_that_is_cancelled_in_the_same_tick_is_passed_on() -> None:
    visitors = Visitors()
    await visitors.come("a1", "a2", "b1")
    visitors.queue.leave(visitors.turns.pop("a1"))
    granted = next(task for task in ("a2", "b1") if visitors.queue.list_accounts()[0][0].tenant == task[0])
    visitors.tasks[granted].cancel()
    await settle()
    other = "b1" if granted == "a2" else "a2"
    assert visitors.tasks[granted].cancelled()
    assert list(visitors.turns) == [other]
    assert await visitors.serve_all() == ["a1", other]
    assert visitors.queue.active == 0


@pytest.mark.parametrize("low", ["b1", "ax"], ids=["of another tenant", "of its own"])
async def test_a_low_request_is_not_starved_by_a_stream_of_high_ones(low: str) -> None:
    visitors = Visitors(limits=Fairness())
    await visitors.come("a0", priority="high")
    await visitors.come(low, priority="low")
    for number in range(1, 40):
        await visitors.come(f"a{number}", priority="high")
        await visitors.go(f"a{number - 1}", after_s=1.0)
        if low in visitors.served:
            break
    assert visitors.served.index(low) == 20  # two classes up after 20 s, and of lower score from the start


async def test_waits_are_averaged_over_the_last_five_minutes_and_the_last_thousand() -> None:
    clock, budget = install_virtual_clock(), queues.WaitBudget(16)
    assert (budget.avg_wait_ms, budget.p95_wait_ms, budget.max_depth) == (0.0, 0.0, 16)
    budget.observe(9000.0)
    clock.advance(200.0)
    for number in range(1, 101):
        budget.observe(float(number))
    assert budget.avg_wait_ms == pytest.approx((9000 + 5050) / 101)
    clock.advance(101.0)
    assert (budget.avg_wait_ms, budget.p95_wait_ms) == (50.5, 95.0)
    clock.advance(300.0)
    assert (budget.avg_wait_ms, budget.p95_wait_ms) == (0.0, 0.0)
    for number in range(5000):
        budget.observe(0.0 if number < 4000 else 2.0)
    assert (budget.avg_wait_ms, budget.p95_wait_ms) == (2.0, 2.0)


@dataclass
class Asked:
    """What a random run knows of one request."""

    task: asyncio.Task[queues.Turn]
    is_cancelled: bool = False
    has_left: bool = False


TENANTS = st.sampled_from("abcd")
PRIORITIES: st.SearchStrategy[queues.Priority] = st.sampled_from(("high", "normal", "low"))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), TENANTS, PRIORITIES), st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("cancel"), st.integers(0, 30)), st.tuples(st.just("resize"), st.integers(0, 4)),
        st.tuples(st.just("pass"), st.floats(0.0, 30.0)),
        st.tuples(st.sampled_from(("pause", "resume", "refuse", "settle", "settle", "settle"))),
    ),
    max_size=60,
)  # fmt: skip


class RandomRun:
    """A queue and what should be true of it, whatever happens in whatever order, several things in one tick included."""

    def __init__(self) -> None:
        self.clock = install_virtual_clock()
        self.budget = queues.WaitBudget(12)
        limits = Fairness(pending_per_key=5, pending_per_executor=10)
        self.queue = queues.FairQueue(slots=2, limits=limits, budget=self.budget, weight_of=lambda _: 1.0)
        self.requests: list[Asked] = []
        self.is_paused = False
        self.most_active = 2

    def running(self) -> list[Asked]:
        return [
            request
            for request in self.requests
            if request.task.done() and not request.task.cancelled() and not request.task.exception() and not request.has_left
        ]

    def waiting(self) -> list[Asked]:
        return [request for request in self.requests if not request.task.done()]

    async def step(self, name: str, *arguments: object) -> None:
        match name, *arguments:
            case "enter", str(tenant), ("high" | "normal" | "low") as priority:
                entering = self.queue.enter(tenant=tenant, priority=priority, timeout_s=LONG_S)
                self.requests.append(Asked(asyncio.create_task(entering)))
            case "leave", int(index):
                running = self.running()
                if running:
                    request = running[index % len(running)]
                    request.has_left = True
                    for _ in range(1 + index % 2):  # leaving twice is leaving once
                        self.queue.leave(request.task.result())
            case "cancel", int(index):
                waiting = self.waiting()
                if waiting:
                    request = waiting[index % len(waiting)]
                    request.is_cancelled = True
                    request.task.cancel()
            case "resize", int(slots):
                self.queue.resize(slots)
                self.most_active = max(self.most_active, slots)
            case "pass", float(seconds):
                self.clock.advance(seconds)
            case "pause", *_:
                self.queue.pause()
                self.is_paused = True
            case "resume", *_:
                self.queue.resume()
                self.is_paused = False
            case "refuse", *_:
                self.queue.cancel_waiting(errors.ModelUnloading("gone"))
            case _:
                await settle()
                self.check()

    def check(self) -> None:
        running, waiting = self.running(), self.waiting()
        assert self.queue.active == len(running)
        assert self.queue.depth == self.budget.depth == len(waiting)
        assert not any(request.is_cancelled for request in waiting)
        assert self.is_paused or not waiting or self.queue.active >= self.queue.slots
        assert self.queue.active <= max(self.queue.slots, self.most_active)
        self.most_active = max(self.queue.slots, self.queue.active)
        accounts = self.queue.list_accounts()
        assert sum(key.pending for key, _ in accounts) == len(waiting)
        assert sum(key.active for key, _ in accounts) == len(running)
        assert all(score >= 0 for _, score in accounts)


@examples(50)
@given(steps=STEPS)
def test_whatever_happens_nobody_is_lost_and_no_slot_stays_free_while_somebody_waits(steps: list[tuple[object, ...]]) -> None:
    async def go_through() -> None:
        run = RandomRun()
        for name, *arguments in steps:
            await run.step(str(name), *arguments)
        await settle()
        run.check()
        run.queue.resume()
        run.queue.resize(1)
        run.is_paused = False
        await settle()
        for _ in range(len(run.requests)):
            for request in run.running():
                request.has_left = True
                run.queue.leave(request.task.result())
            await settle()
        assert all(request.task.done() for request in run.requests)
        assert (run.queue.active, run.queue.depth, run.budget.depth) == (0, 0, 0)
        for request in run.requests:
            if not request.task.cancelled():
                request.task.exception()  # refusals were expected

    with asyncio.Runner() as runner:
        runner.run(go_through())
