"""A worker of bridge v1 on a line in memory, as ModelRelay's program is one: golden frames, and nothing beyond its wire page.

It answers pings by itself, keeps each frame of the server as its text, and fails at one that the real program does not know.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from typing import Any

import aiohttp

from tests.fakes.fleet import Fleet
from tests.fakes.memory_link import MemoryLink
from wire.ids import parse_id

KNOWN = {"register_ack", "request", "cancel", "ping", "graceful_shutdown", "models_refresh"}
"""The frames that the program knows; at any other its session ends."""


class BridgeWorker:
    """A dialled worker. ``frames``: what the server said, in order and without pings; ``closed``: code and reason."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.link = MemoryLink()
        self.frames: list[dict[str, Any]] = []
        self.texts: list[str] = []
        self.pings = 0
        self.closed: tuple[int, str] | None = None
        self.load = 0
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def dial(
        cls, fleet: Fleet, *, models: Sequence[str] = ("m",), name: str = "worker", slots: int = 1,
        version: str | None = "2026-04-bridge-v1", register: str = "",
    ) -> BridgeWorker:  # fmt: skip
        """Connect and register as the program does, byte for byte; ``register``: another first frame."""
        worker = cls(fleet)
        scope = worker.link.make_scope(
            "ws://gateway/v1/worker/connect?provider=local", {"x-worker-secret": fleet.rows.credential}
        )
        fleet.serve_socket(worker.link, scope)
        worker._task = fleet.loop.create_task(worker._read())
        await worker.link.accepted.wait()
        told = "" if version is None else f',"protocol_version":"{version}"'
        listed = json.dumps(list(models), separators=(",", ":"))
        hello = (
            f'{{"type":"register","worker_name":"{name}","models":{listed},"max_concurrent":{slots}{told},"current_load":0}}'
        )
        worker.say(register or hello)
        await fleet.until(lambda: worker.frames or worker.closed)
        return worker

    async def _read(self) -> None:
        while True:
            message = await self.link.node_end.receive()
            if message.type is aiohttp.WSMsgType.TEXT:
                self._take(message.data)
                continue
            assert message.type is not aiohttp.WSMsgType.BINARY, "the program ignores binary frames"
            self.closed = (message.data or 1006, message.extra or "")
            return

    def _take(self, text: str) -> None:
        frame = json.loads(text)
        assert frame["type"] in KNOWN, f"the program ends its session at {frame['type']}"
        assert text.startswith('{"type":'), "compact, with the type first"
        if frame["type"] == "ping":
            self.pings += 1
            self.say({"type": "pong", "current_load": self.load, "timestamp_unix_ms": frame.get("timestamp_unix_ms")})
            return
        self.frames.append(frame)
        self.texts.append(text)

    @property
    def node_id(self) -> uuid.UUID:
        """The node that the server made of it."""
        found = parse_id("node", self.of_kind("register_ack")[0]["worker_id"])
        assert found is not None
        return found

    def say(self, frame: dict[str, Any] | str) -> None:
        self.link.node_end.post(frame if isinstance(frame, str) else json.dumps(frame, separators=(",", ":")))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [frame for frame in self.frames if frame["type"] == kind]

    async def next_request(self, *, count: int = 1) -> dict[str, Any]:
        """Wait until it was sent ``count`` requests; return the newest."""
        await self.fleet.until(lambda: len(self.of_kind("request")) >= count)
        return self.of_kind("request")[-1]

    def chunk(self, request: dict[str, Any], text: str) -> None:
        self.say({"type": "response_chunk", "request_id": request["request_id"], "chunk": text})

    def complete(self, request: dict[str, Any], body: str = "", *, status: int = 200, kind: str = "application/json") -> None:
        self.say({
            "type": "response_complete", "request_id": request["request_id"], "status_code": status,
            "headers": {"content-type": kind}, "body": body,
        })  # fmt: skip

    async def close(self) -> None:
        """Vanish, and wait for the end."""
        self.link.cut()
        if self._task is not None:
            await self._task
        await self.fleet.settle()
