"""Text Generation Inference: a server that somebody else runs, or a ``text-generation-launcher`` of ours.

It serves one model for as long as it runs, so loading is starting it and unloading is stopping it. It has no call that
clears its cache and no salts: a launcher of ours therefore runs without prefix caching unless its owner wants it.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec

from runner.definitions.plan import LoadPlan, Progress, Report
from runner.engines.http import HttpServer, read_answer
from runner.engines.http_engine import (
    REFUSALS,
    HttpEngine,
    Loader,
    ServerProcess,
    Start,
    bearer,
    fields_decoder,
    read_samples,
    read_url,
    take_answer,
)
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
    Response,
)
from runner.engines.process import StageLog, child_environment, gpu_environment
from runner.errors import EngineError, EngineUnavailable, InvalidRequest, ModalityUnsupported, ModelQueueFull
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
    caching = "1" if plan.options.get("tgi_prefix_caching") is True else "0"
    gpus = gpu_environment(plan.gpu_ids, is_cpu=not plan.gpu_ids)
    return {
        **child_environment(),
        **gpus,
        "API_KEY": key,  # not on the command line, which every user of the machine can read
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "USAGE_STATS": "off",
        "PREFIX_CACHING": caching,
        "USE_PREFIX_CACHING": caching,
    }


def free_ports(count: int) -> list[int]:
    """Return loopback ports that nothing has now; TGI cannot pick them itself and tell."""
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
    lowest, tries = limits().engines.tgi_lowest_port, limits().engines.tgi_port_tries
    width = lowest_given_port() - lowest
    if width > tries:  # below those that Linux gives to who asks for any: until TGI listens, nothing else gets them
        yield from (lowest + secrets.randbelow(width) for _ in range(tries))
    yield from [0] * count  # any


def lowest_given_port() -> int:
    """Return the lowest port that Linux gives to those that ask for any, 0 where that is not known."""
    try:
        return int(_GIVEN_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0


_TOKENIZER_PATHS = frozenset({"/tokenize", "/chat_tokenize"})
_BASE_MODEL = msgspec.Raw(b'"tgi"')


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


def make_tgi(plan: LoadPlan, client: aiohttp.ClientSession) -> HttpEngine:
    server = HttpServer()
    loader: Loader = RunningTgi(plan, server)
    if plan.options.get("tgi_launcher"):

        async def prepare(folder: Path, report: Report) -> Start:
            ports, key = free_ports(3), secrets.token_urlsafe(24)
            server.base_url = f"http://127.0.0.1:{ports[0]}"
            server.headers = {"Authorization": f"Bearer {key}"}
            return Start(build_command(plan, ports, folder), build_environment(plan, key), StageLog(report, _STAGES))

        loader = ServerProcess("TGI", plan, server, prepare)
    probe = TgiProbe(plan, server)
    return HttpEngine(
        server, loader, probe, name="tgi", poll_s=5.0, restart_max_s=120.0, meet=probe.meet, count=probe.count_tokens
    )


class RunningTgi:
    """Finds the model on a server that somebody else started for it, and that is not ours to stop."""

    is_attached = True
    child = None

    def __init__(self, plan: LoadPlan, server: HttpServer) -> None:
        self._plan = plan
        self._server = server

    async def load(self, report: Report) -> None:
        report(Progress("asking the server"))
        server = self._server
        server.base_url = read_url(self._plan, example="http://127.0.0.1:3000, or tgi_launcher, a program to start")
        server.headers = bearer(self._plan)
        if await server.check() is not Health.OK:
            raise EngineError(f"{server.base_url}/health does not answer 200: it may still be loading")

    async def unload(self, *, gently: bool) -> None:
        if gently:  # else it is let go
            raise EngineError(
                f"{self._server.base_url} serves this one model for as long as it runs and is not ours to stop: stop it there"
            )


class TgiProbe:
    """What TGI is asked. It tells nothing of its cache."""

    has_metrics = True

    def __init__(self, plan: LoadPlan, server: HttpServer) -> None:
        self._plan = plan
        self._server = server
        self._is_ours = bool(plan.options.get("tgi_launcher"))
        is_caching = not self._is_ours or plan.options.get("tgi_prefix_caching") is True
        self.capabilities = Capabilities(
            endpoints=(CHAT, COMPLETIONS, TOKENIZE),
            prefix_caching=is_caching,
            keeps_nothing=not is_caching,
            isolates_tenants=not is_caching,
            function_calling=True,
            needs_tidying=True,  # each piece of a tool call has an empty id and a name that is null
        )

    async def meet(self, report: Report) -> None:
        plan, (status, body) = self._plan, await self._server.ask("GET", "/info")
        otherwise = f"{self._server.base_url}/info does not name a model (HTTP {status}): is it TGI?"
        info = read_answer(body, _Info, otherwise)
        if status != 200 or not info.model_id:
            raise EngineError(otherwise)
        expected = {str(plan.options.get("server_model") or plan.model_id)}
        if plan.path is not None:
            expected.add(str(plan.path))
        if info.model_id not in expected:
            raise EngineError(
                f"{self._server.base_url} serves {info.model_id}, not {plan.model_id}: set server_model to its name there"
            )
        self.capabilities = replace(
            self.capabilities, version=info.version, context_tokens=info.max_total_tokens,
            max_inflight=None if self._is_ours else info.max_concurrent_requests,
        )  # fmt: skip
        report(Progress("ready", 1.0))

    @asynccontextmanager
    async def send(self, call: Call) -> AsyncIterator[Response]:
        """Also raises RequestRefused for an error answer in TGI's own shape."""
        path = call.path.partition("?")[0]
        if path not in {CHAT, COMPLETIONS} | _TOKENIZER_PATHS:
            raise ModalityUnsupported(f"{self._plan.model_id} does not serve {path}")
        async with self._server.send(self._address(call, path)) as response:
            if response.status >= 400 and response.content_type == "application/json":
                await _raise_problem(response)
            yield response

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        if self.capabilities.keeps_nothing:
            detail = "TGI runs without prefix caching here: nothing is kept between requests"
            return FlushOutcome(FlushResult.NOTHING_KEPT, detail)
        return FlushOutcome(FlushResult.NOT_SUPPORTED, "TGI has no call that clears its cache: unload and load the model")

    async def read_stats(self) -> EngineStats:
        samples = read_samples(await self._server.read_metrics(), "tgi_")
        return EngineStats(
            running=samples.count("tgi_batch_current_size"),
            waiting=samples.count("tgi_queue_size"),
            kv_total_tokens=samples.count("tgi_batch_max_total_tokens"),  # what the running batch may grow to
            kv_used_tokens=samples.count("tgi_batch_current_max_tokens"),
        )

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        if sum(len(memoryview(value)) for value in fields.values()) > limits().engines.tgi_count_bytes:
            raise InvalidRequest(f"TGI counts prompts of at most {limits().engines.tgi_count_bytes} bytes.")
        is_chat = "messages" in fields
        path = "/chat_tokenize" if is_chat else "/tokenize"
        asked: dict[str, object] = {**fields, "model": _BASE_MODEL} if is_chat else {"inputs": fields["prompt"]}
        status, body = await self._server.ask("POST", path, body=asked, timeout_s=limits().engines.count_s)
        body, otherwise = take_answer(path, status, body), f"{path} answers with something else than tokens"
        if is_chat:
            return len(read_answer(body, _ChatTokens, otherwise).tokenize_response)
        return len(read_answer(body, list[msgspec.Raw], otherwise))

    def _address(self, call: Call, path: str) -> Call:
        if path not in {CHAT, COMPLETIONS}:
            return call
        try:
            fields = fields_decoder.decode(call.body)
        except UNREADABLE:
            return call
        adapters = self._plan.options.get("tgi_adapters")
        known = {msgspec.json.encode(name) for name in adapters} if isinstance(adapters, list | tuple) else set()
        if bytes(fields.get("model", b"")) not in known:
            fields["model"] = _BASE_MODEL  # any other name it takes for an adapter
        return replace(call, body=msgspec.json.encode(fields))


async def _raise_problem(response: Response) -> None:
    if (response.content_length or 0) > limits().engines.tgi_error_bytes:
        return
    try:
        # read() keeps the body, so an answer in another shape can still be passed on.
        problem = msgspec.json.decode(await response.read(), type=_Problem)
    except UNREADABLE:
        return
    if response.status == 429:
        raise ModelQueueFull(problem.error, retry_after_s=1.0)
    if response.status in REFUSALS:
        raise InvalidRequest(problem.error)
    raise EngineUnavailable(f"{problem.error_type or 'error'}: {problem.error}")
