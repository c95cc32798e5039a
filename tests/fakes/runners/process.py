"""The real runner as a process: dialling a gateway, or on its own with its HTTP port; and looks at processes."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psutil

from runner.__main__ import main
from runner.app import Runner
from runner.config import TINY_MODEL_PATH
from runner.ledger import ledger
from runner.limits import install, limits
from tests.fakes.scripted_gateway import TOKEN
from tests.fakes.waiting import DEADLINE_S, eventually, wait_until
from wire.optoken.op_token import Grant, sign_l0
from wire.optoken.verifier import Operation

ROOT = Path(__file__).resolve().parents[3]
PATIENT = "tests.fakes.runners.process"
"""The runner for tests of what its first registration says of its models."""


class RunningBox:
    """A runner process and what it logged."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children()
        except psutil.NoSuchProcess:
            return []

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    async def exit_status(self) -> int:
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)


@asynccontextmanager
async def run_box(
    tmp_path: Path, gateway: str, *options: str, env: dict[str, str] | None = None, program: str = "runner"
) -> AsyncIterator[RunningBox]:
    """Start ``python -m runner`` against a gateway; kill it at the end if the test has not stopped it."""
    log = tmp_path / f"runner-{time.monotonic_ns()}.log"
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    surroundings |= {"MUSTER_TOKEN": TOKEN, "MUSTER_RECONNECT_MAX_S": "0.5", "PYTHONPATH": str(ROOT)} | (env or {})
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", "-m", program, "--gateway", gateway, "--name", "box-under-test", *options,
            env=surroundings, stdout=sink, stderr=sink,
        )  # fmt: skip
    box = RunningBox(process, log)
    try:
        yield box
    finally:
        children = box.children()
        if process.returncode is None:
            process.kill()
        await process.wait()
        await eventually(lambda: not any(is_alive(child) for child in children), "the engine process is gone")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


NO_KEEP_ALIVE = httpx.Limits(max_keepalive_connections=0)
_READY = re.compile(r"^api listening url=(http://\S+)$", re.MULTILINE)
_STRIPPED = (
    "MUSTER_", "TENANT_", "DEFAULT_RATE", "MAX_QUEUE", "QUEUE_TIMEOUT", "METRICS_", "LLM_POOL_", "HF_", "OP_TOKEN_",
    "VERIFIED_OP_",
)  # fmt: skip


@dataclass
class ApiBox:
    """The process, its address, and the key of its operation tokens."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    key: bytes
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        # A connection for each request: of one that was idle nobody knows whether the node closes it at this moment.
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False, limits=NO_KEEP_ALIVE)

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def token(self, operation: Operation, model: str | None, *, signers: tuple[str, ...] = ("ann", "bob")) -> dict[str, object]:
        grant = Grant(operation, model, signers, secrets.token_hex(16), int(time.time()))
        return sign_l0(self.key, grant)

    def load(self, model: str, **fields: object) -> httpx.Response:
        token = self.token(Operation.MODEL_LOAD, model)
        return self.client.post("/v1/models/load", json={"modelId": model, "verifiedOpToken": token, **fields})

    def unload(self, model: str, **fields: object) -> httpx.Response:
        token = self.token(Operation.MODEL_UNLOAD, model)
        return self.client.post("/v1/models/unload", json={"modelId": model, "verifiedOpToken": token, **fields})

    def flush(self, scope: str, *, model: str | None = None, **fields: object) -> httpx.Response:
        token = self.token(Operation.CACHE_FLUSH, model)
        body = {"scope": scope, "modelId": model, "verifiedOpToken": token, **fields}
        return self.client.post("/v1/cache/flush", json=body)

    def finish_load(self, reply: httpx.Response) -> dict[str, object]:
        assert reply.status_code in {200, 202}, reply.text
        task_id = reply.json()["taskId"]
        return self.wait_for(
            lambda: self.client.get(f"/v1/models/load/{task_id}").json(), lambda task: task["status"] != "loading"
        )

    def ensure_loaded(self, model: str) -> None:
        assert self.finish_load(self.load(model))["status"] == "completed"

    def ensure_unloaded(self, model: str) -> None:
        assert self.unload(model).status_code == 200

    def wait_for(
        self, read: Callable[[], dict[str, object]], holds: Callable[[dict[str, object]], object]
    ) -> dict[str, object]:
        seen: list[dict[str, object]] = []

        def look() -> object:
            seen.append(read())
            return holds(seen[-1])

        wait_until(look, "the answer is as it should be")
        return seen[-1]


@contextmanager
def run_api_box(
    folder: Path, *options: str, env: Mapping[str, str] | None = None, models: tuple[str, ...] = (), has_op_key: bool = True,
    waits: bool = True, program: str = "runner",
) -> Iterator[ApiBox]:  # fmt: skip
    """Start ``python -m runner --standalone`` and yield it once it serves, or, not ``waits``, once its port answers.

    It is killed at the end if it has not stopped by then.
    """
    base = folder / "models"
    base.mkdir(parents=True, exist_ok=True)
    for name in models:
        place = base / f"{name}.gguf"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(TINY_MODEL_PATH, place)
    key = secrets.token_hex(32).encode()
    key_path = folder / "model-api.key"
    key_path.touch(mode=0o600)
    key_path.write_bytes(key + b"\n")
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith(_STRIPPED)}
    surroundings |= {"PYTHONPATH": str(ROOT), "MODEL_BASE_PATH": str(base)}
    if has_op_key:
        surroundings["VERIFIED_OP_TOKEN_KEY_PATH"] = str(key_path)
    surroundings |= env or {}
    log = folder / f"box-{time.monotonic_ns()}.log"
    command = [sys.executable, "-W", "error", "-m", program, "--standalone", "--api-port", "0", "--data", str(folder / "data")]
    with log.open("wb") as sink:
        process = subprocess.Popen([*command, "--threads", "1", *options], env=surroundings, stdout=sink, stderr=sink)
    try:
        box = ApiBox(process, log, _wait_ready(process, log), key)
        with box.client:
            if waits:
                wait_serving(box)
            yield box
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@asynccontextmanager
async def open_api_box(folder: Path, *options: str, env: Mapping[str, str] | None = None) -> AsyncIterator[ApiBox]:
    """Do the same without holding up the event loop, on which the test's own servers run."""
    context = run_api_box(folder, *options, env=env)
    box = await asyncio.to_thread(context.__enter__)
    try:
        yield box
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def wait_serving(box: ApiBox) -> None:
    """Return when the node has started; it may be unwell."""
    headers = {"Authorization": "Bearer x"}
    box.wait_for(
        lambda: box.client.get("/health", headers=headers).json(), lambda health: "the node is starting" not in str(health)
    )


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    def find_url() -> str | None:
        has_ended = process.poll() is not None  # asked before its log is read, which then holds its last words
        text = log.read_text(encoding="utf-8")
        found = _READY.search(text)
        assert found or not has_ended, f"the runner ended with {process.returncode}:\n{text}"
        return found[1] if found else None

    return wait_until(find_url, "the runner listens")


SETTLE_S = 30.0
WRITES: dict[str, tuple[ModuleType, str]] = {
    "booking": (ledger, "begin_op"), "task": (ledger, "start_load"), "outcome": (ledger, "finish_op"),
}  # fmt: skip


def hold_start(until: Path) -> None:
    """Have every node of this process wait for ``until`` before it looks whether its first models have settled."""
    wait_settled = Runner._wait_settled

    async def wait_held(box: Runner) -> None:
        await eventually(until.exists)
        await wait_settled(box)

    Runner._wait_settled = wait_held  # type: ignore[method-assign,assignment]  # between an open port and serving


def _has_approval(write: str, db: sqlite3.Connection, run: object, *_: object, run_id: int | None = None, **__: object) -> bool:
    """Whether a write is about an operation; loads of the runner's own are written down alike."""
    wanted = run_id if write == "task" else run
    found = db.execute("SELECT 1 FROM operations WHERE id = ? AND (op_key IS NOT NULL OR ?)", (wanted, write == "booking"))
    return found.fetchone() is not None


def die_at(point: str) -> None:
    """Have the process killed at ``before booking``, ``after task`` and the like."""
    moment, _, write = point.partition(" ")
    module, name = WRITES[write]
    real: Callable[..., object] = getattr(module, name)

    def deadly(*arguments: Any, **named: Any) -> object:
        if not _has_approval(write, *arguments, **named):
            return real(*arguments, **named)
        if moment == "after":
            real(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(module, name, deadly)


if __name__ == "__main__":
    if "HELD_UNTIL" in os.environ:
        hold_start(Path(os.environ["HELD_UNTIL"]))
    elif "DIE_AT" in os.environ:
        die_at(os.environ["DIE_AT"])
    else:
        install(replace(limits(), connection=replace(limits().connection, settle_s=SETTLE_S)))
    sys.exit(main())
