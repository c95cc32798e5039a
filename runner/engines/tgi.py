"""Text Generation Inference: a server that somebody else runs, or a ``text-generation-launcher`` of ours.

It serves one model for as long as it runs, so loading is starting it and unloading is stopping it. It has no call that
clears its cache and no salts: a launcher of ours therefore runs without prefix caching unless its owner wants it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec

from runner.definitions.plan import LoadPlan
from runner.engines.http import HttpServer
from runner.engines.http_engine import bearer, read_samples, read_url, take_answer
from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    TOKENIZE,
    Call,
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    Health,
    Progress,
    Report,
    Response,
)
from runner.engines.process import Child, FailureReasons, child_environment, kill_rest, list_tree, make_private_folder
from runner.errors import EngineError, EngineUnavailable, InvalidRequest, ModalityUnsupported, ModelQueueFull, RequestRefused
from runner.limits import limits
from wire.unreadable import UNREADABLE

_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_STAGES: tuple[tuple[str, str, float], ...] = (
    ("Starting check and download process", "checking the files", 0.05),
    ("Successfully downloaded weights", "files checked", 0.2),
    ("Starting shard", "loading weights", 0.25),
    ("Shard ready", "weights loaded", 0.7),
    ("Starting Webserver", "starting the API", 0.75),
    ("Warming up model", "warming up", 0.8),
    ("Connected", "ready", 0.98),
)


class LauncherLog:
    """Fed with the lines of one start."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._words = FailureReasons()
        self._reached = 0.0

    def feed(self, line: str) -> None:
        """Take one line, and report the stage that it tells of."""
        self._words.feed(line)
        for words, stage, fraction in _STAGES:
            if words in line and fraction > self._reached:
                self._reached = fraction
                self._report(Progress(stage, fraction))

    def failure(self) -> str:
        """Return why the start failed, an empty text when no reason was given."""
        return self._words.best()


def build_command(plan: LoadPlan, ports: list[int], folder: Path) -> list[str]:
    """Return the command that serves ``plan``. ``ports``: of the API, of its metrics, and for its shards to meet on."""
    options = plan.options
    model = str(plan.path or options.get("server_model") or plan.model_id)
    command = [
        str(options["tgi_launcher"]), "--model-id", model, "--hostname", "127.0.0.1", "--port", str(ports[0]),
        "--prometheus-port", str(ports[1]), "--master-port", str(ports[2]), "--shard-uds-path", str(folder / "s"),
        "--max-batch-size", str(plan.slots), "--max-concurrent-requests", str(max(plan.slots * 2, plan.slots + 8)),
    ]  # fmt: skip
    if plan.context_tokens:
        command += ["--max-total-tokens", str(plan.context_tokens), "--max-input-tokens", str(plan.context_tokens - 1)]
    if len(plan.gpu_ids) > 1:
        command += ["--num-shard", str(len(plan.gpu_ids))]
    if plan.quantization:
        command += ["--quantize", plan.quantization]
    adapters = options.get("tgi_adapters")
    if isinstance(adapters, list | tuple) and adapters:
        command += ["--lora-adapters", ",".join(str(name) for name in adapters)]
    return command


def build_environment(plan: LoadPlan, key: str) -> dict[str, str]:
    """Return the launcher's environment; ``key`` is what its API is to ask for."""
    caching = "1" if plan.options.get("tgi_prefix_caching") is True else "0"
    return child_environment() | {
        "API_KEY": key,  # not on the command line, which every user of the machine can read
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "USAGE_STATS": "off",
        "PREFIX_CACHING": caching,
        "USE_PREFIX_CACHING": caching,
        "CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in plan.gpu_ids),
    }


def free_ports(count: int) -> list[int]:
    """Return loopback ports that nothing has now; TGI cannot pick them itself and tell.

    Where Linux says which ports it gives to those that ask for any, they lie below: until TGI listens, nothing else gets them.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in _candidates(count):
            place = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                place.bind(("127.0.0.1", port))
                found.append(place.getsockname()[1])
            if len(found) == count:
                break
    return found


def _candidates(count: int) -> Iterator[int]:
    """Yield ports to try, 0 = any."""
    lowest, tries = limits().engines.tgi_lowest_port, limits().engines.tgi_port_tries
    width = lowest_given_port() - lowest
    if width > tries:
        yield from (lowest + secrets.randbelow(width) for _ in range(tries))
    yield from [0] * count


def lowest_given_port() -> int:
    """Return the lowest port that Linux gives to those that ask for any, 0 where that is not known."""
    try:
        return int(_GIVEN_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0


_TOKENIZER_PATHS = frozenset({"/tokenize", "/chat_tokenize"})
_BASE_MODEL = msgspec.Raw(b'"tgi"')
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Info(msgspec.Struct):
    model_id: str = ""
    version: str = ""
    max_concurrent_requests: int | None = None
    max_total_tokens: int | None = None


class _ChatTokens(msgspec.Struct):
    tokenize_response: list[msgspec.Raw]


class _Problem(msgspec.Struct):
    error: str
    error_type: str = ""


class TgiEngine:
    """The adapter. Options: ``server_url`` of a running server and ``server_api_key_env``, the variable with its key; or
    ``tgi_launcher``, the program to start. ``server_model``: what the server calls the model where that is not our name for
    it; ``tgi_adapters``: names of LoRA adapters it was started with; ``tgi_prefix_caching``: True has a launcher of ours cache.
    """

    name = "tgi"
    poll_s = 5.0
    restart_max_s = 120.0

    def __init__(self, plan: LoadPlan, client: aiohttp.ClientSession) -> None:
        self._plan = plan
        self._server = HttpServer(client)
        self._child = Child(f"tgi {plan.model_id}")
        self._folder: Path | None = None
        self._info = _Info()
        self._log = LauncherLog(_ignore)
        self._is_loaded = False

    @property
    def capabilities(self) -> Capabilities:
        """What TGI offers; it tells nothing of its cache."""
        is_caching = not self._is_ours or self._plan.options.get("tgi_prefix_caching") is True
        return Capabilities(
            endpoints=(CHAT, COMPLETIONS, TOKENIZE),
            version=self._info.version,
            max_inflight=None if self._is_ours else self._info.max_concurrent_requests,
            context_tokens=self._info.max_total_tokens,
            prefix_caching=is_caching,
            keeps_nothing=not is_caching,
            isolates_tenants=not is_caching,
            reports_progress=self._is_ours,
            counts_tokens=True,
            function_calling=True,
            needs_tidying=True,  # each piece of a tool call has an empty id and a name that is null
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """The launcher's process when it is ours."""
        return (self._child.pid,) if self._child.pid is not None else ()

    async def load(self, report: Report) -> None:
        """Start the launcher, or ask the running server, until the model is there. Raises EngineError."""
        await self.unload(gently=False)
        try:
            if self._is_ours:
                await self._start(report)
            else:
                report(Progress("asking the server"))
                self._server.base_url = read_url(
                    self._plan, example="http://127.0.0.1:3000, or tgi_launcher, a program to start"
                )
                self._server.headers = bearer(self._plan)
                if await self._server.check() is not Health.OK:
                    raise EngineError(f"{self._server.base_url}/health does not answer 200: it may still be loading")
            self._info = await self._ask_info()
        except BaseException:
            await self.unload(gently=False)
            raise
        self._is_loaded = True
        report(Progress("ready", 1.0))

    async def unload(self, *, gently: bool) -> None:
        """End a launcher of ours and its shards. Raises EngineError when they cannot be killed.

        A server of somebody else's is not ours to stop: asked gently that is an error and it stays in use, else it is let go.
        """
        if not self._is_ours and self._is_loaded and gently:
            raise EngineError(
                f"{self._server.base_url} serves this one model for as long as it runs and is not ours to stop: stop it there"
            )
        was_loaded, self._is_loaded = self._is_loaded, False
        self._server.close()
        if gently and was_loaded and self._is_ours:
            gently = await self._server.check() is Health.OK  # one that hangs would not hear the signal either
        tree = await asyncio.to_thread(list_tree, self._child.pid)
        folder, self._folder = self._folder, None
        try:
            await self._child.stop(gently=gently, limit_s=limits().engines.server_stop_s)
        finally:
            left = await kill_rest(tree)
            if folder is not None:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if left:
            raise EngineError(f"processes {left} of TGI cannot be killed: they wait for a driver; restart the machine")

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """Say that there is no such thing."""
        del request
        if self.capabilities.keeps_nothing:
            detail = "TGI runs without prefix caching here: nothing is kept between requests"
            return FlushOutcome(FlushResult.NOTHING_KEPT, detail)
        return FlushOutcome(FlushResult.NOT_SUPPORTED, "TGI has no call that clears its cache: unload and load the model")

    async def stats(self) -> EngineStats:
        """Return the numbers of ``/metrics``; tokens count what the running batch may grow to."""
        if not self._is_loaded:
            return EngineStats()
        try:
            status, text = await self._server.ask("GET", "/metrics")
        except EngineError:
            return EngineStats()
        samples = read_samples(text.decode("utf-8", "replace") if status == 200 else "", "tgi_")
        return EngineStats(
            running=samples.count("tgi_batch_current_size"),
            waiting=samples.count("tgi_queue_size"),
            kv_total_tokens=samples.count("tgi_batch_max_total_tokens"),
            kv_used_tokens=samples.count("tgi_batch_current_max_tokens"),
        )

    async def read_metrics(self) -> str:
        """Return TGI's ``/metrics``, an empty text when they do not come."""
        return await self._server.read_metrics() if self._is_loaded else ""

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[Response]:
        """Send a request. Raises aiohttp.ClientError, OSError, and RequestRefused for an error answer in TGI's own shape."""
        if not self._is_loaded:
            raise aiohttp.ClientConnectionError("TGI is not loaded")
        path = call.path.partition("?")[0]
        if path not in {CHAT, COMPLETIONS} | _TOKENIZER_PATHS:
            raise ModalityUnsupported(f"{self._plan.model_id} does not serve {path}")
        async with self._server.send(self._address(call)) as response:
            if response.status >= 400 and response.content_type == "application/json":
                await _raise_problem(response)
            yield response

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        """Ask the server, for prompts of up to 128 KiB. Raises InvalidRequest, EngineError."""
        if not self._is_loaded:
            raise EngineError("TGI is not loaded")
        if sum(len(memoryview(value)) for value in fields.values()) > limits().engines.tgi_count_bytes:
            raise InvalidRequest(f"TGI counts prompts of at most {limits().engines.tgi_count_bytes} bytes.")
        is_chat = "messages" in fields
        path = "/chat_tokenize" if is_chat else "/tokenize"
        asked: dict[str, object] = {**fields, "model": _BASE_MODEL} if is_chat else {"inputs": fields["prompt"]}
        status, body = await self._server.ask("POST", path, body=asked, timeout_s=limits().engines.count_s)
        body = take_answer(path, status, body)
        try:
            if is_chat:
                return len(msgspec.json.decode(body, type=_ChatTokens).tokenize_response)
            return len(msgspec.json.decode(body, type=list[msgspec.Raw]))
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise EngineError(f"{path} answers with something else than tokens") from None

    async def health(self) -> Health:
        """Ask ``/health`` once."""
        return await self._server.check() if self._is_loaded else Health.UNREACHABLE

    async def wait_gone(self) -> None:
        """Return when a launcher of ours has exited; for another's server, never."""
        if not self._is_ours:
            await asyncio.get_running_loop().create_future()
        while self._child.is_running:  # noqa: ASYNC110  # a process sets no event, and orphaned shards hold its pipes open
            await asyncio.sleep(limits().engines.server_look_s)

    @property
    def _is_ours(self) -> bool:
        return bool(self._plan.options.get("tgi_launcher"))

    async def _start(self, report: Report) -> None:
        """Start the launcher and wait until it is healthy. Raises EngineError with its last words."""
        self._folder = await asyncio.to_thread(make_private_folder, "tgi")
        ports, key = free_ports(3), secrets.token_urlsafe(24)
        self._server.base_url = f"http://127.0.0.1:{ports[0]}"
        self._server.headers = {"Authorization": f"Bearer {key}"}
        command = build_command(self._plan, ports, self._folder)
        report(Progress("starting TGI", 0.0))
        self._log = LauncherLog(report)
        await self._child.start_foreign(command, build_environment(self._plan, key), self._log.feed)
        try:
            async with asyncio.timeout(limits().engines.server_load_s):
                await self._wait_healthy()
        except TimeoutError:
            raise EngineError(f"TGI did not load {self._plan.model_id} within {limits().engines.server_load_s:.0f} s") from None

    async def _wait_healthy(self) -> None:
        while await self._server.check() is not Health.OK:
            if not self._child.is_running:
                await self._child.kill()  # also waits for the last lines to be read
                raise EngineError(
                    f"TGI could not load {self._plan.model_id}: {self._log.failure() or self._child.last_words()}"
                )
            await asyncio.sleep(limits().engines.server_look_s)

    async def _ask_info(self) -> _Info:
        """Return what the server says of itself. Raises EngineError unless it serves the model of the plan."""
        status, body = await self._server.ask("GET", "/info")
        try:
            info = msgspec.json.decode(body, type=_Info) if status == 200 else _Info()
        except (msgspec.DecodeError, UnicodeDecodeError):
            info = _Info()
        if not info.model_id:
            raise EngineError(f"{self._server.base_url}/info does not name a model (HTTP {status}): is it TGI?")
        expected = {str(self._plan.options.get("server_model") or self._plan.model_id)}
        if self._plan.path is not None:
            expected.add(str(self._plan.path))
        if info.model_id not in expected:
            raise EngineError(
                f"{self._server.base_url} serves {info.model_id}, not {self._plan.model_id}: set server_model to its name there"
            )
        return info

    def _address(self, call: Call) -> Call:
        """Return the call with the name under which TGI means its base model; any other it takes for an adapter."""
        path = call.path.partition("?")[0]
        if path not in {CHAT, COMPLETIONS}:
            return call
        try:
            fields = _fields_decoder.decode(call.body)
        except UNREADABLE:
            return call
        adapters = self._plan.options.get("tgi_adapters")
        known = {msgspec.json.encode(name) for name in adapters} if isinstance(adapters, list | tuple) else set()
        if bytes(fields.get("model", b"")) not in known:
            fields["model"] = _BASE_MODEL
        return replace(call, body=msgspec.json.encode(fields))


async def _raise_problem(response: Response) -> None:
    """Raise what an error answer in TGI's shape means; return when it has another. Raises aiohttp.ClientError."""
    if (response.content_length or 0) > limits().engines.tgi_error_bytes:
        return
    try:
        # read() keeps the body, so an answer in another shape can still be passed on.
        problem = msgspec.json.decode(await response.read(), type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    raise _refusal(response.status, problem)


def _refusal(status: int, problem: _Problem) -> RequestRefused:
    if status == 429:
        return ModelQueueFull(problem.error, retry_after_s=1.0)
    if status in {400, 413, 422}:
        return InvalidRequest(problem.error)
    return EngineUnavailable(f"{problem.error_type or 'error'}: {problem.error}")


def _ignore(_progress: Progress) -> None:
    """Progress nobody asked for."""
