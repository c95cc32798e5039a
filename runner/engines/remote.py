"""OpenAI-compatible servers of others: one model at a provider, and a server with all its models, such as Ollama's.

Nothing of ours reaches a provider but the body of the request and its key; nothing of the provider's account comes back: of
its headers a few pass, its refusals of our key are told by us, and its name for the model is put back into ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import math
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Final

import aiohttp
import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

from runner.definitions.fields import is_http_url
from runner.definitions.plan import LoadPlan, Progress, Report
from runner.engines.http import HttpServer, Listing
from runner.engines.http_engine import HttpEngine, fields_decoder, read_key, read_option
from runner.engines.llama_slots import Properties
from runner.engines.port import (
    CHAT,
    Call,
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    Health,
    LoopOwner,
)
from runner.errors import EngineError, EngineSilent, EngineUnavailable, InvalidRequest, ModalityUnsupported, RemoteRefused
from runner.limits import limits
from wire import clock
from wire.unreadable import UNREADABLE

log = logging.getLogger(__name__)

# ---- a server with all its models ----

# What llama.cpp's server has always said of who owns its models.
_OF_LLAMA_SERVER = "llamacpp"


class _Model(msgspec.Struct):
    id: str
    owned_by: object = None


class OpenAIServer:
    """The adapter. Its health check lists the models, so one that comes or goes is seen within ``poll_s``.

    ``url`` ends before ``/v1``. ``given``: the models its owner named, empty = those it lists; ``on_models`` hears of changes.
    """

    poll_s = 5.0
    restart_max_s = 2.0
    loop: LoopOwner | None = None
    pids: tuple[int, ...] = ()

    def __init__(self, url: str, *, key: str, given: Sequence[str], on_models: Callable[[], None]) -> None:
        # ``llama-server`` where the list of models tells: gateways keep from it what it would leave out without a word.
        self.name = "openai"
        # Which paths such a server answers only it can say, so every one that is for inference is passed on.
        self.capabilities = Capabilities(endpoints=())
        self._server = HttpServer()
        self._server.base_url = url
        self._server.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.stream = self._server.send
        """A request is passed on as it is."""
        self._given = list(given)
        self._listed: list[str] = []
        self._on_models = on_models

    @property
    def models(self) -> list[str]:
        return list(self._given) or list(self._listed)

    async def load(self, report: Report) -> None:
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
        self._server.close()

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        del request
        return FlushOutcome(FlushResult.NOT_SUPPORTED, "an OpenAI-compatible server has no call that clears its cache")

    async def stats(self) -> EngineStats:
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
        await asyncio.get_running_loop().create_future()

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        raise EngineError("the server counts no tokens")

    async def read_metrics(self) -> str:
        return ""

    async def _list_models(self) -> int:
        """Refresh the list; return the HTTP status. An answer that is no model list leaves the old one. Raises EngineError."""
        status, body = await self._server.ask("GET", "/v1/models")
        try:
            listed = msgspec.json.decode(body, type=Listing[_Model]).data if status == 200 else None
        except UNREADABLE:
            listed = None
        if listed is not None:
            is_llama = bool(listed) and all(entry.owned_by == _OF_LLAMA_SERVER for entry in listed)
            found = ("llama-server" if is_llama else "openai", list(dict.fromkeys(entry.id for entry in listed)))
            if found != (self.name, self._listed):
                self.name, self._listed = found
                self.capabilities = replace(self.capabilities, version=await self._ask_build() if is_llama else "")
                self._on_models()
        return status

    async def _ask_build(self) -> str:
        with contextlib.suppress(EngineError):
            properties = await self._server.ask_for("/props", Properties)
            return properties.version if properties is not None else ""
        return ""


# ---- one model at a provider ----

TRY_AGAIN: Final = frozenset({429, 502, 503, 504})
# Fields that only this node reads; providers refuse what they do not know.
NOT_TO_PROVIDER: Final = frozenset({
    "allow_remote", "beam_size", "decoding", "source_lang_code", "target_lang_code",
})  # fmt: skip
# Headers of the provider that pass: others name the owner's organisation, project and remaining budget.
TO_CLIENT: Final = frozenset(
    {"content-type", "content-length", "cache-control", "retry-after", "retry-after-ms", "x-request-id"}
)


class _Streamed(msgspec.Struct):
    """What of a request says how it is answered; a provider judges the types."""

    stream: object = None
    stream_options: object = None

    @property
    def wants_usage(self) -> bool:
        return isinstance(self.stream_options, dict) and self.stream_options.get("include_usage") is True


class _Message(msgspec.Struct):
    tool_calls: list[dict[str, object]] | None = None


class _Said(msgspec.Struct):
    message: dict[str, object]
    index: int = 0
    finish_reason: str | None = None


class _Whole(msgspec.Struct):
    choices: list[_Said]
    id: str = ""
    created: int = 0
    usage: dict[str, object] | None = None


def _say_as_stream(body: bytes, model: str, *, wants_usage: bool) -> bytes:
    """Return a whole chat completion as the chunks of a stream; nothing where it is none."""
    try:
        whole = msgspec.json.decode(body, type=_Whole)
        for said in whole.choices:
            calls = msgspec.convert(said.message, _Message).tool_calls
            if calls:  # a chunk numbers them
                said.message["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    except UNREADABLE:
        return b""
    head = {"id": whole.id, "object": "chat.completion.chunk", "created": whole.created, "model": model}
    chunks: list[dict[str, object]] = []
    for said in whole.choices:
        delta = {name: value for name, value in said.message.items() if value is not None}
        chunks.append({"choices": [{"index": said.index, "delta": delta, "finish_reason": None}]})
        chunks.append({"choices": [{"index": said.index, "delta": {}, "finish_reason": said.finish_reason or "stop"}]})
    if wants_usage and whole.usage is not None:
        chunks.append({"choices": [], "usage": whole.usage})
    return b"".join(b"data: " + msgspec.json.encode({**head, **chunk}) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


class _ProviderResponse(aiohttp.ClientResponse):
    """An answer that can be changed before anybody reads it."""

    def adopt(self, *, content_type: str | None = None, body: bytes | None = None) -> None:
        """Keep the headers that may pass; with ``body``, be an answer of just these bytes."""
        kept = CIMultiDict((name, value) for name, value in self._headers.items() if name.lower() in TO_CLIENT)
        if content_type is not None:
            kept["Content-Type"] = content_type
        if body is not None:
            kept["Content-Length"] = str(len(body))
            self._body = body
        self._headers = CIMultiDictProxy(kept)
        self._cache.pop("headers", None)


def make_remote(plan: LoadPlan, client: aiohttp.ClientSession) -> HttpEngine:
    server = HttpServer()
    remote = RemoteModel(plan, server, client)
    return HttpEngine(server, remote, remote, name="remote", poll_s=60.0, restart_max_s=300.0, check=remote.check)


class RemoteModel:
    """Loader and probe in one: there is nothing to load but the key."""

    is_attached = False
    has_metrics = False
    child = None

    def __init__(self, plan: LoadPlan, server: HttpServer, client: aiohttp.ClientSession) -> None:
        self._plan = plan
        self._client = client
        self._session: aiohttp.ClientSession | None = None
        self._server = server
        self._key = b""
        self._model = read_option(plan.options, "remote_model", str) or plan.model_id
        self._thinking = read_option(plan.options, "remote_thinking", str)
        self._check = read_option(plan.options, "remote_health_check", str) or "config_only"
        self._max_retries = read_option(plan.options, "remote_max_retries", int) or 0
        timeout_s = plan.options.get("remote_timeout_s", limits().engines.remote_silence_s)
        self._timeout_s = float(timeout_s) if isinstance(timeout_s, int | float) else limits().engines.remote_silence_s
        self._open: set[aiohttp.ClientResponse] = set()
        self._running = 0
        self.capabilities = Capabilities(endpoints=(CHAT,), function_calling=True, is_remote=True)

    async def load(self, report: Report) -> None:
        await self.unload(gently=False)
        report(Progress("reading the settings"))
        url = read_option(self._plan.options, "remote_base_url", str) or ""
        if not is_http_url(url):
            raise EngineError(
                f"{self._plan.model_id} needs remote_base_url, like https://api.example.com/v1, without credentials or query"
            )
        self._server.base_url = url.rstrip("/")
        self._server.headers = {"User-Agent": "muster"}
        self._key = read_key(self._plan, "remote_api_key_env").encode()
        if self._key:
            self._server.headers |= {"Authorization": f"Bearer {self._key.decode('ascii')}"}
        if self._check != "config_only":  # ``completion`` pays the provider for one token at each load
            report(Progress("asking the provider"))
            await (self._check_models() if self._check == "models" else self._check_completion())
        # A session of its own over the same connections: for its kind of response, and since some providers compress
        # whatever was asked for.
        self._session = aiohttp.ClientSession(
            connector=self._client.connector,
            connector_owner=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            response_class=_ProviderResponse,
            timeout=aiohttp.ClientTimeout(
                total=None, connect=min(limits().engines.remote_connect_s, self._timeout_s), sock_read=self._timeout_s
            ),
        )
        report(Progress("ready", 1.0))

    async def unload(self, *, gently: bool) -> None:
        del gently
        session, self._session = self._session, None
        for response in tuple(self._open):
            response.close()
        self._server.headers, self._key = {}, b""
        if session is not None:
            await session.close()

    @contextlib.asynccontextmanager
    async def send(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        """Also raises InvalidRequest, ModalityUnsupported before anything is sent; RemoteRefused when the provider refuses our
        key or sends us elsewhere; EngineUnavailable for what is no API.
        """
        if self._session is None:
            raise aiohttp.ClientConnectionError("the remote model is not loaded")
        if call.method != "POST" or call.path.partition("?")[0] != CHAT:
            raise ModalityUnsupported(f"{self._plan.model_id} answers {CHAT} only.", param="model")
        body = self._rewrite(call.body)
        self._running += 1
        response = None
        try:
            response = await self._send(self._session, body)
            self._open.add(response)
            await self._receive(response, streams=msgspec.json.decode(body, type=_Streamed))
            yield response
        finally:
            self._running -= 1
            if response is not None:
                self._open.discard(response)
                response.close()

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        return FlushOutcome(FlushResult.NOT_SUPPORTED, "what the provider caches is the provider's; nothing is kept here")

    async def read_stats(self) -> EngineStats:
        return EngineStats(running=self._running)

    async def check(self) -> Health:
        if self._check != "models":
            return Health.OK
        status, _ = await self._server.ask("GET", "/models", timeout_s=limits().engines.remote_health_s)
        return Health.OK if status in {HTTPStatus.OK, HTTPStatus.TOO_MANY_REQUESTS} else Health.SILENT

    async def _check_models(self) -> None:
        status, body = await self._server.ask("GET", "/models", timeout_s=self._timeout_s)
        self._expect_ok("/models", status)
        try:
            names = [entry.id for entry in msgspec.json.decode(body, type=Listing[_Model]).data]
        except UNREADABLE:
            return
        if names and self._model not in names:  # an empty list, or one in another shape, proves nothing
            most = limits().engines.names
            listed = ", ".join(sorted(names)[:most]) + (" and more" if len(names) > most else "")
            raise EngineError(f"the provider does not list {self._model}; it lists {listed}: correct remote_model")

    async def _check_completion(self) -> None:
        asked: dict[str, object] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        body = msgspec.json.decode(self._rewrite(msgspec.json.encode(asked)))
        status, _ = await self._server.ask("POST", "/chat/completions", body=body, timeout_s=self._timeout_s)
        self._expect_ok("/chat/completions", status)

    def _expect_ok(self, path: str, status: int) -> None:
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            name = self._plan.options.get("remote_api_key_env")
            raise EngineError(f"the provider does not accept the key in {name}" if name else "the provider asks for a key")
        if status != HTTPStatus.OK:
            raise EngineError(
                f"{self._server.base_url}{path} answers HTTP {status}: correct remote_base_url and remote_model, or use"
                " remote_health_check config_only"
            )

    def _rewrite(self, body: bytes) -> bytes:
        try:
            fields = fields_decoder.decode(body)
        except UNREADABLE:
            raise InvalidRequest("The request body must be a JSON object.") from None
        for name in NOT_TO_PROVIDER & fields.keys():
            del fields[name]
        fields["model"] = msgspec.Raw(msgspec.json.encode(self._model))
        if self._thinking is not None:
            fields["thinking"] = msgspec.Raw(msgspec.json.encode({"type": self._thinking}))
        return msgspec.json.encode(fields)

    async def _send(self, session: aiohttp.ClientSession, body: bytes) -> _ProviderResponse:
        url = f"{self._server.base_url}/chat/completions"
        headers = {**self._server.headers, "Accept-Encoding": "identity", "Content-Type": "application/json"}
        tries_left = self._max_retries
        while True:
            pause_s = _back_off(self._max_retries - tries_left)
            try:
                data = io.BytesIO(body) if len(body) > limits().engines.piece_bytes else body
                response = await session.post(url, data=data, headers=headers, allow_redirects=False)
            except (aiohttp.ServerTimeoutError, aiohttp.ClientSSLError):
                raise  # not tried again after silence: the provider may be at work, and would be paid twice
            except aiohttp.ClientConnectionError as error:
                if not tries_left:
                    raise
                reason = type(error).__name__
            else:
                if not isinstance(response, _ProviderResponse):
                    raise TypeError("the session makes responses of another class")
                if not tries_left or response.status not in TRY_AGAIN:
                    return response
                reason = f"HTTP {response.status}"
                asked_s = _read_retry_after(response.headers)
                pause_s = pause_s if asked_s is None else asked_s
                response.close()
            tries_left -= 1
            log.info("provider is asked again model=%s reason=%s in_s=%.1f", self._plan.model_id, reason, pause_s)
            await asyncio.sleep(pause_s)

    async def _receive(self, response: _ProviderResponse, streams: _Streamed) -> None:
        status, is_json = response.status, response.content_type.endswith("json")
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            # Its text may repeat a part of the key, and a client that reads 401 would doubt its own.
            log.error("provider refuses the key model=%s status=%s", self._plan.model_id, status)
            raise RemoteRefused(f"The provider of {self._plan.model_id} refuses this node (HTTP {status}): tell its owner.")
        if status < 200 or 300 <= status < 400:
            log.error("provider redirects model=%s status=%s", self._plan.model_id, status)
            raise RemoteRefused(
                f"The provider of {self._plan.model_id} is elsewhere now (HTTP {status}) and is not followed: tell the owner."
            )
        if status < 300 and response.content_type == "text/event-stream":
            response.adopt()
            return
        if status < 300 and not is_json:
            raise EngineUnavailable(f"The provider of {self._plan.model_id} does not answer as an API does.")
        body = await _read_all(response)
        if self._key:
            body = body.replace(self._key, b"(key)")
        if is_json and status < 300:
            # Some providers answer a streamed request in one piece.
            events = (
                _say_as_stream(body, self._plan.model_id, wants_usage=streams.wants_usage) if streams.stream is True else b""
            )
            if events:
                response.adopt(content_type="text/event-stream", body=events)
            else:
                response.adopt(body=self._rename(body))
        elif is_json:
            response.adopt(body=body)
        else:
            response.adopt(content_type="application/json", body=_describe(status))

    def _rename(self, body: bytes) -> bytes:
        try:
            fields = fields_decoder.decode(body)
        except UNREADABLE:
            return body
        if "model" not in fields:
            return body
        fields["model"] = msgspec.Raw(msgspec.json.encode(self._plan.model_id))
        return msgspec.json.encode(fields)


async def _read_all(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(64 * 1024):
        body += chunk
        if len(body) > limits().engines.answer_bytes:
            raise EngineUnavailable(f"The provider answers with more than {limits().engines.answer_bytes} bytes.")
    return bytes(body)


def _describe(status: int) -> bytes:
    error = {
        "message": f"The provider answers HTTP {status} and does not say why.",
        "type": "rate_limit_error" if status == HTTPStatus.TOO_MANY_REQUESTS else "api_error",
        "param": None,
        "code": "remote_error",
    }
    return msgspec.json.encode({"error": error})


def _back_off(tried: int) -> float:
    bounds = limits().engines
    pause_s = min(bounds.remote_pause_max_s, math.ldexp(bounds.remote_pause_first_s, tried))
    return pause_s * random.uniform(0.5, 1.0)  # noqa: S311  # spread, so that many requests do not come back at once


def _read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds a provider asks us to wait (RFC 9110 section 10.2.3), at most 30; None when it does not."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text):
        return min(limits().engines.remote_retry_after_s, float(text))
    try:
        wait_s = parsedate_to_datetime(text).timestamp() - clock.unix_s()
    except (ValueError, OverflowError):
        return None
    return min(limits().engines.remote_retry_after_s, max(0.0, wait_s))
