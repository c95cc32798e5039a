"""TabbyAPI, the server that ExLlamaV3 recommends: somebody else's, which holds one model at a time.

Its load call streams progress and goes on when nobody listens any more; asked for a second model it throws the first one
out without a word. So this adapter looks before it loads, and listens to the end even when the load was given up.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from http import HTTPStatus

import aiohttp
import msgspec

from runner.definitions.plan import LoadPlan, Progress, Report
from runner.engines.http import HttpResponse, HttpServer, read_answer
from runner.engines.http_engine import HttpEngine, bearer, poll, read_key, read_option, read_url, set_thinking
from runner.engines.llama_slots import end_with, is_object
from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    Call,
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    Health,
)
from runner.errors import EngineError
from runner.limits import limits
from wire import clock


class _Parameters(msgspec.Struct):
    max_seq_len: int | None = None


class _Card(msgspec.Struct):
    id: str
    parameters: _Parameters | None = None


class _Fault(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    """One event of a load: a module of one of the model's parts is placed, or the load failed."""

    model_type: str = "model"
    module: int = 0
    modules: int = 0
    status: str = ""
    error: _Fault | None = None


def make_tabby(plan: LoadPlan, client: aiohttp.ClientSession) -> HttpEngine:
    server = HttpServer()
    tabby = TabbyModel(plan, server, client)
    return HttpEngine(
        server, tabby, tabby, name="tabbyapi", poll_s=5.0, restart_max_s=60.0, check=tabby.check, give_up=tabby.give_up
    )


class TabbyModel:
    """Loader and probe in one. All tenants' prompts share its pages, and nothing in its API keeps them apart."""

    is_attached = True
    has_metrics = False
    child = None

    def __init__(self, plan: LoadPlan, server: HttpServer, client: aiohttp.ClientSession) -> None:
        self._plan = plan
        self._client = client
        self._server = server
        self._model = str(plan.options.get("server_model") or plan.model_id)
        self._admin: Mapping[str, str] = {}
        self._loading: asyncio.Task[None] | None = None
        self.capabilities = Capabilities(endpoints=(CHAT, COMPLETIONS), prefix_caching=True)

    async def load(self, report: Report) -> None:
        url = read_url(self._plan, example="http://127.0.0.1:5000")
        headers, admin = bearer(self._plan), read_key(self._plan, "server_admin_key_env")
        self._server.base_url, self._server.headers = url, headers
        self._admin = {"x-admin-key": admin} if admin else {}
        report(Progress("asking the server"))
        card = await self._loaded_model()
        if card is not None:
            self._check_is_ours(card)
            return
        load_s = limits().engines.tabby_load_s
        self._loading = asyncio.create_task(self._load(report))
        try:
            await asyncio.wait_for(asyncio.shield(self._loading), load_s)
        except EngineError:
            self._loading = None
            raise
        except TimeoutError:
            raise EngineError(f"{self._model} was not loaded within {load_s:.0f} s") from None
        self._loading = None

    async def give_up(self) -> None:
        # The server carries on with a load that nobody wants any more: its end is waited for, to undo it.
        loading, self._loading = self._loading, None
        if loading is None:
            return
        try:
            async with asyncio.timeout(limits().engines.tabby_give_up_s):
                await loading
                await self._unload()
        except (EngineError, TimeoutError):
            return
        finally:
            loading.cancel()

    async def unload(self, *, gently: bool) -> None:
        del gently  # the server ends running requests itself
        await self._unload()

    def send(self, call: Call) -> HttpResponse:
        if is_object(call.body):  # whatever it names: the server may be set up to load what it is asked for
            body = set_thinking(self._plan, call.body) if call.path.partition("?")[0] == CHAT else call.body
            call = replace(call, body=end_with(body, b'"model":' + msgspec.json.encode(self._model)))
        return self._server.send(call)

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        return FlushOutcome(
            FlushResult.NOT_SUPPORTED, f"TabbyAPI cannot flush {request.scope}; unload and load the model to empty its cache"
        )

    async def read_stats(self) -> EngineStats:
        return EngineStats()

    async def check(self) -> Health:
        card = await self._loaded_model()
        return Health.OK if card is not None and card.id == self._model else Health.SILENT

    async def _loaded_model(self) -> _Card | None:
        status, body = await self._server.ask("GET", "/v1/model")
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            return None
        if status != HTTPStatus.OK:
            raise EngineError(_refusal("which model it holds", status, body))
        return read_answer(body, _Card, "the server at server_url does not answer as TabbyAPI does")

    def _check_is_ours(self, card: _Card) -> None:
        if card.id != self._model:
            raise EngineError(f"the server holds {card.id!r} and has room for one model: unload (evict) that one first")
        length = card.parameters.max_seq_len if card.parameters is not None else None
        if None not in (length, self._plan.context_tokens) and length != self._plan.context_tokens:
            raise EngineError(
                f"the server holds {card.id!r} with a context of {length} tokens, not {self._plan.context_tokens}: "
                "unload it there first"
            )
        self.capabilities = replace(self.capabilities, context_tokens=length)

    async def _load(self, report: Report) -> None:
        within_s = limits().engines.tabby_settle_s
        try:
            async for event in self._load_events():
                if event.error is not None:
                    raise EngineError(f"the server could not load {self._model}: {event.error.message[:500]}")
                part = "" if event.model_type == "model" else f" of the {event.model_type} model"
                fraction = min(event.module / event.modules, 1.0) if event.modules > 0 else None
                # Further parts follow with counts of their own; only the model itself comes last.
                report(Progress(f"loading modules{part}", fraction if event.model_type == "model" else None))
        except (aiohttp.ClientError, OSError):
            within_s = limits().engines.tabby_load_s
            report(Progress("the connection broke, the server loads on"))
        card = await poll(self._loaded_model, within_s=within_s, every_s=limits().engines.tabby_poll_s)
        if card is None:
            raise EngineError(f"the server holds no model {within_s:.0f} s after it was asked to load {self._model}")
        self._check_is_ours(card)

    async def _load_events(self) -> AsyncIterator[_Event]:
        url = f"{self._server.base_url}/v1/model/load"
        headers = {**self._server.headers, **self._admin}
        bounds = limits().engines
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=bounds.connect_s, sock_read=bounds.tabby_silence_s)
        async with self._client.post(url, json=self._load_fields(), headers=headers, timeout=timeout) as response:
            if response.status != HTTPStatus.OK:
                body = await response.content.read(4096)
                raise EngineError(_refusal(f"to load {self._model}", response.status, body))
            async for line in response.content:
                if line.startswith(b"data:"):
                    yield read_answer(line[5:], _Event, "the server's load events are not those of TabbyAPI")

    def _load_fields(self) -> dict[str, object]:
        options = self._plan.options
        fields: dict[str, object] = {"model_name": self._model}
        if self._plan.context_tokens is not None:
            fields["max_seq_len"] = self._plan.context_tokens
        if (size := read_option(options, "exllama_cache_size", int)) is not None:
            fields["cache_size"] = size
        k_bits = read_option(options, "exllama_cache_k_bits", int)
        quant = read_option(options, "exllama_cache_quant", str)
        if k_bits is not None:
            quant = f"{k_bits},{read_option(options, 'exllama_cache_v_bits', int) or k_bits}"
        if quant is not None:
            fields["cache_mode"] = quant if "," in quant else f"{quant},{quant}"
        return fields

    async def _unload(self) -> None:
        card = await self._loaded_model()
        if card is None or card.id != self._model:  # what another has put in its place is left alone
            return
        status, body = await self._server.ask(
            "POST", "/v1/model/unload", timeout_s=limits().engines.tabby_unload_answer_s, headers=self._admin
        )
        if status not in (HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE):
            raise EngineError(_refusal(f"to unload {self._model}", status, body))
        bounds = limits().engines
        give_up_at = clock.monotonic() + bounds.tabby_unload_s
        while (card := await self._loaded_model()) is not None and card.id == self._model:
            if clock.monotonic() > give_up_at:
                raise EngineError(
                    f"the server still holds {self._model} {bounds.tabby_unload_s:.0f} s after it was told to unload it"
                )
            await asyncio.sleep(bounds.tabby_poll_s)


def _refusal(what: str, status: int, body: bytes) -> str:
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return f"the server does not accept our key ({what}): check server_api_key_env and server_admin_key_env"
    text = re.sub(r"\s+", " ", body.decode("utf-8", "replace"))[:300]
    return f"the server refuses {what}: {status} {text}"
