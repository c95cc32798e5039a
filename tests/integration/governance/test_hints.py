"""Hints reach listeners after the commit, and a channel layer that is away harms nobody."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from channels.layers import channel_layers, get_channel_layer
from django.db import connection, transaction
from pytest_django import Settings

from governance.hints import HINT_GROUP, publish_hint


async def listen(publish: Callable[[], None]) -> list[dict[str, str]]:
    """Join the group, call ``publish`` in a thread and return what arrived."""

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
    heard = [await asyncio.wait_for(layer.receive(channel), 5)]
    await layer.flush()
    return heard


@contextmanager
def unreachable(settings: Settings, url: str) -> Iterator[None]:
    """Point the channel layer somewhere else."""
    settings.CHANNEL_LAYERS = {
        "default": {"BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer", "CONFIG": {"hosts": [url]}}
    }
    channel_layers.backends.clear()
    yield
    channel_layers.backends.clear()


@pytest.mark.django_db(transaction=True)
def test_a_hint_arrives_once_the_change_is_committed() -> None:
    def change() -> None:
        with transaction.atomic():
            publish_hint("nodes", "17")

    assert asyncio.run(listen(change)) == [{"type": "hint", "topic": "nodes", "ident": "17"}]


@pytest.mark.django_db(transaction=True)
def test_a_change_that_is_rolled_back_sends_no_hint() -> None:
    def change() -> None:
        with transaction.atomic():
            publish_hint("nodes", "17")
            transaction.set_rollback(True)
        with transaction.atomic():
            publish_hint("models", "after")

    assert [hint["ident"] for hint in asyncio.run(listen(change))] == ["after"]


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
