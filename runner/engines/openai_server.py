"""Fronting an OpenAI-compatible server that somebody else runs: Ollama, llama-server, vLLM and the like."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp
import msgspec

from runner.config import BackendConfig
from runner.engines.port import Health, Progress
from runner.errors import EngineError

PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
MAX_LIST_BYTES = 4 * 1024 * 1024


class _ModelEntry(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelEntry]


class OpenAIServer:
    """The adapter. Its health check lists the models, so a model that comes or goes is seen within ``poll_s``."""

    name = "openai"
    poll_s = 5.0
    restart_max_s = 2.0
    endpoints: tuple[str, ...] = ("/v1/chat/completions", "/v1/completions")

    def __init__(self, config: BackendConfig, client: aiohttp.ClientSession) -> None:
        self._config = config
        self._client = client
        self._listed: list[str] = []
        self.base_url = config.url
        self.headers: Mapping[str, str] = {"Authorization": f"Bearer {config.key}"} if config.key else {}

    @property
    def models(self) -> list[str]:
        """The models given by the owner, else those the server lists."""
        return list(self._config.models) or list(self._listed)

    async def start(self, progress: Progress) -> None:
        """Ask for the model list. Raises EngineError when the server cannot be used yet."""
        progress("asking the server for its models")
        url = self._config.url
        try:
            status = await self._list_models()
        except TimeoutError:
            raise EngineError(f"{url} does not answer") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"cannot reach {url}: {error}") from None
        if status in {401, 403}:
            raise EngineError(f"{url} refuses the key (HTTP {status}): give the right one with --backend-key")
        if status >= 500:
            raise EngineError(f"{url}/v1/models answers HTTP {status}")
        if not self.models:
            raise EngineError(f"{url}/v1/models names no model (HTTP {status}): name them with --models")

    async def stop(self, *, gently: bool) -> None:  # nothing of ours to stop
        """Leave the server alone."""

    async def health(self) -> Health:
        """List the models; any answer below 500 is a sign of life."""
        try:
            status = await self._list_models()
        except TimeoutError:
            return Health.SILENT
        except (aiohttp.ClientError, OSError):
            return Health.UNREACHABLE
        return Health.OK if status < 500 and self.models else Health.UNREACHABLE

    async def wait_gone(self) -> None:
        """Never return: only the health check can tell."""
        await asyncio.get_running_loop().create_future()

    async def _list_models(self) -> int:
        """Refresh the list; return the HTTP status. An answer that is no model list leaves the old one."""
        headers = {"Accept": "application/json", **self.headers}
        url = f"{self._config.url}/v1/models"
        async with self._client.get(url, headers=headers, timeout=PROBE_TIMEOUT) as response:
            body = bytearray()
            async for chunk in response.content.iter_chunked(64 * 1024):
                body += chunk
                if len(body) > MAX_LIST_BYTES:
                    return response.status
            if response.status == 200:
                try:
                    listed = msgspec.json.decode(body, type=_ModelList)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    return response.status
                self._listed = list(dict.fromkeys(entry.id for entry in listed.data))
            return response.status
