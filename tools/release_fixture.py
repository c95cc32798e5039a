"""Makes what tests keep of a release: a backup of a database with rows in every table, frames of its nodes, a node's folder.

    .venv/bin/python -m tools.release_fixture CHECKOUT OUT

CHECKOUT is a tree of that release (``git archive TAG | tar -x``) with a ``.venv`` that has what it needs. It is started with
the demo's fleet; a node of its own and the demo's are connected through a recorder, asked, and given an approved operation.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from wire import clock

PASSPHRASE = "a passphrase of the tests"  # noqa: S105  # it protects nothing
CONTROL, GATEWAY, RECORDER = 18_611, 18_612, 18_613
_KEPT = "muster-release-fixture"
# How many frames of one kind and direction each link keeps: heartbeats repeat themselves.
_MOST_ALIKE, _START_S, _PLAY_S = 12, 90.0, 45.0

_MUSTER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import controlplane.launcher.environment as environment
environment.enter = lambda *words: None
from controlplane.launcher.cli import main
sys.exit(main(sys.argv[1:]))
"""
_PLAY = """
import sys, json, pathlib
import django; django.setup()
from controlplane.demo.scene import find_scene, play
data, gateway = pathlib.Path(sys.argv[1]), sys.argv[2]
play(find_scene(data), gateway=gateway, per_minute=60, nodes=0, on_ready=lambda: print("plays", flush=True))
"""
_CHOOSE = """
import django; django.setup()
from django.apps import apps
from wire.ids import format_id
found = apps.get_model("governance", "Operation").objects.filter(state="pending", operation__in=["model-load", "model-unload"])
print([format_id("op", one.pk) for one in found])
"""
_FILL = """
import django; django.setup()
import datetime, decimal, uuid
from django.apps import apps
from django.db import connection, models, transaction

def value(field, n):
    if field.choices: return field.choices[0][0]
    if isinstance(field, models.BooleanField): return False
    if isinstance(field, (models.IntegerField, models.FloatField, models.DurationField)): return n
    if isinstance(field, models.DecimalField): return decimal.Decimal(n)
    if isinstance(field, models.DateTimeField): return datetime.datetime(2026, 11, 28, 12, 0, n, tzinfo=datetime.timezone.utc)
    if isinstance(field, models.DateField): return datetime.date(2026, 11, 28)
    if isinstance(field, models.UUIDField): return uuid.uuid5(uuid.NAMESPACE_DNS, f"{field.name}{n}")
    if isinstance(field, models.BinaryField): return bytes([n]) * 32
    if isinstance(field, models.JSONField): return {}
    if isinstance(field, models.GenericIPAddressField): return "127.0.0.1"
    if type(field).__name__ == "ArrayField": return []
    return f"fixture{n}"[: field.max_length or 40]

left = []
for model in apps.get_models():
    if model._meta.model_name in ("witnessstatement", "auditpending"): continue  # signed, or of a transaction that runs
    if not model._meta.managed or model.objects.exists(): continue
    row = model()
    for field in model._meta.concrete_fields:
        if isinstance(field, models.ForeignKey):
            if not field.null:
                target = field.related_model.objects.values_list(field.target_field.attname, flat=True)
                setattr(row, field.attname, target.first())
        elif not isinstance(field, models.AutoField) and field.default is models.NOT_PROVIDED and not field.null:
            setattr(row, field.attname, value(field, 7))
    try:
        with transaction.atomic():
            models.Model.save_base(row, raw=True, force_insert=True)
    except Exception as error:
        left.append(f"{model._meta.db_table}: {error}".splitlines()[0])
with connection.cursor() as cursor:
    for table in ("gpuminute", "gpusample", "gputenminutes"):
        cursor.execute(f"DELETE FROM nodes_{table} WHERE ctid NOT IN (SELECT ctid FROM nodes_{table} LIMIT 50)")
print("left empty:", left)
"""
_LEDGER = """
import asyncio, pathlib, sys
from runner.ledger.ledger import Ledger
from tests.fakes.ledgers import Clock, begin_op, end_op, opened

async def fill(folder):
    async with opened(folder, Clock()) as ledger:
        now = Clock().now
        same = {"expires_at": now + 60, "operation": "model-load"}
        await begin_op(ledger, "op_done", slot="load:tiny", fence=5, model_id="tiny", **same)
        await end_op(ledger, "op_done", {"state": "succeeded"})
        await begin_op(ledger, "op_open", slot="load:big", fence=6, model_id="big", **same)
        await ledger.write_fact("fixture", sys.argv[2])
        await ledger.spend_ticket("ticket-1", expires_at=now + 60, report="{}")

asyncio.run(fill(pathlib.Path(sys.argv[1])))
"""


class Recorder:
    """Stands between nodes and a gateway and keeps what each side says, by link."""

    def __init__(self, gateway: str) -> None:
        self.gateway = gateway
        self.frames: list[dict[str, Any]] = []
        self._links = 0
        self._alike: Counter[tuple[int, str, str]] = Counter()

    async def run(self) -> None:
        async with serve(self._relay, "127.0.0.1", RECORDER, max_size=None, compression=None):
            await asyncio.Future()

    async def _relay(self, node: ServerConnection) -> None:
        self._links += 1
        link, request = self._links, node.request
        assert request is not None
        own = {"host", "connection", "upgrade", "sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions"}
        headers = [(name, text) for name, text in request.headers.raw_items() if name.lower() not in own]
        async with connect(self.gateway + request.path, additional_headers=headers, max_size=None, compression=None) as server:
            passing = [self._pass(node, server, link, "node"), self._pass(server, node, link, "server")]
            await asyncio.wait([asyncio.ensure_future(one) for one in passing], return_when=asyncio.FIRST_COMPLETED)

    async def _pass(self, source: Any, target: Any, link: int, side: str) -> None:
        try:
            async for message in source:
                self._keep(link, side, message)
                await target.send(message)
        except ConnectionClosed:
            return

    def _keep(self, link: int, side: str, message: str | bytes) -> None:
        frame = {"link": link, "from": side}
        if isinstance(message, str):
            kind = str(json.loads(message).get("type"))
            frame |= {"text": message}
        else:
            kind = "binary"
            frame |= {"data": base64.b64encode(message).decode()}
        self._alike[link, side, kind] += 1
        # Whole streams are needed: only reports are left out.
        if kind == "binary" or self._alike[link, side, kind] <= _MOST_ALIKE:
            self.frames.append(frame)


class Release:
    """A checkout that runs."""

    def __init__(self, checkout: Path, data: Path) -> None:
        self.checkout, self.data = checkout, data
        self.python = str(checkout / ".venv" / "bin" / "python")
        foreign = ("MUSTER_", "DATABASE_URL", "REDIS_URL")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
        self.environment = {**kept, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([self.python, *words], cwd=self.checkout, env={**self.environment, **variables})
        self.running.append(process)
        return process

    def run(self, program: str, *words: str, **variables: str) -> str:
        command = [self.python, "-c", program, *words]
        environment = {**self.environment, **variables}
        return subprocess.run(command, cwd=self.checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout

    @property
    def told(self) -> dict[str, Any]:
        return dict(json.loads((self.data / "run" / "installation.json").read_text()))

    def up(self) -> None:
        ports = ["--port", str(CONTROL), "--gateway-port", str(GATEWAY)]
        self.start("-c", _MUSTER, str(self.checkout), "up", "--data", str(self.data), "--no-node", *ports,
                   MUSTER_DIRECT_HOSTS="node.example.com")  # fmt: skip
        until = clock.monotonic() + _START_S
        while not (self.data / "run" / "installation.json").exists():
            if clock.monotonic() > until:
                raise SystemExit("the release did not start")
            clock.sleep(0.2)

    def stop(self) -> None:
        for process in reversed(self.running):
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def ask(key: str, model: str, *, stream: bool) -> bytes:
    body = {"model": model, "stream": stream, "max_tokens": 12, "messages": [{"role": "user", "content": "Tell me a story."}]}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    url = f"http://127.0.0.1:{GATEWAY}/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        return bytes(answer.read())


def make(checkout: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    # /tmp by name: PostgreSQL's own user has to enter it.
    home = Path(tempfile.mkdtemp(prefix=_KEPT, dir="/tmp"))
    home.chmod(0o755)
    release = Release(checkout, home / "data")
    recorder = Recorder(f"ws://127.0.0.1:{GATEWAY}")
    threading.Thread(target=lambda: asyncio.run(recorder.run()), daemon=True).start()
    try:
        release.up()
        data, variables = str(release.data), {str(k): str(v) for k, v in release.told["environment"].items()}
        release.run(
            _MUSTER, str(checkout), "manage", "--data", data, "demo_fleet", "--data", data, "--week", "120", "--write-only"
        )
        release.run(_MUSTER, str(checkout), "manage", "--data", data, "allow_model", "muster-tiny")
        release.run(_MUSTER, str(checkout), "manage", "--data", data, "ticket_key", "rotate")
        release.run(_MUSTER, str(checkout), "ca", "--data", data, "create")
        tiny = checkout / "runner" / "tiny" / "muster-tiny-q8_0.gguf"
        node = ["-m", "runner", "--engine", "llamacpp", "--name", "recorded", "--gateway", f"http://127.0.0.1:{RECORDER}"]
        node += ["--model-path", str(tiny), "--model-name", "muster-tiny", "--threads", "1", "--data", str(home / "node")]
        runner = release.start(*node, MUSTER_TOKEN=release.told["node_token"])
        release.start("-c", _PLAY, data, f"http://127.0.0.1:{RECORDER}", **variables)
        clock.sleep(10)
        for stream in (True, False, True):
            ask(release.told["api_key"], "muster-tiny", stream=stream)
        operations = json.loads(release.run(_CHOOSE, **variables).replace("'", '"'))
        for operation in operations:
            # One that waits for its second approval cannot be signed so: it goes on waiting.
            with contextlib.suppress(subprocess.CalledProcessError):
                release.run(_MUSTER, str(checkout), "manage", "--data", data, "demo_fleet", "--data", data, "--sign", operation)
        clock.sleep(_PLAY_S)
        runner.send_signal(signal.SIGTERM)
        runner.wait(60)
        clock.sleep(2)
        print(release.run(_FILL, **variables))
        write_frames(out / "frames.jsonl", recorder.frames)
        back_up(release.data, out / "database.zip")
        (out / "node").mkdir(exist_ok=True)
        release.run(_LEDGER, str(out / "node"), out.name)
        (out / "columns.json").write_text(json.dumps(read_columns(release.told["database_url"]), indent=1) + "\n")
        print(len(recorder.frames), "frames;", operations)
    finally:
        release.stop()
        shutil.rmtree(home, ignore_errors=True)


def write_frames(path: Path, frames: list[dict[str, Any]]) -> None:
    """Keep the link of our own runner, and of the demo's nodes the one that was given an operation."""

    def is_kept(link: int) -> bool:
        texts = [frame.get("text", "") for frame in frames if frame["link"] == link]
        return any('"recorded"' in text or "op_execute" in text or '"operation' in text for text in texts)

    links = [link for link in sorted({frame["link"] for frame in frames}) if is_kept(link)][:3]
    kept = [frame for frame in frames if frame["link"] in links]
    path.write_text("".join(f"{json.dumps(frame)}\n" for frame in kept), encoding="utf-8")


def read_columns(url: str) -> dict[str, list[str]]:
    """Return the columns that this release writes of each table: those that the server does not make itself."""
    with psycopg.connect(url) as database:
        rows = database.execute(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public' "
            "AND is_generated = 'NEVER' AND is_identity = 'NO' AND table_name !~ '_p[0-9]{8}$' ORDER BY 1, ordinal_position"
        ).fetchall()
    return {table: [column for each, column in rows if each == table] for table in sorted({row[0] for row in rows})}


def back_up(data: Path, file: Path) -> None:
    file.unlink(missing_ok=True)
    with tempfile.NamedTemporaryFile("w") as passphrase:
        passphrase.write(PASSPHRASE)
        passphrase.flush()
        foreign = ("MUSTER_", "DATABASE_URL", "REDIS_URL")
        environment = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
        command = [sys.executable, "-m", "controlplane.operate", "backup", str(file), "--data", str(data)]
        subprocess.run([*command, "--passphrase-file", passphrase.name], env=environment, check=False)


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
