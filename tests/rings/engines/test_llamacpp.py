"""llama.cpp, ours and somebody else's: loads, who reuses whose prompt, what a flush leaves, what runs on without its client."""

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
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from runner.config import TINY_MODEL_PATH
from runner.definitions.plan import Progress
from runner.engines import port
from runner.engines.http_engine import HttpEngine
from runner.engines.llama import child_settings, make_llama_server, make_llamacpp, weight_files
from runner.engines.process import gpu_environment
from runner.errors import EngineError
from tests.fakes.engines import suite
from tests.fakes.engines.cases import ENDLESS, QUESTION, slots_of, tiny_plan
from tests.fakes.engines.llama_server import QUESTION as SHORT_QUESTION
from tests.fakes.engines.llama_server import RouterContract, run_router, server_plan
from tests.fakes.engines.suite import (
    EngineUnderTest,
    ask,
    assert_freed_by_leaving,
    assert_goes_on,
    assert_gone,
    assert_health,
    chat_call,
    client_session,
    first_bytes,
    openai_cached_tokens,
    process_tree,
    served,
)
from tests.fakes.limits import set_runner_limits
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with client_session() as session:
        yield session


@pytest.fixture(autouse=True)
def patience() -> None:
    """Have time for what a child still has to say: on a busy machine the usual seconds pass too soon."""
    set_runner_limits(engines={"last_words_s": 30.0, "llama_log_s": 30.0})


def ignore(_progress: Progress) -> None:
    """Take progress that is of no interest."""


# loading


async def test_many_loads_and_unloads_leave_no_process_and_no_file_handle(client: aiohttp.ClientSession) -> None:
    set_runner_limits(engines={"stop_s": 3600.0})  # so that a deadlock of the engine's own is not ended by force
    engine, handles = make_llamacpp(tiny_plan(slots=1), client), 0
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


async def test_the_child_sees_the_gpus_of_its_plan_alone_and_none_of_our_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_TOKEN", "secret")
    async with served(make_llamacpp, replace(tiny_plan(), gpu_ids=(1, 3))) as engine:
        seen = psutil.Process(engine.pids[0]).environ()
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["CUDA_DEVICE_ORDER"]) == ("1,3", "PCI_BUS_ID")
    assert "MUSTER_TOKEN" not in seen
    assert (gpu_environment(()), gpu_environment((), is_cpu=True)["CUDA_VISIBLE_DEVICES"]) == ({}, "")


def test_options_of_the_plan_reach_the_engine_and_all_parts_of_a_split_model_count(tmp_path: Path) -> None:
    options: dict[str, object] = {
        "gguf_n_gpu_layers": 7, "gguf_flash_attn": "off", "gguf_type_k": "q8_0", "gguf_type_v": "f32", "gguf_embedding": True,
    }  # fmt: skip
    settings = child_settings(tiny_plan(options=options), TINY_MODEL_PATH, "key")
    assert (
        settings.items() >= {"gpu_layers": 7, "flash_attn": "off", "type_k": "q8_0", "type_v": "f32", "embedding": True}.items()
    )
    assert child_settings(tiny_plan(options={"device": "cpu"}), TINY_MODEL_PATH, "key")["gpu_layers"] == 0
    parts = [tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in [*parts, tmp_path / "big-00001-of-00003.gguf", tmp_path / "other.gguf"]:
        part.write_bytes(b"x")
    assert weight_files(parts[0]) == parts
    assert weight_files(tmp_path / "other.gguf") == [tmp_path / "other.gguf"]
    assert weight_files(tmp_path / "gone.gguf") == []


# isolation

PROMPT = QUESTION * 3
MESSAGE = [{"role": "user", "content": PROMPT}]
BODIES: dict[str, dict[str, object]] = {
    port.CHAT: {"messages": MESSAGE, "max_tokens": 4},
    port.COMPLETIONS: {"prompt": PROMPT, "max_tokens": 4},
    port.RESPONSES: {"model": "tiny", "input": PROMPT, "max_output_tokens": 4},
    port.MESSAGES: {"model": "tiny", "messages": MESSAGE, "max_tokens": 4},
}


def serving(*, slots: int = 2, **options: object) -> contextlib.AbstractAsyncContextManager[HttpEngine]:
    """Return a serving adapter."""
    return served(make_llamacpp, tiny_plan(slots=slots, options=options))


def call_to(path: str, tenant: str, **fields: object) -> port.Call:
    """Return the same question on any of the endpoints; ``fields`` join the body."""
    body = json.dumps({**BODIES[path], "temperature": 0, **fields}).encode()
    return port.Call("POST", path, {"content-type": "application/json"}, body, tenant=tenant, cache_mode="prefix")


def cached_tokens(body: bytes) -> int:
    """Return the reused prompt tokens of an answer in any of the three dialects."""
    usage = json.loads(body)["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens", 0) or usage.get("cache_read_input_tokens", 0))


async def reused(engine: HttpEngine, path: str, tenant: str, **fields: object) -> int:
    """Ask, and return how many prompt tokens the engine says it reused."""
    return cached_tokens(await ask(engine, call_to(path, tenant, **fields)))


async def held_tokens(engine: HttpEngine) -> list[int]:
    """Return how many tokens each slot holds, from the engine."""
    slots = await slots_of(engine).list_slots()
    assert slots is not None
    return [slot.n_prompt_tokens for slot in slots]


@pytest.mark.parametrize("slots", [1, 2])
async def test_messages_reuse_nothing_and_leave_nothing_to_reuse(slots: int) -> None:
    """The engine takes no slot for them, so they neither look into a slot nor leave one that anybody trusts."""
    async with serving(slots=slots) as engine:
        for path, tenant in (
            (port.CHAT, "alpha"),
            (port.MESSAGES, "beta"),
            (port.MESSAGES, "beta"),
            (port.CHAT, "alpha"),
            (port.CHAT, "beta"),
            (port.CHAT, "c"),
        ):
            assert await reused(engine, path, tenant) == 0, (path, tenant)


async def test_it_goes_on_with_an_answer_that_began_elsewhere() -> None:
    async with served(make_llamacpp, tiny_plan(slots=1)) as engine:
        await assert_goes_on(engine, "Tell me a story.")


async def test_a_client_cannot_choose_its_slot_however_it_spells_the_wish() -> None:
    async with serving(slots=2) as engine:
        for slot in (0, 1):
            await reused(engine, port.CHAT, "alpha")
            assert await reused(engine, port.CHAT, f"beta {slot}", id_slot=slot, cache_prompt=True) == 0
            await reused(engine, port.CHAT, "alpha")
            plain, spelled = call_to(port.CHAT, f"gamma {slot}"), b'{"id\\u005fslot":%d,"\\u0063ache_prompt":true,' % slot
            assert cached_tokens(await ask(engine, replace(plain, body=spelled + plain.body[1:]))) == 0


async def test_a_takeover_that_was_given_up_does_not_hand_the_former_owners_prompt_over() -> None:
    """The newcomer's first request is refused by the engine, so the slot still holds what the former owner left there."""
    async with serving(slots=1) as engine:
        await reused(engine, port.CHAT, "alpha")
        async with engine.stream(call_to(port.COMPLETIONS, "beta", prompt="far too long for the context " * 2000)) as response:
            assert response.status == 400
        assert (await held_tokens(engine))[0] > 50
        assert await reused(engine, port.CHAT, "beta") == 0


async def test_several_answers_to_one_question_leave_nothing_in_the_slots_of_others() -> None:
    async with serving(slots=3) as engine:
        answer = await ask(engine, call_to(port.CHAT, "alpha", n=2, temperature=1.0))
        assert len(json.loads(answer)["choices"]) == 2
        assert sorted(await held_tokens(engine))[:2] == [0, 0]
        assert [await reused(engine, port.CHAT, tenant) for tenant in ("beta", "gamma", "delta")] == [0, 0, 0]


# flush


async def test_an_erased_prompt_does_not_come_back_after_others_ran() -> None:
    """With the engine's host memory cache it would: it is switched off."""
    async with serving(slots=1) as engine:
        await reused(engine, port.CHAT, "alpha")
        await ask(
            engine, call_to(port.COMPLETIONS, "alpha", prompt="Something quite different, to push the former prompt out.")
        )
        await engine.flush(port.FlushRequest(port.FlushScope.ALL))
        assert await reused(engine, port.CHAT, "alpha") == 0


async def test_a_flush_while_a_request_runs_is_refused_and_erases_nothing() -> None:
    async with serving(slots=2) as engine:
        await reused(engine, port.CHAT, "beta")
        async with engine.stream(call_to(port.CHAT, "alpha", **ENDLESS)) as response:
            await first_bytes(response)
            outcome = await engine.flush(port.FlushRequest(port.FlushScope.ALL))
            assert outcome.result is port.FlushResult.REFUSED_BUSY
            assert outcome.detail
            assert (await engine.flush(port.FlushRequest(port.FlushScope.TENANT, tenant="beta"))).entries_removed == 1

        async def is_flushed() -> bool:
            return (await engine.flush(port.FlushRequest(port.FlushScope.ALL))).result is port.FlushResult.FLUSHED

        await eventually(is_flushed, "the engine has let go of a client that has left")


# the rest


@pytest.mark.parametrize("path", [port.CHAT, port.COMPLETIONS])
async def test_a_client_that_leaves_frees_its_slot_within_a_second(path: str) -> None:
    """Also when it asks the engine, by a header of the engine's own, to go on without it."""
    async with serving(slots=1) as engine:
        call = call_to(path, "alpha", **ENDLESS)
        call = replace(call, headers={**call.headers, "x-conversation-id": "mine"})

        async def running() -> int:
            slots = await slots_of(engine).list_slots()
            assert slots is not None
            return sum(slot.is_processing for slot in slots)

        await assert_freed_by_leaving(EngineUnderTest(engine, call, running=running), call)


async def test_stats_are_the_engines_own_numbers() -> None:
    async with serving(slots=2, gguf_type_k="q8_0", gguf_type_v="q8_0") as small, serving(slots=2) as engine:
        await reused(engine, port.CHAT, "alpha")
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.weights_bytes) == (0, 0, 979_456)
        assert (stats.kv_total_tokens, stats.kv_used_tokens) == (2 * 2048, sum(await held_tokens(engine)))
        assert stats.kv_bytes == 4 * 1024 * 1024  # 4 layers, 2 heads of 32, keys and values in f16, 4096 tokens
        assert 0.5 < ((await small.stats()).kv_bytes or 0) / stats.kv_bytes < 0.6  # q8_0 takes 8.5 bits


async def test_an_embedding_model_answers_embeddings_alone() -> None:
    async with serving(slots=2, gguf_embedding=True) as engine:
        assert engine.capabilities.endpoints == (port.EMBEDDINGS, port.TOKENIZE)
        call = port.Call("POST", port.EMBEDDINGS, {"content-type": "application/json"}, b'{"input":["one","another"]}')
        one, another = (entry["embedding"] for entry in json.loads(await ask(engine, call))["data"])
        assert len(one) == len(another) == 128
        assert one != another
        assert sum(value * value for value in one) == pytest.approx(1.0, abs=1e-3)


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
        f"netns add {NAMESPACE}", f"link add {wire}a type veth peer name {wire}b netns {NAMESPACE}",
        f"addr add {NEAR}/30 dev {wire}a", f"link set {wire}a up", f"-n {NAMESPACE} addr add {FAR}/30 dev {wire}b",
        f"-n {NAMESPACE} link set {wire}b up",
    ]  # fmt: skip
    try:
        for words in made:
            said = subprocess.run([ip, *words.split()], capture_output=True, text=True, check=False)
            if said.returncode:
                pytest.skip(f"this system lets root make no network namespace: {said.stderr.strip()}")
        yield [ip, "netns", "exec", NAMESPACE]
    finally:
        subprocess.run([ip, "netns", "del", NAMESPACE], capture_output=True, check=False)


async def test_nobody_reaches_the_engine_without_its_key(client: aiohttp.ClientSession) -> None:
    async with serving() as engine, client.post(engine.server.base_url + port.CHAT, json=BODIES[port.CHAT]) as response:
        assert response.status == 401
        assert not engine.capabilities.function_calling  # the tiny model's template knows no tools


async def test_another_machine_reaches_no_port_of_an_engine(neighbour: list[str]) -> None:
    with socket.create_server(("0.0.0.0", 0)) as open_port:
        async with serving():
            ours = [pair for process in process_tree([os.getpid()]) for pair in process.net_connections("tcp")]
            ports = {str(pair.laddr.port) for pair in ours if pair.status == psutil.CONN_LISTEN}
            scan = [*neighbour, sys.executable, "-c", SCAN, NEAR, *ports]
            reached = await asyncio.to_thread(subprocess.run, scan, capture_output=True, text=True, check=True, timeout=60)
        assert len(ports) >= 2  # the engine's, and one that shows that the neighbour is heard
        assert reached.stdout.split() == [str(open_port.getsockname()[1])]


# a router that is somebody else's


@pytest.fixture
async def router() -> AsyncIterator[RouterContract]:
    async with run_router() as contract:
        yield contract


async def test_a_routers_progress_is_told_and_no_model_is_loaded_twice(
    router: RouterContract, client: aiohttp.ClientSession
) -> None:
    router.models["tiny"].needs_listener = True
    reported: list[Progress] = []
    engine = make_llama_server(server_plan(router.url, "house model", server_model="tiny"), client)
    await engine.load(reported.append)
    assert Progress("text_model", 0.5) in reported
    able = engine.capabilities
    assert (able.function_calling, able.vision_input, able.isolates_tenants, able.version) == (
        True, True, True, "b6000-0123abc",
    )  # fmt: skip
    await make_llama_server(server_plan(router.url), client).load(ignore)
    assert router.told == ["load tiny"]
    await ask(engine, chat_call("house model", SHORT_QUESTION))
    assert (router.bodies[-1]["model"], router.bodies[-1]["id_slot"] in {0, 1}) == ("tiny", True)
    router.models["tiny"].status = "unloaded"
    await assert_health(engine, port.Health.UNREACHABLE)


@pytest.mark.parametrize("wanted", [True, None])
async def test_dialects_that_the_template_is_told_nothing_in_are_left_to_translation(
    router: RouterContract, client: aiohttp.ClientSession, *, wanted: bool | None
) -> None:
    options: dict[str, Any] = {} if wanted is None else {"enable_thinking": wanted}
    engine = make_llama_server(server_plan(router.url, **options), client)
    await engine.load(ignore)
    assert (port.RESPONSES in engine.capabilities.endpoints) is (wanted is None)
    assert port.MESSAGES not in engine.capabilities.endpoints, "its slots are pinned"
    await ask(engine, chat_call("tiny", SHORT_QUESTION))
    assert router.bodies[-1].get("chat_template_kwargs") == (None if wanted is None else {"enable_thinking": wanted})


@pytest.mark.parametrize(
    ("model", "url", "words"),
    [
        ("nothing", None, "does not know nothing; it knows: broken, tiny"),
        ("tiny", "http://127.0.0.1:9", "was not answered"),
        *(("tiny", url, "needs server_url") for url in ("", "localhost:8080", "file:///etc/passwd")),
        ("tiny", None, "unloaded again while it was being loaded"),
    ],
)
async def test_a_router_that_cannot_be_used_is_an_error_that_says_why(
    router: RouterContract, client: aiohttp.ClientSession, model: str, url: str | None, words: str
) -> None:
    router.models["tiny"].evicted = True
    with pytest.raises(EngineError, match=words):
        await asyncio.wait_for(
            make_llama_server(server_plan(router.url if url is None else url, model), client).load(ignore), 30
        )


async def test_an_unload_that_the_router_refuses_is_an_error(router: RouterContract, client: aiohttp.ClientSession) -> None:
    engine = make_llama_server(server_plan(router.url), client)
    await engine.load(ignore)
    router.models["tiny"].refuses_unload = True
    with pytest.raises(EngineError, match="the instance does not react"):
        await engine.unload(gently=True)
    await assert_health(engine, port.Health.OK)
    router.models["tiny"].refuses_unload = False
    await engine.unload(gently=True)
    assert router.models["tiny"].status == "unloaded"


async def test_the_key_comes_from_the_named_variable(
    router: RouterContract, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.key = "sk-secret"
    engine = make_llama_server(server_plan(router.url, server_api_key_env="THE_KEY"), client)
    with pytest.raises(EngineError, match=r"variable THE_KEY \(server_api_key_env\) is empty"):
        await engine.load(ignore)
    monkeypatch.setenv("THE_KEY", "sk-wrong")
    with pytest.raises(EngineError, match=r"refuses the key \(HTTP 401\)") as caught:
        await engine.load(ignore)
    assert "sk-" not in str(caught.value)
    monkeypatch.setenv("THE_KEY", "sk-secret")
    await engine.load(ignore)
    assert await ask(engine, chat_call("tiny", SHORT_QUESTION))


# a real llama.cpp with one model that is somebody else's


@contextlib.asynccontextmanager
async def plain_server(*, cache_ram_mib: int = 0, slot_save_path: str = "/dev/null/", key: str = "") -> AsyncIterator[str]:
    """Yield its address."""
    program = str(Path(suite.__file__).with_name("programs") / "plain_llama_server.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, str(TINY_MODEL_PATH), str(cache_ram_mib), slot_save_path, key,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
    finally:
        process.kill()
        await process.wait()


CHECKS_ON_A_PLAIN_SERVER = (
    suite.check_a_streamed_answer_comes_in_pieces_to_its_end, suite.check_leaving_a_stream_early_frees_the_engine,
    suite.check_a_flush_is_honest_about_what_it_did, suite.check_what_one_tenant_left_is_reused_by_no_other,
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS_ON_A_PLAIN_SERVER, ids=[check.__name__ for check in CHECKS_ON_A_PLAIN_SERVER])
async def test_a_plain_server_keeps_the_promises_of_the_port(check: object, client: aiohttp.ClientSession) -> None:
    assert callable(check)
    async with plain_server() as url:
        subject = EngineUnderTest(
            engine=make_llama_server(server_plan(url), client), call=chat_call("tiny", QUESTION, max_tokens=8),
            streamed=chat_call("tiny", QUESTION, max_tokens=8, stream=True), long=chat_call("tiny", QUESTION, **ENDLESS),
            cached=openai_cached_tokens,
        )  # fmt: skip
        await check(subject)


async def test_a_plain_server_is_not_ours_to_stop_says_its_model_and_its_end_is_noticed(client: aiohttp.ClientSession) -> None:
    async with plain_server() as url:
        with pytest.raises(EngineError, match="serves tiny, not other: set server_model"):
            await make_llama_server(server_plan(url, "other"), client).load(ignore)
        engine = make_llama_server(server_plan(url), client)
        await engine.load(ignore)
        with pytest.raises(EngineError, match="not ours to stop"):
            await engine.unload(gently=True)
        assert await ask(engine, chat_call("tiny", QUESTION, max_tokens=4))
    await assert_health(engine, port.Health.UNREACHABLE)
    assert (await engine.stats()).running is None
    await engine.unload(gently=False)
    async with plain_server(key="sk-plain") as url:
        with pytest.raises(EngineError, match=r"refuses the key \(HTTP 401\)"):
            await make_llama_server(server_plan(url), client).load(ignore)


@pytest.mark.parametrize(
    ("options", "isolates", "words"),
    [({"cache_ram_mib": 256}, False, "--cache-ram 0"), ({"slot_save_path": ""}, True, "--slot-save")],
)
async def test_a_server_that_keeps_more_or_does_not_erase_is_found_out_and_what_it_cannot_do_is_not_promised(
    client: aiohttp.ClientSession, options: dict[str, object], isolates: bool, words: str
) -> None:
    async with plain_server(**options) as url:  # type: ignore[arg-type]  # the options by name
        engine = make_llama_server(server_plan(url), client)
        await engine.load(ignore)
        able, outcome = engine.capabilities, await engine.flush(port.FlushRequest(port.FlushScope.ALL))
        assert (able.isolates_tenants, port.MESSAGES in able.endpoints) == (isolates, not isolates)
        assert (outcome.result, words in outcome.detail) == (port.FlushResult.NOT_SUPPORTED, True)
