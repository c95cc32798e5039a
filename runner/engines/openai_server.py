"""Fronting an OpenAI-compatible server that somebody else runs, with all its models: Ollama, LM Studio and the like."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import aiohttp
import msgspec

from runner.engines.http import HttpServer
from runner.engines.llama_slots import Properties
from runner.engines.port import (
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    Health,
    Progress,
    Report,
)
from runner.errors import EngineError, EngineSilent

_OF_LLAMA_SERVER = "llamacpp"
"""What llama.cpp's server has always said of who owns its models."""


class _ModelEntry(msgspec.Struct):
    id: str
    owned_by: object = None


class _ModelList(msgspec.Struct):
    data: list[_ModelEntry]


class OpenAIServer:
    """The adapter. Its health check lists the models, so one that comes or goes is seen within ``poll_s``.

    ``url`` ends before ``/v1``. ``given``: the models its owner named, empty = those it lists; ``on_models`` hears of changes.
    """

    poll_s = 5.0
    restart_max_s = 2.0
    pids: tuple[int, ...] = ()

    def __init__(
        self, url: str, *, key: str, given: Sequence[str], client: aiohttp.ClientSession, on_models: Callable[[], None]
    ) -> None:
        self.name = "openai"
        """``llama-server`` where the list of models tells: gateways keep from it what it would leave out without a word."""
        self.capabilities = Capabilities(endpoints=())
        """Which paths such a server answers only it can say, so every one that is for inference is passed on."""
        self._server = HttpServer(client)
        self._server.base_url = url
        self._server.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.stream = self._server.send
        """A request is passed on as it is."""
        self._given = list(given)
        self._listed: list[str] = []
        self._on_models = on_models

    @property
    def models(self) -> list[str]:
        """The models given by the owner, else those the server lists."""
        return list(self._given) or list(self._listed)

    async def load(self, report: Report) -> None:
        """Ask for the model list. Raises EngineError when the server cannot be used yet."""
        report(Progress("asking the server for its models"))
        url = self._server.base_url
        try:
            status = await self._list_models()
        except EngineError as error:
            raise EngineError(f"cannot use {url}: {error}") from None
        if status in {401, 403}:
            raise EngineError(f"{url} refuses the key (HTTP {status}): give the right one with --backend-key")
        if status >= 500:
            raise EngineError(f"{url}/v1/models answers HTTP {status}")
        if not self.models:
            raise EngineError(f"{url}/v1/models names no model (HTTP {status}): name them with --models")

    async def unload(self, *, gently: bool) -> None:
        """Leave the server alone: nothing of ours is to stop but connections."""
        self._server.close()

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """Say that such a server cannot be asked to."""
        del request
        return FlushOutcome(FlushResult.NOT_SUPPORTED, "an OpenAI-compatible server has no call that clears its cache")

    async def stats(self) -> EngineStats:
        """Return nothing: such a server has no numbers to ask for."""
        return EngineStats()

    async def health(self) -> Health:
        """List the models; any answer below 500 is a sign of life."""
        try:
            status = await self._list_models()
        except EngineSilent:
            return Health.SILENT
        except EngineError:
            return Health.UNREACHABLE
        return Health.OK if status < 500 and self.models else Health.UNREACHABLE

    async def wait_gone(self) -> None:
        """Never return: only the health check can tell."""
        await asyncio.get_running_loop().create_future()

    async def _list_models(self) -> int:
        """Refresh the list; return the HTTP status. An answer that is no model list leaves the old one. Raises EngineError."""
        status, body = await self._server.ask("GET", "/v1/models")
        if status == 200:
            try:
                listed = msgspec.json.decode(body, type=_ModelList)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return status
            names = list(dict.fromkeys(entry.id for entry in listed.data))
            is_llama = bool(names) and all(entry.owned_by == _OF_LLAMA_SERVER for entry in listed.data)
            found = ("llama-server" if is_llama else "openai", names)
            if found != (self.name, self._listed):
                self.name, self._listed = found
                self.capabilities = replace(self.capabilities, version=await self._ask_build() if is_llama else "")
                self._on_models()
        return status

    async def _ask_build(self) -> str:
        """Return the build that a llama-server says it is, empty where it does not."""
        try:
            status, body = await self._server.ask("GET", "/props")
            return msgspec.json.decode(body, type=Properties).version if status == 200 else ""
        except (EngineError, msgspec.DecodeError, UnicodeDecodeError):
            return ""
