"""Fixtures of every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis


@pytest.fixture
def empty_redis() -> Iterator[redis.Redis]:
    """The Valkey database of this worker, emptied before and after."""
    with redis.Redis.from_url(os.environ["REDIS_URL"]) as client:
        client.flushdb()
        yield client
        client.flushdb()
