"""The conformance table against our gateway: every requirement of clients, with every kind of node.

The nodes: the scripted engine behind the node program, the same as a node that is called over HTTP, a scripted engine that
speaks Messages and Responses itself, and the tiny model on llama.cpp. What is skipped is written down here row by row.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any  # REST bodies are JSON

import pytest

from conformance.exchange import Finding, Verdict
from conformance.report import run_rows
from conformance.table import Surface, Target, list_rows
from controlplane.launcher.environment import ROOT
from tests.fakes.lab import ACTOR, unique
from tests.fakes.stack import Gateway, Stack, answers
from tests.fakes.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

PING_S, SILENCE_S = 4.0, 9.5
"""Longer than a machine stands still for: a sign of life that comes before an engine's refusal makes that an error in a stream.

There are two in a silence, so that one may pass while the gateway waits for a processor.
"""
SETTINGS = {"MUSTER_STREAM_PING_S": str(PING_S)}
HEARTBEAT_S = 2.0
NATIVE = {"--native-messages", "--native-responses", "--strict-tools"}

NOT_SCRIPTED = frozenset({"errors.engine.real_context", "count_tokens.exact"})
"""For real models alone."""
NOT_TRANSLATED = frozenset({"messages.request.native", "responses.request.native"})
NOT_NATIVE = frozenset(
    f"messages.{name}"
    for name in (
        "request.system", "request.tools", "request.server_tools", "request.results", "request.images", "request.limits",
        "request.thinking_blocks", "request.result_images", "request.format", "request.unhonoured", "failed.garbage",
        "failed.whole_garbage",
    )
) | frozenset(
    f"responses.{name}"
    for name in (
        "request.instructions", "request.turns", "request.tools", "request.limits", "request.format", "request.calls",
        "request.images", "request.strange_tools", "request.thoughts", "request.result_images",
        "failed.garbage", "failed.whole_garbage",
    )
)  # fmt: skip
"""What a translation does, and what nobody can make good in bytes that pass through."""
NOT_TINY = (
    frozenset(row.id for row in list_rows(["embeddings", "rerank", "audio", "images", "chat.tools"]))
    | frozenset(row.id for row in list_rows() if row.needs_script)
    | {"completions.echo", "responses.reply.call", "responses.stream.call", "messages.reply.tool_use"}
    | {"messages.stream.tool_use", "count_tokens.all"}
)
"""The tiny model writes prose: it calls no tool, embeds nothing and hears nothing."""
MAY_SKIP: Mapping[str, frozenset[str]] = {
    "node": NOT_SCRIPTED | NOT_TRANSLATED, "direct": NOT_SCRIPTED | NOT_TRANSLATED, "native": NOT_SCRIPTED | NOT_NATIVE,
    "tiny": NOT_TINY,
}  # fmt: skip
BOXES = tuple(MAY_SKIP)
REQUIRED = (Surface.CHAT, Surface.RESPONSES, Surface.MESSAGES, Surface.COUNT_TOKENS)
"""What every node that chats offers."""


@dataclass(frozen=True)
class Boxes:
    """The gateway and the model that each kind of node serves."""

    gateway: Gateway
    models: Mapping[str, str]


@contextmanager
def run_process(
    module: str, *arguments: str, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a module of ours beside the tests; its standard output can be read."""
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], cwd=ROOT, env={**surroundings, **(env or {})}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=sink, text=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def read_url(engine: subprocess.Popen[str]) -> str:
    assert engine.stdout is not None
    return engine.stdout.readline().strip()


@contextmanager
def run_direct_box(stack: Stack, url: str, model: str) -> Iterator[None]:
    """Register a server as a node that is called over HTTP, and keep it alive as its agent would."""
    name = unique("conform")
    _, token = stack.backstage.call(
        "nodes.services.credentials.create_credential", name=name, provider_name="local", actor=ACTOR
    )

    def post(path: str, body: Mapping[str, Any]) -> Any:
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        request = urllib.request.Request(stack.ready.control_url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)

    about: dict[str, object] = {"node_name": name, "owner_name": "tests", "public_base_url": url, "gpu_name": "none"}
    about |= {"vram_total_mb": 1024, "current_model": model, "agent_version": "tests", "max_concurrent": 16}
    node_id = post("/nodes/register", about)["node_id"]
    left = threading.Event()

    def beat() -> None:
        body: dict[str, object] = {"node_id": node_id, "status": "available", "mode": "spare_on", "gpu_util_percent": 1.0}
        body |= {"vram_used_mb": 1, "vram_free_mb": 1023, "spare_score": 90.0, "is_accepting_jobs": True}
        body |= {"active_request_count": 0, "last_local_error": None}
        while True:
            with suppress(OSError):  # as its agent would: the next one comes soon
                post("/nodes/heartbeat", body | {"observed_at": datetime.now(UTC).isoformat()})
            if left.wait(HEARTBEAT_S):
                return

    beating = threading.Thread(target=beat, name="heartbeats")
    beating.start()
    try:
        yield
    finally:
        left.set()
        beating.join(30)


@pytest.fixture(scope="module")
def boxes(stack: Stack, worker_secret: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    """One node of each kind, each with a model of its own that the gateway offers."""
    logs = tmp_path_factory.mktemp("conformance")
    models = {kind: unique(f"conform-{kind}") for kind in BOXES}
    for model in models.values():
        stack.backstage.call("gateway.services.models.allow_model", name=model, actor=ACTOR)
    with ExitStack() as running:
        gateway = running.enter_context(stack.lend_gateway("conformance", SETTINGS))

        def start(module: str, *arguments: str, name: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
            return running.enter_context(run_process(module, *arguments, log=logs / f"{name}.log", env=env))

        def start_box(kind: str, *arguments: str) -> None:
            named = ("--gateway", gateway.url, "--name", models[kind])
            start("runner", *named, *arguments, name=f"box-{kind}", env={"MUSTER_TOKEN": worker_secret})

        start_box("tiny", "--model-name", models["tiny"], "--threads", "1")
        offered = [word for kind in ("node", "direct") for word in ("--model", models[kind])]
        plain = start("conformance.engine", *offered, name="engine")
        native = start("conformance.engine", "--model", models["native"], *sorted(NATIVE), name="engine-native")
        url = read_url(plain)
        start_box("node", "--backend", url, "--models", models["node"], "--max-concurrent", "16")
        start_box("native", "--backend", read_url(native), "--max-concurrent", "16")
        running.enter_context(run_direct_box(stack, url, models["direct"]))
        for kind, model in models.items():
            address = f"{gateway.url}/v1/models/{model}"
            wait_until(partial(answers, address), within_s=120, what=f"{kind} is offered")
        yield Boxes(gateway, models)


@pytest.fixture(scope="module")
def findings(boxes: Boxes, stack: Stack) -> Mapping[str, Sequence[Finding]]:
    async def check() -> list[list[Finding]]:
        targets = [
            Target(base_url=boxes.gateway.url, api_key=stack.ready.api_key, model=boxes.models[kind], scripted=kind != "tiny",
                silence_s=SILENCE_S) for kind in BOXES
        ]  # fmt: skip
        return list(await asyncio.gather(*(run_rows(target, list_rows(), required=REQUIRED) for target in targets)))

    return dict(zip(BOXES, asyncio.run(check()), strict=True))


@pytest.mark.parametrize("surface", list(Surface))
@pytest.mark.parametrize("kind", BOXES)
def test_clients_get_what_they_require(kind: str, surface: Surface, findings: Mapping[str, Sequence[Finding]]) -> None:
    broken = [
        f"{finding.row_id}: {finding.detail}"
        for finding in findings[kind]
        if finding.row_id.startswith(f"{surface}.") and finding.verdict is Verdict.FAIL
    ]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize("kind", BOXES)
def test_nothing_is_skipped_but_what_the_box_cannot_show(kind: str, findings: Mapping[str, Sequence[Finding]]) -> None:
    skipped = {finding.row_id: finding.detail for finding in findings[kind] if finding.verdict is Verdict.SKIPPED}
    assert not {row_id: reason for row_id, reason in skipped.items() if row_id not in MAY_SKIP[kind]}
