"""Hints: "look at these rows again", sent to every process once a change is committed.

A hint may be lost, doubled or late. Whoever listens also sweeps, so a hint only makes it quicker. What is no hint is dropped.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from functools import cache
from typing import Any, Literal

import msgspec
import redis
from channels.layers import get_channel_layer
from channels_redis.pubsub import RedisPubSubChannelLayer, RedisPubSubLoopLayer, RedisSingleShardConnection
from django.conf import settings
from django.db import transaction
from redis.asyncio.client import PubSub
from redis.backoff import NoBackoff
from redis.retry import Retry

from core.limits import limits
from core.valkey import open_client, read_address
from wire import clock

HINT_GROUP = "muster.hints"
HINT_TYPE = "hint"
UNREADABLE_KEY = "muster.unreadable"
"""A list: what workers could not read, the newest first, each cut off."""
UNREADABLE_TOTAL_KEY = "muster.unreadable.total"
"""Where workers count in Valkey what they could not read."""

Topic = Literal["keys", "models", "aliases", "tenants", "nodes", "providers", "operations", "policy", "commands", "alerts"]
"""The tables. An ``ident`` is the id of a row of ``keys``, ``nodes``, ``operations``, and the name of the others."""

logger = logging.getLogger(__name__)


class MessageCount:
    """Counts messages from Valkey that this process had no use for; the log hears of it every ``hint_log_s`` at most."""

    def __init__(self, event: str = "messages_unreadable") -> None:
        self.total = 0
        self._event = event
        self._log_at = 0.0

    def add(self) -> None:
        self.total += 1
        if clock.monotonic() >= self._log_at:
            self._log_at = clock.monotonic() + limits().core.hint_log_s
            logger.error("%s total=%d; something else writes to Valkey", self._event, self.total)


unreadable_hints = MessageCount()
dropped_hints = MessageCount("hints_dropped")
"""Those for which a queue had no room."""


class _Hint(msgspec.Struct):
    """What is sent. A release after this one may know more topics and more members."""

    type: Literal["hint"]
    topic: str
    ident: str = ""


class _HintQueue(asyncio.Queue[bytes]):
    """What waits for one listener, bounded in number and in bytes."""

    def put_nowait(self, item: bytes) -> None:
        if len(item) > limits().core.hint_bytes:
            unreadable_hints.add()
            return
        if self.qsize() >= limits().core.hint_waiting:
            # The first one goes: whoever listens also sweeps.
            self.get_nowait()
            dropped_hints.add()
        super().put_nowait(item)


class _Subscription(PubSub):
    """A subscription that waits for its next message."""

    async def get_message(self, ignore_subscribe_messages: bool = False, timeout: float | None = 0.0) -> Any:
        del timeout
        # However soon the caller wants to be back: channels_redis would look ten times a second.
        return await super().get_message(ignore_subscribe_messages, timeout=limits().core.hint_wait_s)


class _Shard(RedisSingleShardConnection):  # type: ignore[misc]  # channels_redis ships no types
    """One connection to Valkey that listens."""

    # Any: of redis-py, and None before the first command
    _redis: Any
    _pubsub: Any

    def _ensure_redis(self) -> None:
        if self._pubsub is None:
            super()._ensure_redis()
            self._pubsub = _Subscription(self._redis.connection_pool)


class HintLayer(RedisPubSubChannelLayer):  # type: ignore[misc]  # channels_redis ships no types
    """The channel layer: it delivers hints and nothing else, whoever sent it."""

    def __init__(self, *, hosts: list[str], prefix: str) -> None:
        own_prefix = f"{prefix}.{_name_installation(hosts[0])}"
        super().__init__(hosts=[read_address(hosts[0]).host], prefix=own_prefix)
        self._url, self._group = hosts[0], name_channel(own_prefix)

    def _get_layer(self) -> RedisPubSubLoopLayer:
        is_new = asyncio.get_running_loop() not in self._layers
        layer = super()._get_layer()
        if is_new:
            layer._shards = [_Shard(shard.host, layer) for shard in layer._shards]  # noqa: SLF001 - has no other way in
        return layer

    async def new_channel(self, prefix: str = "specific.") -> str:
        """Return the name of a new channel of this process; nothing comes on it before it joins a group."""
        layer = self._get_layer()
        channel = str(await layer.new_channel(prefix))
        # In the place of a queue without a bound.
        layer.channels[channel] = _HintQueue()
        return channel

    async def receive(self, channel: str) -> dict[str, Any]:  # Any: the channel layer's own signature
        """Return the next hint on a channel of this process."""
        while (message := await self._get_layer().receive(channel)) is None:
            pass
        return dict(message)

    def send_hint(self, message: dict[str, Any]) -> None:  # Any: as ``group_send`` has it
        """Send a hint from a thread, in the place of ``group_send``, which would need a loop and a connection for each."""
        _open_client(self._url, limits().core.hint_send_s).publish(self._group, self.serialize(message))

    def deserialize(self, message: bytes) -> dict[str, Any] | None:
        """Return the hint that these bytes are, None when they are no hint."""
        try:
            return msgspec.structs.asdict(msgspec.msgpack.decode(message, type=_Hint))
        except (ValueError, RecursionError):
            unreadable_hints.add()
            return None


def _name_installation(url: str) -> str:
    """Return what tells this installation from others on one Valkey, whose channels know no database numbers."""
    digest = hmac.digest(settings.SECRET_KEY.encode(), b"muster.hints", "sha256").hex()
    return f"{read_address(url).db}.{digest[:16]}"


def name_channel(prefix: str, group: str = HINT_GROUP) -> str:
    """Return the channel of Valkey that carries what goes to a group; ``prefix``: of the layer."""
    return f"{prefix}__group__{group}"


def read_unreadable() -> int | None:
    """Return how many messages workers could not read; None when Redis does not answer within ``hint_read_s``."""
    try:
        with open_client(
            settings.REDIS_URL,
            socket_timeout=limits().core.hint_read_s,
            socket_connect_timeout=limits().core.hint_read_s,
        ) as client:
            value = client.get(UNREADABLE_TOTAL_KEY)
            total = int(str(value, "ascii")) if isinstance(value, bytes) else 0
    except (redis.ResponseError, ValueError):
        return 1  # what stands there is not ours either
    except redis.RedisError:
        return None
    return total if 0 <= total < 2**53 else 1


def publish_hint(topic: Topic, ident: str = "") -> None:
    """Tell every listener after the commit that rows of ``topic`` changed (``ident``: which one; empty = look at all).

    Never raises for a channel layer that cannot be reached and never holds the caller longer than ``hint_send_s``.
    """
    transaction.on_commit(lambda: _send(topic, ident))


def _send(topic: Topic, ident: str) -> None:
    layer = get_channel_layer()
    try:
        if layer is not None:
            layer.send_hint({"type": HINT_TYPE, "topic": topic, "ident": ident})
    except (OSError, redis.RedisError) as error:
        logger.warning("hint_not_sent topic=%s ident=%s error=%s", topic, ident, type(error).__name__)


@cache
def _open_client(url: str, longest_s: float) -> redis.Redis:
    """Return what this process sends by: its connections are kept, any thread takes one, and a fork opens its own."""
    # Half for connecting and half for the answer. A second try would take as long again.
    half_s = longest_s / 2
    return open_client(url, socket_connect_timeout=half_s, socket_timeout=half_s, retry=Retry(NoBackoff(), 0))
