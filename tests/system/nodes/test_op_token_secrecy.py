"""Tokens and keys of operations are where they are used, for as long as they are used, and nowhere else."""

from __future__ import annotations

import inspect
import logging
from typing import cast

import pytest
import redis
from django.conf import settings
from django.db import connection
from django.test import Client
from django.utils.module_loading import import_string

from core.models import User
from governance.registry import RunOrder
from nodes.models import NodeCommand
from tests.system.governance.team import make_governed
from tests.system.nodes.test_commands import Sent

pytestmark = pytest.mark.django_db


def find_tables(*needles: str) -> set[str]:
    """The tables with a row that holds one of the texts, plainly or as bytes."""
    found = set()
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT t::text FROM "{table}" t')  # names of the database itself
            if any(needle in row[0] for row in cursor.fetchall() for needle in needles):
                found.add(table)
    return found


def read_redis() -> bytes:
    store = redis.Redis.from_url(settings.REDIS_URL)
    try:
        return b"".join(cast("bytes", store.dump(key) or b"") for key in store.scan_iter())
    finally:
        store.close()


def test_a_token_is_in_its_command_alone_and_gone_after_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        sent = Sent(make_governed())
        token, secret = sent.command.token, sent.rig.secret
        mac = token[-60:]
        assert len(token) > 1000
        assert find_tables(token) == {"nodes_nodecommand"}
        assert find_tables(secret.hex()) == {"nodes_nodeopkey"}
        sent.plan()
        boss = Client()
        boss.force_login(User.objects.create_superuser("boss"))
        pages = [
            f"/admin/nodes/node/{sent.node.pk}/change/", "/admin/nodes/node/", "/admin/governance/auditevent/",
            f"/approvals/{sent.operation.pk}/", f"/approvals/{sent.operation.pk}/evidence", "/admin/",
        ]  # fmt: skip
        answers = [boss.get(page) for page in pages]
        assert [answer.status_code for answer in answers] == [200] * len(pages)
        shown = "".join(answer.content.decode() for answer in answers)
        sent.hear(sent.rig.end(sent.command.op_id, "succeeded"))
    assert NodeCommand.objects.get().token == ""
    assert find_tables(token, mac) == set()
    for secret_text in (token, mac, secret.hex()):
        assert secret_text not in shown + caplog.text
        assert secret_text.encode() not in read_redis()


def test_an_order_does_not_print_its_token() -> None:
    sent = Sent(make_governed())
    assert sent.command.token not in repr(sent.plan())
    order = RunOrder(
        run_id=sent.run.pk, op_id="op", use=1, operation="model-load", target="t", params={}, token="a-token-to-look-for",
        token_expires_at=0, requested_by="ana", approved_by=(),
    )  # fmt: skip
    assert "a-token-to-look-for" not in repr(order)


def test_every_task_takes_nothing_but_ids() -> None:
    """Arguments of tasks lie in Valkey in clear, and Celery copies them into headers of messages."""
    app = import_string(settings.TASK_APP)
    app.loader.import_default_modules()
    ours = {name: task for name, task in app.tasks.items() if not name.startswith("celery.")}
    assert len(ours) > 8
    assert {name for task in ours.values() for name in inspect.signature(task.run).parameters} == {"run_id"}
    assert not {name for name, entry in settings.CELERY_BEAT_SCHEDULE.items() if entry.get("args") or entry.get("kwargs")}
