"""llama.cpp in a child process, so that a crash or a hang of the engine can be killed without harm to the runner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import msgspec

from runner.config import LlamaConfig
from runner.engines.port import Health, Progress
from runner.errors import EngineError

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 6.0
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
LAST_WORDS_LINES = 4
_SOURCE_ROOT = Path(__file__).resolve().parents[2]


class _Answer(msgspec.Struct):
    url: str = ""
    error: str = ""


class LlamaCpp:
    """The adapter: one child per start, a new random key each time."""

    name = "llamacpp"
    poll_s = 2.0
    restart_max_s = 30.0
    endpoints: tuple[str, ...] = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")

    def __init__(self, config: LlamaConfig, *, slots: int, client: aiohttp.ClientSession) -> None:
        self._config = config
        self._slots = slots
        self._client = client
        self._process: asyncio.subprocess.Process | None = None
        self._log_reader: asyncio.Task[None] | None = None
        self._log_tail: deque[str] = deque(maxlen=50)
        self.base_url = ""
        self.headers: Mapping[str, str] = {}

    @property
    def models(self) -> list[str]:
        """The one model."""
        return [self._config.model_name]

    @property
    def pid(self) -> int | None:
        """Process id of the child, or None when there is none."""
        return self._process.pid if self._process is not None else None

    async def start(self, progress: Progress) -> None:
        """Start the child and load the model. Raises EngineError with what llama.cpp said last."""
        await self.stop(gently=False)
        progress("starting the engine process")
        self._log_tail.clear()
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "runner.engines.llamacpp_child", str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=_child_environment(), start_new_session=True,
        )  # fmt: skip
        self._log_reader = asyncio.create_task(self._read_log(process))
        key = secrets.token_urlsafe(24)
        progress(f"loading {self._config.model_path.name}")
        try:
            answer = await asyncio.wait_for(self._exchange_settings(process, key), LOAD_TIMEOUT_S)
        except TimeoutError:
            await self._kill()
            raise EngineError(f"{self._config.model_path} did not load within {LOAD_TIMEOUT_S:.0f} s") from None
        except asyncio.CancelledError:
            await self._kill()
            raise
        if not answer.url:
            await self._reap()
            raise EngineError(f"{self._config.model_path} could not be loaded: {self._last_words(answer.error)}")
        self.base_url = answer.url
        self.headers = {"Authorization": f"Bearer {key}"}

    async def stop(self, *, gently: bool) -> None:
        """Have the child unload and exit; kill it when it takes longer than ``STOP_TIMEOUT_S``, or at once."""
        process = self._process
        if process is None:
            return
        if gently and process.stdin is not None and process.returncode is None:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        await self._kill()

    async def health(self) -> Health:
        """Ask ``/health`` once."""
        try:
            async with self._client.get(f"{self.base_url}/health", timeout=HEALTH_TIMEOUT) as response:
                return Health.OK if response.status == 200 else Health.SILENT
        except TimeoutError:
            return Health.SILENT
        except (aiohttp.ClientError, OSError):
            return Health.UNREACHABLE

    async def wait_gone(self) -> None:
        """Return when the child has exited."""
        if self._process is not None:
            await self._process.wait()

    async def _exchange_settings(self, process: asyncio.subprocess.Process, key: str) -> _Answer:
        """Give the child its settings; return its answer, an empty one when it died without a word."""
        if process.stdin is None or process.stdout is None:
            raise EngineError("the engine process has no pipes")
        config = self._config
        settings = {
            "model_path": str(config.model_path), "model_name": config.model_name, "key": key, "slots": self._slots,
            "context_tokens": config.context_tokens, "threads": config.threads,
        }  # fmt: skip
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            await process.stdin.drain()
        line = await process.stdout.readline()
        return msgspec.json.decode(line, type=_Answer) if line else _Answer()

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        """Keep the last lines the engine logged, and pass them on at debug level."""
        if process.stderr is None:
            return
        while line := await process.stderr.readline():
            text = line.decode("utf-8", "replace").rstrip()
            self._log_tail.append(text)
            log.debug("engine: %s", text)

    async def _kill(self) -> None:
        """Kill what is left of the child."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._reap()

    async def _reap(self) -> None:
        if self._process is not None:
            await self._process.wait()
            self._process = None
        if self._log_reader is not None:
            await self._log_reader
            self._log_reader = None

    def _last_words(self, error: str) -> str:
        words = [line for line in self._log_tail if line.strip()][-LAST_WORDS_LINES:]
        return " | ".join(filter(None, [error, *words])) or "the engine process died without a word"


def _child_environment() -> dict[str, str]:
    """Return our environment without our secrets, and with the folder that ``runner`` is imported from."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_SOURCE_ROOT), kept.get("PYTHONPATH")]))
    return kept
