"""A gateway speaks for whoever holds it: through the socket it gets answers out of engines, and never manages them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.engines.scripted_server import run_engine
from tests.fakes.runners.process import run_box
from tests.fakes.scripted_gateway import run_gateway

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

MANAGING = (
    "/v1/models/load", "/v1/models/unload", "/v1/cache/flush", "/v1/admin/models/alpha/unload", "/v1/admin/settings/reload",
    "/v1/model/load", "/v1/model/unload", "/v1/download", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/v1/model/unload?x=1", "/v1/chat/completions/../../model/unload", "/v1//model/unload", "/slots/0?action=erase", "/sleep",
)  # fmt: skip


async def test_paths_that_manage_an_engine_do_not_pass_also_with_forged_headers(tmp_path: Path) -> None:
    forged = {
        "content-type": "application/json", "x-http-method-override": "DELETE", "x-original-url": "/v1/model/unload",
        "x-rewrite-url": "/v1/model/unload", "x-admin-key": "admin",
    }  # fmt: skip
    async with run_gateway() as gateway, run_engine() as engine, run_box(tmp_path, gateway.url, "--backend", engine.url):
        box = await gateway.accept()
        await box.declares("alpha", "beta")
        for path in MANAGING:
            answer = await (await box.open({"model": "alpha"}, path=path, headers=forged)).finish()
            assert answer.status == 400, path
        assert engine.seen == []
        assert (await (await box.open({"model": "alpha"}, headers=forged)).finish()).status == 200
        ((path, headers, _),) = engine.seen
        assert path == "/v1/chat/completions"
        assert not (forged.keys() - {"content-type"}) & {name.lower() for name in headers}
