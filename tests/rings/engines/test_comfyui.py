"""Images from ComfyUI: what is asked of it, what comes back, what is withdrawn, and how its checkpoint comes and goes."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from runner.definitions.plan import Progress
from runner.engines.comfy import make_comfyui
from runner.engines.comfy_server import make_text_to_image
from runner.engines.http_engine import HttpEngine
from runner.engines.port import CHAT, Health, Priority
from runner.errors import EngineError, ModalityUnsupported
from runner.limits import limits
from tests.fakes.engines.comfyui import ComfyContract, comfy_plan, image_call, make_png
from tests.fakes.engines.suite import assert_health, client_session
from tests.fakes.limits import set_runner_limits
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.timeout(180)

PROMPT, FREED = "a lighthouse", 2**26
Answer = dict[str, Any]  # JSON


def of_others(steps: int = 100_000) -> dict[str, Any]:
    """Return a prompt that is not ours."""
    return {"s": {"class_type": "KSampler", "inputs": {"steps": steps}}, "i": {"class_type": "SaveImage", "inputs": {}}}


@asynccontextmanager
async def prepared(
    server: ComfyContract | None = None, model: str = "sd15", **options: object
) -> AsyncIterator[tuple[HttpEngine, ComfyContract]]:
    """Yield an adapter that is not loaded, and its server."""
    async with (server or ComfyContract()).serve() as served, client_session() as client:
        adapter = make_comfyui(comfy_plan(served.url, model, **options), client)
        try:
            yield adapter, served
        finally:
            served.keeps_memory, served.reserved = False, 0
            await adapter.unload(gently=False)


@asynccontextmanager
async def loaded(
    server: ComfyContract | None = None, model: str = "sd15", **options: object
) -> AsyncIterator[tuple[HttpEngine, ComfyContract]]:
    """Yield a loaded adapter, and its server with the traces of loading gone."""
    async with prepared(server, model, **options) as (adapter, served):
        await adapter.load(lambda _progress: None)
        served.asked.clear()
        served.executed.clear()
        yield adapter, served


async def ask(adapter: HttpEngine, **fields: object) -> tuple[int, Answer]:
    async with asyncio.timeout(30), adapter.stream(image_call(PROMPT, **fields)) as response:
        return response.status, json.loads(await response.read())


async def ask_stream(adapter: HttpEngine, **fields: object) -> list[Answer]:
    async with asyncio.timeout(30), adapter.stream(image_call(PROMPT, stream=True, **fields)) as response:
        assert response.status == 200, await response.read()
        return [json.loads(data) for data in re.findall(r"^data: (.*)$", (await response.read()).decode(), re.MULTILINE)]


def pictures(answer: Answer) -> list[bytes]:
    return [base64.b64decode(item["b64_json"]) for item in answer["data"]]


# making images


async def test_a_request_becomes_a_graph_and_its_picture_comes_back_without_it() -> None:
    async with loaded() as (adapter, server):
        status, answer = await ask(adapter, negative_prompt="rain", seed=5, cfg=3.5, size="64x128", user="u", n=2)
        assert (status, pictures(answer)) == (200, [make_png(64, 128, {})] * 2)
        assert (answer["size"], answer["output_format"], server.history) == ("64x128", "png", {})
        (asked,) = server.asked
        assert asked["prompt"] == make_text_to_image().fill({
            "prompt": PROMPT, "negative_prompt": "rain", "width": 64, "height": 128, "seed": 5, "steps": 4, "cfg": 3.5,
            "batch_size": 2, "checkpoint": "sd15.safetensors",
        })  # fmt: skip
        assert not {"front", "number"} & asked.keys()


async def test_a_stream_tells_how_far_it_is_and_ends_with_the_images_and_history_forgets_them() -> None:
    async with loaded(ComfyContract(step_s=0.01)) as (adapter, server):
        events = await ask_stream(adapter, n=2, steps=10)
        progress = [event for event in events if event["type"] == "image_generation.progress"]
        percents, done = [event["percent"] for event in progress], events[len(progress) :]
        assert (percents, percents[0]) == (sorted(percents), 0)
        assert {20, 50, 90} <= set(percents)
        assert {event["stage"] for event in progress} == {"waiting", "working"}
        assert [(event["type"], event["index"]) for event in done] == [
            ("image_generation.completed", index) for index in (0, 1)
        ]
        assert [base64.b64decode(event["b64_json"]) for event in done] == [make_png(64, 64, {})] * 2
        assert (len(server.executed), server.history) == (1, {})


@pytest.mark.parametrize("is_mute", [True, False])
async def test_an_image_comes_without_the_websocket_too(is_mute: bool) -> None:
    async with loaded(ComfyContract(is_mute=is_mute, step_s=0.05)) as (adapter, server):
        asking = asyncio.create_task(ask(adapter, steps=8))
        await eventually(lambda: server.running is not None)
        server.drop_sockets()
        status, answer = await asking
        assert (status, len(pictures(answer))) == (200, 1)


async def test_priorities_change_the_order_in_the_servers_queue() -> None:
    async with loaded(ComfyContract(step_s=0.01)) as (adapter, server):
        running = server.enqueue(of_others())

        async def ask_as(priority: Priority) -> None:
            async with adapter.stream(dataclasses.replace(image_call(steps=1), priority=priority)) as response:
                assert response.status == 200
                await response.read()

        order: tuple[Priority, ...] = ("low", "normal", "high")
        tasks = []
        for number, priority in enumerate(order, start=1):
            tasks.append(asyncio.create_task(ask_as(priority)))
            await eventually(lambda count=number: len(server.pending) == count)  # type: ignore[misc]  # the number of this turn
        stats = await adapter.stats()
        assert (stats.running, stats.waiting, running in server.executed) == (1, 3, False)
        ids = [asked["prompt_id"] for asked in server.asked]
        server._interrupted = True
        await asyncio.gather(*tasks)
        assert server.executed == [running, *reversed(ids)]


def write_workflow(folder: Path, **nodes: dict[str, object]) -> str:
    path = folder / "workflow.json"
    path.write_text(json.dumps({name: {"class_type": name, "inputs": inputs} for name, inputs in nodes.items()}))
    return str(path)


async def test_a_workflow_without_batches_runs_once_for_each_image_with_its_own_seed(tmp_path: Path) -> None:
    nodes: dict[str, dict[str, object]] = {"KSampler": {"seed": "{{seed}}", "steps": 2}, "SaveImage": {}}
    path = write_workflow(tmp_path, CLIPTextEncode={"text": "ink, {{prompt}}"}, **nodes)
    async with loaded(model="ink", comfyui_workflow=path) as (adapter, server):
        status, answer = await ask(adapter, n=3, seed=10, size=None, steps=None)
        assert (status, len(pictures(answer)), "size" in answer) == (200, 3, False)
        assert [asked["prompt"]["KSampler"]["inputs"]["seed"] for asked in server.asked] == [10, 11, 12]
        assert server.asked[0]["prompt"]["CLIPTextEncode"]["inputs"]["text"] == f"ink, {PROMPT}"


@pytest.mark.parametrize(
    ("output", "fields", "status", "key", "value"),
    [
        ("SaveImage", {"size": "64x64", "steps": None}, 400, "param", "size"),
        ("SaveImage", {"size": "auto", "steps": 9}, 400, "param", "steps"),
        ("PreviewAny", {"size": None, "steps": None}, 422, "code", "no_image"),
    ],
)
async def test_what_a_workflow_sets_itself_or_does_not_make_cannot_be_asked_for(
    tmp_path: Path, output: str, fields: dict[str, object], status: int, key: str, value: str
) -> None:
    path = write_workflow(tmp_path, CLIPTextEncode={"text": "{{prompt}}"}, **{output: {}})
    async with loaded(comfyui_workflow=path) as (adapter, _):
        got, answer = await ask(adapter, **fields)
        assert (got, answer["error"][key]) == (status, value)


# what goes wrong


@pytest.mark.parametrize(
    ("kind", "words", "status"),
    [("RuntimeError", "sizes of tensors must match", 422), ("torch.OutOfMemoryError", "Allocation on device", 503)],
)
@pytest.mark.parametrize("is_mute", [False, True])
async def test_a_failing_node_is_told_in_its_own_words(kind: str, words: str, status: int, is_mute: bool) -> None:
    async with loaded(ComfyContract(is_mute=is_mute)) as (adapter, server):
        server.fails["VAEDecode"] = (kind, words)
        got, answer = await ask(adapter)
        assert (got, answer["error"]["message"]) == (status, f"ComfyUI could not make the image: VAEDecode: {words}")
        last = (await ask_stream(adapter))[-1]
        assert (last["type"], words in last["error"]["message"], server.history) == ("error", True, {})
        server.checkpoints = ("other.safetensors",)
        for stream in (False, True):
            got, answer = await ask(adapter, stream=stream)
            assert (got, "(node checkpoint): Value not in list: ckpt_name" in answer["error"]["message"]) == (400, True)


async def test_a_prompt_that_is_interrupted_lost_or_takes_too_long_is_given_up() -> None:
    async with loaded(ComfyContract(step_s=0.02)) as (adapter, server):
        asking = asyncio.create_task(ask(adapter, steps=100))
        await eventually(lambda: server.running is not None)
        server._interrupted = True
        status, answer = await asking
        assert (status, "interrupted" in answer["error"]["message"]) == (503, True)
        set_runner_limits(comfyui={"job_s": 0.2})  # of this prompt alone: the load has one too
        status, answer = await ask(adapter, steps=150)
        assert (status, answer["error"]["code"], server.running) == (504, "engine_timeout", None)
        set_runner_limits(comfyui={"job_s": 60.0, "lost_s": 0.2, "look_s": 0.1})
        server.loses_prompts = True
        status, answer = await ask(adapter)
        assert (status, "lost the request" in answer["error"]["message"]) == (502, True)


async def test_a_server_that_goes_away_is_said() -> None:
    contract = ComfyContract(step_s=0.05)
    async with client_session() as client:
        async with contract.serve():
            adapter = make_comfyui(comfy_plan(contract.url), client)
            await adapter.load(lambda _progress: None)
            set_runner_limits(comfyui={"silent_s": 0.3})
            asking = asyncio.create_task(ask(adapter, steps=150))
            await eventually(lambda: contract.running is not None)
        status, answer = await asking
        assert (status, answer["error"]["code"]) == (502, "engine_failed")
        await assert_health(adapter, Health.UNREACHABLE)
        assert (await adapter.stats()).running is None
        await adapter.unload(gently=True)


async def test_only_images_are_served_and_nobody_else_on_the_machine_gets_any() -> None:
    async with loaded() as (adapter, server), client_session() as client:
        call = image_call()
        others = [dataclasses.replace(call, path=path) for path in (CHAT, "/v1/images/edits")]
        for other in (*others, dataclasses.replace(call, method="GET")):
            with pytest.raises(ModalityUnsupported):
                async with adapter.stream(other):
                    pass
        async with adapter.stream(
            dataclasses.replace(call, headers={"content-type": "multipart/form-data; boundary=x"})
        ) as form:
            assert form.status == 400
        async with client.post(
            adapter.server.base_url + call.path, data=call.body, headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 401
        assert server.asked == []


# clients that leave


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_client_that_leaves_stops_its_own_prompt(is_old: bool, is_streaming: bool) -> None:
    async with loaded(ComfyContract(step_s=0.02, is_old=is_old)) as (adapter, server):
        asking = asyncio.create_task(ask(adapter, steps=150, stream=is_streaming))
        await eventually(lambda: server.running is not None)
        mine = server.running.prompt_id if server.running else ""
        waiting = server.enqueue(of_others(5))
        asking.cancel()
        await eventually(lambda: mine in server.executed and waiting in server.history)
        assert (server.innocent, server.interrupts) == ([], [{"prompt_id": mine}])
        assert server.history[waiting]["status"]["status_str"] == "success"
        await eventually(lambda: mine not in server.history)


async def test_a_client_that_leaves_while_it_waits_is_taken_out_of_the_queue() -> None:
    async with loaded(ComfyContract(step_s=0.01)) as (adapter, server):
        running = server.enqueue(of_others())
        asking = asyncio.create_task(ask(adapter))
        await eventually(lambda: bool(server.pending))
        asking.cancel()
        await eventually(lambda: not server.pending)
        assert server.interrupts == []
        assert server.running is not None
        assert server.running.prompt_id == running


# the checkpoint comes and goes


async def test_a_load_has_the_server_read_the_checkpoint_and_an_unload_sees_it_go() -> None:
    async with prepared() as (adapter, server):
        reported: list[Progress] = []
        await adapter.load(reported.append)
        assert (server.reserved > 2**30, server.history) == (True, {})
        assert "loading the checkpoint" in [progress.stage for progress in reported]
        usual_s, server.keeps_memory = limits().comfyui.free_s, True
        set_runner_limits(comfyui={"free_s": 0.3})
        with pytest.raises(EngineError, match="still holds 4096 MB"):
            await adapter.unload(gently=True)
        set_runner_limits(comfyui={"free_s": usual_s})
        server.keeps_memory, frees = False, server.frees
        server.enqueue(of_others(50))
        await adapter.unload(gently=True)
        assert (server.reserved < FREED, server.interrupts) == (True, [])
        await adapter.unload(gently=True)
        assert server.frees == frees + 1


@pytest.mark.parametrize(
    "contract", [{"lacks": frozenset({"PreviewAny"})}, {"device": "cpu", "keeps_memory": True}, {"is_old": True}]
)
async def test_a_server_without_a_node_without_a_gpu_or_of_an_older_release_serves_as_well(contract: dict[str, Any]) -> None:
    async with loaded(ComfyContract(**contract)) as (adapter, server):
        assert (await ask(adapter))[0] == 200
        await adapter.unload(gently=True)
        assert server.frees == 1


@pytest.mark.parametrize(
    ("model", "options", "has_combo", "found"),
    [
        ("sdxl.safetensors", {}, False, "sdxl.safetensors"),
        ("sdxl", {}, True, "sdxl.safetensors"),
        ("mine", {"server_model": "sd15.safetensors"}, False, "sd15.safetensors"),
    ],
)
async def test_the_checkpoint_is_found_by_its_name_and_a_proxy_in_front_gets_its_key(
    monkeypatch: pytest.MonkeyPatch, model: str, options: dict[str, object], has_combo: bool, found: str
) -> None:
    monkeypatch.setenv("TEST_COMFY_KEY", "secret")
    contract = ComfyContract(has_combo=has_combo, key="secret")
    async with loaded(contract, model, server_api_key_env="TEST_COMFY_KEY", **options) as (adapter, server):
        assert (await ask_stream(adapter))[-1]["type"] == "image_generation.completed"
        assert server.asked[0]["prompt"]["checkpoint"]["inputs"]["ckpt_name"] == found
        await assert_health(adapter, Health.OK)


@pytest.mark.parametrize(
    ("contract", "options", "words"),
    [
        (ComfyContract(checkpoints=("a.ckpt", "b.ckpt")), {}, r"no checkpoint sd15; it has a\.ckpt, b\.ckpt: set server_model"),
        (ComfyContract(checkpoints=()), {}, "it has none"),
        (ComfyContract(lacks=frozenset({"KSampler", "VAEDecode"})), {}, "lacks nodes of the workflow: KSampler, VAEDecode"),
        (ComfyContract(key="secret"), {}, "does not accept our key"),
        (ComfyContract(), {"server_api_key_env": "TEST_NO_SUCH_KEY"}, "TEST_NO_SUCH_KEY"),
        (ComfyContract(), {"comfyui_workflow": "/nowhere/w.json"}, "/nowhere/w.json cannot be read"),
        (ComfyContract(), {"server_url": "http://127.0.0.1:9"}, "was not answered"),
        (ComfyContract(), {"server_url": "nonsense"}, "needs server_url"),
    ],
)
async def test_a_load_that_cannot_be_says_what_to_do(contract: ComfyContract, options: dict[str, object], words: str) -> None:
    async with prepared(contract, "sd15", **options) as (adapter, server):
        with pytest.raises(EngineError, match=words):
            await adapter.load(lambda _progress: None)
        assert server.asked == []
        await assert_health(adapter, Health.UNREACHABLE)
        with pytest.raises(aiohttp.ClientConnectionError):
            await ask(adapter)
