"""The real llama.cpp: who reuses whose prompt, what a flush leaves, and what a client that goes leaves running."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import aiohttp
import psutil
import pytest

from runner.engines.llamacpp import LlamaCpp
from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    CacheMode,
    Call,
    FlushRequest,
    FlushResult,
    FlushScope,
)
from tests.fakes.engines.cases_llamacpp import ENDLESS, QUESTION, tiny_plan
from tests.fakes.engines.suite import (
    EngineUnderTest,
    ask,
    assert_freed_by_leaving,
    first_bytes,
    process_tree,
)
from tests.fakes.waiting import eventually

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

PROMPT = QUESTION * 3
MESSAGE = [{"role": "user", "content": PROMPT}]
BODIES: dict[str, dict[str, object]] = {
    CHAT: {"messages": MESSAGE, "max_tokens": 4},
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 4},
    RESPONSES: {"model": "tiny", "input": PROMPT, "max_output_tokens": 4},
    MESSAGES: {"model": "tiny", "messages": MESSAGE, "max_tokens": 4},
}


@contextlib.asynccontextmanager
async def loaded(*, slots: int = 2, **options: object) -> AsyncIterator[LlamaCpp]:
    """Yield a loaded adapter."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
        engine = LlamaCpp(tiny_plan(slots=slots, options=options), client)
        try:
            await engine.load(lambda _progress: None)
            yield engine
        finally:
            await engine.unload(gently=False)


def call_to(path: str, tenant: str, *, tag: str = "", mode: CacheMode = "prefix", **fields: object) -> Call:
    """Return the same question on any of the endpoints; ``fields`` join the body."""
    body = json.dumps({**BODIES[path], "temperature": 0, **fields}).encode()
    return Call("POST", path, {"content-type": "application/json"}, body, tenant=tenant, cache_mode=mode, cache_tag=tag)


def cached_tokens(body: bytes) -> int:
    """Return the reused prompt tokens of an answer in any of the three dialects."""
    usage = json.loads(body)["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens", 0) or usage.get("cache_read_input_tokens", 0))


async def reused(
    engine: LlamaCpp, path: str, tenant: str, *, tag: str = "", mode: CacheMode = "prefix", **fields: object
) -> int:
    """Ask, and return how many prompt tokens the engine says it reused."""
    return cached_tokens(await ask(engine, call_to(path, tenant, tag=tag, mode=mode, **fields)))


async def held_tokens(engine: LlamaCpp) -> list[int]:
    """Return how many tokens each slot holds, from the engine."""
    slots = await engine._slots.list_slots()
    assert slots is not None
    return [slot.n_prompt_tokens for slot in slots]


# ---- isolation ----


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("slots", [1, 2])
async def test_a_tenant_reuses_its_own_prompt_and_no_other_does(path: str, slots: int) -> None:
    async with loaded(slots=slots) as engine:
        assert await reused(engine, path, "alpha") == 0
        assert await reused(engine, path, "alpha") > 50
        for tenant in ("beta", "gamma", "delta"):
            assert await reused(engine, path, tenant) == 0, tenant
        assert await reused(engine, path, "delta") > 50
        assert await reused(engine, path, "delta", tag="night") == 0
        assert await reused(engine, path, "delta", tag="night") > 50


@pytest.mark.parametrize("slots", [1, 2])
async def test_messages_reuse_nothing_and_leave_nothing_to_reuse(slots: int) -> None:
    """The engine takes no slot for them, so they neither look into a slot nor leave one that anybody trusts."""
    async with loaded(slots=slots) as engine:
        assert await reused(engine, CHAT, "alpha") == 0
        assert await reused(engine, MESSAGES, "beta") == 0
        assert await reused(engine, MESSAGES, "beta") == 0
        for tenant in ("alpha", "beta", "gamma"):
            assert await reused(engine, CHAT, tenant) == 0, tenant


async def test_private_calls_reuse_nothing_and_leave_nothing() -> None:
    async with loaded(slots=1) as engine:
        await reused(engine, CHAT, "alpha")
        assert await reused(engine, CHAT, "alpha", mode="none") == 0
        assert await reused(engine, CHAT, "alpha") == 0
        assert await reused(engine, CHAT, "alpha") > 50


async def test_a_client_cannot_choose_its_slot_however_it_spells_the_wish() -> None:
    async with loaded(slots=2) as engine:
        await reused(engine, CHAT, "alpha")
        for slot in (0, 1):
            assert await reused(engine, CHAT, f"beta {slot}", id_slot=slot, cache_prompt=True) == 0
            await reused(engine, CHAT, "alpha")
        plain = call_to(CHAT, "gamma")
        for slot in (0, 1):
            await reused(engine, CHAT, "alpha")
            spelled = b'{"id\\u005fslot":%d,"\\u0063ache_prompt":true,' % slot
            call = replace(plain, tenant=f"gamma {slot}", body=spelled + plain.body[1:])
            assert cached_tokens(await ask(engine, call)) == 0


async def test_a_takeover_that_was_given_up_does_not_hand_the_former_owners_prompt_over() -> None:
    """The newcomer's first request is refused by the engine, so the slot still holds what the former owner left there."""
    async with loaded(slots=1) as engine:
        await reused(engine, CHAT, "alpha")
        refused = call_to(COMPLETIONS, "beta", prompt="far too long for the context " * 2000)
        async with engine.stream(refused) as response:
            assert response.status == 400
        assert (await held_tokens(engine))[0] > 50
        assert await reused(engine, CHAT, "beta") == 0


async def test_several_answers_to_one_question_leave_nothing_in_the_slots_of_others() -> None:
    async with loaded(slots=3) as engine:
        answer = await ask(engine, call_to(CHAT, "alpha", n=2, temperature=1.0))
        assert len(json.loads(answer)["choices"]) == 2
        assert sorted(await held_tokens(engine))[:2] == [0, 0]
        for tenant in ("beta", "gamma", "delta"):
            assert await reused(engine, CHAT, tenant) == 0, tenant


async def test_more_requests_than_slots_wait_for_one_and_stay_apart() -> None:
    async with loaded(slots=2) as engine:
        tenants = [f"tenant {number}" for number in range(8)]
        first = await asyncio.gather(*(reused(engine, CHAT, tenant) for tenant in tenants))
        assert first == [0] * 8


async def test_a_request_that_is_given_up_while_it_waits_for_a_slot_holds_nobody_up() -> None:
    async with loaded(slots=1) as engine:
        async with engine.stream(call_to(CHAT, "alpha", **ENDLESS)) as response:
            await first_bytes(response)
            given_up, waiting = (asyncio.create_task(reused(engine, CHAT, tenant)) for tenant in ("beta", "gamma"))

            await eventually(lambda: len(engine._slots._waiting) == 2)
            given_up.cancel()
            await asyncio.wait({given_up})
        assert await asyncio.wait_for(waiting, 30) == 0


# ---- flush ----


@pytest.mark.parametrize("scope", [FlushScope.ALL, FlushScope.MODEL])
async def test_a_flush_empties_every_slot_and_nothing_of_it_is_reused(scope: FlushScope) -> None:
    async with loaded(slots=2) as engine:
        for tenant in ("alpha", "beta"):
            await reused(engine, CHAT, tenant)
            assert await reused(engine, CHAT, tenant) > 50
        outcome = await engine.flush(FlushRequest(scope))
        assert (outcome.result, outcome.entries_removed) == (FlushResult.FLUSHED, 2)
        assert await held_tokens(engine) == [0, 0]
        assert [await reused(engine, CHAT, tenant) for tenant in ("alpha", "beta")] == [0, 0]


@pytest.mark.parametrize(
    "request_",
    [FlushRequest(FlushScope.TENANT, tenant="alpha"), FlushRequest(FlushScope.TAG, tag="night", tenant="alpha")],
)
async def test_a_flush_of_one_tenant_or_tag_leaves_the_others(request_: FlushRequest) -> None:
    async with loaded(slots=2) as engine:
        await reused(engine, CHAT, "alpha", tag="night")
        await reused(engine, CHAT, "beta")
        outcome = await engine.flush(request_)
        assert (outcome.result, outcome.entries_removed) == (FlushResult.FLUSHED, 1)
        assert await reused(engine, CHAT, "beta") > 50
        assert await reused(engine, CHAT, "alpha", tag="night") == 0


async def test_an_erased_prompt_does_not_come_back_after_others_ran() -> None:
    """With the engine's host memory cache it would: it is switched off."""
    async with loaded(slots=1) as engine:
        await reused(engine, CHAT, "alpha")
        await ask(engine, call_to(COMPLETIONS, "alpha", prompt="Something quite different, to push the former prompt out."))
        await engine.flush(FlushRequest(FlushScope.ALL))
        assert await reused(engine, CHAT, "alpha") == 0


async def test_a_flush_while_a_request_runs_is_refused_and_erases_nothing() -> None:
    async with loaded(slots=2) as engine:
        await reused(engine, CHAT, "beta")
        async with engine.stream(call_to(CHAT, "alpha", **ENDLESS)) as response:
            await first_bytes(response)
            outcome = await engine.flush(FlushRequest(FlushScope.ALL))
            assert outcome.result is FlushResult.REFUSED_BUSY
            assert outcome.detail
            assert (await engine.flush(FlushRequest(FlushScope.TENANT, tenant="beta"))).entries_removed == 1

        async def is_flushed() -> bool:
            return (await engine.flush(FlushRequest(FlushScope.ALL))).result is FlushResult.FLUSHED

        await eventually(is_flushed, "the engine has let go of a client that has left")


# ---- clients that leave ----


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_client_that_leaves_frees_its_slot_within_a_second(path: str) -> None:
    """Also when it asks the engine, by a header of the engine's own, to go on without it."""
    async with loaded(slots=1) as engine:
        call = call_to(path, "alpha", **ENDLESS)
        call = replace(call, headers={**call.headers, "x-conversation-id": "mine"})

        async def running() -> int:
            slots = await engine._slots.list_slots()
            assert slots is not None
            return sum(slot.is_processing for slot in slots)

        await assert_freed_by_leaving(EngineUnderTest(engine, call, running=running), call)


# ---- the rest ----


async def test_stats_are_the_engines_own_numbers() -> None:
    async with loaded(slots=2, gguf_type_k="q8_0", gguf_type_v="q8_0") as small, loaded(slots=2) as engine:
        await reused(engine, CHAT, "alpha")
        hit = await reused(engine, CHAT, "alpha")
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert (stats.kv_total_tokens, stats.kv_used_tokens) == (2 * 2048, sum(await held_tokens(engine)))
        assert stats.cache_hit_tokens == hit
        assert stats.cache_queried_tokens is not None
        assert stats.cache_queried_tokens > 2 * hit
        assert stats.kv_bytes == 4 * 1024 * 1024  # 4 layers, 2 heads of 32, keys and values in f16, 4096 tokens
        assert stats.weights_bytes == 979_456
        compact = (await small.stats()).kv_bytes
        assert compact is not None
        assert 0.5 < compact / stats.kv_bytes < 0.6  # q8_0 takes 8.5 bits


async def test_an_embedding_model_answers_embeddings_alone() -> None:
    async with loaded(slots=2, gguf_embedding=True) as engine:
        assert engine.capabilities.endpoints == (EMBEDDINGS, TOKENIZE)
        call = Call("POST", EMBEDDINGS, {"content-type": "application/json"}, b'{"input":["one","another"]}')
        vectors = [entry["embedding"] for entry in json.loads(await ask(engine, call))["data"]]
        assert [len(vector) for vector in vectors] == [128, 128]
        assert vectors[0] != vectors[1]
        assert sum(value * value for value in vectors[0]) == pytest.approx(1.0, abs=1e-3)


async def test_nobody_reaches_the_engine_without_its_key() -> None:
    async with loaded() as engine, aiohttp.ClientSession() as client:
        async with client.post(engine._server.base_url + CHAT, json=BODIES[CHAT]) as response:
            assert response.status == 401
        assert not engine.capabilities.function_calling  # the tiny model's template knows no tools


NAMESPACE = f"muster-{os.getpid()}"
NEAR, FAR = "10.213.77.1", "10.213.77.2"
SCAN = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), timeout=5).close()
    except OSError:
        continue
    print(port)
"""


@pytest.fixture
def neighbour() -> Iterator[list[str]]:
    """Yield the beginning of a command that runs on another machine of the network, as far as the network can tell."""
    ip = shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        pytest.skip("only root makes a network namespace, with the program ip")
    wire = f"m{os.getpid()}"
    made = [
        f"netns add {NAMESPACE}",
        f"link add {wire}a type veth peer name {wire}b netns {NAMESPACE}",
        f"addr add {NEAR}/30 dev {wire}a",
        f"link set {wire}a up",
        f"-n {NAMESPACE} addr add {FAR}/30 dev {wire}b",
        f"-n {NAMESPACE} link set {wire}b up",
    ]
    try:
        for words in made:
            said = subprocess.run([ip, *words.split()], capture_output=True, text=True, check=False)
            if said.returncode:
                pytest.skip(f"this system lets root make no network namespace: {said.stderr.strip()}")
        yield [ip, "netns", "exec", NAMESPACE]
    finally:
        subprocess.run([ip, "netns", "del", NAMESPACE], capture_output=True, check=False)


async def test_another_machine_reaches_no_port_of_an_engine(neighbour: list[str]) -> None:
    with socket.create_server(("0.0.0.0", 0)) as open_port:
        async with loaded():
            ours = [pair for process in process_tree([os.getpid()]) for pair in process.net_connections("tcp")]
            ports = {str(pair.laddr.port) for pair in ours if pair.status == psutil.CONN_LISTEN}
            scan = [*neighbour, sys.executable, "-c", SCAN, NEAR, *ports]
            reached = await asyncio.to_thread(subprocess.run, scan, capture_output=True, text=True, check=True, timeout=60)
        assert len(ports) >= 2  # the engine's, and one that shows that the neighbour is heard
        assert reached.stdout.split() == [str(open_port.getsockname()[1])]
