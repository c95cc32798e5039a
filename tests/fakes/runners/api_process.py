"""A real runner with its own HTTP port, and tokens for it."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from runner.config.reading import TINY_MODEL_PATH
from tests.fakes.runners.process import ROOT
from wire.optoken import Grant, Operation, sign_l0

DEADLINE_S = 30.0
NO_KEEP_ALIVE = httpx.Limits(max_keepalive_connections=0)
_READY = re.compile(r"^api listening url=(http://\S+)$", re.MULTILINE)
_STRIPPED = (
    "MUSTER_",
    "TENANT_",
    "DEFAULT_RATE",
    "MAX_QUEUE",
    "QUEUE_TIMEOUT",
    "METRICS_",
    "LLM_POOL_",
    "HF_",
    "OP_TOKEN_",
    "VERIFIED_OP_",
)


@dataclass
class ApiBox:
    """The process, its address, and the key of its operation tokens."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    key: bytes
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        # A connection for each request: of one that was idle nobody knows whether the box closes it at this moment.
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False, limits=NO_KEEP_ALIVE)

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def token(self, operation: Operation, model: str | None, *, signers: tuple[str, ...] = ("ann", "bob")) -> dict[str, object]:
        """Return a fresh token of level L0."""
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
        """Poll a load until it has ended and return its task."""
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
        """Return what ``read`` gives as soon as ``holds`` says so."""
        give_up_at = time.monotonic() + DEADLINE_S
        while not holds(found := read()):
            assert time.monotonic() < give_up_at, f"not within {DEADLINE_S} s; last seen: {found}"
            time.sleep(0.01)
        return found


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
async def open_api_box(
    folder: Path, *options: str, env: Mapping[str, str] | None = None, models: tuple[str, ...] = ()
) -> AsyncIterator[ApiBox]:
    """Do the same without holding up the event loop, on which the test's own servers run."""
    context = run_api_box(folder, *options, env=env, models=models)
    box = await asyncio.to_thread(context.__enter__)
    try:
        yield box
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def wait_serving(box: ApiBox) -> None:
    """Return when the box has started; it may be unwell."""
    headers = {"Authorization": "Bearer x"}
    box.wait_for(
        lambda: box.client.get("/health", headers=headers).json(), lambda health: "the box is starting" not in str(health)
    )


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    give_up_at = time.monotonic() + DEADLINE_S
    while True:
        has_ended = process.poll() is not None  # asked before its log is read, which then holds its last words
        text = log.read_text(encoding="utf-8")
        if found := _READY.search(text):
            return found[1]
        assert not has_ended, f"the runner ended with {process.returncode}:\n{text}"
        assert time.monotonic() < give_up_at, f"the runner does not listen:\n{text}"
        time.sleep(0.01)
