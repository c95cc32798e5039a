"""What a client sees of the running gateway that no test in one process can show: sizes, delays, pages, and what is left."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import time
from pathlib import Path
from typing import Any  # what the redis client returns depends on its mode

import psycopg
import redis
from psycopg import sql

from tests.fakes.http_client import call
from tests.fakes.lab import CHAT, Lab, chat_body
from tests.fakes.scripted_box import delta_text
from tests.fakes.waiting import eventually
from tests.rings.contract.conftest import PAGE


async def test_each_chunk_reaches_the_client_at_once_and_is_not_held_for_the_next(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    exchange = await lab.open(model)
    job = await worker.job()
    delays: list[float] = []

    async def is_prompt() -> bool:
        """Return whether a fifth of the next pieces took less than what waiting for the next one would cost each of them.

        Nagle with delayed acknowledgements would show as 40 ms on every piece but the first, a busy machine on some.
        """
        delays.clear()
        for number in range(20):
            text = f"piece {number};"
            exchange.body.clear()
            started = time.perf_counter()
            await worker.chunk(job, delta_text(job, text))
            await exchange.until(text.encode())
            delays.append(time.perf_counter() - started)
        return statistics.quantiles(delays, n=5)[0] < 0.030

    await eventually(is_prompt, what="pieces arrive at once")
    await worker.stream(job, [])
    assert (await exchange.finish()).whole


async def test_a_body_of_20_mb_arrives_whole(lab: Lab) -> None:
    model = await lab.model(max_prompt_chars=30_000_000)
    worker = await lab.worker(model)
    image = "data:image/png;base64," + "QUJD" * (5 * 1024 * 1024)
    content = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": image}}]
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": content}]}).encode()
    reply = lab.spawn(lab.post(body, within_s=90))
    job = await worker.job(within_s=60)
    assert job.frame["body"].encode() == body
    await worker.answer(job)
    assert (await reply).status == 200


# pages

ASKING = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


async def test_a_page_that_is_let_in_may_ask_and_reads_answers_streams_and_errors(lab: Lab) -> None:
    for path in (CHAT, "/v1/models", "/v1/responses/resp_1"):
        reply = await call("OPTIONS", lab.gateway.url + path, headers={**ASKING, "origin": PAGE})
        assert (reply.status, reply.body, reply.headers["vary"]) == (204, b"", "Origin")
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "POST" in reply.headers["access-control-allow-methods"]
        reply = await call("GET", lab.gateway.url + path, headers={"origin": PAGE})
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert reply.headers["access-control-expose-headers"] == "*"
        assert "access-control-allow-credentials" not in reply.headers
    model = await lab.model()
    box = await lab.box(model)
    asked = lab.spawn(lab.post(chat_body(model, stream=True), headers=lab.headers({"origin": "http://localhost:3000"})))
    stream = await box.stream()
    await box.head(stream, content_type="text/event-stream", headers={"access-control-allow-origin": "*"})
    await box.data(stream, b"data: [DONE]\n\n")
    await box.end(stream)
    assert (await asked).headers["access-control-allow-origin"] == "http://localhost:3000"
    refused = await lab.post(b"{", headers=lab.headers({"origin": PAGE}))
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (400, PAGE)


async def test_other_pages_and_what_is_not_for_clients_are_not_let_in(lab: Lab) -> None:
    for origin in ("https://evil.example", "null", PAGE + ".evil.example"):
        for method in ("OPTIONS", "GET"):
            reply = await call(method, lab.gateway.url + CHAT, headers=ASKING | {"origin": origin})
            assert "access-control-allow-origin" not in reply.headers
    for path in ("/metrics", "/admin/keys", "/health"):
        reply = await call("GET", lab.gateway.url + path, headers={"origin": PAGE})
        assert "access-control-allow-origin" not in reply.headers


# what is left


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


AUDIO = "/v1/audio/transcriptions"

# muster v1


async def test_a_recording_larger_than_a_json_body_may_be_travels_byte_for_byte(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model, endpoints=(AUDIO,))
    head = '--edge\r\nContent-Disposition: form-data; name="'
    sound = os.urandom(40 * 1024 * 1024)
    body = (
        f'{head}file"; filename="a.wav"\r\n\r\n'.encode() + sound + f'\r\n{head}model"\r\n\r\n{model}\r\n--edge--\r\n'.encode()
    )
    kind = {"content-type": "multipart/form-data; boundary=edge"}
    reply = lab.spawn(lab.post(body, path=AUDIO, headers=lab.headers(kind), within_s=90))
    stream = await box.stream(within_s=60)
    assert bytes(stream.body) == body
    assert (stream.meta.model, stream.meta.path, stream.meta.is_streaming) == (model, AUDIO, False)
    await box.head(stream, content_type="text/plain; charset=utf-8")
    await box.data(stream, "Grüß Gott.\n".encode())
    await box.end(stream)
    got = await reply
    assert (got.status, got.body.decode()) == (200, "Grüß Gott.\n")
    (record,) = await lab.final(model)
    assert (record["endpoint"], record["prompt_tokens_est"], record["status"]) == (AUDIO, 0, "completed")
