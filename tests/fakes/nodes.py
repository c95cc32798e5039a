"""Rows for the tests of the node registry; each takes only what the test is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from django.db import connection, transaction
from django.utils import timezone
from pytest_django import DjangoDbBlocker

from core.models import User
from gateway.models import ApiKey, GatewayProcess, RequestRecord, Tenant, UsageEvent
from gateway.services.keys import create_api_key
from gateway.services.tenants import create_tenant
from governance.models import AuditEvent
from nodes.models import Node, NodeCredential, NodePresence, Provider, Reach
from nodes.services.credentials import create_credential, create_provider
from wire import RELEASE
from wire.contract import NodeStatus, RequestState
from wire.ids import new_uuid7

ACTOR = "user:ada"


def make_provider(name: str = "local") -> Provider:
    return Provider.objects.filter(name=name).first() or create_provider(name=name, actor=ACTOR)


def make_credential(name: str = "box", *, provider: str = "local", **changes: Any) -> tuple[NodeCredential, str]:
    make_provider(provider)
    return create_credential(name=name, provider_name=provider, actor=ACTOR, **changes)


def make_node(name: str = "box", *, credential: NodeCredential | None = None, **changes: Any) -> Node:
    held = credential or make_credential(name)[0]
    return Node.objects.create(name=name, credential=held, provider=held.provider, **changes)


def make_presence(node: Node, *, age_s: float | None = 1.0, **changes: Any) -> NodePresence:
    """Return a presence that was heard ``age_s`` seconds ago (None = never); on a socket, or with a URL that answers."""
    heard = timezone.now() - timedelta(seconds=age_s) if age_s is not None else None
    is_dialled = node.reach == Reach.DIRECT.value
    reach: dict[str, Any] = {"probed_at": heard} if is_dialled else {"connected": age_s is not None}
    values = {"reported_status": NodeStatus.AVAILABLE.value, "last_heartbeat_at": heard, **reach, **changes}
    return NodePresence.objects.create(node=node, **values)


def audited(action: str) -> list[AuditEvent]:
    return list(AuditEvent.objects.filter(action=action).order_by("pk"))


PASSWORD = "a password for tests only"


def make_operator(name: str = "ada", *, is_superuser: bool = True) -> User:
    return User.objects.create_user(name, password=PASSWORD, is_staff=True, is_superuser=is_superuser)


def make_tenant(name: str = "research") -> Tenant:
    return Tenant.objects.filter(name=name).first() or create_tenant(name=name, actor=ACTOR)


def make_key(name: str = "notebook", *, tenant: str = "research", **changes: Any) -> tuple[ApiKey, str]:
    make_tenant(tenant)
    return create_api_key(name=name, tenant_name=tenant, actor=ACTOR, **changes)


def make_gateway(*, silent_s: float = 0.0, stopped: bool = False, release: str = RELEASE) -> GatewayProcess:
    now = timezone.now()
    heard_at, stopped_at = now - timedelta(seconds=silent_s), now if stopped else None
    return GatewayProcess.objects.create(host="host", pid=1, heartbeat_at=heard_at, stopped_at=stopped_at, release=release)


def make_record(*, age_s: float = 1.0, state: RequestState = RequestState.COMPLETED, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "gateway_id": new_uuid7(), "tenant": "research", "key_id": new_uuid7(), "key_name": "notebook", "model": "tiny",
        "endpoint": "/v1/chat/completions", "state": state.value, "created_at": timezone.now() - timedelta(seconds=age_s),
    }  # fmt: skip
    return RequestRecord.objects.create(**{**values, **changes})


def make_event(*, ago_s: float = 0, **changes: Any) -> UsageEvent:
    """Return the event of a request that ended then, not saved."""
    moment = timezone.now() - timedelta(seconds=ago_s)
    values: dict[str, Any] = {
        "event_id": new_uuid7(), "created_at": moment, "finished_at": moment, "gateway_id": new_uuid7(), "tenant": "t",
        "key_id": new_uuid7(), "key_name": "k", "model": "m", "state": RequestState.COMPLETED.value, "status_code": 200,
        "prompt_tokens": 9, "completion_tokens": 3, "tokens": 12, "cost_micros": 5, "queue_ms": 10, "latency_ms": 1000,
    }  # fmt: skip
    return UsageEvent(**(values | changes))


T = TypeVar("T")


@contextmanager
def shared_rows(blocker: DjangoDbBlocker, make: Callable[[], T]) -> Iterator[T]:
    """Yield what ``make`` returns and keep the rows that it wrote until the block ends; each test takes back its own changes.

    For a fixture of a module without transactional tests, which also asks for ``django_db_setup``. Tests may change the rows,
    not the objects. A node that must stay fresh however long the module takes is heard in the future (``age_s`` below zero).
    """
    shared: Any = transaction.atomic()  # Any: Django's own test cases mark theirs so, and let durable blocks be in it
    shared._from_testcase = True
    with blocker.unblock():
        shared.__enter__()
    try:
        with blocker.unblock():
            made = make()
        yield made
    finally:
        with blocker.unblock():
            transaction.set_rollback(True)
            shared.__exit__(None, None, None)


def find_tables(*needles: str) -> set[str]:
    found = set()
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT t::text FROM "{table}" t')  # names of the database itself
            if any(needle in row[0] for row in cursor.fetchall() for needle in needles):
                found.add(table)
    return found
