"""The client API under fire, on a gateway of its own: what its document says holds, and nothing makes it fail, hang or grow.

``FUZZ_ROUNDS=20`` runs twenty times as much; ``python -m tests.fuzz`` runs it for as long as it is told to, with a table.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from typing import Any  # bodies are JSON

import httpx
import pytest
import pytest_asyncio
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks

from tests.contract.lab import Lab
from tests.contract.stack import Gateway, Stack
from tests.fuzz.broken_http import KINDS as BROKEN
from tests.fuzz.engine_streams import FLOODS
from tests.fuzz.malformed import list_kinds
from tests.fuzz.rounds import MOST_CPU_MS, Fuzzer, fuzz

pytestmark = pytest.mark.asyncio
ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "1"))
"""How much of everything: 1 in the suite."""
EXAMPLES = 5 * ROUNDS
"""For each operation and kind of data. What they are is fixed: a run differs from the last one only when the code does."""
MOST_GROWTH_BYTES = 48 * 2**20
"""Over a whole test that was run once to warm up; a large body alone comes and goes with as much."""
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
REFUSED_FIELDS = frozenset({"store", "previous_response_id"})
"""What is right in the document and refused to a tenant whose answers are not kept."""


@pytest.fixture(scope="session")
def fuzzed(stack: Stack) -> Gateway:
    """A gateway that nothing else talks to: its log, its memory and its time are the fuzzer's alone."""
    return stack.gateway("fuzzed", {"MUSTER_RATE_LIMIT_RPM": "1000000"})


@pytest_asyncio.fixture
async def fuzzer(lab: Lab, fuzzed: Gateway) -> AsyncIterator[Fuzzer]:
    """Three boxes on that gateway, and what torments it. Afterwards nothing was found, and no fault of ours is in the log."""
    lab.gateway = fuzzed
    async with fuzz(lab, fuzzed) as running:
        yield running
        assert not running.findings, "\n".join(running.findings[:10])
        assert not running.read_bugs()


async def test_every_operation_keeps_to_the_document(fuzzer: Fuzzer) -> None:
    url = fuzzer.gateway.url
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        document = (await client.get("/openapi.json")).json()
    await asyncio.to_thread(attack_all, document, url, fuzzer.native, fuzzer.lab.stack.ready.api_key)
    await asyncio.to_thread(attack_all, document, url, fuzzer.translated, fuzzer.lab.stack.ready.api_key)


def attack_all(document: dict[str, Any], url: str, model: str, key: str) -> None:
    """Send good and bad data to every operation, for a model."""
    api = schemathesis.openapi.from_dict(document)
    for found in api.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        attack(operation.as_strategy(GenerationMode.POSITIVE), url, model, key, is_good=True)
        if operation.body or operation.query:
            attack(operation.as_strategy(GenerationMode.NEGATIVE), url, model, key, is_good=False)


def attack(cases: st.SearchStrategy[Any], url: str, model: str, key: str, *, is_good: bool) -> None:
    @_fixed(EXAMPLES)
    @given(cases)
    def send(case: schemathesis.Case[Any]) -> None:
        if is_good and isinstance(case.body, dict):
            case.body = {**case.body, "model": model}
        response = case.call(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=20)
        case.validate_response(response, checks=CHECKS)
        if is_good and case.method == "POST" and response.status_code >= 400:
            assert response.json()["error"]["param"] in REFUSED_FIELDS, (case.path, case.body, response.text)

    send()


def _fixed(examples: int) -> Callable[[Any], Any]:  # Any: decorators of Hypothesis
    """The same examples in every run, without shrinking: the first failure says enough."""
    fixed = settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    return lambda test: seed(7)(fixed(test))


async def test_what_is_malformed_is_refused_by_name_and_cheaply(fuzzer: Fuzzer) -> None:
    kinds = list_kinds()
    for name, path, make in kinds:
        await fuzzer.send_malformed(name, path, make, repeats=1)
    before = fuzzer.gauge.read_rss_bytes()
    rows = [await fuzzer.send_malformed(name, path, make, repeats=2 * ROUNDS) for name, path, make in kinds]
    assert not [row for row in rows if row.cpu_ms > MOST_CPU_MS]
    assert fuzzer.gauge.read_rss_bytes() - before < MOST_GROWTH_BYTES


async def test_bodies_that_were_good_once_are_answered_or_refused(fuzzer: Fuzzer) -> None:
    await fuzzer.send_spoilt(range(400 * ROUNDS))
    assert fuzzer.statuses[200] > 50 * ROUNDS
    assert fuzzer.statuses[400] > 50 * ROUNDS


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_http_is_refused_or_cut_off(fuzzer: Fuzzer, name: str) -> None:
    await fuzzer.send_broken(name)


async def test_a_body_that_is_too_large_is_refused_before_it_is_read_or_cut_at_the_limit(fuzzer: Fuzzer) -> None:
    declared = await fuzzer.send_large(100 * 2**20, declared=True)
    assert declared.cpu_ms < MOST_CPU_MS
    await fuzzer.send_large(100 * 2**20, declared=False)
    before = fuzzer.gauge.read_rss_bytes()
    for _ in range(3 * ROUNDS):
        await fuzzer.send_large(100 * 2**20, declared=False)
    assert fuzzer.gauge.read_rss_bytes() - before < MOST_GROWTH_BYTES


async def test_a_hostile_engine_never_reaches_the_client(fuzzer: Fuzzer) -> None:
    await fuzzer.hear_spoilt(range(150))
    before = fuzzer.gauge.read_rss_bytes()
    await fuzzer.hear_spoilt(range(150, 150 + 250 * ROUNDS))
    await fuzzer.hear_answers(range(250 * ROUNDS))
    assert fuzzer.gauge.read_rss_bytes() - before < MOST_GROWTH_BYTES


@pytest.mark.parametrize(
    "name", ["calls that wait for the first", "a million empty calls", "an event larger than any", "line ends"]
)
async def test_a_flood_ends_as_one_error_and_leaves_nothing_behind(fuzzer: Fuzzer, name: str) -> None:
    pieces = list(FLOODS[name]())
    await fuzzer.hear_flood(name, pieces)
    before = fuzzer.gauge.read_rss_bytes()
    for _ in range(ROUNDS):
        await fuzzer.hear_flood(name, pieces)
    assert fuzzer.gauge.read_rss_bytes() - before < MOST_GROWTH_BYTES
    reply = await fuzzer.lab.post(
        json.dumps({"model": fuzzer.native, "messages": [{"role": "user", "content": "hi"}]}).encode()
    )
    assert reply.status == 200
