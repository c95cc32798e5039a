"""The client API under fire, on a gateway of its own: what its document says holds, and nothing makes it fail, hang or grow.

``FUZZ_ROUNDS=20`` runs twenty times as much. Everything is drawn from numbered seeds, so that a finding can be had again.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from core.limits import GatewayLimits
from gateway.errors import ClientTooSlow
from gateway.request.client import ClientConnection
from tests.fakes.http_client import call
from tests.fakes.lab import Lab
from tests.fakes.request_bodies import COUNT_MESSAGES, COUNT_RESPONSES, FLOODS, TRANSLATED, list_kinds
from tests.fakes.request_bodies import KINDS as BROKEN
from tests.fakes.server_door import GET, Scope, Visitor, hello, serve
from tests.fakes.stack import Gateway, Stack
from tests.rings.fuzz.rounds import MOST_CPU_MS, SETTINGS, Attack, Fuzzer, fuzz

pytestmark = [pytest.mark.timeout(900)]  # what is bounded is CPU: a busy machine may take its time
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
    """Three nodes on that gateway, and what torments it. Afterwards nothing was found, and no fault of ours is in the log."""
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


TRICKLING, STALLED = 500, 50
PIECE_BYTES = 64 * 1024
STALL = GET.replace(b"/x", b"/stall")


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * (TRICKLING + STALLED)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"needs {wanted} open files; the limit here is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
async def test_a_good_client_is_served_while_hundreds_trickle_and_stall_and_all_of_them_are_ended() -> None:
    too_slow = held_bytes = 0

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        nonlocal too_slow, held_bytes
        if scope["path"] != "/stall":
            await hello(scope, receive, send)
            return
        client = ClientConnection(scope, receive, limits=GatewayLimits(client_write_s=3.0))
        await client.read_body()
        client.watch()
        client.start(200, [])
        try:
            while True:
                client.write(b"x" * PIECE_BYTES)
                held_bytes = max(held_bytes, client.line.waiting_bytes)
                await client.drain()
        except ClientTooSlow:
            too_slow += 1
        client.unwatch()

    async with serve(app, header_s=6.0) as door, AsyncExitStack() as crowd, asyncio.timeout(120):
        good = await crowd.enter_async_context(door.visit())
        tricklers = [await crowd.enter_async_context(door.visit(b"GET /x HTTP/1.1\r\nx-slow: ")) for _ in range(TRICKLING)]
        stalled = [await crowd.enter_async_context(door.visit(STALL)) for _ in range(STALLED)]
        for visitor in stalled:
            visitor.reader._transport.pause_reading()  # type: ignore[attr-defined]
        answers = [asyncio.create_task(visitor.answer()) for visitor in tricklers]
        beside = 0
        while too_slow < STALLED or not all(answer.done() for answer in answers):
            await good.say(GET)
            assert (await good.answer())[2] == b"hello"
            beside += not any(answer.done() for answer in answers)
            for visitor in tricklers:
                trickle(visitor)
        assert beside > 0
        assert held_bytes <= PIECE_BYTES + len(b"10000\r\n\r\n")
        assert {(await answer)[0] for answer in answers} == {408}


def trickle(visitor: Visitor) -> None:
    if not visitor.writer.is_closing():
        visitor.writer.write(b"a")
