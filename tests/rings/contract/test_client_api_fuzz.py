"""The client API under fire, on a gateway of its own: what its document says holds, and nothing makes it fail, hang or grow.

``FUZZ_ROUNDS=20`` runs twenty times as much; ``python -m tests.rings.fuzz`` runs it for as long as it is told to, with a table.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.fakes.broken_http import KINDS as BROKEN
from tests.fakes.engine_streams import FLOODS
from tests.fakes.http_client import call
from tests.fakes.lab import Lab
from tests.fakes.request_bodies import COUNT_MESSAGES, COUNT_RESPONSES, TRANSLATED, list_kinds
from tests.fakes.stack import Gateway, Stack
from tests.rings.fuzz.document import Attack
from tests.rings.fuzz.rounds import MOST_CPU_MS, SETTINGS, Fuzzer, fuzz

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(900)]  # what is bounded is CPU: a busy machine may take its time
ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "1"))
"""How much of everything: 1 in the suite."""
EXAMPLES = 2 * ROUNDS
"""For each operation and kind of data. What they are is fixed: a run differs from the last one only when the code does."""
LARGEST = "an event larger than any"
FLOODED = (LARGEST, "calls that wait for the first", "a million empty calls", "line ends")
"""Of the floods, those that differ most; the others come in long runs."""


@pytest.fixture(scope="module")
def fuzzed(stack: Stack) -> Iterator[Gateway]:
    """A gateway that nothing else talks to: its log, its memory and its time are the fuzzer's alone."""
    with stack.lend_gateway("fuzzed", SETTINGS) as gateway:
        yield gateway


@pytest_asyncio.fixture
async def fuzzer(lab: Lab, fuzzed: Gateway) -> AsyncIterator[Fuzzer]:
    """Three boxes on that gateway, and what torments it. Afterwards nothing was found, and no fault of ours is in the log."""
    lab.gateway = fuzzed
    async with fuzz(lab, fuzzed) as running:
        yield running
        assert not running.findings, "\n".join(running.findings[:10])
        assert not running.read_bugs()


async def test_every_operation_keeps_to_the_document(fuzzer: Fuzzer) -> None:
    url, key = fuzzer.gateway.url, fuzzer.lab.stack.ready.api_key
    document = (await call("GET", url + "/openapi.json")).json
    native = Attack(document, url, fuzzer.native, key, examples=EXAMPLES)
    await asyncio.to_thread(native.run)
    translated = Attack(document, url, fuzzer.translated, key, examples=EXAMPLES)
    await asyncio.to_thread(translated.run, {*TRANSLATED, COUNT_MESSAGES, COUNT_RESPONSES})
    fuzzer.findings += [*native.findings, *translated.findings]
    assert native.statuses[200] > EXAMPLES
    assert translated.statuses[200] > EXAMPLES


async def test_what_is_malformed_is_refused_by_name_and_cheaply(fuzzer: Fuzzer) -> None:
    kinds = list_kinds()
    for name, path, make in kinds:
        await fuzzer.send_malformed(name, path, make, repeats=1)
    before = fuzzer.gauge.read_rss_bytes()
    for name, path, make in kinds:
        await fuzzer.send_malformed(name, path, make, repeats=ROUNDS)
    await fuzzer.settle(before)


async def test_bodies_that_were_good_once_are_answered_or_refused(fuzzer: Fuzzer) -> None:
    await fuzzer.send_spoilt(range(200 * ROUNDS))
    assert fuzzer.statuses[200] > 20 * ROUNDS
    assert fuzzer.statuses[400] > 20 * ROUNDS


async def test_broken_http_is_refused_or_cut_off(fuzzer: Fuzzer) -> None:
    for name in BROKEN:
        await fuzzer.send_broken(name)


async def test_a_body_that_is_too_large_is_refused_before_it_is_read_or_cut_at_the_limit(fuzzer: Fuzzer) -> None:
    declared = [await fuzzer.send_large(100 * 2**20, declared=True) for _ in range(3)]
    assert min(row.cpu_ms for row in declared) < MOST_CPU_MS
    await fuzzer.send_large(100 * 2**20, declared=False)
    before = fuzzer.gauge.read_rss_bytes()
    for _ in range(2 * ROUNDS):
        await fuzzer.send_large(100 * 2**20, declared=False)
    await fuzzer.settle(before)


async def test_a_refusal_is_read_however_large_the_body_that_nobody_wants(fuzzer: Fuzzer) -> None:
    for _ in range(ROUNDS):
        await fuzzer.send_unread(60 * 2**20)


async def test_a_hostile_engine_never_reaches_the_client(fuzzer: Fuzzer) -> None:
    await fuzzer.hear_spoilt(range(40))
    before = fuzzer.gauge.read_rss_bytes()
    await fuzzer.hear_spoilt(range(40, 40 + 80 * ROUNDS))
    await fuzzer.hear_answers(range(80 * ROUNDS))
    await fuzzer.settle(before)


async def test_a_flood_ends_as_one_error_and_leaves_nothing_behind(fuzzer: Fuzzer) -> None:
    floods = {name: list(FLOODS[name]()) for name in FLOODED}
    await fuzzer.hear_flood(LARGEST, floods[LARGEST])
    before = fuzzer.gauge.read_rss_bytes()
    for _ in range(ROUNDS):
        for name, pieces in floods.items():
            await fuzzer.hear_flood(name, pieces)
            await fuzzer.settle(before)
    reply = await fuzzer.lab.post(
        json.dumps({"model": fuzzer.native, "messages": [{"role": "user", "content": "hi"}]}).encode()
    )
    assert reply.status == 200
