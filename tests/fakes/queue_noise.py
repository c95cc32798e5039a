"""Noise in Valkey: what somebody could write there, or a program of another release, on every channel and key that is read."""

from __future__ import annotations

import base64
import json
import pickle
import random
import uuid
from collections.abc import Iterator
from copy import deepcopy

import msgspec
import redis

from core.hints import HINT_GROUP

HINTS = f"muster__group__{HINT_GROUP}"
QUEUE = "celery"
QUEUES = (QUEUE, *(f"{QUEUE}\x06\x16{step}" for step in (3, 6, 9)))
PIDBOX = "/{db}.celery.pidbox"
FOREIGN = ("celeryev", "_kombu.binding.celery", "_kombu.binding.celery.pidbox", "unacked", "unacked_index", "unacked_mutex")
KEPT = ("muster.unreadable", "muster.unreadable.total", "muster.unreadable.key")
A_BATCH = 200
_WRONG_TYPE_EVERY = 50
_TASKS = (
    "governance.tasks.work", "nodes.tasks.call_box", "governance.tasks.sweep", "celery.map", "celery.chord_unlock", "os.system",
)  # fmt: skip
_ODD: tuple[object, ...] = (
    None, True, -1, 2**63, 1.5, "", "\x00", "é" * 99, [], [[]], {}, {"": None}, "2999-01-01T00:00:00+00:00",
)  # fmt: skip


def make_envelope(task: str, args: list[object], **headers: object) -> dict[str, object]:
    ident = str(uuid.uuid4())
    body = json.dumps([args, {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}])
    return {
        "body": base64.b64encode(body.encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": task, "id": ident, "eta": None, "expires": None, "retries": 0, **headers},
        "properties": {
            "correlation_id": ident, "delivery_mode": 2, "delivery_info": {"exchange": "", "routing_key": QUEUE},
            "priority": 0, "body_encoding": "base64", "delivery_tag": str(uuid.uuid4()),
        },
    }  # fmt: skip


def make_noise(rng: random.Random, *, db: int) -> tuple[str | bytes | int, ...]:
    chance = rng.random()
    if chance < 1 / _WRONG_TYPE_EVERY:
        return _replace_key(rng)
    if chance < 0.5:
        return ("PUBLISH", HINTS, _spoil(rng, _make_hint(rng)))
    if chance < 0.55:
        return ("PUBLISH", PIDBOX.format(db=db), _spoil(rng, json.dumps(_make_control(rng)).encode(), odds=0.2))
    return ("LPUSH", rng.choice(QUEUES), _spoil(rng, json.dumps(_make_task(rng)).encode()))


def send_noise(client: redis.Redis, count: int, *, seed: int) -> int:
    """Send so many messages; return how many Valkey took (it refuses what does not fit what stands in a key)."""
    rng = random.Random(seed)
    db, taken = int(client.connection_pool.connection_kwargs.get("db") or 0), 0
    for first in range(0, count, A_BATCH):
        pipe = client.pipeline(transaction=False)
        for _ in range(min(A_BATCH, count - first)):
            pipe.execute_command(*make_noise(rng, db=db))  # type: ignore[no-untyped-call]  # redis-py
        taken += sum(not isinstance(reply, redis.RedisError) for reply in pipe.execute(raise_on_error=False))
    return taken


def list_kinds(rng: random.Random) -> Iterator[bytes]:
    yield b""
    yield b"\xc1"
    yield b"garbage"
    yield rng.randbytes(rng.randrange(1, 200))
    yield b"\x91" * 5000
    yield b"[" * 5000
    yield b'{"a":' * 2000
    yield pickle.dumps({"task": "os.system", "args": ["true"]})
    yield msgspec.msgpack.encode([1, 2, 3])
    yield json.dumps(rng.choice(_ODD)).encode()
    yield b"x" * rng.choice((10, 70_000))


def _make_hint(rng: random.Random) -> bytes:
    hint: dict[object, object] = {"type": "hint", "topic": "operations", "ident": ""}
    for _ in range(rng.randrange(3)):
        hint[rng.choice(["type", "topic", "ident", "", 7])] = rng.choice([*_ODD[:3], *_ODD[4:], "websocket.disconnect"])
    return msgspec.msgpack.encode(hint)


def _make_task(rng: random.Random) -> object:
    args: list[object] = rng.choice([[], [str(uuid.uuid4())], [rng.choice(_ODD)], [[1], {"a": 1}], [str(uuid.uuid4())] * 3])
    message = make_envelope(rng.choice(_TASKS), args)
    for _ in range(rng.randrange(4)):
        part = rng.choice([message, message["headers"], message["properties"]])
        if isinstance(part, dict) and part:
            part[rng.choice(list(part))] = deepcopy(rng.choice([*_ODD, "application/x-python-serialize", "base64"]))
    return message if rng.random() < 0.9 else {**message, "body": base64.b64encode(pickle.dumps([[], {}, {}])).decode()}


def _make_control(rng: random.Random) -> object:
    body: dict[str, object] = {
        "method": rng.choice(["shutdown", "pool_shrink", "rate_limit", "ping"]),
        "arguments": {},
        "destination": None,
    }
    return {**make_envelope("", []), "body": base64.b64encode(json.dumps(body).encode()).decode()}


def _spoil(rng: random.Random, data: bytes, *, odds: float = 0.6) -> bytes:
    """Return the data with some of it cut off or changed, something else altogether, or as it is."""
    if rng.random() > odds:
        return data
    choice = rng.random()
    if choice < 0.4:
        return rng.choice(list(list_kinds(rng)))
    if choice < 0.7:
        return data[: rng.randrange(len(data))]
    spoilt = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
    return bytes(spoilt)


def _replace_key(rng: random.Random) -> tuple[str | bytes | int, ...]:
    """Put a value of another type in the place of a key, or empty it: it is a list, a hash, a set, or it is gone."""
    key = rng.choice([*QUEUES, *FOREIGN, *KEPT])
    return rng.choice(
        [
            ("SET", key, "x"), ("HSET", key, "a", "b"), ("SADD", key, "\x06\x16"), ("ZADD", key, 1, "x"), ("LPUSH", key, "x"),
            ("DEL", key),
        ],
    )  # fmt: skip
