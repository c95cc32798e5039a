"""A real stand-alone node as a process: started, killed, started again on the same data, and looked at from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil

from benchmarks.boxcheck.client import BoxClient
from benchmarks.boxcheck.parsing import read_url
from benchmarks.errors import BenchmarkError
from benchmarks.processes import Child

START_S = 60.0
GONE_S = 20.0
_STEP_S = 0.02
_ENGINE_MODULE = "runner.engines.children."
_FOREIGN = ("MUSTER_", "TENANT_", "LLM_POOL_", "OP_TOKEN_", "VLLM_", "HF_")
"""Variables of the caller that would change what a node does."""


class Box:
    """One node. ``data`` survives its process; ``client`` is there while it runs."""

    def __init__(self, data: Path, *, models: Path, environment: Mapping[str, str], options: tuple[str, ...]) -> None:
        self.data = data
        self._options = options
        data.mkdir(parents=True, exist_ok=True)
        key_file = data / "operations.key"
        if not key_file.exists():
            key_file.touch(0o600)
            key_file.write_text(secrets.token_hex(32) + "\n")
        self._key = key_file.read_text().strip().encode()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self._environment = kept | {
            "MODEL_BASE_PATH": str(models),
            "VERIFIED_OP_TOKEN_KEY_PATH": str(key_file),
            **environment,
        }
        self._child: Child | None = None
        self._session: aiohttp.ClientSession | None = None
        self._client: BoxClient | None = None
        self._starts = 0

    @property
    def client(self) -> BoxClient:
        """Who talks to it."""
        assert self._client is not None
        return self._client

    @property
    def child(self) -> Child:
        """Its process."""
        assert self._child is not None
        return self._child

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.child.popen.pid

    async def start(self) -> float:
        """Start it; return the seconds until it answered. Raises BenchmarkError with its last words."""
        began = time.monotonic()
        self._starts += 1
        argv = [sys.executable, "-m", "runner", "--standalone", "--api-port", "0", "--data", str(self.data), *self._options]
        self._child = Child(f"box-{self._starts}", argv, log_dir=self.data, env=self._environment)
        log = self._child.log_path
        url = None
        while url is None:
            self._child.require_alive()
            if time.monotonic() - began > START_S:
                raise BenchmarkError(f"the node did not listen within {START_S:g} s:\n{self._child.read_log_tail()}")
            await asyncio.sleep(_STEP_S)
            url = read_url(log.read_text(errors="replace"))
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._client = BoxClient(url, self._key, self._session)
        while (await self._client.call("GET", "/v1/capabilities")).status == 503:
            self._child.require_alive()
            if time.monotonic() - began > START_S:
                raise BenchmarkError(f"the node was still starting after {START_S:g} s:\n{self._child.read_log_tail()}")
            await asyncio.sleep(_STEP_S)
        return time.monotonic() - began

    async def stop(self) -> None:
        """End it in order, by force where that takes too long."""
        await self._hang_up()
        if self._child is not None:
            await asyncio.to_thread(self._child.stop)

    async def kill(self) -> None:
        """Kill the runner's process alone, as a crash would."""
        self.child.popen.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self.child.popen.wait, GONE_S)
        await self._hang_up()

    def engines(self) -> list[psutil.Process]:
        """Return its engine processes with all that descends from them."""
        if self._child is None:
            return []
        try:
            return [child for child in psutil.Process(self.pid).children(recursive=True) if is_alive(child)]
        except psutil.NoSuchProcess:
            return []

    def strays(self) -> list[psutil.Process]:
        """Return engine processes that were started for it, wherever they hang in the process tree now."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if str(self.pid) in words and any(_ENGINE_MODULE in word for word in words) and is_alive(process):
                found.append(process)
        return found

    def engine_bytes(self) -> int:
        """Return the memory of its engines; pages that they share count once."""
        total = 0
        for process in self.engines():
            with contextlib.suppress(psutil.Error):
                memory = process.memory_full_info()
                total += getattr(memory, "pss", memory.rss)
        return total

    def runner_rss_bytes(self) -> int:
        """Return the resident memory of the runner itself."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def open_files(self) -> int:
        """Return how many file descriptors the runner has open."""
        return int(psutil.Process(self.pid).num_fds())

    async def _hang_up(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


@asynccontextmanager
async def open_box(
    data: Path, *, models: Path, environment: Mapping[str, str] | None = None, options: tuple[str, ...] = ()
) -> AsyncIterator[Box]:
    """Yield a started node; it is stopped after the block, and every engine it had is looked for."""
    box = Box(data, models=models, environment=environment or {}, options=options)
    try:
        await box.start()
        yield box
    finally:
        engines = box.engines()
        await box.stop()
        for process in engines:
            with contextlib.suppress(psutil.Error):
                if is_alive(process):
                    process.kill()


async def wait_for(condition: Callable[[], bool], *, limit_s: float) -> float | None:
    """Return the seconds until ``condition`` held, None when it did not in time."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit_s:
            return None
        await asyncio.sleep(_STEP_S)
    return time.monotonic() - began


async def require(condition: Callable[[], bool], what: str) -> None:
    """Wait until ``condition`` holds. Raises BenchmarkError that says ``what`` did not happen."""
    if await wait_for(condition, limit_s=START_S) is None:
        raise BenchmarkError(f"{what} within {START_S:g} s: it did not")


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process still runs; one that has ended and was not waited for does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
