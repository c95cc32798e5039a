"""ComfyUI's adapter against a server that answers as ComfyUI does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from runner.definitions.plan import LoadPlan
from runner.engines.comfyui import ComfyUiEngine
from runner.engines.port import IMAGES, Call, FlushResult
from tests.fakes.engines.comfyui_contract import ComfyContract
from tests.fakes.engines.suite import EngineCase, EngineUnderTest


def comfy_plan(url: str, model: str = "sd15", **options: object) -> LoadPlan:
    """Return a plan for a checkpoint of the server at ``url``."""
    return LoadPlan(model_id=model, backend="comfyui", slots=4, options={"server_url": url, **options})


def image_call(prompt: str = "a lighthouse", **fields: object) -> Call:
    """Return a request for images; ``fields`` join the body."""
    body = {"model": "sd15", "prompt": prompt, "size": "64x64", "steps": 4, **fields}
    return Call("POST", IMAGES, {"content-type": "application/json"}, json.dumps(body).encode())


@contextlib.asynccontextmanager
async def open_comfyui(_folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    """Yield an adapter of a server of ours, and one for a checkpoint that cannot be read there."""
    async with ComfyContract(step_s=0.03).serve() as server:

        async def running() -> int:
            return len(server.pending) + (server.running is not None)

        yield EngineUnderTest(
            engine=ComfyUiEngine(comfy_plan(server.url), client),
            call=image_call(steps=2),
            streamed=image_call(stream=True),
            long=image_call(stream=True, steps=150, n=1),
            broken=ComfyUiEngine(comfy_plan(server.url, "broken"), client),
            broken_words="HeaderTooLarge",
            running=running,
            flushes=frozenset({FlushResult.NOTHING_KEPT}),
        )


CASES = [EngineCase("comfyui", open_comfyui)]
