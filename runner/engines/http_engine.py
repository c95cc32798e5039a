"""The engine behind an HTTP server, composed of that server, a loader and a probe; and what loaders and probes share.

An adapter is a function that puts these together for one kind of server: how a model gets onto it (a process of ours, a call
of the server's, or a look at what runs) and what is asked of it while the model is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import math
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from runner.definitions.plan import LoadPlan, Progress, Report
from runner.engines.http import HttpServer, read_answer
from runner.engines.port import (
    Call,
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    Health,
    LoopOwner,
    Response,
)
from runner.engines.process import Child, kill_rest, list_tree, make_private_folder
from runner.errors import EngineError, EngineSilent, InvalidRequest
from runner.limits import limits
from wire import clock
from wire.unreadable import UNREADABLE

Value = TypeVar("Value")

fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_kwargs_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


class Processes(Protocol):
    """What holds a model: one process of ours with its tree, or several that live and end together."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The root processes; empty when none runs."""

    async def wait_gone(self) -> None:
        """Return when one of them has exited. Raises EngineError when it is known why the model is gone."""


class Loader(Protocol):
    """How a model gets onto a server and off it.

    ``is_attached``: the server is somebody else's, and a model whose unload it refuses goes on being served.
    """

    is_attached: bool

    @property
    def child(self) -> Processes | None:
        """The process that holds the model, None where it is none of ours."""

    async def load(self, report: Report) -> None:
        """Return once the server answers for the model. Raises EngineError; whatever it raises is undone by the engine."""

    async def unload(self, *, gently: bool) -> None:
        """Return when the model is seen to be gone. Raises EngineError. Of an attached server only while it is loaded."""


class Probe(Protocol):
    """What is asked of a server, and sent to it, while its model is loaded."""

    capabilities: Capabilities
    has_metrics: bool
    """Whether its ``/metrics`` are about this model."""

    def send(self, call: Call) -> AbstractAsyncContextManager[Response]:
        """As the engine's ``stream``."""

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """As the engine's."""

    async def read_stats(self) -> EngineStats:
        """Return the engine's numbers. Raises EngineError when it does not answer."""


class HttpEngine:
    """One replica of one model behind one HTTP server: the port, for every kind of server.

    ``check`` is its health check where that is another than the server's; it may raise EngineError. ``count`` counts tokens,
    None = it does not. ``meet`` asks a server that has just loaded what the model can do; what raises EngineError there is not
    used. ``give_up`` undoes a load that failed or was cancelled, None = by ``unload``.
    """

    def __init__(
        self, server: HttpServer, loader: Loader, probe: Probe, *, name: str, poll_s: float, restart_max_s: float,
        loop: LoopOwner | None = None, check: Callable[[], Awaitable[Health]] | None = None,
        count: Callable[[Mapping[str, msgspec.Raw]], Awaitable[int]] | None = None,
        meet: Callable[[Report], Awaitable[None]] | None = None, give_up: Callable[[], Awaitable[None]] | None = None,
    ) -> None:  # fmt: skip
        self.server = server
        self.loader = loader
        self.probe = probe
        self.name = name
        self.poll_s = poll_s
        self.restart_max_s = restart_max_s
        self.loop = loop
        self.is_loaded = False
        self._check = check or server.check
        self._count = count
        self._meet = meet
        self._give_up = give_up or partial(loader.unload, gently=False)

    @property
    def capabilities(self) -> Capabilities:
        return self.probe.capabilities

    @property
    def pids(self) -> tuple[int, ...]:
        return self.loader.child.pids if self.loader.child is not None else ()

    async def load(self, report: Report) -> None:
        self.is_loaded = False
        self.server.leave()
        try:
            await self.loader.load(report)
            if self._meet is not None:
                await self._meet(report)
        except BaseException:
            try:
                await self._give_up()
            finally:
                self.server.leave()
            raise
        self.is_loaded = True

    async def unload(self, *, gently: bool) -> None:
        if self.loader.is_attached:
            if not self.is_loaded:
                return
            await self.loader.unload(gently=gently)
            self.is_loaded = False
            self.server.leave()
            return
        self.is_loaded = False  # at once: a process that ends gets no more requests
        try:
            await self.loader.unload(gently=gently)
        finally:
            self.server.leave()

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        return await self.probe.flush(request)

    async def stats(self) -> EngineStats:
        if not self.is_loaded:
            return EngineStats()
        try:
            return await self.probe.read_stats()
        except EngineError:
            return EngineStats()

    async def read_metrics(self) -> str:
        return await self.server.read_metrics() if self.is_loaded and self.probe.has_metrics else ""

    def stream(self, call: Call) -> AbstractAsyncContextManager[Response]:
        if not self.is_loaded:
            raise aiohttp.ClientConnectionError("the model is not loaded")
        return self.probe.send(call)

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        if not self.is_loaded:
            raise EngineError("the model is not loaded")
        assert self._count is not None
        return await self._count(fields)

    async def health(self) -> Health:
        try:
            return await self._check() if self.is_loaded else Health.UNREACHABLE
        except EngineSilent:
            return Health.SILENT
        except EngineError:
            return Health.UNREACHABLE

    async def wait_gone(self) -> None:
        if self.loader.child is None:
            await asyncio.get_running_loop().create_future()  # only a health check tells that another's server has gone
        else:
            await self.loader.child.wait_gone()


class OwnChild:
    """Loads a model by starting a program of ours for it, in a child process, with a new random key each time.

    ``start`` gets the process, the key and whom to tell of progress; it returns where the child serves. Raises EngineError.
    """

    is_attached = False

    def __init__(self, label: str, server: HttpServer, start: Callable[[Child, str, Report], Awaitable[str]]) -> None:
        self.child = Child(label)
        self._server = server
        self._start = start

    async def load(self, report: Report) -> None:
        key = secrets.token_urlsafe(24)
        # Known before its address is: a request that meets the new child brings the new key.
        self._server.headers = {"Authorization": f"Bearer {key}"}
        self._server.base_url = await self._start(self.child, key, report)

    async def unload(self, *, gently: bool) -> None:
        await self.child.stop(gently=gently)


class StartLog(Protocol):
    def feed(self, line: str) -> None:
        """Take one line."""

    def failure(self, last_lines: str) -> str:
        """Return why the start failed, by its ``last_lines`` when no line said so."""


@dataclass(frozen=True, slots=True)
class Start:
    """How a server of others is started, and what reads its output."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: StartLog


class ServerProcess:
    """Loads a model by starting a server of others for it, in a child process, with the workers that it starts itself.

    ``prepare`` gets a folder that only we can enter and that is there as long as the process; it says where ``server`` will
    listen. Raises EngineError.
    """

    is_attached = False

    def __init__(
        self, title: str, plan: LoadPlan, server: HttpServer, prepare: Callable[[Path, Report], Awaitable[Start]]
    ) -> None:
        self._title = title
        self._model_id = plan.model_id
        self._server = server
        self._prepare = prepare
        self.child = Child(f"{title} {plan.model_id}")
        self.folder: Path | None = None

    async def load(self, report: Report) -> None:
        await self.unload(gently=False)
        self.folder = await asyncio.to_thread(make_private_folder, self._title.lower())
        start = await self._prepare(self.folder, report)
        report(Progress(f"starting {self._title}", 0.0))
        await self.child.start_foreign(start.command, start.environment, start.log.feed)
        load_s = limits().engines.server_load_s
        try:
            async with asyncio.timeout(load_s):
                await self._wait_healthy(start.log)
        except TimeoutError:
            raise EngineError(f"{self._title} did not load {self._model_id} within {load_s:.0f} s") from None

    async def unload(self, *, gently: bool) -> None:
        tree = await asyncio.to_thread(list_tree, self.child.pid)
        if gently and self.child.is_running:
            gently = await self._server.check() is Health.OK  # one that hangs would not hear the signal either
        folder, self.folder = self.folder, None
        try:
            await self.child.stop(gently=gently, limit_s=limits().engines.server_stop_s)
        finally:
            left = await kill_rest(tree)
            if folder is not None:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if left:
            raise EngineError(
                f"processes {left} of {self._title} cannot be killed: they wait for a driver; restart the machine"
            )

    async def _wait_healthy(self, log: StartLog) -> None:
        while await self._server.check() is not Health.OK:
            if not self.child.is_running:
                await self.child.kill()  # also waits for the last lines to be read
                reason = log.failure(self.child.last_lines())
                raise EngineError(f"{self._title} could not load {self._model_id}: {reason}")
            await asyncio.sleep(limits().engines.server_look_s)


async def poll(look: Callable[[], Awaitable[Value | None]], *, within_s: float, every_s: float) -> Value | None:
    """Return what ``look`` finds, None when it has found nothing within ``within_s``."""
    give_up_at = clock.monotonic() + within_s
    while (found := await look()) is None and clock.monotonic() < give_up_at:  # noqa: ASYNC110  # a server sets no event
        await asyncio.sleep(every_s)
    return found


# ---- what a plan says ----


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


def read_url(plan: LoadPlan, *, example: str) -> str:
    """Return ``server_url`` up to, not including, ``/v1``. Raises EngineError that shows ``example``."""
    url = read_option(plan.options, "server_url", str) or ""
    if not url.startswith(("http://", "https://")):
        raise EngineError(f"{plan.model_id} needs server_url, like {example}")
    return url.rstrip("/").removesuffix("/v1")


def read_key(plan: LoadPlan, option: str) -> str:
    """Return the key in the variable that ``option`` names, empty when it names none.

    Raises EngineError naming the variable when that is empty or holds what cannot be a key.
    """
    name = read_option(plan.options, option, str)
    if not name:
        return ""
    key = os.environ.get(name, "").strip()
    if not key:
        raise EngineError(f"{plan.model_id}: the environment variable {name} ({option}) is empty")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise EngineError(f"{plan.model_id}: what {name} ({option}) holds cannot be a key: it has spaces or special characters")
    return key


def set_thinking(plan: LoadPlan, body: bytes) -> bytes:
    """Return the body of a chat completion in which ``enable_thinking`` of the plan holds where the client says nothing.

    For servers that were started without it; a body that is no JSON object is theirs to refuse.
    """
    wanted = plan.options.get("enable_thinking")
    if wanted is None:
        return body
    try:
        fields = fields_decoder.decode(body)
        given = _kwargs_decoder.decode(fields.get("chat_template_kwargs", b"null")) or {}
    except UNREADABLE:
        return body
    if "enable_thinking" in given:
        return body
    kwargs = {**given, "enable_thinking": wanted}
    return msgspec.json.encode({**fields, "chat_template_kwargs": kwargs})


def bearer(plan: LoadPlan) -> dict[str, str]:
    """Return the header with the key of ``server_api_key_env``, none when the plan names no variable. Raises EngineError."""
    key = read_key(plan, "server_api_key_env")
    return {"Authorization": f"Bearer {key}"} if key else {}


# ---- token counts ----

REFUSALS = frozenset({400, 413, 422})


class _Reason(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    """An error answer: OpenAI's object, the text of TGI, or a bare message."""

    error: _Reason | str | None = None
    message: str = ""


class _Counted(msgspec.Struct):
    count: int


_refusal_decoder = msgspec.json.Decoder(_Refusal)


def take_answer(path: str, status: int, body: bytes) -> bytes:
    """Return the body of a good answer. Raises InvalidRequest with the engine's reason, EngineError for any other failure."""
    if status == 200:
        return body
    if status in REFUSALS:
        raise InvalidRequest(read_reason(body) or "The engine does not accept this prompt.")
    raise EngineError(f"{path} answers HTTP {status}")


async def ask_count(server: HttpServer, path: str, fields: Mapping[str, msgspec.Raw]) -> int:
    """Ask an engine that answers ``{"count": …}``. Raises InvalidRequest, EngineError."""
    status, body = await server.ask("POST", path, body=fields, timeout_s=limits().engines.count_s)
    body = take_answer(path, status, body)
    return read_answer(body, _Counted, f"{path} answers with something else than a count").count


def read_reason(body: bytes) -> str:
    try:
        refusal = _refusal_decoder.decode(body)
    except UNREADABLE:
        return ""
    error = refusal.error
    reason = error if isinstance(error, str) else error.message if error is not None else refusal.message
    return reason[: limits().engines.said_chars]


# ---- the text format of Prometheus ----


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one scrape: name to values, with the labels of each."""

    found: dict[str, list[tuple[dict[str, str], float]]]

    def total(self, *names: str) -> float | None:
        """Return the sum over all labels of the first of ``names`` that is there, or None."""
        for name in names:
            if name in self.found:
                return sum(value for _, value in self.found[name])
        return None

    def count(self, *names: str) -> int | None:
        found = self.total(*names)
        return None if found is None else int(found)

    def labels(self, name: str) -> dict[str, str]:
        """Return the labels of the first sample called ``name``; nothing when there is none."""
        return next((labels for labels, _ in self.found.get(name, [])), {})


def read_samples(text: str, prefix: str) -> Samples:
    """Return the samples whose names begin with ``prefix``; buckets, other lines and values that are no number are left out."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    lines = (line for line in text.splitlines() if line.startswith(prefix) and "_bucket{" not in line)
    with contextlib.suppress(ValueError):  # what no longer follows the format is left out
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return Samples(found)
