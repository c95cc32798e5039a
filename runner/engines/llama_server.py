"""A llama-server that somebody else started: with one model, or in router mode, where models can be loaded and unloaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import msgspec

from runner.definitions.plan import LoadPlan, Progress, Report
from runner.engines.elsewhere import bearer, read_url, set_thinking
from runner.engines.http import HttpServer
from runner.engines.llama_probe import Findings, probe_slots
from runner.engines.llama_router import LlamaRouter
from runner.engines.llama_slots import PINNABLE, LlamaSlots, end_with, is_object, plain_call
from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    Call,
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    Health,
    Response,
)
from runner.engines.token_counts import ask_llama
from runner.errors import EngineError

log = logging.getLogger(__name__)


class _Listed(msgspec.Struct):
    id: str
    aliases: list[str] = []


class _ModelList(msgspec.Struct):
    data: list[_Listed] = []


class LlamaServer:
    """The adapter. Options: ``server_url``; ``server_api_key_env``, the name of a variable with its key; ``server_model``,
    what the server calls the model where that is not our name for it.
    """

    name = "llama-server"
    poll_s = 5.0
    restart_max_s = 30.0

    def __init__(self, plan: LoadPlan, client: aiohttp.ClientSession) -> None:
        self._plan = plan
        self._model = str(plan.options.get("server_model") or plan.model_id)
        self._server = HttpServer(client)
        self._router: LlamaRouter | None = None
        self._slots: LlamaSlots | None = None
        self._findings = Findings()
        self._is_loaded = False
        self._capabilities = Capabilities((CHAT, COMPLETIONS, RESPONSES, MESSAGES), prefix_caching=True)

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; whether it keeps tenants apart is found out when it is loaded."""
        return self._capabilities

    @property
    def pids(self) -> tuple[int, ...]:
        """None is ours."""
        return ()

    async def load(self, report: Report) -> None:
        """Have a router load the model, or see that a plain server has it. Raises EngineError."""
        self._is_loaded = False
        self._server.base_url = read_url(self._plan, example="http://127.0.0.1:8080")
        self._server.headers = {"Connection": "close", **bearer(self._plan)}
        report(Progress("asking the server"))
        is_router = await self._ask_is_router()
        self._router = LlamaRouter(self._server, self._model) if is_router else None
        if self._router is not None:
            await self._router.load(report)
        else:
            await self._find_model()
        try:
            report(Progress("trying its slots"))
            await self._meet()
        except BaseException:
            if self._router is not None:
                await self._router.give_up()
            raise
        self._is_loaded = True

    async def unload(self, *, gently: bool) -> None:
        """Have a router unload the model, and see that it did. Raises EngineError when it keeps it.

        A plain server is not ours to stop: asked gently that is an error and it stays in use, else it is just let go.
        """
        if not self._is_loaded:
            return
        if self._router is not None:
            await self._router.unload()
        elif gently:
            raise EngineError(
                f"{self._server.base_url} serves this one model for as long as it runs and is not ours to stop: "
                "stop it there, or start it in router mode (llama-server without a model)"
            )
        self._is_loaded = False
        self._server.close()

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """Erase the slots in question, where the server was seen to forget what is erased."""
        if not self._is_loaded:
            return FlushOutcome(FlushResult.NOT_SUPPORTED, "the model is not loaded")
        if self._slots is None or not self._findings.erases:
            return FlushOutcome(FlushResult.NOT_SUPPORTED, self._findings.detail)
        return await self._slots.flush(request)

    async def stats(self) -> EngineStats:
        """Return the server's numbers; an empty value when it does not answer or does not tell."""
        if not self._is_loaded:
            return EngineStats()
        reader = self._slots or LlamaSlots(self._server, 1, model=self._routed_model)
        try:
            return await reader.read_stats()
        except EngineError:
            return EngineStats()

    async def read_metrics(self) -> str:
        """Return the server's ``/metrics``, an empty text when they do not come; a router's would be of another model."""
        return await self._server.read_metrics() if self._is_loaded and self._router is None else ""

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[Response]:
        """Send a call, pinned to a slot of its tenant's where the server keeps slots apart.

        Raises aiohttp.ClientError, OSError.
        """
        if not self._is_loaded:
            raise aiohttp.ClientConnectionError("the model is not loaded")
        path = call.path.partition("?")[0]
        call = self._address(call, path)
        async with self._slots.send(call) if self._slots else self._server.send(plain_call(call)) as response:
            yield response

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        """Ask the server, under the name that a router knows the model by. Raises InvalidRequest, EngineError."""
        if not self._is_loaded:
            raise EngineError("the model is not loaded")
        if self._router is not None:
            fields = {**fields, "model": msgspec.Raw(msgspec.json.encode(self._model))}
        return await ask_llama(self._server, fields)

    async def health(self) -> Health:
        """Ask ``/health``, of a router also whether it still has the model loaded."""
        if not self._is_loaded:
            return Health.UNREACHABLE
        health = await self._server.check()
        if health is not Health.OK or self._router is None:
            return health
        try:
            return Health.OK if (await self._router.ask_status()).is_loaded else Health.UNREACHABLE
        except EngineError:
            return Health.SILENT

    async def wait_gone(self) -> None:
        """Never return: only the health check can tell."""
        await asyncio.get_running_loop().create_future()

    @property
    def _routed_model(self) -> str | None:
        return self._model if self._router is not None else None

    async def _ask_is_router(self) -> bool:
        """Return whether it lists models with their state, as only a router does."""
        status, body = await self._server.ask("GET", "/models")
        if status in {401, 403}:
            raise EngineError(f"{self._server.base_url} refuses the key (HTTP {status}): see server_api_key_env")
        if status != 200:
            raise EngineError(f"{self._server.base_url}/models answers HTTP {status}: is it a llama-server?")
        return LlamaRouter.is_one(body)

    async def _find_model(self) -> None:
        """Raise EngineError unless a plain server is healthy and serves the model."""
        if await self._server.check() is not Health.OK:
            raise EngineError(f"{self._server.base_url}/health does not answer 200: it may still be loading")
        _, body = await self._server.ask("GET", "/v1/models")
        try:
            listed = msgspec.json.decode(body, type=_ModelList).data
        except (msgspec.DecodeError, UnicodeDecodeError):
            listed = []
        names = {name for model in listed for name in (model.id, *model.aliases)}
        if self._model not in names:
            found = ", ".join(sorted(names)) or "nothing"
            raise EngineError(f"{self._server.base_url} serves {found}, not {self._model}: set server_model to its name there")

    async def _meet(self) -> None:
        """Ask the loaded model what it is, and try whether slots keep prompts apart."""
        properties = await LlamaSlots(self._server, 1, model=self._routed_model).read_properties()
        slots = LlamaSlots(self._server, properties.total_slots, model=self._routed_model)
        self._findings = await self._try_slots(slots)
        self._slots = slots if self._findings.isolates else None
        if self._findings.detail:
            log.warning("llama-server %s: %s", self._server.base_url, self._findings.detail)
        # What a template is told does not reach it from Messages and Responses here: those are better translated.
        others = (
            () if self._plan.options.get("enable_thinking") is not None else (RESPONSES, *([] if self._slots else [MESSAGES]))
        )
        self._capabilities = Capabilities(
            # A call to /v1/messages cannot be pinned: it would read the slots of others.
            endpoints=(CHAT, COMPLETIONS, *others, TOKENIZE),
            private_endpoints=(RESPONSES,),  # its events lack the numbers and the whole object that SDKs go by
            version=properties.version,
            max_inflight=properties.total_slots,
            context_tokens=properties.context_tokens,
            prefix_caching=True,
            reports_cached_tokens=True,
            isolates_tenants=self._findings.isolates,
            flushes_cache=self._findings.erases,
            reports_progress=self._router is not None,
            counts_tokens=True,
            function_calling=properties.chat_template_caps.supports_tools,
            vision_input=properties.modalities.vision,
            audio_input=properties.modalities.audio,
        )

    async def _try_slots(self, slots: LlamaSlots) -> Findings:
        try:
            shown = await slots.list_slots()
        except EngineError as error:
            return Findings(detail=str(error))
        if shown is None:
            return Findings(detail="the server does not show its slots: start it with --slots")
        if any(slot.is_processing for slot in shown):
            return Findings(detail="the server was busy with requests of others when it was to be tried")
        return await probe_slots(self._server, model=self._routed_model)

    def _address(self, call: Call, path: str) -> Call:
        """Return the call with the model's name as the router knows it; private also where slots are not pinned."""
        if call.method != "POST" or not is_object(call.body):
            return call
        if path == CHAT:
            call = replace(call, body=set_thinking(self._plan, call.body))
        members = []
        if self._router is not None:
            members.append(b'"model":' + msgspec.json.encode(self._model))
        if self._slots is None and call.cache_mode == "none" and path in PINNABLE:
            members.append(b'"cache_prompt":false')
        return replace(call, body=end_with(call.body, b",".join(members))) if members else call
