"""Hints: "look at these rows again", sent to every process once a change is committed.

A hint may be lost, doubled or late. Whoever listens also sweeps, so a hint only makes it quicker.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

from asgiref.sync import async_to_sync
from channels.exceptions import ChannelFull
from channels.layers import get_channel_layer
from django.db import transaction
from redis.exceptions import RedisError

HINT_GROUP = "muster.hints"
HINT_TYPE = "hint"
SEND_TIMEOUT_S = 1.0

Topic = Literal["keys", "models", "tenants", "nodes", "providers", "operations", "policy", "commands"]

logger = logging.getLogger(__name__)


def publish_hint(topic: Topic, ident: str = "") -> None:
    """Tell every listener after the commit that rows of ``topic`` changed (``ident``: which one; empty = look at all).

    Never raises for a channel layer that cannot be reached and never holds the caller longer than SEND_TIMEOUT_S.
    """
    transaction.on_commit(lambda: _send(topic, ident))


def _send(topic: Topic, ident: str) -> None:
    message = {"type": HINT_TYPE, "topic": topic, "ident": ident}
    try:
        async_to_sync(_send_bounded)(message)
    except (TimeoutError, OSError, RedisError, ChannelFull) as error:
        logger.warning("hint_not_sent topic=%s ident=%s error=%s", topic, ident, type(error).__name__)


async def _send_bounded(message: dict[str, Any]) -> None:  # Any: the channel layer's own signature
    layer = get_channel_layer()
    if layer is None:
        return
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await layer.group_send(HINT_GROUP, message)
