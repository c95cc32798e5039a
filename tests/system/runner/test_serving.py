"""Serving through the parts of a node: what is refused, what an answer carries, and that nothing is held when it is over."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any  # fields are JSON

import msgspec
import pytest
from aiohttp import web

from runner import errors
from runner.engines.port import CHAT, CONTINUATIONS, EMBEDDINGS, MESSAGES, RESPONSES, Capabilities
from runner.errors import (
    EngineUnavailable,
    RemoteNotAllowed,
)
from runner.parts import Parts
from runner.pool.models import ModelState
from runner.serving.request import Answer, Inference
from tests.fakes.engine import FakeEngine
from tests.fakes.engines.scripted_server import Handler, ScriptedEngine, run_engine
from tests.fakes.runners.parts import Bench, assembled, find
from tests.fakes.waiting import eventually

WORD = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":6,"total_tokens":11,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with run_engine() as made:
        yield made


@pytest.fixture
async def parts(tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[Parts]:
    """A node in front of the engine, one request at a time, that has files of the models ``a`` and ``b`` too."""
    async with assembled(tmp_path, "--backend", engine.url, "--max-concurrent", "1") as made:
        await eventually(lambda: made.pool.registry.ready_ids() == ["alpha", "beta"], "the server's models are known")
        yield made


def ask(model: str = "alpha", *, path: str = CHAT, tenant: str = "t1", **fields: object) -> Inference:
    body = json.dumps({"model": model, "messages": [], **fields}).encode()
    headers = {"content-type": "application/json"}
    return Inference("POST", path, headers, body, model, tenant, is_streaming=bool(fields.get("stream")))


async def read(answer: Answer) -> bytes:
    if answer.body is not None:
        return answer.body
    assert answer.chunks is not None
    return b"".join([chunk async for chunk in answer.chunks])


async def serve(parts: Parts, request: Inference) -> bytes:
    async with parts.serving.open(request) as answer:
        return await read(answer)


def is_idle(parts: Parts) -> bool:
    """Whether nothing is held: no slot, no replica, no place in a queue."""
    models = parts.pool.registry.models
    return (
        parts.serving.load == 0
        and parts.budget.depth == 0
        and not any(model.active or model.queue.active or model.queue.depth for model in models)
    )


def streamed(*pieces: bytes, then: asyncio.Event | None = None, breaks: bool = False) -> Handler:
    """Return a handler that answers with these events, then waits, ends or breaks off."""

    async def handle(request: web.Request, _body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if then is not None:
            await then.wait()
        if breaks:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handle


async def test_a_long_answer_passes_without_being_held(parts: Parts, engine: ScriptedEngine) -> None:
    block, written = bytes(1024 * 1024), 0

    async def pour(request: web.Request, _body: bytes) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse(headers={"Content-Type": request.query["as"]})
        if request.query["as"] != "application/json":
            response.content_length = 64 * len(block)
        await response.prepare(request)
        written = 0
        while written < 64:
            await response.write(block)
            written += 1
        return response

    engine.handler = pour
    for kind in ("application/octet-stream", "application/json"):
        async with parts.serving.open(ask(path=f"/v1/audio/speech?as={kind}")) as answer:
            assert answer.chunks is not None
            assert (answer.body, "x-queue-wait-ms" in answer.headers) == (None, True)
            await anext(answer.chunks)
            assert written < 64
            rest = sum([len(chunk) async for chunk in answer.chunks])
        assert 0 < 64 * len(block) - rest <= 9 * len(block)
    assert is_idle(parts)


async def test_a_stream_ends_with_its_numbers_on_the_boxs_own_port_only(parts: Parts, engine: ScriptedEngine) -> None:
    engine.handler = streamed(WORD + USAGE, DONE)
    asked = ask(stream=True, stream_options={"include_usage": True})
    words, usage, comment, done, end = (await serve(parts, asked)).split(b"\n\n")
    assert (words + b"\n\n", done + b"\n\n", end) == (WORD, DONE, b"")
    muster = json.loads(usage.removeprefix(b"data: "))["muster"]
    assert (muster["cache_tokens_reused"], set(muster)) == (4, {"queue_wait_ms", "gpu_time_ms", "cache_tokens_reused"})
    assert comment.startswith(b": x-cache-hit=true; x-cache-tokens-reused=4; ")
    unasked = await serve(parts, ask(stream=True))
    assert b"usage" not in unasked
    assert unasked.startswith(WORD + b": x-cache-hit=true")
    async with parts.serving.open(replace(asked, on_socket=True)) as answer:
        assert await read(answer) == WORD + USAGE + DONE
        assert answer.usage is not None
        assert answer.numbers.cached_tokens == 4


@pytest.mark.parametrize("moment", ["before", "in the stream", "in the body", "behind its closing event"])
async def test_an_engine_that_breaks_off_is_an_error(parts: Parts, engine: ScriptedEngine, moment: str) -> None:
    async def cut(request: web.Request, _body: bytes) -> web.StreamResponse:
        assert request.transport is not None
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = 1000
        if moment == "in the body":
            await response.prepare(request)
            await response.write(b'{"choices"')
        request.transport.abort()
        return response

    is_whole, seen = moment == "behind its closing event", list[bytes]()
    told = streamed(WORD, *([DONE] if is_whole else []), breaks=True)
    engine.handler = cut if moment in {"before", "in the body"} else told

    async def client() -> None:
        async with parts.serving.open(ask(stream=moment != "in the body")) as answer:
            assert answer.chunks is not None
            async for chunk in answer.chunks:
                seen.append(chunk)  # what came before it broke off is to be seen

    if is_whole:
        await client()
        assert (seen[0].startswith(WORD), b"".join(seen).endswith(DONE), b"".join(seen).count(DONE)) == (True, True, 1)
    else:
        with pytest.raises(errors.EngineUnavailable) as refused:
            await client()
        assert b"".join(seen) == (WORD if moment == "in the stream" else b"")
        asked_again = (refused.value.status, refused.value.retryable, refused.value.retry_after_s)
        assert moment != "before" or asked_again == (502, True, 2)
    assert (is_idle(parts), parts.counters.requests.get(("alpha", "t1", "error"), 0)) == (True, not is_whole)


@pytest.mark.parametrize(
    ("status", "message", "counted"),
    [
        (400, "temperature must be at least 0", "refused"), (422, "max_tokens", "refused"), (401, "wrong key", "error"),
        (404, "no such model", "error"), (429, "slow down", "error"), (500, "CUDA out of memory", "error"),
        (500, "image input is not supported - hint: you may need to provide the mmproj", "refused"),
    ],
)  # fmt: skip
async def test_what_an_engine_refuses_is_logged_once_and_counted_by_whose_fault_it_is(
    parts: Parts, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture, status: int, message: str, counted: str
) -> None:
    prompt = "the merger with Initech closes on the first of March"

    async def fail(_request: web.Request, _body: bytes) -> web.StreamResponse:
        error = {"message": f"{message}: {prompt}", "code": status}
        return web.json_response({"error": error}, status=status, headers={"Retry-After": "7"})

    engine.handler = fail
    request = replace(ask(messages=[{"role": "user", "content": prompt}]), request_id="req_1")
    if (status, counted) == (500, "refused"):
        with pytest.raises(errors.ModalityUnsupported, match=prompt) as refused:
            await serve(parts, request)
        assert (refused.value.status, refused.value.retryable) == (400, False)
    else:
        async with parts.serving.open(request) as answer:
            assert (answer.status, answer.headers["retry-after"]) == (status, "7")
            assert prompt.encode() in await read(answer)
    assert parts.counters.requests["alpha", "t1", counted] == 1
    (line,) = [record.getMessage() for record in caplog.records if "engine answered with an error" in record.getMessage()]
    assert f"request=req_1 model=alpha path={CHAT} status={status} error={message}" in line
    assert prompt not in caplog.text
    assert (is_idle(parts), parts.pool.registry.ready_ids()) == (True, ["alpha", "beta"])


async def test_what_an_engine_says_stays_out_of_the_log_of_a_box_that_is_told_so(
    tmp_path: Path, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_request: web.Request, _body: bytes) -> web.StreamResponse:
        return web.Response(text="CUDA out of memory", status=500)

    async with assembled(tmp_path, "--backend", engine.url, MUSTER_KEEP_ENGINE_ERRORS="false") as parts:
        await eventually(lambda: parts.pool.registry.ready_ids() == ["alpha", "beta"], "the server's models are known")
        engine.handler = fail
        assert await serve(parts, ask()) == b"CUDA out of memory"
    assert "status=500 error=-" in caplog.text
    assert "CUDA" not in caplog.text


async def test_every_state_of_a_model_is_refused_with_its_own_code(parts: Parts) -> None:
    bench = Bench(parts)

    async def refused(model_id: str = "a", *, path: str = CHAT) -> errors.RequestRefused:
        with pytest.raises(errors.RequestRefused) as caught:
            await serve(parts, ask(model_id, path=path))
        assert is_idle(parts)
        return caught.value

    assert isinstance(await refused(), errors.ModelNotLoaded)
    assert isinstance(await refused("nobody"), errors.UnknownModel)
    assert isinstance(await refused("alpha", path="/v2/chat"), errors.InvalidRequest)
    bench.prepare = lambda made: made.may_load.clear()
    loading = bench.start(await bench.order("a"))
    error = await refused()
    assert isinstance(error, errors.ModelLoading)
    assert error.retry_after_s is not None
    await eventually(lambda: bench.engines, "the engine is started")
    bench.engines[0].fails = errors.EngineError("out of memory")
    bench.engines[0].may_load.set()
    await asyncio.gather(loading, return_exceptions=True)
    error = await refused()
    assert isinstance(error, errors.ModelFailed)
    assert "out of memory" in error.message
    bench.prepare = lambda _made: None
    model = await bench.load("a")
    assert isinstance(await refused(path=EMBEDDINGS), errors.ModalityUnsupported)
    bench.engines[1].may_unload.clear()
    unload = asyncio.create_task(bench.unloader.unload("a"))
    await eventually(lambda: model.state is ModelState.UNLOADING, "it is on its way out")
    assert isinstance(await refused(), errors.ModelUnloading)
    bench.engines[1].may_unload.set()
    await unload
    parts.refuse_new()
    assert isinstance(await refused("alpha"), errors.Unavailable)


async def test_a_model_that_is_no_longer_listed_takes_no_request_of_another_with_it(
    parts: Parts, engine: ScriptedEngine
) -> None:
    may_end = asyncio.Event()
    engine.handler = streamed(WORD, DONE, then=may_end)
    running = asyncio.create_task(serve(parts, ask("beta", stream=True)))
    await eventually(lambda: len(engine.seen) == 1, "one runs")
    waiting = {name: asyncio.create_task(serve(parts, ask(name, stream=True, tenant=name))) for name in ("alpha", "beta")}
    await eventually(lambda: find(parts, "beta").queue.depth == 2, "two wait")
    engine.models = ["beta"]
    parts.refresh_attached()
    await eventually(lambda: parts.pool.registry.ready_ids() == ["beta"], "alpha is withdrawn")
    may_end.set()
    assert WORD in await running
    assert WORD in await waiting["beta"]
    with pytest.raises(errors.ModelNotLoaded):
        await waiting["alpha"]
    assert is_idle(parts)


async def test_models_of_somebody_elses_server_are_not_loaded_nor_unloaded_here(parts: Parts, engine: ScriptedEngine) -> None:
    pool = parts.pool
    for force in (False, True):
        with pytest.raises(errors.WrongState, match="--backend"):
            await pool.unloader.unload("alpha", force=force)
    with pytest.raises(errors.WrongState, match="--backend"):
        await pool.loader.order("alpha", overrides={})
    with pytest.raises(errors.WrongState, match="--backend"):
        await pool.loader.order("a", overrides={}, evict="alpha")
    assert (pool.registry.ready_ids(), find(parts, "a").state) == (["alpha", "beta"], ModelState.UNLOADED)
    # It is still followed.
    engine.models = ["gamma"]
    parts.refresh_attached()
    await eventually(lambda: pool.registry.ready_ids() == ["gamma"], "the change is seen")
    model = await Bench(parts).load("a")
    queue, engine.models = model.queue, ["delta", "a"]
    parts.refresh_attached()
    await eventually(lambda: pool.registry.ready_ids() == ["a", "delta"], "gamma is withdrawn")
    assert (model.queue, model.definition.backend, len(model.replicas)) == (queue, "gguf", 1), "one loaded here stays ours"


async def test_an_answer_that_began_elsewhere_is_asked_for_as_its_engine_wants_it(parts: Parts, engine: ScriptedEngine) -> None:
    bodies: list[Any] = []

    async def handle(request: web.Request, body: bytes) -> web.StreamResponse:
        bodies.append(json.loads(body))
        return await streamed(WORD, DONE)(request, body)

    engine.handler = handle
    request = ask(path=CONTINUATIONS, stream=True, chat_template_kwargs={"a": 1}, seed=1.0)
    with pytest.raises(errors.ModalityUnsupported, match="cannot go on"):
        await serve(parts, request)
    made = find(parts, "alpha").replicas[0].supervisor.engine
    wish = {"continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}}
    made.capabilities = Capabilities((CHAT,), continuation=wish)  # type: ignore[misc]  # of the attached server
    assert WORD in await serve(parts, request)
    (body,) = bodies
    assert body["continue_final_message"] is True
    assert body["chat_template_kwargs"] == {"a": 1, "enable_thinking": False}
    with pytest.raises(errors.InvalidRequest):
        await serve(parts, replace(request, body=b"[]"))
    assert is_idle(parts)


async def test_the_head_of_a_stream_says_where_nothing_is_reused(parts: Parts, engine: ScriptedEngine) -> None:
    engine.handler = streamed(WORD, DONE)
    isolating = Capabilities((CHAT,), prefix_caching=True, isolates_tenants=True)
    cases: list[tuple[Capabilities, Any, bool]] = [
        (Capabilities((CHAT,), keeps_nothing=True), "auto", True), (isolating, "none", True), (isolating, "auto", False),
        (Capabilities((CHAT,)), "none", False), (Capabilities((CHAT,), is_remote=True), "auto", False),
    ]  # fmt: skip
    for capabilities, cache_mode, is_told in cases:
        find(parts, "alpha").replicas[0].supervisor.engine.capabilities = capabilities  # type: ignore[misc]  # of the attached server
        request = replace(ask(stream=True), cache_mode=cache_mode, allow_remote=True)
        async with parts.serving.open(request) as answer:
            told = {name: value for name, value in answer.headers.items() if name.startswith("x-cache-")}
            assert told == ({"x-cache-hit": "false", "x-cache-tokens-reused": "0"} if is_told else {})
            assert b": x-cache-hit=false; x-cache-tokens-reused=0;" in await read(answer)


async def test_chunks_are_put_right_where_the_owner_says_so(parts: Parts, engine: ScriptedEngine) -> None:
    model = find(parts, "alpha")
    engine.handler = streamed(WORD, DONE)
    for tidy, on_socket in itertools.product((True, False, None), (False, True)):
        model.definition = msgspec.structs.replace(model.definition, tidy=tidy)
        out = await serve(parts, replace(ask(stream=True), on_socket=on_socket))
        assert (not out.startswith(WORD), b'"role":"assistant"' in out, out.endswith(DONE)) == (bool(tidy), bool(tidy), True)


async def test_a_node_refuses_a_format_that_its_engines_messages_would_forget(parts: Parts) -> None:
    def be_llama(made: FakeEngine) -> None:
        made.name = "llamacpp"
        made.capabilities = Capabilities((CHAT, MESSAGES))

    bench = Bench(parts)
    bench.prepare = be_llama
    await bench.load("a")
    wanted = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    request = ask("a", path=MESSAGES, max_tokens=5, output_config=wanted)
    with pytest.raises(errors.InvalidRequest, match="through a gateway") as caught:
        await serve(parts, request)
    assert caught.value.param == "output_config.format"
    assert bench.engines[0].calls == []
    with pytest.raises(errors.EngineUnavailable):  # a gateway knows what it sends
        await serve(parts, replace(request, on_socket=True))
    assert is_idle(parts)


async def test_a_pool_stream_that_is_answered_whole_gets_four_events(parts: Parts, engine: ScriptedEngine) -> None:
    async def answer_whole(_request: web.Request, body: bytes) -> web.StreamResponse:
        assert json.loads(body)["stream"] is True
        choice = {"index": 0, "message": {"role": "assistant", "content": "Het regende."}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 6}})

    engine.handler = answer_whole
    body = json.dumps({"model": "alpha", "input": "It rained.", "stream": True}).encode()
    request = Inference("POST", RESPONSES, {"content-type": "application/json"}, body, "alpha", "t1", is_streaming=True)
    async with parts.serving.open(request) as answer:
        assert (answer.status, answer.is_event_stream) == (200, True)
        events = [json.loads(line[6:]) for line in (await read(answer)).decode().splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == [
        "response.created", "response.output_text.delta", "response.metrics", "response.completed",
    ]  # fmt: skip
    assert events[1]["delta"] == events[3]["response"]["output_text"] == "Het regende."
    assert len({event.get("id") or event["response"]["id"] for event in events}) == 1
    assert events[2]["metrics"]["engine_output_tokens"] == 6


async def test_a_remote_model_is_asked_only_by_who_allows_it(parts: Parts) -> None:
    def be_remote(made: FakeEngine) -> None:
        made.capabilities = Capabilities((CHAT,), is_remote=True)

    bench = Bench(parts)
    bench.prepare = be_remote
    await bench.load("a")
    with pytest.raises(RemoteNotAllowed):
        await serve(parts, ask("a"))
    with pytest.raises(EngineUnavailable):
        await serve(parts, replace(ask("a"), allow_remote=True))
    assert is_idle(parts)
