"""A whole installation with a GPU node at L2, and three people whose keys lie here: everything goes over its public doors."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar  # Any: JSON

import httpx
import psutil
import psycopg
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from benchmarks.errors import BenchmarkError
from controlplane.launcher.installation import read_variables
from controlplane.launcher.processes import Command, spawn
from wire.optoken.approval import decode_bytes, encode_bytes, read_statement

ROOT = Path(__file__).resolve().parents[2]
MODEL = "muster-tiny-f16"
ASKERS = 4
GENEROUS = {"MUSTER_OPS_PER_HOUR": "1000"}
"""The node otherwise begins 60 operations an hour, which the kills use up."""
READY_S, CALL_S, STOP_S = 150.0, 60.0, 60.0
PORTS = range(16_000, 20_000)
FINAL = {"succeeded", "failed", "resolved", "skipped"}
PARTS = {
    "web": "controlplane.serve_control",
    "worker": "controlplane.serve_worker",
    "gateway": "controlplane.serve_gateway",
    "runner": "-m runner",
    "valkey": "valkey-server",
    "postgres": "bin/postgres",
}
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Person:
    """An approver with a key file and an admin token. ``key_id``: of the ApproverKey row."""

    name: str
    key: Ed25519PrivateKey = field(repr=False)
    key_id: int
    token: str = field(repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """By which the person brings a proof."""
        return {"authorization": f"Bearer {self.token}"}

    def sign(self, statement_b64: str) -> dict[str, str]:
        """Return the proof over a statement that was decoded here."""
        signature = encode_bytes(self.key.sign(read_statement(decode_bytes(statement_b64)).digest))
        return {"type": "ed25519", "approver": self.name, "keyid": _keyid(self.key), "signature": signature}


@dataclass
class Fleet:
    """The running installation. ``ready``: what its ready file says; ``people``: once ``enrol`` was called."""

    directory: Path
    process: subprocess.Popen[bytes]
    ready: dict[str, Any]
    client: httpx.Client
    people: list[Person] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)

    @property
    def data(self) -> Path:
        """The folder of the installation."""
        return self.directory / "data"

    def close(self) -> None:
        """Close what this process holds of it."""
        self.client.close()

    # Doors

    def call(
        self,
        method: str,
        path: str,
        body: object | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the JSON of a REST call. Raises BenchmarkError when the status is none of 2xx."""
        reply = self.client.request(method, path, json=body, headers=headers)
        if reply.status_code >= 300:
            raise BenchmarkError(f"{method} {path}: {reply.status_code} {reply.text[:300]}")
        return reply.json() if reply.content else {}

    def call_patiently(
        self,
        method: str,
        path: str,
        body: object | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return what ``call`` returns, as soon as the installation answers again. 4xx is an answer."""

        def attempt() -> Any:
            try:
                reply = self.client.request(method, path, json=body, headers=headers)
            except httpx.HTTPError:
                return None
            return None if reply.status_code >= 500 else (reply.json() if reply.content else {})

        return self.wait(attempt, within_s=CALL_S, what=f"{method} {path} is answered")

    def muster(self, *words: str) -> str:
        """Return what a ``./muster`` command printed. Raises BenchmarkError."""
        done = subprocess.run(
            [sys.executable, str(ROOT / "muster"), *words], cwd=ROOT, env=_clean_environment(), capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        if done.returncode:
            raise BenchmarkError(f"./muster {' '.join(words[:3])}: {done.stderr[-500:] or done.stdout[-500:]}")
        return done.stdout

    def backstage(self, module: str, given: str = "") -> str:
        """Return what a program of ours printed in the environment of the control plane. Raises BenchmarkError."""
        environment = {**_clean_environment(), **GENEROUS, **read_variables(self.data)}
        done = subprocess.run(
            [sys.executable, "-m", module], cwd=ROOT, env=environment, input=given, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip
        if done.returncode:
            raise BenchmarkError(f"{module}: {done.stderr[-1500:]}")
        return done.stdout

    def query(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        """Return rows of the installation's database."""
        with psycopg.connect(self.ready["database_url"], autocommit=True) as connection:
            return connection.execute(text.encode(), values).fetchall()

    def chat(self, model: str) -> httpx.Response:
        """Ask a model through the gateway."""
        body = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "Once upon a time"}]}
        headers = {"authorization": f"Bearer {self.ready['api_key']}"}
        return httpx.post(f"{self.ready['gateway_url']}/v1/chat/completions", json=body, headers=headers, timeout=CALL_S)

    # Ceremony

    def enrol(self, *names: str) -> None:
        """Make people with key files, have two of them sign the first policy, and let the node trust it."""
        self.muster("demo", "governance", "--data", str(self.data), "--json")
        keys = {name: Ed25519PrivateKey.generate() for name in names or ("ana", "ben", "cleo")}
        public = {
            name: encode_bytes(key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
            for name, key in keys.items()
        }
        # One token may ask for 60 operations an hour; while there is no policy, more of them can be made.
        wanted = {"people": {name: f"ed25519 {line} {name}" for name, line in public.items()}, "tokens": ASKERS}
        made = json.loads(self.backstage("benchmarks.govcheck.enrolment", json.dumps(wanted)))
        self.tokens = made["tokens"]
        for name, key in keys.items():
            ((key_id,),) = self.query("SELECT id FROM governance_approverkey WHERE keyid = %s", _keyid(key))
            self.people.append(Person(name, key, key_id, made["of"][name]))
        approvers = [{"username": person.name, "key_ids": [person.key_id]} for person in self.people]
        draft = self.call("POST", "/api/v1/policy/drafts", {"approvers": approvers, "reason": "the first policy"})
        self.approve(draft, self.people[:2])
        self.await_runs(draft["op_id"])
        self.muster("trust", self.call("GET", "/api/v1/policy")["words"], "--data", str(self.data))
        self.wait(lambda: self.pinned_version() == 1, within_s=30, what="the node pinned the policy")

    def pinned_version(self) -> int:
        """Return which policy the node has pinned, as the control plane knows."""
        return int(self.query("SELECT max(policy_version) FROM nodes_node")[0][0] or 0)

    def ledger(self, op_id: str) -> list[tuple[int, str | None]]:
        """Return how often the node began each use of an approval, and the outcome it wrote down."""
        path = self.data / "node" / "ledger.sqlite3"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as ledger:
            return ledger.execute("SELECT 1, outcome FROM operations WHERE op_key LIKE ?", (f"{op_id}%",)).fetchall()

    def is_loaded(self, model: str) -> bool:
        """Return whether the node has the model loaded, as the control plane was told last."""
        rows = self.query("SELECT replicas FROM nodes_nodepresence p JOIN nodes_node n ON n.id=p.node_id WHERE n.name='local'")
        return any(replica["model"] == model and replica["state"] == "loaded" for replica in rows[0][0])

    @property
    def runner_id(self) -> str:
        """The target that stands for the node."""
        return str(self.query("SELECT runner_id FROM nodes_node WHERE name = 'local'")[0][0])

    def propose(self, operation: str, *, begins_in_s: float = 0.0, **params: Any) -> dict[str, Any]:
        """Ask for an operation on the node; its window may open later."""
        body: dict[str, object] = {"operation": operation, "targets": [self.runner_id], "params": params, "reason": "a check"}
        if begins_in_s:
            body["not_before"] = (datetime.now(UTC) + timedelta(seconds=begins_in_s)).isoformat()
        self.tokens.append(self.tokens.pop(0))
        reply = self.client.post("/api/v1/operations", json=body, headers={"authorization": f"Bearer {self.tokens[0]}"})
        if reply.status_code >= 300:
            raise BenchmarkError(f"{operation} cannot be asked for: {reply.text[:300]}")
        return dict(reply.json())

    def approve(self, operation: Mapping[str, Any], people: list[Person] | None = None) -> None:
        """Have people sign, the first two unless told otherwise."""
        for person in self.people[:2] if people is None else people:
            self.approve_as(operation, person)

    def approve_as(self, operation: Mapping[str, Any], person: Person) -> dict[str, Any]:
        """Have one person sign. Raises BenchmarkError when that is refused."""
        proof = person.sign(operation["statement_b64"])
        path = f"/api/v1/operations/{operation['op_id']}/approvals"
        return dict(self.call("POST", path, {"proof": proof}, headers=person.headers))

    def approve_patiently(self, operation: Mapping[str, Any], person: Person) -> None:
        """Have one person sign, however often it takes: one that was kept before its answer was lost is refused later."""
        proof = person.sign(operation["statement_b64"])
        path = f"/api/v1/operations/{operation['op_id']}/approvals"
        answer = self.call_patiently("POST", path, {"proof": proof}, headers=person.headers)
        rule = answer.get("error", {}).get("rule")
        if "error" in answer and rule != "duplicate_proof" and answer["error"]["code"] != "STATE_CHANGED":
            raise BenchmarkError(f"an approval was refused: {answer['error']}")

    def run(self, operation: str, *, within_s: float = 60.0, **params: Any) -> list[dict[str, Any]]:
        """Ask for an operation, approve it and return its runs when they have ended."""
        asked = self.propose(operation, **params)
        self.approve(asked)
        return self.await_runs(asked["op_id"], within_s=within_s)

    def await_runs(self, op_id: str, *, within_s: float = 60.0) -> list[dict[str, Any]]:
        """Return the runs of an operation when all of them have ended."""

        def ended() -> list[dict[str, Any]] | None:
            found = self.call_patiently("GET", f"/api/v1/operations/{op_id}")
            runs = found.get("runs", [])
            return runs if runs and all(run["state"] in FINAL for run in runs) else None

        return self.wait(ended, within_s=within_s, what=f"the runs of {op_id} ended")

    # Processes

    def part(self, name: str) -> psutil.Process | None:
        """Return the process of a part, the one running now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if child.status() != psutil.STATUS_ZOMBIE and PARTS[name] in " ".join(child.cmdline()):
                        return child
        return None

    def wait(self, look: Callable[[], Found | None], *, within_s: float, what: str) -> Found:
        """Return the first true answer of ``look``. Raises BenchmarkError after ``within_s``."""
        give_up_at = time.monotonic() + within_s
        pause_s = 0.05
        while True:
            try:
                found = look()
            except psycopg.OperationalError:
                found = None
            if found:
                return found
            if time.monotonic() > give_up_at:
                raise BenchmarkError(f"after {within_s:g} s still not: {what}")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, 0.25)  # asking costs the installation as much as working


@contextlib.contextmanager
def open_fleet(directory: Path | None = None) -> Iterator[Fleet]:
    """Run ``./muster up`` with its local node in a folder of its own. Raises BenchmarkError when it does not come up."""
    with tempfile.TemporaryDirectory(prefix="muster-govcheck-", ignore_cleanup_errors=True) as scratch:
        place = directory or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o755)  # as root PostgreSQL runs as another user
        ready_file = place / "ready.json"
        command = [sys.executable, str(ROOT / "muster"), "up", "--data", str(place / "data"), "--ready-file", str(ready_file)]
        port, gateway_port = _find_ports(2)
        command += ["--port", str(port), "--gateway-port", str(gateway_port)]
        # It is told to stop also when this process dies without a chance to say so (Linux).
        started = Command(argv=command, env={**_clean_environment(), **GENEROUS}, cwd=ROOT, death_signal=signal.SIGTERM)
        with (place / "up.log").open("ab") as log:
            process = spawn(started, log)
        try:
            with contextlib.closing(_await_ready(place, process, ready_file)) as fleet:
                yield fleet
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)


def _await_ready(place: Path, process: subprocess.Popen[bytes], ready_file: Path) -> Fleet:
    give_up_at = time.monotonic() + READY_S
    while not ready_file.exists():
        if process.poll() is not None or time.monotonic() > give_up_at:
            raise BenchmarkError(f"./muster up did not come up:\n{(place / 'up.log').read_text()[-2000:]}")
        time.sleep(0.1)
    ready = json.loads(ready_file.read_text())
    headers = {"authorization": f"Bearer {ready['admin_token']}"}
    return Fleet(place, process, ready, httpx.Client(base_url=ready["control_url"], headers=headers, timeout=CALL_S))


def _clean_environment() -> dict[str, str]:
    """Return the environment without what would lead a command to another installation."""
    left_out = ("MUSTER_", "DJANGO_", "DATABASE_URL", "REDIS_URL")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)}


def _keyid(key: Ed25519PrivateKey) -> str:
    spki = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()[:32]


def _find_ports(count: int) -> list[int]:
    """Return ports that nothing listens on, of those that no connection, and nobody who binds port 0, gets by chance."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise BenchmarkError(f"fewer than {count} ports of {PORTS} are free")
