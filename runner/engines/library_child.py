"""A library held in a child process of ours that serves it over HTTP: what the adapters of such libraries share."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec

from runner.engines.child import Child
from runner.engines.http import HttpServer
from runner.engines.port import (
    Call,
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    Health,
    LoadPlan,
    Report,
    Response,
)
from runner.engines.token_counts import ask_child
from runner.errors import EngineError
from runner.limits import limits

Value = TypeVar("Value")


class _Numbers(msgspec.Struct):
    """What ``/stats`` of a child answers; names as in EngineStats."""

    running: int | None = None
    waiting: int | None = None
    kv_total_tokens: int | None = None
    kv_used_tokens: int | None = None
    kv_bytes: int | None = None
    cache_queried_tokens: int | None = None
    cache_hit_tokens: int | None = None


class LibraryChild:
    """One child at a time, with a new random key for each. ``module`` is a program of ``runner.engines.children``,
    ``distribution`` the package whose library it holds.
    """

    def __init__(self, module: str, client: aiohttp.ClientSession, *, distribution: str) -> None:
        self._module = module
        self._distribution = distribution
        self._child = Child(module.rpartition(".")[2])
        self.server = HttpServer(client)

    @property
    def pids(self) -> tuple[int, ...]:
        """The child, while there is one."""
        return (self._child.pid,) if self._child.is_running and self._child.pid is not None else ()

    @property
    def info(self) -> Mapping[str, object]:
        """What the child said about itself when it was ready, and the ``version`` of its library where one is installed."""
        return self._child.info

    async def start(self, settings: Mapping[str, object], report: Report) -> None:
        """Start the child and have it load; ``settings`` less the key. Raises EngineError; no process is left then."""
        key = secrets.token_urlsafe(24)
        url = await self._child.start_ours(
            self._module, {**settings, "key": key}, report, limit_s=limits().engines.library_load_s
        )
        self.server.base_url, self.server.headers = url, {"Authorization": f"Bearer {key}"}
        self._child.info["version"] = await asyncio.to_thread(installed_version, self._distribution)

    async def stop(self, *, gently: bool) -> None:
        """End the child; return when the process is gone."""
        await self._child.stop(gently=gently)
        self.server.base_url = ""

    def send(self, call: Call, extra_headers: Mapping[str, str] | None = None) -> AbstractAsyncContextManager[Response]:
        """Send a call as it is, with headers of ours. Raises aiohttp.ClientError or OSError."""
        if not self.server.base_url:
            raise ConnectionRefusedError("the model is not loaded")
        if extra_headers:
            call = dataclasses.replace(call, headers={**call.headers, **extra_headers})
        return self.server.send(call)

    @property
    def context_tokens(self) -> int | None:
        """Tokens that one request may have, None where the child does not tell."""
        told = self.info.get("context_tokens")
        return told if isinstance(told, int) and told > 0 else None

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        """Have the child count the tokens of a prompt. Raises InvalidRequest, EngineError."""
        if not self.server.base_url:
            raise EngineError("the model is not loaded")
        return await ask_child(self.server, fields)

    async def stats(self) -> EngineStats:
        """Return the child's numbers, an empty value when it does not answer."""
        if not self.server.base_url:
            return EngineStats()
        try:
            status, body = await self.server.ask("GET", "/stats")
            numbers = msgspec.json.decode(body, type=_Numbers) if status == 200 else _Numbers()
        except (EngineError, msgspec.DecodeError):
            return EngineStats()
        return EngineStats(**msgspec.structs.asdict(numbers))

    async def health(self) -> Health:
        """Ask ``/health`` once."""
        return await self.server.check() if self.server.base_url else Health.UNREACHABLE

    async def wait_gone(self) -> None:
        """Return when the child has exited."""
        await self._child.wait_gone()


@dataclass(frozen=True, slots=True)
class LibraryKind:
    """What tells one library from another. ``module`` is its child program, ``distribution`` its package; ``title`` names it
    in messages.

    ``needs``: what ``plan.path`` must be, a folder with ``model.bin``. ``settings`` are those of its child beside the ones all
    have; ``capabilities`` are made from the plan and from what the child said about the model.
    """

    name: str
    module: str
    distribution: str
    title: str
    needs: str
    settings: Callable[[LoadPlan], Mapping[str, object]]
    capabilities: Callable[[LoadPlan, Mapping[str, object]], Capabilities]


class LibraryEngine:
    """The adapter of CTranslate2's family: libraries that keep nothing between requests, so that tenants cannot meet.

    Options of the plan: ``device`` (cpu, cuda or auto) and ``compute_type``, as CTranslate2 names them.
    """

    poll_s = 2.0
    restart_max_s = 30.0

    def __init__(self, plan: LoadPlan, client: aiohttp.ClientSession, *, kind: LibraryKind) -> None:
        self._plan = plan
        self._kind = kind
        self._child = LibraryChild(kind.module, client, distribution=kind.distribution)
        self.name = kind.name

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do; of one that is not loaded, what such models can."""
        return self._kind.capabilities(self._plan, self._child.info)

    @property
    def pids(self) -> tuple[int, ...]:
        """The child process."""
        return self._child.pids

    async def load(self, report: Report) -> None:
        """Start the child and load. Raises EngineError."""
        plan = self._plan
        if plan.path is None or not (plan.path / "model.bin").is_file():
            raise EngineError(f"{plan.model_id}: {self._kind.needs} is needed, got {plan.path}")
        device = read_option(plan.options, "device", str)
        settings = {
            "folder": str(plan.path),
            "model_name": plan.model_id,
            "slots": plan.slots,
            "threads": plan.threads,
            # ``cuda:N`` was made into the GPU with that number when the load was planned.
            "device": (device or ("cuda" if plan.gpu_ids else "cpu")).partition(":")[0],
            "enable_thinking": plan.options.get("enable_thinking"),
            "device_index": list(plan.gpu_ids),
            "compute_type": read_option(plan.options, "compute_type", str) or plan.quantization or "default",
        }
        await self._child.start({**settings, **self._kind.settings(plan)}, report)

    async def unload(self, *, gently: bool) -> None:
        """Have the child unload and exit, or kill it; return when it is gone."""
        await self._child.stop(gently=gently)

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """Say that there is nothing to flush."""
        words = f"{self._kind.title} keeps nothing between requests, so there is no {request.scope} to flush"
        return FlushOutcome(FlushResult.NOTHING_KEPT, words)

    async def stats(self) -> EngineStats:
        """Return running and waiting requests; the library tells no more."""
        return await self._child.stats()

    def stream(self, call: Call) -> AbstractAsyncContextManager[Response]:
        """Send a request to the child."""
        return self._child.send(call)

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        """Have the child count, where its library reads text. Raises InvalidRequest, EngineError."""
        return await self._child.count_tokens(fields)

    async def health(self) -> Health:
        """Ask the child once."""
        return await self._child.health()

    async def wait_gone(self) -> None:
        """Return when the child has exited."""
        await self._child.wait_gone()


def installed_version(distribution: str) -> str:
    """Return the version of a package that is installed beside this program, empty when it is not. Blocks on the disk."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def read_option(options: Mapping[str, object], name: str, kind: type[Value]) -> Value | None:
    """Return an option of a plan, None when it is not set. Raises EngineError when it has another type than ``kind``."""
    value = options.get(name)
    if value is None:
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise EngineError(f"{name} must be of type {kind.__name__}")
    return value
