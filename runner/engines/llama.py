"""llama.cpp in a child process of ours, and a llama-server that somebody else started: with one model, or as a router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import psutil

from runner.definitions.plan import LoadPlan, Progress, Report
from runner.engines.http import HttpServer
from runner.engines.http_engine import ask_llama, bearer, installed_version, read_url, set_thinking
from runner.engines.llama_slots import PINNABLE, Findings, LlamaSlots, end_with, is_object, plain_call, probe_slots
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
        """Why it failed, in llama.cpp's words; empty when it did not say."""
        causes = [text for text in self._errors if not any(words in text for words in _FOLLOWS_FROM_ANOTHER)]
        return "; ".join(dict.fromkeys(causes or self._errors[:1]))

    def read(self, line: str) -> None:
        """Take one line."""
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
        """Read no more."""
        self._is_open = False


BATCH_TOKENS = 512


class _Meta(msgspec.Struct):
    size: int | None = None


class _LoadedModel(msgspec.Struct):
    meta: _Meta | None = None


class _LoadedModels(msgspec.Struct):
    data: list[_LoadedModel] = []


class LlamaCpp:
    """One GGUF model in one child, with a new random key each time it is loaded."""

    name = "llamacpp"
    poll_s = 2.0
    restart_max_s = 30.0
    child_module = "runner.engines.children.llamacpp"

    def __init__(self, plan: LoadPlan, client: aiohttp.ClientSession) -> None:
        self._plan = plan
        self._child = Child(f"llama.cpp {plan.model_id}")
        self._server = HttpServer(client)
        self._slots = LlamaSlots(self._server, plan.slots)
        self._kv_bytes: int | None = None
        self._weights_bytes: int | None = None
        self._capabilities = _first_capabilities(plan)

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; whether it takes tools and images is known once it is loaded."""
        return self._capabilities

    @property
    def pids(self) -> tuple[int, ...]:
        """The child, while there is one."""
        return (self._child.pid,) if self._child.pid is not None else ()

    async def load(self, report: Report) -> None:
        """Start the child and load the model. Raises EngineError with what llama.cpp says is wrong."""
        path = self._plan.path
        if path is None:
            raise EngineError(f"{self._plan.model_id} has no GGUF file: give its path in the settings")
        await self.unload(gently=False)
        report(Progress("starting the engine process"))
        key = secrets.token_urlsafe(24)
        # Known before its address is: a request that meets the new child brings the new key. It closes idle connections when it
        # likes, and a POST must not be caught by that on a connection used before.
        self._server.headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
        is_told = asyncio.Event()
        log = LoadLog(report, on_loaded=is_told.set)
        watch = asyncio.create_task(self._watch_reading(path, log, report))
        try:
            self._server.base_url = await self._child.start_ours(
                self.child_module, child_settings(self._plan, path, key), report,
                limit_s=limits().engines.llama_load_s, on_line=log.read,
                environment=gpu_environment(self._plan.gpu_ids, is_cpu=self._plan.options.get("device") == "cpu"),
            )  # fmt: skip
            await _wait_told(is_told)
        except EngineError as error:
            raise EngineError(f"{path.name} could not be loaded: {log.reason or error}") from None
        except BaseException:
            await self._child.kill()
            raise
        finally:
            log.close()
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        try:
            await self._meet(log)
        except BaseException:
            await self._child.kill()
            raise

    async def unload(self, *, gently: bool) -> None:
        """Have the child unload and exit, kill it when that takes too long, or at once; its memory goes with it."""
        try:
            await self._child.stop(gently=gently)
        finally:
            self._server.base_url = ""

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """Erase the slots in question: there is no other copy, as the child keeps no prompts in host memory."""
        if not self._child.is_running:
            return FlushOutcome(FlushResult.FLUSHED, "nothing is loaded", 0, 0)
        return await self._slots.flush(request)

    async def stats(self) -> EngineStats:
        """Return the numbers of llama.cpp; an empty value when it does not answer."""
        if not self._child.is_running:
            return EngineStats()
        try:
            stats = await self._slots.read_stats()
        except EngineError:
            return EngineStats()
        return replace(stats, kv_bytes=self._kv_bytes, weights_bytes=self._weights_bytes)

    async def read_metrics(self) -> str:
        """Return llama.cpp's ``/metrics``, an empty text when they do not come."""
        return await self._server.read_metrics() if self._child.is_running else ""

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[Response]:
        """Send a call, pinned to a slot of its tenant's where it generates. Raises aiohttp.ClientError, OSError."""
        needs_slot = call.path.partition("?")[0] != EMBEDDINGS
        async with self._slots.send(call) if needs_slot else self._server.send(plain_call(call)) as response:
            yield response

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        """Ask the server; no slot is needed for it. Raises InvalidRequest, EngineError."""
        return await ask_llama(self._server, fields)

    @property
    def batch_s(self) -> float:
        """What a full batch takes at the speed that llama.cpp has counted so far."""
        if self._slots.token_s is None:
            return limits().engines.llama_batch_s
        return self._slots.token_s * _count_batch_tokens(self._plan)

    async def ask_loop(self) -> None:
        """Ask for the slots, which the loop itself tells."""
        await self._slots.ask_loop()

    async def health(self) -> Health:
        """Ask ``/health`` once."""
        return await self._server.check() if self._child.is_running else Health.UNREACHABLE

    async def wait_gone(self) -> None:
        """Return when the child has exited."""
        await self._child.wait_gone()

    async def _meet(self, log: LoadLog) -> None:
        """Ask the loaded server what it is. Raises EngineError when it does not answer."""
        self._slots = LlamaSlots(self._server, self._plan.slots)
        self._kv_bytes = log.kv_bytes
        self._weights_bytes = await self._ask_weights_bytes()
        properties = await self._slots.read_properties()
        self._capabilities = replace(
            self._capabilities,
            version=properties.version or await asyncio.to_thread(installed_version, "xllamacpp"),
            context_tokens=properties.context_tokens,
            function_calling=properties.chat_template_caps.supports_tools and CHAT in self._capabilities.endpoints,
            vision_input=properties.modalities.vision,
            audio_input=properties.modalities.audio,
        )

    async def _ask_weights_bytes(self) -> int | None:
        status, body = await self._server.ask("GET", "/v1/models")
        if status != 200:
            return None
        listed = msgspec.json.decode(body, type=_LoadedModels)
        return listed.data[0].meta.size if listed.data and listed.data[0].meta is not None else None

    async def _watch_reading(self, path: Path, log: LoadLog, report: Report) -> None:
        """Report how much of the weights has arrived in the child's memory: llama.cpp has no other word of it."""
        total = sum(part.stat().st_size for part in weight_files(path)) or 1
        while log.is_reading:
            await asyncio.sleep(limits().engines.llama_watch_s)
            if (pid := self._child.pid) is None or not log.is_reading:
                continue
            with contextlib.suppress(psutil.Error):
                share = psutil.Process(pid).memory_info().rss / total
                report(Progress("reading weights", min(share, 0.99)))


async def _wait_told(is_told: asyncio.Event) -> None:
    """Wait a moment for the end of the log of a load: another thread of the child writes it, also after the child's answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limits().engines.llama_log_s):
            await is_told.wait()


def child_settings(plan: LoadPlan, path: Path, key: str) -> dict[str, object]:
    """Return what the child program is told. Raises EngineError for an option that cannot be used."""
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
        return Capabilities(
            (EMBEDDINGS, TOKENIZE), max_inflight=plan.slots, streaming=False, keeps_nothing=True, reports_progress=True,
            counts_tokens=True,
        )  # fmt: skip
    return Capabilities(
        (CHAT, COMPLETIONS, RESPONSES, MESSAGES, TOKENIZE),
        private_endpoints=(RESPONSES,),  # its events lack the numbers and the whole object that SDKs go by
        max_inflight=plan.slots,
        prefix_caching=True,
        reports_cached_tokens=True,
        isolates_tenants=True,
        flushes_cache=True,
        reports_progress=True,
        counts_tokens=True,
    )


class Status(msgspec.Struct):
    """State of a model: unloaded, loading, loaded, sleeping, downloading or failed; ``exit_code`` of what served it."""

    value: str = ""
    failed: bool = False
    exit_code: int | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether it answers; a sleeping one wakes up for that."""
        return self.value in {"loaded", "sleeping"}

    @property
    def has_failed(self) -> bool:
        """Whether its last load went wrong."""
        return self.failed or self.value == "failed"


class _Model(msgspec.Struct):
    id: str
    status: Status | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Share(msgspec.Struct):
    current: str | None = None
    value: float | None = None


class _EventData(msgspec.Struct):
    progress: _Share | None = None


class _Event(msgspec.Struct):
    model: str = ""
    data: _EventData = msgspec.field(default_factory=_EventData)


class _Problem(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Problem = msgspec.field(default_factory=_Problem)


class LlamaRouter:
    """One model of a router; ``model`` is the router's own name for it."""

    def __init__(self, server: HttpServer, model: str) -> None:
        self._server = server
        self._model = model

    @staticmethod
    def is_one(listed: bytes) -> bool:
        """Return whether an answer to ``GET /models`` is a router's: each model has a state."""
        try:
            models = msgspec.json.decode(listed, type=_Models).data
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        return bool(models) and all(model.status is not None for model in models)

    async def ask_status(self) -> Status:
        """Return the model's state. Raises EngineError, also when the router does not know the model."""
        status, body = await self._server.ask("GET", "/models")
        if status != 200:
            raise EngineError(f"{self._server.base_url}/models answers HTTP {status}")
        try:
            models = msgspec.json.decode(body, type=_Models).data
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineError(f"{self._server.base_url}/models is no list of models: {error}") from None
        for model in models:
            if model.id == self._model and model.status is not None:
                return model.status
        known = ", ".join(sorted(model.id for model in models)[:10])
        raise EngineError(f"the router at {self._server.base_url} does not know {self._model}; it knows: {known}")

    async def load(self, report: Report) -> None:
        """Return once the model is loaded. Raises EngineError; then, or when cancelled, the model is unloaded again."""
        if (await self.ask_status()).is_loaded:
            return
        report(Progress("loading", 0.0))
        listening = asyncio.create_task(self._report_events(report))
        try:
            await self._tell("/models/load")
            async with asyncio.timeout(limits().engines.llama_load_s):
                await self._wait_loaded()
        except TimeoutError:
            await self.give_up()
            raise EngineError(
                f"{self._model} was not loaded by the router within {limits().engines.llama_load_s:.0f} s"
            ) from None
        except BaseException:
            await self.give_up()
            raise
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening

    async def unload(self) -> None:
        """Return once the router says that the model is unloaded. Raises EngineError when it does not come to that."""
        if _is_out(await self.ask_status()):
            return
        await self._tell("/models/unload")
        bounds = limits().engines
        deadline = clock.monotonic() + bounds.router_unload_s
        while not _is_out(status := await self.ask_status()):
            if clock.monotonic() > deadline:
                raise EngineError(
                    f"the router still has {self._model} ({status.value}) {bounds.router_unload_s:.0f} s after it was told"
                )
            await asyncio.sleep(bounds.router_look_s)

    async def give_up(self) -> None:
        """Have a half-loaded model unloaded; what that says no longer matters."""
        with contextlib.suppress(EngineError):
            await self._tell("/models/unload")

    async def _wait_loaded(self) -> None:
        has_begun = False
        while not (status := await self.ask_status()).is_loaded:
            if has_begun and status.value == "unloaded" and not status.has_failed:
                raise EngineError(f"{self._model} was unloaded again while it was being loaded: see --models-max of the router")
            has_begun = has_begun or status.value != "unloaded"
            if status.has_failed:
                code = "" if status.exit_code is None else f" (exit code {status.exit_code})"
                raise EngineError(f"the router could not load {self._model}{code}: see the log of llama-server")
            await asyncio.sleep(limits().engines.router_look_s)

    async def _tell(self, path: str) -> None:
        """Raise EngineError with the router's words unless it does as it is told."""
        status, body = await self._server.ask(
            "POST", path, body={"model": self._model}, timeout_s=limits().engines.router_start_s
        )
        if status == 200:
            return
        words = ""
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            words = msgspec.json.decode(body, type=_Refusal).error.message
        raise EngineError(f"the router refuses {path} for {self._model} (HTTP {status}): {words[:300] or 'no reason given'}")

    async def _report_events(self, report: Report) -> None:
        """Pass on the progress that the router publishes; it may publish none, the state itself is looked at elsewhere."""
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
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        share = event.data.progress
        if event.model == self._model and share is not None and share.value is not None:
            report(Progress(share.current or "loading", min(max(share.value, 0.0), 1.0)))


def _is_out(status: Status) -> bool:
    """Return whether nothing of the model is held; a failed one has no process any more."""
    return status.value == "unloaded" or status.has_failed


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
