"""The port: what the runner needs of an engine, whatever it is, and which adapter serves which backend.

Every engine answers HTTP in the OpenAI shape on an address that only the adapter knows: llama.cpp and vLLM bring such a
server, libraries get one from us in their child process. So one exchange serves them all, and bytes pass untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Literal, Protocol

import aiohttp
import msgspec
from multidict import CIMultiDictProxy

from runner.definitions.plan import LoadPlan, Report
from runner.errors import EngineError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
IMAGES = "/v1/images/generations"
POOL_RESPONSES = "/v1/pool/responses"
"""llm-pool's form of ``/v1/responses``: the node answers it for every chat model, so gateways are told of it apart."""
CONTINUATIONS = "/v1/pool/continuations"
"""A chat whose last message is the assistant's, as far as it came at another node: the engine goes on with it. Gateways are
told of it apart, where the engine is known to (``Capabilities.continuation``)."""
TOKENIZE = "/v1/tokenize"
"""How many tokens a prompt has. No engine answers it itself: an adapter that counts is asked by ``count_tokens``."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an adapter can do with the model it has loaded. ``endpoints``: API paths it speaks natively.

    ``max_inflight``: most requests at once, None = what the plan says. ``context_tokens``: prompt and answer of one request
    together, None = the engine does not tell. The rest is what the engine itself offers: the runner's own queues, priorities
    and limits work for all of them.
    """

    endpoints: tuple[str, ...]
    version: str = ""
    """The engine's own version as it or its package says it, empty = neither does."""
    private_endpoints: tuple[str, ...] = ()
    """Those of ``endpoints`` that the engine answers not quite as clients expect: a gateway does better to translate."""
    max_inflight: int | None = None
    context_tokens: int | None = None
    streaming: bool = True
    prefix_caching: bool = False
    keeps_nothing: bool = False
    """It is certain that nothing of a request is kept for another: there is nothing to flush, and no answer reuses anything."""
    isolates_tenants: bool = False
    engine_priority: bool = False
    flushes_cache: bool = False
    vision_input: bool = False
    audio_input: bool = False
    function_calling: bool = False
    is_remote: bool = False
    needs_tidying: bool = False
    """Whether chunks of its chat streams are known to break strict clients."""
    continuation: Mapping[str, object] | None = None
    """Members of a chat's body by which the engine goes on with the last message, the assistant's, streaming only what is new.

    Those of an object are added to the client's. None = it is not known to go on."""

    @property
    def counts_tokens(self) -> bool:
        return TOKENIZE in self.endpoints

    @property
    def declared_endpoints(self) -> tuple[str, ...]:
        """What gateways are told; nothing = they may ask anything."""
        told = tuple(path for path in self.endpoints if path not in self.private_endpoints)
        if CHAT not in told:
            return told
        return (*told, POOL_RESPONSES) if self.continuation is None else (*told, POOL_RESPONSES, CONTINUATIONS)


class FlushScope(StrEnum):
    """What of the KV cache is to go, as the model-runner specification names it."""

    ALL = "all"
    MODEL = "model"
    TENANT = "tenant"
    TAG = "tag"


class FlushResult(StrEnum):
    """How a flush ended. FLUSHED is said only after the adapter has seen for itself that nothing is reused.

    NOTHING_KEPT: the engine has no cache for that scope, so nothing is left there either. NOT_SUPPORTED: something may be left.
    """

    FLUSHED = "flushed"
    REFUSED_BUSY = "refused-busy"
    RELOADED = "reloaded"
    NOT_SUPPORTED = "not-supported"
    NOTHING_KEPT = "nothing-kept"


@dataclass(frozen=True, slots=True)
class FlushRequest:
    """``tenant`` and ``tag`` are set for the scopes that need them; both may be set for TAG."""

    scope: FlushScope
    tenant: str | None = None
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class FlushOutcome:
    """``entries_removed``: cache entries (slots, blocks; the adapter's unit), None = the engine does not tell."""

    result: FlushResult
    detail: str = ""
    entries_removed: int | None = None
    memory_freed_mb: int | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Numbers the engine itself reports; None = it does not tell."""

    running: int | None = None
    waiting: int | None = None
    kv_total_tokens: int | None = None
    kv_used_tokens: int | None = None
    kv_bytes: int | None = None
    weights_bytes: int | None = None


CacheMode = Literal["prefix", "none", "auto"]
Priority = Literal["high", "normal", "low"]


@dataclass(frozen=True, slots=True)
class Call:
    """One inference request as an engine gets it. ``path`` may carry a query; ``headers`` are lower-case.

    ``cache_tag`` scopes cache entries within the tenant; ``cache_mode`` "none" means: reuse nothing, leave nothing.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    tenant: str = "anonymous"
    cache_mode: CacheMode = "auto"
    cache_tag: str = ""
    priority: Priority = "normal"


class Health(StrEnum):
    """Outcome of one health check."""

    OK = "ok"
    SILENT = "silent"
    UNREACHABLE = "unreachable"


class Body(Protocol):
    """The body of an answer, read in pieces. Reading raises aiohttp.ClientError or OSError when the engine breaks off."""

    async def readany(self) -> bytes:
        """Return what has come, waiting for something; nothing at the end."""


class Response(Protocol):
    """An engine's answer: ``runner.engines.http.HttpResponse``, or aiohttp's ``ClientResponse``."""

    @property
    def status(self) -> int:
        """Of HTTP."""

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """As they came."""

    @property
    def content_type(self) -> str:
        """The media type in small letters, without parameters."""

    @property
    def content_length(self) -> int | None:
        """The length that is told, in bytes."""

    @property
    def content(self) -> Body:
        """The body, to be read in pieces."""

    async def read(self) -> bytes:
        """Return the whole body, again when it is asked for again."""


class LoopOwner(Protocol):
    """What works for all clients of an engine in one loop, which may stand still while its server lets go of clients."""

    @property
    def batch_s(self) -> float:
        """Seconds that one step of the loop takes at most, by what it has done so far."""

    async def ask_loop(self) -> None:
        """Return when the loop has answered, or its server is known not to. Never raises."""


class Engine(Protocol):
    """One replica of one model in one engine. ``poll_s`` is the time between health checks, ``restart_max_s`` the longest
    back-off before a restart, in seconds. ``name`` is the label in metrics and on the wire. ``loop`` is the one that it is
    known to work in.
    """

    name: str
    poll_s: float
    restart_max_s: float
    loop: LoopOwner | None

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; final once ``load`` has returned."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Root processes that are ours, whose trees hold the model; empty for a server of somebody else's."""

    async def load(self, report: Report) -> None:
        """Return once it answers. Raises EngineError and then leaves no process behind; callable again after that.

        A cancelled load leaves nothing behind either.
        """

    async def unload(self, *, gently: bool) -> None:
        """Leave nothing behind, and return only when that has been seen (process exited, server says it is free).

        ``gently`` lets the engine unload itself first, bounded in time. Fine to call when nothing is loaded.
        Raises EngineError when a server of somebody else's refuses or keeps the model.
        """

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """Clear what the engine keeps between requests, and check that it is gone."""

    async def stats(self) -> EngineStats:
        """Return the engine's numbers; an empty value when it does not answer in time. Never raises."""

    def stream(self, call: Call) -> AbstractAsyncContextManager[Response]:
        """Send a request; leaving the context before the end of the body frees the engine within a second.

        Entering raises aiohttp.ClientError or OSError when the engine does not answer.
        """

    async def health(self) -> Health:
        """Check it once, in a few seconds at most."""

    async def wait_gone(self) -> None:
        """Return as soon as it is known to have died; for a server of somebody else's, never.

        Raises EngineError when another node ended the replica: it says why, and the engine is not to be loaded again.
        """

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        """Return how many tokens the engine would read, without generating anything; only of one that ``counts_tokens``.

        ``fields`` are the members of a chat completion's body, or have a text as ``prompt`` in place of ``messages``.
        Raises InvalidRequest when the engine does not accept them, and EngineError when it does not answer within a minute.
        """

    async def read_metrics(self) -> str:
        """Return what it counts on its own in Prometheus' text format, empty when it does not in time. Never raises."""


ADAPTERS: dict[str, str] = {
    "gguf": "runner.engines.llama:make_llamacpp",
    "llama_server": "runner.engines.llama:make_llama_server",
    "ct2": "runner.engines.library:make_ct2",
    "whisper": "runner.engines.library:make_whisper",
    "vllm": "runner.engines.vllm:make_vllm",
    "exllamav3": "runner.engines.library:make_exllamav3",
    "tabbyapi": "runner.engines.tabby:make_tabby",
    "tgi": "runner.engines.tgi:make_tgi",
    "comfyui": "runner.engines.comfy:make_comfyui",
    "openai_compatible": "runner.engines.remote:make_remote",
}
"""Backend name of the settings to ``module:function``; every function takes ``(plan, client)``."""

MEMBER_ADAPTER = "runner.engines.ray:make_member"
"""Of a replica that another node serves."""

EngineMaker = Callable[[LoadPlan, aiohttp.ClientSession], Engine]


def make_engine(plan: LoadPlan, client: aiohttp.ClientSession) -> Engine:
    """Return an adapter for one replica, nothing started yet. Raises EngineError for a backend without one."""
    try:
        module, _, name = (MEMBER_ADAPTER if plan.is_reserved else ADAPTERS[plan.backend]).partition(":")
    except KeyError:
        raise EngineError(
            f"there is no engine for the backend {plan.backend!r}; known: {', '.join(sorted(ADAPTERS))}"
        ) from None
    engine: Engine = getattr(import_module(module), name)(plan, client)
    return engine
