"""Rows 52 and 53: the model list."""

from __future__ import annotations

import pytest

from tests.fakes.http_client import call
from tests.fakes.lab import Lab, bearer
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.asyncio


async def listed(lab: Lab, path: str = "/v1/models") -> list[str]:
    """Return the ids in a model list."""
    reply = await call("GET", lab.gateway.url + path, headers=bearer(lab.stack.ready.api_key))
    assert reply.status == 200
    return [row["id"] for row in reply.json["data"]]


async def test_models_endpoint_returns_openai_compatible_catalog_shape_for_advertised_models(lab: Lab) -> None:
    model = await lab.model(prefix="org/with-slash")
    await lab.worker(model)

    async def advertised() -> bool:
        return model in await listed(lab)

    await eventually(advertised, what="the model is listed")
    reply = await call("GET", lab.gateway.url + "/v1/models", headers=bearer(lab.stack.ready.api_key))
    assert reply.json["object"] == "list"
    assert all(set(row) >= {"id", "object", "created", "owned_by"} for row in reply.json["data"])
    assert all(row["object"] == "model" and isinstance(row["created"], int) for row in reply.json["data"])
    one = await call("GET", f"{lab.gateway.url}/v1/models/{model}", headers=bearer(lab.stack.ready.api_key))
    assert one.status == 200
    assert one.json["id"] == model
    assert model in await listed(lab, "/models")

    async def are_the_same() -> bool:
        """Return whether anybody sees what a key sees; the workers of the test before may go between two looks."""
        seen = await call("GET", lab.gateway.url + "/v1/models", headers=bearer(lab.stack.ready.api_key))
        public = await call("GET", lab.gateway.url + "/v1/models")
        assert (seen.status, public.status) == (200, 200)
        return bool(public.json == seen.json)

    await eventually(are_the_same, what="the list is the same without a key")
    missing = await call("GET", f"{lab.gateway.url}/v1/models/no-such", headers=bearer(lab.stack.ready.api_key))
    assert missing.status == 404
    assert missing.error["code"] == "MODEL_NOT_ALLOWED"


async def test_models_endpoint_tracks_live_worker_model_updates_without_stale_entries(lab: Lab) -> None:
    old, new = await lab.model(), await lab.model()
    worker = await lab.worker(old)

    async def shows(present: str, absent: str) -> bool:
        found = await listed(lab)
        return present in found and absent not in found

    await eventually(lambda: shows(old, new), what="only the old model is listed")
    await worker.send({"type": "models_update", "models": [new], "current_load": 0})
    await eventually(lambda: shows(new, old), what="only the new model is listed")
    await worker.close()

    async def gone() -> bool:
        return new not in await listed(lab)

    await eventually(gone, what="the model of a worker that left is not listed")
