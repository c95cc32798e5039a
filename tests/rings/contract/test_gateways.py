"""Gateways as processes: requests over two of them, one that is stopped or killed, a link that is cut, what one loads first."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any  # bodies are JSON
from urllib.parse import urlsplit, urlunsplit

import httpx
import openai
import pytest

from conformance.engine.server import serve_engine
from tests.fakes.control_process import free_port
from tests.fakes.http_client import Exchange, Reply, call
from tests.fakes.lab import CHAT, RESPONSES, Lab, bearer, unique
from tests.fakes.scripted_box import ScriptedBox, Stream, delta_text
from tests.fakes.stack import Gateway, Stack, answers
from tests.fakes.waiting import eventually

LET_GO_S = 15.0
SLACK_S = 15.0
"""For a machine that is busy; the gateway itself looks twice a second."""


def piece(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "c", "created": 1, "model": "x", "choices": [choice]}).encode() + b"\n\n"


USAGE = b'data: {"id":"c","created":1,"model":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\n'
END = piece("", "stop") + USAGE + b"data: [DONE]\n\n"


async def begin(lab: Lab, model: str, box: ScriptedBox, *, key: str, gateway: Gateway, **more: Any) -> tuple[Exchange, Stream]:
    body = {"model": model, "max_output_tokens": 9, "stream": True, "input": "hi", **more}
    exchange = await Exchange.open(gateway.url + RESPONSES, headers=lab.headers(bearer(key)), body=json.dumps(body).encode())
    lab.exchanges.append(exchange)
    stream = await box.stream()
    assert (stream.meta.path, stream.meta.is_streaming) == (CHAT, True)
    await box.head(stream, content_type="text/event-stream")
    await box.data(stream, piece("Hel"))
    await exchange.until(b"Hel")
    return exchange, stream


async def end(box: ScriptedBox, stream: Stream) -> None:
    await box.data(stream, piece("lo") + END)
    await box.end(stream)


def read(reply: Reply) -> list[dict[str, Any]]:
    return [json.loads(data) for data in reply.events]


def make_key(lab: Lab, prefix: str = "keeper") -> tuple[str, str]:
    tenant = unique(prefix)
    lab.operate("gateway.services.tenants.create_tenant", name=tenant)
    lab.operate("gateway.services.tenants.change_response_policy", name=tenant, stores_responses=True, responses_kept_days=3)
    _, text = lab.operate("gateway.services.keys.create_api_key", name=tenant, tenant_name=tenant)
    return tenant, str(text)


async def knows(lab: Lab, here: Gateway, model: str) -> None:
    async def is_listed() -> bool:
        reply = await call("GET", here.url + "/v1/models", headers=lab.headers())
        return model in {row["id"] for row in reply.json["data"]}

    await eventually(is_listed, what=f"{here.name} knows the node of {model}")


async def test_streams_cancels_and_capacity_cross_gateways(lab: Lab, pair: tuple[Gateway, Gateway]) -> None:
    here, there = pair
    model = await lab.model(here, there)
    worker = await lab.worker(model, gateway=there)
    exchange = await lab.open(model, gateway=here)
    job = await worker.job()
    for number in range(20):
        text = f"piece {number};"
        await worker.chunk(job, delta_text(job, text))
        await exchange.until(text.encode())
    following = lab.ask(model, "next", gateway=here)

    async def waits() -> bool:
        return await lab.queue_depth(here) + await lab.queue_depth(there) == 1

    await eventually(waits, "the second request waits")
    assert len(worker.jobs) == 1
    exchange.leave()
    await worker.cancelled(job)
    usage = {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}
    await worker.complete(await worker.job(), body=json.dumps({"answer": "from the other side", "usage": usage}))
    assert (await following).json["answer"] == "from the other side"
    left, answered = await lab.final(model, 2)
    assert (left["status"], answered["status"], answered["attempts"]) == ("cancelled", "completed", 1)
    assert (answered["prompt_tokens"], answered["completion_tokens"]) == (4, 5)


async def test_a_conversation_that_is_kept_at_one_gateway_goes_on_at_the_other_under_any_name(
    lab: Lab, pair: tuple[Gateway, Gateway]
) -> None:
    here, there = pair
    (tenant, key), (_, foreign) = make_key(lab, "арендатор"), make_key(lab)
    model = await lab.model(here, there, prefix="модель")
    box = await lab.box(model, gateway=there)
    await knows(lab, here, model)
    exchange, stream = await begin(lab, model, box, key=key, gateway=here)
    await end(box, stream)
    reply = await exchange.finish()
    assert (stream.meta.request_id, stream.meta.model, stream.meta.tenant) == (reply.request_id, model, tenant)
    kept = read(reply)[-1]["response"]
    assert (kept["status"], kept["store"], kept["model"]) == ("completed", True, model)
    url = f"{there.url}{RESPONSES}/{kept['id']}"
    assert (await call("GET", url, headers=bearer(key))).json == kept
    for method in ("GET", "DELETE"):
        assert (await call(method, url, headers=bearer(foreign))).status == 404
    exchange, stream = await begin(lab, model, box, key=key, gateway=there, previous_response_id=kept["id"])
    said = [message["content"] for message in json.loads(bytes(stream.body))["messages"]]
    assert said == ["hi", "Hello", "hi"]
    await end(box, stream)
    assert read(await exchange.finish())[-1]["response"]["previous_response_id"] == kept["id"]
    record = (await lab.final(model, 2))[0]
    assert (record["status"], record["endpoint"], record["attempts"]) == ("completed", RESPONSES, 1)
    assert (record["prompt_tokens"], record["completion_tokens"]) == (3, 4)


class CutCable:
    """A proxy between a node and a gateway. While it is cut it reads nothing and closes nothing."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return urlunsplit(self._url._replace(netloc=f"127.0.0.1:{port}"))

    def cut(self) -> None:
        self._is_whole.clear()

    def mend(self) -> None:
        self._is_whole.set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._pumps.add(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._is_whole.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()


async def test_a_cut_link_is_let_go_within_fifteen_seconds_and_what_comes_late_changes_nothing(lab: Lab) -> None:
    model = await lab.model()
    cable = CutCable(lab.gateway.worker_url)
    box = await ScriptedBox.dial(await cable.open(), secret=lab.secret, name=unique("cut"), models=[model], max_concurrent=2)
    lab.workers.append(box)
    try:
        begun = await lab.open(model)
        stream = await box.stream()
        await box.head(stream, content_type="text/event-stream")
        await box.data(stream, b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
        await begun.until(b'"a"')
        waiting = lab.ask(model)
        unanswered = await box.stream()
        other = await lab.box(model)
        cable.cut()
        cut_at = time.monotonic()
        await box.answer(unanswered, b'{"choices":[],"late":true}')  # on its way when the cable is mended
        moved = await other.stream(within_s=LET_GO_S + SLACK_S)
        assert time.monotonic() - cut_at < LET_GO_S + SLACK_S
        await other.answer(moved, b'{"choices":[],"late":false}')
        reply = await waiting
        assert (reply.status, b'"late":false' in reply.body) == (200, True)
        told = (await begun.finish()).body
        assert told.count(b"REQUEST_INTERRUPTED") == 1
        assert b"[DONE]" not in told
        before = sorted((row["state"], row["attempts"]) for row in await lab.final(model, 2))
        assert before == [("completed", 2), ("interrupted", 1)]
        cable.mend()
        await box.closed()
        assert sorted((row["state"], row["attempts"]) for row in await lab.records(model)) == before
        third = lab.ask(model)
        await other.answer(await other.stream(), b'{"choices":[]}')
        assert (await third).status == 200
    finally:
        await cable.close()


STREAMS, CLOSED_WITHIN_S = 100, 30.0


def start_gateway(stack: Stack, name: str, grace_s: str) -> Gateway:
    return stack.gateway(name, {"MUSTER_SHUTDOWN_GRACE_S": grace_s, "MUSTER_NO_NODE_WAIT_S": "30"})


async def exit_status(gateway: Gateway) -> int:
    """Wait until the process has ended; a shell sees the signal as the cause, as it should."""
    assert gateway.process is not None
    return abs(await asyncio.to_thread(gateway.process.wait, 60))


async def test_sigterm_lets_requests_in_flight_finish_then_lets_go_of_the_workers(lab: Lab) -> None:
    gateway = start_gateway(lab.stack, "patient", "20")
    lab.gateway = gateway
    model = await lab.model(gateway)
    worker = await lab.worker(model, max_concurrent=2)
    stream = await lab.open(model, "stream")
    first = await worker.job()
    await worker.chunk(first, delta_text(first, "begun"))
    await stream.until(b"begun")
    plain = lab.ask(model, "plain")
    second = await worker.job()
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGTERM)
    # Closing the listener is the first thing it does.
    await eventually(lambda: asyncio.to_thread(lambda: not answers(gateway.url + "/health")), what="nothing new is taken")
    await worker.answer(second)
    assert (await plain).status == 200
    await worker.stream(first, ["end"])
    assert (await stream.finish()).events[-1] == "[DONE]"
    assert (await worker.closed())[0] in {1000, 1001, 1012}
    assert await exit_status(gateway) in {0, signal.SIGTERM}
    records = await lab.final(model, 2)
    assert [record["status"] for record in records] == ["completed", "completed"]


async def test_an_answer_that_a_client_has_whole_is_completed_though_its_gateway_is_killed_that_moment(lab: Lab) -> None:
    gateway = start_gateway(lab.stack, "killed", "1")
    lab.gateway = gateway
    model = await lab.model(gateway, lab.stack.main)
    worker = await lab.worker(model, max_concurrent=2)
    plain, streamed = await lab.open(model, stream=False), await lab.open(model)
    for job in (await worker.job(), await worker.job()):
        if job.frame["is_streaming"]:
            await worker.stream(job, ["whole"], tokens=(3, 4))
        else:
            await worker.answer(job, "whole", tokens=(3, 4))
    await asyncio.gather(plain.until(b"finish_reason"), streamed.until(b"[DONE]"))
    assert gateway.process is not None
    gateway.process.kill()
    for record in await lab.final(model, 2, within_s=60):
        assert (record["status"], record["prompt_tokens"], record["completion_tokens"]) == ("completed", 3, 4)


async def test_a_hundred_streams_of_a_killed_gateway_are_closed_within_thirty_seconds_and_free_every_slot(lab: Lab) -> None:
    gateway = start_gateway(lab.stack, "busy-victim", "1")
    lab.gateway = gateway
    model = await lab.model(gateway, lab.stack.main)
    name = unique("busy")
    worker = await lab.worker(model, name=name, max_concurrent=STREAMS)
    streams = [await lab.open(model, f"stream {number}") for number in range(STREAMS)]
    for _ in streams:
        job = await worker.job()
        await worker.chunk(job, delta_text(job, "begun"))
    for stream in streams:
        await stream.until(b"begun")
    queued = lab.ask(model, "queued")
    await lab.queued(1)
    assert gateway.process is not None
    gateway.process.kill()
    async with asyncio.timeout(CLOSED_WITHIN_S):
        replies = await asyncio.gather(*(stream.finish() for stream in streams))
        records = await lab.final(model, STREAMS + 1, within_s=CLOSED_WITHIN_S)
    assert (await queued).status == 0
    assert not any(reply.whole for reply in replies)
    assert [record["status"] for record in records] == ["interrupted"] * (STREAMS + 1)
    lab.gateway = lab.stack.main
    again = await lab.worker(model, name=name, max_concurrent=STREAMS)
    asked = [lab.ask(model, f"again {number}") for number in range(STREAMS)]
    for job in [await again.job() for _ in asked]:  # the node has them all at once: no slot is still held for the dead
        await again.answer(job)
    assert {reply.status for reply in await asyncio.gather(*asked)} == {200}


class Balancer:
    """What stands before gateways: each connection goes to the next one that takes it."""

    def __init__(self, *gateways: Gateway) -> None:
        self._turns = itertools.cycle([gateway.port for gateway in gateways])
        self._count = len(gateways)
        self._pumps: set[asyncio.Task[None]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for port in itertools.islice(self._turns, self._count):
            with suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
                break
        else:
            writer.close()
            return
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
        finally:
            sink.close()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Yield the address under which clients find the gateways."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for pump in tuple(self._pumps):
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)


@dataclass
class Crowd:
    """Clients that ask one question after the other, every second one as a stream. The SDK tries again as it is told to."""

    url: str
    key: str
    model: str
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    cut: int = 0
    """Streams that had begun to answer and ended without their end."""
    direct: int = 0
    """Streams that a node itself brought to their end, for a ticket."""
    direct_cut: list[str] = field(default_factory=list)
    """Why those that a node did not bring to their end ended."""
    on_direct_piece: Callable[[], None] = lambda: None
    is_over: bool = False

    async def ask_on(self) -> None:
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=10, timeout=60) as client:
            for number in itertools.count():
                if self.is_over:
                    return
                begun = False
                try:
                    if number % 2:
                        stream = await client.chat.completions.create(model=self.model, messages=HELLO, stream=True)
                        begun = True  # with its head: behind that the SDK tries nothing again
                        async for _ in stream:
                            pass
                    else:
                        await client.chat.completions.create(model=self.model, messages=HELLO)
                    self.answered += 1
                    await asyncio.sleep(PACE_S)
                except (openai.OpenAIError, httpx.HTTPError) as error:
                    if begun:
                        self.cut += 1
                    else:
                        self.failures.append(f"{type(error).__name__}: {error}")

    async def ask_directly(self) -> None:
        """Do as ``ask_on`` does with a ticket for each stream, which takes seconds; gateways are asked until one gives it."""
        wish, headers = (
            {"model": self.model, "max_tokens": 64, "prompt_tokens_est": 16},
            {"authorization": f"Bearer {self.key}"},
        )
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=10) as http:
            while not self.is_over:
                try:
                    answer = await http.post("/v1/tickets", json=wish)
                except httpx.HTTPError:
                    continue
                if answer.status_code != 201:
                    await asyncio.sleep(PACE_S)
                    continue
                finish = None
                ticket = answer.json()
                try:
                    async with openai.AsyncOpenAI(base_url=ticket["base_url"], api_key=ticket["ticket"], max_retries=0) as node:
                        async for piece in await node.chat.completions.create(
                            model=ticket["model"], messages=SLOW, max_tokens=64, stream=True
                        ):
                            finish = piece.choices[0].finish_reason if piece.choices else finish
                            self.on_direct_piece()
                    self.direct += 1
                    if finish is None:
                        self.direct_cut.append("no finish_reason")
                except (openai.OpenAIError, httpx.HTTPError) as error:
                    self.direct_cut.append(f"{type(error).__name__}: {error}")

    @asynccontextmanager
    async def run(self, clients: int, direct: int = 0) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.ask_on()) for _ in range(clients)]
        tasks += [asyncio.create_task(self.ask_directly()) for _ in range(direct)]
        try:
            yield
        finally:
            self.is_over = True
            await asyncio.gather(*tasks)


@contextmanager
def run_node(lab: Lab, engine: str, model: str, *gateways: Gateway) -> Iterator[str]:
    """Run the program for nodes in front of an engine; it dials all the gateways. Yield the node's name."""
    name, folder = unique("roller"), Path(tempfile.mkdtemp(prefix="muster-roller-"))
    command = [sys.executable, "-m", "runner", "--backend", engine, "--models", model, "--name", name]
    command += ["--data", str(folder), "--max-concurrent", "10", "--gateway", ",".join(gateway.url for gateway in gateways)]
    (folder / "key").write_text("key-of-the-nodes-own-port")
    port = str(free_port())
    command += ["--api-host", "127.0.0.1", "--api-port", port, "--api-key-file", str(folder / "key")]
    command += ["--ticket-url", f"http://127.0.0.1:{port}"]
    environment = {**os.environ, "MUSTER_TOKEN": lab.secret}
    with (lab.stack.directory / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield name
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder)


@asynccontextmanager
async def serve_rolled(lab: Lab, model: str, gateways: list[Gateway]) -> AsyncIterator[Crowd]:
    """Yield six clients that ask both gateways, and two that ask the node itself, once each gateway has the node."""
    async with serve_engine(models=[model]) as engine, Balancer(*gateways).open() as url:
        with run_node(lab, engine, model, *gateways) as name:
            for gateway in gateways:
                await eventually(partial(is_linked, gateway, name), within_s=60, what=f"{gateway.name} has the node")
            crowd = Crowd(url, lab.stack.ready.api_key, model)
            async with crowd.run(6, direct=2):
                yield crowd


CLUSTER = "cluster-secret-of-the-tests"
ROLLED: dict[str, str] = {"MUSTER_CLUSTER_SECRET": CLUSTER, "MUSTER_SHUTDOWN_GRACE_S": "20"}
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SLOW: list[Any] = [{"role": "user", "content": "[[pace:300]] hello"}]
KILLS = int(os.environ.get("MUSTER_TEST_GATEWAY_KILLS", "6"))
KILL_EVERY_S = 20.0
PACE_S = 0.05


@contextmanager
def lend_rolled(stack: Stack) -> Iterator[Callable[[int], Gateway]]:
    """Yield what starts the first or the second gateway at its address, again when it has ended."""
    ports = [free_port(), free_port()]

    def start(number: int) -> Gateway:
        settings = {**ROLLED, "MUSTER_INTERNAL_URL": f"http://127.0.0.1:{ports[number]}"}
        return stack.gateway(f"rolled-{number}", settings, port=ports[number])

    try:
        yield start
    finally:
        for number in range(2):
            stack.gateways[f"rolled-{number}"].stop()


async def is_linked(gateway: Gateway, name: str) -> bool:
    metrics = (await call("GET", gateway.url + "/metrics")).body.decode()
    return f'muster_node_slots{{node="{name}"' in metrics


@pytest.mark.timeout(400)
async def test_gateways_that_are_restarted_in_turn_lose_no_request_that_a_client_tries_again(lab: Lab) -> None:
    with lend_rolled(lab.stack) as start:
        gateways = [start(0), start(1)]
        model = await lab.model(*gateways)
        async with serve_rolled(lab, model, gateways) as crowd:
            for number in (0, 1, 0, 1):
                await asyncio.to_thread(gateways[number].stop)
                gateways[number] = await asyncio.to_thread(start, number)
                enough = crowd.answered + 100
                await eventually(lambda: crowd.answered > enough, within_s=60, what="clients are answered")  # noqa: B023
        ends = Counter((record["status"], record["status_code"]) for record in await lab.settled(model))
        assert (crowd.failures, crowd.cut, crowd.direct_cut) == ([], 0, [])
        # A gateway that stops refuses new work with 503 and Retry-After.
        assert ends.keys() <= {("completed", 200), ("failed", 503)}, ends
        assert ends["completed", 200] == crowd.answered + crowd.direct


@pytest.mark.timeout(KILLS * 40 + 240)
async def test_with_a_gateway_killed_every_twenty_seconds_each_request_is_answered_or_ends_as_a_cut_stream(lab: Lab) -> None:
    with lend_rolled(lab.stack) as start:
        gateways = [start(0), start(1)]
        model = await lab.model(*gateways)
        async with serve_rolled(lab, model, gateways) as crowd:
            for kill in range(KILLS):
                due_at, victim = time.monotonic() + KILL_EVERY_S, gateways[kill % 2].process
                assert victim is not None
                victim.kill()
                await asyncio.to_thread(victim.wait)
                gateways[kill % 2] = await asyncio.to_thread(start, kill % 2)
                await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        states = Counter(record["status"] for record in await lab.settled(model))
        print(f"{KILLS} kills: {crowd.answered} answered, {len(crowd.failures)} failures, {crowd.cut} relayed streams cut, "
              f"{crowd.direct} direct streams, {len(crowd.direct_cut)} of them cut; records {dict(states)}")  # fmt: skip
        assert (crowd.failures, crowd.direct_cut) == ([], [])
        assert crowd.direct > KILLS
        assert states.keys() <= {"completed", "failed", "interrupted", "cancelled"}, states
        assert states["completed"] >= crowd.answered + crowd.direct
        assert crowd.answered > KILLS * 100
        assert crowd.cut <= states["interrupted"]


async def test_a_direct_stream_outlives_all_gateways_and_its_report_waits_for_one(lab: Lab) -> None:
    with lend_rolled(lab.stack) as start:
        gateways = [start(0), start(1)]
        model = await lab.model(*gateways)
        async with serve_engine(models=[model]) as engine:
            with run_node(lab, engine, model, *gateways) as name:
                for gateway in gateways:
                    await eventually(partial(is_linked, gateway, name), within_s=60, what=f"{gateway.name} has the node")
                crowd = Crowd(gateways[0].url, lab.stack.ready.api_key, model)
                begun, direct = asyncio.Event(), asyncio.create_task(crowd.ask_directly())
                crowd.on_direct_piece = begun.set
                async with asyncio.timeout(60):
                    await begun.wait()
                crowd.is_over = True
                for gateway in gateways:
                    assert gateway.process is not None
                    gateway.process.kill()
                    await asyncio.to_thread(gateway.process.wait)
                await direct
                assert (crowd.direct, crowd.direct_cut) == (1, [])
                (record,) = await lab.records(model)
                assert record["status"] in {"assigned", "running"}, "nobody could be told"
                await asyncio.to_thread(start, 1)
                (record,) = await lab.final(model, 1, within_s=60)
                assert (record["status"], record["completion_tokens"] > 0) == ("completed", True)


ROOT = Path(__file__).resolve().parents[3]
LATE_OR_NEVER = {
    "aiohttp", "celery", "daphne", "django.contrib.admin.forms", "gateway.admin", "governance.admin", "httpx", "jinja2",
    "nodes.admin", "rest_framework.views", "tokenizers", "unfold.admin",
}  # fmt: skip
"""What a gateway that was killed must not load before it serves again. No server has rich, which structlog takes along."""


def test_a_gateway_loads_nothing_before_it_serves_that_it_needs_late_or_never() -> None:
    program = (
        "import atexit, gc, sys; from controlplane.serve_gateway import main; "
        f"loaded = lambda: sorted({LATE_OR_NEVER!r} & set(sys.modules)); "
        "atexit.register(lambda: print(loaded(), gc.get_stats()[2]['collections'])); main()"
    )
    nowhere = {"DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none", "REDIS_URL": "redis://127.0.0.1:1/0"}
    environment = {**os.environ, **nowhere, "MUSTER_SECRET_KEY": "k" * 50, "MUSTER_ADMIN_PAGES": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", program, "--port", "0"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "Application startup failed" in ended.stderr, "it was to be loaded, and to find no database"
    assert ended.stdout == "[] 0\n"
