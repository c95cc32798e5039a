"""Valkey behind Sentinels: hints, budgets' client and Celery's messages reach the master, the new one too after a failover."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any  # redis-py's pools

import pytest
import redis
from kombu.connection import Connection
from kombu.entity import Queue

import controlplane.celery
from controlplane.launcher.valkey import find_binary
from core import hints
from core.valkey import open_async_client, open_client, read_address
from tests.fakes.control_process import free_port
from tests.fakes.waiting import eventually, wait_until

MASTER = "muster"


class Sentinels:
    """A master, its replica and a Sentinel, as processes."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self._folder, self._running = folder, running
        self.ports = [free_port(), free_port()]
        self._port = free_port()
        for port in self.ports:
            self._spawn(port, "--save", "", "--appendonly", "no")
        self._ask(self.ports[1], "REPLICAOF", "127.0.0.1", str(self.ports[0]))
        config = folder / "sentinel.conf"
        config.write_text(
            f"port {self._port}\ndir {folder}\nsentinel monitor {MASTER} 127.0.0.1 {self.ports[0]} 1\n"
            f"sentinel down-after-milliseconds {MASTER} 1000\n"
        )
        self._spawn(self._port, str(config), "--sentinel")
        wait_until(lambda: self._count_replicas() == 1, within_s=30, what="the Sentinel found the replica")

    @property
    def url(self) -> str:
        return f"sentinel://127.0.0.1:{free_port()},127.0.0.1:{self._port}/{MASTER}?db=3"

    def fail_over(self) -> None:
        """Have the replica take over; return once the Sentinel names it."""
        self._ask(self._port, "SENTINEL", "FAILOVER", MASTER)
        wait_until(lambda: self.find_master() == self.ports[1], within_s=30, what="the replica is the master")

    def find_master(self) -> int:
        found = self._ask(self._port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)
        assert isinstance(found, (list, tuple))
        return int(found[1])

    def _count_replicas(self) -> int:
        found = self._ask(self._port, "SENTINEL", "REPLICAS", MASTER)
        assert isinstance(found, (list, tuple))
        return len(found)

    def _spawn(self, port: int, *options: str) -> None:
        first, rest = ((options[0],), options[1:]) if options[0].endswith(".conf") else ((), options)
        command = [str(find_binary()), *first, "--port", str(port), "--dir", str(self._folder), *rest]
        with (self._folder / f"{port}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        self._running.callback(process.wait)
        self._running.callback(process.kill)
        wait_until(lambda: self._answers(port), within_s=30, what=f"the server at {port} answers")

    def _answers(self, port: int) -> bool:
        try:
            return bool(self._ask(port, "PING"))
        except redis.ConnectionError:
            return False

    def _ask(self, port: int, *words: str) -> object:
        with redis.Redis(port=port) as client:
            answer: object = client.execute_command(*words)
            return answer


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    with ExitStack() as running:
        yield Sentinels(tmp_path, running)


@pytest.mark.timeout(300)
async def test_hints_and_messages_reach_the_master_that_sentinels_name_before_and_after_a_failover(
    sentinels: Sentinels,
) -> None:
    url = sentinels.url
    layer = hints.HintLayer(hosts=[url], prefix="muster")
    channel = await layer.new_channel()
    await layer.group_add(hints.HINT_GROUP, channel)
    heard: set[str] = set()

    async def listen() -> None:
        while True:
            heard.add((await layer.receive(channel))["ident"])

    async def hears(ident: str) -> bool:
        try:
            await asyncio.to_thread(layer.send_hint, {"type": "hint", "topic": "nodes", "ident": ident})
        except (OSError, redis.RedisError):
            return False  # as ``publish_hint`` bears it
        return ident in heard

    listening = asyncio.create_task(listen())
    await eventually(lambda: hears("before"), within_s=30, what="a hint arrives")
    await asyncio.to_thread(send_and_take, url, "before")
    async with open_async_client(url) as client:
        assert (await client.info("replication"))["role"] == "master"
        assert client.connection_pool.connection_kwargs["db"] == 3
        await let_go(client.connection_pool)
    await asyncio.to_thread(sentinels.fail_over)
    await eventually(lambda: hears("after"), within_s=60, what="a hint arrives by the new master")
    await asyncio.to_thread(send_and_take, url, "after")
    with open_client(url) as now:
        assert now.connection_pool.get_master_address()[1] == sentinels.ports[1]
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    pools = [shard._redis.connection_pool for shard in layer._get_layer()._shards if shard._redis is not None]
    await layer.flush()
    for pool in pools:
        await let_go(pool)


async def let_go(pool: Any) -> None:
    """Close the connections to the Sentinels of a pool, which last as long as a process of ours."""
    for each in pool.sentinel_manager.sentinels:
        await each.aclose()


def send_and_take(url: str, task_id: str) -> None:
    """Have a message taken by Celery's transport that was sent by it."""
    address = read_address(url)
    options = {"master_name": address.master, "ack_emulation": False}
    with Connection(address.broker_url, transport_options=options) as connection:  # type: ignore[no-untyped-call]  # kombu
        transport = connection.transport
        assert isinstance(transport, controlplane.celery.SentinelTransport)
        channel = connection.channel()
        Queue("celery", channel=channel).declare()  # type: ignore[no-untyped-call]  # as above
        with open_client(url) as client:
            client.lpush("celery", b"no task")
        wait_until(lambda: channel._size("celery") == 1, within_s=30, what=f"the queue has the message {task_id}")
        channel.queue_purge("celery")
