"""Rate, allow-list and caps, and what a refusal says or leaves behind."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.limits import GatewayLimits
from gateway.admission import Admission, RateLimiter
from gateway.bookkeeping import Bookkeeper, unread_request
from gateway.catalogue import AliasEntry, Catalogue, ModelEntry
from gateway.errors import (
    BadRequest,
    GatewayError,
    MaxTokensTooLarge,
    ModelNotAllowed,
    ModelUnknown,
    PromptTooLarge,
    RateLimited,
)
from gateway.records import RecordWriter
from gateway.routing import Alias, Target
from gateway.values import Caller, InferenceRequest, PoolOptions

KEY, OTHER = uuid.UUID(int=1), uuid.UUID(int=2)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_window_moves_and_the_wait_is_right() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    for second in (0, 10, 20):
        clock.now = 1000.0 + second
        state = limiter.take(KEY, 3)
        assert (state.limit, state.remaining, state.reset_s) == (3, 2 - second // 10, 60.0 - second)
    clock.now = 1030.0
    with pytest.raises(RateLimited) as caught:
        limiter.take(KEY, 3)
    assert caught.value.retry_after_s == pytest.approx(30.0)
    clock.now = 1059.9
    with pytest.raises(RateLimited):
        limiter.take(KEY, 3)
    clock.now = 1060.0
    assert limiter.take(KEY, 3).remaining == 0


def test_a_refused_request_costs_nothing_and_keys_do_not_share() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    limiter.take(KEY, 1)
    for _ in range(5):
        with pytest.raises(RateLimited):
            limiter.take(KEY, 1)
    assert limiter.take(OTHER, 1).remaining == 0
    clock.now += 60
    limiter.take(KEY, 1)


def test_a_lowered_limit_holds_at_once_and_says_when_it_would_pass() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    for second in range(10):
        clock.now = 1000.0 + second
        limiter.take(KEY, 10)
    with pytest.raises(RateLimited) as caught:
        limiter.take(KEY, 2)
    assert caught.value.retry_after_s == pytest.approx(1008 + 60 - 1009)
    clock.now += caught.value.retry_after_s or 0
    limiter.take(KEY, 2)


def test_peek_counts_nothing_and_headers_speak_of_whole_seconds() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    assert limiter.peek(KEY, 5).remaining == 5
    limiter.take(KEY, 5)
    clock.now += 0.25
    assert limiter.peek(KEY, 5) == limiter.peek(KEY, 5)
    assert limiter.peek(KEY, 5).headers() == [
        (b"x-ratelimit-limit-requests", b"5"),
        (b"x-ratelimit-remaining-requests", b"4"),
        (b"x-ratelimit-reset-requests", b"60s"),
    ]


def test_idle_keys_are_forgotten_and_busy_ones_are_not() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    limiter.take(KEY, 5)
    clock.now += 30
    limiter.take(OTHER, 5)
    clock.now += 30
    limiter.forget_idle()
    assert limiter.peek(OTHER, 5).remaining == 4
    assert limiter._windows.keys() == {OTHER}


@given(
    limit=st.integers(1, 5),
    steps=st.lists(st.floats(0, 40, allow_nan=False), min_size=1, max_size=60),
)
def test_never_more_than_the_limit_in_any_minute_and_never_fewer_than_could_pass(limit: int, steps: list[float]) -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    taken: list[float] = []
    for step in steps:
        clock.now += step
        in_window = sum(at > clock.now - 60.0 for at in taken)
        try:
            limiter.take(KEY, limit)
        except RateLimited as refusal:
            assert in_window == limit
            wait = refusal.retry_after_s
            assert wait is not None
            assert 0 < wait <= 60.0
            assert sum(at > clock.now + wait - 60.0 + 1e-6 for at in taken) < limit
        else:
            assert in_window < limit
            taken.append(clock.now)


# models


def make_admission(*known: str, **caps: int) -> Admission:
    limits: dict[str, Any] = {"max_tokens": 100, "max_prompt_chars": 1000, "max_queue": 10, **caps}
    catalogue = Catalogue(GatewayLimits())
    catalogue.apply_models(
        [
            ModelEntry(name="m", allowed=True, owned_by="x", created=0, **limits),
            ModelEntry(name="known", allowed=False, owned_by="x", created=0, **limits),
        ]
    )
    return Admission(catalogue, lambda name: name in known, lambda models, path: [])


def a_caller(*allowed: str) -> Caller:
    return Caller(key_id=KEY, key_name="k", tenant="t", requests_per_minute=1, allowed_models=frozenset(allowed))


def a_request(model: str = "m", *, prompt_chars: int = 1, max_tokens: int | None = None) -> InferenceRequest:
    return InferenceRequest(
        endpoint="/v1/chat/completions",
        model=model,
        is_streaming=False,
        max_tokens=max_tokens,
        prompt_chars=prompt_chars,
        body=b"",
        headers={},
    )


def test_an_allowed_request_gets_the_models_row() -> None:
    [entry] = make_admission().admit(a_caller(), a_request(prompt_chars=1000, max_tokens=100))
    assert entry.name == "m"
    assert [row.name for row in make_admission().admit(a_caller("m"), a_request())] == ["m"]


@pytest.mark.parametrize(
    ("caller", "request_", "error", "status", "param"),
    [
        (a_caller(), a_request("nobody"), ModelUnknown, 404, "model"),
        (a_caller(), a_request("declared"), ModelNotAllowed, 400, "model"),
        (a_caller(), a_request("known"), ModelNotAllowed, 400, "model"),
        (a_caller("other"), a_request(), ModelNotAllowed, 400, "model"),
        (a_caller(), a_request(prompt_chars=1001), PromptTooLarge, 400, "messages"),
        (a_caller(), a_request(max_tokens=101), MaxTokensTooLarge, 400, "max_tokens"),
        (a_caller(), a_request(max_tokens=10**40), MaxTokensTooLarge, 400, "max_tokens"),
    ],
)
def test_the_first_broken_rule_is_named(
    caller: Caller, request_: InferenceRequest, error: type[GatewayError], status: int, param: str
) -> None:
    with pytest.raises(error) as caught:
        make_admission("declared").admit(caller, request_)
    assert type(caught.value) is error
    assert (caught.value.status, caught.value.param, caught.value.retryable) == (status, param, False)


def test_callers_that_are_refused_nothing_any_more_are_forgotten() -> None:
    now = 1000.0
    records = RecordWriter(accept_s=1.0, max_pending=1000)
    limiter = RateLimiter(lambda: now)
    books = Bookkeeper(uuid.uuid4(), records, limiter)

    def refuse(key_id: uuid.UUID) -> None:
        caller = Caller(key_id=key_id, key_name="k", tenant="t", requests_per_minute=1, allowed_models=frozenset())
        books.record_refusal(BadRequest("no"), caller, unread_request("/v1/models"), uuid.uuid4())

    for _ in range(100):
        refuse(uuid.uuid4())
    now += 30
    stays = uuid.uuid4()
    refuse(stays)
    assert records.pending == 101
    now += 31
    books.forget_idle()
    assert set(limiter._windows) == {stays}


HIDDEN = "project-nightjar-70b"


def hide_model(*, is_allowed: bool) -> Admission:
    def rank(names: Iterable[str], _path: str) -> list[str]:
        return list(names)

    catalogue = Catalogue(GatewayLimits())
    row = ModelEntry(HIDDEN, is_allowed, "", max_tokens=9, max_prompt_chars=9, max_queue=9, created=0)
    catalogue.apply_models([row])
    catalogue.apply_aliases([AliasEntry(None, Alias("fast", (Target(HIDDEN), Target("gone"))))])
    return Admission(catalogue, lambda name: False, rank)


@pytest.mark.parametrize("is_allowed", [True, False], ids=["allowed", "not allowed"])
@pytest.mark.parametrize("name", ["fast", "auto", "other"])
def test_a_refusal_names_what_was_asked_for_and_never_the_model_behind_it(name: str, is_allowed: bool) -> None:
    admission = hide_model(is_allowed=is_allowed)
    caller = Caller(uuid.uuid4(), "k", "acme", 60, frozenset({"mine"}))
    with pytest.raises(GatewayError) as refused:
        admission.route(caller, name, "/v1/chat/completions", PoolOptions(fallback_models=("fast",)))
    assert HIDDEN not in refused.value.message
    assert name in refused.value.message or name == "auto"


@pytest.mark.parametrize("name", ["Mine", "mine ", "mine\u200b", "m\u0456ne", "ｍine"], ids=ascii)
def test_a_name_that_looks_like_an_allowed_one_is_another(name: str) -> None:
    admission = hide_model(is_allowed=True)
    with pytest.raises(GatewayError):
        admission.route(Caller(uuid.uuid4(), "k", "acme", 60, frozenset({"mine"})), name, "/v1/chat/completions")
