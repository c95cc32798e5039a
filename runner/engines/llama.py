"""llama.cpp in a child process of ours, and a llama-server that somebody else started: with one model, or as a router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import psutil

from runner.definitions.plan import LoadPlan, Progress, Report
from runner.engines.http import HttpServer, Listing, read_answer
from runner.engines.http_engine import (
    HttpEngine,
    OwnChild,
    bearer,
    installed_version,
    read_reason,
    read_url,
    set_thinking,
    take_answer,
)
from runner.engines.llama_slots import PINNABLE, Findings, LlamaSlots, end_with, is_object, plain_call
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
    Health,
    Response,
)
from runner.engines.process import Child, gpu_environment
from runner.errors import EngineError
from runner.limits import limits
from wire import clock
from wire.unreadable import UNREADABLE

log = logging.getLogger(__name__)

BATCH_TOKENS = 512

# ---- in a child process, so that a crash or a hang of the engine can be killed without harm to the runner ----


def make_llamacpp(plan: LoadPlan, client: aiohttp.ClientSession) -> HttpEngine:
    server = HttpServer()
    probe = LlamaChildProbe(plan, server)
    loader = OwnChild(f"llama.cpp {plan.model_id}", server, probe.start)
    return HttpEngine(
        server, loader, probe, name="llamacpp", poll_s=2.0, restart_max_s=30.0, loop=probe, meet=probe.meet,
        count=partial(ask_llama, server),
    )  # fmt: skip


class LlamaChildProbe:
    """What the child is told and asked, one for a GGUF model.

    It is the engine's loop as well: its slots are told by the loop itself, between two batches.
    """

    has_metrics = True

    def __init__(self, plan: LoadPlan, server: HttpServer) -> None:
        self._plan = plan
        self._server = server
        self._kv_bytes: int | None = None
        self._weights_bytes: int | None = None
        self.slots = LlamaSlots(server, plan.slots)
        self.capabilities = _first_capabilities(plan)

    async def start(self, child: Child, key: str, report: Report) -> str:
        """Return where the child serves. Raises EngineError."""
        plan, path = self._plan, self._plan.path
        if path is None:
            raise EngineError(f"{plan.model_id} has no GGUF file: give its path in the settings")
        report(Progress("starting the engine process"))
        # It closes idle connections when it likes, and a POST must not be caught by that on a connection used before.
        self._server.headers = {**self._server.headers, "Connection": "close"}
        is_told = asyncio.Event()
        log = LoadLog(report, on_loaded=is_told.set)
        watch = asyncio.create_task(_watch_reading(child, path, log, report))
        try:
            url = await child.start_ours(
                "runner.engines.children.llamacpp", child_settings(plan, path, key), report,
                limit_s=limits().engines.llama_load_s, on_line=log.read,
                environment=gpu_environment(plan.gpu_ids, is_cpu=plan.options.get("device") == "cpu"),
            )  # fmt: skip
            # Another thread of the child writes the end of the log of a load, also after the child's answer.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits().engines.llama_log_s):
                    await is_told.wait()
        except EngineError as error:
            raise EngineError(f"{path.name} could not be loaded: {log.reason or error}") from None
        finally:
            log.close()
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        self._kv_bytes = log.kv_bytes
        return url

    async def meet(self, _report: Report) -> None:
        self.slots = LlamaSlots(self._server, self._plan.slots)
        listed = await self._server.ask_for("/v1/models", Listing[_Model])
        meta = listed.data[0].meta if listed is not None and listed.data else None
        self._weights_bytes = meta.size if meta is not None else None
        properties = await self.slots.read_properties()
        self.capabilities = replace(
            self.capabilities,
            version=properties.version or await asyncio.to_thread(installed_version, "xllamacpp"),
            context_tokens=properties.context_tokens,
            function_calling=properties.chat_template_caps.supports_tools and CHAT in self.capabilities.endpoints,
            vision_input=properties.modalities.vision,
            audio_input=properties.modalities.audio,
            continuation=await find_continuation(self._server, self._plan.model_id),
        )

    def send(self, call: Call) -> AbstractAsyncContextManager[Response]:
        if call.path.partition("?")[0] == EMBEDDINGS:
            return self._server.send(plain_call(call))
        return self.slots.send(call)

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        # There is no other copy than the slots', as the child keeps no prompts in host memory.
        if not self._server.base_url:
            return FlushOutcome(FlushResult.FLUSHED, "nothing is loaded", 0, 0)
        return await self.slots.flush(request)

    async def read_stats(self) -> EngineStats:
        return replace(await self.slots.read_stats(), kv_bytes=self._kv_bytes, weights_bytes=self._weights_bytes)

    @property
    def batch_s(self) -> float:
        if self.slots.token_s is None:
            return limits().engines.llama_batch_s
        return self.slots.token_s * _count_batch_tokens(self._plan)

    async def ask_loop(self) -> None:
        await self.slots.ask_loop()


async def _watch_reading(child: Child, path: Path, log: LoadLog, report: Report) -> None:
    total = sum(part.stat().st_size for part in weight_files(path)) or 1
    while log.is_reading:
        await asyncio.sleep(limits().engines.llama_watch_s)
        if child.pid is None or not log.is_reading:
            continue
        with contextlib.suppress(psutil.Error):  # llama.cpp says nothing of it: what has arrived in memory is what was read
            share = psutil.Process(child.pid).memory_info().rss / total
            report(Progress("reading weights", min(share, 0.99)))


_KV_BUFFER = re.compile(r"(?:KV|RS) buffer size =\s*([0-9.]+) MiB")
_ERROR = re.compile(r"^[0-9.]+ E (.*)")
_FOLLOWS_FROM_ANOTHER = ("failed to load model", "failed to create", "exiting due to")


class LoadLog:
    """Reads the lines of one load; progress goes to ``report``. Deaf once ``close`` was called: then it is about requests.

    ``on_loaded`` is called when it says that the model is loaded, the last of what is read here.
    """

    def __init__(self, report: Report, *, on_loaded: Callable[[], None]) -> None:
        self._report = report
        self._on_loaded = on_loaded
        self._is_open = True
        self._errors: list[str] = []
        self._kv_mib = 0.0
        self.is_reading = True
        """Whether the weights are being read, as far as is known."""

    @property
    def kv_bytes(self) -> int | None:
        """Size of the buffers for keys and values (and recurrent states), None when none was named."""
        return int(self._kv_mib * 1024 * 1024) or None

    @property
    def reason(self) -> str:
        # Errors that only say that another has happened are told where there is no other.
        causes = [text for text in self._errors if not any(marker in text for marker in _FOLLOWS_FROM_ANOTHER)]
        return "; ".join(dict.fromkeys(causes or self._errors[:1]))

    def read(self, line: str) -> None:
        if not self._is_open:
            return
        if found := _KV_BUFFER.search(line):
            self._kv_mib += float(found[1])
            self.is_reading = False
        elif "warming up the model" in line:
            self._report(Progress("warming up"))
        elif line.endswith("model loaded"):
            self._on_loaded()
        elif (found := _ERROR.match(line)) and len(self._errors) < limits().engines.llama_log_errors:
            text = re.sub(r"\s{2,}", " ", found[1])
            self._errors.append(text.partition("error loading model: ")[2] or text)

    def close(self) -> None:
        self._is_open = False


def child_settings(plan: LoadPlan, path: Path, key: str) -> dict[str, object]:
    options: Mapping[str, object] = plan.options
    return {
        "model_path": str(path), "model_id": plan.model_id, "key": key, "slots": plan.slots, "threads": plan.threads,
        "context_tokens": plan.context_tokens or limits().engines.context_tokens,
        "embedding": options.get("gguf_embedding") is True, "batch_tokens": _count_batch_tokens(plan),
        "gpu_layers": 0 if options.get("device") == "cpu" else options.get("gguf_n_gpu_layers", -1),
        "enable_thinking": options.get("enable_thinking"),
        "flash_attn": options.get("gguf_flash_attn") or "auto",
        "type_k": options.get("gguf_type_k") or "f16",
        "type_v": options.get("gguf_type_v") or "f16",
    }  # fmt: skip


def _count_batch_tokens(plan: LoadPlan) -> int:
    if plan.options.get("gguf_embedding") is True:  # an input has to fit into one batch
        return max(BATCH_TOKENS, plan.context_tokens or limits().engines.context_tokens)
    return BATCH_TOKENS


def weight_files(path: Path) -> list[Path]:
    """Return the files of a model: all parts of one that is split (``name-00001-of-00003.gguf``), else the one."""
    stem, is_split, count = path.stem.rpartition("-of-")
    if not is_split or not count.isdigit():
        return [path] if path.is_file() else []
    return sorted(path.parent.glob(f"{stem[:-5]}?????-of-{count}.gguf"))


def _first_capabilities(plan: LoadPlan) -> Capabilities:
    if plan.options.get("gguf_embedding") is True:
        return Capabilities((EMBEDDINGS, TOKENIZE), streaming=False, keeps_nothing=True)
    return Capabilities(
        (CHAT, COMPLETIONS, RESPONSES, MESSAGES, TOKENIZE),
        private_endpoints=(RESPONSES,),  # its events lack the numbers and the whole object that SDKs go by
        prefix_caching=True,
        isolates_tenants=True,
        flushes_cache=True,
    )


# ---- a server that somebody else started ----


def make_llama_server(plan: LoadPlan, client: aiohttp.ClientSession) -> HttpEngine:
    server = HttpServer()
    loader = RunningLlama(plan, server)
    probe = RunningLlamaProbe(plan, server, loader)
    return HttpEngine(
        server, loader, probe, name="llama-server", poll_s=5.0, restart_max_s=30.0, meet=probe.meet, check=probe.check,
        count=probe.count_tokens, give_up=loader.give_up,
    )  # fmt: skip


class Status(msgspec.Struct):
    """State of a model: unloaded, loading, loaded, sleeping, downloading or failed; ``exit_code`` of what served it."""

    value: str = ""
    failed: bool = False
    exit_code: int | None = None

    @property
    def is_loaded(self) -> bool:
        return self.value in {"loaded", "sleeping"}

    @property
    def has_failed(self) -> bool:
        return self.failed or self.value == "failed"

    @property
    def is_out(self) -> bool:
        return self.value == "unloaded" or self.has_failed  # a failed one has no process any more


class _Meta(msgspec.Struct):
    size: int | None = None
    """Bytes of the weights."""


class _Model(msgspec.Struct):
    """What a server lists of a model; ``status`` only where it is a router."""

    id: str
    status: Status | None = None
    aliases: list[str] = []
    meta: _Meta | None = None


class _Share(msgspec.Struct):
    current: str | None = None
    value: float | None = None


class _EventData(msgspec.Struct):
    progress: _Share | None = None


class _Event(msgspec.Struct):
    model: str = ""
    data: _EventData = msgspec.field(default_factory=_EventData)


class RunningLlama:
    """Has a router load the model, or sees that a plain server has it. ``model`` is the server's own name for it."""

    is_attached = True
    child = None

    def __init__(self, plan: LoadPlan, server: HttpServer) -> None:
        self._plan = plan
        self._server = server
        # Whether a router may hold the model because of us.
        self._is_held = False
        self.model = str(plan.options.get("server_model") or plan.model_id)
        self.is_router = False

    async def load(self, report: Report) -> None:
        self._is_held = False
        self._server.base_url = read_url(self._plan, example="http://127.0.0.1:8080")
        self._server.headers = {"Connection": "close", **bearer(self._plan)}
        report(Progress("asking the server"))
        self.is_router = await self._ask_is_router()
        if not self.is_router:
            await self._find_model()
        elif (await self.ask_status()).is_loaded:
            self._is_held = True
        else:
            await self._load_by_router(report)

    async def give_up(self) -> None:
        if self._is_held:  # a half-loaded model; what the router says no longer matters
            with contextlib.suppress(EngineError):
                await self._tell("/models/unload")

    async def unload(self, *, gently: bool) -> None:
        if self.is_router:
            await self._unload_by_router()
        elif gently:  # else it is let go: a plain server is not ours to stop
            raise EngineError(
                f"{self._server.base_url} serves this one model for as long as it runs and is not ours to stop: "
                "stop it there, or start it in router mode (llama-server without a model)"
            )

    async def ask_status(self) -> Status:
        """Return the model's state. Raises EngineError, also when the router does not know the model."""
        status, body = await self._server.ask("GET", "/models")
        if status != 200:
            raise EngineError(f"{self._server.base_url}/models answers HTTP {status}")
        models = read_answer(body, Listing[_Model], f"{self._server.base_url}/models is no list of models").data
        for model in models:
            if model.id == self.model and model.status is not None:
                return model.status
        known = ", ".join(sorted(model.id for model in models)[:10])
        raise EngineError(f"the router at {self._server.base_url} does not know {self.model}; it knows: {known}")

    async def _ask_is_router(self) -> bool:
        status, body = await self._server.ask("GET", "/models")
        if status in {401, 403}:
            raise EngineError(f"{self._server.base_url} refuses the key (HTTP {status}): see server_api_key_env")
        if status != 200:
            raise EngineError(f"{self._server.base_url}/models answers HTTP {status}: is it a llama-server?")
        try:
            models = msgspec.json.decode(body, type=Listing[_Model]).data
        except UNREADABLE:
            return False
        return bool(models) and all(model.status is not None for model in models)  # as only a router says it

    async def _find_model(self) -> None:
        if await self._server.check() is not Health.OK:
            raise EngineError(f"{self._server.base_url}/health does not answer 200: it may still be loading")
        listed = await self._server.ask_for("/v1/models", Listing[_Model])
        names = {name for model in (listed.data if listed else ()) for name in (model.id, *model.aliases)}
        if self.model not in names:
            found = ", ".join(sorted(names)) or "nothing"
            raise EngineError(f"{self._server.base_url} serves {found}, not {self.model}: set server_model to its name there")

    async def _load_by_router(self, report: Report) -> None:
        report(Progress("loading", 0.0))
        listening = asyncio.create_task(self._report_events(report))
        load_s = limits().engines.llama_load_s
        self._is_held = True
        try:
            await self._tell("/models/load")
            async with asyncio.timeout(load_s):
                await self._wait_loaded()
        except TimeoutError:
            raise EngineError(f"{self.model} was not loaded by the router within {load_s:.0f} s") from None
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening

    async def _unload_by_router(self) -> None:
        if (await self.ask_status()).is_out:
            return
        await self._tell("/models/unload")
        bounds = limits().engines
        deadline = clock.monotonic() + bounds.router_unload_s
        while not (status := await self.ask_status()).is_out:
            if clock.monotonic() > deadline:
                raise EngineError(
                    f"the router still has {self.model} ({status.value}) {bounds.router_unload_s:.0f} s after it was told"
                )
            await asyncio.sleep(bounds.router_look_s)

    async def _wait_loaded(self) -> None:
        has_begun = False
        while not (status := await self.ask_status()).is_loaded:
            if has_begun and status.value == "unloaded" and not status.has_failed:
                raise EngineError(f"{self.model} was unloaded again while it was being loaded: see --models-max of the router")
            has_begun = has_begun or status.value != "unloaded"
            if status.has_failed:
                code = "" if status.exit_code is None else f" (exit code {status.exit_code})"
                raise EngineError(f"the router could not load {self.model}{code}: see the log of llama-server")
            await asyncio.sleep(limits().engines.router_look_s)

    async def _tell(self, path: str) -> None:
        status, body = await self._server.ask(
            "POST", path, body={"model": self.model}, timeout_s=limits().engines.router_start_s
        )
        if status == 200:
            return
        raise EngineError(
            f"the router refuses {path} for {self.model} (HTTP {status}): {read_reason(body) or 'no reason given'}"
        )

    async def _report_events(self, report: Report) -> None:
        # It may publish nothing: whether the model is loaded is asked for beside this.
        listen = Call("GET", "/models/sse", {"accept": "text/event-stream"}, b"")
        rest = b""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with self._server.send(listen) as response:
                while (data := await response.readany()) and len(rest) <= limits().engines.line_bytes:
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        self._report_event(line, report)

    def _report_event(self, line: bytes, report: Report) -> None:
        try:
            event = msgspec.json.decode(line.removeprefix(b"data:"), type=_Event)
        except UNREADABLE:
            return
        share = event.data.progress
        if event.model == self.model and share is not None and share.value is not None:
            report(Progress(share.current or "loading", min(max(share.value, 0.0), 1.0)))


class RunningLlamaProbe:
    """What the server is asked. Whether it keeps tenants apart is found out when it is loaded."""

    def __init__(self, plan: LoadPlan, server: HttpServer, loader: RunningLlama) -> None:
        self._plan = plan
        self._server = server
        self._loader = loader
        self._slots: LlamaSlots | None = None
        self._findings = Findings(detail="the model is not loaded")
        self.has_metrics = True
        self.capabilities = Capabilities((CHAT, COMPLETIONS, RESPONSES, MESSAGES), prefix_caching=True)

    async def meet(self, report: Report) -> None:
        report(Progress("trying its slots"))
        self.has_metrics = not self._loader.is_router  # a router's would be of another model
        model = self._loader.model if self._loader.is_router else None
        properties = await LlamaSlots(self._server, 1, model=model).read_properties()
        slots = LlamaSlots(self._server, properties.total_slots, model=model)
        self._findings = await self._try_slots(slots)
        self._slots = slots if self._findings.isolates else None
        if self._findings.detail:
            log.warning("llama-server %s: %s", self._server.base_url, self._findings.detail)
        # What a template is told does not reach it from Messages and Responses here: those are better translated.
        others = (
            () if self._plan.options.get("enable_thinking") is not None else (RESPONSES, *([] if self._slots else [MESSAGES]))
        )
        self.capabilities = Capabilities(
            # A call to /v1/messages cannot be pinned: it would read the slots of others.
            endpoints=(CHAT, COMPLETIONS, *others, TOKENIZE),
            private_endpoints=(RESPONSES,),  # its events lack the numbers and the whole object that SDKs go by
            version=properties.version,
            max_inflight=properties.total_slots,
            context_tokens=properties.context_tokens,
            prefix_caching=True,
            isolates_tenants=self._findings.isolates,
            flushes_cache=self._findings.erases,
            function_calling=properties.chat_template_caps.supports_tools,
            vision_input=properties.modalities.vision,
            audio_input=properties.modalities.audio,
            continuation=await find_continuation(self._server, self._loader.model),
        )

    def send(self, call: Call) -> AbstractAsyncContextManager[Response]:
        call = self._address(call, call.path.partition("?")[0])
        return self._slots.send(call) if self._slots is not None else self._server.send(plain_call(call))

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        if not self._server.base_url:
            return FlushOutcome(FlushResult.NOT_SUPPORTED, "the model is not loaded")
        if self._slots is None or not self._findings.erases:
            return FlushOutcome(FlushResult.NOT_SUPPORTED, self._findings.detail)
        return await self._slots.flush(request)

    async def read_stats(self) -> EngineStats:
        model = self._loader.model if self._loader.is_router else None
        return await (self._slots or LlamaSlots(self._server, 1, model=model)).read_stats()

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        if self._loader.is_router:
            fields = {**fields, "model": msgspec.Raw(msgspec.json.encode(self._loader.model))}
        return await ask_llama(self._server, fields)

    async def check(self) -> Health:
        health = await self._server.check()
        if health is not Health.OK or not self._loader.is_router:
            return health
        try:
            return Health.OK if (await self._loader.ask_status()).is_loaded else Health.UNREACHABLE
        except EngineError:
            return Health.SILENT

    async def _try_slots(self, slots: LlamaSlots) -> Findings:
        try:
            shown = await slots.list_slots()
        except EngineError as error:
            return Findings(detail=str(error))
        if shown is None:
            return Findings(detail="the server does not show its slots: start it with --slots")
        if any(slot.is_processing for slot in shown):
            return Findings(detail="the server was busy with requests of others when it was to be tried")
        return await slots.probe()

    def _address(self, call: Call, path: str) -> Call:
        if call.method != "POST" or not is_object(call.body):
            return call
        if path == CHAT:
            call = replace(call, body=set_thinking(self._plan, call.body))
        members = []
        if self._loader.is_router:
            members.append(b'"model":' + msgspec.json.encode(self._loader.model))
        if self._slots is None and call.cache_mode == "none" and path in PINNABLE:
            members.append(b'"cache_prompt":false')  # private also where slots are not pinned
        return replace(call, body=end_with(call.body, b",".join(members))) if members else call


# ---- going on with an answer ----

_CONTINUATION: Mapping[str, object] = {"chat_template_kwargs": {"enable_thinking": False}}
"""llama.cpp goes on with a last message of the assistant's unasked, but not where it may think: the answer has begun."""


async def find_continuation(server: HttpServer, model: str) -> Mapping[str, object] | None:
    """Return how a llama.cpp goes on with an answer; None where its prompts show that it would begin another one.

    Servers from before the middle of 2025 would, and those started with ``--no-prefill-assistant``.
    """
    begun = "One, two"
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": begun}]
    asked = {"model": model, "messages": messages, **_CONTINUATION}
    try:
        status, body = await server.ask("POST", "/apply-template", body=asked, timeout_s=limits().engines.count_s)
        prompt = msgspec.json.decode(body, type=_Prompt).prompt if status == 200 else ""
    except (EngineError, *UNREADABLE):
        return None
    return _CONTINUATION if prompt.endswith(begun) else None


# ---- token counts ----


class _Prompt(msgspec.Struct):
    prompt: str


class _Tokens(msgspec.Struct):
    tokens: list[msgspec.Raw]


class _InputTokens(msgspec.Struct):
    input_tokens: int


async def ask_llama(server: HttpServer, fields: Mapping[str, msgspec.Raw]) -> int:
    """Ask llama.cpp, for messages as it counts them itself, pictures included. Raises InvalidRequest, EngineError."""
    if "messages" not in fields:
        return await _ask_llama_text(server, fields, fields["prompt"])
    path = "/v1/chat/completions/input_tokens"
    status, body = await server.ask("POST", path, body=fields, timeout_s=limits().engines.count_s)
    if status != 404:
        counted = read_answer(take_answer(path, status, body), _InputTokens, f"{path} does not answer as llama.cpp does")
        return counted.input_tokens
    # Servers from before the middle of 2026 do not count messages.
    path = "/apply-template"
    status, body = await server.ask("POST", path, body=fields, timeout_s=limits().engines.count_s)
    prompt = read_answer(take_answer(path, status, body), _Prompt, f"{path} does not answer as llama.cpp does").prompt
    return await _ask_llama_text(server, fields, msgspec.Raw(msgspec.json.encode(prompt)))


async def _ask_llama_text(server: HttpServer, fields: Mapping[str, msgspec.Raw], text: msgspec.Raw) -> int:
    # As llama.cpp reads a prompt: with the special tokens in it, and the one that it begins with.
    path = "/tokenize"
    asked: dict[str, object] = {"model": fields["model"], "content": text, "add_special": True, "parse_special": True}
    status, body = await server.ask("POST", path, body=asked, timeout_s=limits().engines.count_s)
    return len(read_answer(take_answer(path, status, body), _Tokens, f"{path} answers with something else than tokens").tokens)
