"""Nodes of the demo: each a real socket to the gateway, which speaks through ``wire`` as a runner does, with no GPU behind it.

An answer repeats what was asked. What an operation asks for is played, and its receipt signed, without a look at its token: a
node that has nothing to protect. ``Callers`` are the clients who keep asking while the demo runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import math
import random
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, WebSocketException

from controlplane.demo.fleet import BY_NAME, CHAT, EMBEDDINGS, GIB, SEED, SPEECH, TENANTS, VERSION, DemoNode
from core.limits import limits
from wire import bridge, clock, frames
from wire.optoken.approval import ApprovalError, decode_bytes, encode_bytes, read_policy
from wire.optoken.documents import Receipt, digest_result, sign_receipt
from wire.optoken.op_token import OpTokenError, make_runner_id, read_token

LONG = "Tell me a very long story."
"""What is answered for as long as a request may take."""
_LOAD_S, _SLOW_LOAD_S, _SHORT_S = 12.0, 900.0, 2.0
_RETRY_S = 2.0
_ECHO_CHARS, _TOGETHER = 200, 4
"""How much of a question is repeated, and words of a chunk."""


@dataclass(frozen=True, slots=True)
class NodeKeys:
    """The identity of a node, and the key that operation tokens for it are signed with."""

    private: Ed25519PrivateKey
    op_key: bytes

    @property
    def public(self) -> bytes:
        return self.private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


@dataclass(frozen=True, slots=True)
class Pinned:
    """The approval policy that nodes trust; version 0 = none."""

    version: int = 0
    sha256: str = ""


def runner_id_of(node: DemoNode, keys: NodeKeys) -> str:
    return make_runner_id(node.name, keys.public)


class Held(NamedTuple):
    """What is in use on a GPU, in MiB."""

    used: float
    weights: float
    cache: float


def list_held(node: DemoNode, models: Mapping[str, tuple[int, ...]]) -> list[Held]:
    """Return what is in use on each GPU of a node: weights, their cache, and what a driver takes."""
    found = []
    for gpu in range(node.gpus):
        here = [(name, gpus) for name, gpus in models.items() if gpu in gpus]
        weights = sum(_share_of(name, gpus) for name, gpus in here)
        cache = sum(_cache_of(node, name, gpus) for name, gpus in here)
        found.append(Held(min(weights + cache + 620.0, node.vram_mb - 400.0), weights, cache))
    return found


def _share_of(name: str, gpus: tuple[int, ...]) -> float:
    return (BY_NAME[name].weights_mb if name in BY_NAME else 8 * GIB) / len(gpus)


def _cache_of(node: DemoNode, name: str, gpus: tuple[int, ...]) -> float:
    return 0.22 * max(0.0, node.vram_mb - _share_of(name, gpus))


@dataclass
class _Answering:
    """A request that came in parts."""

    meta: frames.OpenMeta
    body: bytearray
    task: asyncio.Task[None] | None = None


class ScriptedNode:
    """One node, for as long as ``run`` runs."""

    def __init__(self, node: DemoNode, keys: NodeKeys, *, gateway: str, secret: str, pinned: Pinned) -> None:
        self.node, self._keys = node, keys
        self._url = f"{gateway.replace('http', 'ws', 1)}/v1/worker/connect?{urlencode({'provider': 'local'})}"
        self._secret, self._pinned = secret, pinned
        self._models = dict(node.models)
        self._loading: dict[str, tuple[float, float]] = {}
        if node.loading:
            self._loading[node.loading] = (clock.monotonic(), _SLOW_LOAD_S)
        self._instance = uuid.uuid4().hex
        self._socket: ClientConnection | None = None
        self._requests: dict[tuple[int, int], _Answering] = {}
        self._statuses: dict[tuple[str, int], bridge.OpStatus] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._began = clock.monotonic()
        self._phase = random.Random(node.name).uniform(0, 6)  # noqa: S311  # a scene, no secret
        self.is_connected = asyncio.Event()

    async def run(self) -> None:
        """Hold a session, and another one after each loss, until cancelled."""
        while True:
            with contextlib.suppress(OSError, TimeoutError, WebSocketException, InvalidHandshake):
                await self._hold_session()
            self.is_connected.clear()
            self._requests.clear()
            await asyncio.sleep(_RETRY_S)

    async def _hold_session(self) -> None:
        options = {"compression": None, "ping_interval": None, "max_size": None, "proxy": None}
        async with connect(self._url, additional_headers={"x-worker-secret": self._secret}, **options) as socket:  # type: ignore[arg-type]  # of different types
            self._socket = socket
            await self._send(self._register())
            reporting = asyncio.create_task(self._report())
            try:
                async for data in socket:
                    if isinstance(data, bytes):
                        self._take_frame(frames.decode_frame(data))
                    else:
                        await self._take_message(bridge.decode_server_message(data))
            finally:
                reporting.cancel()
                self._socket = None

    async def _send(self, message: bridge.Message) -> None:
        if self._socket is not None:
            await self._socket.send(bridge.encode_message(message))

    # What it says of itself

    def _register(self) -> bridge.Register:
        said = self._describe()
        return bridge.Register(
            worker_name=self.node.name, models=list(self._models), max_concurrent=self.node.slots,
            protocol_version=bridge.MUSTER_V1, instance_id=self._instance, agent_version=self.node.version,
            owner_name=self.node.owner, endpoints=[CHAT], gpus=said.gpus, replicas=said.replicas, available=said.available,
            memory=said.memory, governance=self._govern(), tells_log=self.node.version == VERSION,
        )  # fmt: skip

    def _govern(self) -> bridge.NodeGovernance:
        return bridge.NodeGovernance(
            level=self.node.level, runner_id=runner_id_of(self.node, self._keys), public_key=encode_bytes(self._keys.public),
            op_keys={"demo-1": encode_bytes(self._keys.op_key)}, policy_version=self._pinned.version,
            policy_sha256=self._pinned.sha256, clock_ms=clock.unix_ms() + int(1000 * self.node.clock_s), keeps_models=True,
            reloads_settings=self.node.version == VERSION,
        )  # fmt: skip

    def _describe(self) -> bridge.Telemetry:
        node, held = self.node, list_held(self.node, self._models)
        load = self._measure_load()
        gpus = [
            bridge.GpuInfo(
                index=index, name=node.gpu, memory_total_mb=node.vram_mb, memory_used_mb=int(one.used), vendor=node.vendor,
                utilization_percent=round(min(99.0, load * (1.0 - 0.03 * index)), 1), temperature_c=round(36 + 0.42 * load, 1),
                power_w=round(node.watts * (0.18 + 0.82 * load / 100), 1),
                driver_version="580.95.05" if node.vendor == "nvidia" else "",
            )
            for index, one in enumerate(held)
        ]  # fmt: skip
        weights = sum(BY_NAME[name].weights_mb for name in self._models if name in BY_NAME)
        cache = sum(_cache_of(node, name, gpus) * len(gpus) for name, gpus in self._models.items())
        memory_info = bridge.MemoryInfo(
            total_mb=node.vram_mb * node.gpus, used_mb=int(sum(one.used for one in held)), weights_mb=weights, kv_mb=int(cache)
        )
        return bridge.Telemetry(
            current_load=len(self._requests), gpus=gpus, replicas=list(self._list_replicas()), memory=memory_info,
            available=[name for name in node.available if name not in self._models and name not in self._loading],
            last_error=node.last_error or None,
        )  # fmt: skip

    def _measure_load(self) -> float:
        if not self.node.busy:
            return 0.6 + 0.4 * math.sin(self._phase)
        wave = math.sin((clock.monotonic() - self._began) / 37 + self._phase) + 0.4 * math.sin(clock.monotonic() / 11)
        return max(1.0, min(99.0, 100 * self.node.busy * (0.92 + 0.09 * wave) + 2 * len(self._requests)))

    def _list_replicas(self) -> list[bridge.ReplicaInfo]:
        found = []
        running = [one.meta.model for one in self._requests.values()]
        for name, gpus in self._models.items():
            model, weights = BY_NAME.get(name), int(len(gpus) * _share_of(name, gpus))
            cache = int(len(gpus) * _cache_of(self.node, name, gpus))
            found.append(
                bridge.ReplicaInfo(
                    model=name, state="loaded", engine=model.engine if model else "vllm", slots=self.node.slots,
                    active=running.count(name), memory_mb=weights + cache, weights_mb=weights, kv_mb=cache,
                    endpoints=[model.endpoint if model else CHAT], context_tokens=model.context_tokens if model else 8_192,
                    gpus=list(gpus), kept=self.node.name in {"atlas", "borealis"},
                )
            )  # fmt: skip
        for name, (began, length) in self._loading.items():
            share = min(0.99, (clock.monotonic() - began) / length)
            found.append(
                bridge.ReplicaInfo(
                    model=name,
                    state="loading",
                    engine="vllm",
                    detail="loading weights",
                    progress=round(share, 3),
                    eta_s=round(length * (1 - share), 1),
                )
            )
        name, why = self.node.failed
        if name:
            found.append(bridge.ReplicaInfo(model=name, state="failed", engine="llama.cpp", detail=why))
        return found

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(limits().nodes.heartbeat_interval_s)
            self._restart_loading()
            await self._send(self._describe())

    def _restart_loading(self) -> None:
        # The load that is shown all the time begins anew; the others end by themselves.
        began, length = self._loading.get(self.node.loading, (0.0, 0.0))
        if length and clock.monotonic() - began >= length:
            self._loading[self.node.loading] = (clock.monotonic(), length)

    # What it is told

    async def _take_message(self, message: bridge.ServerMessage) -> None:
        match message:
            case bridge.RegisterAck():
                self.is_connected.set()
            case bridge.Ping():
                await self._send(bridge.Pong(current_load=len(self._requests), timestamp_unix_ms=message.timestamp_unix_ms))
            case bridge.OpCommand():
                self._start(self._carry_out(message))
            case bridge.OpQuery():
                unknown = bridge.OpStatus(op_id=message.op_id, use=message.use, state="unknown")
                await self._send(self._statuses.get((message.op_id, message.use), unknown))
            case bridge.LogQuery():
                await self._send(bridge.LogTail(query_id=message.query_id, lines=self._list_log()))
            case bridge.PolicyOffer() if self._pinned.version:
                await self._follow(message)
            case _:
                pass

    def _list_log(self) -> list[bridge.LogLine]:
        now, lines = clock.unix_ms(), [(3_600, "info", f"gateway connected node={self.node.name}")]
        lines += [(3_500, "info", f"loaded model={name} gpus={gpus}") for name, gpus in self._models.items()]
        if self.node.last_error:
            lines += [(900, "error", f"load failed model={self.node.failed[0]} error={self.node.last_error}")]
        lines += [(120, "warning", "requests wait for a slot") for _ in range(int(self.node.busy > 0.8))]
        return [bridge.LogLine(at_ms=now - 1_000 * age_s, level=level, text=text) for age_s, level, text in lines]

    async def _follow(self, offer: bridge.PolicyOffer) -> None:
        with contextlib.suppress(ApprovalError, KeyError, IndexError):
            ref = read_policy(decode_bytes(offer.policies[-1]["document"])).ref
            self._pinned = Pinned(ref.version, ref.sha256)
            await self._send(bridge.GovernanceReport(governance=self._govern()))

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Operations

    async def _carry_out(self, command: bridge.OpCommand) -> None:
        key = (command.op_id, command.use)
        if key in self._statuses:  # it came again
            await self._send(self._statuses[key])
            return
        began = int(clock.unix_s())
        model = str(command.body.get("modelId") or "")
        is_load = command.operation == "model-load"
        length = (_SLOW_LOAD_S if self.node.loading else _LOAD_S) if is_load else _SHORT_S
        if is_load:
            self._models.pop(str(command.body.get("evictModel") or ""), None)
            self._loading[model] = (clock.monotonic(), length)
        async for fraction in _tick(length):
            stage = "loading weights" if is_load else command.operation
            self._statuses[key] = bridge.OpStatus(
                op_id=command.op_id, use=command.use, state="running", stage=stage, fraction=round(fraction, 3),
                eta_s=round(length * (1 - fraction), 1),
            )  # fmt: skip
            await self._send(self._statuses[key])
        self._loading.pop(model, None)
        result: dict[str, object] = {"modelId": model} if model else {}
        if is_load:
            self._models[model] = tuple(range(self.node.gpus))
        elif command.operation == "model-unload":
            self._models.pop(model, None)
        self._statuses[key] = bridge.OpStatus(
            op_id=command.op_id, use=command.use, state="succeeded", fraction=1.0, result=result,
            receipt=self._sign(command, result, began=began),
        )  # fmt: skip
        await self._send(bridge.ModelsUpdate(models=list(self._models), current_load=len(self._requests)))
        await self._send(self._describe())
        await self._send(self._statuses[key])

    def _sign(self, command: bridge.OpCommand, result: dict[str, object], *, began: int) -> str:
        try:
            claims = read_token(command.token).claims
        except OpTokenError:
            return ""
        receipt = Receipt(
            op_id=command.op_id, use=command.use, statement_digest=str(claims.get("stmtDigest") or ""),
            runner_id=runner_id_of(self.node, self._keys), operation=command.operation, outcome="succeeded",
            result_digest=digest_result(result), fence=int(str(claims.get("fence") or 0)), started_at=began,
            ended_at=int(clock.unix_s()),
        )  # fmt: skip
        return sign_receipt(self._keys.private, receipt)

    # Requests

    def _take_frame(self, frame: frames.Frame) -> None:
        key = (frame.stream, frame.attempt)
        if frame.kind == frames.OPEN:
            meta, body = frames.decode_open(frame.payload)
            self._requests[key] = _Answering(meta, bytearray(body))
        found = self._requests.get(key)
        if found is None:
            return
        if frame.kind == frames.BODY:
            found.body += frame.payload
        if frame.kind == frames.CANCEL:
            self._requests.pop(key, None)
            if found.task is not None:
                found.task.cancel()
            self._start(self._write(frames.END, key, frames.encode_json(frames.End(error="cancelled"))))
        elif frame.kind in {frames.OPEN, frames.BODY} and frame.flags & frames.FLAG_FIN:
            found.task = asyncio.create_task(self._answer(key, found))

    async def _write(self, kind: int, key: tuple[int, int], payload: bytes) -> None:
        if self._socket is not None:
            await self._socket.send(frames.encode_frame(kind, *key, payload))

    async def _answer(self, key: tuple[int, int], asked: _Answering) -> None:
        try:
            await self._answer_one(key, asked)
        except WebSocketException:
            pass  # the gateway is gone, and the request with it
        finally:
            self._requests.pop(key, None)

    async def _answer_one(self, key: tuple[int, int], asked: _Answering) -> None:
        model, speed = BY_NAME.get(asked.meta.model), self.node.speed
        await asyncio.sleep((model.ttft_ms if model else 200) / 1000 / speed)
        if asked.meta.path in {EMBEDDINGS, SPEECH}:
            body, tokens = _answer_other(asked), 12
            await self._reply(key, body, bridge.TokenCounts(prompt_tokens=tokens, total_tokens=tokens))
            return
        said, wanted = _read_question(bytes(asked.body))
        words = self._choose_words(asked.meta.model, said, wanted)
        usage = _count(said, words)
        if not asked.meta.is_streaming:
            await asyncio.sleep(len(words) / ((model.tokens_per_s if model else 50) * speed))
            await self._reply(key, _render_whole(asked.meta, "".join(words), usage), usage)
            return
        head = frames.Head(status=200, headers={"content-type": "text/event-stream"})
        await self._write(frames.HEAD, key, frames.encode_json(head))
        pause_s = 1.5 if said == LONG else _TOGETHER / ((model.tokens_per_s if model else 50) * speed)
        for first in range(0, len(words), _TOGETHER):
            await self._write(frames.DATA, key, _render_chunk(asked.meta, "".join(words[first : first + _TOGETHER])))
            await asyncio.sleep(pause_s)
        await self._write(frames.DATA, key, _render_chunk(asked.meta, "", usage=usage) + b"data: [DONE]\n\n")
        await self._write(frames.END, key, frames.encode_json(frames.End(usage=usage)))

    def _choose_words(self, model: str, said: str, wanted: int) -> list[str]:
        if said == LONG:
            return ["And then they went on. "] * 2_000
        said = said if len(said) < _ECHO_CHARS else f"{said[:_ECHO_CHARS]}…"
        text = f"You asked: {said} This is {model} on {self.node.name}, a node without a GPU that repeats what it hears."
        words = [f"{word} " for word in text.split()]
        return (words * (1 + wanted // len(words)))[: wanted or len(words)]

    async def _reply(self, key: tuple[int, int], body: bytes, usage: bridge.TokenCounts) -> None:
        head = frames.Head(status=200, headers={"content-type": "application/json"})
        if self._socket is not None:
            await self._socket.send(frames.encode_reply(*key, head, body, frames.End(usage=usage)))


async def _tick(length_s: float) -> AsyncIterator[float]:
    began = clock.monotonic()
    while (passed := clock.monotonic() - began) < length_s:
        yield passed / length_s
        await asyncio.sleep(1.0)


def _read_question(body: bytes) -> tuple[str, int]:
    """Return what was asked last, and how many tokens the answer shall have; 0 = as many as it takes to repeat it."""
    try:
        asked = json.loads(body)
        said, wanted = asked["messages"][-1]["content"], asked.get("max_tokens")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return "", 0
    if isinstance(said, list):
        said = " ".join(str(part.get("text", "")) for part in said if isinstance(part, dict))
    return str(said).strip(), min(wanted, 4_000) if isinstance(wanted, int) else 0


def _count(said: str, words: list[str]) -> bridge.TokenCounts:
    prompt, answer = 8 + len(said.split()), len(words)
    return bridge.TokenCounts(prompt_tokens=prompt, completion_tokens=answer, total_tokens=prompt + answer)


def _usage_of(usage: bridge.TokenCounts) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens, "total_tokens": usage.total_tokens,
    }  # fmt: skip


def _render_whole(meta: frames.OpenMeta, text: str, usage: bridge.TokenCounts) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    answer = {"id": "chatcmpl-demo", "object": "chat.completion", "created": int(clock.unix_s()), "model": meta.model}
    return json.dumps({**answer, "choices": [choice], "usage": _usage_of(usage)}).encode()


def _render_chunk(meta: frames.OpenMeta, text: str, *, usage: bridge.TokenCounts | None = None) -> bytes:
    delta = {"role": "assistant", "content": text} if usage is None else {}
    choice = {"index": 0, "delta": delta, "finish_reason": None if usage is None else "stop"}
    chunk: dict[str, object] = {
        "id": "chatcmpl-demo", "object": "chat.completion.chunk", "created": int(clock.unix_s()), "model": meta.model,
        "choices": [choice],
    }  # fmt: skip
    if usage is not None:
        chunk["usage"] = _usage_of(usage)
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _answer_other(asked: _Answering) -> bytes:
    if asked.meta.path == SPEECH:
        return json.dumps({"text": "A node of the demo hears nothing."}).encode()
    usage = {"prompt_tokens": 12, "total_tokens": 12}
    one = {"object": "embedding", "index": 0, "embedding": [0.25] * 8}
    return json.dumps({"object": "list", "model": asked.meta.model, "data": [one], "usage": usage}).encode()


@dataclass
class Callers:
    """Clients that ask every now and then, as the tenants do. ``keys``: their texts, by tenant."""

    gateway: str
    keys: Mapping[str, list[str]]
    per_minute: float
    _draw: random.Random = field(default_factory=lambda: random.Random(SEED))  # noqa: S311  # a scene, no secret

    async def run(self) -> None:
        """Ask until cancelled."""
        with ThreadPoolExecutor(24, thread_name_prefix="caller") as pool:
            loop = asyncio.get_running_loop()
            while True:
                (tenant,) = self._draw.choices(TENANTS, [one.share for one in TENANTS])
                (model,) = self._draw.choices([name for name, _ in tenant.models], [weight for _, weight in tenant.models])
                if BY_NAME[model].endpoint in {CHAT, EMBEDDINGS} and self.keys.get(tenant.name):
                    key = self._draw.choice(self.keys[tenant.name])
                    context = "word " * round(tenant.prompt * self._draw.lognormvariate(-0.3, 0.6))
                    answer = max(1, round(tenant.answer * self._draw.lognormvariate(-0.3, 0.6)))
                    loop.run_in_executor(pool, self.ask, key, model, f"{self._draw.choice(_QUESTIONS)} {context}", answer)
                await asyncio.sleep(self._draw.expovariate(self.per_minute / 60))

    def ask(self, key: str, model: str, question: str, answer: int = 0) -> None:
        """Send one request and read its answer to the end; ``answer``: its tokens, 0 = whatever it takes."""
        is_chat = BY_NAME[model].endpoint == CHAT
        body: dict[str, object] = {"model": model, "input": question}
        if is_chat:
            body = {"model": model, "stream": True, "messages": [{"role": "user", "content": question}]}
            body |= {"max_tokens": answer} if answer else {}
        address = urlsplit(self.gateway)
        connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=700)
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        try:
            connection.request("POST", CHAT if is_chat else EMBEDDINGS, json.dumps(body), headers)
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            pass  # the gateway stops or starts again; the next one finds it
        finally:
            connection.close()


_QUESTIONS = (
    "How do I reset my password?", "Summarise the minutes of yesterday's meeting.", "Write a test for this function.",
    "Translate the leaflet into French.", "Which invoices are overdue?", "Explain this stack trace.",
)  # fmt: skip
