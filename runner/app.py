"""The node: its parts, its gateways and its own HTTP port, what it tells of itself, and leaving in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Literal, assert_never

import aiohttp

from runner import AGENT_VERSION
from runner.config import RunnerConfig, normalise_gateway, settle_api
from runner.connection import GatewayLink, GatewaySocket
from runner.engines.port import EngineMaker, make_engine
from runner.errors import ConfigError, DownloadFailed, InvalidSettings, SettingsConflict
from runner.ledger.database import LedgerError
from runner.limits import limits
from runner.operations.commands import Commands
from runner.parts import Parts, Phase, assemble
from runner.relay import Relay
from runner.report import list_endpoints, list_facts, list_replicas, read_memory
from runner.session import Instruction
from runner.system import watch_signals
from runner.telemetry import Telemetry as NodeTelemetry
from runner.telemetry import open_telemetry
from runner.telemetry.log import LogRing
from runner.tls import ServerTls, trust_also
from wire import clock
from wire.bridge import (
    CertificateRequest,
    CheckpointOffer,
    Draining,
    GovernanceReport,
    HubAnswer,
    HubQuery,
    LogQuery,
    ModeChange,
    ModelFacts,
    ModelsUpdate,
    NodeAuthorities,
    NodeCertificate,
    OpCommand,
    OpQuery,
    PolicyOffer,
    Register,
    RegisterAck,
    Telemetry,
    TicketKeys,
    UsageReport,
    UsageTaken,
)
from wire.ids import new_uuid7

log = logging.getLogger(__name__)


class Runner:
    """One runner process towards its gateways. Implements ``connection.Host``."""

    def __init__(
        self, config: RunnerConfig, client: aiohttp.ClientSession, *, engines: EngineMaker = make_engine,
        telemetry_of_node: Callable[[], NodeTelemetry] = open_telemetry,
    ) -> None:  # fmt: skip
        self._config = config
        self._client = client
        self._trust = None if config.gateway_ca is None else trust_also(config.gateway_ca)
        self._engines = engines
        self._telemetry_of_node = telemetry_of_node
        self._instance_id = new_uuid7().hex
        self._links: dict[str, GatewayLink] = {}
        self._wakes: list[asyncio.Event] = []
        """Of the links: each then reports."""
        self._link_tasks: set[asyncio.Task[None]] = set()
        self._declared: list[str] = []
        self._is_telling = False
        self._mode: Literal["spare_on", "spare_off"] | None = None
        self._parts: Parts | None = None
        self._commands: Commands | None = None
        self._offers: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._relay: Relay | None = None
        self._settled = asyncio.Event()
        self._facts: list[ModelFacts] = []
        self._facts_key: list[tuple[object, ...]] | None = None
        self._facts_at = 0.0
        self._log = LogRing(secrets=(config.token,))
        self.is_leaving = False

    @property
    def parts(self) -> Parts:
        assert self._parts is not None
        return self._parts

    @property
    def relay(self) -> Relay:
        assert self._relay is not None
        return self._relay

    # What connections ask for

    @property
    def load(self) -> int:
        """Requests that run or wait on this node: those of its gateways, and those of its own port."""
        return self.relay.load + self.parts.serving.own_load

    def describe(self) -> Register:
        registry, sample = self.parts.pool.registry, self._sample()
        return Register(
            worker_name=self._config.name,
            models=registry.ready_ids(),
            max_concurrent=self._config.max_concurrent,
            current_load=sample.current_load,
            instance_id=self._instance_id,
            agent_version=AGENT_VERSION,
            owner_name=self._config.owner or None,
            endpoints=list_endpoints(registry.models),
            gpus=sample.gpus,
            replicas=sample.replicas,
            available=sample.available,
            memory=sample.memory,
            governance=self.parts.governance.describe(),
            ticket_url=self.parts.tickets.url,
            takes_certificates=self.parts.tls is not None and self.parts.tls.is_from_gateways,
            tells_log=self._config.tells_log,
            searches_hub=self.parts.pool.registry.library.has_hub,
        )

    async def take_sample(self) -> Telemetry:
        await self.parts.look()
        await self._look_at_governance()
        facts = await self._list_facts()
        sample = self._sample()  # nothing waits behind it: the load that it tells is that of the moment it is sent
        if sample.memory is not None:
            sample.memory.models = facts
        return sample

    async def _list_facts(self) -> list[ModelFacts]:
        models = self.parts.pool.registry.models
        key: list[tuple[object, ...]] = [
            (model.model_id, model.state, model.definition, len(model.replicas)) for model in models
        ]
        now = clock.monotonic()
        # They are put together anew when a model changed, and else twice a minute: that reads the ledger for each model.
        if key != self._facts_key or now - self._facts_at >= limits().connection.facts_s:
            self._facts_key, self._facts_at = key, now
            try:
                self._facts = await list_facts(self.parts, most=limits().connection.facts)
            except LedgerError as error:  # what was told before holds; a node must not fall silent for a full disk
                log.warning("facts of the models are not told error=%s", error)
        return self._facts

    def _sample(self) -> Telemetry:
        parts = self.parts
        reading, models = parts.reading, parts.pool.registry.models
        return Telemetry(
            current_load=self.load,
            gpus=reading.gpus if reading is not None else [],
            replicas=list_replicas(models, parts.desired.models, parts.desired.gave_up_ms),
            available=parts.pool.registry.available_ids()[: limits().connection.available],
            memory=read_memory(reading, models),
            queue_depth=parts.budget.depth,
            avg_wait_ms=round(parts.budget.avg_wait_ms),
            last_error=next((model.last_error for model in models if model.last_error), parts.attached_error),
        )

    def list_models(self) -> ModelsUpdate:
        return ModelsUpdate(models=self.parts.pool.registry.ready_ids(), current_load=self.load)

    def refresh_models(self) -> None:
        self.parts.refresh_attached()

    def greet(self, link: GatewayLink, ack: RegisterAck) -> None:
        """Repeat the owner's wish to the gateway and dial the gateways it names."""
        if self._mode is not None:
            link.post(ModeChange(mode=self._mode, reason="owner"))
        tickets = self.parts.tickets
        link.takes_usage = ack.ticket_keys is not None
        if ack.ticket_keys is not None:
            tickets.hear_audience(ack.node_id or ack.worker_id)
            tickets.hear_keys(ack.ticket_keys)
            tickets.has_news.set()
        if ack.time_ms is not None:
            tickets.hear_time(ack.time_ms)
        link.post(self.list_models())
        link.wake.set()
        for url in ack.gateways:
            self._learn_gateway(url, named_by=link)

    def instruct(self, link: GatewayLink, instruction: Instruction) -> None:
        """Carry out a command, answer a query, judge an offer; nothing here waits for that."""
        assert self._commands is not None
        match instruction:
            case OpCommand():
                self._commands.take(instruction, link.post)
            case OpQuery():
                self._commands.query(instruction, link.post)
            case PolicyOffer() | CheckpointOffer():
                self._judge_soon(link, instruction)
            case TicketKeys():
                self.parts.tickets.hear_keys(instruction.keys)
            case UsageTaken():
                self._spawn(self._take_receipts(instruction.taken))
            case NodeAuthorities():
                self._hear_authorities(link, instruction.certificates)
            case NodeCertificate():
                self._spawn(self._take_certificate(instruction))
            case LogQuery() if self._config.tells_log:
                if (tail := self._log.answer(instruction.query_id)) is not None:
                    link.post(tail)
            case HubQuery():
                self._spawn(self._search_hub(link, instruction))
            case LogQuery():
                log.warning("gateway asks for the log, which the owner keeps here gateway=%s", link.url)
            case _:
                assert_never(instruction)

    async def _search_hub(self, link: GatewayLink, query: HubQuery) -> None:
        answer = HubAnswer(query_id=query.query_id)
        try:
            answer.models = await self.parts.pool.registry.library.search(query.text)
        except DownloadFailed as error:
            answer.error = str(error)[: limits().connection.detail_chars]
        link.post(answer)

    def hear_time(self, server_ms: int) -> None:
        """Take the server's clock, by which tickets count."""
        self.parts.tickets.hear_time(server_ms)

    async def _take_receipts(self, taken: dict[str, str]) -> None:
        try:
            await self.parts.tickets.take_receipts(taken)
            if len(taken) >= limits().tickets.reports:
                self.parts.tickets.has_news.set()  # there may be more than one message holds
        except LedgerError as error:  # they are told again, which does no harm
            log.warning("reports of tickets are not forgotten error=%s", error)

    async def _report_usage(self) -> None:
        """Tell a gateway what became of requests with tickets, as soon as there is one, until it says that it knows."""
        tickets = self.parts.tickets
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits().tickets.report_s):
                    await tickets.has_news.wait()
            tickets.has_news.clear()
            link = next((link for link in self._links.values() if link.takes_usage), None)
            try:
                reports = await tickets.list_reports() if link is not None else []
            except LedgerError as error:
                log.warning("reports of tickets cannot be read error=%s", error)
                continue
            if link is not None and reports:
                link.post(UsageReport(reports=reports))

    def _hear_authorities(self, link: GatewayLink, certificates: str) -> None:
        tls = self.parts.tls
        if tls is not None:
            link.names_authorities = True
            tls.hear_authorities(certificates)
            link.post(tls.ask() or tls.describe())

    async def _take_certificate(self, answer: NodeCertificate) -> None:
        tls = self.parts.tls
        try:
            is_taken = tls is not None and await tls.take(answer)
        except OSError as error:
            log.error("certificate cannot be written down: %s", error)  # noqa: TRY400  # text for the owner
            return
        if tls is not None and is_taken:
            self._say_certificate(tls.describe())

    def _say_certificate(self, said: CertificateRequest) -> None:
        """Tell every gateway how it stands, and one of them what is wished for."""
        for link in self._links.values():
            if link.names_authorities:
                link.post(said)
                said = CertificateRequest(is_held=said.is_held)

    async def _watch_tls(self, tls: ServerTls) -> None:
        was_held = tls.is_held
        while True:
            await asyncio.sleep(limits().tls.look_s)
            await tls.reload_files()
            if (asked := tls.ask()) is not None or tls.is_held != was_held:
                self._say_certificate(asked or tls.describe())
            was_held = tls.is_held

    def _judge_soon(self, link: GatewayLink, offer: PolicyOffer | CheckpointOffer) -> None:
        if len(self._offers) < limits().connection.offers:
            self._offers.add(task := asyncio.create_task(self._judge(link, offer)))
            task.add_done_callback(self._offers.discard)

    async def _judge(self, link: GatewayLink, offer: PolicyOffer | CheckpointOffer) -> None:
        governance = self.parts.governance
        before = governance.standing
        try:
            if isinstance(offer, PolicyOffer):
                report = await governance.take_policies(offer)
            else:
                report = await governance.take_checkpoint(offer)
        except LedgerError as error:
            log.error("offer of the control plane cannot be judged: %s", error)  # noqa: TRY400  # text for the owner
            return
        if report is not None:
            link.post(report)
            if governance.standing != before:
                self._tell_governance(report, but=link)

    async def _look_at_governance(self) -> None:
        report = await self.parts.governance.look()
        if report is not None:
            self._tell_governance(report)

    def _tell_governance(self, report: GovernanceReport, *, but: GatewayLink | None = None) -> None:
        for link in self._links.values():
            if link is not but:
                link.post(report)

    async def _watch_governance(self) -> None:
        while True:
            await asyncio.sleep(limits().connection.heartbeat_s)
            await self._look_at_governance()

    # Life of the process

    async def run(self, leave: asyncio.Event, hurry: asyncio.Event) -> None:
        """Serve until ``leave`` is set, then finish what runs; ``hurry`` cuts that short. Raises ConfigError."""
        async with AsyncExitStack() as stack:
            stack.enter_context(self._log.attached())
            parts = assemble(
                self._config, self._client, on_change=self._models_changed, wakes=self._wakes, engines=self._engines,
                telemetry_of_node=self._telemetry_of_node,
            )  # fmt: skip
            self._parts = await stack.enter_async_context(parts)
            if self._mode is not None:  # said while the ledger was being opened
                self._note_mode("owner", is_reclaimed=self._mode == "spare_off")
            elif self._parts.desired.is_reclaimed_by_owner:
                self._mode = "spare_off"  # until the owner says otherwise, also over a restart
            self._parts.tickets.reclaim(is_reclaimed=self._mode == "spare_off")
            self._relay = Relay(self._parts.serving.open)
            self._commands = Commands(self._parts.operations, self._parts.seek, self._parts.reload_settings)
            stack.push_async_callback(self._commands.close)
            stack.push_async_callback(self._hang_up)
            self._spawn(self._watch_governance())
            if self._parts.tls is not None:
                self._spawn(self._watch_tls(self._parts.tls))
            if await self._parts.tickets.has_books():
                self._spawn(self._report_usage())
            if self._config.api is not None:
                from runner.api.server import serve_api  # its libraries weigh more than the rest of a node without a port

                service = self._parts.settings.service
                api = settle_api(self._config.api, host=service.host, port=service.port)
                await stack.enter_async_context(serve_api(self._parts, api))
            await self._parts.start_models()
            await self._wait_settled()
            self._parts.phase = Phase.SERVING
            for url in self._config.gateways:
                self._add_link(url, give_up_s=None)
            await leave.wait()
            self._parts.refuse_new()
            await self._drain(hurry)

    def set_mode(self, mode: Literal["spare_on", "spare_off"]) -> None:
        """Tell every gateway, now and after reconnects, that the owner lends the node or takes it back."""
        self._mode = mode
        log.info("owner changed mode mode=%s", mode)
        if self._parts is not None:
            self._parts.tickets.reclaim(is_reclaimed=mode == "spare_off")
        for link in self._links.values():
            link.post(ModeChange(mode=mode, reason="owner"))
        self._note_mode("owner", is_reclaimed=mode == "spare_off")

    def hear_mode(self, *, is_reclaimed: bool, drain_s: int | None) -> None:
        """Take down what the control plane holds of the owner's word, for the next start, and when a drain cuts what runs."""
        self.parts.tickets.reclaim(is_reclaimed=is_reclaimed)
        self.parts.tickets.drain(drain_s)
        self._note_mode("control", is_reclaimed=is_reclaimed)

    def _note_mode(self, said_by: str, *, is_reclaimed: bool) -> None:
        if self._parts is not None:
            self._spawn(self._write_mode(said_by, is_reclaimed=is_reclaimed))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)

    async def _write_mode(self, said_by: str, *, is_reclaimed: bool) -> None:
        try:
            await self.parts.desired.hear_mode(said_by=said_by, is_reclaimed=is_reclaimed)
        except LedgerError as error:
            log.error("mode cannot be written down: %s", error)  # noqa: TRY400  # text for the owner

    async def reload(self) -> None:
        """Read the settings files again; what is wrong with them goes to the log."""
        if self._parts is None:
            return  # it is about to read them for the first time
        if self._parts.tls is not None:
            await self._parts.tls.reload_files()
        try:
            change = await self.parts.reload_settings()
        except (InvalidSettings, SettingsConflict) as error:
            log.error("settings were not taken over: %s", error)  # noqa: TRY400  # text for the owner
        else:
            log.info("settings taken over added=%s removed=%s updated=%s", change.added, change.removed, change.updated)

    async def _wait_settled(self) -> None:
        # What starts quickly is then named by the first registration already.
        give_up_at = clock.monotonic() + limits().connection.settle_s
        while clock.monotonic() < give_up_at and not self.parts.is_settled:
            self._settled.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.01, give_up_at - clock.monotonic())):
                    await self._settled.wait()

    async def _hang_up(self) -> None:
        await self.relay.close()
        tasks = [*self._link_tasks, *self._offers, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, hurry: asyncio.Event) -> None:
        self.is_leaving = True
        log.info("stopping: %s requests running, up to %g s", self.load, limits().connection.drain_s)
        for link in self._links.values():
            link.post(Draining(reason="the node is shutting down"))
        idle, rush = asyncio.create_task(self._wait_idle()), asyncio.create_task(hurry.wait())
        await asyncio.wait({idle, rush}, timeout=limits().connection.drain_s, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done():
            log.warning("leaving with requests unfinished load=%s", self.load)
        idle.cancel()
        rush.cancel()
        await asyncio.gather(*(link.flush(limits().connection.farewell_s) for link in self._links.values()))

    async def _wait_idle(self) -> None:
        await self.parts.serving.wait_idle()
        await self.relay.wait_idle()  # an answer, or its end, leaves for a gateway once our accounts of it are closed

    def _learn_gateway(self, url: str, *, named_by: GatewayLink) -> None:
        try:
            normal = normalise_gateway(url)
        except ConfigError:
            log.warning("gateway names an address that cannot be used gateway=%s", named_by.url)
            return
        if normal in self._links or self.is_leaving:
            return
        # Never with less protection than the gateway that named it.
        if named_by.url.startswith("wss:") and not normal.startswith("wss:"):
            log.warning("gateway names an unencrypted gateway, not dialled gateway=%s named=%s", named_by.url, normal)
        elif len(self._links) >= limits().connection.gateways:
            log.warning("too many gateways, not dialled named=%s", normal)
        else:
            log.info("another gateway named=%s by=%s", normal, named_by.url)
            self._add_link(normal, give_up_s=limits().connection.learned_give_up_s)

    def _add_link(self, url: str, *, give_up_s: float | None) -> None:
        config = self._config
        link = GatewayLink(
            url, host=self, client=self._client, token=config.token, provider=config.provider, trust=self._trust,
            speaks_bridge=config.speaks_bridge,
        )  # fmt: skip
        self._links[url] = link
        self._wakes.append(link.wake)
        task = asyncio.create_task(link.run(give_up_s=give_up_s))
        self._link_tasks.add(task)
        task.add_done_callback(lambda done: self._drop_link(url, done))

    def _drop_link(self, url: str, task: asyncio.Task[None]) -> None:
        link = self._links.pop(url, None)
        if link is not None:
            self._wakes.remove(link.wake)
        self._link_tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("gateway connection failed unexpectedly gateway=%s", url, exc_info=error)

    def _models_changed(self) -> None:
        self._settled.set()
        if self._parts is not None and not self._is_telling:
            self._is_telling = True  # once for all changes of one turn of the loop
            asyncio.get_running_loop().call_soon(self._declare)

    def _declare(self) -> None:
        self._is_telling = False
        models = self.parts.pool.registry.ready_ids()
        if models != self._declared:
            self._declared = models
            sample = self._sample()
            for link in self._links.values():
                # In this order: what a new model answers is known before it is routed.
                link.post(sample)
                link.post(self.list_models())
        self._report_soon()

    def _report_soon(self) -> None:
        for wake in self._wakes:
            wake.set()


async def run_runner(config: RunnerConfig) -> None:
    """Run until SIGTERM or SIGINT. Raises ConfigError for settings files or a data folder that cannot be used."""
    leave, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()

    def stop() -> None:
        if leave.is_set():
            hurry.set()
        leave.set()

    client = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=limits().engines.keepalive_s),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits().engines.connect_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers={"User-Agent"},
        ws_response_class=GatewaySocket,
    )
    async with client:
        runner = Runner(config, client)

        def reload() -> None:
            reloads.add(task := asyncio.create_task(runner.reload()))
            task.add_done_callback(reloads.discard)

        lend, take_back = partial(runner.set_mode, "spare_on"), partial(runner.set_mode, "spare_off")
        watch_signals(loop, stop, {"SIGHUP": reload, "SIGUSR1": take_back, "SIGUSR2": lend})
        await runner.run(leave, hurry)
