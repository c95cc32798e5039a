"""A real node with real engines behind the real gateway: text, embeddings, recordings, and models that come and go."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from aiohttp import web

from runner.config import TINY_MODEL_PATH
from tests.fakes.engines.scripted_server import run_engine
from tests.fakes.http_client import call
from tests.fakes.lab import CHAT, Lab, unique
from tests.fakes.models.make import speech_wav, whisper_dir
from tests.fakes.runners.process import run_box
from tests.fakes.waiting import eventually
from wire.optoken import Operation
from wire.optoken.op_token import Grant, sign_l0

pytestmark = [pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[3]
KEY = b"0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class RealBox:
    """A runner process that serves its gateway and its own port; its models' names are those of no other test."""

    url: str
    chat: str
    vectors: str
    speech: str
    later: str

    async def operate(self, operation: Operation, model: str) -> None:
        """Load or unload a model through the node's own port, with a token, and wait until that is done."""
        grant = Grant(operation, model, signers=("ann", "bob"), nonce=secrets.token_hex(16), issued_at=int(time.time()))
        path = {Operation.MODEL_LOAD: "/v1/models/load", Operation.MODEL_UNLOAD: "/v1/models/unload"}[operation]
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            answer = await client.post(path, json={"modelId": model, "verifiedOpToken": sign_l0(KEY, grant)})
            assert answer.status_code in {200, 202}, answer.text
            if answer.status_code == 202:
                task = f"/v1/models/load/{answer.json()['taskId']}"

                async def ended() -> bool:
                    return str((await client.get(task)).json()["status"]) == "completed"

                await eventually(ended, what="the load has ended", within_s=60)


def write_box(folder: Path, names: dict[str, str]) -> dict[str, str]:
    """Lay out models, settings and key; return the variables that name them."""
    models, data, key = folder / "models", folder / "data", folder / "op.key"
    models.mkdir()
    data.mkdir()
    for name in ("chat", "vectors", "later"):
        shutil.copy(TINY_MODEL_PATH, models / f"{names[name]}.gguf")
    shutil.copytree(whisper_dir(), models / names["speech"])
    settings = {
        names["chat"]: {"model_path": f"{names['chat']}.gguf", "enabled": True, "target_inflight": 2},
        names["vectors"]: {"model_path": f"{names['vectors']}.gguf", "enabled": True, "gguf_embedding": True},
        names["speech"]: {"backend": "whisper", "model_path": names["speech"], "enabled": True},
    }
    (data / "settings.json").write_text(json.dumps({"engine": {"backend": "gguf", "models": settings}}))
    key.write_bytes(KEY)
    key.chmod(0o600)
    return {"MUSTER_DATA": str(data), "MODEL_BASE_PATH": str(models), "VERIFIED_OP_TOKEN_KEY_PATH": str(key)}


@asynccontextmanager
async def real_box(lab: Lab, folder: Path) -> AsyncIterator[RealBox]:
    names = {name: unique(name) for name in ("chat", "vectors", "speech", "later")}
    log = folder / "box.log"
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    surroundings |= {"MUSTER_TOKEN": lab.secret, "PYTHONPATH": str(ROOT), **write_box(folder, names)}
    for name in names.values():
        await lab.allow(name)
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "runner", "--gateway", lab.gateway.url, "--name", unique("real"), "--api-port", "0",
            "--threads", "1", env=surroundings, stdout=sink, stderr=sink,
        )  # fmt: skip
    try:

        def listening() -> re.Match[str] | None:
            return re.search(r"api listening url=(\S+)", log.read_text(encoding="utf-8"))

        found = await eventually(listening, what="the node listens", within_s=60)
        yield RealBox(found[1], **names)
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 60)


async def listed(client: openai.AsyncOpenAI) -> set[str]:
    return {model.id async for model in client.models.list()}


async def test_text_embeddings_and_recordings_reach_the_engines_of_one_box(lab: Lab, tmp_path: Path) -> None:
    sdk = openai.AsyncOpenAI(api_key=lab.stack.ready.api_key, base_url=lab.gateway.url + "/v1", max_retries=0, timeout=90)
    async with real_box(lab, tmp_path) as box, sdk:

        async def offers(*names: str) -> bool:
            return set(names) <= await listed(sdk)

        await eventually(partial(offers, box.chat, box.vectors, box.speech), what="its models are offered", within_s=90)
        assert box.later not in await listed(sdk)

        # Without a temperature of 0 the model may draw its end as the first token.
        said = await sdk.completions.create(model=box.chat, prompt="Muster is", max_tokens=8, temperature=0)
        assert said.choices[0].text
        stream = await sdk.chat.completions.create(
            model=box.chat, messages=[{"role": "user", "content": "Explain lambda."}], max_tokens=12, stream=True, temperature=0
        )  # fmt: skip
        assert [chunk async for chunk in stream if chunk.choices and chunk.choices[0].delta.content]

        vectors = await sdk.embeddings.create(model=box.vectors, input=["one text", "another"], encoding_format="float")
        assert len(vectors.data) == 2
        assert len(vectors.data[0].embedding) > 16
        assert vectors.data[0].embedding != vectors.data[1].embedding

        heard = await sdk.audio.transcriptions.create(
            model=box.speech, file=("speech.wav", speech_wav().read_bytes()), response_format="verbose_json",
            timestamp_granularities=["word"],
        )  # fmt: skip
        assert float(heard.duration) > 1
        assert heard.words

        with pytest.raises(openai.BadRequestError) as refused:
            await sdk.embeddings.create(model=box.chat, input="x")
        assert "/v1/chat/completions" in str(refused.value)


async def test_a_model_is_offered_as_soon_as_it_is_loaded_and_gone_as_soon_as_it_is_unloaded(lab: Lab, tmp_path: Path) -> None:
    sdk = openai.AsyncOpenAI(api_key=lab.stack.ready.api_key, base_url=lab.gateway.url + "/v1", max_retries=0, timeout=90)
    async with real_box(lab, tmp_path) as box, sdk:

        async def is_offered() -> bool:
            return box.later in await listed(sdk)

        async def is_gone() -> bool:
            return not await is_offered()

        await box.operate(Operation.MODEL_LOAD, box.later)
        await eventually(is_offered, what="the loaded model is offered")
        chat = await sdk.chat.completions.create(
            model=box.later, messages=[{"role": "user", "content": "Explain lambda."}], max_tokens=4, temperature=0
        )
        assert chat.choices[0].message.content
        await box.operate(Operation.MODEL_UNLOAD, box.later)
        await eventually(is_gone, what="the unloaded model is gone")


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SAID = {"role": "assistant", "content": "Hello"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
WHOLE = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "usage": USAGE}
WHOLE_CHAT = {**WHOLE, "choices": [{"index": 0, "message": SAID, "finish_reason": "stop"}]}


async def answer_chat_alone(request: web.Request, _body: bytes) -> web.StreamResponse:
    if request.path != CHAT:
        raise web.HTTPNotFound
    return web.json_response(WHOLE_CHAT)


async def test_what_the_owner_did_not_name_and_the_server_does_not_know_is_translated_too(lab: Lab, tmp_path: Path) -> None:
    model = await lab.model()
    options = ("--models", model, "--translate", "responses")
    env = {"MUSTER_TOKEN": lab.secret}
    async with run_engine() as engine, run_box(tmp_path, lab.gateway.url, "--backend", engine.url, *options, env=env):
        engine.handler = answer_chat_alone
        body = json.dumps({"model": model, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}).encode()

        async def is_offered() -> bool:
            reply = await call("GET", lab.gateway.url + "/v1/models")
            return any(row["id"] == model for row in reply.json["data"])

        await eventually(is_offered, what="the model is offered", within_s=60)
        for asked in ([MESSAGES, CHAT], [CHAT]):
            reply = await lab.post(body, path=MESSAGES)
            assert (reply.status, reply.json["content"][0]["text"]) == (200, "Hello"), reply.body
            assert [path for path, _, _ in engine.seen] == asked
            engine.seen.clear()
        responses = json.dumps({"model": model, "input": "hi"}).encode()
        assert (await lab.post(responses, path=RESPONSES)).json["status"] == "completed"
        assert [path for path, _, _ in engine.seen] == [CHAT]
