"""``/v1/tokenize`` of a node: the count of a real engine, beside its queue; and what other engines are asked for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from runner import errors
from runner.definitions.fields import ModelDefinition
from runner.definitions.plan import LoadPlan
from runner.definitions.settings import Fairness
from runner.engines.llama import make_llama_server
from runner.engines.port import CHAT, MESSAGES, TOKENIZE, Capabilities
from runner.engines.supervisor import EngineState, Supervisor
from runner.engines.tgi import make_tgi
from runner.engines.vllm import make_vllm
from runner.limits import limits
from runner.parts import Parts
from runner.pool.models import Model, ModelEvent, Replica
from runner.queue import FairQueue, WaitBudget
from runner.report import list_endpoints
from runner.serving.request import Inference
from runner.serving.service import Counting
from tests.fakes.engine import FakeEngine
from tests.fakes.engines.cases import contract_model, contract_plan, contract_python, foreign_plan, foreign_server
from tests.fakes.engines.llama_server import run_router, server_plan
from tests.fakes.engines.scripted_server import run_engine
from tests.fakes.engines.suite import client_session, loaded, served
from tests.fakes.limits import set_runner_limits
from tests.fakes.runners.parts import assembled, find, load
from tests.fakes.waiting import eventually, turns

pytestmark = pytest.mark.timeout(180)

CONTEXT = 1024
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
TALK = [
    {"role": "user", "content": [{"type": "text", "text": "What is a λ? 你好"}]},
    {"role": "assistant", "content": "A function <|end|> without a name."},
    {"role": "user", "content": "And what is it good for?"},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Parts]:
    """A node that serves the tiny model with one slot; its tenant ``poor`` may ask twice an hour."""
    async with assembled(tmp_path_factory.mktemp("box"), TENANT_RATE_LIMIT_poor="2req/hour") as parts:
        await load(parts, "a", gguf_n_ctx=CONTEXT, target_inflight=1)
        yield parts


def ask(path: str = TOKENIZE, *, model: str = "a", tenant: str = "t1", **fields: object) -> Inference:
    body = json.dumps({"model": model, **fields}).encode()
    return Inference("POST", path, {"content-type": "application/json"}, body, model, tenant)


async def answer(parts: Parts, request: Inference) -> dict[str, Any]:
    """Return the JSON of an answer with 200."""
    async with parts.serving.open(request) as found:
        assert found.status == 200
        assert found.body is not None
        assert found.headers["content-type"].startswith("application/json")
        body: dict[str, Any] = json.loads(found.body)
    return body


@pytest.mark.asyncio(loop_scope="module")
class TestTheRealEngine:
    """llama.cpp with the tiny model."""

    async def test_a_prompt_beyond_the_context_and_a_body_of_more_than_a_megabyte_are_counted(self, box: Parts) -> None:
        long = [{"role": "user", "content": "word " * 4 * CONTEXT}]
        counted = await answer(box, ask(messages=long))
        assert counted["count"] > 2 * CONTEXT
        assert await answer(box, ask(messages=long, padding="x" * 1_200_000)) == counted

    async def test_the_owner_is_told_what_the_engines_own_messages_leave_out(self, box: Parts) -> None:
        cases: list[tuple[dict[str, Any], str | None]] = [
            ({"thinking": {"type": "disabled"}, "seed": 7}, "thinking.type, seed"),
            ({}, None),
        ]
        for more, ignored in cases:
            async with box.serving.open(ask(MESSAGES, max_tokens=1, messages=TALK, **more)) as found:
                assert (found.status, found.headers.get("x-muster-ignored")) == (200, ignored)

    async def test_a_prompt_is_counted_while_the_only_slot_generates(self, box: Parts) -> None:
        model, before = find(box, "a"), sum(box.counters.requests.values())
        endless = ask(CHAT, messages=TALK, max_tokens=100_000, ignore_eos=True, stream=True, n_probs=1000)
        async with box.serving.open(endless) as running:
            assert running.chunks is not None
            await anext(running.chunks)
            assert (await answer(box, ask(messages=TALK, tenant="t2")))["count"] > 0
            assert (box.serving.load, model.queue.slots, model.queue.active, model.queue.depth) == (1, 1, 1, 0)
        assert sum(box.counters.requests.values()) == before + 1, "a count is no request"

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            (b"[]", None), (b'{"model":"a"', None), (b'{"model":"a"}', "messages"),
            (b'{"model":"a","messages":null}', "messages"),
            (b'{"model":"a","messages":[],"prompt":"x"}', "messages"), (b'{"model":"a","messages":"hello"}', "messages"),
            (b'{"model":"a","prompt":["x"]}', "prompt"), (b'{"model":"a","messages":[{"role":7}]}', None),
            (b'{"model":"a","prompt":"' + b"x" * limits().serving.count_bytes + b'"}', None),
        ],
        ids=["list", "cut", "neither", "null", "both", "text-messages", "list-prompt", "engine-refuses", "large"],
    )  # fmt: skip
    async def test_what_cannot_be_counted_is_refused(self, box: Parts, body: bytes, param: str | None) -> None:
        with pytest.raises(errors.InvalidRequest) as refused:
            await answer(box, replace(ask(), body=body))
        assert refused.value.param == param

    async def test_counting_counts_against_the_rate_of_a_tenant_but_not_on_a_gateways_socket(self, box: Parts) -> None:
        asked = ask(prompt="x", tenant="poor")
        for _ in range(2):
            await answer(box, asked)
        with pytest.raises(errors.RateLimitExceeded):
            await answer(box, asked)
        assert (await answer(box, replace(asked, on_socket=True)))["count"] > 0
        with pytest.raises(errors.ModelNotLoaded):
            await answer(box, ask(model="b", prompt="x"))


async def test_a_server_of_somebody_elses_is_not_asked(tmp_path: Path) -> None:
    async with run_engine() as engine, assembled(tmp_path, "--backend", engine.url) as parts:
        await eventually(lambda: parts.pool.registry.ready_ids() == ["alpha", "beta"], "the server's models are known")
        with pytest.raises(errors.ModalityUnsupported):
            await answer(parts, ask(model="alpha", prompt="x"))
        assert (engine.seen, TOKENIZE in list_endpoints(parts.pool.registry.models)) == ([], False)


# the line in front of an engine


class CountingEngine(FakeEngine):
    """Counts the members of a body, once the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = Capabilities((CHAT, TOKENIZE), context_tokens=77)
        self.may_count = asyncio.Event()
        self.counting = 0

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        self.counting += 1
        try:
            await self.may_count.wait()
        finally:
            self.counting -= 1
        return len(fields)


def serving(engine: FakeEngine) -> Model:
    """Return a model that is served by this engine."""
    queue = FairQueue(slots=1, limits=Fairness(), budget=WaitBudget(1), weight_of=lambda _tenant: 1.0)
    model = Model(ModelDefinition(model_id="m", backend="gguf"), queue, lambda: None)
    supervisor = Supervisor(engine, silent_s=1, on_change=lambda: None)
    supervisor._become(EngineState.LOADED)
    model.replicas.append(Replica(LoadPlan(model_id="m", backend="gguf", slots=1), supervisor))
    model.apply(ModelEvent.LOAD)
    model.serve(load_s=1.0)
    return model


async def test_few_are_counted_at_once_a_tenant_may_not_fill_the_line_and_who_leaves_takes_no_turn_along() -> None:
    set_runner_limits(serving={"count_s": 30.0})
    engine, counting, most = CountingEngine(), Counting(), limits().serving.counts
    model = serving(engine)
    leaving = [asyncio.create_task(counting.count(model, ask(prompt="x", tenant=str(number)))) for number in range(most)]
    await eventually(lambda: engine.counting == most, "as many count as may")
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    asked = [asyncio.create_task(counting.count(model, ask(prompt="x", tenant="greedy"))) for _ in range(16)]
    await turns(1)
    assert engine.counting == most
    with pytest.raises(errors.TenantQueueFull):
        await counting.count(model, ask(prompt="x", tenant="greedy"))
    asked.append(asyncio.create_task(counting.count(model, ask(prompt="x", tenant="modest"))))
    engine.may_count.set()
    bodies = [json.loads(body) for body, _waited_ms in await asyncio.gather(*asked)]
    assert (bodies, engine.counting) == ([{"count": 2, "max_model_len": 77}] * len(asked), 0)


async def test_who_waits_in_vain_is_told_so_and_the_engine_gets_no_more_until_it_has_ended() -> None:
    set_runner_limits(serving={"count_s": 0.05})
    engine, counting = CountingEngine(), Counting()
    model = serving(engine)
    for number in range(limits().serving.counts):
        with pytest.raises(errors.EngineUnavailable, match="did not count"):
            await counting.count(model, ask(prompt="x", tenant=str(number)))
    with pytest.raises(errors.QueueTimeout):
        await counting.count(model, ask(prompt="x"))
    assert engine.counting == limits().serving.counts
    engine.may_count.set()
    await eventually(lambda: engine.counting == 0, "the engine has ended")
    assert await counting.count(model, ask(prompt="x"))
    model = serving(FakeEngine())
    with pytest.raises(errors.ModalityUnsupported):
        await Counting().count(model, ask(prompt="x"))
    model.replicas[0].supervisor._become(EngineState.FAILED)
    with pytest.raises(errors.EngineNotReached):
        await Counting().count(model, ask(prompt="x"))


# what other engines are asked


def fields(**members: object) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in members.items()}


WORDS = fields(model="tiny", messages=[{"role": "user", "content": "one two three"}], tools=[TOOL], temperature=1)


@pytest.mark.parametrize("is_old", [False, True])
async def test_a_router_of_llama_servers_is_asked_under_its_own_name_for_the_model(*, is_old: bool) -> None:
    async with run_router() as router, client_session() as client:
        router.is_old = is_old
        engine = make_llama_server(server_plan(router.url, "ours", server_model="tiny"), client)
        with pytest.raises(errors.EngineError):
            await engine.count_tokens({**WORDS, **fields(model="ours")})
        async with loaded(engine):
            assert engine.capabilities.context_tokens == 4096
            assert await engine.count_tokens({**WORDS, **fields(model="ours")}) == 3
            assert await engine.count_tokens(fields(model="ours", prompt="one two")) == 2
    async with run_engine() as foreign, client_session() as client:
        engine = make_llama_server(server_plan(foreign.url), client)
        engine.is_loaded, engine.server.base_url = True, foreign.url
        for asked in (WORDS, fields(model="tiny", prompt="x")):
            with pytest.raises(errors.EngineError):  # an answer that is no count
                await engine.count_tokens(asked)


async def test_tgi_counts_short_prompts_and_says_why_it_refuses_one() -> None:
    async with foreign_server("tiny") as url, served(make_tgi, foreign_plan(url)) as engine:
        assert engine.capabilities.context_tokens == 1024
        assert [await engine.count_tokens(one) for one in (WORDS, fields(model="tiny", prompt="one two"))] == [3, 2]
        for refused, words in (({"messages": []}, "cannot be empty"), ({"prompt": "x" * 131072}, "at most 131072 bytes")):
            with pytest.raises(errors.InvalidRequest, match=words):
                await engine.count_tokens(fields(model="tiny", **refused))


async def test_vllm_is_told_what_decides_the_length_of_a_prompt_and_no_more(tmp_path: Path) -> None:
    with contract_python(tmp_path):
        async with served(make_vllm, contract_plan(contract_model(tmp_path / "model"))) as engine:
            assert engine.capabilities.context_tokens == 512
            assert await engine.count_tokens({**WORDS, **fields(chat_template="{{ 1 }}")}) == 3
            with pytest.raises(errors.InvalidRequest, match="index out of range"):
                await engine.count_tokens(fields(model="tiny", messages=[]))
            with pytest.raises(errors.EngineError, match="404"):
                await engine.count_tokens(fields(model="other", prompt="x"))
