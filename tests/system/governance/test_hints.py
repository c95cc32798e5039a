"""Hints reach listeners after the commit, and a channel layer that is away harms nobody."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from channels.layers import channel_layers, get_channel_layer
from django.db import connection
from pytest_django import Settings
from redis import asyncio as aioredis

from core import hints
from core.hints import HINT_GROUP, publish_hint
from tests.fakes.limits import set_limits

WITHIN_S = 30.0
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def patient() -> None:
    """Let no hint be lost because the machine stands still."""
    set_limits(core={"hint_send_s": WITHIN_S})


async def listen(publish: Callable[[], None], *idents: str) -> dict[str, str]:
    """Join the group, call ``publish`` in a thread and return the first hint about one of ``idents``.

    Others come as well: Valkey's channels belong to no database of it, so this hears what other tests publish meanwhile.
    """

    def work() -> None:
        try:
            publish()
        finally:
            connection.close()

    layer = get_channel_layer()
    assert layer is not None
    channel = await layer.new_channel()
    await layer.group_add(HINT_GROUP, channel)
    await asyncio.to_thread(work)
    async with asyncio.timeout(WITHIN_S):
        while (heard := await layer.receive(channel))["ident"] not in idents:
            pass
    await layer.flush()
    return dict(heard)


@contextmanager
def unreachable(settings: Settings, url: str) -> Iterator[None]:
    """Point the channel layer somewhere else."""
    settings.CHANNEL_LAYERS = {
        "default": {"BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer", "CONFIG": {"hosts": [url]}}
    }
    channel_layers.backends.clear()
    try:
        yield
    finally:
        channel_layers.backends.clear()


async def flood(valkey: aioredis.Redis, messages: list[bytes]) -> tuple[list[str], list[str]]:
    """Publish to two listeners, one of whom stands still until the other has heard ``end``; return what each heard."""
    layer = get_channel_layer()
    assert layer is not None
    reader, sleeper = await layer.new_channel(), await layer.new_channel()
    for channel in (sleeper, reader):
        await layer.group_add(HINT_GROUP, channel)

    async def read(channel: str) -> list[str]:
        heard: list[str] = []
        async with asyncio.timeout(WITHIN_S):
            while heard[-1:] != ["end"]:
                heard.append((await layer.receive(channel))["ident"])
        return heard

    reading = asyncio.create_task(read(reader))
    for message in [*messages, make_hint("end")]:
        await valkey.publish(f"muster__group__{HINT_GROUP}", message)
        await asyncio.sleep(0)
    heard = await reading, await read(sleeper)
    await layer.flush()
    return heard


def make_hint(ident: str) -> bytes:
    return msgspec.msgpack.encode({"type": "hint", "topic": "nodes", "ident": ident})


async def test_of_the_hints_that_nobody_takes_the_newest_are_kept_and_whoever_reads_gets_all(settings: Settings) -> None:
    sent = [f"{uuid.uuid4().hex}:{number}" for number in range(1500)]
    dropped = hints.dropped_hints.total
    async with aioredis.Redis.from_url(settings.REDIS_URL) as valkey:
        read, kept = await flood(valkey, [make_hint(ident) for ident in sent])
    assert [ident for ident in read if ident in sent] == sent
    ours = [ident for ident in kept if ident in sent]  # other tests send hints through the same server meanwhile
    assert 900 < len(kept) <= 1000
    assert ours == sent[-len(ours) :]
    assert len(ours) > 900
    assert kept[-1] == "end"
    assert hints.dropped_hints.total - dropped >= 501


async def test_a_message_longer_than_any_hint_is_not_kept(settings: Settings) -> None:
    unreadable = hints.unreadable_hints.total
    async with aioredis.Redis.from_url(settings.REDIS_URL) as valkey:
        read, kept = await flood(valkey, [make_hint("x" * 100_000), make_hint("short")])
    assert {"short", "end"} <= set(read) & set(kept)
    assert max(map(len, (*read, *kept))) < 1000
    assert hints.unreadable_hints.total - unreadable >= 2


@pytest.mark.django_db(transaction=True)
def test_nobody_listening_at_redis_is_logged_and_not_raised(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with unreachable(settings, f"redis://127.0.0.1:{closed.getsockname()[1]}/0"):
            publish_hint("keys")
    assert "hint_not_sent" in caplog.text


@pytest.mark.django_db(transaction=True)
def test_a_redis_that_does_not_answer_holds_the_caller_for_a_second_only(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with unreachable(settings, f"redis://127.0.0.1:{silent.getsockname()[1]}/0"):
            started = time.monotonic()
            publish_hint("keys")
            assert time.monotonic() - started < 30
    assert "hint_not_sent" in caplog.text
