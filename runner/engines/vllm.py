"""vLLM: its own API server in a child process, spoken to over a Unix socket that only we can reach."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec

from runner.definitions.plan import LoadPlan, Progress, Report
from runner.engines.http import HttpResponse, HttpServer, Listing, read_answer
from runner.engines.http_engine import (
    HttpEngine,
    Loader,
    Samples,
    ServerProcess,
    Start,
    ask_count,
    fields_decoder,
    poll,
    read_reason,
    read_samples,
)
from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    Call,
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    FlushScope,
    Priority,
)
from runner.engines.ray import RayHead
from runner.engines.vllm_command import (
    StartupLog,
    build_command,
    build_environment,
    caches_prefixes,
    can_sleep,
    find_python,
    is_pooling,
    sees_pictures,
    weights_bytes,
)
from runner.errors import EngineError, EngineUnavailable, InvalidRequest, ModalityUnsupported
from runner.limits import limits
from wire.traces import TRACE_HEADERS
from wire.unreadable import UNREADABLE

# vLLM serves lower numbers first.
PRIORITIES: dict[Priority, int] = {"high": -10, "normal": 0, "low": 10}
# Fields that steer the engine and not the answer; a client's request id could collide with another's.
_OURS_ALONE = ("request_id", "kv_transfer_params", "ec_transfer_params")


class Salts:
    """The salts of one engine, and which of them a flush has made void."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._epochs: dict[tuple[str | None, str | None], int] = {}

    def salt_for(self, call: Call) -> str:
        """Return the salt of a request: stable within tenant and tag, unique when nothing is to be reused."""
        if call.cache_mode == "none":
            return secrets.token_hex(16)
        tenant, tag = call.tenant, call.cache_tag
        epochs = [self._epochs.get(key, 0) for key in ((tenant, None), (None, tag), (tenant, tag))]
        # As JSON, so that no two pairs of tenant and tag run together into the same text.
        named = msgspec.json.encode([tenant, tag, *epochs])
        return hmac.new(self._key, named, hashlib.sha256).hexdigest()

    def forget(self, request: FlushRequest) -> None:
        # What was cached under a salt that is void is never found again.
        if request.scope in {FlushScope.ALL, FlushScope.MODEL} or len(self._epochs) >= limits().engines.vllm_epochs:
            self._key = secrets.token_bytes(32)
            self._epochs.clear()
            return
        tag = request.tag if request.scope is FlushScope.TAG else None
        key = (request.tenant, tag)
        self._epochs[key] = self._epochs.get(key, 0) + 1


def seal_body(body: bytes, *, salt: str, priority: Priority) -> bytes:
    """Return the body with our salt and priority in place of whatever the client said about them.

    The values of all other fields stay byte for byte. Raises InvalidRequest when it is no JSON object.
    """
    try:
        fields = fields_decoder.decode(body)
    except UNREADABLE:
        # vLLM reads some texts that are none, such as UTF-16, and would find a client's own salt in them.
        raise InvalidRequest("the body must be a JSON object in UTF-8") from None
    for name in _OURS_ALONE:
        fields.pop(name, None)
    fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
    fields["priority"] = msgspec.Raw(msgspec.json.encode(PRIORITIES[priority]))
    return msgspec.json.encode(fields)


_BUSY = FlushOutcome(FlushResult.REFUSED_BUSY, "requests are running; try again when none is")
_TOKENIZER_PATHS = frozenset({"/tokenize", "/detokenize"})
_LISTS = frozenset({"/v1/models"})
# What of a request decides how long its prompt is; a template of the client's own is refused where it is used.
_COUNTED = frozenset({
    "model", "messages", "prompt", "tools", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens",
})  # fmt: skip
# What reaches vLLM of a client's headers. Others steer it: one of them overrides the priority of the body.
_HEADERS = frozenset({"accept", "content-type"}) | TRACE_HEADERS
_PRIORITY_HEADER = "x-vllm-priority"


class _Reset(msgspec.Struct):
    success: bool = False


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Completion(msgspec.Struct):
    usage: _Usage | None = None


class _Version(msgspec.Struct):
    version: str = ""


class _Model(msgspec.Struct):
    max_model_len: int | None = None


def make_vllm(plan: LoadPlan, client: aiohttp.ClientSession) -> HttpEngine:
    """The model runs on the GPUs of the plan, and on the CPU when it names none."""
    server = HttpServer()
    probe = VllmProbe(plan, server)
    process = ServerProcess("vLLM", plan, server, probe.prepare)
    loader: Loader = process
    if plan.cluster is not None:
        loader = head = RayHead(plan.cluster, plan, process, server.check)
        probe.surroundings = lambda: head.environment
    return HttpEngine(
        server, loader, probe, name="vllm", poll_s=2.0, restart_max_s=120.0, meet=probe.meet, count=probe.count_tokens
    )


class VllmProbe:
    """What vLLM is asked, and how each call is sealed for its tenant."""

    has_metrics = True

    def __init__(self, plan: LoadPlan, server: HttpServer) -> None:
        self._plan = plan
        self._server = server
        self.salts = Salts()
        self._log = StartupLog(lambda _progress: None)
        self._weights_bytes: int | None = None
        self._is_asleep = False
        self.capabilities = _describe(plan, with_vision=False)
        self.surroundings: Callable[[], Mapping[str, str]] = dict
        """What vLLM's environment needs beside what the plan says."""

    async def prepare(self, folder: Path, report: Report) -> Start:
        plan, socket = self._plan, folder / "s"
        python = await asyncio.to_thread(find_python)
        command = await asyncio.to_thread(build_command, python, plan, socket)
        self._weights_bytes = await asyncio.to_thread(weights_bytes, plan)
        self.capabilities = _describe(plan, with_vision=await asyncio.to_thread(sees_pictures, plan))
        self._log, self._is_asleep = StartupLog(report), False
        self._server.listen_on(str(socket), "http://vllm")
        return Start(command, {**build_environment(plan), **self.surroundings()}, self._log)

    async def meet(self, report: Report) -> None:
        with contextlib.suppress(EngineError):  # it is used whatever it answers
            listed = await self._server.ask_for("/v1/models", Listing[_Model])
            context_tokens = listed.data[0].max_model_len if listed is not None and listed.data else None
            self.capabilities = replace(self.capabilities, context_tokens=context_tokens)
        with contextlib.suppress(EngineError):
            told = await self._server.ask_for("/version", _Version)
            self.capabilities = replace(self.capabilities, version=told.version if told is not None else "")
        report(Progress("ready", 1.0))

    def send(self, call: Call) -> HttpResponse:
        if self._is_asleep:  # it would wait without an end
            raise EngineUnavailable("the model sleeps; wake it first")
        return self._server.send(self._seal(call))

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        return await ask_count(self._server, "/tokenize", {name: value for name, value in fields.items() if name in _COUNTED})

    async def read_stats(self) -> EngineStats:
        samples = await self._scrape()
        config = samples.labels("vllm:cache_config_info")
        total = _number(config.get("kv_cache_size_tokens"))
        if total is None:
            blocks, block = _number(config.get("num_gpu_blocks")), _number(config.get("block_size"))
            total = blocks * block if blocks is not None and block is not None else None
        used = samples.total("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
        return EngineStats(
            running=samples.count("vllm:num_requests_running"),
            waiting=samples.count("vllm:num_requests_waiting"),
            kv_total_tokens=total,
            kv_used_tokens=round(used * total) if used is not None and total is not None else None,
            kv_bytes=_number(config.get("kv_cache_memory_bytes")) or self._log.kv_bytes,
            weights_bytes=self._log.weights_bytes or self._weights_bytes,
        )

    # ---- what it keeps ----

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        if not self.capabilities.flushes_cache:
            return FlushOutcome(FlushResult.NOTHING_KEPT, "a model that embeds keeps nothing between requests")
        if request.scope in {FlushScope.TENANT, FlushScope.TAG}:
            self.salts.forget(request)
            # Blocks are found by the salt alone, so with the old one gone there is no request that could find them.
            detail = "the salt was changed: nothing cached before can be found again; vLLM reuses that memory when it needs it"
            return FlushOutcome(FlushResult.FLUSHED, detail)
        outcome = await self._clear()
        if outcome.result is FlushResult.FLUSHED:
            self.salts.forget(request)
        return outcome

    async def _clear(self) -> FlushOutcome:
        bounds = limits().engines
        samples = await poll(self._scrape_idle, within_s=bounds.vllm_busy_s, every_s=bounds.vllm_retry_s)
        if samples is None:
            return _BUSY
        is_caching = samples.labels("vllm:cache_config_info").get("enable_prefix_caching") != "False"
        # vLLM answers 200 also when it has cleared nothing, because a request holds blocks. So the body decides, and then a
        # prompt of ours that was cached before must be computed anew.
        canary, salt = self._make_canary(_block_tokens(samples)), secrets.token_hex(16)
        reused_before = 0
        if canary:
            await self._ask_canary(canary, salt)
            reused_before = await self._ask_canary(canary, salt)
            if is_caching and not reused_before:
                raise EngineError("the cache cannot be checked: a prompt sent twice was not found in it")
        if not await poll(self._reset, within_s=bounds.vllm_busy_s, every_s=bounds.vllm_retry_s):
            return _BUSY
        if not canary:
            return FlushOutcome(FlushResult.FLUSHED, "the context is shorter than one cache block: nothing is ever reused")
        reused_after = await self._ask_canary(canary, salt)
        if reused_after:
            raise EngineError(f"vLLM says its cache is clear, and still reuses {reused_after} tokens of a prompt from before")
        seen = f"of a prompt of {len(canary)} tokens, {reused_before} were reused before and none after"
        return FlushOutcome(FlushResult.FLUSHED, f"{seen}; vLLM keeps the memory reserved")

    async def _scrape_idle(self) -> Samples | None:
        samples = await self._scrape()
        is_busy = samples.total("vllm:num_requests_running") or samples.total("vllm:num_requests_waiting")
        return None if is_busy else samples

    async def _reset(self) -> bool | None:
        status, body = await self._server.ask("POST", "/reset_prefix_cache", timeout_s=limits().engines.vllm_flush_s)
        if status != 200:
            raise EngineError(f"/reset_prefix_cache was answered with HTTP {status}")
        otherwise = "/reset_prefix_cache was answered with something else than JSON"
        return read_answer(body, _Reset, otherwise).success or None

    def _make_canary(self, block_tokens: int) -> list[int]:
        longest = self.capabilities.context_tokens or 2 * block_tokens + 2
        # One token more than whole blocks, because the last one is always computed; and one for the answer.
        length = next((blocks * block_tokens + 1 for blocks in (2, 1) if blocks * block_tokens + 2 <= longest), 0)
        return [3 + index % 40 for index in range(length)]

    async def _ask_canary(self, tokens: list[int], salt: str) -> int:
        body = {
            "model": self._plan.model_id, "prompt": tokens, "max_tokens": 1, "temperature": 0,
            "cache_salt": salt, "priority": -100,
        }  # fmt: skip
        status, answer = await self._server.ask("POST", COMPLETIONS, body=body, timeout_s=limits().engines.vllm_flush_s)
        if status != 200:
            raise EngineError(f"the cache cannot be checked: a prompt was answered with HTTP {status}")
        usage = read_answer(answer, _Completion, "the cache cannot be checked: a prompt was not answered with JSON").usage
        # Older versions leave the details out when the number is zero.
        details = usage.prompt_tokens_details if usage is not None else None
        return (details.cached_tokens or 0) if details is not None else 0

    # ---- what only vLLM can do ----

    async def load_lora(self, name: str, path: Path) -> None:
        """Load an adapter under ``name``, which requests then give as their model. Raises EngineError."""
        await self._command("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        # Blocks are told apart by the adapter's name: those of another adapter that had it must not be found.
        self.salts.forget(FlushRequest(FlushScope.MODEL))

    async def unload_lora(self, name: str) -> None:
        await self._command("/v1/unload_lora_adapter", {"lora_name": name})

    async def sleep(self, level: int = 1) -> None:
        """Free GPU memory: 1 moves the weights to host memory, 2 drops them. Running requests end. Raises EngineError."""
        if not can_sleep(self._plan):
            raise EngineError("sleep mode is off: it needs a GPU and vllm_enable_sleep_mode")
        self._is_asleep = True  # at once: a request that came in between would hang
        try:
            await self._command(f"/sleep?level={level}", None)
        except EngineError:
            self._is_asleep = False
            raise

    async def wake(self) -> None:
        await self._command("/wake_up", None)
        self._is_asleep = False

    def _seal(self, call: Call) -> Call:
        path = call.path.partition("?")[0]
        headers = {name: value for name, value in call.headers.items() if name.lower() in _HEADERS}
        if path in self.capabilities.endpoints:
            headers[_PRIORITY_HEADER] = str(PRIORITIES[call.priority])
            body = seal_body(call.body, salt=self.salts.salt_for(call), priority=call.priority)
            return replace(call, headers=headers, body=body)
        if path not in _TOKENIZER_PATHS | _LISTS:
            raise ModalityUnsupported(f"{self._plan.model_id} does not serve {path}")
        return replace(call, headers=headers)

    async def _command(self, path: str, body: object) -> None:
        status, answer = await self._server.ask("POST", path, body=body, timeout_s=limits().engines.vllm_sleep_s)
        if status != 200:
            reason = read_reason(answer) or answer[:200].decode("utf-8", "replace")
            raise EngineError(f"vLLM refuses {path.partition('?')[0]} (HTTP {status}): {reason}")

    async def _scrape(self) -> Samples:
        status, text = await self._server.ask("GET", "/metrics")
        if status != 200:
            raise EngineError(f"/metrics was answered with HTTP {status}")
        return read_samples(text.decode("utf-8", "replace"), "vllm:")


def _block_tokens(samples: Samples) -> int:
    labels = samples.labels("vllm:cache_config_info")
    for name in ("effective_attention_block_size", "block_size"):
        if labels.get(name, "").isdigit():
            return int(labels[name])
    return 16


def _describe(plan: LoadPlan, *, with_vision: bool) -> Capabilities:
    is_caching, pools = caches_prefixes(plan), is_pooling(plan)
    return Capabilities(
        endpoints=(EMBEDDINGS, TOKENIZE) if pools else (CHAT, COMPLETIONS, RESPONSES, MESSAGES, TOKENIZE),
        streaming=not pools,
        prefix_caching=is_caching,
        keeps_nothing=not is_caching,
        isolates_tenants=True,
        engine_priority=True,
        flushes_cache=not pools,
        vision_input=with_vision,
        function_calling=bool(plan.options.get("vllm_tool_call_parser")),
        continuation=None if pools else {"continue_final_message": True, "add_generation_prompt": False},
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
