"""Salts: who shares cached blocks with whom, and what a flush does to that."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations

import pytest

from runner.engines.port import COMPLETIONS, Call, FlushRequest, FlushScope
from runner.engines.vllm.salts import Salts, seal_body
from runner.errors import InvalidRequest
from tests.fakes.limits import set_runner_limits

ALPHA = Call("POST", COMPLETIONS, {}, b"{}", tenant="alpha")


def test_a_tenant_and_tag_keep_their_salt() -> None:
    salts = Salts()
    assert salts.salt_for(ALPHA) == salts.salt_for(replace(ALPHA, body=b'{"other":1}'))


def test_other_tenants_tags_and_processes_have_other_salts() -> None:
    salts = Salts()
    calls = [
        ALPHA,
        replace(ALPHA, tenant="beta"),
        replace(ALPHA, cache_tag="t"),
        replace(ALPHA, tenant="alphat"),
        replace(ALPHA, tenant="alph", cache_tag="at"),
        replace(ALPHA, tenant='alpha","'),
    ]
    found = [salts.salt_for(call) for call in calls] + [Salts().salt_for(ALPHA)]
    assert all(first != second for first, second in combinations(found, 2))


def test_nothing_is_reused_where_the_client_wants_that() -> None:
    salts, private = Salts(), replace(ALPHA, cache_mode="none")
    assert len({salts.salt_for(private), salts.salt_for(private), salts.salt_for(ALPHA)}) == 3


@pytest.mark.parametrize(
    ("request_", "changed"),
    [
        (FlushRequest(FlushScope.ALL), {"alpha", "alpha t", "beta t"}),
        (FlushRequest(FlushScope.MODEL), {"alpha", "alpha t", "beta t"}),
        (FlushRequest(FlushScope.TENANT, tenant="alpha"), {"alpha", "alpha t"}),
        (FlushRequest(FlushScope.TAG, tag="t"), {"alpha t", "beta t"}),
        (FlushRequest(FlushScope.TAG, tenant="alpha", tag="t"), {"alpha t"}),
    ],
)
def test_a_flush_changes_the_salts_it_names_and_no_others(request_: FlushRequest, changed: set[str]) -> None:
    salts = Salts()
    calls = {
        "alpha": ALPHA,
        "alpha t": replace(ALPHA, cache_tag="t"),
        "beta t": replace(ALPHA, tenant="beta", cache_tag="t"),
    }
    before = {name: salts.salt_for(call) for name, call in calls.items()}
    salts.forget(request_)
    assert {name for name, call in calls.items() if salts.salt_for(call) != before[name]} == changed


def test_memory_of_flushes_is_bounded_and_its_end_brings_no_salt_back() -> None:
    set_runner_limits(engines={"vllm_epochs": 3})
    salts, seen = Salts(), set()
    for round_ in range(10):
        seen.add(salts.salt_for(ALPHA))
        salts.forget(FlushRequest(FlushScope.TENANT, tenant="alpha"))
        salts.forget(FlushRequest(FlushScope.TENANT, tenant=f"t{round_}"))
    assert len(seen) == 10
    assert len(salts._epochs) <= 3


def test_all_other_fields_stay_as_they_came() -> None:
    body = b'{"model": "m","temperature":0.10, "messages":[ {"content":"\\u00e9 \xc3\xa9"} ],"cache_salt":7,"priority":"x"}'
    sealed = seal_body(body, salt="s", priority="high")
    assert b'"temperature":0.10' in sealed
    assert b'[ {"content":"\\u00e9 \xc3\xa9"} ]' in sealed
    assert json.loads(sealed)["cache_salt"] == "s"
    assert json.loads(sealed)["priority"] == -10


@pytest.mark.parametrize("name", ["cache_salt", "cache\\u005fsalt", "request_id", "kv_transfer_params"])
def test_a_field_is_ours_however_it_is_written(name: str) -> None:
    sealed = seal_body(b'{"%b":"theirs","%b":"twice"}' % (name.encode(), name.encode()), salt="s", priority="normal")
    assert b"theirs" not in sealed
    assert b"twice" not in sealed


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'"x"', b"{", b'{"a":NaN}', '{"cache_salt":"x"}'.encode("utf-16"), b"\xef\xbb\xbf{}", b'{"a":' * 5000]
)
def test_what_is_no_json_object_does_not_pass_unsealed(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        seal_body(body, salt="s", priority="normal")
