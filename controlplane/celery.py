"""The Celery application, whose messages wake background work. Rows hold the work, messages carry opaque ids.

What it takes from Valkey are tasks of ours, each checked and built anew before Celery sees it; the rest is set aside. Whoever
can write to Valkey can then make a worker look at rows, and nothing more.
"""

from __future__ import annotations

import base64
import json
import os
import uuid
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from itertools import product
from queue import Empty
from typing import Annotated, Any, Literal

import msgspec
import redis
from celery import Celery
from celery.signals import worker_init, worker_ready
from django.conf import settings
from kombu.transport import TRANSPORT_ALIASES
from kombu.transport import redis as redis_transport

from core.db.base import limit_process
from core.hints import UNREADABLE_KEY, UNREADABLE_TOTAL_KEY, MessageCount
from core.limits import limits
from wire import clock

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

FOREIGN_KEY = "muster.unreadable.key"
"""What stood in the place of a queue, the newest alone."""

unreadable = MessageCount()
Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class _Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """The keyword arguments of a task: there are none."""


class _Headers(msgspec.Struct):
    task: str
    id: uuid.UUID
    eta: Moment | None = None
    expires: Moment | None = None


class _Message(msgspec.Struct, rename=lambda name: name.replace("_", "-")):
    """Celery's message protocol 2 on Valkey, as far as Muster uses it. ``body``: base64 of [args, kwargs, options]."""

    body: bytes
    content_type: Literal["application/json"]
    content_encoding: Literal["utf-8"]
    headers: _Headers


def rebuild_message(text: bytes, queue: str) -> bytes | None:
    """Return a message with what was checked of this one; None unless it is a task of ours with the id of a row or none."""
    try:
        if len(text) > limits().console.task_message_bytes:
            return None
        message = msgspec.json.decode(text, type=_Message)
        ids, _, _ = msgspec.json.decode(message.body, type=tuple[list[uuid.UUID], _Nothing, dict[str, object]])
        headers, args = message.headers, [str(ident) for ident in ids]
        if headers.eta is not None and headers.eta - clock.now() > timedelta(seconds=limits().console.task_ahead_s):
            return None
        task = app.tasks.get(headers.task)
        if task is None or headers.task.startswith("celery."):  # Celery's own tasks call others by name
            return None
        task.__header__(*args)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        return None
    return json.dumps(
        {
            "body": base64.b64encode(json.dumps([args, {}, {}]).encode()).decode(),
            "content-type": "application/json",
            "content-encoding": "utf-8",
            "headers": {
                "lang": "py",
                "task": headers.task,
                "id": str(headers.id),
                "root_id": str(headers.id),
                "eta": headers.eta and headers.eta.isoformat(),
                "expires": headers.expires and headers.expires.isoformat(),
                "ignore_result": True,
            },
            "properties": {
                "body_encoding": "base64",
                "correlation_id": str(headers.id),
                "delivery_info": {"exchange": "", "routing_key": queue},
                "delivery_tag": str(uuid.uuid4()),
                "priority": 0,
            },
        }
    ).encode()


class _Client(redis.Redis):
    """Gives a channel no message that was not checked; kombu itself changes replies in this place."""

    def __init__(self, *, channel: TaskChannel, **options: Any) -> None:  # Any: of redis-py
        super().__init__(**options)
        self._channel = channel

    def parse_response(self, connection: Any, command_name: str, **options: Any) -> Any:  # Any: of redis-py
        """Return the reply. That of BRPOP is None, as after a time-out, when the message cannot be read."""
        reply = super().parse_response(connection, command_name, **options)  # type: ignore[no-untyped-call]  # redis-py
        if command_name != "BRPOP" or not reply:
            return reply
        key, text = reply
        message = rebuild_message(text, queue=settings.CELERY_TASK_DEFAULT_QUEUE)
        if message is None:
            self._channel.keep_unreadable(text)
            return None
        return key, message


class TaskChannel(redis_transport.Channel):
    """Reads task lists, whatever stands in them or in their place."""

    def _get_client(self) -> Any:  # Any: kombu calls it with the options of redis-py
        return partial(_Client, channel=self)

    def _queue_bind(self, *_binding: str) -> None:
        """Keep no table of bindings in Valkey: each message is put on its list by the name of the list."""

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[no-untyped-call]  # kombu ships no types
        except redis.ResponseError as error:
            if not self._move_foreign_keys(*self.active_queues):
                raise redis.ConnectionError(str(error)) from error  # Celery connects again, later and later
            raise Empty from None

    def _size(self, queue: str) -> int:
        """Return how long a list is, as whoever uses it first is told; a value of another type is then moved."""
        self._move_foreign_keys(queue)
        return int(super()._size(queue))  # type: ignore[no-untyped-call]  # kombu ships no types

    def keep_unreadable(self, text: bytes) -> None:
        """Count a message that cannot be read, and keep its beginning for operators."""
        unreadable.add()
        with suppress(redis.RedisError), self.conn_or_acquire() as client:
            (
                client.pipeline(transaction=False)
                .incr(UNREADABLE_TOTAL_KEY)
                .lpush(UNREADABLE_KEY, text[: limits().console.task_kept_bytes])
                .ltrim(UNREADABLE_KEY, 0, limits().console.task_kept - 1)
                .execute(raise_on_error=False)
            )

    def _move_foreign_keys(self, *queues: str) -> bool:
        """Move what stands in the place of a task list out of the way. True when there was something."""
        was_moved = False
        with self.conn_or_acquire() as client:
            for queue, step in product(queues, self.priority_steps):
                key = str(self._q_for_pri(queue, step))  # type: ignore[no-untyped-call]  # kombu ships no types
                kind = client.type(key)
                if kind not in {b"none", b"list"}:
                    client.rename(key, FOREIGN_KEY)
                    self.keep_unreadable(b"the key " + key.encode() + b" was no list but a " + kind)
                    was_moved = True
        return was_moved


class Transport(redis_transport.Transport):
    Channel = TaskChannel
    brpop_timeout = 5
    """Seconds after which a quiet list is asked again; a message is taken at once."""


class SentinelTaskChannel(TaskChannel, redis_transport.SentinelChannel):
    """Reads task lists of the master that Sentinels name."""


class SentinelTransport(Transport):
    Channel = SentinelTaskChannel


# By name: kombu takes the transport from the scheme of the URL, and of none but these.
TRANSPORT_ALIASES.update(dict.fromkeys(("redis", "rediss"), "controlplane.celery:Transport"))
TRANSPORT_ALIASES["sentinel"] = "controlplane.celery:SentinelTransport"

app = Celery("muster")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
app.autodiscover_tasks(["controlplane"])


@worker_init.connect  # type: ignore[untyped-decorator]  # Celery ships no types
def bound_waits(**_kwargs: Any) -> None:  # Any: the signal's own arguments
    # A task that waits for a silent database ends with an error, and its row is due again.
    limit_process(limits().core.database_silence_s)


@worker_ready.connect  # type: ignore[untyped-decorator]  # Celery ships no types
def prepare_partitions(**_kwargs: Any) -> None:  # Any: the signal's own arguments
    # Beat waits one whole interval before its first call.
    app.send_task("gateway.tasks.maintain_partitions", expires=600)
