"""The ComfyUI server: the graphs it runs, what is said to it over HTTP, and one prompt from the queue to its images.

Source: server.py and execution.py of ComfyUI, versions of 2024 to 2025. An older server ignores ``prompt_id``: it gives a
prompt an id of its own choice and interrupts whatever runs, so both are looked up before they are relied on.

A template is a graph in the format that ComfyUI exports for its API, with ``{{prompt}}`` and its like in its values. A value
that is nothing but a placeholder gets the number or text itself; inside a longer text, its characters.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import msgspec

from runner.engines.children.web import Refusal
from runner.engines.http import HttpServer, read_answer
from runner.engines.port import Health, Priority
from runner.errors import EngineError
from runner.limits import limits
from wire import clock
from wire.unreadable import UNREADABLE

log = logging.getLogger(__name__)

# ---- image files ----

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TEXT_CHUNKS = frozenset({b"tEXt", b"zTXt", b"iTXt"})


def image_format(image: bytes) -> str:
    if image.startswith(PNG_SIGNATURE):
        return "png"
    if image.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    return "webp" if image[:4] == b"RIFF" and image[8:12] == b"WEBP" else "unknown"


def strip_texts(image: bytes) -> bytes:
    """Return a PNG without its text chunks; anything else as it is."""
    if not image.startswith(PNG_SIGNATURE):
        return image
    kept = [PNG_SIGNATURE]
    at = len(PNG_SIGNATURE)
    while at < len(image):
        # Length, type and checksum take four bytes each (PNG specification, section 5.3).
        end = at + int.from_bytes(image[at : at + 4], "big") + 12
        if end > len(image):  # cut short: what is left cannot be told from text
            break
        # ComfyUI puts the whole graph there, which is the node owner's: it names files and may hold keys of nodes.
        if image[at + 4 : at + 8] not in _TEXT_CHUNKS:
            kept.append(image[at:end])
        at = end
    return b"".join(kept)


# ---- graphs ----

LOADER = "CheckpointLoaderSimple"
PREVIEW = "PreviewAny"
PLACEHOLDERS = (
    "prompt", "negative_prompt", "width", "height", "seed", "steps", "cfg", "batch_size", "checkpoint",
)  # fmt: skip

Value = str | int | float
Graph = dict[str, object]
"""Node id to ``{"class_type": …, "inputs": {…}}``."""

_PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_]+)\s*\}\}")


class _Node(msgspec.Struct):
    class_type: str
    inputs: dict[str, object] = {}


_nodes_decoder = msgspec.json.Decoder(dict[str, object])


@dataclass(frozen=True, slots=True)
class Workflow:
    """A template. ``placeholders`` are those it uses, ``node_types`` the kinds of nodes it needs on the server.

    ``checkpoint_inputs``: kinds of nodes and their inputs that get the checkpoint's name.
    """

    graph: Graph
    placeholders: frozenset[str]
    node_types: tuple[str, ...]
    checkpoint_inputs: tuple[tuple[str, str], ...]

    def fill(self, values: Mapping[str, Value]) -> Graph:
        return {node_id: _fill(node, values) for node_id, node in self.graph.items()}


def read_workflow(data: bytes) -> Workflow:
    """Return the template in a file's bytes. Raises EngineError saying what is wrong with it."""
    if len(data) > limits().comfyui.workflow_bytes:
        raise EngineError(f"comfyui_workflow has more than {limits().comfyui.workflow_bytes} bytes: that is no workflow")
    try:
        graph = _nodes_decoder.decode(data)
        if isinstance(graph.get("nodes"), list):
            raise EngineError("comfyui_workflow is in the format of ComfyUI's editor: export it with Export (API)")
        workflow = _examine(graph)
    except msgspec.ValidationError as error:
        raise EngineError(f"comfyui_workflow is not a graph for ComfyUI's API: {error}") from None
    except UNREADABLE:
        raise EngineError("comfyui_workflow is not JSON: export it with Export (API)") from None
    if unknown := sorted(workflow.placeholders - set(PLACEHOLDERS)):
        listed = ", ".join(f"{{{{{name}}}}}" for name in PLACEHOLDERS)
        raise EngineError(f"comfyui_workflow has placeholders that nothing fills: {', '.join(unknown)}; known: {listed}")
    if "prompt" not in workflow.placeholders:
        raise EngineError("comfyui_workflow has no {{prompt}}, so every request would make the same image")
    return workflow


def make_text_to_image() -> Workflow:
    clip, checkpoint = ["checkpoint", 1], "{{checkpoint}}"
    return _examine(
        {
            "checkpoint": _node(LOADER, ckpt_name=checkpoint),
            "positive": _node("CLIPTextEncode", text="{{prompt}}", clip=clip),
            "negative": _node("CLIPTextEncode", text="{{negative_prompt}}", clip=clip),
            "latent": _node("EmptyLatentImage", width="{{width}}", height="{{height}}", batch_size="{{batch_size}}"),
            "sampler": _node(
                "KSampler", model=["checkpoint", 0], positive=["positive", 0], negative=["negative", 0],
                latent_image=["latent", 0], seed="{{seed}}", steps="{{steps}}", cfg="{{cfg}}", sampler_name="euler",
                scheduler="normal", denoise=1.0,
            ),
            "decode": _node("VAEDecode", samples=["sampler", 0], vae=["checkpoint", 2]),
            "image": _node("PreviewImage", images=["decode", 0]),  # to a temporary folder, which the server clears by itself
        }
    )  # fmt: skip


def make_warm_up(checkpoint: str, *, has_preview: bool) -> Graph:
    """Return the smallest graph that has the server read a checkpoint."""
    graph: Graph = {"checkpoint": _node(LOADER, ckpt_name=checkpoint)}
    if has_preview:  # ComfyUI runs only what leads to an output, so it may refuse the loader alone
        graph["output"] = _node(PREVIEW, source=["checkpoint", 0])
    return graph


def _examine(graph: Graph) -> Workflow:
    if not 1 <= len(graph) <= limits().comfyui.workflow_nodes:
        raise msgspec.ValidationError(f"a graph has 1 to {limits().comfyui.workflow_nodes} nodes, not {len(graph)}")
    nodes = [msgspec.convert(node, _Node) for node in graph.values()]
    found = {name for node in nodes for text in _texts(node.inputs) for name in _PLACEHOLDER.findall(text)}
    takes = [
        (node.class_type, name)
        for node in nodes
        for name, value in node.inputs.items()
        if isinstance(value, str) and (match := _PLACEHOLDER.fullmatch(value)) and match[1] == "checkpoint"
    ]
    return Workflow(
        graph=graph,
        placeholders=frozenset(found),
        node_types=tuple(sorted({node.class_type for node in nodes})),
        checkpoint_inputs=tuple(dict.fromkeys(takes)),
    )


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _texts(item)
        case dict():
            for item in value.values():
                yield from _texts(item)


def _fill(value: object, values: Mapping[str, Value]) -> object:
    match value:
        case str():
            if match := _PLACEHOLDER.fullmatch(value):
                return values[match[1]]
            # One pass: what a prompt says in braces is not looked at again.
            return _PLACEHOLDER.sub(lambda found: str(values[found[1]]), value)
        case list():
            return [_fill(item, values) for item in value]
        case dict():
            return {name: _fill(item, values) for name, item in value.items()}
        case _:
            return value


def _node(class_type: str, **inputs: object) -> dict[str, object]:
    return {"class_type": class_type, "inputs": inputs}


# ---- the server ----

Answer = TypeVar("Answer")


class _Error(msgspec.Struct):
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
        self._http = HttpServer()
        self._http.base_url = url
        self._http.headers = headers
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
        return await self._http.check("/prompt")  # the length of the queue is the cheapest question there is

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
        except UNREADABLE:
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
        await self._tell("/queue", {"delete": list(prompt_ids)})

    async def interrupt(self, prompt_id: str) -> None:
        await self._tell("/interrupt", {"prompt_id": prompt_id})

    async def forget(self, prompt_ids: tuple[str, ...]) -> None:
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
        query = urlencode({"filename": image.filename, "subfolder": image.subfolder, "type": image.type})
        bounds = limits().comfyui
        status, data = await self._http.ask("GET", f"/view?{query}", timeout_s=bounds.view_s, answer_bytes=bounds.image_bytes)
        if status != 200:
            raise EngineError(f"{self.url}/view answers HTTP {status}")
        return data

    async def free(self) -> None:
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
        return read_answer(body, kind, f"{self.url}{path} does not answer as ComfyUI does")

    async def _tell(self, path: str, body: dict[str, object]) -> None:
        status, _ = await self._http.ask("POST", path, body=body)
        if status != 200:
            raise EngineError(f"{self.url}{path} answers HTTP {status}")


def _read_failure(status: _Status) -> Outcome:
    for kind, fields in reversed(status.messages):
        if kind == "execution_error":
            said = str(fields.get("exception_message") or fields.get("exception_type") or "no reason given").strip()
            raised = str(fields.get("exception_type") or "")
            words = f"{fields.get('node_type') or 'a node'}: {said}"[: limits().comfyui.said_chars]
            return Outcome(error=words, may_pass="OutOfMemory" in raised or "out of memory" in said)
        if kind == "execution_interrupted":
            return Outcome(error="it was interrupted on the server", may_pass=True)
    return Outcome(error="the server gives no reason")


def _explain_refusal(said: _Submitted) -> str:
    nodes = said.node_errors if isinstance(said.node_errors, dict) else {}
    reasons = [
        f"{node.class_type or 'a node'} (node {node_id}): {': '.join(filter(None, (error.message, error.details)))}"
        for node_id, node in nodes.items()
        for error in node.errors
    ]
    if not reasons:
        error = said.error
        reasons = [
            error if isinstance(error, str) else ": ".join(filter(None, (error.message, error.details))) if error else ""
        ]
    return f"ComfyUI refuses the workflow: {'; '.join(filter(None, reasons)) or 'no reason given'}"[
        : limits().comfyui.said_chars
    ]


def _prompt_ids(items: list[list[object]], client_id: str | None) -> tuple[str, ...]:
    return tuple(str(item[1]) for item in items if len(item) > 1 and (client_id is None or _client_of(item) == client_id))


def _client_of(item: list[object]) -> object:
    extra = item[3] if len(item) > 3 else None
    return extra.get("client_id") if isinstance(extra, dict) else None


def _read_choices(spec: object) -> list[str] | None:
    match spec:
        case [list() as choices, *_]:
            return [str(choice) for choice in choices]
        case ["COMBO", {"options": list() as choices}, *_]:
            return [str(choice) for choice in choices]
        case _:
            return None


# ---- one prompt, followed by the WebSocket, its end by the history, which tells also when the socket is gone ----


class _Data(msgspec.Struct):
    prompt_id: str | None = None
    node: object = ""
    """None = no node any more: the prompt has ended."""
    value: float = 0.0
    max: float = 0.0


class _Message(msgspec.Struct):
    type: str
    data: msgspec.Raw = msgspec.Raw(b"{}")


_message_decoder = msgspec.json.Decoder(_Message)
_data_decoder = msgspec.json.Decoder(_Data)


@dataclass(frozen=True, slots=True)
class Step:
    """Where a prompt stands: waiting or working, and the share of its longest node that is done, 0.0 to 1.0."""

    stage: str
    fraction: float


@dataclass(slots=True)
class Job:
    """One queued prompt. ``steps`` first, to its end, then ``images``."""

    server: ComfyServer
    socket: aiohttp.ClientWebSocketResponse | None
    prompt_id: str
    outcome: Outcome | None = None
    _stage: str = "waiting"
    _fraction: float = 0.0
    _ending_at: float | None = None
    _answered_at: float = field(default_factory=clock.monotonic)

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Yield at every change and every few seconds until the prompt has ended well. Raises Refusal for any other end."""
        deadline = clock.monotonic() + limits().comfyui.job_s
        yield Step(self._stage, self._fraction)
        while self.outcome is None:
            if clock.monotonic() > deadline:
                raise Refusal(
                    f"The image was not made within {limits().comfyui.job_s:.0f} s.", code="engine_timeout", status=504
                )
            message = await self._next_message()
            if message is None:
                await self._look()
            elif not self._take(message):
                continue
            yield Step(self._stage, self._fraction)
        if self.outcome.error:
            raise _refuse(self.outcome)

    async def images(self) -> list[bytes]:
        """Return the files that were made, without the workflow in them. Raises Refusal when there are none, EngineError."""
        made = self.outcome.images if self.outcome is not None else ()
        if not made:
            raise Refusal("The workflow has made no image.", code="no_image", status=422)
        return [strip_texts(await self.server.view(image)) for image in made]

    async def _next_message(self) -> _Message | None:
        if self._ending_at is not None or self.socket is None:
            await asyncio.sleep(
                limits().comfyui.look_without_socket_s if self._ending_at is None else limits().comfyui.look_at_end_s
            )
            return None
        try:
            frame = await self.socket.receive(timeout=limits().comfyui.look_s)
        except TimeoutError:
            return None
        if frame.type is aiohttp.WSMsgType.TEXT:
            try:
                return _message_decoder.decode(frame.data)
            except msgspec.DecodeError:
                return _Message("unknown")
        if frame.type is aiohttp.WSMsgType.BINARY:  # a preview
            return _Message("preview")
        self.socket = None
        return None

    def _take(self, message: _Message) -> bool:
        try:
            data = _data_decoder.decode(message.data)
        except msgspec.DecodeError:
            return False
        if data.prompt_id not in {None, self.prompt_id}:
            return False
        before = (self._stage, self._fraction, self._ending_at)
        match message.type:
            case "execution_start" | "execution_cached":
                self._stage = "working"
            case "progress" if data.max > 1:
                self._stage = "working"
                self._fraction = max(self._fraction, min(1.0, data.value / data.max))
            case "execution_success" | "execution_error" | "execution_interrupted" if data.prompt_id:
                self._ending_at = clock.monotonic()
            case "executing" if data.node is None and data.prompt_id:
                self._ending_at = clock.monotonic()
        return before != (self._stage, self._fraction, self._ending_at)

    async def _look(self) -> None:
        try:
            self.outcome = await self.server.outcome(self.prompt_id)
            if self.outcome is None and self._ending_at is None:
                known = await self.server.waiting()
                if self.prompt_id in known.running:
                    self._stage = "working"
                elif self.prompt_id not in known.pending:
                    self._ending_at = clock.monotonic()
        except EngineError as error:
            if clock.monotonic() - self._answered_at > limits().comfyui.silent_s:
                log.warning("image server is silent: %s", error)
                raise Refusal("ComfyUI no longer answers.", code="engine_failed", status=502) from None
            return
        self._answered_at = clock.monotonic()
        if (
            self.outcome is None
            and self._ending_at is not None
            and self._answered_at - self._ending_at > limits().comfyui.lost_s
        ):
            raise Refusal("ComfyUI has lost the request: it may have been restarted.", code="engine_failed", status=502)


@asynccontextmanager
async def open_job(
    server: ComfyServer, graph: Graph, *, priority: Priority, cleaners: set[asyncio.Task[None]]
) -> AsyncIterator[Job]:
    """Queue a graph. Leaving the context before its end takes it out of the queue or interrupts it, and only it.

    Raises Refusal with the node's words, EngineError.
    """
    client_id, prompt_id = uuid.uuid4().hex, str(uuid.uuid4())
    socket = await server.listen(client_id)
    submitting = asyncio.create_task(server.submit(graph, client_id=client_id, prompt_id=prompt_id, priority=priority))
    try:
        # Not cancelled with us: a request that the server has half read is queued all the same, and must be found then.
        yield Job(server, socket, await asyncio.shield(submitting))
    finally:
        if not submitting.done() or submitting.exception() is None:
            # A task of its own: the caller may be cancelled meanwhile.
            cleaner = asyncio.create_task(_clear(server, submitting, client_id, prompt_id))
            cleaners.add(cleaner)
            cleaner.add_done_callback(cleaners.discard)
            await asyncio.shield(cleaner)
        if socket is not None:
            await socket.close()


async def _clear(server: ComfyServer, submitting: asyncio.Task[str], client_id: str, prompt_id: str) -> None:
    try:
        async with asyncio.timeout(limits().comfyui.withdraw_s):
            try:
                prompt_id = await submitting
            except (Refusal, EngineError):
                return
            told: set[str] = set()
            while (left := await server.waiting(client_id)).running or left.pending:
                if left.pending:
                    await server.remove(left.pending)
                # Once: an old server would stop the next one, whosever that is.
                for running in {*left.running} - told:
                    await server.interrupt(running)
                    told.add(running)
                await asyncio.sleep(limits().comfyui.withdraw_poll_s)
            await server.forget((prompt_id,))  # everybody who reaches the server can read its history
    except (EngineError, TimeoutError) as error:
        log.warning("image request was not withdrawn server=%s: %s", server.url, error)


def _refuse(outcome: Outcome) -> Refusal:
    code, status = ("engine_failed", 503) if outcome.may_pass else ("workflow_failed", 422)
    return Refusal(f"ComfyUI could not make the image: {outcome.error}", code=code, status=status)
