"""What is left of a request when it is over: one row, and never a body."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any  # what the redis client returns depends on its mode

import psycopg
import pytest
import redis
from psycopg import sql

from tests.fakes.http_client import call
from tests.fakes.lab import CHAT, Lab, unique

pytestmark = pytest.mark.asyncio


async def test_a_completed_request_has_one_row_with_tokens_times_node_and_attempts(lab: Lab) -> None:
    model = await lab.model()
    name = unique("recorded")
    worker = await lab.worker(model, name=name)
    began = time.monotonic()
    reply = lab.ask(model, "count me", max_tokens=33)
    await worker.answer(await worker.job(), tokens=(7, 3))
    request_id = (await reply).request_id
    (record,) = await lab.final(model)
    took_ms = (time.monotonic() - began) * 1000
    assert record["status"] == "completed"
    assert record["error_code"] is None
    assert record["status_code"] == 200
    assert record["node_name"] == name
    assert record["attempts"] == 1
    assert record["max_tokens"] == 33
    assert (record["prompt_tokens"], record["completion_tokens"], record["tokens_estimated"]) == (7, 3, False)
    assert 0 <= record["queue_ms"] <= record["ttfb_ms"] <= record["latency_ms"] <= took_ms
    assert record["bytes_out"] > 0
    assert record["finished_at"] >= record["created_at"]
    assert request_id == f"req_{record['id'].hex}"
    assert record["endpoint"] == CHAT


async def test_the_contracts_list_shows_the_same_final_state_and_filters(lab: Lab) -> None:
    model = await lab.model()
    name = unique("listed")
    worker = await lab.worker(model, name=name)
    reply = lab.ask(model, "list me", max_tokens=5)
    await worker.answer(await worker.job())
    request_id = (await reply).request_id
    await lab.final(model)
    (row,) = await lab.listed_requests(model)
    node = await lab.node(name)
    expected = {
        "request_id": request_id,
        "node_id": node["node_id"],
        "model": model,
        "status": "completed",
        "max_tokens": 5,
        "error_code": None,
    }
    assert {field: row[field] for field in expected} == expected
    assert set(row) >= {*expected, "prompt_tokens_est", "latency_ms", "created_at"}
    assert row["created_at"].endswith("Z")
    assert isinstance(row["latency_ms"], int)
    assert row["prompt_tokens_est"] >= 1
    by_node = await lab.control("GET", f"/requests?node_id={node['node_id']}&status=completed&limit=10")
    assert [found["request_id"] for found in by_node.json["requests"]] == [request_id]
    none = await lab.control("GET", f"/requests?node_id={node['node_id']}&status=failed")
    assert none.json["requests"] == []
    wrong = await lab.control("GET", "/requests?status=nonsense")
    assert (wrong.status, wrong.error["code"]) == (400, "BAD_REQUEST")
    stranger = await lab.control("GET", "/requests", token=lab.stack.ready.api_key)
    assert stranger.status in {401, 403}


async def test_usage_comes_from_the_engine_or_is_marked_as_an_estimate(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    reported = lab.ask(model, "reported in the body")
    job = await worker.job()
    body = json.dumps({"choices": [], "usage": {"prompt_tokens": 21, "completion_tokens": 8, "total_tokens": 29}})
    await worker.complete(job, body=body)
    await reported
    silent = lab.ask(model, "not reported at all")
    await worker.answer(await worker.job(), "some words of an answer")
    await silent
    streamed = lab.ask(model, "reported at the end of a stream", stream=True, stream_options={"include_usage": True})
    job = await worker.job()
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}}
    await worker.chunk(job, f"data: {json.dumps(usage)}\n\n")
    await worker.stream(job, [])
    got = await streamed
    assert json.loads(got.events[0])["usage"]["total_tokens"] == 7
    first, second, third = await lab.final(model, 3)
    assert (first["prompt_tokens"], first["completion_tokens"], first["tokens_estimated"]) == (21, 8, False)
    assert second["tokens_estimated"] is True
    assert second["prompt_tokens"] >= 1
    assert second["completion_tokens"] >= 1
    assert (third["prompt_tokens"], third["completion_tokens"], third["tokens_estimated"]) == (5, 2, False)


async def test_prompts_answers_and_credentials_are_written_nowhere(lab: Lab, tmp_path: Path) -> None:
    canary = f"canary{secrets.token_hex(12)}"
    model = await lab.model()
    worker = await lab.worker(model)
    plain = lab.ask(model, f"{canary} prompt")
    await worker.answer(await worker.job(), f"{canary} answer")
    await plain
    streamed = lab.ask(model, f"{canary} prompt", stream=True)
    await worker.stream(await worker.job(), [f"{canary} answer"])
    await streamed
    failed = lab.ask(model, f"{canary} prompt")
    job = await worker.job()
    await worker.complete(job, status=500, body=json.dumps({"error": {"message": f"{canary} engine"}}))
    await failed
    dying = lab.ask(model, f"{canary} prompt", stream=True)
    await worker.job()
    worker.die()
    second = await lab.worker(model)
    await second.stream(await second.job(), [f"{canary} answer"])
    await dying
    await lab.post(f'{{"model": "{canary}", "messages": "{canary}"}}'.encode())
    await lab.post(f"{{{canary}".encode())
    await call("POST", f"{lab.gateway.url}{CHAT}?q={canary}", headers={"authorization": f"Bearer {canary}"}, body=b"{}")
    await lab.final(model, 4)
    stack = lab.stack
    secrets_of_ours = [stack.ready.api_key, stack.ready.worker_secret, stack.ready.admin_token, lab.secret]
    await asyncio.to_thread(scan, lab, canary, [text.rsplit("_", 1)[1] for text in secrets_of_ours])


def list_files(folder: Path) -> list[Path]:
    """Return all files below a folder of servers that are at work: what goes away meanwhile is passed over."""
    return [Path(where, name) for where, _, names in os.walk(folder) for name in names if Path(where, name).is_file()]


def scan(lab: Lab, canary: str, credentials: list[str]) -> None:
    """Look for the canary and for credentials in the database, in Valkey and in every file of the stack."""
    found = []
    printed = lab.stack.ready.api_key.rsplit("_", 1)[1]
    with psycopg.connect(lab.stack.ready.database_url) as database:
        tables = database.execute("SELECT schemaname, tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        for schema, table in tables:
            query = sql.SQL("SELECT t::text FROM {} AS t").format(sql.Identifier(schema, table))
            for (row,) in database.execute(query):
                # Bytes are shown as hexadecimal digits.
                found += [
                    f"{table}: {row[:300]}" for text in [canary, *credentials] if text in row or text.encode().hex() in row
                ]
    server = redis.Redis.from_url(lab.stack.ready.redis_url)
    for key in server.scan_iter():
        dump: Any = server.dump(key) or b""
        found += [f"valkey {key!r}" for text in [canary, *credentials] if text.encode() in dump]
    server.close()
    for path in list_files(lab.stack.directory):
        if path.name == "ready.json":
            continue
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue  # a server's own passing file
        found += [f"file {path.name}" for text in [canary] if text.encode() in content]
        if path.suffix == ".log":
            # The launcher's own output, which is the operator's terminal, shows the demo key once.
            shown = {printed} if path.name == "up.log" else set()
            found += [f"credential in {path.name}" for text in {*credentials} - shown if text.encode() in content]
    assert not found, found
