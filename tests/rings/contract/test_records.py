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
