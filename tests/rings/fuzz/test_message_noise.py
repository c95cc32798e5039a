"""Whatever somebody writes to Valkey, no process ends, and what is good among it is still done."""

from __future__ import annotations

import base64
import json
import pickle
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from django.conf import settings
from django.utils import timezone

from controlplane.celery import FOREIGN_KEY, app, rebuild_message
from core.hints import UNREADABLE_KEY, UNREADABLE_TOTAL_KEY, read_unreadable
from core.limits import limits
from governance.models import AuditEvent, Notice, SignInFailure
from governance.notices import add_webhook, notify_of_unreadable, write_message
from governance.operations.runs import wake_worker
from nodes.direct import schedule_call
from tests.fakes.control_process import serve_control, serve_gateway, serve_worker
from tests.fakes.request_bodies import FOREIGN, QUEUE, QUEUES, make_envelope, send_noise
from tests.fakes.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]

Valkey = Any
"""A client of redis-py, which types what it returns as of both its clients."""
FORGET = "governance.tasks.forget_sign_ins"
WORK = "governance.tasks.work"


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """The Valkey of the tests, without what this file writes to it."""
    keys = (*QUEUES, *FOREIGN, UNREADABLE_KEY, UNREADABLE_TOTAL_KEY, FOREIGN_KEY)
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        client.delete(*keys)
        yield client
        client.delete(*keys)


def is_task_done(valkey: Valkey) -> Callable[[], bool]:
    """Ring for a task; return what tells whether a worker has carried it out."""
    long_ago = timezone.now() - timedelta(days=2)
    row = SignInFailure.objects.create(name=uuid.uuid4().hex, address="192.0.2.1", count=1, last_at=long_ago)
    valkey.lpush(QUEUE, json.dumps(make_envelope(FORGET, [])))
    return lambda: not SignInFailure.objects.filter(pk=row.pk).exists()


def test_noise_ends_no_process_is_counted_and_kept_and_what_is_good_is_still_done(valkey: Valkey, tmp_path: Path) -> None:
    with (
        serve_worker(tmp_path / "worker.log") as worker,
        serve_gateway(tmp_path / "gateway.log") as gateway,
        serve_control(tmp_path / "control.log") as control,
    ):
        wait_until(is_task_done(valkey), what="the worker carries tasks out", within_s=90)
        assert send_noise(valkey, 2000, seed=1) > 1000
        is_done: list[Callable[[], bool]] = []

        def ring_until_done() -> bool:  # the task list may be no list for a moment, and a ring that is refused is sent again
            try:
                is_done.append(is_task_done(valkey))
            except redis.ResponseError:
                return False
            return any(look() for look in is_done)

        wait_until(ring_until_done, what="the worker still carries tasks out", within_s=60, pause_s=0.5)
        assert httpx.get(f"{control.url}/healthz", timeout=30).json()["ok"]
        metrics = httpx.get(f"{gateway.url}/metrics", timeout=30).text
        ended = [process.poll() for process in (worker, gateway.process, control.process)]
        assert ended == [None] * 3, (tmp_path / "worker.log").read_text()[-2000:]
    count = next(line for line in metrics.splitlines() if line.startswith("muster_messages_unreadable_total "))
    assert float(count.split()[1]) > 200
    log = (tmp_path / "gateway.log").read_text()
    assert 0 < log.count("messages_unreadable") < 20
    assert "Traceback" not in log


def test_garbage_is_counted_and_the_newest_of_it_kept(valkey: Valkey, tmp_path: Path) -> None:
    for number in range(limits().console.task_kept + 20):
        valkey.lpush(QUEUE, f"garbage {number}")
    valkey.lpush(QUEUE, "x" * 100_000)
    with serve_worker(tmp_path / "worker.log") as worker:
        wait_until(
            lambda: int(valkey.get(UNREADABLE_TOTAL_KEY) or 0) == limits().console.task_kept + 21,
            what="all is counted",
            within_s=90,
        )
        wait_until(is_task_done(valkey), what="the worker carries tasks out", within_s=60)
        assert worker.poll() is None
    kept = valkey.lrange(UNREADABLE_KEY, 0, -1)
    assert kept[:2] == [b"x" * limits().console.task_kept_bytes, b"garbage 119"]
    assert len(kept) == limits().console.task_kept
    assert read_unreadable() == limits().console.task_kept + 21


@pytest.mark.parametrize("queue", QUEUES)
def test_a_key_that_is_no_list_is_moved_out_of_the_way(valkey: Valkey, queue: str, tmp_path: Path) -> None:
    valkey.set(queue, "what somebody else keeps there")
    with serve_worker(tmp_path / "worker.log") as worker:
        wait_until(lambda: valkey.exists(FOREIGN_KEY), what="the worker moves the key", within_s=90)
        assert valkey.get(FOREIGN_KEY) == b"what somebody else keeps there"
        wait_until(is_task_done(valkey), what="the worker carries tasks out", within_s=60)
        assert worker.poll() is None
    assert b"was no list but a string" in valkey.lindex(UNREADABLE_KEY, 0)


def test_a_command_to_the_remote_control_of_celery_and_an_emptied_valkey_end_no_worker(valkey: Valkey, tmp_path: Path) -> None:
    with serve_worker(tmp_path / "worker.log") as worker:
        wait_until(is_task_done(valkey), what="the worker carries tasks out", within_s=90)
        app.control.shutdown()
        wait_until(is_task_done(valkey), what="the worker carries tasks out", within_s=60)
        valkey.flushdb()
        wait_until(is_task_done(valkey), what="the worker carries tasks out", within_s=60)
        assert worker.poll() is None
    assert valkey.pubsub_numsub("/0.celery.pidbox")[0][1] == 0


def test_operators_are_told_of_garbage_once_an_hour_and_again_when_there_is_more(valkey: Valkey) -> None:
    add_webhook(name="ops", url="https://chat.example.com/x", actor="user:ada")
    told = Notice.objects.filter(event__startswith="messages_unreadable.", webhook__name="ops")
    look = app.tasks["governance.tasks.report_unreadable"]
    look()
    assert not told.exists(), "nothing is said of nothing"
    for total in (3, 4, 10**30):
        valkey.set(UNREADABLE_TOTAL_KEY, total)
        look()
    assert told.count() == 1
    event = AuditEvent.objects.get(action="messages.set_aside")
    assert event.detail == {"total": 3}
    message = write_message(told.get())
    assert (message.body["total"], message.body["event"]) == (3, "messages_unreadable")
    assert "3 messages" in message.text
    later, much_later = (event.at + timedelta(hours=hours) for hours in (1, 9))
    assert not notify_of_unreadable(3, now=much_later), "nothing is new"
    assert notify_of_unreadable(4, now=later)
    assert told.count() == 2


def test_a_task_list_that_takes_nothing_does_not_fail_who_rings(valkey: Valkey) -> None:
    valkey.set(QUEUE, "x")
    wake_worker(uuid.uuid4())
    schedule_call(uuid.uuid4())


# What a worker is given


def rebuild(message: object) -> bytes | None:
    return rebuild_message(json.dumps(message).encode(), QUEUE)


@pytest.fixture(autouse=True)
def _tasks() -> None:
    app.loader.import_default_modules()


def test_every_task_of_ours_passes_as_celery_sends_it(valkey: Valkey) -> None:
    names = sorted(name for name in app.tasks if not name.startswith("celery."))
    for name in names:
        args = [str(uuid.uuid4())] if name in {WORK, "nodes.tasks.call_box"} else []
        app.send_task(name, args=args, countdown=30, expires=90)
    sent = valkey.lrange(QUEUE, 0, -1)
    assert len(sent) == len(names) >= 10
    assert [message for message in sent if rebuild_message(message, QUEUE) is None] == []


@pytest.mark.parametrize(
    "spoilt",
    [
        make_envelope("os.system", ["true"]),
        make_envelope("celery.map", [{"task": WORK}, []]),
        make_envelope("celery.backend_cleanup", []),
        make_envelope(WORK, []),
        make_envelope(WORK, ["not an id"]),
        make_envelope(WORK, [str(uuid.uuid4())] * 2),
        make_envelope(FORGET, [str(uuid.uuid4())]),
        make_envelope(FORGET, [], id="not an id"),
        make_envelope(FORGET, [], eta="2999-01-01T00:00:00+00:00"),
        make_envelope(FORGET, [], eta="0001-01-01T00:00:00"),
        make_envelope(FORGET, [], expires=17),
        {**make_envelope(FORGET, []), "content-type": "application/x-python-serialize"},
        {**make_envelope(FORGET, []), "body": base64.b64encode(pickle.dumps([[], {}, {}])).decode()},
        {**make_envelope(FORGET, []), "body": "x" * limits().console.task_message_bytes},
        {**make_envelope(FORGET, []), "headers": []},
        {},
        [],
    ],
)  # fmt: skip
def test_what_is_no_task_of_ours_reaches_no_worker(spoilt: object) -> None:
    assert rebuild(make_envelope(FORGET, [])) is not None
    assert rebuild(spoilt) is None
