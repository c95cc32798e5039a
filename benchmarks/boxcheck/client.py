"""Talking to one node: plain calls, lifecycle operations with tokens, streams."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.boxcheck.parsing import read_events
from benchmarks.errors import BenchmarkError
from wire.optoken.op_token import Grant, sign_l0
from wire.optoken.verifier import Operation

SIGNERS = ("first-owner", "second-owner")
CALL_S = 120.0
LOAD_S = 300.0
PROMPT = (
    "You are the guide of a small lighthouse. Explain to a visitor, step by step and in plain words, how the lamp is lit, "
    "who keeps watch at night, and what the keeper writes into the book every morning before breakfast."
)


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer. ``headers`` are lower-case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    began: float
    ended: float

    @property
    def document(self) -> dict[str, Any]:
        """The body as a JSON object. Raises BenchmarkError when it is none."""
        try:
            found = json.loads(self.body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise BenchmarkError(f"the node answered {self.status} with something else than a JSON object: {self.body[:200]!r}")
        return found

    @property
    def error(self) -> dict[str, Any]:
        """The error object, in either of the node's shapes; empty when there is none."""
        document = self.document if self.body[:1] == b"{" else {}
        found = document.get("error") or document.get("detail")
        return found if isinstance(found, dict) else {}

    def number(self, header: str) -> float:
        """Return a header as a number, 0 where it is missing."""
        return float(self.headers.get(header, 0))


@dataclass(slots=True)
class Streamed:
    """A streamed answer as its client saw it. ``ended``: done, error event, cut (the connection broke) or short (no end)."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    ended: str = ""
    ended_at: float = 0.0

    @property
    def error(self) -> dict[str, Any]:
        """The error object of its last event, empty when it ended well."""
        for event in reversed(read_events(bytes(self.body))):
            found = event.get("error")
            if isinstance(found, dict):
                return found
        return {}


class BoxClient:
    """A client of the node at ``url``; ``key`` signs its operations."""

    def __init__(self, url: str, key: bytes, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._key = key
        self._session = session

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        form: aiohttp.FormData | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = CALL_S,
    ) -> Reply:
        """Return the answer, whatever its status. Raises aiohttp.ClientError and TimeoutError."""
        began = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.request(
            method, self.url + path, json=body, data=form, headers=headers, timeout=timeout
        ) as response:
            content = await response.read()
            found = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status, found, content, began, time.monotonic())

    def sign(self, operation: Operation, model_id: str | None) -> dict[str, object]:
        """Return a fresh token."""
        now = int(time.time())
        return sign_l0(self._key, Grant(operation, model_id, SIGNERS, secrets.token_hex(16), now))

    # Lifecycle

    async def load(self, model_id: str, **fields: object) -> Reply:
        """Ask for a load."""
        token = self.sign(Operation.MODEL_LOAD, model_id)
        return await self.call("POST", "/v1/models/load", body={"modelId": model_id, **fields, "verifiedOpToken": token})

    async def read_task(self, task_id: str) -> dict[str, Any]:
        """Return a load task."""
        return (await self.call("GET", f"/v1/models/load/{task_id}")).document

    async def wait_task(self, task_id: str) -> dict[str, Any]:
        """Return a load task once it has ended. Raises BenchmarkError when that takes too long."""
        deadline = time.monotonic() + LOAD_S
        while True:
            task = await self.read_task(task_id)
            if task.get("status") != "loading":
                return task
            if time.monotonic() > deadline:
                raise BenchmarkError(f"load {task_id} has not ended within {LOAD_S:g} s: {task}")
            await asyncio.sleep(0.05)

    async def load_whole(self, model_id: str, **fields: object) -> dict[str, Any]:
        """Load a model and return its task. Raises BenchmarkError when it does not come about."""
        reply = await self.load(model_id, **fields)
        if reply.status == 200:
            return reply.document
        if reply.status != 202:
            raise BenchmarkError(f"load of {model_id} was refused with {reply.status}: {reply.body[:500].decode()}")
        task = await self.wait_task(str(reply.document["taskId"]))
        if task.get("status") != "completed":
            raise BenchmarkError(f"load of {model_id} came to nothing: {task}")
        return task

    async def unload(self, model_id: str, **fields: object) -> Reply:
        """Unload a model."""
        token = self.sign(Operation.MODEL_UNLOAD, model_id)
        return await self.call(
            "POST", "/v1/models/unload", body={"modelId": model_id, **fields, "verifiedOpToken": token}, timeout_s=LOAD_S
        )

    async def flush(self, scope: str, **fields: object) -> Reply:
        """Flush caches."""
        named = fields.get("modelId")
        token = self.sign(Operation.CACHE_FLUSH, named if isinstance(named, str) else None)
        return await self.call("POST", "/v1/cache/flush", body={"scope": scope, **fields, "verifiedOpToken": token})

    async def state_of(self, model_id: str) -> str:
        """Return the state of a model in the words of llm-pool."""
        models = (await self.call("GET", "/v1/admin/models")).document.get("models", [])
        return next((str(entry["runtime_state"]) for entry in models if entry["name"] == model_id), "unknown")

    # Inference

    async def chat(
        self, model_id: str, *, tokens: int = 8, prompt: str = PROMPT, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Ask for exactly ``tokens`` tokens, in one piece."""
        return await self.call("POST", "/v1/chat/completions", body=question(model_id, tokens, prompt), headers=headers)

    @asynccontextmanager
    async def open_stream(self, model_id: str, *, tokens: int) -> AsyncIterator[tuple[Streamed, asyncio.Task[None]]]:
        """Ask for a stream; yields what has been seen of it so far, and the task that reads it to its end."""
        seen = Streamed()
        reading = asyncio.create_task(self._read_stream(question(model_id, tokens, PROMPT) | {"stream": True}, seen))
        try:
            yield seen, reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read_stream(self, body: Mapping[str, object], seen: Streamed) -> None:
        timeout = aiohttp.ClientTimeout(total=LOAD_S)
        try:
            async with self._session.post(self.url + "/v1/chat/completions", json=body, timeout=timeout) as response:
                seen.status = response.status
                while chunk := await response.content.readany():
                    seen.body += chunk
            seen.ended = "done" if b"data: [DONE]" in seen.body else "error event" if seen.error else "short"
        except aiohttp.ClientError:
            seen.ended = "cut"
        seen.ended_at = time.monotonic()


def question(model_id: str, tokens: int, prompt: str = PROMPT) -> dict[str, object]:
    """Return the body of a chat request that is answered with exactly ``tokens`` tokens."""
    return {
        "model": model_id,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": prompt}],
    }


def tenant(name: str, **others: str) -> dict[str, str]:
    """Return the headers of a tenant's request; ``cache_tag`` is ``X-Cache-Tag`` and so on."""
    return {"X-Tenant-ID": name} | {f"X-{key.replace('_', '-').title()}": value for key, value in others.items()}


def speech_form(model_id: str, audio: bytes) -> aiohttp.FormData:
    """Return the form of a transcription."""
    form = aiohttp.FormData()
    form.add_field("model", model_id)
    form.add_field("language", "en")
    form.add_field("file", audio, filename="speech.wav", content_type="audio/wav")
    return form
