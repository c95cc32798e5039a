"""The vLLM adapter on a real vLLM: one load for the tests that only ask, one more for each that breaks something."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio

from runner.definitions.plan import LoadPlan, Progress
from runner.engines.http_engine import HttpEngine
from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    Call,
    FlushRequest,
    FlushResult,
    FlushScope,
    Health,
)
from runner.engines.vllm import make_vllm
from runner.errors import EngineError, ModalityUnsupported
from tests.fakes.control_process import ROOT
from tests.fakes.engines.cases import folder_of, vllm_of
from tests.fakes.engines.suite import (
    CHECKS,
    EngineCase,
    EngineUnderTest,
    ask,
    assert_goes_on,
    assert_gone,
    chat_call,
    first_bytes,
    openai_cached_tokens,
    process_tree,
    wait_until,
)
from tests.fakes.models.make import hf_model_dir, lora_dir
from tests.fakes.waiting import eventually

MIB = 1024 * 1024
LOAD_LIMIT_S = 300.0
"""Twenty seconds on an idle machine; several times that on two busy cores."""
KV_BYTES = 64 * MIB
QUESTION = "Explain the lambda expression of Python, its syntax, and what people use it for, in a few plain sentences. " * 8
"""More than two cache blocks of 128 tokens."""
ENDLESS: dict[str, object] = {"stream": True, "ignore_eos": True, "max_tokens": 1200}


def tiny_plan(model: Path | None = None, *, slots: int = 2, options: Mapping[str, object] | None = None) -> LoadPlan:
    """Return a plan for the tiny model with a small cache."""
    chosen = {"vllm_kv_cache_memory_bytes": KV_BYTES, **(options or {})}
    return LoadPlan("tiny", "vllm", model or hf_model_dir(), context_tokens=2048, slots=slots, threads=1, options=chosen)


def call(path: str, body: Mapping[str, object]) -> Call:
    """Return a request."""
    return Call("POST", path, {"content-type": "application/json"}, json.dumps(body).encode())


def question(**fields: object) -> Call:
    """Return a chat request with a long prompt."""
    return chat_call("tiny", QUESTION, **fields)


def break_model(folder: Path) -> Path:
    """Return a copy of the model whose weights end half-way."""
    folder.mkdir()
    for file in hf_model_dir().iterdir():
        content = file.read_bytes()
        (folder / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    return folder


@contextlib.asynccontextmanager
async def open_vllm(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    """Yield what the suite of all engines asks for."""
    yield EngineUnderTest(
        engine=make_vllm(tiny_plan(), client),
        call=question(max_tokens=8),
        streamed=question(max_tokens=8, stream=True, ignore_eos=True),
        long=question(**ENDLESS),
        broken=make_vllm(tiny_plan(break_model(folder / "half")), client),
        broken_words="[Ss]afetensor",
        cached=openai_cached_tokens,
        load_s=LOAD_LIMIT_S,
    )


CASE = EngineCase("vllm", open_vllm)


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

SOON = question(max_tokens=4)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[HttpEngine]:
    """A loaded vLLM with one slot and room for adapters."""
    reported: list[Progress] = []
    async with aiohttp.ClientSession() as client:
        found = make_vllm(tiny_plan(slots=1, options={"vllm_max_lora_rank": 8}), client)
        await asyncio.wait_for(found.load(reported.append), LOAD_LIMIT_S)
        fractions = [progress.fraction or 0.0 for progress in reported]
        assert fractions == sorted(fractions)
        assert len(set(fractions)) > 5
        tree, folder = process_tree(found.pids), folder_of(found)
        try:
            yield found
        finally:
            await found.unload(gently=True)
        await assert_gone(tree)
        assert folder is not None
        assert not folder.exists()


async def idle(engine: HttpEngine) -> bool:
    stats = await engine.stats()
    return (stats.running, stats.waiting) == (0, 0)


async def cached(engine: HttpEngine, request: Call) -> int:
    return openai_cached_tokens(await ask(engine, request))


async def test_every_endpoint_it_names_answers(engine: HttpEngine) -> None:
    bodies: dict[str, dict[str, object]] = {
        CHAT: {"messages": [{"role": "user", "content": "Explain lambda."}], "max_tokens": 8},
        COMPLETIONS: {"prompt": "The value of", "max_tokens": 8},
        RESPONSES: {"input": "Explain lambda.", "max_output_tokens": 8},
        MESSAGES: {"messages": [{"role": "user", "content": "Explain lambda."}], "max_tokens": 8},
    }
    assert {*bodies, TOKENIZE} == set(engine.capabilities.endpoints)
    for path, body in bodies.items():
        assert await ask(engine, call(path, {"model": "tiny", **body}))


async def test_it_goes_on_with_an_answer_that_began_elsewhere(engine: HttpEngine) -> None:
    await assert_goes_on(engine, "Tell me a story.")


async def test_a_flush_is_refused_while_a_request_runs_and_then_clears(engine: HttpEngine) -> None:
    mine = replace(SOON, tenant="flushed")
    await ask(engine, mine)
    before = await cached(engine, mine)
    async with engine.stream(question(**ENDLESS)) as response:
        await first_bytes(response)
        refused = await engine.flush(FlushRequest(FlushScope.ALL))
        assert refused.result is FlushResult.REFUSED_BUSY
    assert await wait_until(lambda: idle(engine), 5.0)
    outcome = await engine.flush(FlushRequest(FlushScope.MODEL))
    assert outcome.result is FlushResult.FLUSHED
    assert "256 were reused before and none after" in outcome.detail
    after = await cached(engine, mine)
    assert before > 0
    assert after == 0


async def test_waiting_requests_are_served_by_priority(engine: HttpEngine) -> None:
    order: list[str] = []

    async def finish(request: Call) -> None:
        await ask(engine, request)
        order.append(request.priority)

    async def has_waiting(count: int) -> bool:
        return (await engine.stats()).waiting == count

    # A short question, so that nearly the whole context is left for an answer that outlasts the queueing.
    busy = chat_call("tiny", "Explain lambda.", **{**ENDLESS, "max_tokens": 1950})
    async with engine.stream(busy) as response:
        await first_bytes(response)
        tasks = []
        for count, request in enumerate([replace(SOON, priority="low"), SOON, replace(SOON, priority="high")], 1):
            tasks.append(asyncio.create_task(finish(request)))
            assert await wait_until(lambda count=count: has_waiting(count), 5.0)  # type: ignore[misc]
    await asyncio.gather(*tasks)
    assert order == ["high", "normal", "low"]


async def test_adapters_load_and_unload_while_the_model_serves(engine: HttpEngine) -> None:
    await vllm_of(engine).load_lora("style", lora_dir())
    styled = call(COMPLETIONS, {"model": "style", "prompt": "The value of", "max_tokens": 4})
    assert json.loads(await ask(engine, styled))["model"] == "style"
    with pytest.raises(EngineError, match="already been loaded"):
        await vllm_of(engine).load_lora("style", lora_dir())
    await vllm_of(engine).unload_lora("style")
    with pytest.raises(AssertionError, match="does not exist"):
        await ask(engine, styled)


async def test_a_model_that_embeds_answers_that_alone() -> None:
    async with aiohttp.ClientSession() as client:
        found = make_vllm(tiny_plan(options={"vllm_task": "embed"}), client)
        try:
            await asyncio.wait_for(found.load(lambda _progress: None), LOAD_LIMIT_S)
            # Not single words: on some processors the CPU build dies of an illegal instruction when a text is one token.
            texts = ["The value of the lambda expression is a function.", "A list of the names in the current scope."]
            request = replace(call(EMBEDDINGS, {"model": "tiny", "input": texts}), priority="high")
            vectors = [entry["embedding"] for entry in json.loads(await ask(found, request))["data"]]
            assert len(vectors) == 2
            assert len(vectors[0]) == len(vectors[1]) > 1
            assert vectors[0] != vectors[1]
            with pytest.raises(ModalityUnsupported):
                await ask(found, SOON)
        finally:
            await found.unload(gently=True)


async def test_a_killed_worker_is_seen_and_ends_the_server() -> None:
    async with aiohttp.ClientSession() as client:
        found = make_vllm(tiny_plan(), client)
        try:
            await asyncio.wait_for(found.load(lambda _progress: None), LOAD_LIMIT_S)
            tree = process_tree(found.pids)
            worker = max(tree, key=lambda process: process.create_time())
            assert worker.pid != found.pids[0]
            os.kill(worker.pid, signal.SIGKILL)

            async def is_ill() -> bool:
                return await found.health() is not Health.OK

            assert await wait_until(is_ill, 10.0)
            await asyncio.wait_for(found.wait_gone(), 30.0)
            await assert_gone(tree)
        finally:
            await found.unload(gently=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vllm_kv_cache_memory_bytes": 131_072}, r"No available memory for the cache blocks.*vllm_kv_cache_memory_bytes"),
        ({"vllm_kv_cache_memory_bytes": 1_048_576}, r"KV cache.*vllm_kv_cache_memory_bytes"),
        ({"vllm_kv_cache_dtype": "fp99"}, "fp99"),
    ],
)
async def test_a_setting_that_cannot_work_is_named(options: dict[str, object], words: str) -> None:
    async with aiohttp.ClientSession() as client:
        found = make_vllm(tiny_plan(options=options), client)
        with pytest.raises(EngineError, match=words):
            await asyncio.wait_for(found.load(lambda _progress: None), LOAD_LIMIT_S)
        assert not found.pids


LOADER = """
import asyncio, sys, aiohttp
from runner.engines.vllm import make_vllm
from tests.rings.vllm.test_vllm_real import tiny_plan
async def main():
    async with aiohttp.ClientSession() as client:
        engine = make_vllm(tiny_plan(), client)
        await engine.load(lambda progress: print(progress.fraction, flush=True))
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("fraction", ["0.1", "1.0"])
async def test_a_killed_runner_takes_vllm_along_wherever_a_load_stands(fraction: str) -> None:
    runner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LOADER, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=asyncio.subprocess.PIPE
    )
    assert runner.stdout is not None
    tree: list[psutil.Process] = []
    try:
        async with asyncio.timeout(LOAD_LIMIT_S):
            while (await runner.stdout.readline()).decode().strip() != fraction:
                assert runner.returncode is None
        tree = psutil.Process(runner.pid).children(recursive=True)
        assert len(tree) >= 3
        runner.kill()
        await runner.wait()
        await eventually(lambda: not any(process.is_running() for process in tree), "nothing of vLLM is left", within_s=10)
    finally:
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if runner.returncode is None:
            runner.kill()
            await runner.wait()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", [pytest.param(check, id=check.__name__.removeprefix("check_")) for check in CHECKS])
async def test_vllm_keeps_the_promises_of_the_port(check: object, tmp_path: Path) -> None:
    assert callable(check)
    async with aiohttp.ClientSession() as client, CASE.open(tmp_path, client) as subject:
        try:
            await check(subject)
        finally:
            await subject.engine.unload(gently=False)
