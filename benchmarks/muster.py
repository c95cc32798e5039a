"""Muster's real processes for a run: control plane, gateway, and nodes that are reached and asked in different ways."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.answers import RESPONSES
from benchmarks.box import MAX_CONCURRENT, Roll
from benchmarks.errors import BenchmarkError
from benchmarks.hotspots import CALLS_SUFFIX, SAMPLES_SUFFIX
from benchmarks.nginx import find_free_port, is_listening
from benchmarks.plan import BOXES, KEYS, MODELS, MUSTER_SYSTEMS, BoxPlan, System, find_path
from benchmarks.processes import ROOT, Child, CorePlan
from benchmarks.storage import Storage
from benchmarks.upstream import Pace

_START_S = 60.0
_ROUTE_S = 30.0
_CALL_S = 20.0  # longer than a gateway holds a request that no node can take
_STEP_S = 180.0
_ASK_AGAIN_S = 0.25
_BOX_S = 15.0
_NODES_S = 300.0
"""So long a thousand nodes may take to enrol, and to come back after a restart."""
_DIRECT_NODE = "bench-direct"
_DIRECT_CONCURRENCY = 1024
_HEARTBEAT_S = 2.0

# Every limit stays switched on and is set beyond what a run reaches.
_SETTINGS = {
    "DJANGO_SETTINGS_MODULE": "controlplane.settings",
    "MUSTER_RATE_LIMIT_RPM": "1000000000",
    "MUSTER_DIRECT_HOSTS": "127.0.0.1",
    "MUSTER_DIRECT_ALLOW_LOOPBACK": "1",
    "MUSTER_LOG_LEVEL": "WARNING",
}


class Heartbeats:
    """Keeps the node that is called over HTTP alive, as its agent would: one REST heartbeat every two seconds."""

    def __init__(self, *, control_url: str, secret: str, node_id: str) -> None:
        self._control_url = control_url
        self._secret = secret
        self._node_id = node_id
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self.failure = ""

    def start(self) -> None:
        """Send the first heartbeat now, raising BenchmarkError when it is refused, and the others in the background."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Send no more."""
        self._stop.set()
        self._thread.join(_CALL_S)

    def _run(self) -> None:
        while not self._stop.wait(_HEARTBEAT_S):
            try:
                self._beat()
                self.failure = ""
            except BenchmarkError as error:
                self.failure = str(error)

    def _beat(self) -> None:
        body = {
            "node_id": self._node_id,
            "status": "available",
            "mode": "spare_on",
            "gpu_util_percent": 10.0,
            "vram_used_mb": 1024,
            "vram_free_mb": 1024,
            "spare_score": 90.0,
            "is_accepting_jobs": True,
            "active_request_count": 0,
            "last_local_error": None,
            "observed_at": datetime.now(UTC).isoformat(),
        }
        post_json(f"{self._control_url}/nodes/heartbeat", self._secret, body)


class Muster:
    """A gateway and a control plane on a fresh database, with a node for each of ``systems``."""

    def __init__(
        self,
        *,
        storage: Storage,
        upstream_url: str,
        work_dir: Path,
        cores: CorePlan,
        systems: Sequence[System] = MUSTER_SYSTEMS,
        profile: str | None = None,
        slots: int = MAX_CONCURRENT,
        max_queue: int = 100_000,
    ) -> None:
        self.storage = storage
        self._slots = slots
        self._work_dir = work_dir
        self._cores = cores
        self._env = {
            **os.environ,
            **_SETTINGS,
            "MUSTER_MAX_QUEUE_LEN": str(max_queue),
            "DATABASE_URL": storage.database_url,
            "REDIS_URL": storage.redis_url,
            "MUSTER_SECRET_KEY": secrets.token_hex(32),
        }
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)  # as ./muster up has it: a start is one of loading
        self._children: list[Child] = []
        self._boxes: dict[System, Child] = {}
        self._heartbeats: Heartbeats | None = None
        self._systems = [system for system in systems if system in MODELS]
        self.port = find_free_port()
        self._control_port = find_free_port()
        self._upstream_url = upstream_url
        self._profile = profile
        suffix = CALLS_SUFFIX if profile == "calls" else SAMPLES_SUFFIX
        self._profile_path = work_dir / f"gateway{suffix}"
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def set_pace(self, system: System, pace: Pace) -> None:
        """Tell the node of ``system`` how to stream; the one called over HTTP is the mock, which is told elsewhere."""
        box = self._boxes.get(system)
        if box is not None:
            box.send_line(msgspec.json.encode(pace).decode())
            box.read_line(_CALL_S)

    def require_healthy(self) -> None:
        """Raise BenchmarkError when a process has ended or a heartbeat was refused."""
        for child in self._children:
            child.require_alive()
        if self._heartbeats is not None and self._heartbeats.failure:
            raise BenchmarkError(f"heartbeats of the node called over HTTP fail: {self._heartbeats.failure}")

    def start_profile(self) -> None:
        """Start the profiler inside the gateway. Raises BenchmarkError when it was not asked for at the start."""
        if self._profile is None:
            raise BenchmarkError("the gateway was not started with a profiler")
        self._profile_path.unlink(missing_ok=True)
        os.kill(self.gateway.popen.pid, signal.SIGUSR1)

    def stop_profile(self) -> Path:
        """Stop the profiler and return the file it wrote."""
        path = self._profile_path
        os.kill(self.gateway.popen.pid, signal.SIGUSR2)
        self.gateway.wait_until(path.exists, "the gateway was to write its profile", _CALL_S)
        return path

    def time_restart(self) -> float:
        """Kill the gateway and return after how many seconds the next one answered a request of the node called over HTTP.

        The nodes that dialled in are ended: nothing else is measured afterwards.
        """
        for child in (*self._boxes.values(), self.gateway):
            self._children.remove(child)
        while self._boxes:
            self._boxes.popitem()[1].stop()
        began = time.monotonic()
        self.gateway.popen.kill()
        self.gateway.stop()
        self._start_gateway()
        self._wait_for_route(System.DIRECT)
        return time.monotonic() - began

    def count_registrations(self, system: System) -> Roll:
        """Kill the gateway; return how many nodes of ``system`` came back to the next one, and how fast: at most _NODES_S."""
        box, wanted = self._boxes[system], BOXES[system].nodes
        self._children.remove(self.gateway)
        self.gateway.popen.kill()
        self.gateway.stop()
        self._start_gateway()
        self.gateway.wait_until(lambda: is_listening(self.port), "the gateway was to listen", _START_S)
        deadline = time.monotonic() + _NODES_S
        while True:
            box.send_line("registered?")
            roll = msgspec.json.decode(box.read_line(_CALL_S), type=Roll)
            if roll.registered == wanted or time.monotonic() > deadline:
                return roll
            self.require_healthy()
            time.sleep(_ASK_AGAIN_S)

    def stop(self) -> None:
        """End everything, nodes first."""
        if self._heartbeats is not None:
            self._heartbeats.stop()
        for child in reversed(self._children):
            child.stop()

    def _start(self) -> None:
        around = self._cores.around
        self._run_step("migrate", [str(ROOT / "manage.py"), "migrate", "--no-input", "-v", "0"])
        models = [MODELS[system] for system in self._systems]
        keys = max(KEYS.get(system, 1) for system in self._systems)
        prepared: dict[str, str] = json.loads(self._run_step("provision", ["-m", "benchmarks.provision", str(keys), *models]))
        self.key = prepared["api_key"]
        self._start_gateway()
        if System.DIRECT in self._systems:
            serve_control = ["-m", "controlplane.serve_control", "--port", str(self._control_port)]
            control = self._spawn("control", serve_control, around)
            control.wait_until(lambda: is_listening(self._control_port), "the control plane was to listen", _START_S)
            self._register_direct(prepared["direct_secret"])
        self.gateway.wait_until(lambda: is_listening(self.port), "the gateway was to listen", _START_S)
        for system, plan in BOXES.items():
            if system in self._systems:
                self._boxes[system] = self._start_box(system, plan, prepared["relay_secret"])
        for system in self._systems:
            self._wait_for_route(system)

    def _start_gateway(self) -> None:
        serve = ["-m", "controlplane.serve_gateway", "--port", str(self.port)]
        if self._profile is not None:
            serve = ["-m", "benchmarks.profiled", "--how", self._profile, "--to", str(self._profile_path), *serve[1:]]
        self.gateway: Child = self._spawn(
            "gateway", serve, self._cores.system, MUSTER_ADMIN_PAGES="0"
        )  # as ./muster up starts it

    def _spawn(
        self, name: str, arguments: Sequence[str], cores: Sequence[int], *, talks: bool = False, **settings: str
    ) -> Child:
        argv, env = [sys.executable, *arguments], {**self._env, **settings}
        child = Child(name, argv, log_dir=self._work_dir, cores=cores, env=env, talks=talks)
        self._children.append(child)
        return child

    def _run_step(self, name: str, arguments: Sequence[str]) -> str:
        argv = [sys.executable, *arguments]
        done = subprocess.run(argv, env=self._env, cwd=ROOT, capture_output=True, text=True, timeout=_STEP_S, check=False)
        if done.returncode != 0:
            tail = "\n".join(f"  | {line}" for line in done.stderr.splitlines()[-15:])
            raise BenchmarkError(f"{name} failed:\n{tail}")
        return done.stdout

    def _register_direct(self, secret: str) -> None:
        control_url = f"http://127.0.0.1:{self._control_port}"
        answer = post_json(
            f"{control_url}/nodes/register",
            secret,
            {
                "node_name": _DIRECT_NODE,
                "owner_name": "bench",
                "public_base_url": self._upstream_url,
                "gpu_name": "none",
                "vram_total_mb": 1024,
                "current_model": MODELS[System.DIRECT],
                "agent_version": "bench",
                "max_concurrent": _DIRECT_CONCURRENCY,
            },
        )
        self._heartbeats = Heartbeats(control_url=control_url, secret=secret, node_id=answer["node_id"])
        self._heartbeats.start()

    def _start_box(self, system: System, plan: BoxPlan, secret: str) -> Child:
        arguments = ["-m", "benchmarks.box", "--gateway", f"ws://127.0.0.1:{self.port}", "--model", MODELS[system]]
        arguments.append(f"--slots={plan.slots or self._slots}")
        if plan.nodes > 1:
            arguments += [f"--nodes={plan.nodes}", f"--gpus={plan.gpus}"]
        arguments += ["--protocol", plan.protocol, *(f"--endpoint={path}" for path in plan.declared)]
        self._env["MUSTER_BOX_SECRET"] = secret
        box = self._spawn(f"box-{system}", arguments, self._cores.around, talks=True)
        try:
            box.read_line(_BOX_S if plan.nodes == 1 else _NODES_S)
        except BenchmarkError as error:
            raise BenchmarkError(f"{error}\nand the gateway's log:\n{self.gateway.read_log_tail()}") from error
        return box

    def _wait_for_route(self, system: System) -> None:
        """Ask until the gateway serves ``system``: it learns of keys, models and nodes by hints and sweeps."""
        model, path = MODELS[system], find_path(system)
        question = {"input": "ready?"} if path == RESPONSES else {"messages": [{"role": "user", "content": "ready?"}]}
        body = {"model": model, "max_tokens": 8, **question}
        deadline = time.monotonic() + _ROUTE_S
        while True:
            try:
                post_json(f"http://127.0.0.1:{self.port}{path}", self.key, body)
                return
            except BenchmarkError as error:
                self.require_healthy()
                if time.monotonic() > deadline:
                    log = self.gateway.read_log_tail()
                    raise BenchmarkError(f"the gateway does not serve {model} on {path}: {error}\n{log}") from error
            time.sleep(0.02)


def post_json(url: str, bearer: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST ``body`` and return the answer. Raises BenchmarkError for any status but 2xx and when nobody answers."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {bearer}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=_CALL_S) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        raise BenchmarkError(f"{url} answered {error.code}: {error.read(300).decode(errors='replace')}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BenchmarkError(f"{url}: {error}") from error
    return answer
