"""The real llama.cpp: loads and unloads, who reuses whose prompt, what a flush leaves, what runs on without its client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio

from runner.config import TINY_MODEL_PATH
from runner.definitions.plan import Progress
from runner.engines.child import gpu_environment
from runner.engines.llamacpp import LlamaCpp, child_settings, weight_files
from runner.engines.llamacpp_log import LoadLog
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
    Health,
)
from runner.errors import EngineError
from tests.fakes.engines.llamacpp import ENDLESS, QUESTION, tiny_plan
from tests.fakes.engines.suite import (
    EngineUnderTest,
    ask,
    assert_freed_by_leaving,
    assert_gone,
    assert_health,
    chat_call,
    first_bytes,
    process_tree,
)
from tests.fakes.limits import set_runner_limits
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.timeout(300)


@pytest_asyncio.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture(autouse=True)
def patience() -> None:
    """Have time for what a child still has to say: on a busy machine the usual seconds pass too soon."""
    set_runner_limits(engines={"last_words_s": 30.0, "llama_log_s": 30.0})


def ignore(_progress: Progress) -> None:
    """Take progress that is of no interest."""


def our_children() -> list[psutil.Process]:
    """The engine processes of this test's own that still run."""
    return [child for child in psutil.Process().children() if "runner.engines" in " ".join(_words_of(child))]


def _words_of(process: psutil.Process) -> list[str]:
    """The command line; nothing for a process that has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # its subclass ZombieProcess too
        return []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "failed to read magic"),
        (b"this is no model " * 100, "invalid magic"),
        (TINY_MODEL_PATH.read_bytes()[:100], "failed to read key-value pairs"),
        (TINY_MODEL_PATH.read_bytes()[:600_000], "data is not within the file bounds, model is corrupted or incomplete"),
    ],
    ids=["empty", "something else", "cut in its header", "cut in its weights"],
)
async def test_a_file_that_is_no_whole_model_fails_with_the_reason(
    tmp_path: Path, client: aiohttp.ClientSession, content: bytes, words: str
) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    engine = LlamaCpp(tiny_plan(path), client)
    with pytest.raises(EngineError) as caught:
        await engine.load(ignore)
    assert str(caught.value).startswith("broken.gguf could not be loaded: ")
    assert words in str(caught.value)
    assert engine.pids == ()
    assert our_children() == []


async def test_a_file_that_is_not_there_fails_with_the_reason(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    engine = LlamaCpp(tiny_plan(tmp_path / "gone.gguf"), client)
    with pytest.raises(EngineError, match=r"gone\.gguf could not be loaded: .*No such file"):
        await engine.load(ignore)
    with pytest.raises(EngineError, match="give its path in the settings"):
        await LlamaCpp(dataclasses.replace(tiny_plan(), path=None), client).load(ignore)


def endless_model(folder: Path) -> Path:
    """Return a model whose first part is never there for who opens it, as on a disk that is slow beyond measure."""
    first, second = (folder / f"slow-0000{number}-of-00002.gguf" for number in (1, 2))
    os.mkfifo(first)
    second.touch()
    os.truncate(second, 1 << 30)  # of holes: only its size counts
    return first


async def begin_endless_load(engine: LlamaCpp, *, shares: int) -> tuple[asyncio.Task[None], list[float]]:
    """Return a load that goes on for as long as it is let, and what it has told so far of the share that was read."""
    told: list[float] = []

    def note(progress: Progress) -> None:
        if progress.stage == "reading weights" and progress.fraction is not None:
            told.append(progress.fraction)

    loading = asyncio.create_task(engine.load(note))
    await eventually(lambda: len(told) >= shares or loading.done(), "the child reads")
    return loading, told


async def test_a_child_killed_half_way_is_an_error_and_the_next_load_works(
    tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    path = endless_model(tmp_path)
    engine = LlamaCpp(tiny_plan(path), client)
    loading, _ = await begin_endless_load(engine, shares=1)
    os.kill(engine.pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match=r"slow-00001-of-00002\.gguf could not be loaded: "):
        await asyncio.wait_for(loading, 30)
    assert engine.pids == ()
    assert our_children() == []
    path.unlink()
    shutil.copyfile(TINY_MODEL_PATH, path)
    try:
        await engine.load(ignore)
        await assert_health(engine, Health.OK)
    finally:
        await engine.unload(gently=True)


async def test_a_load_tells_its_stages(client: aiohttp.ClientSession) -> None:
    engine = LlamaCpp(tiny_plan(), client)
    reported: list[Progress] = []
    try:
        await engine.load(reported.append)
    finally:
        await engine.unload(gently=True)
    stages = [stage for stage, _ in itertools.groupby(reported, key=lambda progress: progress.stage)]
    assert stages == ["starting the engine process", "reading weights", "warming up"]


async def test_what_the_log_says_of_a_load_is_heard_although_it_comes_after_the_answer(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaCpp, "child_module", "tests.fakes.engines.programs.late_log_child")
    engine = LlamaCpp(tiny_plan(), client)
    reported: list[Progress] = []
    try:
        await engine.load(reported.append)
        assert (await engine.stats()).kv_bytes == 4 * 1024 * 1024
    finally:
        await engine.unload(gently=False)
    assert reported[-1].stage == "warming up"


async def test_a_load_that_is_cancelled_when_its_child_already_serves_leaves_no_process(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaCpp, "child_module", "tests.fakes.engines.programs.late_log_child")
    set_runner_limits(engines={"llama_log_s": 3600.0})
    monkeypatch.setattr(LoadLog, "read", lambda _log, _line: None)
    engine = LlamaCpp(tiny_plan(), client)
    loading = asyncio.create_task(engine.load(ignore))
    await eventually(lambda: engine._server.base_url, "the child serves")
    processes = process_tree(engine.pids)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert engine.pids == ()
    await assert_gone(processes)


async def test_a_child_that_reads_for_long_is_seen_reading(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    """The share of the files that is in its memory is reported meanwhile."""
    loading, shares = await begin_endless_load(LlamaCpp(tiny_plan(endless_model(tmp_path)), client), shares=4)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert all(0.0 <= share <= 0.99 for share in shares)
    assert max(shares) > 0.0, "the child itself begins with 0, which may come last"


async def test_a_context_of_no_given_length_is_the_models_own_where_that_is_short(client: aiohttp.ClientSession) -> None:
    engine = LlamaCpp(tiny_plan(slots=2, context_tokens=None), client)
    try:
        await engine.load(ignore)
        assert (await engine.stats()).kv_total_tokens == 2 * 2048
    finally:
        await engine.unload(gently=True)


async def test_many_loads_and_unloads_leave_no_process_and_no_file_handle(client: aiohttp.ClientSession) -> None:
    set_runner_limits(engines={"stop_s": 3600.0})  # so that a deadlock of the engine's own is not ended by force
    engine = LlamaCpp(tiny_plan(slots=1), client)
    handles = 0
    for number in range(12):
        await engine.load(ignore)
        processes = process_tree(engine.pids)
        if number % 2:
            await ask(engine, chat_call("tiny", QUESTION, max_tokens=2))
        await asyncio.wait_for(engine.unload(gently=True), 30)
        await assert_gone(processes)
        if number == 1:
            handles = psutil.Process().num_fds()
    # Of a process that has ended, the pipes are closed in a later turn of the loop.
    await eventually(lambda: psutil.Process().num_fds() <= handles, "no file handle is left")


async def test_a_flush_of_what_is_not_loaded_finds_nothing(client: aiohttp.ClientSession) -> None:
    outcome = await LlamaCpp(tiny_plan(), client).flush(FlushRequest(FlushScope.ALL))
    assert (outcome.result, outcome.entries_removed) == (FlushResult.FLUSHED, 0)


async def test_the_child_sees_the_gpus_of_its_plan_alone_and_none_of_our_secrets(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_TOKEN", "secret")
    engine = LlamaCpp(dataclasses.replace(tiny_plan(), gpu_ids=(1, 3)), client)
    try:
        await engine.load(ignore)
        seen = psutil.Process(engine.pids[0]).environ()
    finally:
        await engine.unload(gently=True)
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["CUDA_DEVICE_ORDER"]) == ("1,3", "PCI_BUS_ID")
    assert "MUSTER_TOKEN" not in seen
    assert gpu_environment(()) == {}


async def test_options_of_the_plan_reach_the_engine() -> None:
    options: dict[str, object] = {
        "gguf_n_gpu_layers": 7, "gguf_flash_attn": "off", "gguf_type_k": "q8_0", "gguf_type_v": "f32", "gguf_embedding": True,
    }  # fmt: skip
    settings = child_settings(tiny_plan(options=options), TINY_MODEL_PATH, "key")
    told = {name: settings[name] for name in ("gpu_layers", "flash_attn", "type_k", "type_v", "embedding")}
    assert told == {"gpu_layers": 7, "flash_attn": "off", "type_k": "q8_0", "type_v": "f32", "embedding": True}


async def test_a_combination_the_engine_refuses_is_told_in_its_words(client: aiohttp.ClientSession) -> None:
    options: dict[str, object] = {"gguf_flash_attn": "off", "gguf_type_v": "q8_0"}
    engine = LlamaCpp(tiny_plan(options=options), client)
    with pytest.raises(EngineError, match=r"quantized V cache requires flash_attn to be enabled$"):
        await engine.load(ignore)
    assert engine.pids == ()


async def test_all_parts_of_a_split_model_count(tmp_path: Path) -> None:
    parts = [tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in [*parts, tmp_path / "big-00001-of-00003.gguf", tmp_path / "other.gguf"]:
        part.write_bytes(b"x")
    assert weight_files(parts[0]) == parts
    assert weight_files(tmp_path / "other.gguf") == [tmp_path / "other.gguf"]
    assert weight_files(tmp_path / "gone.gguf") == []


THINKER = (
    b"{% for message in messages %}{{ message['content'] }}{% endfor %}"
    b"{% if enable_thinking is defined and not enable_thinking %}{{ ' without any thoughts' }}{% endif %}"
)
"""A template that can be told not to think, no longer than the one in the file that it is put into."""


def write_thinker(path: Path) -> Path:
    content = TINY_MODEL_PATH.read_bytes()
    start = content.index(b"{% for message in messages %}")
    length = int.from_bytes(content[start - 8 : start], "little")
    path.write_bytes(content[:start] + THINKER.ljust(length) + content[start + length :])
    return path


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_thinking_is_as_the_settings_say_in_every_dialect_unless_the_request_does(
    client: aiohttp.ClientSession, tmp_path: Path, path: str
) -> None:
    file = write_thinker(tmp_path / "thinker.gguf")
    call = dataclasses.replace(chat_call("tiny", QUESTION, max_tokens=1), path=path, cache_mode="none")
    asked = dataclasses.replace(chat_call("tiny", QUESTION, max_tokens=1, chat_template_kwargs={"enable_thinking": True}))
    counts: dict[object, int] = {}
    for wanted in (True, False):
        engine = LlamaCpp(tiny_plan(file, options={"enable_thinking": wanted}), client)
        try:
            await engine.load(ignore)
            counts[wanted] = prompt_tokens(await ask(engine, call))
            counts["asked", wanted] = prompt_tokens(await ask(engine, asked))
        finally:
            await engine.unload(gently=False)
    assert counts[True] < counts[False]
    assert counts["asked", True] == counts["asked", False] == counts[True]


def prompt_tokens(body: bytes) -> int:
    usage = json.loads(body)["usage"]
    return int(usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"] + usage["cache_read_input_tokens"])


async def test_a_model_on_the_cpu_gets_no_layers_on_a_gpu_and_sees_none() -> None:
    plan = tiny_plan(options={"device": "cpu"})
    assert child_settings(plan, TINY_MODEL_PATH, "key")["gpu_layers"] == 0
    assert gpu_environment((), is_cpu=True)["CUDA_VISIBLE_DEVICES"] == ""


PROMPT = QUESTION * 3
MESSAGE = [{"role": "user", "content": PROMPT}]
BODIES: dict[str, dict[str, object]] = {
    CHAT: {"messages": MESSAGE, "max_tokens": 4},
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 4},
    RESPONSES: {"model": "tiny", "input": PROMPT, "max_output_tokens": 4},
    MESSAGES: {"model": "tiny", "messages": MESSAGE, "max_tokens": 4},
}


@contextlib.asynccontextmanager
async def serving(*, slots: int = 2, **options: object) -> AsyncIterator[LlamaCpp]:
    """Yield a serving adapter."""
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
    async with serving(slots=slots) as engine:
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
    async with serving(slots=slots) as engine:
        assert await reused(engine, CHAT, "alpha") == 0
        assert await reused(engine, MESSAGES, "beta") == 0
        assert await reused(engine, MESSAGES, "beta") == 0
        for tenant in ("alpha", "beta", "gamma"):
            assert await reused(engine, CHAT, tenant) == 0, tenant


async def test_private_calls_reuse_nothing_and_leave_nothing() -> None:
    async with serving(slots=1) as engine:
        await reused(engine, CHAT, "alpha")
        assert await reused(engine, CHAT, "alpha", mode="none") == 0
        assert await reused(engine, CHAT, "alpha") == 0
        assert await reused(engine, CHAT, "alpha") > 50


async def test_a_client_cannot_choose_its_slot_however_it_spells_the_wish() -> None:
    async with serving(slots=2) as engine:
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
    async with serving(slots=1) as engine:
        await reused(engine, CHAT, "alpha")
        refused = call_to(COMPLETIONS, "beta", prompt="far too long for the context " * 2000)
        async with engine.stream(refused) as response:
            assert response.status == 400
        assert (await held_tokens(engine))[0] > 50
        assert await reused(engine, CHAT, "beta") == 0


async def test_several_answers_to_one_question_leave_nothing_in_the_slots_of_others() -> None:
    async with serving(slots=3) as engine:
        answer = await ask(engine, call_to(CHAT, "alpha", n=2, temperature=1.0))
        assert len(json.loads(answer)["choices"]) == 2
        assert sorted(await held_tokens(engine))[:2] == [0, 0]
        for tenant in ("beta", "gamma", "delta"):
            assert await reused(engine, CHAT, tenant) == 0, tenant


async def test_more_requests_than_slots_wait_for_one_and_stay_apart() -> None:
    async with serving(slots=2) as engine:
        tenants = [f"tenant {number}" for number in range(8)]
        first = await asyncio.gather(*(reused(engine, CHAT, tenant) for tenant in tenants))
        assert first == [0] * 8


async def test_a_request_that_is_given_up_while_it_waits_for_a_slot_holds_nobody_up() -> None:
    async with serving(slots=1) as engine:
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
    async with serving(slots=2) as engine:
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
    async with serving(slots=2) as engine:
        await reused(engine, CHAT, "alpha", tag="night")
        await reused(engine, CHAT, "beta")
        outcome = await engine.flush(request_)
        assert (outcome.result, outcome.entries_removed) == (FlushResult.FLUSHED, 1)
        assert await reused(engine, CHAT, "beta") > 50
        assert await reused(engine, CHAT, "alpha", tag="night") == 0


async def test_an_erased_prompt_does_not_come_back_after_others_ran() -> None:
    """With the engine's host memory cache it would: it is switched off."""
    async with serving(slots=1) as engine:
        await reused(engine, CHAT, "alpha")
        await ask(engine, call_to(COMPLETIONS, "alpha", prompt="Something quite different, to push the former prompt out."))
        await engine.flush(FlushRequest(FlushScope.ALL))
        assert await reused(engine, CHAT, "alpha") == 0


async def test_a_flush_while_a_request_runs_is_refused_and_erases_nothing() -> None:
    async with serving(slots=2) as engine:
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
    async with serving(slots=1) as engine:
        call = call_to(path, "alpha", **ENDLESS)
        call = replace(call, headers={**call.headers, "x-conversation-id": "mine"})

        async def running() -> int:
            slots = await engine._slots.list_slots()
            assert slots is not None
            return sum(slot.is_processing for slot in slots)

        await assert_freed_by_leaving(EngineUnderTest(engine, call, running=running), call)


# ---- the rest ----


async def test_stats_are_the_engines_own_numbers() -> None:
    async with serving(slots=2, gguf_type_k="q8_0", gguf_type_v="q8_0") as small, serving(slots=2) as engine:
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
    async with serving(slots=2, gguf_embedding=True) as engine:
        assert engine.capabilities.endpoints == (EMBEDDINGS, TOKENIZE)
        call = Call("POST", EMBEDDINGS, {"content-type": "application/json"}, b'{"input":["one","another"]}')
        vectors = [entry["embedding"] for entry in json.loads(await ask(engine, call))["data"]]
        assert [len(vector) for vector in vectors] == [128, 128]
        assert vectors[0] != vectors[1]
        assert sum(value * value for value in vectors[0]) == pytest.approx(1.0, abs=1e-3)


async def test_nobody_reaches_the_engine_without_its_key() -> None:
    async with serving() as engine, aiohttp.ClientSession() as client:
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
        async with serving():
            ours = [pair for process in process_tree([os.getpid()]) for pair in process.net_connections("tcp")]
            ports = {str(pair.laddr.port) for pair in ours if pair.status == psutil.CONN_LISTEN}
            scan = [*neighbour, sys.executable, "-c", SCAN, NEAR, *ports]
            reached = await asyncio.to_thread(subprocess.run, scan, capture_output=True, text=True, check=True, timeout=60)
        assert len(ports) >= 2  # the engine's, and one that shows that the neighbour is heard
        assert reached.stdout.split() == [str(open_port.getsockname()[1])]
