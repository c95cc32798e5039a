"""Rows L1 to L3, and ModelRelay's admin API on the gateway."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.fakes.http_client import call
from tests.fakes.lab import PROBE_TOKENS, Lab, bearer, chat_body, unique
from tests.fakes.stack import Gateway
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.asyncio

KEY_FIELDS = ["id", "name", "prefix", "created_at", "last_used_at", "revoked"]


def assert_key(row: dict[str, Any]) -> None:
    """Check the shape of one key in ModelRelay's admin API."""
    assert str(uuid.UUID(row["id"])) == row["id"]
    assert isinstance(row["created_at"], int)
    assert row["last_used_at"] is None or isinstance(row["last_used_at"], int)
    assert row["prefix"].startswith("mst_")
    assert isinstance(row["revoked"], bool)


async def create(lab: Lab, name: str) -> dict[str, Any]:
    """Create a key and return it."""
    reply = await lab.admin("POST", "/admin/keys", body={"name": name})
    assert reply.status == 201, reply
    found = reply.json
    assert isinstance(found, dict)
    return found


async def test_create_key_deserializes_into_shared_type(lab: Lab) -> None:
    name = unique("key")
    row = await create(lab, name)
    assert set(row) == {*KEY_FIELDS, "secret"}
    assert_key(row)
    assert row["name"] == name
    assert row["revoked"] is False
    assert row["last_used_at"] is None
    assert row["secret"].startswith(row["prefix"])


async def test_list_keys_deserializes_into_shared_type(lab: Lab) -> None:
    row = await create(lab, unique("key"))
    reply = await lab.admin("GET", "/admin/keys")
    assert reply.status == 200
    for listed in reply.json["keys"]:
        assert set(listed) == set(KEY_FIELDS)
        assert_key(listed)
    assert row["secret"] not in reply.body.decode()
    assert row["id"] in [listed["id"] for listed in reply.json["keys"]]


async def test_full_key_lifecycle_via_shared_types(lab: Lab, hasty: Gateway) -> None:
    row = await create(lab, unique("key"))
    model = await lab.model(lab.gateway, hasty)
    worker = await lab.worker(model, max_concurrent=64)

    async def statuses() -> set[int]:
        body = chat_body(model, max_tokens=PROBE_TOKENS)
        headers = bearer(row["secret"])
        return {(await lab.post(body, headers=headers, gateway=gateway)).status for gateway in (lab.gateway, hasty)}

    async def accepted() -> bool:
        return await statuses() == {400}

    await eventually(accepted, what="the new key works")
    deleted = await lab.admin("DELETE", f"/admin/keys/{row['id']}")
    assert deleted.status == 204
    assert deleted.body == b""

    async def refused() -> bool:
        return await statuses() == {401}

    await eventually(refused, what="the revoked key is refused everywhere")
    listed = (await lab.admin("GET", "/admin/keys")).json["keys"]
    assert [one["revoked"] for one in listed if one["id"] == row["id"]] == [True]
    assert (await lab.admin("DELETE", f"/admin/keys/{uuid.uuid4()}")).status == 404
    assert (await lab.admin("DELETE", "/admin/keys/not-a-uuid")).status == 404
    assert not worker.jobs


@pytest.mark.parametrize("path", ["/admin/workers", "/admin/stats", "/admin/keys"])
async def test_the_admin_api_refuses_everyone_but_an_admin(lab: Lab, path: str) -> None:
    ready = lab.stack.ready
    for token in (None, "wrong", ready.api_key, ready.worker_secret):
        headers = {} if token is None else bearer(token)
        reply = await call("GET", lab.gateway.url + path, headers=headers)
        assert reply.status == 403, (path, reply)
    bare = await call("GET", lab.gateway.url + path, headers={"authorization": ready.admin_token})
    assert bare.status == 200


async def test_the_admin_api_lists_workers_and_queue(lab: Lab) -> None:
    model = await lab.model()
    name = unique("listed")
    worker = await lab.worker(model, name=name, max_concurrent=2)
    lab.ask(model)
    await worker.job()
    row = await lab.listed_worker(name)
    assert row is not None
    expected = {
        "worker_id": worker.of_kind("register_ack")[0]["worker_id"],
        "provider": "local",
        "worker_name": name,
        "models": [model],
        "max_concurrent": 2,
        "in_flight_count": 1,
        "is_draining": False,
    }
    assert {field: row[field] for field in expected} == expected
    assert set(row) >= {*expected, "reported_load"}
    stats = (await lab.admin("GET", "/admin/stats")).json
    assert isinstance(stats["queue_depth"], dict)
    assert stats["active_workers"] >= 1
