"""What is said to a ComfyUI server over HTTP, and what it answers. How a prompt goes on is in ``job``.

Source: server.py and execution.py of ComfyUI, versions of 2024 to 2025. An older server ignores ``prompt_id``: it gives a
prompt an id of its own choice and interrupts whatever runs, so both are looked up before they are relied on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import msgspec

from runner.engines.children.web import Refusal
from runner.engines.comfyui.workflow import Graph
from runner.engines.http import HttpServer
from runner.engines.port import Health, Priority
from runner.errors import EngineError
from runner.limits import limits

Answer = TypeVar("Answer")


class _Error(msgspec.Struct):
    """Why a graph is refused; the server checks each node's inputs."""

    type: str = ""
    message: str = ""
    details: str = ""


class _NodeErrors(msgspec.Struct):
    class_type: str = ""
    errors: list[_Error] = []


class _Submitted(msgspec.Struct):
    prompt_id: str = ""
    error: _Error | str | None = None
    node_errors: dict[str, _NodeErrors] | list[object] = {}


class _Queue(msgspec.Struct):
    """Items are ``[number, prompt_id, graph, extra_data, outputs]``."""

    queue_running: list[list[object]] = []
    queue_pending: list[list[object]] = []


class Image(msgspec.Struct, frozen=True):
    """Where the server keeps a file that a node has made; ``type`` is output or temp."""

    filename: str
    subfolder: str = ""
    type: str = "output"


class _Output(msgspec.Struct):
    images: list[Image] = []


class _Status(msgspec.Struct):
    status_str: str = ""
    messages: list[tuple[str, dict[str, object]]] = []


class _Entry(msgspec.Struct):
    outputs: dict[str, _Output] = {}
    status: _Status | None = None


class _Device(msgspec.Struct):
    type: str = ""
    torch_vram_total: int = 0


class _System(msgspec.Struct):
    comfyui_version: str = ""


class _SystemStats(msgspec.Struct):
    system: _System
    devices: list[_Device] = []


class _NodeInfo(msgspec.Struct):
    """``input``: by required or optional, and name. A choice is ``[[…], {…}]``, of late ``["COMBO", {"options": […]}]``."""

    input: dict[str, dict[str, object]] = {}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a prompt ended. ``error``: the failing node's words, empty when it succeeded. ``may_pass``: it is not the fault of
    the request, which may go well another time.
    """

    images: tuple[Image, ...] = ()
    error: str = ""
    may_pass: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """Prompts on the server, everybody's: ids of those that run and those that wait."""

    running: tuple[str, ...]
    pending: tuple[str, ...]


class ComfyServer:
    """One server. ``url`` has no trailing slash; ``headers`` carry the key where a proxy in front wants one."""

    def __init__(self, client: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        self._client = client
        self._http = HttpServer(client)
        self._http.base_url = url
        self._http.headers = {"Accept-Encoding": "identity", **headers}
        self.url = url

    async def version(self) -> str:
        """Return the server's version. Raises EngineError when it does not answer as ComfyUI does."""
        stats = await self._stats()
        return stats.system.comfyui_version

    async def reserved_bytes(self) -> int | None:
        """Return the GPU memory that the server's process holds for models, None when it has no GPU. Raises EngineError."""
        devices = [device for device in (await self._stats()).devices if device.type != "cpu"]
        return sum(device.torch_vram_total for device in devices) if devices else None

    async def check(self) -> Health:
        """Ask for the length of the queue, the cheapest question there is."""
        return await self._http.check("/prompt")

    async def node_choices(self, node_type: str) -> dict[str, list[str]] | None:
        """Return what each input of a kind of node may be, where it is a choice; None when there is no such node.

        Raises EngineError.
        """
        known = await self._ask_for(f"/object_info/{quote(node_type, safe='')}", dict[str, _NodeInfo])
        if node_type not in known:
            return None
        inputs = [pair for group in known[node_type].input.values() for pair in group.items()]
        return {name: choices for name, spec in inputs if (choices := _read_choices(spec)) is not None}

    async def submit(self, graph: Graph, *, client_id: str, prompt_id: str, priority: Priority) -> str:
        """Queue a graph; return the id it has there. Raises Refusal with the node's words, EngineError."""
        body: dict[str, object] = {"prompt": graph, "client_id": client_id, "prompt_id": prompt_id}
        if priority == "high":
            body["front"] = True
        elif priority == "low":
            body["number"] = 1_000_000_000_000  # smaller ones run first, and the server's own count prompts
        status, answer = await self._http.ask("POST", "/prompt", body=body, timeout_s=limits().comfyui.submit_s)
        try:
            said = msgspec.json.decode(answer, type=_Submitted)
        except (msgspec.DecodeError, UnicodeDecodeError):
            said = _Submitted()
        if status == 400:
            raise Refusal(_explain_refusal(said), code="workflow_refused")
        if status != 200 or not said.prompt_id:
            raise EngineError(f"{self.url}/prompt answers HTTP {status}")
        return said.prompt_id

    async def waiting(self, client_id: str | None = None) -> Waiting:
        """Return the prompts on the server, or only those of a client. Raises EngineError."""
        queue = await self._ask_for("/queue", _Queue)
        return Waiting(_prompt_ids(queue.queue_running, client_id), _prompt_ids(queue.queue_pending, client_id))

    async def remove(self, prompt_ids: tuple[str, ...]) -> None:
        """Take prompts that wait out of the queue. Raises EngineError."""
        await self._tell("/queue", {"delete": list(prompt_ids)})

    async def interrupt(self, prompt_id: str) -> None:
        """Stop a prompt that was just seen running, and no other. Raises EngineError."""
        await self._tell("/interrupt", {"prompt_id": prompt_id})

    async def forget(self, prompt_ids: tuple[str, ...]) -> None:
        """Take prompts out of the history, which everybody can read who reaches the server. Raises EngineError."""
        await self._tell("/history", {"delete": list(prompt_ids)})

    async def outcome(self, prompt_id: str) -> Outcome | None:
        """Return how a prompt ended, None while it has not. Raises EngineError."""
        entries = await self._ask_for(f"/history/{quote(prompt_id, safe='')}", dict[str, _Entry])
        entry = entries.get(prompt_id)
        if entry is None:
            return None
        if entry.status is not None and entry.status.status_str == "error":
            return _read_failure(entry.status)
        images = [image for output in entry.outputs.values() for image in output.images]
        kept = [image for image in images if image.type == "output"]
        return Outcome(images=tuple(kept or images))

    async def view(self, image: Image) -> bytes:
        """Return an image file. Raises EngineError."""
        query = urlencode({"filename": image.filename, "subfolder": image.subfolder, "type": image.type})
        url = f"{self.url}/view?{query}"
        try:
            async with self._client.get(
                url,
                headers=self._http.headers,
                timeout=aiohttp.ClientTimeout(total=limits().comfyui.view_s),
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise EngineError(f"{self.url}/view answers HTTP {response.status}")
                data = bytearray()
                async for chunk in response.content.iter_chunked(256 * 1024):
                    data += chunk
                    if len(data) > limits().comfyui.image_bytes:
                        raise EngineError(f"an image has more than {limits().comfyui.image_bytes} bytes")
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"an image could not be fetched from {self.url}: {type(error).__name__}") from None
        return bytes(data)

    async def free(self) -> None:
        """Ask the server to give up its models; it does so when it is next idle. Raises EngineError."""
        await self._tell("/free", {"unload_models": True, "free_memory": True})

    async def listen(self, client_id: str) -> aiohttp.ClientWebSocketResponse | None:
        """Open the WebSocket on which a client hears of its prompts; None when that fails: the history tells as well."""
        url = f"{self.url}/ws?{urlencode({'clientId': client_id})}"
        try:
            async with asyncio.timeout(limits().comfyui.connect_s):
                return await self._client.ws_connect(
                    url, headers=self._http.headers, heartbeat=20.0, max_msg_size=limits().comfyui.message_bytes,
                    timeout=aiohttp.ClientWSTimeout(ws_close=limits().comfyui.close_s),
                )  # fmt: skip
        except (aiohttp.ClientError, OSError):
            return None

    async def _stats(self) -> _SystemStats:
        return await self._ask_for("/system_stats", _SystemStats)

    async def _ask_for(self, path: str, kind: type[Answer]) -> Answer:
        status, body = await self._http.ask("GET", path)
        if status in {401, 403}:
            raise EngineError(f"{self.url} does not accept our key: check server_api_key_env")
        if status != 200:
            raise EngineError(f"{self.url}{path} answers HTTP {status}: is it ComfyUI?")
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise EngineError(f"{self.url}{path} does not answer as ComfyUI does") from None

    async def _tell(self, path: str, body: dict[str, object]) -> None:
        status, _ = await self._http.ask("POST", path, body=body)
        if status != 200:
            raise EngineError(f"{self.url}{path} answers HTTP {status}")


def _read_failure(status: _Status) -> Outcome:
    for kind, fields in reversed(status.messages):
        if kind == "execution_error":
            return _describe_failure(fields)
        if kind == "execution_interrupted":
            return Outcome(error="it was interrupted on the server", may_pass=True)
    return Outcome(error="the server gives no reason")


def _describe_failure(fields: Mapping[str, object]) -> Outcome:
    """Return the outcome in an ``execution_error``: the node that failed and its words."""
    said = str(fields.get("exception_message") or fields.get("exception_type") or "no reason given").strip()
    node = str(fields.get("node_type") or "a node")
    kind = str(fields.get("exception_type") or "")
    return Outcome(
        error=f"{node}: {said}"[: limits().comfyui.said_chars], may_pass="OutOfMemory" in kind or "out of memory" in said
    )


def _explain_refusal(said: _Submitted) -> str:
    """Return why a graph is refused, as a sentence or two: what the nodes say, else what the server says of the whole."""
    nodes = said.node_errors if isinstance(said.node_errors, dict) else {}
    words = [
        f"{node.class_type or 'a node'} (node {node_id}): {': '.join(filter(None, (error.message, error.details)))}"
        for node_id, node in nodes.items()
        for error in node.errors
    ]
    if not words:
        error = said.error
        words = [error if isinstance(error, str) else ": ".join(filter(None, (error.message, error.details))) if error else ""]
    return f"ComfyUI refuses the workflow: {'; '.join(filter(None, words)) or 'no reason given'}"[: limits().comfyui.said_chars]


def _prompt_ids(items: list[list[object]], client_id: str | None) -> tuple[str, ...]:
    return tuple(str(item[1]) for item in items if len(item) > 1 and (client_id is None or _client_of(item) == client_id))


def _client_of(item: list[object]) -> object:
    extra = item[3] if len(item) > 3 else None
    return extra.get("client_id") if isinstance(extra, dict) else None


def _read_choices(spec: object) -> list[str] | None:
    """Return the choices an input has, None when it is no choice."""
    match spec:
        case [list() as choices, *_]:
            return [str(choice) for choice in choices]
        case ["COMBO", {"options": list() as choices}, *_]:
            return [str(choice) for choice in choices]
        case _:
            return None
