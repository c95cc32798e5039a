"""Real nodes with real engines that are killed in the middle of an answer, at any byte: what the client reads is one answer."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from runner.config import TINY_MODEL_PATH
from tests.fakes.lab import CHAT, MESSAGES, RESPONSES, Lab, bearer, unique
from tests.fakes.runners.process import RunningBox, run_box
from tests.fakes.waiting import eventually

pytestmark = [pytest.mark.timeout(3000)]
KILLS = int(os.environ.get("MUSTER_TEST_KILLS", "6"))
"""How many nodes are killed."""
QUESTIONS = (
    "Tell me a story.",
    "What is a GPU?",
    "What is Muster?",
    "Explain lambda.",
    "What is a list?",
    "How does import work?",
)
"""Those of which the model is sure: a prompt is computed in other steps than an answer, and near ties may swap."""


class MortalNode:
    """A runner whose connection to its gateway is passed on here, until it is killed in the middle of what it says."""

    def __init__(self, folder: Path, lab: Lab, model: str) -> None:
        self.name = ""
        self.said = 0
        """How many bytes it has sent."""
        self.dies_at: int | None = None
        self.deaths = 0
        self._folder = folder
        self._lab = lab
        self._model = model
        self._box: RunningBox | None = None
        self._stack = AsyncExitStack()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        else:
            await self._stack.aclose()
        self.name = unique("mortal")  # each time another one: a node that is lost so often gets no work for minutes
        (self._folder / self.name).mkdir()
        settings = {"engine": {"backend": "gguf", "models": {self._model: {"model_path": "m.gguf", "enabled": True}}}}
        (self._folder / self.name / "settings.json").write_text(json.dumps(settings))
        env = {
            "MUSTER_TOKEN": self._lab.secret,
            "MUSTER_DATA": str(self._folder / self.name),
            "MODEL_BASE_PATH": str(self._folder),
        }
        gateway = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        options = ("--name", self.name, "--threads", "1")
        self._box = await self._stack.enter_async_context(run_box(self._folder, gateway, *options, env=env))

    async def close(self) -> None:
        await self._stack.aclose()
        if self._server is not None:
            self._server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._lab.gateway.port)

        async def answer() -> None:
            while data := await there.read(65536):
                writer.write(data)

        answering = asyncio.create_task(answer())
        with suppress(OSError):
            while data := await reader.read(65536):
                left = len(data) if self.dies_at is None else self.dies_at - self.said
                self.said += len(data)
                back.write(data[:left])
                if left < len(data) and self._box is not None:
                    self.dies_at = None
                    self.deaths += 1
                    await back.drain()
                    self._box.process.kill()
                    break
        answering.cancel()
        back.close()
        writer.close()


def make_body(path: str, model: str, question: str, node: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "temperature": 0,
        "x_pool_options": {"resume": True, "prefer_gpu": node},
    }
    if path == RESPONSES:
        return {**body, "input": question, "max_output_tokens": 200}
    body |= {"messages": [{"role": "user", "content": question}], "max_tokens": 200}
    return {**body, "seed": 1, "stream_options": {"include_usage": True}} if path == CHAT else body


def read_answer(path: str, data: str) -> tuple[str, int, list[str]]:
    """Return text, tokens and the nodes that went on with the answer."""
    events = [json.loads(line[5:]) for line in data.splitlines() if line.startswith("data:") and "[DONE]" not in line]
    told = [event.get("x_pool_meta") or event.get("response", {}).get("x_pool_meta") for event in events]
    meta: dict[str, Any] = next(filter(None, told), {})
    nodes = [one["node"] for one in meta.get("resumed", ())]
    if path == CHAT:
        assert len({event["id"] for event in events}) == 1, data
        assert data.rstrip().endswith("[DONE]"), data[-500:]
        text = "".join(choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ()))
        return text, next(event["usage"]["completion_tokens"] for event in events if event.get("usage")), nodes
    if path == MESSAGES:
        text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
        return text, next(event["usage"]["output_tokens"] for event in events if event["type"] == "message_delta"), nodes
    response = events[-1]["response"]
    return response["output"][0]["content"][0]["text"], response["usage"]["output_tokens"], nodes


async def test_answers_whose_node_is_killed_at_any_byte_are_those_of_nodes_that_live(lab: Lab, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    drawn, model = random.Random(seed), await lab.model()
    shutil.copy(TINY_MODEL_PATH, tmp_path / "m.gguf")
    nodes = [MortalNode(tmp_path, lab, model) for _ in range(3)]
    resumed = whole = 0
    async with httpx.AsyncClient(base_url=lab.gateway.url, timeout=90, headers=bearer(lab.stack.ready.api_key)) as client:

        async def ask(path: str, question: str, node: MortalNode) -> tuple[str, int, list[str]]:
            reply = await client.post(path, json=make_body(path, model, question, node.name))
            assert reply.status_code == 200, reply.text
            return read_answer(path, reply.text)

        async def serves(node: MortalNode) -> bool:
            body = {**make_body(CHAT, model, "Hi", node.name), "stream": False, "max_tokens": 1}
            del body["stream_options"]
            reply = await client.post(CHAT, json=body)
            return bool(reply.headers.get("x-muster-node") == node.name)

        async def bring_back(node: MortalNode) -> None:
            await node.start()
            await eventually(partial(serves, node), what=f"{node.name} is back", within_s=90, pause_s=0.3)

        try:
            for node in nodes:
                await node.start()
            for node in nodes:
                await eventually(partial(serves, node), what=f"{node.name} serves", within_s=90, pause_s=0.3)
            expected, sizes = {}, {}
            for path in (CHAT, MESSAGES, RESPONSES):
                for question in QUESTIONS:
                    before = nodes[0].said
                    expected[path, question] = await ask(path, question, nodes[0])
                    sizes[path, question] = nodes[0].said - before
            restarts: dict[MortalNode, asyncio.Task[None]] = {}
            while resumed < KILLS:
                ready = [node for node in nodes if node not in restarts or restarts[node].done()]
                if len(ready) < 2:
                    await asyncio.wait(restarts.values(), return_when=asyncio.FIRST_COMPLETED)
                    restarts = {node: task for node, task in restarts.items() if not task.done() or task.result()}
                    continue
                victim, case = drawn.choice(ready), drawn.choice(list(expected))
                victim.dies_at = victim.said + drawn.randrange(sizes[case])
                deaths = victim.deaths
                text, tokens, by = await ask(*case, victim)
                assert (text, tokens) == expected[case][:2], f"seed {seed}, {case}, {resumed} before it"
                resumed, whole = resumed + bool(by), whole + (not by)
                victim.dies_at = None
                print(f"seed {seed}: {resumed} streams resumed, {whole} whole without another node, 0 differ", flush=True)
                if victim.deaths > deaths:
                    restarts[victim] = asyncio.create_task(bring_back(victim))
            await asyncio.gather(*restarts.values())
        finally:
            for node in nodes:
                await node.close()
