"""A real box that counts the tokens of a prompt, for the gateway that it is at and for another one."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from asgiref.sync import sync_to_async
from django.db import connections
from pytest_django import Settings

from controlplane.gateway_server.http_protocol import GatewayHttpProtocol
from controlplane.gateway_server.ws_protocol import GatewayWebSocketProtocol
from gateway.catalogue import ModelEntry
from gateway.counting import Source, TokenCounter
from gateway.models import RequestRecord
from gateway.runtime import GatewayRuntime
from gateway.services import allow_model, create_api_key, create_tenant
from gateway.urls import make_application
from nodes.links import LinkRegistry
from nodes.links.http import HttpLink, HttpTarget
from nodes.states import TOKENIZE
from tests.fakes.limits import set_limits
from tests.fakes.models.make import hf_model_dir
from tests.fakes.nodes import make_credential
from tests.fakes.runners.process import run_box
from tests.fakes.server_door import run_server
from tests.fakes.waiting import eventually

MESSAGES = "/v1/messages/count_tokens"
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "What is a λ?"}]}  # JSON
ENTRY = ModelEntry(
    name="tiny", allowed=True, owned_by="x", max_tokens=10, max_prompt_chars=10, max_queue=1, created=0, tokenizer="tiny"
)


@pytest.fixture(autouse=True)
def patience() -> None:
    """Let a machine that stands still count all the same. That who takes too long is left out is tested elsewhere."""
    set_limits(gateway={"count_node_ms": 30_000, "count_thread_s": 30.0, "template_s": 30.0})


@asynccontextmanager
async def serve_gateway() -> AsyncIterator[tuple[GatewayRuntime, int]]:
    """A gateway on loopback; yields it with its port."""
    runtime = GatewayRuntime()
    await runtime.start()
    config = uvicorn.Config(
        make_application(runtime), host="127.0.0.1", port=0, http=GatewayHttpProtocol, ws=GatewayWebSocketProtocol,
        lifespan="off", log_config=None, ws_per_message_deflate=False,
    )  # fmt: skip
    try:
        async with run_server(uvicorn.Server(config)) as port:
            try:
                yield runtime, port
            finally:
                await runtime.stop()
    finally:
        await runtime.stop()
        await sync_to_async(connections.close_all)()


@sync_to_async
def make_rows() -> tuple[str, str]:
    """Return the texts of a client's key and of a box's credential; the model ``tiny`` is allowed."""
    create_tenant(name="acme", actor="user:ada")
    allow_model(name="tiny", actor="user:ada")
    return create_api_key(name="k", tenant_name="acme", actor="user:ada")[1], make_credential("rig", max_nodes=1)[1]


@pytest.mark.timeout(180)  # above the sum of the waits
@pytest.mark.django_db(transaction=True)
async def test_a_real_box_counts_what_it_then_reads_also_for_another_gateway(settings: Settings, tmp_path: Path) -> None:
    settings.CLUSTER_SECRET = "cluster"
    key, secret = await make_rows()
    body = {**ASKED, "model": "tiny", "system": "Be brief.", "max_tokens": 1}
    async with (
        serve_gateway() as (runtime, port),
        run_box(tmp_path, f"http://127.0.0.1:{port}", "--model-name", "tiny", "--threads", "1", env={"MUSTER_TOKEN": secret}),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers={"x-api-key": key}, timeout=60) as client,
    ):
        (link,) = await eventually(lambda: asyncio.sleep(0, runtime.registry.links_for("tiny")), what="the box is here")
        # What it says of a model that was loaded late comes in more than one message.
        await eventually(lambda: link.contexts and TOKENIZE in link.endpoints.get("tiny", ()), what="the box has said it all")
        assert link.context_of("tiny") == 2048
        counted = await client.post(MESSAGES, json=body)
        answered = await client.post("/v1/messages", json=body)
        assert counted.json() == {"input_tokens": answered.json()["usage"]["input_tokens"]}
        assert counted.headers["x-muster-token-count"] == "engine"
        assert await RequestRecord.objects.acount() == 1, "a count is no request"
        target = HttpTarget(
            scheme="http", host="127.0.0.1", address="127.0.0.1", port=port, base_path="/internal/v1/nodes",
            headers={"x-muster-cluster": "cluster"},
        )  # fmt: skip
        elsewhere = HttpLink(
            node_id=link.node_id,
            node_name="rig",
            models=link.models,
            max_concurrent=1,
            target=target,
            connect_s=5.0,
            is_peer=True,
        )
        elsewhere.endpoints = link.endpoints
        registry = LinkRegistry()
        registry.add(elsewhere)
        chat = json.dumps(
            {"model": "tiny", "messages": [{"role": "system", "content": "Be brief."}, *ASKED["messages"]]}
        ).encode()
        shutil.copytree(hf_model_dir(), tmp_path / "tokenizers" / "tiny", ignore=shutil.ignore_patterns("*.safetensors"))
        for own, source in (
            (TokenCounter(registry, None), Source.ENGINE),
            (TokenCounter(registry, tmp_path / "tokenizers"), Source.TOKENIZER),
        ):
            found = await own.count(ENTRY, chat, tenant="acme", request_id="req_1")
            assert (found.source, found.tokens) == (source, counted.json()["input_tokens"])
        elsewhere.close("over")
