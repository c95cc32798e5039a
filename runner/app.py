"""The box: wires engine, relay, telemetry and gateways together, and leaves in order when told to."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Literal

import aiohttp

from runner import AGENT_VERSION
from runner.admission import Admission
from runner.config import BackendConfig, RunnerConfig, normalise_gateway
from runner.connection import GatewayLink
from runner.engines.llamacpp import LlamaCpp
from runner.engines.openai_server import OpenAIServer
from runner.engines.port import Engine
from runner.engines.supervisor import Supervisor
from runner.errors import ConfigError
from runner.relay import Relay
from runner.session import Stream
from runner.telemetry import open_gpu_probe
from wire.bridge import (
    Draining,
    ModeChange,
    ModelsUpdate,
    Register,
    RegisterAck,
    ReplicaInfo,
    Telemetry,
)
from wire.ids import new_uuid7

log = logging.getLogger(__name__)

MAX_GATEWAYS = 16
ENGINE_CONNECT_S = 5.0
ENGINE_KEEPALIVE_S = 4.0
"""Shorter than the 5 s after which llama.cpp and uvicorn close an idle connection, so none is reused half dead."""
FAREWELL_S = 1.0
SETTLE_S = 2.0


class Box:
    """One runner process. Implements ``connection.Host``."""

    def __init__(self, config: RunnerConfig, client: aiohttp.ClientSession) -> None:
        self._config = config
        self._client = client
        self._instance_id = new_uuid7().hex
        self._engine = _make_engine(config, client)
        self.supervisor = Supervisor(self._engine, silent_s=config.timeouts.engine_silent_s, on_change=self._engine_changed)
        slots = config.max_concurrent
        self._admission = Admission(slots=slots, queue_limit=max(2, slots))
        self.relay = Relay(client=client, upstream=self.supervisor, admission=self._admission, on_load=self._report_soon)
        self._probe = open_gpu_probe()
        self._links: dict[str, GatewayLink] = {}
        self._link_tasks: set[asyncio.Task[None]] = set()
        self._declared: list[str] = []
        self._mode: Literal["spare_on", "spare_off"] | None = None
        self.is_leaving = False

    # What connections ask for

    @property
    def load(self) -> int:
        """Requests that run or wait on this box."""
        return self.relay.load

    def describe(self) -> Register:
        """Return the registration of a new session."""
        return Register(
            worker_name=self._config.name,
            models=self.supervisor.models,
            max_concurrent=self._config.max_concurrent,
            current_load=self.load,
            instance_id=self._instance_id,
            agent_version=AGENT_VERSION,
            owner_name=self._config.owner or None,
            endpoints=list(self._engine.endpoints),
            gpus=self._probe.sample(),
            replicas=self._replicas(),
        )

    async def take_sample(self) -> Telemetry:
        """Return a fresh reading of the GPUs, the engine and the load."""
        gpus = await asyncio.to_thread(self._probe.sample) if self._probe.is_open else []
        return Telemetry(current_load=self.load, gpus=gpus, replicas=self._replicas(), last_error=self.supervisor.last_error)

    def list_models(self) -> ModelsUpdate:
        """Return the models that can be served now."""
        return ModelsUpdate(models=self.supervisor.models, current_load=self.load)

    def refresh_models(self) -> None:
        """Have the engine's models looked at now; a change is declared by itself."""
        self.supervisor.check_soon()

    def greet(self, link: GatewayLink, ack: RegisterAck) -> None:
        """Repeat the owner's wish to the gateway and dial the gateways it names."""
        if self._mode is not None:
            link.post(ModeChange(mode=self._mode, reason="owner"))
        link.post(self.list_models())
        link.report_soon()
        for url in ack.gateways:
            self._learn_gateway(url, named_by=link)

    def open_stream(self, stream: Stream, body: bytes, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Serve a stream."""
        self.relay.open(stream, body, send)

    def abort_stream(self, stream: Stream) -> None:
        """Stop serving a stream."""
        self.relay.abort(stream)

    def credit_stream(self, stream: Stream) -> None:
        """Let a stream go on."""
        self.relay.credit(stream)

    # Life of the process

    async def run(self, leave: asyncio.Event, hurry: asyncio.Event) -> None:
        """Serve until ``leave`` is set, then finish what runs; ``hurry`` cuts that short."""
        engine_task = asyncio.create_task(self.supervisor.run())
        try:
            # The tiny model loads within this, so that the first registration already names it.
            await self.supervisor.wait_settled(SETTLE_S)
            for url in self._config.gateways:
                self._add_link(url, give_up_s=None)
            waiter = asyncio.create_task(leave.wait())
            await asyncio.wait({waiter, engine_task}, return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
            if engine_task.done():
                await engine_task
            await self._drain(hurry)
        finally:
            await self.relay.close()
            for task in self._link_tasks:
                task.cancel()
            engine_task.cancel()
            await asyncio.gather(*self._link_tasks, engine_task, return_exceptions=True)
            self._probe.close()

    def set_mode(self, mode: Literal["spare_on", "spare_off"]) -> None:
        """Tell every gateway, now and after reconnects, that the owner lends the box or takes it back."""
        self._mode = mode
        log.info("owner changed mode mode=%s", mode)
        for link in self._links.values():
            link.post(ModeChange(mode=mode, reason="owner"))

    async def _drain(self, hurry: asyncio.Event) -> None:
        self.is_leaving = True
        log.info("leaving load=%s limit_s=%s", self.load, self._config.timeouts.drain_s)
        for link in self._links.values():
            link.post(Draining(reason="the box is shutting down"))
        idle, rush = asyncio.create_task(self.relay.wait_idle()), asyncio.create_task(hurry.wait())
        await asyncio.wait({idle, rush}, timeout=self._config.timeouts.drain_s, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done():
            log.warning("leaving with requests unfinished load=%s", self.load)
        idle.cancel()
        rush.cancel()
        await asyncio.gather(*(link.flush(FAREWELL_S) for link in self._links.values()))

    def _learn_gateway(self, url: str, *, named_by: GatewayLink) -> None:
        """Dial a gateway that another one named: never with less protection than the one that named it."""
        try:
            normal = normalise_gateway(url)
        except ConfigError:
            log.warning("gateway names an address that cannot be used gateway=%s", named_by.url)
            return
        if normal in self._links or self.is_leaving:
            return
        if named_by.url.startswith("wss:") and not normal.startswith("wss:"):
            log.warning("gateway names an unencrypted gateway, not dialled gateway=%s named=%s", named_by.url, normal)
        elif len(self._links) >= MAX_GATEWAYS:
            log.warning("too many gateways, not dialled named=%s", normal)
        else:
            log.info("another gateway named=%s by=%s", normal, named_by.url)
            self._add_link(normal, give_up_s=self._config.timeouts.learned_give_up_s)

    def _add_link(self, url: str, *, give_up_s: float | None) -> None:
        config = self._config
        link = GatewayLink(
            url, host=self, client=self._client, token=config.token, provider=config.provider, timeouts=config.timeouts
        )
        self._links[url] = link
        task = asyncio.create_task(link.run(give_up_s=give_up_s))
        self._link_tasks.add(task)
        task.add_done_callback(lambda done: self._drop_link(url, done))

    def _drop_link(self, url: str, task: asyncio.Task[None]) -> None:
        self._links.pop(url, None)
        self._link_tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("gateway connection failed unexpectedly gateway=%s", url, exc_info=error)

    def _engine_changed(self) -> None:
        models = self.supervisor.models
        if models != self._declared:
            self._declared = models
            for link in self._links.values():
                link.post(self.list_models())
        self._report_soon()

    def _report_soon(self) -> None:
        for link in self._links.values():
            link.report_soon()

    def _replicas(self) -> list[ReplicaInfo]:
        supervisor = self.supervisor
        return [
            ReplicaInfo(
                model=model,
                state=supervisor.state.value,
                engine=self._engine.name,
                slots=self._config.max_concurrent,
                active=self._admission.active,
                detail=supervisor.detail,
            )
            for model in supervisor.all_models
        ]


def _make_engine(config: RunnerConfig, client: aiohttp.ClientSession) -> Engine:
    if isinstance(config.engine, BackendConfig):
        return OpenAIServer(config.engine, client)
    return LlamaCpp(config.engine, slots=config.max_concurrent, client=client)


async def run_box(config: RunnerConfig) -> None:
    """Run until SIGTERM or SIGINT."""
    leave, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if leave.is_set():
            hurry.set()
        leave.set()

    client = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=ENGINE_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=ENGINE_CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers={"User-Agent"},
    )
    async with client:
        box = Box(config, client)
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop)
        loop.add_signal_handler(signal.SIGUSR1, box.set_mode, "spare_off")
        loop.add_signal_handler(signal.SIGUSR2, box.set_mode, "spare_on")
        await box.run(leave, hurry)
